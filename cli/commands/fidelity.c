/*
 * Parses the options of a lossy save, puts its inputs into the order that pairs of moments need, and prints the errors
 * and the size that were achieved.
 */
#include "cli/commands/fidelity.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/output/output.h"

/* ------------------------------------------------------------------------------------------------- the options */

enum { OPT_FIDELITY = 0x300, OPT_EFFORT, OPT_TARGET_BITS, OPT_TARGET_RATIO, OPT_MAX_ERROR, OPT_STEP_SCALE };

static const struct argp_option options_table[] = {
    {0, 0, 0, 0, "How exactly it is stored (see below):", 6},
    {"fidelity", OPT_FIDELITY, "[ROLE=]NAME,...", 0,
     "exact: bit for bit [default]; near: lossy, a resume loses some of the steps since the save before; coarse: lossy, "
     "smallest, a resume loses more. With a ROLE (weight, exp_avg, exp_avg_sq, master), it applies only to tensors with this role. May be repeated",
     6},
    {"effort", OPT_EFFORT, "N", 0,
     "Time spent on making a lossy checkpoint small: 1 (fast) to 9 [default: 5]", 6},
    {"target-bits", OPT_TARGET_BITS, "X", 0,
     "Choose the steps so that a lossy delta takes about X bits for each parameter, its weight and its moments together. Weights "
     "that were replaced altogether take more",
     6},
    {"target-ratio", OPT_TARGET_RATIO, "X", 0,
     "The same as a ratio: raw bytes of weights and moments over stored bytes", 6},
    {"max-error", OPT_MAX_ERROR, "X", 0,
     "No value of a lossy tensor is off by more than X times the root mean square of its matrix; between 0 and 1",
     6},
    {"step-scale", OPT_STEP_SCALE, "X", 0,
     "Quantize weights and first moments X times as coarsely as the fidelity says, from 1/64 to 64 [default: 1]",
     6},
    {0},
};

/* Returns the index of `text` (with this length) among names that end with NULL; -1 if absent. */
static int index_of(const char *text, size_t length, const char *const *names) {
    for (int i = 0; names[i]; i++) {
        if (strlen(names[i]) == length && memcmp(names[i], text, length) == 0) {
            return i;
        }
    }
    return -1;
}

/* Parses "near", or "exp_avg=coarse". */
static bool add_one(ckd_save_options *o, const char *text, size_t length) {
    static const char *const fidelities[] = {"exact", "near", "coarse", NULL};
    static const char *const roles[] = {"weight", "exp_avg", "exp_avg_sq", "master", NULL};
    const char *equals = memchr(text, '=', length), *name = equals ? equals + 1 : text;
    int fidelity = index_of(name, length - (size_t)(name - text), fidelities);
    int role = equals ? index_of(text, (size_t)(equals - text), roles) : 0;
    if (fidelity < 0 || role < 0) {
        return false;
    }
    *(equals ? &o->role_fidelity[CKD_ROLE_WEIGHT + role] : &o->fidelity) =
        (ckd_fidelity)(CKD_EXACT + fidelity);
    return true;
}

static void add_fidelities(ckd_save_options *o, const char *arg, struct argp_state *state) {
    for (const char *at = arg; at;) {
        size_t length = strcspn(at, ",");
        if (!add_one(o, at, length)) {
            argp_error(
                state,
                "--fidelity is exact, near or coarse, or ROLE=NAME with the ROLE weight, exp_avg, exp_avg_sq or "
                "master (others are always exact), not '%.*s'",
                (int)(length < 100 ? length : 100), at);
            return;
        }
        at = at[length] ? at + length + 1 : NULL;
    }
}

static void parse_between(double *out, const char *name, double max, const char *arg,
                          struct argp_state *state) {
    if (!cli_parse_double(out, arg) || !(*out > 0) || !(*out < max)) {
        argp_error(state, "--%s is a number above 0 and below %g, not '%s'", name, max, arg);
    }
}

static void check(const ckd_save_options *o, struct argp_state *state) {
    const char *option = o->effort             ? "effort"
                         : o->target_bits > 0  ? "target-bits"
                         : o->target_ratio > 0 ? "target-ratio"
                         : o->max_error > 0    ? "max-error"
                         : o->step_scale > 0   ? "step-scale"
                                               : NULL;
    if (option && !cli_fidelity_is_lossy(o)) {
        argp_error(state, "--%s is for lossy checkpoints: add --fidelity near or --fidelity coarse", option);
    }
    if (o->target_bits > 0 && o->target_ratio > 0) {
        argp_error(state, "--target-bits and --target-ratio say the same in two ways: give one of them");
    }
    if (o->max_error > 0 && (o->target_bits > 0 || o->target_ratio > 0)) {
        argp_error(
            state,
            "--max-error and --target-%s exclude each other: the error sets the size, or the size the error",
            o->target_bits > 0 ? "bits" : "ratio");
    }
    if (o->step_scale > 0 && (o->target_bits > 0 || o->target_ratio > 0)) {
        argp_error(state,
                   "--step-scale and --target-%s exclude each other: the scale sets the steps, or the target",
                   o->target_bits > 0 ? "bits" : "ratio");
    }
}

static error_t parse(int key, char *arg, struct argp_state *state) {
    ckd_save_options *o = state->input;
    uint64_t effort;
    switch (key) {
    case OPT_FIDELITY:
        add_fidelities(o, arg, state);
        return 0;
    case OPT_EFFORT:
        if (!cli_parse_u64(&effort, arg) || effort < 1 || effort > 9) {
            argp_error(state, "--effort is a number from 1 to 9, not '%s'", arg);
        }
        o->effort = (int)effort;
        return 0;
    case OPT_TARGET_BITS:
        parse_between(&o->target_bits, "target-bits", 64, arg, state);
        return 0;
    case OPT_TARGET_RATIO:
        parse_between(&o->target_ratio, "target-ratio", 1e6, arg, state);
        return 0;
    case OPT_MAX_ERROR:
        parse_between(&o->max_error, "max-error", 1, arg, state);
        return 0;
    case OPT_STEP_SCALE:
        if (!cli_parse_double(&o->step_scale, arg) || !(o->step_scale >= 1.0 / 64) ||
            !(o->step_scale <= 64)) {
            argp_error(state, "--step-scale is a number from 1/64 to 64, not '%s'", arg);
        }
        return 0;
    case ARGP_KEY_END:
        check(o, state);
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

const struct argp cli_fidelity_argp = {.options = options_table, .parser = parse};

bool cli_fidelity_of_role_is_lossy(const ckd_save_options *o, ckd_role role) {
    ckd_fidelity by_role = o->role_fidelity[role];
    return role != CKD_ROLE_OTHER && (by_role != CKD_FIDELITY_DEFAULT ? by_role : o->fidelity) > CKD_EXACT;
}

bool cli_fidelity_is_lossy(const ckd_save_options *o) {
    bool lossy = false;
    for (ckd_role role = CKD_ROLE_WEIGHT; role < CKD_ROLE_OTHER; role++) {
        lossy |= cli_fidelity_of_role_is_lossy(o, role);
    }
    return lossy;
}

/* --------------------------------------------------------------------------------------------------- the order */

typedef struct place {
    cli_input input;
    const char *parameter;
    size_t index, with; /* with: index of its parameter's first tensor */
    int part;
    bool no_master; /* the parameter has no master */
} place;

/* exact_first: the first moment's role is exact, and the second moment's is not. */
static place place_of(const cli_input *input, size_t index, bool exact_first) {
    static const int parts[] = {[CKD_ROLE_EXP_AVG_SQ] = 0,
                                [CKD_ROLE_EXP_AVG] = 2,
                                [CKD_ROLE_MASTER] = 3,
                                [CKD_ROLE_WEIGHT] = 4,
                                [CKD_ROLE_OTHER] = 4};
    const char *parameter = input->weight ? input->weight : input->tensor->name;
    bool before = exact_first && input->role == CKD_ROLE_EXP_AVG;
    int part = input->largest ? 1 : before ? -1 : parts[input->role];
    return (place){*input, parameter, index, index, part, true};
}

static int by_parameter(const void *left, const void *right) {
    const place *a = left, *b = right;
    int order = strcmp(a->parameter, b->parameter);
    return order ? order : a->index < b->index ? -1 : a->index > b->index;
}

static int by_place(const void *left, const void *right) {
    const place *a = left, *b = right;
    if (a->no_master != b->no_master) {
        return a->no_master - b->no_master;
    }
    if (a->with != b->with) {
        return a->with < b->with ? -1 : 1;
    }
    return a->part != b->part ? a->part - b->part : a->index < b->index ? -1 : a->index > b->index;
}

ckd_status cli_fidelity_order(cli_inputs *inputs, const ckd_save_options *o, ckd_error *err) {
    bool exact_first = !cli_fidelity_of_role_is_lossy(o, CKD_ROLE_EXP_AVG) &&
                       cli_fidelity_of_role_is_lossy(o, CKD_ROLE_EXP_AVG_SQ);
    place *places = calloc(inputs->count ? inputs->count : 1, sizeof(*places));
    if (!places) {
        return cli_error_nomem(err);
    }
    for (size_t i = 0; i < inputs->count; i++) {
        places[i] = place_of(&inputs->tensors[i], i, exact_first);
    }
    qsort(places, inputs->count, sizeof(*places), by_parameter);
    for (size_t i = 0, end; i < inputs->count; i = end) {
        bool no_master = true;
        for (end = i; end < inputs->count && strcmp(places[end].parameter, places[i].parameter) == 0; end++) {
            places[end].with = places[i].index;
            no_master &= places[end].input.role != CKD_ROLE_MASTER;
        }
        for (size_t k = i; k < end; k++) {
            places[k].no_master = no_master;
        }
    }
    qsort(places, inputs->count, sizeof(*places), by_place);
    for (size_t i = 0; i < inputs->count; i++) {
        inputs->tensors[i] = places[i].input;
    }
    free(places);
    return CKD_OK;
}

/* ------------------------------------------------------------------------------------------------- the result */

static bool is_moment(ckd_role role) {
    return role == CKD_ROLE_EXP_AVG || role == CKD_ROLE_EXP_AVG_SQ;
}

static double largest_error(const ckd_tensor_list *tensors, bool of_moments, bool *any) {
    double largest = 0;
    *any = false;
    for (size_t i = 0; i < tensors->count; i++) {
        const ckd_tensor_info *t = &tensors->items[i];
        if (t->role != CKD_ROLE_OTHER && is_moment(t->role) == of_moments) {
            *any = true;
            largest = t->rel_l2 > largest || isnan(t->rel_l2) ? t->rel_l2 : largest;
        }
    }
    return largest;
}

/* Counts parameters. A weight and its master are one parameter. */
static double parameters(const ckd_tensor_list *tensors) {
    double elements[CKD_ROLE_OTHER + 1] = {0}, max = 0;
    for (size_t i = 0; i < tensors->count; i++) {
        elements[tensors->items[i].role] += (double)tensors->items[i].elements;
    }
    for (ckd_role role = CKD_ROLE_WEIGHT; role < CKD_ROLE_OTHER; role++) {
        max = role != CKD_ROLE_EXP_AVG_SQ && elements[role] > max ? elements[role] : max;
    }
    return max;
}

void cli_fidelity_print(const ckd_checkpoint *c, const ckd_tensor_list *tensors) {
    double n = parameters(tensors);
    bool weights, moments;
    double of_weights = largest_error(tensors, false, &weights),
           of_moments = largest_error(tensors, true, &moments);
    printf("%s:", ckd_fidelity_name(c->fidelity));
    if (n > 0) {
        printf(" %s bits per parameter;", cli_text_number(8 * (double)c->stored_bytes / n).text);
    }
    printf(" relative error (L2) up to");
    if (weights) {
        printf(" %s in weights%s", cli_text_number(of_weights).text, moments ? "," : "");
    }
    if (moments) {
        printf(" %s in moments", cli_text_number(of_moments).text);
    }
    printf(weights || moments ? "" : " 0");
    if (c->lossy_resumes) {
        printf("; %" PRIu32 " lossy resume%s before it", c->lossy_resumes, cli_plural(c->lossy_resumes));
    }
    putchar('\n');
}
