/* Stores as early versions left them: their manifests name only their own files. */
#ifndef TESTS_SUPPORT_EARLY_H
#define TESTS_SUPPORT_EARLY_H

/*
 * Rewrites all manifests of DIR/store like this. Nobody may have the store open. Fails the running test on an
 * error.
 */
void early_store(const char *dir);

#endif
