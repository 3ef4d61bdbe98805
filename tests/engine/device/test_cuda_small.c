/* Small tensors on a CUDA device. Skipped if there is none; with CKD_REQUIRE_GPU=1 that is a failure. */
#define DEVICE_SMALL_TESTS
#include "tests/support/cuda_device.h"
#include "tests/engine/device/test_device_small.c"

int main(void) {
    const struct CMUnitTest tests[] = {
        tempdir_test(test_values),
        tempdir_test(test_lazy_values),
        tempdir_test(test_only_the_save_waits),
        tempdir_test(test_host_memory),
        tempdir_test(test_calls),
        cmocka_unit_test(test_larger_tensors_are_copied_together),
        tempdir_test(test_one_by_one),
    };
    int result = 0;
    backend = cuda_device(&result);
    if (!backend) {
        return result;
    }
    return cmocka_run_group_tests_name("cuda_small", tests, NULL, NULL);
}
