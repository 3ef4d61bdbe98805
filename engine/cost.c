#include "engine/cost.h"

/*
 * Nanoseconds a byte of raw values, one core, measured by bench_exact (decode columns). Ratios between them matter, not
 * the machine's speed.
 */
#define WORK_VERIFY 0.08 /* checksum, content hash, copy */
#define WORK_APPLY  0.5  /* context and ordered difference of a delta */
#define WORK_LZ4    0.35
#define WORK_ZSTD   0.9
#define WORK_PLANES 0.15
#define WORK_SYMBOL 3.2 /* a symbol, not a byte */

/* Estimates of size and time are not exact, and the bounds are promises: plan a little inside them. */
#define MARGIN              0.92
#define MIN_SAVING          0.03
#define MIN_SAVING_PER_LOAD 0.02

double decode_work(predictor p, coding c, size_t element_size, uint64_t raw_size, uint64_t stored_size) {
    double raw = (double)raw_size, work = WORK_VERIFY * raw;
    if (p == PREDICT_COPY || p == PREDICT_CAST) {
        return work;
    }
    if (p == PREDICT_PARENT) {
        work += WORK_APPLY * raw;
    }
    switch (c) {
    case CODING_SYMBOLS:
        return work + WORK_SYMBOL * raw / (double)element_size;
    case CODING_ZSTD_PLANES:
        work += WORK_PLANES * raw; /* fall through */
    case CODING_ZSTD:
        return work + WORK_ZSTD * (0.2 * raw + 0.8 * (double)stored_size);
    case CODING_LZ4_PLANES:
        work += WORK_PLANES * raw; /* fall through */
    case CODING_LZ4:
        return work + WORK_LZ4 * raw;
    default:
        return work;
    }
}

load_cost base_cost(size_t element_size, uint64_t raw_size, uint64_t base_stored) {
    coding c = base_stored < raw_size ? CODING_SYMBOLS : CODING_RAW;
    return (load_cost){(double)base_stored,
                       decode_work(PREDICT_NONE, c, element_size, raw_size, base_stored)};
}

load_cost record_base(const record *r) {
    return r->depth == 0 ? record_chain(r)
                         : base_cost(ckd_dtype_size(r->tensor->dtype), r->raw_size, r->base_stored);
}

static bool within(const load_cost *chain, const load_cost *base, double limit) {
    return chain->stored <= limit * base->stored && chain->work <= limit * base->work;
}

bool budget_allows_parent(const load_budget *b, const load_cost *parent, const load_cost *base) {
    return within(parent, base, MARGIN * b->part_limit);
}

bool budget_allows_delta(const load_budget *b, const load_cost *chain, const load_cost *base,
                         uint64_t delta_size, uint64_t standalone_size) {
    double saving = (double)standalone_size - (double)delta_size;
    double added = chain->stored - (double)standalone_size;
    if (saving < MIN_SAVING * (double)standalone_size || saving < MIN_SAVING_PER_LOAD * added) {
        return false;
    }
    load_cost all_chain = {b->chain.stored + chain->stored + b->rest_chain.stored,
                           b->chain.work + chain->work + b->rest_chain.work};
    load_cost all_base = {b->base.stored + base->stored + b->rest_base.stored,
                          b->base.work + base->work + b->rest_base.work};
    return within(chain, base, MARGIN * b->part_limit) &&
           within(&all_chain, &all_base, MARGIN * b->whole_limit);
}

void budget_add(load_budget *b, const load_cost *chain, const load_cost *base) {
    b->chain.stored += chain->stored;
    b->chain.work += chain->work;
    b->base.stored += base->stored;
    b->base.work += base->work;
}

double budget_load_cost(const load_budget *b) {
    double stored = b->base.stored > 0 ? b->chain.stored / b->base.stored : 1;
    double time = b->base.work > 0 ? b->chain.work / b->base.work : 1;
    double cost = stored > time ? stored : time;
    return cost > 1 ? cost : 1;
}
