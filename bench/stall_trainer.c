/* What saves cost the example trainer, a real one: whole runs of it, in turns. */
#include <stdlib.h>

#include "bench/stall.h"
#include "bench/support.h"

static const char *const names[MODES] = {"none", "its own saves", "session, copy", "session, lazy"};

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

void stall_train(const options *o, const char *dir) {
    double took[MODES][REPEATS_MAX], median[MODES];
    (void)run_once(o, dir, NONE, 0); /* what is read for the first time */
    for (int repeat = 0; repeat < o->repeats; repeat++) {
        for (mode how = NONE; how < MODES; how++) {
            took[how][repeat] = run_once(o, dir, how, repeat);
        }
    }
    FILE *json = o->json ? fopen(o->json, "w") : NULL;
    printf("%s\ntrain_gpt, one thread, %d steps, a save every %d; whole runs, medians of %d\n",
           bench_machine(), o->trainer, o->every ? o->every : 10, o->repeats);
    if (json) {
        fprintf(json, "{\"machine\": \"%s\", \"steps\": %d, \"every\": %d, \"repeats\": %d, \"modes\": [",
                bench_machine(), o->trainer, o->every ? o->every : 10, o->repeats);
    }
    for (mode how = NONE; how < MODES; how++) {
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
