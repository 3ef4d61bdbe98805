/* ckptdelta report: shows what a store holds, how much space it takes, how it grows, and what it costs. */
#include <stdio.h>
#include <string.h>

#include "cli/commands/commands.h"
#include "cli/files/files.h"
#include "cli/output/output.h"
#include "cli/report/report.h"

enum { OPT_CSV = 0x200, OPT_HTML, OPT_FORCE, OPT_PRICES, OPT_UNTIL };

static const struct argp_option options_table[] = {
    {"csv", OPT_CSV, 0, 0, "Print one CSV table instead of text", -2},
    {"html", OPT_HTML, "FILE", 0,
     "Write a self-contained page with charts instead of the tables; replaces FILE if it is such a page", -2},
    {"force", OPT_FORCE, 0, 0, "Replace FILE whatever it is", -2},
    {"prices", OPT_PRICES, "FILE", 0, "Show what it costs, by this price table (docs/cli.md)", 3},
    {"until", OPT_UNTIL, "STEP", 0,
     "Project the sizes at this step, assuming that runs continue as their newest checkpoints do", 3},
    {0},
};

static const char doc[] =
    "Report how many bytes the checkpoints of a store would take as full copies (logical), and how many the store takes (stored: all of its files, catalog and manifests included): by run and its growth, by role, by fidelity; with -v also by time, tensor and checkpoint. Also what attempts of `ckptdelta run` came to. With --keep-...: what `prune` would free. Changes nothing."
    "\v--keep-... and --until apply to each run separately; --run chooses one.\n"
    "\n"
    "Examples:\n"
    "  ckptdelta report ckpts\n"
    "  ckptdelta report ckpts --html report.html\n"
    "  ckptdelta report ckpts --keep-last 5 --keep-every 10000\n"
    "  ckptdelta report ckpts --prices prices.json --until 100000\n"
    "  ckptdelta report ckpts --csv > report.csv\n";

typedef struct arguments {
    cli_options common;
    report_query query;
    const char *html;
    bool csv, force;
} arguments;

static error_t parse(int key, char *arg, struct argp_state *state) {
    arguments *a = state->input;
    switch (key) {
    case ARGP_KEY_INIT:
        state->child_inputs[0] = &a->common;
        state->child_inputs[1] = &a->query.policy;
        return 0;
    case OPT_CSV:
        a->csv = true;
        return 0;
    case OPT_HTML:
        a->html = arg;
        a->query.details = true;
        return 0;
    case OPT_FORCE:
        a->force = true;
        return 0;
    case OPT_PRICES:
        a->query.prices = arg;
        return 0;
    case OPT_UNTIL:
        if (!cli_parse_u64(&a->query.until, arg) || a->query.until > INT64_MAX) {
            argp_error(state, "--until is a step, not '%s'", arg);
        }
        a->query.project = true;
        return 0;
    case ARGP_KEY_END:
        a->query.prune = cli_policy_given(&a->query.policy, state);
        if (a->csv && a->common.json) {
            argp_error(state, "--csv and --json are two forms of the same; choose one");
        }
        if (a->force && !a->html) {
            argp_error(state, "--force goes with --html");
        }
        if (a->html && strcmp(a->html, "-") == 0 && (a->csv || a->common.json)) {
            argp_error(state, "--html - takes standard output for itself");
        }
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static ckd_status print(const arguments *a, const report_data *d, ckd_error *err) {
    bool verbose = a->common.verbose > 0;
    if (a->common.json) {
        return report_print_json(d, err);
    }
    if (a->csv) {
        report_print_csv(d);
        return CKD_OK;
    }
    if (a->html && !verbose) {
        report_say_saved(stdout, d);
        return CKD_OK;
    }
    return report_print_text(d, a->query.project, verbose, err);
}

static ckd_status write_page(const arguments *a, const report_data *d, bool talks, ckd_error *err) {
    size_t size;
    char *page = report_html(d, &size, err);
    return page ? report_file_write(a->html, page, size, talks, err) : err->status;
}

static ckd_status run(arguments *a, ckd_error *err) {
    ckd_store *store = NULL;
    report_data data = {0};
    bool to_stdout = a->html && strcmp(a->html, "-") == 0;
    bool talks = !to_stdout && !a->common.json && !a->csv && !a->common.quiet;
    a->query.store = a->common.store;
    ckd_status status = a->html ? report_file_check(a->html, HTML_PAGE_MARK, a->force, err) : CKD_OK;
    THEN(status, a->html ? cli_output_check_outside(a->html, a->common.store, err) : CKD_OK);
    THEN(status, cli_open_store(&store, &a->common, CKD_OPEN_READ, err));
    THEN(status, report_data_make(&data, &a->query, store, err));
    if (status == CKD_OK && (talks || a->common.json || a->csv)) {
        status = print(a, &data, err);
    }
    if (status == CKD_OK && a->html) {
        status = write_page(a, &data, talks, err);
    }
    report_data_free(&data);
    ckd_store_close(store);
    return status;
}

int cmd_report(int argc, char **argv) {
    static const struct argp_child children[] = {
        {&cli_common_argp, 0, 0, 0}, {&cli_policy_argp, 0, 0, 0}, {0}};
    static const struct argp argp = {options_table, parse, "[STORE]", doc, children, 0, 0};
    arguments a = {.common.command = "report", .query.policy = CKD_POLICY_INIT};
    cli_parse_arguments(&argp, argc, argv, &a);
    ckd_error err;
    return run(&a, &err) == CKD_OK ? CLI_DONE : cli_fail(&err);
}
