/* Assigns tensors of ranks to tensors of the checkpoint. */
#include "cli/convert/internal.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void import_plan_free(import_plan *plan) {
    for (size_t i = 0; i < plan->entry_count; i++) {
        free(plan->entries[i].name);
    }
    for (size_t i = 0; i < plan->file_count; i++) {
        safetensors_close(plan->files[i]);
    }
    for (size_t i = 0; i < plan->disagreed_count; i++) {
        free(plan->disagreed[i]);
    }
    for (size_t i = 0; i < plan->parameter_count; i++) {
        free((char *)plan->parameters[i]->tensor.name);
        free(plan->parameters[i]);
    }
    free(plan->parameters);
    json_decref(plan->metadata);
    free(plan->files);
    free(plan->ranks);
    free(plan->entries);
    free(plan->tensors);
    free(plan->skipped);
    free(plan->matched);
    free(plan->disagreed);
    *plan = (import_plan){0};
}

/* ---- files and their ranks ---- */

static ckd_status rank_of_file(uint32_t *out, const layout *l, const char *path, size_t place,
                               ckd_error *err) {
    size_t rank = l->file_count ? layout_rank_of_path(l, path) : place;
    *out = (uint32_t)rank;
    return rank != LAYOUT_NONE
               ? CKD_OK
               : layout_error(
                     l, 0, err, CKD_E_INVALID,
                     "the path '%.200s' matches no `files` line, or is that of a rank outside the mesh",
                     path);
}

static ckd_status check_ranks(const import_plan *plan, ckd_error *err) {
    const layout *l = plan->layout;
    bool *present = calloc(l->world, sizeof(*present));
    if (!present) {
        return cli_error_nomem(err);
    }
    for (size_t i = 0; i < plan->file_count; i++) {
        present[plan->ranks[i]] = true;
    }
    uint32_t missing = 0, first = l->world;
    for (uint32_t i = l->world; i-- > 0;) {
        missing += !present[i];
        first = present[i] ? first : i;
    }
    free(present);
    if (!missing) {
        return CKD_OK;
    }
    char and_more[40] = "";
    if (missing > 1) {
        snprintf(and_more, sizeof(and_more), ", and of %u more ranks", missing - 1);
    }
    return layout_error(l, 0, err, CKD_E_NOT_FOUND, "there is no file of %s%s",
                        layout_rank_text(l, first).text, and_more);
}

static ckd_status open_files(import_plan *plan, char *const *paths, size_t count, ckd_error *err) {
    const layout *l = plan->layout;
    if (l->file_count == 0 && count > l->world) {
        return layout_error(l, 0, err, CKD_E_INVALID, "%zu files are given for the %u ranks of the mesh",
                            count, l->world);
    }
    plan->files = calloc(count + 1, sizeof(*plan->files));
    plan->ranks = calloc(count + 1, sizeof(*plan->ranks));
    if (!plan->files || !plan->ranks) {
        return cli_error_nomem(err);
    }
    for (size_t i = 0; i < count; i++) {
        ckd_status status = rank_of_file(&plan->ranks[i], l, paths[i], i, err);
        THEN(status, safetensors_open(&plan->files[i], paths[i], err));
        if (status != CKD_OK) {
            return status;
        }
        plan->file_count++;
    }
    return check_ranks(plan, err);
}

/* ---- metadata ---- */

static ckd_status record_disagreed(import_plan *plan, const char *key, ckd_error *err) {
    for (size_t i = 0; i < plan->disagreed_count; i++) {
        if (strcmp(plan->disagreed[i], key) == 0) {
            return CKD_OK;
        }
    }
    char **keys = realloc(plan->disagreed, (plan->disagreed_count + 1) * sizeof(*keys));
    if (!keys) {
        return cli_error_nomem(err);
    }
    plan->disagreed = keys;
    keys[plan->disagreed_count] = strdup(key);
    return keys[plan->disagreed_count] ? (plan->disagreed_count++, CKD_OK) : cli_error_nomem(err);
}

/* Metadata that differs between ranks describes ranks, not the checkpoint, so it is left out. */
static ckd_status merge_metadata(import_plan *plan, ckd_error *err) {
    ckd_status status = CKD_OK;
    const char *key;
    json_t *value;
    for (size_t i = 0; i < plan->file_count && status == CKD_OK; i++) {
        json_t *metadata = plan->files[i]->header.metadata;
        if (metadata && !plan->metadata) {
            plan->metadata = json_object();
        }
        json_object_foreach(metadata, key, value) {
            json_t *existing = json_object_get(plan->metadata, key);
            if (status == CKD_OK && existing && !json_equal(existing, value)) {
                status = record_disagreed(plan, key, err);
            } else if (status == CKD_OK && !existing && json_object_set(plan->metadata, key, value) != 0) {
                status = cli_error_nomem(err);
            }
        }
    }
    for (size_t i = 0; i < plan->disagreed_count; i++) {
        json_object_del(plan->metadata, plan->disagreed[i]);
    }
    return status;
}

/* ---- identifying tensors ---- */

static int by_local_name(const void *left, const void *right) {
    const import_reference *a = left, *b = right;
    int order = strcmp(a->tensor->name, b->tensor->name);
    return order ? order : a->rank != b->rank ? (a->rank < b->rank ? -1 : 1) : (a->order < b->order ? -1 : 1);
}

static void clear_axes(uint32_t at[LAYOUT_AXES], const layout_over *over) {
    for (uint32_t i = 0; i < over->count; i++) {
        at[over->axes[i]] = 0;
    }
}

static uint32_t set_of(const layout *l, const layout_rule *rule, const layout_rule *flat,
                       const uint32_t at[LAYOUT_AXES]) {
    uint32_t rest[LAYOUT_AXES];
    memcpy(rest, at, sizeof(rest));
    for (uint32_t i = 0; i < rule->cut_count; i++) {
        clear_axes(rest, &rule->cuts[i].over);
    }
    if (flat) {
        clear_axes(rest, &flat->flat.over);
    }
    return layout_rank(l, rest);
}

ckd_status import_add_entries(import_plan *plan, const import_reference *r, const layout_binding *b,
                              const uint64_t numbers[LAYOUT_NUMBERS], const uint32_t at[LAYOUT_AXES],
                              ckd_error *err) {
    for (size_t part = 0; part < layout_tensors_of(b->rule); part++) {
        if (plan->entry_count % 1024 == 0) {
            import_entry *grown = realloc(plan->entries, (plan->entry_count + 1024) * sizeof(*grown));
            if (!grown) {
                return cli_error_nomem(err);
            }
            plan->entries = grown;
        }
        import_entry *e = &plan->entries[plan->entry_count];
        *e = (import_entry){.rule = b->rule,
                            .part = b->rule->apart ? part : LAYOUT_NONE,
                            .rank = r->rank,
                            .set = set_of(plan->layout, b->rule, r->flat, at),
                            .file = r->file,
                            .tensor = r->tensor,
                            .flat = r->flat,
                            .stored = r->stored,
                            .range = r->range,
                            .order = r->order,
                            .member = r->member};
        ckd_status status =
            layout_other_name(&e->name, plan->layout, b, &(layout_name_values){at, numbers, part}, err);
        if (status != CKD_OK) {
            return status;
        }
        plan->entry_count++;
        size_t length = strlen(e->name);
        if (length == 0 || length > CKD_NAME_MAX) {
            return layout_error(plan->layout, b->rule->line, err, CKD_E_MISMATCH,
                                "'%.100s' would get a name of %zu bytes; names have 1 to %d", r->tensor->name,
                                length, CKD_NAME_MAX);
        }
    }
    return CKD_OK;
}

static ckd_status add_skipped(import_plan *plan, const import_reference *r, const layout_rule *rule,
                              ckd_error *err) {
    import_skipped *grown = realloc(plan->skipped, (plan->skipped_count + 1) * sizeof(*grown));
    if (!grown) {
        return cli_error_nomem(err);
    }
    plan->skipped = grown;
    grown[plan->skipped_count++] = (import_skipped){r->tensor->name, r->rank, rule->line};
    return CKD_OK;
}

/* Reports that no rule matches this tensor, or that no matching rule applies to its rank. */
static ckd_status no_rule(const import_plan *plan, const import_reference *r, const layout_bindings *b,
                          ckd_error *err) {
    const layout *l = plan->layout;
    if (b->count) {
        layout_error(l, b->items[0].rule->line, err, CKD_E_MISMATCH,
                     "the rule matches '%.200s', but by its numbers or coordinates %s does not hold it",
                     r->tensor->name, layout_rank_text(l, r->rank).text);
    } else {
        layout_error(l, 0, err, CKD_E_MISMATCH,
                     "no rule matches '%.200s' of %s; add a rule for it, of kind skipped to leave it out",
                     r->tensor->name, layout_rank_text(l, r->rank).text);
    }
    return cli_error_tensor(err, r->tensor->name);
}

/* *buffers: it is a flat buffer; those of all ranks are handled together. */
static ckd_status take_reference(import_plan *plan, import_reference *r, const layout_bindings *b,
                                 bool *buffers, ckd_error *err) {
    uint32_t at[LAYOUT_AXES];
    uint64_t numbers[LAYOUT_NUMBERS];
    layout_coordinates(at, plan->layout, r->rank);
    const layout_binding *chosen = layout_choose(numbers, plan->layout, b, at);
    if (!chosen) {
        return no_rule(plan, r, b, err);
    }
    plan->matched[chosen->rule - plan->layout->rules]++;
    if (chosen->rule->kind == LAYOUT_FLAT) {
        *buffers = true;
        return CKD_OK;
    }
    r->taken = chosen->rule->kind != LAYOUT_SKIPPED;
    return chosen->rule->kind == LAYOUT_SKIPPED ? add_skipped(plan, r, chosen->rule, err)
                                                : import_add_entries(plan, r, chosen, numbers, at, err);
}

const import_reference *import_find_reference(const import_references *all, const char *name, uint32_t rank) {
    size_t low = 0, high = all->count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        int order = strcmp(all->items[middle].tensor->name, name);
        if (order < 0 || (order == 0 && all->items[middle].rank < rank)) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    const import_reference *found = low < all->count ? &all->items[low] : NULL;
    return found && found->rank == rank && strcmp(found->tensor->name, name) == 0 ? found : NULL;
}

/* References first ... end - 1 have the same name, which is matched once for all ranks. */
static ckd_status take_name(import_plan *plan, import_reference *all, size_t count, size_t first, size_t end,
                            ckd_error *err) {
    layout_bindings b;
    bool buffers = false;
    ckd_status status = layout_bind(&b, plan->layout, all[first].tensor->name, false, err);
    for (size_t i = first; i < end && status == CKD_OK; i++) {
        if (i > first && all[i - 1].rank == all[i].rank) {
            status =
                cli_error(err, CKD_E_INVALID, "'%.200s' is in both %.120s and %.120s, which are of one rank",
                          all[i].tensor->name, all[i - 1].file->path, all[i].file->path);
            break;
        }
        status = take_reference(plan, &all[i], &b, &buffers, err);
    }
    if (status == CKD_OK && buffers) {
        status = import_add_buffers(plan, &(import_references){all, count}, first, end, &b, err);
    }
    layout_bindings_free(&b);
    return status;
}

static ckd_status take_references(import_plan *plan, import_reference *all, size_t count, ckd_error *err) {
    qsort(all, count, sizeof(*all), by_local_name);
    ckd_status status = CKD_OK;
    for (size_t i = 0, end; i < count && status == CKD_OK; i = end) {
        for (end = i + 1; end < count && strcmp(all[end].tensor->name, all[i].tensor->name) == 0; end++) {
        }
        status = take_name(plan, all, count, i, end, err);
    }
    return status == CKD_OK ? import_check_buffers(plan, &(import_references){all, count}, err) : status;
}

static ckd_status find_entries(import_plan *plan, ckd_error *err) {
    size_t count = 0;
    for (size_t i = 0; i < plan->file_count; i++) {
        count += plan->files[i]->header.count;
    }
    import_reference *all = calloc(count + 1, sizeof(*all));
    plan->matched = calloc(plan->layout->rule_count, sizeof(*plan->matched));
    if (!all || !plan->matched) {
        free(all);
        return cli_error_nomem(err);
    }
    count = 0;
    for (size_t i = 0; i < plan->file_count; i++) {
        for (size_t k = 0; k < plan->files[i]->header.count; k++, count++) {
            const safetensors_tensor *t = &plan->files[i]->header.tensors[k];
            all[count] = (import_reference){.file = plan->files[i],
                                            .tensor = t,
                                            .stored = t,
                                            .range = {0, t->elements, 0},
                                            .rank = plan->ranks[i],
                                            .order = count};
        }
    }
    ckd_status status = take_references(plan, all, count, err);
    free(all);
    return status;
}

/* ---- tensors of the checkpoint ---- */

static int by_name(const void *left, const void *right) {
    const import_entry *a = left, *b = right;
    int order = strcmp(a->name, b->name);
    if (order) {
        return order;
    }
    if (a->rule != b->rule) {
        return a->rule < b->rule ? -1 : 1;
    }
    if (a->set != b->set) {
        return a->set < b->set ? -1 : 1;
    }
    return a->rank != b->rank ? (a->rank < b->rank ? -1 : 1) : (a->order > b->order) - (a->order < b->order);
}

static size_t first_order(const import_tensor *t) {
    size_t first = SIZE_MAX;
    for (size_t i = 0; i < t->count; i++) {
        size_t order = t->entries[i].order;
        first = order < first ? order : first;
    }
    return first;
}

/* `number` holds the order during the sort. Parameters of a buffer, and parts of one tensor, follow each other. */
static int by_order(const void *left, const void *right) {
    const import_tensor *a = left, *b = right;
    if (a->tensor.number != b->tensor.number) {
        return a->tensor.number < b->tensor.number ? -1 : 1;
    }
    if (a->entries->member != b->entries->member) {
        return a->entries->member < b->entries->member ? -1 : 1;
    }
    return (a->entries->part > b->entries->part) - (a->entries->part < b->entries->part);
}

static ckd_status find_tensors(import_plan *plan, ckd_error *err) {
    qsort(plan->entries, plan->entry_count, sizeof(*plan->entries), by_name);
    plan->tensors = calloc(plan->entry_count + 1, sizeof(*plan->tensors));
    if (!plan->tensors) {
        return cli_error_nomem(err);
    }
    for (size_t i = 0; i < plan->entry_count; i++) {
        const import_entry *e = &plan->entries[i];
        if (i == 0 || strcmp(plan->entries[i - 1].name, e->name) != 0) {
            plan->tensors[plan->count++] = (import_tensor){.tensor.name = e->name, .entries = e};
        }
        plan->tensors[plan->count - 1].count++;
    }
    for (size_t i = 0; i < plan->count; i++) {
        plan->tensors[i].tensor.number = first_order(&plan->tensors[i]);
    }
    qsort(plan->tensors, plan->count, sizeof(*plan->tensors), by_order);
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < plan->count && status == CKD_OK; i++) {
        plan->tensors[i].tensor.number = i;
        status = import_check(plan, &plan->tensors[i], err);
        plan->bytes += status == CKD_OK ? plan->tensors[i].tensor.size : 0;
    }
    return status;
}

ckd_status import_plan_make(import_plan *out, const layout *l, char *const *paths, size_t count,
                            ckd_error *err) {
    *out = (import_plan){.layout = l};
    ckd_status status = open_files(out, paths, count, err);
    THEN(status, merge_metadata(out, err));
    THEN(status, find_entries(out, err));
    THEN(status, find_tensors(out, err));
    return status == CKD_OK ? import_check_coverage(out, err) : status;
}
