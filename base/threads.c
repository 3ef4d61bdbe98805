/*
 * The pool. Workers sleep on a condition until a job has indices left. They take one index at a time under the mutex,
 * then sleep again. An index is a block of a tensor, which takes milliseconds, so a lock per index does not matter.
 *
 * The returned error does not depend on timing. Indices are handed out in order, and every index that is handed out
 * runs. Let i be the smallest index that fails. No index before i stops the job, and a later one can stop it only after
 * i was handed out. So i always runs, and the error of the smallest index is kept.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "base/threads.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/file.h"
#include "base/float_mode.h"

#define THREADS_AUTO_MAX 16
#define THREADS_MAX      1024
#define CPUS_MAX         (1u << 16)

typedef struct worker {
    struct thread_pool *pool;
    uint32_t number;
    pthread_t thread;
    uint64_t seen_turn; /* equals pool->calls: help has no work for this worker */
} worker;

struct thread_pool {
    pid_t process;
    pthread_mutex_t turn; /* held for a whole pool_run; mutex guards everything else */
    pthread_mutex_t mutex;
    pthread_cond_t work; /* signals that indices are left, or that the pool ends */
    pthread_cond_t done; /* signals that nothing is running, or that nobody helps */
    bool ending, running;
    pthread_t caller; /* valid while running */
    /* the job */
    pool_fn fn;
    void *context;
    size_t next, count;  /* indices from next on are not handed out yet */
    uint32_t busy;       /* workers inside fn */
    size_t failed_index; /* valid if status is not CKD_OK */
    ckd_status status;
    ckd_error error;
    int64_t gained_ns;
    /* incremental work, which workers do while no indices are left; NULL: none */
    pool_help_fn help;
    void *help_context;
    uint64_t calls;             /* calls of pool_wake */
    uint32_t helping, sleeping; /* numbers of workers */
    uint32_t threads, started;
    worker workers[]; /* threads - 1 workers, numbered from 1 */
};

/* Counts the cores that this process may run on. */
static uint32_t core_count(void) {
    for (unsigned cpus = 1024; cpus <= CPUS_MAX; cpus *= 2) {
        cpu_set_t *set = CPU_ALLOC(cpus);
        if (set == NULL) {
            return 1;
        }
        size_t size = CPU_ALLOC_SIZE(cpus);
        int failed = sched_getaffinity(0, size, set) != 0 ? errno : 0;
        int count = failed ? 1 : CPU_COUNT_S(size, set);
        CPU_FREE(set);
        if (failed != EINVAL) { /* EINVAL: the kernel's set is larger */
            return count > 0 ? (uint32_t)count : 1;
        }
    }
    return 1;
}

static void keep_failure(thread_pool *pool, size_t index, ckd_status status, const ckd_error *error) {
    pool->next = pool->count; /* stops handing out indices */
    if (pool->status != CKD_OK && pool->failed_index < index) {
        return;
    }
    pool->failed_index = index;
    pool->status = status;
    pool->error = *error;
    if (error->status != status) { /* fn did not fill in the error */
        err_set(&pool->error, status, "item %zu of parallel work failed with status %d", index, (int)status);
    }
}

/* Runs indices until none is left. The caller holds the mutex, also on return. */
static void run_indices(thread_pool *pool, uint32_t number) {
    while (pool->next < pool->count) {
        size_t index = pool->next++;
        pool->busy++;
        pthread_mutex_unlock(&pool->mutex);
        ckd_error error = {.offset = CKD_NO_OFFSET};
        uint64_t begun = number > 0 ? clock_monotonic_ns() : 0;
        ckd_status status = pool->fn(pool->context, index, number, &error);
        uint64_t worked = number > 0 ? clock_monotonic_ns() - begun : 0;
        pthread_mutex_lock(&pool->mutex);
        pool->busy--;
        pool->gained_ns += (int64_t)worked;
        if (status != CKD_OK) {
            keep_failure(pool, index, status, &error);
        }
    }
    if (pool->busy == 0) {
        pthread_cond_broadcast(&pool->done);
    }
}

/* Calls help once. The caller holds the mutex, also on return. A pool_wake during the call is not missed. */
static void help_once(thread_pool *pool, worker *w) {
    w->seen_turn = pool->calls;
    pool_help_fn help = pool->help;
    void *context = pool->help_context;
    pool->helping++;
    pthread_mutex_unlock(&pool->mutex);
    bool more = help(context);
    pthread_mutex_lock(&pool->mutex);
    pool->helping--;
    w->seen_turn -= more && w->seen_turn == pool->calls;
    if (pool->helping == 0) {
        pthread_cond_broadcast(&pool->done);
    }
}

static void *worker_main(void *argument) {
    worker *w = argument;
    thread_pool *pool = w->pool;
    /* a new thread inherits the mode of its creator, which may round or flush differently */
    float_mode_enter();
    pthread_mutex_lock(&pool->mutex);
    while (!pool->ending) {
        if (pool->next < pool->count) {
            run_indices(pool, w->number);
        } else if (pool->help && w->seen_turn != pool->calls) {
            help_once(pool, w);
        } else {
            pool->sleeping++;
            pthread_cond_wait(&pool->work, &pool->mutex);
            pool->sleeping--;
        }
    }
    pthread_mutex_unlock(&pool->mutex);
    return NULL;
}

/*
 * Signals sent to the process are for the host program's threads. Signals that a thread raises by its own fault stay
 * unblocked: if blocked, they would kill the process before its handler (such as Python's faulthandler) runs.
 */
static void block_signals(sigset_t *before) {
    sigset_t all;
    sigfillset(&all);
    sigdelset(&all, SIGSEGV);
    sigdelset(&all, SIGBUS);
    sigdelset(&all, SIGFPE);
    sigdelset(&all, SIGILL);
    sigdelset(&all, SIGTRAP);
    sigdelset(&all, SIGSYS);
    sigdelset(&all, SIGABRT);
    pthread_sigmask(SIG_SETMASK, &all, before);
}

static int start_workers(thread_pool *pool) {
    sigset_t before;
    int errnum = 0;
    block_signals(&before);
    while (errnum == 0 && pool->started + 1 < pool->threads) {
        worker *w = &pool->workers[pool->started];
        *w = (worker){.pool = pool, .number = pool->started + 1};
        errnum = pthread_create(&w->thread, NULL, worker_main, w);
        pool->started += errnum == 0;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return errnum;
}

static int init_locks(thread_pool *pool) {
    int errnum = pthread_mutex_init(&pool->turn, NULL);
    errnum = errnum != 0 ? errnum : pthread_mutex_init(&pool->mutex, NULL);
    errnum = errnum != 0 ? errnum : pthread_cond_init(&pool->work, NULL);
    return errnum != 0 ? errnum : pthread_cond_init(&pool->done, NULL);
}

ckd_status pool_create(thread_pool **out, uint32_t threads, ckd_error *err) {
    *out = NULL;
    if (threads == 0) {
        uint32_t cores = core_count();
        threads = cores < THREADS_AUTO_MAX ? cores : THREADS_AUTO_MAX;
    } else if (threads > THREADS_MAX) {
        return err_set(err, CKD_E_INVALID, "%u threads are too many: at most %d", (unsigned)threads,
                       THREADS_MAX);
    }
    size_t size = sizeof(thread_pool) + (threads - 1) * sizeof(worker);
    thread_pool *pool = calloc(1, size);
    if (pool == NULL) {
        return err_nomem(err, size, "a thread pool");
    }
    pool->process = getpid();
    pool->threads = threads;
    int errnum = init_locks(pool);
    if (errnum != 0) { /* never on Linux */
        free(pool);
        return err_sys(err, errnum, NULL, "cannot make a mutex");
    }
    errnum = start_workers(pool);
    if (errnum != 0) {
        uint32_t started = pool->started;
        pool_destroy(pool);
        return err_sys(err, errnum, NULL, "cannot start thread %u of %u", (unsigned)started + 1,
                       (unsigned)threads - 1);
    }
    *out = pool;
    return CKD_OK;
}

uint32_t pool_threads(const thread_pool *pool) {
    return pool->threads;
}

/* Is this thread inside fn of this pool? Then waiting for its turn would be a deadlock. */
static bool inside_own_job(thread_pool *pool) {
    pthread_t self = pthread_self();
    pthread_mutex_lock(&pool->mutex);
    bool inside = pool->running && pthread_equal(pool->caller, self);
    for (uint32_t i = 0; i < pool->started && !inside; i++) {
        inside = pthread_equal(pool->workers[i].thread, self);
    }
    pthread_mutex_unlock(&pool->mutex);
    return inside;
}

static void wake_workers(thread_pool *pool) {
    size_t useful = pool->count - 1; /* the caller takes one index itself */
    for (uint32_t i = 0; i < pool->started && i < useful; i++) {
        pthread_cond_signal(&pool->work);
    }
}

/* The caller holds pool->turn. Fills *error unless it returns CKD_OK. */
static ckd_status run_job(thread_pool *pool, size_t count, pool_fn fn, void *context, ckd_error *error) {
    pthread_mutex_lock(&pool->mutex);
    pool->fn = fn;
    pool->context = context;
    pool->next = 0;
    pool->count = count;
    pool->status = CKD_OK;
    pool->running = true;
    pool->caller = pthread_self();
    wake_workers(pool);
    run_indices(pool, 0);
    if (pool->busy > 0) {
        uint64_t begun = clock_monotonic_ns();
        while (pool->busy > 0) {
            pthread_cond_wait(&pool->done, &pool->mutex);
        }
        pool->gained_ns -= (int64_t)(clock_monotonic_ns() - begun);
    }
    pool->running = false;
    pool->next = pool->count = 0;
    ckd_status status = pool->status;
    if (status != CKD_OK) {
        *error = pool->error;
    }
    pthread_mutex_unlock(&pool->mutex);
    return status;
}

ckd_status pool_run(thread_pool *pool, size_t count, pool_fn fn, void *context, ckd_error *err) {
    if (count == 0) {
        return CKD_OK;
    }
    if (pool->process != getpid()) {
        return err_set(err, CKD_E_STATE,
                       "threads do not survive a fork: open the store again in the child process");
    }
    if (inside_own_job(pool)) {
        return err_set(err, CKD_E_STATE, "a job in a thread pool cannot submit work to the same pool");
    }
    ckd_error error;
    pthread_mutex_lock(&pool->turn);
    /* same mode as the workers: results must not depend on who runs an index */
    float_mode callers = float_mode_enter();
    ckd_status status = run_job(pool, count, fn, context, &error);
    float_mode_leave(callers);
    pthread_mutex_unlock(&pool->turn);
    if (status != CKD_OK && err != NULL) {
        *err = error;
    }
    return status;
}

int64_t pool_saved_ns(thread_pool *pool) {
    pthread_mutex_lock(&pool->mutex);
    int64_t gained = pool->gained_ns;
    pthread_mutex_unlock(&pool->mutex);
    return gained;
}

bool pool_attach(thread_pool *pool, pool_help_fn help, void *context) {
    if (pool->process != getpid()) {
        return false;
    }
    pthread_mutex_lock(&pool->mutex);
    bool free_now = !pool->help && pool->started > 0;
    if (free_now) {
        pool->help = help;
        pool->help_context = context;
    }
    pthread_mutex_unlock(&pool->mutex);
    return free_now;
}

void pool_wake(thread_pool *pool) {
    pthread_mutex_lock(&pool->mutex);
    pool->calls++;
    if (pool->sleeping > 0) {
        pthread_cond_signal(&pool->work);
    }
    pthread_mutex_unlock(&pool->mutex);
}

void pool_detach(thread_pool *pool) {
    if (pool->process != getpid()) {
        return;
    }
    pthread_mutex_lock(&pool->mutex);
    pool->help = NULL;
    while (pool->helping > 0) {
        pthread_cond_wait(&pool->done, &pool->mutex);
    }
    pthread_mutex_unlock(&pool->mutex);
}

void pool_destroy(thread_pool *pool) {
    if (pool == NULL) {
        return;
    }
    if (pool->process == getpid()) {
        pthread_mutex_lock(&pool->mutex);
        pool->ending = true;
        pthread_cond_broadcast(&pool->work);
        pthread_mutex_unlock(&pool->mutex);
        for (uint32_t i = 0; i < pool->started; i++) {
            pthread_join(pool->workers[i].thread, NULL);
        }
        pthread_cond_destroy(&pool->done);
        pthread_cond_destroy(&pool->work);
        pthread_mutex_destroy(&pool->mutex);
        pthread_mutex_destroy(&pool->turn);
    }
    free(pool);
}

ckd_status thread_start(pthread_t *out, void *(*main)(void *), void *context, ckd_error *err) {
    sigset_t before;
    block_signals(&before);
    int errnum = pthread_create(out, NULL, main, context);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return errnum ? err_sys(err, errnum, NULL, "cannot start a thread") : CKD_OK;
}

void thread_set_batch(void) {
    int policy;
    struct sched_param param;
    if (pthread_getschedparam(pthread_self(), &policy, &param) == 0 && policy == SCHED_OTHER) {
        (void)pthread_setschedparam(pthread_self(), SCHED_BATCH, &param);
    }
}

void thread_lower_priority(int nice) {
    thread_set_batch();
    id_t self = (id_t)syscall(SYS_gettid); /* on Linux priorities belong to threads */
    errno = 0;
    int now = getpriority(PRIO_PROCESS, self);
    if (errno == 0) {
        (void)setpriority(PRIO_PROCESS, self, now + nice);
    }
}
