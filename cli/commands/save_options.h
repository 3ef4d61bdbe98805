/* Shared by save, import and publish: which checkpoint, its parent, how it is stored; and the save itself. */
#ifndef CLI_COMMANDS_SAVE_OPTIONS_H
#define CLI_COMMANDS_SAVE_OPTIONS_H

#include <argp.h>

#include "cli/files/files.h"
#include "cli/convert/convert.h"
#include "cli/output/output.h"

typedef struct cli_saving {
    cli_options common;
    ckd_save_options save;
    bool has_run, has_step;
    bool saves_nothing; /* run and step may be omitted */
    bool publishes;     /* there is no option for duplicates */
    cli_ref ref;        /* from an argument; run "": none was given */
    cli_ref parent, resumed_from;
    bool has_parent, has_resumed_from;
    char metric_name[32];
    cli_roles roles;
    cli_blobs blobs;
    cli_optimizers optimizers;
    cli_progress progress;
} cli_saving;
#define CLI_SAVING_INIT(name) \
    { .common.command = (name), .save = CKD_SAVE_OPTIONS_INIT }

/* The options, including those of all commands and of fidelity.h; input: the cli_saving. */
extern const struct argp cli_saving_argp;
/* Takes an argument RUN@STEP, unless a file has this name. Callers offer it the first argument after STORE. */
bool cli_saving_take_ref(cli_saving *s, const char *argument);
/*
 * Refuses a new store without a slash: CKPTDELTA_STORE is set, so `first` was taken for a file, and a RUN@STEP follows.
 */
void cli_saving_check_store(cli_saving *s, const char *first, const char *argument, struct argp_state *state);
/* Refuses a checkpoint without a name, or with two. */
void cli_saving_check_complete(cli_saving *s, struct argp_state *state);
/* Refuses a second use of standard input, by FILEs or blobs named -. */
void cli_saving_check_standard_input(const cli_saving *s, char *const *files, size_t count,
                                     struct argp_state *state);
void cli_saving_free(cli_saving *s);

/* Orders the inputs as required by fidelity and optimizers, and notes options that match nothing. */
ckd_status cli_saving_order(cli_saving *s, cli_inputs *inputs, ckd_error *err);
/* Saves the inputs as one checkpoint and reports the result or the error. Returns the exit status. */
int cli_saving_run(cli_saving *s, cli_inputs *inputs);

#endif
