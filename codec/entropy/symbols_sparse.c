/*
 * Sparse streams, for data with nearly all differences zero. Each nonzero difference is stored with the number of zeros
 * before it, counted within the same range of contexts. Gaps and differences are the integers of a dense stream. So
 * time grows with the changes, not with the elements.
 */
#include "codec/entropy/symbols_work.h"

#include <string.h>

#include "codec/common/common.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

/* ---- which elements are in a range of contexts: one bit for each of 64 ---- */

#if defined(__SSE2__)
CPU_INLINE uint64_t in_range_64(const uint8_t *symbols, uint8_t first, uint8_t last) {
    const __m128i low = _mm_set1_epi8((char)first), span = _mm_set1_epi8((char)(last - first));
    uint64_t mask = 0;
    for (unsigned i = 0; i < 4; i++) {
        __m128i x = _mm_sub_epi8(_mm_loadu_si128((const __m128i *)(const void *)(symbols + 16 * i)), low);
        uint64_t bits = (uint32_t)_mm_movemask_epi8(_mm_cmpeq_epi8(_mm_min_epu8(x, span), x));
        mask |= bits << (16 * i);
    }
    return mask;
}
#else
CPU_INLINE uint64_t in_range_64(const uint8_t *each, uint8_t first, uint8_t last) {
    uint64_t mask = 0;
    for (unsigned i = 0; i < 64; i++) {
        mask |= (uint64_t)((uint8_t)(each[i] - first) <= (uint8_t)(last - first)) << i;
    }
    return mask;
}
#endif

/* Covers the elements from `at` on. symbols NULL: all are in range. */
CPU_INLINE uint64_t members(const uint8_t *symbols, size_t at, size_t n, uint8_t first, uint8_t last) {
    size_t left = n - at;
    uint64_t exist = left >= 64 ? UINT64_MAX : (UINT64_C(1) << left) - 1;
    if (!symbols || (first == 0 && last == 255)) {
        return exist;
    }
    if (left >= 64) {
        return in_range_64(symbols + at, first, last);
    }
    uint8_t padded[64] = {0};
    memcpy(padded, symbols + at, left);
    return in_range_64(padded, first, last) & exist;
}

CPU_INLINE unsigned count_bits(uint64_t mask) {
    return (unsigned)__builtin_popcountll(mask);
}

static uint8_t first_of(const symbols_sparse *s, unsigned range) {
    return range ? (uint8_t)(s->range_end[range - 1] + 1) : 0;
}

/* ---- from elements to pairs of gap and difference ---- */

/* Returns the longest gap that a class holds. A longer gap is split by a difference of zero. */
static uint64_t longest_gap(unsigned width) {
    return width >= 4 ? SYMBOLS_MAX_COUNT : (UINT64_C(1) << (8 * width - 2)) - 1;
}

static void put_pair(symbols_sparse *s, unsigned range, unsigned width, uint64_t gap,
                     const uint8_t *difference) {
    uint8_t wide[8];
    store_le64(wide, gap);
    uint8_t *to = s->integers + 2 * s->pairs * width;
    memcpy(to, wide, width);
    memcpy(to + width, difference, width);
    s->context[2 * s->pairs] = (uint8_t)range;
    s->context[2 * s->pairs + 1] = (uint8_t)(SYMBOLS_MAX_TABLES + range);
    s->pairs++;
    s->count[range]++;
}

/* Returns false if there are too many pairs. */
CPU_INLINE bool gather(symbols_sparse *s, unsigned range, const symbols_input *in) {
    static const uint8_t zero[8] = {0};
    const unsigned width = in->width;
    const uint8_t *const values = in->values, *const context = in->context;
    const size_t n = in->n;
    uint8_t first = first_of(s, range), last = s->range_end[range];
    uint64_t passed = 0, next = 0, longest = longest_gap(width); /* counted within the range */
    for (size_t at = 0; at < n; at += 64) {
        uint64_t mask = members(context, at, n, first, last);
        for (uint64_t left = mask & s->changed[at / 64]; left; left &= left - 1) {
            unsigned bit = (unsigned)__builtin_ctzll(left);
            uint64_t rank = passed + count_bits(mask & ((UINT64_C(1) << bit) - 1));
            for (; rank - next > longest; next += longest + 1) {
                if (s->pairs >= n / SYMBOLS_SPARSE_WORTH) {
                    return false;
                }
                put_pair(s, range, width, longest, zero);
            }
            if (s->pairs >= n / SYMBOLS_SPARSE_WORTH) {
                return false;
            }
            put_pair(s, range, width, rank - next, values + (at + bit) * width);
            next = rank + 1;
        }
        passed += count_bits(mask);
    }
    return true;
}

CPU_POPCOUNT static bool gather_fast(symbols_sparse *s, unsigned range, const symbols_input *in) {
    return gather(s, range, in);
}
static bool gather_plain(symbols_sparse *s, unsigned range, const symbols_input *in) {
    return gather(s, range, in);
}

bool symbols_gather(symbols_sparse *s, const symbols_groups *groups, const uint8_t *symbols,
                    const symbols_input *in) {
    s->pairs = 0;
    s->ranges = groups->count;
    memset(s->count, 0, sizeof(s->count));
    for (size_t at = 0; at < in->n; at += 64) {
        s->changed[at / 64] = members(symbols, at, in->n, 1, 255);
    }
    for (unsigned r = 0; r < s->ranges; r++) {
        s->range_end[r] = r + 1 < s->ranges ? groups->end[r] : SYMBOLS_CONTEXTS - 1;
        if (!(cpu_has_popcount() ? gather_fast : gather_plain)(s, r, in)) {
            return false;
        }
    }
    return true;
}

/* ---- from pairs to elements ---- */

CPU_INLINE unsigned select_bit(uint64_t mask, uint64_t rank) {
    for (; rank > 0; rank--) {
        mask &= mask - 1;
    }
    return (unsigned)__builtin_ctzll(mask);
}

static uint64_t load_gap(const uint8_t *from, unsigned width) {
    uint8_t wide[8] = {0};
    memcpy(wide, from, width);
    return load_le64(wide);
}

/* Stores one range's differences in their elements. Returns false if the gaps lead past the range's elements. */
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
        uint64_t mask = members(context, at, n, first, last);
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

size_t symbols_sparse_write(const symbols_sparse *s, uint8_t *to) {
    size_t at = 0;
    to[at++] = SYMBOLS_SPARSE;
    to[at++] = (uint8_t)(s->ranges - 1);
    for (unsigned r = 0; r + 1 < s->ranges; r++) {
        to[at++] = s->range_end[r];
    }
    for (unsigned r = 0; r < s->ranges; r++) {
        at = symbols_put_varint(to, at, s->count[r]);
    }
    return at;
}

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
