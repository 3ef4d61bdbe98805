/* Statistics of a tile, and the steps that follow from them. */
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/lossy.h"
#include "kernels/scalar_lattice.h"

#define TILE_ELEMENTS  (UINT64_C(1) << 24) /* of a tile at most: it is in memory a few times as floats */
#define DEFAULT_EFFORT 5
#define FEWEST \
    64u /* elements, below which a tensor is exact: it is cheap then, and small tensors are special */
#define NARROWEST      8u   /* rows and columns of a matrix that have steps of their own */
#define UNITS_MOVED    16.0 /* lattice units in the movement's root mean square */
#define LEAST_MOVEMENT 0.25 /* of the residual's energy: below, it is leftovers that say nothing */
#define COARSEST       64.0 /* step of weights, in those they have without a parent */
#define OF_BOUND \
    1.7 /* the step, at most: rounded to a quarter octave, and values to the lattice, less than two */
#define NOTHING_MOVED   6e-3 /* of the error: it is known to three digits */
#define OUTLIER         32.0 /* root mean squares */
#define ONE_OUTLIER_IN  4096u
#define MOST_WEIGHT     108 /* of a row or column, in quarter octaves: beyond, the lattice has no place for it */
#define MOST_STEP       400  /* a block's, in quarter octaves */
#define LEVELS_NONE     4096 /* a step that no difference reaches */
#define MEANS_UP        0.7  /* fraction of a step from which means are corrected */
#define LEVELS_OF_MEANS 4    /* rows' and columns' corrections of second moments: half octaves */

lossy_part lossy_part_of(ckd_role role, ckd_dtype dtype) {
    if (!lattice_dtype(dtype)) {
        return LOSSY_NONE;
    }
    switch (role) {
    case CKD_ROLE_WEIGHT:
    case CKD_ROLE_MASTER:
        return LOSSY_WEIGHT;
    case CKD_ROLE_EXP_AVG:
        return LOSSY_MOMENT;
    case CKD_ROLE_EXP_AVG_SQ:
        return dtype == CKD_F16 ? LOSSY_NONE : LOSSY_SECOND; /* its denormals are no levels */
    default:
        return LOSSY_NONE;
    }
}

bool lossy_wants_parent(const lossy_tile *t) {
    return t->part == LOSSY_WEIGHT || (t->part == LOSSY_SECOND && t->recipe->second < LEVELS_NONE);
}

lossy_recipe lossy_recipe_of(ckd_fidelity fidelity, int effort) {
    bool near = fidelity == CKD_NEAR;
    effort = effort ? effort : DEFAULT_EFFORT;
    return (lossy_recipe){.weight = near ? 2 : 3.5,
                          .moment = near ? 3 : 6,
                          .second = near ? 16 : LEVELS_NONE,
                          .second_vector = near ? 2 : 4,
                          .vector = 0.25,
                          .root_units = near ? 128 : 64,
                          .lambda = 0.15,
                          .effort = effort,
                          .most_rank = effort < 4 ? 64 : (effort < 7 ? 256 : LATTICE_MAX_RANK),
                          .rounds = effort < 4 ? 1 : (effort < 7 ? 2 : 4)};
}

/* ---- the matrix ---- */

/*
 * Rows of a matrix are its first dimension and columns its last; a stack of matrices (three dimensions) is taken one by one; what has
 * more is a convolution: one row for each output channel.
 */
static void fold(uint64_t *columns, uint64_t *stacked, const geometry *g, const ckd_region *region) {
    const uint64_t *lengths = region->kind == CKD_REGION_BOX ? region->lengths : g->shape;
    uint32_t from = g->ndim > 3 ? 1 : (g->ndim > 1 ? g->ndim - 1 : 0);
    *columns = 1;
    for (uint32_t d = from; d < g->ndim; d++) {
        *columns *= lengths[d];
    }
    *stacked = g->ndim == 3 ? lengths[1] : 0;
}

void lossy_tile_cut(lossy_tile *t, const geometry *g, const ckd_region *region, uint64_t elements,
                    uint64_t first) {
    uint64_t columns, stacked, origin = region->kind == CKD_REGION_FLAT ? region->start : 0;
    fold(&columns, &stacked, g, region);
    uint64_t rows = columns && columns <= TILE_ELEMENTS ? TILE_ELEMENTS / columns : 0;
    t->first = first;
    t->vector = g->ndim < 2 || columns == 1 || rows == 0;
    uint64_t most = t->vector ? TILE_ELEMENTS : rows * columns - (origin + first) % columns;
    if (!t->vector && stacked) { /* to the end of this matrix of the stack */
        uint64_t matrix = stacked * columns, left = matrix - (origin + first) % matrix;
        most = left < most ? left : most;
    }
    t->count = elements - first < most ? elements - first : most;
    t->columns = t->vector ? t->count : columns;
    t->phase = t->vector ? 0 : (origin + first) % columns;
    t->vector |= t->count <= t->columns;
}

uint64_t lossy_block_count(const lossy_tile *t, uint64_t at) {
    uint64_t most = CKD_BLOCK_ELEMENTS;
    if (!t->vector && t->columns <= most) {
        most = most / t->columns * t->columns - (t->phase + at) % t->columns;
    }
    return t->count - at < most ? t->count - at : most;
}

static uint64_t rows_of(const lossy_tile *t) {
    return (t->phase + t->count + t->columns - 1) / t->columns;
}
static bool has_rows(const lossy_tile *t) {
    return !t->vector && t->columns <= LATTICE_MAX_COLUMNS && t->columns >= NARROWEST &&
           rows_of(t) >= NARROWEST;
}

static ckd_status make_steps(lossy_tile *t, ckd_error *err) {
    size_t rows = rows_of(t), columns = t->columns;
    int32_t *row = bytes_scratch(&t->row, rows * sizeof(int32_t), "coding scratch", err);
    int32_t *column =
        row ? bytes_scratch(&t->column, columns * sizeof(int32_t), "coding scratch", err) : NULL;
    if (!column) {
        return CKD_E_NOMEM;
    }
    t->plan.row = row;
    t->plan.own.step = column;
    return CKD_OK;
}

/* ---- sums over a tile ---- */

/* Elements of row `row`: how many, the first one, and its column. */
static uint64_t span_of(const lossy_tile *t, uint64_t row, uint64_t *first, uint64_t *column) {
    uint64_t start = row * t->columns, end = start + t->columns;
    *first = start > t->phase ? start - t->phase : 0;
    *column = *first + t->phase - start;
    return (end - t->phase < t->count ? end - t->phase : t->count) - *first;
}

/*
 * Of values, and of their differences to the parent's: squares, also over rows' and columns' steps. Larger ones than most[0], or
 * differences than most[1], do not count.
 */
static ckd_status add_up(lattice_sums *s, const lossy_tile *t, const float most[2], bool lattice,
                         const kernels *k, ckd_error *err) {
    const int32_t *rows = t->plan.row, *columns = t->plan.own.step;
    float *weight = columns ? malloc(t->columns * sizeof(float)) : NULL;
    *s = (lattice_sums)LATTICE_SUMS_INIT;
    if (columns && !weight) {
        return err_nomem(err, t->columns * sizeof(float), "coding scratch");
    }
    for (uint64_t j = 0; columns && j < t->columns; j++) {
        weight[j] = scalar_quarter_octaves(-columns[j]);
    }
    for (uint64_t row = 0; row < rows_of(t); row++) {
        uint64_t first, column, n = span_of(t, row, &first, &column);
        k->sums_of(s, t->now + first, t->before ? t->before + first : NULL, weight ? weight + column : NULL,
                   rows ? scalar_quarter_octaves(-rows[row]) : 1, most, lattice, n);
    }
    free(weight);
    return CKD_OK;
}

/*
 * A few values far from all others (spikes, what has come back from one) would make the steps of all: they are kept as they are. Finds
 * the largest magnitude that is not one of these, or more. all: of all values.
 */
static ckd_status usual_most(float *limit, const lossy_tile *t, const lattice_sums *all, bool difference,
                             const kernels *k, ckd_error *err) {
    uint64_t may_trim = t->count / ONE_OUTLIER_IN + 4, trimmed = 0;
    lattice_sums s = *all;
    *limit = FLT_MAX;
    for (;;) {
        double n = (double)(difference ? s.compared : s.finite);
        double next = n > 0 ? OUTLIER * sqrt((difference ? s.moved : s.now) / n) : 0;
        if (!((difference ? all->farthest : all->largest) > next) || !(next > 0) || next >= FLT_MAX) {
            return CKD_OK;
        }
        float most[2] = {difference ? FLT_MAX : (float)next, difference ? (float)next : FLT_MAX};
        ckd_status status = add_up(&s, t, most, false, k, err);
        uint64_t far = difference ? all->compared - s.compared : all->finite - s.finite;
        if (status != CKD_OK || far <= trimmed || far > may_trim) {
            return status;
        }
        *limit = (float)next;
        trimmed = far;
    }
}

/* all: of all values, rows and columns not weighed. */
static ckd_status find_usual(lattice_sums *all, lossy_tile *t, const kernels *k, ckd_error *err) {
    static const float none[2] = {FLT_MAX, FLT_MAX};
    ckd_status status = add_up(all, t, none, t->part != LOSSY_MOMENT, k, err);
    if (status == CKD_OK) {
        status = usual_most(&t->keep_above, t, all, false, k, err);
    }
    return status == CKD_OK && t->before && t->part == LOSSY_WEIGHT
               ? usual_most(&t->keep_moved, t, all, true, k, err)
               : status;
}

/* Of what is not kept as it is. all: as find_usual gave it, before rows and columns were weighed. */
static ckd_status add_up_usual(lattice_sums *s, lossy_tile *t, const lattice_sums *all, const kernels *k,
                               ckd_error *err) {
    const float most[2] = {t->keep_above, t->keep_moved};
    bool second = t->part == LOSSY_SECOND;
    bool known = !t->plan.row && !t->plan.own.step && !(most[0] < FLT_MAX) && !(most[1] < FLT_MAX);
    ckd_status status = CKD_OK;
    *s = *all;
    if (!known) {
        status = add_up(s, t, most, false, k, err);
        s->lowest_bit = all->lowest_bit;
        s->before_bits = all->before_bits;
    }
    t->ordinary =
        s->finite == t->count && (!t->before || s->compared == t->count) && (!second || s->least >= 0);
    t->ordinary &= !(second && s->before_bits >> 31);
    t->largest =
        second ? 0 : s->largest + (t->before ? s->farthest : 0); /* no |before| is larger than both */
    return status;
}

static double root(double sum, uint64_t n) {
    return n ? sqrt(sum / (double)n) : 0;
}

/* The smallest step of a tile, as a share of that without rows and columns. */
static double smallest_weight(const lossy_tile *t) {
    if (!t->plan.row) {
        return 1;
    }
    int32_t row = 0, column = 0;
    for (uint64_t i = 0; i < rows_of(t); i++) {
        row = t->plan.row[i] < row ? t->plan.row[i] : row;
    }
    for (uint64_t j = 0; j < t->columns; j++) {
        column = t->plan.own.step[j] < column ? t->plan.own.step[j] : column;
    }
    return exp2((double)(row + column) / LATTICE_STEP_OCTAVE);
}

/* The exponent of a lattice with this spacing or a finer one, on which values up to `largest` have a place. */
static int32_t exponent_of(const lossy_tile *t, double spacing, double largest) {
    int32_t least = t->dtype == CKD_F16 ? -24 : -120;
    int32_t room = largest > 0 ? ilogb(largest) - 27 : least;
    int32_t e = spacing > 0 ? ilogb(spacing) : least;
    e = e < room ? room : e;
    return e < least ? least : (e > 100 ? 100 : e);
}

static void set_step(lossy_tile *t, double step) {
    t->plan.step = (int32_t)lrint(LATTICE_STEP_OCTAVE * (log2(step) - t->plan.exponent));
    t->plan.step = t->plan.step < 0 ? 0 : t->plan.step;
}

/* The nearest integer of so many at most. */
static int32_t near(double x, int32_t most) {
    return x > most ? most : (x < -most ? -most : (int32_t)lrint(x));
}

/* ---- weights ---- */

/*
 * What does not move keeps the parent's lattice, so that a finer one than the parent's has all values, and a coarser one has not. Exact
 * values have none that integers would be worth.
 */
static void stay_on_lattice(lossy_tile *t, const lattice_sums *s) {
    int32_t lowest = s->lowest_bit < t->plan.exponent ? s->lowest_bit : t->plan.exponent;
    t->on_lattice = lowest == exponent_of(t, ldexp(1, lowest), s->largest);
    t->plan.exponent = t->on_lattice ? lowest : t->plan.exponent;
}

/* Steps are finer where the second moment is large: by its fourth root, rows and columns apart. */
static ckd_status weigh(lossy_tile *t, ckd_error *err) {
    const lossy_scales *s = t->scales;
    if (!has_rows(t) || !s || s->rows != rows_of(t) || s->columns != t->columns || t->recipe->max_error > 0) {
        return CKD_OK;
    }
    ckd_status status = make_steps(t, err);
    if (status != CKD_OK) {
        return status;
    }
    int32_t *row = (int32_t *)(void *)t->row.data, *column = (int32_t *)(void *)t->column.data;
    for (uint64_t i = 0; i < s->rows; i++) {
        row[i] = near(s->all - s->row[i], MOST_WEIGHT);
    }
    for (uint64_t j = 0; j < s->columns; j++) {
        column[j] = near(s->all - s->column[j], MOST_WEIGHT);
    }
    return CKD_OK;
}

static void prepare_root(lossy_tile *t, const lattice_sums *values) {
    double rms = root(values->now, values->finite);
    double units = t->recipe->root_units / (t->vector ? t->recipe->vector : 1);
    t->plan.row = t->plan.own.step = NULL;
    double spacing = rms / units < OF_BOUND * t->bound ? rms / units : OF_BOUND * t->bound;
    t->plan.exponent = exponent_of(t, spacing, values->largest);
    t->up[0] = t->up[1] = t->up[2] = 0.5f;
}

/* How far the weights moved, of which what the parent left out is a part; returns the share of the difference's energy that is. */
static double find_movement(lossy_tile *t, double energy, double rms) {
    double fair = rms / t->recipe->root_units; /* an error with which a tensor may stay for ever */
    t->still = fabs(energy - t->before_error) <= NOTHING_MOVED * t->before_error && energy <= fair * fair &&
               !(t->recipe->max_error > 0);
    double share = energy > 0 ? 1 - t->before_error / energy : 0;
    share = share > LEAST_MOVEMENT ? share : LEAST_MOVEMENT;
    if (energy > 0 && t->expected_movement > 0) {
        double known = t->expected_movement * t->expected_movement / energy;
        share = known < 1 ? known : 1;
        t->still = false;
    }
    t->movement = sqrt(energy * share);
    return share;
}

static ckd_status prepare_weight(lossy_tile *t, const lattice_sums *all, const kernels *k, ckd_error *err) {
    lattice_sums s;
    ckd_status status = weigh(t, err);
    if (status == CKD_OK) {
        status = add_up_usual(&s, t, all, k, err);
    }
    if (status != CKD_OK) {
        return status;
    }
    double rms = root(s.now, s.finite);
    t->bound = t->recipe->max_error > 0 ? t->recipe->max_error * rms : INFINITY;
    if (!t->before) {
        prepare_root(t, &s);
    } else {
        double share = find_movement(t, s.compared ? s.moved / (double)s.compared : 0, rms);
        double step =
            t->recipe->weight * (t->vector ? t->recipe->vector : 1) * root(s.weighted * share, s.compared);
        step = step < OF_BOUND * t->bound ? step : OF_BOUND * t->bound;
        double most = COARSEST * rms / t->recipe->root_units;
        step = step > most && most > 0 ? most : step; /* something else altogether is not left where it was */
        double spacing = t->movement / UNITS_MOVED,
               fine = step * smallest_weight(t) / (t->recipe->max_error > 0 ? 16 : 2);
        t->plan.exponent = exponent_of(t, spacing < fine ? spacing : fine, s.largest);
        stay_on_lattice(t, &s);
        t->still |= !(step > 0);
        if (!t->still) {
            set_step(t, step);
        }
    }
    t->alone_bits = log2(1 + 4.13 * rms / ldexp(1, t->plan.exponent)); /* a Gaussian's entropy */
    return CKD_OK;
}

/* ---- first moments ---- */

/* Rows' and columns' mean magnitudes, as steps. */
static ckd_status weigh_by_itself(lossy_tile *t, const kernels *k, ckd_error *err) {
    uint64_t rows = rows_of(t);
    ckd_status status = has_rows(t) && !(t->recipe->max_error > 0) ? make_steps(t, err) : CKD_OK;
    if (status != CKD_OK || !t->plan.row) {
        return status;
    }
    lossy_scales s = {0};
    status = lossy_scales_of(&s, t->now, t->count, t->columns, t->phase, true, t->keep_above, k, err);
    int32_t *row = (int32_t *)(void *)t->row.data, *column = (int32_t *)(void *)t->column.data;
    for (uint64_t i = 0; i < rows && status == CKD_OK; i++) {
        row[i] = near(LATTICE_STEP_OCTAVE * (s.row[i] - s.all), MOST_WEIGHT);
    }
    for (uint64_t j = 0; j < t->columns && status == CKD_OK; j++) {
        column[j] = near(LATTICE_STEP_OCTAVE * (s.column[j] - s.all), MOST_WEIGHT);
    }
    lossy_scales_free(&s);
    return status;
}

static ckd_status prepare_moment(lossy_tile *t, const lattice_sums *all, const kernels *k, ckd_error *err) {
    lattice_sums s;
    ckd_status status = weigh_by_itself(t, k, err);
    if (status == CKD_OK) {
        status = add_up_usual(&s, t, all, k, err);
    }
    if (status != CKD_OK) {
        return status;
    }
    double rms = root(s.now, s.finite);
    t->bound = t->recipe->max_error > 0 ? t->recipe->max_error * rms : INFINITY;
    double step = t->recipe->moment * (t->vector ? t->recipe->vector : 1) * root(s.weighted, s.compared);
    step = step < OF_BOUND * t->bound ? step : OF_BOUND * t->bound;
    t->plan.exponent = exponent_of(t, step * smallest_weight(t) / 32, s.largest);
    if (step > 0) {
        set_step(t, step);
    }
    t->alone_bits = 1;
    return CKD_OK;
}

/* ---- second moments ---- */

/* Levels between the means of two sums, in halves of octaves. */
static int32_t level_distance(double now, double from) {
    double octaves = now > 0 && from > 0 ? log2(now / from) : 0;
    octaves = fabs(octaves) <= 256 ? octaves : 0; /* of an infinite parent nothing can be said */
    double steps = octaves * 8 / LEVELS_OF_MEANS;
    int32_t whole = (int32_t)(fabs(steps) + 1 - MEANS_UP); /* what goes to and fro is let be */
    return LEVELS_OF_MEANS * (steps < 0 ? -whole : whole);
}

/*
 * Rows' and then columns' means are brought to what they are now: arithmetic means, because the logarithm's are too small where
 * moments vary, and too small a second moment makes too large a step when training goes on.
 */
static ckd_status correct_means(lossy_tile *t, const kernels *k, ckd_error *err) {
    double *sum = calloc(2 * t->columns, sizeof(double)), *from = sum ? sum + t->columns : NULL;
    ckd_status status = sum ? make_steps(t, err) : err_nomem(err, 16 * t->columns, "coding scratch");
    int32_t *row = (int32_t *)(void *)t->row.data, *column = (int32_t *)(void *)t->column.data;
    double birth = t->before ? 1 : scalar_float((uint32_t)t->plan.birth << LEVEL_SHIFT);
    for (uint64_t i = 0; i < rows_of(t) && status == CKD_OK; i++) {
        uint64_t first, at, n = span_of(t, i, &first, &at);
        const float *now = t->now + first, *before = t->before ? t->before + first : NULL;
        double sums[2] = {0, 0};
        k->moment_row(sums, now, before, false, t->keep_above, n);
        row[i] = level_distance(sums[0], sums[1] * birth);
        k->moment_columns(sum + at, from + at, now, before, birth * exp2(row[i] / 8.0), false, t->keep_above,
                          n);
    }
    for (uint64_t j = 0; j < t->columns && status == CKD_OK; j++) {
        column[j] = level_distance(sum[j], from[j]);
    }
    free(sum);
    return status;
}

static bool any(const int32_t *values, uint64_t n) {
    int32_t all = 0;
    for (uint64_t i = 0; i < n; i++) {
        all |= values[i];
    }
    return all != 0;
}

static ckd_status prepare_second(lossy_tile *t, const lattice_sums *all, const kernels *k, ckd_error *err) {
    lattice_sums s;
    double sums[2] = {0, 0};
    ckd_status status = add_up_usual(&s, t, all, k, err);
    for (uint64_t row = 0; row < rows_of(t) && status == CKD_OK; row++) {
        uint64_t first, column, n = span_of(t, row, &first, &column);
        k->moment_row(sums, t->now + first, NULL, false, t->keep_above, n);
    }
    int32_t birth = scalar_level_of((float)(sums[1] > 0 ? sums[0] / sums[1] : 1));
    t->plan.map = LATTICE_LEVELS;
    t->plan.birth = birth < 1 ? 1 : birth;
    t->bound = t->recipe->max_error > 0 ? t->recipe->max_error * root(s.now, s.finite) : INFINITY;
    t->plan.step = t->vector ? t->recipe->second_vector : t->recipe->second;
    t->alone_bits = 5.5;
    t->on_lattice = (s.before_bits & ((UINT32_C(1) << LEVEL_SHIFT) - 1)) == 0;
    status = status == CKD_OK && has_rows(t) ? correct_means(t, k, err) : status;
    if (status == CKD_OK && t->plan.row && !any(t->plan.row, rows_of(t))) {
        t->plan.row = NULL;
    }
    if (status == CKD_OK && t->plan.own.step && !any(t->plan.own.step, t->columns)) {
        t->plan.own.step = NULL;
    }
    return status;
}

ckd_status lossy_tile_prepare(lossy_tile *t, bool *worth, const kernels *k, ckd_error *err) {
    *worth = t->count >= FEWEST;
    t->keep_above = t->keep_moved = FLT_MAX;
    t->still = false;
    t->ordinary = false;
    t->on_lattice = true;
    for (int i = 0; i < 3; i++) {
        t->up[i] = 0.5f; /* to the nearest */
    }
    t->plan = (lattice_block){.columns = t->columns, .phase = t->phase, .count = t->count};
    t->plan.own.columns = t->columns;
    if (!*worth) {
        return CKD_OK;
    }
    lattice_sums all;
    ckd_status status = find_usual(&all, t, k, err);
    if (status != CKD_OK) {
        return status;
    }
    switch (t->part) {
    case LOSSY_WEIGHT:
        status = prepare_weight(t, &all, k, err);
        break;
    case LOSSY_MOMENT:
        status = prepare_moment(t, &all, k, err);
        break;
    default:
        return prepare_second(t, &all, k, err);
    }
    if (t->still) {
        t->up[0] = t->up[1] = t->up[2] = INFINITY; /* no integer but 0 */
        return status;
    }
    bool steps = t->before || t->part == LOSSY_MOMENT;
    if (status == CKD_OK && steps && !(t->recipe->max_error > 0)) {
        status = lossy_tile_plan_rate(t, k, err);
    }
    *worth = t->plan.step <= MOST_STEP; /* what spans so many octaves has no lattice */
    return status;
}

void lossy_tile_free(lossy_tile *t) {
    bytes_free(&t->row);
    bytes_free(&t->column);
    low_rank_free(&t->factors);
}
