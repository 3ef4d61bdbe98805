/* How exactly to save: --fidelity, --effort, --target-bits, --target-ratio, --max-error, --step-scale; and what came of it. */
#ifndef CLI_FIDELITY_H
#define CLI_FIDELITY_H

#include <argp.h>

#include "cli/files/inputs.h"

/* The options; input: the ckd_save_options that they go to. Ends the process with status 2 where they make no sense. */
extern const struct argp cli_fidelity_argp;

bool cli_fidelity_is_lossy(const ckd_save_options *o);
/* In a save of these options, tensors with this role are lossy. */
bool cli_fidelity_of_role_is_lossy(const ckd_save_options *o, ckd_role role);

/*
 * Orders the tensors parameter by parameter, each as exp_avg_sq.X, exp_avg.X, master.X, X: weights' steps follow their second moment, and a
 * rounded copy costs nothing once its master is there. Parameters that have a master come first. An exact first moment comes before a lossy second
 * one: the one that comes last is coded by the other.
 */
ckd_status cli_fidelity_order(cli_inputs *inputs, const ckd_save_options *o, ckd_error *err);

/*
 * What a lossy checkpoint cost and lost, in one line on stdout: "coarse: 0.51 bits per parameter; relative error (L2) up to 0.0012 in
 * weights, 0.31 in moments".
 */
void cli_fidelity_print(const ckd_checkpoint *c, const ckd_tensor_list *tensors);

#endif
