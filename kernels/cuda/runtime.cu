/*
 * All calls of the CUDA runtime and of cuBLAS. The library shares the process with a trainer, so no call changes the
 * thread's device, leaves an error behind, or disturbs a captured graph.
 */
#include "kernels/cuda/runtime.h"

#include <cublas_v2.h>
#include <cuda_runtime.h>
#include <stdio.h>
#include <string.h>

#include "kernels/cuda/launch.h"

/* ---- failures ---- */

static device_result failed(device_failure *why, const char *call, cudaError_t error) {
    bool absent = error == cudaErrorNoDevice || error == cudaErrorInsufficientDriver ||
                  error == cudaErrorInvalidDevice || error == cudaErrorInitializationError ||
                  error == cudaErrorSystemDriverMismatch || error == cudaErrorStubLibrary;
    if (error == cudaSuccess) {
        return DEVICE_DONE;
    }
    why->result = error == cudaErrorMemoryAllocation ? DEVICE_FULL : absent ? DEVICE_ABSENT : DEVICE_FAILED;
    snprintf(why->call, sizeof(why->call), "%s", call);
    snprintf(why->reason, sizeof(why->reason), "%s: %s", cudaGetErrorName(error), cudaGetErrorString(error));
    /* Clears the error if it can be cleared: the host program's next call must not find it. */
    cudaGetLastError();
    return why->result;
}

/* ---- the thread's current device ---- */

/*
 * Makes a device the thread's current one; scope_leave restores the earlier one. Within a scope the thread's
 * calls do not disturb graphs that other threads capture. By default, memory allocated by a save would break
 * a graph that the trainer captures meanwhile.
 */
typedef struct device_scope {
    int device, before;
    bool relaxed;
    enum cudaStreamCaptureMode capture; /* the thread's earlier mode, if relaxed */
    device_result result;
} device_scope;

/*
 * Has this process used the device? Since CUDA 12, making a device current initialises it, which takes
 * hundreds of MB of its memory. A thread that never chose a device has device 0; restoring device 0 must not
 * initialise it.
 */
static bool is_used(int device) {
    typedef int (*state_fn)(int, unsigned int *, int *);
    void *found = NULL;
    enum cudaDriverEntryPointQueryResult how;
    unsigned int flags;
    int active = 1;
#if CUDART_VERSION >= 12050
    cudaError_t error = cudaGetDriverEntryPointByVersion("cuDevicePrimaryCtxGetState", &found, 12000,
                                                         cudaEnableDefault, &how);
#else
    cudaError_t error =
        cudaGetDriverEntryPoint("cuDevicePrimaryCtxGetState", &found, cudaEnableDefault, &how);
#endif
    if (error != cudaSuccess || how != cudaDriverEntryPointSuccess || !found) {
        cudaGetLastError();
        return true;
    }
    return ((state_fn)found)(device, &flags, &active) != 0 || active;
}

static device_scope scope_enter(int device, device_failure *why) {
    device_scope s = {device, device, false, cudaStreamCaptureModeRelaxed, DEVICE_DONE};
    s.result = failed(why, "cudaGetDevice", cudaGetDevice(&s.before));
    if (s.result == DEVICE_DONE && s.before != device) {
        s.result = failed(why, "cudaSetDevice", cudaSetDevice(device));
    }
    if (s.result == DEVICE_DONE) {
        s.result = failed(why, "cudaThreadExchangeStreamCaptureMode",
                          cudaThreadExchangeStreamCaptureMode(&s.capture));
        s.relaxed = s.result == DEVICE_DONE;
    }
    return s;
}

static device_result scope_leave(const device_scope *s, device_result result) {
    enum cudaStreamCaptureMode capture = s->capture;
    if (s->relaxed) {
        cudaThreadExchangeStreamCaptureMode(&capture);
    }
    if (s->before != s->device && is_used(s->before)) {
        cudaSetDevice(s->before);
    }
    return result;
}

device_result cuda_launch(const cuda_kernel *kernel, const device_queue *queue, uint32_t blocks,
                          uint32_t spans, const void *arguments, device_failure *why) {
    void *all[] = {(void *)arguments};
    char call[sizeof(why->call)];
    device_scope s = scope_enter(queue->device, why);
    if (s.result == DEVICE_DONE) {
        cudaError_t error = cudaLaunchKernel(kernel->function, dim3(blocks, spans), dim3(LAUNCH_THREADS), all,
                                             0, (cudaStream_t)queue->stream);
        if (error != cudaSuccess) {
            snprintf(call, sizeof(call), "launch of %s", kernel->name);
            s.result = failed(why, call, error);
        }
    }
    return scope_leave(&s, s.result);
}

device_result cuda_count(int *devices, device_failure *why) {
    *devices = 0;
    device_result result = failed(why, "cudaGetDeviceCount", cudaGetDeviceCount(devices));
    if (result != DEVICE_DONE) {
        *devices = 0;
    }
    return result;
}

device_result cuda_describe(device_info *about, int device, device_failure *why) {
    struct cudaDeviceProp p;
    memset(about, 0, sizeof(*about));
    device_scope s = scope_enter(device, why);
    device_result result = s.result;
    if (result == DEVICE_DONE) {
        result = failed(why, "cudaGetDeviceProperties", cudaGetDeviceProperties(&p, device));
    }
    if (result == DEVICE_DONE) {
        size_t left = 0, all = 0;
        result = failed(why, "cudaMemGetInfo", cudaMemGetInfo(&left, &all));
        snprintf(about->name, sizeof(about->name), "%.95s", p.name);
        about->memory = all;
        about->memory_free = left;
        about->processors = (uint32_t)p.multiProcessorCount;
        about->major = (uint32_t)p.major;
        about->minor = (uint32_t)p.minor;
    }
    return scope_leave(&s, result);
}

device_result cuda_owner(int *device, const void *address, device_failure *why) {
    struct cudaPointerAttributes a;
    *device = -1;
    device_result result = failed(why, "cudaPointerGetAttributes", cudaPointerGetAttributes(&a, address));
    if (result == DEVICE_DONE && (a.type == cudaMemoryTypeDevice || a.type == cudaMemoryTypeManaged)) {
        *device = a.device;
    }
    return result;
}

/* ---- memory ---- */

device_result cuda_allocate(void **out, int device, size_t bytes, device_failure *why) {
    *out = NULL;
    device_scope s = scope_enter(device, why);
    device_result result = s.result;
    if (result == DEVICE_DONE) {
        result = failed(why, "cudaMalloc", cudaMalloc(out, bytes));
    }
    return scope_leave(&s, result);
}

void cuda_release(int device, void *memory) {
    device_failure why;
    device_scope s = scope_enter(device, &why);
    if (s.result == DEVICE_DONE && memory) {
        failed(&why, "cudaFree", cudaFree(memory));
    }
    scope_leave(&s, DEVICE_DONE);
}

device_result cuda_allocate_pinned(void **out, int device, size_t bytes, device_failure *why) {
    *out = NULL;
    device_scope s = scope_enter(device, why);
    device_result result = s.result;
    if (result == DEVICE_DONE) {
        result = failed(why, "cudaHostAlloc", cudaHostAlloc(out, bytes, cudaHostAllocPortable));
    }
    return scope_leave(&s, result);
}

void cuda_release_pinned(int device, void *memory) {
    device_failure why;
    device_scope s = scope_enter(device, &why);
    if (s.result == DEVICE_DONE && memory) {
        failed(&why, "cudaFreeHost", cudaFreeHost(memory));
    }
    scope_leave(&s, DEVICE_DONE);
}

/* ---- cuBLAS ---- */

static device_result blas_failed(device_failure *why, const char *call, cublasStatus_t status) {
    if (status == CUBLAS_STATUS_SUCCESS) {
        return DEVICE_DONE;
    }
    why->result = status == CUBLAS_STATUS_ALLOC_FAILED ? DEVICE_FULL : DEVICE_FAILED;
    snprintf(why->call, sizeof(why->call), "%s", call);
    snprintf(why->reason, sizeof(why->reason), "%s: %s", cublasGetStatusName(status),
             cublasGetStatusString(status));
    return why->result;
}

/*
 * Uses single precision throughout (pedantic: no TF32), so that sums of integers below 2^24 are exact in any
 * order. cuBLAS stores matrices by columns, so it sees ours transposed: sums' = right' left'.
 */
static device_result multiply(cublasHandle_t blas, const device_product *p, device_failure *why) {
    const float one = 1, zero = 0;
    int rows = (int)p->rows, columns = (int)p->columns, rank = (int)p->rank;
    return blas_failed(why, "cublasSgemm",
                       cublasSgemm(blas, p->right_transposed ? CUBLAS_OP_T : CUBLAS_OP_N,
                                   p->left_transposed ? CUBLAS_OP_T : CUBLAS_OP_N, columns, rows, rank, &one,
                                   p->right, p->right_transposed ? rank : columns, p->left,
                                   p->left_transposed ? rows : rank, &zero, p->sums, columns));
}

/* Runs at the first product of a queue: making a handle takes memory, and waits for the whole device. */
static device_result products_open(device_queue *queue, device_failure *why) {
    cublasHandle_t blas = NULL;
    device_result result = blas_failed(why, "cublasCreate", cublasCreate(&blas));
    if (result != DEVICE_DONE) {
        return why->result = DEVICE_FULL; /* whatever the status says, memory is short */
    }
    if (result == DEVICE_DONE) {
        result = blas_failed(why, "cublasSetStream", cublasSetStream(blas, (cudaStream_t)queue->stream));
    }
    if (result == DEVICE_DONE) {
        result = blas_failed(why, "cublasSetMathMode", cublasSetMathMode(blas, CUBLAS_PEDANTIC_MATH));
    }
    /* A handle that is not set up would use another stream and other arithmetic. */
    if (result == DEVICE_DONE) {
        queue->products = blas;
    } else {
        cublasDestroy(blas);
    }
    return result;
}

/* Makes the queue's device current, and makes the handle if there is none. */
static device_scope products_enter(const device_queue *queue, device_failure *why) {
    device_scope s = scope_enter(queue->device, why);
    if (s.result == DEVICE_DONE && !queue->products) {
        s.result = products_open((device_queue *)queue, why); /* products is a private part of the queue */
    }
    return s;
}

device_result cuda_product(const device_queue *queue, const device_product *product, device_failure *why) {
    device_scope s = products_enter(queue, why);
    if (s.result == DEVICE_DONE) {
        s.result = multiply((cublasHandle_t)queue->products, product, why);
    }
    return scope_leave(&s, s.result);
}

/*
 * Tensor cores support one layout for integers: the summands of both factors are contiguous. The only scalars
 * allowed are 0 and 1.
 */
static device_result multiply_bytes(cublasHandle_t blas, bool *known, const device_byte_product *p,
                                    device_failure *why) {
    const int32_t one = 1, zero = 0;
    int rows = (int)p->rows, columns = (int)p->columns, rank = (int)p->rank;
    cublasStatus_t status = cublasGemmEx(blas, CUBLAS_OP_T, CUBLAS_OP_N, columns, rows, rank, &one, p->right,
                                         CUDA_R_8I, rank, p->left, CUDA_R_8I, rank, &zero, p->sums,
                                         CUDA_R_32I, columns, CUBLAS_COMPUTE_32I, CUBLAS_GEMM_DEFAULT);
    *known = status != CUBLAS_STATUS_NOT_SUPPORTED && status != CUBLAS_STATUS_ARCH_MISMATCH;
    return *known ? blas_failed(why, "cublasGemmEx", status) : DEVICE_DONE;
}

device_result cuda_byte_product(const device_queue *queue, bool *known, const device_byte_product *product,
                                device_failure *why) {
    device_scope s = products_enter(queue, why);
    *known = true;
    if (s.result == DEVICE_DONE) {
        cublasHandle_t blas = (cublasHandle_t)queue->products;
        /* Pedantic mode would exclude fast algorithms. For integers all algorithms are exact. */
        s.result = blas_failed(why, "cublasSetMathMode", cublasSetMathMode(blas, CUBLAS_DEFAULT_MATH));
        if (s.result == DEVICE_DONE) {
            s.result = multiply_bytes(blas, known, product, why);
        }
        device_failure back;
        device_result pedantic =
            blas_failed(&back, "cublasSetMathMode", cublasSetMathMode(blas, CUBLAS_PEDANTIC_MATH));
        if (s.result == DEVICE_DONE && pedantic != DEVICE_DONE) {
            *why = back;
            s.result = pedantic;
        }
    }
    return scope_leave(&s, s.result);
}

/* ---- queues ---- */

device_result cuda_queue_open(device_queue *out, int device, bool background, device_failure *why) {
    int lowest = 0, highest = 0;
    cudaStream_t stream = NULL;
    device_scope s = scope_enter(device, why);
    device_result result = s.result;
    *out = device_queue{device, NULL, NULL, NULL};
    if (result == DEVICE_DONE) {
        result = failed(why, "cudaDeviceGetStreamPriorityRange",
                        cudaDeviceGetStreamPriorityRange(&lowest, &highest));
    }
    if (result == DEVICE_DONE) {
        /* The stream neither waits for the default stream nor makes it wait. */
        result = failed(
            why, "cudaStreamCreateWithPriority",
            cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, background ? lowest : highest));
        out->stream = stream;
    }
    scope_leave(&s, result);
    result = result == DEVICE_DONE ? cuda_event_new(&out->finished, device, why) : result;
    if (result != DEVICE_DONE) {
        cuda_queue_close(out);
        *out = device_queue{device, NULL, NULL, NULL};
    }
    return result;
}

void cuda_queue_close(const device_queue *queue) {
    device_failure why;
    device_scope s = scope_enter(queue->device, &why);
    if (s.result == DEVICE_DONE && queue->products) {
        blas_failed(&why, "cublasDestroy", cublasDestroy((cublasHandle_t)queue->products));
    }
    if (s.result == DEVICE_DONE && queue->stream) {
        failed(&why, "cudaStreamDestroy", cudaStreamDestroy((cudaStream_t)queue->stream));
    }
    scope_leave(&s, DEVICE_DONE);
    cuda_event_free(queue->device, queue->finished);
}

/* Makes `later` wait for the work that is on `earlier` now. */
static device_result one_behind_the_other(int device, cudaStream_t later, cudaStream_t earlier,
                                          device_failure *why) {
    cudaEvent_t event = NULL;
    device_scope s = scope_enter(device, why);
    device_result result = s.result;
    if (result == DEVICE_DONE) {
        result = failed(why, "cudaEventCreate", cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    }
    if (result == DEVICE_DONE) {
        result = failed(why, "cudaEventRecord", cudaEventRecord(event, earlier));
    }
    if (result == DEVICE_DONE) {
        result = failed(why, "cudaStreamWaitEvent", cudaStreamWaitEvent(later, event, 0));
    }
    if (event) {
        cudaEventDestroy(event); /* CUDA frees it once it has passed */
    }
    return scope_leave(&s, result);
}

device_result cuda_queue_after_stream(const device_queue *queue, void *stream, device_failure *why) {
    return one_behind_the_other(queue->device, (cudaStream_t)queue->stream, (cudaStream_t)stream, why);
}

device_result cuda_stream_after_queue(const device_queue *queue, void *stream, device_failure *why) {
    return one_behind_the_other(queue->device, (cudaStream_t)stream, (cudaStream_t)queue->stream, why);
}

/*
 * Waits for the queue's event, so that the thread sleeps. A queue that cuda_queue_open did not make has only a
 * stream.
 */
device_result cuda_finish(const device_queue *queue, device_failure *why) {
    if (queue->finished) {
        device_result result = cuda_event_record(queue->finished, queue, why);
        return result == DEVICE_DONE ? cuda_event_wait(queue->finished, queue->device, why) : result;
    }
    device_scope s = scope_enter(queue->device, why);
    device_result result = s.result;
    if (result == DEVICE_DONE) {
        result = failed(why, "cudaStreamSynchronize", cudaStreamSynchronize((cudaStream_t)queue->stream));
    }
    return scope_leave(&s, result);
}

/* ---- events ---- */

device_result cuda_event_new(void **out, int device, device_failure *why) {
    cudaEvent_t event = NULL;
    device_scope s = scope_enter(device, why);
    device_result result = s.result;
    if (result == DEVICE_DONE) {
        /*
         * A thread that waits for the event sleeps, so that other threads can use its core. By default it would
         * poll while the queue waits for time that the trainer's kernels leave. It may be a trainer's thread, a
         * saver's or a pool's.
         */
        result = failed(why, "cudaEventCreate",
                        cudaEventCreateWithFlags(&event, cudaEventDisableTiming | cudaEventBlockingSync));
    }
    *out = event;
    return scope_leave(&s, result);
}

void cuda_event_free(int device, void *mark) {
    device_failure why;
    device_scope s = scope_enter(device, &why);
    if (s.result == DEVICE_DONE && mark) {
        failed(&why, "cudaEventDestroy", cudaEventDestroy((cudaEvent_t)mark));
    }
    scope_leave(&s, DEVICE_DONE);
}

device_result cuda_event_record(void *mark, const device_queue *queue, device_failure *why) {
    device_scope s = scope_enter(queue->device, why);
    device_result result = s.result;
    if (result == DEVICE_DONE) {
        result =
            failed(why, "cudaEventRecord", cudaEventRecord((cudaEvent_t)mark, (cudaStream_t)queue->stream));
    }
    return scope_leave(&s, result);
}

device_result cuda_stream_wait_event(void *mark, int device, void *stream, device_failure *why) {
    device_scope s = scope_enter(device, why);
    device_result result = s.result;
    if (result == DEVICE_DONE) {
        result = failed(why, "cudaStreamWaitEvent",
                        cudaStreamWaitEvent((cudaStream_t)stream, (cudaEvent_t)mark, 0));
    }
    return scope_leave(&s, result);
}

device_result cuda_event_wait(void *mark, int device, device_failure *why) {
    device_scope s = scope_enter(device, why);
    device_result result = s.result;
    if (result == DEVICE_DONE) {
        result = failed(why, "cudaEventSynchronize", cudaEventSynchronize((cudaEvent_t)mark));
    }
    return scope_leave(&s, result);
}

/* ---- copies and zeros ---- */

device_result cuda_copy(const device_queue *queue, void *to, const void *from, size_t bytes,
                        device_direction direction, device_failure *why) {
    enum cudaMemcpyKind kind = direction == DEVICE_TO_DEVICE ? cudaMemcpyHostToDevice
                               : direction == DEVICE_TO_HOST ? cudaMemcpyDeviceToHost
                                                             : cudaMemcpyDeviceToDevice;
    if (bytes == 0) {
        return DEVICE_DONE;
    }
    device_scope s = scope_enter(queue->device, why);
    device_result result = s.result;
    if (result == DEVICE_DONE) {
        result = failed(why, "cudaMemcpyAsync",
                        cudaMemcpyAsync(to, from, bytes, kind, (cudaStream_t)queue->stream));
    }
    return scope_leave(&s, result);
}

device_result cuda_copy_rows(const device_queue *queue, const device_rows *r, device_failure *why) {
    device_scope s = scope_enter(queue->device, why);
    device_result result = s.result;
    if (result == DEVICE_DONE && r->bytes && r->rows) {
        result =
            failed(why, "cudaMemcpy2DAsync",
                   cudaMemcpy2DAsync(
                       r->to, r->to_stride ? r->to_stride : r->bytes, r->from, r->stride, r->bytes, r->rows,
                       r->direction == DEVICE_TO_HOST ? cudaMemcpyDeviceToHost : cudaMemcpyDeviceToDevice,
                       (cudaStream_t)queue->stream));
    }
    return scope_leave(&s, result);
}

device_result cuda_zero(const device_queue *queue, void *memory, size_t bytes, device_failure *why) {
    device_scope s = scope_enter(queue->device, why);
    device_result result = s.result;
    if (result == DEVICE_DONE && bytes) {
        result =
            failed(why, "cudaMemsetAsync", cudaMemsetAsync(memory, 0, bytes, (cudaStream_t)queue->stream));
    }
    return scope_leave(&s, result);
}
