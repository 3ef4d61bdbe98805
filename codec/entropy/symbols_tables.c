/*
 * Decides how many states a table has, and how its symbols share them. The encoder may choose freely; the stream
 * records the choice.
 */
#include "codec/entropy/symbols_work.h"

#include <string.h>

/* The symbols that occur in a table. */
typedef struct shares {
    unsigned symbols;
    uint8_t symbol[SYMBOLS_ALPHABET];
    float count[SYMBOLS_ALPHABET];
    uint16_t states[SYMBOLS_ALPHABET];
    float change[SYMBOLS_ALPHABET]; /* bits lost by taking a state away; negative: bits saved by adding one */
} shares;

/* Larger than any real change: a symbol's last state is never taken away. */
#define NEVER 1e30f

static float cost_of_change(float count, unsigned states, bool taking) {
    if (taking) {
        return states > 1 ? count / ((float)states - 0.5f) : NEVER;
    }
    return -count / ((float)states + 0.5f);
}

/* Adds or removes states where that costs least, until the counts add up. */
static void balance(shares *s, int surplus) {
    bool taking = surplus > 0;
    for (unsigned i = 0; i < s->symbols; i++) {
        s->change[i] = cost_of_change(s->count[i], s->states[i], taking);
    }
    for (; surplus != 0; surplus += taking ? -1 : 1) {
        unsigned best = 0;
        for (unsigned i = 1; i < s->symbols; i++) {
            best = s->change[i] < s->change[best] ? i : best;
        }
        s->states[best] = (uint16_t)(s->states[best] + (taking ? -1 : 1));
        s->change[best] = cost_of_change(s->count[best], s->states[best], taking);
    }
}

/* Shares 2^log states among the symbols. Every symbol that occurs gets at least one. Returns the resulting bits. */
static float share_states(const symbols_workspace *w, symbols_table *t, const uint32_t *counts,
                          unsigned log) {
    shares s;
    s.symbols = 0;
    uint32_t total = 0;
    for (unsigned i = 0; i < SYMBOLS_ALPHABET; i++) {
        if (counts[i]) {
            s.symbol[s.symbols] = (uint8_t)i;
            s.count[s.symbols++] = (float)counts[i];
            total += counts[i];
        }
    }
    float scale = (float)(1u << log) / (float)total;
    int surplus = -(1 << log);
    for (unsigned i = 0; i < s.symbols; i++) {
        unsigned states = (unsigned)(s.count[i] * scale + 0.5f);
        s.states[i] = (uint16_t)(states ? states : 1);
        surplus += s.states[i];
    }
    balance(&s, surplus);
    t->first = s.symbol[0];
    t->last = s.symbol[s.symbols - 1];
    memset(t->counts, 0, sizeof(t->counts));
    float bits = 0;
    for (unsigned i = 0; i < s.symbols; i++) {
        t->counts[s.symbol[i]] = s.states[i];
        bits += s.count[i] * ((float)log - w->log2_of[s.states[i]]);
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

static double low_bits(const symbols_workspace *w, const symbols_header *h, const symbols_groups *groups,
                       unsigned width) {
    uint64_t bits = 0;
    for (unsigned g = 0; g < groups->count; g++) {
        for (unsigned s = 0; s < SYMBOLS_ALPHABET; s++) {
            if (w->merged[groups->row[g]][s]) {
                bits += (uint64_t)w->merged[groups->row[g]][s] * symbols_mean(h, width, g, s).low;
            }
        }
    }
    return (double)bits;
}

/* Each table must have at least two states per symbol, so that common symbols get their share. */
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

/*
 * More states code more exactly. But large tables do not fit the fastest cache, and take time to set up and bytes to
 * describe. So a doubling must save 1/700 of the stream.
 */
double symbols_choose_tables(symbols_workspace *w, symbols_header *h, const symbols_groups *groups,
                             unsigned width, size_t n) {
    unsigned lanes = 1u << h->lanes_log;
    h->tables = groups->count;
    h->contexts = groups->count > 1;
    memcpy(h->range_end, groups->end, groups->count);
    h->range_end[groups->count - 1] = SYMBOLS_CONTEXTS - 1;
    unsigned usual = n < 1024 ? SYMBOLS_MIN_LOG : 8;
    unsigned log = smallest_log(w, groups);
    log = log < usual ? usual : log;
    double low = low_bits(w, h, groups, width);
    double bits = share_all(w, h, groups, log);
    double all = bits + (double)(8 * symbols_header_size(h, width) + lanes * log);
    while (log < SYMBOLS_MAX_LOG) {
        memcpy(w->smaller, h->table, groups->count * sizeof(h->table[0]));
        double next_bits = share_all(w, h, groups, log + 1);
        double next = next_bits + (double)(8 * symbols_header_size(h, width) + lanes * (log + 1));
        if (all - next < (all + low) / 700) {
            memcpy(h->table, w->smaller, groups->count * sizeof(h->table[0]));
            h->log = log;
            break;
        }
        log++;
        bits = next_bits;
        all = next;
    }
    return bits;
}
