/*
 * ckptdelta, loads that are planned: what a load will read, and several tensors at once. Part of ckptdelta.h, which includes it; the
 * same conventions hold.
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
     * What the load may hold besides the caller's memory, 8 MiB for each worker (of lossy checkpoints 16, and 16 MiB in all), and
     * about 500 bytes for each block of every checkpoint that is opened (where everything stands): blocks of which only a part was asked for,
     * those that others are predicted from, until they are asked for again; and what fused tensors are put together in. 0: 256 MiB;
     * less makes it read more than once.
     */
    uint64_t staging_bytes;
} ckd_load_options;
#define CKD_LOAD_OPTIONS_INIT \
    { .struct_size = sizeof(ckd_load_options) }

/* ckd_load_begin with options, which may be NULL. */
CKD_API ckd_status ckd_load_begin_with(ckd_load **out, ckd_store *store, const ckd_id *checkpoint,
                                       const ckd_load_options *options, ckd_error *err);

/*
 * For who wants an older state rather than none. The newest checkpoint of the run before `step`; if it has none, of the run that it is a branch of by name (RUN of RUN~2). Errors:
 * NOT_FOUND, INVALID.
 */
CKD_API ckd_status ckd_store_previous(ckd_checkpoint *out, ckd_store *store, const char *run, uint64_t step,
                                      ckd_error *err);
/*
 * Is this the newest checkpoint of its run for sure? A manifest that is damaged falls out of the catalog, and what ckd_store_find gives as CKD_LATEST is an older one then: CORRUPT or
 * UNSUPPORTED, naming it. Others: IO, NOMEM.
 */
CKD_API ckd_status ckd_store_check_newest(ckd_store *store, const ckd_checkpoint *newest, ckd_error *err);
/* Does a load that failed with this error mean that what is stored is damaged, missing, or not to be read (no permission)? Not 0: an older checkpoint may be all right. */
CKD_API int ckd_error_is_damage(const ckd_error *why);

/* How a checkpoint differs from what is asked for. Bits: they can be added. */
typedef enum ckd_difference {
    CKD_DIFFERS_MISSING = 1,    /* asked for, not in the checkpoint */
    CKD_DIFFERS_UNEXPECTED = 2, /* in the checkpoint, not asked for */
    CKD_DIFFERS_DTYPE = 4,
    CKD_DIFFERS_SHAPE = 8 /* another global shape */
} ckd_difference;
typedef struct ckd_load_difference {
    ckd_difference kind;
    const char *tensor;
    const char *what; /* "stored as f32, bf16 is asked for", ... */
} ckd_load_difference;

/* What a load reads. Bytes are payloads as stored, each counted once; indexes of files, which are read in any case, are not among them. */
typedef struct ckd_load_reads {
    uint64_t raw_bytes;    /* of the values asked for */
    uint64_t needed_bytes; /* of what is read, the share of elements that are asked for */
    uint64_t read_bytes;   /* of all blocks that have to be read, in all checkpoints of the chain */
    uint64_t blocks;       /* as many */
    uint32_t depth;        /* deltas to apply at most */
} ckd_load_reads;

typedef struct ckd_load_explanation {
    ckd_load_reads all;
    uint64_t checkpoints; /* that blocks are read from */
    size_t count;
    ckd_load_reads *
        requests; /* in their order; what several need is counted at the first of them. All 0 where a tensor differs */
    size_t difference_count;
    ckd_load_difference *differences;
} ckd_load_explanation;

/*
 * Says what loading these regions would read, and how the checkpoint differs from what is asked for, which is no error. No values
 * are read, and requests need no memory: data and size are not looked at.
 * Release with ckd_load_explanation_free, before the load ends. Errors: INVALID (a region outside its tensor), CORRUPT, UNSUPPORTED, IO, NOMEM.
 */
CKD_API ckd_status ckd_load_explain(ckd_load_explanation **out, ckd_load *load,
                                    const ckd_load_request *requests, size_t count, ckd_error *err);
CKD_API void ckd_load_explanation_free(ckd_load_explanation *explanation);

/*
 * Loads all of them, or nothing: that names, dtypes, shapes, regions and sizes are right is found out before anything is written. allowed:
 * the ckd_difference bits that are fine; of tensors that are missing or differ nothing is written then. Errors: MISMATCH (the message
 * counts and names the differences), else as ckd_load_tensor.
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
/* The blobs of the checkpoint, for ckd_load_blob. Reads nothing. Release with ckd_blob_list_free. Errors: NOMEM. */
CKD_API ckd_status ckd_load_blobs(ckd_blob_list **out, const ckd_load *load, ckd_error *err);
CKD_API void ckd_blob_list_free(ckd_blob_list *list);

/* Payload bytes that this load has read so far: from files, not from other ranks. */
CKD_API uint64_t ckd_load_bytes_read(const ckd_load *load);

#ifdef __cplusplus
}
#endif
#endif
