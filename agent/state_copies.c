/* Copies a state to other nodes and to the local disk, and decides whether that is enough for now. */
#include "agent/internal.h"
#include "engine/ranks/ranks.h"

bool holding_is_recent(const connection *c) {
    double every_s = c->agent->options.store_every_s;
    uint64_t stored_ns = c->holding->stored_ns;
    return every_s > 0 && stored_ns && (double)(clock_monotonic_ns() - stored_ns) * 1e-9 < every_s;
}

/* Keeps this rank's part of the state as files. A failure does not fail the save, and is reported once. */
static bool save_files(ckd_checkpoint *out, uint64_t *version, connection *c, const slot_part *p) {
    tier *t = c->agent->tier;
    const slot_request *r = &p->content->request;
    ckd_error why;
    ckd_status status = slot_verify(p->slot, p->content, &why);
    THEN(status, tier_save(out, version, t, p, &why));
    if (status != CKD_OK && !c->holding->uncopied) {
        agent_say(c->agent,
                  "step %llu of run '%s' is not copied to %s, nor are later ones until it works again: %s",
                  (unsigned long long)r->options.step, r->run,
                  tier_is_alone(t) ? "the local disk" : "other nodes", why.message);
    }
    c->holding->uncopied = status != CKD_OK;
    return status == CKD_OK;
}

/*
 * Takes a snapshot for the local disk if it is time. saved: the files have this state, as this version. All ranks take
 * snapshots of the same states, when rank 0 says that it is time, and only when all have written the last one. So after
 * a loss of all nodes' memory there is a state of which all disks have their part. Collective if there are several
 * ranks.
 */
static void copy_to_disk(connection *c, bool saved, uint64_t version) {
    tier *t = c->agent->tier;
    ckd_error why = {.offset = CKD_NO_OFFSET};
    bool ready = saved && disk_copies_ready(t, c->holding);
    uint8_t due = ready && disk_copies_due(t);
    if (c->ranks) {
        ckd_status own = ready ? CKD_OK : err_set(&why, CKD_E_BUSY, "the last snapshot is being written");
        ready = ranks_agree(c->ranks, own, &why, &due, sizeof(due), NULL) == CKD_OK;
    }
    if (!ready || !due) {
        return;
    }
    ckd_status status = disk_copies_take(t, version, &why);
    if (c->ranks) { /* a state of which one disk lacks its part is of no use */
        status = ranks_agree(c->ranks, status, &why, NULL, 0, NULL);
    }
    disk_copies_decide(t, status == CKD_OK);
}

/*
 * Copies this rank's part of the state, if it lives. Returns true if this is enough for now: the copies are in place,
 * and the store has a recent state. The first state after a restore goes to the store at once, because it records that
 * it was resumed. Collective if there are several ranks.
 */
static bool keep_copies(ckd_checkpoint *out, connection *c, const slot_part *p, bool lives) {
    tier *t = c->agent->tier;
    const slot_request *r = &p->content->request;
    uint64_t version = 0;
    bool may_defer = holding_is_recent(c) && c->holding->shown.connected && !r->has_parent &&
                     !r->has_resumed && !tier_is_tight(t);
    bool saved = lives && save_files(out, &version, c, p);
    if (c->ranks ? c->on_disk : t->disk != NULL) {
        copy_to_disk(c, saved, version);
    }
    /*
     * Other nodes' clocks may be ahead. A restart takes the state with the latest date, so a copy must be dated later
     * than all stored states.
     */
    return saved && may_defer && out->created_ns > c->holding->stored_date && tier_await_copies(t, version);
}

static void set_uncertain(connection *c, bool uncertain) {
    pthread_mutex_lock(&c->agent->mutex);
    c->holding->uncertain = uncertain;
    pthread_mutex_unlock(&c->agent->mutex);
}

/*
 * Does the same for all ranks. It is enough only if it is enough on each. A rank that has ended copies nothing more, so
 * the state then goes to the store. A rank that has copies and does not learn of the others must keep them, because
 * the others may have deferred the state. Collective. Errors: those of slot_plan, on all ranks; the state cannot be
 * saved then.
 */
static ckd_status keep_copies_jointly(bool *enough, ckd_checkpoint *out, connection *c, slot_part *p,
                                      ckd_error *err) {
    ckd_error why = {.offset = CKD_NO_OFFSET};
    bool lives = c->holding->shown.connected && !c->storing;
    ckd_status status = slot_plan(&p->plan, c->ranks, p->slot, err);
    if (status != CKD_OK) {
        return status;
    }
    ckd_status own = keep_copies(out, c, p, lives)
                         ? CKD_OK
                         : err_set(&why, CKD_E_EXISTS, "the store has to have this state");
    ckd_status agreed = ranks_agree(c->ranks, own, &why, NULL, 0, NULL);
    *enough = agreed == CKD_OK;
    /* the exchange itself never fails with EXISTS */
    set_uncertain(c, own == CKD_OK && agreed != CKD_OK && agreed != CKD_E_EXISTS);
    return CKD_OK;
}

ckd_status holding_copy(bool *enough, ckd_checkpoint *out, connection *c, const shared_slot *s,
                        const slot_content *content, ckd_error *err) {
    const holding *h = c->holding;
    slot_part p = {.slot = s, .content = content, .who = {.rank = h->rank, .world = h->world}};
    *enough = false;
    if (c->ranks) {
        return c->copying ? keep_copies_jointly(enough, out, c, &p, err) : CKD_OK;
    }
    if (c->agent->tier && h->shown.connected && !c->storing) {
        *enough = keep_copies(out, c, &p, true);
    }
    return CKD_OK;
}
