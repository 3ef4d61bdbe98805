/* Stores whose small records are in bundles, made of stores that have none. */
#ifndef TESTS_SUPPORT_BUNDLED_H
#define TESTS_SUPPORT_BUNDLED_H

/*
 * Writes the chunk files of every checkpoint of the store anew, with bundles, and publishes its next generation; old manifests and files
 * are removed. Nobody may have the store open. Fails the running test on an error.
 */
void bundle_store(const char *store_path);

#endif
