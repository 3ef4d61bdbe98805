/* Records copied as they are from one chunk file to another. Internal to engine/. */
#ifndef ENGINE_RECORD_COPY_H
#define ENGINE_RECORD_COPY_H

#include "codec/chunk/chunk.h"

/*
 * Called with each record of a file, in the order in which they are copied: one checkpoint after the other. Bundles do not come, but what is in them does.
 */
typedef ckd_status (*record_fn)(void *context, const chunk *c, const record *r, ckd_error *err);

/* Leaves out bundles that cannot be unpacked: whoever reads them could not be opened. Errors: those of `each`, IO, NOMEM. */
ckd_status chunk_each_record(chunk *c, record_fn each, void *context, ckd_error *err);

/* Writes what a copy needs from one record to the next. Zero-initialise for each file that is read; free the payload. */
typedef struct record_copier {
    bytes payload;
    const record *checked; /* the last bundle, which was read through */
} record_copier;
/* Appends a record of c. Errors: CORRUPT (its payload, or the bundle that it is in, is damaged), IO, NOSPACE, NOMEM. */
ckd_status record_copy(record_copier *k, chunk_writer *to, const chunk *c, const record *r, ckd_error *err);

/* The same record, coded the same way, has the same hash in whatever file it stands. */
uint64_t record_hash(const record *r);

#endif
