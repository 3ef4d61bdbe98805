/* Finds checkpoints of a list by id: a list may have a hundred thousand, each naming two others. */
#ifndef CLI_BY_ID_H
#define CLI_BY_ID_H

#include <stdbool.h>

#include "cli/output/errors.h"

bool cli_has_id(const ckd_checkpoint *c, const ckd_id *id);
bool cli_id_is_none(const ckd_id *id);
/* Returns the first with this id, by linear search; NULL if there is none. */
const ckd_checkpoint *cli_by_id(const ckd_checkpoint_list *all, const ckd_id *id);

typedef struct cli_ids {
    const ckd_checkpoint_list *all;
    const ckd_checkpoint **slots; /* open addressing; NULL: use cli_by_id */
    size_t capacity;
} cli_ids;
/*
 * Makes an index for many look-ups. The list must stay valid. Release with cli_ids_free, which accepts a zeroed index.
 */
ckd_status cli_ids_make(cli_ids *out, const ckd_checkpoint_list *all, ckd_error *err);
void cli_ids_free(cli_ids *ids);
/* As cli_by_id. */
const ckd_checkpoint *cli_ids_find(const cli_ids *ids, const ckd_id *id);

#endif
