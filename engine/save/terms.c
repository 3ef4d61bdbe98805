/*
 * The options on which all ranks of a save must agree, as bytes that travel with a rank's messages, and their
 * comparison.
 */
#include <inttypes.h>
#include <stdio.h>

#include "base/vocabulary.h"
#include "engine/save/save.h"

#define TERM_MAX 192 /* bytes of a name or value, with its NUL */

static void put_text(bytes *to, const char *name, const char *value) {
    char text[TERM_MAX];
    snprintf(text, sizeof(text), "%s", value ? value : "");
    size_t length = strlen(text);
    while (length > 0 && !utf8_valid(text, length)) { /* cut inside a character */
        text[--length] = '\0';
    }
    bytes_put_string(to, name);
    bytes_put_string(to, text);
}

static void put_number(bytes *to, const char *name, uint64_t value) {
    char text[TERM_MAX];
    snprintf(text, sizeof(text), "%" PRIu64, value);
    put_text(to, name, text);
}

static void put_real(bytes *to, const char *name, double value) {
    char text[TERM_MAX];
    snprintf(text, sizeof(text), "%.17g", value);
    put_text(to, name, text);
}

static void put_checkpoint(bytes *to, const char *run_name, const char *run, const char *step_name,
                           uint64_t step) {
    put_text(to, run_name, run);
    put_number(to, step_name, run ? step : 0); /* ignored without a run */
}

static const char *duplicate_name(ckd_on_duplicate d) {
    return d == CKD_DUPLICATE_ERROR ? "error" : d == CKD_DUPLICATE_SAME_OK ? "same-ok" : "branch";
}

void save_terms_put(bytes *to, const ckd_save_options *o) {
    static const char *const roles[] = {
        [CKD_ROLE_WEIGHT] = "the fidelity of role weight",
        [CKD_ROLE_EXP_AVG] = "the fidelity of role exp_avg",
        [CKD_ROLE_EXP_AVG_SQ] = "the fidelity of role exp_avg_sq",
        [CKD_ROLE_MASTER] = "the fidelity of role master",
    };
    put_text(to, "run", o->run);
    put_number(to, "step", o->step);
    for (ckd_role role = CKD_ROLE_WEIGHT; role < CKD_ROLE_OTHER; role++) {
        put_text(to, roles[role], ckd_fidelity_name(save_fidelity_of(o, role)));
    }
    put_text(to, "base", o->base ? "yes" : "no");
    put_checkpoint(to, "parent_run", o->parent_run, "parent_step", o->parent_step);
    put_checkpoint(to, "resumed_from_run", o->resumed_from_run, "resumed_from_step", o->resumed_from_step);
    put_text(to, "on_duplicate", duplicate_name(o->on_duplicate));
    put_number(to, "codec", (uint64_t)o->codec);
    put_number(to, "level", (uint64_t)o->level);
    put_number(to, "effort", (uint64_t)o->effort);
    put_real(to, "target_bits", o->target_bits);
    put_real(to, "target_ratio", o->target_ratio);
    put_real(to, "max_error", o->max_error);
    put_real(to, "step_scale", o->step_scale);
    put_real(to, "max_load_cost", o->max_load_cost);
    put_real(to, "newest_load_cost", o->newest_load_cost);
    put_text(to, "metric_name", o->metric_name);
}

/* Another rank's value is printed only if it has no control characters. */
static const char *printable(const char *value) {
    for (const char *c = value; *c; c++) {
        if (*c < ' ' || *c == 0x7f) {
            return "?";
        }
    }
    return value;
}

ckd_status save_terms_compare(const ckd_bytes *first, uint32_t first_rank, const ckd_bytes *second,
                              uint32_t rank, ckd_error *err) {
    reader a = reader_of(first->data, first->size), b = reader_of(second->data, second->size);
    while (reader_left(&a) > 0) {
        char name[TERM_MAX], value[TERM_MAX], second_name[TERM_MAX], second_value[TERM_MAX];
        reader_string(&a, name, sizeof(name));
        reader_string(&a, value, sizeof(value));
        reader_string(&b, second_name, sizeof(second_name));
        reader_string(&b, second_value, sizeof(second_value));
        if (a.failed || b.failed || strcmp(name, second_name) != 0) {
            break;
        }
        bool second_has_none = strcmp(name, "metric_name") == 0 && !*second_value;
        if (strcmp(value, second_value) != 0 && !second_has_none) {
            return err_set(
                err, CKD_E_INVALID, "rank %u saves with %s '%s', rank %u with '%s'; give all ranks the same",
                (unsigned)rank, name, printable(second_value), (unsigned)first_rank, printable(value));
        }
    }
    return a.failed || b.failed || reader_left(&a) > 0 || reader_left(&b) > 0
               ? err_set(err, CKD_E_INVALID,
                         "the save options of rank %u cannot be read: all ranks must use the same version",
                         (unsigned)rank)
               : CKD_OK;
}
