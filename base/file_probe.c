/* What a way of writing takes: tried on a file that goes again. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "base/file_step.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/vfs.h>
#include <time.h>

#define STRETCH ((size_t)128 << 10)

static uint64_t thread_ns(void) {
    struct timespec t;
    return clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t) == 0
               ? (uint64_t)t.tv_sec * 1000000000 + (uint64_t)t.tv_nsec
               : 0;
}

static ckd_status write_all(file_writer *f, const uint8_t *data, uint64_t size, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (uint64_t done = 0; done < size && status == CKD_OK; done += STRETCH) {
        status = file_append(f, data, STRETCH, err);
    }
    return status == CKD_OK ? file_sync(f, err) : status;
}

ckd_status file_try_way(file_trial *out, const char *path, file_way way, uint64_t size, ckd_error *err) {
    *out = (file_trial){0};
    file_writer *f = NULL;
    uint8_t *data = malloc(STRETCH);
    if (data == NULL) {
        return err_nomem(err, STRETCH, "a file to try");
    }
    for (size_t i = 0; i < STRETCH; i += sizeof(uint64_t)) { /* nothing that a disk would make smaller */
        store_le64(data + i, (i + 1) * UINT64_C(0x9e3779b97f4a7c15));
    }
    uint64_t begun = clock_monotonic_ns(), worked = thread_ns();
    ckd_status status = file_create_way(&f, path, (size_t)1 << 20, way, NULL, err);
    if (status == CKD_OK) {
        out->way = file_way_of(f);
        status = write_all(f, data, size, err);
    }
    out->bytes = (size + STRETCH - 1) / STRETCH * STRETCH;
    out->work_ns = thread_ns() - worked + (status == CKD_OK ? file_helper_ns(f) : 0);
    out->wall_ns = clock_monotonic_ns() - begun;
    file_discard(f);
    free(data);
    return status;
}

void dir_device(char out[DIR_DEVICE], const char *path) {
    struct statfs fs;
    int id[2] = {0, 0};
    out[0] = '\0';
    if (statfs(path, &fs) == 0) {
        memcpy(id, &fs.f_fsid, sizeof(id) < sizeof(fs.f_fsid) ? sizeof(id) : sizeof(fs.f_fsid));
        snprintf(out, DIR_DEVICE, "%lx-%08x%08x", (unsigned long)fs.f_type, (unsigned)id[0], (unsigned)id[1]);
    }
}
