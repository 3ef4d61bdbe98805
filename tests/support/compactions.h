/* What tests of compaction share. Failures fail the running cmocka test. */
#ifndef TESTS_SUPPORT_COMPACTIONS_H
#define TESTS_SUPPORT_COMPACTIONS_H

#include <stddef.h>
#include <stdint.h>

#include "include/ckptdelta.h"

#define PACK_BELOW (UINT64_C(512) << 10)

/* Options that compact to this depth, without packing. */
ckd_compact_options options_for(uint32_t max_depth);
/* Compacts. Fails the test on an error. */
ckd_compaction *compact_with(ckd_store *store, const ckd_compact_options *o);
/* Fails the test if a checkpoint was left. */
void check_items(const ckd_compaction *done);
/*
 * Saves the steps first ... first + count - 1 of a drift. Each is a delta on the previous one as long as that
 * is worth it.
 */
void make_chain(ckd_store *store, const char *run, ckd_fidelity fidelity, uint64_t first, uint64_t count);
/* The stored bytes of all listed checkpoints. */
uint64_t bytes_of_all(ckd_store *store);

#endif
