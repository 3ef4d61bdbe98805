#include <stdlib.h>

#include "engine/save/save.h"
#include "engine/session/session.h"

#define PLACE_ALIGN 64
#define NOWHERE     UINT64_MAX

/* Lossy moments are always coded without a parent, and values on devices stay there. */
static bool is_cached(const ckd_session *s, const session_item *item) {
    const ckd_tensor *t = &item->tensor;
    ckd_role role = t->role == CKD_ROLE_AUTO ? ckd_role_of(t->name, t->dtype) : t->role;
    return !item->is_bytes && !item->on_device && save_builds_on_parent(&s->save, role, t->dtype);
}

static uint64_t taken_by(const session_item *item) {
    return (item->bytes + PLACE_ALIGN - 1) & ~(uint64_t)(PLACE_ALIGN - 1);
}

uint64_t cached_values_size(const ckd_session *s) {
    uint64_t need = 0;
    for (size_t i = 0; i < s->item_count; i++) {
        need += is_cached(s, &s->items[i]) ? taken_by(&s->items[i]) : 0;
    }
    return need;
}

ckd_status cached_values_make(ckd_session *s, ckd_error *err) {
    cached_values *k = &s->saver.cached;
    uint64_t need = cached_values_size(s), at = 0;
    k->places = calloc(s->item_count + 1, sizeof(*k->places));
    k->memory = k->places ? snapshot_memory(&k->size, need) : NULL;
    if (!k->memory) {
        free(k->places);
        k->places = NULL;
        return err_nomem(err, need, "what the next save is coded against");
    }
    for (size_t i = 0; i < s->item_count; i++) {
        bool kept = is_cached(s, &s->items[i]);
        k->places[i] = kept ? at : NOWHERE;
        at += kept ? taken_by(&s->items[i]) : 0;
    }
    pthread_mutex_lock(&s->shared.mutex);
    s->shared.state.snapshot_bytes += need;
    s->shared.state.kept_bytes = need;
    pthread_mutex_unlock(&s->shared.mutex);
    return CKD_OK;
}

void cached_values_free(ckd_session *s, bool in_child) {
    cached_values *k = &s->saver.cached;
    if (!in_child) {
        snapshot_memory_free(k->memory, k->size);
    }
    free(k->places);
    *k = (cached_values){.memory = NULL};
}

void *cached_values_of(const ckd_session *s, size_t i) {
    const cached_values *k = &s->saver.cached;
    return k->memory && k->places[i] != NOWHERE ? k->memory + k->places[i] : NULL;
}
