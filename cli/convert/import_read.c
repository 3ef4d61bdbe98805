/*
 * Reads values of a checkpoint's tensor from the ranks' files. Neighbouring elements of a fragment in the checkpoint's
 * tensor are also neighbours in the rank's tensor or flat buffer, if both agree in the last dimensions. They are read
 * in runs. The file has runs in the same order as the tensor, so short runs that are close together are read with one
 * call.
 */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "cli/convert/internal.h"
#include "cli/files/files.h"

#define WINDOW_BYTES (1u << 20)
/* runs of at least this many bytes are read directly to their destination */
#define DIRECT_BYTES (1u << 16)
/* so are runs whose common window would have this many times the needed bytes */
#define SPREAD   8
#define COMPARED (UINT64_C(1) << 17) /* elements compared at a time */

struct import_reader {
    const import_plan *plan;
    const import_tensor *tensor; /* the tensor whose fragments were computed */
    import_fragments fragments;
    uint64_t compared; /* elements from the first on that were found equal */
    char *window;      /* elements window_first ... + window_count - 1 of a rank's tensor */
    const safetensors_tensor *window_of;
    uint64_t window_first, window_count;
    char *copy;    /* COMPARED elements */
    double *means; /* COMPARED elements */
};

ckd_status import_reader_new(import_reader **out, const import_plan *plan, ckd_error *err) {
    import_reader *r = calloc(1, sizeof(*r));
    if (r) {
        r->plan = plan;
        r->window = malloc(WINDOW_BYTES);
        r->copy = malloc(COMPARED * 8);
        r->means = malloc(COMPARED * sizeof(*r->means));
    }
    if (!r || !r->window || !r->copy || !r->means) {
        import_reader_free(r);
        return cli_error_nomem(err);
    }
    *out = r;
    return CKD_OK;
}

void import_reader_free(import_reader *r) {
    if (r) {
        import_fragments_free(&r->fragments);
        free(r->window);
        free(r->copy);
        free(r->means);
        free(r);
    }
}

/* ---- runs of a fragment ---- */

typedef struct runs {
    const import_fragment *p;
    const safetensors_tensor *local;
    uint32_t ndim, outer; /* dimensions before `outer` enumerate the runs */
    uint64_t length, count;
    /* step in elements from one index to the next */
    uint64_t global_step[CKD_MAX_DIMS], local_step[CKD_MAX_DIMS];
} runs;

static runs runs_of(const import_fragment *p, const safetensors_tensor *global) {
    runs r = {.p = p, .local = p->entry->tensor, .ndim = global->ndim, .length = 1, .count = 1};
    uint64_t g = 1, l = 1;
    for (uint32_t d = r.ndim; d-- > 0;) {
        r.global_step[d] = g;
        r.local_step[d] = l;
        g *= global->shape[d];
        l *= r.local->shape[d];
    }
    /* A dimension joins the run if all later dimensions are whole on both sides. */
    r.outer = r.ndim;
    bool whole = true;
    while (r.outer > 0 && whole) {
        uint32_t d = --r.outer;
        r.length *= p->lengths[d];
        whole = p->lengths[d] == global->shape[d] && p->lengths[d] == r.local->shape[d];
    }
    for (uint32_t d = 0; d < r.outer; d++) {
        r.count *= p->lengths[d];
    }
    return r;
}

typedef struct run_place {
    uint64_t global, local;
} run_place;

/* Both positions grow with the run's number. */
static run_place place_of_run(const runs *r, uint64_t number) {
    run_place at = {0, 0};
    for (uint32_t d = r->ndim; d-- > 0;) {
        uint64_t index = 0;
        if (d < r->outer) {
            index = number % r->p->lengths[d];
            number /= r->p->lengths[d];
        }
        at.global += (r->p->offsets[d] + index) * r->global_step[d];
        at.local += (index + r->p->local[d]) * r->local_step[d];
    }
    at.local += r->p->entry->range.at - r->p->entry->range.first; /* may be negative, but the sum is not */
    return at;
}

/* Returns the first run that ends after this element of the checkpoint's tensor. */
static uint64_t first_run(const runs *r, uint64_t element) {
    uint64_t low = 0, high = r->count;
    while (low < high) {
        uint64_t middle = low + (high - low) / 2;
        if (place_of_run(r, middle).global + r->length > element) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return low;
}

/* ---- reading them ---- */

/* Elements first ... first + count - 1 of a tensor, and their destination. */
typedef struct elements {
    uint64_t first, count;
    char *to;
} elements;

/* Reads elements of a rank's tensor; nothing after `last` will be needed. */
static ckd_status read_window(import_reader *r, const import_entry *e, const elements *w, uint64_t last,
                              ckd_error *err) {
    size_t element = ckd_dtype_size(e->stored->dtype);
    if (r->window_of != e->stored || w->first < r->window_first ||
        w->first + w->count > r->window_first + r->window_count) {
        uint64_t max = WINDOW_BYTES / element;
        r->window_of = NULL;
        r->window_first = w->first;
        r->window_count = last - w->first < max ? last - w->first : max;
        ckd_status status = safetensors_read(e->file, e->stored, w->first, r->window_count, r->window, err);
        if (status != CKD_OK) {
            return status;
        }
        r->window_of = e->stored;
    }
    memcpy(w->to, r->window + (w->first - r->window_first) * element, (size_t)w->count * element);
    return CKD_OK;
}

/* Reads those of the elements that the fragment has; adds their number to *found. */
static ckd_status read_fragment(uint64_t *found, import_reader *r, const import_fragment *p,
                                const elements *range, ckd_error *err) {
    runs all = runs_of(p, &r->tensor->tensor);
    size_t element = ckd_dtype_size(all.local->dtype);
    uint64_t first = range->first, end = first + range->count, begin_run = first_run(&all, first);
    uint64_t end_run = first_run(&all, end + all.length - 1); /* the first run that starts there or later */
    if (begin_run == end_run) {
        return CKD_OK;
    }
    /* Do not read ahead: copies alternate, and the bytes ahead would be read again for each of them. */
    run_place end_place = place_of_run(&all, end_run - 1);
    uint64_t last =
        end_place.local + (end - end_place.global < all.length ? end - end_place.global : all.length);
    uint64_t spread = (last - place_of_run(&all, begin_run).local) / (end_run - begin_run) / all.length;
    ckd_status status = CKD_OK;
    for (uint64_t i = begin_run; i < end_run && status == CKD_OK; i++) {
        run_place at = place_of_run(&all, i);
        uint64_t a = at.global > first ? at.global : first;
        uint64_t b = at.global + all.length < end ? at.global + all.length : end;
        elements run = {at.local + (a - at.global), b - a, range->to + (a - first) * element};
        *found += b - a;
        status = (b - a) * element >= DIRECT_BYTES || spread >= SPREAD
                     ? safetensors_read(p->entry->file, p->entry->stored, run.first, run.count, run.to, err)
                     : read_window(r, p->entry, &run, last, err);
    }
    return status;
}

/* Reads the elements that the copy has; adds their number to *found. */
static ckd_status read_fragments(uint64_t *found, import_reader *r, size_t copy, const elements *range,
                                 ckd_error *err) {
    *found = 0;
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < r->fragments.count && status == CKD_OK; i++) {
        if (r->fragments.items[i].copy == copy) {
            status = read_fragment(found, r, &r->fragments.items[i], range, err);
        }
    }
    return status;
}

/* Reads from a copy that has the whole tensor. */
static ckd_status read_copy(import_reader *r, size_t copy, uint64_t first, uint64_t count, void *to,
                            ckd_error *err) {
    uint64_t found;
    elements range = {first, count, to};
    ckd_status status = read_fragments(&found, r, copy, &range, err);
    if (status == CKD_OK && found != count) {
        status = layout_error(r->plan->layout, r->tensor->entries->rule->line, err, CKD_E_MISMATCH,
                              "of %" PRIu64 " elements the ranks have %" PRIu64, count, found);
        cli_error_tensor(err, r->tensor->tensor.name);
    }
    return status;
}

/* ---- copies ---- */

/* Returns the entry of this copy that has the element. */
static const import_entry *owner_of(const import_reader *r, size_t copy, uint64_t element) {
    for (size_t i = 0; i < r->fragments.count; i++) {
        const import_fragment *p = &r->fragments.items[i];
        uint64_t rest = element;
        bool inside = p->copy == copy;
        for (uint32_t d = r->tensor->tensor.ndim; d-- > 0;) {
            uint64_t index = rest % r->tensor->tensor.shape[d];
            rest /= r->tensor->tensor.shape[d];
            inside = inside && index >= p->offsets[d] && index - p->offsets[d] < p->lengths[d];
        }
        if (inside) {
            return p->entry;
        }
    }
    return r->tensor->entries;
}

static ckd_status report_difference(const import_reader *r, size_t copy, uint64_t element, ckd_error *err) {
    const import_entry *a = owner_of(r, 0, element), *b = owner_of(r, copy, element);
    layout_error(r->plan->layout, b->rule->line, err, CKD_E_MISMATCH,
                 "the copies of '%.200s' on ranks %u and %u differ, first at element %" PRIu64
                 "; take=first takes the first one, averaged the mean",
                 r->tensor->tensor.name, a->rank, b->rank, element);
    return cli_error_tensor(err, r->tensor->tensor.name);
}

static ckd_status compare_copy(import_reader *r, size_t copy, uint64_t first, uint64_t count,
                               const char *with, ckd_error *err) {
    size_t element = ckd_dtype_size(r->tensor->tensor.dtype);
    uint64_t found;
    memcpy(r->copy, with, (size_t)count * element); /* makes elements that the copy lacks compare as equal */
    elements range = {first, count, r->copy};
    ckd_status status = read_fragments(&found, r, copy, &range, err);
    if (status == CKD_OK && memcmp(r->copy, with, (size_t)count * element) != 0) {
        uint64_t i = 0;
        while (memcmp(r->copy + i * element, with + i * element, element) == 0) {
            i++;
        }
        status = report_difference(r, copy, first + i, err);
    }
    return status;
}

static ckd_status average_copies(import_reader *r, uint64_t first, uint64_t count, char *to, ckd_error *err) {
    ckd_dtype dtype = r->tensor->tensor.dtype;
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < count; i++) {
        r->means[i] = -0.0; /* changes no sum, not even its sign */
    }
    for (size_t copy = 0; copy < r->fragments.copies && status == CKD_OK; copy++) {
        status = read_copy(r, copy, first, count, r->copy, err);
        if (status == CKD_OK) {
            cli_mean_add(r->means, r->copy, dtype, (size_t)count);
        }
    }
    if (status == CKD_OK) {
        cli_mean_end(to, r->means, dtype, (size_t)count, r->fragments.copies);
    }
    return status;
}

static ckd_status read_some(import_reader *r, uint64_t first, uint64_t count, char *to, ckd_error *err) {
    const layout_rule *rule = r->tensor->entries->rule;
    if (rule->kind == LAYOUT_AVERAGED && r->fragments.copies > 1) {
        return average_copies(r, first, count, to, err);
    }
    ckd_status status = read_copy(r, 0, first, count, to, err);
    if (rule->take_first || first + count <= r->compared) {
        return status;
    }
    for (size_t copy = 1; copy < r->fragments.copies && status == CKD_OK; copy++) {
        status = compare_copy(r, copy, first, count, to, err);
    }
    if (status == CKD_OK && first <= r->compared) {
        r->compared = first + count;
    }
    return status;
}

ckd_status import_read(import_reader *r, const import_tensor *t, uint64_t first, uint64_t count, void *to,
                       ckd_error *err) {
    ckd_status status = CKD_OK;
    if (r->tensor != t) {
        import_fragments_free(&r->fragments);
        r->tensor = NULL;
        r->compared = 0;
        status = import_fragments_make(&r->fragments, r->plan, t, err);
        r->tensor = status == CKD_OK ? t : NULL;
    }
    size_t element = ckd_dtype_size(t->tensor.dtype);
    for (uint64_t done = 0; done < count && status == CKD_OK;) {
        uint64_t n = count - done < COMPARED ? count - done : COMPARED;
        status = read_some(r, first + done, n, (char *)to + done * element, err);
        done += n;
    }
    return status;
}
