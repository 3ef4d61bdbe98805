/*
 * What the lossy blocks of a matrix share, decoded: each link of a chain has its own, and the next block needs them all again, whichever
 * worker has it; and what those next to each other share of their rows. Internal to engine/; thread-safe.
 */
#ifndef ENGINE_COLUMNS_CACHE_H
#define ENGINE_COLUMNS_CACHE_H

#include <pthread.h>

#include "base/hash.h"
#include "engine/decode/lattice_values.h"

#define KEPT_COLUMNS \
    1088 /* more than a pool has workers, who wait for a second one with one in their hands */
#define KEPT_COLUMN_BYTES (UINT64_C(16) << 20) /* but for the last one, and those in use */

typedef struct cached_columns {
    hash128 content;
    lattice_columns columns; /* lie in these */
    bytes step, shift, factor;
    uint64_t used; /* when; 0: empty */
    uint32_t pins; /* uses at this moment; only what has none may go */
    bool filling;  /* one worker is decoding them */
} cached_columns;

typedef struct columns_cache {
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    cached_columns all[KEPT_COLUMNS];
    size_t count; /* places that were ever used */
    uint64_t clock;
} columns_cache;

void columns_cache_init(columns_cache *c);
/* in_child: of a forked one, in which threads seem to wait that it does not have; its locks are left alone. */
void columns_cache_free(columns_cache *c, bool in_child);

/*
 * Those with this content, until columns_release. *mine: they are not there, and the caller must decode them into columns, take over what they lie in, and call
 * columns_filled before anything else. Waits while others decode them, or all places are in use: whoever holds columns must not wait for
 * anything but the disk, and for a second one.
 */
cached_columns *columns_claim(columns_cache *c, bool *mine, const hash128 *content);
/* good: false if they could not be decoded; then they are gone, released, too. */
void columns_filled(columns_cache *c, cached_columns *k, bool good);
void columns_release(columns_cache *c, cached_columns *k);

#endif
