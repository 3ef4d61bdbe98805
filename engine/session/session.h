/*
 * A session: the trainer's side and the saver's thread. Internal to engine/.
 *
 *   session.c        open, close
 *   registration.c   register
 *   trainer.c        the trainer's thread: is a save due? room for a snapshot, copy, fence, wait
 *   devices.c        the same for what lies in the memory of devices
 *   saver.c          the saver's thread: a snapshot becomes a checkpoint
 *   cached_values.c  what a load of the newest checkpoint would give, kept for the next save of a lossy session
 *   restore.c        a checkpoint back into what is registered
 *
 * Invariants:
 *  1. A slot's snapshot is written by the trainer's thread and the copiers while it is being staged, and read by the saver from then
 *     on until it is free again. Slots are staged, and saved, in the order of their steps.
 *  2. A save is committed only when its snapshot is known to be of one step: the trainer has called a fence (or may not write: close, wait).
 *  3. What was saved last stands in the slot before the first staged one; of exact sessions with room for it that slot is not staged before the
 *     next save has ended, which is coded against it.
 *  4. The store is used by the saver's thread, and by others only under store_turn.
 */
#ifndef ENGINE_SESSION_H
#define ENGINE_SESSION_H

#include <pthread.h>
#include <stdatomic.h>
#include <sys/types.h>

#include "include/ckptdelta_session.h"
#include "engine/session/copy_threads.h"
#include "engine/session/device_snapshot.h"
#include "engine/session/interval.h"
#include "engine/store/store.h"

/* Something registered: a tensor, or bytes if `is_bytes`. */
typedef struct session_item {
    ckd_tensor tensor; /* its name, shape and region are the session's; data: NULL */
    void *data;
    uint64_t bytes;
    uint32_t group;
    bool is_bytes;
    bool on_device;
    ckd_device device; /* of what is on one */
    size_t on_devices; /* its number among these */
    uint64_t shape[CKD_MAX_DIMS];
    char *weight; /* as the caller named it: the tensor's */
} session_item;

/* One snapshot, and what becomes of it. */
typedef struct session_slot {
    snapshot *snapshot;
    device_snapshot *devices; /* of what is on devices; NULL: nothing is */
    ckd_status device_status; /* of copying that: not OK: the save is given up */
    ckd_error device_error;
    ckd_optimizer *optimizers; /* by item, as they were */
    uint64_t step;
    double metric;
    uint64_t begun_ns, stall_ns;
    uint64_t copied_ns; /* when it was let go of */
    uint64_t paused_ns; /* because training was busy */
    bool fenced;        /* the trainer has let go of it: it is whole, of one step, and its stall is known */
    bool torn;          /* never: the save is given up */
} session_slot;

#define SESSION_SLOTS 3 /* two saves under way, and what was saved last */

/* Values of a lossy checkpoint as its decoder gives them, where the next one is coded against them. */
typedef struct cached_values {
    uint8_t *memory; /* NULL: nothing is kept. A forked child has none of it */
    size_t size;
    uint64_t *places; /* by item; UINT64_MAX: of this one nothing */
    ckd_id of;        /* the checkpoint; what a failed save has replaced since is told by its hashes */
} cached_values;

struct ckd_session {
    pid_t process;
    ckd_session_options options;      /* its pointers are not kept */
    ckd_save_options save;            /* the next one's; strings are below */
    char opened_run[CKD_RUN_MAX + 1]; /* as asked for; `run` may be a branch of it */
    char run[CKD_RUN_MAX + 1], parent_run[CKD_RUN_MAX + 1], resumed_run[CKD_RUN_MAX + 1], metric_name[32];
    ckd_on_duplicate on_duplicate; /* as asked for */
    double metric;
    ckd_store_options store_options;
    char *path;

    session_item *items;
    size_t item_count, item_capacity;
    size_t *names; /* which items have which (registration.c) */
    size_t name_capacity;
    snapshot_source *sources;      /* as the items, once the first step was made; of those on devices empty */
    device_source *device_sources; /* of these */
    size_t device_count;
    copy_threads *copy_threads;

    interval interval;           /* the trainer's thread's */
    uint64_t last_step, left_ns; /* when the trainer went back to its work; 0: before the first step */
    uint64_t fence_ns;           /* that it waited since, in fences and for what it asked */
    bool pending;                /* a save is due as soon as there is room */
    bool busy_since_step;        /* a save was under way at some time since the last step */
    bool fenced_some;            /* a group's fence was called since the newest snapshot began */
    bool stop_asked;
    bool save_asked;     /* of this rank: the trainer sees to it that all save */
    atomic_int requests; /* ckd_request bits */

    pthread_mutex_t mutex; /* guards what follows */
    pthread_cond_t changed;
    session_slot slots[SESSION_SLOTS];
    uint32_t slot_count; /* that have a snapshot */
    uint32_t
        rooms; /* of them that may be staged at once: one less if the last one saved is kept for the next */
    uint32_t first, used; /* staged ones: a ring */
    ckd_phase phase;
    uint32_t waiting; /* calls that wait for saves */
    bool ending;
    ckd_status failed; /* of a save, not told yet */
    ckd_error failure;
    ckd_session_state state;   /* counters and figures */
    uint64_t ended_persist_ns; /* of a save that ended since the trainer's thread last looked; 0: none */

    pthread_t saver;
    bool saver_started, opened;
    ckd_status open_status;
    ckd_error open_error;
    pthread_mutex_t store_turn;
    ckd_store *store;
    ckd_ranks *ranks;
    session_slot
        *reference; /* what was saved last, and is still in memory; NULL: nothing. The saver's, as store is */
    ckd_id reference_id;
    save_follow follow;      /* of rank 0 and of sessions without ranks; the saver's */
    cached_values cached;    /* the saver's */
    uint64_t unthrottled_ns; /* what the last save took, its pauses not counted; 0: not known. The saver's */
};

/* STATE in a child of the process that opened it. */
ckd_status session_check(const ckd_session *s, ckd_error *err);

/* ---- trainer.c ---- */
/* Returns when what is registered in the group, or SNAPSHOT_ALL, is copied; then all that is staged is of one step. */
void session_fence(ckd_session *s, uint32_t group);
/* Waits until no save is under way. */
void session_drain(ckd_session *s);
/* A failure that was not told yet, once. */
ckd_status session_report_failure(ckd_session *s, ckd_error *err);

/* ---- devices.c ---- */
/* What of the items is on devices, with the first step. */
/*
 * Gives what is registered its roles and weights. lossy: those in doubt are told to the store's on_message. Nothing is changed after a
 * failure. Errors: INVALID (a name), NOMEM.
 */
ckd_status session_find_roles(ckd_session *s, bool lossy, ckd_error *err);
ckd_status session_device_sources(ckd_session *s, ckd_error *err);
/* What one more snapshot takes, behind so many, in what ckd_session_options.device_bytes leaves. */
device_snapshot_bytes session_device_size(const ckd_session *s, uint32_t behind);
/* The slot's part of that. */
ckd_status session_device_slot(ckd_session *s, session_slot *slot, ckd_error *err);
/* Begins to copy; failures are the save's. */
void session_device_stage(ckd_session *s, session_slot *slot);
/* The trainer's streams wait for a group, or SNAPSHOT_ALL; failures are the save's. */
void session_device_hold(ckd_session *s, session_slot *slot, uint32_t group);
/* What of that has failed so far. */
ckd_status session_device_check(ckd_session *s, const session_slot *slot, ckd_error *err);
/* What the save gets for an item that is on a device: *device is its, or not used. */
ckd_status session_device_read(ckd_tensor *t, ckd_device *device, const session_slot *slot,
                               const session_item *item, ckd_error *err);

/* ---- cached_values.c ---- */
/* Bytes that keeping takes, of what is registered. */
uint64_t cached_values_size(const ckd_session *s);
/* Allocates and touches them. Errors: NOMEM. */
ckd_status cached_values_make(ckd_session *s, ckd_error *err);
void cached_values_free(ckd_session *s, bool in_child);
/* Of an item; NULL: nothing is kept. */
void *cached_values_of(const ckd_session *s, size_t i);

/* ---- saver.c ---- */
/* This is what the session saved or restored last: the next save comes after it. */
void session_follow(ckd_session *s, const ckd_checkpoint *last);
void *session_saver_main(void *context);

#endif
