/*
 * Keeps the decoded side records of lossy matrices, which many blocks share. One worker decodes a record; the others
 * wait for it.
 */
#include "engine/decode/internal.h"

#include <string.h>

void columns_cache_init(columns_cache *c) {
    memset(c, 0, sizeof(*c));
    pthread_mutex_init(&c->mutex, NULL);
    pthread_cond_init(&c->changed, NULL);
}

static void drop(cached_columns *k) {
    bytes_free(&k->step);
    bytes_free(&k->shift);
    bytes_free(&k->factor);
    *k = (cached_columns){0};
}

void columns_cache_free(columns_cache *c, bool in_child) {
    for (size_t i = 0; i < c->count; i++) {
        drop(&c->all[i]);
    }
    if (!in_child) {
        pthread_cond_destroy(&c->changed);
        pthread_mutex_destroy(&c->mutex);
    }
}

static cached_columns *find(columns_cache *c, const hash128 *content) {
    for (size_t i = 0; i < c->count; i++) {
        if (c->all[i].used && hash128_equal(&c->all[i].content, content)) {
            return &c->all[i];
        }
    }
    return NULL;
}

/* Finds an empty entry, evicting the least recently used ones if needed. NULL: none can be evicted. */
static cached_columns *find_place(columns_cache *c) {
    for (;;) {
        cached_columns *empty = NULL, *oldest = NULL;
        uint64_t total = 0;
        for (size_t i = 0; i < c->count; i++) {
            cached_columns *k = &c->all[i];
            if (!k->used) {
                empty = k;
                continue;
            }
            total += k->filling ? 0 : 4 * k->columns.columns * (k->columns.rank + UINT64_C(1));
            oldest = k->pins == 0 && (!oldest || k->used < oldest->used) ? k : oldest;
        }
        bool has_free = empty || c->count < CACHED_COLUMNS;
        if (!oldest || (has_free && total <= CACHED_COLUMN_BYTES)) {
            return empty || !has_free ? empty : &c->all[c->count++];
        }
        drop(oldest);
    }
}

cached_columns *columns_claim(columns_cache *c, bool *must_fill, const hash128 *content) {
    *must_fill = false;
    pthread_mutex_lock(&c->mutex);
    cached_columns *k;
    for (;;) {
        k = find(c, content);
        if (k && !k->filling) {
            break;
        }
        *must_fill = !k && (k = find_place(c)) != NULL;
        if (*must_fill) {
            k->content = *content;
            k->filling = true;
            break;
        }
        pthread_cond_wait(&c->changed, &c->mutex);
    }
    k->used = ++c->clock;
    k->pins++;
    pthread_mutex_unlock(&c->mutex);
    return k;
}

void columns_filled(columns_cache *c, cached_columns *k, bool good) {
    pthread_mutex_lock(&c->mutex);
    k->filling = false;
    if (!good) {
        drop(k);
    }
    pthread_cond_broadcast(&c->changed);
    pthread_mutex_unlock(&c->mutex);
}

void columns_release(columns_cache *c, cached_columns *k) {
    pthread_mutex_lock(&c->mutex);
    k->pins--;
    pthread_cond_broadcast(&c->changed);
    pthread_mutex_unlock(&c->mutex);
}
