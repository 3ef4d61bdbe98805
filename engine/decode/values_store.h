/*
 * Values of blocks that a load will ask for again: those of which only a part was wanted, be it by the caller or by blocks that were cut in
 * another way, and those that other tensors of the checkpoint are made from. Within a budget, those used longest ago go. A block
 * that one worker is decoding is waited for by the others. Internal to engine/; thread-safe.
 */
#ifndef ENGINE_VALUES_STORE_H
#define ENGINE_VALUES_STORE_H

#include <pthread.h>
#include <stdbool.h>

#include "codec/chunk/record.h"

#define VALUES_STORE_BUCKETS 4096u

typedef struct stored_values {
    const record *record;
    void *values;
    uint64_t size;
    uint32_t pins;                       /* uses at this moment; only what has none may go */
    bool filling;                        /* one worker is decoding it */
    struct stored_values *next;          /* of its bucket */
    struct stored_values *newer, *older; /* by last use */
} stored_values;

typedef struct values_store {
    pthread_mutex_t mutex;
    pthread_cond_t filled;
    uint64_t bytes, limit;
    stored_values *buckets[VALUES_STORE_BUCKETS];
    stored_values *newest, *oldest;
} values_store;

void values_store_init(values_store *s, uint64_t limit);
/* Lowers it, too: then what is not in use goes. */
void values_store_set_limit(values_store *s, uint64_t limit);
void values_store_free(values_store *s);

/*
 * NULL: not here, and no room for it. Else it is pinned until values_store_release; *mine: the caller must fill in its values (`size`
 * bytes) and call values_store_filled before.
 * floor: the least depth of what the caller is filling at this moment, UINT32_MAX if nothing. It waits for a block that another worker
 * is filling only if its depth is less: so waiting cannot go round in a circle, whatever damaged files say of depths.
 */
stored_values *values_store_claim(values_store *s, bool *mine, const record *r, uint64_t size,
                                  uint32_t floor);
/* good: false if there are no values; then it is gone, released, too. */
void values_store_filled(values_store *s, stored_values *v, bool good);
void values_store_release(values_store *s, stored_values *v);

#endif
