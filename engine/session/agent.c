/* The session's side of an agent. */
#include "engine/session/session.h"

#include <stdio.h>
#include <stdlib.h>

#include "base/threads.h"

static void disconnect(ckd_session *s) {
    slots_disconnect(&s->agent.link);
    s->agent.connected = false;
}

static void lose(ckd_session *s, const char *format, const char *why) {
    disconnect(s);
    store_message(s->saver.store, format, why);
}

/* The agent has gone, or shows no sign of life. What it holds it saves when it can. */
static void give_up(ckd_session *s, ckd_status status, const ckd_error *why) {
    lose(s, "%s: this session saves by itself from now on",
         status == CKD_E_BUSY ? why->message : "the agent has gone");
}

/* ---- open, leave ---- */

static const char *wanted(const ckd_session *s) {
    const char *where = s->options.agent ? s->options.agent : getenv("CKPTDELTA_AGENT");
    return where && where[0] && strcmp(where, "0") != 0 ? where : NULL;
}

void session_agent_open(ckd_session *s) {
    char path[LOCAL_PATH_MAX + 1];
    ckd_error err;
    const char *where = wanted(s);
    s->agent.link.fd = -1;
    if (!where) {
        return;
    }
    if (s->options.ranks) {
        store_message(s->saver.store,
                      "an agent does not take sessions of several ranks yet: this one saves by itself");
        return;
    }
    ckd_status status = slots_socket_path(path, s->path, where, &err);
    THEN(status,
         slots_connect(&s->agent.link, path, s->opened_run, slots_wait_ms(s->options.agent_wait_s), &err));
    /* the agent may just have saved what the launch before this one left in memory */
    THEN(status, store_refresh_catalog(s->saver.store, &err));
    s->agent.connected = status == CKD_OK;
    if (status != CKD_OK) {
        lose(s, "no agent takes this session, it saves by itself: %s", err.message);
    }
}

void session_agent_leave(ckd_session *s) {
    if (s->agent.connected) {
        slot_message goodbye = {.kind = SLOT_GOODBYE}, answer = {.fd_count = 0};
        slot_reply reply;
        ckd_error err;
        bool asks = !s->agent.link.broken;
        if (asks && slots_ask(&answer, &reply, &s->agent.link, &goodbye, &err) == CKD_E_BUSY) {
            store_message(s->saver.store, "%s: the session is closed without it", err.message);
        }
        slot_message_free(&answer);
        disconnect(s);
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
        return err_set(err, CKD_E_INVALID, "it gave %zu slots for %u", answer->fd_count, (unsigned)count);
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
        status = slots_ask(&answer, &reply, &s->agent.link, &request, err);
    }
    THEN(status, map_slots(s, &answer, count, err));
    slot_message_free(&answer);
    bytes_free(&request.body);
    return status;
}

bool session_agent_take_memory(ckd_session *s, uint32_t count) {
    ckd_error err;
    pthread_mutex_lock(&s->saver.store_turn);
    bool asks = s->agent.connected && s->agent.count == 0;
    if (asks && take_memory(s, count, &err) != CKD_OK) {
        session_agent_leave(s);
        session_agent_free(s, false);
        store_message(s->saver.store, "the agent takes no snapshots of this session, it saves by itself: %s",
                      err.message);
    }
    pthread_mutex_unlock(&s->saver.store_turn);
    return s->agent.count > 0;
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
    memset(r, 0, sizeof(*r)); /* the padding, too: it is hashed */
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
    return store_refresh_catalog(s->saver.store, NULL) == CKD_OK &&
           catalog_find_id(saved, s->saver.store->catalog, id, NULL) == CKD_OK;
}

bool session_agent_save(ckd_status *status, ckd_checkpoint *saved, ckd_session *s, session_slot *from,
                        bool one_step, ckd_error *err) {
    shared_slot *to = agents_slot(s, from);
    save_stage copied;
    slot_request r;
    slot_reply reply;
    if (!to || !s->agent.connected) {
        return false;
    }
    *status = session_await_fence(&copied, s, from, err);
    for (size_t i = 0; i < s->item_count && *status == CKD_OK; i++) {
        (void)snapshot_read(from->snapshot, i); /* waits until it is copied */
    }
    make_request(&r, s, &copied, one_step);
    THEN(*status, ckd_id_new(&r.options.checkpoint_id, err));
    if (*status != CKD_OK) {
        return true;
    }
    slot_publish(to, &r, from->optimizers);
    s->saver.launch.tried = r.options.checkpoint_id;
    uint32_t number = (uint32_t)(to - s->agent.slots);
    slot_message request = {.kind = SLOT_SAVE}, answer;
    bytes_put(&request.body, &number, sizeof(number));
    ckd_error why;
    *status = slots_ask(&answer, &reply, &s->agent.link, &request, &why);
    bytes_free(&request.body);
    slot_message_free(&answer);
    if (!s->agent.link.broken) {
        *saved = reply.checkpoint;
        err_from(err, *status, &why);
        return true;
    }
    /*
     * Its save may have been committed, or still be. If not, the session saves the same state itself. A store has one
     * checkpoint of an id, so of two saves one succeeds.
     */
    give_up(s, *status, &why);
    *status = CKD_OK;
    if (session_agent_find_saved(saved, s, &r.options.checkpoint_id)) {
        return true;
    }
    s->save.checkpoint_id = r.options.checkpoint_id;
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

/* Errors: NOT_FOUND, and all others of which the user should know. */
static ckd_status take_values(bool *found, ckd_session *s, const ckd_checkpoint *from, ckd_error *err) {
    slot_message request = {.kind = SLOT_RECALL}, answer;
    slot_reply reply;
    slot_layout layout = {.count = 0};
    shared_slot source = {.layout = &layout};
    slot_content c = {.hashes = NULL};
    bytes encoded = {.size = 0};
    bytes_put(&request.body, &from->id, sizeof(from->id));
    ckd_status status = slots_ask(&answer, &reply, &s->agent.link, &request, err);
    if (status == CKD_OK && answer.fd_count != 1) {
        status = err_set(err, CKD_E_INVALID, "an answer without memory");
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

bool session_agent_restore(ckd_session *s, const ckd_checkpoint *from) {
    ckd_error err;
    bool found = false;
    if (!s->agent.connected) {
        return false;
    }
    ckd_status status = take_values(&found, s, from, &err);
    if (s->agent.link.broken) {
        give_up(s, status, &err);
    } else if (status != CKD_OK && status != CKD_E_NOT_FOUND) {
        store_message(s->saver.store,
                      "the values in the agent's memory are not used, the checkpoint is loaded: %s",
                      err.message);
    }
    return status == CKD_OK && found;
}
