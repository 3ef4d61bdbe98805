/*
 * Loops compiled twice, for any processor and for x86-64 with AVX2 and BMI2; the choice is made at run time. Write the
 * loop once as an always-inline function and call it from two functions marked CPU_PLAIN and CPU_AVX2. Internal to
 * codec/.
 */
#ifndef CODEC_CPU_H
#define CODEC_CPU_H

#include <stdbool.h>

#define CPU_INLINE static inline __attribute__((always_inline, unused))

/* GCC vectorises these loops at any build level; clang does so from -O2 on. */
#if defined(__GNUC__) && !defined(__clang__)
#define CPU_PLAIN __attribute__((optimize("O3")))
#else
#define CPU_PLAIN
#endif

#if defined(__x86_64__)
#define CPU_AVX2 CPU_PLAIN __attribute__((target("avx2,bmi,bmi2")))
static inline bool cpu_has_avx2(void) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
}
/* The oldest x86-64 processors have no instruction that counts bits. */
#define CPU_POPCOUNT __attribute__((target("bmi,popcnt")))
static inline bool cpu_has_popcount(void) {
    return __builtin_cpu_supports("bmi") && __builtin_cpu_supports("popcnt");
}
#else
#define CPU_POPCOUNT
static inline bool cpu_has_popcount(void) {
    return true;
}
#define CPU_AVX2 CPU_PLAIN
static inline bool cpu_has_avx2(void) {
    return false;
}
#endif

#endif
