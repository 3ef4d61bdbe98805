/*
 * A session: the trainer's side and the saver thread. Internal to engine/.
 *
 *   session.c        open, close
 *   registration.c   registration of tensors and bytes, and their roles
 *   trainer.c        the trainer's thread: is a save due? find memory for a snapshot, copy, fence, wait
 *   devices.c        the same for tensors in device memory
 *   saver.c          the saver thread: turns a snapshot into a checkpoint; decoded values, retained for the next save
 *   restore.c        loads a checkpoint into the registered memory
 *   progress.c       tells `ckptdelta run` about steps and phases
 *   agent.c          snapshots in an agent's memory, saves by the agent
 *   alarms.c         figures that are unlike those before
 *   changes.c        of these, how much tensors change: pure arithmetic, like sensors.c
 *
 * Invariants:
 * 1. While a slot is staged, the trainer's thread and the copy threads write its snapshot. From then on the saver reads
 *     it, until the slot is free again. Slots are staged and saved in the order of their steps.
 *  2. A save is committed only when its snapshot is known to be of one step: the trainer has called a fence, or may not
 *     write (close, wait).
 *  3. The last saved snapshot is in the slot before the first staged one. An exact session with memory for it codes the
 *     next save against it, so that slot is not staged before the next save has ended.
 *  4. The saver thread uses the store. Other threads use it only under store_turn.
 */
#ifndef ENGINE_SESSION_H
#define ENGINE_SESSION_H

#include <pthread.h>
#include <stdatomic.h>
#include <sys/types.h>

#include "include/ckptdelta_session.h"
#include "engine/session/agent.h"
#include "engine/session/alarms.h"
#include "engine/session/copy_threads.h"
#include "engine/session/device_snapshot.h"
#include "engine/session/interval.h"
#include "engine/save/save.h"
#include "engine/store/store.h"

/* A registered tensor, or bytes if `is_bytes`. */
typedef struct session_item {
    ckd_tensor tensor; /* The session owns its name, shape and region. data is NULL. */
    void *data;
    uint64_t bytes;
    uint32_t group;
    bool is_bytes;
    bool on_device;
    ckd_device device; /* valid if on_device */
    size_t on_devices; /* index among the items on devices */
    uint64_t shape[CKD_MAX_DIMS];
    char *weight; /* copy of the caller's tensor.weight */
} session_item;

/* One snapshot and the state of its save. */
typedef struct session_slot {
    snapshot *snapshot;
    device_snapshot *devices; /* items on devices; NULL: there are none */
    ckd_status device_status; /* of copying those; an error makes the save fail */
    ckd_error device_error;
    ckd_optimizer *optimizers; /* by item, copied with the snapshot */
    uint64_t step;
    double metric;
    uint64_t begun_ns, stall_ns;
    uint64_t copied_ns; /* when the copy was complete and fenced */
    uint64_t paused_ns; /* how long the save paused because training was busy */
    uint64_t waited_ns; /* how long it waited for copies and the fence */
    uint64_t handed_ns; /* with ranks, when this rank had done its part; 0: it has not */
    bool fenced; /* the trainer has released it: it is complete and of one step, and its stall is known */
    bool torn;   /* it can never become consistent, so the save is dropped */
    bool held;   /* its copies wait for idle time, until a fence */
} session_slot;

#define SESSION_SLOTS 3 /* two saves in progress, and the last saved snapshot */

/* Decoded values of a lossy checkpoint, for tensors that the next checkpoint is coded against. */
typedef struct cached_values {
    uint8_t *memory; /* NULL: nothing is retained. Not mapped in a forked child. */
    size_t size;
    uint64_t *places; /* by item; UINT64_MAX: not retained */
    /* The checkpoint they belong to. If a failed save has overwritten some since, their hashes reveal it. */
    ckd_id of;
} cached_values;

/* State that only the trainer's thread uses. */
typedef struct session_trainer {
    interval interval;
    double metric; /* of the next snapshot */
    metric_alarms alarms;
    /* left_ns: when the last step returned to the trainer; 0: before the first step */
    uint64_t last_step, left_ns;
    uint64_t fence_ns;    /* time since then in fences and requested waits */
    bool pending;         /* a save is due as soon as a slot is free */
    bool busy_since_step; /* a save was in progress at some time since the last step */
    bool fenced_some;     /* some group was fenced since the newest snapshot began */
    bool stop_asked;
    bool save_asked; /* of this rank; the trainer makes all ranks save */
} session_trainer;

/*
 * State that the trainer's thread and the saver share. The mutex guards it, except the contents of slots (invariant 1).
 * `changed` signals changes.
 */
typedef struct session_shared {
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    session_slot slots[SESSION_SLOTS];
    uint32_t slot_count; /* slots that have a snapshot */
    /* How many slots may be staged at once: one less than slot_count if the last saved one is retained. */
    uint32_t staged_max;
    uint32_t first, used; /* staged slots, as a ring */
    ckd_phase phase;
    bool idle_since_step; /* training has said since the last step that it is idle */
    bool idles;           /* it was idle at some time between the last two steps */
    bool idle_too_short;  /* a fence found that the idle time had not sufficed to copy the last snapshot */
    uint32_t waiting;     /* number of calls that wait for saves */
    bool ending;
    ckd_status failed; /* of a save; not reported yet */
    ckd_error failure;
    ckd_session_state state;   /* counters and times */
    uint64_t ended_persist_ns; /* persist time of a save that ended since the trainer last looked; 0: none */
    bool opened;               /* the saver has tried to open the store, with this result */
    ckd_status open_status;
    ckd_error open_error;
} session_shared;

/*
 * The saver's state. Other threads use it only under store_turn, except `ranks`, which is fixed once the session is
 * open, and `cached`, which the trainer makes before it stages the first snapshot.
 */
typedef struct session_saver {
    pthread_t thread;
    bool started;
    pthread_mutex_t store_turn;
    ckd_store *store;
    ckd_ranks *ranks;
    session_slot *reference; /* the last saved slot if it is still in memory, else NULL */
    ckd_id reference_id;
    launch_record launch; /* of rank 0 and of sessions without ranks */
    cached_values cached;
    /*
     * the last save failed as if files of its parent were gone; cached values would hide that, so the next save uses
     * none
     */
    bool parent_in_doubt;
    save_alarms alarms;
    uint64_t unthrottled_ns; /* duration of the last save without its pauses; 0: not known */
} session_saver;

/* Fields outside the parts are set by open and registration. From the first step on they are fixed, except `save`. */
struct ckd_session {
    pid_t process;
    bool reports;                     /* its steps, to the supervisor of this process (progress.c) */
    ckd_session_options options;      /* its pointers become invalid after open */
    ckd_save_options save;            /* of the next save, under store_turn; the strings are below */
    char opened_run[CKD_RUN_MAX + 1]; /* as requested; `run` may be a branch of it */
    char run[CKD_RUN_MAX + 1], parent_run[CKD_RUN_MAX + 1], resumed_run[CKD_RUN_MAX + 1], metric_name[32];
    ckd_on_duplicate on_duplicate; /* as requested */
    ckd_store_options store_options;
    char *path;

    session_item *items;
    size_t item_count, item_capacity;
    size_t *names; /* hash table of the items' names (registration.c) */
    size_t name_capacity;
    snapshot_source *sources; /* By item, once the first step was made. Items on devices have size 0 here. */
    device_source *device_sources; /* of the items on devices */
    size_t device_count;
    copy_threads *copy_threads;
    session_agent agent;

    atomic_int requests; /* ckd_request bits; any thread, and signal handlers */
    session_trainer trainer;
    session_shared shared;
    session_saver saver;
};

/* Returns STATE in a forked child of the process that opened the session, INVALID for NULL. */
ckd_status session_check(const ckd_session *s, ckd_error *err);

/* ---- trainer.c ---- */
/*
 * Returns when the items of a group, or of SNAPSHOT_ALL, are copied. After SNAPSHOT_ALL, everything staged is of one
 * step.
 */
void session_fence(ckd_session *s, uint32_t group);
/* Waits until no save is in progress. */
void session_drain(ckd_session *s);
/* Returns the failure of a save that was not reported yet, and clears it. */
ckd_status session_report_failure(ckd_session *s, ckd_error *err);

/* ---- progress.c ---- */
/* As ckd_progress_enter, if the session reports. */
ckd_progress_phase session_enter(const ckd_session *s, ckd_progress_phase phase);

/* ---- registration.c, devices.c ---- */
/*
 * Sets the roles and weights of the registered tensors. lossy: the store's on_message names those in doubt. A
 * failure changes nothing. Errors: INVALID (a name), NOMEM.
 */
ckd_status session_find_roles(ckd_session *s, bool lossy, ckd_error *err);
/* Lists the items on devices, at the first step. */
ckd_status session_device_sources(ckd_session *s, ckd_error *err);
/* Returns the bytes that one more snapshot needs after `waiting` others, within ckd_session_options.device_bytes. */
device_snapshot_bytes session_device_size(const ckd_session *s, uint32_t waiting);
/* Makes the slot's device snapshot. */
ckd_status session_device_slot(ckd_session *s, session_slot *slot, ckd_error *err);
/* Starts copying; a failure becomes the save's. */
void session_device_stage(ckd_session *s, session_slot *slot);
/* Makes the trainer's streams wait for a group, or SNAPSHOT_ALL; a failure becomes the save's. */
void session_device_fence(ckd_session *s, session_slot *slot, uint32_t group);
/* Returns the first failure of the slot's device copies so far. */
ckd_status session_device_check(ckd_session *s, const session_slot *slot, ckd_error *err);
/*
 * Sets the data of an item on a device for the save. *device is then in use, or not needed if the data is on the host.
 */
ckd_status session_device_read(ckd_tensor *t, ckd_device *device, const session_slot *slot,
                               const session_item *item, ckd_error *err);

/* Bytes of an item in a snapshot: at most DEVICE_SAMPLE_MAX, from byte `at` on. */
typedef struct session_sample {
    size_t item;
    uint64_t at;
    size_t bytes;
    void *to;
} session_sample;
/* Copies samples of a snapshot, which is on the host and on devices. Errors: NOMEM, DEVICE. */
ckd_status session_read_samples(const ckd_session *s, const session_slot *slot, const session_sample *samples,
                                size_t count, ckd_error *err);

/* ---- saver.c ---- */
/* Returns the bytes that retaining values takes. */
uint64_t cached_values_size(const ckd_session *s);
/* Allocates the memory and touches its pages. Errors: NOMEM. */
ckd_status cached_values_make(ckd_session *s, ckd_error *err);
void cached_values_free(ckd_session *s, bool in_child);
/* Returns the memory for an item's values; NULL: not retained. */
void *cached_values_of(const ckd_session *s, size_t i);

/*
 * Waits until the trainer has shown that the snapshot is of one step (invariant 2). *copied: its times. Errors: STATE
 * (it is not), those of copies on devices.
 */
ckd_status session_await_fence(save_stage *copied, ckd_session *s, session_slot *slot, ckd_error *err);

/* Records the checkpoint that the session saved or restored last, which the next save follows. */
void session_record_last(ckd_session *s, const ckd_checkpoint *last);
void *session_saver_main(void *context);

#endif
