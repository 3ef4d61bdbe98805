/* Totals for the report, from what was added up when checkpoints were added: no shard is read. */
#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"
#include "catalog/catalog_db.h"

static ckd_status usage_add(ckd_usage *usage, uint64_t raw, uint64_t stored, const catalog *c,
                            ckd_error *err) {
    if (!size_add(&usage->raw_bytes, usage->raw_bytes, raw) ||
        !size_add(&usage->stored_bytes, usage->stored_bytes, stored)) {
        return catalog_damaged(c, err, "sizes add up to more than 2^64");
    }
    return CKD_OK;
}

/* ---- by role ---- */

typedef struct role_usage {
    ckd_usage roles[CKD_ROLE_OTHER + 1];
} role_usage;

static ckd_status role_names(role_usage *u, catalog *c, ckd_error *err) {
    query q;
    bool row;
    ckd_status status = query_begin(&q, c, S_ROLE_NAMES, err);
    while (status == CKD_OK && (status = query_next(&row, &q, err)) == CKD_OK && row) {
        uint32_t role = column_u32(&q, 0, CKD_ROLE_WEIGHT, CKD_ROLE_OTHER);
        const char *word = column_text(&q, 1, 1, CKD_RUN_MAX);
        status = query_row_status(&q, err);
        if (status == CKD_OK) {
            memcpy(u->roles[role].name, word, strlen(word) + 1);
        }
    }
    query_end(&q);
    return status;
}

static ckd_status role_totals(role_usage *u, catalog *c, ckd_error *err) {
    query q;
    bool row;
    ckd_status status = query_begin(&q, c, S_TOTALS, err);
    while (status == CKD_OK && (status = query_next(&row, &q, err)) == CKD_OK && row) {
        uint32_t role = column_u32(&q, 0, CKD_ROLE_WEIGHT, CKD_ROLE_OTHER);
        uint64_t raw = column_u64(&q, 1, INT64_MAX), stored = column_u64(&q, 2, INT64_MAX);
        status = query_row_status(&q, err);
        if (status == CKD_OK) {
            u->roles[role].checkpoints++;
            status = usage_add(&u->roles[role], raw, stored, c, err);
        }
    }
    query_end(&q);
    return status;
}

ckd_status catalog_usage_by_role(ckd_usage rows[8], size_t *count, catalog *c, ckd_error *err) {
    role_usage u = {0};
    bool opened;
    *count = 0;
    memset(rows, 0, 8 * sizeof(*rows));
    ckd_status status = snapshot_begin(c, &opened, err);
    if (status != CKD_OK) {
        return status;
    }
    status = role_names(&u, c, err);
    if (status == CKD_OK) {
        status = role_totals(&u, c, err);
    }
    snapshot_end(c, opened);
    for (uint32_t role = CKD_ROLE_WEIGHT; status == CKD_OK && role <= CKD_ROLE_OTHER; role++) {
        if (u.roles[role].checkpoints && !u.roles[role].name[0]) {
            status = catalog_damaged(c, err, "role %u has no name", role);
        } else if (u.roles[role].checkpoints) {
            rows[(*count)++] = u.roles[role];
        }
    }
    if (status != CKD_OK) {
        *count = 0;
        memset(rows, 0, 8 * sizeof(*rows));
    }
    return status;
}

/* ---- by run ---- */

typedef struct run_usage {
    ckd_usage *rows;
    size_t count, capacity;
} run_usage;

/* The row of a run: the last one, or a new one behind it, for rows come by name. */
static ckd_status run_row(ckd_usage **out, run_usage *u, const char *run, const catalog *c, ckd_error *err) {
    int order = u->count ? strcmp(u->rows[u->count - 1].name, run) : -1;
    if (order > 0 || !run_name_valid(run)) {
        return catalog_damaged(c, err, "the names of its runs are none, or out of order");
    }
    if (order < 0) {
        ckd_usage *rows = list_grow(u->rows, u->count, &u->capacity, sizeof(*rows), err);
        if (!rows) {
            return CKD_E_NOMEM;
        }
        u->rows = rows;
        u->rows[u->count] = (ckd_usage){0};
        memcpy(u->rows[u->count].name, run, strlen(run) + 1);
        u->count++;
    }
    *out = &u->rows[u->count - 1];
    return CKD_OK;
}

static ckd_status run_totals(run_usage *u, catalog *c, ckd_error *err) {
    query q;
    bool row;
    ckd_status status = query_begin(&q, c, S_RUN_TOTALS, err);
    while (status == CKD_OK && (status = query_next(&row, &q, err)) == CKD_OK && row) {
        ckd_usage *usage = NULL;
        const char *run = column_text(&q, 0, 1, CKD_RUN_MAX);
        uint64_t raw = column_u64(&q, 1, INT64_MAX), manifest = column_u64(&q, 2, INT64_MAX);
        status = query_row_status(&q, err);
        if (status == CKD_OK) {
            status = run_row(&usage, u, run, c, err);
        }
        if (status == CKD_OK) {
            usage->checkpoints++;
            status = usage_add(usage, raw, manifest, c, err);
        }
    }
    query_end(&q);
    return status;
}

/* A file that several checkpoints of a run share counts once. */
static ckd_status run_files(ckd_usage *usage, catalog *c, ckd_error *err) {
    query q;
    bool row;
    ckd_status status = query_begin(&q, c, S_RUN_FILES, err);
    if (status == CKD_OK) {
        bind_text(&q, 1, usage->name);
    }
    while (status == CKD_OK && (status = query_next(&row, &q, err)) == CKD_OK && row) {
        uint64_t size = column_u64(&q, 1, INT64_MAX);
        status = query_row_status(&q, err);
        if (status == CKD_OK) {
            status = usage_add(usage, 0, size, c, err);
        }
    }
    query_end(&q);
    return status;
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
    status = run_totals(&u, c, err);
    for (size_t i = 0; status == CKD_OK && i < u.count; i++) {
        status = run_files(&u.rows[i], c, err);
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
