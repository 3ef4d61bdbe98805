/*
 * bench_chain: what loading costs along a run, against a base load.
 *
 *   bench_chain [--store DIR --run NAME] [--repeats N] [--json FILE] [--saves N] [--every N] [trainer options ...]
 *
 * Without --store it trains one first (build/train_gpt, 100 saves). Then every checkpoint's state is loaded from disk (file
 * cache dropped before each load), and so is an exact, standalone base of the very same state, in the same run; bytes are those that
 * the process read, time is the median of the repeats. Uses the public API only.
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

/* Bytes this process has read by system calls. */
static double bytes_read(void) {
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

/* Out of the file cache, so that the next load comes from disk. */
static void drop_cache(const char *store) {
    char dir[4096], path[8192];
    snprintf(dir, sizeof(dir), "%s/data/c", store);
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

static void load_all(ckd_load *load, void **values) {
    const ckd_tensor_list *list = ckd_load_tensors(load);
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
static measure measure_load(ckd_store *store, const char *path, const ckd_checkpoint *c, void **values,
                            int repeats) {
    measure m = {0, 0, 0};
    double *times = calloc((size_t)repeats, sizeof(*times)), *cpu = calloc((size_t)repeats, sizeof(*cpu));
    for (int i = 0; i < repeats; i++) {
        drop_cache(path);
        double read = bytes_read(), start = bench_seconds(), start_cpu = bench_cpu_seconds();
        ckd_load *load;
        ckd_error err = {0};
        if (ckd_load_begin(&load, store, &c->id, &err) != CKD_OK) {
            die("load", &err);
        }
        load_all(load, values);
        ckd_load_end(load);
        times[i] = bench_seconds() - start;
        cpu[i] = bench_cpu_seconds() - start_cpu;
        m.bytes = bytes_read() - read;
    }
    qsort(times, (size_t)repeats, sizeof(*times), by_value);
    qsort(cpu, (size_t)repeats, sizeof(*cpu), by_value);
    m.seconds = times[repeats / 2];
    m.cpu = cpu[repeats / 2];
    free(times);
    free(cpu);
    return m;
}

/* The same state as an exact, standalone base in a store of its own. */
static ckd_checkpoint save_base(ckd_store *bases, const ckd_checkpoint *c, const ckd_tensor_list *list,
                                void **values) {
    ckd_save_options o = CKD_SAVE_OPTIONS_INIT;
    o.run = c->run;
    o.step = c->step;
    o.base = 1;
    ckd_save *save;
    ckd_checkpoint info;
    ckd_error err = {0};
    if (ckd_save_begin(&save, bases, &o, &err) != CKD_OK) {
        die("base", &err);
    }
    for (size_t i = 0; i < list->count; i++) {
        ckd_tensor t = CKD_TENSOR_INIT;
        t.name = list->items[i].name;
        t.role = list->items[i].role;
        t.dtype = list->items[i].dtype;
        t.ndim = list->items[i].ndim;
        t.shape = list->items[i].shape;
        t.data = values[i];
        if (ckd_save_tensor(save, &t, &err) != CKD_OK) {
            die("base", &err);
        }
    }
    if (ckd_save_commit(&info, save, &err) != CKD_OK) {
        die("base", &err);
    }
    return info;
}

typedef struct worst {
    double bytes, time, cpu;
} worst;

static void note_worst(worst *w, double bytes, double time, double cpu) {
    w->cpu = cpu > w->cpu ? cpu : w->cpu;
    w->bytes = bytes > w->bytes ? bytes : w->bytes;
    w->time = time > w->time ? time : w->time;
}

static void measure_one(ckd_store *store, const options *o, ckd_store *bases, const char *base_path,
                        const ckd_checkpoint *c, worst *w, FILE *json, int last) {
    ckd_error err = {0};
    ckd_load *load;
    if (ckd_load_begin(&load, store, &c->id, &err) != CKD_OK) {
        die("load", &err);
    }
    void **values = room_for(load);
    measure ours = measure_load(store, o->store, c, values, o->repeats);
    ckd_checkpoint base = save_base(bases, c, ckd_load_tensors(load), values);
    measure plain = measure_load(bases, base_path, &base, values, o->repeats);
    double bytes = ours.bytes / plain.bytes, time = ours.seconds / plain.seconds, cpu = ours.cpu / plain.cpu;
    note_worst(w, bytes, time, cpu);
    printf("%10llu  %-5s %5u  %8.3f  %8.3f  %8.3f  %7.2f  %7.2f  %7.2f  %7.2f\n", (unsigned long long)c->step,
           ckd_kind_name(c->kind), (unsigned)c->depth, (double)c->stored_bytes / 1e6,
           (double)base.stored_bytes / 1e6, (double)c->raw_bytes / (double)c->stored_bytes, c->load_cost,
           bytes, time, cpu);
    if (json) {
        fprintf(
            json,
            "    {\"step\": %llu, \"kind\": \"%s\", \"depth\": %u, \"stored_bytes\": %llu, \"base_bytes\": %llu, "
            "\"planned_cost\": %.4f, \"bytes_ratio\": %.4f, \"time_ratio\": %.4f, \"cpu_ratio\": %.4f, \"base_seconds\": %.6f}%s\n",
            (unsigned long long)c->step, ckd_kind_name(c->kind), (unsigned)c->depth,
            (unsigned long long)c->stored_bytes, (unsigned long long)base.stored_bytes, c->load_cost, bytes,
            time, cpu, plain.seconds, last ? "" : ",");
    }
    release(values, ckd_load_tensors(load)->count);
    ckd_load_end(load);
}

static void measure_run(const options *o, FILE *json) {
    char base_path[4096];
    snprintf(base_path, sizeof(base_path), "%.4000s.bases-%ld", o->store, (long)getpid());
    ckd_store *store, *bases;
    ckd_store_options one_thread = CKD_STORE_OPTIONS_INIT;
    one_thread.threads = 1;
    ckd_checkpoint_list *list;
    ckd_error err = {0};
    if (ckd_store_open(&store, o->store, CKD_OPEN_READ, &one_thread, &err) != CKD_OK ||
        ckd_store_open(&bases, base_path, CKD_OPEN_CREATE, &one_thread, &err) != CKD_OK ||
        ckd_store_list(&list, store, o->run, &err) != CKD_OK) {
        die("open", &err);
    }
    printf("%10s  %-5s %5s  %8s  %8s  %8s  %7s  %7s  %7s  %7s\n", "step", "kind", "depth", "MB", "base MB",
           "ratio", "planned", "bytes", "time", "cpu");
    worst w = {0, 0, 0};
    double stored = 0, raw = 0;
    size_t deltas = 0;
    for (size_t i = 0; i < list->count; i++) {
        measure_one(store, o, bases, base_path, &list->items[i], &w, json, i + 1 == list->count);
        stored += (double)list->items[i].stored_bytes;
        raw += (double)list->items[i].raw_bytes;
        deltas += list->items[i].kind == CKD_DELTA;
    }
    printf(
        "%zu checkpoints, %zu deltas, %.3fx in all; worst load: %.2f base loads in bytes, %.2f in time, %.2f in processor time (one thread)\n",
        list->count, deltas, raw / stored, w.bytes, w.time, w.cpu);
    if (json) {
        fprintf(
            json,
            "  ],\n  \"checkpoints\": %zu, \"deltas\": %zu, \"ratio\": %.4f, \"worst_bytes\": %.4f, \"worst_time\": %.4f, \"worst_cpu\": %.4f\n}\n",
            list->count, deltas, raw / stored, w.bytes, w.time, w.cpu);
    }
    ckd_checkpoint_list_free(list);
    ckd_store_close(store);
    ckd_store_close(bases);
    bench_remove_tree(base_path);
}

int main(int argc, char **argv) {
    options o = {
        .run = "gpt", .repeats = 5, .saves = 100, .every = 10, .json = "bench/results/bench_chain.json"};
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
        } else if (strcmp(argv[i], "--json") == 0) {
            o.json = argv[i + 1];
        } else {
            fprintf(stderr, "bench_chain: unknown option %s\n", argv[i]);
            return 2;
        }
    }
    char made[4096];
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
