/*
 * Decides which rank reads which payload. Each rank sends its needed payloads to their directory ranks, which follow
 * from the payloads' ids. A directory rank sees which payloads several ranks need, and decides who reads them. Reading
 * is balanced by bytes, including what ranks read for themselves. The largest payload comes first; the rank with the
 * least so far reads it (Graham, "Bounds on multiprocessing timing anomalies", 1969). If several directory ranks see a
 * part each, every part is balanced, and so is their sum, because ids spread evenly.
 */
#include <stdlib.h>

#include "engine/ranks/collective.h"

typedef struct entry {
    hash128 id;
    uint64_t size;
    uint32_t rank, index, turn;
} entry;

/* Entries [first, first + count), all of one payload. */
typedef struct meeting {
    size_t first, count;
    uint64_t size;
} meeting;

typedef struct tables {
    entry *entries;
    meeting *meetings;
    uint64_t *loads; /* by rank: bytes to read */
    size_t count, meeting_count;
} tables;

void reader_list_add(bytes *list, const hash128 *id, uint64_t size, uint32_t turn) {
    bytes_put(list, id->bytes, sizeof(id->bytes));
    bytes_put_u64(list, size);
    bytes_put_u32(list, turn);
}

uint32_t directory_rank_of(const hash128 *id, uint32_t ranks) {
    return (uint32_t)(load_le64(id->bytes) % ranks);
}

uint64_t complete_turns(uint64_t place) {
    uint64_t turns = place >> 32;
    bool whole = (uint32_t)place == UINT32_MAX;
    return place == UINT64_MAX ? UINT64_MAX : turns > 0 && !whole ? turns - 1 : turns;
}

/* Within a turn, payloads are ordered by id, so that a round may end inside a turn. */
static uint64_t place_of(uint32_t turn, const hash128 *id) {
    uint64_t at = turn < UINT32_MAX - 1 ? turn : UINT32_MAX - 2;
    return (at + 1) << 32 | load_le32(id->bytes + 8);
}

/* ---- reading the lists ---- */

static void read_list(tables *x, uint32_t rank, const ckd_bytes *list) {
    reader at = reader_of(list->data, list->size);
    for (uint32_t i = 0; reader_left(&at) >= READER_ENTRY; i++) {
        entry *e = &x->entries[x->count++];
        memcpy(e->id.bytes, reader_take(&at, sizeof(e->id.bytes)), sizeof(e->id.bytes));
        e->size = reader_u64(&at);
        e->turn = reader_u32(&at);
        e->rank = rank;
        e->index = i;
    }
}

static int by_payload(const void *a, const void *b) {
    const entry *x = a, *y = b;
    int order = memcmp(x->id.bytes, y->id.bytes, sizeof(x->id.bytes));
    if (order || x->size != y->size) {
        return order ? order : x->size < y->size ? -1 : 1;
    }
    if (x->rank != y->rank) {
        return x->rank < y->rank ? -1 : 1;
    }
    return x->index < y->index ? -1 : x->index > y->index;
}

/* Largest first, so that small ones even out the rest. */
static int by_size(const void *a, const void *b) {
    const meeting *x = a, *y = b;
    if (x->size != y->size) {
        return x->size > y->size ? -1 : 1;
    }
    return x->first < y->first ? -1 : x->first > y->first;
}

static bool same_payload(const entry *a, const entry *b) {
    return a->size == b->size && hash128_equal(&a->id, &b->id);
}

/* A payload that only one rank needs adds to its load. A rank that names a payload twice counts once. */
static void find_shared_payloads(tables *x) {
    for (size_t i = 0; i < x->count;) {
        meeting m = {i, 0, x->entries[i].size};
        size_t end = i;
        for (; end < x->count && same_payload(&x->entries[end], &x->entries[i]); end++) {
            if (m.count == 0 || x->entries[end].rank != x->entries[m.first + m.count - 1].rank) {
                x->entries[m.first + m.count++] = x->entries[end];
            }
        }
        if (m.count > 1) {
            x->meetings[x->meeting_count++] = m;
        } else {
            uint64_t *load = &x->loads[x->entries[i].rank];
            *load += m.size < UINT64_MAX - *load ? m.size : 0;
        }
        i = end;
    }
    qsort(x->meetings, x->meeting_count, sizeof(*x->meetings), by_size);
}

/* ---- assigning ---- */

/* Returns the rank with the least to read. The id breaks ties, so that they do not all go to the first rank. */
static const entry *choose_reader(const tables *x, const meeting *m) {
    const entry *entries = &x->entries[m->first];
    size_t start = load_le32(entries->id.bytes + 12) % m->count;
    const entry *best = &entries[start];
    for (size_t i = 1; i < m->count; i++) {
        const entry *e = &entries[(start + i) % m->count];
        best = x->loads[e->rank] < x->loads[best->rank] ? e : best;
    }
    return best;
}

static void reply_all(const tables *x, const meeting *m, const entry *chosen, bytes *replies) {
    uint32_t turn = UINT32_MAX;
    for (size_t i = 0; i < m->count; i++) {
        const entry *e = &x->entries[m->first + i];
        turn = e->turn < turn ? e->turn : turn;
    }
    for (size_t i = 0; i < m->count; i++) {
        const entry *e = &x->entries[m->first + i];
        bytes *to = &replies[e->rank];
        bytes_put_u32(to, e->index);
        bytes_put_u64(to, place_of(turn, &e->id));
        bytes_put_u32(to, e == chosen ? (uint32_t)m->count - 1 : 0);
        for (size_t k = 0; e == chosen && k < m->count; k++) {
            if (k != i) {
                bytes_put_u32(to, x->entries[m->first + k].rank);
            }
        }
    }
}

static ckd_status take_scratch(tables *x, const ckd_bytes *lists, uint32_t world, ckd_error *err) {
    size_t max = 0;
    for (uint32_t r = 0; r < world; r++) {
        if (lists[r].size % READER_ENTRY || lists[r].size / READER_ENTRY > UINT32_MAX) {
            return err_set(err, CKD_E_CORRUPT, "what rank %u sent is no list of payloads", (unsigned)r);
        }
        max += lists[r].size / READER_ENTRY;
    }
    x->entries = calloc(max + 1, sizeof(*x->entries));
    x->meetings = calloc(max / 2 + 1, sizeof(*x->meetings));
    x->loads = calloc(world, sizeof(*x->loads));
    return x->entries && x->meetings && x->loads
               ? CKD_OK
               : err_nomem(err, max * sizeof(*x->entries), "what ranks need");
}

ckd_status assign_readers(bytes *replies, const ckd_bytes *lists, uint32_t world, ckd_error *err) {
    tables x = {.count = 0};
    ckd_status status = take_scratch(&x, lists, world, err);
    for (uint32_t r = 0; r < world && status == CKD_OK; r++) {
        read_list(&x, r, &lists[r]);
    }
    if (status == CKD_OK) {
        qsort(x.entries, x.count, sizeof(*x.entries), by_payload);
        find_shared_payloads(&x);
    }
    for (size_t i = 0; i < x.meeting_count; i++) {
        const meeting *m = &x.meetings[i];
        const entry *chosen = choose_reader(&x, m);
        uint64_t *load = &x.loads[chosen->rank];
        *load += m->size < UINT64_MAX - *load ? m->size : 0;
        reply_all(&x, m, chosen, replies);
    }
    for (uint32_t r = 0; r < world && status == CKD_OK; r++) {
        status = replies[r].failed ? err_nomem(err, replies[r].size, "what ranks read") : CKD_OK;
    }
    free(x.entries);
    free(x.meetings);
    free(x.loads);
    return status;
}

bool reader_reply_next(reader_reply *out, reader *from, uint32_t world) {
    if (reader_left(from) == 0) {
        return false;
    }
    out->index = reader_u32(from);
    out->position = reader_u64(from);
    out->receiver_count = reader_u32(from);
    bool possible = !from->failed && out->receiver_count < world && out->position >= COLLECTIVE_MIN;
    out->receivers = possible ? reader_take(from, 4 * (size_t)out->receiver_count) : NULL;
    for (uint32_t i = 0; out->receivers && i < out->receiver_count; i++) {
        possible = possible && load_le32(out->receivers + 4 * (size_t)i) < world;
    }
    from->failed = from->failed || !possible;
    return !from->failed;
}
