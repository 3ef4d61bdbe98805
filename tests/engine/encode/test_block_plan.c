/*
 * engine/encode/encode.h: the rows and columns of regions, plans for blocks without a parent and as deltas, and the
 * values that their streams decode to.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "tests/support/xorshift.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/encode/internal.h"

static symbols_workspace *work, *reading;
static block_plan plan; /* one plan for all blocks, as each worker has */

static int set_up(void **state) {
    (void)state;
    if (symbols_workspace_create(&work, NULL) != CKD_OK ||
        symbols_workspace_create(&reading, NULL) != CKD_OK) {
        return -1;
    }
    block_plan_init(&plan, kernels_cpu(), work);
    return 0;
}

static int tear_down(void **state) {
    (void)state;
    block_plan_free(&plan);
    symbols_workspace_free(work);
    symbols_workspace_free(reading);
    return 0;
}

/* ---- rows and columns ---- */

static void check_grid(uint32_t ndim, const uint64_t *shape, const ckd_region *region, uint64_t first,
                       uint64_t columns, uint64_t phase) {
    geometry g;
    assert_true(geometry_init(&g, ndim, shape));
    uint64_t elements;
    assert_true(region_count(&elements, &g, region));
    symbols_grid grid = block_grid(&g, region, first);
    assert_int_equal(grid.columns, columns);
    assert_int_equal(grid.phase, phase);
}

#define WHOLE(columns, phase, first, ...)                                                                  \
    check_grid(sizeof((uint64_t[]){__VA_ARGS__}) / 8, (uint64_t[]){__VA_ARGS__}, &(ckd_region){.kind = 0}, \
               first, columns, phase)

static void test_grids_of_whole_tensors(void **state) {
    (void)state;
    check_grid(0, NULL, &(ckd_region){.kind = CKD_REGION_WHOLE}, 0, 1, 0); /* a scalar */
    WHOLE(100, 0, 0, 100);
    WHOLE(100, 37, 37, 100);
    WHOLE(7, 0, 0, 7);
    WHOLE(64, 0, 0, 10, 64);
    WHOLE(64, 5, 64 * 3 + 5, 10, 64);
    WHOLE(32, 0, 0, 10, 32);
    WHOLE(310, 33, 33, 10, 31); /* rows of 31 are too short and are joined */
    WHOLE(144, 0, 0, 64, 16, 3, 3);
    WHOLE(144, 262144 % 144, 262144, 512, 16, 3, 3);
    WHOLE(48, 262144 % 48, 262144, 512, 512, 3, 48);
    WHOLE(49, 1, 49 * 2 + 1, 96, 48, 7, 7);
    WHOLE(768, 256, 262144, 50304, 768);
    WHOLE(40, 0, 0, 2, 3, 40);
    WHOLE(36, 0, 0, 1, 4, 9);
    WHOLE(1, 0, 0, 1, 1, 1);
    WHOLE(0, 0, 0, 0, 7);
    WHOLE(0, 0, 0, 5, 0, 7);
    WHOLE(70, 0, 0, 0, 70); /* no elements, although there is a row length */
}

static void test_grids_of_regions(void **state) {
    (void)state;
    uint64_t matrix[] = {100, 256}, kernel[] = {64, 32, 3, 3};
    ckd_region box = {.kind = CKD_REGION_BOX, .offsets = {10, 64}, .lengths = {50, 64}};
    check_grid(2, matrix, &box, 0, 64, 0);
    check_grid(2, matrix, &box, 64 * 7 + 3, 64, 3);
    ckd_region narrow = {.kind = CKD_REGION_BOX, .offsets = {0, 0}, .lengths = {100, 8}};
    check_grid(2, matrix, &narrow, 0, 800, 0);
    ckd_region which_part = {.kind = CKD_REGION_BOX, .offsets = {0, 8, 0, 0}, .lengths = {64, 8, 3, 3}};
    check_grid(4, kernel, &which_part, 75, 72, 3);
    ckd_region flat = {.kind = CKD_REGION_FLAT, .start = 1000, .count = 10000};
    check_grid(2, matrix, &flat, 0, 256, 1000 % 256);
    check_grid(2, matrix, &flat, 300, 256, 1300 % 256);
    check_grid(4, kernel, &flat, 17, 288, 1017 % 288);
    check_grid(1, (uint64_t[]){30000}, &flat, 17, 30000, 1017);
}

/* ---- blocks ---- */

typedef enum change {
    UNCHANGED,
    CLOSE,   /* a delta is clearly smaller */
    SIMILAR, /* a delta is about as large */
    FAR,     /* unrelated to the previous values */
    CHANGES
} change;

/* A normal variate by the method of Box and Muller. */
static double normal(void) {
    double u = ((double)(next_random() >> 11) + 0.5) * 0x1p-53, v = (double)(next_random() >> 11) * 0x1p-53;
    return sqrt(-2 * log(u)) * cos(6.283185307179586 * v);
}

static void store(uint8_t *to, ckd_dtype dtype, size_t i, double v) {
    float f = (float)v;
    uint32_t bits;
    memcpy(&bits, &f, 4);
    int32_t whole = (1 << 24) + (int32_t)(fmax(-16, fmin(1000, v)) * 1e6);
    uint8_t byte = (uint8_t)(128 + (int)(fmax(-1, fmin(1, 10 * v)) * 100));
    uint16_t half = (uint16_t)(bits >> 16);
    switch (dtype) {
    case CKD_F64:
        memcpy(to + 8 * i, &v, 8);
        break;
    case CKD_F32:
        memcpy(to + 4 * i, &f, 4);
        break;
    case CKD_BF16:
        memcpy(to + 2 * i, &half, 2);
        break;
    case CKD_I32:
        memcpy(to + 4 * i, &whole, 4);
        break;
    default:
        to[i] = byte;
    }
}

/* How large the change is relative to the value, so that a delta takes about as many bytes. */
static double similar(ckd_dtype dtype) {
    return dtype == CKD_U8 || dtype == CKD_BF16 ? 0.3 : 0.8;
}

typedef struct block {
    ckd_dtype dtype;
    size_t count, size;
    symbols_grid grid;
    uint8_t *values, *previous; /* allocated without slack, so that a sanitizer sees overruns */
} block;

/* Weights whose rows and columns differ in scale. */
static block make(ckd_dtype dtype, size_t count, change how, symbols_grid grid) {
    size_t size = count * ckd_dtype_size(dtype);
    block b = {dtype, count, size, grid, malloc(size), malloc(size)};
    double scale[1024];
    assert_true(b.values && b.previous);
    for (size_t i = 0; i < 1024; i++) {
        scale[i] = 0.02 * exp(0.5 * normal());
    }
    for (size_t i = 0; i < count; i++) {
        size_t at = i + (size_t)grid.phase;
        double s = scale[at / grid.columns % 512] * scale[512 + at % grid.columns % 512] * 50;
        double before = s * normal(), by = how == CLOSE ? 1e-3 : similar(dtype);
        double now = how == UNCHANGED ? before : before * (1 + by * normal());
        store(b.previous, dtype, i, before);
        store(b.values, dtype, i, how == FAR ? s * normal() : now);
    }
    return b;
}

static void block_free(block *b) {
    free(b->values);
    free(b->previous);
}

static bool is_float(ckd_dtype dtype) {
    return dtype >= CKD_F64 && dtype <= CKD_F8_E5M2;
}

/* Decodes a stream as a reader does and compares the values. Returns its size. */
static size_t check_stream(const block *b, bool delta) {
    size_t capacity = symbols_bound(work, delta);
    uint8_t *stream = malloc(capacity + 1), *got = malloc(b->size), *context = malloc(b->count);
    assert_true(stream && got && context);
    stream[capacity] = 0xa5;
    size_t size = block_plan_encode(&plan, delta, stream, capacity);
    assert_true(size > 0 && size <= capacity && stream[capacity] == 0xa5);
    assert_int_equal(block_plan_encode(&plan, delta, stream, size - 1), 0);
    assert_int_equal(block_plan_encode(&plan, delta, stream, size), size);
    const kernels *k = kernels_cpu();
    k->magnitude_context(b->dtype, context, b->previous, b->count);
    assert_int_equal(symbols_decode(reading,
                                    &(symbols_output){(unsigned)ckd_dtype_size(b->dtype), b->count, got,
                                                      delta ? context : NULL},
                                    stream, size, NULL),
                     CKD_OK);
    if (delta) {
        k->ordered_apply(b->dtype, got, b->previous, got, b->count);
    } else if (is_float(b->dtype)) {
        k->unrotate_sign(b->dtype, got, got, b->count);
    }
    assert_memory_equal(got, b->values, b->size);
    free(context);
    free(got);
    free(stream);
    return size;
}

static bool about(size_t a, size_t b, double which_part) {
    return fabs((double)a - (double)b) <= which_part * (double)b + 64;
}

/* Compares the planned size of a stream with the real one. */
static void check_size(const block *b, bool delta) {
    size_t said = delta ? plan.delta : plan.standalone;
    assert_true(about(said, check_stream(b, delta), 0.004));
}

static const ckd_dtype dtypes[] = {CKD_F32, CKD_BF16, CKD_I32, CKD_U8, CKD_F64};
#define DTYPES     5
#define SAMPLED_AT 16384 /* number of elements */

static ckd_status begin_plan(const block *b, bool try_delta, uint64_t expected) {
    plan_input in = {b->dtype, b->values, b->count, b->grid};
    return block_plan_begin(&plan, &in, try_delta, expected, NULL);
}

/*
 * Plans a delta. The previous values are overwritten and freed after the call, since the plan must not need them any
 * more.
 */
static void plan_delta(const block *b, uint64_t expected) {
    assert_int_equal(begin_plan(b, true, expected), CKD_OK);
    assert_true(plan.standalone > 0 && !plan.delta_planned);
    assert_int_equal(plan.standalone_planned, b->count < SAMPLED_AT);
    uint8_t *previous = malloc(b->size);
    assert_non_null(previous);
    memcpy(previous, b->previous, b->size);
    assert_int_equal(block_plan_delta(&plan, previous, NULL), CKD_OK);
    memset(previous, 0xa5, b->size);
    free(previous);
    assert_true(plan.standalone_planned || plan.delta_planned);
    assert_true(plan.delta > 0 && plan.standalone > 0);
}

static void check_flags(const block *b, change how) {
    if (b->count < SAMPLED_AT) {
        assert_true(plan.standalone_planned && plan.delta_planned);
        return;
    }
    /* If one way wins by far, the other one is not planned. */
    if (how == UNCHANGED || how == CLOSE) {
        assert_true(plan.delta_planned && !plan.standalone_planned);
    } else if (how == FAR) {
        assert_true(plan.standalone_planned && !plan.delta_planned);
    }
}

/* How far an estimate may be off. Rows differ, and a sample may have only four of them. */
static double deviation(const block *b) {
    return b->grid.columns <= 256 ? 0.04 : 0.15;
}

static void check_block(const block *b, change how) {
    plan_delta(b, 0);
    check_flags(b, how);
    if (plan.delta_planned) {
        check_size(b, true);
        assert_true(how == UNCHANGED && b->count >= SAMPLED_AT ? plan.delta_symbols == 0
                                                               : plan.delta_symbols <= b->count);
        assert_true(how == UNCHANGED || b->dtype == CKD_BF16 || b->dtype == CKD_U8 ||
                    plan.delta_symbols == b->count);
    }
    size_t alone = plan.standalone, delta = plan.delta;
    bool estimated = !plan.standalone_planned;
    assert_int_equal(block_plan_as_standalone(&plan, NULL), CKD_OK);
    assert_true(plan.standalone_planned && about(alone, plan.standalone, estimated ? deviation(b) : 0));
    check_size(b, false);
    if (plan.delta_planned) { /* the plan of the delta is still valid */
        assert_int_equal(plan.delta, delta);
        check_size(b, true);
    }
    if (b->count >= 100 && how <= CLOSE) {
        assert_true(plan.delta < plan.standalone);
    }
}

static void test_blocks(void **state) {
    (void)state;
    static const size_t counts[] = {1, 100, 16383, 16384, 20011, 65536, 262144};
    static const symbols_grid grids[] = {{256, 0}, {768, 100}, {1000, 999}, {64, 7}};
    for (size_t t = 0; t < DTYPES; t++) {
        for (size_t c = 0; c < sizeof(counts) / sizeof(counts[0]); c++) {
            for (int how = 0; how < CHANGES; how++) {
                block b = make(dtypes[t], counts[c], (change)how, grids[(t + c + (size_t)how) % 4]);
                check_block(&b, (change)how);
                block_free(&b);
            }
        }
    }
}

/* Samples are taken from inside the block, whatever its row length. A sanitizer checks more of this. */
static void test_all_samples(void **state) {
    (void)state;
    for (int i = 0; i < 60; i++) {
        size_t count = SAMPLED_AT + next_random() % 8000;
        uint64_t columns = 1 + next_random() % (i % 2 ? 300 : 2 * count);
        symbols_grid grid = {columns, next_random() % columns};
        block b = make(CKD_BF16, count, i % 3 ? CLOSE : FAR, grid);
        check_block(&b, i % 3 ? CLOSE : FAR);
        block_free(&b);
    }
    block b = make(CKD_BF16, SAMPLED_AT, CLOSE, (symbols_grid){1, 0});
    b.grid = (symbols_grid){0, 0}; /* a tensor without rows and columns */
    check_block(&b, CLOSE);
    block_free(&b);
}

/* A size that the caller expects replaces the sample, whether it is right or not. The stream is right in any case. */
static void test_expected(void **state) {
    (void)state;
    for (int how = 0; how < CHANGES; how++) {
        block b = make(CKD_F32, 40000, (change)how, (symbols_grid){200, 0});
        plan_delta(&b, 0);
        assert_int_equal(block_plan_as_standalone(&plan, NULL), CKD_OK);
        const uint64_t right = plan.standalone,
                       expected[] = {right, right * 2, right / 2, 1, UINT64_C(1) << 40};
        for (size_t i = 0; i < 5; i++) {
            plan_delta(&b, expected[i]);
            if (i == 0) {
                check_flags(&b, (change)how);
            }
            if (expected[i] == 1) {
                assert_true(plan.standalone_planned && plan.standalone == right);
            }
            for (int delta = 0; delta < 2; delta++) {
                if (delta ? plan.delta_planned : plan.standalone_planned) {
                    check_size(&b, delta);
                }
            }
        }
        block_free(&b);
    }
}

/* A block with one constant value took almost nothing. This must not be expected once a few elements differ. */
static void test_expected_of_a_constant_block(void **state) {
    (void)state;
    block b = make(CKD_I32, 20000, UNCHANGED, (symbols_grid){200, 0});
    for (size_t i = 0; i < b.count; i++) {
        uint32_t before = 1 << 20, now = before + (i % 700 == 0 ? (uint32_t)next_random() >> 16 : 0);
        memcpy(b.previous + 4 * i, &before, 4);
        memcpy(b.values + 4 * i, &now, 4);
    }
    plan_delta(&b, 17);
    assert_true(plan.delta_planned && plan.delta < 200);
    check_size(&b, true);
    block_free(&b);
}

static void test_without_delta(void **state) {
    (void)state;
    static const size_t counts[] = {1, 100, 16384, 100000};
    for (size_t t = 0; t < DTYPES; t++) {
        for (size_t c = 0; c < 4; c++) {
            block b = make(dtypes[t], counts[c], FAR, (symbols_grid){128, 0});
            uint64_t expected = c % 2 ? 77 : 0;
            assert_int_equal(begin_plan(&b, false, expected), CKD_OK);
            assert_true(plan.standalone_planned && !plan.delta_planned && plan.delta == 0);
            check_size(&b, false);
            block_free(&b);
        }
    }
}

/* The stream uses the grid: second moments take fewer bytes with it. */
static void test_grids_save_bytes(void **state) {
    (void)state;
    block b = make(CKD_F32, 65536, FAR, (symbols_grid){256, 0});
    size_t size[2];
    for (int i = 0; i < 2; i++) {
        b.grid = (symbols_grid){i ? 256 : 0, 0};
        assert_int_equal(begin_plan(&b, false, 0), CKD_OK);
        size[i] = check_stream(&b, false);
    }
    assert_true(size[1] < size[0] - size[0] / 200);
    block_free(&b);
}

/* Samples consist of whole rows, even if the block begins within a row. */
static void test_samples_of_rows(void **state) {
    (void)state;
    block b = make(CKD_F32, 65536, CLOSE, (symbols_grid){512, 256});
    double level[129];
    for (size_t row = 0; row < 129; row++) {
        level[row] = exp(3 * normal());
    }
    for (size_t i = 0; i < b.count; i++) {
        store(b.values, CKD_F32, i, level[(256 + i) / 512] * normal());
    }
    assert_int_equal(begin_plan(&b, true, 0), CKD_OK);
    double estimated = (double)plan.standalone;
    assert_true(!plan.standalone_planned && block_plan_as_standalone(&plan, NULL) == CKD_OK);
    assert_true(fabs(estimated / (double)plan.standalone - 1) < 0.025);
    block_free(&b);
}

/*
 * Signed integers around zero cost as much as their magnitudes, not as unsigned integers over the whole range would.
 */
static void test_integers_of_both_signs(void **state) {
    (void)state;
    static const ckd_dtype signed_dtypes[] = {CKD_I16, CKD_I32, CKD_I64};
    for (size_t t = 0; t < 3; t++) {
        block b = make(signed_dtypes[t], 20000, FAR, (symbols_grid){128, 0});
        size_t width = ckd_dtype_size(b.dtype);
        for (size_t i = 0; i < b.count; i++) {
            int64_t v = (int64_t)(100 * normal());
            memcpy((uint8_t *)b.values + i * width, &v,
                   width); /* little-endian, like every machine that runs the tests */
        }
        assert_int_equal(begin_plan(&b, false, 0), CKD_OK);
        assert_true(check_stream(&b, false) < b.count * 10 / 8);
        /* For unsigned values, low bits that are the same everywhere are not stored. */
        for (size_t i = 0; i < b.count; i++) {
            int64_t v = (int64_t)(next_random() % 256) * 64 + 7;
            memcpy((uint8_t *)b.values + i * width, &v, width);
        }
        assert_int_equal(begin_plan(&b, false, 0), CKD_OK);
        assert_true(check_stream(&b, false) < b.count + 300);
        block_free(&b);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_grids_of_whole_tensors),
        cmocka_unit_test(test_grids_of_regions),
        cmocka_unit_test(test_blocks),
        cmocka_unit_test(test_all_samples),
        cmocka_unit_test(test_expected),
        cmocka_unit_test(test_expected_of_a_constant_block),
        cmocka_unit_test(test_without_delta),
        cmocka_unit_test(test_grids_save_bytes),
        cmocka_unit_test(test_samples_of_rows),
        cmocka_unit_test(test_integers_of_both_signs),
    };
    return cmocka_run_group_tests_name("block plan", tests, set_up, tear_down);
}
