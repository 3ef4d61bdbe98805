/* Opens mirrors: their folder, the copies, and the probe of the place. */
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

static struct {
    pthread_mutex_t mutex;
    object_mirror *first;
} opened = {.mutex = PTHREAD_MUTEX_INITIALIZER};

static ckd_status cache_folder(char out[MIRROR_PATH], ckd_error *err) {
    const char *own = secure_getenv("CKPTDELTA_CACHE"), *cache = secure_getenv("XDG_CACHE_HOME"),
               *home = secure_getenv("HOME");
    int length = own && *own       ? snprintf(out, MIRROR_PATH, "%s", own)
                 : cache && *cache ? snprintf(out, MIRROR_PATH, "%s/ckptdelta", cache)
                 : home && *home   ? snprintf(out, MIRROR_PATH, "%s/.cache/ckptdelta", home)
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
    for (const char *slash = strchr(path + 1, '/'); slash && status == CKD_OK;
         slash = strchr(slash + 1, '/')) {
        snprintf(part, sizeof(part), "%.*s", (int)(slash - path), path);
        status = dir_create(part, true, err);
    }
    THEN(status, dir_create(path, true, err));
    return status;
}

static void hex_of(char *out, const uint8_t *data, size_t size) {
    for (size_t i = 0; i < size; i++) {
        snprintf(out + 2 * i, 3, "%02x", data[i]);
    }
}

/* One id for each mirror, made by the first process that opens it. */
static ckd_status read_id(object_mirror *m, ckd_error *err) {
    mirror_path path = mirror_file(m, "id"), temp = mirror_file(m, "id.new");
    uint8_t random[16];
    bytes text = {0};
    ckd_error why = {0};
    ckd_status status = file_read_all(&text, path.text, 64, &why);
    if (status == CKD_OK && text.size == 32) {
        memcpy(m->id, text.data, 32);
        m->id[32] = 0;
    } else if (status == CKD_OK || status == CKD_E_NOT_FOUND || status == CKD_E_CORRUPT) {
        status = random_bytes(random, sizeof(random), err);
        hex_of(m->id, random, sizeof(random));
        THEN(status, file_remove(temp.text, true, err));
        THEN(status, file_replace_durable(path.text, temp.text, m->id, 32, err));
    } else {
        err_from(err, status, &why);
    }
    bytes_free(&text);
    return status;
}

static ckd_status read_origin(object_mirror *m, ckd_error *err) {
    uint8_t random[8];
    ckd_status status = random_bytes(random, sizeof(random), err);
    hex_of(m->opened, random, sizeof(random));
    boot_id(m->boot);
    return status;
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
    if (status == CKD_OK) { /* readers, too, hold it */
        status = lock_acquire(&lock, mirror_local(m, "data/readers").text, LOCK_EXCLUSIVE, true, 0, NULL);
        lock_release(lock);
        status = status == CKD_E_BUSY ? CKD_OK : status;
    }
    THEN(status, mirror_lock(&lock, m, err));
    if (status == CKD_OK) {
        status = read_id(m, err);
        THEN(status, read_origin(m, err));
        write_address(m);
        lock_release(lock);
    }
    return status;
}

static ckd_status is_listed(bool *out, const object_mirror *m, const char *key, ckd_error *err) {
    object_query query = {.prefix = key};
    object_page page;
    ckd_status status = objects_list(m->objects, &query, &page, NULL, err);
    *out = page.count > 0;
    object_page_free(&page);
    return status;
}

/* A listing must have what was put before it, and not what was removed: leases and copies rely on that. */
static ckd_status probe_listing(object_mirror *m, ckd_error *err) {
    char key[64];
    const char *keys = key;
    bool before = false, after = true;
    snprintf(key, sizeof(key), "probe-%s", m->opened);
    ckd_status status = objects_put(m->objects, key, &(object_source){.data = "1", .size = 1}, NULL, err);
    THEN(status, is_listed(&before, m, key, err));
    THEN(status, objects_delete(m->objects, &keys, 1, NULL, err));
    THEN(status, is_listed(&after, m, key, err));
    if (status == CKD_OK && (!before || after)) {
        status = err_set(
            err, CKD_E_UNSUPPORTED,
            "the server of %s lists objects as they were some time ago, so it cannot have a store: use one "
            "whose listings are consistent, as those of Amazon S3 are",
            m->address);
    }
    return status;
}

/* The answer is kept: a probe takes a dozen requests. */
static ckd_status probe(object_mirror *m, ckd_error *err) {
    mirror_path path = mirror_file(m, "probed"), temp = mirror_file(m, "probed.new");
    const char *declared = secure_getenv("CKPTDELTA_SINGLE_WRITER");
    bool honoured = file_exists(path.text);
    ckd_status status = honoured ? CKD_OK : objects_probe(m->objects, &honoured, NULL, err);
    if (status == CKD_OK && !file_exists(path.text)) {
        status = probe_listing(m, err);
    }
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
        ahead_destroy(&m->ahead);
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
    ahead_init(&m->ahead);
    m->process = getpid();
    m->mount = mirror_functions;
    m->mount.root = m->root;
    m->mount.context = m;
    m->address = strdup(address);
    ckd_status status = m->address ? CKD_OK : err_nomem(err, strlen(address), "an address");
    THEN(status, objects_open(&m->objects, address, NULL, err));
    THEN(status, make_home(m, err));
    if (status != CKD_OK) {
        mirror_free(m);
        return status;
    }
    *out = m;
    return CKD_OK;
}

/* The mirror of this process for the same place, which may have been opened with another address. */
static object_mirror *find_opened(const object_mirror *like) {
    object_mirror *m = opened.first;
    while (m && (strcmp(m->root, like->root) != 0 || m->process != getpid())) {
        m = m->next;
    }
    return m;
}

/* The bucket has no store, or no longer: what the catalog knows is of another one. */
static void drop_catalog(const object_mirror *m) {
    static const char *const names[] = {"catalog.db", "catalog.db-journal", "catalog.db.old"};
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        (void)file_remove(mirror_local(m, names[i]).text, true, NULL);
    }
}

static ckd_status mirror_begin(object_mirror *m, ckd_error *err) {
    ckd_status status = copies_refresh(m, true, err);
    if (status == CKD_OK && !file_exists(mirror_local(m, "data/store").text)) {
        drop_catalog(m);
    }
    THEN(status, file_mount_add(&m->mount, err));
    if (status == CKD_OK) {
        m->next = opened.first;
        opened.first = m;
    }
    return status;
}

/* Frees a mirror without users. */
static void mirror_end(object_mirror *m) {
    for (object_mirror **at = &opened.first; *at; at = &(*at)->next) {
        if (*at == m) {
            *at = m->next;
            break;
        }
    }
    file_mount_remove(&m->mount);
    mirror_free(m);
}

/* Without this, a child that is forked while another thread opens a store could not open any. */
static void make_mutex(void) {
    pthread_mutex_init(&opened.mutex, NULL);
}

static void watch_forks(void) {
    pthread_atfork(NULL, NULL, make_mutex);
}

ckd_status objects_mirror(object_mirror **out, const char *address, bool writes, ckd_error *err) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    *out = NULL;
    pthread_once(&once, watch_forks);
    pthread_mutex_lock(&opened.mutex);
    object_mirror *m, *own = NULL;
    ckd_status status = mirror_new(&own, address, err);
    m = status == CKD_OK ? find_opened(own) : NULL;
    if (m) {
        mirror_free(own);
        status = copies_refresh(m, true, err);
    } else if (status == CKD_OK) {
        m = own;
        status = mirror_begin(m, err);
    }
    if (status == CKD_OK && writes && !m->may_write) {
        status = probe(m, err);
    }
    if (status == CKD_OK) {
        m->users++;
        *out = m;
    } else if (m && m->users == 0) {
        mirror_end(m);
    }
    pthread_mutex_unlock(&opened.mutex);
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
    if (--m->users == 0) {
        mirror_end(m);
    }
    pthread_mutex_unlock(&opened.mutex);
}

bool objects_is_mirror(const char *path) {
    static const char *const beside[] = {"/../id", "/../address", "/../lock"};
    char name[MIRROR_PATH + 16];
    bool all = strlen(path) < MIRROR_PATH;
    for (size_t i = 0; i < sizeof(beside) / sizeof(beside[0]) && all; i++) {
        snprintf(name, sizeof(name), "%s%s", path, beside[i]);
        all = file_exists(name);
    }
    return all;
}
