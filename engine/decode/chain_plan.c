/*
 * Plans which chains of deltas end with a save, so that the checkpoint stays within the bound on its load. An exact
 * chain ends in a block on its own or in a delta on its first block; a lossy one goes back to an older ancestor. A
 * chain of optimizer steps ends in a block on its own, at the same save as those of the other tensors of its parameter.
 * All of them end together, because a load of one reads all of them.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/decode/internal.h"

#define CLASSES     128u /* classes of chains by their cost ... */
#define CLASS_STEPS 8    /* ... and how many of them make a base load */
#define USUAL_LINK  0.2  /* base loads that a delta adds to a chain, if nothing is known */
/* A chain of at least MERGE_FROM base loads ends in one delta on its first block. Together these cost about MERGED. */
#define MERGE_FROM 2.5
#define MERGED     2.0
/* The load cost of a lossy tensor that was coded against a light ancestor (save/tile_load.c), in base loads. */
#define MERGED_LOSSY 2.0

#define ANY_RANK UINT32_MAX

/* A chain of deltas, which grows with each save. */
static bool is_chain(const record *r, bool lossy) {
    return r->depth > 0 && r->predictor == PREDICT_PARENT && (r->coding == CODING_LATTICE) == lossy &&
           record_base(r).work > 0;
}

/* A chain of optimizer steps. */
static bool is_step_chain(const record *r) {
    return r->depth > 0 && r->predictor == PREDICT_STEP && record_base(r).work > 0;
}

/* Whether the chain ends by its own priority; lossy ones end by those of their tensors. */
static bool ends_by_block(const record *r) {
    return is_chain(r, false) || is_step_chain(r);
}

static uint32_t rank_that_wrote(const view *v, const view_block *b) {
    return b->file < v->manifest.own_count ? v->manifest.files[b->file].rank : ANY_RANK;
}

/* Whether the block of the parent is one that this rank is expected to save again. */
static bool is_planned(const load_budget *b, const view_block *block) {
    return b->planned_rank == ANY_RANK || rank_that_wrote(b->planned, block) == b->planned_rank;
}

/* ---- the order in which chains end ---- */

/* Chains of one class end at different checkpoints. The order is the same whatever the number of threads. */
static uint64_t priority_of(double chain, double base, uint32_t random) {
    return (uint64_t)fmin(CLASS_STEPS * chain / base, CLASSES - 1) << 32 | random;
}

/*
 * The record whose cost stands for all of a parameter: of the first moment if that is a step, else of the second one.
 * *first: the first moment; the record itself if it is no step of a weight or a second moment.
 */
static const record *leading_record(const record **first, const view *v, const record *r) {
    const view_block *moment = step_input(v, r, 1), *square = step_input(v, r, 2);
    *first = moment ? moment->record : r;
    bool by_square = square && is_step_chain(square->record);
    return is_step_chain(*first) ? *first : by_square ? square->record : r;
}

static uint64_t priority_of_block(const view *v, const record *r) {
    const record *first, *leading = leading_record(&first, v, r);
    return priority_of((double)leading->chain_work, record_base(leading).work,
                       load_le32(first->content.bytes));
}

bool budget_may_merge(const record *parent_block) {
    return is_chain(parent_block, false) &&
           (double)parent_block->chain_work >= MERGE_FROM * record_base(parent_block).work;
}

static double freed_by_end(const view *v, const record *r) {
    double base = record_base(r).work;
    return fmax(0, step_share(v, r).work - (budget_may_merge(r) ? MERGED * base : base));
}

/* The lossy chains of a tensor, which end together. */
typedef struct tensor_chains {
    double chain, base; /* of those that are planned */
    double all_base;    /* of all ranks' */
} tensor_chains;

static tensor_chains chains_of(const load_budget *b, const view_tensor *t) {
    tensor_chains all = {0, 0, 0};
    for (size_t s = 0; s < t->shard_count; s++) {
        for (size_t i = 0; i < t->shards[s].block_count; i++) {
            const record *r = t->shards[s].blocks[i].record;
            bool chain = is_chain(r, true), planned = chain && is_planned(b, &t->shards[s].blocks[i]);
            all.chain += planned ? (double)r->chain_work : 0;
            all.base += planned ? record_base(r).work : 0;
            all.all_base += chain ? record_base(r).work : 0;
        }
    }
    return all;
}

static uint64_t priority_of_tensor(const tensor_chains *c, const char *name) {
    return priority_of(c->chain, c->base, (uint32_t)hash64(name, strlen(name)));
}

static double freed_by_tensor(const tensor_chains *c) {
    return fmax(0, c->chain - MERGED_LOSSY * c->base);
}

/* ---- the plan ---- */

typedef struct ending {
    uint64_t priority;
    double freed;
} ending;

static int highest_first(const void *a, const void *b) {
    uint64_t x = ((const ending *)a)->priority, y = ((const ending *)b)->priority;
    return (x < y) - (x > y);
}

/*
 * Sets the lowest priority of the chains that end. If memory is short, none is planned to end, and the bound alone
 * decides.
 */
static void plan_endings(load_budget *b) {
    const view *parent = b->planned;
    ending *all = malloc((parent->block_count + parent->tensor_count + 1) * sizeof(*all));
    size_t count = 0;
    for (size_t i = 0; all && i < parent->block_count; i++) {
        const record *r = parent->blocks[i].record;
        if (ends_by_block(r) && is_planned(b, &parent->blocks[i])) {
            all[count++] = (ending){priority_of_block(parent, r), freed_by_end(parent, r)};
        }
    }
    for (size_t i = 0; all && i < parent->tensor_count; i++) {
        tensor_chains c = chains_of(b, &parent->tensors[i]);
        if (c.base > 0) {
            all[count++] =
                (ending){priority_of_tensor(&c, parent->tensors[i].tensor->name), freed_by_tensor(&c)};
        }
    }
    if (count) {
        qsort(all, count, sizeof(*all), highest_first);
    }
    double left = b->to_free, slack = (BUDGET_MARGIN - PLAN_MARGIN) * b->limit * b->rest_base.work;
    /* Within the slack, it stops at a chain that would free twice what is left, or more. */
    for (size_t i = 0; i < count && left > 0 && (left > slack || all[i].freed < 2 * left); i++) {
        left -= all[i].freed;
        b->ending = all[i].priority > 0 ? all[i].priority : 1;
    }
    b->to_free -= fmax(0, left); /* the rest cannot be planned */
    free(all);
}

/*
 * Returns the base loads that deltas of the parent added to the chains of its own parent, on average. Merged deltas are
 * not counted, because they add nothing to those chains.
 */
static double typical_link(const load_budget *b, view_cache *views, bool lossy) {
    const view *parent = b->planned;
    double links = 0, bases = 0;
    for (size_t i = 0; i < parent->block_count; i++) {
        const record *r = parent->blocks[i].record;
        const view_block *before;
        const view *owner;
        if (is_chain(r, lossy) && is_planned(b, &parent->blocks[i]) && (lossy || r->dependency_count == 1) &&
            view_parent_block(&before, &owner, views, parent, &parent->blocks[i], NULL) == CKD_OK && before &&
            id_equal(&owner->manifest.checkpoint.id, &parent->manifest.checkpoint.parent)) {
            links += fmax(0, (double)r->chain_work - (double)before->record->chain_work);
            bases += record_base(r).work;
        }
    }
    return bases > 0 ? links / bases : USUAL_LINK;
}

/* The work that one more step added to the chain of the parent's block; less than 0: unknown. */
static double step_link(view_cache *views, const view *parent, const view_block *b) {
    const view_block *before;
    const view *owner;
    bool known = is_step_chain(b->record) &&
                 view_parent_block(&before, &owner, views, parent, b, NULL) == CKD_OK && before &&
                 is_step_chain(before->record);
    return known ? fmax(0, (double)b->record->chain_work - (double)before->record->chain_work) : -1;
}

/* The same without the work for its inputs, which a load reads in any case. */
static double step_growth(view_cache *views, const view *parent, const view_block *b) {
    const record *r = b->record;
    const view_block *square = step_input(parent, r, 2);
    double link = step_link(views, parent, b), inputs = square ? step_link(views, parent, square) : 0;
    return link >= 0 && inputs >= 0 ? fmax(0, link - inputs)
                                    : fmax(0, step_share(parent, r).work - record_base(r).work) / r->depth;
}

/*
 * Whether a chain of steps may begin with the block. It is coded on its own, perhaps because such a chain ended there.
 */
static bool may_begin_steps(const record *r) {
    int role = (int)r->tensor->role;
    return r->predictor == PREDICT_NONE && r->tensor->dtype == CKD_F32 && r->coding != CODING_LATTICE &&
           (role == CKD_ROLE_WEIGHT || role == CKD_ROLE_MASTER || role == CKD_ROLE_EXP_AVG_SQ);
}

/* The work that all chains of steps will grow by. New ones are expected to grow like the others. */
static double expected_steps(const load_budget *b, view_cache *views) {
    const view *parent = b->planned;
    double growth = 0, growing = 0, beginning = 0; /* the last two: base loads */
    for (size_t i = 0; i < parent->block_count; i++) {
        const view_block *block = &parent->blocks[i];
        bool planned = is_planned(b, block), step = planned && is_step_chain(block->record);
        double base = planned ? record_base(block->record).work : 0;
        growth += step ? step_growth(views, parent, block) : 0;
        growing += step ? base : 0;
        beginning += may_begin_steps(block->record) ? base : 0;
    }
    return growing > 0 ? growth * (1 + beginning / growing) : 0;
}

/*
 * Whether this rank saved some of the parent, with the same number of ranks. It then probably saves the same regions
 * again.
 */
static bool saved_before(const view *parent, rank_of_world by) {
    bool found = false;
    for (size_t i = 0; i < parent->block_count && !found; i++) {
        found = rank_that_wrote(parent, &parent->blocks[i]) == by.rank;
    }
    return found && parent->manifest.checkpoint.world == by.world;
}

void budget_plan_ends(load_budget *b, view_cache *views, const view *parent, rank_of_world by) {
    double exact = 0, lossy = 0, steps = 0, share = 1; /* exact, lossy, steps: base loads of growing chains */
    b->planned = parent;
    b->planned_rank = by.world > 1 && saved_before(parent, by) ? by.rank : ANY_RANK;
    b->ending = 0;
    b->to_free = 0;
    for (size_t i = 0; i < parent->block_count; i++) {
        const record *r = parent->blocks[i].record;
        load_cost chain = step_share(parent, r), base = record_base(r);
        if (is_planned(b, &parent->blocks[i])) {
            load_cost_add(&b->rest_chain, &chain);
            load_cost_add(&b->rest_base, &base);
            exact += is_chain(r, false) ? base.work : 0;
            lossy += is_chain(r, true) ? base.work : 0;
            steps += is_step_chain(r) || may_begin_steps(r) ? base.work : 0;
        }
    }
    double bound = PLAN_MARGIN * b->limit * b->rest_base.work;
    if (b->rest_chain.work + exact + lossy + steps > bound) { /* may be near */
        double links = expected_steps(b, views) + (exact > 0 ? exact * typical_link(b, views, false) : 0) +
                       (lossy > 0 ? lossy * typical_link(b, views, true) : 0);
        b->to_free = fmax(0, b->rest_chain.work + links - bound);
    }
    if (b->to_free > 0) {
        plan_endings(b);
    }
    if (by.world > 1 && b->planned_rank == ANY_RANK) {
        share = 1.0 / by.world;
    }
    b->to_free *= share;
    b->rest_chain = (load_cost){share * b->rest_chain.stored, share * b->rest_chain.work};
    b->rest_base = (load_cost){share * b->rest_base.stored, share * b->rest_base.work};
}

void budget_remove_expected(load_budget *b, const load_cost *chain, const load_cost *base) {
    load_cost *c = &b->rest_chain, *all = &b->rest_base;
    *all = (load_cost){fmax(0, all->stored - base->stored), fmax(0, all->work - base->work)};
    *c = (load_cost){all->stored > 0 ? fmax(0, c->stored - chain->stored) : 0,
                     all->work > 0 ? fmax(0, c->work - chain->work) : 0};
}

/* ---- asked while blocks are decided ---- */

/* Shares of the bound on a chain of steps at which all chains of the parameter end. */
#define LONG_FIRST  0.9
#define LONG_SQUARE 0.7 /* of a second moment, whose weights take a third more */

/* Whether a chain of the parameter would soon exceed its own bound. All chains of the parameter then end. */
static bool is_too_long(const load_budget *b, const record *parent_block) {
    const record *first, *leading = leading_record(&first, b->planned, parent_block);
    double bases = leading == first ? LONG_FIRST : 3 * LONG_SQUARE; /* of all three tensors */
    double bound = bases * BUDGET_MARGIN * PART_EXACT * b->limit * record_base(leading).work;
    return is_step_chain(leading) && (double)leading->chain_work > bound;
}

static bool is_planned_to_end(const load_budget *b, const record *parent_block) {
    return b->ending > 0 && priority_of_block(b->planned, parent_block) >= b->ending;
}

bool budget_ends_chain(const load_budget *b, const record *parent_block) {
    return ends_by_block(parent_block) && b->planned &&
           (is_planned_to_end(b, parent_block) || is_too_long(b, parent_block));
}

void budget_chain_ended(load_budget *b, const record *parent_block) {
    if (!is_planned_to_end(b, parent_block)) {
        return;
    }
    b->to_free = fmax(0, b->to_free - freed_by_end(b->planned, parent_block));
}

bool budget_ends_tensor(const load_budget *b, const view_tensor *parent) {
    tensor_chains c = b->ending > 0 ? chains_of(b, parent) : (tensor_chains){0, 0, 0};
    return c.base > 0 && priority_of_tensor(&c, parent->tensor->name) >= b->ending;
}

void budget_tensor_ended(load_budget *b, const view_tensor *parent, double share) {
    if (budget_ends_tensor(b, parent)) {
        tensor_chains c = chains_of(b, parent);
        double planned = fmin(1, share * c.all_base / c.base);
        b->to_free = fmax(0, b->to_free - planned * freed_by_tensor(&c));
    }
}
