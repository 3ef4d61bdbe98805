/* hash64 for processors with AVX2. Internal to base/hash.c. */
#ifndef BASE_HASH_AVX2_H
#define BASE_HASH_AVX2_H

#include <stddef.h>
#include <stdint.h>

#if defined(__x86_64__)
/* The caller checks that the processor has AVX2. */
uint64_t hash64_avx2(const void *data, size_t size);
#endif

#endif
