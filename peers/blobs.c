/* Files that a node keeps for others. They lie below a folder, and each has the hash that it had when it arrived. */
#include "peers/internal.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/file.h"

#define DEPTH_MAX 8

struct held_blob {
    char set[PEER_SET_MAX + 1];
    blob_entry entry;
};

/* ---- names ---- */

static bool is_plain(char c) {
    return isalnum((unsigned char)c) || c == '.' || c == '_' || c == '-' || c == '~';
}

/* A path of plain names, none of which begins with a dot. */
static bool is_path(const char *name, size_t max, unsigned depth) {
    bool begins = true;
    unsigned slashes = 0;
    size_t length = 0;
    for (const char *c = name; *c; c++, length++) {
        if (begins ? !is_plain(*c) || *c == '.' : !is_plain(*c) && *c != '/') {
            return false;
        }
        begins = *c == '/';
        slashes += begins;
    }
    return length > 0 && length <= max && !begins && slashes < depth;
}

bool blob_names_valid(const char *set, const char *name) {
    return is_path(set, PEER_SET_MAX, 1) && (!name || is_path(name, PEER_BLOB_MAX, DEPTH_MAX));
}

/* ---- folders ---- */

void peer_remove_below(const char *path, unsigned depth) {
    dir_list names;
    char below[1024];
    if (depth == 0 || dir_list_read(&names, path, NULL) != CKD_OK) {
        return;
    }
    for (size_t i = 0; i < names.count; i++) {
        snprintf(below, sizeof(below), "%s/%s", path, names.names[i]);
        if (dir_exists(below)) {
            peer_remove_below(below, depth - 1);
            (void)dir_remove(below, NULL);
        } else {
            (void)file_remove(below, true, NULL);
        }
    }
    dir_list_free(&names);
}

/* Makes the folders above the last name of a path below `root`. */
static ckd_status make_folders(const char *root, const char *path, ckd_error *err) {
    char folder[1024];
    ckd_status status = CKD_OK;
    for (const char *slash = strchr(path + strlen(root) + 1, '/'); slash && status == CKD_OK;
         slash = strchr(slash + 1, '/')) {
        snprintf(folder, sizeof(folder), "%.*s", (int)(slash - path), path);
        status = dir_create(folder, true, err);
    }
    return status;
}

ckd_status blobs_open(blobs *out, const char *folder, uint64_t budget_bytes, ckd_error *err) {
    *out = (blobs){.budget_bytes = budget_bytes};
    if (strlen(folder) >= sizeof(out->folder)) {
        return err_set(err, CKD_E_INVALID, "the path %.200s... is too long", folder);
    }
    snprintf(out->folder, sizeof(out->folder), "%s", folder);
    peer_remove_below(folder, DEPTH_MAX + 2);
    ckd_status status = dir_create(folder, true, err);
    if (status == CKD_OK) {
        pthread_mutex_init(&out->mutex, NULL);
        pthread_rwlock_init(&out->lock, NULL);
    } else {
        out->folder[0] = '\0';
    }
    return status;
}

void blobs_close(blobs *b) {
    if (!b->folder[0]) {
        return;
    }
    peer_remove_below(b->folder, DEPTH_MAX + 2);
    (void)dir_remove(b->folder, NULL);
    free(b->items);
    pthread_rwlock_destroy(&b->lock);
    pthread_mutex_destroy(&b->mutex);
}

/* ---- the list: under the mutex ---- */

static held_blob *find(blobs *b, const char *set, const char *name) {
    for (size_t i = 0; i < b->count; i++) {
        if (strcmp(b->items[i].set, set) == 0 && strcmp(b->items[i].entry.name, name) == 0) {
            return &b->items[i];
        }
    }
    return NULL;
}

static void remove_at(blobs *b, size_t i) {
    char path[1024];
    snprintf(path, sizeof(path), "%s/%s/%s", b->folder, b->items[i].set, b->items[i].entry.name);
    (void)file_remove(path, true, NULL);
    b->used_bytes -= b->items[i].entry.size;
    b->items[i] = b->items[--b->count];
}

/*
 * The system, or somebody, may have removed or cut a file: what is not whole is no copy. The owner learns that from the
 * next list, and sends it again. Bytes that have changed are found when the copy is read.
 */
static bool still_has(blobs *b, size_t i) {
    char path[1024];
    const blob_entry *e = &b->items[i].entry;
    snprintf(path, sizeof(path), "%s/%s/%s", b->folder, b->items[i].set, e->name);
    bool whole = file_exists(path) && file_bytes(path) == e->size;
    if (!whole) {
        remove_at(b, i);
    }
    return whole;
}

bool blobs_has(blobs *b, const char *set, const blob_entry *entry) {
    pthread_mutex_lock(&b->mutex);
    const held_blob *found = find(b, set, entry->name);
    bool same = found && found->entry.size == entry->size &&
                hash128_equal(&found->entry.hash, &entry->hash) && still_has(b, (size_t)(found - b->items));
    pthread_mutex_unlock(&b->mutex);
    return same;
}

ckd_status blobs_find(blob_entry *out, char path[1024], blobs *b, const char *set, const char *name,
                      ckd_error *err) {
    pthread_mutex_lock(&b->mutex);
    const held_blob *found = find(b, set, name);
    if (found) {
        *out = found->entry;
        snprintf(path, 1024, "%s/%s/%s", b->folder, set, name);
    }
    pthread_mutex_unlock(&b->mutex);
    return found ? CKD_OK : err_set(err, CKD_E_NOT_FOUND, "%s has no %s", set, name);
}

ckd_status blobs_list(blob_list *out, blobs *b, const char *set, ckd_error *err) {
    pthread_mutex_lock(&b->mutex);
    *out = (blob_list){.items = calloc(b->count + 1, sizeof(blob_entry))};
    /* backwards: an entry that is dropped gives its place to the last one */
    for (size_t i = b->count; i-- > 0 && out->items;) {
        if (strcmp(b->items[i].set, set) == 0 && still_has(b, i)) {
            out->items[out->count++] = b->items[i].entry;
        }
    }
    pthread_mutex_unlock(&b->mutex);
    return out->items ? CKD_OK : err_nomem(err, sizeof(blob_entry), "a list of files");
}

void blob_list_free(blob_list *list) {
    free(list->items);
    *list = (blob_list){.count = 0};
}

ckd_status blobs_remove(blobs *b, const char *set, const char *name, ckd_error *err) {
    char path[1024];
    if (!blob_names_valid(set, name[0] ? name : NULL)) {
        return err_set(err, CKD_E_INVALID, "'%.100s' is not a valid name of a copy", name);
    }
    pthread_rwlock_wrlock(&b->lock);
    pthread_mutex_lock(&b->mutex);
    for (size_t i = b->count; i-- > 0;) {
        if (strcmp(b->items[i].set, set) == 0 && (!name[0] || strcmp(b->items[i].entry.name, name) == 0)) {
            remove_at(b, i);
        }
    }
    if (!name[0]) {
        snprintf(path, sizeof(path), "%s/%s", b->folder, set);
        peer_remove_below(path, DEPTH_MAX + 1);
        (void)dir_remove(path, NULL);
    }
    pthread_mutex_unlock(&b->mutex);
    pthread_rwlock_unlock(&b->lock);
    return CKD_OK;
}

void blobs_remove_below(blobs *b, const char *set, const char *folder) {
    blob_list list;
    size_t length = strlen(folder);
    if (blobs_list(&list, b, set, NULL) != CKD_OK) {
        return;
    }
    for (size_t i = 0; i < list.count; i++) {
        const char *name = list.items[i].name;
        if (strncmp(name, folder, length) == 0 && name[length] == '/') {
            (void)blobs_remove(b, set, name, NULL);
        }
    }
    blob_list_free(&list);
}

/* ---- arrivals ---- */

static ckd_status reserve(blobs *b, const blob_entry *entry, uint64_t *number, ckd_error *err) {
    pthread_mutex_lock(&b->mutex);
    bool fits = entry->size <= b->budget_bytes && b->used_bytes <= b->budget_bytes - entry->size;
    b->used_bytes += fits ? entry->size : 0;
    *number = ++b->arrivals;
    pthread_mutex_unlock(&b->mutex);
    return fits ? CKD_OK
                : err_set(err, CKD_E_NOSPACE,
                          "copies for other nodes may take %llu MiB there, and another %llu MiB do not fit",
                          (unsigned long long)(b->budget_bytes >> 20),
                          (unsigned long long)(entry->size >> 20) + 1);
}

static void release(blobs *b, uint64_t size) {
    pthread_mutex_lock(&b->mutex);
    b->used_bytes -= size;
    pthread_mutex_unlock(&b->mutex);
}

/* Names the blob and the place of its file. */
static ckd_status place(arrival *out, blobs *b, const char *set, const blob_entry *entry, ckd_error *err) {
    *out = (arrival){.to = b, .entry = *entry};
    if (!blob_names_valid(set, entry->name)) {
        return err_set(err, CKD_E_INVALID, "'%.100s' is not a valid name of a copy", entry->name);
    }
    snprintf(out->set, sizeof(out->set), "%s", set);
    snprintf(out->path, sizeof(out->path), "%s/%s/%s", b->folder, set, entry->name);
    return CKD_OK;
}

ckd_status arrival_begin(arrival *out, blobs *b, const char *set, const blob_entry *entry, ckd_error *err) {
    uint64_t number;
    ckd_status status = place(out, b, set, entry, err);
    THEN(status, reserve(b, entry, &number, err));
    if (status != CKD_OK) {
        return status;
    }
    snprintf(out->temp, sizeof(out->temp), "%s/.tmp-%llu", b->folder, (unsigned long long)number);
    status = dir_create(b->folder, true, err); /* somebody may have removed it */
    THEN(status, file_create(&out->file, out->temp, 0, err));
    if (status != CKD_OK) {
        release(b, entry->size);
    }
    return status;
}

ckd_status arrival_add(arrival *a, const bytes *packet, ckd_error *err) {
    uint64_t left = a->entry.size - a->done;
    if (packet->size != (left < PEER_PACKET ? left : PEER_PACKET) || left == 0) {
        return err_set(err, CKD_E_INVALID, "a packet of %s does not have the announced length",
                       a->entry.name);
    }
    hash128 hash = hash128_of(packet->data, packet->size);
    bytes_put(&a->hashes, hash.bytes, sizeof(hash.bytes));
    a->done += packet->size;
    return a->hashes.failed ? err_nomem(err, a->hashes.size, "hashes")
                            : file_append(a->file, packet->data, packet->size, err);
}

static ckd_status publish(arrival *a, ckd_error *err) {
    blobs *b = a->to;
    pthread_rwlock_wrlock(&b->lock);
    pthread_mutex_lock(&b->mutex);
    ckd_status status = ARRAY_GROW(b->items, b->capacity, b->count + 1, "copies", err);
    THEN(status, make_folders(b->folder, a->path, err));
    THEN(status, file_rename(a->temp, a->path, err));
    if (status == CKD_OK) {
        held_blob *old = find(b, a->set, a->entry.name);
        b->used_bytes -= old ? old->entry.size : 0;
        old = old ? old : &b->items[b->count++];
        snprintf(old->set, sizeof(old->set), "%s", a->set);
        old->entry = a->entry;
    }
    pthread_mutex_unlock(&b->mutex);
    pthread_rwlock_unlock(&b->lock);
    return status;
}

ckd_status arrival_end(arrival *a, ckd_status status, ckd_error *err) {
    hash128 hash = hash128_of(a->hashes.data, a->hashes.size);
    if (status == CKD_OK && (a->done != a->entry.size || !hash128_equal(&hash, &a->entry.hash))) {
        status =
            err_set(err, CKD_E_CORRUPT,
                    "%s did not arrive as it was announced: its bytes do not have their hash", a->entry.name);
    }
    ckd_status closed = file_close(a->file, status == CKD_OK ? err : NULL);
    status = status == CKD_OK ? closed : status;
    THEN(status, publish(a, err));
    if (status != CKD_OK) {
        (void)file_remove(a->temp, true, NULL);
        release(a->to, a->entry.size);
    }
    bytes_free(&a->hashes);
    return status;
}

ckd_status blobs_keep(blobs *b, const char *set, const char *name, const char *path, ckd_error *err) {
    arrival a;
    uint64_t number;
    blob_entry entry = {.size = 0};
    snprintf(entry.name, sizeof(entry.name), "%s", name);
    ckd_status status = blob_file_hash(&entry, path, err);
    THEN(status, place(&a, b, set, &entry, err));
    THEN(status, reserve(b, &entry, &number, err));
    if (status == CKD_OK) {
        snprintf(a.temp, sizeof(a.temp), "%s", path);
        status = publish(&a, err);
        if (status != CKD_OK) {
            release(b, entry.size);
        }
    }
    if (status != CKD_OK) {
        (void)file_remove(path, true, NULL);
    }
    return status;
}

/* ---- files as they are sent ---- */

typedef ckd_status (*packet_fn)(void *context, const uint8_t *data, size_t size, ckd_error *err);

static ckd_status each_packet(hash128 *hash, const char *path, const peer_range *range, packet_fn use,
                              void *context, ckd_error *err) {
    uint64_t size = range->size;
    file_reader *f = NULL;
    bytes hashes = {.size = 0};
    uint8_t *packet = malloc(PEER_PACKET);
    ckd_status status =
        packet ? file_open_read(&f, path, err) : err_nomem(err, PEER_PACKET, "a packet of a file");
    for (uint64_t at = 0; at < size && status == CKD_OK; at += PEER_PACKET) {
        size_t length = size - at < PEER_PACKET ? (size_t)(size - at) : PEER_PACKET;
        status = file_read_at(f, range->offset + at, packet, length, err);
        if (status == CKD_OK) {
            hash128 one = hash128_of(packet, length);
            bytes_put(&hashes, one.bytes, sizeof(one.bytes));
            status = use ? use(context, packet, length, err) : CKD_OK;
        }
    }
    if (status == CKD_OK && hashes.failed) {
        status = err_nomem(err, hashes.size, "hashes");
    }
    *hash = hash128_of(hashes.data, hashes.size);
    bytes_free(&hashes);
    file_close_read(f);
    free(packet);
    return status;
}

ckd_status blob_range_hash(blob_entry *out, const char *path, const peer_range *range, ckd_error *err) {
    out->size = range->size;
    return each_packet(&out->hash, path, range, NULL, NULL, err);
}

ckd_status blob_file_hash(blob_entry *out, const char *path, ckd_error *err) {
    return blob_range_hash(out, path, &(peer_range){0, file_bytes(path)}, err);
}

ckd_status blobs_find_sound(blob_entry *out, char path[1024], blobs *b, const char *set, const char *name,
                            ckd_error *err) {
    blob_entry now;
    ckd_status status = blobs_find(out, path, b, set, name, err);
    THEN(status, blob_file_hash(&now, path, err));
    if (status == CKD_OK && (now.size != out->size || !hash128_equal(&now.hash, &out->hash))) {
        status = err_set(err, CKD_E_CORRUPT, "its copy of %s has changed since it arrived", name);
    }
    return status;
}

typedef struct sending {
    wire *to;
    bucket *limit;
} sending;

static ckd_status send_packet(void *context, const uint8_t *data, size_t size, ckd_error *err) {
    const sending *s = context;
    ckd_status status = s->limit ? bucket_take(s->limit, size, err) : CKD_OK;
    THEN(status, frame_send(s->to, FRAME_DATA, data, size, err));
    return status;
}

ckd_status blob_send(hash128 *hash, wire *w, const char *path, const peer_range *range, bucket *limit,
                     ckd_error *err) {
    sending s = {w, limit};
    return each_packet(hash, path, range, send_packet, &s, err);
}
