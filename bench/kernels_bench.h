/* The two halves of bench_kernels: operations of the kernels' table, and whole paths. */
#ifndef BENCH_KERNELS_BENCH_H
#define BENCH_KERNELS_BENCH_H

#include <stdint.h>
#include <stdio.h>

#include "kernels/device.h"

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

/*
 * Streams of differences of f32 elements in the memory of a device, in blocks of 2^18 (elements beyond: none); there are none if there are fewer. Each of the
 * last three does for all blocks what it says.
 */
typedef struct bench_streams bench_streams;
bench_streams *bench_streams_begin(const device_backend *backend, const device_queue *queue, const float *now,
                                   const float *before, uint64_t elements);
void bench_streams_end(bench_streams *s);
device_result bench_streams_classify(bench_streams *s);
device_result bench_streams_write(bench_streams *s);
device_result bench_streams_read(bench_streams *s);

/* The same numbers every time: about normal, and even in -1 ... 1. */
float bench_normal(uint64_t *seed);

#endif
