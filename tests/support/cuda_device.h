/* The CUDA backend, for tests that need a device. */
#ifndef TESTS_SUPPORT_CUDA_DEVICE_H
#define TESTS_SUPPORT_CUDA_DEVICE_H

#include "kernels/device.h"

/*
 * NULL, and *result the test's exit status: 77 (skipped, with the reason) where there is no driver or no device, or the backend was not built; 1 where it was
 * built and cannot be opened, which is not for want of a device.
 */
const device_backend *cuda_device(int *result);

#endif
