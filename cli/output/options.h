/*
 * What several commands have in common: arguments by glibc's argp, values in them, opening the store, choosing a
 * checkpoint. Parsers end the process with status 2 and a hint when an argument makes no sense.
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
    uint64_t staging; /* bytes; 0: as the library has it */
} cli_options;
extern const struct argp cli_common_argp;
/*
 * Takes the first argument as the STORE. With CKPTDELTA_STORE set, STORE may be left out: the argument is only taken if it is a
 * directory, or ends with a slash as a new one may. Commands with further arguments ask this before they take one; for
 * others cli_common_argp does.
 */
bool cli_take_store(cli_options *options, const char *argument);
/* The store that the environment names; NULL: none. */
const char *cli_default_store(void);
/* --threads, for commands that code or decode; input: the cli_options as well. */
extern const struct argp cli_threads_argp;
/* --staging, for commands that save or load; the same. */
extern const struct argp cli_staging_argp;

/* A run and a step as written: RUN@STEP; or a tag: @TAG. */
typedef struct cli_place {
    char run[CKD_RUN_MAX + 1]; /* "": not given */
    uint64_t step;             /* CKD_LATEST for `latest` */
    char tag[CKD_RUN_MAX + 1]; /* "": not given; else neither run nor step is */
} cli_place;

/* A checkpoint: an argument [RUN@]STEP or @TAG; or --run and --step; or --tag. */
typedef struct cli_pick {
    const char *run; /* NULL: the only one */
    uint64_t step;
    bool step_given;
    const char *tag; /* NULL: not given; else neither run nor step is */
    cli_place place; /* of the argument; run and tag may point into it */
    bool place_given;
} cli_pick;
extern const struct argp cli_pick_argp;
#define CLI_PICK_USAGE "[STORE] [[RUN@]STEP | @TAG]"

/* Checkpoints named one after the other. Release items with free. */
typedef struct cli_places {
    cli_place *items;
    size_t count;
} cli_places;
/* RUN@STEP; ends the process if it is none. */
error_t cli_places_add(cli_places *places, const char *text, struct argp_state *state);
/* The same, RUN@latest or @TAG. */
error_t cli_places_add_any(cli_places *places, const char *text, struct argp_state *state);
/* "30s", "90m", "36h", "7d" in seconds; ends the process if it is none. */
uint64_t cli_seconds(struct argp_state *state, const char *name, const char *text);
/* What --rate says, in bytes a second; ends the process if it is no size, or 0. */
uint64_t cli_rate(struct argp_state *state, const char *text);

/* Parsers of values. They return false if the text is none. Numbers are decimal digits only. */
bool cli_parse_u64(uint64_t *out, const char *text);
bool cli_parse_double(double *out, const char *text);
bool cli_parse_size(uint64_t *out,
                    const char *text); /* a number of bytes, or of K, M, G or T, which are binary */
bool cli_parse_step(uint64_t *out, const char *text);   /* a number, or `latest` */
bool cli_parse_place(cli_place *out, const char *text); /* [RUN@]STEP or @TAG */

/* Human output on stdout, unless -q or --json asks for none. */
bool cli_talks(const cli_options *options);

/* cli_fail, with a hint how to find out about damage if that was it. */
int cli_fail_reading(const ckd_error *err, const cli_options *options);

/* Opens the store; messages of the library become notes. */
ckd_status cli_open_store(ckd_store **out, const cli_options *options, ckd_open_mode mode, ckd_error *err);
/*
 * Checkpoints were deleted (cli_committed). now: their files go as well. That these stay for the time being is told, and is
 * no failure.
 */
void cli_deleted(ckd_store *store, bool now);
/*
 * The checkpoint at (run, step). run NULL: the only run; with several, INVALID and a message that lists them.
 * NOT_FOUND says what there is.
 */
ckd_status cli_find(ckd_checkpoint *out, ckd_store *store, const char *run, uint64_t step, ckd_error *err);
ckd_status cli_find_pick(ckd_checkpoint *out, ckd_store *store, const cli_pick *pick, ckd_error *err);
/* run: of a place that has none; may be NULL. */
ckd_status cli_find_place(ckd_checkpoint *out, ckd_store *store, const cli_place *place, const char *run,
                          ckd_error *err);

#endif
