/*
 * ckptdelta parity: makes parity files, from which lost or damaged chunk files are rebuilt, and shows what they cover.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "cli/commands/commands.h"
#include "cli/commands/damage.h"
#include "cli/output/output.h"

enum { OPT_GROUP = 0x200, OPT_STATUS, OPT_OFF, OPT_RATE };

static const struct argp_option options_table[] = {
    {"group", OPT_GROUP, "K+M", 0,
     "M parity files for each K chunk files, such as 8+1: any M of these files may be lost. The store records it for later calls",
     1},
    {"run", 'r', "RUN", 0,
     "Only files of this run; --group and --off then apply to this run only [default: all runs]", 1},
    {"off", OPT_OFF, 0, 0, "Make no parity from now on, and remove existing parity", 2},
    {"status", OPT_STATUS, 0, 0, "Make nothing; show what is covered", 2},
    {"rate", OPT_RATE, "SIZE", 0, "Read at most this much per second, such as 20M [default: no limit]", 3},
    {"dry-run", 'n', 0, 0, "Make nothing; show what would be made", 3},
    {0},
};

static const char doc[] =
    "Make parity: files from which ckptdelta repair rebuilds lost and damaged chunk files, bit for bit. Files that are not covered yet are read and covered, group by group. It can be stopped at any time, and the next call continues. It can run while training saves, and is meant to run every night: it covers what was saved since, and leaves out deleted files before they are removed. --status also shows how many losses the existing parity can still repair; ckptdelta verify reads it. Exit status 4 if damage is found; damaged files are not covered."
    "\vExamples:\n"
    "  ckptdelta parity ckpts --group 8+1\n"
    "  ckptdelta parity ckpts --rate 50M\n"
    "  ckptdelta parity ckpts --group 4+2 --run tuned\n"
    "  ckptdelta parity ckpts --status\n";

typedef struct arguments {
    cli_options common;
    ckd_parity_options parity;
    bool status;
} arguments;

static void parse_group(arguments *a, const char *arg, struct argp_state *state) {
    if (!cli_parse_group(&a->parity.data, &a->parity.parity, arg) || a->parity.data > CKD_PARITY_DATA_MAX ||
        a->parity.parity > CKD_PARITY_MAX) {
        argp_error(state, "--group is K+M, 1 to %d files and 1 to %d of parity, such as 8+1, not '%s'",
                   CKD_PARITY_DATA_MAX, CKD_PARITY_MAX, arg);
    }
}

static error_t parse(int key, char *arg, struct argp_state *state) {
    arguments *a = state->input;
    switch (key) {
    case ARGP_KEY_INIT:
        state->child_inputs[0] = &a->common;
        return 0;
    case OPT_GROUP:
        parse_group(a, arg, state);
        return 0;
    case 'r':
        a->parity.run = arg;
        return 0;
    case OPT_STATUS:
        a->status = true;
        return 0;
    case OPT_OFF:
        a->parity.off = 1;
        return 0;
    case 'n':
        a->parity.dry_run = 1;
        return 0;
    case OPT_RATE:
        a->parity.bytes_per_s = cli_rate(state, arg);
        return 0;
    case ARGP_KEY_END:
        if ((a->parity.off != 0) + (a->parity.data != 0) + a->status > 1) {
            argp_error(state, "choose one of --group, --off and --status");
        }
        if (a->status && (a->parity.dry_run || a->parity.run)) {
            argp_error(state, "--status shows all of the store, and makes nothing");
        }
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

/* ------------------------------------------------------------------------------------------------------ status */

static json_t *json_settings(const ckd_parity_status *s) {
    json_t *out = json_array();
    for (size_t i = 0; i < s->setting_count; i++) {
        const ckd_parity_setting *x = &s->settings[i];
        cli_json_append(&out, json_pack("{s:o, s:b, s:I, s:I}", "run",
                                        x->run[0] ? json_string(x->run) : json_null(), "readable",
                                        x->status == CKD_OK, "data", (json_int_t)x->data, "parity",
                                        (json_int_t)x->parity));
    }
    return out;
}

static ckd_status print_status_json(const ckd_parity_status *s, ckd_error *err) {
    return cli_json_print(json_pack("{s:i, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:o}", "schema",
                                    1, "groups", (json_int_t)s->groups, "parity_files",
                                    (json_int_t)s->parity_files, "parity_bytes", (json_int_t)s->parity_bytes,
                                    "weak_groups", (json_int_t)s->weak_groups, "spent_groups",
                                    (json_int_t)s->spent_groups, "unreadable", (json_int_t)s->unreadable,
                                    "files", (json_int_t)s->files, "file_bytes", (json_int_t)s->file_bytes,
                                    "covered_files", (json_int_t)s->covered_files, "covered_bytes",
                                    (json_int_t)s->covered_bytes, "settings", json_settings(s)),
                          err);
}

static void print_setting(const ckd_parity_setting *s) {
    printf("%s%s: ", s->run[0] ? "run " : "every run", s->run[0] ? s->run : "");
    if (s->status != CKD_OK) {
        puts("the setting cannot be read; --group replaces it");
    } else if (!s->data) {
        puts("no parity");
    } else {
        printf("groups of %" PRIu32 "+%" PRIu32 "\n", s->data, s->parity);
    }
}

static void print_status(const ckd_parity_status *s) {
    for (size_t i = 0; i < s->setting_count; i++) {
        print_setting(&s->settings[i]);
    }
    if (!s->setting_count) {
        puts("the store has no parity setting; --group sets one");
    }
    printf("%" PRIu64 " of %" PRIu64 " chunk files are covered, %s of %s, by %s of parity in %" PRIu64
           " groups\n",
           s->covered_files, s->files, cli_text_size(s->covered_bytes).text,
           cli_text_size(s->file_bytes).text, cli_text_size(s->parity_bytes).text, s->groups);
    if (s->weak_groups) {
        printf(
            "%" PRIu64 " groups have lost files, %" PRIu64
            " of them can repair no further loss: ckptdelta repair rebuilds missing files, ckptdelta parity replaces groups that lost files to a deletion\n",
            s->weak_groups, s->spent_groups);
    }
    if (s->unreadable) {
        printf("%" PRIu64 " parity files cannot be read: ckptdelta repair rebuilds or removes them\n",
               s->unreadable);
    }
}

static ckd_status show_status(const arguments *a, ckd_error *err) {
    ckd_store *store = NULL;
    ckd_parity_status *s = NULL;
    ckd_status status = cli_open_store(&store, &a->common, CKD_OPEN_READ, err);
    THEN(status, ckd_store_parity_status(&s, store, err));
    if (status == CKD_OK && a->common.json) {
        status = print_status_json(s, err);
    } else if (status == CKD_OK && cli_prints_text(&a->common)) {
        print_status(s);
    }
    ckd_parity_status_free(s);
    ckd_store_close(store);
    return status;
}

/* ------------------------------------------------------------------------------------------------------ making */

static ckd_status print_json(const ckd_parity_result *r, const cli_survivors *left, const arguments *a,
                             ckd_error *err) {
    return cli_json_print(json_pack("{s:i, s:b, s:b, s:I, s:I, s:I, s:I, s:I, s:I, s:o, s:o}", "schema", 1,
                                    "ok", r->found->damage_count == 0, "dry_run", a->parity.dry_run, "groups",
                                    (json_int_t)r->groups, "files", (json_int_t)r->files, "file_bytes",
                                    (json_int_t)r->file_bytes, "parity_bytes", (json_int_t)r->parity_bytes,
                                    "removed_groups", (json_int_t)r->removed_groups, "removed_bytes",
                                    (json_int_t)r->removed_bytes, "damage", cli_json_damage(r->found),
                                    "newest_intact", cli_json_newest(left)),
                          err);
}

static void print_made(const ckd_parity_result *r, bool would) {
    printf("%s %" PRIu64 " groups of %" PRIu64 " chunk files, %s: parity takes %s, %.1f %%\n",
           would ? "would make" : "made", r->groups, r->files, cli_text_size(r->file_bytes).text,
           cli_text_size(r->parity_bytes).text, 100 * (double)r->parity_bytes / (double)r->file_bytes);
}

/*
 * Called if no group was made. A file may nevertheless lack parity: it is missing or damaged, or its run must have no
 * parity.
 */
static ckd_status print_covered(ckd_store *store, ckd_error *err) {
    ckd_parity_status *s;
    ckd_status status = ckd_store_parity_status(&s, store, err);
    if (status == CKD_OK && s->covered_files == s->files) {
        puts("everything is covered");
    } else if (status == CKD_OK) {
        printf("no group is to be made; %" PRIu64 " of %" PRIu64 " chunk files are covered\n",
               s->covered_files, s->files);
    }
    ckd_parity_status_free(s);
    return status;
}

static ckd_status print_text(const ckd_parity_result *r, const cli_survivors *left, const arguments *a,
                             ckd_store *store, ckd_error *err) {
    ckd_status status = CKD_OK;
    cli_print_damage(r->found, left, a->common.store);
    if (r->groups) {
        print_made(r, a->parity.dry_run);
    } else if (a->parity.off) {
        puts("no parity is made from now on");
    } else {
        status = print_covered(store, err);
    }
    if (r->removed_groups) {
        printf("removed %" PRIu64 " obsolete groups, %s\n", r->removed_groups,
               cli_text_size(r->removed_bytes).text);
    }
    return status;
}

static ckd_status make(ckd_parity_result **out, const arguments *a, ckd_store *store, ckd_error *err) {
    ckd_parity_options options = a->parity;
    cli_progress progress;
    cli_interrupt_catch();
    cli_progress_begin(&progress, "making parity", a->common.quiet);
    options.on_progress = cli_progress_update;
    options.progress_context = &progress;
    ckd_status status = ckd_store_parity(out, store, &options, err);
    cli_progress_end(&progress);
    if (status == CKD_OK && !options.dry_run) {
        cli_committed("parity is made");
    }
    if (status == CKD_OK) {
        cli_damage_found((*out)->found);
    }
    return status;
}

static ckd_status run(arguments *a, ckd_error *err) {
    ckd_store *store = NULL;
    ckd_parity_result *result = NULL;
    cli_survivors left = {0};
    a->common.keeps_trash = a->parity.dry_run;
    ckd_status status = cli_open_store(&store, &a->common, CKD_OPEN_WRITE, err);
    THEN(status, make(&result, a, store, err));
    THEN(status, cli_find_survivors(&left, result->found, store, err));
    if (status == CKD_OK && a->common.json) {
        status = print_json(result, &left, a, err);
    } else if (status == CKD_OK && cli_prints_text(&a->common)) {
        status = print_text(result, &left, a, store, err);
    }
    THEN(status, cli_damage_status(result->found, &left, err));
    cli_survivors_free(&left);
    ckd_parity_result_free(result);
    ckd_store_close(store);
    return status;
}

int cmd_parity(int argc, char **argv) {
    static const struct argp_child children[] = {{&cli_common_argp, 0, 0, 0}, {0}};
    static const struct argp argp = {options_table, parse, "[STORE]", doc, children, 0, 0};
    arguments a = {.common.command = "parity", .parity = CKD_PARITY_OPTIONS_INIT};
    cli_parse_arguments(&argp, argc, argv, &a);
    ckd_error err;
    ckd_status status = a.status ? show_status(&a, &err) : run(&a, &err);
    return status == CKD_OK ? CLI_DONE : cli_fail(&err);
}
