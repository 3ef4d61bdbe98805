/*
 * Shared by the files of agent/. README.md has an overview.
 *
 *   agent.c       begins and ends: the socket, the threads
 *   connection.c  a thread for each connection: what a session or a question asks for
 *   holding.c     the memory of a session: the budget, restarts that take memory over
 *   durable.c     saves of what is held, and of what a trainer left behind
 *   record.c      what an agent that is killed has held
 *   control.c     the side that asks: ckd_agent_ask, ckd_agent_drain
 */
#ifndef AGENT_INTERNAL_H
#define AGENT_INTERNAL_H

#include <pthread.h>
#include <stdbool.h>

#include "base/file.h"
#include "engine/slots/slots.h"

/* The slots of a session, which a restart takes over. */
typedef struct slot_set {
    slot_layout layout;
    shared_slot slots[SLOTS_MAX];
    uint32_t count;
    ckd_id done[SLOTS_MAX]; /* the id whose save has ended: saved, or given up for good */
    uint64_t saved_ns;      /* when the state was copied that was saved last, by whichever trainer */
    uint64_t bytes;
} slot_set;

/* A session, connected or not. The thread of its connection changes it; others look at it under the agent's mutex. */
typedef struct holding {
    struct holding *next;
    slot_set *set;                  /* NULL: the session has no memory yet */
    int fd;                         /* of the connection; -1: it has ended */
    int watch;                      /* of the trainer's process; the holding owns it; -1: not visible */
    bool saving;                    /* a save is in progress */
    bool settled;                   /* the connection has ended, and nothing is left to make durable */
    bool stuck;                     /* the same, but what is left cannot be made durable at present */
    uint32_t dropped;               /* bits of damaged slots that were reported */
    uint64_t ended_ns;              /* when the connection ended */
    char saves_to[CKD_RUN_MAX + 1]; /* the run of its newest state: that of the session, or a branch */
    uint32_t rank, world;           /* world 0: no ranks */
    ckd_agent_session shown;
} holding;

typedef struct agent {
    ckd_agent_options options;
    const char *store;
    char socket[LOCAL_PATH_MAX + 1];
    file_lock *lock;
    int listener, stop; /* stop: a notifier */
    pthread_mutex_t mutex;
    pthread_cond_t changed; /* of a holding, or of `threads` */
    holding *holdings;
    uint64_t used_bytes, since_ns;
    uint32_t threads; /* of connections */
    bool stopping;
} agent;

typedef struct connection {
    agent *agent;
    int fd, watch;
    ckd_store *store; /* opened with the first memory */
    ckd_ranks
        *ranks; /* with the threads of the other ranks' connections, here and on other nodes; NULL: none */
    holding *holding; /* NULL: a question, or not introduced yet */
} connection;

/* ---- agent.c ---- */
void agent_say(agent *a, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Makes the agent end. The caller does not hold the mutex. */
void agent_stop(agent *a);

/* ---- connection.c ---- */
/* The thread of a connection; frees it. */
void *connection_main(void *context);

/* ---- holding.c: under the agent's mutex unless they say otherwise ---- */
holding *holding_add(agent *a, const slot_hello *hello, int fd, int watch);
/* Is there a slot that is good? If not, its memory is of no use to anybody. */
bool holding_has_state(const holding *h);
/* Removes a holding and its memory. */
void holding_remove(agent *a, holding *h);
/*
 * Waits until the trainers of this run that have died are settled. Releases the mutex meanwhile. Errors: BUSY (what one
 * has left cannot be made durable at present).
 */
ckd_status holdings_settle(agent *a, const holding *own, ckd_error *err);
/*
 * Gives the session `count` slots for the layout, which it takes: those of the same rank of a dead launch, or new ones. Takes
 * the mutex itself. Errors: NOMEM (the budget), INVALID, those of shared_memory_make.
 */
ckd_status holding_give_memory(agent *a, holding *h, slot_layout *layout, uint32_t count, ckd_error *err);
/*
 * Finds the slot that has this rank's values of a checkpoint, in `own` or among settled holdings; NULL: there is none.
 */
const shared_slot *holdings_find(const agent *a, const holding *own, const ckd_id *checkpoint);

/* ---- durable.c ---- */
/* Makes one good slot durable. Errors: those of slot_read and slot_save. */
ckd_status holding_save(ckd_checkpoint *out, connection *c, uint32_t slot, ckd_error *err);
/* Makes everything good durable after the connection has ended. Repeats what fails until it succeeds or the agent stops. */
void holding_settle(connection *c);
/* Waits until nothing that is complete is only in memory. Errors: those of the save that fails. */
ckd_status holdings_drain(agent *a, ckd_error *err);

/* ---- record.c ---- */
/* Writes down what is not durable yet. Under the mutex. A failure is not reported: the record is a courtesy. */
void record_write(const agent *a);
/* Says what the agent before this one has lost. */
void record_report(agent *a, ckd_store *store);
void record_remove(const agent *a);

#endif
