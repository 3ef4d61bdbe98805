/* ckptdelta prune: deletes the checkpoints that a policy does not keep. */
#include <inttypes.h>
#include <stdio.h>

#include "cli/commands/commands.h"
#include "cli/output/output.h"
#include "cli/report/report.h"

enum { OPT_UNDO = 0x200 };

static const struct argp_option options_table[] = {
    {"undo", OPT_UNDO, "TIME", 0,
     "How long the deletion can be undone; 0s: not at all [default: 24h, or as the stored policy says]", 3},
    {"dry-run", 'n', 0, 0, "Delete nothing; show what would be deleted", 3},
    {0},
};

static const char doc[] =
    "Delete the checkpoints that no --keep option keeps; without such an option: those that the stored policies do not keep (ckptdelta help policy). Pinned and tagged checkpoints and the two newest healthy (not suspect) ones of each run are always kept; the latter are verified first. Deltas on deleted checkpoints load as before. Deleted checkpoints stay in the trash, and can be restored, until their time is over: ckptdelta help trash."
    "\vExamples:\n"
    "  ckptdelta prune ckpts --keep-last 5 --keep-every 10000 --dry-run\n"
    "  ckptdelta prune ckpts --run gpt --keep-best 3 --keep-newer 7d\n"
    "  ckptdelta prune ckpts --keep-last 2 --undo 0s\n"
    "  ckptdelta prune ckpts\n";

typedef struct arguments {
    cli_options common;
    ckd_policy policy;
    ckd_delete_options deletion;
    bool stored, undo_given, dry_run; /* stored: apply the stored policies */
} arguments;

static error_t parse(int key, char *arg, struct argp_state *state) {
    arguments *a = state->input;
    switch (key) {
    case ARGP_KEY_INIT:
        state->child_inputs[0] = &a->common;
        state->child_inputs[1] = &a->policy;
        return 0;
    case OPT_UNDO:
        a->deletion.undo_s = cli_seconds(state, "--undo", arg);
        a->undo_given = true;
        return 0;
    case 'n':
        a->dry_run = true;
        return 0;
    case ARGP_KEY_END:
        a->stored = !cli_policy_given(&a->policy, state);
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static const struct {
    unsigned bit;
    const char *word;
} reasons[] = {{CKD_KEPT_LAST, "last"},      {CKD_KEPT_EVERY, "every"},   {CKD_KEPT_FIRST, "first"},
               {CKD_KEPT_BEST, "best"},      {CKD_KEPT_NEW, "new"},       {CKD_KEPT_SAFETY, "safety"},
               {CKD_KEPT_PINNED, "pinned"},  {CKD_KEPT_TAGGED, "tagged"}, {CKD_KEPT_WITHIN, "within"},
               {CKD_KEPT_DAILY, "daily"},    {CKD_KEPT_WEEKLY, "weekly"}, {CKD_KEPT_MONTHLY, "monthly"},
               {CKD_KEPT_SUSPECT, "suspect"}};
enum { REASONS = sizeof(reasons) / sizeof(reasons[0]) };

static json_t *json_item(const ckd_retained *r) {
    json_t *why = json_array();
    for (int i = 0; i < REASONS; i++) {
        if (r->kept & reasons[i].bit) {
            cli_json_append(&why, json_string(reasons[i].word));
        }
    }
    return json_pack("{s:s, s:b, s:o, s:I}", "checkpoint", cli_ref_text_of(&r->checkpoint).text, "deleted",
                     !r->kept, "kept_as", why, "stored_bytes", (json_int_t)r->checkpoint.stored_bytes);
}

static ckd_status print_json(const ckd_prune *p, bool dry_run, ckd_error *err) {
    json_t *items = json_array();
    for (size_t i = 0; i < p->count; i++) {
        cli_json_append(&items, json_item(&p->items[i]));
    }
    return cli_json_print(json_pack("{s:i, s:b, s:I, s:I, s:I, s:o}", "schema", 1, "dry_run", dry_run,
                                    "deleted", (json_int_t)p->deleted, "bytes", (json_int_t)p->bytes,
                                    "compaction_bytes", (json_int_t)p->compaction_bytes, "checkpoints",
                                    items),
                          err);
}

static void print_reasons(cli_table *t, unsigned mask) {
    char text[128] = "";
    size_t used = 0;
    for (int i = 0; i < REASONS; i++) {
        if (mask & reasons[i].bit) {
            used +=
                (size_t)snprintf(text + used, sizeof(text) - used, "%s%s", used ? ", " : "", reasons[i].word);
        }
    }
    cli_table_cell(t, "%s", text);
}

/* Prints the bytes that pruning frees, when it frees them, and the bytes that remain for a compaction. */
static void print_freed(const arguments *a, const ckd_prune *p) {
    uint64_t undo_s = a->deletion.undo_s;
    printf("%s %" PRIu64 " of %zu checkpoints", a->dry_run ? "would delete" : "deleted", p->deleted,
           p->count);
    if (p->deleted) {
        printf(", which frees %s ", cli_text_size(p->bytes).text);
        printf(undo_s ? "when they leave the trash, after %s\n" : "now\n",
               cli_text_duration((double)undo_s).text);
    } else {
        putchar('\n');
    }
    if (p->compaction_bytes) {
        printf("%s: at most %s more, in files of which only a part is still read\n",
               p->deleted && undo_s ? "then ckptdelta compact can free" : "ckptdelta compact can free",
               cli_text_size(p->compaction_bytes).text);
    }
}

static ckd_status print_text(const arguments *a, const ckd_prune *p, ckd_error *err) {
    cli_table *t = cli_table_new("RUN|>STEP|KIND|>STORED||KEPT AS");
    for (size_t i = 0; i < p->count; i++) {
        const ckd_checkpoint *c = &p->items[i].checkpoint;
        cli_table_cell(t, "%s", c->run);
        cli_table_cell(t, "%" PRIu64, c->step);
        cli_table_cell(t, "%s", ckd_kind_name(c->kind));
        cli_table_cell(t, "%s", cli_text_size(c->stored_bytes).text);
        cli_table_cell(t, "%s", p->items[i].kept ? "keep" : a->dry_run ? "would delete" : "deleted");
        print_reasons(t, p->items[i].kept);
    }
    ckd_status status = cli_table_print(t, err);
    if (status != CKD_OK) {
        return status;
    }
    print_freed(a, p);
    if (p->deleted && !a->dry_run && a->deletion.undo_s) {
        cli_undo undo = {.count = 0};
        for (size_t i = 0; i < p->count; i++) {
            if (!p->items[i].kept) {
                cli_undo_add(&undo, &p->items[i].checkpoint);
            }
        }
        cli_undo_print(&undo, a->common.store, a->deletion.undo_s);
    }
    return CKD_OK;
}

/* Chooses the policy to apply and the undo time. *policy is NULL for all stored policies. */
static ckd_status choose_policy(const ckd_policy **policy, arguments *a, ckd_store *store, ckd_error *err) {
    const char *only = a->policy.run;
    *policy = &a->policy;
    if (!a->stored) {
        return CKD_OK;
    }
    ckd_policy_list *list = NULL;
    ckd_stored_policy found;
    ckd_status status =
        only ? ckd_store_policy(&found, store, only, err) : ckd_store_policies(&list, store, err);
    bool any = status == CKD_OK && (only || list->count);
    uint64_t undo_s = only && any ? found.policy.undo_s : 0;
    for (size_t i = 0; list && i < list->count; i++) {
        undo_s = list->items[i].policy.undo_s > undo_s ? list->items[i].policy.undo_s : undo_s;
    }
    ckd_policy_list_free(list);
    if (status == CKD_E_NOT_FOUND || (status == CKD_OK && !any)) {
        return cli_error(err, CKD_E_INVALID,
                         "say what to keep: " CLI_KEEP_OPTIONS "; or store a "
                         "policy, there is none%s%.128s: ckptdelta help policy",
                         only ? " for run " : "", only ? only : "");
    }
    if (status == CKD_OK) {
        a->deletion.undo_s = a->undo_given ? a->deletion.undo_s : undo_s;
        a->policy = only ? found.policy : a->policy;
        a->policy.run = only;
        *policy = only ? &a->policy : NULL;
    }
    return status;
}

static ckd_status run(arguments *a, ckd_error *err) {
    ckd_store *store = NULL;
    ckd_prune *done = NULL;
    const ckd_policy *policy = NULL;
    ckd_status status = cli_open_store(&store, &a->common, a->dry_run ? CKD_OPEN_READ : CKD_OPEN_WRITE, err);
    THEN(status, choose_policy(&policy, a, store, err));
    THEN(status, a->dry_run ? ckd_store_plan_prune(&done, store, policy, err)
                            : ckd_store_prune(&done, store, policy, &a->deletion, err));
    if (status == CKD_OK && !a->dry_run) {
        cli_finish_deletion(store, a->deletion.undo_s == 0);
    }
    if (status == CKD_OK && a->common.json) {
        status = print_json(done, a->dry_run, err);
    } else if (status == CKD_OK && cli_prints_text(&a->common)) {
        status = print_text(a, done, err);
    }
    ckd_prune_free(done);
    ckd_store_close(store);
    return status;
}

int cmd_prune(int argc, char **argv) {
    static const struct argp_child children[] = {
        {&cli_common_argp, 0, 0, 0}, {&cli_policy_argp, 0, 0, 0}, {0}};
    static const struct argp argp = {options_table, parse, "[STORE]", doc, children, 0, 0};
    arguments a = {.common.command = "prune", .policy = CKD_POLICY_INIT, .deletion = CKD_DELETE_OPTIONS_INIT};
    cli_parse_arguments(&argp, argc, argv, &a);
    ckd_error err;
    return run(&a, &err) == CKD_OK ? CLI_DONE : cli_fail(&err);
}
