/* A backend's tiles of packed integers against the CPU's kernels, bit for bit: integers of any width, sentinels around what is written. */
#ifndef TESTS_SUPPORT_DEVICE_PACKED_H
#define TESTS_SUPPORT_DEVICE_PACKED_H

#include "kernels/device.h"

/* Runs all of them as a group of the runner's; returns how many failed. */
int device_packed(const char *name, const device_backend *backend);

#endif
