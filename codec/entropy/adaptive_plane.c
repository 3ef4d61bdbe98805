/*
 * Adaptive streams of planes. The number of nonzero integers so far in a row and in a column predicts the next integer:
 * the two densities multiply. This estimate chooses the model, which then adapts. If the plane has clusters, the
 * neighbours decoded so far refine the estimate.
 */
#include "codec/entropy/entropy.h"

#include <string.h>

#include "codec/entropy/adaptive_coder.h"
#include "codec/entropy/adaptive_size.h"

#define HINTS      16
#define LEVELS     64 /* levels of the estimate, half an octave each */
#define CLASSES    31 /* classes of size models, by the probability that the integer is nonzero */
#define COUNT_MAX  (1u << 30)
#define ACTIVE_MAX 2 /* larger integers count as this */

/* Densities and activities are in units of 2^-24, logarithms to base 2 in 1/16. */
#define UNIT          24
#define LEVEL_LOWEST  (16u * (UNIT - 17))
#define DENSITY_STEPS 72                    /* steps of a quarter octave, from 2^-17 to 2 */
#define ROW_SURE      ((uint64_t)2 << UNIT) /* prior weight of a row's prediction, as activity already seen */
#define COLUMN_MIN    3                     /* smallest prior weight of a column, in rows */
#define COLUMN_MAX    100                   /* rows that a column remembers */
#define SURE          32
#define SIGN_SURE     40
#define MODES         4
#define LOG_MAX       511
#define TRIED         (1u << 14) /* integers that the encoder tries first */

/* Prior weight against neighbours: the smaller, the more they count. The first mode ignores them. */
static const uint8_t neighbour_weight[MODES] = {0, 32, 12, 4};

static const adaptive_pace pace_zero = {512, 8192}, pace_sign = {1024, 4096}, pace_size = {32, 512};

typedef struct plane_coder {
    adaptive_coder coder;
    const adaptive_plane *plane;
    unsigned mode, density;
    uint64_t active, expected; /* the row so far: its activity, and the activity expected from its columns */
    adaptive_bit nonzero[HINTS][LEVELS];
    adaptive_bit negative[9];
    adaptive_size_models size[CLASSES];
    bool class_ready[CLASSES];
    uint32_t column[]; /* activity of each column, starting at the first integer's */
} plane_coder;

/* ---- integer logarithms, piecewise linear between powers of two (Mitchell, IRE Trans. EC-11, 1962) ---- */

CPU_INLINE unsigned log_of(uint64_t x) {
    unsigned whole = 63u - (unsigned)__builtin_clzll(x);
    return whole * 16 + (unsigned)((x << (63 - whole)) >> 59 & 15);
}

/* log < 640. */
CPU_INLINE uint64_t power_of(unsigned log) {
    return ((uint64_t)(16 + log % 16) << (log / 16)) >> 4;
}

/* ---- estimates ---- */

static uint32_t density_of(unsigned density) {
    return (4 + density % 4) << (density / 4 + UNIT - 17 - 2);
}

/*
 * Starts a row's prediction, relative to that of its columns: the mean of the previous row's ratio and that of an
 * average row.
 */
static void begin_row(plane_coder *p, bool first) {
    uint64_t ratio = first ? 256 : (p->active << 8) / p->expected;
    ratio = ratio < 4096 ? ratio : 4096;
    p->expected = ROW_SURE;
    p->active = ROW_SURE / 2 + ((ROW_SURE / 2 * ratio) >> 8);
}

/* Returns how far an integer moves the activity of its column after `count` rows, in 1/65536. */
static uint32_t column_step(const plane_coder *p, uint64_t count) {
    uint32_t sure = (1u << UNIT) / density_of(p->density);
    sure = sure > COLUMN_MIN ? sure : COLUMN_MIN;
    return 65536u / ((count < COLUMN_MAX ? (uint32_t)count : COLUMN_MAX) + sure + 1);
}

CPU_INLINE uint32_t active_of(int32_t value) {
    return value == 0 ? 0 : (value >= ACTIVE_MAX || value <= -ACTIVE_MAX ? ACTIVE_MAX : 1);
}

/* Sums the activity of the known neighbours. The nearest two count twice, which makes eight. */
static uint32_t neighbours(const int32_t *values, size_t i, uint64_t column, uint64_t columns) {
    uint32_t sum = 0;
    if (column >= 1 && i >= 1) {
        sum += 2 * active_of(values[i - 1]);
        sum += column >= 2 && i >= 2 ? active_of(values[i - 2]) : 0;
        sum += i >= columns + 1 ? active_of(values[i - columns - 1]) : 0;
    }
    if (i >= columns) {
        sum += 2 * active_of(values[i - columns]);
        sum += i - columns >= columns ? active_of(values[i - 2 * columns]) : 0;
    }
    if (column + 1 < columns && i + 1 >= columns) {
        sum += active_of(values[i - columns + 1]);
    }
    return sum;
}

/* Estimates how active an integer of this row and column is: the level. */
CPU_INLINE unsigned level_of(const plane_coder *p, const int32_t *values, size_t i, uint64_t column,
                             uint32_t of_column) {
    int log = (int)(log_of(of_column) + log_of(p->active)) - (int)log_of(p->expected);
    if (p->mode) {
        uint64_t weight = (uint64_t)neighbour_weight[p->mode] << UNIT;
        uint64_t around = (uint64_t)neighbours(values, i, column, p->plane->columns) << UNIT;
        uint64_t alone = power_of(log < 0 ? 0 : (log < LOG_MAX ? (unsigned)log : LOG_MAX)) * 8;
        log += (int)log_of(around + weight) - (int)log_of(alone + weight);
    }
    int level = (log - (int)LEVEL_LOWEST) / 8;
    return log < (int)LEVEL_LOWEST ? 0 : (level < LEVELS ? (unsigned)level : LEVELS - 1);
}

CPU_INLINE void learn(plane_coder *p, uint32_t *column, uint32_t step, int32_t value) {
    uint32_t active = active_of(value) << UNIT;
    p->active += active;
    p->expected += *column;
    uint64_t sum = (uint64_t)*column * (65536 - step) + (uint64_t)active * step;
    *column = (uint32_t)(sum >> 16) | 1;
}

/* ---- integers ---- */

/* Selects size models by the probability that the integer is nonzero. */
static adaptive_size_models *sizes_of(plane_coder *p, uint32_t probability) {
    unsigned class = probability < 32768 ? log_of(probability) / 16 : 30 - log_of(65536 - probability) / 16;
    if (!p->class_ready[class]) {
        p->class_ready[class] = true;
        adaptive_size_begin(&p->size[class], 64, 2);
    }
    return &p->size[class];
}

static unsigned sign_context(const int32_t *values, size_t i, uint64_t column, uint64_t columns) {
    int32_t left = column >= 1 && i >= 1 ? values[i - 1] : 0, up = i >= columns ? values[i - columns] : 0;
    return 3u * (unsigned)((left > 0) - (left < 0) + 1) + (unsigned)((up > 0) - (up < 0) + 1);
}

/*
 * Codes a nonzero integer. `probability`: that of being nonzero. Returns false if it does not fit 32 bits (decoding).
 */
CPU_INLINE bool code_nonzero(plane_coder *p, bool decoding, adaptive_bit *sign, uint32_t probability,
                             int32_t *value) {
    adaptive_coder *c = &p->coder;
    unsigned negative = adaptive_code_bit(c, decoding, sign, pace_sign, *value < 0);
    uint32_t magnitude = *value < 0 ? 0 - (uint32_t)*value : (uint32_t)*value;
    uint64_t size = adaptive_code_size(c, decoding, sizes_of(p, probability), pace_size, 0, magnitude - 1);
    if (decoding) {
        *value = adaptive_value(size, negative);
    }
    return size < (uint64_t)INT32_MAX + negative;
}

/* Codes the first `count` integers. Decoding writes them to `out`, and `values` must then be the same array. */
CPU_INLINE bool code_plane(plane_coder *p, bool decoding, const int32_t *values, int32_t *out, size_t count) {
    uint64_t columns = p->plane->columns, column = p->plane->phase;
    uint32_t step = column_step(p, 0);
    begin_row(p, true);
    for (size_t i = 0, slot = 0; i < count; i++) {
        unsigned hint = p->plane->hints ? p->plane->hints[i] % HINTS : 0;
        adaptive_bit *nonzero = &p->nonzero[hint][level_of(p, values, i, column, p->column[slot])];
        uint32_t probability = adaptive_probability(nonzero);
        int32_t value = decoding ? 0 : values[i];
        if (adaptive_code_bit(&p->coder, decoding, nonzero, pace_zero, value != 0) &&
            !code_nonzero(p, decoding, &p->negative[sign_context(values, i, column, p->plane->columns)],
                          probability, &value)) {
            return false;
        }
        if (decoding) {
            out[i] = value;
            if (!adaptive_sound(&p->coder)) {
                return false;
            }
        }
        learn(p, &p->column[slot], step, value);
        if (++column == columns) {
            column = 0;
            begin_row(p, false);
        }
        if (++slot == columns) {
            slot = 0;
            step = column_step(p, i / columns + 1);
        }
    }
    return true;
}

/* ---- streams ---- */

static void begin(plane_coder *p, unsigned mode, unsigned density) {
    p->mode = mode;
    p->density = density;
    for (uint64_t j = 0; j < p->plane->columns && j < p->plane->count; j++) {
        p->column[j] = density_of(density);
    }
    for (unsigned level = 0; level < LEVELS; level++) {
        uint64_t active = power_of(LEVEL_LOWEST + 8 * level + 4);
        uint32_t one = (uint32_t)((active << UNIT) / (active + (1u << UNIT)));
        for (unsigned hint = 0; hint < HINTS; hint++) {
            p->nonzero[hint][level] = (adaptive_bit){one, one, SURE};
        }
    }
    for (unsigned i = 0; i < 9; i++) {
        p->negative[i] = adaptive_bit_of(128, SIGN_SURE);
    }
    memset(p->class_ready, 0, sizeof(p->class_ready));
}

static plane_coder *create(const adaptive_plane *plane, adaptive_scratch *scratch, ckd_error *err) {
    uint64_t columns = plane->columns < plane->count ? plane->columns : plane->count;
    plane_coder *p = bytes_scratch(&scratch->models, sizeof(*p) + columns * sizeof(p->column[0]),
                                   "the models of an adaptive stream", err);
    if (p) {
        p->plane = plane;
    }
    return p;
}

static void encode(plane_coder *p, bytes *to, unsigned mode, unsigned density, const int32_t *values,
                   size_t count) {
    begin(p, mode, density);
    adaptive_begin_encoding(&p->coder, to);
    adaptive_code_plain(&p->coder, false, 2, ADAPTIVE_PLANE);
    adaptive_code_plain(&p->coder, false, 2, mode);
    adaptive_code_plain(&p->coder, false, 7, density);
    code_plane(p, false, values, NULL, count);
    adaptive_end_encoding(&p->coder);
}

static unsigned measured_density(const int32_t *values, size_t count) {
    uint64_t active = 0;
    for (size_t i = 0; i < count; i++) {
        active += active_of(values[i]);
    }
    unsigned density = 0;
    while (density < DENSITY_STEPS && (uint64_t)density_of(density) * count < active << UNIT) {
        density++;
    }
    return density;
}

static size_t tried_size(plane_coder *p, bytes *scratch, unsigned mode, unsigned density,
                         const int32_t *values, size_t count) {
    encode(p, bytes_reset(scratch), mode, density, values, count < TRIED ? count : TRIED);
    return scratch->size;
}

/* Finds the best mode for the first integers. Any mode is valid if there is no memory for trials. */
static unsigned choose_mode(plane_coder *p, bytes *scratch, unsigned density, const int32_t *values,
                            size_t count) {
    size_t min = tried_size(p, scratch, 0, density, values, count);
    size_t max = tried_size(p, scratch, MODES - 1, density, values, count);
    unsigned extreme = max < min ? MODES - 1 : 0, milder = max < min ? MODES - 2 : 1;
    size_t between = tried_size(p, scratch, milder, density, values, count);
    return between < (max < min ? max : min) ? milder : extreme;
}

void adaptive_plane_encode(bytes *to, const adaptive_plane *plane, const int32_t *values,
                           adaptive_scratch *scratch) {
    if (plane->count == 0) {
        return;
    }
    plane_coder *p = plane->count <= COUNT_MAX ? create(plane, scratch, NULL) : NULL;
    if (!p) {
        to->failed = true;
        return;
    }
    unsigned density = measured_density(values, plane->count);
    unsigned mode = choose_mode(p, &scratch->tried, density, values, plane->count);
    encode(p, to, mode, density, values, plane->count);
}

static ckd_status decode(plane_coder *p, int32_t *values, const void *from, size_t size, ckd_error *err) {
    adaptive_begin_decoding(&p->coder, from, size);
    ckd_status status = adaptive_check_kind(&p->coder, ADAPTIVE_PLANE, ADAPTIVE_PLANE, err, NULL);
    if (status != CKD_OK) {
        return status;
    }
    unsigned mode = adaptive_code_plain(&p->coder, true, 2, 0);
    unsigned density = adaptive_code_plain(&p->coder, true, 7, 0);
    if (density > DENSITY_STEPS) {
        return err_corrupt(err, NULL, CKD_NO_OFFSET, "the density of an adaptive stream is invalid");
    }
    begin(p, mode, density);
    if (!code_plane(p, true, values, values, p->plane->count) || !adaptive_end_decoding(&p->coder)) {
        return err_corrupt(err, NULL, CKD_NO_OFFSET, "an adaptive stream does not end where it should");
    }
    return CKD_OK;
}

ckd_status adaptive_plane_decode(int32_t *values, const adaptive_plane *plane, const void *from, size_t size,
                                 adaptive_scratch *scratch, ckd_error *err) {
    if (plane->count > COUNT_MAX) {
        return err_set(err, CKD_E_INVALID, "an adaptive stream cannot have %zu integers", plane->count);
    }
    if (plane->count == 0) {
        return adaptive_check_empty(size, err);
    }
    plane_coder *p = create(plane, scratch, err);
    ckd_status status = p ? decode(p, values, from, size, err) : CKD_E_NOMEM;
    if (status != CKD_OK) {
        memset(values, 0, plane->count * sizeof(*values));
    }
    return status;
}
