/*
 * bench_quality: the cost of lossy checkpoints, late in a chain and after resuming from its end.
 *
 *   bench_quality [--quick | --full | --curves | --resumes N | --merge | --drift] [--seeds N] [--width N] ...      (--help has the rest)
 *
 * For each model and seed it trains the example GPT (kept in bench/series/, continued after an interruption). It codes
 * a chain of its states with every coder in closed loop, through files. It saves the last reconstructed state, trains
 * on from it on the same batches as the exact resume, and compares. Exact resumes on other batches give the run-to-run
 * noise. A gap of validation losses over the fall of the exact run's in one step is the number of steps lost. --curves
 * does this with several steps of each coder; --resumes saves and resumes many times in a row; --merge codes every 2nd,
 * 4th and 8th state; --drift codes one long chain.
 */
#include <argp.h>
#include <stdlib.h>
#include <string.h>

#include "bench/lossy/quality.h"
#include "bench/support/support.h"

enum {
    O_QUICK = 0x100,
    O_FULL,
    O_CURVES,
    O_RESUMES,
    O_MERGE,
    O_DRIFT,
    O_LOAD_COST,
    O_SEEDS,
    O_WIDTH,
    O_BETA2,
    O_START,
    O_EVERY,
    O_DELTAS,
    O_RESUMED,
    O_EVAL_BATCHES,
    O_ORDERS,
    O_THREADS,
    O_JSON,
    O_SVG,
    O_ONLY
};

static const struct argp_option option_table[] = {
    {"quick", O_QUICK, 0, 0, "one seed, 128 wide, beta2 .95: at most 10 minutes on two cores", 1},
    {"full", O_FULL, 0, 0, "three seeds, 128 and 256 wide, beta2 .95 and .999: at most 2 hours", 1},
    {"curves", O_CURVES, 0, 0, "several steps of each coder: rate/gap curves (one seed)", 1},
    {"resumes", O_RESUMES, "N", 0, "N lossy resumes in a row, --every steps apart, against a run without", 1},
    {"merge", O_MERGE, 0, 0, "lossy deltas over 1, 2, 4 and 8 saves", 1},
    {"drift", O_DRIFT, 0, 0,
     "errors along one chain of 64 deltas, against those at depth 8 (saves 10 steps apart from step 300, unless later options change that)",
     1},
    {"seeds", O_SEEDS, "N", 0, "models trained from seeds 1 ... N (3)", 1},
    {"width", O_WIDTH, "N", 0, "of the model (128)", 1},
    {"beta2", O_BETA2, "X", 0, "of AdamW (0.95)", 1},
    {"start", O_START, "N", 0, "step of the chain's first state, a multiple of --every (500)", 2},
    {"every", O_EVERY, "N", 0, "steps between states (50)", 2},
    {"deltas", O_DELTAS, "N", 0, "states after the first (10)", 2},
    {"resumed", O_RESUMED, "N", 0, "steps trained on from the last state, a multiple of 5 (40)", 2},
    {"eval-batches", O_EVAL_BATCHES, "N", 0, "batches of 512 bytes of a validation loss (64)", 2},
    {"orders", O_ORDERS, "N", 0, "exact resumes on other batches (3)", 2},
    {"only", O_ONLY, "NAMES", 0, "coders to measure beside exact, separated by commas (all)", 2},
    {"load-cost", O_LOAD_COST, "X", 0,
     "bound on loads of the library's chains that have none of their own, in base loads (its default)", 2},
    {"threads", O_THREADS, "N", 0, "of the trainer (one per core)", 3},
    {"json", O_JSON, "FILE", 0, "where results go (bench/results/bench_quality-NAME.json)", 3},
    {"svg", O_SVG, "FILE", 0, "where the picture goes (beside the JSON)", 3},
    {0},
};

static int integer(const struct argp_state *state, const char *text, long least, long most) {
    char *end = NULL;
    long value = strtol(text, &end, 10);
    if (end == text || *end || value < least || value > most) {
        argp_error(state, "%s is not an integer from %ld to %ld", text, least, most);
    }
    return (int)value;
}

static error_t parse_chain(int key, char *text, struct argp_state *state) {
    quality_options *o = state->input;
    switch (key) {
    case O_START:
        o->start = integer(state, text, 1, 1000000);
        break;
    case O_EVERY:
        o->every = integer(state, text, 1, 1000000);
        break;
    case O_DELTAS:
        o->deltas = integer(state, text, 2, QUALITY_MAX_DELTAS);
        break;
    case O_RESUMED:
        o->resumed = integer(state, text, QUALITY_EVALS, 1000000);
        break;
    case O_EVAL_BATCHES:
        o->eval_batches = integer(state, text, 1, 4096);
        break;
    case O_ORDERS:
        o->orders = integer(state, text, 0, QUALITY_MAX_ORDERS);
        break;
    case O_ONLY:
        o->only = text;
        break;
    case O_LOAD_COST:
        o->load_cost = strtod(text, NULL);
        if (!(o->load_cost >= 1 && o->load_cost <= 1e6)) {
            argp_error(state, "%s is not a number from 1", text);
        }
        break;
    case ARGP_KEY_END:
        if (o->start % o->every != 0) {
            argp_error(state, "--start is not a multiple of --every");
        }
        if (o->resumed % QUALITY_EVALS != 0) {
            argp_error(state, "--resumed is not a multiple of %d", QUALITY_EVALS);
        }
        if (o->mode == QUALITY_RESUMES) {
            o->deltas = o->resumes; /* the series ends where the resumes do */
        }
        if (o->mode == QUALITY_MERGE && o->deltas < QUALITY_MAX_MERGED) {
            argp_error(state, "--merge needs at least %d --deltas", QUALITY_MAX_MERGED);
        }
        if (o->mode == QUALITY_DRIFT && o->deltas < QUALITY_MIN_DRIFT) {
            argp_error(state, "--drift needs at least %d --deltas", QUALITY_MIN_DRIFT);
        }
        if (o->full && o->mode != QUALITY_TABLE && o->mode != QUALITY_CURVES) {
            argp_error(state, "--full is for the table and the curves; give --width and --beta2");
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
    case O_CURVES:
        o->mode = QUALITY_CURVES;
        break;
    case O_MERGE:
        o->mode = QUALITY_MERGE;
        break;
    case O_DRIFT:
        o->mode = QUALITY_DRIFT;
        o->start = 300;
        o->every = 10;
        o->deltas = QUALITY_MAX_DELTAS;
        break;
    case O_RESUMES:
        o->mode = QUALITY_RESUMES;
        o->resumes = integer(state, text, 1, QUALITY_MAX_RESUMES);
        break;
    case O_SEEDS:
        o->seeds = integer(state, text, 1, QUALITY_MAX_SEEDS);
        break;
    case O_WIDTH:
        o->width = integer(state, text, 4, 4096);
        break;
    case O_BETA2:
        o->beta2 = strtod(text, NULL);
        if (!(o->beta2 > 0 && o->beta2 < 1)) {
            argp_error(state, "%s is not a number between 0 and 1", text);
        }
        break;
    case O_THREADS:
        o->threads = integer(state, text, 1, 4096);
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

static void measure_seed(quality_group *g, const quality_options *o, int seed) {
    quality_series series;
    quality_state states[QUALITY_MAX_DELTAS + 1];
    quality_make_series(&series, o, g->width, g->beta2, seed + 1);
    quality_load_chain(states, &series);
    g->parameters = states[0].parameters;
    g->fall[seed] = quality_fall(&series, quality_judged_step(o));
    for (size_t c = quality_next(o, 0); c < quality_coder_count; c = quality_next(o, c + 1)) {
        fprintf(stderr, "width %d, beta2 %g, seed %d: %s\n", g->width, g->beta2, seed + 1,
                quality_coders[c].name);
        quality_coder coder = quality_with_load_cost(&quality_coders[c], o);
        quality_measure_coder(&g->results[c][seed], &coder, &series, states, o->deltas + 1);
    }
    for (int i = 0; i < o->orders; i++) {
        fprintf(stderr, "width %d, beta2 %g, seed %d: other batches %d\n", g->width, g->beta2, seed + 1,
                i + 1);
        g->orders[i][seed] = quality_resume(&series, "order", &states[o->deltas], 1000 * (seed + 1) + i);
        if (g->orders[i][seed].training == g->results[0][seed].losses.training) {
            bench_die("noise", "other batches gave the same losses");
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

static void measure_groups(const quality_options *o) {
    static quality_group groups[QUALITY_MAX_GROUPS];
    static const struct {
        int width;
        double beta2;
    } full[] = {{128, 0.95}, {128, 0.999}, {256, 0.95}, {256, 0.999}};
    int count = o->full ? (int)(sizeof(full) / sizeof(full[0])) : 1;
    for (int i = 0; i < count; i++) {
        measure_group(&groups[i], o, o->full ? full[i].width : o->width, o->full ? full[i].beta2 : o->beta2);
        quality_write_json(groups, i + 1, o); /* after each group, in case of an interruption */
        quality_write_svg(groups, i + 1, o);
    }
}

/* The picture lies beside the JSON, unless an option names another place. */
static void name_outputs(quality_options *o, char *json, char *svg, size_t size) {
    static const char *const modes[] = {"", "-curves", "-resumes", "-merge", "-drift"};
    if (o->full) {
        snprintf(json, size, "bench/results/bench_quality%s-full.json", modes[o->mode]);
    } else {
        snprintf(json, size, "bench/results/bench_quality%s-w%d-b%g.json", modes[o->mode], o->width,
                 o->beta2);
    }
    o->json = o->json ? o->json : json;
    const char *slash = strrchr(o->json, '/'), *dot = strrchr(slash ? slash : o->json, '.');
    size_t stem = dot ? (size_t)(dot - o->json) : strlen(o->json);
    if (stem + sizeof(".svg") > size) {
        bench_die(o->json, "too long a name");
    }
    memcpy(svg, o->json, stem);
    memcpy(svg + stem, ".svg", sizeof(".svg"));
    o->svg = o->svg ? o->svg : svg;
}

int main(int argc, char **argv) {
    quality_options o = {.start = 500,
                         .every = 50,
                         .deltas = 10,
                         .resumed = 40,
                         .eval_batches = 64,
                         .orders = 3,
                         .width = 128,
                         .beta2 = 0.95};
    const struct argp argp = {.options = option_table,
                              .parser = parse,
                              .doc = "Sizes of lossy chains, and the loss after resuming from them."};
    argp_parse(&argp, argc, argv, ARGP_NO_ARGS, NULL, &o);
    o.seeds = o.seeds ? o.seeds : o.mode == QUALITY_CURVES ? 1 : 3;
    char json[QUALITY_PATH], svg[QUALITY_PATH];
    name_outputs(&o, json, svg, sizeof(svg));
    if (system("xz --version >/dev/null 2>&1") != 0) {
        bench_die("xz", "the command is missing; install the package xz-utils");
    }
    printf("%s\n", bench_machine());
    if (o.mode == QUALITY_RESUMES) {
        quality_measure_resumes(&o);
    } else if (o.mode == QUALITY_MERGE) {
        quality_measure_merges(&o);
    } else if (o.mode == QUALITY_DRIFT) {
        quality_measure_drift(&o);
    } else {
        measure_groups(&o);
    }
    return 0;
}
