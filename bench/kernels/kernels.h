/* The parts of bench_kernels: operations of the kernels' table or of a device, and whole saves and loads. */
#ifndef BENCH_KERNELS_H
#define BENCH_KERNELS_H

#include <stdint.h>
#include <stdio.h>

#include "kernels/device.h"

#define BENCH_MAX_REPEATS 15

typedef struct bench_plan {
    int repeats;
    size_t elements; /* of the operations' arrays */
    size_t sizes[4]; /* sides of the paths' square matrices; 0 ends this list and the next one */
    int efforts[3];
    int device;         /* of bench_device */
    const char *folder; /* for stores; removed afterwards */
    FILE *json;
} bench_plan;

/* Each runs and prints its part, and appends a comma and a member to the JSON object. */
void bench_operations(const bench_plan *plan);
void bench_paths(const bench_plan *plan);
void bench_device(const bench_plan *plan);
/* The reason why the device cannot be used; NULL: it can. */
const char *bench_no_device(int device);

/*
 * Streams of differences of f32 elements in the memory of a device, in blocks of 2^18. Elements beyond the last whole
 * block have no stream. The last three functions do one step for all blocks.
 */
typedef struct bench_streams bench_streams;
bench_streams *bench_streams_begin(const device_backend *backend, const device_queue *queue, const float *now,
                                   const float *before, uint64_t elements);
void bench_streams_end(bench_streams *s);
device_result bench_streams_classify(bench_streams *s);
device_result bench_streams_write(bench_streams *s);
device_result bench_streams_read(bench_streams *s);

#endif
