/*
 * Reading chunk files through: every stored byte against its checksum, nothing is decoded. Internal to engine/.
 */
#ifndef ENGINE_STORE_FILE_SCAN_H
#define ENGINE_STORE_FILE_SCAN_H

#include "engine/store/view.h"

/* One record of c->outer: its header, and its payload, which stays in `payload`. Errors: CORRUPT, IO, NOMEM. */
ckd_status record_read_through(bytes *payload, const chunk *c, const record *r, ckd_error *err);

/* What was read through for a deletion. Zero-initialised; released with safe_reading_free. */
typedef struct safe_reading {
    ckd_id *checkpoints;
    size_t count, capacity;
    scrubbed_files files;
} safe_reading;
void safe_reading_free(safe_reading *r);
/*
 * What keeps a policy from leaving nothing good: of every run that loses any, the newest checkpoints that stay (CKD_KEPT_SAFETY), and all that they
 * depend on. What was read in the last `trusted_s` seconds is not read again, as far as the catalog remembers, nor is what *done has, to which the rest is added. Waits for the reader lock as long as
 * timeout_ms. Errors: CORRUPT (one of them is damaged), UNSUPPORTED, BUSY, IO, NOMEM.
 */
ckd_status read_safe_through(safe_reading *done, ckd_store *store, const ckd_prune *plan, uint64_t trusted_s,
                             uint32_t timeout_ms, ckd_error *err);
/* Does *done have all checkpoints that read_safe_through would read for the plan? */
bool safe_all_read(const safe_reading *done, const ckd_prune *plan);

#endif
