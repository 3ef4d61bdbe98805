/*
 * Reads sparse streams, which earlier versions wrote for data with nearly all differences zero. Each nonzero difference
 * follows the number of zeros before it, counted within the same range of contexts. These gaps and differences are the
 * integers of a dense stream.
 */
#include "codec/entropy/symbols_work.h"

#include <string.h>

#include "codec/common/common.h"

CPU_INLINE unsigned count_bits(uint64_t mask) {
    return (unsigned)__builtin_popcountll(mask);
}

static uint8_t first_of(const symbols_sparse *s, unsigned range) {
    return range ? (uint8_t)(s->range_end[range - 1] + 1) : 0;
}

/* ---- from pairs to elements ---- */

static uint64_t load_gap(const uint8_t *from, unsigned width) {
    uint8_t wide[8] = {0};
    memcpy(wide, from, width);
    return load_le64(wide);
}

/* Returns the set bit of `mask` with `rank` others below it. */
CPU_INLINE unsigned select_bit(uint64_t mask, uint64_t rank) {
    for (; rank > 0; rank--) {
        mask &= mask - 1;
    }
    return (unsigned)__builtin_ctzll(mask);
}

/*
 * Stores the differences of one range in their elements. Returns false if a gap leads past the elements of the range.
 */
CPU_INLINE bool scatter(const symbols_sparse *s, unsigned range, const uint8_t *pair,
                        const symbols_output *out) {
    const unsigned width = out->width;
    uint8_t *const values = out->values;
    const uint8_t *const context = out->context;
    const size_t n = out->n;
    uint8_t first = first_of(s, range), last = s->range_end[range];
    uint32_t left = s->count[range];
    uint64_t passed = 0, rank = load_gap(pair, width);
    for (size_t at = 0; at < n; at += 64) {
        uint64_t mask = symbols_in_range(context, at, n, first, last);
        uint64_t end = passed + count_bits(mask);
        while (rank < end) {
            memcpy(values + (at + select_bit(mask, rank - passed)) * width, pair + width, width);
            if (--left == 0) {
                return true;
            }
            pair += 2 * width;
            uint64_t gap = load_gap(pair, width);
            rank += gap < n ? gap + 1 : n;
        }
        passed = end;
    }
    return false;
}

CPU_POPCOUNT static bool scatter_fast(const symbols_sparse *s, unsigned range, const uint8_t *pair,
                                      const symbols_output *out) {
    return scatter(s, range, pair, out);
}
static bool scatter_plain(const symbols_sparse *s, unsigned range, const uint8_t *pair,
                          const symbols_output *out) {
    return scatter(s, range, pair, out);
}

bool symbols_scatter(const symbols_sparse *s, const symbols_output *out) {
    memset(out->values, 0, out->n * out->width);
    const uint8_t *pair = s->integers;
    for (unsigned r = 0; r < s->ranges; r++) {
        if (s->count[r] && !(cpu_has_popcount() ? scatter_fast : scatter_plain)(s, r, pair, out)) {
            return false;
        }
        pair += (size_t)s->count[r] * 2 * out->width;
    }
    return true;
}

/* ---- the header ---- */

static bool read_ranges(symbols_sparse *s, reader *from) {
    s->ranges = 1u + reader_u8(from);
    if (s->ranges > SYMBOLS_MAX_TABLES) {
        return false;
    }
    for (unsigned r = 0; r + 1 < s->ranges; r++) {
        s->range_end[r] = reader_u8(from);
        if (s->range_end[r] == SYMBOLS_CONTEXTS - 1 || (r && s->range_end[r] <= s->range_end[r - 1])) {
            return false;
        }
    }
    s->range_end[s->ranges - 1] = SYMBOLS_CONTEXTS - 1;
    return !from->failed;
}

bool symbols_sparse_read(symbols_sparse *s, const uint8_t *from, size_t size, size_t n, size_t *used) {
    reader r = reader_of(from, size);
    s->pairs = 0;
    if (reader_u8(&r) != SYMBOLS_SPARSE || !read_ranges(s, &r)) {
        return false;
    }
    for (unsigned i = 0; i < s->ranges; i++) {
        s->count[i] = (uint32_t)wire_varint_max(&r, n / SYMBOLS_SPARSE_MAX - s->pairs);
        for (uint32_t k = 0; k < s->count[i]; k++, s->pairs++) {
            s->context[2 * s->pairs] = (uint8_t)i;
            s->context[2 * s->pairs + 1] = (uint8_t)(SYMBOLS_MAX_TABLES + i);
        }
    }
    *used = r.at;
    return !r.failed;
}
