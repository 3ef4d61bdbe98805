/*
 * Cells: blocks of a large lossy matrix that cover some rows of some columns, and the factors that they share with
 * their neighbours.
 */
#include <stdlib.h>

#include "engine/lossy/lossy.h"
#include "engine/save/lossy.h"

bool grid_shares_rows(const lossy_tile *t) {
    return t->plan.lattice.row || t->plan.lattice.factor;
}

/* ---- a panel's values ---- */

#define ROWS_AT_A_TIME 64u

typedef struct gathering {
    const lossy_tile *tile;
    uint8_t *original;
    float *now, *parent_values; /* NULL: not needed */
    uint64_t first, width, rows;
} gathering;

static void gather(void *to, const void *from, size_t size, const gathering *g, uint64_t row, uint64_t rows) {
    for (; to && rows > 0; rows--, row++) {
        memcpy((uint8_t *)to + row * g->width * size,
               (const uint8_t *)from + (row * g->tile->shape.columns + g->first) * size, g->width * size);
    }
}

static ckd_status gather_rows(void *context, size_t index, uint32_t worker, ckd_error *err) {
    (void)worker;
    (void)err;
    const gathering *g = context;
    uint64_t row = index * (uint64_t)ROWS_AT_A_TIME, remaining = g->rows - row;
    uint64_t rows = remaining < ROWS_AT_A_TIME ? remaining : ROWS_AT_A_TIME;
    gather(g->original, g->tile->input.values, ckd_dtype_size(g->tile->dtype), g, row, rows);
    gather(g->now, g->tile->input.now, sizeof(float), g, row, rows);
    gather(g->parent_values, g->tile->input.parent_values, sizeof(float), g, row, rows);
    return CKD_OK;
}

static ckd_status gather_panel(tile_part *part, ckd_save *save, const lossy_tile *t, uint64_t first,
                               uint64_t width, ckd_error *err) {
    lossy_tile *out = &part->tile;
    gathering g = {.tile = t, .first = first, .width = width, .rows = t->shape.count / t->shape.columns};
    uint64_t n = g.rows * width;
    bool same = (const void *)t->input.now == t->input.values;
    g.now = bytes_scratch(&part->now, n * sizeof(float), "a panel of a tensor", err);
    g.original = !g.now || same ? NULL
                                : bytes_scratch(&part->original, n * ckd_dtype_size(t->dtype),
                                                "a panel of a tensor", err);
    g.parent_values = !t->input.parent_values ? NULL
                                              : bytes_scratch(&part->parent_values, n * sizeof(float),
                                                              "a panel of a tensor", err);
    if (!g.now || (!same && !g.original) || (t->input.parent_values && !g.parent_values)) {
        return CKD_E_NOMEM;
    }
    out->input.values = same ? (const void *)g.now : g.original;
    out->input.now = g.now;
    out->input.parent_values = g.parent_values;
    return pool_run(save->store->pool, (size_t)((g.rows + ROWS_AT_A_TIME - 1) / ROWS_AT_A_TIME), gather_rows,
                    &g, err);
}

ckd_status grid_of_panel(tile_part *part, ckd_save *save, const lossy_tile *t, const save_panel *panel,
                         ckd_error *err) {
    lossy_tile *out = &part->tile;
    uint64_t first = panel->first, width = panel->rows.width, rows = t->shape.count / t->shape.columns;
    *out = *t;
    out->shape.first = t->shape.first / t->shape.columns * width;
    out->shape.count = rows * width;
    out->shape.columns = width;
    out->input.sampled = t->input.sampled + rows * first;
    out->context.pair.stride = t->shape.columns;
    out->context.pair.first = first;
    out->context.pair.width = width;
    lattice_block *plan = &out->plan.lattice;
    plan->count = out->shape.count;
    plan->columns = plan->own.columns = width;
    plan->own.step = plan->own.step ? plan->own.step + first : NULL;
    plan->own.factor = plan->own.factor ? plan->own.factor + first * plan->own.rank : NULL;
    return t->input.device ? lossy_device_panel(out, first, err)
                           : gather_panel(part, save, t, first, width, err);
}

/* ---- rows ---- */

ckd_status grid_side_record(hash128 *content, ckd_save *save, save_append *to, const shared_part *part,
                            ckd_error *err) {
    save_side *side = &to->sides[to->side_count];
    bytes *raw = &side->data;
    bytes_clear(raw);
    ckd_status status = lattice_columns_encode(raw, part->factors, &save->lossy.tiles->scratch,
                                               coder_symbols(save->lossy.tiles->loaders[0].coder), err);
    if (status != CKD_OK) {
        return status;
    }
    *content = content_hash(raw->data, raw->size);
    side->record = (record){.kind = RECORD_SIDE,
                            .tensor = part->tensor,
                            .region = part->span.region,
                            .first = part->span.first,
                            .count = part->span.count,
                            .raw_size = raw->size,
                            .stored_size = raw->size,
                            .content = *content,
                            .chain_stored = raw->size,
                            .base_stored = raw->size};
    to->side_count++;
    to->side_bytes += raw->size;
    return CKD_OK;
}

static ckd_status write_rows(shared_rows *to, save_append *before, const lossy_region *r,
                             const lattice_block *plan, ckd_error *err) {
    uint32_t rank = plan->factor ? plan->own.rank : 0;
    static const int32_t no_shift[LATTICE_MAX_RANK];
    lattice_columns rows = {.columns = to->rows,
                            .step = plan->row ? plan->row + to->row : NULL,
                            .rank = rank,
                            .shift = no_shift,
                            .factor = rank ? plan->factor + to->row * rank : NULL};
    shared_part part = {&rows, r->context.tensor, to->span};
    return grid_side_record(&to->content, r->save, before, &part, err);
}

ckd_status grid_rows(block_job *job, save_slot *slot, const lossy_region *r, const save_panel *panel,
                     ckd_error *err) {
    row_records *records = &r->save->lossy.tiles->row_records;
    const lossy_tile *t = &slot->region_job->lossy->tile;
    uint64_t row = (job->input.first - t->shape.first) / t->shape.columns,
             rows = job->input.count / t->shape.columns;
    for (size_t i = 0; i < records->count; i++) {
        if (records->items[i].row == row && records->items[i].rows == rows) {
            job->output.rows = records->items[i];
            return CKD_OK;
        }
    }
    if (ARRAY_GROW(records->items, records->capacity, records->count + 1, "coding scratch", err) != CKD_OK) {
        return CKD_E_NOMEM;
    }
    uint64_t above = t->shape.first / t->shape.columns; /* rows of the matrix before the tile */
    job->output.rows =
        (shared_rows){.row = row,
                      .rows = rows,
                      .span = {r->context.region, (above + row) * panel->columns, rows * panel->columns}};
    ckd_status status = write_rows(&job->output.rows, &slot->append, r, &t->plan.lattice, err);
    if (status == CKD_OK) {
        records->items[records->count++] = job->output.rows;
    }
    return status;
}
