/* Saves over time as a picture: one lane per rank. */
#ifndef CLI_TIMELINE_SVG_H
#define CLI_TIMELINE_SVG_H

#include "cli/output/errors.h"

/* A save and its ranks' stages; none if an older version made the save. */
typedef struct timeline_save {
    const ckd_save_times *times;
    const ckd_stage_times *stages; /* by rank, then stage */
    size_t stage_count;
} timeline_save;

/*
 * Makes a self-contained SVG, readable in light and dark mode. malloc'ed; NULL if out of memory. `saves` is sorted by
 * time.
 */
char *cli_timeline_svg(const timeline_save *saves, size_t count, size_t *size);

#endif
