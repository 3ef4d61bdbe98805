/* Planning a dense stream: integers to symbols, their histogram, tables. */
#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"
#include "codec/symbols_work.h"

/* ---- CLASS ---- */

#define CENTRE_SAMPLES 512

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

/* Low bits that the samples would have around a centre: classes are about as many around any. */
static uint64_t sampled_bits(const int64_t *samples, size_t n, unsigned width, int64_t centre) {
    uint64_t bits = 0;
    for (size_t i = 0; i < n; i++) {
        unsigned symbol = symbols_class_of((uint64_t)samples[i] - (uint64_t)centre, 8 * width, 0);
        bits += (symbol < 128 ? symbol : 255 - symbol) / 2;
    }
    return bits;
}

/* The median of a sample, if differences to it are shorter by an eighth of a bit at least; else 0. */
static uint64_t choose_centre(const void *values, unsigned width, size_t n) {
    int64_t samples[CENTRE_SAMPLES];
    size_t count = n < CENTRE_SAMPLES ? n : CENTRE_SAMPLES;
    for (size_t i = 0; i < count; i++) {
        samples[i] = signed_at(values, width, i * n / count);
    }
    qsort(samples, count, sizeof(samples[0]), compare);
    int64_t median = samples[count / 2];
    uint64_t plain = sampled_bits(samples, count, width, 0);
    uint64_t centred = sampled_bits(samples, count, width, median);
    if (centred + count / 8 + 8 * width >= plain) {
        return 0;
    }
    return width == 8 ? (uint64_t)median : (uint64_t)median & ((UINT64_C(1) << (8 * width)) - 1);
}

static unsigned finest(unsigned width) {
    return width == 1 ? SYMBOLS_FINE_8
                      : (width == 2 ? SYMBOLS_FINE_16 : (width == 4 ? SYMBOLS_FINE_32 : SYMBOLS_FINE_64));
}

static void plan_classes(symbols_workspace *w, symbols_slot *p, const void *values, const uint8_t *context) {
    symbols_header *h = &p->header;
    uint64_t centre = choose_centre(values, p->width, p->count);
    for (unsigned t = 0; t < SYMBOLS_MAX_TABLES; t++) {
        h->table[t].centre = centre;
    }
    symbols_classify(p->symbols, p->width, values, centre, p->count);
    symbols_count(&w->histogram, p->symbols, context, p->count);
    h->fine = finest(p->width);
}

/* ---- SPLIT ---- */

/* The cost of one table over the counts, in bits, low bits included. */
static double split_bits(const symbols_workspace *w, const uint32_t *counts, size_t n, unsigned low_bits) {
    double bits = (double)n * ((double)symbols_log2(w, (uint32_t)n) + low_bits);
    for (unsigned s = 0; s < SYMBOLS_ALPHABET; s++) {
        if (counts[s]) {
            bits += 6.0 - (double)((float)counts[s] * symbols_log2(w, counts[s]));
        }
    }
    return bits;
}

/*
 * The finest split has up to 256 symbols. A coarser one needs a smaller table and loses little where neighbouring
 * symbols are about as frequent.
 */
static unsigned choose_coarsening(symbols_workspace *w, uint64_t bias, unsigned low_bits, unsigned width,
                                  size_t n) {
    uint32_t counts[SYMBOLS_ALPHABET] = {0};
    for (unsigned c = w->histogram.first_context; c <= w->histogram.last_context; c++) {
        symbols_counts_of(counts, &w->histogram, c);
    }
    double best = split_bits(w, counts, n, low_bits);
    unsigned chosen = 0;
    for (unsigned j = 1; low_bits + j < 8 * width; j++) {
        uint32_t coarser[SYMBOLS_ALPHABET] = {0};
        unsigned odd = (unsigned)(bias >> (j - 1) & 1);
        for (unsigned s = 0; s < SYMBOLS_ALPHABET; s++) {
            if (counts[s]) {
                coarser[(s + odd) >> 1] += counts[s];
            }
        }
        double bits = split_bits(w, coarser, n, low_bits + j);
        if (bits < best * 1.0002) {
            chosen = j;
            best = bits < best ? bits : best;
        }
        memcpy(counts, coarser, sizeof(counts));
    }
    return chosen;
}

/* Adds the counts of a split to those of the coarser one that they become. */
static void coarsen_histogram(symbols_histogram *h, const uint8_t *remap) {
    for (unsigned c = h->first_context; c <= h->last_context; c++) {
        uint32_t fine[SYMBOLS_ALPHABET] = {0};
        symbols_counts_of(fine, h, c);
        uint32_t *coarse = h->count[0] + (size_t)c * SYMBOLS_ALPHABET;
        memset(coarse, 0, sizeof(fine));
        memset(h->count[1] + (size_t)c * SYMBOLS_ALPHABET, 0, sizeof(fine));
        for (unsigned s = 0; s < SYMBOLS_ALPHABET; s++) {
            coarse[remap[s]] += fine[s];
        }
    }
}

static void plan_split(symbols_workspace *w, symbols_slot *p, const void *values, const uint8_t *context) {
    symbols_header *h = &p->header;
    uint64_t low, high;
    symbols_range(&low, &high, p->width, values, p->count);
    unsigned low_bits = 0;
    while ((high >> low_bits) - (low >> low_bits) >= SYMBOLS_ALPHABET) {
        low_bits++;
    }
    uint64_t bias = low >> low_bits;
    symbols_split(p->symbols, p->width, values, low_bits, bias, p->count);
    symbols_count(&w->histogram, p->symbols, context, p->count);
    unsigned coarser = choose_coarsening(w, bias, low_bits, p->width, p->count);
    for (unsigned s = 0; s < SYMBOLS_ALPHABET; s++) {
        p->remap[0][s] = (uint8_t)(((bias + s) >> coarser) - (bias >> coarser));
    }
    for (unsigned t = 1; t < SYMBOLS_MAX_TABLES; t++) {
        memcpy(p->remap[t], p->remap[0], sizeof(p->remap[0]));
    }
    if (coarser) {
        coarsen_histogram(&w->histogram, p->remap[0]);
    }
    h->low_bits = low_bits + coarser;
    h->bias = bias >> coarser;
    for (unsigned t = 0; t < SYMBOLS_MAX_TABLES; t++) {
        h->table[t].centre = 0;
        h->table[t].floor = 0;
    }
}

/* ---- the plan ---- */

/* Low bits of all integers, and the most that state bits can take beyond the estimate. */
static void measure(const symbols_workspace *w, symbols_slot *p, const symbols_groups *groups,
                    double symbol_bits) {
    const symbols_header *h = &p->header;
    uint64_t low = 0, most = 0;
    for (unsigned g = 0; g < groups->count; g++) {
        const symbols_table *t = &h->table[g];
        const uint32_t *counts = w->merged[groups->row[g]];
        for (unsigned s = t->first; s <= t->last; s++) {
            if (counts[s]) {
                unsigned log_count = 31u - (unsigned)__builtin_clz(t->counts[s]);
                low += (uint64_t)counts[s] * symbols_mean(h, p->width, g, s).low;
                most += (uint64_t)counts[s] * (h->log - log_count);
            }
        }
    }
    uint64_t states = (uint64_t)h->log << h->lanes_log;
    size_t header = symbols_header_size(h, p->width);
    p->bits = low + (uint64_t)symbol_bits + states;
    p->bound = header + (size_t)((low + most + states) / 8) + 2;
}

size_t symbols_dense_plan(symbols_workspace *w, symbols_slot *p, symbols_groups *groups, symbols_mode mode,
                          unsigned width, const void *values, const uint8_t *context, size_t n) {
    p->header.mode = mode;
    p->header.lanes_log = n < 2048 ? 0 : 3;
    p->width = width;
    p->count = n;
    if (mode == SYMBOLS_CLASS) {
        plan_classes(w, p, values, context);
    } else {
        plan_split(w, p, values, context);
    }
    symbols_group(w, groups);
    p->zeros = 0;
    for (unsigned g = 0; g < groups->count; g++) {
        p->zeros += w->merged[groups->row[g]][0];
    }
    if (mode == SYMBOLS_CLASS) {
        symbols_choose_classes(w, p, groups);
    }
    double symbol_bits = symbols_choose_tables(w, &p->header, groups, width, n);
    measure(w, p, groups, symbol_bits);
    return symbols_header_size(&p->header, width) + (size_t)(p->bits / 8) + 1;
}
