/*
 * Compares the CUDA backend with the CPU's kernels, on a device. Without a device the test is skipped, or
 * fails with CKD_REQUIRE_GPU=1.
 */
#include <stdio.h>

#include "tests/support/cuda_device.h"
#include "tests/support/device_packed.h"
#include "tests/support/device_parity.h"
#include "tests/support/device_streams.h"

int main(void) {
    int result = 0;
    device_failure why = {0};
    const device_backend *backend = cuda_device(&result);
    if (!backend) {
        return result;
    }
    device_info about;
    if (backend->describe(&about, 0, &why) == DEVICE_DONE) {
        printf("%s, %u.%u, %u processors\n", about.name, about.major, about.minor, about.processors);
    }
    int failed = device_parity("cuda_parity", backend);
    failed += device_packed("cuda_packed", backend);
    return failed + device_streams("cuda_streams", backend, 300);
}
