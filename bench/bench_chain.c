/*
 * bench_chain: what loading costs along a run, against a base load.
 *
 *   bench_chain [--store DIR --run NAME] [--fidelity F] [--repeats N] [--json FILE] [--saves N] [--every N] [--max-load-cost X]
 *
 * Without --store it trains one first (build/train_gpt, 100 saves). Then every checkpoint's state is loaded from disk (file
 * cache dropped before each load), and so is an exact, standalone base of the very same state, in the same run; bytes are those that
 * the process read, time is the median of the repeats. With --fidelity near or coarse the states are saved once more in that
 * fidelity, and these checkpoints are what is loaded. Sizes of a whole run count every file of its store. Uses the public API only.
 */
#include <ckptdelta.h>
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "bench/support.h"

typedef struct options {
    const char *store, *run, *json;
    int repeats, saves, every;
    ckd_fidelity fidelity;
    double max_load_cost;
} options;

typedef struct measure {
    double seconds; /* median, wall clock */
    double cpu;     /* median, of processor time: what remains when the machine is busy with other things */
    double bytes;   /* read from files */
} measure;

static void die(const char *what, const ckd_error *err) {
    fprintf(stderr, "bench_chain: %s: %s (%s %s)\n", what, err->message, err->file, err->tensor);
    exit(1);
}

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

/* Chunk files and materialized copies out of the file cache, so that the next load comes from disk. */
static void drop_cache(const char *store) {
    drop_folder(store, "c");
    drop_folder(store, "k");
}

/* values: room for the tensors of `list`, in its order; stores list theirs in the order in which they were saved. */
static void load_all(ckd_load *load, const ckd_tensor_list *list, void **values) {
    ckd_error err = {0};
    for (size_t i = 0; i < list->count; i++) {
        ckd_load_request q = CKD_LOAD_REQUEST_INIT;
        q.name = list->items[i].name;
        q.data = values[i];
        q.size = list->items[i].raw_bytes;
        if (ckd_load_tensor(load, &q, &err) != CKD_OK) {
            die("load", &err);
        }
    }
}

static void **room_for(ckd_load *load) {
    const ckd_tensor_list *list = ckd_load_tensors(load);
    void **values = calloc(list->count + 1, sizeof(*values));
    for (size_t i = 0; i < list->count; i++) {
        values[i] = malloc(list->items[i].raw_bytes + 1);
        memset(values[i], 0, list->items[i].raw_bytes); /* page faults are not the store's cost */
    }
    return values;
}

static void release(void **values, size_t count) {
    for (size_t i = 0; i < count; i++) {
        free(values[i]);
    }
    free(values);
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
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
        if (ckd_load_begin(&load, store, &c->id, &err) != CKD_OK) {
            die("load", &err);
        }
        load_all(load, list, values);
        ckd_load_end(load);
        times[i] = bench_seconds() - start;
        cpu[i] = bench_cpu_seconds() - start_cpu;
        m.bytes = bench_bytes_read() - read;
    }
    qsort(times, (size_t)repeats, sizeof(*times), by_value);
    qsort(cpu, (size_t)repeats, sizeof(*cpu), by_value);
    m.seconds = times[repeats / 2];
    m.cpu = cpu[repeats / 2];
    free(times);
    free(cpu);
    return m;
}

/* A store that the benchmark saves to itself. */
typedef struct beside {
    char path[4096];
    ckd_store *store;
    int base; /* every checkpoint an exact, standalone base */
    const options *options;
} beside;

static void open_beside(beside *b, const options *o, const char *what, int base,
                        const ckd_store_options *store_options) {
    ckd_error err = {0};
    b->base = base;
    b->options = o;
    snprintf(b->path, sizeof(b->path), "%.4000s.%s-%ld", o->store, what, (long)getpid());
    if (ckd_store_open(&b->store, b->path, CKD_OPEN_CREATE, store_options, &err) != CKD_OK) {
        die(what, &err);
    }
}

static void close_beside(beside *b) {
    ckd_store_close(b->store);
    bench_remove_tree(b->path);
}

static void save_one(ckd_save *save, const ckd_tensor_info *info, const void *values) {
    ckd_error err = {0};
    ckd_tensor t = CKD_TENSOR_INIT;
    t.name = info->name;
    t.role = info->role;
    t.dtype = info->dtype;
    t.ndim = info->ndim;
    t.shape = info->shape;
    t.data = values;
    if (ckd_save_tensor(save, &t, &err) != CKD_OK) {
        die("save", &err);
    }
}

/* The same state as a checkpoint of the store beside. */
static ckd_checkpoint save_beside(const beside *b, const ckd_checkpoint *c, const ckd_tensor_list *list,
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
    if (ckd_save_begin(&save, b->store, &o, &err) != CKD_OK) {
        die("save", &err);
    }
    /* Second moments first, then first ones: weights follow them. */
    static const ckd_role order[] = {CKD_ROLE_EXP_AVG_SQ, CKD_ROLE_EXP_AVG, CKD_ROLE_MASTER, CKD_ROLE_WEIGHT,
                                     CKD_ROLE_OTHER};
    for (size_t k = 0; k < sizeof(order) / sizeof(order[0]); k++) {
        for (size_t i = 0; i < list->count; i++) {
            if (list->items[i].role == order[k]) {
                save_one(save, &list->items[i], values[i]);
            }
        }
    }
    if (ckd_save_commit(&info, save, &err) != CKD_OK) {
        die("save", &err);
    }
    return info;
}

/* A load in base loads of the same state. */
typedef struct ratio {
    double bytes, time, cpu;
} ratio;

static ratio in_base_loads(const measure *m, const measure *base) {
    return (ratio){m->bytes / base->bytes, m->seconds / base->seconds, m->cpu / base->cpu};
}

static double larger(double a, double b) {
    return a > b ? a : b;
}

static void note_worst(ratio *worst, const ratio *r) {
    *worst =
        (ratio){larger(worst->bytes, r->bytes), larger(worst->time, r->time), larger(worst->cpu, r->cpu)};
}

typedef struct run {
    const options *options;
    ckd_store *store;
    beside bases, again;
    ratio worst, worst_newest;
    FILE *json;
} run;

static void print_one(const run *r, const ckd_checkpoint *c, const ckd_checkpoint *base, const measure *plain,
                      const ratio *load, const ratio *newest, int last) {
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
        load->bytes, load->time, load->cpu, newest->bytes, newest->time, newest->cpu, plain->seconds,
        last ? "" : ",");
}

/* One checkpoint of the series. */
typedef struct point {
    ckd_checkpoint shown, base; /* what is loaded, and its base load */
    measure plain, newest;
} point;

/* Saves it beside, and measures it while it is the newest. */
static void save_point(run *r, point *p, const ckd_checkpoint *c) {
    ckd_error err = {0};
    ckd_load *load;
    if (ckd_load_begin(&load, r->store, &c->id, &err) != CKD_OK) {
        die("load", &err);
    }
    int repeats = r->options->repeats;
    const ckd_tensor_list *list = ckd_load_tensors(load);
    void **values = room_for(load);
    load_all(load, list, values);
    p->base = save_beside(&r->bases, c, list, values);
    ckd_checkpoint again = save_beside(&r->again, c, list, values);
    p->shown = r->options->fidelity == CKD_EXACT ? *c : again;
    p->plain = measure_load(r->bases.store, r->bases.path, &p->base, list, values, repeats);
    p->newest = measure_load(r->again.store, r->again.path, &again, list, values, repeats);
    release(values, ckd_load_tensors(load)->count);
    ckd_load_end(load);
}

/* Measures it when all are saved. */
static void measure_point(run *r, const point *p, int last) {
    ckd_error err = {0};
    ckd_load *load;
    int exact = r->options->fidelity == CKD_EXACT;
    ckd_store *store = exact ? r->store : r->again.store;
    const char *path = exact ? r->options->store : r->again.path;
    if (ckd_load_begin(&load, store, &p->shown.id, &err) != CKD_OK) {
        die("load", &err);
    }
    void **values = room_for(load);
    measure ours = measure_load(store, path, &p->shown, ckd_load_tensors(load), values, r->options->repeats);
    ratio any = in_base_loads(&ours, &p->plain), now = in_base_loads(&p->newest, &p->plain);
    note_worst(&r->worst, &any);
    note_worst(&r->worst_newest, &now);
    print_one(r, &p->shown, &p->base, &p->plain, &any, &now, last);
    release(values, ckd_load_tensors(load)->count);
    ckd_load_end(load);
}

/* Bytes of all files of the store that the checkpoints shown are in. */
static double whole_store(const run *r) {
    ckd_error err = {0};
    ckd_report *report;
    if (ckd_store_report(&report, r->options->fidelity == CKD_EXACT ? r->store : r->again.store, &err) !=
        CKD_OK) {
        die("report", &err);
    }
    double bytes = (double)report->stored_bytes;
    ckd_report_free(report);
    return bytes;
}

static void print_sums(const run *r, const point *points, size_t count) {
    double stored = 0, raw = 0;
    size_t deltas = 0;
    for (size_t i = 0; i < count; i++) {
        stored += (double)points[i].shown.stored_bytes;
        raw += (double)points[i].shown.raw_bytes;
        deltas += points[i].shown.kind == CKD_DELTA;
    }
    double whole = raw / whole_store(r);
    printf(
        "%zu checkpoints, %zu deltas, %.3fx in all, %.3fx with all files of the store; worst load: %.2f base loads in bytes, %.2f in time, %.2f in "
        "processor time (one thread); of the newest: %.2f, %.2f, %.2f\n",
        count, deltas, raw / stored, whole, r->worst.bytes, r->worst.time, r->worst.cpu,
        r->worst_newest.bytes, r->worst_newest.time, r->worst_newest.cpu);
    fprintf(
        r->json,
        "  ],\n  \"checkpoints\": %zu, \"deltas\": %zu, \"ratio\": %.4f, \"ratio_of_store\": %.4f, \"worst_bytes\": %.4f, \"worst_time\": "
        "%.4f, \"worst_cpu\": %.4f, \"worst_newest_bytes\": %.4f, \"worst_newest_time\": %.4f, "
        "\"worst_newest_cpu\": %.4f\n}\n",
        count, deltas, raw / stored, whole, r->worst.bytes, r->worst.time, r->worst.cpu,
        r->worst_newest.bytes, r->worst_newest.time, r->worst_newest.cpu);
}

static void measure_run(const options *o, FILE *json) {
    run r = {.options = o, .json = json};
    ckd_store_options one_thread = CKD_STORE_OPTIONS_INIT;
    one_thread.threads = 1;
    ckd_checkpoint_list *list;
    ckd_error err = {0};
    if (ckd_store_open(&r.store, o->store, CKD_OPEN_READ, &one_thread, &err) != CKD_OK ||
        ckd_store_list(&list, r.store, o->run, &err) != CKD_OK) {
        die("open", &err);
    }
    open_beside(&r.bases, o, "bases", 1, &one_thread);
    open_beside(&r.again, o, "again", 0, &one_thread);
    printf("%63s  %25s   %25s\n", "", "any checkpoint", "the newest");
    printf("%10s  %-5s %5s  %8s  %8s  %8s  %7s  %7s  %7s  %7s   %7s  %7s  %7s\n", "step", "kind", "depth",
           "MB", "base MB", "ratio", "planned", "bytes", "time", "cpu", "bytes", "time", "cpu");
    point *points = calloc(list->count + 1, sizeof(*points));
    if (!points) {
        die("memory", &err);
    }
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
    close_beside(&r.bases);
    close_beside(&r.again);
}

static ckd_fidelity fidelity_of(const char *name) {
    for (ckd_fidelity f = CKD_EXACT; f <= CKD_COARSE; f++) {
        if (strcmp(ckd_fidelity_name(f), name) == 0) {
            return f;
        }
    }
    fprintf(stderr, "bench_chain: fidelity %s is none of exact, near, coarse\n", name);
    exit(2);
}

int main(int argc, char **argv) {
    options o = {.fidelity = CKD_EXACT, .run = "gpt", .repeats = 5, .saves = 100, .every = 10, .json = NULL};
    for (int i = 1; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], "--store") == 0) {
            o.store = argv[i + 1];
        } else if (strcmp(argv[i], "--run") == 0) {
            o.run = argv[i + 1];
        } else if (strcmp(argv[i], "--repeats") == 0) {
            o.repeats = atoi(argv[i + 1]);
        } else if (strcmp(argv[i], "--saves") == 0) {
            o.saves = atoi(argv[i + 1]);
        } else if (strcmp(argv[i], "--every") == 0) {
            o.every = atoi(argv[i + 1]);
        } else if (strcmp(argv[i], "--fidelity") == 0) {
            o.fidelity = fidelity_of(argv[i + 1]);
        } else if (strcmp(argv[i], "--max-load-cost") == 0) {
            o.max_load_cost = atof(argv[i + 1]);
        } else if (strcmp(argv[i], "--json") == 0) {
            o.json = argv[i + 1];
        } else {
            fprintf(stderr, "bench_chain: unknown option %s\n", argv[i]);
            return 2;
        }
    }
    char made[4096], results[128];
    if (!o.json) {
        snprintf(results, sizeof(results), "bench/results/bench_chain%s%s.json",
                 o.fidelity == CKD_EXACT ? "" : "-",
                 o.fidelity == CKD_EXACT ? "" : ckd_fidelity_name(o.fidelity));
        o.json = results;
    }
    if (!o.store) {
        snprintf(made, sizeof(made), "bench/series/chain-%d-every-%d", o.saves, o.every);
        bench_train(made, o.run, o.saves, o.every);
        o.store = made;
    }
    FILE *json = fopen(o.json, "w");
    if (!json) {
        perror(o.json);
        return 1;
    }
    fprintf(json, "{\n  \"benchmark\": \"chain\",\n  \"machine\": \"%s\",\n  \"loads\": [\n",
            bench_machine());
    measure_run(&o, json);
    fclose(json);
    return 0;
}
