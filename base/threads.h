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
#include <stdbool.h>
#include <stdint.h>

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
/*
 * By how much pool_run has added work to what its callers' own clocks show: nanoseconds that workers were inside fn, less those that callers waited for
 * them; of all calls so far. The difference of two readings, and the time between them, is the work that went on in between.
 */
int64_t pool_gained_ns(thread_pool *pool);

/*
 * ---- work that comes bit by bit ----
 *
 * While a pool is lent, workers that pool_run has nothing for call help(context), which does a bit of work and says whether there may be more. Those who
 * heard that there is none sleep until pool_wake. help may call pool_wake, not pool_run (STATE). false: the pool is lent to another, or has
 * no workers (in a forked child, too): the caller does all of it himself.
 */
typedef bool (*pool_help_fn)(void *context);
bool pool_attach(thread_pool *pool, pool_help_fn help, void *context);
/* There is something to help with. From any thread, while it is lent. */
void pool_wake(thread_pool *pool);
/* Returns when no worker is inside help; from then on none calls it. By who borrowed it. */
void pool_take_back(thread_pool *pool);
/* Ends the workers. No pool_run may be under way, and nothing lent. Accepts NULL. */
void pool_destroy(thread_pool *pool);

/*
 * ---- single threads ----
 *
 * Starts one that blocks the signals that a pool's workers block. Errors: IO (the system gives no more threads).
 */
ckd_status thread_start(pthread_t *out, void *(*main)(void *), void *context, ckd_error *err);
/*
 * The calling thread, and those that it starts, take no core from who computes there at the moment that they are woken (SCHED_BATCH); their share of the cores stays the same. Nothing changes where another
 * policy than the usual one has been chosen, or the system refuses.
 */
void thread_interrupts_nobody(void);
/* They do so, and give way to others: nice, 1 ... 19 more than now. Where the system refuses, nothing changes. */
void thread_lower(int nice);

#endif
