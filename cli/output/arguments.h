/* Parsing the arguments of a subcommand, and what is said about a word that nobody knows. */
#ifndef CLI_ARGUMENTS_H
#define CLI_ARGUMENTS_H

#include <argp.h>
#include <stddef.h>

/*
 * argp_parse. Options that do not exist end the process with status 2, and the message suggests the nearest one that does.
 * argv[0] is "ckptdelta COMMAND".
 */
void cli_parse_arguments(const struct argp *argp, int argc, char **argv, void *input);

/*
 * The candidate that `word` is most likely a misspelling of: one or two letters are missing, added, wrong or swapped. NULL: none
 * is that near.
 */
const char *cli_nearest(const char *word, const char *const *candidates, size_t count);

#endif
