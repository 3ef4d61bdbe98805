/* The session's side of an agent. */
#include "engine/session/session.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/hash.h"
#include "base/threads.h"
#include "engine/ranks/ranks.h"

#define PROBATION_STEPS 32 /* after a restore from memory: an alarm of a metric needs 16 of them */

static void disconnect(ckd_session *s) {
    slots_disconnect(&s->agent.link);
    s->agent.connected = s->agent.joint = false;
}

/* Called when the agent has gone or shows no sign of life. It will save the states that it holds when it can. */
static void give_up(ckd_session *s, ckd_status status, const ckd_error *why) {
    disconnect(s);
    store_message(s->saver.store, "%s: this session saves by itself from now on",
                  status == CKD_E_BUSY ? why->message : "the agent has gone");
}

/* ---- open, leave ---- */

static const char *wanted(const ckd_session *s) {
    const char *where = s->options.agent ? s->options.agent : getenv("CKPTDELTA_AGENT");
    return where && where[0] && strcmp(where, "0") != 0 ? where : NULL;
}

/* The agent may just have saved a state that the previous launch left in memory. The catalog must then list it. */
static ckd_status connect_to(ckd_session *s, const char *where, ckd_error *err) {
    char path[LOCAL_PATH_MAX + 1];
    const ckd_ranks_options *ranks = s->options.ranks;
    slot_peer peer = {s->opened_run, s->save.rank, ranks ? (ranks->world ? ranks->world : 1) : 0};
    ckd_status status = slots_socket_path(path, s->path, where, err);
    THEN(status, slots_connect(&s->agent.link, path, &peer, slots_wait_ms(s->options.agent_wait_s), err));
    s->agent.connected = status == CKD_OK;
    THEN(status, store_refresh_catalog(s->saver.store, err));
    return status;
}

/* Either all ranks use an agent or none does, because a checkpoint is made either by all agents or by all sessions. */
static ckd_status agree_on_agents(ckd_session *s, ckd_status own, ckd_error *why, ckd_error *err) {
    ckd_id group = {{0}};
    s->agent.timeout_ms = s->options.ranks->timeout_ms;
    if (own == CKD_OK && s->save.rank == 0) {
        own = ckd_id_new(&group, why);
    }
    ckd_status status = ranks_agree(s->saver.ranks, own, why, &group, sizeof(group), err);
    s->agent.joint = status == CKD_OK;
    s->agent.group = group;
    (void)store_refresh_catalog(s->saver.store,
                                NULL); /* rank 0's agent may have stored states from the memory of others */
    return status;
}

ckd_status session_agent_open(ckd_session *s, ckd_error *lost) {
    ckd_error why = {.offset = CKD_NO_OFFSET}, err;
    const char *where = wanted(s);
    s->agent.link.fd = -1;
    ckd_status status = where ? connect_to(s, where, &why)
                              : err_set(&why, CKD_E_NOT_FOUND, "it was not told to use an agent");
    status = s->saver.ranks ? agree_on_agents(s, status, &why, &err) : err_from(&err, status, &why);
    if (status != CKD_OK) {
        (void)session_agent_leave(s, &why);
        if (where) {
            store_message(s->saver.store, "no agent takes this session, so it saves by itself: %s",
                          err.message);
        }
    }
    return s->saver.ranks ? ranks_check(s->saver.ranks, lost) : CKD_OK;
}

/* A living agent that could not store states which only other nodes have goes on trying. */
static ckd_status say_goodbye(ckd_session *s, ckd_error *err) {
    slot_message goodbye = {.kind = SLOT_GOODBYE}, answer;
    slot_reply reply;
    ckd_error why;
    ckd_status status = slots_ask(&answer, &reply, &s->agent.link, &goodbye, &why);
    slot_message_free(&answer);
    if (!s->agent.link.broken && status != CKD_OK) {
        err_set(err, status, "the agent could not save what only other nodes have, and keeps trying: %.400s",
                why.message);
        store_message(s->saver.store, "%s", err->message);
        return status;
    }
    if (status == CKD_E_BUSY) {
        store_message(s->saver.store, "%s: the session is closed without it", why.message);
    }
    return CKD_OK;
}

ckd_status session_agent_leave(ckd_session *s, ckd_error *err) {
    if (!s->agent.connected) {
        return CKD_OK;
    }
    ckd_status status = s->agent.link.broken ? CKD_OK : say_goodbye(s, err);
    disconnect(s);
    return status;
}

void session_agent_show_phase(ckd_session *s) {
    if (s->agent.first) {
        slot_set_busy(s->agent.first, s->shared.phase == CKD_PHASE_BUSY && !s->shared.waiting);
    }
}

void session_agent_free(ckd_session *s, bool in_child) {
    for (uint32_t i = 0; i < s->agent.count; i++) {
        shared_memory_release(&s->agent.slots[i].memory, in_child);
    }
    if (s->agent.connected) { /* in a child: the parent goes on */
        slots_disconnect(&s->agent.link);
    }
    slot_layout_free(&s->agent.layout);
    s->agent.count = 0;
}

/*
 * After a missing answer, the next answer to arrive may be that one, late. So the link is broken. Ranks find out at
 * their next save.
 */
static ckd_status ask(slot_message *answer, slot_reply *reply, ckd_session *s, const slot_message *request,
                      ckd_error *err) {
    *answer = (slot_message){.fd_count = 0};
    return s->agent.link.broken ? err_set(err, CKD_E_IO, "the agent has gone")
                                : slots_ask(answer, reply, &s->agent.link, request, err);
}

/* ---- memory ---- */

static slot_item item_of(const session_item *from) {
    return (slot_item){.tensor = from->tensor, .bytes = from->bytes, .is_bytes = from->is_bytes};
}

static ckd_status make_layout(ckd_session *s, ckd_error *err) {
    slot_item *items = calloc(s->item_count + 1, sizeof(*items));
    if (!items) {
        return err_nomem(err, s->item_count * sizeof(*items), "the registered tensors");
    }
    for (size_t i = 0; i < s->item_count; i++) {
        items[i] = item_of(&s->items[i]);
    }
    ckd_status status = slot_layout_make(&s->agent.layout, items, s->item_count, err);
    free(items);
    return status;
}

static ckd_status map_slots(ckd_session *s, slot_message *answer, uint32_t count, ckd_error *err) {
    if (answer->fd_count != count) {
        return err_set(err, CKD_E_INVALID, "it gave %zu slots instead of %u", answer->fd_count,
                       (unsigned)count);
    }
    ckd_status status = CKD_OK;
    for (uint32_t i = 0; i < count && status == CKD_OK; i++) {
        shared_slot *to = &s->agent.slots[i];
        to->layout = &s->agent.layout;
        status = shared_memory_map(&to->memory, answer->fds[i], s->agent.layout.size, true, err);
        answer->fds[i] = -1;
        s->agent.count += status == CKD_OK;
    }
    return status;
}

static ckd_status take_memory(ckd_session *s, uint32_t count, ckd_error *err) {
    slot_message request = {.kind = SLOT_MEMORY}, answer = {.fd_count = 0};
    slot_reply reply;
    ckd_status status =
        s->device_count ? err_set(err, CKD_E_UNSUPPORTED, "it does not take tensors on devices yet") : CKD_OK;
    THEN(status, make_layout(s, err));
    if (status == CKD_OK && s->agent.layout.data_bytes != snapshot_size(s->sources, s->item_count)) {
        status = err_set(err, CKD_E_INVALID, "a slot and a snapshot have different sizes");
    }
    if (status == CKD_OK) {
        bytes_put(&request.body, &count, sizeof(count));
        bytes_put(&request.body, s->agent.layout.encoded.data, s->agent.layout.encoded.size);
        status = ask(&answer, &reply, s, &request, err);
    }
    THEN(status, map_slots(s, &answer, count, err));
    slot_message_free(&answer);
    bytes_free(&request.body);
    return status;
}

/* The threads that serve the ranks, in their agents, join a group of their own. */
static ckd_status join(ckd_session *s, ckd_error *err) {
    slot_join group;
    slot_message request = {.kind = SLOT_JOIN}, answer;
    slot_reply reply;
    memset(&group, 0, sizeof(group));
    group.group = s->agent.group;
    group.timeout_ms = s->agent.timeout_ms;
    bytes_put(&request.body, &group, sizeof(group));
    ckd_status status = ask(&answer, &reply, s, &request, err);
    slot_message_free(&answer);
    bytes_free(&request.body);
    return status;
}

/*
 * Agents join their group only once all sessions have memory, so that none waits for an agent whose session got none.
 */
static ckd_status take_memory_jointly(ckd_session *s, uint32_t count, ckd_error *err) {
    ckd_error why = {.offset = CKD_NO_OFFSET};
    ckd_status own = take_memory(s, count, &why);
    ckd_status status = ranks_agree(s->saver.ranks, own, &why, NULL, 0, err);
    if (status != CKD_OK) {
        return status;
    }
    own = join(s, &why);
    return ranks_agree(s->saver.ranks, own, &why, NULL, 0, err);
}

/* Under shared.mutex. If the session has no memory of the agent yet, it marks the doubt when it gets some. */
static void note_doubt(ckd_session *s) {
    if (s->agent.first && s->agent.probation.failed) {
        slot_doubt(s->agent.first, &s->agent.probation.of);
    }
}

ckd_status session_agent_take_memory(bool *taken, ckd_session *s, uint32_t count, ckd_error *lost) {
    ckd_error err;
    ckd_status status = CKD_OK;
    pthread_mutex_lock(&s->saver.store_turn);
    bool asks = s->agent.connected && s->agent.count == 0;
    if (asks && (s->agent.joint ? take_memory_jointly : take_memory)(s, count, &err) != CKD_OK) {
        ckd_error left;
        status = s->agent.joint ? ranks_check(s->saver.ranks, lost) : CKD_OK;
        (void)session_agent_leave(s, &left); /* it has no states yet */
        session_agent_free(s, false);
        store_message(s->saver.store,
                      "the agent takes no snapshots of this session, so it saves by itself: %s", err.message);
    }
    if (s->agent.count) {
        pthread_mutex_lock(&s->shared.mutex);
        s->agent.first = &s->agent.slots[0];
        session_agent_show_phase(s);
        note_doubt(s);
        pthread_mutex_unlock(&s->shared.mutex);
    }
    pthread_mutex_unlock(&s->saver.store_turn);
    *taken = s->agent.count > 0;
    return status;
}

uint8_t *session_agent_memory(const ckd_session *s, uint32_t number) {
    return number < s->agent.count ? slot_data(&s->agent.slots[number]) : NULL;
}

/* ---- saves ---- */

static shared_slot *agents_slot(ckd_session *s, const session_slot *from) {
    size_t number = (size_t)(from - s->shared.slots);
    return number < s->agent.count ? &s->agent.slots[number] : NULL;
}

void session_agent_stage(ckd_session *s, const session_slot *from) {
    shared_slot *to = agents_slot(s, from);
    if (to) {
        slot_begin(to);
    }
}

static void set_text(char *to, uint8_t *has, size_t size, const char *text) {
    *has = text != NULL;
    snprintf(to, size, "%s", text ? text : "");
}

static void make_request(slot_request *r, ckd_session *s, const save_stage *copied, bool one_step) {
    const launch_record *launch = &s->saver.launch;
    uint8_t has_run;
    memset(r, 0, sizeof(*r)); /* clears the padding, too, because it is hashed */
    memcpy(&r->options, &s->save, sizeof(r->options));
    set_text(r->run, &has_run, sizeof(r->run), s->save.run);
    set_text(r->parent_run, &r->has_parent, sizeof(r->parent_run), s->save.parent_run);
    set_text(r->resumed_run, &r->has_resumed, sizeof(r->resumed_run), s->save.resumed_from_run);
    set_text(r->metric_name, &r->has_metric, sizeof(r->metric_name), s->save.metric_name);
    r->one_step = one_step;
    r->launch_has_last = launch->has_last;
    r->launch_own = launch->own;
    snprintf(r->launch_run, sizeof(r->launch_run), "%s", launch->run);
    r->launch_last = launch->last;
    r->launch_tried = launch->tried;
    r->launch_step = launch->step;
    r->newest_ns = save_newest_date(s->saver.store, s->save.run);
    r->begun_ns = copied->begun_ns;
    r->copied_ns = copied->ended_ns;
    r->stall_ns = copied->work_ns;
}

bool session_agent_find_saved(ckd_checkpoint *saved, ckd_session *s, const ckd_id *id) {
    uint8_t found = store_refresh_catalog(s->saver.store, NULL) == CKD_OK &&
                    catalog_find_id(saved, s->saver.store->catalog, id, NULL) == CKD_OK;
    if (!s->saver.ranks) {
        return found;
    }
    uint8_t first = found; /* rank 0's, for all */
    if (ranks_agree(s->saver.ranks, CKD_OK, NULL, &first, sizeof(first), NULL) != CKD_OK) {
        return found && ranks_check(s->saver.ranks, NULL) != CKD_OK; /* no rank can save anything any more */
    }
    if (first && !found) {
        *saved = (ckd_checkpoint){.id = *id, .step = s->save.step};
        snprintf(saved->run, sizeof(saved->run), "%s", s->run);
    }
    return first;
}

/*
 * Agents of several ranks save under one id. Each rank computes it, because ranks that die may not have talked to each
 * other before.
 */
static ckd_status next_id(ckd_id *out, ckd_session *s, ckd_error *err) {
    struct {
        ckd_id group;
        uint64_t number;
    } seed;
    if (!s->agent.joint) {
        return ckd_id_new(out, err);
    }
    memset(&seed, 0, sizeof(seed));
    seed.group = s->agent.group;
    seed.number = ++s->agent.saves;
    hash128 hash = hash128_of(&seed, sizeof(seed));
    _Static_assert(sizeof(hash.bytes) == sizeof(out->bytes), "an id is as long as a hash");
    memcpy(out->bytes, hash.bytes, sizeof(out->bytes));
    return CKD_OK;
}

/* Makes the slot good once the state is copied. */
static ckd_status publish(shared_slot *to, ckd_session *s, session_slot *from, const ckd_id *id,
                          bool one_step, ckd_error *err) {
    save_stage copied;
    slot_request r;
    ckd_status status = session_await_fence(&copied, s, from, err);
    for (size_t i = 0; i < s->item_count && status == CKD_OK; i++) {
        (void)snapshot_read(from->snapshot, i); /* waits until it is copied */
    }
    if (status == CKD_OK) {
        make_request(&r, s, &copied, one_step);
        r.options.checkpoint_id = *id;
        slot_publish(to, &r, from->optimizers);
        s->saver.launch.tried = *id;
    }
    return status;
}

static ckd_status ask_for_save(ckd_checkpoint *saved, ckd_session *s, const shared_slot *slot,
                               ckd_error *err) {
    uint32_t number = (uint32_t)(slot - s->agent.slots);
    slot_message request = {.kind = SLOT_SAVE}, answer;
    slot_reply reply;
    bytes_put(&request.body, &number, sizeof(number));
    ckd_status status = ask(&answer, &reply, s, &request, err);
    bytes_free(&request.body);
    slot_message_free(&answer);
    if (!s->agent.link.broken) {
        *saved = reply.checkpoint;
    }
    return status;
}

/*
 * If the agent of one rank is lost, or can no longer talk to the others (STATE), no rank goes on with its own agent. By
 * then all ranks have their answers, so a living agent commits nothing later. *missing becomes that of rank 0.
 */
static bool agents_are_lost(uint8_t *missing, ckd_session *s, ckd_status status, const ckd_error *answer) {
    ckd_error why = {.offset = CKD_NO_OFFSET}, err;
    bool broken = s->agent.link.broken;
    if (!s->agent.joint) {
        if (broken) {
            give_up(s, status, answer);
        }
        return broken;
    }
    ckd_status own = broken && status != CKD_E_BUSY    ? err_set(&why, CKD_E_IO, "the agent has gone")
                     : broken || status == CKD_E_STATE ? err_from(&why, status, answer)
                                                       : CKD_OK;
    if (ranks_agree(s->saver.ranks, own, &why, missing, sizeof(*missing), &err) == CKD_OK) {
        return false;
    }
    (void)session_agent_leave(s, &why); /* a newer state is saved next */
    store_message(s->saver.store, "%s: this session saves by itself from now on", err.message);
    return true;
}

bool session_agent_save(ckd_status *status, ckd_checkpoint *saved, ckd_session *s, session_slot *from,
                        bool one_step, ckd_error *err) {
    shared_slot *to = agents_slot(s, from);
    ckd_id id;
    ckd_error why = {.offset = CKD_NO_OFFSET};
    if (!to || !s->agent.connected) {
        return false;
    }
    *status = next_id(&id, s, err);
    THEN(*status, publish(to, s, from, &id, one_step, err));
    if (*status != CKD_OK && !s->agent.joint) {
        return true;
    }
    /* asks even if the slot is not good, because the other ranks' agents must not wait for it */
    ckd_status answered = ask_for_save(saved, s, to, &why);
    /* The parent was deleted or renamed. The session saves itself: only it knows what to name instead. */
    uint8_t missing = answered == CKD_E_NOT_FOUND;
    if (!agents_are_lost(&missing, s, answered, &why) && !missing) {
        *status = *status == CKD_OK ? err_from(err, answered, &why) : *status;
        return true;
    }
    /*
     * The save may have been committed, or may still be. Otherwise the session saves the same state itself. A store has
     * only one checkpoint of an id, so only one of two saves succeeds.
     */
    *status = CKD_OK;
    if (session_agent_find_saved(saved, s, &id)) {
        return true;
    }
    s->save.checkpoint_id = id;
    return false;
}

/* ---- restores ---- */

typedef struct copying {
    const ckd_session *session;
    const shared_slot *from;
    const slot_content *content;
    const slot_item **items;
} copying;

static ckd_status copy_item(void *context, size_t i, uint32_t worker, ckd_error *err) {
    const copying *c = context;
    (void)worker;
    return slot_copy_item(c->session->items[i].data, c->from, c->content, c->items[i], err);
}

static ckd_status copy_items(bool *found, ckd_session *s, const shared_slot *from, const slot_content *c,
                             ckd_error *err) {
    const slot_item **items = calloc(s->item_count + 1, sizeof(*items));
    ckd_status status =
        items ? CKD_OK : err_nomem(err, s->item_count * sizeof(*items), "what is to be restored");
    *found = items != NULL;
    for (size_t i = 0; i < s->item_count && *found; i++) {
        slot_item wanted_item = item_of(&s->items[i]);
        items[i] = slot_layout_find(from->layout, &wanted_item, i);
        *found = items[i] != NULL && !s->items[i].on_device;
    }
    if (*found) {
        copying all = {s, from, c, items};
        status = pool_run(s->saver.store->pool, s->item_count, copy_item, &all, err);
    }
    free(items);
    return status;
}

/* Errors: NOT_FOUND, and errors that the user should be told of. */
static ckd_status take_values(bool *found, ckd_session *s, const ckd_checkpoint *from, ckd_error *err) {
    slot_message request = {.kind = SLOT_RECALL}, answer;
    slot_reply reply;
    slot_layout layout = {.count = 0};
    shared_slot source = {.layout = &layout};
    slot_content c = {.hashes = NULL};
    bytes encoded = {.size = 0};
    bytes_put(&request.body, &from->id, sizeof(from->id));
    ckd_status status = ask(&answer, &reply, s, &request, err);
    if (status == CKD_OK && answer.fd_count != 1) {
        status = err_set(err, CKD_E_INVALID, "the answer came without memory");
    }
    if (status == CKD_OK) {
        bytes_put(&encoded, answer.body.data + sizeof(reply), answer.body.size - sizeof(reply));
        status = encoded.failed ? err_nomem(err, answer.body.size, "the description of a state")
                                : slot_layout_read(&layout, &encoded, err);
    }
    if (status == CKD_OK) {
        status = shared_memory_map(&source.memory, answer.fds[0], layout.size, false, err);
        answer.fds[0] = -1;
    }
    THEN(status, slot_read(&c, &source, err));
    if (status == CKD_OK && id_equal(&c.request.options.checkpoint_id, &from->id)) {
        status = copy_items(found, s, &source, &c, err);
    }
    slot_content_free(&c);
    shared_memory_release(&source.memory, false);
    slot_layout_free(&layout);
    bytes_free(&encoded);
    slot_message_free(&answer);
    bytes_free(&request.body);
    return status;
}

static bool take_own_values(ckd_session *s, const ckd_checkpoint *from) {
    ckd_error err;
    bool found = false;
    ckd_status status = take_values(&found, s, from, &err);
    if (s->agent.link.broken && !s->agent.joint) { /* with ranks, the next save notices it */
        give_up(s, status, &err);
    } else if (status != CKD_OK && status != CKD_E_NOT_FOUND) {
        store_message(s->saver.store,
                      "the values in the agent's memory are not used, so the checkpoint is loaded: %s",
                      err.message);
    }
    return status == CKD_OK && found;
}

/*
 * Either all ranks take their values from memory or none does. Stored values may be lossy, and replicas must not
 * differ.
 */
bool session_agent_restore(ckd_session *s, const ckd_checkpoint *from, bool tries) {
    ckd_error why = {.offset = CKD_NO_OFFSET};
    pthread_mutex_lock(&s->shared.mutex);
    bool doubted = s->agent.probation.failed && id_equal(&s->agent.probation.of, &from->id);
    pthread_mutex_unlock(&s->shared.mutex);
    bool found = tries && !doubted && s->agent.connected && take_own_values(s, from);
    if (s->agent.joint) {
        ckd_status own = found ? CKD_OK : err_set(&why, CKD_E_NOT_FOUND, "the values are not in memory");
        found = ranks_agree(s->saver.ranks, own, &why, NULL, 0, NULL) == CKD_OK;
    }
    pthread_mutex_lock(&s->shared.mutex);
    s->agent.probation.lasts = found;
    if (!doubted) {
        s->agent.probation.failed = false;
        s->agent.probation.of = from->id;
        s->agent.probation.step = from->step;
    }
    pthread_mutex_unlock(&s->shared.mutex);
    return found;
}

/*
 * The values matched their hashes, so they did not change in the agent's memory. But they may have been damaged before
 * they were hashed, or while the trainer took them over.
 */
void session_agent_doubt(ckd_session *s, uint64_t step) {
    pthread_mutex_lock(&s->shared.mutex);
    uint64_t from = s->agent.probation.step;
    bool doubts = s->agent.probation.lasts && step <= from + PROBATION_STEPS;
    if (doubts) { /* the alarm of a later step may be raised first */
        s->agent.probation.lasts = false;
        s->agent.probation.failed = true;
        note_doubt(s);
    }
    pthread_mutex_unlock(&s->shared.mutex);
    if (doubts && s->store_options.on_message) {
        char text[240];
        snprintf(text, sizeof(text),
                 "training went wrong at step %" PRIu64
                 ", soon after a restart with the values of step %" PRIu64
                 " in the agent's memory: the next restart does not use those",
                 step, from);
        s->store_options.on_message(s->store_options.message_context, text);
    }
}
