/*
 * The plan of a load: lookups; the order of its blocks; payloads in memory. Blocks built from each other are decoded
 * together, so that values need not be kept or read again.
 */
#define _GNU_SOURCE /* qsort_r */
#include "engine/decode/load_plan.h"

#include <stdlib.h>

void load_plan_free(load_plan *x) {
    if (!x) {
        return;
    }
    free(x->nodes);
    free(x->edges);
    free(x->order);
    free(x->table);
    free(x->views);
    free(x);
}

size_t load_plan_slot(const load_plan *x, const record *r) {
    size_t at = (size_t)(((uintptr_t)r >> 3) * UINT64_C(0x9e3779b97f4a7c15) >> 17) & (x->table_size - 1);
    while (x->table[at] != LOAD_NONE && x->nodes[x->table[at]].record != r) {
        at = (at + 1) & (x->table_size - 1);
    }
    return at;
}

size_t load_plan_find(const load_plan *plan, const record *r) {
    return plan->table[load_plan_slot(plan, r)];
}

uint32_t load_plan_uses(const load_plan *plan, const record *r) {
    size_t at = load_plan_find(plan, r);
    return at == LOAD_NONE ? 0 : plan->nodes[at].uses;
}

/* ---- order ---- */

/* Disjoint sets of blocks that share a turn: parent[i] is the parent of i in its tree, or i. */
typedef struct groups {
    const load_plan *plan;
    size_t *parent;
    uint64_t *bytes; /* of a tree's root: payload bytes of the whole tree */
} groups;

static size_t root_of(groups *g, size_t node) {
    while (g->parent[node] != node) {
        node = g->parent[node] = g->parent[g->parent[node]];
    }
    return node;
}

/* The smaller index becomes the root, because it is the turn of the tree. */
static void unite(groups *g, size_t a, size_t b, uint64_t max) {
    a = root_of(g, a);
    b = root_of(g, b);
    if (a == b || g->bytes[a] > max || g->bytes[b] > max - g->bytes[a]) {
        return;
    }
    bool first = g->plan->nodes[a].top < g->plan->nodes[b].top;
    size_t root = first ? a : b, child = first ? b : a;
    g->parent[child] = root;
    g->bytes[root] += g->bytes[child];
}

static void unite_all(groups *g, uint64_t max) {
    const load_plan *x = g->plan;
    for (size_t i = 0; i < x->node_count; i++) {
        g->parent[i] = i;
        g->bytes[i] = x->nodes[i].record->stored_size;
    }
    for (size_t i = 0; i < x->node_count; i++) {
        const load_node *n = &x->nodes[i];
        for (size_t e = n->top == LOAD_NO_BLOCK ? LOAD_NONE : n->edges; e != LOAD_NONE;
             e = x->edges[e].next) {
            if (x->nodes[x->edges[e].to].top != LOAD_NO_BLOCK) {
                unite(g, i, x->edges[e].to, max);
            }
        }
    }
}

static void assign_turn(load_node *n, uint32_t first, uint32_t last) {
    n->first = first < n->first ? first : n->first;
    n->last = last > n->last ? last : n->last;
}

ckd_status load_plan_order(load_plan *x, uint64_t max, ckd_error *err) {
    groups g = {x, malloc((x->node_count + 1) * sizeof(*g.parent)),
                malloc((x->node_count + 1) * sizeof(*g.bytes))};
    if (!g.parent || !g.bytes) {
        free(g.parent);
        free(g.bytes);
        return err_nomem(err, x->node_count * sizeof(*g.parent), "a load's order");
    }
    unite_all(&g, max);
    for (size_t i = 0; i < x->node_count; i++) {
        load_node *n = &x->nodes[i];
        n->turn = n->top == LOAD_NO_BLOCK ? LOAD_NO_BLOCK : x->nodes[root_of(&g, i)].top;
        n->first = UINT32_MAX;
        n->last = 0;
        if (n->requested) {
            assign_turn(n, n->turn, n->turn);
        }
    }
    for (size_t i = x->ordered; i-- > 0;) {
        const load_node *n = &x->nodes[x->order[i]];
        for (size_t e = n->edges; e != LOAD_NONE; e = x->edges[e].next) {
            assign_turn(&x->nodes[x->edges[e].to], n->first, n->last);
        }
    }
    free(g.parent);
    free(g.bytes);
    return CKD_OK;
}

/* ---- payloads in memory ---- */

ckd_status payloads_init(payloads *out, const load_plan *plan, ckd_error *err) {
    size_t count = plan->node_count + 1;
    *out = (payloads){.plan = plan,
                      .data = calloc(count, sizeof(*out->data)),
                      .loaded = calloc(count, sizeof(*out->loaded))};
    if (!out->data || !out->loaded) {
        payloads_free(out);
        return err_nomem(err, count * sizeof(*out->data), "a list of payloads");
    }
    return CKD_OK;
}

void payloads_free(payloads *p) {
    for (size_t i = 0; i < p->loaded_count; i++) {
        free(p->data[p->loaded[i]]);
    }
    free(p->data);
    free(p->loaded);
    *p = (payloads){.plan = NULL};
}

const void *payloads_find(const payloads *p, const record *r) {
    size_t node = p ? load_plan_find(p->plan, r) : LOAD_NONE;
    return node == LOAD_NONE ? NULL : p->data[node];
}

void payloads_add(payloads *p, size_t node, void *data) {
    p->data[node] = data;
    p->loaded[p->loaded_count++] = node;
    p->bytes += p->plan->nodes[node].record->stored_size;
}

static int by_last_turn(const void *a, const void *b, void *plan) {
    size_t x = *(const size_t *)a, y = *(const size_t *)b;
    uint32_t of_x = ((const load_plan *)plan)->nodes[x].last, of_y = ((const load_plan *)plan)->nodes[y].last;
    return of_x != of_y ? (of_x < of_y ? -1 : 1) : x < y ? -1 : x > y;
}

void payloads_trim(payloads *p, uint64_t done, uint64_t max) {
    qsort_r(p->loaded, p->loaded_count, sizeof(*p->loaded), by_last_turn, (void *)p->plan);
    size_t kept = 0;
    uint64_t left = max;
    for (size_t i = 0; i < p->loaded_count; i++) {
        size_t node = p->loaded[i];
        uint64_t size = p->plan->nodes[node].record->stored_size;
        if (p->plan->nodes[node].last < done || size > left) {
            free(p->data[node]);
            p->data[node] = NULL;
        } else {
            p->loaded[kept++] = node;
            left -= size;
        }
    }
    p->loaded_count = kept;
    p->bytes = max - left;
}
