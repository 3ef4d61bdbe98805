/* ckptdelta show: one checkpoint, its tensors, and its chain of parents. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "cli/commands/commands.h"
#include "cli/output/output.h"

static const char doc[] =
    "Show one checkpoint: what it depends on, and for each tensor its role, dtype, shape, how it is stored and how "
    "many bytes that takes. Without --run: the only run; without --step: the newest checkpoint."
    "\vMethods: raw, standalone (compressed on its own), delta (against the parent), step (against an optimizer "
    "step from the parent), same (as in the parent), copy and cast "
    "(of another tensor of the checkpoint), mixed (blocks differ).\n\n"
    "Examples:\n"
    "  ckptdelta show ckpts\n"
    "  ckptdelta show ckpts --run gpt --step 100 --json\n";

typedef struct arguments {
    cli_options common;
    cli_pick pick;
} arguments;

static error_t parse(int key, char *arg, struct argp_state *state) {
    (void)arg;
    arguments *a = state->input;
    if (key != ARGP_KEY_INIT) {
        return ARGP_ERR_UNKNOWN;
    }
    state->child_inputs[0] = &a->common;
    state->child_inputs[1] = &a->pick;
    return 0;
}

/* Everything to show. */
typedef struct shown {
    ckd_checkpoint checkpoint;
    ckd_checkpoint_list *all;
    ckd_tensor_list *tensors;
    ckd_tensor_list *unparented; /* tensors stored without the parent; NULL: unknown, or a base */
    cli_marks marks;
} shown;

static double bits_per_element(const ckd_tensor_info *t) {
    return t->elements ? 8 * (double)t->stored_bytes / (double)t->elements : NAN;
}

/*
 * Returns the next checkpoint of a chain; NULL at its end. `left` bounds a chain that damage has turned into a cycle.
 */
static const ckd_checkpoint *next_in_chain(const shown *s, const ckd_checkpoint *c, size_t *left) {
    if (*left == 0) {
        return NULL;
    }
    --*left;
    return cli_by_id(s->all, &c->parent);
}

/* -------------------------------------------------------------------------------------------------------- JSON */

static json_t *json_tensor(const ckd_tensor_info *t, ckd_fidelity fidelity) {
    json_t *shape = json_array();
    for (uint32_t d = 0; d < t->ndim; d++) {
        cli_json_append(&shape, json_integer((json_int_t)t->shape[d]));
    }
    return json_pack(
        "{s:o, s:s, s:s, s:o, s:I, s:s, s:o, s:I, s:I, s:I, s:I, s:o, s:o, s:o, s:o, s:o, s:o, s:I}", "name",
        cli_json_text(t->name), "role", ckd_role_name(t->role), "dtype", ckd_dtype_name(t->dtype), "shape",
        shape, "elements", (json_int_t)t->elements, "fidelity", ckd_fidelity_name(fidelity), "method",
        cli_json_text(t->method), "depth", (json_int_t)t->depth, "shards", (json_int_t)t->shards, "raw_bytes",
        (json_int_t)t->raw_bytes, "stored_bytes", (json_int_t)t->stored_bytes, "bits_per_element",
        cli_json_double(bits_per_element(t)), "rel_l2", cli_json_double(t->rel_l2), "max_error",
        cli_json_double(t->max_error), "direction_change", cli_json_double(t->direction_change),
        "largest_update", cli_json_double(t->largest_update), "largest_update_given",
        cli_json_double(t->largest_update_given), "nonfinite", (json_int_t)t->nonfinite);
}

static ckd_status print_json(const shown *s, ckd_error *err) {
    json_t *tensors = json_array(), *chain = json_array();
    for (size_t i = 0; i < s->tensors->count; i++) {
        cli_json_append(&tensors, json_tensor(&s->tensors->items[i], s->checkpoint.fidelity));
    }
    json_t *unparented = s->unparented ? json_array() : json_null();
    for (size_t i = 0; s->unparented && i < s->unparented->count; i++) {
        cli_json_append(&unparented, cli_json_text(s->unparented->items[i].name));
    }
    size_t left = s->all->count;
    for (const ckd_checkpoint *c = &s->checkpoint; c; c = next_in_chain(s, c, &left)) {
        cli_json_append(&chain, json_string(cli_ref_text_of(c).text));
    }
    const ckd_checkpoint_list this = {1, (ckd_checkpoint *)&s->checkpoint};
    return cli_json_print(json_pack("{s:i, s:[o], s:o, s:o, s:o, s:o, s:o}", "schema", 1, "checkpoints",
                                    cli_json_checkpoint(&s->checkpoint, s->all), "chain", chain,
                                    "without_parent", unparented, "tensors", tensors, "pins",
                                    cli_json_pins(&s->marks, &this, s->all), "tags",
                                    cli_json_tags(&s->marks, &this, s->all)),
                          err);
}

/* -------------------------------------------------------------------------------------------------------- text */

/* Prints the tensors stored without the parent, if the checkpoint has a parent. */
static void print_without_parent(const shown *s) {
    enum { NAMED = 4 };
    if (!s->unparented || s->unparented->count == 0) {
        return;
    }
    printf("standalone    %zu tensor%s that the parent lacks, or has with another dtype or shape: ",
           s->unparented->count, cli_plural(s->unparented->count));
    for (size_t i = 0; i < s->unparented->count && i < NAMED; i++) {
        fputs(i ? ", " : "", stdout);
        cli_print_clean(stdout, s->unparented->items[i].name);
    }
    fputs(s->unparented->count > NAMED ? ", ...\n" : "\n", stdout);
}

/* Names the tensors that may have caused the verdict. */
static void print_suspect(const shown *s) {
    enum { NAMED = 4 };
    size_t count = 0;
    if (!s->checkpoint.suspect) {
        return;
    }
    fputs("suspect       values became NaN or infinite: ", stdout);
    for (size_t i = 0; i < s->tensors->count; i++) {
        const ckd_tensor_info *t = &s->tensors->items[i];
        if (t->nonfinite && t->role != CKD_ROLE_OTHER && count++ < NAMED) {
            fputs(count > 1 ? ", " : "", stdout);
            cli_print_clean(stdout, t->name);
            printf(" (%" PRIu64 " of %" PRIu64 ")", t->nonfinite, t->elements);
        }
    }
    fputs(count > NAMED ? ", ...\n" : "\n", stdout);
}

static void print_checkpoint(const shown *s) {
    const ckd_checkpoint *c = &s->checkpoint, *from = cli_by_id(s->all, &c->resumed_from);
    char id[CKD_ID_TEXT];
    ckd_id_text(id, &c->id);
    printf("checkpoint    %s\n", cli_ref_text_of(c).text);
    printf("id            %s\n", id);
    printf("created       %s\n", cli_text_time(c->created_ns).text);
    printf("kind          %s\n", ckd_kind_name(c->kind));
    printf("fidelity      %s, lossy resumes before it: %" PRIu32 "\n", ckd_fidelity_name(c->fidelity),
           c->lossy_resumes);
    printf("size          %s in %s, %s\n", cli_text_size(c->raw_bytes).text,
           cli_text_size(c->stored_bytes).text, cli_text_ratio(c->raw_bytes, c->stored_bytes).text);
    printf("load cost     %s (1: the load of a base of the same state)\n",
           cli_text_number(c->load_cost).text);
    printf("depth         %" PRIu32 " delta%s to apply at most\n", c->depth, cli_plural(c->depth));
    if (from) {
        printf("resumed from  %s\n", cli_ref_text_of(from).text);
    }
    if (c->metric_name[0]) {
        fputs("metric        ", stdout);
        cli_print_clean(stdout, c->metric_name);
        printf(" = %g\n", c->metric);
    }
    print_suspect(s);
    cli_marks_print(&s->marks, c);
    printf("chain         %s", cli_ref_text_of(c).text);
    size_t left = s->all->count;
    for (const ckd_checkpoint *p = next_in_chain(s, c, &left); p; p = next_in_chain(s, p, &left)) {
        printf(" -> %s", cli_ref_text_of(p).text);
    }
    fputs("\n", stdout);
    print_without_parent(s);
    fputs("\n", stdout);
}

/* "[768, 50257]" */
static void shape_cell(cli_table *t, const ckd_tensor_info *info) {
    char text[CKD_MAX_DIMS * 22 + 3] = "[";
    size_t used = 1;
    for (uint32_t d = 0; d < info->ndim; d++) {
        used +=
            (size_t)snprintf(text + used, sizeof(text) - used, "%s%" PRIu64, d ? ", " : "", info->shape[d]);
    }
    cli_table_cell(t, "%s]", text);
}

static void error_cells(cli_table *t, const ckd_tensor_info *info) {
    cli_table_cell(t, "%s", cli_text_number(info->rel_l2).text);
    cli_table_cell(t, "%s", cli_text_number(info->max_error).text);
    cli_table_cell(t, "%s", cli_text_number(info->direction_change).text);
    cli_table_cell(t, "%s", cli_text_number(info->largest_update).text);
    cli_table_cell(t, "%s", cli_text_number(info->largest_update_given).text);
}

static ckd_status print_text(const shown *s, bool verbose, ckd_error *err) {
    print_checkpoint(s);
    bool errors = verbose || s->checkpoint.fidelity != CKD_EXACT, nonfinite = errors || s->checkpoint.suspect;
    char columns[160];
    snprintf(columns, sizeof(columns),
             "TENSOR|ROLE|DTYPE|SHAPE|METHOD|>DEPTH|>RAW|>STORED|>BITS/ELEMENT%s%s%s",
             verbose ? "|>SHARDS" : "", errors ? "|>REL L2|>MAX ERROR|>DIRECTION|>UPDATE|>GIVEN" : "",
             nonfinite ? "|>NONFINITE" : "");
    cli_table *t = cli_table_new(columns);
    for (size_t i = 0; i < s->tensors->count; i++) {
        const ckd_tensor_info *info = &s->tensors->items[i];
        cli_table_cell(t, "%s", info->name);
        cli_table_cell(t, "%s", ckd_role_name(info->role));
        cli_table_cell(t, "%s", ckd_dtype_name(info->dtype));
        shape_cell(t, info);
        cli_table_cell(t, "%s", info->method);
        cli_table_cell(t, "%" PRIu32, info->depth);
        cli_table_cell(t, "%s", cli_text_size(info->raw_bytes).text);
        cli_table_cell(t, "%s", cli_text_size(info->stored_bytes).text);
        cli_table_cell(t, info->elements ? "%.2f" : "-", bits_per_element(info));
        if (verbose) {
            cli_table_cell(t, "%" PRIu32, info->shards);
        }
        if (errors) {
            error_cells(t, info);
        }
        if (nonfinite) {
            cli_table_cell(t, "%" PRIu64, info->nonfinite);
        }
    }
    return cli_table_print(t, err);
}

static ckd_status run(const arguments *a, ckd_error *err) {
    ckd_store *store = NULL;
    shown s = {0};
    ckd_status status = cli_open_store(&store, &a->common, CKD_OPEN_READ, err);
    THEN(status, cli_find_pick(&s.checkpoint, store, &a->pick, err));
    THEN(status, ckd_store_list(&s.all, store, NULL, err));
    THEN(status, ckd_store_tensors(&s.tensors, store, &s.checkpoint.id, err));
    THEN(status, cli_marks_read(&s.marks, store, err));
    if (status == CKD_OK &&
        s.checkpoint.kind == CKD_DELTA) { /* the parent may have been deleted, which is no error here */
        (void)ckd_store_tensors_without_parent(&s.unparented, store, &s.checkpoint.id, NULL);
    }
    if (status == CKD_OK && a->common.json) {
        status = print_json(&s, err);
    } else if (status == CKD_OK && cli_prints_text(&a->common)) {
        status = print_text(&s, a->common.verbose > 0, err);
    }
    cli_marks_free(&s.marks);
    ckd_tensor_list_free(s.unparented);
    ckd_tensor_list_free(s.tensors);
    ckd_checkpoint_list_free(s.all);
    ckd_store_close(store);
    return status;
}

int cmd_show(int argc, char **argv) {
    static const struct argp_child children[] = {{&cli_common_argp, 0, 0, 0}, {&cli_pick_argp, 0, 0, 0}, {0}};
    static const struct argp argp = {NULL, parse, CLI_PICK_USAGE, doc, children, 0, 0};
    arguments a = {.common.command = "show"};
    cli_parse_arguments(&argp, argc, argv, &a);
    ckd_error err;
    return run(&a, &err) == CKD_OK ? CLI_DONE : cli_fail(&err);
}
