/*
 * ckptdelta, the progress of training, for `ckptdelta run`. Part of ckptdelta.h, which includes it; the same
 * conventions hold.
 *
 * The supervisor makes shared memory for each attempt and names it in the environment, CKPTDELTA_PROGRESS. Each
 * training process takes a slot there and records its steps. From them the supervisor learns when training hangs, how
 * far it got, and how long it took to start.
 *
 * Sessions of the supervised run (CKPTDELTA_RUN) and its branches make all these calls by themselves. A program without
 * a session makes them like this:
 *
 *     ckd_progress_begin(NULL, rank);
 *     for (step = ...) {
 *         forward(), backward(), optimizer();
 *         ckd_progress_step(step);
 *         if (time to evaluate) {
 *             ckd_progress_enter(CKD_PROGRESS_EVALUATION);
 *             evaluate();
 *             ckd_progress_enter(CKD_PROGRESS_TRAINING);
 *         }
 *     }
 *     ckd_progress_enter(CKD_PROGRESS_ENDED);
 *
 * A step costs one look at the clock and a few memory stores. Nothing here fails: without a supervisor the calls do
 * nothing. A process has one slot, which all its threads share. A forked child has none until ckd_progress_begin.
 */
/* Before the guard, so that this header can be included alone: others of ckptdelta.h need its types. */
#include "ckptdelta.h"

#ifndef CKPTDELTA_PROGRESS_H
#define CKPTDELTA_PROGRESS_H

#ifdef __cplusplus
extern "C" {
#endif

typedef enum ckd_progress_phase {
    CKD_PROGRESS_START = 0,    /* no step was made since the start, or since a checkpoint was restored */
    CKD_PROGRESS_TRAINING = 1, /* begins with the first step */
    CKD_PROGRESS_EVALUATION = 2,
    CKD_PROGRESS_SAVING = 3, /* training waits for a save */
    CKD_PROGRESS_ENDED = 4   /* no more steps are expected */
} ckd_progress_phase;

#define CKD_PROGRESS_NO_RANK UINT32_MAX
/*
 * Takes a slot for this process, in the phase CKD_PROGRESS_START, and returns 1. Returns 0 if there is no supervisor on
 * this machine, if it supervises neither `run` nor the run that `run` branched off, or if all slots are taken. run:
 * NULL: any. rank: CKD_PROGRESS_NO_RANK: not known. A process that has a slot keeps it; if it is CKD_PROGRESS_ENDED, it
 * starts again.
 */
CKD_API int ckd_progress_begin(const char *run, uint32_t rank);
/*
 * Reports that a step is done. Its number should be higher than the last one; the same number again is ignored. The
 * phase becomes CKD_PROGRESS_TRAINING, whatever it was.
 */
CKD_API void ckd_progress_step(uint64_t step);
/*
 * Sets the phase of the process, and returns the previous one. Before the first step, CKD_PROGRESS_TRAINING counts as
 * CKD_PROGRESS_START.
 */
CKD_API ckd_progress_phase ckd_progress_enter(ckd_progress_phase phase);

/* Reasons to look at a training run. */
typedef enum ckd_alarm {
    CKD_ALARM_NONE = 0,
    CKD_ALARM_METRIC = 1,    /* a metric is unlike those of earlier steps */
    CKD_ALARM_UNCHANGED = 2, /* weights no longer change, or a delta has hardly any changes */
    CKD_ALARM_SIZE = 3,      /* a delta is much larger than earlier ones */
    CKD_ALARM_TIME = 4,      /* a save took much longer than earlier ones */
    CKD_ALARM_REPLICA = 5,   /* ranks that should have the same values no longer do */
    CKD_ALARM_CHANGE = 6     /* a tensor changes much more than it used to, compared with the others */
} ckd_alarm;
/* Returns "metric", "unchanged", "size", "time", "replica", "change"; static. NULL: none, or unknown. */
CKD_API const char *ckd_alarm_name(ckd_alarm alarm);
/* Reports an alarm to the supervisor. Sessions do this by themselves. */
CKD_API void ckd_progress_alarm(ckd_alarm alarm, uint64_t step);

/* -------------------------------------------------------------------------------------------- the shared memory */

/*
 * For programs that write their slot without this library. CKPTDELTA_PROGRESS is ID:TOKEN, the decimal number of a
 * System V segment and 16 hexadecimal digits. The segment begins with a ckd_progress_header, and has slot_count slots
 * from CKD_PROGRESS_SLOTS_AT on, slot_size bytes apart. Use it only if magic, version and token are as expected: on
 * another machine the number may be that of a foreign segment. All fields are native; each is read and written
 * atomically. A process takes the first slot whose pid it can change from 0 to its own. Only that process writes to it.
 */
#define CKD_PROGRESS_MAGIC    UINT64_C(0x73736572676f7270) /* "progress" in the machine's order */
#define CKD_PROGRESS_VERSION  2
#define CKD_PROGRESS_SLOTS_AT 64
typedef struct ckd_progress_header {
    uint64_t magic, token;
    uint32_t version, slot_size, slot_count, reserved;
} ckd_progress_header;

enum { CKD_PROGRESS_WINDOW = 64, CKD_PROGRESS_ALARMS = 12 };
/* Times are of CLOCK_MONOTONIC, in ns. The size is a multiple of 64, so slots share no cache line. */
typedef struct ckd_progress_slot {
    uint64_t pid; /* 0: free */
    uint64_t rank;
    uint64_t phase;    /* a ckd_progress_phase */
    uint64_t phase_ns; /* when it began */
    uint64_t steps;    /* steps made so far; 0: the fields about steps mean nothing */
    uint64_t step;     /* number of the last step */
    uint64_t step_ns;  /* when it was done */
    uint64_t first_step, first_ns;
    uint64_t apart_ns; /* evaluation and saving since the last step */
    uint64_t timed;    /* steps whose time is known: those that followed a step */
    /* By ckd_alarm - 1: the step of the last alarm of this kind, plus 1; 0: there was none. */
    uint64_t alarm_steps[CKD_PROGRESS_ALARMS];
    uint64_t alarms; /* number of alarms; written last */
    /* Durations of the timed steps in ms, without apart_ns. The i-th is at i % CKD_PROGRESS_WINDOW. */
    uint32_t took_ms[CKD_PROGRESS_WINDOW];
} ckd_progress_slot;

#ifdef __cplusplus
}
#endif
#endif
