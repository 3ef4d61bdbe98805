/* Totals for the report, from sums made when checkpoints were added. No shard is read. */
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

/* Returns the row of a run: the last one, or a new one behind it, since rows come by name. */
static ckd_status run_row(ckd_usage **out, run_usage *u, const char *run, const catalog *c, ckd_error *err) {
    int order = u->count ? strcmp(u->rows[u->count - 1].name, run) : -1;
    if (order > 0 || !run_name_valid(run)) {
        return catalog_damaged(c, err, "the names of its runs are none, or out of order");
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

/* Adds a file. A file that several checkpoints of a run share counts once. */
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
    catalog_files f = {.count = column_u64(q, 0, INT64_MAX)};
    f.chunk_bytes = f.count ? column_u64(q, 1, INT64_MAX) : 0; /* SQL sums over no rows are NULL */
    f.manifest_bytes = f.count ? column_u64(q, 2, INT64_MAX) : 0;
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

/* ---- by checkpoint ---- */

typedef struct role_sums {
    ckd_checkpoint_roles *rows;
    const ckd_checkpoint_list *list;
    size_t at; /* index in the list */
} role_sums;

static ckd_status checkpoint_role(void *context, query *q, ckd_error *err) {
    role_sums *s = context;
    ckd_id id;
    column_id(&id, q, 0, false);
    uint32_t role = column_u32(q, 1, CKD_ROLE_WEIGHT, CKD_ROLE_OTHER);
    ckd_role_bytes sums = {column_u64(q, 2, INT64_MAX), column_u64(q, 3, INT64_MAX),
                           column_u64(q, 4, INT64_MAX)};
    ckd_status status = query_row_status(q, err);
    if (status != CKD_OK) {
        return status;
    }
    while (s->at < s->list->count && memcmp(&s->list->items[s->at].id, &id, sizeof(id)) != 0) {
        s->at++; /* it has no tensors */
    }
    if (s->at == s->list->count) {
        return catalog_damaged(q->c, err, "sums by role are out of order");
    }
    s->rows[s->at].roles[role] = sums;
    return CKD_OK;
}

ckd_status catalog_usage_by_checkpoint(ckd_checkpoint_roles **rows, const ckd_checkpoint_list *list,
                                       catalog *c, ckd_error *err) {
    role_sums s = {calloc(list->count + 1, sizeof(*s.rows)), list, 0};
    *rows = s.rows;
    if (!s.rows) {
        return err_nomem(err, list->count * sizeof(*s.rows), "sums by role");
    }
    ckd_status status = snapshot_rows(c, S_CHECKPOINT_ROLES, NULL, checkpoint_role, &s, err);
    if (status != CKD_OK) {
        free(s.rows);
        *rows = NULL;
    }
    return status;
}

/* ---- by tensor ---- */

/* While rows are collected, names are offsets into `text`, which moves as it grows. */
typedef struct tensor_usage {
    ckd_tensor_usage *rows;
    size_t count, capacity;
    size_t *run_at, *name_at;
    size_t run_capacity, name_capacity;
    char *text;
    size_t text_size, text_capacity;
} tensor_usage;

static ckd_status keep_text(size_t *at, tensor_usage *u, const char *text, ckd_error *err) {
    size_t size = strlen(text) + 1;
    if (ARRAY_GROW(u->text, u->text_capacity, u->text_size + size, "names of tensors", err) != CKD_OK) {
        return CKD_E_NOMEM;
    }
    memcpy(u->text + u->text_size, text, size);
    *at = u->text_size;
    u->text_size += size;
    return CKD_OK;
}

static ckd_status reserve_row(tensor_usage *u, ckd_error *err) {
    const char *what = "sums by tensor";
    size_t count = u->count + 1;
    ckd_status status = ARRAY_GROW(u->rows, u->capacity, count, what, err);
    THEN(status, ARRAY_GROW(u->run_at, u->run_capacity, count, what, err));
    return status == CKD_OK ? ARRAY_GROW(u->name_at, u->name_capacity, count, what, err) : status;
}

/* Adds a row. Most rows have the same run as the row before. */
static ckd_status tensor_row(void *context, query *q, ckd_error *err) {
    tensor_usage *u = context;
    ckd_status status = reserve_row(u, err);
    if (status != CKD_OK) {
        return status;
    }
    size_t i = u->count;
    const char *run = column_text(q, 0, 1, CKD_RUN_MAX);
    int order = i ? strcmp(u->text + u->run_at[i - 1], run) : -1;
    if (order == 0) {
        u->run_at[i] = u->run_at[i - 1];
    } else {
        status = order < 0 && run_name_valid(run)
                     ? keep_text(&u->run_at[i], u, run, err)
                     : catalog_damaged(q->c, err, "the names of its runs are none, or out of order");
    }
    THEN(status, keep_text(&u->name_at[i], u, column_text(q, 1, 1, CKD_NAME_MAX), err));
    u->rows[i] = (ckd_tensor_usage){.role = (ckd_role)column_u32(q, 2, CKD_ROLE_WEIGHT, CKD_ROLE_OTHER),
                                    .checkpoints = column_u64(q, 3, INT64_MAX),
                                    .elements = column_u64(q, 4, INT64_MAX),
                                    .raw_bytes = column_u64(q, 5, INT64_MAX),
                                    .stored_bytes = column_u64(q, 6, INT64_MAX)};
    THEN(status, query_row_status(q, err));
    u->count += status == CKD_OK;
    return status;
}

/* Joins rows and text in one allocation. NULL if out of memory. */
static ckd_tensor_usage *join_text(const tensor_usage *u) {
    ckd_tensor_usage *all = malloc(u->count * sizeof(*all) + u->text_size + 1);
    if (all) {
        char *text = (char *)(all + u->count);
        memcpy(text, u->text ? u->text : "", u->text_size);
        for (size_t i = 0; i < u->count; i++) {
            all[i] = u->rows[i];
            all[i].run = text + u->run_at[i];
            all[i].name = text + u->name_at[i];
        }
    }
    return all;
}

ckd_status catalog_usage_by_tensor(ckd_tensor_usage **rows, size_t *count, catalog *c, ckd_error *err) {
    tensor_usage u = {0};
    *rows = NULL;
    ckd_status status = snapshot_rows(c, S_TENSOR_TOTALS, NULL, tensor_row, &u, err);
    if (status == CKD_OK) {
        *rows = join_text(&u);
        status = *rows ? CKD_OK : err_nomem(err, u.text_size, "sums by tensor");
    }
    *count = status == CKD_OK ? u.count : 0;
    free(u.rows);
    free(u.run_at);
    free(u.name_at);
    free(u.text);
    return status;
}
