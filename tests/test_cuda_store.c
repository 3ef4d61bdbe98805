/* Saving from and loading to a CUDA device. Skipped where there is none; CKD_REQUIRE_GPU=1 makes that a failure. */
#define DEVICE_STORE_TESTS
#include "tests/test_device_store.c"

int main(void) {
    const struct CMUnitTest tests[] = {
        tempdir_test(test_the_same_bytes),  tempdir_test(test_reader),
        tempdir_test(test_regions),         tempdir_test(test_lossy_tiles),
        tempdir_test(test_not_in_sessions), tempdir_test(test_tiles_of_the_host),
    };
    /* Named here, so that they are no less used than elsewhere. */
    (void)test_refused, (void)test_failures, (void)test_lossy_failures;
    ckd_error err = {0};
    int devices = 0;
    backend = device_backend_open(&err);
    if (!backend || backend->count(&devices, &why) != DEVICE_DONE || devices == 0) {
        printf("SKIP: %s\n", !backend ? err.message : why.result ? why.reason : "there is no device");
        return 77;
    }
    return cmocka_run_group_tests_name("cuda_store", tests, NULL, NULL);
}
