/*
 * Blocks on their way through a save, several at once, of one tensor or of several, exact and lossy ones. Internal to engine/.
 *
 *   fetched -> analysed -> decided -> encoded -> registered -> written
 *
 * Each thread takes whatever can be done next: the saving thread, when it waits, and the store's workers, which the save borrows as long as it has something under way. There are
 * no rounds: nobody waits for others but where the order asks for it. Blocks are analysed and encoded at the same time; they are decided on, registered and written in
 * their order, by whoever comes by. The bytes written are those that one block after the other would give, whatever the number of threads: what an
 * analysis may not have known yet, as it ran beside the blocks before it, is looked at again before the decision (order.c).
 */
#ifndef ENGINE_SAVE_PIPELINE_H
#define ENGINE_SAVE_PIPELINE_H

#include <pthread.h>

#include "engine/save/append.h"

/* How the deltas of one tensor fare, so that one which never wins is not tried at every block. */
typedef struct delta_record {
    uint32_t lost, since;
} delta_record;

/* Blocks that share a region: of a tensor, or of a panel of it. Lives as long as the save. */
typedef struct region_job {
    tensor_context context;
    const view *parent;          /* which has context.parent */
    const view_tensor *expected; /* what the tensor was in the save's parent */
    step_tensor *step;           /* the caller's, who flushes before he ends it; NULL: none */
    delta_record tried;
    double
        fraction; /* of the tensor, whose expected cost leaves the budget with the first block; 0: nothing does */
    struct values_there *there; /* where exact values lie on a device; NULL: they do not */
    struct tile_part
        *lossy;   /* the tile that its blocks are of; NULL: it is exact. As long as they are under way */
    uint64_t end; /* of an exact one whose blocks are all pushed: behind the last of them */
    struct region_job *next; /* such a one, pushed after it */
} region_job;

typedef enum slot_stage {
    SLOT_FETCHED,
    SLOT_ANALYSED,
    SLOT_DECIDED,
    SLOT_ENCODED,
    SLOT_REGISTERED
} slot_stage;

/* One block's place; its job has the same number. */
typedef struct save_slot {
    region_job *region_job;
    slot_stage stage;
    bool busy;     /* somebody is analysing or encoding it */
    bool borrowed; /* its values are where the caller has them */
    bool counted;  /* its space is known */
    const void
        *input; /* of a lossy block: its elements, as the job's values are those that a decoder will get */
    save_append append; /* once registered; what goes before it from the beginning */
    disk_space space;
} save_slot;

/*
 * A ring: block n is in place n % slot_count. Blocks before `written` are through, those before `registered` are to be written, those before `decided` to be
 * encoded, those before `pushed` to be analysed and decided on.
 */
typedef struct save_pipeline {
    save_slot *slots;
    uint32_t slot_count;
    pthread_mutex_t mutex;  /* guards all of this */
    pthread_cond_t changed; /* for the saving thread, which waits */
    uint64_t written, registered, decided, pushed;
    region_job *first_pushed,
        *last_pushed;         /* exact jobs that are used again once they are written; the saving thread's */
    uint64_t wait_registered; /* the next decision waits until so many are registered */
    bool writing, ordering;   /* somebody is */
    bool paused;              /* nothing new is begun but by the saving thread */
    bool workers_attached;    /* the store's workers help */
    bool waiting;             /* the saving thread is */
    uint32_t running;         /* tasks */
    disk_space unwritten;     /* of what is registered */
    bool wants_space;      /* for the next one to be registered: the saving thread has to make some, alone */
    uint64_t space_made;   /* for blocks before this one */
    uint64_t failed_block; /* the first that did, if status is not CKD_OK */
    ckd_status status;
    ckd_error error;
    pthread_rwlock_t registry_lock; /* for coding_context */
    blocks_in_flight in_flight;     /* decided, not registered */
    bool started;                   /* the locks are made */
} save_pipeline;

/* Places, and so jobs, that a pool of so many threads is kept busy with. */
uint32_t pipeline_slots(uint32_t threads);
/* slots: so many, the caller's, whose memory for side records is used again. Errors: NOMEM. */
ckd_status pipeline_init(save_pipeline *p, save_slot *slots, uint32_t count, ckd_error *err);
/* Nobody is at work on it. */
/* in_child: of a forked one, in which threads seem to wait that it does not have: to destroy what they wait for would wait for them. */
void pipeline_free(save_pipeline *p, bool in_child);

/* What is shared by all blocks of the context. Errors: NOMEM. */
ckd_status save_new_region_job(region_job **out, struct ckd_save *save, const tensor_context *t,
                               step_tensor *step, ckd_error *err);
/* The place of the next block, which is free, and its job; helps until there is one. */
ckd_status save_next_slot(save_slot **slot, block_job **job, struct ckd_save *save, region_job *rj,
                          ckd_error *err);
/* It is filled: job->first, count and values, slot->borrowed and given. */
void save_push(struct ckd_save *save);
/* Elements first ... end - 1 of the region, bit for bit; one empty block if there are none. They may still be under way when it returns. */
ckd_status save_exact_span(struct ckd_save *save, const ckd_tensor *tensor, const tensor_context *t,
                           uint64_t first, uint64_t end, step_tensor *step, ckd_error *err);
/* Returns when so many blocks, from the first one on, are written; helps. */
ckd_status save_await(struct ckd_save *save, uint64_t written, ckd_error *err);
/* Returns when all blocks are written, and nobody helps any more. */
ckd_status save_flush(struct ckd_save *save, ckd_error *err);
/* Time of a thread that was at work on it. */
void save_add_analysis(struct ckd_save *save, uint64_t ns);
/* Nobody helps any more; what is under way stays where it is. Also of a save that failed, and in a forked child. */
void save_stop_helpers(struct ckd_save *save);
/* Nobody helps any more, and what is still needed of the caller's memory is copied. */
ckd_status save_copy_borrowed(struct ckd_save *save, ckd_error *err);

/* ---- order.c, by one thread at a time, without the mutex ---- */
/* Whether deltas are worth trying in a block, as if those before it that are not decided yet changed nothing. With the mutex. */
bool order_guess(const save_pipeline *p, uint64_t block);
/* Can something be registered or decided? With the mutex. */
bool order_is_due(const save_pipeline *p);
/* Registers and decides what can be; *block: what it failed at. */
ckd_status save_put_in_order(uint64_t *block, struct ckd_save *save, ckd_error *err);
/* As the blocks of a piece are coded. */
coding_context save_coding_of(const struct ckd_save *save, const region_job *rj);
/* Analyses the job, once more or for the first time. */
ckd_status save_analyse(struct ckd_save *save, block_job *job, const save_slot *slot, const coding_context *c,
                        ckd_error *err);

#endif
