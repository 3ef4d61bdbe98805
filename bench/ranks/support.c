#include <errno.h>
#include <ftw.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "bench/ranks/ranks.h"
#include "bench/support/support.h"

ckd_store *ranks_open(const char *path, ckd_open_mode mode) {
    ckd_store *store;
    ckd_error err = {0};
    ckd_store_options o = CKD_STORE_OPTIONS_INIT;
    o.threads = 1;
    bench_check(ckd_store_open(&store, path, mode, &o, &err), &err);
    return store;
}

unsigned ranks_run(uint32_t world, int (*act)(void *context, uint32_t rank), void *context) {
    pid_t pids[64];
    unsigned succeeded = 0;
    fflush(NULL);
    for (uint32_t r = 0; r < world; r++) {
        pids[r] = fork();
        if (pids[r] == 0) {
            _exit(act(context, r));
        }
        if (pids[r] < 0) {
            bench_die("fork", strerror(errno));
        }
    }
    for (uint32_t r = 0; r < world; r++) {
        int state = 1;
        waitpid(pids[r], &state, 0);
        succeeded += state == 0;
    }
    return succeeded;
}

const char *ranks_new_path(const ranks_options *o, const char *name) {
    static char path[4096];
    snprintf(path, sizeof(path), "%s/%s", o->dir, name);
    bench_remove_tree(path);
    return path;
}

double ranks_quantile(const double *sorted, size_t count, double share) {
    size_t at = (size_t)((double)count * share);
    return count ? sorted[at < count ? at : count - 1] : 0;
}

static double tree_bytes;

static int add_file(const char *path, const struct stat *info, int kind, struct FTW *where) {
    (void)path;
    (void)where;
    tree_bytes += kind == FTW_F ? (double)info->st_size : 0;
    return 0;
}

double ranks_tree_bytes(const char *path) {
    tree_bytes = 0;
    nftw(path, add_file, 16, FTW_PHYS);
    return tree_bytes;
}
