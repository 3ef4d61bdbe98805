/* agent --status and --explain: what an agent holds. */
#ifndef CLI_AGENT_STATE_H
#define CLI_AGENT_STATE_H

#include "cli/output/output.h"

/* Prints the state as a table or, if it is to be explained, in sentences; as JSON where --json was given. */
ckd_status cli_agent_print(const ckd_agent_state *state, const cli_options *options, bool in_sentences,
                           ckd_error *err);
/* Reads `off`, `try` or `on`; returns false if the text is none of these. */
bool cli_agent_parse_pages(ckd_huge_pages *out, const char *text);

#endif
