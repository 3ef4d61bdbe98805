/*
 * bench_reshard: the cost of loading parts, from the end of a chain.
 *
 *   bench_reshard [--depth N] [--repeats N] [--json FILE]
 *
 * A random matrix of 4096 x 4096 in f32, with noise added from one checkpoint to the next, is saved whole in five ways:
 * not compressed, compressed, as an exact chain, and as two chains in `near`. The movements of one are noise. Those of
 * the other have a low rank with noise on them, so that its deltas are mostly factors. 1 to 16 ranks load it in rows,
 * columns, grids and flat ranges, with one thread. Parts begin where torch.chunk puts them; `even` parts begin at L * i
 * / n, rounded down. It prints:
 *
 *   over       bytes read over bytes needed (ckd_load_explain), of all ranks together and of the worst one. A side record counts as
 *              needed by each rank that needs a part of it
 *   part       the share of the bytes of a whole load that a rank of a chain reads; of eight ranks also its share of the processor time:
 *              mean of the ranks, medians of repeats
 *
 * Uses the public API only, and TMPDIR.
 */
#include <ckptdelta.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>

#include "bench/support/support.h"

enum { SIDE = 4096, REPEATS_MAX = 31, RANK = 32, CHAINS = 2 /* the first of them */, WAYS = 5 };

typedef struct layout {
    const char *name;
    uint64_t rows, columns; /* rows 0: so many flat ranges */
    int even;
} layout;

static const layout layouts[] = {
    {"rows / 2", 2, 1, 0},          {"rows / 3", 3, 1, 0},          {"rows / 4", 4, 1, 0},
    {"rows / 5", 5, 1, 0},          {"rows / 6", 6, 1, 0},          {"rows / 7", 7, 1, 0},
    {"rows / 8", 8, 1, 0},          {"rows / 16", 16, 1, 0},        {"rows / 3, even", 3, 1, 1},
    {"rows / 5, even", 5, 1, 1},    {"rows / 7, even", 7, 1, 1},    {"columns / 2", 1, 2, 0},
    {"columns / 3", 1, 3, 0},       {"columns / 4", 1, 4, 0},       {"columns / 5", 1, 5, 0},
    {"columns / 6", 1, 6, 0},       {"columns / 7", 1, 7, 0},       {"columns / 8", 1, 8, 0},
    {"columns / 16", 1, 16, 0},     {"columns / 3, even", 1, 3, 1}, {"columns / 5, even", 1, 5, 1},
    {"columns / 7, even", 1, 7, 1}, {"grid 2 x 2", 2, 2, 0},        {"grid 3 x 2", 3, 2, 0},
    {"grid 3 x 3", 3, 3, 0},        {"grid 5 x 3", 5, 3, 0},        {"grid 4 x 2", 4, 2, 0},
    {"grid 3 x 3, even", 3, 3, 1},  {"flat / 3", 0, 3, 0},          {"flat / 8", 0, 8, 0},
};
enum { LAYOUTS = sizeof(layouts) / sizeof(layouts[0]) };

typedef struct result {
    double over, worst;         /* read over needed */
    double read_part, cpu_part; /* of loading all; NaN: not measured */
} result;

/* ---- the store ---- */

static double uniform(uint64_t *random) {
    uint64_t z = *random += 0x9e3779b97f4a7c15u; /* splitmix64 (Steele, Lea, Flood 2014) */
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return ((double)((z ^ z >> 31) >> 11) + 0.5) / 9007199254740992.0;
}

/* About normal. */
static double noise(uint64_t *random) {
    return (uniform(random) + uniform(random) + uniform(random) + uniform(random) - 2) * 1.7320508;
}

static void save(ckd_store *store, const char *run, uint64_t step, ckd_codec codec, ckd_fidelity fidelity,
                 const float *values) {
    ckd_error err;
    ckd_save *s;
    ckd_save_options o = CKD_SAVE_OPTIONS_INIT;
    o.run = run;
    o.step = step;
    o.codec = codec;
    o.fidelity = fidelity;
    o.max_load_cost = o.newest_load_cost = 1000;
    bench_check(ckd_save_begin(&s, store, &o, &err), &err);
    const uint64_t shape[2] = {SIDE, SIDE};
    ckd_tensor t = CKD_TENSOR_INIT;
    t.name = "w";
    t.dtype = CKD_F32;
    t.ndim = 2;
    t.shape = shape;
    t.data = values;
    bench_check(ckd_save_tensor(s, &t, &err), &err);
    bench_check(ckd_save_commit(NULL, s, &err), &err);
}

/* A movement of RANK directions of falling strength. It has nine tenths of the energy of all movement. */
static void move(float *values, uint64_t *random) {
    static float left[SIDE][RANK], right[RANK][SIDE];
    for (size_t i = 0; i < SIDE; i++) {
        for (size_t k = 0; k < RANK; k++) {
            left[i][k] = (float)(1e-5 * noise(random) / (double)(1 + k / 8));
            right[k][i] = (float)noise(random);
        }
    }
    for (size_t i = 0; i < SIDE; i++) {
        for (size_t k = 0; k < RANK; k++) {
            for (size_t j = 0; j < SIDE; j++) {
                values[i * SIDE + j] += left[i][k] * right[k][j];
            }
        }
    }
}

static void add_noise(float *values, uint64_t *random) {
    for (size_t i = 0; i < (size_t)SIDE * SIDE; i++) {
        values[i] += (float)(1e-5 * noise(random));
    }
}

static void make_store(ckd_store *store, int depth) {
    float *values = bench_allocated(malloc(sizeof(float) * SIDE * SIDE));
    float *moved = bench_allocated(malloc(sizeof(float) * SIDE * SIDE));
    uint64_t random = 1;
    for (size_t i = 0; i < (size_t)SIDE * SIDE; i++) {
        values[i] = moved[i] = (float)(0.02 * noise(&random));
    }
    save(store, "raw", 0, CKD_CODEC_RAW, CKD_EXACT, values);
    save(store, "compressed", 0, CKD_CODEC_AUTO, CKD_EXACT, values);
    for (int step = 0; step <= depth; step++) {
        save(store, "chain", (uint64_t)step, CKD_CODEC_AUTO, CKD_EXACT, values);
        save(store, "near", (uint64_t)step, CKD_CODEC_AUTO, CKD_NEAR, values);
        save(store, "factors", (uint64_t)step, CKD_CODEC_AUTO, CKD_NEAR, moved);
        add_noise(values, &random);
        add_noise(moved, &random);
        move(moved, &random);
    }
    free(values);
    free(moved);
}

/* ---- parts ---- */

/* Where part i of n of a side begins. */
static uint64_t cut(const layout *l, uint64_t i, uint64_t n) {
    uint64_t each = (SIDE + n - 1) / n;
    return l->even ? SIDE * i / n : i * each < SIDE ? i * each : SIDE;
}

static ckd_region part(const layout *l, uint64_t i) {
    if (l->rows == 0) {
        uint64_t all = (uint64_t)SIDE * SIDE, start = all * i / l->columns;
        return (ckd_region){
            .kind = CKD_REGION_FLAT, .start = start, .count = all * (i + 1) / l->columns - start};
    }
    uint64_t row = i / l->columns, column = i % l->columns;
    ckd_region r = {.kind = CKD_REGION_BOX, .offsets = {cut(l, row, l->rows), cut(l, column, l->columns)}};
    r.lengths[0] = cut(l, row + 1, l->rows) - r.offsets[0];
    r.lengths[1] = cut(l, column + 1, l->columns) - r.offsets[1];
    return r;
}

static uint64_t ranks_of(const layout *l) {
    return (l->rows ? l->rows : 1) * l->columns;
}

static ckd_load *begin(ckd_store *store, const char *run) {
    ckd_error err;
    ckd_checkpoint c;
    ckd_load *load;
    bench_check(ckd_store_find(&c, store, run, CKD_LATEST, &err), &err);
    bench_check(ckd_load_begin(&load, store, &c.id, &err), &err);
    return load;
}

static ckd_load_request request_of(const ckd_region *r) {
    ckd_load_request q = CKD_LOAD_REQUEST_INIT;
    q.name = "w";
    q.region = *r;
    q.size = 4 * (r->kind == CKD_REGION_FLAT ? r->count : r->lengths[0] * r->lengths[1]);
    return q;
}

static ckd_load_reads reads_of(ckd_load *load, const ckd_region *r) {
    ckd_error err;
    ckd_load_explanation *e;
    ckd_load_request q = request_of(r);
    bench_check(ckd_load_explain(&e, load, &q, 1, &err), &err);
    ckd_load_reads all = e->all;
    ckd_load_explanation_free(e);
    return all;
}

/* Processor time of a load of one region, with all that opening takes. */
static double time_of(ckd_store *store, const char *run, const ckd_region *r, void *values, int repeats) {
    double times[REPEATS_MAX];
    for (int i = 0; i < repeats; i++) {
        ckd_error err;
        double start = bench_cpu_seconds();
        ckd_load *load = begin(store, run);
        ckd_load_request q = request_of(r);
        q.data = values;
        bench_check(ckd_load_tensor(load, &q, &err), &err);
        ckd_load_end(load);
        times[i] = bench_cpu_seconds() - start;
    }
    return bench_median(times, repeats);
}

static result measure(ckd_store *store, const char *run, const layout *l, int repeats) {
    ckd_load *load = begin(store, run);
    static const layout all = {"all", 1, 1, 0};
    ckd_region whole = part(&all, 0);
    uint64_t ranks = ranks_of(l), read = 0, needed = 0;
    result out = {0, 0, NAN, NAN};
    for (uint64_t i = 0; i < ranks; i++) {
        ckd_region r = part(l, i);
        ckd_load_reads reads = reads_of(load, &r);
        double over = (double)reads.read_bytes / (double)reads.needed_bytes;
        read += reads.read_bytes;
        needed += reads.needed_bytes;
        out.worst = over > out.worst ? over : out.worst;
    }
    out.over = (double)read / (double)needed;
    out.read_part = (double)read / (double)ranks / (double)reads_of(load, &whole).read_bytes;
    ckd_load_end(load);
    if (repeats) {
        void *values = bench_allocated(malloc(sizeof(float) * SIDE * SIDE));
        double everything = time_of(store, run, &whole, values, repeats), parts = 0;
        for (uint64_t i = 0; i < ranks; i++) {
            ckd_region r = part(l, i);
            parts += time_of(store, run, &r, values, repeats);
        }
        out.cpu_part = parts / (double)ranks / everything;
        free(values);
    }
    return out;
}

/* ---- results ---- */

/* null: not measured */
static void print_number(FILE *to, const char *name, double x) {
    if (isnan(x)) {
        fprintf(to, ", \"%s\": null", name);
    } else {
        fprintf(to, ", \"%s\": %.4f", name, x);
    }
}

static const char *const ways[WAYS] = {"raw", "compressed", "chain", "near", "factors"};

static void print_json(FILE *to, result results[LAYOUTS][WAYS], int depth) {
    fprintf(to, "{\n  \"machine\": \"%s\",\n  \"matrix\": [%d, %d],\n  \"depth\": %d,\n  \"layouts\": [\n",
            bench_machine(), SIDE, SIDE, depth);
    for (size_t i = 0; i < LAYOUTS; i++) {
        fprintf(to, "    {\"layout\": \"%s\", \"ranks\": %llu", layouts[i].name,
                (unsigned long long)ranks_of(&layouts[i]));
        for (int w = 0; w < WAYS; w++) {
            char name[64];
            snprintf(name, sizeof(name), "%s_over", ways[w]);
            print_number(to, name, results[i][w].over);
            snprintf(name, sizeof(name), "%s_worst", ways[w]);
            print_number(to, name, results[i][w].worst);
            if (w >= CHAINS) {
                snprintf(name, sizeof(name), "%s_read_part", ways[w]);
                print_number(to, name, results[i][w].read_part);
                snprintf(name, sizeof(name), "%s_cpu_part", ways[w]);
                print_number(to, name, results[i][w].cpu_part);
            }
        }
        fprintf(to, "}%s\n", i + 1 < LAYOUTS ? "," : "");
    }
    fprintf(to, "  ]\n}\n");
}

/* One over the shares, of chains; empty if they were not measured. */
static void print_parts(const result r[WAYS], bool times) {
    for (int w = CHAINS; w < WAYS; w++) {
        double share = times ? r[w].cpu_part : r[w].read_part;
        if (!isnan(share)) {
            printf("%s1/%.1f", w > CHAINS ? ", " : "", 1 / share);
        }
    }
    printf(" |%s", times ? "\n" : " ");
}

static void run(ckd_store *store, int depth, int repeats, const char *json) {
    static result results[LAYOUTS][WAYS];
    make_store(store, depth);
    printf(
        "| layout | raw: over (worst) | compressed: over (worst) | chain: over (worst) | near: over (worst) | factors: over "
        "(worst) | a rank reads: chain, near, factors | its time |\n|---|---|---|---|---|---|---|---|\n");
    for (size_t i = 0; i < LAYOUTS; i++) {
        result *r = results[i];
        printf("| %s |", layouts[i].name);
        for (int w = 0; w < WAYS; w++) {
            bool timed = w >= CHAINS && ranks_of(&layouts[i]) == 8;
            r[w] = measure(store, ways[w], &layouts[i], timed ? repeats : 0);
            printf(" %.3f (%.3f) |", r[w].over, r[w].worst);
        }
        printf(" ");
        print_parts(r, false);
        print_parts(r, true);
        fflush(stdout);
    }
    FILE *to = bench_open_output(json);
    print_json(to, results, depth);
    bench_close_output(to, json);
}

int main(int argc, char **argv) {
    int depth = 16, repeats = 3;
    const char *json = "bench/results/bench_reshard.json";
    const bench_option known[] = {{"--depth", .number = &depth, .least = 0, .most = 1000},
                                  {"--repeats", .number = &repeats, .least = 1, .most = REPEATS_MAX},
                                  {"--json", .text = &json}};
    bench_parse(known, sizeof(known) / sizeof(known[0]), argc, argv);
    char path[BENCH_PATH];
    bench_make_folder(path, NULL);
    ckd_error err;
    ckd_store *store;
    ckd_store_options o = CKD_STORE_OPTIONS_INIT;
    o.threads = 1;
    bench_check(ckd_store_open(&store, path, CKD_OPEN_CREATE, &o, &err), &err);
    run(store, depth, repeats, json);
    ckd_store_close(store);
    bench_remove_tree(path);
    return 0;
}
