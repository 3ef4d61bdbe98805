/* Converts a manifest and the indexes of its chunk files to catalog rows. */
#include <stdio.h>
#include <stdlib.h>

#include "engine/store/not_indexed.h"

static void file_row(catalog_file *row, const file_ref *file) {
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

/* Memory that an entry of the catalog points to. */
typedef struct entry_rows {
    catalog_file *files;
    catalog_shard *shards;
} entry_rows;

static void rows_free(entry_rows *rows) {
    free(rows->files);
    free(rows->shards);
}

/* v NULL: without shards. The caller must call rows_free, also on failure. */
static ckd_status rows_make(catalog_entry *entry, entry_rows *rows, const manifest *m, const view *v,
                            ckd_error *err) {
    size_t shard_count = v ? v->shard_count : 0, row = 0;
    rows->files = calloc(m->own_count + 1, sizeof(*rows->files));
    rows->shards = calloc(shard_count + 1, sizeof(*rows->shards));
    if (!rows->files || !rows->shards) {
        return err_nomem(err, shard_count * sizeof(*rows->shards), "catalog rows");
    }
    for (size_t i = 0; i < m->own_count; i++) { /* older files are another checkpoint's own, or nobody's */
        file_row(&rows->files[i], &m->files[i]);
    }
    for (size_t i = 0; v && i < v->tensor_count; i++) {
        for (size_t s = 0; s < v->tensors[i].shard_count; s++) {
            shard_row(&rows->shards[row++], &v->tensors[i], s);
        }
    }
    *entry = (catalog_entry){.checkpoint = &m->checkpoint,
                             .manifest_bytes = m->file_bytes,
                             .files = rows->files,
                             .file_count = m->own_count,
                             .shards = rows->shards,
                             .shard_count = row};
    return CKD_OK;
}

static ckd_status add_rows(ckd_store *store, const manifest *m, const view *v, bool not_indexed,
                           ckd_error *err) {
    entry_rows rows;
    catalog_entry entry;
    ckd_status status = rows_make(&entry, &rows, m, v, err);
    if (status == CKD_OK) {
        entry.not_indexed = not_indexed;
        status = catalog_add(store->catalog, &entry, err);
    }
    rows_free(&rows);
    return status;
}

ckd_status view_tensor_list(ckd_tensor_list *out, const view *v, ckd_error *err) {
    entry_rows rows;
    catalog_entry entry;
    ckd_status status = rows_make(&entry, &rows, &v->manifest, v, err);
    THEN(status, catalog_entry_tensors(out, &entry, err));
    rows_free(&rows);
    return status;
}

void store_report_unreadable(const ckd_store *store, const ckd_checkpoint *c, const ckd_error *why) {
    store_message(store, "%s@%llu is listed without its tensors: %s (%s)", c->run,
                  (unsigned long long)c->step, why->message, why->file);
}

ckd_status store_ingest(ckd_store *store, manifest *m, view **last, ckd_error *err) {
    ckd_checkpoint checkpoint = m->checkpoint;
    view *v;
    ckd_error why = {0};
    ckd_status status = view_open(&v, store, m, *last, CKD_E_CORRUPT, &why);
    THEN(status, view_attach_measures(v, CKD_E_CORRUPT, &why));
    if (status == CKD_OK) {
        status = add_rows(store, &v->manifest, v, false, err);
        view_close(*last);
        *last = v;
        return status;
    }
    view_close(v);
    bool tolerable = status == CKD_E_CORRUPT || status == CKD_E_UNSUPPORTED ||
                     (status == CKD_E_IO && (store->catalog_in_memory || store->list_unreadable));
    if (!tolerable) {
        return err_from(err, status, &why);
    }
    manifest reread; /* if it is gone, so may be the files that it names */
    status = store_read_manifest(&reread, store, checkpoint.run, checkpoint.step, checkpoint.generation, err);
    if (status == CKD_OK) {
        store_report_unreadable(store, &checkpoint, &why);
        /* After a repair, its tensors are read from its files. */
        status = add_rows(store, &reread, NULL, true, err);
        manifest_free(&reread);
    }
    return status;
}

ckd_status store_ingest_manifest(ckd_store *store, manifest *m, ckd_error *err) {
    ckd_status status = add_rows(store, m, NULL, true, err);
    manifest_free(m);
    return status;
}
