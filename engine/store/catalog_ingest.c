/* Converts a manifest to rows of the catalog. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/store/handle.h"

static void file_row(catalog_file *row, const file_ref *file) {
    memset(row, 0, sizeof(*row));
    scrub_times_name(row->name, &file->id);
    row->rank = file->rank;
    row->size = file->size;
    row->root = file->root;
}

ckd_status store_ingest(ckd_store *store, const manifest *m, ckd_error *err) {
    catalog_file *files = calloc(m->own_count + 1, sizeof(*files));
    if (!files) {
        return err_nomem(err, m->own_count * sizeof(*files), "catalog rows");
    }
    for (size_t i = 0; i < m->own_count; i++) { /* older files are another checkpoint's own, or nobody's */
        file_row(&files[i], &m->files[i]);
    }
    catalog_entry entry = {.checkpoint = &m->checkpoint,
                           .manifest_bytes = m->file_bytes,
                           .files = files,
                           .file_count = m->own_count};
    ckd_status status = catalog_add(store->catalog, &entry, err);
    free(files);
    return status;
}
