/*
 * ckptdelta, planned loads: what a load will read, and loading several tensors at once. Part of ckptdelta.h, which
 * includes it; the same conventions hold.
 */
#ifndef CKPTDELTA_LOADS_H
#define CKPTDELTA_LOADS_H

#include "ckptdelta.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ckd_load_options {
    size_t struct_size;
    /*
     * Memory that the load may hold besides the caller's; 0: 256 MiB. It also takes 8 MiB for each worker (16 for lossy
     * checkpoints, plus 16 MiB in all). Each block of every checkpoint that is opened takes about 500 bytes. The memory
     * holds partly requested blocks, blocks that others are predicted from, and buffers that assemble fused tensors.
     * Blocks stay until they are requested again. With less memory the load reads some bytes more than once.
     */
    uint64_t staging_bytes;
} ckd_load_options;
#define CKD_LOAD_OPTIONS_INIT \
    { .struct_size = sizeof(ckd_load_options) }

/* Like ckd_load_begin, with options, which may be NULL. */
CKD_API ckd_status ckd_load_begin_with(ckd_load **out, ckd_store *store, const ckd_id *checkpoint,
                                       const ckd_load_options *options, ckd_error *err);

/*
 * Why a checkpoint is suspect. Bits; new ones may be added. A suspect checkpoint loads like any other. But a session
 * that restores the newest state passes it over, policies do not count it, and saves are coded against others.
 */
typedef enum ckd_suspect {
    CKD_SUSPECT_NONFINITE = 1 /* values of its model or optimizer became NaN or infinite */
} ckd_suspect;

/*
 * Finds the newest checkpoint of the run before `step` that is not suspect, for callers that prefer an older state to
 * none. If the run has none, it looks in the run that it branched off by name (RUN of RUN~2). Errors: NOT_FOUND,
 * INVALID.
 */
CKD_API ckd_status ckd_store_previous(ckd_checkpoint *out, ckd_store *store, const char *run, uint64_t step,
                                      ckd_error *err);
/*
 * Finds the checkpoint to continue from: `newest` unless it is suspect, else the one that ckd_store_previous finds
 * before it. on_message then names both. out may be `newest`. Errors: STATE (all of them are suspect; a caller can
 * still load one by its step), INVALID; those of ckd_store_check_newest, for a checkpoint between the two. *out is set
 * even then.
 */
CKD_API ckd_status ckd_store_healthy(ckd_checkpoint *out, ckd_store *store, const ckd_checkpoint *newest,
                                     ckd_error *err);
/*
 * Checks whether `newest` is certainly the newest checkpoint of its run. A checkpoint whose manifest is damaged drops
 * out of the catalog, so ckd_store_find may return an older one as CKD_LATEST. It may also return an older one if the
 * newest was committed while the handle was open. Errors: EXISTS (a newer one can be loaded: call ckd_store_find again,
 * which finds it now), CORRUPT or UNSUPPORTED (the manifest of a newer one is damaged; the message names it), BUSY, IO,
 * NOMEM. A newer one whose manifest has vanished is no error, because only a repair can bring it back: on_message
 * names it, once for each handle.
 */
CKD_API ckd_status ckd_store_check_newest(ckd_store *store, const ckd_checkpoint *newest, ckd_error *err);
/*
 * Returns non-zero if a load failed with this error because stored data is damaged, missing or not readable (no
 * permission). An older checkpoint may then be intact.
 */
CKD_API int ckd_error_is_damage(const ckd_error *why);

/* How a checkpoint differs from the requests. Bits; new ones may be added. */
typedef enum ckd_difference {
    CKD_DIFFERS_MISSING = 1,    /* requested, not in the checkpoint */
    CKD_DIFFERS_UNEXPECTED = 2, /* in the checkpoint, not requested */
    CKD_DIFFERS_DTYPE = 4,
    CKD_DIFFERS_SHAPE = 8 /* another global shape */
} ckd_difference;
typedef struct ckd_load_difference {
    ckd_difference kind;
    const char *tensor;
    const char *what; /* "stored as f32, bf16 is asked for", ... */
} ckd_load_difference;

/*
 * The bytes of stored payloads that a load reads, each counted once. Indexes of files are also read, but not counted.
 */
typedef struct ckd_load_reads {
    uint64_t raw_bytes;    /* of the requested values */
    uint64_t needed_bytes; /* read_bytes, scaled to the share of elements that are requested */
    uint64_t read_bytes;   /* of all blocks that must be read, in all checkpoints of the chain */
    uint64_t blocks;       /* blocks that must be read */
    uint32_t depth;        /* longest chain of deltas */
} ckd_load_reads;

typedef struct ckd_load_explanation {
    ckd_load_reads all;
    uint64_t checkpoints; /* checkpoints that blocks are read from */
    size_t count;
    /*
     * In the order of the requests. A block that several requests need counts for the first of them. All 0 if the
     * tensor differs.
     */
    ckd_load_reads *requests;
    size_t difference_count;
    ckd_load_difference *differences;
} ckd_load_explanation;

/*
 * Reports what loading these regions would read, and how the checkpoint differs from the requests. A difference is not
 * an error. No values are read; data and size of the requests are ignored. Release with ckd_load_explanation_free
 * before the load ends. Errors: INVALID (a region outside its tensor), CORRUPT, UNSUPPORTED, IO, NOMEM.
 */
CKD_API ckd_status ckd_load_explain(ckd_load_explanation **out, ckd_load *load,
                                    const ckd_load_request *requests, size_t count, ckd_error *err);
CKD_API void ckd_load_explanation_free(ckd_load_explanation *explanation);

/*
 * Loads all requests or none. Names, dtypes, shapes, regions and sizes are checked before anything is written. allowed:
 * ckd_difference bits to accept; tensors that are missing or differ are then left unwritten. Errors: MISMATCH (the
 * message counts and names the differences), otherwise as ckd_load_tensor.
 */
CKD_API ckd_status ckd_load_all(ckd_load *load, const ckd_load_request *requests, size_t count,
                                unsigned allowed, ckd_error *err);

typedef struct ckd_blob_info {
    const char *name; /* valid as long as the load */
    uint64_t size;    /* bytes */
} ckd_blob_info;
typedef struct ckd_blob_list {
    size_t count;
    ckd_blob_info *items; /* by name */
} ckd_blob_list;
/*
 * Lists the blobs of the checkpoint, for ckd_load_blob. Reads nothing. Release with ckd_blob_list_free. Errors: NOMEM.
 */
CKD_API ckd_status ckd_load_blobs(ckd_blob_list **out, const ckd_load *load, ckd_error *err);
CKD_API void ckd_blob_list_free(ckd_blob_list *list);

/* Returns the payload bytes that this load has read so far from files. Bytes from other ranks do not count. */
CKD_API uint64_t ckd_load_bytes_read(const ckd_load *load);

#ifdef __cplusplus
}
#endif
#endif
