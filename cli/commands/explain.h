/* What a load would read: load --explain. */
#ifndef CLI_EXPLAIN_H
#define CLI_EXPLAIN_H

#include "cli/output/options.h"

/* Prints it, as text or JSON, for these requests of the load. */
ckd_status cli_explain(ckd_load *load, ckd_store *store, const ckd_load_request *requests, size_t count,
                       const cli_options *options, ckd_error *err);

#endif
