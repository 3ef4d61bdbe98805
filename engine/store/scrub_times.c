/* When chunk files were last read in full and found intact: a cache in the catalog. */
#include <stdio.h>
#include <stdlib.h>

#include "engine/store/store.h"

void scrub_times_name(char name[64], const ckd_id *file) {
    char hex[CKD_ID_TEXT];
    ckd_id_text(hex, file);
    snprintf(name, 64, "%s.ckd", hex);
}

catalog_file_state *scrub_times_load(size_t *count, ckd_store *store) {
    catalog_file_state *files = NULL;
    *count = 0;
    pthread_mutex_lock(&store->mutex);
    if (store->catalog) {
        catalog_file_states(&files, count, store->catalog, NULL);
    }
    pthread_mutex_unlock(&store->mutex);
    return files;
}

ckd_status scrub_times_add(scrubbed_files *f, const manifest *m, ckd_error *err) {
    if (ARRAY_GROW(f->ids, f->capacity, f->count + m->file_count, "the files that were verified", err) !=
        CKD_OK) {
        return CKD_E_NOMEM;
    }
    for (size_t i = 0; i < m->file_count; i++) {
        f->ids[f->count++] = m->files[i].id;
    }
    return CKD_OK;
}

void scrub_times_queue(ckd_store *store, scrubbed_files *f) {
    pthread_mutex_lock(&store->mutex);
    free(store->scrubbed.ids); /* left over from an earlier call, whose deletion failed */
    store->scrubbed = *f;
    pthread_mutex_unlock(&store->mutex);
    *f = (scrubbed_files){0};
}

ckd_status scrub_times_write(ckd_store *store, ckd_error *err) {
    scrubbed_files *f = &store->scrubbed;
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < f->count && status == CKD_OK; i++) {
        char name[64];
        scrub_times_name(name, &f->ids[i]);
        status = catalog_set_verified(store->catalog, name, f->at_ns, err);
    }
    return status;
}
