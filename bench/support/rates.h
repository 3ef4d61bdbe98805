/*
 * Small quantised integers of a given entropy, as lossy coders make them: mostly zero, from distributions of three
 * shapes. They are the same in every run, and on every machine but for the last bit of the C library's logarithms.
 */
#ifndef BENCH_RATES_H
#define BENCH_RATES_H

#include <stddef.h>
#include <stdint.h>

typedef enum rates_shape { RATES_GEOMETRIC, RATES_GAUSSIAN, RATES_DEAD_ZONE, RATES_SHAPES } rates_shape;

/* The next of a sequence of normal numbers. The state begins with any number but 0. */
double rates_gaussian(uint64_t *state);
/* n integers, clipped to -127 ... 127. */
void rates_draw(int8_t *values, size_t n, rates_shape shape, double scale);
/* The scale at which the entropy of a shape is about `bits` an integer. */
double rates_scale(rates_shape shape, double bits);
/* The empirical entropy of order 0, in bits an integer. */
double rates_entropy(const int8_t *values, size_t n);

#endif
