/* What an import would do, for people and programs. */
#ifndef CLI_IMPORT_TELL_H
#define CLI_IMPORT_TELL_H

#include "cli/convert/import_plan.h"
#include "cli/output/options.h"

/* On stderr: rules that match nothing, metadata that is left out. */
void import_tell_notes(const import_plan *plan);
/* On stdout: what each tensor becomes; with --json, as docs/cli.md has it. */
ckd_status import_tell_plan(const import_plan *plan, const cli_options *options, cli_roles *roles,
                            ckd_error *err);

#endif
