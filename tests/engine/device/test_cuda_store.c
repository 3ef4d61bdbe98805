/* Saves from and loads to a CUDA device. Skipped if there is none; with CKD_REQUIRE_GPU=1 that is a failure. */
#define DEVICE_STORE_TESTS
#include "tests/support/cuda_device.h"
#include "tests/engine/device/test_device_store.c"

int main(void) {
    const struct CMUnitTest tests[] = {
        tempdir_test(test_the_same_bytes),
        tempdir_test(test_reader),
        tempdir_test(test_regions),
        tempdir_test(test_together),
        tempdir_test(test_unchanged_blocks),
        tempdir_test(test_many_that_stay),
        tempdir_test(test_values_that_others_need),
    };
    /* These tests only work with the emulated device. The casts prevent warnings about unused functions. */
    (void)test_refused, (void)test_failures, (void)test_hashes_that_fail;
    int result = 0;
    backend = cuda_device(&result);
    if (!backend) {
        return result;
    }
    save_device_use(true);
    return cmocka_run_group_tests_name("cuda_store", tests, NULL, NULL);
}
