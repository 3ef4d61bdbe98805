/* Shared by both kinds of places: keys, limits of a call and of the rate, bytes of a source, pages of keys. */
#include "objects/backend.h"

#include <stdlib.h>

#define NAP_NS     UINT64_C(100000000) /* how often limits of the call are checked */
#define BURST_S    0.1
#define WAIT_MAX_S 60.0

ckd_status object_call_check(const object_call *call, const char *what, ckd_error *err) {
    if (call->deadline_ns && clock_monotonic_ns() >= call->deadline_ns) {
        return err_set(err, CKD_E_BUSY, "%s did not end before its deadline", what);
    }
    return call->poll ? call->poll(call->context, err) : CKD_OK;
}

ckd_status object_call_sleep(const object_call *call, uint64_t ns, const char *what, ckd_error *err) {
    uint64_t until = clock_monotonic_ns() + ns;
    ckd_status status = object_call_check(call, what, err);
    for (uint64_t now = clock_monotonic_ns(); now < until && status == CKD_OK; now = clock_monotonic_ns()) {
        clock_sleep_ns(until - now < NAP_NS ? until - now : NAP_NS);
        status = object_call_check(call, what, err);
    }
    return status;
}

/* ---- the rate ---- */

void object_rate_init(object_rate *r, uint64_t bytes_per_s, uint64_t now_ns) {
    *r = (object_rate){
        .bytes_per_s = bytes_per_s, .filled_ns = now_ns, .tokens = (double)bytes_per_s * BURST_S};
    pthread_mutex_init(&r->mutex, NULL);
}

void object_rate_destroy(object_rate *r) {
    pthread_mutex_destroy(&r->mutex);
}

uint64_t object_rate_take(object_rate *r, uint64_t size, uint64_t now_ns) {
    if (r->bytes_per_s == 0 || size == 0) {
        return 0;
    }
    pthread_mutex_lock(&r->mutex);
    double rate = (double)r->bytes_per_s, max = rate * BURST_S, wait_s = 0;
    if (now_ns > r->filled_ns) { /* another thread may have come with a later time */
        r->tokens += (double)(now_ns - r->filled_ns) * 1e-9 * rate;
        r->filled_ns = now_ns;
    }
    r->tokens = r->tokens < max ? r->tokens : max;
    bool taken = r->tokens > 0;
    if (taken) {
        r->tokens -= (double)size;
    } else {
        wait_s = -r->tokens / rate;
    }
    pthread_mutex_unlock(&r->mutex);
    return taken ? 0 : (uint64_t)((wait_s < WAIT_MAX_S ? wait_s : WAIT_MAX_S) * 1e9) + 1;
}

ckd_status object_rate_wait(object_rate *r, uint64_t size, const object_call *call, const char *what,
                            ckd_error *err) {
    ckd_status status = CKD_OK;
    uint64_t wait;
    while (status == CKD_OK && (wait = object_rate_take(r, size, clock_monotonic_ns())) > 0) {
        status = object_call_sleep(call, wait, what, err);
    }
    return status;
}

/* ---- sources, pages ---- */

const void *object_source_bytes(const object_source *from, uint64_t at, size_t size, bytes *scratch,
                                ckd_error *err) {
    if (!from->file) {
        return size > 0 ? (const uint8_t *)from->data + at : (const uint8_t *)"";
    }
    void *to = bytes_scratch(scratch, size > 0 ? size : 1, "a part of an object", err);
    if (!to || file_read_at(from->file, from->offset + at, to, size, err) != CKD_OK) {
        return NULL;
    }
    return to;
}

ckd_status object_page_add(object_page *page, const object_item *item, ckd_error *err) {
    ckd_status status = ARRAY_GROW(page->items, page->capacity, page->count + 1, "keys of objects", err);
    if (status != CKD_OK) {
        return status;
    }
    object_item copy = *item;
    copy.key = strdup(item->key);
    if (!copy.key) {
        return err_nomem(err, strlen(item->key), "the key of an object");
    }
    page->items[page->count++] = copy;
    return CKD_OK;
}

void object_page_free(object_page *page) {
    for (size_t i = 0; i < page->count; i++) {
        free(page->items[i].key);
    }
    free(page->items);
    free(page->next);
    *page = (object_page){0};
}

/* ---- keys: names that a file system, a URL and a signature all leave as they are ---- */

static bool is_key_byte(char c) {
    return (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '.' ||
           c == '_' || c == '-';
}

/* Checks all parts between slashes. The last one may be empty if `open_end`. */
static bool parts_valid(const char *name, bool open_end) {
    size_t part = 0, i = 0;
    for (; name[i] && i <= OBJECT_KEY_MAX; i++) {
        if (name[i] == '/') {
            if (part == 0) {
                return false;
            }
            part = 0;
            continue;
        }
        if (!is_key_byte(name[i]) || (part == 0 && name[i] == '.') || ++part > OBJECT_PART_MAX) {
            return false;
        }
    }
    return i <= OBJECT_KEY_MAX && (part > 0 || open_end);
}

bool object_key_valid(const char *key) {
    return key && parts_valid(key, false);
}

bool object_prefix_valid(const char *prefix) {
    return prefix && parts_valid(prefix, true);
}

bool objects_address_is_remote(const char *address) {
    return address && strncmp(address, "s3://", 5) == 0;
}
