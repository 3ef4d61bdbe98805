/* What a save left out: tensors that the checkpoint before it has. That is rarely meant, and a load would not say so. */
#ifndef CLI_MISSING_H
#define CLI_MISSING_H

#include <jansson.h>

#include "cli/files/inputs.h"

/*
 * The checkpoint before is the parent, or without one the run's newest before this step. Names are in its order; empty without such
 * a checkpoint. The caller releases the array.
 */
ckd_status cli_missing_find(json_t **names, ckd_id *before, ckd_store *store, const ckd_checkpoint *saved,
                            const cli_inputs *inputs, ckd_error *err);
/* A note that names the first ones, or with `all` all of them; nothing if there are none. saved and before: RUN@STEP. */
void cli_missing_tell(const json_t *names, const char *saved, const char *before, bool all);

#endif
