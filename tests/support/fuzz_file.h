/* A file for fuzz drivers whose parser wants a path. */
#ifndef TESTS_SUPPORT_FUZZ_FILE_H
#define TESTS_SUPPORT_FUZZ_FILE_H

#include <stddef.h>
#include <stdint.h>

/*
 * Writes the bytes to a regular file in memory (or below $TMPDIR) and returns its path, which stays the same. It is overwritten by the next call,
 * and removed when the process ends. Aborts if that cannot be done.
 */
const char *fuzz_file(const uint8_t *data, size_t size);

#endif
