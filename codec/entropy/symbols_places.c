/*
 * The places of changes, as gaps or as runs, in Golomb-Rice codes (Golomb, Run-length encodings, 1966; Rice, JPL
 * 79-22). These need no tables, and are within 1 % of the entropy of independent places.
 */
#include <string.h>

#include "codec/common/common.h"
#include "codec/entropy/symbols_work.h"

/* Forms of places. */
#define PLACES_GAPS 1 /* the number of integers before each place */
#define PLACES_RUNS 2 /* neighbouring places form a run: the number of integers before it, and its length */
#define LOW_MAX     17

/* ---- numbers in Golomb-Rice codes: low bits, and the rest in unary ---- */

static uint64_t rice_bits(const uint32_t *numbers, size_t count, unsigned low) {
    uint64_t bits = (uint64_t)count * (low + 1);
    for (size_t i = 0; i < count; i++) {
        bits += numbers[i] >> low;
    }
    return bits;
}

/* Chooses the number of low bits. Returns the size of the code in bits. */
static uint64_t rice_choose(unsigned *low, const uint32_t *numbers, size_t count) {
    uint64_t sum = 0, best = UINT64_MAX;
    for (size_t i = 0; i < count; i++) {
        sum += numbers[i];
    }
    unsigned guess = 0;
    while (guess < LOW_MAX && (uint64_t)count << (guess + 1) <= sum) {
        guess++;
    }
    for (unsigned try = guess > 2 ? guess - 2 : 0; try <= guess; try++) {
        uint64_t bits = rice_bits(numbers, count, try);
        *low = bits < best ? try:
            *low;
        best = bits < best ? bits : best;
    }
    return best;
}

static void rice_write(bytes *to, const uint32_t *numbers, size_t count) {
    unsigned low;
    uint64_t bits = rice_choose(&low, numbers, count);
    size_t lows = symbols_bytes_for(count * low), unary = symbols_bytes_for(bits - (uint64_t)count * low);
    bytes_put_u8(to, (uint8_t)low);
    wire_put_varint(to, unary);
    uint8_t *at = bytes_extend(to, lows + unary);
    if (!at) {
        return;
    }
    memset(at, 0, lows + unary);
    size_t next = 0;
    for (size_t i = 0; i < count; i++) {
        uint64_t rest = numbers[i] & ((1u << low) - 1);
        for (size_t bit = i * low, left = low; left > 0;) {
            size_t available = 8 - bit % 8, part = left < available ? left : available;
            at[bit / 8] |= (uint8_t)(rest << bit % 8);
            rest >>= part;
            bit += part;
            left -= part;
        }
        next += numbers[i] >> low;
        at[lows + next / 8] |= (uint8_t)(1u << next % 8);
        next++;
    }
}

/* Loads 8 bytes, with zeros behind the end. */
CPU_INLINE uint64_t word_at(const uint8_t *from, const uint8_t *end) {
    if (end - from >= 8) {
        return load_le64(from);
    }
    uint64_t word = 0;
    for (unsigned shift = 0; from < end; shift += 8) {
        word |= (uint64_t)*from++ << shift;
    }
    return word;
}

typedef struct rice_code {
    const uint8_t *lows, *unary, *end; /* end: end of the readable bytes */
    size_t unary_size;
    unsigned low;
    bool places; /* the numbers are gaps between places */
} rice_code;

/* Sums over a code. */
typedef struct rice_sums {
    uint64_t largest; /* OR of the upper parts */
    uint64_t end;     /* the sum of all (number + 1) */
} rice_sums;

/*
 * Reads `count` numbers, or the places that have them as gaps. Returns the number of unary bits used, or 0 if the code
 * does not have exactly `count` numbers.
 */
CPU_INLINE uint64_t rice_loop(uint32_t *numbers, size_t count, const rice_code *code, rice_sums *sums) {
    const unsigned low = code->low;
    const uint64_t mask = (UINT64_C(1) << low) - 1;
    const uint8_t *const lows = code->lows, *const unary = code->unary, *const stream_end = code->end;
    const size_t unary_size = code->unary_size;
    const bool places = code->places;
    uint64_t begin = 0, all = 0, sum = 0; /* begin: the bit behind the last one */
    size_t i = 0, bit = 0;
    for (size_t at = 0; at < unary_size; at += 8) {
        size_t bytes_left = unary_size - at;
        uint64_t left = word_at(unary + at, stream_end);
        left &= bytes_left >= 8 ? UINT64_MAX : (UINT64_C(1) << 8 * bytes_left) - 1;
        for (; left; left &= left - 1) {
            uint64_t end = 8 * at + (unsigned)__builtin_ctzll(left), high = end - begin;
            if (i == count) {
                return 0;
            }
            all |= high;
            uint64_t word = word_at(lows + (bit >> 3), stream_end);
            uint64_t number = high << low | (word >> (bit & 7) & mask);
            sum += number + 1;
            numbers[i++] = (uint32_t)(places ? sum - 1 : number);
            begin = end + 1;
            bit += low;
        }
    }
    *sums = (rice_sums){all, sum};
    return i == count ? begin : 0;
}

CPU_AVX2 static uint64_t rice_loop_avx2(uint32_t *numbers, size_t count, const rice_code *code,
                                        rice_sums *sums) {
    return rice_loop(numbers, count, code, sums);
}
CPU_PLAIN static uint64_t rice_loop_plain(uint32_t *numbers, size_t count, const rice_code *code,
                                          rice_sums *sums) {
    return rice_loop(numbers, count, code, sums);
}

/* Reads `count` >= 1 numbers below 2^18, or the places that have them as gaps. */
static bool rice_read(uint32_t *numbers, uint64_t *sum, size_t count, bool places, reader *from) {
    rice_code code = {.low = reader_u8(from), .end = from->data + from->size, .places = places};
    code.unary_size = (size_t)wire_varint_max(from, reader_left(from));
    if (code.low > LOW_MAX || code.unary_size == 0) {
        return false;
    }
    size_t lows_size = symbols_bytes_for(count * code.low);
    code.lows = code.end - reader_left(from);
    code.unary = code.lows + lows_size;
    if (code.unary_size > symbols_bytes_for(count + (SYMBOLS_MAX_COUNT >> code.low)) ||
        !reader_take(from, lows_size + code.unary_size)) {
        return false;
    }
    rice_sums sums = {0, 0};
    uint64_t bits = (cpu_has_avx2() ? rice_loop_avx2 : rice_loop_plain)(numbers, count, &code, &sums);
    *sum = sums.end;
    size_t used = count * code.low % 8;
    return bits && symbols_bytes_for(bits) == code.unary_size &&
           sums.largest <= (SYMBOLS_MAX_COUNT - 1) >> code.low &&
           (used == 0 || code.lows[lows_size - 1] >> used == 0);
}

/* ---- places ---- */

static void find_gaps(uint32_t *gap, const uint32_t *place, size_t count) {
    for (size_t i = 0; i < count; i++) {
        gap[i] = place[i] - (i ? place[i - 1] + 1 : 0);
    }
}

/* Returns the number of runs. Runs are at least one integer apart, so every gap but the first is stored less one. */
static size_t find_runs(uint32_t *gap, uint32_t *length, const uint32_t *place, size_t count) {
    size_t runs = 0;
    for (size_t i = 0; i < count; i++) {
        if (i == 0 || place[i] != place[i - 1] + 1) {
            gap[runs] = place[i] - (i ? place[i - 1] + 2 : 0);
            length[runs++] = 0; /* less one */
        } else {
            length[runs - 1]++;
        }
    }
    return runs;
}

void symbols_put_places(bytes *to, const uint32_t *place, size_t count, symbols_changing *c) {
    unsigned low;
    find_gaps(c->gap, place, count);
    uint64_t in_gaps = rice_choose(&low, c->gap, count);
    size_t runs = find_runs(c->gap, c->length, place, count);
    if (rice_choose(&low, c->gap, runs) + rice_choose(&low, c->length, runs) < in_gaps) {
        bytes_put_u8(to, PLACES_RUNS);
        wire_put_varint(to, runs);
        rice_write(to, c->gap, runs);
        rice_write(to, c->length, runs);
    } else {
        find_gaps(c->gap, place, count);
        bytes_put_u8(to, PLACES_GAPS);
        rice_write(to, c->gap, count);
    }
}

static bool take_gaps(uint32_t *place, size_t limit, size_t count, reader *from) {
    uint64_t end;
    return rice_read(place, &end, count, true, from) && end <= limit;
}

static bool take_runs(uint32_t *place, size_t limit, size_t count, symbols_changing *c, reader *from) {
    size_t runs = (size_t)wire_varint_max(from, count), done = 0;
    uint64_t unused;
    if (!runs || !rice_read(c->gap, &unused, runs, false, from) ||
        !rice_read(c->length, &unused, runs, false, from)) {
        return false;
    }
    uint64_t at = 0;
    for (size_t r = 0; r < runs; r++) {
        at += c->gap[r] + (uint64_t)(r > 0);
        if (c->length[r] >= count - done) {
            return false;
        }
        const uint32_t length = c->length[r] + 1;
        /* Most runs are shorter; the next one overwrites the rest. */
        for (uint32_t i = 0; i < SYMBOLS_PLACES_MORE; i++) {
            place[done + i] = (uint32_t)at + i;
        }
        for (uint32_t i = SYMBOLS_PLACES_MORE; i < length; i++) {
            place[done + i] = (uint32_t)at + i;
        }
        done += length;
        at += length;
    }
    return done == count && at <= limit;
}

bool symbols_take_places(uint32_t *place, size_t limit, size_t count, symbols_changing *c, reader *from) {
    switch (reader_u8(from)) {
    case PLACES_GAPS:
        return take_gaps(place, limit, count, from);
    case PLACES_RUNS:
        return take_runs(place, limit, count, c, from);
    default:
        return false;
    }
}
