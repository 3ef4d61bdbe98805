/*
 * Optimizers on the command line: parses --adamw, --adam and --sgd, attaches them to tensors, and sorts moments before
 * the weights that they predict.
 */
#include "cli/convert/convert.h"

#include <fnmatch.h>
#include <stdlib.h>
#include <string.h>

#include "cli/output/output.h"

/* ---- the option ---- */

static const char *option_name(ckd_optimizer_kind kind) {
    return kind == CKD_ADAMW ? "adamw" : kind == CKD_ADAM ? "adam" : "sgd";
}

/* PyTorch's defaults, except for values that differ in every run. */
static ckd_optimizer defaults(ckd_optimizer_kind kind) {
    ckd_optimizer o = CKD_OPTIMIZER_INIT;
    o.kind = kind;
    o.lr = -1;
    if (kind == CKD_SGD) {
        o.step = 1; /* without bias correction, any step is right */
        return o;
    }
    o.beta1 = 0.9;
    o.beta2 = 0.999;
    o.eps = 1e-8;
    o.weight_decay = kind == CKD_ADAMW ? 0.01 : 0;
    return o;
}

static double *number_called(ckd_optimizer *o, const char *name) {
    const struct {
        const char *name;
        double *at;
        bool of_sgd, of_adam;
    } numbers[] = {{"lr", &o->lr, true, true},
                   {"beta1", &o->beta1, false, true},
                   {"beta2", &o->beta2, false, true},
                   {"eps", &o->eps, false, true},
                   {"weight_decay", &o->weight_decay, true, true},
                   {"momentum", &o->momentum, true, false},
                   {"dampening", &o->dampening, true, false}};
    for (size_t i = 0; i < sizeof(numbers) / sizeof(numbers[0]); i++) {
        bool has = o->kind == CKD_SGD ? numbers[i].of_sgd : numbers[i].of_adam;
        if (has && strcmp(numbers[i].name, name) == 0) {
            return numbers[i].at;
        }
    }
    return NULL;
}

static bool set_value(ckd_optimizer *o, char *assignment) {
    char *equals = strchr(assignment, '=');
    if (!equals) {
        return false;
    }
    *equals = '\0';
    const char *value = equals + 1;
    if (strcmp(assignment, "step") == 0) {
        return cli_parse_u64(&o->step, value) && o->step > 0;
    }
    if (strcmp(assignment, "nesterov") == 0 && o->kind == CKD_SGD) {
        o->nesterov = strcmp(value, "1") == 0;
        return o->nesterov || strcmp(value, "0") == 0;
    }
    double *number = number_called(o, assignment);
    bool fraction = strncmp(assignment, "beta", 4) == 0 || strcmp(assignment, "dampening") == 0;
    return number && cli_parse_double(number, value) && *number >= 0 && (!fraction || *number < 1);
}

static bool set_values(ckd_optimizer *o, char *text) {
    char *rest = text;
    for (char *setting = strtok_r(rest, ",", &rest); setting; setting = strtok_r(NULL, ",", &rest)) {
        if (!set_value(o, setting)) {
            return false;
        }
    }
    return o->lr >= 0 && o->step > 0;
}

ckd_status cli_optimizers_add(cli_optimizers *optimizers, ckd_optimizer_kind kind, const char *text,
                              ckd_error *err) {
    cli_optimizer_rule *rules = realloc(optimizers->rules, (optimizers->count + 1) * sizeof(*rules));
    if (!rules) {
        return cli_error_nomem(err);
    }
    optimizers->rules = rules;
    size_t assigned = strcspn(text, "="); /* a glob may contain colons, numbers do not */
    const char *colon = memrchr(text, ':', assigned);
    char *pattern = colon ? strndup(text, (size_t)(colon - text)) : strdup("*");
    char *values = strdup(colon ? colon + 1 : text);
    ckd_optimizer optimizer = defaults(kind);
    bool fine = pattern && values && set_values(&optimizer, values);
    bool memory = pattern && values;
    free(values);
    if (!fine) {
        free(pattern);
        return !memory
                   ? cli_error_nomem(err)
                   : cli_error(
                         err, CKD_E_INVALID,
                         kind == CKD_SGD
                             ? "--sgd is [GLOB:]lr=X,momentum=X and, if need be, dampening=X, "
                               "weight_decay=X, nesterov=1, not '%s%.200s'"
                             : "--%s is [GLOB:]lr=X,step=N and, where it is not the default, beta1=X, beta2=X, "
                               "eps=X, weight_decay=X, not '%.200s'",
                         kind == CKD_SGD ? "" : option_name(kind), text);
    }
    rules[optimizers->count++] = (cli_optimizer_rule){pattern, optimizer, false};
    return CKD_OK;
}

void cli_optimizers_free(cli_optimizers *optimizers) {
    for (size_t i = 0; i < optimizers->count; i++) {
        free(optimizers->rules[i].pattern);
    }
    free(optimizers->rules);
    *optimizers = (cli_optimizers){0};
}

/* ---- which tensors ---- */

/* Position in the order: first by the weight, then by the place among its tensors. */
typedef struct place {
    cli_input input;
    const char *weight; /* "": no weight with an optimizer */
    size_t index, with;
    int part;
} place;

static const char *weight_name(const cli_input *input) {
    bool weight = input->role == CKD_ROLE_WEIGHT;
    return weight ? input->tensor->name : input->weight && !input->largest ? input->weight : "";
}

/* A master without a weight uses the name that the weight would have. */
static const ckd_optimizer *find_rule(cli_optimizers *optimizers, const char *weight) {
    const char *plain = strncmp(weight, "master.", 7) == 0 ? weight + 7 : weight;
    for (size_t i = 0; *weight && i < optimizers->count; i++) {
        const char *pattern = optimizers->rules[i].pattern;
        if (fnmatch(pattern, weight, 0) == 0 || fnmatch(pattern, plain, 0) == 0) {
            optimizers->rules[i].used = true;
            return &optimizers->rules[i].optimizer;
        }
    }
    return NULL;
}

static int by_weight(const void *left, const void *right) {
    const place *a = left, *b = right;
    int order = strcmp(a->weight, b->weight);
    return order ? order : a->index < b->index ? -1 : a->index > b->index;
}

static int by_place(const void *left, const void *right) {
    const place *a = left, *b = right;
    if (a->with != b->with) {
        return a->with < b->with ? -1 : 1;
    }
    return a->part != b->part ? a->part - b->part : a->index < b->index ? -1 : a->index > b->index;
}

/*
 * Orders all tensors of one name. The moments go with the tensor that they update: the master if there is one, else the
 * weight.
 */
static void gather(place *places, size_t count) {
    const place *anchor = NULL;
    for (size_t i = 0; i < count; i++) {
        bool moves = places[i].part == 2 && places[i].input.tensor->dtype == CKD_F32;
        bool better = !anchor || places[i].input.role == CKD_ROLE_MASTER;
        anchor = moves && better ? &places[i] : anchor;
    }
    for (size_t i = 0; i < count && anchor; i++) {
        places[i].with = places[i].part < 2 ? anchor->index : places[i].index;
    }
}

ckd_status cli_optimizers_apply(cli_optimizers *optimizers, cli_inputs *inputs, ckd_error *err) {
    if (optimizers->count == 0) {
        return CKD_OK;
    }
    place *places = calloc(inputs->count ? inputs->count : 1, sizeof(*places));
    if (!places) {
        return cli_error_nomem(err);
    }
    for (size_t i = 0; i < inputs->count; i++) {
        cli_input *input = &inputs->tensors[i];
        const char *weight = weight_name(input);
        input->optimizer = find_rule(optimizers, weight);
        int part = input->role == CKD_ROLE_EXP_AVG ? 0 : input->role == CKD_ROLE_EXP_AVG_SQ ? 1 : 2;
        places[i] = (place){*input, input->optimizer ? weight : "", i, i, part};
    }
    qsort(places, inputs->count, sizeof(*places), by_weight);
    for (size_t i = 0, end; i < inputs->count; i = end) {
        for (end = i + 1; end < inputs->count && strcmp(places[end].weight, places[i].weight) == 0;) {
            end++;
        }
        if (*places[i].weight) {
            gather(places + i, end - i);
        }
    }
    qsort(places, inputs->count, sizeof(*places), by_place);
    for (size_t i = 0; i < inputs->count; i++) {
        inputs->tensors[i] = places[i].input;
    }
    free(places);
    return CKD_OK;
}
