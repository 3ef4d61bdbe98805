/*
 * Deltas over several saves: chains of every state, and of every 2nd, 4th and 8th, over the same steps. If training
 * moved the weights in independent directions, a delta over n saves would have steps that grow with its movement, and
 * the bits of a delta over one save. The difference between its bits and those of its parts is the cost of the
 * checkpoints in between.
 */
#include <stdlib.h>

#include "bench/lossy/quality.h"
#include "bench/support/support.h"

enum { STRIDES = 4 }; /* 1, 2, 4, 8 saves */

/* One stride of one coder, by seed. */
typedef struct merged_row {
    double bits[QUALITY_MAX_SEEDS], first[QUALITY_MAX_SEEDS];
    double one[QUALITY_MAX_SEEDS], parts[QUALITY_MAX_SEEDS], share[QUALITY_MAX_SEEDS];
    double training[QUALITY_MAX_SEEDS], after[QUALITY_MAX_SEEDS]; /* minus the exact resume's */
} merged_row;

static merged_row table[QUALITY_MAX_CODERS][STRIDES];

quality_merged quality_merge_bits(const double *bits, int stride, int span) {
    quality_merged m = {0, 0};
    for (int i = 0; i < span / stride; i++) {
        m.sum += bits[i];
    }
    m.one = m.sum / (span / stride);
    return m;
}

static int span_of(const quality_options *o) {
    return o->deltas / QUALITY_MAX_MERGED * QUALITY_MAX_MERGED;
}

static void measure_stride(merged_row *row, int seed, int stride, const quality_coder *coder,
                           const quality_series *series, const quality_state *states,
                           const quality_losses *exact) {
    quality_state some[QUALITY_MAX_DELTAS + 1];
    int span = span_of(series->options), count = 0;
    for (int i = 0; i <= span; i += stride) {
        some[count++] = states[i];
    }
    quality_result r;
    quality_measure_coder(&r, coder, series, some, count);
    quality_merged m = quality_merge_bits(r.bits, stride, span);
    row->first[seed] = r.first;
    row->one[seed] = m.one;
    row->bits[seed] = m.sum;
    row->training[seed] = r.losses.training - exact->training;
    row->after[seed] = r.losses.after - exact->after;
}

static void measure_seed(int seed, const quality_options *o) {
    quality_series series;
    quality_state states[QUALITY_MAX_DELTAS + 1];
    quality_make_series(&series, o, o->width, o->beta2, seed + 1);
    quality_load_chain(states, &series);
    quality_losses exact = quality_resume(&series, "exact", &states[span_of(o)], 0);
    for (size_t c = quality_next(o, 0); c < quality_coder_count; c = quality_next(o, c + 1)) {
        quality_coder coder = quality_with_load_cost(&quality_coders[c], o);
        for (int s = 0; s < STRIDES; s++) {
            fprintf(stderr, "seed %d: %s, deltas over %d saves\n", seed + 1, coder.name, 1 << s);
            merged_row *row = &table[c][s];
            measure_stride(row, seed, 1 << s, &coder, &series, states, &exact);
            row->parts[seed] = table[c][0].bits[seed] * (1 << s) / span_of(o);
            row->share[seed] = row->one[seed] / row->parts[seed];
        }
    }
    for (int i = 0; i <= o->deltas; i++) {
        quality_free(&states[i]);
    }
    bench_remove_tree(series.work);
}

/* ---- results ---- */

static void print(const quality_options *o) {
    printf(
        "\nwidth %d, beta2 %g, %d seed%s: deltas over 1, 2, 4 and 8 saves, steps %d ... %d; bits a parameter\n",
        o->width, o->beta2, o->seeds, o->seeds > 1 ? "s" : "", o->start, o->start + span_of(o) * o->every);
    printf("%-12s %5s  %9s %9s %8s  %17s %17s\n", "coder", "saves", "one delta", "its parts", "of them",
           "training gap", "validation gap");
    for (size_t c = quality_next(o, 0); c < quality_coder_count; c = quality_next(o, c + 1)) {
        for (int s = 0; s < STRIDES; s++) {
            const merged_row *row = &table[c][s];
            quality_figure training = quality_figure_of(row->training, o->seeds),
                           after = quality_figure_of(row->after, o->seeds);
            printf("%-12s %5d  %9.3f %9.3f %8.2f  %+8.4f (%.4f) %+8.4f (%.4f)\n", quality_coders[c].name,
                   1 << s, quality_figure_of(row->one, o->seeds).mean,
                   quality_figure_of(row->parts, o->seeds).mean, quality_figure_of(row->share, o->seeds).mean,
                   training.mean, training.spread, after.mean, after.spread);
        }
    }
    fflush(stdout);
}

static void write_row(FILE *f, const quality_coder *coder, int saves, const merged_row *row,
                      const quality_options *o, int last) {
    fprintf(f, "    {\"coder\": \"%s\", \"saves\": %d, \"seeds\": [\n", coder->name, saves);
    for (int seed = 0; seed < o->seeds; seed++) {
        fprintf(
            f,
            "      {\"seed\": %d, \"first_state_bits\": %.4f, \"bits_of_one\": %.4f, \"bits_of_its_parts\": %.4f, "
            "\"gap_training\": %.5f, \"gap_after\": %.4f}%s\n",
            seed + 1, row->first[seed], row->one[seed], row->parts[seed], row->training[seed],
            row->after[seed], seed + 1 == o->seeds ? "" : ",");
    }
    fprintf(f, "    ]}%s\n", last ? "" : ",");
}

static void write_json(const quality_options *o) {
    FILE *f = bench_open_output(o->json);
    fprintf(f, "{\n  \"benchmark\": \"quality, merged deltas\",\n  \"machine\": \"%s\",\n", bench_machine());
    fprintf(
        f,
        "  \"width\": %d, \"beta2\": %g, \"start\": %d, \"every\": %d, \"saves\": %d, \"load_cost\": %g,\n  \"rows\": [\n",
        o->width, o->beta2, o->start, o->every, span_of(o), o->load_cost);
    for (size_t c = quality_next(o, 0); c < quality_coder_count; c = quality_next(o, c + 1)) {
        for (int s = 0; s < STRIDES; s++) {
            write_row(f, &quality_coders[c], 1 << s, &table[c][s], o,
                      s + 1 == STRIDES && quality_next(o, c + 1) == quality_coder_count);
        }
    }
    fprintf(f, "  ]\n}\n");
    bench_close_output(f, o->json);
}

void quality_measure_merges(const quality_options *o) {
    for (int seed = 0; seed < o->seeds; seed++) {
        measure_seed(seed, o);
    }
    print(o);
    write_json(o);
}
