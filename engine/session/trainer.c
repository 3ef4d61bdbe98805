/* The trainer's thread of a session: steps, fences and waits. */
#include "engine/session/session.h"
#include "engine/common/common.h"

#include <math.h>
#include <stdlib.h>

#define SECOND 1e9

/* ------------------------------------------------------------------------------------------------ the snapshots */

/* Returns whether values are saved unchanged. A snapshot then equals what a load of its checkpoint returns. */
static bool saves_exactly(const ckd_save_options *o) {
    bool exact = o->fidelity <= CKD_EXACT;
    for (size_t role = 0; role < sizeof(o->role_fidelity) / sizeof(o->role_fidelity[0]); role++) {
        exact = exact && o->role_fidelity[role] <= CKD_EXACT;
    }
    return exact;
}

static ckd_status make_sources(ckd_session *s, ckd_error *err) {
    s->sources = calloc(s->item_count + 1, sizeof(*s->sources));
    if (!s->sources) {
        return err_nomem(err, s->item_count * sizeof(*s->sources), "the registered tensors");
    }
    for (size_t i = 0; i < s->item_count; i++) {
        const session_item *item = &s->items[i];
        s->sources[i] = (snapshot_source){item->data, item->on_device ? 0 : item->bytes, item->group};
    }
    ckd_status status = session_find_roles(s, !saves_exactly(&s->save), err);
    THEN(status, session_device_sources(s, err));
    if (status != CKD_OK) {
        free(s->sources);
        s->sources = NULL;
    }
    return status;
}

static ckd_status make_slot(ckd_session *s, ckd_error *err) {
    session_slot *slot = &s->shared.slots[s->shared.slot_count];
    slot->optimizers = calloc(s->item_count + 1, sizeof(*slot->optimizers));
    if (!slot->optimizers) {
        return err_nomem(err, s->item_count * sizeof(*slot->optimizers), "the optimizers' numbers");
    }
    uint8_t *memory = session_agent_memory(s, s->shared.slot_count);
    ckd_status status = snapshot_new(&slot->snapshot, s->sources, s->item_count, memory, err);
    if (status == CKD_OK && s->device_count) {
        status = session_device_slot(s, slot, err);
    }
    if (status != CKD_OK) {
        snapshot_free(slot->snapshot, false);
        free(slot->optimizers);
        *slot = (session_slot){.snapshot = NULL};
        return status;
    }
    s->shared.slot_count++;
    pthread_mutex_lock(&s->shared.mutex);
    s->shared.state.snapshot_bytes += snapshot_size(s->sources, s->item_count);
    pthread_mutex_unlock(&s->shared.mutex);
    return CKD_OK;
}

/* Returns the bytes of host memory that one more snapshot takes. */
static uint64_t host_part(const ckd_session *s) {
    device_snapshot_bytes need = session_device_size(s, s->shared.slot_count);
    return snapshot_size(s->sources, s->item_count) + need.on_host + need.carried;
}

/* Returns whether one more snapshot fits. If the host has no limit, device_bytes decides. */
static bool fits_one_more(const ckd_session *s) {
    uint64_t budget = s->options.snapshot_bytes, used = s->shared.state.snapshot_bytes;
    if (budget == 0) {
        return s->options.device_bytes > 0 && s->device_count > 0 &&
               session_device_size(s, s->shared.slot_count).on_host == 0;
    }
    return used <= budget && host_part(s) <= budget - used;
}

/* Makes the slots in an agent's memory, so that the last complete state stays while others are copied or saved. */
static ckd_status make_agent_slots(ckd_session *s, uint32_t count, ckd_error *err) {
    ckd_status status = CKD_OK;
    while (status == CKD_OK && s->shared.slot_count < count) {
        status = make_slot(s, err);
    }
    s->shared.staged_max = count - 1;
    return status;
}

/* Called at the first step, so that nothing is allocated later. Makes one snapshot, and more if they fit. */
static ckd_status make_slots(ckd_session *s, ckd_error *err) {
    ckd_status status = s->sources ? CKD_OK : make_sources(s, err);
    if (status != CKD_OK || s->shared.slot_count > 0) {
        return status;
    }
    uint32_t at_once = s->options.saves_under_way > 1 ? 2 : 1;
    bool taken;
    status = session_agent_take_memory(&taken, s, at_once + 1, err);
    if (status != CKD_OK || taken) {
        return status == CKD_OK ? make_agent_slots(s, at_once + 1, err) : status;
    }
    uint64_t size = host_part(s), budget = s->options.snapshot_bytes;
    if (budget > 0 && budget < size) {
        return err_set(err, CKD_E_INVALID,
                       "a snapshot of what is registered takes %llu bytes, snapshot_bytes allows %llu",
                       (unsigned long long)size, (unsigned long long)budget);
    }
    status = make_slot(s, err);
    /* The last snapshot is retained only if the next save is coded against it: in host memory. */
    bool exact = saves_exactly(&s->save), keeps = exact && s->device_count == 0;
    uint64_t cached = exact ? 0 : cached_values_size(s), used = s->shared.state.snapshot_bytes;
    if (status == CKD_OK && cached > 0 && used <= budget && cached <= budget - used) {
        status = cached_values_make(s, err);
    }
    uint32_t useful = at_once + keeps;
    while (status == CKD_OK && s->shared.slot_count < useful && fits_one_more(s)) {
        status = make_slot(s, err);
    }
    s->shared.staged_max = s->shared.slot_count - (keeps && s->shared.slot_count > 1); /* at most at_once */
    return status;
}

/* Returns the newest staged slot. The caller holds the mutex. */
static session_slot *newest(ckd_session *s) {
    return s->shared.used ? &s->shared.slots[(s->shared.first + s->shared.used - 1) % s->shared.slot_count]
                          : NULL;
}

static void keep_optimizers(const ckd_session *s, session_slot *slot) {
    for (size_t i = 0; i < s->item_count; i++) {
        const ckd_optimizer *o = s->items[i].tensor.optimizer;
        if (o) {
            (void)optimizer_copy(&slot->optimizers[i], o, NULL); /* the save rejects an invalid one */
        }
    }
}

/*
 * Takes a free slot, which must exist, and copies into it. Returns when all is copied; a lazy snapshot is left to the
 * copy threads.
 */
static void stage(ckd_session *s, uint64_t step, uint64_t begun_ns) {
    pthread_mutex_lock(&s->shared.mutex);
    /* owned by this thread until `used` counts it */
    session_slot *slot = &s->shared.slots[(s->shared.first + s->shared.used) % s->shared.slot_count];
    pthread_mutex_unlock(&s->shared.mutex);
    session_device_stage(s, slot);
    pthread_mutex_lock(&s->shared.mutex);
    bool lazy = s->options.snapshot == CKD_SNAPSHOT_LAZY;
    slot->step = step;
    slot->metric = s->trainer.metric;
    slot->begun_ns = begun_ns;
    slot->stall_ns = slot->paused_ns = slot->waited_ns = slot->handed_ns = 0;
    slot->fenced = false;
    slot->torn = false;
    keep_optimizers(s, slot);
    session_agent_stage(s, slot);
    slot->held = lazy && s->shared.idles && !s->shared.idle_too_short;
    s->shared.idle_too_short = false;
    copy_threads_begin(s->copy_threads, slot->snapshot, slot->held);
    s->shared.used++;
    s->shared.state.staged_step = step;
    pthread_mutex_unlock(&s->shared.mutex);
    copy_threads_wake(s->copy_threads);
    s->trainer.fenced_some = false;
    s->trainer.busy_since_step = true;
    snapshot_finish(slot->snapshot, lazy ? SNAPSHOT_AT_ONCE : SNAPSHOT_ALL);
}

/* --------------------------------------------------------------------------------------------------- the fences */

/* The slot is not fenced yet, so the saver waits for this value. */
static void charge_stall(ckd_session *s, session_slot *slot, uint64_t waited_ns) {
    s->trainer.fence_ns += waited_ns;
    interval_stalled(&s->trainer.interval, (double)waited_ns / SECOND);
    pthread_mutex_lock(&s->shared.mutex);
    slot->stall_ns += waited_ns;
    s->shared.state.stall_ns += waited_ns;
    pthread_mutex_unlock(&s->shared.mutex);
}

/* The snapshot is complete: releases it to the saver. */
static void release_snapshot(ckd_session *s, session_slot *slot) {
    pthread_mutex_lock(&s->shared.mutex);
    slot->fenced = true;
    slot->copied_ns = clock_monotonic_ns();
    pthread_cond_broadcast(&s->shared.changed);
    pthread_mutex_unlock(&s->shared.mutex);
}

/*
 * From the first fence on, copies no longer wait for idle time. If there was too little of it, copies of the next
 * snapshot do not wait for it at all.
 */
static void release_copies(ckd_session *s, session_slot *slot) {
    copy_threads_hurry(s->copy_threads);
    if (slot->held) {
        pthread_mutex_lock(&s->shared.mutex);
        s->shared.idle_too_short = !snapshot_is_complete(slot->snapshot);
        pthread_mutex_unlock(&s->shared.mutex);
        slot->held = false;
    }
}

/*
 * Checks the rule for lazy snapshots at the trainer's next call. Without any fence in between, the optimizer may have
 * written to tensors that were being copied. If only some groups were fenced, the other groups' tensors are taken to be
 * unchanged.
 */
static void check_lazy(ckd_session *s) {
    pthread_mutex_lock(&s->shared.mutex);
    session_slot *slot = newest(s);
    bool open = slot && !slot->fenced;
    if (open && !s->trainer.fenced_some) {
        slot->torn = true;
    }
    snapshot *copying = open ? slot->snapshot : NULL;
    pthread_mutex_unlock(&s->shared.mutex);
    if (copying) {
        uint64_t begun = clock_monotonic_ns();
        session_device_fence(s, slot, SNAPSHOT_ALL);
        release_copies(s, slot);
        snapshot_finish(copying, SNAPSHOT_ALL);
        charge_stall(s, slot, clock_monotonic_ns() - begun);
        release_snapshot(s, slot);
    }
}

/* Returns the newest snapshot if it may still be copying from the trainer's memory; else NULL. */
static session_slot *unfenced(ckd_session *s) {
    pthread_mutex_lock(&s->shared.mutex);
    session_slot *slot = newest(s);
    slot = slot && !slot->fenced ? slot : NULL;
    pthread_mutex_unlock(&s->shared.mutex);
    return slot;
}

void session_fence(ckd_session *s, uint32_t fence_group) {
    if (s->options.snapshot != CKD_SNAPSHOT_LAZY) {
        return;
    }
    session_slot *slot = unfenced(s);
    if (!slot) {
        return;
    }
    uint64_t begun = clock_monotonic_ns();
    session_device_fence(s, slot, fence_group);
    release_copies(s, slot);
    snapshot_finish(slot->snapshot, fence_group);
    s->trainer.fenced_some = true;
    charge_stall(s, slot, clock_monotonic_ns() - begun);
    if (fence_group == SNAPSHOT_ALL) {
        release_snapshot(s, slot);
    }
}

void ckd_session_fence(ckd_session *s) {
    if (session_check(s, NULL) == CKD_OK) {
        session_fence(s, SNAPSHOT_ALL);
    }
}

void ckd_session_fence_group(ckd_session *s, uint32_t fence_group) {
    if (session_check(s, NULL) == CKD_OK) {
        session_fence(s, fence_group);
    }
}

void ckd_session_discard(ckd_session *s) {
    if (session_check(s, NULL) == CKD_OK) {
        pthread_mutex_lock(&s->shared.mutex);
        session_slot *slot = newest(s);
        if (slot && !slot->fenced) {
            slot->torn = true;
        }
        pthread_mutex_unlock(&s->shared.mutex);
    }
}

/* ---------------------------------------------------------------------------------------------------- each step */

/* Takes over the measured cost of saves that ended. */
static void take_persist_time(ckd_session *s) {
    pthread_mutex_lock(&s->shared.mutex);
    uint64_t persist = s->shared.ended_persist_ns;
    bool under_way = s->shared.used > 0;
    if (!under_way) {
        s->shared.ended_persist_ns = 0;
    }
    pthread_mutex_unlock(&s->shared.mutex);
    if (persist && !under_way) {
        interval_ended(&s->trainer.interval, (double)persist / SECOND);
    }
}

static bool under_way(ckd_session *s) {
    pthread_mutex_lock(&s->shared.mutex);
    bool yes = s->shared.used > 0;
    pthread_mutex_unlock(&s->shared.mutex);
    return yes;
}

static void measure_iteration(ckd_session *s, uint64_t now) {
    if (s->trainer.left_ns) {
        uint64_t took = now - s->trainer.left_ns;
        took -= took < s->trainer.fence_ns ? took : s->trainer.fence_ns;
        interval_iteration(&s->trainer.interval, (double)took / SECOND, s->trainer.busy_since_step);
    }
    s->trainer.fence_ns = 0;
    s->trainer.busy_since_step = under_way(s);
}

/* Waits until a save or a copy has made progress. Saves do not pause meanwhile. The caller holds the mutex. */
static void wait_for_saves(ckd_session *s) {
    s->shared.waiting++;
    session_agent_show_phase(s);
    pthread_cond_broadcast(&s->shared.changed);
    pthread_cond_wait(&s->shared.changed, &s->shared.mutex);
    s->shared.waiting--;
    session_agent_show_phase(s);
}

/* Returns false if no slot is free and the caller does not want to wait. */
static bool find_free_slot(ckd_session *s, bool wait) {
    pthread_mutex_lock(&s->shared.mutex);
    while (wait && s->shared.used == s->shared.staged_max) {
        wait_for_saves(s);
    }
    bool found = s->shared.used < s->shared.staged_max;
    pthread_mutex_unlock(&s->shared.mutex);
    return found;
}

static void defer_save(ckd_session *s) {
    bool skip = s->options.when_busy == CKD_BUSY_SKIP;
    pthread_mutex_lock(&s->shared.mutex);
    s->shared.state.skipped += skip;
    s->shared.state.coalesced += !skip && !s->trainer.pending;
    pthread_mutex_unlock(&s->shared.mutex);
    s->trainer.pending = !skip;
}

static void save_now(ckd_session *s, uint64_t step, uint64_t called_ns, bool wait) {
    if (!find_free_slot(s, wait || s->options.when_busy == CKD_BUSY_BLOCK)) {
        defer_save(s);
        return;
    }
    take_persist_time(s); /* a save may have ended meanwhile */
    s->trainer.pending = s->trainer.save_asked = false;
    interval_begun(&s->trainer.interval);
    stage(s, step, called_ns);
    uint64_t stalled = clock_monotonic_ns() - called_ns;
    interval_stalled(&s->trainer.interval, (double)stalled / SECOND);
    pthread_mutex_lock(&s->shared.mutex);
    session_slot *slot = newest(s);
    slot->stall_ns += stalled;
    slot->fenced = s->options.snapshot != CKD_SNAPSHOT_LAZY;
    slot->copied_ns = called_ns + stalled;
    s->shared.state.stall_ns += stalled;
    if (slot->fenced) {
        pthread_cond_broadcast(&s->shared.changed);
    }
    pthread_mutex_unlock(&s->shared.mutex);
}

/* Returns whether a save was requested since the last step. With ranks it only records the request. */
static bool requested(ckd_session *s) {
    int requests = atomic_exchange(&s->requests, 0);
    s->trainer.stop_asked |= (requests & CKD_REQUEST_STOP) != 0;
    s->trainer.save_asked |= requests != 0 && s->saver.ranks;
    return requests != 0 && !s->saver.ranks;
}

static void publish_figures(ckd_session *s) {
    const interval *v = &s->trainer.interval;
    pthread_mutex_lock(&s->shared.mutex);
    s->shared.state.stop_asked = s->trainer.stop_asked;
    s->shared.state.save_asked = s->trainer.save_asked;
    s->shared.state.step_ns = (uint64_t)(v->step_s * SECOND);
    s->shared.state.interference_ns = (uint64_t)(fmax(v->interference_s, 0) * SECOND);
    s->shared.state.trained_ns = (uint64_t)(v->trained_s * SECOND);
    s->shared.state.interval_steps = interval_steps(v);
    pthread_mutex_unlock(&s->shared.mutex);
}

/* Copies wait for idle time only if the last iteration had some. Otherwise the fence would have to copy everything. */
static void record_idle_time(ckd_session *s) {
    pthread_mutex_lock(&s->shared.mutex);
    s->shared.idles = s->shared.idle_since_step;
    s->shared.idle_since_step = false;
    pthread_mutex_unlock(&s->shared.mutex);
}

static ckd_status make_step(ckd_session *s, uint64_t step, bool save, ckd_error *err) {
    uint64_t called = clock_monotonic_ns();
    ckd_status status = session_check(s, err);
    if (status != CKD_OK) {
        return status;
    }
    if (step > INT64_MAX) {
        return err_set(err, CKD_E_INVALID, "step %llu is too large; steps go up to 2^63 - 1",
                       (unsigned long long)step);
    }
    if (s->trainer.left_ns && step <= s->trainer.last_step) {
        return err_set(err, CKD_E_INVALID, "step %llu is not after step %llu, the last one",
                       (unsigned long long)step, (unsigned long long)s->trainer.last_step);
    }
    if (s->reports) {
        ckd_progress_step(step);
    }
    status = make_slots(s, err);
    if (status != CKD_OK) {
        return status;
    }
    measure_iteration(s, called);
    check_lazy(s);
    record_idle_time(s);
    s->trainer.fence_ns = 0; /* not part of the next iteration */
    uint64_t checked = clock_monotonic_ns();
    take_persist_time(s);
    s->trainer.last_step = step;
    if (s->trainer.alarms.has_metric) {
        session_judge_metric(s, step, s->trainer.metric);
        s->trainer.alarms.has_metric = false;
    }
    bool is_requested = requested(s);
    if (save || is_requested || s->trainer.pending || interval_due(&s->trainer.interval, step)) {
        ckd_progress_phase before = session_enter(s, CKD_PROGRESS_SAVING);
        save_now(s, step, checked, save || is_requested);
        (void)session_enter(s, before);
    }
    publish_figures(s);
    s->trainer.left_ns = clock_monotonic_ns();
    return session_report_failure(s, err);
}

ckd_status ckd_session_step(ckd_session *s, uint64_t step, ckd_error *err) {
    return make_step(s, step, false, err);
}

ckd_status ckd_session_save(ckd_session *s, uint64_t step, ckd_error *err) {
    return make_step(s, step, true, err);
}

/* ------------------------------------------------------------------------------------------- asking and waiting */

ckd_status session_report_failure(ckd_session *s, ckd_error *err) {
    pthread_mutex_lock(&s->shared.mutex);
    ckd_status status = err_from(err, s->shared.failed, &s->shared.failure);
    s->shared.failed = CKD_OK;
    pthread_mutex_unlock(&s->shared.mutex);
    return status;
}

void session_drain(ckd_session *s) {
    pthread_mutex_lock(&s->shared.mutex);
    while (s->shared.used > 0) {
        wait_for_saves(s);
    }
    pthread_mutex_unlock(&s->shared.mutex);
}

/* A fence makes streams wait; this waits on the calling thread. The save reports any failure. */
static void wait_for_devices(ckd_session *s) {
    pthread_mutex_lock(&s->shared.mutex);
    device_snapshot *copying = s->shared.used ? newest(s)->devices : NULL;
    pthread_mutex_unlock(&s->shared.mutex);
    if (copying) {
        (void)device_snapshot_wait(copying, NULL);
    }
}

ckd_status ckd_session_wait(ckd_session *s, ckd_wait until, ckd_error *err) {
    ckd_status status = session_check(s, err);
    if (status != CKD_OK) {
        return status;
    }
    if (until != CKD_STAGED && until != CKD_DURABLE) {
        return err_set(err, CKD_E_INVALID, "%d is not a value of ckd_wait", (int)until);
    }
    session_fence(s, SNAPSHOT_ALL);
    wait_for_devices(s);
    if (until == CKD_DURABLE) {
        uint64_t begun = clock_monotonic_ns();
        ckd_progress_phase before = session_enter(s, CKD_PROGRESS_SAVING);
        session_drain(s);
        (void)session_enter(s, before);
        /* the caller asked for this wait, so it counts neither as training nor as loss */
        s->trainer.fence_ns += clock_monotonic_ns() - begun;
    }
    return session_report_failure(s, err);
}

void ckd_session_poll(ckd_session_state *out, ckd_session *s) {
    *out = (ckd_session_state){.staged_step = CKD_LATEST, .durable_step = CKD_LATEST};
    if (session_check(s, NULL) != CKD_OK) { /* in a child the mutex may be held forever */
        return;
    }
    pthread_mutex_lock(&s->shared.mutex);
    *out = s->shared.state;
    out->under_way = s->shared.used;
    pthread_mutex_unlock(&s->shared.mutex);
    out->stop_asked |= (atomic_load(&s->requests) & CKD_REQUEST_STOP) != 0;
}

void ckd_session_metric(ckd_session *s, double metric) {
    if (session_check(s, NULL) == CKD_OK) {
        s->trainer.metric = metric;
        s->trainer.alarms.has_metric = true;
    }
}

void ckd_session_no_metric(ckd_session *s) {
    if (session_check(s, NULL) == CKD_OK) {
        s->trainer.metric = NAN;
        s->trainer.alarms.has_metric = false;
    }
}

void ckd_session_observe(ckd_session *s, uint64_t step, double metric) {
    if (session_check(s, NULL) == CKD_OK) {
        session_judge_metric(s, step, metric);
    }
}

void ckd_session_phase(ckd_session *s, ckd_phase phase) {
    if (session_check(s, NULL) != CKD_OK) {
        return;
    }
    (void)session_enter(s, phase == CKD_PHASE_EVALUATION ? CKD_PROGRESS_EVALUATION : CKD_PROGRESS_TRAINING);
    pthread_mutex_lock(&s->shared.mutex);
    s->shared.phase = phase;
    s->shared.idle_since_step |= phase == CKD_PHASE_IDLE;
    session_agent_show_phase(s);
    pthread_cond_broadcast(&s->shared.changed);
    copy_threads_hold(s->copy_threads, phase == CKD_PHASE_BUSY);
    pthread_mutex_unlock(&s->shared.mutex);
}

void ckd_session_request(ckd_session *s, ckd_request request) {
    if (s) {
        atomic_fetch_or(&s->requests, (int)request);
    }
}
