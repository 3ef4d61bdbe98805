/*
 * Snapshots as files: taking, writing and removing them. Taking one links the files of the store in memory, so that they
 * stay while they are written to a folder on the disk. The folder gets its name once all of it is durable. Chunk files
 * that two snapshots have are one file with two names.
 */
#include "agent/disk_files.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#define NEW "new"
#define OLD "old"

/* ---- paths ---- */

path_text disk_path(const local_disk *d, const char *snapshot, const char *name) {
    path_text p;
    snprintf(p.text, sizeof(p.text), "%s/%s%s%s", d->folder, snapshot, name[0] ? "/" : "", name);
    return p;
}

number_text disk_number_text(uint64_t snapshot) {
    number_text n;
    snprintf(n.text, sizeof(n.text), "%" PRIu64, snapshot);
    return n;
}

static path_text link_folder(const tier *t) {
    path_text p;
    snprintf(p.text, sizeof(p.text), "%s/disk", t->folder);
    return p;
}

static path_text link_path(const tier *t, size_t i) {
    path_text p;
    snprintf(p.text, sizeof(p.text), "%s/disk/%zu", t->folder, i);
    return p;
}

uint64_t disk_number_from(const char *name) {
    char *end = NULL;
    uint64_t number = name[0] >= '1' && name[0] <= '9' ? strtoull(name, &end, 10) : 0;
    return end && *end == '\0' ? number : 0;
}

static void remove_folder(const local_disk *d, const char *name) {
    path_text path = disk_path(d, name, "");
    peer_remove_below(path.text, 12);
    (void)dir_remove(path.text, NULL);
}

/* It loses its name first: half of a snapshot must not pass for a damaged one. */
static void remove_snapshot(const local_disk *d, const char *name) {
    remove_folder(d, OLD);
    if (file_rename(disk_path(d, name, "").text, disk_path(d, OLD, "").text, NULL) == CKD_OK &&
        dir_sync(d->folder, NULL) == CKD_OK) {
        remove_folder(d, OLD);
    }
}

void disk_remove_others(const local_disk *d, uint64_t kept) {
    dir_list names;
    remove_folder(d, NEW);
    remove_folder(d, OLD);
    if (dir_list_read(&names, d->folder, NULL) != CKD_OK) {
        return;
    }
    for (size_t i = 0; i < names.count; i++) {
        uint64_t number = disk_number_from(names.names[i]);
        if (number && number != kept) {
            remove_snapshot(d, names.names[i]);
        }
    }
    dir_list_free(&names);
}

/* ---- taking ---- */

/* Does the last snapshot have this chunk file? These never change under their names. */
static bool has_chunk_file(const local_disk *d, const char *name) {
    return d->number && copy_is_chunk_file(name) &&
           file_exists(disk_path(d, disk_number_text(d->number).text, name).text);
}

ckd_status disk_link_files(local_disk *d, ckd_error *err) {
    tier *t = d->tier;
    char own[600], from[PATH_BYTES];
    snprintf(own, sizeof(own), "%s/own", t->folder);
    peer_remove_below(link_folder(t).text, 1);
    ckd_status status = dir_create(link_folder(t).text, true, err);
    pthread_mutex_lock(&t->store_mutex);
    THEN(status, ckd_store_list(&d->states, t->store, NULL, err));
    THEN(status, copy_names_read(&d->names, own, true, err));
    for (size_t i = 0; i < d->names.count && status == CKD_OK; i++) {
        if (!has_chunk_file(d, d->names.items[i])) {
            snprintf(from, sizeof(from), "%s/%s", own, d->names.items[i]);
            status = file_link(from, link_path(t, i).text, err);
        }
    }
    pthread_mutex_unlock(&t->store_mutex);
    return status;
}

void disk_forget_links(local_disk *d) {
    peer_remove_below(link_folder(d->tier).text, 1);
    ckd_checkpoint_list_free(d->states);
    d->states = NULL;
    copy_names_free(&d->names);
}

/* ---- writing ---- */

static ckd_status make_folders(const local_disk *d, ckd_error *err) {
    ckd_status status = dir_create(disk_path(d, NEW, "").text, false, err);
    THEN(status, dir_create(disk_path(d, NEW, "data").text, false, err));
    for (size_t f = 0; f < COPY_FOLDERS; f++) {
        THEN(status, dir_create(disk_path(d, NEW, copy_folders[f]).text, false, err));
    }
    return status;
}

static ckd_status sync_folders(const local_disk *d, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t f = 0; f < COPY_FOLDERS; f++) {
        THEN(status, dir_sync(disk_path(d, NEW, copy_folders[f]).text, err));
    }
    THEN(status, dir_sync(disk_path(d, NEW, "data").text, err));
    THEN(status, dir_sync(disk_path(d, NEW, "").text, err));
    return status;
}

static ckd_status write_file(const local_disk *d, const char *from, const char *to, ckd_error *err) {
    file_writer *f = NULL;
    ckd_status status = file_clone(from, to, err);
    uint64_t size = file_bytes(to);
    THEN(status, file_continue(&f, to, size, 0, err));
    if (status == CKD_OK) {
        status = file_sync(f, err);
        if (status == CKD_OK) {
            status = file_close(f, err);
        } else {
            file_discard(f);
        }
    }
    if (status == CKD_OK) {
        pthread_mutex_lock(&d->tier->mutex);
        d->tier->disk->written_bytes += size;
        pthread_mutex_unlock(&d->tier->mutex);
    }
    return status;
}

/* A chunk file that the last snapshot has gets a second name, or is copied where the file system has no links. */
static ckd_status add_file(const local_disk *d, size_t i, ckd_error *err) {
    const char *name = d->names.items[i];
    path_text to = disk_path(d, NEW, name);
    if (!has_chunk_file(d, name)) {
        return write_file(d, link_path(d->tier, i).text, to.text, err);
    }
    path_text last = disk_path(d, disk_number_text(d->number).text, name);
    return file_link(last.text, to.text, NULL) == CKD_OK ? CKD_OK : write_file(d, last.text, to.text, err);
}

ckd_status disk_write_snapshot(local_disk *d, uint64_t number, ckd_error *err) {
    remove_folder(d, NEW);
    ckd_status status = dir_create(d->folder, true, err);
    THEN(status, make_folders(d, err));
    for (size_t i = 0; i < d->names.count && status == CKD_OK; i++) {
        status = mirror_is_stopping(d->tier) ? err_set(err, CKD_E_CANCELLED, "the agent is ending")
                                             : add_file(d, i, err);
    }
    THEN(status, sync_folders(d, err));
    THEN(status,
         file_rename(disk_path(d, NEW, "").text, disk_path(d, disk_number_text(number).text, "").text, err));
    THEN(status, dir_sync(d->folder, err));
    return status;
}
