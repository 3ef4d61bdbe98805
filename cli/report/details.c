/* Figures that need the tensors of checkpoints: bits by layer, and errors. A bounded number of checkpoints is read. */
#include "cli/report/report.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define COLUMNS_MAX 40 /* checkpoints that are read per run */
#define ROWS_MAX    32 /* layers per run; several share a row if there are more */

/* ---- layers ---- */

/*
 * Returns the length of a layer's name: up to the first part that is a number, as in "blocks.3.attn.weight". Without
 * one, it is the tensor's name without its last part.
 */
static size_t layer_length(const char *tensor) {
    for (const char *part = tensor; *part; part += *part == '.') {
        size_t digits = strspn(part, "0123456789"), length = strcspn(part, ".");
        if (digits && digits == length) {
            return (size_t)(part - tensor) + length;
        }
        part += length;
    }
    const char *last = strrchr(tensor, '.');
    return last && last > tensor ? (size_t)(last - tensor) : strlen(tensor);
}

/* The names of all layers of a run, in natural order: 2 before 10. */
typedef struct name_list {
    char **items;
    size_t count, room;
} name_list;

static int by_name(const void *a, const void *b) {
    return strverscmp(*(char *const *)a, *(char *const *)b);
}

/* The name must be one of the list's. */
static size_t find_layer(const name_list *names, const char *tensor) {
    char layer[CKD_NAME_MAX + 1], *key = layer;
    snprintf(layer, sizeof(layer), "%.*s", (int)layer_length(tensor), tensor);
    char **found = bsearch(&key, names->items, names->count, sizeof(*names->items), by_name);
    return found ? (size_t)(found - names->items) : 0;
}

static bool add_layer(name_list *names, const char *tensor) {
    size_t length = layer_length(tensor);
    const char *last = names->count ? names->items[names->count - 1] : NULL;
    if (last && strncmp(last, tensor, length) == 0 && last[length] == '\0') {
        return true;
    }
    if (names->count == names->room) {
        size_t room = names->room ? 2 * names->room : 64;
        char **grown = realloc(names->items, room * sizeof(*grown));
        if (!grown) {
            return false;
        }
        names->items = grown;
        names->room = room;
    }
    names->items[names->count] = strndup(tensor, length);
    return names->items[names->count] && ++names->count;
}

static void sort_layers(name_list *names) {
    size_t kept = 0;
    if (names->count) {
        qsort(names->items, names->count, sizeof(*names->items), by_name);
    }
    for (size_t i = 0; i < names->count; i++) {
        if (kept && strcmp(names->items[kept - 1], names->items[i]) == 0) {
            free(names->items[i]);
        } else {
            names->items[kept++] = names->items[i];
        }
    }
    names->count = kept;
}

static void free_names(name_list *names) {
    for (size_t i = 0; i < names->count; i++) {
        free(names->items[i]);
    }
    free(names->items);
    *names = (name_list){0};
}

/* ---- the checkpoints of a run ---- */

typedef struct reading {
    report_data *d;
    ckd_tensor_list *lists[COLUMNS_MAX]; /* of each column; NULL: not read */
    size_t checkpoints[COLUMNS_MAX];
    size_t columns;
    name_list names;
} reading;

static bool is_counted(const ckd_tensor_info *t) {
    return t->role == CKD_ROLE_WEIGHT && t->elements;
}

static ckd_status read_lists(reading *r, const report_growth *g, ckd_store *store, ckd_error *err) {
    const ckd_checkpoint *all = r->d->report->by_checkpoint;
    size_t count = (size_t)g->run->checkpoints;
    r->columns = count < COLUMNS_MAX ? count : COLUMNS_MAX;
    for (size_t i = 0; i < r->columns; i++) {
        const ckd_checkpoint *c = g->first + (r->columns > 1 ? i * (count - 1) / (r->columns - 1) : 0);
        ckd_error why;
        r->checkpoints[i] = (size_t)(c - all);
        ckd_status status = ckd_store_tensors(&r->lists[i], store, &c->id, &why);
        if (status == CKD_E_NOMEM) {
            *err = why;
            return status;
        }
        for (size_t k = 0; status == CKD_OK && k < r->lists[i]->count; k++) {
            const ckd_tensor_info *t = &r->lists[i]->items[k];
            if (is_counted(t) && !add_layer(&r->names, t->name)) {
                return cli_error_nomem(err);
            }
        }
        sort_layers(&r->names);
    }
    return CKD_OK;
}

static void add_error(reading *r, size_t column) {
    const ckd_tensor_list *list = r->lists[column];
    size_t at = r->checkpoints[column];
    if (r->d->report->by_checkpoint[at].fidelity == CKD_EXACT) {
        return;
    }
    for (size_t k = 0; k < list->count; k++) {
        const ckd_tensor_info *t = &list->items[k];
        if (is_counted(t) && isfinite(t->rel_l2)) {
            r->d->details.weight_error[at] = fmax(r->d->details.weight_error[at], t->rel_l2);
        }
    }
}

static size_t row_of(const reading *r, const report_layers *l, const char *tensor) {
    return find_layer(&r->names, tensor) * l->rows / r->names.count;
}

/* `elements` has a place for each row. */
static void add_column(const reading *r, report_layers *l, size_t column, uint64_t *elements) {
    const ckd_tensor_list *list = r->lists[column];
    memset(elements, 0, l->rows * sizeof(*elements));
    for (size_t k = 0; k < list->count; k++) {
        if (is_counted(&list->items[k])) {
            size_t row = row_of(r, l, list->items[k].name);
            double *bits = &l->bits[row * l->columns + column];
            *bits = (elements[row] ? *bits : 0) + 8 * (double)list->items[k].stored_bytes;
            elements[row] += list->items[k].elements;
        }
    }
    for (size_t row = 0; row < l->rows; row++) {
        l->bits[row * l->columns + column] /= (double)elements[row]; /* NaN stays NaN */
    }
}

/* "blocks.0", or "blocks.0 ... blocks.3" if they share a row. */
static char *row_name(const reading *r, size_t row, size_t rows) {
    size_t first = (row * r->names.count + rows - 1) / rows,
           end = ((row + 1) * r->names.count + rows - 1) / rows;
    char *out = NULL;
    int length = end - first > 1 ? asprintf(&out, "%s ... %s", r->names.items[first], r->names.items[end - 1])
                                 : asprintf(&out, "%s", r->names.items[first]);
    return length < 0 ? NULL : out;
}

static ckd_status make_layers(report_layers *l, const reading *r, ckd_error *err) {
    l->columns = r->columns;
    l->rows = r->names.count < ROWS_MAX ? r->names.count : ROWS_MAX;
    l->checkpoints = calloc(l->columns + 1, sizeof(*l->checkpoints));
    l->names = calloc(l->rows + 1, sizeof(*l->names));
    l->bits = calloc(l->rows * l->columns + 1, sizeof(*l->bits));
    uint64_t elements[ROWS_MAX];
    if (!l->checkpoints || !l->names || !l->bits) {
        return cli_error_nomem(err);
    }
    for (size_t i = 0; i < l->rows * l->columns; i++) {
        l->bits[i] = NAN;
    }
    for (size_t row = 0; row < l->rows; row++) {
        l->names[row] = row_name(r, row, l->rows);
        if (!l->names[row]) {
            return cli_error_nomem(err);
        }
    }
    for (size_t i = 0; i < l->columns; i++) {
        l->checkpoints[i] = r->checkpoints[i];
        if (r->lists[i]) {
            add_column(r, l, i, elements);
        }
    }
    return CKD_OK;
}

static ckd_status read_run(report_data *d, const report_growth *g, ckd_store *store, ckd_error *err) {
    reading r = {.d = d};
    report_layers *l = &d->details.layers[d->details.layers_count++];
    l->growth = g;
    ckd_status status = read_lists(&r, g, store, err);
    THEN(status, make_layers(l, &r, err));
    for (size_t i = 0; i < r.columns; i++) {
        if (r.lists[i] && status == CKD_OK) {
            add_error(&r, i);
        }
        ckd_tensor_list_free(r.lists[i]);
    }
    free_names(&r.names);
    return status;
}

/* ---- all runs ---- */

report_shown report_shown_runs(const report_data *d) {
    report_shown out = {{0}, 0};
    const ckd_usage *runs = d->report->by_run;
    bool taken;
    for (size_t k = 0; k < HTML_SERIES_MAX && k < d->report->run_count; k++) {
        size_t best = SIZE_MAX;
        for (size_t i = 0; i < d->report->run_count; i++) {
            taken = false;
            for (size_t j = 0; j < out.count; j++) {
                taken = taken || out.runs[j] == i;
            }
            if (!taken && (best == SIZE_MAX || runs[i].checkpoints > runs[best].checkpoints)) {
                best = i;
            }
        }
        /* Sorted by index. */
        size_t at = out.count++;
        for (; at > 0 && out.runs[at - 1] > best; at--) {
            out.runs[at] = out.runs[at - 1];
        }
        out.runs[at] = best;
    }
    return out;
}

/* Other metrics have another scale, and are not drawn beside it. */
static const char *metric_name(const report_data *d) {
    for (size_t i = d->report->checkpoint_count; i-- > 0;) {
        const ckd_checkpoint *c = &d->report->by_checkpoint[d->by_time[i]];
        if (!isnan(c->metric)) {
            return c->metric_name;
        }
    }
    return NULL;
}

ckd_status report_details_read(report_data *d, ckd_store *store, ckd_error *err) {
    report_details *out = &d->details;
    report_shown shown = report_shown_runs(d);
    out->layers = calloc(shown.count + 1, sizeof(*out->layers));
    out->weight_error = calloc(d->report->checkpoint_count + 1, sizeof(*out->weight_error));
    if (!out->layers || !out->weight_error) {
        return cli_error_nomem(err);
    }
    for (size_t i = 0; i < d->report->checkpoint_count; i++) {
        out->weight_error[i] = NAN;
    }
    out->metric = metric_name(d);
    ckd_status status = cli_marks_read(&out->marks, store, err);
    for (size_t i = 0; i < shown.count && status == CKD_OK; i++) {
        status = read_run(d, &d->growths[shown.runs[i]], store, err);
    }
    return status;
}

void report_details_free(report_details *details) {
    for (size_t i = 0; i < details->layers_count; i++) {
        report_layers *l = &details->layers[i];
        for (size_t row = 0; row < l->rows && l->names; row++) {
            free(l->names[row]);
        }
        free(l->names);
        free(l->checkpoints);
        free(l->bits);
    }
    free(details->layers);
    free(details->weight_error);
    cli_marks_free(&details->marks);
    *details = (report_details){0};
}
