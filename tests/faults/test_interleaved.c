/*
 * Two writers on one store: a command runs, and at one of its steps another one begins and ends. Every pair of commands
 * is tried at every step of the first, which finds what depends on the order of two commands. No command may call
 * anything damaged, no checkpoint that none of them deletes may be lost, and no values may be wrong.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/file.h"
#include "tests/support/level.h"
#include "tests/support/scenes.h"
#include "tests/support/tempdir.h"

/* SCENE_RUN has the steps 0 to 4, of which the last is in the trash. A second store has all of them and COPIED. */
enum { TRASHED = 4, SAVED = 5, COPIED = 6, STEPS };
#define OTHER_RUN "other"

/* One of the two writers. */
typedef struct party {
    ckd_store *store; /* NULL: it could not be opened, as the other one has a lock */
    ckd_id saved;     /* of step SAVED */
    ckd_status status;
    ckd_error err;
} party;

static char *prepared, *source, *folder; /* folder: of the present case */
static char damaged[96];                 /* a chunk file that is damaged in each case; "": none */
static ckd_id ids[STEPS];

/* ---- commands ---- */

static ckd_store *open_in(const char *where, ckd_open_mode mode) {
    ckd_store_options o = CKD_STORE_OPTIONS_INIT;
    ckd_store *store = NULL;
    ckd_error err = {0};
    o.threads = 1;
    o.lock_timeout_ms = 1; /* what the interrupted command has locked stays locked */
    if (ckd_store_open(&store, store_path_of(where, ""), mode, &o, &err) != CKD_OK &&
        err.status != CKD_E_BUSY) {
        fail_msg("open: %s (%s)", err.message, err.file);
    }
    return store;
}

static void check_found(const char *name, const ckd_verify_result *r) {
    if (r->damage_count) {
        fail_msg("%s: %s: %s", name, r->damage[0].file, r->damage[0].what);
    }
}

static ckd_status saves(party *p) {
    ckd_checkpoint info;
    scene s = scene_of(SAVED);
    ckd_status status = scene_save(&info, p->store, &s, &p->err);
    p->saved = status == CKD_OK ? info.id : p->saved;
    return status;
}

static ckd_status loads(party *p) {
    scene s = scene_of(2);
    return scene_load(p->store, &s, &p->err);
}

static ckd_status deletes(party *p) {
    ckd_delete_options o = CKD_DELETE_OPTIONS_INIT;
    o.undo_s = 0;
    ckd_status status = ckd_store_delete(p->store, &ids[1], 1, &o, &p->err);
    return status == CKD_OK ? ckd_store_collect(NULL, p->store, NULL, &p->err) : status;
}

static ckd_status restores(party *p) {
    return ckd_store_undelete(p->store, &ids[TRASHED], 1, &p->err);
}

static ckd_status empties(party *p) {
    ckd_collect_options o = CKD_COLLECT_OPTIONS_INIT;
    o.all = 1;
    return ckd_store_collect(NULL, p->store, &o, &p->err);
}

static ckd_status renames(party *p) {
    return ckd_store_rename_run(NULL, p->store, SCENE_RUN, OTHER_RUN, NULL, &p->err);
}

static ckd_status compact(party *p, const ckd_compact_options *o) {
    return ckd_compact(NULL, p->store, o, &p->err);
}

static ckd_status compacts(party *p) {
    ckd_compact_options o = CKD_COMPACT_OPTIONS_INIT;
    o.max_depth = 1;
    return compact(p, &o);
}

static ckd_status folds(party *p) {
    ckd_compact_options o = CKD_COMPACT_OPTIONS_INIT;
    ckd_policy policy = CKD_POLICY_INIT;
    ckd_delete_options now = CKD_DELETE_OPTIONS_INIT;
    now.undo_s = 0;
    policy.keep_last = 2;
    o.policy = &policy;
    o.deletion = &now;
    return compact(p, &o);
}

static ckd_status prunes(party *p) {
    ckd_prune *pruned = NULL;
    ckd_policy policy = CKD_POLICY_INIT;
    ckd_delete_options now = CKD_DELETE_OPTIONS_INIT;
    now.undo_s = 0;
    policy.keep_last = 2;
    ckd_status status = ckd_store_prune(&pruned, p->store, &policy, &now, &p->err);
    ckd_prune_free(pruned);
    return status;
}

static ckd_status makes_parity(party *p) {
    ckd_parity_result *r = NULL;
    ckd_parity_options o = CKD_PARITY_OPTIONS_INIT;
    o.data = 2;
    o.parity = 1;
    ckd_status status = ckd_store_parity(&r, p->store, &o, &p->err);
    if (r) {
        check_found("parity", r->found);
    }
    ckd_parity_result_free(r);
    return status;
}

static ckd_status repairs(party *p) {
    ckd_repair_result *r = NULL;
    ckd_repair_options o = CKD_REPAIR_OPTIONS_INIT;
    ckd_status status = ckd_store_repair(&r, p->store, &o, &p->err);
    if (r) {
        check_found("repair", r->left);
        if (r->repaired_count && !damaged[0]) {
            fail_msg("repair: %s: %s", r->repaired[0].file, r->repaired[0].what);
        }
    }
    ckd_repair_result_free(r);
    return status;
}

static ckd_status verifies(party *p) {
    ckd_verify_result *r = NULL;
    ckd_status status = ckd_store_verify(&r, p->store, NULL, &p->err);
    if (r) {
        check_found("verify", r);
    }
    ckd_verify_result_free(r);
    return status;
}

static ckd_status verifies_run(party *p) {
    ckd_verify_result *r = NULL;
    ckd_verify_options o = CKD_VERIFY_OPTIONS_INIT;
    o.run = SCENE_RUN;
    ckd_status status = ckd_store_verify(&r, p->store, &o, &p->err);
    if (r) {
        check_found("verify", r);
        assert_true(r->checkpoints > 0);
    }
    ckd_verify_result_free(r);
    return status;
}

static ckd_status scrubs(party *p) {
    ckd_scrub_result *r = NULL;
    ckd_scrub_options o = CKD_SCRUB_OPTIONS_INIT;
    ckd_status status = ckd_store_scrub(&r, p->store, &o, &p->err);
    if (r) {
        check_found("scrub", r->found);
    }
    ckd_scrub_result_free(r);
    return status;
}

static ckd_status marks(party *p) {
    ckd_policy policy = CKD_POLICY_INIT;
    policy.run = SCENE_RUN;
    policy.keep_last = 3;
    ckd_status status = ckd_store_set_tag(p->store, "best", &ids[3], 1, &p->err);
    status = status == CKD_OK ? ckd_store_pin(p->store, &ids[2], "why", &p->err) : status;
    return status == CKD_OK ? ckd_store_set_policy(p->store, &policy, &p->err) : status;
}

static ckd_status reports(party *p) {
    ckd_report *r = NULL;
    ckd_checkpoint_list *list = NULL;
    ckd_status status = ckd_store_list(&list, p->store, NULL, &p->err);
    ckd_checkpoint_list_free(list);
    status = status == CKD_OK ? ckd_store_report(&r, p->store, &p->err) : status;
    ckd_report_free(r);
    return status;
}

/* Copies step COPIED, which this store lacks, with what it builds on. */
static ckd_status fetches(party *p) {
    ckd_store *from = open_in(source, CKD_OPEN_READ);
    ckd_copy_options o = CKD_COPY_OPTIONS_INIT;
    o.checkpoints = &ids[COPIED];
    o.count = 1;
    ckd_status status = ckd_copy(NULL, p->store, from, &o, &p->err);
    ckd_store_close(from);
    return status;
}

static ckd_status pushes(party *p) {
    char *empty = tempdir_create();
    ckd_store *to = open_in(empty, CKD_OPEN_CREATE);
    ckd_status status = ckd_copy(NULL, to, p->store, NULL, &p->err);
    party check = {.store = to};
    assert_int_equal(verifies(&check), CKD_OK);
    ckd_store_close(to);
    tempdir_remove(empty);
    return status;
}

/* deletes: bits of the steps that the command may delete */
typedef struct command {
    const char *name;
    ckd_status (*run)(party *p);
    unsigned deletes;
} command;

static const command commands[] = {
    {"save", saves, 0},
    {"load", loads, 0},
    {"delete", deletes, 2},
    {"restore", restores, 0},
    {"empty the trash", empties, 1 << TRASHED},
    {"rename", renames, 0},
    {"compact", compacts, 0},
    {"fold", folds, 7},
    {"prune", prunes, 7},
    {"parity", makes_parity, 0},
    {"repair", repairs, 0},
    {"verify", verifies, 0},
    {"verify a run", verifies_run, 0},
    {"scrub", scrubs, 0},
    {"mark", marks, 0},
    {"report", reports, 0},
    {"fetch", fetches, 0},
    {"push", pushes, 0},
};
enum { COMMANDS = sizeof(commands) / sizeof(commands[0]) };

/* ---- one case ---- */

typedef struct meeting {
    const command *first, *second;
    unsigned long at, seen; /* the second command runs at this step of the first */
    party a, b;
} meeting;

static void act(party *p, const command *c) {
    p->status = CKD_E_BUSY;
    p->store = open_in(folder, CKD_OPEN_WRITE);
    if (p->store) {
        p->status = c->run(p);
        ckd_store_close(p->store);
    }
}

static int meet(void *context, file_op step, const char *path) {
    meeting *m = context;
    (void)step;
    if (strstr(path, "catalog.db") || ++m->seen != m->at) {
        return 0;
    }
    file_set_fault_hook(NULL, NULL);
    act(&m->b, m->second);
    return 0;
}

/* The other command may have taken the name that this one makes, or removed what it works on. */
static bool may_fail(ckd_status status, const command *c, const command *other) {
    bool same = c->run == other->run;
    return status == CKD_E_BUSY || (status == CKD_E_EXISTS && same) ||
           (status == CKD_E_NOT_FOUND && (same || other->deletes || other->run == renames));
}

static void check_party(const meeting *m, const party *p, const command *c, const command *other) {
    if (p->status != CKD_OK && !may_fail(p->status, c, other)) {
        fail_msg("%s at step %lu of %s: %s: %s: %s", m->second->name, m->at, m->first->name, c->name,
                 ckd_status_name(p->status), p->err.message);
    }
}

static void check_loads(const meeting *m, ckd_store *store, const ckd_id *id, uint64_t step) {
    scene s = scene_of(step);
    ckd_error err = {0};
    if (scene_load_id(store, id, &s, &err) != CKD_OK) {
        fail_msg("%s at step %lu of %s: step %llu: %s", m->second->name, m->at, m->first->name,
                 (unsigned long long)step, err.message);
    }
}

/* The catalog was closed by both, so whatever they left is complete now. */
static void check_store(const meeting *m) {
    party p = {.store = open_in(folder, CKD_OPEN_WRITE)};
    unsigned deleted = m->first->deletes | m->second->deletes;
    for (uint64_t step = 0; step < TRASHED; step++) {
        if (!(deleted >> step & 1)) {
            check_loads(m, p.store, &ids[step], step);
        }
    }
    const party *both[] = {&m->a, &m->b};
    const command *done[] = {m->first, m->second};
    for (int i = 0; i < 2; i++) {
        if (both[i]->status != CKD_OK) {
            continue;
        }
        if (done[i]->run == saves) {
            check_loads(m, p.store, &both[i]->saved, SAVED);
        } else if (done[i]->run == restores) {
            check_loads(m, p.store, &ids[TRASHED], TRASHED);
        } else if (done[i]->run == fetches) {
            check_loads(m, p.store, &ids[COPIED], COPIED);
        }
    }
    assert_int_equal(verifies(&p), CKD_OK);
    ckd_store_close(p.store);
}

static void damage(void) {
    size_t size;
    const char *path = store_path_of(folder, damaged);
    unsigned char *data = read_whole_file(path, &size);
    data[size / 2] ^= 1;
    write_whole_file(path, data, size);
    free(data);
}

/* Returns false if the first command ended before that step. */
static bool play(const command *first, const command *second, unsigned long at) {
    meeting m = {.first = first, .second = second, .at = at};
    folder = tempdir_create();
    tree_copy(store_path_of(prepared, ""), store_path_of(folder, ""));
    if (damaged[0]) {
        damage();
    }
    file_set_fault_hook(meet, &m);
    act(&m.a, first);
    file_set_fault_hook(NULL, NULL);
    bool met = m.seen >= at;
    if (met) {
        check_party(&m, &m.a, first, second);
        check_party(&m, &m.b, second, first);
        check_store(&m);
    }
    tempdir_remove(folder);
    return met;
}

/* ---- all cases ---- */

static int prepare(void **state) {
    ckd_delete_options o = CKD_DELETE_OPTIONS_INIT;
    (void)state;
    prepared = tempdir_create();
    source = tempdir_create();
    scene_make(prepared, 0, TRASHED + 1);
    tree_copy(store_path_of(prepared, ""), store_path_of(source, ""));
    ckd_store *store = open_in(source, CKD_OPEN_WRITE);
    scene s = scene_of(COPIED);
    assert_int_equal(scene_save(NULL, store, &s, NULL), CKD_OK);
    for (uint64_t step = 0; step < STEPS; step++) {
        ckd_checkpoint found = {0};
        assert_int_equal(ckd_store_find(&found, store, SCENE_RUN, step, NULL),
                         step == SAVED ? CKD_E_NOT_FOUND : CKD_OK);
        ids[step] = found.id;
    }
    ckd_store_close(store);
    store = open_in(prepared, CKD_OPEN_WRITE);
    party p = {.store = store};
    assert_int_equal(makes_parity(&p), CKD_OK);
    assert_int_equal(ckd_store_delete(store, &ids[TRASHED], 1, &o, NULL), CKD_OK);
    ckd_store_close(store);
    return 0;
}

static int clean_up(void **state) {
    (void)state;
    tempdir_remove(prepared);
    tempdir_remove(source);
    return 0;
}

/* Parity covers each file, so a repair mends it, or the file goes meanwhile. */
static void test_a_repair(const char *file, const command *second) {
    char name[sizeof(damaged) + 32];
    command repair = {"repair of damage", repairs, 0};
    unsigned long stride = test_stride(211, 71, 1);
    snprintf(damaged, sizeof(damaged), "data/c/%s", file);
    snprintf(name, sizeof(name), "damage, meanwhile %s", second->name);
    for (unsigned long at = test_first(name, stride); play(&repair, second, at); at += stride) {
    }
    damaged[0] = '\0';
}

static void test_repairs(void **state) {
    static const char *const names[] = {"rename", "delete", "mark"};
    dir_list files;
    (void)state;
    assert_int_equal(dir_list_read(&files, store_path_of(prepared, "data/c"), NULL), CKD_OK);
    assert_true(files.count >= TRASHED);
    for (size_t i = 0; i < files.count; i++) {
        for (int k = 0; k < COMMANDS; k++) {
            for (size_t n = 0; n < sizeof(names) / sizeof(names[0]); n++) {
                if (strcmp(commands[k].name, names[n]) == 0) {
                    test_a_repair(files.names[i], &commands[k]);
                }
            }
        }
    }
    dir_list_free(&files);
}

typedef struct pair {
    const command *first, *second;
    char name[64];
} pair;

static void test_pair(void **state) {
    const pair *p = *state;
    unsigned long stride = test_stride(101, 47, 1), at = test_first(p->name, stride);
    while (play(p->first, p->second, at)) {
        at += stride;
    }
}

static int remove_hook(void **state) {
    (void)state;
    file_set_fault_hook(NULL, NULL);
    return 0;
}

int main(void) {
    static pair pairs[COMMANDS * COMMANDS];
    static struct CMUnitTest tests[COMMANDS * COMMANDS + 1];
    for (size_t i = 0; i < COMMANDS * COMMANDS; i++) {
        pair *p = &pairs[i];
        *p = (pair){.first = &commands[i / COMMANDS], .second = &commands[i % COMMANDS]};
        snprintf(p->name, sizeof(p->name), "%s, meanwhile %s", p->first->name, p->second->name);
        tests[i] = (struct CMUnitTest){p->name, test_pair, NULL, remove_hook, p};
    }
    tests[COMMANDS * COMMANDS] = (struct CMUnitTest){"test_repairs", test_repairs, NULL, remove_hook, NULL};
    return run_sampled("interleaved", tests, 5, prepare, clean_up);
}
