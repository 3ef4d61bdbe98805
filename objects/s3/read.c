/* Reads, sizes, lists and deletions. */
#include "objects/s3/s3.h"

#include <stdio.h>
#include <stdlib.h>

/* Before an object is called too short, its size must say so: an answer may have been that of another request. */
static ckd_status confirm_short(s3_place *p, const char *key, const object_range *range,
                                const object_call *call, ckd_error *err) {
    uint64_t size = 0;
    ckd_error why = {0};
    ckd_status status = s3_size(p, key, &size, call, &why);
    if (status != CKD_OK) {
        return err_from(err, status, &why);
    }
    return size < range->offset + range->size
               ? CKD_E_CORRUPT
               : err_set(
                     err, CKD_E_IO,
                     "cannot read it: s3://%s/%s%.200s: %s has %llu bytes of it, and answered as if there were "
                     "fewer: try again",
                     p->address.bucket, p->address.prefix, key, p->host, (unsigned long long)size);
}

static ckd_status short_object(const s3_request *r, ckd_error *err) {
    return err_set(err, CKD_E_CORRUPT, "%.300s has fewer bytes than were asked for: %zu of %zu came", r->key,
                   r->received, r->range.size);
}

ckd_status s3_get(void *place, const char *key, const object_range *range, const object_call *call,
                  ckd_error *err) {
    s3_place *p = place;
    s3_request r;
    if (range->size == 0) {
        uint64_t size = 0;
        ckd_status status = s3_size(place, key, &size, call, err);
        return status == CKD_OK && range->offset > size
                   ? err_set(err, CKD_E_CORRUPT, "%.300s has %llu bytes, fewer than were asked for", key,
                             (unsigned long long)size)
                   : status;
    }
    ckd_status status = s3_request_make(&r, p, "GET", key, err);
    r.range = *range;
    r.what = "read it";
    THEN(status, s3_send(p, &r, call, err));
    if (status == CKD_OK && r.received != range->size) {
        status = short_object(&r, err);
    }
    if (status == CKD_E_CORRUPT) {
        status = confirm_short(p, key, range, call, err);
    }
    s3_request_free(&r);
    return status;
}

ckd_status s3_size(void *place, const char *key, uint64_t *size, const object_call *call, ckd_error *err) {
    s3_place *p = place;
    s3_request r;
    ckd_status status = s3_request_make(&r, p, "HEAD", key, err);
    r.what = "get its size";
    THEN(status, s3_send(p, &r, call, err));
    if (status == CKD_OK && !r.measured) {
        status = err_set(err, CKD_E_CORRUPT, "%s gave no size for %.300s", p->host, r.key);
    }
    if (status == CKD_OK) {
        *size = r.length;
    }
    s3_request_free(&r);
    return status;
}

/* One page. *token: where to go on after an empty page, from the last answer, and for the next request. */
static ckd_status send_list(s3_place *p, const s3_listed *asked, object_page *out, char **token,
                            const object_call *call, ckd_error *err) {
    char limit[16];
    snprintf(limit, sizeof(limit), "%u", asked->limit);
    const char *from = *token ? "continuation-token" : *asked->after ? "start-after" : NULL;
    const char *pairs[] = {"list-type", "2",      "encoding-type", "url", "max-keys",
                           limit,       "prefix", asked->within,   from,  *token ? *token : asked->after,
                           NULL};
    char *next = NULL;
    s3_request r;
    ckd_status status = s3_request_make(&r, p, "GET", NULL, err);
    s3_query(&r.query, pairs);
    r.what = "list objects below it";
    THEN(status, s3_send(p, &r, call, err));
    THEN(status, s3_listing_parse(out, asked, &r.answer, &next, err));
    s3_request_free(&r);
    if (next && *token && strcmp(next, *token) == 0) {
        status = err_set(err, CKD_E_CORRUPT, "%s gave the same page of its list again", p->host);
    }
    free(*token);
    *token = next;
    return err_in_file(err, status, asked->within);
}

/* Empty pages have no key to continue after. */
ckd_status s3_list(void *place, const object_query *query, object_page *out, const object_call *call,
                   ckd_error *err) {
    s3_place *p = place;
    char prefix[2 * OBJECT_KEY_MAX + 4], after[6 * OBJECT_KEY_MAX];
    snprintf(prefix, sizeof(prefix), "%s%s", p->address.prefix, query->prefix);
    snprintf(after, sizeof(after), "%s%s", p->address.prefix, query->after);
    s3_listed asked = {p->address.prefix, *query->after ? after : "", prefix, query->limit};
    char *token = NULL;
    ckd_status status;
    do {
        status = send_list(p, &asked, out, &token, call, err);
    } while (status == CKD_OK && token);
    free(token);
    return status;
}

/* ---- deletions: one request for each, as not all servers have the one for many ---- */

typedef struct deletion {
    const s3_place *p;
    const char *const *keys;
} deletion;

static ckd_status prepare_deletion(void *context, size_t index, uint32_t slot, s3_request *r,
                                   ckd_error *err) {
    const deletion *d = context;
    (void)slot;
    ckd_status status = s3_request_make(r, d->p, "DELETE", d->keys[index], err);
    r->what = "delete it";
    r->quiet = true;
    return status;
}

/* A bucket that is not there is no success. */
static ckd_status finish_deletion(void *context, size_t index, s3_request *r, ckd_error *err) {
    const deletion *d = context;
    (void)index;
    return strcmp(r->problem.code, "NoSuchBucket") == 0 ? s3_fail(d->p, r, err) : CKD_OK;
}

ckd_status s3_delete(void *place, const char *const *keys, size_t count, const object_call *call,
                     ckd_error *err) {
    deletion d = {place, keys};
    s3_batch batch = {count, prepare_deletion, finish_deletion, &d};
    return s3_run(place, &batch, call, err);
}
