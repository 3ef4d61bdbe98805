/* libckptdelta_s3.so, opened at run time: a library without it needs neither libcurl nor TLS. */
#include "objects/backend.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

static pthread_once_t once = PTHREAD_ONCE_INIT;
static const s3_backend *opened;
static char refused[400];

static void open_backend(void) {
    const char *path = secure_getenv("CKD_S3"), *name = path && *path ? path : "libckptdelta_s3.so";
    void *library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        const char *reason = dlerror();
        snprintf(refused, sizeof(refused), "%s", reason ? reason : "it cannot be opened");
        return;
    }
    /* POSIX: a pointer from dlsym may be called. */
    s3_entry entry;
    *(void **)(void *)&entry = dlsym(library, S3_ENTRY);
    const s3_backend *found = entry ? entry() : NULL;
    if (!found || found->version != S3_VERSION) {
        snprintf(refused, sizeof(refused), "%s belongs to another version of ckptdelta", name);
        dlclose(library);
        return;
    }
    opened = found;
}

ckd_status s3_backend_load(const s3_backend **out, ckd_error *err) {
    if (pthread_once(&once, open_backend) != 0 || !opened) {
        return err_set(
            err, CKD_E_UNSUPPORTED,
            "s3:// needs libckptdelta_s3.so, which cannot be loaded: %s. Install libcurl 7.88 or newer and "
            "libexpat (Debian: libcurl4, libexpat1); to build it, also their headers (libcurl4-openssl-dev, "
            "libexpat1-dev, libssl-dev, libjansson-dev), or name it in CKD_S3",
            refused);
    }
    *out = opened;
    return CKD_OK;
}
