/* An open bucket: its URL, its region, where settings come from. The library's entry. */
#include "objects/s3/s3.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

const s3_backend *ckd_s3_backend(void);

static const char *first_set(const char *const *values, size_t count) {
    for (size_t i = 0; i < count; i++) {
        if (values[i] && *values[i]) {
            return values[i];
        }
    }
    return NULL;
}

static bool region_valid(const char *region) {
    size_t size = strspn(region, "abcdefghijklmnopqrstuvwxyz0123456789-");
    return size > 0 && size < 64 && region[size] == 0;
}

/* The parts of http(s)://HOST[:PORT][/PATH], without slashes at the end of the path. No name or password is in it. */
typedef struct endpoint {
    int scheme, host, path; /* their sizes; the path begins with a slash */
} endpoint;

static bool endpoint_parse(endpoint *out, const char *text) {
    static const char host_bytes[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.-_:[]";
    size_t scheme = strncmp(text, "https://", 8) == 0 ? 8 : strncmp(text, "http://", 7) == 0 ? 7 : 0;
    size_t host = scheme ? strspn(text + scheme, host_bytes) : 0, path = strlen(text + scheme + host);
    char name[128];
    while (path > 0 && text[scheme + host + path - 1] == '/') {
        path--;
    }
    *out = (endpoint){(int)scheme, (int)host, (int)path};
    if (host == 0 || host >= 256 || path >= sizeof(name) || (path > 0 && text[scheme + host] != '/')) {
        return false;
    }
    snprintf(name, sizeof(name), "%.*s", path > 0 ? (int)path - 1 : 0, text + scheme + host + 1);
    return path == 0 || object_key_valid(name);
}

/* May the bucket be a part of a host's name? Such names have no upper case, so another bucket could be meant. */
static bool fits_host(const char *bucket) {
    size_t size = strlen(bucket);
    return strspn(bucket, "abcdefghijklmnopqrstuvwxyz0123456789-") == size && bucket[size - 1] != '-';
}

static ckd_status format_url(const s3_place *p, char *url, size_t size, const char *text, bool in_host,
                             ckd_error *err) {
    const char *bucket = p->address.bucket, *china = strncmp(p->region, "cn-", 3) == 0 ? ".cn" : "";
    endpoint e;
    if (text && !endpoint_parse(&e, text)) {
        return err_set(err, CKD_E_INVALID,
                       "\"%.100s\" is not an S3 endpoint: write http://HOST:PORT or https://HOST/PATH",
                       strchr(text, '@') ? "..." : text);
    }
    if (text && in_host && !fits_host(bucket)) {
        return err_set(err, CKD_E_INVALID,
                       "the bucket %s cannot be a part of a host's name, as bucket_in_host wants it", bucket);
    }
    if (text && in_host) {
        snprintf(url, size, "%.*s%s.%.*s", e.scheme, text, bucket, e.host + e.path, text + e.scheme);
    } else if (text) {
        snprintf(url, size, "%.*s/%s", e.scheme + e.host + e.path, text, bucket);
    } else if (fits_host(bucket)) {
        snprintf(url, size, "https://%s.s3.%s.amazonaws.com%s", bucket, p->region, china);
    } else {
        snprintf(url, size, "https://s3.%s.amazonaws.com%s/%s", p->region, china, bucket);
    }
    return CKD_OK;
}

/* An endpoint of one's own has the bucket in the path. AWS has it in the host, if its certificate covers the name. */
static ckd_status set_url(s3_place *p, const char *text, bool in_host, ckd_error *err) {
    char url[640];
    ckd_status status = format_url(p, url, sizeof(url), text, in_host, err);
    if (status != CKD_OK) {
        return status;
    }
    p->url = strdup(url);
    const char *host = strstr(url, "//") + 2;
    p->host = strndup(host, strcspn(host, "/"));
    return p->url && p->host ? CKD_OK : err_nomem(err, sizeof(url), "the URL of a bucket");
}

static ckd_status set_from(s3_place *p, const object_options *o, const s3_profile *file, ckd_error *err) {
    const char *regions[] = {o->region, secure_getenv("AWS_REGION"), secure_getenv("AWS_DEFAULT_REGION"),
                             file->region, "us-east-1"};
    const char *endpoints[] = {o->endpoint, secure_getenv("AWS_ENDPOINT_URL_S3"),
                               secure_getenv("AWS_ENDPOINT_URL"), file->endpoint};
    const char *bundles[] = {secure_getenv("AWS_CA_BUNDLE"), file->ca_bundle};
    const char *region = first_set(regions, 5), *ca = first_set(bundles, 2);
    if (!region_valid(region)) {
        return err_set(err, CKD_E_INVALID,
                       "the S3 region (AWS_REGION, or `region` of the profile) is not valid");
    }
    p->region = strdup(region);
    p->ca_file = ca ? strdup(ca) : NULL;
    if (!p->region || (ca && !p->ca_file)) {
        return err_nomem(err, strlen(region), "settings of S3");
    }
    return set_url(p, first_set(endpoints, 4), o->bucket_in_host, err);
}

static void set_numbers(s3_place *p, const object_options *o) {
    p->connections = o->connections ? o->connections : 4;
    p->connections = p->connections < 64 ? p->connections : 64;
    p->attempts = o->attempts ? o->attempts : 8;
    p->pause_ms = o->pause_ms ? o->pause_ms : 200;
    p->stall_ms = o->stall_ms ? o->stall_ms : 30000;
    p->part_size = o->part_size ? o->part_size : UINT64_C(16) << 20;
    p->part_size = p->part_size > UINT64_C(5) << 20 ? p->part_size : UINT64_C(5) << 20;
    p->part_size = p->part_size < UINT64_C(1) << 30 ? p->part_size : UINT64_C(1) << 30;
    p->http2 = o->http2;
    object_rate_init(&p->rate, o->bytes_per_s, clock_monotonic_ns());
}

static void name_place(const void *place, char *out, size_t size) {
    const s3_place *p = place;
    snprintf(out, size, "%s/%s", p->url, p->address.prefix);
}

static void close_place(void *place) {
    s3_place *p = place;
    s3_lanes_close(p);
    s3_wallet_close(&p->wallet);
    pthread_mutex_destroy(&p->mutex);
    object_rate_destroy(&p->rate);
    free(p->url);
    free(p->host);
    free(p->region);
    free(p->ca_file);
    free(p);
}

static const object_functions functions = {
    .put = s3_put,
    .put_new = s3_put_new,
    .probe = s3_probe,
    .get = s3_get,
    .size = s3_size,
    .delete_all = s3_delete,
    .list = s3_list,
    .abort_uploads = s3_abort_uploads,
    .name = name_place,
    .close = close_place,
};

static pthread_once_t once = PTHREAD_ONCE_INIT;
static CURLcode started;

static void start_curl(void) {
    started = curl_global_init(CURL_GLOBAL_DEFAULT);
}

static ckd_status check_curl(ckd_error *err) {
    if (pthread_once(&once, start_curl) != 0 || started != CURLE_OK) {
        return err_set(err, CKD_E_UNSUPPORTED, "libcurl does not start: %s", curl_easy_strerror(started));
    }
    const curl_version_info_data *v = curl_version_info(CURLVERSION_NOW);
    return v->version_num >= 0x075800 && (v->features & CURL_VERSION_SSL)
               ? CKD_OK
               : err_set(err, CKD_E_UNSUPPORTED, "s3:// needs libcurl 7.88 or newer, with TLS, not %s",
                         v->version);
}

static ckd_status open_place(object_store *out, const char *address, const object_options *options,
                             ckd_error *err) {
    ckd_status status = check_curl(err);
    s3_place *p = status == CKD_OK ? calloc(1, sizeof(*p)) : NULL;
    if (!p) {
        return status == CKD_OK ? err_nomem(err, sizeof(*p), "a bucket") : status;
    }
    s3_profile file = {0};
    pthread_mutex_init(&p->mutex, NULL);
    p->process = getpid();
    status = s3_wallet_open(&p->wallet, options->profile, err);
    THEN(status, s3_address_parse(&p->address, address, err));
    set_numbers(p, options);
    THEN(status, s3_profile_read(&file, options->profile, err));
    THEN(status, set_from(p, options, &file, err));
    s3_profile_free(&file);
    s3_keys keys = {0};
    THEN(status, s3_wallet_keys(&p->wallet, &keys, err));
    s3_keys_free(&keys);
    if (status != CKD_OK) {
        close_place(p);
        return status;
    }
    *out = (object_store){&functions, p};
    return CKD_OK;
}

CKD_API const s3_backend *ckd_s3_backend(void) {
    static const s3_backend backend = {S3_VERSION, open_place};
    return &backend;
}
