/*
 * The power fails after any operation of the library and of SQLite below it. tests/support/crash_disk.h has the model
 * of the disk, tests/support/power.h enumerates the disks that a power failure can leave.
 *
 * On all of them every committed checkpoint is there, anything else is there completely or not at all, and no file is
 * left that nothing names. Each call that syncs is also left out once, which must lose something.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/file.h"
#include "tests/support/compactions.h"
#include "tests/support/fingerprints.h"
#include "tests/support/level.h"
#include "tests/support/marks.h"
#include "tests/support/power_disk.h"
#include "tests/support/power_follow.h"
#include "tests/support/power_local.h"
#include "tests/support/power_rest.h"
#include "tests/support/scenes.h"
#include "tests/support/scratch.h"
#include "tests/support/survivors.h"
#include "tests/support/tempdir.h"

static void save_thrice(disk *d) {
    disk_begin(d, 0, 0);
    ckd_store *store = disk_open(d, CKD_OPEN_CREATE);
    disk_save(d, store, 0, false);
    disk_save(d, store, 1, false);
    ckd_store_close(store);
    store = disk_open(d, CKD_OPEN_WRITE);
    disk_save(d, store, 2, true);
    ckd_store_close(store);
    assert_int_equal(d->p.now.committed, 7);
    disk_end("three saves", d, 3);
}

static void test_new_store_base_delta_and_ranks(void **state) {
    save_thrice(*state);
}

/* Steps 1 and 2 are deleted, undeleted, deleted again and removed. Whatever is listed can be loaded. */
static void test_deleting(void **state) {
    disk *d = *state;
    ckd_error err = {0};
    ckd_checkpoint c[2];
    ckd_delete_options o = CKD_DELETE_OPTIONS_INIT;
    scene_make(d->p.dir, 0, 3);
    disk_begin(d, 1, 7);
    ckd_store *store = disk_open(d, CKD_OPEN_WRITE);
    disk_must(ckd_store_find(&c[0], store, SCENE_RUN, 1, &err), &err);
    disk_must(ckd_store_find(&c[1], store, SCENE_RUN, 2, &err), &err);
    ckd_id ids[] = {c[0].id, c[1].id};
    disk_must(ckd_store_delete(store, ids, 2, &o, &err), &err);
    disk_must(ckd_store_undelete(store, ids, 2, &err), &err);
    disk_expect(d, 7, 7);
    disk_expect(d, 1, 7); /* from here on they may be deleted */
    o.undo_s = 0;
    disk_must(ckd_store_delete(store, ids, 2, &o, &err), &err);
    disk_expect(d, 1, 1);
    disk_must(ckd_store_collect(NULL, store, NULL, &err), &err);
    ckd_store_close(store);
    disk_end("delete", d, 3);
}

/* The trash is emptied before its time. An entry that has lost a file must not look as if it could be undeleted. */
static void test_emptying_the_trash(void **state) {
    disk *d = *state;
    ckd_error err = {0};
    ckd_collect_options o = CKD_COLLECT_OPTIONS_INIT;
    o.all = 1;
    scene_make(d->p.dir, 0, 3);
    scene_trash(d->p.dir, 1, 2);
    disk_begin(d, 1, 1);
    ckd_store *store = disk_open(d, CKD_OPEN_WRITE);
    disk_must(ckd_store_collect(NULL, store, &o, &err), &err);
    ckd_store_close(store);
    disk_end("empty", d, 3);
}

static void test_pinning_and_tagging(void **state) {
    disk *d = *state;
    ckd_error err = {0};
    scene_make(d->p.dir, 0, 3);
    d->p.now.flags = MARKED;
    disk_begin(d, 7, 7);
    ckd_store *store = disk_open(d, CKD_OPEN_WRITE);
    while (d->p.now.marks < MARK_CHANGES) {
        disk_must(mark_change(store, d->p.now.marks++, &err), &err);
        power_expect(&d->p);
    }
    ckd_store_close(store);
    disk_end("pins and tags", d, 3);
}

/* Copies and archives often lack empty folders. Here data/n, the folder of pins and tags. */
static void pin_in_a_copy(disk *d, bool made_by_another) {
    ckd_error err = {0};
    scene_make(d->p.dir, 0, 3);
    assert_int_equal(rmdir(store_path_of(d->p.dir, "data/n")), 0);
    if (made_by_another) { /* who died before it was durable */
        assert_int_equal(mkdir(store_path_of(d->p.dir, "data/n"), 0777), 0);
    }
    d->p.now = (expectation){.committed = 7, .possible = 7, .flags = MARKED};
    power_begin(&d->p, made_by_another ? "n" : NULL);
    ckd_store *store = disk_open(d, CKD_OPEN_WRITE);
    disk_must(mark_change(store, d->p.now.marks++, &err), &err);
    power_expect(&d->p);
    ckd_store_close(store);
    disk_end("pins in a copy", d, 3);
}

static void test_pinning_in_a_copy_without_empty_folders(void **state) {
    pin_in_a_copy(*state, false);
}

static void test_pinning_in_a_folder_that_may_be_lost(void **state) {
    pin_in_a_copy(*state, true);
}

/* An automatic policy, applied after a save. */
static void test_pruning(void **state) {
    disk *d = *state;
    ckd_error err = {0};
    scene s = scene_of(4);
    s.base = true;
    scene_make_pruning(d->p.dir, 4, 0);
    disk_begin(d, 8, 31);
    ckd_store *store = disk_open(d, CKD_OPEN_WRITE);
    disk_must(scene_save(NULL, store, &s, &err), &err);
    disk_expect(d, 24, 24); /* by now the others are deleted for good */
    ckd_store_close(store);
    disk_end("prune", d, 5);
}

/* First to a depth of 1; then the newest two take over what they need of the others. */
static void test_compacting(void **state) {
    disk *d = *state;
    ckd_error err = {0};
    ckd_compact_options o = CKD_COMPACT_OPTIONS_INIT;
    ckd_policy policy = CKD_POLICY_INIT;
    ckd_delete_options now = CKD_DELETE_OPTIONS_INIT;
    policy.keep_last = 2;
    now.undo_s = 0;
    o.max_depth = 1;
    scene_make(d->p.dir, 0, 4);
    disk_begin(d, 15, 15);
    ckd_store *store = disk_open(d, CKD_OPEN_WRITE);
    disk_must(ckd_compact(NULL, store, &o, &err), &err);
    disk_expect(d, 12, 15); /* from here on any of the others may be deleted */
    o.policy = &policy;
    o.deletion = &now;
    disk_must(ckd_compact(NULL, store, &o, &err), &err);
    disk_must(ckd_store_collect(NULL, store, NULL, &err), &err);
    disk_expect(d, 12, 12);
    ckd_store_close(store);
    disk_end("compact", d, 4);
}

/* The store is in DIR/new/above. */
static power_check_fn check_store;
static const char *below(const char *dir) {
    static char path[1024];
    snprintf(path, sizeof(path), "%s/new/above", dir);
    return path;
}
static void check_below(const char *dir, const expectation *e, bool thorough, void *context) {
    char new[1024];
    snprintf(new, sizeof(new), "%s/new", dir);
    (void)mkdir(new, 0777); /* for the check's own files; a directory that was lost is empty now */
    (void)mkdir(below(dir), 0777);
    check_store(below(dir), e, thorough, context);
}

static void new_parents(disk *d, const char *lost) {
    ckd_error err = {0};
    ckd_store *store;
    check_store = d->p.check;
    d->p.check = check_below;
    power_begin(&d->p, lost);
    disk_must(scene_open(&store, below(d->p.dir), CKD_OPEN_CREATE, &err), &err);
    disk_save(d, store, 0, false);
    ckd_store_close(store);
    disk_end("new parents", d, 1);
}

static void test_new_store_below_new_directories(void **state) {
    new_parents(*state, NULL);
}
/* The process that made the directories died before they were durable. */
static void test_new_store_below_directories_that_may_be_lost(void **state) {
    disk *d = *state;
    char path[1024];
    snprintf(path, sizeof(path), "%s/new", d->p.dir);
    assert_int_equal(mkdir(path, 0777), 0);
    new_parents(d, "new");
}

/* The process that created the store died before the names of its files were durable. */
static void creator_died(disk *d, const char *lost, ckd_open_mode mode) {
    ckd_store_close(disk_open(d, CKD_OPEN_CREATE));
    assert_int_equal(unlink(store_path_of(d->p.dir, "catalog.db")), 0); /* it did not get that far */
    power_begin(&d->p, lost);
    ckd_store *store = disk_open(d, mode);
    disk_save(d, store, 0, false);
    ckd_store_close(store);
    disk_end(lost, d, 1);
}

static void test_store_whose_creator_died(void **state) {
    creator_died(*state, "store", CKD_OPEN_CREATE);
}
static void test_store_whose_creator_died_opened_for_writing(void **state) {
    creator_died(*state, "store", CKD_OPEN_WRITE);
}
static void test_store_whose_creator_died_before_its_folder_was_synced(void **state) {
    creator_died(*state, "data", CKD_OPEN_WRITE);
}

/* ---- a writer dies between naming a file and syncing the folder ---- */

typedef struct death {
    const char *folder;
    unsigned syncs; /* number of syncs of the folder up to the death */
} death;

static int die_at_sync(void *context, file_op step, const char *path) {
    death *d = context;
    return step == FILE_OP_DIR_SYNC && strstr(path, d->folder) && --d->syncs == 0 ? (raise(SIGKILL), 0) : 0;
}

static void die_while(const disk *d, death at, void (*work)(ckd_store *store)) {
    fflush(NULL);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        ckd_store *store;
        if (scene_open(&store, d->p.dir, CKD_OPEN_WRITE, NULL) == CKD_OK) {
            file_set_fault_hook(die_at_sync, &at);
            work(store);
        }
        _exit(1);
    }
    int state;
    assert_int_equal(waitpid(pid, &state, 0), pid);
    assert_true(WIFSIGNALED(state));
}

static void save_step_2(ckd_store *store) {
    scene s = scene_of(2);
    scene_save(NULL, store, &s, NULL);
}

/*
 * A writer that finds the manifest of a dead writer, and answers that the step is already saved, must make it durable
 * first.
 */
static void save_again(disk *d, bool open_before) {
    scene_make(d->p.dir, 0, 2);
    ckd_store *store = open_before ? disk_open(d, CKD_OPEN_WRITE) : NULL;
    die_while(d, (death){"data/m", 1}, save_step_2);
    d->p.now = (expectation){.committed = 3, .possible = 7};
    power_begin(&d->p, "run.2.0");
    if (!store) {
        store = disk_open(d, CKD_OPEN_WRITE);
    }
    ckd_save_options o = CKD_SAVE_OPTIONS_INIT;
    o.run = SCENE_RUN;
    o.step = 2;
    o.on_duplicate = CKD_DUPLICATE_SAME_OK;
    ckd_save *compare;
    ckd_error err = {0};
    scene s = scene_of(2);
    assert_int_equal(ckd_save_begin(&compare, store, &o, &err), CKD_OK);
    if (scene_finish(NULL, compare, &s, &err) != CKD_OK) {
        fail_msg("the same again: %s", err.message);
    }
    disk_expect(d, 7, 7);
    ckd_store_close(store);
    disk_end("the same again", d, 3);
}

static void test_saving_again_after_a_writer_died(void **state) {
    save_again(*state, false);
}
static void test_saving_again_in_an_open_store(void **state) {
    save_again(*state, true);
}

/* ---- renaming a run ---- */

enum { RENAMED = 512 }; /* a flag of the expectation: the run has its new name */
#define NEW_NAME "new"

static power_check_fn check_steps; /* checks the steps of SCENE_RUN */

/*
 * Opening the store for writing completes the rename, so that no manifest has the old name. Then the run is renamed
 * back.
 */
static void check_renamed(const char *dir, const expectation *e, bool thorough, void *context) {
    ckd_store *store;
    ckd_error err = {0};
    ckd_checkpoint c;
    dir_list list;
    disk_must(scene_open(&store, dir, CKD_OPEN_WRITE, &err), &err);
    bool renamed = ckd_store_find(&c, store, NEW_NAME, CKD_LATEST, NULL) == CKD_OK;
    assert_true(renamed || !(e->flags & RENAMED));
    disk_must(dir_list_read(&list, store_path_of(dir, "data/m"), &err), &err);
    assert_int_equal(list.count, __builtin_popcountll(e->committed));
    dir_list_free(&list);
    if (renamed) {
        disk_must(ckd_store_rename_run(NULL, store, NEW_NAME, SCENE_RUN, NULL, &err), &err);
    }
    ckd_store_close(store);
    check_steps(dir, e, thorough, context);
}

static void test_renaming(void **state) {
    disk *d = *state;
    ckd_error err = {0};
    scene_make(d->p.dir, 0, 3);
    check_steps = d->p.check;
    d->p.check = check_renamed;
    disk_begin(d, 7, 7);
    ckd_store *store = disk_open(d, CKD_OPEN_WRITE);
    disk_must(ckd_store_rename_run(NULL, store, SCENE_RUN, NEW_NAME, NULL, &err), &err);
    disk_flags(d, RENAMED);
    ckd_store_close(store);
    disk_end("rename", d, 3);
}

static void rename_it(ckd_store *store) {
    ckd_store_rename_run(NULL, store, SCENE_RUN, NEW_NAME, NULL, NULL);
}

/* The renaming process dies. The next writer completes the rename. */
static void renamer_dies(disk *d, death at, uint64_t steps, const char *lost) {
    scene_make(d->p.dir, 0, steps);
    check_steps = d->p.check;
    d->p.check = check_renamed;
    die_while(d, at, rename_it);
    d->p.now = (expectation){.committed = (1u << steps) - 1, .possible = (1u << steps) - 1};
    power_begin(&d->p, lost);
    ckd_store_close(disk_open(d, CKD_OPEN_WRITE));
    disk_flags(d, RENAMED);
    disk_end(lost, d, steps);
}

static void test_renamer_died_at_its_record(void **state) {
    renamer_dies(*state, (death){"data/n", 1}, 3, "rename.run.0");
}
static void test_renamer_died_at_a_manifest(void **state) {
    renamer_dies(*state, (death){"data/m", 1}, 1, NEW_NAME ".0.1");
}

/* ---- a compaction dies before its manifest is durable ---- */

static void compact_it(ckd_store *store) {
    ckd_compact_options o = CKD_COMPACT_OPTIONS_INIT;
    o.max_depth = 1;
    ckd_compact(NULL, store, &o, NULL);
}

/* Another writer that was already active removes the replaced generation without a recovery. */
static void test_compactor_died(void **state) {
    disk *d = *state;
    ckd_error err = {0};
    scene_make(d->p.dir, 0, 3);
    ckd_store *store = disk_open(d, CKD_OPEN_WRITE);
    die_while(d, (death){"data/m", 1}, compact_it);
    d->p.now = (expectation){.committed = 7, .possible = 7};
    power_begin(&d->p, "run.1.1");
    disk_must(ckd_store_collect(NULL, store, NULL, &err), &err);
    ckd_store_close(store);
    disk_end("a dead compaction", d, 3);
}

/* ---- a deletion dies before its tombstone is durable ---- */

static void delete_step_2(ckd_store *store) {
    ckd_checkpoint c;
    ckd_delete_options o = CKD_DELETE_OPTIONS_INIT;
    o.undo_s = 0;
    if (ckd_store_find(&c, store, SCENE_RUN, 2, NULL) == CKD_OK) {
        ckd_store_delete(store, &c.id, 1, &o, NULL);
    }
}

/* Another writer removes the files. The checkpoint must not be listed again without them. */
static void test_deleter_died(void **state) {
    disk *d = *state;
    ckd_error err = {0};
    scene_make(d->p.dir, 0, 3);
    ckd_store *store = disk_open(d, CKD_OPEN_WRITE);
    die_while(d, (death){"data/t", 1}, delete_step_2);
    d->p.now = (expectation){.committed = 3, .possible = 7};
    power_begin(&d->p, "store/data/t/run.2.0");
    disk_must(ckd_store_collect(NULL, store, NULL, &err), &err);
    disk_expect(d, 3, 3);
    ckd_store_close(store);
    disk_end("a dead deletion", d, 3);
}

/*
 * Another program holds the catalog, so that the row of the deleted checkpoint stays in it. Only the new deletion mark
 * then tells that the row proves nothing.
 */
static void deletion_beside_a_program(disk *d, file_fault_fn hook) {
    ckd_error err = {0};
    struct flock reserved = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 0x40000001, .l_len = 1};
    scene_make(d->p.dir, 0, 3);
    ckd_store *store = disk_open(d, CKD_OPEN_WRITE);
    disk_begin(d, 3, 7);
    int program = open(store_path_of(d->p.dir, "catalog.db"), O_RDWR | O_CLOEXEC);
    assert_true(program >= 0 && fcntl(program, F_OFD_SETLK, &reserved) == 0);
    file_set_fault_hook(hook, NULL);
    delete_step_2(store);
    file_set_fault_hook(NULL, NULL);
    disk_expect(d, 3, 3);
    disk_must(ckd_store_collect(NULL, store, NULL, &err), &err);
    close(program);
    ckd_store_close(store);
    disk_end("deletion beside a program", d, 3);
}

static void test_deletion_beside_a_program(void **state) {
    deletion_beside_a_program(*state, NULL);
}

static int no_space_for_the_mark(void *context, file_op step, const char *path) {
    (void)context;
    return step == FILE_OP_CREATE && strstr(path, "data/.tmp-deletions") ? ENOSPC : 0;
}

/* The old mark must not come back either when the disk is full, so that it is removed. */
static void test_deletion_beside_a_program_on_a_full_disk(void **state) {
    deletion_beside_a_program(*state, no_space_for_the_mark);
}

static void test_catalog_is_mended(void **state) {
    static const char noise[4096] = "this is not a database";
    disk *d = *state;
    scene_make(d->p.dir, 0, 2);
    write_whole_file(store_path_of(d->p.dir, "catalog.db"), noise, sizeof(noise));
    disk_begin(d, 3, 3);
    ckd_store *store = disk_open(d, CKD_OPEN_WRITE);
    disk_save(d, store, 2, false);
    ckd_store_close(store);
    assert_int_equal(ckd_store_rebuild(NULL, store_path_of(d->p.dir, ""), NULL, NULL), CKD_OK);
    disk_end("mended catalog", d, 3);
}

static void test_abort_leaves_nothing(void **state) {
    disk *d = *state;
    scene_make(d->p.dir, 0, 2);
    disk_begin(d, 3, 3);
    ckd_store *store = disk_open(d, CKD_OPEN_WRITE);
    ckd_save_options o = CKD_SAVE_OPTIONS_INIT;
    o.run = SCENE_RUN;
    o.step = 2;
    ckd_save *aborted;
    ckd_part part;
    assert_int_equal(ckd_save_begin(&aborted, store, &o, NULL), CKD_OK);
    assert_int_equal(ckd_save_blob(aborted, "b", "x", 1, NULL), CKD_OK);
    assert_int_equal(ckd_save_seal(&part, aborted, NULL), CKD_OK);
    ckd_part_free(&part);
    ckd_save_abort(aborted);
    ckd_store_close(store);
    disk_end("abort", d, 2);
}

/* Syncs that may be left out, each with the reason. */
static const char *const spared[] = {
    "base/file_mount.c:fetch a file of a place elsewhere: test_mirror and the tests of stores in buckets have that",
    "base/file_names.c:file_sync_parent a path without a folder, which a store has not",
    "catalog/fault_vfs.c:sync_parent the catalog's journal: the catalog can be made anew",
    "engine/retain/trash.c:remove_one it frees the space of the file at once",
    "engine/retain/trash.c:remove_replaced the catalog's refresh has synced the folder before, unless no catalog can be used",
    "engine/store/deletions.c:replace_mark tombstones stay until the catalog has forgotten their checkpoints; the mark is for older catalogs",
    "engine/store/deletions.c:remove_mark the same",
    "engine/store/damage.c:damage_put_aside a rename is durable with either of its two folders, and the other one is synced, too",
    "engine/store/damage.c:damage_put_aside#2 the same",
    "engine/store/catalog.c:* the catalog can be made anew",
    "engine/ranks/ranks.c:find_committed recovery has synced the folder before, unless it failed: test_ranks_killed has that",
    "engine/store/store.c:create_store names that the sync of the identity's folder covers again",
    NULL};

static void test_every_sync_is_needed(void **state) {
    (void)state;
    if (!under_sanitizer() && test_level_now() != TEST_QUICK && !getenv("CKD_POWER_TEST") &&
        !getenv("CKD_POWER_SITES")) {
        power_check_sites();
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        disk_test(test_new_store_base_delta_and_ranks),
        disk_test(test_new_store_below_new_directories),
        disk_test(test_new_store_below_directories_that_may_be_lost),
        disk_test(test_deleting),
        disk_test(test_emptying_the_trash),
        disk_test(test_pinning_and_tagging),
        disk_test(test_pinning_in_a_copy_without_empty_folders),
        disk_test(test_pinning_in_a_folder_that_may_be_lost),
        disk_test(test_renaming),
        disk_test(test_pruning),
        disk_test(test_compacting),
        disk_test(test_store_whose_creator_died),
        disk_test(test_store_whose_creator_died_opened_for_writing),
        disk_test(test_store_whose_creator_died_before_its_folder_was_synced),
        disk_test(test_saving_again_after_a_writer_died),
        disk_test(test_saving_again_in_an_open_store),
        disk_test(test_renamer_died_at_its_record),
        disk_test(test_renamer_died_at_a_manifest),
        disk_test(test_compactor_died),
        disk_test(test_deleter_died),
        disk_test(test_deletion_beside_a_program),
        disk_test(test_deletion_beside_a_program_on_a_full_disk),
        disk_test(test_catalog_is_mended),
        disk_test(test_abort_leaves_nothing),
        disk_test(power_parity),
        disk_test(power_parity_of_two_files),
        disk_test(power_repair),
        disk_test(power_repair_of_parity),
        disk_test(power_follow),
        disk_test(power_local),
        disk_test(power_parity_of_dead_maker),
        disk_test(power_parity_put_aside),
        disk_test(power_copy),
        disk_test(power_copy_that_fails),
        disk_test(power_copy_that_cannot_be_synced),
        disk_test(power_recovery),
        disk_test(power_manifest_lost),
        disk_test(power_manifest_and_file_lost),
        disk_test(power_manifest_lost_and_file_aside),
        disk_test(power_save_that_fails),
        disk_test(power_compaction_that_fails),
        disk_test(power_common_file),
        disk_test(power_notes),
        disk_test(power_notes_of_the_dead),
        disk_test(power_same_step_again),
        disk_test(power_lossy),
        disk_test(power_early),
        disk_test(power_early_collected),
        cmocka_unit_test(test_every_sync_is_needed),
    };
    cmocka_set_test_filter(getenv("CKD_POWER_TEST"));
    power_spare(spared);
    scratch_begin();
    /* Whether every sync is needed shows in all scenarios together. */
    int failed = run_sampled("power_cut", tests, test_pick(2, 1, 1), NULL, NULL);
    scratch_end();
    return failed;
}
