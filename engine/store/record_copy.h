/* Copies records unchanged from one chunk file to another. Internal to engine/. */
#ifndef ENGINE_RECORD_COPY_H
#define ENGINE_RECORD_COPY_H

#include "codec/chunk/chunk.h"

/*
 * Called for each record of a file in copying order, one checkpoint after the other. Bundles are replaced by their
 * members.
 */
typedef ckd_status (*record_fn)(void *context, const chunk *c, const record *r, ckd_error *err);

/*
 * Skips bundles that cannot be unpacked, as no reader could open their checkpoints. Errors: those of `each`, IO, NOMEM.
 */
ckd_status chunk_each_record(chunk *c, record_fn each, void *context, ckd_error *err);

/* State between copied records. Zero-initialise for each source file; the caller frees the payload. */
typedef struct record_copier {
    bytes payload;
    const record *checked; /* the last bundle that was verified */
} record_copier;
/* Appends a record of c. Errors: CORRUPT (its payload or its bundle is damaged), IO, NOSPACE, NOMEM. */
ckd_status record_copy(record_copier *k, chunk_writer *to, const chunk *c, const record *r, ckd_error *err);

/* Equal for records of the same values with the same coding, in any file. */
uint64_t record_hash(const record *r);

#endif
