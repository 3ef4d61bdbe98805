/* Updates the copies of this node's files on other nodes. */
#include "agent/parity.h"

#include <stdio.h>
#include <stdlib.h>

#include "base/threads.h"

#define NICE    10
#define RETRY_S 1

/* ---- one peer ---- */

static bool is_there(const blob_list *list, const char *name) {
    for (size_t i = 0; i < list->count; i++) {
        if (strcmp(list->items[i].name, name) == 0) {
            return true;
        }
    }
    return false;
}

bool mirror_is_stopping(tier *t) {
    pthread_mutex_lock(&t->mutex);
    bool stops = t->stopping;
    pthread_mutex_unlock(&t->mutex);
    return stops;
}

static ckd_status send_files(tier *t, size_t host, const copy_names *own, const blob_list *remote,
                             ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < own->count && status == CKD_OK; i++) {
        char path[1024];
        uint64_t sent = 0;
        if (mirror_is_stopping(t)) {
            return err_set(err, CKD_E_CANCELLED, "the agent is ending");
        }
        /*
         * A chunk file never changes under its name. Other files may: data/store, because each life of a node has a
         * store of its own, and a manifest, because the number of one that was deleted for good is used again. A peer
         * that has the same bytes does not get them again.
         */
        if (copy_is_chunk_file(own->items[i]) && is_there(remote, own->items[i])) {
            continue;
        }
        snprintf(path, sizeof(path), "%s/own/%s", t->folder, own->items[i]);
        status = peer_put(&sent, t->node, host, &(peer_copy){t->set, own->items[i], path, NULL}, err);
        pthread_mutex_lock(&t->mutex);
        t->peers[host].sent_bytes += sent;
        pthread_mutex_unlock(&t->mutex);
    }
    return status;
}

static ckd_status remove_files(tier *t, size_t host, const copy_names *own, const blob_list *remote,
                               ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t f = COPY_FOLDERS; f-- > 0;) {
        for (size_t i = 0; i < remote->count && status == CKD_OK; i++) {
            const char *name = remote->items[i].name;
            bool here = strncmp(name, copy_folders[f], strlen(copy_folders[f])) == 0;
            status =
                here && !copy_names_have(own, name) ? peer_delete(t->node, host, t->set, name, err) : CKD_OK;
        }
    }
    return status;
}

/*
 * Whether old states may be removed before the newest has arrived. They may not while the store lacks them. Then the
 * round fails, and states that are not stored go to the store, as after any loss of copies. From then on all states do.
 */
static bool may_make_room(tier *t) {
    if (!holdings_defer(t->agent)) {
        return true;
    }
    pthread_mutex_lock(&t->mutex);
    bool was_tight = t->tight;
    t->tight = true;
    pthread_mutex_unlock(&t->mutex);
    if (!was_tight) {
        agent_say(t->agent,
                  "another node has no room for two states of this one beside each other, so that all states "
                  "go to the store, too: start the agents with a larger --copies-budget");
    }
    return false;
}

/* Errors: NOT_FOUND (a file was removed meanwhile), and those of the calls on peers. */
static ckd_status mirror_to(tier *t, size_t host, ckd_error *err) {
    copy_names own = {.count = 0};
    blob_list remote = {.count = 0};
    ckd_status status = peer_list(&remote, t->node, host, t->set, err);
    THEN(status, copy_names_list(&own, t, err));
    THEN(status, send_files(t, host, &own, &remote, err));
    if (status == CKD_E_NOSPACE && !t->parity &&
        may_make_room(t)) { /* old states make room; files that have arrived are not sent again */
        status = remove_files(t, host, &own, &remote, err);
        blob_list_free(&remote);
        THEN(status, peer_list(&remote, t->node, host, t->set, err));
        THEN(status, send_files(t, host, &own, &remote, err));
    }
    if (!t->parity) { /* with parity, this happens later, when all nodes have the new files */
        THEN(status, remove_files(t, host, &own, &remote, err));
    }
    copy_names_free(&own);
    blob_list_free(&remote);
    return status;
}

/* Removes files that are not in `kept` and that this node does not have now. */
static ckd_status clear(tier *t, size_t host, copy_names *kept, ckd_error *err) {
    blob_list remote = {.count = 0};
    ckd_status status = CKD_OK;
    if (t->parity->unclear) {
        status = peer_list(&remote, t->node, host, t->set, err);
        THEN(status, copy_names_list(kept, t, err));
        THEN(status, remove_files(t, host, kept, &remote, err));
        blob_list_free(&remote);
    }
    THEN(status, pieces_drop(t, host, err)); /* others may have dropped their files meanwhile */
    return status;
}

typedef ckd_status (*update_fn)(tier *t, size_t host, ckd_error *err);

/* With parity: if something does not fit, removes old files and tries again. */
static ckd_status update_or_free_space(tier *t, size_t host, update_fn update, ckd_error *err) {
    ckd_status status = update(t, host, err);
    t->parity->unclear = true;
    if (status == CKD_E_NOSPACE && may_make_room(t)) {
        copy_names kept = {.count = 0};
        status = clear(t, host, &kept, err);
        copy_names_free(&kept);
        THEN(status, update(t, host, err));
    }
    return status;
}

/* ---- rounds ---- */

static bool is_alive(void *context, size_t host) {
    const tier *t = context;
    return peer_alive(t->node, host);
}

/* With parity, all nodes of the group are partners. */
static void choose_partners(tier *t) {
    size_t chosen[PEER_HOSTS_MAX];
    const parity *p = t->parity;
    size_t count =
        p ? p->count : peer_hosts_partners(chosen, &t->hosts, t->hosts.self, tier_wanted(t), is_alive, t);
    for (size_t i = 0; i < t->hosts.count; i++) {
        t->peers[i].partner = false;
    }
    for (size_t i = 0; i < count; i++) {
        size_t host = p ? p->members[i] : chosen[i];
        t->peers[host].partner = host != t->hosts.self;
    }
}

/* Reports once that copies are missing, and once that they are in place again. */
static void report(tier *t, uint32_t replicated) {
    uint32_t wanted = tier_wanted(t);
    if (tier_is_alone(t)) { /* the disk's thread reports */
        return;
    }
    pthread_mutex_lock(&t->mutex);
    bool was = t->poor, any = t->version > 1;
    t->replicated = replicated;
    t->poor = replicated < wanted && any;
    bool changed = was != t->poor && any;
    pthread_mutex_unlock(&t->mutex);
    if (!changed) {
        return;
    }
    if (t->parity) {
        agent_say(
            t->agent,
            replicated < wanted
                ? "%u of %u other nodes of the group have parity of this node's states: if a node fails "
                  "now, what is not in the store is lost. Training goes on"
                : "%u of %u other nodes of the group have parity of this node's states again",
            replicated, wanted);
    } else if (replicated < wanted) {
        agent_say(
            t->agent,
            "copies of this node's states are on %u other nodes instead of %u: if this node fails now, %s. "
            "Training goes on",
            replicated, wanted, replicated ? "they are all there is" : "what is not in the store is lost");
    } else {
        agent_say(t->agent, "copies of this node's states are on %u other nodes again", replicated);
    }
}

/* Removes copies that were placed while other nodes were gone. */
static void remove_surplus(tier *t) {
    for (size_t i = 0; i < t->hosts.count; i++) {
        if (i != t->hosts.self && !t->peers[i].partner && t->peers[i].has && peer_alive(t->node, i) &&
            peer_delete(t->node, i, t->set, "", NULL) == CKD_OK) {
            pthread_mutex_lock(&t->mutex);
            t->peers[i].has = 0;
            pthread_mutex_unlock(&t->mutex);
        }
    }
}

/*
 * last: afterwards the peer has this version. Returns true if the update succeeded, so that the next step may follow.
 */
static bool update_peer(tier *t, size_t host, uint64_t version, update_fn update, bool last) {
    tier_peer *p = &t->peers[host];
    ckd_error why = {.offset = CKD_NO_OFFSET};
    ckd_status status = CKD_OK;
    if (t->parity) { /* parity of only some rows is useless */
        status = parity_check_group(t, &why);
    }
    pthread_mutex_lock(&t->mutex);
    bool asked = p->asked, done = p->has >= version;
    pthread_mutex_unlock(&t->mutex);
    if (status == CKD_OK && !asked) {
        status =
            err_set(&why, CKD_E_BUSY,
                    "it was not asked yet for what this node's last life has left, or could not store it");
    } else if (status == CKD_OK && !done) {
        status = t->parity ? update_or_free_space(t, host, update, &why) : update(t, host, &why);
    }
    pthread_mutex_lock(&t->mutex);
    if (status == CKD_OK && p->changes != p->round_changes) { /* the peer may have lost its files meanwhile */
        status = err_set(&why, CKD_E_IO, "it has lost them meanwhile");
    }
    p->has = status == CKD_OK && !done && last ? version : p->has;
    snprintf(p->trouble, sizeof(p->trouble), "%.255s", status == CKD_OK ? "" : why.message);
    pthread_mutex_unlock(&t->mutex);
    return status == CKD_OK;
}

static uint32_t update_peers(tier *t, uint64_t version, update_fn update, bool last) {
    uint32_t count = 0;
    for (size_t i = 0; i < t->hosts.count; i++) {
        count += t->peers[i].partner && update_peer(t, i, version, update, last);
    }
    return count;
}

static void note_trouble(tier *t, size_t host, const char *why) {
    pthread_mutex_lock(&t->mutex);
    snprintf(t->peers[host].trouble, sizeof(t->peers[host].trouble), "%.255s", why);
    pthread_mutex_unlock(&t->mutex);
}

/* Returns true if some files remain to be removed. */
static bool clear_all(tier *t, copy_names *kept) {
    bool left = false;
    for (size_t i = 0; i < t->hosts.count; i++) {
        ckd_error why;
        if (t->peers[i].partner && clear(t, i, kept, &why) != CKD_OK) {
            left = true;
            note_trouble(t, i, why.message);
        }
    }
    t->parity->unclear = left;
    return left;
}

/*
 * Each node of a group has a part of every state. So manifests are sent, and may replace older ones, only when all
 * nodes have the pieces. Files that are no longer needed are removed only when all nodes have the manifests. Returns
 * how many nodes have this version.
 */
static uint32_t do_parity(bool *left, tier *t, uint64_t version) {
    uint32_t count = 0, wanted = tier_wanted(t);
    copy_names kept = {.count = 0};
    ckd_error why;
    *left = pieces_notify(t);
    ckd_status status = copy_names_list(&kept, t, &why);
    THEN(status, pieces_look(t, &why));
    for (size_t i = 0; i < t->hosts.count && status != CKD_OK; i++) {
        note_trouble(t, i, why.message);
    }
    if (status == CKD_OK && update_peers(t, version, pieces_add, false) == wanted) {
        count = update_peers(t, version, mirror_to, true);
    }
    if (count == wanted) {
        *left |= clear_all(t, &kept);
    }
    copy_names_free(&kept);
    *left |= pieces_release(t);
    return count;
}

/* Returns true if all copies that can be made are up to date. */
static bool do_round(tier *t) {
    uint32_t partners = 0;
    bool left = false;
    pthread_mutex_lock(&t->mutex);
    choose_partners(t);
    uint64_t version = t->version;
    pthread_mutex_unlock(&t->mutex);
    restart_last_life(t);
    pthread_mutex_lock(&t->mutex);
    for (size_t i = 0; i < t->hosts.count; i++) {
        partners += t->peers[i].partner;
        t->peers[i].round_changes = t->peers[i].changes;
    }
    pthread_mutex_unlock(&t->mutex);
    uint32_t replicated =
        t->parity ? do_parity(&left, t, version) : update_peers(t, version, mirror_to, true);
    report(t, replicated);
    if (replicated == partners) {
        remove_surplus(t);
    }
    pthread_mutex_lock(&t->mutex);
    t->mirrored = version;
    bool rests = t->version == version && replicated == partners && !left &&
                 (!t->disk || t->peers[t->hosts.self].asked);
    pthread_cond_broadcast(&t->changed);
    pthread_mutex_unlock(&t->mutex);
    return rests;
}

static void *mirror_main(void *context) {
    tier *t = context;
    thread_lower_priority(NICE);
    peer_node_await_first_look(t->node);
    for (bool rests = false, stops = false; !stops;) {
        pthread_mutex_lock(&t->mutex);
        while (rests && !t->stopping && !t->woken && t->version == t->mirrored) {
            pthread_cond_wait(&t->changed, &t->mutex);
        }
        if (!rests && !t->stopping && !t->woken && t->version == t->mirrored) {
            peer_condition_wait_s(&t->changed, &t->mutex, RETRY_S);
        }
        t->woken = false;
        stops = t->stopping;
        pthread_mutex_unlock(&t->mutex);
        rests = stops || do_round(t);
    }
    return NULL;
}

void mirror_peer_changed(void *context, size_t host, bool alive, const char *why) {
    tier *t = context;
    const char *name = t->hosts.items[host].name;
    if (t->parity) {
        parity_peer_changed(t, host);
    }
    pthread_mutex_lock(&t->mutex);
    tier_peer *p = &t->peers[host];
    bool returns = alive && p->seen, goes = !alive && p->seen;
    p->seen |= alive;
    p->has = 0; /* its memory may be gone */
    p->changes++;
    t->asked_ns = alive ? 0 : t->asked_ns;
    snprintf(p->trouble, sizeof(p->trouble), "%.255s", alive ? "" : why);
    t->woken = true;
    pthread_cond_broadcast(&t->changed);
    pthread_mutex_unlock(&t->mutex);
    if (goes) {
        agent_say(t->agent, "node %s shows no sign of life: %s", name, why);
    } else if (returns) {
        agent_say(t->agent, "node %s is there again", name);
    }
}

ckd_status mirror_begin(tier *t, ckd_error *err) {
    pthread_mutex_lock(&t->mutex);
    t->version = 1; /* an empty store */
    pthread_mutex_unlock(&t->mutex);
    ckd_status status = thread_start(&t->mirror, mirror_main, t, err);
    t->mirroring = status == CKD_OK;
    return status;
}

void mirror_end(tier *t) {
    pthread_mutex_lock(&t->mutex);
    t->stopping = true;
    pthread_cond_broadcast(&t->changed);
    pthread_mutex_unlock(&t->mutex);
    if (t->mirroring) {
        pthread_join(t->mirror, NULL);
        t->mirroring = false;
    }
}
