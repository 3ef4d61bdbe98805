/*
 * The saver thread. It opens the store, so that the store's workers inherit its priority, and makes checkpoints of
 * snapshots. It saves tensors as soon as they are copied, while others are still being copied.
 */
#include "engine/session/session.h"

#include <stdio.h>
#include <stdlib.h>

#include "base/threads.h"
#include "engine/ranks/ranks.h"
#include "engine/save/save.h"

#define DEFAULT_NICE   10
#define FIRST_PAUSE_NS UINT64_C(1000000000)

/* ---- decoded values of the newest checkpoint, for the next save ---- */

#define PLACE_ALIGN 64
#define NOWHERE     UINT64_MAX

/* Lossy moments are always coded without a parent, and values on devices stay there. */
static bool is_cached(const ckd_session *s, const session_item *item) {
    const ckd_tensor *t = &item->tensor;
    ckd_role role = t->role == CKD_ROLE_AUTO ? ckd_role_of(t->name, t->dtype) : t->role;
    return !item->is_bytes && !item->on_device && save_builds_on_parent(&s->save, role, t->dtype);
}

static uint64_t taken_by(const session_item *item) {
    return (item->bytes + PLACE_ALIGN - 1) & ~(uint64_t)(PLACE_ALIGN - 1);
}

uint64_t cached_values_size(const ckd_session *s) {
    uint64_t need = 0;
    for (size_t i = 0; i < s->item_count; i++) {
        need += is_cached(s, &s->items[i]) ? taken_by(&s->items[i]) : 0;
    }
    return need;
}

ckd_status cached_values_make(ckd_session *s, ckd_error *err) {
    cached_values *k = &s->saver.cached;
    uint64_t need = cached_values_size(s), at = 0;
    k->places = calloc(s->item_count + 1, sizeof(*k->places));
    k->memory = k->places ? snapshot_memory(&k->size, need) : NULL;
    if (!k->memory) {
        free(k->places);
        k->places = NULL;
        return err_nomem(err, need, "what the next save is coded against");
    }
    for (size_t i = 0; i < s->item_count; i++) {
        bool cached = is_cached(s, &s->items[i]);
        k->places[i] = cached ? at : NOWHERE;
        at += cached ? taken_by(&s->items[i]) : 0;
    }
    pthread_mutex_lock(&s->shared.mutex);
    s->shared.state.snapshot_bytes += need;
    s->shared.state.kept_bytes = need;
    pthread_mutex_unlock(&s->shared.mutex);
    return CKD_OK;
}

void cached_values_free(ckd_session *s, bool in_child) {
    cached_values *k = &s->saver.cached;
    if (!in_child) {
        snapshot_memory_free(k->memory, k->size);
    }
    free(k->places);
    *k = (cached_values){.memory = NULL};
}

void *cached_values_of(const ckd_session *s, size_t i) {
    const cached_values *k = &s->saver.cached;
    return k->memory && k->places[i] != NOWHERE ? k->memory + k->places[i] : NULL;
}

/* ------------------------------------------------------------------------------------------------- one snapshot */

static void name_checkpoint(ckd_session *s, const session_slot *slot) {
    s->save.run = s->run;
    s->save.step = slot->step;
    s->save.metric = slot->metric;
    s->save.metric_name = s->metric_name[0] && slot->metric == slot->metric ? s->metric_name : NULL;
}

void session_record_last(ckd_session *s, const ckd_checkpoint *last) {
    s->saver.launch = (launch_record){.has_last = true, .own = true, .last = last->id, .step = last->step};
    memcpy(s->saver.launch.run, last->run, sizeof(s->saver.launch.run));
}

static void continue_from(ckd_session *s, const ckd_checkpoint *saved) {
    session_record_last(s, saved);
    snprintf(s->run, sizeof(s->run), "%s", saved->run);
    s->save.parent_run = s->save.resumed_from_run = NULL;
    s->save.on_duplicate = s->on_duplicate;
}

/* Pauses while training is busy, within the limit of this save. */
static void pause_while_busy(ckd_session *s, session_slot *slot) {
    uint64_t begun = clock_monotonic_ns(),
             max = s->saver.unthrottled_ns ? s->saver.unthrottled_ns : FIRST_PAUSE_NS;
    pthread_mutex_lock(&s->shared.mutex);
    while (s->shared.phase == CKD_PHASE_BUSY && !s->shared.waiting && !s->shared.ending) {
        uint64_t paused = slot->paused_ns + (clock_monotonic_ns() - begun);
        if (paused >= max) {
            break;
        }
        uint64_t until = clock_monotonic_ns() + (max - paused);
        struct timespec at = {(time_t)(until / 1000000000), (long)(until % 1000000000)};
        pthread_cond_timedwait(&s->shared.changed, &s->shared.mutex, &at);
    }
    pthread_mutex_unlock(&s->shared.mutex);
    slot->paused_ns += clock_monotonic_ns() - begun;
}

/* Returns the parent's values of an item if they are still in memory, else NULL. */
static const void *values_of_parent(const ckd_session *s, const ckd_save *save, size_t i) {
    const ckd_id *parent = save->sources.parent ? &save->sources.parent->manifest.checkpoint.id : NULL;
    if (s->saver.cached.memory) {
        return parent && id_equal(parent, &s->saver.cached.of) ? cached_values_of(s, i) : NULL;
    }
    bool is_parent = s->saver.reference && parent && id_equal(parent, &s->saver.reference_id);
    return is_parent ? snapshot_read(s->saver.reference->snapshot, i) : NULL;
}

static const void *await_copy(session_slot *slot, size_t i) {
    uint64_t begun = clock_monotonic_ns();
    const void *data = snapshot_read(slot->snapshot, i);
    slot->waited_ns += clock_monotonic_ns() - begun;
    return data;
}

/* Saves a tensor as soon as it is copied. one_step: the save is one step after the last one. */
static ckd_status save_item(ckd_session *s, session_slot *slot, size_t i, ckd_save *save, bool one_step,
                            ckd_error *err) {
    const session_item *item = &s->items[i];
    ckd_tensor t = item->tensor;
    ckd_device device;
    ckd_status status = CKD_OK;
    t.data = await_copy(slot, i);
    t.optimizer = one_step && t.optimizer ? &slot->optimizers[i] : NULL;
    save->input.parent_values = values_of_parent(s, save, i);
    save->input.decoded_values = cached_values_of(s, i);
    if (item->on_device) {
        status = session_device_read(&t, &device, slot, item, err);
    }
    return status == CKD_OK ? ckd_save_tensor(save, &t, err) : status;
}

static ckd_status save_items(ckd_session *s, session_slot *slot, const ckd_plan *plan, ckd_save *save,
                             bool one_step, ckd_error *err) {
    ckd_status status = session_device_check(s, slot, err);
    size_t tensors = 0;
    /* they are the snapshot's, whose slot is not staged again before the save has ended */
    save->input.buffers_are_stable = true;
    for (size_t i = 0; i < s->item_count && status == CKD_OK; i++) {
        const session_item *item = &s->items[i];
        pause_while_busy(s, slot);
        if (item->is_bytes) {
            if (s->save.rank == 0) {
                status = ckd_save_blob(save, item->tensor.name, snapshot_read(slot->snapshot, i),
                                       (size_t)item->bytes, err);
            }
        } else if (!plan || ckd_plan_writes(plan, s->save.rank, tensors++)) {
            status = save_item(s, slot, i, save, one_step, err);
        }
    }
    return status;
}

ckd_status session_await_fence(save_stage *copied, ckd_session *s, session_slot *slot, ckd_error *err) {
    uint64_t begun = clock_monotonic_ns();
    pthread_mutex_lock(&s->shared.mutex);
    while (!slot->fenced) {
        pthread_cond_wait(&s->shared.changed, &s->shared.mutex);
    }
    slot->waited_ns += clock_monotonic_ns() - begun;
    bool torn = slot->torn;
    *copied = (save_stage){slot->begun_ns, slot->copied_ns, slot->stall_ns};
    pthread_mutex_unlock(&s->shared.mutex);
    ckd_status status = session_device_check(s, slot, err);
    if (status != CKD_OK) {
        return status;
    }
    return torn ? err_set(
                      err, CKD_E_STATE,
                      "the save of step %llu is given up: with lazy snapshots, call ckd_session_fence before "
                      "anything writes to a registered tensor",
                      (unsigned long long)slot->step)
                : CKD_OK;
}

/*
 * A run that has gone further belongs to another training run, unless this one was restored from it or a branch was
 * requested.
 */
static ckd_status look_whether_run_is_new(ckd_session *s, const session_slot *slot, ckd_error *err) {
    ckd_checkpoint newest;
    if (s->on_duplicate != CKD_DUPLICATE_ERROR ||
        ckd_store_find(&newest, s->saver.store, s->run, CKD_LATEST, NULL) != CKD_OK ||
        newest.step < slot->step) {
        return CKD_OK;
    }
    return err_set(
        err, CKD_E_EXISTS,
        "run '%s' already has checkpoints up to step %llu, and this session did not resume from them: call "
        "ckd_session_restore, choose another run, or set on_duplicate to CKD_DUPLICATE_BRANCH",
        s->run, (unsigned long long)newest.step);
}

/* Ranks check this at different times. If one refuses the save, the others must not wait for its part. */
static ckd_status check_run_is_new(ckd_session *s, const session_slot *slot, ckd_error *err) {
    ckd_error why = {.offset = CKD_NO_OFFSET};
    pthread_mutex_lock(&s->shared.mutex);
    bool goes_on = s->shared.state.durable_step != CKD_LATEST;
    pthread_mutex_unlock(&s->shared.mutex);
    if (goes_on) {
        return CKD_OK;
    }
    ckd_status own = look_whether_run_is_new(s, slot, &why);
    return s->saver.ranks ? ranks_agree(s->saver.ranks, own, &why, NULL, 0, err) : err_from(err, own, &why);
}

/*
 * Finds the present name of the checkpoint that was restored: its run may have been renamed. Leaves `run` empty if it
 * was deleted. Fails if it has the name that was not found: then something else is missing.
 */
static ckd_status find_origin(char run[CKD_RUN_MAX + 1], const ckd_session *s, ckd_error *err) {
    ckd_checkpoint found;
    ckd_error why = {.offset = CKD_NO_OFFSET};
    ckd_status status = store_find_id(&found, s->saver.store, &s->saver.launch.last, &why);
    if (status == CKD_OK && strcmp(found.run, s->resumed_run) == 0) {
        return CKD_E_NOT_FOUND; /* *err says what */
    }
    if (status == CKD_OK) {
        snprintf(run, CKD_RUN_MAX + 1, "%s", found.run);
    }
    return err_except(err, status, CKD_E_NOT_FOUND, &why);
}

/*
 * Corrects the name of the checkpoint that the save continues. If that is gone, the save continues none. Ranks must
 * name the same one, so rank 0 looks for all. *why: that of the save's failure; this call's, if it fails.
 */
static ckd_status correct_origin(ckd_session *s, ckd_error *why) {
    char run[CKD_RUN_MAX + 1] = "";
    ckd_error lost = {.offset = CKD_NO_OFFSET};
    ckd_store *reporter = s->save.rank == 0 ? s->saver.store : NULL;
    ckd_error first = *why;
    ckd_status status = reporter ? find_origin(run, s, why) : CKD_OK;
    if (s->saver.ranks) {
        status = ranks_agree(s->saver.ranks, status, why, run, sizeof(run), &lost);
        *why = status == CKD_OK ? *why : lost;
    }
    if (status != CKD_OK) {
        return status;
    }
    run[CKD_RUN_MAX] = '\0';
    unsigned long long from = s->save.resumed_from_step, step = s->save.step;
    if (reporter && run[0]) {
        store_message(reporter, "%s@%llu is now called %s@%llu; the save of step %llu continues it",
                      s->resumed_run, from, run, from, step);
    } else if (reporter) {
        store_message(reporter, "%.400s; step %llu is saved without it", first.message, step);
    }
    if (run[0]) {
        memcpy(s->parent_run, run, sizeof(run));
        memcpy(s->resumed_run, run, sizeof(run));
    } else {
        s->save.parent_run = s->save.resumed_from_run = NULL;
    }
    return CKD_OK;
}

static ckd_status try_begin(ckd_save **out, ckd_session *s, ckd_error *err) {
    return s->saver.ranks ? ckd_ranks_begin(out, s->saver.ranks, &s->save, err)
                          : ckd_save_begin(out, s->saver.store, &s->save, err);
}

/*
 * The checkpoint that the state comes from may have been deleted or renamed since. That must not cost the state, and
 * nothing was read from the snapshot yet. Ranks begin together: all get NOT_FOUND, or none does.
 */
static ckd_status begin_save(ckd_save **out, ckd_session *s, ckd_error *err) {
    ckd_error why = {.offset = CKD_NO_OFFSET};
    ckd_status status = try_begin(out, s, &why);
    /* names that the session's options gave stay as they are */
    while (status == CKD_E_NOT_FOUND && s->saver.launch.own && s->save.resumed_from_run) {
        status = correct_origin(s, &why);
        if (status != CKD_OK) {
            break;
        }
        status = try_begin(out, s, &why);
    }
    return err_from(err, status, &why);
}

static ckd_status save_single(ckd_checkpoint *saved, ckd_session *s, session_slot *slot, bool one_step,
                              ckd_error *err) {
    ckd_save *save;
    ckd_status status = begin_save(&save, s, err);
    if (status != CKD_OK) {
        return status;
    }
    save->sources.ignore_cached |= s->saver.parent_in_doubt;
    status = save_items(s, slot, NULL, save, one_step, err);
    THEN(status, session_await_fence(&save->stats.snapshot, s, slot, err));
    if (status == CKD_OK) {
        s->saver.launch.tried = save->checkpoint;
        return ckd_save_commit(saved, save, err);
    }
    ckd_save_abort(save);
    return status;
}

static ckd_status plan_collective(const ckd_plan **out, const ckd_session *s, ckd_error *err) {
    ckd_tensor *tensors = calloc(s->item_count + 1, sizeof(*tensors));
    if (!tensors) {
        return err_nomem(err, s->item_count * sizeof(*tensors), "what a rank holds");
    }
    size_t count = 0;
    for (size_t i = 0; i < s->item_count; i++) {
        if (!s->items[i].is_bytes) {
            tensors[count++] = s->items[i].tensor;
        }
    }
    ckd_status status = ckd_ranks_plan(out, s->saver.ranks, tensors, count, err);
    free(tensors);
    return status;
}

static ckd_status save_collective(ckd_checkpoint *saved, ckd_session *s, session_slot *slot, bool one_step,
                                  ckd_error *err) {
    const ckd_plan *plan;
    ckd_save *save;
    ckd_error why = {0};
    ckd_status status = plan_collective(&plan, s, err);
    THEN(status, begin_save(&save, s, err));
    if (status != CKD_OK) {
        return status;
    }
    save->sources.ignore_cached |= s->saver.parent_in_doubt;
    status = save_items(s, slot, plan, save, one_step, &why);
    THEN(status, session_await_fence(&save->stats.snapshot, s, slot, &why));
    if (status != CKD_OK) {
        return err_from(err, ckd_ranks_abort(s->saver.ranks, save, &why), &why);
    }
    s->saver.launch.tried = save->checkpoint;
    slot->handed_ns = clock_monotonic_ns();
    return ckd_ranks_commit(saved, s->saver.ranks, save, err);
}

/* An agent that has lost this session may commit the same state meanwhile, under the same id. */
static ckd_status save_without_agent(ckd_checkpoint *saved, ckd_session *s, session_slot *slot, bool one_step,
                                     ckd_error *err) {
    ckd_id shared = s->save.checkpoint_id;
    ckd_error why = {.offset = CKD_NO_OFFSET};
    ckd_status status = (s->saver.ranks ? save_collective : save_single)(saved, s, slot, one_step, &why);
    s->save.checkpoint_id = (ckd_id){{0}};
    if (status != CKD_OK && !id_is_zero(&shared) && session_agent_find_saved(saved, s, &shared)) {
        return CKD_OK;
    }
    return err_from(err, status, &why);
}

static void make_checkpoint(ckd_saved *saved, ckd_session *s, session_slot *slot) {
    pthread_mutex_lock(&s->saver.store_turn);
    name_checkpoint(s, slot);
    bool one_step =
        s->shared.state.durable_step != CKD_LATEST && slot->step == s->shared.state.durable_step + 1;
    saved->status = check_run_is_new(s, slot, &saved->error);
    if (saved->status == CKD_OK &&
        !session_agent_save(&saved->status, &saved->checkpoint, s, slot, one_step, &saved->error)) {
        saved->status = save_without_agent(&saved->checkpoint, s, slot, one_step, &saved->error);
    }
    s->saver.reference = NULL;
    s->saver.parent_in_doubt = saved->status == CKD_E_NOT_FOUND || saved->status == CKD_E_CORRUPT ||
                               saved->status == CKD_E_UNSUPPORTED || saved->status == CKD_E_IO;
    if (saved->status == CKD_OK) {
        continue_from(s, &saved->checkpoint);
        s->saver.reference = s->shared.staged_max < s->shared.slot_count ? slot : NULL;
        s->saver.reference_id = s->saver.cached.of = saved->checkpoint.id;
    } else if (saved->status == CKD_E_NOT_FOUND && s->save.parent_run) {
        /* it was deleted during the save: the next one continues without it */
        s->save.parent_run = s->save.resumed_from_run = NULL;
    }
    pthread_mutex_unlock(&s->saver.store_turn);
}

/* ----------------------------------------------------------------------------------------------------- the queue */

/* Waits until nobody uses the slot. Slices that the save did not read are copied, too. */
static void let_copying_end(uint64_t *stall_ns, ckd_session *s, session_slot *slot) {
    save_stage copied;
    (void)session_await_fence(&copied, s, slot, NULL);
    *stall_ns = copied.work_ns;
    snapshot_finish(slot->snapshot, SNAPSHOT_ALL);
    if (slot->devices) {
        (void)device_snapshot_wait(slot->devices, NULL); /* the save has reported any failure */
    }
}

static void keep_result(ckd_session *s, const ckd_saved *saved) {
    pthread_mutex_lock(&s->shared.mutex);
    bool good = saved->status == CKD_OK;
    s->shared.state.device_reference_bytes = s->saver.store->device_references_held;
    s->shared.state.saved += good;
    s->shared.state.failed += !good;
    if (good) {
        s->shared.state.durable_step = saved->step;
    } else {
        s->shared.failed = saved->status;
        s->shared.failure = saved->error;
        snprintf(s->shared.failure.message, sizeof(s->shared.failure.message),
                 "the save of step %llu failed: %.440s", (unsigned long long)saved->step,
                 saved->error.message);
    }
    s->shared.state.last_stall_ns = saved->stall_ns;
    s->shared.state.last_persist_ns = s->shared.ended_persist_ns = saved->persist_ns;
    pthread_mutex_unlock(&s->shared.mutex);
}

static void release_first_slot(ckd_session *s) {
    pthread_mutex_lock(&s->shared.mutex);
    s->shared.first = (s->shared.first + 1) % s->shared.slot_count;
    s->shared.used--;
    pthread_cond_broadcast(&s->shared.changed);
    pthread_mutex_unlock(&s->shared.mutex);
}

static void save_staged(ckd_session *s, session_slot *slot) {
    ckd_saved saved = {.step = slot->step, .error = {.offset = CKD_NO_OFFSET}};
    save_times times = {.begun_ns = clock_monotonic_ns()};
    make_checkpoint(&saved, s, slot);
    times.ended_ns = clock_monotonic_ns();
    let_copying_end(&saved.stall_ns, s, slot);
    saved.persist_ns = clock_monotonic_ns() - slot->begun_ns;
    s->saver.unthrottled_ns = saved.persist_ns - slot->paused_ns;
    times.apart_ns = slot->paused_ns + slot->waited_ns;
    times.handed_ns = slot->handed_ns;
    if (saved.status == CKD_OK) {
        session_judge_save(s, slot, &saved.checkpoint, &times);
    }
    keep_result(s, &saved);
    if (s->options.on_saved) {
        s->options.on_saved(s->options.saved_context, &saved);
    }
    release_first_slot(s);
}

/* ---------------------------------------------------------------------------------------------------- the thread */

/*
 * The run's newest checkpoint at this time does not count as another launch's. Only rank 0 checks; other ranks rely on
 * it.
 */
static void begin_launch_check(ckd_session *s) {
    ckd_checkpoint newest;
    snprintf(s->saver.launch.run, sizeof(s->saver.launch.run), "%s", s->run);
    if (ckd_store_find(&newest, s->saver.store, s->run, CKD_LATEST, NULL) == CKD_OK) {
        session_record_last(s, &newest);
        s->saver.launch.own = false;
    }
    s->saver.store->launch = s->save.rank == 0 ? &s->saver.launch : NULL;
}

static void open_store(ckd_session *s) {
    ckd_status status =
        ckd_store_open(&s->saver.store, s->path, CKD_OPEN_CREATE, &s->store_options, &s->shared.open_error);
    if (status == CKD_OK && s->options.ranks) {
        status = ckd_ranks_join(&s->saver.ranks, s->saver.store, s->options.ranks, &s->shared.open_error);
    }
    THEN(status, session_agent_open(s, &s->shared.open_error));
    if (status == CKD_OK) {
        s->saver.store->keeps_workspace = true;
        begin_launch_check(s);
        s->saver.store->device_reference_bytes = s->options.device_reference_bytes;
    }
    pthread_mutex_lock(&s->shared.mutex);
    s->shared.open_status = status;
    s->shared.opened = true;
    pthread_cond_broadcast(&s->shared.changed);
    pthread_mutex_unlock(&s->shared.mutex);
}

/* Returns NULL when the session is being closed and nothing is left to save. */
static session_slot *next_slot(ckd_session *s) {
    pthread_mutex_lock(&s->shared.mutex);
    while (s->shared.used == 0 && !s->shared.ending) {
        pthread_cond_wait(&s->shared.changed, &s->shared.mutex);
    }
    session_slot *slot = s->shared.used ? &s->shared.slots[s->shared.first] : NULL;
    pthread_mutex_unlock(&s->shared.mutex);
    return slot;
}

/* The agent may fail to save a state at the end. The session then counts that as a failed save. */
static void leave_agent(ckd_session *s) {
    ckd_error err;
    ckd_status status = session_agent_leave(s, &err);
    if (status != CKD_OK) {
        pthread_mutex_lock(&s->shared.mutex);
        s->shared.failed = status;
        s->shared.failure = err;
        pthread_mutex_unlock(&s->shared.mutex);
    }
}

void *session_saver_main(void *context) {
    ckd_session *s = context;
    if (s->options.nice >= 0) {
        thread_lower_priority(s->options.nice ? s->options.nice : DEFAULT_NICE);
    }
    open_store(s);
    if (s->shared.open_status == CKD_OK) {
        for (session_slot *slot; (slot = next_slot(s)) != NULL;) {
            save_staged(s, slot);
        }
    }
    leave_agent(s);
    ckd_ranks_leave(s->saver.ranks);
    ckd_store_close(s->saver.store);
    return NULL;
}
