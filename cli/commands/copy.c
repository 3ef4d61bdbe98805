/* ckptdelta copy, push and pull: copy checkpoints from one store to another. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "cli/commands/commands.h"
#include "cli/output/output.h"

enum { OPT_STEP = 0x200, OPT_TAG, OPT_AS, OPT_TAGS, OPT_RATE };

static const struct argp_option options_table[] = {
    {"run", 'r', "RUN", 0, "Only this run", 1},
    {"step", OPT_STEP, "N|latest|A:B", 0,
     "Only this checkpoint of the run, or those from step A to step B; may be repeated", 1},
    {"tag", OPT_TAG, "TAG", 0, "The checkpoint that has this tag; may be repeated", 1},
    {"as", OPT_AS, "RUN", 0, "Give the run another name in the destination", 2},
    {"tags", OPT_TAGS, 0, 0, "Copy the tags of these checkpoints, too", 2},
    {"rate", OPT_RATE, "SIZE", 0, "Move at most this much per second, such as 20M [default: no limit]", 2},
    {"dry-run", 'n', 0, 0, "Copy nothing; show what would be copied, and its size", 2},
    {0},
};

#define DOC_COMMON                                                                                                                                     \
    " each with everything that a load of it reads: all of them, or those of a run, some steps, some tags. What is already there is not moved again. " \
    "Every record is verified when it is read and again when it has arrived. It can be stopped at any time; the next call continues. "                 \
    "A destination that does not exist is created. Nothing is overwritten: if the destination has another checkpoint at the same run and step, nothing is copied."

static const char copy_doc[] =
    "Copy checkpoints from the store SOURCE to the store DESTINATION," DOC_COMMON "\vExamples:\n"
    "  ckptdelta copy ckpts /mnt/archive/ckpts\n"
    "  ckptdelta copy ckpts /mnt/archive/ckpts --run gpt --step 1000:2000 --dry-run\n"
    "  ckptdelta copy /mnt/archive/ckpts mine --tag best --as tuned --rate 50M\n";
static const char push_doc[] =
    "Copy checkpoints of STORE to the store DESTINATION, like ckptdelta copy STORE DESTINATION," DOC_COMMON
    "\vExamples:\n"
    "  ckptdelta push ckpts /mnt/archive/ckpts --tags\n";
static const char pull_doc[] =
    "Copy checkpoints of the store SOURCE to STORE, like ckptdelta copy SOURCE STORE," DOC_COMMON
    "\vExamples:\n"
    "  ckptdelta pull ckpts /mnt/archive/ckpts --run gpt --step latest\n";

/* --step or --tag. */
typedef struct choice {
    const char *tag;      /* NULL: steps */
    uint64_t first, last; /* CKD_LATEST for both: the newest */
} choice;

typedef struct arguments {
    cli_options common; /* STORE */
    const char *other;
    bool pull; /* STORE is the destination */
    const char *run;
    choice *choices;
    size_t choice_count;
    cli_refs refs;
    ckd_copy_options copy;
} arguments;

/* ---- arguments ---- */

/* Parses N, latest, A:B, A: and :B. */
static bool parse_steps(choice *out, const char *text) {
    char first[32] = "";
    const char *colon = strchr(text, ':');
    *out = (choice){.last = INT64_MAX};
    if (!colon) {
        bool good = cli_parse_step(&out->first, text);
        out->last = out->first;
        return good;
    }
    size_t length = (size_t)(colon - text);
    if (length >= sizeof(first) || (!length && !colon[1])) {
        return false;
    }
    memcpy(first, text, length);
    return (!length || cli_parse_u64(&out->first, first)) &&
           (!colon[1] || cli_parse_u64(&out->last, colon + 1)) && out->first <= out->last &&
           out->last <= INT64_MAX;
}

static error_t add_choice(arguments *a, const choice *c, struct argp_state *state) {
    choice *grown = realloc(a->choices, (a->choice_count + 1) * sizeof(*grown));
    if (!grown) {
        argp_failure(state, CLI_FAILED, 0, "out of memory");
        return ENOMEM;
    }
    a->choices = grown;
    grown[a->choice_count++] = *c;
    return 0;
}

static error_t parse_choice(int key, char *arg, arguments *a, struct argp_state *state) {
    choice c = {.tag = arg};
    if (key == OPT_STEP && !parse_steps(&c, arg)) {
        argp_error(state, "--step is a number, latest, or a range such as 100:200, not '%s'", arg);
    }
    return add_choice(a, &c, state);
}

/*
 * If the environment names this store, a single store argument is the other one. Checkpoint arguments contain an @ and
 * no slash.
 */
static error_t take_argument(arguments *a, const char *arg, struct argp_state *state) {
    if (strchr(arg, '@') && !strchr(arg, '/')) {
        return cli_refs_add_any(&a->refs, arg, state);
    }
    if (a->other && a->common.store) {
        return ARGP_ERR_UNKNOWN;
    }
    if (!a->other && (a->common.store || cli_default_store())) {
        a->other = arg;
    } else if (a->other) {
        a->common.store = a->other;
        a->other = arg;
    } else {
        a->common.store = arg;
    }
    return 0;
}

static error_t parse(int key, char *arg, struct argp_state *state) {
    arguments *a = state->input;
    switch (key) {
    case ARGP_KEY_INIT:
        state->child_inputs[0] = &a->common;
        return 0;
    case 'r':
        a->run = arg;
        return 0;
    case OPT_STEP:
    case OPT_TAG:
        return parse_choice(key, arg, a, state);
    case OPT_AS:
        a->copy.as_run = arg;
        return 0;
    case OPT_TAGS:
        a->copy.tags = 1;
        return 0;
    case OPT_RATE:
        a->copy.bytes_per_s = cli_rate(state, arg);
        return 0;
    case 'n':
        a->copy.dry_run = 1;
        return 0;
    case ARGP_KEY_ARG:
        return take_argument(a, arg, state);
    case ARGP_KEY_END:
        if (!a->other) {
            argp_error(state, "name two stores (directories); CKPTDELTA_STORE may name the first one");
        }
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

/* ---- selection ---- */

typedef struct chosen {
    ckd_checkpoint_list *all;
    bool *marks; /* one per checkpoint */
    ckd_id *ids;
    size_t count;
} chosen;

/* Marks a checkpoint that was named. --run may stand beside it, but then names its run. */
static ckd_status mark(chosen *c, const arguments *a, const ckd_checkpoint *found, ckd_error *err) {
    if (a->run && strcmp(a->run, found->run) != 0) {
        return cli_error(err, CKD_E_INVALID,
                         "%s is not of the run %.128s that --run names; choose one of them",
                         cli_ref_text_of(found).text, a->run);
    }
    for (size_t i = 0; i < c->all->count; i++) {
        c->marks[i] = c->marks[i] || cli_has_id(&c->all->items[i], &found->id);
    }
    return CKD_OK;
}

/* Marks the checkpoints of one choice. A range of steps belongs to the given run, or to the only one. */
static ckd_status mark_choice(chosen *c, const arguments *a, const choice *item, ckd_store *from,
                              ckd_error *err) {
    ckd_checkpoint found;
    bool range = !item->tag && item->first != item->last;
    ckd_status status = item->tag ? ckd_store_find_tag(&found, from, item->tag, err)
                                  : cli_find(&found, from, a->run, range ? CKD_LATEST : item->first, err);
    if (status != CKD_OK || !range) {
        return status == CKD_OK ? mark(c, a, &found, err) : status;
    }
    size_t count = 0;
    for (size_t i = 0; i < c->all->count; i++) {
        const ckd_checkpoint *x = &c->all->items[i];
        bool in_range = strcmp(x->run, found.run) == 0 && x->step >= item->first && x->step <= item->last;
        c->marks[i] = c->marks[i] || in_range;
        count += in_range;
    }
    return count
               ? CKD_OK
               : cli_error(err, CKD_E_NOT_FOUND, "run %s has no checkpoint from step %" PRIu64 " to %" PRIu64,
                           found.run, item->first, item->last);
}

static ckd_status choose_checkpoints(chosen *c, const arguments *a, ckd_store *from, ckd_error *err) {
    ckd_status status = ckd_store_list(&c->all, from, NULL, err);
    size_t count = status == CKD_OK ? c->all->count : 0;
    c->marks = calloc(count + 1, sizeof(*c->marks));
    c->ids = calloc(count + 1, sizeof(*c->ids));
    if (status == CKD_OK && (!c->marks || !c->ids)) {
        status = cli_error_nomem(err);
    }
    for (size_t i = 0; i < a->choice_count && status == CKD_OK; i++) {
        status = mark_choice(c, a, &a->choices[i], from, err);
    }
    for (size_t i = 0; i < a->refs.count && status == CKD_OK; i++) {
        ckd_checkpoint found;
        status = cli_find_ref(&found, from, &a->refs.items[i], NULL, err);
        THEN(status, mark(c, a, &found, err));
    }
    for (size_t i = 0; i < count && status == CKD_OK; i++) {
        const ckd_checkpoint *x = &c->all->items[i];
        bool run = !a->choice_count && !a->refs.count && (!a->run || strcmp(x->run, a->run) == 0);
        if (c->marks[i] || run) {
            c->ids[c->count++] = x->id;
        }
    }
    if (status == CKD_OK && !c->count) {
        status = a->run ? cli_error(err, CKD_E_NOT_FOUND, "there is no run %.128s in the source", a->run)
                        : cli_error(err, CKD_E_NOT_FOUND, "the source has no checkpoints yet");
    }
    return status;
}

static void chosen_free(chosen *c) {
    ckd_checkpoint_list_free(c->all);
    free(c->marks);
    free(c->ids);
}

/* ---- reporting ---- */

static const char *state_word(ckd_copy_state state) {
    switch (state) {
    case CKD_COPY_MOVED:
        return "copied";
    case CKD_COPY_RESTORED:
        return "restored";
    case CKD_COPY_LEFT:
        return "left";
    default:
        return "present";
    }
}

static ckd_status print_json(const arguments *a, const ckd_copy_result *r, ckd_error *err) {
    json_t *items = json_array();
    for (size_t i = 0; i < r->count; i++) {
        const ckd_copied *c = &r->items[i];
        cli_json_append(&items, json_pack("{s:s, s:s, s:s, s:I, s:o}", "checkpoint",
                                          cli_ref_text_of(&c->checkpoint).text, "kind",
                                          ckd_kind_name(c->checkpoint.kind), "state", state_word(c->state),
                                          "bytes", (json_int_t)c->bytes, "why",
                                          cli_json_text(c->left.status == CKD_OK ? NULL : c->left.message)));
    }
    return cli_json_print(json_pack("{s:i, s:b, s:I, s:I, s:I, s:I, s:I, s:o}", "schema", 1, "dry_run",
                                    a->copy.dry_run, "copied", (json_int_t)r->checkpoints, "files",
                                    (json_int_t)r->files, "bytes", (json_int_t)r->bytes, "tags",
                                    (json_int_t)r->tags, "left", (json_int_t)r->left, "checkpoints", items),
                          err);
}

static ckd_status print_text(const arguments *a, const ckd_copy_result *r, ckd_error *err) {
    bool dry = a->copy.dry_run;
    size_t present = 0;
    cli_table *t = cli_table_new("RUN|>STEP|KIND|>BYTES|");
    for (size_t i = 0; i < r->count; i++) {
        const ckd_copied *c = &r->items[i];
        bool is_present = c->state == CKD_COPY_PRESENT;
        present += is_present;
        if (c->state == CKD_COPY_LEFT || (is_present && !a->common.verbose)) {
            continue;
        }
        cli_table_cell(t, "%s", c->checkpoint.run);
        cli_table_cell(t, "%" PRIu64, c->checkpoint.step);
        cli_table_cell(t, "%s", ckd_kind_name(c->checkpoint.kind));
        cli_table_cell(t, "%s", cli_text_size(c->bytes).text);
        cli_table_cell(t, "%s",
                       is_present ? "is there already"
                       : c->state == CKD_COPY_RESTORED
                           ? (dry ? "would come back from the trash" : "came back from the trash")
                       : dry ? "would be copied"
                             : "copied");
    }
    ckd_status status = cli_table_print(t, err);
    if (status != CKD_OK) {
        return status;
    }
    printf("%s %" PRIu64 " checkpoint%s in %" PRIu64 " file%s, %s", dry ? "would copy" : "copied",
           r->checkpoints, cli_plural(r->checkpoints), r->files, cli_plural(r->files),
           cli_text_size(r->bytes).text);
    if (present) {
        printf("; %zu %s there already", present, present == 1 ? "is" : "are");
    }
    if (r->tags) {
        printf("; %s %" PRIu64 " tag%s", dry ? "would set" : "set", r->tags, cli_plural(r->tags));
    }
    printf("\n");
    return CKD_OK;
}

/* Prints each checkpoint that was not copied, whatever else is printed. If there is only one, the error names it. */
static void print_left(const ckd_copy_result *r) {
    for (size_t i = 0; i < r->count && r->left > 1; i++) {
        if (r->items[i].state == CKD_COPY_LEFT) {
            cli_note("%s", r->items[i].left.message);
        }
    }
}

/* ---- copying ---- */

/* In a dry run, a store that does not exist yet is NULL. */
static ckd_status open_destination(ckd_store **out, const arguments *a, const cli_options *o,
                                   ckd_error *err) {
    ckd_status status = cli_open_store(out, o, a->copy.dry_run ? CKD_OPEN_READ : CKD_OPEN_CREATE, err);
    return status == CKD_E_NOT_FOUND && a->copy.dry_run ? CKD_OK : status;
}

static ckd_status copy(ckd_copy_result **out, const arguments *a, ckd_store *to, ckd_store *from,
                       const chosen *c, ckd_error *err) {
    ckd_copy_options options = a->copy;
    cli_progress progress;
    cli_interrupt_catch();
    cli_progress_begin(&progress, "copying", a->common.quiet);
    options.checkpoints = c->ids;
    options.count = c->count;
    options.on_progress = cli_progress_update;
    options.progress_context = &progress;
    ckd_status status = ckd_copy(out, to, from, &options, err);
    cli_progress_end(&progress);
    if (status == CKD_OK && !options.dry_run) {
        cli_committed("the checkpoints are copied");
    }
    return status;
}

static ckd_status run(const arguments *a, const cli_options *source, const cli_options *destination,
                      ckd_error *err) {
    ckd_store *from = NULL, *to = NULL;
    ckd_copy_result *result = NULL;
    chosen c = {0};
    ckd_status status = cli_open_store(&from, source, CKD_OPEN_READ, err);
    THEN(status, choose_checkpoints(&c, a, from, err));
    THEN(status, open_destination(&to, a, destination, err));
    THEN(status, copy(&result, a, to, from, &c, err));
    ckd_error unprinted;
    ckd_status printed = !result                       ? CKD_OK
                         : a->common.json              ? print_json(a, result, &unprinted)
                         : cli_prints_text(&a->common) ? print_text(a, result, &unprinted)
                                                       : CKD_OK;
    if (result) {
        print_left(result);
    }
    if (result && result->left) {
        cli_left_out();
    }
    if (printed != CKD_OK && status == CKD_OK) {
        *err = unprinted;
        status = printed;
    }
    ckd_copy_result_free(result);
    chosen_free(&c);
    ckd_store_close(to);
    ckd_store_close(from);
    return status;
}

static int command(int argc, char **argv, const char *name, const char *stores, const char *doc) {
    static const struct argp_child children[] = {{&cli_common_argp, 0, 0, 0}, {0}};
    const struct argp argp = {options_table, parse, stores, doc, children, 0, 0};
    arguments a = {.common.command = name, .copy = CKD_COPY_OPTIONS_INIT, .pull = strcmp(name, "pull") == 0};
    cli_parse_arguments(&argp, argc, argv, &a);
    cli_options other_store = a.common;
    other_store.store = a.other;
    const cli_options *source = a.pull ? &other_store : &a.common,
                      *destination = a.pull ? &a.common : &other_store;
    ckd_error err;
    bool done = run(&a, source, destination, &err) == CKD_OK;
    bool there = !done && cli_error_in_store(&err, destination) > cli_error_in_store(&err, source);
    int code = done ? CLI_DONE : cli_fail_with_hint(&err, there ? destination : source);
    if (code == CLI_FAILED && err.status == CKD_E_EXISTS && !a.copy.as_run) {
        cli_note("--as RUN copies a run under another name");
    }
    free(a.choices);
    free(a.refs.items);
    return code;
}

int cmd_copy(int argc, char **argv) {
    return command(argc, argv, "copy", "[SOURCE] DESTINATION [RUN@STEP | @TAG]...", copy_doc);
}

int cmd_push(int argc, char **argv) {
    return command(argc, argv, "push", "[STORE] DESTINATION [RUN@STEP | @TAG]...", push_doc);
}

int cmd_pull(int argc, char **argv) {
    return command(argc, argv, "pull", "[STORE] SOURCE [RUN@STEP | @TAG]...", pull_doc);
}
