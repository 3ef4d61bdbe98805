/* The files of the S3 implementation share this. */
#ifndef OBJECTS_S3_S3_H
#define OBJECTS_S3_S3_H

#include <curl/curl.h>
#include <pthread.h>

#include "objects/backend.h"

/* ---- addresses and queries (address.c) ---- */

typedef struct s3_address {
    char bucket[64];
    char prefix[OBJECT_KEY_MAX + 1]; /* "", or ends with a slash */
} s3_address;
/* Errors: INVALID. */
ckd_status s3_address_parse(s3_address *out, const char *address, ckd_error *err);

/* Appends text as it stands in a query: all bytes but A-Z a-z 0-9 - . _ ~ as %XX. */
void s3_encode(bytes *out, const char *text);
/*
 * Undoes that, and takes a plus sign for a space. False if a percent sign is not followed by two digits, or for a NUL.
 */
bool s3_decode(char *text);
/*
 * Appends `?a=1&b=2`, sorted by the bytes of the encoded names, as a signature needs it. Values may be "". `pairs` has
 * names and values in turn and ends with NULL.
 */
enum { S3_QUERY_MAX = 8 };
void s3_query(bytes *out, const char *const *pairs);
/* The size of an upload's parts: `min`, or more if there would be more than S3_PARTS_MAX of them. */
enum { S3_PARTS_MAX = 10000 };
uint64_t s3_part_size(uint64_t min, uint64_t size);
/* Lower-case hexadecimal digits of the SHA-256. False if libcrypto fails. */
bool s3_sha256(char out[65], const void *data, size_t size);
/* The MD5 in base 64, as Content-MD5 has it. False if libcrypto has none, as in FIPS mode. */
bool s3_md5(char out[32], const void *data, size_t size);
/* Copies what is printable ASCII, at most size - 1 bytes: for messages. */
void s3_printable(char *out, size_t size, const char *text);

/* ---- answers in XML (xml.c) ---- */

/* Called at the end of each element: its path, as `Error/Code`, and the text directly in it, without outer spaces. */
typedef ckd_status (*s3_element_fn)(void *context, const char *path, const char *text, ckd_error *err);
/*
 * Parses a document of at most S3_ANSWER_MAX bytes. Document types, and with them entities, are refused; so are
 * elements more than 8 deep, and texts above 4 KiB. Errors: CORRUPT, NOMEM, those of `element`.
 */
enum { S3_ANSWER_MAX = 16 << 20, S3_TEXT_MAX = 4096 };
ckd_status s3_xml_parse(const void *data, size_t size, s3_element_fn element, void *context, ckd_error *err);

typedef struct s3_problem {
    char code[64], message[200], region[64]; /* printable ASCII; "" if unknown */
} s3_problem;
/* Reads an <Error>. Leaves what it does not find as it is; damaged documents are no error. */
void s3_problem_parse(s3_problem *out, const void *data, size_t size);
typedef struct s3_listed {
    const char *prefix; /* the store's */
    const char *after;  /* what keys come after, with the prefix; "": all */
    const char *within; /* what keys begin with: the prefix, and perhaps more */
    uint32_t limit;     /* how many keys come at most */
} s3_listed;
/*
 * Reads a ListObjectsV2 answer. Keys come without the prefix; those that are no valid keys are left out. *token, for
 * free, is set if the page is empty, but the list goes on there; else NULL. Errors: CORRUPT (no such document; a key
 * that was not asked for), UNSUPPORTED (keys out of order), NOMEM.
 */
ckd_status s3_listing_parse(object_page *out, const s3_listed *asked, const bytes *answer, char **token,
                            ckd_error *err);
typedef struct s3_upload {
    char *key, *id, *begun;
} s3_upload;
typedef struct s3_uploads {
    s3_upload *items;
    size_t count, capacity;
    char *next_key, *next_id; /* NULL: the last page */
} s3_uploads;
/* Reads a ListMultipartUploads answer. Keys are whole. Release with s3_uploads_free, also on failure. */
ckd_status s3_uploads_parse(s3_uploads *out, const void *data, size_t size, ckd_error *err);
void s3_uploads_free(s3_uploads *list);
/*
 * Finds the text of one element by its path below the outermost element, whose name is not the same everywhere. Errors:
 * CORRUPT (absent, or longer than `capacity` - 1), NOMEM.
 */
ckd_status s3_text_parse(char *out, size_t capacity, const char *path, const void *data, size_t size,
                         ckd_error *err);

/*
 * ---- credentials ----
 *
 * They come from the environment, the shared files (profiles, `credential_process`), a container's service, or an
 * instance's (IMDSv2), in this order, and are renewed five minutes before they expire. Roles and single sign-on are
 * left to a `credential_process`.
 */

typedef struct s3_keys {
    char *id, *secret, *token; /* token NULL: none */
    uint64_t expires_s;        /* since 1970; 0: never */
    uint64_t serial;           /* how often the wallet has looked for keys */
} s3_keys;
void s3_keys_free(s3_keys *keys); /* overwrites them first */
/* Errors: INVALID (a control character), NOMEM; *out is empty then. */
ckd_status s3_keys_set(s3_keys *out, const char *id, const char *secret, const char *token, ckd_error *err);
/* A time as 2026-01-31T12:00:00Z, with or without a fraction or an offset of hours. 0 if it is none. */
uint64_t s3_time_parse(const char *text);

/* A profile of the shared files. All are NULL if absent. */
typedef struct s3_profile {
    char *id, *secret, *token, *process, *region, *endpoint, *ca_bundle;
    bool other; /* it names a role or a single sign-on, which this library does not do */
} s3_profile;
void s3_profile_free(s3_profile *profile);
/*
 * Adds what an INI file says about a profile; what is set already stays, and keys are those of one file. `config`:
 * sections are called `profile NAME`, but for `default`. Lines that make no sense are passed over. Sets *found if there
 * is such a section. Errors: NOMEM.
 */
ckd_status s3_profile_parse(s3_profile *out, const char *name, bool config, const bytes *text, bool *found,
                            ckd_error *err);
/* Reads both files. name NULL: as AWS_PROFILE says, else `default`. Errors: NOT_FOUND (a named profile), IO, NOMEM. */
ckd_status s3_profile_read(s3_profile *out, const char *name, ckd_error *err);
/* The JSON that a process, a container or an instance gives. `where` begins messages. Errors: CORRUPT, NOMEM. */
ckd_status s3_keys_parse(s3_keys *out, const bytes *json, const char *where, ckd_error *err);
/* Runs a command with /bin/sh and reads its output. Errors: IO, CORRUPT, NOMEM. */
ckd_status s3_process_keys(s3_keys *out, const char *command, ckd_error *err);
/* Asks the container's or the machine's service. NOT_FOUND: there is none; `err` says what was tried. */
ckd_status s3_container_keys(s3_keys *out, ckd_error *err);
ckd_status s3_instance_keys(s3_keys *out, ckd_error *err);

/* Where keys come from, and the present ones. */
typedef struct s3_wallet {
    pthread_mutex_t mutex;
    char *profile;
    bool profile_given;
    s3_keys keys;
    uint64_t renewed_ns; /* monotonic */
} s3_wallet;
ckd_status s3_wallet_open(s3_wallet *w, const char *profile, ckd_error *err);
void s3_wallet_close(s3_wallet *w);
/*
 * A copy of keys that are valid for some minutes, if any can be had. Errors: STATE (none; lists where it looked),
 * NOMEM.
 */
ckd_status s3_wallet_keys(s3_wallet *w, s3_keys *out, ckd_error *err);
/*
 * The server refused the keys of this number as expired: the next call gets others, unless somebody has got them
 * already.
 */
void s3_wallet_renew(s3_wallet *w, uint64_t serial);

/* ---- requests (request.c) ---- */

typedef struct s3_lane s3_lane; /* connections that one call uses at a time (lane.c) */

typedef struct s3_place {
    s3_address address;
    char *url;  /* of the bucket, without a slash at the end */
    char *host; /* for messages */
    char *region;
    char *ca_file; /* or NULL */
    uint32_t connections, attempts, pause_ms, stall_ms;
    uint64_t part_size;
    bool http2;
    s3_wallet wallet;
    int64_t process; /* that opened it: a forked child must not use its connections */
    object_rate rate;
    _Atomic int64_t skew_s; /* the server's clock less ours, as far as it refused requests */
    pthread_mutex_t mutex;
    s3_lane *idle;
} s3_place;

enum { S3_WRITER_SIZE = 33 };
typedef struct s3_request {
    /* what to send */
    const char *what; /* for messages: "put it" */
    const char *method;
    char *key;   /* whole, with the store's prefix; NULL: the bucket */
    bytes query; /* begins with ? */
    struct curl_slist *headers;
    struct curl_slist *sent_headers; /* of the present attempt */
    const void *body;
    size_t body_size;
    bool once;  /* never sent twice: `finish` gets whatever becomes of it */
    bool quiet; /* 404 is an answer as good as others */
    /* where the answer goes */
    object_range range; /* `to` set: 206 or 200 fills it. The object may be shorter: see `received` */
    size_t received, headers_size;
    bytes answer;
    /* what came */
    uint64_t keys_serial; /* of the keys that signed it */
    CURLcode failure;
    long status; /* 0: no whole answer */
    uint64_t length, retry_after_s;
    int64_t skew_s; /* that it was signed with */
    int64_t date_s; /* the server's; 0: unknown */
    bool skewed;    /* our clock was the reason for the refusal, and is put right now */
    bool headed;    /* all headers came */
    bool measured;  /* `length` is known */
    bool ranged;    /* the answer has a Content-Range, whose numbers follow. total UINT64_MAX: not told */
    uint64_t first, last, total;
    bool whole; /* the object's bytes came from the beginning, although others were asked for */
    char writer[S3_WRITER_SIZE], etag[80];
    s3_problem problem;
    char detail[CURL_ERROR_SIZE];
    uint32_t attempts;
} s3_request;
void s3_request_free(s3_request *r); /* and zeroes it */
/* Fills in method, what and key (relative to the prefix; NULL: the bucket). Errors: NOMEM. */
ckd_status s3_request_make(s3_request *r, const s3_place *p, const char *method, const char *key,
                           ckd_error *err);
ckd_status s3_request_header(s3_request *r, const char *name, const char *value, ckd_error *err);

/*
 * Several requests, of which a few are under way at a time. Each is made when its turn comes, and freed when it is
 * over.
 */
typedef struct s3_batch {
    size_t count;
    ckd_status (*prepare)(void *context, size_t index, uint32_t slot, s3_request *r, ckd_error *err);
    ckd_status (*finish)(void *context, size_t index, s3_request *r,
                         ckd_error *err); /* NULL: nothing to do */
    void *context;
} s3_batch;
/*
 * Runs a batch. Requests that fail for a while are sent again, after pauses. Answers other than 2xx are errors, but for
 * `once` and `quiet`. Ends with the first error. slot < connections; one request has it at a time.
 */
ckd_status s3_run(s3_place *p, const s3_batch *batch, const object_call *call, ckd_error *err);
/* Runs one request, which stays the caller's. */
ckd_status s3_send(s3_place *p, s3_request *r, const object_call *call, ckd_error *err);
/* May the same request succeed later? */
bool s3_passes(const s3_request *r);
/* Pauses before attempt `attempt` (from 1), in ns; random. */
uint64_t s3_pause_ns(const s3_place *p, uint32_t attempt, uint64_t retry_after_s);
/* Is it answered with success? */
static inline bool s3_succeeded(const s3_request *r) {
    return r->failure == CURLE_OK && r->status >= 200 && r->status < 300;
}

/* ---- connections (lane.c) ---- */

struct s3_lane {
    s3_lane *next;
    CURLM *multi;
    CURL **easy; /* as many as the place has connections */
};
ckd_status s3_lane_take(s3_place *p, s3_lane **out, ckd_error *err);
void s3_lane_return(s3_place *p, s3_lane *lane);
void s3_lanes_close(s3_place *p);
/*
 * Prepares a handle for one attempt: signs with present keys, for the time on the server's clock. Errors: STATE (no
 * keys), NOMEM.
 */
ckd_status s3_attempt_prepare(s3_place *p, CURL *easy, s3_request *r, ckd_error *err);
/* Takes down what came of an attempt. */
void s3_attempt_end(CURL *easy, CURLcode result, s3_request *r);

/* ---- errors (failure.c) ---- */
/* Says what failed, where, with the server's words, and what to do. */
ckd_status s3_fail(const s3_place *p, const s3_request *r, ckd_error *err);

/* ---- what a store does ---- */
ckd_status s3_put(void *place, const char *key, const object_source *from, const object_call *call,
                  ckd_error *err);
ckd_status s3_put_new(void *place, const char *key, const object_source *from, const object_call *call,
                      ckd_error *err);
ckd_status s3_probe(void *place, bool *honoured, const object_call *call, ckd_error *err);
ckd_status s3_put_parts(s3_place *p, const char *key, const object_source *from, const object_call *call,
                        ckd_error *err);
ckd_status s3_get(void *place, const char *key, const object_range *range, const object_call *call,
                  ckd_error *err);
ckd_status s3_size(void *place, const char *key, uint64_t *size, const object_call *call, ckd_error *err);
ckd_status s3_delete(void *place, const char *const *keys, size_t count, const object_call *call,
                     ckd_error *err);
ckd_status s3_list(void *place, const object_query *query, object_page *out, const object_call *call,
                   ckd_error *err);
ckd_status s3_abort_uploads(void *place, uint64_t age_s, uint64_t *count, const object_call *call,
                            ckd_error *err);
/* A put with the writer's mark, whose body is `data`. `condition`: only if absent. Errors: NOMEM. */
ckd_status s3_put_request(s3_request *r, const s3_place *p, const char *key, const char *writer,
                          bool condition, ckd_error *err);
ckd_status s3_writer_make(char out[S3_WRITER_SIZE], ckd_error *err);
#define S3_WRITER_HEADER "x-amz-meta-ckptdelta-writer"

#endif
