/*
 * Shared by the files of agent/. README.md has an overview.
 *
 *   agent.c         begins and ends: the socket, the threads
 *   connection.c    a thread for each connection: serves sessions and queries
 *   holding.c       the memory of a session: the budget, and memory that restarts take over
 *   durable.c       saves of states in memory, and of states that a trainer left behind
 *   state_copies.c  copies of a state on other nodes and on the disk
 *   rank_nodes.c    the nodes of ranks: an exchange ends when one of them is gone
 *   record.c        the states that a killed agent held
 *   control.c       the client side: ckd_agent_ask, ckd_agent_drain
 *   tier.c          this node's states as files in memory, which other nodes copy
 *   stripes.c       parity for files of other nodes (parity.h)
 *   pieces.c        this node's files in the parity of others
 *   rebuild.c       computes lost files from parity
 *   mirror.c        updates the copies on other nodes
 *   disk_copies.c   snapshots on a disk of this node
 *   disk_files.c    their files (disk_files.h)
 *   copy_names.c    which files are copied, and in which order
 *   restart.c       asks other nodes for the states of a lost node
 *   copies.c        answers such queries
 */
#ifndef AGENT_INTERNAL_H
#define AGENT_INTERNAL_H

#include <pthread.h>
#include <stdbool.h>
#include <sys/types.h>

#include "base/file.h"
#include "engine/slots/slots.h"
#include "peers/peers.h"

/* The slots of a session, which a restart takes over. */
typedef struct slot_set {
    slot_layout layout;
    shared_slot slots[SLOTS_MAX];
    uint32_t count;
    ckd_id done[SLOTS_MAX];     /* by slot: the checkpoint that was saved, or given up for good */
    uint64_t saved_ns;          /* copied_ns of the last saved state, of this or an earlier trainer */
    uint64_t bytes, huge_bytes; /* huge_bytes: in huge pages */
} slot_set;

/* A session, connected or not. The thread of its connection changes it; others read it under the agent's mutex. */
typedef struct holding {
    struct holding *next;
    slot_set *set;                  /* NULL: the session has no memory yet */
    int fd;                         /* of the connection; -1: it has ended */
    int watch;                      /* of the trainer's process; the holding owns it; -1: not visible */
    bool saving;                    /* a save is in progress */
    bool settled;                   /* the connection has ended, and nothing is left to make durable */
    bool stuck;                     /* the connection has ended; a state cannot be made durable now */
    bool goodbye;                   /* the session was closed, and waits until its states are durable */
    uint32_t dropped;               /* bits of damaged slots that were reported */
    bool uncopied;                  /* reported: its last state could not be copied to other nodes */
    uint32_t deferred;              /* saves since the last one that reached the store */
    ckd_id deferred_id;             /* of ranks: the checkpoint of the last deferred save */
    bool uncertain;                 /* of ranks: others may have deferred its last state; it does not know */
    uint64_t failed_ns;             /* when storing a deferred state last failed; 0: it did not fail */
    uint64_t failed_drain;          /* the number of the last drain that had begun before that attempt */
    ckd_id group;                   /* of ranks: the group of their agents' threads */
    bool due, called;               /* of ranks: its deferred state must be stored; other agents know */
    uint64_t stored_ns;             /* when a state was last stored; 0: never */
    uint64_t stored_date;           /* created_ns of its last stored state */
    uint64_t ended_ns;              /* when the connection ended */
    char saves_to[CKD_RUN_MAX + 1]; /* the run of its newest state: that of the session, or a branch */
    uint32_t rank, world;           /* world 0: no ranks */
    ckd_agent_session shown;
} holding;

/* Another node, as the agent knows it. */
typedef struct tier_peer {
    uint64_t has; /* the version of the tier that it has in full; 0: not known */
    uint64_t sent_bytes;
    uint64_t changes;       /* how often it came or went */
    uint64_t round_changes; /* at the beginning of the mirror's round */
    bool partner, seen;     /* seen: it was alive before */
    bool asked;             /* its copies from this node's last life are in the store, or are useless */
    char trouble[256];
} tier_peer;

typedef struct parity parity; /* parity.h */

/* Paths of copied files, below the folder of a store. */
typedef struct copy_names {
    char **items;
    size_t count, capacity;
} copy_names;

typedef enum disk_state {
    DISK_RESTS,
    DISK_LINKS,  /* a thread links the files of a snapshot, or snapshots are removed */
    DISK_LINKED, /* it is decided whether the snapshot is kept */
    DISK_WRITES
} disk_state;

/* Snapshots of this node's files on a local disk. */
typedef struct local_disk {
    struct tier *tier;
    char folder[512];       /* of this store's snapshots */
    file_lock *lock;        /* of the folder */
    pthread_rwlock_t files; /* exclusive: snapshots are removed */
    pthread_t thread;
    bool running;
    ckd_id group; /* of the ranks whose states it takes; under the agent's mutex */
    /* the snapshot that is taken or written; belongs to the thread that links, then to the disk's */
    copy_names names;
    ckd_checkpoint_list *states;
    /* under the tier's mutex; the disk's thread reads without it what only it changes */
    disk_state state;
    bool forgets;          /* a session was closed: its states need no copies */
    uint64_t number, next; /* of the last snapshot, 0: this life has none yet; and of the next one */
    uint64_t taken,
        version; /* versions of the tier: of the snapshot taken last, of the last one that is durable */
    uint64_t taken_ns, written_bytes;
    char trouble[256]; /* why the last attempt failed; "": it did not */
} local_disk;

/* This node's states as files in memory: a store of its own, which other nodes copy. */
typedef struct tier {
    struct agent *agent;
    peer_hosts hosts;
    peer_secret secret;
    peer_node *node;
    char folder[512], set[PEER_SET_MAX + 1]; /* set: the name of this node's copies */
    file_lock *lock;                         /* of the folder */
    pthread_mutex_t store_mutex, restart_mutex;
    ckd_store *store;
    pthread_mutex_t mutex; /* guards the fields below; taken after the agent's, if both are */
    pthread_cond_t changed;
    /* version: of the files; mirrored: the version with which the mirror's last round began */
    uint64_t version, mirrored;
    uint64_t kept, kept_bytes;
    uint32_t replicated;
    tier_peer *peers;
    parity *parity;   /* NULL: other nodes have whole copies */
    local_disk *disk; /* NULL: none */
    bytes decisions;
    /* when peers were asked for this node's last life, and the pause until they are asked again */
    uint64_t asked_ns, ask_pause_ns;
    int hurries; /* callers that want all states in the store and do not wait for copies */
    bool poor, woken, stopping, mirroring;
    bool tight; /* a partner has no room for two states at once, so all states also go to the store */
    pthread_t mirror;
} tier;

typedef struct agent {
    ckd_agent_options options;
    const char *store;
    ckd_id store_id;
    ckd_id id; /* of this agent, new at each start */
    char socket[LOCAL_PATH_MAX + 1];
    file_lock *lock;
    int listener, stop; /* stop: a notifier */
    ino_t socket_inode; /* 0: there is no socket yet */
    pthread_mutex_t mutex;
    pthread_cond_t changed; /* a holding or `threads` has changed */
    holding *holdings;
    uint64_t used_bytes, since_ns;
    uint32_t threads; /* of connections */
    bool stopping;
    uint32_t drains;     /* in progress */
    uint64_t last_drain; /* number of the last drain */
    tier *tier;          /* NULL: neither other nodes nor a disk */
    /* a message said that sessions of ranks are not copied, because some agent knows no other nodes */
    bool ranks_reported;
    bool huge_reported; /* a message said that ordinary pages are used, too */
} agent;

/* The nodes of a group's ranks; rank_nodes.c. */
typedef struct rank_nodes rank_nodes;

typedef struct connection {
    agent *agent;
    int fd, watch;
    ckd_store *store; /* opened with the first memory */
    ckd_ranks
        *ranks; /* with the threads of the other ranks' connections, here and on other nodes; NULL: none */
    rank_nodes *nodes; /* NULL: not known */
    holding *holding;  /* NULL: a query, or no hello yet */
    bool copying;      /* of ranks: all their agents copy states to other nodes */
    bool on_disk;      /* of ranks: all their agents have a local disk */
    bool storing;      /* a deferred state is being stored */
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
/* Whether one of its slots is good. If none is, its memory can be freed. */
bool holding_has_state(const holding *h);
/* Whether its trainer left a state that this node cannot store alone: it is not durable yet and must be kept. */
bool holding_lacks_parts(const holding *h);
/* Removes a holding and its memory. */
void holding_remove(agent *a, holding *h);
/*
 * Waits until the holdings of this run's dead trainers are settled. Releases the mutex meanwhile. Errors: BUSY (a state
 * of one of them cannot be made durable at present).
 */
ckd_status holdings_await_settled(agent *a, const holding *own, ckd_error *err);
/*
 * Gives the session `count` slots of this layout: those of the same rank of a dead launch, or new ones, which take over
 * the layout. Locks the mutex itself. Errors: NOMEM (the budget), INVALID, those of shared_memory_make.
 */
ckd_status holding_give_memory(agent *a, holding *h, slot_layout *layout, uint32_t count, ckd_error *err);
/*
 * Finds the slot that has this rank's values of a checkpoint, in `own` or among settled holdings; NULL: there is none.
 */
const shared_slot *holdings_find(const agent *a, const holding *own, const ckd_id *checkpoint);
/* Whether a session of this rank marked its slots so that the checkpoint is not restored from memory. */
bool holdings_doubt(const agent *a, const holding *own, const ckd_id *checkpoint);

/* ---- durable.c ---- */
/* Makes one good slot durable. Errors: those of slot_read and slot_save. */
ckd_status holding_save(ckd_checkpoint *out, connection *c, uint32_t slot, ckd_error *err);
/*
 * Makes all good slots durable after the connection has ended. Repeats failed saves until they succeed, or the agent
 * stops. Returns false if a state remains only in memory, here or on other nodes, or if the session has stored none.
 */
bool holding_settle(connection *c);
/* Waits until every complete state is durable. Errors: those of the save that fails. */
ckd_status holdings_drain(agent *a, ckd_error *err);
/*
 * Assembles states that ranks could not store because a node was lost, from the parts on all nodes. Called with the
 * mutex, which is released meanwhile. Errors: BUSY (it may be possible later).
 */
ckd_status holdings_assemble(agent *a, ckd_error *err);

/* Whether any session has a state that was not stored because other nodes have copies of it. */
bool holdings_defer(agent *a);
/* Makes the deferred state of this connection's session durable. Errors: those of the save that fails. */
ckd_status holding_store(connection *c, ckd_error *err);
/* Does the same if it is due. A failure is reported once and shown, and the attempt is repeated. */
void holding_store_if_due(connection *c);

/* ---- state_copies.c ---- */
/* Whether the store has a state of the session that is recent enough, so that the next one can be deferred. */
bool holding_is_recent(const connection *c);
/*
 * Copies the state to other nodes and to the disk. *enough: it need not be stored now. Collective if there are several
 * ranks. Errors: those of slot_plan, on all ranks; the state cannot be saved then.
 */
ckd_status holding_copy(bool *enough, ckd_checkpoint *out, connection *c, const shared_slot *s,
                        const slot_content *content, ckd_error *err);

/* ---- rank_nodes.c ---- */
/*
 * Finds out which rank is on which node. From then on, an exchange of this group ends when the node of a rank that it
 * waits for is gone. *out, which may be NULL, is released with free when the group has been left. Collective. Errors:
 * those of ranks_collect.
 */
ckd_status rank_nodes_watch(rank_nodes **out, tier *t, ckd_ranks *ranks, uint32_t world, ckd_error *err);

/* ---- tier.c ---- */
/* Errors: those of peer_hosts_read, peer_secret_read and peer_node_begin, and of the folder. */
ckd_status tier_open(agent *a, ckd_error *err);
/* durable: the store has all states, so copies on other nodes are removed. */
void tier_close(agent *a, bool durable);
/*
 * Keeps a state, or a rank's part of it (p->plan is set), as files. *version: for tier_await_copies. Errors: NOSPACE
 * (the budget), those of slot_save_copy and slot_part_save.
 */
ckd_status tier_save(ckd_checkpoint *out, uint64_t *version, tier *t, const slot_part *p, ckd_error *err);
/* hurry: begins or ends a period in which no caller waits for copies. */
void tier_hurry(tier *t, bool hurry);
/* Returns how many other nodes are to hold copies or parity of this node's states. */
uint32_t tier_wanted(const tier *t);
/* Whether there are no other nodes. Then the local disk has the copies. */
bool tier_is_alone(const tier *t);
/* Writes the name of the run, in the store in memory, that has a run's files. */
void tier_name_files(char out[CKD_RUN_MAX + 1], const char *run, const slot_peer *who);
/* Writes the name of the set of a node's copies. */
void tier_set_name(char out[PEER_SET_MAX + 1], const char *node);
/* Whether there are fewer copies than wanted. */
bool tier_is_poor(tier *t);
bool tier_is_tight(tier *t);
/* Removes the files of a run, whose states are durable. who: their owner. */
void tier_forget(tier *t, const char *run, const slot_peer *who);
/*
 * Waits until this version was copied, or that was tried: to other nodes, or to the disk if there are none. Returns
 * whether as many copies are in place as wanted.
 */
bool tier_await_copies(tier *t, uint64_t version);
/* Appends a ckd_agent_peer for each peer, and the decisions. */
void tier_describe(slot_agent *about, bytes *out, tier *t);

/* ---- copy_names.c: paths below the store's folder ---- */
#define COPY_FOLDERS 4
extern const char *const copy_folders[COPY_FOLDERS];
void copy_names_free(copy_names *n);
/* Adds the files below `root` in the order in which they must arrive. Errors: IO, NOMEM. */
ckd_status copy_names_read(copy_names *out, const char *root, bool chunk_files, ckd_error *err);
/* The same for this node's store. Chunk files are left out if they have parity. Takes the store's mutex. */
ckd_status copy_names_list(copy_names *out, tier *t, ckd_error *err);
bool copy_names_have(const copy_names *n, const char *name);
bool copy_is_chunk_file(const char *name);

/* ---- disk_copies.c ---- */
/* Makes and locks the folder, if there is to be one. Errors: INVALID, READ_ONLY, BUSY (another agent has it), IO. */
ckd_status disk_copies_open(tier *t, ckd_error *err);
/* Starts its thread. */
ckd_status disk_copies_begin(tier *t, ckd_error *err);
/* After mirror_end. durable: the store has all states, so the snapshots are removed. */
void disk_copies_end(tier *t, bool durable);
/*
 * Whether the disk can take a snapshot for this session: it has written the one before, and no group of other ranks uses
 * it. Without other nodes, waits for that.
 */
bool disk_copies_ready(tier *t, const holding *h);
/* Whether enough time has passed since the last snapshot. */
bool disk_copies_due(tier *t);
/*
 * Takes a snapshot that has this version, unless the thread of another rank has. It is written after disk_copies_decide.
 * A failure is also reported. Errors: BUSY (the last one is being written), those of links.
 */
ckd_status disk_copies_take(tier *t, uint64_t version, ckd_error *err);
/* Whether the snapshot is kept, and written. Ranks keep it only if all have taken theirs. */
void disk_copies_decide(tier *t, bool keep);
/* The states of a session are not needed any more. Accepts a tier without a disk. */
void disk_copies_forget(tier *t);
/* Whether a snapshot with this version is being written. Under the tier's mutex. */
bool disk_copies_lag(const tier *t, uint64_t version);
/* Names the snapshots as sets. Release with free of each and of the array. */
ckd_status disk_copies_sets(char ***out, size_t *count, const tier *t, ckd_error *err);
bool disk_copies_is_set(const char *set);
/* Finds the folder of a snapshot, which stays until disk_copies_release. Errors: NOT_FOUND. */
ckd_status disk_copies_hold(char *path, size_t capacity, tier *t, const char *set, ckd_error *err);
void disk_copies_release(tier *t);
uint64_t disk_copies_bytes(const tier *t);
/* Under the tier's mutex. */
void disk_copies_describe(slot_agent *about, const tier *t);

/* ---- mirror.c ---- */
ckd_status mirror_begin(tier *t, ckd_error *err);
void mirror_end(tier *t);
bool mirror_is_stopping(tier *t);
/* A peer has come or gone. */
void mirror_peer_changed(void *context, size_t host, bool alive, const char *why);

/* ---- pieces.c ---- */
/* Errors: INVALID (fewer nodes than a group needs), UNSUPPORTED (no ISA-L), NOMEM, IO. */
ckd_status parity_begin(tier *t, ckd_error *err);
void parity_end(tier *t);
/*
 * Checks that all nodes of the group are alive, and that each of them has asked the others for copies from its last
 * life. Errors: BUSY, those of peer_ask.
 */
ckd_status parity_check_group(tier *t, ckd_error *err);
/*
 * Records that the new chunk files belong to this step. Called with the store's mutex. A file without a recorded step
 * has parity, too.
 */
void pieces_record_step(tier *t, uint64_t step);
/*
 * Finds this node's new chunk files, and those that it no longer has. Called once in each round of the mirror, so that
 * no file is dropped before all nodes have its replacement.
 */
ckd_status pieces_look(tier *t, ckd_error *err);
/* Notifies nodes that stripes here were removed. Returns true if some nodes could not be notified yet. */
bool pieces_notify(tier *t);
/* Adds the pieces of this node's chunk files to the parity that a node keeps. Called by the mirror. */
ckd_status pieces_add(tier *t, size_t host, ckd_error *err);
/*
 * Drops files that this node no longer has from the parity that a node keeps. Called after the manifests that name them
 * are gone.
 */
ckd_status pieces_drop(tier *t, size_t host, ckd_error *err);
/* Removes unneeded files that no stripe has a piece of. Returns true if unneeded files remain. */
bool pieces_release(tier *t);
/* Tells the nodes that this node no longer needs any of its files. */
void pieces_leave(tier *t);

/* ---- restart.c ---- */
/* Asks the agent of a node, which may be this one. takes_long: as for peer_ask. */
ckd_status restart_ask(bytes *answer, tier *t, size_t host, const bytes *asked, bool takes_long,
                       ckd_error *err);
/*
 * Asks all nodes for states of a run and its branches that are newer than those in the store, and has the newest one
 * made durable. Returns false if a state of several ranks cannot be assembled now, but perhaps later.
 */
bool restart_from_peers(tier *t, const char *run);
/* Whether the store has the state now. */
bool restart_is_stored(tier *t, const ckd_id *id);
/*
 * Does the same for all runs of which this node's last life left copies. Asks the peers that were not asked yet or
 * could not make a state durable. Further calls repeat this, with pauses. A peer's copies are not replaced before that.
 */
void restart_last_life(tier *t);
/* Tells all agents that a group of ranks must store its last deferred state. */
void restart_call_ranks(tier *t, const ckd_id *group);

/* ---- copies.c ---- */
/* Answers the queries of other agents. */
ckd_status restart_answer(void *context, bytes *answer, const bytes *query, ckd_error *err);

/* ---- record.c ---- */
/*
 * Records which states are not durable yet. Under the mutex. A failure is not reported: the record only serves a
 * message.
 */
void record_write(const agent *a);
/* Reports the states that the previous agent lost. */
void record_report(agent *a, ckd_store *store);
void record_remove(const agent *a);

#endif
