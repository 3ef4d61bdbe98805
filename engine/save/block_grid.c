/*
 * Decides where a save cuts a large matrix into blocks, so that a load of some rows or columns reads little else. A
 * block is a stretch of a region's order. So panels of some columns are regions of their own, whose blocks are some of
 * their rows.
 *
 * Rows and columns are cut where shards are likely to begin, as torch.chunk cuts. These are eighths (and finer powers
 * of two), thirds, fifths, sevenths and sixths of the tensor's, unless two cuts would be too close. Further cuts keep
 * every side short enough. Cuts are those of the tensor, not of the region: a tensor that several ranks save is cut as
 * if one rank had saved it.
 */
#include <stdlib.h>
#include <string.h>

#include "engine/save/save.h"

#define RAW_ELEMENTS (UINT64_C(1) << 14)
#define CUT_ELEMENTS \
    (UINT64_C(1)     \
     << 20) /* smaller tensors stay whole: their blocks load fast. In elements: rounded copies are cut like masters */

/*
 * Raw blocks are smaller, as small blocks cost little there. A side of 4096 is long enough for sevenths; raw, for
 * sixths as well.
 */
block_sides save_exact_sides(const ckd_save *save) {
    return save->options.codec == CKD_CODEC_RAW ? (block_sides){64, 4, 50} : (block_sides){256, 32, 146};
}

/* Lossy blocks take a bit or two an element; smaller ones would cost more than they gain. */
save_grid save_default_grid(void) {
    return (save_grid){.row_sides = {512, 64, 440},
                       .column_sides = {512, 64, 440},
                       .elements = UINT64_C(1) << 22,
                       .columns = 2048};
}

/* ---- where a dimension is cut ---- */

static const uint64_t likely_shards[] = {2, 4, 8, 16, 32, 64, 3, 5, 7, 6}; /* most likely first */
enum { LIKELY = 1 + 3 + 7 + 15 + 31 + 63 + 2 + 4 + 6 + 5 }; /* number of these cuts, if no two coincide */

struct save_places {
    block_sides sides;
    uint64_t at[LIKELY + 1]; /* ascending; the last one is the dimension's end */
    size_t count;
};

/* Adds a cut unless it is too close to another one. */
static void add_place(save_places *p, uint64_t at) {
    size_t i = 0;
    while (i < p->count && p->at[i] < at) {
        i++;
    }
    uint64_t before = i ? at - p->at[i - 1] : at, after = i < p->count ? p->at[i] - at : 0;
    if (i < p->count && p->count <= LIKELY && before >= p->sides.min && after >= p->sides.min) {
        memmove(&p->at[i + 1], &p->at[i], (p->count - i) * sizeof(p->at[0]));
        p->at[i] = at;
        p->count++;
    }
}

/* Finds as many cuts as the dimension has room for. */
static void find_offsets(save_places *p, block_sides s, uint64_t length) {
    *p = (save_places){.sides = s, .at = {length}, .count = 1};
    for (size_t k = 0; k < sizeof(likely_shards) / sizeof(likely_shards[0]); k++) {
        uint64_t shards = likely_shards[k], shard_length = length / shards + (length % shards != 0);
        bool halves = shards % 2 == 0 && shards != 6; /* half of these cuts exist already */
        uint64_t cuts = halves ? shards / 2 : shards - 1;
        bool fits = halves ? shard_length >= s.max : (p->count + cuts) * s.target <= length;
        for (uint64_t i = 1; i < shards && i * shard_length < length && fits; i++) {
            add_place(p, i * shard_length);
        }
    }
}

/* Returns the first cut behind element `from` of the dimension. At most `max` elements lie between cuts. */
static uint64_t next_place(const save_places *p, uint64_t from, uint64_t max) {
    size_t i = 0;
    while (p->at[i] <= from) {
        i++;
    }
    uint64_t begin = i ? p->at[i - 1] : 0, length = p->at[i] - begin;
    uint64_t parts = (length + p->sides.max / 2) / p->sides.max, min = (length + max - 1) / max;
    parts = parts > min ? parts : min;
    uint64_t j = (from - begin) * parts / length + 1;
    uint64_t at = begin + length * j / parts;
    return at > from ? at : begin + length * (j + 1) / parts;
}

uint64_t save_block_elements(const ckd_save *save, const ckd_tensor *tensor) {
    return save->options.codec == CKD_CODEC_RAW && !tensor->optimizer ? RAW_ELEMENTS : CKD_BLOCK_ELEMENTS;
}

/*
 * Returns true if the parent has this region whole. It then stays whole, because deltas are cheapest between blocks
 * that are cut alike.
 */
static bool whole_in_parent(const tensor_context *t) {
    for (size_t i = 0; t->parent && i < t->parent->shard_count; i++) {
        if (region_equal(t->parent->shards[i].region, t->region, t->shape.ndim)) {
            return true;
        }
    }
    return false;
}

/* Returns the region in box form. */
static ckd_region box_of(const tensor_context *t) {
    ckd_region box = *t->region;
    if (box.kind == CKD_REGION_WHOLE) {
        box.kind = CKD_REGION_BOX;
        memcpy(box.lengths, t->shape.shape, sizeof(box.lengths));
    }
    return box;
}

/* A large master that is not cut. */
typedef struct whole_master {
    geometry shape;
    const ckd_region *region; /* the save's */
} whole_master;

ckd_status save_record_whole(save_registry *registry, const tensor_context *t, uint64_t elements,
                             ckd_error *err) {
    whole_master m = {t->shape, t->region};
    if (!block_is_master(t) || elements < CUT_ELEMENTS) {
        return CKD_OK;
    }
    bytes_put(&registry->whole_masters, &m, sizeof(m));
    return registry->whole_masters.failed ? err_nomem(err, sizeof(m), "what is known of masters") : CKD_OK;
}

/* Rounded copies are found by their blocks, so they must be cut as their masters are. */
static bool may_copy_whole_master(const save_registry *registry, const tensor_context *t) {
    const whole_master *m = (const whole_master *)(const void *)registry->whole_masters.data;
    bool found = false;
    if (t->tensor->dtype != CKD_BF16 && t->tensor->dtype != CKD_F16) {
        return false;
    }
    for (size_t i = 0; i < registry->whole_masters.size / sizeof(*m) && !found; i++) {
        found = m[i].shape.ndim == t->shape.ndim &&
                memcmp(m[i].shape.shape, t->shape.shape, t->shape.ndim * sizeof(t->shape.shape[0])) == 0 &&
                region_equal(m[i].region, t->region, t->shape.ndim);
    }
    return found;
}

/*
 * Only tensors are cut that are exact in this save and in later deltas. Tensors with an optimizer are not cut, because
 * its steps rely on blocks of the usual size.
 */
bool save_is_cut(const ckd_save *save, const ckd_tensor *tensor, const tensor_context *t, uint64_t elements) {
    uint32_t ndim = t->shape.ndim;
    if (ndim < 2 || t->region->kind == CKD_REGION_FLAT || elements < CUT_ELEMENTS || tensor->optimizer ||
        save->target.compare || save_coarsest_fidelity(save) != CKD_EXACT) {
        return false;
    }
    uint64_t columns = box_of(t).lengths[ndim - 1], side = save_exact_sides(save).max;
    return columns >= 2 * side && elements / columns >= 2 * side && !whole_in_parent(t) &&
           !may_copy_whole_master(&save->registry, t);
}

/* Judges by the matrices of which tiles are made (lossy_tile_cut). Tensors of more dimensions have none. */
bool save_is_cut_lossy(const ckd_save *save, const tensor_context *t, uint64_t elements) {
    const save_grid *c = &save->coding.grid;
    uint32_t ndim = t->shape.ndim;
    if (ndim < 2 || ndim > 3 || t->region->kind == CKD_REGION_FLAT || elements == 0) {
        return false;
    }
    ckd_region box = box_of(t);
    uint64_t rows = box.lengths[ndim - 2], columns = box.lengths[ndim - 1];
    return columns >= c->columns && columns <= LATTICE_MAX_COLUMNS && rows * columns >= c->elements &&
           !whole_in_parent(t);
}

/* ---- panels and their blocks ---- */

/*
 * Returns the parent's shard that begins where the panel does and has the same rows; NULL: none. The panel is then cut
 * like it, because deltas are cheapest between blocks that are cut alike. A lossy panel does not follow an exact
 * parent: its blocks are larger, and only its first delta is on exact blocks.
 */
static const view_shard *parent_panel(const ckd_save *save, const tensor_context *t, const ckd_region *box,
                                      uint64_t first) {
    uint32_t last = t->shape.ndim - 1;
    bool coarser = save_fidelity(save, t->tensor->role) != CKD_EXACT;
    if (coarser && save->sources.parent && save->sources.parent->manifest.checkpoint.fidelity == CKD_EXACT) {
        return NULL;
    }
    for (size_t i = 0; t->parent && i < t->parent->shard_count; i++) {
        const view_shard *s = &t->parent->shards[i];
        const ckd_region *r = s->region;
        bool same = r->kind == CKD_REGION_BOX && s->elements > 0 &&
                    r->offsets[last] == box->offsets[last] + first &&
                    r->lengths[last] <= box->lengths[last] - first;
        for (uint32_t d = 0; d < last && same; d++) {
            same = r->offsets[d] == box->offsets[d] && r->lengths[d] == box->lengths[d];
        }
        if (same) {
            return s;
        }
    }
    return NULL;
}

uint64_t save_panel_block(const save_panel_rows *rows, uint64_t first) {
    if (rows->parent) {
        const view_block *blocks = rows->parent->blocks;
        size_t low = 0, high = rows->parent->block_count;
        while (high - low > 1) {
            size_t middle = low + (high - low) / 2;
            if (blocks[middle].record->first <= first) {
                low = middle;
            } else {
                high = middle;
            }
        }
        return blocks[low].record->first + blocks[low].record->count - first;
    }
    uint64_t row = first / rows->width;
    row = rows->first + (rows->stacked ? row % rows->stacked : row);
    return (next_place(rows->places, row, rows->max) - row) * rows->width;
}

void save_panels_free(save_panels *p) {
    free(p->items);
    free(p->places);
    *p = (save_panels){0};
}

/* The region lives as long as the save. */
static ckd_status add_panel(save_panels *p, ckd_save *save, const tensor_context *whole, uint64_t first,
                            const save_panel_rows *rows, ckd_error *err) {
    ckd_region *region = arena_alloc(&save->registry.arena, sizeof(*region));
    if (!region) {
        return err_nomem(err, sizeof(*region), "a tensor's description");
    }
    uint32_t last = whole->shape.ndim - 1;
    ckd_region box = box_of(whole);
    uint64_t columns = box.lengths[last];
    box.offsets[last] += first;
    box.lengths[last] = rows->width;
    *region = region_canonical(&whole->shape, &box);
    save_panel *to = &p->items[p->count++];
    *to = (save_panel){.context = *whole, .rows = *rows, .first = first, .columns = columns};
    to->context.region = region;
    to->context.rows = &to->rows;
    return CKD_OK;
}

ckd_status save_cut(save_panels *out, ckd_save *save, const tensor_context *t, const block_sides *row_sides,
                    const block_sides *column_sides, ckd_error *err) {
    ckd_region box = box_of(t);
    uint32_t last = t->shape.ndim - 1;
    uint64_t columns = box.lengths[last], all = t->shape.shape[last];
    bool lossy = row_sides == &save->coding.grid.row_sides;
    bool plain = last == 1 || lossy; /* else rows run over several dimensions, and are cut evenly */
    *out = (save_panels){.places = malloc(sizeof(*out->places))};
    uint64_t max = LIKELY + all / column_sides->min + 1 + (t->parent ? t->parent->shard_count : 0);
    out->items = out->places ? calloc(max, sizeof(*out->items)) : NULL;
    if (!out->items) {
        return err_nomem(err, max * sizeof(*out->items), "a tensor's description");
    }
    save_places places;
    find_offsets(&places, *column_sides, all);
    *out->places = (save_places){.sides = *row_sides, .at = {t->shape.elements / all}, .count = 1};
    if (plain) {
        find_offsets(out->places, *row_sides, t->shape.shape[last - 1]);
    }
    ckd_status status = CKD_OK;
    uint64_t widest = 1;
    for (uint64_t first = 0, width; first < columns && status == CKD_OK; first += width) {
        save_panel_rows rows = {.parent = parent_panel(save, t, &box, first),
                                .places = out->places,
                                .first = plain ? box.offsets[last - 1] : 0,
                                .stacked = last > 1 && lossy ? box.lengths[last - 1] : 0};
        uint64_t at = box.offsets[last] + first, end = next_place(&places, at, CKD_BLOCK_ELEMENTS) - at;
        width = rows.parent             ? rows.parent->region->lengths[last]
                : end < columns - first ? end
                                        : columns - first;
        rows.width = width;
        status = add_panel(out, save, t, first, &rows, err);
        widest = !rows.parent && width > widest ? width : widest;
    }
    for (size_t i = 0; i < out->count; i++) {
        out->items[i].rows.max = CKD_BLOCK_ELEMENTS / widest;
    }
    return status;
}
