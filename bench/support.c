#include "bench/support.h"

#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static double clock_seconds(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

double bench_seconds(void) {
    return clock_seconds(CLOCK_MONOTONIC);
}

double bench_cpu_seconds(void) {
    return clock_seconds(CLOCK_PROCESS_CPUTIME_ID);
}

static void processor(char *out, size_t room) {
    snprintf(out, room, "unknown processor");
    FILE *f = fopen("/proc/cpuinfo", "r");
    char line[256];
    while (f && fgets(line, sizeof(line), f)) {
        char *colon = strchr(line, ':');
        if (strncmp(line, "model name", 10) == 0 && colon) {
            line[strcspn(line, "\n")] = '\0';
            snprintf(out, room, "%s", colon + 2);
            break;
        }
    }
    if (f) {
        fclose(f);
    }
}

double bench_bytes_read(void) {
    FILE *f = fopen("/proc/self/io", "r");
    char key[64];
    unsigned long long value = 0;
    while (f && fscanf(f, "%63s %llu", key, &value) == 2 && strcmp(key, "rchar:") != 0) {
    }
    if (f) {
        fclose(f);
    }
    return (double)value;
}

const char *bench_machine(void) {
    static char text[512];
    char cpu[200], date[32];
    time_t now = time(NULL);
    struct tm utc;
    strftime(date, sizeof(date), "%Y-%m-%d", gmtime_r(&now, &utc));
    processor(cpu, sizeof(cpu));
    double memory = (double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGESIZE) / (1u << 30);
    snprintf(text, sizeof(text), "%s, %ld cores, %.0f GiB, gcc %s, %s", cpu, sysconf(_SC_NPROCESSORS_ONLN),
             memory, __VERSION__, date);
    return text;
}

/* train_gpt stands one folder above the benchmarks' programs. */
static void trainer_path(char *out, size_t room) {
    char self[4096];
    ssize_t n = readlink("/proc/self/exe", self, sizeof(self) - 1);
    self[n > 0 ? n : 0] = '\0';
    for (int up = 0; up < 2 && strrchr(self, '/'); up++) {
        *strrchr(self, '/') = '\0';
    }
    snprintf(out, room, "%s/train_gpt", self);
}

int bench_file_exists(const char *path) {
    return access(path, R_OK) == 0;
}

void bench_run_trainer(const char *const *arguments) {
    fprintf(stderr, "training (kept for the next time):");
    for (const char *const *a = arguments; *a; a++) {
        fprintf(stderr, " %s", *a);
    }
    fprintf(stderr, "\n");
    bench_run_trainer_into("/dev/null", arguments);
}

void bench_run_trainer_into(const char *output, const char *const *arguments) {
    char trainer[4200];
    const char *argv[64];
    int argc = 0;
    trainer_path(trainer, sizeof(trainer));
    argv[argc++] = trainer;
    mkdir("bench/series", 0777);
    if (!getenv("TEXT")) { /* else the text is that file */
        argv[argc++] = "--text";
        argv[argc++] = "bench/series/text";
        argv[argc++] = "--keep-text";
    }
    while (*arguments && argc < 63) {
        argv[argc++] = *arguments++;
    }
    argv[argc] = NULL;
    fflush(stdout); /* or the child prints it once more */
    pid_t child = fork();
    if (child == 0) {
        if (freopen(output, "w", stdout)) {
            execv(trainer, (char *const *)argv);
        }
        _exit(127);
    }
    int status = 0;
    if (child < 0 || waitpid(child, &status, 0) < 0 || status != 0) {
        fprintf(stderr, "%s failed (status %d)\n", trainer, status);
        exit(1);
    }
}

void bench_train(const char *store, const char *run, int saves, int every) {
    char steps[32], interval[32];
    snprintf(steps, sizeof(steps), "%d", saves * every);
    snprintf(interval, sizeof(interval), "%d", every);
    mkdir("bench/series", 0777);
    bench_run_trainer((const char *[]){"--store", store, "--run", run, "--steps", steps, "--save-every",
                                       interval, "--schedule", "constant", "--resume", NULL});
}

static int remove_one(const char *path, const struct stat *info, int kind, struct FTW *where) {
    (void)info;
    (void)kind;
    (void)where;
    return remove(path);
}

void bench_remove_tree(const char *path) {
    nftw(path, remove_one, 16, FTW_DEPTH | FTW_PHYS);
}
