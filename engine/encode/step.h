/*
 * Optimizer steps while saving: a checkpoint one update after its parent. The first moment alone tells the gradient, and the
 * gradient tells the second moment and the weights, up to rounding; so what is coded of these is what rounding made of them.
 *
 *   step_begin    a tensor with an optimizer: is it predicted, from what? is it held for those that come after it?
 *   block_step    (block_step.c, parallel) the rule that fits best, the prediction
 *   step_hold     a block that was written: its values and what loading it costs
 *   step_end      what nobody will ask for any more is released
 *
 * The caller's memory is his again after each tensor, so the moments are held until the weights came. Internal to engine/.
 */
#ifndef ENGINE_STEP_H
#define ENGINE_STEP_H

#include "base/file.h"
#include "codec/metadata/group.h"
#include "engine/decode/cost.h"
#include "engine/store/view.h"

/* What later blocks over the same span have to know of one that was written. */
typedef struct pinned_block {
    hash128 content;
    load_cost own, chain, base;
    uint32_t depth;
    bool on_step, on_parent; /* predicted as a step; a delta on the parent */
} pinned_block;

typedef struct pinned_tensor {
    float *values;      /* of the whole region; or NULL, and: */
    file_scratch *file; /* has them; NULL: not held */
    uint64_t bytes;     /* of values in memory */
    pinned_block *blocks;
    size_t block_count;
    const char *name; /* as long as the save */
} pinned_tensor;

/* The tensors of one parameter, over one region. */
typedef struct step_parameter {
    struct step_parameter *next;
    const char *name; /* its weight's */
    const ckd_region *region;
    uint64_t elements;
    pinned_tensor first, square; /* exp_avg, exp_avg_sq */
    bool first_came, square_came, weight_came;
} step_parameter;

/* Of a save. Zero-initialise, then set limit and scratch. */
typedef struct step_states {
    step_parameter *parameters; /* in the order they came */
    uint64_t limit, held;       /* bytes of values in memory: at most, and now */
    const char *scratch;        /* a directory for the others; lives as long as this */
    uint32_t rules[3];          /* that fitted last: of squares, of Adam's weights, of SGD's; 0: none yet */
    hash128 *groups;            /* written so far */
    size_t group_count, group_capacity;
} step_states;
void step_states_free(step_states *s);

/* Rules to try and what they need; the blocks of a tensor share it. */
typedef struct step_source {
    bool available;
    group group; /* but for the rule */
    uint32_t first_rule, last_rule, usual;
    group_inputs inputs;
    const pinned_tensor *first, *square;
    const view_tensor *before; /* the parent's first moment, if the rules need it */
} step_source;

/* One tensor on its way through a save. */
typedef struct step_tensor {
    step_source source;
    step_states *states;
    step_parameter *parameter; /* NULL: none of this */
    pinned_tensor *hold;       /* NULL: its values are not wanted */
    ckd_role role;
    bool sgd;
    uint32_t used; /* the rule of the last block that was predicted; 0: none was */
} step_tensor;

/* INVALID, with what is wrong with it. */
ckd_status step_check_optimizer(const ckd_optimizer *o, ckd_error *err);
/*
 * t: with name, weight and region as long as the save; in: the parent. Without memory to hold
 * values in, nor on the disk, nothing is held, and what comes later is not predicted.
 */
struct tensor_context;
void step_begin(step_tensor *out, step_states *s, const ckd_optimizer *o, const struct tensor_context *t,
                uint64_t elements, const view *in);
void step_hold(step_tensor *t, uint64_t first, uint64_t count, const void *values, const pinned_block *block);
void step_end(step_tensor *t, step_states *s);
static inline bool step_is_held(const pinned_tensor *h) {
    return h->values || h->file;
}
/* Elements first ... first + count - 1 of a tensor that is held; in `room`, or where they are. NULL: they cannot be read. */
const float *step_held(const pinned_tensor *h, bytes *room, uint64_t first, uint64_t count);

/* Has this group been written? Else it is noted as written. Errors: NOMEM. */
ckd_status step_record_group(bool *written, step_states *s, const hash128 *content, ckd_error *err);

#endif
