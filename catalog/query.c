/* Looks up checkpoints and runs. Lists must be in order: this check alone detects most damaged B-trees. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "catalog/db.h"

/* ---- checkpoints ---- */

/* Reads the columns of CHECKPOINT_COLUMNS in sql.c. */
static ckd_status checkpoint_read(ckd_checkpoint *out, query *q, ckd_error *err) {
    static const ckd_id zero;
    memset(out, 0, sizeof(*out));
    const char *run = column_text(q, 0, 1, CKD_RUN_MAX);
    memcpy(out->run, run, strlen(run) + 1);
    out->step = column_u64(q, 1, INT64_MAX);
    column_id(&out->id, q, 2, false);
    column_id(&out->parent, q, 3, true);
    column_id(&out->resumed_from, q, 4, true);
    out->generation = column_u32(q, 5, 0, UINT32_MAX);
    out->kind = (ckd_kind)column_u32(q, 6, CKD_BASE, CKD_LOSSY_BASE);
    out->fidelity = (ckd_fidelity)column_u32(q, 7, CKD_EXACT, CKD_COARSE);
    out->lossy_resumes = column_u32(q, 8, 0, UINT32_MAX);
    out->depth = column_u32(q, 9, 0, UINT32_MAX);
    out->world = column_u32(q, 10, 0, UINT32_MAX);
    out->tensors = column_u64(q, 11, INT64_MAX);
    out->raw_bytes = column_u64(q, 12, INT64_MAX);
    out->stored_bytes = column_u64(q, 13, INT64_MAX);
    out->load_cost = column_real(q, 14);
    out->created_ns = column_u64(q, 15, INT64_MAX);
    out->metric = column_real(q, 16);
    const char *metric = column_text(q, 17, 0, sizeof(out->metric_name) - 1);
    memcpy(out->metric_name, metric, strlen(metric) + 1);
    out->suspect = column_u32(q, 18, 0, UINT32_MAX);
    ckd_status status = query_row_status(q, err);
    if (status != CKD_OK) {
        return status;
    }
    bool parent = memcmp(&out->parent, &zero, sizeof(zero)) != 0;
    if (!run_name_valid(out->run) || memcmp(&out->id, &zero, sizeof(zero)) == 0 ||
        (out->kind == CKD_BASE && parent) || (out->kind == CKD_DELTA && !parent)) {
        return catalog_damaged(q->c, err, "a checkpoint has contradictory fields");
    }
    return CKD_OK;
}

/* Reads the only row of a prepared query. NOT_FOUND if there is none. */
static ckd_status checkpoint_only(ckd_checkpoint *out, query *q, ckd_error *err) {
    bool row = false;
    ckd_status status = query_next(&row, q, err);
    THEN(status, row ? checkpoint_read(out, q, err) : err_set(err, CKD_E_NOT_FOUND, "no such checkpoint"));
    if (status != CKD_OK) {
        memset(out, 0, sizeof(*out));
    }
    return status;
}

static ckd_status find_by_step(ckd_checkpoint *out, catalog *c, statement which, const char *run,
                               uint64_t step, ckd_error *err) {
    query q;
    bool opened;
    memset(out, 0, sizeof(*out));
    ckd_status status = snapshot_begin(c, &opened, err);
    if (status != CKD_OK) {
        return status;
    }
    status = query_begin(&q, c, which, err);
    if (status == CKD_OK) {
        bind_text(&q, 1, run);
        bind_u64(&q, 2, step);
        status = checkpoint_only(out, &q, err);
    }
    query_end(&q);
    snapshot_end(c, opened);
    return status;
}

ckd_status catalog_find(ckd_checkpoint *out, catalog *c, const char *run, uint64_t step, ckd_error *err) {
    memset(out, 0, sizeof(*out));
    if (step > INT64_MAX) {
        return err_set(err, CKD_E_NOT_FOUND, "no such checkpoint");
    }
    return find_by_step(out, c, S_FIND, run, step, err);
}

ckd_status catalog_newest(ckd_checkpoint *out, catalog *c, const char *run, uint64_t before, ckd_error *err) {
    memset(out, 0, sizeof(*out));
    if (before == 0) {
        return err_set(err, CKD_E_NOT_FOUND, "no such checkpoint");
    }
    return find_by_step(out, c, S_NEWEST, run, before - 1 > INT64_MAX ? INT64_MAX : before - 1, err);
}

ckd_status catalog_newest_healthy(ckd_checkpoint *out, catalog *c, const char *run, uint64_t before,
                                  ckd_error *err) {
    ckd_status status = catalog_newest(out, c, run, before, err);
    while (status == CKD_OK && out->suspect) {
        status = catalog_newest(out, c, run, out->step, err);
    }
    return status;
}

ckd_status catalog_find_id(ckd_checkpoint *out, catalog *c, const ckd_id *id, ckd_error *err) {
    query q;
    bool opened;
    memset(out, 0, sizeof(*out));
    ckd_status status = snapshot_begin(c, &opened, err);
    if (status != CKD_OK) {
        return status;
    }
    status = query_begin(&q, c, S_FIND_ID, err);
    if (status == CKD_OK) {
        bind_blob16(&q, 1, id->bytes);
        status = checkpoint_only(out, &q, err);
    }
    query_end(&q);
    snapshot_end(c, opened);
    return status;
}

static ckd_status visit_places(query *q, catalog_place_fn visit, void *context, ckd_error *err) {
    char last[CKD_RUN_MAX + 1] = "";
    uint64_t last_step = 0;
    bool row, more = true;
    ckd_status status = CKD_OK;
    while (more && (status = query_next(&row, q, err)) == CKD_OK && row) {
        const char *run = column_text(q, 0, 1, CKD_RUN_MAX);
        uint64_t step = column_u64(q, 1, INT64_MAX);
        uint32_t generation = column_u32(q, 2, 0, UINT32_MAX);
        status = query_row_status(q, err);
        if (status != CKD_OK) {
            return status;
        }
        int order = strcmp(last, run);
        if (!run_name_valid(run) || order > 0 || (order == 0 && last_step >= step)) {
            return catalog_damaged(q->c, err, "checkpoints are out of order");
        }
        if (order) {
            snprintf(last, sizeof(last), "%s", run);
        }
        last_step = step;
        more = visit(context, last, step, generation);
    }
    return status;
}

ckd_status catalog_places(catalog *c, catalog_place_fn visit, void *context, ckd_error *err) {
    query q;
    bool opened;
    ckd_status status = snapshot_begin(c, &opened, err);
    if (status != CKD_OK) {
        return status;
    }
    status = query_begin(&q, c, S_PLACES, err);
    THEN(status, visit_places(&q, visit, context, err));
    query_end(&q);
    snapshot_end(c, opened);
    return status;
}

/* A list being read; it grows by doubling. */
typedef struct listing {
    ckd_checkpoint_list *out;
    size_t capacity;
} listing;

static ckd_status list_row(void *context, query *q, ckd_error *err) {
    listing *l = context;
    ckd_checkpoint_list *out = l->out;
    if (ARRAY_GROW(out->items, l->capacity, out->count + 1, "a list from the catalog", err) != CKD_OK) {
        return CKD_E_NOMEM;
    }
    ckd_checkpoint *now = &out->items[out->count];
    ckd_status status = checkpoint_read(now, q, err);
    if (status == CKD_OK && out->count) {
        int order = strcmp(now[-1].run, now->run);
        if (order > 0 || (order == 0 && now[-1].step >= now->step)) {
            return catalog_damaged(q->c, err, "checkpoints are out of order");
        }
    }
    out->count += status == CKD_OK;
    return status;
}

ckd_status catalog_list(ckd_checkpoint_list *out, catalog *c, const char *run, ckd_error *err) {
    listing l = {.out = out};
    *out = (ckd_checkpoint_list){0};
    ckd_status status = snapshot_rows(c, run ? S_LIST_RUN : S_LIST_ALL, run, list_row, &l, err);
    if (status != CKD_OK) {
        catalog_list_free(out);
    }
    return status;
}

void catalog_list_free(ckd_checkpoint_list *list) {
    if (list) {
        free(list->items);
        *list = (ckd_checkpoint_list){0};
    }
}

/* ---- runs ---- */

typedef struct naming {
    catalog_names *out;
    size_t capacity;
} naming;

static ckd_status run_row(void *context, query *q, ckd_error *err) {
    naming *n = context;
    catalog_names *out = n->out;
    const char *name = column_text(q, 0, 1, CKD_RUN_MAX);
    ckd_status status = query_row_status(q, err);
    if (status != CKD_OK) {
        return status;
    }
    if (!run_name_valid(name) || (out->count && strcmp(out->names[out->count - 1], name) >= 0)) {
        return catalog_damaged(q->c, err, "its run names are invalid or out of order");
    }
    if (ARRAY_GROW(out->names, n->capacity, out->count + 1, "a list from the catalog", err) != CKD_OK) {
        return CKD_E_NOMEM;
    }
    out->names[out->count] = strdup(name);
    if (!out->names[out->count]) {
        return err_nomem(err, strlen(name) + 1, "a name");
    }
    out->count++;
    return CKD_OK;
}

ckd_status catalog_runs(catalog_names *out, catalog *c, ckd_error *err) {
    naming n = {.out = out};
    *out = (catalog_names){0};
    ckd_status status = snapshot_rows(c, S_RUNS, NULL, run_row, &n, err);
    if (status != CKD_OK) {
        catalog_names_free(out);
    }
    return status;
}

void catalog_names_free(catalog_names *names) {
    if (names) {
        for (size_t i = 0; i < names->count; i++) {
            free(names->names[i]);
        }
        free(names->names);
        *names = (catalog_names){0};
    }
}
