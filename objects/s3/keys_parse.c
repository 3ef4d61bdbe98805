/* Credentials as JSON, which a process, a container or an instance gives; times; the process itself. */
#include "objects/s3/s3.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { OUTPUT_MAX = 64 << 10, PROCESS_S = 60 };

uint64_t s3_time_parse(const char *text) {
    struct tm t = {0};
    int sign = 1, hours = 0, minutes = 0;
    const char *rest = strptime(text, "%Y-%m-%dT%H:%M:%S", &t);
    if (!rest) {
        return 0;
    }
    if (*rest == '.') {
        rest++;
        rest += strspn(rest, "0123456789");
    }
    if (*rest == '+' || *rest == '-') {
        sign = *rest == '-' ? -1 : 1;
        if (sscanf(rest + 1, "%2d:%2d", &hours, &minutes) != 2) {
            return 0;
        }
    } else if (*rest != 'Z') {
        return 0;
    }
    int64_t at = (int64_t)timegm(&t) - sign * (hours * 3600 + minutes * 60);
    return at > 0 ? (uint64_t)at : 0;
}

/* ---- JSON ---- */

static const char *member(const json_t *root, const char *a, const char *b) {
    const char *value = json_string_value(json_object_get(root, a));
    return value ? value : b ? json_string_value(json_object_get(root, b)) : NULL;
}

ckd_status s3_keys_parse(s3_keys *out, const bytes *json, const char *where, ckd_error *err) {
    json_error_t ignored;
    json_t *root = json_loadb((const char *)json->data, json->size, 0, &ignored);
    const char *id = member(root, "AccessKeyId", NULL), *secret = member(root, "SecretAccessKey", NULL);
    const char *token = member(root, "SessionToken", "Token"), *until = member(root, "Expiration", NULL);
    ckd_status status;
    if (!id || !secret) {
        status = err_set(err, CKD_E_CORRUPT, "%.200s gave no AccessKeyId and SecretAccessKey in JSON", where);
    } else if (until && s3_time_parse(until) == 0) {
        status = err_set(err, CKD_E_CORRUPT, "%.200s gave credentials with an Expiration that is not a time",
                         where);
    } else {
        status = s3_keys_set(out, id, secret, token, err);
        if (status == CKD_OK && until) {
            out->expires_s = s3_time_parse(until);
        }
    }
    json_decref(root);
    return status;
}

/* ---- a process ---- */

extern char **environ;

/* Starts it with our output of errors, and its output into a pipe. Its signals are as a shell has them. */
static int start(pid_t *child, int *from, const char *command) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) {
        return errno;
    }
    posix_spawn_file_actions_t actions;
    posix_spawnattr_t attributes;
    sigset_t none;
    sigemptyset(&none);
    posix_spawn_file_actions_init(&actions);
    posix_spawnattr_init(&attributes);
    posix_spawn_file_actions_adddup2(&actions, ends[1], 1);
    posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
    posix_spawnattr_setsigmask(&attributes, &none);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK);
    char *const arguments[] = {(char *)"sh", (char *)"-c", (char *)command, NULL};
    int failed = posix_spawn(child, "/bin/sh", &actions, &attributes, arguments, environ);
    posix_spawn_file_actions_destroy(&actions);
    posix_spawnattr_destroy(&attributes);
    close(ends[1]);
    if (failed) {
        close(ends[0]);
        return failed;
    }
    *from = ends[0];
    return 0;
}

/* False if it gives too much, or takes too long. */
static bool read_output(bytes *out, int from) {
    uint64_t until = clock_monotonic_ns() + PROCESS_S * UINT64_C(1000000000);
    for (;;) {
        uint64_t now = clock_monotonic_ns();
        struct pollfd wait = {.fd = from, .events = POLLIN};
        if (now >= until) {
            return false;
        }
        if (poll(&wait, 1, (int)((until - now) / 1000000) + 1) <= 0) {
            continue;
        }
        char slice[4096];
        ssize_t n = read(from, slice, sizeof(slice));
        if (n == 0) {
            return !out->failed;
        }
        if (n > 0) {
            bytes_put(out, slice, (size_t)n);
        }
        explicit_bzero(slice, sizeof(slice));
        if (out->failed || out->size > OUTPUT_MAX || (n < 0 && errno != EINTR)) {
            return false;
        }
    }
}

ckd_status s3_process_keys(s3_keys *out, const char *command, ckd_error *err) {
    static const char where[] = "the credential_process of the profile";
    pid_t child = 0;
    int from = -1, failed = start(&child, &from, command), result = 0;
    if (failed) {
        return err_sys(err, failed, NULL, "%s cannot be started", where);
    }
    bytes output = {0};
    bool whole = read_output(&output, from);
    close(from);
    if (!whole) {
        kill(child, SIGKILL);
    }
    while (waitpid(child, &result, 0) < 0 && errno == EINTR) {
    }
    ckd_status status;
    if (!whole) {
        status = err_set(err, CKD_E_IO, "%s did not end within %d s, or wrote more than %d bytes", where,
                         PROCESS_S, OUTPUT_MAX);
    } else if (!WIFEXITED(result) || WEXITSTATUS(result) != 0) {
        status = err_set(err, CKD_E_IO, "%s failed with status %d: run it by hand to see why", where,
                         WIFEXITED(result) ? WEXITSTATUS(result) : 128 + WTERMSIG(result));
    } else {
        status = s3_keys_parse(out, &output, where, err);
    }
    if (output.data) {
        explicit_bzero(output.data, output.size);
    }
    bytes_free(&output);
    return status;
}
