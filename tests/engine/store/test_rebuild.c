/*
 * A new catalog replaces the old one only when it is complete. A rebuild that fails or is killed, or a first save that
 * is killed, leaves nothing that looks like damage. A writer that is open meanwhile goes on with the manifests. Anything
 * but a regular file is not used as a catalog.
 */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/file.h"
#include "tests/support/checkpoints.h"
#include "tests/support/level.h"
#include "tests/support/scenes.h"
#include "tests/support/scratch.h"
#include "tests/support/small_files.h"
#include "tests/support/tempdir.h"

enum { STEPS = 3 };
static char messages[4096];

static void keep_message(void *unused, const char *message) {
    (void)unused;
    size_t used = strlen(messages);
    snprintf(messages + used, sizeof(messages) - used, "%s\n", message);
}

static ckd_status open_store(ckd_store **out, const char *dir, ckd_open_mode mode) {
    ckd_store_options o = CKD_STORE_OPTIONS_INIT;
    o.on_message = keep_message;
    o.threads = 1;
    messages[0] = '\0';
    return ckd_store_open(out, store_path_of(dir, ""), mode, &o, NULL);
}

static void make_store(const char *dir) {
    ckd_store *store = store_create(dir);
    for (uint64_t step = 1; step <= STEPS; step++) {
        scene s = scene_of(step);
        assert_int_equal(scene_save(NULL, store, &s, NULL), CKD_OK);
    }
    ckd_store_close(store);
}

static void check_listed(ckd_store *store, size_t count) {
    ckd_checkpoint_list *list;
    assert_int_equal(ckd_store_list(&list, store, NULL, NULL), CKD_OK);
    assert_int_equal(list->count, count);
    ckd_checkpoint_list_free(list);
}

/* A reader reports no problem with the catalog and lists all checkpoints. */
static void check_silent(const char *dir, size_t count) {
    ckd_store *store;
    assert_int_equal(open_store(&store, dir, CKD_OPEN_READ), CKD_OK);
    check_listed(store, count);
    assert_int_equal(verify_damage(store), 0);
    assert_string_equal(messages, "");
    ckd_store_close(store);
}

/* ---- operations that fail, or at which the process dies ---- */

typedef struct saboteur {
    size_t at, steps; /* operations on the catalog's files, from 1 */
    bool kill;
} saboteur;

static int sabotage(void *context, file_op step, const char *path) {
    saboteur *s = context;
    bool ours = strstr(path, "rebuild.db") || strstr(path, "catalog.db");
    if (!ours || ++s->steps != s->at) {
        return 0;
    }
    if (s->kill) {
        _exit(77);
    }
    return step == FILE_OP_WRITE ? ENOSPC : EIO;
}

static int full_disk(void *unused, file_op step, const char *path) {
    (void)unused;
    (void)path;
    return step == FILE_OP_WRITE ? ENOSPC : 0;
}

static void test_a_failed_rebuild_keeps_the_old_catalog(void **state) {
    make_store(*state);
    saboteur s = {.at = 1};
    size_t failed = 0, before, after;
    unsigned char *old = read_whole_file(store_path_of(*state, "catalog.db"), &before);
    for (bool done = false; !done; s.at++) {
        s.steps = 0;
        file_set_fault_hook(sabotage, &s);
        ckd_status status = ckd_store_rebuild(NULL, store_path_of(*state, ""), NULL, NULL);
        file_set_fault_hook(NULL, NULL);
        done = s.steps < s.at;
        failed += status != CKD_OK;
        check_silent(*state, STEPS);
        assert_false(done && status != CKD_OK);
    }
    assert_in_range(failed, 10, SIZE_MAX);
    free(old);
    /* If the disk is full, the old file is unchanged. */
    old = read_whole_file(store_path_of(*state, "catalog.db"), &before);
    file_set_fault_hook(full_disk, NULL);
    assert_int_equal(ckd_store_rebuild(NULL, store_path_of(*state, ""), NULL, NULL), CKD_E_NOSPACE);
    file_set_fault_hook(NULL, NULL);
    unsigned char *now = read_whole_file(store_path_of(*state, "catalog.db"), &after);
    assert_int_equal(after, before);
    assert_memory_equal(now, old, before);
    assert_false(file_exists(store_path_of(*state, "rebuild.db")));
    free(now);
    free(old);
}

/* Rebuilds or creates the store in a child that dies at an operation. Returns the child's exit status. */
static int killed_at(saboteur *s, const char *dir, bool rebuild) {
    pid_t child = fork();
    if (child == 0) {
        ckd_store *store = NULL;
        file_set_fault_hook(sabotage, s);
        ckd_status status = rebuild ? ckd_store_rebuild(NULL, store_path_of(dir, ""), NULL, NULL)
                                    : open_store(&store, dir, CKD_OPEN_CREATE);
        ckd_store_close(store);
        _exit(status == CKD_OK ? 0 : 1);
    }
    int how;
    assert_int_equal(waitpid(child, &how, 0), child);
    assert_true(WIFEXITED(how));
    return WEXITSTATUS(how);
}

static void test_a_killed_rebuild(void **state) {
    int ended = 77;
    make_store(*state);
    for (saboteur s = {.at = 1, .kill = true}; ended == 77; s.at++) {
        ended = killed_at(&s, *state, true);
        check_silent(*state, STEPS);
    }
    assert_int_equal(ended, 0);
    ckd_store *store;
    for (saboteur early = {.at = 1, .kill = true}; !file_exists(store_path_of(*state, "rebuild.db"));
         early.at++) {
        assert_int_equal(killed_at(&early, *state, true), 77);
    }
    assert_int_equal(open_store(&store, *state, CKD_OPEN_WRITE), CKD_OK);
    ckd_store_close(store);
    assert_false(file_exists(store_path_of(*state, "rebuild.db"))); /* the next writer removes it */
    check_silent(*state, STEPS);
}

/* A store whose creation was interrupted at any point is not damaged. */
static void test_a_killed_creation(void **state) {
    int ended = 77;
    size_t checked = 0;
    for (saboteur s = {.at = 1, .kill = true}; ended == 77; s.at++) {
        char dir[512];
        snprintf(dir, sizeof(dir), "%s/%zu", (char *)*state, s.at);
        assert_int_equal(mkdir(dir, 0777), 0);
        ended = killed_at(&s, dir, false);
        if (file_exists(store_path_of(dir, "data/store"))) {
            check_silent(dir, 0);
            checked++;
        }
    }
    assert_int_equal(ended, 0);
    assert_in_range(checked, 5, SIZE_MAX);
}

/* ---- a writer that is open during a rebuild ---- */

/* The writer has listed all steps from 1 on, and then, after the rebuild, once more in memory. */
static ckd_store *open_beside_a_rebuild(const char *dir) {
    ckd_store *store;
    make_store(dir);
    assert_int_equal(open_store(&store, dir, CKD_OPEN_WRITE), CKD_OK);
    check_listed(store, STEPS);
    assert_int_equal(ckd_store_rebuild(NULL, store_path_of(dir, ""), NULL, NULL), CKD_OK);
    check_listed(store, STEPS);
    return store;
}

static ckd_id id_of(ckd_store *store, uint64_t step) {
    ckd_checkpoint found;
    assert_int_equal(ckd_store_find(&found, store, SCENE_RUN, step, NULL), CKD_OK);
    return found.id;
}

/* Another handle deletes the step, and its tombstone. */
static void forget(const char *dir, uint64_t step) {
    ckd_store *store;
    ckd_delete_options now = CKD_DELETE_OPTIONS_INIT;
    ckd_collect_options all = CKD_COLLECT_OPTIONS_INIT;
    now.undo_s = 0;
    all.all = 1;
    assert_int_equal(scene_open(&store, dir, CKD_OPEN_WRITE, NULL), CKD_OK);
    ckd_id id = id_of(store, step);
    assert_int_equal(ckd_store_delete(store, &id, 1, &now, NULL), CKD_OK);
    assert_int_equal(ckd_store_collect(NULL, store, &all, NULL), CKD_OK);
    ckd_store_close(store);
}

static void check_no_losses_kept(const char *dir) {
    dir_list kept;
    ckd_status status = dir_list_read(&kept, store_path_of(dir, "data/q"), NULL);
    if (status == CKD_OK) {
        assert_int_equal(kept.count, 0);
        dir_list_free(&kept);
    } else {
        assert_int_equal(status, CKD_E_NOT_FOUND);
    }
}

/* The last step builds on records of the one that is deleted, so these stay. */
static void test_a_deletion_is_no_loss_to_a_catalog_in_memory(void **state) {
    ckd_store *store = open_beside_a_rebuild(*state);
    forget(*state, STEPS - 1);
    check_listed(store, STEPS - 1);
    assert_string_equal(messages, "");
    check_no_losses_kept(*state);
    ckd_store_close(store);
    check_silent(*state, STEPS - 1);
}

static void test_a_catalog_in_memory_knows_names_that_are_used_again(void **state) {
    ckd_store *store = open_beside_a_rebuild(*state);
    ckd_id before = id_of(store, STEPS);
    forget(*state, STEPS);
    scene_make(*state, STEPS, 1);
    check_listed(store, STEPS);
    ckd_id after = id_of(store, STEPS);
    assert_memory_not_equal(&after, &before, sizeof(ckd_id));
    scene s = scene_of(STEPS);
    assert_int_equal(scene_load_id(store, &after, &s, NULL), CKD_OK);
    check_no_losses_kept(*state);
    ckd_store_close(store);
    check_silent(*state, STEPS);
}

/* Compacts as soon as a manifest is read, which is then gone. */
static int compact_meanwhile(void *context, file_op step, const char *path) {
    const char *dir = context;
    ckd_store *store;
    ckd_compact_options o = CKD_COMPACT_OPTIONS_INIT;
    if (step == FILE_OP_OPEN && strstr(path, "data/m/" SCENE_RUN)) {
        file_set_fault_hook(NULL, NULL);
        o.max_depth = 1;
        assert_int_equal(scene_open(&store, dir, CKD_OPEN_WRITE, NULL), CKD_OK);
        assert_int_equal(ckd_compact(NULL, store, &o, NULL), CKD_OK);
        ckd_store_close(store);
    }
    return 0;
}

static void test_a_catalog_in_memory_beside_a_compaction(void **state) {
    ckd_store *store = open_beside_a_rebuild(*state);
    scene_make(*state, STEPS + 1, STEPS);
    file_set_fault_hook(compact_meanwhile, *state);
    check_listed(store, (size_t)2 * STEPS);
    file_set_fault_hook(NULL, NULL);
    assert_string_equal(messages, "");
    ckd_store_close(store);
    check_silent(*state, (size_t)2 * STEPS);
}

/* ---- other things than regular files ---- */

static void make_pipe(const char *path, const char *elsewhere) {
    (void)elsewhere;
    assert_int_equal(mkfifo(path, 0600), 0);
}
static void make_link(const char *path, const char *elsewhere) {
    assert_int_equal(symlink(elsewhere, path), 0);
}
static void make_folder(const char *path, const char *elsewhere) {
    (void)elsewhere;
    assert_int_equal(mkdir(path, 0777), 0);
}

static void check_replaced(const char *dir, const char *name, void (*make)(const char *, const char *)) {
    ckd_store *store;
    ckd_verify_result *result = NULL;
    char path[1024], elsewhere[1024];
    snprintf(path, sizeof(path), "%s", store_path_of(dir, name));
    snprintf(elsewhere, sizeof(elsewhere), "%s/elsewhere", dir);
    (void)remove(path);
    (void)remove(store_path_of(dir, "catalog.db.old"));
    make(path, elsewhere);
    assert_int_equal(open_store(&store, dir, CKD_OPEN_READ), CKD_OK); /* a reader does not block on a pipe */
    assert_non_null(strstr(messages, "is not a regular file"));
    check_listed(store, STEPS);
    assert_int_equal(ckd_store_verify(&result, store, NULL, NULL), CKD_OK);
    assert_int_equal(result->damage_count, 1);
    assert_string_equal(result->damage[0].file, "catalog.db");
    ckd_verify_result_free(result);
    ckd_store_close(store);
    assert_int_equal(open_store(&store, dir, CKD_OPEN_WRITE), CKD_OK);
    assert_non_null(strstr(messages, "rebuilding it from the manifests"));
    check_listed(store, STEPS);
    ckd_store_close(store);
    assert_false(file_exists(elsewhere));
    check_silent(dir, STEPS);
}

static void test_only_regular_files_are_catalogs(void **state) {
    make_store(*state);
    check_replaced(*state, "catalog.db", make_pipe);
    check_replaced(*state, "catalog.db", make_folder);
    check_replaced(*state, "catalog.db-journal", make_pipe);
    check_replaced(*state, "catalog.db-journal", make_link);
    write_small_file(store_path_of(*state, "../elsewhere"), "", 0);
    char elsewhere[1024];
    struct stat st;
    snprintf(elsewhere, sizeof(elsewhere), "%s", store_path_of(*state, "../elsewhere"));
    (void)remove(store_path_of(*state, "catalog.db"));
    assert_int_equal(symlink(elsewhere, store_path_of(*state, "catalog.db")), 0);
    ckd_store *store;
    assert_int_equal(open_store(&store, *state, CKD_OPEN_WRITE), CKD_OK);
    check_listed(store, STEPS);
    ckd_store_close(store);
    assert_int_equal(stat(elsewhere, &st), 0);
    assert_int_equal(st.st_size, 0); /* nothing was written through the link */
    check_silent(*state, STEPS);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        tempdir_test(test_a_failed_rebuild_keeps_the_old_catalog),
        tempdir_test(test_a_killed_rebuild),
        tempdir_test(test_a_killed_creation),
        tempdir_test(test_a_deletion_is_no_loss_to_a_catalog_in_memory),
        tempdir_test(test_a_catalog_in_memory_knows_names_that_are_used_again),
        tempdir_test(test_a_catalog_in_memory_beside_a_compaction),
        tempdir_test(test_only_regular_files_are_catalogs),
    };
    scratch_begin();
    int failed = run_sampled("rebuild", tests, 2, NULL, NULL);
    scratch_end();
    return failed;
}
