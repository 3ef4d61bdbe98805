/* What update led to the state that is saved: --adamw, --adam, --sgd [GLOB:]NAME=VALUE,..., the first that matches a weight's name. */
#ifndef CLI_OPTIMIZERS_H
#define CLI_OPTIMIZERS_H

#include "cli/files/inputs.h"

typedef struct cli_optimizer_rule {
    char *pattern; /* glob, of the weight's name; * matches dots and slashes, too */
    ckd_optimizer optimizer;
    bool used;
} cli_optimizer_rule;

typedef struct cli_optimizers {
    cli_optimizer_rule *rules;
    size_t count;
} cli_optimizers;

/* Adds "[GLOB:]NAME=VALUE,...". INVALID if it is none, or lacks lr or step. */
ckd_status cli_optimizers_add(cli_optimizers *optimizers, ckd_optimizer_kind kind, const char *text,
                              ckd_error *err);
void cli_optimizers_free(cli_optimizers *optimizers);

/*
 * Gives the f32 tensors of each weight that a rule matches its optimizer, and orders them as the library wants them: exp_avg.X,
 * exp_avg_sq.X, then X or its master; masters before the rest, as they are.
 */
ckd_status cli_optimizers_apply(cli_optimizers *optimizers, cli_inputs *inputs, ckd_error *err);

#endif
