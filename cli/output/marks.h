/* Pins and tags, as several commands show them. */
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

/* Lists of `pinned` and `tagged` (docs/cli.md): those of the checkpoints `of`, with NULL all; `all` names them. */
json_t *cli_json_pins(const cli_marks *m, const ckd_checkpoint_list *of, const ckd_checkpoint_list *all);
json_t *cli_json_tags(const cli_marks *m, const ckd_checkpoint_list *of, const ckd_checkpoint_list *all);

/* "pinned @best @prod" of one checkpoint, as a cell; "-" if it has none. */
void cli_marks_cell(cli_table *t, const cli_marks *m, const ckd_id *checkpoint);
/* The same, one below the other and with reasons, as `show` has them. */
void cli_marks_print(const cli_marks *m, const ckd_id *checkpoint);

typedef enum cli_mark_kind { CLI_PINS, CLI_TAGS } cli_mark_kind;
/* All of a kind: JSON, or a table if it talks. */
ckd_status cli_report_marks(ckd_store *store, cli_mark_kind kind, bool json, bool talks, ckd_error *err);

#endif
