/*
 * Sessions: a save during training stores the state of one step, errors are reported, and a save that finds no free
 * snapshot is handled as configured.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <errno.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <unistd.h>

#include "base/file.h"
#include "engine/session/session.h"
#include "tests/support/checkpoints.h"
#include "tests/support/level.h"
#include "tests/support/scenes.h"
#include "tests/support/scratch.h"
#include "tests/support/tempdir.h"
#include "tests/support/trainers.h"

#define ROWS 300

/* The linker redirects the library's allocations to these functions, which count those of this thread. */
/* fail_at: number of the allocation that fails, from 1; 0: none. */
static _Thread_local unsigned long allocations, fail_at;
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

/* ---- saving ---- */

/* The times of the newest save: how long training stalled, and when the copy of the state was complete. */
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
    assert_int_equal(t->stage_count - at, 6); /* no stage of waiting for other ranks */
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
 * The optimizer overwrites the state as soon as the fence returns, save after save. Afterwards all checkpoints are
 * checked. CKD_SAVES=10000 makes this a campaign (README.md).
 */
static void isolate(const char *dir, ckd_snapshot how, uint32_t threads) {
    const char *asked = getenv("CKD_SAVES");
    uint64_t saves = asked               ? strtoull(asked, NULL, 10)
                     : under_sanitizer() ? 20
                                         : test_pick(20, 60, 60),
             rows = 20000; /* five layers of 5 MB, each several slices */
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

static void test_lazy_snapshots_are_isolated(void **state) {
    isolate(*state, CKD_SNAPSHOT_LAZY, 1);
}

static void test_lazy_snapshots_are_isolated_from_several_threads(void **state) {
    isolate(*state, CKD_SNAPSHOT_LAZY, 3);
}

static void test_copies_are_isolated(void **state) {
    isolate(*state, CKD_SNAPSHOT_COPY, 1);
}

/* A layer-wise optimizer waits only for the fence of its layer. The last layer is frozen and has no fence. */
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

static int note_files(void *context, file_op step, const char *path) {
    if (step == FILE_OP_CREATE && strstr(path, "/data/c/")) {
        atomic_store((atomic_bool *)context, true);
    }
    return 0;
}

/* A save begins as soon as its snapshot has begun, before the fence. */
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

/* Without a fence it is unknown which step a lazy snapshot contains, so it must not become a checkpoint. */
static void test_missing_fences_are_reported(void **state) {
    const char *dir = *state;
    trainer *t = trainer_new(ROWS);
    ckd_session_options o = session_options();
    o.snapshot = CKD_SNAPSHOT_LAZY;
    ckd_session *s = session_of(dir, &o, t);
    ckd_error err = {0};
    trainer_set(t, 1); /* the state does not change, but it could have */
    must(ckd_session_step(s, 1, &err), &err);
    ckd_status reported = ckd_session_step(s, 2, &err);
    if (reported == CKD_OK) {
        reported = ckd_session_wait(s, CKD_DURABLE, &err);
    }
    assert_int_equal(reported, CKD_E_STATE);
    assert_non_null(strstr(err.message, "ckd_session_fence"));
    must(iterate(s, t, 3, &err), &err);
    must(ckd_session_close(s, &err), &err); /* closing acts as a fence */
    trainer_free(t);
    assert_int_equal(count_of(dir, TRAINER_RUN), 2); /* steps 2 and 3 are both valid */
    stored_check(dir, TRAINER_RUN, 3, ROWS);
}

/* The caller has seen a write that was not the optimizer's. After the fence it is too late, and the save is whole. */
static void test_a_snapshot_that_is_discarded(void **state) {
    const char *dir = *state;
    trainer *t = trainer_new(ROWS);
    ckd_session_options o = session_options();
    o.snapshot = CKD_SNAPSHOT_LAZY;
    ckd_session *s = session_of(dir, &o, t);
    ckd_error err = {0};
    trainer_set(t, 1);
    must(ckd_session_step(s, 1, &err), &err);
    ckd_session_discard(s);
    ckd_session_fence(s);
    assert_int_equal(ckd_session_wait(s, CKD_DURABLE, &err), CKD_E_STATE);
    assert_non_null(strstr(err.message, "ckd_session_fence"));
    assert_int_equal(count_of(dir, TRAINER_RUN), 0);
    trainer_set(t, 2);
    must(ckd_session_step(s, 2, &err), &err);
    ckd_session_fence(s);
    ckd_session_discard(s);
    must(ckd_session_close(s, &err), &err);
    ckd_session_discard(NULL);
    trainer_free(t);
    assert_int_equal(count_of(dir, TRAINER_RUN), 1);
    stored_check(dir, TRAINER_RUN, 2, ROWS);
}

/* The first step allocates all memory. Later steps allocate nothing on the trainer's thread. */
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
        assert_true(allocations > before); /* proves that they are counted */
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

/* A failing allocation for the session, its tensors or its snapshots is an error, and nothing is lost. */
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
            if (status == CKD_E_NOMEM) { /* the same step works once memory is available */
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
/* ---- failures, and saves that find no free snapshot ---- */

static atomic_int failing;
static int fail_writes(void *context, file_op step, const char *path) {
    (void)context;
    return step == FILE_OP_WRITE && strstr(path, "/data/c/") && atomic_load(&failing) ? ENOSPC : 0;
}

static unsigned reported_good, reported_bad;
static void count_saved(void *context, const ckd_saved *saved) {
    assert_ptr_equal(context, &failing);
    reported_good += saved->status == CKD_OK;
    reported_bad += saved->status == CKD_E_NOSPACE;
}

/* A failed save is reported once, training continues, and the next save works. */
static void test_errors_are_reported_and_the_next_save_works(void **state) {
    const char *dir = *state;
    trainer *t = trainer_new(ROWS);
    ckd_session_options o = session_options();
    o.on_saved = count_saved;
    o.saved_context = &failing;
    reported_good = reported_bad = 0;
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
    must(iterate(s, t, 3, &err), &err); /* the error is reported once */
    must(ckd_session_wait(s, CKD_DURABLE, &err), &err);
    file_set_fault_hook(NULL, NULL);
    ckd_session_state now;
    ckd_session_poll(&now, s);
    assert_int_equal(now.saved, 2);
    assert_int_equal(now.failed, 1);
    must(ckd_session_close(s, &err), &err);
    trainer_free(t);
    assert_int_equal(reported_good, 2);
    assert_int_equal(reported_bad, 1);
    assert_int_equal(count_of(dir, TRAINER_RUN), 2);
    stored_check(dir, TRAINER_RUN, 3, ROWS);
    ckd_store *store = store_reopen(dir, CKD_OPEN_WRITE);
    ckd_store_close(store);
    store_check_clean(dir);
}

/* Holds a save until let_go is posted. */
static sem_t held, let_go;
static void hold(void *context, const ckd_saved *saved) {
    (void)context;
    assert_int_equal(saved->status, CKD_OK);
    sem_post(&held);
    sem_wait(&let_go);
}

/* Keeps the save of the first step in progress until step 5. */
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

static void test_busy_skip(void **state) {
    ckd_session_state now = busy(*state, CKD_BUSY_SKIP, 0);
    assert_int_equal(now.skipped, 1); /* step 4 */
    assert_int_equal(now.saved, 1);
    assert_int_equal(count_of(*state, TRAINER_RUN), 1);
}

static void test_busy_coalesce(void **state) {
    ckd_session_state now = busy(*state, CKD_BUSY_COALESCE, 0);
    assert_true(now.coalesced >= 1); /* step 4; and step 5, which also finds no snapshot */
    assert_int_equal(now.saved, 2);
    stored_check(*state, TRAINER_RUN, 7, ROWS);
}

/* While the first save is in progress, the second one uses the second snapshot and does not wait. */
static void test_busy_block_with_two_snapshots(void **state) {
    ckd_session_state now = busy(*state, CKD_BUSY_BLOCK, UINT64_C(1) << 30);
    assert_int_equal(now.saved, 2);
    assert_int_equal(now.skipped + now.coalesced, 0);
    stored_check(*state, TRAINER_RUN, 4, ROWS);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        tempdir_test(test_copies),
        tempdir_test(test_lazy),
        tempdir_test(test_two_snapshots),
        tempdir_test(test_lazy_snapshots_are_isolated),
        tempdir_test(test_lazy_snapshots_are_isolated_from_several_threads),
        tempdir_test(test_copies_are_isolated),
        tempdir_test(test_fences_of_groups),
        tempdir_test(test_saves_begin_before_the_fence),
        tempdir_test(test_missing_fences_are_reported),
        tempdir_test(test_a_snapshot_that_is_discarded),
        tempdir_test(test_training_allocates_nothing),
        tempdir_test(test_no_memory),
        tempdir_test(test_errors_are_reported_and_the_next_save_works),
        tempdir_test(test_busy_skip),
        tempdir_test(test_busy_coalesce),
        tempdir_test(test_busy_block_with_two_snapshots),
    };
    scratch_begin();
    int failed = cmocka_run_group_tests_name("session", tests, NULL, NULL);
    scratch_end();
    return failed;
}
