/* The charts of a report: size per checkpoint, total size, bits by role, and the lineage. */
#ifndef CLI_REPORT_CHARTS_H
#define CLI_REPORT_CHARTS_H

#include <stdio.h>

#include "cli/report/report.h"

/* Writes them; there must be a checkpoint. Errors: NOMEM. */
ckd_status report_charts(FILE *to, const report_data *d, ckd_error *err);

#endif
