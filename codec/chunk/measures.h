/*
 * Measures: what a lossy checkpoint's values differ by from what was to be saved, one entry for each region of a tensor, in a
 * record of kind 6. They inform; nothing is decoded with them. codec/FORMAT.md, "Measures", is normative.
 */
#ifndef CODEC_MEASURES_H
#define CODEC_MEASURES_H

#include "codec/chunk/chunk.h"

/* Of one region. NaN: not known; none is negative. Stored to three digits (2^-8), the maximum rounded up. */
typedef struct measures {
    double error_squares, value_squares; /* sums over its elements, non-finite ones left out */
    double max_error;
    double direction_change; /* relative L2 change of the Adam direction m / (sqrt(v) + eps) */
    double movement;         /* rms of the values' movement since the parent, as the encoder estimated it */
    double update_given,
        update;         /* largest |m| / (sqrt(v) + eps): of the values that were to be saved, and of these */
    uint64_t nonfinite; /* NaNs and infinities, all kept as they were */
} measures;

#define MEASURES_ENTRIES (1u << 20) /* in one record */

typedef struct measures_entry {
    uint64_t
        shard; /* number among the file's shards of this checkpoint: its block records with first = 0, in order */
    measures measures;
} measures_entry;

/* Appends the raw bytes of a record; the entries ascend by shard, at least one and at most MEASURES_ENTRIES. */
void measures_encode(bytes *to, const measures_entry *entries, size_t count);
/* `*entries` is malloc'ed. offset and path only serve messages. Errors: CORRUPT, NOMEM. */
ckd_status measures_decode(measures_entry **entries, size_t *count, const void *raw, size_t size,
                           const char *path, uint64_t offset, ckd_error *err);

/*
 * Writes the record: at most one for a checkpoint in a file, after its blocks. Nothing if there are no entries. Errors: those of
 * chunk_writer_append.
 */
ckd_status measures_write(chunk_writer *w, const ckd_id *checkpoint, const measures_entry *entries,
                          size_t count, ckd_error *err);
/* Reads and decodes the record r of the file, all hashes compared. Errors: CORRUPT, UNSUPPORTED (its coding), IO, NOMEM. */
ckd_status measures_read(measures_entry **entries, size_t *count, const chunk *c, const record *r,
                         ckd_error *err);

#endif
