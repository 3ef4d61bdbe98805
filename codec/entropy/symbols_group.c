/*
 * Decides which contexts share a table, and which small differences share a class. The encoder may choose freely; the
 * stream records the choice.
 */
#include "codec/entropy/symbols_work.h"

#include <string.h>

#include "codec/common/common.h"

/* ---- bins of symbols ---- */

typedef struct binning {
    unsigned bins;
    float symbols_per_bin;
    uint8_t bin[SYMBOLS_ALPHABET];
} binning;

/*
 * Contexts differ in where their symbols lie. Bins weigh about the same, with counts and numbers of symbols weighing
 * alike, so rare symbols matter. Adjacent symbols are a positive and a negative difference; they never share a bin.
 */
static void choose_bins(binning *q, const uint32_t *total, uint32_t n) {
    float symbols = 0, mass = 0;
    for (unsigned s = 0; s < SYMBOLS_ALPHABET; s++) {
        symbols += total[s] != 0;
    }
    q->bins = 0;
    for (unsigned i = 0; i < SYMBOLS_ALPHABET; i++) {
        unsigned s = i < SYMBOLS_ALPHABET / 2 ? 2 * i : 2 * i + 1 - SYMBOLS_ALPHABET;
        q->bin[s] = (uint8_t)q->bins;
        mass += total[s] ? (float)total[s] / (float)n + 1 / symbols : 0;
        if (q->bins + 1 < SYMBOLS_BINS && mass * SYMBOLS_BINS >= 2) {
            q->bins++;
            mass = 0;
        }
    }
    q->bins++;
    q->symbols_per_bin = symbols / (float)q->bins;
}

/* ---- merging ---- */

/* A group while contexts are being merged. */
typedef struct group {
    uint32_t total;
    float bits;      /* bits of its symbols with a table of its own, and of that table */
    float join_gain; /* bits saved by merging it with the next group */
    uint8_t row, end;
} group;

/* Approximate bits of a table and of a symbol in the header. */
#define TABLE_BITS        20.0f
#define TABLE_SYMBOL_BITS 8.0f
/* A table must save this fraction of the bits of all symbols, since setting it up takes decoding time. */
#define TABLE_WORTH 0.0004f

static float bits_of(const symbols_workspace *w, const binning *q, uint32_t total, const uint32_t *a,
                     const uint32_t *b) {
    float bits = TABLE_BITS + (float)total * symbols_log2(w, total);
    float symbol_bits = TABLE_SYMBOL_BITS * q->symbols_per_bin;
    for (unsigned i = 0; i < q->bins; i++) {
        uint32_t c = a[i] + (b ? b[i] : 0);
        if (c) {
            bits += symbol_bits - (float)c * symbols_log2(w, c);
        }
    }
    return bits;
}

static void measure_join(const symbols_workspace *w, const binning *q, group *g, const group *next) {
    g->join_gain =
        g->bits + next->bits - bits_of(w, q, g->total + next->total, w->binned[g->row], w->binned[next->row]);
}

/*
 * Neighbouring contexts are merged until they have at least one element in SHARE_MIN, and enough elements to pay for a
 * table.
 */
#define SHARE_MIN 64
#define COUNT_MIN 48

/* Collects the contexts that occur into groups, with their counts in `merged`. Returns the number of groups. */
CPU_PLAIN static size_t collect(symbols_workspace *w, group *groups, uint32_t *total, size_t n) {
    size_t count = 0, min = n / SHARE_MIN < COUNT_MIN ? COUNT_MIN : n / SHARE_MIN;
    group *g = NULL;
    memset(total, 0, SYMBOLS_ALPHABET * sizeof(*total));
    for (unsigned c = w->histogram.first_context; c <= w->histogram.last_context; c++) {
        if (!g) {
            g = &groups[count];
            *g = (group){.row = (uint8_t)count};
            memset(w->merged[count], 0, sizeof(w->merged[count]));
        }
        uint32_t context_total = symbols_counts_of(w->merged[count], &w->histogram, c);
        g->total += context_total;
        g->end = context_total ? (uint8_t)c : g->end;
        if (g->total && (g->total >= min || c == w->histogram.last_context)) {
            for (unsigned s = 0; s < SYMBOLS_ALPHABET; s++) {
                total[s] += w->merged[count][s];
            }
            count++;
            g = NULL;
        }
    }
    return count;
}

static void bin_all(symbols_workspace *w, const binning *q, group *groups, size_t count,
                    const uint32_t *total) {
    uint8_t symbol[SYMBOLS_ALPHABET];
    unsigned symbols = 0;
    for (unsigned s = 0; s < SYMBOLS_ALPHABET; s++) {
        symbol[symbols] = (uint8_t)s;
        symbols += total[s] != 0;
    }
    for (size_t i = 0; i < count; i++) {
        uint32_t *bins = w->binned[i];
        memset(bins, 0, sizeof(w->binned[i]));
        for (unsigned k = 0; k < symbols; k++) {
            bins[q->bin[symbol[k]]] += w->merged[i][symbol[k]];
        }
        groups[i].bits = bits_of(w, q, groups[i].total, bins, NULL);
    }
}

CPU_PLAIN static void join(symbols_workspace *w, const binning *q, group *groups, size_t count, size_t at) {
    group *g = &groups[at];
    const group *next = &groups[at + 1];
    for (unsigned s = 0; s < SYMBOLS_ALPHABET; s++) {
        w->merged[g->row][s] += w->merged[next->row][s];
    }
    for (unsigned i = 0; i < q->bins; i++) {
        w->binned[g->row][i] += w->binned[next->row][i];
    }
    g->total += next->total;
    g->end = next->end;
    g->bits = g->bits + next->bits - g->join_gain;
    memmove(&groups[at + 1], &groups[at + 2], (count - at - 2) * sizeof(*groups));
    if (at > 0) {
        measure_join(w, q, &groups[at - 1], g);
    }
    if (at + 2 < count) {
        measure_join(w, q, g, &groups[at + 1]);
    }
}

/* Merges neighbours while there are too many groups or a merge pays. Returns the number of groups. */
static size_t join_all(symbols_workspace *w, const binning *q, group *groups, size_t count) {
    float worth = 0;
    for (size_t i = 0; i < count; i++) {
        worth += groups[i].bits * TABLE_WORTH;
    }
    for (size_t i = 0; i + 1 < count; i++) {
        measure_join(w, q, &groups[i], &groups[i + 1]);
    }
    while (count > 1) {
        size_t best = 0;
        for (size_t i = 1; i + 1 < count; i++) {
            best = groups[i].join_gain > groups[best].join_gain ? i : best;
        }
        if (count <= SYMBOLS_MAX_TABLES && groups[best].join_gain + worth <= 0) {
            break;
        }
        join(w, q, groups, count--, best);
    }
    return count;
}

void symbols_group(symbols_workspace *w, symbols_groups *out, size_t n) {
    group groups[SYMBOLS_CONTEXTS];
    uint32_t total[SYMBOLS_ALPHABET];
    size_t count = collect(w, groups, total, n);
    if (count > 1) {
        binning q;
        choose_bins(&q, total, (uint32_t)n);
        bin_all(w, &q, groups, count, total);
        count = join_all(w, &q, groups, count);
    }
    out->count = (unsigned)count;
    for (size_t i = 0; i < count; i++) {
        out->row[i] = groups[i].row;
        out->end[i] = groups[i].end;
    }
}

/* ---- fineness of classes ---- */

/* Returns the size for classes with one magnitude bit less below the leading one. */
static unsigned coarser_size(unsigned size, unsigned fine) {
    if (size >> fine == 0) {
        return symbols_size_of(size, fine - 1);
    }
    return ((size >> fine) + 1) << (fine - 1) | (size & ((1u << fine) - 1)) >> 1;
}

static unsigned coarser_symbol(unsigned symbol, unsigned fine) {
    unsigned index = symbol < 128 ? symbol : 255 - symbol;
    if (index) {
        index = 2 * coarser_size((index + 1) / 2, fine) - index % 2;
    }
    return symbol < 128 ? index : 255 - index;
}

float symbols_table_bits(const symbols_workspace *w, const uint32_t *counts, uint32_t total,
                         float *table_bits) {
    float bits = (float)total * symbols_log2(w, total);
    unsigned symbols = 0;
    for (unsigned s = 0; s < SYMBOLS_ALPHABET; s++) {
        if (counts[s]) {
            bits -= (float)counts[s] * symbols_log2(w, counts[s]);
            symbols++;
        }
    }
    *table_bits = TABLE_BITS + TABLE_SYMBOL_BITS * (float)symbols;
    return bits;
}

/* Returns the bits of all symbols, of their tables, and of the low bits. */
static float class_bits(const symbols_workspace *w, const symbols_groups *groups, unsigned fine) {
    float bits = 0;
    for (unsigned g = 0; g < groups->count; g++) {
        const uint32_t *counts = w->merged[groups->row[g]];
        uint32_t total = 0;
        for (unsigned s = 0; s < SYMBOLS_ALPHABET; s++) {
            if (counts[s]) {
                unsigned size = ((s < 128 ? s : 255 - s) + 1) / 2 >> fine;
                bits += (float)counts[s] * (float)(size < 2 ? 0 : size - 1);
                total += counts[s];
            }
        }
        float table_bits;
        bits += symbols_table_bits(w, counts, total, &table_bits);
        bits += table_bits;
    }
    return bits;
}

static void coarsen(symbols_workspace *w, const symbols_groups *groups, uint8_t *symbol, unsigned fine) {
    for (unsigned g = 0; g < groups->count; g++) {
        uint32_t *counts = w->merged[groups->row[g]];
        uint32_t coarser[SYMBOLS_ALPHABET] = {0};
        for (unsigned s = 0; s < SYMBOLS_ALPHABET; s++) {
            if (counts[s]) {
                coarser[coarser_symbol(s, fine)] += counts[s];
            }
        }
        memcpy(counts, coarser, sizeof(coarser));
    }
    for (unsigned s = 0; s < SYMBOLS_ALPHABET; s++) {
        symbol[s] = (uint8_t)coarser_symbol(symbol[s], fine);
    }
}

/* Makes classes coarser while that saves bits: large tables do not pay for few integers. */
static void choose_fine(symbols_workspace *w, symbols_slot *p, const symbols_groups *groups,
                        uint8_t *symbol) {
    for (unsigned s = 0; s < SYMBOLS_ALPHABET; s++) {
        symbol[s] = (uint8_t)s;
    }
    float bits = class_bits(w, groups, p->header.fine);
    size_t used = (groups->row[groups->count - 1] + 1u) * sizeof(w->merged[0]);
    while (p->header.fine > 0) {
        memcpy(w->finer, w->merged, used);
        uint8_t finer_symbol[SYMBOLS_ALPHABET];
        memcpy(finer_symbol, symbol, sizeof(finer_symbol));
        coarsen(w, groups, symbol, p->header.fine);
        float coarser_bits = class_bits(w, groups, p->header.fine - 1);
        if (coarser_bits >= bits) {
            memcpy(w->merged, w->finer, used);
            memcpy(symbol, finer_symbol, sizeof(finer_symbol));
            return;
        }
        bits = coarser_bits;
        p->header.fine--;
    }
}

/* ---- floors ---- */

#define FLOOR_STATES 1024.0f /* about the usual number of states of a table */

/*
 * Returns the bits of a symbol that occurs c times in n, including low bits and its entry in the table. A rare symbol
 * takes a whole state from the others.
 */
static float symbol_bits(const symbols_workspace *w, uint32_t n, uint32_t c, unsigned low) {
    if (c == 0) {
        return 0;
    }
    float state = (float)n / FLOOR_STATES, count = (float)c;
    float places =
        count < state ? 10.0f + 1.44f * (state / count - 1) : symbols_log2(w, n) - symbols_log2(w, c);
    return TABLE_SYMBOL_BITS + count * (places + (float)low);
}

#define SIZES 65 /* sizes of the 128 symbols with, and the 128 without, a changed top bit */

/* Counts of all symbols by size, and the bits of all sizes from each size on. */
typedef struct size_costs {
    uint32_t same[SIZES], changed[SIZES];
    float bits_from[SIZES + 1];
} size_costs;

static void measure_sizes(const symbols_workspace *w, size_costs *costs, const uint32_t *counts, uint32_t n,
                          unsigned fine) {
    memset(costs, 0, sizeof(*costs));
    for (unsigned size = SIZES; size-- > 0;) {
        float bits = costs->bits_from[size + 1];
        unsigned low = size >> fine < 2 ? 0 : (size >> fine) - 1;
        for (unsigned i = size ? 2 * size - 1 : 0; i <= 2 * size && i < 128; i++) {
            bits += symbol_bits(w, n, counts[i], low) + symbol_bits(w, n, counts[255 - i], low);
            costs->same[size] += counts[i];
            costs->changed[size] += counts[255 - i];
        }
        costs->bits_from[size] = bits;
    }
}

static unsigned choose_floor(const symbols_workspace *w, const uint32_t *counts, uint32_t n, unsigned bits,
                             unsigned fine) {
    size_costs costs;
    measure_sizes(w, &costs, counts, n, fine);
    uint32_t same = costs.same[0], changed = costs.changed[0];
    float best = costs.bits_from[0];
    unsigned floor = 0, swallowed = 0;
    for (unsigned k = 1; k <= bits - 2; k++) {
        for (unsigned below = symbols_below_floor(k, fine); swallowed < below;) {
            swallowed++;
            same += costs.same[swallowed];
            changed += costs.changed[swallowed];
        }
        float cost =
            costs.bits_from[swallowed + 1] + symbol_bits(w, n, same, k) + symbol_bits(w, n, changed, k);
        if (cost < best) {
            best = cost;
            floor = k;
        }
    }
    return floor;
}

void symbols_choose_classes(symbols_workspace *w, symbols_slot *p, const symbols_groups *groups) {
    uint8_t symbol[SYMBOLS_ALPHABET];
    choose_fine(w, p, groups, symbol);
    for (unsigned g = 0; g < groups->count; g++) {
        uint32_t *counts = w->merged[groups->row[g]];
        uint32_t own[SYMBOLS_ALPHABET] = {0};
        uint32_t n = 0;
        for (unsigned s = 0; s < SYMBOLS_ALPHABET; s++) {
            n += counts[s];
        }
        symbols_table *t = &p->header.table[g];
        t->floor = choose_floor(w, counts, n, 8 * p->width, p->header.fine);
        unsigned below = symbols_below_floor(t->floor, p->header.fine);
        uint8_t above[SYMBOLS_ALPHABET];
        for (unsigned s = 0; s < SYMBOLS_ALPHABET; s++) {
            unsigned index = s < 128 ? s : 255 - s;
            index = (index + 1) / 2 <= below ? 0 : index - 2 * below;
            above[s] = (uint8_t)(s < 128 ? index : 255 - index);
            own[above[s]] += counts[s];
        }
        for (unsigned s = 0; s < SYMBOLS_ALPHABET; s++) {
            p->remap[g][s] = above[symbol[s]];
        }
        memcpy(counts, own, sizeof(own));
    }
}
