/* ckd_device_check: the answer is the device's, and a refusal says why. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "include/ckptdelta.h"
#include "kernels/device_open.h"
#include "tests/support/emulated_device.h"

static ckd_error asked(int device, ckd_status expected) {
    ckd_error err = {.status = CKD_OK};
    assert_int_equal(ckd_device_check(device, &err), expected);
    assert_int_equal(err.status, expected);
    assert_int_equal(ckd_device_check(device, NULL), expected);
    return err;
}

static void test_numbers(void **state) {
    (void)state;
    emulated_devices = 2;
    asked(0, CKD_OK);
    asked(1, CKD_OK);
    asked(-1, CKD_E_DEVICE);
    assert_non_null(strstr(asked(2, CKD_E_DEVICE).message, "no device 2"));
    emulated_devices = 0;
    asked(0, CKD_E_DEVICE);
    emulated_devices = 1;
}

/* A device that is listed may still be unusable. */
static void test_failures(void **state) {
    const device_result results[] = {DEVICE_ABSENT, DEVICE_FULL, DEVICE_FAILED};
    const ckd_status expected[] = {CKD_E_DEVICE, CKD_E_NOMEM, CKD_E_DEVICE};
    (void)state;
    for (unsigned i = 0; i < 3; i++) {
        ckd_error err;
        emulated_fail_as = results[i];
        emulated_fail_after = 1;
        assert_int_equal(ckd_device_check(0, &err), expected[i]);
        assert_non_null(strstr(err.message, "told to fail"));
        asked(0, CKD_OK);
    }
}

static void test_no_backend(void **state) {
    (void)state;
    device_backend_use(NULL);
    assert_int_equal(setenv("CKD_CUDA", "/no/such/backend.so", 1), 0);
    assert_non_null(strstr(asked(0, CKD_E_DEVICE).message, "/no/such/backend.so"));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_numbers),
        cmocka_unit_test(test_failures),
        cmocka_unit_test(test_no_backend),
    };
    device_backend_use(emulated_device());
    return cmocka_run_group_tests_name("device_check", tests, NULL, NULL);
}
