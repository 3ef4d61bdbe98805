/* Puts in parts, several at a time, and the removal of uploads that were never completed. */
#include "objects/s3/s3.h"

#include <stdio.h>
#include <stdlib.h>

typedef struct parts {
    s3_place *p;
    const char *key;
    const object_source *from;
    uint64_t part_size;
    size_t count;
    char id[1024];
    char (*etags)[80];
    bytes *buffers; /* one for each connection */
    char writer[S3_WRITER_SIZE];
} parts;

static ckd_status begin_upload(parts *u, const object_call *call, ckd_error *err) {
    s3_request r;
    ckd_status status = s3_request_make(&r, u->p, "POST", u->key, err);
    r.what = "begin an upload of it";
    s3_query(&r.query, (const char *const[]){"uploads", "", NULL});
    THEN(status, s3_request_header(&r, "Content-Type", "application/octet-stream", err));
    THEN(status, s3_request_header(&r, S3_WRITER_HEADER, u->writer, err));
    THEN(status, s3_send(u->p, &r, call, err));
    THEN(status, s3_text_parse(u->id, sizeof(u->id), "UploadId", r.answer.data, r.answer.size, err));
    s3_request_free(&r);
    return status;
}

static ckd_status prepare_part(void *context, size_t index, uint32_t slot, s3_request *r, ckd_error *err) {
    parts *u = context;
    char number[16];
    uint64_t at = index * u->part_size, left = u->from->size - at;
    snprintf(number, sizeof(number), "%zu", index + 1);
    ckd_status status = s3_request_make(r, u->p, "PUT", u->key, err);
    s3_query(&r->query, (const char *const[]){"partNumber", number, "uploadId", u->id, NULL});
    r->what = "write a part of it";
    THEN(status, s3_request_header(r, "Content-Type", "application/octet-stream", err));
    if (status == CKD_OK) {
        ckd_error why = {0};
        r->body_size = (size_t)(left < u->part_size ? left : u->part_size);
        r->body = object_source_bytes(u->from, at, r->body_size, &u->buffers[slot], &why);
        status = r->body ? CKD_OK : err_from(err, why.status, &why);
    }
    return status;
}

static ckd_status finish_part(void *context, size_t index, s3_request *r, ckd_error *err) {
    parts *u = context;
    if (!r->etag[0] || strpbrk(r->etag, "<>&")) {
        return err_set(err, CKD_E_CORRUPT, "%s gave no tag for a part of %.200s", u->p->host, u->key);
    }
    memcpy(u->etags[index], r->etag, sizeof(r->etag));
    return CKD_OK;
}

static void list_parts(bytes *out, const parts *u) {
    char line[200];
    static const char head[] = "<CompleteMultipartUpload xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\">";
    bytes_put(out, head, strlen(head));
    for (size_t i = 0; i < u->count; i++) {
        int size = snprintf(line, sizeof(line), "<Part><ETag>%s</ETag><PartNumber>%zu</PartNumber></Part>",
                            u->etags[i], i + 1);
        bytes_put(out, line, (size_t)size);
    }
    bytes_put(out, "</CompleteMultipartUpload>", 26);
}

/* Has an earlier attempt, whose answer was lost, completed the upload? */
static bool is_complete(const parts *u, const object_call *call) {
    s3_request r;
    ckd_error ignored = {0};
    ckd_status status = s3_request_make(&r, u->p, "HEAD", u->key, &ignored);
    r.what = "look at it";
    THEN(status, s3_send(u->p, &r, call, &ignored));
    bool ours =
        status == CKD_OK && r.measured && r.length == u->from->size && strcmp(r.writer, u->writer) == 0;
    s3_request_free(&r);
    return ours;
}

/* *unclear: the status came, which comes before the work is done, but not the whole answer that says how it ended. */
static ckd_status send_completion(const parts *u, const bytes *list, bool *unclear, const object_call *call,
                                  ckd_error *err) {
    s3_request r;
    char etag[1024];
    ckd_status status = s3_request_make(&r, u->p, "POST", u->key, err);
    s3_query(&r.query, (const char *const[]){"uploadId", u->id, NULL});
    r.what = "complete an upload of it";
    r.body = list->data;
    r.body_size = list->size;
    THEN(status, s3_request_header(&r, "Content-Type", "application/xml", err));
    THEN(status, s3_send(u->p, &r, call, err));
    *unclear = status == CKD_OK &&
               s3_text_parse(etag, sizeof(etag), "ETag", r.answer.data, r.answer.size, NULL) != CKD_OK;
    if (*unclear) {
        status =
            err_set(err, CKD_E_IO,
                    "cannot complete an upload of %.200s: %s began an answer, and did not say how the upload "
                    "ended: try again",
                    u->key, u->p->host);
    }
    s3_request_free(&r);
    return status;
}

static ckd_status complete_upload(const parts *u, const object_call *call, ckd_error *err) {
    bytes list = {0};
    ckd_error why = {0};
    list_parts(&list, u);
    ckd_status status = list.failed ? err_nomem(&why, list.size, "a list of parts") : CKD_OK;
    bool again = status == CKD_OK;
    for (uint32_t i = 1; again; i++) {
        status = send_completion(u, &list, &again, call, &why);
        if (status != CKD_OK && status != CKD_E_CANCELLED && status != CKD_E_NOMEM && is_complete(u, call)) {
            status = CKD_OK;
        }
        again = again && status != CKD_OK && i < u->p->attempts;
        if (again) {
            status = object_call_sleep(call, s3_pause_ns(u->p, i, 0), "a put", &why);
            again = status == CKD_OK;
        }
    }
    bytes_free(&list);
    return err_from(err, status, &why);
}

/* Also after a cancellation, and after the deadline: parts cost money until somebody removes them. */
static void abort_upload(s3_place *p, const char *key, const char *id) {
    object_call briefly = {.deadline_ns = clock_monotonic_ns() + UINT64_C(10000000000)};
    s3_request r;
    ckd_error ignored = {0};
    ckd_status status = s3_request_make(&r, p, "DELETE", key, &ignored);
    s3_query(&r.query, (const char *const[]){"uploadId", id, NULL});
    r.quiet = true;
    THEN(status, s3_send(p, &r, &briefly, &ignored));
    s3_request_free(&r);
}

static void plan_parts(parts *u) {
    uint64_t size = s3_part_size(u->p->part_size, u->from->size);
    u->part_size = size;
    u->count = (size_t)((u->from->size + size - 1) / size);
}

ckd_status s3_put_parts(s3_place *p, const char *key, const object_source *from, const object_call *call,
                        ckd_error *err) {
    parts u = {.p = p, .key = key, .from = from};
    plan_parts(&u);
    u.etags = calloc(u.count, sizeof(*u.etags));
    u.buffers = calloc(p->connections, sizeof(*u.buffers));
    ckd_status status =
        u.etags && u.buffers ? CKD_OK : err_nomem(err, u.count * sizeof(*u.etags), "an upload");
    THEN(status, s3_writer_make(u.writer, err));
    THEN(status, begin_upload(&u, call, err));
    s3_batch batch = {u.count, prepare_part, finish_part, &u};
    THEN(status, s3_run(p, &batch, call, err));
    THEN(status, complete_upload(&u, call, err));
    if (status != CKD_OK && u.id[0]) {
        abort_upload(p, key, u.id);
    }
    for (uint32_t i = 0; u.buffers && i < p->connections; i++) {
        bytes_free(&u.buffers[i]);
    }
    free(u.buffers);
    free(u.etags);
    return status;
}

/* ---- uploads that were left ---- */

static ckd_status list_uploads(s3_place *p, s3_uploads *out, char *after[2], const object_call *call,
                               ckd_error *err) {
    s3_request r;
    ckd_status status = s3_request_make(&r, p, "GET", NULL, err);
    const char *pairs[] = {"uploads",
                           "",
                           "max-uploads",
                           "1000",
                           "prefix",
                           p->address.prefix,
                           after[0] ? "key-marker" : NULL,
                           after[0] ? after[0] : "",
                           after[1] ? "upload-id-marker" : NULL,
                           after[1] ? after[1] : "",
                           NULL};
    s3_query(&r.query, pairs);
    r.what = "list uploads below it";
    THEN(status, s3_send(p, &r, call, err));
    THEN(status, s3_uploads_parse(out, r.answer.data, r.answer.size, err));
    s3_request_free(&r);
    return status;
}

/* Keys of others are not touched. */
static ckd_status abort_old(s3_place *p, const s3_uploads *list, uint64_t before_s, uint64_t *count,
                            const object_call *call, ckd_error *err) {
    size_t prefix = strlen(p->address.prefix);
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < list->count && status == CKD_OK; i++) {
        const s3_upload *u = &list->items[i];
        uint64_t begun = s3_time_parse(u->begun);
        if (strncmp(u->key, p->address.prefix, prefix) != 0 || !object_key_valid(u->key + prefix) ||
            begun == 0 || begun > before_s) {
            continue;
        }
        s3_request r;
        status = s3_request_make(&r, p, "DELETE", u->key + prefix, err);
        s3_query(&r.query, (const char *const[]){"uploadId", u->id, NULL});
        r.what = "abort an upload of it";
        r.quiet = true;
        THEN(status, s3_send(p, &r, call, err));
        *count += status == CKD_OK;
        s3_request_free(&r);
    }
    return status;
}

/* Does a page continue behind the last one? A server that names the same place again would be asked for ever. */
static bool goes_on(char *const after[2], const s3_uploads *list) {
    bool same_key = after[0] && strcmp(list->next_key, after[0]) == 0;
    return !same_key || (list->next_id && (!after[1] || strcmp(list->next_id, after[1]) != 0));
}

ckd_status s3_abort_uploads(void *place, uint64_t age_s, uint64_t *count, const object_call *call,
                            ckd_error *err) {
    s3_place *p = place;
    uint64_t now = clock_wall_ns() / 1000000000, before = now > age_s ? now - age_s : 0;
    char *after[2] = {NULL, NULL};
    bool more = true;
    ckd_status status = CKD_OK;
    while (more && status == CKD_OK) {
        s3_uploads list = {0};
        status = list_uploads(p, &list, after, call, err);
        THEN(status, abort_old(p, &list, before, count, call, err));
        more = list.next_key != NULL;
        if (status == CKD_OK && more && !goes_on(after, &list)) {
            status = err_set(err, CKD_E_CORRUPT, "the list of uploads of %s does not continue where it says",
                             p->host);
        }
        free(after[0]);
        free(after[1]);
        after[0] = list.next_key;
        after[1] = list.next_id;
        list.next_key = list.next_id = NULL;
        s3_uploads_free(&list);
    }
    free(after[0]);
    free(after[1]);
    return status;
}
