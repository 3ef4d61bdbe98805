/* Totals for the report. */
#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"
#include "catalog/db.h"

static ckd_status usage_add(ckd_usage *usage, uint64_t raw, uint64_t stored, const catalog *c,
                            ckd_error *err) {
    if (!size_add(&usage->raw_bytes, usage->raw_bytes, raw) ||
        !size_add(&usage->stored_bytes, usage->stored_bytes, stored)) {
        return catalog_damaged(c, err, "sizes add up to more than 2^64");
    }
    return CKD_OK;
}

/* ---- by run ---- */

typedef struct run_usage {
    ckd_usage *rows;
    size_t count, capacity;
} run_usage;

/* Returns the row of a run: the last one, or a new one after it, as rows are sorted by name. */
static ckd_status run_row(ckd_usage **out, run_usage *u, const char *run, const catalog *c, ckd_error *err) {
    int order = u->count ? strcmp(u->rows[u->count - 1].name, run) : -1;
    if (order > 0 || !run_name_valid(run)) {
        return catalog_damaged(c, err, "its run names are invalid or out of order");
    }
    if (order < 0) {
        if (ARRAY_GROW(u->rows, u->capacity, u->count + 1, "a list from the catalog", err) != CKD_OK) {
            return CKD_E_NOMEM;
        }
        u->rows[u->count] = (ckd_usage){0};
        memcpy(u->rows[u->count].name, run, strlen(run) + 1);
        u->count++;
    }
    *out = &u->rows[u->count - 1];
    return CKD_OK;
}

static ckd_status run_total(void *context, query *q, ckd_error *err) {
    ckd_usage *usage = NULL;
    const char *run = column_text(q, 0, 1, CKD_RUN_MAX);
    uint64_t raw = column_u64(q, 1, INT64_MAX), manifest = column_u64(q, 2, INT64_MAX);
    ckd_status status = query_row_status(q, err);
    THEN(status, run_row(&usage, context, run, q->c, err));
    if (status != CKD_OK) {
        return status;
    }
    usage->checkpoints++;
    return usage_add(usage, raw, manifest, q->c, err);
}

static ckd_status run_file(void *context, query *q, ckd_error *err) {
    uint64_t size = column_u64(q, 1, INT64_MAX);
    ckd_status status = query_row_status(q, err);
    return status == CKD_OK ? usage_add(context, 0, size, q->c, err) : status;
}

ckd_status catalog_usage_by_run(ckd_usage **rows, size_t *count, catalog *c, ckd_error *err) {
    run_usage u = {0};
    bool opened;
    *rows = NULL;
    *count = 0;
    ckd_status status = snapshot_begin(c, &opened, err);
    if (status != CKD_OK) {
        return status;
    }
    status = query_rows(c, S_RUN_TOTALS, NULL, run_total, &u, err);
    for (size_t i = 0; status == CKD_OK && i < u.count; i++) {
        status = query_rows(c, S_RUN_FILES, u.rows[i].name, run_file, &u.rows[i], err);
    }
    snapshot_end(c, opened);
    if (status != CKD_OK) {
        free(u.rows);
        return status;
    }
    *rows = u.rows;
    *count = u.count;
    return CKD_OK;
}

/* ---- files ---- */

static ckd_status all_files(void *context, query *q, ckd_error *err) {
    catalog_files f = {.count = column_u64(q, 0, INT64_MAX),
                       .chunk_bytes = column_u64(q, 1, INT64_MAX),
                       .manifest_bytes = column_u64(q, 2, INT64_MAX)};
    ckd_status status = query_row_status(q, err);
    if (status == CKD_OK) {
        *(catalog_files *)context = f;
    }
    return status;
}

ckd_status catalog_usage_files(catalog_files *out, catalog *c, ckd_error *err) {
    *out = (catalog_files){0};
    return snapshot_rows(c, S_ALL_FILES, NULL, all_files, out, err);
}
