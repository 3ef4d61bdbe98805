/* Exact deltas coded on a CUDA device. Skipped if there is none; with CKD_REQUIRE_GPU=1 that is a failure. */
#define DEVICE_EXACT_TESTS
#include "tests/support/cuda_device.h"
#include "tests/engine/device/test_device_exact.c"

int main(void) {
    const struct CMUnitTest tests[] = {
        tempdir_test(test_chains),      tempdir_test(test_ready_copies),
        tempdir_test(test_few_changes), tempdir_test(test_references),
        tempdir_test(test_twins),       tempdir_test(test_useless_deltas),
        tempdir_test(test_moments),     tempdir_test(test_late_materialized_copies),
    };
    /* These tests only work with the emulated device. The casts prevent warnings about unused functions. */
    (void)test_default, (void)test_backwards, (void)test_failures;
    int result = 0;
    backend = cuda_device(&result);
    if (!backend) {
        return result;
    }
    save_device_use(true);
    return cmocka_run_group_tests_name("cuda_exact", tests, NULL, NULL);
}
