/* ckptdelta diff: compares two checkpoints, tensor by tensor. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>

#include "cli/commands/commands.h"
#include "cli/output/output.h"

static const struct argp_option options_table[] = {
    {"run", 'r', "RUN", 0, "The run of steps that are given as numbers [default: the only one of the store]",
     1},
    {0},
};

static const char doc[] =
    "Compare checkpoint A with checkpoint B, each given as a step (a number, or latest), as RUN@STEP or as @TAG. For each tensor: "
    "how many elements have other bits, the L2 norms of both and of the difference, the largest difference. Tensors that "
    "are equal are only counted, unless -v is given."
    "\vExamples:\n"
    "  ckptdelta diff ckpts 100 latest\n"
    "  ckptdelta diff ckpts gpt@100 tuned@0 --json\n"
    "  ckptdelta diff ckpts @best gpt@latest\n";

typedef struct arguments {
    cli_options common;
    const char *run;
    cli_ref refs[2];
    unsigned place_count;
} arguments;

static error_t parse(int key, char *arg, struct argp_state *state) {
    arguments *a = state->input;
    switch (key) {
    case ARGP_KEY_INIT:
        state->child_inputs[0] = state->child_inputs[1] = &a->common;
        return 0;
    case 'r':
        a->run = arg;
        return 0;
    case ARGP_KEY_ARG:
        if (cli_take_store(&a->common, arg)) {
            return 0;
        }
        if (a->place_count == 2 || !cli_parse_ref(&a->refs[a->place_count], arg)) {
            argp_error(state, "name two checkpoints, each a step, latest, RUN@STEP or @TAG; '%s' is %s", arg,
                       a->place_count == 2 ? "one too many" : "none of these");
        }
        a->place_count++;
        return 0;
    case ARGP_KEY_END:
        if (a->place_count != 2) {
            argp_error(state, "name two checkpoints to compare");
        }
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static double changed_fraction(const ckd_tensor_diff *d) {
    if (!d->comparable) {
        return NAN;
    }
    return d->elements ? (double)d->changed / (double)d->elements : 0;
}

static json_t *json_side(const ckd_checkpoint *c) {
    char id[CKD_ID_TEXT];
    ckd_id_text(id, &c->id);
    return json_pack("{s:s, s:I, s:s}", "run", c->run, "step", (json_int_t)c->step, "id", id);
}

/* Tensors that cannot be compared get null, not 0. */
static json_t *json_diff(const ckd_tensor_diff *d) {
    double missing = d->comparable ? 0 : NAN;
    return json_pack(
        "{s:o, s:s, s:s, s:b, s:o, s:I, s:I, s:o, s:o, s:o, s:o, s:o}", "name", cli_json_text(d->name),
        "role", ckd_role_name(d->role), "dtype", ckd_dtype_name(d->dtype), "comparable", d->comparable != 0,
        "why", d->why[0] ? cli_json_text(d->why) : json_null(), "elements", (json_int_t)d->elements,
        "changed", (json_int_t)d->changed, "changed_fraction", cli_json_double(changed_fraction(d)), "norm_a",
        cli_json_double(d->norm_a + missing), "norm_b", cli_json_double(d->norm_b + missing), "norm_diff",
        cli_json_double(d->norm_diff + missing), "max_diff", cli_json_double(d->max_diff + missing));
}

static ckd_status print_json(const ckd_diff *diff, const ckd_checkpoint sides[2], ckd_error *err) {
    json_t *tensors = json_array();
    for (size_t i = 0; i < diff->count; i++) {
        cli_json_append(&tensors, json_diff(&diff->items[i]));
    }
    return cli_json_print(json_pack("{s:i, s:o, s:o, s:o}", "schema", 1, "a", json_side(&sides[0]), "b",
                                    json_side(&sides[1]), "tensors", tensors),
                          err);
}

static void print_row(cli_table *t, const ckd_tensor_diff *d) {
    cli_table_cell(t, "%s", d->name);
    cli_table_cell(t, "%s", ckd_role_name(d->role));
    cli_table_cell(t, "%s", ckd_dtype_name(d->dtype));
    if (!d->comparable) {
        cli_table_cell(t, "%s", d->why);
        for (int i = 0; i < 4; i++) {
            cli_table_cell(t, "-");
        }
        return;
    }
    cli_table_cell(t, "%.2f %%", 100 * changed_fraction(d));
    cli_table_cell(t, "%s", cli_text_number(d->norm_a).text);
    cli_table_cell(t, "%s", cli_text_number(d->norm_b).text);
    cli_table_cell(t, "%s", cli_text_number(d->norm_diff).text);
    cli_table_cell(t, "%s", cli_text_number(d->max_diff).text);
}

static ckd_status print_text(const ckd_diff *diff, const ckd_checkpoint sides[2], bool verbose,
                             ckd_error *err) {
    size_t equal = 0;
    cli_table *t = cli_table_new("TENSOR|ROLE|DTYPE|>CHANGED|>NORM A|>NORM B|>NORM OF DIFFERENCE|>LARGEST");
    for (size_t i = 0; i < diff->count; i++) {
        const ckd_tensor_diff *d = &diff->items[i];
        bool same = d->comparable && d->changed == 0;
        equal += same;
        if (!same || verbose) {
            print_row(t, d);
        }
    }
    printf("A: %s, B: %s; %zu of %zu tensors are equal\n", cli_ref_text_of(&sides[0]).text,
           cli_ref_text_of(&sides[1]).text, equal, diff->count);
    if (equal < diff->count || verbose) {
        putchar('\n');
    }
    return cli_table_print(t, err);
}

static ckd_status compare(const arguments *a, ckd_store *store, ckd_error *err) {
    ckd_checkpoint sides[2];
    for (int i = 0; i < 2; i++) {
        ckd_status status = cli_find_ref(&sides[i], store, &a->refs[i], a->run, err);
        if (status != CKD_OK) {
            return status;
        }
    }
    cli_progress progress;
    cli_progress_begin(&progress, "comparing", a->common.quiet);
    ckd_diff_options options = CKD_DIFF_OPTIONS_INIT;
    options.on_progress = cli_progress_update;
    options.progress_context = &progress;
    ckd_diff *diff;
    ckd_status status = ckd_store_diff(&diff, store, &sides[0].id, &sides[1].id, &options, err);
    cli_progress_end(&progress);
    if (status == CKD_OK && a->common.json) {
        status = print_json(diff, sides, err);
    } else if (status == CKD_OK && cli_prints_text(&a->common)) {
        status = print_text(diff, sides, a->common.verbose > 0, err);
    }
    ckd_diff_free(diff);
    return status;
}

int cmd_diff(int argc, char **argv) {
    static const struct argp_child children[] = {
        {&cli_common_argp, 0, 0, 0}, {&cli_threads_argp, 0, 0, 0}, {0}};
    static const struct argp argp = {options_table, parse, "[STORE] A B", doc, children, 0, 0};
    arguments a = {.common.command = "diff"};
    cli_parse_arguments(&argp, argc, argv, &a);
    ckd_error err;
    ckd_store *store;
    ckd_status status = cli_open_store(&store, &a.common, CKD_OPEN_READ, &err);
    THEN(status, compare(&a, store, &err));
    ckd_store_close(store);
    return status == CKD_OK ? CLI_DONE : cli_fail(&err);
}
