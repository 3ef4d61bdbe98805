/* What save and import have in common: which checkpoint, where it comes from, how it is stored; and storing it. */
#ifndef CLI_COMMANDS_SAVE_OPTIONS_H
#define CLI_COMMANDS_SAVE_OPTIONS_H

#include <argp.h>

#include "cli/files/blob_files.h"
#include "cli/files/inputs.h"
#include "cli/convert/optimizers.h"
#include "cli/output/options.h"
#include "cli/output/progress.h"

typedef struct cli_saving {
    cli_options common;
    ckd_save_options save;
    bool has_run, has_step;
    bool saves_nothing; /* run and step need not be said */
    cli_place place;    /* of an argument; run "": none was given */
    cli_place parent, resumed_from;
    bool has_parent, has_resumed_from;
    char metric_name[32];
    cli_roles roles;
    cli_blobs blobs;
    cli_optimizers optimizers;
    cli_progress progress;
} cli_saving;
#define CLI_SAVING_INIT(name) \
    { .common.command = (name), .save = CKD_SAVE_OPTIONS_INIT }

/* The options, those of all commands and --fidelity and its like among them; input: the cli_saving. */
extern const struct argp cli_saving_argp;
/* Takes an argument RUN@STEP, unless a file has this name. The first one behind the STORE may be one. */
bool cli_saving_take_place(cli_saving *s, const char *argument);
void cli_saving_free(cli_saving *s);

/* Orders the inputs as their fidelity and optimizers want them, and notes options that match nothing. */
ckd_status cli_saving_order(cli_saving *s, cli_inputs *inputs, ckd_error *err);
/* Saves them as one checkpoint and tells what came of it, or what went wrong. Returns the exit status. */
int cli_saving_run(cli_saving *s, cli_inputs *inputs);

#endif
