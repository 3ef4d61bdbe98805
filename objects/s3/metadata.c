/* Credentials that a container's or a machine's own service gives. */
#include "objects/s3/s3.h"

#include <stdio.h>
#include <stdlib.h>

enum { TEXT_MAX = 64 << 10, TOKEN_MAX = 8 << 10 };

typedef struct question {
    const char *method, *url;
    const char *header; /* "Name: value", or NULL */
    long timeout_ms;
    bytes answer; /* without a NUL */
    long status;  /* 0: no answer */
} question;

static size_t on_answer(char *data, size_t unit, size_t count, void *context) {
    bytes *to = context;
    if (unit * count > TEXT_MAX - to->size) {
        return 0;
    }
    bytes_put(to, data, unit * count);
    return to->failed ? 0 : unit * count;
}

/* A proxy must not see credentials, and nothing is signed. */
static void ask(question *q) {
    CURL *easy = curl_easy_init();
    struct curl_slist *headers = q->header ? curl_slist_append(NULL, q->header) : NULL;
    (void)bytes_reset(&q->answer);
    q->status = 0;
    if (!easy) {
        curl_slist_free_all(headers);
        return;
    }
    curl_easy_setopt(easy, CURLOPT_NOSIGNAL, 1L);
    curl_easy_setopt(easy, CURLOPT_PROTOCOLS_STR, "http,https");
    curl_easy_setopt(easy, CURLOPT_NOPROXY, "*");
    curl_easy_setopt(easy, CURLOPT_URL, q->url);
    curl_easy_setopt(easy, CURLOPT_CUSTOMREQUEST, q->method);
    curl_easy_setopt(easy, CURLOPT_HTTPHEADER, headers);
    curl_easy_setopt(easy, CURLOPT_TIMEOUT_MS, q->timeout_ms);
    curl_easy_setopt(easy, CURLOPT_WRITEFUNCTION, on_answer);
    curl_easy_setopt(easy, CURLOPT_WRITEDATA, &q->answer);
    if (curl_easy_perform(easy) == CURLE_OK) {
        (void)curl_easy_getinfo(easy, CURLINFO_RESPONSE_CODE, &q->status);
    }
    curl_easy_cleanup(easy);
    curl_slist_free_all(headers);
}

/* Again if it failed for a moment. */
static void ask_twice(question *q) {
    ask(q);
    if (q->status == 0 || q->status >= 500) {
        clock_sleep_ns(UINT64_C(100000000));
        ask(q);
    }
}

static void forget_answer(question *q) {
    if (q->answer.data) {
        explicit_bzero(q->answer.data, q->answer.size);
    }
    bytes_free(&q->answer);
}

static const char *variable(const char *name) {
    const char *value = secure_getenv(name);
    return value && *value ? value : NULL;
}

/* ---- a container ---- */

/* Over plain HTTP, credentials only go to this machine, or to the addresses that belong to such services. */
static bool address_trusted(const char *url) {
    static const char *const hosts[] = {"localhost",     "127.0.0.1",      "[::1]",
                                        "169.254.170.2", "169.254.170.23", "[fd00:ec2::23]"};
    if (strncmp(url, "https://", 8) == 0) {
        return true;
    }
    if (strncmp(url, "http://", 7) != 0) {
        return false;
    }
    const char *host = url + 7;
    size_t size = *host == '[' ? strcspn(host, "]") + 1 : strcspn(host, ":/?#");
    for (size_t i = 0; i < sizeof(hosts) / sizeof(hosts[0]); i++) {
        if (size == strlen(hosts[i]) && strncmp(host, hosts[i], size) == 0 && !strchr(host, '@')) {
            return true;
        }
    }
    return false;
}

/* Sets `out` to the header that proves who asks, or to "". */
static ckd_status container_token(char *out, size_t size, ckd_error *err) {
    const char *path = variable("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"),
               *token = variable("AWS_CONTAINER_AUTHORIZATION_TOKEN");
    bytes text = {0};
    ckd_status status = path ? file_read_all(&text, path, TOKEN_MAX, err) : CKD_OK;
    if (path) {
        bytes_put_u8(&text, 0);
        token = text.failed ? NULL : (const char *)text.data;
    }
    out[0] = 0;
    size_t length = token ? strcspn(token, "\r\n") : 0;
    if (status == CKD_OK && length > 0) {
        int needed = snprintf(out, size, "Authorization: %.*s", (int)length, token);
        status = needed < (int)size
                     ? CKD_OK
                     : err_set(err, CKD_E_INVALID, "the token of the container's service is too long");
    }
    bytes_free(&text);
    return status;
}

ckd_status s3_container_keys(s3_keys *out, ckd_error *err) {
    const char *relative = variable("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI"),
               *full = variable("AWS_CONTAINER_CREDENTIALS_FULL_URI");
    char url[2048], header[TOKEN_MAX + 32];
    if (!relative && !full) {
        return err_set(err, CKD_E_NOT_FOUND,
                       "no container's service is set (AWS_CONTAINER_CREDENTIALS_*_URI)");
    }
    int size = relative ? snprintf(url, sizeof(url), "http://169.254.170.2%s", relative)
                        : snprintf(url, sizeof(url), "%s", full);
    if (size >= (int)sizeof(url) || !address_trusted(url)) {
        return err_set(
            err, CKD_E_INVALID,
            "the container's service for credentials is neither on this machine nor reached over https: correct "
            "AWS_CONTAINER_CREDENTIALS_FULL_URI");
    }
    ckd_status status = container_token(header, sizeof(header), err);
    if (status != CKD_OK) {
        return status;
    }
    question q = {.method = "GET", .url = url, .header = header[0] ? header : NULL, .timeout_ms = 5000};
    ask_twice(&q);
    status = q.status == 200
                 ? s3_keys_parse(out, &q.answer, "the container's service", err)
                 : err_set(err, CKD_E_IO, "the container's service for credentials answered %ld", q.status);
    explicit_bzero(header, sizeof(header));
    forget_answer(&q);
    return status;
}

/* ---- an instance: IMDSv2, which gives a token first ---- */

static ckd_status no_service(ckd_error *err, const char *why, long status) {
    return err_set(err, CKD_E_NOT_FOUND, "the instance's service %s (%ld)", why, status);
}

static ckd_status ask_instance(s3_keys *out, const char *base, ckd_error *err) {
    char url[1024], header[TOKEN_MAX + 64], role[256];
    snprintf(url, sizeof(url), "%.200s/latest/api/token", base);
    question q = {.method = "PUT",
                  .url = url,
                  .header = "X-aws-ec2-metadata-token-ttl-seconds: 21600",
                  .timeout_ms = 1000};
    ask_twice(&q);
    ckd_status status = CKD_OK;
    if (q.status != 200 || q.answer.size == 0 || q.answer.size > TOKEN_MAX ||
        memchr(q.answer.data, '\n', q.answer.size)) {
        status = no_service(err, "gave no token", q.status);
    } else {
        snprintf(header, sizeof(header), "X-aws-ec2-metadata-token: %.*s", (int)q.answer.size,
                 (const char *)q.answer.data);
        q.method = "GET";
        q.header = header;
        snprintf(url, sizeof(url), "%.200s/latest/meta-data/iam/security-credentials/", base);
        ask_twice(&q);
        const char *name = (const char *)q.answer.data;
        size_t size = 0;
        while (size < q.answer.size && name[size] > ' ' && name[size] <= '~') {
            size++;
        }
        if (q.status != 200 || size == 0 || size >= sizeof(role)) {
            status = no_service(err, "names no role", q.status);
        } else {
            snprintf(role, sizeof(role), "%.*s", (int)size, name);
            snprintf(url, sizeof(url), "%.200s/latest/meta-data/iam/security-credentials/%s", base, role);
            ask_twice(&q);
            status = q.status == 200 ? s3_keys_parse(out, &q.answer, "the instance's service", err)
                                     : no_service(err, "gave no credentials", q.status);
        }
    }
    explicit_bzero(header, sizeof(header));
    forget_answer(&q);
    return status;
}

ckd_status s3_instance_keys(s3_keys *out, ckd_error *err) {
    const char *off = variable("AWS_EC2_METADATA_DISABLED"),
               *base = variable("AWS_EC2_METADATA_SERVICE_ENDPOINT");
    if (off && strcasecmp(off, "true") == 0) {
        return err_set(err, CKD_E_NOT_FOUND, "AWS_EC2_METADATA_DISABLED is set");
    }
    char trimmed[200];
    snprintf(trimmed, sizeof(trimmed), "%s", base ? base : "http://169.254.169.254");
    size_t size = strlen(trimmed);
    if (size > 0 && trimmed[size - 1] == '/') {
        trimmed[size - 1] = 0;
    }
    return ask_instance(out, trimmed, err);
}
