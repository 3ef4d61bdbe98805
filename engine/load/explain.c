/*
 * Plans the reads of a load without reading values. The plan has the blocks that intersect, and everything they build
 * on, each once. A depth-first search finds them. Then shares are passed from the requested blocks down to the roots.
 * Each block passes the part of its elements that is needed on to the blocks it builds on.
 */
#include <stdlib.h>

#include "engine/load/load.h"

#define NONE LOAD_NONE

/* ---- nodes and edges ---- */

static ckd_status grow(load_plan *x, ckd_error *err) {
    size_t capacity = x->node_capacity ? 2 * x->node_capacity : 256, size = 2 * capacity;
    load_node *nodes = realloc(x->nodes, capacity * sizeof(*nodes));
    x->nodes = nodes ? nodes : x->nodes;
    size_t *order = realloc(x->order, capacity * sizeof(*order)), *table = malloc(size * sizeof(*table));
    x->order = order ? order : x->order;
    if (!nodes || !order || !table) {
        free(table);
        return err_nomem(err, capacity * sizeof(*nodes), "a load's plan");
    }
    free(x->table);
    x->table = table;
    x->table_size = size;
    x->node_capacity = capacity;
    for (size_t i = 0; i < size; i++) {
        table[i] = NONE;
    }
    for (size_t i = 0; i < x->node_count; i++) {
        table[load_plan_slot(x, nodes[i].record)] = i;
    }
    return CKD_OK;
}

/* *found: the node existed already. */
static ckd_status add_node(size_t *out, bool *found, load_plan *x, const view *v, const view_block *b,
                           ckd_error *err) {
    const record *r = b->materialized ? b->materialized : b->record;
    size_t number = v == x->load->view && b >= v->blocks ? (size_t)(b - v->blocks) : NONE;
    bool own = number < v->block_count && number < LOAD_NO_BLOCK;
    load_node made = {.record = r,
                      .chunk = b->materialized ? b->materialized_chunk : b->chunk,
                      .materialized = b->materialized != NULL,
                      .top = own ? (uint32_t)number : LOAD_NO_BLOCK,
                      .request = x->request,
                      .edges = NONE};
    if (x->node_count == x->node_capacity) {
        ckd_status status = grow(x, err);
        if (status != CKD_OK) {
            return status;
        }
    }
    size_t slot = load_plan_slot(x, r);
    *found = x->table[slot] != NONE;
    if (!*found) {
        x->table[slot] = x->node_count;
        x->nodes[x->node_count++] = made;
    }
    *out = x->table[slot];
    return CKD_OK;
}

static ckd_status add_edge(load_plan *x, size_t from, size_t to, double share, ckd_error *err) {
    if (ARRAY_GROW(x->edges, x->edge_capacity, x->edge_count + 1, "a load's plan", err) != CKD_OK) {
        return CKD_E_NOMEM;
    }
    x->edges[x->edge_count] = (load_edge){to, share, x->nodes[from].edges};
    x->nodes[from].edges = x->edge_count++;
    return CKD_OK;
}

static ckd_status record_view(load_plan *x, const view *v, ckd_error *err) {
    for (size_t i = x->view_count; i-- > 0;) {
        if (x->views[i] == v) {
            return CKD_OK;
        }
    }
    if (ARRAY_GROW(x->views, x->view_capacity, x->view_count + 1, "a load's plan", err) != CKD_OK) {
        return CKD_E_NOMEM;
    }
    x->views[x->view_count++] = v;
    return CKD_OK;
}

/* ---- following dependencies ---- */

static ckd_status visit(size_t *out, load_plan *x, const view *v, const view_block *b, ckd_error *err);

/* A span that a block builds on, or that a request wants (from == NONE). */
typedef struct building {
    load_plan *x;
    const view *view;
    const view_tensor *tensor;
    const region_span *span;
    size_t from;
} building;

static ckd_status build_on(void *context, const view_block *b, ckd_error *err) {
    building *k = context;
    region_span have = {b->record->region, b->record->first, b->record->count};
    const geometry *g = k->tensor->shape;
    uint64_t common = span_equal(&have, k->span, g->ndim) ? have.count : span_common(g, k->span, &have);
    if (common == 0) {
        return CKD_OK;
    }
    size_t to = NONE;
    ckd_status status = visit(&to, k->x, k->view, b, err);
    double share = (double)common / (double)have.count;
    if (status == CKD_OK) {
        k->x->nodes[to].uses++;
    }
    if (status != CKD_OK || k->from != NONE) {
        return status == CKD_OK ? add_edge(k->x, k->from, to, share, err) : status;
    }
    k->x->nodes[to].parts += share;
    k->x->nodes[to].requested = true;
    return CKD_OK;
}

static ckd_status add_dependency(load_plan *x, size_t from, const view *v, const view_block *b,
                                 uint32_t index, ckd_error *err) {
    const dependency *d = &b->record->dependencies[index];
    if (d->kind == DEPENDS_VALUES) {
        view_source s;
        ckd_status status = view_source_of(&s, &x->load->views, v, b, index, err);
        building k = {x, s.view, s.tensor, &s.span, from};
        return status == CKD_OK ? load_each_block(s.tensor, &s.span, build_on, &k, err) : status;
    }
    record_kind kind = d->kind == DEPENDS_SIDE   ? RECORD_SIDE
                       : d->kind == DEPENDS_LINK ? RECORD_LINK
                                                 : RECORD_GROUP;
    if (kind == RECORD_LINK && !id_equal(&d->checkpoint, &v->manifest.checkpoint.id)) {
        ckd_status found = views_within(&v, &x->load->views, v, &d->checkpoint, err);
        if (found != CKD_OK) {
            return found == CKD_E_NOT_FOUND ? CKD_OK : found;
        }
    }
    const view_block *shared = kind == RECORD_LINK ? view_find_link(v, b->record, &d->content)
                                                   : view_find_shared(v, kind, &d->content);
    size_t to;
    ckd_status status =
        shared ? visit(&to, x, v, shared, err) : CKD_OK; /* the load itself will report that it is missing */
    return shared && status == CKD_OK ? add_edge(x, from, to, 1, err) : status;
}

static ckd_status visit(size_t *out, load_plan *x, const view *v, const view_block *b, ckd_error *err) {
    bool found;
    ckd_status status = add_node(out, &found, x, v, b, err);
    if (status != CKD_OK || found) {
        return status;
    }
    if (x->depth >= MAX_DEPTH) {
        return err_corrupt(err, file_path(b->chunk->file), b->record->offset,
                           "the block's chain is too long or contains a cycle");
    }
    status = record_view(x, v, err);
    x->depth++;
    for (uint32_t i = 0; i < b->record->dependency_count && !b->materialized && status == CKD_OK; i++) {
        status = add_dependency(x, *out, v, b, i, err);
    }
    x->depth--;
    x->order[x->ordered++] = *out;
    return status;
}

static ckd_status visit_request(load_plan *x, const ckd_load_request *request, ckd_error *err) {
    ckd_load_request q;
    const view_tensor *t = load_match(&q, x->load, request);
    region_span span;
    ckd_region region;
    if (!t) {
        return CKD_OK;
    }
    ckd_status status = load_span(&span, &region, &q, t, false, err);
    building k = {x, x->load->view, t, &span, NONE};
    THEN(status, load_each_block(t, &span, build_on, &k, err));
    return status == CKD_OK ? CKD_OK : err_in_tensor(err, status, q.name);
}

/* ---- adding up ---- */

/*
 * The fraction of a block that is needed. Requests, and blocks that were cut differently, need different parts, which
 * add up. Blocks that were cut alike need the same part, so only the largest counts.
 */
static double wanted_of(const load_node *n) {
    double fraction = n->parts > n->max ? n->parts : n->max;
    return fraction > 1 ? 1 : fraction;
}

static void hand_on_shares(load_plan *x) {
    for (size_t i = x->ordered; i-- > 0;) {
        const load_node *n = &x->nodes[x->order[i]];
        double fraction = wanted_of(n);
        for (size_t e = n->edges; e != NONE; e = x->edges[e].next) {
            load_node *to = &x->nodes[x->edges[e].to];
            if (x->edges[e].fraction < 1) {
                to->parts += fraction * x->edges[e].fraction;
            } else if (fraction > to->max) {
                to->max = fraction;
            }
        }
    }
}

static void add_reads(ckd_load_reads *to, const load_node *n) {
    const record *r = n->record;
    bool values = r->kind == RECORD_BLOCK || r->kind == RECORD_LINK;
    double fraction = r->kind == RECORD_BLOCK ? wanted_of(n) : 1;
    to->needed_bytes += (uint64_t)((double)r->stored_size * fraction + 0.5);
    to->read_bytes += r->stored_size;
    to->blocks += values;
    to->depth = r->depth > to->depth ? r->depth : to->depth;
}

static void count_raw(ckd_load_explanation *out, const ckd_load *load, const ckd_load_request *requests) {
    for (size_t i = 0; i < out->count; i++) {
        ckd_load_request q;
        const view_tensor *t = load_match(&q, load, &requests[i]);
        uint64_t elements;
        if (t && region_count(&elements, t->shape, &q.region)) {
            out->requests[i].raw_bytes = elements * ckd_dtype_size(t->tensor->dtype);
            out->all.raw_bytes += out->requests[i].raw_bytes;
        }
    }
}

ckd_status load_plan_make(load_plan **out, ckd_load *load, const ckd_load_request *requests, size_t count,
                          ckd_error *err) {
    *out = NULL;
    load_plan *x = calloc(1, sizeof(*x));
    if (!x) {
        return err_nomem(err, sizeof(*x), "a load's plan");
    }
    x->load = load;
    ckd_status status = grow(x, err);
    for (; x->request < count && status == CKD_OK; x->request++) {
        status = visit_request(x, &requests[x->request], err);
    }
    if (status != CKD_OK) {
        load_plan_free(x);
        return status;
    }
    hand_on_shares(x);
    *out = x;
    return CKD_OK;
}

/* ---- announcing ---- */

typedef struct planned_read {
    const file_reader *file;
    file_range range;
} planned_read;

static int by_place(const void *a, const void *b) {
    const planned_read *x = a, *y = b;
    if (x->file != y->file) {
        return (uintptr_t)x->file < (uintptr_t)y->file ? -1 : 1;
    }
    return (x->range.offset > y->range.offset) - (x->range.offset < y->range.offset);
}

void load_plan_announce(const load_plan *plan) {
    planned_read *reads = plan->load->store->mirror ? calloc(plan->node_count + 1, sizeof(*reads)) : NULL;
    file_range *ranges = reads ? calloc(plan->node_count + 1, sizeof(*ranges)) : NULL;
    for (size_t i = 0; ranges && i < plan->node_count; i++) {
        const load_node *n = &plan->nodes[i];
        reads[i] = (planned_read){n->chunk->file, {n->record->payload_offset, n->record->stored_size}};
    }
    if (ranges && plan->node_count > 1) {
        qsort(reads, plan->node_count, sizeof(*reads), by_place);
    }
    for (size_t i = 0, first = 0; ranges && i < plan->node_count; i++) {
        ranges[i - first] = reads[i].range;
        if (i + 1 == plan->node_count || reads[i + 1].file != reads[i].file) {
            file_will_read(reads[i].file, ranges, i + 1 - first);
            first = i + 1;
        }
    }
    free(ranges);
    free(reads);
}

static ckd_status explain(ckd_load_explanation *out, ckd_load *load, const ckd_load_request *requests,
                          ckd_error *err) {
    load_plan *x;
    ckd_status status = load_plan_make(&x, load, requests, out->count, err);
    if (status != CKD_OK) {
        return status;
    }
    for (size_t i = 0; i < x->node_count; i++) {
        add_reads(&out->all, &x->nodes[i]);
        add_reads(&out->requests[x->nodes[i].request], &x->nodes[i]);
    }
    out->checkpoints = x->view_count;
    load_plan_free(x);
    count_raw(out, load, requests);
    load_differences differences = {NULL, 0, 0};
    status = load_find_differences(&differences, load, requests, out->count, 0, err);
    out->differences = differences.items;
    out->difference_count = differences.count;
    return status;
}

ckd_status ckd_load_explain(ckd_load_explanation **out, ckd_load *load, const ckd_load_request *requests,
                            size_t count, ckd_error *err) {
    *out = NULL;
    ckd_status status = load_check_requests(load, requests, count, err);
    if (status != CKD_OK) {
        return status;
    }
    ckd_load_explanation *made = calloc(1, sizeof(*made));
    if (!made) {
        return err_nomem(err, sizeof(*made), "an explanation");
    }
    made->count = count;
    made->requests = calloc(count + 1, sizeof(*made->requests));
    status = made->requests ? explain(made, load, requests, err)
                            : err_nomem(err, count * sizeof(*made->requests), "an explanation");
    if (status != CKD_OK) {
        ckd_load_explanation_free(made);
        return status;
    }
    *out = made;
    return CKD_OK;
}

void ckd_load_explanation_free(ckd_load_explanation *explanation) {
    if (!explanation) {
        return;
    }
    load_differences d = {explanation->differences, explanation->difference_count, 0};
    load_differences_free(&d);
    free(explanation->requests);
    free(explanation);
}
