/* The store's locks. A waiting caller learns who holds the lock, because the holder may be a stopped process. */
#include <stdio.h>
#include <unistd.h>

#include "engine/store/handle.h"

#define REPORT_AFTER_MS 1000

typedef struct holder_text {
    char text[160];
} holder_text;

static holder_text holder_of(const char *path) {
    holder_text out;
    lock_holder h;
    char others[32] = "";
    if (!lock_find_holder(&h, path)) {
        snprintf(out.text, sizeof(out.text), "a process of another user, container or machine");
        return out;
    }
    if (h.others) {
        snprintf(others, sizeof(others), " and %u others", (unsigned)h.others);
    }
    if (h.stopped) {
        snprintf(out.text, sizeof(out.text),
                 "process %lld (%s), which is stopped (kill -CONT %lld resumes it)", (long long)h.process,
                 h.command, (long long)h.process);
    } else if (h.process == (int64_t)getpid()) {
        snprintf(out.text, sizeof(out.text), "another handle of this process%s", others);
    } else {
        snprintf(out.text, sizeof(out.text), "process %lld (%s)%s", (long long)h.process, h.command, others);
    }
    return out;
}

/* Another machine holds the lock, and the error says which one. */
static bool is_held_elsewhere(const ckd_store *store, const char *path) {
    lock_holder local;
    return store_is_remote(store) && !lock_find_holder(&local, path);
}

static void report_wait(const ckd_store *store, const char *name, const char *path, uint32_t timeout_ms,
                        const ckd_error *why) {
    unsigned seconds = (unsigned)(timeout_ms + 999) / 1000;
    if (is_held_elsewhere(store, path)) {
        store_message(store, "waiting up to %u s: %s", seconds, why->message);
    } else {
        store_message(store, "waiting up to %u s for the lock %s, held by %s", seconds, name,
                      holder_of(path).text);
    }
}

/* Waits for a second, then sends a message and waits for the rest of the time. */
static ckd_status wait_for(file_lock **out, const ckd_store *store, const char *name, lock_kind kind,
                           uint32_t timeout_ms, ckd_error *err) {
    pathname p = path_in(store->path, name);
    bool create = kind == LOCK_EXCLUSIVE || store->mode != CKD_OPEN_READ;
    uint32_t first = timeout_ms < REPORT_AFTER_MS ? timeout_ms : REPORT_AFTER_MS;
    ckd_error why = {0};
    ckd_status status = lock_acquire(out, p.text, kind, create, first, &why);
    if (status == CKD_E_BUSY && timeout_ms > first) {
        report_wait(store, name, p.text, timeout_ms, &why);
        status = lock_acquire(out, p.text, kind, create, timeout_ms - first, &why);
    }
    err_from(err, status, &why);
    if (status == CKD_E_BUSY && timeout_ms > 0 && !is_held_elsewhere(store, p.text)) {
        err_set(err, status,
                "the lock %s is held by %s and was not released within %u ms: let that process continue, or "
                "end it, then try again",
                p.text, holder_of(p.text).text, (unsigned)timeout_ms);
        err_in_file(err, status, p.text);
    }
    return status;
}

ckd_status store_lock_publish_within(file_lock **out, const ckd_store *store, uint32_t timeout_ms,
                                     ckd_error *err) {
    ckd_status status = wait_for(out, store, FILE_PUBLISH_LOCK, LOCK_EXCLUSIVE, timeout_ms, err);
    if (status == CKD_OK && identity_was_replaced(store, err)) {
        lock_release(*out);
        *out = NULL;
        return CKD_E_STATE;
    }
    /* Every writer takes this lock first, so the error is about the whole store. */
    if (status == CKD_E_READ_ONLY && err) {
        err_sys(err, err->sys_errno, path_in(store->path, FILE_PUBLISH_LOCK).text,
                "the store '%s' is read-only for this process; open it for reading", store->path);
    }
    return status;
}

ckd_status store_lock_publish(file_lock **out, const ckd_store *store, ckd_error *err) {
    return store_lock_publish_within(out, store, store->options.lock_timeout_ms, err);
}

ckd_status store_lock_reader_within(file_lock **out, const ckd_store *store, uint32_t timeout_ms,
                                    ckd_error *err) {
    ckd_error why = {0};
    ckd_status status = wait_for(out, store, FILE_READER_LOCK, LOCK_SHARED, timeout_ms, &why);
    /* The store may be a copy without lock files on read-only media. Nothing is unlinked there. */
    return store->mode == CKD_OPEN_READ ? err_except(err, status, CKD_E_NOT_FOUND, &why)
                                        : err_from(err, status, &why);
}

ckd_status store_lock_reader(file_lock **out, const ckd_store *store, ckd_error *err) {
    return store_lock_reader_within(out, store, store->options.lock_timeout_ms, err);
}

ckd_status store_lock_unlinker(file_lock **out, unlinker_wait *w, const ckd_store *store, ckd_error *err) {
    pathname p = path_in(store->path, FILE_READER_LOCK);
    ckd_status status = lock_acquire(out, p.text, LOCK_EXCLUSIVE, true, 0, err);
    if (status != CKD_E_BUSY) {
        return status;
    }
    uint64_t now = clock_monotonic_ns();
    w->begun_ns = w->begun_ns ? w->begun_ns : now;
    if (!w->reported && (now - w->begun_ns) / 1000000 >= REPORT_AFTER_MS) {
        w->reported = true;
        store_message(store,
                      "waiting for loads and saves that may read the files to be removed: %s is held by %s",
                      FILE_READER_LOCK, holder_of(p.text).text);
    }
    return err_set(
        err, CKD_E_BUSY,
        "running loads or saves may still read the files to be removed; try again when they have ended");
}
