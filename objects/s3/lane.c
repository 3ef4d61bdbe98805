/* Connections, and single attempts over them. libcurl moves the bytes and signs. */
#include "objects/s3/s3.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

/* ---- connections: a call borrows them, so that a later one finds them open ---- */

static void lane_free(const s3_place *p, s3_lane *lane) {
    for (uint32_t i = 0; lane->easy && i < p->connections; i++) {
        curl_easy_cleanup(lane->easy[i]);
    }
    free(lane->easy);
    curl_multi_cleanup(lane->multi);
    free(lane);
}

static s3_lane *lane_make(const s3_place *p) {
    s3_lane *lane = calloc(1, sizeof(*lane));
    if (!lane) {
        return NULL;
    }
    lane->multi = curl_multi_init();
    lane->easy = calloc(p->connections, sizeof(CURL *));
    bool made = lane->multi && lane->easy;
    for (uint32_t i = 0; made && i < p->connections; i++) {
        lane->easy[i] = curl_easy_init();
        made = lane->easy[i] != NULL;
    }
    if (!made) {
        lane_free(p, lane);
        return NULL;
    }
    return lane;
}

ckd_status s3_lane_take(s3_place *p, s3_lane **out, ckd_error *err) {
    *out = NULL;
    if (getpid() != p->process) {
        return err_set(err, CKD_E_STATE, "s3://%s was opened before a fork: a child must open it itself",
                       p->address.bucket);
    }
    pthread_mutex_lock(&p->mutex);
    s3_lane *lane = p->idle;
    if (lane) {
        p->idle = lane->next;
    }
    pthread_mutex_unlock(&p->mutex);
    *out = lane ? lane : lane_make(p);
    return *out ? CKD_OK : err_nomem(err, sizeof(*lane), "connections");
}

void s3_lane_return(s3_place *p, s3_lane *lane) {
    pthread_mutex_lock(&p->mutex);
    lane->next = p->idle;
    p->idle = lane;
    pthread_mutex_unlock(&p->mutex);
}

/* To close a connection of the parent would say goodbye to its server. A child forgets them. */
void s3_lanes_close(s3_place *p) {
    if (getpid() != p->process) {
        p->idle = NULL;
    }
    while (p->idle) {
        s3_lane *lane = p->idle;
        p->idle = lane->next;
        lane_free(p, lane);
    }
}

/* ---- one attempt ---- */

enum { HEADERS_MAX = 64 << 10, SMOOTH_MIN = 256 << 10 };

/* Programs that are started meanwhile do not inherit connections: they would keep them open. */
static curl_socket_t open_socket(void *context, curlsocktype purpose, struct curl_sockaddr *address) {
    (void)context, (void)purpose;
    return socket(address->family, address->socktype | SOCK_CLOEXEC, address->protocol);
}

/* `bytes 5-9/20`, or an asterisk for the total. False if it makes no sense. */
static bool parse_range(s3_request *r, const char *text) {
    unsigned long long first = 0, last = 0, total = UINT64_MAX;
    int size = 0;
    if (sscanf(text, " bytes %llu-%llu/%n", &first, &last, &size) != 2 || size == 0 || last < first) {
        return false;
    }
    if (text[size] != '*' && (sscanf(text + size, "%llu", &total) != 1 || last >= total)) {
        return false;
    }
    r->first = first;
    r->last = last;
    r->total = total;
    return true;
}

/* May the body go where the caller wants the range's bytes? */
static bool range_fits(s3_request *r) {
    if (r->ranged) {
        return r->first == r->range.offset && r->last - r->first < r->range.size;
    }
    /* The whole object: right for whoever wants all of it. */
    r->whole = r->status == 200 && r->range.offset > 0;
    return r->status == 200 && !r->whole;
}

/*
 * The body of a success goes where the caller wants it, all else into `answer`. Other bytes than were asked for are an
 * error, and so are more.
 */
static size_t on_data(char *data, size_t unit, size_t count, void *context) {
    s3_request *r = context;
    size_t size = unit * count;
    if (r->range.to && (r->status == 200 || r->status == 206)) {
        if (r->received == 0 && !range_fits(r)) {
            return 0;
        }
        if (size > r->range.size - r->received) {
            r->whole = r->status == 200 && !r->ranged;
            return 0;
        }
        memcpy((uint8_t *)r->range.to + r->received, data, size);
        r->received += size;
        return size;
    }
    if (size > S3_ANSWER_MAX - r->answer.size) {
        return 0;
    }
    bytes_put(&r->answer, data, size);
    return r->answer.failed ? 0 : size;
}

/* The status and the range are known before the body comes. */
static size_t on_header(char *line, size_t unit, size_t count, void *context) {
    static const char range[] = "content-range:";
    s3_request *r = context;
    size_t size = unit * count;
    char text[128] = {0};
    r->headers_size += size;
    if (r->headers_size > HEADERS_MAX) {
        return 0;
    }
    memcpy(text, line, size < sizeof(text) - 1 ? size : sizeof(text) - 1);
    if (strncmp(text, "HTTP/", 5) == 0) {
        const char *space = strchr(text, ' ');
        r->status = space ? strtol(space, NULL, 10) : 0;
        r->headed = r->ranged = false;
    } else if (size == 2 && memcmp(line, "\r\n", 2) == 0) {
        r->headed = true;
    } else if (strncasecmp(text, range, sizeof(range) - 1) == 0) {
        r->ranged = parse_range(r, text + sizeof(range) - 1);
    }
    return size;
}

static void set_limits(const s3_place *p, CURL *easy) {
    curl_easy_setopt(easy, CURLOPT_NOSIGNAL, 1L);
    curl_easy_setopt(easy, CURLOPT_OPENSOCKETFUNCTION, open_socket);
    curl_easy_setopt(easy, CURLOPT_PROTOCOLS_STR, "http,https");
    curl_easy_setopt(easy, CURLOPT_FOLLOWLOCATION, 0L);
    curl_easy_setopt(easy, CURLOPT_CONNECTTIMEOUT_MS, p->stall_ms < 10000 ? (long)p->stall_ms : 10000L);
    curl_easy_setopt(easy, CURLOPT_LOW_SPEED_LIMIT, 1L);
    curl_easy_setopt(easy, CURLOPT_LOW_SPEED_TIME, p->stall_ms < 1000 ? 1L : (long)(p->stall_ms / 1000));
    curl_easy_setopt(easy, CURLOPT_HTTP_VERSION, p->http2 ? CURL_HTTP_VERSION_2TLS : CURL_HTTP_VERSION_1_1);
    curl_easy_setopt(easy, CURLOPT_TCP_KEEPALIVE, 1L);
    curl_easy_setopt(easy, CURLOPT_ACCEPT_ENCODING, NULL); /* bytes come as they are stored */
    if (p->rate.bytes_per_s >= SMOOTH_MIN) {
        /* Attempts begin as the rate allows, and a large one does not then take the whole line. */
        curl_easy_setopt(easy, CURLOPT_MAX_SEND_SPEED_LARGE, (curl_off_t)p->rate.bytes_per_s);
        curl_easy_setopt(easy, CURLOPT_MAX_RECV_SPEED_LARGE, (curl_off_t)p->rate.bytes_per_s);
    }
    if (p->ca_file) {
        curl_easy_setopt(easy, CURLOPT_CAINFO, p->ca_file);
    }
}

static ckd_status set_url(const s3_place *p, CURL *easy, const s3_request *r, ckd_error *err) {
    bytes url = {0};
    bytes_put(&url, p->url, strlen(p->url));
    bytes_put_u8(&url, '/');
    if (r->key) {
        bytes_put(&url, r->key, strlen(r->key));
    }
    bytes_put(&url, r->query.data, r->query.size);
    bytes_put_u8(&url, 0);
    bool failed = url.failed || r->query.failed;
    CURLcode code = failed ? CURLE_OUT_OF_MEMORY : curl_easy_setopt(easy, CURLOPT_URL, (char *)url.data);
    bytes_free(&url);
    return code == CURLE_OK ? CKD_OK : err_nomem(err, OBJECT_KEY_MAX, "the URL of an object");
}

static ckd_status set_keys(s3_place *p, CURL *easy, s3_request *r, ckd_error *err) {
    s3_keys keys = {0};
    ckd_status status = s3_wallet_keys(&p->wallet, &keys, err);
    if (status != CKD_OK) {
        return status;
    }
    struct curl_slist **headers = &r->sent_headers;
    r->keys_serial = keys.serial;
    char scope[128];
    snprintf(scope, sizeof(scope), "aws:amz:%s:s3", p->region);
    CURLcode code = curl_easy_setopt(easy, CURLOPT_AWS_SIGV4, scope);
    code = code ? code : curl_easy_setopt(easy, CURLOPT_USERNAME, keys.id);
    code = code ? code : curl_easy_setopt(easy, CURLOPT_PASSWORD, keys.secret);
    if (code == CURLE_OK && keys.token) {
        size_t size = strlen(keys.token) + 32;
        char *line = malloc(size);
        if (line) {
            snprintf(line, size, "x-amz-security-token: %s", keys.token);
        }
        struct curl_slist *longer = line ? curl_slist_append(*headers, line) : NULL;
        *headers = longer ? longer : *headers;
        code = longer ? CURLE_OK : CURLE_OUT_OF_MEMORY;
        if (line) {
            explicit_bzero(line, size);
        }
        free(line);
    }
    s3_keys_free(&keys);
    return code == CURLE_OK ? CKD_OK : err_nomem(err, sizeof(scope), "a signature");
}

static void set_method(CURL *easy, const s3_request *r) {
    if (strcmp(r->method, "HEAD") == 0) {
        curl_easy_setopt(easy, CURLOPT_NOBODY, 1L);
    } else if (strcmp(r->method, "GET") == 0 || strcmp(r->method, "DELETE") == 0) {
        curl_easy_setopt(easy, CURLOPT_HTTPGET, 1L);
        curl_easy_setopt(easy, CURLOPT_CUSTOMREQUEST, r->method);
    } else {
        /* With a body in memory libcurl can send it again if an idle connection turns out to be closed. */
        curl_easy_setopt(easy, CURLOPT_POST, 1L);
        curl_easy_setopt(easy, CURLOPT_POSTFIELDS, r->body_size > 0 ? r->body : "");
        curl_easy_setopt(easy, CURLOPT_POSTFIELDSIZE_LARGE, (curl_off_t)r->body_size);
        curl_easy_setopt(easy, CURLOPT_CUSTOMREQUEST, r->method);
    }
    if (r->range.to) {
        char range[64];
        snprintf(range, sizeof(range), "%llu-%llu", (unsigned long long)r->range.offset,
                 (unsigned long long)(r->range.offset + r->range.size - 1));
        curl_easy_setopt(easy, CURLOPT_RANGE, range);
    }
}

static ckd_status add_header(struct curl_slist **list, const char *line, ckd_error *err) {
    struct curl_slist *longer = curl_slist_append(*list, line);
    *list = longer ? longer : *list;
    return longer ? CKD_OK : err_nomem(err, strlen(line), "a request");
}

/* Headers of the attempt: those of the request, and what may differ next time: the keys' token, and the time. */
static ckd_status attempt_headers(struct curl_slist **out, const s3_place *p, s3_request *r, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (const struct curl_slist *h = r->headers; h && status == CKD_OK; h = h->next) {
        status = add_header(out, h->data, err);
    }
    r->skew_s = p->skew_s;
    if (status == CKD_OK && r->skew_s != 0) {
        char line[64];
        time_t there = (time_t)(clock_wall_ns() / 1000000000) + (time_t)r->skew_s;
        struct tm t;
        if (gmtime_r(&there, &t) && strftime(line, sizeof(line), "X-Amz-Date: %Y%m%dT%H%M%SZ", &t) > 0) {
            status = add_header(out, line, err); /* libcurl signs for this time then */
        }
    }
    return status;
}

ckd_status s3_attempt_prepare(s3_place *p, CURL *easy, s3_request *r, ckd_error *err) {
    curl_easy_reset(easy);
    curl_slist_free_all(r->sent_headers);
    r->sent_headers = NULL;
    r->status = 0;
    r->headed = r->measured = r->ranged = r->whole = false;
    r->received = r->headers_size = 0;
    r->retry_after_s = 0;
    r->date_s = 0;
    r->skewed = false;
    r->writer[0] = r->etag[0] = r->detail[0] = 0;
    r->problem = (s3_problem){0};
    (void)bytes_reset(&r->answer);
    set_limits(p, easy);
    set_method(easy, r);
    curl_easy_setopt(easy, CURLOPT_ERRORBUFFER, r->detail);
    curl_easy_setopt(easy, CURLOPT_WRITEFUNCTION, on_data);
    curl_easy_setopt(easy, CURLOPT_WRITEDATA, r);
    curl_easy_setopt(easy, CURLOPT_HEADERFUNCTION, on_header);
    curl_easy_setopt(easy, CURLOPT_HEADERDATA, r);
    curl_easy_setopt(easy, CURLOPT_PRIVATE, r);
    ckd_status status = set_url(p, easy, r, err);
    THEN(status, attempt_headers(&r->sent_headers, p, r, err));
    THEN(status, set_keys(p, easy, r, err));
    if (status == CKD_OK && curl_easy_setopt(easy, CURLOPT_HTTPHEADER, r->sent_headers) != CURLE_OK) {
        status = err_nomem(err, 0, "a request");
    }
    return status;
}

/* The last header of this name; "" if there is none. */
static void copy_header(char *out, size_t size, CURL *easy, const char *name) {
    struct curl_header *found = NULL;
    out[0] = 0;
    if (curl_easy_header(easy, name, 0, CURLH_HEADER, -1, &found) == CURLHE_OK) {
        s3_printable(out, size, found->value);
    }
}

/*
 * Did a read get what it asked for, or all that the object has? A body without a length may end early, and proxies cut
 * ranges: that is no reason to call an object damaged.
 */
static bool range_complete(const s3_request *r) {
    bool all = r->received == r->range.size;
    if (!r->ranged) {
        return r->status == 200 && (all || (r->measured && r->length == r->received));
    }
    return r->received == r->last - r->first + 1 && (all || r->total == r->last + 1);
}

void s3_attempt_end(CURL *easy, CURLcode result, s3_request *r) {
    curl_off_t length = -1, after = 0;
    /* libcurl takes headers that a closed connection cut off for whole ones. */
    r->failure = result == CURLE_OK && !r->headed ? CURLE_RECV_ERROR : result;
    r->attempts++;
    if (r->failure != CURLE_OK) {
        r->status = 0;
        return;
    }
    (void)curl_easy_getinfo(easy, CURLINFO_RESPONSE_CODE, &r->status);
    (void)curl_easy_getinfo(easy, CURLINFO_CONTENT_LENGTH_DOWNLOAD_T, &length);
    (void)curl_easy_getinfo(easy, CURLINFO_RETRY_AFTER, &after);
    r->measured = length >= 0;
    r->length = length > 0 ? (uint64_t)length : 0;
    r->retry_after_s = after > 0 ? (uint64_t)after : 0;
    copy_header(r->writer, sizeof(r->writer), easy, S3_WRITER_HEADER);
    if (r->range.to && s3_succeeded(r) && !range_complete(r)) {
        r->failure = CURLE_PARTIAL_FILE;
        r->status = 0;
        return;
    }
    char date[64];
    copy_header(date, sizeof(date), easy, "date");
    time_t at = date[0] ? curl_getdate(date, NULL) : -1;
    r->date_s = at > 0 ? (int64_t)at : 0;
    copy_header(r->etag, sizeof(r->etag), easy, "etag");
    copy_header(r->problem.region, sizeof(r->problem.region), easy, "x-amz-bucket-region");
    /* Some operations say 200, work, and then say in the body that they failed. */
    if (r->answer.size > 0) {
        s3_problem_parse(&r->problem, r->answer.data, r->answer.size);
    }
}
