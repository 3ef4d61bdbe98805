/*
 * The entry point of a fuzz driver, tests/fuzz/fuzz_NAME.c. It must accept any bytes and keep no state
 * between calls. It returns 0. `make fuzz` runs it with libFuzzer; `make test` replays tests/corpus/NAME/
 * with fuzz_main.c.
 */
#ifndef CKD_TESTS_FUZZ_H
#define CKD_TESTS_FUZZ_H

#include <stddef.h>
#include <stdint.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#endif
