#include <math.h>

#include "bench/lossy/quality.h"
#include "bench/support/support.h"

quality_figure quality_figure_of(const double *values, int count) {
    double sum = 0, squares = 0;
    for (int i = 0; i < count; i++) {
        sum += values[i];
    }
    for (int i = 0; i < count; i++) {
        squares += (values[i] - sum / count) * (values[i] - sum / count);
    }
    return (quality_figure){sum / count, count > 1 ? sqrt(squares / (count - 1)) : 0};
}

quality_row quality_summary(const quality_group *g, int coder, int deltas) {
    enum { FIGURES = 10 };
    double values[FIGURES][QUALITY_MAX_SEEDS];
    quality_figure f[FIGURES];
    for (int seed = 0; seed < g->seeds; seed++) {
        const quality_result *r = &g->results[coder][seed];
        const quality_losses *exact = &g->results[0][seed].losses; /* the first row of the coders' table */
        values[0][seed] = quality_figure_of(r->bits, deltas).mean;
        values[1][seed] = quality_figure_of(r->bits + deltas / 2, deltas - deltas / 2).mean;
        values[2][seed] = r->first;
        values[3][seed] = r->losses.at_load - exact->at_load;
        values[4][seed] = r->losses.training - exact->training;
        values[5][seed] = r->losses.after - exact->after;
        values[6][seed] = r->moved;
        values[7][seed] = r->kept;
        values[9][seed] = r->lag;
        values[8][seed] = (r->losses.after - exact->after) / g->fall[seed];
    }
    for (int i = 0; i < FIGURES; i++) {
        f[i] = quality_figure_of(values[i], g->seeds);
    }
    return (quality_row){f[0], f[1], f[2], f[3], f[4], f[5], f[6], f[7], f[8], f[9]};
}

/* The series' own batches are one of the orders. */
quality_losses quality_noise(const quality_group *g, int orders) {
    double training = 0, after = 0;
    for (int seed = 0; seed < g->seeds; seed++) {
        double values[2][QUALITY_MAX_ORDERS + 1] = {{g->results[0][seed].losses.training},
                                                    {g->results[0][seed].losses.after}};
        for (int i = 0; i < orders; i++) {
            values[0][i + 1] = g->orders[i][seed].training;
            values[1][i + 1] = g->orders[i][seed].after;
        }
        training += pow(quality_figure_of(values[0], orders + 1).spread, 2);
        after += pow(quality_figure_of(values[1], orders + 1).spread, 2);
    }
    return (quality_losses){NAN, sqrt(training / g->seeds), sqrt(after / g->seeds)};
}

/* ---- the table ---- */

static void print_gap(quality_figure f, int seeds) {
    printf(" %+8.4f", f.mean);
    if (seeds > 1) {
        printf(" (%.4f)", f.spread);
    } else {
        printf("         ");
    }
}

static void print_row(const quality_coder *coder, const quality_row *r, int seeds) {
    if (coder->unsized) {
        printf("%-12s %7s %7s  %7s %7s ", coder->name, "-", "-", "-", "-");
    } else {
        printf("%-12s %7.3f %7.3f  %6.1fx %6.1fx ", coder->name, r->bits.mean, r->late_bits.mean,
               96 / r->bits.mean, 96 / r->late_bits.mean);
    }
    printf(" %5.1f%% %5.1f%% ", 100 * r->moved.mean, 100 * r->kept.mean);
    print_gap(r->at_load, seeds);
    print_gap(r->training, seeds);
    print_gap(r->after, seeds);
    printf("  %5.1f%%  %+7.2f", 100 * r->lag.mean, r->steps.mean);
    if (seeds > 1) {
        printf(" (%.2f)", r->steps.spread);
    }
    printf("\n");
}

static void print_noise(const quality_group *g, const quality_options *o) {
    quality_losses noise = quality_noise(g, o->orders);
    printf(
        "noise: %d other batch order%s of the exact resume spread by %.4f in training and %.4f in validation loss\n",
        o->orders, o->orders == 1 ? "" : "s", noise.training, noise.after);
}

void quality_print(const quality_group *g, const quality_options *o) {
    double exact[4] = {0};
    for (int seed = 0; seed < g->seeds; seed++) {
        const quality_losses *l = &g->results[0][seed].losses;
        exact[0] += l->at_load / g->seeds;
        exact[1] += l->training / g->seeds;
        exact[2] += l->after / g->seeds;
        exact[3] += g->fall[seed] / g->seeds;
    }
    printf(
        "\nwidth %d (%zu parameters), beta2 %g, %d seed%s; steps %d ... %d by %d, %d deltas, %d steps resumed\n",
        g->width, g->parameters, g->beta2, g->seeds, g->seeds > 1 ? "s" : "", o->start,
        (int)quality_last_step(o), o->every, o->deltas, o->resumed);
    printf("%-12s %15s  %15s  %13s   loss minus the exact resume's: mean%s\n", "", "bits/parameter",
           "of fp32 W+m+v", "last delta", g->seeds > 1 ? " (spread over seeds)" : "");
    printf("%-12s %7s %7s  %7s %7s  %6s %6s  %17s %17s %17s  %s\n", "coder", "mean", "late", "mean", "late",
           "W moved", "m kept", "val. at load", "training", "val. after", "  lag  steps lost");
    for (size_t c = quality_next(o, 0); c < quality_coder_count; c = quality_next(o, c + 1)) {
        quality_row row = quality_summary(g, (int)c, o->deltas);
        print_row(&quality_coders[c], &row, g->seeds);
    }
    printf(
        "exact resume: validation %.4f at load, training %.4f, validation %.4f after, falling by %.5f in a step\n",
        exact[0], exact[1], exact[2], exact[3]);
    if (o->orders) {
        print_noise(g, o);
    }
    fflush(stdout);
}

/* ---- JSON ---- */

static void json_losses(FILE *f, const quality_losses *l) {
    if (!isnan(l->at_load)) {
        fprintf(f, "\"validation_at_load\": %.6f, ", l->at_load);
    }
    fprintf(f, "\"training\": %.6f, \"validation_after\": %.6f", l->training, l->after);
}

static void json_seed(FILE *f, const quality_result *r, const quality_coder *coder, int seed, int deltas,
                      int last) {
    fprintf(f, "        {\"seed\": %d, ", seed + 1);
    if (!coder->unsized) {
        fprintf(f, "\"first_state_bits\": %.4f, \"bits\": [", r->first);
        for (int i = 0; i < deltas; i++) {
            fprintf(f, "%s%.4f", i ? ", " : "", r->bits[i]);
        }
        fprintf(f, "], ");
    }
    fprintf(f, "\"weights_moved\": %.4f, \"exp_avg_kept\": %.4f, ", r->moved, r->kept);
    json_losses(f, &r->losses);
    fprintf(f, "}%s\n", last ? "" : ",");
}

static void json_coder(FILE *f, const quality_group *g, int c, const quality_options *o, int last) {
    const quality_coder *coder = &quality_coders[c];
    quality_row r = quality_summary(g, c, o->deltas);
    fprintf(f, "      {\"coder\": \"%s\", \"what\": \"%s\",\n       ", coder->name, coder->what);
    if (o->mode == QUALITY_CURVES && coder->curve) {
        fprintf(f, "\"curve\": \"%s\", \"knob\": %g, ", coder->curve, coder->knob);
    }
    if (!coder->unsized) {
        fprintf(f, "\"bits\": %.4f, \"bits_late\": %.4f, \"ratio\": %.3f, \"ratio_late\": %.3f,\n       ",
                r.bits.mean, r.late_bits.mean, 96 / r.bits.mean, 96 / r.late_bits.mean);
    }
    fprintf(
        f,
        "\"steps_lost\": %.3f, \"steps_lost_spread\": %.3f, \"lag\": %.4f, \"gap_at_load\": %.5f, \"gap_training\": %.5f, "
        "\"gap_after\": %.6f,\n       \"gap_at_load_spread\": %.5f, \"gap_training_spread\": %.5f, "
        "\"gap_after_spread\": %.6f,\n       \"seeds\": [\n",
        r.steps.mean, r.steps.spread, r.lag.mean, r.at_load.mean, r.training.mean, r.after.mean,
        r.at_load.spread, r.training.spread, r.after.spread);
    for (int seed = 0; seed < g->seeds; seed++) {
        json_seed(f, &g->results[c][seed], coder, seed, o->deltas, seed + 1 == g->seeds);
    }
    fprintf(f, "       ]}%s\n", last ? "" : ",");
}

static void json_group(FILE *f, const quality_group *g, const quality_options *o, int last) {
    quality_losses noise = quality_noise(g, o->orders);
    fprintf(
        f,
        "    {\"width\": %d, \"parameters\": %zu, \"beta2\": %g,\n     \"noise_training\": %.5f, \"noise_validation\": %.4f,\n",
        g->width, g->parameters, g->beta2, noise.training, noise.after);
    fprintf(f, "     \"fall_of_validation_loss_in_a_step\": [");
    for (int seed = 0; seed < g->seeds; seed++) {
        fprintf(f, "%s%.6f", seed ? ", " : "", g->fall[seed]);
    }
    fprintf(f, "],\n     \"other_batch_orders\": [\n");
    for (int i = 0; i < o->orders * g->seeds; i++) {
        fprintf(f, "      {\"seed\": %d, ", i % g->seeds + 1);
        json_losses(f, &g->orders[i / g->seeds][i % g->seeds]);
        fprintf(f, "}%s\n", i + 1 == o->orders * g->seeds ? "" : ",");
    }
    fprintf(f, "     ],\n     \"coders\": [\n");
    for (size_t c = quality_next(o, 0); c < quality_coder_count; c = quality_next(o, c + 1)) {
        json_coder(f, g, (int)c, o, quality_next(o, c + 1) == quality_coder_count);
    }
    fprintf(f, "     ]}%s\n", last ? "" : ",");
}

void quality_write_json(const quality_group *groups, int count, const quality_options *o) {
    FILE *f = bench_open_output(o->json);
    fprintf(f, "{\n  \"benchmark\": \"quality\",\n  \"machine\": \"%s\",\n", bench_machine());
    fprintf(
        f,
        "  \"start\": %d, \"every\": %d, \"deltas\": %d, \"resumed_steps\": %d, \"eval_batches\": %d, \"seeds\": %d,\n"
        "  \"models\": [\n",
        o->start, o->every, o->deltas, o->resumed, o->eval_batches, o->seeds);
    for (int i = 0; i < count; i++) {
        json_group(f, &groups[i], o, i + 1 == count);
    }
    fprintf(f, "  ]\n}\n");
    bench_close_output(f, o->json);
}
