/*
 * Symbol streams of small quantised integers, most of which are zero: how close they are to the entropy of
 * order 0, and the run streams that are used where dense and sparse streams are not close.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "bench/support/rates.h"
#include "tests/support/xorshift.h"
#include <stdlib.h>
#include <string.h>

#include "codec/entropy/symbols_work.h"

static symbols_workspace *work;
static int8_t values[SYMBOLS_MAX_COUNT];
static uint8_t stream[2 * SYMBOLS_MAX_COUNT];

static int set_up(void **state) {
    (void)state;
    return symbols_workspace_create(&work, NULL) == CKD_OK ? 0 : -1;
}

static int tear_down(void **state) {
    (void)state;
    symbols_workspace_free(work);
    return 0;
}

/* Encodes and decodes; returns the size. */
static size_t coded_size(symbols_mode mode, size_t n) {
    static int8_t back[SYMBOLS_MAX_COUNT];
    size_t planned = symbols_plan(work, 0, mode, &(symbols_input){1, n, values, NULL}, NULL);
    size_t size = symbols_encode(work, 0, values, NULL, stream, sizeof(stream));
    assert_true(size > 0 && size <= symbols_bound(work, 0));
    assert_true(size <= planned + planned / 256 + 8 && planned <= size + size / 256 + 24);
    assert_int_equal(symbols_decode(work, &(symbols_output){1, n, back, NULL}, stream, size, NULL), CKD_OK);
    assert_memory_equal(back, values, n);
    return size;
}

/* Sizes include tables and headers. */
static void test_rates(void **state) {
    (void)state;
    for (rates_shape shape = 0; shape < RATES_SHAPES; shape++) {
        for (double rate = 0.05; rate < 3.1; rate *= 1.35) {
            double scale = rates_scale(shape, rate);
            for (size_t n = 1 << 16; n <= 1 << 18; n *= 2) {
                rates_draw(values, n, shape, scale);
                double entropy = rates_entropy(values, n);
                assert_true(entropy > 0.8 * rate && entropy < 1.2 * rate);
                for (symbols_mode mode = 0; mode < 2; mode++) {
                    assert_true(8 * (double)coded_size(mode, n) <= 1.03 * entropy * (double)n);
                }
            }
        }
    }
}

static void test_few_integers_that_are_not_zero(void **state) {
    (void)state;
    for (size_t n = 1 << 16; n <= 1 << 18; n *= 2) {
        memset(values, 0, n);
        assert_true(coded_size(SYMBOLS_CLASS, n) <= 4);
        for (size_t changed = 1; changed < 40; changed++) {
            values[next_random() % n] = (int8_t)(next_random() % 2 ? 1 : -1);
            assert_true(coded_size(SYMBOLS_CLASS, n) <= 6 + changed * 19 / 8); /* place and sign */
            assert_int_equal(stream[0], SYMBOLS_RUNS);
        }
    }
}

/* ---- run streams alone ---- */

typedef struct integers {
    unsigned width;
    size_t n, nonzero;
    uint8_t *values;
} integers;

static integers make(unsigned width, size_t n, unsigned one_in) {
    integers d = {width, n, 0, calloc(n + 1, width)};
    assert_non_null(d.values);
    for (size_t i = 0; i < n; i++) {
        uint64_t v = next_random() >> next_random() % 64;
        v = next_random() % 2 ? v : 0 - v;
        if (next_random() % one_in == 0 && v << (64 - 8 * width)) {
            memcpy(d.values + i * width, &v, width);
            d.nonzero++;
        }
    }
    return d;
}

static ckd_status decode(const integers *d, uint8_t *back, const uint8_t *from, size_t size) {
    uint8_t *copy = malloc(size + !size); /* the exact size, so that sanitizers notice reads beyond it */
    assert_non_null(copy);
    memcpy(copy, from, size);
    size_t bytes_decoded = d->n * d->width;
    memset(back, 0xa5, bytes_decoded + 8);
    ckd_status status = symbols_decode(work, &(symbols_output){d->width, d->n, back, NULL}, copy, size, NULL);
    for (unsigned i = 0; i < 8; i++) {
        assert_int_equal(back[bytes_decoded + i], 0xa5);
    }
    free(copy);
    return status;
}

static void test_runs_are_read_back(void **state) {
    (void)state;
    static const size_t counts[] = {1, 2, 7, 8, 9, 63, 64, 65, 1000, 70001};
    for (unsigned width = 1; width <= 4; width *= 2) {
        for (unsigned c = 0; c < sizeof(counts) / sizeof(counts[0]); c++) {
            for (unsigned one_in = 1; one_in <= 100000; one_in *= 10) {
                integers d = make(width, counts[c], one_in);
                bytes out = {.failed = true}; /* as after an earlier call that had no memory */
                assert_true(symbols_runs_encode(&out, width, d.values, d.n, d.nonzero, SIZE_MAX));
                uint8_t *back = malloc(d.n * width + 8);
                assert_non_null(back);
                assert_int_equal(decode(&d, back, out.data, out.size), CKD_OK);
                assert_memory_equal(back, d.values, d.n * width);
                bytes again = {0};
                assert_false(symbols_runs_encode(&again, width, d.values, d.n, d.nonzero, out.size - 1));
                bytes_free(&again);
                bytes_free(&out);
                free(back);
                free(d.values);
            }
        }
    }
}

static void test_damaged_runs(void **state) {
    (void)state;
    for (unsigned width = 1; width <= 4; width *= 2) {
        integers d = make(width, 5000, 100);
        bytes out = {0};
        assert_true(symbols_runs_encode(&out, width, d.values, d.n, d.nonzero, SIZE_MAX));
        uint8_t *back = malloc(d.n * width + 8);
        assert_non_null(back);
        size_t refused = 0;
        for (size_t bit = 8; bit < 8 * out.size; bit++) {
            out.data[bit / 8] ^= (uint8_t)(1u << bit % 8);
            bool good = decode(&d, back, out.data, out.size) == CKD_OK;
            assert_true(!good || memcmp(back, d.values, d.n * width) != 0);
            refused += !good;
            out.data[bit / 8] ^= (uint8_t)(1u << bit % 8);
        }
        assert_true(refused > 7 * out.size);
        for (size_t size = 0; size < out.size; size++) {
            assert_true(decode(&d, back, out.data, size) != CKD_OK ||
                        memcmp(back, d.values, d.n * width) != 0);
        }
        bytes_put_u8(&out, 0);
        assert_int_equal(decode(&d, back, out.data, out.size), CKD_E_CORRUPT);
        bytes_free(&out);
        free(back);
        free(d.values);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rates),
        cmocka_unit_test(test_few_integers_that_are_not_zero),
        cmocka_unit_test(test_runs_are_read_back),
        cmocka_unit_test(test_damaged_runs),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
