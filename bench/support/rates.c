#include "bench/support/rates.h"

#include <math.h>

/* Marsaglia's xorshift; above 0, below 1. */
static double uniform(uint64_t *state) {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return ((double)(*state >> 11) + 0.5) / 9007199254740992.0;
}

double rates_gaussian(uint64_t *state) {
    double radius = sqrt(-2 * log(uniform(state)));
    return radius * cos(6.283185307179586 * uniform(state));
}

static double draw(uint64_t *state, rates_shape shape, double scale) {
    double size;
    switch (shape) {
    case RATES_GEOMETRIC: /* scale is the ratio of neighbouring probabilities, below 1 */
        size = floor(log(uniform(state)) / log(scale));
        break;
    case RATES_GAUSSIAN:
        return rint(scale * rates_gaussian(state));
    default: /* rounded up above 0.6 only */
        size = floor(fabs(scale * rates_gaussian(state)) + 0.4);
    }
    return uniform(state) < 0.5 ? size : -size;
}

void rates_draw(int8_t *values, size_t n, rates_shape shape, double scale) {
    uint64_t state = 88172645463325252u;
    for (size_t i = 0; i < n; i++) {
        values[i] = (int8_t)fmax(-127, fmin(127, draw(&state, shape, scale)));
    }
}

double rates_entropy(const int8_t *values, size_t n) {
    double counts[256] = {0}, bits = 0;
    for (size_t i = 0; i < n; i++) {
        counts[(uint8_t)values[i]]++;
    }
    for (unsigned i = 0; i < 256; i++) {
        bits += counts[i] > 0 ? counts[i] * log2((double)n / counts[i]) : 0;
    }
    return bits / (double)n;
}

double rates_scale(rates_shape shape, double bits) {
    static int8_t values[1 << 14];
    double low = 1e-6, high = shape == RATES_GEOMETRIC ? 0.99 : 20;
    for (unsigned i = 0; i < 20; i++) {
        double middle = (low + high) / 2;
        rates_draw(values, sizeof(values), shape, middle);
        *(rates_entropy(values, sizeof(values)) < bits ? &low : &high) = middle;
    }
    return low;
}
