/* The CUDA backend's table, and its kernels. */
#include <string.h>

#include "kernels/cuda/operations.h"
#include "kernels/cuda/runtime.h"

static const device_backend backend = {
    DEVICE_VERSION,
    "cuda",
    cuda_count,
    cuda_describe,
    cuda_owner,
    cuda_allocate,
    cuda_release,
    cuda_allocate_pinned,
    cuda_release_pinned,
    cuda_queue_open,
    cuda_queue_close,
    cuda_queue_after_stream,
    cuda_stream_after_queue,
    cuda_finish,
    cuda_event_new,
    cuda_event_free,
    cuda_event_record,
    cuda_stream_wait_event,
    cuda_event_wait,
    cuda_copy,
    cuda_copy_rows,
    cuda_zero,
    run_elements,
    run_hash,
    run_quantise,
    run_move,
    run_quantise_levels,
    run_move_levels,
    run_keep,
    run_scatter,
    run_residuals,
    run_gather,
    run_pack,
    run_sums,
    run_columns,
    run_errors,
    run_halves,
    run_updates,
    cuda_product,
    cuda_byte_product,
    run_round,
    run_classify,
    run_split,
    run_encode,
    run_decode,
};

extern "C" __attribute__((visibility("default"))) const device_backend *ckd_device_backend(void) {
    return &backend;
}
