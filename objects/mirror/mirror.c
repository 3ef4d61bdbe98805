/* Serves the mount of a mirror. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "objects/mirror/mirror.h"

#include <stdio.h>
#include <stdlib.h>

#include "base/hash.h"

#define LOCK_MS  120000 /* for another process's refresh */
#define KNOWN_NS UINT64_C(30000000000)
#define PUBLISH  "data/lock"

mirror_path mirror_file(const object_mirror *m, const char *name) {
    mirror_path p;
    snprintf(p.text, sizeof(p.text), "%s/%s", m->home, name);
    return p;
}

mirror_path mirror_local(const object_mirror *m, const char *name) {
    mirror_path p;
    snprintf(p.text, sizeof(p.text), "%s/./store/%s", m->home, name);
    return p;
}

ckd_status mirror_lock(file_lock **out, const object_mirror *m, ckd_error *err) {
    return lock_acquire(out, mirror_file(m, "lock").text, LOCK_EXCLUSIVE, true, LOCK_MS, err);
}

ckd_status mirror_put_new(object_mirror *m, const char *key, const object_source *from,
                          const object_call *call, ckd_error *err) {
    if (!m->single_writer) {
        return objects_put_new(m->objects, key, from, call, err);
    }
    uint64_t size;
    ckd_error why = {0};
    ckd_status status = objects_size(m->objects, key, &size, call, &why);
    if (status == CKD_OK) {
        return err_set(err, CKD_E_EXISTS, "%s exists", key);
    }
    return status == CKD_E_NOT_FOUND ? objects_put(m->objects, key, from, call, err)
                                     : err_from(err, status, &why);
}

ckd_status mirror_each_object(const object_mirror *m, const char *prefix, take_object_fn take, void *to,
                              ckd_error *err) {
    object_query query = {.prefix = prefix};
    char *after = NULL;
    ckd_status status = CKD_OK;
    do {
        object_page page;
        query.after = after;
        status = objects_list(m->objects, &query, &page, NULL, err);
        for (size_t i = 0; i < page.count && status == CKD_OK; i++) {
            status = take(to, &page.items[i], err);
        }
        free(after);
        after = page.next;
        page.next = NULL;
        object_page_free(&page);
    } while (status == CKD_OK && after);
    free(after);
    return status;
}

/* ---- sizes that were known a moment ago: objects never change ---- */

static struct known_size *slot_of(object_mirror *m, const char *name) {
    return &m->sizes[hash64(name, strlen(name)) % (sizeof(m->sizes) / sizeof(m->sizes[0]))];
}

/* found false: forget it. */
static void remember_size(object_mirror *m, const char *name, bool found, uint64_t size) {
    struct known_size *k = slot_of(m, name);
    pthread_mutex_lock(&m->mutex);
    if (strlen(name) < sizeof(k->name)) {
        *k = (struct known_size){.size = size, .at_ns = found ? clock_monotonic_ns() : 0};
        memcpy(k->name, name, strlen(name) + 1);
    }
    pthread_mutex_unlock(&m->mutex);
}

static bool recall_size(uint64_t *size, object_mirror *m, const char *name) {
    const struct known_size *k = slot_of(m, name);
    pthread_mutex_lock(&m->mutex);
    bool known = k->at_ns && strcmp(k->name, name) == 0 && clock_monotonic_ns() - k->at_ns < KNOWN_NS;
    *size = known ? k->size : 0;
    pthread_mutex_unlock(&m->mutex);
    return known;
}

static void forget_sizes(object_mirror *m) {
    pthread_mutex_lock(&m->mutex);
    memset(m->sizes, 0, sizeof(m->sizes));
    pthread_mutex_unlock(&m->mutex);
}

/* ---- the mount ---- */

static ckd_status refresh(void *context, ckd_error *err) {
    object_mirror *m = context;
    pthread_mutex_lock(&m->lease.mutex);
    bool held = m->lease.held; /* then nobody else changes the store */
    pthread_mutex_unlock(&m->lease.mutex);
    return held ? CKD_OK : copies_refresh(m, false, err);
}

/*
 * Once the object is there, a directory without a copy is no failure: the next refresh makes one. Until then the lease
 * keeps others from changing anything.
 */
static ckd_status put_copied(object_mirror *m, const char *name, const char *key, const object_source *source,
                             bool replaces, ckd_error *err) {
    file_lock *lock;
    object_call call = lease_call(m);
    ckd_status status = mirror_lock(&lock, m, err);
    if (status != CKD_OK) {
        return status;
    }
    status = lease_check(m, err);
    if (status == CKD_OK) {
        status = replaces ? objects_put(m->objects, key, source, &call, err)
                          : mirror_put_new(m, key, source, &call, err);
    }
    THEN(status, lease_check(m, err)); /* the server may have taken long */
    if (status == CKD_OK &&
        file_rename(file_path(source->file), mirror_local(m, name).text, NULL) != CKD_OK) {
        (void)file_remove(mirror_local(m, name).text, true, NULL);
        (void)file_remove(file_path(source->file), true, NULL);
    }
    lock_release(lock);
    return status;
}

static ckd_status put(void *context, const char *name, const char *from, bool replaces, ckd_error *err) {
    object_mirror *m = context;
    char key[OBJECT_KEY_MAX + 1];
    object_source source = {.offset = 0};
    ckd_status status = mirror_key(key, name, err);
    THEN(status, file_open_read(&source.file, from, err));
    if (status != CKD_OK) {
        return status;
    }
    source.size = file_size(source.file);
    if (mirror_kind(name) == MOUNT_COPIED) {
        status = put_copied(m, name, key, &source, replaces, err);
    } else {
        status = objects_put(m->objects, key, &source, NULL, err);
        if (status == CKD_OK) {
            remember_size(m, name, true, source.size);
            (void)file_remove(from, true, NULL);
        }
    }
    file_close_read(source.file);
    return status;
}

static ckd_status remove_file(void *context, const char *name, ckd_error *err) {
    object_mirror *m = context;
    bool copied = mirror_kind(name) == MOUNT_COPIED;
    char key[OBJECT_KEY_MAX + 1];
    const char *keys = key;
    file_lock *lock = NULL;
    ckd_status status = mirror_key(key, name, err);
    if (status == CKD_OK && copied) {
        status = mirror_lock(&lock, m, err);
    }
    object_call call = lease_call(m);
    THEN(status, lease_check(m, err));
    THEN(status, objects_delete(m->objects, &keys, 1, &call, err));
    if (status == CKD_OK && copied) {
        status = file_remove(mirror_local(m, name).text, true, err);
    }
    remember_size(m, name, false, 0);
    lock_release(lock);
    return status;
}

static ckd_status compare(void *context, const char *name, ckd_error *err) {
    object_mirror *m = context;
    file_lock *lock;
    bool changed = false;
    ckd_error why = {0};
    ckd_status status = mirror_lock(&lock, m, err);
    if (status != CKD_OK) {
        return status;
    }
    status = copies_fetch(m, name, &changed, &why);
    lock_release(lock);
    status = err_except(err, status, CKD_E_NOT_FOUND, &why);
    return status == CKD_OK && changed
               ? err_set(
                     err, CKD_E_BUSY,
                     "the copy of %s in %s was damaged, and was fetched from %s again: repeat the command",
                     name, m->home, m->address)
               : status;
}

static ckd_status size_of(void *context, const char *name, uint64_t *size, bool ask, ckd_error *err) {
    object_mirror *m = context;
    char key[OBJECT_KEY_MAX + 1];
    *size = 0;
    if (!ask && recall_size(size, m, name)) {
        return CKD_OK;
    }
    ckd_status status = mirror_key(key, name, err);
    THEN(status, objects_size(m->objects, key, size, NULL, err));
    remember_size(m, name, status == CKD_OK, *size);
    return status;
}

static ckd_status read_range(void *context, const char *name, uint64_t offset, void *to, size_t size,
                             ckd_error *err) {
    object_mirror *m = context;
    object_range range = {.offset = offset, .to = to, .size = size};
    uint64_t file_size;
    if (size == 0) {
        return CKD_OK;
    }
    ckd_status status = size_of(m, name, &file_size, false, err);
    THEN(status, ahead_read(m, name, file_size, &range, err));
    if (status == CKD_E_NOT_FOUND) {
        remember_size(m, name, false, 0);
    }
    return status;
}

static void will_read(void *context, const char *name, const file_range *ranges, size_t count) {
    uint64_t file_size;
    if (size_of(context, name, &file_size, false, NULL) == CKD_OK) {
        ahead_announce(context, name, file_size, ranges, count);
    }
}

/* Calls take with the remote files of a folder. */
static ckd_status each_file(const object_mirror *m, const char *folder, take_object_fn take, void *to,
                            ckd_error *err) {
    char prefix[64];
    snprintf(prefix, sizeof(prefix), "%s/", folder);
    return mirror_each_object(m, prefix, take, to, err);
}

static bool is_remote(char name[OBJECT_KEY_MAX + 1], const object_item *item) {
    return mirror_name(name, item->key) && mirror_kind(name) == MOUNT_REMOTE;
}

typedef struct older_names {
    dir_list *list;
    uint64_t than_s; /* since 1970 */
} older_names;

static ckd_status add_name(void *to, const object_item *item, ckd_error *err) {
    const older_names *n = to;
    char name[OBJECT_KEY_MAX + 1];
    bool young = n->than_s && item->modified_s > n->than_s;
    return !is_remote(name, item) || young ? CKD_OK : dir_list_add(n->list, strrchr(name, '/') + 1, err);
}

static ckd_status list_names(void *context, const char *folder, uint64_t older_than_s, dir_list *out,
                             ckd_error *err) {
    uint64_t now_s = clock_wall_ns() / 1000000000;
    older_names n = {out, older_than_s && now_s > older_than_s ? now_s - older_than_s : 0};
    return each_file(context, folder, add_name, &n, err);
}

static ckd_status add_size(void *to, const object_item *item, ckd_error *err) {
    char name[OBJECT_KEY_MAX + 1];
    (void)err;
    *(uint64_t *)to += is_remote(name, item) ? item->size : 0;
    return CKD_OK;
}

static ckd_status add_sizes(void *context, const char *folder, uint64_t *total, ckd_error *err) {
    return each_file(context, folder, add_size, total, err);
}

static ckd_status lock_store(void *context, const char *name, uint32_t timeout_ms, ckd_error *err) {
    object_mirror *m = context;
    if (strcmp(name, PUBLISH) != 0) {
        return CKD_OK;
    }
    ckd_status status = lease_acquire(m, timeout_ms, err);
    if (status == CKD_OK) {
        forget_sizes(m); /* others may have removed files */
        status = copies_refresh(m, true, err);
        if (status != CKD_OK) {
            lease_release(m);
        }
    }
    return status;
}

static void unlock_store(void *context, const char *name) {
    if (strcmp(name, PUBLISH) == 0) {
        lease_release(context);
    }
}

const file_mount mirror_functions = {.kind = mirror_kind,
                                     .refresh = refresh,
                                     .put = put,
                                     .remove = remove_file,
                                     .compare = compare,
                                     .size = size_of,
                                     .read = read_range,
                                     .will_read = will_read,
                                     .list = list_names,
                                     .bytes = add_sizes,
                                     .lock = lock_store,
                                     .unlock = unlock_store};
