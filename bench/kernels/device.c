/*
 * Each operation of a device's backend, and transfers between device and pinned memory, beside the device's own copy.
 */
#include <stdlib.h>
#include <string.h>

#include "bench/kernels/kernels.h"
#include "bench/support/support.h"
#include "engine/device/internal.h"
#include "kernels/device_open.h"
#include "kernels/scalar_lattice.h"

enum { COLUMNS = 4096, PANELS = 16, RUNS = 4, RANK = 64 };

typedef struct arrays {
    const device_backend *backend;
    device_queue queue;
    uint64_t n;
    float *now, *parent_values, *out, *row, *column;
    int8_t *few;
    uint32_t *words, *packed; /* packed: as integers travel to a device, 2 bits each */
    double *rows, *columns;
    uint64_t *small; /* counters, sums, hashes */
    void *factors;   /* a tile's, rank 64, in floats or bytes */
    device_element_at *other;
    void *pinned;
    bench_streams *streams;
    device_failure why;
} arrays;

typedef struct operation {
    const char *name;
    double bytes; /* that it must read and write per element */
    device_result (*run)(arrays *a);
} operation;

static void must(const arrays *a, device_result result) {
    if (result != DEVICE_DONE) {
        bench_die(a->why.call, a->why.reason);
    }
}

/* ---- operations ---- */

static device_result copy(arrays *a) {
    return a->backend->copy(&a->queue, a->out, a->now, a->n * sizeof(float), DEVICE_ON_DEVICE, &a->why);
}
static device_result to_host(arrays *a) {
    return a->backend->copy(&a->queue, a->pinned, a->now, a->n * sizeof(float), DEVICE_TO_HOST, &a->why);
}
static device_result from_host(arrays *a) {
    return a->backend->copy(&a->queue, a->out, a->pinned, a->n * sizeof(float), DEVICE_TO_DEVICE, &a->why);
}
static device_result elements(arrays *a, device_operation which, ckd_dtype from, ckd_dtype to) {
    device_elements what = {which, from, to, NULL};
    device_span whole_span = {a->out, a->now, a->parent_values, NULL, a->n};
    bool known;
    return a->backend->elements(&a->queue, &known, &what, &whole_span, 1, &a->why);
}
static device_result residual(arrays *a) {
    return elements(a, DEVICE_RESIDUAL, CKD_F32, CKD_DTYPE_NONE);
}
static device_result rotate(arrays *a) {
    return elements(a, DEVICE_ROTATE, CKD_F32, CKD_DTYPE_NONE);
}
static device_result context(arrays *a) {
    return elements(a, DEVICE_CONTEXT, CKD_F32, CKD_DTYPE_NONE);
}
static device_result cast(arrays *a) {
    return elements(a, DEVICE_CAST, CKD_F32, CKD_BF16);
}
static device_result step(arrays *a) {
    static const step_rule rule = {
        17, {.9, .1, .95, .05, .99997, 3e-5, 3e-4, .97, 1e-8, .99, .99, 3e-4, .1, .9, .9}};
    device_elements what = {DEVICE_STEP, CKD_F32, CKD_DTYPE_NONE, &rule};
    device_span whole_span = {a->out, a->now, a->parent_values, a->parent_values, a->n};
    bool known;
    return a->backend->elements(&a->queue, &known, &what, &whole_span, 1, &a->why);
}
static device_result hash(arrays *a) {
    device_hash_span all = {a->now, a->n * sizeof(float), a->small};
    return a->backend->hash(&a->queue, &all, 1, &a->why);
}

static device_tile tile_of(const arrays *a) {
    return (device_tile){.now = a->now,
                         .parent_values = a->parent_values,
                         .values = a->out,
                         .q8 = a->few,
                         .row_step = a->row,
                         .column_step = a->column,
                         .count = a->n,
                         .columns = COLUMNS,
                         .unit = 0x1p-16f,
                         .per_unit = 0x1p16f,
                         .low_rank_unit = 1,
                         .offset = {0.1f, 0.05f, 0},
                         .up = {0.6f, 0.55f, 0.5f},
                         .sums = (device_level_sums *)a->small};
}
static device_result quantise(arrays *a) {
    device_tile t = tile_of(a);
    return a->backend->quantise(&a->queue, &t, &a->why);
}
static device_result move(arrays *a) {
    device_tile t = tile_of(a);
    return a->backend->move(&a->queue, &t, &a->why);
}
static device_result move_packed(arrays *a) {
    device_tile t = tile_of(a);
    t.q8 = NULL;
    t.packed = a->packed;
    return a->backend->move(&a->queue, &t, &a->why);
}
static device_result histogram(arrays *a) {
    device_residuals r = {tile_of(a), NULL, (uint32_t *)(void *)a->small, 32, 1023};
    return a->backend->residuals(&a->queue, &r, &a->why);
}
static device_result pack(arrays *a) {
    device_packing p = {a->few, a->n, a->words, a->other, 1024, a->small};
    return a->backend->pack(&a->queue, &p, &a->why);
}
static device_result sums(arrays *a) {
    device_pass p = {.now = a->now,
                     .parent_values = a->parent_values,
                     .weight = a->column,
                     .row_weight = a->row,
                     .count = a->n,
                     .columns = COLUMNS,
                     .max = {3e38f, 3e38f},
                     .lattice = true,
                     .blocks = (device_sums *)(void *)(a->small + 64),
                     .all = (device_sums *)(void *)a->small};
    return a->backend->sums(&a->queue, &p, &a->why);
}
static device_result row_sums(arrays *a) {
    device_pass p = {.now = a->now,
                     .count = a->n,
                     .columns = COLUMNS,
                     .max = {3e38f, 3e38f},
                     .magnitudes = true,
                     .row = a->rows,
                     .row_count = a->rows + a->n / COLUMNS,
                     .blocks = (device_sums *)(void *)(a->small + 64),
                     .all = (device_sums *)(void *)a->small};
    return a->backend->sums(&a->queue, &p, &a->why);
}
static device_result column_sums(arrays *a) {
    device_columns c = {.now = a->now,
                        .count = a->n,
                        .columns = COLUMNS,
                        .panels = PANELS,
                        .max = 3e38f,
                        .magnitudes = true,
                        .sum = a->columns,
                        .count_of = (uint32_t *)(void *)(a->columns + PANELS * COLUMNS)};
    return a->backend->columns(&a->queue, &c, &a->why);
}
static device_result errors(arrays *a) {
    device_errors e = {.given = a->now,
                       .decoded = a->out,
                       .count = a->n,
                       .blocks = (device_sums *)(void *)(a->small + 64),
                       .all = (device_sums *)(void *)a->small};
    return a->backend->errors(&a->queue, &e, &a->why);
}

/* The row factor of the tile, followed by its column factor. */
static device_result product(arrays *a) {
    const float *left = a->factors;
    device_product p = {.sums = a->out,
                        .left = left,
                        .right = left + a->n / COLUMNS * RANK,
                        .rows = a->n / COLUMNS,
                        .columns = COLUMNS,
                        .rank = RANK,
                        .right_transposed = true};
    return a->backend->product(&a->queue, &p, &a->why);
}
static device_result byte_product(arrays *a) {
    const int8_t *left = a->factors;
    device_byte_product p = {.sums = (int32_t *)(void *)a->out,
                             .left = left,
                             .right = left + a->n / COLUMNS * RANK,
                             .rows = a->n / COLUMNS,
                             .columns = COLUMNS,
                             .rank = RANK};
    bool known;
    device_result result = a->backend->byte_product(&a->queue, &known, &p, &a->why);
    if (result == DEVICE_DONE && !known) {
        bench_die("byte_product", "the device has no products of bytes");
    }
    return result;
}

static device_result classify(arrays *a) {
    return bench_streams_classify(a->streams);
}
static device_result write_streams(arrays *a) {
    return bench_streams_write(a->streams);
}
static device_result read_streams(arrays *a) {
    return bench_streams_read(a->streams);
}

static const operation operations[] = {{"copy on the device", 8, copy},
                                       {"copy to pinned memory", 4, to_host},
                                       {"copy from pinned memory", 4, from_host},
                                       {"ordered_residual, f32", 12, residual},
                                       {"rotate_sign, f32", 8, rotate},
                                       {"magnitude_context, f32", 5, context},
                                       {"cast, f32 to bf16", 6, cast},
                                       {"optimizer_step, AdamW", 12, step},
                                       {"content hash", 4, hash},
                                       {"sums of a tile", 8, sums},
                                       {"sums of its rows", 4, row_sums},
                                       {"sums of its columns", 4, column_sums},
                                       {"histogram of residuals", 8, histogram},
                                       {"residual and quantise", 9, quantise},
                                       {"pack", 1.25, pack},
                                       {"dequantise and apply", 9, move},
                                       {"dequantise and apply, packed", 8.28, move_packed},
                                       {"errors", 8, errors},
                                       /* bytes that they write */
                                       {"products of factors, rank 64, f32", 4, product},
                                       {"products of factors, rank 64, i8", 4, byte_product},
                                       /* bytes of raw state, whatever else they read and write */
                                       {"classes and their counts, raw state", 4, classify},
                                       {"dense streams written, raw state", 4, write_streams},
                                       {"dense streams read, raw state", 4, read_streams}};
enum { OPERATIONS = sizeof(operations) / sizeof(operations[0]) };

/* ---- arrays ---- */

static void *on_device(arrays *a, size_t byte_count) {
    void *memory = NULL;
    must(a, a->backend->allocate(&memory, a->queue.device, byte_count, &a->why));
    must(a, a->backend->zero(&a->queue, memory, byte_count, &a->why));
    return memory;
}

static void fill(arrays *a, float *to, uint64_t n, float mean, float scale, uint64_t seed) {
    float *host = bench_allocated(malloc(n * sizeof(float)));
    for (uint64_t i = 0; i < n; i++) {
        host[i] = mean + scale * bench_normal(&seed);
    }
    must(a, a->backend->copy(&a->queue, to, host, n * sizeof(float), DEVICE_TO_DEVICE, &a->why));
    must(a, a->backend->finish(&a->queue, &a->why));
    free(host);
}

/* Packs 0, 1 and -1, the integers of most deltas, and copies them to the device. */
static void send_packed(arrays *a, uint64_t seed) {
    int8_t *integers = bench_allocated(malloc(a->n));
    uint32_t *packed = bench_allocated(malloc(device_pack_heads(a->n) + a->n + DEVICE_GROUP));
    pack_integers from = {NULL, integers, a->n, false, kernels_cpu()};
    for (uint64_t i = 0; i < a->n; i++) {
        float x = bench_normal(&seed);
        integers[i] = (int8_t)((x > 1) - (x < -1));
    }
    uint64_t size = device_pack_measure(packed, &from);
    device_pack(packed, &from);
    a->packed = on_device(a, size);
    must(a, a->backend->copy(&a->queue, a->packed, packed, size, DEVICE_TO_DEVICE, &a->why));
    must(a, a->backend->finish(&a->queue, &a->why));
    free(integers);
    free(packed);
}

static void arrays_begin(arrays *a, uint64_t n) {
    a->n = n;
    a->now = on_device(a, n * sizeof(float));
    a->parent_values = on_device(a, n * sizeof(float));
    a->out = on_device(a, n * sizeof(float));
    a->few = on_device(a, n);
    a->words = on_device(a, n / 4);
    a->factors = on_device(a, (n / COLUMNS + COLUMNS) * RANK * sizeof(float));
    a->row = on_device(a, n / COLUMNS * sizeof(float));
    a->column = on_device(a, COLUMNS * sizeof(float));
    a->rows = on_device(a, 2 * n / COLUMNS * sizeof(double));
    a->columns = on_device(a, 2 * PANELS * COLUMNS * sizeof(double));
    a->small = on_device(a, n / 64 + (1 << 20));
    a->other = on_device(a, 1024 * sizeof(*a->other));
    must(a, a->backend->allocate_pinned(&a->pinned, a->queue.device, n * sizeof(float), &a->why));
    memset(a->pinned, 0, n * sizeof(float));
    fill(a, a->now, n, 0, 0.02f, 1);
    fill(a, a->parent_values, n, 0, 0.0201f,
         1); /* the same numbers, slightly larger, as after some training */
    send_packed(a, 5);
    fill(a, a->row, n / COLUMNS, 16, 0, 3);
    fill(a, a->column, COLUMNS, 1, 0, 3);
    a->streams = bench_streams_begin(a->backend, &a->queue, a->now, a->parent_values, n);
}

static void arrays_end(arrays *a) {
    void *const all[] = {a->now,  a->parent_values, a->out,   a->few,   a->words,   a->row,   a->column,
                         a->rows, a->columns,       a->small, a->other, a->factors, a->packed};
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
        a->backend->release(a->queue.device, all[i]);
    }
    bench_streams_end(a->streams);
    a->backend->release_pinned(a->queue.device, a->pinned);
    a->backend->queue_close(&a->queue);
}

/* ---- time ---- */

/* The mean of RUNS in a row, so that launching counts for little. */
static double time_of(arrays *a, const operation *what) {
    double start = bench_seconds();
    for (int i = 0; i < RUNS; i++) {
        must(a, what->run(a));
    }
    must(a, a->backend->finish(&a->queue, &a->why));
    return (bench_seconds() - start) / RUNS;
}

static void print(const bench_plan *plan, const arrays *a, double seconds[OPERATIONS][BENCH_MAX_REPEATS],
                  const device_info *about) {
    double copied = 0;
    fprintf(plan->json, ",\n \"device\": \"%s\", \"device_elements\": %llu, \"device_operations\": [",
            about->name, (unsigned long long)a->n);
    printf(
        "\n%s, %u processors; %llu elements, f32\n\n| operation | bytes | GB/s | of the device's copy |\n|---|---|---|---|\n",
        about->name, about->processors, (unsigned long long)a->n);
    for (size_t i = 0; i < OPERATIONS; i++) {
        double speed = operations[i].bytes * (double)a->n / bench_median(seconds[i], plan->repeats) * 1e-9;
        copied = i ? copied : speed;
        printf("| %s | %.2f | %.1f | %.2f |\n", operations[i].name, operations[i].bytes, speed,
               speed / copied);
        fprintf(plan->json,
                "%s\n  {\"name\": \"%s\", \"bytes\": %.2f, \"gb_per_s\": %.2f, \"of_copy\": %.3f}",
                i ? "," : "", operations[i].name, operations[i].bytes, speed, speed / copied);
    }
    fprintf(plan->json, "]");
}

const char *bench_no_device(int device) {
    static ckd_error err;
    static device_failure why;
    device_info about;
    const device_backend *backend = device_backend_open(&err);
    if (!backend) {
        return err.message;
    }
    return backend->describe(&about, device, &why) == DEVICE_DONE ? NULL : why.reason;
}

void bench_device(const bench_plan *plan) {
    static double seconds[OPERATIONS][BENCH_MAX_REPEATS];
    arrays a = {.backend = device_backend_open(NULL)};
    device_info about;
    must(&a, a.backend->describe(&about, plan->device, &a.why));
    must(&a, a.backend->queue_open(&a.queue, plan->device, false, &a.why));
    arrays_begin(&a, plan->elements / COLUMNS * COLUMNS);
    for (int repeat = -1; repeat < plan->repeats; repeat++) { /* one to warm up */
        for (size_t i = 0; i < OPERATIONS; i++) {
            seconds[i][repeat < 0 ? 0 : repeat] = time_of(&a, &operations[i]);
        }
    }
    print(plan, &a, seconds, &about);
    arrays_end(&a);
}
