/* Lists the objects of a directory in the order of their keys, and removes temporary files. */
#include "objects/directory.h"

#include <stdio.h>
#include <stdlib.h>

/* A folder's name ends with a slash, as its keys go on after it: `a-b` comes before `a/b`. */
typedef struct entry {
    char name[OBJECT_PART_MAX + 2];
} entry;

typedef struct listing {
    const directory *d;
    const object_query *query;
    const object_call *call;
    object_page *page;
    bool full;
} listing;

static int compare_entries(const void *a, const void *b) {
    return strcmp(((const entry *)a)->name, ((const entry *)b)->name);
}

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

/* The entries of a folder, sorted. Names that are no part of a key are left out. */
static ckd_status read_entries(entry **out, size_t *count, const char *path, ckd_error *err) {
    dir_list list = {0};
    ckd_error why = {0};
    ckd_status status = dir_list_read(&list, path, &why);
    *out = NULL;
    *count = 0;
    if (status != CKD_OK) {
        return err_except(err, status, CKD_E_NOT_FOUND, &why);
    }
    entry *entries = calloc(list.count ? list.count : 1, sizeof(*entries));
    for (size_t i = 0; entries && i < list.count; i++) {
        const char *name = list.names[i];
        char below[4096];
        if (!object_key_valid(name) ||
            snprintf(below, sizeof(below), "%s/%s", path, name) >= (int)sizeof(below)) {
            continue;
        }
        snprintf(entries[*count].name, sizeof(entries[*count].name), "%s%s", name,
                 directory_is_folder(below) ? "/" : "");
        (*count)++;
    }
    dir_list_free(&list);
    if (!entries) {
        return err_nomem(err, sizeof(*entries), "the entries of a folder");
    }
    qsort(entries, *count, sizeof(*entries), compare_entries);
    *out = entries;
    return CKD_OK;
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
    ckd_status status = object_page_add(page, key, file_bytes(path), err);
    free(path);
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
    entry *entries = NULL;
    size_t count = 0;
    status = read_entries(&entries, &count, path, err);
    free(path);
    for (size_t i = 0; i < count && status == CKD_OK && !l->full; i++) {
        size_t above = strlen(folder), size = above + strlen(entries[i].name);
        char key[OBJECT_KEY_MAX + 1];
        if (size > OBJECT_KEY_MAX) {
            continue;
        }
        memcpy(key, folder, above);
        memcpy(key + above, entries[i].name, size - above + 1);
        if (key[size - 1] != '/') {
            status = add_file(l, key, err);
        } else if (folder_matters(l->query, key)) {
            status = list_folder(l, key, err);
        }
    }
    free(entries);
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
