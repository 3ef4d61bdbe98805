/* The cost of saves to the example trainer: whole runs of it, in turns. */
#include <stdlib.h>

#include "bench/session/stall.h"
#include "bench/support/support.h"

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

/* Gives the trainer a slow disk. slow_disk.so lies beside this program. */
static void slow_down(const options *o) {
    char library[BENCH_PATH], rate[32];
    bench_beside_program(library, "slow_disk.so");
    snprintf(rate, sizeof(rate), "%g", o->disk_mb_s);
    if (!bench_file_exists(library) || setenv("LD_PRELOAD", library, 1) != 0 ||
        setenv("SLOW_DISK_MB_S", rate, 1) != 0) {
        bench_die(library, "it cannot be used");
    }
}

void stall_train(const options *o, const char *dir) {
    if (o->disk_mb_s > 0) {
        slow_down(o);
    }
    double took[MODES][REPEATS_MAX], median[MODES];
    (void)run_once(o, dir, NONE, 0); /* reads files into the page cache */
    for (int repeat = 0; repeat < o->repeats; repeat++) {
        for (mode how = NONE; how < MODES; how++) {
            if (is_run(how)) {
                took[how][repeat] = run_once(o, dir, how, repeat);
            }
        }
    }
    FILE *json = o->json ? bench_open_output(o->json) : NULL;
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
        bench_close_output(json, o->json);
    }
}
