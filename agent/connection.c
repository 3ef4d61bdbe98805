/* A connection: a session, or a query. */
#include "agent/internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/threads.h"
#include "engine/ranks/ranks.h"

#define NICE          10 /* the cores belong to the trainer */
#define LOOK_EVERY_NS UINT64_C(100000000)
#define RANKS_WAIT_MS 600000 /* if the ranks name no timeout */
#define DEFERRED_MS   200    /* between two checks whether a state must go to the store */

/* ---- answers ---- */

/* Sends the result of a request, followed by the body of the message. Returns false if the peer is gone. */
static bool answer(const connection *c, slot_message *m, ckd_status status, const ckd_error *err,
                   const ckd_checkpoint *checkpoint) {
    slot_reply reply;
    memset(&reply, 0, sizeof(reply));
    reply.status = status;
    if (status != CKD_OK) {
        reply.error = *err;
    }
    if (checkpoint) {
        reply.checkpoint = *checkpoint;
    }
    slot_message whole = {.kind = SLOT_REPLY, .fd_count = m->fd_count};
    memcpy(whole.fds, m->fds, sizeof(whole.fds));
    bytes_put(&whole.body, &reply, sizeof(reply));
    bytes_put(&whole.body, m->body.data, m->body.size);
    whole.body.failed |= m->body.failed;
    bool sent = slot_message_send(c->fd, &whole, NULL) == CKD_OK;
    bytes_free(&whole.body);
    bytes_free(&m->body);
    return sent;
}

static bool answer_status(const connection *c, ckd_status status, const ckd_error *err) {
    slot_message nothing = {.fd_count = 0};
    return answer(c, &nothing, status, err, NULL);
}

/* ---- requests of sessions ---- */

static ckd_status check_hello(const slot_hello *h, ckd_error *err) {
    bool same = h->protocol == SLOT_PROTOCOL && h->request_bytes == sizeof(slot_request) &&
                strncmp(h->version, ckd_version(), sizeof(h->version)) == 0;
    return same
               ? CKD_OK
               : err_set(
                     err, CKD_E_UNSUPPORTED,
                     "the agent is of ckptdelta %s, and another build than this program: stop the agent and start "
                     "it from the same installation",
                     ckd_version());
}

static bool take_hello(connection *c, const slot_message *m) {
    slot_hello hello;
    ckd_error err;
    ckd_status status = slot_message_get(&hello, sizeof(hello), m, &err);
    THEN(status, check_hello(&hello, &err));
    if (status != CKD_OK || c->holding || !hello.run[0]) {
        return answer_status(c, status, &err) && status == CKD_OK;
    }
    hello.run[sizeof(hello.run) - 1] = '\0';
    agent *a = c->agent;
    pthread_mutex_lock(&a->mutex);
    holding *h = holding_add(a, &hello, c->fd, c->watch);
    status = h ? holdings_await_settled(a, h, &err) : err_nomem(&err, sizeof(*h), "a session");
    if (h && status != CKD_OK) {
        holding_remove(a, h);
    } else {
        c->holding = h;
    }
    c->watch = h ? -1 : c->watch; /* the holding owns it */
    pthread_mutex_unlock(&a->mutex);
    if (status == CKD_OK && a->tier &&
        hello.rank == 0) { /* the run's trainer may have been on another node that was lost */
        peer_node_await_first_look(a->tier->node);
        (void)restart_from_peers(a->tier, hello.run);
    }
    return answer_status(c, status, &err) && status == CKD_OK;
}

static ckd_status open_store(connection *c, ckd_error *err) {
    ckd_store_options options = CKD_STORE_OPTIONS_INIT;
    options.threads = c->agent->options.threads;
    options.on_message = c->agent->options.on_message;
    options.message_context = c->agent->options.message_context;
    return c->store ? CKD_OK : ckd_store_open(&c->store, c->agent->store, CKD_OPEN_CREATE, &options, err);
}

static ckd_status give_memory(connection *c, const slot_message *m, ckd_error *err) {
    uint32_t count;
    slot_layout layout = {.count = 0};
    bytes encoded = {.size = 0};
    ckd_status status = slot_message_get(&count, sizeof(count), m, err);
    if (status == CKD_OK) {
        bytes_put(&encoded, m->body.data + sizeof(count), m->body.size - sizeof(count));
        status = encoded.failed ? err_nomem(err, m->body.size, "the description of a state")
                                : slot_layout_read(&layout, &encoded, err);
    }
    bytes_free(&encoded);
    THEN(status, open_store(c, err));
    THEN(status, holding_give_memory(c->agent, c->holding, &layout, count, err));
    slot_layout_free(&layout);
    return status;
}

static bool take_memory(connection *c, const slot_message *m) {
    slot_message out = {.fd_count = 0};
    ckd_error err;
    ckd_status status = give_memory(c, m, &err);
    for (uint32_t i = 0; status == CKD_OK && i < c->holding->set->count; i++) {
        out.fds[out.fd_count++] = c->holding->set->slots[i].memory.fd;
    }
    return answer(c, &out, status, &err, NULL);
}

/*
 * Ends the wait for other ranks when the agent stops or this rank's trainer has ended. Otherwise the wait for a rank
 * that died before it joined would never end.
 */
static ckd_status check_wanted(void *context, ckd_error *err) {
    const connection *c = context;
    bool stops;
    local_wait(&c->agent->stop, 1, 0, &stops);
    if (stops || local_peer_gone(c->fd, c->holding->watch)) {
        return err_set(err, CKD_E_STATE, stops ? "the agent is ending" : "the trainer has ended");
    }
    return CKD_OK;
}

/* Rank 0 tells the others which agent serves it. */
typedef struct agent_kind {
    ckd_id id;
    uint8_t alone; /* it knows no other nodes */
} agent_kind;

/* The agents of all ranks have a local disk, or none uses it, because a part of a state is of no use. Collective. */
static ckd_status agree_on_disk(connection *c, ckd_error *err) {
    agent *a = c->agent;
    bool has = a->tier->disk != NULL;
    ckd_error why;
    ckd_status own = has ? CKD_OK : err_set(&why, CKD_E_NOT_FOUND, "its agent has no local disk (--local)");
    ckd_status status = ranks_agree(c->ranks, own, &why, NULL, 0, err);
    c->on_disk = status == CKD_OK;
    if (status == CKD_E_NOT_FOUND && has) {
        agent_say(a, "states of run '%s' are not copied to the local disk: %s", c->holding->shown.run,
                  err->message);
    }
    return status == CKD_E_NOT_FOUND ? CKD_OK : status;
}

/*
 * The agents of all ranks defer a state, or none does. An agent that knows no other nodes copies it if it serves all
 * ranks itself. Collective.
 */
static ckd_status agree_on_copies(connection *c, ckd_error *err) {
    agent *a = c->agent;
    ckd_error why, all;
    agent_kind mine = {.id = a->id, .alone = a->tier && tier_is_alone(a->tier)}, first = mine;
    ckd_status own = CKD_OK, status = ranks_agree(c->ranks, CKD_OK, &why, &first, sizeof(first), &all);
    if (!a->tier || ((mine.alone || first.alone) && !id_equal(&first.id, &a->id))) {
        own = err_set(&why, CKD_E_UNSUPPORTED, "its agent knows no other nodes (--peers)");
    }
    THEN(status, ranks_agree(c->ranks, own, &why, NULL, 0, &all));
    c->copying = status == CKD_OK;
    if (c->copying) {
        status = rank_nodes_watch(&c->nodes, a->tier, c->ranks, c->holding->world, &all);
    }
    if (status == CKD_OK) {
        status = agree_on_disk(c, &all);
    }
    if (status != CKD_E_UNSUPPORTED) {
        return err_from(err, status, &all);
    }
    pthread_mutex_lock(&a->mutex);
    bool reports = a->tier && !a->ranks_reported;
    a->ranks_reported |= reports;
    pthread_mutex_unlock(&a->mutex);
    if (reports) {
        agent_say(a, "run '%s' saves to the store alone, its states are not copied to other nodes: %s",
                  c->holding->shown.run, all.message);
    }
    return CKD_OK;
}

static ckd_status join(connection *c, const slot_message *m, ckd_error *err) {
    slot_join wanted;
    char group[CKD_ID_TEXT + 8];
    holding *h = c->holding;
    ckd_status status = slot_message_get(&wanted, sizeof(wanted), m, err);
    if (status == CKD_OK && (!h->set || h->world < 1 || c->ranks)) {
        return err_set(err, CKD_E_INVALID, "a rank joins once, when it has memory");
    }
    snprintf(group, sizeof(group), "agent-");
    ckd_id_text(group + strlen(group), &wanted.group);
    ckd_ranks_options o = CKD_RANKS_OPTIONS_INIT;
    o.rank = h->rank;
    o.world = h->world;
    o.group = group;
    /* shorter than the ranks' own timeout, so that they have time to go on after their agents give up */
    uint32_t ranks_wait_ms = wanted.timeout_ms ? wanted.timeout_ms : RANKS_WAIT_MS;
    o.timeout_ms = ranks_wait_ms - ranks_wait_ms / 4;
    pthread_mutex_lock(&c->agent->mutex);
    h->group = wanted.group;
    pthread_mutex_unlock(&c->agent->mutex);
    cancel_check stop = {.poll = check_wanted, .context = c, .every_ns = LOOK_EVERY_NS};
    THEN(status, ranks_join(&c->ranks, c->store, &o, &stop, err));
    THEN(status, agree_on_copies(c, err));
    return status;
}

static bool take_join(connection *c, const slot_message *m) {
    ckd_error err;
    ckd_status status = join(c, m, &err);
    return answer_status(c, status, &err);
}

static bool take_save(connection *c, const slot_message *m) {
    slot_message nothing = {.fd_count = 0};
    ckd_checkpoint saved = {.step = 0};
    uint32_t slot;
    ckd_error err;
    ckd_status status = slot_message_get(&slot, sizeof(slot), m, &err);
    THEN(status, holding_save(&saved, c, slot, &err));
    return answer(c, &nothing, status, &err, &saved);
}

static bool take_recall(connection *c, const slot_message *m) {
    slot_message out = {.fd_count = 0};
    ckd_id id;
    ckd_error err;
    ckd_status status = slot_message_get(&id, sizeof(id), m, &err);
    if (status != CKD_OK) {
        return answer_status(c, status, &err);
    }
    pthread_mutex_lock(&c->agent->mutex);
    const shared_slot *s = holdings_find(c->agent, c->holding, &id);
    if (s && holdings_doubt(c->agent, c->holding, &id)) {
        status = err_set(&err, CKD_E_STATE, "training went wrong soon after the last restart from them");
    } else if (s) {
        out.fds[0] = local_copy(s->memory.fd);
        out.fd_count = out.fds[0] >= 0;
        bytes_put(&out.body, s->layout->encoded.data, s->layout->encoded.size);
    } else {
        status = err_set(&err, CKD_E_NOT_FOUND, "the agent does not hold the values of this checkpoint");
    }
    pthread_mutex_unlock(&c->agent->mutex);
    /*
     * A stopped trainer blocks this send, so the mutex is not held. If the memory changes meanwhile, the hashes reveal
     * it.
     */
    bool sent = answer(c, &out, status, &err, NULL);
    local_close(out.fd_count ? out.fds[0] : -1);
    return sent;
}

/* ---- queries ---- */

static bool take_status(const connection *c) {
    agent *a = c->agent;
    slot_message out = {.fd_count = 0};
    pthread_mutex_lock(&a->mutex);
    slot_agent about = {.process = getpid(),
                        .memory_bytes = a->used_bytes,
                        .budget_bytes = a->options.memory_bytes,
                        .since_ns = a->since_ns,
                        .huge_pages = a->options.huge_pages};
    bytes_put(&out.body, &about, sizeof(about));
    for (const holding *h = a->holdings; h; h = h->next) {
        bytes_put(&out.body, &h->shown, sizeof(h->shown));
        about.sessions++;
        about.huge_bytes += h->set ? h->set->huge_bytes : 0;
    }
    pthread_mutex_unlock(&a->mutex);
    if (a->tier) {
        tier_describe(&about, &out.body, a->tier);
    }
    if (!out.body.failed) {
        memcpy(out.body.data, &about, sizeof(about));
    }
    return answer(c, &out, CKD_OK, NULL, NULL);
}

static bool take_drain(connection *c, const slot_message *m) {
    uint32_t stops;
    ckd_error err;
    ckd_status status = slot_message_get(&stops, sizeof(stops), m, &err);
    if (c->agent->tier) {
        tier_hurry(c->agent->tier, true);
    }
    pthread_mutex_lock(&c->agent->mutex);
    c->agent->drains++;
    THEN(status, holdings_drain(c->agent, &err));
    c->agent->drains--;
    pthread_mutex_unlock(&c->agent->mutex);
    if (c->agent->tier) {
        tier_hurry(c->agent->tier, false);
    }
    bool sent = answer_status(c, status, &err);
    if (status == CKD_OK && stops) {
        agent_stop(c->agent);
    }
    return sent;
}

/* ---- the thread ---- */

/* Returns true if the connection continues. *goodbye: the session has closed it, and leaves no state. */
static bool take_message(bool *goodbye, connection *c, const slot_message *m) {
    bool session = c->holding != NULL;
    switch (m->kind) {
    case SLOT_HELLO:
        return take_hello(c, m);
    case SLOT_STATUS:
        return take_status(c);
    case SLOT_DRAIN:
        return take_drain(c, m);
    case SLOT_MEMORY:
        return session && take_memory(c, m);
    case SLOT_JOIN:
        return session && take_join(c, m);
    case SLOT_SAVE:
        return session && take_save(c, m);
    case SLOT_RECALL:
        return session && take_recall(c, m);
    case SLOT_GOODBYE:
        *goodbye = true;
        return false;
    default:
        return false;
    }
}

/* Serves a peer until it says goodbye or ends, or the agent stops. The first message is a hello. */
static void serve(bool *goodbye, connection *c) {
    bool greeted = false;
    for (bool goes_on = true; goes_on;) {
        bool ready[3];
        slot_message m;
        int watch = c->holding ? c->holding->watch : c->watch;
        bool defers = c->holding && c->holding->deferred;
        local_wait((int[]){c->fd, watch, c->agent->stop}, 3, defers ? DEFERRED_MS : -1, ready);
        if (!ready[0] && !ready[1] && !ready[2]) {
            if (c->holding) {
                holding_store_if_due(c);
            }
            continue;
        }
        if (!ready[0] || ready[2] || slot_message_receive(&m, c->fd, NULL) != CKD_OK) {
            return;
        }
        goes_on = (greeted || m.kind == SLOT_HELLO) && take_message(goodbye, c, &m);
        greeted = true;
        slot_message_free(&m);
    }
}

/*
 * Removes the files of a run, and so their copies on other nodes: a restart finds all of it in the store. Does nothing
 * if another session of the run may have states that only other nodes have; that session removes them itself. durable:
 * the store has the newest state of this session. If the session has stored none, the files are of an earlier launch,
 * whose states may not be stored.
 */
static void forget_copies(const connection *c, const char *run, const slot_peer *who, bool durable) {
    agent *a = c->agent;
    bool used = false;
    pthread_mutex_lock(&a->mutex);
    for (const holding *h = a->holdings; h; h = h->next) {
        bool same = h->rank == who->rank && (h->world > 0) == (who->world > 0); /* files are per rank */
        used |=
            same && h->shown.connected && (strcmp(h->saves_to, run) == 0 || strcmp(h->shown.run, run) == 0);
    }
    pthread_mutex_unlock(&a->mutex);
    if (a->tier && durable && !used) {
        tier_forget(a->tier, run, who);
    }
}

/* Stores the state of a closed session that only other nodes have, if there is one. */
static bool store_rest(connection *c, bool *goodbye) {
    ckd_error why;
    if (!*goodbye || !c->holding->deferred) {
        return *goodbye;
    }
    ckd_status status = holding_store(c, &why);
    if (status != CKD_OK) { /* the session does not wait for another attempt */
        (void)answer_status(c, status, &why);
        *goodbye = false;
    }
    return status == CKD_OK;
}

/* Handles the end of a session, however it ended. */
static void end_session(connection *c, bool *goodbye) {
    agent *a = c->agent;
    holding *h = c->holding;
    char run[CKD_RUN_MAX + 1], branch[CKD_RUN_MAX + 1];
    slot_peer who = {.rank = h->rank, .world = h->world};
    pthread_mutex_lock(&a->mutex);
    h->shown.connected = 0;
    h->goodbye = *goodbye;
    snprintf(run, sizeof(run), "%s", h->shown.run);
    snprintf(branch, sizeof(branch), "%s", h->saves_to);
    pthread_mutex_unlock(&a->mutex);
    bool stored = store_rest(c, goodbye);
    pthread_mutex_lock(&a->mutex);
    bool settles = !stored && holding_has_state(h);
    bool durable = !h->deferred && !h->uncertain && h->stored_ns > 0;
    if (!settles) {
        holding_remove(a, h);
        record_write(a);
    } else if (local_peer_gone(c->fd, h->watch)) {
        h->fd = -1;
    }
    pthread_mutex_unlock(&a->mutex);
    if (settles) {
        durable = holding_settle(c); /* the state stays until another thread removes the holding */
    }
    forget_copies(c, run, &who, durable);
    forget_copies(c, branch, &who, durable);
}

void *connection_main(void *context) {
    connection *c = context;
    agent *a = c->agent;
    bool goodbye = false;
    thread_lower_priority(NICE); /* before the store's workers inherit it */
    serve(&goodbye, c);
    if (c->holding) {
        end_session(c, &goodbye);
    }
    if (goodbye) {
        (void)answer_status(c, CKD_OK, NULL);
    }
    ranks_break_off(c->ranks); /* another rank's thread may wait for this one's part */
    free(c->nodes);
    ckd_store_close(c->store);
    local_close(c->watch);
    local_close(c->fd);
    free(c);
    pthread_mutex_lock(&a->mutex);
    a->threads--;
    pthread_cond_broadcast(&a->changed);
    pthread_mutex_unlock(&a->mutex);
    return NULL;
}
