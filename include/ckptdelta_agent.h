/*
 * ckptdelta, an agent that keeps the newest states of a node's trainers in its own memory. Part of ckptdelta.h, which
 * includes it; the same conventions hold.
 *
 * A session that is told to (ckd_session_options.agent) copies states into memory that the agent has made. The agent
 * makes checkpoints of them. When the trainer is killed, its newest complete state is still there: the agent makes it
 * durable at once, and a restarted trainer takes it from memory. docs/agent.md says how to run one.
 */
#ifndef CKPTDELTA_AGENT_H
#define CKPTDELTA_AGENT_H

#include "ckptdelta.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What the agent has to say: what it found when it started, saves that fail. */
typedef struct ckd_agent_options {
    size_t struct_size;
    const char
        *socket; /* absolute path of at most 107 bytes; NULL: the usual place for this store and user */
    uint64_t memory_bytes; /* for states, at most; 0: half of the machine's memory */
    uint32_t threads;      /* of each save; 0: one per core, at most 16 */
    ckd_message_fn on_message;
    void *message_context;
    /* A descriptor that becomes readable when the agent should make everything durable and end; 0: none. */
    int stop_fd;
    /* Called once sessions can connect. NULL: not called. */
    void (*on_ready)(void *context, const char *socket);
    void *ready_context;
} ckd_agent_options;
#define CKD_AGENT_OPTIONS_INIT \
    { .struct_size = sizeof(ckd_agent_options) }

/*
 * Serves as the agent of a store, which it creates if there is none, until it is told to stop. Sessions that are still
 * connected then go on by themselves. Errors: BUSY (the store has an agent), those of ckd_store_open; after a stop:
 * those of a state that could not be made durable and is lost.
 */
CKD_API ckd_status ckd_agent_run(const char *store, const ckd_agent_options *options, ckd_error *err);

/* A session whose states the agent holds. */
typedef struct ckd_agent_session {
    char run[CKD_RUN_MAX + 1];
    uint32_t rank, world; /* world 0: a session of one process */
    int64_t process;      /* 0: not visible to the agent */
    int connected;        /* 0: the trainer has died; its states stay until a restart takes them over */
    uint64_t memory_bytes;
    uint64_t newest_step;  /* complete in memory; CKD_LATEST: none */
    uint64_t durable_step; /* in the store, as far as this agent saved it; CKD_LATEST: none */
    uint64_t saved, failed;
    char trouble[256]; /* of the last save that failed, "" since a later one succeeded */
} ckd_agent_session;

typedef struct ckd_agent_state {
    int64_t process;
    uint64_t memory_bytes, budget_bytes;
    uint64_t since_ns; /* when it began; ns since 1970 */
    size_t count;
    ckd_agent_session *sessions;
} ckd_agent_state;

/* Asks the agent of a store. socket may be NULL. Errors: NOT_FOUND (no agent), UNSUPPORTED (another version), IO. */
CKD_API ckd_status ckd_agent_ask(ckd_agent_state **out, const char *store, const char *socket,
                                 ckd_error *err);
CKD_API void ckd_agent_state_free(ckd_agent_state *state);
/*
 * Returns when what trainers of a run have left in the agent's memory, because they were killed, is durable. A session
 * waits for this when it is opened. socket: NULL or "auto" for the usual place. Errors: as for ckd_agent_ask; BUSY (it
 * cannot be made durable at present).
 */
CKD_API ckd_status ckd_agent_settle(const char *store, const char *socket, const char *run, ckd_error *err);
/*
 * Returns when every complete state in the agent's memory is durable; memory of trainers that have died is then free.
 * stop: the agent has ended, too. Errors: those of ckd_agent_ask; those of a state that cannot be made durable. Then it
 * stays in memory, and the agent does not end.
 */
CKD_API ckd_status ckd_agent_drain(const char *store, const char *socket, int stop, ckd_error *err);

#ifdef __cplusplus
}
#endif

#endif
