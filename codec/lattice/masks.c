/*
 * Packs a block's mostly zero integers as masks, and unpacks them. It is apart from lattice.c because its loops are
 * written for several instruction sets.
 */
#include "codec/lattice/masks.h"

#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "base/bytes.h"
#include "codec/common/common.h"

#define MASKS_AT_ONCE 8

CPU_INLINE size_t count_nonzeros(const int8_t *q, size_t n) {
    size_t count = 0;
    for (size_t at = 0; at < n; at += 128) { /* a byte counter cannot overflow */
        size_t end = n - at < 128 ? n : at + 128;
        uint8_t row_count = 0;
        for (size_t i = at; i < end; i++) {
            row_count = (uint8_t)(row_count + (q[i] != 0));
        }
        count += row_count;
    }
    return count;
}
CPU_AVX2 static size_t count_avx2(const int8_t *q, size_t n) {
    return count_nonzeros(q, n);
}
CPU_PLAIN static size_t count_plain(const int8_t *q, size_t n) {
    return count_nonzeros(q, n);
}
size_t lattice_nonzeros(const int8_t *q, size_t n) {
    return cpu_has_avx2() ? count_avx2(q, n) : count_plain(q, n);
}

/* Returns one bit per byte that is not zero, in the order of the bytes. */
static unsigned mask_of(uint64_t eight) {
    const uint64_t low = UINT64_C(0x7f7f7f7f7f7f7f7f);
    uint64_t set = (((eight & low) + low) | eight) & ~low;
    return (unsigned)((set >> 7) * UINT64_C(0x0102040810204080) >> 56);
}

/* Handles whole groups of eight and the remainder. */
static size_t masks_plain(uint8_t *masks, int8_t *others, const int8_t *q, size_t n) {
    size_t count = 0;
    for (size_t i = 0; i < n; i += MASK_OF) {
        uint8_t all[MASK_OF] = {0};
        memcpy(all, q + i, n - i < MASK_OF ? n - i : MASK_OF);
        uint64_t eight = load_le64(all);
        masks[i / MASK_OF] = (uint8_t)mask_of(eight);
        /* No branch per integer: which ones are zero is unpredictable. */
        for (unsigned j = 0; eight && j < MASK_OF; j++) {
            others[count] = (int8_t)all[j];
            count += all[j] != 0;
        }
    }
    return count;
}

CPU_INLINE size_t count_bits(const uint8_t *masks, size_t groups) {
    size_t count = 0, g = 0;
    for (; g + 8 <= groups; g += 8) {
        uint64_t eight;
        memcpy(&eight, masks + g, sizeof(eight));
        count += (unsigned)__builtin_popcountll(eight);
    }
    for (; g < groups; g++) {
        count += (unsigned)__builtin_popcount(masks[g]);
    }
    return count;
}
CPU_POPCOUNT static size_t bits_popcount(const uint8_t *masks, size_t groups) {
    return count_bits(masks, groups);
}
static size_t bits_plain(const uint8_t *masks, size_t groups) {
    return count_bits(masks, groups);
}
size_t lattice_masks_bits(const uint8_t *masks, size_t groups) {
    return cpu_has_popcount() ? bits_popcount(masks, groups) : bits_plain(masks, groups);
}

/* For each mask, the index of each of its eight integers among the others; 0x80: the integer is zero. */
#define PLACE(m, j) ((m) >> (j)&1u ? __builtin_popcount((m) & ((1u << (j)) - 1u)) : 0x80)
#define ROW(m) \
    { PLACE(m, 0), PLACE(m, 1), PLACE(m, 2), PLACE(m, 3), PLACE(m, 4), PLACE(m, 5), PLACE(m, 6), PLACE(m, 7) }
#define ROWS_4(m)  ROW(m), ROW((m) + 1u), ROW((m) + 2u), ROW((m) + 3u)
#define ROWS_16(m) ROWS_4(m), ROWS_4((m) + 4u), ROWS_4((m) + 8u), ROWS_4((m) + 12u)
#define ROWS_64(m) ROWS_16(m), ROWS_16((m) + 16u), ROWS_16((m) + 32u), ROWS_16((m) + 48u)
static const uint8_t places[256][MASK_OF] = {ROWS_64(0u), ROWS_64(64u), ROWS_64(128u), ROWS_64(192u)};

/* For each mask, the indices of its nonzero integers among the eight. Later entries do not matter. */
#define SET_BELOW(m, j) __builtin_popcount((m) & ((1u << (j)) - 1u))
#define IS_SET(m, j, k) ((m) >> (j)&1u && SET_BELOW(m, j) == (k) ? (j) : 0u)
#define NTH(m, k)                                                                              \
    (IS_SET(m, 0, k) | IS_SET(m, 1, k) | IS_SET(m, 2, k) | IS_SET(m, 3, k) | IS_SET(m, 4, k) | \
     IS_SET(m, 5, k) | IS_SET(m, 6, k) | IS_SET(m, 7, k))
#undef ROW
#define ROW(m) \
    { NTH(m, 0), NTH(m, 1), NTH(m, 2), NTH(m, 3), NTH(m, 4), NTH(m, 5), NTH(m, 6), NTH(m, 7) }
#if defined(__x86_64__)
static const uint8_t origins[256][MASK_OF] = {ROWS_64(0u), ROWS_64(64u), ROWS_64(128u), ROWS_64(192u)};

__attribute__((target("avx2,popcnt"))) static size_t masks_avx2(uint8_t *masks, int8_t *others,
                                                                const int8_t *q, size_t n) {
    size_t count = 0, i = 0;
    for (; i + 4 * MASK_OF <= n; i += 4 * MASK_OF) {
        __m256i all = _mm256_loadu_si256((const __m256i *)(const void *)(q + i));
        uint32_t set = ~(uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(all, _mm256_setzero_si256()));
        store_le32(masks + i / MASK_OF, set);
        for (size_t j = i; set; set >>= MASK_OF, j += MASK_OF) {
            __m128i from = _mm_loadl_epi64((const __m128i *)(const void *)(q + j));
            __m128i which = _mm_loadl_epi64((const __m128i *)(const void *)origins[set & 255u]);
            _mm_storel_epi64((__m128i *)(void *)(others + count), _mm_shuffle_epi8(from, which));
            count += (unsigned)__builtin_popcount(set & 255u);
        }
    }
    return count + masks_plain(masks + i / MASK_OF, others + count, q + i, n - i);
}
#else
#define masks_avx2 masks_plain
#endif

size_t lattice_to_masks(uint8_t *masks, int8_t *others, const int8_t *q, size_t n) {
    return (cpu_has_avx2() && cpu_has_popcount() ? masks_avx2 : masks_plain)(masks, others, q, n);
}

static void spread_plainly(int8_t *q, const int8_t *others, unsigned mask) {
    const uint8_t *place = places[mask];
    for (unsigned j = 0; j < MASK_OF; j++) {
        q[j] = place[j] & 0x80u ? 0 : others[place[j]];
    }
}

/* Expands all whole groups of eight. Returns the start of the remaining others. */
typedef const int8_t *(*spread_loop)(int8_t *q, const uint8_t *masks, const int8_t *others, size_t groups);

static const int8_t *spread_plain(int8_t *q, const uint8_t *masks, const int8_t *others, size_t groups) {
    for (size_t g = 0; g < groups; g++) {
        spread_plainly(q + g * MASK_OF, others, masks[g]);
        others += __builtin_popcount(masks[g]);
    }
    return others;
}

#if defined(__x86_64__)
__attribute__((target("avx2,popcnt"))) static const int8_t *spread_avx2(int8_t *q, const uint8_t *masks,
                                                                        const int8_t *others, size_t groups) {
    for (size_t g = 0; g < groups;) {
        uint64_t next = 1;
        if (g + MASKS_AT_ONCE <= groups) {
            memcpy(&next, masks + g, sizeof(next));
        }
        if (next == 0) { /* runs of zero masks are common */
            memset(q + g * MASK_OF, 0, MASKS_AT_ONCE * MASK_OF);
            g += MASKS_AT_ONCE;
            continue;
        }
        size_t end = g + MASKS_AT_ONCE < groups ? g + MASKS_AT_ONCE : groups;
        for (; g < end; g++) {
            __m128i from = _mm_loadl_epi64((const __m128i *)(const void *)others);
            __m128i where = _mm_loadl_epi64((const __m128i *)(const void *)places[masks[g]]);
            _mm_storel_epi64((__m128i *)(void *)(q + g * MASK_OF), _mm_shuffle_epi8(from, where));
            others += __builtin_popcount(masks[g]);
        }
    }
    return others;
}
#else
#define spread_avx2 spread_plain
#endif

bool lattice_masks_valid(const uint8_t *masks, const int8_t *others, size_t count, size_t n) {
    return !memchr(others, 0, count) && !(n % MASK_OF && masks[n / MASK_OF] >> n % MASK_OF);
}

void lattice_from_masks(int8_t *q, const uint8_t *masks, const int8_t *others, size_t n) {
    size_t groups = n / MASK_OF, left = n % MASK_OF;
    spread_loop spread = cpu_has_avx2() && cpu_has_popcount() ? spread_avx2 : spread_plain;
    others = spread(q, masks, others, groups);
    if (left) {
        int8_t last[MASK_OF];
        spread_plainly(last, others, masks[groups]);
        memcpy(q + groups * MASK_OF, last, left);
    }
}
