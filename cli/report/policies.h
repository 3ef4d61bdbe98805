/* Retention rules as options: of prune, which applies them, and of policy, which stores them. */
#ifndef CLI_POLICIES_H
#define CLI_POLICIES_H

#include "cli/output/options.h"

/* --run, --keep-...; input: a ckd_policy initialised with CKD_POLICY_INIT. */
extern const struct argp cli_policy_argp;
#define CLI_KEEP_OPTIONS                                                                                \
    "--keep-last, --keep-every, --keep-first, --keep-best, --keep-newer, --keep-within, --keep-daily, " \
    "--keep-weekly, --keep-monthly, --keep-tag"
/* Does the policy keep anything? Ends the process if an option qualifies a rule that is absent. */
bool cli_policy_given(const ckd_policy *policy, struct argp_state *state);
/* "the last 5, multiples of 10000" */
typedef struct cli_policy_text {
    char text[400];
} cli_policy_text;
cli_policy_text cli_policy_words(const ckd_policy *policy);

#endif
