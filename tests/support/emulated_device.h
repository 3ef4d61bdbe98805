/*
 * A device_backend without a device. The host runs the CUDA backend's kernels thread by thread, over the same
 * geometry, in memory that the address sanitizer watches. Kernels run at once. Copies run only when something
 * waits for them, and streams wait for each other only as they were asked to, so that a missing wait is
 * noticed.
 */
#ifndef TESTS_SUPPORT_EMULATED_DEVICE_H
#define TESTS_SUPPORT_EMULATED_DEVICE_H

#include "kernels/device.h"

/* Exported for the tests of the Python package (tests/support/support_device.py). */
#define EMULATED_EXPORT __attribute__((visibility("default")))

/* The number of devices it reports; 1 at first. */
extern int emulated_devices;
/* If set, threads and blocks run from the last to the first. */
extern bool emulated_backwards;
/* The n-th call from now on that can fail does so, once, with the result emulated_fail_as; 0: none fails. */
extern EMULATED_EXPORT int emulated_fail_after;
extern device_result emulated_fail_as;
/*
 * Bytes of device memory, buffers of pinned memory, and marks that are allocated now; bytes copied so far in
 * each direction.
 */
extern EMULATED_EXPORT uint64_t emulated_memory, emulated_pinned, emulated_marks, emulated_copied[3];
/* If set, there are no products of bytes. emulated_byte_products counts these products. */
extern bool emulated_without_bytes;
extern uint64_t emulated_byte_products;
/* The size of the largest copy to the host. Tests may set it to 0. */
extern uint64_t emulated_largest;
/* If not 0, allocations of more device memory than this fail. */
extern EMULATED_EXPORT uint64_t emulated_largest_memory;
/* What was called so far: kernel launches, copies in each direction, and waits of host threads. */
typedef struct emulated_calls {
    uint64_t launches, copies[3], waits;
} emulated_calls;
emulated_calls emulated_called(void);

const device_backend *emulated_device(void);

#endif
