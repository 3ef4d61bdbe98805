/*
 * What sessions must show:
 *
 *   copy      the stall is at most 1.2 times a memcpy of the state in the same place of the same loop, by one thread and by two
 *   lazy      ckd_session_step takes at most 1 ms, and the fence after it a tenth of a memcpy by one thread
 *   overhead  with --overhead P: at most 1.43 P (5 % at 3.5 %), for the whole loop and from the fourth save on the slower disk on
 *   disk      a save stalls training at most 1.2 times as long on the slower disk, or 1 ms longer
 */
#include <math.h>

#include "bench/session/stall.h"

void stall_note_halves(outcome *of, const options *o) {
    double early[SAVES_MAX], late[SAVES_MAX], fences[SAVES_MAX];
    int early_count = 0, late_count = 0, fence_count = 0;
    of->late_from = of->steps;
    for (int i = 0; i < of->saves; i++) {
        int at = of->places[i];
        if (at < 0 || at >= of->steps) {
            continue;
        }
        of->call_ms = fmax(of->call_ms, of->calls[at]);
        if (at + 1 < of->steps) { /* the fence of a save is in the next iteration */
            fences[fence_count++] = of->fences[at + 1];
        }
        if (at < o->steps / 2) {
            early[early_count++] = of->stalls[i];
        } else {
            late[late_count++] = of->stalls[i];
            of->late_from = late_count == 4 ? at : of->late_from;
        }
    }
    of->fence_ms = stall_median(fences, fence_count);
    of->early_stall_ms = stall_median(early, early_count);
    of->late_stall_ms = stall_median(late, late_count);
}

static double sum_from(const outcome *of, int from) {
    double sum = 0;
    for (int i = from; i < of->steps; i++) {
        sum += of->wholes[i];
    }
    return sum;
}

typedef struct checks {
    FILE *json; /* NULL: none */
    int count;
} checks;

static void check(checks *all, const char *what, const char *how, double figure, double most,
                  const char *unit) {
    const char *verdict = figure != figure ? "not measured" : figure <= most ? "yes" : "NO";
    printf("%-52s %-14s %10.3f %-3s at most %.3f: %s\n", what, how, figure, unit, most, verdict);
    FILE *json = all->json;
    if (json) {
        fprintf(json, "%s\n  {\"what\": \"%s\", \"mode\": \"%s\", \"figure\": ", all->count++ ? "," : "",
                what, how);
        fprintf(json, figure == figure ? "%.4g" : "null", figure);
        fprintf(json, ", \"most\": %.4g, \"unit\": \"%s\", \"holds\": %s}", most, unit,
                figure <= most ? "true" : "false");
    }
}

#define MEDIAN(values, how, expression)          \
    do {                                         \
        double all[REPEATS_MAX];                 \
        int known = 0;                           \
        for (int i = 0; i < o->repeats; i++) {   \
            const outcome *of = &r->all[how][i]; \
            double x = (expression);             \
            if (x == x) {                        \
                all[known++] = x;                \
            }                                    \
        }                                        \
        (values) = stall_median(all, known);     \
    } while (0)

static void check_mode(const results *r, const options *o, mode how, checks *to) {
    const char *name = stall_mode_names[how];
    double one, two, stall, call, fence, overhead, late, early_stall, late_stall;
    MEDIAN(one, MEMCPY, of->stall_ms);
    MEDIAN(two, MEMCPY_TWO, of->stall_ms);
    MEDIAN(stall, how, of->stall_ms);
    MEDIAN(call, how, of->call_ms);
    MEDIAN(fence, how, of->fence_ms);
    MEDIAN(overhead, how, of->overhead);
    MEDIAN(early_stall, how, of->early_stall_ms);
    MEDIAN(late_stall, how, of->late_stall_ms);
    MEDIAN(late, how,
           of->late_from < of->steps - 3
               ? 100 * (sum_from(of, of->late_from) / sum_from(&r->all[NONE][i], of->late_from) - 1)
               : NAN);
    if (how == COPY) {
        check(to, "stall over a memcpy", name, stall / one, 1.2, "x");
        check(to, "stall over a memcpy by two threads", name, stall / two, 1.2, "x");
    } else {
        check(to, "longest ckd_session_step", name, call, 1, "ms");
        check(to, "fence over a memcpy", name, fence / one, 0.1, "x");
    }
    if (!o->every) {
        double most = 100 * o->overhead / 0.7;
        check(to, "overhead", name, overhead, most, "%");
        if (o->slower > 1) {
            check(to, "overhead from the 4th save on the slower disk on", name, late, most, "%");
        }
    }
    if (o->slower > 1) {
        check(to, "stall on the slower disk, beyond that on the other", name, late_stall - early_stall,
              fmax(1, 0.2 * early_stall), "ms");
    }
}

void stall_check(results *r, const options *o, FILE *json) {
    checks all = {json, 0};
    if (json) {
        fputs(", \"must_show\": [", json);
    }
    puts("");
    for (mode how = COPY; how < MODES; how++) {
        check_mode(r, o, how, &all);
    }
    if (json) {
        fputs("]", json);
    }
}
