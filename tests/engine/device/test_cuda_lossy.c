/* Lossy saves from a CUDA device. Skipped if there is none; with CKD_REQUIRE_GPU=1 that is a failure. */
#define DEVICE_LOSSY_TESTS
#include "tests/support/cuda_device.h"
#include "tests/engine/device/test_device_lossy.c"

int main(void) {
    const struct CMUnitTest tests[] = {
        tempdir_test(test_lossy_tiles), tempdir_test(test_second_moments),    tempdir_test(test_masters),
        tempdir_test(test_spikes),      tempdir_test(test_tiles_of_the_host),
    };
    /* These tests only work with the emulated device. The casts prevent warnings about unused functions. */
    (void)test_lossy_failures, (void)test_references;
    int result = 0;
    backend = cuda_device(&result);
    if (!backend) {
        return result;
    }
    return cmocka_run_group_tests_name("cuda_lossy", tests, NULL, NULL);
}
