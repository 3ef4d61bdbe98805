#include "cli/output/progress.h"

#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "cli/output/interrupt.h"
#include "cli/output/text.h"

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

void cli_progress_line(char *to, size_t room, const cli_progress *p, uint64_t done, uint64_t total,
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
    snprintf(to, room, "%s  %s%s  %s/s%s", p->verb, cli_text_size(done).text, of_total,
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
