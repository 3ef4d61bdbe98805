#include <stdlib.h>

#include "bench/support/support.h"

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

void bench_sort(double *values, size_t count) {
    qsort(values, count, sizeof(*values), ascending);
}

double bench_median(double *values, int count) {
    bench_sort(values, (size_t)count);
    return values[count / 2];
}

float bench_normal(uint64_t *seed) {
    uint64_t s = *seed;
    s ^= s << 13;
    s ^= s >> 7;
    s ^= s << 17;
    *seed = s;
    /* The sum of four uniform numbers is nearly normal. */
    int32_t sum = (int32_t)(s & 65535u) + (int32_t)(s >> 16 & 65535u) + (int32_t)(s >> 32 & 65535u) +
                  (int32_t)(s >> 48);
    return (float)(sum - 131070) * (1.0f / 37837.0f);
}
