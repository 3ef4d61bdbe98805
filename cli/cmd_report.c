/* ckptdelta report: how much a store holds, and how much it takes. */
#include <inttypes.h>
#include <stdio.h>

#include "cli/commands.h"
#include "cli/json_out.h"
#include "cli/options.h"
#include "cli/table.h"
#include "cli/text.h"

static const char doc[] =
    "Tell how many bytes the checkpoints of a store would take as full copies (logical), how many the store takes (stored: "
    "all of its files, catalog and manifests included), by run and by role; with -v by checkpoint, too."
    "\vExamples:\n"
    "  ckptdelta report ckpts\n"
    "  ckptdelta report ckpts --json\n";

static error_t parse(int key, char *arg, struct argp_state *state) {
    (void)arg;
    if (key != ARGP_KEY_INIT) {
        return ARGP_ERR_UNKNOWN;
    }
    state->child_inputs[0] = state->input;
    return 0;
}

static json_t *json_usage(const ckd_usage *items, size_t count, const char *key) {
    json_t *array = json_array();
    for (size_t i = 0; i < count; i++) {
        const ckd_usage *u = &items[i];
        cli_json_append(&array,
                        json_pack("{s:o, s:I, s:I, s:I, s:o}", key, cli_json_text(u->name), "checkpoints",
                                  (json_int_t)u->checkpoints, "raw_bytes", (json_int_t)u->raw_bytes,
                                  "stored_bytes", (json_int_t)u->stored_bytes, "ratio",
                                  cli_json_ratio(u->raw_bytes, u->stored_bytes)));
    }
    return array;
}

static ckd_status print_json(const ckd_report *r, ckd_error *err) {
    ckd_checkpoint_list all = {r->checkpoint_count, r->by_checkpoint};
    json_t *by_checkpoint = json_array();
    for (size_t i = 0; i < r->checkpoint_count; i++) {
        cli_json_append(&by_checkpoint, cli_json_checkpoint(&r->by_checkpoint[i], &all));
    }
    return cli_json_print(
        json_pack("{s:i, s:I, s:I, s:I, s:o, s:I, s:I, s:I, s:I, s:I, s:o, s:o, s:o}", "schema", 1,
                  "checkpoints", (json_int_t)r->checkpoint_count, "raw_bytes", (json_int_t)r->raw_bytes,
                  "stored_bytes", (json_int_t)r->stored_bytes, "ratio",
                  cli_json_ratio(r->raw_bytes, r->stored_bytes), "chunk_bytes", (json_int_t)r->chunk_bytes,
                  "manifest_bytes", (json_int_t)r->manifest_bytes, "catalog_bytes",
                  (json_int_t)r->catalog_bytes, "ready_bytes", (json_int_t)r->ready_bytes, "other_bytes",
                  (json_int_t)r->other_bytes, "by_run", json_usage(r->by_run, r->run_count, "run"), "by_role",
                  json_usage(r->by_role, r->role_count, "role"), "by_checkpoint", by_checkpoint),
        err);
}

static ckd_status print_usage(const ckd_usage *items, size_t count, const char *columns, ckd_error *err) {
    cli_table *t = cli_table_new(columns);
    for (size_t i = 0; i < count; i++) {
        cli_table_cell(t, "%s", items[i].name);
        cli_table_cell(t, "%" PRIu64, items[i].checkpoints);
        cli_table_cell(t, "%s", cli_text_size(items[i].raw_bytes).text);
        cli_table_cell(t, "%s", cli_text_size(items[i].stored_bytes).text);
        cli_table_cell(t, "%s", cli_text_ratio(items[i].raw_bytes, items[i].stored_bytes).text);
    }
    putchar('\n');
    return cli_table_print(t, err);
}

static ckd_status print_checkpoints(const ckd_report *r, ckd_error *err) {
    cli_table *t = cli_table_new("CHECKPOINT|KIND|>LOGICAL|>STORED|>RATIO");
    for (size_t i = 0; i < r->checkpoint_count; i++) {
        const ckd_checkpoint *c = &r->by_checkpoint[i];
        cli_table_cell(t, "%s", cli_place_of(c).text);
        cli_table_cell(t, "%s", ckd_kind_name(c->kind));
        cli_table_cell(t, "%s", cli_text_size(c->raw_bytes).text);
        cli_table_cell(t, "%s", cli_text_size(c->stored_bytes).text);
        cli_table_cell(t, "%s", cli_text_ratio(c->raw_bytes, c->stored_bytes).text);
    }
    putchar('\n');
    return cli_table_print(t, err);
}

static ckd_status print_text(const ckd_report *r, bool verbose, ckd_error *err) {
    printf("%zu checkpoint%s: %s logical, %s stored, %s\n", r->checkpoint_count,
           r->checkpoint_count == 1 ? "" : "s", cli_text_size(r->raw_bytes).text,
           cli_text_size(r->stored_bytes).text, cli_text_ratio(r->raw_bytes, r->stored_bytes).text);
    printf("stored: %s chunk files, %s manifests, %s catalog, %s copies kept ready, %s other\n",
           cli_text_size(r->chunk_bytes).text, cli_text_size(r->manifest_bytes).text,
           cli_text_size(r->catalog_bytes).text, cli_text_size(r->ready_bytes).text,
           cli_text_size(r->other_bytes).text);
    ckd_status status = print_usage(r->by_run, r->run_count, "RUN|>CHECKPOINTS|>LOGICAL|>STORED|>RATIO", err);
    if (status == CKD_OK) {
        status = print_usage(r->by_role, r->role_count, "ROLE|>CHECKPOINTS|>LOGICAL|>STORED|>RATIO", err);
    }
    return status == CKD_OK && verbose ? print_checkpoints(r, err) : status;
}

static ckd_status run(const cli_options *options, ckd_error *err) {
    ckd_store *store = NULL;
    ckd_report *report = NULL;
    ckd_status status = cli_open_store(&store, options, CKD_OPEN_READ, err);
    if (status == CKD_OK) {
        status = ckd_store_report(&report, store, err);
    }
    if (status == CKD_OK && options->json) {
        status = print_json(report, err);
    } else if (status == CKD_OK && cli_talks(options)) {
        status = print_text(report, options->verbose > 0, err);
    }
    ckd_report_free(report);
    ckd_store_close(store);
    return status;
}

int cmd_report(int argc, char **argv) {
    static const struct argp_child children[] = {{&cli_common_argp, 0, 0, 0}, {0}};
    static const struct argp argp = {NULL, parse, "STORE", doc, children, 0, 0};
    cli_options options = {.command = "report"};
    argp_parse(&argp, argc, argv, 0, NULL, &options);
    ckd_error err;
    return run(&options, &err) == CKD_OK ? CLI_DONE : cli_fail(&err);
}
