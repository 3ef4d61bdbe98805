/* Error messages and exit statuses. Only this code prints errors. */
#ifndef CLI_ERRORS_H
#define CLI_ERRORS_H

#include <stdbool.h>

#include "ckptdelta.h"

/* Part of the interface: docs/cli.md. Interrupted by a signal: 128 + its number. */
enum { CLI_DONE = 0, CLI_FAILED = 1, CLI_USAGE = 2, CLI_NOT_FOUND = 3, CLI_CORRUPT = 4 };

/* The next of several steps: runs `step` if `status` is CKD_OK and stores its result there. As in the library. */
#define THEN(status, step)        \
    do {                          \
        if ((status) == CKD_OK) { \
            (status) = (step);    \
        }                         \
    } while (0)

#define CLI_PRINTF(string, first) __attribute__((format(printf, string, first)))

/*
 * Starts a fresh error: clears tensor, file, offset and errno. `err` is never NULL in the command. Returns the status.
 */
ckd_status cli_error(ckd_error *err, ckd_status status, const char *format, ...) CLI_PRINTF(3, 4);
/* As cli_error, at an offset of a file; offset may be CKD_NO_OFFSET. */
ckd_status cli_error_at(ckd_error *err, ckd_status status, const char *file, uint64_t offset,
                        const char *format, ...) CLI_PRINTF(5, 6);
/* Reports a failed system call on `file`. The status follows errnum; ": " and its text are appended. */
ckd_status cli_error_sys(ckd_error *err, int errnum, const char *file, const char *format, ...)
    CLI_PRINTF(4, 5);
ckd_status cli_error_nomem(ckd_error *err);
/* Adds the tensor to an error on its way up. */
ckd_status cli_error_tensor(ckd_error *err, const char *tensor);

/*
 * Returns the exit status: INVALID is bad usage, NOT_FOUND 3, CORRUPT 4, as is UNSUPPORTED of a file; everything else
 * 1.
 */
int cli_exit_code(const ckd_error *err);

/*
 * Prints `ckptdelta: message (tensor X, file Y, offset Z)` on stderr. Returns the exit status: that of err->status, or
 * 128 + the signal that asked to stop.
 */
int cli_fail(const ckd_error *err);

/*
 * Call it when the command's work is done and durable: "a@1 is saved". Afterwards an output failure (a full disk behind
 * standard output, a closed pipe) is reported, but the exit status stays CLI_DONE. Damage found meanwhile is still
 * CLI_CORRUPT.
 */
void cli_committed(const char *format, ...) CLI_PRINTF(1, 2);

/* Flushes standard output, as the last but one step of a command, and detects lost output. */
int cli_flush_output(int code);

/*
 * Escapes control characters on stderr from now on, except line ends and tabs, since argp and getopt print arguments
 * unchanged. Terminal control sequences must go to the descriptor instead.
 */
void cli_clean_stderr(void);

/*
 * Prints each message on stderr as a line with one JSON object from now on, `message` of docs/cli.md. Output of argp
 * and getopt means wrong usage: its first line becomes such an object at exit (cli_flush_errors).
 */
void cli_errors_as_json(void);
/* Runs at exit with this status. */
void cli_flush_errors(int code);

/* Prints a note on stderr. */
void cli_note(const char *format, ...) CLI_PRINTF(1, 2);

/* A ckd_message_fn; context is a const cli_options * (options.h). */
void cli_on_message(void *context, const char *message);

#endif
