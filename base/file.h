/*
 * Files: the only place that opens, writes, syncs, links, renames, locks and removes files. Each step asks the fault
 * hook first, so tests can fail or kill the process at every step.
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
 * Opens a regular file. Reads use pread, so several threads may share one reader. Symbolic links are not followed, and
 * opening a pipe does not block. Errors: NOT_FOUND; CORRUPT (not a regular file); IO with the errno (also if permission
 * is denied); NOMEM.
 */
ckd_status file_open_read(file_reader **out, const char *path, ckd_error *err);
/* Opens a regular file to get its size, so a network file system asks its server. Errors: as file_open_read. */
ckd_status file_open_size(uint64_t *out, const char *path, ckd_error *err);
uint64_t file_size(const file_reader *f); /* at the time of opening */
const char *file_path(const file_reader *f);
/* Reads exactly `size` bytes at `offset`. CORRUPT, with path and offset, if the file is too short. */
ckd_status file_read_at(file_reader *f, uint64_t offset, void *to, size_t size, ckd_error *err);
void file_close_read(file_reader *f); /* accepts NULL */
/*
 * Announces what will be read soon, about in this order. A place that is slow to answer (file_mount) fetches it in
 * advance; a file of this machine needs no such help. Ranges are in the order of the file. Announcements replace earlier
 * ones for the same file.
 */
typedef struct file_range {
    uint64_t offset, size;
} file_range;
void file_will_read(const file_reader *f, const file_range *ranges, size_t count);
/*
 * Does the errno of a failed open or read concern only this file? True for EIO and similar errors, a stale handle, and
 * missing permission. False for problems of the process, such as EMFILE and ENOMEM.
 */
bool file_is_unreadable(int errnum);
/*
 * Buffers small reads of a file that is read from beginning to end. The buffer has `size` bytes; a read that it cannot
 * serve fills it from the first missing byte. Reads see the file as it was when the buffer was filled. From now on only
 * one thread may use the reader. Errors: NOMEM.
 */
ckd_status file_read_ahead(file_reader *f, size_t size, ckd_error *err);
/*
 * Reads the whole file into memory if it has at most `cap` bytes. Later reads use this copy, so they see the file as
 * it is now. Call it before several threads use the reader. Errors: those of file_read_at, NOMEM.
 */
ckd_status file_cache(file_reader *f, size_t cap, ckd_error *err);
/*
 * Lets the descriptor be closed while nobody reads. A later read opens it again, so a process may have more readers
 * than open files. The file is recognised by its size and by `identity`, its `size` bytes at `offset`. A read of a file
 * that was removed or replaced meanwhile fails with CORRUPT. The call has no effect on a cached file, which needs no
 * descriptor. Call it before several threads use the reader.
 */
enum { FILE_IDENTITY_MAX = 80 };
void file_let_close(file_reader *f, uint64_t offset, const void *identity, size_t size);
/*
 * Returns `size` bytes at `offset` of a cached file; valid as long as the reader. NULL if the file is not cached or too
 * short.
 */
const void *file_cached(const file_reader *f, uint64_t offset, size_t size);
/* Reads a whole small file into `out`, which is cleared first and left empty on failure. CORRUPT if larger than cap. */
ckd_status file_read_all(bytes *out, const char *path, size_t cap, ckd_error *err);

/*
 * ---- writing new files ----
 *
 * After the first failed write or sync, every call except file_discard fails with the same status. Only one thread may
 * use a writer at a time.
 */
typedef struct file_writer file_writer;
/*
 * Creates path, which must not exist (EXISTS). The mode is 0666 less the umask. Appends go through a buffer of `buffer`
 * bytes (0: none); larger appends go straight to the file.
 */
ckd_status file_create(file_writer **out, const char *path, size_t buffer, ckd_error *err);
/*
 * As file_create, but the buffer lives in `memory`. It grows as needed and can be reused once this file is closed.
 * memory NULL: the writer allocates its own.
 */
ckd_status file_create_in(file_writer **out, const char *path, size_t buffer, bytes *memory, ckd_error *err);
/*
 * Continues a file left by another writer: keeps its first `keep` bytes and truncates the rest. Counts as
 * FILE_OP_CREATE. Errors: NOT_FOUND, IO (the file is shorter), NOMEM.
 */
ckd_status file_continue(file_writer **out, const char *path, uint64_t keep, size_t buffer, ckd_error *err);
ckd_status file_append(file_writer *f, const void *data, size_t size, ckd_error *err);
uint64_t file_written(const file_writer *f); /* bytes appended so far, including buffered ones */
/*
 * Flushes the buffer and makes data and size durable (fdatasync). The name becomes durable with dir_sync. Never
 * retried.
 */
ckd_status file_sync(file_writer *f, ckd_error *err);
/* Flushes the buffer without syncing. */
ckd_status file_flush(file_writer *f, ckd_error *err);
/* Overwrites bytes already appended, for headers that are known last. Flushes first. INVALID beyond the end. */
ckd_status file_write_at(file_writer *f, uint64_t offset, const void *data, size_t size, ckd_error *err);
/* Flushes and closes. Always frees f. On failure the file remains, and the caller removes it. */
ckd_status file_close(file_writer *f, ckd_error *err);
/*
 * Closes and removes the file. The file is not removed if its path now names another file, or if this process is a
 * forked child of the one that created it. Accepts NULL.
 */
void file_discard(file_writer *f);

/*
 * ---- scratch files: they have no name, so a crash leaves nothing behind ----
 *
 * Several threads may read and write at any offset at once, but only bytes already written may be read. Errors: IO,
 * NOSPACE, NOMEM.
 */
typedef struct file_scratch file_scratch;
ckd_status file_scratch_open(file_scratch **out, const char *directory, ckd_error *err);
ckd_status file_scratch_write(file_scratch *f, uint64_t offset, const void *data, size_t size,
                              ckd_error *err);
ckd_status file_scratch_read(file_scratch *f, uint64_t offset, void *to, size_t size, ckd_error *err);
void file_scratch_close(file_scratch *f); /* accepts NULL */

/* ---- names ---- */
/*
 * Renames `from` to `to` without replacing anything: EXISTS if `to` exists. If several callers race, exactly one wins.
 * Both names must be on one file system. Uses renameat2, or link and unlink where the file system lacks it. If
 * unlink fails, the old name remains; this is not a failure.
 */
ckd_status file_rename_noreplace(const char *from, const char *to, ckd_error *err);
/*
 * Gives a file a second name. Counts as a publishing step. Errors: EXISTS; IO and others where the file system has no
 * hard links.
 */
ckd_status file_link(const char *from, const char *to, ckd_error *err);
/* Renames `from` to `to` and replaces `to` atomically. */
ckd_status file_rename(const char *from, const char *to, ckd_error *err);
ckd_status file_remove(const char *path, bool missing_ok, ckd_error *err);
/*
 * Copies a regular file, without syncing. The copy shares the blocks of the original where the file system can. `to`
 * must not exist, and does not exist after a failure. Symbolic links are not followed. Errors: EXISTS, NOT_FOUND,
 * NOSPACE, IO, NOMEM.
 */
ckd_status file_clone(const char *from, const char *to, ckd_error *err);
ckd_status dir_create(const char *path, bool exists_ok, ckd_error *err);
/* Removes an empty directory; IO (ENOTEMPTY) if it is not empty. */
ckd_status dir_remove(const char *path, ckd_error *err);
ckd_status dir_sync(const char *path, ckd_error *err);
/*
 * Does create + append + sync + close + publish + dir_sync, through the temporary name `temp` in the same directory.
 * EXISTS if either name exists. For manifests and other small files. If only dir_sync fails, the file has its name but
 * may lose it in a power failure. After any other failure neither name remains.
 */
ckd_status file_create_durable(const char *path, const char *temp, const void *data, size_t size,
                               ckd_error *err);
/*
 * As file_create_durable, but a failure leaves no file: the new name is removed durably if it may exist. If the removal
 * fails as well, *undecided becomes true, and the message says that the outcome is unknown. undecided may be NULL. Only
 * for names that nobody else creates meanwhile, such as names that are created under the publish lock.
 */
ckd_status file_publish_durable(bool *undecided, const char *path, const char *temp, const void *data,
                                size_t size, ckd_error *err);
/*
 * As file_create_durable, but replaces the file at `path`. After any failure, path is either the old file or the new
 * one.
 */
ckd_status file_replace_durable(const char *path, const char *temp, const void *data, size_t size,
                                ckd_error *err);
/*
 * Does the name exist? Also true for a dangling symbolic link, and if a failing disk cannot tell: a file that may exist
 * must not be taken for lost.
 */
bool file_exists(const char *path);
/* Is this a directory? A symbolic link to one does not count. */
bool dir_exists(const char *path);
/* Is a non-directory in the way, at this path or in place of one of its parent directories? Links are followed. */
bool file_bars_directory(const char *path);
/* Returns the inode number behind a name, 0 if there is none. Callers compare it to see whether a file was replaced. */
uint64_t file_inode(const char *path);
/* Do both names lead to the same file? Links are followed. False if one of them leads nowhere. */
bool file_same(const char *a, const char *b);
/*
 * Makes a mark from the inode and times of a file or directory; an equal mark means that nothing changed. The
 * mark is "" if the file does not exist, or if its times look like whole seconds and it changed so recently that the
 * next change may get the same times.
 */
enum { FILE_FINGERPRINT = 96 };
void file_fingerprint(char out[FILE_FINGERPRINT], const char *path);
/* Returns the time of the last write in nanoseconds since 1970; 0 if the file does not exist. */
uint64_t file_modified_ns(const char *path);
/* Returns the file's size without opening it (closing it would drop SQLite's locks); 0 if it does not exist. */
uint64_t file_bytes(const char *path);

/*
 * The names in a directory except . and .., sorted by bytes, without duplicates. Release with dir_list_free. NOT_FOUND
 * if the directory does not exist.
 */
typedef struct dir_list {
    char **names;
    size_t count;
} dir_list;
ckd_status dir_list_read(dir_list *out, const char *path, ckd_error *err);
/* As dir_list_read, but of the files that are elsewhere (file_mount) none. Unfinished files are always local. */
ckd_status dir_list_local(dir_list *out, const char *path, ckd_error *err);
/*
 * As dir_list_read, but of the files that are elsewhere only those that are older than so many seconds: younger ones may
 * belong to a process of another machine that still works on them.
 */
ckd_status dir_list_settled(dir_list *out, const char *path, uint64_t older_than_s, ckd_error *err);
void dir_list_free(dir_list *list);
/* Returns the bytes that ordinary users may still write on a path's file system; UINT64_MAX if unknown. */
uint64_t dir_free_space(const char *path);
/*
 * Adds up the apparent sizes of all regular files below path. Symbolic links are not followed. Files that vanish
 * meanwhile do not count. At most 64 directories deep (IO).
 */
ckd_status dir_bytes(uint64_t *out, const char *path, ckd_error *err);
/* As dir_bytes, but skips `folders`, whose paths are relative to `path`. INVALID for more than DIR_EXCLUDED_MAX. */
enum { DIR_EXCLUDED_MAX = 8 };
ckd_status dir_bytes_without(uint64_t *out, const char *path, const char *const *folders, size_t count,
                             ckd_error *err);

/*
 * ---- locks: open file description locks, which end with the process and work between threads ----
 *
 * If a process forks while it holds a lock, lock_release in the parent ends the lock, and in the child it only closes
 * the descriptor. If the parent dies without releasing, the lock lasts until the child exits, execs, or calls
 * lock_release.
 */
typedef enum lock_kind { LOCK_SHARED, LOCK_EXCLUSIVE } lock_kind;
typedef struct file_lock file_lock;
/*
 * Opens path (creates it if `create`, else NOT_FOUND) and locks it, waiting up to timeout_ms (0: tries once). BUSY on
 * timeout; the message names the path. A shared lock on an existing file needs only read permission. On return the
 * locked file is the one that path names: to remove a lock file, a process must hold it exclusively. Waiting polls with
 * growing pauses of up to 50 ms and gives no ordering among waiters.
 */
ckd_status lock_acquire(file_lock **out, const char *path, lock_kind kind, bool create, uint32_t timeout_ms,
                        ckd_error *err);
/* Releases the lock; the file stays. Accepts NULL. */
void lock_release(file_lock *lock);
/*
 * Finds a process that holds a lock on the file, using /proc. Sees only processes of this machine that we may inspect.
 * Prefers a stopped process (SIGSTOP, a debugger). Returns false if none is found. It scans all processes, so do not
 * call it on every attempt.
 */
enum { LOCK_COMMAND = 32 };
typedef struct lock_holder {
    int64_t process;
    uint32_t others;
    bool stopped;
    char command[LOCK_COMMAND]; /* printable ASCII */
} lock_holder;
bool lock_find_holder(lock_holder *out, const char *path);

/*
 * ---- waiting for changes of directories ----
 *
 * The system reports only changes made by this machine, not those made by others on a shared file system. So callers
 * also look again after each timeout.
 */
typedef struct file_watch file_watch;
ckd_status file_watch_open(file_watch **out, ckd_error *err); /* Errors: NOMEM */
/* Watches one more directory. Where the system has no such watches, changes do not end a wait. */
void file_watch_add(const file_watch *w, const char *directory);
/* Waits until a name has come or gone, for file_watch_wake, for a signal, or for `ns`. */
void file_watch_wait(file_watch *w, uint64_t ns);
void file_watch_wake(const file_watch *w); /* thread-safe, also in a signal handler */
void file_watch_close(file_watch *w);      /* accepts NULL */

/*
 * ---- directories whose files are elsewhere ----
 *
 * A mount lets a place, such as a bucket, serve the paths below a local directory. Callers of this header notice
 * nothing, but that calls take longer and may fail as the place does. The functions of the mount reach the directory
 * itself by a path that does not begin with `root`, for example with `/./` in it.
 */
typedef enum mount_kind {
    MOUNT_LOCAL,  /* only this machine has the file */
    MOUNT_COPIED, /* the place has the file; the directory has a copy, which is read like any file */
    MOUNT_REMOTE  /* the place has the file, and each read asks it */
} mount_kind;
typedef struct file_mount {
    const char *root; /* without a slash at the end */
    void *context;
    /* The kind of a file, or of the files of a directory. Names are relative to root. */
    mount_kind (*kind)(const char *name);
    /* Brings the copies up to date, before a directory of copies is listed. It may decide that they are. */
    ckd_status (*refresh)(void *context, ckd_error *err);
    /*
     * Gives the place the local file `from` under a name, and the directory a copy if it has copies. Removes `from`,
     * but not after a failure. Errors: EXISTS, unless `replaces`.
     */
    ckd_status (*put)(void *context, const char *name, const char *from, bool replaces, ckd_error *err);
    /* Removes a file, and its copy. A file that is gone counts as removed. */
    ckd_status (*remove)(void *context, const char *name, ckd_error *err);
    /* Makes sure that the copy is what the place has, before it is moved away as damaged. Errors: BUSY (it was not). */
    ckd_status (*compare)(void *context, const char *name, ckd_error *err);
    /* For remote files. ask: the place is asked, although the size was known a moment ago. Errors: NOT_FOUND. */
    ckd_status (*size)(void *context, const char *name, uint64_t *size, bool ask, ckd_error *err);
    ckd_status (*read)(void *context, const char *name, uint64_t offset, void *to, size_t size,
                       ckd_error *err);
    /* Begins to fetch what will be read (file_will_read). */
    void (*will_read)(void *context, const char *name, const file_range *ranges, size_t count);
    /* Appends the names in a directory of remote files that are older; adds up the sizes of all. */
    ckd_status (*list)(void *context, const char *directory, uint64_t older_than_s, dir_list *out,
                       ckd_error *err);
    ckd_status (*bytes)(void *context, const char *directory, uint64_t *total, ckd_error *err);
    /* Called with a local lock held exclusively. Errors: BUSY. */
    ckd_status (*lock)(void *context, const char *name, uint32_t timeout_ms, ckd_error *err);
    void (*unlock)(void *context, const char *name);
} file_mount;
/*
 * Adds a mount; the caller keeps it until it is removed. All paths below its root are served by it from then on. Errors:
 * EXISTS (the root is mounted), NOMEM. Thread-safe.
 */
ckd_status file_mount_add(const file_mount *mount, ckd_error *err);
/* Is the path that of a file, or of a directory of files, that only a place elsewhere has? */
bool file_is_remote(const char *path);
/* No file below the root may be in use. */
void file_mount_remove(const file_mount *mount);
/* Appends a copy of the name to a list. For file_mount.list. Errors: NOMEM. */
ckd_status dir_list_add(dir_list *list, const char *name, ckd_error *err);

/* ---- time and randomness ---- */
uint64_t clock_wall_ns(void);
uint64_t clock_monotonic_ns(void);
void clock_sleep_ns(uint64_t ns); /* returns early on a signal */
/* Calls `attempt`, with pauses that grow to 20 ms, until it returns anything but BUSY or the timeout expires. */
typedef ckd_status (*attempt_fn)(void *context, ckd_error *err);
ckd_status retry_while_busy(attempt_fn attempt, void *context, uint64_t timeout_ms, ckd_error *err);
ckd_status random_bytes(void *out, size_t size, ckd_error *err);
/* Writes the id that Linux draws at each boot; "?" if it is unknown. */
enum { BOOT_ID = 37 };
void boot_id(char out[BOOT_ID]);

/* ---- fault injection, for tests only ---- */
typedef enum file_op {
    FILE_OP_CREATE,
    FILE_OP_WRITE,
    FILE_OP_SYNC,
    FILE_OP_CLOSE,
    FILE_OP_RENAME_NOREPLACE,
    FILE_OP_RENAME,
    FILE_OP_REMOVE,
    FILE_OP_MKDIR,
    FILE_OP_DIR_SYNC,
    FILE_OP_OPEN,
    FILE_OP_READ,
    FILE_OP_LOCK
} file_op;
/*
 * Called before each step. 0 lets the step proceed; an errno makes it fail. On FILE_OP_WRITE, -n writes only the first
 * n - 1 bytes and then fails with ENOSPC; on other steps a negative value means EIO. One step is one buffer flush, one
 * read, or one whole lock_acquire; a retry after EINTR is not a step. FILE_OP_OPEN includes listing a directory.
 * Removing a missing file is a step, too. Do not change the hook while files are in use: it is not thread-safe.
 */
typedef int (*file_fault_fn)(void *context, file_op step, const char *path);
void file_set_fault_hook(file_fault_fn hook, void *context);
/* Reports a step that other code (SQLite's VFS) does on store files, for fault sweeps. Returns the hook's result. */
int file_fault_check(file_op step, const char *path);

#endif
