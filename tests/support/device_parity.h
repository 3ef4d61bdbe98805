/* A backend for devices against the CPU's kernels, bit for bit: shapes, alignments and values that are likely to be got wrong, sentinels around. */
#ifndef TESTS_SUPPORT_DEVICE_PARITY_H
#define TESTS_SUPPORT_DEVICE_PARITY_H

#include "kernels/device.h"

/* Runs all of them as a group of the runner's; returns how many failed. */
int device_parity(const char *name, const device_backend *backend);

#endif
