/* One rank's part of a collective load. Internal to engine/: collective_load.c, collective_rounds.c. */
#ifndef ENGINE_RANKS_COLLECTIVE_LOAD_H
#define ENGINE_RANKS_COLLECTIVE_LOAD_H

#include "engine/load/load.h"
#include "engine/ranks/collective.h"

typedef struct scheduled_block {
    uint32_t turn;
    const view_block *block;
} scheduled_block;

/* The request for one tensor. `blocks` is ordered by turn; the first `done` of them are decoded. */
typedef struct asked_part {
    const view_tensor *tensor;
    span want;
    ckd_region region;        /* the span's */
    void *to;                 /* in host memory; NULL: its blocks are decoded on the device */
    const ckd_device *device; /* final destination; NULL: `to` */
    void *on_device;
    scheduled_block *blocks;
    size_t count, capacity, done;
    uint64_t copied;
} asked_part;

/* Allocates host memory for the whole part, which is finally copied to its device. Errors: NOMEM. */
ckd_status asked_part_on_host(asked_part *p, ckd_error *err);

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
    payloads at_hand;
    asked_part *parts;
    size_t part_count;
    const view_block **scratch; /* as many as the largest part has */
    send_entry *send_entries;   /* by position; those before `next` were exchanged */
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

/*
 * Implements ckd_load_all_together. seen_by_one: how many payloads of all ranks one directory rank handles and assigns,
 * at least 1.
 */
ckd_status collective_load_run(ckd_load *load, const ckd_transport *transport,
                               const ckd_load_request *requests, size_t count, unsigned allowed,
                               uint64_t seen_by_one, ckd_error *err);

#endif
