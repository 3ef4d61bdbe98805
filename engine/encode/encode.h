/* The interface of engine/encode/ for other rooms. README.md has an overview. */
#ifndef ENGINE_ENCODE_ENCODE_H
#define ENGINE_ENCODE_ENCODE_H

#include <pthread.h>

#include "base/bytes.h"
#include "codec/entropy/entropy.h"
#include "engine/common/common.h"
#include "engine/decode/decode.h"
#include "engine/encode/content_index.h"
#include "engine/encode/step.h"
#include "engine/lossy/lossy.h"
#include "kernels/kernels.h"

/*
 * The size of a block of values as symbols: on its own, and as a delta on previous values. Planning both is the
 * slowest part of a save, so a sample shows first which of them can win.
 */

/* A delta below this fraction of the expected standalone size wins without knowing the exact standalone size. */
#define BLOCK_DELTA_WON 0.95

/* The values of a block. They stay unchanged until it is encoded. */
typedef struct plan_input {
    ckd_dtype dtype;
    const void *values;
    size_t count;
    symbols_grid grid;
} plan_input;

/* A worker's scratch. Slot 0 of the symbols workspace holds the standalone plan, slot 1 the delta's. */
typedef struct block_plan {
    const kernels *kernels;
    symbols_workspace *work; /* the caller's, like the values */
    plan_input input;
    unsigned width;
    symbols_mode mode;                 /* of the standalone stream */
    const void *previous;              /* NULL: no delta */
    bytes integers, residual, context; /* `residual` also holds a sample */
    /* Sizes in bytes; estimated from a sample unless planned. */
    size_t standalone, delta;
    size_t delta_symbols; /* integers in the delta's stream */
    bool standalone_planned, delta_planned, standalone_sampled;
} block_plan;

/* The rows and columns of the elements from `first` on. */
symbols_grid block_grid(const geometry *g, const ckd_region *region, uint64_t first);

/*
 * Codes one block: find it elsewhere, else predict it and compare sizes, else store it raw.
 *
 *   block_analyse  (parallel)  hashes it; if its values are not stored yet, plans it on its own and as a delta
 *   block_decide   (in order)  takes the delta if it saves enough and the load budget allows it, else the block alone
 *   block_encode   (parallel)  makes the payload, and that of the materialized copy if one is to be kept
 *
 * Deciding in order makes the bytes written independent of the number of threads.
 */

#define REFERENCED_CHECKPOINTS_MAX \
    64u /* checkpoints that copies may name: all of them are open while this one is loaded, so they must be few */

/*
 * Checkpoints that copies may name, recorded as blocks are decided: the parent, and those named before. The number of
 * blocks still in flight makes no difference, as it grows with the number of threads.
 */
typedef struct referenced_checkpoints {
    ckd_id ids[REFERENCED_CHECKPOINTS_MAX];
    uint32_t count;
} referenced_checkpoints;

/* Blocks that are decided, but not in coding_context's `dedup_index` yet. */
typedef struct blocks_in_flight {
    const struct block_job **jobs;
    size_t count;
} blocks_in_flight;

/*
 * Shared by all blocks of a save. Jobs read dedup_index, referenced and in_flight under registry_lock; changes take
 * it, too.
 */
typedef struct coding_context {
    ckd_codec codec;
    int level;
    view_cache *views;
    const view *parent;               /* NULL: no deltas */
    const content_index *dedup_index; /* of this save */
    ckd_id checkpoint;
    referenced_checkpoints *referenced; /* NULL: copies may name any checkpoint */
    const blocks_in_flight *in_flight;  /* NULL: none */
    pthread_rwlock_t *registry_lock;    /* NULL: nothing changes while jobs run */
} coding_context;

/* Shared by all blocks of one tensor or panel. */
typedef struct tensor_context {
    const record_tensor *tensor;
    geometry shape;
    const ckd_region *region; /* canonical */
    /* the name of its parameter: the tensor itself, or the one whose state it is; NULL: unknown */
    const char *weight;
    bool largest;              /* a second moment that is the maximum so far (AMSGrad), not the current one */
    const view_tensor *parent; /* same name, dtype and shape in the parent; NULL: none */
    const step_source *step;   /* inputs that predict an optimizer step; NULL: none */
    uint64_t block_elements;   /* most elements of an exact block, if `rows` is NULL */
    /* where the blocks of a panel end (save/block_grid.h); NULL: not a panel */
    const struct save_panel_rows *rows;
    /* the parent's values in memory, laid out as `values_span`; NULL: read them from the store */
    const void *parent_values;
    /* receives the decoded values, laid out as `values_span`; may be `parent_values`. NULL: nowhere */
    void *decoded_values;
    region_span values_span;
} tensor_context;

/* One method to store the block, with its coding. size 0 and not available: not tried. */
typedef struct candidate {
    bool available, encoded; /* encoded: the payload exists; else the size is planned or estimated */
    coding coding;
    uint64_t size;
    load_cost chain;
    bytes payload;
} candidate;

/* The block as an optimizer step from the parent's. */
typedef struct block_step {
    bool available;
    bool predicts;    /* `predicted` is the difference from the step, not from the previous values */
    bool two_inputs;  /* of this checkpoint */
    bool by_gradient; /* a first moment, by its gradient: it has no inputs in this checkpoint */
    uint32_t rule, depth;
    load_cost chain;  /* cost of loading its inputs, without its own payload */
    load_cost shared; /* part of `chain`: the cost of its most expensive input */
    load_cost base;   /* a base load of its inputs in this checkpoint */
    bool tried, fits; /* of a first moment: its gradient was looked at, and was bf16 */
    double scale;     /* of that gradient */
    uint8_t group[GROUP_BYTES];
    hash128 content; /* of the group */
} block_step;

/*
 * The results of a device for a block, set before the job is analysed (save/device.h). The block's values may still
 * be on the device.
 */
typedef struct block_precoded {
    bool coded;             /* the device has coded the block, or found its values in this save */
    bool delta, standalone; /* the analysis has a payload for it */
    bool rejected;          /* a delta was planned, and does not clearly win */
    bool rounded;           /* a master whose rounded hashes, below, are known, whether it is coded or not */
    hash128 bf16, f16;      /* as rounded_bf16 and rounded_f16 */
    hash128 content;        /* of its values */
    uint64_t planned, planned_standalone; /* planned sizes in bytes */
} block_precoded;

/* A side record with the rows of a lossy block, which neighbouring blocks share. */
typedef struct shared_rows {
    uint64_t row, rows; /* of the tile */
    region_span span;   /* of the record */
    hash128 content;
} shared_rows;

/*
 * The state of a block between its input and its decision:
 *
 *   BLOCK_NEW --- block_find_unchanged ---> BLOCK_UNCHANGED ----------------------> block_decide
 *       |
 *   block_analyse ---> BLOCK_DUPLICATE -------------------------------------------> block_decide
 *       ^         ---> BLOCK_PLANNED ---------------------------------------------> block_decide
 *       |         ---> BLOCK_BLOCKED ------ that block is registered ------+
 *       |         ---> BLOCK_WANTS_VALUES - they are read from the device -+
 *       +------------------------------------------------------------------+
 *
 * An analysis may also be repeated because other blocks have made it outdated (save/order.c).
 */
typedef enum block_state {
    BLOCK_NEW,
    BLOCK_UNCHANGED,    /* found in the parent by its hash alone: a duplicate whose values are not set */
    BLOCK_BLOCKED,      /* a block in flight may have its values: analyse again once it is registered */
    BLOCK_WANTS_VALUES, /* precoded, but its values are needed for the decision */
    BLOCK_DUPLICATE,    /* stored already: predictor and dependency are set, nothing else to do */
    BLOCK_PLANNED       /* one of its candidates will be stored */
} block_state;

/* Set by the caller, before the analysis. */
typedef struct block_input {
    uint64_t first, count; /* elements of the region */
    const void *values;    /* the caller's, or `own`; of an analysed lossy block, the decoded ones */
    bytes own;
    bool try_delta;
    bool in_panel; /* the block belongs to a panel of a large matrix */
    block_precoded precoded;
} block_input;

/* The block that a chain begins with. It depends on nothing. */
typedef struct chain_start {
    const view *view;
    const view_tensor *tensor;
    const record *block;
} chain_start;

/* Set by the analysis: the hashes of the input, the parent's block, and the methods to store the block. */
typedef struct block_analysis {
    hash128 original;
    /* a master's values, rounded: its low-precision copy will have one of these hashes */
    hash128 rounded_bf16, rounded_f16;
    const record *parent_block; /* the parent's block over the same span; NULL: none */
    /* of the values that a delta is taken to: the ancestor's if there is one, else the parent's */
    uint32_t previous_depth;
    load_cost previous_chain;
    bool ends;            /* the chain of parent_block is not continued */
    chain_start ancestor; /* view NULL: none */
    bool parent_damaged;  /* the parent's values could not be read, so the block is coded on its own */
    bool delta_rejected;  /* a delta was tried, and does not save enough */
    candidate standalone;
    /* the difference from the previous values or, if step.predicts, from what a step makes of them */
    candidate predicted;
    block_step step;
} block_analysis;

/* How the block is stored: set by the analysis of a duplicate, and by block_decide for others. */
typedef struct block_decision {
    candidate *chosen; /* NULL: a duplicate */
    bool materialize;  /* also write `standalone` as a materialized copy */
    predictor predictor;
    dependency dependencies[4];
    uint32_t dependency_count;
    uint32_t standalone_dependencies; /* of the block on its own: a lossy one may need side records */
    uint32_t depth;
    load_cost chain, base;
    /* the part of `chain` that a load of the rest of the checkpoint does not pay anyway */
    load_cost own_cost;
    uint64_t base_stored;
} block_decision;

/* The values as a load will have them; of an exact block, those of the input. */
typedef struct block_output {
    hash128 content;
    bool lossy;
    const lossy_tile *tile;            /* of a lossy block */
    shared_rows rows;                  /* if the tile's plan shares rows */
    hash128 result_bf16, result_f16;   /* of a master's decoded values, rounded */
    lossy_error error;                 /* of the decoded values; 0: exact */
    lossy_error error_bf16, error_f16; /* of a master's decoded values, rounded */
    uint64_t nonfinite; /* NaNs and infinities of an exact block; 0 also if its values were not looked at */
} block_output;

/* Memory that is used again from block to block. */
typedef struct block_scratch {
    bytes previous; /* the parent's values, or the prediction */
    bytes step_first, step_before;
    lossy_job lossy;
} block_scratch;

/* One block, and the tools of the thread that works on it. */
typedef struct block_job {
    decoder decoder; /* reads the parent; its coder also plans and encodes, as decoding leaves plans alone */
    block_plan plan;
    block_scratch scratch;
    block_state state;
    block_input input;
    block_analysis analysis;
    block_decision decision;
    block_output output;
} block_job;

static inline bool block_is_duplicate(const block_job *job) {
    return job->state == BLOCK_DUPLICATE || job->state == BLOCK_UNCHANGED;
}

/* columns: the save's, shared by all jobs. */
ckd_status block_job_init(block_job *job, columns_cache *columns, ckd_error *err);
void block_job_free(block_job *job);

/* Records that the values have been copied to another place. The job may be in any state. */
static inline void block_job_move(block_job *job, const void *values) {
    job->plan.input.values = job->plan.input.values == job->input.values ? values : job->plan.input.values;
    job->input.values = values;
}

/*
 * Returns the block over exactly the same span: block_in_parent in the parent, block_matching in `in`. NULL: it was
 * cut differently there.
 */
const record *block_in_parent(const tensor_context *tensor, uint64_t first, uint64_t count);
const record *block_matching(const block_job *job, const tensor_context *tensor, const view_tensor *other);
/*
 * Looks for values with this hash in the parent, before the job's values are read. Returns true if the parent has them;
 * the job is then analysed. The parent's block must have depth 0: other blocks may get a materialized copy, which needs
 * values. jobs: number of jobs in flight, each of which may name another checkpoint.
 */
bool block_find_unchanged(block_job *job, const coding_context *ctx, const tensor_context *tensor,
                          const hash128 *content, uint32_t jobs);
/* Analyses a job. Reads only the parts of the budget that are the same during a whole save. */
ckd_status block_analyse(block_job *job, const coding_context *ctx, const tensor_context *tensor,
                         const load_budget *budget, ckd_error *err);
/*
 * Expected size of a block on its own: the size of the parent's block, from its record. 0: unknown, and the values
 * must be looked at.
 */
uint64_t block_expected_standalone(const record *parent_block, uint64_t raw);
/* A sample of `size` bytes at `at`, which shows if zstd or LZ4 can beat the size that the block has otherwise. */
typedef struct block_probe {
    uint64_t at, size; /* size: all bytes of the block if they are few */
} block_probe;
block_probe block_probe_of(bool in_panel, unsigned width, uint64_t size);
/* The bytes of a sample, and the size below which a codec must get all bytes of the block. */
typedef struct block_sample {
    const void *data;
    uint64_t size;
    unsigned width;             /* of an element */
    uint64_t block_size, limit; /* bytes of the block, and of what it takes otherwise */
} block_sample;
/* Estimates from the sample if a byte codec of the save can get below the limit. */
ckd_status block_codec_may_win(bool *may_win, coder *scratch, const coding_context *ctx,
                               const block_sample *s, ckd_error *err);
/*
 * For an analysed precoded block without values: returns true if its decision would need them. Makes a trial
 * decision.
 */
bool block_wants_values(block_job *job, const coding_context *ctx, const tensor_context *tensor,
                        const load_budget *budget);

/*
 * After analysis: do other blocks have the same input? block_is_in_flight looks at blocks in flight, block_is_in_save
 * at registered blocks. bound: largest allowed error (lossy); negative: must be bit-identical.
 */
bool block_is_in_flight(const block_job *job, const coding_context *ctx, const tensor_context *tensor,
                        double bound);
bool block_is_in_save(const block_job *job, const coding_context *ctx, const tensor_context *tensor,
                      double bound);
/* block_is_in_save for input with this hash, without a job. */
bool block_is_registered(const region_span *block, const hash128 *original, const coding_context *ctx,
                         const tensor_context *tensor, double bound);
/* Returns true if the job is a duplicate of values in this save. */
bool block_copies_from_save(const block_job *job, const coding_context *ctx);
/*
 * Returns true if the job copies from a checkpoint that may no longer be named. Other blocks may have used up the
 * limit since it was analysed.
 */
bool block_exceeds_references(const block_job *job, const coding_context *ctx);
/*
 * Sets chosen, predictor, chain, base and depth. Adds the costs to the budget, and the checkpoint that a copy names
 * to `referenced`.
 */
void block_decide(block_job *job, const coding_context *ctx, const tensor_context *tensor,
                  load_budget *budget);
ckd_status block_encode(block_job *job, const tensor_context *tensor, ckd_error *err);

/* ---- between block_coder.c, block_dedup.c and block_lossy.c ---- */
static inline uint64_t block_raw_size(const block_job *job, const tensor_context *tensor) {
    return job->input.count * ckd_dtype_size(tensor->tensor->dtype);
}
/* Resets the job, and looks up the parent's block. Takes over the hashes of a master that a device has made. */
void block_begin(block_job *job, const tensor_context *tensor);
bool block_is_master(const tensor_context *tensor);
/* Sets rounded_bf16 and rounded_f16 from job->input.values. */
ckd_status block_hash_rounded(block_job *job, ckd_error *err);
/*
 * Look for values with job->output.content in the parent, or in this save. If found, the job becomes a duplicate.
 * bound: largest error allowed for values in this save, which then become job->output.content; negative: must be
 * bit-identical.
 */
bool block_find_in_parent(block_job *job, const coding_context *ctx, const tensor_context *tensor);
bool block_find_in_save(block_job *job, const coding_context *ctx, const tensor_context *tensor,
                        double bound);
/* Returns true if naming the values takes less than storing them. */
bool block_may_be_copied(const block_job *job, const coding_context *ctx, const tensor_context *tensor);
/* Adds the checkpoint that a copy names to `referenced`. */
void block_add_referenced(const block_job *job, const coding_context *ctx);
void block_depend_on(block_job *job, predictor p, const ckd_id *checkpoint, const char *tensor,
                     const hash128 *content);
/*
 * Plans job->input.values on their own, exactly. may_estimate: a delta is tried next, and its size decides whether this
 * size must be known exactly.
 */
ckd_status block_propose_standalone(block_job *job, const coding_context *ctx, const tensor_context *tensor,
                                    bool may_estimate, ckd_error *err);
void block_measure_parent(block_job *job, const tensor_context *tensor);

/*
 * Codes one block of a lossy tile, as block_analyse does for exact blocks. The decoded values take the place of the
 * original ones.
 */

/*
 * Analyses a block. job: first and count in the region, and the original values. Afterwards the job is lossy, with the
 * decoded values and their content, or a duplicate. Or it is analysed as an exact block, because too many values are
 * not finite or the tile's error bound would not hold.
 */
ckd_status block_lossy_analyse(block_job *job, const lossy_tile *tile, const coding_context *ctx,
                               const tensor_context *tensor, const load_budget *budget, ckd_error *err);
/*
 * Largest error of values of this save that a block of the tile may copy. Negative: none is allowed, as for moments,
 * which are coded with regard to each other.
 */
double lossy_copy_bound(const lossy_tile *tile);
/* The cost of loading an exact base of `raw` bytes: the unit of all load costs. */
load_cost lossy_base_cost(ckd_dtype dtype, uint64_t raw);
/* Makes the payload of the block on its own, for a candidate that is only estimated so far. */
ckd_status block_lossy_standalone(block_job *job, candidate *c, ckd_error *err);

#endif
