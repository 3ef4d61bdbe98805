/*
 * The plan of a load: which blocks it reads, how often each is needed, in what order, and which of their payloads are
 * in memory. Internal to engine/. load/explain.c makes it.
 */
#ifndef ENGINE_LOAD_PLAN_H
#define ENGINE_LOAD_PLAN_H

#include "engine/store/store.h"

#define LOAD_NONE SIZE_MAX

typedef struct load_edge {
    size_t to;       /* node */
    double fraction; /* part of its elements that is needed */
    size_t next;     /* next edge of the same node, or LOAD_NONE */
} load_edge;

#define LOAD_NO_BLOCK UINT32_MAX

typedef struct load_node {
    const record *record; /* the record to read; the materialized copy, if there is one */
    const chunk *chunk;   /* the chunk that holds it */
    size_t request;       /* the first request that needs it */
    /* Fraction of the block's elements needed: `parts` sums over distinct parts, `max` is the largest single part. */
    double parts, max;
    size_t edges;      /* first edge, or LOAD_NONE */
    uint32_t uses;     /* by requests, and by blocks that build on it */
    uint32_t top;      /* its index among the blocks of the loaded checkpoint, or LOAD_NO_BLOCK */
    bool materialized; /* a materialized copy: the load works without it if it is damaged */
    bool requested;    /* a request needs it */
    /* Set by load_plan_order: */
    uint32_t turn;        /* its turn, if the block is in the loaded checkpoint */
    uint32_t first, last; /* turns of the first and the last block built on it, its own included */
} load_node;

typedef struct load_plan {
    ckd_load *load;
    load_node *nodes;
    load_edge *edges;
    size_t *order; /* nodes in topological order; dependents come after the blocks they build on */
    size_t *table; /* hash table of nodes by record; LOAD_NONE: empty; a power of two, at most half full */
    const view **views;
    size_t node_count, node_capacity, edge_count, edge_capacity, ordered, table_size, view_count,
        view_capacity;
    size_t request;
    uint32_t depth; /* current recursion depth */
} load_plan;

/* The table slot of the record, or the empty slot for it. */
size_t load_plan_slot(const load_plan *plan, const record *r);
/* The record's node, or LOAD_NONE. Thread-safe, as is the next. */
size_t load_plan_find(const load_plan *plan, const record *r);
/* How often requests, and blocks decoded for them, use the block. */
uint32_t load_plan_uses(const load_plan *plan, const record *r);
void load_plan_free(load_plan *plan); /* accepts NULL */

/*
 * Assigns turns, in the order of the checkpoint's blocks. Blocks that are built from each other (a weight and its
 * rounded copy, moments and their step) get the same turn while their payloads take at most `max` bytes. Turns depend
 * only on the checkpoint and the requests, so ranks with equal requests agree. Errors: NOMEM.
 */
ckd_status load_plan_order(load_plan *plan, uint64_t max, ckd_error *err);

/*
 * Payloads of a load that are in memory: received from other ranks, or read for them. A decoder takes them from here
 * instead of the files. Decoders only read; nothing is added or dropped while one of them runs.
 */
typedef struct payloads {
    const load_plan *plan;
    void **data;    /* indexed by node of the plan; NULL: not here */
    size_t *loaded; /* nodes whose payloads are here */
    size_t loaded_count;
    uint64_t bytes;
} payloads;

/* The plan must outlive it. Errors: NOMEM. */
ckd_status payloads_init(payloads *out, const load_plan *plan, ckd_error *err);
void payloads_free(payloads *p);
/* The record's verified payload, valid until it is dropped; NULL: not here. p may be NULL. */
const void *payloads_find(const payloads *p, const record *r);
/* Takes ownership of `data` (from malloc, of the node's stored size). The node must have none yet. */
void payloads_add(payloads *p, size_t node, void *data);
/*
 * Drops payloads that no block of turn `done` or later needs. If the rest exceeds `max` bytes, drops those that are
 * needed the longest; they will be read again.
 */
void payloads_trim(payloads *p, uint64_t done, uint64_t max);

#endif
