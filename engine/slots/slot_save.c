/* Makes a checkpoint of the state in a slot. */
#include "engine/slots/slots.h"

#include <stdlib.h>

#include "engine/ranks/ranks.h"
#include "engine/save/save.h"

static launch_record launch_of(const slot_request *r) {
    launch_record launch = {.has_last = r->launch_has_last != 0,
                            .own = r->launch_own != 0,
                            .last = r->launch_last,
                            .step = r->launch_step,
                            .tried = r->launch_tried,
                            .newest_ns = r->newest_ns};
    memcpy(launch.run, r->launch_run, sizeof(launch.run));
    return launch;
}

/* Replaces the pointers of the writer's process by our own. */
static ckd_save_options options_of(const slot_request *r) {
    ckd_save_options o = r->options;
    o.struct_size = sizeof(o);
    o.run = r->run;
    o.parent_run = r->has_parent ? r->parent_run : NULL;
    o.resumed_from_run = r->has_resumed ? r->resumed_run : NULL;
    o.metric_name = r->has_metric ? r->metric_name : NULL;
    o.rank = o.world = 0;
    o.on_progress = NULL;
    o.progress_context = NULL;
    return o;
}

/* plan: which tensors this rank writes; rank 0 also writes the blobs. NULL: all of the state. */
static ckd_status save_items(ckd_save *save, const ckd_plan *plan, uint32_t rank, const shared_slot *s,
                             const slot_content *c, ckd_error *err) {
    ckd_status status = CKD_OK;
    size_t tensors = 0;
    for (size_t i = 0; i < s->layout->count && status == CKD_OK; i++) {
        const slot_item *item = &s->layout->items[i];
        const uint8_t *data = slot_data(s) + item->place;
        if (item->is_bytes) {
            status = plan && rank ? CKD_OK
                                  : ckd_save_blob(save, item->tensor.name, data, (size_t)item->bytes, err);
            continue;
        }
        if (plan && !ckd_plan_writes(plan, rank, tensors++)) {
            continue;
        }
        ckd_tensor t = item->tensor;
        t.data = data;
        t.optimizer = c->request.one_step && c->optimizers[i].struct_size == sizeof(ckd_optimizer)
                          ? &c->optimizers[i]
                          : NULL;
        status = ckd_save_tensor(save, &t, err);
    }
    return status;
}

/* Saves the items, then verifies their values. */
static ckd_status fill(ckd_save *save, const ckd_plan *plan, uint32_t rank, const shared_slot *s,
                       const slot_content *c, ckd_error *err) {
    save->stats.snapshot = (save_stage){c->request.begun_ns, c->request.copied_ns, c->request.stall_ns};
    ckd_status status = save_items(save, plan, rank, s, c, err);
    return status == CKD_OK ? slot_verify(s, c, err) : status;
}

static ckd_status save_alone(ckd_checkpoint *out, ckd_store *store, const ckd_save_options *options,
                             const shared_slot *s, const slot_content *c, ckd_error *err) {
    ckd_save *save = NULL;
    ckd_status status = ckd_save_begin(&save, store, options, err);
    if (status != CKD_OK) {
        return status;
    }
    status = fill(save, NULL, 0, s, c, err);
    if (status == CKD_OK) {
        return ckd_save_commit(out, save, err);
    }
    ckd_save_abort(save);
    return status;
}

ckd_status slot_plan(const ckd_plan **out, ckd_ranks *ranks, const shared_slot *s, ckd_error *err) {
    ckd_error why = {.offset = CKD_NO_OFFSET};
    ckd_tensor *tensors = calloc(s->layout->count + 1, sizeof(*tensors));
    if (!tensors) { /* the other ranks must not wait for this one */
        err_nomem(&why, s->layout->count * sizeof(*tensors), "what a rank holds");
        return ranks_agree(ranks, CKD_E_NOMEM, &why, NULL, 0, err);
    }
    size_t count = 0;
    for (size_t i = 0; i < s->layout->count; i++) {
        if (!s->layout->items[i].is_bytes) {
            tensors[count++] = s->layout->items[i].tensor;
        }
    }
    ckd_status status = ckd_ranks_plan(out, ranks, tensors, count, err);
    free(tensors);
    return status;
}

static ckd_status save_together(ckd_checkpoint *out, ckd_ranks *ranks, const ckd_save_options *options,
                                const shared_slot *s, const slot_content *c, ckd_error *err) {
    const ckd_plan *plan;
    ckd_save *save;
    ckd_error why = {.offset = CKD_NO_OFFSET};
    ckd_status status = slot_plan(&plan, ranks, s, err);
    THEN(status, ckd_ranks_begin(&save, ranks, options, err));
    if (status != CKD_OK) {
        return status;
    }
    status = fill(save, plan, c->request.options.rank, s, c, &why);
    return status == CKD_OK ? ckd_ranks_commit(out, ranks, save, err)
                            : err_from(err, ckd_ranks_abort(ranks, save, &why), &why);
}

/* Whether the store has the checkpoint: an earlier save of it was committed, but its answer was lost. */
static bool is_saved(ckd_checkpoint *out, ckd_store *store, const ckd_id *id) {
    return !id_is_zero(id) && store_find_id(out, store, id, NULL) == CKD_OK;
}

ckd_status slot_save(ckd_checkpoint *out, ckd_store *store, ckd_ranks *ranks, const shared_slot *s,
                     const slot_content *c, ckd_error *err) {
    ckd_save_options options = options_of(&c->request);
    launch_record launch = launch_of(&c->request);
    if (!ranks && is_saved(out, store, &options.checkpoint_id)) {
        return CKD_OK;
    }
    store->launch = c->request.options.rank == 0 ? &launch : NULL;
    ckd_status status =
        ranks ? save_together(out, ranks, &options, s, c, err) : save_alone(out, store, &options, s, c, err);
    store->launch = NULL;
    /* a session that did not wait may have committed it meanwhile */
    if (status != CKD_OK && store_refresh_catalog(store, NULL) == CKD_OK &&
        is_saved(out, store, &options.checkpoint_id)) {
        return CKD_OK;
    }
    return status;
}

ckd_status slot_save_copy(ckd_checkpoint *out, ckd_store *store, const slot_part *p, ckd_error *err) {
    ckd_save_options options = options_of(&p->content->request);
    if (is_saved(out, store, &options.checkpoint_id)) {
        return CKD_OK;
    }
    options.parent_run = options.resumed_from_run = NULL;
    options.on_duplicate = CKD_DUPLICATE_ERROR;
    options.base = p->base && options.fidelity <= CKD_EXACT;
    options.max_load_cost = p->max_load_cost;
    store->launch = NULL;
    return save_alone(out, store, &options, p->slot, p->content, err);
}
