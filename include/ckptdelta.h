/*
 * ckptdelta: delta-compressed checkpoint storage. The header to include; it includes the others of this folder.
 *
 *   save:  tensors -> predict + residual -> entropy code -> chunk file -> manifest (the commit) -> catalog
 *   load:  catalog -> chain -> read the blocks that intersect -> decode, apply deltas -> your memory
 *
 * Conventions, valid for every call unless its comment says otherwise:
 *
 * - A call returns CKD_OK or the status that also stands in `err`. `err` may be NULL. It is the caller's, is only
 *   written on failure, and needs no release.
 * - Outputs come first. On failure they are NULL or zeroed, so that releasing them is always allowed; every
 *   release function accepts NULL.
 * - Memory passed in stays the caller's and is free for reuse when the call returns. Strings are UTF-8, NUL-terminated.
 * - Handles are opaque. One handle must not be used by two threads at once; different handles may, of the same store
 *   as well. Any number of processes may open a store; they coordinate through locks in it.
 * - Sizes and offsets are bytes, lengths and regions are elements, times are nanoseconds since 1970 (UTC).
 * - Options are structs that begin with their size: start from the INIT macro, then set what you need. Zero means the
 *   default everywhere. Fields are only ever appended. A struct_size too small for any version is INVALID.
 * - Stores, groups of ranks, ids and outputs must not be NULL unless a call says so; this is not checked everywhere. A save, load or session that is NULL, as
 *   after a call that failed, ends with INVALID, and with nothing where there is no status.
 * - The library never exits, aborts, prints or changes signal handlers or locale. The caller's rounding mode and treatment of denormals
 *   do not matter and are left as they are; read and progress callbacks run in them.
 */
#ifndef CKPTDELTA_H
#define CKPTDELTA_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define CKD_VERSION_MAJOR 0
#define CKD_VERSION_MINOR 1
#define CKD_VERSION_PATCH 0

#if defined(__GNUC__)
#define CKD_API __attribute__((visibility("default")))
#else
#define CKD_API
#endif

/* ------------------------------------------------------------------------------------------ status and errors */

/* Numbers are stable; new ones are appended. */
typedef enum ckd_status {
    CKD_OK = 0,
    CKD_E_INVALID = 1,     /* an argument or option makes no sense */
    CKD_E_NOMEM = 2,       /* out of memory */
    CKD_E_IO = 3,          /* the operating system refused; sys_errno says why */
    CKD_E_NOSPACE = 4,     /* disk or quota full; nothing was committed */
    CKD_E_NOT_FOUND = 5,   /* no such store, run, step, tensor or blob */
    CKD_E_EXISTS = 6,      /* this run already has this step, or the output exists */
    CKD_E_CORRUPT = 7,     /* stored bytes are damaged or missing */
    CKD_E_UNSUPPORTED = 8, /* written by a newer version, or by a feature this build lacks */
    CKD_E_BUSY = 9,        /* another process holds the lock for longer than the timeout */
    CKD_E_READ_ONLY = 10,  /* the store was opened for reading, or lies on a read-only file system */
    CKD_E_STATE = 11,      /* the call does not fit the state of the handle */
    CKD_E_MISMATCH = 12,   /* dtype, shape or coverage differ from what was asked for */
    CKD_E_CANCELLED = 13,  /* a progress callback asked to stop */
    CKD_E_DEVICE = 14      /* a device (GPU) is not there, or refused a call; nothing was committed */
} ckd_status;

#define CKD_NAME_MAX       1023                /* bytes of a tensor or blob name */
#define CKD_RUN_MAX        128                 /* bytes of a run name */
#define CKD_MAX_DIMS       16                  /* dimensions of a tensor */
#define CKD_MAX_ELEMENTS   (UINT64_C(1) << 40) /* elements of a tensor */
#define CKD_BLOCK_ELEMENTS (UINT64_C(1) << 18) /* elements of a block at most */
#define CKD_BLOB_MAX       (UINT64_C(1) << 30) /* bytes of a blob */
#define CKD_NO_OFFSET      UINT64_MAX

/* What went wrong, where. Fields that do not apply are "" or CKD_NO_OFFSET or 0. */
typedef struct ckd_error {
    ckd_status status;
    int sys_errno;     /* errno of the failed system call, else 0 */
    uint64_t offset;   /* byte offset in `file` */
    char message[512]; /* one sentence: what, why, and what to do */
    char tensor[256];  /* FQN, cut if longer */
    char file[512];    /* path, cut on the left if longer */
} ckd_error;

/* A stable upper-case name such as "CORRUPT". Never NULL; thread-safe. */
CKD_API const char *ckd_status_name(ckd_status status);
/* "0.1.0". */
CKD_API const char *ckd_version(void);

/* -------------------------------------------------------------------------------------------------- vocabulary */

/* Numbers are stored in files: stable, appended only. */
typedef enum ckd_dtype {
    CKD_DTYPE_NONE = 0,
    CKD_F64 = 1,
    CKD_F32 = 2,
    CKD_F16 = 3,
    CKD_BF16 = 4,
    CKD_F8_E4M3 = 5,
    CKD_F8_E5M2 = 6,
    CKD_I64 = 7,
    CKD_I32 = 8,
    CKD_I16 = 9,
    CKD_I8 = 10,
    CKD_U64 = 11,
    CKD_U32 = 12,
    CKD_U16 = 13,
    CKD_U8 = 14,
    CKD_BOOL = 15
} ckd_dtype;

/* Bytes of one element, 0 for an unknown dtype. */
CKD_API size_t ckd_dtype_size(ckd_dtype dtype);
/* "f32", "bf16", ...; or "?". */
CKD_API const char *ckd_dtype_name(ckd_dtype dtype);

typedef enum ckd_role {
    CKD_ROLE_AUTO = 0, /* from the name: ckd_role_of */
    CKD_ROLE_WEIGHT = 1,
    CKD_ROLE_EXP_AVG = 2,
    CKD_ROLE_EXP_AVG_SQ = 3,
    CKD_ROLE_MASTER = 4,
    CKD_ROLE_OTHER = 5
} ckd_role;

CKD_API const char *ckd_role_name(ckd_role role);

typedef enum ckd_fidelity {
    CKD_FIDELITY_DEFAULT = 0, /* exact */
    CKD_EXACT = 1,            /* bit for bit */
    CKD_NEAR = 2,  /* lossy, with a bounded error: resuming is indistinguishable from an exact resume */
    CKD_COARSE = 3 /* lossy: pruned and quantised, for the smallest checkpoints */
} ckd_fidelity;
CKD_API const char *ckd_fidelity_name(ckd_fidelity fidelity);

typedef enum ckd_kind {
    CKD_BASE = 1,      /* depends on no other checkpoint */
    CKD_DELTA = 2,     /* some block is coded against an older checkpoint */
    CKD_LOSSY_BASE = 3 /* a lossy checkpoint written without a parent */
} ckd_kind;
CKD_API const char *ckd_kind_name(ckd_kind kind);

typedef enum ckd_codec {
    CKD_CODEC_AUTO = 0, /* the smallest of what follows, tried where it can win */
    CKD_CODEC_RAW = 1,  /* no compression (deltas are off, too) */
    CKD_CODEC_ZSTD = 2, /* zstd on values, byte planes and residuals only */
    CKD_CODEC_LZ4 = 3   /* LZ4 on values, byte planes and residuals only: fastest */
} ckd_codec;

/* A checkpoint's identity: 128 random bits, never reused, never changed. All zero: none. */
typedef struct ckd_id {
    uint8_t bytes[16];
} ckd_id;
#define CKD_ID_TEXT 33
/* 32 hexadecimal digits and NUL into `text`. */
CKD_API void ckd_id_text(char text[CKD_ID_TEXT], const ckd_id *id);

/* Which elements of a tensor one rank holds, in global coordinates. */
typedef enum ckd_region_kind {
    CKD_REGION_WHOLE = 0, /* all of it */
    CKD_REGION_BOX =
        1, /* offsets[d] <= i_d < offsets[d] + lengths[d]; ndim of each; row-major inside the box */
    CKD_REGION_FLAT =
        2 /* elements start ... start + count - 1 of the tensor's row-major order (FSDP, ZeRO) */
} ckd_region_kind;

typedef struct ckd_region {
    ckd_region_kind kind;
    uint64_t offsets[CKD_MAX_DIMS];
    uint64_t lengths[CKD_MAX_DIMS];
    uint64_t start, count;
} ckd_region;

/* ------------------------------------------------------------------------------------------------------- store */

typedef struct ckd_store ckd_store;

typedef enum ckd_open_mode {
    CKD_OPEN_READ = 0, /* changes nothing, not even a stale catalog */
    CKD_OPEN_WRITE =
        1, /* an existing store; cleans up after writers that died, adds to the catalog what it lacks */
    CKD_OPEN_CREATE =
        2 /* like WRITE, and creates the store, and directories above it, if it is absent or empty */
} ckd_open_mode;

/* Told what is done and what there is to do, both in bytes of raw tensor data. Non-zero return cancels the call. */
typedef int (*ckd_progress_fn)(void *context, uint64_t done, uint64_t total);
/*
 * Told things a person may want to know and no call fails for (a catalog that was rebuilt, leftovers removed). Must not call the
 * library: the store's locks are held.
 */
typedef void (*ckd_message_fn)(void *context, const char *message);

typedef struct ckd_store_options {
    size_t struct_size;
    uint32_t lock_timeout_ms; /* how long to wait for a lock that another process holds; 0: 30000 */
    uint32_t threads;         /* workers for coding and decoding; 0: one per core, at most 16 */
    ckd_message_fn on_message;
    void *message_context;
} ckd_store_options;
#define CKD_STORE_OPTIONS_INIT \
    { .struct_size = sizeof(ckd_store_options) }

/*
 * Opens the store in directory `path`. options may be NULL.
 * For writing, the path may have at most 493 bytes, made absolute and links resolved.
 * Errors: NOT_FOUND (no store there), UNSUPPORTED (another format version), INVALID (a path that is too long, or that of
 * something else), READ_ONLY, CORRUPT, BUSY, IO, NOMEM.
 */
CKD_API ckd_status ckd_store_open(ckd_store **out, const char *path, ckd_open_mode mode,
                                  const ckd_store_options *options, ckd_error *err);
/* Closes the store. Saves and loads begun on it must have ended. */
CKD_API void ckd_store_close(ckd_store *store);

/* One checkpoint as the catalog knows it. */
typedef struct ckd_checkpoint {
    ckd_id id;
    ckd_id parent;       /* zero for a base */
    ckd_id resumed_from; /* zero: not known to have been resumed */
    char run[CKD_RUN_MAX + 1];
    uint64_t step;
    uint32_t generation; /* of its manifest: compaction publishes higher ones */
    ckd_kind kind;
    ckd_fidelity fidelity;
    uint32_t lossy_resumes; /* resumes from lossy checkpoints behind this state */
    uint32_t depth;         /* deltas to apply at most, over all blocks */
    uint32_t world;         /* ranks that wrote it */
    uint64_t tensors;
    uint64_t raw_bytes;    /* of all tensors and blobs */
    uint64_t stored_bytes; /* of its chunk files and manifest */
    double load_cost;      /* estimated cost of loading it, in loads of an exact base of the same state */
    uint64_t created_ns;
    double metric; /* NaN: none */
    char metric_name[32];
} ckd_checkpoint;

typedef struct ckd_checkpoint_list {
    size_t count;
    ckd_checkpoint *items; /* by run name, then step */
} ckd_checkpoint_list;

/* All checkpoints, or those of one run (run may be NULL). The list is the caller's: ckd_checkpoint_list_free. */
CKD_API ckd_status ckd_store_list(ckd_checkpoint_list **out, ckd_store *store, const char *run,
                                  ckd_error *err);
CKD_API void ckd_checkpoint_list_free(ckd_checkpoint_list *list);

#define CKD_LATEST UINT64_MAX
/*
 * Finds one checkpoint. run NULL: the only run of the store (INVALID, with the names, if there are several).
 * step CKD_LATEST: the newest committed, by step. Errors: NOT_FOUND, INVALID.
 */
CKD_API ckd_status ckd_store_find(ckd_checkpoint *out, ckd_store *store, const char *run, uint64_t step,
                                  ckd_error *err);

typedef struct ckd_tensor_info {
    const char *name; /* valid as long as the list */
    ckd_role role;
    ckd_dtype dtype;
    uint32_t ndim;
    uint64_t shape[CKD_MAX_DIMS];
    uint64_t elements;
    uint32_t shards;
    uint64_t raw_bytes,
        stored_bytes; /* stored: payloads, record headers and this tensor's part of the index */
    const char *
        coding; /* "raw", "standalone", "delta", "step", "same", "copy", "cast", "mixed"; valid as long as the list */
    uint32_t depth; /* deltas to apply at most */
    double rel_l2,
        max_error; /* against what was saved; 0 in `exact`; NaN: not known. Measured to three digits */
    double direction_change; /* the same for m / (sqrt(v) + eps), relative L2; NaN: not known */
    uint64_t nonfinite;      /* NaNs and infinities, which are kept; counted by lossy saves */
    double largest_update_given,
        largest_update; /* the largest |m| / (sqrt(v) + eps) of what was saved, and of what a load gives; of the moment that was saved last, of others NaN. Off by 2 % at most */
} ckd_tensor_info;

typedef struct ckd_tensor_list {
    size_t count;
    ckd_tensor_info *items; /* in the order saved */
} ckd_tensor_list;

/*
 * The tensors of a checkpoint. Release with ckd_tensor_list_free. Empty, with a message, if its chunk files would have to be read for it and cannot be. Errors: NOT_FOUND,
 * BUSY (files are being removed for longer than the store waits), IO, NOMEM.
 */
CKD_API ckd_status ckd_store_tensors(ckd_tensor_list **out, ckd_store *store, const ckd_id *checkpoint,
                                     ckd_error *err);
CKD_API void ckd_tensor_list_free(ckd_tensor_list *list);

/* -------------------------------------------------------------------------------------------------------- save */

typedef struct ckd_save ckd_save;

typedef enum ckd_on_duplicate {
    CKD_DUPLICATE_ERROR = 0, /* EXISTS */
    CKD_DUPLICATE_SAME_OK =
        1, /* fine if the stored content is identical, else EXISTS; INVALID if world > 1 */
    CKD_DUPLICATE_BRANCH =
        2 /* continue as run~2 (~3, ...), a branch off the last checkpoint before this step */
} ckd_on_duplicate;

typedef struct ckd_save_options {
    size_t struct_size;
    const char *run; /* required: 1 to 128 of A-Z a-z 0-9 . _ - ~, not starting with a dot or dash */
    uint64_t step;
    ckd_fidelity fidelity;
    int base; /* non-zero: depend on no other checkpoint */
    const char *
        parent_run; /* with parent_step: the checkpoint to delta against; NULL: the run's newest before step */
    uint64_t parent_step; /* CKD_LATEST: the newest of parent_run */
    /*
     * With resumed_from_step: the checkpoint that training was resumed from; NULL: none. If that is the parent, a lossy fidelity codes
     * this save more finely: what other deltas leave out, later ones bring, but a resume in between would make it lost.
     */
    const char *resumed_from_run;
    uint64_t resumed_from_step;
    ckd_on_duplicate on_duplicate;
    ckd_codec codec;
    int level; /* of zstd (1 ... 19) or LZ4 (1 ... 12); 0: 3 for zstd, fast for LZ4 */
    double
        max_load_cost; /* bound on the cost of loading it, in base loads; 0: 4. Parts by themselves, and saves that leave out what the
                             parent had, may take twice that in processor time, lossy ones thrice */
    double
        newest_load_cost; /* the same while it is its run's newest, by evictable copies; 0: 2, or 1.5 if lossy */
    uint32_t rank, world; /* world 0: 1. Each rank saves its regions into a file of its own */
    ckd_id
        checkpoint_id; /* world > 1: the same for all ranks (ckd_id_new by the coordinator); zero: a new one */
    const char *metric_name; /* recorded with the checkpoint, e.g. "val_loss"; NULL: none */
    double metric;
    uint64_t total_bytes; /* what will be saved, for the progress callback; 0: not known */
    ckd_progress_fn on_progress;
    void *progress_context;
    ckd_fidelity role_fidelity[6]; /* indexed by ckd_role: of tensors with this role, instead of `fidelity` */
    int effort;                    /* 1 (fast) ... 9 (small): of lossy fidelities; 0: 5 */
    double
        target_bits; /* lossy: bits for each parameter's weight and moments together, in deltas; 0: as the fidelity has it */
    double target_ratio; /* the same, as a ratio to the raw bytes; at most one of both */
    double
        max_error; /* lossy: bound on the error of every value, in root mean squares of its matrix (of a stack, each one;
                       of a large one, each 16 Mi elements); 0: none */
    double
        step_scale; /* lossy: weights and first moments in this many times the fidelity's steps, 1/64 ... 64, without a target; 0: 1 */
    /*
     * What the save may hold besides the caller's memory, 24 MiB for each worker (of several; 8 if there is one, lossy 16), and about 600 bytes for each block that it
     * writes and for each of the parent's (where everything stands); 0: 256 MiB. First and second moments that optimizer steps are predicted from are held in a file without a name in the
     * store beyond that. Lossy tensors take 16 bytes of it an element, of as many as fit at once, 1 Mi to 16 Mi: with less than
     * 256 MiB, matrices of more are cut into smaller parts that have steps and factors of their own, and so are stored as other values, just
     * as near, in a few more bytes.
     */
    uint64_t staging_bytes;
} ckd_save_options;
#define CKD_SAVE_OPTIONS_INIT \
    { .struct_size = sizeof(ckd_save_options) }

/* A new random id. Errors: IO. */
CKD_API ckd_status ckd_id_new(ckd_id *out, ckd_error *err);

/*
 * Begins a save: makes the intent durable and opens this rank's chunk file. Any number of saves may be under way in
 * a store; commits are serialised. Errors: EXISTS (this run has this step), CORRUPT or UNSUPPORTED (a manifest that cannot
 * be read has this run and step: err->file names it, and a branch is possible), NOT_FOUND (the parent), INVALID, READ_ONLY,
 * NOSPACE, IO, NOMEM.
 */
CKD_API ckd_status ckd_save_begin(ckd_save **out, ckd_store *store, const ckd_save_options *options,
                                  ckd_error *err);

/*
 * Hands out `count` elements from `first` on, in the order of the region, into `to`. Returns CKD_OK, or the status
 * with which ckd_save_tensor is to fail (it may fill err). Called from the thread that called ckd_save_tensor.
 */
typedef ckd_status (*ckd_read_fn)(void *context, uint64_t first, uint64_t count, void *to, ckd_error *err);

typedef enum ckd_optimizer_kind {
    CKD_ADAMW = 1, /* weight decay apart from the gradient */
    CKD_ADAM = 2,  /* weight decay, if any, added to the gradient */
    CKD_SGD = 3    /* with momentum, which is saved as exp_avg.X */
} ckd_optimizer_kind;

/*
 * The update that led from the parent checkpoint to this one, as the trainer made it. It only makes sense if that was exactly one: then
 * the first moment tells the gradient, and the second moment and the weights follow but for rounding, which is what is stored;
 * values stay bit for bit what they are, whatever computed them. Where the prediction is no good (another distance, other numbers) it
 * is not used, and costs some time.
 */
typedef struct ckd_optimizer {
    size_t struct_size;
    ckd_optimizer_kind kind;
    double lr; /* of this update, schedules included */
    double beta1, beta2, eps;
    double weight_decay;
    double momentum, dampening; /* of SGD */
    int nesterov;
    uint64_t step; /* updates made, this one included: 1 is the first one */
} ckd_optimizer;
#define CKD_OPTIMIZER_INIT \
    { .struct_size = sizeof(ckd_optimizer) }

/*
 * Memory of a device (a CUDA GPU), and the stream in whose order it is used: what is on the stream when a call begins is done before the
 * library reads or writes there. Takes libckptdelta_cuda.so and a driver; without them calls end with DEVICE, and nothing is lost.
 */
typedef struct ckd_device {
    size_t struct_size;
    int device;   /* as cudaGetDevice counts */
    void *stream; /* cudaStream_t; NULL: the legacy default stream */
} ckd_device;
#define CKD_DEVICE_INIT \
    { .struct_size = sizeof(ckd_device) }

typedef struct ckd_tensor {
    size_t struct_size;
    const char *name; /* FQN: 1 to 1023 bytes of UTF-8, unique in the checkpoint but for its regions */
    ckd_role role;
    ckd_dtype dtype;
    uint32_t ndim;         /* 0: a scalar */
    const uint64_t *shape; /* global shape; may be NULL if ndim is 0 */
    ckd_region region; /* what this call saves of it; regions must tile the tensor when all ranks are done */
    const void *data;  /* the region's elements, contiguous, any alignment; or NULL and: */
    ckd_read_fn read;
    void *read_context;
    /*
     * NULL, or the same for exp_avg.X, exp_avg_sq.X and X (or master.X, if X is rounded from it), all f32 and in the same region. Save
     * them in this order, parameter by parameter: the library holds the moments until the weights came (staging_bytes), and so the largest
     * parameter's at most. In another order it holds more, and predicts less.
     */
    const ckd_optimizer *optimizer;
    const ckd_device
        *device;        /* where `data` is; NULL: in host memory. Read through 16 MiB of pinned memory */
    const char *weight; /* of a moment or master: the name of its weight. NULL: as the name has it */
} ckd_tensor;
#define CKD_TENSOR_INIT \
    { .struct_size = sizeof(ckd_tensor) }

/*
 * Codes and writes one tensor, or one region of it; the last blocks of it while the next calls go on with theirs, so that an error of this tensor's,
 * which it names, may be theirs to tell. The caller's memory is free again when it returns. Order matters in two ways. A tensor that is a copy or a rounded
 * copy of another one costs nothing if the other one was saved before it (masters before their bf16 weights). In a lossy save the moment that comes last
 * is coded so that updates stay small (docs/decisions.md, "Lossy moments"): where one of the two moments is exact, save that one first.
 * Memory used beyond the caller's: ckd_save_options.staging_bytes. After an error the save can only be aborted: a commit fails with STATE.
 * Errors: INVALID, MISMATCH (another shape, dtype or role under the same name; a region that overlaps one saved before, of which the last
 * 1,024 are looked at, and all by the commit), NOSPACE, IO, NOMEM, CORRUPT (the parent), CANCELLED, STATE (an earlier call failed).
 */
CKD_API ckd_status ckd_save_tensor(ckd_save *save, const ckd_tensor *tensor, ckd_error *err);

/*
 * Stores named bytes (metadata, a data loader's position) with the checkpoint; at most 1 GiB each. After an error the save can only be
 * aborted, as after one of ckd_save_tensor. Errors: INVALID (a name, a size, no data), MISMATCH (this name was saved before), NOSPACE, IO, NOMEM, STATE.
 */
CKD_API ckd_status ckd_save_blob(ckd_save *save, const char *name, const void *data, size_t size,
                                 ckd_error *err);

/*
 * Commits a save of one rank (world 1): everything durable, manifest published, catalog updated, in this order; when
 * it returns CKD_OK the checkpoint survives a power cut. Frees the save, also on failure (nothing is committed then).
 * info may be NULL. Errors: STATE (an earlier call on this save failed, whatever the caller made of it), EXISTS (another writer was first),
 * MISMATCH (regions do not tile a tensor), NOT_FOUND (the parent was deleted), BUSY, NOSPACE, IO, NOMEM.
 */
CKD_API ckd_status ckd_save_commit(ckd_checkpoint *info, ckd_save *save, ckd_error *err);

/* Ends a save without a checkpoint: frees it and removes what it wrote. */
CKD_API void ckd_save_abort(ckd_save *save);

/* -------------------------------------------------------------------------------------------------------- load */

typedef struct ckd_load ckd_load;

/* Opens a checkpoint for loading, by id. Many loads may run beside each other and beside saves. */
CKD_API ckd_status ckd_load_begin(ckd_load **out, ckd_store *store, const ckd_id *checkpoint, ckd_error *err);
/* What it holds. The list lives as long as the load; do not free it. */
CKD_API const ckd_tensor_list *ckd_load_tensors(const ckd_load *load);
CKD_API const ckd_checkpoint *ckd_load_checkpoint(const ckd_load *load);

typedef struct ckd_load_request {
    size_t struct_size;
    const char *name;
    ckd_dtype dtype; /* CKD_DTYPE_NONE: as stored; else MISMATCH if it differs */
    uint32_t ndim;   /* with shape: MISMATCH if the global shape differs; shape NULL: not compared */
    const uint64_t *shape;
    ckd_region region; /* what to load, in global coordinates, however it was saved */
    void *data;        /* room for the region's elements, any alignment */
    size_t size;       /* of data, in bytes: must be the region's size */
    /* Where `data` is; NULL: in host memory. On a device blocks are decoded there as far as it can, in memory that is kept: about twice staging_bytes. */
    const ckd_device *device;
} ckd_load_request;
#define CKD_LOAD_REQUEST_INIT \
    { .struct_size = sizeof(ckd_load_request) }

/*
 * Rebuilds a tensor, or a region of it, into the caller's memory, reading only what intersects. Every block used is
 * verified against its content hash. On failure the memory's content is undefined. Where weights are optimizer steps, what their
 * rebuilding gave of their moments is held for the calls that ask for these (ckd_load_options.staging_bytes).
 * Errors: NOT_FOUND, MISMATCH, CORRUPT (names file, offset and tensor), UNSUPPORTED, IO, NOMEM, INVALID.
 */
CKD_API ckd_status ckd_load_tensor(ckd_load *load, const ckd_load_request *request, ckd_error *err);
/* A blob's bytes, malloc'ed: release with ckd_blob_free. Errors: NOT_FOUND, CORRUPT. */
CKD_API ckd_status ckd_load_blob(void **data, size_t *size, ckd_load *load, const char *name, ckd_error *err);
CKD_API void ckd_blob_free(void *data);
CKD_API void ckd_load_end(ckd_load *load);

/* ------------------------------------------------------------------------------------ looking after a store */

typedef struct ckd_damage {
    const char *file;   /* path inside the store; "" if none */
    const char *tensor; /* "" if the damage is not inside a tensor's block */
    uint64_t block;     /* record number in the file, CKD_NO_OFFSET if none */
    uint64_t offset;    /* in the file, CKD_NO_OFFSET if unknown */
    const char *what;   /* one sentence */
    const char *const *
        checkpoints; /* "RUN@STEP" of all that cannot be loaded because of it, with " (in the trash)" behind it of what was deleted; if not all was decoded, of all that may need it */
    size_t checkpoint_count;
} ckd_damage;

typedef struct ckd_verify_options {
    size_t struct_size;
    const char *run; /* NULL: all runs */
    uint64_t step;   /* with run; CKD_LATEST: the newest. Ignored unless one_step is set */
    int one_step;
    int quick; /* structure and stored checksums only, nothing is decoded */
    ckd_progress_fn on_progress;
    void *progress_context;
    double
        sample; /* above 0, below 1: only about this share of the blocks is decoded, all else as with quick; 0: all. Not with quick */
    uint64_t seed; /* which of them: another number, others */
} ckd_verify_options;
#define CKD_VERIFY_OPTIONS_INIT \
    { .struct_size = sizeof(ckd_verify_options) }

typedef struct ckd_verify_result {
    uint64_t checkpoints, files, blocks, bytes; /* looked at */
    size_t damage_count;
    ckd_damage *damage;
    uint64_t
        all_blocks; /* of these checkpoints; with quick or a sample more than were decoded, which `blocks` counts */
    uint64_t
        weak_groups; /* of parity: fewer losses can be repaired than they were made for. Only of a whole store */
} ckd_verify_result;

/* Checks every hash down to the reconstructed values. Damage found is a result, not an error: CKD_OK with a count. Errors: INVALID (the sample),
 * CANCELLED, IO, NOMEM. */
CKD_API ckd_status ckd_store_verify(ckd_verify_result **out, ckd_store *store,
                                    const ckd_verify_options *options, ckd_error *err);
CKD_API void ckd_verify_result_free(ckd_verify_result *result);

typedef struct ckd_scrub_options {
    size_t struct_size;
    uint64_t bytes_per_s;        /* to read at most; 0: no limit */
    uint64_t older_than_s;       /* leave out files that were verified so lately; 0: none */
    uint64_t max_time_s;         /* begin no further file after this; 0: no limit */
    ckd_progress_fn on_progress; /* told of stored bytes; what was verified is remembered if it cancels */
    void *progress_context;
} ckd_scrub_options;
#define CKD_SCRUB_OPTIONS_INIT \
    { .struct_size = sizeof(ckd_scrub_options) }

typedef struct ckd_scrub_result {
    ckd_verify_result *found; /* files and stored bytes that were read, and the damage, as with quick */
    uint64_t files_left, bytes_left; /* that were due as well, when the time was over */
    uint64_t
        oldest_ns; /* when, of all the store's files, the one was verified that was not for the longest; 0: some never was */
} ckd_scrub_result;
/*
 * A verification that remembers: reads chunk files through as quick does, the one first that was not verified for the longest, and notes in the catalog when each was found right, so that it
 * can be ended at any time and goes on next time; then, if there is time left, parity files, of which nothing is noted. A rebuild of the catalog forgets that. Holds up neither saves nor collections. The store is open for writing. Errors: READ_ONLY,
 * CANCELLED, BUSY, NOSPACE, IO, NOMEM.
 */
CKD_API ckd_status ckd_store_scrub(ckd_scrub_result **out, ckd_store *store, const ckd_scrub_options *options,
                                   ckd_error *err);
CKD_API void ckd_scrub_result_free(ckd_scrub_result *result);

typedef struct ckd_rebuild_result {
    uint64_t checkpoints; /* in the new catalog */
    uint64_t skipped;     /* manifests that are damaged; each was told through on_message */
} ckd_rebuild_result;
/*
 * Makes the catalog anew from manifests and chunk files, with the tensors of all checkpoints; the old one is kept as catalog.db.old. Only timings and caches
 * are lost. Needs no open handle; fails with BUSY while another process writes. result may be NULL.
 */
CKD_API ckd_status ckd_store_rebuild(ckd_rebuild_result *result, const char *path,
                                     const ckd_store_options *options, ckd_error *err);

#ifdef __cplusplus
}
#endif

#include "ckptdelta_compact.h"  /* what was saved, in a better form */
#include "ckptdelta_loads.h"    /* loads that are planned */
#include "ckptdelta_parity.h"   /* what rebuilds files that are lost or damaged */
#include "ckptdelta_ranks.h"    /* saves of many ranks */
#include "ckptdelta_report.h"   /* what a store holds and takes */
#include "ckptdelta_retain.h"   /* deleting, and taking that back */
#include "ckptdelta_roles.h"    /* roles of tensors by their names */
#include "ckptdelta_session.h"  /* saving while training goes on */
#include "ckptdelta_transfer.h" /* copying between stores */
#endif
