/* Operations on runs of a lossy tile: each against a plain definition, all instruction sets the same bits, sentinels around. */
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

static const kernels *tables[2];
static size_t table_count;

static int find_tables(void **state) {
    (void)state;
    tables[table_count++] = &kernels_cpu_portable;
    if (kernels_cpu() != &kernels_cpu_portable) {
        tables[table_count++] = kernels_cpu();
    }
    return 0;
}

/* Lengths around the vectors' and the blocks' sizes. */
static size_t length_at(size_t i) {
    static const size_t some[] = {63, 64, 65, 127, 128, 129, 255, 256, 257, 300, 511, 512, 699, MOST};
    return i < 40 ? i : some[i - 40];
}
#define LENGTHS (40 + 14)

/* ---- what is too large ---- */

/* Numbers, and kinds of what is none or at the end of a range. */
static float odd(unsigned kind) {
    static const float all[] = {NAN,   -NAN,   INFINITY, -INFINITY, FLT_MAX, -FLT_MAX,    0.0f,
                                -0.0f, 1e-42f, -1e-42f,  0.5f,      -0.5f,   0.50000006f, -0.50000006f};
    return all[kind % (sizeof(all) / sizeof(all[0]))];
}

static bool too_large(float v, float limit, bool positive) {
    return !(fabsf(v) <= limit) || (positive && signbit(v));
}

static bool plainly_beyond(const float *now, const float *before, const float limits[3], bool positive,
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
            if (n && kind >= 4) { /* one of them is special */
                (kind & 4 ? now : before)[next_random() % n] = odd(kind / 4 + (unsigned)l);
            }
            for (size_t s = 0; s < 4; s++) {
                bool expected = plainly_beyond(now, with ? before : NULL, limits[s], positive, n);
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

/* ---- levels of rows and columns alone ---- */

static void test_level_fill(void **state) {
    (void)state;
    static const int32_t births[] = {0, 1, 700, LEVEL_MOST}, rows[] = {0, 5, -3000, 3000};
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

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_beyond),
        cmocka_unit_test(test_level_fill),
    };
    return cmocka_run_group_tests(tests, find_tables, NULL);
}
