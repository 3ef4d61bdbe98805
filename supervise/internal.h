/* Shared by the files in supervise/. Indented files serve the one above them:

     supervise.c     the loop: choose a checkpoint, start, wait, record, decide
       candidates.c    the checkpoints of a run and its branches, newest first; verifies them until one is whole
       process.c       starts the command below a keeper
         keeper.c        a process that ends everything below the command, even if the supervisor has been killed
       journal.c       STORE/attempts.jsonl: two lines for each attempt; the lock of a run
       decide.c        what to do next: a pure function of the attempts so far
       progress.c      the shared memory in which the command's processes write their steps
       watch.c         looks at steps and at checkpoints until the command hangs or has to be ended
         anomaly.c       checkpoints that become suspect meanwhile, and alarms of the command's processes
         liveness.c      does a rank hang? a pure function of the steps so far
         trace.c         stack traces of a command that hangs
       nodes.c         checks the hosts of an attempt, and takes bad ones out
         hosts.c         lists of hosts: Slurm's, and files
       devices.c       waits until the last attempt has released the memory of devices
       agent.c         waits until the agent has stored what the last attempt left in its memory
       requeue.c       asks Slurm to start the job again
     helper.c        short commands of the supervisor itself, with a time limit
     common.c        errors, messages, times, names of signals */
#ifndef SUPERVISE_INTERNAL_H
#define SUPERVISE_INTERNAL_H

#include <signal.h>
#include <sys/types.h>

#include "supervise/supervise.h"

#define SECOND UINT64_C(1000000000)
#define THEN(status, step)        \
    do {                          \
        if ((status) == CKD_OK) { \
            (status) = (step);    \
        }                         \
    } while (0)

/* ------------------------------------------------------------------------------------------------------- errors */

/* Fills err, which must not be NULL, and returns the status. */
__attribute__((format(printf, 3, 4))) ckd_status supervise_error(ckd_error *err, ckd_status status,
                                                                 const char *format, ...);
/* The same for a failed system call. */
__attribute__((format(printf, 3, 4))) ckd_status supervise_error_sys(ckd_error *err, int errnum,
                                                                     const char *format, ...);
/* Tells the user. */
__attribute__((format(printf, 2, 3))) void supervise_say(const supervise_options *o, const char *format, ...);
uint64_t supervise_now(void);       /* ns since 1970 */
uint64_t supervise_monotonic(void); /* ns */
/* "SIGTERM", or "signal 40". */
typedef struct signal_text {
    char text[24];
} signal_text;
signal_text signal_text_of(int number);

/* ---------------------------------------------------------------------------------------------------- decisions */

/*
 * Pure functions: rules and observations determine the next action. Nothing here looks at the clock, the disk or a
 * process.
 */
typedef struct decide_rules {
    uint64_t pause_s, max_pause_s;
    uint64_t max_restarts;
    uint64_t max_futile;
    bool stop_unhealthy; /* gives up after an attempt with a suspect checkpoint */
} decide_rules;

/* Observations after an attempt. */
typedef struct decide_facts {
    const attempt *history; /* of the run, oldest first; the last one is the one that ended */
    size_t count;
    uint64_t started_here; /* attempts that this supervisor has started */
    bool older;            /* there is another whole checkpoint to go back to */
    bool disk_full;
    bool elsewhere; /* a requeue will leave out the hosts that the last attempt excluded */
    double chance;  /* 0 ... 1, for the pause */
} decide_facts;

typedef struct decision {
    bool restart;
    int status; /* otherwise: the exit status */
    ckd_status kind;
    double pause_s; /* before the restart */
    bool requeue;   /* if it ends: another job may get further */
    char reason[SUPERVISE_TEXT_MAX];
} decision;

decision decide(const decide_rules *rules, const decide_facts *facts);
/* After a signal that asked to stop. */
decision decide_stopped(int number);
/* How the attempt ended, in words. */
void decide_reason(char reason[SUPERVISE_TEXT_MAX], const attempt *a);
/* Did the attempt make a newer checkpoint than there was before? */
bool attempt_progressed(const attempt *a);
/* Attempts in a row from this checkpoint that made no newer one. After two, the next attempt goes back further. */
#define FAILURES_TO_GO_BACK 2
uint64_t decide_failures(const attempt *history, size_t count, const char *from);
/* The newest attempts: those since the command last succeeded or the supervisor last gave up. Reduces *count. */
const attempt *decide_current(const attempt *history, size_t *count);
/* The longest time from the start of an attempt to its first step, in ns; 0: unknown. */
uint64_t decide_longest_start(const attempt *history, size_t count);
/* How many times the limits of hangs are doubled: once for each of the last attempts in a row that hung, up to 2. */
uint64_t decide_doublings(const attempt *history, size_t count);
/*
 * The first suspect checkpoint of the last attempt that made any checkpoint, if that attempt was unhealthy; else NULL.
 */
const char *decide_anomaly(const attempt *history, size_t count);
/*
 * The last attempt that made any checkpoint, if it was unhealthy and --on-anomaly acts on its alarm; else NULL. Its
 * checkpoints from the step of the alarm on are not trusted, even if they are not suspect.
 */
const attempt *decide_alarm(const attempt *history, size_t count);
/* Was the attempt unhealthy, and does --on-anomaly act on its alarm? */
bool decide_is_alarmed(const attempt *a);
/*
 * Finds the only host that the last attempts have in common, if all of them failed without a newer checkpoint. Only
 * attempts since the last exclusion of a host count.
 */
#define ATTEMPTS_TO_BLAME 3
bool decide_bad_host(char host[SUPERVISE_NAME_MAX], const attempt *history, size_t count);
/* Is it one of the words? `words` separates them by spaces, and may be NULL. */
bool words_have(const char *words, const char *word);

/* -------------------------------------------------------------------------------------------------- checkpoints */

/* The checkpoints of a run and its branches, in the order in which to try them: newest first. */
typedef struct candidates {
    size_t count;
    ckd_checkpoint *items;
    size_t chosen; /* SIZE_MAX: none */
    bool *damaged; /* found so by candidates_choose */
    size_t damaged_count;
    char suspect[SUPERVISE_REF_MAX]; /* the newest suspect one that was passed over; "": none */
} candidates;
typedef struct candidates_rule {
    const supervise_options *options;
    const attempt *history;
    size_t count;
    /* A checkpoint. No newer one is chosen if this one or an older one is good. NULL: no such limit. */
    const char *before;
    /*
     * The attempt that decide_alarm names; NULL: none. Checkpoints that this attempt and earlier ones made from the
     * steps of their alarms on are not chosen if an older one is good.
     */
    const attempt *alarmed;
    ckd_progress_fn on_progress;
    void *progress_context;
} candidates_rule;

ckd_status candidates_read(candidates *out, const char *store, const char *run, ckd_error *err);
/*
 * Chooses the newest checkpoint that is whole and not suspect, and from which attempts have not failed. If a newer one
 * is suspect, rewind_on_nan says how many good ones to go back; if there are fewer, the oldest is chosen. Errors:
 * CORRUPT (none is good), CANCELLED, those of ckd_store_verify.
 */
ckd_status candidates_choose(candidates *c, const candidates_rule *rule, ckd_error *err);
void candidates_free(candidates *c);
/* The highest step of the checkpoints that are neither suspect nor known to be damaged. */
uint64_t candidates_top(const candidates *c);
/*
 * Returns the earliest checkpoint that is not in `before`; NULL: none. Dates are not compared, because the clocks of
 * the trainer's machine and of the supervisor's may differ. before NULL: the earliest one created at `since` or later.
 */
const ckd_checkpoint *candidates_first_new(const candidates *c, const candidates *before, uint64_t since);
/* Is there another checkpoint than the named one that is neither suspect nor known to be damaged? */
bool candidates_has_other(const candidates *c, const char *ref);
void candidate_ref(char ref[SUPERVISE_REF_MAX], const ckd_checkpoint *c);

/* ------------------------------------------------------------------------------------------------------ journal */

typedef struct journal {
    int fd;
    char path[4200];
} journal;

/*
 * Opens STORE/attempts.jsonl for appending and takes the lock of the run, which processes forked from this one then
 * hold as well. Waits for the lock if its last supervisor is gone and the keeper is still ending the command. Errors:
 * BUSY, IO, NOSPACE.
 */
ckd_status journal_open(journal *out, const supervise_options *options, ckd_error *err);
void journal_close(journal *j);
/* Appends a line and syncs it. */
ckd_status journal_start(journal *j, const attempt *a, char *const *command, ckd_error *err);
ckd_status journal_end(journal *j, const attempt *a, ckd_error *err);

/* ---------------------------------------------------------------------------------------------------- processes */

/* A command in its own process group, below a keeper. It has ended when all processes below the keeper have. */
#define STRANGERS_MAX 64
typedef struct process {
    pid_t keeper, pid;
    pid_t strangers[STRANGERS_MAX]; /* children of the supervisor that it has not started */
    size_t stranger_count;
    int socket; /* to the keeper; when it is closed, the keeper ends the command */
} process;

typedef struct process_end {
    attempt_end end;
    int code;
} process_end;

/* Creates the keeper and the command's process, which waits for process_go. Errors: IO. */
ckd_status process_start(process *out, const supervise_options *options, const sigset_t *mask,
                         ckd_error *err);
ckd_status process_go(process *p, ckd_error *err);
/*
 * Passes a signal on: to the group, or to the command alone if the kill mode is mixed. `stop`: the group is killed
 * after the grace period.
 */
void process_signal(process *p, int number, bool stop);
/* p->socket is readable: has the command ended, and everything below it? */
bool process_ended(process_end *out, process *p);
/* Closes the connection and waits for the keeper. */
void process_close(process *p);

/* Does the process exist, and is it not a zombie? */
bool process_lives(pid_t pid);
/* When it was started, in ticks since the machine booted; 0: it does not exist, or is a zombie. */
uint64_t process_start_time(pid_t pid);
/* Is it a descendant of `above`? */
bool process_is_below(pid_t pid, pid_t above);
/*
 * Finds a process of an attempt on this machine by its environment: the command or one of its descendants. 0: there is
 * none, or it is another user's.
 */
pid_t process_of_attempt(const char *store, const char *run, uint64_t number);
/* Sends a signal to all children of this process, except those in process group `group`. 0: no exception. */
void children_signal(int number, pid_t group);
/* The orders that a keeper is forked with. keeper_run never returns. */
typedef struct keeper_orders {
    char *const *command;
    const sigset_t *mask;
    uint64_t grace_s;
    bool mixed; /* signals go to the command alone */
    int socket;
} keeper_orders;
__attribute__((noreturn)) void keeper_run(const keeper_orders *orders);
/* From the keeper. The size is fixed, so a message arrives whole. */
typedef enum keeper_news { KEEPER_FORKED = 1, KEEPER_ENDED = 2 } keeper_news;
typedef struct keeper_message {
    keeper_news news;
    int64_t pid;
    process_end end;
} keeper_message;
/* To the keeper: KEEPER_GO, or a signal to pass on, with KEEPER_STOP if the group must end. */
enum { KEEPER_GO = 0, KEEPER_STOP = 0x80 };

/* ----------------------------------------------------------------------------------------------------- progress */

#define PROGRESS_SLOTS 512
/* Shared memory in which the processes of one attempt write down their steps. Without any, no process has a slot. */
typedef struct progress {
    ckd_progress_header *header;
} progress;
/* Also names it in the environment of this process, which the command inherits. */
void progress_make(progress *out);
void progress_free(progress *p);
/* Copies the slots that are taken. Returns how many. */
size_t progress_read(ckd_progress_slot out[PROGRESS_SLOTS], const progress *p);
/* Sets the fields of the attempt about steps. begun_ns: monotonic, when its command was started. */
void progress_sum_up(attempt *a, const progress *p, uint64_t begun_ns);

/* ----------------------------------------------------------------------------------------------------- liveness */

/* The figures learned from the slots so far. The functions are pure, like those for decisions. */
typedef struct liveness {
    double floor_s;                           /* no silence of a step is too long before this */
    double longest_s[CKD_PROGRESS_ENDED + 1]; /* by phase: silences that ended by themselves */
    double start_s;                           /* the longest start of earlier attempts; 0: none is known */
    bool learned;                             /* at the last look, some rank had made enough steps to learn */
    double silent_s[PROGRESS_SLOTS];
    ckd_progress_slot seen[PROGRESS_SLOTS]; /* at the last look */
} liveness;
/*
 * Looks at the slots after passed_s more seconds, and returns whether a rank hangs. gone: by slot: its process has
 * ended. A phase that is not known becomes CKD_PROGRESS_TRAINING.
 */
bool liveness_look(liveness *l, ckd_progress_slot *slots, const bool *gone, size_t count, double passed_s);
/* How long a rank may be silent, in seconds; INFINITY: nothing is known. */
double liveness_limit(const liveness *l, const ckd_progress_slot *slot);
/* Names the rank that holds up the others. */
void liveness_reason(char text[SUPERVISE_TEXT_MAX], const liveness *l, const ckd_progress_slot *slots,
                     const bool *gone, size_t count);

/* ----------------------------------------------------------------------------------------------------- helpers */

/* A short command of the supervisor itself, with a shell, in a process group of its own and with a time limit. */
typedef struct helper_orders {
    const char *command;
    int (*work)(const void *context); /* instead of a command; returns its exit status. NULL: the command */
    const void *work_context;
    const char *const *args; /* $1, $2, ... of the command, up to 4; NULL at the end. NULL: none */
    const sigset_t *mask;
    uint64_t limit_s;
    bool listens; /* keeps what it writes to standard output */
    bool deaf;    /* SIGTERM does not end it */
} helper_orders;
typedef struct helper {
    pid_t pid;      /* 0: it has ended, or could not be started */
    int status;     /* its exit status once it has ended, or 128 + signal; 127: it could not be started */
    bool late;      /* it was killed because its time was up */
    uint64_t until; /* monotonic */
    int out;        /* -1: nothing is read */
    char *answer;   /* NULL: none so far */
    size_t size;
} helper;
void helper_start(helper *h, const helper_orders *o);
/* Must be called often: it also reads the answer, and ends a helper that is late. */
bool helper_ended(helper *h);
void helper_end(helper *h);
/* Also ends it. */
void helper_free(helper *h);
/* Waits until all have ended. Returns false if `stop` (may be NULL) returned true first; some then still run. */
bool helpers_wait(helper *helpers, size_t count, bool (*stop)(void *context), void *context);

/* -------------------------------------------------------------------------------------------------------- agent */

#define AGENT_NO_LIMIT_S UINT64_C(1000000000)
/*
 * An agent may still be making the last attempt's newest state durable. An attempt that started from an older
 * checkpoint would repeat steps and begin a branch. So this waits for the agent, at most limit_s, or until `stop`
 * returns true.
 */
void agent_await(const supervise_options *options, const sigset_t *mask, uint64_t limit_s,
                 bool (*stop)(void *context), void *context);

/* ------------------------------------------------------------------------------------------------------ devices */

typedef struct devices {
    const supervise_options *options;
    const sigset_t *mask;
    bool (*stop)(void *context);
    void *stop_context;
    bool absent;   /* there is no nvidia-smi */
    pid_t *before; /* the processes that held memory when the last attempt started */
    size_t count;
} devices;
/*
 * Called before an attempt. `follows`: waits until the last attempt's processes hold no device memory, at most as long
 * as the options say.
 */
void devices_settle(devices *d, bool follows);
void devices_free(devices *d);

/* -------------------------------------------------------------------------------------------------------- hosts */

#define HOSTS_MAX 8192
typedef struct host_list {
    size_t count;
    char **names; /* each is there once */
} host_list;
/* Adds a name unless the list has it. Errors: INVALID (not a host name), NOMEM. */
ckd_status hosts_add(host_list *list, const char *name, ckd_error *err);
/* Adds a name without checking whether the list has it. */
ckd_status hosts_append(host_list *list, const char *name, ckd_error *err);
bool hosts_have(const host_list *list, const char *name);
void hosts_free(host_list *list);
/* NULL: out of memory. */
char *hosts_joined(const host_list *list, char between);
/* A list as Slurm writes it: a[01-12,20]-ib[0-1],b. */
ckd_status hosts_expand(host_list *out, const char *text, ckd_error *err);
/* A file with a host in each line: "host", "host:slots" or "host slots=N"; # begins a comment. */
ckd_status hosts_read(host_list *out, const char *path, ckd_error *err);
/* Rewrites the file with another name in the host's lines. by NULL: without these lines. */
ckd_status hosts_replace(const char *path, const char *host, const char *by, ckd_error *err);
/* Finds the hosts by --hosts-file, Slurm or PBS; else this host. */
ckd_status hosts_of_job(host_list *out, const supervise_options *o, ckd_error *err);
bool host_is_own(const char *name);

typedef struct nodes {
    const supervise_options *options;
    const sigset_t *mask;
    bool (*stop)(void *context);
    void *stop_context;
    const attempt *history; /* of the run */
    size_t count;
    host_list hosts, bad, excluded;
} nodes;
/* Finds the hosts of the next attempt and checks them. Excludes bad ones, or proposes to. */
void nodes_prepare(nodes *n);
/* Copies the lists into the attempt. */
void nodes_record(attempt *a, const nodes *n);
/* Called after the attempt, which is the last one of the history. */
void nodes_blame(nodes *n, attempt *a);
void nodes_free(nodes *n);

/* Has Slurm started this? */
bool requeue_possible(void);
/* The command that starts the job again, without its bad hosts. NULL: there is none. */
char *requeue_command(const attempt *history, size_t count, const sigset_t *mask);
/* Runs the command, or only names it. */
void requeue(const supervise_options *o, const char *command, const sigset_t *mask);

/* ---------------------------------------------------------------------------------------------------- anomalies */

typedef struct anomaly anomaly;
typedef struct anomalies {
    const supervise_options *options;
    const sigset_t *mask;
    /* the checkpoints at the start of the attempt; NULL: there is no attempt, and nothing is watched */
    const candidates *known;
    anomaly *found;
    size_t count, handled;
    char first[SUPERVISE_REF_MAX];                      /* the first suspect checkpoint; "": none was found */
    uint64_t seen[PROGRESS_SLOTS][CKD_PROGRESS_ALARMS]; /* the last alarm of each kind in each slot */
    uint64_t alarms;                /* an alarm that several ranks raise at the same step counts once */
    char alarm[SUPERVISE_TEXT_MAX]; /* the earliest that --on-anomaly acts on, else the first; "": none */
    uint64_t alarm_step;
    bool alarm_acts; /* `alarm` ends an attempt with --on-anomaly rewind or stop */
    helper helper;
} anomalies;
/* `known` is used until anomalies_finish. */
void anomalies_begin(anomalies *a, const supervise_options *options, const sigset_t *mask,
                     const candidates *known);
/* Reports alarms that processes of the command have raised since the last look. */
void anomalies_look_at_slots(anomalies *a, const ckd_progress_slot *slots, size_t count);
/* Reports checkpoints that have become suspect. */
void anomalies_look(anomalies *a, const candidates *now);
/*
 * Starts the command of --on-anomaly for the next anomaly once the command for the previous one has ended. Must be
 * called often.
 */
void anomalies_go_on(anomalies *a);
/* Does one of the anomalies found end the attempt? */
bool anomalies_end_attempt(const anomalies *a);
/* Describes in words the anomaly that ends the attempt. */
void anomalies_reason(char text[SUPERVISE_TEXT_MAX], const anomalies *a);
/* Waits for the commands of --on-anomaly, or until `stop` returns true. Keeps a->first and the alarm. */
void anomalies_finish(anomalies *a, bool (*stop)(void *context), void *context);

/* -------------------------------------------------------------------------------------------------------- hangs */

/*
 * Stack traces, by SIGQUIT or by a command. SIGQUIT goes to one process after the other, and only to processes below
 * the keeper that handle it.
 */
typedef struct trace_orders {
    const char *command; /* NULL: SIGQUIT */
    const sigset_t *mask;
    uint64_t grace_s; /* the command may take so long */
    pid_t keeper, pid;
    const pid_t *pids; /* processes that make steps; else those of the supervised command */
    size_t count;
} trace_orders;
typedef struct trace {
    const trace_orders *orders;
    helper helper;         /* out -1: none */
    size_t next;           /* process to signal */
    uint64_t again, until; /* monotonic: when to signal it again, and when to give up */
} trace;
/* The orders are used until trace_end. */
void trace_begin(trace *t, const trace_orders *orders);
/* Must be called often: it also goes on to the next process. */
bool trace_ended(trace *t);
/* Kills the command if it still runs. */
void trace_end(trace *t);

typedef struct watch watch;
typedef struct watch_rule {
    const supervise_options *options;
    const progress *progress;
    uint64_t doublings; /* decide_doublings */
    uint64_t start_ns;  /* decide_longest_start */
    ckd_id newest;      /* checkpoint at the start; zero: none */
    anomalies *anomalies;
    trace_orders orders; /* without pids */
} watch_rule;
typedef enum watch_news {
    WATCH_NOTHING = 0,
    WATCH_HUNG = 1,   /* returned once, with the reason; traces are taken from now on */
    WATCH_END = 2,    /* returned once, when the traces are done: the command must be ended */
    WATCH_SUSPECT = 3 /* returned once: the command must be ended, because of anomalies_reason */
} watch_news;
/*
 * The options, progress and anomalies of the rule are used until watch_free. Returns NULL, which the other functions
 * accept, if nothing is watched.
 */
watch *watch_new(const watch_rule *rule);
watch_news watch_look(watch *w, char reason[SUPERVISE_TEXT_MAX]);
/* Returns the time until the next look, for poll(). */
int watch_wait_ms(const watch *w);
void watch_free(watch *w);

#endif
