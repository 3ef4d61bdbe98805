/* The fidelity in which a save stores each tensor, and how finely. */
#include "engine/save/lossy.h"

#define ANCESTOR_BITS \
    0.5 /* a delta on an ancestor takes roughly this many bits per element more than one on the parent */
#define LOSSY_BASE_LOAD 1.5 /* in base loads */

#define LEVELS_AFTER_RESUME 24  /* if second moments have no quantisation levels otherwise: three octaves */
#define SECOND_FROM         2.0 /* bits per parameter; below that, single second moments get none */

ckd_fidelity save_fidelity_of(const ckd_save_options *o, ckd_role role) {
    ckd_fidelity by_role = o->role_fidelity[role];
    ckd_fidelity chosen = by_role != CKD_FIDELITY_DEFAULT ? by_role : o->fidelity;
    return chosen == CKD_FIDELITY_DEFAULT || role == CKD_ROLE_OTHER ? CKD_EXACT : chosen;
}

ckd_fidelity save_fidelity(const ckd_save *save, ckd_role role) {
    return save_fidelity_of(&save->options, role);
}

bool save_builds_on_parent(const ckd_save_options *o, ckd_role role, ckd_dtype dtype) {
    bool exact = save_fidelity_of(o, role) == CKD_EXACT;
    lossy_tile t = {.part = exact ? LOSSY_NONE : lossy_part_of(role, dtype)};
    return t.part == LOSSY_NONE || lossy_wants_parent(&t);
}

ckd_fidelity save_coarsest_fidelity(const ckd_save *save) {
    ckd_fidelity coarsest = CKD_EXACT;
    for (ckd_role role = CKD_ROLE_WEIGHT; role < CKD_ROLE_OTHER; role++) {
        ckd_fidelity f = save_fidelity(save, role);
        coarsest = f > coarsest ? f : coarsest;
    }
    return coarsest;
}

bool save_is_first_after_resume(const ckd_save *save) {
    const save_target *t = &save->target;
    return t->has_origin && id_equal(&t->resumed_from, &t->origin.id);
}

/*
 * Refines the parameters after a resume. A delta's losses are made up by the next deltas of its chain, but a resume
 * makes them permanent. A training run that saves only once between resumes would lose part of its progress each time.
 * So the first save after a resume is nearly exact.
 */
static void refine_after_resume(quant_params *r) {
    r->weight *= 0.03125;
    r->moment *= 0.125;
    r->second = r->second == LOSSY_LEVELS_NONE ? LEVELS_AFTER_RESUME : r->second / 3;
}

/* The weight gets three quarters of a parameter's bits, the first moment a fifth, and the second almost none. */
quant_params save_quant_params_of(const ckd_save *save, const record_tensor *tensor) {
    const ckd_save_options *o = &save->options;
    quant_params r = quant_params_of(save_fidelity(save, tensor->role), o->effort);
    if (save_is_first_after_resume(save)) {
        refine_after_resume(&r);
    }
    double raw_bits = 3 * 8 * (double)ckd_dtype_size(tensor->dtype);
    double bits = o->target_ratio > 0 ? raw_bits / o->target_ratio : o->target_bits;
    r.target = bits * (tensor->role == CKD_ROLE_EXP_AVG ? 0.2 : 0.75);
    if (bits > 0 && bits < SECOND_FROM) {
        r.second = LOSSY_LEVELS_NONE;
    }
    r.max_error = o->max_error;
    double scale = o->step_scale > 0 ? o->step_scale : 1;
    r.weight *= scale;
    r.leftover *= scale;
    r.moment *= scale;
    /* Chains that take longer to decode need larger deltas on ancestors earlier. */
    double load_left = 0.8 * save->coding.budget.limit - LOSSY_BASE_LOAD;
    r.bits_for_load = ANCESTOR_BITS / (load_left > 0.5 ? load_left : 0.5);
    return r;
}

lossy_part save_lossy_part(const ckd_save *save, const record_tensor *tensor) {
    bool exact = save_fidelity(save, tensor->role) == CKD_EXACT || save->target.compare;
    return exact ? LOSSY_NONE : lossy_part_of(tensor->role, tensor->dtype);
}
