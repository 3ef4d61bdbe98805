/* Saves of what is held. */
#include "agent/internal.h"

#include <stdio.h>

#include "base/file.h"
#include "engine/ranks/ranks.h"

#define RETRY_MS 5000

/*
 * Is another try of no use? What an operator can change is tried again: space, rights, locks, a file system that is not
 * mounted, damage of the store. A damaged state stays damaged.
 */
static bool is_final(ckd_status status, const shared_slot *s, const slot_content *content) {
    switch (status) {
    case CKD_E_INVALID:
    case CKD_E_EXISTS:
    case CKD_E_UNSUPPORTED:
    case CKD_E_STATE:
    case CKD_E_MISMATCH:
        return true;
    case CKD_E_CORRUPT:
        return slot_verify(s, content, NULL) != CKD_OK;
    default:
        return false;
    }
}

static void begin_save(connection *c, const slot_request *r) {
    agent *a = c->agent;
    pthread_mutex_lock(&a->mutex);
    c->holding->saving = true;
    c->holding->shown.newest_step = r->options.step;
    snprintf(c->holding->saves_to, sizeof(c->holding->saves_to), "%s", r->run);
    record_write(a);
    pthread_mutex_unlock(&a->mutex);
}

/* done: saved, or given up for good. */
static void end_save(connection *c, uint32_t k, const slot_request *r, const ckd_error *why, bool done) {
    agent *a = c->agent;
    holding *h = c->holding;
    bool saved = why->status == CKD_OK;
    pthread_mutex_lock(&a->mutex);
    h->saving = false;
    h->shown.saved += saved;
    h->shown.failed += !saved;
    snprintf(h->shown.trouble, sizeof(h->shown.trouble), "%.255s", saved ? "" : why->message);
    if (saved) {
        h->shown.durable_step = r->options.step;
        h->set->saved_ns = r->copied_ns;
    }
    if (done) {
        h->set->done[k] = r->options.checkpoint_id;
    }
    record_write(a);
    pthread_cond_broadcast(&a->changed);
    pthread_mutex_unlock(&a->mutex);
}

/* A checkpoint from which the state comes may have been deleted meanwhile. A trainer would go on without it, too. */
static ckd_status save_content(ckd_checkpoint *out, connection *c, const shared_slot *s,
                               slot_content *content, ckd_error *err) {
    ckd_status status = slot_save(out, c->store, c->ranks, s, content, err);
    if (status == CKD_E_NOT_FOUND && !c->holding->shown.connected) {
        content->request.has_parent = content->request.has_resumed = 0;
        status = slot_save(out, c->store, c->ranks, s, content, err);
    }
    return status;
}

static ckd_status save_slot(ckd_checkpoint *out, bool *done, connection *c, uint32_t k, ckd_error *err) {
    slot_set *set = c->holding->set;
    slot_content content;
    ckd_error why = {.offset = CKD_NO_OFFSET};
    *done = false;
    ckd_status status = set && k < set->count
                            ? slot_read(&content, &set->slots[k], &why)
                            : err_set(&why, CKD_E_INVALID, "the session has no slot %u", (unsigned)k);
    if (status != CKD_OK) { /* the other ranks must not wait for this one */
        return c->ranks ? ranks_agree(c->ranks, status, &why, NULL, 0, err) : err_from(err, status, &why);
    }
    if (!local_peer_gone(c->fd, c->holding->watch)) { /* the session waits for it, so it is not late */
        content.request.newest_ns = 0;
    }
    begin_save(c, &content.request);
    status = save_content(out, c, &set->slots[k], &content, &why);
    /* nobody may have heard of a failure yet: the trainer may have died meanwhile */
    bool ended = !c->holding->shown.connected;
    *done = status == CKD_OK || (ended && is_final(status, &set->slots[k], &content));
    end_save(c, k, &content.request, &why, *done);
    slot_content_free(&content);
    return err_from(err, status, &why);
}

ckd_status holding_save(ckd_checkpoint *out, connection *c, uint32_t k, ckd_error *err) {
    bool done;
    return save_slot(out, &done, c, k, err);
}

/* ---- what a trainer left behind ---- */

/*
 * Finds the oldest good slot that is not done. One that is older than a saved one is not wanted any more: its save
 * failed, the session said so, and went on. Damaged ones are reported once, and done.
 */
static bool next_left(uint32_t *slot, uint64_t *step, connection *c) {
    bool found = false;
    uint64_t oldest_ns = 0;
    for (uint32_t i = 0; c->holding->set && i < c->holding->set->count; i++) {
        slot_content content;
        ckd_error why;
        ckd_status status = slot_read(&content, &c->holding->set->slots[i], &why);
        if (status == CKD_E_CORRUPT && !(c->holding->dropped & 1u << i)) {
            c->holding->dropped |= 1u << i;
            agent_say(c->agent, "a state of run '%s' is dropped: %s", c->holding->shown.run, why.message);
        }
        if (status != CKD_OK) {
            continue;
        }
        const ckd_save_options *o = &content.request.options;
        bool done = memcmp(&c->holding->set->done[i], &o->checkpoint_id, sizeof(ckd_id)) == 0;
        uint64_t copied_ns = content.request.copied_ns;
        if (!done && copied_ns >= c->holding->set->saved_ns && (!found || copied_ns < oldest_ns)) {
            *slot = i;
            *step = o->step;
            oldest_ns = copied_ns;
            found = true;
        }
        slot_content_free(&content);
    }
    return found;
}

/* Errors: of a save that may succeed later. */
static ckd_status save_left(connection *c, ckd_error *err) {
    uint32_t k;
    uint64_t step;
    while (next_left(&k, &step, c)) {
        ckd_checkpoint saved;
        bool done;
        ckd_status status = save_slot(&saved, &done, c, k, err);
        if (status == CKD_OK) {
            agent_say(
                c->agent,
                "the trainer of run '%s' has ended without closing its session: its step %llu is durable",
                c->holding->shown.run, (unsigned long long)step);
        } else if (done) {
            agent_say(c->agent, "step %llu of run '%s' cannot be made durable, and is lost: %s",
                      (unsigned long long)step, c->holding->shown.run, err->message);
        } else {
            return status;
        }
    }
    return CKD_OK;
}

static bool stop_comes(const agent *a) {
    bool ready;
    local_wait(&a->stop, 1, RETRY_MS, &ready);
    return ready;
}

void holding_settle(connection *c) {
    agent *a = c->agent;
    holding *h = c->holding;
    for (bool last = false;;) {
        ckd_error why = {.offset = CKD_NO_OFFSET};
        ckd_status status = save_left(c, &why);
        pthread_mutex_lock(&a->mutex);
        bool first = status != CKD_OK && !h->stuck;
        h->settled = status == CKD_OK;
        h->stuck = status != CKD_OK;
        h->ended_ns = clock_monotonic_ns();
        h->fd = status == CKD_OK || last ? -1 : h->fd; /* once it is settled, others may remove it */
        pthread_cond_broadcast(&a->changed);
        pthread_mutex_unlock(&a->mutex);
        if (first) {
            agent_say(a, "what the trainer of run '%s' left is not durable yet, the agent tries again: %s",
                      h->shown.run, why.message);
        }
        if (status == CKD_OK || last) {
            return;
        }
        last = stop_comes(a);
    }
}

ckd_status holdings_drain(agent *a, ckd_error *err) {
    for (bool waiting = true; waiting;) {
        waiting = false;
        for (const holding *h = a->holdings; h; h = h->next) {
            if (h->stuck) {
                return err_set(err, CKD_E_BUSY,
                               "step %llu of run '%s' is only in memory and cannot be made durable: %s",
                               (unsigned long long)h->shown.newest_step, h->shown.run, h->shown.trouble);
            }
            bool ended = h->fd < 0 || local_peer_gone(h->fd, h->watch);
            waiting |= h->saving || (ended && !h->settled);
        }
        if (waiting) {
            pthread_cond_wait(&a->changed, &a->mutex);
        }
    }
    for (holding *h = a->holdings, *next; h; h = next) {
        next = h->next;
        if (h->settled) {
            holding_remove(a, h);
        }
    }
    return CKD_OK;
}
