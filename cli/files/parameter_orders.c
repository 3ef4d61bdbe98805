#include "cli/files/parameter_orders.h"

#include <stdlib.h>
#include <string.h>

#define MOST_PARAMETERS (1u << 24)

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
    return max < MOST_PARAMETERS ? (size_t)(max + 1) : 0;
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
static ckd_status add(cli_parameter_orders *o, char *prefix, const char *value, bool groups, ckd_error *err) {
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

ckd_status cli_parameter_orders_read(cli_parameter_orders *out, json_t *metadata, ckd_error *err) {
    size_t max = json_object_size(metadata);
    *out = (cli_parameter_orders){.orders = calloc(max + 1, sizeof(*out->orders)),
                                  .texts = calloc(max + 1, sizeof(*out->texts))};
    ckd_status status = out->orders && out->texts ? CKD_OK : cli_error_nomem(err);
    const char *key;
    json_t *value;
    json_object_foreach(metadata, key, value) {
        char *groups = status == CKD_OK ? prefix_of(key, "param_groups") : NULL;
        char *names = status == CKD_OK && !groups ? prefix_of(key, "param_names") : NULL;
        if (groups || names) {
            status = add(out, groups ? groups : names, json_string_value(value), groups != NULL, err);
        }
    }
    return status;
}

void cli_parameter_orders_free(cli_parameter_orders *o) {
    for (size_t i = 0; i < o->count; i++) {
        free((char *)o->orders[i].prefix);
        free((void *)o->orders[i].names);
        json_decref(o->texts[i]);
    }
    free(o->orders);
    free(o->texts);
    *o = (cli_parameter_orders){0};
}
