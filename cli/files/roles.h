/* Roles of tensors: --role PATTERN=ROLE, the first match; otherwise from the names of all tensors together. */
#ifndef CLI_ROLES_H
#define CLI_ROLES_H

#include <jansson.h>

#include "cli/output/errors.h"

typedef struct cli_role_rule {
    char *pattern; /* glob; * also matches dots and slashes */
    ckd_role role;
    bool used;
} cli_role_rule;

typedef struct cli_roles {
    cli_role_rule *rules;
    size_t count;
} cli_roles;

/* Returns AUTO for an unknown name. */
ckd_role cli_role_by_name(const char *name);
/* Adds "PATTERN=ROLE". INVALID if it is malformed. */
ckd_status cli_roles_add(cli_roles *roles, const char *text, ckd_error *err);
/* Returns the role by --role; AUTO: no rule matches. Marks the rule as used. */
ckd_role cli_roles_given(cli_roles *roles, const char *tensor);
/*
 * Finds the roles of a checkpoint's tensors from names, dtypes and shapes. metadata (may be NULL) may give the order of
 * optimizers' parameters, under PREFIX.param_groups or PREFIX.param_names. Marks rules as used. Errors: NOMEM.
 */
ckd_status cli_roles_find(ckd_tensor_role *out, cli_roles *roles, ckd_tensor_name *tensors, size_t count,
                          json_t *metadata, ckd_error *err);
void cli_roles_free(cli_roles *roles);

#endif
