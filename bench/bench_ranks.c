/*
 * bench_ranks: ranks that save together.
 *
 *   bench_ranks [--only kills|watching|bytes|plans] [--kills N] [--matrices N] [--dir DIR] [--json FILE]
 *
 *   kills      four processes save, one is killed (SIGKILL) at any time: how soon the others have the error (ranks_kills.c)
 *   watching   what looking at the others costs (ranks_watching.c)
 *   bytes      what four ranks store of 1 GiB, and what one does; through the directory, and over MPI (ranks_bytes.c, mpi_save.c)
 *   plans      what planning the load of a rank takes at a million blocks, and in memory (ranks_plans.c)
 *
 * Stores are made in DIR (TMPDIR, or /tmp) and removed: 2 GiB at most. Uses the public API only.
 */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "bench/ranks_bench.h"
#include "bench/support.h"

static const struct {
    const char *name;
    void (*run)(FILE *json, const ranks_options *o);
} parts[] = {{"kills", bench_kills},
             {"watching", bench_watching},
             {"bytes", bench_bytes},
             {"plans", bench_load_plans}};
enum { PARTS = sizeof(parts) / sizeof(parts[0]) };

typedef struct arguments {
    ranks_options o;
    const char *json, *only;
} arguments;

static int parse(arguments *a, int argc, char **argv) {
    const struct {
        const char *name;
        const char **text;
        unsigned *number;
    } known[] = {{"--only", &a->only, NULL},           {"--json", &a->json, NULL},
                 {"--dir", &a->o.dir, NULL},           {"--kills", NULL, &a->o.kills},
                 {"--matrices", NULL, &a->o.matrices}, {"--tensors", NULL, &a->o.tensors},
                 {"--shards", NULL, &a->o.shards}};
    for (int i = 1; i < argc; i += 2) {
        int found = 0;
        for (size_t k = 0; i + 1 < argc && k < sizeof(known) / sizeof(known[0]); k++) {
            if (strcmp(argv[i], known[k].name) == 0 && known[k].text) {
                *known[k].text = argv[i + 1];
                found = 1;
            } else if (strcmp(argv[i], known[k].name) == 0) {
                *known[k].number = (unsigned)atoi(argv[i + 1]);
                found = atoi(argv[i + 1]) > 0 && atoi(argv[i + 1]) <= 10000;
            }
        }
        if (!found) {
            fprintf(stderr, "bench_ranks: %s: not an option, or without its value\n", argv[i]);
            return 0;
        }
    }
    return 1;
}

int main(int argc, char **argv) {
    const char *temporary = getenv("TMPDIR");
    char dir[4096];
    arguments a = {.o = {.kills = 200,
                         .matrices = 22,
                         .tensors = 1024,
                         .shards = 1024,
                         .dir = temporary ? temporary : "/tmp"},
                   .json = "bench/results/bench_ranks.json"};
    if (!parse(&a, argc, argv)) {
        return 2;
    }
    snprintf(dir, sizeof(dir), "%s/bench_ranks-XXXXXX", a.o.dir);
    FILE *json = fopen(a.json, "w");
    a.o.dir = mkdtemp(dir);
    if (!json || !a.o.dir) {
        perror(json ? dir : a.json);
        return 1;
    }
    fprintf(json, "{\n  \"benchmark\": \"ranks\",\n  \"machine\": \"%s\"", bench_machine());
    for (int i = 0; i < PARTS; i++) {
        if (!a.only || strcmp(a.only, parts[i].name) == 0) {
            fprintf(json, ",\n");
            parts[i].run(json, &a.o);
        }
    }
    fprintf(json, "\n}\n");
    fclose(json);
    bench_remove_tree(dir);
    return 0;
}
