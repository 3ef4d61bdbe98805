#include "cli/files/roles.h"

#include <fnmatch.h>
#include <stdlib.h>
#include <string.h>

#include "cli/files/parameter_orders.h"

ckd_role cli_role_by_name(const char *name) {
    for (ckd_role role = CKD_ROLE_WEIGHT; role <= CKD_ROLE_OTHER; role++) {
        if (strcmp(ckd_role_name(role), name) == 0) {
            return role;
        }
    }
    return CKD_ROLE_AUTO;
}

ckd_status cli_roles_add(cli_roles *roles, const char *text, ckd_error *err) {
    const char *equals = strrchr(text, '=');
    ckd_role role = equals ? cli_role_by_name(equals + 1) : CKD_ROLE_AUTO;
    if (role == CKD_ROLE_AUTO || equals == text) {
        return cli_error(
            err, CKD_E_INVALID,
            "--role is PATTERN=ROLE with the ROLE weight, exp_avg, exp_avg_sq, master or other, not '%s'",
            text);
    }
    cli_role_rule *rules = realloc(roles->rules, (roles->count + 1) * sizeof(*rules));
    if (!rules) {
        return cli_error_nomem(err);
    }
    roles->rules = rules;
    char *pattern = strndup(text, (size_t)(equals - text));
    if (!pattern) {
        return cli_error_nomem(err);
    }
    rules[roles->count++] = (cli_role_rule){pattern, role, false};
    return CKD_OK;
}

ckd_role cli_roles_given(cli_roles *roles, const char *tensor) {
    for (size_t i = 0; i < roles->count; i++) {
        if (fnmatch(roles->rules[i].pattern, tensor, 0) == 0) {
            roles->rules[i].used = true;
            return roles->rules[i].role;
        }
    }
    return CKD_ROLE_AUTO;
}

ckd_status cli_roles_find(ckd_tensor_role *out, cli_roles *roles, ckd_tensor_name *tensors, size_t count,
                          json_t *metadata, ckd_error *err) {
    for (size_t i = 0; i < count; i++) {
        tensors[i].role = cli_roles_given(roles, tensors[i].name);
    }
    cli_parameter_orders orders;
    ckd_status status = cli_parameter_orders_read(&orders, metadata, err);
    THEN(status, ckd_roles_find(out, tensors, count, orders.orders, orders.count, err));
    cli_parameter_orders_free(&orders);
    return status;
}

void cli_roles_free(cli_roles *roles) {
    for (size_t i = 0; i < roles->count; i++) {
        free(roles->rules[i].pattern);
    }
    free(roles->rules);
    *roles = (cli_roles){0};
}
