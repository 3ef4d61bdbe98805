/*
 * ckptdelta, reports: what a store holds and how much space it takes. Part of ckptdelta.h, which includes it; the same
 * conventions hold.
 */
#ifndef CKPTDELTA_REPORT_H
#define CKPTDELTA_REPORT_H

#include "ckptdelta.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ckd_usage {
    char name[CKD_RUN_MAX + 1]; /* of a run, role or fidelity */
    uint64_t checkpoints;
    uint64_t raw_bytes, stored_bytes;
} ckd_usage;

/* Size of the tensors of one role in one checkpoint. stored_bytes: payloads, record headers and index shares. */
typedef struct ckd_role_bytes {
    uint64_t elements, raw_bytes, stored_bytes;
} ckd_role_bytes;
typedef struct ckd_checkpoint_roles {
    ckd_role_bytes roles[CKD_ROLE_OTHER + 1]; /* indexed by ckd_role */
} ckd_checkpoint_roles;

/* One tensor over all checkpoints of a run in which it has this role. stored_bytes as in ckd_role_bytes. */
typedef struct ckd_tensor_usage {
    const char *run, *name; /* valid as long as the report */
    ckd_role role;
    uint64_t checkpoints, elements, raw_bytes, stored_bytes;
} ckd_tensor_usage;

typedef struct ckd_report {
    uint64_t raw_bytes;    /* size of full copies of all checkpoints */
    uint64_t stored_bytes; /* apparent size of all files of the store: the sum of the parts below */
    uint64_t chunk_bytes, manifest_bytes, catalog_bytes;
    /* evictable copies that keep the newest checkpoint of each run cheap to load */
    uint64_t materialized_bytes;
    uint64_t other_bytes;
    size_t run_count, role_count, checkpoint_count;
    ckd_usage *by_run; /* by name; stored_bytes: chunk files and manifests */
    /*
     * stored_bytes: payloads, record headers and index shares; "overhead" is the rest of the chunk files of listed
     * checkpoints
     */
    ckd_usage *by_role;
    ckd_checkpoint *by_checkpoint; /* by run name, then step, with runs in the order of by_run */
    /* chunk files and manifests of unlisted checkpoints: the trash, and saves in progress */
    uint64_t unlisted_bytes;
    uint64_t file_count;         /* chunk files and manifests of listed checkpoints */
    ckd_checkpoint_roles *roles; /* one for each item of by_checkpoint */
    size_t fidelity_count, tensor_count;
    ckd_usage *by_fidelity;      /* stored_bytes as in ckd_checkpoint */
    ckd_tensor_usage *by_tensor; /* by run name; unordered within a run */
    uint64_t parity_bytes;       /* parity files; part of stored_bytes */
} ckd_report;
/*
 * Returns what the store holds and how much space it takes. It reads the catalog, the sizes of files, and the indexes
 * of all chunk files, which takes a second for some 10,000 checkpoints. A checkpoint whose files cannot be read has no
 * tensors in it, and on_message says so. Release with ckd_report_free. Errors: CORRUPT, BUSY (files are being removed
 * for longer than the store waits), IO, NOMEM.
 */
CKD_API ckd_status ckd_store_report(ckd_report **out, ckd_store *store, ckd_error *err);
CKD_API void ckd_report_free(ckd_report *report);

typedef struct ckd_tensor_diff {
    const char *name;
    ckd_role role;
    ckd_dtype dtype;
    int comparable;  /* 0: only in one of the two, or another dtype or shape; the figures are then 0 */
    const char *why; /* "only in A", "only in B", "dtype", "shape", or "" */
    uint64_t elements, changed; /* changed: elements with different bits */
    /* L2 norms and largest difference over finite values; 0 for integers and bool */
    double norm_a, norm_b, norm_diff, max_diff;
} ckd_tensor_diff;
typedef struct ckd_diff {
    size_t count;
    ckd_tensor_diff *items;
} ckd_diff;
typedef struct ckd_diff_options {
    size_t struct_size;
    ckd_progress_fn on_progress; /* raw bytes compared */
    void *progress_context;
} ckd_diff_options;
#define CKD_DIFF_OPTIONS_INIT \
    { .struct_size = sizeof(ckd_diff_options) }
/*
 * Compares two checkpoints of a store tensor by tensor. options may be NULL. Release with ckd_diff_free. Errors:
 * INVALID (the options), CANCELLED, those of ckd_load_tensor.
 */
CKD_API ckd_status ckd_store_diff(ckd_diff **out, ckd_store *store, const ckd_id *a, const ckd_id *b,
                                  const ckd_diff_options *options, ckd_error *err);
CKD_API void ckd_diff_free(ckd_diff *diff);

#ifdef __cplusplus
}
#endif
#endif
