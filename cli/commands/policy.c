/* ckptdelta policy: retention policies stored in the store. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "cli/commands/commands.h"
#include "cli/output/output.h"
#include "cli/report/report.h"

enum { OPT_AUTO = 0x200, OPT_COMPACT, OPT_UNDO, OPT_CLEAR };

static const struct argp_option options_table[] = {
    {"auto", OPT_AUTO, "N", OPTION_ARG_OPTIONAL,
     "Apply it automatically after each save to one of its runs, once N checkpoints can be deleted [default: 1]",
     3},
    {"compact", OPT_COMPACT, "PERCENT", OPTION_ARG_OPTIONAL,
     "With --auto: compact a run once deleted checkpoints still take more than PERCENT of its chunk files; off: never [default: 25]",
     3},
    {"undo", OPT_UNDO, "TIME", 0, "How long its deletions can be undone; 0s: not at all [default: 24h]", 3},
    {"clear", OPT_CLEAR, 0, 0, "Remove the policy of the RUN, or the one for all runs", 4},
    {0},
};

static const char doc[] =
    "Record in the store what to keep, for one run or for all runs without a policy of their own; without a --keep option: show the policies. A policy deletes nothing by itself: ckptdelta prune without --keep options applies it. With --auto so does each save, which never fails or waits because of it; it then compacts its run if too much deleted data is left in files that others need. What is kept in any case, and what is verified before a deletion: ckptdelta help prune."
    "\vExamples:\n"
    "  ckptdelta policy ckpts --keep-last 5 --keep-every 10000 --auto\n"
    "  ckptdelta policy ckpts --run tuned --keep-best 3 --keep-last 2 --auto=10 --undo 7d\n"
    "  ckptdelta policy ckpts --clear --run tuned\n"
    "  ckptdelta prune ckpts --dry-run\n";

typedef struct arguments {
    cli_options common;
    ckd_policy policy;
    /* has_more: an option was given that only makes sense when setting a policy */
    bool sets, clears, compact_given, has_more;
} arguments;

static void parse_auto(arguments *a, const char *arg, struct argp_state *state) {
    uint64_t count = 1;
    if (arg && (!cli_parse_u64(&count, arg) || count < 1 || count > UINT32_MAX)) {
        argp_error(state, "--auto=N is a number from 1 to %" PRIu32 ", not '%s'", UINT32_MAX, arg);
    }
    a->policy.automatic = (uint32_t)count;
    a->has_more = true;
}

static void parse_compact(arguments *a, const char *arg, struct argp_state *state) {
    uint64_t percent = 0;
    bool off = arg && strcmp(arg, "off") == 0;
    if (arg && !off && (!cli_parse_u64(&percent, arg) || percent < 1 || percent > 99)) {
        argp_error(state, "--compact=PERCENT is a number from 1 to 99, or off, not '%s'", arg);
    }
    a->policy.compact_share = off ? CKD_NO_COMPACTION : (uint32_t)percent;
    a->compact_given = a->has_more = true;
}

static error_t parse(int key, char *arg, struct argp_state *state) {
    arguments *a = state->input;
    switch (key) {
    case ARGP_KEY_INIT:
        state->child_inputs[0] = &a->common;
        state->child_inputs[1] = &a->policy;
        return 0;
    case OPT_AUTO:
        parse_auto(a, arg, state);
        return 0;
    case OPT_COMPACT:
        parse_compact(a, arg, state);
        return 0;
    case OPT_UNDO:
        a->policy.undo_s = cli_seconds(state, "--undo", arg);
        a->has_more = true;
        return 0;
    case OPT_CLEAR:
        a->clears = true;
        return 0;
    case ARGP_KEY_END:
        a->sets = cli_policy_given(&a->policy, state);
        if (a->clears && (a->sets || a->has_more)) {
            argp_error(state, "--clear removes a policy; leave out what to keep");
        }
        if (a->compact_given && !a->policy.automatic) {
            argp_error(state, "--compact goes with --auto; ckptdelta compact does it on request");
        }
        if (a->has_more && !a->sets) {
            argp_error(state, "say what to keep: " CLI_KEEP_OPTIONS);
        }
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

/* ------------------------------------------------------------------------------------------------------- showing */

/* Returns the percentage of dead bytes; 0: it does not compact. */
static uint32_t compacts_beyond(const ckd_policy *p) {
    uint32_t share = p->compact_share ? p->compact_share : CKD_COMPACT_SHARE;
    return p->automatic && share != CKD_NO_COMPACTION ? share : 0;
}

static json_t *json_policy(const ckd_stored_policy *s) {
    const ckd_policy *p = &s->policy;
    bool readable = s->status == CKD_OK;
    return json_pack("{s:o, s:b, s:o, s:I, s:I, s:b, s:I, s:b, s:I, s:I, s:I, s:I, s:I, s:b, s:I, s:I, s:I}",
                     "run", s->run[0] ? json_string(s->run) : json_null(), "readable", readable, "since",
                     readable ? json_string(cli_text_time(s->set_ns).text) : json_null(), "keep_last",
                     (json_int_t)p->keep_last, "keep_every", (json_int_t)p->keep_every, "keep_first",
                     p->keep_first, "keep_best", (json_int_t)p->keep_best, "highest_is_best",
                     p->highest_is_best, "keep_newer_s", (json_int_t)p->keep_new_s, "keep_within_s",
                     (json_int_t)p->keep_within_s, "keep_daily", (json_int_t)p->keep_daily, "keep_weekly",
                     (json_int_t)p->keep_weekly, "keep_monthly", (json_int_t)p->keep_monthly, "keep_tagged",
                     p->keep_tagged, "automatic", (json_int_t)p->automatic, "compact_percent",
                     (json_int_t)compacts_beyond(p), "undo_s", (json_int_t)p->undo_s);
}

static void print_row(cli_table *t, const ckd_stored_policy *s) {
    const ckd_policy *p = &s->policy;
    cli_table_cell(t, "%s", s->run[0] ? s->run : "(every other)");
    if (s->status != CKD_OK) {
        cli_table_cell(t, "unreadable");
        for (int i = 0; i < 4; i++) {
            cli_table_cell(t, "-");
        }
        return;
    }
    cli_table_cell(t, "%s", cli_policy_words(p).text);
    if (p->automatic) {
        cli_table_cell(t, "from %" PRIu32 " on", p->automatic);
    } else {
        cli_table_cell(t, "no");
    }
    if (compacts_beyond(p)) {
        cli_table_cell(t, "beyond %" PRIu32 " %%", compacts_beyond(p));
    } else {
        cli_table_cell(t, "no");
    }
    cli_table_cell(t, "%s", cli_text_duration((double)p->undo_s).text);
    cli_table_cell(t, "%s", cli_text_time(s->set_ns).text);
}

static ckd_status print_text(const ckd_policy_list *list, ckd_error *err) {
    cli_table *t = cli_table_new("RUN|KEEPS|AUTOMATIC|COMPACTS|UNDO|SINCE");
    for (size_t i = 0; i < list->count; i++) {
        print_row(t, &list->items[i]);
    }
    ckd_status status = cli_table_print(t, err);
    if (status == CKD_OK && !list->count) {
        puts("the store has no policy; nothing is deleted automatically");
    }
    return status;
}

static ckd_status print_result(const arguments *a, ckd_store *store, ckd_error *err) {
    ckd_policy_list *list;
    ckd_status status = ckd_store_policies(&list, store, err);
    if (status == CKD_OK && a->common.json) {
        json_t *items = json_array();
        for (size_t i = 0; i < list->count; i++) {
            cli_json_append(&items, json_policy(&list->items[i]));
        }
        status = cli_json_print(json_pack("{s:i, s:o}", "schema", 1, "policies", items), err);
    } else if (status == CKD_OK && cli_prints_text(&a->common)) {
        status = print_text(list, err);
    }
    ckd_policy_list_free(list);
    return status;
}

/* ------------------------------------------------------------------------------------------------------ changing */

/* Reports what the next application would do. A failure to find out is ignored. */
static void report_outlook(const arguments *a, ckd_store *store) {
    ckd_prune *plan;
    if (ckd_store_plan_prune(&plan, store, NULL, NULL) == CKD_OK) {
        printf("%" PRIu64 " of %zu checkpoints can be deleted now; ckptdelta prune %s deletes them\n",
               plan->deleted, plan->count, a->common.store);
        ckd_prune_free(plan);
    }
}

static ckd_status run(const arguments *a, ckd_error *err) {
    ckd_store *store = NULL;
    bool changes = a->sets || a->clears;
    ckd_status status = cli_open_store(&store, &a->common, changes ? CKD_OPEN_WRITE : CKD_OPEN_READ, err);
    if (status == CKD_OK && changes) {
        status = a->sets ? ckd_store_set_policy(store, &a->policy, err)
                         : ckd_store_clear_policy(store, a->policy.run, err);
        if (status == CKD_OK) {
            cli_committed("the policy is stored");
        }
    }
    THEN(status, print_result(a, store, err));
    if (status == CKD_OK && a->sets && cli_prints_text(&a->common)) {
        report_outlook(a, store);
    }
    ckd_store_close(store);
    return status;
}

int cmd_policy(int argc, char **argv) {
    static const struct argp_child children[] = {
        {&cli_common_argp, 0, 0, 0}, {&cli_policy_argp, 0, 0, 0}, {0}};
    static const struct argp argp = {options_table, parse, "[STORE]", doc, children, 0, 0};
    arguments a = {.common.command = "policy", .policy = CKD_POLICY_INIT};
    cli_parse_arguments(&argp, argc, argv, &a);
    ckd_error err;
    return run(&a, &err) == CKD_OK ? CLI_DONE : cli_fail(&err);
}
