/* The header of a symbol stream: bit fields, lowest bit first, as codec/FORMAT.md lists them. */
#include "codec/entropy/symbols_format.h"

#include <string.h>

#include "base/bytes.h"

static symbols_meaning class_meaning(const symbols_table *t, unsigned bits, unsigned fine, unsigned symbol) {
    bool changed = symbol >= 128;
    unsigned index = changed ? 255 - symbol : symbol;
    uint64_t base = t->centre + ((uint64_t)changed << (bits - 1));
    if (index == 0) {
        return (symbols_meaning){t->floor ? base - (UINT64_C(1) << (t->floor - 1)) : base, t->floor};
    }
    unsigned size = (index + 1) / 2 + symbols_below_floor(t->floor, fine);
    unsigned length = size >> fine; /* in bits, less `fine`; 0 where the size is the magnitude */
    unsigned low = length < 2 ? 0 : length - 1;
    if (low > bits - 2) { /* no such class; a shift by it would overflow */
        return (symbols_meaning){0, low};
    }
    uint64_t leading = length ? (UINT64_C(1) << fine | (size & ((1u << fine) - 1))) << low : size;
    bool negative = index % 2 == 0;
    return (symbols_meaning){base + (negative ? UINT64_C(1) - leading - (UINT64_C(1) << low) : leading), low};
}

symbols_meaning symbols_mean(const symbols_header *h, unsigned width, unsigned table, unsigned symbol) {
    if (h->mode == SYMBOLS_SPLIT) {
        return (symbols_meaning){(h->bias + symbol) << h->low_bits, h->low_bits};
    }
    return class_meaning(&h->table[table], 8 * width, h->fine, symbol);
}

bool symbols_without_low_bits(const symbols_header *h, unsigned width) {
    for (unsigned t = 0; t < h->tables; t++) {
        for (unsigned s = h->table[t].first; s <= h->table[t].last; s++) {
            if (h->table[t].counts[s] && symbols_mean(h, width, t, s).low) {
                return false;
            }
        }
    }
    return true;
}

/*
 * Assigns states to each symbol at a stride that spreads them evenly, as zstd does for FSE tables (RFC 8878, 4.1.1).
 * The stride is odd for all table sizes from 16 on, so it visits every state once.
 */
void symbols_spread(uint8_t *owner, const symbols_table *table, unsigned log) {
    unsigned states = 1u << log, mask = states - 1;
    unsigned stride = (states >> 1) + (states >> 3) + 3;
    unsigned at = 0;
    for (unsigned s = table->first; s <= table->last; s++) {
        for (unsigned i = table->counts[s]; i > 0; i--) {
            owner[at] = (uint8_t)s;
            at = (at + stride) & mask;
        }
    }
}

void symbols_map_contexts(uint8_t *table_of, const symbols_header *h) {
    unsigned table = 0;
    for (unsigned c = 0; c < SYMBOLS_CONTEXTS; c++) {
        table_of[c] = (uint8_t)table;
        table += h->contexts && table + 1 < h->tables && c == h->range_end[table];
    }
}

/* ---- writing ---- */

/* With to == NULL it only counts the bits. */
typedef struct bit_writer {
    uint8_t *to;
    size_t at; /* in bits */
} bit_writer;

static void put(bit_writer *w, uint64_t value, unsigned bits) {
    for (unsigned i = 0; i < bits && w->to; i++) {
        size_t at = w->at + i;
        uint8_t bit = (uint8_t)((value >> i & 1) << (at & 7));
        w->to[at >> 3] = (uint8_t)((at & 7 ? w->to[at >> 3] : 0) | bit);
    }
    w->at += bits;
}

static unsigned bit_length(unsigned v) {
    return v ? 32u - (unsigned)__builtin_clz(v) : 0;
}

/* Elias gamma code of value + 1: as many zeros as value + 1 has bits below its leading one, a one, then those bits. */
static void put_gamma(bit_writer *w, unsigned value) {
    unsigned length = bit_length(value + 1);
    put(w, 0, length - 1);
    put(w, 1, 1);
    put(w, value + 1, length - 1); /* without the leading one */
}

/*
 * Writes all counts but the last, which the others imply. Neighbouring counts have similar sizes, so the bit length is
 * coded as the difference from the previous one (0 1 -1 2 -2 ... in unary). The bits below the leading one are plain. A
 * zero count is followed by the number of further zeros.
 */
static void put_counts(bit_writer *w, const symbols_table *t, unsigned log) {
    unsigned before = log / 2;
    for (unsigned s = t->first; s < t->last; s++) {
        unsigned length = bit_length(t->counts[s]);
        unsigned steps = length > before ? 2 * (length - before) - 1 : 2 * (before - length);
        put(w, (UINT64_C(1) << steps) - 1, steps + 1);
        put(w, t->counts[s], length ? length - 1 : 0); /* put drops the leading one */
        if (length == 0) {
            unsigned zeros = 0;
            while (t->counts[s + 1] == 0) { /* the count of `last` is not zero */
                zeros++;
                s++;
            }
            put_gamma(w, zeros);
        } else {
            before = length;
        }
    }
}

static void put_table(bit_writer *w, const symbols_header *h, unsigned width, const symbols_table *t) {
    if (h->mode == SYMBOLS_CLASS) {
        put(w, t->centre != 0, 1);
        put(w, t->centre, t->centre ? 8 * width : 0);
        put(w, t->floor, 6);
    }
    put(w, t->first, 8);
    put(w, t->last, 8);
    put_counts(w, t, h->log);
}

static size_t put_header(const symbols_header *h, unsigned width, uint8_t *to) {
    bit_writer w = {to, 0};
    put(&w, h->mode, 1);
    put(&w, h->contexts, 1);
    put(&w, h->lanes_log, 2);
    put(&w, h->log - SYMBOLS_MIN_LOG, 3);
    put(&w, 0, 1);
    if (h->contexts) {
        put(&w, h->tables - 1, 4);
        for (unsigned t = 0; t + 1 < h->tables; t++) {
            put(&w, h->range_end[t], 8);
        }
    }
    if (h->mode == SYMBOLS_CLASS) {
        put(&w, h->fine, 2);
    } else {
        put(&w, h->low_bits, 6);
        put(&w, h->bias, 8 * width - h->low_bits);
    }
    for (unsigned t = 0; t < h->tables; t++) {
        put_table(&w, h, width, &h->table[t]);
    }
    return (w.at + 7) / 8;
}

size_t symbols_header_size(const symbols_header *h, unsigned width) {
    return put_header(h, width, NULL);
}

void symbols_header_write(const symbols_header *h, unsigned width, uint8_t *to) {
    put_header(h, width, to);
}

/* ---- reading ---- */

typedef struct bit_reader {
    const uint8_t *from;
    size_t size, at; /* in bits */
    bool failed;
} bit_reader;

static uint64_t get(bit_reader *r, unsigned bits) {
    if (r->failed || bits > r->size - r->at) {
        r->failed = true;
        return 0;
    }
    uint64_t value = 0;
    if (bits <= 56 && r->at + 64 <= r->size) {
        value = load_le64(r->from + (r->at >> 3)) >> (r->at & 7) & ((UINT64_C(1) << bits) - 1);
        r->at += bits;
        return value;
    }
    for (unsigned i = 0; i < bits; i++, r->at++) {
        value |= (uint64_t)(r->from[r->at >> 3] >> (r->at & 7) & 1) << i;
    }
    return value;
}

/* Reads numbers up to 254; a larger one is invalid. */
static unsigned get_gamma(bit_reader *r) {
    unsigned length = 0;
    while (length < 8 && !r->failed && !get(r, 1)) {
        length++;
    }
    r->failed |= length == 8;
    return r->failed ? 0 : (1u << length | (unsigned)get(r, length)) - 1;
}

/* Reads the bit length of the next count. Returns false if it is invalid. */
static bool get_length(bit_reader *r, unsigned *length, unsigned before, unsigned log) {
    unsigned steps = 0;
    while (steps <= 2 * SYMBOLS_MAX_LOG && get(r, 1)) {
        steps++;
    }
    *length = steps & 1 ? before + (steps + 1) / 2 : before - steps / 2;
    return !r->failed && *length <= log; /* negative values wrap and are large */
}

static bool get_counts(bit_reader *r, symbols_table *t, unsigned log) {
    unsigned before = log / 2, left = 1u << log;
    for (unsigned s = t->first; s < t->last; s++) {
        unsigned length;
        if (!get_length(r, &length, before, log) || (length == 0 && s == t->first)) {
            return false;
        }
        if (length == 0) {
            s += get_gamma(r);
            if (r->failed || s >= t->last) {
                return false;
            }
            continue;
        }
        unsigned count = 1u << (length - 1) | (unsigned)get(r, length - 1);
        if (count >= left) {
            return false;
        }
        t->counts[s] = (uint16_t)count;
        left -= count;
        before = length;
    }
    t->counts[t->last] = (uint16_t)left;
    return !r->failed;
}

static bool get_table(bit_reader *r, symbols_header *h, unsigned width, unsigned table) {
    symbols_table *t = &h->table[table];
    memset(t, 0, sizeof(*t));
    if (h->mode == SYMBOLS_CLASS) {
        if (get(r, 1)) {
            t->centre = get(r, 8 * width);
            if (t->centre == 0) {
                return false;
            }
        }
        t->floor = (unsigned)get(r, 6);
        if (t->floor > 8 * width - 2) {
            return false;
        }
    }
    t->first = (uint16_t)get(r, 8);
    t->last = (uint16_t)get(r, 8);
    if (r->failed || t->first > t->last || !get_counts(r, t, h->log)) {
        return false;
    }
    for (unsigned s = t->first; s <= t->last; s++) {
        if (t->counts[s] &&
            symbols_mean(h, width, table, s).low > 8 * width - (h->mode == SYMBOLS_CLASS ? 2 : 1)) {
            return false;
        }
    }
    return true;
}

static bool get_ranges(bit_reader *r, symbols_header *h) {
    h->tables = 1;
    if (h->contexts) {
        h->tables = 1 + (unsigned)get(r, 4);
        for (unsigned t = 0; t + 1 < h->tables; t++) {
            h->range_end[t] = (uint8_t)get(r, 8);
            if (h->range_end[t] == SYMBOLS_CONTEXTS - 1 || (t && h->range_end[t] <= h->range_end[t - 1])) {
                return false;
            }
        }
    }
    h->range_end[h->tables - 1] = SYMBOLS_CONTEXTS - 1;
    return !r->failed;
}

static bool get_split(bit_reader *r, symbols_header *h, unsigned width) {
    h->fine = h->low_bits = 0;
    h->bias = 0;
    if (h->mode == SYMBOLS_CLASS) {
        h->fine = (unsigned)get(r, 2);
    } else {
        h->low_bits = (unsigned)get(r, 6);
        if (h->low_bits >= 8 * width) {
            return false;
        }
        h->bias = get(r, 8 * width - h->low_bits);
    }
    return !r->failed;
}

ckd_status symbols_header_read(symbols_header *h, unsigned width, const uint8_t *from, size_t size,
                               size_t *used, ckd_error *err) {
    bit_reader r = {from, size < SYMBOLS_MAX_HEADER ? size * 8 : SYMBOLS_MAX_HEADER * 8, 0, false};
    h->mode = (symbols_mode)get(&r, 1);
    h->contexts = get(&r, 1);
    h->lanes_log = (unsigned)get(&r, 2);
    h->log = SYMBOLS_MIN_LOG + (unsigned)get(&r, 3);
    if (get(&r, 1)) {
        return err_unsupported(err, NULL, CKD_NO_OFFSET,
                               "a symbol stream is of a newer kind: use a newer version");
    }
    if (r.failed) {
        return err_corrupt(err, NULL, CKD_NO_OFFSET, "a symbol stream is empty");
    }
    if (!get_ranges(&r, h)) {
        return err_corrupt(err, NULL, CKD_NO_OFFSET, "a symbol stream's context ranges are invalid");
    }
    if (!get_split(&r, h, width)) {
        return err_corrupt(err, NULL, CKD_NO_OFFSET, "a symbol stream's split is invalid");
    }
    for (unsigned t = 0; t < h->tables; t++) {
        if (!get_table(&r, h, width, t)) {
            return err_corrupt(err, NULL, CKD_NO_OFFSET, "table %u of a symbol stream is invalid", t);
        }
    }
    unsigned padding = (unsigned)(-r.at & 7);
    if (get(&r, padding) || r.failed) {
        return err_corrupt(err, NULL, CKD_NO_OFFSET, "a symbol stream's header does not end properly");
    }
    *used = r.at / 8;
    return CKD_OK;
}
