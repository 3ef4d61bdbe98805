/* Lists the objects of a directory in the order of their keys, and removes temporary files. */
#include "objects/directory.h"

#include <stdio.h>
#include <stdlib.h>

typedef struct listing {
    const directory *d;
    const object_query *query;
    const object_call *call;
    object_page *page;
    bool full;
} listing;

/* Might a folder have keys that begin with the prefix and come after `after`? `folder` ends with a slash. */
static bool folder_matters(const object_query *q, const char *folder) {
    size_t size = strlen(folder), prefix = strlen(q->prefix);
    if (strncmp(folder, q->prefix, size < prefix ? size : prefix) != 0) {
        return false;
    }
    return strncmp(folder, q->after, size) >= 0;
}

static bool key_matters(const object_query *q, const char *key) {
    return strncmp(key, q->prefix, strlen(q->prefix)) == 0 && strcmp(key, q->after) > 0;
}

static ckd_status add_file(listing *l, const char *key, ckd_error *err) {
    if (!key_matters(l->query, key)) {
        return CKD_OK;
    }
    object_page *page = l->page;
    if (page->count == l->query->limit) {
        l->full = true;
        page->next = strdup(page->items[page->count - 1].key);
        return page->next ? CKD_OK : err_nomem(err, OBJECT_KEY_MAX, "the key of an object");
    }
    char *path = directory_path(l->d, key, err);
    if (!path) {
        return CKD_E_NOMEM;
    }
    /* One that is removed meanwhile is listed with 0 bytes, as if it had been listed before. */
    uint64_t modified_ns = file_modified_ns(path);
    object_item item = {.key = (char *)key, .size = file_bytes(path), .modified_s = modified_ns / 1000000000};
    snprintf(item.tag, sizeof(item.tag), "%llu", (unsigned long long)modified_ns);
    ckd_status status = object_page_add(page, &item, err);
    free(path);
    return status;
}

/* Does `name` come before the keys in the folder `other`? `a-b` and `a.b` come before `a/b`. */
static bool precedes(const char *name, const char *other) {
    size_t size = strlen(other);
    return strncmp(name, other, size) == 0 && (name[size] == '-' || name[size] == '.');
}

/* Takes what has this name in a folder: adds a file, or says that it is a folder with keys that matter. */
static ckd_status take_name(listing *l, const char *folder, const char *name, bool *open, ckd_error *err) {
    char key[OBJECT_KEY_MAX + 2];
    *open = false;
    if (!object_key_valid(name) ||
        snprintf(key, sizeof(key), "%s%s/", folder, name) > OBJECT_KEY_MAX + 1) { /* with the slash */
        return CKD_OK;
    }
    bool inside = folder_matters(l->query, key);
    key[strlen(key) - 1] = 0;
    if (!inside && !key_matters(l->query, key)) {
        return CKD_OK; /* to ask the file system about each of a million names would take long */
    }
    char *path = directory_path(l->d, key, err);
    if (!path) {
        return CKD_E_NOMEM;
    }
    bool is_folder = directory_is_folder(path);
    free(path);
    *open = is_folder && inside;
    return is_folder ? CKD_OK : add_file(l, key, err);
}

static ckd_status list_folder(listing *l, const char *folder, ckd_error *err);

static ckd_status list_below(listing *l, const char *folder, const char *name, ckd_error *err) {
    char below[OBJECT_KEY_MAX + 2];
    snprintf(below, sizeof(below), "%s%s/", folder, name);
    return list_folder(l, below, err);
}

/*
 * Goes through the names in the order of bytes. A folder waits in `open` until the names are over that come before its
 * keys.
 */
static ckd_status list_names(listing *l, const char *folder, const dir_list *names, size_t *open,
                             ckd_error *err) {
    ckd_status status = CKD_OK;
    size_t waiting = 0;
    for (size_t i = 0; i <= names->count && status == CKD_OK && !l->full; i++) {
        const char *name = i < names->count ? names->names[i] : "";
        bool is_open = false;
        while (waiting > 0 && status == CKD_OK && !l->full &&
               !precedes(name, names->names[open[waiting - 1]])) {
            status = list_below(l, folder, names->names[open[--waiting]], err);
        }
        if (i < names->count && status == CKD_OK && !l->full) {
            status = take_name(l, folder, name, &is_open, err);
        }
        if (is_open) {
            open[waiting++] = i;
        }
    }
    return status;
}

/* `folder` is "" or ends with a slash. Keys are bounded, and so is the depth. */
static ckd_status list_folder(listing *l, const char *folder, ckd_error *err) {
    ckd_status status = object_call_check(l->call, "a listing", err);
    char *path = status == CKD_OK ? directory_path(l->d, folder, err) : NULL;
    if (!path) {
        return status == CKD_OK ? CKD_E_NOMEM : status;
    }
    path[strlen(path) - 1] = 0; /* the slash at the end */
    dir_list names = {0};
    ckd_error why = {0};
    status = dir_list_read(&names, path, &why);
    /* A folder may go meanwhile, but without the root nothing is known. */
    status = *folder ? err_except(err, status, CKD_E_NOT_FOUND, &why) : err_from(err, status, &why);
    free(path);
    size_t *open = status == CKD_OK ? calloc(names.count + 1, sizeof(*open)) : NULL;
    if (status == CKD_OK) {
        status = open ? list_names(l, folder, &names, open, err)
                      : err_nomem(err, names.count * sizeof(*open), "the folders of a listing");
    }
    free(open);
    dir_list_free(&names);
    return status;
}

ckd_status directory_list(void *place, const object_query *query, object_page *out, const object_call *call,
                          ckd_error *err) {
    listing l = {place, query, call, out, false};
    return list_folder(&l, "", err);
}

ckd_status directory_abort_uploads(void *place, uint64_t age_s, uint64_t *count, const object_call *call,
                                   ckd_error *err) {
    const directory *d = place;
    dir_list list = {0};
    ckd_status status = dir_list_read(&list, d->root, err);
    uint64_t now = clock_wall_ns();
    for (size_t i = 0; i < list.count && status == CKD_OK; i++) {
        if (strncmp(list.names[i], DIRECTORY_TEMP, strlen(DIRECTORY_TEMP)) != 0) {
            continue;
        }
        char *path = directory_path(d, list.names[i], err);
        status = path ? object_call_check(call, "a cleanup", err) : CKD_E_NOMEM;
        uint64_t written = path ? file_modified_ns(path) : 0;
        if (status == CKD_OK && written && written <= now && (now - written) / 1000000000 >= age_s) {
            status = file_remove(path, true, err);
            *count += status == CKD_OK;
        }
        free(path);
    }
    dir_list_free(&list);
    return status;
}
