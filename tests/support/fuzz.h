/*
 * The entry point of a fuzz driver, tests/fuzz/fuzz_NAME.c: must accept any bytes, must not keep state between calls, and
 * returns 0. `make fuzz` drives it with libFuzzer; `make test` replays tests/corpus/NAME/ through fuzz_main.c.
 */
#ifndef CKD_TESTS_FUZZ_H
#define CKD_TESTS_FUZZ_H

#include <stddef.h>
#include <stdint.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#endif
