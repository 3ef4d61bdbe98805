/*
 * Manifests of early versions name only their own files. The older files are those that the newest manifests of the
 * dependencies name. That holds until a dependency is rewritten or removed, so before that, the dependents get
 * manifests that name all files. If a dependency has lost its manifest, some files are unknown. The dependent's other
 * dependencies then stay unchanged until a repair finds the manifest, or the dependent is removed.
 */
#include <stdio.h>
#include <stdlib.h>

#include "engine/store/manifests.h"

static const manifest_entry *end_of(const manifest_set *n) {
    return n->items + n->count;
}

/* ---- reading ---- */

/*
 * The dependencies of a manifest, each once. Includes indirect ones, as far as manifests of early versions leave their
 * files to them.
 */
typedef struct older_list {
    manifest_entry **items;
    size_t count;
    bool complete; /* each of them has a manifest */
} older_list;

static void find_older(older_list *out, const manifest_set *n, const manifest_entry *x) {
    size_t done = 0;
    const manifest_entry *at = x;
    out->count = 0;
    out->complete = true;
    do {
        for (size_t i = 0; i < at->m.dependency_count && at->was_own_only; i++) {
            manifest_entry *d = manifest_set_find(n, &at->m.dependencies[i]);
            bool skip = !d || d == x;
            out->complete = out->complete && d;
            for (size_t k = 0; k < out->count && !skip; k++) {
                skip = out->items[k] == d;
            }
            if (!skip) {
                out->items[out->count++] = d;
            }
        }
        at = done < out->count ? out->items[done++] : NULL;
    } while (at);
}

static void protect(const manifest_set *n, manifest_entry *newest) {
    for (manifest_entry *g = newest; g < end_of(n) && id_equal(&g->m.checkpoint.id, &newest->m.checkpoint.id);
         g++) {
        g->is_protected = true;
    }
}

static ckd_status add_older(const manifest_set *n, manifest_entry *x, older_list *older, ckd_error *err) {
    ckd_status status = CKD_OK;
    find_older(older, n, x);
    x->is_incomplete = !older->complete;
    x->m.own_only = false;
    for (size_t i = 0; i < older->count && status == CKD_OK; i++) {
        manifest_entry *d = older->items[i];
        status =
            manifest_add_files(&x->m, d->m.files, d->was_own_only ? d->m.own_count : d->m.file_count, err);
        if (x->is_incomplete && !x->superseded) {
            protect(n, d);
        }
    }
    return status;
}

ckd_status manifest_set_complete(manifest_set *n, ckd_error *err) {
    older_list older = {.items = calloc(n->count + 1, sizeof(*older.items))};
    ckd_status status = older.items ? CKD_OK : err_nomem(err, n->count * sizeof(*older.items), "manifests");
    for (size_t i = 0; i < n->count; i++) {
        n->items[i].was_own_only = n->items[i].m.own_only;
    }
    for (size_t i = 0; i < n->count && status == CKD_OK; i++) {
        if (n->items[i].was_own_only) {
            status = add_older(n, &n->items[i], &older, err);
        }
    }
    free(older.items);
    return status;
}

/* ---- writing ---- */

/*
 * Publishes the complete manifest. A listed checkpoint gets a next generation. In the trash, a next generation would be
 * listed again, because the tombstone does not cover it; its name may also be another checkpoint's by now. So a
 * manifest in the trash is replaced in place; only the holder of the publish lock relies on it.
 */
static ckd_status publish_bytes(const manifest_entry *x, const bytes *data, const ckd_store *store,
                                ckd_error *err) {
    const ckd_checkpoint *c = &x->m.checkpoint;
    char hex[CKD_ID_TEXT], name[64];
    ckd_id_text(hex, &c->id);
    snprintf(name, sizeof(name), ".tmp-%s", hex);
    pathname temporary = path_of(store->path, DIR_MANIFESTS, name);
    pathname path = path_manifest(store->path, c->run, c->step, c->generation);
    ckd_status status =
        x->in_trash ? file_replace_durable(path.text, temporary.text, data->data, data->size, err)
                    : file_publish_durable(NULL, path.text, temporary.text, data->data, data->size, err);
    if (status != CKD_OK) {
        file_remove(temporary.text, true, NULL);
    }
    return status;
}

ckd_status manifest_entry_publish(manifest_entry *x, const ckd_store *store, ckd_error *err) {
    ckd_checkpoint *c = &x->m.checkpoint;
    c->stored_bytes -= x->m.file_bytes; /* store_read_manifest has added them */
    bytes data = {0};
    manifest_encode(&data, &store->id, &x->m);
    ckd_status status =
        data.failed ? err_nomem(err, data.size, "a manifest") : publish_bytes(x, &data, store, err);
    c->stored_bytes += data.size;
    x->m.file_bytes = data.size;
    x->was_own_only = status != CKD_OK;
    bytes_free(&data);
    return status;
}

ckd_status manifest_entry_upgrade(manifest_entry *x, const ckd_store *store, ckd_error *err) {
    ckd_checkpoint *c = &x->m.checkpoint;
    if (!x->in_trash && c->generation == UINT32_MAX) {
        return err_set(err, CKD_E_UNSUPPORTED,
                       "the generation number of %s@%llu is already the largest possible", c->run,
                       (unsigned long long)c->step);
    }
    c->generation += !x->in_trash;
    return manifest_entry_publish(x, store, err);
}

static bool can_upgrade(const manifest_entry *x) {
    return x->was_own_only && !x->superseded && !x->is_incomplete;
}

ckd_status manifest_set_upgrade_all(manifest_set *n, const ckd_store *store, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (manifest_entry *x = n->items; x < end_of(n) && status == CKD_OK; x++) {
        status = can_upgrade(x) ? manifest_entry_upgrade(x, store, err) : CKD_OK;
    }
    return status;
}

/* ---- before checkpoints are removed ---- */

/* Own files of the chosen checkpoints, sorted by id. */
static ckd_status files_of_chosen(ckd_id **out, size_t *count, const manifest_set *n, ckd_error *err) {
    size_t total = 0;
    for (const manifest_entry *g = n->items; g < end_of(n); g++) {
        total += g->chosen ? g->m.own_count : 0;
    }
    *count = 0;
    *out = malloc((total + 1) * sizeof(**out));
    if (!*out) {
        return err_nomem(err, total * sizeof(**out), "chunk file names");
    }
    for (const manifest_entry *g = n->items; g < end_of(n); g++) {
        for (size_t i = 0; g->chosen && i < g->m.own_count; i++) {
            (*out)[(*count)++] = g->m.files[i].id;
        }
    }
    qsort(*out, *count, sizeof(**out), id_compare);
    return CKD_OK;
}

static bool has_older_of(const manifest_entry *x, const ckd_id *files, size_t count) {
    bool any = false;
    for (size_t i = x->m.own_count; i < x->m.file_count && !any; i++) {
        any = id_among(&x->m.files[i].id, files, count);
    }
    return any;
}

ckd_status manifest_set_upgrade_dependents(manifest_set *n, const ckd_store *store, ckd_error *err) {
    ckd_id *files;
    size_t count;
    ckd_status status = files_of_chosen(&files, &count, n, err);
    for (manifest_entry *x = n->items; x < end_of(n) && status == CKD_OK; x++) {
        if (!x->chosen && can_upgrade(x) && has_older_of(x, files, count)) {
            status = manifest_entry_upgrade(x, store, err);
        }
    }
    free(files);
    return status;
}
