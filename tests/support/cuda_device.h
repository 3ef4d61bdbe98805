/* The CUDA backend, for tests that need a device. */
#ifndef TESTS_SUPPORT_CUDA_DEVICE_H
#define TESTS_SUPPORT_CUDA_DEVICE_H

#include "kernels/device.h"

/*
 * Opens the CUDA backend. On failure returns NULL and sets *result to the test's exit status: 77 (skipped,
 * with the reason) if there is no driver or device, or the backend was not built; 1 if it was built but
 * cannot be opened for another reason.
 */
const device_backend *cuda_device(int *result);

#endif
