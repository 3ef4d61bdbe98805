/* base/file_pool.c: readers whose descriptors are closed while nobody reads. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/file.h"
#include "tests/support/actions.h"
#include "tests/support/small_files.h"
#include "tests/support/tempdir.h"

enum { FILES = 100, SIZE = 4096, POOL = 16, IDENTITY = 32 };

typedef struct readers {
    char paths[FILES][512];
    file_reader *files[FILES];
} readers;

static struct rlimit allowed;

/* Leaves `more` descriptors besides those that are open. */
static void allow_descriptors(size_t more) {
    struct rlimit few = {open_descriptors() + more, allowed.rlim_max};
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &few), 0);
}

static void make_content(uint8_t to[SIZE], size_t number) {
    for (size_t i = 0; i < SIZE; i++) {
        to[i] = (uint8_t)(number * 31 + i * 7 + (i >> 8));
    }
}

static void write_file(const char *path, size_t number) {
    uint8_t content[SIZE];
    make_content(content, number);
    write_small_file(path, content, SIZE);
}

/* Opens 100 files. Their last bytes are their identity. */
static readers *open_all(const char *dir) {
    readers *r = calloc(1, sizeof(*r));
    assert_non_null(r);
    for (size_t i = 0; i < FILES; i++) {
        uint8_t content[SIZE];
        make_content(content, i);
        snprintf(r->paths[i], sizeof(r->paths[i]), "%s/%zu", dir, i);
        write_file(r->paths[i], i);
        assert_int_equal(file_open_read(&r->files[i], r->paths[i], NULL), CKD_OK);
        file_let_close(r->files[i], SIZE - IDENTITY, content + SIZE - IDENTITY, IDENTITY);
    }
    return r;
}

static void close_all(readers *r) {
    for (size_t i = 0; i < FILES; i++) {
        file_close_read(r->files[i]);
    }
    free(r);
}

static ckd_status read_one(readers *r, size_t i, ckd_error *err) {
    uint8_t content[SIZE], found[100];
    make_content(content, i);
    ckd_status status = file_read_at(r->files[i], 1000, found, sizeof(found), err);
    if (status == CKD_OK && memcmp(found, content + 1000, sizeof(found)) != 0) {
        fail_msg("file %zu has other bytes", i);
    }
    return status;
}

static int set_up(void **state) {
    return getrlimit(RLIMIT_NOFILE, &allowed) != 0 ? -1 : tempdir_setup(state);
}

static int tear_down(void **state) {
    setrlimit(RLIMIT_NOFILE, &allowed);
    return tempdir_teardown(state);
}

static void test_more_readers_than_descriptors(void **state) {
    size_t before = open_descriptors();
    allow_descriptors(POOL + 4);
    readers *r = open_all(*state);
    assert_in_range(open_descriptors(), before + 1, before + POOL);
    for (size_t i = 0; i < 3 * FILES; i++) {
        assert_int_equal(read_one(r, i * 37 % FILES, NULL), CKD_OK);
    }
    assert_in_range(open_descriptors(), before + 1, before + POOL);
    close_all(r);
    assert_int_equal(open_descriptors(), before);
}

/* The limit follows the process's. */
static void test_the_pool_has_a_quarter_of_the_descriptors(void **state) {
    size_t before = open_descriptors();
    struct rlimit few = {200, allowed.rlim_max};
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &few), 0);
    readers *r = open_all(*state);
    assert_int_equal(open_descriptors(), before + 50);
    few.rlim_cur = 100;
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &few), 0);
    assert_int_equal(read_one(r, 0, NULL), CKD_OK);
    assert_int_equal(open_descriptors(), before + 25);
    close_all(r);
}

/* Files that are written need a descriptor, too, and so do locks. */
static void test_idle_descriptors_give_way(void **state) {
    readers *r = open_all(*state);
    char path[600], other[600];
    file_writer *f;
    file_lock *lock;
    snprintf(path, sizeof(path), "%s/new", (char *)*state);
    snprintf(other, sizeof(other), "%s/lock", (char *)*state);
    allow_descriptors(0);
    assert_int_equal(file_create(&f, path, 100, NULL), CKD_OK);
    assert_int_equal(lock_acquire(&lock, other, LOCK_SHARED, true, 0, NULL), CKD_OK);
    assert_int_equal(dir_sync(*state, NULL), CKD_OK);
    assert_int_equal(file_close(f, NULL), CKD_OK);
    for (size_t i = 0; i < FILES; i++) {
        assert_int_equal(read_one(r, i, NULL), CKD_OK);
    }
    lock_release(lock);
    close_all(r);
}

static void expect_corrupt(readers *r, size_t i, const char *what) {
    ckd_error err = {0};
    assert_int_equal(read_one(r, i, &err), CKD_E_CORRUPT);
    assert_non_null(strstr(err.message, what));
    assert_string_equal(err.file, r->paths[i]);
}

static void test_files_that_change_meanwhile(void **state) {
    uint8_t content[SIZE];
    allow_descriptors(POOL + 4);
    readers *r = open_all(*state); /* the first ones are closed by now */
    assert_int_equal(unlink(r->paths[0]), 0);
    expect_corrupt(r, 0, "removed");
    write_file(r->paths[0], 0); /* the same bytes: as a repair leaves it */
    assert_int_equal(read_one(r, 0, NULL), CKD_OK);
    assert_int_equal(unlink(r->paths[1]), 0);
    write_file(r->paths[1], 2);
    expect_corrupt(r, 1, "replaced");
    assert_int_equal(truncate(r->paths[2], SIZE - 1), 0);
    expect_corrupt(r, 2, "replaced");
    make_content(content, 3);
    assert_int_equal(unlink(r->paths[3]), 0);
    write_small_file(r->paths[3], content + 1, SIZE - 1); /* shorter, with the identity at its end */
    expect_corrupt(r, 3, "replaced");
    assert_int_equal(unlink(r->paths[4]), 0);
    assert_int_equal(symlink(r->paths[0], r->paths[4]), 0);
    expect_corrupt(r, 4, "symbolic link");
    close_all(r);
}

/* A file that cannot be opened for now says so, and can be read later. */
static void test_no_descriptor_is_left(void **state) {
    ckd_error err = {0};
    allow_descriptors(POOL + 4);
    readers *r = open_all(*state);
    int taken[2 * POOL], count = 0;
    struct rlimit none = {3, allowed.rlim_max};
    while (count < 2 * POOL && (taken[count] = dup(0)) >= 0) {
        count++;
    }
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &none), 0);
    assert_int_equal(read_one(r, 0, &err), CKD_E_IO);
    assert_int_equal(err.sys_errno, EMFILE);
    assert_non_null(strstr(err.message, "ulimit -n"));
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &allowed), 0);
    while (count > 0) {
        close(taken[--count]);
    }
    assert_int_equal(read_one(r, 0, NULL), CKD_OK);
    close_all(r);
}

/* A cached file needs none. */
static void test_cached_files_hold_no_descriptor(void **state) {
    uint8_t content[SIZE], found[SIZE];
    char path[600];
    file_reader *f;
    size_t before = open_descriptors();
    make_content(content, 1);
    snprintf(path, sizeof(path), "%s/small", (char *)*state);
    write_file(path, 1);
    assert_int_equal(file_open_read(&f, path, NULL), CKD_OK);
    assert_int_equal(file_cache(f, SIZE, NULL), CKD_OK);
    assert_int_equal(open_descriptors(), before);
    file_let_close(f, 0, content, IDENTITY);
    assert_int_equal(unlink(path), 0);
    assert_int_equal(file_read_at(f, 0, found, SIZE, NULL), CKD_OK);
    assert_memory_equal(found, content, SIZE);
    assert_int_equal(file_read_at(f, 1, found, SIZE, NULL), CKD_E_CORRUPT);
    file_close_read(f);
}

/* ---- several threads ---- */

typedef struct worker {
    readers *r;
    unsigned seed;
    size_t failed;
} worker;

static void *read_randomly(void *context) {
    worker *w = context;
    for (int i = 0; i < 3000; i++) {
        w->failed += read_one(w->r, (size_t)rand_r(&w->seed) % FILES, NULL) != CKD_OK;
    }
    return NULL;
}

/* Some take the same files, and some lose theirs at once. A child forked meanwhile can close its files. */
static void test_threads(void **state) {
    enum { THREADS = 8 };
    size_t before = open_descriptors();
    allow_descriptors(POOL + THREADS + 8);
    readers *r = open_all(*state);
    worker workers[THREADS];
    pthread_t threads[THREADS];
    for (unsigned i = 0; i < THREADS; i++) {
        workers[i] = (worker){r, i + 1, 0};
        assert_int_equal(pthread_create(&threads[i], NULL, read_randomly, &workers[i]), 0);
    }
    for (int i = 0; i < 20; i++) {
        pid_t child = fork();
        if (child == 0) {
            alarm(20);
            close_all(r);
            _exit(0);
        }
        int status = -1;
        assert_int_equal(waitpid(child, &status, 0), child);
        assert_int_equal(status, 0);
    }
    for (unsigned i = 0; i < THREADS; i++) {
        pthread_join(threads[i], NULL);
        assert_int_equal(workers[i].failed, 0);
    }
    assert_in_range(open_descriptors(), before, before + POOL);
    close_all(r);
    assert_int_equal(open_descriptors(), before);
}

#define POOL_TEST(test) cmocka_unit_test_setup_teardown(test, set_up, tear_down)

int main(void) {
    const struct CMUnitTest tests[] = {
        POOL_TEST(test_more_readers_than_descriptors),
        POOL_TEST(test_the_pool_has_a_quarter_of_the_descriptors),
        POOL_TEST(test_idle_descriptors_give_way),
        POOL_TEST(test_files_that_change_meanwhile),
        POOL_TEST(test_no_descriptor_is_left),
        POOL_TEST(test_cached_files_hold_no_descriptor),
        POOL_TEST(test_threads),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
