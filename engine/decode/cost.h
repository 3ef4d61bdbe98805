/*
 * The cost of loads, and when a delta is worth its cost. A block's chain cost covers all that is read and decoded to
 * rebuild it. A base load is the cost of an exact, standalone copy of the same values. Both bytes and time are bounded.
 *
 * A delta is taken only if
 *  - it saves at least 3 % of the block coded on its own, and 1.5 % of the bytes it adds to the block's load;
 *  - the block's chain costs less than max_load_cost (default 4) base loads in bytes, and twice that in time
 *    (lossy: three times);
 *  - the whole checkpoint costs at most max_load_cost base loads. Remaining blocks are expected to cost what they cost
 *    in the parent. With several ranks, each keeps to the bound on its own and expects nothing. If tensors of the
 *    parent are left out, that expectation was too high: such a checkpoint may cost what a part of it may.
 * When the budget is spent, further blocks are coded on their own, which makes them cheap for the next saves. So chains
 * of different blocks end at different checkpoints and sizes stay even: there are no periodic full saves.
 *
 * A restart loads the newest checkpoint, and so does the next save. Some chains would make that cost more than
 * newest_load_cost (default 2) base loads. Their blocks are stored once more, coded on their own, as an evictable copy
 * (store/materialized.h).
 */
#ifndef ENGINE_COST_H
#define ENGINE_COST_H

#include "codec/entropy/codings.h"
#include "codec/chunk/record.h"
#include "engine/store/view.h"

typedef struct load_cost {
    double stored; /* payload bytes to read */
    double work;   /* nanoseconds to decode, on the machine that the constants were measured on */
} load_cost;

/*
 * The time to decode and verify one payload, without what it builds on. symbols: the integers in a symbol stream, at
 * most the element count (fewer if sparse); for a lossy block, its rank.
 */
double decode_work(predictor p, coding c, size_t element_size, uint64_t raw_size, uint64_t stored_size,
                   uint64_t symbols);

/* The time that the low-rank part adds to a lossy block. */
double low_rank_work(uint64_t elements, uint64_t rank);

static inline load_cost record_chain(const record *r) {
    return (load_cost){(double)r->chain_stored, (double)r->chain_work};
}
/* The base load of a block, from its standalone size. */
load_cost base_cost(size_t element_size, uint64_t raw_size, uint64_t base_stored);
/* The base load of a stored block. Without deltas below it, its own load is a base load by definition. */
load_cost record_base(const record *r);

typedef struct load_budget {
    double limit, newest_limit;      /* in base loads */
    load_cost materialized;          /* blocks decided so far, with their materialized copies */
    load_cost chain, base;           /* blocks decided so far */
    load_cost rest_chain, rest_base; /* expected of the remaining blocks */
} load_budget;

/*
 * Decoding a delta takes longer than its bytes suggest. So a part of a checkpoint may exceed the time limit by this
 * factor. Weights in lossy chains may use what their moments leave, most of which build on nothing.
 */
#define PART_EXACT 2.0
#define PART_LOSSY 3.0

/* Whether a part with this chain stays within its own bound. */
bool budget_allows_chain(const load_budget *b, const load_cost *chain, const load_cost *base,
                         double time_factor);
/* Whether it does, and the whole checkpoint with it. */
bool budget_has_room(const load_budget *b, const load_cost *chain, const load_cost *base, double time_factor);
/* Whether a delta of this size can save enough at all. */
bool delta_may_pay(uint64_t delta_size, uint64_t standalone_size);
/* Whether the newest checkpoint exceeds its bound unless this block gets a materialized copy. */
bool budget_wants_materialized(const load_budget *b, const load_cost *chain, const load_cost *base);
/* Whether a delta of this size is worth its chain cost and within both bounds. */
bool budget_allows_delta(const load_budget *b, const load_cost *chain, const load_cost *base,
                         double time_factor, uint64_t delta_size, uint64_t standalone_size);
/* The cost of an optimizer step, each with the base load to compare it with. */
typedef struct step_cost {
    load_cost alone, alone_base; /* of loading it by itself, inputs included */
    load_cost added, added_base; /* what it adds to loading its inputs */
} step_cost;
/* The same for an optimizer step, which is loaded together with its inputs. */
bool budget_allows_step(const load_budget *b, const step_cost *cost, uint64_t delta_size,
                        uint64_t standalone_size);
/* Counts a decided block. materialized: the cost of loading it while its checkpoint is the newest. */
void budget_add(load_budget *b, const load_cost *chain, const load_cost *materialized, const load_cost *base);
/* chain / base of bytes or of time, whichever is larger; 1 if there is nothing to load. */
double budget_load_cost(const load_budget *b);

/* ---- of a checkpoint ---- */
/*
 * The step's dependency `index`, if that is one block of the same checkpoint over the same span; else NULL.
 * Thread-safe.
 */
const view_block *step_input(const view *v, const view_block *b, uint32_t index);
/*
 * The cost that the block adds to loading the rest of its checkpoint. For a step, this excludes the moments that it is
 * predicted from, as they are loaded with it (sibling_cache.h). Thread-safe.
 */
load_cost step_share(const view *v, const view_block *b);
/*
 * Sets tensors, depth, raw_bytes, stored_bytes and load_cost of m->checkpoint, and m->roles, from the records in the
 * checkpoint's files. v is opened from the same files. A file with other checkpoints' records counts by the share of
 * this checkpoint's records. Errors: NOMEM.
 */
ckd_status totals_set(manifest *m, const view *v, ckd_error *err);

#endif
