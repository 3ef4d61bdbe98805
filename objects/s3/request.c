/* Requests: made, sent, sent again after a pause, several at a time. */
#include "objects/s3/s3.h"

#include <stdio.h>
#include <stdlib.h>

#define NAP_NS     UINT64_C(100000000) /* how often limits of the call are checked */
#define PAUSE_MAX  UINT64_C(20000000000)
#define SKEW_MAX_S 300 /* less is no reason for a refusal */
#define EMPTY_HASH "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"

void s3_request_free(s3_request *r) {
    curl_slist_free_all(r->headers);
    curl_slist_free_all(r->sent_headers);
    free(r->key);
    bytes_free(&r->query);
    bytes_free(&r->answer);
    *r = (s3_request){0};
}

ckd_status s3_request_make(s3_request *r, const s3_place *p, const char *method, const char *key,
                           ckd_error *err) {
    *r = (s3_request){.method = method, .what = "reach it"};
    if (key) {
        size_t size = strlen(p->address.prefix) + strlen(key) + 1;
        r->key = malloc(size);
        if (!r->key) {
            return err_nomem(err, size, "the key of an object");
        }
        snprintf(r->key, size, "%s%s", p->address.prefix, key);
    }
    return CKD_OK;
}

ckd_status s3_request_header(s3_request *r, const char *name, const char *value, ckd_error *err) {
    char line[512];
    snprintf(line, sizeof(line), "%s: %s", name, value);
    struct curl_slist *longer = curl_slist_append(r->headers, line);
    if (!longer) {
        return err_nomem(err, sizeof(line), "a request");
    }
    r->headers = longer;
    return CKD_OK;
}

/*
 * The signature covers the SHA-256, so a body that was damaged on its way is refused. Not all servers compare it, but
 * nearly all compare the MD5.
 */
static ckd_status add_hash(s3_request *r, ckd_error *err) {
    char hash[65] = EMPTY_HASH, md5[32];
    if (r->body_size > 0 && s3_md5(md5, r->body, r->body_size) &&
        s3_request_header(r, "Content-MD5", md5, err) != CKD_OK) {
        return CKD_E_NOMEM;
    }
    if (r->body_size > 0 && !s3_sha256(hash, r->body, r->body_size)) {
        return err_set(err, CKD_E_UNSUPPORTED, "libcrypto cannot compute SHA-256, which requests to S3 need");
    }
    return s3_request_header(r, "x-amz-content-sha256", hash, err);
}

/* ---- pauses ---- */

/*
 * Servers take no request whose time is more than a quarter of an hour from theirs. Then we reckon with their clock. A
 * refused HEAD has no code.
 */
static void set_clock(s3_place *p, s3_request *r) {
    const char *code = r->problem.code;
    bool refused = r->failure == CURLE_OK && (r->status == 403 || r->status == 400);
    bool by_time = strcmp(code, "RequestTimeTooSkewed") == 0 || strcmp(code, "RequestExpired") == 0 ||
                   (!*code && strcmp(r->method, "HEAD") == 0);
    int64_t skew = r->date_s - (int64_t)(clock_wall_ns() / 1000000000), wrong = skew - r->skew_s;
    if (refused && by_time && r->date_s > 0 && (wrong > SKEW_MAX_S || wrong < -SKEW_MAX_S)) {
        p->skew_s = skew;
        r->skewed = true;
    }
}

bool s3_passes(const s3_request *r) {
    static const char *const codes[] = {"RequestTimeout",
                                        "SlowDown",
                                        "InternalError",
                                        "ServiceUnavailable",
                                        "Throttling",
                                        "ThrottlingException",
                                        "RequestLimitExceeded",
                                        "OperationAborted",
                                        "ConditionalRequestConflict",
                                        "ExpiredToken",
                                        "XAmzContentSHA256Mismatch",
                                        "IncompleteBody",
                                        "BadDigest"};
    static const CURLcode lasting[] = {CURLE_URL_MALFORMAT, CURLE_PEER_FAILED_VERIFICATION,
                                       CURLE_SSL_CACERT_BADFILE, CURLE_OUT_OF_MEMORY, CURLE_NOT_BUILT_IN};
    if (r->whole) {
        return false; /* it would send the object again */
    }
    if (r->failure != CURLE_OK) {
        for (size_t i = 0; i < sizeof(lasting) / sizeof(lasting[0]); i++) {
            if (r->failure == lasting[i]) {
                return false;
            }
        }
        return true;
    }
    for (size_t i = 0; i < sizeof(codes) / sizeof(codes[0]); i++) {
        if (strcmp(r->problem.code, codes[i]) == 0) {
            return true;
        }
    }
    if (r->skewed) {
        return true;
    }
    /* Proxies have statuses of their own, as 520 to 530. */
    return r->status == 408 || r->status == 429 ||
           (r->status >= 500 && r->status != 501 && r->status != 505 && r->status != 507);
}

uint64_t s3_pause_ns(const s3_place *p, uint32_t attempt, uint64_t retry_after_s) {
    uint64_t bound = (uint64_t)p->pause_ms * 1000000, random = 0;
    for (uint32_t i = 1; i < attempt && bound < PAUSE_MAX; i++) {
        bound *= 2;
    }
    bound = bound < PAUSE_MAX ? bound : PAUSE_MAX;
    ckd_error ignored;
    (void)random_bytes(&random, sizeof(random), &ignored);
    uint64_t pause = bound > 0 ? random % bound : 0;
    uint64_t asked = retry_after_s < 20 ? retry_after_s * UINT64_C(1000000000) : PAUSE_MAX;
    return asked + pause; /* not all at once */
}

/* ---- a batch under way ---- */

typedef struct slot {
    enum { SLOT_FREE, SLOT_SENT, SLOT_PAUSED } state;
    size_t index;
    uint64_t until; /* the end of the pause */
    s3_request request;
} slot;

typedef struct run {
    s3_place *p;
    const s3_batch *batch;
    const object_call *call;
    s3_lane *lane;
    slot *slots;
    size_t next, done;
} run;

/* Starts an attempt, or pauses first if the rate wants it. */
static ckd_status start(run *x, uint32_t i, ckd_error *err) {
    slot *s = &x->slots[i];
    uint64_t now = clock_monotonic_ns(), size = s->request.body_size + s->request.range.size,
             wait = object_rate_take(&x->p->rate, size, now);
    if (wait > 0) {
        s->until = now + wait;
        s->state = SLOT_PAUSED;
        return CKD_OK;
    }
    ckd_status status = s3_attempt_prepare(x->p, x->lane->easy[i], &s->request, err);
    if (status == CKD_OK && curl_multi_add_handle(x->lane->multi, x->lane->easy[i]) != CURLM_OK) {
        status = err_nomem(err, 0, "a request");
    }
    if (status == CKD_OK) {
        s->state = SLOT_SENT;
    }
    return status;
}

/* Starts what is due: new requests in free slots, others whose pause is over. Sets *wait to the shortest pause. */
static ckd_status start_due(run *x, uint64_t *wait, ckd_error *err) {
    uint64_t now = clock_monotonic_ns();
    ckd_status status = CKD_OK;
    *wait = NAP_NS;
    for (uint32_t i = 0; i < x->p->connections && status == CKD_OK; i++) {
        slot *s = &x->slots[i];
        if (s->state == SLOT_FREE && x->next < x->batch->count) {
            s->index = x->next++;
            status = x->batch->prepare(x->batch->context, s->index, i, &s->request, err);
            THEN(status, add_hash(&s->request, err));
            THEN(status, start(x, i, err));
        } else if (s->state == SLOT_PAUSED && s->until <= now) {
            status = start(x, i, err);
        }
        if (s->state == SLOT_PAUSED && s->until - now < *wait) {
            *wait = s->until - now;
        }
    }
    return status;
}

/* Keys that the server calls expired are replaced, and that attempt is not the last one. */
static bool goes_again(run *x, s3_request *r) {
    set_clock(x->p, r);
    if (strcmp(r->problem.code, "ExpiredToken") == 0) {
        s3_wallet_renew(&x->p->wallet, r->keys_serial);
    }
    bool failed = !s3_succeeded(r) || r->problem.code[0];
    return failed && !r->once && r->attempts < x->p->attempts && s3_passes(r);
}

static ckd_status end_request(run *x, uint32_t i, CURLcode result, ckd_error *err) {
    slot *s = &x->slots[i];
    s3_request *r = &s->request;
    s3_attempt_end(x->lane->easy[i], result, r);
    curl_multi_remove_handle(x->lane->multi, x->lane->easy[i]);
    if (goes_again(x, r)) {
        s->until = clock_monotonic_ns() + s3_pause_ns(x->p, r->attempts, r->retry_after_s);
        s->state = SLOT_PAUSED;
        return CKD_OK;
    }
    s->state = SLOT_FREE;
    ckd_status status = CKD_OK;
    bool bad = !s3_succeeded(r) || r->problem.code[0];
    if (bad && !r->once && !(r->quiet && r->failure == CURLE_OK && r->status == 404)) {
        status = s3_fail(x->p, r, err);
    } else if (x->batch->finish) {
        status = x->batch->finish(x->batch->context, s->index, r, err);
    }
    x->done++;
    s3_request_free(r);
    return status;
}

static ckd_status end_finished(run *x, ckd_error *err) {
    ckd_status status = CKD_OK;
    CURLMsg *m;
    int left;
    while (status == CKD_OK && (m = curl_multi_info_read(x->lane->multi, &left))) {
        if (m->msg != CURLMSG_DONE) {
            continue;
        }
        CURLcode result = m->data.result;
        for (uint32_t i = 0; i < x->p->connections; i++) {
            if (x->lane->easy[i] == m->easy_handle && x->slots[i].state == SLOT_SENT) {
                status = end_request(x, i, result, err);
                break;
            }
        }
    }
    return status;
}

static ckd_status step(run *x, ckd_error *err) {
    uint64_t wait;
    int running = 0;
    ckd_status status = object_call_check(x->call, "a request to S3", err);
    THEN(status, start_due(x, &wait, err));
    if (status != CKD_OK) {
        return status;
    }
    CURLMcode code = curl_multi_perform(x->lane->multi, &running);
    size_t before = x->done;
    status = code == CURLM_OK ? end_finished(x, err)
                              : err_set(err, CKD_E_IO, "libcurl failed: %s", curl_multi_strerror(code));
    if (status == CKD_OK && x->done == before && x->done < x->batch->count) {
        (void)curl_multi_poll(x->lane->multi, NULL, 0, (int)(wait / 1000000) + 1, NULL);
    }
    return status;
}

ckd_status s3_run(s3_place *p, const s3_batch *batch, const object_call *call, ckd_error *err) {
    run x = {.p = p, .batch = batch, .call = call};
    x.slots = calloc(p->connections, sizeof(*x.slots));
    if (!x.slots) {
        return err_nomem(err, p->connections * sizeof(*x.slots), "requests");
    }
    ckd_status status = s3_lane_take(p, &x.lane, err);
    while (status == CKD_OK && x.done < batch->count) {
        status = step(&x, err);
    }
    for (uint32_t i = 0; i < p->connections; i++) {
        if (x.slots[i].state == SLOT_SENT) {
            curl_multi_remove_handle(x.lane->multi, x.lane->easy[i]);
        }
        if (x.lane) {
            curl_easy_reset(x.lane->easy[i]);
        }
        s3_request_free(&x.slots[i].request);
    }
    if (x.lane) {
        s3_lane_return(p, x.lane);
    }
    free(x.slots);
    return status;
}

/* ---- one request ---- */

static ckd_status lend_request(void *context, size_t index, uint32_t place, s3_request *r, ckd_error *err) {
    s3_request *own = context;
    (void)index, (void)place, (void)err;
    *r = *own;
    *own = (s3_request){0};
    return CKD_OK;
}

static ckd_status give_back(void *context, size_t index, s3_request *r, ckd_error *err) {
    (void)index, (void)err;
    *(s3_request *)context = *r;
    *r = (s3_request){0};
    return CKD_OK;
}

ckd_status s3_send(s3_place *p, s3_request *r, const object_call *call, ckd_error *err) {
    s3_batch one = {1, lend_request, give_back, r};
    return s3_run(p, &one, call, err);
}
