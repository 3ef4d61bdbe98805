/*
 * Compares a device backend with the CPU's kernels, bit for bit. The tests use shapes, alignments and values
 * that are easy to get wrong, and sentinels around all arrays.
 */
#ifndef TESTS_SUPPORT_DEVICE_PARITY_H
#define TESTS_SUPPORT_DEVICE_PARITY_H

#include "kernels/device.h"

/* Runs all of these tests as one group named `name`. Returns how many failed. */
int device_parity(const char *name, const device_backend *backend);

#endif
