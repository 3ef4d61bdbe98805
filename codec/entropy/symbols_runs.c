/*
 * Run streams, for data with few nonzero integers. Each is stored with the number of zeros before it, by adaptive
 * arithmetic coding. This needs no tables, so blocks of a few hundred nonzero integers stay near their entropy, and
 * zeros take no time.
 */
#include <string.h>

#include "codec/entropy/adaptive_size.h"
#include "codec/entropy/symbols_work.h"

#define PLAIN_MAX  15 /* lowest bits of a gap that are not modelled */
#define GAP_MORE   205
#define GAP_SURE   30
#define VALUE_MORE 48
#define VALUE_SURE 4
#define SIGN_SURE  30

static const adaptive_pace pace = {64, 1024};

typedef struct run_coder {
    adaptive_coder coder;
    unsigned plain;
    adaptive_bit negative;
    adaptive_size_models gap, value;
} run_coder;

static void begin(run_coder *r) {
    r->negative = adaptive_bit_of(128, SIGN_SURE);
    adaptive_size_begin(&r->gap, GAP_MORE, GAP_SURE);
    adaptive_size_begin(&r->value, VALUE_MORE, VALUE_SURE);
}

CPU_INLINE uint64_t code_gap(run_coder *r, bool decoding, uint64_t gap) {
    return adaptive_code_size(&r->coder, decoding, &r->gap, pace, r->plain, gap);
}

/* Codes a nonzero integer as its sign, then its magnitude less one. */
CPU_INLINE uint64_t code_value(run_coder *r, bool decoding, unsigned *negative, uint64_t size) {
    *negative = adaptive_code_bit(&r->coder, decoding, &r->negative, pace, *negative);
    return adaptive_code_size(&r->coder, decoding, &r->value, pace, 0, size);
}

/* ---- writing ---- */

static int64_t signed_at(const uint8_t *values, unsigned width, size_t i) {
    unsigned unused = 64 - 8 * width;
    return (int64_t)(symbols_load(values, width, i) << unused) >> unused;
}

/* Returns the index of the first nonzero integer from i on; n if there is none. */
static size_t next_nonzero(const uint8_t *values, unsigned width, size_t i, size_t n) {
    size_t at = i * width, end = n * width;
    while (at + 8 <= end) {
        uint64_t word = load_le64(values + at);
        if (word) {
            return (at + (unsigned)__builtin_ctzll(word) / 8) / width;
        }
        at += 8;
    }
    while (at < end && values[at] == 0) {
        at++;
    }
    return at / width;
}

/* Plain bits span about a quarter of the mean gap: gaps with equal upper bits are then about equally probable. */
static unsigned plain_bits(size_t n, size_t nonzeros) {
    uint64_t mean = (n - nonzeros) / (nonzeros + 1);
    unsigned plain = 0;
    while (plain < PLAIN_MAX && mean >= UINT64_C(19) << plain >> 2) {
        plain++;
    }
    return plain > 0 ? plain - 1 : 0;
}

bool symbols_runs_encode(bytes *to, unsigned width, const void *values, size_t n, size_t nonzeros,
                         size_t limit) {
    run_coder r = {.plain = plain_bits(n, nonzeros)};
    if (to->failed) {
        bytes_free(to);
    }
    bytes_clear(to);
    bytes_put_u8(to, SYMBOLS_RUNS);
    begin(&r);
    adaptive_begin_encoding(&r.coder, to);
    adaptive_code_plain(&r.coder, false, 4, r.plain);
    for (size_t place = 0; place < n && to->size <= limit; place++) {
        size_t next = next_nonzero(values, width, place, n);
        code_gap(&r, false, next - place);
        place = next;
        if (place < n) {
            int64_t value = signed_at(values, width, place);
            unsigned negative = value < 0;
            code_value(&r, false, &negative, (negative ? 0 - (uint64_t)value : (uint64_t)value) - 1);
        }
    }
    adaptive_end_encoding(&r.coder);
    return !to->failed && to->size <= limit;
}

/* ---- reading ---- */

CPU_INLINE void store(uint8_t *values, unsigned width, size_t i, uint64_t value) {
    uint8_t wide[8];
    store_le64(wide, value);
    memcpy(values + i * width, wide, width);
}

bool symbols_runs_decode(unsigned width, void *values, size_t n, const uint8_t *from, size_t size) {
    if (size == 0 || from[0] != SYMBOLS_RUNS || width > 4) {
        return false;
    }
    run_coder r;
    uint64_t max = (UINT64_C(1) << (8 * width - 1)) - 1;
    memset(values, 0, n * width);
    begin(&r);
    adaptive_begin_decoding(&r.coder, from + 1, size - 1);
    r.plain = adaptive_code_plain(&r.coder, true, 4, 0);
    for (size_t place = 0; place < n; place++) {
        uint64_t gap = code_gap(&r, true, 0);
        if (gap > n - place || !adaptive_sound(&r.coder)) {
            return false;
        }
        place += gap;
        if (place < n) {
            unsigned negative = 0;
            uint64_t value = code_value(&r, true, &negative, 0);
            if (value >= max + negative) {
                return false;
            }
            store(values, width, place, negative ? ~value : value + 1);
        }
    }
    return adaptive_end_decoding(&r.coder);
}
