/* How long saves took, stage by stage. */
#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"
#include "catalog/catalog_db.h"

typedef struct timeline_rows {
    ckd_save_times *items;
    size_t count, capacity;
} timeline_rows;

/* Where the time of a stage goes; NULL: a stage of another version, which nobody asks for. */
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

/* The save of (run, step): the last one, or a new one behind it. Rows come by run and step. */
static ckd_status save_of(ckd_save_times **out, timeline_rows *rows, const char *run, uint64_t step,
                          ckd_error *err) {
    ckd_save_times *last = rows->count ? &rows->items[rows->count - 1] : NULL;
    if (!last || last->step != step || strcmp(last->run, run) != 0) {
        ckd_save_times *grown = list_grow(rows->items, rows->count, &rows->capacity, sizeof(*grown), err);
        if (!grown) {
            return CKD_E_NOMEM;
        }
        rows->items = grown;
        last = &rows->items[rows->count++];
        *last = (ckd_save_times){.step = step};
        memcpy(last->run, run, strlen(run) + 1);
    }
    *out = last;
    return CKD_OK;
}

static ckd_status add_row(timeline_rows *rows, query *q, ckd_error *err) {
    const char *run = column_text(q, 0, 1, CKD_RUN_MAX);
    uint64_t step = column_u64(q, 1, INT64_MAX), created = column_u64(q, 2, INT64_MAX),
             raw = column_u64(q, 3, INT64_MAX), stored = column_u64(q, 4, INT64_MAX);
    const char *stage = column_text(q, 5, 1, 63);
    uint64_t ns = column_u64(q, 6, INT64_MAX);
    ckd_save_times *save = NULL;
    ckd_status status = query_row_status(q, err);
    if (status == CKD_OK) {
        status = save_of(&save, rows, run, step, err);
    }
    if (status == CKD_OK) {
        save->created_ns = created;
        save->raw_bytes = raw;
        save->stored_bytes = stored;
        uint64_t *place = place_of(save, stage);
        if (place) {
            *place = ns;
        }
    }
    return status;
}

ckd_status catalog_timings(ckd_save_times **out, size_t *count, catalog *c, const char *run, ckd_error *err) {
    timeline_rows rows = {0};
    query q;
    bool row, opened;
    *out = NULL;
    *count = 0;
    ckd_status status = snapshot_begin(c, &opened, err);
    if (status != CKD_OK) {
        return status;
    }
    status = query_begin(&q, c, run ? S_TIMINGS_RUN : S_TIMINGS, err);
    if (status == CKD_OK && run) {
        bind_text(&q, 1, run);
    }
    while (status == CKD_OK && (status = query_next(&row, &q, err)) == CKD_OK && row) {
        status = add_row(&rows, &q, err);
    }
    query_end(&q);
    snapshot_end(c, opened);
    if (status != CKD_OK) {
        free(rows.items);
        return status;
    }
    *out = rows.items;
    *count = rows.count;
    return CKD_OK;
}
