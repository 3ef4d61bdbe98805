/*
 * bench_quality: what a coder's checkpoints are worth, judged at the steady state of a chain and by resuming from its end.
 *
 *   bench_quality [--quick | --full] [--seeds N] [--width N] [--json FILE] ...      (--help says the rest)
 *
 * For each model and seed it trains the example GPT (kept in bench/series/, resumed after an interruption), codes a chain of its states
 * with every coder in closed loop, through files, puts the last reconstructed state into a store, trains on from it on the same batches
 * as the exact resume, and compares. Exact resumes on other batches give the run-to-run noise.
 */
#include <argp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "bench/quality.h"
#include "bench/support.h"

enum {
    O_QUICK = 0x100,
    O_FULL,
    O_SEEDS,
    O_WIDTH,
    O_BETA2,
    O_START,
    O_EVERY,
    O_DELTAS,
    O_RESUMED,
    O_ORDERS,
    O_THREADS,
    O_JSON,
    O_SVG,
    O_ONLY
};

static const struct argp_option option_table[] = {
    {"quick", O_QUICK, 0, 0, "one seed, 128 wide, beta2 .95: at most 10 minutes on two cores", 1},
    {"full", O_FULL, 0, 0, "three seeds, 128 and 256 wide, beta2 .95 and .999: at most 2 hours", 1},
    {"seeds", O_SEEDS, "N", 0, "models trained from seeds 1 ... N (3)", 1},
    {"width", O_WIDTH, "N", 0, "of the model (128)", 1},
    {"beta2", O_BETA2, "X", 0, "of AdamW (0.95)", 1},
    {"start", O_START, "N", 0, "step of the chain's first state, a multiple of --every (500)", 2},
    {"every", O_EVERY, "N", 0, "steps between states (50)", 2},
    {"deltas", O_DELTAS, "N", 0, "states after the first (10)", 2},
    {"resumed", O_RESUMED, "N", 0, "steps trained on from the last state (50)", 2},
    {"orders", O_ORDERS, "N", 0, "exact resumes on other batches (3)", 2},
    {"only", O_ONLY, "NAMES", 0, "coders to measure beside exact, separated by commas (all)", 2},
    {"threads", O_THREADS, "N", 0, "of the trainer (one per core)", 3},
    {"json", O_JSON, "FILE", 0, "where results go (bench/results/bench_quality-NAME.json)", 3},
    {"svg", O_SVG, "FILE", 0, "where the picture goes (beside the JSON)", 3},
    {0},
};

static int whole(const struct argp_state *state, const char *text, long least, long most) {
    char *end = NULL;
    long value = strtol(text, &end, 10);
    if (end == text || *end || value < least || value > most) {
        argp_error(state, "%s is not a whole number from %ld to %ld", text, least, most);
    }
    return (int)value;
}

static error_t parse_chain(int key, char *text, struct argp_state *state) {
    quality_options *o = state->input;
    switch (key) {
    case O_START:
        o->start = whole(state, text, 1, 1000000);
        break;
    case O_EVERY:
        o->every = whole(state, text, 1, 1000000);
        break;
    case O_DELTAS:
        o->deltas = whole(state, text, 2, QUALITY_MAX_DELTAS);
        break;
    case O_RESUMED:
        o->resumed = whole(state, text, 1, 1000000);
        break;
    case O_ORDERS:
        o->orders = whole(state, text, 1, QUALITY_MAX_ORDERS);
        break;
    case O_ONLY:
        o->only = text;
        break;
    case ARGP_KEY_END:
        if (o->start % o->every != 0) {
            argp_error(state, "--start is not a multiple of --every");
        }
        break;
    default:
        return ARGP_ERR_UNKNOWN;
    }
    return 0;
}

static error_t parse(int key, char *text, struct argp_state *state) {
    quality_options *o = state->input;
    switch (key) {
    case O_QUICK:
        o->seeds = 1;
        break;
    case O_FULL:
        o->full = 1;
        break;
    case O_SEEDS:
        o->seeds = whole(state, text, 1, QUALITY_MAX_SEEDS);
        break;
    case O_WIDTH:
        o->width = whole(state, text, 4, 4096);
        break;
    case O_BETA2:
        o->beta2 = strtod(text, NULL);
        if (!(o->beta2 > 0 && o->beta2 < 1)) {
            argp_error(state, "%s is not a number between 0 and 1", text);
        }
        break;
    case O_THREADS:
        o->threads = whole(state, text, 1, 4096);
        break;
    case O_JSON:
        o->json = text;
        break;
    case O_SVG:
        o->svg = text;
        break;
    default:
        return parse_chain(key, text, state);
    }
    return 0;
}

/* ---- one seed ---- */

static int wanted(const quality_coder *coder, const quality_options *o) {
    size_t length = strlen(coder->name);
    for (const char *at = o->only; at; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL) {
        if (strncmp(at, coder->name, length) == 0 && (at[length] == ',' || !at[length])) {
            return 1;
        }
    }
    return !o->only || coder->bit_exact;
}

size_t quality_next(const quality_options *o, size_t from) {
    while (from < quality_coder_count && !wanted(&quality_coders[from], o)) {
        from++;
    }
    return from;
}

static void measure_coder(quality_result *r, const quality_coder *coder, const quality_series *series,
                          const quality_state *states) {
    char dir[QUALITY_PATH];
    snprintf(dir, sizeof(dir), "%.400s/coder", series->work);
    bench_remove_tree(dir);
    if (mkdir(dir, 0777) != 0) {
        quality_die(dir, "cannot be created");
    }
    quality_state last = quality_run_chain(r, coder, dir, states, series->options->deltas + 1);
    bench_remove_tree(dir);
    r->losses = quality_resume(series, coder->name, &last, 0);
    quality_free(&last);
}

static void measure_seed(quality_group *g, const quality_options *o, int seed) {
    quality_series series;
    quality_state states[QUALITY_MAX_DELTAS + 1];
    quality_make_series(&series, o, g->width, g->beta2, seed + 1);
    for (int i = 0; i <= o->deltas; i++) {
        states[i] = quality_load(NULL, series.store, "gpt", (uint64_t)(o->start + i * o->every));
    }
    g->parameters = states[0].parameters;
    for (size_t c = quality_next(o, 0); c < quality_coder_count; c = quality_next(o, c + 1)) {
        fprintf(stderr, "width %d, beta2 %g, seed %d: %s\n", g->width, g->beta2, seed + 1,
                quality_coders[c].name);
        measure_coder(&g->results[c][seed], &quality_coders[c], &series, states);
    }
    for (int i = 0; i < o->orders; i++) {
        fprintf(stderr, "width %d, beta2 %g, seed %d: other batches %d\n", g->width, g->beta2, seed + 1,
                i + 1);
        g->orders[i][seed] = quality_resume(&series, "order", &states[o->deltas], 1000 * (seed + 1) + i);
        if (g->orders[i][seed].training == g->results[0][seed].losses.training) {
            quality_die("noise", "other batches gave the same losses");
        }
    }
    for (int i = 0; i <= o->deltas; i++) {
        quality_free(&states[i]);
    }
    bench_remove_tree(series.work);
}

/* ---- all of it ---- */

static void measure_group(quality_group *g, const quality_options *o, int width, double beta2) {
    *g = (quality_group){.width = width, .beta2 = beta2, .seeds = o->seeds};
    for (int seed = 0; seed < o->seeds; seed++) {
        measure_seed(g, o, seed);
    }
    quality_print(g, o);
}

/* The picture lies beside the JSON, unless told otherwise. */
static void name_outputs(quality_options *o, char *json, char *svg, size_t room) {
    if (o->full) {
        snprintf(json, room, "bench/results/bench_quality-full.json");
    } else {
        snprintf(json, room, "bench/results/bench_quality-w%d-b%g.json", o->width, o->beta2);
    }
    o->json = o->json ? o->json : json;
    const char *slash = strrchr(o->json, '/'), *dot = strrchr(slash ? slash : o->json, '.');
    size_t stem = dot ? (size_t)(dot - o->json) : strlen(o->json);
    if (stem + sizeof(".svg") > room) {
        quality_die(o->json, "too long a name");
    }
    memcpy(svg, o->json, stem);
    memcpy(svg + stem, ".svg", sizeof(".svg"));
    o->svg = o->svg ? o->svg : svg;
}

int main(int argc, char **argv) {
    quality_options o = {.seeds = 3,
                         .start = 500,
                         .every = 50,
                         .deltas = 10,
                         .resumed = 50,
                         .orders = 3,
                         .width = 128,
                         .beta2 = 0.95};
    const struct argp argp = {.options = option_table,
                              .parser = parse,
                              .doc = "Sizes of lossy chains, and the loss after resuming from them."};
    argp_parse(&argp, argc, argv, ARGP_NO_ARGS, NULL, &o);
    char json[QUALITY_PATH], svg[QUALITY_PATH];
    name_outputs(&o, json, svg, sizeof(svg));
    if (system("xz --version >/dev/null 2>&1") != 0) {
        quality_die("xz", "the command is missing; install the package xz-utils");
    }
    static quality_group groups[QUALITY_MAX_GROUPS];
    static const struct {
        int width;
        double beta2;
    } full[] = {{128, 0.95}, {128, 0.999}, {256, 0.95}, {256, 0.999}};
    int count = o.full ? (int)(sizeof(full) / sizeof(full[0])) : 1;
    printf("%s\n", bench_machine());
    for (int i = 0; i < count; i++) {
        measure_group(&groups[i], &o, o.full ? full[i].width : o.width, o.full ? full[i].beta2 : o.beta2);
        quality_write_json(groups, i + 1, &o); /* what is there already, should it be interrupted */
        quality_write_svg(groups, i + 1, &o);
    }
    return 0;
}
