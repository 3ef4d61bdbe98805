/* The cost model of loads, and the budget that decides whether a delta is worth its load. */
#include "engine/decode/internal.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/*
 * Nanoseconds per byte of raw values on one core, measured by bench_exact (decode columns). Only their ratios matter,
 * not the machine's speed.
 */
#define WORK_VERIFY 0.08 /* checksum, content hash, copy */
#define WORK_APPLY  0.06 /* context and ordered difference of a delta */
#define WORK_STEP   0.2  /* an optimizer step: arithmetic, its group, hashes of its inputs */
#define WORK_LZ4    0.35
#define WORK_ZSTD   0.9
#define WORK_PLANES 0.15
#define WORK_SYMBOL 2.4 /* per symbol, not per byte ... */
#define WORK_LOW    0.6 /* ... and per byte beyond the second of each */
/*
 * A residual that lists its changes, applied in place. Fitted to loads of chains of bf16 weights of a model 512 wide,
 * fine-tuned step by step, 1.5 to 18 % of the values changed at each.
 */
#define WORK_CHANGES_BLOCK 3000.0 /* per block ... */
#define WORK_CHANGES       0.28   /* and per element, for its context, ... */
#define WORK_CHANGE        6.5    /* and per change */

/*
 * Fitted to loads of lossy chains of matrices 128 and 256 wide, near and coarse, with AVX2 and AVX-512, including the
 * opening of ancestors (bench_chain). The cost per block keeps the chains of small models short.
 */
#define WORK_LATTICE       0.55    /* per element of a lossy block ... */
#define WORK_LATTICE_BLOCK 32000.0 /* ... and per block ... */
#define WORK_LATTICE_SMALL 2.0     /* ... but at most this per element */
#define WORK_LOW_RANK      0.3     /* per element, if there is a low-rank part ... */
#define WORK_PRODUCT       0.03    /* ... and per component of it ... */
#define WORK_WIDEN         1.1     /* ... and for 16-bit values, all of which become floats */
#define WORK_INTEGERS      15.0    /* per byte of the payload ... */
#define WORK_INTEGER       2.9     /* ... but at most this per element */

#define NEWEST_MARGIN       0.75 /* leaves room for opening the ancestors, which is slow for small states */
#define NEWEST_SHARE        0.25 /* a block's share of the newest checkpoint's limit beyond one base load */
#define MIN_SAVING          0.03
#define MIN_SAVING_PER_LOAD 0.015

double low_rank_work(uint64_t elements, size_t element_size, uint64_t rank) {
    double widen = element_size < 4 ? WORK_WIDEN : 0;
    return rank ? (double)elements * (WORK_LOW_RANK + widen + WORK_PRODUCT * (double)rank) : 0;
}

double decode_work(predictor p, coding c, size_t element_size, uint64_t raw_size, uint64_t stored_size,
                   uint64_t symbols) {
    double raw = (double)raw_size, elements = raw / (double)element_size;
    double work = p == PREDICT_PARENT ? 0 : WORK_VERIFY * raw; /* nothing is hashed inside a chain */
    if (p == PREDICT_COPY || p == PREDICT_CAST) {
        return work;
    }
    work += p == PREDICT_STEP ? WORK_STEP * raw : 0;
    bool residual = p == PREDICT_PARENT || p == PREDICT_STEP;
    if (residual && c == CODING_SYMBOLS && (double)symbols < elements) {
        work += fmin(WORK_CHANGES_BLOCK, elements);
        return work + WORK_CHANGES * elements + WORK_CHANGE * (double)symbols;
    }
    work += residual && c != CODING_LATTICE ? WORK_APPLY * raw : 0;
    switch (c) { /* without a default, so that the compiler warns of a missing coding */
    case CODING_LATTICE:
        work += WORK_LATTICE * elements + fmin(WORK_LATTICE_BLOCK, WORK_LATTICE_SMALL * elements);
        work += low_rank_work((uint64_t)elements, element_size, symbols);
        return work + fmin(WORK_INTEGERS * (double)stored_size, WORK_INTEGER * elements);
    case CODING_GRADIENT:
        return work + WORK_SYMBOL * (double)symbols;
    case CODING_SYMBOLS:
        work += element_size > 2 ? WORK_LOW * (double)(element_size - 2) * (double)symbols : 0;
        return work + WORK_SYMBOL * (double)symbols;
    case CODING_ZSTD_PLANES:
        work += WORK_PLANES * raw; /* fall through */
    case CODING_ZSTD:
        return work + WORK_ZSTD * (0.2 * raw + 0.8 * (double)stored_size);
    case CODING_LZ4_PLANES:
        work += WORK_PLANES * raw; /* fall through */
    case CODING_LZ4:
        return work + WORK_LZ4 * raw;
    case CODING_RAW:
        break;
    }
    return work; /* of an unknown coding, too */
}

load_cost base_cost(size_t element_size, uint64_t raw_size, uint64_t base_stored) {
    coding c = base_stored < raw_size ? CODING_SYMBOLS : CODING_RAW;
    return (load_cost){(double)base_stored, decode_work(PREDICT_NONE, c, element_size, raw_size, base_stored,
                                                        raw_size / element_size)};
}

load_cost record_base(const record *r) {
    return r->depth == 0 && r->coding != CODING_LATTICE
               ? record_chain(r)
               : base_cost(ckd_dtype_size(r->tensor->dtype), r->raw_size, r->base_stored);
}

static bool within(const load_cost *chain, const load_cost *base, double limit) {
    return chain->stored <= limit * base->stored && chain->work <= limit * base->work;
}

static load_cost sum(const load_cost *a, const load_cost *b, const load_cost *c) {
    return (load_cost){a->stored + b->stored + c->stored, a->work + b->work + c->work};
}

bool budget_allows_chain(const load_budget *b, const load_cost *chain, const load_cost *base,
                         double time_factor) {
    return chain->stored <= BUDGET_MARGIN * b->limit * base->stored &&
           chain->work <= BUDGET_MARGIN * time_factor * b->limit * base->work;
}

bool budget_allows_step_chain(const load_budget *b, const load_cost *chain, const load_cost *base) {
    return within(chain, base, BUDGET_MARGIN * PART_EXACT * b->limit);
}

/* Checks the bound of the whole checkpoint, with this chain and the estimate of the rest. */
static bool whole_within(const load_budget *b, const load_cost *chain, const load_cost *base) {
    load_cost all_chain = sum(&b->chain, chain, &b->rest_chain);
    load_cost all_base = sum(&b->base, base, &b->rest_base);
    all_chain.work -= b->to_free; /* chains that will end */
    return within(&all_chain, &all_base, BUDGET_MARGIN * b->limit);
}

bool budget_has_room(const load_budget *b, const load_cost *chain, const load_cost *base,
                     double time_factor) {
    return budget_allows_chain(b, chain, base, time_factor) && whole_within(b, chain, base);
}

bool delta_may_pay(uint64_t delta_size, uint64_t standalone_size) {
    return (double)standalone_size - (double)delta_size >= MIN_SAVING * (double)standalone_size;
}

bool delta_pays(const load_cost *chain, uint64_t delta_size, uint64_t standalone_size) {
    double saving = (double)standalone_size - (double)delta_size;
    double added = chain->stored - (double)standalone_size;
    return delta_may_pay(delta_size, standalone_size) && saving >= MIN_SAVING_PER_LOAD * added;
}

bool budget_allows_delta(const load_budget *b, const load_cost *chain, const load_cost *base,
                         double time_factor, uint64_t delta_size, uint64_t standalone_size) {
    return delta_pays(chain, delta_size, standalone_size) && budget_has_room(b, chain, base, time_factor);
}

bool budget_allows_step(const load_budget *b, const step_cost *cost, uint64_t delta_size,
                        uint64_t standalone_size) {
    return delta_pays(&cost->added, delta_size, standalone_size) &&
           budget_allows_step_chain(b, &cost->by_itself, &cost->by_itself_base) &&
           whole_within(b, &cost->added, &cost->added_base);
}

/*
 * Returns true more often than the bound requires. A single block without a copy makes the load open all its ancestors,
 * which takes most of the time of small states. So a block gets a copy as soon as its chain takes NEWEST_SHARE of what
 * the limit allows beyond one base load.
 */
bool budget_wants_materialized(const load_budget *b, const load_cost *chain, const load_cost *base) {
    if (b->newest_limit >= b->limit) {
        return false;
    }
    /* The remaining blocks can get copies too, and then cost at least a base load. */
    load_cost all_materialized = sum(&b->materialized, chain, &b->rest_base);
    load_cost all_base = sum(&b->base, base, &b->rest_base);
    return !within(chain, base, 1 + NEWEST_SHARE * (b->newest_limit - 1)) ||
           !within(&all_materialized, &all_base, NEWEST_MARGIN * b->newest_limit);
}

void budget_add(load_budget *b, const load_cost *chain, const load_cost *materialized,
                const load_cost *base) {
    load_cost_add(&b->chain, chain);
    load_cost_add(&b->materialized, materialized);
    load_cost_add(&b->base, base);
}

double budget_load_cost(const load_budget *b) {
    double stored = b->base.stored > 0 ? b->chain.stored / b->base.stored : 1;
    double time = b->base.work > 0 ? b->chain.work / b->base.work : 1;
    double cost = stored > time ? stored : time;
    return cost > 1 ? cost : 1;
}

/* ---- a checkpoint: its optimizer steps, and the totals that its manifest states ---- */

static const view_block *same_span_in(const view *v, const char *name, const record *like) {
    const view_tensor *t = view_find(v, name);
    for (size_t s = 0; t && s < t->shard_count; s++) {
        const view_shard *shard = &t->shards[s];
        if (t->shape->ndim != like->tensor->ndim ||
            !region_equal(shard->region, like->region, t->shape->ndim)) {
            continue;
        }
        size_t first, end;
        region_span span = {like->region, like->first, like->count};
        view_shard_range(&first, &end, shard, t->shape, &span);
        const view_block *b = first < end ? &shard->blocks[first] : NULL;
        return b && b->record->first == like->first && b->record->count == like->count ? b : NULL;
    }
    return NULL;
}

const view_block *step_input(const view *v, const record *r, uint32_t index) {
    if (r->predictor != PREDICT_STEP || index >= r->dependency_count) {
        return NULL;
    }
    const dependency *input = &r->dependencies[index];
    bool inside = input->kind == DEPENDS_VALUES && input->same_span && input->tensor && *input->tensor &&
                  id_equal(&input->checkpoint, &r->tensor->checkpoint);
    return inside ? same_span_in(v, input->tensor, r) : NULL;
}

load_cost step_share(const view *v, const record *r) {
    load_cost chain = record_chain(r), max = {0, 0};
    for (uint32_t i = 1; r->predictor == PREDICT_STEP && i < r->dependency_count; i++) {
        const view_block *input = step_input(v, r, i);
        load_cost c = input ? record_chain(input->record) : max;
        max = c.stored > max.stored ? c : max;
    }
    chain.stored -= max.stored < chain.stored ? max.stored : chain.stored;
    chain.work -= max.work < chain.work ? max.work : chain.work;
    return chain;
}

static uint64_t bytes_of(const record *r) {
    return r->header_size + r->stored_size;
}

static uint64_t share_of(const chunk *c, const ckd_id *checkpoint) {
    uint64_t own = 0, all = 0;
    for (size_t i = 0; i < c->outer_count; i++) {
        bool is_own = memcmp(&c->outer[i].tensor->checkpoint, checkpoint, sizeof(ckd_id)) == 0;
        all += bytes_of(&c->outer[i]);
        own += is_own ? bytes_of(&c->outer[i]) : 0;
    }
    return own == all ? c->size : (uint64_t)((double)c->size * ((double)own / (double)all));
}

static void add_totals(manifest *m, const view *v, role_total totals[CKD_ROLE_OTHER + 1]) {
    ckd_checkpoint *c = &m->checkpoint;
    load_budget cost = {0};
    c->tensors = v->tensor_count;
    c->depth = 0;
    c->raw_bytes = c->stored_bytes = 0;
    for (size_t i = 0; i < v->tensor_count; i++) {
        totals[v->tensors[i].tensor->role].tensors++;
    }
    for (size_t i = 0; i < v->block_count; i++) {
        const record *r = v->blocks[i].record;
        load_cost chain = step_share(v, r), base = record_base(r);
        budget_add(&cost, &chain, &chain, &base);
        c->raw_bytes += r->raw_size;
        c->depth = r->depth > c->depth ? r->depth : c->depth;
        totals[r->tensor->role].raw_bytes += r->raw_size;
        totals[r->tensor->role].stored_bytes += view_stored_bytes(&v->blocks[i]);
    }
    for (size_t i = 0; i < v->blob_count; i++) {
        c->raw_bytes += v->blobs[i].record->raw_size;
    }
    for (size_t i = 0; i < v->chunk_count; i++) {
        c->stored_bytes += share_of(v->chunks[i], &c->id);
    }
    c->load_cost = budget_load_cost(&cost);
}

ckd_status totals_set(manifest *m, const view *v, ckd_error *err) {
    role_total totals[CKD_ROLE_OTHER + 1] = {0};
    free(m->roles);
    m->role_count = 0;
    m->roles = calloc(CKD_ROLE_OTHER + 1, sizeof(*m->roles));
    if (!m->roles) {
        return err_nomem(err, sizeof(totals), "role totals");
    }
    add_totals(m, v, totals);
    for (uint32_t role = CKD_ROLE_WEIGHT; role <= CKD_ROLE_OTHER; role++) {
        totals[role].role = role;
        if (totals[role].tensors) {
            m->roles[m->role_count++] = totals[role];
        }
    }
    return CKD_OK;
}
