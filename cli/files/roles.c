/*
 * Finds tensors' roles: by --role, else by the library from all names together. If optimizer state is named by
 * parameter numbers, metadata of the file gives the names.
 */
#include "cli/files/files.h"

#include <fnmatch.h>
#include <stdlib.h>
#include <string.h>

#define PARAMETERS_MAX (1u << 24)

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

/* ---- orders of parameters ---- */

/*
 * The order of an optimizer's parameters, which a file's metadata may contain: state.3.exp_avg belongs to the fourth.
 */
typedef struct parameter_orders {
    ckd_parameter_order *orders;
    size_t count;
    json_t **texts; /* own the names */
} parameter_orders;

/* Returns the key without `ending`; NULL unless the key is `ending` or ends with a dot and `ending`. */
static char *prefix_of(const char *key, const char *ending) {
    size_t length = strlen(key), tail = strlen(ending);
    bool ends = length >= tail && strcmp(key + length - tail, ending) == 0;
    return ends && (length == tail || key[length - tail - 1] == '.') ? strndup(key, length - tail) : NULL;
}

static bool set_name(const char **names, size_t count, json_int_t number, const json_t *name) {
    if (number < 0 || (uint64_t)number >= count || !json_is_string(name)) {
        return false;
    }
    names[number] = json_string_value(name);
    return true;
}

/* Returns how many numbers the groups need: the largest plus one. */
static size_t count_parameters(const json_t *groups) {
    size_t i, k;
    json_int_t max = -1;
    json_t *group, *number;
    json_array_foreach(groups, i, group) {
        json_array_foreach(json_object_get(group, "params"), k, number) {
            max = json_is_integer(number) && json_integer_value(number) > max ? json_integer_value(number)
                                                                              : max;
        }
    }
    return max < PARAMETERS_MAX ? (size_t)(max + 1) : 0;
}

static bool fill_from_groups(const char **names, size_t count, const json_t *groups) {
    size_t i, k;
    json_t *group, *number;
    bool any = false;
    json_array_foreach(groups, i, group) {
        json_t *called = json_object_get(group, "param_names");
        json_array_foreach(json_object_get(group, "params"), k, number) {
            any = (json_is_integer(number) &&
                   set_name(names, count, json_integer_value(number), json_array_get(called, k))) ||
                  any;
        }
    }
    return any;
}

static bool fill_from_names(const char **names, size_t count, const json_t *list) {
    size_t i;
    json_t *name;
    bool any = false;
    json_array_foreach(list, i, name) {
        any = set_name(names, count, (json_int_t)i, name) || any;
    }
    return any;
}

/* Takes ownership of `prefix`. */
static ckd_status add_order(parameter_orders *o, char *prefix, const char *value, bool groups,
                            ckd_error *err) {
    json_t *text = value ? json_loads(value, 0, NULL) : NULL;
    size_t count = groups ? count_parameters(text) : json_array_size(text);
    const char **names = calloc(count + 1, sizeof(*names));
    bool use = names && (groups ? fill_from_groups(names, count, text) : fill_from_names(names, count, text));
    if (!use) {
        json_decref(text);
        free(prefix);
        free(names);
        return names ? CKD_OK : cli_error_nomem(err);
    }
    o->orders[o->count] = (ckd_parameter_order){prefix, names, count};
    o->texts[o->count++] = text;
    return CKD_OK;
}

/*
 * Reads metadata (string -> string; may be NULL) under keys that end with param_groups or param_names. The rest of the
 * key is the prefix of the state names. Both are JSON: the param_groups of a PyTorch optimizer's state_dict() with
 * params and param_names, or just the names in order of their numbers. Anything else is ignored. Release also after a
 * failure. Errors: NOMEM.
 */
static ckd_status read_orders(parameter_orders *out, json_t *metadata, ckd_error *err) {
    size_t max = json_object_size(metadata);
    *out = (parameter_orders){.orders = calloc(max + 1, sizeof(*out->orders)),
                              .texts = calloc(max + 1, sizeof(*out->texts))};
    ckd_status status = out->orders && out->texts ? CKD_OK : cli_error_nomem(err);
    const char *key;
    json_t *value;
    json_object_foreach(metadata, key, value) {
        char *groups = status == CKD_OK ? prefix_of(key, "param_groups") : NULL;
        char *names = status == CKD_OK && !groups ? prefix_of(key, "param_names") : NULL;
        if (groups || names) {
            status = add_order(out, groups ? groups : names, json_string_value(value), groups != NULL, err);
        }
    }
    return status;
}

static void free_orders(parameter_orders *o) {
    for (size_t i = 0; i < o->count; i++) {
        free((char *)o->orders[i].prefix);
        free((void *)o->orders[i].names);
        json_decref(o->texts[i]);
    }
    free(o->orders);
    free(o->texts);
    *o = (parameter_orders){0};
}

/* ---- roles of all tensors ---- */

ckd_status cli_roles_find(ckd_tensor_role *out, cli_roles *roles, ckd_tensor_name *tensors, size_t count,
                          json_t *metadata, ckd_error *err) {
    for (size_t i = 0; i < count; i++) {
        tensors[i].role = cli_roles_given(roles, tensors[i].name);
    }
    parameter_orders orders;
    ckd_status status = read_orders(&orders, metadata, err);
    THEN(status, ckd_roles_find(out, tensors, count, orders.orders, orders.count, err));
    free_orders(&orders);
    return status;
}

void cli_roles_free(cli_roles *roles) {
    for (size_t i = 0; i < roles->count; i++) {
        free(roles->rules[i].pattern);
    }
    free(roles->rules);
    *roles = (cli_roles){0};
}
