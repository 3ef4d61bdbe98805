/* Reads a dense symbol stream: header, tables, then the bits from the end to the start. */
#include <string.h>

#include "base/bytes.h"
#include "codec/common/common.h"
#include "codec/entropy/symbols_work.h"

/* ---- tables ---- */

/* Data shared by all states of a symbol, and the x of the next state: count ... 2 count - 1. */
typedef struct symbol_fill {
    uint64_t base;
    uint32_t x, low;
} symbol_fill;

static void prepare(symbol_fill *fills, const symbols_header *h, unsigned width, unsigned table) {
    const symbols_table *t = &h->table[table];
    for (unsigned s = t->first; s <= t->last; s++) {
        symbols_meaning meaning = symbols_mean(h, width, table, s);
        fills[s] = (symbol_fill){meaning.base, t->counts[s], meaning.low};
    }
}

/* One store instead of four: filling tables takes a tenth of the time of decoding a block. */
CPU_INLINE void store_state(symbols_state *to, uint32_t base, unsigned next, unsigned state_bits,
                            unsigned bits) {
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    uint64_t all = base | (uint64_t)next << 32 | (uint64_t)state_bits << 48 | (uint64_t)bits << 56;
    memcpy(to, &all, sizeof(all));
#else
    *to = (symbols_state){base, (uint16_t)next, (uint8_t)state_bits, (uint8_t)bits};
#endif
}

static void fill_narrow(symbols_state *to, const uint8_t *owner, symbol_fill *fills, unsigned log) {
    for (unsigned u = 0; u < 1u << log; u++) {
        symbol_fill *f = &fills[owner[u]];
        unsigned x = f->x++;
        unsigned state_bits = log - (31u - (unsigned)__builtin_clz(x));
        store_state(&to[u], (uint32_t)f->base, (x << state_bits) - (1u << log), state_bits,
                    state_bits + f->low);
    }
}

static void fill_wide(symbols_state_wide *to, const uint8_t *owner, symbol_fill *fills, unsigned log) {
    for (unsigned u = 0; u < 1u << log; u++) {
        symbol_fill *f = &fills[owner[u]];
        unsigned x = f->x++;
        unsigned state_bits = log - (31u - (unsigned)__builtin_clz(x));
        to[u] = (symbols_state_wide){.base = f->base,
                                     .next = (uint16_t)((x << state_bits) - (1u << log)),
                                     .state_bits = (uint8_t)state_bits,
                                     .low_bits = (uint8_t)f->low};
    }
}

static void build_states(symbols_workspace *w, unsigned width) {
    const symbols_header *h = &w->decoding;
    uint8_t owner[SYMBOLS_MAX_STATES];
    symbol_fill fills[SYMBOLS_ALPHABET];
    for (unsigned t = 0; t < h->tables; t++) {
        prepare(fills, h, width, t);
        symbols_spread(owner, &h->table[t], h->log);
        if (width < 8) {
            fill_narrow(w->states.narrow + ((size_t)t << h->log), owner, fills, h->log);
        } else {
            fill_wide(w->states.wide + ((size_t)t << h->log), owner, fills, h->log);
        }
    }
}

/* ---- bits, read downwards from the end of the payload ---- */

typedef struct bit_source {
    const uint8_t *from;
    size_t at;    /* bits below this are unread */
    size_t words; /* a word read below this is inside the payload */
    bool failed;
} bit_source;

CPU_INLINE uint64_t lowest(uint64_t v, unsigned bits) {
    return v & ((UINT64_C(1) << bits) - 1);
}

/* Returns the bits from `at` on; at least 57 are valid. */
CPU_INLINE uint64_t word_at(const uint8_t *from, size_t at) {
    return load_le64(from + (at >> 3)) >> (at & 7);
}

/* Reads at most 32 bits. */
static uint64_t source_get(bit_source *s, unsigned bits) {
    if (bits > s->at) {
        s->failed = true;
        return 0;
    }
    s->at -= bits;
    if (s->at < s->words) {
        return lowest(word_at(s->from, s->at), bits);
    }
    uint64_t value = 0;
    for (unsigned done = 0; done < bits;) {
        size_t at = s->at + done;
        unsigned in_byte = (unsigned)(at & 7);
        value |= (uint64_t)(s->from[at >> 3] >> in_byte) << done;
        done += 8 - in_byte;
    }
    return lowest(value, bits);
}

/* ---- elements ---- */

typedef struct element_sink {
    /* Per context, its table. Without contexts all elements use context 0. */
    const symbols_state *narrow[SYMBOLS_CONTEXTS];
    const symbols_state_wide *wide[SYMBOLS_CONTEXTS];
    uint8_t *values;
    size_t n;
    const uint8_t *context; /* NULL: none */
    bool bare;              /* no symbol has low bits */
    unsigned lanes;
} element_sink;

/* Decodes one integer with all checks. */
static void decode_slowly(bit_source *bits, uint32_t *state, const element_sink *to, unsigned width,
                          size_t i) {
    unsigned table = to->context ? to->context[i] : 0;
    symbols_state_wide e;
    if (width < 8) {
        const symbols_state *s = &to->narrow[table][*state];
        e = (symbols_state_wide){s->base, s->next, s->state_bits, (uint8_t)(s->bits - s->state_bits)};
    } else {
        e = to->wide[table][*state];
    }
    uint64_t low = e.low_bits > 32 ? source_get(bits, e.low_bits - 32u) << 32 : 0;
    low |= source_get(bits, e.low_bits < 32 ? e.low_bits : 32);
    *state = e.next + (uint32_t)source_get(bits, e.state_bits);
    symbols_store(to->values, width, i, e.base + low);
}

/*
 * Decodes an integer of up to 4 bytes. The lowest bits of `field` are its state bits and low bits; the rest is ignored.
 */
CPU_INLINE uint32_t step_narrow(uint32_t *state, const symbols_state *e, uint64_t field) {
    *state = e->next + (uint32_t)lowest(field, e->state_bits);
    return e->base + (uint32_t)(lowest(field, e->bits) >> e->state_bits);
}

/* Decodes an 8-byte integer: up to 62 low bits need a second word. */
CPU_INLINE uint64_t step_wide(uint32_t *state, size_t *at, const symbols_state_wide *e, const uint8_t *from) {
    unsigned high_bits = e->low_bits > 32 ? e->low_bits - 32u : 0;
    unsigned bits = e->low_bits - high_bits + e->state_bits;
    *at -= high_bits;
    uint64_t high = lowest(word_at(from, *at), high_bits);
    *at -= bits;
    uint64_t field = word_at(from, *at);
    *state = e->next + (uint32_t)lowest(field, e->state_bits);
    return e->base + (high << 32 | lowest(field, bits) >> e->state_bits);
}

/* Largest number of bits that eight integers can take. */
#define FAST_BITS(width) (SYMBOLS_MAX_LANES * ((width) < 8 ? 32 + SYMBOLS_MAX_LOG : 64 + SYMBOLS_MAX_LOG))

/*
 * Decodes eight integers at a time, one per lane. Starts where words no longer reach past the end of the payload. Stops
 * before eight worst-case integers could read below its start. Returns the next index. Unrolled by hand like the
 * encoder.
 */
CPU_INLINE size_t decode_fast(bit_source *bits, uint32_t *states, const element_sink *to, size_t i,
                              unsigned width, bool contexts) {
    uint32_t state[SYMBOLS_MAX_LANES];
    memcpy(state, states, sizeof(state));
    const symbols_state *const *const restrict narrow = to->narrow;
    const symbols_state_wide *const *const restrict wide = to->wide;
    const uint8_t *const restrict context = to->context;
    const uint8_t *const restrict from = bits->from;
    uint8_t *const restrict values = to->values;
    size_t at = bits->at, end = to->n;
#define ENTRY(tables, j) (tables[contexts ? context[i + (j)] : 0] + state[j])
#define TWO(j)                                                                                              \
    if (width == 8) {                                                                                       \
        symbols_store(values, 8, i + (j), step_wide(&state[j], &at, ENTRY(wide, j), from));                 \
        symbols_store(values, 8, i + (j) + 1, step_wide(&state[(j) + 1], &at, ENTRY(wide, (j) + 1), from)); \
    } else if (width == 4) {                                                                                \
        const symbols_state *e = ENTRY(narrow, j), *e_2 = ENTRY(narrow, (j) + 1);                           \
        at -= e->bits;                                                                                      \
        symbols_store(values, 4, i + (j), step_narrow(&state[j], e, word_at(from, at)));                    \
        at -= e_2->bits;                                                                                    \
        symbols_store(values, 4, i + (j) + 1, step_narrow(&state[(j) + 1], e_2, word_at(from, at)));        \
    } else { /* two integers fit a word, the first above the second */                                      \
        const symbols_state *e = ENTRY(narrow, j), *e_2 = ENTRY(narrow, (j) + 1);                           \
        unsigned bits_2 = e_2->bits;                                                                        \
        at -= e->bits + bits_2;                                                                             \
        uint64_t word = word_at(from, at);                                                                  \
        symbols_store(values, width, i + (j), step_narrow(&state[j], e, word >> bits_2));                   \
        symbols_store(values, width, i + (j) + 1, step_narrow(&state[(j) + 1], e_2, word));                 \
    }
    for (; i + SYMBOLS_MAX_LANES <= end && at >= FAST_BITS(width); i += SYMBOLS_MAX_LANES) {
        TWO(0)
        TWO(2)
        TWO(4)
        TWO(6)
    }
#undef TWO
#undef ENTRY
    memcpy(states, state, sizeof(state));
    bits->at = at;
    return i;
}

/* As decode_fast, for the single lane of short streams. */
CPU_INLINE size_t decode_lane(bit_source *bits, uint32_t *lane, const element_sink *to, size_t i,
                              unsigned width, bool contexts) {
    uint32_t state = *lane;
    const symbols_state *const *const restrict narrow = to->narrow;
    const symbols_state_wide *const *const restrict wide = to->wide;
    const uint8_t *const restrict context = to->context;
    size_t at = bits->at;
    for (; i < to->n && at >= FAST_BITS(width) / SYMBOLS_MAX_LANES; i++) {
        unsigned table = contexts ? context[i] : 0;
        if (width == 8) {
            symbols_store(to->values, 8, i, step_wide(&state, &at, wide[table] + state, bits->from));
        } else {
            const symbols_state *e = narrow[table] + state;
            at -= e->bits;
            symbols_store(to->values, width, i, step_narrow(&state, e, word_at(bits->from, at)));
        }
    }
    *lane = state;
    bits->at = at;
    return i;
}

typedef size_t (*fast_loop)(bit_source *, uint32_t *, const element_sink *, size_t);

/* As decode_fast, for the common case of one-byte integers without low bits: four integers fit in a word. */
CPU_INLINE size_t decode_bare(bit_source *bits, uint32_t *states, const element_sink *to, size_t i,
                              bool contexts) {
    uint32_t state[SYMBOLS_MAX_LANES];
    memcpy(state, states, sizeof(state));
    const symbols_state *const *const restrict narrow = to->narrow;
    const uint8_t *const restrict context = to->context;
    const uint8_t *const restrict from = bits->from;
    uint8_t *const restrict values = to->values;
    size_t at = bits->at, end = to->n;
#define ENTRY(j) (narrow[contexts ? context[i + (j)] : 0] + state[j])
#define STEP(j, e, above)                 \
    values[i + (j)] = (uint8_t)(e)->base; \
    state[j] = (e)->next + (uint32_t)lowest(word >> (above), (e)->state_bits);
#define FOUR(j)                                                                  \
    {                                                                            \
        const symbols_state *e = ENTRY(j), *e_2 = ENTRY((j) + 1);                \
        const symbols_state *e_3 = ENTRY((j) + 2), *e_4 = ENTRY((j) + 3);        \
        unsigned above_3 = e_4->state_bits, above_2 = above_3 + e_3->state_bits; \
        unsigned above = above_2 + e_2->state_bits;                              \
        at -= above + e->state_bits;                                             \
        uint64_t word = word_at(from, at);                                       \
        STEP(j, e, above)                                                        \
        STEP((j) + 1, e_2, above_2)                                              \
        STEP((j) + 2, e_3, above_3)                                              \
        STEP((j) + 3, e_4, 0)                                                    \
    }
    for (; i + SYMBOLS_MAX_LANES <= end && at >= FAST_BITS(1); i += SYMBOLS_MAX_LANES) {
        FOUR(0)
        FOUR(4)
    }
#undef FOUR
#undef STEP
#undef ENTRY
    memcpy(states, state, sizeof(state));
    bits->at = at;
    return i;
}

CPU_INLINE size_t decode_any(bit_source *bits, uint32_t *states, const element_sink *to, unsigned width,
                             size_t i) {
    if (to->lanes == 1) {
        return to->context ? decode_lane(bits, states, to, i, width, true)
                           : decode_lane(bits, states, to, i, width, false);
    }
    if (width == 1 && to->bare) {
        return to->context ? decode_bare(bits, states, to, i, true) : decode_bare(bits, states, to, i, false);
    }
    return to->context ? decode_fast(bits, states, to, i, width, true)
                       : decode_fast(bits, states, to, i, width, false);
}

#define DEFINE_LOOPS(width)                                                                                \
    CPU_AVX2 static size_t fast_avx2_##width(bit_source *bits, uint32_t *states, const element_sink *to,   \
                                             size_t i) {                                                   \
        return decode_any(bits, states, to, width, i);                                                     \
    }                                                                                                      \
    CPU_PLAIN static size_t fast_plain_##width(bit_source *bits, uint32_t *states, const element_sink *to, \
                                               size_t i) {                                                 \
        return decode_any(bits, states, to, width, i);                                                     \
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

/* Finds the end of the payload's bits: below the mark in its last byte. */
static bool find_end(bit_source *bits, const uint8_t *payload, size_t size) {
    if (size == 0 || payload[size - 1] == 0) {
        return false;
    }
    unsigned mark = 31u - (unsigned)__builtin_clz(payload[size - 1]);
    *bits = (bit_source){payload, 8 * (size - 1) + mark, size >= 8 ? 8 * (size - 8) + 1 : 0, false};
    return true;
}

static bool decode_elements(const element_sink *to, const symbols_header *h, unsigned width,
                            bit_source *bits) {
    const unsigned lanes = to->lanes;
    uint32_t states[SYMBOLS_MAX_LANES] = {0};
    for (unsigned j = 0; j < lanes; j++) {
        states[j] = (uint32_t)source_get(bits, h->log);
    }
    size_t i = 0;
    if (lanes == SYMBOLS_MAX_LANES || lanes == 1) {
        for (; i < to->n && !bits->failed && (bits->at >= bits->words || i % lanes); i++) {
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

ckd_status symbols_dense_decode(symbols_workspace *w, const symbols_output *out, const void *from,
                                size_t size, ckd_error *err) {
    const symbols_header *h = &w->decoding;
    const unsigned width = out->width;
    size_t used;
    ckd_status status = symbols_header_read(&w->decoding, width, from, size, &used, err);
    if (status != CKD_OK) {
        return status;
    }
    if (h->contexts && !out->context) {
        return err_corrupt(err, NULL, CKD_NO_OFFSET,
                           "a symbol stream needs contexts, and the block has none");
    }
    bit_source bits;
    if (!find_end(&bits, (const uint8_t *)from + used, size - used)) {
        return err_corrupt(err, NULL, CKD_NO_OFFSET, "a symbol stream has no end");
    }
    build_states(w, width);
    element_sink to = {.values = out->values,
                       .n = out->n,
                       .context = h->contexts ? out->context : NULL,
                       .bare = width == 1 && symbols_without_low_bits(h, width),
                       .lanes = 1u << h->lanes_log};
    uint8_t table_of[SYMBOLS_CONTEXTS];
    symbols_map_contexts(table_of, h);
    for (unsigned c = 0; c < SYMBOLS_CONTEXTS; c++) {
        size_t at = (size_t)table_of[c] << h->log;
        if (width < 8) {
            to.narrow[c] = w->states.narrow + at;
        } else {
            to.wide[c] = w->states.wide + at;
        }
    }
    if (!decode_elements(&to, h, width, &bits)) {
        return err_corrupt(err, NULL, CKD_NO_OFFSET,
                           "a symbol stream of %zu bytes does not end where it should", size);
    }
    return CKD_OK;
}
