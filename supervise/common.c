/* Errors, times and the names of signals. */
#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "supervise/internal.h"

static void set(ckd_error *err, ckd_status status, const char *format, va_list args) {
    memset(err, 0, sizeof(*err));
    err->status = status;
    err->offset = CKD_NO_OFFSET;
    vsnprintf(err->message, sizeof(err->message), format, args);
}

ckd_status supervise_error(ckd_error *err, ckd_status status, const char *format, ...) {
    va_list args;
    va_start(args, format);
    set(err, status, format, args);
    va_end(args);
    return status;
}

ckd_status supervise_error_sys(ckd_error *err, int errnum, const char *format, ...) {
    va_list args;
    va_start(args, format);
    set(err, errnum == ENOSPC || errnum == EDQUOT ? CKD_E_NOSPACE : CKD_E_IO, format, args);
    va_end(args);
    err->sys_errno = errnum;
    size_t used = strlen(err->message);
    snprintf(err->message + used, sizeof(err->message) - used, ": %s", strerror(errnum));
    return err->status;
}

void supervise_say(const supervise_options *o, const char *format, ...) {
    char text[2 * SUPERVISE_TEXT_MAX + 64];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    if (o->on_message) {
        o->on_message(o->message_context, text);
    }
}

static uint64_t clock_ns(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return (uint64_t)t.tv_sec * SECOND + (uint64_t)t.tv_nsec;
}

uint64_t supervise_now(void) {
    return clock_ns(CLOCK_REALTIME);
}

uint64_t supervise_monotonic(void) {
    return clock_ns(CLOCK_MONOTONIC);
}

signal_text signal_text_of(int number) {
    signal_text t;
    const char *name = sigabbrev_np(number);
    if (name) {
        snprintf(t.text, sizeof(t.text), "SIG%s", name);
    } else {
        snprintf(t.text, sizeof(t.text), "signal %d", number);
    }
    return t;
}
