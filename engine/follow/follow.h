/* A folder that follows the newest weights of a run. The only header of engine/follow/. */
#ifndef ENGINE_FOLLOW_FOLLOW_H
#define ENGINE_FOLLOW_FOLLOW_H

#include <stdatomic.h>

#include "engine/load/load.h"
#include "include/ckptdelta_follow.h"

#define FOLLOW_STATE   ".ckptdelta-follow.json"
#define FOLLOW_JOURNAL ".ckptdelta-follow.next"
#define FOLLOW_LOCK    ".ckptdelta-follow.lock"
#define FOLLOW_NEW     ".ckptdelta-new" /* NAME is first written as .NAME.ckptdelta-new */
#define FOLLOW_INDEX   "model.safetensors.index.json"

/* ---- layout.c: which tensors the folder has, in which files, at which offsets ---- */

typedef struct follow_tensor {
    const ckd_tensor_info *info; /* belongs to the load */
    const char *name;            /* in the folder: without the prefix of a chosen member */
    uint64_t offset, size;       /* in the file */
} follow_tensor;

typedef struct follow_shard {
    char name[40];
    bytes header;
    follow_tensor *tensors; /* in the order of their data */
    size_t count;
    uint64_t size; /* of the file */
} follow_shard;

/* Zero-initialise; release with follow_layout_free. */
typedef struct follow_layout {
    follow_shard *shards;
    size_t count, capacity;
    bytes index; /* empty if there is one shard */
    uint64_t tensor_bytes;
} follow_layout;

/*
 * Distributes the chosen tensors of a checkpoint over files. The layout depends only on names, dtypes and shapes, not
 * on the step. Errors: MISMATCH (no tensor is chosen), UNSUPPORTED (a name that the format cannot express), NOMEM.
 */
ckd_status follow_layout_make(follow_layout *out, const ckd_tensor_list *tensors,
                              const ckd_follow_options *options, ckd_error *err);
void follow_layout_free(follow_layout *l);
/* Hashes the options that determine the layout: the chosen tensors and the size of files. Errors: NOMEM. */
ckd_status follow_choice(hash128 *out, const ckd_follow_options *options, ckd_error *err);
/* Whether a model has a file of this name: a shard, the only file, or the index. */
bool follow_is_model_file(const char *name);

/* ---- state.c: what the folder has, and the journal ---- */

typedef struct follow_file {
    char name[40];
    uint64_t size, modified_ns, inode;
    hash128 header; /* hash of everything before the data; for the index, of the whole file */
} follow_file;

/* Zero-initialise; release with follow_state_free. */
typedef struct follow_state {
    ckd_id checkpoint; /* zero: none */
    char run[CKD_RUN_MAX + 1];
    uint64_t step, created_ns;
    uint64_t tensor_bytes;
    hash128 choice; /* follow_choice of the options */
    follow_file *files;
    size_t count, capacity;
} follow_state;

void follow_state_free(follow_state *s);
/* Returns the entry of the file, or NULL. */
const follow_file *follow_state_find(const follow_state *s, const char *name);
/* Adds an entry. Errors: NOMEM. */
ckd_status follow_state_keep(follow_state *s, const follow_file *file, ckd_error *err);
/* Adds an entry for the file at `path`, as it is now. Errors: NOT_FOUND, NOMEM. */
ckd_status follow_state_add(follow_state *s, const char *name, const char *path, const hash128 *header,
                            ckd_error *err);
/* Whether inode, size and modification time of the file at `path` are those of the entry. */
bool follow_file_unchanged(const follow_file *f, const char *path);
/* Reads the folder's state. A missing or damaged one is empty: then all files are compared. Errors: IO, NOMEM. */
ckd_status follow_state_read(follow_state *out, const char *folder, ckd_error *err);
/*
 * Puts the state into effect: renames all new files, and removes model files that it does not name. Writing the journal
 * is the commit point. *committed: the journal is written, so follow_recover can complete the rest.
 */
ckd_status follow_commit(bool *committed, const char *folder, const follow_state *next, ckd_error *err);
/* Completes a commit whose journal exists, and removes temporary files of a killed follower. */
ckd_status follow_recover(const char *folder, ckd_error *err);
/* FOLDER/NAME, and FOLDER/.NAME.ckptdelta-new. */
typedef struct follow_path {
    char text[4352];
} follow_path;
follow_path follow_path_of(const char *folder, const char *name);
follow_path follow_path_new(const char *folder, const char *name);

/* ---- ranges.c: which elements of a tensor have to be written ---- */

/* Consecutive elements of a tensor, in row-major order. */
typedef struct follow_range {
    uint64_t first, count;
} follow_range;
/* Ascending, without overlaps. Zero-initialise; free the items. */
typedef struct follow_ranges {
    follow_range *items;
    size_t count, capacity;
} follow_ranges;

/* The tensor's values in a file of the folder. They may already equal the checkpoint's. */
typedef struct follow_present {
    file_reader *file; /* NULL: there are none */
    uint64_t offset;
    bytes room;
} follow_present;

/*
 * Lists the elements of blocks whose content differs from `before`. If `before` is NULL, the blocks are compared with
 * the file; without a file, all blocks differ. A block of a box counts with all elements between its first and last.
 * Errors: IO, NOMEM.
 */
ckd_status follow_ranges_find(follow_ranges *out, const view_tensor *now, const view_tensor *before,
                              follow_present *present, ckd_error *err);
/* The elements from the block's first to its last. All of them are its own if there are r->count. */
follow_range follow_hull(const geometry *shape, const record *r);
/* Whether both blocks have the same elements and content. */
bool follow_same_block(const record *a, const record *b, uint32_t ndim);
/* Whether dtype and shape are the same. */
bool follow_same_form(const view_tensor *a, const view_tensor *b);

/* ---- known.c: values of an earlier version, for the deltas on them ---- */

/* A tensor's values in an earlier version: in a file, or a part of them in memory. */
typedef struct follow_known {
    const view_tensor *now,
        *before; /* before NULL: the earlier checkpoint is gone; blocks are found by their hash */
    file_reader *file;
    uint64_t offset;       /* of the tensor in the file */
    const uint8_t *values; /* of `range`; NULL: they are in the file */
    follow_range range;
} follow_known;
/* known_values.copy with a follow_known. */
bool follow_known_copy(void *context, void *to, const record *r);

/* ---- write.c: makes the files of a checkpoint ---- */

typedef struct follow_writing {
    const char *folder;
    ckd_load *load;
    const view *before; /* the folder's checkpoint; NULL: there is none, or it cannot be read */
    const follow_state *state;
    const ckd_follow_options *options;
    const follow_layout *layout;
    follow_state next;
    uint64_t done, written;
    uint64_t files;
    void *buffer;
    bool store_failed; /* the error is about the checkpoint, not about the folder */
} follow_writing;

/* Makes all new files, synced and read back, and fills w->next. The caller removes them on failure. */
ckd_status follow_write(follow_writing *w, ckd_error *err);

/* ---- choose.c: which checkpoint to apply ---- */

/* A checkpoint that could not be applied. */
typedef struct follow_failure {
    ckd_id id;
    uint32_t generation;
    uint64_t at_ns; /* monotonic */
} follow_failure;

struct ckd_follow {
    ckd_store *store;
    ckd_follow_options options;           /* owns its strings */
    char run[CKD_RUN_MAX + 1];            /* the followed run; "": not known yet, or a tag is followed */
    uint64_t identity_inode, identity_ns; /* of the store's identity file, to notice a replaced store */
    file_lock *lock;
    file_watch *watch;
    atomic_bool cancelled;
    follow_state state;
    hash128 choice;
    follow_failure *failures;
    size_t failure_count, failure_capacity;
    ckd_error failure;       /* why a checkpoint was passed over last */
    ckd_id suspect_reported; /* the last suspect checkpoint that a message named */
    char branch_reported[CKD_RUN_MAX + 1];
    bool waits;           /* the last look found no checkpoint, and a message said so */
    bool hidden;          /* the manifest of a newer checkpoint of the run is damaged */
    uint64_t reported_ns; /* when follow_report last sent a message */
};

/*
 * Finds the newest checkpoint that is neither suspect nor known to be damaged. *skipped (may be NULL) counts damaged
 * ones. Errors: NOT_FOUND, INVALID, IO, NOMEM.
 */
ckd_status follow_choose(ckd_checkpoint *out, uint64_t *skipped, ckd_follow *f, ckd_error *err);
/* Reports a problem that may last, at most once a minute. */
void follow_report(ckd_follow *f, const char *what, const ckd_error *why);
/* Remembers a failure. Errors: NOMEM. */
ckd_status follow_remember_failure(ckd_follow *f, const ckd_checkpoint *c, ckd_error *err);

#endif
