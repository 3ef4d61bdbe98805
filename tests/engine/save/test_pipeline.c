/* A save processes blocks of several tensors at the same time, and writes what a sequential save would write. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <errno.h>
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/file.h"
#include "codec/chunk/chunk.h"
#include "engine/store/paths.h"
#include "engine/save/save.h"
#include "tests/support/checkpoints.h"
#include "tests/support/level.h"
#include "tests/support/records.h"
#include "tests/support/tempdir.h"

enum { STEPS = 4, SMALL = 12, MANY = 80, ROOM = 1 << 20 };
#define BLOCK CKD_BLOCK_ELEMENTS

/* A model whose tensors contain everything that makes blocks depend on each other. */
typedef struct tensor {
    char name[32];
    ckd_dtype dtype;
    uint64_t count;
    void *values;
} tensor;
typedef struct model {
    tensor items[8 + SMALL];
    size_t count;
} model;

static void put(model *m, const char *name, ckd_dtype dtype, uint64_t count, void *values) {
    tensor *t = &m->items[m->count++];
    snprintf(t->name, sizeof(t->name), "%s", name);
    t->dtype = dtype;
    t->count = count;
    t->values = values;
}

static void *copy_of(const void *values, size_t size) {
    void *copy = malloc(size);
    memcpy(copy, values, size);
    return copy;
}

/* No delta of the first four blocks wins, so deltas of the other blocks are not tried, although they would win. */
static uint32_t *noise_at(unsigned step) {
    uint32_t *values = random_values(CKD_U32, 7 * BLOCK, 30), *fresh = random_bits(4 * BLOCK * 4, 30 + step);
    memcpy(values, fresh, 4 * BLOCK * sizeof(*values));
    for (unsigned s = 1; s <= step; s++) {
        change_values(CKD_U32, values + 4 * BLOCK, 3 * BLOCK, 40 + s);
    }
    free(fresh);
    return values;
}

static model model_at(unsigned step) {
    model m = {.count = 0};
    float *weights = random_values(CKD_F32, 3 * BLOCK, 1), *master = random_values(CKD_F32, 2 * BLOCK, 2);
    for (unsigned s = 1; s <= step; s++) {
        change_values(CKD_F32, weights, 3 * BLOCK, 10 + s);
        change_values(CKD_F32, master, 2 * BLOCK, 20 + s);
    }
    put(&m, "zeros", CKD_F32, 5 * BLOCK, calloc(5 * BLOCK, sizeof(float))); /* all blocks are equal */
    put(&m, "noise", CKD_U32, 7 * BLOCK, noise_at(step));
    put(&m, "master.a", CKD_F32, 2 * BLOCK, master);
    /* Rounded from the tensor before it. */
    put(&m, "a", CKD_BF16, 2 * BLOCK, round_to_bf16(master, 2 * BLOCK));
    put(&m, "w", CKD_F32, 3 * BLOCK, weights);
    put(&m, "twin", CKD_F32, 3 * BLOCK, copy_of(weights, 3 * BLOCK * sizeof(float)));
    put(&m, "frozen", CKD_F32, BLOCK / 2, random_values(CKD_F32, BLOCK / 2, 3));
    for (unsigned i = 0; i < SMALL; i++) {
        char name[32];
        snprintf(name, sizeof(name), "small.%u", i);
        put(&m, name, CKD_F32, 1000 + i, random_values(CKD_F32, 1000 + i, 100 * step + i / 2));
    }
    put(&m, "empty", CKD_F32, 0, NULL);
    return m;
}

static void model_free(model *m) {
    for (size_t i = 0; i < m->count; i++) {
        free(m->items[i].values);
    }
}

static uint32_t under_way(const ckd_save *save) {
    return (uint32_t)(save->pipeline.pushed - save->pipeline.written);
}

/*
 * Saves from one buffer that is overwritten as soon as each call returns. Returns the maximum number of blocks in
 * progress between calls.
 */
static uint32_t save_model(ckd_store *store, unsigned step) {
    model m = model_at(step);
    uint8_t *buffer = malloc(7 * BLOCK * 4);
    ckd_save *save = begin_save(store, "run", step);
    uint32_t most = 0;
    for (size_t i = 0; i < m.count; i++) {
        const tensor *t = &m.items[i];
        size_t size = t->count * ckd_dtype_size(t->dtype);
        if (size > 0) {
            memcpy(buffer, t->values, size);
        }
        add_tensor(save, t->name, t->dtype, 1, &t->count, NULL, buffer);
        memset(buffer, 0xa5, 7 * BLOCK * 4);
        most = under_way(save) > most ? under_way(save) : most;
    }
    assert_int_equal(ckd_save_commit(NULL, save, NULL), CKD_OK);
    free(buffer);
    model_free(&m);
    return most;
}

static void check_model(ckd_store *store, unsigned step) {
    model m = model_at(step);
    for (size_t i = 0; i < m.count; i++) {
        const tensor *t = &m.items[i];
        size_t size = t->count * ckd_dtype_size(t->dtype);
        void *loaded = load_whole(store, "run", step, t->name, size);
        if (size > 0 && memcmp(loaded, t->values, size) != 0) {
            fail_msg("%s of step %u is not what was saved", t->name, step);
        }
        free(loaded);
    }
    model_free(&m);
}

static ckd_store *store_with(char *root, size_t room, const char *dir, uint32_t threads) {
    snprintf(root, room, "%s/with-%u", dir, threads);
    ckd_store_options o = CKD_STORE_OPTIONS_INIT;
    o.threads = threads;
    ckd_store *store;
    assert_int_equal(ckd_store_open(&store, root, CKD_OPEN_CREATE, &o, NULL), CKD_OK);
    return store;
}

static void check_threads(const char *dir, uint32_t threads, char *out, size_t room) {
    char root[4096];
    ckd_store *store = store_with(root, sizeof(root), dir, threads);
    uint32_t most = 0;
    for (unsigned step = 1; step <= STEPS; step++) {
        uint32_t now = save_model(store, step);
        most = now > most ? now : most;
    }
    /* Calls do not wait for their last blocks. How many are still in progress depends on the load of the machine. */
    assert_true(most > 0 || threads == 1);
    assert_int_equal(verify_damage(store), 0);
    check_model(store, 1);
    check_model(store, STEPS);
    records_describe(out, room, store, root, 1, STEPS);
    ckd_store_close(store);
}

static void test_results_do_not_depend_on_threads(void **state) {
    char *one = calloc(1, ROOM), *several = calloc(1, ROOM);
    check_threads(*state, 1, one, ROOM);
    char rounded[32];
    snprintf(rounded, sizeof(rounded), " a 0 %u %u ", (unsigned)CODING_RAW, (unsigned)PREDICT_CAST);
    assert_non_null(strstr(one, rounded)); /* found whatever was analysed at the same time */
    const uint32_t threads[] = {2, 3, 7};
    for (size_t i = 0; i < sizeof(threads) / sizeof(threads[0]); i++) {
        check_threads(*state, threads[i], several, ROOM);
        records_check_same(one, several, threads[i]);
    }
    free(one);
    free(several);
}

/* ---- the limit of checkpoints that a save may build on ---- */

/*
 * At each step one more tensor changes for the last time, so that the tensors are stored in different checkpoints.
 * Every tenth tensor always changes.
 */
static void save_many(ckd_store *store, unsigned step) {
    const uint64_t count = 300;
    ckd_save *save = begin_save(store, "run", step);
    for (unsigned i = 1; i <= MANY; i++) {
        unsigned changed = i < step && i % 10 != 0 ? i : step;
        float *values = random_values(CKD_F32, count, 1000 * i);
        change_values(CKD_F32, values, count, changed);
        char name[32];
        snprintf(name, sizeof(name), "tensor.%02u", i);
        add_tensor(save, name, CKD_F32, 1, &count, NULL, values);
        free(values);
    }
    assert_int_equal(ckd_save_commit(NULL, save, NULL), CKD_OK);
}

/* How many other checkpoints the records of a step refer to. */
static unsigned named_at(const char *described, unsigned step) {
    bool named[MANY + 1] = {false};
    unsigned at, count = 0;
    for (const char *line = described; *line; line = strchr(line, '\n') + 1) {
        const char *end = strchr(line, '\n');
        for (const char *on = strstr(line, " on "); on && on < end; on = strstr(on + 1, " on ")) {
            at = (unsigned)strtoul(on + 4, NULL, 10);
            assert_true(at >= 1 && at <= MANY);
            count += strtoul(line, NULL, 10) == step && at != step && !named[at];
            named[at] |= strtoul(line, NULL, 10) == step;
        }
    }
    return count;
}

static void check_many(const char *dir, uint32_t threads, char *out) {
    char root[4096];
    ckd_store *store = store_with(root, sizeof(root), dir, threads);
    for (unsigned step = 1; step <= MANY; step++) {
        save_many(store, step);
    }
    assert_int_equal(verify_damage(store), 0);
    records_describe(out, ROOM, store, root, REFERENCED_CHECKPOINTS_MAX - 4, MANY);
    ckd_store_close(store);
}

static void test_referenced_checkpoints_do_not_depend_on_threads(void **state) {
    char *one = calloc(1, ROOM), *several = calloc(1, ROOM);
    check_many(*state, 1, one);
    assert_int_equal(named_at(one, MANY), REFERENCED_CHECKPOINTS_MAX);
    const uint32_t threads[] = {2, 8};
    for (size_t i = 0; i < sizeof(threads) / sizeof(threads[0]); i++) {
        check_many(*state, threads[i], several);
        records_check_same(one, several, threads[i]);
    }
    free(one);
    free(several);
}

/* ---- errors while other tensors are in progress ---- */

static int fail_writes(void *context, file_op step, const char *path) {
    int *left = context;
    return step == FILE_OP_WRITE && strstr(path, ".tmp") && --*left < 0 ? EIO : 0;
}

static void test_errors_are_returned_in_the_end(void **state) {
    char root[4096];
    ckd_store *store = store_with(root, sizeof(root), *state, 2);
    ckd_save_options save_options = options_of("run", 1);
    float *values = random_values(CKD_F32, BLOCK, 1);
    uint64_t shape[] = {BLOCK};
    for (int writes = 0; writes < 5; writes++) {
        ckd_save *save;
        ckd_status status = ckd_save_begin(&save, store, &save_options, NULL);
        assert_int_equal(status, CKD_OK);
        int left = writes;
        file_set_fault_hook(fail_writes, &left);
        ckd_error err = {0};
        for (int i = 0; i < 6 && status == CKD_OK; i++) {
            char name[16];
            snprintf(name, sizeof(name), "t%d", i);
            ckd_tensor t = CKD_TENSOR_INIT;
            t.name = name;
            t.dtype = CKD_F32;
            t.ndim = 1;
            t.shape = shape;
            t.data = values;
            values[i] += 1;
            status = ckd_save_tensor(save, &t, &err);
        }
        if (status == CKD_OK) {
            status = ckd_save_commit(NULL, save, &err);
        } else {
            assert_int_equal(ckd_save_commit(NULL, save, NULL), CKD_E_STATE);
        }
        file_set_fault_hook(NULL, NULL);
        assert_int_equal(status, CKD_E_IO);
        assert_non_null(strstr(err.message, "write"));
        ckd_checkpoint_list *list;
        assert_int_equal(ckd_store_list(&list, store, NULL, NULL), CKD_OK);
        assert_int_equal(list->count, 0);
        ckd_checkpoint_list_free(list);
    }
    free(values);
    ckd_store_close(store);
}

/* ---- optimizer steps ---- */

enum { CANCELLED_BLOCKS = 12 };

static int cancel_at(void *context, uint64_t done, uint64_t total) {
    (void)total;
    return done >= *(const uint64_t *)context;
}

static ckd_status add_of_step(ckd_save *save, const char *name, const float *values,
                              const ckd_optimizer *optimizer) {
    const uint64_t shape[1] = {CANCELLED_BLOCKS * BLOCK};
    ckd_error err;
    ckd_tensor t = CKD_TENSOR_INIT;
    t.name = name;
    t.dtype = CKD_F32;
    t.ndim = 1;
    t.shape = shape;
    t.data = values;
    t.optimizer = optimizer;
    return ckd_save_tensor(save, &t, &err);
}

/* When a tensor that is coded as an optimizer step is cancelled, no thread may still use the moments. */
static void test_cancelled_steps(void **state) {
    const uint64_t count = CANCELLED_BLOCKS * BLOCK, mebi = 1 << 20;
    char path[4096];
    float *v = random_values(CKD_F32, count, 2), *m = random_values(CKD_F32, count, 1),
          *w = random_values(CKD_F32, count, 3);
    ckd_store_options with = CKD_STORE_OPTIONS_INIT;
    ckd_optimizer o = CKD_OPTIMIZER_INIT;
    ckd_store *store;
    ckd_error err;
    snprintf(path, sizeof(path), "%s/store", (const char *)*state);
    with.threads = 4;
    assert_int_equal(ckd_store_open(&store, path, CKD_OPEN_CREATE, &with, &err), CKD_OK);
    o.kind = CKD_ADAMW;
    o.lr = 1e-3;
    o.beta1 = 0.9;
    o.beta2 = 0.95;
    o.eps = 1e-8;
    for (uint64_t i = 0; i < count; i++) {
        v[i] = v[i] * v[i] + 1e-9f;
    }
    for (uint64_t step = 1; step < 6; step++) {
        uint64_t most = step == 1 ? UINT64_MAX : 2 * count * sizeof(float) + (3 + step) * mebi;
        ckd_save_options options = options_of("run", step);
        options.on_progress = cancel_at;
        options.progress_context = &most;
        ckd_save *save = begin_with(store, &options);
        o.step = step;
        assert_int_equal(add_of_step(save, "exp_avg.w", m, &o), CKD_OK);
        assert_int_equal(add_of_step(save, "exp_avg_sq.w", v, &o), CKD_OK);
        ckd_status status = add_of_step(save, "w", w, &o);
        assert_int_equal(status, step == 1 ? CKD_OK : CKD_E_CANCELLED);
        if (status == CKD_OK) {
            assert_int_equal(ckd_save_commit(NULL, save, &err), CKD_OK);
        } else {
            ckd_save_abort(save);
        }
        for (uint64_t i = 0; i < count; i++) {
            m[i] *= 1.01f;
            v[i] *= 0.99f;
            w[i] += 1e-3f * m[i];
        }
    }
    ckd_store_close(store);
    free(v);
    free(m);
    free(w);
}

/* ---- a forked child while other threads wait ---- */

typedef struct waiter {
    pthread_mutex_t *mutex;
    pthread_cond_t *changed;
    bool here, go_on;
} waiter;

static void *wait_for_it(void *context) {
    waiter *w = context;
    pthread_mutex_lock(w->mutex);
    w->here = true;
    while (!w->go_on) {
        pthread_cond_wait(w->changed, w->mutex);
    }
    pthread_mutex_unlock(w->mutex);
    return NULL;
}

static pthread_t begin_waiting(waiter *w, pthread_mutex_t *mutex, pthread_cond_t *changed) {
    pthread_t thread;
    *w = (waiter){mutex, changed, false, false};
    assert_int_equal(pthread_create(&thread, NULL, wait_for_it, w), 0);
    for (bool here = false; !here;) {
        pthread_mutex_lock(mutex);
        here = w->here; /* holding the mutex, we know that the thread waits */
        pthread_mutex_unlock(mutex);
    }
    return thread;
}

static void end_waiting(waiter *w, pthread_t thread) {
    pthread_mutex_lock(w->mutex);
    w->go_on = true;
    pthread_cond_broadcast(w->changed);
    pthread_mutex_unlock(w->mutex);
    pthread_join(thread, NULL);
}

/*
 * The child aborts its copy of the save without waiting for threads that it does not have. The parent's save
 * continues.
 */
static void test_abort_in_a_forked_child(void **state) {
    ckd_store *store = store_create(*state);
    uint64_t n = 1000;
    float *values = random_values(CKD_F32, n, 1);
    ckd_save_options o = CKD_SAVE_OPTIONS_INIT;
    o.run = "run";
    ckd_save *save;
    assert_int_equal(ckd_save_begin(&save, store, &o, NULL), CKD_OK);
    add_tensor(save, "t", CKD_F32, 1, &n, NULL, values);
    columns_cache *columns = save->pipeline.workspace->columns;
    waiter w[2];
    pthread_t threads[2] = {begin_waiting(&w[0], &save->pipeline.mutex, &save->pipeline.changed),
                            begin_waiting(&w[1], &columns->mutex, &columns->changed)};
    pid_t child = fork();
    if (child == 0) {
        alarm(20); /* kills a child that waits */
        ckd_save_abort(save);
        _exit(0);
    }
    int status = -1;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    end_waiting(&w[0], threads[0]);
    end_waiting(&w[1], threads[1]);
    assert_int_equal(ckd_save_commit(NULL, save, NULL), CKD_OK);
    free(load_whole(store, "run", 0, "t", n * sizeof(float)));
    ckd_store_close(store);
    free(values);
}

static int setup(void **dir) {
    *dir = tempdir_create();
    return 0;
}

static int teardown(void **dir) {
    tempdir_remove(*dir);
    return 0;
}

/* For a finished tensor, a save keeps only its name and shape. */
static void test_very_many_tensors(void **state) {
    enum { TINY = 50000, BYTES_EACH = 400, OTHERS = 12 };
    static const uint64_t shape[1] = {1};
    ckd_store *store = store_create(*state);
    ckd_save *save = begin_save(store, "run", 1);
    for (uint32_t i = 0; i < TINY; i++) {
        char name[16];
        uint8_t value = (uint8_t)i;
        snprintf(name, sizeof(name), "t%u", (unsigned)i);
        add_tensor(save, name, CKD_U8, 1, shape, NULL, &value);
    }
    /* Memory is allocated in slabs of 1 MiB after a few smaller ones. */
    assert_in_range(save->registry.arena.count, 2, OTHERS + ((uint64_t)TINY * BYTES_EACH >> 20));
    assert_int_equal(ckd_save_commit(NULL, save, NULL), CKD_OK);
    uint8_t *got = load_whole(store, "run", 1, "t777", 1);
    assert_int_equal(*got, 777 % 256);
    free(got);
    ckd_store_close(store);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_results_do_not_depend_on_threads, setup, teardown),
        cmocka_unit_test_setup_teardown(test_referenced_checkpoints_do_not_depend_on_threads, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_errors_are_returned_in_the_end, setup, teardown),
        cmocka_unit_test_setup_teardown(test_cancelled_steps, setup, teardown),
        cmocka_unit_test_setup_teardown(test_abort_in_a_forked_child, setup, teardown),
        cmocka_unit_test_setup_teardown(test_very_many_tensors, setup, teardown),
    };
    return run_sampled("pipeline", tests, 2, NULL, NULL);
}
