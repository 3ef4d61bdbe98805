/*
 * Where an exact save cuts a large matrix into blocks: into squares, so that any rows and any columns of it can be loaded without much of
 * the rest. A block is a stretch of a region's order, so that squares are regions of their own, panels of some columns, whose blocks
 * are some rows of them.
 */
#include <string.h>

#include "engine/save.h"

#define RAW_ELEMENTS (UINT64_C(1) << 14)
#define CUT_ELEMENTS \
    (UINT64_C(1) << 22) /* smaller tensors stay as they are: whole blocks of them are soon read */

/* A side of the squares: of what is not compressed a smaller one, as it costs next to nothing there. */
static uint64_t side_of(const ckd_save *save) {
    return save->options.codec == CKD_CODEC_RAW ? 64 : 256;
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
    if (ndim < 2 || t->region->kind == CKD_REGION_FLAT || elements < CUT_ELEMENTS || tensor->optimizer ||
        save->target.compare || save_coarsest_fidelity(save) != CKD_EXACT) {
        return false;
    }
    uint64_t columns = box_of(t).lengths[ndim - 1], side = side_of(save);
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

static ckd_status save_panel(ckd_save *save, const tensor_context *whole, panel *p, const ckd_region *box,
                             ckd_error *err) {
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
    t.block_elements = p->width * side_of(save);
    ckd_tensor source = *p->tensor;
    source.data = NULL;
    source.read = read_panel;
    source.read_context = p;
    uint64_t elements;
    step_tensor step;
    region_count(&elements, &t.shape, region);
    step_begin(&step, &save->steps, NULL, t.tensor, region, elements, t.parent, save->parent);
    ckd_status status = save_exact_span(save, &source, &t, 0, elements, &step, err);
    step_end(&step, &save->steps);
    return status;
}

ckd_status save_in_panels(ckd_save *save, const ckd_tensor *tensor, const tensor_context *t, ckd_error *err) {
    ckd_region box = box_of(t);
    uint64_t side = side_of(save);
    panel p = {.tensor = tensor,
               .element = ckd_dtype_size(tensor->dtype),
               .columns = box.lengths[t->shape.ndim - 1]};
    ckd_status status = CKD_OK;
    for (; p.first < p.columns && status == CKD_OK; p.first += p.width) {
        p.width = p.columns - p.first < side ? p.columns - p.first : side;
        status = save_panel(save, t, &p, &box, err);
    }
    return status;
}
