/*
 * Lists, in a file beside the socket, the states that are not durable yet. The next agent reads it if this one is
 * killed.
 */
#include "agent/internal.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define RECORD_MAX (1u << 20)
#define PATH_BYTES (LOCAL_PATH_MAX + 16)

static void record_path(char out[PATH_BYTES], const agent *a, const char *suffix) {
    snprintf(out, PATH_BYTES, "%s.held%s", a->socket, suffix);
}

static bool is_pending(const holding *h) {
    return h->shown.newest_step != CKD_LATEST && h->shown.newest_step != h->shown.durable_step;
}

/* The ranks of a session have one state, which is listed once. */
static bool is_listed(const agent *a, const holding *h) {
    const holding *other = a->holdings;
    while (other != h && !(is_pending(other) && other->shown.newest_step == h->shown.newest_step &&
                           strcmp(other->saves_to, h->saves_to) == 0)) {
        other = other->next;
    }
    return other != h;
}

/* Nothing is synced: a power failure that loses the file also loses the memory. */
void record_write(const agent *a) {
    char path[PATH_BYTES], temp[PATH_BYTES], line[CKD_RUN_MAX + 32];
    record_path(path, a, "");
    record_path(temp, a, ".new");
    (void)file_remove(temp, true, NULL);
    file_writer *f;
    if (file_create(&f, temp, 4096, NULL) != CKD_OK) {
        return;
    }
    ckd_status status = CKD_OK;
    for (const holding *h = a->holdings; h && status == CKD_OK; h = h->next) {
        if (is_pending(h) && !is_listed(a, h)) {
            int size = snprintf(line, sizeof(line), "%" PRIu64 " %s\n", h->shown.newest_step, h->saves_to);
            status = file_append(f, line, (size_t)size, NULL);
        }
    }
    if (file_close(f, NULL) == CKD_OK && status == CKD_OK) {
        (void)file_rename(temp, path, NULL);
    }
}

void record_remove(const agent *a) {
    char path[PATH_BYTES];
    record_path(path, a, "");
    (void)file_remove(path, true, NULL);
}

static void report(agent *a, ckd_store *store, const char *run, uint64_t step) {
    ckd_checkpoint newest;
    bool any = ckd_store_find(&newest, store, run, CKD_LATEST, NULL) == CKD_OK;
    if (any && newest.step >= step) {
        return;
    }
    if (any) {
        agent_say(a,
                  "the agent before this one ended by force and lost step %" PRIu64
                  " of run '%s': the newest step "
                  "in the store is %" PRIu64,
                  step, run, newest.step);
    } else {
        agent_say(a,
                  "the agent before this one ended by force and lost step %" PRIu64
                  " of run '%s', which has no "
                  "checkpoints",
                  step, run);
    }
}

void record_report(agent *a, ckd_store *store) {
    char path[PATH_BYTES], *rest = NULL;
    bytes text = {.size = 0};
    record_path(path, a, "");
    if (file_read_all(&text, path, RECORD_MAX, NULL) == CKD_OK) {
        bytes_put_u8(&text, 0);
        for (char *line = text.failed ? NULL : strtok_r((char *)text.data, "\n", &rest); line;
             line = strtok_r(NULL, "\n", &rest)) {
            char *run = NULL;
            uint64_t step = strtoull(line, &run, 10);
            if (run > line && *run == ' ' && strlen(run + 1) <= CKD_RUN_MAX) {
                report(a, store, run + 1, step);
            }
        }
        record_remove(a);
    }
    bytes_free(&text);
}
