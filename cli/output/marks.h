/* Pins and tags, as shown by several commands. */
#ifndef CLI_MARKS_H
#define CLI_MARKS_H

#include "cli/output/json_out.h"
#include "cli/output/table.h"

typedef struct cli_marks {
    ckd_pin_list *pins;
    ckd_tag_list *tags;
} cli_marks;

ckd_status cli_marks_read(cli_marks *out, ckd_store *store, ckd_error *err);
void cli_marks_free(cli_marks *m);
bool cli_marks_any(const cli_marks *m);

/*
 * Make the JSON lists `pinned` and `tagged` (docs/cli.md) for the checkpoints `of` (NULL: all). `all` gives their
 * names.
 */
json_t *cli_json_pins(const cli_marks *m, const ckd_checkpoint_list *of, const ckd_checkpoint_list *all);
json_t *cli_json_tags(const cli_marks *m, const ckd_checkpoint_list *of, const ckd_checkpoint_list *all);

/* Adds a table cell with one checkpoint's marks: "pinned @best @prod", or "-". */
void cli_marks_cell(cli_table *t, const cli_marks *m, const ckd_id *checkpoint);
/* Prints one checkpoint's marks, one per line with reasons, as in `show`. */
void cli_marks_print(const cli_marks *m, const ckd_id *checkpoint);

typedef enum cli_mark_kind { CLI_PINS, CLI_TAGS } cli_mark_kind;
/* Prints all marks of a kind: as JSON, or as a table if `talks`. */
ckd_status cli_report_marks(ckd_store *store, cli_mark_kind kind, bool json, bool talks, ckd_error *err);

#endif
