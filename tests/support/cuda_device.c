#include "tests/support/cuda_device.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "kernels/device_open.h"

static bool is_built(void) {
    const char *folder = getenv("CKPTDELTA_BUILD");
    char path[4096];
    snprintf(path, sizeof(path), "%s/libckptdelta_cuda.so", folder ? folder : ".");
    return access(path, F_OK) == 0;
}

const device_backend *cuda_device(int *result) {
    ckd_error err = {0};
    device_failure why = {0};
    int devices = 0;
    const device_backend *backend = device_backend_open(&err);
    if (!backend) {
        *result = is_built() ? 1 : 77;
        printf("%s%s\n", *result == 77 ? "SKIP: " : "it was built, but: ", err.message);
        return NULL;
    }
    device_result counted = backend->count(&devices, &why);
    if (counted == DEVICE_DONE && devices > 0) {
        return backend;
    }
    *result = counted == DEVICE_DONE || counted == DEVICE_ABSENT ? 77 : 1;
    printf("%s%s\n", *result == 77 ? "SKIP: " : "",
           counted == DEVICE_DONE ? "there is no device" : why.reason);
    return NULL;
}
