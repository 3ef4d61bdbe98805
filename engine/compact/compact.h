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
 *   files.c            writes the new chunk files of a checkpoint, reads them back, and proves the closure
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
 *  4. A next generation makes a load read a record in another file only if the record there is intact. The file in which
 *     it was read before may have the only intact one.
 */
#ifndef ENGINE_COMPACT_COMPACT_H
#define ENGINE_COMPACT_COMPACT_H

#include "base/float_mode.h"
#include "engine/common/common.h"
#include "engine/encode/encode.h"
#include "engine/retain/retain.h"
#include "engine/store/store.h"

/* Cost of loading a block, including the deltas below it. */
typedef struct block_load {
    uint32_t depth;
    load_cost chain;
} block_load;

/*
 * Load costs of the blocks of a checkpoint that was rewritten, or would be in a dry run. The index is the block's
 * number in the checkpoint's views, which is the same in all generations.
 */
typedef struct load_table {
    ckd_id checkpoint;
    size_t count;
    block_load *blocks;
} load_table;

/* Scratch memory of one worker. */
typedef struct compact_worker {
    block_job job;
    bytes values, base_values, now_floats, base_floats, q, at, bits, standalone, delta, check;
    lattice_work lattice;
} compact_worker;

/* Limits of a compaction besides its options. */
typedef struct compact_limits {
    /* Only space that deleted checkpoints left in files of this run is reclaimed. NULL: the options alone decide. */
    const char *waste_run;
    /* A file is rewritten if more than this share of it is dead. If all files are below it, so is their total. */
    uint32_t dead_percent;
    uint32_t timeout_ms; /* for locks */
    /*
     * No further rewrite starts once more bytes than this were read and written. Merges have a separate limit of the
     * same size.
     */
    uint64_t move_max;
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
    hash_set readers;  /* of victims' records: how many remaining checkpoints read each */
    hash_set replaced; /* files of generations that this compaction has replaced */
    hash_set intact;   /* records that were read intact in files that a new manifest will name */
    /* Files whose condition this compaction knows: it wrote them and read them back, or read them. */
    checked_files checked;
    load_table *tables; /* sorted by id */
    size_t table_count, table_capacity;
    manifest_set *all;        /* the manifests at the beginning */
    uint64_t begun_ns, moved; /* bytes read and written, for the rate limit */
    /* The part of `moved` that led to a rewrite. A checkpoint that gets no smaller must not hold up the others. */
    uint64_t spent;
    uint64_t done, to_be_done; /* stored bytes, for the progress callback */
    float_mode callers_mode;
} compaction;

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
     * A draft. For the checkpoints that this one builds on, it names their newest files if these hold everything
     * needed.
     */
    const view *view;
    const manifest *published; /* the manifest in force; owned by the view cache */
    ckd_id *ancestors;         /* ancestors that stay, nearest first, up to compact_max_ancestors */
    size_t ancestor_count;
    block_rewrite *rewrites; /* by block of the view */
    unsigned why;            /* reasons to rewrite (CKD_COMPACT_*); 0: nothing to do */
    size_t recoded;
    uint32_t depth;           /* after the rewrite */
    uint64_t estimated_bytes; /* stored bytes afterwards, estimated until it is done */
} rewrite_plan;
/*
 * Plans the rewrite of a checkpoint. cold: exact blocks are coded as small as possible. Release with
 * rewrite_plan_free, also after failures. Errors: those of opening what the checkpoint builds on, CORRUPT (blocks
 * build on each other in a cycle), NOMEM.
 */
ckd_status compact_plan_rewrite(rewrite_plan *out, compaction *c, const ckd_id *checkpoint, bool cold,
                                ckd_error *err);
void rewrite_plan_free(rewrite_plan *p);
/* How many ancestors are tried as a block's new base. */
static inline size_t compact_max_ancestors(const compaction *c) {
    return 4 * (size_t)c->options.max_depth + 64;
}
/* Computes the load of block i, which is copied, from the current loads of the blocks that it builds on. */
ckd_status compact_load_of(block_load *out, compaction *c, const rewrite_plan *p, size_t i, ckd_error *err);

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
    bool *named;     /* for each of them: a published manifest names it */
    size_t file_count;
    file_lock *lock;
    bool undecided; /* a manifest may have kept its name after a failure; recovery decides */
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
ckd_status compact_intent_make_ids(compact_intent *i, const manifest *like, ckd_error *err);
/*
 * Makes the intent of a rewrite durable. Until it ends, the files of the checkpoint, and of what it may come to
 * build on, are not removed. NOT_FOUND: one of these checkpoints was deleted meanwhile. Other errors: BUSY, IO,
 * NOSPACE, NOMEM.
 */
ckd_status compact_intent_begin(compact_intent *i, const rewrite *r, ckd_error *err);
/*
 * Does the same for the files that the manifests of these checkpoints name. about: the checkpoint whose run and step
 * the intent shows in messages.
 */
ckd_status compact_intent_begin_for(compact_intent *i, const compaction *c, const ckd_checkpoint *about,
                                    const ckd_id *ids, size_t count, ckd_error *err);
/*
 * Removes new files that no manifest names, then the intent. If one of them could not be removed, or a manifest is
 * undecided, the intent stays for recovery.
 */
void compact_intent_end(compact_intent *i, const ckd_store *store);
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

/* ---- gather.c ---- */
/*
 * Reports a checkpoint whose own files were merged, or that was left out. was: the checkpoint before the merge; stored:
 * its bytes afterwards. left, why: CKD_OK, or the reason why its manifest stays unchanged.
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
