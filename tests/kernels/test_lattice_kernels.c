/*
 * kernels/ for lossy blocks: each function of each table is compared with a plain definition from
 * codec/FORMAT.md, with special values of all kinds, buffers at any alignment of floats, and sentinels around
 * the results.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/scalar_lattice.h"
#include "kernels/cpu.h"
#include "tests/support/lattices.h"
#include "tests/support/xorshift.h"

#define MOST     1031
#define SENTINEL UINT32_C(0xa5c3f00d)
#define GUARD    16

static const size_t counts[] = {0, 1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 64, 255, MOST};
#define COUNTS (sizeof(counts) / sizeof(counts[0]))

/* N words, `shift` words after an aligned address, with sentinels on both sides. */
typedef struct words {
    uint32_t *all, *at;
    size_t n;
} words;

static words words_new(size_t n, size_t shift) {
    words w = {malloc((n + 2 * GUARD + shift) * 4), NULL, n};
    assert_non_null(w.all);
    for (size_t i = 0; i < n + 2 * GUARD + shift; i++) {
        w.all[i] = SENTINEL;
    }
    w.at = w.all + GUARD + shift;
    return w;
}
static void words_free(words *w) {
    for (const uint32_t *p = w->all; p < w->at; p++) {
        assert_int_equal(*p, SENTINEL);
    }
    for (size_t i = 0; i < GUARD; i++) {
        assert_int_equal(w->at[w->n + i], SENTINEL);
    }
    free(w->all);
}
static float *floats(const words *w) {
    return (float *)(void *)w->at;
}
static int32_t *integers(const words *w) {
    return (int32_t *)(void *)w->at;
}
static uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}
static float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

/* ---- inputs ---- */

/*
 * Zeros, denormals, infinities, NaNs, halves, values around the limits; then random values, and values as in
 * training.
 */
static uint32_t any_value(size_t i) {
    static const uint32_t odd[] = {0,          1,          0x7fffff,   0x800000,   0x7f7fffff,
                                   0x7f800000, 0x7f800001, 0x7fc00000, 0x7fffffff, 0x3f000000,
                                   0x3fc00000, 0x3effffff, 0x4b000000, 0x4affffff, 0x4e7fffff,
                                   0x4e800000, 0x4e800001, 0x3f800000, 0x40200000, 0x00080000};
    const size_t n = sizeof(odd) / sizeof(odd[0]);
    if (i % 3 == 0) {
        return odd[next_random() % n] | (next_random() % 2 ? 0x80000000 : 0);
    }
    return i % 3 == 1 ? (uint32_t)next_random() : 0x38000000 + (uint32_t)(next_random() % 0x9000000);
}

static int32_t any_integer(void) {
    static const int32_t odd[] = {0,    1,     -1,     2,       -2,      3,         -3,        127,
                                  -128, 32767, -32768, 1 << 24, 8388609, INT32_MAX, INT32_MIN, INT32_MIN + 1};
    return next_random() % 3 ? (int32_t)(next_random() % 9) - 4 : odd[next_random() % 16];
}

static words any_values(size_t n, size_t shift) {
    words w = words_new(n, shift);
    for (size_t i = 0; i < n; i++) {
        w.at[i] = any_value(i);
    }
    return w;
}
static words any_integers(size_t n, size_t shift) {
    words w = words_new(n, shift);
    for (size_t i = 0; i < n; i++) {
        integers(&w)[i] = any_integer();
    }
    return w;
}
/* Small integers in bytes, at any address. */
static int8_t *few_integers(size_t n) {
    int8_t *q = malloc(n + 1);
    assert_non_null(q);
    for (size_t i = 0; i < n; i++) {
        q[i] = next_random() % 12 ? 0 : (int8_t)next_random();
    }
    return q;
}

/* ---- plain definitions ---- */

static int32_t expected_units(float x) {
    return fabsf(x) < 1073741824.0f ? (int32_t)rint((double)x) : 0;
}
static int32_t sum(int32_t a, int32_t b) {
    return (int32_t)((uint32_t)a + (uint32_t)b);
}

static float expected_power(int32_t k) {
    static const uint32_t mantissas[] = {0, 0x1837f0, 0x3504f3, 0x5744fd};
    if (k < -480 || k > 480) {
        return k < 0 ? ldexpf(1, -120) : ldexpf(1, 120);
    }
    int32_t octave = k >= 0 ? k / 4 : -((3 - k) / 4);
    return float_of(((uint32_t)(octave + 127) << 23) + mantissas[k - 4 * octave]);
}

static float expected_linear(float p, int32_t q, const float *low_rank, float column,
                             const lattice_run *run) {
    volatile float s = run->row_step;
    if (run->column_step) {
        s = run->row_step * column;
    }
    volatile float a = fabsf((float)q);
    a = q ? a - run->offset[q == 1 || q == -1 ? 0 : q == 2 || q == -2 ? 1 : 2] : 0;
    volatile float own = (q < 0 ? -a : a) * s, low = 0;
    if (low_rank) {
        low = *low_rank * run->low_rank_unit;
        low = low * s;
    }
    int32_t more = sum(expected_units(low), expected_units(own));
    volatile float at = p * run->per_unit;
    volatile float moved = (float)sum(expected_units(at), more);
    moved = moved * run->unit;
    return more ? moved : p;
}

static int32_t expected_level(uint32_t bits) {
    if (bits == 0 || bits >= 0x7f800000) {
        return 0;
    }
    uint64_t level = ((uint64_t)bits + 0x80000) >> 20;
    return (int32_t)(level < 1 ? 1 : level > 2039 ? 2039 : level);
}

static uint32_t expected_levels(uint32_t p, int32_t q, int32_t d, const level_run *run) {
    int32_t f = run->has_parent ? expected_level(p) : run->birth;
    if (run->has_parent && q == 0 && d == 0) {
        return p;
    }
    if (q == INT32_MIN || (f == 0 && q == 0)) {
        return 0;
    }
    uint32_t steps = f || q < 0 ? (uint32_t)q : (uint32_t)q - 1;
    int32_t level = (int32_t)((uint32_t)(f ? f : run->birth) + (uint32_t)d + steps * (uint32_t)run->step);
    return (uint32_t)(level < 1 ? 1 : level > 2039 ? 2039 : level) << 20;
}

/* ---- runs ---- */

static lattice_run any_run(const float *column_step) {
    static const int32_t exponents[] = {0, -30, -17, -120, 120, 3};
    int32_t e = exponents[next_random() % 6];
    return (lattice_run){.unit = ldexpf(1, e),
                         .per_unit = ldexpf(1, -e),
                         .row_step =
                             expected_power((int32_t)(next_random() % (next_random() % 3 ? 40 : 960)) - 20),
                         .column_step = column_step,
                         .low_rank_unit = ldexpf(1, (int)(next_random() % 129) - 64),
                         .offset = {(float)(next_random() % 256) / 256, (float)(next_random() % 256) / 256,
                                    (float)(next_random() % 256) / 256}};
}

static words any_steps(size_t n) {
    words w = words_new(n, 1);
    for (size_t j = 0; j < n; j++) {
        floats(&w)[j] = expected_power((int32_t)(next_random() % (next_random() % 9 ? 40 : 990)) - 20);
    }
    return w;
}
static words any_products(size_t n) {
    words w = words_new(n, 2);
    for (size_t j = 0; j < n; j++) {
        floats(&w)[j] = (float)((int32_t)(next_random() >> 40) - (1 << 23));
        floats(&w)[j] = next_random() % 3 ? floats(&w)[j] / 65536 : floats(&w)[j]; /* any float is allowed */
    }
    return w;
}

static void same_bits(const words *a, const uint32_t *want, const kernels *k, const char *what) {
    for (size_t i = 0; i < a->n; i++) {
        if (a->at[i] != want[i]) {
            fail_msg("%s, %s: element %zu of %zu is %08x, not %08x", k->name, what, i, a->n, a->at[i],
                     want[i]);
        }
    }
}

#define EACH_BACKEND(k, n)                    \
    const kernels *all_[KERNELS_CPU_BEST];    \
    size_t backends_ = kernels_cpu_all(all_); \
    for (size_t b_ = 0; b_ < backends_; b_++) \
        for (size_t c_ = 0, n = counts[0]; c_ < COUNTS && ((n = counts[c_]), (k = all_[b_])); c_++)

static uint32_t *copy_of(const words *w) {
    uint32_t *out = malloc(w->n * 4 + 1);
    assert_non_null(out);
    memcpy(out, w->at, w->n * 4);
    return out;
}

static void test_quarter_octaves(void **state) {
    (void)state;
    for (int32_t k = -5000; k < 5000; k++) {
        assert_int_equal(bits_of(scalar_quarter_octaves(k)), bits_of(expected_power(k)));
        if (k >= -480 && k <= 480) {
            assert_int_equal(bits_of(scalar_quarter_octaves(k)), bits_of((float)exp2(k / 4.0)));
        }
    }
    assert_int_equal(bits_of(scalar_quarter_octaves(INT32_MIN)), bits_of(ldexpf(1, -120)));
    assert_int_equal(bits_of(scalar_quarter_octaves(INT32_MAX)), bits_of(ldexpf(1, 120)));
}

static void test_apply(void **state) {
    (void)state;
    const kernels *k;
    EACH_BACKEND(k, n) {
        for (unsigned form = 0; form < 40; form++) {
            words p = any_values(n, form % 5), q = any_integers(n, 3), steps = any_steps(n),
                  low = any_products(n);
            lattice_run run = any_run(form & 1 ? floats(&steps) : NULL);
            uint32_t *want = copy_of(&p);
            for (size_t i = 0; i < n; i++) {
                want[i] =
                    bits_of(expected_linear(float_of(p.at[i]), integers(&q)[i],
                                            form & 2 ? &floats(&low)[i] : NULL, floats(&steps)[i], &run));
            }
            k->lattice_apply(floats(&p), integers(&q), form & 2 ? floats(&low) : NULL, n, &run);
            /* No NaN results from arithmetic: p stays, or becomes a number. */
            same_bits(&p, want, k, "lattice_apply");
            free(want);
            words_free(&p);
            words_free(&q);
            words_free(&steps);
            words_free(&low);
        }
    }
}

static void test_apply_few(void **state) {
    (void)state;
    const kernels *k;
    EACH_BACKEND(k, n) {
        for (unsigned form = 0; form < 20; form++) {
            words p = any_values(n, form % 5), wide = words_new(n, 1), steps = any_steps(n);
            int8_t *q = few_integers(n);
            for (size_t i = 0; i < n; i++) {
                integers(&wide)[i] = q[i];
            }
            lattice_run run = any_run(form & 1 ? floats(&steps) : NULL);
            words other = words_new(n, 2);
            memcpy(other.at, p.at, n * 4);
            k->lattice_apply_q8(floats(&p), q, n, &run);
            k->lattice_apply(floats(&other), integers(&wide), NULL, n, &run);
            same_bits(&p, other.at, k, "lattice_apply_q8");
            free(q);
            words_free(&p);
            words_free(&other);
            words_free(&wide);
            words_free(&steps);
        }
    }
}

static void test_values(void **state) {
    (void)state;
    const kernels *k;
    EACH_BACKEND(k, n) {
        words q = any_integers(n, 1), out = words_new(n, 3);
        float unit = ldexpf(1, (int)(next_random() % 241) - 120);
        uint32_t *want = copy_of(&q);
        lattice_run run = {.unit = unit, .per_unit = 1 / unit, .row_step = 1, .low_rank_unit = 1};
        for (size_t i = 0; i < n; i++) {
            want[i] = bits_of(expected_linear(0, integers(&q)[i], NULL, 1, &run));
        }
        k->lattice_values(floats(&out), integers(&q), n, unit);
        same_bits(&out, want, k, "lattice_values");
        free(want);
        words_free(&q);
        words_free(&out);
    }
}

static void test_levels(void **state) {
    (void)state;
    const kernels *k;
    EACH_BACKEND(k, n) {
        for (unsigned form = 0; form < 40; form++) {
            words p = any_values(n, form % 5), q = any_integers(n, 1), columns = words_new(n, 2),
                  of = words_new(n, 1);
            level_run run = {.has_parent = form & 1,
                             .row = form % 3 ? (int32_t)(next_random() % 8193) - 4096 : 0,
                             .column = integers(&columns),
                             .birth = 1 + (int32_t)(next_random() % 2039),
                             .step = 1 + (int32_t)(next_random() % (form % 4 ? 40 : 4096))};
            for (size_t i = 0; i < n; i++) {
                integers(&columns)[i] = next_random() % 2 ? -run.row : (int32_t)(next_random() % 8193) - 4096;
            }
            uint32_t *want = copy_of(&p), *levels = copy_of(&p);
            for (size_t i = 0; i < n; i++) {
                levels[i] = (uint32_t)expected_level(p.at[i]);
                want[i] = expected_levels(p.at[i], integers(&q)[i], run.row + integers(&columns)[i], &run);
            }
            k->level_of(integers(&of), floats(&p), n);
            same_bits(&of, levels, k, "level_of");
            k->level_apply(floats(&p), integers(&q), n, &run);
            same_bits(&p, want, k, "level_apply");
            free(want);
            free(levels);
            words_free(&p);
            words_free(&q);
            words_free(&of);
            words_free(&columns);
        }
    }
}

static void test_widen(void **state) {
    (void)state;
    const kernels *k;
    EACH_BACKEND(k, n) {
        uint16_t *half = malloc(n * 2 + 1);
        assert_non_null(half);
        for (size_t i = 0; i < n; i++) {
            half[i] = (uint16_t)next_random();
        }
        words wide = words_new(n, 1), same = any_values(n, 2), out = words_new(n, 3);
        k->widen(floats(&wide), CKD_BF16, half, n);
        for (size_t i = 0; i < n; i++) {
            assert_int_equal(wide.at[i], (uint32_t)half[i] << 16);
        }
        k->widen(floats(&wide), CKD_F16, half, n);
        for (size_t i = 0; i < n; i++) {
            uint32_t e = half[i] >> 10 & 31, m = half[i] & 1023;
            double want = e ? ldexp(m + 1024.0, (int)e - 25) : ldexp(m, -24);
            want = half[i] >> 15 ? -want : want;
            if (e < 31) {
                assert_int_equal(wide.at[i], bits_of((float)want));
            } else {
                assert_true(m ? isnan(floats(&wide)[i])
                              : wide.at[i] == (0x7f800000 | (uint32_t)(half[i] & 0x8000) << 16));
            }
        }
        k->widen(floats(&out), CKD_F32, same.at, n);
        same_bits(&out, same.at, k, "widen");
        words_free(&wide);
        words_free(&same);
        words_free(&out);
        free(half);
    }
}

/* Sums of integers are exact in any order. */
static void test_products(void **state) {
    (void)state;
    static const size_t ranks[] = {0, 1, 2, 3, 4, 5, 8, 11};
    const kernels *k;
    EACH_BACKEND(k, n) {
        for (size_t r = 0; r < 8 && n <= 64; r++) {
            size_t rank = ranks[r], rows = n < 8 ? n : 5;
            words left = words_new(rows * rank, 1), right = words_new(rank * n, 3),
                  sums = words_new(rows * n, 2);
            for (size_t i = 0; i < rows * rank; i++) {
                floats(&left)[i] = next_random() % 3 ? 0 : (float)((int32_t)(next_random() % 401) - 200);
            }
            for (size_t i = 0; i < rank * n; i++) {
                floats(&right)[i] = (float)((int32_t)(next_random() % 4001) - 2000);
            }
            k->products(floats(&sums), floats(&left), floats(&right), rows, rank, n);
            for (size_t i = 0; i < rows; i++) {
                for (size_t j = 0; j < n; j++) {
                    int64_t want = 0;
                    for (size_t c = 0; c < rank; c++) {
                        want += (int64_t)floats(&left)[i * rank + c] * (int64_t)floats(&right)[c * n + j];
                    }
                    assert_int_equal(sums.at[i * n + j], bits_of((float)want));
                }
            }
            words_free(&left);
            words_free(&right);
            words_free(&sums);
        }
    }
}

/* ---- encoder functions: all tables give the same bits, within the bounds that are known ---- */

static void test_residuals_and_integers(void **state) {
    (void)state;
    const kernels *k;
    EACH_BACKEND(k, n) {
        for (unsigned form = 0; form < 20; form++) {
            words now = any_values(n, 1), before = any_values(n, 2), steps = any_steps(n),
                  low = any_products(n);
            words residual = words_new(n, 3), q = words_new(n, 1), again = words_new(n, 2),
                  q_again = words_new(n, 3);
            lattice_run run = any_run(form & 1 ? floats(&steps) : NULL);
            const float *which_part = form & 2 ? floats(&low) : NULL;
            const float up[3] = {form % 5 ? 0.5f + (float)(form % 4) / 8 : INFINITY, 0.5f,
                                 form % 3 ? 0.625f : 0.5f};
            k->lattice_residual(floats(&residual), floats(&now), floats(&before), which_part, n, &run);
            kernels_cpu()->lattice_residual(floats(&again), floats(&now), floats(&before), which_part, n,
                                            &run);
            same_bits(&residual, again.at, k, "lattice_residual");
            k->quantise(integers(&q), floats(&residual), up, n);
            kernels_cpu()->quantise(integers(&q_again), floats(&residual), up, n);
            same_bits(&q, q_again.at, k, "quantise");
            for (size_t i = 0; i < n; i++) {
                float r = floats(&residual)[i];
                assert_true(fabsf(r) < LATTICE_LIMIT); /* the result is always finite */
                int32_t size = integers(&q)[i] < 0 ? -integers(&q)[i] : integers(&q)[i];
                assert_true(integers(&q)[i] == 0 || (integers(&q)[i] < 0) == (r < 0));
                assert_true((size == 0) == (fabsf(r) < up[0]));
                double left = (double)fabsf(r) - size,
                       rounding = fabs(r) * 1e-7; /* r + 1 - up[2] is a float */
                assert_true(size < 2 || left > -0.5 - rounding);
                assert_true(left < 1 + rounding || up[0] > 1);
            }
            words *all[] = {&now, &before, &steps, &low, &residual, &q, &again, &q_again};
            for (size_t i = 0; i < 8; i++) {
                words_free(all[i]);
            }
        }
    }
}

/* Values may be anything, not only residuals. */
static void test_integers_of_any_values(void **state) {
    (void)state;
    const kernels *k;
    const float up[3] = {0.6f, 0.7f, 0.6f};
    EACH_BACKEND(k, n) {
        words r = any_values(n, 1), q = words_new(n, 2);
        k->quantise(integers(&q), floats(&r), up, n);
        for (size_t i = 0; i < n; i++) {
            float x = floats(&r)[i];
            assert_true(fabsf(x) < LATTICE_LIMIT - 2 || integers(&q)[i] == 0 || fabsf(x) < LATTICE_LIMIT);
            assert_true(!(fabsf(x) >= LATTICE_LIMIT || isnan(x)) || integers(&q)[i] == 0);
        }
        words_free(&r);
        words_free(&q);
    }
}

static void test_levels_to_integers(void **state) {
    (void)state;
    const kernels *k;
    EACH_BACKEND(k, n) {
        for (unsigned form = 0; form < 20; form++) {
            words now = any_values(n, 1), before = any_values(n, 2), columns = words_new(n, 3),
                  q = words_new(n, 1), again = words_new(n, 2);
            level_run run = {.has_parent = form & 1,
                             .row = (int32_t)(next_random() % 65) - 32,
                             .column = integers(&columns),
                             .birth = 1 + (int32_t)(next_random() % 2039),
                             .step = form % 4 ? 1 : 16};
            for (size_t i = 0; i < n; i++) {
                integers(&columns)[i] = (int32_t)(next_random() % 65) - 32;
            }
            k->level_quantise(integers(&q), floats(&now), floats(&before), 0.5f, n, &run);
            kernels_cpu()->level_quantise(integers(&again), floats(&now), floats(&before), 0.5f, n, &run);
            same_bits(&q, again.at, k, "level_quantise");
            k->level_apply(floats(&before), integers(&q), n, &run);
            /* Zeros stay zero, no other value becomes zero, and levels are at most half a step off. */
            for (size_t i = 0; i < n; i++) {
                int32_t to = expected_level(now.at[i]), got = expected_level(before.at[i]);
                assert_true((to == 0) == (got == 0));
                assert_true(to == 0 || abs(to - got) <= run.step);
            }
            words *all[] = {&now, &before, &columns, &q, &again};
            for (size_t i = 0; i < 5; i++) {
                words_free(all[i]);
            }
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_quarter_octaves),
        cmocka_unit_test(test_apply),
        cmocka_unit_test(test_apply_few),
        cmocka_unit_test(test_values),
        cmocka_unit_test(test_levels),
        cmocka_unit_test(test_widen),
        cmocka_unit_test(test_products),
        cmocka_unit_test(test_residuals_and_integers),
        cmocka_unit_test(test_integers_of_any_values),
        cmocka_unit_test(test_levels_to_integers),
    };
    return cmocka_run_group_tests_name("lattice kernels", tests, NULL, NULL);
}
