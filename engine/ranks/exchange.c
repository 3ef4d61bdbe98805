/*
 * Exchanges of ranks over any transport. Each rank sends bytes or its error. Rank 0 combines all bytes into an answer.
 * Every rank receives the answer, or the first error by rank.
 */
#include <stdlib.h>

#include "engine/ranks/internal.h"

/* Opens all messages. Returns the error of the first rank that has one, with its rank. */
static ckd_status open_all(ckd_bytes *sent, const ckd_bytes *all, uint32_t world, ckd_error *err) {
    for (uint32_t r = 0; r < world; r++) {
        ckd_error why = {0};
        rank_message m = rank_message_read(&all[r], &why);
        ckd_status status = m.status;
        sent[r] = m.inside;
        if (status != CKD_OK) {
            return rank_error(err, r, status, &why);
        }
    }
    return CKD_OK;
}

/* Combines what all ranks sent, and broadcasts the answer or the error. */
static ckd_status answer_all(exchange *x, const ckd_bytes *all, ckd_status gathered, const ckd_error *lost,
                             ckd_error *err) {
    ckd_ranks *g = x->g;
    ckd_error why = *lost;
    bytes answer = {0};
    ckd_status status = gathered;
    THEN(status, open_all(g->sent, all, g->world, &why));
    THEN(status, x->combine(x->context, g->sent, &answer, &why));
    if (status == CKD_OK && answer.failed) {
        status = err_nomem(&why, answer.size, "an answer");
    }
    x->over = gathered != CKD_OK;
    x->message = rank_message_put(&g->reply, status, &why, x->over, answer.data, answer.size);
    if (status == CKD_OK) { /* not if there was no memory for the answer */
        rank_message m = rank_message_read(&x->message, &why);
        x->answer = m.inside;
        status = m.status;
    }
    ckd_error lost_answer = {0};
    ckd_status sent = g->transport.broadcast(g->transport.context, &x->message, &lost_answer);
    x->agreed = sent == CKD_OK;
    g->lost = gathered == CKD_OK ? lost_answer : *lost;
    bytes_free(&answer);
    return status == CKD_OK && !x->commits ? err_from(err, sent, &lost_answer) : err_from(err, status, &why);
}

static ckd_status coordinate(exchange *x, const ckd_bytes *message, ckd_error *err) {
    ckd_ranks *g = x->g;
    ckd_error why = {0};
    ckd_status status = g->transport.gather(g->transport.context, message, g->all, &why);
    status = answer_all(x, g->all, status, &why, err);
    for (uint32_t r = 0; r < g->world; r++) {
        ckd_bytes_free(&g->all[r]);
    }
    return status;
}

static ckd_status participate(exchange *x, const ckd_bytes *message, ckd_error *err) {
    ckd_ranks *g = x->g;
    g->lost = (ckd_error){.offset = CKD_NO_OFFSET};
    ckd_status status = g->transport.gather(g->transport.context, message, NULL, &g->lost);
    THEN(status, g->transport.broadcast(g->transport.context, &x->message, &g->lost));
    if (status == CKD_OK) {
        rank_message m = rank_message_read(&x->message, &g->lost);
        x->agreed = m.readable;
        x->over = m.over;
        x->answer = m.inside;
        status = m.status;
    }
    return err_from(err, status, &g->lost);
}

ckd_status rank_exchange(exchange *x, ckd_status own, const ckd_error *why, const ckd_bytes *data,
                         ckd_error *err) {
    if (x->g->broken) {
        return err_set(
            err, CKD_E_STATE,
            "an earlier exchange with the other ranks was not completed: call ckd_ranks_leave, then ckd_ranks_join");
    }
    ckd_bytes message = rank_message_put(&x->g->message, own, why, false, data->data, data->size);
    ckd_status status = x->g->rank == 0 ? coordinate(x, &message, err) : participate(x, &message, err);
    x->g->broken = !x->agreed || x->over;
    return status;
}

ckd_status ranks_check(const ckd_ranks *g, ckd_error *err) {
    ckd_status known = g->broken ? g->lost.status : CKD_OK;
    bool unknown = g->broken && known == CKD_OK;
    return unknown ? err_set(err, CKD_E_STATE, "the ranks lost each other") : err_from(err, known, &g->lost);
}

void rank_exchange_end(exchange *x) {
    if (x->g->rank != 0) {
        ckd_bytes_free(&x->message);
    }
    x->answer = (ckd_bytes){NULL, 0};
}

static ckd_status pass_on(void *context, const ckd_bytes *sent, bytes *answer, ckd_error *err) {
    (void)context;
    (void)err;
    bytes_put(answer, sent[0].data, sent[0].size);
    return CKD_OK;
}

ckd_status ranks_agree(ckd_ranks *g, ckd_status own, const ckd_error *why, void *data, size_t size,
                       ckd_error *err) {
    exchange x = {.g = g, .combine = pass_on};
    ckd_bytes sent = {data, g->rank == 0 ? size : 0};
    ckd_status status = rank_exchange(&x, own, why, &sent, err);
    if (status == CKD_OK && x.answer.size != size) {
        g->broken = true;
        status = err_set(err, CKD_E_CORRUPT, "rank 0 sent something else than this rank expects");
    }
    if (status == CKD_OK && size) {
        memcpy(data, x.answer.data, size);
    }
    rank_exchange_end(&x);
    return status;
}

/* Bytes that each rank sends. */
typedef struct collection {
    uint32_t world;
    size_t size;
} collection;

static ckd_status put_all(void *context, const ckd_bytes *sent, bytes *answer, ckd_error *err) {
    const collection *c = context;
    for (uint32_t r = 0; r < c->world; r++) {
        if (sent[r].size != c->size) {
            return err_set(err, CKD_E_CORRUPT, "rank %u sent something else than rank 0 expects",
                           (unsigned)r);
        }
        bytes_put(answer, sent[r].data, sent[r].size);
    }
    return CKD_OK;
}

ckd_status ranks_collect(void *out, ckd_ranks *g, const void *data, size_t size, ckd_error *err) {
    collection c = {g->world, size};
    exchange x = {.g = g, .combine = put_all, .context = &c};
    ckd_bytes sent = {(void *)(uintptr_t)data, size};
    ckd_status status = rank_exchange(&x, CKD_OK, NULL, &sent, err);
    if (status == CKD_OK && x.answer.size != g->world * size) {
        g->broken = true;
        status = err_set(err, CKD_E_CORRUPT, "rank 0 sent something else than this rank expects");
    }
    if (status == CKD_OK && out) {
        memcpy(out, x.answer.data, x.answer.size);
    }
    rank_exchange_end(&x);
    return status;
}
