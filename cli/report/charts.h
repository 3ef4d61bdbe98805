/* The charts of a report's page. Each is a <figure>; one without data is left out. */
#ifndef CLI_REPORT_CHARTS_H
#define CLI_REPORT_CHARTS_H

#include <stdio.h>

#include "cli/report/report.h"

/* Writes all of them; there must be a checkpoint. Errors: NOMEM. */
ckd_status report_charts(FILE *to, const report_data *d, ckd_error *err);

/* Parts of it: bits by layer and step, a figure for each shown run; runs as lanes, with branches, chains and tags. */
void report_heat_maps(FILE *to, const report_data *d);
ckd_status report_lineage(FILE *to, const report_data *d, ckd_error *err);

/* Attempts and saves of supervised runs over time, a figure for each of the runs with most attempts. */
void report_draw_lives(FILE *to, const report_data *d);

#endif
