/* Columns: aligned on stdout, or as a table of a page. */
#ifndef CLI_TABLE_H
#define CLI_TABLE_H

#include <stdio.h>

#include "cli/output/errors.h"

typedef struct cli_table cli_table;

/*
 * `columns`: headings separated by '|'; one that begins with '>' is aligned to the right. NULL if out of memory; all
 * calls below accept NULL, so that only cli_table_print has to be checked.
 */
cli_table *cli_table_new(const char *columns);
/* The next cell, row by row. */
void cli_table_cell(cli_table *t, const char *format, ...) CLI_PRINTF(2, 3);
/* Prints and frees it; nothing if it has no rows, or if some cell could not be kept (NOMEM). */
ckd_status cli_table_print(cli_table *t, ckd_error *err);
/* The same as HTML. */
ckd_status cli_table_print_html(FILE *to, cli_table *t, ckd_error *err);

#endif
