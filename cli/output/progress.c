/*
 * The progress line, and signals. They are together because a long operation reports progress often, and learns from
 * the reply that a signal has asked it to stop.
 */
#include "cli/output/output.h"

#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define SECOND     UINT64_C(1000000000)
#define CLEAR_LINE "\r\033[K"

static uint64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * SECOND + (uint64_t)t.tv_nsec;
}

void cli_progress_begin(cli_progress *p, const char *verb, bool quiet) {
    *p = (cli_progress){.verb = verb, .enabled = !quiet && isatty(STDERR_FILENO), .started_ns = now()};
}

bool cli_progress_due(const cli_progress *p, uint64_t now_ns) {
    return p->enabled && now_ns - p->started_ns >= SECOND &&
           (!p->drawn || now_ns - p->drawn_ns >= SECOND / 5);
}

void cli_progress_line(char *to, size_t size, const cli_progress *p, uint64_t done, uint64_t total,
                       uint64_t now_ns) {
    double seconds = (double)(now_ns - p->started_ns) / (double)SECOND;
    double rate = seconds > 0 ? (double)done / seconds : 0;
    char of_total[128] = "", left[64] = "";
    if (total) {
        uint64_t shown = done < total ? done : total;
        snprintf(of_total, sizeof(of_total), " of %s  %d %%", cli_text_size(total).text,
                 (int)(100 * ((double)shown / (double)total)));
        if (rate > 0) {
            snprintf(left, sizeof(left), "  %s left", cli_text_duration((double)(total - shown) / rate).text);
        }
    }
    snprintf(to, size, "%s  %s%s  %s/s%s", p->verb, cli_text_size(done).text, of_total,
             cli_text_size((uint64_t)rate).text, left);
}

int cli_progress_update(void *context, uint64_t done, uint64_t total) {
    cli_progress *p = context;
    if (p->enabled) {
        uint64_t now_ns = now();
        if (cli_progress_due(p, now_ns)) {
            char line[256];
            cli_progress_line(line, sizeof(line), p, done, total, now_ns);
            dprintf(STDERR_FILENO, CLEAR_LINE "%s", line);
            p->drawn = true;
            p->drawn_ns = now_ns;
        }
    }
    return cli_interrupted();
}

void cli_progress_end(cli_progress *p) {
    if (p->drawn) {
        dprintf(STDERR_FILENO, CLEAR_LINE);
        p->drawn = false;
        p->enabled = false;
    }
}

/* ---- interruption ---- */

/* A global variable, because a signal handler has no other place to write to. */
static volatile sig_atomic_t caught;

static void on_signal(int number) {
    caught = number;
}

void cli_interrupt_catch(void) {
    static const int signals[] = {SIGINT, SIGTERM, SIGHUP};
    for (size_t i = 0; i < sizeof(signals) / sizeof(signals[0]); i++) {
        struct sigaction old;
        struct sigaction new = {.sa_handler = on_signal, .sa_flags = SA_RESTART | (int)SA_RESETHAND};
        if (sigaction(signals[i], NULL, &old) == 0 && old.sa_handler != SIG_IGN) {
            sigaction(signals[i], &new, NULL);
        }
    }
}

int cli_interrupted(void) {
    return caught;
}
