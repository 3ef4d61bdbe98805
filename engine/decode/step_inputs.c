/* The blocks of its own checkpoint that an optimizer step builds on. */
#include "engine/decode/step_inputs.h"

static const view_block *same_span_in(const view *v, const char *name, const record *of) {
    const view_tensor *t = view_find(v, name);
    for (size_t s = 0; t && s < t->shard_count; s++) {
        const view_shard *shard = &t->shards[s];
        if (t->shape.ndim != of->tensor->ndim || !region_equal(shard->region, of->region, t->shape.ndim)) {
            continue;
        }
        size_t first, end;
        span wanted = {of->region, of->first, of->count};
        view_shard_range(&first, &end, shard, &t->shape, &wanted);
        const view_block *b = first < end ? &shard->blocks[first] : NULL;
        return b && b->record->first == of->first && b->record->count == of->count ? b : NULL;
    }
    return NULL;
}

const view_block *step_input(const view *v, const view_block *b, uint32_t index) {
    const record *r = b->record;
    if (r->predictor != PREDICT_STEP || index >= r->dependency_count) {
        return NULL;
    }
    const dependency *on = &r->dependencies[index];
    bool inside = on->kind == DEPENDS_VALUES && on->same_span && on->tensor && *on->tensor &&
                  id_equal(&on->checkpoint, &r->tensor->checkpoint);
    return inside ? same_span_in(v, on->tensor, r) : NULL;
}

load_cost step_share(const view *v, const view_block *b) {
    load_cost chain = record_chain(b->record), max = {0, 0};
    for (uint32_t i = 1; b->record->predictor == PREDICT_STEP && i < b->record->dependency_count; i++) {
        const view_block *input = step_input(v, b, i);
        load_cost c = input ? record_chain(input->record) : max;
        max = c.stored > max.stored ? c : max;
    }
    chain.stored -= max.stored < chain.stored ? max.stored : chain.stored;
    chain.work -= max.work < chain.work ? max.work : chain.work;
    return chain;
}
