/* Reports what an import would do, as text or JSON. */
#ifndef CLI_CONVERT_IMPORT_REPORT_H
#define CLI_CONVERT_IMPORT_REPORT_H

#include "cli/convert/import_plan.h"
#include "cli/output/options.h"

/* Prints on stderr rules that match nothing and metadata that is left out. */
void import_report_remarks(const import_plan *plan);
/* Prints on stdout the origin of each tensor; with --json as described in docs/cli.md. */
ckd_status import_report_plan(const import_plan *plan, const cli_options *options, cli_roles *roles,
                              ckd_error *err);

#endif
