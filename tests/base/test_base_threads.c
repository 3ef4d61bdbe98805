/*
 * base/threads: every index runs once, results do not depend on the number of threads, and the pool does not
 * disturb its process.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <dirent.h>
#include <errno.h>
#include <fenv.h>
#include <float.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "base/threads.h"

#define MOST_THREADS 16
#define MOST_INDICES 2000

static thread_pool *new_pool(uint32_t threads) {
    thread_pool *pool;
    ckd_error err;
    assert_int_equal(pool_create(&pool, threads, &err), CKD_OK);
    assert_int_equal(pool_threads(pool), threads);
    return pool;
}

static int child_status(pid_t child) {
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + status;
}

/* ---- every index once ---- */

typedef struct tally {
    uint32_t threads;
    pthread_t caller;
    uint8_t runs[MOST_INDICES];
    size_t by_worker[MOST_THREADS]; /* not atomic: one worker runs one index at a time */
    atomic_size_t begun;
    atomic_int mistakes;
} tally;

static ckd_status count_index(void *context, size_t index, uint32_t worker, ckd_error *err) {
    tally *t = context;
    size_t begun = atomic_fetch_add(&t->begun, 1);
    /* Indices are handed out in order. All earlier ones have begun, except those that are just starting. */
    bool wrong = worker >= t->threads || begun + t->threads - 1 < index || err->message[0] != '\0' ||
                 (worker == 0) != (pthread_equal(pthread_self(), t->caller) != 0);
    if (wrong) {
        atomic_fetch_add(&t->mistakes, 1);
        return CKD_OK;
    }
    t->runs[index]++;
    t->by_worker[worker]++;
    return CKD_OK;
}

static void test_every_index_once(void **state) {
    (void)state;
    static const uint32_t threads[] = {1, 2, 3, 8, MOST_THREADS};
    static const size_t counts[] = {0, 1, 2, 3, 7, 16, 17, MOST_INDICES};
    for (size_t p = 0; p < sizeof(threads) / sizeof(*threads); p++) {
        thread_pool *pool = new_pool(threads[p]);
        for (size_t c = 0; c < 5 * sizeof(counts) / sizeof(*counts); c++) {
            size_t count = counts[c % (sizeof(counts) / sizeof(*counts))], sum = 0;
            tally t = {.threads = threads[p], .caller = pthread_self()};
            ckd_error err, before;
            memset(&err, 'Z', sizeof(err));
            before = err;
            assert_int_equal(pool_run(pool, count, count_index, &t, &err), CKD_OK);
            assert_memory_equal(&err, &before, sizeof(err)); /* written only on failure */
            assert_int_equal(t.mistakes, 0);
            for (size_t i = 0; i < MOST_INDICES; i++) {
                assert_int_equal(t.runs[i], i < count ? 1 : 0);
            }
            for (size_t w = 0; w < MOST_THREADS; w++) {
                sum += t.by_worker[w];
            }
            assert_int_equal(sum, count);
        }
        pool_destroy(pool);
    }
    pool_destroy(NULL);
}

/* ---- failures ---- */

typedef struct failing {
    size_t first; /* all indices from here on fail */
    size_t late;  /* this one fails, too, but only after `first` did; SIZE_MAX: none */
    atomic_size_t calls;
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    bool first_failed;
} failing;

static ckd_status fail_some(void *context, size_t index, uint32_t worker, ckd_error *err) {
    (void)worker;
    failing *f = context;
    atomic_fetch_add(&f->calls, 1);
    if (index < f->first && index != f->late) {
        return CKD_OK;
    }
    pthread_mutex_lock(&f->mutex);
    if (index == f->first) {
        f->first_failed = true;
        pthread_cond_broadcast(&f->changed);
    }
    while (index == f->late && !f->first_failed) {
        pthread_cond_wait(&f->changed, &f->mutex);
    }
    pthread_mutex_unlock(&f->mutex);
    err_corrupt(err, "data/c", index, "index %zu", index);
    return err_in_tensor(err, CKD_E_CORRUPT, "h.0.w");
}

static failing new_failing(size_t first, size_t late) {
    return (failing){.first = first,
                     .late = late,
                     .mutex = PTHREAD_MUTEX_INITIALIZER,
                     .changed = PTHREAD_COND_INITIALIZER};
}

static void test_first_failure_by_index(void **state) {
    (void)state;
    for (uint32_t threads = 1; threads <= 8; threads++) {
        thread_pool *pool = new_pool(threads);
        for (size_t first = 0; first < 300; first += 7) {
            failing f = new_failing(first, SIZE_MAX);
            ckd_error err;
            char want[32];
            snprintf(want, sizeof(want), "index %zu", first);
            assert_int_equal(pool_run(pool, (size_t)1 << 40, fail_some, &f, &err), CKD_E_CORRUPT);
            assert_int_equal(err.status, CKD_E_CORRUPT);
            assert_string_equal(err.message, want);
            assert_string_equal(err.file, "data/c");
            assert_string_equal(err.tensor, "h.0.w");
            assert_int_equal(err.offset, first);
            /* The rest was not started. Each worker ran at most one failing index. */
            assert_in_range(f.calls, first + 1, first + threads);
            f.calls = 0;
            assert_int_equal(pool_run(pool, (size_t)1 << 40, fail_some, &f, NULL), CKD_E_CORRUPT);
            assert_in_range(f.calls, first + 1, first + threads);
        }
        /* The pool can be used again. */
        tally t = {.threads = threads, .caller = pthread_self()};
        assert_int_equal(pool_run(pool, 100, count_index, &t, NULL), CKD_OK);
        assert_int_equal(t.begun, 100);
        pool_destroy(pool);
    }
}

/* A smaller index that fails after a larger one is the one that is reported. */
static void test_late_failure_of_a_smaller_index(void **state) {
    (void)state;
    thread_pool *pool = new_pool(2);
    for (size_t late = 0; late < 20; late++) {
        failing f = new_failing(late + 1 + late % 5, late);
        ckd_error err;
        assert_int_equal(pool_run(pool, 100, fail_some, &f, &err), CKD_E_CORRUPT);
        assert_int_equal(err.offset, late);
        assert_true(f.first_failed);
    }
    pool_destroy(pool);
}

static ckd_status fail_silently(void *context, size_t index, uint32_t worker, ckd_error *err) {
    (void)context, (void)worker, (void)err;
    return index == 3 ? CKD_E_MISMATCH : CKD_OK;
}

static void test_failure_without_a_message(void **state) {
    (void)state;
    for (uint32_t threads = 1; threads <= 3; threads++) {
        thread_pool *pool = new_pool(threads);
        ckd_error err;
        assert_int_equal(pool_run(pool, 9, fail_silently, NULL, &err), CKD_E_MISMATCH);
        assert_int_equal(err.status, CKD_E_MISMATCH);
        assert_non_null(strstr(err.message, "item 3 "));
        pool_destroy(pool);
    }
}

/* ---- callers ---- */

typedef struct shared_job {
    thread_pool *pool;
    uint64_t *busy; /* not atomic: jobs do not overlap, and worker w owns busy[w] */
} shared_job;

static ckd_status touch_own(void *context, size_t index, uint32_t worker, ckd_error *err) {
    (void)err, (void)index;
    shared_job *job = context;
    job->busy[worker]++;
    return CKD_OK;
}

static void *run_often(void *argument) {
    shared_job *job = argument;
    for (int i = 0; i < 200; i++) {
        if (pool_run(job->pool, 20, touch_own, job, NULL) != CKD_OK) {
            return argument;
        }
    }
    return NULL;
}

static void test_calls_are_serialised(void **state) {
    (void)state;
    uint64_t busy[3] = {0};
    shared_job job = {.pool = new_pool(3), .busy = busy};
    pthread_t callers[4];
    for (size_t i = 0; i < 4; i++) {
        assert_int_equal(pthread_create(&callers[i], NULL, run_often, &job), 0);
    }
    for (size_t i = 0; i < 4; i++) {
        void *failed;
        assert_int_equal(pthread_join(callers[i], &failed), 0);
        assert_null(failed);
    }
    assert_int_equal(busy[0] + busy[1] + busy[2], 4 * 200 * 20);
    pool_destroy(job.pool);
}

typedef struct nested {
    thread_pool *own, *other;
    pthread_barrier_t all;
    atomic_int refused, ran;
} nested;

static ckd_status do_nothing(void *context, size_t index, uint32_t worker, ckd_error *err) {
    (void)context, (void)index, (void)worker, (void)err;
    return CKD_OK;
}

static ckd_status run_nested(void *context, size_t index, uint32_t worker, ckd_error *err) {
    (void)index, (void)worker;
    nested *n = context;
    pthread_barrier_wait(&n->all); /* every worker takes part */
    if (pool_run(n->own, 5, do_nothing, NULL, err) == CKD_E_STATE && err->status == CKD_E_STATE) {
        atomic_fetch_add(&n->refused, 1);
    }
    if (pool_run(n->other, 5, do_nothing, NULL, err) == CKD_OK) {
        atomic_fetch_add(&n->ran, 1);
    }
    return CKD_OK;
}

static void test_nested_calls(void **state) {
    (void)state;
    nested n = {.own = new_pool(4), .other = new_pool(2)};
    assert_int_equal(pthread_barrier_init(&n.all, NULL, 4), 0);
    assert_int_equal(pool_run(n.own, 4, run_nested, &n, NULL), CKD_OK);
    assert_int_equal(n.refused, 4);
    assert_int_equal(n.ran, 4);
    pthread_barrier_destroy(&n.all);
    pool_destroy(n.own);
    pool_destroy(n.other);
}

/* ---- signals, floating-point mode, idle threads ---- */

typedef struct manners {
    pthread_barrier_t all;
    bool signals_ok[MOST_THREADS], floats_ok[MOST_THREADS];
    pid_t tid[MOST_THREADS];
} manners;

static bool floats_are_default(void) {
    volatile float small = FLT_MIN, tenth = 0.1f, one = 1.0f, ulp = FLT_EPSILON / 2;
    volatile float denormal = small * tenth, again = denormal * 2.0f, sum = one + ulp;
    bool nearest = sum == 1.0f && one + 1.5f * ulp != one;
    return nearest && denormal != 0.0f && again != 0.0f;
}

static ckd_status look_around(void *context, size_t index, uint32_t worker, ckd_error *err) {
    (void)index, (void)err;
    manners *m = context;
    static const int meant_for_the_host[] = {SIGINT,  SIGTERM, SIGHUP,  SIGALRM, SIGCHLD, SIGUSR1,
                                             SIGUSR2, SIGPIPE, SIGQUIT, SIGCONT, SIGPROF, SIGWINCH};
    static const int own_fault[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
    sigset_t mask;
    pthread_sigmask(SIG_SETMASK, NULL, &mask);
    bool ok = true;
    for (size_t i = 0; i < sizeof(meant_for_the_host) / sizeof(*meant_for_the_host); i++) {
        ok = ok && sigismember(&mask, meant_for_the_host[i]) == (worker != 0);
    }
    for (size_t i = 0; i < sizeof(own_fault) / sizeof(*own_fault); i++) {
        ok = ok && sigismember(&mask, own_fault[i]) == 0;
    }
    m->signals_ok[worker] = ok;
    m->floats_ok[worker] = floats_are_default();
    m->tid[worker] = (pid_t)syscall(SYS_gettid);
    pthread_barrier_wait(&m->all);
    return CKD_OK;
}

static void test_signals_and_floats(void **state) {
    (void)state;
    sigset_t before, after;
    assert_int_equal(fesetround(FE_UPWARD), 0);
#if defined(__x86_64__)
    unsigned callers_csr = _mm_getcsr() | 0x8040; /* flush denormals to zero, and read them as zero */
    _mm_setcsr(callers_csr);
#endif
    pthread_sigmask(SIG_SETMASK, NULL, &before);
    thread_pool *pool = new_pool(4);
    manners m = {0};
    assert_int_equal(pthread_barrier_init(&m.all, NULL, 4), 0);
    assert_int_equal(pool_run(pool, 4, look_around, &m, NULL), CKD_OK);
    pthread_barrier_destroy(&m.all);
    int callers_round = fegetround();
#if defined(__x86_64__)
    unsigned csr = _mm_getcsr();
    _mm_setcsr(csr & ~0x8040u);
    assert_int_equal(csr & ~0x3fu, callers_csr & ~0x3fu); /* except the flags of exceptions */
#endif
    fesetround(FE_TONEAREST);
    assert_int_equal(callers_round, FE_UPWARD);
    pthread_sigmask(SIG_SETMASK, NULL, &after);
    for (int s = 1; s < SIGRTMAX; s++) {
        assert_int_equal(sigismember(&before, s), sigismember(&after, s));
    }
    for (size_t w = 0; w < 4; w++) {
        assert_true(m.signals_ok[w]);
        assert_true(m.floats_ok[w]);
    }
    pool_destroy(pool);
}

/* Returns 'S' if the thread sleeps, 'R' if it runs, 0 if unknown. */
static char thread_state(pid_t tid) {
    char path[64], text[256] = "";
    snprintf(path, sizeof(path), "/proc/self/task/%d/stat", (int)tid);
    FILE *file = fopen(path, "r");
    if (file == NULL) {
        return 0;
    }
    size_t size = fread(text, 1, sizeof(text) - 1, file);
    fclose(file);
    text[size] = '\0';
    const char *end = strrchr(text, ')');
    return end != NULL && end[1] == ' ' ? end[2] : 0;
}

static void test_idle_workers_sleep(void **state) {
    (void)state;
    thread_pool *pool = new_pool(4);
    manners m = {0};
    assert_int_equal(pthread_barrier_init(&m.all, NULL, 4), 0);
    assert_int_equal(pool_run(pool, 4, look_around, &m, NULL), CKD_OK);
    pthread_barrier_destroy(&m.all);
    int asleep = 0, looks = 0;
    for (; looks < 20000 && asleep < 20; looks++) { /* a spinning thread is never asleep 20 times in a row */
        usleep(500);
        bool all = true;
        for (size_t w = 1; w < 4; w++) {
            all = all && thread_state(m.tid[w]) == 'S';
        }
        asleep = all ? asleep + 1 : 0;
    }
    assert_int_equal(asleep, 20);
    pool_destroy(pool);
}

/* ---- number of threads ---- */

static void test_thread_count(void **state) {
    (void)state;
    cpu_set_t all;
    CPU_ZERO(&all);
    assert_int_equal(sched_getaffinity(0, sizeof(all), &all), 0);
    int cores = CPU_COUNT(&all), want = cores < 16 ? cores : 16;
    thread_pool *pool;
    ckd_error err;
    assert_int_equal(pool_create(&pool, 0, &err), CKD_OK);
    assert_int_equal(pool_threads(pool), want);
    pool_destroy(pool);

    pid_t child = fork();
    if (child == 0) { /* runs only on its last core */
        int last = CPU_SETSIZE - 1;
        while (!CPU_ISSET(last, &all)) {
            last--;
        }
        cpu_set_t one;
        CPU_ZERO(&one);
        CPU_SET(last, &one);
        if (sched_setaffinity(0, sizeof(one), &one) != 0 || pool_create(&pool, 0, NULL) != CKD_OK) {
            _exit(200);
        }
        int count = (int)pool_threads(pool);
        pool_destroy(pool);
        _exit(count);
    }
    assert_int_equal(child_status(child), 1);

    pool = (thread_pool *)&err;
    assert_int_equal(pool_create(&pool, 1025, &err), CKD_E_INVALID);
    assert_null(pool);
    assert_int_equal(pool_create(&pool, UINT32_MAX, NULL), CKD_E_INVALID);
    for (int i = 0; i < 20; i++) {
        pool_destroy(new_pool((uint32_t)(1 + 7 * i % 33)));
    }
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED 1
#else
#define SANITIZED 0
#endif

static size_t thread_count(void) {
    size_t count = 0;
    DIR *tasks = opendir("/proc/self/task");
    while (tasks != NULL && readdir(tasks) != NULL) {
        count++;
    }
    closedir(tasks);
    return count - 2;
}

/*
 * There is too little address space for all stacks. The threads that did start are ended, and nothing is
 * left.
 */
static void test_threads_that_cannot_start(void **state) {
    (void)state;
    if (SANITIZED) {
        print_message("SKIP: sanitizers need the address space that this test takes away\n");
        skip();
    }
    pid_t child = fork();
    if (child == 0) {
        ckd_error err;
        thread_pool *pool = (thread_pool *)&err;
        struct rlimit little = {.rlim_cur = (rlim_t)200 << 20, .rlim_max = (rlim_t)200 << 20};
        if (setrlimit(RLIMIT_AS, &little) != 0) {
            _exit(2);
        }
        ckd_status status = pool_create(&pool, 1000, &err);
        if (status == CKD_OK || pool != NULL || err.status != status || err.sys_errno != EAGAIN) {
            _exit(3);
        }
        static const char before[] = "cannot start thread ";
        if (strncmp(err.message, before, strlen(before)) != 0 ||
            strtoul(err.message + strlen(before), NULL, 10) < 3) {
            _exit(4); /* no thread was started before the failure, so the test would prove nothing */
        }
        for (int tries = 0; thread_count() != 1 && tries < 1000; tries++) {
            usleep(1000); /* a joined thread may stay in /proc for a moment */
        }
        if (thread_count() != 1) {
            _exit(5);
        }
        _exit(pool_create(&pool, 3, &err) == CKD_OK ? 0 : 6);
    }
    assert_int_equal(child_status(child), 0);
}

static void test_fork(void **state) {
    (void)state;
    thread_pool *pool = new_pool(4);
    tally t = {.threads = 4, .caller = pthread_self()};
    assert_int_equal(pool_run(pool, 100, count_index, &t, NULL), CKD_OK);
    pid_t child = fork();
    if (child == 0) {
        ckd_error err;
        ckd_status status = pool_run(pool, 100, do_nothing, NULL, &err);
        pool_destroy(pool); /* must not wait for the threads, which do not exist here */
        _exit(status == CKD_E_STATE && err.status == CKD_E_STATE ? 0 : 1);
    }
    assert_int_equal(child_status(child), 0);
    assert_int_equal(pool_run(pool, 100, count_index, &t, NULL), CKD_OK);
    assert_int_equal(t.begun, 200);
    pool_destroy(pool);
}

/* ---- pools attached to a job ---- */

typedef struct errands {
    pthread_mutex_t mutex;
    unsigned left, done, inside, by_caller;
    pthread_t caller;
} errands;

static bool run_errand(void *context) {
    errands *e = context;
    pthread_mutex_lock(&e->mutex);
    bool some = e->left > 0;
    e->left -= some;
    e->inside += some;
    pthread_mutex_unlock(&e->mutex);
    if (some) {
        usleep(200);
        pthread_mutex_lock(&e->mutex);
        e->inside--;
        e->done++;
        e->by_caller += pthread_equal(pthread_self(), e->caller) != 0;
        pthread_mutex_unlock(&e->mutex);
    }
    return some;
}

static unsigned errands_done(errands *e) {
    pthread_mutex_lock(&e->mutex);
    unsigned done = e->done;
    pthread_mutex_unlock(&e->mutex);
    return done;
}

static ckd_status count_and_wait(void *context, size_t index, uint32_t worker, ckd_error *err) {
    (void)index;
    (void)worker;
    (void)err;
    atomic_fetch_add((atomic_int *)context, 1);
    usleep(100);
    return CKD_OK;
}

/* Workers do small jobs as they arrive, between calls of pool_run. After pool_detach they do none. */
static void test_workers_help(void **state) {
    (void)state;
    for (uint32_t threads = 2; threads <= 5; threads++) {
        thread_pool *pool;
        assert_int_equal(pool_create(&pool, threads, NULL), CKD_OK);
        errands e = {.mutex = PTHREAD_MUTEX_INITIALIZER, .caller = pthread_self()};
        atomic_int indices = 0;
        assert_true(pool_attach(pool, run_errand, &e));
        assert_false(pool_attach(pool, run_errand, &e)); /* only one job can be attached */
        for (unsigned i = 0; i < 60; i++) {
            pthread_mutex_lock(&e.mutex);
            e.left++;
            pthread_mutex_unlock(&e.mutex);
            pool_wake(pool);
            if (i % 10 == 0) {
                assert_int_equal(pool_run(pool, 7, count_and_wait, &indices, NULL), CKD_OK);
            }
        }
        for (int waited = 0; errands_done(&e) < 60 && waited < 20000; waited++) {
            usleep(1000);
        }
        assert_int_equal(errands_done(&e), 60);
        assert_int_equal(e.by_caller, 0);
        assert_int_equal(atomic_load(&indices), 42);
        pthread_mutex_lock(&e.mutex);
        e.left = 1000000;
        pthread_mutex_unlock(&e.mutex);
        pool_wake(pool);
        while (errands_done(&e) == 60) {
            usleep(50);
        }
        pool_detach(pool);
        assert_int_equal(e.inside, 0);
        unsigned done = errands_done(&e);
        pool_wake(pool);
        usleep(5000);
        assert_int_equal(errands_done(&e), done);
        pool_destroy(pool);
    }
}

static void test_a_pool_of_one_thread_cannot_be_attached(void **state) {
    (void)state;
    thread_pool *pool;
    errands e = {.left = 1};
    assert_int_equal(pool_create(&pool, 1, NULL), CKD_OK);
    assert_false(pool_attach(pool, run_errand, &e));
    pool_destroy(pool);
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

static ckd_status sleep_unevenly(void *context, size_t index, uint32_t worker, ckd_error *err) {
    (void)worker;
    (void)err;
    int64_t begun = now_ns();
    usleep(index == 0 ? 10000 : 40000);
    atomic_fetch_add((atomic_llong *)context, now_ns() - begun);
    return CKD_OK;
}

/*
 * One of two threads waits for the other; waiting is no work. The test takes the best of a few tries, as
 * other programs may use the machine.
 */
static void test_work_is_counted(void **state) {
    (void)state;
    thread_pool *pool;
    int64_t nearest = INT64_MAX;
    assert_int_equal(pool_create(&pool, 2, NULL), CKD_OK);
    for (int i = 0; i < 8; i++) {
        atomic_llong worked = 0;
        int64_t before = pool_saved_ns(pool), begun = now_ns();
        assert_int_equal(pool_run(pool, 2, sleep_unevenly, &worked, NULL), CKD_OK);
        int64_t counted = now_ns() - begun + pool_saved_ns(pool) - before;
        int64_t off =
            counted > atomic_load(&worked) ? counted - atomic_load(&worked) : atomic_load(&worked) - counted;
        nearest = off < nearest ? off : nearest;
    }
    assert_true(nearest < 5000000);
    pool_destroy(pool);
}

static void *look_at_policy(void *context) {
    struct sched_param of;
    int *policies = context;
    pthread_getschedparam(pthread_self(), &policies[0], &of);
    thread_set_batch();
    pthread_getschedparam(pthread_self(), &policies[1], &of);
    of.sched_priority = 0;
    policies[2] = pthread_setschedparam(pthread_self(), SCHED_IDLE, &of);
    thread_set_batch();
    pthread_getschedparam(pthread_self(), &policies[3], &of);
    return NULL;
}

/*
 * The usual scheduling policy becomes SCHED_BATCH, which does not interrupt others. Any other policy stays.
 */
static void test_batch_policy(void **state) {
    (void)state;
    pthread_t thread;
    int policies[4] = {-1, -1, -1, -1};
    assert_int_equal(thread_start(&thread, look_at_policy, policies, NULL), CKD_OK);
    pthread_join(thread, NULL);
    if (policies[2] != 0) {
        assert_int_equal(policies[1], policies[0]);
        puts("SKIPPED: the system lets nobody choose policies");
        skip();
    }
    assert_int_equal(policies[1], policies[0] == SCHED_OTHER ? SCHED_BATCH : policies[0]);
    assert_int_equal(policies[3], SCHED_IDLE);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_index_once),
        cmocka_unit_test(test_workers_help),
        cmocka_unit_test(test_a_pool_of_one_thread_cannot_be_attached),
        cmocka_unit_test(test_work_is_counted),
        cmocka_unit_test(test_first_failure_by_index),
        cmocka_unit_test(test_late_failure_of_a_smaller_index),
        cmocka_unit_test(test_failure_without_a_message),
        cmocka_unit_test(test_calls_are_serialised),
        cmocka_unit_test(test_nested_calls),
        cmocka_unit_test(test_signals_and_floats),
        cmocka_unit_test(test_idle_workers_sleep),
        cmocka_unit_test(test_thread_count),
        cmocka_unit_test(test_threads_that_cannot_start),
        cmocka_unit_test(test_batch_policy),
        cmocka_unit_test(test_fork),
    };
    return cmocka_run_group_tests_name("base_threads", tests, NULL, NULL);
}
