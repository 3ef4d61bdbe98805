/* Objects as files of a directory, one below the other as the slashes of their keys say. */
#include "objects/directory.h"

#include <stdio.h>
#include <stdlib.h>

enum { SLICE = 4 << 20 }; /* copied at a time; between two, the call's limits are checked */

char *directory_path(const directory *d, const char *key, ckd_error *err) {
    size_t size = strlen(d->root) + strlen(key) + 2;
    char *path = malloc(size);
    if (!path) {
        err_nomem(err, size, "the path of an object");
        return NULL;
    }
    snprintf(path, size, "%s/%s", d->root, key);
    return path;
}

/* A link to a folder is one, too. */
bool directory_is_folder(const char *path) {
    char inside[4096];
    return snprintf(inside, sizeof(inside), "%s/.", path) < (int)sizeof(inside) && dir_exists(inside);
}

/* Runs `step` on each folder between the root and the object, from above. */
static ckd_status each_folder(const directory *d, char *path, ckd_status (*step)(const char *, ckd_error *),
                              ckd_error *err) {
    ckd_status status = CKD_OK;
    for (char *slash = strchr(path + strlen(d->root) + 1, '/'); slash && status == CKD_OK;
         slash = strchr(slash + 1, '/')) {
        *slash = 0;
        status = step(path, err);
        *slash = '/';
    }
    return status;
}

static ckd_status make_folder(const char *path, ckd_error *err) {
    ckd_status status = dir_create(path, true, err);
    return status != CKD_OK && file_exists(path) && file_bars_directory(path)
               ? err_set(err, CKD_E_INVALID,
                         "%s is an object, and the key of another one needs a folder of this name", path)
               : status;
}

/* The name is durable when each folder above it is. Another process may have made one and not synced it yet. */
static ckd_status sync_folders(const directory *d, char *path, ckd_error *err) {
    ckd_status status = dir_sync(d->root, err);
    THEN(status, each_folder(d, path, dir_sync, err));
    return status;
}

static ckd_status copy_source(directory *d, file_writer *to, const object_source *from,
                              const object_call *call, ckd_error *err) {
    bytes scratch = {0};
    ckd_status status = object_call_check(call, "a put", err);
    for (uint64_t at = 0; at < from->size && status == CKD_OK;) {
        size_t size = from->size - at < SLICE ? (size_t)(from->size - at) : (size_t)SLICE;
        ckd_error why = {0};
        status = object_rate_wait(&d->rate, size, call, "a put", err);
        if (status != CKD_OK) {
            break;
        }
        const void *data = object_source_bytes(from, at, size, &scratch, &why);
        status = data ? file_append(to, data, size, err) : err_from(err, why.status, &why);
        at += size;
        THEN(status, object_call_check(call, "a put", err));
    }
    bytes_free(&scratch);
    return status;
}

typedef struct put_names {
    const char *temp, *path;
} put_names;

/* Writes the temporary file, and gives it its name. */
static ckd_status write_and_name(directory *d, const put_names *names, bool only_new,
                                 const object_source *from, const object_call *call, ckd_error *err) {
    const char *temp = names->temp, *path = names->path;
    file_writer *writer = NULL;
    ckd_status status = file_create(&writer, temp, 0, err);
    if (status != CKD_OK) {
        return status;
    }
    status = copy_source(d, writer, from, call, err);
    THEN(status, file_sync(writer, err));
    if (status != CKD_OK) {
        file_discard(writer);
        return status;
    }
    status = file_close(writer, err);
    THEN(status, only_new ? file_rename_noreplace(temp, path, err) : file_rename(temp, path, err));
    if (status != CKD_OK) {
        ckd_error ignored;
        (void)file_remove(temp, true, &ignored);
    }
    return status;
}

/* A key that others go on from has a folder of its name. */
static ckd_status refuse_folder(const char *path, ckd_status status, ckd_error *err) {
    return status != CKD_OK && directory_is_folder(path)
               ? err_set(err, CKD_E_INVALID,
                         "%s is a folder of other objects, and cannot be an object itself", path)
               : status;
}

/* After a failure of the last step the object is there, but a power failure may take it away. */
static ckd_status sync_name(const directory *d, char *path, ckd_error *err) {
    ckd_error why = {0};
    ckd_status status = sync_folders(d, path, &why);
    return status == CKD_OK
               ? status
               : err_set(err, status, "%.400s; the object may have been written anyway", why.message);
}

static ckd_status put(directory *d, const char *key, const object_source *from, bool only_new,
                      const object_call *call, ckd_error *err) {
    uint64_t id[2];
    char *path = directory_path(d, key, err), temp[64];
    if (!path) {
        return CKD_E_NOMEM;
    }
    ckd_status status = random_bytes(id, sizeof(id), err);
    if (status == CKD_OK) {
        snprintf(temp, sizeof(temp), DIRECTORY_TEMP "%016llx%016llx", (unsigned long long)id[0],
                 (unsigned long long)id[1]);
        char *unfinished = directory_path(d, temp, err);
        status = unfinished ? each_folder(d, path, make_folder, err) : CKD_E_NOMEM;
        THEN(status,
             refuse_folder(path, write_and_name(d, &(put_names){unfinished, path}, only_new, from, call, err),
                           err));
        THEN(status, sync_name(d, path, err));
        free(unfinished);
    }
    free(path);
    return status;
}

/* Folders stay: a put may be about to name a file in one. */
static ckd_status remove_object(const directory *d, const char *key, ckd_error *err) {
    char *path = directory_path(d, key, err);
    if (!path) {
        return CKD_E_NOMEM;
    }
    ckd_status status = CKD_OK;
    if (file_exists(path) && !directory_is_folder(path)) {
        status = file_remove(path, true, err);
        char *slash = strrchr(path, '/');
        *slash = 0;
        THEN(status, dir_sync(path, err));
    }
    free(path);
    return status;
}

static ckd_status directory_put(void *place, const char *key, const object_source *from,
                                const object_call *call, ckd_error *err) {
    return put(place, key, from, false, call, err);
}

static ckd_status directory_put_new(void *place, const char *key, const object_source *from,
                                    const object_call *call, ckd_error *err) {
    return put(place, key, from, true, call, err);
}

/* File systems differ in what they know about renaming, and some cannot be written. */
static ckd_status directory_probe(void *place, bool *honoured, const object_call *call, ckd_error *err) {
    uint64_t id = 0;
    char key[64];
    object_source from = {.data = &id, .size = sizeof(id)};
    ckd_error second = {0};
    ckd_status status = random_bytes(&id, sizeof(id), err);
    snprintf(key, sizeof(key), "probe-%016llx", (unsigned long long)id);
    THEN(status, put(place, key, &from, true, call, err));
    if (status == CKD_OK) {
        ckd_status again = put(place, key, &from, true, call, &second);
        status = remove_object(place, key, err);
        *honoured = again == CKD_E_EXISTS;
        THEN(status, again == CKD_OK || again == CKD_E_EXISTS ? CKD_OK : err_from(err, again, &second));
    }
    return status;
}

/* An entry that is no regular file counts as absent. */
static ckd_status open_object(file_reader **out, const directory *d, const char *key, ckd_error *err) {
    char *path = directory_path(d, key, err);
    ckd_status status = path ? file_open_read(out, path, err) : CKD_E_NOMEM;
    if (path && status != CKD_OK && status != CKD_E_NOMEM &&
        (!file_exists(path) || directory_is_folder(path))) {
        status = err_set(err, CKD_E_NOT_FOUND, "%s does not exist", path);
    }
    free(path);
    return status;
}

static ckd_status directory_get(void *place, const char *key, const object_range *range,
                                const object_call *call, ckd_error *err) {
    directory *d = place;
    file_reader *file = NULL;
    ckd_status status = object_call_check(call, "a get", err);
    THEN(status, open_object(&file, place, key, err));
    if (status == CKD_OK && range->offset > file_size(file)) {
        status = err_corrupt(err, file_path(file), range->offset,
                             "%s is shorter than the range that was asked for", file_path(file));
    }
    for (size_t at = 0; at < range->size && status == CKD_OK;) {
        size_t size = range->size - at < SLICE ? range->size - at : (size_t)SLICE;
        status = object_rate_wait(&d->rate, size, call, "a get", err);
        THEN(status, file_read_at(file, range->offset + at, (uint8_t *)range->to + at, size, err));
        at += size;
        THEN(status, object_call_check(call, "a get", err));
    }
    if (file) {
        file_close_read(file);
    }
    return status;
}

static ckd_status directory_size(void *place, const char *key, uint64_t *size, const object_call *call,
                                 ckd_error *err) {
    file_reader *file = NULL;
    ckd_status status = object_call_check(call, "a query for a size", err);
    THEN(status, open_object(&file, place, key, err));
    if (status == CKD_OK) {
        *size = file_size(file);
        file_close_read(file);
    }
    return status;
}

static ckd_status directory_delete(void *place, const char *const *keys, size_t count,
                                   const object_call *call, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < count && status == CKD_OK; i++) {
        status = object_call_check(call, "a deletion", err);
        THEN(status, remove_object(place, keys[i], err));
    }
    return status;
}

static void directory_close(void *place) {
    directory *d = place;
    object_rate_destroy(&d->rate);
    free(d->root);
    free(d);
}

static void directory_name(const void *place, char *out, size_t size) {
    snprintf(out, size, "%s/", ((const directory *)place)->root);
}

static const object_functions functions = {
    .put = directory_put,
    .put_new = directory_put_new,
    .probe = directory_probe,
    .get = directory_get,
    .size = directory_size,
    .delete_all = directory_delete,
    .list = directory_list,
    .abort_uploads = directory_abort_uploads,
    .name = directory_name,
    .close = directory_close,
};

ckd_status directory_open(object_store *out, const char *path, const object_options *options,
                          ckd_error *err) {
    if (!directory_is_folder(path)) {
        return err_set(err, CKD_E_NOT_FOUND, "%s is not a directory: create it first", path);
    }
    directory *d = calloc(1, sizeof(*d));
    char *root = d ? strdup(path) : NULL;
    if (!root) {
        free(d);
        return err_nomem(err, strlen(path), "the path of an object store");
    }
    d->root = root;
    object_rate_init(&d->rate, options->bytes_per_s, clock_monotonic_ns());
    *out = (object_store){&functions, d};
    return CKD_OK;
}
