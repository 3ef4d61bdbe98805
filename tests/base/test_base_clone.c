/* base/file_clone.c and base/file_watch.c: copies of whole files, and waits for changes of directories. */
#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/file.h"
#include "tests/support/tempdir.h"

typedef struct names {
    char a[512], b[512], temporary[512];
} names;

static names names_in(void **state) {
    names n;
    snprintf(n.a, sizeof(n.a), "%s/a", (const char *)*state);
    snprintf(n.b, sizeof(n.b), "%s/b", (const char *)*state);
    snprintf(n.temporary, sizeof(n.temporary), "%s/t", (const char *)*state);
    return n;
}

static void make_file(const names *n, size_t size) {
    uint8_t *data = malloc(size + 1);
    for (size_t i = 0; i < size; i++) {
        data[i] = (uint8_t)(i * 2654435761u >> 13);
    }
    assert_int_equal(file_create_durable(n->a, n->temporary, data, size, NULL), CKD_OK);
    free(data);
}

static void test_clone(void **state) {
    names n = names_in(state);
    static const size_t sizes[] = {0, 1, 4096, 3000001};
    for (size_t i = 0; i < sizeof(sizes) / sizeof(*sizes); i++) {
        bytes a = {0}, b = {0};
        make_file(&n, sizes[i]);
        assert_int_equal(file_clone(n.a, n.b, NULL), CKD_OK);
        assert_int_equal(file_read_all(&a, n.a, sizes[i], NULL), CKD_OK);
        assert_int_equal(file_read_all(&b, n.b, sizes[i], NULL), CKD_OK);
        assert_int_equal(a.size, b.size);
        assert_true(a.size == 0 || memcmp(a.data, b.data, a.size) == 0);
        assert_int_equal(file_clone(n.a, n.b, NULL), CKD_E_EXISTS);
        assert_int_equal(file_remove(n.a, false, NULL), CKD_OK);
        assert_int_equal(file_remove(n.b, false, NULL), CKD_OK);
        bytes_free(&a);
        bytes_free(&b);
    }
    assert_int_equal(file_clone(n.a, n.b, NULL), CKD_E_NOT_FOUND);
    make_file(&n, 5);
    assert_int_equal(symlink(n.a, n.temporary), 0);
    assert_int_not_equal(file_clone(n.temporary, n.b, NULL), CKD_OK);
    assert_int_not_equal(file_clone(*state, n.b, NULL), CKD_OK);
    assert_false(file_exists(n.b));
}

static int fail_writes(void *context, file_op step, const char *path) {
    (void)path;
    return step == FILE_OP_WRITE ? *(int *)context : 0;
}

static void test_failed_clone_leaves_nothing(void **state) {
    names n = names_in(state);
    ckd_error err;
    int errnum = ENOSPC;
    make_file(&n, 100);
    file_set_fault_hook(fail_writes, &errnum);
    assert_int_equal(file_clone(n.a, n.b, &err), CKD_E_NOSPACE);
    errnum = EIO;
    assert_int_equal(file_clone(n.a, n.b, &err), CKD_E_IO);
    file_set_fault_hook(NULL, NULL);
    assert_false(file_exists(n.b));
}

typedef struct delayed {
    const file_watch *watch;
    const names *names;
} delayed;

static void *act_later(void *context) {
    const delayed *d = context;
    usleep(50000);
    if (d->names) {
        make_file(d->names, 1);
    } else {
        file_watch_wake(d->watch);
    }
    return NULL;
}

static void test_watch(void **state) {
    const uint64_t second = UINT64_C(1000000000);
    names n = names_in(state);
    file_watch *w;
    assert_int_equal(file_watch_open(&w, NULL), CKD_OK);
    file_watch_add(w, *state);
    file_watch_add(w, "/nowhere");
    uint64_t begun = clock_monotonic_ns();
    file_watch_wait(w, second / 50);
    assert_true(clock_monotonic_ns() - begun >= second / 50);
    for (int i = 0; i < 2; i++) {
        delayed d = {w, i ? &n : NULL};
        pthread_t thread;
        assert_int_equal(pthread_create(&thread, NULL, act_later, &d), 0);
        begun = clock_monotonic_ns();
        file_watch_wait(w, 60 * second);
        assert_true(clock_monotonic_ns() - begun < 30 * second);
        pthread_join(thread, NULL);
    }
    file_watch_close(w);
    file_watch_close(NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        tempdir_test(test_clone),
        tempdir_test(test_failed_clone_leaves_nothing),
        tempdir_test(test_watch),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
