/*
 * Flat buffers of a rank: tensors end to end, of which the rank has some elements. This is the inverse of
 * import_flat.c.
 */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "cli/convert/rank_content.h"

/* ---- selecting tensors ---- */

typedef struct flattening {
    const bound_checkpoint *b;
    uint32_t rank;
    const uint32_t *at;
    rank_content *content;
    rank_tensor **by_name; /* pointers into the content */
    rank_tensor *buffers;  /* each at the position of its first tensor in the content */
} flattening;

static int by_name(const void *left, const void *right) {
    const rank_tensor *a = *(rank_tensor *const *)left, *b = *(rank_tensor *const *)right;
    return strcmp(a->name, b->name);
}

static rank_tensor *find_tensor(const flattening *f, const char *name) {
    rank_tensor key = {.name = (char *)name}, *sought = &key;
    rank_tensor **found = bsearch(&sought, f->by_name, f->content->count, sizeof(rank_tensor *), by_name);
    return found ? *found : NULL;
}

/* Counts the buffer's parameters that the rank has; *missing is one that it lacks, or NULL. */
static size_t count_found(const layout_parameter **missing, const flattening *f, const layout_buffer *b) {
    size_t found = 0;
    *missing = NULL;
    for (size_t i = 0; i < b->count; i++) {
        bool exists = find_tensor(f, b->parameters[i].name) != NULL;
        found += exists;
        *missing = exists || *missing ? *missing : &b->parameters[i];
    }
    return found;
}

static ckd_status report_missing(const flattening *f, const layout_buffer *b, const layout_parameter *missing,
                                 ckd_error *err) {
    layout_error(f->b->layout, missing->line, err, CKD_E_MISMATCH,
                 "the checkpoint has nothing for '%.120s', which '%.120s' of %s has between others (line %u)",
                 missing->name, b->name, layout_rank_text(f->b->layout, f->rank).text, b->rule->line);
    return cli_error_tensor(err, missing->name);
}

/* A list's shape is that of the whole tensor, with parts side by side. */
static ckd_status check_shape(const flattening *f, const layout_parameter *p, const rank_tensor *t,
                              ckd_error *err) {
    const layout_member *m = p->member;
    const ckd_tensor_info *first = t->parts[0];
    uint64_t shape[CKD_MAX_DIMS];
    uint32_t dim = layout_main_dim(t->rule, first->ndim);
    memcpy(shape, first->shape, first->ndim * sizeof(*shape));
    for (size_t i = 1; i < layout_tensors_of(t->rule); i++) {
        shape[dim] += t->parts[i]->shape[dim];
    }
    if (!m->shaped || (m->ndim == first->ndim && memcmp(m->shape, shape, m->ndim * sizeof(*shape)) == 0)) {
        return CKD_OK;
    }
    layout_error(f->b->layout, p->line, err, CKD_E_MISMATCH,
                 "'%.200s' is %s in the checkpoint, and not %s as the list says", p->name,
                 layout_shape_text(first->ndim, shape).text, layout_shape_text(m->ndim, m->shape).text);
    return cli_error_tensor(err, p->name);
}

static ckd_status check_member(const flattening *f, const layout_buffer *b, const layout_parameter *p,
                               const rank_tensor *t, ckd_dtype dtype, ckd_error *err) {
    const layout *l = f->b->layout;
    if (!t) { /* it was found, but has gone into another buffer */
        layout_error(l, p->line, err, CKD_E_MISMATCH,
                     "'%.120s' would be in '%.120s' of rank %u twice, or in two buffers", p->name, b->name,
                     f->rank);
        return cli_error_tensor(err, p->name);
    }
    if (rank_tensor_dtype(t) != dtype) {
        layout_error(l, p->line, err, CKD_E_MISMATCH,
                     "'%.120s' is %s and '%.120s' %s: they cannot be in one flat buffer", p->name,
                     ckd_dtype_name(rank_tensor_dtype(t)), b->parameters[0].name, ckd_dtype_name(dtype));
        return cli_error_tensor(err, p->name);
    }
    ckd_status status = layout_check_parameter(l, b->rule, t->rule, p, err);
    return status == CKD_OK ? check_shape(f, p, t, err) : status;
}

/* ---- making a buffer ---- */

static uint64_t elements_of(const rank_tensor *t) {
    uint64_t elements = 1;
    for (uint32_t d = 0; d < t->share.ndim; d++) {
        elements *= t->share.lengths[d];
    }
    return elements;
}

/* Sets its position, and which elements of its tensors it has. */
static ckd_status set_ranges(rank_tensor *buffer, const flattening *f, const layout_buffer *b,
                             ckd_error *err) {
    uint64_t *sizes = calloc(b->count, sizeof(*sizes));
    buffer->ranges = calloc(b->count, sizeof(*buffer->ranges));
    buffer->name = strdup(b->name);
    if (!sizes || !buffer->ranges || !buffer->name) {
        free(sizes);
        return cli_error_nomem(err);
    }
    for (size_t i = 0; i < b->count; i++) {
        sizes[i] = elements_of(&buffer->members[i]);
    }
    layout_ranges ranges = {sizes, b->count, buffer->ranges, 0};
    ckd_status status = layout_ranges_make(&ranges, f->b->layout, b->rule, f->at, err);
    buffer->share.lengths[0] = ranges.length;
    free(sizes);
    return status;
}

/* Moves its tensors out of the content. Tensors already moved into another buffer have no parts any more. */
static ckd_status move_members(rank_tensor *buffer, size_t *place, const flattening *f,
                               const layout_buffer *b, ckd_error *err) {
    *buffer = (rank_tensor){.rule = b->rule, .share = {.ndim = 1}};
    *place = f->content->count;
    buffer->members = calloc(b->count, sizeof(*buffer->members));
    if (!buffer->members) {
        return cli_error_nomem(err);
    }
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < b->count && status == CKD_OK; i++) {
        rank_tensor *t = find_tensor(f, b->parameters[i].name), *to = &buffer->members[i];
        bool already_moved = !t->parts;
        ckd_dtype dtype = i               ? rank_tensor_dtype(buffer)
                          : already_moved ? CKD_DTYPE_NONE
                                          : rank_tensor_dtype(t);
        status = check_member(f, b, &b->parameters[i], already_moved ? NULL : t, dtype, err);
        if (status == CKD_OK) {
            size_t number = (size_t)(t - f->content->items);
            *place = number < *place ? number : *place;
            *to = *t;
            *t = (rank_tensor){.name = to->name}; /* the name is still needed to find other tensors */
            to->name = NULL;
            buffer->member_count++;
        }
    }
    return status;
}

static ckd_status flatten(void *context, const layout_buffer *b, ckd_error *err) {
    flattening *f = context;
    const layout_parameter *missing;
    size_t found = count_found(&missing, f, b), place;
    if (found == 0 || missing) {
        return found ? report_missing(f, b, missing, err) : CKD_OK;
    }
    rank_tensor buffer;
    ckd_status status = move_members(&buffer, &place, f, b, err);
    THEN(status, set_ranges(&buffer, f, b, err));
    if (status == CKD_OK) {
        f->buffers[place] = buffer;
    } else {
        rank_tensor_free(&buffer);
    }
    return status;
}

/* A buffer's name must differ from those of tensors and of other buffers. */
static ckd_status check_names(const flattening *f, ckd_error *err) {
    const layout *l = f->b->layout;
    rank_tensor **buffers = calloc(f->content->count + 1, sizeof(rank_tensor *));
    size_t count = 0;
    for (size_t i = 0; buffers && i < f->content->count; i++) {
        if (f->buffers[i].name) {
            buffers[count++] = &f->buffers[i];
        }
    }
    ckd_status status = buffers ? CKD_OK : cli_error_nomem(err);
    if (count) {
        qsort(buffers, count, sizeof(rank_tensor *), by_name);
    }
    for (size_t i = 0; i < count && status == CKD_OK; i++) {
        const rank_tensor *other = find_tensor(f, buffers[i]->name);
        if (other && other->parts) {
            status = layout_error(
                l, buffers[i]->rule->line, err, CKD_E_MISMATCH,
                "the checkpoint has a tensor '%.200s', which is the name of a flat buffer of rank %u",
                buffers[i]->name, f->rank);
        } else if (i && strcmp(buffers[i - 1]->name, buffers[i]->name) == 0) {
            status = layout_error(l, buffers[i]->rule->line, err, CKD_E_MISMATCH,
                                  "rank %u would have two flat buffers '%.200s', by lines %u and %u", f->rank,
                                  buffers[i]->name, buffers[i - 1]->rule->line, buffers[i]->rule->line);
        }
    }
    free(buffers);
    return status;
}

/* Replaces the moved tensors by their buffers. */
static void close_ranks(rank_content *c, rank_tensor *buffers) {
    size_t kept = 0;
    for (size_t i = 0; i < c->count; i++) {
        rank_tensor t = c->items[i];
        if (!t.parts) {
            free(t.name);
            t = buffers[i];
        }
        if (t.name) {
            c->items[kept++] = t;
        }
    }
    c->count = kept;
}

ckd_status rank_content_flatten(rank_content *c, const bound_checkpoint *b, uint32_t rank, ckd_error *err) {
    uint32_t at[LAYOUT_AXES];
    layout_coordinates(at, b->layout, rank);
    flattening f = {b,
                    rank,
                    at,
                    c,
                    calloc(c->count + 1, sizeof(rank_tensor *)),
                    calloc(c->count + 1, sizeof(rank_tensor))};
    ckd_status status = f.by_name && f.buffers ? CKD_OK : cli_error_nomem(err);
    for (size_t i = 0; i < c->count && status == CKD_OK; i++) {
        f.by_name[i] = &c->items[i];
    }
    if (status == CKD_OK) {
        qsort(f.by_name, c->count, sizeof(rank_tensor *), by_name);
        status = layout_each_buffer(b->layout, at, flatten, &f, err);
    }
    THEN(status, check_names(&f, err));
    if (status == CKD_OK) {
        close_ranks(c, f.buffers);
    }
    for (size_t i = 0; i < c->count && status != CKD_OK && f.buffers; i++) {
        rank_tensor_free(&f.buffers[i]);
    }
    free(f.by_name);
    free(f.buffers);
    return status;
}

/* ---- values ---- */

/* Does the rank have the whole tensor as in the checkpoint? Then ranges are the same in both. */
static bool is_whole(const rank_tensor *t) {
    const layout_share *s = &t->share;
    return layout_tensors_of(t->rule) == 1 && s->count == 1 && s->stretches[0].part == 0 &&
           memcmp(s->lengths, t->parts[0]->shape, s->ndim * sizeof(*s->lengths)) == 0;
}

static ckd_load_request request_of(const rank_tensor *t, uint64_t first, uint64_t count) {
    ckd_load_request q = CKD_LOAD_REQUEST_INIT;
    q.name = t->parts[0]->name;
    q.region = (ckd_region){.kind = CKD_REGION_FLAT, .start = first, .count = count};
    return q;
}

/* Loads some elements of a rank's tensor. */
static ckd_status load_range(char *to, void *scratch, const rank_tensor *t, const layout_range *r,
                             ckd_load *load, ckd_error *err) {
    size_t element = ckd_dtype_size(rank_tensor_dtype(t));
    if (is_whole(t)) {
        ckd_load_request q = request_of(t, r->first, r->count);
        q.data = to;
        q.size = (size_t)r->count * element;
        return ckd_load_tensor(load, &q, err);
    }
    ckd_status status = CKD_OK;
    for (uint64_t done = 0, n; done < r->count && status == CKD_OK; done += n) {
        ckd_region box;
        n = layout_next_box(&box, t->share.ndim, t->share.lengths, r->first + done, r->count - done);
        status = rank_tensor_load(to + done * element, scratch, t, &box, load, err);
    }
    return status;
}

ckd_status rank_flat_load(void *to, void *scratch, const rank_tensor *t, const ckd_region *box,
                          ckd_load *load, ckd_error *err) {
    uint64_t low = box->offsets[0], high = low + box->lengths[0];
    size_t element = ckd_dtype_size(rank_tensor_dtype(t));
    ckd_status status = CKD_OK;
    memset(to, 0, (size_t)box->lengths[0] * element); /* padding stays zero */
    for (size_t i = 0; i < t->member_count && status == CKD_OK; i++) {
        const layout_range *r = &t->ranges[i];
        uint64_t begin = r->at > low ? r->at : low, end = r->at + r->count < high ? r->at + r->count : high;
        if (begin < end) {
            layout_range part = {.first = r->first + (begin - r->at), .count = end - begin};
            status =
                load_range((char *)to + (begin - low) * element, scratch, &t->members[i], &part, load, err);
        }
    }
    return status;
}

ckd_status rank_flat_requests(ckd_load_request **requests, size_t *count, const rank_tensor *t,
                              ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < t->member_count && status == CKD_OK; i++) {
        const rank_tensor *m = &t->members[i];
        const layout_range *r = &t->ranges[i];
        if (r->count && is_whole(m)) {
            ckd_load_request request = request_of(m, r->first, r->count);
            status = rank_add_request(requests, count, &request, err);
            continue;
        }
        for (uint64_t done = 0, n; done < r->count && status == CKD_OK; done += n) {
            ckd_region box;
            n = layout_next_box(&box, m->share.ndim, m->share.lengths, r->first + done, r->count - done);
            status = rank_tensor_box_requests(requests, count, m, &box, err);
        }
    }
    return status;
}
