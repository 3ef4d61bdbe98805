/* Records and chunk files for tests of containers, with an example of everything in the format. */
#ifndef TESTS_SUPPORT_SAMPLES_H
#define TESTS_SUPPORT_SAMPLES_H

#include "codec/chunk/chunk.h"

/* An id whose sixteen bytes are all `fill`. */
ckd_id sample_id(uint8_t fill);

/*
 * A valid block of 24 f32 values of "layer.0.weight" (6 x 4), without dependencies. The record points to
 * static data. A test may change it, or give it another tensor, region or dependencies.
 */
record sample_block(void);

#define SAMPLE_COUNT 7
#define SAMPLE_BYTES 256 /* largest payload */
/*
 * The records of a small chunk file: a block of each region kind, one with all kinds of dependencies, a side
 * record, a blob, and a record of an unknown kind, coding and predictor. Each payload has space for
 * SAMPLE_BYTES; its first stored_size bytes count.
 */
void sample_records(record records[SAMPLE_COUNT], uint8_t payloads[SAMPLE_COUNT][SAMPLE_BYTES]);

/* Writes `count` records into the file `path`. Fails the running test on an error. */
void sample_write(const char *path, record *records, uint8_t (*payloads)[SAMPLE_BYTES], size_t count,
                  hash128 *root, uint64_t *size);

#endif
