/* What saves cost the example trainer, a real one: whole runs of it, in turns. */
#include <libgen.h>
#include <stdlib.h>
#include <unistd.h>

#include "bench/stall.h"
#include "bench/support.h"

static const char *const names[MODES] = {
    [NONE] = "none", [SYNCHRONOUS] = "its own saves", [COPY] = "session, copy", [LAZY] = "session, lazy"};

static double run_once(const options *o, const char *dir, mode how, int repeat) {
    char store[4096], steps[16], every[16];
    const char *arguments[24];
    int n = 0;
    snprintf(store, sizeof(store), "%s/gpt-%d-%d", dir, (int)how, repeat);
    snprintf(steps, sizeof(steps), "%d", o->trainer);
    snprintf(every, sizeof(every), "%d", o->every ? o->every : 10);
    const char *const all[] = {"--steps", steps,       "--width", "128",         "--layers",
                               "4",       "--threads", "1",       "--log-every", steps};
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
        arguments[n++] = all[i];
    }
    if (how != NONE) {
        const char *const saving[] = {"--store", store, "--save-every", every};
        for (size_t i = 0; i < sizeof(saving) / sizeof(saving[0]); i++) {
            arguments[n++] = saving[i];
        }
    }
    if (how >= COPY) {
        arguments[n++] = "--background";
        arguments[n++] = how == LAZY ? "lazy" : "copy";
    }
    arguments[n] = NULL;
    double begun = bench_seconds();
    bench_run_trainer(arguments);
    double took = bench_seconds() - begun;
    bench_remove_tree(store);
    return took;
}

static int is_run(mode how) {
    return how != MEMCPY && how != MEMCPY_TWO;
}

/* The trainer finds a slow disk: bench/slow_disk.c, which stands beside this program. */
static void slow_down(const options *o) {
    char self[4096], library[4200], rate[32];
    ssize_t n = readlink("/proc/self/exe", self, sizeof(self) - 1);
    self[n > 0 ? n : 0] = 0;
    snprintf(library, sizeof(library), "%s/slow_disk.so", dirname(self));
    snprintf(rate, sizeof(rate), "%g", o->disk_mb_s);
    if (access(library, R_OK) != 0 || setenv("LD_PRELOAD", library, 1) != 0 ||
        setenv("SLOW_DISK_MB_S", rate, 1) != 0) {
        fprintf(stderr, "bench_stall: %s cannot be used\n", library);
        exit(1);
    }
}

void stall_train(const options *o, const char *dir) {
    if (o->disk_mb_s > 0) {
        slow_down(o);
    }
    double took[MODES][REPEATS_MAX], median[MODES];
    (void)run_once(o, dir, NONE, 0); /* what is read for the first time */
    for (int repeat = 0; repeat < o->repeats; repeat++) {
        for (mode how = NONE; how < MODES; how++) {
            if (!is_run(how)) {
                continue;
            }
            took[how][repeat] = run_once(o, dir, how, repeat);
        }
    }
    FILE *json = o->json ? fopen(o->json, "w") : NULL;
    printf("%s\ntrain_gpt, one thread, %d steps, a save every %d; whole runs, medians of %d", bench_machine(),
           o->trainer, o->every ? o->every : 10, o->repeats);
    printf(o->disk_mb_s > 0 ? "; a disk of %g MB/s\n" : "\n", o->disk_mb_s);
    if (json) {
        fprintf(
            json,
            "{\"machine\": \"%s\", \"steps\": %d, \"every\": %d, \"repeats\": %d, \"disk_mb_s\": %g, \"modes\": [",
            bench_machine(), o->trainer, o->every ? o->every : 10, o->repeats, o->disk_mb_s);
    }
    for (mode how = NONE; how < MODES; how++) {
        if (!is_run(how)) {
            continue;
        }
        median[how] = stall_median(took[how], o->repeats);
        double over = 100 * (median[how] / median[NONE] - 1);
        printf("%-14s %8.2f s %8.2f %%   (%.2f to %.2f s)\n", names[how], median[how], over, took[how][0],
               took[how][o->repeats - 1]);
        if (json) {
            fprintf(json, "%s\n  {\"mode\": \"%s\", \"seconds\": %.4g, \"overhead_percent\": %.4g}",
                    how ? "," : "", names[how], median[how], over);
        }
    }
    if (json) {
        fputs("]}\n", json);
        fclose(json);
    }
}
