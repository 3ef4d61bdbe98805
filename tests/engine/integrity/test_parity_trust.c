/*
 * Parity that must not be relied on: groups that are incomplete, that lack members, or whose parity has rotted. Files
 * get other cover before such a group is their only one, and no other group goes for its sake.
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

static void save_base(ckd_store *store, const char *run, uint64_t step) {
    scene s = scene_of(step);
    ckd_error err = {0};
    s.run = run;
    s.base = true;
    must(scene_save(NULL, store, &s, &err), &err);
}

typedef struct made {
    uint64_t groups, removed;
    size_t damage;
} made;

/* data 0: by the stored settings. */
static made make_parity(ckd_store *store, uint32_t data, uint32_t parity) {
    ckd_parity_options o = CKD_PARITY_OPTIONS_INIT;
    ckd_parity_result *r;
    ckd_error err = {0};
    o.data = data;
    o.parity = parity;
    must(ckd_store_parity(&r, store, &o, &err), &err);
    made out = {r->groups, r->removed_groups, r->found->damage_count};
    ckd_parity_result_free(r);
    return out;
}

static void parity_off(ckd_store *store, const char *run) {
    ckd_parity_options o = CKD_PARITY_OPTIONS_INIT;
    ckd_parity_result *r;
    ckd_error err = {0};
    o.run = run;
    o.off = 1;
    must(ckd_store_parity(&r, store, &o, &err), &err);
    ckd_parity_result_free(r);
}

static ckd_parity_status status_of(ckd_store *store) {
    ckd_parity_status *s, out;
    ckd_error err = {0};
    must(ckd_store_parity_status(&s, store, &err), &err);
    out = *s;
    out.settings = NULL;
    ckd_parity_status_free(s);
    return out;
}

/* Returns how many files were repaired; *left: what stays damaged. */
static size_t repair(size_t *left, ckd_store *store) {
    ckd_repair_result *r;
    ckd_error err = {0};
    must(ckd_store_repair(&r, store, NULL, &err), &err);
    size_t count = r->repaired_count;
    *left = r->left->damage_count;
    ckd_repair_result_free(r);
    return count;
}

/* The only chunk file of a checkpoint. */
static pathname file_of(ckd_store *store, const char *run, uint64_t step) {
    ckd_checkpoint c;
    manifest m;
    ckd_error err = {0};
    must(ckd_store_find(&c, store, run, step, &err), &err);
    must(store_read_manifest(&m, store, c.run, c.step, c.generation, &err), &err);
    assert_int_equal(m.own_count, 1);
    pathname path = path_chunk(store->path, &m.files[0].id, "");
    manifest_free(&m);
    return path;
}

static void lose(const char *path) {
    assert_int_equal(unlink(path), 0);
}

static void flip(const char *path, size_t at) {
    size_t size;
    unsigned char *data = read_whole_file(path, &size);
    assert_true(at < size);
    data[at] ^= 0x10;
    write_whole_file(path, data, size);
    free(data);
}

static void delete_step(ckd_store *store, const char *run, uint64_t step) {
    ckd_checkpoint c;
    ckd_delete_options o = CKD_DELETE_OPTIONS_INIT;
    ckd_error err = {0};
    o.undo_s = 0;
    must(ckd_store_find(&c, store, run, step, &err), &err);
    must(ckd_store_delete(store, &c.id, 1, &o, &err), &err);
}

static void collect(ckd_store *store) {
    ckd_error err = {0};
    must(ckd_store_collect(NULL, store, NULL, &err), &err);
}

/* A parity file that a test puts back, as after a call that was killed before it removed the group. */
typedef struct group_file {
    char path[600];
    unsigned char *data;
    size_t size;
    ckd_id group;
} group_file;

/* A parity file of the store that is not of the group `other`, which may be NULL. There is one. */
static group_file read_group(const char *dir, const group_file *other) {
    group_file g = {.path = ""};
    dir_list list;
    assert_int_equal(dir_list_read(&list, store_path_of(dir, "data/p"), NULL), CKD_OK);
    for (size_t i = 0; i < list.count; i++) {
        uint32_t row;
        if (parity_name_parse(&g.group, &row, list.names[i]) &&
            !(other && id_equal(&g.group, &other->group))) {
            snprintf(g.path, sizeof(g.path), "%s/%s", store_path_of(dir, "data/p"), list.names[i]);
            break;
        }
    }
    dir_list_free(&list);
    assert_true(g.path[0] != '\0');
    g.data = read_whole_file(g.path, &g.size);
    return g;
}

static void put_back(group_file *g) {
    write_whole_file(g->path, g->data, g->size);
    free(g->data);
}

/* ---- incomplete groups ---- */

/* Two groups share the file of step 1. The older one also has a file of another run, the newer one that of step 2. */
static ckd_store *store_with_two_groups(const char *dir, group_file *newer) {
    ckd_store *store = open_store(dir, CKD_OPEN_CREATE);
    save_base(store, OTHER_RUN, 0);
    save_base(store, SCENE_RUN, 1);
    assert_int_equal(make_parity(store, 2, 1).groups, 1);
    group_file older = read_group(dir, NULL);
    lose(older.path);
    parity_off(store, OTHER_RUN);
    save_base(store, SCENE_RUN, 2);
    assert_int_equal(make_parity(store, 0, 0).groups, 1);
    put_back(&older);
    *newer = read_group(dir, &older);
    return store;
}

/*
 * The maker of the newer group died before it removed the mark, so the next writer removes the group. A collection by a
 * handle that was opened before takes the older group: the file needs a new one.
 */
static void test_marked_group_is_no_cover(void **state) {
    group_file newer;
    size_t left;
    ckd_store *store = store_with_two_groups(*state, &newer);
    pathname path = file_of(store, SCENE_RUN, 1);
    write_whole_file(path_parity_mark(store->path, &newer.group).text, "", 0);
    assert_int_equal(status_of(store).groups, 1);
    delete_step(store, OTHER_RUN, 0);
    collect(store);
    ckd_store_close(store);
    store = open_store(*state, CKD_OPEN_WRITE);
    assert_false(file_exists(newer.path));
    lose(path.text);
    assert_int_equal(repair(&left, store), 1);
    assert_int_equal(left, 0);
    free(newer.data);
    ckd_store_close(store);
    store_check_clean(*state);
}

/* ---- beside a call that makes parity ---- */

/* Another process has the parity lock until a collection tries to take it for the third time. */
typedef struct rival {
    file_lock *held;
    unsigned tries;
    size_t reads; /* of chunk files, while the lock is held */
} rival;

static int give_way(void *context, file_op step, const char *path) {
    rival *r = context;
    r->reads += r->held && step == FILE_OP_READ && strstr(path, "/" DIR_CHUNKS "/");
    if (step == FILE_OP_LOCK && strstr(path, FILE_PARITY_LOCK) && ++r->tries == 3) {
        lock_release(r->held);
        r->held = NULL;
    }
    return 0;
}

/* Each try ends before a file is read. In the end each removed file is counted once. */
static void test_waiting_collection_reads_once(void **state) {
    rival r = {0};
    ckd_collected gone;
    ckd_error err = {0};
    ckd_store *store = open_store(*state, CKD_OPEN_CREATE);
    for (uint64_t step = 0; step < 4; step++) {
        save_base(store, SCENE_RUN, step);
    }
    assert_int_equal(make_parity(store, 4, 1).groups, 1);
    delete_step(store, SCENE_RUN, 1);
    assert_int_equal(
        lock_acquire(&r.held, store_path_of(*state, FILE_PARITY_LOCK), LOCK_EXCLUSIVE, true, 0, NULL),
        CKD_OK);
    file_set_fault_hook(give_way, &r);
    ckd_status status = ckd_store_collect(&gone, store, NULL, &err);
    file_set_fault_hook(NULL, NULL);
    must(status, &err);
    assert_true(r.tries == 3 && r.reads == 0);
    assert_true(gone.checkpoints == 1 && gone.files == 1 && gone.waiting == 0);
    ckd_parity_status s = status_of(store);
    assert_true(s.files == 3 && s.covered_files == 3);
    ckd_store_close(store);
    store_check_clean(*state);
}

/* ---- groups that lack more members than they can rebuild ---- */

/* A repair cannot help. The files that are left get a group, and the one that may get help from elsewhere stays. */
static void test_the_rest_of_a_spent_group(void **state) {
    size_t left;
    ckd_store *store = open_store(*state, CKD_OPEN_CREATE);
    for (uint64_t step = 0; step < 4; step++) {
        save_base(store, SCENE_RUN, step);
    }
    assert_int_equal(make_parity(store, 4, 1).groups, 1);
    pathname lost = file_of(store, SCENE_RUN, 0), saved = file_of(store, SCENE_RUN, 1);
    size_t size;
    unsigned char *data = read_whole_file(saved.text, &size);
    lose(lost.text);
    lose(saved.text);
    assert_int_equal(repair(&left, store), 0);
    made m = make_parity(store, 0, 0);
    assert_true(m.groups == 1 && m.removed == 0);
    m = make_parity(store, 0, 0);
    assert_true(m.groups == 0 && m.removed == 0);
    assert_int_equal(status_of(store).covered_files, 2);
    write_whole_file(saved.text, data, size); /* from a copy; the older group then rebuilds the other one */
    free(data);
    assert_int_equal(repair(&left, store), 1);
    assert_int_equal(left, 0);
    assert_int_equal(status_of(store).covered_files, 4);
    ckd_store_close(store);
    store_check_clean(*state);
}

/* A group that can still rebuild a further file is left to the repair. */
static void test_a_weaker_group_still_covers(void **state) {
    size_t left;
    ckd_store *store = open_store(*state, CKD_OPEN_CREATE);
    if (erasure_ready(NULL) != CKD_OK) {
        ckd_store_close(store);
        puts("SKIP: ISA-L (libisal2) is not installed");
        skip();
    }
    for (uint64_t step = 0; step < 4; step++) {
        save_base(store, SCENE_RUN, step);
    }
    assert_int_equal(make_parity(store, 4, 2).groups, 1);
    lose(file_of(store, SCENE_RUN, 0).text);
    assert_int_equal(make_parity(store, 0, 0).groups, 0);
    lose(file_of(store, SCENE_RUN, 1).text);
    assert_int_equal(make_parity(store, 0, 0).groups, 1);
    assert_int_equal(repair(&left, store), 2);
    assert_int_equal(left, 0);
    made m = make_parity(store, 0, 0);
    assert_true(m.groups == 0 && m.removed == 1);
    ckd_store_close(store);
}

/* A newer group that can rebuild nothing more does not take the place of an older one that can. */
static void test_spent_group_replaces_none(void **state) {
    group_file newer;
    size_t shared = 0; /* files in both groups, of which the older one is the better */
    ckd_error err = {0};
    ckd_store *store = store_with_two_groups(*state, &newer);
    lose(file_of(store, SCENE_RUN, 2).text);
    damage_list ignored = {.result = calloc(1, sizeof(ckd_verify_result)), .store_path = store->path};
    live_files files = {0};
    parity_sets sets = {0};
    /* By the setting, groups have one file: both are to be replaced. */
    stored_setting setting = {.name = {.kind = METADATA_PARITY, .name = POLICY_OF_ALL},
                              .parity = {.data = 1, .parity = 1}};
    setting_list settings = {.items = &setting, .count = 1};
    must(live_files_read(&files, store, &ignored, &err), &err);
    must(parity_sets_read(&sets, store, &ignored, &err), &err);
    assert_int_equal(sets.count, 2);
    const parity_inputs inputs = {.store = store, .files = &files, .sets = &sets, .settings = &settings};
    for (size_t i = 0; i < files.count; i++) {
        size_t groups;
        const parity_set *best;
        parity_sets_of(&sets, &files.items[i].file.id, &groups);
        must(parity_plan_best(&best, &files.items[i], &inputs, &err), &err);
        shared += groups == 2 && best && !id_equal(&best->group.id, &newer.group);
    }
    assert_int_equal(shared, 1);
    parity_sets_free(&sets);
    live_files_free(&files);
    ckd_verify_result_free(ignored.result);
    free(newer.data);
    ckd_store_close(store);
}

/* ---- groups that stand in for others ---- */

/*
 * The older group is obsolete by its name. The newer one, or a file that it needs, has rotted unread. So the older one
 * stays, until a repair was possible.
 */
static void test_rotten_group_replaces_none(void **state) {
    for (int rotten_member = 0; rotten_member < 2; rotten_member++) {
        char dir[600];
        group_file newer;
        size_t left;
        snprintf(dir, sizeof(dir), "%s/%d", (const char *)*state, rotten_member);
        assert_int_equal(dir_create(dir, false, NULL), CKD_OK);
        ckd_store *store = store_with_two_groups(dir, &newer);
        pathname shared = file_of(store, SCENE_RUN, 1), other = file_of(store, SCENE_RUN, 2);
        flip(rotten_member ? other.text : newer.path, newer.size / 2);
        for (int again = 0; again < 2; again++) {
            made m = make_parity(store, 0, 0);
            assert_true(m.groups == 0 && m.removed == 0 && m.damage == 1);
        }
        lose(shared.text);
        assert_int_equal(repair(&left, store), 2);
        assert_int_equal(left, 0);
        made m = make_parity(store, 0, 0);
        assert_true(m.groups == 0 && m.removed == 1 && m.damage == 0);
        assert_int_equal(status_of(store).covered_files, 2);
        free(newer.data);
        ckd_store_close(store);
    }
}

/* ---- settings that cannot be read ---- */

/* A damaged setting, or that of a newer program, does not say that files shall lose their cover. */
static void test_unreadable_setting_takes_no_cover(void **state) {
    for (int newer = 0; newer < 2; newer++) {
        char dir[600];
        size_t size, left;
        dir_list list;
        snprintf(dir, sizeof(dir), "%s/%d", (const char *)*state, newer);
        assert_int_equal(dir_create(dir, false, NULL), CKD_OK);
        ckd_store *store = open_store(dir, CKD_OPEN_CREATE);
        for (uint64_t step = 0; step < 4; step++) {
            save_base(store, SCENE_RUN, step);
        }
        assert_int_equal(make_parity(store, 4, 1).groups, 1);
        assert_int_equal(dir_list_read(&list, store_path_of(dir, DIR_SETTINGS), NULL), CKD_OK);
        assert_int_equal(list.count, 1);
        pathname setting = path_of(store->path, DIR_SETTINGS, list.names[0]);
        dir_list_free(&list);
        unsigned char *data = read_whole_file(setting.text, &size);
        store_le16(data + 8, 2);
        if (newer) {
            store_le64(data + size - 8, hash64(data, size - 8));
        }
        write_whole_file(setting.text, data, size);
        free(data);
        delete_step(store, SCENE_RUN, 1);
        collect(store);
        ckd_parity_status s = status_of(store);
        assert_true(s.files == 3 && s.covered_files == 3 && s.groups == 1);
        lose(file_of(store, SCENE_RUN, 2).text);
        assert_int_equal(repair(&left, store), 1);
        assert_int_equal(left, 1); /* the setting */
        ckd_store_close(store);
    }
}

/* ---- parity that contradicts files or other parity ---- */

enum { LARGE = 6000 }; /* rows of a scene whose chunk file has several pieces */

static void save_large(ckd_store *store, uint64_t step) {
    scene s = scene_of(step);
    ckd_error err = {0};
    s.base = true;
    s.rows = LARGE;
    must(scene_save(NULL, store, &s, &err), &err);
}

/* A member that rots as soon as a repair has read all members. */
typedef struct rotting {
    const char *path;
    uint64_t after;
    bool done;
} rotting;

static int rot(void *context, uint64_t done, uint64_t total) {
    rotting *r = context;
    (void)total;
    if (!r->done && done >= r->after) {
        r->done = true;
        flip(r->path, file_bytes(r->path) - 100);
    }
    return 0;
}

/*
 * Parity is not made again of a member that has rotted since. The next repair rebuilds that member by the old parity.
 */
static void test_member_rots_during_a_repair(void **state) {
    ckd_repair_options o = CKD_REPAIR_OPTIONS_INIT;
    ckd_repair_result *r;
    ckd_error err = {0};
    size_t left;
    ckd_store *store = open_store(*state, CKD_OPEN_CREATE);
    save_large(store, 0);
    save_large(store, 1);
    assert_int_equal(make_parity(store, 2, 1).groups, 1);
    group_file g = read_group(*state, NULL);
    pathname first = file_of(store, SCENE_RUN, 0), second = file_of(store, SCENE_RUN, 1);
    rotting trouble = {.path = second.text, .after = file_bytes(first.text) + file_bytes(second.text)};
    flip(g.path, 1000);
    o.on_progress = rot;
    o.progress_context = &trouble;
    must(ckd_store_repair(&r, store, &o, &err), &err);
    assert_true(trouble.done);
    assert_true(r->repaired_count == 0 && r->left->damage_count > 0);
    assert_non_null(strstr(r->left->damage[0].what, "contradicts the rest of its parity"));
    ckd_repair_result_free(r);
    assert_int_equal(repair(&left, store), 2);
    assert_int_equal(left, 0);
    free(g.data);
    ckd_store_close(store);
    store_check_clean(*state);
}

/*
 * Changes the first row of the only group, which stays valid. It says that a member had another bit in its first piece:
 * by the hash alone, or as parity that was made of such a member would.
 */
static void falsify_first_row(ckd_store *store, const char *member, bool with_parity) {
    damage_list ignored = {.result = calloc(1, sizeof(ckd_verify_result)), .store_path = store->path};
    parity_sets sets;
    parity_file *f;
    ckd_error err = {0};
    size_t size, file_size, i = 0;
    must(parity_sets_read(&sets, store, &ignored, &err), &err);
    assert_int_equal(sets.count, 1);
    const parity_group *g = &sets.items[0]->group;
    while (strcmp(path_chunk(store->path, &g->members[i].file, "").text, member) != 0) {
        i++;
    }
    pathname row = path_parity(store->path, &g->id, 0, "");
    must(parity_open(&f, &store->id, row.text, &err), &err);
    unsigned char *data = read_whole_file(row.text, &size), *file = read_whole_file(member, &file_size);
    unsigned char *stripe = data + f->head_size;
    file[200] ^= 1;
    stripe[200] ^= with_parity;
    store_le64(stripe + parity_piece_size(g, 0) + 8 * i, hash64(file, parity_member_size(g, i, 0)));
    parity_stripe_finish(stripe, g, 0, 0);
    write_whole_file(row.text, data, size);
    parity_close(f);
    free(data);
    free(file);
    parity_sets_free(&sets);
    ckd_verify_result_free(ignored.result);
}

/* Two valid rows disagree. The one that gives the file which the manifest names is right. */
static void test_rows_that_disagree(void **state) {
    if (erasure_ready(NULL) != CKD_OK) {
        puts("SKIP: ISA-L (libisal2) is not installed");
        skip();
    }
    for (int how = 0; how < 4; how++) {
        char dir[600];
        size_t left;
        snprintf(dir, sizeof(dir), "%s/%d", (const char *)*state, how);
        assert_int_equal(dir_create(dir, false, NULL), CKD_OK);
        ckd_store *store = open_store(dir, CKD_OPEN_CREATE);
        for (uint64_t step = 0; step < 3; step++) {
            save_base(store, SCENE_RUN, step);
        }
        assert_int_equal(make_parity(store, 3, 2).groups, 1);
        pathname member = file_of(store, SCENE_RUN, 1);
        falsify_first_row(store, member.text, how & 1);
        if (how & 2) { /* as the first row says that it was */
            flip(member.text, 200);
        } else {
            lose(member.text);
        }
        assert_int_equal(repair(&left, store), 1);
        assert_int_equal(left, 0);
        scene s = scene_of(1);
        s.base = true;
        ckd_error err = {0};
        must(scene_load(store, &s, &err), &err);
        ckd_store_close(store);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        tempdir_test(test_marked_group_is_no_cover),    tempdir_test(test_waiting_collection_reads_once),
        tempdir_test(test_the_rest_of_a_spent_group),   tempdir_test(test_a_weaker_group_still_covers),
        tempdir_test(test_spent_group_replaces_none),   tempdir_test(test_rotten_group_replaces_none),
        tempdir_test(test_member_rots_during_a_repair), tempdir_test(test_unreadable_setting_takes_no_cover),
        tempdir_test(test_rows_that_disagree),
    };
    scratch_begin();
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    scratch_end();
    return failed;
}
