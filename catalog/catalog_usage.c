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

/* ---- files ---- */

ckd_status catalog_usage_files(catalog_files *out, catalog *c, ckd_error *err) {
    query q;
    bool row = false, opened;
    *out = (catalog_files){0};
    ckd_status status = snapshot_begin(c, &opened, err);
    if (status != CKD_OK) {
        return status;
    }
    status = query_begin(&q, c, S_ALL_FILES, err);
    if (status == CKD_OK) {
        status = query_next(&row, &q, err);
    }
    if (status == CKD_OK && row) {
        catalog_files f = {.count = column_u64(&q, 0, INT64_MAX)};
        f.chunk_bytes = f.count ? column_u64(&q, 1, INT64_MAX) : 0; /* sums of nothing are NULL */
        f.manifest_bytes = f.count ? column_u64(&q, 2, INT64_MAX) : 0;
        status = query_row_status(&q, err);
        *out = status == CKD_OK ? f : *out;
    }
    query_end(&q);
    snapshot_end(c, opened);
    return status;
}

/* ---- by checkpoint ---- */

static ckd_status checkpoint_roles(ckd_checkpoint_roles *rows, const ckd_checkpoint_list *list, query *q,
                                   ckd_error *err) {
    size_t at = 0;
    bool row;
    ckd_status status;
    while ((status = query_next(&row, q, err)) == CKD_OK && row) {
        ckd_id id;
        column_id(&id, q, 0, false);
        uint32_t role = column_u32(q, 1, CKD_ROLE_WEIGHT, CKD_ROLE_OTHER);
        ckd_role_bytes sums = {column_u64(q, 2, INT64_MAX), column_u64(q, 3, INT64_MAX),
                               column_u64(q, 4, INT64_MAX)};
        status = query_row_status(q, err);
        if (status != CKD_OK) {
            return status;
        }
        while (at < list->count && memcmp(&list->items[at].id, &id, sizeof(id)) != 0) {
            at++; /* it has no tensors */
        }
        if (at == list->count) {
            return catalog_damaged(q->c, err, "sums by role are out of order");
        }
        rows[at].roles[role] = sums;
    }
    return status;
}

ckd_status catalog_usage_by_checkpoint(ckd_checkpoint_roles **rows, const ckd_checkpoint_list *list,
                                       catalog *c, ckd_error *err) {
    query q;
    bool opened;
    *rows = NULL;
    ckd_status status = snapshot_begin(c, &opened, err);
    if (status != CKD_OK) {
        return status;
    }
    ckd_checkpoint_roles *all = calloc(list->count + 1, sizeof(*all));
    status = query_begin(&q, c, S_CHECKPOINT_ROLES, err);
    if (status == CKD_OK) {
        status = all ? checkpoint_roles(all, list, &q, err)
                     : err_nomem(err, list->count * sizeof(*all), "sums by role");
    }
    query_end(&q);
    snapshot_end(c, opened);
    if (status != CKD_OK) {
        free(all);
        return status;
    }
    *rows = all;
    return CKD_OK;
}

/* ---- by tensor ---- */

/* While they are collected, names are places in `text`, which moves as it grows. */
typedef struct tensor_usage {
    ckd_tensor_usage *rows;
    size_t count, capacity;
    size_t *run_at, *name_at;
    size_t run_capacity, name_capacity;
    char *text;
    size_t used, room;
} tensor_usage;

static ckd_status keep_text(size_t *at, tensor_usage *u, const char *text, ckd_error *err) {
    size_t size = strlen(text) + 1;
    if (u->room - u->used < size) {
        size_t room = 2 * u->room + size;
        char *grown = realloc(u->text, room);
        if (!grown) {
            return err_nomem(err, room, "names of tensors");
        }
        u->text = grown;
        u->room = room;
    }
    memcpy(u->text + u->used, text, size);
    *at = u->used;
    u->used += size;
    return CKD_OK;
}

static ckd_status make_room(tensor_usage *u, ckd_error *err) {
    ckd_tensor_usage *rows = list_grow(u->rows, u->count, &u->capacity, sizeof(*rows), err);
    u->rows = rows ? rows : u->rows;
    size_t *run_at = rows ? list_grow(u->run_at, u->count, &u->run_capacity, sizeof(*run_at), err) : NULL;
    u->run_at = run_at ? run_at : u->run_at;
    size_t *name_at =
        run_at ? list_grow(u->name_at, u->count, &u->name_capacity, sizeof(*name_at), err) : NULL;
    u->name_at = name_at ? name_at : u->name_at;
    return name_at ? CKD_OK : CKD_E_NOMEM;
}

/* The run of the row is that of the row before, most often. */
static ckd_status tensor_row(tensor_usage *u, query *q, ckd_error *err) {
    ckd_status status = make_room(u, err);
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
    if (status == CKD_OK) {
        status = keep_text(&u->name_at[i], u, column_text(q, 1, 1, CKD_NAME_MAX), err);
    }
    u->rows[i] = (ckd_tensor_usage){.role = (ckd_role)column_u32(q, 2, CKD_ROLE_WEIGHT, CKD_ROLE_OTHER),
                                    .checkpoints = column_u64(q, 3, INT64_MAX),
                                    .elements = column_u64(q, 4, INT64_MAX),
                                    .raw_bytes = column_u64(q, 5, INT64_MAX),
                                    .stored_bytes = column_u64(q, 6, INT64_MAX)};
    if (status == CKD_OK) {
        status = query_row_status(q, err);
    }
    u->count += status == CKD_OK;
    return status;
}

/* Rows and text in one piece. NULL if out of memory. */
static ckd_tensor_usage *join_text(const tensor_usage *u) {
    ckd_tensor_usage *all = malloc(u->count * sizeof(*all) + u->used + 1);
    if (all) {
        char *text = (char *)(all + u->count);
        memcpy(text, u->text ? u->text : "", u->used);
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
    query q;
    bool row, opened;
    *rows = NULL;
    *count = 0;
    ckd_status status = snapshot_begin(c, &opened, err);
    if (status != CKD_OK) {
        return status;
    }
    status = query_begin(&q, c, S_TENSOR_TOTALS, err);
    while (status == CKD_OK && (status = query_next(&row, &q, err)) == CKD_OK && row) {
        status = tensor_row(&u, &q, err);
    }
    query_end(&q);
    snapshot_end(c, opened);
    if (status == CKD_OK) {
        *rows = join_text(&u);
        status = *rows ? CKD_OK : err_nomem(err, u.used, "sums by tensor");
    }
    *count = status == CKD_OK ? u.count : 0;
    free(u.rows);
    free(u.run_at);
    free(u.name_at);
    free(u.text);
    return status;
}
