/* The lease in the bucket: machines take turns in changing a store. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "objects/mirror/mirror.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "base/threads.h"

#define LEASES       "lease/"
#define LEASE_BYTES  320
#define PAUSE_MIN_NS UINT64_C(50000000)
#define PAUSE_MAX_NS UINT64_C(1000000000)
#define OLDEST_MAX   100 /* leases that are removed at a time */
#define SECOND_NS    UINT64_C(1000000000)

/* Time goes on while the machine sleeps. */
static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_BOOTTIME, &t);
    return (uint64_t)t.tv_sec * SECOND_NS + (uint64_t)t.tv_nsec;
}

typedef struct lease_key {
    char text[40];
} lease_key;

static lease_key key_of(uint64_t number) {
    lease_key k;
    snprintf(k.text, sizeof(k.text), LEASES "%016llx", (unsigned long long)number);
    return k;
}

/* ---- the content of a lease ---- */

typedef struct lease_text {
    char state[8], mirror[33], opened[17], boot[41], host[65];
    long long process;
    unsigned long long renewals;
} lease_text;

/* A word without spaces: of a file's first line, or of a host's name. */
static void make_word(char *text) {
    text[strcspn(text, "\n")] = 0;
    for (char *c = text; *c; c++) {
        *c = *c > ' ' && *c < 127 ? *c : '?';
    }
    if (!text[0]) {
        strcpy(text, "?");
    }
}

static void format_lease(char out[LEASE_BYTES], const object_mirror *m, bool held) {
    char host[65] = "";
    gethostname(host, sizeof(host) - 1);
    make_word(host);
    snprintf(out, LEASE_BYTES,
             "ckptdelta-lease %s mirror %s opened %s boot %s host %s process %lld renewals %llu\n",
             held ? "held" : "free", m->id, m->opened, m->boot, host, (long long)getpid(),
             (unsigned long long)m->lease.renewals);
}

static bool parse_lease(lease_text *out, const char *text) {
    return sscanf(
               text,
               "ckptdelta-lease %7s mirror %32s opened %16s boot %40s host %64s process %lld renewals %llu",
               out->state, out->mirror, out->opened, out->boot, out->host, &out->process,
               &out->renewals) == 7;
}

static ckd_status put_lease(object_mirror *m, uint64_t number, bool held, bool only_new,
                            const object_call *call, ckd_error *err) {
    char text[LEASE_BYTES];
    format_lease(text, m, held);
    object_source source = {.data = text, .size = strlen(text)};
    return only_new ? mirror_put_new(m, key_of(number).text, &source, call, err)
                    : objects_put(m->objects, key_of(number).text, &source, call, err);
}

/* The highest number, and the lowest; 0 if there is none. Those below the highest are left over. */
typedef struct numbers {
    uint64_t newest, oldest;
} numbers;

static ckd_status add_number(void *to, const object_item *item, ckd_error *err) {
    numbers *n = to;
    (void)err;
    uint64_t found = strtoull(item->key + strlen(LEASES), NULL, 16);
    n->oldest = n->oldest == 0 || found < n->oldest ? found : n->oldest;
    n->newest = found > n->newest ? found : n->newest;
    return CKD_OK;
}

static ckd_status find_numbers(numbers *out, const object_mirror *m, ckd_error *err) {
    *out = (numbers){0, 0};
    return mirror_each_object(m, LEASES, add_number, out, err);
}

/* NOT_FOUND: it was removed meanwhile. */
static ckd_status read_lease(char out[LEASE_BYTES], const object_mirror *m, uint64_t number, ckd_error *err) {
    uint64_t size;
    memset(out, 0, LEASE_BYTES);
    ckd_status status = objects_size(m->objects, key_of(number).text, &size, NULL, err);
    if (status == CKD_OK) {
        object_range range = {.to = out, .size = size < LEASE_BYTES - 1 ? (size_t)size : LEASE_BYTES - 1};
        status = objects_get(m->objects, key_of(number).text, &range, NULL, err);
    }
    return status;
}

/* ---- holding ---- */

static ckd_status lost(const object_mirror *m, ckd_error *err) {
    return err_set(
        err, CKD_E_IO,
        "the lease of %s was not renewed for %u s, so another machine may have taken it: this process "
        "changes nothing more there; try again",
        m->address, (unsigned)(LEASE_VALID_NS / SECOND_NS));
}

/* Nobody else takes the lease before LEASE_DEAD_NS have passed since it was written. */
static ckd_status check(object_mirror *m, ckd_error *err) {
    lease *l = &m->lease;
    pthread_mutex_lock(&l->mutex);
    bool valid = !l->held || now_ns() < l->written_ns + LEASE_VALID_NS;
    pthread_mutex_unlock(&l->mutex);
    return valid ? CKD_OK : lost(m, err);
}

static ckd_status poll(void *context, ckd_error *err) {
    return check(context, err);
}

object_call lease_call(object_mirror *m) {
    return (object_call){.poll = poll, .context = m};
}

ckd_status lease_check(object_mirror *m, ckd_error *err) {
    return check(m, err);
}

static void wait_until(lease *l, uint64_t at_ns) {
    struct timespec until = {.tv_sec = (time_t)(at_ns / SECOND_NS), .tv_nsec = (long)(at_ns % SECOND_NS)};
    pthread_cond_timedwait(&l->changed, &l->mutex, &until);
}

/* With the mutex held; releases it meanwhile. A failure is made up for by the next attempt, or found by lease_check. */
static void renew_once(object_mirror *m) {
    lease *l = &m->lease;
    uint64_t number = l->number, begun_ns = now_ns();
    l->renewals++;
    if (begun_ns >= l->written_ns + LEASE_VALID_NS) {
        return; /* lost */
    }
    pthread_mutex_unlock(&l->mutex);
    object_call call = {.deadline_ns = clock_monotonic_ns() + LEASE_RENEW_NS};
    ckd_status status = put_lease(m, number, true, false, &call, NULL);
    pthread_mutex_lock(&l->mutex);
    if (status == CKD_OK && l->held && l->number == number) {
        l->written_ns = begun_ns;
    }
}

static void *renew(void *context) {
    object_mirror *m = context;
    lease *l = &m->lease;
    pthread_mutex_lock(&l->mutex);
    while (!l->closing) {
        if (!l->held) {
            pthread_cond_wait(&l->changed, &l->mutex);
            continue;
        }
        uint64_t number = l->number;
        wait_until(l, clock_monotonic_ns() + LEASE_RENEW_NS);
        if (l->held && l->number == number && !l->closing) {
            l->renewing = true;
            renew_once(m);
            l->renewing = false;
            pthread_cond_broadcast(&l->changed);
        }
    }
    pthread_mutex_unlock(&l->mutex);
    return NULL;
}

void lease_init(lease *l) {
    pthread_condattr_t monotonic;
    pthread_mutex_init(&l->mutex, NULL);
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&l->changed, &monotonic);
    pthread_condattr_destroy(&monotonic);
}

void lease_destroy(lease *l) {
    pthread_mutex_lock(&l->mutex);
    l->closing = true;
    pthread_cond_broadcast(&l->changed);
    pthread_mutex_unlock(&l->mutex);
    if (l->has_renewer) {
        pthread_join(l->renewer, NULL);
    }
    pthread_cond_destroy(&l->changed);
    pthread_mutex_destroy(&l->mutex);
}

/* ---- acquiring and releasing ---- */

static ckd_status busy(const object_mirror *m, const char *text, ckd_error *err) {
    lease_text t;
    if (!parse_lease(&t, text)) {
        return err_set(err, CKD_E_BUSY, "another machine holds the lease of %s: try again later", m->address);
    }
    return err_set(
        err, CKD_E_BUSY,
        "process %lld on %s holds the lease of %s: let it continue, or end it; a lease that is not renewed "
        "for %u s is taken over",
        t.process, t.host, m->address, (unsigned)(LEASE_DEAD_NS / SECOND_NS));
}

/*
 * Has its holder ended? It was this mirror, in a process that opened it before and has released it, or in a process of
 * this machine that is gone. The id of the boot tells copies of a machine from each other.
 */
static bool has_ended(const object_mirror *m, const lease_text *t) {
    if (strcmp(t->mirror, m->id) != 0 || strcmp(t->boot, m->boot) != 0 || t->boot[0] == '?') {
        return false;
    }
    return strcmp(t->opened, m->opened) == 0 || (kill((pid_t)t->process, 0) != 0 && errno == ESRCH);
}

/*
 * May the lease be taken? *settle: not before LEASE_SETTLE_NS have passed. Notes what others wrote, to see later
 * whether they still write.
 */
static bool may_take(bool *settle, object_mirror *m, uint64_t number, const char *text) {
    lease *l = &m->lease;
    lease_text t;
    bool known = parse_lease(&t, text);
    *settle = known && strcmp(t.state, "free") != 0 && has_ended(m, &t);
    if (*settle || (known && strcmp(t.state, "free") == 0)) {
        return true;
    }
    uint64_t now = now_ns();
    if (l->seen_number != number || strcmp(l->seen, text) != 0) {
        l->seen_number = number;
        l->seen_ns = now;
        snprintf(l->seen, sizeof(l->seen), "%s", text);
    }
    return now - l->seen_ns >= LEASE_DEAD_NS;
}

static void remove_lease(object_mirror *m, uint64_t number) {
    lease_key k = key_of(number);
    const char *key = k.text;
    (void)objects_delete(m->objects, &key, 1, NULL, NULL);
}

/*
 * Puts the number, and looks whether it is the highest one: since the last look, others may have used it and higher
 * ones, and removed it. EXISTS: somebody else was first.
 */
static ckd_status put_highest(object_mirror *m, uint64_t number, ckd_error *err) {
    numbers n;
    ckd_status status = put_lease(m, number, true, true, NULL, err);
    if (status != CKD_OK) {
        return status;
    }
    status = find_numbers(&n, m, err);
    if (status == CKD_OK && n.newest != number) {
        status = err_set(err, CKD_E_EXISTS, "another machine has the lease of %s", m->address);
    }
    if (status != CKD_OK) {
        remove_lease(m, number);
    }
    return status;
}

static ckd_status hold(object_mirror *m, uint64_t number, uint64_t oldest, ckd_error *err) {
    lease *l = &m->lease;
    uint64_t begun_ns = now_ns();
    ckd_status status = put_highest(m, number, err);
    if (status == CKD_OK && now_ns() >= begun_ns + LEASE_VALID_NS) {
        remove_lease(m, number);
        status = lost(m, err);
    }
    if (status != CKD_OK) {
        return status;
    }
    for (uint64_t i = oldest; i && i < number && i < oldest + OLDEST_MAX; i++) {
        remove_lease(m, i);
    }
    pthread_mutex_lock(&l->mutex);
    l->held = true;
    l->number = number;
    l->written_ns = begun_ns;
    if (!l->has_renewer) {
        status = thread_start(&l->renewer, renew, m, err);
        l->has_renewer = status == CKD_OK;
    }
    pthread_cond_broadcast(&l->changed);
    pthread_mutex_unlock(&l->mutex);
    if (status != CKD_OK) {
        lease_release(m);
    }
    return status;
}

/* EXISTS: somebody else was first. */
static ckd_status try_acquire(object_mirror *m, ckd_error *err) {
    numbers n;
    char text[LEASE_BYTES] = "";
    bool settle = false, take = true;
    ckd_status status = find_numbers(&n, m, err);
    if (status == CKD_OK && n.newest > 0) {
        status = read_lease(text, m, n.newest, err);
        status = status == CKD_E_NOT_FOUND ? CKD_E_EXISTS : status;
        take = status == CKD_OK && may_take(&settle, m, n.newest, text);
    }
    if (status == CKD_OK && !take) {
        return busy(m, text, err);
    }
    if (status == CKD_OK && settle) {
        clock_sleep_ns(LEASE_SETTLE_NS);
    }
    THEN(status, hold(m, n.newest + 1, n.oldest, err));
    return status;
}

ckd_status lease_acquire(object_mirror *m, uint32_t timeout_ms, ckd_error *err) {
    uint64_t deadline = clock_monotonic_ns() + (uint64_t)timeout_ms * 1000000, pause = PAUSE_MIN_NS;
    for (;;) {
        ckd_status status = try_acquire(m, err);
        uint64_t now = clock_monotonic_ns();
        bool again = status == CKD_E_BUSY || status == CKD_E_EXISTS;
        if (again && now >= deadline) {
            return status == CKD_E_BUSY ? status : busy(m, "", err);
        }
        if (!again) {
            return status;
        }
        clock_sleep_ns(pause < deadline - now ? pause : deadline - now);
        pause = pause * 2 < PAUSE_MAX_NS ? pause * 2 : PAUSE_MAX_NS;
    }
}

void lease_release(object_mirror *m) {
    lease *l = &m->lease;
    object_call call = {.deadline_ns = clock_monotonic_ns() + LEASE_RENEW_NS};
    pthread_mutex_lock(&l->mutex);
    bool ours = l->held && now_ns() < l->written_ns + LEASE_VALID_NS;
    uint64_t number = l->number;
    l->held = false;
    pthread_cond_broadcast(&l->changed);
    while (l->renewing) { /* or it would write "held" behind "free" */
        pthread_cond_wait(&l->changed, &l->mutex);
    }
    pthread_mutex_unlock(&l->mutex);
    if (ours) {
        (void)put_lease(m, number, false, false, &call, NULL); /* else it ends by itself */
    }
}
