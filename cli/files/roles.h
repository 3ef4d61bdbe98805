/* Which role a tensor has: --role PATTERN=ROLE, the first that matches, else what the names of all tensors say together. */
#ifndef CLI_ROLES_H
#define CLI_ROLES_H

#include <jansson.h>

#include "cli/output/errors.h"

typedef struct cli_role_rule {
    char *pattern; /* glob; * matches dots and slashes, too */
    ckd_role role;
    bool used;
} cli_role_rule;

typedef struct cli_roles {
    cli_role_rule *rules;
    size_t count;
} cli_roles;

/* AUTO if it is none. */
ckd_role cli_role_by_name(const char *name);
/* Adds "PATTERN=ROLE". INVALID if it is none. */
ckd_status cli_roles_add(cli_roles *roles, const char *text, ckd_error *err);
/* AUTO: no rule matches. Marks the rule as used. */
ckd_role cli_roles_given(cli_roles *roles, const char *tensor);
/*
 * Of each of these tensors, which are those of a checkpoint: names, dtypes and shapes are looked at. metadata (may be NULL) may have
 * optimizers' parameters in their order, under PREFIX.param_groups or PREFIX.param_names. Marks rules as used. Errors: NOMEM.
 */
ckd_status cli_roles_find(ckd_tensor_role *out, cli_roles *roles, ckd_tensor_name *tensors, size_t count,
                          json_t *metadata, ckd_error *err);
void cli_roles_free(cli_roles *roles);

#endif
