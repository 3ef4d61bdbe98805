/* Loading to a CUDA device, where blocks are decoded. Skipped where there is none; CKD_REQUIRE_GPU=1 makes that a failure. */
#define DEVICE_LOAD_TESTS
#include "tests/support/cuda_device.h"
#include "tests/engine/device/test_device_load.c"

int main(void) {
    const struct CMUnitTest tests[] = {
        tempdir_test(test_exact),          tempdir_test(test_compact),        tempdir_test(test_near),
        tempdir_test(test_little_staging), tempdir_test(test_damage),         tempdir_test(test_ranges),
        tempdir_test(test_rounded),        tempdir_test(test_many_stretches),
    };
    /* Named here, so that they are no less used than elsewhere. */
    (void)test_failures, (void)test_wrong_device;
    int result = 0;
    backend = cuda_device(&result);
    if (!backend) {
        return result;
    }
    return cmocka_run_group_tests_name("cuda_load", tests, NULL, NULL);
}
