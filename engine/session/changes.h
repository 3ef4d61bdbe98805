/*
 * Does a tensor change much more than it used to? From samples of its values at saves, and without a clock. Internal to
 * engine/.
 *
 * Learning rates, and steps between saves, make all tensors change more or less. So a tensor's change is compared with
 * that of the median tensor at the same save, and this ratio with its own past.
 */
#ifndef ENGINE_CHANGES_H
#define ENGINE_CHANGES_H

#include <stddef.h>

#include "engine/session/sensors.h"

#define CHANGES_MAX    512 /* tensors that are watched */
#define CHANGE_SLICES  16  /* a sample is so many slices, */
#define CHANGE_SLICE   16  /* each of so many neighbours: a cache line */
#define CHANGE_SAMPLE  256
#define CHANGE_TENSORS 4 /* fewer that changed have no median worth the name */
#define CHANGE_SHARE   8 /* only one value in so many has to change for a change to count */

/* A tensor that is watched. */
typedef struct change_history {
    size_t item;            /* of the session */
    sensor_history history; /* ratios */
} change_history;

typedef struct changes {
    size_t count;
    change_history *tensors; /* NULL: not made yet */
    double *samples;         /* of the last save, CHANGE_SAMPLE of each tensor */
    double *found;           /* changes since the save before; scratch */
    double *sorted;          /* scratch */
    bool has_samples;
} changes;

/* A tensor whose change is unlike those before. */
typedef struct change_alarm {
    size_t tensor;          /* the one farthest beyond its limit */
    size_t others;          /* how many more are beyond theirs */
    double ratio;           /* its change over that of the median tensor */
    sensor_reading reading; /* of its ratios */
} change_alarm;

/* False if out of memory. The caller sets the items. Release with changes_free, which accepts zeros. */
bool changes_make(changes *out, size_t count);
void changes_free(changes *c);

/* Returns the place of a slice in a tensor of at least CHANGE_SAMPLE elements. No two slices overlap. */
uint64_t change_slice(uint64_t elements, size_t slice);
/*
 * Replaces the sample of a tensor, and returns the root mean square of its change. 0: too few values have changed, so
 * that their rounding would decide. NaN: a value is not finite.
 */
double change_replace(double sample[CHANGE_SAMPLE], const double now[CHANGE_SAMPLE]);
/* Judges `found`. True if a tensor's ratio is unlike those before, and was not at the last save. */
bool changes_judge(change_alarm *out, changes *c);

#endif
