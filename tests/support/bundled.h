/* Stores as lossy saves write them, with bundles and measures, made of exact ones. */
#ifndef TESTS_SUPPORT_BUNDLED_H
#define TESTS_SUPPORT_BUNDLED_H

#include "codec/chunk/chunk.h"

/*
 * Writes the chunk files of every checkpoint of the store anew, with bundles, and publishes its next generation; old manifests and files
 * are removed. Nobody may have the store open. Fails the running test on an error.
 */
void bundle_store(const char *store_path);

/*
 * The same, and as if it had been saved with fidelity near: each file has measures, those that measures_of_shard says. (The values are
 * what they were: nothing compares.)
 */
void measure_store(const char *store_path);
/* Measures with right checksums, whose bytes are not those that were hashed. */
void mismeasure_store(const char *store_path);
/* Of the shard that is number k in its file; every fifth (from the fourth on) has none. */
bool shard_has_measures(size_t k);
measures measures_of_shard(size_t k);

#endif
