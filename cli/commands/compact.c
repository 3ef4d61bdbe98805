/* ckptdelta compact: rewrites checkpoints into a better form. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "cli/commands/commands.h"
#include "cli/commands/damage.h"
#include "cli/output/output.h"
#include "cli/report/report.h"

enum {
    OPT_DEPTH = 0x200,
    OPT_LOAD_COST,
    OPT_FOLD,
    OPT_UNDO,
    OPT_COLD,
    OPT_COLD_BUT,
    OPT_PACK,
    OPT_RATE,
    OPT_PLAN
};

static const struct argp_option options_table[] = {
    {"max-depth", OPT_DEPTH, "N", 0, "Apply at most N deltas to any block [default: 16]", 1},
    {"max-load-cost", OPT_LOAD_COST, "X", 0,
     "A load of a recoded block reads at most X times the bytes of a standalone block [default: 4]", 1},
    {"fold", OPT_FOLD, 0, 0,
     "Delete what the stored policies do not keep, after folding it into what builds on it", 1},
    {"undo", OPT_UNDO, "TIME", 0,
     "How long the deletion can be undone; 0s: not at all [default: 24h, or as the stored policy says]", 1},
    {"recode-older", OPT_COLD, "TIME", 0,
     "Recode what was saved longer ago than this, such as 7d, as small as possible", 1},
    {"recode-but", OPT_COLD_BUT, "N", 0, "Recode all but the N newest of each run as small as possible", 1},
    {"pack-below", OPT_PACK, "SIZE", 0,
     "Combine chunk files smaller than this, except those of each run's newest four checkpoints; 0: none [default: 256K]",
     1},
    {"rate", OPT_RATE, "SIZE", 0,
     "Read and write at most this much per second, such as 50M [default: no limit]", 2},
    {"dry-run", 'n', 0, 0, "Do everything, and discard the result: figures are exact, and nothing is changed",
     2},
    {"plan", OPT_PLAN, 0, 0, "Only show what would be done and why: quick, with approximate figures", 2},
    {0},
};

static const char doc[] =
    "Rewrite checkpoints whose chains are too long, combine small chunk files, and delete checkpoints that are no longer wanted: by --keep options, or with --fold by the stored policies, as ckptdelta prune does. Checkpoints that build on deleted ones are rewritten where that takes less space than the records of those. All checkpoints that stay load to the same bits as before. Each is rewritten separately, and read back and verified before its old files are removed. So this can be stopped at any time, continues where it stopped, and can run while training saves. Damaged checkpoints are left as they are and reported: exit status 4."
    "\vExamples:\n"
    "  ckptdelta compact ckpts --plan\n"
    "  ckptdelta compact ckpts gpt --max-depth 8 --rate 100M\n"
    "  ckptdelta compact ckpts --keep-every 1000 --keep-last 5 --undo 0s\n"
    "  ckptdelta compact ckpts --fold --recode-older 7d\n";

/* Bytes of chunk files, and the part of them that only the trash needs. */
typedef struct chunk_sizes {
    bool known;
    uint64_t all, trash;
} chunk_sizes;

typedef struct arguments {
    cli_options common;
    ckd_policy policy;
    ckd_delete_options deletion;
    ckd_compact_options compact;
    bool undo_given;
    chunk_sizes before, after;
} arguments;

static error_t bad(struct argp_state *state, const char *what, const char *arg) {
    argp_error(state, "%s, not '%s'", what, arg);
    return EINVAL;
}

static error_t parse_number(int key, char *arg, struct argp_state *state, ckd_compact_options *o) {
    uint64_t n = 0;
    switch (key) {
    case OPT_DEPTH:
        if (!cli_parse_u64(&n, arg) || n < 1 || n > UINT32_MAX) {
            return bad(state, "--max-depth is a number from 1 to 4294967295", arg);
        }
        o->max_depth = (uint32_t)n;
        return 0;
    case OPT_LOAD_COST:
        return cli_parse_double(&o->max_load_cost, arg) && o->max_load_cost >= 1
                   ? 0
                   : bad(state, "--max-load-cost is a number from 1 on", arg);
    case OPT_COLD_BUT:
        if (!cli_parse_u64(&n, arg) || n < 1 || n > UINT32_MAX) {
            return bad(state, "--recode-but is a number from 1 to 4294967295", arg);
        }
        o->cold_but_newest = (uint32_t)n;
        return 0;
    case OPT_PACK:
        if (!cli_parse_size(&o->pack_below, arg)) {
            return bad(state, "--pack-below is a size such as 100K or 4M, or 0", arg);
        }
        o->pack_below = o->pack_below ? o->pack_below : CKD_NO_PACKS;
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static void check_together(arguments *a, struct argp_state *state) {
    bool has_policy = cli_policy_given(&a->policy, state);
    a->compact.run = a->policy.run;
    a->compact.policy = has_policy ? &a->policy : NULL;
    a->compact.deletion = a->undo_given ? &a->deletion : NULL;
    if (has_policy && a->compact.stored_policies) {
        argp_error(state, "--fold and --keep options exclude each other");
    }
    if (a->undo_given && !has_policy && !a->compact.stored_policies) {
        argp_error(state, "--undo goes with --fold or --keep options, which delete");
    }
    if (a->compact.dry_run && a->compact.estimate) {
        argp_error(state, "--dry-run and --plan exclude each other");
    }
}

static error_t parse(int key, char *arg, struct argp_state *state) {
    arguments *a = state->input;
    switch (key) {
    case ARGP_KEY_INIT:
        state->child_inputs[0] = state->child_inputs[1] = &a->common;
        state->child_inputs[2] = &a->policy;
        return 0;
    case ARGP_KEY_ARG:
        return cli_take_run(&a->common, &a->policy.run, arg, state);
    case OPT_FOLD:
        a->compact.stored_policies = 1;
        return 0;
    case OPT_UNDO:
        a->deletion.undo_s = cli_seconds(state, "--undo", arg);
        a->undo_given = true;
        return 0;
    case OPT_COLD:
        a->compact.cold_after_s = cli_seconds(state, "--recode-older", arg);
        return 0;
    case OPT_RATE:
        a->compact.bytes_per_s = cli_rate(state, arg);
        return 0;
    case 'n':
        a->compact.dry_run = 1;
        return 0;
    case OPT_PLAN:
        a->compact.estimate = 1;
        return 0;
    case OPT_DEPTH:
    case OPT_LOAD_COST:
    case OPT_COLD_BUT:
    case OPT_PACK:
        return parse_number(key, arg, state, &a->compact);
    case ARGP_KEY_END:
        check_together(a, state);
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

/* ---- the result ---- */

static const struct {
    unsigned bit;
    const char *word, *sentence;
} reasons[] = {
    {CKD_COMPACT_FOLD, "fold", "builds on deleted checkpoints"},
    {CKD_COMPACT_DEPTH, "depth", "chains are too long"},
    {CKD_COMPACT_STALE, "stale", "chains have become shorter"},
    {CKD_COMPACT_COLD, "cold", "is old"},
    {CKD_COMPACT_PACK, "pack", "goes into one file with others"},
};
enum { REASONS = sizeof(reasons) / sizeof(reasons[0]) };

static json_t *json_item(const ckd_compacted *x) {
    json_t *why = json_array();
    for (int i = 0; i < REASONS; i++) {
        if (x->why & reasons[i].bit) {
            cli_json_append(&why, json_string(reasons[i].word));
        }
    }
    bool left = x->left.status != CKD_OK;
    return json_pack("{s:s, s:o, s:b, s:o, s:I, s:I, s:I, s:I, s:I, s:I}", "checkpoint",
                     cli_ref_text_of(&x->checkpoint).text, "why", why, "done", !left, "error",
                     cli_json_text(left ? x->left.message : NULL), "blocks", (json_int_t)x->blocks, "recoded",
                     (json_int_t)x->recoded, "bytes_before", (json_int_t)x->checkpoint.stored_bytes,
                     "bytes_after", (json_int_t)x->bytes, "depth_before", (json_int_t)x->checkpoint.depth,
                     "depth_after", (json_int_t)x->depth);
}

static ckd_status print_json(const arguments *a, const ckd_compaction *done, ckd_error *err) {
    json_t *items = json_array(), *goes = json_array();
    for (size_t i = 0; i < done->count; i++) {
        cli_json_append(&items, json_item(&done->items[i]));
    }
    for (size_t i = 0; done->pruned && i < done->pruned->count; i++) {
        if (!done->pruned->items[i].kept) {
            cli_json_append(&goes, json_string(cli_ref_text_of(&done->pruned->items[i].checkpoint).text));
        }
    }
    return cli_json_print(
        json_pack("{s:i, s:b, s:b, s:I, s:I, s:I, s:I, s:I, s:o, s:I, s:o}", "schema", 1, "dry_run",
                  a->compact.dry_run || a->compact.estimate, "estimated", a->compact.estimate, "looked_at",
                  (json_int_t)done->checkpoints, "left", (json_int_t)done->left, "bytes_before",
                  (json_int_t)done->before, "bytes_after", (json_int_t)done->after, "old_files_left",
                  (json_int_t)done->old_files, "deleted", goes, "deleted_bytes",
                  (json_int_t)(done->pruned ? done->pruned->bytes : 0), "checkpoints", items),
        err);
}

static void print_why(cli_table *t, const ckd_compacted *x) {
    char text[1024] = "";
    size_t used = 0;
    for (int i = 0; i < REASONS; i++) {
        if (x->why & reasons[i].bit) {
            used += (size_t)snprintf(text + used, sizeof(text) - used, "%s%s", used ? ", " : "",
                                     reasons[i].sentence);
        }
    }
    if (x->left.status != CKD_OK) {
        snprintf(text + used, sizeof(text) - used, "%sleft as it is: %.400s", used ? "; " : "",
                 x->left.message);
    }
    cli_table_cell(t, "%s", text);
}

static ckd_status print_table(const arguments *a, const ckd_compaction *done, ckd_error *err) {
    const char *about = a->compact.estimate ? "about " : "";
    cli_table *t = cli_table_new("RUN|>STEP|>BLOCKS|>RECODED|>DEPTH|>TO|>STORED|>TO|WHY");
    for (size_t i = 0; i < done->count; i++) {
        const ckd_compacted *x = &done->items[i];
        cli_table_cell(t, "%s", x->checkpoint.run);
        cli_table_cell(t, "%" PRIu64, x->checkpoint.step);
        cli_table_cell(t, "%" PRIu64, x->blocks);
        cli_table_cell(t, "%" PRIu64, x->recoded);
        cli_table_cell(t, "%u", (unsigned)x->checkpoint.depth);
        cli_table_cell(t, "%u", (unsigned)x->depth);
        cli_table_cell(t, "%s", cli_text_size(x->checkpoint.stored_bytes).text);
        cli_table_cell(t, "%s%s", about, cli_text_size(x->bytes).text);
        print_why(t, x);
    }
    return cli_table_print(t, err);
}

/* A store whose sizes are unknown is compacted nevertheless. */
static chunk_sizes sizes_of(ckd_store *store) {
    ckd_report *report;
    ckd_trash *trash;
    ckd_error why;
    chunk_sizes sizes = {.known = false};
    if (ckd_store_report(&report, store, &why) != CKD_OK) {
        return sizes;
    }
    sizes.all = report->chunk_bytes;
    ckd_report_free(report);
    if (ckd_store_trash(&trash, store, &why) == CKD_OK) {
        sizes.known = true;
        sizes.trash = trash->file_bytes;
        ckd_trash_free(trash);
    }
    return sizes;
}

/* Prints what the compaction freed, including files of deleted checkpoints on which nothing builds any more. */
static void print_sizes(const arguments *a) {
    if (!a->before.known || !a->after.known) {
        return;
    }
    printf("chunk files: %s instead of %s", cli_text_size(a->after.all).text,
           cli_text_size(a->before.all).text);
    if (a->after.trash) {
        printf("; removing what is in the trash frees %s: ckptdelta trash --empty --all",
               cli_text_size(a->after.trash).text);
    }
    putchar('\n');
}

static ckd_status print_text(const arguments *a, const ckd_compaction *done, ckd_error *err) {
    bool would = a->compact.dry_run || a->compact.estimate;
    ckd_status status = done->count ? print_table(a, done, err) : CKD_OK;
    if (status != CKD_OK) {
        return status;
    }
    printf("%s %zu of %" PRIu64 " checkpoint%s: %s instead of %s\n", would ? "would rewrite" : "rewrote",
           done->count - (size_t)done->left, done->checkpoints, cli_plural(done->checkpoints),
           cli_text_size(done->after).text, cli_text_size(done->before).text);
    print_sizes(a);
    if (done->pruned) {
        printf("%s %" PRIu64 " checkpoint%s, %s\n", would ? "would delete" : "deleted", done->pruned->deleted,
               cli_plural(done->pruned->deleted), cli_text_size(done->pruned->bytes).text);
    }
    if (done->left) {
        printf("left %" PRIu64 " checkpoint%s unchanged: see above, and ckptdelta verify %s\n", done->left,
               cli_plural(done->left), a->common.store);
    }
    if (done->old_files) {
        printf("%" PRIu64
               " old files are still being read; the next open for writing or compaction removes them\n",
               done->old_files);
    }
    return CKD_OK;
}

static ckd_status compact(ckd_compaction **out, arguments *a, ckd_store *store, ckd_error *err) {
    cli_progress progress;
    cli_interrupt_catch();
    cli_progress_begin(&progress, a->compact.dry_run ? "trying" : "compacting", a->common.quiet);
    a->compact.on_progress = cli_progress_update;
    a->compact.progress_context = &progress;
    ckd_status status = ckd_compact(out, store, &a->compact, err);
    cli_progress_end(&progress);
    return status;
}

static ckd_status damage_status(const ckd_compaction *done, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < done->count && status == CKD_OK; i++) {
        status = cli_skip_is_damage(&done->items[i].left, err);
    }
    return status;
}

static ckd_status run(arguments *a, ckd_error *err) {
    ckd_store *store = NULL;
    ckd_compaction *done = NULL;
    bool real = !a->compact.dry_run && !a->compact.estimate;
    a->common.keeps_trash = !real;
    ckd_status status = cli_open_store(&store, &a->common, CKD_OPEN_WRITE, err);
    if (status == CKD_OK && real) {
        a->before = sizes_of(store);
    }
    THEN(status, cli_check_run(store, a->policy.run, err));
    THEN(status, compact(&done, a, store, err));
    ckd_error damage;
    ckd_status damaged = status == CKD_OK ? damage_status(done, &damage) : CKD_OK;
    if (damaged != CKD_OK) {
        cli_left_out();
    }
    if (status == CKD_OK && real) {
        cli_committed("the store is compacted");
        if (done->pruned && a->undo_given) {
            cli_finish_deletion(store, a->deletion.undo_s == 0);
        }
        a->after = sizes_of(store);
    }
    if (status == CKD_OK && a->common.json) {
        status = print_json(a, done, err);
    } else if (status == CKD_OK && cli_prints_text(&a->common)) {
        status = print_text(a, done, err);
    }
    if (status == CKD_OK && damaged != CKD_OK) {
        *err = damage;
        status = damaged;
    }
    ckd_compaction_free(done);
    ckd_store_close(store);
    return status;
}

int cmd_compact(int argc, char **argv) {
    static const struct argp_child children[] = {
        {&cli_common_argp, 0, 0, 0}, {&cli_threads_argp, 0, 0, 0}, {&cli_policy_argp, 0, 0, 0}, {0}};
    static const struct argp argp = {options_table, parse, "[STORE] [RUN]", doc, children, 0, 0};
    arguments a = {.common.command = "compact",
                   .policy = CKD_POLICY_INIT,
                   .deletion = CKD_DELETE_OPTIONS_INIT,
                   .compact = CKD_COMPACT_OPTIONS_INIT};
    cli_parse_arguments(&argp, argc, argv, &a);
    ckd_error err;
    return run(&a, &err) == CKD_OK ? CLI_DONE : cli_fail_with_hint(&err, &a.common);
}
