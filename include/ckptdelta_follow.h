/*
 * ckptdelta, following a run: a folder that always has the newest weights of a run, for programs that serve a model
 * while it is trained. Part of ckptdelta.h, which includes it; the same conventions hold.
 *
 * The folder has a form that model loaders read: model.safetensors, or model-00001-of-0000N.safetensors and so on with
 * model.safetensors.index.json. Its other files, such as config.json, are left alone. The file .ckptdelta-follow.json
 * says which checkpoint the folder has. docs/follow.md shows how to use it.
 *
 *     ckd_follow_open(&follow, store, &options, &err);
 *     while (ckd_follow_wait(&newer, follow, CKD_FOLLOW_FOREVER, &err) == CKD_OK) {
 *         ckd_follow_apply(&result, follow, &err);
 *     }
 *     ckd_follow_close(follow);
 */
#ifndef CKPTDELTA_FOLLOW_H
#define CKPTDELTA_FOLLOW_H

#include "ckptdelta.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ckd_follow_options {
    size_t struct_size;
    const char *into; /* required: the folder; it is created, but not its parents */
    const char *run;  /* NULL: the store's only run. Its newest checkpoint that is not suspect is followed */
    const char *tag;  /* instead of the run: the checkpoint with this tag, which may move */
    /*
     * NULL: names stay as they are. "model": only the tensors whose names begin with "model."; the files have their
     * names without this prefix. The Python package saves a state under such names if it has more than a model.
     */
    const char *member;
    /*
     * Globs (fnmatch) for tensor names as the store has them. only_count 0: all tensors of the member if one is set,
     * else all with the role weight.
     */
    const char *const *only;
    size_t only_count;
    const char *const *exclude;
    size_t exclude_count;
    uint64_t shard_bytes; /* largest file; a larger tensor gets a file of its own; 0: 5,000,000,000 */
    uint64_t poll_ms;     /* longest time between two looks at the store; 0: 2000 */
    int overwrite;        /* take over a folder with model files that no follower has written */
    /* bytes of the folder's tensors that are done; also called, with 0 of 0, while ckd_follow_wait waits */
    ckd_progress_fn on_progress;
    void *progress_context;
} ckd_follow_options;
#define CKD_FOLLOW_OPTIONS_INIT \
    { .struct_size = sizeof(ckd_follow_options) }

typedef struct ckd_follow ckd_follow;

/*
 * Opens a folder for following. The store must stay open until ckd_follow_close, at least for reading. The call
 * completes or undoes the work of a killed follower, and removes its temporary files. Messages go to the store's
 * on_message. The options' strings are copied. Errors: INVALID, BUSY (another process follows into this folder), EXISTS
 * (the folder has model files of others: overwrite), READ_ONLY, NOSPACE, IO, NOMEM.
 */
CKD_API ckd_status ckd_follow_open(ckd_follow **out, ckd_store *store, const ckd_follow_options *options,
                                   ckd_error *err);

/* The state of the folder; ckd_follow_apply returns it, too. */
typedef struct ckd_follow_result {
    ckd_checkpoint
        checkpoint; /* in the folder now; its id is zero if there is none. Set: id, run, step, created_ns */
    int applied;    /* the call changed the folder */
    uint64_t files; /* files that were replaced */
    uint64_t bytes; /* of all tensors in the folder */
    uint64_t written_bytes; /* of the values that were loaded and written */
    uint64_t passed_over;   /* newer checkpoints that are damaged; messages have named them */
    uint64_t read_bytes;    /* of the payloads that were read from the store for them */
} ckd_follow_result;

#define CKD_FOLLOW_FOREVER UINT64_MAX
/*
 * Waits until there is a checkpoint to apply that the folder does not have. *newer is 0 if the time runs out first. A
 * store, run or tag without a checkpoint has nothing newer. Errors: CANCELLED (ckd_follow_cancel, or on_progress
 * returned non-zero), INVALID (the store has several runs, and none is named), STATE (another store is at the same path
 * now: open and follow that one), IO, NOMEM.
 */
CKD_API ckd_status ckd_follow_wait(int *newer, ckd_follow *follow, uint64_t timeout_ms, ckd_error *err);
/* Ends the current or next ckd_follow_wait. Thread-safe, and allowed in a signal handler. */
CKD_API void ckd_follow_cancel(ckd_follow *follow);

/*
 * Brings the folder to the newest checkpoint; does nothing if it is there already. New files are written beside the old
 * ones, read back, synced, and renamed together. A crash at any point leaves the old weights, or the next
 * ckd_follow_open completes the new ones. A program that has an old file open or mapped keeps its content. Blocks whose
 * content is the same in both checkpoints are neither read from the store nor decoded. A file that another program has
 * changed is compared with the checkpoint block by block.
 *
 * A damaged checkpoint is passed over with a message, and tried again after a minute. Meanwhile the checkpoint before
 * it is applied, unless the folder has it. Errors: NOT_FOUND (there is no checkpoint yet), CORRUPT and UNSUPPORTED (all
 * of them are damaged, or have a tensor that a safetensors file cannot hold, and the folder is empty), STATE (all are
 * suspect), MISMATCH (no tensor is chosen), EXISTS (model files of others have appeared in the folder), CANCELLED,
 * READ_ONLY, NOSPACE, IO, NOMEM. After an error the folder is unchanged.
 */
CKD_API ckd_status ckd_follow_apply(ckd_follow_result *out, ckd_follow *follow, ckd_error *err);

/* Returns the present state of the folder, without reading the store. */
CKD_API void ckd_follow_applied(ckd_follow_result *out, const ckd_follow *follow);

/* Closes the folder, which stays as it is. Accepts NULL. */
CKD_API void ckd_follow_close(ckd_follow *follow);

/*
 * Receives `count` elements that changed: their positions in the row-major order of the whole tensor, ascending in one
 * call, and their new values, packed. Returns CKD_OK, or the status that ckd_follow_changes is to return.
 */
typedef ckd_status (*ckd_changes_fn)(void *context, const uint64_t *positions, const void *values,
                                     size_t count, ckd_error *err);
typedef struct ckd_changes_request {
    size_t struct_size;
    const char *tensor;
    ckd_region region;    /* in global coordinates; zero: the whole tensor */
    ckd_changes_fn visit; /* required */
    void *context;
} ckd_changes_request;
#define CKD_CHANGES_REQUEST_INIT \
    { .struct_size = sizeof(ckd_changes_request) }

/*
 * Visits the elements of a tensor's region whose bits differ between two checkpoints. A model in memory can thus be
 * updated sparsely. Each rank of a tensor-parallel model asks for its own box. Blocks with the same content in both
 * checkpoints are skipped. The others are loaded from both and compared, four million elements at a time. A call of `visit` gets at
 * most 65,536 elements. Positions also ascend from call to call, except in a box whose rows (of the first dimension)
 * are larger than a block. The loads must be of one store. Errors: NOT_FOUND (no such tensor), MISMATCH (dtype or shape
 * differ), INVALID (the region), those of ckd_load_tensor and of `visit`.
 */
CKD_API ckd_status ckd_follow_changes(ckd_load *before, ckd_load *after, const ckd_changes_request *request,
                                      ckd_error *err);

#ifdef __cplusplus
}
#endif

#endif
