/*
 * Making parity removes groups that are no longer of use, and so does a collection. Neither removes one that a damaged
 * file, or a checkpoint whose manifest is lost, still needs. Settings do not matter for that.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <unistd.h>

#include "base/file.h"
#include "engine/integrity/internal.h"
#include "engine/store/handle.h"
#include "tests/support/compactions.h"
#include "tests/support/scenes.h"
#include "tests/support/scratch.h"
#include "tests/support/tempdir.h"

#define OTHER_RUN "other"

static void must(ckd_status status, const ckd_error *err) {
    if (status != CKD_OK) {
        fail_msg("%s: %s (%s)", ckd_status_name(status), err->message, err->file);
    }
}

static ckd_store *open_store(const char *dir, ckd_open_mode mode) {
    ckd_store *store;
    ckd_error err = {0};
    must(scene_open(&store, dir, mode, &err), &err);
    return store;
}

/* Saves a step of the scene's run, as a delta on the step before, under this name. */
static ckd_id save_delta(ckd_store *store, const char *run, uint64_t step) {
    ckd_save_options o = CKD_SAVE_OPTIONS_INIT;
    ckd_save *save;
    ckd_checkpoint c;
    ckd_error err = {0};
    scene s = scene_of(step);
    o.run = run;
    o.step = step;
    o.parent_run = SCENE_RUN;
    o.parent_step = step - 1;
    o.max_load_cost = 1000;
    must(ckd_save_begin(&save, store, &o, &err), &err);
    must(scene_finish(&c, save, &s, &err), &err);
    return c.id;
}

static void save_base(ckd_store *store, uint64_t step) {
    scene s = scene_of(step);
    ckd_error err = {0};
    s.base = true;
    must(scene_save(NULL, store, &s, &err), &err);
}

typedef struct parity_run {
    const char *run;
    uint32_t data, parity;
    bool off;
} parity_run;

typedef struct made {
    uint64_t groups, removed;
    size_t damage;
} made;

static made make_parity(ckd_store *store, const parity_run *p) {
    ckd_parity_options o = CKD_PARITY_OPTIONS_INIT;
    ckd_parity_result *r;
    ckd_error err = {0};
    o.run = p->run;
    o.data = p->data;
    o.parity = p->parity;
    o.off = p->off;
    must(ckd_store_parity(&r, store, &o, &err), &err);
    made out = {r->groups, r->removed_groups, r->found->damage_count};
    ckd_parity_result_free(r);
    return out;
}

/* As a nightly call does. */
static made renew_parity(ckd_store *store) {
    return make_parity(store, &(parity_run){.run = NULL});
}

static uint64_t covered(ckd_store *store) {
    ckd_parity_status *s;
    ckd_error err = {0};
    must(ckd_store_parity_status(&s, store, &err), &err);
    uint64_t count = s->covered_files;
    ckd_parity_status_free(s);
    return count;
}

/* Files that were rebuilt, and are of no use, have names of their own until they go. */
static void check_nothing_unfinished(const ckd_store *store) {
    ckd_id any = {{0}};
    pathname p = path_rebuilt(store->path, &any);
    char *name = strrchr(p.text, '/');
    const char *end = name + CKD_ID_TEXT; /* behind the slash and the digits */
    dir_list list;
    *name = '\0';
    assert_int_equal(dir_list_read(&list, p.text, NULL), CKD_OK);
    for (size_t i = 0; i < list.count; i++) {
        assert_null(strstr(list.names[i], end));
    }
    dir_list_free(&list);
}

/* Repairs the store. Everything must be right afterwards. Returns how many files were repaired. */
static size_t repair_all(ckd_store *store) {
    ckd_repair_result *r;
    ckd_verify_result *v;
    ckd_error err = {0};
    must(ckd_store_repair(&r, store, NULL, &err), &err);
    if (r->left->damage_count) {
        fail_msg("%s: %s", r->left->damage[0].file, r->left->damage[0].what);
    }
    size_t count = r->repaired_count;
    ckd_repair_result_free(r);
    check_nothing_unfinished(store);
    must(ckd_store_verify(&v, store, NULL, &err), &err);
    assert_int_equal(v->damage_count, 0);
    ckd_verify_result_free(v);
    return count;
}

/* The only chunk file that the newest manifest names as its own. */
static pathname only_file(ckd_store *store, const ckd_checkpoint *c) {
    manifest m;
    ckd_error err = {0};
    must(store_read_manifest(&m, store, c->run, c->step, c->generation, &err), &err);
    assert_int_equal(m.own_count, 1);
    pathname path = path_chunk(store->path, &m.files[0].id, "");
    manifest_free(&m);
    return path;
}

static pathname file_of(ckd_store *store, uint64_t step) {
    ckd_checkpoint c;
    ckd_error err = {0};
    must(ckd_store_find(&c, store, SCENE_RUN, step, &err), &err);
    return only_file(store, &c);
}

typedef enum harm { MISSING, ROTTEN, SHORT, HARMS } harm;

static void damage(const char *path, harm how) {
    size_t size;
    unsigned char *data = read_whole_file(path, &size);
    if (how == MISSING) {
        assert_int_equal(unlink(path), 0);
    } else {
        data[size / 2] ^= 0x10;
        write_whole_file(path, data, how == SHORT ? size / 2 : size);
    }
    free(data);
}

static void delete_step(ckd_store *store, uint64_t step, uint64_t undo_s) {
    ckd_checkpoint c;
    ckd_delete_options o = CKD_DELETE_OPTIONS_INIT;
    ckd_error err = {0};
    o.undo_s = undo_s;
    must(ckd_store_find(&c, store, SCENE_RUN, step, &err), &err);
    must(ckd_store_delete(store, &c.id, 1, &o, &err), &err);
}

/* A folder below the test's, for a store of its own. */
static const char *folder(const char *dir, unsigned number) {
    static char path[600];
    snprintf(path, sizeof(path), "%s/%u", dir, number);
    if (dir_create(path, false, NULL) != CKD_OK) {
        fail_msg("cannot create %s", path);
    }
    return path;
}

/* ---- settings ---- */

/*
 * A store whose only setting is that of the scene's run. The run was deleted, and a checkpoint of another run builds on
 * its files.
 */
static ckd_store *store_with_heir(const char *dir, ckd_id *heir, pathname *base) {
    ckd_store *store = open_store(dir, CKD_OPEN_CREATE);
    ckd_error err = {0};
    save_base(store, 0);
    for (uint64_t step = 1; step < 4; step++) {
        save_delta(store, SCENE_RUN, step);
    }
    *base = file_of(store, 0);
    *heir = save_delta(store, OTHER_RUN, 4);
    assert_true(make_parity(store, &(parity_run){SCENE_RUN, 4, 1, false}).groups > 0);
    assert_int_equal(covered(store), 4);
    for (uint64_t step = 0; step < 4; step++) {
        delete_step(store, step, 0);
    }
    must(ckd_store_collect(NULL, store, NULL, &err), &err);
    return store;
}

/* No setting speaks of the run that needs the files now. They keep their cover, and come back by it. */
static void test_files_of_a_deleted_run(void **state) {
    for (harm how = MISSING; how < HARMS; how++) {
        const char *dir = folder(*state, how);
        ckd_id heir;
        pathname base;
        ckd_store *store = store_with_heir(dir, &heir, &base);
        for (int i = 0; i < 2; i++) {
            made m = renew_parity(store);
            assert_true(m.groups == 0 && m.removed == 0 && m.damage == 0);
            assert_int_equal(covered(store), 4);
        }
        damage(base.text, how);
        assert_int_equal(renew_parity(store).removed, 0);
        assert_int_equal(repair_all(store), 1);
        scene s = scene_of(4);
        assert_int_equal(scene_load_id(store, &heir, &s, NULL), CKD_OK);
        ckd_store_close(store);
        store_check_clean(dir);
    }
}

/* A collection removes other members of their group. They get a group like it, which stays. */
static void test_deletion_regroups_files_of_a_deleted_run(void **state) {
    ckd_store *store = open_store(*state, CKD_OPEN_CREATE);
    ckd_error err = {0};
    for (uint64_t step = 0; step < 4; step++) {
        save_base(store, step);
    }
    save_delta(store, OTHER_RUN, 4);
    pathname base = file_of(store, 3);
    assert_int_equal(make_parity(store, &(parity_run){SCENE_RUN, 4, 1, false}).groups, 1);
    for (uint64_t step = 0; step < 4; step++) {
        delete_step(store, step, 0);
    }
    must(ckd_store_collect(NULL, store, NULL, &err), &err);
    made m = renew_parity(store);
    assert_true(m.groups == 0 && m.removed == 0);
    assert_int_equal(covered(store), 1);
    damage(base.text, MISSING);
    assert_int_equal(repair_all(store), 1);
    ckd_store_close(store);
    store_check_clean(*state);
}

typedef struct lock_watch {
    ckd_store *store;
    size_t steps, unlocked; /* changes of parity files, and those made while the lock was free */
} lock_watch;

static int watch_lock(void *context, file_op step, const char *path) {
    lock_watch *w = context;
    if (strstr(path, "/data/p/") && (step == FILE_OP_CREATE || step == FILE_OP_REMOVE)) {
        file_lock *lock = NULL;
        w->steps++;
        w->unlocked += parity_lock(&lock, w->store, NULL) != CKD_E_BUSY;
        lock_release(lock);
    }
    return 0;
}

/* Another process must not make parity of these files meanwhile. */
static void test_regrouping_holds_the_lock(void **state) {
    ckd_store *store = open_store(*state, CKD_OPEN_CREATE);
    lock_watch watch = {.store = store};
    ckd_error err = {0};
    for (uint64_t step = 0; step < 4; step++) {
        save_base(store, step);
    }
    assert_int_equal(make_parity(store, &(parity_run){SCENE_RUN, 4, 1, false}).groups, 1);
    delete_step(store, 0, 0);
    file_set_fault_hook(watch_lock, &watch);
    must(ckd_store_collect(NULL, store, NULL, &err), &err);
    file_set_fault_hook(NULL, NULL);
    assert_true(watch.steps >= 2); /* the new group, and the old one */
    assert_int_equal(watch.unlocked, 0);
    ckd_store_close(store);
}

/* Once somebody says that the run shall have no parity, its space is freed; but not before its files are right. */
static void test_off_spares_damaged_files(void **state) {
    for (harm how = MISSING; how < HARMS; how++) {
        const char *dir = folder(*state, how);
        ckd_id heir;
        pathname base;
        ckd_store *store = store_with_heir(dir, &heir, &base);
        const parity_run off = {how == ROTTEN ? OTHER_RUN : NULL, 0, 0, true};
        damage(base.text, how);
        made m = make_parity(store, &off);
        assert_true(covered(store) > 0);
        assert_int_equal(m.damage, how == ROTTEN);
        assert_int_equal(repair_all(store), 1);
        m = make_parity(store, &off);
        assert_true(m.removed > 0 && m.damage == 0);
        assert_int_equal(covered(store), 0);
        ckd_store_close(store);
    }
}

/* A rename takes the setting along. The trash keeps the old name, of which no setting speaks. */
static void test_trash_of_a_renamed_run(void **state) {
    ckd_store *store = open_store(*state, CKD_OPEN_CREATE);
    ckd_error err = {0};
    ckd_checkpoint c;
    for (uint64_t step = 0; step < 4; step++) {
        save_base(store, step);
    }
    assert_int_equal(make_parity(store, &(parity_run){SCENE_RUN, 1, 1, false}).groups, 4);
    pathname path = file_of(store, 3);
    must(ckd_store_find(&c, store, SCENE_RUN, 3, &err), &err);
    delete_step(store, 3, 3600);
    must(ckd_store_rename_run(NULL, store, SCENE_RUN, OTHER_RUN, NULL, &err), &err);
    damage(path.text, ROTTEN);
    assert_int_equal(renew_parity(store).removed, 0);
    assert_int_equal(covered(store), 4);
    assert_int_equal(repair_all(store), 1);
    must(ckd_store_undelete(store, &c.id, 1, &err), &err);
    scene s = scene_of(3);
    s.base = true;
    assert_int_equal(scene_load_id(store, &c.id, &s, NULL), CKD_OK);
    ckd_store_close(store);
}

/* A parity file that a test puts back, as after a call that was killed before it removed the group. */
typedef struct group_file {
    char path[600];
    unsigned char *data;
    size_t size;
} group_file;

/* Of the only group. */
static group_file read_group(const char *dir) {
    group_file g;
    dir_list list;
    assert_int_equal(dir_list_read(&list, store_path_of(dir, "data/p"), NULL), CKD_OK);
    size_t at = 0;
    while (at + 1 < list.count && !strstr(list.names[at], ".ckp")) {
        at++;
    }
    snprintf(g.path, sizeof(g.path), "%s/%s", store_path_of(dir, "data/p"), list.names[at]);
    dir_list_free(&list);
    g.data = read_whole_file(g.path, &g.size);
    return g;
}

static void put_back(group_file *g) {
    write_whole_file(g->path, g->data, g->size);
    free(g->data);
}

/*
 * A newer group took in the only file of an older one. Then both files of the newer group rot, so it can rebuild
 * neither. The older group stays: it brings one of them back, and with that the newer group the other one.
 */
static void test_replaced_group_of_a_damaged_file(void **state) {
    ckd_store *store = open_store(*state, CKD_OPEN_CREATE);
    save_base(store, 0);
    assert_int_equal(make_parity(store, &(parity_run){NULL, 1, 1, false}).groups, 1);
    group_file older = read_group(*state);
    save_base(store, 1);
    assert_int_equal(make_parity(store, &(parity_run){NULL, 2, 1, false}).removed, 1);
    put_back(&older);
    damage(file_of(store, 0).text, ROTTEN);
    damage(file_of(store, 1).text, ROTTEN);
    made m = renew_parity(store);
    assert_true(m.groups == 0 && m.removed == 0 && m.damage == 1);
    assert_int_equal(repair_all(store), 2);
    m = renew_parity(store);
    assert_true(m.groups == 0 && m.removed == 1 && m.damage == 0);
    ckd_store_close(store);
}

/* ---- groups that a collection relies on ---- */

typedef enum weakness { NO_MEMBER, ROTTEN_MEMBER, ROTTEN_ROW, WEAKNESSES } weakness;

/*
 * The file of step 1 is in a group with that of step 2, and in an older group that can rebuild nothing: it lacks its
 * other member, or that or the parity is damaged.
 */
static ckd_store *store_with_a_weak_group(const char *dir, weakness how) {
    ckd_store *store = open_store(dir, CKD_OPEN_CREATE);
    ckd_checkpoint other = {0};
    ckd_error err = {0};
    scene s = scene_of(0);
    s.run = OTHER_RUN;
    s.base = true;
    if (how != ROTTEN_ROW) {
        must(scene_save(&other, store, &s, &err), &err);
    }
    pathname file = how == ROTTEN_MEMBER ? only_file(store, &other) : (pathname){.text = ""};
    save_base(store, 1);
    assert_int_equal(make_parity(store, &(parity_run){NULL, 2, 1, false}).groups, 1);
    group_file older = read_group(dir);
    assert_int_equal(unlink(older.path), 0);
    make_parity(store, &(parity_run){OTHER_RUN, 0, 0, true});
    if (how == NO_MEMBER) {
        ckd_delete_options o = CKD_DELETE_OPTIONS_INIT;
        o.undo_s = 0;
        must(ckd_store_delete(store, &other.id, 1, &o, &err), &err);
        must(ckd_store_collect(NULL, store, NULL, &err), &err);
    }
    save_base(store, 2);
    assert_int_equal(renew_parity(store).groups, 1);
    put_back(&older);
    if (how != NO_MEMBER) {
        damage(how == ROTTEN_MEMBER ? file.text : older.path, ROTTEN);
    }
    return store;
}

/* A group that can rebuild nothing is no cover: the file of step 1 gets new parity when its working group goes. */
static void test_weak_group_is_no_cover(void **state) {
    for (weakness how = NO_MEMBER; how < WEAKNESSES; how++) {
        const char *dir = folder(*state, how);
        ckd_store *store = store_with_a_weak_group(dir, how);
        ckd_error err = {0};
        pathname path = file_of(store, 1);
        delete_step(store, 2, 0);
        must(ckd_store_collect(NULL, store, NULL, &err), &err);
        damage(path.text, MISSING);
        assert_int_equal(repair_all(store), how == NO_MEMBER ? 1 : 2);
        ckd_store_close(store);
    }
}

/*
 * A group of four files, with one parity file. One is of a checkpoint that has just ended, one was replaced by a
 * compaction, and two stay. A reader has kept all of them.
 */
static ckd_store *store_with_an_ended_checkpoint(const char *dir, pathname *ended) {
    file_lock *held;
    ckd_store *store = open_store(dir, CKD_OPEN_CREATE);
    save_base(store, 0);
    save_base(store, 1);
    save_delta(store, SCENE_RUN, 2);
    save_delta(store, SCENE_RUN, 3);
    *ended = file_of(store, 0);
    assert_int_equal(make_parity(store, &(parity_run){NULL, 4, 1, false}).groups, 1);
    assert_int_equal(lock_acquire(&held, store_path_of(dir, FILE_READER_LOCK), LOCK_SHARED, true, 0, NULL),
                     CKD_OK);
    ckd_compact_options o = options_for(1);
    ckd_compaction *done = compact_with(store, &o);
    assert_true(done->old_files > 0);
    ckd_compaction_free(done);
    delete_step(store, 0, 0);
    lock_release(held);
    return store;
}

/*
 * Nobody repairs a file that only an ended checkpoint needs. So the group must not keep the replaced file for its sake,
 * or the trash could never be emptied.
 */
static void test_damage_of_an_ended_checkpoint(void **state) {
    for (harm how = MISSING; how < HARMS; how++) {
        const char *dir = folder(*state, how);
        ckd_error err = {0};
        pathname ended;
        ckd_store *store = store_with_an_ended_checkpoint(dir, &ended);
        damage(ended.text, how);
        must(ckd_store_collect(NULL, store, NULL, &err), &err);
        assert_false(file_exists(ended.text));
        damage(file_of(store, 1).text, how);
        assert_int_equal(repair_all(store), 1);
        ckd_store_close(store);
        store_check_clean(dir);
    }
}

/* ---- what changes while parity is made ---- */

/* Done by another handle when parity has read the first file. */
typedef struct meanwhile {
    ckd_store *other;
    ckd_id restored;
    bool done;
} meanwhile;

static int restore(void *context, uint64_t done, uint64_t total) {
    meanwhile *w = context;
    ckd_error err = {0};
    (void)done, (void)total;
    if (!w->done) {
        w->done = true;
        must(ckd_store_undelete(w->other, &w->restored, 1, &err), &err);
    }
    return 0;
}

static uint64_t removed_meanwhile(ckd_store *store, meanwhile *w) {
    ckd_parity_options o = CKD_PARITY_OPTIONS_INIT;
    ckd_parity_result *r;
    ckd_error err = {0};
    o.on_progress = restore;
    o.progress_context = w;
    must(ckd_store_parity(&r, store, &o, &err), &err);
    assert_true(w->done);
    ckd_store_close(w->other);
    uint64_t removed = r->removed_groups;
    ckd_parity_result_free(r);
    return removed;
}

/* The checkpoint was not listed when parity began. When its group would go, it is listed again. */
static void test_restored_while_parity_is_made(void **state) {
    ckd_store *store = open_store(*state, CKD_OPEN_CREATE);
    ckd_checkpoint c;
    ckd_error err = {0};
    save_base(store, 0);
    assert_int_equal(make_parity(store, &(parity_run){NULL, 1, 1, false}).groups, 1);
    save_base(store, 1);
    must(ckd_store_find(&c, store, SCENE_RUN, 0, &err), &err);
    ckd_store *other =
        open_store(*state, CKD_OPEN_WRITE); /* which would empty the trash if it was opened later */
    pathname path = file_of(store, 0);
    delete_step(store, 0, 0);
    meanwhile w = {.other = other, .restored = c.id};
    assert_int_equal(removed_meanwhile(store, &w), 0);
    damage(path.text, MISSING);
    assert_int_equal(repair_all(store), 1);
    scene s = scene_of(0);
    assert_int_equal(scene_load_id(store, &c.id, &s, NULL), CKD_OK);
    ckd_store_close(store);
    store_check_clean(*state);
}

/* ---- lost manifests ---- */

static void remove_manifest(const char *dir, const char *run, unsigned step) {
    char name[64];
    snprintf(name, sizeof(name), "data/m/%s.%u.0", run, step);
    assert_int_equal(unlink(store_path_of(dir, name)), 0);
}

static const parity_run all_runs = {NULL, 4, 1, false};

/* A checkpoint lost its manifest, and its chunk file is damaged, too. Its group stays, and brings both back. */
static void test_lost_manifest_of_a_damaged_file(void **state) {
    for (unsigned i = 0; i < 2 * HARMS; i++) {
        harm how = i % HARMS;
        const char *dir = folder(*state, i);
        ckd_store *store = open_store(dir, CKD_OPEN_CREATE);
        for (uint64_t step = 0; step < 4; step++) {
            save_base(store, step);
        }
        assert_int_equal(make_parity(store, &all_runs).groups, 1);
        pathname path = file_of(store, 2);
        remove_manifest(dir, SCENE_RUN, 2);
        damage(path.text, how);
        if (i >= HARMS) { /* the other files get a new group */
            made m = renew_parity(store);
            assert_true(m.groups == 1 && m.removed == 0 && m.damage == 0);
            m = renew_parity(store);
            assert_true(m.groups == 0 && m.removed == 0 && m.damage == 0);
        }
        assert_int_equal(repair_all(store), 2);
        scene_check(store, 0, 4);
        assert_int_equal(renew_parity(store).removed, i >= HARMS);
        assert_int_equal(covered(store), 4);
        ckd_store_close(store);
        store_check_clean(dir);
    }
}

/* The lost checkpoint builds on files of deleted ones, which its manifest alone named. These come back, too. */
static void test_lost_heir_of_deleted_files(void **state) {
    for (harm how = MISSING; how < HARMS; how++) {
        const char *dir = folder(*state, how);
        ckd_id heir;
        pathname base;
        ckd_store *store = store_with_heir(dir, &heir, &base);
        remove_manifest(dir, OTHER_RUN, 4);
        damage(base.text, how);
        assert_int_equal(renew_parity(store).removed, 0);
        assert_int_equal(repair_all(store), 2);
        scene s = scene_of(4);
        assert_int_equal(scene_load_id(store, &heir, &s, NULL), CKD_OK);
        ckd_store_close(store);
        store_check_clean(dir);
    }
}

/* A dry run changes nothing. It cannot tell what the missing file is good for, and says so. */
static void test_dry_run_with_a_lost_manifest(void **state) {
    ckd_repair_options o = CKD_REPAIR_OPTIONS_INIT;
    ckd_repair_result *r;
    ckd_error err = {0};
    ckd_store *store = open_store(*state, CKD_OPEN_CREATE);
    save_base(store, 0);
    save_base(store, 1);
    make_parity(store, &all_runs);
    pathname path = file_of(store, 1);
    remove_manifest(*state, SCENE_RUN, 1);
    damage(path.text, MISSING);
    o.dry_run = 1;
    must(ckd_store_repair(&r, store, &o, &err), &err);
    assert_true(r->repaired_count == 0 && r->left->damage_count == 1);
    assert_non_null(strstr(r->left->damage[0].what, "a repair rebuilds chunk files first"));
    ckd_repair_result_free(r);
    assert_false(file_exists(path.text));
    assert_int_equal(repair_all(store), 2);
    ckd_store_close(store);
    store_check_clean(*state);
}

static size_t files_in(const char *dir, const char *folder_name) {
    dir_list list;
    if (dir_list_read(&list, store_path_of(dir, folder_name), NULL) != CKD_OK) {
        return 0;
    }
    size_t count = list.count;
    dir_list_free(&list);
    return count;
}

/* A power cut emptied the deletion mark, which is not synced. So the catalog's row is doubtful. */
static ckd_store *lose_behind_an_empty_mark(const char *dir) {
    ckd_store *store = open_store(dir, CKD_OPEN_CREATE);
    save_base(store, 0);
    save_base(store, 1);
    make_parity(store, &all_runs);
    pathname path = file_of(store, 1);
    ckd_store_close(store);
    remove_manifest(dir, SCENE_RUN, 1);
    damage(path.text, MISSING);
    write_whole_file(store_path_of(dir, "data/deletions"), "", 0);
    return open_store(dir, CKD_OPEN_WRITE);
}

/* No chunk file has records of the doubtful checkpoint, but parity can rebuild one that may. Its row stays. */
static void test_doubtful_checkpoint_of_a_missing_file(void **state) {
    ckd_repair_options o = CKD_REPAIR_OPTIONS_INIT;
    ckd_repair_result *r;
    ckd_error err = {0};
    ckd_store *store = lose_behind_an_empty_mark(*state);
    assert_int_equal(files_in(*state, "data/q"), 1);
    assert_int_equal(repair_all(store), 0);
    assert_int_equal(renew_parity(store).removed, 0);
    o.manifest_run = SCENE_RUN;
    o.manifest_step = 1;
    must(ckd_store_repair(&r, store, &o, &err), &err);
    assert_true(r->repaired_count == 2 && r->left->damage_count == 0);
    ckd_repair_result_free(r);
    scene_check(store, 0, 2);
    ckd_store_close(store);
    store_check_clean(*state);
}

/* Once no group lacks a member, nothing can bring the checkpoint back. */
static void test_doubtful_checkpoint_without_parity(void **state) {
    ckd_store *store = lose_behind_an_empty_mark(*state);
    dir_list list;
    assert_int_equal(dir_list_read(&list, store_path_of(*state, "data/p"), NULL), CKD_OK);
    for (size_t i = 0; i < list.count; i++) {
        pathname p = path_of(store->path, DIR_PARITY, list.names[i]);
        assert_int_equal(unlink(p.text), 0);
    }
    dir_list_free(&list);
    vanished v;
    assert_int_equal(vanished_find(&v, store, NULL), CKD_OK);
    assert_true(v.count == 0 && v.doubtful_count == 0);
    vanished_free(&v);
    ckd_store_close(store);
}

/* Among the missing files of a group, that of a deleted checkpoint does not come back. */
static void test_deleted_files_stay_away(void **state) {
    ckd_store *store = open_store(*state, CKD_OPEN_CREATE);
    ckd_error err = {0};
    if (erasure_ready(NULL) != CKD_OK) {
        ckd_store_close(store);
        puts("SKIP: ISA-L (libisal2) is not installed");
        skip();
    }
    for (uint64_t step = 0; step < 4; step++) {
        save_base(store, step);
    }
    make_parity(store, &(parity_run){NULL, 4, 2, false});
    pathname deleted = file_of(store, 1), lost = file_of(store, 2);
    delete_step(store, 1, 0);
    must(ckd_store_collect(NULL, store, NULL, &err), &err);
    assert_false(file_exists(deleted.text));
    remove_manifest(*state, SCENE_RUN, 2);
    damage(lost.text, MISSING);
    assert_int_equal(renew_parity(store).removed, 0);
    assert_int_equal(repair_all(store), 2);
    assert_true(file_exists(lost.text) && !file_exists(deleted.text));
    ckd_store_close(store);
    store_check_clean(*state);
}

/* One of two files of the lost checkpoint can be rebuilt. That is not enough, and leaves nothing behind. */
static void test_lost_checkpoint_stays_lost(void **state) {
    ckd_store *store = open_store(*state, CKD_OPEN_CREATE);
    ckd_repair_result *r;
    ckd_error err = {0};
    dir_list before, after;
    scene s = scene_of(1);
    s.base = true;
    save_base(store, 0);
    assert_int_equal(dir_list_read(&before, store_path_of(*state, "data/c"), NULL), CKD_OK);
    must(scene_save_ranks(NULL, store, &s, &err), &err);
    make_parity(store, &(parity_run){NULL, 1, 1, false});
    manifest m;
    must(store_read_manifest(&m, store, SCENE_RUN, 1, 0, &err), &err);
    assert_int_equal(m.own_count, 2);
    remove_manifest(*state, SCENE_RUN, 1);
    for (size_t i = 0; i < 2; i++) {
        damage(path_chunk(store->path, &m.files[i].id, "").text, MISSING);
    }
    /* The first parity file that covers one of them goes, too. */
    parity_sets sets;
    damage_list ignored = {.result = calloc(1, sizeof(ckd_verify_result)), .store_path = store->path};
    must(parity_sets_read(&sets, store, &ignored, &err), &err);
    size_t count;
    const parity_membership *c = parity_sets_of(&sets, &m.files[0].id, &count);
    assert_int_equal(count, 1);
    assert_int_equal(unlink(path_parity(store->path, &c->set->group.id, 0, "").text), 0);
    parity_sets_free(&sets);
    ckd_verify_result_free(ignored.result);
    manifest_free(&m);
    must(ckd_store_repair(&r, store, NULL, &err), &err);
    assert_true(r->repaired_count == 0 && r->left->damage_count == 1);
    assert_non_null(strstr(r->left->damage[0].what, "the manifest is lost"));
    ckd_repair_result_free(r);
    assert_int_equal(dir_list_read(&after, store_path_of(*state, "data/c"), NULL), CKD_OK);
    assert_int_equal(after.count, before.count);
    dir_list_free(&before);
    dir_list_free(&after);
    assert_int_equal(renew_parity(store).removed, 0);
    ckd_store_close(store);
    store_check_clean(*state);
}

/*
 * Nothing knows whose the file without a manifest is. It is damaged, and a collection would remove what rebuilds it. It
 * is refused until a repair has done so.
 */
static void test_deletion_spares_unnamed_files(void **state) {
    for (harm how = ROTTEN; how < HARMS; how++) {
        const char *dir = folder(*state, how);
        ckd_store *store = open_store(dir, CKD_OPEN_CREATE);
        ckd_repair_result *r;
        ckd_error err = {0};
        for (uint64_t step = 0; step < 4; step++) {
            save_base(store, step);
        }
        make_parity(store, &all_runs);
        pathname path = file_of(store, 2);
        ckd_store_close(store);
        remove_manifest(dir, SCENE_RUN, 2);
        assert_int_equal(unlink(store_path_of(dir, "catalog.db")), 0);
        damage(path.text, how);
        store = open_store(dir, CKD_OPEN_WRITE);
        delete_step(store, 1, 0);
        assert_int_equal(ckd_store_collect(NULL, store, NULL, &err), CKD_E_STATE);
        assert_non_null(strstr(err.message, "run ckptdelta repair first"));
        assert_int_equal(renew_parity(store).removed, 0);
        must(ckd_store_repair(&r, store, NULL, &err), &err);
        assert_true(r->repaired_count == 1 && r->left->damage_count == 1);
        assert_non_null(strstr(r->left->damage[0].what, "no manifest names this chunk file"));
        ckd_repair_result_free(r);
        must(ckd_store_collect(NULL, store, NULL, &err), &err);
        ckd_store_close(store);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        tempdir_test(test_files_of_a_deleted_run),
        tempdir_test(test_deletion_regroups_files_of_a_deleted_run),
        tempdir_test(test_regrouping_holds_the_lock),
        tempdir_test(test_off_spares_damaged_files),
        tempdir_test(test_trash_of_a_renamed_run),
        tempdir_test(test_replaced_group_of_a_damaged_file),
        tempdir_test(test_weak_group_is_no_cover),
        tempdir_test(test_damage_of_an_ended_checkpoint),
        tempdir_test(test_restored_while_parity_is_made),
        tempdir_test(test_lost_manifest_of_a_damaged_file),
        tempdir_test(test_lost_heir_of_deleted_files),
        tempdir_test(test_dry_run_with_a_lost_manifest),
        tempdir_test(test_doubtful_checkpoint_of_a_missing_file),
        tempdir_test(test_doubtful_checkpoint_without_parity),
        tempdir_test(test_deleted_files_stay_away),
        tempdir_test(test_lost_checkpoint_stays_lost),
        tempdir_test(test_deletion_spares_unnamed_files),
    };
    scratch_begin();
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    scratch_end();
    return failed;
}
