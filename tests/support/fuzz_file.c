#include "tests/support/fuzz_file.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static char path[96];
static int fd = -1;

static void remove_file(void) {
    unlink(path);
}

const char *fuzz_file(const uint8_t *data, size_t size) {
    if (fd < 0) {
        const char *folder = access("/dev/shm", W_OK) == 0 ? "/dev/shm" : getenv("TMPDIR");
        snprintf(path, sizeof(path), "%.60s/ckptdelta-fuzz-XXXXXX", folder ? folder : "/tmp");
        fd = mkstemp(path);
        if (fd < 0) {
            abort();
        }
        atexit(remove_file);
    }
    if (ftruncate(fd, 0) != 0 || (size > 0 && pwrite(fd, data, size, 0) != (ssize_t)size)) {
        abort();
    }
    return path;
}
