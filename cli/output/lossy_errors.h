/* Errors of the lossy checkpoints in a list. */
#ifndef CLI_LOSSY_ERRORS_H
#define CLI_LOSSY_ERRORS_H

#include <jansson.h>

#include "cli/output/errors.h"

/*
 * Makes a JSON array with an object for each lossy checkpoint of the list. Checkpoints that another process has deleted
 * meanwhile are removed from the list. Damaged ones get no errors, which a note reports.
 */
ckd_status cli_lossy_errors(json_t **out, ckd_store *store, ckd_checkpoint_list *list, ckd_error *err);

#endif
