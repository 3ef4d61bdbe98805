/*
 * The order of an optimizer's parameters, which a file's metadata may contain: state.3.exp_avg belongs to the fourth.
 */
#ifndef CLI_PARAMETER_ORDERS_H
#define CLI_PARAMETER_ORDERS_H

#include <jansson.h>

#include "cli/output/errors.h"

typedef struct cli_parameter_orders {
    ckd_parameter_order *orders;
    size_t count;
    json_t **texts; /* own the names */
} cli_parameter_orders;

/*
 * Reads metadata (string -> string; may be NULL) under keys that end with param_groups or param_names. The rest of the
 * key is the prefix of the state names. Both are JSON: the param_groups of a PyTorch optimizer's state_dict() with
 * params and param_names, or just the names in order of their numbers. Anything else is ignored. Release also after a
 * failure. Errors: NOMEM.
 */
ckd_status cli_parameter_orders_read(cli_parameter_orders *out, json_t *metadata, ckd_error *err);
void cli_parameter_orders_free(cli_parameter_orders *orders);

#endif
