/*
 * Errors: what failed, on which object and server, in the server's words, and what to do. No secret is in any of them.
 */
#include "objects/s3/s3.h"

#include <stdio.h>

typedef struct advice {
    const char *code;
    ckd_status status;
    const char *text;
} advice;

static const advice advices[] = {
    {"NoSuchBucket", CKD_E_NOT_FOUND, "create the bucket, or correct the address or the endpoint"},
    {"NoSuchKey", CKD_E_NOT_FOUND, NULL},
    {"NoSuchUpload", CKD_E_IO,
     "the upload was aborted by another program or by a rule of the bucket: try again"},
    {"AccessDenied", CKD_E_READ_ONLY, "ask for the permission, or use other credentials"},
    {"InvalidAccessKeyId", CKD_E_READ_ONLY,
     "the server does not know the access key: check the credentials and the endpoint"},
    {"SignatureDoesNotMatch", CKD_E_READ_ONLY, "check the secret key, and whether a proxy changes requests"},
    {"RequestTimeTooSkewed", CKD_E_IO, "the clocks of this machine and the server differ: set them by NTP"},
    {"ExpiredToken", CKD_E_READ_ONLY, "the credentials have expired: renew them"},
    {"InvalidToken", CKD_E_READ_ONLY, "the session token belongs to no valid credentials: renew them"},
    {"QuotaExceeded", CKD_E_NOSPACE, "free some space, or ask for more"},
    {"XMinioStorageFull", CKD_E_NOSPACE, "free some space"},
    {"EntityTooLarge", CKD_E_INVALID, "the object is larger than the server takes"},
    {"NotImplemented", CKD_E_UNSUPPORTED, "the server lacks this function"},
};

static bool wrong_region(const s3_place *p, const s3_request *r) {
    return r->problem.region[0] && strcmp(r->problem.region, p->region) != 0 &&
           (r->status == 301 || r->status == 307 || r->status == 400 || r->status == 403);
}

/* Judges by the status alone, as a HEAD has no body. */
static advice by_status(const s3_request *r) {
    switch (r->status) {
    case 301:
    case 307:
        return (advice){"", CKD_E_INVALID, "the bucket is elsewhere: set its region or endpoint"};
    case 401:
    case 403:
        return (advice){"", CKD_E_READ_ONLY, "check the credentials and their permissions"};
    case 404:
        return (advice){"", CKD_E_NOT_FOUND, NULL};
    case 416:
        return (advice){"", CKD_E_CORRUPT, "the object is shorter than what was asked for"};
    case 501:
        return (advice){"", CKD_E_UNSUPPORTED, "the server lacks this function"};
    case 507:
        return (advice){"", CKD_E_NOSPACE, "free some space"};
    default:
        return (advice){"", CKD_E_IO, s3_passes(r) ? "try again later" : NULL};
    }
}

static advice advise(const s3_request *r) {
    for (size_t i = 0; i < sizeof(advices) / sizeof(advices[0]); i++) {
        if (r->problem.code[0] && strcmp(r->problem.code, advices[i].code) == 0) {
            return advices[i];
        }
    }
    return by_status(r);
}

static const char *about_connection(CURLcode code) {
    switch (code) {
    case CURLE_PEER_FAILED_VERIFICATION:
    case CURLE_SSL_CACERT_BADFILE:
        return "the server's certificate is not trusted: name the file of its certificate authority in "
               "AWS_CA_BUNDLE";
    case CURLE_COULDNT_RESOLVE_HOST:
    case CURLE_COULDNT_CONNECT:
        return "check the endpoint and the network";
    case CURLE_WRITE_ERROR:
        return "the server sent other bytes than were asked for, or more";
    default:
        return "try again later";
    }
}

static ckd_status fail_connection(const s3_request *r, const char *host, const char *name, ckd_error *err) {
    char detail[CURL_ERROR_SIZE];
    if (r->whole) {
        return err_set(err, CKD_E_UNSUPPORTED,
                       "cannot %s: %.140s: %s does not read ranges of objects, as a store needs it", r->what,
                       name, host);
    }
    s3_printable(detail, sizeof(detail), r->detail[0] ? r->detail : curl_easy_strerror(r->failure));
    ckd_status status = r->failure == CURLE_OUT_OF_MEMORY ? CKD_E_NOMEM : CKD_E_IO;
    return err_set(err, status, "cannot %s: %.140s: %s gave no complete answer in %u attempts: %.120s; %s",
                   r->what, name, host, r->attempts, detail, about_connection(r->failure));
}

ckd_status s3_fail(const s3_place *p, const s3_request *r, ckd_error *err) {
    char name[OBJECT_KEY_MAX + 80], host[80], tried[48] = "";
    snprintf(name, sizeof(name), "s3://%s/%s", p->address.bucket, r->key ? r->key : p->address.prefix);
    snprintf(host, sizeof(host), "%.79s", p->host);
    if (r->failure != CURLE_OK) {
        return err_in_file(err, fail_connection(r, host, name, err), name);
    }
    if (r->attempts > 1) {
        snprintf(tried, sizeof(tried), " at the last of %u attempts", r->attempts);
    }
    ckd_status status;
    if (wrong_region(p, r)) {
        status = err_set(
            err, CKD_E_INVALID,
            "cannot %s: %.140s: the bucket lies in region %s, and the request was for %s: set AWS_REGION=%s",
            r->what, name, r->problem.region, p->region, r->problem.region);
    } else {
        advice a = advise(r);
        status = err_set(err, a.status, "cannot %s: %.140s: %s answered %ld%s%s%s%s%s%s%s%s", r->what, name,
                         host, r->status, r->problem.code[0] ? " " : "", r->problem.code, tried,
                         r->problem.message[0] ? " (" : "", r->problem.message,
                         r->problem.message[0] ? ")" : "", a.text ? ": " : "", a.text ? a.text : "");
    }
    return err_in_file(err, status, name);
}
