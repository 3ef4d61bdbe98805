/*
 * bench_save: what a save costs whose state lies on a device, and what loading it to there does.
 *
 *   bench_save [--device N] [--parameters N] [--side N] [--saves N] [--fidelity coarse|near|exact] [--json FILE]
 *
 * A synthetic state of so many parameters in f32 (2^25): square matrices with their first and second moments, moved between saves in a few directions and a
 * little in all others. Per save after the first, medians of all but that one:
 *
 *   copy        the whole state from the device to pinned memory, and nothing else: what any system must do that codes on the host
 *   host        saving the same state from host memory
 *   device      saving it from the device; `read`: until it may be overwritten, which is when the last tensor has been coded
 *   session     a session that copies it on the device and saves in the background; `stall`: until the stream that the trainer writes it on may go on
 *
 * Then loads of the newest checkpoint and of the one before it (which is not kept ready), as often as there were saves, in turns:
 *
 *   to host     all tensors to (pinned) host memory, and then copied to the device: what any system does that decodes on the host
 *   to device   all tensors to the device, where they are decoded as far as they can
 *
 * Takes a device (CKD_CUDA names another backend). Stores go to TMPDIR.
 */
#include <ckptdelta.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/threads.h"
#include "bench/kernels_bench.h"
#include "bench/support.h"
#include "kernels/device_open.h"

enum { KINDS = 3, MOST_SAVES = 33, RANK = 4 };

typedef struct settings {
    int device, saves;
    uint64_t parameters, side;
    const char *fidelity, *json;
} settings;

typedef struct state {
    uint64_t side, each, layers;
    float *host[KINDS]; /* second moments, first ones, weights: layers x side x side */
    float *device[KINDS];
    void *pinned;
    thread_pool *pool; /* that trains */
    const device_backend *backend;
    device_queue queue;
    device_failure why;
} state;

static void must(const state *s, device_result result) {
    if (result != DEVICE_DONE) {
        fprintf(stderr, "bench_save: %s: %s\n", s->why.call, s->why.reason);
        exit(1);
    }
}
static void check(ckd_status status, const ckd_error *err) {
    if (status != CKD_OK) {
        fprintf(stderr, "bench_save: %s (%s)\n", err->message, err->tensor);
        exit(1);
    }
}
static void *need(void *memory) {
    if (!memory) {
        fprintf(stderr, "bench_save: out of memory\n");
        exit(1);
    }
    return memory;
}

/* ---- the state ---- */

static void state_begin(state *s, const settings *o) {
    s->side = o->side;
    s->each = o->side * o->side;
    s->layers = o->parameters / s->each ? o->parameters / s->each : 1;
    size_t bytes = s->layers * s->each * sizeof(float);
    for (int k = 0; k < KINDS; k++) {
        void *memory;
        s->host[k] = need(calloc(1, bytes));
        must(s, s->backend->allocate(&memory, o->device, bytes, &s->why));
        s->device[k] = memory;
    }
    must(s, s->backend->allocate_pinned(&s->pinned, o->device, bytes, &s->why));
    ckd_error err;
    check(pool_create(&s->pool, 0, &err), &err);
    uint64_t seed = 1;
    for (uint64_t i = 0; i < s->layers * s->each; i++) {
        s->host[2][i] = 0.02f * bench_normal(&seed);
    }
}

/* Something like fifty steps of training of one layer: weights in a few directions, moments anew. */
static void train_layer(state *s, uint64_t step, uint64_t l) {
    uint64_t seed = (step * s->layers + l) * 977 + 5;
    float *sides = need(malloc(2 * RANK * s->side * sizeof(float)));
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
    check(pool_run(s->pool, s->layers, train_one, &t, &err), &err);
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

static ckd_fidelity fidelity_of(const settings *o) {
    return strcmp(o->fidelity, "near") == 0    ? CKD_NEAR
           : strcmp(o->fidelity, "exact") == 0 ? CKD_EXACT
                                               : CKD_COARSE;
}

/* What is saved, and how; the same for a save and a session. */
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
    check(ckd_save_begin(&save, store, &o, &err), &err);
    for (uint64_t l = 0; l < s->layers; l++) {
        for (int k = 0; k < KINDS; k++) {
            char name[64];
            ckd_tensor t = describe(shape, k, l, name, sizeof(name));
            t.data = (device ? s->device : s->host)[k] + l * s->each;
            t.device = device;
            check(ckd_save_tensor(save, &t, &err), &err);
        }
    }
    times out = {bench_seconds() - start, 0};
    ckd_checkpoint c;
    check(ckd_save_commit(&c, save, &err), &err);
    out.all = bench_seconds() - start;
    *stored = c.stored_bytes;
    return out;
}

static ckd_session *open_session(const state *s, const settings *o, const char *folder) {
    const uint64_t shape[2] = {s->side, s->side};
    ckd_device device = device_of(s, o);
    ckd_save_options save_options = CKD_SAVE_OPTIONS_INIT;
    ckd_session_options options = CKD_SESSION_OPTIONS_INIT;
    ckd_session *session;
    ckd_error err;
    save_options.run = "session";
    save_options.fidelity = fidelity_of(o);
    options.save = &save_options;
    options.every_steps = UINT64_C(1) << 40; /* only when it is asked to */
    check(ckd_session_open(&session, folder, &options, &err), &err);
    for (uint64_t l = 0; l < s->layers; l++) {
        for (int k = 0; k < KINDS; k++) {
            char name[64];
            ckd_tensor t = describe(shape, k, l, name, sizeof(name));
            t.device = &device;
            check(ckd_session_add(session, &t, s->device[k] + l * s->each, 0, &err), &err);
        }
    }
    return session;
}

/* read: the trainer's stream may go on; all: durable. */
static times save_by_session(state *s, ckd_session *session, uint64_t step) {
    ckd_error err;
    double start = bench_seconds();
    check(ckd_session_save(session, step, &err), &err);
    must(s, s->backend->finish(&s->queue, &s->why));
    times out = {bench_seconds() - start, 0};
    check(ckd_session_wait(session, CKD_DURABLE, &err), &err);
    out.all = bench_seconds() - start;
    return out;
}

/* ---- loads ---- */

/* All tensors at once, to the device or to pinned memory; from there they are copied. */
static double load(state *s, ckd_store *store, uint64_t step, const ckd_device *device) {
    const uint64_t shape[2] = {s->side, s->side}, size = s->layers * s->each * sizeof(float);
    size_t count = (size_t)s->layers;
    ckd_load_request *requests = calloc(count, sizeof(*requests));
    char(*names)[64] = calloc(count, sizeof(*names));
    ckd_error err;
    ckd_load *load;
    ckd_checkpoint c;
    if (!requests || !names) {
        fprintf(stderr, "bench_save: out of memory\n");
        exit(1);
    }
    check(ckd_store_find(&c, store, "device", step, &err), &err);
    double start = bench_seconds();
    check(ckd_load_begin(&load, store, &c.id, &err), &err);
    for (int k = 0; k < KINDS; k++) {
        for (size_t l = 0; l < count; l++) {
            ckd_tensor t = describe(shape, k, l, names[l], sizeof(names[l]));
            requests[l] = (ckd_load_request)CKD_LOAD_REQUEST_INIT;
            requests[l].name = t.name;
            requests[l].size = s->each * sizeof(float);
            requests[l].data = (device ? s->device[k] : (float *)s->pinned) + l * s->each;
            requests[l].device = device;
        }
        check(ckd_load_all(load, requests, count, CKD_DIFFERS_UNEXPECTED, &err), &err);
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
        double host[MOST_SAVES], there[MOST_SAVES];
        for (int i = 0; i < o->saves; i++) {
            host[i] = load(s, store, (uint64_t)(o->saves - which), NULL);
            there[i] = load(s, store, (uint64_t)(o->saves - which), &device);
        }
        double a = bench_median(host, o->saves), b = bench_median(there, o->saves);
        printf("| %s, to host, copied | %.4f | %.2f |\n| %s, to device | %.4f | %.2f |\n", names[which], a,
               raw / a / 1e9, names[which], b, raw / b / 1e9);
        fprintf(json, ", \"load_%s_host_s\": %.5f, \"load_%s_device_s\": %.5f", names[which], a, names[which],
                b);
    }
}

static void run(state *s, const settings *o, ckd_store *store, ckd_session *session, FILE *json) {
    ckd_device device = device_of(s, o);
    ckd_fidelity fidelity = fidelity_of(o);
    double stall[MOST_SAVES], durable[MOST_SAVES];
    double copied[MOST_SAVES], host[MOST_SAVES], read[MOST_SAVES], all[MOST_SAVES];
    uint64_t stored_host = 0, stored = 0;
    for (int i = 0; i <= o->saves; i++) {
        int to = i ? i - 1 : 0; /* the first one has no parent: it does not count */
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
    ckd_session_state held;
    ckd_session_poll(&held, session);
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
        (unsigned long long)parameters, (unsigned long long)s->side, (unsigned long long)s->side, o->fidelity,
        o->saves, figures[0], figures[1], figures[1] / figures[0], (unsigned long long)stored_host,
        figures[2], figures[2] / figures[0], figures[3], figures[3] / figures[0], (unsigned long long)stored,
        figures[4], figures[4] / figures[0], figures[5], figures[5] / figures[0],
        (double)held.device_bytes / (double)parameters, (double)held.snapshot_bytes / (double)parameters);
    fprintf(
        json,
        ", \"parameters\": %llu, \"side\": %llu, \"fidelity\": \"%s\", \"saves\": %d, \"copy_s\": %.5f, "
        "\"host_s\": %.5f, \"device_read_s\": %.5f, \"device_s\": %.5f, \"session_stall_s\": %.6f, \"session_s\": %.5f, "
        "\"session_device_bytes\": %llu, \"session_host_bytes\": %llu, \"stored_host\": %llu, \"stored\": %llu",
        (unsigned long long)parameters, (unsigned long long)s->side, o->fidelity, o->saves, figures[0],
        figures[1], figures[2], figures[3], figures[4], figures[5], (unsigned long long)held.device_bytes,
        (unsigned long long)held.snapshot_bytes, (unsigned long long)stored_host, (unsigned long long)stored);
}

static int usage(void) {
    fprintf(stderr, "usage: bench_save [--device N] [--parameters N] [--side N] [--saves N] "
                    "[--fidelity coarse|near|exact] [--json FILE]\n");
    return 2;
}

static int parse(settings *o, int argc, char **argv) {
    for (int i = 1; i + 1 < argc; i += 2) {
        const char *value = argv[i + 1];
        if (strcmp(argv[i], "--device") == 0) {
            o->device = atoi(value);
        } else if (strcmp(argv[i], "--parameters") == 0) {
            o->parameters = (uint64_t)atoll(value);
        } else if (strcmp(argv[i], "--side") == 0) {
            o->side = (uint64_t)atoll(value);
        } else if (strcmp(argv[i], "--saves") == 0) {
            o->saves = atoi(value);
        } else if (strcmp(argv[i], "--fidelity") == 0) {
            o->fidelity = value;
        } else if (strcmp(argv[i], "--json") == 0) {
            o->json = value;
        } else {
            return usage();
        }
    }
    return argc % 2 && o->saves > 0 && o->saves < MOST_SAVES && o->side >= 64 ? 0 : usage();
}

int main(int argc, char **argv) {
    settings o = {0, 3, UINT64_C(1) << 25, 2048, "coarse", "bench/results/bench_save-device.json"};
    state s = {.backend = NULL};
    ckd_error err = {0};
    device_info about;
    if (parse(&o, argc, argv) != 0) {
        return 2;
    }
    s.backend = device_backend_open(&err);
    if (!s.backend || s.backend->describe(&about, o.device, &s.why) != DEVICE_DONE) {
        fprintf(stderr, "bench_save: device %d: %s\n", o.device, s.backend ? s.why.reason : err.message);
        return 1;
    }
    must(&s, s.backend->queue_open(&s.queue, o.device, false, &s.why));
    state_begin(&s, &o);
    char folder[512];
    snprintf(folder, sizeof(folder), "%s/bench_save-%d", getenv("TMPDIR") ? getenv("TMPDIR") : "/tmp",
             (int)getpid());
    ckd_store *store;
    check(ckd_store_open(&store, folder, CKD_OPEN_CREATE, NULL, &err), &err);
    FILE *json = need(fopen(o.json, "w"));
    fprintf(json, "{\"machine\": \"%s\", \"device\": \"%s\"", bench_machine(), about.name);
    printf("%s; %s\n", bench_machine(), about.name);
    char by_session[528];
    snprintf(by_session, sizeof(by_session), "%s-session", folder);
    ckd_session *session = open_session(&s, &o, by_session);
    run(&s, &o, store, session, json);
    check(ckd_session_close(session, &err), &err);
    run_loads(&s, &o, store, json);
    fprintf(json, "}\n");
    fclose(json);
    ckd_store_close(store);
    bench_remove_tree(folder);
    bench_remove_tree(by_session);
    for (int k = 0; k < KINDS; k++) {
        free(s.host[k]);
        s.backend->release(o.device, s.device[k]);
    }
    s.backend->release_pinned(o.device, s.pinned);
    pool_destroy(s.pool);
    s.backend->queue_close(&s.queue);
    return 0;
}
