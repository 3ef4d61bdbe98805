/* The time axis of the picture of saves. Idle times are cut out. */
#ifndef CLI_REPORT_TIMELINE_AXIS_H
#define CLI_REPORT_TIMELINE_AXIS_H

#include <stdio.h>

#include "cli/report/report.h"

#define AXIS_WIDTH     960 /* pixels of the picture */
#define AXIS_LEFT      140
#define AXIS_RIGHT     20
#define AXIS_TOP       58
#define AXIS_BOTTOM    50
#define AXIS_CHARACTER 6.6 /* width of a character, about */
#define AXIS_NAME      18  /* characters of a run's name beside its lane */
#define AXIS_SAVES     200 /* at most; the last ones are drawn */

/* A time in which saves follow each other without a long pause. */
typedef struct time_span {
    uint64_t begin_ns, end_ns;
    double x; /* of its beginning */
} time_span;

typedef struct time_axis {
    time_span *spans; /* free it */
    size_t count;
    double scale; /* pixels per nanosecond */
    double cut;   /* pixels between two spans */
} time_axis;

/* False if out of memory. */
bool axis_make(time_axis *out, const timeline_save *saves, size_t count);
/* Returns the place of a moment; one between two spans is at the end of the earlier one. */
double axis_x(const time_axis *axis, uint64_t ns);
/* Draws the axis at `bottom`, with round numbers of seconds since the first save began; and the cuts. */
void axis_draw(FILE *to, const time_axis *axis, int top, int bottom);

/* Returns when a save began. */
uint64_t timeline_begin(const timeline_save *save);

#endif
