/* The CUDA backend against the CPU's kernels, on a device. Skipped where there is none; CKD_REQUIRE_GPU=1 makes that a failure. */
#include <stdio.h>

#include "kernels/device_open.h"
#include "tests/support/device_parity.h"

int main(void) {
    ckd_error err = {0};
    const device_backend *backend = device_backend_open(&err);
    device_failure why = {0};
    int devices = 0;
    if (!backend || backend->count(&devices, &why) != DEVICE_DONE || devices == 0) {
        printf("SKIP: %s\n", !backend ? err.message : why.result ? why.reason : "there is no device");
        return 77;
    }
    device_about about;
    if (backend->describe(&about, 0, &why) == DEVICE_DONE) {
        printf("%s, %u.%u, %u processors\n", about.name, about.major, about.minor, about.processors);
    }
    return device_parity("cuda_parity", backend);
}
