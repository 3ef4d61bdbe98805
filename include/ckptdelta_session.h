/*
 * ckptdelta, saving in the background of training. Part of ckptdelta.h, which includes it; the same conventions hold.
 *
 *   step -> snapshot (a copy in memory) -> background: residual, encode, write, sync, commit
 *
 * A trainer registers its tensors once and calls ckd_session_step after every iteration. When a save is due, the
 * session copies the state into its own memory and returns to the trainer. Low-priority threads do the rest, in a store
 * that the session has opened for itself. If they fail, the next call reports the error. Training can go on after that,
 * and the next save needs no special action.
 *
 *     ckd_session_open(&session, "runs/gpt", &options, &err);
 *     for each tensor: ckd_session_add(session, &tensor, data, 0, &err);
 *     ckd_session_restore(&from, session, CKD_LATEST, &err);         NOT_FOUND: nothing to resume from, from.step is 0
 *     for (step = from.step + 1; step <= steps; step++) {
 *         forward(), backward();
 *         ckd_session_fence(session);                                lazy snapshots only; otherwise returns at once
 *         optimizer();
 *         ckd_session_step(session, step, &err);                     the last step: ckd_session_save
 *     }
 *     ckd_session_close(session, &err);                              waits for saves in progress, reports failures
 *
 * All calls except ckd_session_request and ckd_session_phase must come from one thread at a time, in the process that
 * opened the session. In a forked child they do nothing and fail with STATE. The session's threads inherit the cores of
 * the thread that opens it, so open it before binding that thread to one core.
 *
 * Below `ckptdelta run` a session of the supervised run reports its steps, saves and evaluations as
 * ckptdelta_progress.h describes.
 */
#ifndef CKPTDELTA_SESSION_H
#define CKPTDELTA_SESSION_H

#include "ckptdelta.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ckd_session ckd_session;

typedef enum ckd_snapshot {
    CKD_SNAPSHOT_COPY = 0, /* ckd_session_step returns when the state is copied */
    /*
     * ckd_session_step returns at once. Tensors are copied while the trainer computes something that does not change
     * them. Call ckd_session_fence before anything writes to a registered tensor: it waits for pending copies and helps
     * with them. Usually the right place is before the optimizer. If the forward pass changes tensors (running
     * statistics of a normalisation), call it before that, or fence their group. Registered bytes are copied at once. A
     * save is committed only after a fence, the next step or a wait has shown that nothing was written. Until then the
     * trainer must not write.
     */
    CKD_SNAPSHOT_LAZY = 1
} ckd_snapshot;

/* The choice when a save is due but earlier saves in progress leave no memory for a snapshot. */
typedef enum ckd_when_busy {
    CKD_BUSY_BLOCK = 0,    /* wait: no save is left out */
    CKD_BUSY_SKIP = 1,     /* skip the save and count it */
    CKD_BUSY_COALESCE = 2, /* save at the first step with free memory; several due saves become one */
} ckd_when_busy;

typedef struct ckd_saved {
    uint64_t step;             /* the step to save */
    ckd_status status;         /* CKD_OK: durable */
    ckd_checkpoint checkpoint; /* if durable; its run may be a branch */
    ckd_error error;           /* if not durable */
    uint64_t stall_ns;         /* how long training stood still for it */
    uint64_t persist_ns;       /* from the call of ckd_session_step until durable */
} ckd_saved;
/*
 * Called on a session thread for every save that ended. The thread waits for it to return. The callback must not call
 * the session.
 */
typedef void (*ckd_saved_fn)(void *context, const ckd_saved *saved);

typedef struct ckd_session_options {
    size_t struct_size;
    /*
     * As for ckd_save_begin. `run` is required. step, rank, world and checkpoint_id are ignored; `ranks` sets the last
     * three. Strings are copied.
     *
     * on_duplicate CKD_DUPLICATE_ERROR acts as BRANCH after a restore of any step but the newest. Without a restore, it
     * makes saves fail (EXISTS) while the run is already at or past their step. This keeps a training run that starts
     * over from mixing with the earlier one.
     *
     * A session knows the checkpoint that it saved or restored last, and the newest one of its run when it was opened.
     * If another launch saves to the run meanwhile, the session's next saves fail instead of mixing the two: EXISTS,
     * naming that checkpoint and its time. With BRANCH each launch continues in its own branch, after its last save.
     * SAME_OK does not check.
     *
     * If the checkpoint that was restored is renamed before the first save, that save continues it under its new name.
     * If it is deleted, the save continues none. on_message says so.
     */
    const ckd_save_options *save;
    const ckd_store_options *store; /* NULL: the defaults. Session threads call its on_message. */
    /*
     * When to save. Set any of the next four; a save is due as soon as one of them says so. None set: `overhead` alone
     * decides. every_steps: at multiples of this number of steps. every_s: this many seconds after the last save began.
     */
    uint64_t every_steps;
    double every_s;
    /*
     * Adaptive: saves as often as possible while training loses at most this share of its time to stalls and slower
     * iterations together (0.035 is 3.5 %). 0: off, or 0.035 if nothing else is set. After Mohan, Phanishayee and
     * Chidambaram, "CheckFreq: Frequent, Fine-Grained DNN Checkpointing", FAST 2021, section 4.4. Unlike there, losses
     * are accounted for save by save (engine/session/DECISIONS.md).
     */
    double overhead;
    /*
     * Mean time between failures of the whole job, in seconds; 0: not known. Saves are then sqrt(2 x cost of a save x
     * mtbf) apart, which minimises the time lost to saves and failures together (Young, CACM 17(9), 1974; Daly, FGCS
     * 22(3), 2006). `overhead` may make the interval longer.
     */
    double mtbf_s;
    ckd_snapshot snapshot;
    ckd_when_busy when_busy;
    /*
     * Bytes of memory for snapshots, allocated and touched at the first step; 0: as much as one snapshot takes. Each
     * save in progress needs a snapshot (saves_under_way). If not even one fits, the first step fails with INVALID.
     *
     * Spare memory avoids reading and decoding the parent from the store. If everything is exact and one more snapshot
     * fits, the last snapshot is retained, and the next save is coded against it. Otherwise the session retains the
     * values that a load of the newest checkpoint would return, for tensors that are coded against their parents:
     * weights, masters and everything exact. They take as many bytes as these tensors have; for W, m and v in f32 this
     * is a third of a snapshot. Lossy moments and tensors on devices are not retained. Either kind is checked against
     * the store's hashes before use. The first save after a restore fills it again.
     */
    uint64_t snapshot_bytes;
    uint32_t copy_threads; /* threads that copy, including the caller's; 0: one per core, at most 4 */
    int nice; /* of background threads, relative to the caller's; 0: 10; negative: same as the caller's */
    /*
     * NULL: this process saves by itself. Otherwise all its ranks open a session together (ckd_ranks_join, collective)
     * and call step with the same steps. Only every_steps, ckd_session_save and CKD_BUSY_BLOCK are allowed, because
     * they mean the same on all ranks. If a rank dies or is late, all later saves fail: close the session on all ranks
     * and open it again.
     */
    const struct ckd_ranks_options *ranks;
    ckd_saved_fn on_saved;
    void *saved_context;
    /*
     * Non-zero: if the requested checkpoint is damaged, ckd_session_restore tries the one before it, and so on. The
     * store's on_message names each damaged one. Not with `ranks`, which might not agree.
     */
    int restore_older;
    /*
     * Bytes of each device's memory for snapshots of its tensors, allocated at the first step; 0: as much as one
     * snapshot takes. Tensors that do not fit, or all of them if the device has less memory, are copied to pinned host
     * memory. That copy is as slow as the bus, and its memory counts as `snapshot_bytes`. Tensors of at most 64 KiB are
     * in both, because they travel to the host together. With saves_under_way 2 and memory for two snapshots, the state
     * can be copied while an earlier save is in progress.
     */
    uint64_t device_bytes;
    /*
     * Bytes of device memory for a copy of the weights as a load would return them; 0: none. For lossy saves of tensors
     * whose snapshots are in device memory: the next save then need not read, decode and transfer its parent. The copy
     * takes as much as the weights. For weights that do not fit, the parent is read from the store. The first save
     * after a restart reads it, too.
     */
    uint64_t device_reference_bytes;
    /*
     * How many saves may be in progress at a time if memory allows; 0: one, at most 2. With one, a state is copied only
     * when the previous one is durable. A kill then loses at most the newest state, and training resumes from the one
     * before. With two, training waits less where a save takes longer than an interval, but a kill may lose two states.
     */
    uint32_t saves_under_way;
    /*
     * An agent that keeps snapshots in its memory and saves them (ckptdelta_agent.h, docs/agent.md). The newest
     * complete state then outlives the trainer. "auto": the store's agent in its usual place; an absolute path: of its
     * socket; "": none; NULL: the environment's CKPTDELTA_AGENT, which has the same values. If there is no agent, if it
     * has gone, or if tensors are on devices, the session saves by itself, and on_message says so once. With `ranks`,
     * each rank has an agent on its node, or none uses one.
     *
     * With an agent there are saves_under_way + 1 snapshots, which count towards its budget: snapshot_bytes has no
     * effect. ckd_session_open waits until the agent has made the states of the run's killed trainers durable.
     * ckd_session_restore takes a checkpoint's values from the agent's memory if they are there. For a lossy checkpoint
     * these are the original values, without losses.
     */
    const char *agent;
    /*
     * How long an agent may show no sign of life while the session waits for it, in seconds. It may be stopped, for
     * example. After that the session says so once and saves by itself. An agent that is working gets all the time it
     * needs. 0: the environment's CKPTDELTA_AGENT_WAIT, or 20.
     */
    double agent_wait_s;
} ckd_session_options;
#define CKD_SESSION_OPTIONS_INIT \
    { .struct_size = sizeof(ckd_session_options) }

/*
 * Opens the store (CKD_OPEN_CREATE) and starts the session's threads. Errors: INVALID, those of ckd_store_open and
 * ckd_ranks_join.
 */
CKD_API ckd_status ckd_session_open(ckd_session **out, const char *path, const ckd_session_options *options,
                                    ckd_error *err);

/*
 * Registers a tensor, or this rank's region of it, to be saved and restored. Tensors are saved in the order of
 * registration; ckd_save_tensor says which order is best. All tensors must be registered before the first step (STATE).
 *
 * `data`: the region's elements, contiguous. The caller owns them and keeps them valid until the session is closed.
 * tensor->data and read are ignored. tensor->optimizer: NULL, or valid as long as data. It is read whenever a snapshot
 * is taken, and used if the save is one step after its parent. `group`: any number; ckd_session_fence_group waits for
 * the tensors of one group. tensor->device: NULL, or the device of `data` and the stream on which the trainer reads and
 * writes it. The device makes the copy in the order of that stream, group by group in the order of their numbers.
 * Neither ckd_session_step nor a fence waits for the copy; later work on the stream does.
 *
 * Errors: INVALID (also: the name is registered, and its region overlaps this one, or it has another shape or dtype),
 * NOMEM.
 */
CKD_API ckd_status ckd_session_add(ckd_session *session, const ckd_tensor *tensor, void *data, uint32_t group,
                                   ckd_error *err);
/*
 * Registers arbitrary bytes, such as the state of a random number generator or a data loader. They are stored as a blob
 * of at most CKD_BLOB_MAX bytes. ckd_session_step copies them before it returns, even for a lazy snapshot, so the next
 * forward pass may change them without a fence. With ranks, rank 0's bytes are stored and all ranks restore them.
 * Register rank-specific data as a tensor (CKD_U8, one name for each rank). A duplicate name is INVALID.
 */
CKD_API ckd_status ckd_session_add_bytes(ckd_session *session, const char *name, void *data, size_t size,
                                         ckd_error *err);

/*
 * Loads a checkpoint of the run into everything registered. Waits for saves in progress.
 *
 * step CKD_LATEST: the highest step of the run, or of a branch (RUN~2, ...) that continued it after a restore of an
 * older step. Among these, the checkpoint with the latest created_ns is restored, or if it is suspect, the newest one
 * before it that is not. Another step: of the run as it is now, else of the runs that it branched off, else of a
 * branch. Later saves record that they were resumed from it. If it is not the newest of its run, they continue in a
 * branch. `from` (may be NULL) receives the checkpoint.
 *
 * With `ranks` it is collective. Rank 0 chooses the checkpoint, and all ranks load it, or get the error of the first
 * rank that failed, whose registered memory may have changed.
 *
 * Errors: NOT_FOUND (no such checkpoint; nothing was changed), MISMATCH (it lacks a tensor or bytes, or has another
 * shape, dtype or size; nothing was changed), CORRUPT (also for CKD_LATEST if the manifest of a newer one, or the
 * newest of a later branch, is damaged; see restore_older), STATE (CKD_LATEST, and all are suspect), BUSY (another
 * process holds the store's lock), those of ckd_load_all.
 */
CKD_API ckd_status ckd_session_restore(ckd_checkpoint *from, ckd_session *session, uint64_t step,
                                       ckd_error *err);

/*
 * Call it after each iteration, when the registered tensors are those of `step`. It saves if a save is due, and
 * measures how long iterations take. Even when it returns the error of an earlier save, it has done its work for this
 * step. Errors: INVALID (snapshot_bytes; a step that is not after the last one, or above 2^63 - 1; nothing was done),
 * STATE (no fence followed a lazy snapshot; that save is dropped), those of ckd_save_commit and the calls before it.
 */
CKD_API ckd_status ckd_session_step(ckd_session *session, uint64_t step, ckd_error *err);
/* Like ckd_session_step, but always saves. Waits for memory. A step cannot be saved twice. */
CKD_API ckd_status ckd_session_save(ckd_session *session, uint64_t step, ckd_error *err);

/*
 * Sets the value of options.save.metric_name, which later saves record. Set it before each step: the step compares it
 * with the values before. NaN is not recorded, and raises an alarm.
 *
 * A session raises an alarm (ckd_alarm, ckptdelta_progress.h) if this metric, the size of a delta or the time of a save
 * is unlike those before. It also raises one if the weights no longer change. docs/run.md has the limits. An alarm is a
 * message to the store's on_message, and a count in ckd_session_state. It also reaches `ckptdelta run`. An alarm has
 * no other effect.
 */
CKD_API void ckd_session_metric(ckd_session *session, double metric);
/* Clears the metric: later saves record none, and the next step compares none. */
CKD_API void ckd_session_no_metric(ckd_session *session);
/*
 * Compares the metric of a step without recording it. For steps for which ckd_session_step is not called. The call is
 * ignored unless the step comes after the last one compared.
 */
CKD_API void ckd_session_observe(ckd_session *session, uint64_t step, double metric);
/*
 * Raises an alarm for the trainer, of any kind but CKD_ALARM_NONE. The session reports and counts it like its own.
 * step: the first one that may be affected; below `ckptdelta run`, `--on-anomaly rewind` goes back to a checkpoint of
 * an earlier step. text: describes the problem to people; text beyond 299 bytes is cut.
 */
CKD_API void ckd_session_alarm(ckd_session *session, ckd_alarm alarm, uint64_t step, const char *text);

/*
 * Returns when all pending copies of registered memory are done. The caller may write to it from then on. For tensors
 * on devices the caller does not wait; later work on their streams does.
 */
CKD_API void ckd_session_fence(ckd_session *session);
/* Like ckd_session_fence for the tensors of one group, for optimizers that go layer by layer. */
CKD_API void ckd_session_fence_group(ckd_session *session, uint32_t group);
/*
 * Gives up the newest lazy snapshot if its copies are not done. For a caller that has noticed that something wrote to a
 * registered tensor. Nothing is committed: the save fails with STATE, on all ranks. Call it before the fence.
 */
CKD_API void ckd_session_discard(ckd_session *session);

typedef enum ckd_phase {
    CKD_PHASE_ANY = 0,  /* nothing special: the initial phase */
    CKD_PHASE_BUSY = 1, /* training needs the processors: an optimizer on the host, the data loader */
    CKD_PHASE_IDLE = 2, /* training waits for something else: a GPU, the network */
    /* the model is evaluated: below `ckptdelta run` no steps are expected until the next phase or step */
    CKD_PHASE_EVALUATION = 3
} ckd_phase;
/*
 * Says what training does from now on. While it is busy, saves in progress pause between tensors. The pauses of a save
 * take at most as long in total as the save itself (a second while that is not known). A save does not pause while
 * something waits for it. An agent's copies to other nodes also pause, within limits.
 *
 * Threads that copy a lazy snapshot pause, too, if there was an idle phase between the last two steps: the bubbles of a
 * pipeline, for example. They copy during the next idle phase. A fence copies the rest. If there is a rest, the idle
 * time was too short, and the next snapshot is copied at once.
 *
 * Callable from any thread.
 */
CKD_API void ckd_session_phase(ckd_session *session, ckd_phase phase);

typedef enum ckd_wait {
    CKD_STAGED = 1, /* pending snapshots are copied, as after ckd_session_fence */
    CKD_DURABLE = 2 /* every save begun is durable or has failed */
} ckd_wait;
/* Waits for the given state. Errors: as for ckd_session_step. */
CKD_API ckd_status ckd_session_wait(ckd_session *session, ckd_wait until, ckd_error *err);

typedef enum ckd_request {
    CKD_REQUEST_SAVE = 1, /* save at the next step */
    CKD_REQUEST_STOP = 2  /* save at the next step; the trainer should stop then */
} ckd_request;
/*
 * May be called from any thread, and from a signal handler (SIGUSR1 or SIGTERM, say). The library installs none. With
 * ranks a request does not save, because it may reach the ranks at different steps. The trainers look at
 * ckd_session_state, agree (an all-reduce), and call ckd_session_save at the same step.
 */
CKD_API void ckd_session_request(ckd_session *session, ckd_request request);

/* The state of a session, and its figures since it was opened. */
typedef struct ckd_session_state {
    uint64_t saved, failed;   /* saves that ended */
    uint64_t skipped;         /* steps whose save was skipped for lack of memory */
    uint64_t coalesced;       /* saves delayed for lack of memory */
    uint32_t under_way;       /* saves not yet durable */
    int stop_asked;           /* set by ckd_session_request */
    int save_asked;           /* with ranks only: a save request to this rank, until it saves */
    uint64_t staged_step;     /* of the newest snapshot; CKD_LATEST: none */
    uint64_t durable_step;    /* of the newest durable checkpoint; CKD_LATEST: none */
    uint64_t snapshot_bytes;  /* held for snapshots and for retained values of the newest checkpoint */
    uint64_t step_ns;         /* recent mean of an iteration without a save; 0: not known yet */
    uint64_t stall_ns;        /* total time that training stood still */
    uint64_t interference_ns; /* total slowdown of iterations beside saves */
    uint64_t trained_ns;      /* from the first step to the last */
    uint64_t last_stall_ns;   /* of the newest save that ended */
    uint64_t last_persist_ns; /* of the same save, from the call of ckd_session_step until durable */
    uint64_t interval_steps;  /* steps between saves at present; 0: not known yet */
    uint64_t device_bytes;    /* held for snapshots on all devices */
    /* retained for the next save of a lossy session; 0: that save reads and decodes its parent from the store */
    uint64_t kept_bytes;
    uint64_t device_reference_bytes; /* the same on devices */
    uint64_t alarms;                 /* alarms of this rank so far */
    ckd_alarm last_alarm;
    uint64_t last_alarm_step;
} ckd_session_state;
/* Fills in the current state. Never waits. */
CKD_API void ckd_session_poll(ckd_session_state *out, ckd_session *session);

/*
 * Waits for all saves, ends the threads and closes the store. Frees the session, also on failure. The status is that of
 * ckd_session_wait. Accepts NULL.
 */
CKD_API ckd_status ckd_session_close(ckd_session *session, ckd_error *err);

/* ---------------------------------------------------------------------------------------- how long saves took */

/*
 * The times of one save, whether a session made it or not. Stages run concurrently, and each stage adds up the times of
 * its threads. The sum of the stages may therefore exceed total_ns; the ratio shows how well they overlap. 0: not
 * known.
 */
typedef struct ckd_save_times {
    char run[CKD_RUN_MAX + 1];
    uint64_t step;
    uint64_t created_ns; /* when it became durable */
    uint64_t raw_bytes, stored_bytes;
    uint64_t written_bytes; /* chunk files, manifest and materialized copies; the catalog is not counted */
    uint64_t stall_ns;      /* how long a session's trainer stood still */
    uint64_t analyse_ns;    /* reading parent values and choosing codings */
    uint64_t encode_ns;
    uint64_t write_ns; /* writing to the operating system */
    uint64_t sync_ns;  /* syncing to disk */
    uint64_t total_ns; /* from the beginning until durable */
} ckd_save_times;
/* The stages of a save on one rank, roughly in order. Analysing, encoding and writing run concurrently. */
typedef enum ckd_stage {
    CKD_STAGE_SNAPSHOT = 1, /* session only: from the trainer's call until the state is copied */
    CKD_STAGE_ANALYSE = 2,
    CKD_STAGE_ENCODE = 3,
    CKD_STAGE_WRITE = 4,
    CKD_STAGE_SYNC = 5,
    CKD_STAGE_WAIT = 6,  /* this rank's part is durable, others are not */
    CKD_STAGE_COMMIT = 7 /* rank 0: from the last part until the checkpoint is in the catalog */
} ckd_stage;
#define CKD_STAGE_LAST CKD_STAGE_COMMIT
/* Returns "snapshot", "analyse", ...; static. NULL: unknown stage. */
CKD_API const char *ckd_stage_name(ckd_stage stage);
/* One stage on one rank. Ranks on different machines are aligned only as well as their clocks. */
typedef struct ckd_stage_times {
    size_t save; /* index in ckd_timeline.items */
    uint32_t rank;
    ckd_stage stage;
    /* first and last moment of the stage, since the save began on its first rank */
    uint64_t begin_ns, end_ns;
    uint64_t work_ns; /* summed over all threads; for a snapshot: how long training stood still */
    uint64_t
        bytes; /* of the rank's values; for writing: with materialized copies; for syncing: stored bytes */
} ckd_stage_times;
typedef struct ckd_timeline {
    size_t count;
    ckd_save_times *items;   /* by run name, then step */
    size_t stage_count;      /* of all saves; saves by an older version have none */
    ckd_stage_times *stages; /* by save, rank, stage */
} ckd_timeline;
/*
 * Returns the times of saves of all runs, or of one run. run may be NULL. Only the catalog has these times; a rebuild
 * loses them. Release with ckd_timeline_free. Errors: CORRUPT, IO, NOMEM.
 */
CKD_API ckd_status ckd_store_timeline(ckd_timeline **out, ckd_store *store, const char *run, ckd_error *err);
CKD_API void ckd_timeline_free(ckd_timeline *timeline);

#ifdef __cplusplus
}
#endif
#endif
