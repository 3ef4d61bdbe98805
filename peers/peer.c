/* A connection to another node, and what it is asked for. */
#include "peers/internal.h"

#include <stdio.h>
#include <stdlib.h>

#include "base/file.h"

#define ANSWER_SILENCES 10 /* the time for an answer that does not take long */

/* ---- connections ---- */

/* Sends a message of the greeting, and takes the answer, which must be as long. */
static ckd_status greet(wire *w, frame_kind kind, const bytes *message, bytes *out, size_t size,
                        ckd_error *err) {
    bool answered;
    ckd_status status = message->failed ? err_nomem(err, message->size, "a message")
                                        : frame_send(w, kind, message->data, message->size, err);
    THEN(status, frame_take_answer(out, &answered, w, size, err));
    return status == CKD_OK && out->size != size ? err_set(err, CKD_E_INVALID, "the greeting is invalid")
                                                 : status;
}

/* The other side proves the secret first: this node says nothing to whoever only listens at its port. */
static ckd_status say_hello(wire *w, const peer_node *node, const char *to, ckd_error *err) {
    const peer_secret *secret = node->options.secret;
    const char *own = node->options.hosts->items[node->options.hosts->self].name;
    greeting g = {.names = {[CONNECTS] = own, [LISTENS] = to}};
    bytes hello = {.size = 0}, answer = {.size = 0};
    uint8_t proof[SECRET_PROOF];
    ckd_status status = random_bytes(g.nonces[CONNECTS], SECRET_NONCE, err);
    bytes_put_string(&hello, own);
    bytes_put(&hello, g.nonces[CONNECTS], SECRET_NONCE);
    THEN(status, greet(w, FRAME_HELLO, &hello, &answer, SECRET_NONCE + SECRET_PROOF, err));
    if (status == CKD_OK) {
        memcpy(g.nonces[LISTENS], answer.data, SECRET_NONCE);
        status = secret_check(answer.data + SECRET_NONCE, secret, &g, LISTENS, err);
    }
    THEN(status, secret_prove(proof, secret, &g, CONNECTS, err));
    if (status == CKD_OK) {
        bytes own_proof = {proof, sizeof(proof), sizeof(proof), false};
        status = greet(w, FRAME_PROOF, &own_proof, &answer, 0, err);
    }
    bytes_free(&hello);
    bytes_free(&answer);
    return status;
}

/* Goes on with UCX if both nodes can. *no_way: UCX has none; the next connection stays on its socket. */
static ckd_status exchange_addresses(wire *w, atomic_bool *no_way, ckd_error *err) {
    bool answered;
    bytes own = {.size = 0}, address = {.size = 0};
    wire_address(&own, w);
    ckd_status status = frame_send(w, FRAME_ADDRESS, own.data, own.size, err);
    THEN(status, frame_take_answer(&address, &answered, w, FRAME_MAX, err));
    if (status == CKD_OK) {
        status = wire_reach(w, &address, err);
        if (status == CKD_E_IO) {
            atomic_store(no_way, true);
        }
    }
    if (status == CKD_OK) {
        wire_switch(w);
    }
    bytes_free(&own);
    bytes_free(&address);
    return status;
}

ckd_status peer_connect(wire **out, peer_node *node, size_t host, const wire_limits *limits, ckd_error *err) {
    const peer_host *to = &node->options.hosts->items[host];
    ckd_error why;
    wire *w = NULL;
    atomic_bool *no_way = &node->peers[host].no_way;
    ckd_status status = wire_connect(&w, atomic_load(no_way) ? NULL : node->net, to, limits, &why);
    THEN(status, say_hello(w, node, to->name, &why));
    THEN(status, exchange_addresses(w, no_way, &why));
    if (status != CKD_OK) {
        wire_close(w);
        return err_set(err, status, "node %s: %.600s", to->name, why.message);
    }
    *out = w;
    return CKD_OK;
}

typedef struct loss_watch {
    peer *of;
    unsigned losses;
} loss_watch;

static bool is_lost(void *context) {
    const loss_watch *watch = context;
    return !atomic_load(&watch->of->alive) || atomic_load(&watch->of->losses) != watch->losses;
}

/* One request to a peer. The wire is NULL before connect_call and after end_call. */
typedef struct call {
    peer *to;
    loss_watch watch;
    wire_limits limits;
    wire *wire;
    bytes answer;
    bool answered; /* the peer has answered: the connection can go on, even after an error */
} call;

static void begin_call(call *c, peer_node *node, size_t host, uint32_t silence_ms) {
    *c = (call){.to = &node->peers[host]};
    c->watch = (loss_watch){c->to, atomic_load(&c->to->losses)};
    c->limits = (wire_limits){silence_ms, node->stop, is_lost, NULL};
    c->limits.peer = &c->watch;
}

/* The data connection is kept from one call to the next. */
static ckd_status connect_call(call *c, ckd_error *err) {
    peer *to = c->to;
    const peer_host *host = &to->node->options.hosts->items[to->host];
    pthread_mutex_lock(&to->mutex);
    if (!atomic_load(&to->alive)) {
        return err_set(err, CKD_E_IO, "node %s shows no sign of life", host->name);
    }
    if (atomic_exchange(&to->stale, false)) {
        wire_close(to->data);
        to->data = NULL;
    }
    ckd_status status = to->data ? CKD_OK : peer_connect(&to->data, to->node, to->host, &c->limits, err);
    c->wire = to->data;
    if (c->wire) {
        wire_set_limits(c->wire, &c->limits);
    }
    return status;
}

static ckd_status end_call(call *c, ckd_status status, ckd_error *err) {
    ckd_error why;
    if (status != CKD_OK && c->wire && err) {
        why = *err;
        err_set(err, status, "node %s: %.600s", c->to->node->options.hosts->items[c->to->host].name,
                why.message);
    }
    if (status != CKD_OK && !c->answered) {
        wire_close(c->to->data);
        c->to->data = NULL;
    }
    bytes_free(&c->answer);
    pthread_mutex_unlock(&c->to->mutex);
    return status;
}

static ckd_status take_answer(call *c, ckd_error *err) {
    return frame_take_answer(&c->answer, &c->answered, c->wire, ANSWER_MAX, err);
}

static ckd_status ask_about(call *c, frame_kind kind, const char *set, const char *blob,
                            const blob_entry *about, ckd_error *err) {
    bytes body = {.size = 0};
    bytes_put_string(&body, set);
    bytes_put_string(&body, blob);
    bytes_put_u64(&body, about ? about->size : 0);
    bytes_put(&body, about ? about->hash.bytes : (hash128){{0}}.bytes, sizeof(hash128));
    ckd_status status = body.failed ? err_nomem(err, body.size, "a message")
                                    : frame_send(c->wire, kind, body.data, body.size, err);
    bytes_free(&body);
    THEN(status, take_answer(c, err));
    return status;
}

/* ---- calls ---- */

static ckd_status put_packets(uint64_t *sent, call *c, const char *path, const peer_range *range,
                              ckd_error *err) {
    hash128 hash;
    c->answered = false;
    ckd_status status = blob_send(&hash, c->wire, path, range, &c->to->node->limit, err);
    THEN(status, take_answer(c, err));
    *sent += status == CKD_OK ? range->size : 0;
    return status;
}

ckd_status peer_put(uint64_t *sent, peer_node *node, size_t host, const peer_copy *copy, ckd_error *err) {
    call c;
    blob_entry entry;
    *sent = 0;
    peer_range range = copy->range ? *copy->range : (peer_range){0, file_bytes(copy->path)};
    ckd_status status = blob_range_hash(&entry, copy->path, &range, err);
    if (status != CKD_OK) {
        return status;
    }
    begin_call(&c, node, host, node->options.silence_ms);
    status = connect_call(&c, err);
    THEN(status, ask_about(&c, FRAME_PUT, copy->set, copy->blob, &entry, err));
    bool wanted = c.answer.size == 1 && c.answer.data[0];
    if (status == CKD_OK && wanted) {
        status = put_packets(sent, &c, copy->path, &range, err);
    }
    return end_call(&c, status, err);
}

static ckd_status take_packets(file_writer *f, call *c, const blob_entry *entry, ckd_error *err) {
    bytes packet = {.size = 0}, hashes = {.size = 0};
    ckd_status status = CKD_OK;
    for (uint64_t done = 0; done < entry->size && status == CKD_OK; done += packet.size) {
        status = frame_expect(&packet, c->wire, FRAME_DATA, err);
        uint64_t left = entry->size - done;
        if (status == CKD_OK && packet.size != (left < PEER_PACKET ? left : PEER_PACKET)) {
            status = err_set(err, CKD_E_INVALID, "a packet does not have the announced length");
        }
        if (status == CKD_OK) {
            hash128 hash = hash128_of(packet.data, packet.size);
            bytes_put(&hashes, hash.bytes, sizeof(hash.bytes));
            status = file_append(f, packet.data, packet.size, err);
        }
    }
    hash128 all = hash128_of(hashes.data, hashes.size);
    if (status == CKD_OK && (hashes.failed || !hash128_equal(&all, &entry->hash))) {
        status = err_set(err, CKD_E_CORRUPT, "a copy does not have the bytes that it had when it was made");
    }
    bytes_free(&packet);
    bytes_free(&hashes);
    return status;
}

static ckd_status fetch_into(call *c, const char *path, ckd_error *err) {
    blob_entry entry = {.size = 0};
    file_writer *f;
    reader r = reader_of(c->answer.data, c->answer.size);
    entry.size = reader_u64(&r);
    const void *hash = reader_take(&r, sizeof(entry.hash));
    c->answered = false; /* what has not been received is still in the connection */
    if (!hash) {
        return err_set(err, CKD_E_INVALID, "the answer is invalid");
    }
    memcpy(&entry.hash, hash, sizeof(entry.hash));
    ckd_status status = file_create(&f, path, 0, err);
    if (status != CKD_OK) {
        return status;
    }
    status = take_packets(f, c, &entry, err);
    THEN(status, take_answer(c, err));
    if (status != CKD_OK) {
        file_discard(f);
        return status;
    }
    return file_close(f, err);
}

ckd_status peer_fetch(peer_node *node, size_t host, const char *set, const char *blob, const char *path,
                      ckd_error *err) {
    call c;
    begin_call(&c, node, host, node->options.silence_ms);
    ckd_status status = connect_call(&c, err);
    THEN(status, ask_about(&c, FRAME_FETCH, set, blob, NULL, err));
    THEN(status, fetch_into(&c, path, err));
    return end_call(&c, status, err);
}

static ckd_status read_list(blob_list *out, const bytes *answer, ckd_error *err) {
    reader r = reader_of(answer->data, answer->size);
    uint32_t count = reader_u32(&r);
    if (count > answer->size / (2 + 8 + sizeof(hash128))) {
        return err_set(err, CKD_E_INVALID, "the list is invalid");
    }
    out->items = calloc((size_t)count + 1, sizeof(blob_entry));
    if (!out->items) {
        return err_nomem(err, count * sizeof(blob_entry), "a list of files");
    }
    for (out->count = 0; out->count < count && !r.failed; out->count++) {
        blob_entry *e = &out->items[out->count];
        reader_string(&r, e->name, sizeof(e->name));
        e->size = reader_u64(&r);
        const void *hash = reader_take(&r, sizeof(e->hash));
        memcpy(&e->hash, hash ? hash : (hash128){{0}}.bytes, sizeof(e->hash));
    }
    if (r.failed) {
        blob_list_free(out);
        return err_set(err, CKD_E_INVALID, "the list is invalid");
    }
    return CKD_OK;
}

ckd_status peer_list(blob_list *out, peer_node *node, size_t host, const char *set, ckd_error *err) {
    call c;
    *out = (blob_list){.count = 0};
    begin_call(&c, node, host, node->options.silence_ms);
    ckd_status status = connect_call(&c, err);
    THEN(status, ask_about(&c, FRAME_LIST, set, "", NULL, err));
    THEN(status, read_list(out, &c.answer, err));
    return end_call(&c, status, err);
}

ckd_status peer_delete(peer_node *node, size_t host, const char *set, const char *blob, ckd_error *err) {
    call c;
    begin_call(&c, node, host, node->options.silence_ms);
    ckd_status status = connect_call(&c, err);
    THEN(status, ask_about(&c, FRAME_DELETE, set, blob, NULL, err));
    return end_call(&c, status, err);
}

void peer_node_hurry(peer_node *node) {
    uint64_t not_yet = 0;
    atomic_compare_exchange_strong(&node->hurried_ns, &not_yet, clock_monotonic_ns());
}

static uint32_t answer_ms(const peer_node *node) {
    return node->options.silence_ms * ANSWER_SILENCES;
}

static bool is_lost_or_late(void *context) {
    const loss_watch *watch = context;
    const peer_node *node = watch->of->node;
    uint64_t hurried_ns = atomic_load(&node->hurried_ns);
    return is_lost(context) ||
           (hurried_ns && clock_monotonic_ns() - hurried_ns > answer_ms(node) * UINT64_C(1000000));
}

static void wait_for_answer(call *c, bool takes_long) {
    c->limits.silence_ms = takes_long ? 0 : answer_ms(c->to->node);
    c->limits.lost = takes_long ? is_lost_or_late : is_lost;
    wire_set_limits(c->wire, &c->limits);
}

ckd_status peer_ask_in_turn(bytes *answer, peer_node *node, size_t host, const bytes *query, bool takes_long,
                            ckd_error *err) {
    call c;
    begin_call(&c, node, host, node->options.silence_ms);
    ckd_status status = connect_call(&c, err);
    THEN(status, frame_send(c.wire, FRAME_ASK, query->data, query->size, err));
    if (status == CKD_OK) {
        wait_for_answer(&c, takes_long);
        status = frame_take_answer(answer, &c.answered, c.wire, ANSWER_MAX, err);
    }
    return end_call(&c, status, err);
}

/*
 * A connection of its own: the answer may take long, and copies go on meanwhile. Signs of life come from another thread
 * of the peer's than the answer, so they do not tell that the answer hangs.
 */
ckd_status peer_ask(bytes *answer, peer_node *node, size_t host, const bytes *query, bool takes_long,
                    ckd_error *err) {
    call c;
    wire *w = NULL;
    bool answered = false;
    const char *name = node->options.hosts->items[host].name;
    begin_call(&c, node, host, node->options.silence_ms);
    if (!atomic_load(&c.to->alive)) {
        return err_set(err, CKD_E_IO, "node %s shows no sign of life", name);
    }
    ckd_status status = peer_connect(&w, node, host, &c.limits, err);
    if (status != CKD_OK) {
        return status;
    }
    ckd_error why;
    status = frame_send(w, FRAME_ASK, query->data, query->size, &why);
    c.wire = w;
    wait_for_answer(&c, takes_long);
    THEN(status, frame_take_answer(answer, &answered, w, ANSWER_MAX, &why));
    if (status == CKD_E_BUSY && !answered) {
        err_set(&why, status, "its agent is alive, but has not answered for %u s: can it reach the store?",
                (unsigned)answer_ms(node) / 1000);
    }
    wire_close(w);
    return status == CKD_OK ? CKD_OK : err_set(err, status, "node %s: %.600s", name, why.message);
}
