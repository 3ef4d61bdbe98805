/*
 * A copy of the trainer's data in preallocated memory. Any number of threads copy it together, in slices. A reader can
 * have each source as soon as it is copied. Internal to engine/.
 */
#ifndef ENGINE_SNAPSHOT_H
#define ENGINE_SNAPSHOT_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "base/bytes.h"
#include "base/error.h"

typedef struct snapshot_source {
    const void *data; /* the trainer's; valid as long as the snapshot */
    uint64_t bytes;
    uint32_t group;
} snapshot_source;

#define SNAPSHOT_ALL     UINT32_MAX       /* all groups */
#define SNAPSHOT_AT_ONCE (UINT32_MAX - 1) /* the group copied before the trainer continues */

typedef struct snapshot_slice {
    uint32_t source;
    uint64_t offset, bytes;
    atomic_bool claimed;
} snapshot_slice;

typedef struct snapshot {
    const snapshot_source *sources;
    size_t count;
    uint8_t *memory;        /* whole huge pages; not mapped in a forked child */
    bool borrowed;          /* the memory is the caller's */
    size_t size;            /* of memory */
    uint64_t *places;       /* of the sources in memory */
    snapshot_slice *slices; /* ordered by source */
    size_t slice_count;
    atomic_size_t next;    /* hint: all slices before it are taken */
    atomic_uint *left;     /* uncopied slices of each source */
    pthread_mutex_t mutex; /* only for waiting */
    pthread_cond_t copied; /* signalled when a whole source is copied */
} snapshot;

/*
 * Allocates memory in whole huge pages where possible, and aligns it to them. Touches all pages, so that the first copy
 * does not wait for the system to provide them. A forked child (a worker of a data loader) does not inherit it.
 * Otherwise the next copy would first duplicate each page for the child, and need the memory twice. NULL: out of
 * memory. Release with snapshot_memory_free, but not in a child.
 */
uint8_t *snapshot_memory(size_t *size, uint64_t need);
void snapshot_memory_free(uint8_t *memory, size_t size);

/* Returns the memory that a snapshot of these takes, without its small bookkeeping. */
uint64_t snapshot_size(const snapshot_source *sources, size_t count);
/*
 * Makes a snapshot. The caller owns the sources, which must outlive it. Allocates and touches all its memory, unless it
 * is given some of snapshot_size bytes, which must outlive it, too. Errors: NOMEM.
 */
ckd_status snapshot_new(snapshot **out, const snapshot_source *sources, size_t count, uint8_t *memory,
                        ckd_error *err);
/*
 * Frees a snapshot that nobody uses. Accepts NULL. In a child of the process that made it, the locks are left alone: a
 * thread may appear to wait on them forever.
 */
void snapshot_free(snapshot *s, bool in_child);

/* Marks all sources as not copied. Nobody may be copying or reading. */
void snapshot_start(snapshot *s);
/* Copies one slice that no other thread has taken; false: there is none. Callable from any thread. */
bool snapshot_help(snapshot *s);
/* Copies the remaining slices of a group and waits for those that others copy. After that the sources may change. */
void snapshot_finish(snapshot *s, uint32_t group);
/* Is everything copied? Does not wait. */
bool snapshot_is_complete(const snapshot *s);
/* Returns the copy of source i, waiting until it is complete. Valid until the next snapshot_start. */
const void *snapshot_read(snapshot *s, size_t i);

#endif
