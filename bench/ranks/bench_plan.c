/*
 * bench_plan: the cost of planning a save of many ranks.
 *
 *   bench_plan [--tensors N] [--ranks N] [--repeats N] [--json FILE]
 *
 * Each rank holds one region of each tensor (4096 x 4096, f32). The layouts are those of tensor parallelism (rows,
 * columns, grids of both), of flat shards (FSDP and ZeRO: ranges of the row-major order that begin in the middle of
 * rows), of data parallelism (all ranks hold everything), and a grid with replicas. It prints, for one core, medians:
 *
 *   describe   one rank's description, and its bytes
 *   plan       from the descriptions of all ranks to the plan: read, compare, sort, check bounds, overlap and coverage, assign
 *   refuse     the same until the error, where one region of one tensor in the middle is one element too short
 *   cache      from the hashes that ranks exchange to the plan in the cache
 *   memory     peak resident memory of a process that does this, with the descriptions of all ranks
 */
#include <ckptdelta.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "bench/support/support.h"
#include "engine/ranks/internal.h"

enum { SIDE = 4096, REPEATS_MAX = 64 };

typedef struct options {
    int tensors, ranks, repeats;
    const char *json;
} options;

typedef struct result {
    double describe, plan, refuse, cached, memory_mib;
    double description_bytes, plan_bytes;
    ckd_plan_summary summary;
} result;

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
    ckd_tensor *t = bench_allocated(calloc((size_t)o->tensors, sizeof(*t)));
    for (int i = 0; i < o->tensors; i++) {
        t[i] = (ckd_tensor)CKD_TENSOR_INIT;
        t[i].name = names[i];
        t[i].dtype = CKD_F32;
        t[i].ndim = 2;
        t[i].shape = shape;
        t[i].region = layout->region(rank, (uint64_t)o->ranks);
    }
    return t;
}

/* broken: the last rank leaves out an element of a tensor in the middle. A replica becomes a range of that length. */
static double describe_all(ckd_bytes *out, const options *o, const struct layout *layout, int broken) {
    static const uint64_t shape[2] = {SIDE, SIDE};
    char(*names)[64] = bench_allocated(malloc((size_t)o->tensors * sizeof(*names)));
    double seconds = 0;
    for (int i = 0; i < o->tensors; i++) {
        snprintf(names[i], sizeof(names[i]), "model.layers.%d.mlp.down_proj.weight", i);
    }
    for (int rank = 0; rank < o->ranks; rank++) {
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
        double start = bench_seconds();
        bench_check(
            ckd_plan_describe(&out[rank], (uint32_t)rank, (uint32_t)o->ranks, t, (size_t)o->tensors, &err),
            &err);
        seconds += bench_seconds() - start;
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

static double time_cached(ckd_plan *plan, const ckd_bytes *descriptions, const options *o) {
    plan_cache *cache;
    ckd_error err = {0};
    hash128 *hashes = bench_allocated(malloc((size_t)o->ranks * sizeof(*hashes)));
    bench_check(plan_cache_new(&cache, 0, &err), &err);
    plan_cache_add(cache, plan);
    for (int r = 0; r < o->ranks; r++) {
        hashes[r] = plan_description_hash(&descriptions[r]);
    }
    double start = bench_seconds();
    hash128 key = plan_key_of_hashes(hashes, (uint32_t)o->ranks);
    const ckd_plan *found = plan_cache_find(cache, &key);
    double seconds = bench_seconds() - start;
    if (found != plan) {
        bench_die("cache", "it does not have the plan");
    }
    plan_cache_free(cache);
    free(hashes);
    return seconds;
}

static void measure(result *r, const options *o, const struct layout *layout) {
    ckd_bytes *descriptions = bench_allocated(calloc((size_t)o->ranks, sizeof(*descriptions)));
    double times[REPEATS_MAX];
    ckd_error err = {0};
    ckd_plan *plan = NULL;
    r->describe = describe_all(descriptions, o, layout, 0);
    r->description_bytes = (double)descriptions[0].size;
    for (int i = 0; i < o->repeats; i++) {
        ckd_plan_free(plan);
        double start = bench_cpu_seconds();
        bench_check(ckd_plan_make(&plan, descriptions, (uint32_t)o->ranks, &err), &err);
        times[i] = bench_cpu_seconds() - start;
    }
    r->plan = bench_median(times, o->repeats);
    r->summary = ckd_plan_summarise(plan);
    ckd_bytes text;
    bench_check(plan_bytes(&text, plan, &err), &err);
    r->plan_bytes = (double)text.size;
    ckd_bytes_free(&text);
    r->cached = time_cached(plan, descriptions, o);
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    r->memory_mib = (double)usage.ru_maxrss / 1024;
    free_all(descriptions, o);
    describe_all(descriptions, o, layout, 1);
    for (int i = 0; i < o->repeats; i++) {
        double start = bench_cpu_seconds();
        if (ckd_plan_make(&plan, descriptions, (uint32_t)o->ranks, &err) != CKD_E_MISMATCH) {
            bench_die(layout->name, "a layout with a hole was accepted");
        }
        times[i] = bench_cpu_seconds() - start;
    }
    r->refuse = bench_median(times, o->repeats);
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
        bench_die(layout->name, "its process failed");
    }
    close(ends[0]);
    close(ends[1]);
}

static void print(FILE *json, const struct layout *layout, const result *r, int last) {
    const ckd_plan_summary *s = &r->summary;
    printf("%-11s  %8llu  %8llu  %8.2f  %8.1f  %7.3f  %7.3f  %8.1f  %8.0f  %8.0f\n", layout->name,
           (unsigned long long)s->regions, (unsigned long long)s->written, r->describe * 1e3,
           r->description_bytes / 1024, r->plan, r->refuse, r->cached * 1e6, r->memory_mib,
           r->plan_bytes / 1024);
    fprintf(
        json,
        "    {\"layout\": \"%s\", \"tensors\": %llu, \"ranks\": %u, \"regions\": %llu, \"written\": %llu, "
        "\"replicas\": %llu,\n     \"describe_seconds\": %.6f, \"description_bytes\": %.0f, "
        "\"plan_seconds\": %.4f, \"refuse_seconds\": %.4f, \"cached_seconds\": %.7f, \"peak_mib\": %.1f, "
        "\"plan_bytes\": %.0f,\n     \"least_bytes\": %llu, \"most_bytes\": %llu}%s\n",
        layout->name, (unsigned long long)s->tensors, (unsigned)s->world, (unsigned long long)s->regions,
        (unsigned long long)s->written, (unsigned long long)s->replicas, r->describe, r->description_bytes,
        r->plan, r->refuse, r->cached, r->memory_mib, r->plan_bytes, (unsigned long long)s->min_bytes,
        (unsigned long long)s->max_bytes, last ? "" : ",");
}

int main(int argc, char **argv) {
    options o = {.tensors = 1024, .ranks = 1024, .repeats = 5, .json = "bench/results/bench_plan.json"};
    const bench_option known[] = {{"--tensors", .number = &o.tensors, .least = 1, .most = SIDE},
                                  {"--ranks", .number = &o.ranks, .least = 1, .most = SIDE},
                                  {"--repeats", .number = &o.repeats, .least = 1, .most = REPEATS_MAX},
                                  {"--json", .text = &o.json}};
    bench_parse(known, sizeof(known) / sizeof(known[0]), argc, argv);
    FILE *json = bench_open_output(o.json);
    fprintf(json, "{\n  \"benchmark\": \"plan\",\n  \"machine\": \"%s\",\n  \"layouts\": [\n",
            bench_machine());
    printf("%-11s  %8s  %8s  %8s  %8s  %7s  %7s  %8s  %8s  %8s\n", "layout", "regions", "written", "descr ms",
           "KiB", "plan s", "refuse", "cache us", "peak MiB", "plan KiB");
    for (int i = 0; i < LAYOUTS; i++) {
        result r = {0};
        measure_apart(&r, &o, &layouts[i]);
        print(json, &layouts[i], &r, i + 1 == LAYOUTS);
    }
    fprintf(json, "  ]\n}\n");
    bench_close_output(json, o.json);
    return 0;
}
