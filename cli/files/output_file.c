/*
 * Output files that appear complete or not at all. A set of files gets its final names only when all of them are
 * durable. temporary.c makes the temporary names.
 */
#include "cli/files/files.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#define LOCKS_SHARE 4 /* finished files stay open, and so locked, in this part of all descriptors */

struct cli_output {
    char *path, *directory, *temporary; /* temporary: "" once the file has its name */
    bool force, is_standard;
    bool blocks;   /* a pipe, socket or terminal: a write may wait for a reader, and nothing is durable */
    bool replaces; /* a file with these attributes existed when this one was opened */
    mode_t mode;
    uid_t owner;
    gid_t group;
    int fd;
};

/* ---- opening ---- */

/* Sets the directory with its final slash, "./" if the path has none. */
static ckd_status set_paths(cli_output *o, const char *path, ckd_error *err) {
    const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;
    if (!*name) {
        return cli_error(err, CKD_E_INVALID, "the output '%s' is not a file name", path);
    }
    o->path = strdup(path);
    o->directory = slash ? strndup(path, (size_t)(name - path)) : strdup("./");
    return o->path && o->directory ? CKD_OK : cli_error_nomem(err);
}

/* A user who cannot read the replaced file must not be able to read the new one, not even while it is being written. */
static ckd_status open_temporary(cli_output *o, ckd_error *err) {
    struct stat st;
    if (o->force && lstat(o->path, &st) == 0 && S_ISREG(st.st_mode)) {
        o->replaces = true;
        o->mode = st.st_mode & 0777;
        o->owner = st.st_uid;
        o->group = st.st_gid;
    }
    cli_temporaries_remove(o->path, false, 0);
    return cli_temporary_create(&o->temporary, &o->fd, o->path, "tmp", S_IFREG | (o->replaces ? 0600 : 0666),
                                err);
}

static ckd_status open_standard(cli_output *o, ckd_error *err) {
    struct stat st;
    o->temporary = strdup("standard output");
    if (!o->temporary) {
        return cli_error_nomem(err);
    }
    o->fd = fcntl(STDOUT_FILENO, F_DUPFD_CLOEXEC, 3);
    o->blocks = o->fd >= 0 && fstat(o->fd, &st) == 0 && !S_ISREG(st.st_mode) && !S_ISBLK(st.st_mode);
    return o->fd >= 0 ? CKD_OK : cli_error_sys(err, errno, o->temporary, "cannot open");
}

ckd_status cli_output_open(cli_output **out, const char *path, bool force, uint64_t size, ckd_error *err) {
    *out = NULL;
    cli_output *o = calloc(1, sizeof(*o));
    if (!o) {
        return cli_error_nomem(err);
    }
    o->fd = -1;
    o->force = force;
    o->is_standard = cli_output_is_standard(path);
    ckd_status status = set_paths(o, path, err);
    THEN(status, o->is_standard ? open_standard(o, err) : open_temporary(o, err));
    if (status == CKD_OK && size > 0 && !o->is_standard && fallocate(o->fd, 0, 0, (off_t)size) != 0 &&
        (errno == ENOSPC || errno == EDQUOT)) {
        status = cli_error_sys(err, errno, path, "there is no space for the output of %llu bytes",
                               (unsigned long long)size);
    }
    if (status != CKD_OK) {
        cli_output_drop(o);
        return status;
    }
    *out = o;
    return CKD_OK;
}

/* ---- writing ---- */

ckd_status cli_output_interrupted(const cli_output *o, ckd_error *err) {
    return cli_error(err, CKD_E_CANCELLED,
                     o->is_standard ? "interrupted; what went to standard output is incomplete"
                                    : "interrupted; nothing was written");
}

bool cli_wait_for(int fd, short events) {
    struct pollfd one = {.fd = fd, .events = events};
    for (;;) {
        if (cli_interrupted()) {
            return false;
        }
        /* A signal that arrives just before poll() does not interrupt it. */
        int ready = poll(&one, 1, 250);
        if (ready > 0 || (ready < 0 && errno != EINTR)) {
            return true; /* an error is found by the read or write */
        }
    }
}

/* Returns how many bytes a pipe, socket or terminal that is ready surely takes without blocking. */
static size_t free_room(int fd) {
    int size = fcntl(fd, F_GETPIPE_SZ), used;
    return size > PIPE_BUF && ioctl(fd, FIONREAD, &used) == 0 && used == 0 ? (size_t)size : PIPE_BUF;
}

ckd_status cli_output_write(cli_output *o, const void *data, size_t size, ckd_error *err) {
    const char *at = data;
    while (size > 0) {
        size_t slice = size;
        if (o->blocks) {
            /*
             * The reader may never read. So this waits where a signal can end the wait, and then writes only as much as
             * cannot block.
             */
            if (!cli_wait_for(o->fd, POLLOUT)) {
                return cli_output_interrupted(o, err);
            }
            size_t room = free_room(o->fd);
            slice = slice < room ? slice : room;
        }
        ssize_t written = write(o->fd, at, slice);
        if (written < 0 && errno != EINTR && errno != EAGAIN) {
            return cli_error_sys(err, errno, o->temporary, "cannot write the output");
        }
        if (written > 0) {
            at += written;
            size -= (size_t)written;
        }
    }
    return CKD_OK;
}

/* ---- finishing: complete and durable, under the temporary name ---- */

/* If the group cannot be kept, the new group gets no more rights than everybody has. */
static void keep_attributes(const cli_output *o) {
    mode_t mode = o->mode;
    if (fchown(o->fd, o->owner, o->group) != 0 && fchown(o->fd, (uid_t)-1, o->group) != 0) {
        mode = (mode & 0707) | ((mode & 0007) << 3);
    }
    (void)fchmod(o->fd, mode);
}

/* Closes the file unless its lock is wanted and there are enough descriptors. */
static ckd_status close_finished(cli_output *o, ckd_error *err) {
    struct rlimit limit;
    bool few = getrlimit(RLIMIT_NOFILE, &limit) == 0 && (rlim_t)o->fd >= limit.rlim_cur / LOCKS_SHARE;
    if (!o->is_standard && !few) {
        return CKD_OK;
    }
    int fd = o->fd;
    o->fd = -1;
    return close(fd) == 0 ? CKD_OK : cli_error_sys(err, errno, o->temporary, "cannot write the output");
}

static ckd_status finish(cli_output *o, ckd_error *err) {
    if (o->replaces) {
        keep_attributes(o);
    }
    if (!o->blocks && fsync(o->fd) != 0 && !(o->is_standard && errno == EINVAL)) {
        return cli_error_sys(err, errno, o->temporary, "cannot make the output durable");
    }
    return close_finished(o, err);
}

void cli_output_drop(cli_output *o) {
    if (!o) {
        return;
    }
    if (o->temporary && o->temporary[0] && !o->is_standard) {
        unlink(o->temporary);
    }
    if (o->fd >= 0) {
        close(o->fd);
    }
    free(o->path);
    free(o->directory);
    free(o->temporary);
    free(o);
}

/* ---- publishing: the final names ---- */

ckd_status cli_outputs_add(cli_outputs *set, cli_output *output, ckd_error *err) {
    ckd_status status = finish(output, err);
    cli_output **grown =
        status == CKD_OK ? realloc(set->items, (set->count + 1) * sizeof(cli_output *)) : NULL;
    if (!grown) {
        cli_output_drop(output);
        return status == CKD_OK ? cli_error_nomem(err) : status;
    }
    set->items = grown;
    set->items[set->count++] = output;
    return CKD_OK;
}

void cli_outputs_drop(cli_outputs *set) {
    for (size_t i = 0; i < set->count; i++) {
        cli_output_drop(set->items[i]);
    }
    free(set->items);
    *set = (cli_outputs){0};
}

/*
 * Renames without overwriting: in one step if the file system can, else by linking the new name and unlinking the old
 * one.
 */
static int give_name(const cli_output *o) {
    if (o->force) {
        return rename(o->temporary, o->path);
    }
    if (renameat2(AT_FDCWD, o->temporary, AT_FDCWD, o->path, RENAME_NOREPLACE) == 0) {
        return 0;
    }
    if (errno != EINVAL && errno != ENOSYS) {
        return -1;
    }
    return link(o->temporary, o->path) == 0 ? unlink(o->temporary) : -1;
}

/* Is there a file among the first `count` that has replaced another one? */
static bool any_replaced(const cli_outputs *set, size_t count) {
    bool any = false;
    for (size_t i = 0; i < count; i++) {
        any = any || set->items[i]->replaces;
    }
    return any;
}

/* *named: how many of the files have their names, also after a failure. */
static ckd_status give_names(size_t *named, const cli_outputs *set, ckd_error *err) {
    for (*named = 0; *named < set->count; ++*named) {
        cli_output *o = set->items[*named];
        if (o->is_standard) {
            continue;
        }
        if (give_name(o) != 0) {
            return cli_error_sys(err, errno, o->path, "cannot give the output its name%s",
                                 any_replaced(set, *named) ? "; files before it have been replaced" : "");
        }
        o->temporary[0] = '\0';
    }
    return CKD_OK;
}

/* Syncs each folder once. */
static ckd_status sync_folders(const cli_outputs *set, ckd_error *err) {
    for (size_t i = 0; i < set->count; i++) {
        const cli_output *o = set->items[i];
        bool synced = o->is_standard;
        for (size_t k = i; k > 0 && !synced; k--) {
            const cli_output *before = set->items[k - 1];
            synced = !before->is_standard && strcmp(before->directory, o->directory) == 0;
        }
        if (synced || cli_output_sync_folder(o->directory, err) == CKD_OK) {
            continue;
        }
        return any_replaced(set, set->count)
                   ? cli_error_sys(
                         err, err->sys_errno, o->directory,
                         "the new output is in place, but after a power cut the old one may be back: "
                         "cannot make the output's name durable")
                   : err->status;
    }
    return CKD_OK;
}

ckd_status cli_outputs_publish(cli_outputs *set, ckd_error *err) {
    ckd_status status = CKD_OK;
    size_t named = 0;
    /* rename() would replace a device, too. */
    for (size_t i = 0; i < set->count && status == CKD_OK; i++) {
        cli_output *o = set->items[i];
        if (o->force && !o->is_standard) {
            status = cli_output_check(o->path, true, err);
            o->replaces = o->replaces || access(o->path, F_OK) == 0;
        }
    }
    THEN(status, give_names(&named, set, err));
    THEN(status, sync_folders(set, err));
    for (size_t i = 0; i < named && status != CKD_OK; i++) {
        if (!set->items[i]->is_standard && !set->items[i]->replaces) {
            unlink(set->items[i]->path);
        }
    }
    cli_outputs_drop(set);
    return status;
}

/* ---- one file ---- */

ckd_status cli_output_commit(cli_output *o, ckd_error *err) {
    cli_outputs one = {0};
    ckd_status status = cli_outputs_add(&one, o, err);
    return status == CKD_OK ? cli_outputs_publish(&one, err) : status;
}

ckd_status cli_output_bytes(const char *path, bool force, const void *data, size_t size, cli_outputs *set,
                            ckd_error *err) {
    cli_output *output;
    ckd_status status = cli_output_open(&output, path, force, size, err);
    if (status != CKD_OK) {
        return status;
    }
    status = cli_output_write(output, data, size, err);
    if (status == CKD_OK) {
        return set ? cli_outputs_add(set, output, err) : cli_output_commit(output, err);
    }
    cli_output_drop(output);
    return status;
}
