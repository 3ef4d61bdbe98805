#include "tests/support/thread_ranks.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { EXCHANGE = 1, LEAST = 2 };

static ckd_status broken(ckd_error *err) {
    if (err) {
        *err = (ckd_error){.status = CKD_E_IO};
        snprintf(err->message, sizeof(err->message), "the transport is broken");
    }
    return CKD_E_IO;
}

/* Waits for all ranks. Returns false if the transport of one of them broke. */
static bool meet_all(thread_ranks *t) {
    pthread_mutex_lock(&t->mutex);
    unsigned long turn = t->turn;
    if (++t->waiting == t->world) {
        t->waiting = 0;
        t->turn++;
        pthread_cond_broadcast(&t->moved);
    }
    while (t->turn == turn && !t->broken) {
        pthread_cond_wait(&t->moved, &t->mutex);
    }
    bool good = t->turn != turn;
    pthread_mutex_unlock(&t->mutex);
    return good;
}

/* Called at the beginning of each call of the transport. */
static bool enter(thread_rank *r, int call) {
    thread_ranks *t = r->all;
    r->calls++;
    if (t->fail_at == r->calls && t->fail_rank == r->rank) {
        pthread_mutex_lock(&t->mutex);
        t->broken = true;
        pthread_cond_broadcast(&t->moved);
        pthread_mutex_unlock(&t->mutex);
        return false;
    }
    t->call[r->rank] = call;
    if (!meet_all(t)) {
        return false;
    }
    for (uint32_t i = 0; i < t->world; i++) {
        if (t->call[i] != call) {
            pthread_mutex_lock(&t->mutex);
            t->unequal = true;
            pthread_mutex_unlock(&t->mutex);
        }
    }
    return true;
}

/* Call with the mutex held. */
static void damage(thread_ranks *t, uint8_t *data, size_t size) {
    t->damage ^= t->damage << 13;
    t->damage ^= t->damage >> 7;
    t->damage ^= t->damage << 17;
    if (size > 8 && t->damage % t->damage_every == 0) {
        data[(t->damage >> 8) % size] ^= (uint8_t)(1 << (t->damage >> 5 & 7));
        t->damaged++;
    }
}

static void receive(thread_rank *r, uint32_t from, const ckd_bytes *in) {
    thread_ranks *t = r->all;
    const ckd_buffers *sent = &t->out[from][r->rank];
    uint64_t size = 0;
    for (size_t i = 0; i < sent->count; i++) {
        const ckd_bytes *buffer = &sent->items[i];
        if (buffer->size && size + buffer->size <= in->size) {
            memcpy((uint8_t *)in->data + size, buffer->data, buffer->size);
        }
        size += buffer->size;
    }
    pthread_mutex_lock(&t->mutex);
    t->unequal = t->unequal || size != in->size;
    t->most_sent = size > t->most_sent ? size : t->most_sent;
    if (t->damage) {
        damage(t, in->data, in->size);
    }
    pthread_mutex_unlock(&t->mutex);
}

static ckd_status exchange(void *context, const ckd_buffers *out, const ckd_bytes *in, ckd_error *err) {
    thread_rank *r = context;
    thread_ranks *t = r->all;
    t->out[r->rank] = out;
    if (!enter(r, EXCHANGE)) {
        return broken(err);
    }
    for (uint32_t from = 0; from < t->world; from++) {
        if (from != r->rank) {
            receive(r, from, &in[from]);
        }
    }
    return meet_all(t) ? CKD_OK
                       : broken(err); /* the buffers must stay valid until all ranks have read them */
}

static ckd_status least(void *context, uint64_t *number, ckd_error *err) {
    thread_rank *r = context;
    thread_ranks *t = r->all;
    t->number[r->rank] = *number;
    if (!enter(r, LEAST)) {
        return broken(err);
    }
    uint64_t found = UINT64_MAX;
    for (uint32_t i = 0; i < t->world; i++) {
        found = t->number[i] < found ? t->number[i] : found;
    }
    if (!meet_all(t)) {
        return broken(err);
    }
    *number = found;
    return CKD_OK;
}

static void *be_rank(void *context) {
    thread_rank *r = context;
    r->status = r->all->act(r->all->context, r, &r->err);
    return NULL;
}

void thread_ranks_run(thread_ranks *t, uint32_t world, thread_rank_fn act, void *context) {
    t->world = world;
    t->act = act;
    t->context = context;
    t->waiting = 0;
    t->broken = t->unequal = false;
    pthread_mutex_init(&t->mutex, NULL);
    pthread_cond_init(&t->moved, NULL);
    for (uint32_t i = 0; i < world; i++) {
        t->ranks[i] = (thread_rank){.all = t, .rank = i, .transport = CKD_TRANSPORT_INIT};
        ckd_transport *transport = &t->ranks[i].transport;
        transport->context = &t->ranks[i];
        transport->rank = i;
        transport->world = world;
        transport->exchange = exchange;
        transport->all_reduce_min = least;
    }
    for (uint32_t i = 0; i < world; i++) {
        assert_int_equal(pthread_create(&t->ranks[i].thread, NULL, be_rank, &t->ranks[i]), 0);
    }
    for (uint32_t i = 0; i < world; i++) {
        pthread_join(t->ranks[i].thread, NULL);
    }
    pthread_mutex_destroy(&t->mutex);
    pthread_cond_destroy(&t->moved);
    assert_false(t->unequal);
}
