/* Damage found by verify or scrub, and the checkpoints that remain intact. */
#ifndef CLI_DAMAGE_H
#define CLI_DAMAGE_H

#include "cli/output/output.h"

/* Checkpoints of the damaged runs. A lost checkpoint may be missing from the catalog, too. */
typedef struct cli_survivors {
    /* "RUN@STEP" of checkpoints that cannot be loaded, sorted, without repeats; owned by the verify result */
    const char **lost;
    size_t lost_count;
    /* The newest intact checkpoint of each damaged run, by name; owned by the list. */
    const ckd_checkpoint **newest;
    size_t count;
    ckd_checkpoint_list *all;
} cli_survivors;
/*
 * Call it as soon as the result is known. If there is damage, the exit status says so even if finding the survivors or
 * printing fails.
 */
void cli_damage_found(const ckd_verify_result *r);
/* Finds the survivors. cli_survivors_free must follow, also on failure. */
ckd_status cli_find_survivors(cli_survivors *out, const ckd_verify_result *r, ckd_store *store,
                              ckd_error *err);
void cli_survivors_free(cli_survivors *s);

/* Make the JSON lists of `damage` and of the newest intact checkpoints (docs/cli.md). */
json_t *cli_json_damage(const ckd_verify_result *r);
json_t *cli_json_newest(const cli_survivors *left);
/* Prints everything as text, with a command that loads an intact checkpoint. */
void cli_print_damage(const ckd_verify_result *r, const cli_survivors *left, const char *store);
/* Returns CORRUPT, with the amount of damage, if there is any. */
ckd_status cli_damage_status(const ckd_verify_result *r, const cli_survivors *left, ckd_error *err);
/*
 * Tells why something was left alone: CORRUPT with the message of `left` if it is damaged, missing or unreadable; else
 * CKD_OK.
 */
ckd_status cli_skip_is_damage(const ckd_error *left, ckd_error *err);

#endif
