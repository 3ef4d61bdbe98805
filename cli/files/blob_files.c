/* Files that become blobs of a checkpoint, and blobs that become files (--blob NAME=FILE). */
#include "cli/files/files.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

ckd_status cli_blobs_add(cli_blobs *blobs, const char *text, ckd_error *err) {
    const char *equals = strchr(text, '=');
    if (!equals || equals == text || !equals[1]) {
        return cli_error(err, CKD_E_INVALID, "--blob is NAME=FILE, not '%s'", text);
    }
    size_t length = (size_t)(equals - text);
    bool taken = length == strlen(METADATA_BLOB) && memcmp(text, METADATA_BLOB, length) == 0;
    for (size_t i = 0; i < blobs->count; i++) {
        const char *name = blobs->items[i].name;
        taken = taken || (strlen(name) == length && memcmp(name, text, length) == 0);
    }
    if (taken) {
        return cli_error(err, CKD_E_INVALID, "--blob: the name '%.*s' is taken", (int)length, text);
    }
    cli_blob *grown = realloc(blobs->items, (blobs->count + 1) * sizeof(*grown));
    char *name = strndup(text, length);
    blobs->items = grown ? grown : blobs->items;
    if (!grown || !name) {
        free(name);
        return cli_error_nomem(err);
    }
    grown[blobs->count++] = (cli_blob){.name = name, .path = equals + 1};
    return CKD_OK;
}

/* Reads the rest of a file, which may be a pipe. *data is malloc'ed, also after a failure. */
static ckd_status read_all(char **data, size_t *size, int fd, const char *path, ckd_error *err) {
    size_t capacity = 0;
    for (*size = 0;;) {
        if (*size == capacity) {
            capacity = capacity ? 2 * capacity : 1 << 16;
            char *grown = realloc(*data, capacity);
            if (!grown) {
                return cli_error_nomem(err);
            }
            *data = grown;
        }
        if (!cli_wait_for(fd, POLLIN)) {
            return cli_error(err, CKD_E_CANCELLED,
                             "interrupted while a blob's file was read; nothing is saved");
        }
        ssize_t n = read(fd, *data + *size, capacity - *size);
        if (n == 0) {
            return CKD_OK;
        }
        if (n < 0 && errno != EINTR && errno != EAGAIN) {
            return cli_error_sys(err, errno, path, "cannot read a blob's file");
        }
        *size += n > 0 ? (size_t)n : 0;
        if (*size > CKD_BLOB_MAX) {
            return cli_error_at(err, CKD_E_INVALID, path, CKD_NO_OFFSET, "a blob has at most %u MiB",
                                (unsigned)(CKD_BLOB_MAX >> 20));
        }
    }
}

static ckd_status save_one(const cli_blob *blob, ckd_save *save, ckd_error *err) {
    char *data = NULL;
    size_t size = 0;
    /* Without O_NONBLOCK, open() would wait for a writer of a pipe, and no signal would end the wait. */
    bool standard = strcmp(blob->path, "-") == 0;
    const char *path = standard ? "standard input" : blob->path;
    int fd =
        standard ? fcntl(STDIN_FILENO, F_DUPFD_CLOEXEC, 3) : open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0) {
        return cli_error_sys(err, errno, path, "cannot open a blob's file");
    }
    ckd_status status = read_all(&data, &size, fd, path, err);
    close(fd);
    THEN(status, ckd_save_blob(save, blob->name, data, size, err));
    free(data);
    return status;
}

ckd_status cli_blobs_save(const cli_blobs *blobs, ckd_save *save, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < blobs->count && status == CKD_OK; i++) {
        status = save_one(&blobs->items[i], save, err);
    }
    return status;
}

ckd_status cli_blobs_load(cli_blobs *blobs, ckd_load *load, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < blobs->count && status == CKD_OK; i++) {
        cli_blob *blob = &blobs->items[i];
        ckd_blob_free(blob->data);
        blob->data = NULL;
        status = ckd_load_blob(&blob->data, &blob->size, load, blob->name, err);
    }
    return status;
}

ckd_status cli_blobs_write(const cli_blobs *blobs, bool force, cli_outputs *set, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (int standard = 0; standard <= 1; standard++) {
        for (size_t i = 0; i < blobs->count && status == CKD_OK; i++) {
            const cli_blob *blob = &blobs->items[i];
            if (cli_output_is_standard(blob->path) == standard) {
                status = cli_output_bytes(blob->path, force, blob->data, blob->size, set, err);
            }
        }
    }
    return status;
}

size_t cli_blobs_standard(const cli_blobs *blobs) {
    size_t count = 0;
    for (size_t i = 0; i < blobs->count; i++) {
        count += strcmp(blobs->items[i].path, "-") == 0;
    }
    return count;
}

void cli_blobs_free(cli_blobs *blobs) {
    for (size_t i = 0; i < blobs->count; i++) {
        free(blobs->items[i].name);
        ckd_blob_free(blobs->items[i].data);
    }
    free(blobs->items);
    *blobs = (cli_blobs){0};
}
