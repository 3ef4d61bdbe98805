/*
 * Copies of this node's states on a local disk. They survive the agent, and are there when the node starts again. A
 * thread of their own brings them into line with the files in memory, so that a slow disk delays no copies on other
 * nodes.
 */
#include "agent/internal.h"

#include <stdio.h>
#include <stdlib.h>

#include "base/threads.h"

#define NICE       10
#define RETRY_NS   UINT64_C(5000000000)
#define PATH_BYTES 1100

/* ---- files ---- */

static void disk_path(char out[PATH_BYTES], const disk *d, const char *name) {
    snprintf(out, PATH_BYTES, "%s/copies/%s", d->folder, name);
}

static void stage_folder(char out[600], const tier *t) {
    snprintf(out, 600, "%s/disk", t->folder);
}

static void stage_path(char out[PATH_BYTES], const tier *t, size_t number) {
    char folder[600];
    stage_folder(folder, t);
    snprintf(out, PATH_BYTES, "%s/%zu", folder, number);
}

static ckd_status make_folders(const disk *d, ckd_error *err) {
    char path[PATH_BYTES];
    disk_path(path, d, "");
    path[strlen(path) - 1] = '\0';
    ckd_status status = dir_create(path, true, err);
    disk_path(path, d, "data");
    THEN(status, dir_create(path, true, err));
    for (size_t f = 0; f < COPY_FOLDERS; f++) {
        disk_path(path, d, copy_folders[f]);
        THEN(status, dir_create(path, true, err));
    }
    disk_path(path, d, "data");
    THEN(status, dir_sync(path, err));
    disk_path(path, d, "");
    THEN(status, dir_sync(path, err));
    THEN(status, dir_sync(d->folder, err));
    return status;
}

/* Removes all copies: what is there is of the agent's last life, or not needed any more. */
static void clear(const disk *d) {
    char path[PATH_BYTES];
    disk_path(path, d, "");
    peer_remove_below(path, 12);
}

static bool same_content(const char *a, const char *b) {
    blob_entry x, y;
    return file_bytes(a) == file_bytes(b) && blob_file_hash(&x, a, NULL) == CKD_OK &&
           blob_file_hash(&y, b, NULL) == CKD_OK && x.size == y.size && hash128_equal(&x.hash, &y.hash);
}

/* Does the disk have a chunk file? These never change under their names, and get them only when they are whole. */
static bool has_chunk_file(const disk *d, const char *name) {
    char path[PATH_BYTES];
    disk_path(path, d, name);
    return d->own && copy_is_chunk_file(name) && file_exists(path);
}

/* The file gets its name when its bytes are durable, and replaces another one of this name. */
static ckd_status write_file(disk *d, const char *from, const char *name, ckd_error *err) {
    char to[PATH_BYTES], temp[PATH_BYTES];
    file_writer *f = NULL;
    disk_path(to, d, name);
    disk_path(temp, d, "data/new");
    ckd_status status = file_remove(temp, true, err);
    THEN(status, file_clone(from, temp, err));
    uint64_t size = file_bytes(temp);
    THEN(status, file_continue(&f, temp, size, 0, err));
    if (status == CKD_OK) {
        status = file_sync(f, err);
        if (status == CKD_OK) {
            status = file_close(f, err);
        } else {
            file_discard(f);
        }
    }
    THEN(status, file_rename(temp, to, err));
    if (status == CKD_OK) {
        pthread_mutex_lock(&d->tier->mutex);
        d->written_bytes += size;
        pthread_mutex_unlock(&d->tier->mutex);
    }
    return status;
}

/* ---- one round ---- */

/*
 * Links what the disk lacks, so that it stays as it is now while it is written, whatever the store in memory removes.
 * *states: which ones these files have.
 */
static ckd_status stage(copy_names *out, ckd_checkpoint_list **states, const disk *d, ckd_error *err) {
    tier *t = d->tier;
    char own[600], folder[600], from[PATH_BYTES], to[PATH_BYTES];
    snprintf(own, sizeof(own), "%s/own", t->folder);
    stage_folder(folder, t);
    peer_remove_below(folder, 1);
    ckd_status status = dir_create(folder, true, err);
    pthread_mutex_lock(&t->store_mutex);
    THEN(status, ckd_store_list(states, t->store, NULL, err));
    THEN(status, copy_names_read(out, own, true, err));
    for (size_t i = 0; i < out->count && status == CKD_OK; i++) {
        if (!has_chunk_file(d, out->items[i])) {
            snprintf(from, sizeof(from), "%s/%s", own, out->items[i]);
            stage_path(to, t, i);
            status = file_link(from, to, err);
        }
    }
    pthread_mutex_unlock(&t->store_mutex);
    return status;
}

static bool same_folder(const char *a, const char *b) {
    return strncmp(a, b, (size_t)(strrchr(a, '/') - a) + 1) == 0;
}

/* Syncs the folder of a name. */
static ckd_status sync_folder(const disk *d, const char *name, ckd_error *err) {
    char path[PATH_BYTES];
    disk_path(path, d, name);
    *strrchr(path, '/') = '\0';
    return dir_sync(path, err);
}

/* Writes chunk files, or the others, in their order. A folder is durable before files of the next one appear. */
static ckd_status write_files(disk *d, const copy_names *names, bool chunk_files, ckd_error *err) {
    char from[PATH_BYTES], to[PATH_BYTES];
    const char *last = NULL;
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < names->count && status == CKD_OK; i++) {
        const char *name = names->items[i];
        if (copy_is_chunk_file(name) != chunk_files || has_chunk_file(d, name)) {
            continue;
        }
        if (mirror_is_stopping(d->tier)) {
            return err_set(err, CKD_E_CANCELLED, "the agent is ending");
        }
        stage_path(from, d->tier, i);
        disk_path(to, d, name);
        if (!chunk_files && same_content(from, to)) {
            continue;
        }
        status = last && !same_folder(last, name) ? sync_folder(d, last, err) : CKD_OK;
        THEN(status, write_file(d, from, name, err));
        last = name;
    }
    return status == CKD_OK && last ? sync_folder(d, last, err) : status;
}

/* Manifests go before the files that they name. */
static ckd_status remove_others(const disk *d, const copy_names *names, ckd_error *err) {
    char root[PATH_BYTES], path[PATH_BYTES];
    copy_names there = {.count = 0};
    const char *last = NULL;
    disk_path(root, d, "");
    root[strlen(root) - 1] = '\0';
    ckd_status status = copy_names_read(&there, root, true, err);
    for (size_t i = there.count; i-- > 0 && status == CKD_OK;) {
        const char *name = there.items[i];
        if (!copy_names_have(names, name)) {
            status = last && !same_folder(last, name) ? sync_folder(d, last, err) : CKD_OK;
            disk_path(path, d, name);
            THEN(status, file_remove(path, true, err));
            last = name;
        }
    }
    if (status == CKD_OK && last) {
        status = sync_folder(d, last, err);
    }
    copy_names_free(&there);
    return status;
}

/* What the last life left is in the store by now, or useless. */
static ckd_status take_over(disk *d, ckd_error *err) {
    if (d->own) {
        return CKD_OK;
    }
    pthread_rwlock_wrlock(&d->files);
    clear(d);
    ckd_status status = make_folders(d, err);
    pthread_rwlock_unlock(&d->files);
    d->own = status == CKD_OK;
    return status;
}

static ckd_status update(disk *d, const copy_names *names, ckd_error *err) {
    ckd_status status = write_files(d, names, true, err);
    pthread_rwlock_wrlock(&d->files);
    THEN(status, write_files(d, names, false, err));
    THEN(status, remove_others(d, names, err));
    pthread_rwlock_unlock(&d->files);
    return status;
}

/* Old copies make room for the newest ones, unless the store lacks their states. */
static ckd_status update_or_free_space(disk *d, const copy_names *names, ckd_error *err) {
    ckd_status status = update(d, names, err);
    if (status == CKD_E_NOSPACE && !holdings_defer(d->tier->agent)) {
        pthread_rwlock_wrlock(&d->files);
        status = remove_others(d, names, err);
        pthread_rwlock_unlock(&d->files);
        THEN(status, update(d, names, err));
    }
    return status;
}

static void note_steps(agent *a, const ckd_checkpoint_list *states) {
    char run[CKD_RUN_MAX + 1];
    pthread_mutex_lock(&a->mutex);
    for (holding *h = a->holdings; h; h = h->next) {
        tier_name_files(run, h->saves_to, &(slot_peer){.rank = h->rank, .world = h->world});
        for (size_t i = 0; i < states->count; i++) {
            if (strcmp(states->items[i].run, run) == 0) {
                h->shown.local_step = states->items[i].step; /* the last one is the newest */
            }
        }
    }
    pthread_mutex_unlock(&a->mutex);
}

/* Without other nodes, states that the disk lacks go to the store. */
static void end_round(disk *d, uint64_t version, uint64_t begun_ns, const ckd_error *why) {
    tier *t = d->tier;
    bool failed = why->status != CKD_OK && why->status != CKD_E_CANCELLED;
    pthread_mutex_lock(&t->mutex);
    bool was = d->trouble[0] != '\0';
    d->version = why->status == CKD_OK ? version : d->version;
    d->round_ns = begun_ns;
    snprintf(d->trouble, sizeof(d->trouble), "%.255s", failed ? why->message : "");
    t->poor = tier_is_alone(t) ? failed : t->poor;
    pthread_cond_broadcast(&t->changed);
    pthread_mutex_unlock(&t->mutex);
    if (failed && !was) {
        agent_say(t->agent,
                  "states are not copied to the local disk %s, the agent tries again: %s. Training goes on",
                  t->agent->options.local, why->message);
    } else if (was && !failed) {
        agent_say(t->agent, "states are copied to the local disk %s again", t->agent->options.local);
    }
}

static void do_round(disk *d) {
    tier *t = d->tier;
    copy_names names = {.count = 0};
    ckd_checkpoint_list *states = NULL;
    ckd_error why = {.status = CKD_OK, .offset = CKD_NO_OFFSET};
    char folder[600];
    uint64_t begun_ns = clock_monotonic_ns();
    pthread_mutex_lock(&t->mutex);
    uint64_t version = t->version;
    pthread_mutex_unlock(&t->mutex);
    ckd_status status = take_over(d, &why);
    THEN(status, stage(&names, &states, d, &why));
    THEN(status, update_or_free_space(d, &names, &why));
    if (status == CKD_OK) {
        note_steps(t->agent, states);
        why.status = CKD_OK;
    }
    end_round(d, version, begun_ns, &why);
    stage_folder(folder, t);
    peer_remove_below(folder, 1);
    ckd_checkpoint_list_free(states);
    copy_names_free(&names);
}

/* ---- the thread ---- */

/* Under the mutex. The last life's copies stay until the store has their states, or a newer one. */
static bool is_due(const disk *d) {
    const tier *t = d->tier;
    uint64_t since_ns = clock_monotonic_ns() - d->round_ns;
    bool rested =
        d->trouble[0] ? since_ns >= RETRY_NS : (double)since_ns * 1e-9 >= t->agent->options.local_every_s;
    return t->peers[t->hosts.self].asked && d->version < t->version && (rested || !d->round_ns);
}

/* Returns false once the agent ends. */
static bool await_work(disk *d) {
    tier *t = d->tier;
    pthread_mutex_lock(&t->mutex);
    while (!t->stopping && !is_due(d)) {
        if (d->version < t->version) {
            peer_condition_wait_s(&t->changed, &t->mutex, 1);
        } else {
            pthread_cond_wait(&t->changed, &t->mutex);
        }
    }
    bool goes_on = !t->stopping;
    pthread_mutex_unlock(&t->mutex);
    return goes_on;
}

static void *disk_main(void *context) {
    disk *d = context;
    thread_lower_priority(NICE);
    while (await_work(d)) {
        do_round(d);
    }
    return NULL;
}

/* ---- begin and end ---- */

static ckd_status lock_disk(disk *d, ckd_error *err) {
    char path[600];
    ckd_error why = {.offset = CKD_NO_OFFSET};
    lock_holder holder = {.process = 0};
    snprintf(path, sizeof(path), "%s/lock", d->folder);
    ckd_status status = lock_acquire(&d->lock, path, LOCK_EXCLUSIVE, true, 1, &why);
    if (status != CKD_E_BUSY) {
        return err_from(err, status, &why);
    }
    (void)lock_find_holder(&holder, path);
    return err_set(
        err, CKD_E_BUSY,
        "another agent of this store has its copies in %s, process %lld: give each node a folder of "
        "its own (--local)",
        d->tier->agent->options.local, (long long)holder.process);
}

/* Stores have folders of their own in it: a state of another store must not pass for one of this store. */
ckd_status disk_copies_open(tier *t, ckd_error *err) {
    const char *wanted = t->agent->options.local;
    char id[CKD_ID_TEXT];
    if (!wanted) {
        return CKD_OK;
    }
    if (wanted[0] != '/' || strlen(wanted) > 300) {
        return err_set(err, CKD_E_INVALID,
                       "the folder on the local disk is an absolute path of at most 300 bytes, not '%.100s'",
                       wanted);
    }
    disk *d = calloc(1, sizeof(*d));
    if (!d) {
        return err_nomem(err, sizeof(*d), "copies on a disk");
    }
    t->disk = d;
    d->tier = t;
    pthread_rwlock_init(&d->files, NULL);
    ckd_id_text(id, &t->agent->store_id);
    snprintf(d->folder, sizeof(d->folder), "%s/%s", wanted, id);
    ckd_status status = local_private_folder(wanted, err);
    THEN(status, local_private_folder(d->folder, err));
    THEN(status, dir_sync(wanted, err));
    THEN(status, lock_disk(d, err));
    return status;
}

ckd_status disk_copies_begin(tier *t, ckd_error *err) {
    disk *d = t->disk;
    ckd_status status = d ? thread_start(&d->thread, disk_main, d, err) : CKD_OK;
    if (d) {
        d->running = status == CKD_OK;
    }
    return status;
}

void disk_copies_end(tier *t, bool durable) {
    disk *d = t->disk;
    char path[600];
    if (!d) {
        return;
    }
    if (d->running) {
        pthread_join(d->thread, NULL);
    }
    if (d->lock && d->own && durable) { /* the lock goes last */
        clear(d);
        snprintf(path, sizeof(path), "%s/copies", d->folder);
        (void)dir_remove(path, NULL);
        snprintf(path, sizeof(path), "%s/lock", d->folder);
        (void)file_remove(path, true, NULL);
        (void)dir_remove(d->folder, NULL);
    }
    lock_release(d->lock);
    pthread_rwlock_destroy(&d->files);
    free(d);
    t->disk = NULL;
}

/* ---- for others ---- */

bool disk_copies_lags(const tier *t, uint64_t version) {
    const disk *d = t->disk;
    return d && t->peers[t->hosts.self].asked && !d->trouble[0] && d->version < version;
}

ckd_status disk_copies_hold(char *path, size_t capacity, tier *t, ckd_error *err) {
    if (!t->disk) {
        return err_set(err, CKD_E_NOT_FOUND, "this node has no copies on a disk");
    }
    pthread_rwlock_rdlock(&t->disk->files);
    int length = snprintf(path, capacity, "%s/copies", t->disk->folder);
    if (length < 0 || (size_t)length >= capacity || !dir_exists(path)) {
        pthread_rwlock_unlock(&t->disk->files);
        return err_set(err, CKD_E_NOT_FOUND, "there are no copies on the local disk");
    }
    return CKD_OK;
}

void disk_copies_release(tier *t) {
    pthread_rwlock_unlock(&t->disk->files);
}

uint64_t disk_copies_bytes(const tier *t) {
    uint64_t size = 0;
    return t->disk && dir_bytes(&size, t->disk->folder, NULL) == CKD_OK ? size : 0;
}

void disk_copies_describe(slot_agent *about, const tier *t) {
    const disk *d = t->disk;
    if (!d) {
        return;
    }
    snprintf(about->local, sizeof(about->local), "%s", t->agent->options.local);
    snprintf(about->local_trouble, sizeof(about->local_trouble), "%s",
             d->trouble[0] ? d->trouble
             : t->peers[t->hosts.self].asked
                 ? ""
                 : "it has states of this node's last life that are not in the store yet");
    about->local_behind = t->version - d->version;
    about->local_written_bytes = d->written_bytes;
}
