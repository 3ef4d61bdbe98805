/* The state that all files of a compaction share: checkpoints that stay, loads, views, limits, pace. */
#include <stdlib.h>

#include "engine/common/common.h"
#include "engine/compact/internal.h"
#include "engine/store/store.h"

bool compact_is_victim(const compaction *c, const ckd_id *checkpoint) {
    return !id_among(checkpoint, c->remaining, c->remaining_count);
}

/* The index of the checkpoint's table, or the place to insert it. */
static size_t table_place(const compaction *c, const ckd_id *checkpoint) {
    size_t low = 0, high = c->table_count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (id_compare(&c->tables[middle].checkpoint, checkpoint) < 0) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

const load_table *compact_table(const compaction *c, const ckd_id *checkpoint) {
    size_t at = table_place(c, checkpoint);
    return at < c->table_count && id_equal(&c->tables[at].checkpoint, checkpoint) ? &c->tables[at] : NULL;
}

ckd_status compact_record_loads(compaction *c, const ckd_id *checkpoint, block_load *blocks, size_t count,
                                ckd_error *err) {
    if (ARRAY_GROW(c->tables, c->table_capacity, c->table_count + 1, "checkpoints", err) != CKD_OK) {
        free(blocks);
        return CKD_E_NOMEM;
    }
    size_t at = table_place(c, checkpoint);
    memmove(c->tables + at + 1, c->tables + at, (c->table_count - at) * sizeof(*c->tables));
    c->tables[at] = (load_table){*checkpoint, count, blocks};
    c->table_count++;
    return CKD_OK;
}

ckd_status compact_record_proven(compaction *c, const file_ref *files, size_t count, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < count && status == CKD_OK; i++) {
        status = hash_set_add(&c->checked.intact, hash64(&files[i].id, sizeof(ckd_id)), err);
    }
    return status;
}

void compact_close_views(compaction *c) {
    views_free(&c->views);
    views_init(&c->views, c->store);
    c->views.use_materialized = false; /* damage must be found, not hidden by a copy */
}

ckd_status compact_report_progress(void *context, ckd_error *err) {
    compaction *c = context;
    if (!c->options.on_progress) {
        return CKD_OK;
    }
    float_mode_leave(c->callers_mode);
    int stop = c->options.on_progress(c->options.progress_context,
                                      c->done < c->to_be_done ? c->done : c->to_be_done, c->to_be_done);
    c->callers_mode = float_mode_enter();
    return stop ? err_set(err, CKD_E_CANCELLED, "the compaction was cancelled; what was done stays done")
                : CKD_OK;
}

bool compact_limit_reached(const compaction *c) {
    return c->spent > c->limits.move_max;
}

bool compact_allows_run(const compaction *c, const char *run) {
    return !c->limits.waste_run || strcmp(c->limits.waste_run, run) == 0;
}

ckd_status compact_throttle(compaction *c, uint64_t size, uint64_t done, ckd_error *err) {
    c->moved += size;
    c->done += done;
    return rate_wait(c->options.bytes_per_s, c->begun_ns, c->moved, compact_report_progress, c, err);
}

bool compact_is_local_error(ckd_status status, const ckd_error *why) {
    return status == CKD_E_NOT_FOUND || status == CKD_E_EXISTS || status == CKD_E_UNSUPPORTED ||
           is_damage(status, why);
}
