/* A backend's symbol streams against the codec's: symbols, counts, bytes written, integers read, and streams that are damaged. */
#ifndef TESTS_SUPPORT_DEVICE_STREAMS_H
#define TESTS_SUPPORT_DEVICE_STREAMS_H

#include "kernels/device.h"

/* Runs all of them as a group of the runner's; returns how many failed. damaged: streams to be tried that are. */
int device_streams(const char *name, const device_backend *backend, unsigned damaged);

#endif
