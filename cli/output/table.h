/* Tables: aligned columns on stdout, or HTML. */
#ifndef CLI_TABLE_H
#define CLI_TABLE_H

#include <stdio.h>

#include "cli/output/errors.h"

typedef struct cli_table cli_table;

/*
 * Makes a table. `columns`: headings separated by '|'; a leading '>' aligns a column to the right. NULL if out of
 * memory; all calls below accept NULL, so only cli_table_print must be checked.
 */
cli_table *cli_table_new(const char *columns);
/* Adds the next cell, row by row. */
void cli_table_cell(cli_table *t, const char *format, ...) CLI_PRINTF(2, 3);
/* Two cells: a run and a step; sizes in memory and in the store. */
void cli_table_checkpoint(cli_table *t, const char *run, uint64_t step);
void cli_table_sizes(cli_table *t, uint64_t raw, uint64_t stored);
/* Prints and frees the table. Prints nothing if it has no rows or a cell was lost (NOMEM). */
ckd_status cli_table_print(cli_table *t, ckd_error *err);
/* As cli_table_print, as HTML. */
ckd_status cli_table_print_html(FILE *to, cli_table *t, ckd_error *err);

#endif
