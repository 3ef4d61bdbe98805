/* ckptdelta run: restarts a command from the newest whole checkpoint until it is done. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "cli/commands/commands.h"
#include "cli/output/output.h"
#include "supervise/supervise.h"

enum {
    OPT_GRACE = 0x200,
    OPT_KILL_MODE,
    OPT_PAUSE,
    OPT_MAX_PAUSE,
    OPT_MAX_RESTARTS,
    OPT_MAX_FUTILE,
    OPT_QUICK,
    OPT_VERIFY_LIMIT,
    OPT_HANG,
    OPT_HANG_FLOOR,
    OPT_ON_HANG,
    OPT_REWIND,
    OPT_HOSTS_FILE,
    OPT_SPARES,
    OPT_MIN_HOSTS,
    OPT_NODE_CHECK,
    OPT_NODE_CHECK_LIMIT,
    OPT_REMOTE_SHELL,
    OPT_ACT,
    OPT_DEVICE_WAIT,
    OPT_ON_ANOMALY
};

static const struct argp_option options_table[] = {
    {"run", 'r', "RUN", 0, "The run that COMMAND saves to", 1},
    {"grace", OPT_GRACE, "TIME", 0,
     "How long COMMAND may take to end, before everything that it started is killed [default: 60s]", 2},
    {"kill-mode", OPT_KILL_MODE, "group|mixed", 0,
     "Who gets SIGTERM and other signals: group: all processes in the group of COMMAND; mixed: COMMAND alone. SIGKILL "
     "goes to all [default: group]",
     2},
    {"pause", OPT_PAUSE, "TIME", 0,
     "Wait about this long before the first restart, and twice as long each time [default: 5s]", 3},
    {"max-pause", OPT_MAX_PAUSE, "TIME", 0, "The longest time to wait before a restart [default: 10m]", 3},
    {"max-restarts", OPT_MAX_RESTARTS, "N", 0, "Give up after N restarts [default: 100]", 4},
    {"max-futile", OPT_MAX_FUTILE, "N", 0,
     "Give up after N attempts in a row without a newer checkpoint [default: 3]", 4},
    {"hang", OPT_HANG, "auto|TIME|off", 0,
     "End COMMAND, and restart it, if it hangs: auto: its session makes no step for much longer than before; TIME: it "
     "makes no checkpoint for this long [default: auto]",
     4},
    {"hang-floor", OPT_HANG_FLOOR, "TIME", 0,
     "With --hang auto: no step is too long before this [default: 5m]", 4},
    {"on-hang", OPT_ON_HANG, "CMD", 0,
     "Before COMMAND is ended because it hangs, run CMD with a shell. CKPTDELTA_HANG_PIDS has the processes that make "
     "steps [default: SIGQUIT to those that handle it]",
     4},
    {"rewind-on-nan", OPT_REWIND, "K", 0,
     "If values of the newest checkpoint became NaN or infinite, go K good ones back [default: 1]", 5},
    {"on-anomaly", OPT_ON_ANOMALY, "mark|rewind|stop|CMD", 0,
     "If values of a new checkpoint became NaN or infinite, or a session raises an alarm: mark: go on; rewind: end "
     "COMMAND, and restart it from a healthy checkpoint; stop: end it, and give up; CMD: run CMD with a shell. "
     "CKPTDELTA_ANOMALY says what it is, CKPTDELTA_SUSPECT_STEP and CKPTDELTA_SUSPECT_ID name the checkpoint "
     "[default: mark]",
     5},
    {"quick", OPT_QUICK, 0, 0, "Check only the stored checksums before each attempt; decode nothing", 5},
    {"verify-limit", OPT_VERIFY_LIMIT, "TIME", 0,
     "Start from a checkpoint whose check takes longer than this, as a load checks what it reads [default: 10m]",
     5},
    {"device-wait", OPT_DEVICE_WAIT, "TIME", 0,
     "Wait at most this long before a restart until GPUs have the memory back that COMMAND used; 0s: do not wait "
     "[default: 60s]",
     5},
    {"hosts-file", OPT_HOSTS_FILE, "FILE", 0,
     "The hosts of the job, as mpirun reads them: host, host:slots or host slots=N in each line [default: those of "
     "Slurm or PBS, or this one]",
     6},
    {"node-check", OPT_NODE_CHECK, "CMD", 0,
     "Before each attempt, run CMD on each host. A host where it fails is bad", 6},
    {"node-check-limit", OPT_NODE_CHECK_LIMIT, "TIME", 0, "How long CMD may take [default: 60s]", 6},
    {"remote-shell", OPT_REMOTE_SHELL, "SHELL", 0,
     "Runs CMD on other hosts, as in SHELL HOST CMD [default: ssh -o BatchMode=yes]", 6},
    {"spares", OPT_SPARES, "FILE", 0, "Hosts that may take the place of bad ones in the hosts file", 6},
    {"min-hosts", OPT_MIN_HOSTS, "N", 0,
     "Without a spare, take a bad host out of the hosts file if N are left [default: take none out]", 6},
    {"act", OPT_ACT, 0, 0,
     "Exclude bad hosts, and requeue the job if Slurm has started it and another start may help. Otherwise only tell "
     "what to do",
     6},
    {0},
};

static const char doc[] =
    "Run COMMAND, and restart it from the newest whole checkpoint of RUN when it fails. COMMAND finds what it needs in "
    "its environment: CKPTDELTA_STORE, CKPTDELTA_RUN, CKPTDELTA_STEP and CKPTDELTA_CHECKPOINT (RUN@STEP; neither is set "
    "if there is no checkpoint), and CKPTDELTA_ATTEMPT. SIGTERM, SIGINT and SIGHUP are passed on to it and end the "
    "command; SIGUSR1 is only passed on. STORE/attempts.jsonl records every attempt."
    "\v"
    "Exit status: 0 when COMMAND is done, 93 when restarting it is futile (do not requeue the job), 128 plus the number "
    "of the signal that asked to stop. If COMMAND refuses its arguments or cannot be started: its status, 2, 126 or 127.\n"
    "\n"
    "Examples:\n"
    "  ckptdelta run ckpts --run gpt -- python train.py\n"
    "  ckptdelta run ckpts --run gpt -- mpirun -n 8 ./train\n"
    "  ckptdelta run ckpts --run gpt --max-futile 5 --grace 5m -- python train.py\n";

typedef struct arguments {
    cli_options common;
    const char *run;
    char **command; /* NULL: not given */
    supervise_options with;
} arguments;

static uint64_t parse_count(const char *name, const char *arg, uint64_t min, struct argp_state *state) {
    uint64_t count = 0;
    if (!cli_parse_u64(&count, arg) || count < min || count > 1000000) {
        argp_error(state, "%s is a number from %" PRIu64 " to 1000000, not '%s'", name, min, arg);
    }
    return count;
}

static uint64_t parse_time(const char *name, const char *arg, struct argp_state *state) {
    uint64_t seconds = cli_seconds(state, name, arg);
    if (seconds > 365 * 24 * 3600) {
        argp_error(state, "%s is at most 365d, not '%s'", name, arg);
    }
    return seconds;
}

static void parse_hang(arguments *a, const char *arg, struct argp_state *state) {
    a->with.hang = strcmp(arg, "auto") == 0  ? SUPERVISE_HANG_AUTO
                   : strcmp(arg, "off") == 0 ? SUPERVISE_HANG_NEVER
                                             : SUPERVISE_HANG_TIME;
    if (a->with.hang == SUPERVISE_HANG_TIME) {
        a->with.hang_s = parse_time("--hang", arg, state);
        a->with.hang = a->with.hang_s ? SUPERVISE_HANG_TIME : SUPERVISE_HANG_NEVER;
    }
}

static void parse_anomaly(arguments *a, const char *arg, struct argp_state *state) {
    a->with.on_anomaly = strcmp(arg, "mark") == 0     ? SUPERVISE_ANOMALY_MARK
                         : strcmp(arg, "rewind") == 0 ? SUPERVISE_ANOMALY_REWIND
                         : strcmp(arg, "stop") == 0   ? SUPERVISE_ANOMALY_STOP
                                                      : SUPERVISE_ANOMALY_COMMAND;
    a->with.anomaly_command = arg;
    bool other_case =
        strcasecmp(arg, "mark") == 0 || strcasecmp(arg, "rewind") == 0 || strcasecmp(arg, "stop") == 0;
    if (!*arg || (other_case && a->with.on_anomaly == SUPERVISE_ANOMALY_COMMAND)) {
        argp_error(state, "--on-anomaly is mark, rewind, stop or a command");
    }
}

static bool is_mixed(const char *arg, struct argp_state *state) {
    bool mixed = strcmp(arg, "mixed") == 0;
    if (!mixed && strcmp(arg, "group") != 0) {
        argp_error(state, "the kill mode is group or mixed, not '%s'", arg);
    }
    return mixed;
}

static void take_argument(arguments *a, char *arg, struct argp_state *state) {
    if (cli_take_store(&a->common, arg)) {
        return;
    }
    if (a->run) {
        argp_error(state, "'%s' is one argument too many; put -- before the COMMAND", arg);
    }
    a->run = arg;
}

/* The library's rule: 1 to 128 characters, not beginning with a dot or a dash. */
static bool is_run_name(const char *name) {
    static const char allowed[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-~";
    size_t length = strlen(name);
    return length > 0 && length <= CKD_RUN_MAX && name[0] != '.' && name[0] != '-' &&
           strspn(name, allowed) == length;
}

static void check(const arguments *a, struct argp_state *state) {
    if (!a->run) {
        argp_error(state, "name the RUN that COMMAND saves to");
    }
    if (!is_run_name(a->run)) {
        argp_error(
            state,
            "a run name has 1 to 128 of A-Z a-z 0-9 . _ - ~ and does not start with . or -, unlike '%s'",
            a->run);
    }
    if (!a->command || !a->command[0]) {
        argp_error(state, "put -- and the COMMAND at the end, as in: -- python train.py");
    }
    if (!a->command[0][0]) {
        argp_error(state, "the COMMAND is empty");
    }
    if (!a->with.hosts_file && (a->with.spares_file || a->with.min_hosts)) {
        argp_error(state, "%s needs --hosts-file, which it changes",
                   a->with.spares_file ? "--spares" : "--min-hosts");
    }
}

static uint64_t parse_min(const char *name, const char *arg, struct argp_state *state) {
    uint64_t seconds = parse_time(name, arg, state);
    if (seconds == 0) {
        argp_error(state, "%s is at least 1s", name);
    }
    return seconds;
}

static error_t parse_machines(int key, char *arg, struct argp_state *state, supervise_options *with) {
    switch (key) {
    case OPT_DEVICE_WAIT:
        with->device_wait_s = parse_time("--device-wait", arg, state);
        return 0;
    case OPT_HOSTS_FILE:
        with->hosts_file = arg;
        return 0;
    case OPT_SPARES:
        with->spares_file = arg;
        return 0;
    case OPT_MIN_HOSTS:
        with->min_hosts = parse_count("--min-hosts", arg, 1, state);
        return 0;
    case OPT_NODE_CHECK:
        with->node_check = arg;
        return 0;
    case OPT_NODE_CHECK_LIMIT:
        with->node_check_s = parse_min("--node-check-limit", arg, state);
        return 0;
    case OPT_REMOTE_SHELL:
        with->remote_shell = arg;
        return 0;
    case OPT_ACT:
        with->act = true;
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static error_t parse(int key, char *arg, struct argp_state *state) {
    arguments *a = state->input;
    switch (key) {
    case ARGP_KEY_INIT:
        state->child_inputs[0] = state->child_inputs[1] = &a->common;
        return 0;
    case ARGP_KEY_ARG:
        take_argument(a, arg, state);
        return 0;
    case 'r':
        a->run = arg;
        return 0;
    case OPT_GRACE:
        a->with.grace_s = parse_time("--grace", arg, state);
        return 0;
    case OPT_KILL_MODE:
        a->with.mixed = is_mixed(arg, state);
        return 0;
    case OPT_PAUSE:
        a->with.pause_s = parse_time("--pause", arg, state);
        return 0;
    case OPT_MAX_PAUSE:
        a->with.max_pause_s = parse_time("--max-pause", arg, state);
        return 0;
    case OPT_MAX_RESTARTS:
        a->with.max_restarts = parse_count("--max-restarts", arg, 0, state);
        return 0;
    case OPT_MAX_FUTILE:
        a->with.max_futile = parse_count("--max-futile", arg, 1, state);
        return 0;
    case OPT_HANG:
        parse_hang(a, arg, state);
        return 0;
    case OPT_HANG_FLOOR:
        a->with.hang_floor_s = parse_min("--hang-floor", arg, state);
        return 0;
    case OPT_ON_HANG:
        a->with.on_hang = arg;
        return 0;
    case OPT_REWIND:
        a->with.rewind_on_nan = parse_count("--rewind-on-nan", arg, 1, state);
        return 0;
    case OPT_ON_ANOMALY:
        parse_anomaly(a, arg, state);
        return 0;
    case OPT_VERIFY_LIMIT:
        a->with.verify_limit_s = parse_time("--verify-limit", arg, state);
        return 0;
    case OPT_QUICK:
        a->with.quick = true;
        return 0;
    case ARGP_KEY_END:
        check(a, state);
        return 0;
    default:
        return parse_machines(key, arg, state, &a->with);
    }
}

/* Cuts off the COMMAND. Its options are its own. Returns how many arguments are left. */
static int cut_command(arguments *a, int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--") == 0) {
            a->command = &argv[i + 1];
            argv[i] = NULL;
            return i;
        }
    }
    return argc;
}

static ckd_status print_json(const arguments *a, const supervise_result *r, ckd_error *err) {
    return cli_json_print(json_pack("{s:i, s:o, s:I, s:i, s:o, s:o, s:b}", "schema", 1, "run",
                                    cli_json_text(a->run), "attempts", (json_int_t)r->attempts, "exit_status",
                                    r->status, "reason", cli_json_text(r->reason), "newest",
                                    cli_json_text(r->newest[0] ? r->newest : NULL), "requeue", r->requeue),
                          err);
}

/* Reports why the supervisor ends. The exit status does not follow from the kind of error. */
static int fail(const arguments *a, const supervise_result *r) {
    ckd_error err;
    cli_error(&err, r->kind, "%s: %s", a->run, r->reason);
    return cli_fail_as(&err, r->status);
}

/* A scheduler relies on the exit status, so a failure to print the result must not change it. */
static int report(const arguments *a, const supervise_result *r) {
    ckd_error err;
    if (r->status == CLI_DONE) {
        cli_committed("COMMAND has succeeded");
    }
    if (a->common.json && print_json(a, r, &err) != CKD_OK) {
        (void)cli_fail(&err);
    }
    return r->status == CLI_DONE ? CLI_DONE : fail(a, r);
}

int cmd_run(int argc, char **argv) {
    static const struct argp_child children[] = {
        {&cli_common_argp, 0, 0, 0}, {&cli_threads_argp, 0, 0, 0}, {0}};
    static const struct argp argp = {
        options_table, parse, "[STORE] [RUN] -- COMMAND [ARGUMENT...]", doc, children, 0, 0};
    arguments a = {.common.command = "run",
                   .with = {.grace_s = 60,
                            .pause_s = 5,
                            .max_pause_s = 600,
                            .max_restarts = 100,
                            .max_futile = 3,
                            .hang_floor_s = 300,
                            .verify_limit_s = 600,
                            .device_wait_s = 60,
                            .node_check_s = 60,
                            .remote_shell = "ssh -o BatchMode=yes"}};
    argc = cut_command(&a, argc, argv);
    cli_parse_arguments(&argp, argc, argv, &a);
    a.with.store = a.common.store;
    a.with.run = a.run;
    a.with.command = a.command;
    a.with.threads = a.common.threads;
    a.with.on_message = cli_on_message;
    a.with.message_context = &a.common;
    supervise_result result;
    ckd_error err;
    if (supervise_run(&result, &a.with, &err) != CKD_OK) {
        return cli_fail(&err);
    }
    return report(&a, &result);
}
