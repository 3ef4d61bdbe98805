/*
 * Tensors in the memory of a device, for tests of saves and loads. Each file that includes this has its own
 * backend, which its main sets.
 */
#ifndef TESTS_SUPPORT_DEVICE_TENSORS_H
#define TESTS_SUPPORT_DEVICE_TENSORS_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "include/ckptdelta.h"
#include "tests/support/emulated_device.h"

#define UNUSED __attribute__((unused))

UNUSED static const ckd_device on_device = CKD_DEVICE_INIT;
static const device_backend *backend;
static device_failure why;

/* Copies to the device. The calls of this function do not count for emulated_fail_after. */
UNUSED static void *to_device(const void *from, size_t size) {
    void *memory = NULL;
    int fail_after = emulated_fail_after;
    emulated_fail_after = 0;
    device_queue queue = {.device = 0};
    assert_int_equal(backend->allocate(&memory, 0, size + 1, &why), DEVICE_DONE);
    assert_int_equal(backend->copy(&queue, memory, from, size, DEVICE_TO_DEVICE, &why), DEVICE_DONE);
    assert_int_equal(backend->finish(&queue, &why), DEVICE_DONE);
    emulated_fail_after = fail_after;
    return memory;
}

UNUSED static void from_device(void *to, const void *memory, size_t size) {
    device_queue queue = {.device = 0};
    assert_int_equal(backend->copy(&queue, to, memory, size, DEVICE_TO_HOST, &why), DEVICE_DONE);
    assert_int_equal(backend->finish(&queue, &why), DEVICE_DONE);
    assert_int_equal(backend->finish(&queue, &why), DEVICE_DONE);
}

#endif
