/* Makes states in memory durable. */
#include "agent/internal.h"

#include <stdio.h>

#include "base/file.h"
#include "engine/ranks/ranks.h"

#define RETRY_MS 5000

/*
 * Whether another attempt is useless. Attempts are repeated after causes that an operator can remove: space,
 * permissions, locks, a file system that is not mounted, damage to the store. A damaged state stays damaged.
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

/* Records that the state is on other nodes, and will be stored later. */
static void end_deferred(connection *c, const slot_request *r) {
    agent *a = c->agent;
    holding *h = c->holding;
    pthread_mutex_lock(&a->mutex);
    h->saving = false;
    h->deferred++;
    h->failed_ns = 0;
    h->shown.saved++;
    h->shown.trouble[0] = '\0';
    if (!tier_is_alone(a->tier)) {
        h->shown.copied_step = r->options.step;
    }
    h->deferred_id = r->options.checkpoint_id;
    record_write(a);
    pthread_cond_broadcast(&a->changed);
    pthread_mutex_unlock(&a->mutex);
}

/* r: NULL: there was nothing to save. date: created_ns of the checkpoint. done: saved, or given up for good. */
static void end_save(connection *c, uint32_t k, const slot_request *r, uint64_t date, const ckd_error *why,
                     bool done) {
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
        h->stored_date = date;
        h->set->saved_ns = r->copied_ns;
        h->stored_ns = clock_monotonic_ns();
        h->deferred = 0;
        h->failed_ns = 0;
        h->due = h->called = h->uncertain = false;
    }
    if (done) {
        h->set->done[k] = r->options.checkpoint_id;
    }
    record_write(a);
    pthread_cond_broadcast(&a->changed);
    pthread_mutex_unlock(&a->mutex);
}

/* Whether the trainer has ended, and those of all other ranks. Collective if there are several ranks. */
static bool all_have_ended(connection *c) {
    ckd_error why = {.offset = CKD_NO_OFFSET};
    bool ended = !c->holding->shown.connected;
    if (!c->ranks) {
        return ended;
    }
    ckd_status own = ended ? CKD_OK : err_set(&why, CKD_E_BUSY, "its trainer is alive");
    return ranks_agree(c->ranks, own, &why, NULL, 0, NULL) == CKD_OK;
}

/*
 * The parent, or the checkpoint that training resumed from, may have been deleted meanwhile. Then the state of an ended
 * trainer is saved without it. All ranks get NOT_FOUND, or none does.
 */
static ckd_status save_content(ckd_checkpoint *out, connection *c, const shared_slot *s,
                               slot_content *content, ckd_error *err) {
    ckd_status status = slot_save(out, c->store, c->ranks, s, content, err);
    if (status == CKD_E_NOT_FOUND && all_have_ended(c)) {
        content->request.has_parent = content->request.has_resumed = 0;
        status = slot_save(out, c->store, c->ranks, s, content, err);
    }
    return status;
}

/* Errors: INVALID (the slot is not good), CORRUPT, NOMEM. */
static ckd_status read_slot(slot_content *out, connection *c, uint32_t k, ckd_error *err) {
    const slot_set *set = c->holding->set;
    *out = (slot_content){.hashes = NULL};
    ckd_status status = set && k < set->count
                            ? slot_read(out, &set->slots[k], err)
                            : err_set(err, CKD_E_INVALID, "the session has no slot %u", (unsigned)k);
    if (status == CKD_E_NOT_FOUND) { /* to other ranks, this would mean that a parent was deleted */
        status = err_set(err, CKD_E_INVALID, "the state was not copied whole");
    }
    if (status == CKD_OK) {
        begin_save(c, &out->request);
    }
    return status;
}

/* Reads the good slot of a checkpoint. Errors: INVALID (there is none). */
static ckd_status read_slot_of(slot_content *out, uint32_t *k, connection *c, const ckd_id *id,
                               ckd_error *err) {
    const slot_set *set = c->holding->set;
    for (uint32_t i = 0; set && i < set->count; i++) {
        if (slot_read(out, &set->slots[i], NULL) == CKD_OK &&
            id_equal(&out->request.options.checkpoint_id, id)) {
            *k = i;
            begin_save(c, &out->request);
            return CKD_OK;
        }
        slot_content_free(out);
    }
    *out = (slot_content){.hashes = NULL};
    return err_set(err, CKD_E_INVALID, "the state was not copied whole, or has been overwritten");
}

/*
 * Chooses the last state that only other nodes have, for all ranks to store. A rank that is about to save a later one
 * does that in the next round. Leaves no content if this rank does not have the state. Collective.
 */
static ckd_status agree_on_deferred(slot_content *content, uint32_t *k, connection *c, ckd_error *why) {
    ckd_error mine = {.offset = CKD_NO_OFFSET};
    slot_content_free(content);
    ckd_status own = read_slot_of(content, k, c, &c->holding->deferred_id, &mine);
    ckd_status status = ranks_agree(c->ranks, own, &mine, NULL, 0, why);
    if (status != CKD_OK) {
        slot_content_free(content);
    }
    return status;
}

/*
 * Chooses the state that all ranks save: that of rank 0, unless a rank wants the last deferred state stored. After
 * failed saves, a rank that was killed earlier has fewer states than the others, which may have overwritten older ones.
 * own: the status of reading slot k, which this rank would save. Leaves no content if this rank does not have the
 * state. *deferred: it is the last deferred state. Collective.
 */
static ckd_status agree_on_state(slot_content *content, uint32_t *k, bool *deferred, connection *c,
                                 ckd_status own, ckd_error *why) {
    ckd_id id = own == CKD_OK ? content->request.options.checkpoint_id : (ckd_id){{0}}, first = id;
    ckd_error mine = *why;
    own = c->holding->rank == 0 ? own : CKD_OK;
    own = c->storing ? err_set(&mine, CKD_E_EXISTS, "a state is stored that only other nodes have") : own;
    ckd_status status = ranks_agree(c->ranks, own, &mine, &first, sizeof(first), why);
    *deferred = status == CKD_E_EXISTS; /* the exchange itself never fails with this */
    if (*deferred) {
        return agree_on_deferred(content, k, c, why);
    }
    if (status != CKD_OK || id_equal(&id, &first)) {
        return status;
    }
    slot_content_free(content);
    status = read_slot_of(content, k, c, &first, &mine);
    /* the others are about to plan the save, and must not wait for this one */
    return status == CKD_OK ? CKD_OK : ranks_agree(c->ranks, status, &mine, NULL, 0, why);
}

/* ---- deferred states ---- */

/* Tells other nodes' agents that their ranks must store the last deferred state, too. Once for each state. */
static void call_ranks(connection *c) {
    if (!c->holding->called) {
        c->holding->called = true;
        restart_call_ranks(c->agent->tier, &c->holding->group);
    }
}

bool holdings_defer(agent *a) {
    bool any = false;
    pthread_mutex_lock(&a->mutex);
    for (const holding *h = a->holdings; h && !any; h = h->next) {
        any = h->deferred > 0;
    }
    pthread_mutex_unlock(&a->mutex);
    return any;
}

/*
 * Whether the deferred state must be stored now. After a failure there is a pause, unless a drain has begun since.
 * Under the agent's mutex.
 */
static bool is_due(const connection *c) {
    const agent *a = c->agent;
    const holding *h = c->holding;
    if (!h->deferred) {
        return false;
    }
    if (h->failed_ns) {
        return (a->drains > 0 && h->failed_drain < a->last_drain) ||
               clock_monotonic_ns() - h->failed_ns > RETRY_MS * UINT64_C(1000000);
    }
    return h->due || a->drains > 0 || !holding_is_recent(c) || tier_is_poor(a->tier);
}

/* How a save has ended. */
typedef enum save_outcome {
    SAVE_FAILED,   /* another try may succeed */
    SAVE_DONE,     /* saved, or given up for good */
    SAVE_DEFERRED, /* on other nodes, and to be saved later */
    SAVE_OF_OTHER, /* the ranks have tried to store a deferred state first */
    SAVE_OF_NONE   /* this rank does not have what the ranks tried to save */
} save_outcome;

/*
 * *k: the slot to save; on return the slot that the ranks have chosen. out: its step and its id are set even after a
 * failure. A state whose trainer lives is copied to other nodes.
 */
static ckd_status save_slot(ckd_checkpoint *out, save_outcome *end, connection *c, uint32_t *k,
                            ckd_error *err) {
    slot_content content;
    bool other = false;
    ckd_error why = {.offset = CKD_NO_OFFSET};
    ckd_status status = read_slot(&content, c, *k, &why);
    status = c->ranks ? agree_on_state(&content, k, &other, c, status, &why) : status;
    other = other && !c->storing;
    if (!content.hashes) {
        *end = other ? SAVE_OF_OTHER : SAVE_OF_NONE;
        end_save(c, *k, NULL, 0, &why, false);
        return err_from(err, status, &why);
    }
    const shared_slot *s = &c->holding->set->slots[*k];
    if (!local_peer_gone(c->fd, c->holding->watch)) { /* the session waits for it, so it is not late */
        content.request.newest_ns = 0;
    }
    bool enough = false;
    THEN(status, holding_copy(&enough, out, c, s, &content, &why));
    if (enough) {
        *end = SAVE_DEFERRED;
        end_deferred(c, &content.request);
        slot_content_free(&content);
        return CKD_OK;
    }
    content.request.one_step &= !c->holding->deferred; /* the parent in the store is an older one */
    THEN(status, save_content(out, c, s, &content, &why));
    /* the trainer may have died meanwhile, so no session has learned of a failure */
    bool ended = !c->holding->shown.connected;
    bool done = status == CKD_OK || (ended && !c->storing && is_final(status, s, &content));
    *end = other ? SAVE_OF_OTHER : done ? SAVE_DONE : SAVE_FAILED;
    why.status = status; /* `why` may be of an attempt before the one that succeeded */
    end_save(c, *k, &content.request, status == CKD_OK ? out->created_ns : 0, &why, done);
    out->step = content.request.options.step;
    out->id = content.request.options.checkpoint_id;
    slot_content_free(&content);
    return err_from(err, status, &why);
}

ckd_status holding_save(ckd_checkpoint *out, connection *c, uint32_t k, ckd_error *err) {
    save_outcome end = SAVE_OF_OTHER;
    uint32_t chosen = k;
    ckd_status status = CKD_OK;
    while (end == SAVE_OF_OTHER) {
        chosen = k;
        status = save_slot(out, &end, c, &chosen, err);
    }
    return status == CKD_OK && chosen != k
               ? err_set(err, CKD_E_INVALID, "other ranks have ended before they copied this state")
               : status;
}

/* ---- what a trainer left behind ---- */

/*
 * Finds the oldest good slot that is not done. A slot older than a saved one is no longer wanted: its save failed, the
 * session reported that, and went on. Damaged slots are reported once, and skipped. If states were only copied to other
 * nodes so far, only the newest one is wanted.
 */
static bool next_left(uint32_t *slot, connection *c) {
    bool found = false;
    bool newest = c->holding->deferred > 0;
    uint64_t chosen_ns = 0;
    for (uint32_t i = 0; c->holding->set && i < c->holding->set->count; i++) {
        slot_content content;
        ckd_error why;
        ckd_status status = slot_read(&content, &c->holding->set->slots[i], &why);
        if (status == CKD_E_CORRUPT && !c->storing && !(c->holding->dropped & 1u << i)) {
            c->holding->dropped |= 1u << i;
            agent_say(c->agent, "a state of run '%s' is dropped: %s", c->holding->shown.run, why.message);
        }
        if (status != CKD_OK) {
            continue;
        }
        const ckd_save_options *o = &content.request.options;
        bool done = memcmp(&c->holding->set->done[i], &o->checkpoint_id, sizeof(ckd_id)) == 0;
        uint64_t copied_ns = content.request.copied_ns;
        bool better = !found || (newest ? copied_ns > chosen_ns : copied_ns < chosen_ns);
        if (!done && copied_ns >= c->holding->set->saved_ns && better) {
            *slot = i;
            chosen_ns = copied_ns;
            found = true;
        }
        slot_content_free(&content);
    }
    return found;
}

/* Whether sessions of ranks have saved by themselves what their agents could not save together. */
static bool is_saved_by_ranks(const connection *c, const ckd_id *id) {
    return c->ranks && c->agent->tier && restart_is_stored(c->agent->tier, id);
}

/* Errors: those of a save that may succeed later. */
static ckd_status save_left(connection *c, ckd_error *err) {
    for (uint32_t k; next_left(&k, c);) {
        ckd_checkpoint saved = {.step = 0};
        save_outcome end;
        ckd_status status = save_slot(&saved, &end, c, &k, err);
        if (status == CKD_OK && !c->holding->shown.connected && !c->holding->goodbye) {
            agent_say(
                c->agent,
                "the trainer of run '%s' has ended without closing its session: its step %llu is durable",
                c->holding->shown.run, (unsigned long long)saved.step);
        } else if (status != CKD_OK && end == SAVE_DONE && c->ranks &&
                   (c->holding->deferred || c->holding->uncertain)) {
            agent_say(c->agent,
                      "step %llu of run '%s' cannot be stored by its ranks alone, and copied states become "
                      "durable when the job starts again, from the memory of its nodes: %s",
                      (unsigned long long)saved.step, c->holding->shown.run, err->message);
        } else if (status != CKD_OK && end == SAVE_DONE) {
            if (!is_saved_by_ranks(c, &saved.id)) {
                agent_say(c->agent, "step %llu of run '%s' cannot be made durable, and is lost: %s",
                          (unsigned long long)saved.step, c->holding->shown.run, err->message);
            }
        } else if (status != CKD_OK && (end == SAVE_FAILED || !c->ranks)) {
            return status;
        }
    }
    return CKD_OK;
}

/* Stores the last deferred state of ranks, together with all of them. */
static ckd_status store_jointly(connection *c, ckd_error *err) {
    ckd_checkpoint saved;
    save_outcome end;
    uint32_t k = 0;
    call_ranks(c);
    return c->holding->deferred ? save_slot(&saved, &end, c, &k, err) : CKD_OK;
}

ckd_status holding_store(connection *c, ckd_error *err) {
    ckd_error why;
    c->storing = true;
    ckd_status status = c->ranks ? store_jointly(c, &why) : save_left(c, &why);
    c->storing = false;
    return err_from(err, status, &why);
}

/*
 * Records a failed attempt. If nothing has failed and the state is still not stored, it is no longer whole in memory.
 */
static void end_try(connection *c, uint64_t drain, const ckd_error *why) {
    agent *a = c->agent;
    holding *h = c->holding;
    pthread_mutex_lock(&a->mutex);
    bool failed = h->deferred > 0, first = failed && !h->failed_ns;
    if (failed) {
        h->failed_ns = clock_monotonic_ns();
        h->failed_drain = drain;
        snprintf(h->shown.trouble, sizeof(h->shown.trouble), "%.255s", why->message);
    }
    pthread_cond_broadcast(&a->changed);
    pthread_mutex_unlock(&a->mutex);
    if (first) {
        agent_say(a, "the newest state of run '%s' is on %s, and cannot be stored, the agent tries again: %s",
                  h->shown.run, tier_is_alone(a->tier) ? "the local disk" : "other nodes", why->message);
    }
}

void holding_store_if_due(connection *c) {
    agent *a = c->agent;
    ckd_error why = {.offset = CKD_NO_OFFSET};
    pthread_mutex_lock(&a->mutex);
    bool due = is_due(c);
    uint64_t drain = a->last_drain;
    pthread_mutex_unlock(&a->mutex);
    if (due) {
        ckd_status status = holding_store(c, &why);
        if (status == CKD_OK) {
            err_set(&why, CKD_E_NOT_FOUND, "its memory does not have this state whole");
        }
        end_try(c, drain, &why);
    }
}

static bool stop_comes(const agent *a) {
    bool ready;
    local_wait(&a->stop, 1, RETRY_MS, &ready);
    return ready;
}

bool holding_settle(connection *c) {
    agent *a = c->agent;
    holding *h = c->holding;
    pthread_mutex_lock(&a->mutex);
    bool stops = a->stopping;
    pthread_mutex_unlock(&a->mutex);
    if (c->ranks && h->deferred && stops) { /* other ranks may go on, and need not save now */
        (void)holding_store(c, NULL);
    }
    for (bool last = false;;) {
        ckd_error why = {.offset = CKD_NO_OFFSET};
        ckd_status status = save_left(c, &why);
        pthread_mutex_lock(&a->mutex);
        bool first = status != CKD_OK && !h->stuck;
        h->settled = status == CKD_OK;
        bool durable = h->settled && !h->deferred && !h->uncertain && h->stored_ns > 0;
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
            return durable;
        }
        last = stop_comes(a);
    }
}

ckd_status holdings_assemble(agent *a, ckd_error *err) {
    for (;;) {
        char run[CKD_RUN_MAX + 1];
        const holding *left = a->holdings;
        while (left && !holding_lacks_parts(left)) {
            left = left->next;
        }
        if (!left) {
            return CKD_OK;
        }
        ckd_id id = left->deferred_id;
        snprintf(run, sizeof(run), "%s", left->shown.run);
        pthread_mutex_unlock(&a->mutex);
        bool all = restart_is_stored(a->tier, &id) || restart_from_peers(a->tier, run) ||
                   restart_is_stored(a->tier, &id);
        pthread_mutex_lock(&a->mutex);
        if (!all) {
            return err_set(err, CKD_E_BUSY,
                           "a state of run '%s' is only in the memory of several nodes, and cannot be put "
                           "together at present",
                           run);
        }
        for (holding *h = a->holdings; h; h = h->next) {
            h->deferred = h->settled && strcmp(h->shown.run, run) == 0 ? 0 : h->deferred;
        }
    }
}

/* Whether drain number `drain` waits in vain for this holding. */
static bool fails_drain(const holding *h, uint64_t drain) {
    return h->stuck || (!h->settled && h->deferred && h->failed_ns && h->failed_drain >= drain);
}

ckd_status holdings_drain(agent *a, ckd_error *err) {
    uint64_t drain = ++a->last_drain, begun_ns = clock_monotonic_ns();
    for (bool waiting = true; waiting;) {
        waiting = false;
        for (const holding *h = a->holdings; h; h = h->next) {
            if (fails_drain(h, drain)) {
                return err_set(err, CKD_E_BUSY,
                               "step %llu of run '%s' is only in memory and cannot be made durable: %s",
                               (unsigned long long)h->shown.newest_step, h->shown.run, h->shown.trouble);
            }
            bool ended = h->fd < 0 || local_peer_gone(h->fd, h->watch);
            /* trainers go on meanwhile, and there is always a later state */
            bool later = h->set && h->set->saved_ns >= begun_ns;
            waiting |= !h->settled && (ended || (!later && (h->saving || h->deferred)));
        }
        if (waiting) {
            pthread_cond_wait(&a->changed, &a->mutex);
        }
    }
    ckd_status status = holdings_assemble(a, err);
    for (holding *h = a->holdings, *next; h && status == CKD_OK; h = next) {
        next = h->next;
        if (h->settled) {
            holding_remove(a, h);
        }
    }
    return status;
}
