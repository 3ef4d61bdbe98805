/*
 * Operations on runs of a lossy tile: each is compared with a plain definition. All instruction sets give the
 * same bits.
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

/* Lengths around the sizes of vectors and blocks. */
static size_t length_at(size_t i) {
    static const size_t some[] = {63, 64, 65, 127, 128, 129, 255, 256, 257, 300, 511, 512, 699, MOST};
    return i < 40 ? i : some[i - 40];
}
#define LENGTHS (40 + 14)

/* ---- values beyond limits ---- */

/* Numbers, values that are not finite, and values at the ends of ranges. */
static float odd(unsigned kind) {
    static const float all[] = {NAN,   -NAN,   INFINITY, -INFINITY, FLT_MAX, -FLT_MAX,    0.0f,
                                -0.0f, 1e-42f, -1e-42f,  0.5f,      -0.5f,   0.50000006f, -0.50000006f};
    return all[kind % (sizeof(all) / sizeof(all[0]))];
}

static bool too_large(float v, float limit, bool positive) {
    return !(fabsf(v) <= limit) || (positive && signbit(v));
}

static bool expected_beyond(const float *now, const float *before, const float limits[3], bool positive,
                            size_t n) {
    bool any = false;
    for (size_t i = 0; i < n; i++) {
        any |= too_large(now[i], limits[0], positive);
        any |= before &&
               (too_large(before[i], limits[1], positive) || too_large(now[i] - before[i], limits[2], false));
    }
    return any;
}

static void test_beyond(void **state) {
    (void)state;
    static const float limits[][3] = {
        {0.5f, 0.5f, 0.75f}, {FLT_MAX, 0.5f, FLT_MAX}, {0.5f, FLT_MAX, 0.25f}, {FLT_MAX, FLT_MAX, FLT_MAX}};
    size_t seen[2] = {0, 0};
    for (size_t l = 0; l < LENGTHS; l++) {
        for (unsigned kind = 0; kind < 64; kind++) {
            size_t n = length_at(l);
            bool positive = kind & 1, with = kind & 2;
            float now[MOST], before[MOST];
            for (size_t i = 0; i < n; i++) {
                now[i] = 0.25f * (1 + 0.5f * even());
                before[i] = positive ? 0.2f : -0.05f;
            }
            if (n && kind >= 4) { /* one of the values is special */
                (kind & 4 ? now : before)[next_random() % n] = odd(kind / 4 + (unsigned)l);
            }
            for (size_t s = 0; s < 4; s++) {
                bool expected = expected_beyond(now, with ? before : NULL, limits[s], positive, n);
                seen[expected]++;
                for (size_t t = 0; t < table_count; t++) {
                    assert_int_equal(tables[t]->beyond(now, with ? before : NULL, limits[s], positive, n),
                                     expected);
                }
            }
        }
    }
    assert_true(seen[0] > 1000 && seen[1] > 1000);
}

static void test_bins(void **state) {
    (void)state;
    for (size_t l = 0; l < LENGTHS; l++) {
        size_t n = length_at(l);
        float values[MOST];
        uint16_t expected[MOST], got[MOST + GUARD];
        for (size_t i = 0; i < n; i++) {
            values[i] = next_random() % 9u ? 40 * even() : odd(next_random());
            double at = fabs((double)values[i]) * 32;
            expected[i] = at < 1023 ? (uint16_t)at : 1023;
        }
        for (size_t t = 0; t < table_count; t++) {
            memset(got, 0x55, sizeof(got));
            tables[t]->bins_of(got, values, 32, 1023, n);
            assert_memory_equal(got, expected, n * sizeof(uint16_t));
            assert_int_equal(got[n], 0x5555);
        }
    }
}

/* ---- levels of rows and columns, without integers ---- */

static void test_level_fill(void **state) {
    (void)state;
    static const int32_t births[] = {0, 1, 700, LEVEL_MAX}, rows[] = {0, 5, -3000, 3000};
    for (size_t l = 0; l < LENGTHS; l++) {
        for (size_t kind = 0; kind < 16; kind++) {
            size_t n = length_at(l);
            int32_t column[MOST + 1], zeros[MOST + 1] = {0};
            float expected[MOST + 1] = {0}, got[MOST + GUARD];
            for (size_t i = 0; i < n; i++) {
                column[i] = (int32_t)(next_random() % 61u) - 30;
            }
            level_run run = {.row = rows[kind / 4], .column = column, .birth = births[kind % 4], .step = 3};
            kernels_cpu_portable.level_apply(expected, zeros, n, &run);
            for (size_t t = 0; t < table_count; t++) {
                memset(got, 0x55, sizeof(got));
                tables[t]->level_fill(got, n, &run);
                assert_memory_equal(got, expected, n * sizeof(float));
                for (size_t i = n; i < n + GUARD && i < MOST + GUARD; i++) {
                    assert_int_equal(scalar_bits(got[i]), 0x55555555);
                }
            }
        }
    }
}

/* ---- means of rows and columns ---- */

static void fill_odd(float *to, size_t n) {
    for (size_t i = 0; i < n; i++) {
        to[i] = next_random() % 8u ? ldexpf((float)(int32_t)(1000 * even()), -14) : odd(next_random());
    }
}

/* Whether a value counts for the means. */
static bool counts(float now, bool magnitudes, float most) {
    float v = magnitudes ? fabsf(now) : now;
    return v > 0 && v <= most;
}

static bool close_to(double a, double b) {
    return a == b || fabs(a - b) <= 1e-9 * fabs(b);
}

static void test_moment_row(void **state) {
    (void)state;
    for (size_t l = 0; l < LENGTHS; l++) {
        for (unsigned kind = 0; kind < 2; kind++) {
            size_t n = length_at(l);
            bool magnitudes = kind & 1;
            float most = l % 2 ? FLT_MAX : 0.02f, now[MOST];
            double expected[2] = {0, 0}, first[2] = {0, 0};
            fill_odd(now, n);
            for (size_t i = 0; i < n; i++) {
                if (counts(now[i], magnitudes, most)) {
                    expected[0] += magnitudes ? fabs((double)now[i]) : (double)now[i];
                    expected[1] += 1;
                }
            }
            for (size_t t = 0; t < table_count; t++) {
                double sums[2] = {0, 0};
                tables[t]->moment_row(sums, now, magnitudes, most, n);
                assert_true(close_to(sums[0], expected[0]) && close_to(sums[1], expected[1]));
                memcpy(first, t == 0 ? sums : first, sizeof(first));
                assert_memory_equal(first, sums, sizeof(first));
            }
        }
    }
}

enum { ROWS = 5, STRIDE = MOST + 3 };

static void test_moment_columns(void **state) {
    (void)state;
    static const double scale[ROWS] = {1, 0.3, 7e-9, 1e30, 2};
    static float now[ROWS * STRIDE];
    for (size_t l = 0; l < LENGTHS; l++) {
        for (unsigned kind = 0; kind < 4; kind++) {
            size_t n = length_at(l), rows = l % (ROWS + 1);
            bool magnitudes = kind & 1;
            float most = l % 2 ? FLT_MAX : 0.02f;
            double sum[MOST + 1], of[MOST + 1], got[2][MOST + 1];
            uint32_t count[MOST + 1], got_count[MOST + 1];
            fill_odd(now, ROWS * STRIDE);
            for (size_t j = 0; j <= MOST; j++) {
                sum[j] = of[j] = (double)j;
                count[j] = (uint32_t)j;
            }
            memcpy(got[0], sum, sizeof(sum));
            for (size_t r = 0; r < rows; r++) { /* the order of the sums */
                for (size_t j = 0; j < n; j++) {
                    size_t i = r * STRIDE + j;
                    bool is = counts(now[i], magnitudes, most);
                    sum[j] += !is ? 0 : magnitudes ? fabs((double)now[i]) : (double)now[i];
                    of[j] += !is ? 0 : scale[r];
                    count[j] += is;
                }
            }
            for (size_t t = 0; t < table_count; t++) {
                for (size_t j = 0; j <= MOST; j++) {
                    got[0][j] = got[1][j] = (double)j;
                    got_count[j] = (uint32_t)j;
                }
                moment_sums to = {got[0], kind & 2 ? got[1] : NULL, got_count};
                tables[t]->moment_columns(&to, &(moment_rows){now, STRIDE, rows, scale, magnitudes, most}, n);
                assert_memory_equal(got[0], sum, sizeof(sum));
                assert_memory_equal(got_count, count, sizeof(count));
                if (kind & 2) {
                    assert_memory_equal(got[1], of, sizeof(of));
                }
            }
        }
    }
}

/* ---- integers from values, and errors ---- */

static void test_quantise_run(void **state) {
    (void)state;
    static const float up[][3] = {{0.7f, 0.65f, 0.55f}, {0.5f, 0.5f, 0.5f}, {INFINITY, INFINITY, INFINITY}};
    size_t zero = 0, other = 0;
    for (size_t l = 0; l < LENGTHS; l++) {
        for (unsigned kind = 0; kind < 24; kind++) {
            size_t n = length_at(l);
            float now[MOST], before[MOST], none[MOST] = {0}, column[MOST], residual[MOST];
            /* Integers of the last ones do not fit a byte. */
            float spread = kind < 8 ? 0.01f : (kind < 16 ? 2.0f : 200.0f);
            for (size_t i = 0; i < n; i++) {
                column[i] = 1 + 0.5f * even();
                before[i] = next_random() % 60u ? even() : odd(next_random());
                now[i] = next_random() % 60u ? before[i] + 0x1p-10f * spread * even() * (i % 16 ? 1 : 4)
                                             : odd(next_random());
            }
            lattice_run run = {.unit = 0x1p-12f,
                               .per_unit = 0x1p12f,
                               .row_step = 5.3f,
                               .column_step = kind & 1 ? column : NULL,
                               .low_rank_unit = 1};
            const float *from = kind & 2 ? before : NULL;
            if (!from) {
                for (size_t i = 0; i < n; i++) {
                    now[i] -= isfinite(before[i]) ? before[i] : 0;
                }
            }
            int8_t expected[MOST + 1] = {0};
            level_sums sums = {{0}, {0}};
            int largest = 0;
            kernels_cpu_portable.lattice_residual(residual, now, from ? from : none, NULL, n, &run);
            bool fits = kernels_cpu_portable.quantise_q8(expected, &sums, residual, up[l % 3], n);
            for (size_t i = 0; i < n; i++) {
                zero += expected[i] == 0;
                other += expected[i] != 0;
                largest = abs(expected[i]) > largest ? abs(expected[i]) : largest;
            }
            for (size_t t = 0; t < table_count; t++) {
                int8_t got[MOST + 1];
                got[n] = 77;
                int32_t most = tables[t]->quantise_run(got, now, from, up[l % 3], n, &run);
                assert_int_equal(got[n], 77);
                assert_int_equal(most <= INT8_MAX, fits);
                if (fits) {
                    assert_int_equal(most, largest);
                    assert_memory_equal(got, expected, n);
                }
            }
        }
    }
    assert_true(zero > 10000 && other > 10000);
}

static void test_error_of(void **state) {
    (void)state;
    for (size_t l = 0; l < LENGTHS; l++) {
        for (unsigned kind = 0; kind < 4; kind++) {
            size_t n = length_at(l);
            float given[MOST], decoded[MOST];
            error_sums expected = {0}, first = {0};
            for (size_t i = 0; i < n; i++) {
                given[i] = kind & 1 && next_random() % 30u == 0 ? odd(next_random()) : even();
                decoded[i] =
                    kind & 2 && next_random() % 300u == 0 ? odd(next_random()) : given[i] + 0.01f * even();
                float d = fabsf(given[i] - decoded[i]);
                if (isfinite(given[i])) {
                    expected.finite++;
                    expected.energy += (double)given[i] * (double)given[i];
                    expected.error += isfinite(d) ? (double)d * (double)d : 0;
                    d = isfinite(d) ? d : INFINITY;
                    expected.largest = d > expected.largest ? d : expected.largest;
                }
            }
            for (size_t t = 0; t < table_count; t++) {
                error_sums s = {0};
                tables[t]->error_of(&s, given, decoded, n);
                assert_true(close_to(s.energy, expected.energy) && close_to(s.error, expected.error));
                assert_true(s.largest == expected.largest && s.finite == expected.finite);
                first = t == 0 ? s : first;
                assert_memory_equal(&first, &s, sizeof(s));
            }
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_beyond),         cmocka_unit_test(test_bins),
        cmocka_unit_test(test_level_fill),     cmocka_unit_test(test_moment_row),
        cmocka_unit_test(test_moment_columns), cmocka_unit_test(test_quantise_run),
        cmocka_unit_test(test_error_of),
    };
    return cmocka_run_group_tests(tests, find_tables, NULL);
}
