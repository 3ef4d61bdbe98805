/* ckptdelta repair: rebuilds lost and damaged files from parity. */
#include <inttypes.h>
#include <stdio.h>

#include "cli/commands/commands.h"
#include "cli/commands/damage.h"
#include "cli/output/output.h"

enum { OPT_PURGE = 0x200, OPT_RATE, OPT_MANIFEST };

static const struct argp_option options_table[] = {
    {"dry-run", 'n', 0, 0, "Change nothing; show what could be repaired, and what could not", 1},
    {"manifest", OPT_MANIFEST, "RUN@STEP", 0,
     "Also restore this checkpoint, which has lost its manifest or was deleted; a message of verify names it",
     1},
    {"purge", OPT_PURGE, 0, 0, "Also remove the damaged files that repairs have put aside (data/q)", 1},
    {"rate", OPT_RATE, "SIZE", 0, "Read at most this much per second, such as 20M [default: no limit]", 1},
    {0},
};

static const char doc[] =
    "Read the whole store, and rebuild lost and damaged files from parity (ckptdelta parity), bit for bit. A file is rebuilt beside the damaged one, checked down to each record, and made durable before it takes its name; the damaged one is put aside. Training may save meanwhile. What cannot be repaired is reported with the checkpoints that cannot be loaded because of it: exit status 4."
    "\vExamples:\n"
    "  ckptdelta repair ckpts --dry-run\n"
    "  ckptdelta repair ckpts\n"
    "  ckptdelta repair ckpts --purge\n";

typedef struct arguments {
    cli_options common;
    ckd_repair_options repair;
    cli_ref manifest;
} arguments;

static error_t parse(int key, char *arg, struct argp_state *state) {
    arguments *a = state->input;
    switch (key) {
    case ARGP_KEY_INIT:
        state->child_inputs[0] = &a->common;
        return 0;
    case 'n':
        a->repair.dry_run = 1;
        return 0;
    case OPT_MANIFEST:
        if (!cli_parse_ref(&a->manifest, arg) || !a->manifest.run[0] || a->manifest.step == CKD_LATEST) {
            argp_error(state, "--manifest is RUN@STEP, for example gpt@100, not '%s'", arg);
        }
        a->repair.manifest_run = a->manifest.run;
        a->repair.manifest_step = a->manifest.step;
        return 0;
    case OPT_PURGE:
        a->repair.purge = 1;
        return 0;
    case OPT_RATE:
        a->repair.bytes_per_s = cli_rate(state, arg);
        return 0;
    case ARGP_KEY_END:
        if (a->repair.dry_run && a->repair.purge) {
            argp_error(state, "--dry-run changes nothing, --purge removes files; choose one");
        }
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static json_t *json_repaired(const ckd_repair_result *r) {
    json_t *out = json_array();
    for (size_t i = 0; i < r->repaired_count; i++) {
        const ckd_repaired *x = &r->repaired[i];
        cli_json_append(&out, json_pack("{s:o, s:o, s:o, s:I}", "file", cli_json_text(x->file), "what",
                                        cli_json_text(x->what), "aside",
                                        x->aside[0] ? cli_json_text(x->aside) : json_null(), "bytes",
                                        (json_int_t)x->bytes));
    }
    return out;
}

static ckd_status print_json(const ckd_repair_result *r, const cli_survivors *left, const arguments *a,
                             ckd_error *err) {
    return cli_json_print(json_pack("{s:i, s:b, s:b, s:I, s:I, s:o, s:o, s:o, s:I, s:I}", "schema", 1, "ok",
                                    r->left->damage_count == 0, "dry_run", a->repair.dry_run, "files",
                                    (json_int_t)r->left->files, "bytes", (json_int_t)r->left->bytes,
                                    "repaired", json_repaired(r), "damage", cli_json_damage(r->left),
                                    "newest_intact", cli_json_newest(left), "purged_files",
                                    (json_int_t)r->purged_files, "purged_bytes", (json_int_t)r->purged_bytes),
                          err);
}

static void print_repaired(const ckd_repaired *x, bool dry_run) {
    printf(dry_run ? "can be repaired: " : "repaired ");
    cli_print_clean(stdout, x->file);
    printf(", %s\n  ", cli_text_size(x->bytes).text);
    cli_print_clean(stdout, x->what);
    if (x->aside[0]) {
        fputs("\n  the file is now ", stdout);
        cli_print_clean(stdout, x->aside);
    }
    putchar('\n');
}

static void print_text(const ckd_repair_result *r, const cli_survivors *left, const arguments *a) {
    for (size_t i = 0; i < r->repaired_count; i++) {
        print_repaired(&r->repaired[i], a->repair.dry_run);
    }
    cli_print_damage(r->left, left, a->common.store);
    printf("read %" PRIu64 " chunk file%s, %s: %zu %s, %s\n", r->left->files, cli_plural(r->left->files),
           cli_text_size(r->left->bytes).text, r->repaired_count,
           a->repair.dry_run ? "can be repaired" : "repaired",
           r->left->damage_count ? "DAMAGE IS LEFT" : "no damage is left");
    if (r->purged_files) {
        printf("removed %" PRIu64 " damaged file%s that had been put aside, %s\n", r->purged_files,
               cli_plural(r->purged_files), cli_text_size(r->purged_bytes).text);
    }
}

static ckd_status repair(ckd_repair_result **out, const arguments *a, ckd_store *store, ckd_error *err) {
    ckd_repair_options options = a->repair;
    cli_progress progress;
    cli_interrupt_catch();
    cli_progress_begin(&progress, "repairing", a->common.quiet);
    options.on_progress = cli_progress_update;
    options.progress_context = &progress;
    ckd_status status = ckd_store_repair(out, store, &options, err);
    cli_progress_end(&progress);
    if (status == CKD_OK && !options.dry_run) {
        cli_committed("the repair is done");
    }
    if (status == CKD_OK) {
        cli_damage_found((*out)->left);
    }
    return status;
}

static ckd_status run(const arguments *a, ckd_error *err) {
    ckd_store *store = NULL;
    ckd_repair_result *result = NULL;
    cli_survivors left = {0};
    ckd_open_mode mode = a->repair.dry_run ? CKD_OPEN_READ : CKD_OPEN_WRITE;
    ckd_status status = cli_open_store(&store, &a->common, mode, err);
    THEN(status, repair(&result, a, store, err));
    THEN(status, cli_find_survivors(&left, result->left, store, err));
    if (status == CKD_OK && a->common.json) {
        status = print_json(result, &left, a, err);
    } else if (status == CKD_OK && cli_prints_text(&a->common)) {
        print_text(result, &left, a);
    }
    THEN(status, cli_damage_status(result->left, &left, err));
    cli_survivors_free(&left);
    ckd_repair_result_free(result);
    ckd_store_close(store);
    return status;
}

int cmd_repair(int argc, char **argv) {
    static const struct argp_child children[] = {{&cli_common_argp, 0, 0, 0}, {0}};
    static const struct argp argp = {options_table, parse, "[STORE]", doc, children, 0, 0};
    arguments a = {.common.command = "repair", .repair = CKD_REPAIR_OPTIONS_INIT};
    cli_parse_arguments(&argp, argc, argv, &a);
    ckd_error err;
    return run(&a, &err) == CKD_OK ? CLI_DONE : cli_fail(&err);
}
