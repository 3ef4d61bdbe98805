/*
 * Tensors that hold several parameters: where in memory the elements of each are. Of a tensor in memory with O elements before the
 * dimension, M in it and I behind, a parameter's region has O, L and I: element (o, p, i) of it is element (o, at(p), i) in memory,
 * where at() is a table of stretches.
 */
#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"
#include "engine/load/load.h"

#define MOST_STAGING (UINT64_C(64) << 20) /* and a quarter of the load's */

/* Positions begin ... end - 1 of the region are at `at` ... in memory, along the dimension. */
typedef struct piece {
    uint64_t begin, end, at;
    size_t parameter;
} piece;
#define PADDING SIZE_MAX

typedef struct parameter {
    const struct ckd_split *split;
    const piece *pieces; /* the split's */
    size_t piece_count;
    uint64_t offset, length, total;
    const char *name;
    uint64_t shape[CKD_MAX_DIMS];
} parameter;

struct ckd_split {
    ckd_fused f;
    size_t element;
    uint64_t outer, middle, inner; /* elements before, in and behind the dimension */
    parameter *parameters;
    ckd_tensor *tensors;
    size_t count;
    piece *pieces; /* of the first parameter, the second ... and padding */
    size_t piece_count;
};

void ckd_split_free(ckd_split *split) {
    if (split) {
        free(split->parameters);
        free(split->tensors);
        free(split->pieces);
        free(split);
    }
}

/* ---- between a region and memory ---- */

static const piece *piece_at(const parameter *p, uint64_t position) {
    size_t low = 0, high = p->piece_count - 1;
    while (low < high) {
        size_t middle = (low + high + 1) / 2;
        if (p->pieces[middle].begin <= position) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    return &p->pieces[low];
}

/* Elements first ... first + count - 1 of the region, out of memory into `values` or back. */
static void move(const parameter *p, uint64_t first, uint64_t count, char *values, bool back) {
    const ckd_split *s = p->split;
    while (count > 0) {
        uint64_t outer = first / (p->length * s->inner), rest = first % (p->length * s->inner);
        uint64_t position = rest / s->inner, inside = rest % s->inner;
        const piece *q = piece_at(p, position);
        uint64_t run = (q->end - position) * s->inner - inside;
        run = run < count ? run : count;
        uint64_t at = (outer * s->middle + q->at + position - q->begin) * s->inner + inside;
        char *memory = (char *)s->f.data + at * s->element;
        memcpy(back ? memory : values, back ? values : memory, (size_t)run * s->element);
        values += run * s->element;
        first += run;
        count -= run;
    }
}

static ckd_status read_elements(void *context, uint64_t first, uint64_t count, void *to, ckd_error *err) {
    (void)err;
    move(context, first, count, to, false);
    return CKD_OK;
}

/* ---- from stretches to parameters ---- */

static ckd_status check_stretch(const ckd_stretch *s, ckd_error *err) {
    uint64_t end;
    if (!s->name && (s->total || s->offset)) {
        return err_set(err, CKD_E_INVALID, "padding has a length only; a stretch of a parameter has a name");
    }
    if (s->name && (!size_add(&end, s->offset, s->length) || end > s->total)) {
        return err_set(err, CKD_E_INVALID, "a stretch of %s ends behind its %llu elements", s->name,
                       (unsigned long long)s->total);
    }
    return CKD_OK;
}

/* The one that the stretch goes on with, or a new one. NULL: totals differ. */
static parameter *find_parameter(ckd_split *split, const ckd_stretch *s, ckd_error *err) {
    for (size_t i = 0; i < split->count; i++) {
        parameter *p = &split->parameters[i];
        if (strcmp(p->name, s->name) != 0) {
            continue;
        }
        if (p->total != s->total) {
            err_set(err, CKD_E_INVALID, "%s is given with totals of %llu and %llu", s->name,
                    (unsigned long long)p->total, (unsigned long long)s->total);
            return NULL;
        }
        if (s->length == 0 || p->length == 0 || p->offset + p->length == s->offset) {
            return p;
        }
    }
    parameter *p = &split->parameters[split->count++];
    *p = (parameter){.split = split, .name = s->name, .total = s->total, .offset = s->offset};
    return p;
}

static ckd_status take_stretch(ckd_split *split, const ckd_stretch *s, ckd_error *err) {
    piece q = {.at = split->middle, .end = s->length, .parameter = PADDING};
    if (s->name) {
        parameter *p = find_parameter(split, s, err);
        if (!p) {
            return CKD_E_INVALID;
        }
        p->offset = p->length ? p->offset : s->offset;
        q.begin = p->length;
        q.end = p->length += s->length;
        q.parameter = (size_t)(p - split->parameters);
    }
    if (s->length > 0) {
        split->pieces[split->piece_count++] = q;
    }
    split->middle += s->length;
    return CKD_OK;
}

static int by_parameter(const void *a, const void *b) {
    const piece *x = a, *y = b;
    if (x->parameter != y->parameter) {
        return x->parameter < y->parameter ? -1 : 1;
    }
    return x->at < y->at ? -1 : x->at > y->at;
}

static ckd_status take_stretches(ckd_split *split, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < split->f.count && status == CKD_OK; i++) {
        const ckd_stretch *s = &split->f.stretches[i];
        status = check_stretch(s, err);
        if (status == CKD_OK && (s->length > CKD_MAX_ELEMENTS || split->middle > CKD_MAX_ELEMENTS)) {
            status = err_set(err, CKD_E_INVALID, "the stretches are longer than a tensor can be");
        }
        if (status == CKD_OK) {
            status = take_stretch(split, s, err);
        }
    }
    qsort(split->pieces, split->piece_count, sizeof(*split->pieces), by_parameter);
    for (size_t i = split->piece_count; i-- > 0;) {
        if (split->pieces[i].parameter != PADDING) {
            parameter *p = &split->parameters[split->pieces[i].parameter];
            p->pieces = &split->pieces[i];
            p->piece_count++;
        }
    }
    return status;
}

/* ---- tensors ---- */

/* All of a region in one piece of memory. */
static bool in_one_place(const ckd_split *s, const parameter *p) {
    return p->piece_count == 1 && (s->outer == 1 || p->length == s->middle);
}

static void *place_of(const ckd_split *s, const parameter *p) {
    return (char *)s->f.data + p->pieces[0].at * s->inner * s->element;
}

static void describe(ckd_split *s, size_t index) {
    parameter *p = &s->parameters[index];
    ckd_tensor *t = &s->tensors[index];
    *t = (ckd_tensor){.struct_size = sizeof(*t),
                      .name = p->name,
                      .role = s->f.role,
                      .dtype = s->f.dtype,
                      .ndim = s->f.ndim,
                      .shape = p->shape,
                      .region.kind = CKD_REGION_BOX};
    for (uint32_t d = 0; d < s->f.ndim; d++) {
        bool along = d == s->f.dim;
        p->shape[d] = along ? p->total : s->f.shape[d];
        t->region.offsets[d] = along ? p->offset : s->f.offsets ? s->f.offsets[d] : 0;
        t->region.lengths[d] = along ? p->length : s->f.lengths ? s->f.lengths[d] : s->f.shape[d];
    }
    if (s->f.data && p->piece_count > 0 && in_one_place(s, p)) {
        t->data = place_of(s, p);
    } else {
        t->read = read_elements;
        t->read_context = p;
    }
}

static ckd_status measure(ckd_split *s, ckd_error *err) {
    s->outer = s->inner = 1;
    uint64_t all = s->middle;
    for (uint32_t d = 0; d < s->f.ndim; d++) {
        uint64_t length = s->f.lengths ? s->f.lengths[d] : s->f.shape[d];
        uint64_t *side = d < s->f.dim ? &s->outer : &s->inner;
        if (d != s->f.dim && (!size_mul(&all, all, length) || !size_mul(side, *side, length))) {
            all = UINT64_MAX;
            break;
        }
    }
    if (all > CKD_MAX_ELEMENTS) {
        return err_set(err, CKD_E_INVALID, "a fused tensor has more than 2^40 elements");
    }
    for (size_t i = 0; i < s->count; i++) {
        describe(s, i);
    }
    return CKD_OK;
}

ckd_status ckd_fused_split(ckd_split **out, const ckd_fused *fused, ckd_error *err) {
    *out = NULL;
    ckd_fused f = CKD_FUSED_INIT;
    ckd_status status = struct_copy(&f, sizeof(f), fused, SIZE_UP_TO(ckd_fused, data), "ckd_fused", err);
    if (status != CKD_OK) {
        return status;
    }
    if (f.ndim == 0 || f.ndim > CKD_MAX_DIMS || f.dim >= f.ndim || !f.shape || (f.count && !f.stretches) ||
        (f.offsets == NULL) != (f.lengths == NULL) || ckd_dtype_size(f.dtype) == 0) {
        return err_set(
            err, CKD_E_INVALID,
            "a fused tensor needs a dtype, a shape, a dimension of it, and offsets and lengths or neither");
    }
    ckd_split *s = calloc(1, sizeof(*s));
    if (s) {
        *s = (ckd_split){.f = f, .element = ckd_dtype_size(f.dtype)};
        s->parameters = calloc(f.count + 1, sizeof(*s->parameters));
        s->tensors = calloc(f.count + 1, sizeof(*s->tensors));
        s->pieces = calloc(f.count + 1, sizeof(*s->pieces));
    }
    status = s && s->parameters && s->tensors && s->pieces
                 ? take_stretches(s, err)
                 : err_nomem(err, f.count * sizeof(parameter), "a fused tensor");
    if (status == CKD_OK) {
        status = measure(s, err);
    }
    if (status != CKD_OK) {
        ckd_split_free(s);
        return status;
    }
    *out = s;
    return CKD_OK;
}

const ckd_tensor *ckd_split_tensors(size_t *count, const ckd_split *split) {
    *count = split->count;
    return split->tensors;
}

/* ---- loading ---- */

/* As many rows of the first dimension at a time as fit `staging`. */
static ckd_status load_slabs(const parameter *p, const ckd_tensor *t, ckd_load *load, uint64_t staging,
                             ckd_error *err) {
    uint64_t row = p->split->element;
    for (uint32_t d = 1; d < t->ndim; d++) {
        row *= t->region.lengths[d];
    }
    uint64_t rows = row ? staging / row : 0, elements = row / p->split->element;
    rows = rows == 0 ? 1 : rows > t->region.lengths[0] ? t->region.lengths[0] : rows;
    char *room = malloc((size_t)(rows * row) + 1);
    if (!room) {
        return err_nomem(err, (size_t)(rows * row), "a parameter of a fused tensor");
    }
    ckd_status status = CKD_OK;
    for (uint64_t at = 0; at < t->region.lengths[0] && status == CKD_OK; at += rows) {
        ckd_load_request q = CKD_LOAD_REQUEST_INIT;
        uint64_t count = t->region.lengths[0] - at < rows ? t->region.lengths[0] - at : rows;
        q.name = t->name;
        q.dtype = t->dtype;
        q.ndim = t->ndim;
        q.shape = t->shape;
        q.region = t->region;
        q.region.offsets[0] += at;
        q.region.lengths[0] = count;
        q.data = room;
        q.size = (size_t)(count * row);
        status = ckd_load_tensor(load, &q, err);
        if (status == CKD_OK) {
            move(p, at * elements, count * elements, room, true);
        }
    }
    free(room);
    return status;
}

/* What is staged here is not kept there. */
static ckd_status load_in_slabs(const parameter *p, const ckd_tensor *t, ckd_load *load, ckd_error *err) {
    uint64_t limit = load->kept.limit, mine = load->staging / 4;
    mine = mine < MOST_STAGING ? mine : MOST_STAGING;
    values_store_set_limit(&load->kept, limit > mine ? limit - mine : 0);
    ckd_status status = load_slabs(p, t, load, mine, err);
    values_store_set_limit(&load->kept, limit);
    return status;
}

static ckd_status load_parameter(const parameter *p, const ckd_tensor *t, ckd_load *load, ckd_error *err) {
    const ckd_split *s = p->split;
    uint64_t elements = s->outer * p->length * s->inner;
    if (elements == 0) {
        return CKD_OK;
    }
    if (!in_one_place(s, p)) {
        return load_in_slabs(p, t, load, err);
    }
    ckd_load_request q = CKD_LOAD_REQUEST_INIT;
    q.name = t->name;
    q.dtype = t->dtype;
    q.ndim = t->ndim;
    q.shape = t->shape;
    q.region = t->region;
    q.data = place_of(s, p);
    q.size = (size_t)(elements * s->element);
    return ckd_load_tensor(load, &q, err);
}

static void clear_padding(ckd_split *s) {
    for (size_t i = 0; i < s->piece_count; i++) {
        const piece *q = &s->pieces[i];
        size_t bytes_of = (size_t)((q->end - q->begin) * s->inner * s->element);
        for (uint64_t o = 0; o < s->outer && q->parameter == PADDING; o++) {
            memset((char *)s->f.data + (o * s->middle + q->at) * s->inner * s->element, 0, bytes_of);
        }
    }
}

ckd_status ckd_split_load(ckd_split *split, ckd_load *load, ckd_error *err) {
    if (!split->f.data) {
        return err_set(err, CKD_E_INVALID, "a fused tensor is to be loaded, and has no data");
    }
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < split->count && status == CKD_OK; i++) {
        status = load_parameter(&split->parameters[i], &split->tensors[i], load, err);
    }
    if (status == CKD_OK) {
        clear_padding(split);
    }
    return status;
}

void ckd_stretch_padded(ckd_stretch out[2], const char *name, uint64_t total, uint64_t first,
                        uint64_t length) {
    uint64_t offset = first < total ? first : total;
    uint64_t real = length < total - offset ? length : total - offset;
    out[0] = (ckd_stretch){.name = name, .total = total, .offset = offset, .length = real};
    out[1] = (ckd_stretch){.length = length - real};
}
