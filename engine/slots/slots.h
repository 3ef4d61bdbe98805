/*
 * The interface of engine/slots/ for other rooms: memory that a session shares with an agent, and their messages.
 * README.md has an overview.
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

#define SLOTS_MAX      3                   /* the good one, the previous one, and the one being written */
#define SLOT_PAGE      (UINT64_C(1) << 20) /* bytes that share a hash */
#define SLOT_PROTOCOL  6
#define SLOT_BYTES_MAX (UINT64_C(1) << 50)
#define SLOT_ITEMS_MAX (1u << 22)

/* ---- layout.c: what a slot holds, and where ---- */

typedef struct slot_item {
    ckd_tensor tensor; /* without data; for bytes, only the name is set */
    uint64_t bytes;
    bool is_bytes;
    uint64_t place; /* offset in slot_data */
    uint64_t page;  /* number of its first page */
} slot_item;

/* The same items in the same order give the same layout in every process. */
typedef struct slot_layout {
    bytes encoded; /* as it is sent; names and shapes of the items point into it */
    slot_item *items;
    size_t count;
    uint64_t pages, data_bytes;
    uint64_t optimizers_at, hashes_at, data_at, size; /* offsets in the slot's memory */
} slot_layout;

/* Encodes items, in which tensor, bytes and is_bytes are set. Errors: NOMEM, INVALID (too large). */
ckd_status slot_layout_make(slot_layout *out, const slot_item *items, size_t count, ckd_error *err);
/* Decodes a layout that another process has encoded, without trusting it. Empties `encoded`. Errors: INVALID, NOMEM. */
ckd_status slot_layout_read(slot_layout *out, bytes *encoded, ckd_error *err);
bool slot_layout_equal(const slot_layout *a, const slot_layout *b);
/*
 * Returns the item with the name, region, shape and dtype of a tensor, or with the name and size of bytes; NULL: there
 * is none. hint: the index to try first.
 */
const slot_item *slot_layout_find(const slot_layout *l, const slot_item *wanted, size_t hint);
void slot_layout_free(slot_layout *l);

/* ---- slot.c: the memory of a slot ---- */

/* The arguments for saving a slot. The session writes them; the agent checks a copy before it uses them. */
typedef struct slot_request {
    ckd_save_options options; /* its pointers are invalid in another process; the strings are below */
    char run[CKD_RUN_MAX + 1], parent_run[CKD_RUN_MAX + 1], resumed_run[CKD_RUN_MAX + 1], metric_name[32];
    uint8_t has_parent, has_resumed, has_metric;
    uint8_t one_step; /* the state is one step after its parent, so that optimizer steps can predict it */
    uint8_t launch_has_last, launch_own;
    char launch_run[CKD_RUN_MAX + 1];
    ckd_id launch_last, launch_tried;
    uint64_t launch_step;
    uint64_t newest_ns; /* the latest date in the run and its branches at that time; 0: unknown */
    uint64_t begun_ns, copied_ns, stall_ns; /* of the snapshot, on this machine's monotonic clock */
} slot_request;

typedef struct shared_slot {
    shared_memory memory;
    const slot_layout *layout;
} shared_slot;

/* Called by the writer before it changes the values: the slot is no longer good. */
void slot_begin(shared_slot *s);
/*
 * Called by the writer when the values are complete. optimizers: by item; NULL: none. A single atomic store makes the
 * slot good.
 */
void slot_publish(shared_slot *s, const slot_request *request, const ckd_optimizer *optimizers);
/*
 * Called by the writer: while training is busy, copies of its states pause a little. The slot itself does not change.
 */
void slot_set_busy(shared_slot *s, bool busy);
bool slot_is_busy(const shared_slot *s);
/*
 * Called by the writer: training went wrong soon after it restored the values of this checkpoint from the memory of an
 * agent. The next launch must load them from the store. The slot itself does not change. The mark stays until another
 * checkpoint gets it.
 */
void slot_doubt(shared_slot *s, const ckd_id *checkpoint);
bool slot_doubts(const shared_slot *s, const ckd_id *checkpoint);
/* Returns the values of all items; each is at its `place`. */
uint8_t *slot_data(const shared_slot *s);

/* Everything in a good slot but its values, as it was when it was read. */
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
/* Copies the values of an item, and compares the copy with its hashes. Errors: CORRUPT. */
ckd_status slot_copy_item(void *to, const shared_slot *s, const slot_content *c, const slot_item *item,
                          ckd_error *err);

/* ---- slot_save.c ---- */
/*
 * Makes a checkpoint of a good slot. Succeeds at once if the store has the checkpoint already. The values are verified
 * after they were read and before the commit. ranks: a group whose slots become one checkpoint; NULL: this slot alone
 * becomes one. Collective in a group: a rank whose slot is not good calls ranks_agree with its error instead. Errors:
 * CORRUPT (the slot), those of ckd_save_begin to ckd_save_commit, or of ckd_ranks_plan to ckd_ranks_commit.
 */
ckd_status slot_save(ckd_checkpoint *out, ckd_store *store, ckd_ranks *ranks, const shared_slot *s,
                     const slot_content *c, ckd_error *err);

/* Plans a joint save of the slots of a group. The group keeps the plan. Collective. Errors: those of ckd_ranks_plan. */
ckd_status slot_plan(const ckd_plan **out, ckd_ranks *ranks, const shared_slot *s, ckd_error *err);

/* ---- slot_part.c: one rank's part of a state, in a store that only the caller writes to ---- */

/*
 * The peer that connects, or the owner of a part. run "": a client that only asks. world 0: a session of one process.
 */
typedef struct slot_peer {
    const char *run;
    uint32_t rank, world;
} slot_peer;

typedef struct slot_part {
    const shared_slot *slot;
    const slot_content *content;
    const ckd_plan
        *plan;     /* of all ranks: a part has the values that its rank writes; all parts are a state */
    slot_peer who; /* its run is not used */
    bool base;     /* an exact copy is stored as a base */
    double max_load_cost; /* of the copy: as in ckd_save_options */
} slot_part;
/*
 * Makes a checkpoint of a good slot in a store that only the caller writes to. It has the id and the fidelity of the
 * slot. Only the state is copied, not its lineage: the parent of the copy is the newest checkpoint there before its
 * step. Errors: those of slot_save.
 */
ckd_status slot_save_copy(ckd_checkpoint *out, ckd_store *store, const slot_part *p, ckd_error *err);
/* Returns the bytes of the part's values; without a plan, of the whole slot. */
uint64_t slot_part_bytes(const slot_part *p);
#define SLOT_PART_PREFIX "part." /* of the names of runs of parts */
/*
 * The run and the id of a part in the store. They differ from those of the state, because the store may also hold the
 * parts of other ranks.
 */
void slot_part_run(char out[CKD_RUN_MAX + 1], const char *run, uint32_t rank);
ckd_id slot_part_id(const ckd_id *checkpoint, uint32_t rank);
/*
 * Makes an exact checkpoint of a part. Succeeds at once if the store has it already. *out has the id and the run of the
 * joint checkpoint. Errors: those of slot_save.
 */
ckd_status slot_part_save(ckd_checkpoint *out, ckd_store *store, const slot_part *p, ckd_error *err);

typedef struct slot_part_info {
    uint32_t rank, world;
    ckd_id checkpoint; /* of all ranks */
    char run[CKD_RUN_MAX + 1];
} slot_part_info;
/*
 * id: of the part. Errors: NOT_FOUND (no such checkpoint, or it is no part), UNSUPPORTED (another version), those of
 * ckd_load_begin.
 */
ckd_status slot_part_describe(slot_part_info *out, ckd_store *store, const ckd_id *id, ckd_error *err);
/*
 * Makes a good slot from a part, in new memory. layout: the layout of the slot, which must not move before
 * slot_part_free. Errors: those of slot_part_describe and ckd_load_tensor, NOMEM.
 */
ckd_status slot_part_load(shared_slot *out, slot_layout *layout, ckd_store *store, const ckd_id *id,
                          ckd_error *err);
void slot_part_free(shared_slot *slot, slot_layout *layout);

/* ---- message.c: messages between sessions and agents ---- */

typedef enum slot_message_kind {
    SLOT_HELLO = 1, /* slot_hello; the first message of every connection */
    SLOT_MEMORY, /* u32: number of slots, then a layout; answered with as many descriptors, the oldest state first */
    SLOT_JOIN,    /* slot_join, from a session of several ranks with memory; answered when all have joined */
    SLOT_SAVE,    /* u32: index of a good slot; answered when its state is durable. In a group: collective */
    SLOT_RECALL,  /* ckd_id of a checkpoint; answered with the slot that has its values, and the layout */
    SLOT_GOODBYE, /* the session ends; answered when its memory is free */
    SLOT_STATUS,  /* answered with slot_agent, then sessions, peers and decisions */
    SLOT_DRAIN,   /* u32: 1 if the agent then stops; answered when all good slots are durable */
    SLOT_REPLY    /* slot_reply, then the answer to the request */
} slot_message_kind;

typedef struct slot_hello {
    uint32_t protocol, request_bytes;
    char version[16];          /* of the library */
    char run[CKD_RUN_MAX + 1]; /* "": a client that only asks */
    uint32_t rank, world;      /* world 0: a session of one process */
} slot_hello;

/* In a session of ranks, the threads of the agents form a group of their own, which outlives the ranks. */
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
    uint64_t sessions, peers, decision_bytes; /* how many of each follow */
    uint32_t replicate, replicated, parity_data, parity;
    uint64_t own_bytes, held_bytes, kept, kept_bytes;
    char local[512], local_trouble[256];
    uint64_t local_bytes, local_written_bytes, local_behind;
    uint64_t huge_pages, huge_bytes;
} slot_agent;

typedef struct slot_message {
    slot_message_kind kind;
    bytes body;
    int fds[LOCAL_FDS_MAX];
    size_t fd_count;
} slot_message;

/* Sends the body and the descriptors, which the caller keeps. Errors: IO, NOMEM. */
ckd_status slot_message_send(int fd, const slot_message *m, ckd_error *err);
/* Errors: IO (the peer is gone), INVALID (not a message of this protocol), NOMEM. */
ckd_status slot_message_receive(slot_message *out, int fd, ckd_error *err);
/* Closes descriptors that the caller has not taken. Accepts a zeroed message. */
void slot_message_free(slot_message *m);
/* Copies the body's first `size` bytes. Errors: INVALID (it is shorter). */
ckd_status slot_message_get(void *to, size_t size, const slot_message *m, ckd_error *err);

/* ---- message.c: the client side ---- */

/*
 * Finds the path where the agent of a store listens. where: an absolute path; NULL, "auto" or "1": the usual path,
 * which depends on the user and the path of the store. Errors: INVALID, NOT_FOUND (there is no such store), those of
 * local_private_folder.
 */
ckd_status slots_socket_path(char out[LOCAL_PATH_MAX + 1], const char *store, const char *where,
                             ckd_error *err);
/* A connection to an agent. */
typedef struct slot_link {
    int fd;           /* -1: there is none */
    bool broken;      /* an answer is missing or incomplete: only slots_disconnect is allowed */
    uint32_t wait_ms; /* how long the agent may show no sign of life */
    char path[LOCAL_PATH_MAX + 1];
} slot_link;

/* Returns the time to wait. wanted_s 0: the value of CKPTDELTA_AGENT_WAIT (in seconds), or else 20 s. */
uint32_t slots_wait_ms(double wanted_s);
/* Connects and says hello. Errors: NOT_FOUND (no agent), UNSUPPORTED, BUSY (it does not answer), those of the agent. */
ckd_status slots_connect(slot_link *out, const char *path, const slot_peer *peer, uint32_t wait_ms,
                         ckd_error *err);
/*
 * Sends a request and waits for its answer, which the caller frees. reply: the head of the answer. The wait has no
 * limit while the agent answers other connections. Errors: those of the agent, as reply->status; with link->broken: IO
 * (the agent is gone), BUSY (it shows no sign of life).
 */
ckd_status slots_ask(slot_message *answer, slot_reply *reply, slot_link *link, const slot_message *request,
                     ckd_error *err);
void slots_disconnect(slot_link *link);

#endif
