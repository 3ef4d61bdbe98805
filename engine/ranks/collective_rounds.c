/*
 * The rounds of a collective load. In each, ranks agree on the position up to which they exchange payloads. The rank
 * that has to hold the most limits this position. Then each rank reads what others need, sends it, takes what arrives,
 * and decodes the blocks whose turn it is.
 */
#include <stdlib.h>

#include "engine/ranks/collective_load.h"

/* ---- the end of a round ---- */

static uint64_t size_of(const collective_load *j, const send_entry *d) {
    return j->plan->nodes[d->node].record->stored_size;
}

/*
 * Returns the position before the next payload that does not fit. Turns that need no payload from that one on can also
 * be decoded.
 */
static uint64_t next_end(const collective_load *j) {
    const send_entry *d = j->send_entries;
    size_t end = j->next;
    uint64_t bytes_left = j->round_bytes;
    while (end < j->send_count &&
           (end == j->next || d[end].position == d[end - 1].position || size_of(j, &d[end]) <= bytes_left)) {
        uint64_t size = size_of(j, &d[end++]);
        bytes_left -= size < bytes_left ? size : bytes_left;
    }
    if (end == j->send_count) {
        return UINT64_MAX;
    }
    bool whole_turn = d[end].position >> 32 > d[end - 1].position >> 32;
    return whole_turn ? (d[end].position >> 32 << 32) - 1 : d[end - 1].position;
}

/* ---- reading and sending ---- */

#define PARCEL_HEADER 32 /* u64 position, id, u64 size; the payload follows */

/* The payloads that this rank sends in a round. */
typedef struct parcels {
    collective_load *j;
    size_t *entries; /* indexes of send entries */
    void **data;     /* of each; NULL: unreadable copy, each receiver reads the original itself */
    size_t count;
    uint8_t *headers;
    ckd_bytes *items;
} parcels;

static ckd_status read_one(void *context, size_t index, uint32_t worker, ckd_error *err) {
    parcels *p = context;
    const load_node *n = &p->j->plan->nodes[p->j->send_entries[p->entries[index]].node];
    p->data[index] = malloc(n->record->stored_size + 1);
    if (!p->data[index]) {
        return err_nomem(err, n->record->stored_size, "a payload that other ranks need");
    }
    p->j->load->decoders[worker].bytes_read += n->record->stored_size;
    ckd_status status = chunk_read_payload(n->chunk, n->record, p->data[index], err);
    if (status == CKD_OK) {
        return CKD_OK;
    }
    free(p->data[index]);
    p->data[index] = NULL;
    if (n->materialized && status != CKD_E_NOMEM) {
        return CKD_OK; /* the load of a single rank also goes on without the copy */
    }
    if (status == CKD_E_CORRUPT && err) {
        err->offset = n->record->offset;
    }
    return status;
}

static void write_header(uint8_t *to, const send_entry *d, uint64_t size) {
    store_le64(to, d->position);
    memcpy(to + 8, d->id.bytes, sizeof(d->id.bytes));
    store_le64(to + 24, size);
}

/* Arranges the buffers of each receiver, rank after rank. */
static ckd_status pack(parcels *p, ckd_error *err) {
    collective_load *j = p->j;
    ckd_buffers *out = j->ranks.out;
    size_t buffers = 0;
    for (size_t i = 0; i < p->count; i++) {
        const send_entry *d = &j->send_entries[p->entries[i]];
        for (uint32_t k = 0; k < d->receiver_count && p->data[i]; k++, buffers += 2) {
            out[j->receivers[d->receivers + k]].count += 2;
        }
    }
    p->headers = malloc(p->count * PARCEL_HEADER + 1);
    p->items = calloc(buffers + 1, sizeof(*p->items));
    if (!p->headers || !p->items) {
        return err_nomem(err, buffers * sizeof(*p->items), "what other ranks need");
    }
    ckd_bytes *items = p->items;
    for (uint32_t r = 0; r < j->ranks.world; r++) {
        size_t count = out[r].count;
        out[r] = (ckd_buffers){items, 0};
        items += count;
    }
    for (size_t i = 0; i < p->count; i++) {
        const send_entry *d = &j->send_entries[p->entries[i]];
        uint8_t *header = p->headers + i * PARCEL_HEADER;
        write_header(header, d, size_of(j, d));
        for (uint32_t k = 0; k < d->receiver_count && p->data[i]; k++) {
            ckd_buffers *to = &out[j->receivers[d->receivers + k]];
            ckd_bytes *at = (ckd_bytes *)to->items + to->count;
            at[0] = (ckd_bytes){header, PARCEL_HEADER};
            at[1] = (ckd_bytes){p->data[i], size_of(j, d)};
            to->count += 2;
        }
    }
    return CKD_OK;
}

static ckd_status read_for_others(parcels *p, uint64_t end, ckd_error *err) {
    collective_load *j = p->j;
    size_t last = j->next;
    while (last < j->send_count && j->send_entries[last].position <= end) {
        last++;
    }
    p->entries = malloc((last - j->next + 1) * sizeof(*p->entries));
    p->data = calloc(last - j->next + 1, sizeof(*p->data));
    if (!p->entries || !p->data) {
        return err_nomem(err, (last - j->next) * sizeof(*p->entries), "what other ranks need");
    }
    for (size_t i = j->next; i < last; i++) {
        if (j->send_entries[i].receiver_count) {
            p->entries[p->count++] = i;
        }
    }
    ckd_status status = pool_run(j->load->store->pool, p->count, read_one, p, err);
    return status == CKD_OK ? pack(p, err) : status;
}

/* This rank needs the payloads, too. They stay in memory, unless the round failed. */
static void end_parcels(parcels *p, bool good) {
    for (size_t i = 0; i < p->count; i++) {
        if (p->data[i] && good) {
            payloads_add(&p->j->payloads, p->j->send_entries[p->entries[i]].node, p->data[i]);
        } else {
            free(p->data[i]);
        }
    }
    free(p->entries);
    free(p->data);
    free(p->headers);
    free(p->items);
    memset(p->j->ranks.out, 0, p->j->ranks.world * sizeof(*p->j->ranks.out));
}

/* ---- receiving ---- */

static int by_place(const void *a, const void *b) {
    const send_entry *x = a, *y = b;
    if (x->position != y->position) {
        return x->position < y->position ? -1 : 1;
    }
    return memcmp(x->id.bytes, y->id.bytes, sizeof(x->id.bytes));
}

/* Returns the entry that a header names if it is expected, else NULL. */
static const send_entry *expected(const collective_load *j, reader *from, uint64_t end) {
    send_entry key = {.position = reader_u64(from)};
    const void *id = reader_take(from, sizeof(key.id.bytes));
    memcpy(key.id.bytes, id ? id : key.id.bytes, id ? sizeof(key.id.bytes) : 0);
    uint64_t size = reader_u64(from);
    const send_entry *d =
        j->send_count ? bsearch(&key, j->send_entries, j->send_count, sizeof(*j->send_entries), by_place)
                      : NULL;
    bool fits = d && d >= j->send_entries + j->next && d->position <= end && d->receiver_count == 0 &&
                !j->payloads.data[d->node] && size == size_of(j, d) && size <= reader_left(from);
    return fits && !from->failed ? d : NULL;
}

static ckd_status take_one(collective_load *j, uint32_t rank, reader *from, uint64_t end, ckd_error *err) {
    const send_entry *d = expected(j, from, end);
    if (!d) {
        return err_set(err, CKD_E_CORRUPT, "rank %u sent a payload that this rank did not request",
                       (unsigned)rank);
    }
    const load_node *n = &j->plan->nodes[d->node];
    void *data = malloc(n->record->stored_size + 1);
    if (!data) {
        return err_nomem(err, n->record->stored_size, "a payload from another rank");
    }
    memcpy(data, reader_take(from, n->record->stored_size), n->record->stored_size);
    if (chunk_check_payload(n->chunk, n->record, data, NULL) != CKD_OK) {
        free(data);
        err_set(err, CKD_E_CORRUPT, "the payload that rank %u sent arrived damaged", (unsigned)rank);
        err_in_file(err, CKD_E_CORRUPT, file_path(n->chunk->file));
        return err_in_tensor(err, CKD_E_CORRUPT, n->record->tensor->name);
    }
    payloads_add(&j->payloads, d->node, data);
    return CKD_OK;
}

static ckd_status take_all(collective_load *j, uint64_t end, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (uint32_t r = 0; r < j->ranks.world && status == CKD_OK; r++) {
        reader from = reader_of(j->ranks.received[r].data, j->ranks.received[r].size);
        while (reader_left(&from) && status == CKD_OK) {
            status = take_one(j, r, &from, end, err);
        }
    }
    return status;
}

/* ---- decoding ---- */

static ckd_status decode_task(collective_load *j, scheduled_task *s, uint64_t turns, ckd_error *err) {
    load_task *task = &s->task;
    size_t count = 0;
    while (task->done + count < task->count && s->turns[task->done + count] < turns) {
        count++;
    }
    return err_in_tensor(err, load_task_execute(j->load, task, count, err), task->tensor->tensor->name);
}

static ckd_status one_round(collective_load *j, uint64_t end, ckd_error *why) {
    ckd_status status = take_all(j, end, why);
    collective_drop(&j->ranks);
    while (j->next < j->send_count && j->send_entries[j->next].position <= end) {
        j->next++;
    }
    uint64_t turns = complete_turns(end);
    for (size_t i = 0; i < j->task_count && status == CKD_OK; i++) {
        status = decode_task(j, &j->tasks[i], turns, why);
    }
    payloads_trim(&j->payloads, turns, j->held_bytes);
    return status;
}

ckd_status rounds_run(collective_load *j, ckd_status status, ckd_error *why, ckd_error *err) {
    uint64_t end = 0;
    if (status == CKD_OK) {
        qsort(j->send_entries, j->send_count, sizeof(*j->send_entries), by_place);
    }
    while (end != UINT64_MAX) {
        end = status == CKD_OK ? next_end(j) : 0;
        ckd_status agreed = all_reduce_min(&j->ranks, &end, status, why, err);
        if (agreed != CKD_OK) {
            return agreed;
        }
        parcels p = {.j = j};
        status = read_for_others(&p, end, why);
        agreed = all_to_all(&j->ranks, status, why, err);
        end_parcels(&p, agreed == CKD_OK);
        if (agreed != CKD_OK) {
            return agreed;
        }
        status = one_round(j, end, why);
    }
    return all_reduce_min(&j->ranks, NULL, status, why, err);
}
