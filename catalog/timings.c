/* Caches that manifests do not hold: durations of saves, and when chunk files were last verified. */
#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"
#include "base/vocabulary.h"
#include "catalog/db.h"

typedef struct timeline_rows {
    ckd_save_times *items;
    size_t count, capacity;
    ckd_stage_times *stages;
    size_t stage_count, stage_capacity;
    size_t at; /* index of the save whose stages were found last */
} timeline_rows;

/* Returns 0 for a stage of another version. */
static ckd_stage stage_named(const char *name) {
    uint32_t stage = CKD_STAGE_LAST;
    while (stage > 0 && strcmp(stage_name(stage), name) != 0) {
        stage--;
    }
    return (ckd_stage)stage;
}

/* Returns the field for a stage's time; NULL for a stage of another version, which is ignored. */
static uint64_t *place_of(ckd_save_times *save, const char *stage) {
    const struct {
        const char *name;
        uint64_t *place;
    } places[] = {{"stall", &save->stall_ns}, {"analyse", &save->analyse_ns}, {"encode", &save->encode_ns},
                  {"write", &save->write_ns}, {"sync", &save->sync_ns},       {"total", &save->total_ns}};
    for (size_t i = 0; i < sizeof(places) / sizeof(places[0]); i++) {
        if (strcmp(places[i].name, stage) == 0) {
            return places[i].place;
        }
    }
    return NULL;
}

/* Finds the save of (run, step): the last one, or a new one after it, as rows are sorted by run and step. */
static ckd_status save_of(ckd_save_times **out, timeline_rows *rows, const char *run, uint64_t step,
                          ckd_error *err) {
    ckd_save_times *last = rows->count ? &rows->items[rows->count - 1] : NULL;
    if (!last || last->step != step || strcmp(last->run, run) != 0) {
        if (ARRAY_GROW(rows->items, rows->capacity, rows->count + 1, "a list from the catalog", err) !=
            CKD_OK) {
            return CKD_E_NOMEM;
        }
        last = &rows->items[rows->count++];
        *last = (ckd_save_times){.step = step};
        memcpy(last->run, run, strlen(run) + 1);
    }
    *out = last;
    return CKD_OK;
}

static ckd_status add_row(void *context, query *q, ckd_error *err) {
    timeline_rows *rows = context;
    const char *run = column_text(q, 0, 1, CKD_RUN_MAX);
    uint64_t step = column_u64(q, 1, INT64_MAX), created = column_u64(q, 2, INT64_MAX),
             raw = column_u64(q, 3, INT64_MAX), stored = column_u64(q, 4, INT64_MAX);
    const char *stage = column_text(q, 5, 1, 63);
    uint64_t ns = column_u64(q, 6, INT64_MAX), byte_count = column_u64(q, 7, INT64_MAX);
    ckd_save_times *save = NULL;
    ckd_status status = query_row_status(q, err);
    THEN(status, save_of(&save, rows, run, step, err));
    if (status == CKD_OK) {
        save->created_ns = created;
        save->raw_bytes = raw;
        save->stored_bytes = stored;
        uint64_t *place = place_of(save, stage);
        if (place) {
            *place = ns;
        }
        if (place == &save->write_ns) {
            save->written_bytes = byte_count;
        }
    }
    return status;
}

/*
 * Advances to the save of a rank's stage. Both lists are sorted by run and step. Returns false if the save has no
 * totals.
 */
static bool find_save(timeline_rows *rows, const char *run, uint64_t step) {
    for (; rows->at < rows->count; rows->at++) {
        const ckd_save_times *save = &rows->items[rows->at];
        int order = strcmp(save->run, run);
        order = order ? order : (save->step > step) - (save->step < step);
        if (order >= 0) {
            return order == 0;
        }
    }
    return false;
}

static ckd_status add_stage(void *context, query *q, ckd_error *err) {
    timeline_rows *rows = context;
    const char *run = column_text(q, 0, 1, CKD_RUN_MAX);
    uint64_t step = column_u64(q, 1, INT64_MAX);
    ckd_stage_times s = {.rank = column_u32(q, 2, 0, UINT32_MAX),
                         .stage = stage_named(column_text(q, 3, 1, STAGE_MAX)),
                         .begin_ns = column_u64(q, 4, INT64_MAX)};
    s.end_ns = column_u64(q, 5, INT64_MAX);
    s.work_ns = column_u64(q, 6, INT64_MAX);
    s.bytes = column_u64(q, 7, INT64_MAX);
    ckd_status status = query_row_status(q, err);
    if (status != CKD_OK || !s.stage || !find_save(rows, run, step)) {
        return status;
    }
    s.save = rows->at;
    if (ARRAY_GROW(rows->stages, rows->stage_capacity, rows->stage_count + 1, "a list from the catalog",
                   err) != CKD_OK) {
        return CKD_E_NOMEM;
    }
    rows->stages[rows->stage_count++] = s;
    return CKD_OK;
}

static int by_stage(const void *a, const void *b) {
    const ckd_stage_times *x = a, *y = b;
    int order = (x->save > y->save) - (x->save < y->save);
    order = order ? order : (x->rank > y->rank) - (x->rank < y->rank);
    return order ? order : (x->stage > y->stage) - (x->stage < y->stage);
}

ckd_status catalog_timings(ckd_timeline *out, catalog *c, const char *run, ckd_error *err) {
    timeline_rows rows = {0};
    bool opened;
    *out = (ckd_timeline){0};
    ckd_status status = snapshot_begin(c, &opened, err);
    if (status != CKD_OK) {
        return status;
    }
    status = query_rows(c, run ? S_TIMINGS_RUN : S_TIMINGS, run, add_row, &rows, err);
    THEN(status, query_rows(c, run ? S_RANK_TIMINGS_RUN : S_RANK_TIMINGS, run, add_stage, &rows, err));
    snapshot_end(c, opened);
    if (status != CKD_OK) {
        free(rows.items);
        free(rows.stages);
        return status;
    }
    if (rows.stage_count) {
        qsort(rows.stages, rows.stage_count, sizeof(*rows.stages), by_stage);
    }
    *out = (ckd_timeline){rows.count, rows.items, rows.stage_count, rows.stages};
    return CKD_OK;
}

/* ---- when chunk files were last verified ---- */

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
                       "a verified chunk file needs a name of 1 to %d bytes and a "
                       "time below 2^63",
                       FILE_NAME_MAX);
    }
    status = query_begin(&q, c, S_FILE_VERIFIED, err);
    bind_text(&q, 1, name);
    bind_u64(&q, 2, ns);
    return query_run(&q, status, err);
}
