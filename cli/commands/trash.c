/* ckptdelta trash: lists deleted checkpoints that can be restored, restores them, or removes them for good. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/commands/commands.h"
#include "cli/output/output.h"

enum { OPT_RESTORE = 0x200, OPT_EMPTY, OPT_ALL, OPT_GIVE_UP };

static const struct argp_option options_table[] = {
    {"restore", OPT_RESTORE, 0, 0, "Restore the named checkpoints; without names: everything in the trash",
     1},
    {"empty", OPT_EMPTY, 0, 0, "Remove for good what can no longer be restored", 2},
    {"all", OPT_ALL, 0, 0, "With --empty: also remove what could still be restored", 2},
    {"dry-run", 'n', 0, 0, "With --empty: remove nothing; show what would be removed", 2},
    {"give-up", OPT_GIVE_UP, 0, 0,
     "With --empty: also remove files that are needed to rebuild a missing chunk file or a lost manifest, which is then lost for good",
     2},
    {0},
};

static const char doc[] =
    "List the deleted checkpoints in the trash of a store, and until when each can be restored. When its time is over, the next command that opens the store for writing removes its files."
    "\vExamples:\n"
    "  ckptdelta trash ckpts\n"
    "  ckptdelta trash ckpts --restore gpt@200 gpt@300\n"
    "  ckptdelta trash ckpts --empty --all\n";

typedef struct arguments {
    cli_options common;
    cli_refs refs;
    bool restore, empty, all, dry_run, force;
} arguments;

static void check(const arguments *a, struct argp_state *state) {
    if (a->restore && a->empty) {
        argp_error(state, "--restore and --empty exclude each other");
    }
    if (a->refs.count && !a->restore) {
        argp_error(state, "checkpoints are named only with --restore");
    }
    if ((a->all || a->dry_run || a->force) && !a->empty) {
        argp_error(state, "--all, --dry-run and --give-up go with --empty");
    }
}

static error_t parse(int key, char *arg, struct argp_state *state) {
    arguments *a = state->input;
    switch (key) {
    case ARGP_KEY_INIT:
        state->child_inputs[0] = &a->common;
        return 0;
    case OPT_RESTORE:
        a->restore = true;
        return 0;
    case OPT_EMPTY:
        a->empty = true;
        return 0;
    case OPT_ALL:
        a->all = true;
        return 0;
    case 'n':
        a->dry_run = true;
        return 0;
    case OPT_GIVE_UP:
        a->force = true;
        return 0;
    case ARGP_KEY_ARG:
        return cli_take_store(&a->common, arg) ? 0 : cli_refs_add(&a->refs, arg, state);
    case ARGP_KEY_END:
        check(a, state);
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

/* ------------------------------------------------------------------------------------------------------- listing */

static ckd_status print_json(const ckd_trash *trash, ckd_error *err) {
    json_t *items = json_array();
    for (size_t i = 0; i < trash->count; i++) {
        const ckd_trashed *t = &trash->items[i];
        cli_json_append(&items,
                        json_pack("{s:s, s:s, s:s, s:I}", "checkpoint", cli_ref_text_of(&t->checkpoint).text,
                                  "deleted", cli_text_time(t->deleted_ns).text, "until",
                                  cli_text_time(t->until_ns).text, "stored_bytes",
                                  (json_int_t)t->checkpoint.stored_bytes));
    }
    return cli_json_print(json_pack("{s:i, s:I, s:o}", "schema", 1, "bytes", (json_int_t)trash->file_bytes,
                                    "checkpoints", items),
                          err);
}

static ckd_status print_text(const ckd_trash *trash, ckd_error *err) {
    cli_table *t = cli_table_new("RUN|>STEP|KIND|>STORED|DELETED|UNTIL");
    for (size_t i = 0; i < trash->count; i++) {
        const ckd_trashed *x = &trash->items[i];
        cli_table_cell(t, "%s", x->checkpoint.run);
        cli_table_cell(t, "%" PRIu64, x->checkpoint.step);
        cli_table_cell(t, "%s", ckd_kind_name(x->checkpoint.kind));
        cli_table_cell(t, "%s", cli_text_size(x->checkpoint.stored_bytes).text);
        cli_table_cell(t, "%s", cli_text_time(x->deleted_ns).text);
        cli_table_cell(t, "%s", cli_text_time(x->until_ns).text);
    }
    ckd_status status = cli_table_print(t, err);
    if (status == CKD_OK) {
        printf(trash->count ? "%zu in the trash, %s\n" : "the trash is empty\n", trash->count,
               cli_text_size(trash->file_bytes).text);
    }
    return status;
}

static ckd_status list(const arguments *a, ckd_store *store, ckd_error *err) {
    ckd_trash *trash;
    ckd_status status = ckd_store_trash(&trash, store, err);
    if (status == CKD_OK && a->common.json) {
        status = print_json(trash, err);
    } else if (status == CKD_OK && cli_prints_text(&a->common)) {
        status = print_text(trash, err);
    }
    ckd_trash_free(trash);
    return status;
}

/* ------------------------------------------------------------------------------------------------------ changing */

/* Finds a deleted checkpoint; among several with the same name, the last one. */
static ckd_status find_trashed(ckd_id *out, const ckd_trash *trash, const cli_ref *ref, ckd_error *err) {
    const ckd_trashed *found = NULL;
    for (size_t i = 0; i < trash->count; i++) {
        const ckd_checkpoint *c = &trash->items[i].checkpoint;
        found = c->step == ref->step && strcmp(c->run, ref->run) == 0 ? &trash->items[i] : found;
    }
    if (!found) {
        return cli_error(err, CKD_E_NOT_FOUND,
                         "%s@%" PRIu64 " is not in the trash; ckptdelta trash shows what is", ref->run,
                         ref->step);
    }
    *out = found->checkpoint.id;
    return CKD_OK;
}

static ckd_status check_one(const ckd_checkpoint *c, ckd_store *store, ckd_error *err) {
    ckd_verify_options o = CKD_VERIFY_OPTIONS_INIT;
    ckd_verify_result *r = NULL;
    o.run = c->run;
    o.step = c->step;
    o.one_step = o.quick = 1;
    ckd_status status = ckd_store_verify(&r, store, &o, err);
    if (status == CKD_OK && r->damage_count) {
        status = cli_error(err, CKD_E_CORRUPT,
                           "%s@%" PRIu64 " is restored, but damaged: %s (file %s); see ckptdelta repair",
                           c->run, c->step, r->damage[0].what, r->damage[0].file);
    }
    ckd_verify_result_free(r);
    return status;
}

/*
 * Verifies all stored bytes of the restored checkpoints, without decoding. Reports the first that is damaged, or else
 * the first that could not be verified.
 */
static ckd_status check_restored(const ckd_trash *trash, const ckd_id *ids, size_t count, ckd_store *store,
                                 ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < trash->count && status != CKD_E_CORRUPT; i++) {
        bool restored = false;
        for (size_t k = 0; k < count && !restored; k++) {
            restored = cli_has_id(&trash->items[i].checkpoint, &ids[k]);
        }
        ckd_error found;
        ckd_status checked = restored ? check_one(&trash->items[i].checkpoint, store, &found) : CKD_OK;
        if (checked == CKD_E_CORRUPT || (checked != CKD_OK && status == CKD_OK)) {
            *err = found;
            status = checked;
        }
    }
    return status;
}

typedef struct restoration {
    ckd_trash *trash;
    ckd_id *ids; /* restored */
    size_t count;
    ckd_error *left; /* by index in the trash: why the checkpoint stays there */
    size_t left_count;
} restoration;

static ckd_status restore_named(restoration *r, const arguments *a, ckd_store *store, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (; r->count < a->refs.count && status == CKD_OK; r->count++) {
        const cli_ref *ref = &a->refs.items[r->count];
        status = find_trashed(&r->ids[r->count], r->trash, ref, err);
        for (size_t i = 0; i < r->count && status == CKD_OK; i++) {
            if (memcmp(&r->ids[i], &r->ids[r->count], sizeof(r->ids[i])) == 0) {
                status = cli_error(err, CKD_E_INVALID, "%s@%" PRIu64 " is named twice", ref->run, ref->step);
            }
        }
    }
    return status == CKD_OK ? ckd_store_undelete(store, r->ids, r->count, err) : status;
}

/* now: the trash as it is now; NULL: it could not be read, and the checkpoint may be there. */
static bool may_be_in_trash(const ckd_trash *now, const ckd_id *id) {
    bool found = !now;
    for (size_t i = 0; now && i < now->count && !found; i++) {
        found = memcmp(&now->items[i].checkpoint.id, id, sizeof(*id)) == 0;
    }
    return found;
}

/*
 * Checkpoints that cannot be restored must not keep the others in the trash. If another process has restored or removed
 * one meanwhile, it does not count as left.
 */
static ckd_status restore_all(restoration *r, ckd_store *store, ckd_error *err) {
    size_t all = r->trash->count, failed = 0;
    ckd_trash *now = NULL;
    for (size_t i = 0; i < all; i++) {
        r->ids[i] = r->trash->items[i].checkpoint.id;
    }
    ckd_status status = ckd_store_undelete_each(r->left, store, r->ids, all, err);
    for (size_t i = 0; i < all && status == CKD_OK; i++) {
        failed += r->left[i].status != CKD_OK;
    }
    if (failed && ckd_store_trash(&now, store, NULL) != CKD_OK) {
        now = NULL;
    }
    for (size_t i = 0; i < all && status == CKD_OK; i++) {
        if (r->left[i].status == CKD_OK) {
            r->ids[r->count++] = r->ids[i];
        } else if (may_be_in_trash(now, &r->ids[i])) {
            r->left_count++;
        } else {
            r->left[i].status = CKD_OK;
        }
    }
    ckd_trash_free(now);
    return status;
}

static ckd_status print_restored(const arguments *a, const restoration *r, ckd_error *err) {
    if (a->common.json) {
        json_t *left = json_array();
        for (size_t i = 0; i < r->trash->count; i++) {
            if (r->left[i].status != CKD_OK) {
                cli_json_append(&left, json_pack("{s:s, s:o}", "checkpoint",
                                                 cli_ref_text_of(&r->trash->items[i].checkpoint).text, "why",
                                                 cli_json_text(r->left[i].message)));
            }
        }
        return cli_json_print(
            json_pack("{s:i, s:I, s:o}", "schema", 1, "restored", (json_int_t)r->count, "left", left), err);
    }
    if (cli_prints_text(&a->common)) {
        printf("restored %zu checkpoint%s\n", r->count, cli_plural(r->count));
    }
    return CKD_OK;
}

/* Names each checkpoint that stays in the trash. If there is only one, the error names it. */
static ckd_status report_left(const restoration *r, ckd_error *err) {
    const ckd_error *first = NULL;
    for (size_t i = 0; i < r->trash->count && r->left_count; i++) {
        const ckd_error *why = &r->left[i];
        first = first || why->status == CKD_OK ? first : why;
        if (why->status != CKD_OK && r->left_count > 1) {
            cli_note("%s", why->message);
        }
    }
    if (!first) {
        return CKD_OK;
    }
    *err = *first;
    if (r->left_count > 1) {
        snprintf(err->message, sizeof(err->message), "%zu checkpoints stay in the trash; the first: %.300s",
                 r->left_count, first->message);
    }
    return err->status;
}

static ckd_status restore(const arguments *a, ckd_store *store, ckd_error *err) {
    restoration r = {0};
    ckd_status status = ckd_store_trash(&r.trash, store, err);
    if (status != CKD_OK) {
        return status;
    }
    size_t max = a->refs.count > r.trash->count ? a->refs.count : r.trash->count;
    r.ids = calloc(max + 1, sizeof(*r.ids));
    r.left = calloc(max + 1, sizeof(*r.left));
    status = r.ids && r.left ? CKD_OK : cli_error_nomem(err);
    THEN(status, a->refs.count ? restore_named(&r, a, store, err) : restore_all(&r, store, err));
    if (status == CKD_OK && r.left_count) {
        cli_left_out();
    } else if (status == CKD_OK) {
        cli_committed("the checkpoints are restored");
    }
    ckd_error damage;
    ckd_status checked = status == CKD_OK ? check_restored(r.trash, r.ids, r.count, store, &damage) : CKD_OK;
    if (checked == CKD_E_CORRUPT) {
        cli_left_out();
    }
    THEN(status, print_restored(a, &r, err));
    if (status == CKD_OK && checked != CKD_OK) {
        *err = damage;
        status = checked;
    }
    THEN(status, report_left(&r, err));
    free(r.ids);
    free(r.left);
    ckd_trash_free(r.trash);
    return status;
}

static ckd_status empty(const arguments *a, ckd_store *store, ckd_error *err) {
    ckd_collected c;
    ckd_collect_options o = CKD_COLLECT_OPTIONS_INIT;
    o.all = a->all;
    o.dry_run = a->dry_run;
    o.force = a->force;
    ckd_status status = ckd_store_collect(&c, store, &o, err);
    if (status == CKD_OK && !a->dry_run) {
        cli_committed("the trash is emptied");
    }
    if (status == CKD_OK && a->common.json) {
        status =
            cli_json_print(json_pack("{s:i, s:b, s:I, s:I, s:I, s:I}", "schema", 1, "dry_run", a->dry_run,
                                     "checkpoints", (json_int_t)c.checkpoints, "files", (json_int_t)c.files,
                                     "bytes", (json_int_t)c.bytes, "waiting", (json_int_t)c.waiting),
                           err);
    } else if (status == CKD_OK && cli_prints_text(&a->common)) {
        printf("%s %" PRIu64 " checkpoint%s, %" PRIu64 " file%s, %s; %" PRIu64 " can still be restored\n",
               a->dry_run ? "would remove" : "removed", c.checkpoints, cli_plural(c.checkpoints), c.files,
               cli_plural(c.files), cli_text_size(c.bytes).text, c.waiting);
    }
    return status;
}

static ckd_status run(arguments *a, ckd_error *err) {
    ckd_store *store = NULL;
    ckd_open_mode mode = a->restore || a->empty ? CKD_OPEN_WRITE : CKD_OPEN_READ;
    /* opening must not remove anything: --empty counts its removals, and checkpoints to restore must not go first */
    a->common.keeps_trash = a->empty || a->restore;
    ckd_status status = cli_open_store(&store, &a->common, mode, err);
    THEN(status, a->restore ? restore(a, store, err) : a->empty ? empty(a, store, err) : list(a, store, err));
    ckd_store_close(store);
    return status;
}

int cmd_trash(int argc, char **argv) {
    static const struct argp_child children[] = {{&cli_common_argp, 0, 0, 0}, {0}};
    static const struct argp argp = {options_table, parse, "[STORE] [RUN@STEP...]", doc, children, 0, 0};
    arguments a = {.common.command = "trash"};
    cli_parse_arguments(&argp, argc, argv, &a);
    ckd_error err;
    int code = run(&a, &err) == CKD_OK ? CLI_DONE : cli_fail(&err);
    free(a.refs.items);
    return code;
}
