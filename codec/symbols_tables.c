/*
 * The encoder's statistics: which contexts share a table, how many states a table has, and how they are shared among its
 * symbols. All of it is the encoder's freedom: what it decides is written in the stream.
 */
#include "codec/symbols_work.h"

#include <string.h>

/* ---- groups of contexts ---- */

/* A group while contexts are being joined. */
typedef struct group {
    uint32_t total;
    float bits;      /* of its symbols with a table of their own, and of that table */
    float join_gain; /* bits saved by joining it with the next group */
    uint8_t row, end;
} group;

/* About what a symbol and a table cost in the header. */
#define TABLE_BITS        20.0f
#define TABLE_SYMBOL_BITS 6.0f

static float bits_of(const symbols_workspace *w, uint32_t total, const uint32_t *a, const uint32_t *b) {
    float bits = TABLE_BITS + (float)total * symbols_log2(w, total);
    for (unsigned s = 0; s < SYMBOLS_ALPHABET; s++) {
        uint32_t c = a[s] + (b ? b[s] : 0);
        if (c) {
            bits += TABLE_SYMBOL_BITS - (float)c * symbols_log2(w, c);
        }
    }
    return bits;
}

static void measure_join(const symbols_workspace *w, group *g, const group *next) {
    g->join_gain =
        g->bits + next->bits - bits_of(w, g->total + next->total, w->merged[g->row], w->merged[next->row]);
}

static size_t collect(symbols_workspace *w, group *groups) {
    size_t count = 0;
    for (unsigned c = w->histogram.first_context; c <= w->histogram.last_context; c++) {
        group *g = &groups[count];
        uint32_t *row = w->merged[count];
        memset(row, 0, sizeof(w->merged[count]));
        g->total = symbols_counts_of(row, &w->histogram, c);
        if (g->total) {
            g->row = (uint8_t)count++;
            g->end = (uint8_t)c;
            g->bits = bits_of(w, g->total, row, NULL);
        }
    }
    return count;
}

static void join(symbols_workspace *w, group *groups, size_t count, size_t at) {
    group *g = &groups[at];
    const group *next = &groups[at + 1];
    for (unsigned s = 0; s < SYMBOLS_ALPHABET; s++) {
        w->merged[g->row][s] += w->merged[next->row][s];
    }
    g->total += next->total;
    g->end = next->end;
    g->bits = g->bits + next->bits - g->join_gain;
    memmove(&groups[at + 1], &groups[at + 2], (count - at - 2) * sizeof(*groups));
    if (at > 0) {
        measure_join(w, &groups[at - 1], g);
    }
    if (at + 2 < count) {
        measure_join(w, g, &groups[at + 1]);
    }
}

void symbols_group(symbols_workspace *w, symbols_groups *out) {
    group groups[SYMBOLS_CONTEXTS];
    size_t count = collect(w, groups);
    for (size_t i = 0; i + 1 < count; i++) {
        measure_join(w, &groups[i], &groups[i + 1]);
    }
    while (count > 1) {
        size_t best = 0;
        for (size_t i = 1; i + 1 < count; i++) {
            best = groups[i].join_gain > groups[best].join_gain ? i : best;
        }
        if (count <= SYMBOLS_MAX_TABLES && groups[best].join_gain <= 0) {
            break;
        }
        join(w, groups, count--, best);
    }
    out->count = (unsigned)count;
    for (size_t i = 0; i < count; i++) {
        out->row[i] = groups[i].row;
        out->end[i] = groups[i].end;
    }
}

/* ---- states ---- */

/* Gives and takes states where that costs least until they add up. */
static void balance(symbols_table *t, const uint32_t *counts, int surplus) {
    while (surplus != 0) {
        unsigned best = t->first;
        float best_cost = 0;
        for (unsigned s = t->first; s <= t->last; s++) {
            unsigned n = t->counts[s];
            if (n == 0 || (surplus > 0 && n == 1)) {
                continue;
            }
            float cost = (float)counts[s] / (surplus > 0 ? (float)n - 0.5f : -(float)n - 0.5f);
            if (best_cost == 0 || cost < best_cost) {
                best = s;
                best_cost = cost;
            }
        }
        t->counts[best] = (uint16_t)(t->counts[best] + (surplus > 0 ? -1 : 1));
        surplus += surplus > 0 ? -1 : 1;
    }
}

/* Shares 2^log states among the symbols; every symbol that occurs gets one. Returns the bits that coding costs then. */
static float share_states(const symbols_workspace *w, symbols_table *t, const uint32_t *counts,
                          unsigned log) {
    uint64_t total = 0;
    unsigned first = SYMBOLS_ALPHABET, last = 0;
    for (unsigned s = 0; s < SYMBOLS_ALPHABET; s++) {
        if (counts[s]) {
            first = first == SYMBOLS_ALPHABET ? s : first;
            last = s;
            total += counts[s];
        }
    }
    t->first = (uint16_t)first;
    t->last = (uint16_t)last;
    int surplus = -(1 << log);
    for (unsigned s = first; s <= last; s++) {
        uint64_t states = (((uint64_t)counts[s] << log) + total / 2) / total;
        t->counts[s] = (uint16_t)(counts[s] && !states ? 1 : states);
        surplus += t->counts[s];
    }
    balance(t, counts, surplus);
    float bits = 0;
    for (unsigned s = first; s <= last; s++) {
        bits += (float)counts[s] * ((float)log - w->log2_of[t->counts[s]]);
    }
    return bits;
}

static double share_all(symbols_workspace *w, symbols_header *h, const symbols_groups *groups, unsigned log) {
    double bits = 0;
    h->log = log;
    for (unsigned g = 0; g < groups->count; g++) {
        bits += (double)share_states(w, &h->table[g], w->merged[groups->row[g]], log);
    }
    return bits;
}

/* All symbols of a table must find room, twice over so that the common ones get their share. */
static unsigned smallest_log(const symbols_workspace *w, const symbols_groups *groups) {
    unsigned log = SYMBOLS_MIN_LOG;
    for (unsigned g = 0; g < groups->count; g++) {
        const uint32_t *counts = w->merged[groups->row[g]];
        unsigned symbols = 0;
        for (unsigned s = 0; s < SYMBOLS_ALPHABET; s++) {
            symbols += counts[s] != 0;
        }
        while (log < SYMBOLS_MAX_LOG && 1u << log < 2 * symbols) {
            log++;
        }
    }
    return log;
}

/* More states code more exactly, but leave the nearest cache, take time to set up and bytes to describe. */
double symbols_choose_tables(symbols_workspace *w, symbols_header *h, const symbols_groups *groups,
                             unsigned width, size_t n) {
    unsigned log = smallest_log(w, groups);
    unsigned lanes = 1u << h->lanes_log;
    h->tables = groups->count;
    h->contexts = groups->count > 1;
    memcpy(h->range_end, groups->end, groups->count);
    h->range_end[groups->count - 1] = SYMBOLS_CONTEXTS - 1;
    unsigned usual = n < 1024 ? SYMBOLS_MIN_LOG : 9;
    log = log < usual ? usual : log;
    double bits = share_all(w, h, groups, log);
    double all = bits + (double)(8 * symbols_header_size(h, width) + lanes * log);
    while (log < SYMBOLS_MAX_LOG) {
        double next_bits = share_all(w, h, groups, log + 1);
        double next = next_bits + (double)(8 * symbols_header_size(h, width) + lanes * (log + 1));
        if (next > all * 0.9995) {
            return share_all(w, h, groups, log);
        }
        log++;
        bits = next_bits;
        all = next;
    }
    return bits;
}
