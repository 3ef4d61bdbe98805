/* Reads all manifests and tombstones of a store, and says which of them count, are in use, or must stay. */
#include "engine/store/manifests.h"

#include <stdio.h>
#include <stdlib.h>

static int by_id(const void *a, const void *b) {
    const manifest_entry *x = a, *y = b;
    int order = memcmp(&x->m.checkpoint.id, &y->m.checkpoint.id, sizeof(ckd_id));
    uint32_t p = x->m.checkpoint.generation, q = y->m.checkpoint.generation;
    return order ? order : (p < q) - (p > q);
}

bool tombstone_in_grace(const tombstone *t, uint64_t now_ns) {
    return t->until_ns > now_ns && t->until_ns > t->deleted_ns;
}

ckd_status tombstone_read(tombstone *out, const ckd_store *store, const manifest_name *name, ckd_error *err) {
    pathname p = path_tombstone(store->path, name->run, name->step, name->generation);
    bytes data = {0};
    ckd_status status = file_read_all(&data, p.text, METADATA_MAX, err);
    THEN(status, tombstone_decode(out, &store->id, data.data, data.size, p.text, err));
    bytes_free(&data);
    return status;
}

ckd_status tombstone_write(const ckd_store *store, const tombstone *t, bool replaces, ckd_error *err) {
    pathname p = path_tombstone(store->path, t->run, t->step, t->generation);
    char hex[CKD_ID_TEXT], temp[64];
    ckd_id_text(hex, &t->checkpoint);
    snprintf(temp, sizeof(temp), ".tmp-%s", hex);
    pathname temporary = path_of(store->path, DIR_TOMBSTONES, temp);
    bytes data = {0};
    tombstone_encode(&data, &store->id, t);
    ckd_status status = data.failed ? err_nomem(err, data.size, "a tombstone")
                                    : file_remove(temporary.text, true, err); /* a dead writer's */
    THEN(status, replaces ? file_replace_durable(p.text, temporary.text, data.data, data.size, err)
                          : file_create_durable(p.text, temporary.text, data.data, data.size, err));
    bytes_free(&data);
    return status;
}

/*
 * Adds a manifest. If it disappears meanwhile, by a collection or a return from the trash, it counts as never having
 * existed. Neither happens under the publish lock.
 */
static ckd_status read_manifest_entry(manifest_set *to, const ckd_store *store, const manifest_name *name,
                                      const manifest_list *tombstones, ckd_error *err) {
    manifest_entry *n = &to->items[to->count];
    ckd_error why = {0};
    ckd_status status = store_read_manifest(&n->m, store, name->run, name->step, name->generation, &why);
    if (status != CKD_OK) {
        return err_except(err, status, CKD_E_NOT_FOUND, &why);
    }
    to->count++;
    const manifest_name *covering = manifests_covering_tombstone(tombstones, name);
    if (covering) {
        status = tombstone_read(&n->tombstone, store, covering, &why);
        n->in_trash = status == CKD_OK;
    }
    return err_except(err, status, CKD_E_NOT_FOUND, &why);
}

ckd_status manifest_set_read(manifest_set *out, const ckd_store *store, ckd_error *err) {
    manifest_list names = {0}, tombstones = {0};
    *out = (manifest_set){0};
    ckd_status status = manifests_read_all(&names, store, err);
    THEN(status, manifests_tombstones(&tombstones, store, err));
    if (status == CKD_OK) {
        out->items = calloc(names.count + 1, sizeof(*out->items));
        status = out->items ? CKD_OK : err_nomem(err, names.count * sizeof(*out->items), "manifests");
    }
    for (size_t i = 0; i < names.count && status == CKD_OK; i++) {
        status = read_manifest_entry(out, store, &names.items[i], &tombstones, err);
    }
    manifests_free(&names);
    manifests_free(&tombstones);
    if (status != CKD_OK) {
        manifest_set_free(out);
        return status;
    }
    qsort(out->items, out->count, sizeof(*out->items), by_id);
    for (size_t i = 1; i < out->count; i++) {
        manifest_entry *n = &out->items[i], *before = &out->items[i - 1];
        n->superseded =
            id_equal(&n->m.checkpoint.id, &before->m.checkpoint.id) && n->in_trash == before->in_trash;
    }
    status = manifest_set_complete(out, err);
    if (status != CKD_OK) {
        manifest_set_free(out);
    }
    return status;
}

void manifest_set_free(manifest_set *n) {
    for (size_t i = 0; i < n->count; i++) {
        manifest_free(&n->items[i].m);
    }
    free(n->items);
    *n = (manifest_set){0};
}

manifest_entry *manifest_set_find(const manifest_set *n, const ckd_id *id) {
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

static const manifest_entry *end_of(const manifest_set *n) {
    return n->count ? n->items + n->count : n->items; /* items may be NULL */
}

ckd_status manifest_set_choose(manifest_set *n, const ckd_id *ids, size_t count, bool in_trash,
                               ckd_error *err) {
    for (size_t i = 0; i < count; i++) {
        char hex[CKD_ID_TEXT];
        ckd_id_text(hex, &ids[i]);
        manifest_entry *first = manifest_set_find(n, &ids[i]);
        if (!first || first->in_trash != in_trash) {
            return err_set(err, CKD_E_NOT_FOUND, "there is no checkpoint %s %s", hex,
                           in_trash ? "in the trash" : "in this store");
        }
        if (first->chosen) {
            return err_set(err, CKD_E_INVALID, "checkpoint %s is given twice", hex);
        }
        for (manifest_entry *g = first; g < end_of(n) && id_equal(&g->m.checkpoint.id, &ids[i]); g++) {
            g->chosen = true;
        }
    }
    return CKD_OK;
}

/* ---- writers ---- */

static void mark(manifest_set *n, const ckd_id *id) {
    for (manifest_entry *g = manifest_set_find(n, id);
         g && g < end_of(n) && id_equal(&g->m.checkpoint.id, id); g++) {
        g->in_use = true;
    }
}

static ckd_status mark_of_writer(manifest_set *n, const ckd_store *store, const char *name, ckd_error *err) {
    pathname p = path_of(store->path, DIR_INTENTS, name);
    file_lock *lock;
    ckd_status status = lock_acquire(&lock, p.text, LOCK_EXCLUSIVE, false, 0, NULL);
    if (status == CKD_OK || status == CKD_E_NOT_FOUND) {
        lock_release(status == CKD_OK ? lock : NULL);
        return CKD_OK; /* its writer died, or has just finished */
    }
    bytes data = {0};
    intent live = {0};
    status = file_read_all(&data, p.text, METADATA_MAX, err);
    if (status == CKD_E_NOT_FOUND) {
        return CKD_OK;
    }
    THEN(status, intent_decode(&live, &store->id, data.data, data.size, p.text, err));
    n->run_in_use = n->run_in_use || (status == CKD_OK && n->run && strcmp(live.run, n->run) == 0);
    for (size_t i = 0; i < live.dependency_count && status == CKD_OK; i++) {
        mark(n, &live.dependencies[i]);
    }
    intent_free(&live);
    bytes_free(&data);
    return status;
}

ckd_status manifest_set_mark_in_use(manifest_set *n, const ckd_store *store, ckd_error *err) {
    dir_list list;
    ckd_status status = dir_list_read(&list, path_in(store->path, DIR_INTENTS).text, err);
    if (status != CKD_OK) {
        return status;
    }
    for (manifest_entry *x = n->items; x < end_of(n); x++) {
        x->in_use = false;
    }
    n->run_in_use = false;
    for (size_t i = 0; i < list.count && status == CKD_OK; i++) {
        ckd_id id;
        if (strlen(list.names[i]) == CKD_ID_TEXT - 1 && id_parse(&id, list.names[i])) {
            status = mark_of_writer(n, store, list.names[i], err);
        }
    }
    dir_list_free(&list);
    return status;
}

/* ---- bytes of chunk files that belong to no listed checkpoint ---- */

uint64_t waste_owned_bytes(const manifest *m, size_t file) {
    uint64_t all = 0, stored = m->checkpoint.stored_bytes;
    for (size_t i = 0; i < m->own_count; i++) {
        all += m->files[i].size;
    }
    stored -= stored < m->file_bytes ? stored : m->file_bytes;
    double own = all ? (double)stored / (double)all : 0;
    return (uint64_t)((own < 1 ? own : 1) * (double)m->files[file].size);
}

/* The part of one manifest in a file. */
typedef struct file_part {
    ckd_id file;
    uint64_t size, owned;
    bool is_asked; /* a listed checkpoint of the run names it */
    bool in_trash; /* a deleted checkpoint that can come back names it */
} file_part;

static size_t parts_of(file_part *to, const manifest_entry *x, const char *run) {
    const manifest *m = &x->m;
    size_t count = 0;
    for (size_t i = 0; i < m->file_count && !x->chosen && (x->in_trash || !x->superseded); i++) {
        to[count++] = (file_part){.file = m->files[i].id,
                                  .size = m->files[i].size,
                                  .owned = !x->in_trash && i < m->own_count ? waste_owned_bytes(m, i) : 0,
                                  .is_asked = !x->in_trash && (!run || strcmp(m->checkpoint.run, run) == 0),
                                  .in_trash = x->in_trash};
    }
    return count;
}

static void add_file(chunk_waste *to, const file_part *f) {
    to->bytes += f->is_asked ? f->size : 0;
    to->dead += f->is_asked && !f->in_trash && f->owned < f->size ? f->size - f->owned : 0;
}

ckd_status chunk_waste_of(chunk_waste *out, const manifest_set *n, const char *run, ckd_error *err) {
    size_t total = 0, count = 0;
    *out = (chunk_waste){0};
    for (size_t i = 0; i < n->count; i++) {
        total += n->items[i].m.file_count;
    }
    file_part *parts = calloc(total + 1, sizeof(*parts));
    if (!parts) {
        return err_nomem(err, total * sizeof(*parts), "chunk file names");
    }
    for (size_t i = 0; i < n->count; i++) {
        count += parts_of(parts + count, &n->items[i], run);
    }
    if (count) {
        qsort(parts, count, sizeof(*parts), id_compare);
    }
    for (size_t i = 0, end; i < count; i = end) {
        for (end = i + 1; end < count && id_compare(&parts[i], &parts[end]) == 0; end++) {
            parts[i].owned += parts[end].owned;
            parts[i].is_asked |= parts[end].is_asked;
            parts[i].in_trash |= parts[end].in_trash;
        }
        add_file(out, &parts[i]);
    }
    free(parts);
    return CKD_OK;
}
