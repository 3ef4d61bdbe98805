/*
 * Replaces codec/common/wire_matches.c in fuzz drivers and their replays: every checksum and content hash
 * matches, so that inputs reach the code that runs after the checks.
 */
#include "codec/common/common.h"

bool wire_hash_matches(uint64_t stored, uint64_t computed) {
    (void)stored;
    (void)computed;
    return true;
}

bool wire_content_matches(const hash128 *stored, const hash128 *computed) {
    (void)stored;
    (void)computed;
    return true;
}
