/* XXH3 is inlined: small pages are hashed often, and a call into the library would cost time. */
#define XXH_INLINE_ALL
#include <xxhash.h>

#include "base/bytes.h"
#include "base/hash.h"
#include "base/hash_avx2.h"

#define PAGES_AT_ONCE 256

static hash128 canonical(XXH128_hash_t h) {
    XXH128_canonical_t c;
    hash128 out;
    XXH128_canonicalFromHash(&c, h);
    memcpy(out.bytes, c.digest, sizeof(out.bytes));
    return out;
}

typedef uint64_t (*hash_fn)(const void *data, size_t size);

static uint64_t hash64_plain(const void *data, size_t size) {
    return XXH3_64bits(data, size);
}

static hash_fn fastest(void) {
#if defined(__x86_64__)
    return __builtin_cpu_supports("avx2") ? hash64_avx2 : hash64_plain;
#else
    return hash64_plain;
#endif
}

uint64_t hash64(const void *data, size_t size) {
    return size < CONTENT_PAGE ? hash64_plain(data, size) : fastest()(data, size);
}

hash128 hash128_of(const void *data, size_t size) {
    return canonical(XXH3_128bits(data, size));
}

bool hash128_equal(const hash128 *a, const hash128 *b) {
    return memcmp(a->bytes, b->bytes, sizeof(a->bytes)) == 0;
}

hash128 content_hash(const void *data, size_t size) {
    const uint8_t *at = data;
    uint8_t pages[PAGES_AT_ONCE * 8];
    size_t count = 0;
    hash_fn page_hash = fastest();
    XXH3_state_t state;
    XXH3_128bits_reset(&state);
    while (size > 0) {
        size_t page = size < CONTENT_PAGE ? size : CONTENT_PAGE;
        store_le64(pages + 8 * count++, page_hash(at, page));
        at += page;
        size -= page;
        if (count == PAGES_AT_ONCE || size == 0) {
            XXH3_128bits_update(&state, pages, 8 * count);
            count = 0;
        }
    }
    return canonical(XXH3_128bits_digest(&state));
}
