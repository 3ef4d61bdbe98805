/*
 * Tensors that a save left out although the previous checkpoint has them. This is rarely intended, and a load would not
 * notice.
 */
#ifndef CLI_MISSING_H
#define CLI_MISSING_H

#include <jansson.h>

#include "cli/files/files.h"

/*
 * Finds them. The previous checkpoint is the parent, or without one the run's newest before this step. Names are in its
 * order; none if there is no such checkpoint. The caller releases the array.
 */
ckd_status cli_missing_find(json_t **names, ckd_id *before, ckd_store *store, const ckd_checkpoint *saved,
                            const cli_inputs *inputs, ckd_error *err);
/*
 * Prints a note that names the first few, or all of them with `all`; nothing if there are none. saved and before:
 * RUN@STEP.
 */
void cli_missing_report(const json_t *names, const char *saved, const char *before, bool all);

#endif
