/*
 * The CUDA runtime and cuBLAS behind device_backend's calls. Every call leaves the thread's current device
 * unchanged.
 */
#ifndef KERNELS_CUDA_RUNTIME_H
#define KERNELS_CUDA_RUNTIME_H

#include "kernels/device.h"

device_result cuda_count(int *devices, device_failure *why);
device_result cuda_describe(device_info *about, int device, device_failure *why);
device_result cuda_owner(int *device, const void *address, device_failure *why);
device_result cuda_allocate(void **out, int device, size_t bytes, device_failure *why);
void cuda_release(int device, void *memory);
device_result cuda_allocate_pinned(void **out, int device, size_t bytes, device_failure *why);
void cuda_release_pinned(int device, void *memory);
device_result cuda_queue_open(device_queue *out, int device, bool background, device_failure *why);
void cuda_queue_close(const device_queue *queue);
device_result cuda_queue_after_stream(const device_queue *queue, void *stream, device_failure *why);
device_result cuda_stream_after_queue(const device_queue *queue, void *stream, device_failure *why);
device_result cuda_finish(const device_queue *queue, device_failure *why);
device_result cuda_event_new(void **out, int device, device_failure *why);
void cuda_event_free(int device, void *mark);
device_result cuda_event_record(void *mark, const device_queue *queue, device_failure *why);
device_result cuda_stream_wait_event(void *mark, int device, void *stream, device_failure *why);
device_result cuda_event_wait(void *mark, int device, device_failure *why);
device_result cuda_copy(const device_queue *queue, void *to, const void *from, size_t bytes,
                        device_direction direction, device_failure *why);
device_result cuda_copy_rows(const device_queue *queue, const device_rows *rows, device_failure *why);
device_result cuda_zero(const device_queue *queue, void *memory, size_t bytes, device_failure *why);
device_result cuda_product(const device_queue *queue, const device_product *product, device_failure *why);
device_result cuda_byte_product(const device_queue *queue, bool *known, const device_byte_product *product,
                                device_failure *why);

#endif
