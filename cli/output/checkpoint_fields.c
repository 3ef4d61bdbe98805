/*
 * The JSON fields of a checkpoint as a table. json_out.c makes a tree from it, and json_list.c prints it directly, so
 * both have the same fields.
 */
#include "cli/output/checkpoint_fields.h"

#include <math.h>

static json_field text_of(const char *name, const char *text) {
    return (json_field){.name = name, .kind = text ? JSON_IS_TEXT : JSON_IS_NULL, .text = text};
}

static json_field number_of(const char *name, uint64_t number) {
    return (json_field){.name = name, .kind = JSON_IS_NUMBER, .number = number};
}

/* null for NaN and infinities */
static json_field real_of(const char *name, double real) {
    return isfinite(real) ? (json_field){.name = name, .kind = JSON_IS_REAL, .real = real}
                          : (json_field){.name = name, .kind = JSON_IS_NULL};
}

static json_field id_of(char text[CKD_ID_TEXT], const char *name, const ckd_id *id) {
    ckd_id_text(text, id);
    return text_of(name, cli_id_is_none(id) ? NULL : text);
}

/*
 * Returns "RUN@STEP" of a relative of c; null if it has none or it was deleted. Usually the relative is just before c
 * in the list.
 */
static json_field relative_of(cli_ref_text *text, const char *name, const ckd_id *id, const ckd_checkpoint *c,
                              const cli_ids *ids) {
    const ckd_checkpoint_list *all = ids->all;
    bool listed = c > all->items && c < all->items + all->count;
    c = cli_id_is_none(id) ? NULL : listed && cli_has_id(c - 1, id) ? c - 1 : cli_ids_find(ids, id);
    if (c) {
        *text = cli_ref_text_of(c);
    }
    return text_of(name, c ? text->text : NULL);
}

void checkpoint_fields_make(checkpoint_fields *out, const ckd_checkpoint *c, const cli_ids *ids) {
    json_field *f = out->items;
    bool ratio = c->raw_bytes && c->stored_bytes;
    out->created = cli_text_time(c->created_ns);
    *f++ = text_of("run", c->run);
    *f++ = number_of("step", c->step);
    *f++ = id_of(out->id, "id", &c->id);
    *f++ = relative_of(&out->parent, "parent", &c->parent, c, ids);
    *f++ = id_of(out->parent_id, "parent_id", &c->parent);
    *f++ = relative_of(&out->resumed_from, "resumed_from", &c->resumed_from, c, ids);
    *f++ = id_of(out->resumed_from_id, "resumed_from_id", &c->resumed_from);
    *f++ = text_of("kind", ckd_kind_name(c->kind));
    *f++ = text_of("fidelity", ckd_fidelity_name(c->fidelity));
    *f++ = number_of("lossy_resumes", c->lossy_resumes);
    *f++ = number_of("world", c->world);
    *f++ = number_of("tensor_count", c->tensors);
    *f++ = number_of("raw_bytes", c->raw_bytes);
    *f++ = number_of("stored_bytes", c->stored_bytes);
    *f++ = real_of("ratio", ratio ? (double)c->raw_bytes / (double)c->stored_bytes : NAN);
    *f++ = number_of("depth", c->depth);
    *f++ = real_of("load_cost", c->load_cost);
    *f++ = number_of("generation", c->generation);
    *f++ = text_of("created", out->created.text);
    *f++ = text_of("metric_name", c->metric_name[0] ? c->metric_name : NULL);
    *f++ = real_of("metric", c->metric);
    *f++ = text_of("suspect", !c->suspect                          ? NULL
                              : c->suspect & CKD_SUSPECT_NONFINITE ? "nonfinite"
                                                                   : "other");
}
