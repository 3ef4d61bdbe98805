/* The command line of train_gpt, by glibc's argp. */
#include <argp.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "examples/gpt_options.h"

enum {
    O_WIDTH = 0x100,
    O_LAYERS,
    O_HEADS,
    O_CONTEXT,
    O_BATCH,
    O_STEPS,
    O_SEED,
    O_BATCH_SEED,
    O_MICRO_BATCHES,
    O_NO_PHASES,
    O_RANKS_WAIT,
    O_FAULT,
    O_THREADS,
    O_TEXT,
    O_KEEP_TEXT,
    O_LR,
    O_MIN_LR,
    O_WARMUP,
    O_SCHEDULE,
    O_BETA1,
    O_BETA2,
    O_EPS,
    O_WEIGHT_DECAY,
    O_CLIP,
    O_LOG_EVERY,
    O_EVAL_EVERY,
    O_EVAL_BATCHES,
    O_LOSSES,
    O_STORE,
    O_RUN,
    O_SAVE_EVERY,
    O_FIDELITY,
    O_BACKGROUND,
    O_OVERHEAD,
    O_RESUME,
    O_RESUME_RUN,
    O_RESUME_STEP,
    O_DUMP,
    O_DUMP_STEPS
};

static const struct argp_option option_table[] = {
    {0, 0, 0, 0, "Model:", 1},
    {"width", O_WIDTH, "N", 0, "elements of the residual stream (128)", 1},
    {"layers", O_LAYERS, "N", 0, "blocks (4)", 1},
    {"heads", O_HEADS, "N", 0, "attention heads (4)", 1},
    {"context", O_CONTEXT, "N", 0, "bytes of a training window (64)", 1},
    {"batch", O_BATCH, "N", 0, "windows of a step (8)", 1},
    {0, 0, 0, 0, "Training:", 2},
    {"steps", O_STEPS, "N", 0, "train up to this step (200)", 2},
    {"seed", O_SEED, "N", 0, "of weights and batches (1)", 2},
    {"batch-seed", O_BATCH_SEED, "N", 0, "with --resume-run: draw batches from this seed from here on", 2},
    {"micro-batches", O_MICRO_BATCHES, "N", 0, "train_pipeline: parts of a batch on their way together (8)",
     2},
    {"fault", O_FAULT, "KIND@N", 0,
     "fail on purpose at step N: nan, zero; not in train_mpi: spike, freeze; in train_pipeline alone: stuck. For tests",
     2},
    {"threads", O_THREADS, "N", 0, "changes the speed, never a bit of the result (one per core)", 2},
    {"text", O_TEXT, "FILE", 0, "train on FILE instead of $TEXT or text found in /usr", 2},
    {"keep-text", O_KEEP_TEXT, 0, 0,
     "with --text: if there is no such FILE, write the text found in /usr to it first", 2},
    {"lr", O_LR, "X", 0, "AdamW's learning rate (1e-3)", 2},
    {"min-lr", O_MIN_LR, "X", 0, "where the cosine ends (a tenth of --lr)", 2},
    {"warmup", O_WARMUP, "N", 0, "steps of linear warm-up (20)", 2},
    {"schedule", O_SCHEDULE, "NAME", 0, "cosine (default) or constant", 2},
    {"beta1", O_BETA1, "X", 0, "decay of exp_avg (0.9)", 2},
    {"beta2", O_BETA2, "X", 0, "decay of exp_avg_sq (0.95)", 2},
    {"eps", O_EPS, "X", 0, "added to the root of exp_avg_sq (1e-8)", 2},
    {"weight-decay", O_WEIGHT_DECAY, "X", 0, "of matrices (0.1)", 2},
    {"clip", O_CLIP, "X", 0, "bound on the gradient's norm, 0 for none (1)", 2},
    {0, 0, 0, 0, "Output:", 3},
    {"log-every", O_LOG_EVERY, "N", 0, "print a line every N steps (10)", 3},
    {"eval-every", O_EVAL_EVERY, "N", 0, "print the validation loss every N steps (at the end)", 3},
    {"eval-batches", O_EVAL_BATCHES, "N", 0, "batches of a validation loss, evenly spaced (16)", 3},
    {"losses", O_LOSSES, "FILE", 0, "append a line for each step: step, loss as a C hex float, loss", 3},
    {0, 0, 0, 0, "Checkpoints:", 4},
    {"store", O_STORE, "DIR", 0, "save to this ckptdelta store, which is created if needed", 4},
    {"run", O_RUN, "NAME", 0, "name of the run (gpt)", 4},
    {"save-every", O_SAVE_EVERY, "N", 0, "save every N steps, and at the end (at the end)", 4},
    {"fidelity", O_FIDELITY, "NAME", 0, "of checkpoints: exact, near or coarse (exact)", 4},
    {"background", O_BACKGROUND, "HOW", 0,
     "save while training goes on: copy (training waits for a copy in memory) or lazy (not even for that). "
     "SIGUSR1 asks for a save, SIGTERM for one and to stop",
     4},
    {"overhead", O_OVERHEAD, "PERCENT", 0,
     "with --background, instead of --save-every: as often as costs no more of the time (3.5)", 4},
    {"ranks-wait", O_RANKS_WAIT, "SECONDS", 0,
     "train_mpi and train_pipeline: how long a rank waits for the others in a save (600)", 4},
    {"no-phases", O_NO_PHASES, 0, 0,
     "train_pipeline: do not tell the library when a stage waits for another one. Only benchmarks want that",
     4},
    {"resume", O_RESUME, 0, 0,
     "go on from the newest checkpoint of the run, from the start if there is none. Below ckptdelta run: from the one "
     "that it has chosen",
     4},
    {"resume-step", O_RESUME_STEP, "N", 0, "go on from the checkpoint of step N", 4},
    {"resume-run", O_RESUME_RUN, "NAME", 0, "go on from another run's checkpoint, saving to --run", 4},
    {"dump", O_DUMP, "DIR", 0,
     "write raw fp32 files DIR/STEP/TENSOR.f32 every --save-every steps, for benchmarks", 4},
    {"dump-steps", O_DUMP_STEPS, "N,N,...", 0, "write them at these steps instead", 4},
    {0},
};

static uint64_t whole(const struct argp_state *state, const char *text, uint64_t least, uint64_t most) {
    char *end = NULL;
    errno = 0;
    unsigned long long value = strtoull(text, &end, 10);
    if (errno || end == text || *end || strchr(text, '-') || value < least || value > most)
        argp_error(state, "%s is not a whole number from %llu to %llu", text, (unsigned long long)least,
                   (unsigned long long)most);
    return value;
}

static int small(const struct argp_state *state, const char *text) {
    return (int)whole(state, text, 1, 4096);
}

static double real(const struct argp_state *state, const char *text, double below) {
    char *end = NULL;
    double value = strtod(text, &end);
    if (end == text || *end || !(value >= 0 && value < below))
        argp_error(state, "%s is not a number from 0 to below %g", text, below);
    return value;
}

static void step_list(const struct argp_state *state, const char *text, gpt_options *o) {
    char copy[1024], *rest = NULL;
    if (strlen(text) >= sizeof copy)
        argp_error(state, "--dump-steps is too long");
    strcpy(copy, text);
    for (char *p = strtok_r(copy, ",", &rest); p; p = strtok_r(NULL, ",", &rest)) {
        if (o->dump_step_count == GPT_DUMP_STEPS_MAX)
            argp_error(state, "--dump-steps takes at most %d steps", GPT_DUMP_STEPS_MAX);
        o->dump_steps[o->dump_step_count++] = whole(state, p, 1, INT64_MAX);
    }
}

static error_t parse_model(int key, char *text, struct argp_state *state) {
    gpt_options *o = state->input;
    switch (key) {
    case O_WIDTH:
        o->model.width = small(state, text);
        break;
    case O_LAYERS:
        o->model.layers = small(state, text);
        break;
    case O_HEADS:
        o->model.heads = small(state, text);
        break;
    case O_CONTEXT:
        o->model.context = small(state, text);
        break;
    case O_BATCH:
        o->model.batch = small(state, text);
        break;
    case O_TEXT:
        o->text = text;
        break;
    case O_KEEP_TEXT:
        o->keep_text = 1;
        break;
    case O_LR:
        o->adamw.lr = real(state, text, 1e3);
        break;
    case O_MIN_LR:
        o->adamw.min_lr = real(state, text, 1e3);
        break;
    case O_WARMUP:
        o->adamw.warmup = whole(state, text, 0, INT64_MAX);
        break;
    case O_BETA1:
        o->adamw.beta1 = real(state, text, 1);
        break;
    case O_BETA2:
        o->adamw.beta2 = real(state, text, 1);
        break;
    case O_EPS:
        o->adamw.eps = real(state, text, 1);
        break;
    case O_WEIGHT_DECAY:
        o->adamw.weight_decay = real(state, text, 1e3);
        break;
    case O_CLIP:
        o->adamw.clip = real(state, text, 1e9);
        break;
    case O_SCHEDULE:
        o->adamw.cosine = strcmp(text, "cosine") == 0;
        if (!o->adamw.cosine && strcmp(text, "constant") != 0)
            argp_error(state, "--schedule is cosine or constant, not %s", text);
        break;
    default:
        return ARGP_ERR_UNKNOWN;
    }
    return 0;
}

static void check_all(gpt_options *o, const struct argp_state *state) {
    if ((o->resume || o->save_every) && !o->store && !o->dump)
        argp_error(state, "there is nowhere to save to or resume from: name a --store");
    if (o->resume && !o->store)
        argp_error(state, "a resume needs a --store");
    if (o->reseed && !o->resume_run)
        argp_error(state, "--batch-seed is for a branch off another run: name it with --resume-run");
    if (o->background && !o->store)
        argp_error(state, "--background needs a --store");
    if (o->overhead > 0 && (!o->background || o->save_every))
        argp_error(state, "--overhead goes with --background, without --save-every");
    if (o->keep_text && !o->text)
        argp_error(state, "--keep-text needs the file's name: --text FILE");
    if (!(o->adamw.min_lr >= 0))
        o->adamw.min_lr = o->adamw.lr / 10;
    o->adamw.steps = o->steps;
}

static error_t parse_saving(int key, char *text, struct argp_state *state) {
    gpt_options *o = state->input;
    switch (key) {
    case O_STORE:
        o->store = text;
        break;
    case O_RUN:
        o->run = text;
        break;
    case O_SAVE_EVERY:
        o->save_every = whole(state, text, 1, INT64_MAX);
        break;
    case O_FIDELITY:
        for (o->fidelity = CKD_EXACT; strcmp(text, ckd_fidelity_name(o->fidelity)) != 0; o->fidelity++)
            if (o->fidelity == CKD_COARSE)
                argp_error(state, "--fidelity is exact, near or coarse, not %s", text);
        break;
    case O_BACKGROUND:
        o->background = text;
        if (strcmp(text, "copy") != 0 && strcmp(text, "lazy") != 0)
            argp_error(state, "--background is copy or lazy, not %s", text);
        break;
    case O_OVERHEAD:
        o->overhead = real(state, text, 100) / 100;
        break;
    case O_FAULT:
        if (gpt_fault_parse(&o->fault, text))
            argp_error(state, "--fault is spike, freeze, stuck, nan or zero, and @STEP; not %s", text);
        break;
    case O_RANKS_WAIT:
        o->ranks_wait_s = whole(state, text, 1, 86400);
        break;
    case O_NO_PHASES:
        o->no_phases = 1;
        break;
    case O_RESUME:
        o->resume = 1;
        break;
    case O_RESUME_RUN:
        o->resume = 1, o->resume_run = text;
        break;
    case O_RESUME_STEP:
        o->resume = 1, o->resume_step = whole(state, text, 0, INT64_MAX);
        break;
    default:
        return parse_model(key, text, state);
    }
    return 0;
}

static error_t parse_option(int key, char *text, struct argp_state *state) {
    gpt_options *o = state->input;
    switch (key) {
    case O_STEPS:
        o->steps = whole(state, text, 1, INT64_MAX);
        break;
    case O_SEED:
        o->seed = whole(state, text, 0, UINT64_MAX);
        break;
    case O_BATCH_SEED:
        o->reseed = 1, o->batch_seed = whole(state, text, 0, UINT64_MAX);
        break;
    case O_THREADS:
        o->threads = small(state, text);
        break;
    case O_MICRO_BATCHES:
        o->micro_batches = small(state, text);
        break;
    case O_LOG_EVERY:
        o->log_every = whole(state, text, 1, INT64_MAX);
        break;
    case O_EVAL_EVERY:
        o->eval_every = whole(state, text, 1, INT64_MAX);
        break;
    case O_EVAL_BATCHES:
        o->eval_batches = whole(state, text, 1, GPT_EVAL_BATCHES_MAX);
        break;
    case O_LOSSES:
        o->losses = text;
        break;
    case O_DUMP:
        o->dump = text;
        break;
    case O_DUMP_STEPS:
        step_list(state, text, o);
        break;
    case ARGP_KEY_END:
        check_all(o, state);
        break;
    default:
        return parse_saving(key, text, state);
    }
    return 0;
}

void gpt_options_parse(gpt_options *out, int argc, char **argv) {
    const char *text = getenv("TEXT");
    *out = (gpt_options){
        .model = {.width = 128, .layers = 4, .heads = 4, .context = 64, .batch = 8},
        .adamw = {.lr = 1e-3,
                  .min_lr = NAN,
                  .beta1 = 0.9,
                  .beta2 = 0.95,
                  .eps = 1e-8,
                  .weight_decay = 0.1,
                  .clip = 1,
                  .warmup = 20,
                  .cosine = 1},
        .steps = 200,
        .seed = 1,
        .micro_batches = 8,
        .log_every = 10,
        .eval_batches = 16,
        .run = "gpt",
        .resume_step = CKD_LATEST,
        .text = text && *text ? text : NULL,
    };
    const struct argp argp = {
        .options = option_table,
        .parser = parse_option,
        .doc =
            "Trains a byte-level GPT on the CPU and saves its state to a ckptdelta store. The same options give the "
            "same bits, with any number of threads, interrupted and resumed or not.",
    };
    argp_parse(&argp, argc, argv, ARGP_NO_ARGS, NULL, out);
}
