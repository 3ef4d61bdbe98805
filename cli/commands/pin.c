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

/* A checkpoint to pin or unpin. */
typedef struct target {
    ckd_id id;
    cli_ref_text name; /* RUN@STEP, or its id if it was given by that */
} target;

typedef struct targets {
    target *items;
    size_t count;
} targets;

/* Adds a checkpoint once, however often it was named. */
static void add_target(targets *t, const target *added) {
    for (size_t i = 0; i < t->count; i++) {
        if (memcmp(&t->items[i].id, &added->id, sizeof(added->id)) == 0) {
            return;
        }
    }
    t->items[t->count++] = *added;
}

static ckd_status find_targets(targets *t, const arguments *a, ckd_store *store, ckd_error *err) {
    t->items = calloc(a->refs.count + a->id_count, sizeof(*t->items));
    ckd_status status = t->items ? CKD_OK : cli_error_nomem(err);
    for (size_t i = 0; i < a->refs.count && status == CKD_OK; i++) {
        ckd_checkpoint found;
        status = cli_find_ref(&found, store, &a->refs.items[i], NULL, err);
        if (status == CKD_OK) {
            add_target(t, &(target){found.id, cli_ref_text_of(&found)});
        }
    }
    for (size_t i = 0; i < a->id_count && status == CKD_OK; i++) {
        target by_id = {.id = a->ids[i]};
        ckd_id_text(by_id.name.text, &by_id.id);
        add_target(t, &by_id);
    }
    return status;
}

static ckd_status check_pinned(const targets *t, ckd_store *store, ckd_error *err) {
    ckd_pin_list *pins;
    ckd_status status = ckd_store_pins(&pins, store, err);
    for (size_t i = 0; i < t->count && status == CKD_OK; i++) {
        bool pinned = false;
        for (size_t k = 0; k < pins->count && !pinned; k++) {
            pinned = memcmp(&pins->items[k].checkpoint, &t->items[i].id, sizeof(ckd_id)) == 0;
        }
        if (!pinned) {
            status = cli_error(err, CKD_E_NOT_FOUND, "%s is not pinned; nothing was changed",
                               t->items[i].name.text);
        }
    }
    ckd_pin_list_free(pins);
    return status;
}

static ckd_status change_each(const targets *t, const arguments *a, ckd_store *store, ckd_error *err) {
    const char *done = a->delete ? "unpinned" : "pinned";
    for (size_t i = 0; i < t->count; i++) {
        ckd_status status = a->delete ? ckd_store_unpin(store, &t->items[i].id, err)
                                      : ckd_store_pin(store, &t->items[i].id, a->reason, err);
        if (status != CKD_OK) {
            cli_note("%zu of %zu checkpoints %s %s, then %s failed", i, t->count, i == 1 ? "is" : "are", done,
                     t->items[i].name.text);
            return status;
        }
        if (cli_prints_text(&a->common)) {
            printf("%s %s\n", done, t->items[i].name.text);
        }
    }
    return CKD_OK;
}

/* Finds all checkpoints, and their pins, before it changes the first. */
static ckd_status change(const arguments *a, ckd_store *store, ckd_error *err) {
    targets t = {0};
    ckd_status status = find_targets(&t, a, store, err);
    if (a->delete) {
        THEN(status, check_pinned(&t, store, err));
    }
    THEN(status, change_each(&t, a, store, err));
    free(t.items);
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
