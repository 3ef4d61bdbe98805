/*
 * A fixed pool of workers that run the same function over indices 0 ... count - 1.
 *
 * Workers sleep when there is nothing to do, block all signals but those that a fault raises in the thread itself, and
 * run in the library's floating-point mode (base/float_mode.h), the caller's own turn
 * included; his mode is restored afterwards. Thus no result depends on who ran an index or on how many threads
 * there are, as long as fn lets none depend on `worker`.
 *
 * A pool survives a fork in the parent only: in the child pool_run fails with STATE and pool_destroy only frees.
 */
#ifndef BASE_THREADS_H
#define BASE_THREADS_H

#include <pthread.h>

#include "base/error.h"

typedef struct thread_pool thread_pool;

/*
 * threads 0: one per core available to the process (its affinity), at most 16. threads 1 starts no thread. Errors:
 * INVALID (more than 1024), NOMEM, IO (the system gives no more threads).
 */
ckd_status pool_create(thread_pool **out, uint32_t threads, ckd_error *err);
uint32_t pool_threads(const thread_pool *pool);
/*
 * Runs fn(context, index, worker) for every index, worker in 0 ... pool_threads - 1, each worker one index at a time;
 * the caller is worker 0. Indices start in order. The first status (by index) that is not CKD_OK is returned with its
 * error; the remaining indices are not started then. Calls from several threads are serialised. fn is given an empty
 * error of its own; it must not call pool_run on the same pool (STATE).
 */
typedef ckd_status (*pool_fn)(void *context, size_t index, uint32_t worker, ckd_error *err);
ckd_status pool_run(thread_pool *pool, size_t count, pool_fn fn, void *context, ckd_error *err);
/* Ends the workers. No pool_run may be under way. Accepts NULL. */
void pool_destroy(thread_pool *pool);

/*
 * ---- single threads ----
 *
 * Starts one that blocks the signals that a pool's workers block. Errors: IO (the system gives no more threads).
 */
ckd_status thread_start(pthread_t *out, void *(*main)(void *), void *context, ckd_error *err);
/* The calling thread, and those that it starts, give way to others: nice, 1 ... 19 more than now. Where the system refuses, nothing changes. */
void thread_lower(int nice);

#endif
