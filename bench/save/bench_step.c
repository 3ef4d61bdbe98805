/*
 * bench_step: a run that saves every step, and tells the store what the optimizer did.
 *
 *   bench_step [--width N] [--seeds N] [--steps N] [--repeats N] [--json FILE]
 *
 * For each seed it trains a small GPT (train_gpt, AdamW, fp32) to step 500, and saves at each of the next steps, into
 * bench/series/. It saves these states once more, with the optimizer's parameters and without, under several bounds on
 * the cost of a load. It loads each state, and a standalone base of it. It prints:
 *
 *   W, v, m    stored bits a parameter of weights, exp_avg_sq and exp_avg where the first two are steps, headers and index included
 *   step       raw bytes by stored bytes of such states, that is, of a typical save
 *   run        the same of all saves, with those that start new chains
 *   load       the worst load, in base loads of the same state: bytes read, processor time (one thread)
 *
 * Uses the public API only.
 */
#include <ckptdelta.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "bench/support/support.h"

enum { FROM = 500, LIMITS = 5, REPEATS_MAX = 63 };

typedef struct options {
    int width, seeds, steps, repeats;
    const char *json;
} options;

static const double limits[LIMITS] = {4, 8, 16, 1000, 4}; /* the last without the optimizer */

typedef struct result {
    double bits[3], step, run, load_bytes, load_cpu, save_seconds;
    int steps; /* states of which all large tensors are steps */
} result;

/* ---- the series ---- */

static void train(char path[4096], const options *o, int seed) {
    char last[16], first[16], seeds[16], wide[16], marker[4200];
    snprintf(path, 4096, "bench/series/step-w%d-s%d", o->width, seed);
    snprintf(marker, sizeof(marker), "%s/done-%d", path, o->steps);
    if (bench_file_exists(marker)) {
        return;
    }
    bench_remove_tree(path);
    snprintf(first, sizeof(first), "%d", FROM);
    snprintf(last, sizeof(last), "%d", FROM + o->steps);
    snprintf(seeds, sizeof(seeds), "%d", seed);
    snprintf(wide, sizeof(wide), "%d", o->width);
    bench_run_trainer((const char *const[]){"--width", wide, "--seed", seeds, "--store", path, "--run", "gpt",
                                            "--steps", first, "--save-every", first, "--schedule", "constant",
                                            NULL});
    bench_run_trainer((const char *const[]){"--width", wide, "--seed", seeds, "--store", path, "--run", "gpt",
                                            "--steps", last, "--save-every", "1", "--schedule", "constant",
                                            "--resume", NULL});
    bench_close_output(bench_open_output(marker), marker);
}

/* train_gpt's defaults, after the warm-up. */
static ckd_optimizer optimizer_at(uint64_t step, uint32_t ndim) {
    ckd_optimizer a = CKD_OPTIMIZER_INIT;
    a.kind = CKD_ADAMW;
    a.lr = 1e-3;
    a.beta1 = 0.9;
    a.beta2 = 0.95;
    a.eps = 1e-8;
    a.weight_decay = ndim > 1 ? 0.1 : 0;
    a.step = step;
    return a;
}

/* ---- states ---- */

typedef struct states {
    size_t count, tensors;
    const ckd_tensor_list *list; /* of the first; all are alike */
    ckd_load **loads;
    void ***values; /* by state and tensor */
    uint64_t *steps;
} states;

static states read_states(ckd_store *store) {
    ckd_checkpoint_list *list;
    ckd_error err = {0};
    bench_check(ckd_store_list(&list, store, "gpt", &err), &err);
    states s = {.count = list->count};
    s.loads = calloc(s.count, sizeof(*s.loads));
    s.values = calloc(s.count, sizeof(*s.values));
    s.steps = calloc(s.count, sizeof(*s.steps));
    for (size_t i = 0; i < s.count; i++) {
        bench_check(ckd_load_begin(&s.loads[i], store, &list->items[i].id, &err), &err);
        s.values[i] = bench_values_new(ckd_load_tensors(s.loads[i]));
        s.steps[i] = list->items[i].step;
        bench_load_values(s.loads[i], ckd_load_tensors(s.loads[i]), s.values[i]);
    }
    s.list = ckd_load_tensors(s.loads[0]);
    s.tensors = s.list->count;
    ckd_checkpoint_list_free(list);
    return s;
}

static void release_states(states *s) {
    for (size_t i = 0; i < s->count; i++) {
        bench_values_free(s->values[i], s->tensors);
        ckd_load_end(s->loads[i]);
    }
    free(s->values);
    free(s->loads);
    free(s->steps);
}

/* ---- saving and loading ---- */

static ckd_checkpoint save(ckd_store *store, const states *s, size_t at, double limit, int base,
                           int with_optimizer) {
    ckd_save_options o = CKD_SAVE_OPTIONS_INIT;
    o.run = base ? "bases" : "gpt";
    o.step = s->steps[at];
    o.base = base;
    o.max_load_cost = limit;
    ckd_save *save;
    ckd_checkpoint info;
    ckd_error err = {0};
    bench_check(ckd_save_begin(&save, store, &o, &err), &err);
    for (size_t i = 0; i < s->tensors; i++) {
        const ckd_tensor_info *of = &s->list->items[i];
        ckd_optimizer optimizer = optimizer_at(o.step, of->ndim);
        ckd_tensor t = bench_tensor_like(of, s->values[at][i]);
        t.optimizer = with_optimizer ? &optimizer : NULL;
        bench_check(ckd_save_tensor(save, &t, &err), &err);
    }
    bench_check(ckd_save_commit(&info, save, &err), &err);
    return info;
}

static void load_all(ckd_load *load, void **values) {
    const ckd_tensor_list *list = ckd_load_tensors(load);
    ckd_load_request *requests = bench_allocated(calloc(list->count, sizeof(*requests)));
    ckd_error err = {0};
    for (size_t i = 0; i < list->count; i++) {
        requests[i] = (ckd_load_request)CKD_LOAD_REQUEST_INIT;
        requests[i].name = list->items[i].name;
        requests[i].data = values[i];
        requests[i].size = list->items[i].raw_bytes;
    }
    bench_check(ckd_load_all(load, requests, list->count, 0, &err), &err);
    free(requests);
}

/* Opening the checkpoint is part of loading it. Compares the values with those saved. */
static void measure_load(double *bytes, double *cpu, ckd_store *store, const ckd_id *id, const states *s,
                         size_t at, void **values, int repeats) {
    double times[REPEATS_MAX];
    for (int i = 0; i < repeats; i++) {
        double read = bench_bytes_read(), start = bench_cpu_seconds();
        ckd_load *load;
        ckd_error err = {0};
        bench_check(ckd_load_begin(&load, store, id, &err), &err);
        load_all(load, values);
        ckd_load_end(load);
        times[i] = bench_cpu_seconds() - start;
        *bytes = bench_bytes_read() - read;
    }
    *cpu = bench_median(times, repeats);
    for (size_t t = 0; t < s->tensors; t++) {
        if (memcmp(values[t], s->values[at][t], s->list->items[t].raw_bytes) != 0) {
            bench_die(s->list->items[t].name, "its values have changed");
        }
    }
}

/* ---- figures ---- */

/* Adds the bits by role of a state if all large weights and second moments are stored as steps. */
static void add_bits(result *r, ckd_store *store, const ckd_checkpoint *c, double *step_raw,
                     double *step_stored) {
    ckd_tensor_list *list;
    ckd_error err = {0};
    bench_check(ckd_store_tensors(&list, store, &c->id, &err), &err);
    double stored[3] = {0}, elements[3] = {0};
    for (size_t i = 0; i < list->count; i++) {
        const ckd_tensor_info *t = &list->items[i];
        int part = t->role == CKD_ROLE_WEIGHT ? 0 : t->role == CKD_ROLE_EXP_AVG_SQ ? 1 : 2;
        if (t->role < CKD_ROLE_WEIGHT || t->role > CKD_ROLE_EXP_AVG_SQ) {
            continue;
        }
        int large = t->elements >= 4096;
        if (large && part < 2 && strcmp(t->method, "step") != 0) {
            ckd_tensor_list_free(list);
            return;
        }
        stored[part] += (double)t->stored_bytes;
        elements[part] += (double)t->elements;
    }
    for (int part = 0; part < 3; part++) {
        r->bits[part] += 8 * stored[part] / elements[part];
    }
    r->steps++;
    *step_raw += (double)c->raw_bytes;
    *step_stored += (double)c->stored_bytes;
    ckd_tensor_list_free(list);
}

static result measure(const options *o, const char *path, const states *s, int variant) {
    char copy[4200];
    result r = {0};
    ckd_error err = {0};
    ckd_store *store;
    ckd_store_options one = CKD_STORE_OPTIONS_INIT;
    one.threads = 1;
    snprintf(copy, sizeof(copy), "%s.copy-%ld", path, (long)getpid());
    bench_check(ckd_store_open(&store, copy, CKD_OPEN_CREATE, &one, &err), &err);
    int with_optimizer = variant != LIMITS - 1;
    double raw = 0, stored = 0, step_raw = 0, step_stored = 0, begun = bench_cpu_seconds();
    ckd_checkpoint *saved = calloc(s->count, sizeof(*saved));
    for (size_t i = 0; i < s->count; i++) {
        saved[i] = save(store, s, i, limits[variant], 0, with_optimizer);
        raw += i ? (double)saved[i].raw_bytes : 0; /* the first has no parent */
        stored += i ? (double)saved[i].stored_bytes : 0;
    }
    r.save_seconds = (bench_cpu_seconds() - begun) / (double)s->count;
    for (size_t i = 1; i < s->count; i++) {
        add_bits(&r, store, &saved[i], &step_raw, &step_stored);
    }
    void **values = bench_values_new(s->list);
    for (size_t i = 0; i + 1 < s->count; i++) { /* the newest also has materialized copies */
        ckd_checkpoint base = save(store, s, i, 4, 1, 0);
        double bytes[2], cpu[2];
        measure_load(&bytes[0], &cpu[0], store, &saved[i].id, s, i, values, o->repeats);
        measure_load(&bytes[1], &cpu[1], store, &base.id, s, i, values, o->repeats);
        r.load_bytes = bytes[0] / bytes[1] > r.load_bytes ? bytes[0] / bytes[1] : r.load_bytes;
        r.load_cpu = cpu[0] / cpu[1] > r.load_cpu ? cpu[0] / cpu[1] : r.load_cpu;
    }
    bench_values_free(values, s->tensors);
    free(saved);
    for (int part = 0; part < 3 && r.steps; part++) {
        r.bits[part] /= r.steps;
    }
    r.step = step_stored > 0 ? step_raw / step_stored : 0;
    r.run = raw / stored;
    ckd_store_close(store);
    bench_remove_tree(copy);
    return r;
}

static void print(FILE *json, int seed, int variant, const result *r, const states *s, int last) {
    int with_optimizer = variant != LIMITS - 1;
    printf("%5d  %4.0f  %-3s  %6.2f  %6.2f  %6.2f  %6.2f  %6.2f  %4d/%-4zu  %6.2f  %6.2f  %7.1f\n", seed,
           limits[variant], with_optimizer ? "yes" : "no", r->bits[0], r->bits[1], r->bits[2], r->step,
           r->run, r->steps, s->count - 1, r->load_bytes, r->load_cpu, 1e3 * r->save_seconds);
    fprintf(
        json,
        "    {\"seed\": %d, \"max_load_cost\": %.0f, \"optimizer\": %s, \"bits_weight\": %.4f, \"bits_exp_avg_sq\": %.4f, "
        "\"bits_exp_avg\": %.4f, \"ratio_step\": %.4f, \"ratio_run\": %.4f, \"steps\": %d, \"saves\": %zu, "
        "\"worst_load_bytes\": %.4f, \"worst_load_cpu\": %.4f, \"save_cpu_seconds\": %.6f}%s\n",
        seed, limits[variant], with_optimizer ? "true" : "false", r->bits[0], r->bits[1], r->bits[2], r->step,
        r->run, r->steps, s->count - 1, r->load_bytes, r->load_cpu, r->save_seconds, last ? "" : ",");
    fflush(stdout);
}

static void measure_seed(const options *o, FILE *json, int seed) {
    char path[4096];
    ckd_store *store;
    ckd_error err = {0};
    train(path, o, seed);
    bench_check(ckd_store_open(&store, path, CKD_OPEN_READ, NULL, &err), &err);
    states s = read_states(store);
    for (int variant = 0; variant < LIMITS; variant++) {
        result r = measure(o, path, &s, variant);
        print(json, seed, variant, &r, &s, seed == o->seeds && variant + 1 == LIMITS);
    }
    release_states(&s);
    ckd_store_close(store);
}

int main(int argc, char **argv) {
    options o = {
        .width = 128, .seeds = 3, .steps = 24, .repeats = 3, .json = "bench/results/bench_step.json"};
    const bench_option known[] = {{"--width", .number = &o.width, .least = 1, .most = 4096},
                                  {"--seeds", .number = &o.seeds, .least = 1, .most = 16},
                                  {"--steps", .number = &o.steps, .least = 1, .most = 4096},
                                  {"--repeats", .number = &o.repeats, .least = 1, .most = REPEATS_MAX},
                                  {"--json", .text = &o.json}};
    bench_parse(known, sizeof(known) / sizeof(known[0]), argc, argv);
    FILE *json = bench_open_output(o.json);
    fprintf(json, "{\n  \"benchmark\": \"step\",\n  \"machine\": \"%s\",\n  \"width\": %d,\n  \"runs\": [\n",
            bench_machine(), o.width);
    printf("%5s  %4s  %-3s  %22s  %6s  %6s  %9s  %14s  %7s\n", "", "", "", "bits a parameter", "", "", "",
           "worst load in", "save");
    printf("%5s  %4s  %-3s  %6s  %6s  %6s  %6s  %6s  %9s  %6s  %6s  %7s\n", "seed", "cost", "opt", "W", "v",
           "m", "step", "run", "steps", "bytes", "cpu", "cpu ms");
    for (int seed = 1; seed <= o.seeds; seed++) {
        measure_seed(&o, json, seed);
    }
    fprintf(json, "  ]\n}\n");
    bench_close_output(json, o.json);
    return 0;
}
