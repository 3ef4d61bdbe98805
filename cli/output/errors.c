/*
 * Errors and notes of the command: prints them as text or JSON, and chooses the exit status. Nothing else prints
 * errors, so --json holds for messages of argp, too.
 */
#include "cli/output/output.h"

#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Cuts a path on the left: its end is the most informative part. */
static void copy_path(char *to, size_t size, const char *path) {
    size_t length = strlen(path);
    snprintf(to, size, "%s", length < size ? path : path + (length - size + 1));
}

static CLI_PRINTF(5, 0) void set(ckd_error *err, ckd_status status, const char *file, uint64_t offset,
                                 const char *format, va_list args) {
    memset(err, 0, sizeof(*err));
    err->status = status;
    err->offset = offset;
    if (file) {
        copy_path(err->file, sizeof(err->file), file);
    }
    vsnprintf(err->message, sizeof(err->message), format, args);
}

ckd_status cli_error(ckd_error *err, ckd_status status, const char *format, ...) {
    va_list args;
    va_start(args, format);
    set(err, status, NULL, CKD_NO_OFFSET, format, args);
    va_end(args);
    return status;
}

ckd_status cli_error_at(ckd_error *err, ckd_status status, const char *file, uint64_t offset,
                        const char *format, ...) {
    va_list args;
    va_start(args, format);
    set(err, status, file, offset, format, args);
    va_end(args);
    return status;
}

static ckd_status status_of_errno(int errnum) {
    switch (errnum) {
    case ENOENT:
        return CKD_E_NOT_FOUND;
    case EEXIST:
        return CKD_E_EXISTS;
    case ENOMEM:
        return CKD_E_NOMEM;
    case ENOSPC:
    case EDQUOT:
        return CKD_E_NOSPACE;
    default:
        return CKD_E_IO;
    }
}

ckd_status cli_error_sys(ckd_error *err, int errnum, const char *file, const char *format, ...) {
    va_list args;
    va_start(args, format);
    set(err, status_of_errno(errnum), file, CKD_NO_OFFSET, format, args);
    va_end(args);
    err->sys_errno = errnum;
    size_t used = strlen(err->message);
    snprintf(err->message + used, sizeof(err->message) - used, ": %s", strerror(errnum));
    return err->status;
}

ckd_status cli_error_nomem(ckd_error *err) {
    return cli_error(err, CKD_E_NOMEM, "out of memory");
}

ckd_status cli_error_tensor(ckd_error *err, const char *tensor) {
    snprintf(err->tensor, sizeof(err->tensor), "%s", tensor);
    if (strlen(tensor) >= sizeof(err->tensor)) {
        size_t length = sizeof(err->tensor) - 1;
        while (length > 0 && ((unsigned char)tensor[length] & 0xc0) == 0x80) {
            length--; /* not inside a character */
        }
        err->tensor[length] = '\0';
    }
    return err->status;
}

static bool left_out;

void cli_left_out(void) {
    left_out = true;
}

int cli_exit_code(const ckd_error *err) {
    if (left_out && err->status != CKD_OK && err->status != CKD_E_CANCELLED) {
        return CLI_CORRUPT;
    }
    switch (err->status) {
    case CKD_OK:
        return CLI_DONE;
    case CKD_E_INVALID:
        return CLI_USAGE;
    case CKD_E_NOT_FOUND:
        return CLI_NOT_FOUND;
    case CKD_E_CORRUPT:
        return CLI_CORRUPT;
    case CKD_E_UNSUPPORTED: /* a file of a newer version; or a library or device that lacks something */
        return err->file[0] ? CLI_CORRUPT : CLI_FAILED;
    default:
        return CLI_FAILED;
    }
}

/* Prints where the error occurred, unless the message says so. */
static void print_where(const ckd_error *err) {
    const char *separator = " (";
    if (err->tensor[0] && !strstr(err->message, err->tensor)) {
        fprintf(stderr, "%stensor ", separator);
        cli_print_clean(stderr, err->tensor);
        separator = ", ";
    }
    if (err->file[0] && !strstr(err->message, err->file)) {
        fprintf(stderr, "%sfile ", separator);
        cli_print_clean(stderr, err->file);
        separator = ", ";
    }
    if (err->offset != CKD_NO_OFFSET && err->file[0]) {
        fprintf(stderr, "%soffset %llu", separator, (unsigned long long)err->offset);
        separator = ", ";
    }
    if (separator[0] == ',') {
        fputc(')', stderr);
    }
}

/* ---- messages as JSON ---- */

static bool as_json;
static char raw[1024]; /* start of what argp and getopt print */

void cli_errors_as_json(void) {
    as_json = true;
}

/* Prints one line with a single write. err: NULL for a note. */
static void print_json(const char *message, const ckd_error *err, int code) {
    bool placed = err && err->file[0] && err->offset != CKD_NO_OFFSET;
    json_t *line = json_pack("{s:i, s:s, s:o, s:o, s:o, s:o, s:o, s:o}", "schema", 1, "level",
                             err ? "error" : "note", "message", cli_json_text(message), "status",
                             err ? json_string(ckd_status_name(err->status)) : json_null(), "exit_status",
                             err ? json_integer(code) : json_null(), "tensor",
                             err && err->tensor[0] ? cli_json_text(err->tensor) : json_null(), "file",
                             err && err->file[0] ? cli_json_text(err->file) : json_null(), "offset",
                             placed ? json_integer((json_int_t)err->offset) : json_null());
    char *text = line ? json_dumps(line, JSON_COMPACT | JSON_ENSURE_ASCII) : NULL;
    dprintf(STDERR_FILENO, "%s\n",
            text ? text : "{\"schema\":1,\"level\":\"error\",\"message\":\"out of memory\"}");
    free(text);
    json_decref(line);
}

/* Their output looks like "ckptdelta list: message\nTry ...". */
void cli_flush_errors(int code) {
    if (!raw[0]) {
        return;
    }
    ckd_error err;
    raw[strcspn(raw, "\n")] = '\0';
    const char *colon = strncmp(raw, "ckptdelta", 9) == 0 ? strstr(raw, ": ") : NULL;
    cli_error(&err, code == CLI_USAGE ? CKD_E_INVALID : CKD_E_NOMEM, "%s", colon ? colon + 2 : raw);
    print_json(err.message, &err, code);
    raw[0] = '\0';
}

static ssize_t write_clean(void *unused, const char *data, size_t size) {
    (void)unused;
    if (as_json) {
        size_t used = strlen(raw);
        snprintf(raw + used, sizeof(raw) - used, "%.*s", (int)size, data);
        return (ssize_t)size;
    }
    char *text = strndup(data, size), *clean = text ? cli_clean_but(text, "\n\t") : NULL;
    dprintf(STDERR_FILENO, "%s", clean ? clean : "(out of memory)\n");
    free(clean);
    free(text);
    return (ssize_t)size;
}

void cli_clean_stderr(void) {
    FILE *clean = fopencookie(NULL, "w", (cookie_io_functions_t){.write = write_clean});
    if (clean && setvbuf(clean, NULL, _IOLBF, 1 << 14) == 0) {
        stderr = clean;
    }
}

/* The committed work of this process; "" before cli_committed. */
static char committed[512];

void cli_committed(const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(committed, sizeof(committed), format, args);
    va_end(args);
    (void)signal(SIGPIPE, SIG_IGN);
}

/*
 * Some file systems report only on close that data could not be written. This closes a duplicate, so stdout stays open.
 */
static int close_error(void) {
    int copy = dup(STDOUT_FILENO);
    return copy >= 0 && close(copy) != 0 ? errno : 0;
}

int cli_flush_output(int code) {
    bool failed = ferror(stdout) != 0;
    int errnum = fflush(stdout) != 0 ? errno : close_error();
    if ((!failed && !errnum) || code != CLI_DONE) {
        return code;
    }
    cli_note("cannot write to standard output%s%s%s%s", errnum ? ": " : "", errnum ? strerror(errnum) : "",
             committed[0] ? "; nevertheless " : "", committed);
    return committed[0] ? CLI_DONE : CLI_FAILED;
}

int cli_fail_as(const ckd_error *err, int code) {
    const char *message = err->message[0] ? err->message : ckd_status_name(err->status);
    if (as_json) {
        print_json(message, err, code);
    } else {
        fputs("ckptdelta: ", stderr);
        cli_print_clean(stderr, message);
        print_where(err);
        fputc('\n', stderr);
    }
    return code;
}

size_t cli_error_in_store(const ckd_error *err, const cli_options *options) {
    size_t length = strlen(options->store);
    while (length > 1 && options->store[length - 1] == '/') {
        length--;
    }
    return strncmp(err->file, options->store, length) == 0 && err->file[length] == '/' ? length : 0;
}

int cli_fail(const ckd_error *err) {
    int code = cli_exit_code(err), signal_number = cli_interrupted();
    bool nevertheless = committed[0] && code != CLI_CORRUPT;
    if (nevertheless) {
        code = CLI_DONE;
    } else if (err->status == CKD_E_CANCELLED && signal_number) {
        code = 128 + signal_number;
    }
    cli_fail_as(err, code);
    if (nevertheless) {
        cli_note("nevertheless %s", committed);
    }
    return code;
}

void cli_note(const char *format, ...) {
    char message[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(message, sizeof(message), format, args);
    va_end(args);
    if (as_json) {
        print_json(message, NULL, CLI_DONE);
        return;
    }
    fputs("ckptdelta: ", stderr);
    cli_print_clean(stderr, message);
    fputc('\n', stderr);
}

void cli_on_message(void *context, const char *message) {
    const cli_options *options = context;
    if (!options->quiet) {
        cli_note("%s", message);
    }
}
