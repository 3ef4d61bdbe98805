/*
 * Deleting checkpoints: the others still load, deleted ones can be undeleted, and a collection frees their space. What
 * must not be deleted is refused.
 */
#include <errno.h>
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
#include "base/hash.h"
#include "engine/store/manifests.h"
#include "tests/support/checkpoints.h"
#include "tests/support/early.h"
#include "tests/support/scenes.h"
#include "tests/support/scratch.h"
#include "tests/support/tempdir.h"
#include "tests/support/xorshift.h"

static ckd_id id_of(ckd_store *store, uint64_t step) {
    ckd_checkpoint c;
    assert_int_equal(ckd_store_find(&c, store, SCENE_RUN, step, NULL), CKD_OK);
    return c.id;
}

static ckd_status delete_steps(ckd_store *store, const uint64_t *steps, size_t count, uint64_t undo_s,
                               ckd_error *err) {
    ckd_id ids[16];
    ckd_delete_options o = CKD_DELETE_OPTIONS_INIT;
    o.undo_s = undo_s;
    for (size_t i = 0; i < count; i++) {
        ids[i] = id_of(store, steps[i]);
    }
    return ckd_store_delete(store, ids, count, &o, err);
}

static void check_deleted(ckd_store *store, const uint64_t *steps, size_t count, uint64_t undo_s) {
    ckd_error err = {0};
    if (delete_steps(store, steps, count, undo_s, &err) != CKD_OK) {
        fail_msg("delete: %s (%s)", err.message, err.file);
    }
}

/* The listed steps as a bit mask. Each of them must load. */
static uint64_t steps_of(ckd_store *store) {
    ckd_checkpoint_list *list;
    uint64_t bits = 0;
    ckd_error err = {0};
    assert_int_equal(ckd_store_list(&list, store, NULL, NULL), CKD_OK);
    for (size_t i = 0; i < list->count; i++) {
        scene s = scene_of(list->items[i].step);
        if (scene_load(store, &s, &err) != CKD_OK) {
            fail_msg("step %llu: %s", (unsigned long long)s.step, err.message);
        }
        bits |= UINT64_C(1) << s.step;
    }
    ckd_checkpoint_list_free(list);
    return bits;
}

static size_t files_in(const char *dir, const char *folder) {
    dir_list list;
    assert_int_equal(dir_list_read(&list, store_path_of(dir, folder), NULL), CKD_OK);
    size_t count = list.count;
    dir_list_free(&list);
    return count;
}

static ckd_store *open_store(const char *dir) {
    ckd_store *store;
    ckd_error err = {0};
    if (scene_open(&store, dir, CKD_OPEN_WRITE, &err) != CKD_OK) {
        fail_msg("open: %s", err.message);
    }
    return store;
}

static ckd_store *make_steps(const char *dir, uint64_t count) {
    scene_make(dir, 0, count);
    return open_store(dir);
}

static const uint64_t last_two[] = {1, 2}, step_2[] = {2}, step_1[] = {1};

static void test_delete_and_undelete(void **state) {
    ckd_store *store = make_steps(*state, 3);
    ckd_id gone = id_of(store, 2);
    ckd_trash *trash;
    check_deleted(store, step_2, 1, 3600);
    assert_int_equal(steps_of(store), 3);
    scene s = scene_of(2);
    assert_int_equal(scene_load_id(store, &gone, &s, NULL), CKD_E_NOT_FOUND);
    assert_int_equal(ckd_store_trash(&trash, store, NULL), CKD_OK);
    assert_int_equal(trash->count, 1);
    assert_memory_equal(&trash->items[0].checkpoint.id, &gone, sizeof(gone));
    assert_int_equal(trash->items[0].until_ns - trash->items[0].deleted_ns, UINT64_C(3600000000000));
    ckd_trash_free(trash);

    assert_int_equal(ckd_store_undelete(store, &gone, 1, NULL), CKD_OK);
    assert_int_equal(steps_of(store), 7);
    assert_int_equal(files_in(*state, "data/t"), 0);
    assert_int_equal(ckd_store_undelete(store, &gone, 1, NULL), CKD_E_NOT_FOUND);
    ckd_store_close(store);
}

/* A second handle, a reader and a rebuilt catalog see the same. */
static void test_all_see_the_same(void **state) {
    ckd_store *store = make_steps(*state, 3), *other = open_store(*state), *second;
    check_deleted(store, last_two, 2, 3600);
    assert_int_equal(steps_of(other), 1);
    assert_int_equal(scene_open(&second, *state, CKD_OPEN_READ, NULL), CKD_OK);
    assert_int_equal(steps_of(second), 1);
    ckd_store_close(second);
    ckd_store_close(other);
    ckd_store_close(store);
    assert_int_equal(ckd_store_rebuild(NULL, store_path_of(*state, ""), NULL, NULL), CKD_OK);
    store = open_store(*state);
    assert_int_equal(steps_of(store), 1);
    ckd_store_close(store);
}

/* A delta on a deleted checkpoint still loads, because its manifest names the files that it reads. */
static void test_files_of_deltas_stay(void **state) {
    ckd_store *store = make_steps(*state, 3);
    ckd_error err = {0};
    ckd_collect_options all = CKD_COLLECT_OPTIONS_INIT;
    all.all = 1;
    size_t files = files_in(*state, "data/c");
    assert_int_equal(delete_steps(store, step_1, 1, 0, &err), CKD_OK);
    assert_int_equal(steps_of(store), 1 | 4);
    assert_int_equal(ckd_store_collect(NULL, store, &all, &err), CKD_OK);
    assert_int_equal(files_in(*state, "data/c"), files);
    assert_int_equal(files_in(*state, "data/m"), 2);
    scene_check(store, 2, 1);
    scene_check(store, 0, 1);
    assert_int_equal(verify_damage(store), 0);

    ckd_id twice[] = {id_of(store, 2), id_of(store, 2)}, unknown = {{7}};
    assert_int_equal(ckd_store_delete(store, twice, 2, NULL, &err), CKD_E_INVALID);
    assert_int_equal(ckd_store_delete(store, &unknown, 1, NULL, &err), CKD_E_NOT_FOUND);
    assert_int_equal(steps_of(store), 1 | 4);
    assert_int_equal(delete_steps(store, step_2, 1, 0, &err), CKD_OK);
    assert_int_equal(ckd_store_collect(NULL, store, &all, &err), CKD_OK);
    assert_int_equal(files_in(*state, "data/c"), files - 2); /* no manifest names them now */
    ckd_store_close(store);
    assert_int_equal(scene_open(&store, *state, CKD_OPEN_READ, NULL), CKD_OK);
    assert_int_equal(ckd_store_delete(store, twice, 1, NULL, &err), CKD_E_READ_ONLY);
    assert_int_equal(ckd_store_collect(NULL, store, NULL, &err), CKD_E_READ_ONLY);
    ckd_store_close(store);
}

static void test_each_comes_back_by_itself(void **state) {
    ckd_store *store = make_steps(*state, 3);
    ckd_error err = {0};
    ckd_id ids[] = {id_of(store, 2), id_of(store, 1)};
    check_deleted(store, last_two, 2, 3600);
    assert_int_equal(ckd_store_undelete(store, ids, 1, &err), CKD_OK);
    assert_int_equal(steps_of(store), 1 | 4);
    scene_check(store, 2, 1);
    assert_int_equal(ckd_store_undelete(store, ids + 1, 1, &err), CKD_OK);
    assert_int_equal(steps_of(store), 7);
    ckd_store_close(store);
}

static ckd_collected collect(ckd_store *store, int all, int dry_run) {
    ckd_collected c;
    ckd_error err = {0};
    ckd_collect_options o = CKD_COLLECT_OPTIONS_INIT;
    o.all = all;
    o.dry_run = dry_run;
    if (ckd_store_collect(&c, store, &o, &err) != CKD_OK) {
        fail_msg("collect: %s (%s)", err.message, err.file);
    }
    return c;
}

/* A dry run reports what a collection frees. Checkpoints that can be undeleted are kept unless all are collected. */
static void test_collection_frees_what_it_reports(void **state) {
    ckd_store *store = make_steps(*state, 3);
    ckd_id gone = id_of(store, 2);
    uint64_t before, after;
    ckd_trash *trash;
    check_deleted(store, last_two, 2, 3600);
    ckd_collected c = collect(store, 0, 0);
    assert_int_equal(c.checkpoints, 0);
    assert_int_equal(c.waiting, 2);
    assert_int_equal(files_in(*state, "data/c"), 3);

    assert_int_equal(ckd_store_trash(&trash, store, NULL), CKD_OK);
    ckd_collected would = collect(store, 1, 1);
    assert_int_equal(files_in(*state, "data/c"), 3);
    assert_int_equal(trash->file_bytes, would.bytes);
    ckd_trash_free(trash);
    assert_int_equal(dir_bytes(&before, store_path_of(*state, "data"), NULL), CKD_OK);
    uint64_t tombstones;
    assert_int_equal(dir_bytes(&tombstones, store_path_of(*state, "data/t"), NULL), CKD_OK);
    c = collect(store, 1, 0);
    assert_int_equal(dir_bytes(&after, store_path_of(*state, "data"), NULL), CKD_OK);
    assert_int_equal(c.checkpoints, 2);
    assert_int_equal(c.files, 2);
    assert_int_equal(c.bytes, would.bytes);
    assert_int_equal(before - after, c.bytes + tombstones);
    assert_int_equal(files_in(*state, "data/c"), 1);
    assert_int_equal(files_in(*state, "data/m"), 1);
    assert_int_equal(files_in(*state, "data/t"), 0);
    assert_int_equal(ckd_store_undelete(store, &gone, 1, NULL), CKD_E_NOT_FOUND);
    scene_check(store, 0, 1);
    ckd_store_close(store);
    store_check_clean(*state);
}

/*
 * Opening a store for writing collects what can no longer be undeleted, except files that another checkpoint in the
 * trash needs to come back.
 */
static void test_opening_collects_expired_deletions(void **state) {
    ckd_store *store = make_steps(*state, 4);
    static const uint64_t step_3[] = {3}, middle[] = {1, 2};
    ckd_id ids[] = {id_of(store, 1), id_of(store, 2), id_of(store, 3)};
    check_deleted(store, step_3, 1, 3600);
    check_deleted(store, middle, 2, 0);
    ckd_store_close(store);
    store = open_store(*state);
    assert_int_equal(files_in(*state, "data/c"), 4);
    assert_int_equal(files_in(*state, "data/m"), 2);
    assert_int_equal(ckd_store_undelete(store, ids, 3, NULL), CKD_E_NOT_FOUND);
    assert_int_equal(ckd_store_undelete(store, ids + 2, 1, NULL), CKD_OK);
    assert_int_equal(steps_of(store), 1 | 8);
    scene_check(store, 3, 1);
    check_deleted(store, step_3, 1, 0);
    ckd_store_close(store);
    store = open_store(*state);
    assert_int_equal(files_in(*state, "data/c"), 1);
    assert_int_equal(files_in(*state, "data/t"), 0);
    assert_int_equal(steps_of(store), 1);
    ckd_store_close(store);
}

/* A step that was deleted can be saved again. Only the last of the two can be undeleted. */
static void test_deleted_step_saved_again(void **state) {
    ckd_store *store = make_steps(*state, 3);
    ckd_id old = id_of(store, 2);
    ckd_error err = {0};
    check_deleted(store, step_2, 1, 3600);
    scene s = scene_of(2);
    assert_int_equal(scene_save(NULL, store, &s, &err), CKD_OK);
    assert_int_equal(steps_of(store), 7);
    ckd_id new = id_of(store, 2);
    assert_memory_not_equal(&old, &new, sizeof(old));
    assert_int_equal(ckd_store_undelete(store, &old, 1, &err), CKD_E_EXISTS);

    check_deleted(store, step_2, 1, 3600); /* the new one is deleted too; only the last can be undeleted */
    assert_int_equal(ckd_store_undelete(store, &old, 1, &err), CKD_E_EXISTS);
    assert_int_equal(ckd_store_undelete(store, &new, 1, &err), CKD_OK);
    assert_int_equal(steps_of(store), 7);
    assert_int_equal(collect(store, 1, 0).checkpoints, 1);
    assert_int_equal(steps_of(store), 7);
    ckd_id now = id_of(store, 2);
    assert_memory_equal(&now, &new, sizeof(new));
    ckd_store_close(store);
    store_check_clean(*state);
}

/* Of several checkpoints, those that can be restored are. Each of the others says why it is not. */
static void test_the_rest_is_restored(void **state) {
    ckd_store *store = make_steps(*state, 3);
    ckd_error err = {0};
    ckd_id ids[4] = {id_of(store, 2), id_of(store, 1)};
    check_deleted(store, step_2, 1, 3600);
    scene s = scene_of(2);
    assert_int_equal(scene_save(NULL, store, &s, &err), CKD_OK);
    ids[2] = id_of(store, 2);
    memset(&ids[3], 0x5a, sizeof(ids[3]));
    check_deleted(store, last_two, 2, 3600);
    ckd_error left[4];
    memset(left, 0xff, sizeof(left));
    assert_int_equal(ckd_store_undelete(store, ids, 3, &err), CKD_E_EXISTS);
    assert_int_equal(steps_of(store), 1);
    assert_int_equal(ckd_store_undelete_each(left, store, ids, 4, &err), CKD_OK);
    assert_int_equal(left[0].status, CKD_E_EXISTS);
    assert_non_null(strstr(left[0].message, SCENE_RUN "@2 was saved again, and deleted again"));
    assert_int_equal(left[1].status, CKD_OK);
    assert_int_equal(left[2].status, CKD_OK);
    assert_int_equal(left[3].status, CKD_E_NOT_FOUND);
    assert_int_equal(steps_of(store), 7);
    ckd_id now = id_of(store, 2);
    assert_memory_equal(&now, &ids[2], sizeof(now));
    assert_int_equal(ckd_store_undelete_each(left, store, ids, 2, &err), CKD_OK);
    assert_non_null(strstr(left[0].message, SCENE_RUN "@2 was saved again;"));
    assert_int_equal(left[1].status, CKD_E_NOT_FOUND); /* it is listed */
    ckd_id twice[2] = {ids[1], ids[1]};
    check_deleted(store, step_1, 1, 3600);
    assert_int_equal(ckd_store_undelete_each(left, store, twice, 2, &err), CKD_E_INVALID);
    assert_int_equal(steps_of(store), 5);
    ckd_store_close(store);
    store_check_clean(*state);
}

/* The parent of a running save can be deleted, but its files stay. */
static void test_files_of_a_running_save_stay(void **state) {
    ckd_store *store = make_steps(*state, 2);
    ckd_error err = {0};
    size_t files = files_in(*state, "data/c");
    ckd_save *save = begin_save(store, SCENE_RUN, 2);
    ckd_id parent = id_of(store, 1);
    assert_int_equal(delete_steps(store, step_1, 1, 0, &err), CKD_OK);
    ckd_store *other = open_store(*state); /* opening collects; a save is in progress */
    ckd_store_close(other);
    assert_true(files_in(*state, "data/c") >= files);
    scene s = scene_of(2);
    assert_int_equal(scene_finish(NULL, save, &s, &err), CKD_OK);
    assert_int_equal(steps_of(store), 1 | 4);
    scene_check(store, 2, 1);
    assert_int_equal(ckd_store_undelete(store, &parent, 1, &err), CKD_OK);
    assert_int_equal(steps_of(store), 7);
    save = begin_save(store, SCENE_RUN, 3);
    ckd_save_abort(save);
    check_deleted(store, last_two, 2, 0);
    ckd_store_close(store);
}

/* A policy is applied during a save. It may delete the save's parent, whose files stay. */
static void test_policy_during_a_save(void **state) {
    ckd_store *store = make_steps(*state, 3);
    ckd_save_options o = options_of("other", 9);
    ckd_policy policy = CKD_POLICY_INIT;
    ckd_prune *plan;
    ckd_error err = {0};
    for (uint64_t step = 3; step < 6; step++) { /* bases, so that the newest ones need no earlier step */
        ckd_save_options base = options_of(SCENE_RUN, step);
        base.base = 1;
        ckd_save *save = begin_with(store, &base);
        scene s = scene_of(step);
        assert_int_equal(scene_finish(NULL, save, &s, &err), CKD_OK);
    }
    assert_int_equal(ckd_store_plan_prune(&plan, store, &policy, &err), CKD_E_INVALID);
    policy.run = "none";
    policy.keep_last = 1;
    assert_int_equal(ckd_store_plan_prune(&plan, store, &policy, &err), CKD_E_NOT_FOUND);
    policy.run = SCENE_RUN;
    o.parent_run = SCENE_RUN;
    o.parent_step = 1;
    ckd_save *save = begin_with(store, &o);
    assert_int_equal(ckd_store_plan_prune(&plan, store, &policy, &err), CKD_OK);
    assert_int_equal(plan->count, 6);
    assert_int_equal(plan->deleted, 4);
    for (size_t i = 0; i < 4; i++) {
        assert_int_equal(plan->items[i].kept, 0);
    }
    assert_int_equal(plan->items[5].kept, CKD_KEPT_LAST | CKD_KEPT_SAFETY);
    ckd_prune_free(plan);
    assert_int_equal(ckd_store_prune(&plan, store, &policy, NULL, &err), CKD_OK);
    ckd_prune_free(plan);
    assert_int_equal(steps_of(store), 16 | 32);
    scene other = scene_of(9);
    other.run = "other";
    assert_int_equal(scene_finish(NULL, save, &other, &err), CKD_OK);
    assert_int_equal(verify_damage(store), 0);
    ckd_store_close(store);
}

static void test_collecting_waits_for_readers(void **state) {
    ckd_store *store, *writer;
    ckd_error err = {0};
    ckd_load *load;
    scene_make(*state, 0, 3);
    ckd_store_options o = CKD_STORE_OPTIONS_INIT;
    o.lock_timeout_ms = 50;
    assert_int_equal(ckd_store_open(&store, store_path_of(*state, ""), CKD_OPEN_WRITE, &o, NULL), CKD_OK);
    ckd_id id = id_of(store, 2);
    assert_int_equal(ckd_load_begin(&load, store, &id, NULL), CKD_OK);
    check_deleted(store, step_2, 1, 0);
    assert_int_equal(ckd_store_collect(NULL, store, NULL, &err), CKD_E_BUSY);
    writer = open_store(*state); /* opening for writing does not wait for the reader */
    assert_int_equal(files_in(*state, "data/c"), 3);
    ckd_store_close(writer);
    ckd_load_end(load);
    assert_int_equal(collect(store, 0, 0).checkpoints, 1);
    assert_int_equal(files_in(*state, "data/c"), 2);
    ckd_store_close(store);
}

/* ---- manifests of early versions ---- */

static int fail_sync_of_manifests(void *context, file_op step, const char *path) {
    bool *failed = context;
    const char *name = strrchr(path, '/');
    if (step != FILE_OP_DIR_SYNC || !name || strcmp(name, "/m") != 0 || *failed) {
        return 0;
    }
    *failed = true;
    return EIO;
}

/* A collection completes such manifests. One whose name may not last is withdrawn: after a failure, nothing changed. */
static void test_failed_upgrade_is_withdrawn(void **state) {
    bool failed = false;
    scene_make(*state, 0, 3);
    early_store(*state);
    ckd_store *store = open_store(*state);
    manifest_set n;
    size_t before = files_in(*state, "data/m");
    assert_int_equal(manifest_set_read(&n, store, NULL), CKD_OK);
    manifest_entry *x = n.items; /* sorted by id; the base needs no upgrade */
    while (x->m.checkpoint.step != 2) {
        x++;
    }
    assert_true(x->was_own_only && !x->in_trash);
    file_set_fault_hook(fail_sync_of_manifests, &failed);
    ckd_status status = manifest_entry_upgrade(x, store, NULL);
    file_set_fault_hook(NULL, NULL);
    assert_true(failed);
    assert_int_equal(status, CKD_E_IO);
    assert_int_equal(files_in(*state, "data/m"), before);
    manifest_set_free(&n);
    assert_int_equal(steps_of(store), 7);
    ckd_store_close(store);
}

/* ---- tombstones without a manifest ---- */

static char messages[4096];

static void remember(void *context, const char *message) {
    (void)context;
    size_t used = strlen(messages);
    snprintf(messages + used, sizeof(messages) - used, "%s\n", message);
}

static int fail_tombstones(void *context, file_op step, const char *path) {
    (void)context;
    return step == FILE_OP_OPEN && strstr(path, "/data/t/run.") ? EIO : 0;
}

/* Writes a metadata file as a program of that version does. */
static void write_version(const char *path, unsigned char *data, size_t size, uint16_t version) {
    store_le16(data + 8, version);
    store_le64(data + size - 8, hash64(data, size - 8));
    write_whole_file(path, data, size);
}

/* A tombstone that cannot be read now may be readable later, and stays. A damaged one never will be, and goes. */
static void test_unreadable_tombstones_stay(void **state) {
    ckd_store_options o = CKD_STORE_OPTIONS_INIT;
    ckd_store *store = make_steps(*state, 3);
    const char *path = store_path_of(*state, "data/t/run.2.0");
    size_t size;
    check_deleted(store, step_2, 1, 3600);
    ckd_store_close(store);
    assert_int_equal(unlink(store_path_of(*state, "data/m/run.2.0")), 0);
    o.on_message = remember;
    messages[0] = '\0';
    assert_int_equal(ckd_store_open(&store, store_path_of(*state, ""), CKD_OPEN_WRITE, &o, NULL), CKD_OK);
    unsigned char *data = read_whole_file(path, &size);
    for (int all = 0; all < 2; all++) {
        file_set_fault_hook(fail_tombstones, NULL);
        collect(store, all, 0);
        file_set_fault_hook(NULL, NULL);
        assert_true(file_exists(path));
        write_version(path, data, size, 2);
        collect(store, all, 0);
        assert_true(file_exists(path));
        write_version(path, data, size, 1);
    }
    assert_non_null(strstr(messages, "the record of a deleted checkpoint cannot be read and stays"));
    data[size - 1] ^= 1;
    write_whole_file(path, data, size);
    collect(store, 0, 0);
    assert_false(file_exists(path));
    free(data);
    ckd_store_close(store);
}

/* Says what a deletion would, and changes nothing. Calls that delete by rules refuse it. */
static void test_dry_run(void **state) {
    ckd_delete_options o = CKD_DELETE_OPTIONS_INIT;
    ckd_policy policy = CKD_POLICY_INIT;
    ckd_error err = {0};
    scene_make(*state, 0, 4);
    ckd_store *store = store_reopen(*state, CKD_OPEN_WRITE);
    const ckd_id ids[] = {id_of(store, 1), id_of(store, 2)};
    char *before = tree_describe(store_path_of(*state, "data"));
    o.dry_run = 1;
    policy.keep_last = 2;
    assert_int_equal(ckd_store_delete(store, ids, 2, &o, &err), CKD_OK);
    assert_int_equal(ckd_store_prune(NULL, store, &policy, &o, &err), CKD_E_INVALID);
    char *after = tree_describe(store_path_of(*state, "data"));
    assert_string_equal(before, after);
    assert_int_equal(steps_of(store), 15);
    assert_int_equal(ckd_store_pin(store, &ids[1], "", &err), CKD_OK);
    assert_int_equal(ckd_store_delete(store, ids, 2, &o, &err), CKD_E_STATE);
    free(before);
    free(after);
    ckd_store_close(store);
}

static int fail_new_tombstones(void *context, file_op step, const char *path) {
    (void)context;
    return step == FILE_OP_WRITE && strstr(path, "/data/t/") ? EIO : 0;
}

/* The trash cannot be emptied, and the error says why. Nothing is lost. */
static void test_tombstones_cannot_be_replaced(void **state) {
    ckd_collect_options all = CKD_COLLECT_OPTIONS_INIT;
    ckd_error err = {0};
    scene_make(*state, 0, 3);
    ckd_store *store = store_reopen(*state, CKD_OPEN_WRITE);
    ckd_id id = id_of(store, 1);
    check_deleted(store, step_1, 1, 3600);
    all.all = 1;
    file_set_fault_hook(fail_new_tombstones, NULL);
    assert_int_equal(ckd_store_collect(NULL, store, &all, &err), CKD_E_IO);
    file_set_fault_hook(NULL, NULL);
    assert_true(err.message[0] && err.sys_errno == EIO);
    assert_int_equal(ckd_store_undelete(store, &id, 1, &err), CKD_OK);
    assert_int_equal(steps_of(store), 7);
    ckd_store_close(store);
}

/* While a manifest cannot be read, nothing is deleted: that checkpoint may need any of the files. */
static void test_nothing_is_deleted_while_a_manifest_is_damaged(void **state) {
    ckd_store *store = make_steps(*state, 3);
    ckd_error err = {0};
    check_deleted(store, step_2, 1, 0);
    const char *path = store_path_of(*state, "data/m/run.1.0");
    size_t size;
    unsigned char *data = read_whole_file(path, &size);
    data[size / 2] ^= 1;
    write_whole_file(path, data, size);
    ckd_id id = id_of(store, 0);
    assert_int_equal(ckd_store_delete(store, &id, 1, NULL, &err), CKD_E_CORRUPT);
    assert_non_null(strstr(err.file, "run.1.0"));
    assert_int_equal(ckd_store_collect(NULL, store, NULL, &err), CKD_E_CORRUPT);
    ckd_store_close(store);
    assert_int_equal(files_in(*state, "data/c"), 3);
    free(data);
}

static void test_undelete_without_files_is_refused(void **state) {
    ckd_store *store = make_steps(*state, 3);
    ckd_error err = {0};
    ckd_id id = id_of(store, 2);
    size_t before = files_in(*state, "data/c");
    check_deleted(store, step_2, 1, 3600);
    dir_list list;
    assert_int_equal(dir_list_read(&list, store_path_of(*state, "data/c"), NULL), CKD_OK);
    for (size_t i = 0; i < list.count; i++) { /* as an interrupted collection leaves it */
        char path[128];
        snprintf(path, sizeof(path), "data/c/%s", list.names[i]);
        assert_int_equal(unlink(store_path_of(*state, path)), 0);
    }
    assert_int_equal(before, list.count);
    dir_list_free(&list);
    assert_int_equal(ckd_store_undelete(store, &id, 1, &err), CKD_E_NOT_FOUND);
    assert_non_null(strstr(err.message, "cannot be restored"));
    ckd_store_close(store);
}

/* ---- random operations, compared with a model ---- */

typedef struct model {
    ckd_store *store;
    uint64_t listed, trashed; /* bit masks of steps */
    ckd_id ids[32];
} model;

static void model_save(model *m, uint64_t step) {
    ckd_error err = {0};
    scene s = scene_of(step);
    ckd_checkpoint c;
    if (scene_save(&c, m->store, &s, &err) != CKD_OK) {
        fail_msg("save: %s", err.message);
    }
    m->ids[step] = c.id;
    m->listed |= UINT64_C(1) << step;
    m->trashed &= ~(UINT64_C(1) << step); /* the deleted one cannot be undeleted any more */
}

/* Deletes or undeletes some steps. If the store refuses, it must not have changed. */
static void model_move(model *m, uint64_t which, bool deletes) {
    ckd_id ids[32];
    size_t count = 0;
    ckd_error err = {0};
    for (uint64_t step = 0; step < 32; step++) {
        if (which >> step & 1) {
            ids[count++] = m->ids[step];
        }
    }
    ckd_delete_options o = CKD_DELETE_OPTIONS_INIT;
    ckd_status status = deletes ? ckd_store_delete(m->store, ids, count, &o, &err)
                                : ckd_store_undelete(m->store, ids, count, &err);
    if (status == CKD_OK) {
        m->listed ^= which;
        m->trashed ^= which;
    } else if (status != CKD_E_STATE) {
        fail_msg("%s: %s: %s", deletes ? "delete" : "undelete", ckd_status_name(status), err.message);
    }
}

static void test_random_operations(void **state) {
    uint64_t moved = 0;
    int turns = under_sanitizer() ? 60 : 300;
    model m = {.store = make_steps(*state, 1), .listed = 1};
    m.ids[0] = id_of(m.store, 0);
    for (int turn = 0; turn < turns; turn++) {
        uint64_t r = next_random(), step = r >> 8 & 15;
        uint64_t some = next_random() & (r & 1024 ? UINT64_MAX : next_random());
        uint64_t listed = m.listed, before = moved;
        switch (r % 8) {
        case 0:
        case 1:
        case 2:
            if (!(m.listed >> step & 1)) {
                model_save(&m, step);
            }
            break;
        case 3:
        case 4:
            model_move(&m, m.listed & some, true);
            break;
        case 5:
            model_move(&m, m.trashed & some, false);
            break;
        case 6:
            if (r & 2048) {
                collect(m.store, 1, 0);
                m.trashed = 0;
            }
            break;
        default:
            ckd_store_close(m.store);
            m.store = open_store(*state);
        }
        moved += listed != m.listed;
        if (moved != before) {
            assert_int_equal(steps_of(m.store), m.listed);
        }
    }
    assert_true(moved > (uint64_t)turns / 10);
    collect(m.store, 1, 0);
    ckd_store_close(m.store);
    store_check_clean(*state);
    assert_int_equal(files_in(*state, "data/m"), __builtin_popcountll(m.listed));
}

/* ---- deletion during a verification ---- */

typedef struct meanwhile {
    ckd_store *store;
    bool done;
} meanwhile;

static int delete_the_last(void *context, uint64_t done, uint64_t total) {
    meanwhile *m = context;
    const uint64_t last = 3;
    (void)done;
    (void)total;
    if (!m->done) {
        m->done = true;
        check_deleted(m->store, &last, 1, 3600);
    }
    return 0;
}

/* A checkpoint that is deleted while a verification runs is not reported as damage. */
static void test_deleted_while_verified(void **state) {
    scene_make(*state, 0, 4);
    for (int quick = 0; quick < 2; quick++) {
        ckd_store *store, *looking;
        ckd_verify_options o = CKD_VERIFY_OPTIONS_INIT;
        ckd_verify_result *found;
        assert_int_equal(scene_open(&store, *state, CKD_OPEN_WRITE, NULL), CKD_OK);
        assert_int_equal(scene_open(&looking, *state, CKD_OPEN_READ, NULL), CKD_OK);
        meanwhile m = {.store = store};
        o.on_progress = delete_the_last;
        o.progress_context = &m;
        o.sample = quick ? 0.9999 : 0;
        assert_int_equal(ckd_store_verify(&found, looking, &o, NULL), CKD_OK);
        assert_true(m.done);
        assert_int_equal(found->damage_count, 0);
        ckd_verify_result_free(found);
        ckd_trash *trash;
        assert_int_equal(ckd_store_trash(&trash, store, NULL), CKD_OK);
        assert_int_equal(trash->count, 1);
        assert_int_equal(ckd_store_undelete(store, &trash->items[0].checkpoint.id, 1, NULL), CKD_OK);
        ckd_trash_free(trash);
        ckd_store_close(looking);
        ckd_store_close(store);
    }
}

/* Restores what delete_the_last deleted, before the tombstones are listed for the nth time since. */
typedef struct restoration {
    meanwhile deletion;
    size_t n, listings;
    bool deleted, restored;
} restoration;

static int delete_for_restoration(void *context, uint64_t done, uint64_t total) {
    restoration *r = context;
    int failed = delete_the_last(&r->deletion, done, total);
    r->deleted = true; /* only now, as a deletion lists tombstones, too */
    return failed;
}

static int restore_at_listing(void *context, file_op step, const char *path) {
    restoration *r = context;
    size_t length = strlen(path), end = strlen("/data/t");
    bool listing = step == FILE_OP_OPEN && length > end && strcmp(path + length - end, "/data/t") == 0;
    if (listing && r->deleted && !r->restored && r->listings++ == r->n) {
        ckd_trash *trash;
        r->restored = true; /* first, as these calls list them, too */
        assert_int_equal(ckd_store_trash(&trash, r->deletion.store, NULL), CKD_OK);
        assert_int_equal(trash->count, 1);
        assert_int_equal(ckd_store_undelete(r->deletion.store, &trash->items[0].checkpoint.id, 1, NULL),
                         CKD_OK);
        ckd_trash_free(trash);
    }
    return 0;
}

/* A deletion that is undone while a verification runs is not reported as damage, whenever it is undone. */
static void test_restored_while_verified(void **state) {
    scene_make(*state, 0, 4);
    size_t n = 0;
    for (bool restored = true; restored; n++) {
        ckd_store *store, *looking;
        ckd_verify_options o = CKD_VERIFY_OPTIONS_INIT;
        ckd_verify_result *found;
        assert_int_equal(scene_open(&store, *state, CKD_OPEN_WRITE, NULL), CKD_OK);
        assert_int_equal(scene_open(&looking, *state, CKD_OPEN_READ, NULL), CKD_OK);
        restoration r = {.deletion.store = store, .n = n};
        o.on_progress = delete_for_restoration;
        o.progress_context = &r;
        o.sample = 0.9999;
        file_set_fault_hook(restore_at_listing, &r);
        assert_int_equal(ckd_store_verify(&found, looking, &o, NULL), CKD_OK);
        file_set_fault_hook(NULL, NULL);
        assert_int_equal(found->damage_count, 0);
        restored = r.restored;
        ckd_verify_result_free(found);
        ckd_store_close(looking);
        ckd_store_close(store);
    }
    assert_true(n > 2);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        tempdir_test(test_delete_and_undelete),
        tempdir_test(test_all_see_the_same),
        tempdir_test(test_files_of_deltas_stay),
        tempdir_test(test_each_comes_back_by_itself),
        tempdir_test(test_collection_frees_what_it_reports),
        tempdir_test(test_opening_collects_expired_deletions),
        tempdir_test(test_deleted_step_saved_again),
        tempdir_test(test_the_rest_is_restored),
        tempdir_test(test_files_of_a_running_save_stay),
        tempdir_test(test_policy_during_a_save),
        tempdir_test(test_collecting_waits_for_readers),
        tempdir_test(test_unreadable_tombstones_stay),
        tempdir_test(test_dry_run),
        tempdir_test(test_tombstones_cannot_be_replaced),
        tempdir_test(test_failed_upgrade_is_withdrawn),
        tempdir_test(test_nothing_is_deleted_while_a_manifest_is_damaged),
        tempdir_test(test_undelete_without_files_is_refused),
        tempdir_test(test_deleted_while_verified),
        tempdir_test(test_restored_while_verified),
        tempdir_test(test_random_operations),
    };
    scratch_begin();
    int failed = cmocka_run_group_tests_name("delete", tests, NULL, NULL);
    scratch_end();
    return failed;
}
