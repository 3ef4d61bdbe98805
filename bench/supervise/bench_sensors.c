/*
 * bench_sensors: the time that a session's sensors take, beside that of a save.
 *
 *   bench_sensors [--tensors N] [--mb N] [--repeats N] [--json FILE]
 *
 * A session has weights (f32) of N tensors and --mb MB together, saved some times, each time changed a little. Then it
 * judges the metric of a step and a save again and again. Between two saves the weights in the snapshot change, and
 * something larger than the caches is read. It prints medians:
 *
 *   step       us of the trainer's thread for a step's metric
 *   save       ms of the saver's thread for what it judges when a save is durable: the weights' hash, changes of tensors,
 *              sizes and times
 *   durable    ms of the saves themselves
 */
#include <ckptdelta.h>
#include <stdlib.h>
#include <string.h>

#include "bench/support/support.h"
#include "engine/session/session.h"

enum { SAVES = 4, REPEATS_MAX = 256, STEPS = 1000, FLUSH_MB = 64 };

typedef struct options {
    int tensors, mb, repeats;
    const char *json;
} options;

typedef struct training {
    ckd_session *session;
    float *weights;
    size_t count; /* of each tensor */
    uint64_t seed;
    double durable_ms[SAVES];
} training;

static void begin(training *t, const options *o, const char *folder) {
    ckd_error err = {.offset = CKD_NO_OFFSET};
    ckd_save_options save = CKD_SAVE_OPTIONS_INIT;
    ckd_session_options session = CKD_SESSION_OPTIONS_INIT;
    save.run = "bench";
    save.metric_name = "loss";
    session.save = &save;
    session.every_steps = 1;
    t->count = ((size_t)o->mb << 20) / sizeof(float) / (size_t)o->tensors;
    t->count = t->count < CHANGE_SAMPLE ? CHANGE_SAMPLE : t->count;
    t->weights = bench_allocated(malloc(t->count * (size_t)o->tensors * sizeof(float)));
    t->seed = 1;
    bench_check(ckd_session_open(&t->session, folder, &session, &err), &err);
    for (size_t i = 0; i < t->count * (size_t)o->tensors; i++) {
        t->weights[i] = bench_normal(&t->seed);
    }
    for (int i = 0; i < o->tensors; i++) {
        char name[32];
        ckd_tensor tensor = CKD_TENSOR_INIT;
        uint64_t shape = t->count;
        snprintf(name, sizeof(name), "layers.%d.weight", i);
        tensor.name = name;
        tensor.dtype = CKD_F32;
        tensor.ndim = 1;
        tensor.shape = &shape;
        bench_check(ckd_session_add(t->session, &tensor, t->weights + t->count * (size_t)i, 0, &err), &err);
    }
}

static void train(training *t, const options *o) {
    ckd_error err = {.offset = CKD_NO_OFFSET};
    for (uint64_t step = 1; step <= SAVES; step++) {
        for (size_t i = 0; i < t->count * (size_t)o->tensors; i++) {
            t->weights[i] += 1e-3f * bench_normal(&t->seed);
        }
        double begun = bench_seconds();
        ckd_session_metric(t->session, 2 + 1e-3 * (double)step);
        bench_check(ckd_session_step(t->session, step, &err), &err);
        bench_check(ckd_session_wait(t->session, CKD_DURABLE, &err), &err);
        t->durable_ms[step - 1] = 1e3 * (bench_seconds() - begun);
    }
}

static double time_metrics(const training *t, int repeats) {
    double times[REPEATS_MAX];
    uint64_t step = SAVES;
    for (int k = 0; k < repeats; k++) {
        double begun = bench_seconds();
        for (int i = 0; i < STEPS; i++) {
            step++;
            session_judge_metric(t->session, step, 2 + 1e-3 * (double)(step * 7 % 11));
        }
        times[k] = 1e6 * (bench_seconds() - begun) / STEPS;
    }
    return bench_median(times, repeats);
}

static double time_saves(training *t, const options *o, int repeats) {
    double times[REPEATS_MAX];
    ckd_session *s = t->session;
    const session_slot *slot = s->saver.reference ? s->saver.reference : &s->shared.slots[0];
    ckd_checkpoint saved = {.kind = CKD_DELTA, .stored_bytes = 1 << 20};
    volatile uint8_t *flushed = bench_allocated(malloc((size_t)FLUSH_MB << 20));
    for (int k = 0; k < repeats; k++) {
        for (int i = 0; i < o->tensors; i++) {
            float *values = (float *)(uintptr_t)snapshot_read(slot->snapshot, (size_t)i);
            for (size_t at = 0; at < t->count; at++) {
                values[at] += 1e-3f;
            }
        }
        for (size_t at = 0; at < (size_t)FLUSH_MB << 20; at += 64) {
            flushed[at]++;
        }
        double begun = bench_seconds();
        session_judge_save(s, slot, &saved, &(save_times){.begun_ns = 1, .ended_ns = 1000001});
        times[k] = 1e3 * (bench_seconds() - begun);
    }
    free((void *)(uintptr_t)flushed);
    return bench_median(times, repeats);
}

int main(int argc, char **argv) {
    options o = {.tensors = 600, .mb = 256, .repeats = 32};
    const bench_option known[] = {
        {.name = "--tensors", .number = &o.tensors, .least = 4, .most = 100000},
        {.name = "--mb", .number = &o.mb, .least = 1, .most = 65536},
        {.name = "--repeats", .number = &o.repeats, .least = 9, .most = REPEATS_MAX},
        {.name = "--json", .text = &o.json}};
    training t = {.seed = 1};
    char folder[BENCH_PATH];
    ckd_error err = {.offset = CKD_NO_OFFSET};
    bench_parse(known, sizeof(known) / sizeof(known[0]), argc, argv);
    bench_make_folder(folder, NULL);
    begin(&t, &o, folder);
    train(&t, &o);
    double step_us = time_metrics(&t, o.repeats), save_ms = time_saves(&t, &o, o.repeats);
    double durable_ms = bench_median(t.durable_ms, SAVES);
    bench_check(ckd_session_close(t.session, &err), &err);
    bench_remove_tree(folder);
    free(t.weights);
    printf("%d tensors, %d MB of weights\n\n| step, us | save, ms | durable, ms |\n|---|---|---|\n",
           o.tensors, o.mb);
    printf("| %.2f | %.3f | %.1f |\n", step_us, save_ms, durable_ms);
    if (o.json) {
        FILE *f = bench_open_output(o.json);
        fprintf(f,
                "{\n \"benchmark\": \"sensors\",\n \"machine\": \"%s\",\n \"tensors\": %d,\n \"mb\": %d,\n "
                "\"step_us\": %.4f,\n \"save_ms\": %.4f,\n \"durable_ms\": %.2f\n}\n",
                bench_machine(), o.tensors, o.mb, step_us, save_ms, durable_ms);
        bench_close_output(f, o.json);
    }
    return 0;
}
