/* Which role a tensor has: --role PATTERN=ROLE, the first that matches, else what its name says. */
#ifndef CLI_ROLES_H
#define CLI_ROLES_H

#include "cli/errors.h"

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
/* Never AUTO. Marks the rule as used. */
ckd_role cli_roles_find(cli_roles *roles, const char *tensor, ckd_dtype dtype);
void cli_roles_free(cli_roles *roles);

#endif
