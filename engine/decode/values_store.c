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

static void drop(values_store *s, stored_values *v) {
    stored_values **at = bucket_of(s, v->record);
    while (*at != v) {
        at = &(*at)->next;
    }
    *at = v->next;
    unlink_use(s, v);
    s->bytes -= v->size;
    free(v->values);
    free(v);
}

void values_store_free(values_store *s) {
    while (s->newest) {
        drop(s, s->newest);
    }
    pthread_cond_destroy(&s->filled);
    pthread_mutex_destroy(&s->mutex);
    memset(s, 0, sizeof(*s));
}

static bool evict_until_fits(values_store *s, uint64_t size) {
    for (stored_values *v = s->oldest, *newer; v && size <= s->limit && s->bytes > s->limit - size;
         v = newer) {
        newer = v->newer;
        if (v->pins == 0) {
            drop(s, v);
        }
    }
    return size <= s->limit && s->bytes <= s->limit - size;
}

void values_store_set_limit(values_store *s, uint64_t limit) {
    pthread_mutex_lock(&s->mutex);
    s->limit = limit;
    evict_until_fits(s, 0);
    pthread_mutex_unlock(&s->mutex);
}

static stored_values *add(values_store *s, const record *r, uint64_t size) {
    if (!evict_until_fits(s, size)) {
        return NULL;
    }
    stored_values *v = calloc(1, sizeof(*v));
    void *values = malloc(size + 1);
    if (!v || !values) {
        free(v);
        free(values);
        return NULL;
    }
    *v = (stored_values){.record = r, .values = values, .size = size, .pins = 1, .filling = true};
    v->next = *bucket_of(s, r);
    *bucket_of(s, r) = v;
    make_newest(s, v);
    s->bytes += size;
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

stored_values *values_store_claim(values_store *s, bool *must_fill, const record *r, uint64_t size,
                                  const record *floor) {
    *must_fill = false;
    pthread_mutex_lock(&s->mutex);
    stored_values *v = find(s, r);
    while (v && v->filling && (!floor || values_store_before(r, floor))) {
        pthread_cond_wait(&s->filled, &s->mutex);
        v = find(s, r);
    }
    if (!v) {
        v = add(s, r, size);
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
    pthread_mutex_unlock(&s->mutex);
}
