/* Sessions with tensors on a CUDA device. Skipped if there is none; with CKD_REQUIRE_GPU=1 that is a failure. */
#define DEVICE_SESSION_TESTS
#include "tests/support/cuda_device.h"
#include "tests/engine/device/test_device_session.c"

int main(void) {
    const struct CMUnitTest tests[] = {
        tempdir_test(test_copy),
        tempdir_test(test_lazy),
        tempdir_test(test_budgets),
        tempdir_test(test_groups),
        tempdir_test(test_no_fence),
        tempdir_test(test_restore),
        tempdir_test(test_coarse),
        tempdir_test(test_refused),
        tempdir_test(test_only_the_save_waits),
        tempdir_test(test_unchanged_weights),
        tempdir_test(test_changed_tensor),
    };
    /* These tests only work with the emulated device. The casts prevent warnings about unused functions. */
    (void)test_reported_memory, (void)test_failures, (void)test_too_little_memory, (void)test_no_backend;
    int result = 0;
    backend = cuda_device(&result);
    if (!backend) {
        return result;
    }
    return cmocka_run_group_tests_name("cuda_session", tests, NULL, NULL);
}
