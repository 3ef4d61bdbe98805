/* The interface of engine/ranks/ for other rooms. README.md has an overview. */
#ifndef ENGINE_RANKS_RANKS_H
#define ENGINE_RANKS_RANKS_H

#include "base/bytes.h"
#include "base/hash.h"
#include "engine/common/common.h"
#include "engine/store/store.h"

/*
 * Ranks that save together.
 *
 *   ranks.c            exchanges, planning, begin and commit, over any transport
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
    bool silent; /* rank 0: the last answer could not be sent; the others notice when it leaves */
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
void members_leave(rank_files *f);
/* Removes the files of dead ranks. The caller holds the publish lock. */
ckd_status ranks_recover(const ckd_store *store, ckd_error *err);

/*
 * Planning a save of many ranks: pure arithmetic.
 *
 *   plan_describe.c  writes and reads descriptions
 *   plan_tensors.c   all ranks' descriptions, by tensor
 *   plan_make.c      finds the distinct regions of each tensor, checks that they tile it, and makes the plan
 *   plan_assign.c    who writes a region that several ranks hold
 *   plan_defect.c    where regions do not tile a tensor, and who holds them
 *   plan_bytes.c     plans as bytes, keys
 *   plan_cache.c     plans by key
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
/* Sets the summary's least_bytes and most_bytes. */
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

#endif
