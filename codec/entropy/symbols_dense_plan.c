/* Plans a dense stream: symbols of the integers, their histogram, tables. */
#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"
#include "codec/entropy/symbols_work.h"

/* ---- CLASS ---- */

static int64_t signed_at(const void *values, unsigned width, size_t i) {
    const uint8_t *at = (const uint8_t *)values + i * width;
    switch (width) {
    case 1:
        return (int8_t)*at;
    case 2:
        return (int16_t)load_le16(at);
    case 4:
        return (int32_t)load_le32(at);
    default:
        return (int64_t)load_le64(at);
    }
}

static int compare(const void *a, const void *b) {
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

/*
 * Counts the low bits that the samples would have around a centre. The number of classes hardly depends on the centre.
 */
static uint64_t sampled_bits(const int64_t *samples, size_t n, unsigned width, int64_t centre) {
    uint64_t bits = 0;
    for (size_t i = 0; i < n; i++) {
        unsigned symbol = symbols_class_of((uint64_t)samples[i] - (uint64_t)centre, 8 * width, 0);
        bits += (symbol < 128 ? symbol : 255 - symbol) / 2;
    }
    return bits;
}

/* Returns the median of the sample if it saves its own bits and more than 1/8 bit per difference; else 0. */
uint64_t symbols_centre(int64_t *samples, size_t count, unsigned width) {
    qsort(samples, count, sizeof(samples[0]), compare);
    int64_t median = samples[count / 2];
    uint64_t plain = sampled_bits(samples, count, width, 0);
    uint64_t centred = sampled_bits(samples, count, width, median);
    if (centred + count / 8 + 8 * width >= plain) {
        return 0;
    }
    return width == 8 ? (uint64_t)median : (uint64_t)median & ((UINT64_C(1) << (8 * width)) - 1);
}

static uint64_t choose_centre(const void *values, unsigned width, size_t n) {
    int64_t samples[SYMBOLS_PARTS_SAMPLE];
    size_t count = symbols_sample_count(n);
    for (size_t i = 0; i < count; i++) {
        samples[i] = signed_at(values, width, i * n / count);
    }
    return symbols_centre(samples, count, width);
}

unsigned symbols_finest(unsigned width) {
    return width == 1 ? SYMBOLS_FINE_8
                      : (width == 2 ? SYMBOLS_FINE_16 : (width == 4 ? SYMBOLS_FINE_32 : SYMBOLS_FINE_64));
}

static void use_classes(symbols_header *h, unsigned width, uint64_t centre) {
    for (unsigned t = 0; t < SYMBOLS_MAX_TABLES; t++) {
        h->table[t].centre = centre;
    }
    h->fine = symbols_finest(width);
}

static void classify(symbols_slot *p, const void *values) {
    uint64_t centre = choose_centre(values, p->width, p->count);
    use_classes(&p->header, p->width, centre);
    symbols_classify(p->symbols, p->width, values, centre, p->count);
}

/* ---- SPLIT ---- */

/* Returns the bits below the symbols of the finest split, at least `min`: at most 256 symbols from `low` to `high`. */
static unsigned finest_split(uint64_t low, uint64_t high, unsigned min) {
    while ((high >> min) - (low >> min) >= SYMBOLS_ALPHABET) {
        min++;
    }
    return min;
}

#define SHARED_WORTH 128 /* omitting shared bits must save this many bits */

/* shift: number of lowest bits that all n integers share. low, high: the smallest and the largest integer. */
static symbols_splitting splitting_of(uint64_t low, uint64_t high, unsigned shift, uint64_t shared,
                                      size_t n) {
    unsigned bits = finest_split(low, high, 0), saved = shift < bits ? shift : bits;
    symbols_splitting s = {.bits = bits};
    if ((uint64_t)saved * n >= SHARED_WORTH) {
        s.shift = shift;
        s.shared = shared;
        s.bits = finest_split(low, high, shift);
    }
    s.bias = low >> s.bits;
    return s;
}

symbols_splitting symbols_split_finest(const symbols_extent *extent) {
    unsigned max = 8 * extent->width - 1; /* one bit must remain for the symbols */
    unsigned zeros = extent->differing ? (unsigned)__builtin_ctzll(extent->differing) : max;
    unsigned shift = zeros < max ? zeros : max;
    return splitting_of(extent->low, extent->high, shift, extent->any & ((UINT64_C(1) << shift) - 1),
                        extent->n);
}

static void set_split(symbols_slot *p, symbols_frame *frame, const symbols_splitting *s) {
    if (frame) {
        frame->shift = s->shift;
        frame->shared = s->shared;
    }
    p->shift = s->shift;
    p->header.low_bits = s->bits - s->shift;
    p->header.bias = s->bias;
}

/* frame NULL: every bit is coded. */
static void split_finely(symbols_slot *p, symbols_frame *frame, const void *values) {
    uint64_t low, high;
    symbols_range(&low, &high, p->width, values, p->count);
    if (frame) {
        symbols_shared_bits(frame, p->width, values, p->count);
    }
    symbols_splitting s =
        splitting_of(low, high, frame ? frame->shift : 0, frame ? frame->shared : 0, p->count);
    set_split(p, frame, &s);
    symbols_split(p->symbols, p->width, values, s.bits, s.bias, p->count);
}

/* Symbol counts of a split, per group. */
typedef struct split_counts {
    unsigned rows, symbols;
    uint32_t count[SYMBOLS_MAX_TABLES][SYMBOLS_ALPHABET];
} split_counts;

/* Returns the cost in bits with one table per group, without low bits. */
static double split_bits(const symbols_workspace *w, const split_counts *c) {
    double bits = 0;
    for (unsigned g = 0; g < c->rows; g++) {
        uint32_t n = 0;
        float saved = 0;
        for (unsigned s = 0; s < c->symbols; s++) {
            uint32_t count = c->count[g][s];
            if (count) {
                saved += (float)count * symbols_log2(w, count) - 6.0f;
                n += count;
            }
        }
        bits += (double)((float)n * symbols_log2(w, n) - saved);
    }
    return bits;
}

/* Merges pairs of symbols: each symbol passes one bit to its low bits. */
static void halve(split_counts *to, const split_counts *from, unsigned odd) {
    to->rows = from->rows;
    to->symbols = ((from->symbols - 1 + odd) >> 1) + 1;
    for (unsigned g = 0; g < from->rows; g++) {
        memset(to->count[g], 0, to->symbols * sizeof(to->count[g][0]));
        for (unsigned s = 0; s < from->symbols; s++) {
            to->count[g][(s + odd) >> 1] += from->count[g][s];
        }
    }
}

/*
 * Chooses the split. A coarser one needs smaller tables, and loses little where neighbouring symbols are about equally
 * frequent. Sets the counts of the groups to those of the chosen split.
 */
static void choose_split(symbols_workspace *w, symbols_slot *p, const symbols_groups *groups) {
    symbols_header *h = &p->header;
    split_counts at[2];
    unsigned now = 0, chosen = 0;
    at[0].rows = groups->count;
    at[0].symbols = SYMBOLS_ALPHABET;
    for (unsigned g = 0; g < groups->count; g++) {
        memcpy(at[0].count[g], w->merged[groups->row[g]], sizeof(at[0].count[g]));
    }
    double best = split_bits(w, &at[0]);
    for (unsigned j = 1; h->low_bits + p->shift + j < 8 * p->width && at[now].symbols > 1; j++) {
        halve(&at[!now], &at[now], (unsigned)(h->bias >> (j - 1) & 1));
        now = !now;
        double bits = split_bits(w, &at[now]) + (double)p->count * j;
        if (bits < best * 1.0002) {
            chosen = j;
            best = bits < best ? bits : best;
            for (unsigned g = 0; g < groups->count; g++) {
                uint32_t *to = w->merged[groups->row[g]];
                memset(to, 0, sizeof(w->merged[0]));
                memcpy(to, at[now].count[g], at[now].symbols * sizeof(to[0]));
            }
        }
    }
    for (unsigned s = 0; s < SYMBOLS_ALPHABET; s++) {
        p->remap[0][s] = (uint8_t)(((h->bias + s) >> chosen) - (h->bias >> chosen));
    }
    for (unsigned t = 0; t < SYMBOLS_MAX_TABLES; t++) {
        memcpy(p->remap[t], p->remap[0], sizeof(p->remap[0]));
        h->table[t].centre = 0;
        h->table[t].floor = 0;
    }
    h->low_bits += chosen;
    h->bias >>= chosen;
}

/* ---- the plan ---- */

/* Sets the estimated bits of the payload, and the bound of the stream, which allows for the most state bits. */
static void measure(const symbols_workspace *w, symbols_slot *p, const symbols_groups *groups,
                    double symbol_bits) {
    const symbols_header *h = &p->header;
    uint64_t low = 0, max = 0;
    for (unsigned g = 0; g < groups->count; g++) {
        const symbols_table *t = &h->table[g];
        const uint32_t *counts = w->merged[groups->row[g]];
        for (unsigned s = t->first; s <= t->last; s++) {
            if (counts[s]) {
                unsigned log_count = 31u - (unsigned)__builtin_clz(t->counts[s]);
                low += (uint64_t)counts[s] * symbols_mean(h, p->width, g, s).low;
                max += (uint64_t)counts[s] * (h->log - log_count);
            }
        }
    }
    uint64_t states = (uint64_t)h->log << h->lanes_log;
    size_t header = symbols_header_size(h, p->width);
    p->bits = low + (uint64_t)symbol_bits + states;
    p->bound = header + (size_t)((low + max + states) / 8) + 2;
}

/* Derives groups of contexts and the symbols of each from the histogram. */
static void refine(symbols_workspace *w, symbols_slot *p, symbols_groups *groups) {
    symbols_group(w, groups, p->count);
    p->zeros = 0;
    for (unsigned g = 0; g < groups->count; g++) {
        p->zeros += w->merged[groups->row[g]][0];
    }
    if (p->header.mode == SYMBOLS_CLASS) {
        symbols_choose_classes(w, p, groups);
    } else {
        choose_split(w, p, groups);
    }
}

/* Makes tables from the groups. Returns the expected size in bytes. */
static size_t finish(symbols_workspace *w, symbols_slot *p, const symbols_groups *groups) {
    double symbol_bits = symbols_choose_tables(w, &p->header, groups, p->width, p->count);
    measure(w, p, groups, symbol_bits);
    return symbols_header_size(&p->header, p->width) + (size_t)(p->bits / 8) + 1;
}

static void begin_slot(symbols_slot *p, symbols_mode mode, unsigned width, size_t n) {
    p->header.mode = mode;
    p->header.lanes_log = n < 2048 ? 0 : 3;
    p->width = width;
    p->count = n;
}

/* Maps integers to symbols and makes their histogram. */
static void begin(symbols_workspace *w, symbols_slot *p, symbols_mode mode, const symbols_input *in) {
    begin_slot(p, mode, in->width, in->n);
    if (mode == SYMBOLS_CLASS) {
        p->shift = 0;
        classify(p, in->values);
    } else {
        split_finely(p, NULL, in->values);
    }
    symbols_count(&w->histogram, p->symbols, in->context, in->n);
}

/* As begin, in SPLIT with a frame. */
static void begin_framed(symbols_workspace *w, symbols_slot *p, symbols_frame *frame,
                         const symbols_grid *grid, const symbols_input *in, size_t total) {
    size_t n = in->n;
    begin_slot(p, SYMBOLS_SPLIT, in->width, n);
    split_finely(p, frame, in->values);
    symbols_choose_levels(frame, &w->level_sums, grid, p->symbols, n, total);
    if (frame->columns) {
        symbols_fill_levels(w->level_context, frame, n);
    }
    symbols_count(&w->histogram, p->symbols, frame->columns ? w->level_context : NULL, n);
}

size_t symbols_dense_plan(symbols_workspace *w, symbols_slot *p, symbols_groups *groups, symbols_mode mode,
                          const symbols_input *in) {
    begin(w, p, mode, in);
    refine(w, p, groups);
    return finish(w, p, groups);
}

size_t symbols_counted_plan(symbols_workspace *w, symbols_slot *p, symbols_groups *groups,
                            const symbols_counts *counts) {
    begin_slot(p, SYMBOLS_CLASS, counts->width, counts->n);
    p->shift = 0;
    use_classes(&p->header, counts->width, counts->centre);
    symbols_set_counts(&w->histogram, counts->counts, counts->first_context, counts->last_context);
    refine(w, p, groups);
    return finish(w, p, groups);
}

static size_t finish_framed(symbols_workspace *w, symbols_slot *p, symbols_frame *frame, bool *framed) {
    symbols_groups groups;
    refine(w, p, &groups);
    if (groups.count == 1) {
        frame->columns = frame->rows = 0; /* rows and columns do not help after all */
    }
    *framed = frame->columns || frame->shift;
    return finish(w, p, &groups);
}

size_t symbols_framed_plan(symbols_workspace *w, symbols_slot *p, symbols_frame *frame, bool *framed,
                           const symbols_grid *grid, const symbols_input *in) {
    begin_framed(w, p, frame, grid, in, in->n);
    return finish_framed(w, p, frame, framed);
}

size_t symbols_counted_framed_plan(symbols_workspace *w, symbols_slot *p, symbols_frame *frame, bool *framed,
                                   const symbols_counts *counts, const symbols_splitting *split) {
    begin_slot(p, SYMBOLS_SPLIT, counts->width, counts->n);
    set_split(p, frame, split);
    symbols_set_counts(&w->histogram, counts->counts, counts->first_context, counts->last_context);
    return finish_framed(w, p, frame, framed);
}

#define LEVEL_BITS 4.5 /* approximate bits per level */

size_t symbols_estimate(symbols_workspace *w, symbols_mode mode, const symbols_input *sample,
                        const symbols_grid *grid, size_t all) {
    symbols_plan_slot *plan = &w->plan[mode == SYMBOLS_CLASS];
    symbols_slot *p = &plan->dense;
    symbols_groups groups;
    double scale = (double)all / (double)sample->n, bits = 0;
    if (mode == SYMBOLS_SPLIT && !sample->context) {
        begin_framed(w, p, &plan->frame, grid, sample, all);
        bits = LEVEL_BITS * (scale * plan->frame.rows + plan->frame.columns);
    } else {
        begin(w, p, mode, sample);
    }
    refine(w, p, &groups);
    for (unsigned g = 0; g < groups.count; g++) {
        const uint32_t *counts = w->merged[groups.row[g]];
        uint64_t low = 0;
        uint32_t total = 0;
        for (unsigned s = 0; s < SYMBOLS_ALPHABET; s++) {
            if (counts[s]) {
                low += (uint64_t)counts[s] * symbols_mean(&p->header, p->width, g, s).low;
                total += counts[s];
            }
        }
        float tables = 0;
        float symbols = symbols_table_bits(w, counts, total, &tables);
        bits += (double)tables + scale * ((double)symbols + (double)low);
    }
    p->count = 0; /* nothing is planned */
    return (size_t)(bits / 8) + 1;
}
