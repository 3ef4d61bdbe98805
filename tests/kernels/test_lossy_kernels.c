/*
 * Operations of the lossy coder: each is compared with a plain definition. All instruction sets give the same
 * bits.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "codec/lattice/masks.h"
#include "kernels/cpu.h"
#include "kernels/scalar_lattice.h"

#define MOST  700
#define GUARD 16

static uint64_t seed = 1;
static uint32_t next_random(void) {
    seed ^= seed << 13;
    seed ^= seed >> 7;
    seed ^= seed << 17;
    return (uint32_t)(seed >> 20);
}
static float even(void) {
    return (float)(next_random() % 65536u) / 32768.0f - 1;
}

static const kernels *tables[KERNELS_CPU_BEST];
static size_t table_count;

static int find_tables(void **state) {
    (void)state;
    table_count = kernels_cpu_all(tables);
    return 0;
}

static void assert_bits(const void *a, const void *b, size_t size) {
    assert_memory_equal(a, b, size);
}

/* Lengths around the sizes of vectors and blocks. */
static size_t length_at(size_t i) {
    static const size_t some[] = {63, 64, 65, 127, 128, 129, 255, 256, 257, 300, 511, 512, 699, MOST};
    return i < 40 ? i : some[i - 40];
}
#define LENGTHS (40 + 14)

static lattice_run a_run(const float *column) {
    return (lattice_run){.unit = 0x1p-12f,
                         .per_unit = 0x1p12f,
                         .row_step = 5.3f,
                         .column_step = column,
                         .low_rank_unit = 1,
                         .offset = {0.2f, 0.1f, 0.05f}};
}

/* ---- applying ---- */

static void test_apply_few(void **state) {
    (void)state;
    static const unsigned one_in[] = {1, 3, 40, 100000};
    for (size_t l = 0; l < LENGTHS; l++) {
        for (size_t density = 0; density < 4; density++) {
            size_t n = length_at(l);
            float column[MOST + 1], from[MOST + GUARD], expected[MOST + GUARD];
            int8_t few[MOST + 1];
            int32_t wide[MOST + 1], widened[MOST + GUARD];
            for (size_t i = 0; i < n + GUARD; i++) {
                from[i] = i % 50 == 7 ? INFINITY : (i % 50 == 9 ? NAN : even());
            }
            for (size_t i = 0; i < n; i++) {
                column[i] = 1 + 0.5f * even();
                few[i] = (int8_t)(next_random() % one_in[density] ? 0 : (int)(next_random() % 255u) - 127);
                few[i] = next_random() % 2 ? few[i] : (int8_t)(few[i] % 4);
                wide[i] = few[i];
            }
            for (int columns = 0; columns < 2; columns++) {
                lattice_run run = a_run(columns ? column : NULL);
                for (size_t i = 0; i < n + GUARD; i++) {
                    float at = i < n ? scalar_level(wide[i], run.offset[0], run.offset[1], run.offset[2]) : 0;
                    float step = i < n && columns ? run.row_step * column[i] : run.row_step;
                    expected[i] = scalar_move(from[i], scalar_units(at * step), run.unit, run.per_unit);
                }
                for (size_t t = 0; t < table_count; t++) {
                    float values[MOST + GUARD];
                    memcpy(values, from, sizeof(from));
                    tables[t]->lattice_apply_q8(values, few, n, &run);
                    assert_bits(values, expected, (n + GUARD) * sizeof(float));
                    memcpy(values, from, sizeof(from));
                    tables[t]->lattice_apply(values, wide, NULL, n, &run);
                    assert_bits(values, expected, (n + GUARD) * sizeof(float));
                    memset(widened, 0x5a, sizeof(widened));
                    tables[t]->widen_integers(widened, few, n);
                    assert_bits(widened, wide, n * sizeof(int32_t));
                    assert_int_equal(widened[n], 0x5a5a5a5a);
                }
            }
        }
    }
}

/* Without a low-rank part, and with low-rank parts that have zeros or have none. */
static void test_residual(void **state) {
    (void)state;
    for (size_t l = 0; l < LENGTHS; l++) {
        size_t n = length_at(l);
        float now[MOST], before[MOST], low[MOST], column[MOST], expected[MOST], got[MOST + 1];
        for (size_t i = 0; i < n; i++) {
            now[i] = i % 50 == 7 ? INFINITY : even();
            before[i] = i % 50 == 9 ? NAN : even();
            low[i] = (float)(int32_t)(next_random() % 7u) - 3;
            column[i] = 1 + 0.5f * even();
        }
        for (int kind = 0; kind < 4; kind++) {
            lattice_run run = a_run(kind & 1 ? column : NULL);
            for (size_t i = 0; i < n; i++) {
                float step = kind & 1 ? run.row_step * column[i] : run.row_step;
                int32_t more = kind & 2 ? scalar_units(low[i] * run.low_rank_unit * step) : 0;
                float r =
                    (now[i] - scalar_move(before[i], more, run.unit, run.per_unit)) * run.per_unit / step;
                expected[i] = fabsf(r) < LATTICE_LIMIT ? r : 0.0f;
            }
            for (size_t t = 0; t < table_count; t++) {
                got[n] = 77;
                tables[t]->lattice_residual(got, now, before, kind & 2 ? low : NULL, n, &run);
                assert_bits(got, expected, n * sizeof(float));
                assert_true(got[n] == 77);
            }
        }
    }
}

/* ---- the low-rank part ---- */

#define MOST_RANK    40
#define MOST_ROWS    11
#define MOST_COLUMNS 50

typedef struct low_rank_case {
    size_t rows, rank, columns;
    bool few, steps;
    float values[MOST_ROWS * MOST_COLUMNS + GUARD], row_step[MOST_ROWS], column[MOST_COLUMNS];
    int8_t integers[MOST_ROWS * MOST_COLUMNS];
    int32_t left[MOST_ROWS * MOST_RANK], right[MOST_COLUMNS * MOST_RANK];
    float scale[MOST_RANK];
} low_rank_case;

static int32_t small(void) {
    return (int32_t)(next_random() % 41u) - 20;
}

static void make_case(low_rank_case *c) {
    *c = (low_rank_case){.rows = 1 + next_random() % MOST_ROWS,
                         .rank = 1 + next_random() % MOST_RANK,
                         .columns = 1 + next_random() % MOST_COLUMNS,
                         .few = next_random() % 2,
                         .steps = next_random() % 2};
    for (size_t i = 0; i < MOST_ROWS * MOST_COLUMNS + GUARD; i++) {
        c->values[i] = i % 50 == 7 ? INFINITY : (i % 50 == 9 ? NAN : even());
    }
    for (size_t i = 0; i < MOST_ROWS * MOST_COLUMNS; i++) {
        c->integers[i] = (int8_t)(next_random() % 3 ? 0 : small());
    }
    for (size_t i = 0; i < MOST_ROWS; i++) {
        c->row_step[i] = 1e-3f * (1.5f + even());
    }
    for (size_t i = 0; i < MOST_COLUMNS; i++) {
        c->column[i] = 1 + 0.5f * even();
    }
    for (size_t i = 0; i < MOST_ROWS * MOST_RANK; i++) {
        c->left[i] = small();
    }
    for (size_t i = 0; i < MOST_COLUMNS * MOST_RANK; i++) {
        c->right[i] = small();
    }
    for (size_t k = 0; k < MOST_RANK; k++) {
        c->scale[k] = (float)(1 << next_random() % 4);
    }
}

static float sum_at(const low_rank_case *c, size_t i, size_t j) {
    float sum = 0;
    for (size_t k = 0; k < c->rank; k++) {
        sum += (float)c->left[i * c->rank + k] * ((float)c->right[j * c->rank + k] * c->scale[k]);
    }
    return sum;
}

static void expect(float *values, const low_rank_case *c, const lattice_run *run) {
    for (size_t i = 0; i < c->rows; i++) {
        for (size_t j = 0; j < c->columns; j++) {
            size_t at = i * c->columns + j;
            float step = c->steps ? c->row_step[i] * c->column[j] : c->row_step[i];
            int32_t units = scalar_units(sum_at(c, i, j) * run->low_rank_unit * step);
            if (c->few) {
                float level = scalar_level(c->integers[at], run->offset[0], run->offset[1], run->offset[2]);
                units = scalar_add(units, scalar_units(level * step));
            }
            values[at] = scalar_move(c->values[at], units, run->unit, run->per_unit);
        }
    }
}

static void test_low_rank(void **state) {
    (void)state;
    size_t moved = 0;
    for (int times = 0; times < 400; times++) {
        low_rank_case c;
        make_case(&c);
        lattice_run run = a_run(c.steps ? c.column : NULL);
        run.low_rank_unit = 0.25f;
        run.row_step = NAN; /* must not be used */
        float expected[MOST_ROWS * MOST_COLUMNS + GUARD];
        memcpy(expected, c.values, sizeof(expected));
        expect(expected, &c, &run);
        moved += memcmp(expected, c.values, sizeof(expected)) != 0;
        for (size_t t = 0; t < table_count; t++) {
            float left[MOST_ROWS * MOST_RANK], right[MOST_COLUMNS * MOST_RANK], values[sizeof(expected) / 4];
            float panels[(MOST_COLUMNS + LOW_RANK_PANEL) * MOST_RANK + 1], most[MOST_RANK] = {0},
                                                                           other[MOST_RANK];
            size_t padded = (c.columns + LOW_RANK_PANEL - 1) / LOW_RANK_PANEL * LOW_RANK_PANEL;
            tables[t]->factor_values(left, most, c.left, c.rows, c.rank);
            memset(other, 0, sizeof(other));
            for (size_t i = 0; i < c.rows * c.rank; i++) {
                other[i % c.rank] = fmaxf(other[i % c.rank], fabsf((float)c.left[i]));
                assert_true(left[i] == (float)c.left[i]);
            }
            assert_bits(most, other, c.rank * sizeof(float));
            tables[t]->factor_values(right, most, c.right, c.columns, c.rank);
            panels[padded * c.rank] = 77;
            tables[t]->factor_panels(panels, right, c.scale, c.columns, c.rank, LOW_RANK_PANEL);
            assert_true(panels[padded * c.rank] == 77);
            memcpy(values, c.values, sizeof(values));
            tables[t]->low_rank_apply(&(low_rank_tile){values, c.few ? c.integers : NULL, left, panels,
                                                       c.row_step, c.rows, c.rank, c.columns},
                                      &run);
            assert_bits(values, expected, sizeof(values));
        }
    }
    assert_true(moved > 300);
}

static void test_values(void **state) {
    (void)state;
    int32_t q[MOST];
    float values[MOST + 1];
    for (size_t i = 0; i < MOST; i++) {
        q[i] = i % 9 == 0 ? 0 : (int32_t)next_random() >> (next_random() % 32u);
    }
    q[0] = INT32_MIN;
    q[1] = INT32_MAX;
    for (size_t t = 0; t < table_count; t++) {
        for (size_t l = 0; l < LENGTHS; l++) {
            size_t n = length_at(l);
            values[n] = 77;
            tables[t]->lattice_values(values, q, n, 0x1p-9f);
            for (size_t i = 0; i < n; i++) {
                float expected = (float)scalar_units((float)q[i]) * 0x1p-9f;
                assert_bits(&values[i], &expected, sizeof(float));
            }
            assert_true(values[n] == 77);
        }
    }
}

/* ---- encoders' sums ---- */

static void test_quantise_few(void **state) {
    (void)state;
    static const float up[3] = {0.7f, 0.65f, 0.55f};
    for (size_t l = 0; l < LENGTHS; l++) {
        for (int kind = 0; kind < 2; kind++) { /* the second kind has an integer that does not fit a byte */
            size_t n = length_at(l);
            float residual[MOST];
            int32_t wide[MOST];
            level_sums expected = {{0}, {0}};
            for (size_t i = 0; i < n; i++) {
                residual[i] = even() * (i % 7 == 0 ? 126.0f : 3.0f);
            }
            if (kind == 1 && n) {
                residual[next_random() % n] = n % 2 ? 127.6f : -1e9f;
            }
            kernels_cpu_portable.quantise(wide, residual, up, n);
            for (size_t i = 0; i < n; i++) {
                int32_t level = wide[i] < 0 ? -wide[i] : wide[i], which = level > 2 ? 2 : level - 1;
                if (level) {
                    expected.below[which] += (double)level - fabs((double)residual[i]);
                    expected.count[which]++;
                }
            }
            level_sums first = {{0}, {0}};
            for (size_t t = 0; t < table_count; t++) {
                int8_t few[MOST + 1];
                level_sums s = {{0}, {0}};
                few[n] = 77;
                bool fits = tables[t]->quantise_q8(few, &s, residual, up, n);
                assert_int_equal(fits, kind == 0 || n == 0);
                assert_int_equal(few[n], 77);
                for (size_t i = 0; i < n && fits; i++) {
                    assert_int_equal(few[i], wide[i]);
                }
                for (int w = 0; w < 3 && fits; w++) {
                    assert_int_equal(s.count[w], expected.count[w]);
                    assert_true(fabs(s.below[w] - expected.below[w]) <= 1e-4 * (1 + fabs(expected.below[w])));
                }
                first = t == 0 ? s : first;
                assert_bits(&first, &s, sizeof(s));
            }
        }
    }
}

static bool close_to(double a, double b) {
    return fabs(a - b) <= 1e-5 * fabs(b);
}

static int32_t lowest_bit(float v) {
    int exponent;
    if (v == 0 || !isfinite(v)) {
        return INT32_MAX;
    }
    uint64_t mantissa = (uint64_t)ldexp(fabs(frexp((double)v, &exponent)), 24);
    for (exponent -= 24; !(mantissa & 1); exponent++) {
        mantissa >>= 1;
    }
    return exponent;
}

/* Sums as lattice_sums defines them. */
static lattice_sums plain_sums(const float *now, const float *before, const float *weight, float row,
                               const float most[2], size_t n) {
    lattice_sums s = LATTICE_SUMS_INIT;
    for (size_t i = 0; i < n; i++) {
        float v = before ? now[i] - before[i] : now[i], w = weight ? weight[i] * row : 1;
        if (fabsf(now[i]) <= most[0]) {
            s.now += (double)now[i] * (double)now[i];
            s.largest = fabsf(now[i]) > s.largest ? fabsf(now[i]) : s.largest;
            s.smallest = now[i] < s.smallest ? now[i] : s.smallest;
            s.finite++;
        }
        if (fabsf(v) <= (before ? most[1] : most[0])) {
            s.moved += (double)v * (double)v;
            s.weighted += (double)(v * w) * (double)(v * w);
            s.farthest = before && fabsf(v) > s.farthest ? fabsf(v) : s.farthest;
            s.compared++;
        }
        if (before) {
            int32_t lowest = lowest_bit(before[i]);
            s.lowest_bit = lowest < s.lowest_bit ? lowest : s.lowest_bit;
            s.parent_bits |= scalar_bits(before[i]);
        }
    }
    return s;
}

static void fill_odd(float *to, size_t n) {
    for (size_t i = 0; i < n; i++) {
        switch (next_random() % 40u) {
        case 0:
            to[i] = NAN;
            break;
        case 1:
            to[i] = -INFINITY;
            break;
        case 2:
            to[i] = 0;
            break;
        case 3:
            to[i] = 3e38f * even();
            break;
        case 4:
            to[i] = 1e-42f * even();
            break;
        default:
            to[i] = ldexpf((float)(int32_t)(1000 * even()), -14); /* the lowest bits are zero */
        }
    }
}

static void test_sums(void **state) {
    (void)state;
    for (size_t l = 0; l < LENGTHS; l++) {
        for (int kind = 0; kind < 8; kind++) {
            size_t n = length_at(l);
            float now[MOST], before[MOST], weight[MOST];
            fill_odd(now, n);
            fill_odd(before, n);
            for (size_t i = 0; i < n; i++) {
                weight[i] = 1 + 0.5f * even();
            }
            const float *b = kind & 1 ? before : NULL, *w = kind & 2 ? weight : NULL;
            bool lattice = kind & 4;
            const float most[2] = {l % 2 ? FLT_MAX : 0.03f, l % 3 ? FLT_MAX : 0.05f};
            lattice_sums expected = plain_sums(now, b, w, w ? 0.7f : 1, most, n), first = {0};
            for (size_t t = 0; t < table_count; t++) {
                lattice_sums s = LATTICE_SUMS_INIT;
                tables[t]->sums_of(&s, &(sums_run){now, b, w, 0.7f, most, lattice}, n);
                assert_true(close_to(s.now, expected.now) && close_to(s.moved, expected.moved));
                assert_true(close_to(s.weighted, expected.weighted));
                assert_true(s.largest == expected.largest && s.smallest == expected.smallest &&
                            s.farthest == expected.farthest);
                assert_int_equal(s.finite, expected.finite);
                assert_int_equal(s.compared, expected.compared);
                if (lattice) {
                    assert_int_equal(s.lowest_bit, expected.lowest_bit);
                    assert_int_equal(s.parent_bits, expected.parent_bits);
                }
                first = t == 0 ? s : first;
                assert_bits(&first, &s, sizeof(s));
            }
        }
    }
}

/* ---- products ---- */

/*
 * Factors are not integers, so that the sum's last bit depends on the order, which is the same in all tables.
 */
static void test_products_of_fractions(void **state) {
    (void)state;
    static const size_t shapes[][3] = {{1, 1, 1},    {5, 3, 17},    {4, 256, 64},
                                       {6, 257, 65}, {3, 600, 131}, {9, 40, 97}};
    for (size_t s = 0; s < sizeof(shapes) / sizeof(shapes[0]); s++) {
        size_t rows = shapes[s][0], rank = shapes[s][1], columns = shapes[s][2];
        float *left = malloc(rows * rank * sizeof(float)), *right = malloc(rank * columns * sizeof(float));
        float *sums = malloc(rows * columns * sizeof(float)), *first = malloc(rows * columns * sizeof(float));
        assert_true(left && right && sums && first);
        for (size_t i = 0; i < rows * rank; i++) {
            left[i] = even();
        }
        for (size_t i = 0; i < rank * columns; i++) {
            right[i] = even();
        }
        tables[0]->products(first, left, right, rows, rank, columns);
        for (size_t i = 0; i < rows * columns; i++) {
            double expected = 0;
            for (size_t k = 0; k < rank; k++) {
                expected += (double)left[i / columns * rank + k] * (double)right[k * columns + i % columns];
            }
            assert_true(fabs(expected - (double)first[i]) < 1e-6 * (double)rank);
        }
        for (size_t t = 1; t < table_count; t++) {
            tables[t]->products(sums, left, right, rows, rank, columns);
            assert_bits(sums, first, rows * columns * sizeof(float));
        }
        free(left);
        free(right);
        free(sums);
        free(first);
    }
}

/* ---- masks ---- */

static void test_masks(void **state) {
    (void)state;
    static const unsigned one_in[] = {1, 2, 9, 200, 1000000};
    for (size_t l = 0; l < LENGTHS; l++) {
        for (size_t density = 0; density < 5; density++) {
            size_t n = length_at(l), groups = (n + MASK_OF - 1) / MASK_OF, count = 0;
            int8_t q[MOST], others[MOST + MASK_OF], back[MOST + GUARD];
            uint8_t masks[MOST / MASK_OF + 2];
            for (size_t i = 0; i < n; i++) {
                q[i] = (int8_t)(next_random() % one_in[density] ? 0 : (int)(next_random() % 255u) - 127);
                count += q[i] != 0;
            }
            memset(masks, 0xa5, sizeof(masks));
            assert_int_equal(lattice_nonzeros(q, n), count);
            assert_int_equal(lattice_to_masks(masks, others, q, n), count);
            assert_int_equal(masks[groups], 0xa5);
            assert_int_equal(lattice_masks_bits(masks, groups), count);
            for (size_t i = 0, at = 0; i < n; i++) {
                assert_int_equal(masks[i / MASK_OF] >> (i % MASK_OF) & 1, q[i] != 0);
                assert_true(q[i] == 0 || others[at++] == q[i]);
            }
            memset(back, 0x5a, sizeof(back));
            assert_true(lattice_masks_valid(masks, others, count, n));
            lattice_from_masks(back, masks, others, n);
            assert_bits(back, q, n);
            assert_int_equal(back[n], 0x5a);
            if (count) { /* one of the values is zero */
                others[next_random() % count] = 0;
                assert_false(lattice_masks_valid(masks, others, count, n));
            }
            if (n % MASK_OF) { /* a mask has a bit after the last integer */
                memset(others, 1, sizeof(others));
                masks[groups - 1] = (uint8_t)(1u << (MASK_OF - 1));
                assert_false(lattice_masks_valid(masks, others, lattice_masks_bits(masks, groups), n));
            }
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_apply_few),
        cmocka_unit_test(test_residual),
        cmocka_unit_test(test_low_rank),
        cmocka_unit_test(test_values),
        cmocka_unit_test(test_quantise_few),
        cmocka_unit_test(test_sums),
        cmocka_unit_test(test_products_of_fractions),
        cmocka_unit_test(test_masks),
    };
    return cmocka_run_group_tests(tests, find_tables, NULL);
}
