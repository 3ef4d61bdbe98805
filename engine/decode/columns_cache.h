/*
 * Caches the decoded side records of lossy matrices. Every link of a chain has its own columns, and the next block of
 * the matrix needs them again, on whichever worker. Likewise, neighbouring blocks share the side records of their rows.
 * Internal to engine/; thread-safe.
 */
#ifndef ENGINE_COLUMNS_CACHE_H
#define ENGINE_COLUMNS_CACHE_H

#include <pthread.h>

#include "base/hash.h"
#include "engine/decode/lattice_values.h"

#define KEPT_COLUMNS \
    1088 /* more entries than a pool has workers, each of which may hold one and wait for a second */
#define KEPT_COLUMN_BYTES (UINT64_C(16) << 20) /* the newest and those in use may exceed it */

typedef struct cached_columns {
    hash128 content;
    lattice_columns columns; /* points into the next three */
    bytes step, shift, factor;
    uint64_t used; /* time of last use; 0: empty */
    uint32_t pins; /* current uses; only unpinned entries are evicted */
    bool filling;  /* a worker is decoding it */
} cached_columns;

typedef struct columns_cache {
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    cached_columns all[KEPT_COLUMNS];
    size_t count; /* entries that were ever used */
    uint64_t clock;
} columns_cache;

void columns_cache_init(columns_cache *c);
/*
 * in_child: called in a forked child. Threads that the child does not have seem to wait there, so the locks are left
 * alone.
 */
void columns_cache_free(columns_cache *c, bool in_child);

/*
 * Pins the entry with this content, until columns_release. *must_fill: the entry is new, and the caller must decode
 * into `columns`, put the memory behind it into step, shift and factor, and call columns_filled before anything else.
 * Waits while another worker decodes it, or while all entries are in use. So a caller that holds an entry may wait only
 * for the disk, and for one second entry.
 */
cached_columns *columns_claim(columns_cache *c, bool *must_fill, const hash128 *content);
/* good: false if decoding failed; the entry is then released and removed. */
void columns_filled(columns_cache *c, cached_columns *k, bool good);
void columns_release(columns_cache *c, cached_columns *k);

#endif
