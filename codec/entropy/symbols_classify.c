/* Maps integers to symbols, vectorised. */
#include "codec/entropy/symbols_work.h"

#include <string.h>

#include "codec/common/common.h"

#define LOAD(type, name, from, i) \
    type name;                    \
    memcpy(&name, (const uint8_t *)(from) + (i) * sizeof(type), sizeof(type))

/*
 * symbols_class_of for differences of up to 32 bits. It uses the exponent of a float, which vectorises where counting
 * leading zeros does not. The bit eight below the leading one is cleared, so rounding stops there in every rounding
 * mode and the bits above it are exact.
 */
CPU_INLINE uint8_t class_32(uint32_t u, unsigned bits, unsigned fine) {
    int32_t d = (int32_t)(u << (33 - bits)) >> (33 - bits);
    uint32_t sign = (uint32_t)(d >> 31);
    uint32_t magnitude = ((uint32_t)d ^ sign) - sign;
    float as_float = (float)(int32_t)(magnitude & ~(magnitude >> 8));
    uint32_t exponent;
    memcpy(&exponent, &as_float, 4);
    int32_t size = (int32_t)(exponent >> (23 - fine)) - (int32_t)((126 + fine) << fine);
    /* Below 2^fine the size is the magnitude, then the larger of the two. A branch would prevent vectorising. */
    int32_t small = (int32_t)(magnitude < 1u << fine ? magnitude : 1u << fine);
    size = size > small ? size : small;
    uint32_t symbol = 2 * (uint32_t)size - (uint32_t)(size < 1 ? size : 1) - sign;
    uint32_t changed = UINT32_C(0) - ((u ^ (uint32_t)d) >> (bits - 1) & 1);
    return (uint8_t)(symbol ^ changed);
}

CPU_INLINE void classify(uint8_t *symbols, unsigned width, const void *values, uint64_t centre, size_t n) {
    if (width == 1) {
        for (size_t i = 0; i < n; i++) {
            LOAD(uint8_t, v, values, i);
            symbols[i] = class_32((uint8_t)(v - (uint8_t)centre), 8, SYMBOLS_FINE_8);
        }
    } else if (width == 2) {
        for (size_t i = 0; i < n; i++) {
            LOAD(uint16_t, v, values, i);
            symbols[i] = class_32((uint16_t)(v - (uint16_t)centre), 16, SYMBOLS_FINE_16);
        }
    } else if (width == 4) {
        for (size_t i = 0; i < n; i++) {
            LOAD(uint32_t, v, values, i);
            symbols[i] = class_32(v - (uint32_t)centre, 32, SYMBOLS_FINE_32);
        }
    } else {
        for (size_t i = 0; i < n; i++) {
            LOAD(uint64_t, v, values, i);
            symbols[i] = (uint8_t)symbols_class_of(v - centre, 64, SYMBOLS_FINE_64);
        }
    }
}

#define RANGE_OF(type)                              \
    do {                                            \
        type lowest = (type) ~(type)0, highest = 0; \
        for (size_t i = 0; i < n; i++) {            \
            LOAD(type, v, values, i);               \
            lowest = v < lowest ? v : lowest;       \
            highest = v > highest ? v : highest;    \
        }                                           \
        *low = lowest;                              \
        *high = highest;                            \
    } while (0)

CPU_INLINE void range(uint64_t *low, uint64_t *high, unsigned width, const void *values, size_t n) {
    if (width == 1) {
        RANGE_OF(uint8_t);
    } else if (width == 2) {
        RANGE_OF(uint16_t);
    } else if (width == 4) {
        RANGE_OF(uint32_t);
    } else {
        RANGE_OF(uint64_t);
    }
}

#define SPLIT_ALL(type)                                             \
    for (size_t i = 0; i < n; i++) {                                \
        LOAD(type, v, values, i);                                   \
        symbols[i] = (uint8_t)((type)(v >> low_bits) - (type)bias); \
    }

CPU_INLINE void split(uint8_t *symbols, unsigned width, const void *values, unsigned low_bits, uint64_t bias,
                      size_t n) {
    if (width == 1) {
        SPLIT_ALL(uint8_t)
    } else if (width == 2) {
        SPLIT_ALL(uint16_t)
    } else if (width == 4) {
        SPLIT_ALL(uint32_t)
    } else {
        SPLIT_ALL(uint64_t)
    }
}

/* ---- one version per instruction set ---- */

CPU_AVX2 static void classify_avx2(uint8_t *symbols, unsigned width, const void *values, uint64_t centre,
                                   size_t n) {
    classify(symbols, width, values, centre, n);
}
CPU_PLAIN static void classify_plain(uint8_t *symbols, unsigned width, const void *values, uint64_t centre,
                                     size_t n) {
    classify(symbols, width, values, centre, n);
}
CPU_AVX2 static void range_avx2(uint64_t *low, uint64_t *high, unsigned width, const void *values, size_t n) {
    range(low, high, width, values, n);
}
CPU_PLAIN static void range_plain(uint64_t *low, uint64_t *high, unsigned width, const void *values,
                                  size_t n) {
    range(low, high, width, values, n);
}
CPU_AVX2 static void split_avx2(uint8_t *symbols, unsigned width, const void *values, unsigned low_bits,
                                uint64_t bias, size_t n) {
    split(symbols, width, values, low_bits, bias, n);
}
CPU_PLAIN static void split_plain(uint8_t *symbols, unsigned width, const void *values, unsigned low_bits,
                                  uint64_t bias, size_t n) {
    split(symbols, width, values, low_bits, bias, n);
}

void symbols_classify(uint8_t *symbols, unsigned width, const void *values, uint64_t centre, size_t n) {
    (cpu_has_avx2() ? classify_avx2 : classify_plain)(symbols, width, values, centre, n);
}

void symbols_range(uint64_t *low, uint64_t *high, unsigned width, const void *values, size_t n) {
    (cpu_has_avx2() ? range_avx2 : range_plain)(low, high, width, values, n);
}

void symbols_split(uint8_t *symbols, unsigned width, const void *values, unsigned low_bits, uint64_t bias,
                   size_t n) {
    (cpu_has_avx2() ? split_avx2 : split_plain)(symbols, width, values, low_bits, bias, n);
}
