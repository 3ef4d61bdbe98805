/*
 * bench_agent: what an agent costs training, and how fast a restart takes the state from its memory.
 *
 *   bench_agent [--width N] [--steps N] [--every N] [--mib N] [--repeats N] [--json FILE]
 *
 * Stalls: train_gpt of this width with --background copy saves every Nth step, without an agent and with one, in turns.
 * The medians are of what each save made training wait, and of the time until it was durable.
 *
 * Restores: a state of so many MiB, in 16 tensors, is saved by a session with an agent. Then sessions restore it: from
 * the agent's memory; from the store with files in the page cache; from the store with a cold cache, if this process
 * may drop it. memcpy is that of the same bytes, by one thread, between memory that is mapped. All are medians of
 * wall-clock time.
 */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <ckptdelta.h>

#include "bench/support/support.h"

enum { TENSORS = 16, REPEATS_MAX = 32, SAVES_MAX = 4096 };

typedef struct options {
    int width, steps, every, mib, repeats;
    const char *json;
} options;

static char folder[BENCH_PATH], agent_socket[BENCH_PATH + 16];

/* ---- the agent ---- */

static void on_ready(void *context, const char *path) {
    (void)path;
    ssize_t written = write(*(int *)context, "r", 1);
    (void)written;
}

static pid_t start_agent(const char *store) {
    int ready[2];
    char byte;
    if (pipe(ready) != 0) {
        bench_die("pipe", strerror(errno));
    }
    pid_t agent = fork();
    if (agent == 0) {
        ckd_agent_options o = CKD_AGENT_OPTIONS_INIT;
        o.socket = agent_socket;
        o.on_ready = on_ready;
        o.ready_context = &ready[1];
        _exit(ckd_agent_run(store, &o, NULL) != CKD_OK);
    }
    close(ready[1]);
    if (read(ready[0], &byte, 1) != 1) {
        bench_die("the agent", "it has not started");
    }
    close(ready[0]);
    return agent;
}

static void stop_agent(const char *store, pid_t agent) {
    ckd_error err;
    bench_check(ckd_agent_drain(store, agent_socket, 1, &err), &err);
    waitpid(agent, NULL, 0);
}

/* ---- stalls ---- */

typedef struct stalls {
    double waited[SAVES_MAX], durable[SAVES_MAX]; /* ms */
    int count;
} stalls;

static void read_stalls(stalls *out, const char *path) {
    char line[512];
    FILE *f = fopen(path, "r");
    while (f && fgets(line, sizeof(line), f) && out->count < SAVES_MAX) {
        const char *waited = strstr(line, "training waited "), *durable = strstr(line, "durable after ");
        if (waited && durable) {
            out->waited[out->count] = strtod(waited + strlen("training waited "), NULL);
            out->durable[out->count++] = strtod(durable + strlen("durable after "), NULL);
        }
    }
    if (f) {
        fclose(f);
    }
}

static void train(stalls *out, const options *o, bool with_agent, int number) {
    char store[BENCH_PATH + 32], output[BENCH_PATH + 32], width[16], steps[16], every[16];
    snprintf(store, sizeof(store), "%s/stalls%d", folder, number);
    snprintf(output, sizeof(output), "%s/output%d", folder, number);
    snprintf(width, sizeof(width), "%d", o->width);
    snprintf(steps, sizeof(steps), "%d", o->steps);
    snprintf(every, sizeof(every), "%d", o->every);
    pid_t agent = with_agent ? start_agent(store) : 0;
    setenv("CKPTDELTA_AGENT", with_agent ? agent_socket : "", 1);
    const char *arguments[] = {
        "--width",      width,  "--batch", "2",   "--context", "64",  "--steps", steps, "--save-every", every,
        "--background", "copy", "--store", store, "--run",     "gpt", NULL};
    bench_run_trainer_into(output, arguments);
    if (with_agent) {
        stop_agent(store, agent);
    }
    read_stalls(out, output);
    bench_remove_tree(store);
}

/* ---- restores ---- */

static float *values[TENSORS], *copied[TENSORS];

static ckd_session *open_session(const char *store, const char *agent, size_t elements) {
    ckd_error err;
    ckd_session *s;
    ckd_save_options save = CKD_SAVE_OPTIONS_INIT;
    ckd_session_options o = CKD_SESSION_OPTIONS_INIT;
    save.run = "bench";
    o.save = &save;
    o.agent = agent;
    bench_check(ckd_session_open(&s, store, &o, &err), &err);
    for (int i = 0; i < TENSORS; i++) {
        char name[32];
        ckd_tensor t = CKD_TENSOR_INIT;
        snprintf(name, sizeof(name), "layer%d.weight", i);
        t.name = name;
        t.dtype = CKD_F32;
        t.ndim = 1;
        t.shape = (uint64_t[]){elements};
        bench_check(ckd_session_add(s, &t, values[i], 0, &err), &err);
    }
    return s;
}

static double restore(const char *store, const char *agent, size_t elements) {
    ckd_error err;
    ckd_session *s = open_session(store, agent, elements);
    double begun = bench_seconds();
    bench_check(ckd_session_restore(NULL, s, CKD_LATEST, &err), &err);
    double took = bench_seconds() - begun;
    bench_check(ckd_session_close(s, &err), &err);
    return took;
}

static double copy_all(size_t elements) {
    double begun = bench_seconds();
    for (int i = 0; i < TENSORS; i++) {
        memcpy(copied[i], values[i], elements * sizeof(float));
    }
    return bench_seconds() - begun;
}

static bool drop_caches(void) {
    sync();
    int fd = open("/proc/sys/vm/drop_caches", O_WRONLY | O_CLOEXEC);
    bool dropped = fd >= 0 && write(fd, "3", 1) == 1;
    if (fd >= 0) {
        close(fd);
    }
    return dropped;
}

/* In a child that is killed when its state is durable, so that the agent keeps its memory. */
static void save_and_die(const char *store, size_t elements) {
    pid_t trainer = fork();
    if (trainer == 0) {
        ckd_error err;
        ckd_session *s = open_session(store, agent_socket, elements);
        bench_check(ckd_session_save(s, 1, &err), &err);
        bench_check(ckd_session_wait(s, CKD_DURABLE, &err), &err);
        raise(SIGKILL);
    }
    waitpid(trainer, NULL, 0);
}

typedef struct restores {
    double copy, memory, warm, cold; /* s; cold 0: the cache could not be dropped */
} restores;

static restores measure_restores(const options *o) {
    double copy[REPEATS_MAX], memory[REPEATS_MAX], warm[REPEATS_MAX], cold[REPEATS_MAX];
    size_t elements = ((size_t)o->mib << 20) / TENSORS / sizeof(float);
    char store[BENCH_PATH + 32];
    uint64_t seed = 1;
    snprintf(store, sizeof(store), "%s/restores", folder);
    for (int i = 0; i < TENSORS; i++) {
        values[i] = bench_allocated(malloc(elements * sizeof(float)));
        copied[i] = bench_allocated(calloc(elements, sizeof(float)));
        for (size_t k = 0; k < elements; k++) {
            values[i][k] = bench_normal(&seed);
        }
    }
    pid_t agent = start_agent(store);
    save_and_die(store, elements);
    (void)copy_all(elements);
    bool dropped = true;
    for (int k = 0; k < o->repeats; k++) {
        copy[k] = copy_all(elements);
        memory[k] = restore(store, agent_socket, elements);
        warm[k] = restore(store, "", elements);
        dropped = dropped && drop_caches();
        cold[k] = dropped ? restore(store, "", elements) : 0;
    }
    stop_agent(store, agent);
    return (restores){bench_median(copy, o->repeats), bench_median(memory, o->repeats),
                      bench_median(warm, o->repeats), bench_median(cold, o->repeats)};
}

/* ---- the program ---- */

static void report(const options *o, stalls of[2], const restores *r) {
    double waited[2], durable[2], gib = o->mib / 1024.0;
    FILE *json = bench_open_output(o->json);
    for (int i = 0; i < 2; i++) {
        waited[i] = bench_median(of[i].waited, of[i].count);
        durable[i] = bench_median(of[i].durable, of[i].count);
        printf("%-16s training waited %7.1f ms, durable after %7.0f ms, %d saves\n",
               i ? "with an agent" : "without", waited[i], durable[i], of[i].count);
    }
    printf(
        "restore of %d MiB: memcpy %.2f GiB/s, from memory %.2f (%.2f of it), from the store %.2f, cold %.2f\n",
        o->mib, gib / r->copy, gib / r->memory, r->copy / r->memory, gib / r->warm,
        r->cold > 0 ? gib / r->cold : 0);
    fprintf(
        json,
        "{\n  \"benchmark\": \"agent\",\n  \"machine\": \"%s\",\n  \"width\": %d,\n  \"saves\": [%d, %d],\n"
        "  \"waited_ms\": [%.2f, %.2f],\n  \"durable_ms\": [%.1f, %.1f],\n  \"restore_mib\": %d,\n"
        "  \"memcpy_s\": %.4f,\n  \"from_memory_s\": %.4f,\n  \"from_store_s\": %.4f,\n  \"from_store_cold_s\": %.4f\n}\n",
        bench_machine(), o->width, of[0].count, of[1].count, waited[0], waited[1], durable[0], durable[1],
        o->mib, r->copy, r->memory, r->warm, r->cold);
    bench_close_output(json, o->json);
}

int main(int argc, char **argv) {
    options o = {.width = 256,
                 .steps = 30,
                 .every = 3,
                 .mib = 1024,
                 .repeats = 5,
                 .json = "bench/results/bench_agent.json"};
    const bench_option known[] = {{"--width", .number = &o.width, .least = 32, .most = 4096},
                                  {"--steps", .number = &o.steps, .least = 1, .most = SAVES_MAX},
                                  {"--every", .number = &o.every, .least = 1, .most = SAVES_MAX},
                                  {"--mib", .number = &o.mib, .least = 16, .most = 1 << 16},
                                  {"--repeats", .number = &o.repeats, .least = 1, .most = REPEATS_MAX},
                                  {"--json", .text = &o.json}};
    static stalls of[2];
    bench_parse(known, sizeof(known) / sizeof(known[0]), argc, argv);
    bench_make_folder(folder, NULL);
    snprintf(agent_socket, sizeof(agent_socket), "%s/agent", folder);
    for (int i = 0; i < 4; i++) {
        train(&of[i % 2], &o, i % 2, i);
    }
    restores r = measure_restores(&o);
    report(&o, of, &r);
    bench_remove_tree(folder);
    return 0;
}
