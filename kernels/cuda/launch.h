/*
 * Makes one source of a kernel both CUDA and C. A kernel is a function of one thread. With nvcc it runs on a
 * device. With any C compiler it runs thread by thread over the same geometry (EMULATED), which tests its
 * arithmetic and indices without a GPU.
 *
 * Threads of a block share memory in phases, with a barrier between two phases. A thread keeps its own struct
 * from one phase to the next, in registers on a device.
 */
#ifndef KERNELS_CUDA_LAUNCH_H
#define KERNELS_CUDA_LAUNCH_H

#include "kernels/device.h"

#define LAUNCH_THREADS 256u      /* per block */
#define LAUNCH_BLOCKS  INT32_MAX /* largest number of blocks */

/* Position of a thread. */
typedef struct place {
    uint32_t block, blocks; /* blocks that share the work of a span */
    uint32_t span;
    uint32_t thread; /* of LAUNCH_THREADS */
} place;

#if defined(__CUDACC__)
#include <cuda_runtime.h>

#define DEVICE_FN    static __device__ __forceinline__
#define DEVICE_CONST static __device__ __constant__ const
#define ALIGNED(n)   __align__(n)
#define UNROLL       _Pragma("unroll")

typedef struct cuda_kernel {
    const char *name;
    const void *function;
} cuda_kernel;

/*
 * Launches LAUNCH_THREADS threads per block; failures of the kernel appear later, at device_backend.finish.
 * It does not use <<<>>>: only cudaGetLastError reports the outcome of <<<>>>, and it also returns errors that
 * the host program caused before (cudaErrorNotReady of an event that it polled).
 */
device_result cuda_launch(const cuda_kernel *kernel, const device_queue *queue, uint32_t blocks,
                          uint32_t spans, const void *arguments, device_failure *why);

static __device__ __forceinline__ place here(void) {
    place at = {blockIdx.x, gridDim.x, blockIdx.y, threadIdx.x};
    return at;
}
static __device__ __forceinline__ void add_u64(uint64_t *to, uint64_t n) {
    atomicAdd((unsigned long long *)to, (unsigned long long)n);
}
/* Returns the earlier value. */
static __device__ __forceinline__ uint64_t count_u64(uint64_t *to, uint64_t n) {
    return atomicAdd((unsigned long long *)to, (unsigned long long)n);
}
static __device__ __forceinline__ void add_u32(uint32_t *to, uint32_t n) {
    atomicAdd(to, n);
}
static __device__ __forceinline__ void or_u32(uint32_t *to, uint32_t bits) {
    atomicOr(to, bits);
}
static __device__ __forceinline__ void raise_u32(uint32_t *to, uint32_t n) {
    atomicMax(to, n);
}
/* Only for numbers that are not negative: their order is that of their bits. */
static __device__ __forceinline__ void raise_double(double *to, double n) {
    atomicMax((unsigned long long *)to, (unsigned long long)__double_as_longlong(n));
}

#define KERNEL(name, arguments)                                                                        \
    static __global__ void __launch_bounds__(256) name##_kernel(const __grid_constant__ arguments a) { \
        const place at = here();                                                                       \
        name(&at, &a);                                                                                 \
    }                                                                                                  \
    LAUNCHER(name, arguments)
#define KERNEL_IN_PHASES(name, arguments, shared, own, phases)                                         \
    static __global__ void __launch_bounds__(256) name##_kernel(const __grid_constant__ arguments a) { \
        __shared__ shared s;                                                                           \
        own o;                                                                                         \
        const place at = here();                                                                       \
        UNROLL for (int phase = 0; phase < (phases); phase++) {                                        \
            if (phase) {                                                                               \
                __syncthreads();                                                                       \
            }                                                                                          \
            name(&at, &a, &s, &o, phase);                                                              \
        }                                                                                              \
    }                                                                                                  \
    LAUNCHER(name, arguments)
#define LAUNCHER(name, arguments)                                                                  \
    static device_result name##_launch(const device_queue *queue, uint32_t blocks, uint32_t spans, \
                                       const arguments *a, device_failure *why) {                  \
        static const cuda_kernel kernel = {#name, (const void *)name##_kernel};                    \
        return cuda_launch(&kernel, queue, blocks, spans, a, why);                                 \
    }

#else /* EMULATED */

#define DEVICE_FN    static inline __attribute__((unused))
#define DEVICE_CONST static const
#define ALIGNED(n)   __attribute__((aligned(n)))
#define UNROLL

static inline void add_u64(uint64_t *to, uint64_t n) {
    *to += n;
}
static inline __attribute__((unused)) uint64_t count_u64(uint64_t *to, uint64_t n) {
    *to += n;
    return *to - n;
}
static inline __attribute__((unused)) void add_u32(uint32_t *to, uint32_t n) {
    *to += n;
}
static inline __attribute__((unused)) void or_u32(uint32_t *to, uint32_t bits) {
    *to |= bits;
}
static inline __attribute__((unused)) void raise_u32(uint32_t *to, uint32_t n) {
    *to = n > *to ? n : *to;
}
static inline __attribute__((unused)) void raise_double(double *to, double n) {
    *to = n > *to ? n : *to;
}

/*
 * The including file defines EMULATED_LAUNCH(queue, name, why) and EMULATED_LANDED(). They run before and
 * after each launch; EMULATED_LAUNCH may fail.
 */

/* Runs blocks and threads from the last to the first, which exposes code that depends on their order. */
extern bool emulated_backwards;
static inline uint32_t emulated_turn(uint32_t i, uint32_t n) {
    return emulated_backwards ? n - 1 - i : i;
}

#define KERNEL(name, arguments)                                                                           \
    static device_result name##_launch(const device_queue *queue, uint32_t blocks, uint32_t spans,        \
                                       const arguments *a, device_failure *why) {                         \
        if (EMULATED_LAUNCH(queue, #name, why) != DEVICE_DONE) {                                          \
            return why->result;                                                                           \
        }                                                                                                 \
        for (uint64_t i = 0, n = (uint64_t)blocks * spans * LAUNCH_THREADS; i < n; i++) {                 \
            uint64_t turn = emulated_backwards ? n - 1 - i : i;                                           \
            uint32_t block = (uint32_t)(turn / LAUNCH_THREADS);                                           \
            const place at = {block % blocks, blocks, block / blocks, (uint32_t)(turn % LAUNCH_THREADS)}; \
            name(&at, a);                                                                                 \
        }                                                                                                 \
        EMULATED_LANDED();                                                                                \
        return DEVICE_DONE;                                                                               \
    }
/* Shared memory and threads' own structs are filled with garbage, as on a device. */
#define KERNEL_IN_PHASES(name, arguments, shared, own, phases)                                     \
    static device_result name##_launch(const device_queue *queue, uint32_t blocks, uint32_t spans, \
                                       const arguments *a, device_failure *why) {                  \
        static _Thread_local shared s;                                                             \
        static _Thread_local own o[LAUNCH_THREADS];                                                \
        if (EMULATED_LAUNCH(queue, #name, why) != DEVICE_DONE) {                                   \
            return why->result;                                                                    \
        }                                                                                          \
        for (uint32_t i = 0; i < blocks * spans; i++) {                                            \
            uint32_t block = emulated_turn(i, blocks * spans);                                     \
            memset(&s, 0x5a, sizeof(s));                                                           \
            memset(o, 0x5a, sizeof(o));                                                            \
            for (uint32_t j = 0; j < (phases)*LAUNCH_THREADS; j++) {                               \
                uint32_t thread = emulated_turn(j % LAUNCH_THREADS, LAUNCH_THREADS);               \
                const place at = {block % blocks, blocks, block / blocks, thread};                 \
                name(&at, a, &s, &o[thread], (int)(j / LAUNCH_THREADS));                           \
            }                                                                                      \
        }                                                                                          \
        EMULATED_LANDED();                                                                         \
        return DEVICE_DONE;                                                                        \
    }

#endif

/* Returns the number of blocks for n threads. */
static inline uint32_t launch_blocks(uint64_t n) {
    uint64_t blocks = (n + LAUNCH_THREADS - 1) / LAUNCH_THREADS;
    return (uint32_t)(blocks < 1 ? 1 : (blocks > LAUNCH_BLOCKS ? LAUNCH_BLOCKS : blocks));
}

#endif
