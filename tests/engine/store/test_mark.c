/*
 * Opening a store reads no manifest that the catalog is known to repeat. The catalog's mark records the state of the
 * folders. If a folder or the catalog has changed, all manifests are read.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/file.h"
#include "engine/store/paths.h"
#include "tests/support/scenes.h"
#include "tests/support/tempdir.h"

enum { STEPS = 3 };

static int count_manifests(void *context, file_op step, const char *path) {
    *(unsigned *)context += step == FILE_OP_OPEN && strstr(path, "data/m/" SCENE_RUN) != NULL;
    return 0;
}

/* Counts the manifests that are read when the store is opened. */
static unsigned manifests_read_by(const char *dir, ckd_open_mode mode) {
    unsigned count = 0;
    ckd_store *store;
    file_set_fault_hook(count_manifests, &count);
    assert_int_equal(scene_open(&store, dir, mode, NULL), CKD_OK);
    file_set_fault_hook(NULL, NULL);
    scene_check(store, 0, STEPS);
    ckd_store_close(store);
    return count;
}

static void test_names_are_enough(void **state) {
    scene_make(*state, 0, STEPS);
    assert_int_equal(manifests_read_by(*state, CKD_OPEN_READ), 0);
    assert_int_equal(manifests_read_by(*state, CKD_OPEN_WRITE), 0);
    ckd_store *store;
    ckd_rebuild_result rebuilt;
    assert_int_equal(ckd_store_rebuild(&rebuilt, store_path_of(*state, ""), NULL, NULL), CKD_OK);
    assert_int_equal(manifests_read_by(*state, CKD_OPEN_READ), 0);
    scene_trash(*state, 2, 1);
    assert_int_equal(scene_open(&store, *state, CKD_OPEN_READ, NULL), CKD_OK);
    scene_check(store, 0, 2);
    ckd_checkpoint gone;
    assert_int_equal(ckd_store_find(&gone, store, SCENE_RUN, 2, NULL), CKD_E_NOT_FOUND);
    ckd_store_close(store);
}

/* A file that appears in a folder and is removed again leaves the names unchanged, but not the mark. */
static void test_changed_folders(void **state) {
    static const char *const folders[] = {DIR_MANIFESTS, DIR_TOMBSTONES};
    scene_make(*state, 0, STEPS);
    for (size_t i = 0; i < 2; i++) {
        char path[1100];
        snprintf(path, sizeof(path), "%s/x", store_path_of(*state, folders[i]));
        write_whole_file(path, "", 0);
        assert_int_equal(unlink(path), 0);
        assert_int_equal(manifests_read_by(*state, CKD_OPEN_READ), STEPS);
        assert_int_equal(manifests_read_by(*state, CKD_OPEN_WRITE), STEPS);
        scene_trash(*state, 2, 1); /* a change by the store itself renews the mark */
        scene_make(*state, 2, 1);
        assert_int_equal(manifests_read_by(*state, CKD_OPEN_READ), 0);
    }
}

/* The names are the same, but one of them belongs to another checkpoint. The older catalog is not used. */
static void test_older_catalog(void **state) {
    ckd_store *store;
    ckd_checkpoint before, after, found;
    ckd_collect_options all = CKD_COLLECT_OPTIONS_INIT;
    size_t size;
    all.all = 1;
    scene_make(*state, 0, STEPS);
    unsigned char *old = read_whole_file(store_path_of(*state, FILE_CATALOG), &size);
    assert_int_equal(scene_open(&store, *state, CKD_OPEN_WRITE, NULL), CKD_OK);
    assert_int_equal(ckd_store_find(&before, store, SCENE_RUN, 2, NULL), CKD_OK);
    assert_int_equal(ckd_store_delete(store, &before.id, 1, NULL, NULL), CKD_OK);
    assert_int_equal(ckd_store_collect(NULL, store, &all, NULL), CKD_OK);
    ckd_store_close(store);
    scene_make(*state, 2, 1);
    assert_int_equal(scene_open(&store, *state, CKD_OPEN_READ, NULL), CKD_OK);
    assert_int_equal(ckd_store_find(&after, store, SCENE_RUN, 2, NULL), CKD_OK);
    ckd_store_close(store);
    assert_memory_not_equal(&before.id, &after.id, sizeof(ckd_id));
    assert_int_equal(before.generation, after.generation);
    write_whole_file(store_path_of(*state, FILE_CATALOG), old, size);
    free(old);
    for (ckd_open_mode mode = CKD_OPEN_READ; mode <= CKD_OPEN_WRITE; mode++) {
        assert_int_equal(scene_open(&store, *state, mode, NULL), CKD_OK);
        assert_int_equal(ckd_store_find(&found, store, SCENE_RUN, 2, NULL), CKD_OK);
        assert_memory_equal(&found.id, &after.id, sizeof(ckd_id));
        ckd_store_close(store);
    }
}

static void set_time(const char *path, time_t seconds, long nanoseconds) {
    struct timespec both[2] = {{seconds, nanoseconds}, {seconds, nanoseconds}};
    assert_int_equal(utimensat(AT_FDCWD, path, both, 0), 0);
}

/* A file system with timestamps in whole seconds cannot distinguish changes within a second. */
static void test_coarse_timestamps(void **state) {
    char first[FILE_FINGERPRINT], second[FILE_FINGERPRINT];
    const char *path = store_path_of(*state, "");
    assert_int_equal(mkdir(path, 0777), 0);
    set_time(path, time(NULL), 0);
    file_fingerprint(first, path);
    assert_string_equal(first, "");
    set_time(path, 1000000000, 5);
    file_fingerprint(first, path);
    file_fingerprint(second, path);
    assert_true(first[0]);
    assert_string_equal(first, second);
    set_time(path, 1000000000, 6);
    file_fingerprint(second, path);
    assert_string_not_equal(first, second);
    file_fingerprint(second, "/nowhere");
    assert_string_equal(second, "");
}

int main(void) {
    const struct CMUnitTest tests[] = {tempdir_test(test_names_are_enough),
                                       tempdir_test(test_changed_folders), tempdir_test(test_older_catalog),
                                       tempdir_test(test_coarse_timestamps)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
