/*
 * bench_ways: files as saves write them, in each way that base/file.h has.
 *
 *   bench_ways [--mb N,N,...] [--coding-ms N] [--repeats N] [--json FILE]
 *
 * Of files of so many MB, written in stretches of 128 KiB, each way in turns, medians: milliseconds until all is handed over and until it is durable, processor time
 * of the process, the sum of the last two a MB, and milliseconds to read the file once afterwards, as the next save reads its parent. --coding-ms: as long is computed for each MB
 * in between, as by a save. In $TMPDIR, or /tmp.
 */
#include <argp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/file.h"
#include "bench/support.h"

enum { SIZES_MAX = 8, REPEATS_MAX = 31, STRETCH = 128 << 10, FIGURES = 5 };
static const char *const way_names[FILE_WAYS] = {"buffered", "direct", "io_uring"};
static const char *const figure_names[FIGURES] = {"handed_over_ms", "durable_ms", "processor_ms",
                                                  "sum_ms_per_mb", "read_back_ms"};

typedef struct options {
    int sizes[SIZES_MAX], size_count, repeats;
    double coding_ms;
    const char *json;
} options;

static void must(ckd_status status, const ckd_error *err) {
    if (status != CKD_OK) {
        fprintf(stderr, "bench_ways: %s\n", err->message);
        exit(1);
    }
}

static double processor_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Computes for so long; the processor time of it is no part of writing. */
static void compute(double ms) {
    for (double until = processor_seconds() + ms / 1e3; ms > 0 && processor_seconds() < until;) {
    }
}

/* false: this way is not to be had here. */
static int write_once(double figures[FIGURES], const char *path, file_way way, int mb, double coding_ms,
                      const uint8_t *data) {
    ckd_error err = {0};
    file_writer *f;
    file_reader *r;
    double begun = bench_seconds(), worked = processor_seconds();
    must(file_create_way(&f, path, 1 << 20, way, NULL, &err), &err);
    int had = file_way_of(f) == way;
    for (uint64_t at = 0; at < (uint64_t)mb * 1000000 && had; at += STRETCH) {
        compute(coding_ms * STRETCH / 1e6);
        must(file_append(f, data, STRETCH, &err), &err);
    }
    figures[0] = 1e3 * (bench_seconds() - begun);
    must(file_sync(f, &err), &err);
    figures[1] = 1e3 * (bench_seconds() - begun);
    figures[2] = 1e3 * (processor_seconds() - worked);
    figures[3] = (figures[1] + figures[2]) / mb;
    must(file_close(f, &err), &err);
    uint8_t *to = malloc(1 << 20);
    must(file_open_read(&r, path, &err), &err);
    begun = bench_seconds();
    for (uint64_t at = 0; at + (1 << 20) <= file_size(r); at += 1 << 20) {
        must(file_read_at(r, at, to, 1 << 20, &err), &err);
    }
    figures[4] = 1e3 * (bench_seconds() - begun);
    file_close_read(r);
    free(to);
    must(file_remove(path, false, &err), &err);
    return had;
}

static int ascending(const void *a, const void *b) {
    const double *x = a, *y = b;
    return (*x > *y) - (*x < *y);
}

static void report(FILE *json, int first, int mb, file_way way, double all[FIGURES][REPEATS_MAX],
                   int repeats) {
    printf("%8d  %-9s", mb, way_names[way]);
    if (json) {
        fprintf(json, "%s\n  {\"mb\": %d, \"way\": \"%s\"", first ? "" : ",", mb, way_names[way]);
    }
    for (int i = 0; i < FIGURES; i++) {
        qsort(all[i], (size_t)repeats, sizeof(double), ascending);
        double median =
            repeats % 2 ? all[i][repeats / 2] : (all[i][repeats / 2 - 1] + all[i][repeats / 2]) / 2;
        printf(i == 3 ? " %12.3f" : " %12.1f", median);
        if (json) {
            fprintf(json, ", \"%s\": %.4g", figure_names[i], median);
        }
    }
    printf("   %.0f to %.0f\n", all[1][0], all[1][repeats - 1]);
    if (json) {
        fprintf(json, ", \"durable_least_ms\": %.4g, \"durable_most_ms\": %.4g}", all[1][0],
                all[1][repeats - 1]);
    }
}

static void measure(const options *o, const char *path) {
    static double all[FILE_WAYS][FIGURES][REPEATS_MAX];
    uint8_t *data = malloc(STRETCH);
    for (int i = 0; i < STRETCH; i++) {
        data[i] = (uint8_t)rand();
    }
    FILE *json = o->json ? fopen(o->json, "w") : NULL;
    if (json) {
        fprintf(json, "{\"machine\": \"%s\", \"coding_ms_per_mb\": %g, \"repeats\": %d, \"files\": [",
                bench_machine(), o->coding_ms, o->repeats);
    }
    printf("%s\n%8s  %-9s %12s %12s %12s %12s %12s   durable\n", bench_machine(), "MB", "way", "handed over",
           "durable ms", "processor", "sum/MB", "read back");
    for (int s = 0; s < o->size_count; s++) {
        int had[FILE_WAYS];
        for (int repeat = 0; repeat < o->repeats; repeat++) {
            for (file_way way = FILE_BUFFERED; way <= FILE_URING; way++) {
                double figures[FIGURES];
                had[way] = write_once(figures, path, way, o->sizes[s], o->coding_ms, data);
                for (int i = 0; i < FIGURES; i++) {
                    all[way][i][repeat] = figures[i];
                }
            }
        }
        for (file_way way = FILE_BUFFERED; way <= FILE_URING; way++) {
            if (had[way]) {
                report(json, s == 0 && way == FILE_BUFFERED, o->sizes[s], way, all[way], o->repeats);
            }
        }
    }
    if (json) {
        fputs("]}\n", json);
        fclose(json);
    }
    free(data);
}

enum { O_MB = 0x100, O_CODING, O_REPEATS, O_JSON };

static error_t parse_option(int key, char *text, struct argp_state *state) {
    options *o = state->input;
    char *end;
    switch (key) {
    case O_MB:
        o->size_count = 0;
        do {
            long mb = strtol(text, &end, 10);
            if (mb < 1 || mb > 100000 || o->size_count == SIZES_MAX || (*end && *end != ',')) {
                argp_error(state, "--mb takes up to %d numbers", SIZES_MAX);
            }
            o->sizes[o->size_count++] = (int)mb;
            text = end + 1;
        } while (*end == ',');
        return 0;
    case O_CODING:
        o->coding_ms = strtod(text, NULL);
        return 0;
    case O_REPEATS:
        o->repeats = atoi(text);
        if (o->repeats < 1 || o->repeats > REPEATS_MAX) {
            argp_error(state, "--repeats takes 1 to %d", REPEATS_MAX);
        }
        return 0;
    case O_JSON:
        o->json = text;
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

int main(int argc, char **argv) {
    static const struct argp_option option_table[] = {
        {"mb", O_MB, "N,N,...", 0, "sizes of files (4,64,256)", 0},
        {"coding-ms", O_CODING, "N", 0, "compute as long for each MB (0)", 0},
        {"repeats", O_REPEATS, "N", 0, "of each (9)", 0},
        {"json", O_JSON, "FILE", 0, "write the results there, too", 0},
        {0},
    };
    const struct argp argp = {
        .options = option_table, .parser = parse_option, .doc = "Ways to write a file."};
    options o = {.sizes = {4, 64, 256}, .size_count = 3, .repeats = 9};
    argp_parse(&argp, argc, argv, ARGP_NO_ARGS, NULL, &o);
    const char *temporary = getenv("TMPDIR");
    char dir[3900], path[4000];
    snprintf(dir, sizeof(dir), "%s/bench-ways-XXXXXX", temporary && *temporary ? temporary : "/tmp");
    if (!mkdtemp(dir)) {
        perror("bench_ways: cannot create a temporary directory");
        return 1;
    }
    snprintf(path, sizeof(path), "%s/file", dir);
    measure(&o, path);
    bench_remove_tree(dir);
    return 0;
}
