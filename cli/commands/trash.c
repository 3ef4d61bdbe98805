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

/* Finds a deleted checkpoint; of several with the same name, the last one. */
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

/* Verifies all stored bytes of the restored checkpoints, without decoding. */
static ckd_status check_restored(const ckd_trash *trash, const ckd_id *ids, size_t count, ckd_store *store,
                                 ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < trash->count && status == CKD_OK; i++) {
        bool restored = false;
        for (size_t k = 0; k < count && !restored; k++) {
            restored = memcmp(&ids[k], &trash->items[i].checkpoint.id, sizeof(ids[k])) == 0;
        }
        status = restored ? check_one(&trash->items[i].checkpoint, store, err) : CKD_OK;
    }
    return status;
}

static ckd_status restore(const arguments *a, ckd_store *store, ckd_error *err) {
    ckd_trash *trash;
    ckd_status status = ckd_store_trash(&trash, store, err);
    if (status != CKD_OK) {
        return status;
    }
    size_t count = a->refs.count ? a->refs.count : trash->count;
    ckd_id *ids = calloc(count + 1, sizeof(*ids));
    status = ids ? CKD_OK : cli_error_nomem(err);
    for (size_t i = 0; i < count && status == CKD_OK; i++) {
        if (a->refs.count) {
            status = find_trashed(&ids[i], trash, &a->refs.items[i], err);
        } else {
            ids[i] = trash->items[i].checkpoint.id;
        }
    }
    THEN(status, ckd_store_undelete(store, ids, count, err));
    if (status == CKD_OK) {
        cli_committed("the checkpoints are restored");
    }
    if (status == CKD_OK && a->common.json) {
        status = cli_json_print(json_pack("{s:i, s:I}", "schema", 1, "restored", (json_int_t)count), err);
    } else if (status == CKD_OK && cli_prints_text(&a->common)) {
        printf("restored %zu checkpoint%s\n", count, count == 1 ? "" : "s");
    }
    THEN(status, check_restored(trash, ids, count, store, err));
    free(ids);
    ckd_trash_free(trash);
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
        printf("%s %" PRIu64 " checkpoints, %" PRIu64 " files, %s; %" PRIu64 " can still be restored\n",
               a->dry_run ? "would remove" : "removed", c.checkpoints, c.files, cli_text_size(c.bytes).text,
               c.waiting);
    }
    return status;
}

static ckd_status run(const arguments *a, ckd_error *err) {
    ckd_store *store = NULL;
    ckd_open_mode mode = a->restore || a->empty ? CKD_OPEN_WRITE : CKD_OPEN_READ;
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
