/* Declarations that only the files of engine/compact/ use. */
#ifndef ENGINE_COMPACT_INTERNAL_H
#define ENGINE_COMPACT_INTERNAL_H

#include "engine/compact/compact.h"

#define COMPACT_VIEWS_MAX 256 /* open views, approximately */

/* ---- compact.c ---- */
/* Does what ckd_compact does, within limits. *over: work is left for a later call (move_max was reached). */
ckd_status compact_within(ckd_compaction **out, bool *over, ckd_store *store,
                          const ckd_compact_options *options, const compact_limits *limits, ckd_error *err);

/* ---- items.c ---- */
/* Joins the items of each checkpoint, and corrects the sums. Errors: NOMEM. */
ckd_status compact_join_items(ckd_compaction *out, ckd_error *err);

/* ---- state.c ---- */
/* Was move_max reached? */
bool compact_limit_reached(const compaction *c);
/* Do the limits allow work on this run? */
bool compact_allows_run(const compaction *c, const char *run);
bool compact_is_victim(const compaction *c, const ckd_id *checkpoint);
const load_table *compact_table(const compaction *c, const ckd_id *checkpoint);
/* Records the loads of a checkpoint's blocks. Takes ownership of `blocks`, even on failure. Errors: NOMEM. */
ckd_status compact_record_loads(compaction *c, const ckd_id *checkpoint, block_load *blocks, size_t count,
                                ckd_error *err);
/* Counts bytes that were read or written, waits if that was too fast, and reports progress. Errors: CANCELLED. */
ckd_status compact_throttle(compaction *c, uint64_t size, uint64_t done, ckd_error *err);
/* Reports progress of a compaction, the context. Errors: CANCELLED. */
ckd_status compact_report_progress(void *context, ckd_error *err);
/*
 * Does the error concern one checkpoint only (it is damaged, or another process was quicker)? Then the others go on.
 */
bool compact_is_local_error(ckd_status status, const ckd_error *why);
/*
 * Remembers files that were written and read back, so that they are not read again before old ones go. Errors: NOMEM.
 */
ckd_status compact_record_proven(compaction *c, const file_ref *files, size_t count, ckd_error *err);
/* Closes all views. Views that were opened before something was published may be out of date. */
void compact_close_views(compaction *c);

/* ---- early_versions.c ---- */
/*
 * Replaces manifests of early versions by manifests that name all files that a load reads, also in the trash. An
 * early manifest leaves those files to the manifests of its dependencies, which are about to be rewritten. Takes the
 * publish lock. Errors: as manifest_set_read and manifest_entry_upgrade.
 */
ckd_status compact_upgrade_early(compaction *c, ckd_error *err);

/*
 * Nanoseconds to decode the block without what it builds on, as engine/decode/decode.h counts them. The work of a lossy
 * block depends on its factors, that of an exact delta on the number of its changes. Neither is known here: the average
 * of the chain is used.
 */
double compact_own_work(const record *r);
/* Does the block build on a victim? */
bool compact_builds_on_victim(const compaction *c, const view *v, const record *r);

/* ---- retained_bytes.c ---- */
/* Counts the checkpoint, which stays, as a reader of the victims' records that a load of it reads. Errors: NOMEM. */
ckd_status compact_count_readers(compaction *c, const manifest *m, ckd_error *err);
/*
 * Sums the bytes of the victims' records that a load of the block reads. Each record is divided by the number of its
 * readers. Errors: as closure_visit_block.
 */
ckd_status compact_retained_bytes(uint64_t *cost, compaction *c, const view *v, const view_block *b,
                                  ckd_error *err);

/* ---- manifest_update.c ---- */
/*
 * Opens a checkpoint twice: its published manifest, and a draft. The draft names the newest files of the listed
 * checkpoints that its blocks build on, where these hold everything that is needed. Errors: as views_get and
 * closure_visit.
 */
ckd_status compact_open(const view **draft, const manifest **published, compaction *c, const ckd_id *id,
                        ckd_error *err);
/*
 * Reads the records of the draft that a load by the published manifest does not read: the files that it names may have
 * the only intact ones. Each record is read once in a compaction, and none of the `count` files `written`, which were
 * just read back. Not thread-safe. Errors: CORRUPT, IO, CANCELLED, NOMEM.
 */
ckd_status compact_read_moved(compaction *c, const view *draft, const file_ref *written, size_t count,
                              ckd_error *err);
/*
 * Does the draft name other files than the published manifest? Publishing it then releases files that nobody else
 * reads.
 */
bool compact_is_stale(const rewrite_plan *p);
/*
 * Publishes the draft's manifest as the next generation. Own files stay as they are. NOT_FOUND and EXISTS: the
 * checkpoint was deleted or rewritten meanwhile, or a file was removed. Other errors: IO, NOSPACE, NOMEM.
 */
ckd_status compact_update_manifest(uint64_t *stored, compaction *c, const rewrite_plan *p, ckd_error *err);
/*
 * Publishes m as the next generation, if the checkpoint is still of the generation before and all files of m exist.
 * Takes the publish lock. *undecided: see compact_intent.
 */
ckd_status compact_publish_manifest(uint64_t *stored, bool *undecided, compaction *c, const manifest *m,
                                    ckd_error *err);

/* ---- recode.c ---- */
/* A record on its way into a new file. */
typedef struct compact_item {
    const record *from;
    const chunk *chunk;
    size_t block;  /* index in the view; SIZE_MAX: not a block */
    bool is_coded; /* it was recoded: dependencies and payload are the item's */
    record to;
    dependency dependencies[4]; /* of a recoded block */
    bytes payload;
} compact_item;
ckd_status compact_worker_init(compact_worker *w, compaction *c, ckd_error *err);
void compact_worker_free(compact_worker *w);
/*
 * Recodes the block as its plan says. Fills item->to and item->payload, and sets item->is_coded. is_coded stays
 * false if the present coding cannot be improved on. The values are compared with their content hash.
 */
ckd_status compact_recode_block(compact_item *item, compaction *c, const rewrite_plan *p, compact_worker *w,
                                ckd_error *err);

/* ---- lattice.c ---- */
/* A block's values as integers on a lattice: standalone, and as differences to other values. */
typedef struct lattice_try {
    ckd_dtype dtype;
    uint64_t count;
    symbols_grid grid;
    bool small;                               /* code as small as possible, and take the time */
    const void *values;                       /* in `dtype` */
    const void *base_values;                  /* NULL: there is nothing to take differences to */
    bool standalone_possible, delta_possible; /* payloads in w->standalone and w->delta decode to `values` */
} lattice_try;
ckd_status compact_lattice(lattice_try *t, compact_worker *w, ckd_error *err);

/* ---- publish.c ---- */
/*
 * Carries out the plan of a checkpoint. *stored: its bytes afterwards. A checkpoint that would get no smaller stays
 * as it is, and its plan->why becomes 0. Whatever happens, one generation is complete. NOT_FOUND and EXISTS: the
 * checkpoint was deleted or rewritten meanwhile. CORRUPT and UNSUPPORTED: it cannot be read. Other errors: IO,
 * NOSPACE, NOMEM, CANCELLED.
 */
ckd_status compact_rewrite(uint64_t *stored, compaction *c, rewrite_plan *plan, ckd_error *err);

#endif
