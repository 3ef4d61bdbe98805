/* Plans the integers of a tile: thresholds, and a low-rank part where it is worth its bits. */
#include <math.h>
#include <string.h>

#include "engine/decode/decode.h"
#include "engine/lossy/internal.h"

#define TARGET_ROUNDS   12
#define TARGET_NEAR     0.92       /* share of the wanted bits that is close enough */
#define FINER           2          /* octaves */
#define FINEST          (-120)     /* smallest exponent of a lattice in payloads */
#define LEAP            6          /* quarter octaves, until there is an interval to bisect */
#define SAMPLE_ELEMENTS (1u << 17) /* approximate sample of a large tile */

static void use_factors(lossy_tile *t, const low_rank *f) {
    t->plan.lattice.factor = f->rank ? f->left : NULL;
    t->plan.lattice.low_rank_exponent = f->exponent;
    t->plan.lattice.own.rank = f->rank;
    t->plan.lattice.own.shift = f->shift;
    t->plan.lattice.own.factor = f->right;
}

static void use_rate(lossy_tile *t, const rate_plan *p) {
    memcpy(t->plan.up, p->up, sizeof(t->plan.up));
    for (int w = 0; w < 3; w++) {
        t->plan.lattice.offset[w] = p->up[0] > 0.5f ? lossy_offset(p->below[w]) : 0;
    }
    t->plan.offsets_known =
        t->params->effort < 7; /* else integers are wide, and each block has offsets of its own */
}

static double cost_of(const rate_plan *p, double more_bits, double lambda) {
    return p->distortion + lambda * (p->bits + more_bits);
}

typedef struct planning {
    bool factors; /* factors may pay: look at all elements, not at a sample */
    rate_histogram *histogram;
    tile_scratches *scratches;
    double bits; /* estimate of the last plan */
} planning;

/* Returns the price, in bits, of the time that later loads spend on the factors. First moments have no chains. */
static double time_in_bits(const lossy_tile *t, uint32_t rank) {
    uint64_t raw = t->shape.count * sizeof(float);
    double base = decode_work(PREDICT_NONE, CODING_SYMBOLS, sizeof(float), raw, raw, t->shape.count);
    return t->input.parent_values ? t->params->bits_for_load * (double)t->shape.count *
                                        low_rank_work(t->shape.count, ckd_dtype_size(t->dtype), rank) / base
                                  : 0;
}

/* Uses the low-rank part, alone or with integers for its remainder, if either costs less than integers alone. */
static ckd_status try_factors(planning *p, lossy_tile *t, double integers_cost, const kernels *k,
                              ckd_error *err) {
    double lambda = t->params->lambda;
    lossy_matrix residual;
    low_rank_matrix x = {lattice_rows(&t->plan.lattice), t->shape.columns, lossy_submatrix, &residual, NULL};
    if (t->input.device) {
        x = (low_rank_matrix){lattice_rows(&t->plan.lattice), t->shape.columns, NULL, t,
                              &lossy_device_vectors};
    }
    ckd_status status = lossy_matrix_begin(&residual, t, k, &p->scratches->work, err);
    low_rank_search options = {.lambda = lambda,
                               .max = t->params->max_rank,
                               .rounds = t->params->rounds,
                               .pool = t->resources.pool,
                               .kernels = k,
                               .scratch = &p->scratches->search,
                               .stop = t->resources.stop};
    THEN(status, low_rank_of(&t->plan.factors, &x, &options, err));
    if (status != CKD_OK || t->plan.factors.rank == 0) {
        return status;
    }
    use_factors(t, &t->plan.factors);
    rate_histogram *remainder = p->histogram;
    status = lossy_residual(remainder, t, k, err);
    if (status != CKD_OK) {
        return status;
    }
    rate_plan only = rate_plan_none(remainder), both = rate_plan_of(remainder, lambda);
    double bits = t->plan.factors.bits + time_in_bits(t, t->plan.factors.rank);
    double cost_only = cost_of(&only, bits, lambda), cost_both = cost_of(&both, bits, lambda);
    if (cost_only < integers_cost || cost_both < integers_cost) {
        const rate_plan *best = cost_only <= cost_both ? &only : &both;
        use_rate(t, best);
        p->bits = best->bits + t->plan.factors.bits;
    } else {
        low_rank no_factors = {0};
        use_factors(t, &no_factors);
    }
    return CKD_OK;
}

/* Samples the residuals without factors: thresholds depend on the distribution only. */
static ckd_status sample_residual(planning *p, const lossy_tile *t, const kernels *k, ckd_error *err) {
    static const float zeros[SAMPLE_SLICE] = {0};
    float residual[SAMPLE_SLICE];
    lattice_work *work = &p->scratches->work;
    ckd_status status = lattice_steps(&t->plan.lattice, work, err);
    memset(p->histogram, 0, sizeof(*p->histogram));
    tile_sample s = {.tile = t};
    THEN(status, sample_begin(&s, t, SAMPLE_ELEMENTS, err));
    for (tile_slice at; status == CKD_OK && sample_next(&at, &s);) {
        lattice_run run = lattice_row_run(&t->plan.lattice, work, t->shape.vector ? 0 : at.row);
        run.column_step = run.column_step ? run.column_step + at.column : NULL;
        k->lattice_residual(residual, at.now, at.parent_values ? at.parent_values : zeros, NULL, at.n, &run);
        rate_add(p->histogram, residual, at.n, k);
    }
    sample_end(&s);
    return status;
}

static ckd_status plan_once(planning *p, lossy_tile *t, const kernels *k, ckd_error *err) {
    low_rank no_factors = {0};
    use_factors(t, &no_factors);
    ckd_status status = p->factors ? lossy_residual(p->histogram, t, k, err) : sample_residual(p, t, k, err);
    if (status != CKD_OK) {
        return status;
    }
    rate_plan plan = rate_plan_of(p->histogram, t->params->lambda);
    use_rate(t, &plan);
    p->bits = plan.bits * (double)t->shape.count / (double)(p->histogram->n ? p->histogram->n : 1);
    if (!p->factors) {
        return CKD_OK;
    }
    return try_factors(p, t, cost_of(&plan, 0, t->params->lambda), k, err);
}

/* Returns the largest step that the target may choose, in quarter octaves. */
static int32_t step_limit(const lossy_tile *t) {
    double limit = isfinite(t->limits.step)
                       ? LATTICE_STEP_OCTAVE * (log2(t->limits.step) - t->plan.lattice.exponent)
                       : INT32_MAX;
    return limit < INT32_MAX ? (int32_t)lrint(limit) : INT32_MAX;
}

/*
 * Finds the finest step that meets the target, by bisection between steps known to take more and fewer bits. The step's
 * limit has precedence: replaced values take more bits, and do not keep their old values.
 */
static ckd_status meet_target(planning *p, lossy_tile *t, const kernels *k, ckd_error *err) {
    const double max = t->params->target * (double)t->shape.count;
    int32_t finer = -1, coarser = INT32_MAX; /* a step with too many bits, and one with few enough */
    ckd_status status = CKD_OK;
    for (int round = 0; round < TARGET_ROUNDS && status == CKD_OK; round++) {
        int32_t now = t->plan.lattice.step;
        finer = p->bits > max ? now : finer;
        coarser = p->bits > max ? coarser : now;
        int32_t limit = step_limit(t);
        if (coarser - finer <= 1 || (p->bits <= max && p->bits > TARGET_NEAR * max) ||
            (p->bits > max && now >= limit)) {
            break;
        }
        bool between = finer >= 0 && coarser < INT32_MAX;
        int32_t leap = limit - now < LEAP ? limit - now : LEAP;
        t->plan.lattice.step =
            between ? finer + (coarser - finer) / 2 : (p->bits > max ? now + leap : now - LEAP);
        if (t->plan.lattice.step < 0 && t->plan.lattice.exponent - FINER < FINEST) {
            t->plan.lattice.step = 0; /* there is no finer step */
            return plan_once(p, t, k, err);
        }
        if (t->plan.lattice.step < 0) { /* finer than the lattice: refine the lattice, too */
            t->plan.lattice.exponent -= FINER;
            t->plan.lattice.step += FINER * LATTICE_STEP_OCTAVE;
            coarser = coarser < INT32_MAX ? coarser + FINER * LATTICE_STEP_OCTAVE : coarser;
        }
        status = plan_once(p, t, k, err);
    }
    if (status == CKD_OK && p->bits > max && coarser < INT32_MAX) {
        t->plan.lattice.step = coarser;
        status = plan_once(p, t, k, err);
    }
    return status;
}

ckd_status lossy_tile_plan_rate(lossy_tile *t, const kernels *k, ckd_error *err) {
    tile_scratches own = {.workers = NULL};
    planning p = {.factors = lossy_may_factor(t),
                  .scratches = t->resources.scratches ? t->resources.scratches : &own};
    p.histogram = bytes_scratch(&p.scratches->histogram, sizeof(rate_histogram), "coding scratch", err);
    ckd_status status = p.histogram ? plan_once(&p, t, k, err) : CKD_E_NOMEM;
    if (status == CKD_OK && t->params->target > 0 && !t->shape.vector) {
        status = meet_target(&p, t, k, err);
    }
    tile_scratches_free(&own);
    return status;
}
