#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "bench/lossy/quality.h"
#include "bench/support/support.h"

#define MOST_SCALED 4.0

/* Encodes in a process of its own, so that the decoder gets nothing but files. */
static void encode_apart(const quality_coder *coder, const char *dir, const quality_state *now,
                         const quality_state *before) {
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        coder->encode(coder, dir, now, before);
        _exit(0);
    }
    int status = 0;
    if (child < 0 || waitpid(child, &status, 0) < 0 || status != 0) {
        bench_die(coder->name, "encoding failed");
    }
}

/* The blank state was NaN, so a value that the decoder did not set is still NaN. */
static void check_filled(const quality_coder *coder, const quality_state *s) {
    for (size_t i = 0; i < s->count; i++) {
        for (int part = 0; part < QUALITY_PARTS; part++) {
            for (size_t k = 0; k < s->tensors[i].count; k++) {
                if (isnan(s->tensors[i].parts[part][k])) {
                    bench_die(coder->name, "the decoder left values out");
                }
            }
        }
    }
}

static void note_shares(quality_result *r, const quality_state *now, const quality_state *before) {
    double moved = 0, kept = 0;
    for (size_t i = 0; i < now->count; i++) {
        const quality_tensor *t = &now->tensors[i];
        for (size_t k = 0; k < t->count; k++) {
            moved += t->parts[0][k] != before->tensors[i].parts[0][k];
            kept += t->parts[1][k] != 0;
        }
    }
    r->moved = moved / (double)now->parameters;
    r->kept = kept / (double)now->parameters;
}

quality_state quality_run_chain(quality_result *r, quality_state *parent, const quality_coder *coder,
                                const char *dir, const quality_state *states, int count) {
    quality_state before = {0};
    *r = (quality_result){0};
    for (int i = 0; i < count; i++) {
        encode_apart(coder, dir, &states[i], i ? &before : NULL);
        quality_state now = quality_blank(&states[i]);
        double bits = 8.0 * (double)coder->decode(coder, dir, &now, i ? &before : NULL);
        check_filled(coder, &now);
        if ((coder->bit_exact || (i == 0 && coder->library.fidelity <= CKD_EXACT)) &&
            !quality_same(&now, &states[i])) {
            bench_die(coder->name, "a state that should be exact is not");
        }
        *(i ? &r->bits[i - 1] : &r->first) = bits / (double)now.parameters;
        if (i) {
            note_shares(r, &now, &before);
        }
        if (parent && i == count - 1) {
            *parent = before;
        } else {
            quality_free(&before);
        }
        before = now;
    }
    return before;
}

void quality_restore(quality_state *s, const quality_state *exact, unsigned lossy) {
    for (size_t i = 0; lossy && i < s->count; i++) {
        for (int part = 0; part < QUALITY_PARTS; part++) {
            if (!(lossy >> part & 1)) {
                memcpy(s->tensors[i].parts[part], exact->tensors[i].parts[part],
                       s->tensors[i].count * sizeof(float));
            }
        }
    }
}

static double product(const float *a, const float *b, size_t count) {
    double sum = 0;
    for (size_t i = 0; i < count; i++) {
        sum += (double)a[i] * (double)b[i];
    }
    return sum;
}

static void mix_tensor(float *w, const float *exact, const float *parent, size_t count, quality_mix mix) {
    float *all = bench_allocated(malloc(2 * count * sizeof(float) + 1)), *kept = all + count;
    for (size_t i = 0; i < count; i++) {
        all[i] = exact[i] - parent[i];
        kept[i] = w[i] - parent[i];
    }
    double energy = product(all, all, count), along = product(all, kept, count);
    double lag = energy > 0 ? 1 - along / energy : 0, scale = along > 0 ? energy / along : 1;
    scale = scale < MOST_SCALED ? scale : MOST_SCALED;
    for (size_t i = 0; i < count; i++) {
        w[i] = mix == QUALITY_LAG    ? exact[i] - (float)lag * all[i]
               : mix == QUALITY_REST ? w[i] + (float)lag * all[i]
                                     : parent[i] + (float)scale * kept[i];
    }
    free(all);
}

double quality_lag(const quality_state *s, const quality_state *exact, const quality_state *parent) {
    double energy = 0, along = 0;
    for (size_t i = 0; i < s->count; i++) {
        const float *w = s->tensors[i].parts[0], *x = exact->tensors[i].parts[0],
                    *p = parent->tensors[i].parts[0];
        for (size_t k = 0; k < s->tensors[i].count; k++) {
            double all = (double)x[k] - (double)p[k];
            energy += all * all;
            along += all * ((double)w[k] - (double)p[k]);
        }
    }
    return energy > 0 ? 1 - along / energy : 0;
}

void quality_mix_weights(quality_state *s, const quality_state *exact, const quality_state *parent,
                         quality_mix mix) {
    for (size_t i = 0; mix != QUALITY_DECODED && i < s->count; i++) {
        mix_tensor(s->tensors[i].parts[0], exact->tensors[i].parts[0], parent->tensors[i].parts[0],
                   s->tensors[i].count, mix);
    }
}

void quality_measure_coder(quality_result *r, const quality_coder *coder, const quality_series *series,
                           const quality_state *states, int count) {
    char dir[QUALITY_PATH];
    snprintf(dir, sizeof(dir), "%.400s/coder", series->work);
    bench_remove_tree(dir);
    if (mkdir(dir, 0777) != 0) {
        bench_die(dir, "cannot be created");
    }
    quality_state parent, last = quality_run_chain(r, &parent, coder, dir, states, count);
    r->lag = quality_lag(&last, &states[count - 1], &parent);
    quality_mix_weights(&last, &states[count - 1], &parent, coder->mix);
    quality_restore(&last, &states[count - 1], coder->lossy);
    quality_free(&parent);
    bench_remove_tree(dir);
    r->losses = quality_resume(series, coder->name, &last, 0);
    quality_free(&last);
}
