/* The lease in the bucket: machines take turns in changing a store. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "objects/mirror/mirror.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "base/threads.h"

#define LEASES       "lease/"
#define LEASE_BYTES  256
#define PAUSE_MIN_NS UINT64_C(50000000)
#define PAUSE_MAX_NS UINT64_C(1000000000)
#define SETTLE_NS    UINT64_C(1000000000)

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
    char mirror[33], host[65], state[8];
    long long process;
    unsigned long long renewals;
} lease_text;

static void format_lease(char out[LEASE_BYTES], const object_mirror *m, bool held) {
    char host[65] = "";
    gethostname(host, sizeof(host) - 1);
    for (char *c = host; *c; c++) {
        *c = *c > ' ' && *c < 127 ? *c : '?';
    }
    snprintf(out, LEASE_BYTES, "ckptdelta-lease %s mirror %s host %s process %lld renewals %llu\n",
             held ? "held" : "free", m->id, host[0] ? host : "?", (long long)getpid(),
             (unsigned long long)m->lease.renewals);
}

static bool parse_lease(lease_text *out, const char *text) {
    return sscanf(text, "ckptdelta-lease %7s mirror %32s host %64s process %lld renewals %llu", out->state,
                  out->mirror, out->host, &out->process, &out->renewals) == 5;
}

static ckd_status put_lease(object_mirror *m, uint64_t number, bool held, bool only_new, ckd_error *err) {
    char text[LEASE_BYTES];
    m->lease.renewals++;
    format_lease(text, m, held);
    object_source source = {.data = text, .size = strlen(text)};
    uint64_t begun = clock_monotonic_ns();
    ckd_status status = only_new ? mirror_put_new(m, key_of(number).text, &source, NULL, err)
                                 : objects_put(m->objects, key_of(number).text, &source, NULL, err);
    if (status == CKD_OK) {
        atomic_store(&m->lease.renewed_ns, begun); /* others wait for LEASE_DEAD_NS from a later moment on */
    }
    return status;
}

/* The highest number, 0 if there is none. Others are left over. */
static ckd_status find_newest(uint64_t *number, uint64_t *oldest, const object_mirror *m, ckd_error *err) {
    object_query query = {.prefix = LEASES};
    ckd_status status = CKD_OK;
    char *after = NULL;
    *number = *oldest = 0;
    do {
        object_page page;
        query.after = after;
        status = objects_list(m->objects, &query, &page, NULL, err);
        for (size_t i = 0; i < page.count; i++) {
            uint64_t found = strtoull(page.items[i].key + strlen(LEASES), NULL, 16);
            *oldest = *oldest == 0 || found < *oldest ? found : *oldest;
            *number = found > *number ? found : *number;
        }
        free(after);
        after = page.next;
        page.next = NULL;
        object_page_free(&page);
    } while (status == CKD_OK && after);
    free(after);
    return status;
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

/* ---- renewing ---- */

/* Is the number still the highest one? Then the lease is ours, as nobody else writes this number. */
static ckd_status confirm(object_mirror *m, ckd_error *err) {
    lease *l = &m->lease;
    uint64_t asked_ns = clock_monotonic_ns(), newest, oldest;
    ckd_status status = find_newest(&newest, &oldest, m, err);
    if (status == CKD_OK && newest != l->number) {
        l->lost = true;
    } else if (status == CKD_OK) {
        l->confirmed_ns = asked_ns;
    }
    return status;
}

static void wait_until(lease *l, uint64_t at_ns) {
    struct timespec until = {.tv_sec = (time_t)(at_ns / 1000000000), .tv_nsec = (long)(at_ns % 1000000000)};
    pthread_cond_timedwait(&l->changed, &l->mutex, &until);
}

static void *renew(void *context) {
    object_mirror *m = context;
    lease *l = &m->lease;
    uint64_t last_ns = 0;
    pthread_mutex_lock(&l->mutex);
    while (!l->closing) {
        uint64_t now = clock_monotonic_ns();
        if (!l->held) {
            last_ns = 0;
            pthread_cond_wait(&l->changed, &l->mutex);
        } else if (last_ns == 0 || now < last_ns + LEASE_RENEW_NS) {
            last_ns = last_ns ? last_ns : now;
            wait_until(l, last_ns + LEASE_RENEW_NS);
        } else {
            /* A failure is made up for by the next attempt, or found by lease_check. */
            last_ns = now;
            if (!l->lost && confirm(m, NULL) == CKD_OK && !l->lost) {
                (void)put_lease(m, l->number, true, false, NULL);
            }
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
    pthread_cond_signal(&l->changed);
    pthread_mutex_unlock(&l->mutex);
    if (l->has_renewer) {
        pthread_join(l->renewer, NULL);
    }
    pthread_cond_destroy(&l->changed);
    pthread_mutex_destroy(&l->mutex);
}

static bool may_be_taken(const lease *l) {
    return clock_monotonic_ns() - atomic_load(&l->renewed_ns) > LEASE_DEAD_NS;
}

ckd_status lease_check(object_mirror *m, ckd_error *err) {
    lease *l = &m->lease;
    pthread_mutex_lock(&l->mutex);
    ckd_status status = CKD_OK;
    if (l->held && !l->lost && clock_monotonic_ns() - l->confirmed_ns > LEASE_RENEW_NS) {
        status = confirm(m, err);
    }
    if (status == CKD_OK && l->held && !l->lost && may_be_taken(l)) {
        status = put_lease(m, l->number, true, false, err);
        THEN(status, confirm(m, err));
    }
    if (status == CKD_OK && l->held && l->lost) {
        status = err_set(err, CKD_E_IO,
                         "another machine has taken the lease of %s, because this one did not renew it for %u s: "
                         "nothing more is changed; try again",
                         m->address, (unsigned)(LEASE_DEAD_NS / 1000000000));
    }
    pthread_mutex_unlock(&l->mutex);
    return status;
}

/* The mutex is not taken: the renewer holds it while it asks the place. */
static ckd_status still_ours(void *context, ckd_error *err) {
    const object_mirror *m = context;
    const lease *l = &m->lease;
    if (!atomic_load(&l->held) || (!atomic_load(&l->lost) && !may_be_taken(l))) {
        return CKD_OK;
    }
    return err_set(err, CKD_E_IO,
                   "another machine may have taken the lease of %s, because this one could not renew it for %u s: nothing "
                   "more is changed; try again",
                   m->address, (unsigned)(LEASE_DEAD_NS / 1000000000));
}

object_call lease_call(object_mirror *m) {
    return (object_call){.poll = still_ours, .context = m};
}

/* ---- acquiring and releasing ---- */

static ckd_status busy(const object_mirror *m, const char *text, ckd_error *err) {
    lease_text t;
    if (!parse_lease(&t, text)) {
        return err_set(err, CKD_E_BUSY, "another machine holds the lease of %s: try again later", m->address);
    }
    return err_set(err, CKD_E_BUSY,
                   "process %lld on %s holds the lease of %s: let it continue, or end it; a lease that is not renewed "
                   "for %u s is taken over",
                   t.process, t.host, m->address, (unsigned)(LEASE_DEAD_NS / 1000000000));
}

/* May the lease be taken? Notes what others wrote, to see later whether they still write. */
static bool may_take(bool *by_force, object_mirror *m, uint64_t number, const char *text) {
    lease *l = &m->lease;
    lease_text t;
    bool known = parse_lease(&t, text);
    uint64_t now = clock_monotonic_ns();
    *by_force = false;
    if (known && strcmp(t.state, "free") == 0) {
        return true;
    }
    *by_force = true;
    if (known && strcmp(t.mirror, m->id) == 0) {
        return true; /* its process held the local lock, which is ours now */
    }
    if (l->seen_number != number || strcmp(l->seen, text) != 0) {
        l->seen_number = number;
        l->seen_ns = now;
        memcpy(l->seen, text, sizeof(l->seen));
    }
    return now - l->seen_ns >= LEASE_DEAD_NS;
}

/*
 * Puts the number, and looks whether it is the highest one: since the last look, others may have used it and higher
 * ones, and removed it. EXISTS: somebody else was first.
 */
static ckd_status put_highest(object_mirror *m, uint64_t number, ckd_error *err) {
    uint64_t newest, oldest;
    const char *key = key_of(number).text;
    ckd_status status = put_lease(m, number, true, true, err);
    if (status != CKD_OK) {
        return status;
    }
    status = find_newest(&newest, &oldest, m, err);
    if (status == CKD_OK && newest != number) {
        status = err_set(err, CKD_E_EXISTS, "another machine has the lease of %s", m->address);
    }
    if (status != CKD_OK) {
        (void)objects_delete(m->objects, &key, 1, NULL, NULL);
    }
    return status;
}

static ckd_status hold(object_mirror *m, uint64_t number, uint64_t oldest, ckd_error *err) {
    lease *l = &m->lease;
    uint64_t asked_ns = clock_monotonic_ns();
    ckd_status status = put_highest(m, number, err);
    if (status != CKD_OK) {
        return status;
    }
    for (uint64_t i = oldest; i && i < number && number - i < 100; i++) {
        const char *key = key_of(i).text;
        (void)objects_delete(m->objects, &key, 1, NULL, NULL);
    }
    pthread_mutex_lock(&l->mutex);
    l->held = true;
    l->lost = false;
    l->number = number;
    l->confirmed_ns = asked_ns;
    if (!l->has_renewer) {
        status = thread_start(&l->renewer, renew, m, err);
        l->has_renewer = status == CKD_OK;
    }
    pthread_cond_signal(&l->changed);
    pthread_mutex_unlock(&l->mutex);
    if (status != CKD_OK) {
        lease_release(m);
    }
    return status;
}

/* EXISTS: somebody else was first. */
static ckd_status try_acquire(object_mirror *m, ckd_error *err) {
    uint64_t number, oldest;
    char text[LEASE_BYTES] = "";
    bool by_force = false, take = true;
    ckd_status status = find_newest(&number, &oldest, m, err);
    if (status == CKD_OK && number > 0) {
        status = read_lease(text, m, number, err);
        status = status == CKD_E_NOT_FOUND ? CKD_E_EXISTS : status;
        take = status == CKD_OK && may_take(&by_force, m, number, text);
    }
    if (status == CKD_OK && !take) {
        return busy(m, text, err);
    }
    if (status == CKD_OK && by_force) {
        /* A request of its last holder may still be on its way to the server, or the holder goes on just now. */
        char again[LEASE_BYTES];
        clock_sleep_ns(SETTLE_NS);
        status = read_lease(again, m, number, err);
        status = status == CKD_E_NOT_FOUND ? CKD_E_EXISTS : status;
        if (status == CKD_OK && strcmp(again, text) != 0) {
            return busy(m, again, err);
        }
    }
    THEN(status, hold(m, number + 1, oldest, err));
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
    pthread_mutex_lock(&l->mutex);
    bool ours = l->held && !l->lost;
    l->held = false;
    if (ours) {
        (void)put_lease(m, l->number, false, false, NULL); /* else it ends by itself */
    }
    pthread_cond_signal(&l->changed);
    pthread_mutex_unlock(&l->mutex);
}
