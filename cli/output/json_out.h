/*
 * JSON on stdout: one object with "schema": 1. docs/cli.md fixes the fields. Functions return NULL when out of memory and
 * pass on a NULL, so that only cli_json_print checks.
 */
#ifndef CLI_JSON_OUT_H
#define CLI_JSON_OUT_H

#include <jansson.h>

#include "cli/output/by_id.h"

/* A string; bytes that are not UTF-8 become '?'. NULL becomes null. */
json_t *cli_json_text(const char *text);
/* null for NaN and infinities */
json_t *cli_json_double(double value);
json_t *cli_json_ratio(uint64_t raw, uint64_t stored);
/* Appends and takes over `item`; frees the array and sets it to NULL on failure. */
void cli_json_append(json_t **array, json_t *item);

/* A checkpoint; `all` names its relatives. */
json_t *cli_json_checkpoint(const ckd_checkpoint *c, const ckd_checkpoint_list *all);
/* {"schema": 1, "checkpoints": [c]} */
json_t *cli_json_one_checkpoint(const ckd_checkpoint *c, const ckd_checkpoint_list *all);

/* Prints and frees it. */
ckd_status cli_json_print(json_t *root, ckd_error *err); /* no character of a name steers a terminal */
/*
 * The same with an array of the checkpoints of `list` in the place of the member `key`: many of them are printed one by one, in a fraction of the time that a
 * tree of them takes. `all` names their relatives.
 */
ckd_status cli_json_print_list(json_t *root, const char *key, const ckd_checkpoint_list *list,
                               const ckd_checkpoint_list *all, ckd_error *err);

/* "RUN@STEP" */
typedef struct cli_place_text {
    char text[CKD_RUN_MAX + 24];
} cli_place_text;
cli_place_text cli_place_of(const ckd_checkpoint *c);

#endif
