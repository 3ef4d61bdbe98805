/*
 * ckptdelta, compaction: rewrites the checkpoints of an old store into a better form. Part of ckptdelta.h, which
 * includes it; the same conventions hold.
 *
 * A compacted checkpoint loads to the same bits as before, in every fidelity, and keeps its id. Each checkpoint is
 * rewritten into new files, which are read back and verified. Then a new generation of its manifest puts them into
 * effect. The old files are removed only after that. A compaction can therefore be killed at any time; another one
 * continues with the rest. Saves and loads of any process may run meanwhile.
 */
#ifndef CKPTDELTA_COMPACT_H
#define CKPTDELTA_COMPACT_H

#include "ckptdelta_retain.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Why a checkpoint is rewritten. Bits; new ones may be added. */
typedef enum ckd_compact_why {
    CKD_COMPACT_DEPTH = 1, /* its chains of deltas are longer than max_depth */
    CKD_COMPACT_FOLD = 2,  /* it is a delta on a checkpoint that the policy deletes */
    /* Its parents became cheaper to load. Only the recorded costs change; nothing is coded again. */
    CKD_COMPACT_STALE = 4,
    CKD_COMPACT_COLD = 8, /* it is old enough to be coded as small as possible */
    /* its small files are merged with others, or checkpoints have left its merged files */
    CKD_COMPACT_PACK = 16
} ckd_compact_why;

typedef struct ckd_compacted {
    ckd_checkpoint checkpoint; /* before the compaction */
    unsigned why;
    ckd_error left;           /* status CKD_OK: done, or would be done; otherwise why it was left unchanged */
    uint64_t blocks, recoded; /* blocks in total, and blocks that are coded again; the others are copied */
    /* stored bytes afterwards, approximate with `estimate`; checkpoint.stored_bytes has those before */
    uint64_t bytes;
    uint32_t depth; /* longest chain of deltas afterwards */
} ckd_compacted;

typedef struct ckd_compaction {
    size_t count;
    ckd_compacted *items;   /* rewritten checkpoints, in the order of work */
    uint64_t checkpoints;   /* examined */
    uint64_t left;          /* items whose status is not CKD_OK */
    uint64_t before, after; /* stored bytes of the items that were done */
    ckd_prune *pruned;      /* with a policy: its final (or would-be) decisions; NULL: without one */
    /* Files of replaced generations that a reader still uses. The next call removes them. */
    uint64_t old_files;
} ckd_compaction;

#define CKD_NO_PACKS UINT64_MAX

typedef struct ckd_compact_options {
    size_t struct_size;
    /* NULL: all runs. Checkpoints of other runs are rewritten if they build on a deleted one. */
    const char *run;
    uint32_t max_depth;   /* limit on the chain of deltas of any block; 0: 16 */
    double max_load_cost; /* of blocks coded again: load cost relative to a standalone block; 0: 4 */
    /* the checkpoints to keep; the others are folded into them, then deleted; NULL: see stored_policies */
    const ckd_policy *policy;
    int stored_policies; /* non-zero: apply the stored policies; 0: keep everything */
    /* for checkpoints that a policy deletes; NULL: as in ckd_store_prune */
    const ckd_delete_options *deletion;
    uint64_t cold_after_s; /* recode, at the archive level, checkpoints saved longer ago than this; 0: none */
    uint32_t cold_but_newest; /* recode all but this many of the newest checkpoints of each run; 0: none */
    /*
     * Merges chunk files smaller than this many bytes, except those of the newest four checkpoints of each run. 0: 256
     * KiB; CKD_NO_PACKS: none. Losing a merged file loses all its checkpoints.
     */
    uint64_t pack_below;
    uint64_t bytes_per_s; /* limit for reading and writing; 0: none */
    int dry_run;          /* do all the work, then discard it: figures are exact, the store is unchanged */
    int estimate;         /* only plan: nothing is coded, and figures are approximate */
    /* Counts stored bytes of the checkpoints to rewrite. If it cancels, finished ones stay rewritten. */
    ckd_progress_fn on_progress;
    void *progress_context;
} ckd_compact_options;
#define CKD_COMPACT_OPTIONS_INIT \
    { .struct_size = sizeof(ckd_compact_options) }

/*
 * Compacts a store that is open for writing. options NULL: the default depth for all runs. A checkpoint may fail to be
 * rewritten because data that it depends on is damaged, or because it was deleted or rewritten meanwhile. It is then
 * left unchanged, and its item says why; that is not an error. out may be NULL; release with ckd_compaction_free. After
 * an error, finished work remains and the store is as sound as before. Memory: a few MiB for each worker, and tables of
 * the positions of blocks. Errors: INVALID (options), NOSPACE (the message says how much is needed), CANCELLED, BUSY,
 * READ_ONLY, CORRUPT and UNSUPPORTED (an unreadable manifest, pin, tag or policy), IO, NOMEM.
 */
CKD_API ckd_status ckd_compact(ckd_compaction **out, ckd_store *store, const ckd_compact_options *options,
                               ckd_error *err);
CKD_API void ckd_compaction_free(ckd_compaction *c);

#ifdef __cplusplus
}
#endif
#endif
