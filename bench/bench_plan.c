/*
 * bench_plan: what planning a save of many ranks takes.
 *
 *   bench_plan [--tensors N] [--ranks N] [--repeats N] [--json FILE]
 *
 * Each rank holds one region of each tensor (4096 x 4096, f32): layouts as of tensor parallelism (rows, columns, a grid of both), of flat shards (FSDP
 * and ZeRO: ranges of the row-major order that begin in the midst of rows), of data parallelism (all ranks hold everything), and
 * of a grid with replicas. What is told, on one core, medians:
 *
 *   describe   one rank's description, and its bytes
 *   plan       from the descriptions of all ranks to the plan: read, compared, sorted, checked for bounds, overlap and coverage, assigned
 *   refuse     the same until it is refused, where one region of one tensor in the middle is one element too short
 *   again      the key of hashes exchanged, and the plan found in the cache
 *   memory     peak resident memory of a process that does this, descriptions of all ranks included
 *
 * Uses the public API only.
 */
#include <ckptdelta.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "bench/support.h"
#include "engine/ranks/internal.h"

enum { SIDE = 4096, REPEATS_MAX = 64 };

typedef struct options {
    int tensors, ranks, repeats;
    const char *json;
} options;

typedef struct result {
    double describe, plan, refuse, again, memory_mib;
    double description_bytes, plan_bytes;
    ckd_plan_summary summary;
} result;

static void die(const char *what, const ckd_error *err) {
    fprintf(stderr, "bench_plan: %s: %s (%s)\n", what, err->message, err->tensor);
    exit(1);
}

/* ---- layouts ---- */

static uint64_t cut(uint64_t length, uint64_t i, uint64_t n) {
    return length * i / n;
}

static ckd_region box_of(uint64_t row, uint64_t row_ranks, uint64_t column, uint64_t column_ranks) {
    ckd_region r = {.kind = CKD_REGION_BOX};
    r.offsets[0] = cut(SIDE, row, row_ranks);
    r.lengths[0] = cut(SIDE, row + 1, row_ranks) - r.offsets[0];
    r.offsets[1] = cut(SIDE, column, column_ranks);
    r.lengths[1] = cut(SIDE, column + 1, column_ranks) - r.offsets[1];
    return r;
}

static uint64_t grid_side(uint64_t ranks) {
    uint64_t side = 1;
    while ((side * 2) * (side * 2) <= ranks && ranks % (side * 2) == 0) {
        side *= 2;
    }
    return side;
}

static ckd_region rows(uint64_t rank, uint64_t ranks) {
    return box_of(rank, ranks, 0, 1);
}
static ckd_region columns(uint64_t rank, uint64_t ranks) {
    return box_of(0, 1, rank, ranks);
}
static ckd_region grid(uint64_t rank, uint64_t ranks) {
    uint64_t side = grid_side(ranks);
    return box_of(rank / side, ranks / side, rank % side, side);
}
static ckd_region flat(uint64_t rank, uint64_t ranks) {
    uint64_t all = (uint64_t)SIDE * SIDE - 7, each = (all + ranks - 1) / ranks; /* the last one has more */
    uint64_t from = rank * each, to = rank + 1 == ranks ? (uint64_t)SIDE * SIDE : from + each;
    return (ckd_region){.kind = CKD_REGION_FLAT, .start = from, .count = to - from};
}
static ckd_region replicated(uint64_t rank, uint64_t ranks) {
    (void)rank;
    (void)ranks;
    return (ckd_region){.kind = CKD_REGION_WHOLE};
}
static ckd_region grid_and_replicas(uint64_t rank, uint64_t ranks) {
    uint64_t groups = ranks >= 8 ? 8 : 1;
    return grid(rank / groups, ranks / groups);
}

static const struct layout {
    const char *name;
    ckd_region (*region)(uint64_t rank, uint64_t ranks);
} layouts[] = {{"rows", rows}, {"columns", columns},       {"grid", grid},
               {"flat", flat}, {"replicated", replicated}, {"grid x 8", grid_and_replicas}};
enum { LAYOUTS = sizeof(layouts) / sizeof(layouts[0]) };

/* ---- one layout ---- */

static ckd_tensor *tensors_of(const options *o, const struct layout *layout, uint64_t rank, char (*names)[64],
                              const uint64_t *shape) {
    ckd_tensor *t = calloc((size_t)o->tensors, sizeof(*t));
    for (int i = 0; t && i < o->tensors; i++) {
        t[i] = (ckd_tensor)CKD_TENSOR_INIT;
        t[i].name = names[i];
        t[i].dtype = CKD_F32;
        t[i].ndim = 2;
        t[i].shape = shape;
        t[i].region = layout->region(rank, (uint64_t)o->ranks);
    }
    return t;
}

/* broken: the last rank leaves out an element of a tensor in the middle; of replicas, all but one. */
static double describe_all(ckd_bytes *out, const options *o, const struct layout *layout, int broken) {
    static const uint64_t shape[2] = {SIDE, SIDE};
    char(*names)[64] = malloc((size_t)o->tensors * sizeof(*names));
    double seconds = 0;
    for (int i = 0; names && i < o->tensors; i++) {
        snprintf(names[i], sizeof(names[i]), "model.layers.%d.mlp.down_proj.weight", i);
    }
    for (int rank = 0; names && rank < o->ranks; rank++) {
        ckd_tensor *t = tensors_of(o, layout, (uint64_t)rank, names, shape);
        ckd_error err = {0};
        if (broken && rank + 1 == o->ranks) {
            ckd_region *r = &t[o->tensors / 2].region;
            r->lengths[1]--;
            r->count--;
            if (r->kind == CKD_REGION_WHOLE) {
                *r = (ckd_region){.kind = CKD_REGION_FLAT, .count = (uint64_t)SIDE * SIDE - 1};
            }
        }
        double begun = bench_seconds();
        if (ckd_plan_describe(&out[rank], (uint32_t)rank, (uint32_t)o->ranks, t, (size_t)o->tensors, &err)) {
            die("describe", &err);
        }
        seconds += bench_seconds() - begun;
        free(t);
    }
    free(names);
    return seconds / o->ranks;
}

static void free_all(ckd_bytes *descriptions, const options *o) {
    for (int i = 0; i < o->ranks; i++) {
        ckd_bytes_free(&descriptions[i]);
    }
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}
static double median(double *values, int count) {
    qsort(values, (size_t)count, sizeof(*values), ascending);
    return values[count / 2];
}

static double time_again(ckd_plan *plan, const ckd_bytes *descriptions, const options *o) {
    plan_cache *cache;
    ckd_error err = {0};
    hash128 *hashes = malloc((size_t)o->ranks * sizeof(*hashes));
    if (!hashes || plan_cache_new(&cache, 0, &err)) {
        die("cache", &err);
    }
    plan_cache_add(cache, plan);
    for (int r = 0; r < o->ranks; r++) {
        hashes[r] = plan_description_hash(&descriptions[r]);
    }
    double begun = bench_seconds();
    hash128 key = plan_key_of_hashes(hashes, (uint32_t)o->ranks);
    const ckd_plan *found = plan_cache_find(cache, &key);
    double seconds = bench_seconds() - begun;
    if (found != plan) {
        die("the plan is not in the cache", &err);
    }
    plan_cache_free(cache);
    free(hashes);
    return seconds;
}

static void measure(result *r, const options *o, const struct layout *layout) {
    ckd_bytes *descriptions = calloc((size_t)o->ranks, sizeof(*descriptions));
    double times[REPEATS_MAX];
    ckd_error err = {0};
    ckd_plan *plan = NULL;
    r->describe = describe_all(descriptions, o, layout, 0);
    r->description_bytes = (double)descriptions[0].size;
    for (int i = 0; i < o->repeats; i++) {
        ckd_plan_free(plan);
        double begun = bench_cpu_seconds();
        if (ckd_plan_make(&plan, descriptions, (uint32_t)o->ranks, &err)) {
            die("plan", &err);
        }
        times[i] = bench_cpu_seconds() - begun;
    }
    r->plan = median(times, o->repeats);
    r->summary = ckd_plan_summarise(plan);
    ckd_bytes text;
    if (plan_bytes(&text, plan, &err)) {
        die("plan as bytes", &err);
    }
    r->plan_bytes = (double)text.size;
    ckd_bytes_free(&text);
    r->again = time_again(plan, descriptions, o);
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    r->memory_mib = (double)usage.ru_maxrss / 1024;
    free_all(descriptions, o);
    describe_all(descriptions, o, layout, 1);
    for (int i = 0; i < o->repeats; i++) {
        double begun = bench_cpu_seconds();
        if (ckd_plan_make(&plan, descriptions, (uint32_t)o->ranks, &err) != CKD_E_MISMATCH) {
            die("a layout with a hole was accepted", &err);
        }
        times[i] = bench_cpu_seconds() - begun;
    }
    r->refuse = median(times, o->repeats);
    free_all(descriptions, o);
    free(descriptions);
}

/* In a process of its own, whose memory is the layout's. */
static void measure_apart(result *r, const options *o, const struct layout *layout) {
    int ends[2], state = 0;
    fflush(NULL);
    pid_t pid = pipe(ends) ? -1 : fork();
    if (pid == 0) {
        measure(r, o, layout);
        _exit(write(ends[1], r, sizeof(*r)) != sizeof(*r));
    }
    if (pid < 0 || waitpid(pid, &state, 0) != pid || state != 0 ||
        read(ends[0], r, sizeof(*r)) != sizeof(*r)) {
        fprintf(stderr, "bench_plan: %s failed\n", layout->name);
        exit(1);
    }
    close(ends[0]);
    close(ends[1]);
}

static void print(FILE *json, const struct layout *layout, const result *r, int last) {
    const ckd_plan_summary *s = &r->summary;
    printf("%-11s  %8llu  %8llu  %8.2f  %8.1f  %7.3f  %7.3f  %8.1f  %8.0f  %8.0f\n", layout->name,
           (unsigned long long)s->regions, (unsigned long long)s->written, r->describe * 1e3,
           r->description_bytes / 1024, r->plan, r->refuse, r->again * 1e6, r->memory_mib,
           r->plan_bytes / 1024);
    fprintf(
        json,
        "    {\"layout\": \"%s\", \"tensors\": %llu, \"ranks\": %u, \"regions\": %llu, \"written\": %llu, "
        "\"replicas\": %llu,\n     \"describe_seconds\": %.6f, \"description_bytes\": %.0f, "
        "\"plan_seconds\": %.4f, \"refuse_seconds\": %.4f, \"cached_seconds\": %.7f, \"peak_mib\": %.1f, "
        "\"plan_bytes\": %.0f,\n     \"least_bytes\": %llu, \"most_bytes\": %llu}%s\n",
        layout->name, (unsigned long long)s->tensors, (unsigned)s->world, (unsigned long long)s->regions,
        (unsigned long long)s->written, (unsigned long long)s->replicas, r->describe, r->description_bytes,
        r->plan, r->refuse, r->again, r->memory_mib, r->plan_bytes, (unsigned long long)s->least_bytes,
        (unsigned long long)s->most_bytes, last ? "" : ",");
}

static int parse(options *o, int argc, char **argv) {
    const struct {
        const char *name;
        int *at;
    } numbers[] = {{"--tensors", &o->tensors}, {"--ranks", &o->ranks}, {"--repeats", &o->repeats}};
    for (int i = 1; i < argc; i += 2) {
        int known = i + 1 < argc && strcmp(argv[i], "--json") == 0;
        if (known) {
            o->json = argv[i + 1];
        }
        for (size_t k = 0; i + 1 < argc && k < sizeof(numbers) / sizeof(numbers[0]); k++) {
            if (strcmp(argv[i], numbers[k].name) == 0) {
                *numbers[k].at = atoi(argv[i + 1]);
                known = *numbers[k].at > 0 && *numbers[k].at <= SIDE;
            }
        }
        if (!known) {
            fprintf(stderr, "bench_plan: %s: not an option, or without its value\n", argv[i]);
            return 0;
        }
    }
    return o->repeats <= REPEATS_MAX;
}

int main(int argc, char **argv) {
    options o = {.tensors = 1024, .ranks = 1024, .repeats = 5, .json = "bench/results/bench_plan.json"};
    if (!parse(&o, argc, argv)) {
        return 2;
    }
    FILE *json = fopen(o.json, "w");
    if (!json) {
        perror(o.json);
        return 1;
    }
    fprintf(json, "{\n  \"benchmark\": \"plan\",\n  \"machine\": \"%s\",\n  \"layouts\": [\n",
            bench_machine());
    printf("%-11s  %8s  %8s  %8s  %8s  %7s  %7s  %8s  %8s  %8s\n", "layout", "regions", "written", "descr ms",
           "KiB", "plan s", "refuse", "again us", "peak MiB", "plan KiB");
    for (int i = 0; i < LAYOUTS; i++) {
        result r = {0};
        measure_apart(&r, &o, &layouts[i]);
        print(json, &layouts[i], &r, i + 1 == LAYOUTS);
    }
    fprintf(json, "  ]\n}\n");
    fclose(json);
    return 0;
}
