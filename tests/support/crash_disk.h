/*
 * What a disk may hold when the power fails, by the model of ALICE: whatever was not synced may be there or not, each on its own.
 *
 *   data   any sectors of what was written since the file's last sync, with the new size or without it
 *   names  any of the names given or taken since the directory's last sync; a rename is there whole or not at all, and
 *          for good when either directory is synced
 *
 * A sync of a file says nothing of its name, and a sync of a directory nothing of what its files hold.
 */
#ifndef TESTS_SUPPORT_CRASH_DISK_H
#define TESTS_SUPPORT_CRASH_DISK_H

#include "tests/support/recorder.h"

/* How much of what is not synced is there. */
typedef enum crash_data {
    DATA_NONE,
    DATA_ALL,
    DATA_SIZE, /* the size, and zeros */
    DATA_TORN, /* half of the last write is missing */
    DATA_LAST, /* only the last write */
    DATA_RANDOM
} crash_data;

typedef struct crash_state {
    size_t point;   /* operations that went before */
    uint64_t names; /* of the names that are not synced: those that are there, by bit */
    crash_data data, others;
    unsigned node; /* whose data it is; all others' is `others`. UINT_MAX: everybody's */
    uint64_t seed;
    uint64_t key; /* of two states with equal keys one is enough */
    size_t expected;
    bool simple; /* all or none of the names, one way for all data, and not in the middle of several writes */
} crash_state;

typedef struct crash_states {
    crash_state *items; /* by point */
    size_t count, capacity;
} crash_states;

/* Does a sync count? */
typedef bool (*crash_syncs_fn)(const void *context, const op *o);

/*
 * Adds the states that keys lacks, and their keys to it. `more`: random states at every point. Within a point names are taken in all ways
 * up to 4 of them, else singly.
 */
typedef struct crash_keys {
    uint64_t *slots;
    size_t count, capacity;
} crash_keys;
void crash_states_add(crash_states *out, crash_keys *keys, const op_record *r, unsigned more, uint64_t seed,
                      crash_syncs_fn syncs, const void *context);
void crash_states_free(crash_states *states);
void crash_keys_free(crash_keys *keys);

/* Goes through a record once, and writes states in order of their points. */
typedef struct crash_disk crash_disk;
crash_disk *crash_disk_new(const op_record *r, crash_syncs_fn syncs, const void *context);
void crash_disk_free(crash_disk *d);
/* As a directory tree; `to` must not exist. */
void crash_disk_write(crash_disk *d, const crash_state *s, const char *to);
/* What happened last before it, and what is there; static. */
const char *crash_disk_describe(crash_disk *d, const crash_state *s);

#endif
