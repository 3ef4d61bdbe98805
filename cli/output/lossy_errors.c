/*
 * The largest errors of lossy checkpoints, for `list --json`. Apart from json_out.c, because it reads the tensors of
 * each checkpoint from the store.
 */
#include "cli/output/output.h"

#include <math.h>
#include <string.h>

/* Maximum of two numbers; unknown if either is unknown. */
static double larger(double a, double b) {
    return a > b || isnan(a) ? a : b;
}

/* Makes the object with the largest errors of a lossy checkpoint's tensors. */
static json_t *json_errors(const ckd_checkpoint *c, const ckd_tensor_list *tensors) {
    double rel_l2 = 0, max_error = 0, direction = NAN, update = NAN;
    uint64_t nonfinite = 0, elements = 0;
    const char *worst = NULL;
    for (size_t i = 0; i < tensors->count; i++) {
        const ckd_tensor_info *t = &tensors->items[i];
        worst = t->rel_l2 > rel_l2 ? t->name : worst;
        rel_l2 = larger(rel_l2, t->rel_l2);
        max_error = larger(max_error, t->max_error);
        direction = isnan(direction) || t->direction_change > direction ? t->direction_change : direction;
        double share = t->largest_update / t->largest_update_given;
        update = isnan(update) || share > update ? share : update;
        nonfinite += t->nonfinite;
        elements += t->elements;
    }
    double bits = elements ? 8 * (double)c->stored_bytes / (double)elements : NAN;
    return json_pack("{s:s, s:s, s:o, s:o, s:o, s:o, s:o, s:I, s:o}", "checkpoint", cli_ref_text_of(c).text,
                     "fidelity", ckd_fidelity_name(c->fidelity), "rel_l2", cli_json_double(rel_l2),
                     "worst_tensor", worst ? cli_json_text(worst) : json_null(), "max_error",
                     cli_json_double(max_error), "direction_change", cli_json_double(direction),
                     "update_ratio", cli_json_double(update), "nonfinite", (json_int_t)nonfinite,
                     "bits_per_element", cli_json_double(bits));
}

/* Removes an entry of the list. */
static void leave_out(ckd_checkpoint_list *list, size_t at) {
    list->count--;
    memmove(&list->items[at], &list->items[at + 1], (list->count - at) * sizeof(*list->items));
}

/* True if the checkpoint no longer exists; that is different from a missing file. */
static bool is_gone(const ckd_error *why) {
    return why->status == CKD_E_NOT_FOUND && !why->file[0];
}

static ckd_status add_errors(json_t **out, bool *deleted, ckd_store *store, const ckd_checkpoint *c,
                             ckd_error *err) {
    ckd_tensor_list *tensors = NULL;
    ckd_status status = ckd_store_tensors(&tensors, store, &c->id, err);
    *deleted = status != CKD_OK && is_gone(err);
    if (status == CKD_OK && (tensors->count || !c->tensors)) { /* else the store has said why it lists none */
        cli_json_append(out, json_errors(c, tensors));
    } else if (status == CKD_E_BUSY || (status != CKD_OK && !*deleted && ckd_error_is_damage(err))) {
        cli_note("the errors of %s cannot be read: %s", cli_ref_text_of(c).text, err->message);
        status = CKD_OK;
    }
    ckd_tensor_list_free(tensors);
    return *deleted ? CKD_OK : status;
}

ckd_status cli_lossy_errors(json_t **out, ckd_store *store, ckd_checkpoint_list *list, ckd_error *err) {
    ckd_status status = CKD_OK;
    *out = json_array();
    for (size_t i = 0; i < list->count && status == CKD_OK;) {
        bool deleted = false;
        if (list->items[i].fidelity != CKD_EXACT) {
            status = add_errors(out, &deleted, store, &list->items[i], err);
        }
        if (deleted) {
            leave_out(list, i);
        } else {
            i++;
        }
    }
    if (status != CKD_OK) {
        json_decref(*out);
        *out = NULL;
    }
    return status;
}
