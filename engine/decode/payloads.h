/*
 * Payloads of a load that are in memory: received from other ranks, or read for them. A decoder takes them from here
 * instead of the files. Internal to engine/. Decoders only read; nothing is added or dropped while one of them runs.
 */
#ifndef ENGINE_PAYLOADS_H
#define ENGINE_PAYLOADS_H

#include "engine/decode/load_plan.h"

typedef struct payloads {
    const load_plan *plan;
    void **data;  /* indexed by node of the plan; NULL: not here */
    size_t *held; /* nodes whose payloads are here */
    size_t held_count;
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
void payloads_settle(payloads *p, uint64_t done, uint64_t max);

#endif
