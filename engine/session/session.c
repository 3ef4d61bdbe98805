/* Opening and closing a session. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "engine/session/session.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/threads.h"
#include "engine/save/save.h"

#define COPY_THREADS_MAX 4 /* default limit: more threads would only compete for memory bandwidth */

ckd_status session_check(const ckd_session *s, ckd_error *err) {
    if (!s) {
        return err_set(err, CKD_E_INVALID, "there is no session: it is NULL");
    }
    return s->process == getpid()
               ? CKD_OK
               : err_set(err, CKD_E_STATE,
                         "a session belongs to the process that opened it; a forked child opens its own");
}

/* --------------------------------------------------------------------------------------------------------- open */

static ckd_status check_times(const ckd_session_options *o, ckd_error *err) {
    const struct {
        const char *name;
        double value, max;
    } times[] = {{"every_s", o->every_s, 1e9},
                 {"overhead", o->overhead, 1},
                 {"mtbf_s", o->mtbf_s, 1e12},
                 {"agent_wait_s", o->agent_wait_s, 1e6}};
    for (size_t i = 0; i < sizeof(times) / sizeof(times[0]); i++) {
        if (!(times[i].value >= 0 && times[i].value <= times[i].max)) {
            return err_set(err, CKD_E_INVALID, "%s is %g, outside 0 ... %g", times[i].name, times[i].value,
                           times[i].max);
        }
    }
    return CKD_OK;
}

static ckd_status check_options(const ckd_session_options *o, ckd_error *err) {
    if (!o->save) {
        return err_set(err, CKD_E_INVALID, "a session needs options.save");
    }
    if (o->snapshot < CKD_SNAPSHOT_COPY || o->snapshot > CKD_SNAPSHOT_LAZY) {
        return err_set(err, CKD_E_INVALID, "snapshot %d is not known", (int)o->snapshot);
    }
    if (o->when_busy < CKD_BUSY_BLOCK || o->when_busy > CKD_BUSY_COALESCE) {
        return err_set(err, CKD_E_INVALID, "when_busy %d is not known", (int)o->when_busy);
    }
    if (o->saves_under_way > 2) {
        return err_set(err, CKD_E_INVALID, "saves_under_way is %u, at most 2", (unsigned)o->saves_under_way);
    }
    if (o->nice > 19 || o->copy_threads > 1024) {
        return err_set(err, CKD_E_INVALID, "nice is at most 19, copy_threads at most 1024");
    }
    if (o->ranks && (o->every_s > 0 || o->overhead > 0 || o->mtbf_s > 0 || o->when_busy != CKD_BUSY_BLOCK)) {
        return err_set(
            err, CKD_E_INVALID,
            "ranks would measure different times and save at different steps: with ranks, use every_steps "
            "or ckd_session_save, and CKD_BUSY_BLOCK");
    }
    if (o->ranks && o->restore_older) {
        return err_set(
            err, CKD_E_INVALID,
            "ranks might not agree on which checkpoint is damaged: with ranks, leave out restore_older");
    }
    return check_times(o, err);
}

/* Copies a caller's string into `to`. Returns `to`, or NULL for NULL. */
static const char *copy_text(char *to, size_t size, const char *text) {
    if (text) {
        snprintf(to, size, "%s", text);
    }
    return text ? to : NULL;
}

static ckd_status copy_save_options(ckd_session *s, const ckd_save_options *from, ckd_error *err) {
    s->save = (ckd_save_options)CKD_SAVE_OPTIONS_INIT;
    ckd_status status = COPY_OPTIONS(&s->save, from, "ckd_save_options", err);
    if (status != CKD_OK) {
        return status;
    }
    s->save.rank = s->save.world = 0;
    s->save.step = 0;
    s->save.checkpoint_id = (ckd_id){{0}};
    status = save_check_options(&s->save, err);
    if (status != CKD_OK) {
        return status;
    }
    snprintf(s->opened_run, sizeof(s->opened_run), "%s", s->save.run);
    s->save.run = copy_text(s->run, sizeof(s->run), s->save.run);
    s->save.parent_run = copy_text(s->parent_run, sizeof(s->parent_run), s->save.parent_run);
    s->save.resumed_from_run = copy_text(s->resumed_run, sizeof(s->resumed_run), s->save.resumed_from_run);
    s->save.metric_name = copy_text(s->metric_name, sizeof(s->metric_name), s->save.metric_name);
    s->trainer.metric = s->save.metric_name ? s->save.metric : NAN;
    s->on_duplicate = s->save.on_duplicate;
    return CKD_OK;
}

static ckd_status copy_options(ckd_session *s, const char *path, const ckd_session_options *from,
                               ckd_error *err) {
    ckd_status status = COPY_OPTIONS(&s->options, from, "ckd_session_options", err);
    THEN(status, check_options(&s->options, err));
    if (status != CKD_OK) {
        return status;
    }
    status = copy_save_options(s, s->options.save, err);
    if (status != CKD_OK) {
        return status;
    }
    s->store_options = (ckd_store_options)CKD_STORE_OPTIONS_INIT;
    status = COPY_OPTIONS(&s->store_options, s->options.store, "ckd_store_options", err);
    if (status != CKD_OK) {
        return status;
    }
    s->save.rank = s->options.ranks ? s->options.ranks->rank : 0;
    interval_init(&s->trainer.interval, s->options.every_steps, s->options.every_s, s->options.overhead,
                  s->options.mtbf_s);
    if (s->options.ranks) {
        s->trainer.interval.overhead = 0; /* ranks do not use the default overhead either */
    }
    s->path = path ? strdup(path) : NULL;
    return s->path ? CKD_OK
           : path  ? err_nomem(err, strlen(path), "the store's path")
                   : err_set(err, CKD_E_INVALID, "a session needs the path of a store");
}

static uint32_t copy_thread_count(const ckd_session_options *o) {
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    uint32_t max = cores < 1 ? 1 : cores > COPY_THREADS_MAX ? COPY_THREADS_MAX : (uint32_t)cores;
    uint32_t threads = o->copy_threads ? o->copy_threads : max;
    /* a lazy snapshot needs a thread beside the trainer */
    return threads > 1 ? threads - 1 : o->snapshot == CKD_SNAPSHOT_LAZY;
}

/* Starts the saver thread and waits until it has opened the store. */
static ckd_status start_saver(ckd_session *s, ckd_error *err) {
    ckd_status status = thread_start(&s->saver.thread, session_saver_main, s, err);
    if (status != CKD_OK) {
        return status;
    }
    s->saver.started = true;
    pthread_mutex_lock(&s->shared.mutex);
    while (!s->shared.opened) {
        pthread_cond_wait(&s->shared.changed, &s->shared.mutex);
    }
    pthread_mutex_unlock(&s->shared.mutex);
    s->options.ranks = s->saver.ranks ? s->options.ranks : NULL;
    return err_from(err, s->shared.open_status, &s->shared.open_error);
}

/* Called by a copy thread when a snapshot has begun. */
static void wake_saver(void *context) {
    ckd_session *s = context;
    /* once this lock is taken, the thread that began the snapshot has counted it in `used` */
    pthread_mutex_lock(&s->shared.mutex);
    pthread_cond_broadcast(&s->shared.changed);
    pthread_mutex_unlock(&s->shared.mutex);
}

static ckd_status start(ckd_session *s, ckd_error *err) {
    ckd_status status =
        copy_threads_start(&s->copy_threads, copy_thread_count(&s->options), wake_saver, s, err);
    return status == CKD_OK ? start_saver(s, err) : status;
}

ckd_status ckd_session_open(ckd_session **out, const char *path, const ckd_session_options *options,
                            ckd_error *err) {
    *out = NULL;
    ckd_session *s = calloc(1, sizeof(*s));
    if (!s) {
        return err_nomem(err, sizeof(*s), "a session");
    }
    s->process = getpid();
    s->shared.state.staged_step = s->shared.state.durable_step = CKD_LATEST;
    pthread_mutex_init(&s->shared.mutex, NULL);
    pthread_mutex_init(&s->saver.store_turn, NULL);
    pthread_condattr_t monotonic; /* pauses must not depend on a clock that can be set */
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&s->shared.changed, &monotonic);
    pthread_condattr_destroy(&monotonic);
    ckd_status status = copy_options(s, path, options, err);
    THEN(status, start(s, err));
    if (status != CKD_OK) {
        ckd_session_close(s, NULL);
        return status;
    }
    s->reports = ckd_progress_begin(s->opened_run, s->saver.ranks ? s->save.rank : CKD_PROGRESS_NO_RANK);
    *out = s;
    return CKD_OK;
}

/* -------------------------------------------------------------------------------------------------------- close */

static void end_saver(ckd_session *s) {
    pthread_mutex_lock(&s->shared.mutex);
    s->shared.ending = true;
    pthread_cond_broadcast(&s->shared.changed);
    pthread_mutex_unlock(&s->shared.mutex);
    pthread_join(s->saver.thread, NULL);
}

static void free_memory(ckd_session *s, bool in_child) {
    for (uint32_t i = 0; i < SESSION_SLOTS; i++) {
        snapshot_free(s->shared.slots[i].snapshot, in_child);
        device_snapshot_free(s->shared.slots[i].devices, in_child);
        free(s->shared.slots[i].optimizers);
    }
    for (size_t i = 0; i < s->item_count; i++) {
        free((void *)(uintptr_t)s->items[i].tensor.name);
        free(s->items[i].weight);
    }
    cached_values_free(s, in_child);
    session_alarms_free(s);
    session_agent_free(s, in_child);
    free(s->sources);
    free(s->device_sources);
    free(s->items);
    free(s->names);
    free(s->path);
    free(s);
}

ckd_status ckd_session_close(ckd_session *s, ckd_error *err) {
    if (!s) {
        return CKD_OK;
    }
    ckd_status status = session_check(s, err);
    if (status != CKD_OK) { /* the threads and the store belong to the parent process */
        copy_threads_end(s->copy_threads, true);
        free_memory(s, true);
        return status;
    }
    (void)session_enter(s, CKD_PROGRESS_SAVING);
    session_fence(s, SNAPSHOT_ALL);
    if (s->saver.started) {
        end_saver(s);
    }
    (void)session_enter(s, CKD_PROGRESS_ENDED);
    copy_threads_end(s->copy_threads, false);
    status = session_report_failure(s, err);
    pthread_cond_destroy(&s->shared.changed);
    pthread_mutex_destroy(&s->saver.store_turn);
    pthread_mutex_destroy(&s->shared.mutex);
    free_memory(s, false);
    return status;
}
