/*
 * bench_store: what a store of very many checkpoints costs whoever opens, lists and reports it.
 *
 *   bench_store [--checkpoints N] [--tensors N] [--runs N] [--repeats N] [--store DIR] [--json FILE]
 *
 * The store is made here, file by file and without syncing, as no training could in that time: each checkpoint is a base of tensors of eight elements, in a chunk
 * file of its own. A store that DIR holds already is used as it is. What is told, medians:
 *
 *   without    opening for reading without a catalog, for which one is made in memory
 *   adopt      opening for writing without a catalog, which makes it from the manifests (once)
 *   unread     ckd_store_report after that: tensors that the catalog does not have are read from the chunk files
 *   rebuild    making it with the tensors of all checkpoints (once)
 *   open       opening for reading, and for writing
 *   list       ckd_store_list
 *   report     ckd_store_report
 *   commands   the processes `ckptdelta list --json`, `report`, `report --json`, their output dropped
 *
 * Seconds that passed, and of processor time. Files are in the page cache.
 */
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "bench/support.h"
#include "codec/chunk/chunk.h"
#include "engine/store/handle.h"

enum { ELEMENTS = 8, REPEATS_MAX = 64, TENSORS_MAX = 4096 };

typedef struct options {
    uint64_t checkpoints, tensors, runs;
    int repeats;
    const char *store; /* NULL: one of its own, removed at the end */
    const char *json_path;
    FILE *json;
    long json_begun; /* where its figures do */
} options;

static void need(ckd_status status, const char *what, const ckd_error *err) {
    if (status != CKD_OK) {
        fprintf(stderr, "bench_store: %s: %s (%s)\n", what, err->message, err->file);
        exit(1);
    }
}

/* ---- making it ---- */

static void write_file(const char *path, const void *data, size_t size) {
    file_writer *f;
    ckd_error err = {0};
    need(file_create(&f, path, 0, &err), "writing", &err);
    need(file_append(f, data, size, &err), "writing", &err);
    need(file_close(f, &err), "writing", &err);
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
        need(chunk_writer_append(w, &r, values, &err), "a record", &err);
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
    manifest m = {.roles = roles, .role_count = CKD_ROLE_MASTER, .files = &file, .file_count = 1};
    ckd_checkpoint *c = &m.checkpoint;
    need(ckd_id_new(&c->id, &err), "an id", &err);
    need(ckd_id_new(&file.id, &err), "an id", &err);
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
    need(chunk_writer_create(&w, path_chunk(store->path, &file.id, "").text, &identity, &err), "a chunk file",
         &err);
    chunk_writer_gather(w);
    c->raw_bytes = write_records(w, &c->id, number, o->tensors, &m);
    need(chunk_writer_close(w, &err), "a chunk file", &err);
    chunk *back;
    need(chunk_open(&back, path_chunk(store->path, &file.id, "").text, &err), "a chunk file", &err);
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
    need(ckd_store_open(&store, path, CKD_OPEN_CREATE, NULL, &err), "making a store", &err);
    for (uint64_t i = 0; i < o->checkpoints; i++) {
        make_checkpoint(store, i, o);
    }
    ckd_store_close(store);
    char database[4200];
    snprintf(database, sizeof(database), "%s/%s", path, FILE_CATALOG);
    unlink(database);
}

/* ---- measuring ---- */

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

typedef void (*action)(const char *path, void *context);

/* Of this process and of those that it waited for. */
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
        double begun = bench_seconds(), computed = processor_seconds();
        act(path, context);
        seconds[i] = bench_seconds() - begun;
        processor[i] = processor_seconds() - computed;
    }
    qsort(seconds, (size_t)o->repeats, sizeof(double), by_value);
    qsort(processor, (size_t)o->repeats, sizeof(double), by_value);
    printf("  %-22s %8.3f s, processor %8.3f s\n", what, seconds[o->repeats / 2], processor[o->repeats / 2]);
    fflush(stdout);
    fprintf(o->json, "%s\n  {\"what\": \"%s\", \"seconds\": %.3f, \"processor_seconds\": %.3f}",
            ftell(o->json) == o->json_begun ? "" : ",", what, seconds[o->repeats / 2],
            processor[o->repeats / 2]);
}

static void open_close(const char *path, void *mode) {
    ckd_store *store;
    ckd_error err = {0};
    need(ckd_store_open(&store, path, *(ckd_open_mode *)mode, NULL, &err), "opening", &err);
    ckd_store_close(store);
}

static void list(const char *path, void *store) {
    ckd_checkpoint_list *l;
    ckd_error err = {0};
    (void)path;
    need(ckd_store_list(&l, store, NULL, &err), "listing", &err);
    ckd_checkpoint_list_free(l);
}

static void report(const char *path, void *store) {
    ckd_report *r;
    ckd_error err = {0};
    (void)path;
    need(ckd_store_report(&r, store, &err), "reporting", &err);
    ckd_report_free(r);
}

static void rebuild(const char *path, void *nothing) {
    ckd_rebuild_result result;
    ckd_error err = {0};
    (void)nothing;
    need(ckd_store_rebuild(&result, path, NULL, &err), "rebuilding", &err);
}

/* What there is to do before there is a catalog with all tensors. */
static void measure_adoption(const char *path, const options *o) {
    ckd_open_mode reading = CKD_OPEN_READ, writing = CKD_OPEN_WRITE;
    ckd_store *store;
    ckd_error err = {0};
    options once = *o;
    once.repeats = 1;
    measure("open without a catalog", o, path, open_close, &reading);
    measure("adopt", &once, path, open_close, &writing);
    need(ckd_store_open(&store, path, CKD_OPEN_READ, NULL, &err), "opening", &err);
    measure("report, tensors unread", o, path, report, store);
    ckd_store_close(store);
    measure("rebuild", &once, path, rebuild, NULL);
}

static void command(const char *path, void *words) {
    char program[4096] = "build/current/ckptdelta";
    const char *build = getenv("CKPTDELTA_BUILD"), *const *w = words;
    if (build) {
        snprintf(program, sizeof(program), "%s/ckptdelta", build);
    }
    pid_t child = fork();
    if (child == 0) {
        int nothing = open("/dev/null", O_WRONLY);
        dup2(nothing, STDOUT_FILENO);
        execl(program, program, w[0], path, w[1], (char *)NULL);
        _exit(127);
    }
    int ended = 1;
    if (child < 0 || waitpid(child, &ended, 0) != child || ended != 0) {
        fprintf(stderr, "bench_store: %s %s failed; CKPTDELTA_BUILD names the build directory\n", program,
                w[0]);
        exit(1);
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
    need(ckd_store_open(&store, path, CKD_OPEN_READ, NULL, &err), "opening", &err);
    measure("list", o, path, list, store);
    measure("report", o, path, report, store);
    ckd_store_close(store);
    measure("ckptdelta list --json", o, path, command, (void *)listing);
    measure("ckptdelta report", o, path, command, (void *)text);
    measure("ckptdelta report --json", o, path, command, (void *)json);
}

/* ---- options ---- */

static uint64_t number(const char *text, uint64_t most) {
    char *end;
    unsigned long long value = strtoull(text, &end, 10);
    if (!*text || *end || value == 0 || value > most) {
        fprintf(stderr, "bench_store: not a number from 1 to %llu: %s\n", (unsigned long long)most, text);
        exit(2);
    }
    return value;
}

static options parse(int argc, char **argv) {
    options o = {.checkpoints = 10000,
                 .tensors = 200,
                 .runs = 10,
                 .repeats = 5,
                 .json_path = "bench/results/bench_store.json"};
    for (int i = 1; i < argc; i += 2) {
        const char *value = i + 1 < argc ? argv[i + 1] : "";
        if (strcmp(argv[i], "--checkpoints") == 0) {
            o.checkpoints = number(value, 10000000);
        } else if (strcmp(argv[i], "--tensors") == 0) {
            o.tensors = number(value, TENSORS_MAX);
        } else if (strcmp(argv[i], "--runs") == 0) {
            o.runs = number(value, 1000000);
        } else if (strcmp(argv[i], "--repeats") == 0) {
            o.repeats = (int)number(value, REPEATS_MAX);
        } else if (strcmp(argv[i], "--store") == 0 && *value) {
            o.store = value;
        } else if (strcmp(argv[i], "--json") == 0 && *value) {
            o.json_path = value;
        } else {
            fprintf(stderr, "bench_store: unknown option %s\n", argv[i]);
            exit(2);
        }
    }
    return o;
}

int main(int argc, char **argv) {
    options o = parse(argc, argv);
    char folder[4096], path[4150];
    const char *temporary = getenv("TMPDIR");
    if (o.store) {
        snprintf(path, sizeof(path), "%s", o.store);
    } else {
        snprintf(folder, sizeof(folder), "%s/ckptdelta-bench-XXXXXX", temporary ? temporary : "/tmp");
        if (!mkdtemp(folder)) {
            perror("bench_store");
            return 1;
        }
        snprintf(path, sizeof(path), "%s/store", folder);
    }
    printf("%s\n%llu checkpoints of %llu tensors, %llu runs\n", bench_machine(),
           (unsigned long long)o.checkpoints, (unsigned long long)o.tensors, (unsigned long long)o.runs);
    o.json = fopen(o.json_path, "w");
    if (!o.json) {
        perror(o.json_path);
        return 1;
    }
    fprintf(
        o.json,
        "{\"machine\": \"%s\", \"checkpoints\": %llu, \"tensors\": %llu, \"runs\": %llu, \"repeats\": %d, \"figures\": [",
        bench_machine(), (unsigned long long)o.checkpoints, (unsigned long long)o.tensors,
        (unsigned long long)o.runs, o.repeats);
    o.json_begun = ftell(o.json);
    if (!bench_file_exists(path)) {
        double begun = bench_seconds();
        make_store(path, &o);
        printf("  %-22s %8.3f s\n", "made", bench_seconds() - begun);
    }
    measure_all(path, &o);
    fprintf(o.json, "\n]}\n");
    if (fclose(o.json) != 0) {
        perror(o.json_path);
        return 1;
    }
    if (!o.store) {
        bench_remove_tree(folder);
    }
    return 0;
}
