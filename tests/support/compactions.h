/* What tests of compaction share. Failures fail the running cmocka test. */
#ifndef TESTS_SUPPORT_COMPACTIONS_H
#define TESTS_SUPPORT_COMPACTIONS_H

#include <stddef.h>
#include <stdint.h>

#include "include/ckptdelta.h"

#define PACK_BELOW (UINT64_C(512) << 10)

/* To that depth, without packs. */
ckd_compact_options options_for(uint32_t max_depth);
/* It must work. */
ckd_compaction *compact_with(ckd_store *store, const ckd_compact_options *o);
/* Nothing was left. */
void check_items(const ckd_compaction *done);
/* Steps first ... first + count - 1 of a drift, each a delta on the one before as long as it pays. */
void make_chain(ckd_store *store, const char *run, ckd_fidelity fidelity, uint64_t first, uint64_t count);
/* Stored bytes of all that is listed. */
uint64_t bytes_of_all(ckd_store *store);

#endif
