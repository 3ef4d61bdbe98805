/* Sessions: what a save is coded against, when it is made, what is refused, and ranks. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include "engine/session/session.h"
#include "tests/support/checkpoints.h"
#include "tests/support/scenes.h"
#include "tests/support/scratch.h"
#include "tests/support/tempdir.h"
#include "tests/support/trainers.h"

#define ROWS 300

static void test_optimizer_steps_are_recognised(void **state) {
    const char *dir = *state;
    enum { COUNT = 32768 };
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
    assert_string_equal(tensors->items[2].method, "step");
    ckd_tensor_list_free(tensors);
    ckd_store_close(store);
}

static void count_damage(void *context, const char *message) {
    *(int *)context += strstr(message, "damage") != NULL;
}

static void find_only_chunk(char path[4096], const char *dir) {
    dir_list files;
    assert_int_equal(dir_list_read(&files, store_path_of(dir, "data/c"), NULL), CKD_OK);
    assert_int_equal(files.count, 1);
    snprintf(path, 4096, "%s/%s", store_path_of(dir, "data/c"), files.names[0]);
    dir_list_free(&files);
}

/* Flips a bit in the middle of a chunk file. */
static void damage_chunk(const char *path) {
    size_t size;
    unsigned char *content = read_whole_file(path, &size);
    content[size / 2] ^= 4;
    write_whole_file(path, content, size);
    free(content);
}

/*
 * Saves a matrix again and again, with small changes, and damages the first file before the last save. Returns whether
 * that one is a delta.
 */
static bool last_is_a_delta(const char *dir, const char *run, uint64_t saves, int snapshots,
                            int *damage_messages) {
    enum { COUNT = 250000 }; /* one block */
    float *w = random_values(CKD_F32, COUNT, 5);
    ckd_session_options o = session_options();
    ckd_save_options save = *o.save;
    ckd_store_options store = *o.store;
    save.run = run;
    store.on_message = count_damage;
    store.message_context = damage_messages;
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
    char first[4096];
    for (uint64_t step = 1; step <= saves; step++) {
        if (step == saves) {
            damage_chunk(first);
        }
        must(ckd_session_step(s, step, &err), &err);
        must(ckd_session_wait(s, CKD_DURABLE, &err), &err);
        if (step == 1) {
            find_only_chunk(first, dir);
        }
        change_values(CKD_F32, w, COUNT, 5 + (unsigned)step);
    }
    must(ckd_session_close(s, &err), &err);
    bool delta = checkpoint_of(dir, run, saves).kind == CKD_DELTA;
    free(w);
    return delta;
}

/* With memory for a second snapshot, an exact save is coded against the last one without reading it again. */
static void test_references_in_memory(void **state) {
    int damage_messages = 0;
    assert_true(last_is_a_delta(*state, "kept", 3, 2, &damage_messages));
    assert_int_equal(damage_messages, 0);
}

/* It is read once, as nobody else could decode a delta on it. */
static void test_references_in_memory_of_what_is_damaged(void **state) {
    int damage_messages = 0;
    assert_false(last_is_a_delta(*state, "kept", 2, 2, &damage_messages));
    assert_int_equal(damage_messages, 1);
}

static void test_references_that_are_read(void **state) {
    int damage_messages = 0;
    assert_false(last_is_a_delta(*state, "read", 3, 1, &damage_messages));
    assert_int_equal(damage_messages, 1);
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

/*
 * Saves pause while training is busy: until it is idle, until a caller waits for them, or until they have paused long
 * enough.
 */
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
        assert_int_equal(saved_by(s, 200), 0); /* it may pause for a second */
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

/* Two ranks, which are threads. Each has half of a matrix, and both have the counter. */
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
        tempdir_test(test_optimizer_steps_are_recognised),
        tempdir_test(test_references_in_memory),
        tempdir_test(test_references_in_memory_of_what_is_damaged),
        tempdir_test(test_references_that_are_read),
        tempdir_test(test_requests),
        tempdir_test(test_phases),
        tempdir_test(test_bad_input),
        tempdir_test(test_ranks_save_together),
    };
    scratch_begin();
    int failed = cmocka_run_group_tests_name("session_rules", tests, NULL, NULL);
    scratch_end();
    return failed;
}
