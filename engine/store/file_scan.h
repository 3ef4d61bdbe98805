/* Reads chunk files in full and compares every stored byte with its checksum, without decoding. */
#ifndef ENGINE_STORE_FILE_SCAN_H
#define ENGINE_STORE_FILE_SCAN_H

#include "engine/store/view.h"
#include "codec/chunk/chunk.h"

/* Checks one record of c->outer: its header, and its payload, which stays in `payload`. Errors: CORRUPT, IO, NOMEM. */
ckd_status record_read_through(bytes *payload, const chunk *c, const record *r, ckd_error *err);

/* Checkpoints that were read in full before a deletion. Zero-initialise; release with safe_reading_free. */
typedef struct safe_reading {
    ckd_id *checkpoints;
    size_t count, capacity;
    scrubbed_files files;
} safe_reading;
void safe_reading_free(safe_reading *r);
/*
 * Ensures that a policy leaves intact checkpoints behind. For every run that loses a checkpoint, reads the newest that
 * stay (CKD_KEPT_SAFETY) and everything they depend on. Skips files that the catalog says were read within the last
 * `trusted_s` seconds, and those in *done. Adds the rest to *done. Waits up to timeout_ms for the reader lock. Errors:
 * CORRUPT (one of them is damaged), UNSUPPORTED, BUSY, IO, NOMEM.
 */
ckd_status read_safe_through(safe_reading *done, ckd_store *store, const ckd_prune *plan, uint64_t trusted_s,
                             uint32_t timeout_ms, ckd_error *err);
/* Whether *done has every checkpoint that read_safe_through would read for the plan. */
bool safe_all_read(const safe_reading *done, const ckd_prune *plan);

/* ---- copying records unchanged from one chunk file to another ---- */
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
