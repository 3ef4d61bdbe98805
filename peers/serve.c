/* Connections of other nodes: a thread each. */
#include "peers/internal.h"

#include <stdio.h>
#include <stdlib.h>

#include "base/file.h"
#include "base/local_socket.h"
#include "base/threads.h"

#define CONNECTIONS_MAX 1024
#define HELLO_MS        5000
#define PACKET_MS       300000 /* senders may be throttled */
#define LINGER_MS       1000
#define PAUSE_MS        50

typedef struct served {
    peer_node *node;
    wire *wire;
    uint64_t *stranger; /* its entry in node->strangers, until it has proved the secret */
    bytes body;
} served;

static wire_limits limits_of(const peer_node *node, uint32_t silence_ms) {
    return (wire_limits){silence_ms, node->stop, NULL, NULL};
}

/* ---- requests: each returns whether the connection goes on ---- */

static bool answer(served *s, ckd_status status, const ckd_error *why, const bytes *body) {
    return frame_answer(s->wire, status, why, body, NULL) == CKD_OK;
}

static ckd_status read_about(char set[PEER_SET_MAX + 1], blob_entry *entry, const served *s, ckd_error *err) {
    reader r = reader_of(s->body.data, s->body.size);
    memset(entry, 0, sizeof(*entry));
    reader_string(&r, set, PEER_SET_MAX + 1);
    reader_string(&r, entry->name, sizeof(entry->name));
    entry->size = reader_u64(&r);
    const void *hash = reader_take(&r, sizeof(entry->hash));
    memcpy(&entry->hash, hash ? hash : (hash128){{0}}.bytes, sizeof(entry->hash));
    return r.failed || !blob_names_valid(set, entry->name[0] ? entry->name : NULL)
               ? err_set(err, CKD_E_INVALID, "the request for copies is invalid")
               : CKD_OK;
}

/* A packet that is damaged does not end the connection: its length was right. */
static bool take_packets(served *s, arrival *a, ckd_status *status, ckd_error *why) {
    uint64_t left = a->entry.size;
    wire_limits limits = limits_of(s->node, PACKET_MS);
    wire_set_limits(s->wire, &limits);
    while (left > 0) {
        frame_kind kind;
        ckd_error now;
        ckd_status one = frame_receive(&kind, &s->body, s->wire, &now);
        bool whole = (one == CKD_OK || (one == CKD_E_CORRUPT && s->body.size > 0)) && s->body.size <= left &&
                     s->body.size > 0;
        if (!whole || (one == CKD_OK && kind != FRAME_DATA)) {
            *status = one == CKD_OK ? err_set(why, CKD_E_INVALID, "this is not a packet of a copy")
                                    : err_from(why, one, &now);
            return false;
        }
        left -= s->body.size;
        *status = *status == CKD_OK ? err_from(why, one, &now) : *status;
        THEN(*status, arrival_add(a, &s->body, why));
    }
    return true;
}

static bool take_put(served *s, ckd_error *why) {
    char set[PEER_SET_MAX + 1];
    blob_entry entry;
    arrival a;
    uint8_t wanted = 1;
    bytes reply = {&wanted, 1, 1, false};
    ckd_status status = read_about(set, &entry, s, why);
    if (status == CKD_OK && blobs_has(&s->node->held, set, &entry)) {
        wanted = 0;
        return answer(s, CKD_OK, NULL, &reply);
    }
    THEN(status, arrival_begin(&a, &s->node->held, set, &entry, why));
    if (status != CKD_OK) {
        return answer(s, status, why, NULL);
    }
    bool goes_on = answer(s, CKD_OK, NULL, &reply);
    if (!goes_on) {
        status = err_set(why, CKD_E_IO, "the sender is gone");
    } else {
        goes_on = take_packets(s, &a, &status, why);
    }
    status = arrival_end(&a, status, why);
    return answer(s, status, why, NULL) && goes_on;
}

/* The copy is read twice: damage is said before any of it is sent. */
static ckd_status find_sound(blob_entry *entry, char path[1024], served *s, ckd_error *why) {
    char set[PEER_SET_MAX + 1];
    blob_entry asked;
    ckd_status status = read_about(set, &asked, s, why);
    THEN(status, blobs_find_sound(entry, path, &s->node->held, set, asked.name, why));
    return status;
}

static bool take_fetch(served *s, ckd_error *why) {
    blob_entry entry = {.size = 0};
    char path[1024];
    hash128 sent;
    bytes head = {.size = 0};
    wire_limits limits = limits_of(s->node, s->node->options.silence_ms); /* of a peer that is stopped */
    wire_set_limits(s->wire, &limits);
    pthread_rwlock_rdlock(&s->node->held.lock);
    ckd_status status = find_sound(&entry, path, s, why);
    bytes_put_u64(&head, entry.size);
    bytes_put(&head, entry.hash.bytes, sizeof(entry.hash.bytes));
    bool goes_on = answer(s, status, why, &head);
    if (goes_on && status == CKD_OK) {
        status = blob_send(&sent, s->wire, path, &(peer_range){0, entry.size}, NULL, why);
        goes_on = status == CKD_OK && answer(s, CKD_OK, NULL, NULL);
    }
    pthread_rwlock_unlock(&s->node->held.lock);
    bytes_free(&head);
    return goes_on;
}

static bool take_list(served *s, ckd_error *why) {
    char set[PEER_SET_MAX + 1];
    blob_entry entry;
    blob_list list = {.count = 0};
    bytes body = {.size = 0};
    ckd_status status = read_about(set, &entry, s, why);
    THEN(status, blobs_list(&list, &s->node->held, set, why));
    bytes_put_u32(&body, (uint32_t)list.count);
    for (size_t i = 0; i < list.count; i++) {
        bytes_put_string(&body, list.items[i].name);
        bytes_put_u64(&body, list.items[i].size);
        bytes_put(&body, list.items[i].hash.bytes, sizeof(hash128));
    }
    bool goes_on = answer(s, status, why, &body);
    bytes_free(&body);
    blob_list_free(&list);
    return goes_on;
}

static bool take_delete(served *s, ckd_error *why) {
    char set[PEER_SET_MAX + 1];
    blob_entry entry;
    ckd_status status = read_about(set, &entry, s, why);
    THEN(status, blobs_remove(&s->node->held, set, entry.name, why));
    return answer(s, status, why, NULL);
}

static bool take_query(served *s, ckd_error *why) {
    const peer_options *o = &s->node->options;
    bytes reply = {.size = 0};
    ckd_status status = o->answer ? o->answer(o->context, &reply, &s->body, why)
                                  : err_set(why, CKD_E_UNSUPPORTED, "nobody answers queries here");
    bool goes_on = answer(s, status, why, &reply);
    bytes_free(&reply);
    return goes_on;
}

static bool take_request(served *s, frame_kind kind) {
    ckd_error why = {.offset = CKD_NO_OFFSET};
    switch (kind) {
    case FRAME_PING:
        return answer(s, CKD_OK, NULL, NULL);
    case FRAME_PUT:
        return take_put(s, &why);
    case FRAME_FETCH:
        return take_fetch(s, &why);
    case FRAME_LIST:
        return take_list(s, &why);
    case FRAME_DELETE:
        return take_delete(s, &why);
    case FRAME_ASK:
        return take_query(s, &why);
    default:
        err_set(&why, CKD_E_INVALID, "the request has the unknown kind %d", (int)kind);
        (void)answer(s, CKD_E_INVALID, &why, NULL);
        return false;
    }
}

/* ---- the connection ---- */

/* Takes the greeting, and answers with the proof of this node. `name` is that of who connects. */
static ckd_status take_hello(greeting *g, char name[PEER_NAME_MAX + 1], served *s, ckd_error *err) {
    uint8_t own[SECRET_NONCE + SECRET_PROOF];
    const bytes proof = {own, sizeof(own), sizeof(own), false};
    const peer_hosts *hosts = s->node->options.hosts;
    reader r = reader_of(s->body.data, s->body.size);
    reader_string(&r, name, PEER_NAME_MAX + 1);
    const void *nonce = reader_take(&r, SECRET_NONCE);
    ckd_status status = r.failed || !nonce ? err_set(err, CKD_E_INVALID, "the greeting is invalid") : CKD_OK;
    if (status == CKD_OK) {
        *g = (greeting){.names = {[CONNECTS] = name, [LISTENS] = hosts->items[hosts->self].name}};
        memcpy(g->nonces[CONNECTS], nonce, SECRET_NONCE);
        status = random_bytes(g->nonces[LISTENS], SECRET_NONCE, err);
    }
    THEN(status, secret_prove(own + SECRET_NONCE, s->node->options.secret, g, LISTENS, err));
    if (status == CKD_OK) {
        memcpy(own, g->nonces[LISTENS], SECRET_NONCE);
    }
    return answer(s, status, err, &proof) ? status : CKD_E_IO;
}

static ckd_status take_proof(const greeting *g, served *s, ckd_error *err) {
    ckd_status status = s->body.size == SECRET_PROOF
                            ? secret_check(s->body.data, s->node->options.secret, g, CONNECTS, err)
                            : err_set(err, CKD_E_INVALID, "the greeting is invalid");
    return answer(s, status, err, NULL) ? status : CKD_E_IO;
}

/* Does the connection go on with UCX? If not both nodes can, and have a network in common, it stays on its socket. */
static ckd_status take_address(served *s, ckd_error *err) {
    bytes own = {.size = 0};
    ckd_status status = frame_expect(&s->body, s->wire, FRAME_ADDRESS, err);
    if (status != CKD_OK) {
        return status;
    }
    if (s->body.size > 0) {
        wire_address(&own, s->wire);
    }
    if (wire_reach(s->wire, &s->body, NULL) != CKD_OK) {
        bytes_clear(&own);
    }
    status = answer(s, CKD_OK, NULL, &own) ? CKD_OK : CKD_E_IO;
    wire_switch(s->wire);
    bytes_free(&own);
    return status;
}

/* Until the secret is proved nothing is read that is long, and UCX is not used. */
static bool is_no_stranger(served *s) {
    ckd_error why;
    greeting g;
    char name[PEER_NAME_MAX + 1];
    wire_limits limits = limits_of(s->node, HELLO_MS);
    wire_set_limits(s->wire, &limits);
    ckd_status status = frame_receive_hello(&s->body, s->wire, FRAME_HELLO, &why);
    THEN(status, take_hello(&g, name, s, &why));
    THEN(status, frame_receive_hello(&s->body, s->wire, FRAME_PROOF, &why));
    THEN(status, take_proof(&g, s, &why));
    THEN(status, take_address(s, &why));
    if (status == CKD_E_UNSUPPORTED) { /* any frame tells another version which one is here */
        (void)frame_answer(s->wire, status, &why, NULL, NULL);
    }
    return status == CKD_OK;
}

/* The last answer must arrive before the connection ends. */
static void linger(served *s) {
    uint8_t byte;
    wire_limits limits = limits_of(s->node, LINGER_MS);
    wire_set_limits(s->wire, &limits);
    (void)wire_receive(s->wire, &byte, 1, NULL);
}

static void *serve_main(void *context) {
    served *s = context;
    peer_node *node = s->node;
    uint64_t *stranger = s->stranger;
    bool goes_on = is_no_stranger(s), is_stranger = !goes_on;
    pthread_mutex_lock(&node->mutex);
    *stranger = is_stranger ? *stranger : 0;
    pthread_mutex_unlock(&node->mutex);
    while (goes_on) {
        frame_kind kind;
        wire_limits limits = limits_of(node, 0);
        wire_set_limits(s->wire, &limits);
        if (frame_receive(&kind, &s->body, s->wire, NULL) != CKD_OK) {
            break;
        }
        goes_on = take_request(s, kind);
    }
    if (!goes_on) {
        linger(s);
    }
    wire_close(s->wire);
    bytes_free(&s->body);
    free(s);
    pthread_mutex_lock(&node->mutex);
    node->connections--;
    *stranger = is_stranger ? 0 : *stranger; /* else it may be another one's by now */
    pthread_cond_broadcast(&node->changed);
    pthread_mutex_unlock(&node->mutex);
    return NULL;
}

/* Takes a place for a stranger; NULL: there is none. Under the mutex. */
static uint64_t *place_for(peer_node *node, uint64_t origin) {
    uint64_t *place = NULL;
    uint32_t alike = 0;
    for (size_t i = 0; i < STRANGERS_MAX; i++) {
        alike += node->strangers[i] == origin;
        place = node->strangers[i] ? place : &node->strangers[i];
    }
    place = alike < STRANGERS_OF && node->connections < CONNECTIONS_MAX ? place : NULL;
    if (place) {
        *place = origin;
    }
    return place;
}

static void start(peer_node *node, wire *w) {
    pthread_t thread;
    served *s = calloc(1, sizeof(*s));
    pthread_mutex_lock(&node->mutex);
    uint64_t *place = s ? place_for(node, wire_origin(w)) : NULL;
    ckd_status status = place ? CKD_OK : CKD_E_BUSY;
    if (place) {
        *s = (served){.node = node, .wire = w, .stranger = place};
        status = thread_start(&thread, serve_main, s, NULL);
        node->connections += status == CKD_OK;
        *place = status == CKD_OK ? *place : 0;
    }
    pthread_mutex_unlock(&node->mutex);
    if (status == CKD_OK) {
        pthread_detach(thread);
        return;
    }
    wire_close(w);
    free(s);
}

static void *accept_main(void *context) {
    peer_node *node = context;
    for (;;) {
        wire *w = NULL;
        ckd_status status = wire_accept(&w, node->net, node->listener, node->stop, NULL);
        if (status == CKD_E_CANCELLED) {
            return NULL;
        }
        if (status == CKD_OK) {
            start(node, w);
        } else { /* the connection has gone already, or there is no memory left */
            clock_sleep_ns(PAUSE_MS * UINT64_C(1000000));
        }
    }
}

ckd_status serve_begin(peer_node *node, ckd_error *err) {
    const peer_hosts *hosts = node->options.hosts;
    ckd_status status = tcp_listen(&node->listener, &hosts->items[hosts->self], err);
    THEN(status, thread_start(&node->acceptor, accept_main, node, err));
    node->accepting = status == CKD_OK;
    return status;
}

void serve_end(peer_node *node) {
    if (node->accepting) {
        pthread_join(node->acceptor, NULL);
    }
    pthread_mutex_lock(&node->mutex);
    while (node->connections > 0) {
        pthread_cond_wait(&node->changed, &node->mutex);
    }
    pthread_mutex_unlock(&node->mutex);
    local_close(node->listener);
}
