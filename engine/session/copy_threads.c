/*
 * Threads that copy snapshots beside the trainer. They are held while the trainer needs the processors, unless a fence
 * waits for the copy.
 */
#include "engine/session/copy_threads.h"

#include <stdlib.h>

#include "base/threads.h"

struct copy_threads {
    pthread_mutex_t mutex;
    pthread_cond_t work, idle;
    snapshot *current;     /* NULL: none, or already copied */
    uint64_t number;       /* its number; a thread takes up each snapshot once */
    uint32_t active;       /* threads that are copying it */
    bool ending, reported; /* reported: `began` was called for the current snapshot */
    bool held;             /* training needs the processors */
    bool urgent;           /* the current snapshot is copied even while threads are held */
    copy_started_fn began;
    void *context;
    uint32_t count;
    pthread_t threads[];
};

static void wait_while_held(copy_threads *c) {
    pthread_mutex_lock(&c->mutex);
    while (c->held && !c->urgent && !c->ending) {
        pthread_cond_wait(&c->work, &c->mutex);
    }
    pthread_mutex_unlock(&c->mutex);
}

/* Waits before it takes a slice, so that a fence never waits for a thread that is held. */
static void copy_slices(copy_threads *c, snapshot *s) {
    do {
        wait_while_held(c);
    } while (snapshot_help(s));
}

static void *copy_main(void *context) {
    copy_threads *c = context;
    uint64_t last_number = 0;
    thread_set_batch(); /* the trainer wakes it and should continue at once */
    pthread_mutex_lock(&c->mutex);
    while (!c->ending) {
        if (c->number == last_number) {
            pthread_cond_wait(&c->work, &c->mutex);
            continue;
        }
        /*
         * The thread is not active yet, because the thread that begins the next snapshot may hold a lock that `began`
         * waits for.
         */
        if (!c->reported) {
            c->reported = true;
            pthread_mutex_unlock(&c->mutex);
            c->began(c->context);
            pthread_mutex_lock(&c->mutex);
            continue;
        }
        last_number = c->number;
        snapshot *s = c->current;
        c->active++;
        pthread_mutex_unlock(&c->mutex);
        copy_slices(c, s);
        pthread_mutex_lock(&c->mutex);
        if (--c->active == 0) {
            pthread_cond_signal(&c->idle);
        }
    }
    pthread_mutex_unlock(&c->mutex);
    return NULL;
}

ckd_status copy_threads_start(copy_threads **out, uint32_t threads, copy_started_fn began, void *context,
                              ckd_error *err) {
    *out = NULL;
    copy_threads *c = calloc(1, sizeof(*c) + threads * sizeof(c->threads[0]));
    if (!c) {
        return err_nomem(err, sizeof(*c), "threads that copy");
    }
    c->began = began;
    c->context = context;
    pthread_mutex_init(&c->mutex, NULL);
    pthread_cond_init(&c->work, NULL);
    pthread_cond_init(&c->idle, NULL);
    ckd_status status = CKD_OK;
    while (status == CKD_OK && c->count < threads) {
        status = thread_start(&c->threads[c->count], copy_main, c, err);
        c->count += status == CKD_OK;
    }
    if (status != CKD_OK) {
        copy_threads_end(c, false);
        return status;
    }
    *out = c;
    return CKD_OK;
}

void copy_threads_begin(copy_threads *c, snapshot *s, bool may_be_held) {
    pthread_mutex_lock(&c->mutex);
    c->urgent = true; /* held threads have nothing left to do for the last snapshot */
    pthread_cond_broadcast(&c->work);
    while (c->active > 0) { /* they find no slice left of the last snapshot */
        pthread_cond_wait(&c->idle, &c->mutex);
    }
    snapshot_start(s);
    c->current = s;
    c->number++;
    c->reported = false;
    c->urgent = !may_be_held;
    pthread_mutex_unlock(&c->mutex);
}

void copy_threads_wake(copy_threads *c) {
    if (c->count > 0) {
        pthread_cond_broadcast(&c->work);
    } else {
        c->began(c->context);
    }
}

void copy_threads_hold(copy_threads *c, bool held) {
    pthread_mutex_lock(&c->mutex);
    c->held = held;
    if (!held) {
        pthread_cond_broadcast(&c->work);
    }
    pthread_mutex_unlock(&c->mutex);
}

void copy_threads_hurry(copy_threads *c) {
    pthread_mutex_lock(&c->mutex);
    if (!c->urgent) {
        c->urgent = true;
        pthread_cond_broadcast(&c->work);
    }
    pthread_mutex_unlock(&c->mutex);
}

void copy_threads_end(copy_threads *c, bool in_child) {
    if (!c) {
        return;
    }
    if (!in_child) {
        pthread_mutex_lock(&c->mutex);
        c->ending = true;
        pthread_cond_broadcast(&c->work);
        pthread_mutex_unlock(&c->mutex);
        for (uint32_t i = 0; i < c->count; i++) {
            pthread_join(c->threads[i], NULL);
        }
        pthread_cond_destroy(&c->idle);
        pthread_cond_destroy(&c->work);
        pthread_mutex_destroy(&c->mutex);
    }
    free(c);
}
