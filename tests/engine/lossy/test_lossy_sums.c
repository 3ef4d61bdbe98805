/*
 * Statistics of a tile: sums by panels equal those of all elements, samples are spread over the tile, and the number
 * of threads changes nothing.
 */
#include <float.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/float_mode.h"
#include "engine/lossy/internal.h"
#include "tests/support/drift.h"

/* Panels of several groups of rows. The first and the last panel are incomplete. */
enum { ROWS = 451, COLUMNS = 700, PHASE = 123, COUNT = ROWS * COLUMNS - PHASE - 77 };

typedef struct fixture {
    drift now;
    float *parent_values;
    quant_params params;
    lossy_scales found;
    thread_pool *pool;
} fixture;

static void setup(fixture *f, int effort) {
    *f = (fixture){.now = drift_new(ROWS, COLUMNS, 3), .params = quant_params_of(CKD_COARSE, effort)};
    f->parent_values = malloc(ROWS * COLUMNS * sizeof(float));
    assert_non_null(f->parent_values);
    memcpy(f->parent_values, f->now.weight, ROWS * COLUMNS * sizeof(float));
    drift_step(&f->now);
    assert_int_equal(pool_create(&f->pool, 3, NULL), CKD_OK);
}

static void teardown(fixture *f) {
    drift_free(&f->now);
    lossy_scales_free(&f->found);
    pool_destroy(f->pool);
    free(f->parent_values);
}

static lossy_tile tile_of(const fixture *f, lossy_part which_part) {
    const float *values = which_part == LOSSY_WEIGHT   ? f->now.weight
                          : which_part == LOSSY_MOMENT ? f->now.first
                                                       : f->now.second;
    return (lossy_tile){.part = which_part,
                        .dtype = CKD_F32,
                        .params = &f->params,
                        .shape.count = COUNT,
                        .shape.columns = COLUMNS,
                        .shape.phase = PHASE,
                        .input.values = values + PHASE,
                        .input.now = values + PHASE,
                        .input.parent_values = which_part == LOSSY_WEIGHT ? f->parent_values + PHASE : NULL,
                        .limits.exception_above = FLT_MAX,
                        .limits.exception_moved = FLT_MAX,
                        .context.expected_movement = NAN};
}

/* ---- sums ---- */

static void assert_near(double a, double b) {
    if (!(fabs(a - b) <= 1e-9 * fabs(b))) {
        fail_msg("%.17g is not %.17g", a, b);
    }
}

static void check_rows_and_columns(const tile_pass *p, const lossy_tile *t) {
    double *column = calloc(2 * COLUMNS, sizeof(double)), energy = 0;
    uint32_t *count = calloc(COLUMNS, sizeof(uint32_t));
    assert_true(column && count);
    for (uint64_t row = 0; row < tile_rows(&t->shape); row++) {
        uint64_t first, at, n = tile_row_span(&t->shape, row, &first, &at);
        double sum = 0, scale = p->birth * exp2((double)p->row_level[row] / 8);
        for (uint64_t i = 0; i < n; i++) {
            double v = (double)t->input.now[first + i];
            energy += v * v;
            sum += v;
            column[at + i] += v;
            column[COLUMNS + at + i] += scale;
            count[at + i]++;
        }
        assert_near(p->row[row], sum);
        assert_true(p->row_count[row] == (double)n);
        assert_int_equal(p->row_level[row], level_distance(p->row[row], p->birth * (double)n));
    }
    for (uint64_t j = 0; j < COLUMNS; j++) {
        assert_near(p->column[j], column[j]);
        assert_near(p->column_scales[j], column[COLUMNS + j]);
        assert_int_equal(p->column_count[j], count[j]);
    }
    assert_near(p->all.now, energy);
    assert_int_equal(p->all.finite, COUNT);
    free(column);
    free(count);
}

static void test_sums_are_of_all_elements(void **state) {
    (void)state;
    fixture f;
    setup(&f, 1);
    for (int pooled = 0; pooled < 2; pooled++) {
        lossy_tile t = tile_of(&f, LOSSY_SECOND);
        t.resources.pool = pooled ? f.pool : NULL;
        assert_true(tile_panels(&t.shape) > 3);
        assert_int_equal(tile_rows(&t.shape), ROWS);
        tile_pass p = {.max = {FLT_MAX, FLT_MAX}, .means = true, .birth = 1e-6};
        assert_int_equal(tile_pass_run(&p, &t, kernels_cpu(), NULL), CKD_OK);
        check_rows_and_columns(&p, &t);
        tile_pass_free(&p);
    }
    teardown(&f);
}

/* ---- samples ---- */

static void test_samples_are_spread(void **state) {
    (void)state;
    fixture f;
    setup(&f, 1);
    static const uint64_t wanted[] = {4096, 20000, 4 * COUNT};
    for (size_t w = 0; w < 3; w++) {
        for (int vector = 0; vector < 2; vector++) {
            lossy_tile t = tile_of(&f, LOSSY_SECOND);
            t.shape.vector = vector;
            uint64_t elements = 0, next = 0, columns_seen = 0;
            bool seen[COLUMNS / SAMPLE_SLICE + 1] = {false};
            tile_sample s;
            assert_int_equal(sample_begin(&s, &t, wanted[w], NULL), CKD_OK);
            for (tile_slice p; sample_next(&p, &s); elements += p.n, next = p.first + p.n) {
                assert_true(p.n > 0 && p.n <= SAMPLE_SLICE && p.first >= next && p.first + p.n <= COUNT);
                if (!vector) {
                    assert_int_equal((p.first + PHASE) / COLUMNS, p.row);
                    assert_int_equal((p.first + PHASE) % COLUMNS, p.column);
                    columns_seen += !seen[p.column / SAMPLE_SLICE];
                    seen[p.column / SAMPLE_SLICE] = true;
                }
            }
            assert_true(vector || columns_seen >= COLUMNS / SAMPLE_SLICE);
            if (wanted[w] > COUNT) {
                assert_int_equal(elements, COUNT);
            } else {
                assert_true(elements > wanted[w] / 2 && elements < 2 * wanted[w]);
            }
        }
    }
    teardown(&f);
}

/* ---- preparing a tile ---- */

/* Everything that blocks are coded with. */
static void assert_same_plan(const lossy_tile *a, const lossy_tile *b) {
    assert_int_equal(a->plan.lattice.step, b->plan.lattice.step);
    assert_int_equal(a->plan.lattice.exponent, b->plan.lattice.exponent);
    assert_int_equal(a->plan.lattice.birth, b->plan.lattice.birth);
    assert_memory_equal(a->plan.lattice.offset, b->plan.lattice.offset, sizeof(a->plan.lattice.offset));
    assert_memory_equal(a->plan.up, b->plan.up, sizeof(a->plan.up));
    assert_true(a->limits.exception_above == b->limits.exception_above &&
                a->limits.exception_moved == b->limits.exception_moved);
    assert_true(a->plan.movement == b->plan.movement && a->limits.largest == b->limits.largest);
    assert_true(!a->plan.lattice.row == !b->plan.lattice.row &&
                !a->plan.lattice.own.step == !b->plan.lattice.own.step);
    if (a->plan.lattice.row) {
        assert_memory_equal(a->plan.lattice.row, b->plan.lattice.row, ROWS * sizeof(int32_t));
    }
    if (a->plan.lattice.own.step) {
        assert_memory_equal(a->plan.lattice.own.step, b->plan.lattice.own.step, COLUMNS * sizeof(int32_t));
    }
    assert_int_equal(a->plan.lattice.own.rank, b->plan.lattice.own.rank);
    if (a->plan.lattice.own.rank) {
        assert_memory_equal(a->plan.lattice.factor, b->plan.lattice.factor,
                            ROWS * a->plan.lattice.own.rank * sizeof(int32_t));
    }
}

static void test_threads_do_not_matter(void **state) {
    (void)state;
    static const int efforts[] = {1, 5};
    static const lossy_part parts[] = {LOSSY_SECOND, LOSSY_MOMENT, LOSSY_WEIGHT};
    for (int e = 0; e < 2; e++) {
        fixture f;
        setup(&f, efforts[e]);
        float_mode mode = float_mode_enter();
        for (int p = 0; p < 3; p++) {
            lossy_scales found[2] = {{0}, {0}};
            lossy_tile t[2];
            for (int pooled = 0; pooled < 2; pooled++) {
                bool worth;
                t[pooled] = tile_of(&f, parts[p]);
                t[pooled].resources.pool = pooled ? f.pool : NULL;
                t[pooled].found = parts[p] == LOSSY_SECOND ? &found[pooled] : NULL;
                t[pooled].context.scales = parts[p] == LOSSY_SECOND ? NULL : &f.found;
                assert_int_equal(lossy_tile_prepare(&t[pooled], &worth, kernels_cpu(), NULL), CKD_OK);
                assert_true(worth);
            }
            assert_same_plan(&t[0], &t[1]);
            assert_true(t[0].plan.lattice.row && t[0].plan.lattice.own.step);
            if (parts[p] == LOSSY_SECOND) {
                assert_memory_equal(found[0].row, found[1].row, ROWS * sizeof(double));
                assert_memory_equal(found[0].column, found[1].column, COLUMNS * sizeof(double));
                f.found = found[0];
                lossy_scales_free(&found[1]);
            }
            lossy_tile_free(&t[0]);
            lossy_tile_free(&t[1]);
        }
        float_mode_leave(mode);
        teardown(&f);
    }
}

/* One element is far from all others. A sample may miss it, but the tile must handle it, wherever it is. */
static void test_spikes_are_found(void **state) {
    (void)state;
    fixture f;
    setup(&f, 1);
    float_mode mode = float_mode_enter();
    bool worth;
    for (uint64_t at = 5; at < COUNT; at += COUNT / 7) {
        for (int p = 0; p < 3; p++) {
            lossy_part which_part = (lossy_part)(LOSSY_WEIGHT + p);
            float *spike = (which_part == LOSSY_WEIGHT   ? f.now.weight
                            : which_part == LOSSY_MOMENT ? f.now.first
                                                         : f.now.second) +
                           PHASE + at,
                  was = *spike;
            lossy_tile usual = tile_of(&f, which_part), t = usual;
            lossy_scales scales = {0};
            t.found = which_part == LOSSY_SECOND ? &scales : NULL;
            assert_int_equal(lossy_tile_prepare(&usual, &worth, kernels_cpu(), NULL), CKD_OK);
            *spike = 1e15f;
            assert_int_equal(lossy_tile_prepare(&t, &worth, kernels_cpu(), NULL), CKD_OK);
            assert_true(worth && !t.limits.ordinary && t.limits.exception_above < 1e15f);
            assert_in_range(t.plan.lattice.step + 4 * t.plan.lattice.exponent + 4096,
                            usual.plan.lattice.step + 4 * usual.plan.lattice.exponent + 4095,
                            usual.plan.lattice.step + 4 * usual.plan.lattice.exponent + 4097);
            if (which_part == LOSSY_SECOND) { /* it also raises the mean of its row */
                uint64_t row = (PHASE + at) / COLUMNS, other = (row + 1) % ROWS;
                assert_true(scales.row[row] > log2(1e15 / COLUMNS) - 1 && scales.row[other] < 0);
            }
            *spike = was;
            lossy_scales_free(&scales);
            lossy_tile_free(&t);
            lossy_tile_free(&usual);
        }
    }
    float_mode_leave(mode);
    teardown(&f);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sums_are_of_all_elements),
        cmocka_unit_test(test_samples_are_spread),
        cmocka_unit_test(test_threads_do_not_matter),
        cmocka_unit_test(test_spikes_are_found),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
