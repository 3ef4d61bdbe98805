/* The results of bench_stall as a table and as JSON. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench/session/stall.h"
#include "bench/support/support.h"

const char *const stall_mode_names[MODES] = {"none",        "memcpy",        "memcpy, two",
                                             "synchronous", "session, copy", "session, lazy"};

double stall_median(double *values, int count) {
    bench_sort(values, (size_t)count);
    return count == 0 ? NAN : count % 2 ? values[count / 2] : (values[count / 2 - 1] + values[count / 2]) / 2;
}

double *stall_iterations(int *count, const results *r, const options *o, mode how) {
    double *all = bench_allocated(calloc((size_t)(o->steps * o->repeats) + 1, sizeof(*all)));
    *count = 0;
    for (int i = 0; i < o->repeats; i++) {
        const outcome *of = &r->all[how][i];
        memcpy(all + *count, of->wholes, (size_t)of->steps * sizeof(*all));
        *count += of->steps;
    }
    bench_sort(all, (size_t)*count);
    return all;
}

void stall_free(results *r, const options *o) {
    for (mode how = NONE; how < MODES; how++) {
        for (int i = 0; i < o->repeats; i++) {
            free(r->all[how][i].wholes);
            free(r->all[how][i].fences);
            free(r->all[how][i].calls);
        }
    }
    free(r);
}

/* ---- medians of the repeats ---- */

#define MEDIAN_OF(field)                                         \
    static double median_##field(const outcome *of, int count) { \
        double values[REPEATS_MAX];                              \
        for (int i = 0; i < count; i++) {                        \
            values[i] = of[i].field;                             \
        }                                                        \
        return stall_median(values, count);                      \
    }
MEDIAN_OF(step_ms)
MEDIAN_OF(stall_ms)
MEDIAN_OF(stall_most_ms)
MEDIAN_OF(slowed)
MEDIAN_OF(overhead)
MEDIAN_OF(durable_ms)
MEDIAN_OF(saves)

static const char *const stage_names[STAGES] = {"analyse_ms", "encode_ms", "write_ms",
                                                "sync_ms",    "total_ms",  "overlap"};

static double median_stage(const outcome *of, int count, int stage) {
    double values[REPEATS_MAX];
    for (int i = 0; i < count; i++) {
        values[i] = of[i].stages[stage];
    }
    return stall_median(values, count);
}

static void print_number(FILE *to, double x) {
    if (x == x) {
        fprintf(to, "%.4g", x);
    } else {
        fputs("null", to);
    }
}

/* ---- the distribution of iterations ---- */

static const struct {
    const char *name;
    double share;
} percentiles[] = {{"p50_ms", .5}, {"p90_ms", .9}, {"p99_ms", .99}, {"max_ms", 1}};
enum { PERCENTILES = sizeof(percentiles) / sizeof(percentiles[0]) };

/* Each is the smallest value that at least such a share of iterations does not exceed. */
static void find_percentiles(double out[PERCENTILES], const results *r, const options *o, mode how) {
    int count;
    double *ms = stall_iterations(&count, r, o, how);
    for (int i = 0; i < PERCENTILES; i++) {
        int at = (int)ceil(percentiles[i].share * count) - 1;
        out[i] = count ? ms[at < 0 ? 0 : at] : NAN;
    }
    free(ms);
}

static void print_iterations(const results *r, const options *o) {
    printf("\n%-14s %10s %10s %10s %10s   ms of an iteration, with its waits\n", "mode", "p50", "p90", "p99",
           "max");
    for (mode how = NONE; how < MODES; how++) {
        double of[PERCENTILES];
        if (stall_has(o, how)) {
            find_percentiles(of, r, o, how);
            printf("%-14s %10.1f %10.1f %10.1f %10.1f\n", stall_mode_names[how], of[0], of[1], of[2], of[3]);
        }
    }
}

static void print_stages(const results *r, const options *o) {
    printf("\n%-14s %10s %10s %10s %10s %10s %10s   ms of a save; stages of all threads\n", "mode", "analyse",
           "encode", "write", "sync", "total", "overlap");
    for (mode how = COPY; how < MODES; how++) {
        printf("%-14s", stall_mode_names[how]);
        for (int i = 0; i < STAGES; i++) {
            printf(i < STAGES - 1 ? " %10.1f" : " %10.2f", median_stage(r->all[how], o->repeats, i));
        }
        printf("\n");
    }
}

static void json_more(FILE *json, const results *r, const options *o, mode how) {
    double of[PERCENTILES];
    find_percentiles(of, r, o, how);
    for (int i = 0; i < PERCENTILES; i++) {
        fprintf(json, ", \"%s\": ", percentiles[i].name);
        print_number(json, of[i]);
    }
    for (int i = 0; i < STAGES && how >= COPY; i++) {
        fprintf(json, ", \"%s\": ", stage_names[i]);
        print_number(json, median_stage(r->all[how], o->repeats, i));
    }
}

/* ---- all of it ---- */

void stall_report(results *r, const options *o) {
    printf("%s\n%.0f MB of state; ", bench_machine(), o->mb);
    printf(o->every ? "every %.0f steps" : "overhead at most %.3g %%",
           o->every ? (double)o->every : 100 * o->overhead);
    printf(o->disk_mb_s > 0 ? ", a disk of %.0f MB/s\n\n" : "\n\n", o->disk_mb_s);
    printf("%-14s %6s %9s %10s %10s %9s %10s %11s\n", "mode", "saves", "step ms", "stall ms", "at most",
           "slowed %", "overhead %", "durable ms");
    FILE *json = o->json ? bench_open_output(o->json) : NULL;
    if (json) {
        fprintf(
            json,
            "{\"machine\": \"%s\", \"state_mb\": %g, \"every\": %d, \"overhead_asked\": %g, \"disk_mb_s\": %g, \"fidelity\": \"%s\", ",
            bench_machine(), o->mb, o->every, o->every ? 0 : o->overhead, o->disk_mb_s,
            ckd_fidelity_name(o->fidelity));
        fprintf(json, "\"steps\": %d, \"repeats\": %d, \"snapshots\": %d, \"modes\": [", o->steps, o->repeats,
                o->snapshots);
    }
    for (mode how = NONE; how < MODES; how++) {
        if (!stall_has(o, how)) {
            continue;
        }
        const outcome *of = r->all[how];
        const struct {
            const char *name;
            double value;
        } figures[] = {{"saves", median_saves(of, o->repeats)},
                       {"step_ms", median_step_ms(of, o->repeats)},
                       {"stall_ms", median_stall_ms(of, o->repeats)},
                       {"stall_most_ms", median_stall_most_ms(of, o->repeats)},
                       {"slowed_percent", median_slowed(of, o->repeats)},
                       {"overhead_percent", median_overhead(of, o->repeats)},
                       {"durable_ms", median_durable_ms(of, o->repeats)}};
        printf("%-14s %6.0f %9.1f %10.2f %10.2f %9.2f %10.2f %11.0f\n", stall_mode_names[how],
               figures[0].value, figures[1].value, figures[2].value, figures[3].value, figures[4].value,
               figures[5].value, figures[6].value);
        if (json) {
            fprintf(json, "%s\n  {\"mode\": \"%s\"", how ? "," : "", stall_mode_names[how]);
            for (size_t i = 0; i < sizeof(figures) / sizeof(figures[0]); i++) {
                fprintf(json, ", \"%s\": ", figures[i].name);
                print_number(json, figures[i].value);
            }
            json_more(json, r, o, how);
            fputs("}", json);
        }
    }
    print_iterations(r, o);
    print_stages(r, o);
    if (json) {
        fputs("]", json);
    }
    stall_check(r, o, json);
    if (json) {
        fputs("}\n", json);
        bench_close_output(json, o->json);
    }
}
