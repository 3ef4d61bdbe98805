/* Numbers that several benchmarks make or sum up. */
#include <stdlib.h>

#include "bench/kernels_bench.h"

static int compare(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double bench_median(double *values, int n) {
    qsort(values, (size_t)n, sizeof(double), compare);
    return values[n / 2];
}

float bench_normal(uint64_t *seed) {
    uint64_t s = *seed;
    s ^= s << 13;
    s ^= s >> 7;
    s ^= s << 17;
    *seed = s;
    /* Four even parts, of which the sum is nearly normal. */
    int32_t sum = (int32_t)(s & 65535u) + (int32_t)(s >> 16 & 65535u) + (int32_t)(s >> 32 & 65535u) +
                  (int32_t)(s >> 48);
    return (float)(sum - 131070) * (1.0f / 37837.0f);
}
