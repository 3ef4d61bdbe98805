/*
 * Copies of a store's small files. The mirror notes the tag that the place gave each of them, so a listing tells
 * which ones are out of date.
 */
#include "objects/mirror/mirror.h"

#include <stdio.h>
#include <stdlib.h>

#include "base/threads.h"

#define NOTES_MAX ((size_t)256 << 20)
#define FETCHERS  8
#define TRIES     5
#define FRESH_NS  UINT64_C(1000000000) /* copies that were compared so recently are up to date for a reader */

static const char *const folders[] = {"data/m", "data/n", "data/t"};
static const char *const files[] = {"data/store", "data/deletions"};
#define FOLDERS (sizeof(folders) / sizeof(folders[0]))
#define FILES   (sizeof(files) / sizeof(files[0]))

/* An object, or a copy of one. */
typedef struct copy {
    char *name;
    uint64_t size;
    char tag[OBJECT_TAG];
    bool missing; /* it was gone, or another one, when it was fetched */
} copy;
typedef struct copies {
    copy *items;
    size_t count, capacity;
} copies;

static void copies_free(copies *c) {
    for (size_t i = 0; i < c->count; i++) {
        free(c->items[i].name);
    }
    free(c->items);
    *c = (copies){.count = 0};
}

static ckd_status copies_add(copies *c, const char *name, uint64_t size, const char *tag, ckd_error *err) {
    ckd_status status = ARRAY_GROW(c->items, c->capacity, c->count + 1, "names of copies", err);
    char *own = status == CKD_OK ? strdup(name) : NULL;
    if (!own) {
        return status == CKD_OK ? err_nomem(err, strlen(name), "the name of a copy") : status;
    }
    c->items[c->count] = (copy){.name = own, .size = size};
    snprintf(c->items[c->count++].tag, OBJECT_TAG, "%s", tag);
    return CKD_OK;
}

static int by_name(const void *a, const void *b) {
    return strcmp(((const copy *)a)->name, ((const copy *)b)->name);
}

static void copies_sort(copies *c) {
    if (c->count > 1) {
        qsort(c->items, c->count, sizeof(*c->items), by_name);
    }
}

static const copy *copies_find(const copies *c, const char *name) {
    copy key = {.name = (char *)name};
    return c->count > 0 ? bsearch(&key, c->items, c->count, sizeof(*c->items), by_name) : NULL;
}

/* ---- what the mirror has ---- */

/* Reads the boot, and `TAG NAME` lines. A file that makes no sense counts as empty: then all copies are fetched and compared. */
static ckd_status read_notes(copies *out, const object_mirror *m, ckd_error *err) {
    bytes text = {0};
    ckd_status status = file_read_all(&text, mirror_file(m, "copies").text, NOTES_MAX, NULL);
    bytes_put(&text, "", 1);
    if (text.failed) {
        bytes_free(&text);
        return err_nomem(err, text.size, "the list of copies");
    }
    char *line = status == CKD_OK ? (char *)text.data : NULL;
    status = CKD_OK;
    /* After a crash of the machine, copies may be empty that were noted: then all are compared. */
    size_t boot = strlen(m->boot);
    bool known = line && m->boot[0] != '?' && strncmp(line, m->boot, boot) == 0 && line[boot] == '\n';
    line = known ? line + boot + 1 : NULL;
    while (line && *line && status == CKD_OK) {
        char *end = strchr(line, '\n'), *space = strchr(line, ' ');
        if (!end || !space || space > end || space - line >= OBJECT_TAG) {
            break;
        }
        *space = *end = 0;
        status = copies_add(out, space + 1, 0, line, err);
        line = end + 1;
    }
    copies_sort(out);
    bytes_free(&text);
    return status;
}

static bool is_notable(const copy *c) {
    return !c->missing && c->tag[0] && !strpbrk(c->tag, " \n") && !strchr(c->name, '\n');
}

static ckd_status write_notes(const object_mirror *m, const copies *now, ckd_error *err) {
    bytes text = {0};
    file_writer *f;
    mirror_path path = mirror_file(m, "copies"), temp = mirror_file(m, "copies.new");
    bytes_put(&text, m->boot, strlen(m->boot));
    bytes_put(&text, "\n", 1);
    for (size_t i = 0; i < now->count; i++) {
        const copy *c = &now->items[i];
        if (is_notable(c)) {
            bytes_put(&text, c->tag, strlen(c->tag));
            bytes_put(&text, " ", 1);
            bytes_put(&text, c->name, strlen(c->name));
            bytes_put(&text, "\n", 1);
        }
    }
    ckd_status status = text.failed ? err_nomem(err, text.size, "the list of copies") : CKD_OK;
    THEN(status, file_remove(temp.text, true, err));
    THEN(status, file_create(&f, temp.text, 0, err));
    if (status == CKD_OK) {
        status = file_append(f, text.data, text.size, err);
        ckd_status closed = file_close(f, status == CKD_OK ? err : NULL);
        status = status == CKD_OK ? closed : status;
    }
    THEN(status, file_rename(temp.text, path.text, err));
    bytes_free(&text);
    return status;
}

static ckd_status list_local(copies *out, const object_mirror *m, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t f = 0; f < FOLDERS && status == CKD_OK; f++) {
        dir_list list;
        status = dir_list_read(&list, mirror_local(m, folders[f]).text, err);
        for (size_t i = 0; status == CKD_OK && i < list.count; i++) {
            char name[OBJECT_KEY_MAX];
            int length = snprintf(name, sizeof(name), "%s/%s", folders[f], list.names[i]);
            if (length < (int)sizeof(name) && mirror_kind(name) == MOUNT_COPIED) {
                status = copies_add(out, name, file_bytes(mirror_local(m, name).text), "", err);
            }
        }
        dir_list_free(&list);
    }
    for (size_t f = 0; f < FILES && status == CKD_OK; f++) {
        if (file_exists(mirror_local(m, files[f]).text)) {
            status = copies_add(out, files[f], file_bytes(mirror_local(m, files[f]).text), "", err);
        }
    }
    copies_sort(out);
    return status;
}

/* ---- what the place has ---- */

static ckd_status add_copied(void *to, const object_item *item, ckd_error *err) {
    char name[OBJECT_KEY_MAX + 1];
    bool copied = mirror_name(name, item->key) && mirror_kind(name) == MOUNT_COPIED;
    return copied ? copies_add(to, name, item->size, item->tag, err) : CKD_OK;
}

static ckd_status list_remote(copies *out, const object_mirror *m, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t f = 0; f < FOLDERS && status == CKD_OK; f++) {
        char prefix[16];
        snprintf(prefix, sizeof(prefix), "%s/", folders[f]);
        status = mirror_each_object(m, prefix, add_copied, out, err);
    }
    for (size_t f = 0; f < FILES && status == CKD_OK; f++) {
        status = mirror_each_object(m, files[f], add_copied, out, err);
    }
    copies_sort(out);
    return status;
}

/* ---- fetching ---- */

static bool is_same(const char *path, const bytes *data) {
    bytes found = {0};
    bool same = file_read_all(&found, path, data->size, NULL) == CKD_OK && found.size == data->size &&
                (data->size == 0 || memcmp(found.data, data->data, data->size) == 0);
    bytes_free(&found);
    return same;
}

/* The copy gets its name as a whole, so a reader sees the old one or the new one. */
static ckd_status write_copy(const object_mirror *m, const char *name, const bytes *data, size_t worker,
                             ckd_error *err) {
    char file[32];
    file_writer *f;
    snprintf(file, sizeof(file), "fetched.%zu", worker);
    mirror_path temp = mirror_file(m, file);
    ckd_status status = file_remove(temp.text, true, err);
    THEN(status, file_create(&f, temp.text, 0, err));
    if (status == CKD_OK) {
        status = file_append(f, data->data, data->size, err);
        ckd_status closed = file_close(f, status == CKD_OK ? err : NULL);
        status = status == CKD_OK ? closed : status;
    }
    THEN(status, file_rename(temp.text, mirror_local(m, name).text, err));
    return status;
}

static ckd_status fetch(bool *changed, const object_mirror *m, const copy *c, size_t worker, ckd_error *err) {
    char key[OBJECT_KEY_MAX + 1];
    bytes data = {0};
    *changed = false;
    if (c->size > OBJECT_NEW_MAX) {
        return err_set(err, CKD_E_CORRUPT, "%s in %s has %llu bytes; at most %llu are expected", c->name,
                       m->address, (unsigned long long)c->size, (unsigned long long)OBJECT_NEW_MAX);
    }
    ckd_status status = mirror_key(key, c->name, err);
    object_range range = {.to = bytes_extend(&data, (size_t)c->size), .size = (size_t)c->size};
    if (status == CKD_OK && !range.to) {
        status = err_nomem(err, (size_t)c->size, "a file of the store");
    }
    THEN(status, objects_get(m->objects, key, &range, NULL, err));
    if (status == CKD_OK && !is_same(mirror_local(m, c->name).text, &data)) {
        *changed = true;
        status = write_copy(m, c->name, &data, worker, err);
    }
    bytes_free(&data);
    return status;
}

ckd_status copies_fetch(object_mirror *m, const char *name, bool *changed, ckd_error *err) {
    char key[OBJECT_KEY_MAX + 1];
    copy c = {.name = (char *)name};
    *changed = false;
    ckd_status status = mirror_key(key, name, err);
    THEN(status, objects_size(m->objects, key, &c.size, NULL, err));
    THEN(status, fetch(changed, m, &c, FETCHERS, err));
    return status;
}

typedef struct fetching {
    const object_mirror *m;
    copy **wanted;
} fetching;

/* An object that is gone or shorter was removed or replaced since the listing. */
static ckd_status fetch_one(void *context, size_t index, uint32_t worker, ckd_error *err) {
    fetching *f = context;
    copy *c = f->wanted[index];
    bool changed;
    ckd_status status = fetch(&changed, f->m, c, worker, err);
    c->missing = (status == CKD_E_NOT_FOUND || status == CKD_E_CORRUPT) && c->size <= OBJECT_NEW_MAX;
    return c->missing ? CKD_OK : status;
}

static ckd_status fetch_all(fetching *f, size_t count, ckd_error *err) {
    thread_pool *pool;
    ckd_status status = pool_create(&pool, count < FETCHERS ? (uint32_t)count : FETCHERS, err);
    if (status == CKD_OK) {
        status = pool_run(pool, count, fetch_one, f, err);
        pool_destroy(pool);
    }
    return status;
}

/* ---- refreshing ---- */

typedef struct refreshed {
    copies had, local, now; /* noted; in the directory; in the place */
    size_t wanted, missing; /* copies that were fetched; and that were not there as they had been listed */
} refreshed;

static ckd_status fetch_lacking(refreshed *r, const object_mirror *m, ckd_error *err) {
    fetching f = {.m = m, .wanted = calloc(r->now.count + 1, sizeof(*f.wanted))};
    if (!f.wanted) {
        return err_nomem(err, r->now.count * sizeof(*f.wanted), "names of copies");
    }
    for (size_t i = 0; i < r->now.count; i++) {
        copy *c = &r->now.items[i];
        const copy *noted = copies_find(&r->had, c->name), *local = copies_find(&r->local, c->name);
        bool same = noted && c->tag[0] && strcmp(noted->tag, c->tag) == 0;
        if (!same || !local || local->size != c->size) {
            f.wanted[r->wanted++] = c;
        }
    }
    ckd_status status = r->wanted > 0 ? fetch_all(&f, r->wanted, err) : CKD_OK;
    for (size_t i = 0; i < r->wanted; i++) {
        r->missing += f.wanted[i]->missing;
    }
    free(f.wanted);
    return status;
}

/*
 * The local names are listed first: a file of another process of this machine that comes meanwhile is in the place
 * before it is here, and must not be taken for one that the place no longer has.
 */
static ckd_status refresh_once(refreshed *r, const object_mirror *m, ckd_error *err) {
    size_t removed = 0;
    ckd_status status = read_notes(&r->had, m, err);
    THEN(status, list_local(&r->local, m, err));
    THEN(status, list_remote(&r->now, m, err));
    THEN(status, fetch_lacking(r, m, err));
    for (size_t i = 0; i < r->local.count && status == CKD_OK; i++) {
        if (!copies_find(&r->now, r->local.items[i].name)) {
            status = file_remove(mirror_local(m, r->local.items[i].name).text, true, err);
            removed++;
        }
    }
    bool same = r->wanted == 0 && removed == 0 && r->had.count == r->now.count;
    if (status == CKD_OK && !same) {
        status = write_notes(m, &r->now, err);
    }
    return status;
}

static ckd_status refresh_locked(object_mirror *m, ckd_error *err) {
    size_t missing = 1;
    ckd_status status = CKD_OK;
    for (int i = 0; i < TRIES && missing > 0 && status == CKD_OK; i++) {
        refreshed r = {.wanted = 0};
        status = refresh_once(&r, m, err);
        missing = r.missing;
        copies_free(&r.had);
        copies_free(&r.local);
        copies_free(&r.now);
    }
    return status == CKD_OK && missing > 0
               ? err_set(err, CKD_E_BUSY, "the files of %s changed each time they were read: try again",
                         m->address)
               : status;
}

ckd_status copies_refresh(object_mirror *m, bool ask, ckd_error *err) {
    uint64_t begun = clock_monotonic_ns();
    file_lock *lock;
    pthread_mutex_lock(&m->mutex);
    bool fresh = !ask && m->refreshed_ns && begun - m->refreshed_ns < FRESH_NS;
    pthread_mutex_unlock(&m->mutex);
    if (fresh) {
        return CKD_OK;
    }
    ckd_status status = mirror_lock(&lock, m, err);
    if (status != CKD_OK) {
        return status;
    }
    status = refresh_locked(m, err);
    lock_release(lock);
    if (status == CKD_OK) {
        pthread_mutex_lock(&m->mutex);
        m->refreshed_ns = clock_monotonic_ns();
        pthread_mutex_unlock(&m->mutex);
    }
    return status;
}
