/*
 * The states that a disk may have after a power failure, by the model of ALICE: anything that was not synced
 * may or may not be there, independently.
 *
 *   data   any sectors written since the file's last sync, with the new size or the old one
 *   names  any names added or removed since the directory's last sync. A rename is done whole or not at all,
 *          and is durable when either directory is synced.
 *
 * A sync of a file does not make its name durable. A sync of a directory does not make the contents of its
 * files durable.
 */
#ifndef TESTS_SUPPORT_CRASH_DISK_H
#define TESTS_SUPPORT_CRASH_DISK_H

#include "tests/support/recorder.h"

/* How much of the data that is not synced is there. */
typedef enum crash_data {
    DATA_NONE,
    DATA_ALL,
    DATA_SIZE, /* the new size, with zeros */
    DATA_TORN, /* half of the last write is missing */
    DATA_LAST, /* only the last write */
    DATA_RANDOM
} crash_data;

typedef struct crash_state {
    size_t point;   /* operations before the power failed */
    uint64_t names; /* the names that are there, of those that are not synced; by bit */
    crash_data data, others;
    /* `data` is about this node, and `others` about all others. UINT_MAX: `data` is about all */
    unsigned node;
    uint64_t seed;
    uint64_t key; /* states with equal keys are equal; one of them is enough */
    size_t expected;
    bool simple; /* all of these names or none, the same for all data, and not between two writes */
} crash_state;

typedef struct crash_states {
    crash_state *items; /* in the order of their points */
    size_t count, capacity;
} crash_states;

/* Whether a sync counts. */
typedef bool (*crash_syncs_fn)(const void *context, const op *o);

/*
 * crash_states_add adds the states whose keys are not in `keys`, and adds these keys. `more` is the number of
 * random states at every point. Up to 4 names at a point are combined in all ways; more names are taken one
 * at a time.
 */
typedef struct crash_keys {
    uint64_t *slots;
    size_t count, capacity;
} crash_keys;
void crash_states_add(crash_states *out, crash_keys *keys, const op_record *r, unsigned more, uint64_t seed,
                      crash_syncs_fn syncs, const void *context);
void crash_states_free(crash_states *states);
void crash_keys_free(crash_keys *keys);

/* Goes through a record once, and writes states in the order of their points. */
typedef struct crash_disk crash_disk;
crash_disk *crash_disk_new(const op_record *r, crash_syncs_fn syncs, const void *context);
void crash_disk_free(crash_disk *d);
/* Writes a state as a directory tree; `to` must not exist. */
void crash_disk_write(crash_disk *d, const crash_state *s, const char *to);
/* Describes the last operation before the state, and the state; static. */
const char *crash_disk_describe(crash_disk *d, const crash_state *s);

#endif
