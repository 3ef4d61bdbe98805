/*
 * Payloads of a load that are in memory: what other ranks sent, and what this one read for them. A decoder takes them from here instead of
 * from the files. Internal to engine/. Decoders only look; nothing is added or dropped while any of them is at work.
 */
#ifndef ENGINE_PAYLOADS_H
#define ENGINE_PAYLOADS_H

#include "engine/decode/load_plan.h"

typedef struct payloads {
    const load_plan *plan;
    void **data;  /* by node of the plan; NULL: not here */
    size_t *held; /* the nodes whose payloads are here */
    size_t held_count;
    uint64_t bytes;
} payloads;

/* The plan must outlive it. Errors: NOMEM. */
ckd_status payloads_init(payloads *out, const load_plan *plan, ckd_error *err);
void payloads_free(payloads *p);
/* The record's payload, verified, until it is dropped; NULL: not here. p may be NULL. */
const void *payloads_find(const payloads *p, const record *r);
/* Takes `data` (malloc'ed, of the node's stored size) over. The node has none. */
void payloads_add(payloads *p, size_t node, void *data);
/*
 * Drops what no block of turn `done` or later is made from; and what does not fit into `max` bytes, of that what is needed for the longest
 * time. It is read again then.
 */
void payloads_settle(payloads *p, uint64_t done, uint64_t max);

#endif
