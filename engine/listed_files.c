#include "engine/listed_files.h"

#include <stdio.h>
#include <stdlib.h>

static ckd_status add_files(listed_files *f, const manifest *m, const manifest_name *name, ckd_error *err) {
    if (f->count + m->file_count > f->capacity) {
        size_t capacity = 2 * (f->count + m->file_count);
        listed_file *grown = realloc(f->items, capacity * sizeof(*grown));
        if (!grown) {
            return err_nomem(err, capacity * sizeof(*grown), "the files of a store");
        }
        f->items = grown;
        f->capacity = capacity;
    }
    for (size_t i = 0; i < m->file_count; i++) {
        f->items[f->count++] = (listed_file){m->files[i], *name, m->checkpoint.created_ns};
    }
    return CKD_OK;
}

static ckd_status add_manifest(listed_files *f, const ckd_store *store, const manifest_name *name,
                               damage_list *damage, ckd_error *err) {
    manifest m;
    ckd_error why = {.offset = CKD_NO_OFFSET};
    ckd_status status = store_read_manifest(&m, store, name->run, name->step, name->generation, &why);
    if (status == CKD_E_NOT_FOUND) { /* it was collected meanwhile */
        return CKD_OK;
    }
    if (status != CKD_OK) {
        char checkpoint[CKD_RUN_MAX + 32];
        snprintf(checkpoint, sizeof(checkpoint), "%s@%llu", name->run, (unsigned long long)name->step);
        f->incomplete = true;
        err_in_file(&why, status, path_manifest(store->path, name->run, name->step, name->generation).text);
        return damage_note(damage, status, &why, CKD_NO_OFFSET, checkpoint, err);
    }
    f->lineages[f->lineage_count++] = lineage_of(&m);
    status = add_files(f, &m, name, err);
    manifest_free(&m);
    return status;
}

static int by_id_and_age(const void *a, const void *b) {
    const listed_file *x = a, *y = b;
    int order = memcmp(&x->file.id, &y->file.id, sizeof(ckd_id));
    return order ? order : (x->created_ns > y->created_ns) - (x->created_ns < y->created_ns);
}

static void keep_one_of_each(listed_files *f) {
    size_t kept = 0;
    if (f->count) {
        qsort(f->items, f->count, sizeof(*f->items), by_id_and_age);
    }
    for (size_t i = 0; i < f->count; i++) {
        if (kept == 0 || !id_equal(&f->items[kept - 1].file.id, &f->items[i].file.id)) {
            f->bytes += f->items[i].file.size;
            f->items[kept++] = f->items[i];
        }
    }
    f->count = kept;
}

ckd_status listed_files_read(listed_files *out, const ckd_store *store, damage_list *damage, ckd_error *err) {
    manifest_list list = {0};
    *out = (listed_files){0};
    ckd_status status = manifests_read(&list, store, err);
    if (status == CKD_OK) {
        out->lineages = calloc(list.count + 1, sizeof(*out->lineages));
        status = out->lineages ? CKD_OK : err_nomem(err, list.count * sizeof(*out->lineages), "manifests");
    }
    for (size_t i = 0; i < list.count && status == CKD_OK; i++) {
        bool newest = i == 0 || !same_checkpoint_name(&list.items[i - 1], &list.items[i]);
        status = newest ? add_manifest(out, store, &list.items[i], damage, err) : CKD_OK;
    }
    manifests_free(&list);
    keep_one_of_each(out);
    return status;
}

void listed_files_free(listed_files *f) {
    lineages_free(f->lineages, f->lineage_count);
    free(f->items);
    *f = (listed_files){0};
}

static int by_id(const void *id, const void *file) {
    return memcmp(id, &((const listed_file *)file)->file.id, sizeof(ckd_id));
}

const listed_file *listed_files_find(const listed_files *f, const ckd_id *id) {
    return f->count ? bsearch(id, f->items, f->count, sizeof(*f->items), by_id) : NULL;
}

bool listed_file_there(const ckd_store *store, const ckd_id *id, uint64_t size) {
    pathname p = path_chunk(store->path, id, "");
    return file_bytes(p.text) == size;
}
