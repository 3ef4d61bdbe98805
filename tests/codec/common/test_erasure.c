/*
 * Erasure coding: as many lost pieces as there are parity pieces can be rebuilt. Row 0 is XOR, and needs no
 * library.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "codec/common/common.h"
#include "tests/support/xorshift.h"

enum { SIZE = 777, COLUMNS = 11, ROWS = 5 };

static uint8_t data[COLUMNS][SIZE], parity[ROWS][SIZE];

/* The product, computed bit by bit for comparison. */
static uint8_t times(uint8_t a, uint8_t b) {
    unsigned product = 0;
    for (int i = 0; i < 8; i++) {
        product ^= b >> i & 1 ? (unsigned)a << i : 0;
    }
    for (int i = 14; i >= 8; i--) {
        product ^= product >> i & 1 ? 0x11du << (i - 8) : 0;
    }
    return (uint8_t)product;
}

static void encode(size_t rows) {
    uint8_t matrix[ROWS * COLUMNS], *out[ROWS];
    const uint8_t *in[COLUMNS];
    for (unsigned r = 0; r < rows; r++) {
        out[r] = parity[r];
        for (unsigned c = 0; c < COLUMNS; c++) {
            matrix[r * COLUMNS + c] = erasure_coefficient(r, c);
            in[c] = data[c];
        }
    }
    assert_int_equal(erasure_sums(&(erasure_product){out, in, matrix, rows, COLUMNS, SIZE}, NULL), CKD_OK);
}

static void fill(void) {
    for (size_t i = 0; i < sizeof(data); i++) {
        ((uint8_t *)data)[i] = (uint8_t)next_random();
    }
}

static void test_coefficients(void **unused) {
    (void)unused;
    for (unsigned c = 0; c < ERASURE_DATA_MAX; c++) {
        assert_int_equal(erasure_coefficient(0, c), 1);
        for (unsigned r = 1; r < ERASURE_PARITY_MAX; r++) { /* Cauchy: 1 / (r + x), scaled by x */
            uint8_t x = (uint8_t)(ERASURE_PARITY_MAX + c);
            assert_int_equal(times(erasure_coefficient(r, c), (uint8_t)(r ^ x)), x);
        }
    }
}

static void test_sums(void **unused) {
    (void)unused;
    fill();
    encode(1);
    for (size_t i = 0; i < SIZE; i++) {
        uint8_t sum = 0;
        for (unsigned c = 0; c < COLUMNS; c++) {
            sum ^= data[c][i];
        }
        assert_int_equal(parity[0][i], sum);
    }
    if (erasure_ready(NULL) != CKD_OK) {
        puts("SKIP: ISA-L (libisal2) is not installed");
        skip();
    }
    encode(ROWS);
    for (size_t i = 0; i < SIZE; i++) {
        for (unsigned r = 0; r < ROWS; r++) {
            uint8_t sum = 0;
            for (unsigned c = 0; c < COLUMNS; c++) {
                sum ^= times(erasure_coefficient(r, c), data[c][i]);
            }
            assert_int_equal(parity[r][i], sum);
        }
    }
}

/* Rebuilds the columns in `lost_bits` from the rows in `row_bits`. */
static void rebuild(unsigned lost_bits, unsigned row_bits) {
    unsigned lost[COLUMNS], known[COLUMNS], rows[ROWS] = {0};
    size_t lost_count = 0, known_count = 0, row_count = 0;
    for (unsigned c = 0; c < COLUMNS; c++) {
        if (lost_bits >> c & 1) {
            lost[lost_count++] = c;
        } else {
            known[known_count++] = c;
        }
    }
    for (unsigned r = 0; r < ROWS && row_count < lost_count; r++) {
        if (row_bits >> r & 1) {
            rows[row_count++] = r;
        }
    }
    uint8_t matrix[ROWS * (ROWS + COLUMNS)], back[ROWS][SIZE], *out[ROWS];
    const uint8_t *in[ROWS + COLUMNS];
    erasure_matrix(matrix, lost, rows, lost_count, known, known_count);
    for (size_t i = 0; i < lost_count; i++) {
        in[i] = parity[rows[i]];
        out[i] = back[i];
    }
    for (size_t i = 0; i < known_count; i++) {
        in[lost_count + i] = data[known[i]];
    }
    size_t columns = lost_count + known_count;
    assert_int_equal(erasure_sums(&(erasure_product){out, in, matrix, lost_count, columns, SIZE}, NULL),
                     CKD_OK);
    for (size_t i = 0; i < lost_count; i++) {
        assert_memory_equal(back[i], data[lost[i]], SIZE);
    }
}

/* Every choice of lost pieces, and every sufficient choice of rows. */
static void test_all_losses(void **unused) {
    (void)unused;
    fill();
    bool all = erasure_ready(NULL) == CKD_OK;
    encode(all ? ROWS : 1);
    for (unsigned lost = 1; lost < 1u << COLUMNS; lost++) {
        int count = __builtin_popcount(lost);
        for (unsigned rows = 1; rows < 1u << ROWS && count <= ROWS; rows++) {
            if (__builtin_popcount(rows) == count && (all || rows == 1)) {
                rebuild(lost, rows);
            }
        }
    }
    if (!all) {
        puts("SKIP: ISA-L (libisal2) is not installed");
        skip();
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_coefficients),
        cmocka_unit_test(test_sums),
        cmocka_unit_test(test_all_losses),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
