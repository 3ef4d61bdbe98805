/*
 * Codes a first moment that is one update after its parent by the gradient, if the gradient was a bf16 number times a
 * scale: mixed precision, with or without clipping. The change of the moment gives the gradient up to rounding. If the
 * gradient was bf16, rounding to bf16 restores its exact bits, and these give the moment's bits.
 *
 *   fit_scale      what the gradients were multiplied with
 *   fit_rule       how the program rounded the update
 *   encode         the gradient, and the few differences that are left
 */
#include <math.h>

#include "engine/encode/internal.h"

#define SLICES     16u /* sampled, spread over the block */
#define SLICE      256u
#define SAMPLE     (SLICES * SLICE)
#define CLOSE      64u         /* elements on which a scale is tried first */
#define FITS       0.9         /* share of them that are bf16 numbers after division by the right scale */
#define EXACTLY    0.97        /* share of a sample whose moments must be reproduced bit for bit */
#define ULPS       2           /* possible error of a fitted scale, in units in its last place */
#define FIRSTS     4u          /* elements that a search for a scale starts from */
#define SIZE_BYTES 4u          /* the size of the gradient's stream, in front of it */
#define MANTISSAS  128u        /* of bf16, in units of its last bit from 128 on */
#define NOISE      0x1p-23     /* of a moment, from rounding */
#define TOLERANCE  (1.0 / 512) /* error of the gradient from the rounding of the moments, in these units */

/* Some of a block's elements. */
typedef struct sample {
    size_t count;
    float parent_values[SAMPLE], now[SAMPLE], gradient[SAMPLE], predicted[SAMPLE];
    double usable[SAMPLE]; /* gradients that the moments determine accurately */
    size_t usable_count;
} sample;

typedef struct fit {
    step_rule rule;
    double scale;
    size_t exact; /* elements of the sample that are reproduced bit for bit */
} fit;

/* ---- the gradient, from the moments ---- */

/* m1 = keep m0 + add g. SGD's momentum has coefficients of its own. */
typedef struct mixing {
    double keep, add;
} mixing;

static mixing mixing_of(const step_source *s) {
    const double *c = s->group.coefficients;
    return s->first_rule == RULE_VELOCITY_FIRST ? (mixing){c[C_MOMENTUM], c[C_UNDAMPED]}
                                                : (mixing){c[C_BETA1], c[C_REST1]};
}

/*
 * The gradient divided by its scale, rounded to bf16. A gradient as small as the moment's rounding error becomes 0.
 * Otherwise rows of an embedding whose token did not occur would get noise. now: may be unaligned.
 */
static void find_gradient(float *to, const void *now, const float *parent_values, size_t n, const mixing *by,
                          double scale) {
    double factor = 1 / (by->add * scale);
    for (size_t i = 0; i < n; i++) {
        float m;
        memcpy(&m, (const uint8_t *)now + i * sizeof(m), sizeof(m));
        double change = (double)m - by->keep * (double)parent_values[i];
        float g = (float)(fabs(change) > NOISE * fabs((double)m) ? change * factor : 0);
        uint32_t bits;
        memcpy(&bits, &g, sizeof(bits));
        bits = (bits + 0x7fffu + (bits >> 16 & 1)) & 0xffff0000u;
        memcpy(to + i, &bits, sizeof(bits));
    }
}

static void take_sample(sample *s, const block_job *job, const float *parent_values, const mixing *by) {
    size_t n = (size_t)job->input.count, slices = n > SAMPLE ? SLICES : 1;
    size_t length = slices > 1 ? SLICE : n;
    s->count = slices * length;
    for (size_t i = 0; i < slices; i++) {
        size_t at = i * (n / slices);
        memcpy(s->parent_values + i * length, parent_values + at, length * sizeof(float));
        memcpy(s->now + i * length, (const uint8_t *)job->input.values + at * sizeof(float),
               length * sizeof(float));
    }
    s->usable_count = 0;
    for (size_t i = 0; i < s->count; i++) {
        double g = ((double)s->now[i] - by->keep * (double)s->parent_values[i]) / by->add;
        if (isfinite(g) && fabs(g) >= fabs((double)s->now[i]) / 4 && fabs(g) > 1e-30) {
            s->usable[s->usable_count++] = g;
        }
    }
}

/* ---- its scale ---- */

/* A number's magnitude without its exponent, in units of bf16's last bit: 128 to 256. */
static double mantissa_of(double x) {
    int exponent;
    return 2 * MANTISSAS * frexp(fabs(x), &exponent);
}

/* Are the first usable elements bf16 numbers, divided by the scale? */
static bool matches(const sample *s, size_t count, double scale) {
    size_t others = 0, max = (size_t)((1 - FITS) * (double)count);
    for (size_t i = 0; i < count && others <= max; i++) {
        double m = mantissa_of(s->usable[i] / scale);
        others += fabs(m - nearbyint(m)) > TOLERANCE;
    }
    return others <= max;
}

/* The mean over all usable elements is more accurate than any one of them. */
static double refined(const sample *s, double scale) {
    double sum = 0;
    size_t count = 0;
    for (size_t i = 0; i < s->usable_count; i++) {
        double m = mantissa_of(s->usable[i] / scale), whole = nearbyint(m);
        if (fabs(m - whole) <= TOLERANCE) {
            sum += m / whole;
            count++;
        }
    }
    return count ? scale * (sum / (double)count) : scale;
}

/*
 * Finds the scale, above 1/2 and at most 1, because powers of two make no difference. 0: the gradients were not bf16.
 * usual: the scale to try first, or 0.
 */
static double fit_scale(const sample *s, double usual) {
    size_t count = s->usable_count < CLOSE ? s->usable_count : CLOSE;
    if (count < CLOSE / 4) {
        return 0;
    }
    if (usual > 0 && matches(s, count, usual)) {
        return usual;
    }
    if (matches(s, count, 1)) {
        return 1;
    }
    for (size_t i = 0; i < FIRSTS && i < count; i++) {
        for (unsigned mantissa = MANTISSAS; mantissa < 2 * MANTISSAS; mantissa++) {
            int exponent;
            double scale = frexp(fabs(s->usable[i]) / mantissa, &exponent);
            if (matches(s, count, scale)) {
                return refined(s, scale);
            }
        }
    }
    return 0;
}

/* ---- how the program rounds ---- */

static void try_rule(fit *best, sample *s, const block_job *job, const mixing *by, const fit *tried) {
    fit f = *tried;
    f.rule.coefficients[C_SCALE] = f.scale;
    find_gradient(s->gradient, s->now, s->parent_values, s->count, by, f.scale);
    job->decoder.kernels->optimizer_step(&f.rule, s->predicted, s->parent_values, s->gradient, NULL,
                                         s->count);
    f.exact = 0;
    for (size_t i = 0; i < s->count; i++) {
        f.exact += memcmp(&s->predicted[i], &s->now[i], sizeof(float)) == 0;
    }
    if (f.exact > best->exact) {
        *best = f;
    }
}

/*
 * Finds the rule and the scale that reproduce the most elements of the sample exactly. The usual ones are taken if they
 * reproduce enough.
 */
static bool fit_rule(fit *best, sample *s, const block_job *job, const step_source *source, double scale) {
    const mixing by = mixing_of(source);
    fit f = {.rule = {.rule = source->usual}, .scale = scale};
    memcpy(f.rule.coefficients, source->group.coefficients, sizeof(f.rule.coefficients));
    *best = (fit){.exact = 0};
    double enough = EXACTLY * (double)s->count;
    if (source->usual && (scale == source->scale || scale == 1)) {
        try_rule(best, s, job, &by, &f);
    }
    float rounded = (float)scale;
    int ulps = scale == 1 || (float)source->scale == rounded ? 0 : ULPS;
    for (int ulp = -ulps; ulp <= ulps && (double)best->exact < enough; ulp++) {
        float at = rounded;
        for (int i = 0; i < abs(ulp); i++) {
            at = nextafterf(at, ulp < 0 ? 0 : 2);
        }
        f.scale = at;
        for (f.rule.rule = source->first_rule; f.rule.rule <= source->last_rule; f.rule.rule++) {
            try_rule(best, s, job, &by, &f);
        }
    }
    return (double)best->exact >= enough;
}

/* ---- the payload ---- */

#define ZEROS 4 /* if at least one element in this many is 0, listing the others may pay */

/*
 * Plans the stream of the numbers. If many are zeros, a list of the others may be smaller; in a list, low bits are not
 * split off.
 */
static void plan_numbers(symbols_workspace *w, const symbols_input *in, const symbols_grid *grid) {
    size_t zeros = 0;
    for (size_t i = 0; i < in->n; i++) {
        zeros += ((const uint16_t *)in->values)[i] == 0;
    }
    size_t split = symbols_plan(w, 1, SYMBOLS_SPLIT, in, grid);
    if (zeros > in->n / ZEROS && symbols_plan(w, 1, SYMBOLS_CLASS, in, NULL) >= split) {
        symbols_plan(w, 1, SYMBOLS_SPLIT, in, grid);
    }
}

/* Appends the gradient as a stream of bf16 numbers, with its size in front. */
static ckd_status encode_gradient(block_job *job, const tensor_context *tensor, const float *gradient,
                                  ckd_error *err) {
    size_t n = (size_t)job->input.count;
    bytes *payload = &job->analysis.predicted.payload;
    uint16_t *numbers =
        bytes_scratch(&job->scratch.step_before, n * sizeof(*numbers) + 1, "coding scratch", err);
    if (!numbers) {
        return CKD_E_NOMEM;
    }
    const kernels *k = job->decoder.kernels;
    k->cast(CKD_BF16, numbers, CKD_F32, gradient, n);
    k->rotate_sign(CKD_BF16, numbers, numbers, n);
    symbols_workspace *w = job->plan.work;
    symbols_grid grid = block_grid(&tensor->shape, tensor->region, job->input.first);
    plan_numbers(w, &(symbols_input){sizeof(*numbers), n, numbers, NULL}, &grid);
    size_t bound = symbols_bound(w, 1);
    uint8_t *to = bytes_scratch(payload, SIZE_BYTES + bound, "coding scratch", err);
    if (!to) {
        return CKD_E_NOMEM;
    }
    size_t size = symbols_encode(w, 1, numbers, NULL, to + SIZE_BYTES, bound);
    store_le32(to, (uint32_t)size);
    payload->size = SIZE_BYTES + size;
    return CKD_OK;
}

/* Appends the differences from the prediction; nothing if there are none. */
static ckd_status encode_rest(block_job *job, const float *predicted, ckd_error *err) {
    size_t n = (size_t)job->input.count;
    bytes *payload = &job->analysis.predicted.payload;
    job->plan.delta_symbols = n;
    if (memcmp(predicted, job->input.values, n * sizeof(float)) == 0) {
        return CKD_OK;
    }
    void *residual = bytes_scratch(&job->plan.residual, n * sizeof(float), "coding scratch", err);
    uint8_t *context = residual ? bytes_scratch(&job->plan.context, n, "coding scratch", err) : NULL;
    if (!context) {
        return CKD_E_NOMEM;
    }
    const kernels *k = job->decoder.kernels;
    k->ordered_residual(CKD_F32, residual, job->input.values, predicted, n);
    k->magnitude_context(CKD_F32, context, predicted, n);
    symbols_workspace *w = job->plan.work;
    symbols_plan(w, 1, SYMBOLS_CLASS, &(symbols_input){sizeof(float), n, residual, context}, NULL);
    size_t bound = symbols_bound(w, 1), at = payload->size;
    uint8_t *to = bytes_extend(payload, bound);
    if (!to) {
        return err_nomem(err, bound, "coding scratch");
    }
    payload->size = at + symbols_encode(w, 1, residual, context, to, bound);
    job->plan.delta_symbols += symbols_coded(w, 1);
    return CKD_OK;
}

/* Replaces the parent's values in `values` by the prediction. */
static ckd_status encode(block_job *job, const tensor_context *tensor, const fit *f, float *values,
                         ckd_error *err) {
    size_t n = (size_t)job->input.count;
    const mixing by = mixing_of(tensor->step);
    float *gradient = bytes_scratch(&job->scratch.step_first, n * sizeof(float) + 1, "coding scratch", err);
    if (!gradient) {
        return CKD_E_NOMEM;
    }
    find_gradient(gradient, job->input.values, values, n, &by, f->scale);
    ckd_status status = encode_gradient(job, tensor, gradient, err);
    if (status == CKD_OK) {
        job->decoder.kernels->optimizer_step(&f->rule, values, values, gradient, NULL, n);
        status = encode_rest(job, values, err);
    }
    return status;
}

ckd_status block_gradient_plan(step_rule *rule, block_job *job, const coding_context *ctx,
                               const tensor_context *tensor, ckd_error *err) {
    const step_source *source = tensor->step;
    candidate *predicted = &job->analysis.predicted;
    float *values = (float *)(void *)job->scratch.previous.data;
    sample *s = ctx->codec == CKD_CODEC_AUTO ? malloc(sizeof(*s)) : NULL;
    if (!s) {
        return CKD_OK; /* a delta, then */
    }
    const mixing by = mixing_of(source);
    take_sample(s, job, values, &by);
    double scale = fit_scale(s, source->scale);
    fit f;
    job->analysis.step.tried = true;
    job->analysis.step.fits = scale > 0 && fit_rule(&f, s, job, source, scale);
    free(s);
    if (!job->analysis.step.fits) {
        return CKD_OK;
    }
    job->analysis.step.scale = f.scale;
    ckd_status status = encode(job, tensor, &f, values, err);
    if (status == CKD_OK) {
        predicted->available = predicted->encoded = job->analysis.step.predicts = true;
        predicted->coding = CODING_GRADIENT;
        predicted->size = predicted->payload.size;
        *rule = f.rule;
    }
    return status;
}
