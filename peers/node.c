/* This node among the others: begins and ends; signs of life. */
#include "peers/internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "base/file.h"
#include "base/local_socket.h"
#include "base/threads.h"

#define SILENCE_MS 5000
#define BEATS      5 /* signs of life while a peer may be silent */
#define RECENTLY   4 /* silences: a peer that was alive within them may be busy, and answer soon */

/* ---- waits that end by themselves ---- */

void peer_condition_init(pthread_cond_t *c) {
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    /* a date that is set back must not prolong a wait */
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(c, &monotonic);
    pthread_condattr_destroy(&monotonic);
}

void peer_condition_wait_s(pthread_cond_t *c, pthread_mutex_t *mutex, unsigned seconds) {
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += seconds;
    (void)pthread_cond_timedwait(c, mutex, &until);
}

/* ---- signs of life ---- */

static bool pause_for(const peer_node *node, uint32_t ms) {
    bool stops = false;
    local_wait(&node->stop, 1, (int)ms, &stops);
    return !stops;
}

static void report(peer *p, bool alive, const char *why) {
    peer_node *node = p->node;
    bool was = atomic_load(&p->alive), first = !atomic_load(&p->looked);
    if (alive) {
        atomic_store(&p->seen_ns, clock_monotonic_ns());
    } else if (was) {
        atomic_store(&p->lost_ns, clock_monotonic_ns());
        atomic_fetch_add(&p->losses, 1);
        atomic_store(&p->stale, true);
    }
    atomic_store(&p->alive, alive);
    if ((was != alive || first) && node->options.on_change) {
        node->options.on_change(node->options.context, p->host, alive, why);
    }
    pthread_mutex_lock(&node->mutex);
    atomic_store(&p->looked, true);
    pthread_cond_broadcast(&node->changed);
    pthread_mutex_unlock(&node->mutex);
}

/* Pings until one is not answered. */
static void keep_looking(peer *p, wire *w, ckd_error *err) {
    bytes answer = {.size = 0};
    bool answered;
    ckd_status status = CKD_OK;
    while (status == CKD_OK) {
        status = frame_send(w, FRAME_PING, NULL, 0, err);
        THEN(status, frame_take_answer(&answer, &answered, w, ANSWER_MAX, err));
        if (status == CKD_OK) {
            report(p, true, "");
        }
        if (!pause_for(p->node, p->node->options.silence_ms / BEATS)) {
            err_set(err, CKD_E_CANCELLED, "the agent is ending");
            break;
        }
    }
    bytes_free(&answer);
}

static void *peer_main(void *context) {
    peer *p = context;
    wire_limits limits = {p->node->options.silence_ms, p->node->stop, NULL, NULL};
    do {
        wire *w = NULL;
        ckd_error why = {.offset = CKD_NO_OFFSET};
        if (peer_connect(&w, p->node, p->host, &limits, &why) == CKD_OK) {
            keep_looking(p, w, &why);
        }
        wire_close(w);
        if (why.status != CKD_E_CANCELLED) {
            report(p, false, why.message);
        }
    } while (pause_for(p->node, p->node->options.silence_ms / BEATS));
    return NULL;
}

bool peer_alive(const peer_node *node, size_t host) {
    return host == node->options.hosts->self || atomic_load(&node->peers[host].alive);
}

void peer_node_await_first_look(peer_node *node) {
    pthread_mutex_lock(&node->mutex);
    for (size_t i = 0; i < node->options.hosts->count; i++) {
        bool stops = false;
        while (node->peers[i].started && !atomic_load(&node->peers[i].looked) && !stops) {
            peer_condition_wait_s(&node->changed, &node->mutex, 1);
            local_wait(&node->stop, 1, 0, &stops);
        }
    }
    pthread_mutex_unlock(&node->mutex);
}

uint64_t peer_patience_ns(const peer_node *node) {
    return (uint64_t)node->options.silence_ms * RECENTLY * 1000000;
}

/*
 * Counts from the moment at which this node noticed the silence. The time before may be one in which this node was
 * stopped itself.
 */
uint64_t peer_silence_ns(const peer_node *node, size_t host) {
    uint64_t lost_ns = peer_alive(node, host) ? 0 : atomic_load(&node->peers[host].lost_ns);
    return lost_ns ? clock_monotonic_ns() - lost_ns : 0;
}

static bool any_may_come_back(const peer_node *node) {
    uint64_t recently_ns = peer_patience_ns(node), now = clock_monotonic_ns();
    for (size_t i = 0; i < node->options.hosts->count; i++) {
        if (!peer_alive(node, i) && now - atomic_load(&node->peers[i].seen_ns) < recently_ns) {
            return true;
        }
    }
    return false;
}

void peer_node_await_recent(peer_node *node) {
    uint64_t begun = clock_monotonic_ns(), most_ns = (uint64_t)node->options.silence_ms * 1000000;
    bool stops = false;
    pthread_mutex_lock(&node->mutex);
    while (!stops && clock_monotonic_ns() - begun < most_ns && any_may_come_back(node)) {
        peer_condition_wait_s(&node->changed, &node->mutex, 1);
        local_wait(&node->stop, 1, 0, &stops);
    }
    pthread_mutex_unlock(&node->mutex);
}

/* ---- begin and end ---- */

static ckd_status start_peers(peer_node *node, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < node->options.hosts->count && status == CKD_OK; i++) {
        peer *p = &node->peers[i];
        p->node = node;
        p->host = i;
        atomic_store(&p->seen_ns, clock_monotonic_ns());
        pthread_mutex_init(&p->mutex, NULL);
    }
    for (size_t i = 0; i < node->options.hosts->count && status == CKD_OK; i++) {
        if (i != node->options.hosts->self) {
            status = thread_start(&node->peers[i].thread, peer_main, &node->peers[i], err);
            node->peers[i].started = status == CKD_OK;
        }
    }
    return status;
}

static ckd_status begin_network(peer_node *node, ckd_error *err) {
    ckd_status status = secret_usable(err);
    THEN(status, ucx_open(&node->net, err));
    THEN(status, serve_begin(node, err));
    return status;
}

ckd_status peer_node_begin(peer_node **out, const peer_options *options, ckd_error *err) {
    peer_node *node = calloc(1, sizeof(*node));
    if (!node) {
        return err_nomem(err, sizeof(*node), "a node");
    }
    node->options = *options;
    node->options.silence_ms = options->silence_ms ? options->silence_ms : SILENCE_MS;
    node->stop = -1;
    node->listener = -1;
    pthread_mutex_init(&node->mutex, NULL);
    peer_condition_init(&node->changed);
    ckd_status status = local_notifier(&node->stop, err);
    bucket_init(&node->limit, options, node->stop);
    node->peers = calloc(options->hosts->count, sizeof(*node->peers));
    if (status == CKD_OK && !node->peers) {
        status = err_nomem(err, options->hosts->count * sizeof(*node->peers), "the other nodes");
    }
    THEN(status, blobs_open(&node->held, options->folder, options->budget_bytes, err));
    THEN(status, options->secret ? begin_network(node, err) : CKD_OK);
    THEN(status, start_peers(node, err));
    if (status != CKD_OK) {
        peer_node_end(node);
        return status;
    }
    *out = node;
    return CKD_OK;
}

void peer_node_stop_sending(peer_node *node) {
    bucket_close(&node->limit);
}

void peer_node_stop(peer_node *node) {
    local_notify(node->stop);
}

void peer_node_end(peer_node *node) {
    if (!node) {
        return;
    }
    if (node->stop >= 0) {
        peer_node_stop(node);
    }
    serve_end(node);
    for (size_t i = 0; node->peers && i < node->options.hosts->count; i++) {
        peer *p = &node->peers[i];
        if (p->started) {
            pthread_join(p->thread, NULL);
        }
        wire_close(p->data);
        if (p->node) {
            pthread_mutex_destroy(&p->mutex);
        }
    }
    blobs_close(&node->held);
    ucx_close(node->net);
    bucket_destroy(&node->limit);
    local_close(node->stop);
    pthread_cond_destroy(&node->changed);
    pthread_mutex_destroy(&node->mutex);
    free(node->peers);
    free(node);
}

/* ---- what this node keeps ---- */

uint64_t peer_held_bytes(peer_node *node) {
    pthread_mutex_lock(&node->held.mutex);
    uint64_t used = node->held.used_bytes;
    pthread_mutex_unlock(&node->held.mutex);
    return used;
}

ckd_status peer_held_sets(char ***out, size_t *count, peer_node *node, ckd_error *err) {
    dir_list names;
    *out = NULL;
    *count = 0;
    ckd_status status = dir_list_read(&names, node->held.folder, err);
    if (status != CKD_OK) {
        return status;
    }
    char **sets = calloc(names.count + 1, sizeof(*sets));
    for (size_t i = 0; i < names.count && sets; i++) {
        if (names.names[i][0] != '.') {
            sets[(*count)++] = names.names[i];
            names.names[i] = NULL;
        }
    }
    dir_list_free(&names);
    *out = sets;
    return sets ? CKD_OK : err_nomem(err, sizeof(*sets), "a list of copies");
}

ckd_status peer_set_hold(char *path, size_t capacity, peer_node *node, const char *set, ckd_error *err) {
    pthread_rwlock_rdlock(&node->held.lock);
    int length = snprintf(path, capacity, "%s/%s", node->held.folder, set);
    if (!blob_names_valid(set, NULL) || length < 0 || (size_t)length >= capacity || !dir_exists(path)) {
        pthread_rwlock_unlock(&node->held.lock);
        return err_set(err, CKD_E_NOT_FOUND, "there are no copies of %.100s here", set);
    }
    return CKD_OK;
}

void peer_set_release(peer_node *node) {
    pthread_rwlock_unlock(&node->held.lock);
}

ckd_status peer_held_file(char *path, size_t capacity, peer_node *node, const char *set, const char *blob,
                          ckd_error *err) {
    blob_entry entry;
    char file[1024];
    ckd_status status = blobs_find_sound(&entry, file, &node->held, set, blob, err);
    if (status == CKD_OK && strlen(file) >= capacity) {
        return err_set(err, CKD_E_INVALID, "the path %.200s... is too long", file);
    }
    snprintf(path, capacity, "%s", status == CKD_OK ? file : "");
    return status;
}

ckd_status peer_keep(peer_node *node, const char *set, const char *blob, const char *path, ckd_error *err) {
    return blobs_keep(&node->held, set, blob, path, err);
}

ckd_status peer_held_remove(peer_node *node, const char *set, const char *blob, ckd_error *err) {
    return blobs_remove(&node->held, set, blob, err);
}

void peer_held_remove_below(peer_node *node, const char *set, const char *folder) {
    blobs_remove_below(&node->held, set, folder);
}
