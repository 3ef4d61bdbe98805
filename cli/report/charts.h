/* The charts of a report: the size of each checkpoint, all of them together, bits by role, and who descends from whom. */
#ifndef CLI_REPORT_CHARTS_H
#define CLI_REPORT_CHARTS_H

#include <stdio.h>

#include "cli/report/data.h"

/* There is at least one checkpoint. Errors: NOMEM. */
ckd_status report_charts(FILE *to, const report_data *d, ckd_error *err);

#endif
