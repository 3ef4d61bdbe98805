/* ckptdelta agent: runs an agent, or asks the agent of a store. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cli/commands/agent_state.h"
#include "cli/commands/commands.h"
#include "cli/output/output.h"

enum {
    OPT_BUDGET = 0x200,
    OPT_DETACH,
    OPT_SOCKET,
    OPT_STATUS,
    OPT_DRAIN,
    OPT_STOP,
    OPT_EXPLAIN,
    OPT_PEERS,
    OPT_SELF,
    OPT_SECRET,
    OPT_REPLICATE,
    OPT_STORE_EVERY,
    OPT_SEND_RATE,
    OPT_PARITY,
    OPT_COPIES,
    OPT_COPIES_BUDGET,
    OPT_SILENCE,
    OPT_LOCAL,
    OPT_LOCAL_EVERY,
    OPT_HUGE_PAGES
};

static const struct argp_option options_table[] = {
    {"budget", OPT_BUDGET, "SIZE", 0,
     "Hold at most this much memory, such as 200G [default: half of the machine's]", 1},
    {"huge-pages", OPT_HUGE_PAGES, "off|try|on", 0,
     "Hold states in huge pages of the system's pool (vm.nr_hugepages). Where it has too few, `try` has the kernel join "
     "ordinary pages as far as it can; with `on`, such a session saves by itself [default: off]",
     1},
    {"detach", OPT_DETACH, 0, 0,
     "Continue in the background, in a session of its own, once trainers can connect. What ends the job "
     "does not end it",
     1},
    {"peers", OPT_PEERS, "LIST", 0,
     "Other nodes keep copies of this node's states in their memory. LIST is a file with a line `HOST:PORT "
     "[domain=NAME]` for each node, or HOST:PORT,HOST:PORT,... itself",
     2},
    {"secret", OPT_SECRET, "FILE", 0,
     "What agents show each other: 16 to 256 bytes, the same on all nodes, in a file of mode 0600. Goes with --peers",
     2},
    {"self", OPT_SELF, "HOST:PORT", 0, "This node in the list [default: the one whose address it has]", 2},
    {"replicate", OPT_REPLICATE, "K", 0, "Keep copies on K other nodes [default: 1]", 2},
    {"parity", OPT_PARITY, "K+M", 0,
     "Instead of copies, keep parity in groups of K + M nodes: any M of a group can be lost, and the memory for it is M/K of "
     "what a node's own files take",
     2},
    {"local", OPT_LOCAL, "FOLDER", 0,
     "Keep copies of the newest states on a disk of this node, too, in this folder: they outlive the agent and a restart "
     "of the node. Also without --peers",
     2},
    {"local-every", OPT_LOCAL_EVERY, "TIME", 0,
     "Copy to the local disk only once in this time. Goes with --local and --peers [default: every state]",
     2},
    {"store-every", OPT_STORE_EVERY, "TIME", 0,
     "While all copies are in place, save to the store only once in this time, such as 10m, and when a "
     "session ends. Without --peers the copy on the local disk is meant [default: save every state]",
     2},
    {"send-rate", OPT_SEND_RATE, "SIZE", 0, "Send at most this much a second, such as 500M", 2},
    {"copies", OPT_COPIES, "FOLDER", 0,
     "Keep files in this folder, which should be in memory [default: one in /dev/shm]", 2},
    {"copies-budget", OPT_COPIES_BUDGET, "SIZE", 0,
     "Let files of this node's states take this much memory, and those of other nodes as much [default: half of "
     "--budget]",
     2},
    {"silence", OPT_SILENCE, "TIME", 0,
     "Consider a node lost that has shown no sign of life for this long [default: 5s]", 2},
    {"status", OPT_STATUS, 0, 0, "Show what the agent holds", 3},
    {"explain", OPT_EXPLAIN, 0, 0, "Say what would survive now, and what would be lost", 3},
    {"drain", OPT_DRAIN, 0, 0,
     "Return when everything complete is durable; memory of dead trainers is then free", 3},
    {"stop", OPT_STOP, 0, 0, "As --drain, then end the agent", 3},
    {"socket", OPT_SOCKET, "FILE", 0,
     "Where it listens, an absolute path [default: a file in /tmp/ckptdelta-UID, by the store's path]", 4},
    {0},
};

static const char doc[] =
    "Keep the newest states of a node's trainers in memory that outlives them. A trainer whose session is told to use the "
    "agent (CKPTDELTA_AGENT=auto in its environment) copies its states into the agent's memory, and the agent saves them "
    "to the store. When the trainer is killed, the agent makes the newest complete state durable at once, and a restarted "
    "trainer takes it from memory. Start one agent for each node and store, outside of what may be killed "
    "with the job. SIGTERM, SIGINT and SIGHUP end it after everything complete is durable. Exit status 1 if "
    "something could not be made durable."
    "\vExamples:\n"
    "  ckptdelta agent ckpts --detach\n"
    "  CKPTDELTA_AGENT=auto python train.py\n"
    "  ckptdelta agent ckpts --status\n"
    "  ckptdelta agent ckpts --peers hosts.txt --secret ~/.ckptdelta-secret --replicate 2 --store-every 10m --detach\n"
    "  ckptdelta agent ckpts --stop\n";

typedef struct arguments {
    cli_options common;
    uint64_t budget;
    const char *socket, *peers, *self, *secret, *copies, *local;
    uint32_t parity_data, parity;
    uint64_t replicate, send_rate, copies_budget, store_every_s, silence_s, local_every_s;
    bool detach, chose_pages;
    ckd_huge_pages huge_pages;
    int action; /* an option of the second group; 0: run an agent */
} arguments;

static void take_action(arguments *a, int key, struct argp_state *state) {
    if (a->action) {
        argp_error(state, "choose one of --status, --explain, --drain and --stop");
    }
    a->action = key;
}

static void take_huge_pages(arguments *a, const char *arg, struct argp_state *state) {
    if (!cli_agent_parse_pages(&a->huge_pages, arg)) {
        argp_error(state, "--huge-pages is off, try or on, not '%s'", arg);
    }
    a->chose_pages = true;
}

/* Options of copies on other nodes and on the local disk. */
static error_t parse_peers(arguments *a, int key, char *arg, struct argp_state *state) {
    switch (key) {
    case OPT_PEERS:
        a->peers = arg;
        return 0;
    case OPT_SELF:
        a->self = arg;
        return 0;
    case OPT_SECRET:
        a->secret = arg;
        return 0;
    case OPT_COPIES:
        a->copies = arg;
        return 0;
    case OPT_REPLICATE:
        if (!cli_parse_u64(&a->replicate, arg) || a->replicate < 1 || a->replicate > 64) {
            argp_error(state, "--replicate is a number from 1 to 64, not '%s'", arg);
        }
        return 0;
    case OPT_PARITY:
        if (!cli_parse_group(&a->parity_data, &a->parity, arg)) {
            argp_error(state, "--parity is K+M, such as 3+1: of K + M nodes any M can be lost, not '%s'",
                       arg);
        }
        return 0;
    case OPT_COPIES_BUDGET:
        if (!cli_parse_size(&a->copies_budget, arg) || !a->copies_budget) {
            argp_error(state, "--copies-budget is a size such as 64G, not '%s'", arg);
        }
        return 0;
    case OPT_SEND_RATE:
        if (!cli_parse_size(&a->send_rate, arg) || !a->send_rate) {
            argp_error(state, "--send-rate is a size such as 500M, not '%s'", arg);
        }
        return 0;
    case OPT_STORE_EVERY:
        a->store_every_s = cli_seconds(state, "--store-every", arg);
        return 0;
    case OPT_SILENCE:
        a->silence_s = cli_seconds(state, "--silence", arg);
        return 0;
    case OPT_LOCAL:
        if (arg[0] != '/') {
            argp_error(state, "--local is an absolute path, not '%s'", arg);
        }
        a->local = arg;
        return 0;
    case OPT_LOCAL_EVERY:
        a->local_every_s = cli_seconds(state, "--local-every", arg);
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static void check_together(const arguments *a, struct argp_state *state) {
    bool of_peers = a->self || a->secret || a->replicate || a->parity || a->send_rate || a->silence_s;
    bool of_copies = a->copies || a->copies_budget || a->store_every_s;
    if (a->action && (a->budget || a->chose_pages || a->detach || a->peers || a->local)) {
        argp_error(state,
                   "--budget, --huge-pages, --detach, --peers and --local go with the start of an agent");
    }
    if (of_peers && !a->peers) {
        argp_error(state,
                   "--secret, --self, --replicate, --parity, --send-rate and --silence go with --peers");
    }
    if (of_copies && !a->peers && !a->local) {
        argp_error(state, "--store-every, --copies and --copies-budget go with --peers or --local");
    }
    if (a->local_every_s && !(a->peers && a->local)) {
        argp_error(state, "--local-every goes with --local and --peers");
    }
    if (a->replicate && a->parity) {
        argp_error(state, "choose one of --replicate and --parity");
    }
    if (a->peers && !a->secret) {
        argp_error(state, "--peers needs --secret FILE");
    }
}

static error_t parse(int key, char *arg, struct argp_state *state) {
    arguments *a = state->input;
    switch (key) {
    case ARGP_KEY_INIT:
        state->child_inputs[0] = state->child_inputs[1] = &a->common;
        return 0;
    case OPT_BUDGET:
        if (!cli_parse_size(&a->budget, arg) || !a->budget) {
            argp_error(state, "--budget is a size such as 64G, not '%s'", arg);
        }
        return 0;
    case OPT_HUGE_PAGES:
        take_huge_pages(a, arg, state);
        return 0;
    case OPT_DETACH:
        a->detach = true;
        return 0;
    case OPT_SOCKET:
        if (arg[0] != '/') {
            argp_error(state, "--socket is an absolute path, not '%s'", arg);
        }
        a->socket = arg;
        return 0;
    case OPT_STATUS:
    case OPT_EXPLAIN:
    case OPT_DRAIN:
    case OPT_STOP:
        take_action(a, key, state);
        return 0;
    case ARGP_KEY_END:
        check_together(a, state);
        return 0;
    default:
        return parse_peers(a, key, arg, state);
    }
}

static ckd_status show(const arguments *a, ckd_error *err) {
    ckd_agent_state *state = NULL;
    ckd_status status = ckd_agent_ask(&state, a->common.store, a->socket, err);
    THEN(status, cli_agent_print(state, &a->common, a->action == OPT_EXPLAIN, err));
    ckd_agent_state_free(state);
    return status;
}

/* --------------------------------------------------------------------------------------------------------- run */

/*
 * Signals that end the agent arrive as bytes to read. Blocked before any thread is started. SIGHUP ends it unless nohup
 * ignores it. SIGPIPE is blocked, because states must not be lost when the reader of the messages goes away.
 */
static ckd_status take_signals(int *out, ckd_error *err) {
    sigset_t ends, blocked;
    struct sigaction hangup;
    sigemptyset(&ends);
    sigaddset(&ends, SIGTERM);
    sigaddset(&ends, SIGINT);
    if (sigaction(SIGHUP, NULL, &hangup) == 0 && hangup.sa_handler != SIG_IGN) {
        sigaddset(&ends, SIGHUP);
    }
    blocked = ends;
    sigaddset(&blocked, SIGPIPE);
    sigprocmask(SIG_BLOCK, &blocked, NULL);
    *out = signalfd(-1, &ends, SFD_CLOEXEC);
    return *out >= 0 ? CKD_OK : cli_error_sys(err, errno, NULL, "cannot wait for signals");
}

typedef struct starting {
    const arguments *with;
    int parent; /* tells the process that waits for the start; -1: nobody waits */
} starting;

/* Leaves the terminal, so that a reader of the command's output sees its end. */
static void leave_terminal(void) {
    int nothing = open("/dev/null", O_RDWR | O_CLOEXEC);
    for (int fd = STDIN_FILENO; nothing >= 0 && fd <= STDERR_FILENO; fd++) {
        dup2(nothing, fd);
    }
    close(nothing);
}

static void on_ready(void *context, const char *socket) {
    starting *s = context;
    if (s->parent >= 0) {
        char ready = 'r';
        ssize_t written = write(s->parent, &ready, 1);
        (void)written;
        close(s->parent);
        s->parent = -1;
        leave_terminal();
    } else if (cli_prints_text(&s->with->common)) {
        printf("listens at %s\n", socket);
        fflush(stdout);
    }
}

static ckd_status serve(const arguments *a, int parent, ckd_error *err) {
    starting start = {a, parent};
    ckd_agent_options o = CKD_AGENT_OPTIONS_INIT;
    ckd_status status = take_signals(&o.stop_fd, err);
    o.socket = a->socket;
    o.memory_bytes = a->budget;
    o.huge_pages = a->huge_pages;
    o.threads = a->common.threads;
    o.on_message = cli_on_message;
    o.message_context = (void *)(uintptr_t)&a->common;
    o.peers = a->peers;
    o.self = a->self;
    o.secret = a->secret;
    o.copies = a->copies;
    o.replicate = (uint32_t)a->replicate;
    o.parity_data = a->parity_data;
    o.parity = a->parity;
    o.copies_bytes = a->copies_budget;
    o.send_bytes_per_s = a->send_rate;
    o.store_every_s = (double)a->store_every_s;
    o.silence_s = (double)a->silence_s;
    o.local = a->local;
    o.local_every_s = (double)a->local_every_s;
    if (a->peers) { /* the agent itself reports peers that are gone, so UCX need not */
        setenv("UCX_LOG_LEVEL", "fatal", 0);
    }
    o.on_ready = on_ready;
    o.ready_context = &start;
    THEN(status, ckd_agent_run(a->common.store, &o, err));
    return status;
}

/*
 * The parent waits until trainers can connect. *code: the parent's exit status, which is the child's if the agent has
 * not started; -1 in the child.
 */
static ckd_status detach(int *code, int *to_parent, ckd_error *err) {
    int ends[2], status = 0;
    char byte;
    *code = -1;
    if (pipe2(ends, O_CLOEXEC) != 0) {
        return cli_error_sys(err, errno, NULL, "cannot start a process");
    }
    pid_t child = fork();
    if (child < 0) {
        return cli_error_sys(err, errno, NULL, "cannot start a process");
    }
    if (child > 0) {
        close(ends[1]);
        *code = CLI_DONE;
        if (read(ends[0], &byte, 1) != 1) {
            *code =
                waitpid(child, &status, 0) == child && WIFEXITED(status) ? WEXITSTATUS(status) : CLI_FAILED;
        }
        return CKD_OK;
    }
    close(ends[0]);
    setsid();
    *to_parent = ends[1];
    return CKD_OK;
}

static int run_agent(const arguments *a) {
    ckd_error err;
    int code = -1, to_parent = -1;
    ckd_status status = a->detach ? detach(&code, &to_parent, &err) : CKD_OK;
    if (status == CKD_OK && code >= 0) {
        return code;
    }
    THEN(status, serve(a, to_parent, &err));
    if (status == CKD_OK) {
        cli_committed("everything complete is durable, and the agent has ended");
    }
    return status == CKD_OK ? CLI_DONE : cli_fail(&err);
}

static ckd_status drain(const arguments *a, ckd_error *err) {
    bool stops = a->action == OPT_STOP;
    ckd_status status = ckd_agent_drain(a->common.store, a->socket, stops, err);
    if (status == CKD_OK) {
        cli_committed(stops ? "everything complete is durable, and the agent has ended"
                            : "everything complete is durable");
    }
    if (status == CKD_OK && a->common.json) {
        status = cli_json_print(json_pack("{s:i, s:b}", "schema", 1, "stopped", stops), err);
    } else if (status == CKD_OK && cli_prints_text(&a->common)) {
        puts(stops ? "everything complete is durable; the agent has ended"
                   : "everything complete is durable");
    }
    return status;
}

int cmd_agent(int argc, char **argv) {
    static const struct argp_child children[] = {
        {&cli_common_argp, 0, 0, 0}, {&cli_threads_argp, 0, 0, 0}, {0}};
    static const struct argp argp = {options_table, parse, "[STORE]", doc, children, 0, 0};
    arguments a = {.common.command = "agent"};
    cli_parse_arguments(&argp, argc, argv, &a);
    if (!a.action) {
        return run_agent(&a);
    }
    ckd_error err;
    ckd_status status = a.action == OPT_STATUS || a.action == OPT_EXPLAIN ? show(&a, &err) : drain(&a, &err);
    return status == CKD_OK ? CLI_DONE : cli_fail(&err);
}
