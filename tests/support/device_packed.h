/*
 * Compares a backend's tiles of packed integers with the CPU's kernels, bit for bit. Integers have any width,
 * and sentinels surround everything that is written.
 */
#ifndef TESTS_SUPPORT_DEVICE_PACKED_H
#define TESTS_SUPPORT_DEVICE_PACKED_H

#include "kernels/device.h"

/* Runs all of these tests as one group named `name`. Returns how many failed. */
int device_packed(const char *name, const device_backend *backend);

#endif
