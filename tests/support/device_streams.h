/*
 * Compares a backend's symbol streams with the codec's: symbols, counts, written bytes, read integers, and
 * damaged streams.
 */
#ifndef TESTS_SUPPORT_DEVICE_STREAMS_H
#define TESTS_SUPPORT_DEVICE_STREAMS_H

#include "kernels/device.h"

/*
 * Runs all of these tests in groups named after `name`. Returns how many failed. damaged: how many damaged
 * streams to try.
 */
int device_streams(const char *name, const device_backend *backend, unsigned damaged);

/*
 * Parts of device_streams: SPLIT streams, which hold values without a parent; and damaged streams, of which
 * exactly those may be accepted that the codec accepts.
 */
int device_split_streams(const char *name, const device_backend *backend);
int device_damaged_streams(const char *name, const device_backend *backend, unsigned damaged);

#endif
