/*
 * The shim's methods. Each asks the fault hook, calls the default VFS, and stores its errno. Deleting also checks the
 * name, because a hostile journal may name any file.
 */
#include "catalog/fault_vfs.h"

#include <errno.h>
#include <sqlite3.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"

struct fault_vfs {
    sqlite3_vfs vfs;
    sqlite3_vfs *real;
    int last_errno;
    char name[40];
    char *database; /* path of the open database; NULL: none yet */
};

/* SQLite allocates this for a file; the real VFS's data follows at REAL_OFFSET. */
typedef struct shim_file {
    sqlite3_file base;
    fault_vfs *owner;
    const char *path; /* owned by SQLite, which keeps it while the file is open; NULL for temporary files */
    sqlite3_file *real;
} shim_file;

enum { REAL_OFFSET = (sizeof(shim_file) + 15) / 16 * 16 };

static shim_file *shim(sqlite3_file *file) {
    return (shim_file *)file;
}
static fault_vfs *owner_of(sqlite3_vfs *vfs) {
    return vfs->pAppData;
}

/* Stores errno right after a step of the real VFS has failed. BUSY is no failure, and SHORT_READ has no errno. */
static int noted(fault_vfs *owner, int rc) {
    if (rc != SQLITE_OK && rc != SQLITE_BUSY && rc != SQLITE_IOERR_SHORT_READ) {
        owner->last_errno = errno;
    }
    return rc;
}

/* Asks the hook. Returns 0 to proceed; otherwise the hook's value, with errno stored. */
static int inject(fault_vfs *owner, file_op step, const char *path) {
    int fault = path ? file_fault_check(step, path) : 0;
    if (fault) {
        owner->last_errno = fault > 0 ? fault : step == FILE_OP_WRITE ? ENOSPC : EIO;
    }
    return fault;
}

/* ---- files ---- */

static int shim_close(sqlite3_file *file) {
    shim_file *f = shim(file);
    int rc = f->real->pMethods ? f->real->pMethods->xClose(f->real) : SQLITE_OK;
    f->base.pMethods = NULL;
    return rc;
}

static int shim_read(sqlite3_file *file, void *to, int size, sqlite3_int64 offset) {
    shim_file *f = shim(file);
    if (inject(f->owner, FILE_OP_READ, f->path)) {
        return SQLITE_IOERR_READ;
    }
    return noted(f->owner, f->real->pMethods->xRead(f->real, to, size, offset));
}

static int shim_write(sqlite3_file *file, const void *data, int size, sqlite3_int64 offset) {
    shim_file *f = shim(file);
    int fault = inject(f->owner, FILE_OP_WRITE, f->path);
    if (fault > 0) {
        return fault == ENOSPC ? SQLITE_FULL : SQLITE_IOERR_WRITE;
    }
    if (fault < 0) { /* simulates a disk that fills up during a write */
        int accepted = -(fault + 1), part = accepted < size ? accepted : size;
        int rc = part ? f->real->pMethods->xWrite(f->real, data, part, offset) : SQLITE_OK;
        return rc != SQLITE_OK ? noted(f->owner, rc) : SQLITE_FULL;
    }
    return noted(f->owner, f->real->pMethods->xWrite(f->real, data, size, offset));
}

static int shim_truncate(sqlite3_file *file, sqlite3_int64 size) {
    shim_file *f = shim(file);
    if (inject(f->owner, FILE_OP_WRITE, f->path)) {
        return SQLITE_IOERR_TRUNCATE;
    }
    return noted(f->owner, f->real->pMethods->xTruncate(f->real, size));
}

static int shim_sync(sqlite3_file *file, int flags) {
    shim_file *f = shim(file);
    if (inject(f->owner, FILE_OP_SYNC, f->path)) {
        return SQLITE_IOERR_FSYNC;
    }
    return noted(f->owner, f->real->pMethods->xSync(f->real, flags));
}

static int shim_file_size(sqlite3_file *file, sqlite3_int64 *size) {
    shim_file *f = shim(file);
    return noted(f->owner, f->real->pMethods->xFileSize(f->real, size));
}

static int shim_lock(sqlite3_file *file, int level) {
    shim_file *f = shim(file);
    int fault = inject(f->owner, FILE_OP_LOCK, f->path);
    if (fault) {
        return fault == EAGAIN || fault == EBUSY ? SQLITE_BUSY : SQLITE_IOERR_LOCK;
    }
    return noted(f->owner, f->real->pMethods->xLock(f->real, level));
}

static int shim_unlock(sqlite3_file *file, int level) {
    shim_file *f = shim(file);
    return noted(f->owner, f->real->pMethods->xUnlock(f->real, level));
}

static int shim_check_reserved(sqlite3_file *file, int *reserved) {
    shim_file *f = shim(file);
    return noted(f->owner, f->real->pMethods->xCheckReservedLock(f->real, reserved));
}

static int shim_control(sqlite3_file *file, int op, void *argument) {
    shim_file *f = shim(file);
    return f->real->pMethods->xFileControl(f->real, op, argument);
}

static int shim_sector_size(sqlite3_file *file) {
    shim_file *f = shim(file);
    return f->real->pMethods->xSectorSize(f->real);
}

static int shim_characteristics(sqlite3_file *file) {
    shim_file *f = shim(file);
    return f->real->pMethods->xDeviceCharacteristics(f->real);
}

/* Version 1: no xShmMap, no xFetch. */
static const sqlite3_io_methods shim_methods = {
    .iVersion = 1,
    .xClose = shim_close,
    .xRead = shim_read,
    .xWrite = shim_write,
    .xTruncate = shim_truncate,
    .xSync = shim_sync,
    .xFileSize = shim_file_size,
    .xLock = shim_lock,
    .xUnlock = shim_unlock,
    .xCheckReservedLock = shim_check_reserved,
    .xFileControl = shim_control,
    .xSectorSize = shim_sector_size,
    .xDeviceCharacteristics = shim_characteristics,
};

/* ---- the VFS ---- */

/*
 * Returns the errno of a failed creation. After the failure SQLite tries to open the file for reading, so its own errno
 * says only that the file does not exist.
 */
static int creation_errno(const char *path) {
    file_writer *f;
    ckd_error why = {0};
    if (file_create(&f, path, 0, &why) != CKD_OK) {
        return why.sys_errno ? why.sys_errno : ENOMEM;
    }
    file_discard(f);
    return ENOENT;
}

static int shim_open(sqlite3_vfs *vfs, const char *path, sqlite3_file *file, int flags, int *out_flags) {
    fault_vfs *owner = owner_of(vfs);
    shim_file *f = shim(file);
    *f = (shim_file){.owner = owner, .path = path};
    f->real = (sqlite3_file *)(void *)((char *)file + REAL_OFFSET);
    memset(f->real, 0, (size_t)owner->real->szOsFile);
    if (inject(owner, flags & SQLITE_OPEN_CREATE ? FILE_OP_CREATE : FILE_OP_OPEN, path)) {
        return SQLITE_CANTOPEN;
    }
    if (flags & SQLITE_OPEN_MAIN_DB && !owner->database && !(owner->database = strdup(path))) {
        return SQLITE_NOMEM;
    }
    int rc = noted(owner, owner->real->xOpen(owner->real, path, f->real, flags, out_flags));
    if (rc != SQLITE_OK && owner->last_errno == ENOENT && path && flags & SQLITE_OPEN_CREATE) {
        owner->last_errno = creation_errno(path);
    }
    f->base.pMethods = f->real->pMethods ? &shim_methods : NULL;
    return rc;
}

/* The real VFS would unlink and sync the folder in one call. These are two steps here, so the fault hook sees both. */
static int sync_parent(fault_vfs *owner, const char *path) {
    const char *slash = strrchr(path, '/');
    size_t length = slash && slash > path ? (size_t)(slash - path) : 1;
    char *folder = slash ? malloc(length + 1) : NULL;
    if (!folder) {
        owner->last_errno = slash ? ENOMEM : EINVAL;
        return slash ? SQLITE_IOERR_NOMEM : SQLITE_IOERR_DIR_FSYNC;
    }
    memcpy(folder, path, length);
    folder[length] = '\0';
    ckd_error err;
    ckd_status status = dir_sync(folder, &err);
    free(folder);
    if (status != CKD_OK) {
        owner->last_errno = err.sys_errno;
        return SQLITE_IOERR_DIR_FSYNC;
    }
    return SQLITE_OK;
}

/*
 * Is it the database, or a file beside it whose name starts with the database's? A journal may name any file as its
 * super-journal, which SQLite would then delete.
 */
static bool is_own(const fault_vfs *owner, const char *path) {
    return owner->database && strncmp(path, owner->database, strlen(owner->database)) == 0 &&
           !strchr(path + strlen(owner->database), '/');
}

static int shim_delete(sqlite3_vfs *vfs, const char *path, int sync) {
    fault_vfs *owner = owner_of(vfs);
    if (!is_own(owner, path)) {
        return SQLITE_IOERR_DELETE;
    }
    if (inject(owner, FILE_OP_REMOVE, path)) {
        return SQLITE_IOERR_DELETE;
    }
    int rc = noted(owner, owner->real->xDelete(owner->real, path, 0));
    return rc == SQLITE_OK && sync ? sync_parent(owner, path) : rc;
}

static int shim_access(sqlite3_vfs *vfs, const char *path, int flags, int *result) {
    fault_vfs *owner = owner_of(vfs);
    if (!is_own(owner, path)) {
        *result = 0; /* to SQLite, a journal with a missing super-journal is stale */
        return SQLITE_OK;
    }
    return noted(owner, owner->real->xAccess(owner->real, path, flags, result));
}

static int shim_full_path(sqlite3_vfs *vfs, const char *path, int size, char *out) {
    fault_vfs *owner = owner_of(vfs);
    return noted(owner, owner->real->xFullPathname(owner->real, path, size, out));
}

static int shim_randomness(sqlite3_vfs *vfs, int size, char *out) {
    sqlite3_vfs *real = owner_of(vfs)->real;
    return real->xRandomness(real, size, out);
}

static int shim_sleep(sqlite3_vfs *vfs, int microseconds) {
    sqlite3_vfs *real = owner_of(vfs)->real;
    return real->xSleep(real, microseconds);
}

static int shim_time(sqlite3_vfs *vfs, double *out) {
    sqlite3_vfs *real = owner_of(vfs)->real;
    return real->xCurrentTime(real, out);
}

static int shim_last_error(sqlite3_vfs *vfs, int size, char *out) {
    (void)size;
    (void)out;
    return owner_of(vfs)->last_errno;
}

static sqlite3_vfs shim_vfs_of(fault_vfs *owner) {
    return (sqlite3_vfs){
        .iVersion = 1,
        .szOsFile = REAL_OFFSET + owner->real->szOsFile,
        .mxPathname = owner->real->mxPathname,
        .zName = owner->name,
        .pAppData = owner,
        .xOpen = shim_open,
        .xDelete = shim_delete,
        .xAccess = shim_access,
        .xFullPathname = shim_full_path,
        .xRandomness = shim_randomness,
        .xSleep = shim_sleep,
        .xCurrentTime = shim_time,
        .xGetLastError = shim_last_error,
    };
}

ckd_status fault_vfs_new(fault_vfs **out, ckd_error *err) {
    *out = NULL;
    sqlite3_vfs *real = sqlite3_initialize() == SQLITE_OK ? sqlite3_vfs_find(NULL) : NULL;
    if (!real) {
        return err_set(err, CKD_E_IO, "SQLite has no way to reach the disk (no default VFS)");
    }
    fault_vfs *vfs = calloc(1, sizeof(*vfs));
    if (!vfs) {
        return err_nomem(err, sizeof(*vfs), "a catalog handle");
    }
    vfs->real = real;
    snprintf(vfs->name, sizeof(vfs->name), "ckptdelta-%p", (void *)vfs);
    vfs->vfs = shim_vfs_of(vfs);
    int rc = sqlite3_vfs_register(&vfs->vfs, 0);
    if (rc != SQLITE_OK) {
        free(vfs);
        return err_set(err, CKD_E_IO, "SQLite does not take a VFS: %s", sqlite3_errstr(rc));
    }
    *out = vfs;
    return CKD_OK;
}

const char *fault_vfs_name(const fault_vfs *vfs) {
    return vfs->name;
}

void fault_vfs_free(fault_vfs *vfs) {
    if (vfs) {
        sqlite3_vfs_unregister(&vfs->vfs);
        free(vfs->database);
        free(vfs);
    }
}

int fault_vfs_errno(const fault_vfs *vfs) {
    return vfs->last_errno;
}
void fault_vfs_forget(fault_vfs *vfs) {
    vfs->last_errno = 0;
}
