#include "cli/json_out.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/text.h"

json_t *cli_json_text(const char *text) {
    if (!text) {
        return json_null();
    }
    json_t *value = json_string(text);
    char *copy = value ? NULL : strdup(text);
    if (copy) {
        for (char *c = copy; *c; c++) {
            *c = (*c & 0x80) ? '?' : *c;
        }
        value = json_string(copy);
        free(copy);
    }
    return value;
}

json_t *cli_json_double(double value) {
    return isfinite(value) ? json_real(value) : json_null();
}

json_t *cli_json_ratio(uint64_t raw, uint64_t stored) {
    return raw && stored ? json_real((double)raw / (double)stored) : json_null();
}

void cli_json_append(json_t **array, json_t *item) {
    if (!*array) {
        json_decref(item);
    } else if (json_array_append_new(*array, item) != 0) {
        json_decref(*array);
        *array = NULL;
    }
}

cli_place_text cli_place_of(const ckd_checkpoint *c) {
    cli_place_text out;
    snprintf(out.text, sizeof(out.text), "%s@%" PRIu64, c->run, c->step);
    return out;
}

static bool has_id(const ckd_checkpoint *c, const ckd_id *id) {
    return memcmp(&c->id, id, sizeof(*id)) == 0;
}

static bool is_none(const ckd_id *id) {
    static const ckd_id none;
    return memcmp(id, &none, sizeof(none)) == 0;
}

const ckd_checkpoint *cli_by_id(const ckd_checkpoint_list *all, const ckd_id *id) {
    for (size_t i = 0; i < all->count; i++) {
        if (has_id(&all->items[i], id)) {
            return &all->items[i];
        }
    }
    return NULL;
}

static json_t *json_id(const ckd_id *id) {
    char text[CKD_ID_TEXT];
    ckd_id_text(text, id);
    return is_none(id) ? json_null() : json_string(text);
}

/* "RUN@STEP" of a relative of c, null if there is none or it is gone. Most often it stands just before c. */
static json_t *json_relative(const ckd_id *id, const ckd_checkpoint *c, const ckd_checkpoint_list *all) {
    bool listed = c > all->items && c < all->items + all->count;
    c = is_none(id) ? NULL : listed && has_id(c - 1, id) ? c - 1 : cli_by_id(all, id);
    return c ? json_string(cli_place_of(c).text) : json_null();
}

json_t *cli_json_checkpoint(const ckd_checkpoint *c, const ckd_checkpoint_list *all) {
    return json_pack(
        "{s:s, s:I, s:o, s:o, s:o, s:o, s:o, s:s, s:s, s:I, s:I, s:I, s:I, s:I, s:o, s:I, s:o, s:I, s:s, s:o, s:o}",
        "run", c->run, "step", (json_int_t)c->step, "id", json_id(&c->id), "parent",
        json_relative(&c->parent, c, all), "parent_id", json_id(&c->parent), "resumed_from",
        json_relative(&c->resumed_from, c, all), "resumed_from_id", json_id(&c->resumed_from), "kind",
        ckd_kind_name(c->kind), "fidelity", ckd_fidelity_name(c->fidelity), "lossy_resumes",
        (json_int_t)c->lossy_resumes, "world", (json_int_t)c->world, "tensor_count", (json_int_t)c->tensors,
        "raw_bytes", (json_int_t)c->raw_bytes, "stored_bytes", (json_int_t)c->stored_bytes, "ratio",
        cli_json_ratio(c->raw_bytes, c->stored_bytes), "depth", (json_int_t)c->depth, "load_cost",
        cli_json_double(c->load_cost), "generation", (json_int_t)c->generation, "created",
        cli_text_time(c->created_ns).text, "metric_name",
        c->metric_name[0] ? cli_json_text(c->metric_name) : json_null(), "metric",
        cli_json_double(c->metric));
}

json_t *cli_json_one_checkpoint(const ckd_checkpoint *c, const ckd_checkpoint_list *all) {
    return json_pack("{s:i, s:[o]}", "schema", 1, "checkpoints", cli_json_checkpoint(c, all));
}

ckd_status cli_json_print(json_t *root, ckd_error *err) {
    if (!root) {
        return cli_error_nomem(err);
    }
    bool printed =
        json_dumpf(root, stdout, JSON_INDENT(2) | JSON_REAL_PRECISION(17)) == 0 && putchar('\n') != EOF;
    json_decref(root);
    return printed ? CKD_OK : cli_error(err, CKD_E_IO, "cannot write to standard output");
}
