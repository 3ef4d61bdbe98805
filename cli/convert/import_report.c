/*
 * Prints the plan of an import, which import_plan.c makes: where each tensor comes from, and which rules or metadata
 * had no effect.
 */
#include "cli/convert/convert.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/output/output.h"

static const char *kind_name(layout_kind kind) {
    static const char *const names[] = {"unique", "replicated", "averaged", "sharded",
                                        "expert", "skipped",    "flat"};
    return names[kind];
}

void import_report_remarks(const import_plan *plan) {
    const layout *l = plan->layout;
    for (size_t i = 0; i < l->rule_count; i++) {
        if (plan->matched[i] == 0) {
            cli_note(
                "%s:%u: the rule '%s' is unused: it matches no tensor, or only tensors that an earlier rule matches",
                l->path, l->rules[i].line, l->rules[i].pattern);
        }
    }
    for (size_t i = 0; i < plan->disagreed_count; i++) {
        cli_note("ranks' files have different values of '%s' in their metadata; it is left out",
                 plan->disagreed[i]);
    }
}

/* ---- which ranks ---- */

static int by_number(const void *left, const void *right) {
    uint32_t a = *(const uint32_t *)left, b = *(const uint32_t *)right;
    return a < b ? -1 : a > b;
}

/* Returns the ranks of a tensor, in order; NULL if out of memory. */
static uint32_t *ranks_of(const import_tensor *t) {
    uint32_t *ranks = calloc(t->count, sizeof(*ranks));
    for (size_t i = 0; ranks && i < t->count; i++) {
        ranks[i] = t->entries[i].rank;
    }
    if (ranks) {
        qsort(ranks, t->count, sizeof(*ranks), by_number);
    }
    return ranks;
}

/* Formats "0-3, 8": as many as fit. */
static layout_text ranks_text(const uint32_t *ranks, size_t count) {
    layout_text out = {""};
    size_t used = 0;
    for (size_t i = 0, end; ranks && i < count; i = end) {
        for (end = i + 1; end < count && ranks[end] == ranks[end - 1] + 1; end++) {
        }
        if (used > 40) {
            snprintf(out.text + used, sizeof(out.text) - used, ", ...");
            break;
        }
        used += (size_t)snprintf(out.text + used, sizeof(out.text) - used, end - i > 1 ? "%s%u-%u" : "%s%u",
                                 i ? ", " : "", ranks[i], ranks[end - 1]);
    }
    return out;
}

/* ---- text ---- */

static void add_row(cli_table *table, const import_tensor *t) {
    const import_entry *e = t->entries;
    uint32_t *ranks = ranks_of(t);
    cli_table_cell(table, "%s", t->tensor.name);
    cli_table_cell(table, "%s", ckd_dtype_name(t->tensor.dtype));
    cli_table_cell(table, "%s", layout_shape_text(t->tensor.ndim, t->tensor.shape).text);
    cli_table_cell(table, "%s", ranks_text(ranks, t->count).text);
    cli_table_cell(table, "%zu", t->copies);
    cli_table_cell(table, "%s", kind_name(e->rule->kind));
    cli_table_cell(table, "%u", e->rule->line);
    cli_table_cell(table, "%s", strcmp(e->stored->name, t->tensor.name) == 0 ? "" : e->stored->name);
    free(ranks);
}

static void print_skipped(const import_plan *plan) {
    for (size_t i = 0, end; i < plan->skipped_count; i = end) {
        const import_skipped *s = &plan->skipped[i];
        for (end = i + 1; end < plan->skipped_count && strcmp(plan->skipped[end].name, s->name) == 0; end++) {
        }
        fputs(i ? "  " : "\nskipped:\n  ", stdout);
        cli_print_clean(stdout, s->name);
        printf(" of %zu rank%s (line %u)\n", end - i, cli_plural(end - i), s->line);
    }
}

static ckd_status print_text(const import_plan *plan, ckd_error *err) {
    cli_table *table = cli_table_new("TENSOR|DTYPE|>SHAPE|RANKS|>COPIES|KIND|>LINE|THERE");
    for (size_t i = 0; i < plan->count; i++) {
        add_row(table, &plan->tensors[i]);
    }
    ckd_status status = cli_table_print(table, err);
    if (status == CKD_OK) {
        print_skipped(plan);
        printf("\n%zu tensor%s, %s, of %u rank%s; nothing was saved\n", plan->count, cli_plural(plan->count),
               cli_text_size(plan->bytes).text, plan->layout->world, cli_plural(plan->layout->world));
    }
    return status;
}

/* ---- JSON ---- */

static json_t *json_shape(const safetensors_tensor *t) {
    json_t *shape = json_array();
    for (uint32_t d = 0; d < t->ndim; d++) {
        cli_json_append(&shape, json_integer((json_int_t)t->shape[d]));
    }
    return shape;
}

static json_t *json_tensor(const import_tensor *t, const ckd_tensor_role *role) {
    const import_entry *e = t->entries;
    uint32_t *ranks = ranks_of(t);
    json_t *list = ranks ? json_array() : NULL;
    for (size_t i = 0; ranks && i < t->count; i++) {
        cli_json_append(&list, json_integer(ranks[i]));
    }
    free(ranks);
    const safetensors_tensor *to = &t->tensor;
    return json_pack(
        "{s:o, s:s, s:b, s:s, s:o, s:I, s:o, s:I, s:s, s:i, s:o}", "name", cli_json_text(to->name), "role",
        ckd_role_name(role->role), "in_doubt", role->in_doubt, "dtype", ckd_dtype_name(to->dtype), "shape",
        json_shape(to), "raw_bytes", (json_int_t)to->size, "ranks", list, "copies", (json_int_t)t->copies,
        "kind", kind_name(e->rule->kind), "line", (int)e->rule->line, "from", cli_json_text(e->stored->name));
}

static ckd_status find_roles(ckd_tensor_role **out, const import_plan *plan, cli_roles *roles,
                             ckd_error *err) {
    ckd_tensor_name *tensors = calloc(plan->count + 1, sizeof(*tensors));
    *out = calloc(plan->count + 1, sizeof(**out));
    ckd_status status = tensors && *out ? CKD_OK : cli_error_nomem(err);
    for (size_t i = 0; i < plan->count && status == CKD_OK; i++) {
        tensors[i] = cli_tensor_name(&plan->tensors[i].tensor);
    }
    THEN(status, cli_roles_find(*out, roles, tensors, plan->count, plan->metadata, err));
    free(tensors);
    return status;
}

static ckd_status print_json(const import_plan *plan, cli_roles *roles, ckd_error *err) {
    json_t *tensors = json_array(), *skipped = json_array();
    ckd_tensor_role *found;
    ckd_status status = find_roles(&found, plan, roles, err);
    for (size_t i = 0; i < plan->count && status == CKD_OK; i++) {
        cli_json_append(&tensors, json_tensor(&plan->tensors[i], &found[i]));
    }
    free(found);
    if (status != CKD_OK) {
        json_decref(tensors);
        json_decref(skipped);
        return status;
    }
    for (size_t i = 0; i < plan->skipped_count; i++) {
        const import_skipped *s = &plan->skipped[i];
        cli_json_append(&skipped, json_pack("{s:o, s:i, s:i}", "name", cli_json_text(s->name), "rank",
                                            (int)s->rank, "line", (int)s->line));
    }
    return cli_json_print(json_pack("{s:i, s:o, s:i, s:I, s:o, s:o}", "schema", 1, "layout",
                                    cli_json_text(plan->layout->path), "world", (int)plan->layout->world,
                                    "raw_bytes", (json_int_t)plan->bytes, "tensors", tensors, "skipped",
                                    skipped),
                          err);
}

ckd_status import_report_plan(const import_plan *plan, const cli_options *options, cli_roles *roles,
                              ckd_error *err) {
    if (options->json) {
        return print_json(plan, roles, err);
    }
    return cli_prints_text(options) ? print_text(plan, err) : CKD_OK;
}
