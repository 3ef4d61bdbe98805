/* Exact deltas coded on a CUDA device. Skipped where there is none; CKD_REQUIRE_GPU=1 makes that a failure. */
#define DEVICE_EXACT_TESTS
#include "tests/support/cuda_device.h"
#include "tests/engine/device/test_device_exact.c"

int main(void) {
    const struct CMUnitTest tests[] = {
        tempdir_test(test_chains),
        tempdir_test(test_ready_copies),
        tempdir_test(test_references),
        tempdir_test(test_twins),
        tempdir_test(test_what_does_not_win),
        tempdir_test(test_moments),
        tempdir_test(test_what_was_not_expected),
    };
    /* Named here, so that they are no less used than elsewhere. */
    (void)test_backwards, (void)test_failures;
    int result = 0;
    backend = cuda_device(&result);
    if (!backend) {
        return result;
    }
    return cmocka_run_group_tests_name("cuda_exact", tests, NULL, NULL);
}
