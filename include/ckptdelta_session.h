/*
 * ckptdelta, saving while training goes on. Part of ckptdelta.h, which includes it; the same conventions hold.
 *
 *   step -> snapshot (a copy in memory) -> background: residual, encode, write, sync, commit
 *
 * A trainer registers its tensors once and calls ckd_session_step after every iteration. When a save is due, the session copies the
 * state into memory of its own and goes back to the trainer; the rest happens on threads of a lower priority, in a store that the
 * session has opened for itself. What fails there is told by the next call, and training can go on: the next save works without more ado.
 *
 *     ckd_session_open(&session, "runs/gpt", &options, &err);
 *     for each tensor: ckd_session_add(session, &tensor, data, 0, &err);
 *     ckd_session_restore(&from, session, CKD_LATEST, &err);            NOT_FOUND: nothing to resume from, from.step is 0
 *     for (step = from.step + 1; step <= steps; step++) {
 *         forward(), backward();
 *         ckd_session_fence(session);                                   lazy snapshots only; else it returns at once
 *         optimizer();
 *         ckd_session_step(session, step, &err);                        the last step: ckd_session_save
 *     }
 *     ckd_session_close(session, &err);                                 waits for what is under way, and tells if it failed
 *
 * All calls but ckd_session_request and ckd_session_phase come from one thread at a time, and in the process that opened the session: in a
 * forked child they do nothing and fail with STATE. The session's threads run on the cores that the thread that opens it may use: open it before
 * binding that to one.
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
     * It returns at once, and tensors are copied while the trainer computes what does not change them. Call ckd_session_fence before
     * anything writes to a registered tensor: it waits for what is not copied yet, and helps. Usually that is before the optimizer; if the
     * forward pass changes some (running statistics of a normalisation), before that, or before their group. Bytes are copied at once. A save is
     * committed no sooner than a fence, the next step, or a wait says that nothing has been written to, so that between them the trainer must not.
     */
    CKD_SNAPSHOT_LAZY = 1
} ckd_snapshot;

/* What happens when a save is due, and there is no room for a snapshot because earlier saves are still under way. */
typedef enum ckd_when_busy {
    CKD_BUSY_BLOCK = 0,    /* wait: nothing that is due is left out */
    CKD_BUSY_SKIP = 1,     /* leave it out, and count it */
    CKD_BUSY_COALESCE = 2, /* save at the first step at which there is room; of several that are due, once */
} ckd_when_busy;

typedef struct ckd_saved {
    uint64_t step;             /* as it was to be saved */
    ckd_status status;         /* CKD_OK: durable */
    ckd_checkpoint checkpoint; /* if durable: its run may be a branch */
    ckd_error error;           /* else */
    uint64_t stall_ns;         /* that training stood still for it */
    uint64_t persist_ns;       /* from the call of ckd_session_step until it was durable */
} ckd_saved;
/* Told of every save that ended, on a thread of the session, which waits for it. It must not call the session. */
typedef void (*ckd_saved_fn)(void *context, const ckd_saved *saved);

typedef struct ckd_session_options {
    size_t struct_size;
    /*
     * As for ckd_save_begin; `run` is required, `step` is not looked at, strings are copied. rank, world and checkpoint_id: not looked at,
     * see `ranks`. on_duplicate CKD_DUPLICATE_ERROR becomes BRANCH after a restore of another step than the newest. Without a restore, it makes saves fail (EXISTS) as long as
     * the run is at their step already, or past it: a training that begins anew is not to be mixed with the one before it.
     *
     * A session knows which checkpoint it saved or restored last, and which its run had when it was opened. If another launch saves to the
     * run meanwhile, its next saves fail (EXISTS, naming that checkpoint and when it was saved) instead of mixing the two. With BRANCH each goes on
     * in a branch of its own, after its own last save. SAME_OK does not look.
     */
    const ckd_save_options *save;
    const ckd_store_options
        *store; /* NULL: the defaults. Its on_message is called on threads of the session */
    /*
     * When to save. Any of these; a save is due as soon as one says so. None: by `overhead` alone. every_steps: at steps that are multiples of
     * it. every_s: so many seconds after the last one began.
     */
    uint64_t every_steps;
    double every_s;
    /*
     * Adaptive: as often as is possible without training losing more than this share of its time, stalls and slowed iterations taken
     * together (0.035 is 3.5 %). 0: not, or 0.035 if nothing else is asked for. After Mohan, Phanishayee and Chidambaram, "CheckFreq: Frequent,
     * Fine-Grained DNN Checkpointing", FAST 2021, section 4.4; here what was lost is accounted for, save by save (docs/decisions.md).
     */
    double overhead;
    /*
     * Mean time between failures in seconds, of the whole job; 0: not known. Then saves are sqrt(2 x cost of a save x mtbf) apart, where the
     * time lost to saves and that lost with a failure are together least (Young, CACM 17(9), 1974; Daly, FGCS 22(3), 2006), or farther if
     * `overhead` says so.
     */
    double mtbf_s;
    ckd_snapshot snapshot;
    ckd_when_busy when_busy;
    /*
     * Bytes of memory for snapshots, allocated and touched at the first step; 0: as much as one takes. INVALID at the first step if one does not
     * fit. One is needed for each save that may be under way (saves_under_way). What more is used for depends on the fidelity. If all is exact and there is room for one more, the last snapshot is
     * kept, and the next save is coded against it instead of against what it would have to read from the store and decode. If not, what a load of the newest checkpoint would give is kept for that, of the
     * tensors that are coded against their parents: weights, masters, and all that is exact, as many bytes as these have (of W, m and v in f32 a
     * third of a snapshot); of first and second moments in a lossy fidelity nothing is, nor of what is on a device. Either is checked against the store's hashes before it is used, and made anew by the
     * first save after a restore.
     */
    uint64_t snapshot_bytes;
    uint32_t copy_threads; /* that copy, the caller's included; 0: one per core, at most 4 */
    int nice;              /* of background threads, against the caller's; 0: 10; negative: as the caller's */
    /*
     * NULL: this process saves by itself. Else all ranks of it open a session together (ckd_ranks_join: collective) and call step with
     * the same steps; only every_steps, ckd_session_save and CKD_BUSY_BLOCK, which mean the same on all, are allowed. If one dies or does not come in time, all saves
     * that follow fail: close the session on all ranks, and open it again.
     */
    const struct ckd_ranks_options *ranks;
    ckd_saved_fn on_saved;
    void *saved_context;
    /*
     * Not 0: ckd_session_restore takes the checkpoint before the one it is asked for if that is damaged, and so on, and tells each through the store's on_message. Not with
     * `ranks`, which might not agree.
     */
    int restore_older;
    /*
     * Bytes of each device's memory for snapshots of what lies there, allocated at the first step; 0: as much as one takes. What has no room there (all of
     * it, if the device has less) is copied to pinned host memory instead, which takes as long as the bus does, and counts as `snapshot_bytes`. Tensors of at most 64 KiB are in both: they go to the host together. Room for two: with saves_under_way
     * 2, the state can be copied while an earlier save is under way.
     */
    uint64_t device_bytes;
    /*
     * Bytes of devices' memory in which weights are kept as a load would give them, so that the next save need not read, decode and send its parent; 0: none. They
     * take as much as the weights do; of exact states in mixed precision as much as the masters. Of what has no room there, the parent is read from the store. After a restart, the first save reads it.
     */
    uint64_t device_reference_bytes;
    /*
     * How many saves may be under way at a time, if there is memory for their snapshots; 0: one, at most 2. With one, a state is copied only once the one before it is durable: whenever the
     * process is killed, the newest state that was to be saved may be lost and no other, and training goes on from the one before. With two, training waits less where a save takes longer than
     * an interval, and two may be lost.
     */
    uint32_t saves_under_way;
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
 * Registers a tensor, or this rank's region of it, to be saved and restored, in this order (ckd_save_tensor says which order is good).
 * `data`: the region's elements, contiguous, the caller's, valid until the session is closed. tensor->data and read are not looked at. tensor->optimizer: NULL, or
 * read whenever a snapshot is taken, valid as long; used where the save is one step after its parent. `group`: any number;
 * tensors that ckd_session_fence_group waits for together. tensor->device: NULL, or where `data` is, and on which stream the trainer reads and writes it: the device makes the copy, in the
 * order of that stream, and neither ckd_session_step nor a fence waits for it; what is put on the stream behind them does. Before the first step (STATE). Errors: INVALID (also: that name is registered, and its region overlaps this one, or it has another
 * shape or dtype), NOMEM.
 */
CKD_API ckd_status ckd_session_add(ckd_session *session, const ckd_tensor *tensor, void *data, uint32_t group,
                                   ckd_error *err);
/*
 * The same for any bytes: of a random number generator, a data loader. They are copied before ckd_session_step returns, lazily or not, so that the next
 * forward pass may change them without a fence. Stored as a blob. With ranks those of rank 0 are stored, and all ranks restore these: what differs by rank is registered
 * as a tensor (CKD_U8, a name for each rank). At most CKD_BLOB_MAX. A name twice is INVALID.
 */
CKD_API ckd_status ckd_session_add_bytes(ckd_session *session, const char *name, void *data, size_t size,
                                         ckd_error *err);

/*
 * Loads a checkpoint of the run into everything that is registered. step CKD_LATEST: the one that was committed last, of the run or of a branch that it went
 * on in (RUN~2, ...) after somebody had gone back. Another step: of the run as it goes now, else of those that it branched off, else of a branch. What is saved from here on was resumed from it; if it is not its run's newest, that goes on in a
 * branch. Waits for saves under way. `from` (may be NULL): which one it was. Errors: NOT_FOUND (no such checkpoint: nothing was changed), MISMATCH (a tensor or bytes that
 * it lacks, or of another shape, dtype or size: nothing was changed), CORRUPT (also of CKD_LATEST, if there is a newer one whose manifest is damaged; see restore_older), those of
 * ckd_load_all.
 */
CKD_API ckd_status ckd_session_restore(ckd_checkpoint *from, ckd_session *session, uint64_t step,
                                       ckd_error *err);

/*
 * Call it after each iteration, when the registered tensors are those of `step`. Saves if that is due, and measures how long iterations
 * take. It does its work also when it fails: what it then tells is that an earlier save came to nothing. Errors: INVALID
 * (snapshot_bytes, a step that is not after the last one, or above 2^63 - 1: nothing was done), STATE (a lazy snapshot without a fence behind it: that save is given up), those of
 * ckd_save_commit and of what is before it.
 */
CKD_API ckd_status ckd_session_step(ckd_session *session, uint64_t step, ckd_error *err);
/* The same, and saves at this step whatever is due. Waits for room. Not twice at a step. */
CKD_API ckd_status ckd_session_save(ckd_session *session, uint64_t step, ckd_error *err);

/* Of the metric that options.save.metric_name names: recorded with what is saved from now on. */
CKD_API void ckd_session_metric(ckd_session *session, double metric);

/*
 * Returns when nothing that is registered is still to be copied: from then on it may be written to. What is on devices, by what is put on the tensors' streams from then
 * on: these wait, not the caller.
 */
CKD_API void ckd_session_fence(ckd_session *session);
/* The same for the tensors of one group, for optimizers that go layer by layer. */
CKD_API void ckd_session_fence_group(ckd_session *session, uint32_t group);

typedef enum ckd_phase {
    CKD_PHASE_ANY = 0, /* as good as any other: until something else is said */
    CKD_PHASE_BUSY =
        1, /* the processors are needed for training: the optimizer on the host, the data loader */
    CKD_PHASE_IDLE = 2 /* training waits for something else: a GPU, the network */
} ckd_phase;
/*
 * Says what training is doing from here on. While it is busy, saves under way pause between tensors, each at most as long in all as a save takes by itself (a second as
 * long as that is not known), and not when something waits for them. From any thread.
 */
CKD_API void ckd_session_phase(ckd_session *session, ckd_phase phase);

typedef enum ckd_wait {
    CKD_STAGED = 1, /* the state that is to be saved is copied, as by ckd_session_fence */
    CKD_DURABLE = 2 /* every save that was begun is durable, or has failed */
} ckd_wait;
/* Errors: as ckd_session_step tells them. */
CKD_API ckd_status ckd_session_wait(ckd_session *session, ckd_wait until, ckd_error *err);

typedef enum ckd_request {
    CKD_REQUEST_SAVE = 1, /* save at the next step */
    CKD_REQUEST_STOP = 2  /* save at the next step; the trainer is to stop then */
} ckd_request;
/*
 * From any thread, and from a signal handler: for SIGUSR1, say, and SIGTERM. The library installs none. With ranks nothing is saved by itself, as they are asked at
 * different steps: the trainers look at ckd_session_state, agree (an all-reduce), and call ckd_session_save at one step.
 */
CKD_API void ckd_session_request(ckd_session *session, ckd_request request);

/* How things are. Figures are of this session. */
typedef struct ckd_session_state {
    uint64_t saved, failed;   /* saves that ended */
    uint64_t skipped;         /* steps at which one was due, and left out for want of room */
    uint64_t coalesced;       /* put off for want of room */
    uint32_t under_way;       /* saves that are not durable yet */
    int stop_asked;           /* by ckd_session_request */
    int save_asked;           /* the same, of this rank: with ranks only, until it saves */
    uint64_t staged_step;     /* of the newest snapshot; CKD_LATEST: none */
    uint64_t durable_step;    /* of the newest checkpoint that is durable; CKD_LATEST: none */
    uint64_t snapshot_bytes;  /* held for snapshots, and for what is kept of the newest checkpoint: */
    uint64_t step_ns;         /* an iteration without a save, a recent mean; 0: not known yet */
    uint64_t stall_ns;        /* that training stood still, in all */
    uint64_t interference_ns; /* that iterations took longer beside saves, in all */
    uint64_t trained_ns;      /* from the first step to the last one */
    uint64_t last_stall_ns;   /* of the newest save that ended */
    uint64_t last_persist_ns; /* the same: from the call of ckd_session_step until it was durable */
    uint64_t interval_steps;  /* between saves, as things are now; 0: not known yet */
    uint64_t device_bytes;    /* held for snapshots on all devices */
    uint64_t
        kept_bytes; /* for the next save of a lossy session; 0: it reads and decodes that from the store */
    uint64_t device_reference_bytes; /* the same, on devices */
} ckd_session_state;
/* Never waits. */
CKD_API void ckd_session_poll(ckd_session_state *out, ckd_session *session);

/*
 * Waits for all saves, ends the threads, and closes the store. Frees the session, also on failure, which is what ckd_session_wait would have
 * told. Accepts NULL.
 */
CKD_API ckd_status ckd_session_close(ckd_session *session, ckd_error *err);

/* ---------------------------------------------------------------------------------------- how long saves took */

/*
 * One save, by a session or not. Of each stage the times of all threads that worked on it are added up, and stages go on at the same time, so that they may be more than
 * total_ns: their sum over it is how well they overlap. 0: not known.
 */
typedef struct ckd_save_times {
    char run[CKD_RUN_MAX + 1];
    uint64_t step;
    uint64_t created_ns; /* when it became durable, since 1970 */
    uint64_t raw_bytes, stored_bytes;
    uint64_t stall_ns;   /* that a session's trainer stood still */
    uint64_t analyse_ns; /* reading what it is coded against, and deciding */
    uint64_t encode_ns;
    uint64_t write_ns; /* to the system */
    uint64_t sync_ns;  /* to the disk */
    uint64_t total_ns; /* from its beginning until it was durable */
} ckd_save_times;
/* What a rank does in a save, about in this order; analysing, encoding and writing go on at the same time. */
typedef enum ckd_stage {
    CKD_STAGE_SNAPSHOT = 1, /* of a session: from its call until the state is copied */
    CKD_STAGE_ANALYSE = 2,
    CKD_STAGE_ENCODE = 3,
    CKD_STAGE_WRITE = 4,
    CKD_STAGE_SYNC = 5,
    CKD_STAGE_WAIT = 6,  /* its part is durable, others' are not */
    CKD_STAGE_COMMIT = 7 /* rank 0: from the last part until the checkpoint is in the catalog */
} ckd_stage;
#define CKD_STAGE_LAST CKD_STAGE_COMMIT
/* "snapshot", "analyse", ...; static. NULL: not known. */
CKD_API const char *ckd_stage_name(ckd_stage stage);
/* One stage of one rank. Ranks on several machines are as well aligned as their clocks. */
typedef struct ckd_stage_times {
    size_t save; /* place in ckd_timeline.items */
    uint32_t rank;
    ckd_stage stage;
    uint64_t begin_ns, end_ns; /* since the first rank of the save began; from its first to its last moment */
    uint64_t work_ns;          /* of all threads in between; of a snapshot: that training stood still */
    uint64_t bytes;            /* of the rank's values; written and synced ones: as stored */
} ckd_stage_times;
typedef struct ckd_timeline {
    size_t count;
    ckd_save_times *items;   /* by run name, then step */
    size_t stage_count;      /* of all saves; none of those that an older version made */
    ckd_stage_times *stages; /* by save, rank, stage */
} ckd_timeline;
/*
 * Of all runs, or of one (run may be NULL). Only the catalog knows these times: who rebuilds it loses them. Release with ckd_timeline_free. Errors:
 * CORRUPT, IO, NOMEM.
 */
CKD_API ckd_status ckd_store_timeline(ckd_timeline **out, ckd_store *store, const char *run, ckd_error *err);
CKD_API void ckd_timeline_free(ckd_timeline *timeline);

#ifdef __cplusplus
}
#endif
#endif
