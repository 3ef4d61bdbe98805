/*
 * Compaction: rewriting checkpoints so that they build on others, or are stored otherwise, and load to the same bits. Internal to engine/.
 *
 *   compact.c          the call: what is wanted, in which order, what goes afterwards
 *   early_versions.c   manifests of early versions, before anything else
 *   order.c            in which order, for those that build on each other
 *   rewrite_plan.c     one checkpoint: what becomes of each of its blocks
 *   retained_bytes.c   what deleted checkpoints have left: is it smaller than coding anew what builds on it?
 *   recode.c           one block, coded anew
 *   lattice.c          the same of values on a lattice
 *   files.c            its new files
 *   record_set.c       which shared records these have
 *   intent.c           what a rewrite writes and needs
 *   publish.c          next generation, catalog
 *   manifest_update.c  a manifest that names newer files of what its blocks build on
 *   gather.c           which files are small or mostly waste, and go together
 *   merge.c            records that are still read, out of such files into one
 *   old_generations.c  generations that were replaced
 *   dead_share.c       after a policy has deleted: are there so many dead bytes that it is worth it?
 *
 * Invariants:
 *  1. A manifest that is published names every file that a load reads: that was proven on what is on disk, to the last record, and no other manifest has a
 *     part in it. So whatever becomes of other checkpoints, and whoever else compacts, it loads.
 *  2. What is coded anew was read back from its file, decoded, and has the content hashes that it had.
 *  3. Payloads that are copied were compared with their checksums: damage is never made to look right.
 */
#ifndef ENGINE_COMPACT_H
#define ENGINE_COMPACT_H

#include "engine/encode/block_coder.h"
#include "base/float_mode.h"
#include "engine/common/hash_set.h"
#include "engine/store/manifest_set.h"

/* What loading a block takes, deltas below it included. */
typedef struct block_load {
    uint32_t depth;
    load_cost chain;
} block_load;

/* Of a checkpoint that was rewritten, or would be: by number of the block in its views, which are the same in all generations. */
typedef struct load_table {
    ckd_id checkpoint;
    size_t count;
    block_load *blocks;
} load_table;

/* Scratch of one worker. */
typedef struct compact_worker {
    block_job job;
    bytes values, before, now_floats, before_floats, q, at, bits, standalone, delta, check;
    lattice_work lattice;
} compact_worker;

#define COMPACT_VIEWS_MAX 256 /* open at a time; about */

/* What a compaction may do, besides its options. */
typedef struct compact_limits {
    const char *
        waste_of; /* only what deleted checkpoints left in files of this run goes; NULL: all that the options say */
    uint32_t
        dead_percent; /* in files that are rewritten, at least: it is below that of all of them afterwards */
    uint32_t timeout_ms; /* for locks */
    uint64_t move_max;   /* nothing more is rewritten once more bytes than that were read and written */
} compact_limits;

typedef struct compaction {
    ckd_store *store;
    ckd_compact_options options;
    compact_limits limits;
    view_cache views; /* of what is being looked at, and what it builds on */
    columns_cache columns;
    content_index nothing; /* blocks are not looked for in their own checkpoint */
    compact_worker *workers;
    uint32_t worker_count;
    ckd_id *remaining; /* listed, and not to be deleted by the policy; by id. All others are victims */
    size_t remaining_count;
    hash_set readers;   /* of records of victims */
    hash_set replaced;  /* files of generations that this compaction has replaced */
    load_table *tables; /* by id */
    size_t table_count, table_capacity;
    manifest_set *all;        /* what there was at the beginning */
    uint64_t begun_ns, moved; /* bytes read and written, for the limit of the rate */
    uint64_t
        spent; /* of these, for what was rewritten in the end: one that gets no smaller keeps nothing else waiting */
    uint64_t done, to_be_done; /* stored bytes, for the callback */
    float_mode callers_mode;
} compaction;

/* ---- compact.c ---- */
/* ckd_compact, within limits. *over: work is left to a next one (move_max). */
ckd_status compact_within(ckd_compaction **out, bool *over, ckd_store *store,
                          const ckd_compact_options *options, const compact_limits *limits, ckd_error *err);
bool compact_is_over(const compaction *c);
/* Is the run one that the limits are about? */
bool compact_is_asked(const compaction *c, const char *run);
bool compact_is_victim(const compaction *c, const ckd_id *checkpoint);
const load_table *compact_table(const compaction *c, const ckd_id *checkpoint);
/* Takes over `blocks`, also on failure. */
ckd_status compact_record_loads(compaction *c, const ckd_id *checkpoint, block_load *blocks, size_t count,
                                ckd_error *err);
/* So many bytes were read or written: waits if that was too fast, tells the caller. CANCELLED. */
ckd_status compact_throttle(compaction *c, uint64_t size, uint64_t done, ckd_error *err);
/* Damage of a checkpoint, or others were quicker: that is its own matter, and the rest can go on. */
bool compact_concerns_one(ckd_status status, const ckd_error *why);
/* Views that were opened before something was published may be old. */
void compact_forget_views(compaction *c);

/* ---- early_versions.c ---- */
/*
 * Gives every checkpoint, those in the trash included, a manifest that names all files that a load reads: manifests of early versions leave that to those of their
 * dependencies, which are going to be rewritten. Takes the publish lock. Errors: as manifest_set_read and manifest_entry_name_files.
 */
ckd_status compact_upgrade_early(compaction *c, ckd_error *err);

/* ---- order.c ---- */
/*
 * Sorts `count` of n, those first that build on others: a checkpoint comes before its parent and its dependencies. If they came from each other in a circle, the order stays. Uses `place`.
 * Errors: NOMEM.
 */
ckd_status compact_order(manifest_entry **order, size_t count, manifest_set *n, ckd_error *err);

/* ---- rewrite_plan.c ---- */
typedef enum rewrite_state { REWRITE_UNKNOWN, REWRITE_ASKED, REWRITE_KNOWN } rewrite_state;

/* What becomes of a block. */
typedef struct block_rewrite {
    rewrite_state state;
    unsigned why;         /* it is coded anew; 0: it is copied */
    block_load load;      /* afterwards; of what is coded anew about, until it is */
    const view *new_base; /* it may be coded as a delta on that; NULL: on its own */
    const view_tensor *new_base_tensor;
    block_load new_base_load;
    uint64_t
        retained_bytes; /* its share of bytes of victims, if it stays as it is; UINT64_MAX: it must not */
} block_rewrite;

typedef struct rewrite_plan {
    const view *
        view; /* a draft: it names the newest files of what the checkpoint builds on, where these hold all that is needed */
    const manifest *published; /* what counts now; the cache's */
    ckd_id *ancestors;         /* checkpoints that it came from, and that stay; the nearest first */
    size_t ancestor_count;
    block_rewrite *rewrites; /* by block of the view */
    unsigned why;            /* 0: nothing is to be done */
    size_t recoded;
    uint32_t depth; /* afterwards */
    uint64_t about; /* stored bytes afterwards, estimated */
} rewrite_plan;
/* Errors: those of opening what the checkpoint builds on, CORRUPT (blocks that build on each other in a circle), NOMEM. */
ckd_status compact_plan_rewrite(rewrite_plan *out, compaction *c, const ckd_id *checkpoint, bool cold,
                                ckd_error *err);
void rewrite_plan_free(rewrite_plan *p);
/* Of block i, which is copied, from what those that it builds on are known to take now. */
ckd_status compact_load_of(block_load *out, compaction *c, const rewrite_plan *p, size_t i, ckd_error *err);

/* Nanoseconds to decode it alone, as engine/decode/cost.h counts them. What a lossy one takes depends on its factors: about what each of its chain takes. */
double compact_own_work(const record *r);
/* Does the block build on what goes? */
bool compact_builds_on_victim(const compaction *c, const view *v, const record *r);

/* ---- retained_bytes.c ---- */
/* Counts the checkpoint, which stays, as a reader of the records of victims that a load of it reads. Errors: NOMEM. */
ckd_status compact_count_readers(compaction *c, const manifest *m, ckd_error *err);
/* The bytes of records of victims that a load of the block reads, each divided by the number of its readers. Errors: as closure_visit_block. */
ckd_status compact_retained_bytes(uint64_t *cost, compaction *c, const view *v, const view_block *b,
                                  ckd_error *err);

/* ---- manifest_update.c ---- */
/*
 * Opens a checkpoint as compaction sees it: its published manifest, and a draft whose older files are the newest of those listed checkpoints that its blocks build on, as
 * far as these hold all that is needed. Errors: as views_get and closure_visit.
 */
ckd_status compact_open(const view **draft, const manifest **published, compaction *c, const ckd_id *id,
                        ckd_error *err);
/* Does the draft name other files than the published manifest? Then publishing it lets files go that nobody else reads. */
bool compact_is_stale(const rewrite_plan *p);
/*
 * Publishes the draft's manifest as the next generation: own files stay as they are. NOT_FOUND and EXISTS: the checkpoint was deleted or rewritten meanwhile, or one of the files was
 * removed; IO, NOSPACE, NOMEM.
 */
ckd_status compact_update_manifest(uint64_t *stored, compaction *c, const rewrite_plan *p, ckd_error *err);
/* Publishes m, a next generation, if the checkpoint is still of the one before, and all of its files are there. Takes the publish lock. *undecided: as compact_intent. */
ckd_status compact_publish_manifest(uint64_t *stored, bool *undecided, compaction *c, const manifest *m,
                                    ckd_error *err);

/* ---- recode.c ---- */
/* A record on its way into a new file. */
typedef struct compact_item {
    const record *from;
    const chunk *chunk;
    size_t block;  /* of the view; SIZE_MAX: no block */
    bool is_coded; /* anew: dependencies and payload are its own */
    record to;
    dependency dependencies[4]; /* of what was coded anew */
    bytes payload;
} compact_item;
ckd_status compact_worker_init(compact_worker *w, columns_cache *columns, ckd_error *err);
void compact_worker_free(compact_worker *w);
/*
 * Fills item->to and payload with the block as its plan wants it, and sets is_coded; leaves that false if what the block has cannot be bettered. Its values
 * are compared with their hash.
 */
ckd_status compact_code(compact_item *item, compaction *c, const rewrite_plan *p, compact_worker *w,
                        ckd_error *err);
/* Is a delta of `delta` bytes worth its load? */
bool compact_pays(const compaction *c, const load_cost *chain, const load_cost *base, uint64_t delta,
                  uint64_t alone);

/* ---- lattice.c ---- */
/* A block's values as integers: on its own, and as differences to others. Buffers are the worker's. */
typedef struct lattice_try {
    ckd_dtype dtype;
    uint64_t count;
    symbols_grid grid;
    bool small;                               /* takes its time */
    const void *values;                       /* in their dtype */
    const void *before;                       /* NULL: nothing to differ from */
    bool standalone_possible, delta_possible; /* payloads in w->alone and w->delta, which give these values */
} lattice_try;
ckd_status compact_lattice(lattice_try *t, compact_worker *w, ckd_error *err);

/* ---- record_set.c: what the new files have, so that it is written once ---- */
typedef struct written_record {
    hash128 content;
    uint32_t kind; /* 0: the slot is free */
} written_record;
typedef struct compact_written {
    written_record *slots; /* open addressing */
    size_t count, capacity;
} compact_written;
/* Would a reader that looks for the group or side record find one of these? */
bool compact_written_has(const compact_written *w, const record *r);
/* Errors: NOMEM. */
ckd_status compact_written_add(compact_written *w, const record *r, ckd_error *err);
void compact_written_free(compact_written *w);

/* ---- intent.c ---- */
typedef struct compact_intent {
    ckd_id writer;
    file_ref *files; /* the new ones */
    size_t file_count;
    file_lock *lock;
    bool undecided; /* a manifest was named, and may not have been taken back: recovery will see */
} compact_intent;

/* ---- files.c ---- */
typedef struct rewrite {
    compaction *c;
    rewrite_plan *plan;
    compact_intent *intent;
    manifest m;                 /* of the next generation */
    bool *coded;                /* by block of the plan's view: it is not a mere copy */
    compact_written written;    /* shared records */
    size_t dependency_capacity; /* of m.dependencies */
} rewrite;
/* Names for the new files, as many as `like` has; freed by compact_intent_end. */
ckd_status compact_intent_name(compact_intent *i, const manifest *like, ckd_error *err);
/*
 * Makes the intent of a rewrite durable: the files of the checkpoint, and of what it may come to build on, stay until it has ended. NOT_FOUND: one was deleted
 * meanwhile; BUSY, IO, NOSPACE, NOMEM.
 */
ckd_status compact_intent_begin(compact_intent *i, const rewrite *r, ckd_error *err);
/* The same of what the manifests of these checkpoints name; about: whom messages name. */
ckd_status compact_intent_begin_for(compact_intent *i, const compaction *c, const ckd_checkpoint *about,
                                    const ckd_id *ids, size_t count, ckd_error *err);
/* What was written for nothing goes, then the intent; if some may be left, the intent stays, for recovery. */
void compact_intent_end(compact_intent *i, const ckd_store *store, bool committed);
/* Writes the new files, whose ids are those of the intent, and names them, durable. Sets sizes, roots and dependencies of the manifest. */
ckd_status compact_write_files(rewrite *r, ckd_error *err);
/*
 * Reads the new files back: all payloads, and the values of what was coded anew, from the files that the manifest is going to name, which thereby is complete and
 * proven.
 */
ckd_status compact_verify(rewrite *r, ckd_error *err);

/* ---- publish.c ---- */
/*
 * Rewrites the checkpoint of the plan; *stored: its bytes afterwards. NOT_FOUND and EXISTS: it was deleted or rewritten meanwhile; CORRUPT and UNSUPPORTED: it
 * cannot be read; IO, NOSPACE, NOMEM, CANCELLED. One that would get no smaller stays as it is, and its plan says that nothing is to be done. Whatever happens, one generation is complete.
 */
ckd_status compact_rewrite(uint64_t *stored, compaction *c, rewrite_plan *plan, ckd_error *err);

/* ---- gather.c ---- */
/* What became of a checkpoint whose records, or others that it reads, were gathered. */
typedef ckd_status (*gathered_fn)(void *context, const ckd_checkpoint *was, uint64_t stored, ckd_status left,
                                  const ckd_error *why, ckd_error *err);
/*
 * Copies what is still read out of chunk files that are small, or of which more is dead than the limits say, into common files, and publishes manifests that name these. Of `order`, `count`
 * newest generations that are listed. With dry_run and estimate only `gathered` is called. Errors: IO, NOSPACE, NOMEM, CANCELLED, those of `gathered`.
 */
ckd_status compact_gather(compaction *c, manifest_entry *const *order, size_t count, gathered_fn gathered,
                          void *context, ckd_error *err);

/* ---- old_generations.c ---- */
/* Removes generations that newer ones have replaced, if nobody reads. *left: files that stay. Waits so long for readers to end. */
ckd_status compact_remove_old(uint64_t *left, const compaction *c, uint32_t timeout_ms, ckd_error *err);

/* ---- dead_share.c ---- */
/*
 * Compacts the run of a policy that has deleted something, if the run's share of dead bytes is above what the policy says. It happens in the shadow of a save: without waiting for locks, and with about as many bytes
 * as a save writes. Failures only reach on_message. Without locks held.
 */
void compact_after_deletion(ckd_store *store, const ckd_policy *applied);

#endif
