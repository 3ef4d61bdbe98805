/*
 * kernels/: each function is compared with a plain definition, for all instruction sets, with buffers of any
 * alignment and sentinels around them.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include <cmocka.h>

#include <fenv.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cpu.h"

#define SENTINEL 0xa5
#define GUARD    64
#define MOST     4099

typedef struct guarded {
    uint8_t *all, *at;
    size_t size;
} guarded;

/* `size` bytes at an odd address, with sentinels on both sides. */
static guarded guarded_new(size_t size, size_t shift) {
    guarded g = {malloc(size + 2 * GUARD + shift), NULL, size};
    assert_non_null(g.all);
    memset(g.all, SENTINEL, size + 2 * GUARD + shift);
    g.at = g.all + GUARD + shift;
    return g;
}

static void guarded_free(guarded *g) {
    for (uint8_t *p = g->all; p < g->at; p++) {
        assert_int_equal(*p, SENTINEL);
    }
    for (size_t i = 0; i < GUARD; i++) {
        assert_int_equal(g->at[g->size + i], SENTINEL);
    }
    free(g->all);
}

static uint64_t seed = 1;
static uint64_t next_random(void) {
    seed ^= seed << 13;
    seed ^= seed >> 7;
    seed ^= seed << 17;
    return seed;
}

static uint64_t load(const void *from, size_t width, size_t i) {
    uint64_t v = 0;
    memcpy(&v, (const uint8_t *)from + i * width, width); /* little endian, as in all tests of bits here */
    return v;
}
static void store(void *to, size_t width, size_t i, uint64_t v) {
    memcpy((uint8_t *)to + i * width, &v, width);
}
static uint64_t mask_of(size_t width) {
    return UINT64_MAX >> (64 - 8 * width);
}

/*
 * Zeros, ones, infinities, NaNs, denormals and neighbours of powers of two, with either sign; then random
 * values.
 */
static uint64_t pattern(size_t i, size_t width) {
    static const uint64_t f64[] = {0,
                                   1,
                                   2,
                                   0xfffffffffffff,
                                   0x10000000000000,
                                   0x3ff0000000000000,
                                   0x3fefffffffffffff,
                                   0x7fefffffffffffff,
                                   0x7ff0000000000000,
                                   0x7ff0000000000001,
                                   0x7ff8000000000000,
                                   0x7fffffffffffffff};
    static const uint64_t f32[] = {0,          1,          0x7fffff,   0x800000,   0x3f800000, 0x3f7fffff,
                                   0x7f7fffff, 0x7f800000, 0x7f800001, 0x7fc00000, 0x7fffffff, 0x33000000};
    static const uint64_t f16[] = {0,      1,      0x3ff,  0x400,  0x3c00, 0x7bff,
                                   0x7c00, 0x7c01, 0x7e00, 0x7fff, 0x7f80, 0x7fc0};
    static const uint64_t f8[] = {0, 1, 7, 8, 0x38, 0x3c, 0x7b, 0x7c, 0x7e, 0x7f, 0x40, 0x55};
    const uint64_t *special = width == 8 ? f64 : (width == 4 ? f32 : (width == 2 ? f16 : f8));
    if (i < 24) {
        return special[i / 2] | (i % 2 ? UINT64_C(1) << (8 * width - 1) : 0);
    }
    return (next_random() >> (next_random() % (8 * width))) & mask_of(width);
}

static const size_t counts[] = {0, 1, 2, 3, 7, 8, 15, 24, 31, 32, 33, 63, 64, 65, 255, 4096, MOST};
#define COUNTS (sizeof(counts) / sizeof(counts[0]))

#define EACH_CASE(k, d, c)                        \
    const kernels *all_[KERNELS_CPU_BEST];        \
    size_t backends_ = kernels_cpu_all(all_);     \
    for (size_t b_ = 0; b_ < backends_; b_++)     \
        for (int d = CKD_F64; d <= CKD_BOOL; d++) \
            for (size_t c_ = 0, c = counts[0]; c_ < COUNTS && ((c = counts[c_]), (k = all_[b_])); c_++)

static void test_table(void **state) {
    (void)state;
    const kernels *all[KERNELS_CPU_BEST];
    size_t n = kernels_cpu_all(all);
    assert_ptr_equal(all[0], &kernels_cpu_portable);
    printf("tables:");
    for (size_t i = 0; i < n; i++) {
        printf(" %s", all[i]->name);
        assert_int_equal(all[i]->version, KERNELS_VERSION);
        setenv("CKD_CPU", all[i]->name, 1);
        assert_ptr_equal(kernels_cpu(), all[i]);
    }
    printf("\n");
    setenv("CKD_CPU", "abacus", 1);
    assert_ptr_equal(kernels_cpu(), all[n - 1]);
    unsetenv("CKD_CPU");
    assert_ptr_equal(kernels_cpu(), all[n - 1]);
}

static void test_residual_and_back(void **state) {
    (void)state;
    const kernels *k;
    EACH_CASE(k, d, n) {
        size_t width = ckd_dtype_size((ckd_dtype)d), size = n * width;
        guarded a = guarded_new(size, 1), b = guarded_new(size, 3), r = guarded_new(size, 5);
        for (size_t i = 0; i < n; i++) {
            store(a.at, width, i, pattern(i, width));
            store(b.at, width, i, pattern((i * 7 + 5) % (n + 24), width));
        }
        k->ordered_residual((ckd_dtype)d, r.at, a.at, b.at, n);
        for (size_t i = 0; i < n; i++) {
            uint64_t want = (load(a.at, width, i) - load(b.at, width, i)) & mask_of(width);
            assert_true(load(r.at, width, i) == want);
        }
        guarded c = guarded_new(size, 7);
        k->ordered_apply((ckd_dtype)d, c.at, b.at, r.at, n);
        assert_true(n == 0 || memcmp(c.at, a.at, size) == 0);
        /* In place, in each way that the header allows. */
        k->ordered_apply((ckd_dtype)d, r.at, b.at, r.at, n);
        assert_true(n == 0 || memcmp(r.at, a.at, size) == 0);
        k->ordered_residual((ckd_dtype)d, c.at, c.at, b.at, n);
        k->ordered_apply((ckd_dtype)d, b.at, b.at, c.at, n);
        assert_true(n == 0 || memcmp(b.at, a.at, size) == 0);
        k->ordered_residual((ckd_dtype)d, b.at, a.at, b.at, n);
        for (size_t i = 0; i < n; i++) {
            assert_true(load(b.at, width, i) == 0);
        }
        guarded_free(&a);
        guarded_free(&b);
        guarded_free(&c);
        guarded_free(&r);
    }
}

static void test_rotation(void **state) {
    (void)state;
    const kernels *k;
    EACH_CASE(k, d, n) {
        size_t width = ckd_dtype_size((ckd_dtype)d), size = n * width;
        guarded a = guarded_new(size, 3), b = guarded_new(size, 1);
        for (size_t i = 0; i < n; i++) {
            store(a.at, width, i, pattern(i, width));
        }
        k->rotate_sign((ckd_dtype)d, b.at, a.at, n);
        for (size_t i = 0; i < n; i++) {
            uint64_t v = load(a.at, width, i);
            uint64_t want = d <= CKD_F8_E5M2 ? (v << 1 | v >> (8 * width - 1)) & mask_of(width) : v;
            assert_true(load(b.at, width, i) == want);
        }
        k->unrotate_sign((ckd_dtype)d, b.at, b.at, n);
        assert_true(n == 0 || memcmp(a.at, b.at, size) == 0);
        guarded_free(&a);
        guarded_free(&b);
    }
}

static unsigned bit_length(uint64_t v) {
    unsigned length = 0;
    for (; v; v >>= 1) {
        length++;
    }
    return length;
}

static unsigned expected_context(int d, size_t width, uint64_t v) {
    switch (d) {
    case CKD_F64: {
        int e = (int)(v >> 52 & 2047) - 896;
        return (unsigned)(e < 0 ? 0 : (e > 255 ? 255 : e));
    }
    case CKD_F32:
        return v >> 23 & 255;
    case CKD_F16:
        return v >> 10 & 31;
    case CKD_BF16:
        return v >> 7 & 255;
    case CKD_F8_E4M3:
        return v >> 3 & 15;
    case CKD_F8_E5M2:
        return v >> 2 & 31;
    case CKD_I64:
    case CKD_I32:
    case CKD_I16:
    case CKD_I8:
        return bit_length(v >> (8 * width - 1) ? (UINT64_C(0) - v) & mask_of(width) : v);
    default:
        return bit_length(v);
    }
}

static void test_context(void **state) {
    (void)state;
    const kernels *k;
    EACH_CASE(k, d, n) {
        size_t width = ckd_dtype_size((ckd_dtype)d);
        guarded a = guarded_new(n * width, 1), c = guarded_new(n, 1);
        for (size_t i = 0; i < n; i++) {
            store(a.at, width, i, pattern(i, width));
        }
        k->magnitude_context((ckd_dtype)d, c.at, a.at, n);
        for (size_t i = 0; i < n; i++) {
            assert_int_equal(c.at[i], expected_context(d, width, load(a.at, width, i)));
        }
        guarded_free(&a);
        guarded_free(&c);
    }
}

/* The value of a small float's bits, exactly. */
static double small_value(uint32_t bits, int exponent_bits, int mantissa_bits) {
    int exponent = (int)(bits >> mantissa_bits) & ((1 << exponent_bits) - 1);
    int bias = (1 << (exponent_bits - 1)) - 1;
    double mantissa = (double)(bits & ((1u << mantissa_bits) - 1));
    return exponent ? ldexp(mantissa + (double)(1u << mantissa_bits), exponent - bias - mantissa_bits)
                    : ldexp(mantissa, 1 - bias - mantissa_bits);
}

/*
 * Checks that the result is the nearest value, or the even one of two. Only for magnitudes; signs are checked
 * elsewhere.
 */
static void check_nearest(double x, uint32_t result, int exponent_bits, int mantissa_bits) {
    uint32_t infinity = ((1u << exponent_bits) - 1) << mantissa_bits;
    double largest = small_value(infinity - 1, exponent_bits, mantissa_bits);
    double step = largest - small_value(infinity - 2, exponent_bits, mantissa_bits);
    if (x >= largest + step / 2) {
        assert_int_equal(result, infinity);
        return;
    }
    assert_true(result < infinity);
    double distance = fabs(x - small_value(result, exponent_bits, mantissa_bits));
    double below = result ? fabs(x - small_value(result - 1, exponent_bits, mantissa_bits)) : INFINITY;
    double above =
        result + 1 < infinity ? fabs(x - small_value(result + 1, exponent_bits, mantissa_bits)) : INFINITY;
    assert_true(distance <= below && distance <= above);
    assert_true((distance < below && distance < above) || result % 2 == 0);
}

static uint32_t cast_one(const kernels *k, ckd_dtype to, ckd_dtype from, uint64_t bits) {
    uint32_t out = 0;
    assert_true(k->cast(to, &out, from, &bits, 1));
    return out;
}

static void check_f32_casts(const kernels *k, uint32_t bits) {
    static const struct {
        ckd_dtype to;
        int exponent, mantissa;
        uint32_t nan;
    } targets[] = {{CKD_BF16, 8, 7, 0x7fc0}, {CKD_F16, 5, 10, 0x7e00}};
    for (size_t t = 0; t < 2; t++) {
        uint32_t out = cast_one(k, targets[t].to, CKD_F32, bits);
        if ((bits & 0x7fffffff) > 0x7f800000) {
            assert_int_equal(out, targets[t].nan);
        } else {
            assert_int_equal(out >> 15, bits >> 31);
            uint32_t magnitude = bits & 0x7fffffff;
            double x = magnitude == 0x7f800000 ? INFINITY : small_value(magnitude, 8, 23);
            check_nearest(x, out & 0x7fff, targets[t].exponent, targets[t].mantissa);
        }
    }
}

static void check_f64_cast(const kernels *k, uint64_t bits) {
    uint32_t out = cast_one(k, CKD_F32, CKD_F64, bits);
    uint64_t magnitude = bits & INT64_MAX;
    if (magnitude > UINT64_C(0x7ff0000000000000)) {
        assert_int_equal(out, 0x7fc00000);
        return;
    }
    double x;
    memcpy(&x, &magnitude, 8);
    float want = (float)x; /* the compiler's cast, in the default rounding mode */
    uint32_t want_bits;
    memcpy(&want_bits, &want, 4);
    assert_int_equal(out & 0x7fffffff, want_bits);
    assert_int_equal(out >> 31, bits >> 63);
}

static void test_casts(void **state) {
    (void)state;
    const kernels *all[KERNELS_CPU_BEST];
    size_t n = kernels_cpu_all(all);
    for (size_t b = 0; b < n; b++) {
        for (size_t i = 0; i < 24; i++) {
            check_f32_casts(all[b], (uint32_t)pattern(i, 4));
            check_f64_cast(all[b], pattern(i, 8));
        }
        for (uint32_t e = 0; e < 256; e++) { /* around each exponent, and half way between two results */
            static const uint32_t mantissas[] = {0,        1,        0xfff,    0x1000,   0x1001,   0x7fff,
                                                 0x8000,   0x8001,   0x17fff,  0x18000,  0x18001,  0x2fff,
                                                 0x3000,   0x3001,   0x3fffff, 0x400000, 0x400001, 0x7fefff,
                                                 0x7ff000, 0x7f8000, 0x7fffff};
            for (size_t m = 0; m < sizeof(mantissas) / sizeof(mantissas[0]); m++) {
                check_f32_casts(all[b], e << 23 | mantissas[m]);
                check_f32_casts(all[b], UINT32_C(0x80000000) | e << 23 | mantissas[m]);
            }
        }
        for (uint64_t e = 860; e < 1160; e++) {
            static const uint64_t mantissas[] = {0,
                                                 1,
                                                 0xfffffff,
                                                 0x10000000,
                                                 0x10000001,
                                                 0x30000000,
                                                 0x2fffffff,
                                                 0xfffffffffffff,
                                                 0xfffffe0000000,
                                                 0xffffff0000000,
                                                 0x8000000000000,
                                                 0x7ffffffffffff,
                                                 0x8000000000001};
            for (size_t m = 0; m < sizeof(mantissas) / sizeof(mantissas[0]); m++) {
                check_f64_cast(all[b], e << 52 | mantissas[m]);
                check_f64_cast(all[b], UINT64_C(1) << 63 | e << 52 | mantissas[m]);
            }
        }
        for (size_t i = 0; i < 20000; i++) {
            check_f32_casts(all[b], (uint32_t)next_random());
            check_f64_cast(all[b], (next_random() >> 12 & 0x800fffffffffffff) | (860 + next_random() % 300)
                                                                                    << 52);
        }
    }
}

/* Arrays give the same results as single values. Nothing outside is written, and other pairs are refused. */
static void test_casts_of_arrays(void **state) {
    (void)state;
    static const struct {
        ckd_dtype to, from;
    } pairs[] = {{CKD_BF16, CKD_F32}, {CKD_F16, CKD_F32}, {CKD_F32, CKD_F64}};
    const kernels *all[KERNELS_CPU_BEST];
    size_t backend_count = kernels_cpu_all(all);
    for (size_t b = 0; b < backend_count; b++) {
        for (size_t p = 0; p < 3; p++) {
            size_t wide = ckd_dtype_size(pairs[p].from), narrow = wide / 2;
            for (size_t c = 0; c < COUNTS; c++) {
                size_t n = counts[c];
                guarded a = guarded_new(n * wide, 1), r = guarded_new(n * narrow, 3);
                for (size_t i = 0; i < n; i++) {
                    store(a.at, wide, i, pattern(i, wide));
                }
                assert_true(all[b]->cast(pairs[p].to, r.at, pairs[p].from, a.at, n));
                for (size_t i = 0; i < n; i++) {
                    uint32_t want =
                        cast_one(&kernels_cpu_portable, pairs[p].to, pairs[p].from, load(a.at, wide, i));
                    assert_int_equal(load(r.at, narrow, i), want);
                }
                guarded_free(&a);
                guarded_free(&r);
            }
        }
        uint64_t in = 0, out = 77;
        assert_false(all[b]->cast(CKD_F64, &out, CKD_F32, &in, 1));
        assert_false(all[b]->cast(CKD_BF16, &out, CKD_F64, &in, 1));
        assert_false(all[b]->cast(CKD_F32, &out, CKD_F32, &in, 1));
        assert_false(all[b]->cast(CKD_I32, &out, CKD_F32, &in, 1));
        assert_int_equal(out, 77);
    }
}

/* ---- optimizer steps, compared with the formulas of FORMAT.md, one element at a time ---- */

static const step_rule step_numbers = {.coefficients = {0.9, 1 - 0.9, 0.95, 1 - 0.95, 1 - 1e-4, 1e-4, 1.1e-3,
                                                        0.87, 1e-8, 0.91, 0.757, 1e-3, 0.1, 0.8, 0.75}};

/* Nearest even, by arithmetic: a bf16 number has the upper half of a float's bits. */
static float expected_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (isnan(x)) {
        bits = 0x7fc00000;
    } else {
        uint32_t low = bits & 0xffff;
        bits -= low;
        bits += low > 0x8000 || (low == 0x8000 && (bits & 0x10000)) ? 0x10000 : 0;
    }
    memcpy(&x, &bits, 4);
    return x;
}

static float expected_gradient(uint32_t rule, float a, float b) {
    const double *c = step_numbers.coefficients;
    volatile float r1 = (float)c[1], b1 = (float)c[0];
    if (rule >= 65) {
        volatile double p = c[0] * (double)b, d = (double)a - p, q = d / c[1];
        q = q / c[6];
        return expected_bf16((float)q) * (float)c[6];
    }
    if (rule <= 5) {
        volatile float d = a - b, q = d / r1;
        return q + b;
    }
    volatile float p = b1 * b, d = a - p;
    return d / r1;
}

static float expected_square(uint32_t rule, float x, float a, float b) {
    const double *c = step_numbers.coefficients;
    volatile float g = expected_gradient(rule, a, b), r2 = (float)c[3], kept = x * (float)c[2];
    volatile float scaled = r2 * g, square = g * g, product;
    volatile double wide;
    switch (rule >= 65 ? rule - 65 : (rule - 1) % 5) {
    case 0:
        product = scaled * g;
        return kept + product;
    case 1:
        product = r2 * square;
        return kept + product;
    case 2:
        wide = (double)scaled * (double)g;
        return (float)((double)kept + wide);
    case 3:
        wide = (double)r2 * (double)square;
        return (float)((double)kept + wide);
    default:
        wide = c[3] * (double)g;
        wide = wide * (double)g;
        volatile double first = c[2] * (double)x;
        return (float)(first + wide);
    }
}

static float expected_adam(uint32_t rule, float x, float a, float b) {
    const double *c = step_numbers.coefficients;
    volatile float s = sqrtf(b), below = s / (float)c[7], rate = (float)c[6], kept = x * (float)c[4];
    volatile float full = below + (float)c[8], t;
    volatile double wide;
    switch (rule) {
    case 17:
        t = rate * a;
        t = t / full;
        return kept - t;
    case 18:
        t = a / full;
        t = rate * t;
        return kept - t;
    case 19:
        t = a / full;
        wide = (double)rate * (double)t;
        return (float)((double)kept - wide);
    case 20:
        wide = c[5] * (double)x;
        kept = (float)((double)x - wide);
        full = (float)((double)below + c[8]);
        t = rate * a;
        t = t / full;
        return kept - t;
    case 21:
        t = b / (float)c[10];
        full = sqrtf(t) + (float)c[8];
        t = a / (float)c[9];
        t = t / full;
        full = (float)c[12] * x;
        t = t + full;
        t = (float)c[11] * t;
        return x - t;
    default:
        wide = (double)s / c[7];
        wide = wide + c[8];
        volatile double up = c[6] * (double)a, quotient = up / wide, first = c[4] * (double)x;
        return (float)(first - quotient);
    }
}

static float expected_sgd(uint32_t rule, float x, float a, float b) {
    const double *c = step_numbers.coefficients;
    volatile float d = a, lr = (float)c[11], t;
    if (rule >= 35) {
        t = (float)c[13] * b;
        t = a - t;
        t = t / (float)c[14];
        d = (float)c[13] * a;
        d = t + d;
    }
    if (rule % 2) {
        t = lr * d;
        return x - t;
    }
    volatile double wide = (double)lr * (double)d;
    return (float)((double)x - wide);
}

static float expected_moment(uint32_t rule, float x, float a) {
    const double *c = step_numbers.coefficients;
    volatile float g = a * (float)c[6], r1 = (float)c[1], b1 = (float)c[0], t, u;
    volatile double wide, other;
    switch (rule) {
    case 49:
        t = g - x;
        t = r1 * t;
        return x + t;
    case 50:
        t = g - x;
        wide = (double)r1 * (double)t;
        return (float)((double)x + wide);
    case 51:
        t = b1 * x;
        u = r1 * g;
        return t + u;
    case 52:
        t = b1 * x;
        wide = (double)r1 * (double)g;
        return (float)((double)t + wide);
    case 53:
        u = r1 * g;
        wide = (double)b1 * (double)x;
        return (float)(wide + (double)u);
    case 54:
        wide = c[0] * (double)x;
        other = c[1] * (double)g;
        return (float)(wide + other);
    case 55:
        t = (float)c[13] * x;
        u = (float)c[14] * g;
        return t + u;
    default:
        t = (float)c[13] * x;
        wide = (double)(float)c[14] * (double)g;
        return (float)((double)t + wide);
    }
}

static uint32_t expected_step(uint32_t rule, uint32_t x, uint32_t a, uint32_t b) {
    float in[3], out;
    memcpy(&in[0], &x, 4);
    memcpy(&in[1], &a, 4);
    memcpy(&in[2], &b, 4);
    out = rule <= 10 || rule >= 65 ? expected_square(rule, in[0], in[1], in[2])
          : rule >= 49             ? expected_moment(rule, in[0], in[1])
          : rule <= 22             ? expected_adam(rule, in[0], in[1], in[2])
                                   : expected_sgd(rule, in[0], in[1], in[2]);
    uint32_t bits;
    memcpy(&bits, &out, 4);
    return isnan(out) ? 0x7fc00000 : bits;
}

/* Special values are combined in all three places; then random values, and values as in training. */
static uint32_t step_pattern(size_t i, unsigned place) {
    size_t digit = place == 0 ? i % 24 : place == 1 ? i / 24 % 24 : i / 576 % 24;
    if (i < 2304) {
        return (uint32_t)pattern(digit, 4);
    }
    uint32_t bits = (uint32_t)next_random();
    return i % 2 ? bits : (bits & 0x807fffff) | (100 + (bits >> 23 & 31)) << 23;
}

static void test_optimizer_steps(void **state) {
    (void)state;
    const kernels *all[KERNELS_CPU_BEST];
    size_t n = kernels_cpu_all(all);
    for (size_t b = 0; b < n; b++) {
        for (uint32_t number = 0; number < 80; number++) {
            bool known = (number >= 1 && number <= 10) || (number >= 17 && number <= 22) ||
                         (number >= 33 && number <= 36) || (number >= 49 && number <= 56) ||
                         (number >= 65 && number <= 69);
            step_rule rule = step_numbers;
            rule.rule = number;
            guarded in[3], out = guarded_new(MOST * 4, 3);
            for (unsigned p = 0; p < 3; p++) {
                in[p] = guarded_new(MOST * 4, p + 1);
                for (size_t i = 0; i < MOST; i++) {
                    store(in[p].at, 4, i, step_pattern(i, p));
                }
            }
            assert_int_equal(all[b]->optimizer_step(&rule, out.at, in[0].at, in[1].at, in[2].at, MOST),
                             known);
            for (size_t i = 0; i < MOST && known; i++) {
                uint32_t want = expected_step(number, (uint32_t)load(in[0].at, 4, i),
                                              (uint32_t)load(in[1].at, 4, i), (uint32_t)load(in[2].at, 4, i));
                if (load(out.at, 4, i) != want) {
                    fail_msg("%s: rule %u, element %zu: %08x, not %08x", all[b]->name, number, i,
                             (unsigned)load(out.at, 4, i), want);
                }
            }
            if (known) { /* in place */
                all[b]->optimizer_step(&rule, in[0].at, in[0].at, in[1].at, in[2].at, MOST);
                assert_memory_equal(in[0].at, out.at, MOST * 4);
            }
            for (unsigned p = 0; p < 3; p++) {
                guarded_free(&in[p]);
            }
            guarded_free(&out);
        }
    }
}

/* The host program may use any rounding mode. */
static void test_rounding_modes(void **state) {
    (void)state;
    static const int modes[] = {FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO};
    const kernels *all[KERNELS_CPU_BEST];
    size_t n = kernels_cpu_all(all);
    uint32_t in[64];
    uint16_t want[64], got[64];
    for (size_t i = 0; i < 64; i++) {
        in[i] = (uint32_t)pattern(i, 4);
    }
    for (size_t b = 0; b < n; b++) {
        for (int to = CKD_F16; to <= CKD_BF16; to++) {
            assert_true(all[b]->cast((ckd_dtype)to, want, CKD_F32, in, 64));
            for (size_t m = 0; m < 3; m++) {
                assert_int_equal(fesetround(modes[m]), 0);
                bool ok = all[b]->cast((ckd_dtype)to, got, CKD_F32, in, 64);
                fesetround(FE_TONEAREST);
                assert_true(ok);
                assert_memory_equal(got, want, sizeof(want));
            }
        }
    }
}

static bool is_nonfinite(ckd_dtype dtype, uint64_t v) {
    static const struct {
        uint64_t top, mantissa; /* the exponent's bits, and those below */
    } layout[] = {[CKD_F64] = {0x7ff0000000000000, 0xfffffffffffff},
                  [CKD_F32] = {0x7f800000, 0x7fffff},
                  [CKD_F16] = {0x7c00, 0x3ff},
                  [CKD_BF16] = {0x7f80, 0x7f},
                  [CKD_F8_E4M3] = {0x78, 7},
                  [CKD_F8_E5M2] = {0x7c, 3}};
    bool top = (v & layout[dtype].top) == layout[dtype].top;
    return dtype == CKD_F8_E4M3 ? top && (v & 7) == 7 : top;
}

/* All lengths about the sizes of vectors and of the partial sums, and arrays without a finite value. */
static void test_nonfinite(void **state) {
    (void)state;
    static const size_t lengths[] = {0, 1, 7, 31, 127, 128, 129, 255, 256, 257, 4099};
    const kernels *all[KERNELS_CPU_BEST];
    size_t n = kernels_cpu_all(all);
    for (int d = CKD_F64; d <= CKD_BOOL; d++) {
        ckd_dtype dtype = (ckd_dtype)d;
        size_t width = ckd_dtype_size(dtype);
        for (size_t k = 0; k < sizeof(lengths) / sizeof(lengths[0]); k++) {
            guarded in = guarded_new(lengths[k] * width, 1 + k % 3);
            uint64_t want = 0;
            for (size_t i = 0; i < lengths[k]; i++) {
                store(in.at, width, i, pattern(i, width));
                want += d <= CKD_F8_E5M2 && is_nonfinite(dtype, load(in.at, width, i));
            }
            for (size_t b = 0; b < n; b++) {
                assert_int_equal(all[b]->count_nonfinite(dtype, in.at, lengths[k]), want);
            }
            guarded_free(&in);
        }
        size_t many = 70000;
        guarded in = guarded_new(many * width, 1);
        memset(in.at, 0xff, many * width);
        for (size_t b = 0; b < n; b++) {
            assert_int_equal(all[b]->count_nonfinite(dtype, in.at, many), d <= CKD_F8_E5M2 ? many : 0);
        }
        guarded_free(&in);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_table),          cmocka_unit_test(test_residual_and_back),
        cmocka_unit_test(test_rotation),       cmocka_unit_test(test_context),
        cmocka_unit_test(test_casts),          cmocka_unit_test(test_casts_of_arrays),
        cmocka_unit_test(test_rounding_modes), cmocka_unit_test(test_optimizer_steps),
        cmocka_unit_test(test_nonfinite),
    };
    return cmocka_run_group_tests_name("kernels", tests, NULL, NULL);
}
