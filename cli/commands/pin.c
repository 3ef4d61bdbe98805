/* ckptdelta pin: protects checkpoints from deletion. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/commands/commands.h"
#include "cli/output/output.h"

enum { OPT_REASON = 0x200, OPT_DELETE };

static const struct argp_option options_table[] = {
    {"reason", OPT_REASON, "TEXT", 0, "A note that says why", 1},
    {"delete", OPT_DELETE, 0, 0,
     "Remove the pins; the checkpoints stay. A checkpoint that no longer exists is named by its id", 1},
    {0},
};

static const char doc[] =
    "Pin checkpoints, each named as RUN@STEP, RUN@latest (the newest of the run) or @TAG. A pinned checkpoint cannot be deleted, by hand or by a policy, until it is unpinned. The data that it builds on stays with it. Without checkpoints: list the pins. Pins are files of the store and survive the loss of its catalog."
    "\vExamples:\n"
    "  ckptdelta pin ckpts gpt@1000 --reason 'published with the paper'\n"
    "  ckptdelta pin ckpts --delete gpt@1000\n"
    "  ckptdelta pin ckpts\n";

typedef struct arguments {
    cli_options common;
    cli_refs refs;
    ckd_id *ids; /* checkpoints given by id */
    size_t id_count;
    const char *reason;
    bool delete;
} arguments;

static void check(const arguments *a, struct argp_state *state) {
    if ((a->reason || a->delete) && !a->refs.count && !a->id_count) {
        argp_error(state, "name the checkpoints, as in gpt@100");
    }
    if (a->id_count && !a->delete) {
        argp_error(state, "an id goes with --delete; name checkpoints to pin as RUN@STEP");
    }
    if (a->reason && a->delete) {
        argp_error(state, "--reason goes with pinning, not with --delete");
    }
}

static bool parse_id(ckd_id *out, const char *text) {
    static const char digits[] = "0123456789abcdef";
    if (strlen(text) != CKD_ID_TEXT - 1 || strspn(text, digits) != CKD_ID_TEXT - 1) {
        return false;
    }
    for (size_t i = 0; i < sizeof(out->bytes); i++) {
        out->bytes[i] = (uint8_t)((strchr(digits, text[2 * i]) - digits) << 4 |
                                  (strchr(digits, text[2 * i + 1]) - digits));
    }
    return true;
}

static error_t parse_argument(arguments *a, char *arg, struct argp_state *state) {
    ckd_id id;
    if (cli_take_store(&a->common, arg)) {
        return 0;
    }
    if (!parse_id(&id, arg)) {
        return cli_refs_add_any(&a->refs, arg, state);
    }
    ckd_id *grown = realloc(a->ids, (a->id_count + 1) * sizeof(*grown));
    if (!grown) {
        argp_failure(state, CLI_FAILED, 0, "out of memory");
        return ENOMEM;
    }
    a->ids = grown;
    grown[a->id_count++] = id;
    return 0;
}

static error_t parse(int key, char *arg, struct argp_state *state) {
    arguments *a = state->input;
    switch (key) {
    case ARGP_KEY_INIT:
        state->child_inputs[0] = &a->common;
        return 0;
    case OPT_REASON:
        a->reason = arg;
        return 0;
    case OPT_DELETE:
        a->delete = true;
        return 0;
    case ARGP_KEY_ARG:
        return parse_argument(a, arg, state);
    case ARGP_KEY_END:
        check(a, state);
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

/* Finds all checkpoints before it changes the first. */
static ckd_status find_all(ckd_checkpoint *found, const arguments *a, ckd_store *store, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < a->refs.count && status == CKD_OK; i++) {
        status = cli_find_ref(&found[i], store, &a->refs.items[i], NULL, err);
    }
    return status;
}

static ckd_status change(const arguments *a, ckd_store *store, ckd_error *err) {
    ckd_checkpoint *found = calloc(a->refs.count + 1, sizeof(*found));
    ckd_status status = found ? find_all(found, a, store, err) : cli_error_nomem(err);
    for (size_t i = 0; i < a->refs.count && status == CKD_OK; i++) {
        status = a->delete ? ckd_store_unpin(store, &found[i].id, err)
                           : ckd_store_pin(store, &found[i].id, a->reason, err);
        if (status == CKD_E_NOT_FOUND && a->delete) {
            status = cli_error(err, status, "%s is not pinned", cli_ref_text_of(&found[i]).text);
        }
        if (status == CKD_OK && cli_prints_text(&a->common)) {
            printf("%s %s\n", a->delete ? "unpinned" : "pinned", cli_ref_text_of(&found[i]).text);
        }
    }
    free(found);
    for (size_t i = 0; i < a->id_count && status == CKD_OK; i++) {
        status = ckd_store_unpin(store, &a->ids[i], err);
        if (status == CKD_OK && cli_prints_text(&a->common)) {
            char text[CKD_ID_TEXT];
            ckd_id_text(text, &a->ids[i]);
            printf("unpinned %s\n", text);
        }
    }
    return status;
}

static ckd_status run(const arguments *a, ckd_error *err) {
    ckd_store *store = NULL;
    bool changes = a->refs.count || a->id_count;
    ckd_status status = cli_open_store(&store, &a->common, changes ? CKD_OPEN_WRITE : CKD_OPEN_READ, err);
    if (status == CKD_OK && changes) {
        status = change(a, store, err);
        if (status == CKD_OK) {
            cli_committed("the pins are changed");
        }
    }
    if (status == CKD_OK && (a->common.json || !changes)) {
        status = cli_report_marks(store, CLI_PINS, a->common.json, cli_prints_text(&a->common), err);
    }
    ckd_store_close(store);
    return status;
}

int cmd_pin(int argc, char **argv) {
    static const struct argp_child children[] = {{&cli_common_argp, 0, 0, 0}, {0}};
    static const struct argp argp = {options_table, parse, "[STORE] [RUN@STEP...]", doc, children, 0, 0};
    arguments a = {.common.command = "pin"};
    cli_parse_arguments(&argp, argc, argv, &a);
    ckd_error err;
    int code = run(&a, &err) == CKD_OK ? CLI_DONE : cli_fail(&err);
    free(a.ids);
    free(a.refs.items);
    return code;
}
