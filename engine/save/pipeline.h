/*
 * Blocks on their way through a save: several at once, exact and lossy, of one tensor or of several. Internal to
 * engine/.
 *
 *   fetched -> analysed -> decided -> encoded -> registered -> written
 *
 * `stages` in pipeline.c lists what is done with a block at each of these points.
 *
 * Each thread takes the next task that is ready. The threads are the saving thread, while it waits, and the store's
 * workers, which the save borrows as long as blocks are in progress. There are no rounds: a thread waits only where
 * block order demands it.
 *
 * Blocks are analysed and encoded concurrently. They are decided, registered and written in order, by whichever
 * thread is free. The bytes do not depend on the number of threads: before a block is decided, its analysis is
 * repeated if earlier blocks have made it outdated (order.c).
 */
#ifndef ENGINE_SAVE_PIPELINE_H
#define ENGINE_SAVE_PIPELINE_H

#include <pthread.h>

#include "engine/save/writer.h"

/* How deltas of one tensor fare, so that a tensor for which they never win does not try one at every block. */
typedef struct delta_record {
    uint32_t losses, since;
} delta_record;

/* Blocks that share a region: of a tensor, or of a panel of it. Lives as long as the save. */
typedef struct region_job {
    tensor_context context;
    const view *parent;          /* has context.parent */
    const view_tensor *expected; /* the tensor in the save's parent */
    step_tensor *step; /* the caller's, which flushes the pipeline before it ends the step; NULL: none */
    delta_record delta_history;
    /* share of the tensor's expected cost that leaves the budget with the first block; 0: none */
    double fraction;
    struct device_values *device_values; /* where exact values lie on a device; NULL: not on one */
    /* the tile of the blocks, valid while they are in progress; NULL: exact blocks */
    struct tile_part *lossy;
    uint64_t end; /* of an exact job whose blocks are all pushed: the number behind its last block */
    struct region_job *next; /* the next exact job in order of pushing */
} region_job;

typedef enum slot_stage {
    SLOT_FETCHED,
    SLOT_ANALYSED,
    SLOT_DECIDED,
    SLOT_ENCODED,
    SLOT_REGISTERED
} slot_stage;

/* How many threads work on the blocks of a stage. */
typedef enum stage_lane {
    LANE_PARALLEL, /* several, on any blocks */
    LANE_ORDER,    /* one, in block order: it decides and registers blocks */
    LANE_WRITE,    /* one, in block order */
    LANES
} stage_lane;

/* One block's place; its job has the same number. */
typedef struct save_slot {
    region_job *region_job;
    slot_stage stage;
    bool busy;     /* a thread is analysing or encoding it */
    bool borrowed; /* its values are in the caller's memory */
    bool counted;  /* `space` is set */
    /* the input of a lossy block, whose job holds the decoded values */
    const void *input;
    save_append append; /* set once registered; its `sides` from the beginning */
    disk_space space;
} save_slot;

/*
 * A ring: block n is in place n % slot_count. Blocks before `written` are done. The next ones, before `registered`,
 * await writing; those before `decided`, encoding; those before `pushed`, analysis and decision.
 */
typedef struct save_pipeline {
    struct save_workspace *workspace; /* owns slots and jobs */
    save_slot *slots;
    block_job *jobs; /* one for each slot */
    uint32_t slot_count;
    uint32_t threads;       /* of the store's pool, with the saving thread */
    pthread_mutex_t mutex;  /* guards all of this */
    pthread_cond_t changed; /* the saving thread waits for it */
    uint64_t written, registered, decided, pushed;
    /* exact jobs, used again once they are written; only the saving thread uses these */
    region_job *first_pushed, *last_pushed;
    uint64_t waited_ns; /* in save_await, tasks done meanwhile included; only the saving thread uses it */
    uint64_t wait_registered; /* the next decision waits until this many blocks are registered */
    bool lane_taken[LANES];   /* a thread works in that lane */
    bool paused;              /* only the saving thread begins new tasks */
    bool workers_attached;    /* the store's workers help */
    bool waiting;             /* the saving thread waits */
    uint32_t running;         /* tasks */
    disk_space unwritten;     /* of registered blocks */
    /* the next block to register needs disk space, which the saving thread must make, alone */
    bool wants_space;
    uint64_t space_made;   /* for blocks before this one */
    uint64_t failed_block; /* the first block that failed, if status is not CKD_OK */
    ckd_status status;
    ckd_error error;
    pthread_rwlock_t registry_lock; /* for coding_context */
    blocks_in_flight in_flight;     /* decided, not registered */
    bool started;                   /* the locks are initialised */
} save_pipeline;

/* The number of places (and jobs) that keep a pool of `threads` busy. */
uint32_t pipeline_slots(uint32_t threads);
/* slots: `count` of the caller's, whose memory for side records is used again. Errors: NOMEM. */
ckd_status pipeline_init(save_pipeline *p, save_slot *slots, uint32_t count, ckd_error *err);
/*
 * Called when nobody works on it any more. in_child: in a forked child. The locks may count waiting threads that the
 * child does not have, so destroying them would block forever.
 */
void pipeline_free(save_pipeline *p, bool in_child);

/* Returns the next free place and its job. Works on other tasks until there is one. */
ckd_status save_next_slot(save_slot **slot, block_job **job, struct ckd_save *save, region_job *rj,
                          ckd_error *err);
/* Pushes the place, after the caller has set job->input, slot->borrowed and slot->input. */
void save_push(struct ckd_save *save);
/* Returns when this many blocks, from the first one on, are written. Works on tasks meanwhile. */
ckd_status save_await(struct ckd_save *save, uint64_t written, ckd_error *err);
/* Returns when all blocks are written and no worker helps any more. */
ckd_status save_flush(struct ckd_save *save, ckd_error *err);
/*
 * Stops the workers; blocks in progress stay where they are. May also be called on a failed save, and in a forked
 * child.
 */
void save_stop_helpers(struct ckd_save *save);
/* If values in the caller's memory are still needed, stops the workers and copies these values. */
ckd_status save_copy_borrowed(struct ckd_save *save, ckd_error *err);

/* ---- region_job.c ---- */
/* Counts bytes that the save has taken, and reports progress. Errors: CANCELLED. */
ckd_status save_report_progress(struct ckd_save *save, uint64_t raw, ckd_error *err);
/* context: what all blocks share. Errors: NOMEM. */
ckd_status save_new_region_job(region_job **out, struct ckd_save *save, const tensor_context *t,
                               step_tensor *step, ckd_error *err);
/* Elements first ... end - 1 of a region, which are saved bit for bit. */
typedef struct exact_span {
    const ckd_tensor *tensor; /* has the values of the region */
    const tensor_context *context;
    uint64_t first, end;
} exact_span;
/*
 * Saves a span; one empty block if it has no elements. Blocks may still be in progress when it returns. step: NULL:
 * none.
 */
ckd_status save_exact_span(struct ckd_save *save, const exact_span *span, step_tensor *step, ckd_error *err);

/* ---- order.c: called by one thread at a time, without the mutex ---- */
/*
 * Guesses if a delta is worth trying for a block, as if the blocks before it that are still undecided changed
 * nothing. The caller holds the mutex.
 */
bool order_guess(const save_pipeline *p, uint64_t block);
/* Return true if the next block can be registered or decided. The caller holds the mutex. */
bool order_may_register(const save_pipeline *p);
bool order_may_decide(const save_pipeline *p);
/* Decides the next block, which is analysed, unless it has to wait. */
ckd_status save_decide_block(struct ckd_save *save, uint64_t block, ckd_error *err);
/* Registers the next block, which is encoded, unless disk space must be made first. */
ckd_status save_register_block(struct ckd_save *save, uint64_t block, ckd_error *err);
/* The coding context for the blocks of a region job. */
coding_context save_coding_of(const struct ckd_save *save, const region_job *rj);
/* Analyses the job, for the first time or again. */
ckd_status save_analyse(struct ckd_save *save, block_job *job, const save_slot *slot, const coding_context *c,
                        ckd_error *err);

#endif
