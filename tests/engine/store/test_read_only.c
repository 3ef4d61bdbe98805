/*
 * A store on a read-only file system, or without permission to write. Opening it for writing fails and says where.
 * Opening for reading, listing, loading and verifying work and change nothing, also without a catalog and lock files.
 */
#include <errno.h>
#include <grp.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
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
#include "include/ckptdelta.h"
#include "tests/support/checkpoints.h"
#include "tests/support/scenes.h"
#include "tests/support/scratch.h"
#include "tests/support/tempdir.h"

/* Unmounts what a failed test has left. */
static int teardown(void **state) {
    for (int i = 0; i < 2; i++) {
        char disk[2048];
        snprintf(disk, sizeof(disk), "%s/disk%d", (char *)*state, i);
        scratch_unmount(disk);
    }
    tempdir_remove(*state);
    return 0;
}

/* Returns "" or what is wrong, since only the parent can fail the test, not a child. */
static const char *refused(ckd_status status, const ckd_error *err, const char *dir) {
    static char text[1200];
    bool clear = status == CKD_E_READ_ONLY && strstr(err->message, "read-only") && strstr(err->message, dir);
    snprintf(text, sizeof(text), "%s: %s (%s)", ckd_status_name(status), err->message, err->file);
    return clear ? "" : text;
}

static const char *check_writing_refused(const char *dir) {
    char path[4096];
    ckd_store *store;
    ckd_error err = {0};
    const char *wrong = "";
    snprintf(path, sizeof(path), "%s/store", dir);
    for (int mode = CKD_OPEN_WRITE; mode <= CKD_OPEN_CREATE && !*wrong; mode++) {
        ckd_status status = ckd_store_open(&store, path, (ckd_open_mode)mode, NULL, &err);
        wrong = refused(status, &err, path);
    }
    if (!*wrong) {
        ckd_status status = ckd_store_rebuild(NULL, path, NULL, &err);
        wrong = refused(status, &err, path);
    }
    return wrong;
}

enum { READ_ONLY_STEPS = 3, READ_ONLY_COUNT = 3000 };

static const char *check_reading_works(const char *dir, void *const *values) {
    char path[4096];
    ckd_store *store;
    ckd_checkpoint_list *list = NULL;
    ckd_verify_result *result = NULL;
    ckd_report *report = NULL;
    ckd_save_options o = CKD_SAVE_OPTIONS_INIT;
    ckd_save *save;
    snprintf(path, sizeof(path), "%s/store", dir);
    if (ckd_store_open(&store, path, CKD_OPEN_READ, NULL, NULL) != CKD_OK) {
        return "it cannot be opened for reading";
    }
    const char *wrong = "";
    if (ckd_store_list(&list, store, NULL, NULL) != CKD_OK || list->count != READ_ONLY_STEPS) {
        wrong = "the list";
    } else if (ckd_store_verify(&result, store, NULL, NULL) != CKD_OK || result->damage_count) {
        wrong = "the verification";
    } else if (ckd_store_report(&report, store, NULL) != CKD_OK ||
               report->checkpoint_count != READ_ONLY_STEPS) {
        wrong = "the report";
    } else if (ckd_save_begin(&save, store, &o, NULL) != CKD_E_READ_ONLY) {
        wrong = "a save is not refused";
    }
    for (size_t s = 0; s < READ_ONLY_STEPS && !*wrong; s++) {
        void *back = load_whole(store, "run", s, "t", READ_ONLY_COUNT * 4);
        wrong = memcmp(back, values[s], READ_ONLY_COUNT * 4) ? "values" : "";
        free(back);
    }
    ckd_checkpoint_list_free(list);
    ckd_verify_result_free(result);
    ckd_report_free(report);
    ckd_store_close(store);
    return wrong;
}

/* A store with three steps. bare: without catalog and lock files, as a copy may be. */
static void make_values_and_store(const char *dir, void **values, bool bare) {
    uint64_t n = READ_ONLY_COUNT;
    ckd_store *store = store_create(dir);
    for (unsigned s = 0; s < READ_ONLY_STEPS; s++) {
        values[s] = random_values(CKD_F32, n, 7);
        for (unsigned k = 0; k < s; k++) {
            change_values(CKD_F32, values[s], n, k);
        }
        save_one(store, "run", s, "t", CKD_F32, 1, &n, values[s]);
    }
    ckd_store_close(store);
    static const char *const dropped[] = {"catalog.db", "data/lock", "data/readers"};
    for (size_t i = 0; i < sizeof(dropped) / sizeof(dropped[0]) && bare; i++) {
        char path[4096];
        snprintf(path, sizeof(path), "%s/store/%s", dir, dropped[i]);
        assert_int_equal(remove(path), 0);
    }
}

static void check_read_only(const char *dir, void *const *values) {
    char *before = tree_describe(dir);
    const char *wrong = check_writing_refused(dir);
    wrong = *wrong ? wrong : check_reading_works(dir, values);
    if (*wrong) {
        fail_msg("read-only: %s", wrong);
    }
    char *after = tree_describe(dir);
    assert_string_equal(before, after);
    free(before);
    free(after);
}

static void test_a_read_only_file_system(void **state) {
    char disk[2048];
    void *values[READ_ONLY_STEPS];
    for (int bare = 0; bare < 2; bare++) {
        snprintf(disk, sizeof(disk), "%s/disk%d", (char *)*state, bare);
        assert_int_equal(mkdir(disk, 0777), 0);
        if (!scratch_mount(disk, 32ul << 20)) {
            print_message("SKIP: a tmpfs cannot be mounted here (%s)\n", strerror(errno));
            skip();
        }
        make_values_and_store(disk, values, bare);
        assert_true(scratch_remount(disk, true));
        check_read_only(disk, values);
        scratch_unmount(disk);
        for (size_t s = 0; s < READ_ONLY_STEPS; s++) {
            free(values[s]);
        }
    }
}

/* Removes the permission to write from files and directories. */
static void protect(const char *path) {
    dir_list list;
    struct stat info;
    assert_int_equal(lstat(path, &info), 0);
    if (S_ISDIR(info.st_mode)) {
        assert_int_equal(dir_list_read(&list, path, NULL), CKD_OK);
        for (size_t i = 0; i < list.count; i++) {
            char below[4096];
            snprintf(below, sizeof(below), "%s/%s", path, list.names[i]);
            protect(below);
        }
        dir_list_free(&list);
    }
    assert_int_equal(chmod(path, S_ISDIR(info.st_mode) ? 0555 : 0444), 0);
}

/*
 * In a child that gives up root's rights. It prints what is wrong and exits with 1; or with 77 if it cannot test
 * anything.
 */
static void read_as_other_user(const char *dir, void *const *values) {
    if (geteuid() == 0 && (setgroups(0, NULL) != 0 || setresgid(65534, 65534, 65534) != 0 ||
                           setresuid(65534, 65534, 65534) != 0)) {
        _exit(77);
    }
    if (access(dir, R_OK | X_OK) != 0) {
        _exit(77);
    }
    const char *wrong = check_writing_refused(dir);
    wrong = *wrong ? wrong : check_reading_works(dir, values);
    if (*wrong) {
        fprintf(stderr, "without permission: %s\n", wrong);
    }
    _exit(*wrong ? 1 : 0);
}

static void test_no_permission_to_write(void **state) {
    void *values[READ_ONLY_STEPS];
    assert_int_equal(chmod(*state, 0755), 0);
    for (int bare = 0; bare < 2; bare++) {
        char dir[2048];
        int status;
        snprintf(dir, sizeof(dir), "%s/%d", (char *)*state, bare);
        assert_int_equal(mkdir(dir, 0755), 0);
        make_values_and_store(dir, values, bare);
        protect(dir);
        char *before = tree_describe(dir);
        fflush(NULL);
        pid_t child = fork();
        if (child == 0) {
            read_as_other_user(dir, values);
        }
        assert_true(child > 0);
        assert_int_equal(waitpid(child, &status, 0), child);
        char *after = tree_describe(dir);
        assert_string_equal(before, after);
        free(before);
        free(after);
        for (size_t s = 0; s < READ_ONLY_STEPS; s++) {
            free(values[s]);
        }
        if (WIFEXITED(status) && WEXITSTATUS(status) == 77) {
            print_message("SKIP: root cannot become somebody else who reaches the temporary directory\n");
            skip();
        }
        assert_int_equal(status, 0);
    }
}

static void find_step(ckd_checkpoint *out, ckd_store *store, uint64_t step) {
    ckd_error err = {0};
    if (ckd_store_find(out, store, "run", step, &err) != CKD_OK) {
        fail_msg("step %u: %s", (unsigned)step, err.message);
    }
}

/*
 * The catalog lacks the newest checkpoint, as its writer died before the catalog had it. A reader finds the manifest,
 * and says so. It makes no lock file, and does not mend the catalog.
 */
static void test_a_reader_leaves_the_catalog_behind(void **state) {
    const char *dir = *state;
    uint64_t n = 8;
    float values[8] = {0};
    ckd_checkpoint first, second;
    ckd_store *store = store_create(dir);
    size_t size;
    ckd_error err = {0};
    save_one(store, "run", 0, "t", CKD_F32, 1, &n, values);
    ckd_store_close(store);
    unsigned char *behind = read_whole_file(store_path_of(dir, "catalog.db"), &size);
    store = store_reopen(dir, CKD_OPEN_WRITE);
    save_one(store, "run", 1, "t", CKD_F32, 1, &n, values);
    ckd_store_close(store);
    write_whole_file(store_path_of(dir, "catalog.db"), behind, size);
    free(behind);
    assert_int_equal(remove(store_path_of(dir, "data/lock")), 0);
    store = store_reopen(dir, CKD_OPEN_READ);
    find_step(&first, store, 0);
    char *before = tree_describe(dir);
    ckd_status status = ckd_store_check_newest(store, &first, &err);
    char *after = tree_describe(dir);
    assert_string_equal(before, after);
    assert_int_equal(status, CKD_E_EXISTS);
    find_step(&second, store, 1);
    assert_int_equal(ckd_store_check_newest(store, &second, &err), CKD_OK);
    free(before);
    free(after);
    ckd_store_close(store);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, tempdir_setup, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(test_a_read_only_file_system),
        TEST(test_no_permission_to_write),
        TEST(test_a_reader_leaves_the_catalog_behind),
    };
    return cmocka_run_group_tests_name("read_only", tests, NULL, NULL);
}
