/*
 * The interface of engine/slots/ for other rooms: memory that a session shares with an agent, and what they say to each
 * other. README.md has an overview.
 */
#ifndef ENGINE_SLOTS_SLOTS_H
#define ENGINE_SLOTS_SLOTS_H

#include <stdatomic.h>
#include <stdbool.h>

#include "base/bytes.h"
#include "base/local_socket.h"
#include "base/shared_memory.h"
#include "engine/store/store.h"
#include "include/ckptdelta.h"
#include "include/ckptdelta_agent.h"

#define SLOTS_MAX      3                   /* good, previous, being written */
#define SLOT_PAGE      (UINT64_C(1) << 20) /* bytes that share a hash */
#define SLOT_PROTOCOL  5
#define SLOT_BYTES_MAX (UINT64_C(1) << 50)
#define SLOT_ITEMS_MAX (1u << 22)

/* ---- layout.c: what a slot holds, and where ---- */

typedef struct slot_item {
    ckd_tensor tensor; /* without data; of bytes, only the name */
    uint64_t bytes;
    bool is_bytes;
    uint64_t place; /* in the slot's data */
    uint64_t page;  /* number of its first page */
} slot_item;

/* The same items in the same order give the same layout in every process. */
typedef struct slot_layout {
    bytes encoded; /* as it is sent; the items' names and shapes are in it */
    slot_item *items;
    size_t count;
    uint64_t pages, data_bytes;
    uint64_t optimizers_at, hashes_at, data_at, size; /* in the slot's memory */
} slot_layout;

/* Encodes items, of which tensor, bytes and is_bytes are set. Errors: NOMEM. */
ckd_status slot_layout_make(slot_layout *out, const slot_item *items, size_t count, ckd_error *err);
/*
 * Decodes a layout that another process has encoded, and trusts none of it. Empties `encoded`. Errors: INVALID, NOMEM.
 */
ckd_status slot_layout_read(slot_layout *out, bytes *encoded, ckd_error *err);
bool slot_layout_equal(const slot_layout *a, const slot_layout *b);
/*
 * Returns the item with the tensor's name, region, shape and dtype, or these bytes; NULL: there is none. hint: where to
 * look first.
 */
const slot_item *slot_layout_find(const slot_layout *l, const slot_item *wanted, size_t hint);
void slot_layout_free(slot_layout *l);

/* ---- slot.c: the memory of a slot ---- */

/* The arguments for saving a slot. The session writes them; the agent checks a copy before it uses them. */
typedef struct slot_request {
    ckd_save_options options; /* its pointers mean nothing in another process; the strings are below */
    char run[CKD_RUN_MAX + 1], parent_run[CKD_RUN_MAX + 1], resumed_run[CKD_RUN_MAX + 1], metric_name[32];
    uint8_t has_parent, has_resumed, has_metric;
    uint8_t one_step; /* the state is one step after its parent, so the optimizers can predict it */
    uint8_t launch_has_last, launch_own;
    char launch_run[CKD_RUN_MAX + 1];
    ckd_id launch_last, launch_tried;
    uint64_t launch_step;
    uint64_t newest_ns; /* the latest date in the run and its branches at that time; 0: not known */
    uint64_t begun_ns, copied_ns, stall_ns; /* of the snapshot, on this machine's monotonic clock */
} slot_request;

typedef struct shared_slot {
    shared_memory memory;
    const slot_layout *layout;
} shared_slot;

/* Called by the writer: the values may change from now on, and the slot is no longer good. */
void slot_begin(shared_slot *s);
/*
 * Called by the writer: the values are complete. optimizers: by item; NULL: none. A single memory store makes the slot
 * good.
 */
void slot_publish(shared_slot *s, const slot_request *request, const ckd_optimizer *optimizers);
/*
 * Called by the writer: while training is busy, copies of its states wait a little. Does not concern the slot itself.
 */
void slot_set_busy(shared_slot *s, bool busy);
bool slot_is_busy(const shared_slot *s);
/*
 * Called by the writer: training went wrong soon after it restored this checkpoint's values from an agent's memory. The
 * next launch must load them instead. Does not concern the slot itself. The mark stays until another checkpoint is
 * named.
 */
void slot_doubt(shared_slot *s, const ckd_id *checkpoint);
bool slot_doubts(const shared_slot *s, const ckd_id *checkpoint);
/* The writer's values of an item. */
uint8_t *slot_data(const shared_slot *s);

/* A good slot as it was when it was read: everything but its values. */
typedef struct slot_content {
    slot_request request;
    ckd_optimizer *optimizers; /* by item */
    uint64_t *hashes;          /* by page */
} slot_content;
/* Errors: NOT_FOUND (it is not good), CORRUPT (its head is damaged), NOMEM. */
ckd_status slot_read(slot_content *out, const shared_slot *s, ckd_error *err);
void slot_content_free(slot_content *c);
/* Compares all values with their hashes. Errors: CORRUPT, naming the tensor. */
ckd_status slot_verify(const shared_slot *s, const slot_content *c, ckd_error *err);
/* Copies an item's values, and compares the hashes of the copy. Errors: CORRUPT. */
ckd_status slot_copy_item(void *to, const shared_slot *s, const slot_content *c, const slot_item *item,
                          ckd_error *err);

/* ---- slot_save.c ---- */
/*
 * Makes a checkpoint of a good slot. Succeeds at once if the store has a checkpoint with its id already. The values are
 * verified after they were read and before the commit. ranks: the slots of a group become one checkpoint; NULL: this
 * slot becomes one. Collective in a group: a rank whose slot is not good calls ranks_agree with its error instead.
 * Errors: CORRUPT (the slot), those of ckd_save_begin to ckd_save_commit, or of ckd_ranks_plan to ckd_ranks_commit.
 */
ckd_status slot_save(ckd_checkpoint *out, ckd_store *store, ckd_ranks *ranks, const shared_slot *s,
                     const slot_content *c, ckd_error *err);

/* Plans a joint save of the slots of a group. The group keeps the plan. Collective. Errors: those of ckd_ranks_plan. */
ckd_status slot_plan(const ckd_plan **out, ckd_ranks *ranks, const shared_slot *s, ckd_error *err);

/* ---- slot_part.c: what one rank has of a state, in a store that only the caller writes to ---- */

/*
 * The peer that connects, or the owner of a part. run "": somebody who asks something. world 0: a session of one
 * process.
 */
typedef struct slot_peer {
    const char *run;
    uint32_t rank, world;
} slot_peer;

typedef struct slot_part {
    const shared_slot *slot;
    const slot_content *content;
    const ckd_plan
        *plan; /* of all ranks: a part has the values that its rank writes; all parts together are a state */
    slot_peer who; /* its run is not used */
    bool base;     /* an exact copy depends on no other checkpoint */
} slot_part;
/*
 * Makes a checkpoint of a good slot in a store that only the caller writes to. It has the id and the fidelity of the
 * slot. Its parent is the newest checkpoint there before its step, because only the state is copied, not its lineage.
 * Errors: those of slot_save.
 */
ckd_status slot_save_copy(ckd_checkpoint *out, ckd_store *store, const slot_part *p, ckd_error *err);
/* Bytes of its values; without a plan, of the whole slot. */
uint64_t slot_part_bytes(const slot_part *p);
#define SLOT_PART_PREFIX "part." /* of the runs that parts have */
/*
 * The run and the id that a part has in the store. They differ from those of the state, because the store may hold
 * parts of other ranks, too.
 */
void slot_part_run(char out[CKD_RUN_MAX + 1], const char *run, uint32_t rank);
ckd_id slot_part_id(const ckd_id *checkpoint, uint32_t rank);
/*
 * Makes an exact checkpoint of a part. Succeeds at once if the store has it already. out: described as if it were the
 * joint checkpoint. Errors: those of slot_save.
 */
ckd_status slot_part_save(ckd_checkpoint *out, ckd_store *store, const slot_part *p, ckd_error *err);

typedef struct slot_part_info {
    uint32_t rank, world;
    ckd_id checkpoint; /* of all ranks */
    char run[CKD_RUN_MAX + 1];
} slot_part_info;
/*
 * id: the part's. Errors: NOT_FOUND (no part, or no checkpoint), UNSUPPORTED (another version), those of
 * ckd_load_begin.
 */
ckd_status slot_part_describe(slot_part_info *out, ckd_store *store, const ckd_id *id, ckd_error *err);
/*
 * Makes a good slot of a part, in new memory. layout: the slot's; it must not move before slot_part_free. Errors: those
 * of slot_part_describe and ckd_load_tensor, NOMEM.
 */
ckd_status slot_part_load(shared_slot *out, slot_layout *layout, ckd_store *store, const ckd_id *id,
                          ckd_error *err);
void slot_part_free(shared_slot *slot, slot_layout *layout);

/* ---- message.c: what sessions and agents say ---- */

typedef enum slot_message_kind {
    SLOT_HELLO = 1, /* slot_hello; the first message of every connection */
    SLOT_MEMORY, /* u32: number of slots, then a layout; answered with that many descriptors, the oldest state first */
    SLOT_JOIN, /* slot_join, of a session of several ranks that has memory; answered when all ranks have joined */
    SLOT_SAVE,    /* u32: a slot that is good; answered when it is durable. In a group: collective */
    SLOT_RECALL,  /* ckd_id of a checkpoint; answered with the slot that has its values, and the layout */
    SLOT_GOODBYE, /* the session ends; answered when its memory is free */
    SLOT_STATUS,  /* answered with slot_agent, then sessions, peers and decisions */
    SLOT_DRAIN,   /* u32: 1 to stop then; answered when everything good is durable */
    SLOT_REPLY    /* slot_reply, then what the request asks for */
} slot_message_kind;

typedef struct slot_hello {
    uint32_t protocol, request_bytes;
    char version[16];          /* of the library */
    char run[CKD_RUN_MAX + 1]; /* "": a question, no session */
    uint32_t rank, world;      /* world 0: a session of one process */
} slot_hello;

/* The agents' threads of a session of ranks form a group of their own, which outlives the ranks. */
typedef struct slot_join {
    ckd_id group;
    uint32_t timeout_ms; /* as in ckd_ranks_options */
} slot_join;

typedef struct slot_reply {
    ckd_status status;
    ckd_error error;
    ckd_checkpoint checkpoint;
} slot_reply;

typedef struct slot_agent {
    int64_t process;
    uint64_t memory_bytes, budget_bytes, since_ns;
    uint64_t sessions, peers, decision_bytes; /* of each, how many follow */
    uint32_t replicate, replicated, parity_data, parity;
    uint64_t own_bytes, held_bytes, kept, kept_bytes;
    char local[512], local_trouble[256];
    uint64_t local_bytes, local_written_bytes, local_behind;
} slot_agent;

typedef struct slot_message {
    slot_message_kind kind;
    bytes body;
    int fds[LOCAL_FDS_MAX];
    size_t fd_count;
} slot_message;

/* Sends the body and the descriptors, which stay the caller's. Errors: IO, NOMEM. */
ckd_status slot_message_send(int fd, const slot_message *m, ckd_error *err);
/* Errors: IO (the peer is gone), INVALID (no message of ours), NOMEM. */
ckd_status slot_message_receive(slot_message *out, int fd, ckd_error *err);
/* Closes descriptors that nobody has taken. Accepts a zeroed message. */
void slot_message_free(slot_message *m);
/* Copies the body's first `size` bytes. Errors: INVALID (it is shorter). */
ckd_status slot_message_get(void *to, size_t size, const slot_message *m, ckd_error *err);

/* ---- message.c: the side that asks ---- */

/*
 * Finds where the agent of a store listens. where: NULL or "auto" for the usual place, which depends on the user and on
 * the store's path; or a path. Errors: INVALID, NOT_FOUND (there is no such store), those of local_private_folder.
 */
ckd_status slots_socket_path(char out[LOCAL_PATH_MAX + 1], const char *store, const char *where,
                             ckd_error *err);
/* A connection to an agent. */
typedef struct slot_link {
    int fd;           /* -1: there is none */
    bool broken;      /* an answer did not come, or only in part: nothing but slots_disconnect is allowed */
    uint32_t wait_ms; /* how long the agent may show no sign of life */
    char path[LOCAL_PATH_MAX + 1];
} slot_link;

/* Returns how long to wait. wanted_s 0: the seconds in the environment's CKPTDELTA_AGENT_WAIT, or else 20. */
uint32_t slots_wait_ms(double wanted_s);
/*
 * Connects and says hello. Errors: NOT_FOUND (no agent), UNSUPPORTED, BUSY (it does not
 * answer), the agent's.
 */
ckd_status slots_connect(slot_link *out, const char *path, const slot_peer *peer, uint32_t wait_ms,
                         ckd_error *err);
/*
 * Sends a request and waits for its answer, which the caller frees. reply: the answer's head. An agent that answers
 * others is given all the time it needs. Errors: the agent's, as reply->status; with link->broken: IO (the agent is
 * gone), BUSY (it shows no sign of life).
 */
ckd_status slots_ask(slot_message *answer, slot_reply *reply, slot_link *link, const slot_message *request,
                     ckd_error *err);
void slots_disconnect(slot_link *link);

#endif
