/* The pipeline: the stages of a block, the next task of each thread, and the saving thread's share. */
#include "engine/save/pipeline.h"

#include <stdlib.h>
#include <unistd.h>

#include "engine/save/internal.h"

#define DEEP_UP_TO 4u /* up to so many threads have three places each; beyond that, memory matters more */

uint32_t pipeline_slots(uint32_t threads) {
    return threads == 1 ? 1 : threads <= DEEP_UP_TO ? 3 * threads : 2 * threads + DEEP_UP_TO;
}

ckd_status pipeline_init(save_pipeline *p, save_slot *slots, uint32_t count, ckd_error *err) {
    p->slots = slots;
    p->in_flight.jobs = calloc(count, sizeof(*p->in_flight.jobs));
    p->slot_count = count;
    pthread_mutex_init(&p->mutex, NULL);
    pthread_cond_init(&p->changed, NULL);
    pthread_rwlock_init(&p->registry_lock, NULL);
    p->started = true;
    return p->in_flight.jobs ? CKD_OK
                             : err_nomem(err, count * sizeof(*p->in_flight.jobs), "places for blocks");
}

void pipeline_free(save_pipeline *p, bool in_child) {
    free(p->in_flight.jobs);
    if (p->started && !in_child) {
        pthread_mutex_destroy(&p->mutex);
        pthread_cond_destroy(&p->changed);
        pthread_rwlock_destroy(&p->registry_lock);
    }
}

static save_slot *slot_of(save_pipeline *p, uint64_t block) {
    return &p->slots[block % p->slot_count];
}

static block_job *job_of(const ckd_save *save, uint64_t block) {
    return &save->pipeline.jobs[block % save->pipeline.slot_count];
}

/* ---- the stages of a block ---- */

/* Ends a stage that runs in parallel. */
static void leave_stage(ckd_save *save, save_slot *slot, save_stage *time, uint64_t begun_ns) {
    uint64_t took = clock_monotonic_ns() - begun_ns;
    pthread_mutex_lock(&save->pipeline.mutex);
    save_stage_add(time, took);
    slot->stage++;
    slot->busy = false;
    pthread_mutex_unlock(&save->pipeline.mutex);
}

static ckd_status analyse_block(ckd_save *save, uint64_t block, ckd_error *err) {
    save_slot *slot = slot_of(&save->pipeline, block);
    coding_context c = save_coding_of(save, slot->region_job);
    uint64_t begun_ns = clock_monotonic_ns();
    ckd_status status = save_analyse(save, job_of(save, block), slot, &c, err);
    err_in_tensor(err, status, slot->region_job->context.tensor->name);
    leave_stage(save, slot, &save->stats.analyse, begun_ns);
    return status;
}

/* Keeps the decoded values of a decided block for the next save. Each block has its own place there. */
static void keep_values(const block_job *job, const tensor_context *t) {
    bool has_decoded = job->output.lossy || hash128_equal(&job->output.content, &job->analysis.original);
    if (t->decoded_values && job->input.values && has_decoded && job->input.count > 0) {
        region_span block = {t->region, job->input.first, job->input.count};
        span_copy(&t->shape, ckd_dtype_size(t->tensor->dtype), t->decoded_values, &t->values_span,
                  job->input.values, &block);
    }
}

static ckd_status encode_block(ckd_save *save, uint64_t block, ckd_error *err) {
    save_slot *slot = slot_of(&save->pipeline, block);
    const tensor_context *t = &slot->region_job->context;
    block_job *job = job_of(save, block);
    uint64_t begun_ns = clock_monotonic_ns();
    ckd_status status = block_encode(job, t, err);
    if (status == CKD_OK) {
        keep_values(job, t);
    }
    err_in_tensor(err, status, t->tensor->name);
    leave_stage(save, slot, &save->stats.encode, begun_ns);
    return status;
}

static ckd_status write_block(ckd_save *save, uint64_t block, ckd_error *err) {
    save_pipeline *p = &save->pipeline;
    save_slot *slot = slot_of(p, block);
    uint64_t begun_ns = clock_monotonic_ns();
    ckd_status status = save_write_block(save, job_of(save, block), &slot->append, err);
    uint64_t took = clock_monotonic_ns() - begun_ns;
    pthread_mutex_lock(&p->mutex);
    save_stage_add(&save->stats.write, took);
    p->unwritten.payload -= slot->space.payload;
    p->unwritten.copies -= slot->space.copies;
    p->written += status == CKD_OK;
    pthread_mutex_unlock(&p->mutex);
    return status;
}

/* The next stage of a block, from the caller's values to the chunk file. */
static const struct stage {
    stage_lane lane;
    ckd_status (*run)(ckd_save *save, uint64_t block, ckd_error *err);
} stages[] = {
    [SLOT_FETCHED] = {LANE_PARALLEL, analyse_block}, [SLOT_ANALYSED] = {LANE_ORDER, save_decide_block},
    [SLOT_DECIDED] = {LANE_PARALLEL, encode_block},  [SLOT_ENCODED] = {LANE_ORDER, save_register_block},
    [SLOT_REGISTERED] = {LANE_WRITE, write_block},
};

/* ---- choosing a task. The caller holds the mutex ---- */

typedef struct task {
    bool due; /* false: there is none */
    slot_stage stage;
    uint64_t block;
} task;

/* Returns the next block of a lane that has an order. */
static task next_in_lane(const save_pipeline *p, stage_lane lane) {
    if (lane == LANE_WRITE) {
        return (task){p->written < p->registered, SLOT_REGISTERED, p->written};
    }
    if (lane == LANE_ORDER && order_may_register(p)) {
        return (task){true, SLOT_ENCODED, p->registered};
    }
    return (task){lane == LANE_ORDER && order_may_decide(p), SLOT_ANALYSED, p->decided};
}

/* Rounded copies are found by the hashes of their masters, which must be decided first. */
static bool waits_for_masters(save_pipeline *p, uint64_t block) {
    ckd_dtype dtype = slot_of(p, block)->region_job->context.tensor->dtype;
    for (uint64_t n = p->decided; n < block && (dtype == CKD_BF16 || dtype == CKD_F16); n++) {
        if (block_is_master(&slot_of(p, n)->region_job->context)) {
            return true;
        }
    }
    return false;
}

/* Prefers tasks that free slots: first the stages in block order, then the blocks that are nearest to their end. */
static task next_task(save_pipeline *p) {
    task none = {.due = false};
    if (p->status != CKD_OK || p->wants_space) {
        return none;
    }
    for (stage_lane lane = LANE_ORDER; lane < LANES; lane++) {
        task t = p->lane_taken[lane] ? none : next_in_lane(p, lane);
        if (t.due) {
            return t;
        }
    }
    for (uint64_t n = p->registered; n < p->pushed; n++) {
        const save_slot *s = slot_of(p, n);
        if (!s->busy &&
            (s->stage == SLOT_DECIDED || (s->stage == SLOT_FETCHED && !waits_for_masters(p, n)))) {
            return (task){true, s->stage, n};
        }
    }
    return none;
}

/* Wakes the threads that may have a task now. */
static void wake_threads(ckd_save *save) {
    save_pipeline *p = &save->pipeline;
    if (p->waiting) {
        pthread_cond_signal(&p->changed);
    }
    if (p->workers_attached && !p->paused) {
        pool_wake(save->store->pool);
    }
}

static task begin_task(ckd_save *save) {
    save_pipeline *p = &save->pipeline;
    task t = next_task(p);
    if (!t.due) {
        return t;
    }
    p->running++;
    save_slot *s = slot_of(p, t.block);
    if (stages[t.stage].lane == LANE_PARALLEL) {
        s->busy = true;
    } else {
        p->lane_taken[stages[t.stage].lane] = true;
    }
    if (t.stage == SLOT_FETCHED && !s->region_job->lossy) {
        block_job *job = job_of(save, t.block);
        job->input.try_delta = order_guess(p, t.block) || job->input.precoded.delta;
    }
    return t;
}

/* Runs a task, without the mutex. A thread that has a lane stays in it as long as there are blocks for it. */
static void do_task(ckd_save *save, task t) {
    save_pipeline *p = &save->pipeline;
    stage_lane lane = stages[t.stage].lane;
    ckd_error error = {.offset = CKD_NO_OFFSET};
    ckd_status status = CKD_OK;
    for (task next = t; next.due;) {
        t = next;
        status = stages[t.stage].run(save, t.block, &error);
        pthread_mutex_lock(&p->mutex);
        next = next_in_lane(p, lane);
        next.due = next.due && status == CKD_OK;
        if (next.due) {
            pthread_mutex_unlock(&p->mutex);
        }
    }
    p->lane_taken[lane] = false;
    p->running--;
    if (status != CKD_OK && (p->status == CKD_OK || t.block < p->failed_block)) {
        p->status = status;
        p->error = error;
        p->failed_block = t.block;
    }
    wake_threads(save);
    pthread_mutex_unlock(&p->mutex);
}

/* A worker of the store: runs a task, if there is one. */
static bool help(void *context) {
    ckd_save *save = context;
    save_pipeline *p = &save->pipeline;
    task t = {.due = false};
    pthread_mutex_lock(&p->mutex);
    if (!p->paused) {
        t = begin_task(save);
    }
    pthread_mutex_unlock(&p->mutex);
    if (t.due) {
        do_task(save, t);
    }
    return t.due;
}

/* ---- the saving thread ---- */

/*
 * Makes disk space while no other thread is at work: materialized copies may be removed. Called, and returns, with
 * the mutex held.
 */
static void make_disk_space(ckd_save *save) {
    save_pipeline *p = &save->pipeline;
    const save_slot *next = slot_of(p, p->registered);
    disk_space space = {p->unwritten.payload + next->space.payload, p->unwritten.copies + next->space.copies};
    p->space_made = p->registered + 1;
    pthread_mutex_unlock(&p->mutex);
    save_free_space(save, space.payload, space.copies);
    pthread_mutex_lock(&p->mutex);
    p->wants_space = false;
    wake_threads(save);
}

/* Runs a task, or waits for a change. Called, and returns, with the mutex held. */
static ckd_status do_or_wait(ckd_save *save, ckd_error *err) {
    save_pipeline *p = &save->pipeline;
    if (p->wants_space && p->running == 0) {
        make_disk_space(save);
        return CKD_OK;
    }
    task t = begin_task(save);
    if (!t.due) {
        p->waiting = true;
        pthread_cond_wait(&p->changed, &p->mutex);
        p->waiting = false;
        return CKD_OK;
    }
    pthread_mutex_unlock(&p->mutex);
    do_task(save, t);
    ckd_status status = cancel_poll(&save->group.stop, err);
    pthread_mutex_lock(&p->mutex);
    return status;
}

/*
 * Returns the first failure, after all running tasks have ended; none behind it begins. Called, and returns, with the
 * mutex held.
 */
static ckd_status failure(save_pipeline *p, ckd_error *err) {
    while (p->running > 0) {
        p->waiting = true;
        pthread_cond_wait(&p->changed, &p->mutex);
        p->waiting = false;
    }
    if (err) {
        *err = p->error;
    }
    return p->status;
}

/* Reports, once, that parts of the parent cannot be read. Called by the saving thread. */
static void report_damage(ckd_save *save) {
    if (atomic_load(&save->sources.damaged) && !save->sources.reported_damage) {
        save->sources.reported_damage = true;
        store_message(
            save->store,
            "parts of the parent %s@%llu are damaged; these blocks are stored without a delta (run ckptdelta verify)",
            save->target.origin.run, (unsigned long long)save->target.origin.step);
    }
}

ckd_status save_await(ckd_save *save, uint64_t written, ckd_error *err) {
    save_pipeline *p = &save->pipeline;
    ckd_status status = cancel_poll(&save->group.stop, err);
    if (status != CKD_OK) {
        return status;
    }
    uint64_t begun_ns = clock_monotonic_ns();
    pthread_mutex_lock(&p->mutex);
    while (status == CKD_OK && p->status == CKD_OK && p->written < written) {
        status = do_or_wait(save, err);
    }
    p->waited_ns += clock_monotonic_ns() - begun_ns;
    status = p->status != CKD_OK ? failure(p, err) : status;
    pthread_mutex_unlock(&p->mutex);
    report_damage(save);
    return status;
}

static void resume(ckd_save *save) {
    save_pipeline *p = &save->pipeline;
    p->paused = false;
    p->workers_attached =
        p->workers_attached || (p->slot_count > 1 && pool_attach(save->store->pool, help, save));
}

void save_stop_helpers(ckd_save *save) {
    save_pipeline *p = &save->pipeline;
    if (!p->workers_attached || save->output.process != getpid()) {
        return;
    }
    pthread_mutex_lock(&p->mutex);
    p->paused = true;
    pthread_mutex_unlock(&p->mutex);
    pool_detach(save->store->pool);
    p->workers_attached = false;
}

ckd_status save_flush(ckd_save *save, ckd_error *err) {
    ckd_status status = save_await(save, save->pipeline.pushed, err);
    save_stop_helpers(save);
    return status;
}

/* ---- blocks on their way in ---- */

ckd_status save_next_slot(save_slot **slot, block_job **job, ckd_save *save, region_job *rj, ckd_error *err) {
    save_pipeline *p = &save->pipeline;
    uint64_t block = p->pushed;
    ckd_status status = save_await(save, block < p->slot_count ? 0 : block + 1 - p->slot_count, err);
    if (status != CKD_OK) {
        return status;
    }
    *slot = slot_of(p, block);
    *job = job_of(save, block);
    (*job)->state = BLOCK_NEW;
    (*job)->input.precoded = (block_precoded){.coded = false};
    bytes sides[2] = {(*slot)->append.sides[0].data, (*slot)->append.sides[1].data};
    **slot = (save_slot){.region_job = rj, .append.sides = {{.data = sides[0]}, {.data = sides[1]}}};
    return CKD_OK;
}

void save_push(ckd_save *save) {
    save_pipeline *p = &save->pipeline;
    pthread_mutex_lock(&p->mutex);
    p->pushed++;
    resume(save);
    wake_threads(save);
    pthread_mutex_unlock(&p->mutex);
}

static bool has_borrowed(save_pipeline *p) {
    bool any = false;
    pthread_mutex_lock(&p->mutex);
    for (uint64_t n = p->written; n < p->pushed && !any; n++) {
        any = slot_of(p, n)->borrowed;
    }
    pthread_mutex_unlock(&p->mutex);
    return any;
}

ckd_status save_copy_borrowed(ckd_save *save, ckd_error *err) {
    save_pipeline *p = &save->pipeline;
    if (!has_borrowed(p)) {
        return CKD_OK; /* the workers go on while the caller prepares its next tensor */
    }
    save_stop_helpers(save);
    for (uint64_t n = p->written; n < p->pushed; n++) {
        save_slot *slot = slot_of(p, n);
        block_job *job = job_of(save, n);
        if (!slot->borrowed) {
            continue;
        }
        size_t raw = job->input.count * ckd_dtype_size(slot->region_job->context.tensor->dtype);
        void *copy = bytes_scratch(&job->input.own, raw, "a tensor's elements", err);
        if (!copy) {
            return CKD_E_NOMEM;
        }
        memcpy(copy, job->input.values, raw);
        block_job_move(job, copy);
        slot->borrowed = false;
    }
    return CKD_OK;
}
