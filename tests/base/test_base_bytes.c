/* base/bytes and base/hash: sizes, fields, the buffer, the cursor, UTF-8, and hashes against known values. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>

#include "base/bytes.h"
#include "base/hash.h"

/* An allocation that is too large must return NULL, and is no finding of the sanitizer. */
const char *__asan_default_options(void);
const char *__tsan_default_options(void);
__attribute__((visibility("default"))) const char *__asan_default_options(void) {
    return "allocator_may_return_null=1";
}
__attribute__((visibility("default"))) const char *__tsan_default_options(void) {
    return "allocator_may_return_null=1";
}

static void test_sizes(void **state) {
    (void)state;
    uint64_t out = 77;
    assert_true(size_mul(&out, 0, UINT64_MAX));
    assert_int_equal(out, 0);
    assert_true(size_mul(&out, UINT64_C(1) << 32, (UINT64_C(1) << 32) - 1));
    assert_true(out == UINT64_C(0xffffffff00000000));
    assert_true(size_add(&out, UINT64_MAX - 5, 5));
    assert_true(out == UINT64_MAX);
    out = 77;
    assert_false(size_mul(&out, UINT64_C(1) << 32, UINT64_C(1) << 32));
    assert_false(size_mul(&out, UINT64_MAX, 2));
    assert_false(size_mul(&out, 3, UINT64_C(0x5555555555555556)));
    assert_false(size_add(&out, UINT64_MAX, 1));
    assert_false(size_add(&out, UINT64_C(1) << 63, UINT64_C(1) << 63));
    assert_int_equal(out, 77);
    assert_true(size_add(&out, out, out)); /* the output may be an input */
    assert_int_equal(out, 154);
}

static void test_little_endian(void **state) {
    (void)state;
    uint8_t raw[16];
    for (size_t shift = 0; shift < 8; shift++) {
        memset(raw, 0xee, sizeof(raw));
        uint8_t *at = raw + shift;
        store_le64(at, UINT64_C(0x8182838485868788));
        for (size_t i = 0; i < 8; i++) {
            assert_int_equal(at[i], 0x88 - i);
        }
        assert_true(load_le64(at) == UINT64_C(0x8182838485868788));
        assert_int_equal(load_le32(at), 0x85868788);
        assert_int_equal(load_le16(at), 0x8788);
        store_le32(at, 0xf1f2f3f4);
        store_le16(at + 4, 0xe1e2);
        static const uint8_t want[8] = {0xf4, 0xf3, 0xf2, 0xf1, 0xe2, 0xe1, 0x82, 0x81};
        assert_memory_equal(at, want, 8);
        for (size_t i = 0; i < sizeof(raw); i++) {
            assert_true((i >= shift && i < shift + 8) || raw[i] == 0xee);
        }
    }
}

static void test_fields_round_trip(void **state) {
    (void)state;
    bytes b = {0};
    bytes_put_u8(&b, 0xab);
    bytes_put_u16(&b, 0x1234);
    bytes_put_u32(&b, 0x89abcdef);
    bytes_put_u64(&b, UINT64_C(0xfedcba9876543210));
    bytes_put_string(&b, "wéight");
    bytes_put_string(&b, "");
    bytes_put(&b, NULL, 0);
    assert_false(b.failed);
    static const uint8_t want[] = {0xab, 0x34, 0x12, 0xef, 0xcd, 0xab, 0x89, 0x10, 0x32,
                                   0x54, 0x76, 0x98, 0xba, 0xdc, 0xfe, 7,    0,    'w',
                                   0xc3, 0xa9, 'i',  'g',  'h',  't',  0,    0};
    assert_int_equal(b.size, sizeof(want));
    assert_memory_equal(b.data, want, sizeof(want));

    reader r = reader_of(b.data, b.size);
    char text[8];
    assert_int_equal(reader_u8(&r), 0xab);
    assert_int_equal(reader_u16(&r), 0x1234);
    assert_int_equal(reader_u32(&r), 0x89abcdef);
    assert_true(reader_u64(&r) == UINT64_C(0xfedcba9876543210));
    reader_string(&r, text, sizeof(text));
    assert_string_equal(text, "wéight");
    reader_string(&r, text, sizeof(text));
    assert_string_equal(text, "");
    assert_int_equal(reader_left(&r), 0);
    assert_non_null(reader_take(&r, 0));
    assert_false(r.failed);
    bytes_free(&b);
    assert_null(b.data);
    assert_int_equal(b.size + b.capacity, 0);
}

/* Reading any prefix of a valid stream fails at once, and every later read does, too, with zeros. */
static void test_reader_past_the_end(void **state) {
    (void)state;
    static const uint8_t raw[15] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (size_t size = 0; size < sizeof(raw); size++) {
        uint8_t *copy =
            malloc(size + !size); /* the exact size, so that the sanitizer notices one byte too many */
        assert_non_null(copy);
        memcpy(copy, raw, size);
        reader r = reader_of(copy, size);
        uint64_t first = reader_u8(&r), second = reader_u16(&r), third = reader_u32(&r),
                 fourth = reader_u64(&r);
        assert_true(r.failed);
        assert_int_equal(first, size >= 1 ? 1 : 0);
        assert_int_equal(second, size >= 3 ? 0x0302 : 0);
        assert_int_equal(third, size >= 7 ? 0x07060504 : 0);
        assert_int_equal(fourth, 0);
        assert_int_equal(reader_u8(&r), 0); /* even if one byte is left */
        assert_null(reader_take(&r, 0));
        free(copy);
    }
    reader r = reader_of(raw, sizeof(raw));
    assert_ptr_equal(reader_take(&r, 3), raw);
    assert_ptr_equal(reader_take(&r, 2), raw + 3);
    assert_null(reader_take(&r, SIZE_MAX));
    assert_true(r.failed);
    r = reader_of(NULL, 0);
    assert_non_null(reader_take(&r, 0));
    assert_null(reader_take(&r, 1));
}

static bool string_fails(const void *field, size_t size, size_t capacity) {
    char out[64];
    memset(out, 'x', sizeof(out));
    reader r = reader_of(field, size);
    reader_string(&r, out, capacity);
    if (capacity > 0) {
        assert_int_equal(r.failed, out[0] == '\0');
    }
    for (size_t i = capacity; i < sizeof(out); i++) {
        assert_int_equal(out[i], 'x');
    }
    return r.failed;
}

static void test_strings(void **state) {
    (void)state;
    assert_false(string_fails("\3\0abc", 5, 4));
    assert_true(string_fails("\3\0abc", 5, 3)); /* no space for the NUL */
    assert_true(string_fails("\3\0abc", 5, 0));
    assert_true(string_fails("\3\0abc", 4, 64));  /* cut */
    assert_true(string_fails("\3", 1, 64));       /* length cut */
    assert_true(string_fails("\3\0a\0c", 5, 64)); /* a NUL inside */
    assert_true(string_fails("\2\0\xc3(", 4, 64));
    assert_true(string_fails("\xff\xff", 2, 64));

    bytes b = {0};
    char *longest = malloc(65537);
    assert_non_null(longest);
    memset(longest, 'a', 65536);
    longest[65535] = '\0';
    bytes_put_string(&b, longest);
    assert_false(b.failed);
    assert_int_equal(b.size, 65537);
    longest[65535] = 'a';
    longest[65536] = '\0';
    bytes_put_string(&b, longest);
    assert_true(b.failed);
    assert_int_equal(b.size, 65537);
    bytes_free(&b);
    free(longest);
}

static void test_buffer_grows_and_keeps(void **state) {
    (void)state;
    bytes b = {0};
    for (uint32_t i = 0; i < 100000; i++) {
        bytes_put_u32(&b, i * 2654435761u);
        assert_true(b.capacity <= b.size + b.size / 2 + 256);
    }
    assert_false(b.failed);
    assert_int_equal(b.size, 400000);
    for (uint32_t i = 0; i < 100000; i++) {
        assert_int_equal(load_le32(b.data + 4 * (size_t)i), i * 2654435761u);
    }
    size_t capacity = b.capacity;
    bytes_clear(&b);
    assert_int_equal(b.size, 0);
    memset(bytes_extend(&b, capacity), 7, capacity);
    assert_int_equal(b.capacity, capacity);
    bytes_free(&b);
    assert_non_null(bytes_extend(&b, 0));
    bytes_free(&b);
}

static void test_buffer_failure_sticks(void **state) {
    (void)state;
    static volatile size_t too_much[] = {SIZE_MAX, SIZE_MAX - 1, SIZE_MAX / 2 + 1, SIZE_MAX / 2 - 4096};
    for (size_t i = 0; i < sizeof(too_much) / sizeof(*too_much); i++) {
        bytes b = {0};
        bytes_put_u16(&b, 0x0102);
        assert_null(bytes_extend(&b, too_much[i]));
        assert_true(b.failed);
        bytes_put_u8(&b, 9);
        bytes_put_string(&b, "lost");
        assert_null(bytes_extend(&b, 0));
        bytes_clear(&b);
        assert_true(b.failed);
        assert_int_equal(b.size, 0);
        assert_memory_equal(b.data, "\2\1", 2);
        bytes_free(&b);
        assert_false(b.failed);
    }
}

static void test_utf8(void **state) {
    (void)state;
    static const char *const good[] = {
        "",
        "model.layers.0.weight",
        "\x7f",
        "\xc2\x80",
        "\xdf\xbf",
        "\xe0\xa0\x80",
        "\xe1\x80\x80",
        "\xec\xbf\xbf",
        "\xed\x9f\xbf",
        "\xee\x80\x80",
        "\xef\xbf\xbf",
        "\xf0\x90\x80\x80",
        "\xf1\x80\x80\x80",
        "\xf3\xbf\xbf\xbf",
        "\xf4\x8f\xbf\xbf",
        "a\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80z",
    };
    static const char *const bad[] = {
        "\x80", /* a tail alone */
        "\xbf",
        "\xc0\x80", /* overlong NUL */
        "\xc1\xbf", /* overlong */
        "\xc2",     /* cut */
        "\xc2\x7f",
        "\xc2\xc0",
        "\xe0\x9f\xbf", /* overlong */
        "\xe0\xa0",     /* cut */
        "\xe1\x80\x7f",
        "\xe1\x80\xc0",
        "\xed\xa0\x80", /* surrogates */
        "\xed\xbf\xbf",
        "\xf0\x8f\xbf\xbf", /* overlong */
        "\xf0\x90\x80",     /* cut */
        "\xf1\x80\x80\x7f",
        "\xf1\x80\x7f\x80",
        "\xf4\x90\x80\x80", /* beyond U+10FFFF */
        "\xf5\x80\x80\x80",
        "\xf8\x88\x80\x80\x80",
        "\xfe",
        "\xff",
        "abc\xe2\x82",
        "\xc3\xa9\x80",
    };
    for (size_t i = 0; i < sizeof(good) / sizeof(*good); i++) {
        assert_true(utf8_valid(good[i], strlen(good[i])));
    }
    for (size_t i = 0; i < sizeof(bad) / sizeof(*bad); i++) {
        assert_false(utf8_valid(bad[i], strlen(bad[i])));
    }
    assert_false(utf8_valid("a\0b", 3));
    assert_false(utf8_valid("\0", 1));
    assert_true(utf8_valid(NULL, 0));
    assert_false(utf8_valid("\xe2\x82\xac", 2)); /* bytes after the size do not count */
}

/*
 * The shortest encodings of all code points except NUL and surrogates are valid, and nothing else of the same
 * length is.
 */
static void test_utf8_every_code_point(void **state) {
    (void)state;
    uint32_t valid = 0;
    for (uint32_t c = 0; c < 0x200000; c++) {
        char s[4] = {(char)(0xf0 | c >> 18), (char)(0x80 | (c >> 12 & 63)), (char)(0x80 | (c >> 6 & 63)),
                     (char)(0x80 | (c & 63))};
        assert_int_equal(utf8_valid(s, 4), c >= 0x10000 && c <= 0x10ffff);
        if (c < 0x10000) {
            s[1] = (char)(0xe0 | c >> 12);
            valid += utf8_valid(s + 1, 3);
            assert_int_equal(utf8_valid(s + 1, 3), c >= 0x800 && (c < 0xd800 || c > 0xdfff));
        }
    }
    assert_int_equal(valid, 0x10000 - 0x800 - 0x800);
}

/*
 * ---- hashes: values computed with python3-xxhash 3.0.0, of the bytes (131 i + 17 (i >> 8) + 7) mod 256 ----
 */

typedef struct known {
    size_t size;
    uint64_t h64;
    const char *h128, *content;
} known;

static const known known_hashes[] = {
    {0, UINT64_C(0x2d06800538d394c2), "99aa06d3014798d86001c324468d497f", "99aa06d3014798d86001c324468d497f"},
    {1, UINT64_C(0x4c5cca45d0f4811f), "495b62073ef70ca44c5cca45d0f4811f", "fba1e82cc791ded3ae40cdd0381651c2"},
    {3, UINT64_C(0x6e3e2670e61106ac), "390cdc5b4a895dd76e3e2670e61106ac", "961652c05c3dea972069ae607f91173c"},
    {8, UINT64_C(0xf9fd4dd0b04d78f5), "6a86a3bda6af4e3d61ddbe7f31a6100d", "869dcd28b6ba5c66eedc176d2d8c778b"},
    {16, UINT64_C(0x86abf6baccea0858), "7f9a218b0425449ae2ce54a7c19c730d",
     "3789db9a72efaea195dc1f9f75624667"},
    {17, UINT64_C(0xb58bf5dc5022d071), "66fc23f6439dbd778d96ef110fcdebb4",
     "458ae14af2b10855674626e1b453c219"},
    {128, UINT64_C(0x10d17f72c0ccba41), "aec730751478556cff361dec1385710a",
     "6ef81f260548da573585b92a1a5b2d8e"},
    {129, UINT64_C(0x1648bdc3db49d1a2), "98cd36ccbb5579264545b3a09738e31a",
     "dc9875ed4bd34b97810c5e92f773d0fe"},
    {240, UINT64_C(0xb6cfaf343fab81e6), "5293e17bf553903d3f2c53e72293711f",
     "d4921e9418f4f6a7cce12bb2412901e4"},
    {241, UINT64_C(0x956cae592c67279e), "b53840fe3fedf161956cae592c67279e",
     "4f93a5c65302cae873f5fa1219a74c0f"},
    {1000, UINT64_C(0x377b990643fe09c3), "6123f5b9d58da8df377b990643fe09c3",
     "6a7e27c7e17da694980546d2bafa3417"},
    {4095, UINT64_C(0x39b9baef0ae24fba), "c8015baac3f64e8d39b9baef0ae24fba",
     "abfca8a4f41b270dc1e3480276fc945c"},
    {4096, UINT64_C(0x48aa0572119e973a), "e5817aaf266e34c648aa0572119e973a",
     "e5f037894d9e925d072a140d182feb36"},
    {4097, UINT64_C(0x377f136744508714), "f496c2ad34747e31377f136744508714",
     "a149a5ca9d5acb85482c06e6662e2b14"},
    {8192, UINT64_C(0xe26a1b0ceb60610f), "454b77da3e932529e26a1b0ceb60610f",
     "4829ac4bee4168cb5994124cc894222c"},
    {12345, UINT64_C(0x5b64b2691d428f19), "a9739f9a42aba47f5b64b2691d428f19",
     "cdcec70e424c7df305ee83ada6aca72f"},
    {1048576, UINT64_C(0xf55a2447d999a0f8), "e0a39e5834cb096ef55a2447d999a0f8",
     "84c537dcd505ab33d3234d68407e3bbd"},
    {1048577, UINT64_C(0x088454eae13307c1), "98f11c5e548d37cc088454eae13307c1",
     "d213dd522449a79a357bf02b9bf87407"},
    {3145828, UINT64_C(0xdb9a867b75bfe65d), "4c922694701a2a95db9a867b75bfe65d",
     "ff1a09e03894023b0b36f9e95efc9237"},
};

static const char *hex(char text[33], const hash128 *h) {
    for (size_t i = 0; i < 16; i++) {
        snprintf(text + 2 * i, 3, "%02x", h->bytes[i]);
    }
    return text;
}

static void test_known_hashes(void **state) {
    (void)state;
    char text[33];
    for (size_t k = 0; k < sizeof(known_hashes) / sizeof(*known_hashes); k++) {
        const known *want = &known_hashes[k];
        for (size_t shift = 0; shift < 3; shift++) { /* at any alignment */
            uint8_t *memory = malloc(want->size + shift + !(want->size + shift)), *data = memory + shift;
            assert_non_null(memory);
            for (size_t i = 0; i < want->size; i++) {
                data[i] = (uint8_t)(131 * i + 17 * (i >> 8) + 7);
            }
            assert_true(hash64(data, want->size) == want->h64);
            hash128 whole = hash128_of(data, want->size), content = content_hash(data, want->size);
            assert_string_equal(hex(text, &whole), want->h128);
            assert_string_equal(hex(text, &content), want->content);
            free(memory);
        }
    }
}

static void test_hash_of_nothing_and_equality(void **state) {
    (void)state;
    hash128 nothing = hash128_of(NULL, 0), content = content_hash(NULL, 0), other = nothing;
    assert_true(hash64(NULL, 0) == known_hashes[0].h64);
    assert_true(hash128_equal(&nothing, &content));
    for (size_t i = 0; i < 16; i++) {
        other.bytes[i] ^= 0x10;
        assert_false(hash128_equal(&nothing, &other));
        other.bytes[i] ^= 0x10;
    }
    assert_true(hash128_equal(&nothing, &other));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sizes),
        cmocka_unit_test(test_little_endian),
        cmocka_unit_test(test_fields_round_trip),
        cmocka_unit_test(test_reader_past_the_end),
        cmocka_unit_test(test_strings),
        cmocka_unit_test(test_buffer_grows_and_keeps),
        cmocka_unit_test(test_buffer_failure_sticks),
        cmocka_unit_test(test_utf8),
        cmocka_unit_test(test_utf8_every_code_point),
        cmocka_unit_test(test_known_hashes),
        cmocka_unit_test(test_hash_of_nothing_and_equality),
    };
    return cmocka_run_group_tests_name("base_bytes", tests, NULL, NULL);
}
