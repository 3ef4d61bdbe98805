/* Fills ckd_error. Nothing here allocates, so out-of-memory can be reported, too. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "base/error.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define ERR_VPRINTF(fmt) __attribute__((format(printf, fmt, 0)))

static int is_utf8_tail(char c) {
    return ((unsigned char)c & 0xc0) == 0x80;
}

/* Removes an incomplete UTF-8 character from the end of a text that was cut at `size` bytes. */
static void trim_cut(char *text, size_t size) {
    size_t start = size;
    while (start > 0 && is_utf8_tail(text[start - 1])) {
        start--;
    }
    if (start == 0) {
        return;
    }
    unsigned char lead = (unsigned char)text[start - 1];
    size_t length = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : lead >= 0xc0 ? 2 : 1;
    if (size - (start - 1) < length) {
        text[start - 1] = '\0';
    }
}

static void copy_cut_right(char *to, size_t capacity, const char *from) {
    size_t size = strlen(from);
    if (size < capacity) {
        memcpy(to, from, size + 1);
        return;
    }
    memcpy(to, from, capacity - 1);
    to[capacity - 1] = '\0';
    trim_cut(to, capacity - 1);
}

/* Copies a path; keeps its end if it is too long: "...end/of/the/path". */
static void copy_cut_left(char *to, size_t capacity, const char *from) {
    static const char dots[] = "...";
    size_t size = strlen(from);
    if (size < capacity) {
        memcpy(to, from, size + 1);
        return;
    }
    const char *rest = from + size - (capacity - sizeof(dots));
    while (is_utf8_tail(*rest)) {
        rest++;
    }
    memcpy(to, dots, sizeof(dots));
    strcpy(to + sizeof(dots) - 1, rest);
}

/* Formats into a local buffer first: an argument may be the message or path that is already in err. */
static ERR_VPRINTF(5) void fill(ckd_error *err, ckd_status status, int errnum, uint64_t offset,
                                const char *format, va_list args) {
    char message[sizeof(err->message)];
    int length = vsnprintf(message, sizeof(message), format, args);
    if (length < 0) {
        strcpy(message, "an error occurred, but its message cannot be formatted");
    } else if ((size_t)length >= sizeof(message)) {
        trim_cut(message, sizeof(message) - 1);
    }
    memset(err, 0, sizeof(*err));
    err->status = status;
    err->sys_errno = errnum;
    err->offset = offset;
    memcpy(err->message, message, sizeof(message));
}

ckd_status err_set(ckd_error *err, ckd_status status, const char *format, ...) {
    if (err != NULL) {
        va_list args;
        va_start(args, format);
        fill(err, status, 0, CKD_NO_OFFSET, format, args);
        va_end(args);
    }
    return status;
}

static ckd_status status_of_errno(int errnum) {
    switch (errnum) {
    case ENOSPC:
    case EDQUOT:
        return CKD_E_NOSPACE;
    case EROFS:
    case EACCES:
    case EPERM:
        return CKD_E_READ_ONLY;
    case ENOENT:
        return CKD_E_NOT_FOUND;
    case EEXIST:
        return CKD_E_EXISTS;
    case ENOMEM:
        return CKD_E_NOMEM;
    default:
        return CKD_E_IO;
    }
}

/* Appends ": reason". It overwrites the end of a long message, since the reason matters more. */
static void append_reason(ckd_error *err, int errnum) {
    /* Not strerror: its text depends on the locale and may change under another thread. */
    const char *text = strerrordesc_np(errnum);
    char reason[96];
    snprintf(reason, sizeof(reason), ": %s%s", text != NULL ? text : "unknown system error",
             errnum == EMFILE ? " in this process; `ulimit -n` raises the limit" : "");
    size_t length = strlen(err->message), limit = sizeof(err->message) - 1 - strlen(reason);
    if (length > limit) {
        err->message[limit] = '\0';
        trim_cut(err->message, limit);
        length = strlen(err->message);
    }
    strcpy(err->message + length, reason);
}

ckd_status err_sys(ckd_error *err, int errnum, const char *path, const char *format, ...) {
    ckd_status status = status_of_errno(errnum);
    if (err != NULL) {
        char file[sizeof(err->file)] = "";
        if (path != NULL) {
            copy_cut_left(file, sizeof(file), path);
        }
        va_list args;
        va_start(args, format);
        fill(err, status, errnum, CKD_NO_OFFSET, format, args);
        va_end(args);
        append_reason(err, errnum);
        memcpy(err->file, file, sizeof(file));
    }
    return status;
}

ckd_status err_nomem(ckd_error *err, size_t bytes, const char *what) {
    return err_set(err, CKD_E_NOMEM, "out of memory for %zu bytes of %s", bytes, what);
}

static ERR_VPRINTF(5) void fill_at(ckd_error *err, ckd_status status, const char *path, uint64_t offset,
                                   const char *format, va_list args) {
    char file[sizeof(err->file)] = "";
    if (path != NULL) {
        copy_cut_left(file, sizeof(file), path);
    }
    fill(err, status, 0, offset, format, args);
    memcpy(err->file, file, sizeof(file));
}

ckd_status err_corrupt(ckd_error *err, const char *path, uint64_t offset, const char *format, ...) {
    if (err != NULL) {
        va_list args;
        va_start(args, format);
        fill_at(err, CKD_E_CORRUPT, path, offset, format, args);
        va_end(args);
    }
    return CKD_E_CORRUPT;
}

ckd_status err_unsupported(ckd_error *err, const char *path, uint64_t offset, const char *format, ...) {
    if (err != NULL) {
        va_list args;
        va_start(args, format);
        fill_at(err, CKD_E_UNSUPPORTED, path, offset, format, args);
        va_end(args);
    }
    return CKD_E_UNSUPPORTED;
}

ckd_status err_in_tensor(ckd_error *err, ckd_status status, const char *tensor) {
    if (err != NULL && status != CKD_OK && tensor != NULL && err->tensor[0] == '\0') {
        copy_cut_right(err->tensor, sizeof(err->tensor), tensor);
    }
    return status;
}

ckd_status err_in_file(ckd_error *err, ckd_status status, const char *path) {
    if (err != NULL && status != CKD_OK && path != NULL && err->file[0] == '\0') {
        copy_cut_left(err->file, sizeof(err->file), path);
    }
    return status;
}
