/* The files of the mirror share this. */
#ifndef OBJECTS_MIRROR_MIRROR_H
#define OBJECTS_MIRROR_MIRROR_H

#include <pthread.h>
#include <stdatomic.h>

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
 * more, as free, at the end. The next number is the next lease, and only one can put it. A number is taken from a
 * holder that has not written for LEASE_DEAD_NS; and at once from one of this mirror, because its local lock has ended.
 */
#define LEASE_RENEW_NS UINT64_C(5000000000)
#define LEASE_DEAD_NS  UINT64_C(20000000000)

typedef struct lease {
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    pthread_t renewer;
    bool has_renewer, closing;
    atomic_bool held;     /* by this process */
    atomic_bool lost;     /* it was, and another one has taken it */
    uint64_t number;      /* of the lease that is held */
    uint64_t renewals;    /* how often it was written */
    uint64_t confirmed_ns; /* when it was last known to be ours, on clock_monotonic_ns */
    _Atomic uint64_t renewed_ns; /* when the last write of it that succeeded began */
    /* what another holder was last seen to have written, and since when */
    uint64_t seen_number, seen_ns;
    char seen[256];
} lease;

void lease_init(lease *l);
/* Ends the thread. The lease is not held. */
void lease_destroy(lease *l);
/* Errors: BUSY (held by another one), those of objects. */
ckd_status lease_acquire(object_mirror *m, uint32_t timeout_ms, ckd_error *err);
void lease_release(object_mirror *m);
/*
 * Called before an object is put or removed that the lease protects. Asks the place if the lease was not confirmed
 * lately. CKD_OK also if this process holds no lease. Errors: IO (the lease was lost), those of objects.
 */
ckd_status lease_check(object_mirror *m, ckd_error *err);
/*
 * For such a request, which may be tried again for minutes: it ends when another machine may have the lease. The mirror
 * must outlive it.
 */
object_call lease_call(object_mirror *m);

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
    file_mount mount;
    bool single_writer; /* the place does not honour conditional puts, and the user knows */
    bool may_write;     /* the place was probed */
    lease lease;
    pthread_mutex_t mutex; /* guards what follows */
    uint64_t refreshed_ns;
    struct known_size {
        char name[64];
        uint64_t size, at_ns;
    } sizes[256]; /* of remote files, by a hash of the name */
};

/* home/NAME, and home/./store/NAME: a path that is not mounted. */
mirror_path mirror_file(const object_mirror *m, const char *name);
mirror_path mirror_local(const object_mirror *m, const char *name);
/* Locks the copies against other processes and threads of this machine. */
ckd_status mirror_lock(file_lock **out, const object_mirror *m, ckd_error *err);
/* Puts an object only if it is absent; where the place cannot, as far as that goes. */
ckd_status mirror_put_new(object_mirror *m, const char *key, const object_source *from,
                          const object_call *call, ckd_error *err);

#endif
