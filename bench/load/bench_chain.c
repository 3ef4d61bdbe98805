/*
 * bench_chain: the cost of loads along a run, compared with loads of a base.
 *
 *   bench_chain [--store DIR] [--run NAME] [--fidelity F] [--repeats N] [--json FILE] [--saves N] [--every N] [--max-load-cost X]
 *
 * Without --store it first trains a run (train_gpt, 100 saves). It then loads the state of every checkpoint from disk,
 * and an exact, standalone base of the very same state. The file cache is dropped before each load. Bytes are those
 * that the process read, times are medians of the repeats. With --fidelity near or coarse it saves the states once more
 * in that fidelity, and loads these checkpoints. Sizes of a whole run count every file of its store. Uses the public
 * API only.
 */
#include <ckptdelta.h>
#include <dirent.h>
#include <fcntl.h>
#include <math.h>
#include <stdlib.h>
#include <unistd.h>

#include "bench/support/support.h"

typedef struct options {
    const char *store, *run, *json;
    int repeats, saves, every;
    ckd_fidelity fidelity;
    double max_load_cost;
} options;

typedef struct measure {
    double seconds; /* median, wall clock */
    double cpu;     /* median, processor time: little affected by other work on the machine */
    double bytes;   /* read from files */
} measure;

static void drop_folder(const char *store, const char *folder) {
    char dir[4096], path[8192];
    snprintf(dir, sizeof(dir), "%s/data/%s", store, folder);
    DIR *d = opendir(dir);
    for (struct dirent *e; d && (e = readdir(d));) {
        snprintf(path, sizeof(path), "%s/%s", dir, e->d_name);
        int fd = e->d_name[0] == '.' ? -1 : open(path, O_RDONLY);
        if (fd >= 0) {
            fdatasync(fd);
            posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
            close(fd);
        }
    }
    if (d) {
        closedir(d);
    }
}

/* Removes chunk files and materialized copies from the file cache, so that the next load comes from disk. */
static void drop_cache(const char *store) {
    drop_folder(store, "c");
    drop_folder(store, "k");
}

/* Opening the checkpoint is part of loading it. */
static measure measure_load(ckd_store *store, const char *path, const ckd_checkpoint *c,
                            const ckd_tensor_list *list, void **values, int repeats) {
    measure m = {0, 0, 0};
    double *times = calloc((size_t)repeats, sizeof(*times)), *cpu = calloc((size_t)repeats, sizeof(*cpu));
    for (int i = 0; i < repeats; i++) {
        drop_cache(path);
        double read = bench_bytes_read(), start = bench_seconds(), start_cpu = bench_cpu_seconds();
        ckd_load *load;
        ckd_error err = {0};
        bench_check(ckd_load_begin(&load, store, &c->id, &err), &err);
        bench_load_values(load, list, values);
        ckd_load_end(load);
        times[i] = bench_seconds() - start;
        cpu[i] = bench_cpu_seconds() - start_cpu;
        m.bytes = bench_bytes_read() - read;
    }
    m.seconds = bench_median(times, repeats);
    m.cpu = bench_median(cpu, repeats);
    free(times);
    free(cpu);
    return m;
}

/* A store that the benchmark makes and removes. */
typedef struct scratch {
    char path[BENCH_PATH];
    ckd_store *store;
    int base; /* every checkpoint an exact, standalone base */
    const options *options;
} scratch;

static void open_scratch(scratch *b, const options *o, const char *what, int base,
                         const ckd_store_options *store_options) {
    ckd_error err = {0};
    b->base = base;
    b->options = o;
    snprintf(b->path, sizeof(b->path), "%.4000s.%s-%ld", o->store, what, (long)getpid());
    bench_check(ckd_store_open(&b->store, b->path, CKD_OPEN_CREATE, store_options, &err), &err);
}

static void close_scratch(scratch *b) {
    ckd_store_close(b->store);
    bench_remove_tree(b->path);
}

/* Saves the same state in a scratch store. */
static ckd_checkpoint save_copy(const scratch *b, const ckd_checkpoint *c, const ckd_tensor_list *list,
                                void **values) {
    ckd_save_options o = CKD_SAVE_OPTIONS_INIT;
    o.run = c->run;
    o.step = c->step;
    o.base = b->base;
    o.fidelity = b->base ? CKD_EXACT : b->options->fidelity;
    o.max_load_cost = b->options->max_load_cost;
    ckd_save *save;
    ckd_checkpoint info;
    ckd_error err = {0};
    bench_check(ckd_save_begin(&save, b->store, &o, &err), &err);
    /* Second moments first, then first ones: weights follow them. */
    static const ckd_role order[] = {CKD_ROLE_EXP_AVG_SQ, CKD_ROLE_EXP_AVG, CKD_ROLE_MASTER, CKD_ROLE_WEIGHT,
                                     CKD_ROLE_OTHER};
    for (size_t k = 0; k < sizeof(order) / sizeof(order[0]); k++) {
        for (size_t i = 0; i < list->count; i++) {
            if (list->items[i].role == order[k]) {
                ckd_tensor t = bench_tensor_like(&list->items[i], values[i]);
                bench_check(ckd_save_tensor(save, &t, &err), &err);
            }
        }
    }
    bench_check(ckd_save_commit(&info, save, &err), &err);
    return info;
}

/* A load in base loads of the same state. */
typedef struct ratio {
    double bytes, time, cpu;
} ratio;

static ratio in_base_loads(const measure *m, const measure *base) {
    return (ratio){m->bytes / base->bytes, m->seconds / base->seconds, m->cpu / base->cpu};
}

static void note_worst(ratio *worst, const ratio *r) {
    *worst = (ratio){fmax(worst->bytes, r->bytes), fmax(worst->time, r->time), fmax(worst->cpu, r->cpu)};
}

typedef struct run {
    const options *options;
    ckd_store *store;
    scratch bases, copies;
    ratio worst, worst_newest;
    FILE *json;
} run;

static void print_one(const run *r, const ckd_checkpoint *c, const ckd_checkpoint *base,
                      const measure *base_load, const ratio *load, const ratio *newest, int last) {
    printf("%10llu  %-5s %5u  %8.3f  %8.3f  %8.3f  %7.2f  %7.2f  %7.2f  %7.2f   %7.2f  %7.2f  %7.2f\n",
           (unsigned long long)c->step, ckd_kind_name(c->kind), (unsigned)c->depth,
           (double)c->stored_bytes / 1e6, (double)base->stored_bytes / 1e6,
           (double)c->raw_bytes / (double)c->stored_bytes, c->load_cost, load->bytes, load->time, load->cpu,
           newest->bytes, newest->time, newest->cpu);
    fprintf(
        r->json,
        "    {\"step\": %llu, \"kind\": \"%s\", \"depth\": %u, \"stored_bytes\": %llu, \"base_bytes\": %llu, "
        "\"planned_cost\": %.4f, \"bytes_ratio\": %.4f, \"time_ratio\": %.4f, \"cpu_ratio\": %.4f, "
        "\"newest_bytes_ratio\": %.4f, \"newest_time_ratio\": %.4f, \"newest_cpu_ratio\": %.4f, "
        "\"base_seconds\": %.6f}%s\n",
        (unsigned long long)c->step, ckd_kind_name(c->kind), (unsigned)c->depth,
        (unsigned long long)c->stored_bytes, (unsigned long long)base->stored_bytes, c->load_cost,
        load->bytes, load->time, load->cpu, newest->bytes, newest->time, newest->cpu, base_load->seconds,
        last ? "" : ",");
}

/* One checkpoint of the series. */
typedef struct point {
    ckd_checkpoint measured, base; /* base: of the same state */
    measure base_load, newest;
} point;

/* Saves its state in the scratch stores, and measures it while it is the newest. */
static void save_point(run *r, point *p, const ckd_checkpoint *c) {
    ckd_error err = {0};
    ckd_load *load;
    bench_check(ckd_load_begin(&load, r->store, &c->id, &err), &err);
    int repeats = r->options->repeats;
    const ckd_tensor_list *list = ckd_load_tensors(load);
    void **values = bench_values_new(ckd_load_tensors(load));
    bench_load_values(load, list, values);
    p->base = save_copy(&r->bases, c, list, values);
    ckd_checkpoint copy = save_copy(&r->copies, c, list, values);
    p->measured = r->options->fidelity == CKD_EXACT ? *c : copy;
    p->base_load = measure_load(r->bases.store, r->bases.path, &p->base, list, values, repeats);
    p->newest = measure_load(r->copies.store, r->copies.path, &copy, list, values, repeats);
    bench_values_free(values, ckd_load_tensors(load)->count);
    ckd_load_end(load);
}

/* Measures it once all checkpoints are saved. */
static void measure_point(run *r, const point *p, int last) {
    ckd_error err = {0};
    ckd_load *load;
    int exact = r->options->fidelity == CKD_EXACT;
    ckd_store *store = exact ? r->store : r->copies.store;
    const char *path = exact ? r->options->store : r->copies.path;
    bench_check(ckd_load_begin(&load, store, &p->measured.id, &err), &err);
    void **values = bench_values_new(ckd_load_tensors(load));
    measure ours =
        measure_load(store, path, &p->measured, ckd_load_tensors(load), values, r->options->repeats);
    ratio any = in_base_loads(&ours, &p->base_load), now = in_base_loads(&p->newest, &p->base_load);
    note_worst(&r->worst, &any);
    note_worst(&r->worst_newest, &now);
    print_one(r, &p->measured, &p->base, &p->base_load, &any, &now, last);
    bench_values_free(values, ckd_load_tensors(load)->count);
    ckd_load_end(load);
}

/* Bytes of all files of the store that is measured. */
static double store_bytes(const run *r) {
    ckd_error err = {0};
    ckd_report *report;
    bench_check(
        ckd_store_report(&report, r->options->fidelity == CKD_EXACT ? r->store : r->copies.store, &err),
        &err);
    double bytes = (double)report->stored_bytes;
    ckd_report_free(report);
    return bytes;
}

static void print_sums(const run *r, const point *points, size_t count) {
    double stored = 0, raw = 0;
    size_t deltas = 0;
    for (size_t i = 0; i < count; i++) {
        stored += (double)points[i].measured.stored_bytes;
        raw += (double)points[i].measured.raw_bytes;
        deltas += points[i].measured.kind == CKD_DELTA;
    }
    double of_store = raw / store_bytes(r);
    printf(
        "%zu checkpoints, %zu deltas, %.3fx in all, %.3fx with all files of the store; worst load: %.2f base loads in bytes, %.2f in time, %.2f in "
        "processor time (one thread); of the newest: %.2f, %.2f, %.2f\n",
        count, deltas, raw / stored, of_store, r->worst.bytes, r->worst.time, r->worst.cpu,
        r->worst_newest.bytes, r->worst_newest.time, r->worst_newest.cpu);
    fprintf(
        r->json,
        "  ],\n  \"checkpoints\": %zu, \"deltas\": %zu, \"ratio\": %.4f, \"ratio_of_store\": %.4f, \"worst_bytes\": %.4f, \"worst_time\": "
        "%.4f, \"worst_cpu\": %.4f, \"worst_newest_bytes\": %.4f, \"worst_newest_time\": %.4f, "
        "\"worst_newest_cpu\": %.4f\n}\n",
        count, deltas, raw / stored, of_store, r->worst.bytes, r->worst.time, r->worst.cpu,
        r->worst_newest.bytes, r->worst_newest.time, r->worst_newest.cpu);
}

static void measure_run(const options *o, FILE *json) {
    run r = {.options = o, .json = json};
    ckd_store_options one_thread = CKD_STORE_OPTIONS_INIT;
    one_thread.threads = 1;
    ckd_checkpoint_list *list;
    ckd_error err = {0};
    bench_check(ckd_store_open(&r.store, o->store, CKD_OPEN_READ, &one_thread, &err), &err);
    bench_check(ckd_store_list(&list, r.store, o->run, &err), &err);
    open_scratch(&r.bases, o, "bases", 1, &one_thread);
    open_scratch(&r.copies, o, "copies", 0, &one_thread);
    printf("%63s  %25s   %25s\n", "", "any checkpoint", "the newest");
    printf("%10s  %-5s %5s  %8s  %8s  %8s  %7s  %7s  %7s  %7s   %7s  %7s  %7s\n", "step", "kind", "depth",
           "MB", "base MB", "ratio", "planned", "bytes", "time", "cpu", "bytes", "time", "cpu");
    point *points = bench_allocated(calloc(list->count + 1, sizeof(*points)));
    for (size_t i = 0; i < list->count; i++) {
        save_point(&r, &points[i], &list->items[i]);
    }
    for (size_t i = 0; i < list->count; i++) {
        measure_point(&r, &points[i], i + 1 == list->count);
    }
    print_sums(&r, points, list->count);
    free(points);
    ckd_checkpoint_list_free(list);
    ckd_store_close(r.store);
    close_scratch(&r.bases);
    close_scratch(&r.copies);
}

static void train(char store[BENCH_PATH], const options *o) {
    char steps[32], interval[32];
    snprintf(store, BENCH_PATH, "bench/series/chain-%d-every-%d", o->saves, o->every);
    snprintf(steps, sizeof(steps), "%d", o->saves * o->every);
    snprintf(interval, sizeof(interval), "%d", o->every);
    bench_run_trainer((const char *[]){"--store", store, "--run", o->run, "--steps", steps, "--save-every",
                                       interval, "--schedule", "constant", "--resume", NULL});
}

int main(int argc, char **argv) {
    options o = {.fidelity = CKD_EXACT, .run = "gpt", .repeats = 5, .saves = 100, .every = 10};
    const bench_option known[] = {{"--store", .text = &o.store},
                                  {"--run", .text = &o.run},
                                  {"--json", .text = &o.json},
                                  {"--fidelity", .fidelity = &o.fidelity},
                                  {"--max-load-cost", .real = &o.max_load_cost},
                                  {"--repeats", .number = &o.repeats, .least = 1, .most = 1000},
                                  {"--saves", .number = &o.saves, .least = 1, .most = 100000},
                                  {"--every", .number = &o.every, .least = 1, .most = 100000}};
    bench_parse(known, sizeof(known) / sizeof(known[0]), argc, argv);
    char trained[BENCH_PATH], results[128];
    if (!o.json) {
        snprintf(results, sizeof(results), "bench/results/bench_chain%s%s.json",
                 o.fidelity == CKD_EXACT ? "" : "-",
                 o.fidelity == CKD_EXACT ? "" : ckd_fidelity_name(o.fidelity));
        o.json = results;
    }
    if (!o.store) {
        train(trained, &o);
        o.store = trained;
    }
    FILE *json = bench_open_output(o.json);
    fprintf(json, "{\n  \"benchmark\": \"chain\",\n  \"machine\": \"%s\",\n  \"loads\": [\n",
            bench_machine());
    measure_run(&o, json);
    bench_close_output(json, o.json);
    return 0;
}
