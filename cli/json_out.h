/*
 * JSON on stdout: one object with "schema": 1. docs/cli.md fixes the fields. Functions return NULL when out of memory and
 * pass on a NULL, so that only cli_json_print checks.
 */
#ifndef CLI_JSON_OUT_H
#define CLI_JSON_OUT_H

#include <jansson.h>

#include "cli/errors.h"

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
ckd_status cli_json_print(json_t *root, ckd_error *err);

/* "RUN@STEP" */
typedef struct cli_place_text {
    char text[CKD_RUN_MAX + 24];
} cli_place_text;
cli_place_text cli_place_of(const ckd_checkpoint *c);
/* The checkpoint with this id; NULL if there is none. */
const ckd_checkpoint *cli_by_id(const ckd_checkpoint_list *all, const ckd_id *id);

#endif
