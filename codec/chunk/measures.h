/*
 * Measures: how far the values of a lossy checkpoint are from the values passed to the save. One entry per region of a
 * tensor, in a record of kind 6. They are informative; no decoder uses them. codec/FORMAT.md, "Measures", is normative.
 */
#ifndef CODEC_MEASURES_H
#define CODEC_MEASURES_H

#include "codec/chunk/chunk.h"

/* Measures of one region. NaN: unknown; none is negative. Stored to three digits (2^-8); the maximum is rounded up. */
typedef struct measures {
    double error_squares, value_squares; /* sums over the region's elements, without non-finite ones */
    double max_error;
    double direction_change; /* relative L2 change of the Adam direction m / (sqrt(v) + eps) */
    double movement;         /* rms of the change since the parent, as estimated by the encoder */
    /* largest |m| / (sqrt(v) + eps): of the original values, and of the stored ones */
    double update_given, update;
    uint64_t nonfinite; /* number of NaNs and infinities, all stored exactly */
} measures;

#define MEASURES_ENTRIES (1u << 20) /* per record */

typedef struct measures_entry {
    /* index among the file's shards of this checkpoint: its block records with first = 0, in order */
    uint64_t shard;
    measures measures;
} measures_entry;

/* Appends the raw bytes of a record. The entries ascend by shard; there is at least one, at most MEASURES_ENTRIES. */
void measures_encode(bytes *to, const measures_entry *entries, size_t count);
/* Decodes the entries. *entries is malloc'ed. place: the record's. Errors: CORRUPT, NOMEM. */
ckd_status measures_decode(measures_entry **entries, size_t *count, const void *raw, size_t size,
                           const record_place *place, ckd_error *err);

/*
 * Writes the record, at most one per checkpoint and file, after its blocks. Writes nothing if there are no entries.
 * Errors: those of chunk_writer_append.
 */
ckd_status measures_write(chunk_writer *w, const ckd_id *checkpoint, const measures_entry *entries,
                          size_t count, ckd_error *err);
/*
 * Reads and decodes record r of the file, and checks all hashes. Errors: CORRUPT, UNSUPPORTED (its coding), IO, NOMEM.
 */
ckd_status measures_read(measures_entry **entries, size_t *count, const chunk *c, const record *r,
                         ckd_error *err);

#endif
