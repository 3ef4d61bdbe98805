/*
 * Writes dense streams. The coder is a stack, so it takes elements from the last to the first. Only a lane's
 * states depend on each other. So up to eight threads take one lane each and record the state bits that each
 * element writes. All threads then count the bits that come before theirs, and write in parallel.
 */
#ifndef KERNELS_CUDA_DENSE_WRITE_H
#define KERNELS_CUDA_DENSE_WRITE_H

#include "kernels/cuda/dense.h"
#include "kernels/cuda/symbols.h"

typedef struct write_arguments {
    const device_encoding *all;
    uint32_t count;
} write_arguments;

/* ---- tables ---- */

DEVICE_FN device_code code_of(const device_symbol *s, uint32_t log) {
    uint32_t n = s->states, max = n == 1 ? log : log - floor_log2(n - 1);
    device_code code;
    code.base = s->base;
    code.add_bits = (max << 16) - (n << max);
    code.next = (int16_t)((int32_t)s->before - (int32_t)n);
    code.low = s->low;
    code.unused = 0;
    return code;
}

DEVICE_FN void write_tables(const place *at, const write_arguments *a, table_shared *s, table_own *own,
                            int phase) {
    (void)own;
    const device_encoding *e = &a->all[at->span];
    const device_tables *t = &e->tables;
    const uint32_t table = at->block;
    if (!table_is_spread(at, t, s, phase)) {
        return;
    }
    const device_symbol *first = &t->symbol[t->first[table]];
    uint32_t finest = table * DEVICE_SYMBOLS + at->thread, states = 1u << t->log;
    e->codes[finest] = code_of(&first[e->own[finest]], t->log);
    if (at->thread < table_symbols(t, table)) {
        uint16_t *next = e->next + (table << t->log) + first[at->thread].before;
        for (uint32_t u = 0; u < states; u++) {
            if (s->owner[u] == at->thread) {
                *next++ = (uint16_t)(states + u);
            }
        }
    }
}
KERNEL_IN_PHASES(write_tables, write_arguments, table_shared, table_own, 2)

/* ---- states ---- */

#define TRACE_BITS  12u /* state bits of a trace, which has their number above them */
#define TRACE_AHEAD 4u  /* elements whose codes are fetched before their states are known */

/* Addresses of elements' codes, for a thread's registers. */
typedef struct code_source {
    const device_code *codes;
    const uint8_t *symbols, *contexts, *table_of;
} code_source;

DEVICE_FN code_source codes_of(const device_encoding *e) {
    code_source from = {e->codes, e->symbols, e->contexts, e->tables.table_of};
    return from;
}
DEVICE_FN uint32_t table_at(const code_source *from, uint32_t i) {
    return from->table_of[from->contexts ? from->contexts[i] : 0];
}
DEVICE_FN const device_code *code_at(const code_source *from, uint32_t i) {
    return &from->codes[table_at(from, i) * DEVICE_SYMBOLS + from->symbols[i]];
}

/* The codes of a lane's next elements: their number, their add_bits, and their tables of next states. */
typedef struct codes_ahead {
    uint32_t some, add[TRACE_AHEAD];
    const uint16_t *next[TRACE_AHEAD];
} codes_ahead;

/* Fetches the codes of the last of a lane's `left` elements. */
DEVICE_FN codes_ahead codes_look(const code_source *from, const device_encoding *e, uint32_t lane,
                                 uint32_t left) {
    const uint32_t lanes = e->tables.lanes, last = left ? lane + lanes * (left - 1) : 0;
    codes_ahead c;
    c.some = left < TRACE_AHEAD ? left : TRACE_AHEAD;
    UNROLL for (uint32_t j = 0; j < TRACE_AHEAD; j++) {
        c.add[j] = 0;
        c.next[j] = e->next;
        if (j < c.some) {
            const uint32_t i = last - lanes * j, table = table_at(from, i);
            const device_code *code = &from->codes[table * DEVICE_SYMBOLS + from->symbols[i]];
            c.add[j] = code->add_bits;
            c.next[j] = e->next + (table << e->tables.log) + code->next; /* code->next may be negative */
        }
    }
    return c;
}

/* Fetches codes before it stores traces, as the compiler does not move a load before a store. */
DEVICE_FN uint32_t write_lane(const device_encoding *e, uint32_t lane) {
    const uint32_t lanes = e->tables.lanes;
    const code_source from = codes_of(e);
    uint16_t *const trace = e->trace;
    uint32_t state = 1u << e->tables.log, left = e->n > lane ? (e->n - lane + lanes - 1) / lanes : 0;
    codes_ahead now = codes_look(&from, e, lane, left);
    while (left) {
        const codes_ahead after = codes_look(&from, e, lane, left - now.some);
        uint16_t traced[TRACE_AHEAD];
        uint32_t last = lane + lanes * (left - 1);
        UNROLL for (uint32_t j = 0; j < TRACE_AHEAD; j++) {
            traced[j] = 0;
            if (j < now.some) {
                uint32_t bits = (state + now.add[j]) >> 16;
                traced[j] = (uint16_t)((state & ((1u << bits) - 1)) | bits << TRACE_BITS);
                state = now.next[j][state >> bits];
            }
        }
        UNROLL for (uint32_t j = 0; j < TRACE_AHEAD; j++) {
            if (j < now.some) {
                trace[last - lanes * j] = traced[j];
            }
        }
        left -= now.some;
        now = after;
    }
    return state;
}

DEVICE_FN void write_states(const place *at, const write_arguments *a) {
    uint32_t stream = spread_stream(at), lane = at->thread % DEVICE_STREAM_LANES;
    if (stream < a->count && lane < a->all[stream].tables.lanes) {
        const device_encoding *e = &a->all[stream];
        e->last[lane] = (uint16_t)(write_lane(e, lane) - (1u << e->tables.log));
    }
}
KERNEL(write_states, write_arguments)

/* ---- bits ---- */

typedef struct write_shared {
    uint32_t bits[LAUNCH_THREADS]; /* of each thread's elements; later of all elements behind them */
} write_shared;

DEVICE_FN uint32_t bits_of(const device_encoding *e, const code_source *from, uint32_t i) {
    return (e->trace[i] >> TRACE_BITS) + code_at(from, i)->low;
}

DEVICE_FN void write_sizes(const place *at, const write_arguments *a, write_shared *s, table_own *own,
                           int phase) {
    (void)own;
    const device_encoding *e = &a->all[at->span];
    const uint32_t groups = DEVICE_WRITE_GROUPS(e->n), first = at->block * DEVICE_WRITE_ALL;
    if (at->block >= groups) {
        return;
    }
    if (phase == 0) {
        const code_source from = codes_of(e);
        uint32_t bits = 0;
        for (uint32_t turn = 0; turn < DEVICE_WRITE_EACH; turn++) {
            uint32_t i = first + turn * LAUNCH_THREADS + at->thread;
            bits += i < e->n ? bits_of(e, &from, i) : 0;
        }
        s->bits[at->thread] = bits;
        for (uint32_t w = at->block * LAUNCH_THREADS + at->thread; w < e->capacity;
             w += groups * LAUNCH_THREADS) {
            e->payload[w] = 0;
        }
    } else if (at->thread == 0) {
        uint32_t bits = 0;
        for (uint32_t i = 0; i < LAUNCH_THREADS; i++) {
            bits += s->bits[i];
        }
        e->group_bits[at->block] = bits;
    }
}
KERNEL_IN_PHASES(write_sizes, write_arguments, write_shared, table_own, 2)

/* Bits to write. A thread shares its first and its last word with other threads. */
typedef struct bit_writer {
    uint64_t bits;
    uint32_t *words;
    uint32_t count, word, capacity;
    bool first;
} bit_writer;

DEVICE_FN void writer_word(bit_writer *w, bool whole) {
    if (w->word < w->capacity) {
        if (whole && !w->first) {
            w->words[w->word] = (uint32_t)w->bits;
        } else {
            or_u32(&w->words[w->word], (uint32_t)w->bits);
        }
    }
    w->first = false;
    w->word++;
    w->bits >>= 32;
}

/* Puts at most 32 bits. */
DEVICE_FN void writer_put(bit_writer *w, uint32_t value, uint32_t bits) {
    w->bits |= (uint64_t)value << w->count;
    w->count += bits;
    if (w->count >= 32) {
        writer_word(w, true);
        w->count -= 32;
    }
}

DEVICE_FN void write_one(bit_writer *w, const device_encoding *e, const code_source *from, uint32_t i) {
    const device_code *code = code_at(from, i);
    uint32_t trace = e->trace[i], low = code->low, first = low < 32 ? low : 32;
    writer_put(w, trace & ((1u << TRACE_BITS) - 1), trace >> TRACE_BITS);
    if (low) {
        uint64_t value = (integer_at(e->integers, e->tables.width, i) >> e->tables.shift) - code->base;
        value &= (UINT64_C(1) << low) - 1;
        writer_put(w, (uint32_t)value, first);
        writer_put(w, (uint32_t)(value >> 32), low - first);
    }
}

/* Writes the final states and the mark, which follow the first element. */
DEVICE_FN void write_end(bit_writer *w, const device_encoding *e) {
    for (uint32_t lane = e->tables.lanes; lane-- > 0;) {
        writer_put(w, e->last[lane], e->tables.log);
    }
    writer_put(w, 1, 1);
    *e->bits = 32 * w->word + w->count;
}

DEVICE_FN void write_share(const place *at, const device_encoding *e, uint32_t before) {
    uint32_t first = at->block * DEVICE_WRITE_ALL + at->thread * DEVICE_WRITE_EACH;
    uint32_t end = first + DEVICE_WRITE_EACH < e->n ? first + DEVICE_WRITE_EACH : e->n;
    if (first >= e->n) {
        return;
    }
    const code_source from = codes_of(e);
    bit_writer w = {0, e->payload, before % 32, before / 32, e->capacity, true};
    for (uint32_t i = end; i-- > first;) {
        write_one(&w, e, &from, i);
    }
    if (first == 0) {
        write_end(&w, e);
    }
    if (w.count) {
        writer_word(&w, false);
    }
}

DEVICE_FN void write_bits(const place *at, const write_arguments *a, write_shared *s, table_own *own,
                          int phase) {
    (void)own;
    const device_encoding *e = &a->all[at->span];
    const uint32_t groups = DEVICE_WRITE_GROUPS(e->n);
    if (at->block >= groups) {
        return;
    }
    if (phase == 0) {
        const code_source from = codes_of(e);
        uint32_t first = at->block * DEVICE_WRITE_ALL + at->thread * DEVICE_WRITE_EACH, bits = 0;
        for (uint32_t i = first; i < first + DEVICE_WRITE_EACH && i < e->n; i++) {
            bits += bits_of(e, &from, i);
        }
        s->bits[at->thread] = bits;
    } else if (phase == 1 && at->thread == 0) {
        uint32_t before = 0;
        for (uint32_t g = at->block + 1; g < groups; g++) {
            before += e->group_bits[g];
        }
        for (uint32_t i = LAUNCH_THREADS; i-- > 0;) {
            uint32_t bits = s->bits[i];
            s->bits[i] = before;
            before += bits;
        }
    } else if (phase == 2) {
        write_share(at, e, s->bits[at->thread]);
    }
}
KERNEL_IN_PHASES(write_bits, write_arguments, write_shared, table_own, 3)

#endif
