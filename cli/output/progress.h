/*
 * Long operations: a progress line on stderr, only on a terminal and only after a second; and SIGINT, SIGTERM and SIGHUP,
 * after which the command cleans up before it exits.
 */
#ifndef CLI_PROGRESS_H
#define CLI_PROGRESS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct cli_progress {
    const char *verb; /* "saving" */
    bool enabled;     /* stderr is a terminal and -q is not set */
    bool drawn;       /* a line is on screen */
    uint64_t started_ns, drawn_ns;
} cli_progress;

void cli_progress_begin(cli_progress *p, const char *verb, bool quiet);
/* A ckd_progress_fn with a cli_progress * as context. Returns non-zero once a signal has asked to stop. */
int cli_progress_update(void *context, uint64_t done, uint64_t total);
/* Clears the line. Call it before printing anything else; repeated calls are harmless. */
void cli_progress_end(cli_progress *p);

/* Is it time to draw? A second must have passed, and a fifth of one since the last line. */
bool cli_progress_due(const cli_progress *p, uint64_t now_ns);
/* Formats "saving  312.0 MiB of 1.2 GiB  26 %  410.0 MiB/s  2 s left"; total 0: unknown. */
void cli_progress_line(char *to, size_t room, const cli_progress *p, uint64_t done, uint64_t total,
                       uint64_t now_ns);

/*
 * From now on the first of these signals is only recorded. Long operations check cli_interrupted(), remove what they
 * have written, and the command exits with 128 + the signal. A second signal kills. Signals that were ignored (nohup)
 * stay ignored.
 */
void cli_interrupt_catch(void);
/* Returns the signal that asked to stop, or 0. */
int cli_interrupted(void);

#endif
