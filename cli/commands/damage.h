/* Damage that a verification or a scrub has found, and what it leaves. */
#ifndef CLI_DAMAGE_H
#define CLI_DAMAGE_H

#include "cli/output/json_out.h"

/* What is left of the runs that have damage. A lost checkpoint may have fallen out of the catalog, too. */
typedef struct cli_survivors {
    const char **lost; /* "RUN@STEP" of what cannot be loaded, sorted, each once; they belong to the result */
    size_t lost_count;
    /* The newest that is intact, of each run with damage, by name; they belong to the list. */
    const ckd_checkpoint **newest;
    size_t count;
    ckd_checkpoint_list *all;
} cli_survivors;
/* cli_survivors_free must follow, also on failure. */
ckd_status cli_find_survivors(cli_survivors *out, const ckd_verify_result *r, ckd_store *store,
                              ckd_error *err);
void cli_survivors_free(cli_survivors *s);

/* Lists of `damage` and of the newest intact checkpoints (docs/cli.md). */
json_t *cli_json_damage(const ckd_verify_result *r);
json_t *cli_json_newest(const cli_survivors *left);
/* All of it as text, with a way to load what is intact. */
void cli_print_damage(const ckd_verify_result *r, const cli_survivors *left, const char *store);
/* CORRUPT, and how much is, if there is any. */
ckd_status cli_damage_status(const ckd_verify_result *r, const cli_survivors *left, ckd_error *err);
/* Why something was left as it is: CORRUPT, with that message, if it is damaged, missing or unreadable; else CKD_OK. */
ckd_status cli_left_as_damage(const ckd_error *left, ckd_error *err);

#endif
