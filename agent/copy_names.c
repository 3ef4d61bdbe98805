/* The files that make up the copies of a node's states, in the order in which they must arrive. */
#include "agent/internal.h"

#include <stdio.h>
#include <stdlib.h>

/* A manifest arrives after the files that it names, and is removed before them. */
const char *const copy_folders[COPY_FOLDERS] = {"data/c", "data/n", "data/t", "data/m"};

bool copy_is_chunk_file(const char *name) {
    size_t length = strlen(copy_folders[0]);
    return strncmp(name, copy_folders[0], length) == 0 && name[length] == '/';
}

void copy_names_free(copy_names *n) {
    for (size_t i = 0; i < n->count; i++) {
        free(n->items[i]);
    }
    free(n->items);
    *n = (copy_names){.count = 0};
}

static ckd_status add_name(copy_names *n, const char *folder, const char *name, ckd_error *err) {
    char path[512];
    ckd_status status = ARRAY_GROW(n->items, n->capacity, n->count + 1, "names", err);
    if (status == CKD_OK) {
        snprintf(path, sizeof(path), "%s/%s", folder, name);
        n->items[n->count] = strdup(path);
        status = n->items[n->count] ? CKD_OK : err_nomem(err, strlen(path), "names");
        n->count += status == CKD_OK;
    }
    return status;
}

ckd_status copy_names_read(copy_names *out, const char *root, bool chunk_files, ckd_error *err) {
    ckd_status status = add_name(out, "data", "store", err);
    for (size_t f = chunk_files ? 0 : 1; f < COPY_FOLDERS && status == CKD_OK; f++) {
        char path[700];
        dir_list in = {.count = 0};
        snprintf(path, sizeof(path), "%s/%s", root, copy_folders[f]);
        status = err_except(err, dir_list_read(&in, path, err), CKD_E_NOT_FOUND, err);
        for (size_t i = 0; i < in.count && status == CKD_OK; i++) {
            status = in.names[i][0] == '.' ? CKD_OK : add_name(out, copy_folders[f], in.names[i], err);
        }
        dir_list_free(&in);
    }
    return status;
}

ckd_status copy_names_list(copy_names *out, tier *t, ckd_error *err) {
    char own[600];
    snprintf(own, sizeof(own), "%s/own", t->folder);
    pthread_mutex_lock(&t->store_mutex); /* no save is under way */
    ckd_status status = copy_names_read(out, own, !t->parity, err);
    pthread_mutex_unlock(&t->store_mutex);
    return status;
}

bool copy_names_have(const copy_names *n, const char *name) {
    for (size_t i = 0; i < n->count; i++) {
        if (strcmp(n->items[i], name) == 0) {
            return true;
        }
    }
    return false;
}
