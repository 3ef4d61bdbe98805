/*
 * The memory that saves and loads of a shard use: the shard's own, the staging budget, and little more. Each
 * measurement runs in a process of its own, and takes its largest resident set (VmHWM) minus the initial one.
 * The page cache does not count, and nothing is mapped.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/hash.h"
#include "tests/support/checkpoints.h"
#include "tests/support/level.h"
#include "tests/support/scenes.h"
#include "tests/support/scratch.h"
#include "tests/support/tempdir.h"

enum { THREADS = 2, DEPTH = 4, RANKS = 8, COLUMNS = 4096, SMALL = 16 };
#define MIB ((uint64_t)1 << 20)
/*
 * For stacks, code, tables of blocks, and memory that the allocator does not return. The memory of workers is
 * as in ckd_save_options.staging_bytes.
 */
#define ALLOWED (16 * MIB)

/* ---- a training state that is never in memory: any part is computed when needed ---- */

static const char *const exact_names[] = {"a", "b", "c", "d"};
static const char *const near_names[] = {"exp_avg_sq.w", "exp_avg.w", "w", "u"};
static const char *const step_names[] = {"exp_avg.w", "exp_avg_sq.w", "w", "u"};
enum { NAMES = 4 };

typedef struct part {
    const char *name;
    uint64_t step;
    ckd_region box;
} part;

/* Noise between about -1 and 1. It is computed once, so that generating values takes little time. */
enum { NOISE = 1 << 16 };
static float noise[NOISE];

static void make_noise(void) {
    for (uint32_t i = 0; i < NOISE; i++) {
        uint64_t x = (i + 1) * UINT64_C(0x9e3779b97f4a7c15);
        x = (x ^ x >> 29) * UINT64_C(0xbf58476d1ce4e5b9);
        noise[i] = (float)(int32_t)(uint32_t)(x >> 32) / 2147483648.0f;
    }
}

static float noise_at(uint64_t i) {
    return noise[i % NOISE];
}

/* Computes a part of a row. Exact values have few digits, so that storing them is fast. */
static void row_of(float *to, const part *p, uint64_t row, uint64_t column, uint64_t count) {
    float scale = 1.5f + noise_at(row), moved = 2e-3f * noise_at(row + 5 * p->step);
    const float *first = noise + 8 * row % (NOISE / 2) + 64 * p->step, *second = noise + 32 * p->step;
    const float *held = noise + (8 * row + 1024 * (uint64_t)*p->name) % (NOISE / 2);
    bool exact = p->name[1] == '\0' && *p->name < 'e';
    for (uint64_t i = 0; i < count; i++) {
        uint64_t j = column + i;
        if (strncmp(p->name, "exp_avg.", 8) == 0) {
            to[i] = 1e-3f * scale * first[j];
        } else if (strncmp(p->name, "exp_avg_sq.", 11) == 0) {
            to[i] = 1e-6f * scale * scale * (1.25f + 0.25f * first[j]);
        } else if (exact) {
            to[i] = (float)(int)(held[j] * 32768) + (float)p->step;
        } else {
            to[i] = held[j] + (p->step ? moved * second[j] + 1e-4f * first[j] : 0);
        }
    }
}

/* Computes the elements `first` ... first + count - 1 of the part, in the order of its box. */
static void values_of(float *to, const part *p, uint64_t first, uint64_t count) {
    while (count) {
        uint64_t width = p->box.lengths[1], row = first / width, column = first % width;
        uint64_t n = width - column < count ? width - column : count;
        row_of(to, p, p->box.offsets[0] + row, p->box.offsets[1] + column, n);
        to += n;
        first += n;
        count -= n;
    }
}

static ckd_status read_part(void *context, uint64_t first, uint64_t count, void *to, ckd_error *err) {
    (void)err;
    values_of(to, context, first, count);
    return CKD_OK;
}

/* ---- measured processes ---- */

static uint64_t resident(const char *field) {
    FILE *f = fopen("/proc/self/status", "r");
    char line[256];
    unsigned long long kib = 0;
    while (f && fgets(line, sizeof(line), f)) {
        if (strncmp(line, field, strlen(field)) == 0) {
            kib = strtoull(line + strlen(field) + 1, NULL, 10);
        }
    }
    if (f) {
        fclose(f);
    }
    return 1024 * kib;
}

typedef struct task {
    const char *dir, *run;
    const char *const *names;
    ckd_fidelity fidelity;
    bool optimizer, by_columns;
    bool given; /* the caller passes the shard in memory; else a callback is asked for values */
    uint64_t step, staging;
    int effort;
    uint64_t rows;
    ckd_codec codec;
} task;

typedef struct outcome {
    uint64_t peak; /* beyond what the process had at first; 0: it failed */
    uint64_t own;  /* the caller's share of it */
    uint64_t hash; /* of the loaded values */
} outcome;

typedef void (*task_fn)(outcome *out, const task *t);

static outcome measured(task_fn fn, const task *t) {
    int ends[2];
    assert_int_equal(pipe(ends), 0);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        uint64_t before = resident("VmRSS:");
        outcome mine = {0, 0, 0};
        fn(&mine, t);
        mine.peak = resident("VmHWM:") - before;
        _exit(write(ends[1], &mine, sizeof(mine)) == sizeof(mine) ? 0 : 1);
    }
    close(ends[1]);
    outcome out = {0, 0, 0};
    int status;
    ssize_t got = read(ends[0], &out, sizeof(out));
    close(ends[0]);
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    assert_int_equal(got, sizeof(out));
    return out;
}

/* For the child, where cmocka's assertions cannot be used. */
static void need(bool good, const char *what) {
    if (!good) {
        fprintf(stderr, "test_memory: %s\n", what);
        _exit(2);
    }
}

static void need_ok(ckd_status status, const ckd_error *err) {
    need(status == CKD_OK, status == CKD_OK ? "" : err->message);
}

static ckd_store *open_store(const task *t) {
    char path[4096];
    ckd_error err;
    ckd_store *store;
    ckd_store_options o = CKD_STORE_OPTIONS_INIT;
    o.threads = THREADS;
    snprintf(path, sizeof(path), "%s/store", t->dir);
    need_ok(ckd_store_open(&store, path, CKD_OPEN_WRITE, &o, &err), &err);
    return store;
}

/* ---- saving ---- */

static void save_shard(ckd_save *save, const task *t, part *p, float *buffer) {
    ckd_error err;
    uint64_t shape[2] = {t->rows, COLUMNS};
    ckd_optimizer how = CKD_OPTIMIZER_INIT;
    how.kind = CKD_ADAMW;
    how.lr = 1e-3;
    how.beta1 = 0.9;
    how.beta2 = 0.95;
    how.eps = 1e-8;
    how.step = t->step + 1;
    ckd_tensor tensor = CKD_TENSOR_INIT;
    tensor.name = p->name;
    tensor.dtype = CKD_F32;
    tensor.ndim = 2;
    tensor.shape = shape;
    tensor.region = p->box;
    tensor.optimizer = t->optimizer ? &how : NULL;
    tensor.read = t->given ? NULL : read_part;
    tensor.read_context = p;
    tensor.data = t->given ? buffer : NULL;
    if (t->given) {
        read_part(p, 0, p->box.lengths[0] * p->box.lengths[1], buffer, NULL);
    }
    need_ok(ckd_save_tensor(save, &tensor, &err), &err);
}

/* Saves the state of a step: two shards of each tensor, one after the other. */
static void save_state(outcome *out, const task *t) {
    ckd_error err;
    ckd_store *store = open_store(t);
    ckd_save *save;
    ckd_save_options o = CKD_SAVE_OPTIONS_INIT;
    uint64_t shard = t->rows / 2 * COLUMNS * sizeof(float);
    float *buffer = t->given ? malloc(shard) : NULL;
    out->own = t->given ? shard : 0;
    o.run = t->run;
    o.step = t->step;
    o.fidelity = t->fidelity;
    o.effort = t->effort;
    o.codec = t->codec;
    o.max_load_cost = o.newest_load_cost = 1000;
    o.staging_bytes = t->staging;
    need_ok(ckd_save_begin(&save, store, &o, &err), &err);
    for (int half = 0; half < 2; half++) {
        for (size_t i = 0; i < NAMES; i++) {
            part p = {.name = t->names[i], .step = t->step, .box.kind = CKD_REGION_BOX};
            p.box.offsets[0] = (uint64_t)half * t->rows / 2;
            p.box.lengths[0] = t->rows / 2;
            p.box.lengths[1] = COLUMNS;
            save_shard(save, t, &p, buffer);
        }
    }
    need_ok(ckd_save_commit(NULL, save, &err), &err);
    free(buffer);
    ckd_store_close(store);
}

/* ---- loading ---- */

/* One of eight shards of the tensor. By columns, it does not end where blocks end. */
static ckd_region shard_of(const task *t) {
    ckd_region r = {.kind = CKD_REGION_BOX, .lengths = {t->rows / RANKS, COLUMNS}};
    r.offsets[0] = 3 * r.lengths[0];
    if (t->by_columns) {
        r.offsets[0] = 0;
        r.offsets[1] = 1000;
        r.lengths[0] = t->rows;
        r.lengths[1] = COLUMNS / RANKS;
    }
    return r;
}

static void check_values(outcome *out, const task *t, size_t name, const float *values, uint64_t count) {
    part p = {t->names[name], t->step, shard_of(t)};
    double error = 0, all = 0;
    for (uint64_t first = 0; first < count; first += COLUMNS) {
        float wanted[COLUMNS];
        values_of(wanted, &p, first, COLUMNS);
        for (uint64_t i = 0; i < COLUMNS; i++) {
            double off = (double)values[first + i] - (double)wanted[i];
            error += off * off;
            all += (double)wanted[i] * (double)wanted[i];
        }
    }
    out->hash ^= hash64(values, count * sizeof(float)) + name;
    bool moment = strncmp(t->names[name], "exp_avg", 7) == 0;
    need(t->fidelity == CKD_EXACT ? error == 0 : moment || error < 1e-4 * all, "other values were loaded");
}

static void load_shard(outcome *out, const task *t) {
    ckd_error err;
    ckd_store *store = open_store(t);
    ckd_region region = shard_of(t);
    uint64_t count = region.lengths[0] * region.lengths[1];
    float *buffer = malloc(NAMES * count * sizeof(float));
    ckd_load_request requests[NAMES];
    need(buffer != NULL, "no memory");
    for (size_t i = 0; i < NAMES; i++) {
        requests[i] = (ckd_load_request)CKD_LOAD_REQUEST_INIT;
        requests[i].name = t->names[i];
        requests[i].region = region;
        requests[i].data = buffer + i * count;
        requests[i].size = count * sizeof(float);
    }
    ckd_checkpoint c;
    ckd_load *load;
    ckd_load_options o = CKD_LOAD_OPTIONS_INIT;
    o.staging_bytes = t->staging;
    need_ok(ckd_store_find(&c, store, t->run, t->step, &err), &err);
    need(c.depth == DEPTH, "the chain is not as deep as it should be");
    need_ok(ckd_load_begin_with(&load, store, &c.id, &o, &err), &err);
    /* One by one, so that blocks that are needed partly are cached. */
    for (size_t i = 0; i < NAMES && t->by_columns; i++) {
        need_ok(ckd_load_tensor(load, &requests[i], &err), &err);
    }
    if (!t->by_columns) {
        need_ok(ckd_load_all(load, requests, NAMES, 0, &err), &err);
    }
    ckd_load_end(load);
    out->own = NAMES * count * sizeof(float);
    for (size_t i = 0; i < NAMES; i++) {
        check_values(out, t, i, buffer + i * count, count);
    }
    free(buffer);
    ckd_store_close(store);
}

/* ---- comparing and verifying ---- */

static void compare_steps(outcome *out, const task *t) {
    ckd_error err;
    ckd_store *store = open_store(t);
    ckd_checkpoint a, b;
    ckd_diff *diff;
    need_ok(ckd_store_find(&a, store, t->run, t->step - 1, &err), &err);
    need_ok(ckd_store_find(&b, store, t->run, t->step, &err), &err);
    need_ok(ckd_store_diff(&diff, store, &a.id, &b.id, NULL, &err), &err);
    uint64_t changed = 0; /* a second moment of a small lossy state may stay as it was */
    for (size_t i = 0; i < diff->count; i++) {
        changed += diff->items[i].changed;
    }
    need(diff->count == NAMES && changed > 0, "the comparison found nothing");
    ckd_diff_free(diff);
    ckd_store_close(store);
    out->own = 0;
}

static void verify_run(outcome *out, const task *t) {
    ckd_error err;
    ckd_store *store = open_store(t);
    ckd_verify_result *found;
    need_ok(ckd_store_verify(&found, store, NULL, &err), &err);
    need(found->damage_count == 0 && found->checkpoints == DEPTH + 1, "the verification found damage");
    ckd_verify_result_free(found);
    ckd_store_close(store);
    out->own = 0;
}

/* ---- tests ---- */

static void check_peak(const char *what, const outcome *o, const task *t) {
    uint64_t staging = t->staging ? t->staging : 256 * MIB, workers = 24 * THREADS * MIB;
    uint64_t beyond = o->peak > o->own ? o->peak - o->own : 0;
    print_message("%s, staging %llu MiB: %.1f MiB beyond the shard's %.1f\n", what,
                  (unsigned long long)(staging / MIB), (double)beyond / (double)MIB,
                  (double)o->own / (double)MIB);
    if (!under_sanitizer() && beyond > staging + workers + ALLOWED) {
        fail_msg("%s: %.1f MiB", what, (double)beyond / (double)MIB);
    }
}

/* A tensor of 8192 rows has 128 MiB. At each level all tensors together exceed the smaller budget. */
static uint64_t rows_of(uint64_t quick, uint64_t rows) {
    return under_sanitizer() ? 64 : test_pick(quick, rows, rows);
}

static void check_save(const task *t) {
    outcome saved = measured(save_state, t);
    check_peak(t->given ? "save" : "save of what is read", &saved, t);
}

/* Loads with both budgets. The values must be the same. */
static void check_loads(const task *like, const uint64_t budgets[2]) {
    task t = *like;
    outcome loaded[2];
    for (int by = 0; by < 2; by++) {
        t.by_columns = by;
        for (int i = 0; i < 2; i++) {
            t.staging = budgets[i];
            loaded[i] = measured(load_shard, &t);
            check_peak(by ? "load by columns" : "load by rows", &loaded[i], &t);
        }
        assert_true(loaded[0].hash == loaded[1].hash);
    }
}

/*
 * Comparisons and verifications hold blocks, whatever the size of the state: 24 MiB for each worker, 16 MiB of side
 * records that lossy blocks share, and 32 MiB of blocks that the two checkpoints cut in different ways.
 */
static void check_blocks_only(const char *what, task_fn fn, const task *t) {
    outcome o = measured(fn, t);
    print_message("%s: %.1f MiB\n", what, (double)o.peak / (double)MIB);
    if (!under_sanitizer() && o.peak > (24 * THREADS + 16 + 32) * MIB + ALLOWED) {
        fail_msg("%s: %.1f MiB", what, (double)o.peak / (double)MIB);
    }
}

/*
 * Saves a chain. Its last two links are measured, one with each budget. Then compares the last two steps, verifies the
 * store, and loads an eighth by rows and by columns.
 */
static void check_run(const task *like) {
    const uint64_t budgets[2] = {0, SMALL * MIB};
    task t = *like;
    for (t.step = 0; t.step <= DEPTH; t.step++) {
        bool quick = t.step + 2 <= DEPTH;
        t.effort = quick ? 1 : 5;
        t.codec = quick ? CKD_CODEC_LZ4 : CKD_CODEC_AUTO;
        t.given = quick || like->given;
        t.staging = t.step == DEPTH ? budgets[1] : budgets[0];
        if (quick) {
            measured(save_state, &t);
        } else {
            check_save(&t);
        }
    }
    t.step = DEPTH;
    check_blocks_only("diff", compare_steps, &t);
    check_blocks_only("verify", verify_run, &t);
    check_loads(&t, budgets);
}

static void test_exact(void **state) {
    const task t = {.dir = *state,
                    .run = "exact",
                    .names = exact_names,
                    .fidelity = CKD_EXACT,
                    .given = true,
                    .rows = rows_of(2048, 4096)};
    check_run(&t);
}

static void test_near(void **state) {
    const task t = {
        .dir = *state, .run = "near", .names = near_names, .fidelity = CKD_NEAR, .rows = rows_of(2048, 8192)};
    check_run(&t);
}

/* Moments are held until their weights arrive: 64 MiB of a shard here, more than the smaller budget. */
static void test_optimizer_steps(void **state) {
    task t = {.dir = *state,
              .run = "steps",
              .names = step_names,
              .fidelity = CKD_EXACT,
              .given = true,
              .codec = CKD_CODEC_LZ4,
              .rows = rows_of(4096, 4096)};
    measured(save_state, &t);
    t.optimizer = true;
    for (t.step = 1; t.step <= 2; t.step++) {
        t.staging = t.step == 1 ? 0 : SMALL * MIB;
        check_save(&t);
    }
}

static int make_store(void **state) {
    char *dir = tempdir_create();
    *state = dir;
    ckd_store_close(store_create(dir));
    return 0;
}

static int remove_store(void **state) {
    tempdir_remove(*state);
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_exact, make_store, remove_store),
        cmocka_unit_test_setup_teardown(test_near, make_store, remove_store),
        cmocka_unit_test_setup_teardown(test_optimizer_steps, make_store, remove_store),
    };
    make_noise();
    scratch_begin();
    int failed = run_sampled("memory", tests, 2, NULL, NULL);
    scratch_end();
    return failed;
}
