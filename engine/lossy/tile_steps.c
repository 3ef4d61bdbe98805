/* Statistics of a tile, and the steps that follow from them. */
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/lossy/internal.h"
#include "kernels/scalar_lattice.h"

#define DEFAULT_EFFORT 5
#define ELEMENTS_MIN \
    64u /* elements; a smaller tensor is coded exactly, which is cheap, and small tensors tend to be special */
#define NARROWEST       8u   /* fewest rows and columns of a matrix with a step per row and column */
#define UNITS_MOVED     16.0 /* lattice units in the RMS of the movement */
#define MOVEMENT_MIN    0.25 /* share of the residual's energy; a smaller one is lost in the leftovers */
#define CATCHING_UP_MAX 4.0
#define COARSEST        64.0 /* largest step of weights, in lattice units of weights without a parent */
#define OF_BOUND \
    1.7 /* largest step per bound; less than 2 once it is on a quarter octave, and values on the lattice */
#define NOTHING_MOVED 6e-3 /* relative to the error, which is known to three digits */
#define LASTING_MAX \
    8 /* largest error of the parent's values that may last, in lattice units of weights without a parent */
#define COARSER_MAX 6   /* quarter octaves that a row or column may be coarser than the tile: 2.8 times */
#define WEIGHT_MAX  108 /* quarter octaves of a row or column; the lattice holds no more */
#define STEP_MAX    400 /* quarter octaves of a block's step */

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
        return dtype == CKD_F16 ? LOSSY_NONE : LOSSY_SECOND; /* f16 denormals are not levels */
    default:
        return LOSSY_NONE;
    }
}

bool lossy_wants_parent(const lossy_tile *t) {
    return t->part == LOSSY_WEIGHT;
}

quant_params quant_params_of(ckd_fidelity fidelity, int effort) {
    bool near = fidelity == CKD_NEAR;
    effort = effort ? effort : DEFAULT_EFFORT;
    return (quant_params){.weight = near ? 2.1 : 3.5,
                          .leftover = near ? 0.82 : 1.05,
                          .moment = near ? 3 : 9,
                          .second = near ? 24 : LOSSY_LEVELS_NONE,
                          .second_vector = near ? 2 : 4,
                          .vector = 0.25,
                          .root_units = near ? 128 : 64,
                          .lambda = 0.15,
                          .effort = effort,
                          .max_rank = effort < 4 ? 64 : (effort < 7 ? 256 : LATTICE_MAX_RANK),
                          .rounds = effort < 6 ? 0 : 2};
}

/* ---- the matrix ---- */

/*
 * Sets the columns of a matrix, and the rows of one matrix in a stack. Rows are the first dimension, columns
 * the last. Three dimensions are a stack of matrices, taken one by one. More dimensions are a convolution:
 * one row per output channel.
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

void lossy_tile_cut(tile_shape *shape, const geometry *g, const ckd_region *region, uint64_t elements,
                    uint64_t first, uint64_t max) {
    uint64_t columns, stacked, origin = region->kind == CKD_REGION_FLAT ? region->start : 0;
    fold(&columns, &stacked, g, region);
    uint64_t rows = columns && columns <= max ? max / columns : 0;
    shape->first = first;
    shape->vector = g->ndim < 2 || columns == 1 || rows == 0;
    uint64_t count = shape->vector ? max : rows * columns - (origin + first) % columns;
    if (!shape->vector && stacked) { /* up to the end of this matrix of the stack */
        uint64_t matrix = stacked * columns, remaining = matrix - (origin + first) % matrix;
        count = remaining < count ? remaining : count;
    }
    shape->count = elements - first < count ? elements - first : count;
    shape->columns = shape->vector ? shape->count : columns;
    shape->phase = shape->vector ? 0 : (origin + first) % columns;
    shape->vector |= shape->count <= shape->columns;
}

uint64_t lossy_block_count(const tile_shape *shape, uint64_t at) {
    uint64_t max = CKD_BLOCK_ELEMENTS;
    if (!shape->vector && shape->columns <= max) {
        max = max / shape->columns * shape->columns - (shape->phase + at) % shape->columns;
    }
    return shape->count - at < max ? shape->count - at : max;
}

static uint64_t rows_of(const tile_shape *shape) {
    return (shape->phase + shape->count + shape->columns - 1) / shape->columns;
}
static bool has_rows(const tile_shape *shape) {
    return !shape->vector && shape->columns <= LATTICE_MAX_COLUMNS && shape->columns >= NARROWEST &&
           rows_of(shape) >= NARROWEST;
}

static ckd_status make_steps(lossy_tile *t, ckd_error *err) {
    size_t rows = rows_of(&t->shape), columns = t->shape.columns;
    int32_t *row = bytes_scratch(&t->plan.row_memory, rows * sizeof(int32_t), "coding scratch", err);
    int32_t *column =
        row ? bytes_scratch(&t->plan.column_memory, columns * sizeof(int32_t), "coding scratch", err) : NULL;
    if (!column) {
        return CKD_E_NOMEM;
    }
    t->plan.lattice.row = row;
    t->plan.lattice.own.step = column;
    return CKD_OK;
}

/* ---- sums over a tile ---- */

/* Computes the columns' weights in the tile's memory; NULL without steps of columns. */
static ckd_status weights_of(float **out, lossy_tile *t, ckd_error *err) {
    const int32_t *columns = t->plan.lattice.own.step;
    *out = columns ? bytes_scratch(&t->plan.weight_memory, t->shape.columns * sizeof(float), "coding scratch",
                                   err)
                   : NULL;
    if (columns && !*out) {
        return CKD_E_NOMEM;
    }
    for (uint64_t j = 0; columns && j < t->shape.columns; j++) {
        (*out)[j] = scalar_quarter_octaves(-columns[j]);
    }
    return CKD_OK;
}

/* Runs a pass without outliers. If the sample's limits do not suit, finds limits on all elements and runs again. */
static ckd_status run_typical(tile_pass *p, lossy_tile *t, const kernels *k, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (int attempt = 0; attempt < 2 && status == CKD_OK; attempt++) {
        p->max[0] = t->limits.exception_above;
        p->max[1] = t->limits.exception_moved;
        status = tile_pass_run(p, t, k, err);
        if (status != CKD_OK || attempt || typical_range_holds(t, &p->all)) {
            break;
        }
        status = find_typical_range(t, k, err);
    }
    const lattice_sums *s = &p->all;
    bool second = t->part == LOSSY_SECOND;
    t->limits.ordinary = s->finite == t->shape.count &&
                         (!t->input.parent_values || s->compared == t->shape.count) &&
                         (!second || s->smallest >= 0);
    t->limits.largest =
        second ? 0
               : s->largest + (t->input.parent_values ? s->farthest : 0); /* also bounds |parent_values| */
    return status;
}

static double root(double sum, uint64_t n) {
    return n ? sqrt(sum / (double)n) : 0;
}

/* Returns the smallest step of any row and column, relative to the tile's step. */
static double smallest_weight(const lossy_tile *t) {
    if (!t->plan.lattice.row) {
        return 1;
    }
    int32_t row = 0, column = 0;
    for (uint64_t i = 0; i < rows_of(&t->shape); i++) {
        row = t->plan.lattice.row[i] < row ? t->plan.lattice.row[i] : row;
    }
    for (uint64_t j = 0; j < t->shape.columns; j++) {
        column = t->plan.lattice.own.step[j] < column ? t->plan.lattice.own.step[j] : column;
    }
    return exp2((double)(row + column) / LATTICE_STEP_OCTAVE);
}

/* Returns the exponent of a lattice at least as fine as `spacing`, but coarse enough for values up to `largest`. */
static int32_t exponent_of(const lossy_tile *t, double spacing, double largest) {
    int32_t min = t->dtype == CKD_F16 ? -24 : -120;
    int32_t min_exponent = largest > 0 ? ilogb(largest) - 27 : min;
    int32_t e = spacing > 0 ? ilogb(spacing) : min;
    e = e < min_exponent ? min_exponent : e;
    return e < min ? min : (e > 100 ? 100 : e);
}

static void set_step(lossy_tile *t, double step) {
    t->plan.lattice.step = (int32_t)lrint(LATTICE_STEP_OCTAVE * (log2(step) - t->plan.lattice.exponent));
    t->plan.lattice.step = t->plan.lattice.step < 0 ? 0 : t->plan.lattice.step;
}

static int32_t round_clamped(double x, int32_t max) {
    return x > max ? max : (x < -max ? -max : (int32_t)lrint(x));
}

/* ---- weights ---- */

/*
 * Elements that do not move keep the parent's value, so the lattice must be as fine as the lowest bit of any of these
 * values. After an exact base, such a lattice is not worth its integers. on_lattice is false then: the block can be a
 * lossy delta, but stands alone only exactly.
 */
static void stay_on_lattice(lossy_tile *t, const lattice_sums *s) {
    int32_t lowest = s->lowest_bit < t->plan.lattice.exponent ? s->lowest_bit : t->plan.lattice.exponent;
    t->plan.on_lattice = lowest == exponent_of(t, ldexp(1, lowest), s->largest);
    t->plan.lattice.exponent = t->plan.on_lattice ? lowest : t->plan.lattice.exponent;
}

/*
 * Steps follow the inverse fourth root of the second moment, by rows and columns. Where it is small they are coarser
 * only within limits. An output layer's rows for rare tokens move as far as others, as Adam divides by the root.
 */
static int32_t weight_of(double all, double own) {
    int32_t weight = round_clamped(all - own, WEIGHT_MAX);
    return weight < COARSER_MAX ? weight : COARSER_MAX;
}

static ckd_status weigh(lossy_tile *t, ckd_error *err) {
    const lossy_scales *s = t->context.scales;
    if (!has_rows(&t->shape) || !s || s->rows != rows_of(&t->shape) || s->columns != t->shape.columns ||
        t->params->max_error > 0) {
        return CKD_OK;
    }
    ckd_status status = make_steps(t, err);
    if (status != CKD_OK) {
        return status;
    }
    int32_t *row = (int32_t *)(void *)t->plan.row_memory.data,
            *column = (int32_t *)(void *)t->plan.column_memory.data;
    for (uint64_t i = 0; i < s->rows; i++) {
        row[i] = weight_of(s->all, s->row[i]);
    }
    for (uint64_t j = 0; j < s->columns; j++) {
        column[j] = weight_of(s->all, s->column[j]);
    }
    return CKD_OK;
}

static void prepare_root(lossy_tile *t, const lattice_sums *values) {
    double rms = root(values->now, values->finite);
    double units = t->params->root_units / (t->shape.vector ? t->params->vector : 1);
    t->plan.lattice.row = t->plan.lattice.own.step = NULL;
    double spacing = rms / units < OF_BOUND * t->limits.bound ? rms / units : OF_BOUND * t->limits.bound;
    t->plan.lattice.exponent = exponent_of(t, spacing, values->largest);
    t->plan.up[0] = t->plan.up[1] = t->plan.up[2] = 0.5f;
}

/*
 * Estimates the movement of the weights. Returns its share of the difference's energy; the rest is the parent's error.
 */
static double find_movement(lossy_tile *t, double energy, double rms) {
    double lasting_error = rms / t->params->root_units; /* an error that may last */
    t->plan.still = fabs(energy - t->context.parent_error) <= NOTHING_MOVED * t->context.parent_error &&
                    energy <= lasting_error * lasting_error && !(t->params->max_error > 0);
    double share = energy > 0 ? 1 - t->context.parent_error / energy : 0;
    share = share > MOVEMENT_MIN ? share : MOVEMENT_MIN;
    if (energy > 0 && t->context.expected_movement > 0) {
        double expected_share = t->context.expected_movement * t->context.expected_movement / energy;
        share = expected_share < 1 ? expected_share : 1;
        t->plan.still = false;
    }
    t->plan.movement = sqrt(energy * share);
    return share;
}

/*
 * Deltas leave out movements below a step. These leftovers add up over tens of saves before they are worth a step.
 * Beyond `leftover`, steps get finer by the square of the excess. Errors then settle within a few deltas and for few
 * bits, as most leftovers are just below a step.
 */
static double step_refinement(const lossy_tile *t) {
    double leftover =
        t->plan.movement > 0 ? sqrt(t->context.parent_error) / (t->params->leftover * t->plan.movement) : 0;
    return leftover > 1 ? fmin(leftover * leftover, CATCHING_UP_MAX) : 1;
}

static ckd_status add_up_weights(lattice_sums *s, lossy_tile *t, const kernels *k, ckd_error *err) {
    float *weight = NULL;
    double mean;
    ckd_status status = weigh(t, err);
    THEN(status, weights_of(&weight, t, err));
    THEN(status, sample_typical_range(t, &mean, k, err));
    tile_pass p = {.lattice = true, .weight = weight};
    THEN(status, run_typical(&p, t, k, err));
    *s = p.all;
    tile_pass_free(&p);
    return status;
}

static ckd_status prepare_weight(lossy_tile *t, const kernels *k, ckd_error *err) {
    lattice_sums s;
    ckd_status status = add_up_weights(&s, t, k, err);
    if (status != CKD_OK) {
        return status;
    }
    double rms = root(s.now, s.finite);
    /* relative to values that are all 0 now, every error is infinite, however far they have moved */
    t->limits.bound = rms == 0 ? 0 : t->params->max_error > 0 ? t->params->max_error * rms : INFINITY;
    if (!t->input.parent_values) {
        prepare_root(t, &s);
    } else {
        double share = find_movement(t, s.compared ? s.moved / (double)s.compared : 0, rms);
        double step = t->params->weight * (t->shape.vector ? t->params->vector : 1) *
                      root(s.weighted * share, s.compared) / step_refinement(t);
        step = step < OF_BOUND * t->limits.bound ? step : OF_BOUND * t->limits.bound;
        double max = COARSEST * rms / t->params->root_units;
        step = step > max && max > 0 ? max : step; /* values that were replaced get this step */
        double lasting = LASTING_MAX * rms / t->params->root_units;
        t->limits.step = t->context.parent_error > lasting * lasting ? step : max > 0 ? max : INFINITY;
        double spacing = t->plan.movement / UNITS_MOVED,
               fine = step * smallest_weight(t) / (t->params->max_error > 0 ? 16 : 2);
        t->plan.lattice.exponent = exponent_of(t, spacing < fine ? spacing : fine, s.largest);
        stay_on_lattice(t, &s);
        t->plan.still |= !(step > 0);
        if (!t->plan.still) {
            set_step(t, step);
        }
    }
    t->plan.standalone_bits =
        log2(1 + 4.13 * rms / ldexp(1, t->plan.lattice.exponent)); /* entropy of a Gaussian */
    return CKD_OK;
}

/* ---- first moments ---- */

/* Sets the steps of rows and columns to their mean magnitudes. */
static ckd_status weigh_by_means(lossy_tile *t, const tile_pass *p, ckd_error *err) {
    lossy_scales *s = &p->scratches->scales;
    ckd_status status = make_steps(t, err);
    THEN(status, lossy_scales_of(s, p, &t->shape, err));
    int32_t *row = (int32_t *)(void *)t->plan.row_memory.data,
            *column = (int32_t *)(void *)t->plan.column_memory.data;
    for (uint64_t i = 0; status == CKD_OK && i < s->rows; i++) {
        row[i] = round_clamped(LATTICE_STEP_OCTAVE * (s->row[i] - s->all), WEIGHT_MAX);
    }
    for (uint64_t j = 0; status == CKD_OK && j < s->columns; j++) {
        column[j] = round_clamped(LATTICE_STEP_OCTAVE * (s->column[j] - s->all), WEIGHT_MAX);
    }
    return status;
}

/* Finds the RMS of the quantised values divided by the steps of rows and columns. */
static ckd_status find_weighted(double *out, lossy_tile *t, const lattice_sums *s, const kernels *k,
                                ckd_error *err) {
    float *weight;
    ckd_status status = weights_of(&weight, t, err);
    *out = root(s->moved, s->compared);
    status = status == CKD_OK && weight ? sample_weighted(out, t, weight, k, err) : status;
    return status;
}

static ckd_status prepare_moment(lossy_tile *t, const kernels *k, ckd_error *err) {
    double mean, weighted = 0;
    tile_pass p = {.means = has_rows(&t->shape) && !(t->params->max_error > 0), .magnitudes = true};
    ckd_status status = sample_typical_range(t, &mean, k, err);
    THEN(status, run_typical(&p, t, k, err));
    if (status == CKD_OK && p.means) {
        status = weigh_by_means(t, &p, err);
    }
    THEN(status, find_weighted(&weighted, t, &p.all, k, err));
    lattice_sums s = p.all;
    tile_pass_free(&p);
    if (status != CKD_OK) {
        return status;
    }
    double rms = root(s.now, s.finite);
    t->limits.bound = t->params->max_error > 0 ? t->params->max_error * rms : INFINITY;
    double step = t->params->moment * (t->shape.vector ? t->params->vector : 1) * weighted;
    step = step < OF_BOUND * t->limits.bound ? step : OF_BOUND * t->limits.bound;
    t->plan.lattice.exponent = exponent_of(t, step * smallest_weight(t) / 32, s.largest);
    if (step > 0) {
        set_step(t, step);
    }
    t->plan.standalone_bits = 1;
    return CKD_OK;
}

/* ---- second moments ---- */

/*
 * Brings the means of rows, then of columns, to their current values. They are arithmetic: means of logarithms are too
 * small where moments vary. Too small a second moment makes too large an optimizer step when training resumes.
 */
static ckd_status correct_means(lossy_tile *t, const tile_pass *p, ckd_error *err) {
    ckd_status status = make_steps(t, err);
    int32_t *row = (int32_t *)(void *)t->plan.row_memory.data,
            *column = (int32_t *)(void *)t->plan.column_memory.data, changed[2] = {0, 0};
    for (uint64_t i = 0; status == CKD_OK && i < rows_of(&t->shape); i++) {
        row[i] = p->row_level[i];
        changed[0] |= row[i];
    }
    for (uint64_t j = 0; status == CKD_OK && j < t->shape.columns; j++) {
        column[j] = level_distance(p->column[j], p->column_scales[j]);
        changed[1] |= column[j];
    }
    t->plan.lattice.row = changed[0] ? t->plan.lattice.row : NULL;
    t->plan.lattice.own.step = changed[1] ? t->plan.lattice.own.step : NULL;
    return status;
}

/* Finds the corrections of rows and columns, and the scales that steps of weights follow. */
static ckd_status find_means(lossy_tile *t, tile_pass *p, ckd_error *err) {
    ckd_status status = t->found ? lossy_scales_of(t->found, p, &t->shape, err) : CKD_OK;
    return status == CKD_OK ? correct_means(t, p, err) : status;
}

/* Tells whether rows and columns determine every element but exceptions: no level is far enough away to round up. */
static bool levels_suffice(const lossy_tile *t, const lattice_sums *s) {
    int32_t row = 0, column = 0;
    for (uint64_t i = 0; t->plan.lattice.row && i < rows_of(&t->shape); i++) {
        row = abs(t->plan.lattice.row[i]) > row ? abs(t->plan.lattice.row[i]) : row;
    }
    for (uint64_t j = 0; t->plan.lattice.own.step && j < t->shape.columns; j++) {
        column = abs(t->plan.lattice.own.step[j]) > column ? abs(t->plan.lattice.own.step[j]) : column;
    }
    return s->smallest > 0 && t->plan.lattice.step >= LOSSY_LEVELS_NONE &&
           row + column < (int32_t)(LOSSY_LEVEL_UP * LOSSY_LEVELS_NONE) - LEVEL_MAX;
}

static ckd_status prepare_second(lossy_tile *t, const kernels *k, ckd_error *err) {
    double mean;
    ckd_status status = sample_typical_range(t, &mean, k, err);
    if (status != CKD_OK) {
        return status;
    }
    int32_t birth = scalar_level_of((float)(mean > 0 ? mean : 1));
    t->plan.lattice.map = LATTICE_LEVELS;
    t->plan.lattice.birth = birth < 1 ? 1 : birth;
    t->plan.lattice.step = t->shape.vector ? t->params->second_vector : t->params->second;
    t->plan.standalone_bits = 5.5;
    tile_pass p = {.means = has_rows(&t->shape),
                   .outliers = t->found,
                   .birth = has_rows(&t->shape)
                                ? (double)scalar_float((uint32_t)t->plan.lattice.birth << LEVEL_SHIFT)
                                : 0};
    status = run_typical(&p, t, k, err);
    t->limits.bound =
        t->params->max_error > 0 ? t->params->max_error * root(p.all.now, p.all.finite) : INFINITY;
    if (status == CKD_OK && p.means) {
        status = find_means(t, &p, err);
    }
    t->plan.levels_known = status == CKD_OK && levels_suffice(t, &p.all);
    tile_pass_free(&p);
    return status;
}

ckd_status lossy_tile_prepare(lossy_tile *t, bool *worth, const kernels *k, ckd_error *err) {
    *worth = t->shape.count >= ELEMENTS_MIN;
    t->limits.exception_above = t->limits.exception_moved = FLT_MAX;
    t->limits.step = INFINITY;
    t->plan.still = false;
    t->limits.ordinary = false;
    t->plan.offsets_known = t->plan.levels_known = false;
    t->plan.on_lattice = true;
    for (int i = 0; i < 3; i++) {
        t->plan.up[i] = 0.5f; /* rounds to the nearest */
    }
    t->plan.lattice =
        (lattice_block){.columns = t->shape.columns, .phase = t->shape.phase, .count = t->shape.count};
    t->plan.lattice.own.columns = t->shape.columns;
    if (!*worth) {
        return CKD_OK;
    }
    ckd_status status = CKD_OK;
    switch (t->part) {
    case LOSSY_WEIGHT:
        status = prepare_weight(t, k, err);
        break;
    case LOSSY_MOMENT:
        status = prepare_moment(t, k, err);
        break;
    default:
        return prepare_second(t, k, err);
    }
    if (status != CKD_OK) {
        return status;
    }
    if (t->plan.still) {
        t->plan.up[0] = t->plan.up[1] = t->plan.up[2] = INFINITY; /* no integer but 0 */
        t->plan.offsets_known = true;
        return status;
    }
    bool steps = t->input.parent_values || t->part == LOSSY_MOMENT;
    if (steps && !(t->params->max_error > 0)) {
        status = lossy_tile_plan_rate(t, k, err);
    }
    *worth = t->plan.lattice.step <= STEP_MAX; /* no lattice spans more octaves */
    return status;
}

void lossy_tile_reset(lossy_tile *t, const lossy_tile *from) {
    lossy_tile old = *t;
    *t = *from;
    t->plan.row_memory = old.plan.row_memory;
    t->plan.column_memory = old.plan.column_memory;
    t->plan.weight_memory = old.plan.weight_memory;
    t->plan.factors = (low_rank){.memory = old.plan.factors.memory};
}

void lossy_tile_free(lossy_tile *t) {
    bytes_free(&t->plan.row_memory);
    bytes_free(&t->plan.column_memory);
    bytes_free(&t->plan.weight_memory);
    low_rank_free(&t->plan.factors);
}
