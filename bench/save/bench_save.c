/*
 * bench_save: the cost of saving a state that lies on a device, and of loading it to the device.
 *
 *   bench_save [--device N] [--parameters N] [--side N] [--saves N] [--fidelity coarse|near|exact] [--exact-on-device 0|1]
 *              [--json FILE]
 *
 * The state has N parameters in f32 (2^25): square matrices with their first and second moments. Between saves they
 * move in a few directions, and a little in all others. It prints medians of all saves but the first:
 *
 *   copy        copying the whole state from the device to pinned memory, as any system must that codes on the host
 *   host        saving the same state from host memory
 *   device      saving it from the device. `read`: until it may be overwritten, that is, the last tensor has been coded
 *   session     a session that copies it on the device and saves in the background. `stall`: until the trainer's stream may continue
 *
 * Then it loads the newest checkpoint and the one before it (which has no materialized copies), as often as there were
 * saves, in turns:
 *
 *   to host     all tensors to pinned host memory, and a copy to the device, as any system must that decodes on the host
 *   to device   all tensors to the device, which decodes what it can
 *
 * --exact-on-device 1: the device codes exact blocks, which by default is the host's (engine/save/DECISIONS.md).
 *
 * It needs a device (CKD_CUDA names another backend). Stores go to TMPDIR.
 */
#include <ckptdelta.h>
#include <stdlib.h>

#include "base/threads.h"
#include "bench/support/support.h"
#include "engine/save/device.h"
#include "kernels/device_open.h"

enum { KINDS = 3, MAX_SAVES = 32, RANK = 4 };

typedef struct settings {
    int device, saves, exact_on_device;
    uint64_t parameters, side;
    ckd_fidelity fidelity;
    const char *json;
} settings;

typedef struct state {
    uint64_t side, each, layers;
    float *host[KINDS]; /* second moments, first ones, weights: layers x side x side */
    float *device[KINDS];
    void *pinned;
    thread_pool *pool; /* of the training */
    const device_backend *backend;
    device_queue queue;
    device_failure why;
} state;

static void must(const state *s, device_result result) {
    if (result != DEVICE_DONE) {
        bench_die(s->why.call, s->why.reason);
    }
}
/* ---- the state ---- */

static void state_begin(state *s, const settings *o) {
    s->side = o->side;
    s->each = o->side * o->side;
    s->layers = o->parameters / s->each ? o->parameters / s->each : 1;
    size_t size = s->layers * s->each * sizeof(float);
    for (int k = 0; k < KINDS; k++) {
        void *memory;
        s->host[k] = bench_allocated(calloc(1, size));
        must(s, s->backend->allocate(&memory, o->device, size, &s->why));
        s->device[k] = memory;
    }
    must(s, s->backend->allocate_pinned(&s->pinned, o->device, size, &s->why));
    ckd_error err;
    bench_check(pool_create(&s->pool, 0, &err), &err);
    uint64_t seed = 1;
    for (uint64_t i = 0; i < s->layers * s->each; i++) {
        s->host[2][i] = 0.02f * bench_normal(&seed);
    }
}

/* Like fifty steps of training of one layer: weights move in a few directions, moments are new. */
static void train_layer(state *s, uint64_t step, uint64_t l) {
    uint64_t seed = (step * s->layers + l) * 977 + 5;
    float *sides = bench_allocated(malloc(2 * RANK * s->side * sizeof(float)));
    for (uint64_t i = 0; i < 2 * RANK * s->side; i++) {
        sides[i] = 0.04f * bench_normal(&seed);
    }
    for (uint64_t i = 0; i < s->each; i++) {
        float low = 0, g = bench_normal(&seed);
        for (uint64_t k = 0; k < RANK; k++) {
            low += sides[k * s->side + i / s->side] * sides[(RANK + k) * s->side + i % s->side];
        }
        uint64_t at = l * s->each + i;
        s->host[2][at] += 0.5f * low + 2e-4f * g;
        s->host[1][at] = 0.1f * low + 1e-5f * g;
        s->host[0][at] = 1e-8f * (float)(1 + i % s->side % 5) * (0.1f + g * g);
    }
    free(sides);
}

typedef struct training {
    state *s;
    uint64_t step;
} training;

static ckd_status train_one(void *context, size_t index, uint32_t worker, ckd_error *err) {
    const training *t = context;
    (void)worker, (void)err;
    train_layer(t->s, t->step, index);
    return CKD_OK;
}

static void train(state *s, uint64_t step) {
    training t = {s, step};
    ckd_error err;
    bench_check(pool_run(s->pool, s->layers, train_one, &t, &err), &err);
    for (int k = 0; k < KINDS; k++) {
        must(s, s->backend->copy(&s->queue, s->device[k], s->host[k], s->layers * s->each * sizeof(float),
                                 DEVICE_TO_DEVICE, &s->why));
    }
    must(s, s->backend->finish(&s->queue, &s->why));
}

/* ---- what is timed ---- */

static double copy_all(state *s) {
    double start = bench_seconds();
    for (int k = 0; k < KINDS; k++) {
        must(s, s->backend->copy(&s->queue, s->pinned, s->device[k], s->layers * s->each * sizeof(float),
                                 DEVICE_TO_HOST, &s->why));
    }
    must(s, s->backend->finish(&s->queue, &s->why));
    return bench_seconds() - start;
}

typedef struct times {
    double read, all;
} times;

static ckd_device device_of(const state *s, const settings *o) {
    ckd_device device = CKD_DEVICE_INIT;
    device.device = o->device;
    device.stream = s->queue.stream;
    return device;
}

/* The tensor as a save and a session have it. */
static ckd_tensor describe(const uint64_t *shape, int kind, uint64_t layer, char *name, size_t size) {
    static const char *const prefixes[KINDS] = {"exp_avg_sq.", "exp_avg.", ""};
    ckd_tensor t = CKD_TENSOR_INIT;
    snprintf(name, size, "%slayers.%llu.weight", prefixes[kind], (unsigned long long)layer);
    t.name = name;
    t.dtype = CKD_F32;
    t.ndim = 2;
    t.shape = shape;
    return t;
}

static times save(state *s, ckd_store *store, const char *run, uint64_t step, ckd_fidelity fidelity,
                  const ckd_device *device, uint64_t *stored) {
    const uint64_t shape[2] = {s->side, s->side};
    ckd_error err;
    ckd_save *save;
    ckd_save_options o = CKD_SAVE_OPTIONS_INIT;
    o.run = run;
    o.step = step;
    o.fidelity = fidelity;
    double start = bench_seconds();
    bench_check(ckd_save_begin(&save, store, &o, &err), &err);
    for (uint64_t l = 0; l < s->layers; l++) {
        for (int k = 0; k < KINDS; k++) {
            char name[64];
            ckd_tensor t = describe(shape, k, l, name, sizeof(name));
            t.data = (device ? s->device : s->host)[k] + l * s->each;
            t.device = device;
            bench_check(ckd_save_tensor(save, &t, &err), &err);
        }
    }
    times out = {bench_seconds() - start, 0};
    ckd_checkpoint c;
    bench_check(ckd_save_commit(&c, save, &err), &err);
    out.all = bench_seconds() - start;
    *stored = c.stored_bytes;
    return out;
}

static ckd_session *open_session(const state *s, const settings *o, const char *path) {
    const uint64_t shape[2] = {s->side, s->side};
    ckd_device device = device_of(s, o);
    ckd_save_options save_options = CKD_SAVE_OPTIONS_INIT;
    ckd_session_options options = CKD_SESSION_OPTIONS_INIT;
    ckd_session *session;
    ckd_error err;
    save_options.run = "session";
    save_options.fidelity = o->fidelity;
    options.save = &save_options;
    options.every_steps = UINT64_C(1) << 40; /* only on request */
    bench_check(ckd_session_open(&session, path, &options, &err), &err);
    for (uint64_t l = 0; l < s->layers; l++) {
        for (int k = 0; k < KINDS; k++) {
            char name[64];
            ckd_tensor t = describe(shape, k, l, name, sizeof(name));
            t.device = &device;
            bench_check(ckd_session_add(session, &t, s->device[k] + l * s->each, 0, &err), &err);
        }
    }
    return session;
}

/* read: until the trainer's stream may continue; all: until it is durable. */
static times save_by_session(state *s, ckd_session *session, uint64_t step) {
    ckd_error err;
    double start = bench_seconds();
    bench_check(ckd_session_save(session, step, &err), &err);
    must(s, s->backend->finish(&s->queue, &s->why));
    times out = {bench_seconds() - start, 0};
    bench_check(ckd_session_wait(session, CKD_DURABLE, &err), &err);
    out.all = bench_seconds() - start;
    return out;
}

/* ---- loads ---- */

/* Seconds of loading all tensors at once to the device, or to pinned memory and from there to the device. */
static double load(state *s, ckd_store *store, uint64_t step, const ckd_device *device) {
    const uint64_t shape[2] = {s->side, s->side}, size = s->layers * s->each * sizeof(float);
    size_t count = (size_t)s->layers;
    ckd_load_request *requests = bench_allocated(calloc(count, sizeof(*requests)));
    char(*names)[64] = bench_allocated(calloc(count, sizeof(*names)));
    ckd_error err;
    ckd_load *load;
    ckd_checkpoint c;
    bench_check(ckd_store_find(&c, store, "device", step, &err), &err);
    double start = bench_seconds();
    bench_check(ckd_load_begin(&load, store, &c.id, &err), &err);
    for (int k = 0; k < KINDS; k++) {
        for (size_t l = 0; l < count; l++) {
            ckd_tensor t = describe(shape, k, l, names[l], sizeof(names[l]));
            requests[l] = (ckd_load_request)CKD_LOAD_REQUEST_INIT;
            requests[l].name = t.name;
            requests[l].size = s->each * sizeof(float);
            requests[l].data = (device ? s->device[k] : (float *)s->pinned) + l * s->each;
            requests[l].device = device;
        }
        bench_check(ckd_load_all(load, requests, count, CKD_DIFFERS_UNEXPECTED, &err), &err);
        if (!device) {
            must(s, s->backend->copy(&s->queue, s->device[k], s->pinned, size, DEVICE_TO_DEVICE, &s->why));
            must(s, s->backend->finish(&s->queue, &s->why));
        }
    }
    must(s, s->backend->finish(&s->queue, &s->why));
    double seconds = bench_seconds() - start;
    ckd_load_end(load);
    free(requests);
    free(names);
    return seconds;
}

static void run_loads(state *s, const settings *o, ckd_store *store, FILE *json) {
    static const char *const names[2] = {"newest", "before"};
    ckd_device device = device_of(s, o);
    double raw = (double)(KINDS * s->layers * s->each * sizeof(float));
    printf("\n| load | seconds | GB/s |\n|---|---|---|\n");
    for (int which = 0; which < 2; which++) {
        double host[MAX_SAVES], direct[MAX_SAVES];
        for (int i = 0; i < o->saves; i++) {
            host[i] = load(s, store, (uint64_t)(o->saves - which), NULL);
            direct[i] = load(s, store, (uint64_t)(o->saves - which), &device);
        }
        double a = bench_median(host, o->saves), b = bench_median(direct, o->saves);
        printf("| %s, to host, copied | %.4f | %.2f |\n| %s, to device | %.4f | %.2f |\n", names[which], a,
               raw / a / 1e9, names[which], b, raw / b / 1e9);
        fprintf(json, ", \"load_%s_host_s\": %.5f, \"load_%s_device_s\": %.5f", names[which], a, names[which],
                b);
    }
}

static void run(state *s, const settings *o, ckd_store *store, ckd_session *session, FILE *json) {
    ckd_device device = device_of(s, o);
    ckd_fidelity fidelity = o->fidelity;
    double stall[MAX_SAVES], durable[MAX_SAVES];
    double copied[MAX_SAVES], host[MAX_SAVES], read[MAX_SAVES], all[MAX_SAVES];
    uint64_t stored_host = 0, stored = 0;
    for (int i = 0; i <= o->saves; i++) {
        int to = i ? i - 1 : 0; /* the first one has no parent, and is overwritten */
        train(s, (uint64_t)i);
        copied[to] = copy_all(s);
        host[to] = save(s, store, "host", (uint64_t)i, fidelity, NULL, &stored_host).all;
        times t = save(s, store, "device", (uint64_t)i, fidelity, &device, &stored);
        read[to] = t.read;
        all[to] = t.all;
        t = save_by_session(s, session, (uint64_t)i + 1);
        stall[to] = t.read;
        durable[to] = t.all;
    }
    ckd_session_state memory;
    ckd_session_poll(&memory, session);
    uint64_t parameters = s->layers * s->each;
    double figures[6] = {bench_median(copied, o->saves), bench_median(host, o->saves),
                         bench_median(read, o->saves),   bench_median(all, o->saves),
                         bench_median(stall, o->saves),  bench_median(durable, o->saves)};
    printf(
        "%llu parameters in matrices of %llu x %llu, f32 with both moments, %s; medians of %d saves\n\n"
        "| what | seconds | of the copy | bytes stored |\n|---|---|---|---|\n"
        "| copy to pinned memory | %.4f | 1 | |\n| host | %.4f | %.2f | %llu |\n"
        "| device, read | %.4f | %.2f | |\n| device | %.4f | %.2f | %llu |\n"
        "| session, stall | %.5f | %.3f | |\n| session | %.4f | %.2f | |\n\n"
        "The session holds %.2f bytes of the device and %.2f of host memory a parameter for its snapshot.\n",
        (unsigned long long)parameters, (unsigned long long)s->side, (unsigned long long)s->side,
        ckd_fidelity_name(o->fidelity), o->saves, figures[0], figures[1], figures[1] / figures[0],
        (unsigned long long)stored_host, figures[2], figures[2] / figures[0], figures[3],
        figures[3] / figures[0], (unsigned long long)stored, figures[4], figures[4] / figures[0], figures[5],
        figures[5] / figures[0], (double)memory.device_bytes / (double)parameters,
        (double)memory.snapshot_bytes / (double)parameters);
    fprintf(
        json,
        ", \"parameters\": %llu, \"side\": %llu, \"fidelity\": \"%s\", \"saves\": %d, \"copy_s\": %.5f, "
        "\"host_s\": %.5f, \"device_read_s\": %.5f, \"device_s\": %.5f, \"session_stall_s\": %.6f, \"session_s\": %.5f, "
        "\"session_device_bytes\": %llu, \"session_host_bytes\": %llu, \"stored_host\": %llu, \"stored\": %llu",
        (unsigned long long)parameters, (unsigned long long)s->side, ckd_fidelity_name(o->fidelity), o->saves,
        figures[0], figures[1], figures[2], figures[3], figures[4], figures[5],
        (unsigned long long)memory.device_bytes, (unsigned long long)memory.snapshot_bytes,
        (unsigned long long)stored_host, (unsigned long long)stored);
}

int main(int argc, char **argv) {
    settings o = {.saves = 3,
                  .parameters = UINT64_C(1) << 25,
                  .side = 2048,
                  .fidelity = CKD_COARSE,
                  .json = "bench/results/bench_save-device.json"};
    const bench_option known[] = {
        {"--device", .number = &o.device, .least = 0, .most = 1000},
        {"--parameters", .count = &o.parameters, .least = 1, .most = UINT64_C(1) << 40},
        {"--side", .count = &o.side, .least = 64, .most = UINT64_C(1) << 20},
        {"--saves", .number = &o.saves, .least = 1, .most = MAX_SAVES},
        {"--fidelity", .fidelity = &o.fidelity},
        {"--exact-on-device", .number = &o.exact_on_device, .least = 0, .most = 1},
        {"--json", .text = &o.json}};
    bench_parse(known, sizeof(known) / sizeof(known[0]), argc, argv);
    save_device_use(o.exact_on_device);
    state s = {.backend = NULL};
    ckd_error err = {0};
    device_info about;
    s.backend = device_backend_open(&err);
    if (!s.backend || s.backend->describe(&about, o.device, &s.why) != DEVICE_DONE) {
        bench_die("device", s.backend ? s.why.reason : err.message);
    }
    must(&s, s.backend->queue_open(&s.queue, o.device, false, &s.why));
    state_begin(&s, &o);
    char folder[BENCH_PATH], path[BENCH_PATH + 16];
    bench_make_folder(folder, NULL);
    snprintf(path, sizeof(path), "%s/store", folder);
    ckd_store *store;
    bench_check(ckd_store_open(&store, path, CKD_OPEN_CREATE, NULL, &err), &err);
    FILE *json = bench_open_output(o.json);
    fprintf(json, "{\"machine\": \"%s\", \"device\": \"%s\"", bench_machine(), about.name);
    printf("%s; %s\n", bench_machine(), about.name);
    snprintf(path, sizeof(path), "%s/session", folder);
    ckd_session *session = open_session(&s, &o, path);
    run(&s, &o, store, session, json);
    bench_check(ckd_session_close(session, &err), &err);
    run_loads(&s, &o, store, json);
    fprintf(json, "}\n");
    bench_close_output(json, o.json);
    ckd_store_close(store);
    bench_remove_tree(folder);
    for (int k = 0; k < KINDS; k++) {
        free(s.host[k]);
        s.backend->release(o.device, s.device[k]);
    }
    s.backend->release_pinned(o.device, s.pinned);
    pool_destroy(s.pool);
    s.backend->queue_close(&s.queue);
    return 0;
}
