#include "tests/support/device_parity.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include <cmocka.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/hash.h"
#include "engine/lossy/lossy.h"
#include "kernels/scalar_moments.h"
#include "tests/support/device_arrays.h"

/* Mostly values like those of weights and moments. One in 512 is a special value. */
static void fill_floats(array *a, float scale, bool positive) {
    static const float odd[] = {0.0f, -0.0f, 1e-44f, -1e-40f, 3e38f, INFINITY, -INFINITY, NAN};
    float *to = (float *)(void *)a->host;
    for (size_t i = 0; i < a->bytes / sizeof(float); i++) {
        double u = (double)(next_random() >> 11) / 9007199254740992.0 - 0.5;
        double v = (double)(next_random() >> 11) / 9007199254740992.0;
        to[i] = (float)(scale * u * v * v);
        to[i] = positive ? fabsf(to[i]) : to[i];
        to[i] = next_random() % 512 ? to[i] : odd[next_random() % 8];
    }
}

static const size_t counts[] = {0, 1, 31, 32, 33, 255, 256, 257, 1023, 4096, 4099, (1u << 20) + 1};
#define COUNTS      (sizeof(counts) / sizeof(counts[0]))
#define FEW_COUNTS  (COUNTS - 1) /* all but the largest, for tests of many cases */
#define EACH(n, of) for (size_t n##_i = 0, n = counts[0]; n##_i < (of) && (n = counts[n##_i], 1); n##_i++)

/* ---- elements ---- */

typedef void (*reference)(void *to, const array *from, const array *first, const array *second, size_t n);

static device_elements what;
static step_rule rule;

static void on_cpu(void *to, const array *in, size_t n) {
    switch (what.operation) {
    case DEVICE_COPY:
        memcpy(to, in[0].host, n);
        break;
    case DEVICE_RESIDUAL:
        cpu->ordered_residual(what.dtype, to, in[0].host, in[1].host, n);
        break;
    case DEVICE_APPLY:
        cpu->ordered_apply(what.dtype, to, in[0].host, in[1].host, n);
        break;
    case DEVICE_ROTATE:
        cpu->rotate_sign(what.dtype, to, in[0].host, n);
        break;
    case DEVICE_UNROTATE:
        cpu->unrotate_sign(what.dtype, to, in[0].host, n);
        break;
    case DEVICE_CONTEXT:
        cpu->magnitude_context(what.dtype, to, in[0].host, n);
        break;
    case DEVICE_CAST:
        assert_true(cpu->cast(what.to_dtype, to, what.dtype, in[0].host, n));
        break;
    case DEVICE_WIDEN:
        for (uint64_t i = 0; i < n && what.dtype == CKD_I8; i++) {
            float wide = ((const int8_t *)in[0].host)[i];
            memcpy((uint8_t *)to + i * sizeof(wide), &wide, sizeof(wide));
        }
        assert_true(what.dtype == CKD_I8 || cpu->widen(to, what.dtype, in[0].host, n));
        break;
    case DEVICE_STEP:
        assert_true(cpu->optimizer_step(&rule, to, in[0].host, in[1].host, in[2].host, n));
        break;
    }
}

/* Runs two spans in one launch. Their lengths and the alignments of their arrays differ. */
static void compare_elements(size_t n, size_t element, size_t to_element, size_t shift) {
    array in[2][3], to[2];
    device_span spans[2];
    for (int s = 0; s < 2; s++) {
        size_t count = s ? n / 3 : n;
        to[s] = array_new(count, to_element, shift ? (shift + 3) % 5 : 0);
        for (size_t i = 0; i < 3; i++) {
            in[s][i] = array_new(count, element, shift ? (shift + i) % 5 : 0);
            fill_bits(&in[s][i]);
            array_give(&in[s][i]);
        }
        spans[s] = (device_span){to[s].device, in[s][0].device, in[s][1].device, in[s][2].device, count};
    }
    bool known = false;
    must(backend->elements(&queue, &known, &what, spans, 2, &why));
    assert_true(known);
    for (int s = 0; s < 2; s++) {
        uint8_t *want = malloc(to[s].bytes + 1), *got = malloc(to[s].bytes + 1);
        assert_true(want && got);
        on_cpu(want, in[s], (size_t)spans[s].n);
        array_take(&to[s], got);
        assert_memory_equal(got, want, to[s].bytes);
        free(want);
        free(got);
        array_free(&to[s]);
        for (size_t i = 0; i < 3; i++) {
            array_free(&in[s][i]);
        }
    }
}

static bool is_float(ckd_dtype d) {
    return d >= CKD_F64 && d <= CKD_F8_E5M2;
}

static void test_elements(void **state) {
    (void)state;
    static const device_operation all[] = {DEVICE_RESIDUAL, DEVICE_APPLY, DEVICE_ROTATE, DEVICE_UNROTATE,
                                           DEVICE_CONTEXT};
    for (int d = CKD_F64; d <= CKD_BOOL; d++) {
        for (size_t o = 0; o < sizeof(all) / sizeof(all[0]); o++) {
            what = (device_elements){all[o], (ckd_dtype)d, CKD_DTYPE_NONE, NULL};
            bool turns = what.operation == DEVICE_ROTATE || what.operation == DEVICE_UNROTATE;
            if (turns && !is_float(what.dtype)) {
                bool known = true;
                must(backend->elements(&queue, &known, &what, NULL, 0, &why));
                assert_false(known);
                continue;
            }
            size_t size = ckd_dtype_size(what.dtype), to = what.operation == DEVICE_CONTEXT ? 1 : size;
            EACH(n, d == CKD_F32 || d == CKD_BF16 ? COUNTS : FEW_COUNTS) {
                compare_elements(n, size, to, 0);
                compare_elements(n, size, to, 1 + n % 4);
            }
        }
    }
}

static void test_copies(void **state) {
    (void)state;
    what = (device_elements){.operation = DEVICE_COPY, .dtype = CKD_U8};
    EACH(n, COUNTS) {
        compare_elements(n, 1, 1, 0);
        compare_elements(n, 1, 1, 1 + n % 4);
    }
    bool known = true;
    what.dtype = CKD_F32;
    must(backend->elements(&queue, &known, &what, NULL, 0, &why));
    assert_false(known);
}

static void test_casts(void **state) {
    (void)state;
    static const ckd_dtype pairs[][2] = {{CKD_F32, CKD_BF16}, {CKD_F32, CKD_F16}, {CKD_F64, CKD_F32}};
    static const ckd_dtype narrow[] = {CKD_BF16, CKD_F16, CKD_F32, CKD_I8};
    for (size_t shift = 0; shift < 3; shift += 2) {
        for (size_t p = 0; p < 3; p++) {
            what = (device_elements){DEVICE_CAST, pairs[p][0], pairs[p][1], NULL};
            EACH(n, COUNTS) {
                compare_elements(n, ckd_dtype_size(pairs[p][0]), ckd_dtype_size(pairs[p][1]), shift);
            }
        }
        for (size_t p = 0; p < 4; p++) {
            what = (device_elements){DEVICE_WIDEN, narrow[p], CKD_DTYPE_NONE, NULL};
            EACH(n, COUNTS) {
                compare_elements(n, ckd_dtype_size(narrow[p]), sizeof(float), shift);
            }
        }
    }
}

static void test_steps(void **state) {
    (void)state;
    static const uint32_t rules[] = {1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 17, 18, 19, 20, 21, 22, 33,
                                     34, 35, 36, 49, 50, 51, 52, 53, 54, 55, 56, 65, 66, 67, 68, 69};
    static const double usual[STEP_COEFFICIENTS] = {
        .9, .1, .95, .05, 1 - 3e-4 * .1, 3e-5, 3.1e-4, .97, 1e-8, .999, .994, 3e-4, .1, .9, .95};
    memcpy(rule.coefficients, usual, sizeof(usual));
    for (size_t r = 0; r < sizeof(rules) / sizeof(rules[0]); r++) {
        rule.rule = rules[r];
        what = (device_elements){DEVICE_STEP, CKD_F32, CKD_DTYPE_NONE, &rule};
        EACH(n, FEW_COUNTS) {
            compare_elements(n, sizeof(float), sizeof(float), r % 3);
        }
    }
    rule.rule = 23;
    bool known = true;
    must(backend->elements(&queue, &known, &what, NULL, 0, &why));
    assert_false(known);
}

/* ---- hashes ---- */

static void test_hashes(void **state) {
    (void)state;
    static const size_t more[] = {2,    3,    4,    5,    8,    9,    16,   17,    24,   64,
                                  65,   128,  129,  160,  239,  240,  241,  320,   512,  513,
                                  1024, 1025, 1088, 2048, 4095, 4097, 8192, 12345, 65536};
    for (size_t i = 0; i < COUNTS + sizeof(more) / sizeof(more[0]); i++) {
        size_t n = i < COUNTS ? counts[i] : more[i - COUNTS],
               pages = (n + DEVICE_HASH_PAGE - 1) / DEVICE_HASH_PAGE;
        array a = array_new(n, 1, 8 - i % 5), b = array_new(n / 2, 1, i % 3 * 4), to = array_new(pages, 8, 0),
              to_b = array_new(pages, 8, 1);
        fill_bits(&a);
        fill_bits(&b);
        array_give(&a);
        array_give(&b);
        size_t pages_b = (n / 2 + DEVICE_HASH_PAGE - 1) / DEVICE_HASH_PAGE;
        device_hash_span spans[2] = {{a.device, n, (uint64_t *)(void *)to.device},
                                     {b.device, n / 2, (uint64_t *)(void *)to_b.device}};
        must(backend->hash(&queue, spans, 2, &why));
        uint64_t *got = malloc(pages * 8 + 8);
        assert_non_null(got);
        array_take(&to, got);
        for (size_t p = 0; p < pages; p++) {
            size_t left = n - p * DEVICE_HASH_PAGE;
            assert_true(got[p] == hash64(a.host + p * DEVICE_HASH_PAGE,
                                         left < DEVICE_HASH_PAGE ? left : DEVICE_HASH_PAGE));
        }
        hash128 one = hash128_of(got, pages * 8), other = content_hash(a.host, n);
        assert_true(hash128_equal(&one, &other));
        array_take(&to_b, got);
        for (size_t p = 0; p < pages_b; p++) {
            size_t left = n / 2 - p * DEVICE_HASH_PAGE;
            assert_true(got[p] == hash64(b.host + p * DEVICE_HASH_PAGE,
                                         left < DEVICE_HASH_PAGE ? left : DEVICE_HASH_PAGE));
        }
        free(got);
        array_free(&a);
        array_free(&b);
        array_free(&to);
        array_free(&to_b);
    }
}

/* ---- lossy tiles ---- */

typedef struct shape {
    uint64_t count, columns, phase;
} shape;
static const shape shapes[] = {{1, 1, 0},       {31, 31, 0},     {33, 8, 0},     {255, 16, 7},
                               {1024, 32, 0},   {1025, 33, 32},  {4099, 127, 5}, {8192, 256, 0},
                               {70001, 768, 3}, {131072, 512, 0}};
#define SHAPES (sizeof(shapes) / sizeof(shapes[0]))

typedef struct tile {
    shape s;
    uint64_t rows;
    array now, parent_values, low, row, column, few, values, sums;
    device_tile t;
} tile;

/* Replaces the sums of products in f32 by the same sums in int32, as products of bytes give them. */
static void tile_whole(tile *t) {
    int32_t *whole = malloc(t->s.count * sizeof(*whole));
    assert_non_null(whole);
    for (uint64_t i = 0; i < t->s.count; i++) {
        whole[i] = (int32_t)((float *)(void *)t->low.host)[i];
    }
    must(backend->copy(&queue, t->low.device, whole, t->s.count * sizeof(*whole), DEVICE_TO_DEVICE, &why));
    must(backend->finish(&queue, &why));
    free(whole);
    t->t.low_whole = (const int32_t *)(const void *)t->t.low_rank;
    t->t.low_rank = NULL;
}

static void tile_new(tile *t, const shape *s, bool parent_values, bool low, bool column, float unit_log) {
    *t = (tile){.s = *s, .rows = (s->phase + s->count + s->columns - 1) / s->columns};
    size_t shift = s->count % 3;
    t->now = array_new(s->count, 4, shift);
    t->parent_values = array_new(s->count, 4, shift);
    t->low = array_new(s->count, 4, 0);
    t->row = array_new(t->rows, 4, 1);
    t->column = array_new(s->columns, 4, 1);
    t->few = array_new(s->count, 1, shift);
    t->values = array_new(s->count, 4, 2 * shift);
    t->sums = array_new(1, sizeof(device_level_sums), 0);
    fill_floats(&t->now, 0.04f, false);
    fill_floats(&t->parent_values, 0.04f, false);
    for (uint64_t i = 0; i < s->count; i++) {
        ((float *)(void *)t->low.host)[i] = (float)(int32_t)(next_random() % 2001) - 1000;
    }
    for (uint64_t i = 0; i < t->rows; i++) {
        ((float *)(void *)t->row.host)[i] = 16 * scalar_quarter_octaves((int32_t)(next_random() % 9) - 4);
    }
    for (uint64_t i = 0; i < s->columns; i++) {
        ((float *)(void *)t->column.host)[i] = scalar_quarter_octaves((int32_t)(next_random() % 9) - 4);
    }
    const array *given[] = {&t->now, &t->parent_values, &t->low, &t->row, &t->column, &t->sums};
    for (size_t i = 0; i < 6; i++) {
        array_give(given[i]);
    }
    float unit = exp2f(-unit_log);
    t->t = (device_tile){(const float *)(void *)t->now.device,
                         parent_values ? (const float *)(void *)t->parent_values.device : NULL,
                         (float *)(void *)t->values.device,
                         (int8_t *)t->few.device,
                         NULL,
                         low ? (const float *)(void *)t->low.device : NULL,
                         NULL,
                         (const float *)(void *)t->row.device,
                         column ? (const float *)(void *)t->column.device : NULL,
                         s->count,
                         s->columns,
                         s->phase,
                         unit,
                         1 / unit,
                         0.0078125f,
                         {0.125f, 0.0625f, 0.03125f},
                         {0.6f, 0.55f, 0.5f},
                         (device_level_sums *)(void *)t->sums.device,
                         {NULL, NULL, 0, 0, 0, 0}};
}

static void tile_free(tile *t) {
    array *all[] = {&t->now, &t->parent_values, &t->low, &t->row, &t->column, &t->few, &t->values, &t->sums};
    for (size_t i = 0; i < 8; i++) {
        array_free(all[i]);
    }
}

/* The results of the CPU's kernels, computed row by row. */
typedef struct by_rows {
    int32_t *q;
    bool *wide; /* which integers do not fit a byte; NULL: not needed */
    float *values;
    level_sums sums;
    uint64_t misfits;
} by_rows;

static void rows_on_cpu(by_rows *to, const tile *t, const int8_t *few) {
    float *residual = malloc(t->s.columns * sizeof(float));
    float *zeros = calloc(t->s.columns, sizeof(float));
    assert_true(residual && zeros);
    for (uint64_t at = 0; at < t->s.count;) {
        uint64_t place = t->s.phase + at, row = place / t->s.columns, column = place % t->s.columns;
        uint64_t n = t->s.columns - column < t->s.count - at ? t->s.columns - column : t->s.count - at;
        lattice_run run = {.unit = t->t.unit,
                           .per_unit = t->t.per_unit,
                           .row_step = ((float *)(void *)t->row.host)[row],
                           .column_step = t->t.column_step ? (float *)(void *)t->column.host + column : NULL,
                           .low_rank_unit = t->t.low_rank_unit};
        memcpy(run.offset, t->t.offset, sizeof(run.offset));
        const float *parent_values = t->t.parent_values ? (float *)(void *)t->parent_values.host + at : zeros;
        const float *low = t->t.low_rank || t->t.low_whole ? (float *)(void *)t->low.host + at : NULL;
        cpu->lattice_residual(residual, (float *)(void *)t->now.host + at, parent_values, low, n, &run);
        cpu->quantise(to->q + at, residual, t->t.up, n);
        for (uint64_t i = 0; i < n; i++) {
            int32_t level = abs(to->q[at + i]);
            to->misfits += level > 127;
            if (to->wide) {
                to->wide[at + i] = level > 127;
            }
            if (level && level < 128) {
                to->sums.below[level > 2 ? 2 : level - 1] += (double)level - fabs((double)residual[i]);
                to->sums.count[level > 2 ? 2 : level - 1]++;
            } else if (level) {
                to->sums.count[2]++;
            }
        }
        for (uint64_t i = 0; i < n; i++) {
            to->q[at + i] = abs(to->q[at + i]) < 128 ? to->q[at + i] : 0;
        }
        memcpy(to->values + at, parent_values, n * sizeof(float));
        int32_t *q = malloc(n * sizeof(int32_t));
        assert_non_null(q);
        cpu->widen_integers(q, few + at, n);
        cpu->lattice_apply(to->values + at, q, low, n, &run);
        free(q);
        at += n;
    }
    free(residual);
    free(zeros);
}

static void compare_tile(tile *t) {
    int8_t *few = malloc(t->s.count);
    float *values = malloc(t->s.count * sizeof(float));
    by_rows want = {.q = malloc(t->s.count * sizeof(int32_t)), .values = malloc(t->s.count * sizeof(float))};
    assert_true(few && values && want.q && want.values);
    must(backend->quantise(&queue, &t->t, &why));
    must(backend->move(&queue, &t->t, &why));
    device_level_sums sums;
    array_take(&t->few, few);
    array_take(&t->values, values);
    array_take(&t->sums, &sums);
    rows_on_cpu(&want, t, few);
    for (uint64_t i = 0; i < t->s.count; i++) {
        assert_int_equal(few[i], want.q[i]);
    }
    assert_memory_equal(values, want.values, t->s.count * sizeof(float));
    assert_int_equal(sums.misfits, want.misfits);
    for (int w = 0; w < 3; w++) {
        assert_int_equal(sums.count[w], want.sums.count[w]);
        double below = (double)sums.below[w] / 1073741824.0;
        assert_true(fabs(below - want.sums.below[w]) <= 1e-6 * (1 + (double)sums.count[w]));
    }
    free(few);
    free(values);
    free(want.q);
    free(want.values);
}

static void test_tiles(void **state) {
    (void)state;
    for (size_t i = 0; i < SHAPES; i++) {
        for (int how = 0; how < 12; how++) {
            tile t;
            bool whole = how >= 8;
            tile_new(&t, &shapes[i], how & 1, whole || how & 2, whole ? how & 2 : how & 4,
                     how == 5 ? 30 : 14);
            if (whole) {
                tile_whole(&t);
            }
            compare_tile(&t);
            /* In place, and with no integers. */
            t.t.q8 = NULL;
            t.t.values = (float *)(void *)t.parent_values.device;
            t.t.parent_values = t.t.values;
            must(backend->move(&queue, &t.t, &why));
            float *values = malloc(t.s.count * sizeof(float));
            int8_t *none = calloc(t.s.count, 1);
            by_rows want = {.q = malloc(t.s.count * sizeof(int32_t)),
                            .values = malloc(t.s.count * sizeof(float))};
            assert_true(values && none && want.q && want.values);
            array_take(&t.parent_values, values);
            rows_on_cpu(&want, &t, none);
            assert_memory_equal(values, want.values, t.s.count * sizeof(float));
            free(values);
            free(none);
            free(want.q);
            free(want.values);
            tile_free(&t);
        }
    }
}

/* Compares the residuals, and the number of residuals of each magnitude. */
static void compare_residuals(tile *t, bool written) {
    array to = array_new(t->s.count, 4, t->s.count % 2), bins = array_new(DEVICE_BINS, 4, 0);
    array_give(&bins);
    device_residuals r = {t->t, written ? (float *)(void *)to.device : NULL, (uint32_t *)(void *)bins.device,
                          64, 1000};
    must(backend->residuals(&queue, &r, &why));
    float *got = malloc(t->s.count * sizeof(float)), *want = malloc(t->s.columns * sizeof(float)),
          *zeros = calloc(t->s.columns, sizeof(float));
    uint32_t *got_bins = malloc(DEVICE_BINS * 4), *want_bins = calloc(DEVICE_BINS, 4);
    uint16_t *bin = malloc(t->s.columns * 2);
    assert_true(got && want && zeros && got_bins && want_bins && bin);
    array_take(&to, got);
    array_take(&bins, got_bins);
    for (uint64_t at = 0; at < t->s.count;) {
        uint64_t place = t->s.phase + at, row = place / t->s.columns, column = place % t->s.columns;
        uint64_t n = t->s.columns - column < t->s.count - at ? t->s.columns - column : t->s.count - at;
        lattice_run run = {.unit = t->t.unit,
                           .per_unit = t->t.per_unit,
                           .row_step = ((float *)(void *)t->row.host)[row],
                           .column_step = t->t.column_step ? (float *)(void *)t->column.host + column : NULL,
                           .low_rank_unit = t->t.low_rank_unit};
        cpu->lattice_residual(want, (float *)(void *)t->now.host + at,
                              t->t.parent_values ? (float *)(void *)t->parent_values.host + at : zeros,
                              t->t.low_rank || t->t.low_whole ? (float *)(void *)t->low.host + at : NULL, n,
                              &run);
        assert_true(!written || memcmp(got + at, want, n * sizeof(float)) == 0);
        cpu->bins_of(bin, want, 64, 1000, n);
        for (uint64_t i = 0; i < n; i++) {
            want_bins[bin[i]]++;
        }
        at += n;
    }
    assert_memory_equal(got_bins, want_bins, DEVICE_BINS * 4);
    void *all[] = {got, want, zeros, got_bins, want_bins, bin};
    for (size_t i = 0; i < 6; i++) {
        free(all[i]);
    }
    array_free(&to);
    array_free(&bins);
}

static void test_residuals(void **state) {
    (void)state;
    for (size_t i = 0; i < SHAPES * 8; i++) {
        tile t;
        tile_new(&t, &shapes[i / 8], i & 1, i & 2, i & 4, 14);
        compare_residuals(&t, i % 3);
        if (i & 2) {
            tile_whole(&t);
            compare_residuals(&t, i % 3);
        }
        tile_free(&t);
    }
}

static void test_gather(void **state) {
    (void)state;
    enum { N = 5000, SLICES = 40 };
    array from = array_new(N, 4, 1), slices = array_new(SLICES, sizeof(device_slice), 0);
    fill_floats(&from, 1, false);
    device_slice *p = (device_slice *)(void *)slices.host;
    uint32_t all = 0;
    for (uint32_t i = 0; i < SLICES; i++) {
        p[i] = (device_slice){(uint64_t)i * 117, all, i % 7 ? 1 + i * 13 % 400 : 0};
        p[i].n = p[i].first + p[i].n > N ? (uint32_t)(N - p[i].first) : p[i].n;
        all += p[i].n;
    }
    array_give(&from);
    array_give(&slices);
    array to = array_new(all, 4, 0);
    device_gathering g = {(float *)(void *)to.device, (const float *)(void *)from.device,
                          (const device_slice *)(void *)slices.device, SLICES};
    must(backend->gather(&queue, &g, &why));
    float *got = malloc(all * 4);
    assert_non_null(got);
    array_take(&to, got);
    for (uint32_t i = 0; i < SLICES; i++) {
        assert_memory_equal(got + p[i].to, (float *)(void *)from.host + p[i].first, p[i].n * sizeof(float));
    }
    free(got);
    array *arrays[] = {&from, &slices, &to};
    for (size_t i = 0; i < 3; i++) {
        array_free(arrays[i]);
    }
}

/*
 * Compares the packed words and the list of other integers with the definition in kernels/device.h. The list
 * has room for `room` of them.
 */
static void compare_packed(size_t n, uint32_t room, bool aligned) {
    array few = array_new(n, 1, aligned ? 0 : 3), words = array_new((n + 15) / 16, 4, 0),
          other = array_new(room, sizeof(device_element_at), 0), others = array_new(1, 8, 0);
    uint64_t want = 0, count;
    for (size_t i = 0; i < n; i++) {
        int8_t q = next_random() % 8 ? 0 : (int8_t)(next_random() % 2 ? 1 : -1);
        q = next_random() % 50 ? q : (int8_t)(next_random() % 255 - 127);
        ((int8_t *)few.host)[i] = q;
        want += q > 1 || q < -1;
    }
    array_give(&few);
    array_give(&others);
    device_packing p = {(const int8_t *)few.device,
                        n,
                        (uint32_t *)(void *)words.device,
                        (device_element_at *)(void *)other.device,
                        room,
                        (uint64_t *)(void *)others.device};
    must(backend->pack(&queue, &p, &why));
    uint32_t *bits = malloc(words.bytes + 1);
    device_element_at *list = malloc(other.bytes + 1);
    int8_t *got = calloc(n + 1, 1);
    assert_true(bits && list && got);
    array_take(&words, bits);
    array_take(&other, list);
    array_take(&others, &count);
    assert_int_equal(count, want);
    for (size_t i = 0; i < words.bytes / 4 * 16; i++) {
        uint32_t code = bits[i / 16] >> 2 * (i % 16) & 3;
        assert_true(i < n || code == 0);
        if (i < n) {
            int8_t q = ((int8_t *)few.host)[i];
            assert_int_equal(code, q == 0 ? 0 : q == 1 ? 1 : q == -1 ? 2 : 3);
        }
    }
    for (uint64_t i = 0; i < (count < room ? count : room); i++) {
        assert_true(list[i].at < n && got[list[i].at] == 0); /* each is listed once */
        got[list[i].at] = (int8_t)list[i].q;
        assert_int_equal(list[i].q, ((int8_t *)few.host)[list[i].at]);
    }
    free(bits);
    free(list);
    free(got);
    array *arrays[] = {&few, &words, &other, &others};
    for (size_t i = 0; i < 4; i++) {
        array_free(arrays[i]);
    }
}

static void test_packing(void **state) {
    (void)state;
    EACH(n, COUNTS) {
        compare_packed(n, (uint32_t)n, n % 2);
        compare_packed(n, (uint32_t)n / 100, true);
    }
}

/* ---- second moments ---- */

/* Sets integers that do not fit a byte to 0. Returns how many there were. */
static uint64_t no_bytes(int32_t *q, uint64_t n) {
    uint64_t misfits = 0;
    for (uint64_t i = 0; i < n; i++) {
        if (q[i] != LEVEL_ZERO && (q[i] > 127 || q[i] < -127)) {
            q[i] = 0;
            misfits++;
        }
    }
    return misfits;
}

static void compare_levels(const shape *s, bool means, int32_t step) {
    uint64_t rows = (s->phase + s->count + s->columns - 1) / s->columns;
    array now = array_new(s->count, 4, s->count % 2), row = array_new(rows, 4, 0),
          column = array_new(s->columns, 4, 1), few = array_new(s->count, 1, s->count % 2),
          values = array_new(s->count, 4, 0), misfits = array_new(1, 8, 0);
    fill_floats(&now, 1e-6f, s->count % 5 != 0);
    for (uint64_t i = 0; i < rows; i++) {
        ((int32_t *)(void *)row.host)[i] = 4 * ((int32_t)(next_random() % 21) - 10);
    }
    for (uint64_t i = 0; i < s->columns; i++) {
        ((int32_t *)(void *)column.host)[i] = 4 * ((int32_t)(next_random() % 21) - 10);
    }
    const array *given[] = {&now, &row, &column, &misfits};
    for (size_t i = 0; i < 4; i++) {
        array_give(given[i]);
    }
    device_levels t = {(const float *)(void *)now.device,
                       (float *)(void *)values.device,
                       (int8_t *)few.device,
                       NULL,
                       means ? (const int32_t *)(void *)row.device : NULL,
                       means ? (const int32_t *)(void *)column.device : NULL,
                       s->count,
                       s->columns,
                       s->phase,
                       scalar_level_of(1e-8f),
                       step,
                       0.6f,
                       (uint64_t *)(void *)misfits.device,
                       {NULL, NULL, 0, 0, 0, 0}};
    must(backend->quantise_levels(&queue, &t, &why));
    must(backend->move_levels(&queue, &t, &why));
    int8_t *got = malloc(s->count);
    int32_t *want = malloc(s->count * 4), *zeros = calloc(s->columns, 4);
    float *got_values = malloc(s->count * 4), *want_values = calloc(s->count, 4);
    assert_true(got && want && zeros && got_values && want_values);
    uint64_t some, counted = 0;
    array_take(&few, got);
    array_take(&values, got_values);
    array_take(&misfits, &some);
    for (uint64_t at = 0; at < s->count;) {
        uint64_t place = s->phase + at, c = place % s->columns;
        uint64_t n = s->columns - c < s->count - at ? s->columns - c : s->count - at;
        level_run run = {.row = means ? ((int32_t *)(void *)row.host)[place / s->columns] : 0,
                         .column = means ? (int32_t *)(void *)column.host + c : zeros,
                         .birth = t.birth,
                         .step = step};
        const float *from = (float *)(void *)now.host + at;
        cpu->level_quantise(want + at, from, from, t.up, n, &run);
        counted += no_bytes(want + at, n);
        cpu->level_apply(want_values + at, want + at, n, &run);
        at += n;
    }
    for (uint64_t i = 0; i < s->count; i++) {
        assert_int_equal(got[i], want[i] == LEVEL_ZERO ? DEVICE_LEVEL_ZERO : want[i]);
    }
    assert_memory_equal(got_values, want_values, s->count * 4);
    assert_int_equal(some, counted);
    void *all[] = {got, want, zeros, got_values, want_values};
    for (size_t i = 0; i < 5; i++) {
        free(all[i]);
    }
    array *arrays[] = {&now, &row, &column, &few, &values, &misfits};
    for (size_t i = 0; i < 6; i++) {
        array_free(arrays[i]);
    }
}

static void test_levels(void **state) {
    (void)state;
    for (size_t i = 0; i < SHAPES; i++) {
        compare_levels(&shapes[i], true, 24);
        compare_levels(&shapes[i], false, 1);
        compare_levels(&shapes[i], true, 4096);
    }
}

/* ---- exceptions: elements stored unchanged ---- */

static int by_place(const void *a, const void *b) {
    const device_element_at *x = a, *y = b;
    return (x->at > y->at) - (x->at < y->at);
}

/*
 * Checks that the list has exactly the elements in `kept`, and that these are copied from one array to
 * another.
 */
static void compare_list(const array *list, const array *count, const bool *kept, uint64_t n) {
    uint64_t found, expected = 0;
    array_take(count, &found);
    for (uint64_t i = 0; i < n; i++) {
        expected += kept[i];
    }
    assert_int_equal(found, expected);
    for (uint32_t size = 2; size <= 4; size += 2) {
        array from = array_new(n, size, 1), to = array_new(n, size, 0);
        fill_bits(&from);
        fill_bits(&to);
        array_give(&from);
        array_give(&to);
        device_exception_copy k = {(device_element_at *)(void *)list->device, found, to.device, from.device,
                                   size};
        must(backend->keep(&queue, &k, &why));
        device_element_at *got = malloc(list->bytes + 1);
        uint8_t *moved = malloc(to.bytes + 1);
        assert_true(got && moved);
        array_take(list, got);
        array_take(&to, moved);
        qsort(got, found, sizeof(*got), by_place);
        uint64_t at = 0;
        for (uint64_t i = 0; i < n; i++) {
            const uint8_t *want = (kept[i] ? from.host : to.host) + i * size;
            assert_memory_equal(moved + i * size, want, size);
            uint32_t bits = 0;
            memcpy(&bits, want, size);
            assert_true(!kept[i] || (got[at].at == i && (uint32_t)got[at].q == bits));
            at += kept[i];
        }
        free(got);
        free(moved);
        array_free(&from);
        array_free(&to);
    }
}

/* Writes some elements of an array, and no others. */
static void compare_scattered(uint64_t n, uint64_t count, uint32_t size) {
    array places = array_new(count, sizeof(uint32_t), 0), from = array_new(count, size, 0),
          to = array_new(n, size, 1);
    fill_bits(&from);
    fill_bits(&to);
    for (uint64_t i = 0; i < count; i++) {
        uint32_t at = (uint32_t)(n - 1 - i * (n / count));
        memcpy(places.host + i * sizeof(at), &at, sizeof(at));
    }
    const array *given[] = {&places, &from, &to};
    for (size_t i = 0; i < 3; i++) {
        array_give(given[i]);
    }
    device_scattering s = {to.device, (const uint32_t *)(void *)places.device, from.device, count, size};
    must(backend->scatter(&queue, &s, &why));
    uint8_t *got = malloc(to.bytes + 1), *want = malloc(to.bytes + 1);
    assert_true(got && want);
    array_take(&to, got);
    memcpy(want, to.host, n * size);
    for (uint64_t i = 0; i < count; i++) {
        memcpy(want + (n - 1 - i * (n / count)) * size, from.host + i * size, size);
    }
    assert_memory_equal(got, want, n * size);
    free(got);
    free(want);
    array_free(&places);
    array_free(&from);
    array_free(&to);
}

static void test_scatter(void **state) {
    (void)state;
    for (uint32_t size = 2; size <= 4; size += 2) {
        compare_scattered(1, 1, size);
        compare_scattered(1000, 256, size);
        compare_scattered(1000, 257, size);
        compare_scattered(1u << 18, 5000, size);
    }
    device_scattering none = {NULL, NULL, NULL, 0, 4};
    must(backend->scatter(&queue, &none, &why));
}

static void compare_kept(const shape *s, bool parent_values, bool low) {
    tile t;
    tile_new(&t, s, parent_values, low, true, 20);
    array list = array_new(s->count, sizeof(device_element_at), 0), count = array_new(1, 8, 0);
    array_give(&count);
    t.t.exceptions = (device_exceptions){(device_element_at *)(void *)list.device,
                                         (uint64_t *)(void *)count.device,
                                         (uint32_t)s->count,
                                         0.012f,
                                         0.018f,
                                         1e4f};
    bool *kept = malloc(s->count);
    int8_t *few = malloc(s->count), *none = calloc(s->count, 1);
    by_rows want = {.q = malloc(s->count * 4), .wide = kept, .values = malloc(s->count * 4)};
    assert_true(kept && few && none && want.q && want.values);
    rows_on_cpu(&want, &t, none);
    const float *now = (const float *)(const void *)t.now.host,
                *from = (const float *)(const void *)t.parent_values.host;
    for (uint64_t i = 0; i < s->count; i++) {
        kept[i] |= fabsf(now[i]) > 0.012f || !(fabsf(now[i]) < 1e4f);
        kept[i] |= parent_values && (fabsf(now[i] - from[i]) > 0.018f || !(fabsf(from[i]) < 1e4f));
    }
    must(backend->quantise(&queue, &t.t, &why));
    device_level_sums sums;
    array_take(&t.few, few);
    array_take(&t.sums, &sums);
    assert_int_equal(sums.misfits, 0);
    for (uint64_t i = 0; i < s->count; i++) {
        assert_int_equal(few[i], kept[i] ? 0 : want.q[i]);
    }
    compare_list(&list, &count, kept, s->count);
    void *all[] = {kept, few, none, want.q, want.values};
    for (size_t i = 0; i < 5; i++) {
        free(all[i]);
    }
    array_free(&list);
    array_free(&count);
    tile_free(&t);
}

/*
 * Exceptions of second moments. integers: whether the tile has integers. The step is so fine that some of
 * them do not fit a byte.
 */
static void compare_kept_levels(const shape *s, bool integers) {
    array now = array_new(s->count, 4, 0), few = array_new(s->count, 1, 0),
          list = array_new(s->count, sizeof(device_element_at), 0), count = array_new(1, 8, 0);
    fill_floats(&now, 1e-6f, false);
    array_give(&now);
    array_give(&count);
    device_levels t = {.now = (const float *)(void *)now.device,
                       .q8 = integers ? (int8_t *)few.device : NULL,
                       .count = s->count,
                       .columns = s->columns,
                       .phase = s->phase,
                       .birth = scalar_level_of(1e-8f),
                       .step = 1,
                       .up = 0.6f,
                       .exceptions = {(device_element_at *)(void *)list.device,
                                      (uint64_t *)(void *)count.device, (uint32_t)s->count, 3e-7f, 0, 0}};
    must(backend->quantise_levels(&queue, &t, &why));
    int8_t *got = malloc(s->count);
    bool *kept = malloc(s->count);
    int32_t *zeros = calloc(s->count, 4), *q = malloc(s->count * 4);
    assert_true(got && kept && zeros && q);
    array_take(&few, got);
    level_run run = {.column = zeros, .birth = t.birth, .step = 1};
    const float *values = (const float *)(const void *)now.host;
    cpu->level_quantise(q, values, values, t.up, s->count, &run);
    for (uint64_t i = 0; i < s->count; i++) {
        bool wide = q[i] != LEVEL_ZERO && (q[i] > 127 || q[i] < -127);
        kept[i] = (integers && wide) || values[i] > 3e-7f || !(values[i] >= 0 && values[i] < INFINITY);
        int32_t want = kept[i] ? 0 : q[i] == LEVEL_ZERO ? DEVICE_LEVEL_ZERO : q[i];
        assert_true(!integers || got[i] == want);
    }
    compare_list(&list, &count, kept, s->count);
    void *all[] = {got, kept, zeros, q};
    for (size_t i = 0; i < 4; i++) {
        free(all[i]);
    }
    array *arrays[] = {&now, &few, &list, &count};
    for (size_t i = 0; i < 4; i++) {
        array_free(arrays[i]);
    }
}

static void test_kept(void **state) {
    (void)state;
    for (size_t i = 0; i < SHAPES; i++) {
        compare_kept(&shapes[i], true, i % 2);
        compare_kept(&shapes[i], false, i % 2 == 0);
        compare_kept_levels(&shapes[i], true);
        compare_kept_levels(&shapes[i], false);
    }
}

/* ---- statistics ---- */

static void near_enough(double got, double want) {
    assert_true(got == want || fabs(got - want) <= 1e-12 * fabs(want)); /* or both infinite */
}

static void compare_sums(const device_sums *got, const lattice_sums *want) {
    near_enough(got->now, want->now);
    near_enough(got->moved, want->moved);
    near_enough(got->weighted, want->weighted);
    assert_int_equal(got->finite, want->finite);
    assert_int_equal(got->compared, want->compared);
    assert_true(scalar_bits(got->largest) == scalar_bits(want->largest));
    assert_true(got->smallest == want->smallest);
    assert_true(scalar_bits(got->farthest) == scalar_bits(want->farthest));
    assert_int_equal(got->parent_bits, want->parent_bits);
    int32_t lowest = got->lowest < INFINITY ? ilogbf(got->lowest) : INT32_MAX;
    assert_int_equal(lowest, want->lowest_bit);
}

typedef struct pass_case {
    tile t;
    array rows, counts, blocks, all;
    device_pass p;
} pass_case;

static void pass_new(pass_case *c, const shape *s, int how) {
    tile_new(&c->t, s, how & 1, false, how & 2, 14);
    c->rows = array_new(c->t.rows, 8, 0);
    c->counts = array_new(c->t.rows, 8, 0);
    c->blocks = array_new(device_pass_blocks(c->t.rows), sizeof(device_sums), 0);
    c->all = array_new(1, sizeof(device_sums), 0);
    c->p = (device_pass){(const float *)(void *)c->t.now.device,
                         c->t.t.parent_values,
                         c->t.t.column_step,
                         c->t.t.column_step ? c->t.t.row_step : NULL,
                         s->count,
                         s->columns,
                         s->phase,
                         {how & 4 ? 0.01f : 3.4e38f, how & 4 ? 0.005f : 3.4e38f},
                         how & 1,
                         how & 2,
                         (double *)(void *)c->rows.device,
                         (double *)(void *)c->counts.device,
                         (device_sums *)(void *)c->blocks.device,
                         (device_sums *)(void *)c->all.device};
}

static void test_sums(void **state) {
    (void)state;
    for (size_t i = 0; i < SHAPES * 8; i++) {
        const shape *s = &shapes[i / 8];
        pass_case c;
        pass_new(&c, s, (int)(i % 8));
        must(backend->sums(&queue, &c.p, &why));
        device_sums got;
        lattice_sums want = LATTICE_SUMS_INIT;
        double *rows = malloc(c.t.rows * 8), *numbers = malloc(c.t.rows * 8);
        assert_true(rows && numbers);
        array_take(&c.all, &got);
        array_take(&c.rows, rows);
        array_take(&c.counts, numbers);
        for (uint64_t at = 0; at < s->count;) {
            uint64_t place = s->phase + at, row = place / s->columns, column = place % s->columns;
            uint64_t n = s->columns - column < s->count - at ? s->columns - column : s->count - at;
            const float *now = (float *)(void *)c.t.now.host + at;
            double sums[2] = {0, 0};
            cpu->sums_of(
                &want,
                &(sums_run){now, c.p.parent_values ? (float *)(void *)c.t.parent_values.host + at : NULL,
                            c.p.weight ? (float *)(void *)c.t.column.host + column : NULL,
                            c.p.row_weight ? ((float *)(void *)c.t.row.host)[row] : 1, c.p.max, c.p.lattice},
                n);
            cpu->moment_row(sums, now, c.p.magnitudes, c.p.max[0], n);
            near_enough(rows[row], sums[0]);
            assert_true(numbers[row] == sums[1]);
            at += n;
        }
        compare_sums(&got, &want);
        free(rows);
        free(numbers);
        array *all[] = {&c.rows, &c.counts, &c.blocks, &c.all};
        for (size_t j = 0; j < 4; j++) {
            array_free(all[j]);
        }
        tile_free(&c.t);
    }
}

static void compare_columns(const shape *s, bool scaled, uint64_t panels) {
    uint64_t rows = (s->phase + s->count + s->columns - 1) / s->columns, each = panels * s->columns;
    array now = array_new(s->count, 4, 1), scale = array_new(rows, 8, 0), sum = array_new(each, 8, 0),
          scales = array_new(each, 8, 0), number = array_new(each, 4, 0);
    fill_floats(&now, 1, false);
    for (uint64_t i = 0; i < rows; i++) {
        ((double *)(void *)scale.host)[i] = (double)(i % 7) + 0.5;
    }
    array_give(&now);
    array_give(&scale);
    device_columns c = {(const float *)(void *)now.device,
                        scaled ? (const double *)(void *)scale.device : NULL,
                        s->count,
                        s->columns,
                        s->phase,
                        panels,
                        0.25f,
                        !scaled,
                        (double *)(void *)sum.device,
                        scaled ? (double *)(void *)scales.device : NULL,
                        (uint32_t *)(void *)number.device};
    must(backend->columns(&queue, &c, &why));
    double *got = malloc(each * 8), *got_scales = malloc(each * 8), *want = calloc(s->columns, 8),
           *want_scales = calloc(s->columns, 8);
    uint32_t *got_number = malloc(each * 4), *want_number = calloc(s->columns, 4);
    assert_true(got && got_scales && want && want_scales && got_number && want_number);
    array_take(&sum, got);
    array_take(&number, got_number);
    if (scaled) {
        array_take(&scales, got_scales);
    }
    for (uint64_t at = 0; at < s->count;) {
        uint64_t place = s->phase + at, column = place % s->columns;
        uint64_t n = s->columns - column < s->count - at ? s->columns - column : s->count - at;
        moment_sums to = {want + column, scaled ? want_scales + column : NULL, want_number + column};
        cpu->moment_columns(&to,
                            &(moment_rows){(float *)(void *)now.host + at, s->columns, 1,
                                           (double *)(void *)scale.host + place / s->columns, !scaled, 0.25f},
                            n);
        at += n;
    }
    for (uint64_t j = 0; j < s->columns; j++) {
        double sums = 0, of = 0;
        uint32_t numbers = 0;
        for (uint64_t p = 0; p < panels; p++) {
            sums += got[p * s->columns + j];
            of += scaled ? got_scales[p * s->columns + j] : 0;
            numbers += got_number[p * s->columns + j];
        }
        near_enough(sums, want[j]);
        near_enough(of, want_scales[j]);
        assert_int_equal(numbers, want_number[j]);
    }
    void *all[] = {got, got_scales, want, want_scales, got_number, want_number};
    for (size_t i = 0; i < 6; i++) {
        free(all[i]);
    }
    array *arrays[] = {&now, &scale, &sum, &scales, &number};
    for (size_t i = 0; i < 5; i++) {
        array_free(arrays[i]);
    }
}

static void test_columns(void **state) {
    (void)state;
    for (size_t i = 0; i < SHAPES; i++) {
        compare_columns(&shapes[i], false, 1);
        compare_columns(&shapes[i], true, 3);
    }
}

/*
 * Rounds both arrays to a narrower dtype. Values that are not finite there must be equal. Returns how many
 * are not.
 */
static uint64_t round_both(array *given, array *decoded, size_t n, ckd_dtype to) {
    float *a = (float *)(void *)given->host, *b = (float *)(void *)decoded->host;
    uint64_t others = 0;
    for (size_t i = 0; i < n && to != CKD_DTYPE_NONE; i++) {
        uint16_t x, y;
        cpu->cast(to, &x, CKD_F32, a + i, 1);
        cpu->cast(to, &y, CKD_F32, b + i, 1);
        cpu->widen(a + i, to, &x, 1);
        cpu->widen(b + i, to, &y, 1);
        others += !isfinite(a[i]) && x != y;
    }
    return others;
}

static void compare_errors(size_t n, ckd_dtype rounded) {
    array given = array_new(n, 4, 0), decoded = array_new(n, 4, 1),
          blocks = array_new(device_error_blocks(n), sizeof(device_sums), 0),
          all = array_new(1, sizeof(device_sums), 0);
    /* F16: some values lie beyond 65520, where rounding gives infinity */
    fill_floats(&given, rounded == CKD_F16 ? 140000 : 1, false);
    fill_floats(&decoded, rounded == CKD_F16 ? 140000 : 1, false);
    array_give(&given);
    array_give(&decoded);
    device_errors e = {(const float *)(void *)given.device,  (const float *)(void *)decoded.device, n,
                       (device_sums *)(void *)blocks.device, (device_sums *)(void *)all.device,     rounded};
    must(backend->errors(&queue, &e, &why));
    device_sums got;
    error_sums want = {0};
    array_take(&all, &got);
    uint64_t others = round_both(&given, &decoded, n, rounded);
    cpu->error_of(&want, (float *)(void *)given.host, (float *)(void *)decoded.host, n);
    near_enough(got.now, want.energy);
    near_enough(got.moved, want.error);
    assert_int_equal(got.finite, want.finite);
    assert_true((got.compared ? INFINITY : got.farthest) == (others ? INFINITY : want.largest));
    array *arrays[] = {&given, &decoded, &blocks, &all};
    for (size_t i = 0; i < 4; i++) {
        array_free(arrays[i]);
    }
}

static void test_errors(void **state) {
    static const ckd_dtype dtypes[] = {CKD_DTYPE_NONE, CKD_BF16, CKD_F16};
    (void)state;
    EACH(n, COUNTS) {
        for (size_t d = 0; d < 3; d++) {
            compare_errors(n, dtypes[d]);
        }
    }
}

/* ---- moments ---- */

static array halves_new(const array *from, size_t n, lossy_part which_part, bool decoded) {
    array halves = array_new(n, sizeof(uint16_t), 1);
    const float *values = (const float *)(const void *)from->device;
    device_halves h = {(uint16_t *)(void *)halves.device, values, n, which_part == LOSSY_SECOND, decoded};
    must(backend->halves(&queue, &h, &why));
    uint16_t *want = malloc(n * sizeof(*want) + 1);
    assert_non_null(want);
    array_take(&halves, halves.host);
    pair_record(want, which_part, decoded, (const float *)(const void *)from->host, n);
    assert_memory_equal(halves.host, want, n * sizeof(*want));
    free(want);
    return halves;
}

/*
 * Compares the largest updates, and whether an update exceeds a limit. The limit is `of_largest` times the
 * largest update with the first eps.
 */
static void compare_updates(size_t n, lossy_part which_part, double of_largest) {
    bool is_second = which_part == LOSSY_SECOND;
    array here = array_new(n, 4, 1), from = array_new(n, 4, 0), found = array_new(3, 8, 0);
    fill_floats(&here, 1e-4f, is_second);
    fill_floats(&from, 1e-3f, !is_second);
    array_give(&here);
    array_give(&from);
    array_give(&found);
    array other = halves_new(&from, n, is_second ? LOSSY_MOMENT : LOSSY_SECOND, true);
    const uint16_t *halves = (const uint16_t *)(const void *)other.host;
    const float *values = (const float *)(const void *)here.host;
    pair_bound bounds[PAIR_BOUNDS] = {{.eps = 1e-8}, {.eps = 3e-10}};
    double want[PAIR_BOUNDS] = {0}, got[PAIR_BOUNDS + 1];
    pair_largest(want, which_part, values, halves, n, bounds);
    double per = 1 / (of_largest * want[0]);
    device_updates u = {.values = (const float *)(const void *)here.device,
                        .other = (const uint16_t *)(const void *)other.device,
                        .count = n,
                        .second = is_second,
                        .eps = {bounds[0].eps, bounds[1].eps},
                        .per = {want[0] > 0 ? per : 0, 0},
                        .largest = (double *)(void *)found.device,
                        .above = (uint64_t *)(void *)(found.device + sizeof(want))};
    must(backend->updates(&queue, &u, &why));
    array_take(&found, got);
    uint64_t above = 0, above_want = 0;
    memcpy(&above, &got[PAIR_BOUNDS], sizeof(above));
    for (size_t i = 0; i < n; i++) {
        float half = scalar_moment_widen(halves[i]), first = is_second ? half : values[i],
              second = is_second ? values[i] : half;
        above_want += (uint64_t)scalar_update_exceeds(first, second, u.per[0], u.eps[0]);
    }
    for (size_t b = 0; b < PAIR_BOUNDS; b++) { /* the host skips values that are larger only by rounding */
        assert_true(got[b] >= want[b] && got[b] <= want[b] * (1 + 1e-14));
    }
    assert_int_equal(above, above_want);
    assert_true((above > 0) == (of_largest < 1 && want[0] > 0));
    array *arrays[] = {&here, &from, &found, &other};
    for (size_t i = 0; i < 4; i++) {
        array_free(arrays[i]);
    }
}

static void test_moments(void **state) {
    static const lossy_part parts[] = {LOSSY_MOMENT, LOSSY_SECOND};
    (void)state;
    EACH(n, COUNTS) {
        for (size_t i = 0; i < 2; i++) {
            array from = array_new(n, 4, 1);
            fill_floats(&from, 1e-3f, false);
            array_give(&from);
            for (int decoded = 0; decoded < 2; decoded++) {
                array halves = halves_new(&from, n, parts[i], decoded);
                array_free(&halves);
            }
            array_free(&from);
            compare_updates(n, parts[i], 0.5);
            compare_updates(n, parts[i], 1.01);
        }
    }
}

/* ---- factors ---- */

/*
 * Compares the rounding of factors to integers over powers of two, as engine/lossy/low_rank.c does it. Some
 * values exceed the largest integer.
 */
static void compare_rounded(size_t n) {
    enum { SIDES = 5 };
    const double most = 1 << 20, add = 0.45;
    array at = array_new(SIDES * n, 4, 1), scale = array_new(SIDES, 8, 0), largest = array_new(SIDES, 4, 0);
    fill_floats(&at, 100, false);
    for (uint32_t k = 0; k < SIDES; k++) {
        ((double *)(void *)scale.host)[k] = ldexp(1, (int)(4 * k) - 6);
    }
    array_give(&at);
    array_give(&scale);
    array_give(&largest);
    device_rounding r = {(float *)(void *)at.device,
                         (const double *)(const void *)scale.device,
                         (uint32_t *)(void *)largest.device,
                         n,
                         SIDES,
                         add,
                         most};
    must(backend->round(&queue, &r, &why));
    uint32_t got_largest[SIDES], want_largest[SIDES] = {0};
    float *got = malloc(SIDES * n * 4 + 1), *from = (float *)(void *)at.host;
    assert_non_null(got);
    array_take(&at, got);
    array_take(&largest, got_largest);
    for (size_t i = 0; i < SIDES * n; i++) {
        double s = ((double *)(void *)scale.host)[i / n], v = from[i] * s,
               size = fabs(v) < most ? fabs(v) : most;
        int32_t whole = (int32_t)(size + add);
        float want = (float)((v < 0 ? -whole : whole) / s);
        assert_true(got[i] == want);
        want_largest[i / n] = (uint32_t)whole > want_largest[i / n] ? (uint32_t)whole : want_largest[i / n];
    }
    assert_memory_equal(got_largest, want_largest, sizeof(got_largest));
    free(got);
    array *arrays[] = {&at, &scale, &largest};
    for (size_t i = 0; i < 3; i++) {
        array_free(arrays[i]);
    }
}

static void test_rounding(void **state) {
    (void)state;
    EACH(n, FEW_COUNTS) {
        compare_rounded(n);
    }
    compare_rounded(10007); /* several blocks */
}

/* ---- products ---- */

static void test_products(void **state) {
    (void)state;
    static const size_t sides[][3] = {{1, 1, 1}, {3, 5, 2}, {64, 33, 17}, {129, 256, 31}};
    for (size_t i = 0; i < 16; i++) {
        size_t rows = sides[i / 4][0], columns = sides[i / 4][1], rank = sides[i / 4][2];
        bool turned = i % 2, turned_right = i / 2 % 2;
        array left = array_new(rows * rank, 4, 0), right = array_new(columns * rank, 4, 0),
              sums = array_new(rows * columns, 4, 0);
        float *l = (float *)(void *)left.host, *r = (float *)(void *)right.host;
        for (size_t j = 0; j < rows * rank; j++) {
            l[j] = (float)(int32_t)(next_random() % 255) - 127;
        }
        for (size_t j = 0; j < columns * rank; j++) {
            r[j] = (float)(int32_t)(next_random() % 255) - 127;
        }
        array_give(&left);
        array_give(&right);
        device_product p = {(float *)(void *)sums.device,
                            (const float *)(void *)left.device,
                            (const float *)(void *)right.device,
                            rows,
                            columns,
                            rank,
                            turned,
                            turned_right};
        must(backend->product(&queue, &p, &why));
        float *got = malloc(rows * columns * 4);
        assert_non_null(got);
        array_take(&sums, got);
        for (size_t a = 0; a < rows; a++) {
            for (size_t b = 0; b < columns; b++) {
                int64_t sum = 0;
                for (size_t k = 0; k < rank; k++) {
                    sum += (int64_t)(turned ? l[k * rows + a] : l[a * rank + k]) *
                           (int64_t)(turned_right ? r[b * rank + k] : r[k * columns + b]);
                }
                assert_true(got[a * columns + b] == (float)sum);
            }
        }
        free(got);
        array_free(&left);
        array_free(&right);
        array_free(&sums);
    }
}

static int8_t byte_of(int how) {
    static const int8_t extremes[] = {-128, 127, -127, 0, 1};
    return how == 2 ? -128 : how == 1 ? extremes[next_random() % 5] : (int8_t)(next_random() % 256);
}

static void compare_byte_product(size_t rows, size_t columns, uint32_t rank, int how) {
    uint32_t padded = device_bytes_rank(rank);
    array left = array_new(rows * padded, 1, 0), right = array_new(columns * padded, 1, 0),
          sums = array_new(rows * columns, 4, 0);
    int8_t *l = (int8_t *)left.host, *r = (int8_t *)right.host;
    for (size_t i = 0; i < (rows + columns) * rank; i++) {
        size_t at = i / rank * padded + i % rank;
        *(i / rank < rows ? &l[at] : &r[at - rows * padded]) = byte_of(how);
    }
    array_give(&left);
    array_give(&right);
    device_byte_product p = {(int32_t *)(void *)sums.device,
                             (const int8_t *)left.device,
                             (const int8_t *)right.device,
                             rows,
                             columns,
                             padded};
    bool known = false;
    must(backend->byte_product(&queue, &known, &p, &why));
    assert_true(known);
    int32_t *got = malloc(rows * columns * sizeof(*got));
    assert_non_null(got);
    array_take(&sums, got);
    for (size_t i = 0; i < rows * columns; i++) {
        int32_t sum = 0;
        for (uint32_t k = 0; k < rank; k++) {
            sum += l[i / columns * padded + k] * r[i % columns * padded + k];
        }
        assert_int_equal(got[i], sum);
    }
    free(got);
    array *arrays[] = {&left, &right, &sums};
    for (size_t i = 0; i < 3; i++) {
        array_free(arrays[i]);
    }
}

static void test_byte_products(void **state) {
    (void)state;
    for (uint32_t rank = 1; rank <= 70; rank++) {
        compare_byte_product(1 + rank % 7, 4 * (1 + rank % 5), rank, (int)(rank % 3));
    }
    compare_byte_product(129, 260, 31, 0);
    compare_byte_product(1, 4, 1, 2);
    /* Sums of up to 2^14 a component, beyond what floats represent exactly. */
    compare_byte_product(64, 36, 1000, 2);
    compare_byte_product(33, 4, 300, 1);
    /* Products of floats must still be right afterwards. */
    test_products(state);
}

int device_parity(const char *name, const device_backend *of) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_elements),      cmocka_unit_test(test_copies),  cmocka_unit_test(test_casts),
        cmocka_unit_test(test_steps),         cmocka_unit_test(test_hashes),  cmocka_unit_test(test_tiles),
        cmocka_unit_test(test_levels),        cmocka_unit_test(test_sums),    cmocka_unit_test(test_columns),
        cmocka_unit_test(test_errors),        cmocka_unit_test(test_moments), cmocka_unit_test(test_products),
        cmocka_unit_test(test_byte_products), cmocka_unit_test(test_kept),    cmocka_unit_test(test_rounding),
        cmocka_unit_test(test_residuals),     cmocka_unit_test(test_gather),  cmocka_unit_test(test_packing),
        cmocka_unit_test(test_scatter),
    };
    return run_queue_tests(name, of, tests);
}
