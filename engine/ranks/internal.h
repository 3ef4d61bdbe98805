/* Declarations that only the files of engine/ranks/ use. */
#ifndef ENGINE_RANKS_INTERNAL_H
#define ENGINE_RANKS_INTERNAL_H

#include "base/bytes.h"
#include "base/hash.h"
#include "engine/common/common.h"
#include "engine/ranks/ranks.h"
#include "engine/store/store.h"

/*
 * Ranks that save together.
 *
 *   ranks.c            joining, planning, begin and commit, over any transport
 *   exchange.c         exchanges, of which all of these consist
 *   message.c          messages between ranks, as bytes
 *   file_transport.c   the transport through the store's directory
 *   members.c          membership: joining, liveness, leaving, and cleaning up after dead ranks
 *   watch.c            detects dead ranks, for ranks that wait and for busy ones; decides whether a commit is given up
 */

/*
 * In data/r each rank has an empty file HEX-GROUP-RANK-WORLD, on which it holds a shared lock while it is alive. HEX is
 * its member id; GROUP is the hash of the group's name in 16 digits. It also has numbered messages HEX.N for its peers.
 * Rank 0's HEX may have two more: HEX.over says why the group ended, and HEX.CHECKPOINT whether that checkpoint is
 * claimed for commit or given up. Nothing there outlives the processes, so it is not synced. Files of dead ranks are
 * removed with the leftovers of dead writers.
 */
typedef struct member {
    ckd_id id; /* zero: not known yet */
    char name[CKD_ID_TEXT + 64];
    uint64_t seen_ns; /* while joining: when it was last present; 0: never */
} member;

typedef struct rank_files {
    ckd_store *store;
    uint32_t rank, world;
    uint64_t group, timeout_ms;
    member *members;         /* by rank */
    file_lock *lock;         /* on this rank's own file */
    uint64_t number;         /* number of the next message, the same on all ranks */
    uint64_t oldest_message; /* this rank's messages from this number on still exist */
    uint32_t turn;           /* the rank whose liveness is checked next */
    bool claimed;            /* rank 0: a claim file exists, for this checkpoint: */
    ckd_id checkpoint;
    cancel_check stop; /* of joining */
    rank_watch watch;  /* of ranks that are waited for in exchanges */
    uint64_t waits_since_ns;
    bool silent; /* rank 0 does not wait for the others when it leaves: they have no message to read */
    pid_t process;
} rank_files;

/* ---- members.c ---- */
/* Enters this rank's file into the directory. */
ckd_status members_enter(rank_files *f, ckd_error *err);
/* Rank 0 finds the other ranks; BUSY after the timeout. */
ckd_status members_find_all(rank_files *f, ckd_error *err);
/* Finds the next live rank 0 of the same group and world in the list, from *at on; false: no more. */
bool members_next_coordinator(member *out, const rank_files *f, const dir_list *list, size_t *at);
/* Sets the name from the id. */
void member_name(member *m, const rank_files *f, uint32_t rank);
/* While joining: returns whether the rank was present and has been away longer than a retry takes. */
bool member_is_gone(member *m, bool present);
/* Returns whether the rank is alive; false: dead, or left. */
bool member_lives(const rank_files *f, const member *m);
/* Also more than once. */
void members_leave(rank_files *f);

/*
 * Planning a save of many ranks: pure arithmetic.
 *
 *   plan_describe.c  writes and reads descriptions
 *   plan_tensors.c   all ranks' descriptions, by tensor
 *   plan_make.c      finds the distinct regions of each tensor, checks that they tile it, and makes the plan
 *   plan_assign.c    who writes a region that several ranks hold
 *   plan_defect.c    where regions do not tile a tensor, and who holds them
 *   plan.c           a plan: its memory, key and bytes, and the most recent ones by key
 *
 * Memory: about 60 bytes for each region of all ranks, and twice 8 bytes for each dimension of one tensor's regions.
 * Descriptions are read in place.
 */

/* One rank's part of a plan. */
typedef struct plan_rank {
    hash128 description;
    uint64_t regions; /* in its description */
    uint64_t bytes;   /* it writes */
    uint8_t *writes;  /* bit i: it writes region i */
} plan_rank;

struct ckd_plan {
    hash128 key;
    ckd_plan_summary summary;
    plan_rank *ranks;
    uint8_t *bits; /* memory of `writes` for all ranks */
};
/* Allocates a plan. regions: the number of regions that each rank describes. */
ckd_status plan_new(ckd_plan **out, uint32_t world, const uint64_t *regions, ckd_error *err);
/*
 * Returns the key of a plan. It covers everything that the plan depends on: names, roles, dtypes, shapes, regions,
 * ranks and world, but not where values are. Plans with equal keys are equal. Ranks exchange the hashes of their
 * descriptions to find out whether an earlier plan applies.
 */
hash128 plan_key_of_hashes(const hash128 *hashes, uint32_t world);
hash128 plan_description_hash(const ckd_bytes *description);
/* Converts a plan to bytes and back. Errors of reading: CORRUPT, UNSUPPORTED, NOMEM. */
ckd_status plan_bytes(ckd_bytes *out, const ckd_plan *plan, ckd_error *err);
ckd_status plan_read(ckd_plan **out, const void *data, size_t size, ckd_error *err);
/* Sets the summary's min_bytes and max_bytes. */
void plan_find_extremes(ckd_plan *plan);

/* ---- descriptions ---- */
typedef struct description {
    uint32_t rank, world;
    uint64_t count;
    hash128 hash;
    reader at; /* at the first entry */
} description;
/* One described region; points into the description. */
typedef struct described {
    const char *name; /* not NUL-terminated */
    uint16_t name_size;
    const uint8_t *traits; /* role, dtype, dimensions and shape: equal bytes mean equal traits */
    size_t traits_size;
    ckd_role role;
    ckd_dtype dtype;
    geometry shape;
    ckd_region region; /* not yet checked against the shape */
} described;
/* Errors: CORRUPT, UNSUPPORTED. */
ckd_status description_open(description *out, const ckd_bytes *bytes_of, ckd_error *err);
/* Read an entry: role, dtype and shape; then its region, which has as many dimensions. false: invalid. */
bool description_traits(described *out, reader *at);
bool description_region(described *out, reader *at);
bool description_name_valid(const described *d);

/* ---- message.c ---- */
typedef struct rank_message {
    ckd_status status; /* as sent, or CORRUPT */
    bool readable;
    bool over;        /* some rank is at another point of the protocol: the group ends */
    ckd_bytes inside; /* payload of an OK message; points into the message */
} rank_message;
/* Writes a message. `why` is used if status is an error. Release with ckd_bytes_free. No data: out of memory. */
ckd_bytes rank_message_write(ckd_status status, const ckd_error *why, bool over, const void *data,
                             size_t size);
/*
 * The same in memory that is used again for each message. An error, or RANK_MESSAGE_SURE bytes, need no new memory: a
 * rank that sent nothing would leave the others waiting. If there is no memory for longer data, the message is that
 * error.
 */
#define RANK_MESSAGE_SURE 512u
bool rank_message_reserve(bytes *to); /* false: out of memory */
ckd_bytes rank_message_put(bytes *to, ckd_status status, const ckd_error *why, bool over, const void *data,
                           size_t size);
/* Reads any bytes as a message. Fills err if the status is an error. */
rank_message rank_message_read(const ckd_bytes *message, ckd_error *err);
/* Sets err to a rank's error and prefixes it with the rank. err must not be `why`. */
ckd_status rank_error(ckd_error *err, uint32_t rank, ckd_status status, const ckd_error *why);
/* Converts a transport of any version to the current layout. Errors: INVALID (too small). */
ckd_status rank_transport(ckd_transport *out, const ckd_transport *transport, ckd_error *err);

pathname path_message(const ckd_store *store, const ckd_id *sender, uint64_t number, const char *suffix);

/* ---- watch.c ---- */
/* Sets the error STATE: this rank has died or left. */
ckd_status rank_died(uint32_t rank, uint32_t world, const char *when, ckd_error *err);
/* Returns the error that ended the group, if one is recorded. */
ckd_status rank_group_error(const rank_files *f, ckd_error *err);
/*
 * Records the group's end for the others. The first record counts, because a rank that leaves after another one's death
 * looks dead itself. Returns the status of the record that counts, with its error in *why.
 */
ckd_status rank_end_group(const rank_files *f, ckd_status status, ckd_error *why);
/* Asks the watch, if there is one, about a rank that this one waits for. */
ckd_status rank_ask_watch(const rank_files *f, uint32_t rank, ckd_error *err);
/* Returns whether the rank is neither alive nor has sent this message. */
bool rank_is_missing(const rank_files *f, uint32_t rank, uint64_t number);
/*
 * Checks a few ranks other than 0, different ones each time. STATE, naming the rank, if one whose message of this
 * number is due is missing.
 */
ckd_status rank_find_missing(rank_files *f, uint64_t number, ckd_error *err);
/* For ranks that are busy before the next exchange: fails if the group is over, or ends it if a rank is dead. */
ckd_status rank_poll(void *files, ckd_error *err);
/*
 * Rank 0 claims the commit of a checkpoint; any other rank gives it up. The first one decides, and all others learn the
 * decision. Rank 0 claims under the publish lock, which it holds until it has committed or failed. Errors: STATE (it
 * was given up), those of writing a small file.
 */
ckd_status rank_claim_commit(void *files, const ckd_id *checkpoint, ckd_error *err);
typedef enum rank_commit {
    COMMIT_GIVEN_UP, /* rank 0 will never claim it, or has forgotten its claim, as its commit has ended */
    COMMIT_CLAIMED,  /* rank 0 is about to commit, has committed, or has failed */
    COMMIT_UNKNOWN   /* nothing can be written or read */
} rank_commit;
rank_commit rank_give_up_commit(const rank_files *f, const ckd_id *checkpoint);
/* Rank 0: removes the claim once all ranks know the outcome. */
void rank_forget_claim(rank_files *f);

/* ---- file_transport.c ---- */
/* Publish or read a small checksummed file, which appears atomically. Errors: EXISTS; NOT_FOUND, CORRUPT. */
ckd_status rank_file_publish(const pathname *path, const pathname *temp, const ckd_bytes *data,
                             ckd_error *err);
ckd_status rank_file_read(ckd_bytes *out, const pathname *path, ckd_error *err);
/* Joins a group and sets up its transport. stop: as for ranks_join. */
ckd_status rank_files_join(ckd_transport *out, ckd_store *store, const ckd_ranks_options *options,
                           const cancel_check *stop, ckd_error *err);

/* ---- the most recent plans, by key; one thread at a time ---- */
typedef struct plan_cache plan_cache;
ckd_status plan_cache_new(plan_cache **out, uint32_t plans, ckd_error *err); /* plans 0: 4 */
void plan_cache_free(plan_cache *cache);                                     /* also frees its plans */
/* Returns the plan, or NULL. The cache owns it; it lives until as many others were added. */
const ckd_plan *plan_cache_find(plan_cache *cache, const hash128 *key);
/* Takes over the plan. Frees an equal one; otherwise, if the cache is full, the least recently used one. */
void plan_cache_add(plan_cache *cache, ckd_plan *plan);

/* ---- exchange.c ---- */
struct ckd_ranks {
    ckd_store *store;
    ckd_transport transport;
    rank_files *files; /* NULL: another transport than the store's directory */
    uint32_t rank, world;
    plan_cache *plans;
    bytes message, reply;  /* what this rank sends, and rank 0's answer */
    ckd_bytes *all, *sent; /* rank 0: one for each rank */
    bool broken;           /* an exchange did not complete: ranks do not know each other's state */
    ckd_error lost;        /* if broken: why */
};

/* One exchange. `combine` runs on rank 0 if no rank had an error, and makes the answer from what they sent. */
typedef ckd_status (*combine_fn)(void *context, const ckd_bytes *sent, bytes *answer, ckd_error *err);
typedef struct exchange {
    ckd_ranks *g;
    combine_fn combine;
    void *context;
    ckd_bytes message; /* contains the answer; rank 0's belongs to the group, others release it */
    ckd_bytes answer;
    bool commits; /* rank 0's result counts even if the others do not learn it */
    bool agreed;  /* all ranks have the same result */
    bool over;    /* some rank is at another point: the group ends with this exchange */
} exchange;
/*
 * own: CKD_OK to send `data`, or an error with `why`. Errors: the first rank's that has one; STATE (an earlier exchange
 * was not completed), those of the transport.
 */
ckd_status rank_exchange(exchange *x, ckd_status own, const ckd_error *why, const ckd_bytes *data,
                         ckd_error *err);
void rank_exchange_end(exchange *x);

/* ---- regions of one tensor, as boxes where possible ---- */
/*
 * Splits a flat range into at most 2 * ndim - 1 boxes (1 without dimensions) that tile it in order. Returns their
 * number.
 */
size_t flat_boxes(ckd_region boxes[2 * CKD_MAX_DIMS], const geometry *g, uint64_t start, uint64_t count);
/* Returns the same elements in the same order, as a box if possible, else as a flat range. Not for empty regions. */
ckd_region region_as_box(const geometry *g, const ckd_region *region);

/* A place where regions do not tile a tensor. */
typedef struct plan_defect {
    bool found;     /* false: there is none */
    bool overlap;   /* false: no region holds these elements */
    ckd_region box; /* the elements concerned */
    size_t a, b;    /* of an overlap: indexes of two regions that hold them */
} plan_defect;
/*
 * Finds the first defect, if the regions do not tile the tensor. It follows common/coverage_check.c dimension
 * by dimension: along one, all cross-sections must be tiled, and it descends into the first that is not. O(d n log n)
 * for n boxes in d dimensions. The tensor and the regions must not be empty, and the regions must lie in the tensor.
 * Errors: NOMEM.
 */
typedef void (*region_fn)(ckd_region *out, const void *context, size_t index);
ckd_status plan_find_defect(plan_defect *out, const geometry *g, region_fn region, const void *context,
                            size_t count, ckd_error *err);
/* Writes text like "[0:4, 2:8]", truncated to fit. */
void region_text(char *text, size_t size, const ckd_region *box, uint32_t ndim);

/* ---- who writes ---- */
/* A region that `count` ranks hold. */
typedef struct plan_group {
    uint64_t unit; /* equal for groups that one rank should write */
    uint64_t bytes;
    uint32_t first, count; /* of the holders */
} plan_group;
/*
 * Sorts the groups and chooses a writer for each. ranks: ranks of the holders, ascending in a group. loads: bytes of
 * each rank, which the call adds to. chosen: for each group, in the sorted order.
 */
ckd_status plan_assign(uint32_t *chosen, plan_group *groups, size_t count, const uint32_t *ranks,
                       uint64_t *loads, ckd_error *err);

#endif
