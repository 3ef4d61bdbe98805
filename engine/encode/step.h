/*
 * Optimizer steps while saving: a checkpoint one update after its parent. The first moment alone determines the
 * gradient. The gradient determines the second moment and the weights, up to rounding. So only the rounding is coded.
 *
 *   step_begin    a tensor with an optimizer: finds what predicts it, and whether later tensors need its values
 *   block_step    (block_step.c, parallel) the best rule, and the prediction
 *   block_gradient (block_gradient.c, parallel) the gradient of a first moment
 *   step_pin     keeps a written block's values and load cost
 *   step_end      releases what no later tensor needs
 *
 * The caller may reuse its memory after each tensor, so moments are held until the weights have been saved. Internal
 * to engine/.
 */
#ifndef ENGINE_STEP_H
#define ENGINE_STEP_H

#include "base/file.h"
#include "codec/metadata/metadata.h"
#include "engine/decode/decode.h"
#include "engine/store/store.h"

/* A written block, as later blocks over the same span need to know it. */
typedef struct pinned_block {
    hash128 content;
    load_cost own, chain, base;
    uint32_t depth;
    bool on_step, on_parent; /* predicted as a step; a delta on the parent */
} pinned_block;

typedef struct pinned_tensor {
    float *values;      /* of the whole region, or NULL */
    file_scratch *file; /* has the values if `values` is NULL; both NULL: not held */
    uint64_t bytes;     /* of values in memory */
    pinned_block *blocks;
    size_t block_count;
    const char *name; /* lives as long as the save */
} pinned_tensor;

/* The tensors of one parameter, over one region. */
typedef struct step_parameter {
    struct step_parameter *next;
    double scale;     /* of its gradient, if that was bf16; else 0 */
    const char *name; /* its weight's name */
    const ckd_region *region;
    uint64_t elements;
    pinned_tensor first, square; /* exp_avg, exp_avg_sq */
    bool first_came, square_came, weight_came;
} step_parameter;

/* The kinds of values that a step predicts. Each has rules of its own. */
typedef enum step_family {
    STEP_SQUARE, /* a second moment */
    STEP_ADAM,   /* weights */
    STEP_SGD,
    STEP_MOMENT, /* a first moment, from its gradient */
    STEP_FAMILIES
} step_family;

/* The states of a save. Zero-initialise, then set limit and scratch. */
typedef struct step_states {
    step_parameter *parameters;    /* in order of arrival */
    uint64_t limit, pinned_bytes;  /* bytes of values in memory: limit and current */
    const char *scratch;           /* directory for values beyond the limit; lives as long as this */
    uint32_t rules[STEP_FAMILIES]; /* that fitted last; 0: none yet */
    double scale;                  /* of the last gradient that was bf16; 0: none yet */
    uint32_t tried, found;         /* tensors whose gradient may have been bf16, and was */
    hash128 *groups;               /* written so far */
    size_t group_count, group_capacity;
} step_states;
void step_states_free(step_states *s);

/* Rules to try and their inputs; shared by the blocks of a tensor. */
typedef struct step_source {
    bool available;
    step_family family;
    optimizer_group group; /* except its rule, and of a first moment its scale */
    uint32_t first_rule, last_rule, usual;
    double scale; /* of the gradient, if it was bf16. For a first moment: that of earlier ones; 0: unknown */
    group_inputs inputs;
    const pinned_tensor *first, *square;
    const view_tensor *parent_first; /* the parent's first moment, if the rules need it */
} step_source;

/* One tensor on its way through a save. */
typedef struct step_tensor {
    step_source source;
    step_states *states;
    step_parameter *parameter; /* NULL: no steps for this tensor */
    pinned_tensor *pinned;     /* NULL: its values are not needed later */
    ckd_role role;
    bool sgd;
    uint32_t used; /* the rule of the last predicted block; 0: none */
    bool tried;    /* of a first moment: a gradient was looked at */
    double scale;  /* of the last gradient that was bf16; 0: none was */
} step_tensor;

/* Returns INVALID, naming the fault, unless the optimizer's numbers are valid. */
ckd_status step_check_optimizer(const ckd_optimizer *o, ckd_error *err);
/*
 * Begins a tensor. t: name, weight and region live as long as the save; in: the parent. If neither memory nor disk
 * has space for the values, nothing is held, and later tensors are not predicted.
 */
struct tensor_context;
void step_begin(step_tensor *out, step_states *s, const ckd_optimizer *o, const struct tensor_context *t,
                uint64_t elements, const view *in);
/* Notes what the analysis of a registered block found out. scale: of its gradient, if that was bf16; else 0. */
void step_record_gradient(step_tensor *t, bool tried, double scale);
void step_pin(step_tensor *t, uint64_t first, uint64_t count, const void *values, const pinned_block *block);
void step_end(step_tensor *t, step_states *s);
static inline bool step_is_pinned(const pinned_tensor *h) {
    return h->values || h->file;
}
/*
 * Returns elements first ... first + count - 1 of a tensor that is held: in place, or read into `scratch`. NULL: they
 * cannot be read.
 */
const float *step_pinned_values(const pinned_tensor *h, bytes *scratch, uint64_t first, uint64_t count);

/* Sets *written if this group has been written already; else records it as written. Errors: NOMEM. */
ckd_status step_record_group(bool *written, step_states *s, const hash128 *content, ckd_error *err);

#endif
