/* Exchanges that end in the same way on all ranks. */
#include <stdlib.h>

#include "engine/ranks/internal.h"
#include "engine/ranks/collective.h"

#define ALL_WELL UINT64_MAX

/* ---- failing ---- */

/*
 * Encodes rank, status, and whether a text follows. The result is smaller than every number that ranks agree on, so the
 * minimum is the failure of the lowest rank.
 */
static uint64_t failure_of(const collective *t, ckd_status status, bool text) {
    return (uint64_t)t->rank << 9 | (uint64_t)status << 1 | text;
}

/* Returns false if memory is lacking; the others then get only the status. */
static bool make_text(collective *t, ckd_status status, const ckd_error *why) {
    ckd_bytes message = rank_message_write(status, why, false, NULL, 0);
    bool made = t->sizes && message.data && message.size <= sizeof(t->text);
    if (made) {
        memset(t->text, 0, sizeof(t->text));
        memcpy(t->text, message.data, message.size);
    }
    ckd_bytes_free(&message);
    return made;
}

static void clear_small(collective *t) {
    for (uint32_t r = 0; r < t->world; r++) {
        t->small_items[r] = t->small_in[r] = (ckd_bytes){NULL, 0};
        t->small_out[r] = (ckd_buffers){&t->small_items[r], 1};
    }
}

/* Sends the error text from the rank that failed to all others. */
static ckd_status broadcast_text(collective *t, uint32_t from, ckd_error *why, ckd_error *err) {
    ckd_bytes text = {t->text, sizeof(t->text)};
    clear_small(t);
    for (uint32_t r = 0; r < t->world && from == t->rank; r++) {
        t->small_items[r] = text;
    }
    if (from != t->rank) {
        t->small_in[from] = text;
    }
    ckd_status status = t->transport.exchange(t->transport.context, t->small_out, t->small_in, err);
    if (status == CKD_OK) {
        rank_message_read(&text, why);
    }
    return status;
}

static ckd_status fail_all(collective *t, uint64_t failure, ckd_error *err) {
    uint32_t from = (uint32_t)(failure >> 9);
    ckd_status status = (ckd_status)(failure >> 1 & 0xff);
    ckd_error why = {0};
    if (from >= t->world || status == CKD_OK || status > CKD_E_DEVICE) {
        return err_set(err, CKD_E_CORRUPT,
                       "the transport's `all_reduce_min` returned a value that no rank can have passed");
    }
    err_set(&why, status, "%s; there is no memory to say more",
            status == CKD_E_NOMEM ? "out of memory" : ckd_status_name(status));
    ckd_status spread = failure & 1 ? broadcast_text(t, from, &why, err) : CKD_OK;
    return spread == CKD_OK ? rank_error(err, from, status, &why) : spread;
}

ckd_status all_reduce_min(collective *t, uint64_t *min, ckd_status status, const ckd_error *why,
                          ckd_error *err) {
    uint64_t number = min ? *min : ALL_WELL;
    if (status != CKD_OK) {
        number = failure_of(t, status, make_text(t, status, why));
    }
    status = t->transport.all_reduce_min(t->transport.context, &number, err);
    if (status == CKD_OK && number < COLLECTIVE_MIN) {
        return fail_all(t, number, err);
    }
    if (min) {
        *min = number;
    }
    return status;
}

/* ---- beginning ---- */

ckd_status collective_begin(collective *t, const ckd_transport *transport, ckd_error *err) {
    *t = (collective){.transport = *transport, .rank = transport->rank, .world = transport->world};
    size_t world = t->world;
    t->out = calloc(world, sizeof(*t->out));
    t->received = calloc(world, sizeof(*t->received));
    t->small_items = calloc(world, sizeof(*t->small_items));
    t->small_in = calloc(world, sizeof(*t->small_in));
    t->small_out = calloc(world, sizeof(*t->small_out));
    uint8_t *sizes = calloc(world, 16);
    bool all = t->out && t->received && t->small_items && t->small_in && t->small_out && sizes;
    /* A rank without this memory cannot take part in any further exchange, not even to report the reason. */
    uint64_t number = all ? ALL_WELL : failure_of(t, CKD_E_NOMEM, false);
    ckd_status status = t->transport.all_reduce_min(t->transport.context, &number, err);
    t->sizes = sizes;
    if (status == CKD_OK && number < COLLECTIVE_MIN) {
        status = fail_all(t, number & ~UINT64_C(1), err);
    }
    if (status != CKD_OK) {
        collective_end(t);
    }
    return status;
}

void collective_drop(collective *t) {
    free(t->memory);
    t->memory = NULL;
    for (uint32_t r = 0; r < t->world && t->received; r++) {
        t->received[r] = (ckd_bytes){NULL, 0};
    }
}

void collective_end(collective *t) {
    collective_drop(t);
    free(t->out);
    free(t->received);
    free(t->small_items);
    free(t->small_in);
    free(t->small_out);
    free(t->sizes);
    *t = (collective){.world = 0};
}

/* ---- exchanging ---- */

static uint64_t size_of(const ckd_buffers *p) {
    uint64_t size = 0;
    for (size_t i = 0; i < p->count; i++) {
        size += p->items[i].size;
    }
    return size;
}

/* Exchanges the sizes of the data that the ranks will send to each other. A rank that failed sends nothing. */
static ckd_status exchange_sizes(collective *t, bool succeeded, ckd_error *err) {
    clear_small(t);
    for (uint32_t r = 0; r < t->world; r++) {
        uint8_t *to_send = t->sizes + 16 * (size_t)r, *to_receive = to_send + 8;
        store_le64(to_send, succeeded ? size_of(&t->out[r]) : 0);
        t->small_items[r] = (ckd_bytes){to_send, 8};
        t->small_in[r] = (ckd_bytes){to_receive, 8};
        if (r == t->rank) {
            memcpy(to_receive, to_send, 8);
        }
    }
    return t->transport.exchange(t->transport.context, t->small_out, t->small_in, err);
}

static ckd_status allocate_incoming(collective *t, ckd_error *why) {
    uint64_t total = 0;
    collective_drop(t);
    for (uint32_t r = 0; r < t->world; r++) {
        uint64_t size = load_le64(t->sizes + 16 * (size_t)r + 8);
        if (!size_add(&total, total, size)) {
            return err_nomem(why, SIZE_MAX, "what ranks send");
        }
    }
    t->memory = total < SIZE_MAX ? malloc(total + 1) : NULL;
    if (!t->memory) {
        return err_nomem(why, total, "what ranks send");
    }
    uint8_t *at = t->memory;
    for (uint32_t r = 0; r < t->world; r++) {
        t->received[r] = (ckd_bytes){at, load_le64(t->sizes + 16 * (size_t)r + 8)};
        at += t->received[r].size;
    }
    return CKD_OK;
}

static void copy_to_self(collective *t) {
    uint8_t *at = t->received[t->rank].data;
    for (size_t i = 0; i < t->out[t->rank].count; i++) {
        const ckd_bytes *buffer = &t->out[t->rank].items[i];
        memcpy(at, buffer->size ? buffer->data : "", buffer->size);
        at += buffer->size;
    }
}

ckd_status all_to_all(collective *t, ckd_status status, const ckd_error *why, ckd_error *err) {
    ckd_error no_room = {0};
    ckd_status sized = exchange_sizes(t, status == CKD_OK, err);
    if (sized != CKD_OK) {
        return sized;
    }
    if (status == CKD_OK) {
        status = allocate_incoming(t, &no_room);
        why = &no_room;
    }
    status = all_reduce_min(t, NULL, status, why, err);
    if (status != CKD_OK) {
        return status;
    }
    copy_to_self(t);
    return t->transport.exchange(t->transport.context, t->out, t->received, err);
}
