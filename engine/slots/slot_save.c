/* Makes a checkpoint of the state in a slot. */
#include "engine/slots/slots.h"

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

/* The pointers of the writer's process become ours. */
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

static ckd_status save_items(ckd_save *save, const shared_slot *s, const slot_content *c, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < s->layout->count && status == CKD_OK; i++) {
        const slot_item *item = &s->layout->items[i];
        const uint8_t *data = slot_data(s) + item->place;
        if (item->is_bytes) {
            status = ckd_save_blob(save, item->tensor.name, data, (size_t)item->bytes, err);
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

/* Returns whether the store has the checkpoint: its first save was committed, but the answer was lost. */
static bool is_saved(ckd_checkpoint *out, ckd_store *store, const ckd_id *id) {
    return !id_is_zero(id) && catalog_find_id(out, store->catalog, id, NULL) == CKD_OK;
}

ckd_status slot_save(ckd_checkpoint *out, ckd_store *store, const shared_slot *s, const slot_content *c,
                     ckd_error *err) {
    ckd_save_options options = options_of(&c->request);
    launch_record launch = launch_of(&c->request);
    if (is_saved(out, store, &options.checkpoint_id)) {
        return CKD_OK;
    }
    store->launch = &launch;
    ckd_save *save = NULL;
    ckd_status status = ckd_save_begin(&save, store, &options, err);
    if (status == CKD_OK) {
        save->stats.snapshot = (save_stage){c->request.begun_ns, c->request.copied_ns, c->request.stall_ns};
        status = save_items(save, s, c, err);
        THEN(status, slot_verify(s, c, err));
        if (status == CKD_OK) {
            status = ckd_save_commit(out, save, err);
        } else {
            ckd_save_abort(save);
        }
    }
    store->launch = NULL;
    /* a session that did not want to wait has committed it meanwhile */
    if (status != CKD_OK && store_refresh_catalog(store, NULL) == CKD_OK &&
        is_saved(out, store, &options.checkpoint_id)) {
        return CKD_OK;
    }
    return status;
}
