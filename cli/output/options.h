/*
 * Shared by the commands: arguments by glibc's argp, their values, opening the store, choosing a checkpoint. Parsers
 * end the process with status 2 and a hint for an invalid argument.
 */
#ifndef CLI_OPTIONS_H
#define CLI_OPTIONS_H

#include <argp.h>

#include "cli/output/arguments.h"
#include "cli/output/errors.h"

/* STORE, --json, -q, -v: every command. */
typedef struct cli_options {
    const char *command; /* "save" */
    const char *store;   /* the first argument, or $CKPTDELTA_STORE */
    bool json, quiet;
    int verbose;
    uint32_t threads; /* 0: one per core */
    uint64_t staging; /* bytes; 0: the library's default */
} cli_options;
extern const struct argp cli_common_argp;
/*
 * Takes the first argument as the STORE. If CKPTDELTA_STORE is set, STORE may be omitted. Then the argument is only
 * taken if it is a directory, or ends with a slash (for a new one). Commands with further arguments call this before
 * they take one; cli_common_argp does it for the others.
 */
bool cli_take_store(cli_options *options, const char *argument);
/* Returns the store named by the environment; NULL: none. */
const char *cli_default_store(void);
/* --threads, for commands that encode or decode; the input includes the cli_options. */
extern const struct argp cli_threads_argp;
/* --staging, for commands that save or load; same input. */
extern const struct argp cli_staging_argp;

/* A run and a step as written (RUN@STEP), or a tag (@TAG). */
typedef struct cli_place {
    char run[CKD_RUN_MAX + 1]; /* "": not given */
    uint64_t step;             /* CKD_LATEST for `latest` */
    char tag[CKD_RUN_MAX + 1]; /* "": not given; otherwise run and step are empty */
} cli_place;

/* A checkpoint: an argument [RUN@]STEP or @TAG; or --run and --step; or --tag. */
typedef struct cli_pick {
    const char *run; /* NULL: the store's only run */
    uint64_t step;
    bool step_given;
    const char *tag; /* NULL: not given; otherwise run and step are not */
    cli_place place; /* of the argument; run and tag may point into it */
    bool place_given;
} cli_pick;
extern const struct argp cli_pick_argp;
#define CLI_PICK_USAGE "[STORE] [[RUN@]STEP | @TAG]"

/* Several named checkpoints. Release items with free. */
typedef struct cli_places {
    cli_place *items;
    size_t count;
} cli_places;
/* Adds RUN@STEP; ends the process if it is malformed. */
error_t cli_places_add(cli_places *places, const char *text, struct argp_state *state);
/* As cli_places_add; also accepts RUN@latest and @TAG. */
error_t cli_places_add_any(cli_places *places, const char *text, struct argp_state *state);
/* Parses "30s", "90m", "36h", "7d" into seconds; ends the process if malformed. */
uint64_t cli_seconds(struct argp_state *state, const char *name, const char *text);
/* Parses --rate, in bytes per second; ends the process if it is not a size, or 0. */
uint64_t cli_rate(struct argp_state *state, const char *text);

/* Ends the process if the value of an option was refused: a status that is not CKD_OK is wrong usage. */
void cli_check_value(struct argp_state *state, ckd_status status, const ckd_error *err);

/* Parsers of values; they return false for invalid text. Numbers have decimal digits only. */
bool cli_parse_u64(uint64_t *out, const char *text);
bool cli_parse_double(double *out, const char *text);
bool cli_parse_size(uint64_t *out,
                    const char *text); /* bytes, optionally with K, M, G or T, which are binary */
bool cli_parse_step(uint64_t *out, const char *text);   /* a number, or `latest` */
bool cli_parse_place(cli_place *out, const char *text); /* [RUN@]STEP or @TAG */

/* Is human output wanted on stdout? Not with -q or --json. */
bool cli_talks(const cli_options *options);

/* As cli_fail; after damage it adds a hint how to find out more. */
int cli_fail_reading(const ckd_error *err, const cli_options *options);

/* Opens the store. The library's messages become notes. */
ckd_status cli_open_store(ckd_store **out, const cli_options *options, ckd_open_mode mode, ckd_error *err);
/* Begins a load with the memory that --staging allows. */
ckd_status cli_load_begin(ckd_load **out, ckd_store *store, const ckd_id *checkpoint,
                          const cli_options *options, ckd_error *err);
/*
 * Marks a deletion of checkpoints as committed (cli_committed). now: removes their files, too. If they must stay for
 * now, a note says so; that is no failure.
 */
void cli_deleted(ckd_store *store, bool now);
/*
 * Finds the checkpoint at (run, step). run NULL: the only run; if there are several, INVALID with a list of them. The
 * message of NOT_FOUND lists what exists.
 */
ckd_status cli_find(ckd_checkpoint *out, ckd_store *store, const char *run, uint64_t step, ckd_error *err);
ckd_status cli_find_pick(ckd_checkpoint *out, ckd_store *store, const cli_pick *pick, ckd_error *err);
/* Fails as cli_find if the store has no checkpoint of the run. run NULL: all runs, of which there need be none. */
ckd_status cli_check_run(ckd_store *store, const char *run, ckd_error *err);
/* run: used for a place without a run; may be NULL. */
ckd_status cli_find_place(ckd_checkpoint *out, ckd_store *store, const cli_place *place, const char *run,
                          ckd_error *err);

#endif
