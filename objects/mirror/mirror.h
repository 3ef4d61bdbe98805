/* The files of the mirror share this. */
#ifndef OBJECTS_MIRROR_MIRROR_H
#define OBJECTS_MIRROR_MIRROR_H

#include <pthread.h>

#include "objects/objects.h"

#define MIRROR_PATH 1024 /* bytes of a path in the cache folder, at most */

typedef struct mirror_path {
    char text[MIRROR_PATH + OBJECT_KEY_MAX];
} mirror_path;

/* ---- names.c: pure ---- */
mount_kind mirror_kind(const char *name);
/*
 * A name as a key, and back: a byte that keys cannot have is `_` and two digits, and so is a `_` that two such digits
 * follow. Errors: INVALID (too long, or no name of a store's file); false.
 */
ckd_status mirror_key(char out[OBJECT_KEY_MAX + 1], const char *name, ckd_error *err);
bool mirror_name(char out[OBJECT_KEY_MAX + 1], const char *key);

/* ---- lease.c: whose turn it is to change the store ---- */

/*
 * Leases are objects `lease/NUMBER`. The highest number counts. Its holder writes it again every few seconds, and once
 * more, as free, at the end. The next number is the next lease, and only one can put it. Another machine takes it from a
 * holder whose text has not changed for LEASE_DEAD_NS; so a holder relies on it for LEASE_VALID_NS after it began to
 * write it. A holder that ended on this machine is not waited for; but requests that it sent may still arrive for
 * LEASE_SETTLE_NS.
 */
#define LEASE_RENEW_NS  UINT64_C(4000000000)
#define LEASE_VALID_NS  UINT64_C(15000000000)
#define LEASE_DEAD_NS   UINT64_C(20000000000)
#define LEASE_SETTLE_NS UINT64_C(5000000000)

typedef struct lease {
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    pthread_t renewer;
    bool has_renewer, closing;
    bool held;           /* by this process */
    bool renewing;       /* a request of the renewer is under way */
    uint64_t number;     /* of the lease that is held */
    uint64_t renewals;   /* makes each text another one */
    uint64_t written_ns; /* when the last successful write of it began, on CLOCK_BOOTTIME */
    /* what another holder was last seen to have written, and since when */
    uint64_t seen_number, seen_ns;
    char seen[320];
} lease;

void lease_init(lease *l);
/* Ends the thread. The lease is not held. */
void lease_destroy(lease *l);
/* Errors: BUSY (held by another one), IO (the server took too long), those of objects. */
ckd_status lease_acquire(object_mirror *m, uint32_t timeout_ms, ckd_error *err);
void lease_release(object_mirror *m);
/* Errors: IO (this process holds the lease, and has not renewed it in time). CKD_OK also if it holds none. */
ckd_status lease_check(object_mirror *m, ckd_error *err);
/* For a request that the lease protects: it ends when lease_check would fail. */
object_call lease_call(object_mirror *m);

/* ---- ahead.c: files that are read in order are read ahead ---- */
enum { AHEAD_STREAMS = 16, AHEAD_THREADS = 8, AHEAD_NAME = 64 };
typedef struct ahead_piece ahead_piece;
/* A file that is being read. */
typedef struct ahead_stream {
    char name[AHEAD_NAME];
    uint64_t file_size, used;
    uint64_t next;         /* behind the farthest byte that was read in order */
    uint64_t end;          /* behind the last piece */
    uint64_t read, wasted; /* bytes that were asked for; bytes that were fetched in vain */
    unsigned run;          /* reads in order so far */
    ahead_piece *pieces;
    uint64_t held; /* bytes of the pieces */
    /* Announced reads, joined where they are close: [hint, hint_count) are not fetched yet. */
    file_range *hints;
    size_t hint, hint_count;
} ahead_stream;
typedef struct ahead {
    pthread_mutex_t mutex;
    pthread_cond_t queued, arrived;
    pthread_t threads[AHEAD_THREADS];
    size_t thread_count;
    bool closing;
    uint64_t memory, clock;
    ahead_stream streams[AHEAD_STREAMS];
} ahead;
void ahead_init(ahead *a);
void ahead_destroy(ahead *a);
/* Begins to fetch these ranges, which are in the order of the file. */
void ahead_announce(object_mirror *m, const char *name, uint64_t file_size, const file_range *ranges,
                    size_t count);
/* As objects_get. */
ckd_status ahead_read(object_mirror *m, const char *name, uint64_t file_size, const object_range *range,
                      ckd_error *err);

/* ---- copies.c ---- */
/* Takes the local lock and brings all copies up to date; without `ask`, not if that was done a moment ago. */
ckd_status copies_refresh(object_mirror *m, bool ask, ckd_error *err);
/* Fetches one copy again. *changed: it was not what the place has. Under the local lock. Errors: NOT_FOUND. */
ckd_status copies_fetch(object_mirror *m, const char *name, bool *changed, ckd_error *err);

/* ---- mirror.c ---- */
struct object_mirror {
    object_mirror *next; /* in the process's list */
    unsigned users;
    pid_t process; /* which opened it */
    char *address;
    object_store *objects;
    char home[MIRROR_PATH]; /* the folder of this mirror in the cache folder */
    char root[MIRROR_PATH]; /* home/store, which is mounted */
    char id[33];            /* random: tells the leases of this mirror from those of others */
    char boot[BOOT_ID];     /* the id of this boot of the machine; "?" if unknown */
    char opened[17];        /* random, for each time that it is opened */
    file_mount mount;
    bool single_writer; /* the place does not honour conditional puts, and the user knows */
    bool may_write;     /* the place was probed */
    lease lease;
    ahead ahead;
    pthread_mutex_t mutex; /* guards what follows */
    uint64_t refreshed_ns;
    struct known_size {
        char name[64];
        uint64_t size, at_ns;
    } sizes[256]; /* of remote files, by a hash of the name */
};

/* Functions of the mount; root and context are not set. */
extern const file_mount mirror_functions;
/* home/NAME, and home/./store/NAME: a path that is not mounted. */
mirror_path mirror_file(const object_mirror *m, const char *name);
mirror_path mirror_local(const object_mirror *m, const char *name);
/* Locks the copies against other processes and threads of this machine. */
ckd_status mirror_lock(file_lock **out, const object_mirror *m, ckd_error *err);
/* Calls take with all objects whose keys begin with the prefix, until a call fails. */
typedef ckd_status (*take_object_fn)(void *to, const object_item *item, ckd_error *err);
ckd_status mirror_each_object(const object_mirror *m, const char *prefix, take_object_fn take, void *to,
                              ckd_error *err);
/* Puts an object only if it is absent; where the place cannot, as far as that goes. */
ckd_status mirror_put_new(object_mirror *m, const char *key, const object_source *from,
                          const object_call *call, ckd_error *err);

#endif
