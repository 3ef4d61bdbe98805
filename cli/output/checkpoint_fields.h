/* The JSON fields of a checkpoint (docs/cli.md). */
#ifndef CLI_CHECKPOINT_FIELDS_H
#define CLI_CHECKPOINT_FIELDS_H

#include "cli/output/output.h"

typedef enum json_kind { JSON_IS_NULL, JSON_IS_TEXT, JSON_IS_NUMBER, JSON_IS_REAL } json_kind;

typedef struct json_field {
    const char *name;
    json_kind kind;
    union {
        const char *text;
        uint64_t number;
        double real; /* finite */
    };
} json_field;

enum { CHECKPOINT_FIELDS = 22 };

/* Its texts point into the struct itself, so do not move it. */
typedef struct checkpoint_fields {
    json_field items[CHECKPOINT_FIELDS];
    char id[CKD_ID_TEXT], parent_id[CKD_ID_TEXT], resumed_from_id[CKD_ID_TEXT];
    cli_ref_text parent, resumed_from;
    cli_text created;
} checkpoint_fields;

/* Makes the fields. `ids` finds its relatives. c must stay valid. */
void checkpoint_fields_make(checkpoint_fields *out, const ckd_checkpoint *c, const cli_ids *ids);

#endif
