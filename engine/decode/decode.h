/* The interface of engine/decode/ for other rooms. README.md has an overview. */
#ifndef ENGINE_DECODE_DECODE_H
#define ENGINE_DECODE_DECODE_H

#include <pthread.h>

#include "base/hash.h"
#include "codec/chunk/chunk.h"
#include "codec/entropy/entropy.h"
#include "codec/lattice/lattice.h"
#include "engine/decode/load_plan.h"
#include "engine/decode/values_store.h"
#include "engine/store/store.h"
#include "kernels/kernels.h"

/*
 * Computes values from the integers of a lossy block. Decoders use it, and encoders, to know what decoders will get.
 * codec/FORMAT.md, "Lattice blocks". Runs under base/float_mode.h.
 */

/* Buffers of one worker. Zero-initialise. */
typedef struct lattice_work {
    bytes values, products, left, columns, right, step, row_step;
    lattice_scratch scratch;
} lattice_work;
void lattice_work_free(lattice_work *w);

/*
 * Whether all sums of products are exact in single precision. left, right: largest magnitude of each component, the
 * right one's with its shift.
 */
bool lattice_sums_exact(const float *left, const float *right, uint32_t rank);

/*
 * Converts a factor (n x rank) to int8, n x `padded`, with zeros after the last component. shift: left shift per
 * component, applied to the values; NULL: none. Returns false if a value does not fit; `to` is undefined then.
 */
bool lattice_factor_bytes(int8_t *to, const int32_t *factor, uint64_t n, uint32_t rank, uint32_t padded,
                          const int32_t *shift);

/*
 * Computes the block's low-rank part, rows x columns in row-major order, in units of 2^low_rank_exponent steps. NULL
 * and CKD_OK if it has none. The result lives in w->products. Errors: CORRUPT (sums could be inexact), NOMEM.
 */
ckd_status lattice_products(const float **out, const lattice_block *b, lattice_work *w, const kernels *k,
                            ckd_error *err);

/*
 * Prepares and gives the parameters of one row's run. lattice_steps puts the columns' steps, from column 0 on, into
 * w->step.
 */
ckd_status lattice_steps(const lattice_block *b, lattice_work *w, ckd_error *err);
lattice_run lattice_row_run(const lattice_block *b, const lattice_work *w, uint64_t row);
level_run level_row_run(const lattice_block *b, const lattice_work *w, uint64_t row, bool has_parent);
/* Counts the block's elements in row `row`, and gives the first: its index *first in the block, and its *column. */
uint64_t lattice_row_span(const lattice_block *b, uint64_t row, uint64_t *first, uint64_t *column);

/*
 * Rebuilds b->count values as floats. values holds the parent's values on entry, if has_parent. Exceptions are not
 * applied yet. The block's integers are not given as masks. Errors: CORRUPT, NOMEM.
 */
ckd_status lattice_rebuild(float *values, const lattice_block *b, bool has_parent, lattice_work *w,
                           const kernels *k, ckd_error *err);
/* A block's values in the tensor's dtype, at any alignment. */
typedef struct lattice_target {
    void *values;
    ckd_dtype dtype;
    bool has_parent; /* on entry, they are the parent's values */
} lattice_target;
/*
 * The same as lattice_rebuild, with exceptions applied. The integers may also be masks; then only values that move take
 * time.
 */
ckd_status lattice_rebuild_values(const lattice_target *to, const lattice_block *b, lattice_work *w,
                                  const kernels *k, ckd_error *err);

/*
 * Caches the decoded side records of lossy matrices. Every link of a chain has its own columns, and the next block of
 * the matrix needs them again, on whichever worker. Likewise, neighbouring blocks share the side records of their rows.
 * Internal to engine/; thread-safe.
 */

#define CACHED_COLUMNS \
    1088 /* more entries than a pool has workers, each of which may hold one and wait for a second */
#define CACHED_COLUMN_BYTES (UINT64_C(16) << 20) /* the newest and those in use may exceed it */

typedef struct cached_columns {
    hash128 content;
    lattice_columns columns; /* points into the next three */
    bytes step, shift, factor;
    uint64_t used; /* time of last use; 0: empty */
    uint32_t pins; /* current uses; only unpinned entries are evicted */
    bool filling;  /* a worker is decoding it */
} cached_columns;

typedef struct columns_cache {
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    cached_columns all[CACHED_COLUMNS];
    size_t count; /* entries that were ever used */
    uint64_t clock;
} columns_cache;

void columns_cache_init(columns_cache *c);
/*
 * in_child: called in a forked child. There, threads that the child does not have seem to wait on the locks, so these
 * are left alone.
 */
void columns_cache_free(columns_cache *c, bool in_child);

/*
 * The cost of loads, and when a delta is worth its cost. A block's chain cost covers all that is read and decoded to
 * rebuild it. A base load is the cost of an exact, standalone copy of the same values. Both bytes and time are bounded.
 *
 * A delta is taken only if
 *  - it saves at least 3 % of the block coded on its own, and 1.5 % of the bytes it adds to the block's load;
 *  - the block's chain costs less than max_load_cost (default 4) base loads in bytes, and twice that in time
 *    (lossy: four times);
 *  - the whole checkpoint costs at most max_load_cost base loads. Blocks still to come count with their cost in the
 *    parent; a rank counts its share. If a save leaves out tensors of the parent, this estimate is too high, so the
 *    save may cost up to the bound on a single block.
 * When the budget is spent, further blocks are coded on their own, which makes them cheap for the next saves. A plan
 * (budget_plan_ends) ends the longest exact chains before that. So chains of different blocks end at different
 * checkpoints and sizes stay even: there are no periodic full saves.
 *
 * A restart loads the newest checkpoint, and so does the next save. A caller may set newest_load_cost to a limit below
 * max_load_cost. Blocks whose chains would exceed it are then stored once more, coded on their own, as an evictable
 * copy (store/materialized.c).
 */

typedef struct load_cost {
    double stored; /* payload bytes to read */
    double work;   /* nanoseconds to decode, on the machine that the constants were measured on */
} load_cost;

/*
 * The time to decode and verify one payload, without what it builds on. symbols: the integers in a symbol stream, at
 * most the element count (fewer if it lists changes); for a lossy block, its rank.
 */
double decode_work(predictor p, coding c, size_t element_size, uint64_t raw_size, uint64_t stored_size,
                   uint64_t symbols);

/* The time that the low-rank part adds to a lossy block. */
double low_rank_work(uint64_t elements, size_t element_size, uint64_t rank);

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
    const view *planned;   /* the parent, by whose chains the next three are planned (chain_plan.c) */
    uint32_t planned_rank; /* the rank whose blocks of it count; UINT32_MAX: all do */
    uint64_t ending;       /* chains end from this priority on; 0: none by plan */
    double to_free;        /* work that ending chains have yet to save */
} load_budget;

typedef struct rank_of_world {
    uint32_t rank, world;
} rank_of_world;
/*
 * Expects the parent's costs of all blocks. If the checkpoint would then exceed its bound, plans which chains end: the
 * longest, as that frees most for the bytes it takes. One of several ranks plans for what it saved of the parent. If it
 * saved nothing of it, or the number of ranks changed, it plans for all and expects an even share. `limit` must be set.
 * The parent's view must outlive the budget.
 */
void budget_plan_ends(load_budget *b, view_cache *views, const view *parent, rank_of_world by);
/* Takes some of the expected costs away, because the real ones follow. A rank may save more than it expected to. */
void budget_remove_expected(load_budget *b, const load_cost *chain, const load_cost *base);
/*
 * Whether the chain of the parent's block is not to be continued: the plan ends it, or it is a chain of steps that
 * would soon exceed its own bound. Does not depend on decisions.
 */
bool budget_ends_chain(const load_budget *b, const record *parent_block);
/* Whether such a chain is long enough for a delta on the block that it begins with. */
bool budget_may_merge(const record *parent_block);
/* Takes the chain of the parent's block out of the plan, because it ended. */
void budget_chain_ended(load_budget *b, const record *parent_block);
/* The same for the lossy chains of a tensor, which end together; `share`: of the parent's tensor. */
bool budget_ends_tensor(const load_budget *b, const view_tensor *parent);
void budget_tensor_ended(load_budget *b, const view_tensor *parent, double share);

/*
 * Decoding a delta takes longer than its bytes suggest. So a part of a checkpoint may exceed the time limit by this
 * factor. Weights in lossy chains may use the time that their moments leave, because most of those build on nothing.
 */
#define PART_EXACT 2.0
#define PART_LOSSY 4.0

/* Whether a part with this chain stays within its own bound. */
bool budget_allows_chain(const load_budget *b, const load_cost *chain, const load_cost *base,
                         double time_factor);
/* The same for an optimizer step with all that it is loaded with, which may exceed the limit in bytes, too. */
bool budget_allows_step_chain(const load_budget *b, const load_cost *chain, const load_cost *base);
/* Whether both this part and the whole checkpoint stay within their bounds. */
bool budget_has_room(const load_budget *b, const load_cost *chain, const load_cost *base, double time_factor);
/* Whether a delta of this size can save enough at all. */
bool delta_may_pay(uint64_t delta_size, uint64_t standalone_size);
/*
 * Whether a delta saves enough: of the standalone size, and relative to the bytes that it adds to the load. Ignores all
 * bounds.
 */
bool delta_pays(const load_cost *chain, uint64_t delta_size, uint64_t standalone_size);
/* Whether the newest checkpoint exceeds its bound unless this block gets a materialized copy. */
bool budget_wants_materialized(const load_budget *b, const load_cost *chain, const load_cost *base);
/* Whether a delta of this size is worth its chain cost and within both bounds. */
bool budget_allows_delta(const load_budget *b, const load_cost *chain, const load_cost *base,
                         double time_factor, uint64_t delta_size, uint64_t standalone_size);
/* The cost of an optimizer step, each with the base load to compare it with. */
typedef struct step_cost {
    load_cost by_itself, by_itself_base; /* of loading it alone, inputs included */
    load_cost added, added_base;         /* what it adds to loading its inputs */
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
const view_block *step_input(const view *v, const record *r, uint32_t index);
/*
 * The cost that the block adds to loading the rest of its checkpoint. For a step, this excludes the moments that it is
 * predicted from, as they are loaded with it. Thread-safe.
 */
load_cost step_share(const view *v, const record *r);
/*
 * Sets tensors, depth, raw_bytes, stored_bytes and load_cost of m->checkpoint, and m->roles, from the records in the
 * checkpoint's files. v is opened from the same files. A file with other checkpoints' records counts by the share of
 * this checkpoint's records. Errors: NOMEM.
 */
ckd_status totals_set(manifest *m, const view *v, ckd_error *err);

/*
 * Rebuilding values: reads the blocks that intersect a span, walks each block's chain to its root, decodes the root and
 * applies the deltas on the way back. It verifies the content hash of the last block of a chain, and those of the
 * others only if that one does not match (DECISIONS.md).
 */

#define MAX_CHAIN_BLOCKS 4096u /* blocks decoded for one block; a chain has a handful */
#define MAX_SAVE_STEPS   1024u /* the same for the parent of a delta */
#define MAX_DEPTH        256u  /* nesting of blocks */
#define MAX_SAVE_DEPTH   128u

/* A block that optimizer steps were predicted from recently. */
#define CACHED_BLOCKS 8
typedef struct cached_block {
    const record *record; /* NULL: none */
    bytes values;
    uint64_t used;
    uint32_t pins; /* current uses */
} cached_block;

/* A part of a chunk file, with the payloads that probably come next. */
typedef struct payload_window {
    const file_reader *file;
    uint64_t at, next; /* where it begins; where the last small payload ended that was read from the file */
    uint64_t used;     /* time of last use */
    bytes data;
} payload_window;
#define PAYLOAD_WINDOWS 32 /* of as many files: a chain alternates between those of its checkpoints */

/*
 * Values that the caller of a load has anyway, such as those of the checkpoint before. A chain is not decoded below
 * them.
 */
typedef struct known_values {
    /*
     * Copies what may be the record's values to `to` (raw_size bytes); the decoder compares their content hash. Returns
     * false if there is nothing to copy. Several threads call it at once.
     */
    bool (*copy)(void *context, void *to, const record *r);
    void *context;
} known_values;

/* Scratch of one worker. */
typedef struct decoder {
    coder *coder;
    const kernels *kernels;
    view_cache *views; /* views of the checkpoints that chains lead to */
    bytes stored;      /* payload as read */
    payload_window windows[PAYLOAD_WINDOWS];
    uint64_t window_clock;
    bytes integers; /* decoded residuals */
    bytes context;
    lattice_work lattice;
    columns_cache *columns; /* shared by the load or save, or the decoder's own */
    bool own_columns;
    uint32_t waiting;  /* blocks waiting for their parent's values; these values need no hash of their own */
    bool verify_chain; /* a chain gave wrong values: compare every hash on the way */
    uint32_t blocks_decoded; /* blocks decoded for the current top-level block: bounds hostile fan-out */
    uint32_t depth;          /* of the current recursion: bounds cycles, and the stack */
    /* MAX_CHAIN_BLOCKS; a save uses less, so that every load of its blocks stays within the limit */
    uint32_t block_limit;
    uint32_t sharing; /* nested optimizer steps in progress: blocks stay cached meanwhile */
    uint32_t nested;  /* nesting of inputs */
    cached_block cached[CACHED_BLOCKS];
    uint64_t cache_clock;
    values_store *shared_values; /* the load's; NULL: none */
    const record *filling;       /* the first, by values_store_before, being decoded into it; NULL: none */
    const load_plan *plan;       /* of the whole load, or NULL; then the next two decide */
    const view *top;             /* the load's view, or NULL */
    const bool *has_derived;     /* by tensor of `top`: other tensors of the checkpoint are built from it */
    const payloads *payloads;    /* payloads in memory; or NULL */
    const known_values *known;   /* or NULL */
    uint64_t bytes_read;         /* of payloads */
} decoder;
/*
 * Creates a decoder. views: must outlive it; NULL: the caller sets it before the decoder decodes. columns: shared with
 * other workers, must outlive it; NULL: it gets its own.
 */
ckd_status decoder_init(decoder *d, view_cache *views, columns_cache *columns, ckd_error *err);
void decoder_free(decoder *d);

/* Decodes one block of `v` to `to` (raw_size bytes, any alignment). */
ckd_status block_values(decoder *d, const view *v, const view_block *b, void *to, ckd_error *err);

/*
 * ---- values_step.c: blocks that build on each other, one after the other ----
 *
 * Between begin and end the decoder keeps the last few blocks' values. A block that builds on one of them reads nothing
 * below it. So a chain that is decoded from its oldest block on is read once. Records must be at the same address in
 * all views involved (one view_cache).
 */
void block_series_begin(decoder *d);
/* *values: valid until the next call with this decoder; values may be NULL. Errors: as block_values. */
ckd_status block_series_next(const void **values, decoder *d, const view *v, const view_block *b,
                             ckd_error *err);
void block_series_end(decoder *d);
/* A block of a series. The caller sets `block` and `checkpoint`. */
typedef struct series_block {
    const view_block *block;
    size_t checkpoint; /* its place among the checkpoints, the oldest first */
    size_t tag;        /* the caller's */
    const char *name;  /* of the weight that the tensor belongs to */
    uint32_t rank;     /* tensors that others are predicted from come first */
} series_block;
/*
 * Sorts blocks into series: the blocks of one region of a weight and of its moments, by checkpoint. begins: count + 1
 * entries; gets where each series begins, and then the end. Returns the number of series.
 */
size_t block_series_sort(series_block *blocks, size_t *begins, size_t count);

/* Memory for the values of a span of a tensor, contiguous. */
typedef struct span_target {
    const view_tensor *tensor;
    const region_span *span;
    void *to;
} span_target;
/* Copies a block's part of the span from the block's values. Returns the number of elements. */
static inline uint64_t span_target_copy(const span_target *target, const view_block *b, const void *values) {
    const view_tensor *t = target->tensor;
    region_span have = {b->record->region, b->record->first, b->record->count};
    return span_copy(t->shape, ckd_dtype_size(t->tensor->dtype), target->to, target->span, values, &have);
}
/* Places one block's part of the span into the target. Adds the number of elements to *copied. */
ckd_status block_into_span(decoder *d, const view *v, const view_block *b, const span_target *target,
                           uint64_t *copied, ckd_error *err);

/*
 * Decodes a span of a tensor to `to`, contiguous. from->content: the content hash, or NULL if the caller does not know
 * it. Errors: CORRUPT (the stored regions do not cover the span, or the hash differs), those of decoding.
 */
ckd_status span_values(decoder *d, const view_source *from, void *to, ckd_error *err);

/* Decodes and verifies a blob or a group (raw_size bytes). */
ckd_status blob_bytes(decoder *d, const view_block *b, void *to, ckd_error *err);
/* The same for a record that many blocks name; a load reads it once. */
ckd_status shared_bytes(decoder *d, const view_block *b, void *to, ckd_error *err);

/* ---- shared by values.c, values_step.c, values_lattice.c and device/chain.c ---- */
/* Errors: UNSUPPORTED (this version does not know the block's coding or predictor). */
ckd_status values_check_supported(const view_block *b, ckd_error *err);
/* The block's verified payload, valid until the decoder reads the next one. */
ckd_status values_payload(decoder *d, const view_block *b, const void **payload, ckd_error *err);
/*
 * A lossy block's integers, valid until the decoder decodes another block. Shared parts stay until
 * values_lattice_release. as_masks: see lattice_payload.
 */
typedef struct lattice_parts {
    lattice_block block;
    cached_columns *columns, *rows; /* NULL: none */
} lattice_parts;
ckd_status values_lattice_read(lattice_parts *out, decoder *d, const view *v, const view_block *b,
                               bool as_masks, ckd_error *err);
void values_lattice_release(decoder *d, lattice_parts *p);
/* The same for a block that others may need, too. Uses the load's values_store if the plan says so. */
ckd_status values_of_input(decoder *d, const view *v, const view_block *b, void *to, ckd_error *err);
/* Decodes the values that the block is a delta on, or a copy of, wherever they are. */
ckd_status values_dependency(decoder *d, const view *own, const view_block *b, void *to, ckd_error *err);

/*
 * Keeps values that a load decodes as a by-product, until they are requested. Weights stored as an optimizer step are
 * rebuilt together with their moments, and with those of every ancestor. If the second moments are requested next, all
 * that work would be repeated. So moments of the loaded checkpoint that weights were rebuilt from are kept. Second
 * moments are rebuilt as part of their weights, which are kept too. At most `limit` bytes are held; beyond that, blocks
 * are decoded again. Internal to engine/; thread-safe.
 */

typedef struct sibling_cache {
    pthread_mutex_t mutex;
    const view *view;
    const view_block *
        *dependent_weights; /* by index of the view's block: the weights predicted from it, or NULL */
    void **cached;          /* likewise: its values, or NULL */
    bool *handed_out;       /* likewise: all of it was handed out */
    uint64_t bytes, limit;
} sibling_cache;

/*
 * Leaves out->view NULL if the checkpoint has no steps: nothing is shared then, and sibling_cache_scatter must not be
 * called.
 */
ckd_status sibling_cache_init(sibling_cache *out, const view *v, uint64_t limit, ckd_error *err);
void sibling_cache_free(sibling_cache *s);

/* Whether the block is a step, or is rebuilt together with one. */
bool sibling_cache_has(const sibling_cache *s, const view_block *b);
/*
 * The number of the block that this one is rebuilt with: its own, or that of a weight. Blocks with the same number are
 * best decoded on the same thread, one after the other.
 */
size_t sibling_cache_group(const sibling_cache *s, const view_block *b);
/* Like block_into_span, for one of the view's blocks. */
ckd_status sibling_cache_scatter(sibling_cache *s, decoder *d, const view_block *b, const span_target *target,
                                 uint64_t *copied, ckd_error *err);

#endif
