/*
 * bench_packs: the cost of loads from packed chunk files.
 *
 *   bench_packs [--repeats N] STORE PACKED
 *
 * STORE holds a run. PACKED is a copy of it after `ckptdelta compact --pack-below`. Every checkpoint is loaded from
 * both, N times, and the two stores take turns in being first. A load counts from its begin to its end. Medians of
 * processor time and of wall-clock time. Files are in the page cache.
 */
#include <stdlib.h>
#include <string.h>

#include <ckptdelta.h>

#include "bench/support/support.h"

enum { REPEATS_MAX = 64 };

typedef struct figures {
    double cpu, wall; /* medians, s */
} figures;

typedef struct pair {
    ckd_checkpoint c;
    figures of[2]; /* not packed, packed */
} pair;

static figures load_once(ckd_store *store, const ckd_id *id) {
    ckd_error err = {0};
    ckd_load *load;
    double cpu = bench_cpu_seconds(), wall = bench_seconds();
    bench_check(ckd_load_begin(&load, store, id, &err), &err);
    const ckd_tensor_list *tensors = ckd_load_tensors(load);
    ckd_load_request *requests = bench_allocated(calloc(tensors->count + 1, sizeof(*requests)));
    for (size_t i = 0; i < tensors->count; i++) {
        const ckd_tensor_info *t = &tensors->items[i];
        requests[i] = (ckd_load_request)CKD_LOAD_REQUEST_INIT;
        requests[i].name = t->name;
        requests[i].dtype = t->dtype;
        requests[i].ndim = t->ndim;
        requests[i].shape = t->shape;
        requests[i].region.kind = CKD_REGION_WHOLE;
        requests[i].size = t->raw_bytes;
        requests[i].data = malloc(t->raw_bytes + 1);
    }
    bench_check(ckd_load_all(load, requests, tensors->count, 0, &err), &err);
    for (size_t i = 0; i < tensors->count; i++) {
        free(requests[i].data);
    }
    free(requests);
    ckd_load_end(load);
    return (figures){bench_cpu_seconds() - cpu, bench_seconds() - wall};
}

static void measure(pair *p, ckd_store *const stores[2], int repeats) {
    double cpu[2][REPEATS_MAX], wall[2][REPEATS_MAX];
    for (int k = 0; k < repeats; k++) {
        for (int i = 0; i < 2; i++) {
            int which = (i + k) % 2;
            figures f = load_once(stores[which], &p->c.id);
            cpu[which][k] = f.cpu;
            wall[which][k] = f.wall;
        }
    }
    for (int i = 0; i < 2; i++) {
        p->of[i] = (figures){bench_median(cpu[i], repeats), bench_median(wall[i], repeats)};
    }
}

static void print_one(const char *what, const pair *p) {
    printf("%-8s %6llu %6u %11.2f %11.2f %8.2f %11.2f %11.2f %8.2f\n", what, (unsigned long long)p->c.step,
           (unsigned)p->c.depth, 1e3 * p->of[0].cpu, 1e3 * p->of[1].cpu, p->of[1].cpu / p->of[0].cpu,
           1e3 * p->of[0].wall, 1e3 * p->of[1].wall, p->of[1].wall / p->of[0].wall);
}

static void print_all(const pair *pairs, size_t count) {
    figures sum[2] = {{0, 0}};
    const pair *newest = &pairs[0], *dearest = &pairs[0], *worst = &pairs[0];
    for (size_t i = 0; i < count; i++) {
        const pair *p = &pairs[i];
        for (int k = 0; k < 2; k++) {
            sum[k].cpu += p->of[k].cpu;
            sum[k].wall += p->of[k].wall;
        }
        newest = p->c.step > newest->c.step ? p : newest;
        dearest = p->of[1].cpu > dearest->of[1].cpu ? p : dearest;
        worst = p->of[1].cpu / p->of[0].cpu > worst->of[1].cpu / worst->of[0].cpu ? p : worst;
    }
    printf("%s\n%-8s %6s %6s %11s %11s %8s %11s %11s %8s\n", bench_machine(), "", "step", "depth", "cpu ms",
           "packed", "ratio", "wall ms", "packed", "ratio");
    print_one("newest", newest);
    print_one("dearest", dearest);
    print_one("worst", worst);
    pair mean = {.of = {{sum[0].cpu / (double)count, sum[0].wall / (double)count},
                        {sum[1].cpu / (double)count, sum[1].wall / (double)count}}};
    print_one("mean", &mean);
}

int main(int argc, char **argv) {
    int repeats = 9, at = 1;
    ckd_store *stores[2];
    ckd_checkpoint_list *list;
    ckd_error err = {0};
    if (argc > 3 && strcmp(argv[1], "--repeats") == 0) {
        repeats = atoi(argv[2]);
        at = 3;
    }
    if (argc != at + 2 || repeats < 1 || repeats > REPEATS_MAX) {
        fprintf(stderr, "usage: bench_packs [--repeats N] STORE PACKED\n");
        return 2;
    }
    ckd_store_options o = CKD_STORE_OPTIONS_INIT;
    o.threads = 1;
    for (int i = 0; i < 2; i++) {
        bench_check(ckd_store_open(&stores[i], argv[at + i], CKD_OPEN_READ, &o, &err), &err);
    }
    bench_check(ckd_store_list(&list, stores[1], NULL, &err), &err);
    if (!list->count) {
        bench_die(argv[at + 1], "it has no checkpoints");
    }
    pair *pairs = bench_allocated(calloc(list->count, sizeof(*pairs)));
    for (size_t i = 0; i < list->count; i++) {
        pairs[i].c = list->items[i];
        measure(&pairs[i], stores, repeats);
    }
    print_all(pairs, list->count);
    free(pairs);
    ckd_checkpoint_list_free(list);
    ckd_store_close(stores[0]);
    ckd_store_close(stores[1]);
    return 0;
}
