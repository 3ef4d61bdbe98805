/* Saves over time, as a picture: a lane for each rank. */
#ifndef CLI_TIMELINE_SVG_H
#define CLI_TIMELINE_SVG_H

#include "cli/output/errors.h"

/* A save, and what its ranks did in it; none of one that an older version made. */
typedef struct timeline_save {
    const ckd_save_times *times;
    const ckd_stage_times *stages; /* by rank, then stage */
    size_t stage_count;
} timeline_save;

/* Self-contained, readable in light and dark. malloc'ed; NULL if out of memory. `saves` by time. */
char *cli_timeline_svg(const timeline_save *saves, size_t count, size_t *size);

#endif
