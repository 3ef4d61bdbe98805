/* ckptdelta tag: names for checkpoints. */
#include <stdio.h>

#include "cli/commands/commands.h"
#include "cli/output/output.h"

enum { OPT_MOVE = 0x200, OPT_DELETE };

static const struct argp_option options_table[] = {
    {"move", OPT_MOVE, 0, 0, "Take the TAG from another checkpoint, if one has it", 1},
    {"delete", OPT_DELETE, 0, 0, "Remove the TAG; its checkpoint stays", 1},
    {0},
};

static const char doc[] =
    "Give a checkpoint a TAG, a name with the characters of a run's name. The checkpoint is named as RUN@STEP, RUN@latest (the newest of the run), or by another tag as @TAG. --tag TAG or @TAG then names it wherever a checkpoint is chosen. A tagged checkpoint cannot be deleted, and the data that it builds on stays with it. Without TAG: list the tags. Tags are files of the store and survive the loss of its catalog."
    "\vExamples:\n"
    "  ckptdelta tag ckpts best gpt@1000\n"
    "  ckptdelta tag ckpts best gpt@1200 --move\n"
    "  ckptdelta load ckpts --tag best --out best.safetensors\n"
    "  ckptdelta tag ckpts --delete best\n";

typedef struct arguments {
    cli_options common;
    const char *tag;
    cli_ref ref;
    bool has_ref, move, removes;
} arguments;

static void check(const arguments *a, struct argp_state *state) {
    if (a->removes && (!a->tag || a->has_ref || a->move)) {
        argp_error(state, "--delete takes the TAG and nothing else");
    }
    if (!a->removes && (a->tag || a->move) && !a->has_ref) {
        argp_error(state, "name the TAG and the checkpoint, as in: best gpt@100");
    }
}

static error_t parse_argument(arguments *a, char *arg, struct argp_state *state) {
    if (cli_take_store(&a->common, arg)) {
        return 0;
    }
    if (!a->tag) {
        a->tag = arg;
    } else if (a->has_ref) {
        argp_error(state, "a TAG names one checkpoint; '%s' is one too many", arg);
    } else if (!cli_parse_ref(&a->ref, arg) || !(a->ref.run[0] || a->ref.tag[0])) {
        argp_error(state, "name the checkpoint as RUN@STEP, as in gpt@100, or as @TAG, not '%s'", arg);
    } else {
        a->has_ref = true;
    }
    return 0;
}

static error_t parse(int key, char *arg, struct argp_state *state) {
    arguments *a = state->input;
    switch (key) {
    case ARGP_KEY_INIT:
        state->child_inputs[0] = &a->common;
        return 0;
    case OPT_MOVE:
        a->move = true;
        return 0;
    case OPT_DELETE:
        a->removes = true;
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

static ckd_status set_tag(const arguments *a, ckd_store *store, ckd_error *err) {
    ckd_checkpoint found;
    ckd_status status = cli_find_ref(&found, store, &a->ref, NULL, err);
    THEN(status, ckd_store_set_tag(store, a->tag, &found.id, a->move, err));
    if (status == CKD_E_EXISTS) {
        status =
            cli_error(err, status, "another checkpoint has the tag %s; --move takes it from there", a->tag);
    }
    if (status == CKD_OK && cli_prints_text(&a->common)) {
        printf("%s is now %s\n", a->tag, cli_ref_text_of(&found).text);
    }
    return status;
}

static ckd_status remove_tag(const arguments *a, ckd_store *store, ckd_error *err) {
    ckd_status status = ckd_store_remove_tag(store, a->tag, err);
    if (status == CKD_OK && cli_prints_text(&a->common)) {
        printf("the tag %s is removed\n", a->tag);
    }
    return status;
}

static ckd_status run(const arguments *a, ckd_error *err) {
    ckd_store *store = NULL;
    ckd_status status = cli_open_store(&store, &a->common, a->tag ? CKD_OPEN_WRITE : CKD_OPEN_READ, err);
    if (status == CKD_OK && a->tag) {
        status = a->removes ? remove_tag(a, store, err) : set_tag(a, store, err);
        if (status == CKD_OK) {
            cli_committed("the tag is changed");
        }
    }
    if (status == CKD_OK && (a->common.json || !a->tag)) {
        status = cli_report_marks(store, CLI_TAGS, a->common.json, cli_prints_text(&a->common), err);
    }
    ckd_store_close(store);
    return status;
}

int cmd_tag(int argc, char **argv) {
    static const struct argp_child children[] = {{&cli_common_argp, 0, 0, 0}, {0}};
    static const struct argp argp = {options_table, parse, "[STORE] [TAG [RUN@STEP]]", doc, children, 0, 0};
    arguments a = {.common.command = "tag"};
    cli_parse_arguments(&argp, argc, argv, &a);
    ckd_error err;
    return run(&a, &err) == CKD_OK ? CLI_DONE : cli_fail(&err);
}
