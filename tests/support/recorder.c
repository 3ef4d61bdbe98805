#undef _FILE_OFFSET_BITS /* both names of each call are defined below */
#include "tests/support/recorder.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <dirent.h>
#include <errno.h>
#include <execinfo.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/file.h"

#define VISIBLE __attribute__((visibility("default")))

static op_record *record; /* NULL: nothing is recorded */
static char root[512];
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

/* ---- the record ---- */

static void *grown(void *array, size_t *capacity, size_t count, size_t size) {
    if (count < *capacity) {
        return array;
    }
    *capacity = *capacity ? *capacity * 2 : 64;
    array = realloc(array, *capacity * size);
    assert_non_null(array);
    return array;
}

static op *add_op(op_kind kind) {
    record->ops = grown(record->ops, &record->capacity, record->count, sizeof(op));
    op *o = &record->ops[record->count++];
    memset(o, 0, sizeof(*o));
    o->kind = kind;
    return o;
}

/* Finds the newest node with this inode, as numbers of inodes are reused. */
static bool find_node(unsigned *out, uint64_t inode) {
    for (size_t i = record->node_count; i-- > 0;) {
        if (record->nodes[i].inode == inode) {
            *out = (unsigned)i;
            return true;
        }
    }
    return false;
}

static unsigned add_node(uint64_t inode, bool is_directory) {
    record->nodes = grown(record->nodes, &record->node_capacity, record->node_count, sizeof(op_node));
    record->nodes[record->node_count] = (op_node){.inode = inode, .is_directory = is_directory};
    return (unsigned)record->node_count++;
}

static bool node_of_fd(unsigned *out, int fd, bool is_directory) {
    struct stat st;
    return fstat(fd, &st) == 0 && (is_directory ? S_ISDIR(st.st_mode) : S_ISREG(st.st_mode)) &&
           find_node(out, st.st_ino);
}

/* Splits a path into the directory that holds it, and its last part. */
static bool split(unsigned *dir, char name[OP_NAME_MAX], const char *path) {
    char parent[1024];
    const char *slash = strrchr(path, '/');
    struct stat st;
    if (slash == NULL || (size_t)(slash - path) >= sizeof(parent) || strlen(slash + 1) >= OP_NAME_MAX) {
        return false;
    }
    memcpy(parent, path, (size_t)(slash - path));
    parent[slash - path] = '\0';
    strcpy(name, slash + 1);
    return stat(parent, &st) == 0 && find_node(dir, st.st_ino);
}

static void put_live(op_node *n, uint64_t offset, const void *data, size_t size) {
    if (offset + size > n->live_size) {
        n->live = realloc(n->live, offset + size);
        assert_non_null(n->live);
        memset(n->live + n->live_size, 0, (size_t)offset + size - n->live_size);
        n->live_size = (size_t)offset + size;
    }
    memcpy(n->live + offset, data, size);
}

static void note_write(unsigned node, uint64_t offset, const void *data, size_t size) {
    op *o = add_op(OP_WRITE);
    o->node = node;
    o->offset = offset;
    o->size = size;
    o->data = malloc(size ? size : 1);
    assert_non_null(o->data);
    memcpy(o->data, data, size);
    put_live(&record->nodes[node], offset, data, size);
}

static void note_truncate(unsigned node, uint64_t size) {
    op_node *n = &record->nodes[node];
    op *o = add_op(OP_TRUNCATE);
    o->node = node;
    o->offset = size;
    if (size < n->live_size) {
        n->live_size = (size_t)size;
    } else if (size > n->live_size) {
        put_live(n, size - 1, "", 1);
    }
}

/* An assertion that fails before end_op ends the test. Nothing is recorded after that. */
static void begin_op(void) {
    pthread_mutex_lock(&mutex);
}

static void end_op(void) {
    pthread_mutex_unlock(&mutex);
}

/* ---- calls that change files ---- */

static ssize_t do_write(int fd, const void *data, size_t size, int64_t offset) {
    ssize_t put = syscall(SYS_pwrite64, fd, data, size, offset);
    begin_op();
    unsigned node;
    if (record && put > 0 && node_of_fd(&node, fd, false)) {
        note_write(node, (uint64_t)offset, data, (size_t)put);
    }
    end_op();
    return put;
}

VISIBLE ssize_t pwrite(int fd, const void *data, size_t size, off_t offset) {
    return do_write(fd, data, size, offset);
}
VISIBLE ssize_t pwrite64(int fd, const void *data, size_t size, off64_t offset) {
    return do_write(fd, data, size, offset);
}

VISIBLE ssize_t write(int fd, const void *data, size_t size) {
    int64_t offset = syscall(SYS_lseek, fd, 0, SEEK_CUR);
    ssize_t put = syscall(SYS_write, fd, data, size);
    begin_op();
    unsigned node;
    if (record && put > 0 && offset >= 0 && node_of_fd(&node, fd, false)) {
        note_write(node, (uint64_t)offset, data, (size_t)put);
    }
    end_op();
    return put;
}

static int do_truncate(int fd, int64_t size) {
    int result = (int)syscall(SYS_ftruncate, fd, size);
    begin_op();
    unsigned node;
    if (record && result == 0 && node_of_fd(&node, fd, false)) {
        note_truncate(node, (uint64_t)size);
    }
    end_op();
    return result;
}

VISIBLE int ftruncate(int fd, off_t size) {
    return do_truncate(fd, size);
}
VISIBLE int ftruncate64(int fd, off64_t size) {
    return do_truncate(fd, size);
}

static int do_allocate(int fd, int mode, int64_t offset, int64_t size) {
    int result = (int)syscall(SYS_fallocate, fd, mode, offset, size);
    begin_op();
    unsigned node;
    if (record && result == 0 && mode == 0 && node_of_fd(&node, fd, false) &&
        (uint64_t)(offset + size) > record->nodes[node].live_size) {
        note_truncate(node, (uint64_t)(offset + size));
    }
    end_op();
    return result;
}

VISIBLE int fallocate(int fd, int mode, off_t offset, off_t size) {
    return do_allocate(fd, mode, offset, size);
}
VISIBLE int fallocate64(int fd, int mode, off64_t offset, off64_t size) {
    return do_allocate(fd, mode, offset, size);
}

/* Notes the callers of fsync or fdatasync. The frame above this one is the call itself. */
static __attribute__((noinline)) void note_callers(op *o, const void *caller) {
    void *frames[OP_FRAMES + 8]; /* sanitizers add frames below */
    int count = backtrace(frames, OP_FRAMES + 8), first = 0;
    while (first < count && frames[first] != caller) {
        first++;
    }
    for (int i = 0; i < OP_FRAMES && first + i < count; i++) {
        o->frames[i] = frames[first + i];
    }
}

static __attribute__((noinline)) int do_sync(int fd, long call, const void *caller) {
    int result = (int)syscall(call, fd);
    begin_op();
    unsigned node;
    bool is_directory = record && node_of_fd(&node, fd, true);
    if (record && result == 0 && (is_directory || node_of_fd(&node, fd, false))) {
        op *o = add_op(is_directory ? OP_DIR_SYNC : OP_SYNC);
        o->node = node;
        note_callers(o, caller);
    }
    end_op();
    return result;
}

VISIBLE int fsync(int fd) {
    int result = do_sync(fd, SYS_fsync, __builtin_return_address(0));
    __asm__ volatile("" ::: "memory"); /* prevents a tail call, which would have no frame */
    return result;
}
VISIBLE int fdatasync(int fd) {
    int result = do_sync(fd, SYS_fdatasync, __builtin_return_address(0));
    __asm__ volatile("" ::: "memory");
    return result;
}

/* ---- calls that change names ---- */

static int do_open(const char *path, int flags, mode_t mode) {
    struct stat st;
    bool creates = (flags & O_CREAT) && lstat(path, &st) != 0;
    int fd = (int)syscall(SYS_openat, AT_FDCWD, path, flags, mode);
    int errnum = errno;
    begin_op();
    unsigned dir, node;
    char name[OP_NAME_MAX];
    if (record && fd >= 0 && creates && split(&dir, name, path) && fstat(fd, &st) == 0) {
        node = add_node(st.st_ino, false);
        op *o = add_op(OP_NAME);
        o->dir = dir;
        o->node = node;
        strcpy(o->name, name);
    } else if (record && fd >= 0 && (flags & O_TRUNC) && node_of_fd(&node, fd, false)) {
        note_truncate(node, 0);
    }
    end_op();
    errno = errnum;
    return fd;
}

static mode_t mode_of(int flags, va_list *rest) {
    return flags & (O_CREAT | O_TMPFILE) ? va_arg(*rest, mode_t) : 0;
}

VISIBLE int open(const char *path, int flags, ...) {
    va_list rest;
    va_start(rest, flags);
    int fd = do_open(path, flags, mode_of(flags, &rest));
    va_end(rest);
    return fd;
}
VISIBLE int open64(const char *path, int flags, ...) {
    va_list rest;
    va_start(rest, flags);
    int fd = do_open(path, flags, mode_of(flags, &rest));
    va_end(rest);
    return fd;
}

static void setting_name(op_kind kind, const char *path, uint64_t inode, bool made) {
    unsigned dir, node;
    char name[OP_NAME_MAX];
    if (split(&dir, name, path) && (made || find_node(&node, inode))) {
        node = made ? add_node(inode, true) : node;
        op *o = add_op(kind);
        o->dir = dir;
        o->node = node;
        strcpy(o->name, name);
    }
}

VISIBLE int mkdir(const char *path, mode_t mode) {
    int result = (int)syscall(SYS_mkdir, path, mode);
    struct stat st;
    begin_op();
    if (record && result == 0 && stat(path, &st) == 0) {
        setting_name(OP_NAME, path, st.st_ino, true);
    }
    end_op();
    return result;
}

VISIBLE int link(const char *from, const char *to) {
    int result = (int)syscall(SYS_link, from, to);
    struct stat st;
    begin_op();
    if (record && result == 0 && stat(to, &st) == 0) {
        setting_name(OP_NAME, to, st.st_ino, false);
    }
    end_op();
    return result;
}

static int do_unlink(const char *path, long call) {
    struct stat st;
    bool there = lstat(path, &st) == 0;
    int result = (int)syscall(call, path);
    int errnum = errno;
    begin_op();
    if (record && result == 0 && there) {
        setting_name(OP_UNNAME, path, st.st_ino, false);
    }
    end_op();
    errno = errnum;
    return result;
}

VISIBLE int unlink(const char *path) {
    return do_unlink(path, SYS_unlink);
}
VISIBLE int rmdir(const char *path) {
    return do_unlink(path, SYS_rmdir);
}

static int do_rename(const char *from, const char *to, unsigned flags) {
    int result = (int)syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, flags);
    int errnum = errno;
    unsigned dir, to_dir, node;
    char name[OP_NAME_MAX], to_name[OP_NAME_MAX];
    struct stat st;
    begin_op();
    if (record && result == 0 && split(&dir, name, from) && split(&to_dir, to_name, to) &&
        stat(to, &st) == 0 && find_node(&node, st.st_ino)) {
        op *o = add_op(OP_RENAME);
        o->node = node;
        o->dir = dir;
        o->to_dir = to_dir;
        strcpy(o->name, name);
        strcpy(o->to_name, to_name);
    }
    end_op();
    errno = errnum;
    return result;
}

VISIBLE int rename(const char *from, const char *to) {
    return do_rename(from, to, 0);
}
VISIBLE int renameat2(int from_dir, const char *from, int to_dir, const char *to, unsigned flags) {
    assert_true(from_dir == AT_FDCWD && to_dir == AT_FDCWD);
    return do_rename(from, to, flags);
}

/* A copy inside the system would write without being seen. Where there is none, programs read and write. */
VISIBLE ssize_t copy_file_range(int from, off64_t *from_at, int to, off64_t *to_at, size_t size,
                                unsigned flags) {
    if (record) {
        errno = EXDEV;
        return -1;
    }
    return syscall(SYS_copy_file_range, from, from_at, to, to_at, size, flags);
}

/* ---- starting and stopping ---- */

static unsigned char *content_of(const char *path, size_t *size) {
    int fd = (int)syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC);
    struct stat st;
    assert_true(fd >= 0 && fstat(fd, &st) == 0);
    *size = (size_t)st.st_size;
    unsigned char *data = malloc(*size + 1);
    assert_non_null(data);
    assert_int_equal(pread(fd, data, *size, 0), *size);
    close(fd);
    return data;
}

static void walk(const char *path, unsigned dir, const char *lost) {
    dir_list list;
    assert_int_equal(dir_list_read(&list, path, NULL), CKD_OK);
    for (size_t i = 0; i < list.count; i++) {
        char below[1024];
        struct stat st;
        snprintf(below, sizeof(below), "%s/%s", path, list.names[i]);
        assert_int_equal(lstat(below, &st), 0);
        unsigned node;
        bool known = find_node(&node, st.st_ino); /* the file has another name already */
        node = known ? node : add_node(st.st_ino, S_ISDIR(st.st_mode));
        op_node *n = &record->nodes[node];
        if (!known && !n->is_directory) {
            n->content = content_of(below, &n->size);
            n->live = malloc(n->size + 1);
            assert_non_null(n->live);
            memcpy(n->live, n->content, n->size);
            n->live_size = n->size;
        }
        op *o;
        bool matches =
            lost && (strcmp(lost, list.names[i]) == 0 || strcmp(lost, below + strlen(root) + 1) == 0);
        if (matches && record->count == 0) { /* only its first name */
            o = add_op(OP_NAME);
        } else {
            record->names = grown(record->names, &record->name_capacity, record->name_count, sizeof(op));
            o = &record->names[record->name_count++];
            *o = (op){.kind = OP_NAME};
        }
        o->dir = dir;
        o->node = node;
        assert_true(strlen(list.names[i]) < OP_NAME_MAX);
        strcpy(o->name, list.names[i]);
        if (S_ISDIR(st.st_mode)) {
            walk(below, node, lost);
        }
    }
    dir_list_free(&list);
}

void recorder_start(op_record *out, const char *path, const char *lost) {
    struct stat st;
    memset(out, 0, sizeof(*out));
    assert_true(stat(path, &st) == 0 && strlen(path) < sizeof(root));
    strcpy(root, path);
    record = out;
    add_node(st.st_ino, true);
    walk(path, 0, lost);
    assert_true(!lost || out->count == 1);
}

void recorder_expect(size_t expected) {
    begin_op();
    if (record) {
        add_op(OP_EXPECT)->expected = expected;
    }
    end_op();
}

static void check_seen(const char *path) {
    dir_list list;
    assert_int_equal(dir_list_read(&list, path, NULL), CKD_OK);
    for (size_t i = 0; i < list.count; i++) {
        char below[1024];
        struct stat st;
        unsigned node = 0;
        snprintf(below, sizeof(below), "%s/%s", path, list.names[i]);
        assert_int_equal(lstat(below, &st), 0);
        if (!find_node(&node, st.st_ino)) {
            fail_msg("the recorder has not seen how %s came about", below);
        }
        if (S_ISDIR(st.st_mode)) {
            check_seen(below);
            continue;
        }
        size_t size;
        unsigned char *data = content_of(below, &size);
        const op_node *n = &record->nodes[node];
        if (size != n->live_size || (size && memcmp(data, n->live, size) != 0)) {
            fail_msg("the recorder has not seen all that was written to %s", below);
        }
        free(data);
    }
    dir_list_free(&list);
}

void recorder_drop(void) {
    record = NULL;
}

void recorder_stop(void) {
    check_seen(root);
    recorder_drop();
}

void op_record_free(op_record *r) {
    for (size_t i = 0; i < r->count; i++) {
        free(r->ops[i].data);
    }
    for (size_t i = 0; i < r->node_count; i++) {
        free(r->nodes[i].content);
        free(r->nodes[i].live);
    }
    free(r->ops);
    free(r->nodes);
    free(r->names);
    memset(r, 0, sizeof(*r));
}
