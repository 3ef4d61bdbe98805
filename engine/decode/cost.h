/*
 * What loading costs, and when a delta is worth it. A block's chain cost is what must be read and decoded to rebuild it;
 * a base load is what an exact, standalone base of the same values would take. Both bytes and time are bounded.
 *
 * Decided here: a delta is taken only if
 *  - it saves at least 3 % of the block coded on its own, and 1.5 % of the bytes it adds to the block's load;
 *  - the block's own chain stays below max_load_cost (default 4) base loads in bytes and twice that in time (lossy: thrice);
 *  - the whole checkpoint costs at most max_load_cost base loads. What is still to come is expected to cost what it cost
 *    in the parent; of several ranks each keeps to the bound by itself, and expects nothing. (Where tensors of the parent are
 *    left out, that was too much: such a checkpoint may cost what a part of it may.)
 * When the budget is spent, the next blocks are coded on their own. They are cheap for the saves that follow, so chains of
 * different blocks end at different checkpoints and sizes stay even: there is no save that writes everything anew.
 *
 * A restart wants the newest checkpoint, and so does the next save. Blocks whose chains would make loading it cost more
 * than newest_load_cost (default 2) base loads are written once more, on their own, as an evictable copy (store/materialized.h).
 */
#ifndef ENGINE_COST_H
#define ENGINE_COST_H

#include "codec/entropy/codings.h"
#include "codec/chunk/record.h"

typedef struct load_cost {
    double stored; /* payload bytes to read */
    double work;   /* nanoseconds to decode, on the machine that the constants were measured on */
} load_cost;

/*
 * Decoding and verifying one payload, what it builds on excluded. symbols: integers in a symbol stream, as many as elements or,
 * in a sparse one, fewer; of a lossy block, its rank.
 */
double decode_work(predictor p, coding c, size_t element_size, uint64_t raw_size, uint64_t stored_size,
                   uint64_t symbols);

/* What the low-rank part of a lossy block adds to it. */
double low_rank_work(uint64_t elements, uint64_t rank);

static inline load_cost record_chain(const record *r) {
    return (load_cost){(double)r->chain_stored, (double)r->chain_work};
}
/* The base load of a block, from what it would take on its own. */
load_cost base_cost(size_t element_size, uint64_t raw_size, uint64_t base_stored);
/* The same for a stored block. Without deltas behind it, loading it is a base load by definition. */
load_cost record_base(const record *r);

typedef struct load_budget {
    double limit, newest_limit;      /* in base loads */
    load_cost materialized;          /* of the blocks decided so far, with their materialized copies */
    load_cost chain, base;           /* of the blocks decided so far */
    load_cost rest_chain, rest_base; /* expected of those still to come */
} load_budget;

/*
 * Decoding a delta takes longer than its bytes suggest, so that a part of a checkpoint may cost that many times the limit in time. Weights
 * in lossy chains may have what their moments, most of which build on nothing, leave of it.
 */
#define PART_EXACT 2.0
#define PART_LOSSY 3.0

/* Does a part with this chain stay within its bound? */
bool budget_allows_chain(const load_budget *b, const load_cost *chain, const load_cost *base, double part);
/* Does it, and the whole checkpoint with it? */
bool budget_has_room(const load_budget *b, const load_cost *chain, const load_cost *base, double part);
/* May a delta of this size pay at all? */
bool delta_may_pay(uint64_t delta_size, uint64_t standalone_size);
/* Must this block be kept ready, for the newest checkpoint to stay within its bound? */
bool budget_wants_materialized(const load_budget *b, const load_cost *chain, const load_cost *base);
/* Is this delta (its chain cost, its own size) worth it and within the bounds? */
bool budget_allows_delta(const load_budget *b, const load_cost *chain, const load_cost *base, double part,
                         uint64_t delta_size, uint64_t standalone_size);
/*
 * The same for an optimizer step, which is loaded with others: `alone` is what it takes by itself, against a base load of all that this is,
 * `chain` what it adds to loading them.
 */
bool budget_allows_step(const load_budget *b, const load_cost *alone, const load_cost *standalone_base,
                        const load_cost *chain, const load_cost *base, uint64_t delta_size,
                        uint64_t standalone_size);
/* materialized: what loading the block costs while its checkpoint is the newest. */
void budget_add(load_budget *b, const load_cost *chain, const load_cost *materialized, const load_cost *base);
/* chain / base, the larger of bytes and time; 1 if there is nothing to load. */
double budget_load_cost(const load_budget *b);

#endif
