/* Sessions of tensors on a CUDA device. Skipped where there is none; CKD_REQUIRE_GPU=1 makes that a failure. */
#define DEVICE_SESSION_TESTS
#include "tests/support/cuda_device.h"
#include "tests/engine/device/test_device_session.c"

int main(void) {
    const struct CMUnitTest tests[] = {
        tempdir_test(test_copy),    tempdir_test(test_lazy),     tempdir_test(test_budgets),
        tempdir_test(test_groups),  tempdir_test(test_no_fence), tempdir_test(test_restore),
        tempdir_test(test_compact), tempdir_test(test_refused),  tempdir_test(test_only_the_save_waits),
    };
    /* Named here, so that they are no less used than elsewhere. */
    (void)test_what_is_held, (void)test_failures, (void)test_too_little_memory, (void)test_no_backend;
    int result = 0;
    backend = cuda_device(&result);
    if (!backend) {
        return result;
    }
    return cmocka_run_group_tests_name("cuda_session", tests, NULL, NULL);
}
