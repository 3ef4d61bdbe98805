/*
 * Lossy saves from a CUDA device whose parents are decoded there. Skipped if there is none; with CKD_REQUIRE_GPU=1
 * that is a failure.
 */
#define DEVICE_PARENTS_TESTS
#include "tests/support/cuda_device.h"
#include "tests/engine/device/test_device_parents.c"

int main(void) {
    const struct CMUnitTest tests[] = {
        tempdir_test(test_chains),        tempdir_test(test_exact_parents), tempdir_test(test_damaged_parent),
        tempdir_test(test_damaged_copy),  tempdir_test(test_wrong_parent),  tempdir_test(test_wrong_device),
        tempdir_test(test_little_memory),
    };
    int result = 0;
    backend = cuda_device(&result);
    if (!backend) {
        return result;
    }
    return cmocka_run_group_tests_name("cuda_parents", tests, NULL, NULL);
}
