/*
 * Lossy saves under trouble: the process is killed, an operation fails, or memory runs out, at any point. Committed
 * checkpoints keep their exact values, everything listed is complete, and a failed save can be repeated with the same
 * result.
 */
#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/file.h"
#include "tests/support/checkpoints.h"
#include "tests/support/drift.h"
#include "tests/support/level.h"
#include "tests/support/scenes.h"
#include "tests/support/scratch.h"
#include "tests/support/tempdir.h"

enum { ROWS = 40, COLUMNS = 24, N = ROWS * COLUMNS, PARTS = 3, STEPS = 3 };
static const char *const names[PARTS] = {"exp_avg_sq.w", "exp_avg.w", "w"};

/* The values of every step if nothing fails. */
static float *right[STEPS][PARTS];
static drift states[STEPS];
/* Step 2 may be a lossy base, because a parent that cannot be read does not fail the save. */
static bool parent_unread;

/* ---- memory ---- */

static struct {
    bool on, for_ever;
    unsigned long at, seen, hits;
} shortage;

static bool fails(void) {
    if (!shortage.on) {
        return false;
    }
    bool now = ++shortage.seen == shortage.at || (shortage.for_ever && shortage.seen > shortage.at);
    shortage.hits += now;
    return now;
}

#define WRAPPED(result, name, parameters, arguments)     \
    result __real_##name parameters;                     \
    result __wrap_##name parameters;                     \
    result __wrap_##name parameters {                    \
        return fails() ? NULL : __real_##name arguments; \
    }

WRAPPED(void *, malloc, (size_t size), (size))
WRAPPED(void *, calloc, (size_t count, size_t size), (count, size))
WRAPPED(void *, realloc, (void *block, size_t size), (block, size))

/* ---- saving and loading ---- */

static ckd_store *open_store(const char *dir, ckd_open_mode mode) {
    ckd_store *store;
    ckd_error err = {0};
    if (scene_open(&store, dir, mode, &err) != CKD_OK) {
        fail_msg("open: %s", err.message);
    }
    return store;
}

static ckd_status add(ckd_save *save, uint64_t step, ckd_error *err) {
    const float *const values[PARTS] = {states[step].second, states[step].first, states[step].weight};
    const uint64_t shape[2] = {ROWS, COLUMNS};
    ckd_status status = CKD_OK;
    for (int part = 0; part < PARTS && status == CKD_OK; part++) {
        ckd_tensor t = CKD_TENSOR_INIT;
        t.name = names[part];
        t.dtype = CKD_F32;
        t.ndim = 2;
        t.shape = shape;
        t.data = values[part];
        status = ckd_save_tensor(save, &t, err);
    }
    return status;
}

static ckd_status save_step(ckd_store *store, uint64_t step, ckd_error *err) {
    ckd_save_options o = lossy_options("r", step, step == 1 ? CKD_NEAR : CKD_COARSE);
    ckd_save *save;
    ckd_status status = ckd_save_begin(&save, store, &o, err);
    if (status != CKD_OK) {
        return status;
    }
    status = add(save, step, err);
    if (status != CKD_OK) {
        ckd_save_abort(save);
        return status;
    }
    return ckd_save_commit(NULL, save, err);
}

static ckd_status load_step(ckd_store *store, uint64_t step, ckd_error *err) {
    ckd_checkpoint c;
    ckd_load *load = NULL;
    static float got[N];
    ckd_status status = ckd_store_find(&c, store, "r", step, err);
    if (status == CKD_OK) {
        status = ckd_load_begin(&load, store, &c.id, err);
    }
    for (int part = 0; part < PARTS && status == CKD_OK; part++) {
        ckd_load_request q = CKD_LOAD_REQUEST_INIT;
        q.name = names[part];
        q.data = got;
        q.size = sizeof(got);
        status = ckd_load_tensor(load, &q, err);
        if (status == CKD_OK && step == 2 && parent_unread) {
            const float *const given[PARTS] = {states[2].second, states[2].first, states[2].weight};
            assert_true(relative_error(got, given[part], N) < (part < 2 ? 1.01 : 0.05));
        } else if (status == CKD_OK && right[step][part]) {
            assert_memory_equal(got, right[step][part], sizeof(got));
        }
    }
    ckd_load_end(load);
    return status;
}

/* All committed steps are there and no others, and step 2 can be saved if it is missing. */
static void check(const char *dir, bool third) {
    ckd_store *store = open_store(dir, CKD_OPEN_WRITE);
    ckd_error err = {0};
    ckd_checkpoint c;
    bool there = ckd_store_find(&c, store, "r", 2, NULL) == CKD_OK;
    assert_true(there || !third);
    if (!there) {
        assert_int_equal(save_step(store, 2, &err), CKD_OK);
    }
    for (uint64_t step = 0; step < STEPS; step++) {
        if (load_step(store, step, &err) != CKD_OK) {
            fail_msg("step %u: %s", (unsigned)step, err.message);
        }
    }
    assert_int_equal(verify_damage(store), 0);
    ckd_store_close(store);
    store_check_clean(dir);
}

static char *copy_of(const char *template) {
    char *dir = tempdir_create(), store[1024];
    snprintf(store, sizeof(store), "%s/store", dir);
    tree_copy(store_path_of(template, ""), store);
    return dir;
}

/* ---- killed processes ---- */

typedef struct killer {
    unsigned long at, seen;
} killer;

static int kill_hook(void *context, file_op step, const char *path) {
    (void)path;
    killer *k = context;
    if (step != FILE_OP_READ && step != FILE_OP_OPEN && ++k->seen == k->at) {
        raise(SIGKILL);
    }
    return 0;
}

static void test_killed_anywhere(void **state) {
    unsigned long stride = under_sanitizer() ? 5 : test_stride(5, 2, 1), at = test_first("killed", stride);
    for (bool finished = false; !finished; at += stride) {
        char *dir = copy_of(*state);
        int ended;
        fflush(NULL);
        pid_t pid = fork();
        assert_true(pid >= 0);
        if (pid == 0) {
            killer k = {.at = at};
            ckd_store *store;
            file_set_fault_hook(kill_hook, &k);
            _exit(scene_open(&store, dir, CKD_OPEN_WRITE, NULL) != CKD_OK ||
                  save_step(store, 2, NULL) != CKD_OK);
        }
        assert_int_equal(waitpid(pid, &ended, 0), pid);
        finished = WIFEXITED(ended);
        assert_true(!finished || WEXITSTATUS(ended) == 0);
        check(dir, finished);
        tempdir_remove(dir);
    }
    print_message("killed at %lu steps\n", at / stride);
    assert_true(at > 10);
}

/* ---- failing operations ---- */

typedef struct faulter {
    unsigned long at, seen, hits;
    bool for_ever;
    int fault;
} faulter;

static int fault_hook(void *context, file_op step, const char *path) {
    (void)step, (void)path;
    faulter *f = context;
    bool now = ++f->seen == f->at || (f->for_ever && f->seen > f->at);
    f->hits += now;
    return now ? f->fault : 0;
}

static bool fault_at(const char *template, unsigned long at, bool for_ever, int fault) {
    char *dir = copy_of(template);
    ckd_error err = {0};
    faulter f = {.at = at, .for_ever = for_ever, .fault = fault};
    ckd_store *store = open_store(dir, CKD_OPEN_WRITE);
    file_set_fault_hook(fault_hook, &f);
    ckd_status status = save_step(store, 2, &err);
    if (status != CKD_OK) {
        assert_true(f.hits > 0 && err.message[0]);
        assert_int_equal(status, fault == ENOSPC ? CKD_E_NOSPACE : CKD_E_IO);
    }
    if (status != CKD_OK && !for_ever) {
        status = save_step(store, 2, &err);
        assert_int_equal(status, CKD_OK);
    }
    file_set_fault_hook(NULL, NULL);
    ckd_store_close(store);
    check(dir, status == CKD_OK);
    tempdir_remove(dir);
    return f.hits > 0;
}

static void test_faults_anywhere(void **state) {
    unsigned long points = 0, stride = under_sanitizer() ? 9 : test_stride(9, 4, 1);
    parent_unread = true;
    for (int manner = 0; manner < 4; manner++) {
        for (unsigned long at = test_first("faults", stride) + (unsigned long)manner % 2;
             fault_at(*state, at, manner & 1, manner & 2 ? EIO : ENOSPC); at += stride) {
            points++;
        }
    }
    print_message("%lu faults\n", points);
    assert_true(points > 20);
}

/* ---- lack of memory ---- */

static bool shortage_at(const char *template, unsigned long at, bool for_ever) {
    char *dir = copy_of(template);
    ckd_error err = {0};
    ckd_store *store = open_store(dir, CKD_OPEN_WRITE);
    shortage.at = at;
    shortage.seen = shortage.hits = 0;
    shortage.for_ever = for_ever;
    shortage.on = true;
    ckd_status status = save_step(store, 2, &err);
    shortage.on = shortage.on && for_ever;
    bool saved = status == CKD_OK;
    if (!saved) {
        shortage.on = false;
        assert_true(shortage.hits > 0);
        if (status != CKD_E_NOMEM || !strstr(err.message, "memory")) {
            fail_msg("allocation %lu: %s, %s", at, ckd_status_name(status), err.message);
        }
        assert_int_equal(save_step(store, 2, &err), CKD_OK);
    }
    shortage.on = false;
    ckd_store_close(store);
    check(dir, true);
    tempdir_remove(dir);
    return shortage.hits > 0;
}

static bool load_shortage_at(const char *template, unsigned long at, bool for_ever) {
    ckd_error err = {0};
    ckd_store *store = open_store(template, CKD_OPEN_READ);
    shortage.at = at;
    shortage.seen = shortage.hits = 0;
    shortage.for_ever = for_ever;
    shortage.on = true;
    ckd_status status = load_step(store, 1, &err);
    shortage.on = false;
    if (status != CKD_OK) {
        assert_int_equal(status, CKD_E_NOMEM);
        assert_int_equal(load_step(store, 1, &err), CKD_OK);
    }
    ckd_store_close(store);
    return shortage.hits > 0;
}

static void test_out_of_memory_anywhere(void **state) {
    unsigned long saves = 0, loads = 0, stride = under_sanitizer() ? 13 : test_stride(13, 6, 1),
                  every = test_stride(3, 1, 1);
    for (int for_ever = 0; for_ever < 2; for_ever++) {
        for (unsigned long at = test_first("shortages", stride); shortage_at(*state, at, for_ever);
             at += stride) {
            saves++;
        }
        for (unsigned long at = test_first("shortages of loads", every);
             load_shortage_at(*state, at, for_ever); at += every) {
            loads++;
        }
    }
    print_message("%lu shortages while saving, %lu while loading\n", saves, loads);
    assert_true(saves > 30 && loads > 30);
}

/* ---- the store that all tests begin with: steps 0 and 1 ---- */

static int setup(void **state) {
    char *dir = tempdir_create(), *whole = tempdir_create();
    *state = dir;
    drift d = drift_new(ROWS, COLUMNS, 1);
    for (uint64_t step = 0; step < STEPS; step++, drift_step(&d)) {
        states[step] = drift_new(ROWS, COLUMNS, 1);
        memcpy(states[step].weight, d.weight, N * sizeof(float));
        memcpy(states[step].first, d.first, N * sizeof(float));
        memcpy(states[step].second, d.second, N * sizeof(float));
    }
    drift_free(&d);
    ckd_store *store = open_store(dir, CKD_OPEN_CREATE), *all = open_store(whole, CKD_OPEN_CREATE);
    for (uint64_t step = 0; step < STEPS; step++) {
        assert_int_equal(save_step(all, step, NULL), CKD_OK);
        for (int part = 0; part < PARTS; part++) {
            right[step][part] = load_floats(all, "r", step, names[part], CKD_F32, N);
        }
    }
    assert_int_equal(save_step(store, 0, NULL), CKD_OK);
    assert_int_equal(save_step(store, 1, NULL), CKD_OK);
    ckd_store_close(store);
    ckd_store_close(all);
    tempdir_remove(whole);
    return 0;
}

static int teardown(void **state) {
    shortage.on = parent_unread = false;
    file_set_fault_hook(NULL, NULL);
    for (int step = 0; step < STEPS; step++) {
        drift_free(&states[step]);
        for (int part = 0; part < PARTS; part++) {
            free(right[step][part]);
            right[step][part] = NULL;
        }
    }
    tempdir_remove(*state);
    return 0;
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(test_killed_anywhere),
        TEST(test_faults_anywhere),
        TEST(test_out_of_memory_anywhere),
    };
    scratch_begin();
    int failed = cmocka_run_group_tests_name("lossy_trouble", tests, NULL, NULL);
    scratch_end();
    return failed;
}
