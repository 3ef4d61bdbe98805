/* Codings: round trips through the table, limits, damage, and what decoders refuse. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdlib.h>
#include <string.h>
#include <zstd.h>

#include "codec/entropy/entropy.h"

#define GUARD 32

static coder *work;

static int set_up(void **state) {
    (void)state;
    return coder_create(&work, NULL) == CKD_OK ? 0 : -1;
}

static int tear_down(void **state) {
    (void)state;
    coder_free(work);
    return 0;
}

static uint64_t seed = 7;
static uint64_t next_random(void) {
    seed ^= seed << 13;
    seed ^= seed >> 7;
    seed ^= seed << 17;
    return seed;
}

static uint8_t *make(size_t size, int kind) {
    uint8_t *data = malloc(size ? size : 1);
    assert_non_null(data);
    for (size_t i = 0; i < size; i++) {
        data[i] = kind == 0
                      ? 0
                      : (kind == 1 ? (uint8_t)(i % 4 == 3 ? 61 : next_random() % 5) : (uint8_t)next_random());
    }
    return data;
}

static const coding byte_codings[] = {CODING_RAW, CODING_ZSTD, CODING_LZ4, CODING_ZSTD_PLANES,
                                      CODING_LZ4_PLANES};
#define BYTE_CODINGS (sizeof(byte_codings) / sizeof(byte_codings[0]))

/* Decodes to memory of the exact size, between sentinels. */
static ckd_status decode(uint8_t *out, coding how, unsigned width, size_t raw, const uint8_t *from,
                         size_t stored, ckd_error *err) {
    memset(out, 0xa5, raw + 2 * GUARD);
    ckd_status status =
        coder_decode(work, how, &(coder_target){out + GUARD, raw, width, NULL}, from, stored, err);
    for (size_t i = 0; i < GUARD; i++) {
        assert_int_equal(out[i], 0xa5);
        assert_int_equal(out[GUARD + raw + i], 0xa5);
    }
    return status;
}

static size_t round_trip(coding how, int level, unsigned width, const uint8_t *data, size_t size) {
    size_t bound = coding_bound(size);
    uint8_t *to = malloc(bound + GUARD), *out = malloc(size + 2 * GUARD);
    memset(to, 0xa5, bound + GUARD);
    coder_result result = {to, bound + 1, 77};
    assert_int_equal(coder_encode(work, how, level, &(coder_source){data, size, width}, &result, NULL),
                     CKD_OK);
    size_t stored = result.stored;
    assert_true(stored <= bound && (stored > 0 || size == 0));
    for (size_t i = 0; i < GUARD; i++) {
        assert_int_equal(to[bound + i], 0xa5);
    }
    uint8_t *exact = malloc(stored ? stored : 1);
    memcpy(exact, to, stored);
    if (stored || how == CODING_RAW) {
        assert_int_equal(decode(out, how, width, size, exact, stored, NULL), CKD_OK);
        assert_true(size == 0 || memcmp(out + GUARD, data, size) == 0);
    }
    free(exact);
    free(out);
    free(to);
    return stored;
}

static void test_round_trips(void **state) {
    (void)state;
    static const size_t counts[] = {0, 1, 2, 3, 31, 32, 33, 255, 4096, 4099, 1 << 18};
    static const int levels[] = {0, 1, 5};
    for (unsigned width = 1; width <= 8; width *= 2) {
        for (size_t c = 0; c < sizeof(counts) / sizeof(counts[0]); c++) {
            for (int kind = 0; kind < 3; kind++) {
                uint8_t *data = make(counts[c] * width, kind);
                for (size_t h = 0; h < BYTE_CODINGS; h++) {
                    for (size_t l = 0; l < (counts[c] > 5000 ? 1 : 3); l++) {
                        round_trip(byte_codings[h], levels[l], width, data, counts[c] * width);
                    }
                }
                free(data);
            }
        }
    }
}

static void test_planes(void **state) {
    (void)state;
    for (unsigned width = 1; width <= 8; width *= 2) {
        for (size_t n = 0; n < 200; n++) {
            uint8_t *data = make(n * width + 1, 2) + 1; /* an odd address */
            uint8_t planes[200 * 8 + 2], back[200 * 8 + 2];
            memset(planes, 0xa5, sizeof(planes));
            memset(back, 0xa5, sizeof(back));
            planes_split(planes + 1, width, data, n);
            for (size_t i = 0; i < n * width; i++) {
                assert_int_equal(planes[1 + (i % width) * n + i / width], data[i]);
            }
            planes_join(back + 1, width, planes + 1, n);
            assert_true(n == 0 || memcmp(back + 1, data, n * width) == 0);
            assert_int_equal(planes[0], 0xa5);
            assert_int_equal(planes[1 + n * width], 0xa5);
            assert_int_equal(back[0], 0xa5);
            assert_int_equal(back[1 + n * width], 0xa5);
            free(data - 1);
        }
    }
    assert_false(planes_valid(3, 9));
    assert_false(planes_valid(4, 9));
    assert_true(planes_valid(4, 8));
}

static void test_planes_pay(void **state) {
    (void)state;
    uint8_t *data = make(1 << 16, 1);
    for (size_t i = 0; i < 1 << 14; i++) {
        data[4 * i] = (uint8_t)next_random();
        data[4 * i + 1] = (uint8_t)(i >> 8);
    }
    assert_true(round_trip(CODING_ZSTD_PLANES, 0, 4, data, 1 << 16) <
                round_trip(CODING_ZSTD, 0, 4, data, 1 << 16));
    assert_true(round_trip(CODING_LZ4_PLANES, 0, 4, data, 1 << 16) <
                round_trip(CODING_LZ4, 0, 4, data, 1 << 16));
    assert_true(round_trip(CODING_LZ4, 9, 4, data, 1 << 16) <= round_trip(CODING_LZ4, 0, 4, data, 1 << 16));
    free(data);
}

/* A result that is not smaller than the limit is discarded, and nothing is written beyond the limit. */
static void test_limits(void **state) {
    (void)state;
    uint8_t *data = make(8000, 1);
    for (size_t h = 0; h < BYTE_CODINGS; h++) {
        size_t stored = round_trip(byte_codings[h], 0, 4, data, 8000);
        for (size_t limit = stored > 40 ? stored - 40 : 0; limit < stored + 40; limit++) {
            uint8_t *to = malloc(limit + GUARD);
            memset(to, 0xa5, limit + GUARD);
            coder_result result = {to, limit, 77};
            assert_int_equal(
                coder_encode(work, byte_codings[h], 0, &(coder_source){data, 8000, 4}, &result, NULL),
                CKD_OK);
            size_t got = result.stored;
            assert_true(got == 0 || got < limit);
            assert_true(limit > stored + 32 ? got == stored : limit > stored || got == 0);
            for (size_t i = 0; i < GUARD; i++) {
                assert_int_equal(to[limit + i], 0xa5);
            }
            free(to);
        }
    }
    free(data);
}

/* Damage gives an error or other bytes, but never an access outside of the buffers. */
static void test_damage(void **state) {
    (void)state;
    uint8_t *data = make(1200, 1), *out = malloc(1200 + 2 * GUARD);
    for (size_t h = 0; h < BYTE_CODINGS; h++) {
        uint8_t to[4096];
        coder_result result = {.to = to, .limit = sizeof(to)};
        assert_int_equal(
            coder_encode(work, byte_codings[h], 0, &(coder_source){data, 1200, 4}, &result, NULL), CKD_OK);
        size_t stored = result.stored;
        for (size_t bit = 0; bit < 8 * stored; bit++) {
            to[bit / 8] ^= (uint8_t)(1u << bit % 8);
            ckd_error err;
            memset(&err, 0, sizeof(err));
            ckd_status status = decode(out, byte_codings[h], 4, 1200, to, stored, &err);
            assert_true(status == CKD_OK || (status == CKD_E_CORRUPT && err.message[0]));
            to[bit / 8] ^= (uint8_t)(1u << bit % 8);
        }
        for (size_t left = 0; left < stored; left++) {
            uint8_t *exact = malloc(left ? left : 1);
            memcpy(exact, to, left);
            assert_int_equal(decode(out, byte_codings[h], 4, 1200, exact, left, NULL), CKD_E_CORRUPT);
            free(exact);
        }
        /* A size other than the stored one. */
        assert_int_equal(decode(out, byte_codings[h], 4, 1196, to, stored, NULL), CKD_E_CORRUPT);
        uint8_t *larger = malloc(1204 + 2 * GUARD);
        assert_int_equal(decode(larger, byte_codings[h], 4, 1204, to, stored, NULL), CKD_E_CORRUPT);
        free(larger);
    }
    free(out);
    free(data);
}

static void test_one_frame_only(void **state) {
    (void)state;
    uint8_t data[64] = {1, 2, 3}, to[512], out[128 + 2 * GUARD];
    size_t first = ZSTD_compress(to, sizeof(to), data, 64, 3);
    size_t second = ZSTD_compress(to + first, sizeof(to) - first, data, 64, 3);
    assert_false(ZSTD_isError(first) || ZSTD_isError(second));
    assert_int_equal(decode(out, CODING_ZSTD, 1, 64, to, first, NULL), CKD_OK);
    assert_int_equal(decode(out, CODING_ZSTD, 1, 128, to, first + second, NULL), CKD_E_CORRUPT);
    static const uint8_t skippable[] = {0x50, 0x2a, 0x4d, 0x18, 0, 0, 0, 0};
    memmove(to + sizeof(skippable), to, first);
    memcpy(to, skippable, sizeof(skippable));
    assert_int_equal(decode(out, CODING_ZSTD, 1, 64, to, first + sizeof(skippable), NULL), CKD_E_CORRUPT);
    /* Frames without content are still additional frames. */
    memmove(to, to + sizeof(skippable), first);
    memcpy(to + first, skippable, sizeof(skippable));
    assert_int_equal(decode(out, CODING_ZSTD, 1, 64, to, first + sizeof(skippable), NULL), CKD_E_CORRUPT);
    second = ZSTD_compress(to + first, sizeof(to) - first, data, 0, 3);
    assert_int_equal(decode(out, CODING_ZSTD, 1, 64, to, first + second, NULL), CKD_E_CORRUPT);
    /* A frame without its content size. */
    ZSTD_CCtx *c = ZSTD_createCCtx();
    ZSTD_CCtx_setParameter(c, ZSTD_c_contentSizeFlag, 0);
    size_t unsaid = ZSTD_compress2(c, to, sizeof(to), data, 64);
    ZSTD_freeCCtx(c);
    assert_int_equal(decode(out, CODING_ZSTD, 1, 64, to, unsaid, NULL), CKD_E_CORRUPT);
}

static void test_symbols_through_the_table(void **state) {
    (void)state;
    uint32_t values[3000], out[3000];
    uint8_t context[3000];
    for (size_t i = 0; i < 3000; i++) {
        context[i] = (uint8_t)(100 + i % 3);
        values[i] = (uint32_t)next_random() >> (8 + 6 * (i % 3));
    }
    symbols_plan(coder_symbols(work), 0, SYMBOLS_CLASS, &(symbols_input){4, 3000, values, context}, NULL);
    uint8_t *to = malloc(symbols_bound(coder_symbols(work), 0));
    size_t stored =
        symbols_encode(coder_symbols(work), 0, values, context, to, symbols_bound(coder_symbols(work), 0));
    assert_true(stored > 0);
    assert_int_equal(
        coder_decode(work, CODING_SYMBOLS, &(coder_target){out, sizeof(out), 4, context}, to, stored, NULL),
        CKD_OK);
    assert_memory_equal(out, values, sizeof(out));
    assert_int_equal(
        coder_decode(work, CODING_SYMBOLS, &(coder_target){out, sizeof(out), 4, NULL}, to, stored, NULL),
        CKD_E_CORRUPT);
    assert_int_equal(coder_decode(work, CODING_SYMBOLS, &(coder_target){out, sizeof(out) - 1, 4, context}, to,
                                  stored, NULL),
                     CKD_E_CORRUPT);
    free(to);
}

static void test_names_and_refusals(void **state) {
    (void)state;
    for (uint32_t c = 0; c < 256; c++) {
        bool is_array = c <= CODING_SYMBOLS;
        assert_int_equal(coding_is_array(c), is_array);
        assert_int_equal(strcmp(coding_name((coding)c), "?") != 0, is_array);
    }
    assert_false(coding_is_array(UINT32_MAX));
    uint8_t data[64] = {0}, to[256];
    coder_result result = {to, sizeof(to), 77};
    ckd_error err;
    assert_int_equal(coder_encode(work, CODING_SYMBOLS, 0, &(coder_source){data, 64, 4}, &result, &err),
                     CKD_E_INVALID);
    assert_int_equal(result.stored, 0);
    assert_int_equal(coder_encode(work, CODING_ZSTD_PLANES, 0, &(coder_source){data, 63, 4}, &result, &err),
                     CKD_E_INVALID);
    assert_int_equal(coder_encode(work, CODING_LZ4_PLANES, 0, &(coder_source){data, 63, 3}, &result, &err),
                     CKD_E_INVALID);
    assert_int_equal(coder_encode(work, CODING_ZSTD, 1000, &(coder_source){data, 64, 4}, &result, &err),
                     CKD_E_INVALID);
    assert_int_equal(coder_encode(work, CODING_LZ4, 13, &(coder_source){data, 64, 4}, &result, &err),
                     CKD_E_INVALID);
    assert_int_equal(coder_encode(work, CODING_LZ4, -1, &(coder_source){data, 64, 4}, &result, &err),
                     CKD_E_INVALID);
    assert_int_equal(coder_decode(work, (coding)99, &(coder_target){data, 64, 4, NULL}, to, 10, &err),
                     CKD_E_UNSUPPORTED);
    assert_int_equal(coder_decode(work, CODING_ZSTD_PLANES, &(coder_target){data, 63, 4, NULL}, to, 10, &err),
                     CKD_E_CORRUPT);
    coder_free(NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round_trips),
        cmocka_unit_test(test_planes),
        cmocka_unit_test(test_planes_pay),
        cmocka_unit_test(test_limits),
        cmocka_unit_test(test_damage),
        cmocka_unit_test(test_one_frame_only),
        cmocka_unit_test(test_symbols_through_the_table),
        cmocka_unit_test(test_names_and_refusals),
    };
    return cmocka_run_group_tests_name("codings", tests, set_up, tear_down);
}
