/* ckptdelta: the main program. Finds the subcommand; prints help and version. */
#include <argp.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "cli/commands/commands.h"
#include "cli/output/output.h"

static const struct command {
    const char *name, *prefixed, *summary;
    int (*run)(int argc, char **argv);
} commands[] = {
    {"save", "ckptdelta save", "save safetensors files as the checkpoint of a step", cmd_save},
    {"import", "ckptdelta import", "save the files of many ranks as the checkpoint of a step", cmd_import},
    {"load", "ckptdelta load", "write a checkpoint, or some of its tensors, to a safetensors file", cmd_load},
    {"export", "ckptdelta export", "write a checkpoint as a folder that other programs read as a model",
     cmd_export},
    {"follow", "ckptdelta follow", "keep a folder at the newest weights of a run", cmd_follow},
    {"publish", "ckptdelta publish", "store the weights of a model as a version that others follow",
     cmd_publish},
    {"list", "ckptdelta list", "list the checkpoints of a store", cmd_list},
    {"show", "ckptdelta show", "show a checkpoint: its tensors, how they are stored, its chain", cmd_show},
    {"diff", "ckptdelta diff", "compare two checkpoints tensor by tensor", cmd_diff},
    {"report", "ckptdelta report", "show how much space checkpoints take, by run and by role", cmd_report},
    {"timeline", "ckptdelta timeline", "show how long saves took, and how long training waited",
     cmd_timeline},
    {"verify", "ckptdelta verify", "check every hash, down to the reconstructed values", cmd_verify},
    {"scrub", "ckptdelta scrub", "verify stored files, a part at a time", cmd_scrub},
    {"parity", "ckptdelta parity", "make parity, from which lost files can be rebuilt", cmd_parity},
    {"repair", "ckptdelta repair", "rebuild lost and damaged files from parity", cmd_repair},
    {"pin", "ckptdelta pin", "protect checkpoints from deletion", cmd_pin},
    {"tag", "ckptdelta tag", "name checkpoints; tagged ones are not deleted", cmd_tag},
    {"rename", "ckptdelta rename", "rename a run", cmd_rename},
    {"delete", "ckptdelta delete", "delete checkpoints; trash restores them", cmd_delete},
    {"prune", "ckptdelta prune", "delete all checkpoints that a policy does not keep", cmd_prune},
    {"compact", "ckptdelta compact", "rewrite checkpoints: shorter chains, fewer files", cmd_compact},
    {"policy", "ckptdelta policy", "store a retention policy", cmd_policy},
    {"trash", "ckptdelta trash", "list deleted checkpoints; restore or remove them", cmd_trash},
    {"copy", "ckptdelta copy", "copy checkpoints to another store, only what it lacks", cmd_copy},
    {"push", "ckptdelta push", "copy checkpoints from this store to another one", cmd_push},
    {"pull", "ckptdelta pull", "copy checkpoints from another store to this one", cmd_pull},
    {"run", "ckptdelta run", "run a command, and restart it from the newest whole checkpoint", cmd_run},
    {"attempts", "ckptdelta attempts", "list what ckptdelta run has done", cmd_attempts},
    {"agent", "ckptdelta agent", "keep the newest states in memory that outlives trainers", cmd_agent},
    {"rebuild", "ckptdelta rebuild", "rebuild the catalog from the data files", cmd_rebuild},
    /* It has no summary, so it is not listed: it is not meant for people. */
    {"complete", "ckptdelta complete", NULL, cmd_complete},
};
#define COMMAND_COUNT (sizeof(commands) / sizeof(commands[0]))

/* Names that users of ls, restic and git type out of habit. */
static const struct alias {
    const char *name, *command;
} aliases[] = {{"ls", "list"}, {"rm", "delete"}, {"check", "verify"}, {"gc", "compact"}};
#define ALIAS_COUNT (sizeof(aliases) / sizeof(aliases[0]))

static void print_help(FILE *to) {
    fputs(
        "Usage: ckptdelta COMMAND [STORE] [OPTION...]\n"
        "\n"
        "Keeps checkpoints of training runs in a directory, the store. Each is stored as\nits difference from an earlier one, and each can be restored bit for bit.\n"
        "\n"
        "Commands:\n",
        to);
    for (size_t i = 0; i < COMMAND_COUNT; i++) {
        if (commands[i].summary) {
            fprintf(to, "  %-8s %s\n", commands[i].name, commands[i].summary);
        }
    }
    fputs("  help     explain a command: ckptdelta help COMMAND\n"
          "\n"
          "Aliases: ",
          to);
    for (size_t i = 0; i < ALIAS_COUNT; i++) {
        fprintf(to, "%s%s for %s", i ? ", " : "", aliases[i].name, aliases[i].command);
    }
    fputs("\n"
          "\n"
          "A first try, with checkpoints that a trainer wrote as safetensors files:\n"
          "  ckptdelta save ckpts --run gpt --step 100 step100.safetensors\n"
          "  ckptdelta save ckpts --run gpt --step 200 step200.safetensors\n"
          "  ckptdelta list ckpts\n"
          "  ckptdelta load ckpts --step 100 --out restored.safetensors\n"
          "  ckptdelta report ckpts\n"
          "The first creates the store ./ckpts, the second adds what has changed since.\n"
          "\n"
          "CKPTDELTA_STORE names the store where STORE is left out:\n"
          "  export CKPTDELTA_STORE=ckpts\n"
          "\n"
          "Exit status: 0 done, 1 failed, 2 wrong usage, 3 not found, 4 corrupt or\n"
          "unverifiable data.\n",
          to);
}

static const struct command *find_command(const char *name) {
    for (size_t i = 0; i < ALIAS_COUNT; i++) {
        name = strcmp(aliases[i].name, name) == 0 ? aliases[i].command : name;
    }
    for (size_t i = 0; i < COMMAND_COUNT; i++) {
        if (strcmp(commands[i].name, name) == 0) {
            return &commands[i];
        }
    }
    return NULL;
}

/* With --json, wrong usage is reported as JSON, even if the command is unknown. */
static int unknown_command(const char *name, char **arguments) {
    const char *names[COMMAND_COUNT + ALIAS_COUNT];
    for (size_t i = 0; i < COMMAND_COUNT + ALIAS_COUNT; i++) {
        names[i] = i < COMMAND_COUNT ? commands[i].name : aliases[i - COMMAND_COUNT].name;
    }
    for (; *arguments && strcmp(*arguments, "--") != 0; arguments++) {
        if (strcmp(*arguments, "--json") == 0) {
            cli_errors_as_json();
        }
    }
    const char *nearest = cli_nearest(name, names, COMMAND_COUNT + ALIAS_COUNT);
    ckd_error err;
    if (nearest) {
        cli_error(&err, CKD_E_INVALID, "there is no command '%.300s'; did you mean '%s'?", name, nearest);
    } else {
        cli_error(&err, CKD_E_INVALID, "there is no command '%.300s'; ckptdelta --help lists them", name);
    }
    return cli_fail(&err);
}

static void print_version(FILE *to, struct argp_state *state) {
    (void)state;
    fprintf(to, "ckptdelta %s\n", ckd_version());
}

/*
 * The files of all ranks may be open at the same time. Not called for a command that starts other programs: they would
 * inherit the limit, and a program that calls select() must not have more than 1,024 files.
 */
static void raise_open_files(void) {
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur < limit.rlim_max) {
        limit.rlim_cur = limit.rlim_max;
        setrlimit(RLIMIT_NOFILE, &limit);
    }
}

static int run(int argc, char **argv) {
    if (argc < 2) {
        print_help(stderr);
        return CLI_USAGE;
    }
    const char *name = argv[1];
    bool help = strcmp(name, "help") == 0;
    if (strcmp(name, "--help") == 0 || strcmp(name, "-h") == 0 || strcmp(name, "-?") == 0 ||
        (help && argc == 2)) {
        print_help(stdout);
        return CLI_DONE;
    }
    if (strcmp(name, "--version") == 0 || strcmp(name, "-V") == 0) {
        print_version(stdout, NULL);
        return CLI_DONE;
    }
    const struct command *command = find_command(help ? argv[2] : name);
    if (!command) {
        return unknown_command(help ? argv[2] : name, argv + 1);
    }
    char *prefixed = (char *)command->prefixed, option[] = "--help";
    if (help) {
        return command->run(2, (char *[]){prefixed, option, NULL});
    }
    argv[1] = prefixed;
    if (command->run != cmd_run && command->run != cmd_follow) {
        raise_open_files();
    }
    return command->run(argc - 1, argv + 1);
}

/* A full disk behind `> file` must not look like success. This also covers --help, after which argp exits. */
static void check_output(int code, void *context) {
    (void)context;
    int checked = cli_flush_output(code);
    cli_flush_errors(checked);
    if (checked != code) {
        fflush(stderr);
        _exit(checked);
    }
}

/*
 * Otherwise a file of the store could get the descriptor of a closed standard stream, and messages would be written
 * into it.
 */
static bool reserve_standard_streams(void) {
    for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++) {
        /* Opened in the wrong direction, so that using it fails as on the closed stream. */
        int mode = fd == STDIN_FILENO ? O_WRONLY : O_RDONLY;
        if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", mode) != fd) {
            return false;
        }
    }
    return true;
}

int main(int argc, char **argv) {
    if (!reserve_standard_streams()) {
        return CLI_FAILED;
    }
    argp_program_version_hook = print_version;
    argp_err_exit_status = CLI_USAGE;
    cli_clean_stderr();
    if (on_exit(check_output, NULL) != 0) {
        cli_note("out of memory");
        return CLI_FAILED;
    }
    return run(argc, argv);
}
