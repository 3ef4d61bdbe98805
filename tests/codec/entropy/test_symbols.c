/*
 * Symbol streams: round trips of all kinds of integers, sizes, damage of every bit, and the examples in
 * FORMAT.md.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "tests/support/xorshift.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "codec/entropy/symbols_work.h"

static symbols_workspace *work;

static int set_up(void **state) {
    (void)state;
    return symbols_workspace_create(&work, NULL) == CKD_OK ? 0 : -1;
}

static int tear_down(void **state) {
    (void)state;
    symbols_workspace_free(work);
    return 0;
}

/* ---- integers to code ---- */

typedef enum kind {
    ALL_ZERO,
    ALL_EQUAL,
    RANDOM,
    SPARSE,    /* one in 1000 */
    SPARSER,   /* one in 30000 */
    RESIDUALS, /* use about 40 % of the width, scaled by the context */
    SHIFTED,   /* around a centre */
    SIGNS,     /* the top bit flips in some */
    COUNTING,
    EXTREMES,  /* the ends of the range, and around 2^(w - 1) and 2^(w - 2) */
    EXPONENTS, /* like rotated floats */
    KINDS
} kind;

static uint64_t residual(unsigned bits, unsigned context) {
    uint64_t v = next_random() >> (64 - (bits * 2 / 5 + context % 5));
    v >>= next_random() % 4;
    return next_random() % 2 ? v : UINT64_C(0) - v;
}

static uint64_t integer(kind k, unsigned width, size_t i, unsigned context) {
    unsigned bits = 8 * width;
    switch (k) {
    case ALL_ZERO:
        return 0;
    case ALL_EQUAL:
        return UINT64_C(0x123456789abcdef1);
    case RANDOM:
        return next_random();
    case SPARSE:
        return next_random() % 1000 ? 0 : next_random();
    case SPARSER:
        return next_random() % 30000 ? 0 : residual(bits, 2);
    case RESIDUALS:
        return residual(bits, context);
    case SHIFTED:
        return (UINT64_C(5) << (bits - 4)) + residual(bits / 2, context);
    case SIGNS:
        return residual(bits, context) + ((uint64_t)(next_random() % 9 == 0) << (bits - 1));
    case COUNTING:
        return i * 3;
    case EXTREMES: {
        uint64_t ends[] = {0, UINT64_MAX, UINT64_C(1) << (bits - 1), UINT64_C(1) << (bits - 2),
                           UINT64_C(3) << (bits - 2)};
        return ends[next_random() % 5] + next_random() % 3 - 1;
    }
    default:
        return (UINT64_C(100) + next_random() % 30 + (next_random() % 50 == 0 ? 90 : 0))
                   << (bits > 8 ? bits - 8 : 0) |
               (next_random() & ((UINT64_C(1) << (bits > 8 ? bits - 8 : 0)) - 1));
    }
}

typedef struct data {
    unsigned width;
    size_t n;
    uint8_t *values, *context;
} data;

static data make(kind k, unsigned width, size_t n) {
    data d = {width, n, malloc(n * width + 1), malloc(n + 1)};
    assert_non_null(d.values);
    assert_non_null(d.context);
    for (size_t i = 0; i < n; i++) {
        d.context[i] =
            (uint8_t)(110 + next_random() % 7 + (next_random() % 200 == 0 ? next_random() % 139 : 0));
        uint64_t v = integer(k, width, i, d.context[i]);
        memcpy(d.values + i * width, &v, width);
    }
    return d;
}

static void data_free(data *d) {
    free(d->values);
    free(d->context);
}

/* ---- coding with sentinels around everything that is written ---- */

#define GUARD 32

/* A copy in an allocation of the exact size, so that sanitizers notice reads beyond it. */
static uint8_t *exactly(const uint8_t *from, size_t size) {
    uint8_t *copy = malloc(size ? size : 1);
    assert_non_null(copy);
    memcpy(copy, from, size);
    return copy;
}

static uint8_t *encode(const data *d, symbols_mode mode, int slot, bool contexts, size_t *size) {
    const uint8_t *context = contexts ? d->context : NULL;
    size_t planned =
        symbols_plan(work, slot, mode, &(symbols_input){d->width, d->n, d->values, context}, NULL);
    size_t bound = symbols_bound(work, slot);
    uint8_t *out = malloc(bound + GUARD);
    assert_non_null(out);
    memset(out, 0xa5, bound + GUARD);
    *size = symbols_encode(work, slot, d->values, context, out, bound);
    assert_true(d->n == 0 ? *size == 0 : *size > 0 && *size <= bound);
    for (size_t i = 0; i < GUARD; i++) {
        assert_int_equal(out[bound + i], 0xa5);
    }
    /* The choice between codings relies on the planned size. */
    assert_true(*size <= planned + planned / 256 + 8 && planned <= *size + *size / 256 + 24);
    return out;
}

/* Decodes to an odd address, with sentinels. */
static ckd_status decode_into(uint8_t *all, const data *d, const uint8_t *context, const uint8_t *stream,
                              size_t size) {
    size_t bytes_decoded = d->n * d->width;
    memset(all, 0xa5, bytes_decoded + 2 * GUARD + 1);
    ckd_error err;
    memset(&err, 0, sizeof(err));
    ckd_status status =
        symbols_decode(work, &(symbols_output){d->width, d->n, all + GUARD + 1, context}, stream, size, &err);
    assert_true(status == CKD_OK || err.message[0]);
    for (size_t i = 0; i < GUARD; i++) {
        assert_int_equal(all[i + 1], 0xa5);
        assert_int_equal(all[GUARD + 1 + bytes_decoded + i], 0xa5);
    }
    return status;
}

static size_t round_trip(const data *d, symbols_mode mode, bool contexts) {
    size_t size;
    uint8_t *out = encode(d, mode, (int)(next_random() % 2), contexts, &size);
    uint8_t *stream = exactly(out, size);
    uint8_t *all = malloc(d->n * d->width + 2 * GUARD + 1);
    assert_non_null(all);
    assert_int_equal(decode_into(all, d, contexts ? d->context : NULL, stream, size), CKD_OK);
    assert_true(d->n == 0 || memcmp(all + GUARD + 1, d->values, d->n * d->width) == 0);
    free(all);
    free(stream);
    free(out);
    return size;
}

static const unsigned widths[] = {1, 2, 4, 8};

static void test_round_trips(void **state) {
    (void)state;
    static const size_t counts[] = {0,  1,   2,    3,    7,    8,    9,    31,   32,
                                    33, 255, 1024, 2047, 2048, 2049, 4096, 20011};
    for (size_t w = 0; w < 4; w++) {
        for (int k = 0; k < KINDS; k++) {
            for (size_t c = 0; c < sizeof(counts) / sizeof(counts[0]); c++) {
                data d = make((kind)k, widths[w], counts[c]);
                for (int way = 0; way < 4; way++) {
                    round_trip(&d, (symbols_mode)(way & 1), way & 2);
                }
                data_free(&d);
            }
        }
    }
}

static void test_whole_blocks(void **state) {
    (void)state;
    for (size_t w = 0; w < 4; w++) {
        for (int k = 0; k < KINDS; k++) {
            data d = make((kind)k, widths[w], SYMBOLS_MAX_COUNT);
            round_trip(&d, SYMBOLS_CLASS, true);
            round_trip(&d, SYMBOLS_SPLIT, false);
            data_free(&d);
        }
    }
}

/* Every value of 8 and 16 bits, and all contexts. */
static void test_every_value(void **state) {
    (void)state;
    for (unsigned width = 1; width <= 2; width++) {
        size_t n = (size_t)1 << (8 * width);
        data d = make(ALL_ZERO, width, n);
        for (size_t i = 0; i < n; i++) {
            memcpy(d.values + i * width, &i, width);
            d.context[i] = (uint8_t)(i * 37);
        }
        for (int way = 0; way < 4; way++) {
            round_trip(&d, (symbols_mode)(way & 1), way & 2);
        }
        data_free(&d);
    }
}

/*
 * The symbol of every integer, computed by the vectorised loop and by definition, leads back to the integer.
 */
static void test_classes(void **state) {
    (void)state;
    static const unsigned fine[] = {SYMBOLS_FINE_8, SYMBOLS_FINE_16, SYMBOLS_FINE_32, SYMBOLS_FINE_64};
    for (size_t w = 0; w < 4; w++) {
        unsigned width = widths[w], bits = 8 * width;
        data d = make(EXTREMES, width, 4001);
        for (size_t i = 0; i < d.n / 2; i++) {
            uint64_t v = integer(RANDOM, width, i, 0) >> next_random() % bits;
            memcpy(d.values + i * width, &v, width);
        }
        uint8_t symbols[4001];
        uint64_t centre = next_random() & (UINT64_MAX >> (64 - bits));
        symbols_classify(symbols, width, d.values, centre, d.n);
        symbols_header h = {
            .mode = SYMBOLS_CLASS, .tables = 1, .fine = fine[w], .table = {{.centre = centre}}};
        for (size_t i = 0; i < d.n; i++) {
            uint64_t v = 0;
            memcpy(&v, d.values + i * width, width);
            uint64_t mask = UINT64_MAX >> (64 - bits);
            assert_int_equal(symbols[i], symbols_class_of((v - centre) & mask, bits, fine[w]));
            symbols_meaning meaning = symbols_mean(&h, width, 0, symbols[i]);
            assert_true(meaning.low <= bits - 2);
            assert_true(((v - meaning.base) & mask) >> meaning.low == 0);
        }
        data_free(&d);
    }
}

/* ---- sizes ---- */

static double bits_each(kind k, unsigned width, size_t n, symbols_mode mode, bool contexts) {
    data d = make(k, width, n);
    double bits = 8.0 * (double)round_trip(&d, mode, contexts) / (double)n;
    data_free(&d);
    return bits;
}

static void test_sizes(void **state) {
    (void)state;
    size_t n = SYMBOLS_MAX_COUNT;
    assert_true(bits_each(ALL_ZERO, 4, n, SYMBOLS_CLASS, true) < 0.001);
    assert_true(bits_each(ALL_EQUAL, 4, n, SYMBOLS_SPLIT, false) < 0.001);
    /* 11.4 bits for the place, 16 for the value */
    assert_true(bits_each(SPARSE, 2, n, SYMBOLS_CLASS, true) < 0.035);
    assert_true(bits_each(SPARSER, 4, n, SYMBOLS_CLASS, true) < 0.003);
    assert_true(bits_each(RANDOM, 4, n, SYMBOLS_CLASS, false) < 32.01);
    assert_true(bits_each(RANDOM, 4, n, SYMBOLS_SPLIT, false) < 32.01);
    /* Log2 of 30 symbols, and a rare flag. */
    assert_true(bits_each(EXPONENTS, 4, n, SYMBOLS_SPLIT, false) < 24 + 5.2);
    assert_true(bits_each(EXPONENTS, 4, 64, SYMBOLS_SPLIT, false) < 32);
    /* A changed sign is a class of its own, and not a difference of nearly all bits. */
    double plain = bits_each(RESIDUALS, 4, n, SYMBOLS_CLASS, true);
    assert_true(bits_each(SIGNS, 4, n, SYMBOLS_CLASS, true) < plain + 0.7);
    /* A common centre is subtracted. */
    assert_true(bits_each(SHIFTED, 4, n, SYMBOLS_CLASS, true) < 12);
}

/* Contexts that tell the scale make streams smaller. Contexts that tell nothing cost nothing. */
static void test_contexts_pay(void **state) {
    (void)state;
    data d = make(RESIDUALS, 4, SYMBOLS_MAX_COUNT);
    size_t with = round_trip(&d, SYMBOLS_CLASS, true), without = round_trip(&d, SYMBOLS_CLASS, false);
    assert_true(with < without - without / 100);
    for (size_t i = 0; i < d.n; i++) {
        d.context[i] = (uint8_t)next_random();
    }
    size_t useless = round_trip(&d, SYMBOLS_CLASS, true);
    assert_true(useless <= without + without / 5000);
    data_free(&d);
}

/* ---- plans ---- */

static void test_two_slots(void **state) {
    (void)state;
    data a = make(RESIDUALS, 4, 5000), b = make(EXPONENTS, 4, 5000);
    size_t size_a, size_b;
    symbols_plan(work, 0, SYMBOLS_CLASS, &(symbols_input){4, a.n, a.values, a.context}, NULL);
    symbols_plan(work, 1, SYMBOLS_SPLIT, &(symbols_input){4, b.n, b.values, NULL}, NULL);
    uint8_t *out_a = malloc(symbols_bound(work, 0)), *out_b = malloc(symbols_bound(work, 1));
    size_b = symbols_encode(work, 1, b.values, NULL, out_b, symbols_bound(work, 1));
    /* Decoding between planning and encoding must not change the other plan. */
    uint8_t *all = malloc(a.n * 4 + 2 * GUARD + 1);
    assert_int_equal(decode_into(all, &b, NULL, out_b, size_b), CKD_OK);
    assert_memory_equal(all + GUARD + 1, b.values, b.n * 4);
    size_a = symbols_encode(work, 0, a.values, a.context, out_a, symbols_bound(work, 0));
    assert_int_equal(decode_into(all, &a, a.context, out_a, size_a), CKD_OK);
    assert_memory_equal(all + GUARD + 1, a.values, a.n * 4);
    free(all);
    free(out_a);
    free(out_b);
    data_free(&a);
    data_free(&b);
}

/* Too small a capacity is reported, and nothing is written beyond it. */
static void test_capacity(void **state) {
    (void)state;
    for (int k = 0; k < 2; k++) {
        data d = make(k ? SPARSE : RESIDUALS, 4, 6000);
        size_t size;
        free(encode(&d, SYMBOLS_CLASS, 0, true, &size));
        for (size_t capacity = 0; capacity <= size;
             capacity += capacity + 40 < size && capacity > 600 ? 37 : 1) {
            uint8_t *out = malloc(capacity + GUARD);
            memset(out, 0xa5, capacity + GUARD);
            size_t got = symbols_encode(work, 0, d.values, d.context, out, capacity);
            assert_int_equal(got, capacity < size ? 0 : size);
            for (size_t i = 0; i < GUARD; i++) {
                assert_int_equal(out[capacity + i], 0xa5);
            }
            free(out);
        }
        data_free(&d);
    }
}

/* ---- damage ---- */

static data damage_sample(int which) {
    static const struct {
        kind k;
        unsigned width;
        size_t n;
    } samples[] = {{RESIDUALS, 4, 300}, {SIGNS, 2, 2500},   {EXPONENTS, 4, 40}, {SPARSE, 2, 5000},
                   {SPARSER, 1, 9000},  {RESIDUALS, 8, 60}, {RANDOM, 1, 20},    {SHIFTED, 4, 2100}};
    return make(samples[which].k, samples[which].width, samples[which].n);
}
#define DAMAGE_SAMPLES 8

static bool same(const uint8_t *all, const data *d) {
    return memcmp(all + GUARD + 1, d->values, d->n * d->width) == 0;
}

/*
 * Any flipped bit gives CORRUPT (or UNSUPPORTED, for kinds of later versions) or other integers. Nothing
 * outside of the buffers is accessed, which sentinels and sanitizers check.
 */
static void test_flipped_bits(void **state) {
    (void)state;
    for (int which = 0; which < DAMAGE_SAMPLES; which++) {
        data d = damage_sample(which);
        size_t size, refused = 0;
        uint8_t *out = encode(&d, which == 2 || which == 6 ? SYMBOLS_SPLIT : SYMBOLS_CLASS, 0, true, &size);
        uint8_t *stream = exactly(out, size), *all = malloc(d.n * d.width + 2 * GUARD + 1);
        for (size_t bit = 0; bit < 8 * size; bit++) {
            stream[bit / 8] ^= (uint8_t)(1u << bit % 8);
            ckd_status status = decode_into(all, &d, d.context, stream, size);
            assert_true(status == CKD_OK || status == CKD_E_CORRUPT || status == CKD_E_UNSUPPORTED);
            /* Some bits do not change the integers: two states of one symbol, an unused table. */
            refused += status != CKD_OK;
            stream[bit / 8] ^= (uint8_t)(1u << bit % 8);
        }
        assert_true(refused > 0);
        assert_int_equal(decode_into(all, &d, d.context, stream, size), CKD_OK);
        assert_true(same(all, &d));
        free(all);
        free(stream);
        free(out);
        data_free(&d);
    }
}

static void test_truncations(void **state) {
    (void)state;
    for (int which = 0; which < DAMAGE_SAMPLES; which++) {
        data d = damage_sample(which);
        size_t size;
        uint8_t *out = encode(&d, SYMBOLS_CLASS, 0, true, &size),
                *all = malloc(d.n * d.width + 2 * GUARD + 1);
        for (size_t left = 0; left < size; left++) {
            uint8_t *stream = exactly(out, left);
            assert_true(decode_into(all, &d, d.context, stream, left) != CKD_OK || !same(all, &d));
            free(stream);
        }
        uint8_t *longer = malloc(size + 1);
        memcpy(longer, out, size);
        for (unsigned extra = 0; extra < 256; extra++) {
            longer[size] = (uint8_t)extra;
            assert_true(decode_into(all, &d, d.context, longer, size + 1) != CKD_OK || !same(all, &d));
        }
        free(longer);
        free(all);
        free(out);
        data_free(&d);
    }
}

static void test_random_bytes(void **state) {
    (void)state;
    uint8_t *all = malloc(3000 * 8 + 2 * GUARD + 1);
    for (int i = 0; i < 20000; i++) {
        data d = {widths[next_random() % 4], 1 + next_random() % 3000, NULL, NULL};
        uint8_t context[3000];
        memset(context, (int)next_random(), sizeof(context));
        size_t size = next_random() % 200;
        uint8_t stream[200];
        for (size_t j = 0; j < size; j++) {
            stream[j] = (uint8_t)(next_random() >> next_random() % 8);
        }
        if (size > 3 && i % 3 == 0) {
            stream[0] = SYMBOLS_SPARSE;
            stream[1] %= 20;
        }
        if (size > 3 && i % 3 == 2) {
            stream[0] = SYMBOLS_CHANGES;
            stream[1] = (uint8_t)(1 + stream[1] % 3);
        }
        if (size > 6 && i % 3 == 1) {
            stream[0] = SYMBOLS_FRAMED;
            stream[1] %= 16;
            stream[2] = (uint8_t)(stream[2] & 127u >> (stream[1] < 7 ? 7 - stream[1] : 0));
            stream[3] &= 127;
            stream[4] = stream[3] ? (uint8_t)(stream[4] % stream[3]) : stream[4];
            stream[5] %= 100;
        }
        uint8_t *exact = exactly(stream, size);
        ckd_status status = decode_into(all, &d, i % 2 ? context : NULL, exact, size);
        assert_true(status == CKD_OK || status == CKD_E_CORRUPT || status == CKD_E_UNSUPPORTED);
        free(exact);
    }
    free(all);
}

/* ---- what a decoder refuses ---- */

static void expect(ckd_status want, unsigned width, size_t n, const uint8_t *context, const char *hex) {
    uint8_t stream[256], values[4096 * 8];
    size_t size = 0;
    for (; hex[2 * size]; size++) {
        char digits[3] = {hex[2 * size], hex[2 * size + 1], 0};
        stream[size] = (uint8_t)strtoul(digits, NULL, 16);
    }
    uint8_t *exact = exactly(stream, size);
    assert_int_equal(symbols_decode(work, &(symbols_output){width, n, values, context}, exact, size, NULL),
                     want);
    free(exact);
}

static void test_refusals(void **state) {
    (void)state;
    uint8_t context[16] = {0};
    expect(CKD_OK, 2, 8, NULL, "0012000e3efe1f0556f3a2");
    expect(CKD_E_CORRUPT, 2, 7, NULL, "0012000e3efe1f0556f3a2");     /* fewer integers than coded */
    expect(CKD_E_CORRUPT, 2, 9, NULL, "0012000e3efe1f0556f3a2");     /* more */
    expect(CKD_E_CORRUPT, 2, 8, NULL, "0012000e3efe1f0556f300");     /* no end mark */
    expect(CKD_E_CORRUPT, 2, 8, NULL, "0012000e3efe1f05");           /* no payload */
    expect(CKD_E_CORRUPT, 2, 8, NULL, "0012000e3efe1f2556f3a2");     /* padding that is not zero */
    expect(CKD_E_CORRUPT, 2, 8, NULL, "");                           /* empty */
    expect(CKD_E_UNSUPPORTED, 2, 8, NULL, "8412000e3efe1f0556f3a2"); /* a kind of a later version */
    expect(CKD_E_CORRUPT, 2, 0, NULL, "00");
    expect(CKD_OK, 2, 0, NULL, "");
    expect(CKD_E_INVALID, 3, 8, NULL, "0012000e3efe1f0556f3a2");
    expect(CKD_E_INVALID, 2, SYMBOLS_MAX_COUNT + 1, NULL, "0012000e3efe1f0556f3a2");
    /*
     * Sparse streams: without pairs, with too many, with ranges that do not ascend, with gaps that are too
     * large.
     */
    expect(CKD_OK, 2, 8, NULL, "800000");
    expect(CKD_E_CORRUPT, 2, 8, NULL, "80000000");
    expect(CKD_E_CORRUPT, 2, 8, NULL, "800003");
    expect(CKD_E_CORRUPT, 2, 8, NULL, "8000");
    expect(CKD_E_CORRUPT, 2, 8, context, "8010000000000000000000000000000000000000000000");
    expect(CKD_E_CORRUPT, 2, 8, context, "80020505000000");
    expect(CKD_E_CORRUPT, 2, 8, NULL,
           "80010500"
           "00"); /* ranges without contexts */
    expect(CKD_OK, 2, 8, context,
           "80010500"
           "00");
    expect(CKD_OK, 2, 4096, NULL, "800003002200863efb1f685f3f1c67db09bfe818");
    expect(CKD_E_CORRUPT, 2, 3999, NULL, "800003002200863efb1f685f3f1c67db09bfe818");
    /* Run streams: too many or too few integers, a size that is too large or too small, 64 bits. */
    expect(CKD_OK, 1, 20, NULL, "8209da02");
    expect(CKD_E_CORRUPT, 1, 19, NULL, "8209da02");
    expect(CKD_E_CORRUPT, 1, 5, NULL, "8209da02");
    expect(CKD_E_CORRUPT, 1, 20, NULL, "8209da0200");
    expect(CKD_E_CORRUPT, 1, 20, NULL, "82");
    expect(CKD_E_CORRUPT, 8, 20, NULL, "8209da02");
}

/*
 * If a table has one symbol, states never change and take no bits, so that only the checks at the end remain.
 * Each is tested separately. 0x01 begins: SPLIT, one lane, log 5; then k = 8 of 16 bits, bias 0, first = last
 * = 0.
 */
static void test_each_check_at_the_end(void **state) {
    (void)state;
    /* bits: 1 0 00 000 0 | 000100 | 00000000 | 00000000 | 00000000 | 00 */
    static const char header[] = "0108000000";
    char stream[64];
    /* The payload has two integers with 8 low bits each, then the state (5 bits), then the mark. */
    snprintf(stream, sizeof(stream), "%s%s", header, "112220");
    expect(CKD_OK, 2, 2, NULL, stream);
    expect(CKD_E_CORRUPT, 2, 1, NULL, stream); /* bits are left; the state is 0 */
    expect(CKD_E_CORRUPT, 2, 3, NULL, stream); /* bits are missing */
    snprintf(stream, sizeof(stream), "%s%s", header, "112223");
    expect(CKD_E_CORRUPT, 2, 2, NULL, stream); /* all bits are used; the state is 3 */
}

/* A gap of 2^64 - 1, or of the number of elements, must not wrap around to another element. */
static void test_gaps_that_are_too_large(void **state) {
    (void)state;
    static const uint64_t gaps[] = {0, 1, 61, 62, 63, 64, UINT64_MAX, UINT64_MAX - 3, UINT64_C(1) << 32};
    for (size_t g = 0; g < sizeof(gaps) / sizeof(gaps[0]); g++) {
        uint64_t pairs[4] = {0, 5, gaps[g], 6};
        uint8_t context[4] = {0, 16, 0, 16}, stream[256] = {SYMBOLS_SPARSE, 0, 2};
        symbols_groups groups;
        symbols_slot *p = &work->plan[0].inner;
        symbols_dense_plan(work, p, &groups, SYMBOLS_CLASS, &(symbols_input){8, 4, pairs, context});
        size_t size = symbols_dense_encode(work, p, pairs, context, stream + 3, sizeof(stream) - 3);
        assert_true(size > 0);
        uint64_t values[64];
        ckd_status status =
            symbols_decode(work, &(symbols_output){8, 64, values, NULL}, stream, 3 + size, NULL);
        assert_int_equal(status, gaps[g] <= 62 ? CKD_OK : CKD_E_CORRUPT);
        for (size_t i = 0; status == CKD_OK && i < 64; i++) {
            assert_true(values[i] == (i == 0 ? 5 : (i == 1 + gaps[g] ? 6 : 0)));
        }
    }
}

/* There may be at most one pair for four elements. */
static void test_too_many_pairs(void **state) {
    (void)state;
    uint16_t pairs[12], values[24];
    uint8_t context[12], stream[256] = {SYMBOLS_SPARSE, 0, 6};
    for (size_t i = 0; i < 12; i++) {
        pairs[i] = i % 2 ? 9 : 0;
        context[i] = (uint8_t)(16 * (i % 2));
    }
    symbols_groups groups;
    symbols_slot *p = &work->plan[0].inner;
    symbols_dense_plan(work, p, &groups, SYMBOLS_CLASS, &(symbols_input){2, 12, pairs, context});
    size_t size = 3 + symbols_dense_encode(work, p, pairs, context, stream + 3, sizeof(stream) - 3);
    assert_int_equal(symbols_decode(work, &(symbols_output){2, 24, values, NULL}, stream, size, NULL),
                     CKD_OK);
    assert_int_equal(symbols_decode(work, &(symbols_output){2, 23, values, NULL}, stream, size, NULL),
                     CKD_E_CORRUPT);
}

static void test_examples_of_the_format(void **state) {
    (void)state;
    static const uint8_t dense[] = {0x00, 0x12, 0x00, 0x0e, 0x3e, 0xfe, 0x1f, 0x05, 0x56, 0xf3, 0xa2};
    static const int16_t want[8] = {0, 1, 0, -1, 0, 0, 5, 0};
    int16_t got[8];
    assert_int_equal(symbols_decode(work, &(symbols_output){2, 8, got, NULL}, dense, sizeof(dense), NULL),
                     CKD_OK);
    assert_memory_equal(got, want, sizeof(want));
    static const uint8_t sparse[] = {0x80, 0x00, 0x03, 0x00, 0x22, 0x00, 0x86, 0x3e, 0xfb, 0x1f,
                                     0x68, 0x5f, 0x3f, 0x1c, 0x67, 0xdb, 0x09, 0xbf, 0xe8, 0x18};
    static int16_t many[4096];
    assert_int_equal(
        symbols_decode(work, &(symbols_output){2, 4096, many, NULL}, sparse, sizeof(sparse), NULL), CKD_OK);
    for (size_t i = 0; i < 4096; i++) {
        assert_int_equal(many[i], i == 1000 ? 7 : (i == 1001 ? 1 : (i == 4000 ? -1 : 0)));
    }
}

/* ---- change streams ---- */

/* Differences of floats: the smaller a value, the likelier it changes, and the further. */
static data changes_new(unsigned width, size_t n, unsigned one_in) {
    data d = {width, n, calloc(n, width), malloc(n)};
    assert_true(d.values && d.context);
    for (size_t i = 0; i < n; i++) {
        unsigned below = (unsigned)__builtin_ctzll(next_random() | UINT64_C(1) << 20);
        d.context[i] = (uint8_t)(120 - below);
        if (next_random() % one_in < UINT64_C(1) << below) {
            int64_t size = 1 + (int64_t)(next_random() % ((UINT64_C(1) << below / 4) + 1));
            symbols_store(d.values, width, i, (uint64_t)(next_random() % 2 ? size : -size));
        }
    }
    return d;
}

/* Encodes to a new allocation of exactly the stream's size. */
static uint8_t *changes_encode(size_t *size, const data *d) {
    size_t planned =
        symbols_plan(work, 0, SYMBOLS_CLASS, &(symbols_input){d->width, d->n, d->values, d->context}, NULL);
    size_t bound = symbols_bound(work, 0);
    uint8_t *stream = malloc(bound);
    *size = symbols_encode(work, 0, d->values, d->context, stream, bound);
    assert_true(*size > 0 && *size <= planned + planned / 64 + 8);
    uint8_t *exact = exactly(stream, *size);
    free(stream);
    return exact;
}

static void test_changes_are_listed(void **state) {
    (void)state;
    static const size_t counts[] = {1024, 5000, 20000, SYMBOLS_MAX_COUNT};
    for (unsigned width = 1; width <= 8; width *= 2) {
        for (size_t k = 0; k < 4; k++) {
            for (unsigned one_in = 10; one_in <= 4000; one_in *= 20) {
                size_t n = counts[k], size;
                data d = changes_new(width, n, one_in);
                uint8_t *stream = changes_encode(&size, &d), *back = malloc(n * width);
                assert_int_equal(
                    symbols_decode(work, &(symbols_output){width, n, back, d.context}, stream, size, NULL),
                    CKD_OK);
                assert_memory_equal(back, d.values, n * width);
                bool listed = symbols_lists_changes(stream, size) != SYMBOLS_ALL_INTEGERS;
                assert_true(listed || n < 20000 || width == 1 || one_in == 10);
                assert_true(!listed || symbols_coded(work, 0) < n);
                free(stream);
                free(back);
                data_free(&d);
            }
        }
    }
}

/* Whoever applies changes in place gets the same integers. */
static void test_changes_one_by_one(void **state) {
    (void)state;
    size_t n = 50000, size;
    data d = changes_new(2, n, 300);
    uint8_t *stream = changes_encode(&size, &d), *context = malloc(n);
    uint16_t *back = calloc(n, 2);
    assert_int_equal(symbols_lists_changes(stream, size), SYMBOLS_CHANGES_BY_CONTEXT);
    symbols_changes c;
    const symbols_stream s = {2, n, stream, size};
    assert_int_equal(symbols_find_changes(&c, work, &s, NULL, NULL), CKD_E_CORRUPT);
    assert_int_equal(symbols_find_changes(&c, work, &s, d.context, NULL), CKD_OK);
    for (size_t i = 0; i < c.count; i++) {
        assert_true(c.at[i] < n && back[c.at[i]] == 0);
        back[c.at[i]] = 1;
        context[i] = d.context[c.at[i]];
    }
    assert_int_equal(symbols_read_changes(&c, work, context, NULL), CKD_OK);
    for (size_t i = 0; i < c.count; i++) {
        memcpy(&back[c.at[i]], (const uint8_t *)c.values + 2 * i, 2);
    }
    assert_memory_equal(back, d.values, 2 * n);
    free(stream);
    free(context);
    free(back);
    data_free(&d);
}

/* Rows of an embedding: what changes are runs, which take no gap for each. */
static void test_changes_in_runs(void **state) {
    (void)state;
    size_t n = 100000, size;
    data d = {2, n, calloc(n, 2), malloc(n)};
    memset(d.context, 120, n);
    for (size_t row = 0; row < n / 500; row += 10) {
        for (size_t i = 0; i < 500; i++) {
            symbols_store(d.values, 2, 500 * row + i, next_random() % 2 ? 1 : UINT64_MAX);
        }
    }
    uint8_t *stream = changes_encode(&size, &d);
    assert_true(size < n / 10 / 8 + 100); /* a bit a change, for its sign */
    uint16_t *back = malloc(2 * n);
    assert_int_equal(symbols_decode(work, &(symbols_output){2, n, back, d.context}, stream, size, NULL),
                     CKD_OK);
    assert_memory_equal(back, d.values, 2 * n);
    free(stream);
    free(back);
    data_free(&d);
}

/* Any damage gives integers or CORRUPT; what is cut off is always noticed. */
static void test_damaged_changes(void **state) {
    (void)state;
    size_t n = 6000, size;
    data d = changes_new(4, n, 200);
    uint8_t *stream = changes_encode(&size, &d), *back = malloc(4 * n);
    assert_int_equal(stream[0], SYMBOLS_CHANGES);
    for (size_t cut = 0; cut < size; cut++) {
        uint8_t *exact = exactly(stream, cut);
        assert_int_equal(symbols_decode(work, &(symbols_output){4, n, back, d.context}, exact, cut, NULL),
                         CKD_E_CORRUPT);
        free(exact);
    }
    for (size_t bit = 0; bit < 8 * size; bit++) {
        stream[bit / 8] ^= (uint8_t)(1u << bit % 8);
        ckd_status status =
            symbols_decode(work, &(symbols_output){4, n, back, d.context}, stream, size, NULL);
        assert_true(status == CKD_OK || status == CKD_E_CORRUPT || status == CKD_E_UNSUPPORTED);
        stream[bit / 8] ^= (uint8_t)(1u << bit % 8);
    }
    free(stream);
    free(back);
    data_free(&d);
}

static void test_refused_changes(void **state) {
    (void)state;
    uint8_t context[16] = {0};
    /* 8 integers, one list of one change at place 5, no others, the sign set */
    expect(CKD_OK, 2, 8, NULL,
           "8301010100012000"
           "01");
    expect(CKD_E_CORRUPT, 2, 8, NULL,
           "8301010100012000"
           "03"); /* a second sign */
    expect(CKD_E_CORRUPT, 2, 8, NULL,
           "8301010100012000"
           "0100"); /* more than the signs */
    expect(CKD_E_CORRUPT, 2, 8, NULL,
           "8301010100012100"
           "01"); /* a second number */
    expect(CKD_E_CORRUPT, 2, 5, NULL,
           "8301010100012000"
           "01"); /* a place behind the last integer */
    expect(CKD_E_CORRUPT, 2, 8, NULL,
           "830101010002200000"
           "01"); /* unary bits of too many bytes */
    expect(CKD_E_CORRUPT, 2, 8, NULL,
           "8301010300012000"
           "01"); /* an unknown kind of places */
    expect(CKD_E_CORRUPT, 2, 8, NULL,
           "8301010112012000"
           "01"); /* 18 low bits */
    expect(CKD_E_CORRUPT, 2, 1, NULL,
           "8301010100010100"
           "01"); /* more than every second integer */
    expect(CKD_E_CORRUPT, 2, 8, NULL,
           "8301010100012002"
           "01");                         /* more others than changes */
    expect(CKD_OK, 2, 8, NULL, "830100"); /* no changes */
    expect(CKD_E_CORRUPT, 2, 8, NULL, "83010000");
    expect(CKD_E_CORRUPT, 2, 8, NULL, "8300"); /* no lists, too many, and none that ends at 255 */
    expect(CKD_E_CORRUPT, 2, 8, NULL, "830401020300000000");
    expect(CKD_E_CORRUPT, 2, 8, context, "8302ff0000");
    expect(CKD_E_CORRUPT, 2, 8, context, "83030505000000");
    expect(CKD_E_CORRUPT, 2, 8, NULL, "8302050000"); /* lists without contexts */
    expect(CKD_OK, 2, 8, context, "8302050000");
    /* runs: one of two, at 3; then one that is longer than the changes are */
    expect(CKD_OK, 2, 8, NULL, "83010202010001080001020000");
    expect(CKD_E_CORRUPT, 2, 8, NULL, "83010202010001080001040000");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round_trips),
        cmocka_unit_test(test_whole_blocks),
        cmocka_unit_test(test_every_value),
        cmocka_unit_test(test_classes),
        cmocka_unit_test(test_sizes),
        cmocka_unit_test(test_contexts_pay),
        cmocka_unit_test(test_two_slots),
        cmocka_unit_test(test_capacity),
        cmocka_unit_test(test_flipped_bits),
        cmocka_unit_test(test_truncations),
        cmocka_unit_test(test_random_bytes),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_each_check_at_the_end),
        cmocka_unit_test(test_gaps_that_are_too_large),
        cmocka_unit_test(test_too_many_pairs),
        cmocka_unit_test(test_examples_of_the_format),
        cmocka_unit_test(test_changes_are_listed),
        cmocka_unit_test(test_changes_one_by_one),
        cmocka_unit_test(test_changes_in_runs),
        cmocka_unit_test(test_damaged_changes),
        cmocka_unit_test(test_refused_changes),
    };
    return cmocka_run_group_tests_name("symbols", tests, set_up, tear_down);
}
