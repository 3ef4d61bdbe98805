/*
 * Loads to a CUDA device, where blocks are decoded. Skipped if there is none; with CKD_REQUIRE_GPU=1 that is a
 * failure.
 */
#define DEVICE_LOAD_TESTS
#include "tests/support/cuda_device.h"
#include "tests/engine/device/test_device_load.c"

int main(void) {
    const struct CMUnitTest tests[] = {
        tempdir_test(test_exact),          tempdir_test(test_coarse),          tempdir_test(test_near),
        tempdir_test(test_many_stretches), tempdir_test(test_little_staging),  tempdir_test(test_damage),
        tempdir_test(test_ranges),         tempdir_test(test_rounded),         tempdir_test(test_columns),
        tempdir_test(test_together),       tempdir_test(test_damage_together),
    };
    /* These tests only work with the emulated device. The casts prevent warnings about unused functions. */
    (void)test_failures, (void)test_failures_together, (void)test_wrong_device;
    int result = 0;
    backend = cuda_device(&result);
    if (!backend) {
        return result;
    }
    return cmocka_run_group_tests_name("cuda_load", tests, NULL, NULL);
}
