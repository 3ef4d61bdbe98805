/*
 * bench_stall: the cost of periodic saves to training.
 *
 *   bench_stall [--mb N] [--step-ms N] [--steps N] [--every N | --overhead PERCENT] [--fidelity F] [--disk-mb-s N] [--idle]
 *               [--repeats N] [--json FILE] [--svg FILE]      (--help has the rest)
 *
 * A loop imitates training. One thread computes for a while (arithmetic in its caches, then reading the weights), then
 * an optimizer goes over the whole state (W, m, v, f32). The loop runs without saves, with a memcpy of the state in
 * place of each save (by one thread, and by two), with a synchronous save like torch.save's (write everything, fsync),
 * and with sessions of the library, whose snapshots are copied or lazy. The kinds take turns. It prints medians:
 *
 *   step       ms of an iteration without a save
 *   stall      ms that training waits for a save: ckd_session_step and ckd_session_fence, or the memcpy or save in their place
 *   slowed     percent that the rest takes longer than without saves
 *   overhead   percent that the whole loop takes longer than without saves
 *   durable    ms from the call until the checkpoint is on the disk
 *   p50 ... max  ms of an iteration with its waits, of all iterations of all repeats
 *   overlap    the sum of the times of a save's stages in all threads, over the time of the save
 *
 * and checks what sessions must show (checks.c).
 *
 * --disk-mb-s N imitates a disk of N MB/s that has a write cache (support/slow_disk.h). With --slower X it becomes X
 * times slower in the middle of each loop. --idle leaves all cores to the saver except during the optimizer, as
 * training on a GPU does. --trainer N runs N steps of train_gpt instead of the loop: without saves, with its own, and
 * with sessions. --kills N kills a trainer in its saves N times.
 */
#include <argp.h>
#include <ckptdelta.h>
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/file.h"
#include "bench/session/stall.h"
#include "bench/support/slow_disk.h"
#include "bench/support/support.h"

enum { MATRICES = 8, COLUMNS = 512, COPY_EVERY = 5 /* of memcpy, if saves have no fixed interval */ };

/* ---- the slow disk ---- */

static slow_disk disk = {.mutex = PTHREAD_MUTEX_INITIALIZER};

static int at_each_step(void *context, file_op step, const char *path) {
    (void)context;
    if (step == FILE_OP_SYNC && strstr(path, ".tmp")) {
        slow_disk_wait(&disk, AT_FDCWD, path, 0);
    }
    return 0;
}

/* ---- training ---- */

typedef struct training {
    size_t rows, count; /* of each matrix */
    float *w[MATRICES], *m[MATRICES], *v[MATRICES];
    uint64_t step, random;
    size_t work;        /* rounds of arithmetic that take step_ms */
    useconds_t idle_us; /* not 0: it sleeps instead, as if a GPU computed */
    char *copy;         /* memory for a copy of the state */
    volatile double sink;
} training;

static float noise(uint64_t *random) {
    *random = *random * 6364136223846793005u + 1442695040888963407u;
    return (float)((int32_t)(*random >> 33) - (1 << 30)) * 0x1p-30f;
}

static float *floats(size_t count, float scale, uint64_t *random) {
    float *x = bench_allocated(malloc(count * sizeof(float)));
    for (size_t i = 0; i < count; i++) {
        x[i] = scale * (noise(random) + noise(random));
    }
    return x;
}

static void compute(training *t, size_t rounds) {
    double x = 1;
    for (size_t i = 0; i < rounds; i++) {
        x = x * 1.0000001 + 1e-9;
    }
    t->sink = x;
}

static training *training_new(const options *o) {
    training *t = bench_allocated(calloc(1, sizeof(*t)));
    t->random = 1;
    t->rows = (size_t)(o->mb * 1e6 / (3 * MATRICES * COLUMNS * sizeof(float))) + 1;
    t->count = t->rows * COLUMNS;
    for (int i = 0; i < MATRICES; i++) {
        t->w[i] = floats(t->count, 0.02f, &t->random);
        t->m[i] = floats(t->count, 1e-3f, &t->random);
        t->v[i] = floats(t->count, 1e-3f, &t->random);
        for (size_t k = 0; k < t->count; k++) {
            t->v[i][k] = t->v[i][k] * t->v[i][k] + 1e-9f;
        }
    }
    size_t size = 3 * MATRICES * t->count * sizeof(float);
    t->copy = memset(bench_allocated(malloc(size)), 1, size);
    size_t rounds = 1 << 24;
    double begun = bench_seconds();
    compute(t, rounds);
    t->work = (size_t)((double)rounds * o->step_ms / 1e3 / (bench_seconds() - begun));
    t->idle_us = o->idle ? (useconds_t)(1e3 * o->step_ms) : 0;
    return t;
}

static void training_free(training *t) {
    for (int i = 0; i < MATRICES; i++) {
        free(t->w[i]);
        free(t->m[i]);
        free(t->v[i]);
    }
    free(t->copy);
    free(t);
}

static void forward_and_backward(training *t) {
    if (t->idle_us) {
        usleep(t->idle_us);
        return;
    }
    compute(t, t->work);
    double sum = 0;
    for (int i = 0; i < MATRICES; i++) {
        for (size_t k = 0; k < t->count; k += 16) {
            sum += (double)t->w[i][k];
        }
    }
    t->sink = sum;
}

static void optimize(training *t) {
    for (int i = 0; i < MATRICES; i++) {
        float *w = t->w[i], *m = t->m[i], *v = t->v[i];
        uint32_t random = (uint32_t)(t->random += 0x9e3779b9u);
        for (size_t k = 0; k < t->count; k++) {
            random = random * 1664525u + 1013904223u;
            float g = 1e-3f * ((float)(int32_t)random * 0x1p-31f);
            m[k] = 0.9f * m[k] + 0.1f * g;
            v[k] = 0.95f * v[k] + 0.05f * g * g;
            w[k] -= 1e-4f * m[k] / (sqrtf(v[k]) + 1e-8f);
        }
    }
}

/* ---- saving ---- */

static void save_synchronously(const training *t, const char *store) {
    char path[BENCH_PATH + 32];
    ckd_error err = {0};
    file_writer *f;
    snprintf(path, sizeof(path), "%s-sync.tmp", store);
    unlink(path);
    bench_check(file_create(&f, path, 0, &err), &err);
    for (int i = 0; i < MATRICES; i++) {
        const float *const parts[] = {t->w[i], t->m[i], t->v[i]};
        for (int part = 0; part < 3; part++) {
            bench_check(file_append(f, parts[part], t->count * sizeof(float), &err), &err);
        }
    }
    bench_check(file_sync(f, &err), &err);
    bench_check(file_close(f, &err), &err);
}

static ckd_session *open_session(const options *o, training *t, const char *store, mode how,
                                 ckd_saved_fn saved, void *context) {
    ckd_error err = {0};
    ckd_session *s;
    ckd_save_options save = CKD_SAVE_OPTIONS_INIT;
    save.run = "stall";
    save.fidelity = o->fidelity;
    ckd_session_options with = CKD_SESSION_OPTIONS_INIT;
    with.save = &save;
    with.snapshot = how == LAZY ? CKD_SNAPSHOT_LAZY : CKD_SNAPSHOT_COPY;
    with.snapshot_bytes = (uint64_t)(o->snapshots * 1.01 * 3 * MATRICES * sizeof(float)) * t->count;
    with.every_steps = (uint64_t)o->every;
    with.overhead = o->every ? 0 : o->overhead;
    with.on_saved = saved;
    with.saved_context = context;
    bench_check(ckd_session_open(&s, store, &with, &err), &err);
    for (int i = 0; i < MATRICES; i++) {
        static const char *const prefixes[] = {"exp_avg.", "exp_avg_sq.", ""};
        float *const parts[] = {t->m[i], t->v[i], t->w[i]};
        for (int part = 0; part < 3; part++) {
            char name[64];
            snprintf(name, sizeof(name), "%slayers.%d.weight", prefixes[part], i);
            ckd_tensor tensor = CKD_TENSOR_INIT;
            tensor.name = name;
            tensor.dtype = CKD_F32;
            tensor.ndim = 2;
            tensor.shape = (uint64_t[]){t->rows, COLUMNS};
            bench_check(ckd_session_add(s, &tensor, parts[part], 0, &err), &err);
        }
    }
    return s;
}

/* ---- memcpy ---- */

typedef struct copying {
    const training *t;
    int thread, threads;
} copying;

static void *copy_share(void *context) {
    const copying *c = context;
    size_t size = c->t->count * sizeof(float);
    for (int i = c->thread; i < 3 * MATRICES; i += c->threads) {
        const float *const parts[] = {c->t->w[i / 3], c->t->m[i / 3], c->t->v[i / 3]};
        memcpy(c->t->copy + (size_t)i * size, parts[i % 3], size);
    }
    return NULL;
}

/* Copies the state into memory that was touched before. A second thread is started for the copy. */
static void copy_state(const training *t, int threads) {
    copying shares[2] = {{t, 0, threads}, {t, 1, threads}};
    pthread_t other;
    if (threads == 2 && pthread_create(&other, NULL, copy_share, &shares[1]) != 0) {
        bench_die("memcpy", "the second thread cannot be started");
    }
    copy_share(&shares[0]);
    if (threads == 2) {
        pthread_join(other, NULL);
    }
}

/* ---- one loop ---- */

static void note_saved(void *context, const ckd_saved *saved) {
    outcome *r = context;
    bench_check(saved->status, &saved->error);
    if (r->saves < SAVES_MAX) {
        r->places[r->saves] = (int)(saved->step - r->first_step);
        r->stalls[r->saves] = (double)saved->stall_ns / 1e6;
        r->durables[r->saves++] = (double)saved->persist_ns / 1e6;
    }
}

/* Notes medians of the stages of the newest saves in ms, and of the overlap of the stages. */
static void note_stages(outcome *r, const char *path) {
    ckd_error err = {0};
    ckd_store *store;
    ckd_timeline *all;
    double values[STAGES][SAVES_MAX];
    bench_check(ckd_store_open(&store, path, CKD_OPEN_READ, NULL, &err), &err);
    bench_check(ckd_store_timeline(&all, store, "stall", &err), &err);
    int count = (int)all->count < r->saves ? (int)all->count : r->saves;
    for (int i = 0; i < count; i++) {
        const ckd_save_times *t = &all->items[all->count - 1 - (size_t)i];
        const uint64_t stages[] = {t->analyse_ns, t->encode_ns, t->write_ns, t->sync_ns, t->total_ns};
        double sum = 0;
        for (int k = 0; k < STAGES - 1; k++) {
            values[k][i] = (double)stages[k] / 1e6;
            sum += k < STAGES - 2 ? values[k][i] : 0;
        }
        values[STAGES - 1][i] = sum / values[STAGES - 2][i];
    }
    for (int k = 0; k < STAGES; k++) {
        r->stages[k] = stall_median(values[k], count);
    }
    ckd_timeline_free(all);
    ckd_store_close(store);
}

/* Does what this mode does in place of a save if one is due. Returns its ms, or 0. */
static double save_or_copy(const options *o, const training *t, const char *store, mode how, int i) {
    bool due = o->every ? t->step % (uint64_t)o->every == 0 : i % COPY_EVERY == 0;
    if (!due || (how != SYNCHRONOUS && how != MEMCPY && how != MEMCPY_TWO)) {
        return 0;
    }
    double begun = bench_seconds();
    if (how == SYNCHRONOUS) {
        save_synchronously(t, store);
    } else {
        copy_state(t, how == MEMCPY ? 1 : 2);
    }
    return 1e3 * (bench_seconds() - begun);
}

/* The time of the loop ends before the last save is durable, as training does. Steps are numbered across loops. */
static void run_loop(outcome *r, const options *o, training *t, const char *store, mode how) {
    *r = (outcome){.wholes = calloc((size_t)o->steps, sizeof(double)),
                   .fences = calloc((size_t)o->steps, sizeof(double)),
                   .calls = calloc((size_t)o->steps, sizeof(double)),
                   .steps = o->steps};
    ckd_error err = {0};
    t->step++;
    ckd_session *s = how >= COPY ? open_session(o, t, store, how, note_saved, r) : NULL;
    if (s) {
        ckd_status status = ckd_session_step(s, t->step, &err); /* allocates */
        bench_check(status, &err);
        bench_check(ckd_session_wait(s, CKD_DURABLE, &err), &err);
        r->saves = 0;
    }
    r->first_step = t->step + 1;
    disk.rate = 1e6 * o->disk_mb_s;
    double *steps = calloc((size_t)o->steps, sizeof(*steps)), begun = bench_seconds();
    for (int i = 0; i < o->steps; i++) {
        if (i == o->steps / 2) {
            disk.rate /= o->slower;
        }
        double from = bench_seconds(), called, took;
        forward_and_backward(t);
        if (s) {
            called = bench_seconds();
            ckd_session_fence(s);
            r->fences[i] = 1e3 * (bench_seconds() - called);
        }
        optimize(t);
        t->step++;
        steps[i] = 1e3 * (bench_seconds() - from);
        if (s) {
            called = bench_seconds();
            bench_check(ckd_session_step(s, t->step, &err), &err);
            r->calls[i] = 1e3 * (bench_seconds() - called);
        } else if ((took = save_or_copy(o, t, store, how, i)) > 0 && r->saves < SAVES_MAX) {
            r->places[r->saves] = i;
            r->stalls[r->saves] = took;
            r->durables[r->saves++] = how == SYNCHRONOUS ? took : NAN;
        }
        r->wholes[i] = 1e3 * (bench_seconds() - from);
    }
    r->whole_s = bench_seconds() - begun;
    r->step_ms = stall_median(steps, o->steps);
    free(steps);
    bench_check(ckd_session_close(s, &err), &err);
    if (s) {
        note_stages(r, store);
    }
    double stalls = 0;
    for (int i = 0; i < r->saves; i++) {
        r->stall_most_ms = fmax(r->stall_most_ms, r->stalls[i]);
        stalls += r->stalls[i] / 1e3;
    }
    r->slowed = r->whole_s - stalls; /* seconds here; measure() turns them into percent */
    stall_note_halves(r, o);
    r->stall_ms = stall_median(r->stalls, r->saves);
    r->durable_ms = stall_median(r->durables, r->saves);
}

/* ---- all loops ---- */

static void measure(results *r, const options *o, const char *store) {
    training *t = training_new(o);
    for (int repeat = 0; repeat < o->repeats; repeat++) {
        for (mode how = NONE; how < MODES; how++) {
            if (!stall_has(o, how)) {
                continue;
            }
            outcome *out = &r->all[how][repeat];
            run_loop(out, o, t, store, how);
            double none_s = r->all[NONE][repeat].whole_s;
            out->overhead = 100 * (out->whole_s / none_s - 1);
            out->slowed = 100 * (out->slowed / none_s - 1);
            fprintf(stderr, "%-14s %3d saves, overhead %.2f %%\n", stall_mode_names[how], out->saves,
                    out->overhead);
        }
    }
    training_free(t);
}

enum {
    O_MB = 0x100,
    O_STEP_MS,
    O_STEPS,
    O_EVERY,
    O_OVERHEAD,
    O_FIDELITY,
    O_DISK,
    O_IDLE,
    O_REPEATS,
    O_SNAPSHOTS,
    O_SLOWER,
    O_TRAINER,
    O_KILLS,
    O_JSON,
    O_SVG
};
static const struct argp_option option_table[] = {
    {"mb", O_MB, "N", 0, "megabytes of state (240)", 0},
    {"step-ms", O_STEP_MS, "N", 0, "milliseconds of computing in an iteration, without the optimizer (300)",
     0},
    {"steps", O_STEPS, "N", 0, "iterations of a loop (60)", 0},
    {"every", O_EVERY, "N", 0, "save every N steps", 0},
    {"overhead", O_OVERHEAD, "PERCENT", 0,
     "save as often as costs no more; synchronous saves are left out (3.5)", 0},
    {"fidelity", O_FIDELITY, "NAME", 0, "exact (default), near or coarse", 0},
    {"disk-mb-s", O_DISK, "N", 0, "a disk of N MB/s (unlimited)", 0},
    {"idle", O_IDLE, NULL, 0, "training waits instead of computing, as for a GPU; its optimizer computes", 0},
    {"repeats", O_REPEATS, "N", 0, "of all loops, in turns (3)", 0},
    {"snapshots", O_SNAPSHOTS, "N", 0, "memory for N of them (1)", 0},
    {"slower", O_SLOWER, "X", 0, "with --disk-mb-s: in the middle the disk becomes X times slower", 0},
    {"trainer", O_TRAINER, "N", 0, "N steps of train_gpt instead of the loop", 0},
    {"kills", O_KILLS, "N", 0, "kill a trainer during its saves N times, instead of the loop", 0},
    {"json", O_JSON, "FILE", 0, "also write the results there", 0},
    {"svg", O_SVG, "FILE", 0, "draw the times of iterations", 0},
    {0},
};

static double number(struct argp_state *state, const char *text, double least, double most) {
    char *end;
    double x = strtod(text, &end);
    if (end == text || *end || !(x >= least && x <= most)) {
        argp_error(state, "%s is not a number from %g to %g", text, least, most);
    }
    return x;
}

static ckd_fidelity fidelity_named(struct argp_state *state, const char *text) {
    ckd_fidelity f;
    if (!bench_fidelity(&f, text)) {
        argp_error(state, "%s is not a fidelity", text);
    }
    return f;
}

static error_t parse_option(int key, char *text, struct argp_state *state) {
    options *o = state->input;
    switch (key) {
    case O_MB:
        o->mb = number(state, text, 1, 1e6);
        break;
    case O_STEP_MS:
        o->step_ms = number(state, text, 0, 1e6);
        break;
    case O_STEPS:
        o->steps = (int)number(state, text, 1, SAVES_MAX);
        break;
    case O_EVERY:
        o->every = (int)number(state, text, 1, SAVES_MAX);
        break;
    case O_OVERHEAD:
        o->overhead = number(state, text, 0.01, 100) / 100;
        break;
    case O_FIDELITY:
        o->fidelity = fidelity_named(state, text);
        break;
    case O_DISK:
        o->disk_mb_s = number(state, text, 0.001, 1e6);
        break;
    case O_IDLE:
        o->idle = 1;
        break;
    case O_REPEATS:
        o->repeats = (int)number(state, text, 1, REPEATS_MAX);
        break;
    case O_SNAPSHOTS:
        o->snapshots = (int)number(state, text, 1, 3);
        break;
    case O_SLOWER:
        o->slower = number(state, text, 1, 1000);
        break;
    case O_TRAINER:
        o->trainer = (int)number(state, text, 1, 1e6);
        break;
    case O_KILLS:
        o->kills = (int)number(state, text, 1, 1e6);
        break;
    case ARGP_KEY_END:
        if (o->slower > 1 && o->disk_mb_s <= 0) {
            argp_error(state, "--slower goes with --disk-mb-s");
        }
        break;
    case O_JSON:
        o->json = text;
        break;
    case O_SVG:
        o->svg = text;
        break;
    default:
        return ARGP_ERR_UNKNOWN;
    }
    return 0;
}

int main(int argc, char **argv) {
    options o = {.mb = 240,
                 .step_ms = 300,
                 .steps = 60,
                 .overhead = 0.035,
                 .repeats = 3,
                 .snapshots = 1,
                 .slower = 1,
                 .fidelity = CKD_EXACT};
    const struct argp argp = {
        .options = option_table, .parser = parse_option, .doc = "What periodic saves cost training."};
    argp_parse(&argp, argc, argv, ARGP_NO_ARGS, NULL, &o);
    char folder[BENCH_PATH], path[BENCH_PATH + 8];
    bench_make_folder(folder, NULL);
    snprintf(path, sizeof(path), "%s/store", folder);
    disk.rate = 1e6 * o.disk_mb_s;
    file_set_fault_hook(at_each_step, NULL);
    if (o.trainer) {
        stall_train(&o, folder);
    } else if (o.kills) {
        stall_kill(&o, folder);
    } else {
        results *r = bench_allocated(calloc(1, sizeof(*r)));
        measure(r, &o, path);
        stall_report(r, &o);
        stall_draw(r, &o);
        stall_free(r, &o);
    }
    file_set_fault_hook(NULL, NULL);
    bench_remove_tree(folder);
    return 0;
}
