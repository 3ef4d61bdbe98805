/*
 * Reading chunk files through: every stored byte against its checksum, nothing is decoded. Internal to engine/.
 */
#ifndef ENGINE_READ_THROUGH_H
#define ENGINE_READ_THROUGH_H

#include "engine/view.h"

/* One record of c->outer: its header, and its payload, which stays in `payload`. Errors: CORRUPT, IO, NOMEM. */
ckd_status record_read_through(bytes *payload, const chunk *c, const record *r, ckd_error *err);

/*
 * What keeps a policy from leaving nothing good: of every run that loses any, the newest checkpoints that stay (CKD_KEPT_SAFETY), and all that they
 * depend on. What was read in the last `trusted_s` seconds is not read again, as far as the catalog remembers; the deletion that follows tells it what was read now. Waits for the reader lock as long as
 * patience_ms. Errors: CORRUPT (one of them is damaged), UNSUPPORTED, BUSY, IO, NOMEM.
 */
ckd_status read_safe_through(ckd_store *store, const ckd_prune *plan, uint64_t trusted_s,
                             uint32_t patience_ms, ckd_error *err);

#endif
