#include "bench/support/support.h"

#include <errno.h>
#include <ftw.h>
#include <libgen.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

/* ---- time and the machine ---- */

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

static void processor(char *out, size_t size) {
    snprintf(out, size, "unknown processor");
    FILE *f = fopen("/proc/cpuinfo", "r");
    char line[256];
    while (f && fgets(line, sizeof(line), f)) {
        char *colon = strchr(line, ':');
        if (strncmp(line, "model name", 10) == 0 && colon) {
            line[strcspn(line, "\n")] = '\0';
            snprintf(out, size, "%s", colon + 2);
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

/* ---- failures ---- */

void bench_die(const char *what, const char *why) {
    fprintf(stderr, "%s: %s: %s\n", program_invocation_short_name, what, why);
    exit(1);
}

void bench_check(ckd_status status, const ckd_error *err) {
    if (status != CKD_OK) {
        fprintf(stderr, "%s: %s (%s %s)\n", program_invocation_short_name, err->message, err->file,
                err->tensor);
        exit(1);
    }
}

void *bench_allocated(void *memory) {
    if (!memory) {
        bench_die("memory", "there is not enough of it");
    }
    return memory;
}

/* ---- files ---- */

int bench_file_exists(const char *path) {
    return access(path, R_OK) == 0;
}

FILE *bench_open_output(const char *path) {
    FILE *f = fopen(path, "w");
    if (!f) {
        bench_die(path, strerror(errno));
    }
    return f;
}

void bench_close_output(FILE *f, const char *path) {
    if (fclose(f) != 0) {
        bench_die(path, strerror(errno));
    }
}

void bench_make_folder(char path[BENCH_PATH], const char *parent) {
    const char *temporary = getenv("TMPDIR");
    parent = parent ? parent : temporary && *temporary ? temporary : "/tmp";
    snprintf(path, BENCH_PATH, "%s/%s-XXXXXX", parent, program_invocation_short_name);
    if (!mkdtemp(path)) {
        bench_die(path, strerror(errno));
    }
}

void bench_beside_program(char path[BENCH_PATH], const char *name) {
    char self[BENCH_PATH];
    ssize_t n = readlink("/proc/self/exe", self, sizeof(self) - 1);
    self[n > 0 ? n : 0] = '\0';
    snprintf(path, BENCH_PATH, "%.3800s/%s", dirname(self), name);
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
