/* This node's states as files in memory, and what is shown of their copies. */
#include "agent/parity.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define KEEP_LAST   2
#define CHAIN_BYTES 5 /* deltas on a base take at most about the bytes of this many states */
#define CHAIN_MIN   2 /* states in a chain */
#define CHAIN_GROWS 4 /* each chain length is this many times the previous one */
#define CHAIN_MAX   32
#define CHAIN_COST  8 /* base loads that loading a state may cost */

/* ---- begin and end ---- */

static void lock_path(char out[600], const tier *t) {
    snprintf(out, 600, "%s/lock", t->folder);
}

static ckd_status choose_folder(tier *t, ckd_error *err) {
    const char *wanted = t->agent->options.copies;
    if (!wanted) {
        snprintf(t->folder, sizeof(t->folder), "/dev/shm/ckptdelta-%lu-%016llx", (unsigned long)geteuid(),
                 (unsigned long long)hash64(t->agent->socket, strlen(t->agent->socket)));
    } else if (wanted[0] != '/' || strlen(wanted) > 200) {
        return err_set(err, CKD_E_INVALID,
                       "the folder for copies is an absolute path of at most 200 bytes, not '%.100s'",
                       wanted);
    } else {
        snprintf(t->folder, sizeof(t->folder), "%s", wanted);
    }
    return local_private_folder(t->folder, err);
}

/* Two agents in the same folder would remove each other's files. */
static ckd_status lock_folder(tier *t, ckd_error *err) {
    char path[600];
    ckd_error why = {.offset = CKD_NO_OFFSET};
    lock_holder holder = {.process = 0};
    lock_path(path, t);
    ckd_status status = lock_acquire(&t->lock, path, LOCK_EXCLUSIVE, true, 1, &why);
    if (status != CKD_E_BUSY) {
        return err_from(err, status, &why);
    }
    (void)lock_find_holder(&holder, path);
    return err_set(err, CKD_E_BUSY,
                   "the folder for copies %s has an agent already, process %lld: give each agent a folder of "
                   "its own (--copies)",
                   t->folder, (long long)holder.process);
}

/* Removes only our own names, because somebody else may have made the folder. */
static void clear_folder(const tier *t) {
    static const char *const own[] = {"own", "held", "pieces", "work", "disk"};
    char path[600];
    for (size_t i = 0; i < sizeof(own) / sizeof(own[0]); i++) {
        snprintf(path, sizeof(path), "%s/%s", t->folder, own[i]);
        peer_remove_below(path, 12);
        (void)dir_remove(path, NULL);
    }
}

/* Removes the lock last, because only its holder may remove it. */
static void leave_folder(tier *t) {
    char path[600];
    if (t->lock) {
        clear_folder(t);
        lock_path(path, t);
        (void)file_remove(path, true, NULL);
    }
    if (t->lock && !t->agent->options.copies) {
        (void)dir_remove(t->folder, NULL);
    }
    lock_release(t->lock);
}

/* Drops messages of the copies' store: deletions of old states are normal there. */
static void say_nothing(void *context, const char *message) {
    (void)context;
    (void)message;
}

/* Old states are deleted at once; their chunk files stay while newer states build on them. Nothing is compacted. */
static ckd_status open_store(tier *t, ckd_error *err) {
    char path[600];
    ckd_policy policy = CKD_POLICY_INIT;
    ckd_store_options options = CKD_STORE_OPTIONS_INIT;
    snprintf(path, sizeof(path), "%s/own", t->folder);
    options.threads = t->agent->options.threads;
    options.on_message = t->agent->options.on_message;
    options.message_context = t->agent->options.message_context;
    options.on_info = say_nothing;
    policy.keep_last = KEEP_LAST;
    policy.automatic = 1;
    policy.undo_s = 0;
    policy.compact_share = CKD_NO_COMPACTION;
    ckd_status status = ckd_store_open(&t->store, path, CKD_OPEN_CREATE, &options, err);
    THEN(status, ckd_store_set_policy(t->store, &policy, err));
    return status;
}

void tier_set_name(char out[PEER_SET_MAX + 1], const char *node) {
    snprintf(out, PEER_SET_MAX + 1, "n-%s", node);
    for (char *c = out; *c; c++) {
        bool plain =
            (*c >= '0' && *c <= '9') || (*c >= 'a' && *c <= 'z') || (*c >= 'A' && *c <= 'Z') || *c == '.';
        *c = plain || *c == '-' ? *c : '_';
    }
}

/* Copies wait while any trainer is busy, because all share the network and the memory. */
static bool trainers_are_busy(void *context) {
    agent *a = ((tier *)context)->agent;
    bool busy = false;
    pthread_mutex_lock(&a->mutex);
    for (const holding *h = a->holdings; h && !busy; h = h->next) {
        busy = h->shown.connected && h->set && slot_is_busy(&h->set->slots[0]);
    }
    pthread_mutex_unlock(&a->mutex);
    return busy;
}

static ckd_status begin_node(tier *t, ckd_error *err) {
    char held[600];
    const ckd_agent_options *o = &t->agent->options;
    snprintf(held, sizeof(held), "%s/held", t->folder);
    return peer_node_begin(&t->node,
                           &(peer_options){.hosts = &t->hosts,
                                           .secret = o->peers ? &t->secret : NULL,
                                           .folder = held,
                                           .budget_bytes = o->copies_bytes,
                                           .bytes_per_s = o->send_bytes_per_s,
                                           .silence_ms = (uint32_t)(o->silence_s * 1000),
                                           .answer = restart_answer,
                                           .on_change = mirror_peer_changed,
                                           .is_busy = trainers_are_busy,
                                           .context = t},
                           err);
}

static ckd_status check_options(const ckd_agent_options *o, ckd_error *err) {
    if (o->peers && !o->secret) {
        return err_set(
            err, CKD_E_INVALID,
            "agents of several nodes need a secret: a file of mode 0600 with the same 16 bytes or more on all nodes");
    }
    if (o->replicate && (o->parity || o->parity_data)) {
        return err_set(err, CKD_E_INVALID, "other nodes have whole copies or parity, not both");
    }
    if (!o->peers && (o->local_every_s > 0 || o->replicate || o->parity)) {
        return err_set(
            err, CKD_E_INVALID,
            "without other nodes every state goes to the local disk: the time between states there, "
            "copies and parity need peers");
    }
    bool fine = (o->silence_s == 0 || (o->silence_s >= 0.1 && o->silence_s <= 3600)) &&
                o->store_every_s >= 0 && o->store_every_s <= 1e9 && o->local_every_s >= 0 &&
                o->local_every_s <= 1e9;
    return fine
               ? CKD_OK
               : err_set(
                     err, CKD_E_INVALID,
                     "the silence of a peer is 0.1 to 3600 seconds, and the time between stored states not negative");
}

/* Without a list, this node is the only one, under its own name. */
static ckd_status read_hosts(tier *t, ckd_error *err) {
    const ckd_agent_options *o = &t->agent->options;
    if (o->peers) {
        ckd_status status = peer_secret_read(&t->secret, o->secret, err);
        THEN(status, peer_hosts_read(&t->hosts, o->peers, o->self, err));
        return status;
    }
    return peer_hosts_alone(&t->hosts, err);
}

ckd_status tier_open(agent *a, ckd_error *err) {
    if (!a->options.peers && !a->options.local) {
        return CKD_OK;
    }
    tier *t = calloc(1, sizeof(*t));
    if (!t) {
        return err_nomem(err, sizeof(*t), "copies on other nodes");
    }
    a->tier = t;
    t->agent = a;
    a->options.copies_bytes = a->options.copies_bytes ? a->options.copies_bytes : a->options.memory_bytes / 2;
    pthread_mutex_init(&t->store_mutex, NULL);
    pthread_mutex_init(&t->restart_mutex, NULL);
    pthread_mutex_init(&t->mutex, NULL);
    peer_condition_init(&t->changed);
    ckd_status status = check_options(&a->options, err);
    a->options.replicate = a->options.replicate || !a->options.peers ? a->options.replicate : 1;
    THEN(status, read_hosts(t, err));
    t->peers = status == CKD_OK ? calloc(t->hosts.count, sizeof(*t->peers)) : NULL;
    if (status == CKD_OK && !t->peers) {
        status = err_nomem(err, t->hosts.count * sizeof(*t->peers), "other nodes");
    }
    if (status != CKD_OK) {
        return status;
    }
    tier_set_name(t->set, t->hosts.items[t->hosts.self].name);
    status = choose_folder(t, err);
    THEN(status, lock_folder(t, err));
    if (status == CKD_OK) {
        clear_folder(t); /* files of a killed agent; we hold the lock, so it has ended */
    }
    THEN(status, open_store(t, err));
    THEN(status, parity_begin(t, err));
    THEN(status, disk_copies_open(t, err));
    THEN(status, begin_node(t, err));
    THEN(status, mirror_begin(t, err));
    THEN(status, disk_copies_begin(t, err));
    return status;
}

/*
 * Removes this node's copies at peers. Peers that cannot be reached keep them until an agent of this name starts again.
 */
static void remove_copies(tier *t) {
    if (t->parity) {
        pieces_leave(t);
    }
    for (size_t i = 0; i < t->hosts.count; i++) {
        if (t->peers[i].has && i != t->hosts.self && peer_alive(t->node, i)) {
            (void)peer_delete(t->node, i, t->set, "", NULL);
        }
    }
}

void tier_close(agent *a, bool durable) {
    tier *t = a->tier;
    if (!t) {
        return;
    }
    if (t->node && durable) {
        peer_node_stop_sending(t->node); /* sending at a low rate limit may take hours */
        mirror_end(t);
        remove_copies(t);
    }
    if (t->node) {
        peer_node_stop(t->node);
    }
    mirror_end(t);
    peer_node_end(t->node); /* nobody asks for copies any more */
    disk_copies_end(t, durable);
    parity_end(t);
    ckd_store_close(t->store);
    leave_folder(t);
    peer_hosts_free(&t->hosts);
    free(t->peers);
    bytes_free(&t->decisions);
    pthread_cond_destroy(&t->changed);
    pthread_mutex_destroy(&t->mutex);
    pthread_mutex_destroy(&t->store_mutex);
    pthread_mutex_destroy(&t->restart_mutex);
    free(t);
    a->tier = NULL;
}

/* ---- states ---- */

static uint64_t change(tier *t, uint64_t kept, uint64_t kept_bytes) {
    pthread_mutex_lock(&t->mutex);
    uint64_t version = ++t->version;
    t->kept += kept;
    t->kept_bytes += kept_bytes;
    pthread_cond_broadcast(&t->changed);
    pthread_mutex_unlock(&t->mutex);
    return version;
}

void tier_name_files(char out[CKD_RUN_MAX + 1], const char *run, const slot_peer *who) {
    if (who->world) {
        slot_part_run(out, run, who->rank);
    } else {
        snprintf(out, CKD_RUN_MAX + 1, "%s", run);
    }
}

static uint64_t own_bytes(const tier *t) {
    char path[600];
    uint64_t size = 0;
    snprintf(path, sizeof(path), "%s/own", t->folder);
    size = dir_bytes(&size, path, NULL) == CKD_OK ? size : 0;
    return t->parity ? size + atomic_load(&t->parity->dropped_bytes) : size;
}

/* Removes steps of a run from `first` on, except `except`: a trainer that went back to an older state replaces them. */
static ckd_status remove_from(bool *any, tier *t, const char *run, uint64_t first, const ckd_id *except,
                              ckd_error *err) {
    ckd_checkpoint_list *list = NULL;
    ckd_delete_options now = CKD_DELETE_OPTIONS_INIT;
    now.undo_s = 0;
    *any = false;
    ckd_status status = ckd_store_list(&list, t->store, run, err);
    for (size_t i = 0; status == CKD_OK && i < list->count; i++) {
        const ckd_checkpoint *c = &list->items[i];
        if (c->step >= first && !(except && memcmp(&c->id, except, sizeof(*except)) == 0)) {
            status = ckd_store_delete(t->store, &c->id, 1, &now, err);
            *any = true;
        }
    }
    if (status == CKD_OK && *any) {
        status = ckd_store_collect(NULL, t->store, NULL, err);
    }
    ckd_checkpoint_list_free(list);
    return status;
}

/*
 * Whether a new chain begins at this step. Exact states need all deltas of their chain, so a chain ends before these
 * take too much memory. It ends at the same steps on all nodes of a job, so that nodes with parity drop their files
 * together. Only a few chain lengths are possible, so that nodes whose deltas differ slightly in size use the same one.
 * The states of a run are about equally many steps apart.
 */
static bool begins_chain(const tier *t, const char *run, uint64_t step) {
    ckd_checkpoint_list *list = NULL;
    const ckd_checkpoint *last = NULL;
    uint64_t length = CHAIN_MIN;
    bool begins = false;
    if (ckd_store_list(&list, t->store, run, NULL) != CKD_OK) {
        return false;
    }
    for (size_t i = 0; i < list->count; i++) {
        last = list->items[i].step < step ? &list->items[i] : last;
    }
    if (last && last->kind == CKD_DELTA) {
        uint64_t all = CHAIN_BYTES * last->raw_bytes;
        while (length < CHAIN_MAX && CHAIN_GROWS * length * last->stored_bytes <= all) {
            length *= CHAIN_GROWS;
        }
        begins = step / (step - last->step) % length == 0;
    }
    ckd_checkpoint_list_free(list);
    return begins;
}

ckd_status tier_save(ckd_checkpoint *out, uint64_t *version, tier *t, const slot_part *p, ckd_error *err) {
    bool removed;
    const ckd_save_options *o = &p->content->request.options;
    ckd_id id = p->plan ? slot_part_id(&o->checkpoint_id, p->who.rank) : o->checkpoint_id;
    char run[CKD_RUN_MAX + 1];
    tier_name_files(run, p->content->request.run, &p->who);
    pthread_mutex_lock(&t->store_mutex);
    uint64_t limit = t->agent->options.copies_bytes, size = slot_part_bytes(p);
    ckd_status status = CKD_OK;
    if (own_bytes(t) + size > limit) { /* a new base takes less than the earlier states with their chains */
        status = remove_from(&removed, t, run, 0, &id, err);
    }
    uint64_t used = own_bytes(t);
    if (status == CKD_OK && used + size > limit) {
        status = err_set(
            err, CKD_E_NOSPACE,
            "a state of %llu KiB does not fit: files of this node's states take %llu KiB, and may take %llu "
            "KiB; start the agent with a larger --copies-budget",
            (unsigned long long)(size >> 10), (unsigned long long)(used >> 10),
            (unsigned long long)(limit >> 10));
    }
    THEN(status, remove_from(&removed, t, run, o->step, &id, err));
    if (status == CKD_OK) {
        slot_part copy = *p;
        copy.base = begins_chain(t, run, o->step);
        copy.max_load_cost = CHAIN_COST;
        status =
            p->plan ? slot_part_save(out, t->store, &copy, err) : slot_save_copy(out, t->store, &copy, err);
    }
    if (status == CKD_OK && t->parity) {
        pieces_record_step(t, o->step);
    }
    pthread_mutex_unlock(&t->store_mutex);
    *version = status == CKD_OK ? change(t, 1, size) : 0;
    return status;
}

void tier_forget(tier *t, const char *run, const slot_peer *who) {
    bool removed = false;
    char files[CKD_RUN_MAX + 1];
    tier_name_files(files, run, who);
    pthread_mutex_lock(&t->store_mutex);
    (void)remove_from(&removed, t, files, 0, NULL, NULL);
    pthread_mutex_unlock(&t->store_mutex);
    if (removed) {
        (void)change(t, 0, 0);
        disk_copies_forget(t);
    }
}

uint32_t tier_wanted(const tier *t) {
    return t->parity ? (uint32_t)t->parity->count - 1 : t->agent->options.replicate;
}

bool tier_is_alone(const tier *t) {
    return t->hosts.count == 1 && !t->agent->options.peers;
}

bool tier_await_copies(tier *t, uint64_t version) {
    bool alone = tier_is_alone(t);
    pthread_mutex_lock(&t->mutex);
    while ((alone ? disk_copies_lag(t, version) : t->mirrored < version) && !t->stopping && !t->hurries) {
        pthread_cond_wait(&t->changed, &t->mutex);
    }
    bool on_disk = t->disk && t->disk->version >= version;
    uint32_t have = 0;
    for (size_t i = 0; i < t->hosts.count; i++) {
        have += t->peers[i].partner && t->peers[i].has >= version;
    }
    pthread_mutex_unlock(&t->mutex);
    return alone ? on_disk : have >= tier_wanted(t);
}

void tier_hurry(tier *t, bool hurry) {
    pthread_mutex_lock(&t->mutex);
    t->hurries += hurry ? 1 : -1;
    pthread_cond_broadcast(&t->changed);
    pthread_mutex_unlock(&t->mutex);
}

bool tier_is_poor(tier *t) {
    pthread_mutex_lock(&t->mutex);
    bool poor = t->poor;
    pthread_mutex_unlock(&t->mutex);
    return poor;
}

bool tier_is_tight(tier *t) {
    pthread_mutex_lock(&t->mutex);
    bool tight = t->tight;
    pthread_mutex_unlock(&t->mutex);
    return tight;
}

/* ---- status ---- */

static ckd_agent_peer describe_peer(const tier *t, size_t i) {
    const tier_peer *p = &t->peers[i];
    ckd_agent_peer out = {.alive = peer_alive(t->node, i),
                          .partner = p->partner,
                          .behind = p->partner ? t->version - p->has : 0,
                          .sent_bytes = p->sent_bytes};
    snprintf(out.name, sizeof(out.name), "%s", t->hosts.items[i].name);
    snprintf(out.domain, sizeof(out.domain), "%s", t->hosts.items[i].domain);
    snprintf(out.trouble, sizeof(out.trouble), "%s", p->trouble);
    return out;
}

void tier_describe(slot_agent *about, bytes *out, tier *t) {
    about->own_bytes = own_bytes(t);
    about->held_bytes = peer_held_bytes(t->node);
    about->local_bytes = disk_copies_bytes(t);
    pthread_mutex_lock(&t->mutex);
    about->replicate = tier_wanted(t);
    about->parity_data = t->parity ? t->parity->data : 0;
    about->parity = t->parity ? t->parity->lost : 0;
    about->replicated = t->replicated;
    about->kept = t->kept;
    about->kept_bytes = t->kept_bytes;
    for (size_t i = 0; i < t->hosts.count; i++) {
        if (i != t->hosts.self) {
            ckd_agent_peer shown = describe_peer(t, i);
            bytes_put(out, &shown, sizeof(shown));
            about->peers++;
        }
    }
    disk_copies_describe(about, t);
    bytes_put(out, t->decisions.data, t->decisions.size);
    about->decision_bytes = t->decisions.size;
    pthread_mutex_unlock(&t->mutex);
}
