/* ckptdelta rename: gives a run another name. */
#include <inttypes.h>
#include <stdio.h>

#include "cli/commands/commands.h"
#include "cli/output/output.h"

static const struct argp_option options_table[] = {
    {"dry-run", 'n', 0, 0, "Rename nothing; show what would be renamed", 1},
    {0},
};

static const char doc[] =
    "Rename the run OLD to NEW: all its checkpoints, and its own policy and parity setting. Ids, steps, tags and pins "
    "stay, and no data is copied. Deleted checkpoints in the trash keep the old name. The old name is then free: a "
    "save under it begins a new run, so change the name in the training job, too."
    "\vExamples:\n"
    "  ckptdelta rename ckpts gpt gpt-baseline\n"
    "  ckptdelta rename ckpts gpt gpt-baseline --dry-run\n";

typedef struct arguments {
    cli_options common;
    const char *from, *to;
    ckd_rename_options options;
} arguments;

static error_t parse(int key, char *arg, struct argp_state *state) {
    arguments *a = state->input;
    switch (key) {
    case ARGP_KEY_INIT:
        state->child_inputs[0] = &a->common;
        return 0;
    case 'n':
        a->options.dry_run = true;
        return 0;
    case ARGP_KEY_ARG:
        if (cli_take_store(&a->common, arg)) {
            return 0;
        }
        if (a->to) {
            argp_error(state, "rename takes two names, OLD and NEW; '%s' is one too many", arg);
        }
        *(a->from ? &a->to : &a->from) = arg;
        return 0;
    case ARGP_KEY_END:
        if (!a->to) {
            argp_error(state, "name the run and its new name, as in: gpt gpt-baseline");
        }
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static ckd_status print_result(const arguments *a, uint64_t count, ckd_error *err) {
    bool dry_run = a->options.dry_run;
    if (a->common.json) {
        return cli_json_print(json_pack("{s:i, s:b, s:o, s:o, s:I}", "schema", 1, "dry_run", dry_run, "from",
                                        cli_json_text(a->from), "to", cli_json_text(a->to), "checkpoints",
                                        (json_int_t)count),
                              err);
    }
    if (cli_prints_text(&a->common)) {
        printf("%s %s to %s: %" PRIu64 " checkpoint%s\n", dry_run ? "would rename" : "renamed", a->from,
               a->to, count, cli_plural(count));
    }
    return CKD_OK;
}

static ckd_status run(arguments *a, ckd_error *err) {
    ckd_store *store = NULL;
    uint64_t count = 0;
    a->common.keeps_trash = a->options.dry_run;
    ckd_status status = cli_open_store(&store, &a->common, CKD_OPEN_WRITE, err);
    THEN(status, ckd_store_rename_run(&count, store, a->from, a->to, &a->options, err));
    if (status == CKD_OK) {
        if (!a->options.dry_run) {
            cli_committed("%s is renamed to %s", a->from, a->to);
        }
        status = print_result(a, count, err);
    }
    ckd_store_close(store);
    return status;
}

int cmd_rename(int argc, char **argv) {
    static const struct argp_child children[] = {{&cli_common_argp, 0, 0, 0}, {0}};
    static const struct argp argp = {options_table, parse, "[STORE] OLD NEW", doc, children, 0, 0};
    arguments a = {.common.command = "rename", .options = CKD_RENAME_OPTIONS_INIT};
    cli_parse_arguments(&argp, argc, argv, &a);
    ckd_error err;
    return run(&a, &err) == CKD_OK ? CLI_DONE : cli_fail(&err);
}
