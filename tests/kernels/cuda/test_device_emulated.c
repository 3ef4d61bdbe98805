/*
 * The kernels for devices, which the host runs with their launch geometry, are compared with the CPU's
 * kernels: with threads in the usual order and backwards.
 */
#include <stdio.h>

#include "tests/support/device_packed.h"
#include "tests/support/device_parity.h"
#include "tests/support/device_streams.h"
#include "tests/support/emulated_device.h"
#include "tests/support/level.h"

int main(void) {
    int failed = 0;
    if (test_draws("order of threads", 0, 2)) {
        failed += device_parity("device_emulated", emulated_device());
        failed += device_packed("device_packed", emulated_device());
        failed += device_streams("device_streams", emulated_device(), 6000);
    }
    if (test_draws("order of threads", 1, 2)) {
        emulated_backwards = true;
        failed += device_parity("device_emulated_backwards", emulated_device());
        failed += device_packed("device_packed_backwards", emulated_device());
        failed += device_streams("device_streams_backwards", emulated_device(), 600);
    }
    if (emulated_memory) {
        printf("%llu bytes of the device's memory were not released\n", (unsigned long long)emulated_memory);
    }
    return failed || emulated_memory || emulated_pinned;
}
