#include <stdlib.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "bench/support/support.h"

void bench_run_trainer(const char *const *arguments) {
    fprintf(stderr, "training (kept for the next time):");
    for (const char *const *a = arguments; *a; a++) {
        fprintf(stderr, " %s", *a);
    }
    fprintf(stderr, "\n");
    bench_run_trainer_into("/dev/null", arguments);
}

void bench_run_trainer_into(const char *output, const char *const *arguments) {
    char trainer[BENCH_PATH];
    const char *argv[64];
    int argc = 0;
    bench_beside_program(trainer, "../train_gpt");
    argv[argc++] = trainer;
    mkdir("bench/series", 0777);
    if (!getenv("TEXT")) { /* train_gpt reads TEXT itself */
        argv[argc++] = "--text";
        argv[argc++] = "bench/series/text";
        argv[argc++] = "--keep-text";
    }
    while (*arguments && argc < 63) {
        argv[argc++] = *arguments++;
    }
    argv[argc] = NULL;
    fflush(stdout); /* otherwise the child prints it once more */
    pid_t child = fork();
    if (child == 0) {
        if (freopen(output, "w", stdout)) {
            execv(trainer, (char *const *)argv);
        }
        _exit(127);
    }
    int status = 0;
    if (child < 0 || waitpid(child, &status, 0) < 0 || status != 0) {
        bench_die(trainer, "failed");
    }
}
