/* Opens the backend for devices, and reports its failures. */
#ifndef KERNELS_DEVICE_OPEN_H
#define KERNELS_DEVICE_OPEN_H

#include "base/error.h"
#include "kernels/device.h"

/*
 * Returns the backend: libckptdelta_cuda.so, beside the library or where the system looks for libraries, or
 * the file that CKD_CUDA in the environment names. It is opened once and never closed. Returns NULL, with
 * DEVICE and the reason, if there is none. Thread-safe.
 */
const device_backend *device_backend_open(ckd_error *err);
/* Returns the status of a failed call: NOMEM if memory was short, else DEVICE. */
ckd_status device_status(const device_failure *why, int device, ckd_error *err);
/* For tests: uses this backend from now on, or (NULL) the one that is opened. */
void device_backend_use(const device_backend *backend);

#endif
