/* Threads that copy the snapshot beside the trainer, and report when it is complete. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdbool.h>
#include <stdlib.h>
#include <time.h>

#include "engine/session/copy_threads.h"

#define BYTES (1 << 20)

typedef struct telling {
    sem_t called, let_go;
    bool waits, waited_in_vain;
    unsigned times;
} telling;

/* Returns false after 20 seconds. */
static bool wait_for(sem_t *s) {
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += 20;
    return sem_timedwait(s, &until) == 0;
}

static void tell(void *context) {
    telling *t = context;
    bool waits = t->waits;
    t->times++;
    sem_post(&t->called);
    if (waits) {
        t->waited_in_vain = !wait_for(&t->let_go);
    }
}

typedef struct scene {
    telling told;
    unsigned char *state;
    snapshot_source source;
    snapshot *snapshot;
    copy_threads *copy_threads;
} scene;

static void begin(scene *s, uint32_t threads) {
    *s = (scene){.state = malloc(BYTES)};
    assert_non_null(s->state);
    memset(s->state, 1, BYTES);
    s->source = (snapshot_source){s->state, BYTES, 0};
    sem_init(&s->told.called, 0, 0);
    sem_init(&s->told.let_go, 0, 0);
    assert_int_equal(snapshot_new(&s->snapshot, &s->source, 1, NULL, NULL), CKD_OK);
    assert_int_equal(copy_threads_start(&s->copy_threads, threads, tell, &s->told, NULL), CKD_OK);
}

static void end(scene *s) {
    copy_threads_end(s->copy_threads, false);
    snapshot_free(s->snapshot, false);
    sem_destroy(&s->told.called);
    sem_destroy(&s->told.let_go);
    free(s->state);
}

/* A callback that takes long for one snapshot does not keep the next snapshot from being taken. */
static void test_callbacks_do_not_block_snapshots(void **state) {
    (void)state;
    scene s;
    begin(&s, 1);
    s.told.waits = true;
    copy_threads_begin(s.copy_threads, s.snapshot, false);
    copy_threads_wake(s.copy_threads);
    assert_true(wait_for(&s.told.called));
    snapshot_finish(s.snapshot, SNAPSHOT_ALL);
    copy_threads_begin(s.copy_threads, s.snapshot,
                       false); /* the callback of the previous one is still running */
    s.told.waits = false;
    sem_post(&s.told.let_go);
    copy_threads_wake(s.copy_threads);
    assert_true(wait_for(&s.told.called));
    snapshot_finish(s.snapshot, SNAPSHOT_ALL);
    end(&s);
    assert_false(s.told.waited_in_vain);
    assert_int_equal(s.told.times, 2);
}

/* There is one callback per snapshot, however many threads copy it. Without threads the caller makes it. */
static void test_one_callback_per_snapshot(void **state) {
    (void)state;
    for (uint32_t threads = 0; threads <= 3; threads++) {
        scene s;
        begin(&s, threads);
        for (unsigned i = 1; i <= 50; i++) {
            memset(s.state, (int)i, BYTES);
            copy_threads_begin(s.copy_threads, s.snapshot, false);
            copy_threads_wake(s.copy_threads);
            assert_true(wait_for(&s.told.called));
            snapshot_finish(s.snapshot, SNAPSHOT_ALL);
            assert_memory_equal(snapshot_read(s.snapshot, 0), s.state, BYTES);
        }
        end(&s);
        assert_int_equal(s.told.times, 50);
    }
}

static bool copied_within(scene *s, unsigned ms) {
    struct timespec pause = {.tv_nsec = 1000000};
    for (unsigned waited = 0; waited < ms && !snapshot_is_complete(s->snapshot); waited++) {
        nanosleep(&pause, NULL);
    }
    return snapshot_is_complete(s->snapshot);
}

/* Threads that are held copy nothing until they are let go, somebody is in a hurry, or the next snapshot begins. */
static void test_held(void **state) {
    (void)state;
    for (int how = 0; how < 4; how++) {
        scene s;
        begin(&s, 2);
        copy_threads_hold(s.copy_threads, true);
        copy_threads_begin(s.copy_threads, s.snapshot, how != 3);
        copy_threads_wake(s.copy_threads);
        assert_true(wait_for(&s.told.called)); /* the saver is told all the same */
        if (how < 3) {
            assert_false(copied_within(&s, 50));
        }
        if (how == 0) {
            copy_threads_hold(s.copy_threads, false);
        } else if (how == 1) {
            copy_threads_hurry(s.copy_threads);
        } else if (how == 2) {
            snapshot_finish(s.snapshot, SNAPSHOT_ALL);
            memset(s.state, 2, BYTES);
            copy_threads_begin(s.copy_threads, s.snapshot, false);
            copy_threads_wake(s.copy_threads);
        } /* 3: it may not be held */
        assert_true(copied_within(&s, 20000));
        assert_memory_equal(snapshot_read(s.snapshot, 0), s.state, BYTES);
        end(&s);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_callbacks_do_not_block_snapshots),
        cmocka_unit_test(test_one_callback_per_snapshot),
        cmocka_unit_test(test_held),
    };
    return cmocka_run_group_tests_name("copiers", tests, NULL, NULL);
}
