/* From a manifest and the indexes of its chunk files to rows of the catalog. */
#include <stdio.h>
#include <stdlib.h>

#include "engine/view.h"

static void file_row(catalog_file *row, const note_file *file) {
    memset(row, 0, sizeof(*row));
    char hex[CKD_ID_TEXT];
    ckd_id_text(hex, &file->id);
    snprintf(row->name, sizeof(row->name), "%s.ckd", hex);
    row->rank = file->rank;
    row->size = file->size;
    row->root = file->root;
}

static void shard_row(catalog_shard *row, const view_tensor *t, size_t index) {
    const view_shard *s = &t->shards[index];
    view_totals totals = {0};
    view_add_shard(&totals, s);
    *row = (catalog_shard){.tensor = t->tensor->name,
                           .ordinal = (uint32_t)t->order,
                           .index = (uint32_t)index,
                           .role = t->tensor->role,
                           .dtype = t->tensor->dtype,
                           .ndim = t->tensor->ndim,
                           .shape = t->tensor->shape,
                           .region = s->region,
                           .elements = s->elements,
                           .raw_bytes = s->elements * ckd_dtype_size(t->tensor->dtype),
                           .stored_bytes = totals.stored_bytes,
                           .coding = totals.coding,
                           .depth = totals.depth,
                           .rel_l2 = measures_rel_l2(&s->measures),
                           .max_error = s->measures.max_error,
                           .value_squares = s->measures.value_squares,
                           .direction_change = s->measures.direction_change,
                           .nonfinite = s->measures.nonfinite};
}

static ckd_status add_rows(ckd_store *store, const manifest *m, const view *v, ckd_error *err) {
    size_t shard_count = v ? v->shard_count : 0, row = 0;
    catalog_file *files = calloc(m->file_count + 1, sizeof(*files));
    catalog_shard *shards = calloc(shard_count + 1, sizeof(*shards));
    ckd_status status = CKD_OK;
    if (!files || !shards) {
        status = err_nomem(err, shard_count * sizeof(*shards), "catalog rows");
    }
    for (size_t i = 0; status == CKD_OK && i < m->file_count; i++) {
        file_row(&files[i], &m->files[i]);
    }
    for (size_t i = 0; status == CKD_OK && v && i < v->tensor_count; i++) {
        for (size_t s = 0; s < v->tensors[i].shard_count; s++) {
            shard_row(&shards[row++], &v->tensors[i], s);
        }
    }
    if (status == CKD_OK) {
        catalog_entry entry = {.checkpoint = &m->checkpoint,
                               .manifest_bytes = m->file_bytes,
                               .files = files,
                               .file_count = m->file_count,
                               .shards = shards,
                               .shard_count = row};
        status = catalog_add(store->catalog, &entry, err);
    }
    free(files);
    free(shards);
    return status;
}

ckd_status store_adopt(ckd_store *store, manifest *m, ckd_error *err) {
    char run[CKD_RUN_MAX + 1];
    memcpy(run, m->checkpoint.run, sizeof(run));
    uint64_t step = m->checkpoint.step;
    uint32_t generation = m->checkpoint.generation;
    view *v;
    ckd_error why = {0};
    ckd_status status = view_open(&v, store, m, NULL, CKD_E_CORRUPT, &why);
    if (status == CKD_OK) {
        status = view_attach_measures(v, CKD_E_CORRUPT, &why);
    }
    if (status == CKD_OK) {
        status = add_rows(store, &v->manifest, v, err);
        view_close(v);
        return status;
    }
    view_close(v);
    bool tolerable = status == CKD_E_CORRUPT || status == CKD_E_UNSUPPORTED ||
                     (status == CKD_E_IO && (store->catalog_in_memory || store->list_unreadable));
    if (!tolerable) {
        return err_from(err, status, &why);
    }
    store_message(store, "%s@%llu is listed without its tensors: %s (%s)", run, (unsigned long long)step,
                  why.message, why.file);
    manifest again;
    status = store_read_manifest(&again, store, run, step, generation, err);
    if (status == CKD_OK) {
        status = add_rows(store, &again, NULL, err);
        manifest_free(&again);
    }
    return status;
}
