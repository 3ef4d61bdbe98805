/*
 * The host program has unusual rounding and flushes denormals. Results of the library do not depend on that.
 * After every call the host's mode is as before, and callbacks run in it.
 */
#include <fenv.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/float_mode.h"
#include "include/ckptdelta.h"
#include "tests/support/checkpoints.h"
#include "tests/support/tempdir.h"

enum { N = 40000 };
static const uint64_t shape_n = N;

/* The mode's bits, without the flags of past exceptions. */
static uint64_t mode_now(void) {
#if defined(__x86_64__)
    return __builtin_ia32_stmxcsr() & ~0x3fu;
#elif defined(__aarch64__)
    uint64_t bits;
    __asm__ volatile("mrs %0, fpcr" : "=r"(bits));
    return bits;
#else
    return (uint64_t)fegetround();
#endif
}

/* Rounds up. On x86-64 and arm64, also flushes denormals, and reads them as zero. */
static uint64_t set_odd_mode(void) {
    fesetround(FE_UPWARD);
#if defined(__x86_64__)
    __builtin_ia32_ldmxcsr(__builtin_ia32_stmxcsr() | 0x8040u);
#elif defined(__aarch64__)
    __asm__ volatile("msr fpcr, %0" : : "r"(mode_now() | UINT64_C(1) << 24));
#endif
    return mode_now();
}

static void set_plain_mode(void) {
    fesetenv(FE_DFL_ENV);
}

typedef struct host {
    const float *values;
    uint64_t mode; /* the mode that callbacks expect */
    size_t calls, strange;
} host;

static ckd_status hand_out(void *context, uint64_t first, uint64_t count, void *to, ckd_error *err) {
    (void)err;
    host *h = context;
    h->calls++;
    h->strange += mode_now() != h->mode;
    memcpy(to, h->values + first, count * sizeof(float));
    return CKD_OK;
}

static int look(void *context, uint64_t done, uint64_t total) {
    (void)done, (void)total;
    host *h = context;
    h->calls++;
    h->strange += mode_now() != h->mode;
    return 0;
}

static void save(ckd_store *store, host *h, uint64_t step) {
    ckd_save_options o = options_of("run", step);
    o.on_progress = look;
    o.progress_context = h;
    ckd_save *s = begin_with(store, &o);
    assert_true(mode_now() == h->mode);
    ckd_tensor t = CKD_TENSOR_INIT;
    t.name = "w";
    t.dtype = CKD_F32;
    t.ndim = 1;
    t.shape = &shape_n;
    t.read = hand_out;
    t.read_context = h;
    assert_int_equal(ckd_save_tensor(s, &t, NULL), CKD_OK);
    assert_true(mode_now() == h->mode);
    assert_int_equal(ckd_save_commit(NULL, s, NULL), CKD_OK);
    assert_true(mode_now() == h->mode);
}

static void check_diff(ckd_store *store, host *h, double norms[3]) {
    ckd_checkpoint a, b;
    ckd_diff *diff;
    assert_int_equal(ckd_store_find(&a, store, "run", 1, NULL), CKD_OK);
    assert_int_equal(ckd_store_find(&b, store, "run", 2, NULL), CKD_OK);
    ckd_diff_options comparing = CKD_DIFF_OPTIONS_INIT;
    comparing.on_progress = look;
    comparing.progress_context = h;
    assert_int_equal(ckd_store_diff(&diff, store, &a.id, &b.id, &comparing, NULL), CKD_OK);
    norms[0] = diff->items[0].norm_a;
    norms[1] = diff->items[0].norm_b;
    norms[2] = diff->items[0].norm_diff;
    ckd_diff_free(diff);
    assert_true(mode_now() == h->mode);
}

static void check_verify(ckd_store *store, host *h) {
    ckd_verify_options o = CKD_VERIFY_OPTIONS_INIT;
    o.on_progress = look;
    o.progress_context = h;
    ckd_verify_result *result;
    assert_int_equal(ckd_store_verify(&result, store, &o, NULL), CKD_OK);
    assert_int_equal(result->damage_count, 0);
    ckd_verify_result_free(result);
    assert_true(mode_now() == h->mode);
}

static void test_enter_and_leave(void **state) {
    (void)state;
    uint64_t odd = set_odd_mode();
    float_mode saved = float_mode_enter();
    volatile float small = 1.17549435e-38f, tenth = 0.1f, one = 1.0f, ulp = 5.9604645e-8f;
    volatile float denormal = small * tenth, sum = one + ulp;
    float_mode inner = float_mode_enter();
    float_mode_leave(inner);
    volatile float again = denormal * 2.0f;
    float_mode_leave(saved);
    uint64_t after = mode_now();
    volatile float upward = one + ulp;
    set_plain_mode();
    assert_true(after == odd);
    assert_true(sum == 1.0f);
    assert_true(upward > 1.0f);
#if defined(__x86_64__) || defined(__aarch64__)
    assert_true(denormal != 0.0f && again != 0.0f);
#endif
}

static void test_host_that_flushes(void **state) {
    ckd_store *store = store_create(*state);
    float *first = random_values(CKD_F32, N, 1), *second = malloc(N * sizeof(float));
    for (size_t i = 0; i < N; i += 7) {
        uint32_t denormal = (uint32_t)(i + 1);
        memcpy(&first[i], &denormal, 4);
    }
    memcpy(second, first, N * sizeof(float));
    change_values(CKD_F32, second, N, 2);
    uint64_t odd = set_odd_mode();
    host h = {.values = first, .mode = odd};
    save(store, &h, 1);
    h.values = second;
    save(store, &h, 2);
    void *back_first = load_whole(store, "run", 1, "w", N * 4),
         *back = load_whole(store, "run", 2, "w", N * 4);
    assert_true(mode_now() == odd);
    double norms[3], plain[3];
    check_diff(store, &h, norms);
    check_verify(store, &h);
    set_plain_mode();
    assert_true(h.calls > 4);
    assert_int_equal(h.strange, 0);
    h.mode = mode_now();
    check_diff(store, &h, plain);
    assert_memory_equal(norms, plain, sizeof(norms));
    assert_memory_equal(back_first, first, N * 4);
    assert_memory_equal(back, second, N * 4);
    free(back_first);
    free(back);
    free(first);
    free(second);
    ckd_store_close(store);
}

static int teardown(void **state) {
    set_plain_mode();
    tempdir_remove(*state);
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_enter_and_leave, tempdir_setup, teardown),
        cmocka_unit_test_setup_teardown(test_host_that_flushes, tempdir_setup, teardown),
    };
    return cmocka_run_group_tests_name("float_mode", tests, NULL, NULL);
}
