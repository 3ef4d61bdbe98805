/*
 * Group records: the data from which an optimizer step is predicted. codec/FORMAT.md, "Group records" and "Optimizer
 * steps", is normative. A record holds the trainer's hyper-parameters, which are informative, and the rule and
 * coefficients derived from them, which are all that a decoder uses.
 */
#ifndef CODEC_GROUP_H
#define CODEC_GROUP_H

#include "base/bytes.h"
#include "base/error.h"

/* Stored in files: numbers are stable, new ones are appended. */
typedef enum group_kind { GROUP_ADAMW = 1, GROUP_ADAM = 2, GROUP_SGD = 3 } group_kind;

typedef enum group_coefficient {
    C_BETA1 = 0,
    C_REST1 = 1, /* 1 - beta1 */
    C_BETA2 = 2,
    C_REST2 = 3, /* 1 - beta2 */
    C_KEEP = 4,  /* decay factor of the weights: 1 - lr x decay; 1 if it is not decoupled */
    C_DECAY = 5, /* lr x decay, or 0 */
    C_RATE = 6,  /* lr / (1 - beta1^step) */
    C_ROOT = 7,  /* sqrt(1 - beta2^step) */
    C_EPS = 8,
    C_BIAS1 = 9,  /* 1 - beta1^step */
    C_BIAS2 = 10, /* 1 - beta2^step */
    C_LR = 11,
    C_WEIGHT_DECAY = 12, /* if decoupled, else 0 */
    C_MOMENTUM = 13,
    C_UNDAMPED = 14, /* 1 - dampening */
    GROUP_COEFFICIENTS = 15
} group_coefficient;

/* Inputs of a rule besides the previous step's values, in the order of the dependencies. */
typedef enum group_inputs {
    INPUTS_NONE = 0,         /* unknown rule */
    INPUTS_MOMENTS_BEFORE,   /* current and previous exp_avg: predict exp_avg_sq */
    INPUTS_MOMENT_SQUARE,    /* current exp_avg and exp_avg_sq: predict weights */
    INPUTS_MOMENTUM,         /* the current momentum */
    INPUTS_MOMENTUM_NESTEROV /* the current and the previous momentum */
} group_inputs;

/* First and last rule of each family. codec/FORMAT.md has the formulas; kernels/scalar.h computes them. */
#define RULE_SQUARE_FIRST   1u
#define RULE_SQUARE_LAST    10u
#define RULE_ADAM_FIRST     17u
#define RULE_ADAM_LAST      22u
#define RULE_SGD_FIRST      33u
#define RULE_SGD_LAST       34u
#define RULE_NESTEROV_FIRST 35u
#define RULE_NESTEROV_LAST  36u

typedef struct group {
    uint32_t kind; /* group_kind */
    uint32_t rule;
    bool nesterov;
    uint64_t step; /* updates made so far, including this one */
    double lr, beta1, beta2, eps, weight_decay, momentum, dampening;
    double coefficients[GROUP_COEFFICIENTS];
} group;

#define GROUP_BYTES 192u
#define GROUP_NAME  "optimizer" /* name of all group records; their content distinguishes them */

group_inputs group_rule_inputs(uint32_t rule);
/* Number of value dependencies after the first: 1 or 2; 0 for an unknown rule. */
uint32_t group_input_count(group_inputs inputs);

void group_encode(uint8_t to[GROUP_BYTES], const group *g);
/*
 * Decodes a group. path and offset only serve error messages. Errors: CORRUPT (size, reserved bits), UNSUPPORTED (a
 * kind or rule unknown to this version).
 */
ckd_status group_decode(group *out, const void *from, size_t size, const char *path, uint64_t offset,
                        ckd_error *err);

#endif
