/*
 * base/file: locks between handles, threads and processes; clocks and random numbers. The program replaces
 * fcntl and getrandom of the C library.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/file.h"
#include "tests/support/small_files.h"
#include "tests/support/tempdir.h"

static struct {
    bool rough; /* every second call is interrupted, and random bytes come a few at a time */
    unsigned calls, tries;
    int lock_errno, random_errno;
    const char *remove_before_lock; /* this lock file is removed just before it is locked, this many times: */
    int removals;
} fake;

int fcntl(int fd, int command, ...) {
    va_list args;
    va_start(args, command);
    void *argument = va_arg(args, void *);
    va_end(args);
    if (command == F_OFD_SETLK) {
        __atomic_fetch_add(&fake.tries, 1, __ATOMIC_RELAXED);
        if (fake.lock_errno != 0 || (fake.rough && fake.calls++ % 2 == 0)) {
            errno = fake.lock_errno != 0 ? fake.lock_errno : EINTR;
            return -1;
        }
        if (fake.removals > 0) {
            fake.removals--;
            unlink(fake.remove_before_lock);
        }
    }
    return (int)syscall(SYS_fcntl, fd, command, argument);
}

ssize_t getrandom(void *to, size_t size, unsigned flags) {
    if (fake.random_errno != 0 || (fake.rough && fake.calls++ % 2 == 0)) {
        errno = fake.random_errno != 0 ? fake.random_errno : EINTR;
        return -1;
    }
    return (ssize_t)syscall(SYS_getrandom, to, fake.rough && size > 7 ? (size_t)7 : size, flags);
}

/* Far longer than any wait here: a test that fails runs out of time. */
#define LONG_MS 600000

typedef struct place {
    char *dir;
    char path[512];
} place;

static int set_up(void **state) {
    place *p = calloc(1, sizeof(*p));
    if (p == NULL) {
        return -1;
    }
    p->dir = tempdir_create();
    snprintf(p->path, sizeof(p->path), "%s/lock", p->dir);
    memset(&fake, 0, sizeof(fake));
    *state = p;
    return 0;
}

static int tear_down(void **state) {
    place *p = *state;
    file_set_fault_hook(NULL, NULL);
    memset(&fake, 0, sizeof(fake));
    tempdir_remove(p->dir);
    free(p);
    return 0;
}

static int child_status(pid_t child) {
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + status;
}

static file_lock *take(const char *path, lock_kind kind) {
    file_lock *lock;
    ckd_error err;
    assert_int_equal(lock_acquire(&lock, path, kind, true, 0, &err), CKD_OK);
    assert_non_null(lock);
    return lock;
}

/* Returns whether the lock can be taken at once. Never keeps it. */
static bool available(const char *path, lock_kind kind) {
    file_lock *lock;
    ckd_status status = lock_acquire(&lock, path, kind, true, 0, NULL);
    lock_release(lock);
    return status == CKD_OK;
}

static bool available_to_others(const char *path, lock_kind kind) {
    pid_t child = fork();
    if (child == 0) {
        _exit(available(path, kind) ? 0 : 1);
    }
    int status = child_status(child);
    assert_in_range(status, 0, 1);
    return status == 0;
}

static void test_shared_and_exclusive(void **state) {
    place *p = *state;
    for (int others = 0; others < 2; others++) {
        bool (*can)(const char *, lock_kind) = others ? available_to_others : available;
        file_lock *one = take(p->path, LOCK_SHARED), *two = take(p->path, LOCK_SHARED);
        assert_true(can(p->path, LOCK_SHARED));
        assert_false(can(p->path, LOCK_EXCLUSIVE));
        lock_release(one);
        assert_false(can(p->path, LOCK_EXCLUSIVE));
        lock_release(two);
        assert_true(can(p->path, LOCK_EXCLUSIVE));
        one = take(p->path, LOCK_EXCLUSIVE);
        assert_false(can(p->path, LOCK_SHARED));
        assert_false(can(p->path, LOCK_EXCLUSIVE));
        lock_release(one);
        assert_true(can(p->path, LOCK_SHARED));
    }
    lock_release(NULL);
    assert_true(file_exists(p->path));
}

static void test_busy_says_so(void **state) {
    place *p = *state;
    file_lock *held = take(p->path, LOCK_EXCLUSIVE), *lock = held;
    ckd_error err;
    fake.tries = 0;
    assert_int_equal(lock_acquire(&lock, p->path, LOCK_SHARED, true, 0, NULL), CKD_E_BUSY);
    assert_int_equal(fake.tries, 1);
    lock = held;
    assert_int_equal(lock_acquire(&lock, p->path, LOCK_SHARED, true, 30, &err), CKD_E_BUSY);
    assert_true(fake.tries > 2);
    assert_null(lock);
    assert_int_equal(err.status, CKD_E_BUSY);
    assert_string_equal(err.file, p->path);
    assert_non_null(strstr(err.message, p->path));
    lock_release(held);
}

static void test_missing_and_unlockable(void **state) {
    place *p = *state;
    file_lock *lock = (file_lock *)p;
    ckd_error err;
    assert_int_equal(lock_acquire(&lock, p->path, LOCK_SHARED, false, 0, &err), CKD_E_NOT_FOUND);
    assert_null(lock);
    assert_string_equal(err.file, p->path);
    assert_false(file_exists(p->path));
    assert_int_equal(lock_acquire(&lock, p->path, LOCK_EXCLUSIVE, false, 0, &err), CKD_E_NOT_FOUND);
    write_small_file(p->path, "content", 7);
    assert_true(available(p->path, LOCK_EXCLUSIVE));
    assert_content(p->path, "content", 7);
    fake.lock_errno = ENOLCK;
    assert_int_equal(lock_acquire(&lock, p->path, LOCK_SHARED, false, LONG_MS, &err), CKD_E_IO);
    assert_int_equal(err.sys_errno, ENOLCK);
    fake.lock_errno = EACCES; /* POSIX allows it instead of EAGAIN */
    assert_int_equal(lock_acquire(&lock, p->path, LOCK_SHARED, false, 0, &err), CKD_E_BUSY);
    fake.lock_errno = 0;
    fake.rough = true;
    lock = take(p->path, LOCK_EXCLUSIVE);
    assert_false(available(p->path, LOCK_SHARED));
    lock_release(lock);
    assert_true(available(p->path, LOCK_SHARED));
}

/* A shared lock needs only read permission. As root may do everything, a child of another user tests it. */
static void test_shared_needs_read_permission_only(void **state) {
    place *p = *state;
    write_small_file(p->path, "", 0);
    assert_int_equal(chmod(p->path, 0444), 0);
    assert_int_equal(chmod(p->dir, 0555), 0);
    pid_t child = fork();
    if (child == 0) {
        file_lock *lock;
        ckd_error err;
        if (geteuid() == 0 && (setegid(65534) != 0 || seteuid(65534) != 0)) {
            _exit(2);
        }
        if (access(p->dir, X_OK) != 0 && errno == EACCES && file_exists(p->path) == false) {
            _exit(77); /* only root may enter a parent directory */
        }
        if (lock_acquire(&lock, p->path, LOCK_SHARED, true, 0, &err) != CKD_OK) {
            _exit(3);
        }
        lock_release(lock);
        _exit(lock_acquire(&lock, p->path, LOCK_EXCLUSIVE, true, 0, &err) == CKD_E_READ_ONLY ? 0 : 4);
    }
    int status = child_status(child);
    assert_int_equal(chmod(p->dir, 0700), 0);
    if (status == 77) {
        print_message("SKIP: the temporary directory is reachable for root only\n");
        skip();
    }
    assert_int_equal(status, 0);
}

/* ---- processes that end ---- */

static void test_ends_with_the_process(void **state) {
    place *p = *state;
    int ready[2];
    char byte;
    assert_int_equal(pipe(ready), 0);
    pid_t child = fork();
    if (child == 0) {
        file_lock *lock;
        ckd_status status = lock_acquire(&lock, p->path, LOCK_EXCLUSIVE, true, 0, NULL);
        if (status != CKD_OK || write(ready[1], "x", 1) != 1) {
            _exit(1);
        }
        for (;;) {
            pause();
        }
    }
    assert_int_equal(read(ready[0], &byte, 1), 1);
    assert_false(available(p->path, LOCK_SHARED));
    assert_int_equal(kill(child, SIGKILL), 0);
    assert_int_equal(child_status(child), 1000 + SIGKILL);
    assert_true(available(p->path, LOCK_EXCLUSIVE));
    close(ready[0]);
    close(ready[1]);
}

/*
 * A forked child shares the open file. It neither keeps the lock when its parent releases it, nor releases
 * it.
 */
static void test_children_do_not_interfere(void **state) {
    place *p = *state;
    int to_child[2], to_parent[2];
    char byte;
    assert_int_equal(pipe(to_child) + pipe(to_parent), 0);
    file_lock *one = take(p->path, LOCK_EXCLUSIVE);
    char second[600];
    snprintf(second, sizeof(second), "%s/second", p->dir);
    file_lock *two = take(second, LOCK_EXCLUSIVE);
    pid_t child = fork();
    if (child == 0) {
        lock_release(one); /* as a destructor would do */
        bool ok = write(to_parent[1], "x", 1) == 1 && read(to_child[0], &byte, 1) == 1;
        _exit(ok ? 0 : 1); /* it lives, with its copy of `two`, until the parent writes */
    }
    assert_int_equal(read(to_parent[0], &byte, 1), 1);
    assert_false(available(p->path, LOCK_SHARED));
    lock_release(one);
    assert_true(available(p->path, LOCK_EXCLUSIVE));
    assert_false(available(second, LOCK_SHARED));
    lock_release(two);
    assert_true(available(second, LOCK_EXCLUSIVE));
    assert_int_equal(write(to_child[1], "x", 1), 1);
    assert_int_equal(child_status(child), 0);
    close(to_child[0]), close(to_child[1]), close(to_parent[0]), close(to_parent[1]);
}

/* ---- waiting ---- */

typedef struct waiter {
    const char *path;
    ckd_status status;
    file_lock *lock;
} waiter;

static void *wait_for_it(void *argument) {
    waiter *w = argument;
    w->status = lock_acquire(&w->lock, w->path, LOCK_EXCLUSIVE, true, LONG_MS, NULL);
    return NULL;
}

static void test_waits_until_released(void **state) {
    place *p = *state;
    for (int i = 0; i < 10; i++) {
        file_lock *held = take(p->path, i % 2 ? LOCK_SHARED : LOCK_EXCLUSIVE);
        waiter w = {.path = p->path};
        pthread_t thread;
        assert_int_equal(pthread_create(&thread, NULL, wait_for_it, &w), 0);
        usleep(1000u * (unsigned)i);
        lock_release(held);
        assert_int_equal(pthread_join(thread, NULL), 0);
        assert_int_equal(w.status, CKD_OK);
        assert_false(available(p->path, LOCK_SHARED));
        lock_release(w.lock);
    }
}

/*
 * The lock file is removed or replaced between opening and locking. The lock must be on the file that has the
 * name.
 */
static void test_lock_files_removed_while_locking(void **state) {
    place *p = *state;
    ckd_error err;
    for (int removals = 1; removals <= 5; removals++) {
        write_small_file(p->path, "old", 3);
        fake.remove_before_lock = p->path;
        fake.removals = removals;
        file_lock *lock = take(p->path, LOCK_EXCLUSIVE);
        assert_int_equal(fake.removals, 0);
        assert_content(p->path, "", 0); /* a new file */
        assert_false(available(p->path, LOCK_SHARED));
        lock_release(lock);
        assert_int_equal(file_remove(p->path, false, NULL), CKD_OK);
    }
    write_small_file(p->path, "old", 3);
    fake.removals = 1;
    file_lock *lock;
    assert_int_equal(lock_acquire(&lock, p->path, LOCK_EXCLUSIVE, false, LONG_MS, &err), CKD_E_NOT_FOUND);
    assert_null(lock);
    fake.removals = 1000000; /* nearly forever: lock_acquire gives up */
    assert_int_equal(lock_acquire(&lock, p->path, LOCK_SHARED, true, LONG_MS, &err), CKD_E_BUSY);
}

/* ---- mutual exclusion ---- */

#define CONTENDERS 4
#define TURNS      100

typedef struct arena {
    const char *path;
    bool removing;             /* every holder removes the lock file before it releases the lock */
    volatile uint64_t *shared; /* [0] is incremented, not atomically; [1] counts holders */
} arena;

/*
 * Relaxed atomics satisfy the thread sanitizer, which does not know file locks. A lost update still stays
 * lost.
 */
static uint64_t load(const volatile uint64_t *from) {
    return __atomic_load_n(from, __ATOMIC_RELAXED);
}

static void store(volatile uint64_t *to, uint64_t value) {
    __atomic_store_n(to, value, __ATOMIC_RELAXED);
}

static ckd_status take_turns(const arena *a) {
    for (int i = 0; i < TURNS; i++) {
        file_lock *lock;
        ckd_status status = lock_acquire(&lock, a->path, LOCK_EXCLUSIVE, true, LONG_MS, NULL);
        if (status != CKD_OK) {
            return status;
        }
        uint64_t before = load(&a->shared[0]);
        store(&a->shared[1], load(&a->shared[1]) + 1);
        bool alone = load(&a->shared[1]) == 1;
        if (i % 8 == 0) {
            usleep(100);
        }
        store(&a->shared[1], load(&a->shared[1]) - 1);
        alone = alone && load(&a->shared[1]) == 0;
        store(&a->shared[0], before + 1);
        if (a->removing && file_remove(a->path, false, NULL) != CKD_OK) {
            alone = false;
        }
        lock_release(lock);
        if (!alone) {
            return CKD_E_STATE;
        }
    }
    return CKD_OK;
}

static void test_one_process_at_a_time(void **state) {
    place *p = *state;
    for (int removing = 0; removing < 2; removing++) {
        arena a = {.path = p->path, .removing = removing};
        a.shared = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        assert_ptr_not_equal(a.shared, MAP_FAILED);
        pid_t children[CONTENDERS];
        for (int c = 0; c < CONTENDERS; c++) {
            children[c] = fork();
            if (children[c] == 0) {
                _exit((int)take_turns(&a));
            }
        }
        for (int c = 0; c < CONTENDERS; c++) {
            assert_int_equal(child_status(children[c]), CKD_OK);
        }
        assert_int_equal(a.shared[0], CONTENDERS * TURNS);
        munmap((void *)a.shared, 4096);
    }
}

static void *thread_takes_turns(void *argument) {
    return take_turns(argument) == CKD_OK ? NULL : argument;
}

static void test_one_thread_at_a_time(void **state) {
    place *p = *state;
    uint64_t shared[2] = {0};
    arena a = {.path = p->path, .shared = shared};
    pthread_t threads[CONTENDERS];
    for (int c = 0; c < CONTENDERS; c++) {
        assert_int_equal(pthread_create(&threads[c], NULL, thread_takes_turns, &a), 0);
    }
    for (int c = 0; c < CONTENDERS; c++) {
        void *failed;
        assert_int_equal(pthread_join(threads[c], &failed), 0);
        assert_null(failed);
    }
    assert_int_equal(shared[0], CONTENDERS * TURNS);
}

/* ---- holders, clocks, random numbers ---- */

/* Finds the process that holds a lock on a file, and whether it is stopped. */
static void test_holders(void **state) {
    place *p = *state;
    lock_holder h;
    assert_false(lock_find_holder(&h, p->path));
    write_small_file(p->path, "", 0);
    assert_false(lock_find_holder(&h, p->path));
    int opened = open(p->path, O_RDONLY | O_CLOEXEC); /* a file that is only open is not locked */
    assert_true(opened >= 0);
    assert_false(lock_find_holder(&h, p->path));
    close(opened);
    file_lock *own = take(p->path, LOCK_SHARED);
    assert_true(lock_find_holder(&h, p->path));
    assert_int_equal(h.process, getpid());
    assert_false(h.stopped);
    assert_int_equal(h.others, 0);
    assert_non_null(strstr(h.command, "test_base_lock"));
    pid_t child = fork();
    if (child == 0) {
        file_lock *lock;
        ckd_status status = lock_acquire(&lock, p->path, LOCK_SHARED, false, 0, NULL);
        lock_release(own);
        raise(SIGSTOP);
        _exit(status == CKD_OK ? 0 : 1);
    }
    int how;
    assert_int_equal(waitpid(child, &how, WUNTRACED), child);
    assert_true(WIFSTOPPED(how));
    assert_true(lock_find_holder(&h, p->path));
    assert_int_equal(h.process, child); /* the one of both that is stopped */
    assert_true(h.stopped);
    assert_int_equal(h.others, 1);
    kill(child, SIGCONT);
    assert_int_equal(child_status(child), 0);
    lock_release(own);
    assert_false(lock_find_holder(&h, p->path));
}

static void test_clocks_and_random_bytes(void **state) {
    (void)state;
    uint64_t before = clock_monotonic_ns();
    assert_true(clock_wall_ns() > UINT64_C(1577836800000000000)); /* 2020 */
    assert_true(clock_monotonic_ns() >= before);
    for (int rough = 0; rough < 2; rough++) {
        uint8_t a[300] = {0}, b[300] = {0};
        fake.rough = rough;
        assert_int_equal(random_bytes(a + 1, 298, NULL), CKD_OK);
        assert_int_equal(random_bytes(b + 1, 298, NULL), CKD_OK);
        assert_memory_not_equal(a + 1, b + 1, 298);
        assert_memory_not_equal(a + 267, b + 267, 32); /* including the last bytes */
        assert_int_equal(a[0] | a[299], 0);
    }
    uint8_t a[16];
    ckd_error err;
    memset(a, 'x', sizeof(a));
    fake.random_errno = ENOSYS;
    assert_int_equal(random_bytes(a, sizeof(a), &err), CKD_E_IO);
    assert_int_equal(err.sys_errno, ENOSYS);
    static const uint8_t zeros[16];
    assert_memory_equal(a, zeros, 16);
}

int main(void) {
#define WITH_PLACE(test) cmocka_unit_test_setup_teardown(test, set_up, tear_down)
    const struct CMUnitTest tests[] = {
        WITH_PLACE(test_shared_and_exclusive),
        WITH_PLACE(test_busy_says_so),
        WITH_PLACE(test_missing_and_unlockable),
        WITH_PLACE(test_shared_needs_read_permission_only),
        WITH_PLACE(test_ends_with_the_process),
        WITH_PLACE(test_children_do_not_interfere),
        WITH_PLACE(test_waits_until_released),
        WITH_PLACE(test_lock_files_removed_while_locking),
        WITH_PLACE(test_one_process_at_a_time),
        WITH_PLACE(test_one_thread_at_a_time),
        WITH_PLACE(test_holders),
        WITH_PLACE(test_clocks_and_random_bytes),
    };
    return cmocka_run_group_tests_name("base_lock", tests, NULL, NULL);
}
