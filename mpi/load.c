/*
 * Collective loads over MPI. In an exchange, round d sends to the rank d ahead and receives from the rank d behind.
 * Both sides know the sizes in advance, so nothing has to be allocated.
 */
#include <stdbool.h>
#include <string.h>

#include "group.h"

#define TAG   8
#define SMALL ((size_t)1 << 16) /* smaller buffers travel together */

typedef struct mpi_load {
    MPI_Comm comm;
    int rank, world;
    bool broken;
    unsigned char together[SMALL];
} mpi_load;

/* The unsent rest of a list of buffers. */
typedef struct cursor {
    const ckd_buffers *from;
    size_t buffer, at;
} cursor;

static void skip_empty(cursor *c) {
    while (c->buffer < c->from->count && c->at == c->from->items[c->buffer].size) {
        c->buffer++;
        c->at = 0;
    }
}

/*
 * Makes the next message: a part of a large buffer in place, or several small ones copied together. Empty: it was the
 * last one.
 */
static ckd_bytes next_message(cursor *c, unsigned char *together) {
    ckd_bytes message = {together, 0};
    for (skip_empty(c); c->buffer < c->from->count; skip_empty(c)) {
        const ckd_bytes *buffer = &c->from->items[c->buffer];
        const char *data = (const char *)buffer->data + c->at;
        size_t size = buffer->size - c->at;
        if (size >= SMALL && message.size == 0) {
            message = (ckd_bytes){(void *)data, size < MESSAGE_MAX ? size : MESSAGE_MAX};
            c->at += message.size;
            return message;
        }
        size_t left = SMALL - message.size;
        if (left == 0) {
            return message;
        }
        size = size < left ? size : left;
        memcpy(together + message.size, data, size);
        message.size += size;
        c->at += size;
    }
    return message;
}

/* Sends everything to one rank while receiving everything from another. */
static ckd_status exchange_with(mpi_load *g, int to, const ckd_buffers *out, int from, const ckd_bytes *in,
                                ckd_error *err) {
    cursor c = {out, 0, 0};
    size_t received = 0;
    for (;;) {
        MPI_Request requests[2] = {MPI_REQUEST_NULL, MPI_REQUEST_NULL};
        MPI_Status statuses[2];
        ckd_bytes message = next_message(&c, g->together);
        bool receiving = received < in->size;
        if (!receiving && message.size == 0) {
            return CKD_OK;
        }
        ckd_status status = CKD_OK;
        if (receiving) {
            size_t left = in->size - received;
            status = mpi_check(MPI_Irecv((char *)in->data + received,
                                         (int)(left < MESSAGE_MAX ? left : MESSAGE_MAX), MPI_BYTE, from, TAG,
                                         g->comm, &requests[0]),
                               err);
        }
        if (status == CKD_OK && message.size) {
            status = mpi_check(
                MPI_Isend(message.data, (int)message.size, MPI_BYTE, to, TAG, g->comm, &requests[1]), err);
        }
        if (status == CKD_OK) {
            status = mpi_check(MPI_Waitall(2, requests, statuses), err);
        }
        int count = 0;
        if (status == CKD_OK && receiving) {
            status = mpi_check(MPI_Get_count(&statuses[0], MPI_BYTE, &count), err);
        }
        if (status != CKD_OK) {
            return status;
        }
        received += (size_t)count;
    }
}

static ckd_status exchange(void *context, const ckd_buffers *out, const ckd_bytes *in, ckd_error *err) {
    mpi_load *g = context;
    ckd_status status = CKD_OK;
    for (int d = 1; d < g->world && status == CKD_OK; d++) {
        int to = (g->rank + d) % g->world, from = (g->rank + g->world - d) % g->world;
        status = exchange_with(g, to, &out[to], from, &in[from], err);
    }
    g->broken = g->broken || status != CKD_OK;
    return status;
}

static ckd_status all_reduce_min(void *context, uint64_t *number, ckd_error *err) {
    mpi_load *g = context;
    uint64_t own = *number;
    ckd_status status = mpi_check(MPI_Allreduce(&own, number, 1, MPI_UINT64_T, MPI_MIN, g->comm), err);
    g->broken = g->broken || status != CKD_OK;
    return status;
}

ckd_status ckd_mpi_load_all(ckd_load *load, MPI_Comm comm, const ckd_load_request *requests, size_t count,
                            unsigned allowed, ckd_error *err) {
    mpi_load g;
    g.broken = false;
    ckd_status status = mpi_check(MPI_Comm_dup(comm, &g.comm), err);
    if (status != CKD_OK) {
        return status;
    }
    MPI_Comm_rank(g.comm, &g.rank);
    MPI_Comm_size(g.comm, &g.world);
    ckd_transport t = CKD_TRANSPORT_INIT;
    t.context = &g;
    t.rank = (uint32_t)g.rank;
    t.world = (uint32_t)g.world;
    t.exchange = exchange;
    t.all_reduce_min = all_reduce_min;
    status = ckd_load_all_together(load, &t, requests, count, allowed, err);
    if (g.broken) { /* freeing is collective, too, and the other ranks may not come */
        return status;
    }
    ckd_status freed = mpi_check(MPI_Comm_free(&g.comm), status == CKD_OK ? err : NULL);
    return status == CKD_OK ? freed : status;
}
