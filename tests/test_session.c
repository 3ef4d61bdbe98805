/* Sessions: what is saved while training goes on is the state of one step, errors are told, and what is restored is what was saved. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <errno.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/file.h"
#include "engine/session.h"
#include "tests/support/checkpoints.h"
#include "tests/support/scenes.h"
#include "tests/support/scratch.h"
#include "tests/support/tempdir.h"
#include "tests/support/trainers.h"

#define ROWS 300

/* Allocations of this thread: the linker sends the library's calls here (mk/test.mk). */
static _Thread_local unsigned long allocations, fail_at; /* fail_at: the one that fails, from 1; 0: none */
#define COUNTED(name, parameters, arguments)                              \
    void *__real_##name parameters;                                       \
    void *__wrap_##name parameters;                                       \
    void *__wrap_##name parameters {                                      \
        return ++allocations == fail_at ? NULL : __real_##name arguments; \
    }
COUNTED(malloc, (size_t size), (size))
COUNTED(calloc, (size_t count, size_t size), (count, size))
COUNTED(realloc, (void *block, size_t size), (block, size))
COUNTED(aligned_alloc, (size_t alignment, size_t size), (alignment, size))

/* One iteration: the optimizer makes the state that of the step. */
static ckd_status iterate(ckd_session *s, trainer *t, uint64_t step, ckd_error *err) {
    ckd_session_fence(s);
    trainer_set(t, step);
    return ckd_session_step(s, step, err);
}

/* One iteration whose save is to fail: told by its own call already, or by the one that waits. */
static ckd_status iterate_and_wait(ckd_session *s, trainer *t, uint64_t step, ckd_error *err) {
    ckd_status status = iterate(s, t, step, err);
    return status == CKD_OK ? ckd_session_wait(s, CKD_DURABLE, err) : status;
}

static uint64_t count_of(const char *dir, const char *run) {
    ckd_store *store = store_reopen(dir, CKD_OPEN_READ);
    ckd_checkpoint_list *list;
    assert_int_equal(ckd_store_list(&list, store, run, NULL), CKD_OK);
    uint64_t count = list->count;
    ckd_checkpoint_list_free(list);
    ckd_store_close(store);
    return count;
}

static ckd_checkpoint checkpoint_of(const char *dir, const char *run, uint64_t step) {
    ckd_store *store = store_reopen(dir, CKD_OPEN_READ);
    ckd_checkpoint c;
    assert_int_equal(ckd_store_find(&c, store, run, step, NULL), CKD_OK);
    ckd_store_close(store);
    return c;
}

/* ------------------------------------------------------------------------------------------------------- saving */

/* Of the newest save: how long training stood still, and until when it was copied. */
static void check_times(const char *dir, uint64_t stall_ns) {
    ckd_store *store = store_reopen(dir, CKD_OPEN_READ);
    ckd_timeline *t;
    assert_int_equal(ckd_store_timeline(&t, store, TRAINER_RUN, NULL), CKD_OK);
    const ckd_save_times *save = &t->items[t->count - 1];
    assert_int_equal(save->stall_ns, stall_ns);
    size_t at = t->stage_count - 1;
    while (at > 0 && t->stages[at - 1].save == t->count - 1) {
        at--;
    }
    const ckd_stage_times *s = &t->stages[at];
    assert_true(s[0].stage == CKD_STAGE_SNAPSHOT && s[0].begin_ns == 0 && s[0].end_ns >= s[0].work_ns);
    assert_int_equal(s[0].work_ns, stall_ns);
    assert_int_equal(t->stage_count - at, 6); /* and no waiting for others */
    assert_true(s[5].stage == CKD_STAGE_COMMIT && s[5].end_ns >= s[0].end_ns);
    ckd_timeline_free(t);
    ckd_store_close(store);
}

static void save_and_check(const char *dir, ckd_snapshot how, uint64_t snapshot_bytes) {
    trainer *t = trainer_new(ROWS);
    ckd_session_options o = session_options();
    o.every_steps = 3;
    o.snapshot = how;
    o.snapshot_bytes = snapshot_bytes;
    ckd_session *s = session_of(dir, &o, t);
    ckd_error err = {0};
    for (uint64_t step = 1; step <= 20; step++) {
        must(iterate(s, t, step, &err), &err);
    }
    must(ckd_session_wait(s, CKD_DURABLE, &err), &err);
    ckd_session_state state;
    ckd_session_poll(&state, s);
    assert_int_equal(state.saved, 6);
    assert_int_equal(state.failed + state.skipped + state.coalesced + state.under_way, 0);
    assert_int_equal(state.staged_step, 18);
    assert_int_equal(state.durable_step, 18);
    assert_int_equal(state.interval_steps, 3);
    assert_true(state.last_persist_ns > 0 && state.trained_ns > 0);
    must(ckd_session_close(s, &err), &err);
    trainer_free(t);
    assert_int_equal(count_of(dir, TRAINER_RUN), 6);
    check_times(dir, state.last_stall_ns);
    for (uint64_t step = 3; step <= 18; step += 3) {
        stored_check(dir, TRAINER_RUN, step, ROWS);
    }
}

static void test_copies(void **state) {
    save_and_check(*state, CKD_SNAPSHOT_COPY, 0);
}

static void test_lazy(void **state) {
    save_and_check(*state, CKD_SNAPSHOT_LAZY, 0);
}

static void test_two_snapshots(void **state) {
    save_and_check(*state, CKD_SNAPSHOT_LAZY, UINT64_C(1) << 30);
}

/*
 * The optimizer overwrites everything as soon as the fence returns, save after save; then all that was stored is looked at. CKD_SAVES=10000 for a
 * campaign (README.md).
 */
static void isolate(const char *dir, ckd_snapshot how, uint32_t threads) {
    const char *asked = getenv("CKD_SAVES");
    uint64_t saves = asked               ? strtoull(asked, NULL, 10)
                     : under_sanitizer() ? 20
                                         : 60,
             rows = 20000; /* 5 x 5 MB: pieces */
    trainer *t = trainer_new(rows), *seen = trainer_new(rows);
    ckd_session_options o = session_options();
    o.snapshot = how;
    o.snapshot_bytes = 60 << 20;
    ckd_store_options store = *o.store;
    store.threads = threads;
    o.store = &store;
    ckd_session *s = session_of(dir, &o, t);
    ckd_error err = {0};
    for (uint64_t step = 1; step <= saves; step++) {
        ckd_session_fence(s);
        trainer_spoil(t);
        trainer_set(t, step);
        must(ckd_session_step(s, step, &err), &err);
    }
    must(ckd_session_close(s, &err), &err);
    ckd_session *again = session_of(dir, &o, seen);
    for (uint64_t step = 1; step <= saves; step++) {
        must(ckd_session_restore(NULL, again, step, &err), &err);
        trainer_check(seen, step);
    }
    must(ckd_session_close(again, &err), &err);
    trainer_free(seen);
    trainer_free(t);
}

static void test_what_is_stored_is_the_snapshot(void **state) {
    isolate(*state, CKD_SNAPSHOT_LAZY, 1);
}

static void test_what_several_threads_store_is_the_snapshot(void **state) {
    isolate(*state, CKD_SNAPSHOT_LAZY, 3);
}

static void test_what_is_stored_is_the_copy(void **state) {
    isolate(*state, CKD_SNAPSHOT_COPY, 1);
}

/* A layer-wise optimizer waits for its layer only; the last layer is frozen, and nobody waits for it. */
static void test_fences_of_groups(void **state) {
    const char *dir = *state;
    uint64_t rows = 20000;
    trainer *t = trainer_new(rows);
    ckd_session_options o = session_options();
    o.snapshot = CKD_SNAPSHOT_LAZY;
    ckd_session *s = session_of(dir, &o, t);
    ckd_error err = {0};
    for (uint64_t step = 1; step <= 5; step++) {
        for (uint32_t layer = TRAINER_TENSORS; layer-- > 0;) {
            ckd_session_fence_group(s, layer);
            memset(t->layers[layer], 0xee, rows * 64 * sizeof(float));
            trainer_set_layer(t, layer, step);
            if (layer == 0) {
                trainer_set(t, step);
            }
        }
        must(ckd_session_step(s, step, &err), &err);
    }
    must(ckd_session_close(s, &err), &err);
    trainer_free(t);
    for (uint64_t step = 1; step <= 5; step++) {
        stored_check(dir, TRAINER_RUN, step, rows);
    }
}

static int note_files(void *context, file_step step, const char *path) {
    if (step == STEP_CREATE && strstr(path, "/data/c/")) {
        atomic_store((atomic_bool *)context, true);
    }
    return 0;
}

/* A save begins with its snapshot, and does not wait for the fence. */
static void test_saves_begin_before_the_fence(void **state) {
    const char *dir = *state;
    for (uint32_t threads = 1; threads <= 3; threads++) {
        trainer *t = trainer_new(ROWS);
        ckd_session_options o = session_options();
        o.snapshot = CKD_SNAPSHOT_LAZY;
        o.copy_threads = threads;
        ckd_session *s = session_of(dir, &o, t);
        ckd_error err = {0};
        atomic_bool begun = false;
        file_set_fault_hook(note_files, &begun);
        must(ckd_session_step(s, threads, &err), &err);
        for (int i = 0; i < 20000 && !atomic_load(&begun); i++) {
            usleep(1000);
        }
        assert_true(atomic_load(&begun));
        ckd_session_fence(s);
        must(ckd_session_wait(s, CKD_DURABLE, &err), &err);
        file_set_fault_hook(NULL, NULL);
        must(ckd_session_close(s, &err), &err);
        trainer_free(t);
    }
    assert_int_equal(count_of(dir, TRAINER_RUN), 3);
}

/* Without a fence nobody knows of which step a lazy snapshot is: it must not become a checkpoint. */
static void test_a_forgotten_fence_is_told(void **state) {
    const char *dir = *state;
    trainer *t = trainer_new(ROWS);
    ckd_session_options o = session_options();
    o.snapshot = CKD_SNAPSHOT_LAZY;
    ckd_session *s = session_of(dir, &o, t);
    ckd_error err = {0};
    trainer_set(t, 1); /* and not again: what is told is that it might have been */
    must(ckd_session_step(s, 1, &err), &err);
    ckd_status told = ckd_session_step(s, 2, &err);
    if (told == CKD_OK) {
        told = ckd_session_wait(s, CKD_DURABLE, &err);
    }
    assert_int_equal(told, CKD_E_STATE);
    assert_non_null(strstr(err.message, "ckd_session_fence"));
    must(iterate(s, t, 3, &err), &err);
    must(ckd_session_close(s, &err), &err); /* as good as a fence */
    trainer_free(t);
    assert_int_equal(count_of(dir, TRAINER_RUN), 2); /* 2 is as good as any */
    stored_check(dir, TRAINER_RUN, 3, ROWS);
}

/* The first step finds all memory that the trainer's thread will ever ask for. */
static void test_training_allocates_nothing(void **state) {
    for (int lazy = 0; lazy < 2; lazy++) {
        trainer *t = trainer_new(ROWS);
        ckd_session_options o = session_options();
        ckd_save_options save = *o.save;
        save.run = lazy ? "lazy" : "copy";
        o.save = &save;
        o.snapshot = lazy ? CKD_SNAPSHOT_LAZY : CKD_SNAPSHOT_COPY;
        ckd_session *s = session_of(*state, &o, t);
        ckd_error err = {0};
        unsigned long before = allocations;
        must(iterate(s, t, 1, &err), &err);
        assert_true(allocations > before); /* they are counted */
        before = allocations;
        for (uint64_t step = 2; step <= 30; step++) {
            must(iterate(s, t, step, &err), &err);
        }
        must(ckd_session_wait(s, CKD_DURABLE, &err), &err);
        assert_int_equal(allocations, before);
        must(ckd_session_close(s, &err), &err);
        trainer_free(t);
    }
}

/* Memory that cannot be had for a session, its tensors or its snapshots is an error, and nothing is lost. */
static void test_no_memory(void **state) {
    const char *dir = *state;
    ckd_store_close(store_create(dir));
    ckd_session_options o = session_options();
    o.snapshot_bytes = UINT64_C(1) << 30;
    trainer *t = trainer_new(ROWS);
    trainer_set(t, 1);
    unsigned long at = 0;
    for (ckd_status status = CKD_E_NOMEM; status != CKD_OK;) {
        ckd_session *s;
        ckd_error err = {0};
        allocations = 0;
        fail_at = ++at;
        status = ckd_session_open(&s, store_path_of(dir, ""), &o, &err);
        assert_true((s == NULL) == (status != CKD_OK));
        if (s) {
            status = session_register(s, t, &err);
        }
        if (status == CKD_OK) {
            status = ckd_session_step(s, 1, &err);
            if (status == CKD_E_NOMEM) { /* the same step again, when there is some */
                fail_at = 0;
                must(ckd_session_step(s, 1, &err), &err);
                must(ckd_session_close(s, &err), &err);
                ckd_store *store = store_reopen(dir, CKD_OPEN_WRITE);
                ckd_id id = checkpoint_of(dir, TRAINER_RUN, 1).id;
                ckd_delete_options gone = {.struct_size = sizeof(gone)};
                must(ckd_store_delete(store, &id, 1, &gone, &err), &err);
                ckd_store_close(store);
                continue;
            }
        }
        fail_at = 0;
        assert_true(status == CKD_OK || status == CKD_E_NOMEM);
        ckd_session_close(s, NULL);
    }
    assert_true(at > 15);
    trainer_free(t);
    stored_check(dir, TRAINER_RUN, 1, ROWS);
}

/* ------------------------------------------------------------------------------------------- failures, and room */

static atomic_int failing;
static int fail_writes(void *context, file_step step, const char *path) {
    (void)context;
    return step == STEP_WRITE && strstr(path, "/data/c/") && atomic_load(&failing) ? ENOSPC : 0;
}

static unsigned told_good, told_bad;
static void count_saved(void *context, const ckd_saved *saved) {
    assert_ptr_equal(context, &failing);
    told_good += saved->status == CKD_OK;
    told_bad += saved->status == CKD_E_NOSPACE;
}

static void test_errors_are_told_and_the_next_save_works(void **state) {
    const char *dir = *state;
    trainer *t = trainer_new(ROWS);
    ckd_session_options o = session_options();
    o.on_saved = count_saved;
    o.saved_context = &failing;
    told_good = told_bad = 0;
    ckd_session *s = session_of(dir, &o, t);
    ckd_error err = {0};
    must(iterate(s, t, 1, &err), &err);
    must(ckd_session_wait(s, CKD_DURABLE, &err), &err);
    atomic_store(&failing, 1);
    file_set_fault_hook(fail_writes, NULL);
    assert_int_equal(iterate_and_wait(s, t, 2, &err), CKD_E_NOSPACE);
    must(ckd_session_wait(s, CKD_DURABLE, &err), &err);
    assert_true(err.message[0] && err.file[0]);
    atomic_store(&failing, 0);
    must(iterate(s, t, 3, &err), &err); /* told once */
    must(ckd_session_wait(s, CKD_DURABLE, &err), &err);
    file_set_fault_hook(NULL, NULL);
    ckd_session_state now;
    ckd_session_poll(&now, s);
    assert_int_equal(now.saved, 2);
    assert_int_equal(now.failed, 1);
    must(ckd_session_close(s, &err), &err);
    trainer_free(t);
    assert_int_equal(told_good, 2);
    assert_int_equal(told_bad, 1);
    assert_int_equal(count_of(dir, TRAINER_RUN), 2);
    stored_check(dir, TRAINER_RUN, 3, ROWS);
    ckd_store *store = store_reopen(dir, CKD_OPEN_WRITE);
    ckd_store_close(store);
    store_check_clean(dir);
}

/* Holds a save until it is let go. */
static sem_t held, let_go;
static void hold(void *context, const ckd_saved *saved) {
    (void)context;
    assert_int_equal(saved->status, CKD_OK);
    sem_post(&held);
    sem_wait(&let_go);
}

/* Step 1 is being saved all the time until step 5 was made. */
static ckd_session_state busy(const char *dir, ckd_when_busy when, uint64_t snapshot_bytes) {
    trainer *t = trainer_new(ROWS);
    ckd_session_options o = session_options();
    o.every_steps = 2;
    o.when_busy = when;
    o.snapshot_bytes = snapshot_bytes;
    o.saves_under_way = snapshot_bytes ? 2 : 0;
    o.on_saved = hold;
    sem_init(&held, 0, 0);
    sem_init(&let_go, 0, 0);
    ckd_session *s = session_of(dir, &o, t);
    ckd_error err = {0};
    for (uint64_t step = 2; step <= 5; step++) {
        must(iterate(s, t, step, &err), &err);
        if (step == 2) {
            sem_wait(&held);
        }
    }
    sem_post(&let_go);
    ckd_session_state now;
    do {
        ckd_session_poll(&now, s);
        usleep(1000);
    } while (now.durable_step == 2 && now.under_way == 1 && snapshot_bytes == 0);
    for (int i = 0; i < 4; i++) {
        sem_post(&let_go);
    }
    must(iterate(s, t, 7, &err), &err);
    must(ckd_session_wait(s, CKD_DURABLE, &err), &err);
    ckd_session_poll(&now, s);
    must(ckd_session_close(s, &err), &err);
    trainer_free(t);
    return now;
}

static void test_what_finds_no_room_is_skipped(void **state) {
    ckd_session_state now = busy(*state, CKD_BUSY_SKIP, 0);
    assert_int_equal(now.skipped, 1); /* 4 */
    assert_int_equal(now.saved, 1);
    assert_int_equal(count_of(*state, TRAINER_RUN), 1);
}

static void test_what_finds_no_room_comes_later(void **state) {
    ckd_session_state now = busy(*state, CKD_BUSY_COALESCE, 0);
    assert_true(now.coalesced >= 1); /* 4; 5 as well, which still finds none */
    assert_int_equal(now.saved, 2);
    stored_check(*state, TRAINER_RUN, 7, ROWS);
}

/* It does not wait although the first save is under way: the second snapshot has room. */
static void test_a_second_snapshot_is_room(void **state) {
    ckd_session_state now = busy(*state, CKD_BUSY_BLOCK, UINT64_C(1) << 30);
    assert_int_equal(now.saved, 2);
    assert_int_equal(now.skipped + now.coalesced, 0);
    stored_check(*state, TRAINER_RUN, 4, ROWS);
}

/* ------------------------------------------------------------------------------------------------------- restore */

static void test_nothing_to_restore(void **state) {
    trainer *t = trainer_new(ROWS);
    ckd_session_options o = session_options();
    ckd_session *s = session_of(*state, &o, t);
    trainer_set(t, 9);
    ckd_checkpoint from = {.step = 77};
    ckd_error err = {0};
    assert_int_equal(ckd_session_restore(&from, s, CKD_LATEST, &err), CKD_E_NOT_FOUND);
    assert_int_equal(from.step, 0);
    trainer_check(t, 9);
    must(ckd_session_close(s, &err), &err);
    trainer_free(t);
}

static void make_run(const char *dir, uint64_t first, uint64_t last) {
    trainer *t = trainer_new(ROWS);
    ckd_session_options o = session_options();
    ckd_session *s = session_of(dir, &o, t);
    ckd_error err = {0};
    for (uint64_t step = first; step <= last; step++) {
        must(iterate(s, t, step, &err), &err);
    }
    must(ckd_session_close(s, &err), &err);
    trainer_free(t);
}

/* Whoever goes back goes on in a branch, as a delta on what he went back to. */
static void test_going_back_branches(void **state) {
    const char *dir = *state;
    make_run(dir, 1, 6);
    trainer *t = trainer_new(ROWS);
    ckd_session_options o = session_options();
    ckd_session *s = session_of(dir, &o, t);
    ckd_error err = {0};
    must(ckd_session_restore(NULL, s, 3, &err), &err);
    trainer_check(t, 3);
    for (uint64_t step = 4; step <= 8; step++) {
        must(iterate(s, t, step, &err), &err);
    }
    must(ckd_session_close(s, &err), &err);
    trainer_free(t);
    assert_int_equal(count_of(dir, TRAINER_RUN), 6);
    assert_int_equal(count_of(dir, TRAINER_RUN "~2"), 5);
    ckd_checkpoint three = checkpoint_of(dir, TRAINER_RUN, 3), four = checkpoint_of(dir, TRAINER_RUN "~2", 4),
                   five = checkpoint_of(dir, TRAINER_RUN "~2", 5);
    assert_memory_equal(&four.parent, &three.id, sizeof(three.id));
    assert_memory_equal(&four.resumed_from, &three.id, sizeof(three.id));
    assert_memory_equal(&five.parent, &four.id, sizeof(four.id));
    static const ckd_id none;
    assert_memory_equal(&five.resumed_from, &none, sizeof(none));
    stored_check(dir, TRAINER_RUN "~2", 8, ROWS);
}

/* Back again, to before the branch; and a new session finds where the training is by now, not where it once was. */
static void test_going_back_twice(void **state) {
    const char *dir = *state;
    make_run(dir, 1, 6);
    trainer *t = trainer_new(ROWS);
    ckd_session_options o = session_options();
    ckd_session *s = session_of(dir, &o, t);
    ckd_error err = {0};
    ckd_checkpoint from;
    must(ckd_session_restore(NULL, s, 3, &err), &err);
    must(iterate(s, t, 4, &err), &err);
    must(iterate(s, t, 5, &err), &err);
    must(ckd_session_restore(&from, s, 2, &err), &err);
    assert_string_equal(from.run, TRAINER_RUN);
    trainer_check(t, 2);
    must(iterate(s, t, 3, &err), &err);
    must(ckd_session_close(s, &err), &err);
    assert_int_equal(count_of(dir, TRAINER_RUN "~2"), 2);
    assert_int_equal(count_of(dir, TRAINER_RUN "~3"), 1);
    s = session_of(dir, &o, t);
    must(ckd_session_restore(&from, s, CKD_LATEST, &err), &err);
    assert_string_equal(from.run, TRAINER_RUN "~3");
    assert_int_equal(from.step, 3);
    must(iterate(s, t, 4, &err), &err);
    must(ckd_session_close(s, &err), &err);
    trainer_free(t);
    stored_check(dir, TRAINER_RUN "~3", 4, ROWS);
}

/* The first save after going back lies beyond the steps that were given up: they are no part of what it goes on from. */
static void test_beyond_what_was_given_up(void **state) {
    const char *dir = *state;
    make_run(dir, 1, 6);
    trainer *t = trainer_new(ROWS);
    ckd_session_options o = session_options();
    o.every_steps = 10;
    ckd_session *s = session_of(dir, &o, t);
    ckd_error err = {0};
    must(ckd_session_restore(NULL, s, 3, &err), &err);
    for (uint64_t step = 4; step <= 20; step++) {
        must(iterate(s, t, step, &err), &err);
    }
    must(ckd_session_restore(NULL, s, 3, &err), &err);
    must(iterate(s, t, 29, &err), &err);
    must(iterate(s, t, 30, &err), &err);
    must(ckd_session_close(s, &err), &err);
    trainer_free(t);
    assert_int_equal(count_of(dir, TRAINER_RUN), 6);
    assert_int_equal(count_of(dir, TRAINER_RUN "~2"), 2);
    assert_int_equal(count_of(dir, TRAINER_RUN "~3"), 1);
    ckd_checkpoint three = checkpoint_of(dir, TRAINER_RUN, 3), ten = checkpoint_of(dir, TRAINER_RUN "~2", 10),
                   thirty = checkpoint_of(dir, TRAINER_RUN "~3", 30);
    assert_memory_equal(&ten.parent, &three.id, sizeof(three.id));
    assert_memory_equal(&thirty.parent, &three.id, sizeof(three.id));
    stored_check(dir, TRAINER_RUN "~3", 30, ROWS);
}

/* A training that begins anew under the name of one that there is: said, and nothing is mixed; branches are for who asks. */
static void test_a_fresh_start_is_told(void **state) {
    const char *dir = *state;
    make_run(dir, 4, 6);
    for (int branches = 0; branches < 2; branches++) {
        trainer *t = trainer_new(ROWS);
        ckd_session_options o = session_options();
        ckd_save_options save = *o.save;
        save.on_duplicate = branches ? CKD_DUPLICATE_BRANCH : CKD_DUPLICATE_ERROR;
        o.save = &save;
        ckd_session *s = session_of(dir, &o, t);
        ckd_error err = {0};
        ckd_status status = iterate_and_wait(s, t, 1, &err); /* no step of the other one's */
        assert_int_equal(status, branches ? CKD_OK : CKD_E_EXISTS);
        if (!branches) {
            assert_non_null(strstr(err.message, "up to step 6"));
            must(iterate_and_wait(s, t, 7, &err), &err); /* where that one ended: restored by other means */
        }
        must(ckd_session_close(s, &err), &err);
        trainer_free(t);
    }
    assert_int_equal(count_of(dir, TRAINER_RUN), 4);
    assert_int_equal(count_of(dir, TRAINER_RUN "~2"), 1);
}

/* A child of the trainer's, a data loader say, has nothing of the snapshot. */
static void test_children_have_no_snapshot(void **state) {
    trainer *t = trainer_new(ROWS);
    ckd_session_options o = session_options();
    ckd_session *s = session_of(*state, &o, t);
    ckd_error err = {0};
    must(iterate(s, t, 1, &err), &err);
    must(ckd_session_wait(s, CKD_DURABLE, &err), &err);
    int ends[2];
    assert_int_equal(pipe(ends), 0);
    const void *memory = s->slots[0].snapshot->memory;
    assert_int_equal(write(ends[1], memory, 1), 1);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        bool gone = write(ends[1], memory, 1) < 0 && errno == EFAULT;
        bool refused = ckd_session_close(s, NULL) == CKD_E_STATE;
        _exit(gone && refused ? 0 : 1);
    }
    int how;
    assert_int_equal(waitpid(child, &how, 0), child);
    assert_true(WIFEXITED(how) && WEXITSTATUS(how) == 0);
    close(ends[0]);
    close(ends[1]);
    must(iterate(s, t, 2, &err), &err);
    must(ckd_session_close(s, &err), &err);
    trainer_free(t);
    stored_check(*state, TRAINER_RUN, 2, ROWS);
}

/* Two of a name would make every save fail. */
static void test_a_name_is_registered_once(void **state) {
    trainer *t = trainer_new(ROWS);
    ckd_session_options o = session_options();
    ckd_session *s = session_of(*state, &o, t);
    ckd_error err = {0};
    static float values[64];
    uint64_t shape[] = {64};
    ckd_tensor tensor = CKD_TENSOR_INIT;
    tensor.name = "halves";
    tensor.dtype = CKD_F32;
    tensor.ndim = 1;
    tensor.shape = shape;
    tensor.region = (ckd_region){.kind = CKD_REGION_FLAT, .start = 0, .count = 32};
    must(ckd_session_add(s, &tensor, values, 0, &err), &err);
    tensor.region.start = 32;
    must(ckd_session_add(s, &tensor, values + 32, 0, &err), &err); /* another part of it */
    tensor.region.start = 16;
    assert_int_equal(ckd_session_add(s, &tensor, values + 16, 0, &err), CKD_E_INVALID);
    assert_string_equal(err.tensor, "halves");
    tensor.dtype = CKD_I32;
    tensor.region.start = 0;
    assert_int_equal(ckd_session_add(s, &tensor, values, 0, NULL), CKD_E_INVALID);
    must(ckd_session_add_bytes(s, "halves", values, 8, &err), &err); /* bytes have names of their own */
    assert_int_equal(ckd_session_add_bytes(s, "halves", values, 8, NULL), CKD_E_INVALID);
    for (int i = 0; i < 300; i++) {
        char name[16];
        snprintf(name, sizeof(name), "b%d", i);
        must(ckd_session_add_bytes(s, name, values, 8, &err), &err);
        assert_int_equal(ckd_session_add_bytes(s, name, values, 8, NULL), CKD_E_INVALID);
    }
    must(iterate_and_wait(s, t, 1, &err), &err);
    must(ckd_session_close(s, &err), &err);
    trainer_free(t);
}

/* What was resumed from may be deleted before the first save: that one fails, the next one goes on without it. */
static void test_the_parent_is_deleted(void **state) {
    const char *dir = *state;
    make_run(dir, 1, 3);
    trainer *t = trainer_new(ROWS);
    ckd_session_options o = session_options();
    ckd_session *s = session_of(dir, &o, t);
    ckd_error err = {0};
    must(ckd_session_restore(NULL, s, 3, &err), &err);
    ckd_store *store = store_reopen(dir, CKD_OPEN_WRITE);
    ckd_id id = checkpoint_of(dir, TRAINER_RUN, 3).id;
    must(ckd_store_delete(store, &id, 1, NULL, &err), &err);
    ckd_store_close(store);
    assert_int_equal(iterate_and_wait(s, t, 4, &err), CKD_E_NOT_FOUND);
    assert_non_null(strstr(err.message, "the save of step 4"));
    must(iterate(s, t, 5, &err), &err);
    must(ckd_session_close(s, &err), &err);
    trainer_free(t);
    stored_check(dir, TRAINER_RUN, 5, ROWS);
}

/* A forward pass draws random numbers: what is registered as bytes is that of the step all the same. */
static void test_bytes_are_copied_at_once(void **state) {
    const char *dir = *state;
    trainer *t = trainer_new(20000);
    ckd_session_options o = session_options();
    o.snapshot = CKD_SNAPSHOT_LAZY;
    ckd_session *s = session_of(dir, &o, t);
    ckd_error err = {0};
    for (uint64_t step = 1; step <= 5; step++) {
        memset(t->loader, 0xee, sizeof(t->loader)); /* before the fence */
        must(iterate(s, t, step, &err), &err);
    }
    must(ckd_session_close(s, &err), &err);
    trainer_free(t);
    for (uint64_t step = 1; step <= 5; step++) {
        stored_check(dir, TRAINER_RUN, step, 20000);
    }
}

static void test_the_newest_is_gone_on_from(void **state) {
    const char *dir = *state;
    make_run(dir, 1, 3);
    trainer *t = trainer_new(ROWS);
    ckd_session_options o = session_options();
    ckd_session *s = session_of(dir, &o, t);
    ckd_error err = {0};
    ckd_checkpoint from;
    must(ckd_session_restore(&from, s, CKD_LATEST, &err), &err);
    assert_int_equal(from.step, 3);
    must(iterate(s, t, 4, &err), &err);
    must(ckd_session_close(s, &err), &err);
    trainer_free(t);
    assert_int_equal(count_of(dir, TRAINER_RUN), 4);
    ckd_checkpoint four = checkpoint_of(dir, TRAINER_RUN, 4);
    assert_memory_equal(&four.resumed_from, &from.id, sizeof(from.id));
}

/* What does not fit is found before anything of the trainer's is touched. */
static void test_what_does_not_fit_changes_nothing(void **state) {
    const char *dir = *state;
    make_run(dir, 1, 1);
    ckd_session_options o = session_options();
    ckd_error err = {0};
    for (int kind = 0; kind < 3; kind++) {
        trainer *t = trainer_new(kind == 0 ? ROWS + 1 : ROWS);
        trainer_set(t, 5);
        ckd_session *s = session_of(dir, &o, t);
        float more[4] = {1, 2, 3, 4};
        ckd_tensor tensor = CKD_TENSOR_INIT;
        tensor.name = "more";
        tensor.dtype = CKD_F32;
        tensor.ndim = 1;
        tensor.shape = (uint64_t[]){4};
        if (kind == 1) {
            must(ckd_session_add(s, &tensor, more, 0, &err), &err);
        } else if (kind == 2) {
            must(ckd_session_add_bytes(s, "more", more, sizeof(more), &err), &err);
        }
        assert_int_equal(ckd_session_restore(NULL, s, CKD_LATEST, &err), CKD_E_MISMATCH);
        trainer_check(t, 5);
        must(ckd_session_close(s, &err), &err);
        trainer_free(t);
    }
}

/* ------------------------------------------------------------------------------------------------------- the rest */

static void test_an_optimizer_step_is_coded_as_one(void **state) {
    const char *dir = *state;
    enum { COUNT = 4096 };
    static float w[COUNT], m[COUNT], v[COUNT];
    static const uint64_t shape[] = {COUNT};
    ckd_optimizer adamw = CKD_OPTIMIZER_INIT;
    adamw.kind = CKD_ADAMW;
    adamw.lr = 1e-3;
    adamw.beta1 = 0.9;
    adamw.beta2 = 0.95;
    adamw.eps = 1e-8;
    ckd_session_options o = session_options();
    ckd_session *s;
    ckd_error err = {0};
    must(ckd_session_open(&s, store_path_of(dir, ""), &o, &err), &err);
    static const char *const names[] = {"exp_avg.w", "exp_avg_sq.w", "w"};
    float *const data[] = {m, v, w};
    for (int i = 0; i < 3; i++) {
        ckd_tensor tensor = CKD_TENSOR_INIT;
        tensor.name = names[i];
        tensor.dtype = CKD_F32;
        tensor.ndim = 1;
        tensor.shape = shape;
        tensor.optimizer = &adamw;
        must(ckd_session_add(s, &tensor, data[i], 0, &err), &err);
    }
    for (uint64_t step = 1; step <= 4; step++) {
        adamw.step = step;
        for (int i = 0; i < COUNT; i++) {
            double g = (double)((i * 7919 + (int)step * 104729) % 2003) / 2003 - 0.5;
            double m1 = 0.9 * (double)m[i] + 0.1 * g, v1 = 0.95 * (double)v[i] + 0.05 * g * g;
            m[i] = (float)m1;
            v[i] = (float)v1;
            double c1 = 1 - __builtin_pow(0.9, (double)step), c2 = 1 - __builtin_pow(0.95, (double)step);
            w[i] -= (float)(1e-3 * (m1 / c1) / (__builtin_sqrt(v1 / c2) + 1e-8));
        }
        must(ckd_session_step(s, step, &err), &err);
    }
    must(ckd_session_close(s, &err), &err);
    ckd_checkpoint last = checkpoint_of(dir, TRAINER_RUN, 4);
    ckd_store *store = store_reopen(dir, CKD_OPEN_READ);
    ckd_tensor_list *tensors;
    assert_int_equal(ckd_store_tensors(&tensors, store, &last.id, NULL), CKD_OK);
    assert_int_equal(tensors->count, 3);
    assert_string_equal(tensors->items[2].name, "w");
    assert_string_equal(tensors->items[2].coding, "step");
    ckd_tensor_list_free(tensors);
    ckd_store_close(store);
}

static void count_damage(void *context, const char *message) {
    *(int *)context += strstr(message, "damage") != NULL;
}

/* Flips a bit in the middle of the only chunk file. */
static void damage_chunk(const char *dir) {
    dir_list files;
    assert_int_equal(dir_list_read(&files, store_path_of(dir, "data/c"), NULL), CKD_OK);
    assert_int_equal(files.count, 1);
    char path[4096];
    snprintf(path, sizeof(path), "%s/%s", store_path_of(dir, "data/c"), files.names[0]);
    dir_list_free(&files);
    size_t size;
    unsigned char *content = read_whole_file(path, &size);
    content[size / 2] ^= 4;
    write_whole_file(path, content, size);
    free(content);
}

/* Two saves of a matrix that moves a little; the first one's file is damaged in between. Was the second one a delta on it? */
static bool second_is_a_delta(const char *dir, const char *run, int snapshots, int *told) {
    enum { COUNT = 250000 }; /* one block */
    float *w = random_values(CKD_F32, COUNT, 5);
    ckd_session_options o = session_options();
    ckd_save_options save = *o.save;
    ckd_store_options store = *o.store;
    save.run = run;
    store.on_message = count_damage;
    store.message_context = told;
    o.save = &save;
    o.store = &store;
    o.snapshot_bytes = (uint64_t)snapshots * (COUNT * sizeof(float) + 64);
    ckd_session *s;
    ckd_error err = {0};
    must(ckd_session_open(&s, store_path_of(dir, ""), &o, &err), &err);
    ckd_tensor tensor = CKD_TENSOR_INIT;
    tensor.name = "w";
    tensor.dtype = CKD_F32;
    tensor.ndim = 2;
    tensor.shape = (uint64_t[]){COUNT / 100, 100};
    must(ckd_session_add(s, &tensor, w, 0, &err), &err);
    must(ckd_session_step(s, 1, &err), &err);
    must(ckd_session_wait(s, CKD_DURABLE, &err), &err);
    damage_chunk(dir);
    change_values(CKD_F32, w, COUNT, 6);
    must(ckd_session_step(s, 2, &err), &err);
    must(ckd_session_wait(s, CKD_DURABLE, &err), &err);
    must(ckd_session_close(s, &err), &err);
    bool delta = checkpoint_of(dir, run, 2).kind == CKD_DELTA;
    free(w);
    return delta;
}

/* With room for a second snapshot, an exact save is coded against the last one, and does not read it. */
static void test_the_reference_is_in_memory(void **state) {
    int told = 0;
    assert_true(second_is_a_delta(*state, "kept", 2, &told));
    assert_int_equal(told, 0);
}

static void test_else_it_is_read(void **state) {
    int told = 0;
    assert_false(second_is_a_delta(*state, "read", 1, &told));
    assert_int_equal(told, 1);
}

static void test_requests(void **state) {
    trainer *t = trainer_new(ROWS);
    ckd_session_options o = session_options();
    o.every_steps = 1000;
    ckd_session *s = session_of(*state, &o, t);
    ckd_error err = {0};
    ckd_session_state now;
    must(iterate(s, t, 1, &err), &err);
    ckd_session_request(s, CKD_REQUEST_SAVE);
    must(iterate(s, t, 2, &err), &err);
    ckd_session_poll(&now, s);
    assert_int_equal(now.staged_step, 2);
    assert_int_equal(now.stop_asked, 0);
    must(iterate(s, t, 3, &err), &err);
    ckd_session_request(s, CKD_REQUEST_STOP);
    ckd_session_poll(&now, s);
    assert_int_equal(now.staged_step, 2);
    assert_true(now.stop_asked);
    must(iterate(s, t, 4, &err), &err);
    trainer_set(t, 5);
    must(ckd_session_save(s, 5, &err), &err);
    must(ckd_session_wait(s, CKD_DURABLE, &err), &err);
    ckd_session_poll(&now, s);
    assert_true(now.stop_asked);
    assert_int_equal(now.saved, 3);
    must(ckd_session_close(s, &err), &err);
    trainer_free(t);
    stored_check(*state, TRAINER_RUN, 5, ROWS);
}

static uint64_t saved_by(ckd_session *s, unsigned ms) {
    ckd_session_state now = {.saved = 0};
    for (unsigned waited = 0; waited < ms && now.saved == 0; waited++) {
        usleep(1000);
        ckd_session_poll(&now, s);
    }
    return now.saved;
}

/* Saves pause while training is busy: until it is not, until somebody waits, or until they have paused long enough. */
static void test_phases(void **state) {
    for (int how = 0; how < 3; how++) {
        trainer *t = trainer_new(ROWS);
        ckd_session_options o = session_options();
        ckd_save_options save = *o.save;
        static const char *const runs[] = {"idle", "waited-for", "alone"};
        save.run = runs[how];
        o.save = &save;
        ckd_session *s = session_of(*state, &o, t);
        ckd_error err = {0};
        ckd_session_phase(s, CKD_PHASE_BUSY);
        must(iterate(s, t, 1, &err), &err);
        assert_int_equal(saved_by(s, 200), 0); /* of a second that it may pause */
        if (how == 0) {
            ckd_session_phase(s, CKD_PHASE_IDLE);
        } else if (how == 1) {
            must(ckd_session_wait(s, CKD_DURABLE, &err), &err);
        }
        assert_int_equal(saved_by(s, 20000), 1);
        must(ckd_session_close(s, &err), &err);
        trainer_free(t);
        stored_check(*state, runs[how], 1, ROWS);
    }
}

static void test_bad_input(void **state) {
    const char *dir = *state;
    ckd_session *s;
    ckd_error err = {0};
    ckd_session_options good = session_options(), o = good;
    o.save = NULL;
    assert_int_equal(ckd_session_open(&s, dir, &o, &err), CKD_E_INVALID);
    ckd_save_options bad = *good.save;
    bad.effort = 44;
    o = good;
    o.save = &bad;
    assert_int_equal(ckd_session_open(&s, dir, &o, &err), CKD_E_INVALID);
    bad = *good.save;
    bad.run = "a/b";
    assert_int_equal(ckd_session_open(&s, dir, &o, &err), CKD_E_INVALID);
    o = good;
    o.overhead = -1;
    assert_int_equal(ckd_session_open(&s, dir, &o, &err), CKD_E_INVALID);
    assert_non_null(strstr(err.message, "overhead"));
    o = good;
    o.every_s = __builtin_nan("");
    assert_int_equal(ckd_session_open(&s, dir, &o, &err), CKD_E_INVALID);
    o = good;
    o.nice = 40;
    assert_int_equal(ckd_session_open(&s, dir, &o, &err), CKD_E_INVALID);
    ckd_ranks_options ranks = CKD_RANKS_OPTIONS_INIT;
    o = good;
    o.ranks = &ranks;
    o.overhead = 0.03;
    assert_int_equal(ckd_session_open(&s, dir, &o, &err), CKD_E_INVALID);
    assert_int_equal(ckd_session_open(&s, "/proc/nowhere", &good, &err) != CKD_OK, 1);
    assert_null(s);

    trainer *t = trainer_new(ROWS);
    o = good;
    o.snapshot_bytes = 1000;
    s = session_of(dir, &o, t);
    assert_int_equal(ckd_session_step(s, 1, &err), CKD_E_INVALID);
    assert_non_null(strstr(err.message, "snapshot_bytes"));
    must(ckd_session_close(s, &err), &err);

    s = session_of(dir, &good, t);
    ckd_tensor tensor = CKD_TENSOR_INIT;
    tensor.name = "x";
    assert_int_equal(ckd_session_add(s, &tensor, t->layers[0], 0, &err), CKD_E_INVALID); /* no dtype */
    tensor.dtype = CKD_F32;
    assert_int_equal(ckd_session_add(s, &tensor, NULL, 0, &err), CKD_E_INVALID);
    assert_string_equal(err.tensor, "x");
    assert_int_equal(ckd_session_add_bytes(s, "", t->loader, 1, &err), CKD_E_INVALID);
    must(iterate(s, t, 5, &err), &err);
    assert_int_equal(ckd_session_add(s, &tensor, t->layers[0], 0, &err), CKD_E_STATE);
    assert_int_equal(ckd_session_step(s, 5, &err), CKD_E_INVALID);
    assert_int_equal(ckd_session_wait(s, (ckd_wait)9, &err), CKD_E_INVALID);
    pid_t child = fork();
    if (child == 0) {
        ckd_status status = ckd_session_step(s, 6, NULL);
        ckd_session_fence(s);
        _exit(status == CKD_E_STATE && ckd_session_close(s, NULL) == CKD_E_STATE ? 0 : 1);
    }
    int how;
    assert_int_equal(waitpid(child, &how, 0), child);
    assert_int_equal(how, 0);
    must(iterate(s, t, 6, &err), &err);
    must(ckd_session_close(s, &err), &err);
    must(ckd_session_close(NULL, &err), &err);
    trainer_free(t);
    stored_check(dir, TRAINER_RUN, 6, ROWS);
}

/* Two ranks, as threads: each has half of a matrix, and both have the counter. */
typedef struct member {
    const char *dir;
    uint32_t rank;
    ckd_status status;
    ckd_error err;
    pthread_t thread;
} member;

static ckd_status train_member(member *me) {
    enum { HALF = 32, WIDE = 16 };
    float mine[HALF * WIDE];
    int64_t counter = 0;
    char seed[] = "seed";
    ckd_ranks_options ranks = CKD_RANKS_OPTIONS_INIT;
    ranks.rank = me->rank;
    ranks.world = 2;
    ranks.timeout_ms = 20000;
    ckd_save_options save = CKD_SAVE_OPTIONS_INIT;
    save.run = TRAINER_RUN;
    ckd_session_options o = CKD_SESSION_OPTIONS_INIT;
    o.save = &save;
    o.ranks = &ranks;
    o.every_steps = 2;
    char path[4096];
    snprintf(path, sizeof(path), "%s/store", me->dir);
    ckd_session *s;
    ckd_status status = ckd_session_open(&s, path, &o, &me->err);
    if (status != CKD_OK) {
        return status;
    }
    ckd_tensor matrix = CKD_TENSOR_INIT;
    matrix.name = "matrix";
    matrix.dtype = CKD_F32;
    matrix.ndim = 2;
    matrix.shape = (uint64_t[]){2 * HALF, WIDE};
    matrix.region =
        (ckd_region){.kind = CKD_REGION_BOX, .offsets = {HALF * me->rank, 0}, .lengths = {HALF, WIDE}};
    ckd_tensor step_of = CKD_TENSOR_INIT;
    step_of.name = "step";
    step_of.dtype = CKD_I64;
    status = ckd_session_add(s, &matrix, mine, 0, &me->err);
    status = status == CKD_OK ? ckd_session_add(s, &step_of, &counter, 0, &me->err) : status;
    status = status == CKD_OK ? ckd_session_add_bytes(s, "seed", seed, sizeof(seed), &me->err) : status;
    for (uint64_t step = 1; step <= 6 && status == CKD_OK; step++) {
        for (int i = 0; i < HALF * WIDE; i++) {
            mine[i] = (float)(1000 * me->rank + 10 * step);
        }
        counter = (int64_t)step;
        status = ckd_session_step(s, step, &me->err);
    }
    status = status == CKD_OK ? ckd_session_wait(s, CKD_DURABLE, &me->err) : status;
    memset(mine, 0xee, sizeof(mine));
    counter = 0;
    status = status == CKD_OK ? ckd_session_restore(NULL, s, 4, &me->err) : status;
    if (status == CKD_OK && (counter != 4 || mine[7] != (float)(1000 * me->rank + 40))) {
        status = CKD_E_CORRUPT;
    }
    ckd_status closed = ckd_session_close(s, status == CKD_OK ? &me->err : NULL);
    return status == CKD_OK ? closed : status;
}

static void *member_main(void *context) {
    member *me = context;
    me->status = train_member(me);
    return NULL;
}

static void test_ranks_save_together(void **state) {
    member members[2];
    ckd_store_close(store_create(*state));
    for (uint32_t i = 0; i < 2; i++) {
        members[i] = (member){.dir = *state, .rank = i};
        assert_int_equal(pthread_create(&members[i].thread, NULL, member_main, &members[i]), 0);
    }
    for (uint32_t i = 0; i < 2; i++) {
        pthread_join(members[i].thread, NULL);
        must(members[i].status, &members[i].err);
    }
    assert_int_equal(count_of(*state, TRAINER_RUN), 3);
    assert_int_equal(checkpoint_of(*state, TRAINER_RUN, 6).world, 2);
    ckd_store *store = store_reopen(*state, CKD_OPEN_READ);
    assert_int_equal(verify_damage(store), 0);
    ckd_store_close(store);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        tempdir_test(test_copies),
        tempdir_test(test_lazy),
        tempdir_test(test_two_snapshots),
        tempdir_test(test_what_is_stored_is_the_snapshot),
        tempdir_test(test_what_several_threads_store_is_the_snapshot),
        tempdir_test(test_what_is_stored_is_the_copy),
        tempdir_test(test_fences_of_groups),
        tempdir_test(test_saves_begin_before_the_fence),
        tempdir_test(test_a_forgotten_fence_is_told),
        tempdir_test(test_training_allocates_nothing),
        tempdir_test(test_no_memory),
        tempdir_test(test_errors_are_told_and_the_next_save_works),
        tempdir_test(test_what_finds_no_room_is_skipped),
        tempdir_test(test_what_finds_no_room_comes_later),
        tempdir_test(test_a_second_snapshot_is_room),
        tempdir_test(test_nothing_to_restore),
        tempdir_test(test_going_back_branches),
        tempdir_test(test_going_back_twice),
        tempdir_test(test_beyond_what_was_given_up),
        tempdir_test(test_a_fresh_start_is_told),
        tempdir_test(test_children_have_no_snapshot),
        tempdir_test(test_a_name_is_registered_once),
        tempdir_test(test_the_parent_is_deleted),
        tempdir_test(test_bytes_are_copied_at_once),
        tempdir_test(test_the_newest_is_gone_on_from),
        tempdir_test(test_what_does_not_fit_changes_nothing),
        tempdir_test(test_an_optimizer_step_is_coded_as_one),
        tempdir_test(test_the_reference_is_in_memory),
        tempdir_test(test_else_it_is_read),
        tempdir_test(test_requests),
        tempdir_test(test_phases),
        tempdir_test(test_bad_input),
        tempdir_test(test_ranks_save_together),
    };
    scratch_begin();
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    scratch_end();
    return failed;
}
