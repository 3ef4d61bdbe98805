/* Puts in one request: plain, and only if absent. */
#include "objects/s3/s3.h"

#include <stdio.h>
#include <stdlib.h>

ckd_status s3_writer_make(char out[S3_WRITER_SIZE], ckd_error *err) {
    uint64_t id[2];
    ckd_status status = random_bytes(id, sizeof(id), err);
    snprintf(out, S3_WRITER_SIZE, "%016llx%016llx", (unsigned long long)id[0], (unsigned long long)id[1]);
    return status;
}

ckd_status s3_put_request(s3_request *r, const s3_place *p, const char *key, const char *writer,
                          bool condition, ckd_error *err) {
    ckd_status status = s3_request_make(r, p, "PUT", key, err);
    r->what = "write it";
    THEN(status, s3_request_header(r, "Content-Type", "application/octet-stream", err));
    THEN(status, s3_request_header(r, S3_WRITER_HEADER, writer, err));
    if (condition) {
        THEN(status, s3_request_header(r, "If-None-Match", "*", err));
    }
    return status;
}

ckd_status s3_put(void *place, const char *key, const object_source *from, const object_call *call,
                  ckd_error *err) {
    s3_place *p = place;
    if (from->size > p->part_size) {
        return s3_put_parts(p, key, from, call, err);
    }
    char writer[S3_WRITER_SIZE];
    bytes scratch = {0};
    s3_request r = {0};
    ckd_error why = {0};
    ckd_status status = s3_writer_make(writer, err);
    THEN(status, s3_put_request(&r, p, key, writer, false, err));
    if (status == CKD_OK) {
        r.body = object_source_bytes(from, 0, (size_t)from->size, &scratch, &why);
        r.body_size = (size_t)from->size;
        status = r.body ? s3_send(p, &r, call, err) : err_from(err, why.status, &why);
    }
    s3_request_free(&r);
    bytes_free(&scratch);
    return status;
}

/* ---- only if absent ---- */

typedef struct new_put {
    s3_place *p;
    const char *key, *writer;
    const void *data;
    size_t size;
    const object_call *call;
    uint32_t tried;
} new_put;

typedef enum owner { OWNER_NONE, OWNER_US, OWNER_OTHER } owner;

/* A server that keeps no metadata: the bytes tell. Writers that compete put different ones. */
static ckd_status compare_content(const new_put *n, uint64_t size, owner *out, ckd_error *err) {
    *out = OWNER_OTHER;
    if (size != n->size) {
        return CKD_OK;
    }
    bytes there = {0};
    void *to = bytes_scratch(&there, size ? size : 1, "an object to compare", err);
    object_range whole = {0, to, n->size};
    ckd_status status = to ? s3_get(n->p, n->key, &whole, n->call, err) : CKD_E_NOMEM;
    if (status == CKD_OK && (size == 0 || memcmp(to, n->data, n->size) == 0)) {
        *out = OWNER_US;
    }
    bytes_free(&there);
    return status;
}

/* Whose object has the key now? */
static ckd_status find_owner(const new_put *n, owner *out, ckd_error *err) {
    s3_request r;
    ckd_status status = s3_request_make(&r, n->p, "HEAD", n->key, err);
    r.what = "see who wrote it";
    r.quiet = true;
    THEN(status, s3_send(n->p, &r, n->call, err));
    *out = OWNER_NONE;
    if (status == CKD_OK && s3_succeeded(&r)) {
        *out = strcmp(r.writer, n->writer) == 0 ? OWNER_US : OWNER_OTHER;
        if (!r.writer[0]) {
            status = r.measured
                         ? compare_content(n, r.length, out, err)
                         : err_set(err, CKD_E_CORRUPT, "%s gave no size for %.300s", n->p->host, r.key);
        }
    }
    s3_request_free(&r);
    return status;
}

static ckd_status lost(const new_put *n, ckd_error *err) {
    ckd_status status = err_set(err, CKD_E_EXISTS, "s3://%s/%s%.300s exists already", n->p->address.bucket,
                                n->p->address.prefix, n->key);
    return err_in_file(err, status, n->key);
}

/* One attempt. *again: try once more, as `err` says why. *maybe: the object may have been written. */
static ckd_status attempt(const new_put *n, bool *again, bool *maybe, uint64_t *pause, ckd_error *err) {
    s3_request r;
    *again = false;
    ckd_status status = s3_put_request(&r, n->p, n->key, n->writer, true, err);
    r.body = n->data;
    r.body_size = n->size;
    r.once = true;
    r.attempts = n->tried;
    bool earlier = *maybe, sent = status == CKD_OK;
    THEN(status, s3_send(n->p, &r, n->call, err));
    *maybe = earlier || (sent && status != CKD_OK);
    if (status == CKD_OK && (!s3_succeeded(&r) || r.problem.code[0])) {
        owner now = OWNER_NONE;
        bool refused = r.failure == CURLE_OK && (r.status == 412 || r.status == 409);
        bool sent_nothing = r.failure == CURLE_COULDNT_CONNECT || r.failure == CURLE_COULDNT_RESOLVE_HOST;
        bool unclear = (r.failure != CURLE_OK && !sent_nothing) || r.status >= 500 || s3_succeeded(&r) ||
                       r.status == 408;
        if (strcmp(r.problem.code, "ExpiredToken") == 0) {
            s3_wallet_renew(&n->p->wallet, r.keys_serial);
        }
        /* Even the first refusal may be one of our own: networks deliver requests twice. */
        *maybe = earlier || unclear;
        status = refused || *maybe ? find_owner(n, &now, err) : CKD_OK;
        if (status == CKD_OK && now != OWNER_US) {
            *again = now == OWNER_NONE && (s3_passes(&r) || r.status == 412);
            status = now == OWNER_OTHER ? lost(n, err) : s3_fail(n->p, &r, err);
            *pause = r.retry_after_s;
        }
    }
    s3_request_free(&r);
    return status;
}

/*
 * A request whose answer is lost may have been carried out, or may be yet. All attempts have the same mark and bytes,
 * so it does not matter which of them the server takes.
 */
ckd_status s3_put_new(void *place, const char *key, const object_source *from, const object_call *call,
                      ckd_error *err) {
    char writer[S3_WRITER_SIZE];
    bytes scratch = {0};
    ckd_status status = s3_writer_make(writer, err);
    new_put n = {place, key, writer, NULL, (size_t)from->size, call, 0};
    ckd_error why = {0};
    if (status == CKD_OK) {
        n.data = object_source_bytes(from, 0, n.size, &scratch, &why);
        status = n.data ? CKD_OK : err_from(err, why.status, &why);
    }
    bool again = n.data != NULL, maybe = false;
    for (uint32_t i = 1; again; i++) {
        uint64_t pause = 0;
        n.tried = i - 1;
        status = attempt(&n, &again, &maybe, &pause, &why);
        again = again && i < n.p->attempts;
        if (again) {
            ckd_status ended = object_call_sleep(call, s3_pause_ns(n.p, i, pause), "a put", &why);
            again = ended == CKD_OK;
            status = again ? status : ended;
        }
        if (status != CKD_OK && !again) {
            (void)err_from(err, status, &why);
        }
    }
    if (status != CKD_OK && status != CKD_E_EXISTS && maybe && err) {
        size_t size = strlen(err->message);
        snprintf(err->message + size, sizeof(err->message) - size,
                 "; the object may have been written anyway");
    }
    bytes_free(&scratch);
    return status;
}
