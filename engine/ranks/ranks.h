/*
 * Ranks that save together. Internal to engine/.
 *
 *   ranks.c            exchanges, planning, begin and commit, over any transport
 *   message.c          messages between ranks, as bytes
 *   file_transport.c   the transport through the store's directory
 *   members.c          membership: joining, liveness, leaving, and cleaning up after dead ranks
 *   watch.c            detects dead ranks, for ranks that wait and for busy ones; decides whether a commit is given up
 */
#ifndef ENGINE_RANKS_H
#define ENGINE_RANKS_H

#include "base/bytes.h"
#include "engine/store/store.h"

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
    member *members; /* by rank */
    file_lock *lock; /* on this rank's own file */
    uint64_t number; /* number of the next message, the same on all ranks */
    uint64_t kept;   /* this rank's messages from this number on still exist */
    uint32_t turn;   /* the rank whose liveness is checked next */
    bool claimed;    /* rank 0: a claim file exists, for this checkpoint: */
    ckd_id checkpoint;
    bool silent; /* rank 0: the last answer could not be sent; the others notice when it leaves */
    pid_t process;
} rank_files;

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
/* Reads any bytes as a message. Fills err if the status is an error. */
rank_message rank_message_read(const ckd_bytes *message, ckd_error *err);
/* Sets err to a rank's error and prefixes it with the rank. err must not be `why`. */
ckd_status rank_error(ckd_error *err, uint32_t rank, ckd_status status, const ckd_error *why);
/* Converts a transport of any version to the current layout. Errors: INVALID (too small). */
ckd_status rank_transport(ckd_transport *out, const ckd_transport *transport, ckd_error *err);

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
bool member_is_gone(member *m, bool there);
/* Returns whether the rank is alive; false: dead, or left. */
bool member_lives(const rank_files *f, const member *m);
void members_leave(rank_files *f);
/* Removes the files of dead ranks. The caller holds the publish lock. */
ckd_status ranks_recover(const ckd_store *store, ckd_error *err);

pathname path_message(const ckd_store *store, const ckd_id *sender, uint64_t number, const char *suffix);

/* ---- watch.c ---- */
/* Sets the error STATE: this rank has died or left. */
ckd_status rank_died(uint32_t rank, uint32_t world, const char *when, ckd_error *err);
/* Returns the error that ended the group, if one is recorded. */
ckd_status rank_over(const rank_files *f, ckd_error *err);
/* Records the group's end for the others. The first record counts. */
void rank_end_group(const rank_files *f, ckd_status status, const ckd_error *why);
/* Returns whether the rank is neither alive nor has sent this message. */
bool rank_is_missing(const rank_files *f, uint32_t rank, uint64_t number);
/*
 * Checks a few ranks other than 0, different ones each time. STATE, naming the rank, if one is missing whose message of
 * this number is due.
 */
ckd_status rank_find_missing(rank_files *f, uint64_t number, ckd_error *err);
/* For ranks that are busy before the next exchange: fails if the group is over, or ends it if a rank is dead. */
ckd_status rank_look(void *files, ckd_error *err);
/*
 * Rank 0 claims the commit of a checkpoint; any other rank gives it up. The first one decides, and all others learn the
 * decision. Rank 0 claims under the publish lock, which it holds until it has committed or failed. Errors: STATE (it
 * was given up), those of writing a small file.
 */
ckd_status rank_claim_commit(void *files, const ckd_id *checkpoint, ckd_error *err);
typedef enum rank_commit {
    COMMIT_GIVEN_UP, /* it will never be committed */
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
/* Joins a group and sets up its transport. */
ckd_status rank_files_join(ckd_transport *out, ckd_store *store, const ckd_ranks_options *options,
                           ckd_error *err);

#endif
