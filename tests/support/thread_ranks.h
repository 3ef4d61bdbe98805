/* Ranks that are threads of this process. The transport between them can fail, and can damage messages. */
#ifndef TESTS_SUPPORT_THREAD_RANKS_H
#define TESTS_SUPPORT_THREAD_RANKS_H

#include <pthread.h>
#include <stdbool.h>

#include "include/ckptdelta.h"

#define THREAD_RANKS_MOST 16

typedef struct thread_ranks thread_ranks;

typedef struct thread_rank {
    thread_ranks *all;
    uint32_t rank;
    ckd_transport transport;
    ckd_status status; /* the result of `act` */
    ckd_error err;
    unsigned long calls; /* calls of the transport */
    pthread_t thread;
} thread_rank;

typedef ckd_status (*thread_rank_fn)(void *context, thread_rank *rank, ckd_error *err);

struct thread_ranks {
    uint32_t world;
    thread_rank ranks[THREAD_RANKS_MOST];
    thread_rank_fn act;
    void *context;
    /*
     * Call number fail_at (from 1; 0: none) of rank fail_rank fails. Then the calls of all other ranks fail,
     * too, as a transport must ensure.
     */
    uint32_t fail_rank;
    unsigned long fail_at;
    /* The seed of flipped bits, one in each damage_every-th message of more than 8 bytes; 0: none. */
    uint64_t damage;
    uint64_t damage_every;
    unsigned long damaged;
    uint64_t most_sent; /* the largest message from one rank to another, in bytes */
    /* private: */
    pthread_mutex_t mutex;
    pthread_cond_t moved;
    uint32_t waiting;
    unsigned long turn;
    bool broken, unequal; /* unequal: the sizes sent and expected differed, or the calls of the ranks did */
    const ckd_buffers *out[THREAD_RANKS_MOST];
    uint64_t number[THREAD_RANKS_MOST];
    int call[THREAD_RANKS_MOST];
};

/*
 * Runs `act` on `world` threads and waits for all of them. Results are in ranks[]. Set the fields before
 * `mutex`, and zero the rest.
 */
void thread_ranks_run(thread_ranks *t, uint32_t world, thread_rank_fn act, void *context);

#endif
