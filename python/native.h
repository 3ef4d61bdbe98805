/*
 * Owners of the library's handles, for Python. A handle goes from one state to the next inside one C call, so no signal
 * handler of Python can run between the call and the note of what it did. An owner is released any number of times. In
 * a forked child, which has none of the library's threads, releasing does nothing.
 */
#ifndef CKPTDELTA_PYTHON_NATIVE_H
#define CKPTDELTA_PYTHON_NATIVE_H

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "ckptdelta.h"

typedef struct pyckd_store {
    ckd_store *store; /* NULL: not open */
    long long process;
} pyckd_store;

static ckd_status pyckd_store_open(pyckd_store *owner, const char *path, ckd_open_mode mode,
                                   const ckd_store_options *options, ckd_error *err) {
    owner->process = getpid();
    return ckd_store_open(&owner->store, path, mode, options, err);
}

static void pyckd_store_close(pyckd_store *owner) {
    ckd_store *store = owner->store;
    owner->store = NULL;
    if (owner->process == getpid()) {
        ckd_store_close(store);
    }
}

typedef struct pyckd_save {
    ckd_save *save; /* NULL: not begun, or ended */
    int committed;
    long long process;
} pyckd_save;

static ckd_status pyckd_save_begin(pyckd_save *owner, ckd_store *store, const ckd_save_options *options,
                                   ckd_error *err) {
    owner->process = getpid();
    return ckd_save_begin(&owner->save, store, options, err);
}

static ckd_status pyckd_save_commit(ckd_checkpoint *info, pyckd_save *owner, ckd_error *err) {
    ckd_save *save = owner->save;
    owner->save = NULL; /* the commit frees it, whatever it returns */
    ckd_status status = ckd_save_commit(info, save, err);
    owner->committed = status == CKD_OK;
    return status;
}

/* The same for the coordinator of a joint save. */
static ckd_status pyckd_save_publish(ckd_checkpoint *info, pyckd_save *owner, const ckd_part *parts,
                                     size_t count, ckd_error *err) {
    ckd_save *save = owner->save;
    owner->save = NULL;
    ckd_status status = ckd_save_publish(info, save, parts, count, err);
    owner->committed = status == CKD_OK;
    return status;
}

/* Ends another rank's save that the coordinator has committed. */
static void pyckd_save_end(pyckd_save *owner) {
    ckd_save *save = owner->save;
    owner->save = NULL;
    if (owner->process == getpid()) {
        ckd_save_end(save);
    }
}

/* Of a rank whose part was handed out, the file stays if the coordinator has committed it. */
static void pyckd_save_abort(pyckd_save *owner) {
    ckd_save *save = owner->save;
    owner->save = NULL;
    if (owner->process == getpid()) {
        ckd_save_abort(save);
    }
}

typedef struct pyckd_load {
    ckd_load *load; /* NULL: not begun, or ended */
    long long process;
} pyckd_load;

static ckd_status pyckd_load_begin(pyckd_load *owner, ckd_store *store, const ckd_id *checkpoint,
                                   const ckd_load_options *options, ckd_error *err) {
    owner->process = getpid();
    return ckd_load_begin_with(&owner->load, store, checkpoint, options, err);
}

static void pyckd_load_end(pyckd_load *owner) {
    ckd_load *load = owner->load;
    owner->load = NULL;
    if (owner->process == getpid()) {
        ckd_load_end(load);
    }
}

typedef struct pyckd_session {
    ckd_session *session; /* NULL: not open */
    long long process;
    uint64_t saved;      /* saves that became durable, also of sessions that the owner had before */
    ckd_checkpoint last; /* the newest of these; both under pyckd_saved_lock */
} pyckd_session;

static pthread_mutex_t pyckd_saved_lock = PTHREAD_MUTEX_INITIALIZER;

/* On a thread of the session. It calls no Python, which may be ending. */
static void pyckd_on_saved(void *context, const ckd_saved *saved) {
    pyckd_session *owner = context;
    if (saved->status == CKD_OK) {
        pthread_mutex_lock(&pyckd_saved_lock);
        owner->last = saved->checkpoint;
        owner->saved++;
        pthread_mutex_unlock(&pyckd_saved_lock);
    }
}

static ckd_status pyckd_session_open(pyckd_session *owner, const char *path,
                                     const ckd_session_options *options, ckd_error *err) {
    ckd_session_options with = *options;
    with.on_saved = pyckd_on_saved;
    with.saved_context = owner;
    owner->process = getpid();
    return ckd_session_open(&owner->session, path, &with, err);
}

/*
 * Saves, and returns when a group is copied, or everything. An interrupt between the two would let the trainer go on and
 * write to that group while it is read.
 */
static ckd_status pyckd_session_save(pyckd_session *owner, uint64_t step, uint32_t group, int all,
                                     ckd_error *err) {
    ckd_status status = ckd_session_save(owner->session, step, err);
    if (all) {
        ckd_session_fence(owner->session);
    } else {
        ckd_session_fence_group(owner->session, group);
    }
    return status;
}

/* Returns how many saves have become durable, and the newest of them. */
static uint64_t pyckd_session_last(ckd_checkpoint *out, pyckd_session *owner) {
    pthread_mutex_lock(&pyckd_saved_lock);
    uint64_t saved = owner->saved;
    *out = owner->last;
    pthread_mutex_unlock(&pyckd_saved_lock);
    return saved;
}

static ckd_status pyckd_session_close(pyckd_session *owner, ckd_error *err) {
    ckd_session *session = owner->session;
    owner->session = NULL;
    return owner->process == getpid() ? ckd_session_close(session, err) : CKD_OK;
}

/* A follower has a store of its own, as a store that is replaced has to be opened again. */
typedef struct pyckd_follow {
    ckd_store *store;
    ckd_follow *follow; /* NULL: not open */
    long long process;
} pyckd_follow;

static void pyckd_follow_close(pyckd_follow *owner) {
    ckd_follow *follow = owner->follow;
    ckd_store *store = owner->store;
    owner->follow = NULL;
    owner->store = NULL;
    if (owner->process == getpid()) {
        ckd_follow_close(follow);
        ckd_store_close(store);
    }
}

static ckd_status pyckd_follow_open(pyckd_follow *owner, const char *path,
                                    const ckd_store_options *store_options, const ckd_follow_options *options,
                                    ckd_error *err) {
    owner->process = getpid();
    ckd_status status = ckd_store_open(&owner->store, path, CKD_OPEN_READ, store_options, err);
    if (status == CKD_OK) {
        status = ckd_follow_open(&owner->follow, owner->store, options, err);
    }
    if (status != CKD_OK) {
        pyckd_follow_close(owner);
    }
    return status;
}

/* What ckd_follow_changes visits. */
typedef struct pyckd_changes {
    uint64_t *positions;
    uint8_t *values;
    size_t count, capacity, value_size;
} pyckd_changes;

static void pyckd_changes_free(pyckd_changes *c) {
    free(c->positions);
    free(c->values);
    c->positions = NULL;
    c->values = NULL;
    c->count = c->capacity = 0;
}

static ckd_status pyckd_keep_changes(void *context, const uint64_t *positions, const void *values,
                                     size_t count, ckd_error *err) {
    pyckd_changes *c = context;
    (void)err;
    if (c->capacity - c->count < count) {
        size_t capacity = 2 * c->capacity + count;
        uint64_t *more = realloc(c->positions, capacity * sizeof(*more));
        c->positions = more ? more : c->positions;
        uint8_t *more_values = more ? realloc(c->values, capacity * c->value_size) : NULL;
        c->values = more_values ? more_values : c->values;
        if (!more_values) {
            return CKD_E_NOMEM;
        }
        c->capacity = capacity;
    }
    memcpy(c->positions + c->count, positions, count * sizeof(*positions));
    memcpy(c->values + c->count * c->value_size, values, count * c->value_size);
    c->count += count;
    return CKD_OK;
}

static ckd_status pyckd_follow_changes(pyckd_changes *out, ckd_load *before, ckd_load *after,
                                       const ckd_changes_request *request, ckd_error *err) {
    ckd_changes_request with = *request;
    with.visit = pyckd_keep_changes;
    with.context = out;
    return ckd_follow_changes(before, after, &with, err);
}

/* Lists that the library returns. */
static void pyckd_checkpoints_free(ckd_checkpoint_list **list) {
    ckd_checkpoint_list_free(*list);
    *list = NULL;
}

static void pyckd_tensors_free(ckd_tensor_list **list) {
    ckd_tensor_list_free(*list);
    *list = NULL;
}

static void pyckd_verified_free(ckd_verify_result **result) {
    ckd_verify_result_free(*result);
    *result = NULL;
}

static void pyckd_prune_free(ckd_prune **prune) {
    ckd_prune_free(*prune);
    *prune = NULL;
}

static void pyckd_trash_free(ckd_trash **trash) {
    ckd_trash_free(*trash);
    *trash = NULL;
}

typedef struct pyckd_blob {
    void *data;
    size_t size;
} pyckd_blob;

static ckd_status pyckd_blob_load(pyckd_blob *owner, ckd_load *load, const char *name, ckd_error *err) {
    return ckd_load_blob(&owner->data, &owner->size, load, name, err);
}

static void pyckd_blob_free(pyckd_blob *owner) {
    ckd_blob_free(owner->data);
    owner->data = NULL;
}

#endif
