/*
 * Orders the blocks of a plan. Blocks built from each other are decoded together, so that values need not be kept or
 * read again.
 */
#include <stdlib.h>

#include "engine/decode/load_plan.h"

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

/* The smaller index becomes the root, as it is the turn of the tree. */
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
        if (n->asked) {
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
