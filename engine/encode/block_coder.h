/*
 * Coding one block: find it elsewhere, else predict and compare sizes, else store it raw.
 *
 *   block_analyse  (parallel)  hash; same values known? else plan it on its own and as a delta on the parent
 *   block_decide   (in order)  the smallest that the load budget allows
 *   block_encode   (parallel)  the payload, and that of the materialized copy if one is to be kept
 *
 * Deciding in order makes the bytes written independent of the number of threads. Internal to engine/.
 */
#ifndef ENGINE_BLOCK_CODER_H
#define ENGINE_BLOCK_CODER_H

#include <pthread.h>

#include "engine/encode/block_plan.h"
#include "engine/encode/content_index.h"
#include "engine/decode/cost.h"
#include "engine/lossy/lossy.h"
#include "engine/encode/step.h"
#include "engine/decode/values.h"

#define REFERENCED_CHECKPOINTS_MAX \
    64u /* checkpoints that copies name: each is open while this one is loaded */

/*
 * Those that copies may name, as blocks are decided on: the parent, and those that were named before. How many blocks are still to be written makes no
 * difference, as with more threads these are more.
 */
typedef struct referenced_checkpoints {
    ckd_id ids[REFERENCED_CHECKPOINTS_MAX];
    uint32_t count;
} referenced_checkpoints;

/* Blocks that are decided on, and not in coding_context's `known` yet. */
typedef struct blocks_in_flight {
    const struct block_job **jobs;
    size_t count;
} blocks_in_flight;

/* What all blocks of a save share. Jobs read known, holders and coming with the lock, under which they are changed. */
typedef struct coding_context {
    ckd_codec codec;
    int level;
    view_cache *views;
    const view *parent;               /* NULL: no deltas */
    const content_index *dedup_index; /* of this save */
    ckd_id checkpoint;
    referenced_checkpoints *referenced; /* NULL: copies may name any */
    const blocks_in_flight *in_flight;  /* NULL: none */
    pthread_rwlock_t *registry_lock;    /* NULL: nothing changes while jobs run */
} coding_context;

/* What the blocks of one call share. */
typedef struct tensor_context {
    const record_tensor *tensor;
    geometry shape;
    const ckd_region *region;  /* canonical */
    const char *weight;        /* the name of the parameter that it is, or is a state of; NULL: not known */
    bool largest;              /* a second moment that is the largest so far, not the one of now */
    const view_tensor *parent; /* same name, dtype and shape in the parent; NULL if there is none */
    const step_source *step;   /* what an optimizer step is predicted from; NULL: nothing */
    uint64_t block_elements;   /* of its exact blocks, at most; or */
    const struct save_panel_rows *rows; /* where the blocks of a panel end (save.h); NULL: it is none */
    const void *
        parent_values; /* the parent's values in memory, as the region `held` has them; NULL: read from the store */
    void *
        decoded_values; /* where what a decoder will give goes, as that region has it; may be `parent_values`. NULL: nowhere */
    span held;
} tensor_context;

/* One way to store the block. size 0 and not available: not tried. */
typedef struct candidate {
    bool available, encoded; /* encoded: the payload is there already, else it is planned, or estimated */
    coding coding;
    uint64_t size;
    load_cost chain;
    bytes payload;
} candidate;

/* The block as an optimizer step from the parent's. */
typedef struct block_step {
    bool available, chosen;
    bool two_inputs; /* of this checkpoint */
    uint32_t rule, depth;
    load_cost chain;  /* to load it, its own payload not counted */
    load_cost shared; /* part of that: to load the input that takes most */
    load_cost base;   /* a base load of its inputs in this checkpoint */
    uint8_t group[GROUP_BYTES];
    hash128 content; /* of the group */
} block_step;

/* What a device has made of a block (save/device.h, save/device_dedup.h) before the job is analysed. Its values need not be there then. */
typedef struct block_precoded {
    bool coded;             /* something of it; or nothing, as this save has its values already */
    bool delta, standalone; /* its payload is in job->delta's, in job->standalone's */
    bool lost;              /* a delta was tried, and takes more than the block on its own */
    bool rounded;           /* of a master: what follows is known, whether it is coded or not */
    hash128 bf16, f16;      /* as rounded_bf16 and rounded_f16 */
    hash128 content;        /* of its values */
    uint64_t planned, planned_standalone; /* bytes, as plans say */
} block_precoded;

/* A side record with the rows of a lossy block, which it shares with those next to it. */
typedef struct shared_rows {
    uint64_t row, rows; /* of the tile */
    span span;          /* of the record */
    hash128 content;
} shared_rows;

typedef struct block_job {
    decoder decoder; /* reads the parent; its coder also plans and encodes: decoding leaves plans alone */
    uint64_t first, count;
    const void *values; /* the caller's, or `own` */
    bytes own, previous;
    block_plan plan;
    bool in_panel;              /* of a large matrix */
    bool try_delta, delta_lost; /* delta_lost: it was tried and is not smaller by enough */

    hash128 content;
    hash128 rounded_bf16,
        rounded_f16; /* of a master's values, rounded: its low-precision copy will have one of them */
    bool
        blocked_on_in_flight; /* a block that is `in_flight` has its values: to be analysed when that is known */
    bool unchanged;           /* known before its values were read: they are not there */
    block_precoded precoded;
    bool wants_values; /* once analysed, of a block that is coded ahead: it cannot do without them */
    bool is_duplicate; /* stored already: predictor and dependency are set, nothing else to do */
    predictor predictor;
    dependency dependencies[4];
    uint32_t dependency_count;
    uint32_t standalone_dependencies; /* of the block on its own: a lossy one may need a side record */
    uint32_t depth;
    load_cost chain, base;
    load_cost own_cost; /* of the chain: what loading the rest of the checkpoint does not take anyway */
    const record *parent_block; /* the parent's block over the same span, if there is one */
    uint32_t parent_depth;
    load_cost parent_chain;
    candidate standalone, delta;
    block_step step;
    bytes step_first, step_before;
    candidate *chosen; /* NULL if known */
    bool materialize;  /* standalone is to be written as well, as a materialized copy */
    uint64_t base_stored;
    bool parent_damaged; /* the parent's values could not be read: coded on its own instead */

    bool
        lossy; /* values and content are what a decoder will get; `original` is the content of what was given */
    const lossy_tile *tile;
    shared_rows rows; /* if the tile's plan says that rows are shared */
    lossy_job lossy_work;
    hash128 original;
    hash128 result_bf16, result_f16;   /* of a master's values as a decoder will get them, rounded */
    lossy_error error;                 /* of what a decoder will get; 0 if that is exact */
    lossy_error error_bf16, error_f16; /* the same of a master's values, rounded */
} block_job;

/* columns: of the save, for all jobs. */
ckd_status block_job_init(block_job *job, columns_cache *columns, ckd_error *err);
void block_job_free(block_job *job);

/* The values have been copied to another place, in whatever state the job is. */
static inline void block_job_move(block_job *job, const void *values) {
    job->plan.values = job->plan.values == job->values ? values : job->plan.values;
    job->values = values;
}

/* The block of `in` over the very same span, if it was cut the same way. */
const record *block_in_parent(const tensor_context *tensor, uint64_t first, uint64_t count);
const record *block_matching(const block_job *job, const tensor_context *tensor, const view_tensor *in);
/*
 * Before the job's values are read: are those with this hash in the parent? Then the job is analysed. The parent's block must be one that nothing has to be loaded
 * before: others may want a materialized copy, for which values are needed. jobs: that may be under way, each of which may name another checkpoint.
 */
bool block_find_unchanged(block_job *job, const coding_context *save, const tensor_context *tensor,
                          const hash128 *content, uint32_t jobs);
/* Of the budget only what a whole save has in common is looked at. */
ckd_status block_analyse(block_job *job, const coding_context *save, const tensor_context *tensor,
                         const load_budget *budget, ckd_error *err);
/*
 * What a block of the tensor takes on its own is expected to be what the parent's block took, by its record; 0: that says nothing, and all values have
 * to be seen.
 */
uint64_t block_expected_standalone(const record *parent_block, uint64_t raw);
/* The part of so many bytes that tells whether zstd or LZ4 can come below what the block takes otherwise. */
typedef struct block_probe {
    uint64_t at, size; /* size: all of them if they are few */
} block_probe;
block_probe block_probe_of(bool in_panel, unsigned width, uint64_t size);
/* Can a byte codec of the save come below `limit` of `size` bytes, by that part? */
ckd_status block_codecs_promise(bool *promise, coder *by, const coding_context *save, unsigned width,
                                const void *sample, uint64_t some, uint64_t limit, uint64_t size,
                                ckd_error *err);
/* Of a block coded ahead, analysed, whose values are not there: would its decision need them? Decides on trial. */
bool block_wants_values(block_job *job, const coding_context *save, const tensor_context *tensor,
                        const load_budget *budget);

/*
 * Once analysed: are the values, as they were given, among those of blocks that are coming, or in this save already? bound: of a lossy block, how
 * far these may be; negative: an exact one.
 */
bool block_is_in_flight(const block_job *job, const coding_context *save, const tensor_context *tensor,
                        double bound);
bool block_is_in_save(const block_job *job, const coding_context *save, const tensor_context *tensor,
                      double bound);
/* The same of values with this hash, wherever they are. */
bool block_is_registered(const span *block, const hash128 *original, const coding_context *save,
                         const tensor_context *tensor, double bound);
/* Does it name values of this save? */
bool block_names_own(const block_job *job, const coding_context *save);
/* A copy names a checkpoint that was not one too many when it was analysed: is it now? */
bool block_names_too_many(const block_job *job, const coding_context *save);
/* Sets chosen, predictor, chain, base and depth, and adds them to the budget, and what a copy names to the holders. */
void block_decide(block_job *job, const coding_context *save, const tensor_context *tensor,
                  load_budget *budget);
ckd_status block_encode(block_job *job, const tensor_context *tensor, ckd_error *err);

/* ---- between block_coder.c, block_dedup.c and block_lossy.c ---- */
static inline uint64_t block_raw_size(const block_job *job, const tensor_context *tensor) {
    return job->count * ckd_dtype_size(tensor->tensor->dtype);
}
/* Forgets what the job held before; looks the parent's block up. Of a master, what a device has hashed is taken over. */
void block_begin(block_job *job, const tensor_context *tensor);
bool block_is_master(const tensor_context *tensor);
/* Sets rounded_bf16 and rounded_f16, of job->values. */
ckd_status block_hash_rounded(block_job *job, ckd_error *err);
/*
 * Are values with job->content in the parent, or in this save already? The job is `known` then. bound: what stands for them
 * in this save may differ by so much, and becomes job->content; negative: it may not.
 */
bool block_find_in_parent(block_job *job, const coding_context *save, const tensor_context *tensor);
bool block_find_in_save(block_job *job, const coding_context *save, const tensor_context *tensor,
                        double bound);
/* Naming values takes less than storing them. */
bool block_may_be_named(const block_job *job, const coding_context *save, const tensor_context *tensor);
/* What a copy names is among the holders from now on. */
void block_add_referenced(const block_job *job, const coding_context *save);
void block_depend_on(block_job *job, predictor p, const ckd_id *checkpoint, const char *tensor,
                     const hash128 *content);
/* Plans job->values on their own, exactly. may_estimate: a delta's size says whether this one's must be known. */
ckd_status block_plan_standalone(block_job *job, const coding_context *save, const tensor_context *tensor,
                                 bool may_estimate, ckd_error *err);
void block_measure_parent(block_job *job, const tensor_context *tensor);

#endif
