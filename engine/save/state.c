/* State that all parts of a save check and report: whether it is open, its dependencies, progress, damage. */
#include "engine/save/internal.h"

ckd_status save_check_open(const ckd_save *save, ckd_error *err) {
    if (!save) {
        return err_set(err, CKD_E_INVALID, "there is no save: it is NULL");
    }
    if (save->state == SAVE_OPEN) {
        return CKD_OK;
    }
    return err_set(err, CKD_E_STATE,
                   save->state == SAVE_FAILED
                       ? "an earlier call on this save failed; it can only be aborted"
                       : "the save is sealed; it can only be published, ended or aborted");
}

ckd_status save_depend(save_output *out, const ckd_id *checkpoint, ckd_error *err) {
    for (size_t i = out->dependency_count; i-- > 0;) {
        if (id_equal(&out->dependencies[i], checkpoint)) {
            return CKD_OK;
        }
    }
    if (ARRAY_GROW(out->dependencies, out->dependency_capacity, out->dependency_count + 1, "dependencies",
                   err) != CKD_OK) {
        return CKD_E_NOMEM;
    }
    out->dependencies[out->dependency_count++] = *checkpoint;
    return CKD_OK;
}

void save_report_damage(ckd_save *save) {
    if (atomic_load(&save->sources.damaged) && !save->sources.reported_damage) {
        save->sources.reported_damage = true;
        store_message(
            save->store,
            "parts of the parent %s@%llu are damaged; these blocks are stored without a delta (run ckptdelta verify)",
            save->target.origin.run, (unsigned long long)save->target.origin.step);
    }
}

ckd_status save_report_progress(ckd_save *save, uint64_t raw, ckd_error *err) {
    save->stats.raw_bytes += raw;
    const ckd_save_options *o = &save->options;
    if (!o->on_progress) {
        return CKD_OK;
    }
    float_mode_leave(save->input.callers_mode);
    int stop =
        o->on_progress(o->progress_context, save->stats.raw_bytes,
                       o->total_bytes > save->stats.raw_bytes ? o->total_bytes : save->stats.raw_bytes);
    save->input.callers_mode = float_mode_enter();
    return stop ? err_set(err, CKD_E_CANCELLED, "the save was cancelled") : CKD_OK;
}
