/*
 * Compares the names of a save's tensors with the previous checkpoint's, after the commit. The result is only a note:
 * the save stands.
 */
#include "cli/commands/missing.h"

#include <stdlib.h>
#include <string.h>

#include "cli/output/output.h"

enum { NAMES_SHOWN = 3 };

static int compare(const void *a, const void *b) {
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* Returns the inputs' names, sorted; free() the result. */
static const char **names_of(const cli_inputs *inputs) {
    const char **names = malloc((inputs->count + 1) * sizeof(*names));
    for (size_t i = 0; names && i < inputs->count; i++) {
        names[i] = inputs->tensors[i].tensor->name;
    }
    if (names) {
        qsort(names, inputs->count, sizeof(*names), compare);
    }
    return names;
}

ckd_status cli_missing_find(json_t **out, ckd_id *before, ckd_store *store, const ckd_checkpoint *saved,
                            const cli_inputs *inputs, ckd_error *err) {
    ckd_tensor_list *earlier = NULL;
    ckd_checkpoint older;
    *out = json_array();
    *before = saved->parent;
    if (cli_id_is_none(before)) {
        if (ckd_store_previous(&older, store, saved->run, saved->step, NULL) != CKD_OK) {
            return *out ? CKD_OK : cli_error_nomem(err);
        }
        *before = older.id;
    }
    const char **names = names_of(inputs);
    ckd_status status = names && *out ? CKD_OK : cli_error_nomem(err);
    /*
     * The run's policy may have deleted the older checkpoint right after the commit. Then there is nothing to compare.
     */
    bool comparable = status == CKD_OK && ckd_store_tensors(&earlier, store, before, NULL) == CKD_OK;
    for (size_t i = 0; comparable && i < earlier->count; i++) {
        const char *name = earlier->items[i].name;
        if (!bsearch(&name, names, inputs->count, sizeof(*names), compare)) {
            cli_json_append(out, cli_json_text(name));
        }
    }
    ckd_tensor_list_free(earlier);
    free(names);
    return status != CKD_OK || *out ? status : cli_error_nomem(err);
}

void cli_missing_report(const json_t *names, const char *saved, const char *before, bool all) {
    size_t count = json_array_size(names), shown = all || count < NAMES_SHOWN ? count : NAMES_SHOWN;
    if (count == 0) {
        return;
    }
    cli_note("%s lacks %zu tensor%s that %s has:", saved, count, cli_plural(count), before);
    for (size_t i = 0; i < shown; i++) {
        cli_note("  %s", json_string_value(json_array_get(names, i)));
    }
    if (shown < count) {
        cli_note("  and %zu more (-v names them all)", count - shown);
    }
}
