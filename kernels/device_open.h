/* Finding the backend for devices, and telling its failures. */
#ifndef KERNELS_DEVICE_OPEN_H
#define KERNELS_DEVICE_OPEN_H

#include "base/error.h"
#include "kernels/device.h"

/*
 * The backend: libckptdelta_cuda.so, beside the library or where the system looks for libraries, or what CKD_CUDA in the environment names. Opened
 * once and never closed. NULL, and E_DEVICE with the reason: there is none. Thread-safe.
 */
const device_backend *device_backend_open(ckd_error *err);
/* The status of a call's failure: NOMEM where memory was too little, else DEVICE. */
ckd_status device_status(const device_failure *why, int device, ckd_error *err);
/* For tests: this one from now on, or (NULL) the one that is opened. */
void device_backend_use(const device_backend *backend);

#endif
