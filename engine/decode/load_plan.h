/*
 * Which blocks a load will read, how often it would if it kept none, and when. Internal to engine/: load/explain.c follows blocks to what
 * they build on, load_schedule.c puts that in an order.
 */
#ifndef ENGINE_LOAD_PLAN_H
#define ENGINE_LOAD_PLAN_H

#include "engine/store/view.h"

#define LOAD_NONE SIZE_MAX

typedef struct load_edge {
    size_t to;       /* node */
    double fraction; /* of its elements */
    size_t next;     /* of the same node, or LOAD_NONE */
} load_edge;

#define LOAD_NO_BLOCK UINT32_MAX

typedef struct load_node {
    const record *record; /* what is read: the materialized copy, if there is one */
    const chunk *chunk;   /* that holds it */
    size_t request;       /* the first that needs it */
    double parts,
        max; /* share of its elements that is wanted: sum of parts that differ; most that wants all alike */
    size_t edges;      /* the first, or LOAD_NONE */
    uint32_t uses;     /* by requests and by blocks that build on it */
    uint32_t top;      /* its number among the blocks of the load's own checkpoint, or LOAD_NO_BLOCK */
    bool materialized; /* it is a materialized copy: the load does without if it is damaged */
    bool asked;        /* by a request */
    /* load_plan_order: */
    uint32_t turn;        /* the turn of a block of the load's own checkpoint */
    uint32_t first, last; /* turns of those that are made from it, its own included */
} load_node;

typedef struct load_plan {
    ckd_load *load;
    load_node *nodes;
    load_edge *edges;
    size_t *order; /* nodes, those that others build on first */
    size_t *table; /* nodes by their records, LOAD_NONE where empty; a power of two, at most half full */
    const view **views;
    size_t node_count, node_capacity, edge_count, edge_capacity, ordered, table_size, view_count,
        view_capacity;
    size_t request;
    uint32_t depth; /* of the recursion */
} load_plan;

/* Where the record is in the table, or would be. */
size_t load_plan_slot(const load_plan *plan, const record *r);
/* The record's node, or LOAD_NONE. Any number of threads may ask; also the next. */
size_t load_plan_find(const load_plan *plan, const record *r);
/* How often the plan's requests, and blocks that are decoded for them, use the block. */
uint32_t load_plan_uses(const load_plan *plan, const record *r);
void load_plan_free(load_plan *plan); /* accepts NULL */

/*
 * Gives each block its turn: in the order of the checkpoint's blocks, but those that are made from each other (a weight and its rounded copy,
 * moments and the step they belong to) at once, as long as their payloads take at most `max` bytes. Turns follow from the checkpoint and
 * from what is asked for; ranks that ask for the same things give them the same turns. Errors: NOMEM.
 */
ckd_status load_plan_order(load_plan *plan, uint64_t max, ckd_error *err);

#endif
