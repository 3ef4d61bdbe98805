/*
 * Ranks that load together, each stored block being read by one of them. Internal to engine/.
 *
 *   collective_load.c    what a rank needs, and its place in the rounds
 *   collective_rounds.c  a round: read for others, send, receive, decode
 *   reader_assignment.c  who reads what for whom
 *   all_to_all.c         how ranks exchange bytes and fail together
 *
 * All ranks make the same calls of the transport in the same order, whatever happens on any of them: what failed on one is known to all
 * before anything else is exchanged, and they end together. Memory that has to be had for that is taken at the beginning.
 */
#ifndef ENGINE_RANKS_COLLECTIVE_H
#define ENGINE_RANKS_COLLECTIVE_H

#include "base/bytes.h"
#include "engine/ranks/ranks.h"

/* ---- all_to_all.c ---- */
#define COLLECTIVE_TEXT 2048 /* room for an error on its way */
/* Numbers that ranks agree on are at least that; below are failures. */
#define COLLECTIVE_MIN UINT64_C(0x100000000)

typedef struct collective {
    ckd_transport transport;
    uint32_t rank, world;
    ckd_pieces *out; /* by rank, what it is to be sent. The caller's, who sets it before each swap */
    ckd_bytes *in;   /* by rank, what it sent; until the next swap */
    void *memory;
    /* of messages whose sizes are known */
    ckd_bytes *small_items, *small_in;
    ckd_pieces *small_out;
    uint8_t *sizes;
    uint8_t text[COLLECTIVE_TEXT];
} collective;

/* Collective, and so are the next two. Errors: NOMEM (of any rank), the transport's. */
ckd_status collective_begin(collective *t, const ckd_transport *transport, ckd_error *err);
void collective_end(collective *t);
/*
 * *min becomes the smallest number of all ranks. status, why: how this rank is doing; if it is not well, `min` is not looked at, and all ranks
 * return the error of the first rank that is not. min NULL: only that.
 */
ckd_status all_reduce_min(collective *t, uint64_t *min, ckd_status status, const ckd_error *why,
                          ckd_error *err);
/* t->out goes to its ranks, and theirs comes to t->in; one's own, too. status, why: as above; then nothing was exchanged. Errors: NOMEM of any rank. */
ckd_status all_to_all(collective *t, ckd_status status, const ckd_error *why, ckd_error *err);
/* What came is not needed any more. */
void collective_drop(collective *t);

/* ---- reader_assignment.c ---- */
/* A payload that a rank needs: which it is, its size, and the turn when it is needed. */
#define READER_ENTRY 28 /* bytes: id, u64 size, u32 turn */
void reader_list_add(bytes *list, const hash128 *id, uint64_t size, uint32_t turn);
/* Which rank is told of it, of the first so many: the same for all that need it. */
uint32_t directory_rank_of(const hash128 *id, uint32_t ranks);

/*
 * lists: of every rank, entries. replies: to every rank (world of them, empty), what of its list others need as well, and of that what it is to
 * read for whom. Deterministic, n log n. Errors: CORRUPT, NOMEM.
 */
ckd_status assign_readers(bytes *replies, const ckd_bytes *lists, uint32_t world, ckd_error *err);

/* One piece of a reply. */
typedef struct reader_reply {
    uint32_t index;           /* in the list that was sent */
    uint64_t position;        /* in the order of all that is exchanged: by turn, at least COLLECTIVE_MIN */
    uint32_t receiver_count;  /* 0: another rank reads it */
    const uint8_t *receivers; /* u32 each; they lie in the reply */
} reader_reply;
/* The next one; false at the end, or (then from->failed is set) where the reply makes no sense. */
bool reader_reply_next(reader_reply *out, reader *from, uint32_t world);
/* How many turns have all that they need once everything up to `position` was exchanged. */
uint64_t complete_turns(uint64_t place);

#endif
