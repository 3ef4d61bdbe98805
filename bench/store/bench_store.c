/*
 * bench_store: the cost of opening, listing and reporting a store of very many checkpoints.
 *
 *   bench_store [--checkpoints N] [--tensors N] [--runs N] [--repeats N] [--store DIR] [--json FILE]
 *
 * It writes the store itself, file by file and without syncing, because training would take too long. Each checkpoint
 * is a base of tensors of eight elements, in a chunk file of its own. If DIR already holds a store, it is used as it
 * is. It prints medians of:
 *
 *   without    opening for reading without a catalog, so that one is made in memory
 *   adopt      opening for writing without a catalog, which makes it from the manifests (once)
 *   rebuild    making it again on request (once)
 *   open       opening for reading, and for writing
 *   list       ckd_store_list
 *   report     ckd_store_report, which reads the tensors from the chunk files
 *   commands   the processes `ckptdelta list --json`, `report`, `report --json`, their output dropped
 *
 * Seconds are wall-clock time, and processor time. Files are in the page cache. The command is the one of the same
 * build.
 */
#include <fcntl.h>
#include <math.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "bench/support/support.h"
#include "codec/chunk/chunk.h"
#include "engine/store/handle.h"

enum { ELEMENTS = 8, REPEATS_MAX = 64 };

typedef struct options {
    uint64_t checkpoints, tensors, runs;
    int repeats;
    const char *store; /* NULL: a temporary one */
    const char *json_path;
    FILE *json;
    long first_figure; /* its position in the JSON */
} options;

/* ---- writing the store ---- */

static void write_file(const char *path, const void *data, size_t size) {
    file_writer *f;
    ckd_error err = {0};
    bench_check(file_create(&f, path, 0, &err), &err);
    bench_check(file_append(f, data, size, &err), &err);
    bench_check(file_close(f, &err), &err);
}

static void name_of(char name[64], uint64_t tensor) {
    static const char *const roles[] = {"", "exp_avg.", "exp_avg_sq.", "master."};
    snprintf(name, 64, "%slayers.%llu.mlp.weight", roles[tensor % 4], (unsigned long long)(tensor / 4));
}

static uint64_t write_records(chunk_writer *w, const ckd_id *checkpoint, uint64_t seed, uint64_t tensors,
                              manifest *m) {
    ckd_error err = {0};
    ckd_region whole = {.kind = CKD_REGION_WHOLE};
    for (uint64_t i = 0; i < tensors; i++) {
        char name[64];
        float values[ELEMENTS];
        name_of(name, i);
        for (size_t k = 0; k < ELEMENTS; k++) {
            values[k] = sinf((float)(seed * 131 + i * 17 + k));
        }
        record_tensor t = {.name = name,
                           .checkpoint = *checkpoint,
                           .role = ckd_role_of(name, CKD_F32),
                           .dtype = CKD_F32,
                           .ndim = 2,
                           .shape = {2, ELEMENTS / 2}};
        record r = {.kind = RECORD_BLOCK,
                    .tensor = &t,
                    .region = &whole,
                    .count = ELEMENTS,
                    .raw_size = sizeof(values),
                    .stored_size = sizeof(values),
                    .content = content_hash(values, sizeof(values)),
                    .chain_stored = sizeof(values),
                    .base_stored = sizeof(values)};
        bench_check(chunk_writer_append(w, &r, values, &err), &err);
        role_total *total = &m->roles[t.role - 1];
        total->role = t.role;
        total->tensors++;
        total->raw_bytes += sizeof(values);
        total->stored_bytes += sizeof(values) + 44;
    }
    return tensors * sizeof(float) * ELEMENTS;
}

static void make_checkpoint(const ckd_store *store, uint64_t number, const options *o) {
    ckd_error err = {0};
    role_total roles[CKD_ROLE_OTHER] = {{0}};
    file_ref file = {0};
    manifest m = {
        .roles = roles, .role_count = CKD_ROLE_MASTER, .files = &file, .file_count = 1, .own_count = 1};
    ckd_checkpoint *c = &m.checkpoint;
    bench_check(ckd_id_new(&c->id, &err), &err);
    bench_check(ckd_id_new(&file.id, &err), &err);
    snprintf(c->run, sizeof(c->run), "run-%llu", (unsigned long long)(number % o->runs));
    c->step = 100 * (number / o->runs);
    c->kind = CKD_BASE;
    c->fidelity = CKD_EXACT;
    c->world = 1;
    c->tensors = o->tensors;
    c->load_cost = 1;
    c->created_ns = clock_wall_ns();
    c->metric = NAN;
    chunk_writer *w;
    chunk_identity identity = {store->id, file.id, c->id};
    bench_check(chunk_writer_create(&w, path_chunk(store->path, &file.id, "").text, &identity, &err), &err);
    chunk_writer_gather(w);
    c->raw_bytes = write_records(w, &c->id, number, o->tensors, &m);
    uint64_t size;
    bench_check(chunk_writer_close(w, &size, &err), &err);
    chunk *back;
    bench_check(chunk_open(&back, path_chunk(store->path, &file.id, "").text, &err), &err);
    file.size = c->stored_bytes = back->size;
    file.root = back->root;
    chunk_close(back);
    bytes data = {0};
    manifest_encode(&data, &store->id, &m);
    write_file(path_manifest(store->path, c->run, c->step, 0).text, data.data, data.size);
    bytes_free(&data);
}

static void make_store(const char *path, const options *o) {
    ckd_store *store;
    ckd_error err = {0};
    bench_check(ckd_store_open(&store, path, CKD_OPEN_CREATE, NULL, &err), &err);
    for (uint64_t i = 0; i < o->checkpoints; i++) {
        make_checkpoint(store, i, o);
    }
    ckd_store_close(store);
    char database[4200];
    snprintf(database, sizeof(database), "%s/%s", path, FILE_CATALOG);
    unlink(database);
}

/* Figures of checkpoints that cannot be loaded would mean nothing. */
static void check_store(const char *path, const options *o) {
    ckd_store *store;
    ckd_checkpoint_list *list;
    ckd_load *load;
    ckd_error err = {0};
    bench_check(ckd_store_open(&store, path, CKD_OPEN_READ, NULL, &err), &err);
    bench_check(ckd_store_list(&list, store, NULL, &err), &err);
    bench_check(ckd_load_begin(&load, store, &list->items[0].id, &err), &err);
    if (list->count != o->checkpoints || ckd_load_tensors(load)->count != o->tensors) {
        bench_die(path, "it lacks checkpoints or tensors");
    }
    ckd_load_end(load);
    ckd_checkpoint_list_free(list);
    ckd_store_close(store);
}

/* ---- measuring ---- */

typedef void (*action)(const char *path, void *context);

/* Of this process and of the children that it waited for. */
static double processor_seconds(void) {
    double total = 0;
    for (int whose = RUSAGE_CHILDREN; whose <= RUSAGE_SELF; whose++) {
        struct rusage u;
        getrusage(whose, &u);
        total += (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) +
                 1e-6 * (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec);
    }
    return total;
}

static void measure(const char *what, const options *o, const char *path, action act, void *context) {
    double seconds[REPEATS_MAX], processor[REPEATS_MAX];
    for (int i = 0; i < o->repeats; i++) {
        double start = bench_seconds(), start_cpu = processor_seconds();
        act(path, context);
        seconds[i] = bench_seconds() - start;
        processor[i] = processor_seconds() - start_cpu;
    }
    double median = bench_median(seconds, o->repeats), median_cpu = bench_median(processor, o->repeats);
    printf("  %-22s %8.3f s, processor %8.3f s\n", what, median, median_cpu);
    fflush(stdout);
    fprintf(o->json, "%s\n  {\"what\": \"%s\", \"seconds\": %.3f, \"processor_seconds\": %.3f}",
            ftell(o->json) == o->first_figure ? "" : ",", what, median, median_cpu);
}

static void open_close(const char *path, void *mode) {
    ckd_store *store;
    ckd_error err = {0};
    bench_check(ckd_store_open(&store, path, *(ckd_open_mode *)mode, NULL, &err), &err);
    ckd_store_close(store);
}

static void list(const char *path, void *store) {
    ckd_checkpoint_list *l;
    ckd_error err = {0};
    (void)path;
    bench_check(ckd_store_list(&l, store, NULL, &err), &err);
    ckd_checkpoint_list_free(l);
}

static void report(const char *path, void *store) {
    ckd_report *r;
    ckd_error err = {0};
    (void)path;
    bench_check(ckd_store_report(&r, store, &err), &err);
    ckd_report_free(r);
}

static void rebuild(const char *path, void *nothing) {
    ckd_rebuild_result result;
    ckd_error err = {0};
    (void)nothing;
    bench_check(ckd_store_rebuild(&result, path, NULL, &err), &err);
}

/* Measures a store without a catalog, and leaves one. */
static void measure_adoption(const char *path, const options *o) {
    ckd_open_mode reading = CKD_OPEN_READ, writing = CKD_OPEN_WRITE;
    options once = *o;
    once.repeats = 1;
    measure("open without a catalog", o, path, open_close, &reading);
    measure("adopt", &once, path, open_close, &writing);
    measure("rebuild", &once, path, rebuild, NULL);
}

static void command(const char *path, void *words) {
    char program[BENCH_PATH];
    const char *const *w = words;
    bench_beside_program(program, "../ckptdelta");
    pid_t child = fork();
    if (child == 0) {
        dup2(open("/dev/null", O_WRONLY), STDOUT_FILENO);
        execl(program, program, w[0], path, w[1], (char *)NULL);
        _exit(127);
    }
    int status = 1;
    if (child < 0 || waitpid(child, &status, 0) != child || status != 0) {
        bench_die(program, "it failed; is it built?");
    }
}

static void measure_all(const char *path, const options *o) {
    ckd_open_mode reading = CKD_OPEN_READ, writing = CKD_OPEN_WRITE;
    const char *const listing[] = {"list", "--json"}, *const text[] = {"report", NULL},
                      *const json[] = {"report", "--json"};
    ckd_store *store;
    ckd_error err = {0};
    char database[4200];
    snprintf(database, sizeof(database), "%s/%s", path, FILE_CATALOG);
    if (!file_exists(database)) {
        measure_adoption(path, o);
    }
    measure("open for reading", o, path, open_close, &reading);
    measure("open for writing", o, path, open_close, &writing);
    bench_check(ckd_store_open(&store, path, CKD_OPEN_READ, NULL, &err), &err);
    measure("list", o, path, list, store);
    measure("report", o, path, report, store);
    ckd_store_close(store);
    measure("ckptdelta list --json", o, path, command, (void *)listing);
    measure("ckptdelta report", o, path, command, (void *)text);
    measure("ckptdelta report --json", o, path, command, (void *)json);
}

int main(int argc, char **argv) {
    options o = {.checkpoints = 10000,
                 .tensors = 200,
                 .runs = 10,
                 .repeats = 5,
                 .json_path = "bench/results/bench_store.json"};
    const bench_option known[] = {{"--checkpoints", .count = &o.checkpoints, .least = 1, .most = 10000000},
                                  {"--tensors", .count = &o.tensors, .least = 1, .most = 4096},
                                  {"--runs", .count = &o.runs, .least = 1, .most = 1000000},
                                  {"--repeats", .number = &o.repeats, .least = 1, .most = REPEATS_MAX},
                                  {"--store", .text = &o.store},
                                  {"--json", .text = &o.json_path}};
    bench_parse(known, sizeof(known) / sizeof(known[0]), argc, argv);
    char folder[BENCH_PATH], path[BENCH_PATH + 8];
    if (o.store) {
        snprintf(path, sizeof(path), "%s", o.store);
    } else {
        bench_make_folder(folder, NULL);
        snprintf(path, sizeof(path), "%s/store", folder);
    }
    printf("%s\n%llu checkpoints of %llu tensors, %llu runs\n", bench_machine(),
           (unsigned long long)o.checkpoints, (unsigned long long)o.tensors, (unsigned long long)o.runs);
    o.json = bench_open_output(o.json_path);
    fprintf(
        o.json,
        "{\"machine\": \"%s\", \"checkpoints\": %llu, \"tensors\": %llu, \"runs\": %llu, \"repeats\": %d, \"figures\": [",
        bench_machine(), (unsigned long long)o.checkpoints, (unsigned long long)o.tensors,
        (unsigned long long)o.runs, o.repeats);
    o.first_figure = ftell(o.json);
    if (!bench_file_exists(path)) {
        double start = bench_seconds();
        make_store(path, &o);
        printf("  %-22s %8.3f s\n", "made", bench_seconds() - start);
        check_store(path, &o);
    }
    measure_all(path, &o);
    fprintf(o.json, "\n]}\n");
    bench_close_output(o.json, o.json_path);
    if (!o.store) {
        bench_remove_tree(folder);
    }
    return 0;
}
