/*
 * slow_disk.so: LD_PRELOAD for a process that shall have a slower disk, of SLOW_DISK_MB_S megabytes a second. It slows
 * down new files that are made durable, and not files that are changed in place, as SQLite's are.
 */
#include "bench/support/slow_disk.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static slow_disk disk = {.mutex = PTHREAD_MUTEX_INITIALIZER};

__attribute__((constructor)) static void begin(void) {
    const char *text = getenv("SLOW_DISK_MB_S");
    disk.rate = text ? 1e6 * strtod(text, NULL) : 0;
}

__attribute__((visibility("default"))) int fdatasync(int fd) {
    int (*real)(int) = (int (*)(int))dlsym(RTLD_NEXT, "fdatasync");
    char link[64], path[4096];
    snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof(path) - 1);
    path[length > 0 ? length : 0] = 0;
    if (strstr(path, ".tmp")) {
        slow_disk_wait(&disk, fd, "", AT_EMPTY_PATH);
    }
    return real(fd);
}
