/* Turns exact stores into stores as lossy saves write them, with bundles and measures. */
#ifndef TESTS_SUPPORT_BUNDLED_H
#define TESTS_SUPPORT_BUNDLED_H

#include "codec/chunk/chunk.h"

/*
 * Rewrites the chunk files of every checkpoint of the store with bundles, and publishes its next generation.
 * Removes the old manifests and files. Nobody may have the store open. Fails the running test on an error.
 */
void bundle_store(const char *store_path);

/*
 * The same, as if it had been saved with fidelity near: each file has the measures of measures_of_shard. (The
 * values are unchanged; nothing compares them.)
 */
void measure_store(const char *store_path);
/* Rewrites it with measures whose checksums are right, but whose content hashes are those of other bytes. */
void mismeasure_store(const char *store_path);
/* Returns whether shard number k of a file has measures. Every fifth, from the fourth on, has none. */
bool shard_has_measures(size_t k);
measures measures_of_shard(size_t k);

#endif
