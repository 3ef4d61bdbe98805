/* Records and chunk files to test the containers with: a little of everything that the format has. */
#ifndef TESTS_SUPPORT_SAMPLES_H
#define TESTS_SUPPORT_SAMPLES_H

#include "codec/chunk/chunk.h"

/* Sixteen bytes with the value `fill`. */
ckd_id sample_id(uint8_t fill);

/*
 * A block of 24 f32 values of "layer.0.weight" (6 x 4): valid, without dependencies. The record points to static data;
 * a test may change the record, or give it another tensor, region or dependencies.
 */
record sample_block(void);

#define SAMPLE_COUNT 7
#define SAMPLE_BYTES 256 /* payload at most */
/*
 * The records of a small chunk file: a block of each region kind, one with all kinds of dependencies, a side record, a
 * blob, and a record of a kind, coding and predictor that nobody knows. Payloads are SAMPLE_BYTES each, of which the first
 * stored_size count.
 */
void sample_records(record records[SAMPLE_COUNT], uint8_t payloads[SAMPLE_COUNT][SAMPLE_BYTES]);

/* Writes `count` records into the file `path`. Fails the running test on an error. */
void sample_write(const char *path, record *records, uint8_t (*payloads)[SAMPLE_BYTES], size_t count,
                  hash128 *root, uint64_t *size);

#endif
