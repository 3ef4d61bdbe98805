/* A backend's symbol streams against the codec's: symbols, counts, bytes written, integers read, and streams that are damaged. */
#ifndef TESTS_SUPPORT_DEVICE_STREAMS_H
#define TESTS_SUPPORT_DEVICE_STREAMS_H

#include "kernels/device.h"

/* Runs all of them as a group of the runner's; returns how many failed. damaged: streams to be tried that are. */
int device_streams(const char *name, const device_backend *backend, unsigned damaged);

/* The parts of these: SPLIT streams, those of values on their own; and `damaged` streams, of which only what the codec accepts may be. */
int device_split_streams(const char *name, const device_backend *backend);
int device_damaged_streams(const char *name, const device_backend *backend, unsigned damaged);

#endif
