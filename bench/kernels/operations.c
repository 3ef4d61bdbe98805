/* Each operation of the kernels' table against memcpy. */
#include <stdlib.h>
#include <string.h>

#include "base/threads.h"
#include "bench/kernels/kernels.h"
#include "bench/support/support.h"
#include "kernels/kernels.h"

enum { SLICE = 1 << 16, COLUMNS = 2048, GROUP = 8, RANK = 64, MAX_OPERATIONS = 32 };

typedef struct arrays {
    const kernels *k;
    float *now, *before, *out, *low_rank, *factor, *step;
    int32_t *q, *levels, *column;
    int8_t *few;
} arrays;

typedef struct operation {
    const char *name;
    double bytes; /* that it must read and write per element */
    void (*run)(const arrays *a, size_t first, size_t n);
} operation;

static lattice_run linear_run(const arrays *a) {
    return (lattice_run){.unit = 0x1p-16f,
                         .per_unit = 0x1p16f,
                         .row_step = 16,
                         .column_step = a->step,
                         .low_rank_unit = 0.125f,
                         .offset = {0.1f, 0.05f, 0}};
}
static level_run second_run(const arrays *a) {
    return (level_run){.has_parent = true, .row = 1, .column = a->column, .birth = 700, .step = 4};
}

static void copy(const arrays *a, size_t i, size_t n) {
    memcpy(a->out + i, a->now + i, n * sizeof(float));
}
static void ordered_residual(const arrays *a, size_t i, size_t n) {
    a->k->ordered_residual(CKD_F32, a->out + i, a->now + i, a->before + i, n);
}
static void ordered_apply(const arrays *a, size_t i, size_t n) {
    a->k->ordered_apply(CKD_F32, a->out + i, a->before + i, a->q + i, n);
}
static void rotate_sign(const arrays *a, size_t i, size_t n) {
    a->k->rotate_sign(CKD_F32, a->out + i, a->now + i, n);
}
static void unrotate_sign(const arrays *a, size_t i, size_t n) {
    a->k->unrotate_sign(CKD_F32, a->out + i, a->now + i, n);
}
static void magnitude_context(const arrays *a, size_t i, size_t n) {
    a->k->magnitude_context(CKD_F32, (uint8_t *)a->out + i, a->now + i, n);
}
static void cast(const arrays *a, size_t i, size_t n) {
    a->k->cast(CKD_BF16, (uint16_t *)(void *)a->out + i, CKD_F32, a->now + i, n);
}
static void widen(const arrays *a, size_t i, size_t n) {
    a->k->widen(a->out + i, CKD_BF16, (const uint16_t *)(const void *)a->now + i, n);
}
static void lattice_apply(const arrays *a, size_t i, size_t n) {
    for (size_t at = 0; at < n; at += COLUMNS) {
        lattice_run run = linear_run(a);
        a->k->lattice_apply(a->out + i + at, a->q + i + at, NULL, COLUMNS, &run);
    }
}
static void lattice_apply_low(const arrays *a, size_t i, size_t n) {
    for (size_t at = 0; at < n; at += COLUMNS) {
        lattice_run run = linear_run(a);
        a->k->lattice_apply(a->out + i + at, a->q + i + at, a->low_rank + i + at, COLUMNS, &run);
    }
}
static void lattice_apply_q8(const arrays *a, size_t i, size_t n) {
    for (size_t at = 0; at < n; at += COLUMNS) {
        lattice_run run = linear_run(a);
        a->k->lattice_apply_q8(a->out + i + at, a->few + i + at, COLUMNS, &run);
    }
}
static void lattice_values(const arrays *a, size_t i, size_t n) {
    a->k->lattice_values(a->out + i, a->q + i, n, 0x1p-16f);
}
static void lattice_residual(const arrays *a, size_t i, size_t n) {
    for (size_t at = 0; at < n; at += COLUMNS) {
        lattice_run run = linear_run(a);
        a->k->lattice_residual(a->out + i + at, a->now + i + at, a->before + i + at, NULL, COLUMNS, &run);
    }
}
static void quantise(const arrays *a, size_t i, size_t n) {
    static const float up[3] = {0.7f, 0.6f, 0.55f};
    a->k->quantise(a->levels + i, a->now + i, up, n);
}
static void level_apply(const arrays *a, size_t i, size_t n) {
    for (size_t at = 0; at < n; at += COLUMNS) {
        level_run run = second_run(a);
        a->k->level_apply(a->out + i + at, a->q + i + at, COLUMNS, &run);
    }
}
static void level_quantise(const arrays *a, size_t i, size_t n) {
    for (size_t at = 0; at < n; at += COLUMNS) {
        level_run run = second_run(a);
        a->k->level_quantise(a->levels + i + at, a->now + i + at, a->before + i + at, 0.6f, COLUMNS, &run);
    }
}
static void level_of(const arrays *a, size_t i, size_t n) {
    a->k->level_of(a->levels + i, a->now + i, n);
}
static void products(const arrays *a, size_t i, size_t n) {
    a->k->products(a->out + i, a->factor, a->low_rank, n / COLUMNS, RANK, COLUMNS);
}

static const float most[2] = {1e30f, 1e30f};

static void sums_of(const arrays *a, size_t i, size_t n) {
    lattice_sums s = LATTICE_SUMS_INIT;
    a->k->sums_of(&s, &(sums_run){a->now + i, a->before + i, a->step + i, 1, most, true}, n);
}
static void sums_of_error(const arrays *a, size_t i, size_t n) {
    lattice_sums s = LATTICE_SUMS_INIT;
    a->k->sums_of(&s, &(sums_run){a->now + i, a->before + i, NULL, 1, most, false}, n);
}
static void moment_row(const arrays *a, size_t i, size_t n) {
    double sums[2] = {0, 0};
    a->k->moment_row(sums, a->now + i, false, 1e30f, n);
}
static void moment_columns(const arrays *a, size_t i, size_t n) {
    double sum[COLUMNS] = {0}, scales[COLUMNS] = {0}, scale[GROUP] = {1, 1, 1, 1, 1, 1, 1, 1};
    uint32_t count[COLUMNS] = {0};
    moment_sums to = {sum, scales, count};
    for (size_t at = 0; at < n; at += GROUP * COLUMNS) {
        a->k->moment_columns(&to, &(moment_rows){a->now + i + at, COLUMNS, GROUP, scale, false, 1e30f},
                             COLUMNS);
    }
}
static void quantise_q8(const arrays *a, size_t i, size_t n) {
    static const float up[3] = {0.7f, 0.6f, 0.55f};
    level_sums s = {{0}, {0}};
    a->k->quantise_q8((int8_t *)a->levels + i, &s, a->now + i, up, n);
}

static void quantise_run(const arrays *a, size_t i, size_t n) {
    static const float up[3] = {0.7f, 0.6f, 0.55f};
    for (size_t at = 0; at < n; at += COLUMNS) {
        lattice_run run = linear_run(a);
        a->k->quantise_run((int8_t *)a->levels + i + at, a->now + i + at, a->before + i + at, up, COLUMNS,
                           &run);
    }
}
static void error_of(const arrays *a, size_t i, size_t n) {
    error_sums s = {0};
    a->k->error_of(&s, a->now + i, a->before + i, n);
}

/* lattice_apply_q8: an eighth of its integers is not zero, so it touches two thirds of the groups of eight. */
static const operation operations[] = {{"memcpy", 8, copy},
                                       {"ordered_residual f32", 12, ordered_residual},
                                       {"ordered_apply f32", 12, ordered_apply},
                                       {"rotate_sign f32", 8, rotate_sign},
                                       {"unrotate_sign f32", 8, unrotate_sign},
                                       {"magnitude_context f32", 5, magnitude_context},
                                       {"cast f32 to bf16", 6, cast},
                                       {"widen bf16", 6, widen},
                                       {"lattice_apply", 12, lattice_apply},
                                       {"lattice_apply, low rank", 16, lattice_apply_low},
                                       {"lattice_apply_q8", 1 + 8 * 0.66, lattice_apply_q8},
                                       {"lattice_values", 8, lattice_values},
                                       {"lattice_residual", 12, lattice_residual},
                                       {"quantise", 8, quantise},
                                       {"level_apply", 12, level_apply},
                                       {"level_quantise", 12, level_quantise},
                                       {"level_of", 8, level_of},
                                       {"sums_of, all", 12, sums_of},
                                       {"sums_of, differences", 8, sums_of_error},
                                       {"moment_row", 4, moment_row},
                                       {"moment_columns", 4, moment_columns},
                                       {"quantise_q8", 5, quantise_q8},
                                       {"quantise_run", 9, quantise_run},
                                       {"error_of", 8, error_of},
                                       {"products, rank 64", 4, products}};
#define OPERATIONS (sizeof(operations) / sizeof(operations[0]))

static void *array(size_t n, size_t size) {
    return bench_allocated(malloc(n * size));
}

static arrays arrays_new(size_t n) {
    uint64_t seed = 88172645463325252u;
    arrays a = {kernels_cpu(), array(n, 4), array(n, 4), array(n, 4), array(n, 4), array(SLICE * RANK, 4),
                array(n, 4),   array(n, 4), array(n, 4), array(n, 4), array(n, 1)};
    for (size_t i = 0; i < n; i++) {
        a.before[i] = bench_normal(&seed);
        a.now[i] = a.before[i] + 0.01f * bench_normal(&seed);
        a.out[i] = a.before[i];
        a.low_rank[i] = (float)(int32_t)(4 * bench_normal(&seed));
        a.q[i] = (int32_t)(1.5f * bench_normal(&seed));
        a.few[i] = (int8_t)(seed % 8 == 0 ? 1 : 0);
        a.step[i] = 1;
        a.column[i] = 0;
    }
    for (size_t i = 0; i < SLICE * RANK; i++) {
        a.factor[i] = (float)(int32_t)(4 * bench_normal(&seed));
    }
    return a;
}

static void arrays_free(arrays *a) {
    void *const all[] = {a->now,  a->before, a->out,    a->low_rank, a->factor,
                         a->step, a->q,      a->levels, a->column,   a->few};
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
        free(all[i]);
    }
}

typedef struct turn {
    const arrays *a;
    const operation *what;
} turn;

static ckd_status run_slice(void *context, size_t index, uint32_t worker, ckd_error *err) {
    (void)worker;
    (void)err;
    turn *t = context;
    t->what->run(t->a, index * SLICE, SLICE);
    return CKD_OK;
}

/* Seconds of one operation over all elements: processor time of one core, or wall clock of all. */
static double time_of(thread_pool *pool, const arrays *a, const operation *what, size_t n) {
    turn t = {a, what};
    double start = pool_threads(pool) > 1 ? bench_seconds() : bench_cpu_seconds();
    pool_run(pool, n / SLICE, run_slice, &t, NULL);
    return (pool_threads(pool) > 1 ? bench_seconds() : bench_cpu_seconds()) - start;
}

void bench_operations(const bench_plan *plan) {
    arrays a = arrays_new(plan->elements);
    thread_pool *pools[2];
    double seconds[2][MAX_OPERATIONS][BENCH_MAX_REPEATS], median[2][MAX_OPERATIONS];
    if (pool_create(&pools[0], 1, NULL) != CKD_OK || pool_create(&pools[1], 0, NULL) != CKD_OK) {
        bench_die("threads", "they cannot be started");
    }
    for (int repeat = -1; repeat < plan->repeats; repeat++) { /* one to warm up */
        for (size_t i = 0; i < OPERATIONS; i++) {
            for (int p = 0; p < 2; p++) {
                seconds[p][i][repeat < 0 ? 0 : repeat] =
                    time_of(pools[p], &a, &operations[i], plan->elements);
            }
        }
    }
    fprintf(plan->json, ",\n \"kernels\": \"%s\", \"cores\": %u, \"elements\": %zu, \"operations\": [",
            a.k->name, pool_threads(pools[1]), plan->elements);
    printf(
        "\n%s; %zu elements; all: %u cores, wall clock\n\n| operation | ns/element | GB/s | of memcpy | ns at "
        "memcpy's speed | all: GB/s | of memcpy |\n|---|---|---|---|---|---|---|\n",
        a.k->name, plan->elements, pool_threads(pools[1]));
    for (size_t i = 0; i < OPERATIONS; i++) {
        double speed[2];
        for (int p = 0; p < 2; p++) {
            median[p][i] = bench_median(seconds[p][i], plan->repeats) / (double)plan->elements;
            speed[p] = operations[i].bytes / median[p][i] * 1e-9;
        }
        double copied = operations[0].bytes / median[0][0] * 1e-9,
               all = operations[0].bytes / median[1][0] * 1e-9;
        printf("| %s | %.2f | %.2f | %.2f | %.2f | %.2f | %.2f |\n", operations[i].name, median[0][i] * 1e9,
               speed[0], speed[0] / copied, operations[i].bytes / copied, speed[1], speed[1] / all);
        fprintf(
            plan->json,
            "%s\n  {\"name\": \"%s\", \"bytes\": %.2f, \"ns\": %.4f, \"gb_per_s\": %.3f, \"of_memcpy\": %.3f, "
            "\"floor_ns\": %.4f, \"all_gb_per_s\": %.3f, \"all_of_memcpy\": %.3f}",
            i ? "," : "", operations[i].name, operations[i].bytes, median[0][i] * 1e9, speed[0],
            speed[0] / copied, operations[i].bytes / copied, speed[1], speed[1] / all);
    }
    fprintf(plan->json, "]");
    pool_destroy(pools[0]);
    pool_destroy(pools[1]);
    arrays_free(&a);
}
