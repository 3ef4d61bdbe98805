/*
 * Reads dense streams; one thread reads all lanes of a stream. The position of an element's bits depends on all
 * elements before it, so a thread works ahead only within a round of the (up to eight) lanes. A round looks
 * up its states, adds up their bits, and then fetches them.
 */
#ifndef KERNELS_CUDA_DENSE_READ_H
#define KERNELS_CUDA_DENSE_READ_H

#include "kernels/cuda/dense.h"

typedef struct read_arguments {
    const device_decoding *all;
    uint32_t count;
} read_arguments;

/* ---- states: next 12 bits; state bits 4; low bits 6; symbol 8, counted from the table's first ---- */

DEVICE_FN uint32_t entry_of(uint32_t next, uint32_t state_bits, uint32_t low, uint32_t symbol) {
    return next | state_bits << 12 | low << 16 | symbol << 22;
}
DEVICE_FN uint32_t entry_next(uint32_t entry) {
    return entry & 4095u;
}
DEVICE_FN uint32_t entry_state_bits(uint32_t entry) {
    return entry >> 12 & 15u;
}
DEVICE_FN uint32_t entry_low(uint32_t entry) {
    return entry >> 16 & 63u;
}
DEVICE_FN uint32_t entry_symbol(uint32_t entry) {
    return entry >> 22;
}

DEVICE_FN void read_tables(const place *at, const read_arguments *a, table_shared *s, table_own *own,
                           int phase) {
    (void)own;
    const device_decoding *d = &a->all[at->span];
    const device_tables *t = &d->tables;
    const uint32_t table = at->block;
    if (!table_is_spread(at, t, s, phase)) {
        return;
    }
    if (at->thread < table_symbols(t, table)) {
        const device_symbol *symbol = &t->symbol[t->first[table] + at->thread];
        uint32_t x = symbol->states, states = 1u << t->log, *to = d->states + (table << t->log);
        for (uint32_t u = 0; u < states; u++) {
            if (s->owner[u] == at->thread) {
                uint32_t state_bits = t->log - floor_log2(x);
                to[u] = entry_of((x << state_bits) - states, state_bits, symbol->low, at->thread);
                x++;
            }
        }
    }
}
KERNEL_IN_PHASES(read_tables, read_arguments, table_shared, table_own, 2)

/* ---- elements ---- */

/* Returns at most 32 bits from `at` on, all of which must exist. */
DEVICE_FN uint32_t payload_bits(const uint32_t *words, uint32_t at, uint32_t bits) {
    uint32_t in_word = at % 32;
    uint64_t value = 0;
    if (bits) {
        value = words[at / 32] >> in_word;
    }
    if (in_word + bits > 32) {
        value |= (uint64_t)words[at / 32 + 1] << (32 - in_word);
    }
    return (uint32_t)(value & ((UINT64_C(1) << bits) - 1));
}

DEVICE_FN void store_integer(void *to, uint32_t width, uint32_t i, uint64_t v) {
    switch (width) {
    case 1:
        ((uint8_t *)to)[i] = (uint8_t)v;
        break;
    case 2:
        ((uint16_t *)to)[i] = (uint16_t)v;
        break;
    case 4:
        ((uint32_t *)to)[i] = (uint32_t)v;
        break;
    default:
        ((uint64_t *)to)[i] = v;
    }
}

/* A stream, for its thread's registers, and the reader's position. */
typedef struct stream_reader {
    const uint32_t *payload, *states, *first;
    const device_symbol *symbol;
    const uint8_t *contexts, *table_of;
    void *integers;
    uint64_t shared;
    uint32_t n, lanes, log, width, shift;
    uint32_t context_step; /* 0: all elements have the context that `contexts` points to */
    uint32_t last;         /* index of the payload's last word */
    uint32_t at;           /* number of bits not read yet; reading goes down */
} stream_reader;

/* States of the lanes, and the table of each lane's next element, with the number of its first symbol. */
typedef struct stream_lanes {
    uint32_t state[DEVICE_STREAM_LANES], table[DEVICE_STREAM_LANES], first[DEVICE_STREAM_LANES];
} stream_lanes;

DEVICE_FN stream_reader stream_reader_of(const device_decoding *d) {
    stream_reader r;
    r.payload = d->payload;
    r.states = d->states;
    r.first = d->tables.first;
    r.symbol = d->tables.symbol;
    r.contexts = d->contexts ? d->contexts : (const uint8_t *)&d->tables.zero;
    r.context_step = d->contexts ? 1 : 0;
    r.last = d->bits ? (d->bits - 1) / 32 : 0;
    r.table_of = d->tables.table_of;
    r.integers = d->integers;
    r.shared = d->shared;
    r.n = d->n;
    r.lanes = d->tables.lanes;
    r.log = d->tables.log;
    r.width = d->tables.width;
    r.shift = d->tables.shift;
    r.at = d->bits;
    return r;
}

DEVICE_FN uint32_t reader_take(stream_reader *r, uint32_t bits) {
    r->at -= bits;
    return payload_bits(r->payload, r->at, bits);
}

/* Looks up the tables of the elements from i on. */
DEVICE_FN void lanes_look(stream_lanes *lanes, const stream_reader *r, uint32_t i) {
    UNROLL for (uint32_t j = 0; j < DEVICE_STREAM_LANES; j++) {
        lanes->table[j] = 0;
        if (j < r->lanes && i + j < r->n) {
            lanes->table[j] = r->table_of[r->contexts[(i + j) * r->context_step]];
        }
        lanes->first[j] = r->first[lanes->table[j]];
    }
}

/*
 * Reads the element that has this entry, and sets the lane's next state. It stores nothing in memory: compilers cannot
 * move a load before a store that it may depend on, so each element would wait for its own loads.
 */
DEVICE_FN uint64_t read_one(stream_reader *r, stream_lanes *lanes, uint32_t j, uint32_t entry,
                            uint64_t base) {
    uint32_t low = entry_low(entry), high = low > 32 ? low - 32 : 0;
    uint64_t value = (uint64_t)reader_take(r, high) << 32;
    value |= reader_take(r, low - high);
    lanes->state[j] = entry_next(entry) + reader_take(r, entry_state_bits(entry));
    return (value + base) << r->shift | r->shared;
}

/* Reads one element per lane, from element i on. Returns false if bits are missing. */
DEVICE_FN bool read_round(stream_reader *r, stream_lanes *lanes, uint32_t i) {
    uint32_t entry[DEVICE_STREAM_LANES], bits = 0;
    uint64_t value[DEVICE_STREAM_LANES];
    UNROLL for (uint32_t j = 0; j < DEVICE_STREAM_LANES; j++) {
        entry[j] = 0;
        if (j < r->lanes && i + j < r->n) {
            entry[j] = r->states[(lanes->table[j] << r->log) + lanes->state[j]];
            bits += entry_state_bits(entry[j]) + entry_low(entry[j]);
        }
    }
    UNROLL for (uint32_t j = 0; j < DEVICE_STREAM_LANES; j++) {
        value[j] = 0;
        if (j < r->lanes && i + j < r->n) {
            value[j] = r->symbol[lanes->first[j] + entry_symbol(entry[j])].base;
        }
    }
    lanes_look(lanes, r, i + r->lanes); /* while the others are being fetched */
    if (bits > r->at) {
        return false;
    }
    UNROLL for (uint32_t j = 0; j < DEVICE_STREAM_LANES; j++) {
        if (j < r->lanes && i + j < r->n) {
            value[j] = read_one(r, lanes, j, entry[j], value[j]);
        }
    }
    UNROLL for (uint32_t j = 0; j < DEVICE_STREAM_LANES; j++) {
        if (j < r->lanes && i + j < r->n) {
            store_integer(r->integers, r->width, i + j, value[j]);
        }
    }
    return true;
}

/* ---- full rounds ---- */

/* Returns the 64 bits from bit `at` on. The payload's last word stands for missing words. */
DEVICE_FN uint64_t window_at(const stream_reader *r, uint32_t at) {
    const uint32_t word = at / 32, shift = at % 32;
    const uint32_t second = word + 1 < r->last ? word + 1 : r->last,
                   third = word + 2 < r->last ? word + 2 : r->last;
    const uint64_t low = r->payload[word < r->last ? word : r->last] | (uint64_t)r->payload[second] << 32;
    const uint64_t high = r->payload[third];
    return low >> shift | (high << 1) << (63 - shift);
}

/*
 * As read_round, but for all eight lanes, each with another element behind, and for at most 32 low bits. It has no
 * conditions: a condition around a load makes the thread wait there, so loads do not overlap. Most rounds of most
 * streams are full.
 */
DEVICE_FN bool read_full_round(stream_reader *r, stream_lanes *lanes, uint32_t i) {
    uint32_t entry[DEVICE_STREAM_LANES], after[DEVICE_STREAM_LANES], below[DEVICE_STREAM_LANES], at = r->at;
    uint64_t value[DEVICE_STREAM_LANES], window[DEVICE_STREAM_LANES];
    UNROLL for (uint32_t j = 0; j < DEVICE_STREAM_LANES; j++) {
        entry[j] = r->states[(lanes->table[j] << r->log) + lanes->state[j]];
    }
    UNROLL for (uint32_t j = 0; j < DEVICE_STREAM_LANES; j++) {
        after[j] = r->table_of[r->contexts[(i + DEVICE_STREAM_LANES + j) * r->context_step]];
    }
    UNROLL for (uint32_t j = 0; j < DEVICE_STREAM_LANES; j++) {
        at -= entry_low(entry[j]) + entry_state_bits(entry[j]);
        below[j] = at; /* wraps if bits are missing: then nothing of the round counts */
        value[j] = r->symbol[lanes->first[j] + entry_symbol(entry[j])].base;
    }
    if (at > r->at) {
        return false;
    }
    UNROLL for (uint32_t j = 0; j < DEVICE_STREAM_LANES; j++) {
        window[j] = window_at(r, below[j]);
    }
    UNROLL for (uint32_t j = 0; j < DEVICE_STREAM_LANES; j++) {
        const uint32_t state_bits = entry_state_bits(entry[j]);
        const uint64_t low = window[j] >> state_bits & ((UINT64_C(1) << entry_low(entry[j])) - 1);
        value[j] = (value[j] + low) << r->shift | r->shared;
        lanes->state[j] = entry_next(entry[j]) + ((uint32_t)window[j] & ((1u << state_bits) - 1));
        lanes->table[j] = after[j];
        lanes->first[j] = r->first[after[j]];
    }
    UNROLL for (uint32_t j = 0; j < DEVICE_STREAM_LANES; j++) {
        store_integer(r->integers, r->width, i + j, value[j]);
    }
    r->at = at;
    return true;
}

DEVICE_FN bool read_all(stream_reader *r) {
    stream_lanes lanes;
    uint32_t left = 0, i = 0;
    if (r->lanes * r->log > r->at) {
        return false;
    }
    UNROLL for (uint32_t j = 0; j < DEVICE_STREAM_LANES; j++) {
        lanes.state[j] = j < r->lanes ? reader_take(r, r->log) : 0;
    }
    lanes_look(&lanes, r, 0);
    if (r->lanes == DEVICE_STREAM_LANES && r->width <= sizeof(uint32_t)) {
        for (; i + 2 * DEVICE_STREAM_LANES <= r->n; i += DEVICE_STREAM_LANES) {
            if (!read_full_round(r, &lanes, i)) {
                return false;
            }
        }
    }
    for (; i < r->n; i += r->lanes) {
        if (!read_round(r, &lanes, i)) {
            return false;
        }
    }
    UNROLL for (uint32_t j = 0; j < DEVICE_STREAM_LANES; j++) {
        left |= lanes.state[j];
    }
    return r->at == 0 && left == 0;
}

DEVICE_FN void read_stream(const place *at, const read_arguments *a) {
    uint32_t stream = spread_stream(at);
    if (at->thread % DEVICE_STREAM_LANES == 0 && stream < a->count) {
        stream_reader r = stream_reader_of(&a->all[stream]);
        *a->all[stream].failed = !read_all(&r);
    }
}
KERNEL(read_stream, read_arguments)

#endif
