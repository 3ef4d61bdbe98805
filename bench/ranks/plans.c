/*
 * Planning a rank's load from a checkpoint of a million blocks: as many tensors as shards of each, a shard a row, saved
 * by many ranks. The blocks are small, because only their records matter here.
 */
#include <malloc.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "bench/ranks/ranks.h"
#include "bench/support/support.h"

enum { COLUMNS = 16, REPEATS = 7, SAVERS = 64 };

static ckd_tensor row_of(const char *name, const uint64_t *shape, uint64_t row, const float *values) {
    ckd_tensor t = CKD_TENSOR_INIT;
    t.name = name;
    t.dtype = CKD_F32;
    t.ndim = 2;
    t.shape = shape;
    t.region = (ckd_region){.kind = CKD_REGION_BOX, .offsets = {row, 0}, .lengths = {1, COLUMNS}};
    t.data = values;
    return t;
}

static void name_of(char name[64], int tensor) {
    snprintf(name, 64, "model.layers.%d.mlp.down_proj.weight", tensor);
}

/* One rank's file. */
static void save_rows(ckd_part *part, ckd_save *save, const ranks_options *o, uint32_t rank) {
    const uint64_t shards = (uint64_t)o->shards, shape[2] = {shards, COLUMNS};
    ckd_error err = {0};
    for (uint64_t row = shards * rank / SAVERS; row < shards * (rank + 1) / SAVERS; row++) {
        for (int i = 0; i < o->tensors; i++) {
            char name[64];
            float values[COLUMNS];
            for (int k = 0; k < COLUMNS; k++) {
                values[k] = (float)(i * COLUMNS + k) + (float)row / 4096;
            }
            name_of(name, i);
            ckd_tensor t = row_of(name, shape, row, values);
            bench_check(ckd_save_tensor(save, &t, &err), &err);
        }
    }
    bench_check(ckd_save_seal(part, save, &err), &err);
}

static void make_store(const char *path, const ranks_options *o) {
    ckd_error err = {0};
    ckd_save_options so = CKD_SAVE_OPTIONS_INIT;
    ckd_part parts[SAVERS];
    ckd_save *saves[SAVERS];
    ckd_store *store = ranks_open(path, CKD_OPEN_CREATE);
    so.run = "run";
    so.world = SAVERS;
    so.codec = CKD_CODEC_RAW;
    bench_check(ckd_id_new(&so.checkpoint_id, &err), &err);
    for (uint32_t r = 0; r < SAVERS; r++) {
        so.rank = r;
        bench_check(ckd_save_begin(&saves[r], store, &so, &err), &err);
        save_rows(&parts[r], saves[r], o, r);
        fprintf(stderr, "\rfile %u of %u", (unsigned)r + 1, (unsigned)SAVERS);
    }
    fprintf(stderr, "\n");
    bench_check(ckd_save_publish(NULL, saves[0], parts, SAVERS, &err), &err);
    for (uint32_t r = 0; r < SAVERS; r++) {
        ckd_part_free(&parts[r]);
        if (r > 0) {
            ckd_save_end(saves[r]);
        }
    }
    ckd_store_close(store);
}

/* VmRSS, or its peak VmHWM. */
static double memory_mib(const char *which) {
    FILE *f = fopen("/proc/self/status", "r");
    char line[256];
    double kib = 0;
    while (f && fgets(line, sizeof(line), f)) {
        size_t length = strlen(which);
        if (strncmp(line, which, length) == 0 && line[length] == ':') {
            kib = strtod(line + length + 1, NULL);
        }
    }
    if (f) {
        fclose(f);
    }
    return kib / 1024;
}

/* Resets the peak, and returns freed memory to the system so that new use of it counts. Returns the memory in use. */
static double reset_peak(void) {
    malloc_trim(0);
    FILE *f = fopen("/proc/self/clear_refs", "w");
    if (f) {
        fputs("5", f);
        fclose(f);
    }
    return memory_mib("VmRSS");
}

/* The rows of one rank of `world` of every tensor. */
static ckd_load_request *requests_of(const ranks_options *o, uint32_t rank, uint32_t world,
                                     char (*names)[64]) {
    ckd_load_request *q = bench_allocated(calloc((size_t)o->tensors, sizeof(*q)));
    uint64_t first = (uint64_t)o->shards * rank / world, end = (uint64_t)o->shards * (rank + 1) / world;
    for (int i = 0; i < o->tensors; i++) {
        name_of(names[i], i);
        q[i] = (ckd_load_request)CKD_LOAD_REQUEST_INIT;
        q[i].name = names[i];
        q[i].region =
            (ckd_region){.kind = CKD_REGION_BOX, .offsets = {first, 0}, .lengths = {end - first, COLUMNS}};
    }
    return q;
}

typedef struct figures {
    double median, worst, mib;
    uint64_t blocks;
} figures;

/* Plans the loads of the first rank, the middle one and the last one. */
static void plan_loads(figures *f, ckd_load *load, const ranks_options *o, uint32_t world) {
    char(*names)[64] = bench_allocated(calloc((size_t)o->tensors, sizeof(*names)));
    double seconds[3 * REPEATS];
    for (int i = 0; i < 3 * REPEATS; i++) {
        uint32_t rank = (world - 1) * (uint32_t)(i % 3) / 2;
        ckd_load_request *q = requests_of(o, rank, world, names);
        ckd_load_explanation *e;
        ckd_error err = {0};
        double before = reset_peak(), begun = bench_cpu_seconds();
        bench_check(ckd_load_explain(&e, load, q, (size_t)o->tensors, &err), &err);
        seconds[i] = bench_cpu_seconds() - begun;
        f->blocks = e->all.blocks;
        double more = memory_mib("VmHWM") - before;
        f->mib = more > f->mib ? more : f->mib;
        if (e->difference_count || e->all.blocks < (uint64_t)o->tensors) {
            bench_die("plan", "it is not that of the load");
        }
        ckd_load_explanation_free(e);
        free(q);
    }
    bench_sort(seconds, 3 * REPEATS);
    f->median = ranks_quantile(seconds, 3 * REPEATS, 0.5);
    f->worst = seconds[3 * REPEATS - 1];
    free(names);
}

typedef struct loading {
    const char *path;
    const ranks_options *o;
    FILE *json;
} loading;

/* Runs in a process of its own, so that its memory is that of the load. */
static int plan_all(void *context, uint32_t rank) {
    static const uint32_t worlds[] = {1024, 1000, 512, 128, 64, 8};
    const loading *l = context;
    ckd_checkpoint c;
    ckd_load *load;
    ckd_error err = {0};
    (void)rank;
    ckd_store *store = ranks_open(l->path, CKD_OPEN_READ);
    bench_check(ckd_store_find(&c, store, "run", 0, &err), &err);
    double before = reset_peak(), start = bench_seconds(), cpu = bench_cpu_seconds();
    bench_check(ckd_load_begin(&load, store, &c.id, &err), &err);
    double opened = bench_seconds() - start, opened_cpu = bench_cpu_seconds() - cpu,
           opening = memory_mib("VmHWM") - before, index = reset_peak() - before;
    printf("\n%d blocks in %u files: opened in %.2f s (%.2f of processor time), %.0f MiB, %.0f meanwhile\n"
           "ranks  blocks of one  median ms  worst ms  more MiB\n",
           l->o->tensors * l->o->shards, (unsigned)SAVERS, opened, opened_cpu, index, opening);
    fprintf(
        l->json,
        "  \"load_plan\": {\"blocks\": %d, \"files\": %u, \"open_seconds\": %.3f, \"open_cpu_seconds\": %.3f, "
        "\"open_mib\": %.1f, \"open_peak_mib\": %.1f, \"ranks\": [\n",
        l->o->tensors * l->o->shards, (unsigned)SAVERS, opened, opened_cpu, index, opening);
    size_t count = sizeof(worlds) / sizeof(worlds[0]);
    for (size_t i = 0; i < count; i++) {
        figures f = {0};
        if (worlds[i] > (uint32_t)l->o->shards) {
            continue;
        }
        plan_loads(&f, load, l->o, worlds[i]);
        printf("%5u  %13llu  %9.2f  %8.2f  %8.1f\n", (unsigned)worlds[i], (unsigned long long)f.blocks,
               f.median * 1e3, f.worst * 1e3, f.mib);
        fprintf(l->json,
                "      {\"ranks\": %u, \"blocks\": %llu, \"median_cpu_ms\": %.3f, \"worst_cpu_ms\": %.3f, "
                "\"mib\": %.1f}%s\n",
                (unsigned)worlds[i], (unsigned long long)f.blocks, f.median * 1e3, f.worst * 1e3, f.mib,
                i + 1 < count ? "," : "");
    }
    fprintf(l->json, "    ]}");
    ckd_load_end(load);
    ckd_store_close(store);
    return fflush(l->json) || fflush(stdout);
}

void bench_load_plans(FILE *json, const ranks_options *o) {
    loading l = {.path = ranks_new_path(o, "plans"), .o = o, .json = json};
    make_store(l.path, o);
    fflush(json);
    if (ranks_run(1, plan_all, &l) != 1) {
        exit(1);
    }
    bench_remove_tree(l.path);
}
