/*
 * Objects: immutable sequences of bytes with a key, in a directory or in a bucket of an S3 service, behind one table of
 * functions. An object is there as a whole or not at all, and readers never see a part of it.
 *
 * A store is open at a place and a prefix; keys are relative to the prefix. All functions may be called by several
 * threads at once, except objects_close. Each one reports what failed, on which object and server, and what to do. No
 * message contains a secret.
 */
#ifndef OBJECTS_OBJECTS_H
#define OBJECTS_OBJECTS_H

#include "base/bytes.h"
#include "base/error.h"
#include "base/file.h"

/* ---- opening ---- */

typedef struct object_store object_store;

/* Zero-initialise; every zero stands for a default. Strings are copied. A directory heeds only bytes_per_s. */
typedef struct object_options {
    /*
     * http(s)://HOST[:PORT][/PATH]; NULL: as the environment or the profile says, else AWS. The bucket comes behind it.
     */
    const char *endpoint;
    const char *region;
    const char *profile;  /* then credentials in the environment are not used */
    uint32_t connections; /* of one call; 4 */
    uint32_t attempts;    /* of one request; 8 */
    uint32_t pause_ms;    /* bound of the first pause between attempts, which doubles each time; 200 */
    uint32_t stall_ms;    /* a connection that moves nothing for so long is given up; 30000 */
    uint64_t bytes_per_s; /* of all calls on the store together, sent and received, on average; no limit */
    /*
     * Larger objects are uploaded in parts of this size; 16 MiB, not below 5 MiB. A file is read a part for each
     * connection.
     */
    uint64_t part_size;
    bool http2; /* over TLS, if the server has it */
    bool
        bucket_in_host; /* BUCKET.HOST of the endpoint, as some services demand; AWS is asked so in any case */
} object_options;

/*
 * Opens `s3://BUCKET/PREFIX`, or a directory, which must exist. options may be NULL. Opening a bucket reads credentials
 * but sends it nothing. A forked child may only close a bucket that its parent opened: its other calls fail with STATE.
 * Errors: INVALID (a malformed address), NOT_FOUND (no such directory or profile), UNSUPPORTED (S3, but
 * libckptdelta_s3.so cannot be loaded), STATE (no credentials), NOMEM.
 */
ckd_status objects_open(object_store **out, const char *address, const object_options *options,
                        ckd_error *err);
void objects_close(object_store *store); /* accepts NULL */
/* Does the address begin with s3:// ? */
bool objects_address_is_remote(const char *address);

/* ---- calls ---- */

/* How long a call may take, and who may stop it. Zero-initialise. All functions accept NULL for it. */
typedef struct object_call {
    uint64_t deadline_ns; /* on clock_monotonic_ns; the call fails with BUSY then. 0: none */
    /*
     * Asked about ten times a second. Returns CKD_OK, or the error that the call shall end with. Called by the thread
     * that made the call. NULL: the call is never cancelled.
     */
    ckd_status (*poll)(void *context, ckd_error *err);
    void *context;
} object_call;

/*
 * A key has 1 to OBJECT_KEY_MAX bytes of A-Z a-z 0-9 . _ - and /, its parts between slashes are 1 to OBJECT_PART_MAX
 * bytes long, and none begins with a dot. The prefix of a store follows the same rules. A directory cannot have both
 * `a` and `a/b`: what comes second is INVALID there.
 */
enum { OBJECT_KEY_MAX = 512, OBJECT_PART_MAX = 200 };
bool object_key_valid(const char *key);
/* As object_key_valid, for the beginning of a key: it may be empty or end anywhere. */
bool object_prefix_valid(const char *prefix);

/* Bytes in memory, or, if `file` is set, of a file from `offset` on. */
typedef struct object_source {
    const void *data;
    file_reader *file;
    uint64_t offset;
    uint64_t size;
} object_source;

/*
 * Stores an object, durably. An object of this key is replaced. For data whose keys are never used twice: repeated or
 * concurrent calls write the same bytes. Errors: INVALID (the key; the size), IO, NOSPACE, READ_ONLY (access denied),
 * BUSY (the deadline), CANCELLED, NOMEM.
 */
ckd_status objects_put(object_store *store, const char *key, const object_source *from,
                       const object_call *call, ckd_error *err);
/*
 * As objects_put, but fails with EXISTS if the key has an object: of several callers exactly one succeeds. This is how
 * a commit is published. The object is small, at most OBJECT_NEW_MAX bytes. If a request's answer is lost, the object
 * is read to see who wrote it. Any other error leaves open whether the object was written, and the message says so
 * where that is the case. On a server that ignores the condition this call replaces objects: see objects_probe.
 */
#define OBJECT_NEW_MAX (UINT64_C(64) << 20)
ckd_status objects_put_new(object_store *store, const char *key, const object_source *from,
                           const object_call *call, ckd_error *err);
/*
 * Writes and removes a few objects to find out whether this place honours objects_put_new, also in a race. Sets
 * *honoured. A probe that is killed leaves objects whose keys begin with `probe-`. Errors: as objects_put; a place that
 * cannot be written is an error.
 */
ckd_status objects_probe(object_store *store, bool *honoured, const object_call *call, ckd_error *err);

typedef struct object_range {
    uint64_t offset;
    void *to;
    size_t size;
} object_range;
/*
 * Reads exactly `size` bytes at `offset` into `to`. Errors: NOT_FOUND; CORRUPT (the object is shorter); as objects_put.
 */
ckd_status objects_get(object_store *store, const char *key, const object_range *range,
                       const object_call *call, ckd_error *err);
/* Errors: NOT_FOUND; as objects_put. */
ckd_status objects_size(object_store *store, const char *key, uint64_t *size, const object_call *call,
                        ckd_error *err);
/* Removes objects. An absent object counts as removed. After an error some may remain. Errors: as objects_put. */
ckd_status objects_delete(object_store *store, const char *const *keys, size_t count, const object_call *call,
                          ckd_error *err);

/* Keys in the order of their bytes. Objects whose names are no valid keys are left out. */
enum { OBJECT_TAG = 48 };
typedef struct object_item {
    char *key;
    uint64_t size;
    uint64_t modified_s;  /* since 1970, by the clock of the place; 0: unknown */
    char tag[OBJECT_TAG]; /* another one after a put of other bytes; "": unknown */
} object_item;
typedef struct object_page {
    object_item *items;
    size_t count;
    size_t capacity;
    char *next; /* what to continue after; NULL: this page is the last */
} object_page;
/*
 * Reads the keys that begin with `prefix` and come after `after` (NULL or "": all), at most `limit` of them (0: 1000;
 * at most 1000). A page may have fewer, even none, and yet a next one. Release it with object_page_free. Errors: as
 * objects_put.
 */
typedef struct object_query {
    const char *prefix, *after;
    uint32_t limit;
} object_query;
ckd_status objects_list(object_store *store, const object_query *query, object_page *out,
                        const object_call *call, ckd_error *err);
void object_page_free(object_page *page);

/*
 * Removes what interrupted calls left behind: uploads in parts, and temporary files, that began at least `age_s`
 * seconds ago. An upload that is still in progress fails if it is that old. Adds their number to *count. Errors: as
 * objects_put.
 */
ckd_status objects_abort_uploads(object_store *store, uint64_t age_s, uint64_t *count,
                                 const object_call *call, ckd_error *err);

/* ---- a store's directory whose files are objects ---- */

/*
 * A mirror: a directory in the user's cache folder that stands for a store at `s3://BUCKET/PREFIX` (base/file.h,
 * "directories whose files are elsewhere"). A file's path in the store is its key. Small files have copies in the
 * directory; chunk files and parity are read from the bucket. The store's publish lock is a lease in the bucket as well,
 * so machines take turns. Intents, and the other locks, are those of this machine.
 */
typedef struct object_mirror object_mirror;
/*
 * Opens the mirror of an address and brings its copies up to date. Mirrors of one address in a process share their
 * state. writes: also finds out, once, whether the place honours objects_put_new, and refuses with UNSUPPORTED if not,
 * unless CKPTDELTA_SINGLE_WRITER=1 declares that nobody else writes. The folder is CKPTDELTA_CACHE, or ckptdelta in
 * XDG_CACHE_HOME or ~/.cache. Errors: as objects_open, objects_list and objects_get; STATE (there is no such folder).
 */
ckd_status objects_mirror(object_mirror **out, const char *address, bool writes, ckd_error *err);
/* The directory. */
const char *object_mirror_path(const object_mirror *m);
void object_mirror_close(object_mirror *m); /* accepts NULL */
/* Is this directory that of a mirror? Changes that are made in it by itself would be lost. */
bool objects_is_mirror(const char *path);

#endif
