/*
 * ckptdelta: delta-compressed checkpoint storage. Include this header; it includes the others of this folder.
 *
 *   save:  tensors -> predict + residual -> entropy code -> chunk file -> manifest (the commit) -> catalog
 *   load:  catalog -> chain -> read the blocks that intersect -> decode, apply deltas -> your memory
 *
 * These conventions hold for every call unless its comment says otherwise:
 *
 * - A call returns CKD_OK or an error status, and stores the same status in `err`. `err` may be NULL. The caller owns
 *   it. It is written only on failure and needs no release.
 * - Outputs come first. On failure they are NULL or zeroed, so releasing them is always safe. Every release function
 *   accepts NULL.
 * - Memory passed in still belongs to the caller, who may reuse it when the call returns. Strings are UTF-8 and
 *   NUL-terminated.
 * - Handles are opaque. Two threads must not use one handle at once. They may use different handles, even of the same
 *   store. Any number of processes may open a store; they coordinate through locks in it.
 * - Sizes and offsets are in bytes, lengths and regions in elements, times in nanoseconds since 1970 (UTC).
 * - Option structs begin with their size. Start from the INIT macro, which sets it. Zero means the default everywhere.
 *   Fields are only ever appended. A struct_size smaller than that of any version is INVALID.
 * - Stores, groups of ranks, ids and outputs must not be NULL unless a call allows it; this is not checked everywhere.
 *   A NULL save, load or session, as left by a failed call, yields INVALID. Calls that return no status ignore it.
 * - The library never exits, aborts or prints, and never changes signal handlers or the locale. It works under any
 *   rounding mode and any treatment of denormals, and leaves the caller's settings in place. Read and progress
 *   callbacks run under the caller's settings.
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
    CKD_E_EXISTS = 6,      /* the run already has this step, or the output exists */
    CKD_E_CORRUPT = 7,     /* stored bytes are damaged or missing */
    CKD_E_UNSUPPORTED = 8, /* written by a newer version, or by a feature this build lacks */
    CKD_E_BUSY = 9,        /* another process held the lock longer than the timeout */
    CKD_E_READ_ONLY = 10,  /* the store was opened for reading, or lies on a read-only file system */
    CKD_E_STATE = 11,      /* the call does not fit the state of the handle */
    CKD_E_MISMATCH = 12,   /* dtype, shape or coverage differ from the request */
    CKD_E_CANCELLED = 13,  /* a progress callback cancelled the call */
    CKD_E_DEVICE = 14      /* a device (GPU) is missing or refused a call; nothing was committed */
} ckd_status;

#define CKD_NAME_MAX       1023                /* bytes of a tensor or blob name */
#define CKD_RUN_MAX        128                 /* bytes of a run name */
#define CKD_MAX_DIMS       16                  /* dimensions of a tensor */
#define CKD_MAX_ELEMENTS   (UINT64_C(1) << 40) /* elements of a tensor */
#define CKD_BLOCK_ELEMENTS (UINT64_C(1) << 18) /* largest block */
#define CKD_BLOB_MAX       (UINT64_C(1) << 30) /* bytes of a blob */
#define CKD_NO_OFFSET      UINT64_MAX

/* An error: what went wrong, and where. Fields that do not apply are "", CKD_NO_OFFSET or 0. */
typedef struct ckd_error {
    ckd_status status;
    int sys_errno;     /* errno of the failed system call, else 0 */
    uint64_t offset;   /* byte offset in `file` */
    char message[512]; /* one sentence: problem, cause and remedy */
    char tensor[256];  /* fully qualified name, truncated if longer */
    char file[512];    /* path, truncated on the left if longer */
} ckd_error;

/* Returns a stable upper-case name such as "CORRUPT". Never NULL; thread-safe. */
CKD_API const char *ckd_status_name(ckd_status status);
/* Returns the library version, such as "0.1.0". */
CKD_API const char *ckd_version(void);

/* -------------------------------------------------------------------------------------------------- vocabulary */

/* Numbers are stored in files: they are stable and only appended. */
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

/* Returns the bytes of one element, or 0 for an unknown dtype. */
CKD_API size_t ckd_dtype_size(ckd_dtype dtype);
/* Returns "f32", "bf16", ...; "?" for an unknown dtype. */
CKD_API const char *ckd_dtype_name(ckd_dtype dtype);

typedef enum ckd_role {
    CKD_ROLE_AUTO = 0, /* derived from the name: ckd_role_of */
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
    CKD_NEAR = 2,  /* lossy, for resuming: a resume loses part of the progress since the previous save */
    CKD_COARSE = 3 /* lossy, the smallest checkpoints: a resume loses more of it */
} ckd_fidelity;
CKD_API const char *ckd_fidelity_name(ckd_fidelity fidelity);

typedef enum ckd_kind {
    CKD_BASE = 1,      /* depends on no other checkpoint */
    CKD_DELTA = 2,     /* at least one block is coded against an older checkpoint */
    CKD_LOSSY_BASE = 3 /* a lossy checkpoint written without a parent */
} ckd_kind;
CKD_API const char *ckd_kind_name(ckd_kind kind);

typedef enum ckd_codec {
    CKD_CODEC_AUTO =
        0, /* the smallest of raw, zstd and the symbol coder; each is tried only where it can win */
    CKD_CODEC_RAW = 1,  /* no compression; disables deltas, too */
    CKD_CODEC_ZSTD = 2, /* only zstd on values, byte planes and residuals */
    CKD_CODEC_LZ4 = 3   /* only LZ4 on values, byte planes and residuals: fastest */
} ckd_codec;

/* A checkpoint's identity: 128 random bits, never reused or changed. All zero: none. */
typedef struct ckd_id {
    uint8_t bytes[16];
} ckd_id;
#define CKD_ID_TEXT 33
/* Writes 32 hexadecimal digits and a NUL into `text`. */
CKD_API void ckd_id_text(char text[CKD_ID_TEXT], const ckd_id *id);

/* The elements of a tensor that one rank holds, in global coordinates. */
typedef enum ckd_region_kind {
    CKD_REGION_WHOLE = 0, /* the whole tensor */
    CKD_REGION_BOX = 1,   /* offsets[d] <= i_d < offsets[d] + lengths[d], d < ndim; row-major in the box */
    CKD_REGION_FLAT = 2   /* [start, start + count) of the row-major order (FSDP, ZeRO) */
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
    CKD_OPEN_READ = 0,  /* changes nothing; does not even update a stale catalog */
    CKD_OPEN_WRITE = 1, /* existing store; cleans up after dead writers, updates the catalog */
    CKD_OPEN_CREATE = 2 /* like WRITE; creates the store and parent directories if absent or empty */
} ckd_open_mode;

/* Reports progress: bytes of raw tensor data done, and in total. A non-zero return cancels the call. */
typedef int (*ckd_progress_fn)(void *context, uint64_t done, uint64_t total);
/* Receives notices that are not errors, such as a rebuilt catalog. It must not call the library: locks are held. */
typedef void (*ckd_message_fn)(void *context, const char *message);

typedef struct ckd_store_options {
    size_t struct_size;
    uint32_t lock_timeout_ms;           /* how long to wait for a lock that another process holds; 0: 30000 */
    uint32_t threads;                   /* coding and decoding workers; 0: one per core, at most 16 */
    ckd_message_fn on_message, on_info; /* on_info: what stored policies did; NULL: on_message */
    void *message_context;
    int keep_trash; /* opening for writing removes nothing from the trash; for dry runs */
} ckd_store_options;
#define CKD_STORE_OPTIONS_INIT \
    { .struct_size = sizeof(ckd_store_options) }

/*
 * Opens the store in directory `path`. options may be NULL. For writing, the absolute path with links resolved may have
 * at most 493 bytes. A path `s3://BUCKET/PREFIX` is a store in a bucket (docs/object-storage.md). A forked child may only
 * close such a store. Errors: NOT_FOUND (no store there), UNSUPPORTED (another format version; no library for S3),
 * INVALID (the path is too long, or something else is there), READ_ONLY, CORRUPT, BUSY, STATE (no credentials), IO,
 * NOMEM.
 */
CKD_API ckd_status ckd_store_open(ckd_store **out, const char *path, ckd_open_mode mode,
                                  const ckd_store_options *options, ckd_error *err);
/* Closes the store. All saves and loads on it must have ended. */
CKD_API void ckd_store_close(ckd_store *store);

/* One checkpoint as recorded in the catalog. */
typedef struct ckd_checkpoint {
    ckd_id id;
    ckd_id parent;       /* zero for a base */
    ckd_id resumed_from; /* zero: not known to be resumed */
    char run[CKD_RUN_MAX + 1];
    uint64_t step;
    uint32_t generation; /* of its manifest; compaction publishes higher ones */
    ckd_kind kind;
    ckd_fidelity fidelity;
    uint32_t lossy_resumes;      /* how often training resumed from a lossy checkpoint to reach this state */
    uint32_t depth;              /* longest chain of deltas over all blocks */
    uint32_t world;              /* ranks that wrote it */
    uint64_t tensors, raw_bytes; /* raw_bytes: of all tensors and blobs */
    uint64_t stored_bytes;       /* of its chunk files and manifest */
    double load_cost;    /* estimated cost of loading it, in loads of an exact base of the same state */
    uint64_t created_ns; /* ns since 1970; later than its run and parent, whatever the clock shows */
    double metric;       /* NaN: none */
    char metric_name[32];
    uint32_t suspect; /* ckd_suspect bits (ckptdelta_loads.h); 0: none */
} ckd_checkpoint;

typedef struct ckd_checkpoint_list {
    size_t count;
    ckd_checkpoint *items; /* by run name, then step */
} ckd_checkpoint_list;

/* Lists all checkpoints, or those of one run. run may be NULL. Release the list with ckd_checkpoint_list_free. */
CKD_API ckd_status ckd_store_list(ckd_checkpoint_list **out, ckd_store *store, const char *run,
                                  ckd_error *err);
CKD_API void ckd_checkpoint_list_free(ckd_checkpoint_list *list);

#define CKD_LATEST UINT64_MAX
/*
 * Finds one checkpoint. run NULL: the only run of the store; INVALID, with the names, if there are several. step
 * CKD_LATEST: the committed checkpoint with the highest step, suspect or not. Errors: NOT_FOUND, INVALID.
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
    /* stored_bytes: payloads, record headers and this tensor's share of the index */
    uint64_t raw_bytes, stored_bytes;
    /* "raw", "standalone", "delta", "step", "same", "copy", "cast" or "mixed"; valid as long as the list */
    const char *method;
    uint32_t depth; /* longest chain of deltas */
    /* errors relative to the saved values, rounded to three digits; 0 if exact; NaN: not known */
    double rel_l2, max_error;
    double direction_change; /* relative L2 error of m / (sqrt(v) + eps); NaN: not known */
    uint64_t nonfinite; /* NaNs and infinities, which are preserved; early versions counted only lossy ones */
    /*
     * Largest |m| / (sqrt(v) + eps) of the saved values, and of those that a load returns. Accurate to 2 %. NaN except
     * for the moment saved last.
     */
    double largest_update_given, largest_update;
} ckd_tensor_info;

typedef struct ckd_tensor_list {
    size_t count;
    ckd_tensor_info *items; /* in the order saved */
} ckd_tensor_list;

/*
 * Lists the tensors of a checkpoint, from its chunk files. Release with ckd_tensor_list_free. If the files cannot be
 * read, the list is empty and on_message says so. Errors: NOT_FOUND, BUSY (files are being removed for longer than the
 * store waits), IO, NOMEM.
 */
CKD_API ckd_status ckd_store_tensors(ckd_tensor_list **out, ckd_store *store, const ckd_id *checkpoint,
                                     ckd_error *err);
CKD_API void ckd_tensor_list_free(ckd_tensor_list *list);

/* -------------------------------------------------------------------------------------------------------- save */

typedef struct ckd_save ckd_save;

typedef enum ckd_on_duplicate {
    CKD_DUPLICATE_ERROR = 0,   /* fail with EXISTS */
    CKD_DUPLICATE_SAME_OK = 1, /* OK if the stored content is identical, else EXISTS; INVALID if world > 1 */
    CKD_DUPLICATE_BRANCH = 2   /* continue as RUN~2 (~3, ...), a branch off the last checkpoint before step */
} ckd_on_duplicate;

typedef struct ckd_save_options {
    size_t struct_size;
    const char *run; /* required: 1 to 128 of A-Z a-z 0-9 . _ - ~, not starting with a dot or dash */
    uint64_t step;
    ckd_fidelity fidelity;
    int base;               /* non-zero: depend on no other checkpoint */
    const char *parent_run; /* with parent_step: the delta parent; NULL: the run's newest before step */
    uint64_t parent_step;   /* CKD_LATEST: the newest of parent_run */
    /*
     * With resumed_from_step: the checkpoint that training resumed from; NULL: none. If it is the parent, a lossy
     * fidelity codes this save more finely. Later deltas normally make up for what one delta leaves out, but after a
     * resume they cannot.
     */
    const char *resumed_from_run;
    uint64_t resumed_from_step;
    ckd_on_duplicate on_duplicate;
    ckd_codec codec;
    int level; /* of zstd (1 ... 19) or LZ4 (1 ... 12); 0: 3 for zstd, fast for LZ4 */
    /*
     * Limit on the cost of loading the checkpoint, in base loads; 0: 4. A single block may take twice the limit in
     * processor time, or four times if it is lossy. An optimizer step may also take twice the limit in bytes. A save
     * that omits tensors of its parent may exceed the limit by as much.
     */
    double max_load_cost;
    /*
     * The limit while the checkpoint is the newest of its run; 0: max_load_cost. The save keeps to it by storing a
     * second, standalone copy of each block that costs more.
     */
    double newest_load_cost;
    uint32_t rank, world;    /* world 0: 1. Each rank saves its regions into its own file. */
    ckd_id checkpoint_id;    /* world > 1: the coordinator's ckd_id_new, the same on all ranks; zero: new */
    const char *metric_name; /* recorded with the checkpoint, e.g. "val_loss"; NULL: none */
    double metric;
    uint64_t total_bytes; /* bytes to save in total, for the progress callback; 0: not known */
    ckd_progress_fn on_progress;
    void *progress_context;
    ckd_fidelity role_fidelity[6]; /* indexed by ckd_role: overrides `fidelity` for tensors of that role */
    int effort;                    /* of lossy fidelities: 1 (fast) ... 9 (small); 0: 5 */
    double target_bits;  /* lossy deltas: bits per weight, with its moments, if errors allow; 0: no target */
    double target_ratio; /* the same as a ratio to the raw bytes; set at most one of the two */
    /*
     * lossy: bound on every error, as a multiple of the RMS of its matrix; 0: none. In a stack, each matrix has its own
     * RMS; in a large matrix, each 16 Mi elements do.
     */
    double max_error;
    double step_scale; /* lossy, no target: scales steps of weights and first moments, 1/64 ... 64; 0: 1 */
    /*
     * Memory that the save may hold besides the caller's; 0: 256 MiB. It also takes 24 MiB for each worker (with a
     * single worker: 8, or 16 if the save is lossy). Each block that it writes, and each block of the parent, takes
     * about 600 bytes.
     *
     * Moments that predict optimizer steps go to an unnamed file in the store when they exceed the limit. If `read`
     * supplies a large matrix, its rows take a quarter of the limit, at most 64 MiB. Lossy tensors take 16 bytes per
     * element, for the 1 Mi to 16 Mi elements that are coded at once. With less than 256 MiB, larger matrices are cut
     * into smaller parts with their own steps and factors. Their stored values then differ. They are as accurate and
     * take slightly more space.
     */
    uint64_t staging_bytes;
} ckd_save_options;
#define CKD_SAVE_OPTIONS_INIT \
    { .struct_size = sizeof(ckd_save_options) }

/* Makes a new random id. Errors: IO. */
CKD_API ckd_status ckd_id_new(ckd_id *out, ckd_error *err);

/*
 * Begins a save: makes the intent durable and opens this rank's chunk file. Any number of saves may be in progress in a
 * store; commits are serialised. Errors: EXISTS (the run has this step), CORRUPT or UNSUPPORTED (an unreadable
 * manifest, named in err->file, has this run and step; a branch is possible), NOT_FOUND (the parent), BUSY (the run
 * was renamed, and a load keeps its old manifest of this step), INVALID, READ_ONLY, NOSPACE, IO, NOMEM.
 */
CKD_API ckd_status ckd_save_begin(ckd_save **out, ckd_store *store, const ckd_save_options *options,
                                  ckd_error *err);

/*
 * Writes `count` elements into `to`, beginning with element `first` of the region. Returns CKD_OK, or the status that
 * ckd_save_tensor is to return; it may fill err. It runs on the thread that called ckd_save_tensor.
 */
typedef ckd_status (*ckd_read_fn)(void *context, uint64_t first, uint64_t count, void *to, ckd_error *err);

typedef enum ckd_optimizer_kind {
    CKD_ADAMW = 1, /* decoupled weight decay */
    CKD_ADAM = 2,  /* weight decay, if any, is added to the gradient */
    CKD_SGD = 3    /* with momentum, which is saved as exp_avg.X */
} ckd_optimizer_kind;

/*
 * The optimizer update between the parent checkpoint and this one. It helps only if exactly one update separates them.
 * The first moment then yields the gradient, which predicts the second moment and the weights up to rounding. The save
 * stores the gradient if it was bf16 (mixed precision), and otherwise the first moment, plus whatever is not predicted.
 * Values stay bit-exact. Several updates, or other hyperparameters, make the prediction wrong. A wrong prediction is
 * not used and costs only time.
 */
typedef struct ckd_optimizer {
    size_t struct_size;
    ckd_optimizer_kind kind;
    double lr; /* of this update, after schedules */
    double beta1, beta2, eps;
    double weight_decay;
    double momentum, dampening; /* for SGD */
    int nesterov;
    uint64_t step; /* updates made, including this one; the first is 1 */
} ckd_optimizer;
#define CKD_OPTIMIZER_INIT \
    { .struct_size = sizeof(ckd_optimizer) }

/*
 * A device (a CUDA GPU) and the stream that orders accesses to its memory. The library waits for the work that was on
 * the stream when the call began, and only then reads or writes the memory. Needs libckptdelta_cuda.so and a driver;
 * without them calls fail with DEVICE, and nothing is lost.
 */
typedef struct ckd_device {
    size_t struct_size;
    int device;   /* as numbered by CUDA */
    void *stream; /* cudaStream_t; NULL: the legacy default stream */
} ckd_device;
#define CKD_DEVICE_INIT \
    { .struct_size = sizeof(ckd_device) }
/*
 * Checks whether tensors may be on this device. Errors: DEVICE (the message says which is missing: the backend, the
 * driver or the device), NOMEM.
 */
CKD_API ckd_status ckd_device_check(int device, ckd_error *err);

typedef struct ckd_tensor {
    size_t struct_size;
    /* fully qualified: 1 to 1023 bytes of UTF-8, unique in the checkpoint except for regions of one tensor */
    const char *name;
    ckd_role role;
    ckd_dtype dtype;
    uint32_t ndim;         /* 0: a scalar */
    const uint64_t *shape; /* global shape; may be NULL if ndim is 0 */
    /* the part that this call saves; the regions of all ranks together must tile the tensor */
    ckd_region region;
    const void *data; /* the region's elements, contiguous, any alignment; NULL: `read` supplies them */
    ckd_read_fn read;
    void *read_context;
    /*
     * NULL, or the same update for exp_avg.X, exp_avg_sq.X and X (or master.X, if X is rounded from it). All must be
     * f32 and have the same region. Save them in this order, parameter by parameter. The library then holds only one
     * parameter's moments at a time (staging_bytes). In another order it holds more and predicts less.
     */
    const ckd_optimizer *optimizer;
    /* where `data` is; NULL: in host memory. It is read through 16 MiB of pinned memory. */
    const ckd_device *device;
    /* of a moment or master: the name of its weight; NULL: derived from the tensor's name */
    const char *weight;
} ckd_tensor;
#define CKD_TENSOR_INIT \
    { .struct_size = sizeof(ckd_tensor) }

/*
 * Encodes and writes one tensor, or one region of it. The last blocks may still be in progress on return. A later call
 * may therefore return an error of this tensor; err->tensor names it. The caller may reuse its memory on return. Memory
 * used besides the caller's: ckd_save_options.staging_bytes. After an error the save can only be aborted: a commit
 * fails with STATE.
 *
 * Order matters in two ways. A copy or rounded copy of a tensor costs nothing if the original was saved first, so save
 * masters before their bf16 weights. In a lossy save, the last moment of a parameter is coded so that updates stay
 * small (engine/lossy/DECISIONS.md). If one of the two moments is exact, save that one first.
 *
 * Errors: INVALID, MISMATCH (the name has another shape, dtype or role; or the region overlaps one of the last 1,024
 * saved; the commit checks all), NOSPACE, IO, NOMEM, CORRUPT (the parent), CANCELLED, STATE (an earlier call failed).
 */
CKD_API ckd_status ckd_save_tensor(ckd_save *save, const ckd_tensor *tensor, ckd_error *err);

/*
 * Stores named bytes with the checkpoint, such as metadata or the position of a data loader. At most 1 GiB each. After
 * an error the save can only be aborted, as with ckd_save_tensor. Errors: INVALID (a name, a size, no data), MISMATCH
 * (this name was saved before), NOSPACE, IO, NOMEM, STATE.
 */
CKD_API ckd_status ckd_save_blob(ckd_save *save, const char *name, const void *data, size_t size,
                                 ckd_error *err);

/*
 * Commits a save of one rank (world 1): syncs the data, publishes the manifest and updates the catalog, in this order.
 * After CKD_OK the checkpoint survives a power cut. Frees the save even on failure, in which case nothing is committed.
 * info may be NULL. Errors: STATE (an earlier call failed, even if the caller ignored it), EXISTS (another writer was
 * first), MISMATCH (regions do not tile a tensor), NOT_FOUND (the parent was deleted), BUSY, NOSPACE, IO, NOMEM.
 */
CKD_API ckd_status ckd_save_commit(ckd_checkpoint *info, ckd_save *save, ckd_error *err);

/* Ends a save without a checkpoint: removes its files and frees it. */
CKD_API void ckd_save_abort(ckd_save *save);

/* -------------------------------------------------------------------------------------------------------- load */

typedef struct ckd_load ckd_load;
/* Opens a checkpoint by id for loading. Any number of loads and saves may run at the same time. */
CKD_API ckd_status ckd_load_begin(ckd_load **out, ckd_store *store, const ckd_id *checkpoint, ckd_error *err);
/* Returns the tensors of the checkpoint. The load owns the list. */
CKD_API const ckd_tensor_list *ckd_load_tensors(const ckd_load *load);
CKD_API const ckd_checkpoint *ckd_load_checkpoint(const ckd_load *load);

typedef struct ckd_load_request {
    size_t struct_size;
    const char *name;
    ckd_dtype dtype; /* CKD_DTYPE_NONE: as stored; otherwise MISMATCH if it differs */
    uint32_t ndim;   /* with shape: MISMATCH if the global shape differs; shape NULL: not compared */
    const uint64_t *shape;
    ckd_region region; /* region to load, in global coordinates, whatever the saved layout */
    void *data;        /* space for the region's elements, any alignment */
    size_t size;       /* bytes of data; must be the region's size */
    /* Where `data` is; NULL: host. A device decodes what it can, with about twice staging_bytes until ckd_load_end. */
    const ckd_device *device;
} ckd_load_request;
#define CKD_LOAD_REQUEST_INIT \
    { .struct_size = sizeof(ckd_load_request) }

/*
 * Rebuilds a tensor or a region of it in the caller's memory. It reads only the blocks that intersect, and verifies
 * each against its content hash. On failure the memory's content is undefined. A weight that is stored as an optimizer
 * step is rebuilt together with its moments, which are held for later requests (ckd_load_options.staging_bytes).
 * Errors: NOT_FOUND, MISMATCH, CORRUPT (names file, offset and tensor), UNSUPPORTED, IO, NOMEM, INVALID.
 */
CKD_API ckd_status ckd_load_tensor(ckd_load *load, const ckd_load_request *request, ckd_error *err);
/* Returns the malloc'ed bytes of a blob. Release with ckd_blob_free. Errors: NOT_FOUND, CORRUPT. */
CKD_API ckd_status ckd_load_blob(void **data, size_t *size, ckd_load *load, const char *name, ckd_error *err);
CKD_API void ckd_blob_free(void *data);
CKD_API void ckd_load_end(ckd_load *load);

#ifdef __cplusplus
}
#endif

#include "ckptdelta_agent.h"    /* memory that outlives a trainer */
#include "ckptdelta_compact.h"  /* rewriting checkpoints */
#include "ckptdelta_follow.h"   /* a folder with the newest weights of a run */
#include "ckptdelta_loads.h"    /* planned loads */
#include "ckptdelta_parity.h"   /* parity and repair of lost or damaged files */
#include "ckptdelta_progress.h" /* the progress of training, for `ckptdelta run` */
#include "ckptdelta_ranks.h"    /* saves and loads of many ranks */
#include "ckptdelta_report.h"   /* space usage and differences */
#include "ckptdelta_retain.h"   /* deletion, trash, pins, tags and policies */
#include "ckptdelta_roles.h"    /* roles of tensors, from their names */
#include "ckptdelta_session.h"  /* saving in the background of training */
#include "ckptdelta_transfer.h" /* copying between stores */
#include "ckptdelta_verify.h"   /* verification, and rebuilding the catalog */
#endif
