/* Parses a subcommand's arguments, and suggests corrections for unknown words. */
#ifndef CLI_ARGUMENTS_H
#define CLI_ARGUMENTS_H

#include <argp.h>
#include <stddef.h>

/*
 * Runs argp_parse. Unknown options end the process with status 2; the message suggests the nearest existing one.
 * argv[0] is "ckptdelta COMMAND".
 */
void cli_parse_arguments(const struct argp *argp, int argc, char **argv, void *input);

/*
 * Returns the candidate of which `word` is probably a misspelling: one or two letters missing, added, wrong or swapped.
 * NULL: none is that near.
 */
const char *cli_nearest(const char *word, const char *const *candidates, size_t count);

#endif
