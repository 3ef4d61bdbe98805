/*
 * Snapshots of this node's files on a local disk. They survive the agent, and are there when the node starts again. The
 * thread that has saved a state takes a snapshot; the disk's thread writes it. Each snapshot is a store.
 */
#include "agent/disk_files.h"

#include <stdio.h>
#include <stdlib.h>

#include "base/threads.h"

#define NICE     10
#define RETRY_NS UINT64_C(5000000000)
#define SET      "disk-"

/* ---- taking a snapshot ---- */

bool disk_copies_ready(tier *t, const holding *h) {
    local_disk *d = t->disk;
    agent *a = t->agent;
    bool used = false;
    pthread_mutex_lock(&a->mutex);
    for (const holding *other = a->holdings; other; other = other->next) {
        /* a launch of a run has stored what the one before has left; another run must not replace it */
        bool waits = other->deferred && strcmp(other->shown.run, h->shown.run) != 0;
        used |= (other->shown.connected || waits) && other->world > 0 && id_equal(&other->group, &d->group);
    }
    bool own = !used || (h->world > 0 && id_equal(&h->group, &d->group));
    d->group = own && h->world > 0 ? h->group : d->group;
    pthread_mutex_unlock(&a->mutex);
    pthread_mutex_lock(&t->mutex);
    while (own && tier_is_alone(t) && d->state == DISK_WRITES && !d->trouble[0] && !t->stopping &&
           !t->hurries) {
        pthread_cond_wait(&t->changed, &t->mutex);
    }
    bool ready = own && d->state != DISK_WRITES && !t->stopping && t->peers[t->hosts.self].asked;
    pthread_mutex_unlock(&t->mutex);
    return ready;
}

bool disk_copies_due(tier *t) {
    const local_disk *d = t->disk;
    pthread_mutex_lock(&t->mutex);
    double since_s = (double)(clock_monotonic_ns() - d->taken_ns) * 1e-9;
    bool due = !d->taken_ns || since_s >= t->agent->options.local_every_s;
    pthread_mutex_unlock(&t->mutex);
    return due;
}

/* Without other nodes, states that the disk lacks go to the store. */
static void note_trouble(local_disk *d, const ckd_error *why) {
    tier *t = d->tier;
    bool failed = why != NULL;
    pthread_mutex_lock(&t->mutex);
    bool was = d->trouble[0] != '\0';
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

ckd_status disk_copies_take(tier *t, uint64_t version, ckd_error *err) {
    local_disk *d = t->disk;
    ckd_error why = {.status = CKD_OK, .offset = CKD_NO_OFFSET};
    pthread_mutex_lock(&t->mutex);
    while (d->state == DISK_LINKS) {
        pthread_cond_wait(&t->changed, &t->mutex);
    }
    bool taken = d->taken >= version, links = !taken && d->state == DISK_RESTS;
    if (links) {
        d->state = DISK_LINKS;
        d->taken = t->version; /* all files are there that have a version */
    }
    pthread_mutex_unlock(&t->mutex);
    if (taken) {
        return CKD_OK; /* by the thread of another rank */
    }
    if (!links) {
        return err_set(err, CKD_E_BUSY, "the last snapshot is being written");
    }
    ckd_status status = disk_link_files(d, &why);
    if (status != CKD_OK) {
        disk_forget_links(d);
        note_trouble(d, &why);
    }
    pthread_mutex_lock(&t->mutex);
    d->state = status == CKD_OK ? DISK_LINKED : DISK_RESTS;
    d->taken = status == CKD_OK ? d->taken : d->version;
    d->taken_ns = clock_monotonic_ns();
    pthread_cond_broadcast(&t->changed);
    pthread_mutex_unlock(&t->mutex);
    return err_from(err, status, &why);
}

void disk_copies_decide(tier *t, bool keep) {
    local_disk *d = t->disk;
    pthread_mutex_lock(&t->mutex);
    if (d->state == DISK_LINKED) { /* else the thread of another rank has decided */
        d->state = keep ? DISK_WRITES : DISK_RESTS;
        d->taken = keep ? d->taken : d->version;
        if (!keep) {
            disk_forget_links(d);
        }
        pthread_cond_broadcast(&t->changed);
    }
    pthread_mutex_unlock(&t->mutex);
}

void disk_copies_forget(tier *t) {
    local_disk *d = t->disk;
    if (d) {
        pthread_mutex_lock(&t->mutex);
        d->forgets = true;
        pthread_cond_broadcast(&t->changed);
        pthread_mutex_unlock(&t->mutex);
    }
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

/* ---- the thread ---- */

/* Under the mutex. */
static bool has_work(const local_disk *d) {
    return d->state == DISK_WRITES || (d->forgets && d->state == DISK_RESTS);
}

/* failed: the last attempt. Returns false once the agent ends. */
static bool await_work(local_disk *d, bool failed) {
    tier *t = d->tier;
    uint64_t begun_ns = clock_monotonic_ns();
    pthread_mutex_lock(&t->mutex);
    while (failed && !t->stopping && clock_monotonic_ns() - begun_ns < RETRY_NS) {
        peer_condition_wait_s(&t->changed, &t->mutex, 1);
    }
    while (!has_work(d) && !t->stopping) {
        pthread_cond_wait(&t->changed, &t->mutex);
    }
    bool goes_on = !t->stopping;
    pthread_mutex_unlock(&t->mutex);
    return goes_on;
}

static void remove_others(local_disk *d, uint64_t kept) {
    pthread_rwlock_wrlock(&d->files);
    disk_remove_others(d, kept);
    pthread_rwlock_unlock(&d->files);
}

/* Ends the snapshot. number: of the folder that has it; 0: it was not written. */
static void end_snapshot(local_disk *d, uint64_t number) {
    tier *t = d->tier;
    disk_forget_links(d);
    pthread_mutex_lock(&t->mutex);
    d->number = number;
    d->next += number > 0;
    d->version = number ? d->taken : d->version;
    d->taken = d->version;
    d->state = DISK_RESTS;
    pthread_cond_broadcast(&t->changed);
    pthread_mutex_unlock(&t->mutex);
}

/*
 * The snapshot before the last one stays until the next one is taken. For ranks that is when all nodes have the last
 * one, so there is always one that all of them have. Returns false after a failure.
 */
static bool write_it(local_disk *d) {
    ckd_error why;
    uint64_t number = d->next;
    remove_others(d, d->number);
    ckd_status status = disk_write_snapshot(d, number, &why);
    if (status == CKD_OK) {
        note_steps(d->tier->agent, d->states);
        end_snapshot(d, number);
        note_trouble(d, NULL);
    } else if (status != CKD_E_CANCELLED) {
        note_trouble(d, &why);
        if (d->number && !dir_exists(disk_path(d, disk_number_text(d->number).text, "").text)) {
            end_snapshot(d, 0); /* somebody has removed files that it needs; the next one has all files */
        }
    }
    return status == CKD_OK || status == CKD_E_CANCELLED;
}

/* The store has all states of a session that was closed. Its snapshots must not bring back what is deleted there. */
static void forget_states(local_disk *d) {
    tier *t = d->tier;
    ckd_checkpoint_list *list = NULL;
    pthread_mutex_lock(&t->store_mutex);
    bool empty = ckd_store_list(&list, t->store, NULL, NULL) == CKD_OK && list->count == 0;
    pthread_mutex_unlock(&t->store_mutex);
    ckd_checkpoint_list_free(list);
    pthread_mutex_lock(&t->mutex);
    d->forgets = false;
    bool removes = empty && d->state == DISK_RESTS && t->peers[t->hosts.self].asked;
    if (removes) {
        d->state = DISK_LINKS; /* nobody takes a snapshot meanwhile */
    }
    pthread_mutex_unlock(&t->mutex);
    if (removes) {
        remove_others(d, 0);
        end_snapshot(d, 0);
    }
}

static void *disk_main(void *context) {
    local_disk *d = context;
    thread_lower_priority(NICE);
    for (bool failed = false; await_work(d, failed);) {
        pthread_mutex_lock(&d->tier->mutex);
        bool writes = d->state == DISK_WRITES;
        pthread_mutex_unlock(&d->tier->mutex);
        if (writes) {
            failed = !write_it(d);
        } else {
            forget_states(d);
        }
    }
    return NULL;
}

/* ---- begin and end ---- */

static ckd_status lock_disk(local_disk *d, ckd_error *err) {
    ckd_error why = {.offset = CKD_NO_OFFSET};
    lock_holder holder = {.process = 0};
    path_text path = disk_path(d, "lock", "");
    ckd_status status = lock_acquire(&d->lock, path.text, LOCK_EXCLUSIVE, true, 1, &why);
    if (status != CKD_E_BUSY) {
        return err_from(err, status, &why);
    }
    (void)lock_find_holder(&holder, path.text);
    return err_set(
        err, CKD_E_BUSY,
        "another agent of this store has its copies in %s, process %lld: give each node a folder of "
        "its own (--local)",
        d->tier->agent->options.local, (long long)holder.process);
}

/* Numbers go on where the agent before ended. */
static ckd_status find_next(local_disk *d, ckd_error *err) {
    dir_list names;
    ckd_status status = dir_list_read(&names, d->folder, err);
    d->next = 1;
    for (size_t i = 0; status == CKD_OK && i < names.count; i++) {
        uint64_t number = disk_number_from(names.names[i]);
        d->next = number >= d->next ? number + 1 : d->next;
    }
    if (status == CKD_OK) {
        dir_list_free(&names);
    }
    return status;
}

/* The folder above an absolute path. */
static path_text parent_of(const char *path) {
    path_text parent;
    snprintf(parent.text, sizeof(parent.text), "%s", path);
    char *slash = strrchr(parent.text, '/');
    slash[slash == parent.text] = '\0';
    return parent;
}

static ckd_status check_place(const char *wanted, ckd_error *err) {
    if (wanted[0] != '/' || strlen(wanted) > 300) {
        return err_set(err, CKD_E_INVALID,
                       "the folder on the local disk is an absolute path of at most 300 bytes, not '%.100s'",
                       wanted);
    }
    path_text parent = parent_of(wanted);
    return dir_exists(parent.text)
               ? CKD_OK
               : err_set(
                     err, CKD_E_NOT_FOUND,
                     "the folder %s for copies on the local disk cannot be made: %s does not exist. Is the "
                     "disk mounted?",
                     wanted, parent.text);
}

/* Stores have folders of their own in it: a state of another store must not pass for one of this store. */
ckd_status disk_copies_open(tier *t, ckd_error *err) {
    const char *wanted = t->agent->options.local;
    char id[CKD_ID_TEXT];
    if (!wanted) {
        return CKD_OK;
    }
    ckd_status status = check_place(wanted, err);
    if (status != CKD_OK) {
        return status;
    }
    local_disk *d = calloc(1, sizeof(*d));
    if (!d) {
        return err_nomem(err, sizeof(*d), "copies on a disk");
    }
    t->disk = d;
    d->tier = t;
    pthread_rwlock_init(&d->files, NULL);
    ckd_id_text(id, &t->agent->store_id);
    snprintf(d->folder, sizeof(d->folder), "%s/%s", wanted, id);
    status = local_private_folder(wanted, err);
    THEN(status, local_private_folder(d->folder, err));
    THEN(status, dir_sync(wanted, err));
    THEN(status, dir_sync(parent_of(wanted).text, err));
    THEN(status, lock_disk(d, err));
    THEN(status, find_next(d, err));
    return status;
}

ckd_status disk_copies_begin(tier *t, ckd_error *err) {
    local_disk *d = t->disk;
    ckd_status status = d ? thread_start(&d->thread, disk_main, d, err) : CKD_OK;
    if (d) {
        d->running = status == CKD_OK;
    }
    return status;
}

void disk_copies_end(tier *t, bool durable) {
    local_disk *d = t->disk;
    if (!d) {
        return;
    }
    if (d->running) {
        pthread_join(d->thread, NULL);
    }
    /* copies of the agent's last life may still be needed; the lock goes last */
    if (d->lock && durable && t->peers[t->hosts.self].asked) {
        disk_remove_others(d, 0);
        (void)file_remove(disk_path(d, "lock", "").text, true, NULL);
        (void)dir_remove(d->folder, NULL);
    }
    disk_forget_links(d);
    lock_release(d->lock);
    pthread_rwlock_destroy(&d->files);
    free(d);
    t->disk = NULL;
}

/* ---- for others ---- */

bool disk_copies_lag(const tier *t, uint64_t version) {
    const local_disk *d = t->disk;
    return d && d->state != DISK_RESTS && !d->trouble[0] && d->taken >= version && d->version < version;
}

bool disk_copies_is_set(const char *set) {
    return strncmp(set, SET, strlen(SET)) == 0;
}

ckd_status disk_copies_sets(char ***out, size_t *count, const tier *t, ckd_error *err) {
    dir_list names = {.count = 0};
    *count = 0;
    ckd_status status = t->disk ? dir_list_read(&names, t->disk->folder, err) : CKD_OK;
    *out = status == CKD_OK ? calloc(names.count + 1, sizeof(**out)) : NULL;
    if (status == CKD_OK && !*out) {
        status = err_nomem(err, names.count * sizeof(**out), "a list of copies");
    }
    for (size_t i = 0; status == CKD_OK && i < names.count; i++) {
        if (disk_number_from(names.names[i])) {
            char set[PEER_SET_MAX + 1];
            snprintf(set, sizeof(set), SET "%.100s", names.names[i]);
            (*out)[*count] = strdup(set);
            *count += (*out)[*count] != NULL;
        }
    }
    dir_list_free(&names);
    return status;
}

ckd_status disk_copies_hold(char *path, size_t capacity, tier *t, const char *set, ckd_error *err) {
    local_disk *d = t->disk;
    if (!d) {
        return err_set(err, CKD_E_NOT_FOUND, "this node has no copies on a disk");
    }
    pthread_rwlock_rdlock(&d->files);
    const char *number = set + strlen(SET);
    int length = snprintf(path, capacity, "%s/%s", d->folder, number);
    if (!disk_number_from(number) || length < 0 || (size_t)length >= capacity || !dir_exists(path)) {
        pthread_rwlock_unlock(&d->files);
        return err_set(err, CKD_E_NOT_FOUND, "there are no copies %.100s here", set);
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
    const local_disk *d = t->disk;
    if (!d) {
        return;
    }
    bool asked = t->peers[t->hosts.self].asked;
    snprintf(about->local, sizeof(about->local), "%s", t->agent->options.local);
    snprintf(about->local_trouble, sizeof(about->local_trouble), "%s",
             d->trouble[0] ? d->trouble
             : asked       ? ""
                           : "it has states of this node's last life that are not in the store yet");
    about->local_behind = t->version - d->version;
    about->local_written_bytes = d->written_bytes;
}
