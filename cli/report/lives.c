/*
 * The lives of runs that `ckptdelta run` supervised: attempts from its journal, saves from the store, and what they come
 * to. A journal may be long, so little is kept of an attempt, and only of the last ATTEMPTS_MAX.
 */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/report/report.h"
#include "supervise/supervise.h"

#define ATTEMPTS_MAX 16384
#define HOSTS_SHOWN  120 /* characters of an attempt's hosts */
#define NONE         CKD_LATEST

_Static_assert(SUPERVISE_NO_STEP == CKD_LATEST, "steps of the journal are taken as they are");

/* ---- attempts ---- */

static life_end end_of(const attempt *a) {
    if (a->end == ATTEMPT_RUNNING) {
        return LIFE_RUNNING;
    }
    return a->end == ATTEMPT_LOST                     ? LIFE_LOST
           : a->hung                                  ? LIFE_HUNG
           : a->unhealthy                             ? LIFE_UNHEALTHY
           : a->stopped_by                            ? LIFE_STOPPED
           : a->end == ATTEMPT_EXITED && a->code == 0 ? LIFE_DONE
                                                      : LIFE_FAILED;
}

const char *report_life_end_name(life_end end) {
    static const char *const names[LIFE_ENDS] = {"running", "done",      "stopped", "failed",
                                                 "hung",    "unhealthy", "lost"};
    return names[end];
}

static void free_attempt(life_attempt *a) {
    free(a->run);
    free(a->reason);
    free(a->hosts);
    free(a->verdict);
}

static void forget_first_half(report_lives *l) {
    size_t half = l->count / 2;
    for (size_t i = 0; i < half; i++) {
        free_attempt(&l->attempts[i]);
    }
    l->count -= half;
    l->left_out += half;
    memmove(l->attempts, l->attempts + half, l->count * sizeof(*l->attempts));
}

static bool make_room(report_lives *l) {
    if (l->count == 2 * ATTEMPTS_MAX) {
        forget_first_half(l);
    }
    if ((l->count & (l->count - 1)) == 0) {
        life_attempt *grown = realloc(l->attempts, (l->count ? 2 * l->count : 1) * sizeof(*grown));
        l->attempts = grown ? grown : l->attempts;
        return grown != NULL;
    }
    return true;
}

/* "node03 node04 ..." */
static char *hosts_of(const attempt *a) {
    char *text;
    const char *hosts = a->hosts ? a->hosts : "";
    int length = asprintf(&text, "%.*s%s", HOSTS_SHOWN, hosts, strlen(hosts) > HOSTS_SHOWN ? " ..." : "");
    return length < 0 ? NULL : text;
}

/* Without any time there is no place for it. */
static ckd_status take(void *context, const attempt *a, ckd_error *err) {
    report_lives *l = context;
    uint64_t begin_ns = a->start_ns ? a->start_ns : a->end_ns;
    if (!begin_ns) {
        return CKD_OK;
    }
    if (!make_room(l)) {
        return cli_error_nomem(err);
    }
    life_attempt *taken = &l->attempts[l->count];
    *taken = (life_attempt){.run = strdup(a->run),
                            .reason = strdup(a->reason),
                            .hosts = hosts_of(a),
                            .verdict = strdup(a->verdict),
                            .number = a->number,
                            .end = end_of(a),
                            .begin_ns = begin_ns,
                            .end_ns = a->end == ATTEMPT_RUNNING ? 0
                                      : a->end_ns > begin_ns    ? a->end_ns
                                                                : begin_ns,
                            .resume_ns = a->resume_ns,
                            .trained_ns = a->trained_ns,
                            .from_step = a->from_step,
                            .first = a->first_trained,
                            .last = a->last_trained,
                            .kept = NONE};
    if (!taken->run || !taken->reason || !taken->hosts || !taken->verdict) {
        free_attempt(taken);
        return cli_error_nomem(err);
    }
    l->count++;
    return CKD_OK;
}

/* ---- runs ---- */

static int by_run(const void *a, const void *b) {
    const life_attempt *x = a, *y = b;
    int order = strcmp(x->run, y->run);
    return order ? order : (x->number > y->number) - (x->number < y->number);
}

static int by_count(const void *a, const void *b) {
    const report_life *x = a, *y = b;
    if (x->count != y->count) {
        return x->count < y->count ? 1 : -1;
    }
    return strcmp(x->attempts->run, y->attempts->run);
}

static ckd_status find_lives(report_lives *l, ckd_error *err) {
    if (l->count == 0) {
        return CKD_OK;
    }
    qsort(l->attempts, l->count, sizeof(*l->attempts), by_run);
    for (size_t i = 0; i < l->count; i++) {
        l->life_count += i == 0 || strcmp(l->attempts[i].run, l->attempts[i - 1].run) != 0;
    }
    l->items = calloc(l->life_count, sizeof(*l->items));
    if (!l->items) {
        return cli_error_nomem(err);
    }
    report_life *life = l->items;
    for (size_t i = 0; i < l->count; i++) {
        life += i > 0 && strcmp(l->attempts[i].run, l->attempts[i - 1].run) != 0;
        life->attempts = life->count ? life->attempts : &l->attempts[i];
        life->count++;
    }
    qsort(l->items, l->life_count, sizeof(*l->items), by_count);
    return CKD_OK;
}

/* ---- saves ---- */

static int by_time(const void *a, const void *b) {
    const life_save *x = a, *y = b;
    if (x->created_ns != y->created_ns) {
        return x->created_ns < y->created_ns ? -1 : 1;
    }
    if (x->step != y->step) {
        return x->step < y->step ? -1 : 1;
    }
    return (int)y->suspect - (int)x->suspect;
}

/* The catalog has times of saves that were deleted. After a rebuild it has none, but there are the checkpoints. */
static ckd_status find_saves(report_life *life, const report_data *d, ckd_error *err) {
    const char *run = life->attempts->run;
    size_t kept = 0, count = 0, room = d->timeline->count + d->report->checkpoint_count;
    life_save *all = calloc(room + 1, sizeof(*all));
    if (!all) {
        return cli_error_nomem(err);
    }
    for (size_t i = 0; i < d->timeline->count; i++) {
        const ckd_save_times *s = &d->timeline->items[i];
        if (supervise_is_of_run(s->run, run)) {
            all[count++] = (life_save){s->step, s->created_ns, false};
        }
    }
    for (size_t i = 0; i < d->report->checkpoint_count; i++) {
        const ckd_checkpoint *c = &d->report->by_checkpoint[i];
        if (supervise_is_of_run(c->run, run)) {
            all[count++] = (life_save){c->step, c->created_ns, c->suspect != 0};
        }
    }
    if (count) {
        qsort(all, count, sizeof(*all), by_time);
    }
    for (size_t i = 0; i < count; i++) { /* the one that may be suspect comes first */
        if (kept == 0 || all[kept - 1].created_ns != all[i].created_ns || all[kept - 1].step != all[i].step) {
            all[kept++] = all[i];
            life->suspects += all[i].suspect;
        }
    }
    life_save *fitting = realloc(all, (kept + 1) * sizeof(*all));
    life->saves = fitting ? fitting : all;
    life->save_count = kept;
    return CKD_OK;
}

/* ---- figures ---- */

/* The saves of the attempt from *first on, before *end. */
static void saves_of(const report_life *life, const life_attempt *a, size_t *first, size_t *end) {
    size_t i = 0;
    while (i < life->save_count && life->saves[i].created_ns < a->begin_ns) {
        i++;
    }
    *first = i;
    while (i < life->save_count && (a->end_ns == 0 || life->saves[i].created_ns <= a->end_ns)) {
        i++;
    }
    *end = i;
}

/* No step after this one was kept. */
static uint64_t last_kept(const life_attempt *a) {
    return a->kept < a->last ? a->kept : a->last;
}

/* Adds what an attempt did whose steps are known. */
static void add_reported(report_life *life, const life_attempt *a) {
    uint64_t last = last_kept(a), made = a->last - a->first;
    uint64_t useful = last > a->first ? last - a->first : 0;
    life->reported++;
    life->useful_s += made > 0 ? (double)a->trained_ns / 1e9 * (double)useful / (double)made : 0;
    life->steps_lost += last >= a->first ? a->last - last : made + 1;
}

/* Without reported steps, only the time between the first and the last save that was kept is known to be useful. */
static void add_saved(report_life *life, const life_attempt *a) {
    size_t begin, end;
    uint64_t first_ns = 0, last_ns = 0, kept = a->from_step == NONE ? 0 : a->from_step, top = 0;
    saves_of(life, a, &begin, &end);
    for (size_t i = begin; i < end; i++) {
        const life_save *s = &life->saves[i];
        if (s->step <= a->kept && !s->suspect) {
            first_ns = first_ns ? first_ns : s->created_ns;
            last_ns = s->created_ns;
            kept = s->step > kept ? s->step : kept;
        }
        top = s->step > top ? s->step : top;
    }
    life->useful_s += (double)(last_ns - first_ns) / 1e9;
    life->steps_lost += top > kept ? top - kept : 0;
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static ckd_status find_resume(report_life *life, ckd_error *err) {
    double *times = calloc(life->count, sizeof(*times));
    size_t count = 0;
    if (!times) {
        return cli_error_nomem(err);
    }
    for (size_t i = 0; i < life->count; i++) {
        const life_attempt *a = &life->attempts[i];
        if (a->from_step != NONE && a->resume_ns > 0) {
            times[count++] = (double)a->resume_ns / 1e9;
        }
    }
    qsort(times, count, sizeof(*times), ascending);
    life->resume_s = count ? (times[(count - 1) / 2] + times[count / 2]) / 2 : NAN;
    free(times);
    return CKD_OK;
}

/* The end of an attempt that runs is not known, but it has lived until its newest save. */
static void find_times(report_life *life) {
    size_t first, end;
    life->begin_ns = UINT64_MAX;
    for (size_t i = 0; i < life->count; i++) {
        const life_attempt *a = &life->attempts[i];
        uint64_t seen = a->end_ns;
        if (!seen) {
            saves_of(life, a, &first, &end);
            seen = end > first ? life->saves[end - 1].created_ns : a->begin_ns;
        }
        life->begin_ns = a->begin_ns < life->begin_ns ? a->begin_ns : life->begin_ns;
        life->end_ns = seen > life->end_ns ? seen : life->end_ns;
    }
}

/* An attempt without an end that another one has followed is over. */
static void find_kept(life_attempt *attempts, size_t count) {
    uint64_t kept = NONE;
    for (size_t i = count; i-- > 0;) {
        if (attempts[i].end == LIFE_RUNNING && i + 1 < count) {
            attempts[i].end = LIFE_LOST;
            attempts[i].end_ns = attempts[i + 1].begin_ns > attempts[i].begin_ns ? attempts[i + 1].begin_ns
                                                                                 : attempts[i].begin_ns;
        }
        uint64_t from = attempts[i].from_step == NONE ? 0 : attempts[i].from_step;
        attempts[i].kept = kept;
        kept = from < kept ? from : kept;
    }
}

static ckd_status sum_up(report_life *life, ckd_error *err) {
    find_times(life);
    for (size_t i = 0; i < life->count; i++) {
        const life_attempt *a = &life->attempts[i];
        if (a->first != NONE && a->last != NONE && a->last >= a->first) {
            add_reported(life, a);
        } else {
            add_saved(life, a);
        }
    }
    if (life->reported == 0 && !(life->useful_s > 0)) {
        life->useful_s = NAN;
    }
    return find_resume(life, err);
}

double report_goodput(const report_life *life) {
    double whole = (double)(life->end_ns - life->begin_ns) / 1e9;
    return whole > 0 && !isnan(life->useful_s) ? fmin(1, life->useful_s / whole) : NAN;
}

/* ---- the journal ---- */

ckd_status report_lives_read(report_data *d, ckd_error *err) {
    report_lives *l = &d->lives;
    size_t damaged = 0;
    ckd_error why = {0};
    ckd_status status = supervise_attempts_each(&damaged, d->store, take, l, &why);
    if (status != CKD_OK && status != CKD_E_NOMEM) {
        cli_note("cannot tell what the attempts of runs came to: %s", why.message);
    } else if (status != CKD_OK) {
        *err = why;
        return status;
    }
    if (damaged) {
        cli_note("%zu line%s of %s/attempts.jsonl %s damaged and left out", damaged, cli_plural(damaged),
                 d->store, damaged == 1 ? "is" : "are");
    }
    status = find_lives(l, err);
    for (size_t i = 0; i < l->life_count && status == CKD_OK; i++) {
        report_life *life = &l->items[i];
        find_kept(l->attempts + (life->attempts - l->attempts), life->count);
        status = find_saves(life, d, err);
        THEN(status, sum_up(life, err));
    }
    return status;
}

void report_lives_free(report_lives *l) {
    for (size_t i = 0; i < l->count; i++) {
        free_attempt(&l->attempts[i]);
    }
    for (size_t i = 0; i < l->life_count; i++) {
        free(l->items[i].saves);
    }
    free(l->attempts);
    free(l->items);
    *l = (report_lives){0};
}
