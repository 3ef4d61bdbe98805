/*
 * Collective loads: several ranks load together, and one of them reads each stored block. Internal to engine/.
 *
 *   collective_load.c    what a rank needs, and its place in the rounds
 *   collective_rounds.c  a round: read for others, send, receive, decode
 *   reader_assignment.c  who reads what for whom
 *   all_to_all.c         how ranks exchange bytes and fail together
 *
 * All ranks make the same calls of the transport in the same order, whatever happens on any of them. A failure on one
 * rank is known to all before anything else is exchanged, and they end together. Memory needed to report it is
 * allocated at the beginning.
 */
#ifndef ENGINE_RANKS_COLLECTIVE_H
#define ENGINE_RANKS_COLLECTIVE_H

#include "base/bytes.h"
#include "engine/ranks/internal.h"

/* ---- all_to_all.c ---- */
#define COLLECTIVE_TEXT 2048 /* space for an error to be sent */
/* Numbers that ranks agree on are at least this; smaller ones are failures. */
#define COLLECTIVE_MIN UINT64_C(0x100000000)

typedef struct collective {
    ckd_transport transport;
    uint32_t rank, world;
    /* by rank: what to send to it. Owned by the caller, who sets it before each all_to_all. */
    ckd_buffers *out;
    ckd_bytes *received; /* by rank: what it sent; valid until the next all_to_all */
    void *memory;
    /* for messages of known size */
    ckd_bytes *small_items, *small_in;
    ckd_buffers *small_out;
    uint8_t *sizes;
    uint8_t text[COLLECTIVE_TEXT];
} collective;

/*
 * Begins collective use of a transport. This call and the next two are collective. Errors: NOMEM (of any rank), the
 * transport's.
 */
ckd_status collective_begin(collective *t, const ckd_transport *transport, ckd_error *err);
void collective_end(collective *t);
/*
 * Collective minimum: sets *min to the smallest value of all ranks. If any rank passes a status other than CKD_OK (with
 * `why`), every rank returns the error of the lowest such rank instead. min NULL: only compares the status.
 */
ckd_status all_reduce_min(collective *t, uint64_t *min, ckd_status status, const ckd_error *why,
                          ckd_error *err);
/*
 * Sends t->out to the ranks and receives theirs in t->in, including this rank's own. status, why: as above; after a
 * failure nothing was exchanged. Errors: NOMEM of any rank.
 */
ckd_status all_to_all(collective *t, ckd_status status, const ckd_error *why, ckd_error *err);
/* Frees the received bytes. */
void collective_drop(collective *t);

/* ---- reader_assignment.c ---- */
/* A list entry: a payload that a rank needs, its size, and the turn in which it is needed. */
#define READER_ENTRY 28 /* bytes: id, u64 size, u32 turn */
void reader_list_add(bytes *list, const hash128 *id, uint64_t size, uint32_t turn);
/*
 * Returns the directory rank of a payload, among the first `ranks` ranks. All ranks that need the payload get the same
 * answer.
 */
uint32_t directory_rank_of(const hash128 *id, uint32_t ranks);

/*
 * lists: the entries of every rank. replies: one for every rank (world of them, empty). A reply says which payloads of
 * the rank's list others need as well, and which of those it reads for whom. Deterministic, O(n log n). Errors:
 * CORRUPT, NOMEM.
 */
ckd_status assign_readers(bytes *replies, const ckd_bytes *lists, uint32_t world, ckd_error *err);

/* One item of a reply. */
typedef struct reader_reply {
    uint32_t index;           /* in the list that was sent */
    uint64_t position;        /* order of exchange over all payloads, by turn; at least COLLECTIVE_MIN */
    uint32_t receiver_count;  /* 0: another rank reads it */
    const uint8_t *receivers; /* u32 each; points into the reply */
} reader_reply;
/* Reads the next item. Returns false at the end, or for an invalid reply, which also sets from->failed. */
bool reader_reply_next(reader_reply *out, reader *from, uint32_t world);
/* Returns how many turns are complete once everything up to `place` was exchanged. */
uint64_t complete_turns(uint64_t place);

#endif
