/*
 * The floating-point mode of the calling thread. The library computes in one mode only: to nearest, ties to even, denormals kept,
 * no traps; host programs may have another one (PyTorch users flush denormals). Public entry points that compute enter the
 * library's mode and leave it when they return; callbacks run in the caller's. Thread-safe; nothing fails.
 *
 * x86-64: MXCSR (SSE and AVX; the x87 unit is not used, and left as it is). arm64: FPCR. Elsewhere: the rounding direction.
 */
#ifndef BASE_FLOAT_MODE_H
#define BASE_FLOAT_MODE_H

#include <stdint.h>

typedef struct float_mode {
    uint64_t bits;
} float_mode;

/* Sets the library's mode; returns the one that was, for float_mode_leave. Nests. */
float_mode float_mode_enter(void);
/* Sets a mode that float_mode_enter returned, the flags of exceptions that were seen included. */
void float_mode_leave(float_mode saved);

#endif
