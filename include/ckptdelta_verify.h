/*
 * ckptdelta, verification: finding damage, and rebuilding the catalog from the manifests. Part of ckptdelta.h, which
 * includes it; the same conventions hold.
 */
/* Before the guard, so that this header can be included alone: others of ckptdelta.h need its types. */
#include "ckptdelta.h"

#ifndef CKPTDELTA_VERIFY_H
#define CKPTDELTA_VERIFY_H

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ckd_damage {
    const char *file;   /* path inside the store; "" if none */
    const char *tensor; /* "" if the damage is outside a tensor's block */
    uint64_t block;     /* record number in the file; CKD_NO_OFFSET if none */
    uint64_t offset;    /* in the file; CKD_NO_OFFSET if unknown */
    const char *what;   /* one sentence */
    /*
     * Checkpoints that cannot be loaded: "RUN@STEP" or "RUN@STEP (in the trash)". Unless everything was decoded, some
     * of them may still load.
     */
    const char *const *checkpoints;
    size_t checkpoint_count;
} ckd_damage;

typedef struct ckd_verify_options {
    size_t struct_size;
    const char *run; /* NULL: all runs */
    uint64_t step;   /* with run; CKD_LATEST: the newest. Ignored unless one_step is set. */
    int one_step;
    int quick; /* check only structure and stored checksums; decode nothing */
    ckd_progress_fn on_progress;
    void *progress_context;
    /* 0 < sample < 1: decode about this share of blocks, check the rest as quick does; 0: all. Not with quick. */
    double sample;
    uint64_t seed; /* of the sample; another seed chooses other blocks */
} ckd_verify_options;
#define CKD_VERIFY_OPTIONS_INIT \
    { .struct_size = sizeof(ckd_verify_options) }

typedef struct ckd_verify_result {
    uint64_t checkpoints, files, blocks, bytes; /* checked */
    size_t damage_count;
    ckd_damage *damage;
    uint64_t all_blocks;  /* in these checkpoints; `blocks` counts those decoded */
    uint64_t weak_groups; /* parity groups that repair fewer losses than intended; whole stores only */
} ckd_verify_result;

/*
 * Checks every hash, down to the reconstructed values. Damage is a result, not an error: the call returns CKD_OK and
 * counts it. Errors: INVALID (the sample), NOT_FOUND (no such run or step), BUSY (the run was renamed or its
 * checkpoints replaced meanwhile), CANCELLED, IO, NOMEM.
 */
CKD_API ckd_status ckd_store_verify(ckd_verify_result **out, ckd_store *store,
                                    const ckd_verify_options *options, ckd_error *err);
CKD_API void ckd_verify_result_free(ckd_verify_result *result);

typedef struct ckd_scrub_options {
    size_t struct_size;
    uint64_t bytes_per_s;        /* read limit; 0: none */
    uint64_t older_than_s;       /* skip files that were verified within this time; 0: skip none */
    uint64_t max_time_s;         /* start no further file after this; 0: no limit */
    ckd_progress_fn on_progress; /* stored bytes; if it cancels, verified files stay recorded */
    void *progress_context;
} ckd_scrub_options;
#define CKD_SCRUB_OPTIONS_INIT \
    { .struct_size = sizeof(ckd_scrub_options) }

typedef struct ckd_scrub_result {
    ckd_verify_result *found;        /* files and stored bytes read, and damage, as with quick */
    uint64_t files_left, bytes_left; /* due, but not reached in time */
    uint64_t oldest_ns; /* when the least recently verified file was verified; 0: some file never was */
} ckd_scrub_result;
/*
 * Verifies incrementally. It reads whole chunk files and checks them as `quick` does, beginning with the least recently
 * verified one. Each success is recorded in the catalog, so a scrub can be interrupted at any time; the next one
 * continues. Remaining time goes to parity files, for which nothing is recorded. A rebuild of the catalog forgets the
 * records. A scrub does not block saves or garbage collection. The store must be open for writing. Errors: READ_ONLY,
 * CANCELLED (*out is set: what was found until then), BUSY, NOSPACE, IO, NOMEM.
 */
CKD_API ckd_status ckd_store_scrub(ckd_scrub_result **out, ckd_store *store, const ckd_scrub_options *options,
                                   ckd_error *err);
CKD_API void ckd_scrub_result_free(ckd_scrub_result *result);

typedef struct ckd_rebuild_result {
    uint64_t checkpoints; /* in the new catalog */
    uint64_t skipped;     /* damaged manifests; on_message names each */
} ckd_rebuild_result;
/*
 * Rebuilds the catalog from the manifests. The old one becomes catalog.db.old; only timings and caches are lost. Needs
 * no open handle. Fails with BUSY while another process writes. result may be NULL.
 */
CKD_API ckd_status ckd_store_rebuild(ckd_rebuild_result *result, const char *path,
                                     const ckd_store_options *options, ckd_error *err);

#ifdef __cplusplus
}
#endif
#endif
