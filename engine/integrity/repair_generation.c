/*
 * Lists an older generation of a checkpoint again if a file of the newest one is damaged and cannot be rebuilt.
 * Compaction changes no value, and the files that it replaced stay until the newer ones are known to be intact
 * (retain/replaced.c). The older generation is read in full first. Its manifest is published as the next generation.
 */
#include <stdlib.h>

#include "engine/integrity/internal.h"
#include "engine/store/store.h"

/* A listed checkpoint, its generation, and the one that takes its place. */
typedef struct candidate {
    ckd_id id;
    uint32_t newest, older;
} candidate;

typedef struct search {
    ckd_store *store;
    const generation_request *q;
    hash_set intact; /* files that were read here, by hash64 of their ids */
    candidate *found;
    size_t count, capacity;
} search;

static bool is_bad(const search *s, const ckd_id *file) {
    return id_among(file, s->q->bad, s->q->bad_count);
}

static bool names_bad(const search *s, const manifest *m) {
    bool bad = false;
    for (size_t i = 0; i < m->file_count && !bad; i++) {
        bad = is_bad(s, &m->files[i].id);
    }
    return bad;
}

/* Files of newest generations were read before, and may be gone by now. */
static ckd_status check_whole(bool *whole, search *s, const manifest *m, ckd_error *err) {
    ckd_status status = CKD_OK;
    *whole = !m->own_only && !names_bad(s, m);
    for (size_t i = 0; i < m->file_count && *whole && status == CKD_OK; i++) {
        uint64_t hash = hash64(&m->files[i].id, sizeof(ckd_id));
        ckd_error why = {.offset = CKD_NO_OFFSET};
        bool known = live_files_find(s->q->live, &m->files[i].id) || hash_set_has(&s->intact, hash);
        if (known && live_file_exists(s->store, &m->files[i].id, m->files[i].size)) {
            continue;
        }
        ckd_status found = read_named_file(s->store, &m->files[i], &why);
        *whole = found == CKD_OK;
        if (*whole) {
            status = hash_set_add(&s->intact, hash, err);
        } else if (!is_damage(found, &why) && found != CKD_E_NOT_FOUND && found != CKD_E_UNSUPPORTED) {
            status = err_from(err, found, &why);
        }
    }
    return status;
}

/* Takes the newest older generation that is whole. x: the newest of all; its generations end before `end`. */
static ckd_status find_older(search *s, const manifest_entry *x, const manifest_entry *end, ckd_error *err) {
    ckd_status status = CKD_OK;
    bool whole = false;
    for (const manifest_entry *y = x + 1; y < end && y->superseded && !whole && status == CKD_OK; y++) {
        status = check_whole(&whole, s, &y->m, err);
        if (status == CKD_OK && whole) {
            status = ARRAY_GROW(s->found, s->capacity, s->count + 1, "older generations", err);
        }
        if (status == CKD_OK && whole) {
            s->found[s->count++] =
                (candidate){x->m.checkpoint.id, x->m.checkpoint.generation, y->m.checkpoint.generation};
        }
    }
    return status;
}

/* The reader lock keeps the files. A set that was read without the publish lock may be outdated when it is used. */
static ckd_status find_all(search *s, ckd_error *err) {
    manifest_set n = {0};
    ckd_error why = {.offset = CKD_NO_OFFSET};
    ckd_status status = manifest_set_read(&n, s->store, &why);
    if (status != CKD_OK) { /* a damaged manifest is reported elsewhere */
        return is_damage(status, &why) || status == CKD_E_UNSUPPORTED ? CKD_OK : err_from(err, status, &why);
    }
    for (size_t i = 0; i < n.count && status == CKD_OK; i++) {
        const manifest_entry *x = &n.items[i];
        if (!x->superseded && !x->in_trash && x->m.checkpoint.generation < UINT32_MAX &&
            names_bad(s, &x->m)) {
            status = find_older(s, x, n.items + n.count, err);
        }
    }
    manifest_set_free(&n);
    return status;
}

/* Sets `chosen` on the generations that count from now on. */
static ckd_status list_again(const search *s, manifest_set *n, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < n->count; i++) {
        n->items[i].chosen = !n->items[i].superseded;
    }
    for (size_t i = 0; i < s->count && status == CKD_OK; i++) {
        const candidate *k = &s->found[i];
        manifest_entry *x = manifest_set_find(n, &k->id), *y = x;
        if (!x || x->in_trash || x->m.checkpoint.generation != k->newest) {
            continue; /* it was deleted or rewritten meanwhile */
        }
        while (y + 1 < n->items + n->count && id_equal(&y->m.checkpoint.id, &k->id) &&
               y->m.checkpoint.generation != k->older) {
            y++;
        }
        if (!id_equal(&y->m.checkpoint.id, &k->id) || y->m.checkpoint.generation != k->older) {
            continue;
        }
        memcpy(y->m.checkpoint.run, x->m.checkpoint.run, sizeof(y->m.checkpoint.run));
        y->m.checkpoint.generation = k->newest + 1;
        status = s->q->write ? manifest_entry_publish(y, s->store, err) : CKD_OK;
        x->chosen = false;
        y->chosen = true;
        store_message(s->store, "%s@%llu %s with its files from before a compaction, which are intact",
                      x->m.checkpoint.run, (unsigned long long)x->m.checkpoint.step,
                      s->q->write ? "is listed again" : "can be listed again");
    }
    return status;
}

static void find_dropped(bool *dropped, const search *s, const manifest_set *n) {
    for (size_t i = 0; i < s->q->bad_count; i++) {
        dropped[i] = true;
    }
    for (size_t i = 0; i < n->count; i++) {
        const manifest *m = &n->items[i].m;
        for (size_t k = 0; k < m->file_count && n->items[i].chosen; k++) {
            const ckd_id *bad =
                bsearch(&m->files[k].id, s->q->bad, s->q->bad_count, sizeof(*bad), id_compare);
            if (bad) {
                dropped[bad - s->q->bad] = false;
            }
        }
    }
}

/* Updates the catalog. If it still listed the newest generation, this handle would not see the older one. */
static void update_catalog(ckd_store *store) {
    ckd_error why = {0};
    if (store_refresh_catalog_locked(store, &why) != CKD_OK) {
        store_use_memory_catalog(store, NULL);
        store_message(
            store, "the catalog could not be updated; the next save or open for writing will update it: %s",
            why.message);
    }
}

static ckd_status publish(bool *dropped, const search *s, ckd_error *err) {
    manifest_set n = {0};
    file_lock *lock = NULL;
    ckd_status status = s->q->write ? store_lock_publish(&lock, s->store, err) : CKD_OK;
    if (status != CKD_OK) {
        return status;
    }
    pthread_mutex_lock(&s->store->mutex);
    status = manifest_set_read(&n, s->store, err);
    THEN(status, list_again(s, &n, err));
    if (status == CKD_OK) {
        find_dropped(dropped, s, &n);
    }
    if (s->q->write) {
        update_catalog(s->store);
    }
    pthread_mutex_unlock(&s->store->mutex);
    manifest_set_free(&n);
    lock_release(lock);
    return status;
}

ckd_status repair_generations(bool *dropped, ckd_store *store, const generation_request *q, ckd_error *err) {
    search s = {.store = store, .q = q};
    file_lock *readers = NULL;
    memset(dropped, 0, q->bad_count * sizeof(*dropped));
    ckd_status status = q->bad_count ? store_lock_reader(&readers, store, err) : CKD_OK;
    if (status == CKD_OK && q->bad_count) {
        status = find_all(&s, err);
    }
    if (status == CKD_OK && s.count) {
        status = publish(dropped, &s, err);
    }
    lock_release(readers);
    free(s.intact.slots);
    free(s.found);
    return status;
}
