#include <math.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "bench/quality/quality.h"
#include "bench/support/support.h"

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

quality_state quality_run_chain(quality_result *r, const quality_coder *coder, const char *dir,
                                const quality_state *states, int count) {
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
        quality_free(&before);
        before = now;
    }
    return before;
}

void quality_measure_coder(quality_result *r, const quality_coder *coder, const quality_series *series,
                           const quality_state *states, int count) {
    char dir[QUALITY_PATH];
    snprintf(dir, sizeof(dir), "%.400s/coder", series->work);
    bench_remove_tree(dir);
    if (mkdir(dir, 0777) != 0) {
        bench_die(dir, "cannot be created");
    }
    quality_state last = quality_run_chain(r, coder, dir, states, count);
    bench_remove_tree(dir);
    r->losses = quality_resume(series, coder->name, &last, 0);
    quality_free(&last);
}
