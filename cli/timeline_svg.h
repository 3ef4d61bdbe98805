/* Saves over time, as a picture. */
#ifndef CLI_TIMELINE_SVG_H
#define CLI_TIMELINE_SVG_H

#include "cli/errors.h"

/* Self-contained, readable in light and dark. malloc'ed; NULL if out of memory. `items` by time. */
char *cli_timeline_svg(const ckd_save_times *items, size_t count, size_t *size);

#endif
