/* One rank's part of a collective load. Internal to engine/: collective_load.c, collective_rounds.c. */
#ifndef ENGINE_RANKS_COLLECTIVE_LOAD_H
#define ENGINE_RANKS_COLLECTIVE_LOAD_H

#include "engine/load/load.h"
#include "engine/ranks/collective.h"

/* The request for one tensor, and the turns of its blocks, in ascending order. */
typedef struct scheduled_task {
    load_task task;
    uint32_t *turns;
} scheduled_task;

/* A payload that other ranks need, too. */
typedef struct send_entry {
    uint64_t position;
    hash128 id;
    size_t node;
    uint32_t receiver_count; /* 0: another rank reads it and sends it here */
    size_t receivers;        /* index of the first in collective_load.receivers */
} send_entry;

typedef struct collective_load {
    ckd_load *load;
    collective ranks;
    load_plan *plan;
    payloads payloads;
    scheduled_task *tasks;
    size_t task_count;
    send_entry *send_entries; /* by position; those before `next` were exchanged */
    size_t send_count, next;
    uint32_t *receivers;
    uint64_t seen_by_one;             /* how many payloads of all ranks one directory rank handles */
    uint64_t round_bytes, held_bytes; /* byte limits: of a round, and of payloads held between rounds */
} collective_load;

/*
 * Exchanges and decodes until all ranks are done. Collective. status, why: this rank's state so far. Errors: those of
 * any rank, the same on all; the transport's.
 */
ckd_status rounds_run(collective_load *j, ckd_status status, ckd_error *why, ckd_error *err);

/* The requests of one rank, as in ckd_load_all_together. */
typedef struct collective_request {
    const ckd_load_request *items;
    size_t count;
    unsigned allowed;
    uint64_t
        seen_by_one; /* how many payloads of all ranks one directory rank handles and assigns, at least 1 */
} collective_request;
/* Implements ckd_load_all_together. */
ckd_status collective_load_run(ckd_load *load, const ckd_transport *transport, const collective_request *q,
                               ckd_error *err);

#endif
