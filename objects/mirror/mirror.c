/* Opens mirrors, and serves the mount. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "objects/mirror/mirror.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/hash.h"
#include "objects/backend.h"

#define LOCK_MS     120000 /* for another process's refresh */
#define KNOWN_NS    UINT64_C(30000000000)
#define UNNAMED_S   UINT64_C(86400)
#define PUBLISH     "data/lock"

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
    return status == CKD_E_NOT_FOUND ? objects_put(m->objects, key, from, call, err) : err_from(err, status, &why);
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

/* ---- the mount ---- */

static ckd_status refresh(void *context, ckd_error *err) {
    object_mirror *m = context;
    pthread_mutex_lock(&m->lease.mutex);
    bool held = m->lease.held; /* then nobody else changes the store */
    pthread_mutex_unlock(&m->lease.mutex);
    return held ? CKD_OK : copies_refresh(m, false, err);
}

static ckd_status put_copied(object_mirror *m, const char *name, const char *key, const object_source *source,
                             bool replaces, ckd_error *err) {
    file_lock *lock;
    ckd_status status = mirror_lock(&lock, m, err);
    if (status != CKD_OK) {
        return status;
    }
    status = lease_check(m, err);
    if (status == CKD_OK) {
        object_call call = lease_call(m);
        status = replaces ? objects_put(m->objects, key, source, &call, err)
                          : mirror_put_new(m, key, source, &call, err);
    }
    THEN(status, file_rename(file_path(source->file), mirror_local(m, name).text, err));
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
    object_call call = lease_call(m);
    file_lock *lock = NULL;
    ckd_status status = mirror_key(key, name, err);
    if (status == CKD_OK && copied) {
        status = mirror_lock(&lock, m, err);
    }
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
               ? err_set(err, CKD_E_BUSY,
                         "the copy of %s in %s was damaged, and was fetched from %s again: repeat the command", name,
                         m->home, m->address)
               : status;
}

static ckd_status size_of(void *context, const char *name, uint64_t *size, bool ask, ckd_error *err) {
    object_mirror *m = context;
    char key[OBJECT_KEY_MAX + 1];
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
    char key[OBJECT_KEY_MAX + 1];
    object_range range = {.offset = offset, .to = to, .size = size};
    ckd_status status = mirror_key(key, name, err);
    THEN(status, size > 0 ? objects_get(m->objects, key, &range, NULL, err) : CKD_OK);
    if (status == CKD_E_NOT_FOUND) {
        remember_size(m, name, false, 0);
    }
    return status;
}

typedef ckd_status (*take_item_fn)(void *to, const char *name, const object_item *item, ckd_error *err);

/* Calls take with the objects of a folder. */
static ckd_status each_object(object_mirror *m, const char *folder, take_item_fn take, void *to, ckd_error *err) {
    char prefix[64];
    object_query query = {.prefix = prefix};
    char *after = NULL;
    ckd_status status = CKD_OK;
    snprintf(prefix, sizeof(prefix), "%s/", folder);
    do {
        object_page page;
        query.after = after;
        status = objects_list(m->objects, &query, &page, NULL, err);
        for (size_t i = 0; i < page.count && status == CKD_OK; i++) {
            char name[OBJECT_KEY_MAX + 1];
            if (mirror_name(name, page.items[i].key) && mirror_kind(name) == MOUNT_REMOTE) {
                status = take(to, name, &page.items[i], err);
            }
        }
        free(after);
        after = page.next;
        page.next = NULL;
        object_page_free(&page);
    } while (status == CKD_OK && after);
    free(after);
    return status;
}

/*
 * A young chunk file may be one that another machine has put and not named yet. Its intent is there, so here it would
 * look like the rest of a lost checkpoint. Files are read by the names in manifests, so nothing else misses it.
 */
static ckd_status add_name(void *to, const char *name, const object_item *item, ckd_error *err) {
    bool chunk = strncmp(name, "data/c/", strlen("data/c/")) == 0;
    uint64_t now_s = clock_wall_ns() / 1000000000;
    bool young = chunk && item->modified_s && item->modified_s + UNNAMED_S > now_s;
    return young ? CKD_OK : dir_list_add(to, strrchr(name, '/') + 1, err);
}

static ckd_status list_names(void *context, const char *folder, dir_list *out, ckd_error *err) {
    return each_object(context, folder, add_name, out, err);
}

static ckd_status add_size(void *to, const char *name, const object_item *item, ckd_error *err) {
    (void)name;
    (void)err;
    *(uint64_t *)to += item->size;
    return CKD_OK;
}

static ckd_status add_sizes(void *context, const char *folder, uint64_t *total, ckd_error *err) {
    return each_object(context, folder, add_size, total, err);
}

static ckd_status lock_store(void *context, const char *name, uint32_t timeout_ms, ckd_error *err) {
    object_mirror *m = context;
    if (strcmp(name, PUBLISH) != 0) {
        return CKD_OK;
    }
    ckd_status status = lease_acquire(m, timeout_ms, err);
    if (status == CKD_OK) {
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

static const file_mount functions = {.kind = mirror_kind,
                                     .refresh = refresh,
                                     .put = put,
                                     .remove = remove_file,
                                     .compare = compare,
                                     .size = size_of,
                                     .read = read_range,
                                     .list = list_names,
                                     .bytes = add_sizes,
                                     .lock = lock_store,
                                     .unlock = unlock_store};

/* ---- opening ---- */

static struct {
    pthread_mutex_t mutex;
    object_mirror *first;
} opened = {.mutex = PTHREAD_MUTEX_INITIALIZER};

static ckd_status cache_folder(char out[MIRROR_PATH], ckd_error *err) {
    const char *own = secure_getenv("CKPTDELTA_CACHE"), *cache = secure_getenv("XDG_CACHE_HOME"),
               *home = secure_getenv("HOME");
    int length = own && *own        ? snprintf(out, MIRROR_PATH, "%s", own)
                 : cache && *cache  ? snprintf(out, MIRROR_PATH, "%s/ckptdelta", cache)
                 : home && *home    ? snprintf(out, MIRROR_PATH, "%s/.cache/ckptdelta", home)
                                    : 0;
    if (length == 0 || length > MIRROR_PATH - 128 || out[0] != '/') {
        return err_set(err, CKD_E_STATE,
                       "a store in a bucket needs a folder for its catalog: name one, by its full path, in "
                       "CKPTDELTA_CACHE");
    }
    return CKD_OK;
}

static ckd_status make_folders(const char *path, ckd_error *err) {
    char part[MIRROR_PATH];
    ckd_status status = CKD_OK;
    for (const char *slash = strchr(path + 1, '/'); slash && status == CKD_OK; slash = strchr(slash + 1, '/')) {
        snprintf(part, sizeof(part), "%.*s", (int)(slash - path), path);
        status = dir_create(part, true, err);
    }
    THEN(status, dir_create(path, true, err));
    return status;
}

/* One id for each mirror, made by the first process that opens it. */
static ckd_status read_id(object_mirror *m, ckd_error *err) {
    mirror_path path = mirror_file(m, "id"), temp = mirror_file(m, "id.new");
    uint8_t random[16];
    bytes text = {0};
    if (file_read_all(&text, path.text, 64, NULL) != CKD_OK || text.size != 32) {
        ckd_status status = random_bytes(random, sizeof(random), err);
        for (size_t i = 0; i < sizeof(random); i++) {
            snprintf(m->id + 2 * i, 3, "%02x", random[i]);
        }
        THEN(status, file_remove(temp.text, true, err));
        THEN(status, file_replace_durable(path.text, temp.text, m->id, 32, err));
        bytes_free(&text);
        return status;
    }
    memcpy(m->id, text.data, 32);
    m->id[32] = 0;
    bytes_free(&text);
    return CKD_OK;
}

/* For people who look into the cache folder. */
static void write_address(const object_mirror *m) {
    mirror_path path = mirror_file(m, "address"), temp = mirror_file(m, "address.new");
    if (!file_exists(path.text)) {
        (void)file_remove(temp.text, true, NULL);
        (void)file_replace_durable(path.text, temp.text, m->address, strlen(m->address), NULL);
    }
}

static ckd_status make_home(object_mirror *m, ckd_error *err) {
    static const char *const inside[] = {"data", "data/c", "data/m", "data/n", "data/t", "data/p"};
    char cache[MIRROR_PATH], name[OBJECT_KEY_MAX + 1024];
    file_lock *lock = NULL;
    m->objects->functions->name(m->objects->place, name, sizeof(name));
    ckd_status status = cache_folder(cache, err);
    if (status != CKD_OK) {
        return status;
    }
    hash128 h = hash128_of(name, strlen(name));
    snprintf(m->home, sizeof(m->home), "%.*s/%016llx%016llx", MIRROR_PATH - 64, cache,
             (unsigned long long)load_le64(h.bytes), (unsigned long long)load_le64(h.bytes + 8));
    snprintf(m->root, sizeof(m->root), "%.*s/store", MIRROR_PATH - 8, m->home);
    status = make_folders(m->root, err);
    if (status == CKD_OK) {
        (void)chmod(m->home, 0700);
    }
    for (size_t i = 0; i < sizeof(inside) / sizeof(inside[0]) && status == CKD_OK; i++) {
        status = dir_create(mirror_local(m, inside[i]).text, true, err);
    }
    THEN(status, mirror_lock(&lock, m, err));
    if (status == CKD_OK) {
        status = read_id(m, err);
        write_address(m);
        lock_release(lock);
    }
    return status;
}

/* The answer is kept: a probe takes a dozen requests. */
static ckd_status probe(object_mirror *m, ckd_error *err) {
    mirror_path path = mirror_file(m, "probed"), temp = mirror_file(m, "probed.new");
    const char *declared = secure_getenv("CKPTDELTA_SINGLE_WRITER");
    bool honoured = file_exists(path.text);
    ckd_status status = honoured ? CKD_OK : objects_probe(m->objects, &honoured, NULL, err);
    if (status != CKD_OK) {
        return status;
    }
    if (!honoured && !(declared && strcmp(declared, "1") == 0)) {
        return err_set(
            err, CKD_E_UNSUPPORTED,
            "the server of %s ignores If-None-Match, so two writers could replace each other's checkpoints. If no "
            "other machine ever writes to this store, say so with CKPTDELTA_SINGLE_WRITER=1; or use a server that "
            "honours it (Amazon S3, Cloudflare R2, MinIO, SeaweedFS)",
            m->address);
    }
    m->single_writer = !honoured;
    m->may_write = true;
    if (honoured && !file_exists(path.text)) {
        (void)file_remove(temp.text, true, NULL);
        (void)file_replace_durable(path.text, temp.text, "1\n", 2, NULL);
    }
    return CKD_OK;
}

static void mirror_free(object_mirror *m) {
    if (m->process == getpid()) { /* a forked child has no such thread, and its mutex may be held */
        lease_destroy(&m->lease);
    }
    objects_close(m->objects);
    pthread_mutex_destroy(&m->mutex);
    free(m->address);
    free(m);
}

static ckd_status mirror_new(object_mirror **out, const char *address, ckd_error *err) {
    object_mirror *m = calloc(1, sizeof(*m));
    if (!m) {
        return err_nomem(err, sizeof(*m), "a store in a bucket");
    }
    pthread_mutex_init(&m->mutex, NULL);
    lease_init(&m->lease);
    m->process = getpid();
    m->mount = functions;
    m->mount.root = m->root;
    m->mount.context = m;
    m->address = strdup(address);
    ckd_status status = m->address ? CKD_OK : err_nomem(err, strlen(address), "an address");
    THEN(status, objects_open(&m->objects, address, NULL, err));
    THEN(status, make_home(m, err));
    THEN(status, copies_refresh(m, true, err));
    THEN(status, file_mount_add(&m->mount, err));
    if (status != CKD_OK) {
        mirror_free(m);
        return status;
    }
    *out = m;
    return CKD_OK;
}

static object_mirror *find_opened(const char *address) {
    object_mirror *m = opened.first;
    while (m && strcmp(m->address, address) != 0) {
        m = m->next;
    }
    return m;
}

ckd_status objects_mirror(object_mirror **out, const char *address, bool writes, ckd_error *err) {
    *out = NULL;
    pthread_mutex_lock(&opened.mutex);
    object_mirror *m = find_opened(address);
    ckd_status status = m ? copies_refresh(m, true, err) : mirror_new(&m, address, err);
    if (status == CKD_OK && m->users++ == 0) {
        m->next = opened.first;
        opened.first = m;
    }
    if (status == CKD_OK && writes && !m->may_write) {
        status = probe(m, err);
    }
    pthread_mutex_unlock(&opened.mutex);
    if (status == CKD_OK) {
        *out = m;
    } else if (m && m->users) {
        object_mirror_close(m);
    }
    return status;
}

const char *object_mirror_path(const object_mirror *m) {
    return m->root;
}

void object_mirror_close(object_mirror *m) {
    if (!m) {
        return;
    }
    pthread_mutex_lock(&opened.mutex);
    bool last = --m->users == 0;
    for (object_mirror **at = &opened.first; last && *at; at = &(*at)->next) {
        if (*at == m) {
            *at = m->next;
            break;
        }
    }
    if (last) {
        file_mount_remove(&m->mount);
        mirror_free(m);
    }
    pthread_mutex_unlock(&opened.mutex);
}
