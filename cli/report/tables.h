/* The tables and sentences of a report, as text and on the page. */
#ifndef CLI_REPORT_TABLES_H
#define CLI_REPORT_TABLES_H

#include <stdio.h>

#include "cli/report/report.h"
#include "cli/output/output.h"

/*
 * Make tables, which printing frees. `max`: number of rows or runs (the largest tensors, the last checkpoints, the
 * first runs).
 */
cli_table *report_runs(const report_data *d, size_t max);
cli_table *report_attempts(const report_data *d, size_t max);
cli_table *report_roles(const report_data *d);
cli_table *report_growths(const report_data *d, size_t max); /* per run, by role */
cli_table *report_fidelities(const report_data *d);
cli_table *report_periods(const report_data *d);
cli_table *report_tensors(const report_data *d, size_t max);
cli_table *report_checkpoints(const report_data *d, size_t max);
cli_table *report_projections(const report_data *d, size_t max);

/* Prints lines of text, if there is anything to say. */
void report_say_pruning(FILE *to, const report_data *d);
void report_say_cost(FILE *to, const report_data *d);

#endif
