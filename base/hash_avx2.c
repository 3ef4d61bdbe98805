/* XXH3 compiled for 32-byte vectors: half as many instructions, the same hashes. */
#include "base/hash_avx2.h"

#if defined(__x86_64__)
#include <immintrin.h> /* xxhash.h includes it only if the whole program may use AVX2 */

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
#else
#pragma GCC target("avx2")
#endif

#define XXH_INLINE_ALL
#define XXH_VECTOR 2 /* XXH_AVX2 */
#include <xxhash.h>

uint64_t hash64_avx2(const void *data, size_t size) {
    return XXH3_64bits(data, size);
}

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
