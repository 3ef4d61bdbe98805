/* ckptdelta delete: deletes the named checkpoints. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "cli/commands/commands.h"
#include "cli/output/output.h"

enum { OPT_UNDO = 0x200 };

static const struct argp_option options_table[] = {
    {"dry-run", 'n', 0, 0, "Delete nothing; check whether all of them may go, and show their size", 1},
    {"undo", OPT_UNDO, "TIME", 0,
     "How long the deletion can be undone: 90m, 36h, 7d; 0s: not at all [default: 24h]", 1},
    {0},
};

static const char doc[] =
    "Delete checkpoints. Others that are deltas on them load as before. A pinned or tagged checkpoint must lose its pin or tag first: ckptdelta help pin, ckptdelta help tag. Deleted checkpoints stay in the trash until their time is over: ckptdelta help trash. To delete by rules: ckptdelta help prune."
    "\vExamples:\n"
    "  ckptdelta delete ckpts gpt@300\n"
    "  ckptdelta delete ckpts gpt@200 gpt@300 --undo 7d\n"
    "  ckptdelta delete ckpts gpt@200 gpt@300 --dry-run\n";

typedef struct arguments {
    cli_options common;
    cli_refs refs;
    ckd_delete_options deletion;
} arguments;

/* `latest` is refused: repeating the command would delete another checkpoint each time. */
static error_t take_ref(arguments *a, const char *arg, struct argp_state *state) {
    error_t failed = cli_refs_add_any(&a->refs, arg, state);
    if (!failed && !a->refs.items[a->refs.count - 1].tag[0] &&
        a->refs.items[a->refs.count - 1].step == CKD_LATEST) {
        argp_error(
            state,
            "'latest' would delete another checkpoint each time; name the step, as in gpt@100, not '%s'",
            arg);
    }
    return failed;
}

static error_t parse(int key, char *arg, struct argp_state *state) {
    arguments *a = state->input;
    switch (key) {
    case ARGP_KEY_INIT:
        state->child_inputs[0] = &a->common;
        return 0;
    case OPT_UNDO:
        a->deletion.undo_s = cli_seconds(state, "--undo", arg);
        return 0;
    case 'n':
        a->deletion.dry_run = 1;
        return 0;
    case ARGP_KEY_ARG:
        return cli_take_store(&a->common, arg) ? 0 : take_ref(a, arg, state);
    case ARGP_KEY_END:
        if (!a->refs.count) {
            argp_error(state, "name the checkpoints to delete, as in gpt@100");
        }
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

typedef struct deletion {
    uint64_t bytes;
    cli_undo undo;
} deletion;

static ckd_status find_one(ckd_id *ids, size_t at, deletion *d, const arguments *a, ckd_store *store,
                           ckd_error *err) {
    ckd_checkpoint found;
    ckd_status status = cli_find_ref(&found, store, &a->refs.items[at], NULL, err);
    for (size_t i = 0; i < at && status == CKD_OK; i++) {
        if (cli_has_id(&found, &ids[i])) {
            status = cli_error(err, CKD_E_INVALID, "%s is named twice", cli_ref_text_of(&found).text);
        }
    }
    if (status == CKD_OK) {
        ids[at] = found.id;
        d->bytes += found.stored_bytes;
        cli_undo_add(&d->undo, &found);
    }
    return status;
}

static ckd_status delete_named(deletion *d, const arguments *a, ckd_store *store, ckd_error *err) {
    ckd_id *ids = calloc(a->refs.count, sizeof(*ids));
    ckd_status status = ids ? CKD_OK : cli_error_nomem(err);
    for (size_t i = 0; i < a->refs.count && status == CKD_OK; i++) {
        status = find_one(ids, i, d, a, store, err);
    }
    THEN(status, ckd_store_delete(store, ids, a->refs.count, &a->deletion, err));
    free(ids);
    return status;
}

static ckd_status print_result(const arguments *a, const deletion *d, ckd_error *err) {
    bool dry_run = a->deletion.dry_run;
    if (a->common.json) {
        return cli_json_print(json_pack("{s:i, s:b, s:I, s:I}", "schema", 1, "dry_run", dry_run, "deleted",
                                        (json_int_t)a->refs.count, "bytes", (json_int_t)d->bytes),
                              err);
    }
    if (cli_prints_text(&a->common)) {
        printf("%s %zu checkpoint%s, %s\n", dry_run ? "would delete" : "deleted", a->refs.count,
               cli_plural(a->refs.count), cli_text_size(d->bytes).text);
        if (a->deletion.undo_s && !dry_run) {
            cli_undo_print(&d->undo, a->common.store, a->deletion.undo_s);
        }
    }
    return CKD_OK;
}

static ckd_status run(arguments *a, ckd_error *err) {
    ckd_store *store = NULL;
    deletion d = {0};
    a->common.keeps_trash = a->deletion.dry_run;
    ckd_status status = cli_open_store(&store, &a->common, CKD_OPEN_WRITE, err);
    THEN(status, delete_named(&d, a, store, err));
    if (status == CKD_OK) {
        if (!a->deletion.dry_run) {
            cli_finish_deletion(store, a->deletion.undo_s == 0);
        }
        status = print_result(a, &d, err);
    }
    ckd_store_close(store);
    return status;
}

int cmd_delete(int argc, char **argv) {
    static const struct argp_child children[] = {{&cli_common_argp, 0, 0, 0}, {0}};
    static const struct argp argp = {options_table, parse, "[STORE] RUN@STEP...", doc, children, 0, 0};
    arguments a = {.common.command = "delete", .deletion = CKD_DELETE_OPTIONS_INIT};
    cli_parse_arguments(&argp, argc, argv, &a);
    ckd_error err;
    int code = run(&a, &err) == CKD_OK ? CLI_DONE : cli_fail(&err);
    free(a.refs.items);
    return code;
}
