#include "tests/support/rivals.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/file.h"
#include "tests/support/scenes.h"

/* ---- fault points ---- */

static const char *const places[RIVAL_PLACES] = {"other",   "/data/c", "/data/m", "/data/i",
                                                 "/data/t", "/data/k", "/data/n", "/catalog.db"};
static const char *const steps[RIVAL_STEPS] = {"create", "write", "sync",     "close", "publish", "replace",
                                               "remove", "mkdir", "dir sync", "open",  "read",    "lock"};

static size_t place_of(const char *path) {
    size_t i = RIVAL_PLACES - 1;
    while (i && !strstr(path, places[i])) {
        i--;
    }
    return i;
}

rival_sites *rival_sites_new(void) {
    void *at = mmap(NULL, sizeof(rival_sites), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(at != MAP_FAILED);
    return at;
}

void rival_sites_free(rival_sites *s) {
    munmap(s, sizeof(*s));
}

unsigned rival_sites_count(const rival_sites *s, unsigned *killed) {
    unsigned count = 0;
    *killed = 0;
    for (size_t i = 0; i < RIVAL_STEPS; i++) {
        for (size_t k = 0; k < RIVAL_PLACES; k++) {
            count += s->seen[i][k] > 0;
            *killed += s->killed[i][k] > 0;
        }
    }
    return count;
}

void rival_sites_print(const rival_sites *s) {
    for (size_t i = 0; i < RIVAL_STEPS; i++) {
        for (size_t k = 0; k < RIVAL_PLACES; k++) {
            if (s->seen[i][k]) {
                print_message("%-8s %-12s %10lu times, died %lu times\n", steps[i], places[k], s->seen[i][k],
                              s->killed[i][k]);
            }
        }
    }
}

/* ---- dying ---- */

typedef struct killer {
    const rival *r;
    unsigned long seen;
    bool dying;
} killer;

static int kill_hook(void *context, file_op step, const char *path) {
    killer *k = context;
    if (step == FILE_OP_READ || step == FILE_OP_OPEN) {
        return 0;
    }
    size_t place = place_of(path);
    bool counts = !k->r->at_site || (k->r->step == step && k->r->place == place);
    k->seen += counts;
    bool now = counts && k->seen == k->r->kill_at;
    if (k->r->sites) {
        __atomic_fetch_add(&k->r->sites->seen[step][place], 1, __ATOMIC_RELAXED);
        __atomic_fetch_add(&k->r->sites->killed[step][place], now, __ATOMIC_RELAXED);
    }
    if (k->dying || (now && !(k->r->torn && step == FILE_OP_WRITE))) {
        raise(SIGKILL);
    }
    k->dying = now;
    return now ? -4 : 0;
}

void rival_at_rarest(rival *r, unsigned long n, uint64_t lot) {
    const rival_sites *s = r->sites;
    r->at_site = false;
    for (unsigned i = 0; i < RIVAL_STEPS; i++) {
        for (unsigned k = 0; k < RIVAL_PLACES; k++) {
            bool rarer = !r->at_site || s->killed[i][k] < s->killed[r->step][r->place];
            bool drawn = lot >> (i * RIVAL_PLACES + k) % 61 & 1;
            if (s->seen[i][k] && drawn && rarer) {
                r->at_site = true;
                r->step = i;
                r->place = k;
            }
        }
    }
    r->kill_at = n;
}

/* ---- what the processes do ---- */

static int saves(const rival *r, int report) {
    ckd_store *store;
    if (scene_open(&store, r->dir, CKD_OPEN_WRITE, NULL) != CKD_OK) {
        return 1;
    }
    for (uint64_t i = 0; i < r->count; i++) {
        scene s = scene_of(r->first + i);
        s.run = r->run;
        ckd_error err = {0};
        ckd_status status = scene_save(NULL, store, &s, &err);
        uint8_t byte = (uint8_t)i;
        bool clean = status == CKD_E_NOT_FOUND || status == CKD_E_BUSY;
        if (status != CKD_OK && !clean) {
            fprintf(stderr, "save of %s@%llu: %s (%s)\n", s.run, (unsigned long long)s.step, err.message,
                    err.file);
            return 2;
        }
        if (status == CKD_OK && write(report, &byte, 1) != 1) {
            return 3;
        }
    }
    ckd_store_close(store);
    return 0;
}

static int compacts(const rival *r, int report) {
    ckd_store *store;
    ckd_compaction *done;
    ckd_error err = {0};
    (void)report;
    if (scene_open(&store, r->dir, CKD_OPEN_WRITE, NULL) != CKD_OK) {
        return 1;
    }
    ckd_status status = ckd_compact(&done, store, &r->compaction, &err);
    if (status != CKD_OK && status != CKD_E_BUSY && status != CKD_E_NOT_FOUND && status != CKD_E_STATE) {
        fprintf(stderr, "compact: %s: %s (%s)\n", ckd_status_name(status), err.message, err.file);
        return 2;
    }
    for (size_t i = 0; status == CKD_OK && i < done->count; i++) {
        ckd_status left = done->items[i].left.status;
        if (left != CKD_OK && left != CKD_E_NOT_FOUND && left != CKD_E_EXISTS) {
            fprintf(stderr, "left: %s (%s)\n", done->items[i].left.message, done->items[i].left.file);
            return 3;
        }
    }
    if (status == CKD_OK) {
        ckd_compaction_free(done);
    }
    ckd_store_close(store);
    return 0;
}

static pid_t start(int (*act)(const rival *r, int report), const rival *r, int report) {
    fflush(NULL);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        killer k = {.r = r};
        file_set_fault_hook(kill_hook, &k);
        _exit(act(r, report));
    }
    return pid;
}

pid_t rival_saves(const rival *r, int report) {
    return start(saves, r, report);
}

pid_t rival_compacts(const rival *r, int report) {
    return start(compacts, r, report);
}

bool rival_was_killed(const char *what, pid_t pid) {
    int state;
    assert_int_equal(waitpid(pid, &state, 0), pid);
    bool finished = WIFEXITED(state) && WEXITSTATUS(state) == 0;
    if (!finished && !(WIFSIGNALED(state) && WTERMSIG(state) == SIGKILL)) {
        fail_msg("%s ended with %d, signal %d", what, WEXITSTATUS(state), WTERMSIG(state));
    }
    return !finished;
}

uint64_t rival_number(const char *name, uint64_t usual) {
    const char *text = getenv(name);
    return text ? strtoull(text, NULL, 10) : usual;
}
