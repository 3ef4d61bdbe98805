/* ckptdelta report: what a store holds, how much space it takes, how it grows, and what it costs. */
#include <stdio.h>

#include "cli/commands/commands.h"
#include "cli/output/output.h"
#include "cli/report/report.h"

enum { OPT_CSV = 0x200, OPT_HTML, OPT_PRICES, OPT_UNTIL };

static const struct argp_option options_table[] = {
    {"csv", OPT_CSV, 0, 0, "Print one CSV table instead of text", -2},
    {"html", OPT_HTML, "FILE", 0,
     "Also write a self-contained page with charts; replaces FILE if it is such a page", -2},
    {"prices", OPT_PRICES, "FILE", 0, "Show what it costs, by this price table (docs/cli.md)", 3},
    {"until", OPT_UNTIL, "STEP", 0,
     "Project the sizes at this step, assuming that runs continue as their newest checkpoints do", 3},
    {0},
};

static const char doc[] =
    "Report how many bytes the checkpoints of a store would take as full copies (logical), and how many the store takes (stored: all of its files, catalog and manifests included): by run and its growth, by role, by fidelity; with -v also by time, tensor and checkpoint. With --keep-...: what `prune` would free. Changes nothing."
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
    report_question question;
    const char *html;
    bool csv;
} arguments;

static error_t parse(int key, char *arg, struct argp_state *state) {
    arguments *a = state->input;
    switch (key) {
    case ARGP_KEY_INIT:
        state->child_inputs[0] = &a->common;
        state->child_inputs[1] = &a->question.policy;
        return 0;
    case OPT_CSV:
        a->csv = true;
        return 0;
    case OPT_HTML:
        a->html = arg;
        return 0;
    case OPT_PRICES:
        a->question.prices = arg;
        return 0;
    case OPT_UNTIL:
        if (!cli_parse_u64(&a->question.until, arg) || a->question.until > INT64_MAX) {
            argp_error(state, "--until is a step, not '%s'", arg);
        }
        a->question.project = true;
        return 0;
    case ARGP_KEY_END:
        a->question.prune = cli_policy_given(&a->question.policy, state);
        if (a->csv && a->common.json) {
            argp_error(state, "--csv and --json are two forms of the same; choose one");
        }
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static ckd_status print(const arguments *a, const report_data *d, ckd_error *err) {
    if (a->common.json) {
        return report_print_json(d, err);
    }
    if (a->csv) {
        report_print_csv(d);
        return CKD_OK;
    }
    return a->common.quiet ? CKD_OK : report_print_text(d, a->question.project, a->common.verbose > 0, err);
}

static ckd_status run(arguments *a, ckd_error *err) {
    ckd_store *store = NULL;
    report_data data = {0};
    a->question.store = a->common.store;
    ckd_status status = a->html ? report_check_html(a->html, err) : CKD_OK;
    THEN(status, cli_open_store(&store, &a->common, CKD_OPEN_READ, err));
    THEN(status, report_data_make(&data, &a->question, store, err));
    if (status == CKD_OK && a->html) {
        status = report_write_html(&data, a->html, err);
    }
    THEN(status, print(a, &data, err));
    report_data_free(&data);
    ckd_store_close(store);
    return status;
}

int cmd_report(int argc, char **argv) {
    static const struct argp_child children[] = {
        {&cli_common_argp, 0, 0, 0}, {&cli_policy_argp, 0, 0, 0}, {0}};
    static const struct argp argp = {options_table, parse, "[STORE]", doc, children, 0, 0};
    arguments a = {.common.command = "report", .question.policy = CKD_POLICY_INIT};
    cli_parse_arguments(&argp, argc, argv, &a);
    ckd_error err;
    return run(&a, &err) == CKD_OK ? CLI_DONE : cli_fail(&err);
}
