/*
 * Keeps moments during a save until their weights come, and finds what predicts each tensor. Moments beyond the memory
 * limit go to a scratch file.
 */
#include "engine/encode/step.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "engine/encode/encode.h"

/* ---- the caller's numbers ---- */

static bool fraction(double x) {
    return x >= 0 && x < 1;
}

static bool amount(double x) {
    return x >= 0 && isfinite(x);
}

ckd_status step_check_optimizer(const ckd_optimizer *o, ckd_error *err) {
    if (o->kind < CKD_ADAMW || o->kind > CKD_SGD) {
        return err_set(err, CKD_E_INVALID, "optimizer kind %d is not known", (int)o->kind);
    }
    if (o->step == 0) {
        return err_set(err, CKD_E_INVALID,
                       "an optimizer's step counts its updates including this one, so it is at least 1");
    }
    if (!fraction(o->beta1) || !fraction(o->beta2) || !amount(o->lr) || !amount(o->eps) ||
        !amount(o->weight_decay) || !amount(o->momentum) || !(o->dampening < 1) || !isfinite(o->dampening)) {
        return err_set(
            err, CKD_E_INVALID,
            "an optimizer's betas are at least 0 and below 1, its dampening is below 1, and all its numbers "
            "are finite and not negative");
    }
    return CKD_OK;
}

/* In double precision, as frameworks compute them. */
static optimizer_group group_of(const ckd_optimizer *o) {
    /* other optimizers add it to the gradient, hence to the moments */
    double decay = o->kind == CKD_ADAMW ? o->weight_decay : 0;
    double bias1 = 1 - pow(o->beta1, (double)o->step), bias2 = 1 - pow(o->beta2, (double)o->step);
    optimizer_group g = {.kind = (uint32_t)o->kind,
                         .nesterov = o->nesterov != 0,
                         .step = o->step,
                         .lr = o->lr,
                         .beta1 = o->beta1,
                         .beta2 = o->beta2,
                         .eps = o->eps,
                         .weight_decay = o->weight_decay,
                         .momentum = o->momentum,
                         .dampening = o->dampening};
    const double c[GROUP_COEFFICIENTS] = {[C_BETA1] = o->beta1,
                                          [C_REST1] = 1 - o->beta1,
                                          [C_BETA2] = o->beta2,
                                          [C_REST2] = 1 - o->beta2,
                                          [C_KEEP] = 1 - o->lr * decay,
                                          [C_DECAY] = o->lr * decay,
                                          [C_RATE] = o->lr / bias1,
                                          [C_ROOT] = sqrt(bias2),
                                          [C_EPS] = o->eps,
                                          [C_BIAS1] = bias1,
                                          [C_BIAS2] = bias2,
                                          [C_LR] = o->lr,
                                          [C_WEIGHT_DECAY] = decay,
                                          [C_MOMENTUM] = o->momentum,
                                          [C_UNDAMPED] = 1 - o->dampening};
    memcpy(g.coefficients, c, sizeof(c));
    return g;
}

/* ---- parameters ---- */

static void release(step_states *s, pinned_tensor *h) {
    s->pinned_bytes -= h->bytes;
    free(h->values);
    file_scratch_close(h->file);
    free(h->blocks);
    *h = (pinned_tensor){.name = h->name};
}

static void remove_parameter(step_states *s, step_parameter *p) {
    step_parameter **at = &s->parameters;
    while (*at != p) {
        at = &(*at)->next;
    }
    *at = p->next;
    release(s, &p->first);
    release(s, &p->square);
    free(p);
}

void step_states_free(step_states *s) {
    while (s->parameters) {
        remove_parameter(s, s->parameters);
    }
    free(s->groups);
    *s = (step_states){0};
}

/* NULL: there is none and none is to be made, or no memory. */
static step_parameter *find_parameter(step_states *s, const tensor_context *t, const char *name,
                                      uint64_t elements, bool make) {
    step_parameter **at = &s->parameters;
    for (; *at; at = &(*at)->next) {
        if (strcmp((*at)->name, name) == 0 && (*at)->elements == elements &&
            region_equal((*at)->region, t->region, t->tensor->ndim)) {
            return *at;
        }
    }
    *at = make ? calloc(1, sizeof(**at)) : NULL;
    if (*at) {
        **at = (step_parameter){.name = name, .region = t->region, .elements = elements};
    }
    return *at;
}

#define DISK_SHARE 4 /* a file takes at most 1/DISK_SHARE of the free disk space */

/* Uses memory up to the limit, then a file. */
static void allocate_pinned(pinned_tensor *h, step_states *s, uint64_t size) {
    if (size <= s->limit && s->pinned_bytes <= s->limit - size) {
        h->values = malloc((size_t)size + 1);
        h->bytes = h->values ? size : 0;
        s->pinned_bytes += h->bytes;
    } else if (s->scratch && dir_free_space(s->scratch) / DISK_SHARE >= size) {
        file_scratch_open(&h->file, s->scratch, NULL);
    }
}

static void pin_tensor(step_tensor *t, pinned_tensor *h, const record_tensor *tensor, uint64_t elements) {
    size_t blocks = (size_t)((elements + CKD_BLOCK_ELEMENTS - 1) / CKD_BLOCK_ELEMENTS);
    release(t->states, h);
    if (elements < SIZE_MAX / sizeof(float)) {
        allocate_pinned(h, t->states, elements * sizeof(float));
    }
    h->blocks = calloc(blocks + 1, sizeof(*h->blocks));
    h->name = tensor->name;
    if (step_is_pinned(h) && h->blocks) {
        t->pinned = h;
    } else {
        release(t->states, h);
    }
}

const float *step_pinned_values(const pinned_tensor *h, bytes *scratch, uint64_t first, uint64_t count) {
    if (h->values) {
        return h->values + first;
    }
    float *to = bytes_scratch(scratch, count * sizeof(float) + 1, "coding scratch", NULL);
    bool read =
        to && file_scratch_read(h->file, first * sizeof(float), to, count * sizeof(float), NULL) == CKD_OK;
    return read ? to : NULL;
}

void step_record_gradient(step_tensor *t, bool tried, double scale) {
    t->tried = t->tried || tried;
    t->scale = scale > 0 ? scale : t->scale;
}

void step_pin(step_tensor *t, uint64_t first, uint64_t count, const void *values, const pinned_block *block) {
    pinned_tensor *h = t->pinned;
    if (!h) {
        return;
    }
    if (h->values) {
        memcpy(h->values + first, values, count * sizeof(float));
    } else if (file_scratch_write(h->file, first * sizeof(float), values, count * sizeof(float), NULL) !=
               CKD_OK) {
        release(t->states, h);
        t->pinned = NULL;
        return;
    }
    h->blocks[h->block_count++] = *block;
}

/* ---- a tensor ---- */

static bool same_shape(const view_tensor *a, const view_tensor *b) {
    return a->tensor->dtype == b->tensor->dtype && a->shape->ndim == b->shape->ndim &&
           memcmp(a->shape->shape, b->shape->shape, a->shape->ndim * sizeof(uint64_t)) == 0;
}

static void choose_rules(step_source *s, const step_states *states, const ckd_optimizer *o, ckd_role role) {
    if (role == CKD_ROLE_EXP_AVG) {
        s->family = STEP_MOMENT;
        s->inputs = INPUTS_GRADIENT;
        s->first_rule = o->kind == CKD_SGD ? RULE_VELOCITY_FIRST : RULE_MOMENT_FIRST;
        s->last_rule = o->kind == CKD_SGD ? RULE_VELOCITY_LAST : RULE_MOMENT_LAST;
    } else if (role == CKD_ROLE_EXP_AVG_SQ) {
        s->family = STEP_SQUARE;
        s->inputs = INPUTS_MOMENTS_BEFORE;
        s->first_rule = s->scale > 0 ? RULE_BF16_FIRST : RULE_SQUARE_FIRST;
        s->last_rule = s->scale > 0 ? RULE_BF16_LAST : RULE_SQUARE_LAST;
    } else if (o->kind != CKD_SGD) {
        s->family = STEP_ADAM;
        s->inputs = INPUTS_MOMENT_SQUARE;
        s->first_rule = RULE_ADAM_FIRST;
        s->last_rule = RULE_ADAM_LAST;
    } else {
        s->family = STEP_SGD;
        s->inputs = o->nesterov ? INPUTS_MOMENTUM_NESTEROV : INPUTS_MOMENTUM;
        s->first_rule = o->nesterov ? RULE_NESTEROV_FIRST : RULE_SGD_FIRST;
        s->last_rule = o->nesterov ? RULE_NESTEROV_LAST : RULE_SGD_LAST;
    }
    uint32_t usual = states->rules[s->family];
    s->usual = usual >= s->first_rule && usual <= s->last_rule ? usual : 0;
}

/* Sets the step's inputs, and whether all that its rules need are there. */
static void find_source(step_tensor *t, const step_states *states, const ckd_optimizer *o,
                        const view_tensor *parent, const view *in) {
    step_source *s = &t->source;
    const step_parameter *p = t->parameter;
    bool square = t->role == CKD_ROLE_EXP_AVG_SQ;
    s->group = group_of(o);
    s->scale = p->scale;
    choose_rules(s, states, o, t->role);
    if (square && s->scale > 0) {
        s->group.coefficients[C_SCALE] = s->scale;
    }
    s->first = &p->first;
    s->square = &p->square;
    bool needs_first = s->inputs == INPUTS_MOMENTS_BEFORE || s->inputs == INPUTS_MOMENTUM_NESTEROV;
    if (needs_first && p->first.name) {
        s->parent_first = view_find(in, p->first.name);
    }
    s->available = step_is_pinned(&p->first) &&
                   (!needs_first || (s->parent_first && same_shape(s->parent_first, parent))) &&
                   (s->inputs != INPUTS_MOMENT_SQUARE || step_is_pinned(&p->square)) &&
                   !(square && o->kind == CKD_SGD);
}

/* In one training run, gradients are bf16 in all tensors, or in a few at most. */
#define GRADIENT_TRIES 8u
#define GRADIENT_ELEMENTS_MIN \
    512u /* elements; in smaller tensors, naming the inputs in the record costs more than it saves */

static void find_gradient(step_tensor *t, const step_states *states, const ckd_optimizer *o) {
    step_source *s = &t->source;
    s->group = group_of(o);
    s->scale = states->scale;
    choose_rules(s, states, o, t->role);
    s->available = states->found > 0 || states->tried < GRADIENT_TRIES;
}

void step_begin(step_tensor *out, step_states *s, const ckd_optimizer *o, const tensor_context *t,
                uint64_t elements, const view *in) {
    memset(out, 0, sizeof(*out));
    const record_tensor *tensor = t->tensor;
    const char *name = t->largest ? NULL : t->weight;
    out->role = tensor->role;
    out->states = s;
    if (!o || !in || !name || elements == 0) {
        return;
    }
    bool weight = tensor->role == CKD_ROLE_WEIGHT || tensor->role == CKD_ROLE_MASTER;
    if (tensor->dtype != CKD_F32 && weight) { /* rounded from its master, which comes later */
        char master[CKD_NAME_MAX + 8];
        snprintf(master, sizeof(master), "master.%s", name);
        if (view_find(in, master)) {
            return;
        }
    }
    /* a rounded copy may follow its master, with which the parameter was removed */
    step_parameter *p = find_parameter(s, t, name, elements, tensor->dtype == CKD_F32 || !weight);
    out->parameter = p;
    out->sgd = o->kind == CKD_SGD;
    if (!p || tensor->dtype != CKD_F32) {
        return;
    }
    if (tensor->role == CKD_ROLE_EXP_AVG) {
        pin_tensor(out, &p->first, tensor, elements);
        if (t->parent && elements >= GRADIENT_ELEMENTS_MIN) {
            find_gradient(out, s, o);
        }
    } else if (t->parent) {
        find_source(out, s, o, t->parent, in);
    }
    if (tensor->role == CKD_ROLE_EXP_AVG_SQ && !p->weight_came) {
        pin_tensor(out, &p->square, tensor, elements);
    }
}

void step_end(step_tensor *t, step_states *s) {
    step_parameter *p = t->parameter;
    if (!p) {
        return;
    }
    if (t->used) {
        s->rules[t->source.family] = t->used;
    }
    if (t->tried) {
        s->tried++;
        s->found += t->scale > 0;
        p->scale = t->scale;
        s->scale = t->scale > 0 ? t->scale : s->scale;
    }
    p->first_came = p->first_came || t->role == CKD_ROLE_EXP_AVG;
    p->square_came = p->square_came || t->role == CKD_ROLE_EXP_AVG_SQ;
    p->weight_came = p->weight_came || t->role == CKD_ROLE_WEIGHT || t->role == CKD_ROLE_MASTER;
    if (p->weight_came && (p->square_came || t->sgd)) {
        remove_parameter(s, p);
    } else if (p->weight_came) {
        release(s, &p->square);
    }
}

/* ---- groups ---- */

ckd_status step_record_group(bool *written, step_states *s, const hash128 *content, ckd_error *err) {
    *written = false;
    for (size_t i = 0; i < s->group_count && !*written; i++) {
        *written = hash128_equal(&s->groups[i], content);
    }
    if (*written) {
        return CKD_OK;
    }
    if (ARRAY_GROW(s->groups, s->group_capacity, s->group_count + 1, "the groups written", err) != CKD_OK) {
        return CKD_E_NOMEM;
    }
    s->groups[s->group_count++] = *content;
    return CKD_OK;
}
