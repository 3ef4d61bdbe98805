/*
 * A device_backend without a device: the CUDA backend's kernels, run by the host thread by thread over the same geometry, in memory that the
 * address sanitizer watches. Kernels run at once, but copies only when something waits for them, and streams wait for each other only where they were told to, so that who
 * forgets that is found out.
 */
#ifndef TESTS_SUPPORT_EMULATED_DEVICE_H
#define TESTS_SUPPORT_EMULATED_DEVICE_H

#include "kernels/device.h"

/* How many devices it says there are; 1 at first. */
extern int emulated_devices;
/* Set: threads and blocks run from the last to the first. */
extern bool emulated_backwards;
/* The n-th call from now on that can fail does, once, as `result`; 0: none does. */
extern int emulated_fail_after;
extern device_result emulated_fail_as;
/* Bytes of device memory, pieces of pinned memory and marks that are allocated, and bytes copied in each direction so far. */
extern uint64_t emulated_memory, emulated_pinned, emulated_marks, emulated_copied[3];
/* Set: it has no products of bytes. And how many of these were made. */
extern bool emulated_without_bytes;
extern uint64_t emulated_byte_products;
/* The largest copy to the host; for tests to set to 0. */
extern uint64_t emulated_largest;
/* Not 0: more bytes of device memory at once are not to be had. */
extern uint64_t emulated_largest_memory;
/* What was called so far: kernels launched, copies asked for in each direction, and how often a thread of the host waited. */
typedef struct emulated_calls {
    uint64_t launches, copies[3], waits;
} emulated_calls;
emulated_calls emulated_called(void);

const device_backend *emulated_device(void);

#endif
