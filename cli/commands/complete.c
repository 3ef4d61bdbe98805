/*
 * ckptdelta complete: names in a store, one per line, for shell completion. Shells call it while the user types, so it
 * prints no errors and does not wait for other processes.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "cli/commands/commands.h"
#include "cli/output/output.h"

enum { OPT_RUN = 0x200, LOCK_TIMEOUT_MS = 200 };

static const struct argp_option options_table[] = {
    {"run", OPT_RUN, "RUN", 0, "Only steps and checkpoints of this run", 1},
    {0},
};

static const char doc[] =
    "Print names of a store, one per line: its runs, the steps of its checkpoints, its checkpoints "
    "(RUN@STEP and @TAG) or its tags. Shell completions call this. It changes nothing, waits for nobody, "
    "and prints no errors; only the exit status shows them."
    "\vExamples:\n"
    "  ckptdelta complete ckpts runs\n"
    "  ckptdelta complete ckpts steps --run gpt\n";

typedef struct arguments {
    const char *store, *kind, *run;
} arguments;

static bool known_kind(const char *kind) {
    return strcmp(kind, "runs") == 0 || strcmp(kind, "steps") == 0 || strcmp(kind, "checkpoints") == 0 ||
           strcmp(kind, "tags") == 0;
}

static error_t parse(int key, char *arg, struct argp_state *state) {
    arguments *a = state->input;
    switch (key) {
    case OPT_RUN:
        a->run = arg;
        return 0;
    case ARGP_KEY_ARG:
        if (a->store && a->kind) {
            return ARGP_ERR_UNKNOWN;
        }
        *(a->store ? &a->kind : &a->store) = arg;
        return 0;
    case ARGP_KEY_END:
        if (!a->kind || !known_kind(a->kind)) {
            argp_error(state, "name the STORE, and what to print of it: runs, steps, checkpoints or tags");
        }
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static ckd_status print_tags(ckd_store *store, const char *prefix, ckd_error *err) {
    ckd_tag_list *tags;
    ckd_status status = ckd_store_tags(&tags, store, err);
    for (size_t i = 0; status == CKD_OK && i < tags->count; i++) {
        printf("%s%s\n", prefix, tags->items[i].tag);
    }
    ckd_tag_list_free(tags);
    return status;
}

/* The list is sorted by run, then step. Each run is printed once; steps of several runs are printed for every run. */
static ckd_status print_checkpoints(const arguments *a, ckd_store *store, ckd_error *err) {
    bool runs = strcmp(a->kind, "runs") == 0, steps = strcmp(a->kind, "steps") == 0;
    ckd_checkpoint_list *list;
    ckd_status status = ckd_store_list(&list, store, runs ? NULL : a->run, err);
    for (size_t i = 0; status == CKD_OK && i < list->count; i++) {
        const ckd_checkpoint *c = &list->items[i];
        if (steps) {
            printf("%" PRIu64 "\n", c->step);
        } else if (!runs) {
            printf("%s@%" PRIu64 "\n", c->run, c->step);
        } else if (i == 0 || strcmp(c->run, list->items[i - 1].run) != 0) {
            printf("%s\n", c->run);
        }
    }
    ckd_checkpoint_list_free(list);
    return status;
}

static ckd_status run(const arguments *a, ckd_error *err) {
    ckd_store_options options = CKD_STORE_OPTIONS_INIT;
    options.lock_timeout_ms = LOCK_TIMEOUT_MS;
    ckd_store *store = NULL;
    ckd_status status = ckd_store_open(&store, a->store, CKD_OPEN_READ, &options, err);
    if (status == CKD_OK && strcmp(a->kind, "tags") != 0) {
        status = print_checkpoints(a, store, err);
    }
    if (status == CKD_OK && strcmp(a->kind, "tags") == 0) {
        status = print_tags(store, "", err);
    } else if (status == CKD_OK && strcmp(a->kind, "checkpoints") == 0) {
        status = print_tags(store, "@", err);
    }
    ckd_store_close(store);
    return status;
}

int cmd_complete(int argc, char **argv) {
    static const struct argp argp = {
        options_table, parse, "STORE runs|steps|checkpoints|tags", doc, NULL, 0, 0};
    arguments a = {0};
    argp_parse(&argp, argc, argv, 0, NULL, &a);
    ckd_error err;
    return run(&a, &err) == CKD_OK ? CLI_DONE : cli_exit_code(&err);
}
