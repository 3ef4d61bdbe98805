/* A file for fuzz drivers whose parser takes a path. */
#ifndef TESTS_SUPPORT_FUZZ_FILE_H
#define TESTS_SUPPORT_FUZZ_FILE_H

#include <stddef.h>
#include <stdint.h>

/*
 * Writes the bytes to a regular file in memory (or below $TMPDIR), and returns its path, which is always the
 * same. The next call overwrites it, and the end of the process removes it. Aborts on an error.
 */
const char *fuzz_file(const uint8_t *data, size_t size);

#endif
