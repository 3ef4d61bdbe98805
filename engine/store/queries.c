/* Queries for checkpoints. Their errors say what the store has instead. */
#include <stdio.h>
#include <stdlib.h>

#include "engine/store/handle.h"

static void list_runs(char *text, size_t capacity, const catalog_names *runs) {
    size_t at = 0;
    text[0] = '\0';
    for (size_t i = 0; i < runs->count && at + 1 < capacity; i++) {
        int n = snprintf(text + at, capacity - at, "%s%s", i ? ", " : "", runs->names[i]);
        at += n > 0 ? (size_t)n : 0;
    }
}

typedef struct find_query {
    ckd_checkpoint *out;
    const char *run;
    uint64_t step;
} find_query;

/* The requested run, or the only one. */
static ckd_status resolve_run(char out[CKD_RUN_MAX + 1], catalog *c, const char *run, ckd_error *err) {
    catalog_names runs;
    ckd_status status = catalog_runs(&runs, c, err);
    if (status != CKD_OK) {
        return status;
    }
    char names[300];
    list_runs(names, sizeof(names), &runs);
    bool exists = false;
    for (size_t i = 0; run && i < runs.count; i++) {
        exists = exists || strcmp(runs.names[i], run) == 0;
    }
    if (runs.count == 0) {
        status = err_set(err, CKD_E_NOT_FOUND, "the store has no checkpoints yet");
    } else if (run && !exists) {
        status =
            err_set(err, CKD_E_NOT_FOUND, "the store has no run '%.*s'; it has: %s", CKD_RUN_MAX, run, names);
    } else if (!run && runs.count > 1) {
        status = err_set(err, CKD_E_INVALID, "the store has several runs, name one of: %s", names);
    } else {
        snprintf(out, CKD_RUN_MAX + 1, "%s", run ? run : runs.names[0]);
    }
    catalog_names_free(&runs);
    return status;
}

static ckd_status query_find(void *context, catalog *c, ckd_error *err) {
    const find_query *q = context;
    char name[CKD_RUN_MAX + 1];
    ckd_status status = resolve_run(name, c, q->run, err);
    if (status != CKD_OK) {
        return status;
    }
    ckd_checkpoint newest;
    status = catalog_newest(&newest, c, name, UINT64_MAX, err);
    if (status == CKD_OK && q->step == CKD_LATEST) {
        *q->out = newest;
    }
    if (status != CKD_OK || q->step == CKD_LATEST) {
        return status;
    }
    status = catalog_find(q->out, c, name, q->step, err);
    if (status == CKD_E_NOT_FOUND) {
        status = err_set(err, CKD_E_NOT_FOUND, "run '%s' has no checkpoint at step %llu; its newest is %llu",
                         name, (unsigned long long)q->step, (unsigned long long)newest.step);
    }
    return status;
}

ckd_status store_find(ckd_checkpoint *out, ckd_store *store, const char *run, uint64_t step, ckd_error *err) {
    memset(out, 0, sizeof(*out));
    find_query q = {out, run, step};
    return store_query(store, query_find, &q, err);
}

ckd_status ckd_store_find(ckd_checkpoint *out, ckd_store *store, const char *run, uint64_t step,
                          ckd_error *err) {
    return store_find(out, store, run, step, err);
}

typedef struct id_query {
    void *out;
    const ckd_id *id;
} id_query;

static ckd_status query_find_id(void *context, catalog *c, ckd_error *err) {
    const id_query *q = context;
    return catalog_find_id(q->out, c, q->id, err);
}

ckd_status store_find_id(ckd_checkpoint *out, ckd_store *store, const ckd_id *id, ckd_error *err) {
    memset(out, 0, sizeof(*out));
    id_query q = {out, id};
    ckd_status status = store_query(store, query_find_id, &q, err);
    if (status == CKD_E_NOT_FOUND) {
        char hex[CKD_ID_TEXT];
        ckd_id_text(hex, id);
        status = err_set(err, CKD_E_NOT_FOUND, "the store has no checkpoint %s", hex);
    }
    return status;
}

typedef struct list_query {
    ckd_checkpoint_list *out;
    const char *run;
} list_query;

static ckd_status query_list(void *context, catalog *c, ckd_error *err) {
    const list_query *q = context;
    return catalog_list(q->out, c, q->run, err);
}

ckd_status store_list(ckd_checkpoint_list *out, ckd_store *store, const char *run, ckd_error *err) {
    memset(out, 0, sizeof(*out));
    list_query q = {out, run};
    return store_query(store, query_list, &q, err);
}

ckd_status ckd_store_list(ckd_checkpoint_list **out, ckd_store *store, const char *run, ckd_error *err) {
    *out = NULL;
    ckd_checkpoint_list *list = calloc(1, sizeof(*list));
    if (!list) {
        return err_nomem(err, sizeof(*list), "a list");
    }
    ckd_status status = store_list(list, store, run, err);
    if (status != CKD_OK) {
        free(list);
        return status;
    }
    *out = list;
    return CKD_OK;
}

void ckd_checkpoint_list_free(ckd_checkpoint_list *list) {
    if (list) {
        catalog_list_free(list);
        free(list);
    }
}

/* ---- how long saves took ---- */

typedef struct timing_query {
    ckd_timeline *timeline;
    const char *run;
} timing_query;

static ckd_status query_timing(void *context, catalog *c, ckd_error *err) {
    timing_query *q = context;
    return catalog_timings(q->timeline, c, q->run, err);
}

ckd_status ckd_store_timeline(ckd_timeline **out, ckd_store *store, const char *run, ckd_error *err) {
    *out = NULL;
    ckd_timeline *timeline = calloc(1, sizeof(*timeline));
    if (!timeline) {
        return err_nomem(err, sizeof(*timeline), "a timeline");
    }
    timing_query query = {timeline, run};
    ckd_status status = store_query(store, query_timing, &query, err);
    if (status != CKD_OK) {
        free(timeline);
        return status;
    }
    *out = timeline;
    return CKD_OK;
}

void ckd_timeline_free(ckd_timeline *timeline) {
    if (timeline) {
        free(timeline->items);
        free(timeline->stages);
        free(timeline);
    }
}
