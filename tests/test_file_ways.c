/* base/file: past the page cache, by a thread and by io_uring: the same bytes, the same errors, in files of any size. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <signal.h>
#include <unistd.h>

#include "base/file.h"
#include "base/file_direct.h"
#include "tests/support/actions.h"
#include "tests/support/tempdir.h"

enum { PIECE = 4096, MOST = 9 * PIECE + 100 };

static char path[512];
static uint8_t data[MOST];

static const char *name_in(const char *dir) {
    snprintf(path, sizeof(path), "%s/file", dir);
    return path;
}

static void begin_test(void **state) {
    name_in(*state);
    for (size_t i = 0; i < sizeof(data); i++) {
        data[i] = (uint8_t)(i * 31 + i / 251);
    }
    file_set_direct_piece(PIECE);
}

/* Where the file system has no such way there is nothing to see: the number of those that were seen is asserted. */
static bool can(file_way way) {
    file_writer *f = NULL;
    assert_int_equal(file_create_way(&f, path, 100, way, NULL, NULL), CKD_OK);
    bool yes = file_way_of(f) == way;
    file_discard(f);
    return yes;
}

static void expect_content(size_t size) {
    file_reader *f;
    uint8_t *got = malloc(MOST);
    assert_int_equal(file_open_read(&f, path, NULL), CKD_OK);
    assert_int_equal(file_size(f), size);
    assert_int_equal(file_read_at(f, 0, got, size, NULL), CKD_OK);
    assert_memory_equal(got, data, size);
    file_close_read(f);
    free(got);
}

/* In stretches of so many bytes, synced. */
static void write_file(file_way way, size_t size, size_t stretch) {
    file_writer *f;
    unlink(path);
    assert_int_equal(file_create_way(&f, path, 1000, way, NULL, NULL), CKD_OK);
    for (size_t at = 0; at < size; at += stretch) {
        size_t part = size - at < stretch ? size - at : stretch;
        assert_int_equal(file_append(f, data + at, part, NULL), CKD_OK);
        assert_int_equal(file_written(f), at + part);
    }
    assert_int_equal(file_sync(f, NULL), CKD_OK);
    assert_int_equal(file_bytes(path), size); /* nothing that was reserved is left */
    assert_int_equal(file_close(f, NULL), CKD_OK);
}

static void test_sizes(void **state) {
    static const size_t sizes[] = {0, 1, PIECE - 1, PIECE, PIECE + 1, 4 * PIECE, 5 * PIECE, 9 * PIECE, MOST};
    static const size_t stretches[] = {1, 77, PIECE, PIECE + 1, 3 * PIECE, MOST};
    begin_test(state);
    size_t descriptors = open_descriptors();
    for (file_way way = FILE_BUFFERED; way <= FILE_URING; way++) {
        for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
            for (size_t k = 0; k < sizeof(stretches) / sizeof(stretches[0]); k++) {
                write_file(way, sizes[i], stretches[k]);
                expect_content(sizes[i]);
            }
        }
    }
    assert_int_equal(open_descriptors(), descriptors);
}

/* Whether both ways are to be had here is seen at all: on ext4 and on tmpfs, with the system calls of a usual kernel, they are. */
static void test_what_is_not_to_be_had_is_buffered(void **state) {
    begin_test(state);
    for (file_way way = FILE_DIRECT; way <= FILE_URING; way++) {
        file_writer *f = NULL;
        struct rlimit few, before;
        write_file(way, MOST, 100); /* in any case */
        expect_content(MOST);
        unlink(path);
        assert_int_equal(getrlimit(RLIMIT_NOFILE, &before), 0);
        few = before;
        few.rlim_cur = (rlim_t)dup(0); /* one descriptor is left: for the file, none for a ring */
        close((int)few.rlim_cur);
        few.rlim_cur++;
        assert_int_equal(setrlimit(RLIMIT_NOFILE, &few), 0);
        assert_int_equal(file_create_way(&f, path, 100, way, NULL, NULL), CKD_OK);
        assert_int_equal(setrlimit(RLIMIT_NOFILE, &before), 0);
        assert_true(way == FILE_DIRECT || file_way_of(f) == FILE_BUFFERED);
        assert_int_equal(file_append(f, data, MOST, NULL), CKD_OK);
        assert_int_equal(file_sync(f, NULL), CKD_OK);
        assert_int_equal(file_close(f, NULL), CKD_OK);
        expect_content(MOST);
    }
}

/* A header that is known last, and more behind it. */
static void test_write_at(void **state) {
    begin_test(state);
    for (file_way way = FILE_BUFFERED; way <= FILE_URING; way++) {
        file_writer *f;
        uint8_t zeros[88] = {0};
        unlink(path);
        assert_int_equal(file_create_way(&f, path, 1000, way, NULL, NULL), CKD_OK);
        assert_int_equal(file_append(f, zeros, sizeof(zeros), NULL), CKD_OK);
        assert_int_equal(file_append(f, data + 88, 6 * PIECE, NULL), CKD_OK);
        assert_int_equal(file_write_at(f, 0, data, 88, NULL), CKD_OK);
        assert_int_equal(file_append(f, data + 88 + 6 * PIECE, 2000, NULL), CKD_OK);
        assert_int_equal(file_sync(f, NULL), CKD_OK);
        assert_int_equal(file_close(f, NULL), CKD_OK);
        expect_content(88 + 6 * PIECE + 2000);
    }
}

static unsigned long steps, fail_at;
static int fault;
static file_step fail_step;
static int fail_nth(void *context, file_step step, const char *at) {
    (void)context;
    assert_string_equal(at, path);
    steps += step == fail_step;
    return step == fail_step && steps == fail_at ? fault : 0;
}

/* Every write fails once, at once or in its midst: nothing after it succeeds, and what was before it is there. */
static void test_failed_writes_spoil(void **state) {
    begin_test(state);
    fail_step = STEP_WRITE;
    for (file_way way = FILE_BUFFERED; way <= FILE_URING; way++) {
        for (int how = 0; how < 3; how++) {
            for (fail_at = 1;; fail_at++) {
                file_writer *f;
                ckd_error err = {0};
                fault = how == 0 ? EIO : how == 1 ? -1 : -(PIECE / 2) - 8;
                steps = 0;
                unlink(path);
                assert_int_equal(file_create_way(&f, path, PIECE, way, NULL, NULL), CKD_OK);
                file_set_fault_hook(fail_nth, NULL);
                ckd_status status = CKD_OK;
                for (size_t at = 0; at < MOST && status == CKD_OK; at += 1000) {
                    status = file_append(f, data + at, MOST - at < 1000 ? MOST - at : 1000, &err);
                }
                status = status == CKD_OK ? file_sync(f, &err) : status;
                file_set_fault_hook(NULL, NULL);
                if (steps < fail_at) {
                    assert_int_equal(status, CKD_OK);
                    file_discard(f);
                    break;
                }
                assert_int_equal(status, how == 0 ? CKD_E_IO : CKD_E_NOSPACE);
                assert_string_equal(err.file, path);
                assert_int_equal(file_append(f, data, 1, NULL), status);
                assert_int_equal(file_sync(f, NULL), status);
                size_t before = (fail_at - 1) * PIECE, rest = MOST - before;
                if (how > 0 || way == FILE_BUFFERED) {
                    expect_content(file_bytes(path)); /* no byte that was not given */
                }
                if (how > 0 && way != FILE_BUFFERED) {
                    size_t some = how == 1 ? 0 : PIECE / 2 + 7;
                    assert_int_equal(file_bytes(path), before + (rest < some ? rest : some));
                }
                file_discard(f);
                assert_false(file_exists(path));
            }
            assert_true(fail_at > 9);
        }
    }
}

/* A sync that failed is not made again, whatever comes. */
static void test_failed_sync_spoils(void **state) {
    begin_test(state);
    fail_step = STEP_SYNC;
    fail_at = 1;
    fault = EIO;
    for (file_way way = FILE_BUFFERED; way <= FILE_URING; way++) {
        file_writer *f;
        steps = 0;
        unlink(path);
        assert_int_equal(file_create_way(&f, path, PIECE, way, NULL, NULL), CKD_OK);
        file_set_fault_hook(fail_nth, NULL);
        assert_int_equal(file_append(f, data, MOST, NULL), CKD_OK);
        assert_int_equal(file_sync(f, NULL), CKD_E_IO);
        assert_int_equal(file_sync(f, NULL), CKD_E_IO);
        assert_int_equal(file_append(f, data, 1, NULL), CKD_E_IO);
        file_set_fault_hook(NULL, NULL);
        assert_int_equal(steps, 1);
        assert_int_equal(file_close(f, NULL), CKD_E_IO);
    }
}

/* The system itself refuses: what is under way when that shows is waited for, and it is told at the latest by the sync. */
static void test_what_the_system_refuses(void **state) {
    begin_test(state);
    struct rlimit before, small;
    signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &before), 0);
    small = before;
    small.rlim_cur = 3 * PIECE;
    for (file_way way = FILE_BUFFERED; way <= FILE_URING; way++) {
        file_writer *f;
        unlink(path);
        assert_int_equal(file_create_way(&f, path, PIECE, way, NULL, NULL), CKD_OK);
        assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
        ckd_status status = file_append(f, data, 6 * PIECE, NULL);
        usleep(20000); /* what is under way has met the limit by then */
        assert_int_equal(setrlimit(RLIMIT_FSIZE, &before), 0);
        status = status == CKD_OK ? file_sync(f, NULL) : status; /* it would work by now */
        assert_true(status == CKD_E_IO || status == CKD_E_NOSPACE);
        assert_int_equal(file_sync(f, NULL), status);
        file_discard(f);
        assert_false(file_exists(path));
    }
    signal(SIGXFSZ, SIG_DFL);
}

/* A forked child drops its copy: it waits for nothing, and the parent's file is whole. */
static void test_fork(void **state) {
    begin_test(state);
    for (file_way way = FILE_DIRECT; way <= FILE_URING; way++) {
        file_writer *f;
        unlink(path);
        assert_int_equal(file_create_way(&f, path, PIECE, way, NULL, NULL), CKD_OK);
        assert_int_equal(file_append(f, data, 5 * PIECE + 10, NULL), CKD_OK);
        pid_t child = fork();
        if (child == 0) {
            alarm(20);
            file_discard(f);
            _exit(file_exists(path) ? 0 : 1);
        }
        int status;
        assert_int_equal(waitpid(child, &status, 0), child);
        assert_int_equal(status, 0);
        assert_int_equal(file_append(f, data + 5 * PIECE + 10, 3 * PIECE, NULL), CKD_OK);
        assert_int_equal(file_sync(f, NULL), CKD_OK);
        assert_int_equal(file_close(f, NULL), CKD_OK);
        expect_content(8 * PIECE + 10);
    }
}

/* The kernel gives up what a thread has asked for that ends: every second piece of the next file, before it is begun (mk/test.mk). */
static bool giving_up;
static unsigned pieces_given_up, pieces_asked_for;
static uint64_t given_up; /* a bit for each number */
int __real_uring_write(uring *u, int fd, const struct iovec *iov, uint64_t offset, unsigned number);
int __wrap_uring_write(uring *u, int fd, const struct iovec *iov, uint64_t offset, unsigned number);
int __wrap_uring_write(uring *u, int fd, const struct iovec *iov, uint64_t offset, unsigned number) {
    static const struct iovec nothing;
    bool drop = giving_up && pieces_asked_for++ % 2 == 0;
    given_up = (given_up & ~(UINT64_C(1) << number)) | (uint64_t)drop << number;
    return __real_uring_write(u, fd, drop ? &nothing : iov, offset, number);
}
int __real_uring_wait(uring *u, unsigned *number, int *result);
int __wrap_uring_wait(uring *u, unsigned *number, int *result);
int __wrap_uring_wait(uring *u, unsigned *number, int *result) {
    int errnum = __real_uring_wait(u, number, result);
    if (errnum == 0 && given_up >> *number & 1) {
        *result = -ECANCELED;
        pieces_given_up++;
    }
    return errnum;
}

static void *append_most(void *writer) {
    return (void *)(intptr_t)file_append(writer, data, 8 * PIECE + 10, NULL);
}

/* Who began to write ends, and another thread goes on. */
static void test_a_thread_that_ends(void **state) {
    begin_test(state);
    for (int round = 0; round < 40; round++) {
        file_way way = round % 2 ? FILE_URING : FILE_DIRECT;
        file_writer *f;
        pthread_t thread;
        void *status = NULL;
        unlink(path);
        giving_up = round / 2 == 0;
        pieces_given_up = 0;
        assert_int_equal(file_create_way(&f, path, PIECE, way, NULL, NULL), CKD_OK);
        bool had = file_way_of(f) == way;
        assert_int_equal(pthread_create(&thread, NULL, append_most, f), 0);
        assert_int_equal(pthread_join(thread, &status), 0);
        assert_int_equal((intptr_t)status, CKD_OK);
        assert_int_equal(file_append(f, data + 8 * PIECE + 10, PIECE, NULL), CKD_OK);
        assert_int_equal(file_sync(f, NULL), CKD_OK);
        assert_int_equal(file_close(f, NULL), CKD_OK);
        expect_content(9 * PIECE + 10);
        assert_true(!giving_up || way != FILE_URING || !had || pieces_given_up >= 4);
        giving_up = false;
    }
}

static void test_trials(void **state) {
    begin_test(state);
    file_set_direct_piece((size_t)1 << 20);
    for (file_way way = FILE_BUFFERED; way <= FILE_URING; way++) {
        file_trial t;
        bool had = can(way);
        assert_int_equal(file_try_way(&t, path, way, (UINT64_C(1) << 20) + 1, NULL), CKD_OK);
        assert_true((t.way == way) == had && (had || t.way == FILE_BUFFERED));
        assert_int_equal(t.bytes, (1 << 20) + (128 << 10));
        assert_true(t.wall_ns > 0 && t.work_ns > 0);
        assert_false(file_exists(path));
    }
    FILE *other = fopen(path, "w");
    file_trial t;
    fclose(other);
    assert_int_equal(file_try_way(&t, path, FILE_BUFFERED, 1, NULL), CKD_E_EXISTS);
    assert_true(file_exists(path));
    char here[DIR_DEVICE], nowhere[DIR_DEVICE];
    dir_device(here, *state);
    dir_device(nowhere, "no such folder");
    assert_true(here[0] != '\0' && nowhere[0] == '\0');
}

int main(void) {
#define TEST(name) tempdir_test(test_##name)
    const struct CMUnitTest tests[] = {
        TEST(sizes),
        TEST(what_is_not_to_be_had_is_buffered),
        TEST(write_at),
        TEST(failed_writes_spoil),
        TEST(failed_sync_spoils),
        TEST(what_the_system_refuses),
        TEST(fork),
        TEST(a_thread_that_ends),
        TEST(trials),
    };
    return cmocka_run_group_tests_name("ways to write", tests, NULL, NULL);
}
