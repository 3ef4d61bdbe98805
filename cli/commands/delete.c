/* ckptdelta delete: deletes the named checkpoints. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "cli/commands/commands.h"
#include "cli/output/output.h"

enum { OPT_UNDO = 0x200 };

static const struct argp_option options_table[] = {
    {"undo", OPT_UNDO, "TIME", 0,
     "How long the deletion can be undone: 90m, 36h, 7d; 0s: not at all [default: 24h]", 1},
    {0},
};

static const char doc[] =
    "Delete checkpoints. Others that are deltas on them load as before. A pinned or tagged checkpoint must lose its pin or tag first: ckptdelta help pin, ckptdelta help tag. Deleted checkpoints stay in the trash until their time is over: ckptdelta help trash. To delete by rules: ckptdelta help prune."
    "\vExamples:\n"
    "  ckptdelta delete ckpts gpt@300\n"
    "  ckptdelta delete ckpts gpt@200 gpt@300 --undo 7d\n";

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

static ckd_status delete_named(const arguments *a, ckd_store *store, uint64_t *bytes, ckd_error *err) {
    ckd_id *ids = calloc(a->refs.count, sizeof(*ids));
    ckd_status status = ids ? CKD_OK : cli_error_nomem(err);
    for (size_t i = 0; i < a->refs.count && status == CKD_OK; i++) {
        ckd_checkpoint found;
        status = cli_find_ref(&found, store, &a->refs.items[i], NULL, err);
        if (status == CKD_OK) {
            ids[i] = found.id;
            *bytes += found.stored_bytes;
        }
    }
    THEN(status, ckd_store_delete(store, ids, a->refs.count, &a->deletion, err));
    free(ids);
    return status;
}

static ckd_status print_result(const arguments *a, uint64_t bytes, ckd_error *err) {
    if (a->common.json) {
        return cli_json_print(json_pack("{s:i, s:I, s:I}", "schema", 1, "deleted", (json_int_t)a->refs.count,
                                        "bytes", (json_int_t)bytes),
                              err);
    }
    if (cli_prints_text(&a->common)) {
        printf("deleted %zu checkpoint%s, %s\n", a->refs.count, a->refs.count == 1 ? "" : "s",
               cli_text_size(bytes).text);
        if (a->deletion.undo_s) {
            printf("to undo this within %s: ckptdelta trash %s --restore\n",
                   cli_text_duration((double)a->deletion.undo_s).text, a->common.store);
        }
    }
    return CKD_OK;
}

static ckd_status run(const arguments *a, ckd_error *err) {
    ckd_store *store = NULL;
    uint64_t bytes = 0;
    ckd_status status = cli_open_store(&store, &a->common, CKD_OPEN_WRITE, err);
    THEN(status, delete_named(a, store, &bytes, err));
    if (status == CKD_OK) {
        cli_finish_deletion(store, a->deletion.undo_s == 0);
        status = print_result(a, bytes, err);
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
