/* A set of 64-bit hashes. Internal to engine/. */
#ifndef ENGINE_HASH_SET_H
#define ENGINE_HASH_SET_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"

/* Open addressing; 0 is a free slot. Zero-initialise; free the slots. */
typedef struct hash_set {
    uint64_t *slots;
    size_t count, capacity;
} hash_set;

bool hash_set_has(const hash_set *s, uint64_t hash);
ckd_status hash_set_add(hash_set *s, uint64_t hash, ckd_error *err);

#endif
