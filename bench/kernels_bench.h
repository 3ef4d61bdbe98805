/* The two halves of bench_kernels: operations of the kernels' table, and whole paths. */
#ifndef BENCH_KERNELS_BENCH_H
#define BENCH_KERNELS_BENCH_H

#include <stdint.h>
#include <stdio.h>

#define BENCH_MOST_REPEATS 15

typedef struct bench_plan {
    int repeats;
    size_t elements; /* of the operations' arrays */
    size_t sizes[4]; /* of the paths' square matrices; 0: no more, here and below */
    int efforts[3];
    int device;         /* of bench_device */
    const char *folder; /* for stores; removed afterwards */
    FILE *json;
} bench_plan;

double bench_median(double *values, int n);
/* Runs and prints them; appends a member (and a comma before it) to the JSON object. */
void bench_operations(const bench_plan *plan);
void bench_paths(const bench_plan *plan);
void bench_device(const bench_plan *plan);
/* Why there is no such device; NULL: there is. */
const char *bench_no_device(int device);

/* The same numbers every time: about normal, and even in -1 ... 1. */
float bench_normal(uint64_t *seed);

#endif
