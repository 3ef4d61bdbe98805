/* How far the lossy checkpoints of a list are from what was saved. */
#ifndef CLI_LOSSY_ERRORS_H
#define CLI_LOSSY_ERRORS_H

#include <jansson.h>

#include "cli/output/errors.h"

/*
 * A JSON array with an object for each lossy checkpoint of the list. What was deleted since that was read is taken off it:
 * others may delete while we look. Of what is damaged the errors are left out, which a note says.
 */
ckd_status cli_lossy_errors(json_t **out, ckd_store *store, ckd_checkpoint_list *list, ckd_error *err);

#endif
