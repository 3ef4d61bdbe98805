/*
 * Output files and folders of the command where system calls fail or are counted: names that appear together, what is
 * synced, what stays after a failure, files of killed processes.
 */
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <cmocka.h>

#include "cli/convert/convert.h"
#include "cli/files/files.h"

/* ---- system calls ---- */

static int file_syncs, folder_syncs, renames;
static int bad_folder_sync, bad_rename; /* which call fails, from 1; 0: none */
static char synced[4096];               /* paths of synced folders, each with a newline */

int fsync(int fd) {
    struct stat st;
    char link[64], path[512];
    assert_int_equal(fstat(fd, &st), 0);
    if (!S_ISDIR(st.st_mode)) {
        file_syncs++;
        return (int)syscall(SYS_fsync, fd);
    }
    if (++folder_syncs == bad_folder_sync) {
        errno = EIO;
        return -1;
    }
    snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof(path) - 1);
    assert_true(length > 0);
    path[length] = '\0';
    snprintf(synced + strlen(synced), sizeof(synced) - strlen(synced), "%s\n", path);
    return (int)syscall(SYS_fsync, fd);
}

int rename(const char *from, const char *to) {
    if (++renames == bad_rename) {
        errno = EIO;
        return -1;
    }
    return renameat(AT_FDCWD, from, AT_FDCWD, to);
}

/* ---- files below a folder of their own ---- */

typedef struct fixture {
    char folder[512], first[600], second[600];
    ckd_error err;
} fixture;

static int begin(void **state) {
    static fixture f;
    char name[256];
    const char *tmp = getenv("TMPDIR");
    snprintf(name, sizeof(name), "%s/files-XXXXXX", tmp && strlen(tmp) < 200 ? tmp : "/tmp");
    if (!mkdtemp(name) || !realpath(name, f.folder)) {
        return -1;
    }
    snprintf(f.first, sizeof(f.first), "%s/first", f.folder);
    snprintf(f.second, sizeof(f.second), "%s/second", f.folder);
    file_syncs = folder_syncs = renames = bad_folder_sync = bad_rename = 0;
    synced[0] = '\0';
    *state = &f;
    return 0;
}

static int end(void **state) {
    cli_remove_folder(((fixture *)*state)->folder);
    return 0;
}

static void put(const char *path, const char *text, mode_t mode) {
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    fputs(text, file);
    assert_int_equal(fclose(file), 0);
    assert_int_equal(chmod(path, mode), 0);
}

static void assert_content(const char *path, const char *text) {
    char content[64] = "";
    FILE *file = fopen(path, "r");
    assert_non_null(file);
    content[fread(content, 1, sizeof(content) - 1, file)] = '\0';
    fclose(file);
    assert_string_equal(content, text);
}

static bool exists(const char *path) {
    return access(path, F_OK) == 0;
}

static int entries(const char *folder) {
    char command[600];
    int count = -1;
    snprintf(command, sizeof(command), "ls -A '%s' | wc -l", folder);
    FILE *lines = popen(command, "r");
    assert_non_null(lines);
    assert_int_equal(fscanf(lines, "%d", &count), 1);
    pclose(lines);
    return count;
}

static cli_outputs two_files(fixture *f, bool force) {
    cli_outputs set = {0};
    assert_int_equal(cli_output_bytes(f->first, force, "one", 3, &set, &f->err), CKD_OK);
    assert_int_equal(cli_output_bytes(f->second, force, "two", 3, &set, &f->err), CKD_OK);
    return set;
}

/* ---- several files ---- */

static void test_files_appear_together(void **state) {
    fixture *f = *state;
    cli_outputs set = two_files(f, false);
    assert_true(!exists(f->first) && !exists(f->second));
    assert_true(file_syncs == 2 && folder_syncs == 0);
    assert_int_equal(cli_outputs_publish(&set, &f->err), CKD_OK);
    assert_content(f->first, "one");
    assert_content(f->second, "two");
    assert_int_equal(folder_syncs, 1);
    assert_int_equal(entries(f->folder), 2);
    set = two_files(f, true);
    cli_outputs_drop(&set);
    assert_int_equal(entries(f->folder), 2);
}

static void test_names_are_taken_back(void **state) {
    fixture *f = *state;
    cli_outputs set = two_files(f, false);
    put(f->second, "mine", 0644);
    assert_int_equal(cli_outputs_publish(&set, &f->err), CKD_E_EXISTS);
    assert_false(exists(f->first));
    assert_content(f->second, "mine");
    assert_int_equal(entries(f->folder), 1);
}

static void test_replaced_files_are_reported(void **state) {
    fixture *f = *state;
    put(f->first, "old", 0644);
    cli_outputs set = two_files(f, true);
    bad_rename = 2;
    assert_int_equal(cli_outputs_publish(&set, &f->err), CKD_E_IO);
    assert_non_null(strstr(f->err.message, "have been replaced"));
    assert_content(f->first, "one");
    assert_false(exists(f->second));
    /* A file that replaces none is taken back. */
    assert_int_equal(unlink(f->first), 0);
    renames = 0;
    set = two_files(f, true);
    assert_int_equal(cli_outputs_publish(&set, &f->err), CKD_E_IO);
    assert_null(strstr(f->err.message, "have been replaced"));
    assert_int_equal(entries(f->folder), 0);
}

static void test_a_folder_that_cannot_be_synced(void **state) {
    fixture *f = *state;
    bad_folder_sync = 1;
    cli_outputs set = two_files(f, false);
    assert_int_equal(cli_outputs_publish(&set, &f->err), CKD_E_IO);
    assert_int_equal(entries(f->folder), 0);
    put(f->first, "old", 0644);
    folder_syncs = 0;
    assert_int_equal(cli_output_bytes(f->first, true, "new", 3, NULL, &f->err), CKD_E_IO);
    assert_non_null(strstr(f->err.message, "the new output is in place"));
    assert_content(f->first, "new");
}

static void test_different_paths_of_one_file(void **state) {
    fixture *f = *state;
    char other[700];
    snprintf(other, sizeof(other), "%s/./absent/../second", f->folder);
    const char *paths[] = {f->first, "-", "-", f->second, other};
    assert_int_equal(cli_outputs_check_distinct(paths, 4, &f->err), CKD_OK);
    assert_int_equal(cli_outputs_check_distinct(paths, 5, &f->err), CKD_E_INVALID);
    put(f->first, "", 0644);
    assert_int_equal(link(f->first, f->second), 0);
    assert_int_equal(cli_outputs_check_distinct(paths, 4, &f->err), CKD_E_INVALID);
}

/* ---- one file ---- */

static void test_attributes_of_a_replaced_file(void **state) {
    fixture *f = *state;
    struct stat before, after;
    put(f->first, "old", 0640);
    if (geteuid() == 0) {
        assert_int_equal(chown(f->first, 12, 34), 0);
    }
    assert_int_equal(stat(f->first, &before), 0);
    cli_output *output;
    assert_int_equal(cli_output_open(&output, f->first, true, 0, &f->err), CKD_OK);
    char name[700];
    snprintf(name, sizeof(name), "%s/.first.tmp-%ld-0", f->folder, (long)getpid());
    assert_int_equal(stat(name, &after), 0);
    assert_int_equal(after.st_mode & 0777, 0600);
    assert_int_equal(cli_output_commit(output, &f->err), CKD_OK);
    assert_int_equal(stat(f->first, &after), 0);
    assert_true(after.st_ino != before.st_ino && after.st_size == 0);
    assert_true(after.st_mode == before.st_mode && after.st_uid == before.st_uid &&
                after.st_gid == before.st_gid);
}

/* Writes to standard output while it is another file, whose descriptor is closed. */
static void write_to(int fd, fixture *f) {
    fflush(stdout);
    int before = dup(STDOUT_FILENO);
    assert_int_equal(dup2(fd, STDOUT_FILENO), STDOUT_FILENO);
    close(fd);
    ckd_status status = cli_output_bytes("-", true, "bytes", 5, NULL, &f->err);
    dup2(before, STDOUT_FILENO);
    close(before);
    assert_int_equal(status, CKD_OK);
}

static void test_standard_output_is_synced_if_it_is_a_file(void **state) {
    fixture *f = *state;
    int ends[2];
    char read_back[6] = "";
    write_to(open(f->first, O_WRONLY | O_CREAT, 0644), f);
    assert_content(f->first, "bytes");
    assert_int_equal(file_syncs, 1);
    assert_int_equal(pipe(ends), 0);
    write_to(ends[1], f);
    assert_int_equal(read(ends[0], read_back, 5), 5);
    close(ends[0]);
    assert_string_equal(read_back, "bytes");
    assert_int_equal(file_syncs, 1);
}

static void test_new_folders_are_durable(void **state) {
    fixture *f = *state;
    char path[700], expected[1400];
    snprintf(path, sizeof(path), "%s/a/b/out", f->folder);
    snprintf(expected, sizeof(expected), "%s\n%s/a\n", f->folder, f->folder);
    assert_int_equal(cli_output_make_folders(path, &f->err), CKD_OK);
    assert_string_equal(synced, expected);
    assert_int_equal(cli_output_make_folders(path, &f->err), CKD_OK);
    assert_string_equal(synced, expected);
    snprintf(path, sizeof(path), "%s/c/out", f->folder);
    bad_folder_sync = folder_syncs + 1;
    assert_int_equal(cli_output_make_folders(path, &f->err), CKD_E_IO);
}

static void test_files_of_killed_processes_are_removed(void **state) {
    fixture *f = *state;
    static const char *const names[] = {".first.tmp-1-0", ".first.tmp-99", ".first.tmp-notes",
                                        ".second.tmp-1-0", ".first.tmp-2-0"};
    char paths[5][700];
    for (int i = 0; i < 5; i++) {
        snprintf(paths[i], sizeof(paths[i]), "%s/%s", f->folder, names[i]);
        put(paths[i], "", 0644);
    }
    int held = open(paths[4], O_RDONLY);
    assert_int_equal(flock(held, LOCK_EX), 0);
    cli_output *output, *other;
    assert_int_equal(cli_output_open(&output, f->first, false, 0, &f->err), CKD_OK);
    assert_int_equal(cli_output_write(output, "one", 3, &f->err), CKD_OK);
    assert_true(!exists(paths[0]) && !exists(paths[1]));
    assert_true(exists(paths[2]) && exists(paths[3]) && exists(paths[4]));
    close(held);
    /* The first output is being written, so only the other one goes. */
    assert_int_equal(cli_output_open(&other, f->first, false, 0, &f->err), CKD_OK);
    assert_false(exists(paths[4]));
    assert_int_equal(cli_output_commit(output, &f->err), CKD_OK);
    cli_output_drop(other);
    assert_content(f->first, "one");
    assert_int_equal(entries(f->folder), 3);
}

/* ---- folders ---- */

static bool any_file(const char *path, const char *name, bool folder) {
    (void)path;
    return *name && !folder;
}

static void test_an_old_folder_stays_if_the_new_one_is_not_durable(void **state) {
    fixture *f = *state;
    char old[700], new[700];
    snprintf(old, sizeof(old), "%s/old", f->first);
    snprintf(new, sizeof(new), "%s/new", f->first);
    assert_int_equal(mkdir(f->first, 0755), 0);
    put(old, "old", 0644);
    cli_folder *folder;
    assert_int_equal(cli_folder_open(&folder, f->first, any_file, 1, &f->err), CKD_OK);
    char *inside = cli_folder_inside(folder, "new", &f->err);
    put(inside, "new", 0644);
    free(inside);
    bad_folder_sync = folder_syncs + 2; /* the first one is the new folder itself */
    assert_int_equal(cli_folder_commit(folder, &f->err), CKD_E_IO);
    assert_non_null(strstr(f->err.message, "the new folder is in place"));
    assert_content(new, "new");
    snprintf(old, sizeof(old), "%s/.first.tmp-%ld-0/old", f->folder, (long)getpid());
    assert_content(old, "old");
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, begin, end)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(test_files_appear_together),
        TEST(test_names_are_taken_back),
        TEST(test_replaced_files_are_reported),
        TEST(test_a_folder_that_cannot_be_synced),
        TEST(test_different_paths_of_one_file),
        TEST(test_attributes_of_a_replaced_file),
        TEST(test_standard_output_is_synced_if_it_is_a_file),
        TEST(test_new_folders_are_durable),
        TEST(test_files_of_killed_processes_are_removed),
        TEST(test_an_old_folder_stays_if_the_new_one_is_not_durable),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
