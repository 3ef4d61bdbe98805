#include "codec/common/planes.h"

#include <string.h>

#include "codec/common/cpu.h"

CPU_INLINE void split(uint8_t *restrict planes, unsigned width, const uint8_t *restrict values, size_t n) {
    for (size_t i = 0; i < n; i++) {
        for (unsigned b = 0; b < width; b++) {
            planes[b * n + i] = values[i * width + b];
        }
    }
}

CPU_INLINE void join(uint8_t *restrict values, unsigned width, const uint8_t *restrict planes, size_t n) {
    for (size_t i = 0; i < n; i++) {
        for (unsigned b = 0; b < width; b++) {
            values[i * width + b] = planes[b * n + i];
        }
    }
}

#define DEFINE(name, target)                                                                            \
    target static void split_##name(uint8_t *planes, unsigned width, const uint8_t *values, size_t n) { \
        if (width == 2) {                                                                               \
            split(planes, 2, values, n);                                                                \
        } else if (width == 4) {                                                                        \
            split(planes, 4, values, n);                                                                \
        } else {                                                                                        \
            split(planes, 8, values, n);                                                                \
        }                                                                                               \
    }                                                                                                   \
    target static void join_##name(uint8_t *values, unsigned width, const uint8_t *planes, size_t n) {  \
        if (width == 2) {                                                                               \
            join(values, 2, planes, n);                                                                 \
        } else if (width == 4) {                                                                        \
            join(values, 4, planes, n);                                                                 \
        } else {                                                                                        \
            join(values, 8, planes, n);                                                                 \
        }                                                                                               \
    }
DEFINE(avx2, CPU_AVX2)
DEFINE(plain, CPU_PLAIN)

void planes_split(uint8_t *planes, unsigned width, const void *values, size_t n) {
    if (width == 1) {
        if (n) {
            memcpy(planes, values, n);
        }
        return;
    }
    (cpu_has_avx2() ? split_avx2 : split_plain)(planes, width, values, n);
}

void planes_join(void *values, unsigned width, const uint8_t *planes, size_t n) {
    if (width == 1) {
        if (n) {
            memcpy(values, planes, n);
        }
        return;
    }
    (cpu_has_avx2() ? join_avx2 : join_plain)(values, width, planes, n);
}
