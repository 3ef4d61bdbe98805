/*
 * ckptdelta, compaction: a store that has grown for long is brought into a better form. Part of ckptdelta.h, which includes it; the same
 * conventions hold.
 *
 * Whatever is compacted loads to the same bits as before, in every fidelity. Checkpoints keep their ids; each is rewritten by itself into new files, which are read
 * back and verified before a new generation of its manifest makes them count; only then its old files go. So a compaction can be killed at any
 * time, and a second one goes on with what is left. Saves and loads of any process may be under way.
 */
#ifndef CKPTDELTA_COMPACT_H
#define CKPTDELTA_COMPACT_H

#include "ckptdelta_retain.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What is to be done to a checkpoint. Bits: they can be added. */
typedef enum ckd_compact_why {
    CKD_COMPACT_DEPTH = 1, /* more deltas are to be applied than max_depth */
    CKD_COMPACT_FOLD = 2,  /* it is a delta on one that the policy lets go */
    CKD_COMPACT_STALE =
        4, /* what it builds on has become cheaper to load: it only has to say so, nothing is coded anew */
    CKD_COMPACT_COLD = 8, /* it is old enough to be coded as small as can be */
    CKD_COMPACT_PACK =
        16 /* its files are small, and become one with those of others; or others have gone from them */
} ckd_compact_why;

typedef struct ckd_compacted {
    ckd_checkpoint checkpoint; /* as it was */
    unsigned why;
    ckd_error left; /* status CKD_OK: done (would be done). Else it was left as it is, for this reason */
    uint64_t blocks, recoded; /* all of its blocks, and those that are coded anew; the others are copied */
    uint64_t bytes; /* stored afterwards; checkpoint.stored_bytes is before. With `estimate` only about */
    uint32_t depth; /* deltas to apply at most, afterwards */
} ckd_compacted;

typedef struct ckd_compaction {
    size_t count;
    ckd_compacted *items;   /* what there was to do, in the order of doing */
    uint64_t checkpoints;   /* looked at */
    uint64_t left;          /* items whose status is not CKD_OK */
    uint64_t before, after; /* stored bytes of the items that were done */
    ckd_prune *pruned;      /* with a policy: what it decided in the end, or would; NULL: without one */
    uint64_t
        old_files; /* files of replaced generations that could not be removed yet, because somebody reads; the next call does it */
} ckd_compaction;

#define CKD_NO_PACKS UINT64_MAX

typedef struct ckd_compact_options {
    size_t struct_size;
    const char *run;      /* NULL: all runs. Others are rewritten where they build on what goes */
    uint32_t max_depth;   /* deltas to apply to any block; 0: 16 */
    double max_load_cost; /* of what is coded anew: the load of a block, in loads of it on its own; 0: 4 */
    const ckd_policy *policy; /* what to keep: the rest is folded into what stays, then deleted. NULL: */
    int stored_policies;      /* with the stored ones; else everything is kept */
    const ckd_delete_options *deletion; /* of what a policy lets go; NULL: as ckd_store_prune */
    uint64_t cold_after_s; /* recode what was saved longer ago than this with the archive level; 0: nothing */
    uint32_t cold_but_newest; /* the same for all but so many of the newest of each run; 0: nothing */
    uint64_t
        pack_below; /* chunk files of fewer bytes become one, but for those of each run's newest four checkpoints; 0: 256 KiB; CKD_NO_PACKS: none do. Who copies a packed checkpoint copies the file, and who loses the file loses several */
    uint64_t bytes_per_s; /* to read and write at most; 0: no limit */
    int dry_run;  /* do everything, and then throw it away: figures are exact, the store stays as it is */
    int estimate; /* only plan: nothing is coded, and figures are about what it would come to */
    ckd_progress_fn
        on_progress; /* stored bytes of what is to be rewritten; what was done stays if it cancels */
    void *progress_context;
} ckd_compact_options;
#define CKD_COMPACT_OPTIONS_INIT \
    { .struct_size = sizeof(ckd_compact_options) }

/*
 * Compacts a store that is open for writing. options may be NULL: the default depth for all runs. A checkpoint that cannot be rewritten, because something that it is made of is
 * damaged, or that was deleted or rewritten meanwhile, is left as it is, and told in its item; that is no error. out may be NULL; release with ckd_compaction_free. After an
 * error what was done stays done, and the store is as good as before. Memory: a few MiB for each worker, and tables of where blocks stand. Errors: INVALID (options), NOSPACE (the message says how much
 * is needed), CANCELLED, BUSY, READ_ONLY, CORRUPT and UNSUPPORTED (a manifest, pin, tag or policy that cannot be read), IO, NOMEM.
 */
CKD_API ckd_status ckd_compact(ckd_compaction **out, ckd_store *store, const ckd_compact_options *options,
                               ckd_error *err);
CKD_API void ckd_compaction_free(ckd_compaction *c);

#ifdef __cplusplus
}
#endif
#endif
