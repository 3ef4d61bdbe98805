/*
 * Levels of the rows and columns of a matrix, which differ in scale. The sum of the two levels predicts the symbol of
 * an element. Second moments are nearly such a product (Adafactor: Shazeer and Stern, arXiv:1804.04235, section 3),
 * first moments and weights less so.
 */
#include <math.h>
#include <string.h>

#include "codec/common/common.h"
#include "codec/entropy/symbols_work.h"

/* ---- from levels to contexts ---- */

CPU_INLINE void add_levels(uint8_t *context, const uint8_t *columns, uint8_t row, size_t n) {
    for (size_t i = 0; i < n; i++) {
        unsigned sum = (unsigned)columns[i] + row;
        context[i] = (uint8_t)(sum < SYMBOLS_CONTEXTS ? sum : SYMBOLS_CONTEXTS - 1);
    }
}

/* Returns the number of elements from i on that are in the same row. */
CPU_INLINE size_t stretch(const symbols_frame *f, size_t i, size_t n, size_t *row, size_t *column) {
    *row = (f->phase + i) / f->columns;
    *column = (f->phase + i) % f->columns;
    size_t rest = f->columns - *column;
    return rest < n - i ? rest : n - i;
}

CPU_INLINE void fill(uint8_t *context, const symbols_frame *f, size_t n) {
    for (size_t i = 0, count, row, column; i < n; i += count) {
        count = stretch(f, i, n, &row, &column);
        add_levels(context + i, f->level + f->rows + column, f->level[row], count);
    }
}

CPU_AVX2 static void fill_avx2(uint8_t *context, const symbols_frame *f, size_t n) {
    fill(context, f, n);
}
CPU_PLAIN static void fill_plain(uint8_t *context, const symbols_frame *f, size_t n) {
    fill(context, f, n);
}

void symbols_fill_levels(uint8_t *context, const symbols_frame *f, size_t n) {
    (cpu_has_avx2() ? fill_avx2 : fill_plain)(context, f, n);
}

/* ---- choosing levels ---- */

/* With fewer elements, in all or per level, levels do not pay. */
#define MIN_ELEMENTS 4096
#define MIN_SHARE    16
#define SAMPLE_SHARE 3
/* Bits per element that levels must save, from the variance that rows and columns explain. */
#define MIN_GAIN 0.04f
/* Levels are this much finer than the deviation that remains. */
#define FINENESS 3.0f

/*
 * The n elements are a sample of `total`. Levels must pay for `total` elements, and the sample must have enough
 * elements per level.
 */
bool symbols_set_grid(uint32_t *columns, uint32_t *phase, uint32_t *rows, const symbols_grid *grid, size_t n,
                      size_t total) {
    *columns = 0;
    if (!grid || n < MIN_ELEMENTS || grid->columns == 0 || grid->columns > n ||
        grid->phase >= grid->columns) {
        return false;
    }
    *columns = (uint32_t)grid->columns;
    *phase = (uint32_t)grid->phase;
    *rows = (uint32_t)((*phase + n + *columns - 1) / *columns);
    size_t all_rows = (*phase + total + *columns - 1) / *columns;
    return *rows > 1 && all_rows + *columns <= total / MIN_SHARE &&
           *rows + *columns <= n / (n < total ? SAMPLE_SHARE : MIN_SHARE) &&
           *rows + *columns <= SYMBOLS_MAX_COUNT / SYMBOLS_FRAMED_MAX; /* only a sample can exceed it */
}

/*
 * Sums the nonzero symbols over rows and columns, and counts them. Zero elements have symbol 0 and would drown out the
 * others. Returns the sum of squares.
 */
CPU_INLINE uint64_t add_row(uint32_t *sums, uint32_t *counts, uint32_t *sum, uint32_t *count,
                            const uint8_t *symbols, size_t n) {
    uint32_t all = 0, above = 0, squares = 0; /* a row has fewer than 2^15 elements (symbols_set_grid) */
    for (size_t i = 0; i < n; i++) {
        uint32_t s = symbols[i], is_above = s != 0;
        all += s;
        above += is_above;
        squares += s * s;
        sums[i] += s;
        counts[i] += is_above;
    }
    *sum += all;
    *count += above;
    return squares;
}

CPU_INLINE uint64_t add_up(symbols_level_sums *s, const symbols_frame *f, const uint8_t *symbols, size_t n) {
    uint64_t squares = 0;
    memset(s->sum, 0, (f->rows + f->columns) * sizeof(s->sum[0]));
    memset(s->count, 0, (f->rows + f->columns) * sizeof(s->count[0]));
    for (size_t i = 0, count, row, column; i < n; i += count) {
        count = stretch(f, i, n, &row, &column);
        squares += add_row(s->sum + f->rows + column, s->count + f->rows + column, &s->sum[row],
                           &s->count[row], symbols + i, count);
    }
    return squares;
}

CPU_AVX2 static uint64_t add_up_avx2(symbols_level_sums *s, const symbols_frame *f, const uint8_t *symbols,
                                     size_t n) {
    return add_up(s, f, symbols, n);
}
CPU_PLAIN static uint64_t add_up_plain(symbols_level_sums *s, const symbols_frame *f, const uint8_t *symbols,
                                       size_t n) {
    return add_up(s, f, symbols, n);
}

typedef struct symbol_variance {
    float mean, variance;
    float total; /* number of elements */
} symbol_variance;

/* Returns mean and variance of all nonzero symbols. */
static symbol_variance of_all(const symbols_level_sums *s, size_t rows, uint64_t squares) {
    double n = 0, sum = 0;
    for (size_t i = 0; i < rows; i++) {
        n += s->count[i];
        sum += s->sum[i];
    }
    double mean = n > 0 ? sum / n : 0;
    return (symbol_variance){(float)mean, n > 0 ? (float)((double)squares / n - mean * mean) : 0, (float)n};
}

/* The means of the rows, or of the columns. A line without nonzero symbols has mean 0, hence level 0. */
typedef struct line_means {
    size_t lines;
    float *mean;
    float lowest, highest;
    float explained; /* variance of the elements that the means explain */
} line_means;

static line_means means_of(symbols_level_sums *s, size_t first, size_t lines, const symbol_variance *all) {
    line_means m = {lines, s->mean + first, all->mean, all->mean, 0};
    const uint32_t *sums = s->sum + first, *counts = s->count + first;
    float variance = 0;
    for (size_t i = 0; i < lines; i++) {
        float mean = counts[i] ? (float)sums[i] / (float)counts[i] : 0;
        m.mean[i] = mean;
        if (counts[i]) {
            float off = mean - all->mean;
            variance += (float)counts[i] * off * off;
            m.lowest = mean < m.lowest ? mean : m.lowest;
            m.highest = mean > m.highest ? mean : m.highest;
        }
    }
    /* Means of few elements differ by chance alone. */
    float chance = (float)lines * all->variance;
    m.explained = all->total > 0 && variance > chance ? (variance - chance) / all->total : 0;
    return m;
}

static void quantise(uint8_t *levels, const line_means *m, float step) {
    for (size_t i = 0; i < m->lines; i++) {
        float level = (m->mean[i] - m->lowest) / step + 0.5f;
        levels[i] = (uint8_t)(level > 0 ? (level < 255 ? level : 255) : 0);
    }
}

/* Returns false if levels do not pay. */
static bool choose(symbols_frame *f, symbols_level_sums *s, uint64_t squares, size_t n) {
    symbol_variance all = of_all(s, f->rows, squares);
    if (!(all.variance > 0)) {
        return false;
    }
    line_means rows = means_of(s, 0, f->rows, &all), columns = means_of(s, f->rows, f->columns, &all);
    float explained = rows.explained + columns.explained;
    float min = all.variance / 64;
    float left = all.variance - explained > min ? all.variance - explained : min;
    if (!(0.5f * log2f(all.variance / left) * all.total >= MIN_GAIN * (float)n)) {
        return false;
    }
    float range = rows.highest - rows.lowest + columns.highest - columns.lowest;
    float step = sqrtf(left) / FINENESS;
    step = step > range / 250 ? step : range / 250;
    quantise(f->level, &rows, step);
    quantise(f->level + f->rows, &columns, step);
    return true;
}

void symbols_choose_levels(symbols_frame *f, symbols_level_sums *s, const symbols_grid *grid,
                           const uint8_t *symbols, size_t n, size_t total) {
    if (!symbols_set_grid(&f->columns, &f->phase, &f->rows, grid, n, total) ||
        !choose(f, s, (cpu_has_avx2() ? add_up_avx2 : add_up_plain)(s, f, symbols, n), n)) {
        f->columns = f->rows = 0;
    }
}

bool symbols_choose_counted_levels(symbols_frame *f, symbols_level_sums *s, uint64_t squares, size_t n) {
    return choose(f, s, squares, n);
}
