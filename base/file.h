/*
 * Files: the only place that opens, writes, syncs, links, renames, locks and removes. Each of these steps asks the
 * fault hook first, so that tests can fail or kill the process at every one of them.
 *
 * A failed fsync is never retried on the same file: the caller drops the file and writes a new one.
 */
#ifndef BASE_FILE_H
#define BASE_FILE_H

#include <stdbool.h>

#include "base/bytes.h"
#include "base/error.h"

/* ---- reading ---- */
typedef struct file_reader file_reader;
/*
 * Errors: NOT_FOUND; CORRUPT (it is no regular file: a symbolic link is not followed, a pipe not waited for); IO, with the
 * errno, also without permission; NOMEM. Reading is by pread: one reader may be used by several threads at once.
 */
ckd_status file_open_read(file_reader **out, const char *path, ckd_error *err);
uint64_t file_size(const file_reader *f); /* at the time of opening */
const char *file_path(const file_reader *f);
/* Exactly `size` bytes at `offset`; CORRUPT with the path and offset if the file ends before. */
ckd_status file_read_at(file_reader *f, uint64_t offset, void *to, size_t size, ckd_error *err);
void file_close_read(file_reader *f); /* accepts NULL */
/*
 * Does the errno of a failed open or read tell of this one file, so that others may well be readable? EIO and its kin, a
 * stale handle, no permission. The process's own troubles (EMFILE, ENOMEM, ...) do not.
 */
bool file_is_unreadable(int errnum);
/*
 * Reads the file now, if it has at most `cap` bytes, so that everything asked of it later comes from memory, and is what it was
 * then. Errors: those of file_read_at, NOMEM. Before several threads use the reader.
 */
ckd_status file_keep(file_reader *f, size_t cap, ckd_error *err);
/* `size` bytes at `offset` of a file that is kept, as long as the reader lives; NULL if it is not, or has no such bytes. */
const void *file_kept(const file_reader *f, uint64_t offset, size_t size);
/* A whole small file into `out` (cleared first, empty on failure); CORRUPT if larger than cap. */
ckd_status file_read_all(bytes *out, const char *path, size_t cap, ckd_error *err);

/*
 * ---- writing new files ----
 *
 * The first write or sync that fails spoils the file: every later call but file_discard fails with the same status.
 * A writer is used by one thread at a time.
 */
typedef struct file_writer file_writer;
/*
 * Creates path, which must not exist (EXISTS). Mode 0666 less the umask. Appends go through a buffer of `buffer` bytes
 * (0: none); one that is larger than the buffer goes straight to the file.
 */
ckd_status file_create(file_writer **out, const char *path, size_t buffer, ckd_error *err);
/*
 * The same with a buffer in `memory`, which grows as needed and can be reused for the next file when this one is closed.
 * NULL: the writer allocates its own.
 */
ckd_status file_create_in(file_writer **out, const char *path, size_t buffer, bytes *memory, ckd_error *err);
/*
 * Goes on with a file that another writer left: keeps its first `keep` bytes and cuts off the rest. Counts as STEP_CREATE. Errors: NOT_FOUND,
 * IO (it has fewer bytes), NOMEM.
 */
ckd_status file_continue(file_writer **out, const char *path, uint64_t keep, size_t buffer, ckd_error *err);
ckd_status file_append(file_writer *f, const void *data, size_t size, ckd_error *err);
uint64_t file_written(const file_writer *f); /* bytes appended so far, buffered ones included */
/* Flushes the buffer and makes data and size durable (fdatasync), not the name: dir_sync does that. Never retried. */
ckd_status file_sync(file_writer *f, ckd_error *err);
/* Flushes the buffer without syncing. */
ckd_status file_flush(file_writer *f, ckd_error *err);
/* Replaces bytes already appended (flushes first): for headers that are known last. INVALID beyond what was appended. */
ckd_status file_write_at(file_writer *f, uint64_t offset, const void *data, size_t size, ckd_error *err);
/* Flushes and closes. Frees f also on failure; the file stays then, and is the caller's to remove. */
ckd_status file_close(file_writer *f, ckd_error *err);
/*
 * Closes and removes the file, unless its path has come to name another one, or this is a child forked by the process
 * that created it. Accepts NULL.
 */
void file_discard(file_writer *f);

/*
 * ---- scratch files: without a name, so that nothing is left of them ----
 *
 * Reading and writing are at any offset, and several threads may at once; what is read must have been written. Errors: IO, NOSPACE, NOMEM.
 */
typedef struct file_scratch file_scratch;
ckd_status file_scratch_open(file_scratch **out, const char *directory, ckd_error *err);
ckd_status file_scratch_write(file_scratch *f, uint64_t offset, const void *data, size_t size,
                              ckd_error *err);
ckd_status file_scratch_read(file_scratch *f, uint64_t offset, void *to, size_t size, ckd_error *err);
void file_scratch_close(file_scratch *f); /* accepts NULL */

/* ---- names ---- */
/*
 * Gives the file `from` the name `to` without replacing anything: EXISTS if `to` is there; of several at once one wins.
 * Both on one file system. renameat2, or link and unlink where the file system lacks it; the old name may be left over
 * then if it cannot be removed, which is no failure.
 */
ckd_status file_publish(const char *from, const char *to, ckd_error *err);
/* A second name for a file. EXISTS; IO and others where the file system has no such thing. A step of publishing. */
ckd_status file_link(const char *from, const char *to, ckd_error *err);
/* Replaces `to` atomically. */
ckd_status file_replace(const char *from, const char *to, ckd_error *err);
ckd_status file_remove(const char *path, bool missing_ok, ckd_error *err);
ckd_status dir_create(const char *path, bool exists_ok, ckd_error *err);
/* An empty one; IO (ENOTEMPTY) if it is not. */
ckd_status dir_remove(const char *path, ckd_error *err);
ckd_status dir_sync(const char *path, ckd_error *err);
/*
 * create + append + sync + close + publish + dir_sync, through the temporary name `temp` beside it (EXISTS if that or
 * path is there). For manifests and other small files. If dir_sync is what fails, the file has its name and may or may
 * not keep it in a power cut; after any other failure neither name is left.
 */
ckd_status file_publish_bytes(const char *path, const char *temp, const void *data, size_t size,
                              ckd_error *err);
/* The same, but replaces the file at `path`. Whatever fails, path is the old file or the new one. */
ckd_status file_replace_bytes(const char *path, const char *temp, const void *data, size_t size,
                              ckd_error *err);
bool file_exists(const char *path);
/* Does the name stand for anything, be it a symbolic link that leads nowhere? */
bool file_name_taken(const char *path);
/* A directory itself, not what a symbolic link leads to? */
bool dir_exists(const char *path);
/* Does something that is no directory stand there, links followed, or in place of a directory above it? */
bool file_bars_directory(const char *path);
/* The inode behind a name, 0 if there is none: tells whether a file was replaced. */
uint64_t file_inode(const char *path);
/* Do both names lead to one file, links followed? false if one of them leads nowhere. */
bool file_same(const char *a, const char *b);
/*
 * What tells that a file, or a folder and the names in it, is as it was: inode, times of change. "" if it is not there, or changed so lately that the file
 * system's clock may not tell the next change apart.
 */
enum { FILE_MARK = 96 };
void file_mark(char out[FILE_MARK], const char *path);
/* When it was last written to, in nanoseconds since 1970; 0 if it is not there. */
uint64_t file_modified_ns(const char *path);
/* Its size without opening it (closing a file would drop SQLite's locks on it); 0 if it is not there. */
uint64_t file_bytes(const char *path);

/* Names in a directory (without . and ..), sorted by bytes. Release with dir_list_free. NOT_FOUND if it is absent. */
typedef struct dir_list {
    char **names;
    size_t count;
} dir_list;
ckd_status dir_list_read(dir_list *out, const char *path, ckd_error *err);
void dir_list_free(dir_list *list);
/* Bytes that others than the superuser may still write on the file system of a path; UINT64_MAX if it does not say. */
uint64_t dir_free_space(const char *path);
/*
 * Apparent sizes of all regular files below path, added up; symbolic links are not followed, files that vanish
 * meanwhile not counted. At most 64 directories deep (IO).
 */
ckd_status dir_bytes(uint64_t *out, const char *path, ckd_error *err);
/* The same without what lies in some folders: paths relative to it, DIR_LEFT_OUT at most (INVALID). Those are not looked into. */
enum { DIR_LEFT_OUT = 8 };
ckd_status dir_bytes_without(uint64_t *out, const char *path, const char *const *folders, size_t count,
                             ckd_error *err);

/*
 * ---- locks: open file description locks, so that they end with the process and work between threads ----
 *
 * A child that a process forks while it holds a lock: lock_release in the parent ends the lock, in the child it only
 * frees. If the parent dies without releasing, the lock lasts until the child ends, calls lock_release or exec.
 */
typedef enum lock_kind { LOCK_SHARED, LOCK_EXCLUSIVE } lock_kind;
typedef struct file_lock file_lock;
/*
 * Opens path (created if `create`, else NOT_FOUND) and locks it, waiting up to timeout_ms (0: try once). BUSY when it
 * cannot be had in time; the message names the path. A shared lock on an existing file needs only read permission.
 * The file that is locked is the one that the path names when the call returns: whoever removes lock files does so
 * while holding the lock exclusively. Waiting is by polling with growing pauses of up to 50 ms, in no particular order.
 */
ckd_status lock_acquire(file_lock **out, const char *path, lock_kind kind, bool create, uint32_t timeout_ms,
                        ckd_error *err);
/* The file stays. Accepts NULL. */
void lock_release(file_lock *lock);
/*
 * Who holds a lock on a file, as far as /proc tells: processes of this machine that we may look into. One of them, a
 * stopped one (SIGSTOP, a debugger) first. false: none is known. Looks through all processes: not for every try.
 */
enum { LOCK_COMMAND = 32 };
typedef struct lock_holder {
    int64_t process;
    uint32_t others;
    bool stopped;
    char command[LOCK_COMMAND]; /* printable ASCII */
} lock_holder;
bool lock_find_holder(lock_holder *out, const char *path);

/* ---- time and randomness ---- */
uint64_t clock_wall_ns(void);
uint64_t clock_monotonic_ns(void);
void clock_sleep_ns(uint64_t ns); /* or until a signal comes */
/* Calls `attempt` again, after pauses that grow to 20 ms, until it returns something else than BUSY or the time is over. */
typedef ckd_status (*attempt_fn)(void *context, ckd_error *err);
ckd_status keep_trying(attempt_fn attempt, void *context, uint64_t timeout_ms, ckd_error *err);
ckd_status random_bytes(void *out, size_t size, ckd_error *err);

/* ---- fault injection, for tests only ---- */
typedef enum file_step {
    STEP_CREATE,
    STEP_WRITE,
    STEP_SYNC,
    STEP_CLOSE,
    STEP_PUBLISH,
    STEP_REPLACE,
    STEP_REMOVE,
    STEP_MKDIR,
    STEP_DIR_SYNC,
    STEP_OPEN,
    STEP_READ,
    STEP_LOCK
} file_step;
/*
 * Called before each step: 0 goes on, an errno makes the step fail with it. A negative value -n on STEP_WRITE writes
 * only the first n - 1 bytes of it and then fails with ENOSPC; on other steps it means EIO. A step is one flush of a
 * buffer, one read, one lock_acquire (whatever it takes), never a repetition after EINTR. STEP_OPEN is also the listing
 * of a directory. Removing a file that is missing is a step, too. Not thread-safe to change while files are in use.
 */
typedef int (*file_fault_fn)(void *context, file_step step, const char *path);
void file_set_fault_hook(file_fault_fn hook, void *context);
/* Reports a step done elsewhere on files of the store (SQLite's VFS), so that sweeps cover it; same result. */
int file_fault_check(file_step step, const char *path);

#endif
