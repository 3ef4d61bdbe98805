/*
 * Compaction: rewriting checkpoints so that they build on others, have shorter chains, or lie in fewer files. Every
 * checkpoint loads to the same bits as before. Internal to engine/.
 *
 *   compact.c          the call: options, order, what is removed afterwards
 *   state.c            what the other files ask of a compaction: what stays, loads, views, limits, pace
 *   early_versions.c   completes manifests of early versions first
 *   rewrite_plan.c     one checkpoint: which blocks are copied, which recoded
 *   retained_bytes.c   records of deleted checkpoints: is it cheaper to keep them, or to recode what builds on them?
 *   recode.c           recodes one block
 *   lattice.c          recodes values that lie on a lattice
 *   files.c            writes the new chunk files of a checkpoint
 *   intent.c           the intent of a rewrite: files to come, files that are needed
 *   publish.c          publishes the next generation, updates the catalog
 *   manifest_update.c  makes a manifest name newer files of the checkpoints that its blocks build on
 *   gather.c           finds small and wasteful chunk files, and decides which are merged
 *   merge.c            copies the live records of such files into one
 *   dead_share.c       after a deletion by a policy: compacts if the share of dead bytes is too large
 *
 * Invariants:
 *  1. A published manifest names every file that a load reads. This was proven on the files on disk, down to the
 *     last record, without other manifests. So the checkpoint loads whatever becomes of others, and whoever else
 *     compacts.
 *  2. A recoded block was read back from its file and decoded, and has the content hash that it had.
 *  3. A copied payload was compared with its checksum first. Damage is never made to look right.
 */
#ifndef ENGINE_COMPACT_H
#define ENGINE_COMPACT_H

#include "engine/encode/block_coder.h"
#include "base/float_mode.h"
#include "engine/common/hash_set.h"
#include "engine/store/manifest_set.h"

/* Cost of loading a block, including the deltas below it. */
typedef struct block_load {
    uint32_t depth;
    load_cost chain;
} block_load;

/*
 * Loads of the blocks of a checkpoint that was rewritten, or would be in a dry run. The index is the block's number
 * in the checkpoint's views, which is the same in all generations.
 */
typedef struct load_table {
    ckd_id checkpoint;
    size_t count;
    block_load *blocks;
} load_table;

/* Scratch memory of one worker. */
typedef struct compact_worker {
    block_job job;
    bytes values, before, now_floats, before_floats, q, at, bits, standalone, delta, check;
    lattice_work lattice;
} compact_worker;

#define COMPACT_VIEWS_MAX 256 /* open views, approximately */

/* Limits of a compaction besides its options. */
typedef struct compact_limits {
    /* Only space that deleted checkpoints left in files of this run is reclaimed. NULL: the options alone decide. */
    const char *waste_of;
    /* A file is rewritten if more than this share of it is dead. If all files are below it, so is their total. */
    uint32_t dead_percent;
    uint32_t timeout_ms; /* for locks */
    uint64_t move_max;   /* no further rewrite starts once more bytes were read and written */
} compact_limits;

typedef struct compaction {
    ckd_store *store;
    ckd_compact_options options;
    compact_limits limits;
    /* Views of the checkpoints at work and of what they build on. */
    view_cache views;
    columns_cache columns;
    content_index nothing; /* empty: a block is not deduplicated within its own checkpoint */
    compact_worker *workers;
    uint32_t worker_count;
    /* Listed checkpoints that the policy does not delete, sorted by id. All others are victims. */
    ckd_id *remaining;
    size_t remaining_count;
    hash_set readers;   /* of victims' records: how many remaining checkpoints read each */
    hash_set replaced;  /* files of generations that this compaction has replaced */
    load_table *tables; /* sorted by id */
    size_t table_count, table_capacity;
    manifest_set *all;        /* the manifests at the beginning */
    uint64_t begun_ns, moved; /* bytes read and written, for the rate limit */
    /* The part of `moved` that led to a rewrite. A checkpoint that gets no smaller must not hold up the others. */
    uint64_t spent;
    uint64_t done, to_be_done; /* stored bytes, for the progress callback */
    float_mode callers_mode;
} compaction;

/* ---- compact.c ---- */
/* Does what ckd_compact does, within limits. *over: work is left for a later call (move_max was reached). */
ckd_status compact_within(ckd_compaction **out, bool *over, ckd_store *store,
                          const ckd_compact_options *options, const compact_limits *limits, ckd_error *err);

/* ---- state.c ---- */
/* Was move_max reached? */
bool compact_is_over(const compaction *c);
/* Do the limits allow work on this run? */
bool compact_is_asked(const compaction *c, const char *run);
bool compact_is_victim(const compaction *c, const ckd_id *checkpoint);
const load_table *compact_table(const compaction *c, const ckd_id *checkpoint);
/* Records the loads of a checkpoint's blocks. Takes ownership of `blocks`, even on failure. Errors: NOMEM. */
ckd_status compact_record_loads(compaction *c, const ckd_id *checkpoint, block_load *blocks, size_t count,
                                ckd_error *err);
/* Counts bytes that were read or written, waits if that was too fast, and reports progress. Errors: CANCELLED. */
ckd_status compact_throttle(compaction *c, uint64_t size, uint64_t done, ckd_error *err);
/* Reports progress of a compaction, the context. Errors: CANCELLED. */
ckd_status compact_tell(void *context, ckd_error *err);
/*
 * Does the error concern one checkpoint only (it is damaged, or another process was quicker)? Then the others go on.
 */
bool compact_concerns_one(ckd_status status, const ckd_error *why);
/* Closes all views. Views that were opened before something was published may be out of date. */
void compact_forget_views(compaction *c);

/* ---- early_versions.c ---- */
/*
 * Replaces manifests of early versions by manifests that name all files that a load reads, also in the trash. An
 * early manifest leaves those files to the manifests of its dependencies, which are about to be rewritten. Takes the
 * publish lock. Errors: as manifest_set_read and manifest_entry_name_files.
 */
ckd_status compact_upgrade_early(compaction *c, ckd_error *err);

/* ---- rewrite_plan.c ---- */
typedef enum rewrite_state { REWRITE_UNKNOWN, REWRITE_ASKED, REWRITE_KNOWN } rewrite_state;

/* The fate of one block in a rewrite. */
typedef struct block_rewrite {
    rewrite_state state;
    unsigned why;         /* reasons to recode it (CKD_COMPACT_*); 0: it is copied */
    block_load load;      /* after the rewrite; an estimate until the block is recoded */
    const view *new_base; /* it may become a delta on this; NULL: it is coded standalone */
    const view_tensor *new_base_tensor;
    block_load new_base_load;
    /* Its share of victims' bytes if it stays as it is. UINT64_MAX: it must not stay. */
    uint64_t retained_bytes;
} block_rewrite;

typedef struct rewrite_plan {
    /*
     * A draft. It names the newest files of what the checkpoint builds on, where these hold everything that is
     * needed.
     */
    const view *view;
    const manifest *published; /* the manifest in force; owned by the view cache */
    ckd_id *ancestors;         /* ancestors that stay, nearest first */
    size_t ancestor_count;
    block_rewrite *rewrites; /* by block of the view */
    unsigned why;            /* reasons to rewrite (CKD_COMPACT_*); 0: nothing to do */
    size_t recoded;
    uint32_t depth; /* after the rewrite */
    uint64_t about; /* stored bytes afterwards, estimated until it is done */
} rewrite_plan;
/*
 * Plans the rewrite of a checkpoint. cold: exact blocks are coded as small as possible. Release with
 * rewrite_plan_free, also after failures. Errors: those of opening what the checkpoint builds on, CORRUPT (blocks
 * build on each other in a cycle), NOMEM.
 */
ckd_status compact_plan_rewrite(rewrite_plan *out, compaction *c, const ckd_id *checkpoint, bool cold,
                                ckd_error *err);
void rewrite_plan_free(rewrite_plan *p);
/* Computes the load of block i, which is copied, from the current loads of the blocks that it builds on. */
ckd_status compact_load_of(block_load *out, compaction *c, const rewrite_plan *p, size_t i, ckd_error *err);

/*
 * Nanoseconds to decode the block alone, as engine/decode/cost.h counts them. A lossy block's work depends on
 * factors that are not known here: the average of its chain is used.
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
ckd_status compact_code(compact_item *item, compaction *c, const rewrite_plan *p, compact_worker *w,
                        ckd_error *err);
/* Is a delta of `delta` bytes worth its load? alone: bytes of the block coded standalone. */
bool compact_pays(const compaction *c, const load_cost *chain, const load_cost *base, uint64_t delta,
                  uint64_t alone);

/* ---- lattice.c ---- */
/* A block's values as integers on a lattice: standalone, and as differences to other values. */
typedef struct lattice_try {
    ckd_dtype dtype;
    uint64_t count;
    symbols_grid grid;
    bool small;                               /* code as small as possible, and take the time */
    const void *values;                       /* in `dtype` */
    const void *before;                       /* NULL: there is nothing to take differences to */
    bool standalone_possible, delta_possible; /* payloads in w->standalone and w->delta decode to `values` */
} lattice_try;
ckd_status compact_lattice(lattice_try *t, compact_worker *w, ckd_error *err);

/* ---- files.c: shared records in the new files, a set; each is written once ---- */
typedef struct written_record {
    hash128 content;
    uint32_t kind; /* 0: the slot is free */
} written_record;
typedef struct compact_written {
    written_record *slots; /* open addressing */
    size_t count, capacity;
} compact_written;
void compact_written_free(compact_written *w);

/* ---- intent.c ---- */
typedef struct compact_intent {
    ckd_id writer;
    file_ref *files; /* the new files */
    size_t file_count;
    file_lock *lock;
    bool undecided; /* a manifest got its name and may not have been taken back; recovery decides */
} compact_intent;

/* ---- files.c ---- */
typedef struct rewrite {
    compaction *c;
    rewrite_plan *plan;
    compact_intent *intent;
    manifest m;                 /* of the next generation */
    bool *coded;                /* by block of the plan's view: it was recoded */
    compact_written written;    /* shared records in the new files */
    size_t dependency_capacity; /* of m.dependencies */
} rewrite;
/* Makes ids for new files, as many as `like` has own files. compact_intent_end frees them. */
ckd_status compact_intent_name(compact_intent *i, const manifest *like, ckd_error *err);
/*
 * Makes the intent of a rewrite durable. Until it ends, the files of the checkpoint, and of what it may come to
 * build on, are not removed. NOT_FOUND: one of these checkpoints was deleted meanwhile. Other errors: BUSY, IO,
 * NOSPACE, NOMEM.
 */
ckd_status compact_intent_begin(compact_intent *i, const rewrite *r, ckd_error *err);
/*
 * Does the same for the files that the manifests of these checkpoints name. about: run and step that the intent
 * gives, for messages.
 */
ckd_status compact_intent_begin_for(compact_intent *i, const compaction *c, const ckd_checkpoint *about,
                                    const ckd_id *ids, size_t count, ckd_error *err);
/*
 * Removes new files that no manifest names, then the intent. If one of them could not be removed, or a manifest is
 * undecided, the intent stays for recovery.
 */
void compact_intent_end(compact_intent *i, const ckd_store *store, bool committed);
/*
 * Writes the new files under the ids of the intent, and gives them their names, durably. Sets sizes, roots and
 * dependencies of the manifest.
 */
ckd_status compact_write_files(rewrite *r, ckd_error *err);
/*
 * Reads the new files back: all payloads, and the values of recoded blocks. It reads from the files that the
 * manifest is going to name. So the manifest is complete and proven afterwards.
 */
ckd_status compact_verify(rewrite *r, ckd_error *err);

/* ---- publish.c ---- */
/*
 * Carries out the plan of a checkpoint. *stored: its bytes afterwards. A checkpoint that would get no smaller stays
 * as it is, and its plan->why becomes 0. Whatever happens, one generation is complete. NOT_FOUND and EXISTS: the
 * checkpoint was deleted or rewritten meanwhile. CORRUPT and UNSUPPORTED: it cannot be read. Other errors: IO,
 * NOSPACE, NOMEM, CANCELLED.
 */
ckd_status compact_rewrite(uint64_t *stored, compaction *c, rewrite_plan *plan, ckd_error *err);

/* ---- gather.c ---- */
/*
 * Reports a checkpoint whose own files were merged, or that was left out. was: the checkpoint before; stored: its
 * bytes afterwards. left, why: CKD_OK, or why its manifest stays as it is.
 */
typedef ckd_status (*gathered_fn)(void *context, const ckd_checkpoint *was, uint64_t stored, ckd_status left,
                                  const ckd_error *why, ckd_error *err);
/*
 * Copies live records out of chunk files that are small, or that have more dead bytes than the limits allow, into
 * common files. Publishes manifests that name these. order: `count` listed newest generations. With dry_run or
 * estimate it only calls `gathered`. Errors: IO, NOSPACE, NOMEM, CANCELLED, those of `gathered`.
 */
ckd_status compact_gather(compaction *c, manifest_entry *const *order, size_t count, gathered_fn gathered,
                          void *context, ckd_error *err);

/* ---- dead_share.c ---- */
/*
 * Compacts the run of a policy that has just deleted checkpoints, if the run's share of dead bytes is above the
 * policy's limit. It runs at the end of a save. So it does not wait for locks, and moves about as many bytes as a
 * save writes. Failures only reach on_message. The caller holds no locks.
 */
void compact_after_deletion(ckd_store *store, const ckd_policy *applied);

#endif
