#include "engine/needs.h"

#include <stdio.h>
#include <stdlib.h>

static int by_id(const void *a, const void *b) {
    const need *x = a, *y = b;
    int order = memcmp(&x->m.checkpoint.id, &y->m.checkpoint.id, sizeof(ckd_id));
    uint32_t p = x->m.checkpoint.generation, q = y->m.checkpoint.generation;
    return order ? order : (p < q) - (p > q);
}

ckd_status tombstone_read(tombstone *out, const ckd_store *store, const manifest_name *name, ckd_error *err) {
    pathname p = path_tombstone(store->path, name->run, name->step, name->generation);
    bytes data = {0};
    ckd_status status = file_read_all(&data, p.text, NOTE_MAX, err);
    if (status == CKD_OK) {
        status = tombstone_decode(out, &store->id, data.data, data.size, p.text, err);
    }
    bytes_free(&data);
    return status;
}

/* What a collection or a return from the trash takes away meanwhile (there is none under the publish lock) is as if it had not been there. */
static ckd_status read_need(needs *to, const ckd_store *store, const manifest_name *name,
                            const manifest_list *tombstones, ckd_error *err) {
    need *n = &to->items[to->count];
    ckd_error why = {0};
    ckd_status status = store_read_manifest(&n->m, store, name->run, name->step, name->generation, &why);
    if (status != CKD_OK) {
        return err_except(err, status, CKD_E_NOT_FOUND, &why);
    }
    to->count++;
    const manifest_name *killer = manifests_killer(tombstones, name);
    if (killer) {
        status = tombstone_read(&n->dead, store, killer, &why);
        n->is_dead = status == CKD_OK;
    }
    return err_except(err, status, CKD_E_NOT_FOUND, &why);
}

static ckd_status complete(needs *n, ckd_error *err);

ckd_status needs_read(needs *out, const ckd_store *store, ckd_error *err) {
    manifest_list names = {0}, tombstones = {0};
    *out = (needs){0};
    ckd_status status = manifests_read_all(&names, store, err);
    if (status == CKD_OK) {
        status = manifests_tombstones(&tombstones, store, err);
    }
    if (status == CKD_OK) {
        out->items = calloc(names.count + 1, sizeof(*out->items));
        status = out->items ? CKD_OK : err_nomem(err, names.count * sizeof(*out->items), "manifests");
    }
    for (size_t i = 0; i < names.count && status == CKD_OK; i++) {
        status = read_need(out, store, &names.items[i], &tombstones, err);
    }
    manifests_free(&names);
    manifests_free(&tombstones);
    if (status != CKD_OK) {
        needs_free(out);
        return status;
    }
    qsort(out->items, out->count, sizeof(*out->items), by_id);
    for (size_t i = 1; i < out->count; i++) {
        need *n = &out->items[i], *before = &out->items[i - 1];
        n->superseded =
            id_equal(&n->m.checkpoint.id, &before->m.checkpoint.id) && n->is_dead == before->is_dead;
    }
    status = complete(out, err);
    if (status != CKD_OK) {
        needs_free(out);
    }
    return status;
}

void needs_free(needs *n) {
    for (size_t i = 0; i < n->count; i++) {
        manifest_free(&n->items[i].m);
    }
    free(n->items);
    *n = (needs){0};
}

need *needs_find(const needs *n, const ckd_id *id) {
    size_t low = 0, high = n->count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (memcmp(&n->items[middle].m.checkpoint.id, id, sizeof(*id)) < 0) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low < n->count && id_equal(&n->items[low].m.checkpoint.id, id) ? &n->items[low] : NULL;
}

static const need *end_of(const needs *n) {
    return n->items + n->count;
}

ckd_status needs_choose(needs *n, const ckd_id *ids, size_t count, bool dead, ckd_error *err) {
    for (size_t i = 0; i < count; i++) {
        char hex[CKD_ID_TEXT];
        ckd_id_text(hex, &ids[i]);
        need *first = needs_find(n, &ids[i]);
        if (!first || first->is_dead != dead) {
            return err_set(err, CKD_E_NOT_FOUND, "there is no checkpoint %s %s", hex,
                           dead ? "in the trash" : "in this store");
        }
        if (first->chosen) {
            return err_set(err, CKD_E_INVALID, "checkpoint %s is given twice", hex);
        }
        for (need *g = first; g < end_of(n) && id_equal(&g->m.checkpoint.id, &ids[i]); g++) {
            g->chosen = true;
        }
    }
    return CKD_OK;
}

/* ---- manifests of early versions ---- */

/* Adds the files of what x depends on, and of what that depends on. */
static ckd_status add_older(needs *n, need *x, const need **todo, ckd_error *err) {
    size_t count = 0, done = 0;
    ckd_status status = CKD_OK;
    const need *at = x;
    do {
        for (size_t i = 0; i < at->m.dependency_count && at->was_own_only && status == CKD_OK; i++) {
            const need *d = needs_find(n, &at->m.dependencies[i]);
            bool known = !d || d == x;
            for (size_t k = 0; k < count && !known; k++) {
                known = todo[k] == d;
            }
            if (!known) {
                todo[count++] = d;
                status = manifest_add_files(&x->m, d->m.files,
                                            d->was_own_only ? d->m.own_count : d->m.file_count, err);
            }
        }
        at = done < count ? todo[done++] : NULL;
    } while (at && status == CKD_OK);
    x->m.own_only = false;
    return status;
}

static ckd_status complete(needs *n, ckd_error *err) {
    const need **todo = calloc(n->count + 1, sizeof(*todo));
    ckd_status status = todo ? CKD_OK : err_nomem(err, n->count * sizeof(*todo), "manifests");
    for (size_t i = 0; i < n->count; i++) {
        n->items[i].was_own_only = n->items[i].m.own_only;
    }
    for (size_t i = 0; i < n->count && status == CKD_OK; i++) {
        if (n->items[i].was_own_only) {
            status = add_older(n, &n->items[i], todo, err);
        }
    }
    free(todo);
    return status;
}

static ckd_status publish_next(need *x, const ckd_store *store, ckd_error *err) {
    ckd_checkpoint *c = &x->m.checkpoint;
    if (c->generation == UINT32_MAX) {
        return err_set(err, CKD_E_UNSUPPORTED, "%s@%llu has the last generation that there is", c->run,
                       (unsigned long long)c->step);
    }
    c->generation++;
    c->stored_bytes -= x->m.file_bytes; /* store_read_manifest has added them */
    char hex[CKD_ID_TEXT], temp[64];
    ckd_id_text(hex, &c->id);
    snprintf(temp, sizeof(temp), ".tmp-%s", hex);
    pathname temporary = path_of(store->path, DIR_MANIFESTS, temp);
    bytes data = {0};
    manifest_encode(&data, &store->id, &x->m);
    ckd_status status = data.failed ? err_nomem(err, data.size, "a manifest") : CKD_OK;
    if (status == CKD_OK) {
        status = file_publish_bytes(path_manifest(store->path, c->run, c->step, c->generation).text,
                                    temporary.text, data.data, data.size, err);
        if (status != CKD_OK) {
            file_remove(temporary.text, true, NULL);
        }
    }
    c->stored_bytes += data.size;
    x->m.file_bytes = data.size;
    bytes_free(&data);
    return status;
}

static bool reaches_chosen(const needs *n, const need *x) {
    for (const need *g = n->items; g < end_of(n); g++) {
        for (size_t i = 0; g->chosen && i < g->m.own_count; i++) {
            for (size_t k = x->m.own_count; k < x->m.file_count; k++) {
                if (id_equal(&x->m.files[k].id, &g->m.files[i].id)) {
                    return true;
                }
            }
        }
    }
    return false;
}

ckd_status needs_name_older(needs *n, const ckd_store *store, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (need *x = n->items; x < end_of(n) && status == CKD_OK; x++) {
        if (x->was_own_only && !x->chosen && !x->is_dead && !x->superseded && reaches_chosen(n, x)) {
            status = publish_next(x, store, err);
            x->was_own_only = status != CKD_OK;
        }
    }
    return status;
}

/* ---- writers ---- */

static void mark(needs *n, const ckd_id *id) {
    for (need *g = needs_find(n, id); g && g < end_of(n) && id_equal(&g->m.checkpoint.id, id); g++) {
        g->in_use = true;
    }
}

static ckd_status mark_of_writer(needs *n, const ckd_store *store, const char *name, ckd_error *err) {
    pathname p = path_of(store->path, DIR_INTENTS, name);
    file_lock *lock;
    ckd_status status = lock_acquire(&lock, p.text, LOCK_EXCLUSIVE, false, 0, NULL);
    if (status == CKD_OK || status == CKD_E_NOT_FOUND) {
        lock_release(status == CKD_OK ? lock : NULL);
        return CKD_OK; /* its writer died, or has just ended */
    }
    bytes data = {0};
    intent live = {0};
    status = file_read_all(&data, p.text, NOTE_MAX, err);
    if (status == CKD_E_NOT_FOUND) {
        return CKD_OK;
    }
    if (status == CKD_OK) {
        status = intent_decode(&live, &store->id, data.data, data.size, p.text, err);
    }
    for (size_t i = 0; i < live.dependency_count && status == CKD_OK; i++) {
        mark(n, &live.dependencies[i]);
    }
    intent_free(&live);
    bytes_free(&data);
    return status;
}

ckd_status needs_mark_in_use(needs *n, const ckd_store *store, ckd_error *err) {
    dir_list list;
    ckd_status status = dir_list_read(&list, path_in(store->path, DIR_INTENTS).text, err);
    if (status != CKD_OK) {
        return status;
    }
    for (need *x = n->items; x < end_of(n); x++) {
        x->in_use = false;
    }
    for (size_t i = 0; i < list.count && status == CKD_OK; i++) {
        ckd_id id;
        if (strlen(list.names[i]) == CKD_ID_TEXT - 1 && id_parse(&id, list.names[i])) {
            status = mark_of_writer(n, store, list.names[i], err);
        }
    }
    dir_list_free(&list);
    return status;
}
