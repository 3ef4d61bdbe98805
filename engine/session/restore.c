/* Loads a checkpoint into the registered memory. */
#include "engine/session/session.h"

#include <stdio.h>
#include <stdlib.h>

#include "engine/common/common.h"
#include "engine/ranks/ranks.h"
#include "engine/save/save.h"

typedef struct stored_bytes {
    void *data;
    size_t size;
} stored_bytes;

/* Reads and checks all registered bytes before any of the trainer's memory is written. found: one for each item. */
static ckd_status read_bytes(stored_bytes *found, const ckd_session *s, ckd_load *load, ckd_error *err) {
    for (size_t i = 0; i < s->item_count; i++) {
        const session_item *item = &s->items[i];
        if (!item->is_bytes) {
            continue;
        }
        ckd_status status = ckd_load_blob(&found[i].data, &found[i].size, load, item->tensor.name, err);
        if (status == CKD_E_NOT_FOUND) {
            return err_set(err, CKD_E_MISMATCH, "the checkpoint has no blob '%s'", item->tensor.name);
        }
        if (status != CKD_OK) {
            return status;
        }
        if (found[i].size != item->bytes) {
            return err_set(err, CKD_E_MISMATCH,
                           "the checkpoint stores %zu bytes as '%s', but %llu are registered", found[i].size,
                           item->tensor.name, (unsigned long long)item->bytes);
        }
    }
    return CKD_OK;
}

static ckd_status load_tensors(ckd_session *s, ckd_load *load, ckd_error *err) {
    ckd_load_request *requests = calloc(s->item_count + 1, sizeof(*requests));
    if (!requests) {
        return err_nomem(err, s->item_count * sizeof(*requests), "what is to be restored");
    }
    size_t count = 0;
    for (size_t i = 0; i < s->item_count; i++) {
        const session_item *item = &s->items[i];
        if (!item->is_bytes) {
            requests[count++] = (ckd_load_request){.struct_size = sizeof(*requests),
                                                   .name = item->tensor.name,
                                                   .dtype = item->tensor.dtype,
                                                   .ndim = item->tensor.ndim,
                                                   .shape = item->tensor.shape,
                                                   .region = item->tensor.region,
                                                   .data = item->data,
                                                   .size = (size_t)item->bytes,
                                                   .device = item->on_device ? &item->device : NULL};
        }
    }
    /* The checkpoint may hold more, for other ranks or other uses of the run. */
    ckd_status status = ckd_load_all(load, requests, count, CKD_DIFFERS_UNEXPECTED, err);
    free(requests);
    return status;
}

static bool has_bytes(const ckd_session *s) {
    bool found = false;
    for (size_t i = 0; i < s->item_count && !found; i++) {
        found = s->items[i].is_bytes;
    }
    return found;
}

/* in_memory: the values were taken from the agent's memory. Registered bytes are rank 0's on all ranks. */
static ckd_status load_into(ckd_session *s, const ckd_checkpoint *from, bool in_memory, ckd_error *err) {
    if (in_memory && (s->save.rank == 0 || !has_bytes(s))) {
        return CKD_OK;
    }
    stored_bytes *found = calloc(s->item_count + 1, sizeof(*found));
    if (!found) {
        return err_nomem(err, s->item_count * sizeof(*found), "what is to be restored");
    }
    ckd_load *load = NULL;
    ckd_status status = ckd_load_begin(&load, s->saver.store, &from->id, err);
    THEN(status, read_bytes(found, s, load, err));
    THEN(status, in_memory ? CKD_OK : load_tensors(s, load, err));
    for (size_t i = 0; i < s->item_count; i++) {
        if (status == CKD_OK && s->items[i].is_bytes && found[i].size > 0) {
            memcpy(s->items[i].data, found[i].data, found[i].size);
        }
        ckd_blob_free(found[i].data);
    }
    ckd_load_end(load);
    free(found);
    return status;
}

/*
 * Makes later saves record that they were resumed from it. The next save is a delta on it, in a branch if the run has
 * gone further.
 */
static void resume_from(ckd_session *s, const ckd_checkpoint *from, const ckd_id *newest) {
    snprintf(s->run, sizeof(s->run), "%s", from->run);
    snprintf(s->parent_run, sizeof(s->parent_run), "%s", from->run);
    s->save.parent_run = s->save.base ? NULL : s->parent_run;
    s->save.parent_step = from->step;
    snprintf(s->resumed_run, sizeof(s->resumed_run), "%s", from->run);
    s->save.resumed_from_run = s->resumed_run;
    s->save.resumed_from_step = from->step;
    session_record_last(s, from);
    bool rewound = !id_equal(&from->id, newest);
    s->save.on_duplicate =
        rewound && s->on_duplicate == CKD_DUPLICATE_ERROR ? CKD_DUPLICATE_BRANCH : s->on_duplicate;
    pthread_mutex_lock(&s->shared.mutex);
    s->shared.state.durable_step = from->step;
    pthread_mutex_unlock(&s->shared.mutex);
}

/* Whether the item has the step, or, for CKD_LATEST, is the newest of its run. The list is by run, then step. */
static bool is_candidate(const ckd_checkpoint_list *list, size_t i, uint64_t step) {
    const ckd_checkpoint *c = &list->items[i];
    return step == CKD_LATEST ? i + 1 == list->count || strcmp(list->items[i + 1].run, c->run) != 0
                              : c->step == step;
}

/*
 * Finds the checkpoint that was committed last (at `step`, unless that is CKD_LATEST). It looks in the requested run
 * and in branches (RUN~2, ...) that continued the run after a restore of an older step. In a run the highest step is
 * the newest: the clock may have been set back. Between runs only the dates of their newest checkpoints can decide,
 * because abandoned steps may be higher. save_date dates each save later than these.
 */
static ckd_status find_last(ckd_checkpoint *out, ckd_session *s, uint64_t step, ckd_error *err) {
    char own_root[CKD_RUN_MAX + 1], root[CKD_RUN_MAX + 1];
    unsigned first, number;
    ckd_checkpoint_list *list;
    branch_root(own_root, &first, s->opened_run);
    ckd_status status = ckd_store_list(&list, s->saver.store, NULL, err);
    if (status != CKD_OK) {
        return status;
    }
    const ckd_checkpoint *last = NULL;
    for (size_t i = 0; i < list->count; i++) {
        const ckd_checkpoint *c = &list->items[i];
        branch_root(root, &number, c->run);
        if (is_candidate(list, i, step) && strcmp(root, own_root) == 0 && number >= first &&
            (!last || c->created_ns >= last->created_ns)) {
            last = c;
        }
    }
    status = last ? CKD_OK : err_set(err, CKD_E_NOT_FOUND, "the run '%s' has no checkpoints", s->opened_run);
    *out = last ? *last : (ckd_checkpoint){.step = 0};
    ckd_checkpoint_list_free(list);
    return status;
}

/* Finds a step of the current run, else of the runs that it branched off, else of a branch that continued it. */
static ckd_status find_step(ckd_checkpoint *out, ckd_session *s, uint64_t step, ckd_error *err) {
    char name[CKD_RUN_MAX + 1], root[CKD_RUN_MAX + 1];
    unsigned number;
    ckd_error first = {0};
    ckd_status status = ckd_store_find(out, s->saver.store, s->run, step, &first);
    snprintf(name, sizeof(name), "%s", s->run);
    while (status == CKD_E_NOT_FOUND && branch_root(root, &number, name)) {
        (void)branch_name(name, root, number - 1, NULL); /* not longer than before */
        ckd_error why = {0};
        status = ckd_store_find(out, s->saver.store, name, step, &why);
        first = status == CKD_E_NOT_FOUND ? first : why;
    }
    if (status == CKD_E_NOT_FOUND) {
        ckd_error why = {.offset = CKD_NO_OFFSET};
        ckd_status in_branches = find_last(out, s, step, &why);
        status = in_branches == CKD_E_NOT_FOUND ? status : in_branches;
        first = in_branches == CKD_E_NOT_FOUND ? first : why;
    }
    return err_from(err, status, &first);
}

/*
 * If options allow it and there is an older checkpoint, sets *from to it and returns true. Otherwise the caller keeps
 * the error of the damaged checkpoint.
 */
static bool take_older(ckd_checkpoint *from, const ckd_session *s, const ckd_error *why) {
    ckd_checkpoint older;
    if (!s->options.restore_older || !ckd_error_is_damage(why) ||
        ckd_store_previous(&older, s->saver.store, from->run, from->step, NULL) != CKD_OK) {
        return false;
    }
    store_message(s->saver.store, "%s@%llu is damaged (%s): %s@%llu is restored instead", from->run,
                  (unsigned long long)from->step, why->message, older.run, (unsigned long long)older.step);
    *from = older;
    return true;
}

/* With CKD_LATEST: an unreadable checkpoint may be newer. */
static ckd_status check_last(const ckd_session *s, const ckd_checkpoint *from, ckd_error *err) {
    ckd_error why = {.offset = CKD_NO_OFFSET};
    ckd_status status = ckd_store_check_newest(s->saver.store, from, &why);
    THEN(status, store_check_later_branches(s->saver.store, from, &why));
    if (status != CKD_OK && s->options.restore_older && ckd_error_is_damage(&why)) {
        store_message(s->saver.store, "%s", why.message);
        return CKD_OK;
    }
    return err_from(err, status, &why);
}

static ckd_status find_latest(ckd_checkpoint *out, ckd_session *s, ckd_error *err) {
    ckd_status status;
    ckd_error why, found = {.offset = CKD_NO_OFFSET};
    do { /* EXISTS: another launch has committed a newer one meanwhile */
        why = (ckd_error){.offset = CKD_NO_OFFSET};
        status = find_last(out, s, CKD_LATEST, &why);
        THEN(status, check_last(s, out, &why));
    } while (status == CKD_E_EXISTS);
    if (status == CKD_E_NOT_FOUND && store_check_unlisted(s->saver.store, s->opened_run, &found) != CKD_OK) {
        return err_from(err, found.status, &found);
    }
    if (status == CKD_OK) {
        status = ckd_store_healthy(out, s->saver.store, out, &why);
        if (status != CKD_OK && s->options.restore_older && !out->suspect && ckd_error_is_damage(&why)) {
            store_message(s->saver.store, "%s", why.message);
            return CKD_OK;
        }
    }
    return err_from(err, status, &why);
}

/* A checkpoint to restore, and the newest of its run. */
typedef struct place {
    ckd_checkpoint from;
    ckd_id newest;
} place;

static ckd_status find_place(place *out, ckd_session *s, uint64_t step, ckd_error *err) {
    ckd_checkpoint newest;
    /* the previous launch may have died after this one opened the store, with its last save not in the catalog */
    ckd_status status = store_refresh_catalog(s->saver.store, err);
    THEN(status, step == CKD_LATEST ? find_latest(&out->from, s, err) : find_step(&out->from, s, step, err));
    THEN(status, ckd_store_find(&newest, s->saver.store, out->from.run, CKD_LATEST, err));
    out->newest = status == CKD_OK ? newest.id : out->newest;
    return status;
}

/* A place as rank 0 sends it: run, step, the checkpoint's id, the id of the newest. */
enum {
    AT_STEP = CKD_RUN_MAX + 1,
    AT_ID = AT_STEP + 8,
    AT_NEWEST = AT_ID + sizeof(ckd_id),
    PLACE_BYTES = AT_NEWEST + sizeof(ckd_id)
};

static void put_place(uint8_t to[PLACE_BYTES], const place *p) {
    memcpy(to, p->from.run, CKD_RUN_MAX + 1);
    store_le64(to + AT_STEP, p->from.step);
    memcpy(to + AT_ID, p->from.id.bytes, sizeof(ckd_id));
    memcpy(to + AT_NEWEST, p->newest.bytes, sizeof(ckd_id));
}

/* Finds the checkpoint that rank 0 has chosen. */
static ckd_status take_place(place *out, ckd_session *s, const uint8_t chosen[PLACE_BYTES], ckd_error *err) {
    char run[CKD_RUN_MAX + 1];
    uint64_t step = load_le64(chosen + AT_STEP);
    ckd_id id;
    memcpy(run, chosen, sizeof(run));
    run[CKD_RUN_MAX] = '\0';
    memcpy(&id, chosen + AT_ID, sizeof(id));
    memcpy(&out->newest, chosen + AT_NEWEST, sizeof(id));
    ckd_status status = store_refresh_catalog(s->saver.store, err);
    THEN(status, ckd_store_find(&out->from, s->saver.store, run, step, err));
    if (status == CKD_OK && !id_equal(&out->from.id, &id)) {
        status = err_set(err, CKD_E_NOT_FOUND, "%s@%llu is not the same checkpoint here as on rank 0", run,
                         (unsigned long long)step);
    }
    return status;
}

/*
 * Rank 0 chooses, because ranks may see different states of a store on a network file system while it is being saved
 * to. No rank goes on before all have loaded that checkpoint.
 */
static ckd_status load_together(place *p, ckd_session *s, uint64_t step, ckd_error *err) {
    ckd_ranks *ranks = s->saver.ranks;
    bool chooses = s->save.rank == 0;
    ckd_error why = {.offset = CKD_NO_OFFSET};
    uint8_t chosen[PLACE_BYTES] = {0};
    ckd_status status = chooses ? find_place(p, s, step, &why) : CKD_OK;
    if (chooses && status == CKD_OK) {
        put_place(chosen, p);
    }
    status = ranks_agree(ranks, status, &why, chosen, sizeof(chosen), err);
    if (status != CKD_OK) {
        return status;
    }
    ckd_status own = chooses ? CKD_OK : take_place(p, s, chosen, &why);
    bool in_memory = session_agent_restore(s, &p->from, own == CKD_OK);
    THEN(own, load_into(s, &p->from, in_memory, &why));
    return ranks_agree(ranks, own, &why, NULL, 0, err);
}

static ckd_status load_alone(place *p, ckd_session *s, uint64_t step, ckd_error *err) {
    ckd_error why = {.offset = CKD_NO_OFFSET};
    ckd_status status = find_place(p, s, step, err);
    if (status == CKD_OK) {
        do {
            bool in_memory = session_agent_restore(s, &p->from, true);
            status = load_into(s, &p->from, in_memory, &why);
        } while (status != CKD_OK && take_older(&p->from, s, &why));
        err_from(err, status, &why);
    }
    return status;
}

/* The caller holds store_turn. */
static ckd_status restore(ckd_checkpoint *from, ckd_session *s, uint64_t step, ckd_error *err) {
    place p = {.from = {.step = 0}};
    ckd_status status = (s->saver.ranks ? load_together : load_alone)(&p, s, step, err);
    if (status == CKD_OK) {
        *from = p.from;
        resume_from(s, from, &p.newest);
        s->saver.reference = NULL;
    }
    return status;
}

ckd_status ckd_session_restore(ckd_checkpoint *from, ckd_session *s, uint64_t step, ckd_error *err) {
    ckd_checkpoint found = {.step = 0};
    if (from) {
        *from = found;
    }
    ckd_status status = session_check(s, err);
    if (status != CKD_OK) {
        return status;
    }
    (void)session_enter(s, CKD_PROGRESS_START);
    session_fence(s, SNAPSHOT_ALL);
    session_drain(s);
    pthread_mutex_lock(&s->saver.store_turn);
    status = restore(&found, s, step, err);
    pthread_mutex_unlock(&s->saver.store_turn);
    if (status == CKD_OK) {
        session_alarms_restored(s, found.step);
        s->trainer.last_step =
            found.step; /* the next step must be higher than this one, even if training went back */
        s->trainer.left_ns = 0;
        if (from) {
            *from = found;
        }
    }
    return status;
}
