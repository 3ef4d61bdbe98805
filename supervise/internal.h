/* Shared by the files in supervise/. */
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
uint64_t supervise_now(void);       /* ns since 1970 */
uint64_t supervise_monotonic(void); /* ns */
/* "SIGTERM", or "signal 40". */
typedef struct signal_text {
    char text[24];
} signal_text;
signal_text signal_text_of(int number);

/* ---------------------------------------------------------------------------------------------------- decisions */

/*
 * Pure functions: the rules and what was observed determine what to do next. Nothing here looks at the clock, the disk
 * or a process.
 */
typedef struct decide_rules {
    uint64_t pause_s, max_pause_s;
    uint64_t max_restarts;
    uint64_t max_futile;
} decide_rules;

/* Observations after an attempt. */
typedef struct decide_facts {
    const attempt *history; /* of the run, oldest first; the last one is the one that ended */
    size_t count;
    uint64_t started_here; /* attempts that this supervisor has started */
    bool older;            /* there is another whole checkpoint to go back to */
    bool disk_full;
    double chance; /* 0 ... 1, for the pause */
} decide_facts;

typedef struct decision {
    bool restart;
    int status; /* otherwise: the exit status */
    ckd_status kind;
    double pause_s; /* before the restart */
    char reason[SUPERVISE_TEXT_MAX];
} decision;

decision decide(const decide_rules *rules, const decide_facts *facts);
/* How the attempt ended, in words. */
void decide_reason(char reason[SUPERVISE_TEXT_MAX], const attempt *a);
/* Did the attempt make a newer checkpoint than there was before? */
bool attempt_progressed(const attempt *a);
/* Attempts in a row from this checkpoint that made no newer one. After two, the next attempt goes back further. */
#define FAILURES_TO_GO_BACK 2
uint64_t decide_failures(const attempt *history, size_t count, const char *from);
/* The newest attempts: those since the command last succeeded or the supervisor last gave up. Reduces *count. */
const attempt *decide_current(const attempt *history, size_t *count);

/* -------------------------------------------------------------------------------------------------- checkpoints */

/* The checkpoints of a run and its branches, in the order in which to try them: newest first. */
typedef struct candidates {
    size_t count;
    ckd_checkpoint *items;
    size_t chosen; /* SIZE_MAX: none */
    bool *damaged; /* found so by candidates_choose */
    size_t damaged_count;
} candidates;
typedef struct candidates_rule {
    const supervise_options *options;
    const attempt *history;
    size_t count;
    ckd_progress_fn on_progress;
    void *progress_context;
} candidates_rule;

ckd_status candidates_read(candidates *out, const char *store, const char *run, ckd_error *err);
/*
 * Chooses the newest that is whole and from which attempts have not failed. Errors: CORRUPT (none is whole), CANCELLED,
 * those of ckd_store_verify.
 */
ckd_status candidates_choose(candidates *c, const candidates_rule *rule, ckd_error *err);
void candidates_free(candidates *c);
/* The highest step of those not known to be damaged. */
uint64_t candidates_top(const candidates *c);
/* The earliest of those created at `since` or later; NULL: none. */
const ckd_checkpoint *candidates_first_since(const candidates *c, uint64_t since);
/* Is there one, other than the named one, that is not known to be damaged? */
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

/* A command in its own process group, below a keeper. It has ended when everything started below the keeper has. */
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
ckd_status process_start(process *out, char *const *command, const sigset_t *mask, uint64_t grace_s,
                         ckd_error *err);
ckd_status process_go(process *p, ckd_error *err);
/* Passes a signal on to the group. `stop`: the group is killed after the grace period. */
void process_signal(process *p, int number, bool stop);
/* p->socket is readable: has the command ended, and everything below it? */
bool process_ended(process_end *out, process *p);
/* Closes the connection and waits for the keeper. */
void process_close(process *p);

/* Does the process exist, and is it not a zombie? */
bool process_lives(pid_t pid);
/*
 * Finds a process of an attempt on this machine, by its environment: the command, or what it started. 0: there is none,
 * or it is another user's.
 */
pid_t process_of_attempt(const char *store, const char *run, uint64_t number);
/* Sends a signal to all children of this process, except those in process group `group`. 0: no exception. */
void children_signal(int number, pid_t group);
/* The orders that a keeper is forked with. keeper_run never returns. */
typedef struct keeper_orders {
    char *const *command;
    const sigset_t *mask;
    uint64_t grace_s;
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

#endif
