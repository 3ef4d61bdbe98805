/*
 * The optimizer update that led to the saved state: --adamw, --adam, --sgd [GLOB:]NAME=VALUE,... The first rule that
 * matches a weight's name applies.
 */
#ifndef CLI_OPTIMIZERS_H
#define CLI_OPTIMIZERS_H

#include "cli/files/inputs.h"

typedef struct cli_optimizer_rule {
    char *pattern; /* glob for the weight's name; * also matches dots and slashes */
    ckd_optimizer optimizer;
    bool used;
} cli_optimizer_rule;

typedef struct cli_optimizers {
    cli_optimizer_rule *rules;
    size_t count;
} cli_optimizers;

/* Adds "[GLOB:]NAME=VALUE,...". INVALID if it is malformed, or lacks lr or step. */
ckd_status cli_optimizers_add(cli_optimizers *optimizers, ckd_optimizer_kind kind, const char *text,
                              ckd_error *err);
void cli_optimizers_free(cli_optimizers *optimizers);

/*
 * Attaches the optimizer to the f32 tensors of each matching weight. Orders them as the library requires: exp_avg.X,
 * exp_avg_sq.X, then X or its master; masters precede the rest, which keeps its order.
 */
ckd_status cli_optimizers_apply(cli_optimizers *optimizers, cli_inputs *inputs, ckd_error *err);

#endif
