/* The trainer's state in a ckptdelta session: registered once, saved during training. */
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "examples/gpt_state.h"

struct gpt_session {
    gpt_background with;
    ckd_session *session;
    gpt_small small;           /* read by the session; set before each step */
    ckd_optimizer *optimizers; /* one per tensor of the table; NULL: not every step is saved */
    char config[GPT_CONFIG_MAX];
};

/* ------------------------------------------------------------------------------------------------------ signals */

static ckd_session *asked; /* one session per process: a signal handler can reach nothing else */

static void on_signal(int number) {
    if (asked)
        ckd_session_request(asked, number == SIGTERM ? CKD_REQUEST_STOP : CKD_REQUEST_SAVE);
}

static void take_signals(ckd_session *session) {
    struct sigaction action = {.sa_handler = session ? on_signal : SIG_DFL, .sa_flags = SA_RESTART};
    if (session)
        asked = session;
    sigaction(SIGUSR1, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    asked = session;
}

/* --------------------------------------------------------------------------------------------------------- open */

static void set_state(gpt_session *s) {
    const gpt_background *w = &s->with;
    s->small = gpt_small_of(w->model, w->text, w->progress);
    if (!s->optimizers)
        return;
    ckd_optimizer made = gpt_optimizer_of(w->lineage->adamw, w->progress->step);
    for (size_t i = 0; i < w->model->tensor_count; i++)
        s->optimizers[i] = gpt_optimizer_for(&made, &w->model->tensors[i]);
}

static ckd_status add_part(gpt_session *s, size_t i, int part, ckd_error *err) {
    const gpt_tensor *from = &s->with.model->tensors[i];
    char name[GPT_NAME_MAX + 16];
    snprintf(name, sizeof name, "%s%s", gpt_prefixes[part], from->name);
    ckd_tensor tensor = CKD_TENSOR_INIT;
    tensor.name = name;
    tensor.dtype = CKD_F32;
    tensor.ndim = from->ndim;
    tensor.shape = from->shape;
    tensor.optimizer = s->optimizers ? &s->optimizers[i] : NULL;
    return ckd_session_add(s->session, &tensor, gpt_part_of(from, part), 0, err);
}

static ckd_status add_all(gpt_session *s, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < s->with.model->tensor_count; i++)
        for (int part = 0; status == CKD_OK && part < GPT_PARTS; part++)
            status = add_part(s, i, gpt_part_order[part], err);
    ckd_tensor small[GPT_SMALL];
    gpt_small_tensors(small, &s->small);
    for (int i = 0; status == CKD_OK && i < GPT_SMALL; i++)
        status = ckd_session_add(s->session, &small[i], (void *)(uintptr_t)small[i].data, 0, err);
    return status == CKD_OK
               ? ckd_session_add_bytes(s->session, GPT_CONFIG_BLOB, s->config, strlen(s->config), err)
               : status;
}

static void store_says(void *context, const char *message) {
    (void)context;
    fprintf(stderr, "store: %s\n", message);
}

static void saved(void *context, const ckd_saved *saved) {
    (void)context;
    if (saved->status != CKD_OK)
        return; /* the next step reports it */
    printf("saved step %" PRIu64
           ": %s, %.2f MiB for %.2f MiB, training waited %.1f ms, durable after %.0f ms\n",
           saved->step, ckd_kind_name(saved->checkpoint.kind),
           (double)saved->checkpoint.stored_bytes / 1048576, (double)saved->checkpoint.raw_bytes / 1048576,
           (double)saved->stall_ns / 1e6, (double)saved->persist_ns / 1e6);
}

static ckd_status open_session(gpt_session *s, ckd_error *err) {
    const gpt_background *w = &s->with;
    const gpt_lineage *lineage = w->lineage;
    ckd_store_options store = CKD_STORE_OPTIONS_INIT;
    store.on_message = store_says;
    ckd_save_options save = CKD_SAVE_OPTIONS_INIT;
    save.run = lineage->run;
    save.fidelity = lineage->fidelity;
    /* a repeated run gives the same bits; anything else is an error, as with ranks, which cannot compare */
    save.on_duplicate = lineage->rewound ? CKD_DUPLICATE_BRANCH
                        : w->ranks       ? CKD_DUPLICATE_ERROR
                                         : CKD_DUPLICATE_SAME_OK;
    save.metric_name = "loss";
    save.resumed_from_run = lineage->resumed_run;
    save.resumed_from_step = lineage->resumed_step;
    if (lineage->branch) {
        save.parent_run = lineage->resumed_run;
        save.parent_step = lineage->resumed_step;
    }
    ckd_session_options options = CKD_SESSION_OPTIONS_INIT;
    options.save = &save;
    options.store = &store;
    options.snapshot = w->lazy ? CKD_SNAPSHOT_LAZY : CKD_SNAPSHOT_COPY;
    /* room for two states, plus what they do not include */
    options.snapshot_bytes = 3 * GPT_PARTS * sizeof(float) * w->model->parameter_count;
    options.every_steps = w->save_every;
    options.overhead = w->save_every ? 0 : w->overhead;
    options.on_saved = w->ranks && w->ranks->rank > 0 ? NULL : saved;
    options.ranks = w->ranks;
    if (w->ranks)
        options.when_busy = CKD_BUSY_BLOCK; /* means the same on all ranks */
    return ckd_session_open(&s->session, w->store, &options, err);
}

void gpt_session_await_agent(const char *store, const char *run) {
    const char *agent = getenv("CKPTDELTA_AGENT");
    if (agent && *agent && strcmp(agent, "0") != 0)
        (void)ckd_agent_settle(store, agent, run, NULL);
}

int gpt_session_new(gpt_session **out, const gpt_background *with) {
    ckd_error err = {0};
    gpt_session *s = calloc(1, sizeof *s);
    if (s && with->lineage->adamw)
        s->optimizers = calloc(with->model->tensor_count, sizeof *s->optimizers);
    if (!s || (with->lineage->adamw && !s->optimizers)) {
        fprintf(stderr, "train_gpt: out of memory\n");
        free(s);
        return -1;
    }
    s->with = *with;
    gpt_describe_config(s->config, &with->model->config);
    set_state(s);
    if (open_session(s, &err) != CKD_OK || add_all(s, &err) != CKD_OK) {
        gpt_complain("cannot open a session", &err);
        ckd_session_close(s->session, NULL);
        free(s->optimizers);
        free(s);
        return -1;
    }
    take_signals(s->session);
    *out = s;
    return 0;
}

/* ----------------------------------------------------------------------------------------------------- training */

void gpt_session_fence(gpt_session *s) {
    ckd_session_fence(s->session);
}

void gpt_session_phase(gpt_session *s, ckd_phase phase) {
    ckd_session_phase(s->session, phase);
}

void gpt_session_poll(ckd_session_state *out, gpt_session *s) {
    ckd_session_poll(out, s->session);
}

int gpt_session_asked(gpt_session *s) {
    ckd_session_state state;
    ckd_session_poll(&state, s->session);
    return state.stop_asked ? 2 : state.save_asked;
}

int gpt_session_step(int *stop, gpt_session *s, double loss, int last) {
    ckd_error err = {0};
    ckd_session_fence(s->session); /* this function writes the small state, not the optimizer */
    set_state(s);
    ckd_session_metric(s->session, loss);
    uint64_t step = s->with.progress->step;
    ckd_status status =
        last ? ckd_session_save(s->session, step, &err) : ckd_session_step(s->session, step, &err);
    ckd_session_state state;
    ckd_session_poll(&state, s->session);
    *stop = state.stop_asked;
    return status == CKD_OK ? 0 : gpt_complain("a save failed", &err);
}

int gpt_session_end(gpt_session *s) {
    if (!s)
        return 0;
    ckd_error err = {0};
    ckd_status status = ckd_session_wait(s->session, CKD_DURABLE, &err);
    take_signals(NULL);
    ckd_session_state state;
    ckd_session_poll(&state, s->session);
    int reports = !s->with.ranks || s->with.ranks->rank == 0;
    if (reports && state.saved && state.trained_ns)
        printf("%" PRIu64
               " saves in the background: training waited %.2f %% of its time, and was slowed by %.2f %%\n",
               state.saved, 100.0 * (double)state.stall_ns / (double)state.trained_ns,
               100.0 * (double)state.interference_ns / (double)state.trained_ns);
    ckd_session_close(s->session, NULL);
    free(s->optimizers);
    free(s);
    return status == CKD_OK ? 0 : gpt_complain("a save failed", &err);
}
