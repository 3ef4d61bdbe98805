/* In its own file, so that fuzzers can link another version. */
#include "codec/common/common.h"

bool wire_hash_matches(uint64_t stored, uint64_t computed) {
    return stored == computed;
}

bool wire_content_matches(const hash128 *stored, const hash128 *computed) {
    return hash128_equal(stored, computed);
}
