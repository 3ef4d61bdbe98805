/* ckptdelta list: lists the checkpoints of a store. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "cli/commands/commands.h"
#include "cli/output/output.h"

static const struct argp_option options_table[] = {
    {"run", 'r', "RUN", 0, "Only this run", 1},
    {0},
};

static const char doc[] = "List the checkpoints of a store, by run and step."
                          "\vExamples:\n"
                          "  ckptdelta list ckpts\n"
                          "  ckptdelta list ckpts gpt -v\n"
                          "  ckptdelta list ckpts --json\n";

typedef struct arguments {
    cli_options common;
    const char *run;
} arguments;

static error_t parse(int key, char *arg, struct argp_state *state) {
    arguments *a = state->input;
    switch (key) {
    case ARGP_KEY_INIT:
        state->child_inputs[0] = &a->common;
        return 0;
    case ARGP_KEY_ARG:
        return cli_take_run(&a->common, &a->run, arg, state);
    case 'r':
        a->run = arg;
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

/* The listing: all checkpoints, and the requested ones. */
typedef struct listing {
    ckd_checkpoint_list *all, *list; /* list: the requested ones; it may be `all` */
    ckd_timeline *times;             /* of the requested ones, for text */
    bool one_run;
    cli_marks marks;
} listing;

static ckd_status print_json(ckd_store *store, const listing *l, ckd_error *err) {
    const ckd_checkpoint_list *listed = l->one_run ? l->list : NULL;
    json_t *errors;
    ckd_status status = cli_lossy_errors(&errors, store, l->list, err);
    if (status != CKD_OK) {
        return status;
    }
    return cli_json_print_list(json_pack("{s:i, s:n, s:o, s:o, s:o}", "schema", 1, "checkpoints", "errors",
                                         errors, "pins", cli_json_pins(&l->marks, listed, l->all), "tags",
                                         cli_json_tags(&l->marks, listed, l->all)),
                               "checkpoints", l->list, l->all, err);
}

static void print_verbose_cells(cli_table *t, const ckd_checkpoint *c, const cli_ids *ids) {
    const ckd_checkpoint *parent = cli_ids_find(ids, &c->parent), *from = cli_ids_find(ids, &c->resumed_from);
    char id[CKD_ID_TEXT];
    ckd_id_text(id, &c->id);
    cli_table_cell(t, "%s", parent ? cli_ref_text_of(parent).text : "-");
    cli_table_cell(t, "%s", from ? cli_ref_text_of(from).text : "-");
    cli_table_cell(t, "%s", cli_text_number(c->load_cost).text);
    cli_table_cell(t, "%" PRIu64, c->tensors);
    cli_table_cell(t, c->metric_name[0] ? "%s=%g" : "-", c->metric_name, c->metric);
    cli_table_cell(t, "%s", id);
}

/* Bytes that the save of c wrote, 0 if unknown. Both lists are in order; *at is the place in the timeline. */
static uint64_t written_bytes(size_t *at, const ckd_timeline *times, const ckd_checkpoint *c) {
    for (; *at < times->count; ++*at) {
        const ckd_save_times *save = &times->items[*at];
        int order = strcmp(save->run, c->run);
        order = order ? order : (save->step > c->step) - (save->step < c->step);
        if (order >= 0) {
            return order == 0 ? save->written_bytes : 0;
        }
    }
    return 0;
}

static bool any_suspect(const ckd_checkpoint_list *list) {
    bool any = false;
    for (size_t i = 0; i < list->count && !any; i++) {
        any = list->items[i].suspect != 0;
    }
    return any;
}

static ckd_status print_text(const listing *l, bool verbose, ckd_error *err) {
    bool marked = cli_marks_any(&l->marks) || any_suspect(l->list);
    char columns[200];
    snprintf(columns, sizeof(columns),
             "RUN|>STEP|KIND|FIDELITY|>RAW|>STORED|>WRITTEN|>RATIO|>DEPTH|CREATED%s%s",
             marked ? "|MARKS" : "", verbose ? "|PARENT|RESUMED FROM|>LOAD COST|>TENSORS|METRIC|ID" : "");
    cli_ids ids = {0};
    ckd_status status = cli_ids_make(&ids, l->all, err);
    if (status != CKD_OK) {
        return status;
    }
    cli_table *t = cli_table_new(columns);
    size_t at = 0;
    for (size_t i = 0; i < l->list->count; i++) {
        const ckd_checkpoint *c = &l->list->items[i];
        cli_table_checkpoint(t, c->run, c->step);
        cli_table_cell(t, "%s", ckd_kind_name(c->kind));
        cli_table_cell(t, "%s", ckd_fidelity_name(c->fidelity));
        cli_table_sizes(t, c->raw_bytes, c->stored_bytes);
        cli_table_known_size(t, written_bytes(&at, l->times, c));
        cli_table_cell(t, "%s", cli_text_ratio(c->raw_bytes, c->stored_bytes).text);
        cli_table_cell(t, "%" PRIu32, c->depth);
        cli_table_cell(t, "%s", cli_text_time(c->created_ns).text);
        if (marked) {
            cli_marks_cell(t, &l->marks, c);
        }
        if (verbose) {
            print_verbose_cells(t, c, &ids);
        }
    }
    cli_ids_free(&ids);
    return cli_table_print(t, err);
}

static ckd_status run(const arguments *a, ckd_error *err) {
    ckd_store *store = NULL;
    listing l = {.one_run = a->run != NULL};
    ckd_status status = cli_open_store(&store, &a->common, CKD_OPEN_READ, err);
    THEN(status, cli_check_run(store, a->run, err));
    THEN(status, ckd_store_list(&l.all, store, NULL, err));
    l.list = l.all; /* read only once, because there may be 100,000 of them */
    if (a->run) {
        THEN(status, ckd_store_list(&l.list, store, a->run, err));
    }
    if (cli_prints_text(&a->common)) {
        THEN(status, ckd_store_timeline(&l.times, store, a->run, err));
    }
    THEN(status, cli_marks_read(&l.marks, store, err));
    if (status == CKD_OK && a->common.json) {
        status = print_json(store, &l, err);
    } else if (status == CKD_OK && cli_prints_text(&a->common)) {
        status = print_text(&l, a->common.verbose > 0, err);
    }
    cli_marks_free(&l.marks);
    ckd_timeline_free(l.times);
    if (l.list != l.all) {
        ckd_checkpoint_list_free(l.list);
    }
    ckd_checkpoint_list_free(l.all);
    ckd_store_close(store);
    return status;
}

int cmd_list(int argc, char **argv) {
    static const struct argp_child children[] = {{&cli_common_argp, 0, 0, 0}, {0}};
    static const struct argp argp = {options_table, parse, "[STORE] [RUN]", doc, children, 0, 0};
    arguments a = {.common.command = "list"};
    cli_parse_arguments(&argp, argc, argv, &a);
    ckd_error err;
    return run(&a, &err) == CKD_OK ? CLI_DONE : cli_fail(&err);
}
