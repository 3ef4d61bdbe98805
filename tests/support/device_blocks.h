/* Blocks of values and their parents' values, on a device and on the host, for tests of symbol streams. */
#ifndef TESTS_SUPPORT_DEVICE_BLOCKS_H
#define TESTS_SUPPORT_DEVICE_BLOCKS_H

#include "tests/support/device_lines.h"

enum {
    ANYTHING,
    TRAINED,
    SAME,
    SHIFTED,
    SAMPLED,
    KINDS
}; /* SAMPLED: only the elements that determine the centre change */

UNUSED static void fill_before(uint8_t *to, ckd_dtype dtype, size_t n, int kind) {
    size_t size = ckd_dtype_size(dtype);
    for (size_t i = 0; i < n; i++) {
        uint64_t bits = next_random();
        if (kind != ANYTHING && dtype == CKD_F32) {
            float v = 0.02f * ((float)(int32_t)bits / 0x1p31f) * ((float)(int32_t)(bits >> 32) / 0x1p31f);
            memcpy(to + i * size, &v, size);
        } else if (kind != ANYTHING && size > 1) { /* exponents close to each other, as weights have */
            bits = (bits & (UINT64_MAX >> (66 - 8 * size))) | UINT64_C(3) << (8 * size - 4);
            memcpy(to + i * size, &bits, size);
        } else {
            bits = next_random() % 4 ? bits : bits & (UINT64_MAX << next_random() % 64);
            memcpy(to + i * size, &bits, size);
        }
    }
}

/* Some values become NaN, infinite, denormal or -0. */
UNUSED static void fill_now(uint8_t *to, const uint8_t *before, ckd_dtype dtype, size_t n, int kind) {
    size_t size = ckd_dtype_size(dtype);
    static const uint32_t odd[] = {0x7fc00000, 0x7f800000, 0xff800000, 1,
                                   0x80000000, 0x807fffff, 0xffffffff, 0};
    for (size_t i = 0; i < n; i++) {
        uint64_t bits = 0, by = next_random();
        uint8_t context;
        memcpy(&bits, before + i * size, size);
        cpu->magnitude_context(dtype, &context, before + i * size, 1);
        if (kind == ANYTHING) {
            bits = next_random();
        } else if (kind == SHIFTED) {
            bits += (UINT64_C(3) << (8 * size - 5)) + next_random() % 5;
        } else if (kind == SAMPLED) {
            size_t sample = (i * symbols_sample_count(n) + n - 1) / n;
            bits += sample * n / symbols_sample_count(n) == i ? 100 : 0;
        } else if (kind == TRAINED && by % 256 == 0) {
            bits = (uint64_t)odd[next_random() % 8] << (size > 4 ? 32 : 0) >> (size < 4 ? 32 - 8 * size : 0);
        } else if (kind == TRAINED) { /* larger values change by fewer of their lowest bits */
            by = by >> by % 8 >> (64 - 5 * size + (size > 1 ? context % 8 : 0));
            bits += next_random() % 2 ? by : UINT64_C(0) - by;
        }
        memcpy(to + i * size, &bits, size);
    }
}

enum { ENTRIES = 1000 }; /* entries for counters that are not 0 */

/* A block on the device and on the host, with everything made from it. */
typedef struct block {
    ckd_dtype dtype;
    size_t n, size;
    array now, before, integers, contexts, symbols, counts, entries, entered;
    bool with_contexts;
    uint64_t centre;
    uint8_t *stream; /* the codec's stream */
    size_t stream_size;
    uint32_t *counted;
} block;

UNUSED static int64_t signed_integer(const uint8_t *at, size_t size) {
    uint64_t v = 0;
    memcpy(&v, at, size);
    return (int64_t)(v << (64 - 8 * size)) >> (64 - 8 * size);
}

/* Integers and contexts are computed on the device and on the host (integers.host, contexts.host). */
UNUSED static block block_new(ckd_dtype dtype, size_t n, int kind, bool with_contexts, size_t shift) {
    block b = {.dtype = dtype, .n = n, .size = ckd_dtype_size(dtype), .with_contexts = with_contexts};
    b.now = array_new(n, b.size, shift);
    b.before = array_new(n, b.size, shift);
    b.integers = array_new(n, b.size, shift);
    b.contexts = array_new(n, 1, shift);
    b.symbols = array_new(n, 1, shift);
    b.counts = array_new(DEVICE_SYMBOLS * (size_t)DEVICE_SYMBOLS, sizeof(uint32_t), 0);
    b.entries = array_new(ENTRIES, sizeof(uint32_t), 0);
    b.entered = array_new(1, sizeof(uint64_t), 0);
    array_give(&b.entered);
    b.counted = calloc(DEVICE_SYMBOLS * (size_t)DEVICE_SYMBOLS, sizeof(uint32_t));
    fill_before(b.before.host, dtype, n, kind);
    fill_now(b.now.host, b.before.host, dtype, n, kind);
    array_give(&b.now);
    array_give(&b.before);
    array_give(&b.counts);
    if (n) {
        elements(DEVICE_RESIDUAL, dtype, b.integers.device, b.now.device, b.before.device, n);
        elements(DEVICE_CONTEXT, dtype, b.contexts.device, b.before.device, NULL, n);
    }
    cpu->ordered_residual(dtype, b.integers.host, b.now.host, b.before.host, n);
    cpu->magnitude_context(dtype, b.contexts.host, b.before.host, n);
    int64_t samples[SYMBOLS_PARTS_SAMPLE] = {0};
    for (size_t i = 0; i < symbols_sample_count(n); i++) {
        samples[i] = signed_integer(b.integers.host + i * n / symbols_sample_count(n) * b.size, b.size);
    }
    b.centre = n ? symbols_centre(samples, symbols_sample_count(n), (unsigned)b.size) : 0;
    return b;
}

UNUSED static const uint8_t *host_contexts(const block *b) {
    return b->with_contexts ? b->contexts.host : NULL;
}

UNUSED static void block_encode_on_host(block *b) {
    symbols_plan(work, 0, SYMBOLS_CLASS,
                 &(symbols_input){(unsigned)b->size, b->n, b->integers.host, host_contexts(b)}, NULL);
    size_t bound = symbols_bound(work, 0);
    b->stream = malloc(bound + 1);
    assert_non_null(b->stream);
    b->stream_size = symbols_encode(work, 0, b->integers.host, host_contexts(b), b->stream, bound);
}

UNUSED static void block_free(block *b) {
    array *arrays[] = {&b->now,     &b->before, &b->integers, &b->contexts,
                       &b->symbols, &b->counts, &b->entries,  &b->entered};
    for (size_t i = 0; i < sizeof(arrays) / sizeof(arrays[0]); i++) {
        array_free(arrays[i]);
    }
    free(b->stream);
    free(b->counted);
}

static const ckd_dtype dtypes[] = {CKD_F32, CKD_BF16, CKD_F16, CKD_F64, CKD_F8_E4M3,
                                   CKD_I8,  CKD_I16,  CKD_I32, CKD_I64, CKD_U8};
#define DTYPES (sizeof(dtypes) / sizeof(dtypes[0]))

#endif
