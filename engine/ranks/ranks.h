/*
 * Ranks that save together. Internal to engine/.
 *
 *   ranks.c        exchanges, planning, begin and commit, over any transport
 *   message.c what they tell each other, as bytes
 *   file_transport.c   the transport through the store's directory
 *   members.c who is there: joining, living, leaving, and clearing up after the dead
 *   watch.c   that a rank has died, noticed by those that wait and those that are busy; and that a commit was given up
 */
#ifndef ENGINE_RANKS_H
#define ENGINE_RANKS_H

#include "base/bytes.h"
#include "engine/store/store.h"

/*
 * In data/r a rank has a file HEX-GROUP-RANK-WORLD, empty, on which it holds a shared lock while it lives (HEX: its member id; GROUP: 16 digits, the
 * hash of the group's name); and messages HEX.N, numbered, that its peers read. With the HEX of rank 0 there may be HEX.over, why the group
 * ended, and HEX.CHECKPOINT, whether that is committed or given up. Nothing there outlives the processes: it is not synced, and what the dead
 * left is removed with the leftovers of dead writers.
 */
typedef struct member {
    ckd_id id; /* zero: not known yet */
    char name[CKD_ID_TEXT + 64];
    uint64_t seen_ns; /* while joining: when it was last there; 0: never */
} member;

typedef struct rank_files {
    ckd_store *store;
    uint32_t rank, world;
    uint64_t group, timeout_ms;
    member *members; /* by rank */
    file_lock *lock; /* on one's own file */
    uint64_t number; /* of the next message, the same on all ranks */
    uint64_t kept;   /* one's own messages from this one on are still there */
    uint32_t turn;   /* whose life is looked at next */
    bool claimed;    /* rank 0: there is a file that says so, of this checkpoint: */
    ckd_id checkpoint;
    bool silent; /* rank 0: the others could not be told how it went; they find out when it leaves */
    pid_t process;
} rank_files;

/* ---- message.c ---- */
typedef struct rank_message {
    ckd_status status; /* told, or CORRUPT */
    bool readable;
    bool over;        /* some rank is not where the others are: the group ends */
    ckd_bytes inside; /* of OK; points into the message */
} rank_message;
/* No data: out of memory. `why` counts where status is an error. Release with ckd_bytes_free. */
ckd_bytes rank_message_write(ckd_status status, const ckd_error *why, bool over, const void *data,
                             size_t size);
/* Of any bytes. err is filled where the status is an error. */
rank_message rank_message_read(const ckd_bytes *message, ckd_error *err);
/* A rank's error, saying whose it is. err must not be `why`. */
ckd_status rank_error(ckd_error *err, uint32_t rank, ckd_status status, const ckd_error *why);
/* A transport in this version's form, whatever version it was compiled with. Errors: INVALID (too small). */
ckd_status rank_transport(ckd_transport *out, const ckd_transport *transport, ckd_error *err);

/* ---- members.c ---- */
/* Enters the directory. */
ckd_status members_enter(rank_files *f, ckd_error *err);
/* Rank 0 finds the others; BUSY after the time. */
ckd_status members_find_all(rank_files *f, ckd_error *err);
/* A rank 0 that lives, of the same group and world, from `after` on in the order of names; false: no more. */
bool members_next_coordinator(member *out, const rank_files *f, const dir_list *list, size_t *at);
/* From its id. */
void member_name(member *m, const rank_files *f, uint32_t rank);
/* While joining: was it there, and has it been away for longer than it takes to try again? */
bool member_is_gone(member *m, bool there);
/* false: dead, or left. */
bool member_lives(const rank_files *f, const member *m);
void members_leave(rank_files *f);
/* Removes what dead ranks left. Under the publish lock. */
ckd_status ranks_recover(const ckd_store *store, ckd_error *err);

pathname path_message(const ckd_store *store, const ckd_id *sender, uint64_t number, const char *suffix);

/* ---- watch.c ---- */
/* STATE: this rank has died or left. */
ckd_status rank_died(uint32_t rank, uint32_t world, const char *when, ckd_error *err);
/* The error that the group ended with, if somebody knows that it has. */
ckd_status rank_over(const rank_files *f, ckd_error *err);
/* Lets the others know. What was told first counts. */
void rank_end_group(const rank_files *f, ckd_status status, const ckd_error *why);
/* Neither alive, nor has it sent this message. */
bool rank_is_missing(const rank_files *f, uint32_t rank, uint64_t number);
/* A few ranks other than 0, others each time: is one missing whose message of this number is to come? STATE, naming it. */
ckd_status rank_find_missing(rank_files *f, uint64_t number, ckd_error *err);
/* For those that are busy before the next exchange: is the group over, or does it end here, as somebody is dead? */
ckd_status rank_look(void *files, ckd_error *err);
/*
 * Rank 0 claims the commit of a checkpoint, another rank gives it up: who is first is right, and all others get to know it. Rank 0 claims under
 * the publish lock, which it holds until it has committed, or failed. STATE: it was given up. Other errors: those of writing a small file.
 */
ckd_status rank_claim_commit(void *files, const ckd_id *checkpoint, ckd_error *err);
typedef enum rank_commit {
    COMMIT_GIVEN_UP, /* and will never be */
    COMMIT_CLAIMED,  /* rank 0 is about to, or has, or has failed */
    COMMIT_UNKNOWN   /* nothing can be written or read */
} rank_commit;
rank_commit rank_give_up_commit(const rank_files *f, const ckd_id *checkpoint);
/* Rank 0: everybody knows how it went. */
void rank_forget_claim(rank_files *f);

/* ---- file_transport.c ---- */
/* Small files with a checksum, which appear at once. EXISTS; NOT_FOUND, CORRUPT. */
ckd_status rank_file_publish(const pathname *path, const pathname *temp, const ckd_bytes *data,
                             ckd_error *err);
ckd_status rank_file_read(ckd_bytes *out, const pathname *path, ckd_error *err);
/* Joins, and sets what a group needs of it. */
ckd_status rank_files_join(ckd_transport *out, ckd_store *store, const ckd_ranks_options *options,
                           ckd_error *err);

#endif
