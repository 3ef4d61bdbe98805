/*
 * Exact masters and their rounded copies on a CUDA device. Skipped if there is none; with CKD_REQUIRE_GPU=1 that is a
 * failure.
 */
#define DEVICE_MASTERS_TESTS
#include "tests/support/cuda_device.h"
#include "tests/engine/device/test_device_masters.c"

int main(void) {
    const struct CMUnitTest tests[] = {
        tempdir_test(test_chains),
        tempdir_test(test_ready_copies),
        tempdir_test(test_references),
    };
    /* These tests only work with the emulated device. The casts prevent warnings about unused functions. */
    (void)test_backwards, (void)test_failures, (void)test_wrong_rounding;
    int result = 0;
    backend = cuda_device(&result);
    if (!backend) {
        return result;
    }
    save_device_use(true);
    return cmocka_run_group_tests_name("cuda_masters", tests, NULL, NULL);
}
