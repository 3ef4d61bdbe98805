/*
 * base/file: names and directories. Every step fails, and every step is the last one before a crash. The
 * program replaces renameat2, link, fsync and readdir of the C library.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/file.h"
#include "tests/support/small_files.h"
#include "tests/support/tempdir.h"

static struct {
    int rename_errno;      /* like a file system without RENAME_NOREPLACE */
    bool link_answer_lost; /* link succeeds but returns EEXIST, as NFS may */
    int link_errno, fsync_errno;
    unsigned links, fsyncs;
    bool repeats; /* directories give each name twice, as network file systems may some */
} fake;

struct dirent *readdir(DIR *dir) {
    static struct dirent *(*next)(DIR *);
    static struct dirent last;
    static bool again;
    if (!next) {
        *(void **)(void *)&next = dlsym(RTLD_NEXT, "readdir64");
    }
    again = fake.repeats && !again;
    if (fake.repeats && !again) {
        return &last;
    }
    struct dirent *entry = next(dir);
    again = again && entry;
    last = entry ? *entry : last;
    return entry;
}

int renameat2(int old_dir, const char *from, int new_dir, const char *to, unsigned flags) {
    if (fake.rename_errno != 0) {
        errno = fake.rename_errno;
        return -1;
    }
    return (int)syscall(SYS_renameat2, old_dir, from, new_dir, to, flags);
}

int link(const char *from, const char *to) {
    fake.links++;
    int result = fake.link_errno == 0 ? (int)syscall(SYS_linkat, AT_FDCWD, from, AT_FDCWD, to, 0) : -1;
    if (fake.link_errno != 0 || (result == 0 && fake.link_answer_lost)) {
        errno = fake.link_errno != 0 ? fake.link_errno : EEXIST;
        return -1;
    }
    return result;
}

int fsync(int fd) {
    fake.fsyncs++;
    if (fake.fsync_errno != 0) {
        errno = fake.fsync_errno;
        return -1;
    }
    return (int)syscall(SYS_fsync, fd);
}

typedef struct place {
    char *dir;
    char path[512], temp[512];
} place;

static int set_up(void **state) {
    place *p = calloc(1, sizeof(*p));
    if (p == NULL) {
        return -1;
    }
    p->dir = tempdir_create();
    snprintf(p->path, sizeof(p->path), "%s/manifest", p->dir);
    snprintf(p->temp, sizeof(p->temp), "%s/.temp", p->dir);
    memset(&fake, 0, sizeof(fake));
    *state = p;
    return 0;
}

static int tear_down(void **state) {
    place *p = *state;
    file_set_fault_hook(NULL, NULL);
    memset(&fake, 0, sizeof(fake));
    tempdir_remove(p->dir);
    free(p);
    return 0;
}

/* ---- publish ---- */

static const int rename_errnos[] = {0, EINVAL, ENOSYS};

static void test_publish(void **state) {
    place *p = *state;
    for (size_t i = 0; i < 3; i++) {
        ckd_error err;
        fake.rename_errno = rename_errnos[i];
        fake.links = 0;
        write_small_file(p->temp, "new", 3);
        assert_int_equal(file_rename_noreplace(p->temp, p->path, &err), CKD_OK);
        assert_false(file_exists(p->temp));
        assert_content(p->path, "new", 3);
        write_small_file(p->temp, "other", 5);
        assert_int_equal(file_rename_noreplace(p->temp, p->path, &err), CKD_E_EXISTS);
        assert_int_equal(err.sys_errno, EEXIST);
        assert_string_equal(err.file, p->path);
        assert_non_null(strstr(err.message, p->temp));
        assert_content(p->path, "new", 3);
        assert_content(p->temp, "other", 5);
        assert_int_equal(fake.links, i == 0 ? 0 : 2);
        assert_int_equal(file_remove(p->temp, false, NULL), CKD_OK);
        assert_int_equal(file_rename_noreplace(p->temp, p->path, &err), CKD_E_NOT_FOUND);
        assert_int_equal(file_remove(p->path, false, NULL), CKD_OK);
        assert_int_equal(file_rename_noreplace(p->temp, p->path, &err), CKD_E_NOT_FOUND);
    }
}

static void test_publish_where_links_fail(void **state) {
    place *p = *state;
    ckd_error err;
    write_small_file(p->temp, "new", 3);
    fake.rename_errno = EINVAL;
    fake.link_answer_lost = true; /* done, but it looks as if another process had been first */
    assert_int_equal(file_rename_noreplace(p->temp, p->path, NULL), CKD_OK);
    assert_content(p->path, "new", 3);
    assert_false(file_exists(p->temp));
    write_small_file(p->temp, "other", 5);
    /* Another process was first. */
    assert_int_equal(file_rename_noreplace(p->temp, p->path, NULL), CKD_E_EXISTS);
    fake.link_answer_lost = false;
    fake.link_errno = EPERM; /* no hard links at all */
    assert_int_equal(file_rename_noreplace(p->temp, p->path, &err), CKD_E_READ_ONLY);
    assert_int_equal(err.sys_errno, EPERM);
    fake.rename_errno = EXDEV; /* not an error for which links are tried */
    fake.link_errno = 0;
    fake.links = 0;
    assert_int_equal(file_rename_noreplace(p->temp, p->path, &err), CKD_E_IO);
    assert_non_null(strstr(err.message, "another file system"));
    assert_int_equal(fake.links, 0);
    assert_content(p->path, "new", 3);
    assert_content(p->temp, "other", 5);
}

#define RACERS 6
#define ROUNDS 60

static int child_status(pid_t child) {
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + status;
}

/*
 * One process of the race: publishes ROUNDS files. `wins` counts the winners of each round, in shared memory.
 */
static int race(const char *dir, int racer, int start, int (*wins)[RACERS]) {
    char go, temp[600], path[600];
    if (read(start, &go, 1) != 0) { /* closing the pipe starts the race */
        return 1;
    }
    for (int round = 0; round < ROUNDS; round++) {
        uint64_t content[2] = {(uint64_t)racer, (uint64_t)round};
        file_writer *f;
        snprintf(temp, sizeof(temp), "%s/temp.%d.%d", dir, racer, round);
        snprintf(path, sizeof(path), "%s/round.%d", dir, round);
        if (file_create(&f, temp, 0, NULL) != CKD_OK ||
            file_append(f, content, sizeof(content), NULL) != CKD_OK || file_close(f, NULL) != CKD_OK) {
            return 2;
        }
        ckd_status status = file_rename_noreplace(temp, path, NULL);
        if (status != CKD_OK && status != CKD_E_EXISTS) {
            return 3;
        }
        wins[round][racer] = status == CKD_OK;
        if (file_exists(temp) != (status == CKD_E_EXISTS)) {
            return 4;
        }
    }
    return 0;
}

static void test_race_has_one_winner(void **state) {
    place *p = *state;
    size_t size = sizeof(int[ROUNDS][RACERS]);
    for (size_t i = 0; i < 2; i++) {
        char dir[512], path[600];
        snprintf(dir, sizeof(dir), "%s/race%zu", p->dir, i);
        assert_int_equal(dir_create(dir, false, NULL), CKD_OK);
        int(*wins)[RACERS] = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        assert_ptr_not_equal(wins, MAP_FAILED);
        fake.rename_errno = rename_errnos[i];
        int start[2];
        pid_t racers[RACERS];
        assert_int_equal(pipe(start), 0);
        for (int r = 0; r < RACERS; r++) {
            racers[r] = fork();
            if (racers[r] == 0) {
                close(start[1]);
                _exit(race(dir, r, start[0], wins));
            }
        }
        close(start[0]);
        close(start[1]);
        for (int r = 0; r < RACERS; r++) {
            assert_int_equal(child_status(racers[r]), 0);
        }
        for (int round = 0; round < ROUNDS; round++) {
            int winner = -1, count = 0;
            for (int r = 0; r < RACERS; r++) {
                winner = wins[round][r] ? r : winner;
                count += wins[round][r];
            }
            assert_int_equal(count, 1);
            uint64_t want[2] = {(uint64_t)winner, (uint64_t)round};
            snprintf(path, sizeof(path), "%s/round.%d", dir, round);
            assert_content(path, want, sizeof(want));
        }
        munmap(wins, size);
    }
}

/* ---- other names ---- */

static void test_replace_and_remove(void **state) {
    place *p = *state;
    ckd_error err;
    write_small_file(p->temp, "new", 3);
    assert_int_equal(file_rename(p->temp, p->path, NULL), CKD_OK); /* there is no file of that name yet */
    write_small_file(p->temp, "newer", 5);
    assert_int_equal(file_rename(p->temp, p->path, NULL), CKD_OK);
    assert_content(p->path, "newer", 5);
    assert_false(file_exists(p->temp));
    assert_int_equal(file_rename(p->temp, p->path, &err), CKD_E_NOT_FOUND);
    assert_string_equal(err.file, p->path);
    assert_content(p->path, "newer", 5);

    assert_int_equal(file_remove(p->path, false, NULL), CKD_OK);
    assert_false(file_exists(p->path));
    assert_int_equal(file_remove(p->path, true, NULL), CKD_OK);
    assert_int_equal(file_remove(p->path, false, &err), CKD_E_NOT_FOUND);
    assert_string_equal(err.file, p->path);
    assert_int_not_equal(file_remove(p->dir, true, NULL), CKD_OK); /* it is no file */
    assert_true(file_exists(p->dir));
}

static void test_directories(void **state) {
    place *p = *state;
    ckd_error err;
    assert_int_equal(dir_create(p->path, false, NULL), CKD_OK);
    assert_int_equal(dir_create(p->path, true, NULL), CKD_OK);
    assert_int_equal(dir_create(p->path, false, &err), CKD_E_EXISTS);
    assert_string_equal(err.file, p->path);
    write_small_file(p->temp, "", 0);
    assert_int_equal(dir_create(p->temp, true, NULL), CKD_E_EXISTS); /* a file is no directory */
    char deep[600];
    snprintf(deep, sizeof(deep), "%s/no/dir", p->dir);
    assert_int_equal(dir_create(deep, true, NULL), CKD_E_NOT_FOUND);

    assert_int_equal(dir_sync(p->path, NULL), CKD_OK);
    assert_int_equal(fake.fsyncs, 1);
    assert_int_equal(dir_sync(deep, &err), CKD_E_NOT_FOUND);
    assert_int_equal(dir_sync(p->temp, &err), CKD_E_IO);
    fake.fsync_errno = EINVAL; /* like a file system that cannot sync directories */
    assert_int_equal(dir_sync(p->path, NULL), CKD_OK);
    fake.fsync_errno = EIO;
    assert_int_equal(dir_sync(p->path, &err), CKD_E_IO);
    assert_int_equal(err.sys_errno, EIO);
    assert_string_equal(err.file, p->path);
}

static void *remove_again_and_again(void *context) {
    const char *path = context;
    for (int i = 0; i < 100000; i++) {
        (void)rmdir(path);
    }
    return NULL;
}

/* Somebody removes the directory between two steps of dir_create. */
static void test_a_directory_that_vanishes(void **state) {
    place *p = *state;
    pthread_t remover;
    assert_int_equal(pthread_create(&remover, NULL, remove_again_and_again, p->path), 0);
    for (int i = 0; i < 20000; i++) {
        assert_int_equal(dir_create(p->path, true, NULL), CKD_OK);
    }
    pthread_join(remover, NULL);
    assert_int_equal(symlink("nowhere", p->temp), 0);
    assert_int_equal(dir_create(p->temp, true, NULL), CKD_E_EXISTS);
}

static void test_list(void **state) {
    place *p = *state;
    dir_list list;
    ckd_error err;
    assert_int_equal(dir_list_read(&list, p->dir, NULL), CKD_OK);
    assert_int_equal(list.count, 0);
    dir_list_free(&list);
    for (int i = 0; i < 300; i++) {
        char path[600];
        snprintf(path, sizeof(path), "%s/%d", p->dir, i * 7919 % 1000);
        write_small_file(path, "", 0);
    }
    write_small_file(p->temp, "", 0);
    assert_int_equal(dir_create(p->path, false, NULL), CKD_OK);
    assert_int_equal(dir_list_read(&list, p->dir, NULL), CKD_OK);
    assert_int_equal(list.count, 302);
    assert_string_equal(list.names[0], ".temp");
    assert_string_equal(list.names[1], "0");
    assert_string_equal(list.names[301], "manifest");
    for (size_t i = 1; i < list.count; i++) {
        assert_true(strcmp(list.names[i - 1], list.names[i]) < 0);
    }
    dir_list_free(&list);
    assert_null(list.names);
    dir_list_free(&list);
    fake.repeats = true;
    assert_int_equal(dir_list_read(&list, p->dir, NULL), CKD_OK);
    fake.repeats = false;
    assert_int_equal(list.count, 302);
    assert_string_equal(list.names[0], ".temp");
    assert_string_equal(list.names[301], "manifest");
    dir_list_free(&list);
    char absent[600];
    snprintf(absent, sizeof(absent), "%s/absent", p->dir);
    memset(&list, 1, sizeof(list));
    assert_int_equal(dir_list_read(&list, absent, &err), CKD_E_NOT_FOUND);
    assert_string_equal(err.file, absent);
    assert_int_equal(list.count, 0);
    assert_null(list.names);
    assert_int_equal(dir_list_read(&list, p->temp, NULL), CKD_E_IO);
}

static void test_bytes_of_a_directory(void **state) {
    place *p = *state;
    uint64_t total = 7;
    ckd_error err;
    assert_int_equal(dir_bytes(&total, p->dir, NULL), CKD_OK);
    assert_int_equal(total, 0);
    write_small_file(p->temp, "12345", 5);
    char deep[4096], path[4200];
    snprintf(deep, sizeof(deep), "%s", p->dir);
    for (int i = 0; i < 20; i++) {
        strcat(deep, "/d");
        assert_int_equal(dir_create(deep, false, NULL), CKD_OK);
        snprintf(path, sizeof(path), "%s/f", deep);
        write_small_file(path, "1234567890", 10);
    }
    assert_int_equal(truncate(path, (off_t)1 << 33), 0); /* its apparent size; almost nothing is allocated */
    snprintf(path, sizeof(path), "%s/loop", deep);
    assert_int_equal(symlink(p->dir, path), 0); /* links are neither followed nor counted */
    snprintf(path, sizeof(path), "%s/file-link", p->dir);
    assert_int_equal(symlink(p->temp, path), 0);
    assert_int_equal(mkfifo(p->path, 0600), 0);
    assert_int_equal(dir_bytes(&total, p->dir, NULL), CKD_OK);
    assert_true(total == 5 + 19 * 10 + (UINT64_C(1) << 33));
    snprintf(path, sizeof(path), "%s/link", p->dir);
    assert_int_equal(symlink(p->dir, path), 0); /* but the path itself may be a link to the directory */
    uint64_t through = 0;
    assert_int_equal(dir_bytes(&through, path, NULL), CKD_OK);
    assert_true(through == total);
    for (int i = 20; i < 70; i++) {
        strcat(deep, "/d");
        assert_int_equal(dir_create(deep, false, NULL), CKD_OK);
    }
    assert_int_equal(dir_bytes(&total, p->dir, &err), CKD_E_IO);
    assert_int_equal(total, 0);
    assert_string_equal(err.file, p->dir);
    assert_int_equal(dir_bytes(&total, p->temp, NULL), CKD_E_IO);
    snprintf(path, sizeof(path), "%s/absent", p->dir);
    assert_int_equal(dir_bytes(&total, path, NULL), CKD_E_NOT_FOUND);
}

/* Each of the folders a, a/b, ab and c holds a file of another size. */
static void test_bytes_without_some_folders(void **state) {
    static const struct {
        const char *without[DIR_EXCLUDED_MAX + 1];
        size_t count;
        uint64_t bytes;
    } cases[] = {
        {{""}, 0, 1111},          {{"a"}, 1, 1001},        {{"a/b"}, 1, 1011}, {{"ab", "c"}, 2, 110},
        {{"a/b", "ab"}, 2, 1010}, {{"b"}, 1, 1111},        {{"c/c"}, 1, 1111}, {{"a", "ab", "c"}, 3, 0},
        {{"a/"}, 1, 1111},        {{"a/b", "a"}, 2, 1001},
    };
    static const struct {
        const char *folder;
        size_t size;
    } folders[] = {{"a", 10}, {"a/b", 100}, {"ab", 1}, {"c", 1000}};
    place *p = *state;
    char path[4200], content[1000] = {0};
    uint64_t total = 7;
    for (size_t i = 0; i < sizeof(folders) / sizeof(folders[0]); i++) {
        snprintf(path, sizeof(path), "%s/%s", p->dir, folders[i].folder);
        assert_int_equal(dir_create(path, false, NULL), CKD_OK);
        strcat(path, "/f");
        write_small_file(path, content, folders[i].size);
    }
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        assert_int_equal(dir_bytes_without(&total, p->dir, cases[i].without, cases[i].count, NULL), CKD_OK);
        assert_int_equal(total, cases[i].bytes);
    }
    assert_int_equal(dir_bytes_without(&total, p->dir, cases[0].without, DIR_EXCLUDED_MAX + 1, NULL),
                     CKD_E_INVALID);
}

/* ---- every step failing ---- */

typedef struct sweep {
    unsigned at, seen;
    int answer;   /* 0: the process exits at this step */
    file_op step; /* the step that was reached */
    char path[512];
    file_op all[32];
} sweep;

static int answer_nth(void *context, file_op step, const char *path) {
    sweep *s = context;
    if (s->seen < 32) {
        s->all[s->seen] = step;
    }
    if (s->seen++ != s->at) {
        return 0;
    }
    s->step = step;
    snprintf(s->path, sizeof(s->path), "%s", path);
    if (s->answer == 0) {
        _exit(77);
    }
    return s->answer;
}

static const char text[] = "the bytes of a manifest";

static void test_publish_bytes(void **state) {
    place *p = *state;
    ckd_error err;
    sweep all = {.at = UINT32_MAX};
    file_set_fault_hook(answer_nth, &all);
    assert_int_equal(file_create_durable(p->path, p->temp, text, sizeof(text), NULL), CKD_OK);
    file_set_fault_hook(NULL, NULL);
    static const file_op want[] = {FILE_OP_CREATE,           FILE_OP_WRITE,   FILE_OP_SYNC, FILE_OP_CLOSE,
                                   FILE_OP_RENAME_NOREPLACE, FILE_OP_DIR_SYNC};
    assert_int_equal(all.seen, 6);
    assert_memory_equal(all.all, want, sizeof(want));
    assert_int_equal(fake.fsyncs, 1);
    assert_content(p->path, text, sizeof(text));
    assert_false(file_exists(p->temp));
    assert_int_equal(file_create_durable(p->path, p->temp, "other", 5, &err), CKD_E_EXISTS);
    assert_string_equal(err.file, p->path);
    assert_false(file_exists(p->temp));
    assert_content(p->path, text, sizeof(text));
    write_small_file(p->temp, "a living writer's", 17);
    char second[600];
    snprintf(second, sizeof(second), "%s/second", p->dir);
    assert_int_equal(file_create_durable(second, p->temp, "other", 5, &err), CKD_E_EXISTS);
    assert_string_equal(err.file, p->temp);
    assert_content(p->temp, "a living writer's", 17); /* it belongs to another writer */
    assert_false(file_exists(second));
    assert_int_equal(file_remove(p->temp, false, NULL), CKD_OK);
    assert_int_equal(file_create_durable(second, p->temp, NULL, 0, NULL), CKD_OK);
    assert_content(second, "", 0);
}

static void test_publish_bytes_without_a_slash(void **state) {
    place *p = *state;
    int before = open(".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    assert_true(before >= 0);
    assert_int_equal(chdir(p->dir), 0);
    ckd_status status = file_create_durable("name", "temp", text, sizeof(text), NULL);
    assert_int_equal(fchdir(before), 0);
    close(before);
    assert_int_equal(status, CKD_OK);
    snprintf(p->path, sizeof(p->path), "%s/name", p->dir);
    assert_content(p->path, text, sizeof(text));
}

/* Whichever step fails, the name has all or nothing, no file is left over, and the error is right. */
static void test_publish_bytes_failing_anywhere(void **state) {
    place *p = *state;
    static const int answers[] = {EIO, ENOSPC, EROFS, -1, -5, -1000};
    for (size_t a = 0; a < sizeof(answers) / sizeof(*answers); a++) {
        for (unsigned at = 0;; at++) {
            ckd_error err;
            sweep s = {.at = at, .answer = answers[a]};
            file_set_fault_hook(answer_nth, &s);
            ckd_status status = file_create_durable(p->path, p->temp, text, sizeof(text), &err);
            file_set_fault_hook(NULL, NULL);
            assert_false(file_exists(p->temp));
            if (s.seen <= at) {
                assert_int_equal(status, CKD_OK);
                assert_int_equal(at, 6);
                assert_int_equal(file_remove(p->path, false, NULL), CKD_OK);
                break;
            }
            int errnum = answers[a] > 0 ? answers[a] : s.step == FILE_OP_WRITE ? ENOSPC : EIO;
            assert_int_equal(err.sys_errno, errnum);
            assert_int_equal(status, errnum == ENOSPC  ? CKD_E_NOSPACE
                                     : errnum == EROFS ? CKD_E_READ_ONLY
                                                       : CKD_E_IO);
            assert_int_equal(err.status, status);
            const char *where = s.step == FILE_OP_RENAME_NOREPLACE ? p->path
                                : s.step == FILE_OP_DIR_SYNC       ? p->dir
                                                                   : p->temp;
            assert_string_equal(s.path, where);
            assert_string_equal(err.file, where);
            assert_int_equal(file_exists(p->path), s.step == FILE_OP_DIR_SYNC);
            if (s.step == FILE_OP_DIR_SYNC) {
                assert_content(p->path, text, sizeof(text));
            }
            assert_int_equal(file_remove(p->path, true, NULL), CKD_OK);
        }
    }
}

/* The name goes again, unless the failure came before it was given: then it is another process's. */
static void test_publish_and_withdraw(void **state) {
    place *p = *state;
    for (unsigned at = 0; at < 6; at++) {
        ckd_error err = {0};
        sweep s = {.at = at, .answer = EIO};
        bool undecided = false, before_naming = at < 4;
        if (before_naming) {
            write_small_file(p->path, "theirs", 6);
        }
        file_set_fault_hook(answer_nth, &s);
        ckd_status status = file_publish_durable(&undecided, p->path, p->temp, text, sizeof(text), &err);
        file_set_fault_hook(NULL, NULL);
        assert_int_equal(status, CKD_E_IO);
        assert_false(undecided);
        assert_null(strstr(err.message, "unknown"));
        assert_false(file_exists(p->temp));
        if (before_naming) {
            assert_content(p->path, "theirs", 6);
            assert_int_equal(file_remove(p->path, false, NULL), CKD_OK);
        }
        assert_false(file_exists(p->path));
    }
    ckd_error err = {0};
    bool undecided = false;
    fake.fsync_errno = EIO; /* of the folder, each time */
    assert_int_equal(file_publish_durable(&undecided, p->path, p->temp, text, sizeof(text), &err), CKD_E_IO);
    assert_true(undecided);
    assert_non_null(strstr(err.message, "durable: "));
    assert_non_null(strstr(err.message, "it is unknown whether the change takes effect"));
    assert_string_equal(err.file, p->dir);
    assert_int_equal(err.sys_errno, EIO);
    assert_false(file_exists(p->path));
    fake.fsync_errno = 0;
    write_small_file(p->path, "theirs", 6);
    assert_int_equal(file_publish_durable(NULL, p->path, p->temp, text, sizeof(text), &err), CKD_E_EXISTS);
    assert_content(p->path, "theirs", 6);
}

/* Whichever step is the last, the file is absent or complete. It is complete once it was published. */
static void test_publish_bytes_dying_anywhere(void **state) {
    place *p = *state;
    for (unsigned at = 0;; at++) {
        pid_t child = fork();
        if (child == 0) {
            sweep s = {.at = at};
            file_set_fault_hook(answer_nth, &s);
            ckd_status status = file_create_durable(p->path, p->temp, text, sizeof(text), NULL);
            _exit(status == CKD_OK ? 0 : 1);
        }
        int status = child_status(child);
        assert_int_equal(file_exists(p->path), at >= 5);
        assert_int_equal(file_exists(p->temp), at >= 1 && at < 5);
        if (at >= 5) {
            assert_content(p->path, text, sizeof(text));
        }
        assert_int_equal(file_remove(p->path, true, NULL), CKD_OK);
        assert_int_equal(file_remove(p->temp, true, NULL), CKD_OK);
        if (status == 0) {
            assert_int_equal(at, 6);
            break;
        }
        assert_int_equal(status, 77);
    }
}

static ckd_status one_call(int which, const place *p, const char *other, ckd_error *err) {
    uint64_t total;
    dir_list list;
    file_lock *lock;
    file_reader *opened;
    switch (which) {
    case 0:
        return file_rename(p->temp, p->path, err);
    case 1:
        return file_remove(p->path, true, err);
    case 2:
        return dir_create(other, true, err);
    case 3:
        return dir_sync(p->dir, err);
    case 4:
        return file_open_read(&opened, p->path, err);
    case 5:
        return dir_list_read(&list, p->dir, err);
    case 6:
        return dir_bytes(&total, p->dir, err);
    case 7:
        return lock_acquire(&lock, other, LOCK_EXCLUSIVE, true, 0, err);
    default:
        return file_rename_noreplace(p->temp, other, err);
    }
}

/* Each step of a call invokes the hook once with its path, and does nothing if the hook returns an error. */
static void test_each_step_calls_the_hook(void **state) {
    place *p = *state;
    char other[600];
    snprintf(other, sizeof(other), "%s/other", p->dir);
    write_small_file(p->path, "old", 3);
    write_small_file(p->temp, "new", 3);
    for (int which = 0; which < 9; which++) {
        static const file_op want[] = {FILE_OP_RENAME,   FILE_OP_REMOVE, FILE_OP_MKDIR,
                                       FILE_OP_DIR_SYNC, FILE_OP_OPEN,   FILE_OP_OPEN,
                                       FILE_OP_OPEN,     FILE_OP_LOCK,   FILE_OP_RENAME_NOREPLACE};
        const char *const paths[] = {p->path, p->path, other, p->dir, p->path, p->dir, p->dir, other, other};
        ckd_error err;
        sweep s = {.answer = EMFILE};
        file_set_fault_hook(answer_nth, &s);
        ckd_status status = one_call(which, p, other, &err);
        file_set_fault_hook(NULL, NULL);
        assert_int_equal(status, CKD_E_IO);
        assert_int_equal(err.sys_errno, EMFILE);
        assert_string_equal(err.file, paths[which]);
        assert_int_equal(s.seen, 1);
        assert_int_equal(s.step, want[which]);
        assert_string_equal(s.path, paths[which]);
        assert_false(file_exists(other));
        assert_content(p->path, "old", 3);
        assert_content(p->temp, "new", 3);
    }
    sweep elsewhere = {.answer = -4};
    assert_int_equal(file_fault_check(FILE_OP_WRITE, "catalog.db"), 0);
    file_set_fault_hook(answer_nth, &elsewhere);
    assert_int_equal(file_fault_check(FILE_OP_WRITE, "catalog.db"), -4);
    assert_string_equal(elsewhere.path, "catalog.db");
    assert_int_equal(file_fault_check(FILE_OP_WRITE, "catalog.db"), 0);
    file_set_fault_hook(NULL, NULL);
}

int main(void) {
#define WITH_PLACE(test) cmocka_unit_test_setup_teardown(test, set_up, tear_down)
    const struct CMUnitTest tests[] = {
        WITH_PLACE(test_publish),
        WITH_PLACE(test_publish_where_links_fail),
        WITH_PLACE(test_race_has_one_winner),
        WITH_PLACE(test_replace_and_remove),
        WITH_PLACE(test_directories),
        WITH_PLACE(test_a_directory_that_vanishes),
        WITH_PLACE(test_list),
        WITH_PLACE(test_bytes_of_a_directory),
        WITH_PLACE(test_bytes_without_some_folders),
        WITH_PLACE(test_publish_bytes),
        WITH_PLACE(test_publish_bytes_without_a_slash),
        WITH_PLACE(test_publish_bytes_failing_anywhere),
        WITH_PLACE(test_publish_and_withdraw),
        WITH_PLACE(test_publish_bytes_dying_anywhere),
        WITH_PLACE(test_each_step_calls_the_hook),
    };
    return cmocka_run_group_tests_name("base_names", tests, NULL, NULL);
}
