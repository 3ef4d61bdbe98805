/* Decides what follows an attempt. Pure functions of the observations. */
#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "supervise/internal.h"

/* Exit statuses by which shells and programs reject a command line. */
enum { STATUS_USAGE = 2, STATUS_NOT_EXECUTABLE = 126, STATUS_NOT_FOUND = 127 };
#define REFUSAL_NS (10 * SECOND)

bool decide_is_alarmed(const attempt *a) {
    return a->unhealthy && a->alarm_acts && a->alarm_step != SUPERVISE_NO_STEP;
}

/* Checkpoints from the step of an alarm on are no progress: the next attempt may raise the same alarm. */
bool attempt_progressed(const attempt *a) {
    uint64_t last = a->last_step;
    if (last != SUPERVISE_NO_STEP && decide_is_alarmed(a) && last >= a->alarm_step) {
        last = a->alarm_step > 0 ? a->alarm_step - 1 : SUPERVISE_NO_STEP;
    }
    return last != SUPERVISE_NO_STEP && (a->first_step == SUPERVISE_NO_STEP || last > a->first_step);
}

/* An attempt that somebody stopped does not count, because it tells nothing about the command. */
static bool counts(const attempt *a) {
    return !a->stopped_by && a->end != ATTEMPT_RUNNING;
}

const attempt *decide_current(const attempt *history, size_t *count) {
    size_t first = *count;
    while (first > 0) {
        int status = history[first - 1].status;
        bool settled = status == 0 || status == SUPERVISE_GAVE_UP || status == STATUS_USAGE ||
                       status == STATUS_NOT_EXECUTABLE || status == STATUS_NOT_FOUND;
        if (settled) {
            break;
        }
        first--;
    }
    *count -= first;
    return history + first;
}

uint64_t decide_failures(const attempt *history, size_t count, const char *from) {
    uint64_t failures = 0;
    for (size_t i = 0; i < count; i++) {
        if (counts(&history[i]) && strcmp(history[i].from, from) == 0) {
            failures = attempt_progressed(&history[i]) ? 0 : failures + 1;
        }
    }
    return failures;
}

uint64_t decide_longest_start(const attempt *history, size_t count) {
    uint64_t longest = 0;
    for (size_t i = 0; i < count; i++) {
        longest = history[i].resume_ns > longest ? history[i].resume_ns : longest;
    }
    return longest;
}

uint64_t decide_doublings(const attempt *history, size_t count) {
    uint64_t hung = 0;
    for (; count > 0 && history[count - 1].hung && hung < 2; count--) {
        hung++;
    }
    return hung;
}

/* The last attempt that made any checkpoint, if it was unhealthy; NULL: it was not. */
static const attempt *last_unhealthy(const attempt *history, size_t count) {
    while (count > 0 && !history[count - 1].first_save_ns) {
        count--;
    }
    return count > 0 && history[count - 1].unhealthy ? &history[count - 1] : NULL;
}

const char *decide_anomaly(const attempt *history, size_t count) {
    const attempt *a = last_unhealthy(history, count);
    return a && a->anomaly[0] ? a->anomaly : NULL;
}

const attempt *decide_alarm(const attempt *history, size_t count) {
    const attempt *a = last_unhealthy(history, count);
    return a && decide_is_alarmed(a) ? a : NULL;
}

/* Describes why an attempt was unhealthy. */
static void unhealthy_for(char text[SUPERVISE_TEXT_MAX], const attempt *a) {
    if (a->anomaly[0]) {
        snprintf(text, SUPERVISE_TEXT_MAX, "%s is suspect", a->anomaly);
    } else {
        snprintf(text, SUPERVISE_TEXT_MAX, "%s", a->alarm);
    }
}

/* Has the command ended as it should? */
static bool is_done(const attempt *a) {
    return a->end == ATTEMPT_EXITED && a->code == 0 && !a->hung && !a->unhealthy;
}

void decide_reason(char reason[SUPERVISE_TEXT_MAX], const attempt *a) {
    char how[SUPERVISE_TEXT_MAX / 2] = "not known";
    switch (a->end) {
    case ATTEMPT_EXITED:
        snprintf(how, sizeof(how), "exit status %d", a->code);
        break;
    case ATTEMPT_KILLED:
        snprintf(how, sizeof(how), "killed by %s", signal_text_of(a->code).text);
        break;
    case ATTEMPT_REFUSED:
        snprintf(how, sizeof(how), "cannot start the command: %s", strerror(a->code));
        break;
    case ATTEMPT_LOST:
        snprintf(how, sizeof(how), "supervisor died");
        break;
    case ATTEMPT_RUNNING:
        break;
    }
    if (a->unhealthy) {
        char what[SUPERVISE_TEXT_MAX];
        unhealthy_for(what, a);
        snprintf(reason, SUPERVISE_TEXT_MAX, "%.150s: %.90s", what, how);
    } else if (a->hung && !a->stopped_by) {
        snprintf(reason, SUPERVISE_TEXT_MAX, "hung: %s", how);
    } else if (a->stopped_by) {
        snprintf(reason, SUPERVISE_TEXT_MAX, "stopped by %s: %s", signal_text_of(a->stopped_by).text, how);
    } else {
        snprintf(reason, SUPERVISE_TEXT_MAX, "%s", how);
    }
}

/* An excluded host may have been the cause of failures, but not again and again. */
#define EXCUSES 2

/* Counts the last attempts in a row without a newer checkpoint. Attempts before a host was excluded are excused. */
static uint64_t futile_attempts(const attempt *history, size_t count) {
    uint64_t futile = 0, excuses = 0;
    for (size_t i = 0; i < count; i++) {
        const attempt *a = &history[i];
        bool progressed = attempt_progressed(a), excused = a->excluded && excuses < EXCUSES;
        excuses = progressed ? 0 : excuses + excused;
        futile = progressed || excused ? 0 : futile + counts(a);
    }
    return futile;
}

bool words_have(const char *words, const char *word) {
    size_t length = strlen(word);
    for (const char *at = words; at && *at; at += strcspn(at, " "), at += *at == ' ') {
        if (strcspn(at, " ") == length && strncmp(at, word, length) == 0) {
            return true;
        }
    }
    return false;
}

/*
 * Finds the last attempts in a row that count and made no newer checkpoint. Returns how many, up to ATTEMPTS_TO_BLAME.
 */
static size_t short_attempts(const attempt *out[ATTEMPTS_TO_BLAME], const attempt *history, size_t count) {
    size_t found = 0;
    for (; count > 0 && found < ATTEMPTS_TO_BLAME; count--) {
        const attempt *a = &history[count - 1];
        if (attempt_progressed(a) || a->excluded || (counts(a) && is_done(a))) {
            break;
        }
        if (counts(a)) {
            out[found++] = a;
        }
    }
    return found;
}

bool decide_bad_host(char host[SUPERVISE_NAME_MAX], const attempt *history, size_t count) {
    const attempt *last[ATTEMPTS_TO_BLAME], *current = decide_current(history, &count);
    if (short_attempts(last, current, count) < ATTEMPTS_TO_BLAME || !last[0]->hosts) {
        return false;
    }
    size_t common = 0;
    bool others = false; /* if the command always runs on one host, the host is not to blame */
    for (const char *at = last[0]->hosts; *at; at += strcspn(at, " "), at += *at == ' ') {
        char name[SUPERVISE_NAME_MAX];
        bool everywhere = true;
        snprintf(name, sizeof(name), "%.*s", (int)strcspn(at, " "), at);
        for (size_t i = 1; i < ATTEMPTS_TO_BLAME; i++) {
            everywhere = everywhere && words_have(last[i]->hosts, name);
        }
        if (everywhere) {
            common++;
            memcpy(host, name, sizeof(name));
        }
    }
    for (size_t i = 0; common == 1 && i < ATTEMPTS_TO_BLAME; i++) {
        others = others || strcmp(last[i]->hosts, host) != 0;
    }
    return common == 1 && others;
}

/* Shells and launchers report the signal that has killed a program by their exit status. */
static bool is_from_outside(const attempt *a) {
    return a->end == ATTEMPT_EXITED && (a->code == 128 + SIGKILL || a->code == 128 + SIGTERM);
}

/* Would the program fail again? SIGKILL and SIGTERM come from outside: the kernel, an administrator, a scheduler. */
static bool is_own_failure(const attempt *a) {
    static const int faults[] = {SIGSEGV, SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS};
    for (size_t i = 0; a->end == ATTEMPT_KILLED && i < sizeof(faults) / sizeof(faults[0]); i++) {
        if (a->code == faults[i]) {
            return true;
        }
    }
    return !a->hung && !a->unhealthy && !is_from_outside(a) &&
           (a->end == ATTEMPT_EXITED || a->end == ATTEMPT_REFUSED);
}

/* Did the last two attempts that count end alike, without a newer checkpoint? *before: the first of the two. */
static bool ended_alike(const attempt **before, const attempt *history, size_t count) {
    const attempt *last = &history[count - 1];
    for (size_t i = count - 1; i-- > 0;) {
        const attempt *a = &history[i];
        if (counts(a)) {
            *before = a;
            return a->end == last->end && a->code == last->code && a->last_step == last->last_step &&
                   is_own_failure(last) && !attempt_progressed(a) && !attempt_progressed(last);
        }
    }
    return false;
}

__attribute__((format(printf, 3, 4))) static decision stop(int status, ckd_status kind, const char *format,
                                                           ...) {
    decision d = {.status = status, .kind = kind};
    va_list args;
    va_start(args, format);
    vsnprintf(d.reason, sizeof(d.reason), format, args);
    va_end(args);
    return d;
}

decision decide_stopped(int number) {
    decision d =
        stop(SUPERVISE_SIGNAL + number, CKD_E_CANCELLED, "stopped by %s", signal_text_of(number).text);
    d.requeue = number == SIGTERM; /* sent at the end of a job's time; other signals come from a terminal */
    return d;
}

/* A command line that cannot work is not tried twice. */
static bool is_refused(const attempt *last, const decide_facts *facts, int *status) {
    if (facts->started_here != 1) {
        return false;
    }
    if (last->end == ATTEMPT_REFUSED) {
        *status = last->code == ENOENT ? STATUS_NOT_FOUND : STATUS_NOT_EXECUTABLE;
        return true;
    }
    *status = last->code;
    return last->end == ATTEMPT_EXITED && last->end_ns - last->start_ns < REFUSAL_NS &&
           !attempt_progressed(last) &&
           (last->code == STATUS_USAGE || last->code == STATUS_NOT_EXECUTABLE ||
            last->code == STATUS_NOT_FOUND);
}

static decision go_on(const decide_rules *rules, const decide_facts *facts, uint64_t futile) {
    double pause = (double)rules->pause_s;
    for (uint64_t i = 1; i < futile && pause < (double)rules->max_pause_s; i++) {
        pause *= 2;
    }
    pause = pause < (double)rules->max_pause_s ? pause : (double)rules->max_pause_s;
    /* Many jobs that failed together must not all come back at once. */
    return (decision){.restart = true, .pause_s = pause * (0.5 + 0.5 * facts->chance)};
}

decision decide(const decide_rules *rules, const decide_facts *facts) {
    size_t count = facts->count;
    const attempt *last = &facts->history[count - 1], *before;
    const attempt *history = decide_current(facts->history, &count);
    uint64_t futile = futile_attempts(history, count);
    char how[SUPERVISE_TEXT_MAX];
    int status;
    if (last->reason[0]) {
        snprintf(how, sizeof(how), "%s", last->reason);
    } else {
        decide_reason(how, last);
    }
    if (last->stopped_by) {
        return decide_stopped(last->stopped_by);
    }
    if (is_done(last)) {
        return stop(0, CKD_OK, "done");
    }
    if (last->unhealthy && rules->stop_unhealthy) {
        char what[SUPERVISE_TEXT_MAX];
        unhealthy_for(what, last);
        return stop(SUPERVISE_GAVE_UP, CKD_E_STATE, "gave up: %.180s", what);
    }
    if (is_refused(last, facts, &status)) {
        return stop(status, CKD_E_INVALID, "%.160s; not tried again", how);
    }
    if (facts->elsewhere && last->excluded && futile == 0 && !attempt_progressed(last)) {
        decision d = stop(1, CKD_E_STATE, "gave up: %.140s; without %.60s the job may get further", how,
                          last->excluded);
        d.requeue = true;
        return d;
    }
    if (facts->disk_full && futile > 0) {
        return stop(1, CKD_E_NOSPACE, "the disk is full, so another attempt cannot save");
    }
    if (futile >= rules->max_futile) {
        return stop(SUPERVISE_GAVE_UP, CKD_E_STATE, "gave up: no newer checkpoint in %llu attempts",
                    (unsigned long long)futile);
    }
    if (futile > 1 && ended_alike(&before, history, count) &&
        (!facts->older || strcmp(before->from, last->from) != 0)) {
        return last->last_step == SUPERVISE_NO_STEP
                   ? stop(SUPERVISE_GAVE_UP, CKD_E_STATE, "gave up: %.160s twice before the first checkpoint",
                          how)
                   : stop(SUPERVISE_GAVE_UP, CKD_E_STATE,
                          "gave up: %.160s twice at the same checkpoint, step %llu", how,
                          (unsigned long long)last->last_step);
    }
    if (facts->started_here > rules->max_restarts) {
        decision d = stop(1, CKD_E_STATE, "gave up: restarted %llu times, as --max-restarts allows",
                          (unsigned long long)rules->max_restarts);
        d.requeue = true;
        return d;
    }
    return go_on(rules, facts, futile);
}
