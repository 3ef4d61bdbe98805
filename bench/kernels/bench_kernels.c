/*
 * bench_kernels: the speed of array operations, and of lossy saves and loads.
 *
 *   bench_kernels [--quick] [--repeats N] [--operations] [--paths] [--size N] [--effort N] [--device N] [--elements N] [--json FILE]
 *
 * It runs each operation of the kernels' table on arrays beyond the caches, beside memcpy in the same turn, in bytes
 * that the operation must read and write per second: on one core (processor time) and on all of them (wall clock). Then
 * it saves and loads W, m and v of a synthetic training state as a whole, on one core. Figures are medians of repeats,
 * and all kinds take turns.
 *
 * --device N: instead, the operations of that device's backend (wall clock) beside its own copy, on --elements elements
 * (2^28).
 */
#include "bench/kernels/kernels.h"
#include "bench/support/support.h"

/* Options override --quick, and what the choice of a device changes. */
static bench_plan plan_of(int quick, int size, int effort, int device, uint64_t elements) {
    bench_plan plan = {.repeats = quick ? 3 : 7,
                       .elements = elements      ? elements
                                   : device >= 0 ? (size_t)1 << 28
                                                 : (size_t)1 << 22,
                       .sizes = {512, quick ? 0 : 2048},
                       .efforts = {1, 5},
                       .device = device,
                       .folder = "bench/series/kernels"};
    if (size) {
        plan.sizes[0] = (size_t)size;
        plan.sizes[1] = 0;
    }
    if (effort) {
        plan.efforts[0] = effort;
        plan.efforts[1] = 0;
    }
    return plan;
}

int main(int argc, char **argv) {
    const char *json = NULL;
    uint64_t elements = 0;
    int quick = 0, only_operations = 0, only_paths = 0, device = -1, repeats = 0, size = 0, effort = 0;
    const bench_option known[] = {{"--quick", .flag = &quick},
                                  {"--operations", .flag = &only_operations},
                                  {"--paths", .flag = &only_paths},
                                  {"--repeats", .number = &repeats, .least = 1, .most = BENCH_MAX_REPEATS},
                                  {"--size", .number = &size, .least = 1, .most = 1 << 20},
                                  {"--effort", .number = &effort, .least = 1, .most = 100},
                                  {"--device", .number = &device, .least = 0, .most = 1000},
                                  {"--elements", .count = &elements, .least = 1, .most = UINT64_C(1) << 40},
                                  {"--json", .text = &json}};
    bench_parse(known, sizeof(known) / sizeof(known[0]), argc, argv);
    bench_plan plan = plan_of(quick, size, effort, device, elements);
    plan.repeats = repeats ? repeats : plan.repeats;
    json = json          ? json
           : device >= 0 ? "bench/results/bench_kernels-device.json"
                         : "bench/results/bench_kernels.json";
    if (device >= 0 && bench_no_device(device)) {
        bench_die("device", bench_no_device(device));
    }
    plan.json = bench_open_output(json);
    fprintf(plan.json, "{\"machine\": \"%s\", \"repeats\": %d", bench_machine(), plan.repeats);
    printf("%s\n", bench_machine());
    if (device >= 0) {
        bench_device(&plan);
    } else {
        if (!only_paths) {
            bench_operations(&plan);
        }
        if (!only_operations) {
            bench_paths(&plan);
        }
    }
    fprintf(plan.json, "}\n");
    bench_close_output(plan.json, json);
    return 0;
}
