/*
 * base/file: reading and writing. The program replaces pread, pwrite, fdatasync and close of the C library,
 * to make them fail.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/file.h"
#include "base/threads.h"
#include "tests/support/small_files.h"
#include "tests/support/tempdir.h"

/* ---- the replaced system calls ---- */

static struct {
    bool rough;   /* every second call is interrupted, and each call moves a few bytes at most */
    bool pretend; /* calls claim to have moved everything, and record the largest request */
    bool nothing; /* pwrite moves nothing */
    size_t largest;
    unsigned calls, syncs;
    int sync_errno, close_errno;
} fake;

/* Returns -1 for an interrupted call, else how much of `size` to move. */
static ssize_t rough_size(size_t size) {
    fake.calls++;
    if (fake.calls % 2 == 1) {
        errno = EINTR;
        return -1;
    }
    size_t most = 1 + fake.calls % 7;
    return (ssize_t)(size < most ? size : most);
}

ssize_t pread(int fd, void *to, size_t size, off_t offset) {
    if (fake.pretend) {
        fake.largest = size > fake.largest ? size : fake.largest;
        return (ssize_t)size;
    }
    ssize_t part = fake.rough ? rough_size(size) : (ssize_t)size;
    return part < 0 ? part : (ssize_t)syscall(SYS_pread64, fd, to, (size_t)part, offset);
}

ssize_t pwrite(int fd, const void *from, size_t size, off_t offset) {
    if (fake.pretend) {
        fake.largest = size > fake.largest ? size : fake.largest;
        return (ssize_t)size;
    }
    if (fake.nothing) {
        return 0;
    }
    ssize_t part = fake.rough ? rough_size(size) : (ssize_t)size;
    return part < 0 ? part : (ssize_t)syscall(SYS_pwrite64, fd, from, (size_t)part, offset);
}

int fdatasync(int fd) {
    fake.syncs++;
    if (fake.sync_errno != 0) {
        errno = fake.sync_errno;
        return -1;
    }
    return (int)syscall(SYS_fdatasync, fd);
}

int close(int fd) {
    int result = (int)syscall(SYS_close, fd);
    if (fake.close_errno != 0) {
        errno = fake.close_errno;
        return -1;
    }
    return result;
}

/* ---- each test has a directory ---- */

typedef struct place {
    char *dir;
    char path[512], other[512];
    unsigned open_files;
} place;

static unsigned open_files(void) {
    unsigned count = 0;
    for (int fd = 0; fd < 256; fd++) {
        count += fcntl(fd, F_GETFD) >= 0;
    }
    return count;
}

static int set_up(void **state) {
    place *p = calloc(1, sizeof(*p));
    if (p == NULL) {
        return -1;
    }
    p->dir = tempdir_create();
    snprintf(p->path, sizeof(p->path), "%s/file", p->dir);
    snprintf(p->other, sizeof(p->other), "%s/other", p->dir);
    p->open_files = open_files();
    memset(&fake, 0, sizeof(fake));
    *state = p;
    return 0;
}

static int tear_down(void **state) {
    place *p = *state;
    file_set_fault_hook(NULL, NULL);
    memset(&fake, 0, sizeof(fake));
    unsigned leaked = open_files() - p->open_files;
    tempdir_remove(p->dir);
    free(p);
    return leaked == 0 ? 0 : -1;
}

static uint8_t byte_at(size_t i) {
    return (uint8_t)(131 * i + 17 * (i >> 8) + 7);
}

static uint8_t *pattern(size_t size) {
    uint8_t *data = malloc(size + 1);
    assert_non_null(data);
    for (size_t i = 0; i < size; i++) {
        data[i] = byte_at(i);
    }
    return data;
}

/* ---- writing ---- */

static void test_write_and_read_back(void **state) {
    place *p = *state;
    static const size_t buffers[] = {0, 1, 7, 64, 4096, 100000};
    uint8_t *data = pattern(50000);
    for (size_t b = 0; b < 2 * sizeof(buffers) / sizeof(*buffers); b++) {
        fake.rough = b % 2 == 1;
        size_t done = 0;
        file_writer *f;
        assert_int_equal(file_create(&f, p->path, buffers[b / 2], NULL), CKD_OK);
        for (size_t part = 0; done + part <= 50000;
             part = part * 3 / 2 + 1) { /* 0, 1, 2, 4, 7, ... 15000 bytes */
            assert_int_equal(file_append(f, data + done, part, NULL), CKD_OK);
            done += part;
            assert_int_equal(file_written(f), done);
        }
        assert_int_equal(file_append(f, NULL, 0, NULL), CKD_OK);
        assert_int_equal(file_sync(f, NULL), CKD_OK);
        assert_content(p->path, data, done);
        assert_int_equal(file_append(f, data + done, 10, NULL), CKD_OK);
        assert_int_equal(file_flush(f, NULL), CKD_OK);
        assert_content(p->path, data, done + 10);
        assert_int_equal(file_append(f, data + done + 10, 3, NULL), CKD_OK);
        assert_int_equal(file_close(f, NULL), CKD_OK);
        assert_content(p->path, data, done + 13);
        assert_int_equal(file_remove(p->path, false, NULL), CKD_OK);
    }
    assert_int_equal(fake.syncs, 12);
    assert_true(fake.calls > 12 * 1000);
    free(data);
}

static void test_create_does_not_replace(void **state) {
    place *p = *state;
    ckd_error err;
    write_small_file(p->path, "old", 3);
    file_writer *f = (file_writer *)&err;
    assert_int_equal(file_create(&f, p->path, 10, &err), CKD_E_EXISTS);
    assert_null(f);
    assert_int_equal(err.sys_errno, EEXIST);
    assert_string_equal(err.file, p->path);
    assert_content(p->path, "old", 3);
    snprintf(p->other, sizeof(p->other), "%s/no/file", p->dir);
    assert_int_equal(file_create(&f, p->other, 10, &err), CKD_E_NOT_FOUND);
    static volatile size_t too_much = SIZE_MAX - 5;
    snprintf(p->other, sizeof(p->other), "%s/large", p->dir);
    assert_int_equal(file_create(&f, p->other, too_much, &err), CKD_E_NOMEM);
    assert_null(f);
    assert_false(file_exists(p->other));
}

static void test_mode_follows_umask(void **state) {
    place *p = *state;
    struct stat st;
    mode_t before = umask(027);
    write_small_file(p->path, "x", 1);
    umask(before);
    assert_int_equal(stat(p->path, &st), 0);
    assert_int_equal(st.st_mode & 07777, 0640);
}

static void test_write_at(void **state) {
    place *p = *state;
    ckd_error err;
    file_writer *f;
    assert_int_equal(file_create(&f, p->path, 16, NULL), CKD_OK);
    assert_int_equal(file_append(f, "........header........", 22, NULL), CKD_OK);
    assert_int_equal(file_append(f, "tail", 4, NULL), CKD_OK); /* stays in the buffer */
    assert_int_equal(file_write_at(f, 8, "HEADER", 6, NULL), CKD_OK);
    assert_int_equal(file_write_at(f, 22, "TAIL", 4, NULL), CKD_OK);
    assert_int_equal(file_write_at(f, 26, "", 0, NULL), CKD_OK);
    assert_int_equal(file_write_at(f, 23, "TAIL", 4, &err), CKD_E_INVALID);
    assert_string_equal(err.file, p->path);
    assert_int_equal(file_write_at(f, 27, "", 0, NULL), CKD_E_INVALID);
    assert_int_equal(file_write_at(f, UINT64_MAX, "xy", 2, NULL), CKD_E_INVALID);
    assert_int_equal(file_written(f), 26);
    /* Appended at the end of the file, not after the replaced bytes. */
    assert_int_equal(file_append(f, "!", 1, NULL), CKD_OK);
    assert_int_equal(file_close(f, NULL), CKD_OK);
    assert_content(p->path, "........HEADER........TAIL!", 27);
}

static void test_large_calls_are_split(void **state) {
    place *p = *state;
    size_t size = ((size_t)5 << 29) + 12345; /* 2.5 GiB of address space that is never touched */
    void *nothing =
        mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    assert_ptr_not_equal(nothing, MAP_FAILED);
    file_writer *f;
    assert_int_equal(file_create(&f, p->path, 1000, NULL), CKD_OK);
    fake.pretend = true;
    assert_int_equal(file_append(f, nothing, size, NULL), CKD_OK);
    assert_true(fake.largest <= (size_t)1 << 30 && fake.largest > (size_t)1 << 28);
    assert_int_equal(file_written(f), size);
    fake.largest = 0;
    assert_int_equal(file_write_at(f, 0, nothing, size, NULL), CKD_OK);
    assert_true(fake.largest <= (size_t)1 << 30 && fake.largest > (size_t)1 << 28);
    assert_int_equal(file_close(f, NULL), CKD_OK);
    file_reader *r;
    assert_int_equal(file_open_read(&r, p->path, NULL), CKD_OK);
    fake.largest = 0;
    assert_int_equal(file_read_at(r, 0, nothing, size, NULL), CKD_OK);
    assert_true(fake.largest <= (size_t)1 << 30 && fake.largest > (size_t)1 << 28);
    file_close_read(r);
    munmap(nothing, size);
}

/* ---- failures while writing ---- */

typedef struct fault {
    file_op step;
    int answer; /* what the hook returns for the `at`th such step, and all later ones */
    unsigned at, seen, total;
    char path[512];
} fault;

static int answer_step(void *context, file_op step, const char *path) {
    fault *f = context;
    f->total++;
    if (step != f->step) {
        return 0;
    }
    snprintf(f->path, sizeof(f->path), "%s", path);
    return f->seen++ >= f->at ? f->answer : 0;
}

/* After any failure, nothing works on this file any more; above all there is no second sync. */
static void assert_spoiled(file_writer *f, const char *path, ckd_status status) {
    ckd_error err;
    fault watch = {.step = FILE_OP_SYNC};
    file_set_fault_hook(answer_step, &watch);
    unsigned syncs = fake.syncs;
    assert_int_equal(file_sync(f, &err), status);
    assert_int_equal(err.status, status);
    assert_string_equal(err.file, path);
    assert_int_equal(file_append(f, "x", 1, NULL), status);
    assert_int_equal(file_flush(f, NULL), status);
    assert_int_equal(file_write_at(f, 0, "x", 1, NULL), status);
    assert_int_equal(fake.syncs, syncs);
    assert_int_equal(watch.total, 0);
    file_set_fault_hook(NULL, NULL);
}

static void test_failed_write_spoils(void **state) {
    place *p = *state;
    ckd_error err;
    file_writer *f;
    fault full = {.step = FILE_OP_WRITE, .answer = EDQUOT, .at = 1};
    assert_int_equal(file_create(&f, p->path, 4, NULL), CKD_OK);
    file_set_fault_hook(answer_step, &full);
    assert_int_equal(file_append(f, "abcdef", 6, NULL), CKD_OK);
    assert_int_equal(file_append(f, "gh", 2, NULL), CKD_OK);
    assert_int_equal(file_flush(f, &err), CKD_E_NOSPACE);
    assert_int_equal(err.sys_errno, EDQUOT);
    assert_string_equal(err.file, p->path);
    assert_string_equal(full.path, p->path);
    file_set_fault_hook(NULL, NULL);
    assert_spoiled(f, p->path, CKD_E_NOSPACE);
    assert_int_equal(file_close(f, NULL), CKD_E_NOSPACE); /* frees the writer, too */
    assert_content(p->path, "abcdef", 6);
    assert_int_equal(file_remove(p->path, false, NULL), CKD_OK);

    assert_int_equal(file_create(&f, p->path, 4, NULL), CKD_OK);
    fake.nothing = true; /* a write that moves nothing must not be repeated forever */
    assert_int_equal(file_append(f, "abcdef", 6, &err), CKD_E_IO);
    fake.nothing = false;
    assert_spoiled(f, p->path, CKD_E_IO);
    file_discard(f);
    assert_false(file_exists(p->path));
}

static void test_failed_sync_spoils(void **state) {
    place *p = *state;
    static const int reasons[] = {EIO, ENOSPC, EINTR};
    static const ckd_status want[] = {CKD_E_IO, CKD_E_NOSPACE, CKD_E_IO};
    for (size_t i = 0; i < 6; i++) {
        ckd_error err;
        file_writer *f;
        fault broken = {.step = FILE_OP_SYNC, .answer = reasons[i / 2]};
        assert_int_equal(file_create(&f, p->path, 64, NULL), CKD_OK);
        assert_int_equal(file_append(f, "abc", 3, NULL), CKD_OK);
        fake.syncs = 0;
        if (i % 2 == 0) {
            fake.sync_errno = reasons[i / 2];
        } else {
            file_set_fault_hook(answer_step, &broken);
        }
        assert_int_equal(file_sync(f, &err), want[i / 2]);
        assert_int_equal(err.sys_errno, reasons[i / 2]);
        assert_int_equal(fake.syncs, i % 2 == 0 ? 1 : 0);
        fake.sync_errno = 0; /* the kernel would report success for a second one */
        assert_spoiled(f, p->path, want[i / 2]);
        file_discard(f);
        assert_false(file_exists(p->path));
    }
}

/* An answer of -n lets n - 1 bytes of the write reach the file; then the disk is full. */
static void test_short_write_faults(void **state) {
    place *p = *state;
    for (int n = 1; n <= 12; n++) {
        ckd_error err;
        file_writer *f;
        fault full = {.step = FILE_OP_WRITE, .answer = -n, .at = 1};
        assert_int_equal(file_create(&f, p->path, 8, NULL), CKD_OK);
        file_set_fault_hook(answer_step, &full);
        assert_int_equal(file_append(f, "0123456789", 10, NULL), CKD_OK);
        assert_int_equal(file_append(f, "abcdefgh", 8, NULL), CKD_OK);
        assert_int_equal(file_sync(f, &err), CKD_E_NOSPACE);
        assert_int_equal(err.sys_errno, ENOSPC);
        assert_int_equal(full.seen, 2);
        file_set_fault_hook(NULL, NULL);
        assert_content(p->path, "0123456789abcdefgh", 10 + (n - 1 < 8 ? (size_t)n - 1 : 8));
        assert_spoiled(f, p->path, CKD_E_NOSPACE);
        file_discard(f);
        assert_false(file_exists(p->path));
    }
}

static void test_failed_create_and_close(void **state) {
    place *p = *state;
    ckd_error err;
    file_writer *f;
    fault broken = {.step = FILE_OP_CREATE, .answer = EROFS};
    file_set_fault_hook(answer_step, &broken);
    assert_int_equal(file_create(&f, p->path, 8, &err), CKD_E_READ_ONLY);
    assert_null(f);
    assert_false(file_exists(p->path));
    broken.answer = -3; /* for this step it only means failure */
    assert_int_equal(file_create(&f, p->path, 8, &err), CKD_E_IO);
    file_set_fault_hook(NULL, NULL);

    for (int i = 0; i < 4; i++) {
        assert_int_equal(file_create(&f, p->path, 8, NULL), CKD_OK);
        assert_int_equal(file_append(f, "abc", 3, NULL), CKD_OK);
        if (i >= 2) {
            assert_int_equal(file_sync(f, NULL), CKD_OK);
        }
        broken = (fault){.step = FILE_OP_CLOSE, .answer = EDQUOT};
        if (i == 0) {
            file_set_fault_hook(answer_step, &broken);
        } else {
            fake.close_errno = i == 1 || i == 2 ? EINTR : EIO;
        }
        /* If close is interrupted after a sync, everything is safe. Before a sync, nobody knows. */
        static const ckd_status want[] = {CKD_E_NOSPACE, CKD_E_IO, CKD_OK, CKD_E_IO};
        assert_int_equal(file_close(f, &err), want[i]);
        file_set_fault_hook(NULL, NULL);
        fake.close_errno = 0;
        assert_content(p->path, "abc", 3);
        assert_int_equal(file_remove(p->path, false, NULL), CKD_OK);
    }
}

static void test_discard(void **state) {
    place *p = *state;
    file_writer *f;
    file_discard(NULL);
    /* The file was published, and its old name now belongs to another file. Neither is removed. */
    assert_int_equal(file_create(&f, p->path, 8, NULL), CKD_OK);
    assert_int_equal(file_append(f, "published", 9, NULL), CKD_OK);
    assert_int_equal(file_flush(f, NULL), CKD_OK);
    assert_int_equal(file_rename_noreplace(p->path, p->other, NULL), CKD_OK);
    write_small_file(p->path, "another", 7);
    file_discard(f);
    assert_content(p->path, "another", 7);
    assert_content(p->other, "published", 9);
    assert_int_equal(file_remove(p->path, false, NULL), CKD_OK);
    /* A child of the writer frees its copy, and leaves the file to its parent. */
    assert_int_equal(file_create(&f, p->path, 8, NULL), CKD_OK);
    assert_int_equal(file_append(f, "mine", 4, NULL), CKD_OK);
    pid_t child = fork();
    if (child == 0) {
        file_discard(f);
        _exit(file_exists(p->path) ? 0 : 1);
    }
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    assert_int_equal(file_close(f, NULL), CKD_OK);
    assert_content(p->path, "mine", 4);
    /* Removing can fail. Then the file stays, but no open descriptor (tear_down checks). */
    assert_int_equal(file_remove(p->path, false, NULL), CKD_OK);
    assert_int_equal(file_create(&f, p->path, 8, NULL), CKD_OK);
    fault stuck = {.step = FILE_OP_REMOVE, .answer = EIO};
    file_set_fault_hook(answer_step, &stuck);
    file_discard(f);
    assert_int_equal(stuck.seen, 1);
    assert_true(file_exists(p->path));
}

/* ---- reading ---- */

/* Bytes are read back from where they were written, in any order. The directory never lists the file. */
static void test_scratch(void **state) {
    const place *p = *state;
    const char *dir = p->dir;
    dir_list before, after;
    assert_int_equal(dir_list_read(&before, dir, NULL), CKD_OK);
    file_scratch *f;
    assert_int_equal(file_scratch_open(&f, dir, NULL), CKD_OK);
    uint8_t out[300], in[300];
    for (int rough = 0; rough < 2; rough++) {
        for (size_t i = 0; i < sizeof(out); i++) {
            out[i] = (uint8_t)(i * 7 + (size_t)rough);
        }
        fake.rough = rough;
        assert_int_equal(file_scratch_write(f, 100, out + 100, 200, NULL), CKD_OK);
        assert_int_equal(file_scratch_write(f, 0, out, 100, NULL), CKD_OK);
        assert_int_equal(file_scratch_read(f, 0, in, sizeof(in), NULL), CKD_OK);
        fake.rough = false;
        assert_memory_equal(in, out, sizeof(in));
    }
    ckd_error err;
    assert_int_equal(file_scratch_read(f, 200, in, 101, &err), CKD_E_IO); /* beyond the end */
    fault full = {.step = FILE_OP_WRITE, .answer = -4, .at = 0};
    file_set_fault_hook(answer_step, &full);
    assert_int_equal(file_scratch_write(f, 0, out, 10, &err), CKD_E_NOSPACE);
    full = (fault){.step = FILE_OP_READ, .answer = EIO, .at = 0};
    assert_int_equal(file_scratch_read(f, 0, in, 10, &err), CKD_E_IO);
    file_set_fault_hook(NULL, NULL);
    assert_int_equal(dir_list_read(&after, dir, NULL), CKD_OK);
    assert_int_equal(before.count, after.count);
    dir_list_free(&before);
    dir_list_free(&after);
    file_scratch_close(f);
    file_scratch_close(NULL);
    fault broken = {.step = FILE_OP_CREATE, .answer = EROFS};
    file_set_fault_hook(answer_step, &broken);
    assert_int_not_equal(file_scratch_open(&f, dir, &err), CKD_OK);
    file_set_fault_hook(NULL, NULL);
    assert_null(f);
    assert_int_equal(file_scratch_open(&f, "/nonexistent/folder", &err), CKD_E_NOT_FOUND);
}

static int count_step(void *context, file_op step, const char *path) {
    (void)path;
    *(unsigned *)context += step == FILE_OP_READ;
    return 0;
}

/* A file that is read in order takes a few large reads. Others, and files that got shorter, are read as without. */
static void test_read_ahead(void **state) {
    place *p = *state;
    uint8_t *data = pattern(1000), got[1000];
    unsigned reads = 0;
    write_small_file(p->path, data, 1000);
    file_reader *r;
    ckd_error err;
    assert_int_equal(file_open_read(&r, p->path, NULL), CKD_OK);
    assert_int_equal(file_read_ahead(r, 100, NULL), CKD_OK);
    file_set_fault_hook(count_step, &reads);
    for (size_t at = 0, size; at < 1000; at += size) { /* one of ten is larger than the buffer */
        size = at % 10 == 9 ? 150 : 7;
        size = size < 1000 - at ? size : 1000 - at;
        assert_int_equal(file_read_at(r, at, got, size, NULL), CKD_OK);
        assert_memory_equal(got, data + at, size);
    }
    assert_in_range(reads, 7, 15);
    for (size_t i = 0; i < 200; i++) {
        size_t offset = 37 * i % 1000, size = 53 * i % (1001 - offset);
        assert_int_equal(file_read_at(r, offset, got, size, NULL), CKD_OK);
        assert_memory_equal(got, data + offset, size);
    }
    assert_int_equal(file_read_at(r, 1000, got, 0, NULL), CKD_OK);
    assert_int_equal(file_read_at(r, 950, got, 51, &err), CKD_E_CORRUPT);
    assert_non_null(strstr(err.message, "ends at byte 1000"));
    assert_int_equal(file_read_at(r, 0, got, 1, &err), CKD_OK); /* the buffer has the beginning again */
    assert_int_equal(truncate(p->path, 500), 0);
    assert_int_equal(file_read_at(r, 470, got, 20, &err), CKD_OK); /* the buffer's 100 bytes are not there */
    assert_memory_equal(got, data + 470, 20);
    assert_int_equal(file_read_at(r, 490, got, 20, &err), CKD_E_CORRUPT);
    file_close_read(r);
    file_set_fault_hook(NULL, NULL);
    free(data);
}

static void test_read_at(void **state) {
    place *p = *state;
    uint8_t *data = pattern(1000), got[1000];
    write_small_file(p->path, data, 1000);
    file_reader *r;
    ckd_error err;
    assert_int_equal(file_open_read(&r, p->path, NULL), CKD_OK);
    assert_int_equal(file_size(r), 1000);
    assert_string_equal(file_path(r), p->path);
    for (size_t i = 0; i < 200; i++) {
        fake.rough = i % 2 == 1;
        size_t offset = 37 * i % 1000, size = 53 * i % (1001 - offset);
        assert_int_equal(file_read_at(r, offset, got, size, NULL), CKD_OK);
        assert_memory_equal(got, data + offset, size);
    }
    fake.rough = false;
    assert_int_equal(file_read_at(r, 1000, got, 0, NULL), CKD_OK);
    assert_int_equal(file_read_at(r, 900, got, 101, &err), CKD_E_CORRUPT);
    assert_int_equal(err.offset, 900);
    assert_string_equal(err.file, p->path);
    assert_non_null(strstr(err.message, "ends at byte 1000"));
    static const uint64_t far[] = {1001,           UINT64_C(1) << 40, INT64_MAX, UINT64_C(1) << 63,
                                   UINT64_MAX - 4, UINT64_MAX};
    for (size_t i = 0; i < sizeof(far) / sizeof(*far); i++) {
        assert_int_equal(file_read_at(r, far[i], got, 5, &err), CKD_E_CORRUPT);
        assert_true(err.offset == far[i]);
        assert_string_equal(err.file, p->path);
    }
    /* Another process truncates the file after it was opened. */
    assert_int_equal(truncate(p->path, 500), 0);
    assert_int_equal(file_read_at(r, 400, got, 200, &err), CKD_E_CORRUPT);
    assert_non_null(strstr(err.message, "ends at byte 500"));
    fault broken = {.step = FILE_OP_READ, .answer = EIO};
    file_set_fault_hook(answer_step, &broken);
    assert_int_equal(file_read_at(r, 0, got, 10, &err), CKD_E_IO);
    assert_int_equal(err.sys_errno, EIO);
    file_close_read(r);
    file_close_read(NULL);
    free(data);
}

static ckd_status read_slice(void *context, size_t index, uint32_t worker, ckd_error *err) {
    (void)worker;
    uint8_t got[997];
    ckd_status status = file_read_at(context, 997 * index, got, sizeof(got), err);
    for (size_t i = 0; i < sizeof(got) && status == CKD_OK; i++) {
        if (got[i] != byte_at(997 * index + i)) {
            return err_set(err, CKD_E_MISMATCH, "wrong byte");
        }
    }
    return status;
}

static void test_one_reader_for_many_threads(void **state) {
    place *p = *state;
    uint8_t *data = pattern(997 * 500);
    write_small_file(p->path, data, 997 * 500);
    thread_pool *pool;
    file_reader *r;
    assert_int_equal(pool_create(&pool, 4, NULL), CKD_OK);
    assert_int_equal(file_open_read(&r, p->path, NULL), CKD_OK);
    assert_int_equal(pool_run(pool, 500, read_slice, r, NULL), CKD_OK);
    assert_int_equal(pool_run(pool, 501, read_slice, r, NULL), CKD_E_CORRUPT);
    file_close_read(r);
    pool_destroy(pool);
    free(data);
}

static void test_read_all(void **state) {
    place *p = *state;
    bytes out = {0};
    ckd_error err;
    write_small_file(p->path, "0123456789", 10);
    assert_int_equal(file_read_all(&out, p->path, 10, NULL), CKD_OK);
    assert_int_equal(out.size, 10);
    assert_memory_equal(out.data, "0123456789", 10);
    assert_int_equal(file_read_all(&out, p->path, 9, &err), CKD_E_CORRUPT);
    assert_int_equal(out.size, 0);
    assert_string_equal(err.file, p->path);
    write_small_file(p->other, "", 0);
    assert_int_equal(file_read_all(&out, p->other, 0, NULL), CKD_OK);
    assert_int_equal(out.size, 0);
    fault broken = {.step = FILE_OP_READ, .answer = EIO};
    file_set_fault_hook(answer_step, &broken);
    assert_int_equal(file_read_all(&out, p->path, 10, &err), CKD_E_IO);
    assert_int_equal(out.size, 0);
    bytes_free(&out);
}

static void test_files_that_cannot_be_read(void **state) {
    place *p = *state;
    file_reader *r = (file_reader *)p;
    bytes out = {0};
    ckd_error err;
    assert_int_equal(file_open_read(&r, p->path, &err), CKD_E_NOT_FOUND);
    assert_null(r);
    assert_int_equal(err.sys_errno, ENOENT);
    assert_string_equal(err.file, p->path);
    assert_int_equal(file_read_all(&out, p->path, 10, NULL), CKD_E_NOT_FOUND);
    write_small_file(p->other, "x", 1);
    fault denied = {.step = FILE_OP_OPEN, .answer = EACCES};
    file_set_fault_hook(answer_step, &denied);
    /* Not READ_ONLY, as it cannot even be read. */
    assert_int_equal(file_open_read(&r, p->other, &err), CKD_E_IO);
    assert_int_equal(err.status, CKD_E_IO);
    assert_int_equal(err.sys_errno, EACCES);
    bytes_free(&out);
}

static void assert_not_regular(const char *path, const char *what) {
    file_reader *r = NULL;
    ckd_error err = {0};
    assert_int_equal(file_open_read(&r, path, &err), CKD_E_CORRUPT);
    assert_null(r);
    assert_string_equal(err.file, path);
    assert_non_null(strstr(err.message, what));
}

/* Files that are not regular count as damaged, so that callers can continue with the other files. */
static void test_files_that_are_not_regular(void **state) {
    place *p = *state;
    assert_not_regular(p->dir, "is a directory");
    assert_int_equal(mkfifo(p->path, 0600), 0);
    assert_not_regular(p->path, "is a pipe"); /* does not wait for a writer */
    file_remove(p->path, false, NULL);
    write_small_file(p->other, "x", 1);
    assert_int_equal(symlink(p->other, p->path), 0);
    assert_not_regular(p->path, "is a symbolic link"); /* even if its target could be read */
    file_remove(p->path, false, NULL);
    struct sockaddr_un name = {.sun_family = AF_UNIX};
    assert_true(snprintf(name.sun_path, sizeof(name.sun_path), "%s", p->path) < (int)sizeof(name.sun_path));
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    assert_int_equal(bind(fd, (const struct sockaddr *)&name, sizeof(name)), 0);
    close(fd);
    assert_not_regular(p->path, "is a socket");
}

/* Tells errors of one file from those of the process, which prevent reading any file. */
static void test_errors_of_one_file(void **state) {
    (void)state;
    static const int unreadable[] = {EIO,    EUCLEAN, EBADMSG, ENODATA, EREMOTEIO,
                                     EILSEQ, ESTALE,  EACCES,  EPERM};
    static const int ours[] = {0, EMFILE, ENFILE, ENOMEM, EINTR, ENOSPC, ETIMEDOUT};
    for (size_t i = 0; i < sizeof(unreadable) / sizeof(unreadable[0]); i++) {
        assert_true(file_is_unreadable(unreadable[i]));
    }
    for (size_t i = 0; i < sizeof(ours) / sizeof(ours[0]); i++) {
        assert_false(file_is_unreadable(ours[i]));
    }
}

int main(void) {
#define WITH_PLACE(test) cmocka_unit_test_setup_teardown(test, set_up, tear_down)
    const struct CMUnitTest tests[] = {
        WITH_PLACE(test_write_and_read_back),
        WITH_PLACE(test_create_does_not_replace),
        WITH_PLACE(test_mode_follows_umask),
        WITH_PLACE(test_write_at),
        WITH_PLACE(test_large_calls_are_split),
        WITH_PLACE(test_failed_write_spoils),
        WITH_PLACE(test_failed_sync_spoils),
        WITH_PLACE(test_short_write_faults),
        WITH_PLACE(test_failed_create_and_close),
        WITH_PLACE(test_discard),
        WITH_PLACE(test_scratch),
        WITH_PLACE(test_read_ahead),
        WITH_PLACE(test_read_at),
        WITH_PLACE(test_one_reader_for_many_threads),
        WITH_PLACE(test_read_all),
        WITH_PLACE(test_files_that_cannot_be_read),
        WITH_PLACE(test_files_that_are_not_regular),
        cmocka_unit_test(test_errors_of_one_file),
    };
    return cmocka_run_group_tests_name("base_file", tests, NULL, NULL);
}
