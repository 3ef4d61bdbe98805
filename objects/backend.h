/*
 * The functions that a kind of place implements. Keys and prefixes that arrive here are valid and relative to the
 * store's prefix; `call` is never NULL. Comments of objects.h hold.
 */
#ifndef OBJECTS_BACKEND_H
#define OBJECTS_BACKEND_H

#include <pthread.h>

#include "objects/objects.h"

enum { OBJECT_LIST_MAX = 1000 };

typedef struct object_functions {
    ckd_status (*put)(void *place, const char *key, const object_source *from, const object_call *call,
                      ckd_error *err);
    ckd_status (*put_new)(void *place, const char *key, const object_source *from, const object_call *call,
                          ckd_error *err);
    ckd_status (*probe)(void *place, bool *honoured, const object_call *call, ckd_error *err);
    ckd_status (*get)(void *place, const char *key, const object_range *range, const object_call *call,
                      ckd_error *err);
    ckd_status (*size)(void *place, const char *key, uint64_t *size, const object_call *call, ckd_error *err);
    ckd_status (*delete_all)(void *place, const char *const *keys, size_t count, const object_call *call,
                             ckd_error *err);
    ckd_status (*list)(void *place, const object_query *query, object_page *out, const object_call *call,
                       ckd_error *err);
    ckd_status (*abort_uploads)(void *place, uint64_t age_s, uint64_t *count, const object_call *call,
                                ckd_error *err);
    /* Writes the place's full name, without secrets: its URL or path, with the prefix. */
    void (*name)(const void *place, char *out, size_t size);
    void (*close)(void *place);
} object_functions;

struct object_store {
    const object_functions *functions;
    void *place;
};

/* ---- a directory ---- */
ckd_status directory_open(object_store *out, const char *path, const object_options *options, ckd_error *err);

/* ---- S3, in libckptdelta_s3.so ---- */
enum { S3_VERSION = 3 };
typedef struct s3_backend {
    uint32_t version;
    ckd_status (*open)(object_store *out, const char *address, const object_options *options, ckd_error *err);
} s3_backend;
typedef const s3_backend *(*s3_entry)(void);
#define S3_ENTRY "ckd_s3_backend"
/* The library's name or path may be set in CKD_S3. Errors: UNSUPPORTED. */
ckd_status s3_backend_load(const s3_backend **out, ckd_error *err);

/* ---- shared ---- */
/*
 * A limit of bytes per second: a bucket that fills steadily and holds a tenth of a second. A caller that takes more
 * than is in it leaves a debt, for which the next one waits. Thread-safe. bytes_per_s 0: no limit.
 */
typedef struct object_rate {
    pthread_mutex_t mutex;
    uint64_t bytes_per_s, filled_ns;
    double tokens;
} object_rate;
void object_rate_init(object_rate *r, uint64_t bytes_per_s, uint64_t now_ns);
void object_rate_destroy(object_rate *r);
/* Takes `size` bytes and returns 0, or takes nothing and returns how long to wait, in ns. */
uint64_t object_rate_take(object_rate *r, uint64_t size, uint64_t now_ns);
/* Takes them, and sleeps until it may. Errors: those of object_call_check. */
ckd_status object_rate_wait(object_rate *r, uint64_t size, const object_call *call, const char *what,
                            ckd_error *err);
/* Sleeps, unless the call ends earlier. Errors: those of object_call_check. */
ckd_status object_call_sleep(const object_call *call, uint64_t ns, const char *what, ckd_error *err);
/*
 * Returns CKD_OK, CANCELLED or what the callback says, or BUSY if the deadline has passed. `what` begins the message.
 */
ckd_status object_call_check(const object_call *call, const char *what, ckd_error *err);
/* The source's bytes [at, at + size): in memory, or read into `scratch`. NULL on failure. */
const void *object_source_bytes(const object_source *from, uint64_t at, size_t size, bytes *scratch,
                                ckd_error *err);
/* Adds a copy of the item and of its key. Errors: NOMEM. */
ckd_status object_page_add(object_page *page, const object_item *item, ckd_error *err);

#endif
