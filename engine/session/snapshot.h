/*
 * A copy of what a trainer holds, in memory that was allocated beforehand. Any number of threads copy it together, piece by piece; a
 * reader can have each source as soon as it is copied. Internal to engine/.
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

#define SNAPSHOT_ALL     UINT32_MAX       /* groups */
#define SNAPSHOT_AT_ONCE (UINT32_MAX - 1) /* the group of what is copied before the trainer goes on */

typedef struct snapshot_piece {
    uint32_t source;
    uint64_t offset, bytes;
    atomic_bool taken;
} snapshot_piece;

typedef struct snapshot {
    const snapshot_source *sources;
    size_t count;
    uint8_t *memory;        /* whole large pages; a forked child has none of it */
    size_t size;            /* of it */
    uint64_t *places;       /* of the sources in it */
    snapshot_piece *pieces; /* by source */
    size_t piece_count;
    atomic_size_t next;    /* pieces before it are taken */
    atomic_uint *left;     /* pieces of each source that are not copied yet */
    pthread_mutex_t mutex; /* for waiting only */
    pthread_cond_t copied; /* a whole source is */
} snapshot;

/*
 * Memory of whole large pages where there are any, aligned as these. Touched, so that the first copy does not wait for the system to find pages. A child that the trainer forks
 * (a data loader's worker) does not get it: the next copy would have to copy each page for it first, and memory would be needed twice. NULL: there is none. Release with
 * snapshot_memory_free, not in a child.
 */
uint8_t *snapshot_memory(size_t *size, uint64_t need);
void snapshot_memory_free(uint8_t *memory, size_t size);

/* What a snapshot of these takes, without what is as small as they are many. */
uint64_t snapshot_size(const snapshot_source *sources, size_t count);
/* The sources are the caller's, and outlive it. All memory is allocated, and touched, here. Errors: NOMEM. */
ckd_status snapshot_new(snapshot **out, const snapshot_source *sources, size_t count, ckd_error *err);
/* Accepts NULL. Nobody uses it any more; in a child of the process that made it, somebody may seem to wait for ever. */
void snapshot_free(snapshot *s, bool in_child);

/* From now on all sources are to be copied (again). Nobody is copying or reading. */
void snapshot_start(snapshot *s);
/* Copies a piece that nobody else has taken; false: there is none. From any thread. */
bool snapshot_help(snapshot *s);
/* Copies what of a group nobody else does, and waits for the rest. Then its sources may be changed. */
void snapshot_finish(snapshot *s, uint32_t group);
/* What source i was; waits until it is copied. Valid until the next snapshot_start. */
const void *snapshot_read(snapshot *s, size_t i);

#endif
