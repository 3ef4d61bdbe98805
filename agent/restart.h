/*
 * Queries that agents send each other after a node was lost. Shared by restart.c, which asks, and copies.c, which
 * answers.
 */
#ifndef AGENT_RESTART_H
#define AGENT_RESTART_H

#include "agent/internal.h"

#define FOUND_MAX (64u << 10)
/* This node's files in memory. No set of a peer has this name, or that of a snapshot on a disk. */
#define OWN_SET "own"

enum {
    QUERY_LIST = 1,  /* states of `run` and its branches; run "": of all. set: only of this one; "": of all */
    QUERY_STORE = 2, /* make `checkpoint` of `set` durable */
    QUERY_PART = 3, /* make `checkpoint` durable together with the other ranks' parts, as `rank` of `world` */
    QUERY_CALL = 4  /* `checkpoint` is a group of ranks, which must store their last deferred state */
};

typedef struct query {
    uint8_t kind;
    ckd_id store; /* both agents must serve this store */
    char set[PEER_SET_MAX + 1], run[CKD_RUN_MAX + 1];
    ckd_id checkpoint, group; /* group: of the ranks that store parts */
    uint32_t rank, world;
    uint64_t newest_ns; /* the latest date in the store, as far as the asking agent knows; 0: there is none */
} query;

/* A state that a peer keeps, or a rank's part of one. */
typedef struct found {
    size_t host;
    char set[PEER_SET_MAX + 1], run[CKD_RUN_MAX + 1];
    uint64_t step, created_ns;
    ckd_id checkpoint;    /* for a part: the checkpoint of all ranks */
    uint32_t rank, world; /* world 0: no part */
    bool bad;             /* it is damaged, or otherwise useless */
} found;

/* ---- copies.c ---- */
void query_put(bytes *to, const query *q);
/* Errors: INVALID. */
ckd_status found_get(found *f, reader *from, ckd_error *err);
/* Whether `run` is the wanted run or a branch of it. wanted "": always true. */
bool is_of_run(const char *run, const char *wanted);
/* Opens the store of the agent. The store must exist: no new one is made in an empty mount point. */
ckd_status open_shared(ckd_store **out, const tier *t, ckd_open_mode mode, ckd_error *err);

#endif
