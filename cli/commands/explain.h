/* load --explain: what a load would read. */
#ifndef CLI_EXPLAIN_H
#define CLI_EXPLAIN_H

#include "cli/output/output.h"

/* Prints the plan of these requests of the load, as text or JSON. */
ckd_status cli_explain(ckd_load *load, ckd_store *store, const ckd_load_request *requests, size_t count,
                       const cli_options *options, ckd_error *err);

#endif
