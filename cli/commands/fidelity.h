/*
 * The precision of a save: --fidelity, --effort, --target-bits, --target-ratio, --max-error, --step-scale; and the
 * achieved result.
 */
#ifndef CLI_FIDELITY_H
#define CLI_FIDELITY_H

#include <argp.h>

#include "cli/files/files.h"

/* The options; input: the ckd_save_options to fill. Contradictory options end the process with status 2. */
extern const struct argp cli_fidelity_argp;

bool cli_fidelity_is_lossy(const ckd_save_options *o);
/* Would a save with these options store tensors of this role lossily? */
bool cli_fidelity_of_role_is_lossy(const ckd_save_options *o, ckd_role role);

/*
 * Orders the tensors parameter by parameter, each as exp_avg_sq.X, exp_avg.X, master.X, X. The steps of weights follow
 * their second moment, and a rounded copy costs nothing once its master is stored. Parameters with a master come first.
 * An exact first moment precedes a lossy second moment, since the later one is coded with the help of the earlier.
 */
ckd_status cli_fidelity_order(cli_inputs *inputs, const ckd_save_options *o, ckd_error *err);

/*
 * Prints one line on stdout with the cost and the loss of a lossy checkpoint: "coarse: 0.51 bits per parameter;
 * relative error (L2) up to 0.0012 in weights, 0.31 in moments".
 */
void cli_fidelity_print(const ckd_checkpoint *c, const ckd_tensor_list *tensors);

#endif
