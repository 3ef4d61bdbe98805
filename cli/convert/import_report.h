/* What an import would do, for people and programs. */
#ifndef CLI_CONVERT_IMPORT_REPORT_H
#define CLI_CONVERT_IMPORT_REPORT_H

#include "cli/convert/import_plan.h"
#include "cli/output/options.h"

/* On stderr: rules that match nothing, metadata that is left out. */
void import_report_remarks(const import_plan *plan);
/* On stdout: what each tensor becomes; with --json, as docs/cli.md has it. */
ckd_status import_report_plan(const import_plan *plan, const cli_options *options, cli_roles *roles,
                              ckd_error *err);

#endif
