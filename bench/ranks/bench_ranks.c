/*
 * bench_ranks: ranks that save together.
 *
 *   bench_ranks [--only kills|watching|bytes|plans] [--kills N] [--matrices N] [--dir DIR] [--json FILE]
 *
 *   kills      four processes save, and one is killed (SIGKILL) at any time: how soon the others get the error (kills.c)
 *   watching   the cost of watching the other ranks (watching.c)
 *   bytes      the size that four ranks store of 1 GiB, and that one rank stores, through the directory and over MPI (bytes.c, mpi_save.c)
 *   plans      time and memory to plan the load of a rank from a million blocks (plans.c)
 *
 * Stores are made in DIR (TMPDIR, or /tmp) and removed: 2 GiB at most. Uses the public API only.
 */
#include <string.h>

#include "bench/ranks/ranks.h"
#include "bench/support/support.h"

static const struct {
    const char *name;
    void (*run)(FILE *json, const ranks_options *o);
} parts[] = {{"kills", bench_kills},
             {"watching", bench_watching},
             {"bytes", bench_bytes},
             {"plans", bench_load_plans}};
enum { PARTS = sizeof(parts) / sizeof(parts[0]) };

int main(int argc, char **argv) {
    char dir[BENCH_PATH];
    const char *only = NULL, *path = "bench/results/bench_ranks.json";
    ranks_options o = {.kills = 200, .matrices = 22, .tensors = 1024, .shards = 1024};
    const bench_option known[] = {{"--only", .text = &only},
                                  {"--json", .text = &path},
                                  {"--dir", .text = &o.dir},
                                  {"--kills", .number = &o.kills, .least = 1, .most = 10000},
                                  {"--matrices", .number = &o.matrices, .least = 1, .most = 10000},
                                  {"--tensors", .number = &o.tensors, .least = 1, .most = 10000},
                                  {"--shards", .number = &o.shards, .least = 1, .most = 10000}};
    bench_parse(known, sizeof(known) / sizeof(known[0]), argc, argv);
    FILE *json = bench_open_output(path);
    bench_make_folder(dir, o.dir);
    o.dir = dir;
    fprintf(json, "{\n  \"benchmark\": \"ranks\",\n  \"machine\": \"%s\"", bench_machine());
    for (int i = 0; i < PARTS; i++) {
        if (!only || strcmp(only, parts[i].name) == 0) {
            fprintf(json, ",\n");
            parts[i].run(json, &o);
        }
    }
    fprintf(json, "\n}\n");
    bench_close_output(json, path);
    bench_remove_tree(dir);
    return 0;
}
