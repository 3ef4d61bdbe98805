/*
 * The store of values that a load uses more than once: a hash table with a budget, use counts, and eviction of the
 * least recently used.
 */
#include "engine/decode/values_store.h"

#include <stdlib.h>
#include <string.h>

void values_store_init(values_store *s, uint64_t limit) {
    memset(s, 0, sizeof(*s));
    s->limit = limit;
    pthread_mutex_init(&s->mutex, NULL);
    pthread_cond_init(&s->filled, NULL);
}

static stored_values **bucket_of(values_store *s, const record *r) {
    return &s->buckets[((uintptr_t)r * UINT64_C(0x9e3779b97f4a7c15)) >> 52];
}

static stored_values *find(values_store *s, const record *r) {
    stored_values *v = *bucket_of(s, r);
    while (v && v->record != r) {
        v = v->next;
    }
    return v;
}

static void unlink_use(values_store *s, stored_values *v) {
    *(v->newer ? &v->newer->older : &s->newest) = v->older;
    *(v->older ? &v->older->newer : &s->oldest) = v->newer;
}

static void make_newest(values_store *s, stored_values *v) {
    v->newer = NULL;
    v->older = s->newest;
    *(s->newest ? &s->newest->newer : &s->oldest) = v;
    s->newest = v;
}

static void unlink_entry(values_store *s, stored_values *v) {
    stored_values **at = bucket_of(s, v->record);
    while (*at != v) {
        at = &(*at)->next;
    }
    *at = v->next;
    unlink_use(s, v);
}

static void release(values_store *s, stored_values *v) {
    s->bytes -= v->size;
    free(v->values);
    free(v);
}

static void drop(values_store *s, stored_values *v) {
    unlink_entry(s, v);
    release(s, v);
}

static void drop_spare(values_store *s) {
    stored_values *v = s->spare;
    s->spare = v->next;
    release(s, v);
}

void values_store_free(values_store *s) {
    while (s->newest) {
        drop(s, s->newest);
    }
    while (s->spare) {
        drop_spare(s);
    }
    pthread_cond_destroy(&s->filled);
    pthread_mutex_destroy(&s->mutex);
    memset(s, 0, sizeof(*s));
}

static bool fits(const values_store *s, uint64_t size) {
    return size <= s->limit && s->bytes <= s->limit - size;
}

static bool evict_until_fits(values_store *s, uint64_t size) {
    while (s->spare && size <= s->limit && !fits(s, size)) {
        drop_spare(s);
    }
    for (stored_values *v = s->oldest, *newer; v && size <= s->limit && !fits(s, size); v = newer) {
        newer = v->newer;
        if (v->pins == 0) {
            drop(s, v);
        }
    }
    return fits(s, size);
}

void values_store_set_limit(values_store *s, uint64_t limit) {
    pthread_mutex_lock(&s->mutex);
    s->limit = limit;
    evict_until_fits(s, 0);
    pthread_mutex_unlock(&s->mutex);
}

#define SPARE_TRIES 32u
#define SPARE_TIMES 8u /* a spare entry has at most this many times the bytes that are needed */

/* A spare entry that is large enough, or a new one; NULL: there is no space. */
static stored_values *entry_of(values_store *s, uint64_t size) {
    stored_values **at = &s->spare, *v;
    for (unsigned i = 0; i < SPARE_TRIES && (v = *at); i++, at = &v->next) {
        if (v->size >= size && v->size / SPARE_TIMES <= size) {
            *at = v->next;
            return v;
        }
    }
    v = evict_until_fits(s, size) ? calloc(1, sizeof(*v)) : NULL;
    void *values = v ? malloc(size + 1) : NULL;
    if (!values) {
        free(v);
        return NULL;
    }
    *v = (stored_values){.values = values, .size = size};
    s->bytes += size;
    return v;
}

static stored_values *add(values_store *s, const record *r, uint32_t uses) {
    stored_values *v = entry_of(s, r->raw_size);
    if (!v) {
        return NULL;
    }
    v->record = r;
    v->pins = 1;
    v->uses = uses;
    v->filling = true;
    v->next = *bucket_of(s, r);
    *bucket_of(s, r) = v;
    make_newest(s, v);
    return v;
}

bool values_store_before(const record *a, const record *b) {
    bool derived_a = a->predictor == PREDICT_COPY || a->predictor == PREDICT_CAST;
    bool derived_b = b->predictor == PREDICT_COPY || b->predictor == PREDICT_CAST;
    if (a->depth != b->depth) {
        return a->depth < b->depth;
    }
    return derived_a != derived_b ? derived_b : (uintptr_t)a < (uintptr_t)b;
}

stored_values *values_store_claim(values_store *s, bool *must_fill, const record *r, uint32_t uses,
                                  const record *floor) {
    *must_fill = false;
    pthread_mutex_lock(&s->mutex);
    stored_values *v = find(s, r);
    while (v && v->filling && (!floor || values_store_before(r, floor))) {
        pthread_cond_wait(&s->filled, &s->mutex);
        v = find(s, r);
    }
    if (!v) {
        v = add(s, r, uses);
        *must_fill = v != NULL;
    } else if (v->filling) {
        v = NULL;
    } else {
        v->pins++;
        unlink_use(s, v);
        make_newest(s, v);
    }
    pthread_mutex_unlock(&s->mutex);
    return v;
}

void values_store_filled(values_store *s, stored_values *v, bool good) {
    pthread_mutex_lock(&s->mutex);
    v->filling = false;
    if (!good) {
        drop(s, v);
    }
    pthread_cond_broadcast(&s->filled);
    pthread_mutex_unlock(&s->mutex);
}

void values_store_release(values_store *s, stored_values *v) {
    pthread_mutex_lock(&s->mutex);
    v->pins--;
    v->uses -= v->uses != VALUES_USES_UNKNOWN && v->uses > 0;
    if (v->uses == 0 && v->pins == 0) {
        unlink_entry(s, v);
        v->next = s->spare;
        s->spare = v;
    }
    pthread_mutex_unlock(&s->mutex);
}
