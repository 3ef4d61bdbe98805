/*
 * A fixed pool of workers that run one function over indices 0 ... count - 1.
 *
 * Idle workers sleep. Workers block all signals except those that a fault raises in the thread itself. They run in the
 * library's floating-point mode (base/float_mode.h), as does the caller while it works; its mode is restored
 * afterwards. So no result depends on the number of threads or on which thread ran an index, unless fn uses `worker`.
 *
 * A pool survives a fork in the parent only: in the child pool_run fails with STATE and pool_destroy only frees.
 */
#ifndef BASE_THREADS_H
#define BASE_THREADS_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/error.h"

typedef struct thread_pool thread_pool;

/*
 * Creates a pool. threads 0: one per core available to the process (its affinity), at most 16. threads 1 starts no
 * thread. Errors: INVALID (more than 1024), NOMEM, IO (the system gives no more threads).
 */
ckd_status pool_create(thread_pool **out, uint32_t threads, ckd_error *err);
uint32_t pool_threads(const thread_pool *pool);
/*
 * Runs fn(context, index, worker) for every index. worker is 0 ... pool_threads - 1; the caller is worker 0. A worker
 * runs one index at a time. Indices start in order. Returns the failing status with the smallest index, with its error;
 * no further indices start after a failure. Calls from several threads are serialised. fn gets an empty error of its
 * own. It must not call pool_run on the same pool (STATE).
 */
typedef ckd_status (*pool_fn)(void *context, size_t index, uint32_t worker, ckd_error *err);
ckd_status pool_run(thread_pool *pool, size_t count, pool_fn fn, void *context, ckd_error *err);
/*
 * Returns the ns of work that all calls of pool_run did beyond their callers' elapsed time: the time of workers inside
 * fn, less the time that callers waited. The work done in an interval is its elapsed time plus the difference of two
 * readings.
 */
int64_t pool_saved_ns(thread_pool *pool);

/*
 * ---- incremental work ----
 *
 * While a pool is attached, workers that have nothing to do for pool_run call help(context). help does a little work
 * and returns whether there may be more. A worker for which it returned false sleeps until pool_wake. help may call
 * pool_wake, but not pool_run (STATE). pool_attach returns false if someone else has the pool, or if it has no workers
 * (also in a forked child). Then the caller does all the work itself.
 */
typedef bool (*pool_help_fn)(void *context);
bool pool_attach(thread_pool *pool, pool_help_fn help, void *context);
/* Tells workers that there is work. Any thread may call it while the pool is attached. */
void pool_wake(thread_pool *pool);
/*
 * Detaches the pool. Returns when no worker is inside help; none calls it afterwards. Only the attaching caller may
 * call it.
 */
void pool_detach(thread_pool *pool);
/* Ends the workers. No pool_run may be running, and the pool must not be attached. Accepts NULL. */
void pool_destroy(thread_pool *pool);

/*
 * ---- single threads ----
 *
 * Starts a thread that blocks the same signals as the pool's workers. Errors: IO (the system gives no more threads).
 */
ckd_status thread_start(pthread_t *out, void *(*main)(void *), void *context, ckd_error *err);
/*
 * Sets SCHED_BATCH for the calling thread and the threads that it starts. When they wake, they do not preempt a thread
 * that is computing; their share of the cores stays the same. Nothing changes if the thread's policy is not
 * SCHED_OTHER, or if the system refuses.
 */
void thread_set_batch(void);
/* As thread_set_batch, and also raises the nice value by 1 ... 19. Nothing changes if the system refuses. */
void thread_lower_priority(int nice);

#endif
