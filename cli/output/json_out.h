/*
 * JSON on stdout: one object with "schema": 1. docs/cli.md defines the fields. Functions return NULL when out of memory
 * and pass on a NULL argument, so only cli_json_print checks.
 */
#ifndef CLI_JSON_OUT_H
#define CLI_JSON_OUT_H

#include <jansson.h>

#include "cli/output/by_id.h"

/* Makes a string; bytes that are not UTF-8 become '?'. NULL becomes null. */
json_t *cli_json_text(const char *text);
/* null for NaN and infinities */
json_t *cli_json_double(double value);
json_t *cli_json_ratio(uint64_t raw, uint64_t stored);
/* Appends `item` and takes ownership of it. On failure frees the array and sets it to NULL. */
void cli_json_append(json_t **array, json_t *item);

/* Makes a checkpoint's object. `all` is searched for its relatives. */
json_t *cli_json_checkpoint(const ckd_checkpoint *c, const ckd_checkpoint_list *all);
/* The same, with the store's checkpoints as relatives. *out is NULL on failure. */
ckd_status cli_json_checkpoint_of(json_t **out, const ckd_checkpoint *c, ckd_store *store, ckd_error *err);
/* {"schema": 1, "checkpoints": [c]} */
json_t *cli_json_one_checkpoint(const ckd_checkpoint *c, const ckd_checkpoint_list *all);

/* Prints and frees the object. */
ckd_status cli_json_print(json_t *root, ckd_error *err); /* escapes terminal control characters in names */
/*
 * As cli_json_print, with the checkpoints of `list` as an array in member `key`. They are printed one by one, in a
 * fraction of the time of a complete tree. `all` is searched for their relatives.
 */
ckd_status cli_json_print_list(json_t *root, const char *key, const ckd_checkpoint_list *list,
                               const ckd_checkpoint_list *all, ckd_error *err);

/* "RUN@STEP" */
typedef struct cli_place_text {
    char text[CKD_RUN_MAX + 24];
} cli_place_text;
cli_place_text cli_place_of(const ckd_checkpoint *c);

#endif
