/*
 * Where an exact save cuts a large matrix into blocks, so that any rows and any columns of it can be loaded without much of the rest. A block
 * is a stretch of a region's order, so panels of some columns are regions of their own, and their blocks are some rows of them.
 *
 * Rows and columns are cut where shards are likely to begin: at eighths (and finer powers of two), thirds, fifths, sevenths and sixths of the
 * tensor's, as torch.chunk has them, unless two cuts would be too near each other; and in between, so that no side is too long.
 * Places are the tensor's, not the region's: what several ranks save is cut as if one had.
 */
#include <string.h>

#include "engine/device.h"
#include "engine/save.h"

#define RAW_ELEMENTS (UINT64_C(1) << 14)
#define CUT_BYTES \
    (UINT64_C(1) << 22) /* smaller tensors stay as they are: whole blocks of them are soon read */

/* Sides of blocks, in elements. Of what is not compressed smaller ones, as they cost little there. What is 4096 long bears sevenths, raw also sixths. */
typedef struct sides {
    uint64_t most, least;
    uint64_t usual; /* as long they shall be on average at least: small blocks cost bytes and time */
} sides;

static sides sides_of(const ckd_save *save) {
    return save->options.codec == CKD_CODEC_RAW ? (sides){64, 4, 50} : (sides){256, 32, 146};
}

/* ---- where a dimension is cut ---- */

static const uint64_t likely_shards[] = {2, 4, 8, 16, 32, 64, 3, 5, 7, 6}; /* the likelier ones first */
enum {
    LIKELY = 1 + 3 + 7 + 15 + 31 + 63 + 2 + 4 + 6 + 5
}; /* cuts between so many shards, if all are apart */

struct save_places {
    sides sides;
    uint64_t at[LIKELY + 1]; /* ascending; the last one is the dimension's end */
    size_t count;
};

/* Unless it is too near another one. */
static void add_place(save_places *p, uint64_t at) {
    size_t i = 0;
    while (i < p->count && p->at[i] < at) {
        i++;
    }
    uint64_t before = i ? at - p->at[i - 1] : at, behind = i < p->count ? p->at[i] - at : 0;
    if (i < p->count && p->count <= LIKELY && before >= p->sides.least && behind >= p->sides.least) {
        memmove(&p->at[i + 1], &p->at[i], (p->count - i) * sizeof(p->at[0]));
        p->at[i] = at;
        p->count++;
    }
}

/* As many as the dimension bears. */
static void find_places(save_places *p, sides s, uint64_t length) {
    *p = (save_places){.sides = s, .at = {length}, .count = 1};
    for (size_t k = 0; k < sizeof(likely_shards) / sizeof(likely_shards[0]); k++) {
        uint64_t shards = likely_shards[k], each = length / shards + (length % shards != 0);
        bool halves = shards % 2 == 0 && shards != 6; /* of what is cut there already */
        uint64_t more = halves ? shards / 2 : shards - 1;
        bool fits = halves ? each >= s.most : (p->count + more) * s.usual <= length;
        for (uint64_t i = 1; i < shards && i * each < length && fits; i++) {
            add_place(p, i * each);
        }
    }
}

/* The first cut behind an element of the dimension. */
static uint64_t next_place(const save_places *p, uint64_t from) {
    size_t i = 0;
    while (p->at[i] <= from) {
        i++;
    }
    uint64_t begin = i ? p->at[i - 1] : 0, length = p->at[i] - begin;
    uint64_t parts = (length + p->sides.most / 2) / p->sides.most;
    parts = parts ? parts : 1;
    uint64_t j = (from - begin) * parts / length + 1;
    uint64_t at = begin + length * j / parts;
    return at > from ? at : begin + length * (j + 1) / parts;
}

uint64_t save_block_elements(const ckd_save *save, const ckd_tensor *tensor) {
    return save->options.codec == CKD_CODEC_RAW && !tensor->optimizer ? RAW_ELEMENTS : CKD_BLOCK_ELEMENTS;
}

/* Is it there in the parent as one piece? Then it stays one: deltas are cheapest between blocks that are cut alike. */
static bool whole_in_parent(const tensor_context *t) {
    for (size_t i = 0; t->parent && i < t->parent->shard_count; i++) {
        if (region_equal(t->parent->shards[i].region, t->region, t->shape.ndim)) {
            return true;
        }
    }
    return false;
}

/* In box form. */
static ckd_region box_of(const tensor_context *t) {
    ckd_region box = *t->region;
    if (box.kind == CKD_REGION_WHOLE) {
        box.kind = CKD_REGION_BOX;
        memcpy(box.lengths, t->shape.shape, sizeof(box.lengths));
    }
    return box;
}

/*
 * Only tensors that are exact here and in the deltas to come, and that no optimizer predicts: lossy blocks share what whole rows have in
 * common, and optimizer steps are predicted block by block from blocks cut as ever.
 */
bool save_is_cut(const ckd_save *save, const ckd_tensor *tensor, const tensor_context *t, uint64_t elements) {
    uint32_t ndim = t->shape.ndim;
    if (ndim < 2 || t->region->kind == CKD_REGION_FLAT ||
        elements < CUT_BYTES / ckd_dtype_size(tensor->dtype) || tensor->optimizer || save->target.compare ||
        save_coarsest_fidelity(save) != CKD_EXACT) {
        return false;
    }
    uint64_t columns = box_of(t).lengths[ndim - 1], side = sides_of(save).most;
    return columns >= 2 * side && elements / columns >= 2 * side && !whole_in_parent(t);
}

/* ---- reading a panel of what the caller gives by rows ---- */

typedef struct panel {
    const ckd_tensor *tensor;
    size_t element;
    uint64_t columns;      /* of the region */
    uint64_t first, width; /* columns of the panel */
} panel;

static ckd_status read_panel(void *context, uint64_t first, uint64_t count, void *to, ckd_error *err) {
    const panel *p = context;
    uint8_t *out = to;
    while (count) {
        uint64_t row = first / p->width, column = first % p->width;
        uint64_t n = p->width - column < count ? p->width - column : count;
        uint64_t from = row * p->columns + p->first + column;
        if (p->tensor->data) {
            memcpy(out, (const uint8_t *)p->tensor->data + from * p->element, n * p->element);
        } else {
            ckd_status status = p->tensor->read(p->tensor->read_context, from, n, out, err);
            if (status != CKD_OK) {
                return status;
            }
        }
        out += n * p->element;
        first += n;
        count -= n;
    }
    return CKD_OK;
}

/* ---- panels and their blocks ---- */

/* The parent's shard that begins where the panel does, and has the same rows: cut as it is, deltas are cheapest. NULL: none. */
static const view_shard *parent_panel(const tensor_context *t, const ckd_region *box, uint64_t first) {
    uint32_t last = t->shape.ndim - 1;
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
            *(blocks[middle].record->first <= first ? &low : &high) = middle;
        }
        return blocks[low].record->count;
    }
    uint64_t row = rows->first + first / rows->width;
    return (next_place(rows->places, row) - row) * rows->width;
}

static ckd_status save_panel(ckd_save *save, const tensor_context *whole, panel *p, const ckd_region *box,
                             const save_panel_rows *rows, ckd_error *err) {
    ckd_region *region = arena_alloc(&save->arena, sizeof(*region)); /* lives as long as the save */
    if (!region) {
        return err_nomem(err, sizeof(*region), "a tensor's description");
    }
    tensor_context t = *whole;
    uint32_t last = t.shape.ndim - 1;
    ckd_region mine = *box;
    mine.offsets[last] += p->first;
    mine.lengths[last] = p->width;
    *region = region_canonical(&t.shape, &mine);
    t.region = region;
    t.rows = rows;
    ckd_tensor source = *p->tensor;
    source.data = NULL;
    source.read = read_panel;
    source.read_context = p;
    device_reader columns;
    if (p->tensor->read == device_read) {
        columns = device_reader_columns(p->tensor->read_context, p->first, p->width, p->columns);
        source.read = device_read;
        source.read_context = &columns;
    }
    uint64_t elements;
    region_count(&elements, &t.shape, region);
    return save_exact_span(save, &source, &t, 0, elements, NULL, err);
}

ckd_status save_in_panels(ckd_save *save, const ckd_tensor *tensor, const tensor_context *t, ckd_error *err) {
    ckd_region box = box_of(t);
    uint32_t last = t->shape.ndim - 1;
    bool plain = last == 1; /* else rows are those of several dimensions, and cut evenly */
    save_places down = {.sides = sides_of(save),
                        .at = {t->shape.elements / t->shape.shape[last]},
                        .count = 1},
                across;
    find_places(&across, down.sides, t->shape.shape[last]);
    if (plain) {
        find_places(&down, down.sides, t->shape.shape[0]);
    }
    save_panel_rows rows = {.places = &down, .first = plain ? box.offsets[0] : 0};
    panel p = {.tensor = tensor, .element = ckd_dtype_size(tensor->dtype), .columns = box.lengths[last]};
    ckd_status status = CKD_OK;
    for (; p.first < p.columns && status == CKD_OK; p.first += p.width) {
        rows.parent = parent_panel(t, &box, p.first);
        uint64_t at = box.offsets[last] + p.first, end = next_place(&across, at) - at;
        p.width = rows.parent                 ? rows.parent->region->lengths[last]
                  : end < p.columns - p.first ? end
                                              : p.columns - p.first;
        rows.width = p.width;
        status = save_panel(save, t, &p, &box, &rows, err);
    }
    return status;
}
