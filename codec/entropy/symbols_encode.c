/*
 * Writes a planned dense stream. The coder is a stack: integers are written from last to first. The decoder reads the
 * bits from the end, so it gets the integers in order.
 */
#include <string.h>

#include "base/bytes.h"
#include "codec/common/common.h"
#include "codec/entropy/symbols_work.h"

/* ---- tables: as in FSE (Collet), an addition and a shift give the number of state bits ---- */

static void build_codes(symbols_workspace *w, const symbols_header *h, unsigned width, unsigned table,
                        const uint8_t *remap) {
    const symbols_table *t = &h->table[table];
    uint8_t owner[SYMBOLS_MAX_STATES];
    uint32_t first_state[SYMBOLS_ALPHABET];
    symbols_code by_symbol[SYMBOLS_ALPHABET] = {{0}};
    uint32_t states = 1u << h->log, given = 0;
    uint16_t *next = w->next_state + (size_t)(table + 1) * SYMBOLS_MAX_STATES;
    for (unsigned s = t->first; s <= t->last; s++) {
        uint32_t n = t->counts[s];
        if (n) {
            uint32_t max = n == 1 ? h->log : h->log - (31u - (uint32_t)__builtin_clz(n - 1));
            symbols_meaning meaning = symbols_mean(h, width, table, s);
            by_symbol[s] = (symbols_code){.next = next + given - n,
                                          .add_bits = (max << 16) - (n << max),
                                          .low_bits = meaning.low,
                                          .base = meaning.base};
        }
        first_state[s] = given;
        given += n;
    }
    symbols_spread(owner, t, h->log);
    for (uint32_t u = 0; u < states; u++) {
        next[first_state[owner[u]]++] = (uint16_t)(states + u);
    }
    for (unsigned s = 0; s < SYMBOLS_ALPHABET; s++) {
        w->codes[table][s] = by_symbol[remap[s]];
    }
}

/* ---- bits, written upwards from the start of the payload ---- */

typedef struct bit_sink {
    uint8_t *to, *end;
    uint64_t bits; /* pending: the lowest `count` */
    unsigned count;
    bool full;
} bit_sink;

/* Writes at most 56 bits. */
static void sink_put(bit_sink *s, uint64_t value, unsigned bits) {
    if (s->full) {
        return;
    }
    s->bits |= value << s->count;
    s->count += bits;
    while (s->count >= 8) {
        if (s->to == s->end) {
            s->full = true;
            return;
        }
        *s->to++ = (uint8_t)s->bits;
        s->bits >>= 8;
        s->count -= 8;
    }
}

/* Writes at most 56 bits; needs room for eight bytes. */
CPU_INLINE void sink_put_fast(bit_sink *s, uint64_t value, unsigned bits) {
    s->bits |= value << s->count;
    s->count += bits;
    store_le64(s->to, s->bits);
    s->to += s->count >> 3;
    s->bits >>= s->count & 56;
    s->count &= 7;
}

/* ---- elements ---- */

typedef struct element_source {
    const symbols_code *codes[SYMBOLS_CONTEXTS]; /* codes of the table of each context, by symbol */
    const uint8_t *symbols, *values;
    const uint8_t *context; /* NULL: all elements use context 0 */
    unsigned shift;
    bool bare; /* no symbol has low bits */
} element_source;

CPU_INLINE uint64_t lowest(uint64_t v, unsigned bits) {
    return v & ((UINT64_C(1) << bits) - 1);
}

/* Encodes one integer with all checks. */
static void encode_slowly(bit_sink *sink, uint32_t *state, const element_source *from, unsigned width,
                          size_t i) {
    const symbols_code *code = from->codes[from->context ? from->context[i] : 0] + from->symbols[i];
    unsigned number = (*state + code->add_bits) >> 16;
    sink_put(sink, lowest(*state, number), number);
    uint64_t value = symbols_load(from->values, width, i) >> from->shift;
    uint64_t low = lowest(value - code->base, code->low_bits);
    unsigned first = code->low_bits > 32 ? 32 : code->low_bits;
    sink_put(sink, lowest(low, first), first);
    sink_put(sink, first < 32 ? 0 : low >> 32, code->low_bits - first);
    *state = code->next[*state >> number];
}

/*
 * Encodes the state bits of an integer below its low bits: at most 44 bits for integers of up to 4 bytes, 28 bits for
 * up to 2 bytes.
 */
CPU_INLINE uint64_t step_narrow(unsigned *bits, uint32_t *state, const symbols_code *code, uint64_t value,
                                unsigned width) {
    unsigned number = (*state + code->add_bits) >> 16;
    uint64_t low = (value - code->base) & (UINT64_MAX >> (64 - 8 * width));
    uint64_t field = lowest(*state, number) | low << number;
    *bits = number + code->low_bits;
    *state = code->next[*state >> number];
    return field;
}

/* Puts the state bits of an integer without low bits above those of later integers. */
CPU_INLINE void step_bare(uint64_t *fields, unsigned *bits, uint32_t *state, const symbols_code *code) {
    unsigned number = (*state + code->add_bits) >> 16;
    *fields |= lowest(*state, number) << *bits;
    *bits += number;
    *state = code->next[*state >> number];
}

CPU_INLINE void step_wide(bit_sink *s, uint32_t *state, const symbols_code *code, uint64_t value) {
    unsigned number = (*state + code->add_bits) >> 16;
    unsigned first = code->low_bits < 32 ? code->low_bits : 32;
    uint64_t low = lowest(value - code->base, code->low_bits);
    sink_put_fast(s, lowest(*state, number) | lowest(low, first) << number, number + first);
    sink_put_fast(s, low >> 32, code->low_bits - first);
    *state = code->next[*state >> number];
}

/* Bytes that eight integers may need, plus one word. */
#define FAST_ROOM (SYMBOLS_MAX_LANES * 16 + 8)

/*
 * Encodes integers end - 1 down to 0, eight at a time, one per lane; `end` is a multiple of 8. Stops when room runs
 * short. Unrolled by hand: compilers that are asked to unroll overdo it.
 */
CPU_INLINE size_t encode_fast(bit_sink *sink, uint32_t *states, const element_source *from, unsigned width,
                              bool contexts, size_t end) {
    bit_sink s = *sink;
    uint32_t state[SYMBOLS_MAX_LANES];
    memcpy(state, states, sizeof(state));
    const symbols_code *const *const restrict codes = from->codes;
    const symbols_code *const all = codes[0];
    const uint8_t *const restrict context = from->context;
    const uint8_t *const restrict symbols = from->symbols;
    const uint8_t *const restrict values = from->values;
    const unsigned shift = from->shift;
#define CODE(j)  ((contexts ? codes[context[end + (j)]] : all) + symbols[end + (j)])
#define VALUE(j) (symbols_load(values, width, end + (j)) >> shift)
#define TWO(j)                                                                                          \
    if (width == 8) {                                                                                   \
        step_wide(&s, &state[(j) + 1], CODE((j) + 1), VALUE((j) + 1));                                  \
        step_wide(&s, &state[j], CODE(j), VALUE(j));                                                    \
    } else {                                                                                            \
        unsigned bits, bits_2;                                                                          \
        uint64_t field_2 = step_narrow(&bits_2, &state[(j) + 1], CODE((j) + 1), VALUE((j) + 1), width); \
        if (width == 4) {                                                                               \
            sink_put_fast(&s, field_2, bits_2);                                                         \
        }                                                                                               \
        uint64_t field = step_narrow(&bits, &state[j], CODE(j), VALUE(j), width);                       \
        if (width == 4) {                                                                               \
            sink_put_fast(&s, field, bits);                                                             \
        } else { /* two integers fit in a word */                                                       \
            sink_put_fast(&s, field_2 | field << bits_2, bits + bits_2);                                \
        }                                                                                               \
    }
    while (end && (size_t)(s.end - s.to) >= FAST_ROOM) {
        end -= SYMBOLS_MAX_LANES;
        TWO(6)
        TWO(4)
        TWO(2)
        TWO(0)
    }
#undef TWO
#undef VALUE
#undef CODE
    memcpy(states, state, sizeof(state));
    *sink = s;
    return end;
}

typedef size_t (*fast_loop)(bit_sink *, uint32_t *, const element_source *, size_t);

/* As encode_fast, for the common case of one-byte integers without low bits: four integers fit in a word. */
CPU_INLINE size_t encode_bare(bit_sink *sink, uint32_t *states, const element_source *from, bool contexts,
                              size_t end) {
    bit_sink s = *sink;
    uint32_t state[SYMBOLS_MAX_LANES];
    memcpy(state, states, sizeof(state));
    const symbols_code *const *const restrict codes = from->codes;
    const symbols_code *const all = codes[0];
    const uint8_t *const restrict context = from->context;
    const uint8_t *const restrict symbols = from->symbols;
#define STEP(j) \
    step_bare(&fields, &bits, &state[j], (contexts ? codes[context[end + (j)]] : all) + symbols[end + (j)]);
#define FOUR(j)                          \
    {                                    \
        uint64_t fields = 0;             \
        unsigned bits = 0;               \
        STEP((j) + 3)                    \
        STEP((j) + 2)                    \
        STEP((j) + 1)                    \
        STEP(j)                          \
        sink_put_fast(&s, fields, bits); \
    }
    while (end && (size_t)(s.end - s.to) >= FAST_ROOM) {
        end -= SYMBOLS_MAX_LANES;
        FOUR(4)
        FOUR(0)
    }
#undef FOUR
#undef STEP
    memcpy(states, state, sizeof(state));
    *sink = s;
    return end;
}

CPU_INLINE size_t encode_any(bit_sink *sink, uint32_t *states, const element_source *from, unsigned width,
                             size_t end) {
    if (width == 1 && from->bare) {
        return from->context ? encode_bare(sink, states, from, true, end)
                             : encode_bare(sink, states, from, false, end);
    }
    return from->context ? encode_fast(sink, states, from, width, true, end)
                         : encode_fast(sink, states, from, width, false, end);
}

#define DEFINE_LOOPS(width)                                                                                  \
    CPU_AVX2 static size_t fast_avx2_##width(bit_sink *sink, uint32_t *states, const element_source *from,   \
                                             size_t end) {                                                   \
        return encode_any(sink, states, from, width, end);                                                   \
    }                                                                                                        \
    CPU_PLAIN static size_t fast_plain_##width(bit_sink *sink, uint32_t *states, const element_source *from, \
                                               size_t end) {                                                 \
        return encode_any(sink, states, from, width, end);                                                   \
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

static void encode_elements(bit_sink *sink, uint32_t *states, const element_source *from,
                            const symbols_header *h, unsigned width, size_t n) {
    unsigned lanes = 1u << h->lanes_log;
    size_t i = n;
    if (lanes == SYMBOLS_MAX_LANES) {
        for (; i % SYMBOLS_MAX_LANES; i--) {
            encode_slowly(sink, &states[(i - 1) % lanes], from, width, i - 1);
        }
        i = loop_for(width)(sink, states, from, i);
    }
    for (; i > 0 && !sink->full; i--) {
        encode_slowly(sink, &states[(i - 1) % lanes], from, width, i - 1);
    }
}

size_t symbols_dense_encode(symbols_workspace *w, const symbols_slot *p, const void *values,
                            const uint8_t *context, void *to, size_t capacity) {
    const symbols_header *h = &p->header;
    size_t header = symbols_header_size(h, p->width);
    if (capacity <= header) {
        return 0;
    }
    symbols_header_write(h, p->width, to);
    for (unsigned t = 0; t < h->tables; t++) {
        build_codes(w, h, p->width, t, p->remap[t]);
    }
    element_source from = {
        .symbols = p->symbols, .values = values, .context = h->contexts ? context : NULL, .shift = p->shift};
    from.bare = symbols_without_low_bits(h, p->width);
    uint8_t table_of[SYMBOLS_CONTEXTS];
    symbols_map_contexts(table_of, h);
    for (unsigned c = 0; c < SYMBOLS_CONTEXTS; c++) {
        from.codes[c] = w->codes[table_of[c]];
    }
    bit_sink sink = {(uint8_t *)to + header, (uint8_t *)to + capacity, 0, 0, false};
    uint32_t states[SYMBOLS_MAX_LANES];
    for (unsigned j = 0; j < SYMBOLS_MAX_LANES; j++) {
        states[j] = 1u << h->log;
    }
    encode_elements(&sink, states, &from, h, p->width, p->count);
    for (unsigned j = 1u << h->lanes_log; j-- > 0;) {
        sink_put(&sink, states[j] - (1u << h->log), h->log);
    }
    sink_put(&sink, 1, 1); /* the end mark; the rest of the last byte is 0 */
    sink_put(&sink, 0, (unsigned)(-sink.count & 7));
    return sink.full ? 0 : (size_t)(sink.to - (uint8_t *)to);
}
