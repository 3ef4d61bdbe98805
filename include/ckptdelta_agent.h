/*
 * ckptdelta, an agent that keeps the newest states of a node's trainers in its own memory. Part of ckptdelta.h, which
 * includes it; the same conventions hold.
 *
 * With ckd_session_options.agent, a session copies states into memory that the agent provides. The agent turns them
 * into checkpoints. When the trainer is killed, its newest complete state is still there. The agent makes it durable at
 * once, and a restarted trainer takes it from memory. docs/agent.md says how to run one.
 */
#ifndef CKPTDELTA_AGENT_H
#define CKPTDELTA_AGENT_H

#include "ckptdelta.h"

#ifdef __cplusplus
extern "C" {
#endif

/*
 * Pages of the memory for states. Huge pages, of 2 MiB on most machines, take fewer faults and less of the processor's
 * address cache. The pool is the system's, reserved by an administrator (vm.nr_hugepages).
 */
typedef enum ckd_huge_pages {
    CKD_HUGE_PAGES_OFF = 0, /* ordinary pages */
    CKD_HUGE_PAGES_TRY =
        1, /* from the pool; where it has too few, the kernel joins ordinary pages as far as it can */
    CKD_HUGE_PAGES_ON = 2 /* from the pool only: a session for whose states it has too few saves by itself */
} ckd_huge_pages;

/* on_message reports what the agent found when it started, and saves that fail. */
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
    /*
     * Nodes that keep copies of each other's states in memory, this node included; NULL: none. Either a list
     * HOST:PORT,HOST:PORT,..., or the path of a file with a line `HOST:PORT [domain=NAME]` for each node. docs/agent.md
     * explains their use.
     */
    const char *peers;
    const char *self; /* this node's HOST:PORT in the list; NULL: the one whose address this machine has */
    const char
        *secret; /* with peers: path of a file of mode 0600, with the same 16 to 256 bytes on all nodes */
    uint32_t replicate; /* number of other nodes that keep a copy; 0: 1 */
    /* folder in memory for the files; NULL: one in /dev/shm whose name depends on the socket's path */
    const char *copies;
    uint64_t
        copies_bytes; /* for files of this node's states, and as much for other nodes'; 0: memory_bytes / 2 */
    uint64_t send_bytes_per_s; /* to all peers together; 0: no limit */
    double silence_s;          /* a peer is gone after this many seconds without a sign of life; 0: 5 */
    /*
     * With peers, while all copies are in place: a state is stored only if it is this many seconds newer than the last
     * stored one, or if its session ends. 0: every state is stored.
     */
    double store_every_s;
    /*
     * Instead of whole copies: groups of parity_data + parity nodes keep parity of each other's states, so that any
     * `parity` nodes of a group can be lost. On each node the parity takes parity / parity_data of the memory of its
     * own files. 0 and 0: whole copies. All agents need the same values. More than one node of parity needs ISA-L.
     */
    uint32_t parity_data, parity;
    /*
     * Absolute path of a folder on a disk of this node: the newest states are copied there, too, and outlive the agent
     * and a restart of the node. Several stores may share it, several agents of one store not. NULL: none. Without
     * peers, the states in question for store_every_s are those that this disk has.
     */
    const char *local;
    double local_every_s; /* with peers: this many seconds between copies there; 0: every state */
    ckd_huge_pages huge_pages;
} ckd_agent_options;
#define CKD_AGENT_OPTIONS_INIT \
    { .struct_size = sizeof(ckd_agent_options) }

/*
 * Runs the agent of a store until it gets a request to stop. Creates the store if there is none. Sessions that are
 * still connected at the end continue without an agent. Errors: BUSY (the store has an agent), NOMEM
 * (CKD_HUGE_PAGES_ON, and the pool is empty), those of ckd_store_open; after a stop: those of a state that could not be
 * made durable and is lost.
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
    char trouble[256];    /* of the last save if it failed; "" after a success */
    uint64_t copied_step; /* complete in the memory of other nodes; CKD_LATEST: none */
    uint64_t local_step;  /* on the local disk; CKD_LATEST: none */
} ckd_agent_session;

/* Another node. */
typedef struct ckd_agent_peer {
    char name[129]; /* HOST:PORT */
    char domain[64];
    int alive;
    int partner;         /* keeps copies of this node's states */
    uint64_t behind;     /* saves, and removals of old states, that have not reached a partner yet */
    uint64_t sent_bytes; /* to this peer, since the agent began */
    char trouble[256];   /* why it is not alive, or why copies do not reach it; else "" */
} ckd_agent_peer;

typedef struct ckd_agent_state {
    int64_t process;
    uint64_t memory_bytes, budget_bytes;
    uint64_t since_ns; /* when it began; ns since 1970 */
    size_t count;
    ckd_agent_session *sessions;
    size_t peer_count; /* 0: the agent has none */
    ckd_agent_peer *peers;
    uint32_t replicate, replicated; /* copies wanted, and partners that have all of this node's states */
    uint64_t own_bytes, held_bytes; /* in files: of this node's states, and of other nodes' */
    uint64_t kept,
        kept_bytes; /* states written to such files since the agent began, and the bytes of their tensors */
    /* lines about the states that other nodes had for a restart, and what was done with them; "" if none */
    const char *decisions;
    /* The parity group, which may be larger than wanted; 0: whole copies. All its other nodes count as partners. */
    uint32_t parity_data, parity;
    /* The folder on the local disk, or "", and the bytes of its files; one that two snapshots share counts twice. */
    char local[512];
    uint64_t local_bytes;
    uint64_t local_written_bytes; /* since the agent began */
    uint64_t local_behind;        /* saves, and removals of old states, that the disk has not got yet */
    char local_trouble[256];      /* why copies do not reach the disk; "" if all is well */
    ckd_huge_pages huge_pages;
    uint64_t huge_bytes; /* how much of memory_bytes is huge pages */
} ckd_agent_state;

/*
 * Asks the agent of a store for its state. socket may be NULL. Errors: NOT_FOUND (no agent), UNSUPPORTED (another
 * version), IO.
 */
CKD_API ckd_status ckd_agent_ask(ckd_agent_state **out, const char *store, const char *socket,
                                 ckd_error *err);
CKD_API void ckd_agent_state_free(ckd_agent_state *state);
/*
 * Waits until the states that killed trainers of a run left in the agent's memory are durable. A session does this when
 * it is opened. Each of several ranks calls it, for the agent of its node, and none looks for its checkpoint before
 * all calls have returned. socket: NULL or "auto" for the usual place. Errors: as for ckd_agent_ask; BUSY (a state
 * cannot be made durable at present).
 */
CKD_API ckd_status ckd_agent_settle(const char *store, const char *socket, const char *run, ckd_error *err);
/*
 * Waits until every complete state in the agent's memory is durable, and the memory of dead trainers is free. stop:
 * then ends the agent. Errors: those of ckd_agent_ask; those of a state that cannot be made durable. Such a state stays
 * in memory, and the agent does not end.
 */
CKD_API ckd_status ckd_agent_drain(const char *store, const char *socket, int stop, ckd_error *err);

#ifdef __cplusplus
}
#endif

#endif
