/*
 * The supervisor: restarts a command from the newest whole checkpoint until it is done, or until another start would be
 * futile. README.md has an overview.
 */
#ifndef SUPERVISE_H
#define SUPERVISE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "ckptdelta.h"

/* The supervisor's own exit statuses; docs/run.md lists all. SUPERVISE_GAVE_UP means: do not requeue. */
enum { SUPERVISE_GAVE_UP = 93, SUPERVISE_SIGNAL = 128 };

#define SUPERVISE_NO_STEP  UINT64_MAX
#define SUPERVISE_REF_MAX  (CKD_RUN_MAX + 24) /* RUN@STEP */
#define SUPERVISE_HOST_MAX 65
#define SUPERVISE_TEXT_MAX 256
#define SUPERVISE_NAME_MAX 256 /* of a host, as others call it */

typedef enum attempt_end {
    ATTEMPT_RUNNING = 0, /* or its supervisor died: no end is recorded */
    ATTEMPT_EXITED = 1,  /* code: exit status */
    ATTEMPT_KILLED = 2,  /* code: signal */
    ATTEMPT_REFUSED = 3, /* the command could not be started; code: errno */
    ATTEMPT_LOST = 4     /* the supervisor died: the end of the command is not known */
} attempt_end;

/* One start of the command, as recorded in the journal. */
typedef struct attempt {
    uint64_t number; /* 1, 2, ... in the run, whichever supervisor started it */
    char run[CKD_RUN_MAX + 1];
    char host[SUPERVISE_HOST_MAX];
    int64_t pid, supervisor; /* 0: not known */
    uint64_t start_ns;       /* since 1970 */
    uint64_t end_ns;         /* 0: running */
    attempt_end end;
    int code;
    bool hung; /* ended by the supervisor, because it made no step or no checkpoint for too long */
    char hang[SUPERVISE_TEXT_MAX];   /* what was missing, and for how long; "": it did not hang */
    char anomaly[SUPERVISE_REF_MAX]; /* its first checkpoint that is suspect; "": none */
    uint64_t alarms;                 /* how many its processes raised */
    /* the first alarm that --on-anomaly acts on, else the first one; "": none */
    char alarm[SUPERVISE_TEXT_MAX];
    uint64_t alarm_step; /* SUPERVISE_NO_STEP: there was none */
    bool alarm_acts;     /* --on-anomaly acts on `alarm` */
    bool unhealthy; /* it counts as failed because of these, however it ended: --on-anomaly rewind or stop */
    int stopped_by; /* the signal that asked the supervisor to stop; 0: none */
    char from[SUPERVISE_REF_MAX];    /* the checkpoint that it started from; "": none */
    uint64_t from_step;              /* SUPERVISE_NO_STEP: none */
    char suspect[SUPERVISE_REF_MAX]; /* the newest suspect checkpoint that was passed over; "": none */
    /* The highest step of any checkpoint: when the attempt started, not counting damaged ones, and when it ended. */
    uint64_t first_step, last_step;
    uint64_t first_save_ns; /* from its start to its first checkpoint; 0: it made none */
    /*
     * Steps that processes reported: the first and the highest of this attempt, and the highest of the attempts before
     * it. SUPERVISE_NO_STEP: not known.
     */
    uint64_t first_trained, last_trained, reached;
    uint64_t resume_ns;  /* from its start to its first step; 0: not known */
    uint64_t trained_ns; /* from its first step to its last one; 0: not known */
    int status;          /* the supervisor's exit status, if it ended with this attempt; -1: it went on */
    char reason[SUPERVISE_TEXT_MAX];  /* how it ended */
    char verdict[SUPERVISE_TEXT_MAX]; /* what the supervisor did then */
    /* Names, separated by spaces; NULL: not known. The memory belongs to the list. */
    char *hosts;     /* on which it ran */
    char *bad_hosts; /* found bad before it or after it */
    char *excluded;  /* the bad hosts that were taken out of the job, or will be by a requeue */
} attempt;

typedef struct attempt_list {
    size_t count;
    attempt *items;
    size_t damaged; /* lines that are not readable; a torn last line is not counted */
} attempt_list;

/* Reads the journal of a store. run: NULL: all. Without a journal the list is empty. Errors: IO, NOMEM. */
ckd_status supervise_attempts(attempt_list *out, const char *store, const char *run, ckd_error *err);
void supervise_attempts_free(attempt_list *list);

/*
 * Reads the journal of a store, and passes each attempt on: one that ended when its end is read, any other when the next
 * attempt of its run is, or at the journal's end. Memory does not grow with the journal. The attempt is valid during the
 * call; a status that is not CKD_OK ends the reading and is returned. damaged: lines that are not readable. Errors: IO,
 * NOMEM.
 */
typedef ckd_status (*supervise_visit)(void *context, const attempt *a, ckd_error *err);
ckd_status supervise_attempts_each(size_t *damaged, const char *store, supervise_visit visit, void *context,
                                   ckd_error *err);

/* Is it the run, or a branch of it: RUN~2, ...? */
bool supervise_is_of_run(const char *name, const char *run);

typedef enum supervise_hang {
    SUPERVISE_HANG_AUTO = 0, /* by the steps that sessions report, with limits learned from them */
    SUPERVISE_HANG_TIME = 1, /* by a time without a new checkpoint */
    SUPERVISE_HANG_NEVER = 2
} supervise_hang;

typedef enum supervise_anomaly { /* when a checkpoint becomes suspect during an attempt */
                                 SUPERVISE_ANOMALY_MARK = 0, /* tells of it */
                                 SUPERVISE_ANOMALY_REWIND =
                                     1, /* ends the command, and starts it from a healthy checkpoint before that one */
                                 SUPERVISE_ANOMALY_STOP = 2, /* ends the command, and gives up */
                                 SUPERVISE_ANOMALY_COMMAND = 3
} supervise_anomaly;

typedef struct supervise_options {
    const char *store, *run;
    char *const *command; /* ends with NULL */
    uint64_t grace_s;     /* between a request to end and SIGKILL */
    bool mixed;           /* signals go to the command alone, not to its group; SIGKILL goes to all */
    uint64_t pause_s, max_pause_s;
    uint64_t max_restarts;
    uint64_t max_futile; /* attempts without a newer checkpoint */
    supervise_hang hang;
    uint64_t hang_s;       /* SUPERVISE_HANG_TIME: at least 1 */
    uint64_t hang_floor_s; /* SUPERVISE_HANG_AUTO: no step takes too long before this; at least 1 */
    /* run by sh -c before a command that hangs is ended; NULL: SIGQUIT to processes that handle it */
    const char *on_hang;
    uint64_t rewind_on_nan; /* good checkpoints to go back if the newest is suspect; 0: one */
    supervise_anomaly on_anomaly;
    const char *anomaly_command; /* SUPERVISE_ANOMALY_COMMAND: for sh -c */
    bool quick;                  /* verifies stored checksums only */
    uint64_t
        verify_limit_s; /* a checkpoint counts as whole if verifying it takes longer; 0: none is verified */
    uint32_t threads;   /* for verification; 0: one per core */
    const char *hosts_file;   /* NULL: the hosts are those of Slurm, of PBS, or this one */
    const char *spares_file;  /* NULL: there are none */
    uint64_t min_hosts;       /* a host is dropped only if at least this many remain; 0: none is dropped */
    const char *node_check;   /* for sh -c, on each host before an attempt; NULL: none */
    uint64_t node_check_s;    /* how long it may take */
    const char *remote_shell; /* words that precede a host's name and a command */
    uint64_t device_wait_s;   /* for memory of devices that the last attempt used; 0: does not wait */
    bool act;                 /* excludes hosts and requeues jobs, instead of proposing it */
    ckd_message_fn on_message;
    void *message_context;
} supervise_options;

typedef struct supervise_result {
    int status;      /* to exit with */
    ckd_status kind; /* the same in the words of the library */
    uint64_t attempts;
    char reason[SUPERVISE_TEXT_MAX];
    char newest[SUPERVISE_REF_MAX]; /* checkpoint; "": none */
    bool requeue;                   /* Slurm started the job, and should start it again */
} supervise_result;

/*
 * Supervises the command until it is done. Creates the store if there is none. Changes the signal mask of the process.
 * Errors: CORRUPT (the run has checkpoints, and none is whole), BUSY (the run has a supervisor), those of
 * ckd_store_open.
 */
ckd_status supervise_run(supervise_result *out, const supervise_options *options, ckd_error *err);

#endif
