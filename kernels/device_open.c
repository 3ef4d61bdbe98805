/* Opens the device backend with dlopen when a device is first used, so the library itself does not link with CUDA. */
#include "kernels/device_open.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

static pthread_once_t once = PTHREAD_ONCE_INIT;
static const device_backend *opened, *_Atomic used;
static char refused[256]; /* why there is no backend */

static void open_backend(void) {
    const char *path = getenv("CKD_CUDA"), *name = path && *path ? path : "libckptdelta_cuda.so";
    void *library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        const char *reason = dlerror();
        snprintf(refused, sizeof(refused), "%s", reason ? reason : "it cannot be opened");
        return;
    }
    /* The POSIX way to convert dlsym's object pointer to a function pointer. */
    device_entry entry;
    *(void **)(void *)&entry = dlsym(library, DEVICE_ENTRY);
    const device_backend *found = entry ? entry() : NULL;
    if (!found || found->version != DEVICE_VERSION) {
        snprintf(refused, sizeof(refused), "%s belongs to another version of ckptdelta", name);
        dlclose(library);
        return;
    }
    opened = found;
}

const device_backend *device_backend_open(ckd_error *err) {
    const device_backend *other = used;
    if (other) {
        return other;
    }
    if (pthread_once(&once, open_backend) != 0 || !opened) {
        err_set(err, CKD_E_DEVICE, "libckptdelta_cuda.so, which is needed for devices, cannot be loaded: %s",
                refused);
    }
    return opened;
}

ckd_status device_status(const device_failure *why, int device, ckd_error *err) {
    switch (why->result) {
    case DEVICE_DONE:
        return CKD_OK;
    case DEVICE_FULL:
        return err_set(err, CKD_E_NOMEM, "device %d: %s: %s", device, why->call, why->reason);
    default:
        return err_set(err, CKD_E_DEVICE, "device %d: %s: %s", device, why->call, why->reason);
    }
}

void device_backend_use(const device_backend *backend) {
    used = backend;
}
