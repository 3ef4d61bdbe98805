/* The order of an optimizer's parameters, as a file's metadata may have it: state.3.exp_avg is of the fourth. */
#ifndef CLI_PARAMETER_ORDERS_H
#define CLI_PARAMETER_ORDERS_H

#include <jansson.h>

#include "cli/output/errors.h"

typedef struct cli_parameter_orders {
    ckd_parameter_order *orders;
    size_t count;
    json_t **texts; /* that the names are in */
} cli_parameter_orders;

/*
 * Reads what metadata (string -> string; may be NULL) has under keys that end with param_groups or param_names, the rest of the key being
 * what names of states begin with. Both are JSON: the param_groups of a PyTorch optimizer's state_dict() with their params and param_names, or the
 * names alone in the order of their numbers. What is neither is left out. Release also after a failure. Errors: NOMEM.
 */
ckd_status cli_parameter_orders_read(cli_parameter_orders *out, json_t *metadata, ckd_error *err);
void cli_parameter_orders_free(cli_parameter_orders *orders);

#endif
