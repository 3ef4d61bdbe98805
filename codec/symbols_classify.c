/* From integers to symbols, vectorised. */
#include "codec/symbols_work.h"

#include <string.h>

#include "codec/cpu.h"

#define LOAD(type, name, from, i) \
    type name;                    \
    memcpy(&name, (const uint8_t *)(from) + (i) * sizeof(type), sizeof(type))

/*
 * The bit length of a magnitude below 2^32 from a float's exponent, which vectorises where counting zeros does not.
 * Without the bit below the leading one, rounding cannot reach the next power of two, in no rounding mode.
 */
CPU_INLINE uint32_t length_by_float(uint32_t magnitude) {
    uint32_t top = magnitude & ~(magnitude >> 1);
    float as_float = (float)(int32_t)(top & UINT32_C(0x7fffffff));
    uint32_t bits;
    memcpy(&bits, &as_float, 4);
    uint32_t length = bits >> 23;
    length = length ? length - 126 : 0;
    return magnitude >> 31 ? 32 : length;
}

CPU_INLINE uint8_t class_32(uint32_t u) {
    uint32_t sign = UINT32_C(0) - (u >> 31);
    return (uint8_t)(2 * length_by_float((u ^ sign) - sign) - sign);
}

CPU_INLINE void classify(uint8_t *symbols, unsigned width, const void *values, uint64_t centre, size_t n) {
    if (width == 1) {
        for (size_t i = 0; i < n; i++) {
            LOAD(uint8_t, v, values, i);
            symbols[i] = class_32((uint32_t)(int8_t)(v - (uint8_t)centre));
        }
    } else if (width == 2) {
        for (size_t i = 0; i < n; i++) {
            LOAD(uint16_t, v, values, i);
            symbols[i] = class_32((uint32_t)(int16_t)(v - (uint16_t)centre));
        }
    } else if (width == 4) {
        for (size_t i = 0; i < n; i++) {
            LOAD(uint32_t, v, values, i);
            symbols[i] = class_32(v - (uint32_t)centre);
        }
    } else {
        for (size_t i = 0; i < n; i++) {
            LOAD(uint64_t, v, values, i);
            symbols[i] = (uint8_t)symbols_class_of((int64_t)(v - centre));
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

/* ---- for each instruction set ---- */

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
