/*
 * bench_kernels: what the arithmetic costs, and what the lossy coder makes of it.
 *
 *   bench_kernels [--quick] [--repeats N] [--operations] [--paths] [--size N] [--effort N] [--device N] [--elements N] [--json FILE]
 *
 * Each operation of the kernels' table on arrays beyond the caches, in bytes that it must read and write per second, beside memcpy in
 * the same turn; on one core (processor time) and on all of them (wall clock). Then whole saves and loads of W, m and v of a
 * synthetic training state, on one core. Medians of repeats, all kinds taking turns.
 *
 * --device N: instead, the operations of the backend for devices on that device (wall clock), beside its own copy, on --elements elements (2^28).
 */
#include <stdlib.h>
#include <string.h>

#include "bench/kernels_bench.h"
#include "bench/support.h"

#define DEFAULT_ELEMENTS ((size_t)1 << 22)
#define DEVICE_ELEMENTS  ((size_t)1 << 28)

static void usage(void) {
    fprintf(stderr,
            "usage: bench_kernels [--quick] [--repeats N] [--operations] [--paths] [--size N] [--effort N] "
            "[--device N] [--elements N] [--json FILE]\n");
    exit(2);
}

int main(int argc, char **argv) {
    bench_plan plan = {.repeats = 7,
                       .elements = DEFAULT_ELEMENTS,
                       .sizes = {512, 2048, 0, 0},
                       .efforts = {1, 5, 0},
                       .folder = "bench/series/kernels"};
    const char *json = "bench/results/bench_kernels.json";
    int operations = 1, paths = 1, device = 0;
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : NULL;
        if (strcmp(argv[i], "--quick") == 0) {
            plan.repeats = 3;
            plan.sizes[1] = 0;
        } else if (strcmp(argv[i], "--operations") == 0) {
            paths = 0;
        } else if (strcmp(argv[i], "--paths") == 0) {
            operations = 0;
        } else if (value && strcmp(argv[i], "--repeats") == 0) {
            plan.repeats = atoi(argv[++i]);
        } else if (value && strcmp(argv[i], "--size") == 0) {
            plan.sizes[0] = (size_t)atoi(argv[++i]);
            plan.sizes[1] = 0;
        } else if (value && strcmp(argv[i], "--effort") == 0) {
            plan.efforts[0] = atoi(argv[++i]);
            plan.efforts[1] = 0;
        } else if (value && strcmp(argv[i], "--device") == 0) {
            plan.device = atoi(argv[++i]);
            plan.elements = plan.elements == DEFAULT_ELEMENTS ? DEVICE_ELEMENTS : plan.elements;
            json = "bench/results/bench_kernels-device.json";
            device = 1;
        } else if (value && strcmp(argv[i], "--elements") == 0) {
            plan.elements = (size_t)atoll(argv[++i]);
        } else if (value && strcmp(argv[i], "--json") == 0) {
            json = argv[++i];
        } else {
            usage();
        }
    }
    if (plan.repeats < 1 || plan.repeats > BENCH_MOST_REPEATS) {
        usage();
    }
    if (device && bench_no_device(plan.device)) {
        fprintf(stderr, "bench_kernels: device %d: %s\n", plan.device, bench_no_device(plan.device));
        return 1;
    }
    plan.json = fopen(json, "w");
    if (!plan.json) {
        perror(json);
        return 1;
    }
    fprintf(plan.json, "{\"machine\": \"%s\", \"repeats\": %d", bench_machine(), plan.repeats);
    printf("%s\n", bench_machine());
    if (device) {
        operations = paths = 0;
        bench_device(&plan);
    }
    if (operations) {
        bench_operations(&plan);
    }
    if (paths) {
        bench_paths(&plan);
    }
    fprintf(plan.json, "}\n");
    fclose(plan.json);
    return 0;
}
