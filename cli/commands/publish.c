/*
 * ckptdelta publish: the weights of a model, as a version that others follow.
 *
 * A version is always a delta on the one before, so that a follower reads nothing else. When loads of such a chain become
 * too expensive, the version is saved once more, as a base in a run of anchors, and the next version is a delta on that.
 * The values are the same, so followers notice no difference; somebody who joins late begins at the anchor.
 */
#include <fnmatch.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/commands/commands.h"
#include "cli/commands/save_options.h"

/* Policy of a run that publish begins. */
#define KEEP_LAST 20
/* An anchor is made when a load costs more than so many bases, or builds on so many versions. */
#define LOAD_COST    10.0
#define DEPTH_MAX    100u
#define UNBOUNDED    1e6 /* load cost of a version: anchors bound it */
#define ANCHORS      ".anchors"
#define ANCHORS_KEPT 1

enum { OPT_STEP = 0x200, OPT_TAG, OPT_EXCLUDE, OPT_KEEP_LAST, OPT_KEEP_WITHIN, OPT_LOAD_COST };

static const struct argp_option options_table[] = {
    {0, 0, 0, 0, "Which version (required, unless it is named as RUN@STEP):", 1},
    {"run", 'r', "RUN", 0, "The run that followers follow", 1},
    {"step", OPT_STEP, "N", 0, "Its step; versions are followed in the order of their steps", 1},
    {"tag", OPT_TAG, "TAG", 0, "Move TAG to it; followers of the tag go there", 1},
    {"exclude", OPT_EXCLUDE, "GLOB", 0, "Leave out tensors whose names match; may be given several times", 2},
    {0, 0, 0, 0, "How long versions stay:", 3},
    {"keep-last", OPT_KEEP_LAST, "N", 0,
     "The newest N stay, and older ones are deleted for good [default: 20 if this is the run's first, else as before]",
     3},
    {"keep-within", OPT_KEEP_WITHIN, "TIME", 0,
     "So do those that are at most TIME older than the newest, for example 6h", 3},
    {"max-load-cost", OPT_LOAD_COST, "X", 0,
     "Make an anchor, from which late followers begin, when a load costs more than X loads of a base [default: 10]",
     4},
    {0},
};

static const char doc[] =
    "Store the weights in all FILEs as a version of a model, for programs that follow it (ckptdelta follow, Follow in Python, ckd_follow in C). "
    "A follower that has the version before reads only what changed since. The values stay bit for bit. "
    "State of an optimizer is left out. The store is created if it does not exist."
    "\vEach version is a delta on the one before. Now and then a version is also saved as a base, in the run RUN.anchors: followers that join late begin there. "
    "The first version of a run also gives the run a policy that deletes old versions. Nothing but publish should save to such a run. "
    "A follower whose version is deleted goes to the newest one all the same. "
    "If the step exists with the same content, publish succeeds and changes nothing.\n"
    "\n"
    "Examples:\n"
    "  ckptdelta publish weights --run policy --step 100 model.safetensors\n"
    "  ckptdelta publish weights policy@101 model-0000*.safetensors --tag rollout\n"
    "  ckptdelta publish weights policy@102 model.safetensors --keep-last 100 --keep-within 6h\n";

typedef struct arguments {
    cli_saving saving;
    char **files;
    size_t file_count;
    const char *tag, **excluded;
    size_t excluded_count;
    uint64_t keep_last, keep_within_s;
    bool has_rules;
    double load_cost;
    char anchors[CKD_RUN_MAX + 1]; /* run of the anchors */
} arguments;

/* ---- arguments ---- */

static void take_file(arguments *a, char *arg, struct argp_state *state) {
    if (cli_take_store(&a->saving.common, arg) ||
        (a->file_count == 0 && cli_saving_take_ref(&a->saving, arg))) {
        return;
    }
    if (a->file_count == 1) {
        cli_saving_check_store(&a->saving, a->files[0], arg, state);
    }
    a->files[a->file_count++] = arg;
}

static error_t parse_rules(int key, char *arg, struct argp_state *state) {
    arguments *a = state->input;
    switch (key) {
    case OPT_KEEP_LAST:
        if (!cli_parse_u64(&a->keep_last, arg) || a->keep_last < 1 || a->keep_last > UINT32_MAX) {
            argp_error(state, "--keep-last is a number from 1 to %" PRIu32 ", not '%s'", UINT32_MAX, arg);
        }
        a->has_rules = true;
        return 0;
    case OPT_KEEP_WITHIN:
        a->keep_within_s = cli_seconds(state, "--keep-within", arg);
        a->has_rules = true;
        return 0;
    case OPT_LOAD_COST:
        if (!cli_parse_double(&a->load_cost, arg) || !(a->load_cost >= 1)) {
            argp_error(state, "--max-load-cost is a number of at least 1, not '%s'", arg);
        }
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static void check_inputs(arguments *a, struct argp_state *state) {
    for (size_t i = 0; i < a->file_count; i++) {
        if (strcmp(a->files[i], "-") == 0) {
            argp_error(state, "publish may read its FILEs twice, so none can be standard input");
        }
    }
    int length = snprintf(a->anchors, sizeof(a->anchors), "%s" ANCHORS, a->saving.save.run);
    if (length >= (int)sizeof(a->anchors)) {
        argp_error(state, "the name of a published run has at most %d bytes",
                   CKD_RUN_MAX - (int)strlen(ANCHORS));
    }
}

static error_t parse(int key, char *arg, struct argp_state *state) {
    arguments *a = state->input;
    cli_saving *s = &a->saving;
    switch (key) {
    case ARGP_KEY_INIT:
        state->child_inputs[0] = state->child_inputs[1] = state->child_inputs[2] = &s->common;
        return 0;
    case 'r':
        s->save.run = arg;
        s->has_run = true;
        return 0;
    case OPT_STEP:
        if (!cli_parse_u64(&s->save.step, arg) || s->save.step > INT64_MAX) {
            argp_error(state, "--step is a number, not '%s'", arg);
        }
        s->has_step = true;
        return 0;
    case OPT_TAG:
        a->tag = arg;
        return 0;
    case OPT_EXCLUDE:
        a->excluded[a->excluded_count++] = arg;
        return 0;
    case ARGP_KEY_ARG:
        take_file(a, arg, state);
        return 0;
    case ARGP_KEY_END:
        if (a->file_count == 0) {
            argp_error(state, "name the safetensors FILEs to publish");
        }
        cli_saving_check_complete(s, state);
        check_inputs(a, state);
        return 0;
    default:
        return parse_rules(key, arg, state);
    }
}

/* ---- what is published ---- */

static bool is_weight(const arguments *a, const cli_input *input) {
    for (size_t i = 0; i < a->excluded_count; i++) {
        if (fnmatch(a->excluded[i], input->tensor->name, 0) == 0) {
            return false;
        }
    }
    return (input->role == CKD_ROLE_WEIGHT || input->role == CKD_ROLE_OTHER) && !input->in_doubt;
}

/* Leaves out everything but weights and buffers, which all get the role of weights: followers take those. */
static ckd_status choose(const arguments *a, cli_inputs *inputs, ckd_error *err) {
    size_t kept = 0;
    inputs->bytes = 0;
    for (size_t i = 0; i < inputs->count; i++) {
        if (is_weight(a, &inputs->tensors[i])) {
            cli_input *to = &inputs->tensors[kept++];
            *to = inputs->tensors[i];
            to->role = CKD_ROLE_WEIGHT;
            to->weight = NULL;
            inputs->bytes += to->tensor->size;
        }
    }
    size_t left_out = inputs->count - kept;
    inputs->count = kept;
    if (kept == 0) {
        return cli_error(err, CKD_E_INVALID, "the files have no weights: nothing is left to publish");
    }
    if (left_out && !a->saving.common.quiet) {
        cli_note("%zu tensor%s left out: state of an optimizer, or excluded", left_out,
                 left_out == 1 ? " is" : "s are");
    }
    return CKD_OK;
}

/* ---- the run before ---- */

typedef struct run_state {
    bool has_policy; /* of its own */
    ckd_policy policy;
    size_t count; /* checkpoints */
} run_state;

static ckd_status look_at_run(run_state *out, ckd_store *store, const char *name, ckd_error *err) {
    ckd_policy_list *policies = NULL;
    ckd_checkpoint_list *all = NULL;
    *out = (run_state){.policy = {.keep_last = 0}};
    ckd_status status = ckd_store_policies(&policies, store, err);
    for (size_t i = 0; status == CKD_OK && i < policies->count; i++) {
        const ckd_stored_policy *p = &policies->items[i];
        if (strcmp(p->run, name) == 0) {
            out->has_policy = true;
            out->policy = p->policy;
            status = p->status == CKD_OK
                         ? CKD_OK
                         : cli_error(err, p->status, "the policy of run '%s' cannot be read", name);
        }
    }
    THEN(status, ckd_store_list(&all, store, name, err));
    out->count = status == CKD_OK ? all->count : 0;
    ckd_policy_list_free(policies);
    ckd_checkpoint_list_free(all);
    return status;
}

/* A policy deletes for good what a trainer saved, so it must not come from here. */
static ckd_status refuse_trainers_run(const arguments *a, const run_state *run, ckd_error *err) {
    return a->has_rules && !run->has_policy && run->count > 0
               ? cli_error(
                     err, CKD_E_INVALID,
                     "run '%s' has checkpoints and no policy: publish to a run that has only versions, or "
                     "set its policy by ckptdelta policy",
                     a->saving.save.run)
               : CKD_OK;
}

/*
 * Followers go to the highest step. The parent is the anchor of the newest version, if it has one; else the version
 * itself, as for any save.
 */
static ckd_status choose_parent(arguments *a, ckd_store *store, ckd_error *err) {
    ckd_checkpoint newest, anchor, same;
    cli_saving *s = &a->saving;
    ckd_status status = ckd_store_find(&newest, store, s->save.run, CKD_LATEST, err);
    if (status != CKD_OK) {
        return status == CKD_E_NOT_FOUND ? CKD_OK : status;
    }
    if (newest.step > s->save.step &&
        ckd_store_find(&same, store, s->save.run, s->save.step, NULL) == CKD_E_NOT_FOUND) {
        return cli_error(err, CKD_E_INVALID,
                         "step %" PRIu64 " is before the newest version, %s: no follower would apply it",
                         s->save.step, cli_ref_text_of(&newest).text);
    }
    if (newest.step < s->save.step &&
        ckd_store_find(&anchor, store, a->anchors, CKD_LATEST, NULL) == CKD_OK &&
        anchor.step == newest.step) {
        memcpy(s->parent.run, a->anchors, sizeof(a->anchors));
        s->parent.step = anchor.step;
        s->has_parent = true;
    }
    return CKD_OK;
}

/* ---- policies ---- */

static ckd_status begin_policy(ckd_store *store, const char *run, uint64_t keep_last, uint64_t keep_within_s,
                               ckd_error *err) {
    ckd_policy policy = CKD_POLICY_INIT;
    policy.run = run;
    policy.keep_last = (uint32_t)keep_last;
    policy.keep_within_s = keep_within_s;
    policy.automatic = 1;
    policy.undo_s = 0;
    policy.compact_share = CKD_NO_COMPACTION; /* a follower's values are in no chain that is coded again */
    return ckd_store_set_policy(store, &policy, err);
}

/* Changes what options say, and leaves other rules alone. */
static ckd_status change_policy(const arguments *a, ckd_store *store, const run_state *run, ckd_error *err) {
    ckd_policy policy = run->policy;
    policy.struct_size = sizeof(policy);
    policy.run = a->saving.save.run;
    policy.keep_last = a->keep_last ? (uint32_t)a->keep_last : policy.keep_last;
    policy.keep_within_s = a->keep_within_s ? a->keep_within_s : policy.keep_within_s;
    bool same =
        policy.keep_last == run->policy.keep_last && policy.keep_within_s == run->policy.keep_within_s;
    return same ? CKD_OK : ckd_store_set_policy(store, &policy, err);
}

/* A run that is begun gets its policy before its first version, so that it has one even if this process is killed. */
static ckd_status set_policy(const arguments *a, ckd_store *store, const run_state *run, ckd_error *err) {
    if (run->has_policy) {
        return a->has_rules ? change_policy(a, store, run, err) : CKD_OK;
    }
    uint64_t keep_last = a->keep_last ? a->keep_last : KEEP_LAST;
    return run->count == 0 ? begin_policy(store, a->saving.save.run, keep_last, a->keep_within_s, err)
                           : CKD_OK;
}

static ckd_status prepare(arguments *a, ckd_error *err) {
    ckd_store *store;
    run_state run;
    ckd_status status = cli_open_store(&store, &a->saving.common, CKD_OPEN_CREATE, err);
    if (status != CKD_OK) {
        return status;
    }
    status = look_at_run(&run, store, a->saving.save.run, err);
    THEN(status, refuse_trainers_run(a, &run, err));
    THEN(status, choose_parent(a, store, err));
    THEN(status, set_policy(a, store, &run, err));
    ckd_store_close(store);
    return status;
}

/* ---- anchors ---- */

/* Saves the version once more, as a base. Returns the exit status. */
static int save_anchor(const arguments *a, cli_inputs *inputs) {
    cli_saving saving = a->saving;
    saving.common.quiet = true;
    saving.common.json = false;
    saving.save.run = a->anchors;
    saving.save.base = 1;
    saving.save.parent_run = NULL;
    saving.has_parent = false;
    return cli_saving_run(&saving, inputs);
}

/* After a failure the next version is due for an anchor, too. */
static void make_anchor(const arguments *a, ckd_store *store, cli_inputs *inputs) {
    run_state run;
    ckd_error err;
    ckd_status status = look_at_run(&run, store, a->anchors, &err);
    if (status == CKD_OK && !run.has_policy) {
        status = begin_policy(store, a->anchors, ANCHORS_KEPT, 0, &err);
    }
    if (status != CKD_OK) {
        (void)cli_fail(&err);
    }
    if (status != CKD_OK || save_anchor(a, inputs) != CLI_DONE) {
        cli_note("%s@%" PRIu64 " is published without an anchor; the next version will get one",
                 a->saving.save.run, a->saving.save.step);
    }
}

/* ---- afterwards ---- */

static int finish(const arguments *a, cli_inputs *inputs) {
    ckd_store *store = NULL;
    ckd_checkpoint version = {0};
    ckd_error err;
    ckd_status status = cli_open_store(&store, &a->saving.common, CKD_OPEN_WRITE, &err);
    THEN(status, ckd_store_find(&version, store, a->saving.save.run, a->saving.save.step, &err));
    if (status == CKD_OK && (version.load_cost > a->load_cost || version.depth >= DEPTH_MAX)) {
        make_anchor(a, store, inputs);
    }
    THEN(status, a->tag ? ckd_store_set_tag(store, a->tag, &version.id, 1, &err) : CKD_OK);
    ckd_store_close(store);
    return status == CKD_OK ? CLI_DONE : cli_fail(&err);
}

int cmd_publish(int argc, char **argv) {
    static const struct argp_child children[] = {
        {&cli_common_argp, 0, 0, 0}, {&cli_threads_argp, 0, 0, 0}, {&cli_staging_argp, 0, 0, 0}, {0}};
    static const struct argp argp = {
        options_table, parse, "[STORE] [RUN@STEP] FILE.safetensors...", doc, children, 0, 0};
    arguments a = {.saving = CLI_SAVING_INIT("publish"), .load_cost = LOAD_COST};
    a.saving.publishes = true;
    a.saving.save.max_load_cost = UNBOUNDED;
    a.saving.save.on_duplicate = CKD_DUPLICATE_SAME_OK;
    a.files = calloc(2 * (size_t)argc, sizeof(*a.files));
    ckd_error err;
    if (!a.files) {
        cli_error_nomem(&err);
        return cli_fail(&err);
    }
    a.excluded = (const char **)a.files + argc;
    cli_parse_arguments(&argp, argc, argv, &a);
    cli_inputs inputs;
    ckd_status status = cli_inputs_open(&inputs, a.files, a.file_count, &a.saving.roles, &err);
    THEN(status, choose(&a, &inputs, &err));
    THEN(status, prepare(&a, &err));
    int code;
    if (status == CKD_OK) {
        code = cli_saving_run(&a.saving, &inputs);
        code = code == CLI_DONE ? finish(&a, &inputs) : code;
    } else {
        code = cli_fail(&err);
    }
    cli_inputs_close(&inputs);
    cli_saving_free(&a.saving);
    free(a.files);
    return code;
}
