/* Reading a symbol stream: header, tables, then the bits from the end to the start. */
#include <string.h>

#include "base/bytes.h"
#include "codec/cpu.h"
#include "codec/symbols_work.h"

/* ---- tables ---- */

typedef struct state_filler {
    uint8_t owner[SYMBOLS_MAX_STATES];
    uint16_t visits[SYMBOLS_ALPHABET]; /* the x of a symbol's next state: count ... 2 count - 1 */
} state_filler;

CPU_INLINE void fill_states(symbols_workspace *w, unsigned table, unsigned width, bool wide,
                            state_filler *f) {
    const symbols_header *h = &w->decoding;
    const symbols_table *t = &h->table[table];
    size_t offset = (size_t)table << h->log;
    symbols_spread(f->owner, t, h->log);
    memcpy(f->visits, t->counts, sizeof(f->visits));
    uint64_t base[SYMBOLS_ALPHABET];
    uint8_t low[SYMBOLS_ALPHABET];
    for (unsigned s = t->first; s <= t->last; s++) {
        base[s] = symbols_base(h, width, table, s);
        low[s] = (uint8_t)symbols_low_bits(h, s);
    }
    for (unsigned u = 0; u < 1u << h->log; u++) {
        unsigned s = f->owner[u];
        unsigned x = f->visits[s]++;
        unsigned state_bits = h->log - (31u - (unsigned)__builtin_clz(x));
        uint16_t next = (uint16_t)((x << state_bits) - (1u << h->log));
        if (!wide) {
            w->states.narrow[offset + u] = (symbols_state){.base = (uint32_t)base[s],
                                                           .next = next,
                                                           .state_bits = (uint8_t)state_bits,
                                                           .bits = (uint8_t)(state_bits + low[s])};
        } else {
            w->states.wide[offset + u] = (symbols_state_wide){
                .base = base[s], .next = next, .state_bits = (uint8_t)state_bits, .low_bits = low[s]};
        }
    }
}

static void build_states(symbols_workspace *w, unsigned width) {
    state_filler filler;
    for (unsigned t = 0; t < w->decoding.tables; t++) {
        if (width < 8) {
            fill_states(w, t, width, false, &filler);
        } else {
            fill_states(w, t, 8, true, &filler);
        }
    }
}

/* ---- bits, downwards from the end of the payload ---- */

typedef struct bit_source {
    const uint8_t *from;
    size_t at;   /* bits below which nothing has been read */
    size_t safe; /* a word read from here on down lies inside the payload */
    bool failed;
} bit_source;

/* At most 32 bits, bit by bit where the payload is short. */
static uint64_t source_get(bit_source *s, unsigned bits) {
    if (bits > s->at) {
        s->failed = true;
        return 0;
    }
    s->at -= bits;
    uint64_t value = 0;
    for (unsigned done = 0; done < bits;) {
        size_t at = s->at + done;
        unsigned in_byte = (unsigned)(at & 7);
        value |= (uint64_t)(s->from[at >> 3] >> in_byte) << done;
        done += 8 - in_byte;
    }
    return value & ((UINT64_C(1) << bits) - 1);
}

/* ---- elements ---- */

typedef struct element_sink {
    const symbols_workspace *w;
    uint8_t *values;
    size_t n;
    const uint8_t *context;            /* NULL: all in table 0 */
    uint32_t offset[SYMBOLS_CONTEXTS]; /* of the context's table among the states */
} element_sink;

CPU_INLINE void store_integer(uint8_t *values, unsigned width, size_t i, uint64_t v) {
    switch (width) {
    case 1:
        values[i] = (uint8_t)v;
        break;
    case 2:
        store_le16(values + 2 * i, (uint16_t)v);
        break;
    case 4:
        store_le32(values + 4 * i, (uint32_t)v);
        break;
    default:
        store_le64(values + 8 * i, v);
    }
}

/* One integer, with all checks. */
static void decode_slowly(bit_source *bits, uint32_t *state, const element_sink *to, unsigned width,
                          size_t i) {
    size_t at = (to->context ? to->offset[to->context[i]] : 0) + *state;
    uint64_t base;
    unsigned state_bits, low_bits;
    if (width < 8) {
        const symbols_state *e = &to->w->states.narrow[at];
        base = e->base;
        *state = e->next;
        state_bits = e->state_bits;
        low_bits = e->bits - state_bits;
    } else {
        const symbols_state_wide *e = &to->w->states.wide[at];
        base = e->base;
        *state = e->next;
        state_bits = e->state_bits;
        low_bits = e->low_bits;
    }
    uint64_t low = low_bits > 32 ? source_get(bits, low_bits - 32) << 32 : 0;
    low |= source_get(bits, low_bits < 32 ? low_bits : 32);
    *state += (uint32_t)source_get(bits, state_bits);
    store_integer(to->values, width, i, base + low);
}

CPU_INLINE uint64_t lowest(uint64_t v, unsigned bits) {
    return v & ((UINT64_C(1) << bits) - 1);
}

/* One integer of up to 4 bytes: the state's entry, then one word that holds its state bits and low bits. */
CPU_INLINE uint32_t step_narrow(uint32_t *state, size_t *at, const symbols_state *table,
                                const uint8_t *from) {
    const symbols_state *e = table + *state;
    unsigned bits = e->bits, state_bits = e->state_bits;
    *at -= bits;
    uint64_t field = load_le64(from + (*at >> 3)) >> (*at & 7);
    *state = e->next + (uint32_t)lowest(field, state_bits);
    return e->base + (uint32_t)(lowest(field, bits) >> state_bits);
}

/* One of 8 bytes: up to 62 low bits need a second word. */
CPU_INLINE uint64_t step_wide(uint32_t *state, size_t *at, const symbols_state_wide *table,
                              const uint8_t *from) {
    const symbols_state_wide *e = table + *state;
    unsigned high_bits = e->low_bits > 32 ? e->low_bits - 32u : 0;
    unsigned bits = e->low_bits - high_bits + e->state_bits;
    *at -= high_bits;
    uint64_t high = lowest(load_le64(from + (*at >> 3)) >> (*at & 7), high_bits);
    *at -= bits;
    uint64_t field = load_le64(from + (*at >> 3)) >> (*at & 7);
    *state = e->next + (uint32_t)lowest(field, e->state_bits);
    return e->base + (high << 32 | lowest(field, bits) >> e->state_bits);
}

/* The most bits that eight integers take. */
#define FAST_BITS(width) (SYMBOLS_MAX_LANES * ((width) < 8 ? 32 + SYMBOLS_MAX_LOG : 64 + SYMBOLS_MAX_LOG))

/*
 * Eight integers at a time, one for each lane, as long as the worst eight could not read below the payload's start.
 * Starts where words can no longer reach beyond its end. Returns how many were decoded.
 */
CPU_INLINE size_t decode_fast(bit_source *bits, uint32_t *states, const element_sink *to, size_t i,
                              unsigned width, bool contexts) {
    uint32_t state[SYMBOLS_MAX_LANES];
    memcpy(state, states, sizeof(state));
    const symbols_state *const restrict narrow = to->w->states.narrow;
    const symbols_state_wide *const restrict wide = to->w->states.wide;
    const uint32_t *const restrict offset = to->offset;
    const uint8_t *const restrict context = to->context;
    const uint8_t *const restrict from = bits->from;
    uint8_t *const restrict values = to->values;
    size_t at = bits->at, end = to->n;
    for (; i + SYMBOLS_MAX_LANES <= end && at >= FAST_BITS(width); i += SYMBOLS_MAX_LANES) {
#pragma GCC unroll 8
        for (unsigned j = 0; j < SYMBOLS_MAX_LANES; j++) {
            size_t table = contexts ? offset[context[i + j]] : 0;
            if (width < 8) {
                store_integer(values, width, i + j, step_narrow(&state[j], &at, narrow + table, from));
            } else {
                store_integer(values, width, i + j, step_wide(&state[j], &at, wide + table, from));
            }
        }
    }
    memcpy(states, state, sizeof(state));
    bits->at = at;
    return i;
}

typedef size_t (*fast_loop)(bit_source *, uint32_t *, const element_sink *, size_t);

#define DEFINE_LOOPS(width)                                                                                \
    CPU_AVX2 static size_t fast_avx2_##width(bit_source *bits, uint32_t *states, const element_sink *to,   \
                                             size_t i) {                                                   \
        return to->context ? decode_fast(bits, states, to, i, width, true)                                 \
                           : decode_fast(bits, states, to, i, width, false);                               \
    }                                                                                                      \
    CPU_PLAIN static size_t fast_plain_##width(bit_source *bits, uint32_t *states, const element_sink *to, \
                                               size_t i) {                                                 \
        return to->context ? decode_fast(bits, states, to, i, width, true)                                 \
                           : decode_fast(bits, states, to, i, width, false);                               \
    }
DEFINE_LOOPS(1)
DEFINE_LOOPS(2)
DEFINE_LOOPS(4)
DEFINE_LOOPS(8)

static fast_loop loop_for(unsigned width) {
    bool avx2 = cpu_has_avx2();
    switch (width) {
    case 1:
        return avx2 ? fast_avx2_1 : fast_plain_1;
    case 2:
        return avx2 ? fast_avx2_2 : fast_plain_2;
    case 4:
        return avx2 ? fast_avx2_4 : fast_plain_4;
    default:
        return avx2 ? fast_avx2_8 : fast_plain_8;
    }
}

/* Where the payload's bits end: below the mark in its last byte. */
static bool find_end(bit_source *bits, const uint8_t *payload, size_t size) {
    if (size == 0 || payload[size - 1] == 0) {
        return false;
    }
    unsigned mark = 31u - (unsigned)__builtin_clz(payload[size - 1]);
    *bits = (bit_source){payload, 8 * (size - 1) + mark, size > 8 ? 8 * (size - 8) : 0, false};
    return true;
}

static bool decode_elements(const element_sink *to, const symbols_header *h, unsigned width,
                            bit_source *bits) {
    unsigned lanes = 1u << h->lanes_log;
    uint32_t states[SYMBOLS_MAX_LANES] = {0};
    for (unsigned j = 0; j < lanes; j++) {
        states[j] = (uint32_t)source_get(bits, h->log);
    }
    size_t i = 0;
    if (lanes == SYMBOLS_MAX_LANES) {
        for (; i < to->n && !bits->failed && (bits->at > bits->safe || i % lanes); i++) {
            decode_slowly(bits, &states[i % lanes], to, width, i);
        }
        i = bits->failed ? i : loop_for(width)(bits, states, to, i);
    }
    for (; i < to->n && !bits->failed; i++) {
        decode_slowly(bits, &states[i % lanes], to, width, i);
    }
    uint32_t left = 0;
    for (unsigned j = 0; j < lanes; j++) {
        left |= states[j];
    }
    return !bits->failed && bits->at == 0 && left == 0;
}

ckd_status symbols_decode(symbols_workspace *w, void *values, unsigned width, size_t n,
                          const uint8_t *context, const void *from, size_t size, ckd_error *err) {
    if (n > SYMBOLS_MAX_COUNT || (width != 1 && width != 2 && width != 4 && width != 8)) {
        return err_set(err, CKD_E_INVALID, "a symbol stream of %zu integers of %u bytes", n, width);
    }
    if (n == 0) {
        return size == 0
                   ? CKD_OK
                   : err_corrupt(err, NULL, CKD_NO_OFFSET, "a symbol stream of nothing has %zu bytes", size);
    }
    const symbols_header *h = &w->decoding;
    size_t used;
    ckd_status status = symbols_header_read(&w->decoding, width, from, size, &used, err);
    if (status != CKD_OK) {
        return status;
    }
    if (h->contexts && !context) {
        return err_corrupt(err, NULL, CKD_NO_OFFSET, "a symbol stream wants contexts where there are none");
    }
    bit_source bits;
    if (!find_end(&bits, (const uint8_t *)from + used, size - used)) {
        return err_corrupt(err, NULL, CKD_NO_OFFSET, "a symbol stream without an end");
    }
    build_states(w, width);
    element_sink to = {.w = w, .values = values, .n = n, .context = h->contexts ? context : NULL};
    uint8_t table_of[SYMBOLS_CONTEXTS];
    symbols_map_contexts(table_of, h);
    for (unsigned c = 0; c < SYMBOLS_CONTEXTS; c++) {
        to.offset[c] = (uint32_t)table_of[c] << h->log;
    }
    if (!decode_elements(&to, h, width, &bits)) {
        return err_corrupt(err, NULL, CKD_NO_OFFSET,
                           "a symbol stream of %zu bytes does not end where it should", size);
    }
    return CKD_OK;
}
