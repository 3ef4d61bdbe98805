/* Counts symbols by context. */
#include "codec/entropy/symbols_work.h"

#include <string.h>

#include "base/bytes.h"
#include "codec/common/common.h"

static uint32_t *counts_at(symbols_histogram *h, unsigned half, unsigned context) {
    return h->count[half] + (size_t)context * SYMBOLS_ALPHABET;
}

static void clear(symbols_histogram *h) {
    for (unsigned half = 0; half < 2; half++) {
        memset(counts_at(h, half, h->first_context), 0,
               (h->last_context - h->first_context + 1) * SYMBOLS_ALPHABET * sizeof(uint32_t));
    }
}

CPU_INLINE void find_range(symbols_histogram *h, const uint8_t *context, size_t n) {
    uint8_t first = 255, last = 0;
    for (size_t i = 0; i < n; i++) {
        first = context[i] < first ? context[i] : first;
        last = context[i] > last ? context[i] : last;
    }
    h->first_context = first;
    h->last_context = last;
}

CPU_AVX2 static void find_range_avx2(symbols_histogram *h, const uint8_t *context, size_t n) {
    find_range(h, context, n);
}
CPU_PLAIN static void find_range_plain(symbols_histogram *h, const uint8_t *context, size_t n) {
    find_range(h, context, n);
}

/* Without contexts, all increments hit few counters. Four sets of counters keep neighbours independent. */
static void count_plainly(uint32_t *to, const uint8_t *symbols, size_t n) {
    uint32_t sets[4][SYMBOLS_ALPHABET] = {{0}};
    size_t i = 0;
    for (; i + 4 <= n; i += 4) {
        uint32_t four = load_le32(symbols + i);
        sets[0][four & 255]++;
        sets[1][four >> 8 & 255]++;
        sets[2][four >> 16 & 255]++;
        sets[3][four >> 24]++;
    }
    for (; i < n; i++) {
        sets[0][symbols[i]]++;
    }
    for (unsigned s = 0; s < SYMBOLS_ALPHABET; s++) {
        to[s] += sets[0][s] + sets[1][s] + sets[2][s] + sets[3][s];
    }
}

static void count_by_context(uint32_t *restrict even, uint32_t *restrict odd, const uint8_t *restrict symbols,
                             const uint8_t *restrict context, size_t n) {
    size_t i = 0;
    for (; i + 4 <= n; i += 4) {
        even[(size_t)context[i] << 8 | symbols[i]]++;
        odd[(size_t)context[i + 1] << 8 | symbols[i + 1]]++;
        even[(size_t)context[i + 2] << 8 | symbols[i + 2]]++;
        odd[(size_t)context[i + 3] << 8 | symbols[i + 3]]++;
    }
    for (; i < n; i++) {
        even[(size_t)context[i] << 8 | symbols[i]]++;
    }
}

void symbols_set_counts(symbols_histogram *h, const uint32_t *counts, unsigned first, unsigned last) {
    clear(h);
    h->first_context = first;
    h->last_context = last;
    memcpy(counts_at(h, 0, first), counts, (last - first + 1) * SYMBOLS_ALPHABET * sizeof(uint32_t));
}

void symbols_count(symbols_histogram *h, const uint8_t *symbols, const uint8_t *context, size_t n) {
    clear(h);
    if (context) {
        (cpu_has_avx2() ? find_range_avx2 : find_range_plain)(h, context, n);
        count_by_context(h->count[0], h->count[1], symbols, context, n);
    } else {
        h->first_context = h->last_context = 0;
        count_plainly(h->count[0], symbols, n);
    }
}

CPU_PLAIN uint32_t symbols_counts_of(uint32_t *to, const symbols_histogram *h, unsigned context) {
    const uint32_t *even = h->count[0] + (size_t)context * SYMBOLS_ALPHABET;
    const uint32_t *odd = h->count[1] + (size_t)context * SYMBOLS_ALPHABET;
    uint32_t total = 0;
    for (unsigned s = 0; s < SYMBOLS_ALPHABET; s++) {
        uint32_t c = even[s] + odd[s];
        to[s] += c;
        total += c;
    }
    return total;
}
