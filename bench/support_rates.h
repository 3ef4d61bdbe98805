/*
 * Small quantised integers of a given entropy, as lossy coders make them: mostly zero, from distributions of three shapes. The
 * same in every run, and on every machine but for the last bit of the C library's logarithms.
 */
#ifndef BENCH_SUPPORT_RATES_H
#define BENCH_SUPPORT_RATES_H

#include <stddef.h>
#include <stdint.h>

typedef enum rates_shape { RATES_GEOMETRIC, RATES_GAUSSIAN, RATES_DEAD_ZONE, RATES_SHAPES } rates_shape;

/* n integers, those beyond -127 ... 127 cut off. */
void rates_draw(int8_t *values, size_t n, rates_shape shape, double scale);
/* The scale at which the entropy of a shape is about so many bits an integer. */
double rates_scale(rates_shape shape, double bits);
/* The empirical entropy of order 0, in bits an integer. */
double rates_entropy(const int8_t *values, size_t n);

#endif
