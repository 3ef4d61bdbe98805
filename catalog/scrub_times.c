/* When chunk files were last verified. This is a cache that manifests do not hold. */
#include <stdlib.h>
#include <string.h>

#include "catalog/db.h"

enum { FILE_NAME_MAX = 63 };

typedef struct file_states {
    catalog_file_state *items;
    size_t count, capacity;
} file_states;

static ckd_status add_state(void *context, query *q, ckd_error *err) {
    file_states *s = context;
    if (ARRAY_GROW(s->items, s->capacity, s->count + 1, "a list from the catalog", err) != CKD_OK) {
        return CKD_E_NOMEM;
    }
    catalog_file_state *now = &s->items[s->count];
    *now =
        (catalog_file_state){.size = column_u64(q, 1, INT64_MAX), .verified_ns = column_u64(q, 2, INT64_MAX)};
    const char *name = column_text(q, 0, 1, FILE_NAME_MAX);
    memcpy(now->name, name, strlen(name) + 1);
    ckd_status status = query_row_status(q, err);
    if (status == CKD_OK && s->count && strcmp(now[-1].name, now->name) >= 0) {
        return catalog_damaged(q->c, err, "chunk files are out of order");
    }
    s->count += status == CKD_OK;
    return status;
}

ckd_status catalog_file_states(catalog_file_state **out, size_t *count, catalog *c, ckd_error *err) {
    file_states s = {0};
    ckd_status status = snapshot_rows(c, S_FILE_STATES, NULL, add_state, &s, err);
    if (status != CKD_OK) {
        free(s.items);
        s = (file_states){0};
    }
    *out = s.items;
    *count = s.count;
    return status;
}

ckd_status catalog_set_verified(catalog *c, const char *name, uint64_t ns, ckd_error *err) {
    query q;
    ckd_status status = need_transaction(c, err);
    if (status != CKD_OK) {
        return status;
    }
    if (!text_storable(name, 1, FILE_NAME_MAX) || !number_storable(ns)) {
        return err_set(err, CKD_E_INVALID,
                       "a chunk file that was verified needs a name of 1 to %d bytes and a "
                       "time below 2^63",
                       FILE_NAME_MAX);
    }
    status = query_begin(&q, c, S_FILE_VERIFIED, err);
    bind_text(&q, 1, name);
    bind_u64(&q, 2, ns);
    return query_run(&q, status, err);
}
