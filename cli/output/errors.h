/* What the command says when something fails, and the exit status it ends with. The only place that prints errors. */
#ifndef CLI_ERRORS_H
#define CLI_ERRORS_H

#include <stdbool.h>

#include "ckptdelta.h"

/* Part of the interface: docs/cli.md. Interrupted by a signal: 128 + its number. */
enum { CLI_DONE = 0, CLI_FAILED = 1, CLI_USAGE = 2, CLI_NOT_FOUND = 3, CLI_CORRUPT = 4 };

#define CLI_PRINTF(string, first) __attribute__((format(printf, string, first)))

/* Starts a fresh error: no tensor, file, offset or errno. `err` is never NULL in the command. Returns the status. */
ckd_status cli_error(ckd_error *err, ckd_status status, const char *format, ...) CLI_PRINTF(3, 4);
/* The same at an offset of a file; offset may be CKD_NO_OFFSET. */
ckd_status cli_error_at(ckd_error *err, ckd_status status, const char *file, uint64_t offset,
                        const char *format, ...) CLI_PRINTF(5, 6);
/* A failed system call on `file`; the status follows errnum, ": " and its text are appended. */
ckd_status cli_error_sys(ckd_error *err, int errnum, const char *file, const char *format, ...)
    CLI_PRINTF(4, 5);
ckd_status cli_error_nomem(ckd_error *err);
/* Adds the tensor to an error on its way up. */
ckd_status cli_error_tensor(ckd_error *err, const char *tensor);

/* INVALID is bad usage, NOT_FOUND 3, CORRUPT 4, as is UNSUPPORTED of a file; everything else 1. */
int cli_exit_code(const ckd_error *err);

/*
 * Prints `ckptdelta: what (tensor X, file Y, offset Z)` on stderr and returns the exit status: that of err->status, or
 * 128 + the signal if one asked to stop.
 */
int cli_fail(const ckd_error *err);

/*
 * What the command was asked for is done, and durable: "a@1 is saved". From now on nothing that cannot be told (a full
 * disk behind standard output, a closed pipe) is a failure: messages say so, the exit status is CLI_DONE. Damage that
 * was found meanwhile still is CLI_CORRUPT.
 */
void cli_committed(const char *format, ...) CLI_PRINTF(1, 2);

/* The last but one step of the command: nothing may be lost between printf and the file behind standard output. */
int cli_flush_output(int code);

/*
 * From now on stderr takes no control characters but line ends and tabs: argp and getopt print arguments as they are. What
 * is meant to steer the terminal goes to the descriptor.
 */
void cli_clean_stderr(void);

/*
 * From now on each message on stderr is a line with one JSON object, `message` of docs/cli.md. What argp and getopt print is
 * wrong usage: its first line becomes such an object when the process ends (cli_flush_errors).
 */
void cli_errors_as_json(void);
/* At exit with this status. */
void cli_flush_errors(int code);

/* Something worth knowing, on stderr. */
void cli_note(const char *format, ...) CLI_PRINTF(1, 2);

/* ckd_message_fn; context is a const cli_options * (options.h). */
void cli_on_message(void *context, const char *message);

#endif
