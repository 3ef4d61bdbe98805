/*
 * Does training hang? A pure function of the slots, of their earlier states, and of the time that has passed.
 *
 * A rank is silent from its last step or change of phase on. It hangs if it is silent for longer than a limit, which is
 * learned from the times of its own steps. While it evaluates or waits for a save, the limit is generous. Its start and
 * its first steps have a limit only if there is something to compare with: ranks that have made more steps, or the
 * starts of earlier attempts.
 */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "supervise/internal.h"

/* docs/run.md and DECISIONS.md have these figures. */
#define FIRST_STEPS 3  /* not learned from: they allocate and compile */
#define TIMES_MIN   8  /* step times that are enough to learn from */
#define MEDIANS     10 /* a step may take this many times the median, */
#define DEVIATIONS  30 /* or exceed it by this many median deviations, */
#define LONGEST     3  /* or this many times the longest silence that ended by itself; */
#define KNOWN       10 /* any other phase, this many times the longest of its kind */
#define SAVE        12 /* floors */
#define START       12
#define EVALUATION  72

static int ascending(const void *a, const void *b) {
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

static double middle(uint32_t *values, size_t count) {
    qsort(values, count, sizeof(*values), ascending);
    return ((double)values[(count - 1) / 2] + (double)values[count / 2]) / 2;
}

/* The times of the newest steps in ms, the first steps of the process left out. Returns how many. */
static size_t step_times(uint32_t out[CKD_PROGRESS_WINDOW], const ckd_progress_slot *slot) {
    size_t count = 0;
    uint64_t end = slot->timed, begin = end > CKD_PROGRESS_WINDOW ? end - CKD_PROGRESS_WINDOW : 0;
    for (uint64_t i = begin < FIRST_STEPS ? FIRST_STEPS : begin; i < end; i++) {
        out[count++] = slot->took_ms[i % CKD_PROGRESS_WINDOW];
    }
    return count;
}

static double greater(double a, double b) {
    return a > b ? a : b;
}

/* A limit for steps, if there are enough to learn from; else INFINITY. */
static double step_limit(const liveness *l, const ckd_progress_slot *slot) {
    uint32_t times[CKD_PROGRESS_WINDOW];
    size_t count = step_times(times, slot);
    if (count < TIMES_MIN) {
        return INFINITY;
    }
    double median = middle(times, count);
    for (size_t i = 0; i < count; i++) {
        double off = (double)times[i] - median;
        times[i] = (uint32_t)(off < 0 ? -off : off);
    }
    double learned = greater(MEDIANS * median, median + DEVIATIONS * middle(times, count)) / 1e3;
    return greater(greater(l->floor_s, learned), LONGEST * l->longest_s[CKD_PROGRESS_TRAINING]);
}

double liveness_limit(const liveness *l, const ckd_progress_slot *slot) {
    double known = KNOWN * l->longest_s[slot->phase];
    if (slot->phase == CKD_PROGRESS_EVALUATION) {
        return greater(EVALUATION * l->floor_s, known);
    }
    if (slot->phase == CKD_PROGRESS_SAVING) {
        return greater(SAVE * l->floor_s, known);
    }
    double limit = slot->phase == CKD_PROGRESS_TRAINING ? step_limit(l, slot) : INFINITY;
    bool comparable = l->learned || (slot->phase == CKD_PROGRESS_START && l->start_s > 0);
    return limit == INFINITY && comparable ? greater(START * l->floor_s, KNOWN * l->start_s) : limit;
}

/* The process may have written anything, so the phase is not trusted. */
static uint64_t phase_of(const ckd_progress_slot *slot) {
    return slot->phase <= CKD_PROGRESS_ENDED ? slot->phase : CKD_PROGRESS_TRAINING;
}

static bool is_watched(const ckd_progress_slot *slot, bool gone) {
    return !gone && slot->phase != CKD_PROGRESS_ENDED;
}

/* Is another rank busy with something that this one may have to wait for? */
static bool may_wait(const ckd_progress_slot *slots, const bool *gone, size_t count, size_t own) {
    for (size_t i = 0; i < count; i++) {
        if (i != own && is_watched(&slots[i], gone[i]) && slots[i].phase != CKD_PROGRESS_TRAINING) {
            return true;
        }
    }
    return false;
}

/* Records a silence that ended by itself, because it was no hang. The first steps are no measure for later ones. */
static void record_silence(liveness *l, const ckd_progress_slot *before, double silent_s) {
    if (before->phase != CKD_PROGRESS_TRAINING || before->timed >= FIRST_STEPS + TIMES_MIN) {
        l->longest_s[before->phase] = greater(l->longest_s[before->phase], silent_s);
    }
}

static bool is_same(const ckd_progress_slot *a, const ckd_progress_slot *b) {
    return a->pid == b->pid && a->steps == b->steps && a->step_ns == b->step_ns && a->phase == b->phase &&
           a->phase_ns == b->phase_ns;
}

bool liveness_look(liveness *l, ckd_progress_slot *slots, const bool *gone, size_t count, double passed_s) {
    bool hung = false;
    l->learned = false;
    for (size_t i = 0; i < count; i++) {
        slots[i].phase = phase_of(&slots[i]);
        l->learned = l->learned || (is_watched(&slots[i], gone[i]) && step_limit(l, &slots[i]) < INFINITY);
    }
    for (size_t i = 0; i < count; i++) {
        ckd_progress_slot *before = &l->seen[i];
        if (!is_watched(&slots[i], gone[i]) || before->pid != slots[i].pid) {
            l->silent_s[i] = 0;
        } else if (!is_same(before, &slots[i])) {
            record_silence(l, before, l->silent_s[i]);
            l->silent_s[i] = 0;
        } else if (slots[i].phase != CKD_PROGRESS_TRAINING || !may_wait(slots, gone, count, i)) {
            l->silent_s[i] += passed_s;
            hung = hung || l->silent_s[i] > liveness_limit(l, &slots[i]);
        }
        *before = slots[i];
    }
    return hung;
}

/* ------------------------------------------------------------------------------------------------------ in words */

static bool is_behind(const ckd_progress_slot *a, const ckd_progress_slot *b) {
    return a->steps == 0 ? b->steps > 0 : b->steps > 0 && a->step < b->step;
}

/* The rank that holds up the others: the one with the lowest step; of equals, the one that was silent longest. */
static size_t last_rank(const liveness *l, const ckd_progress_slot *slots, const bool *gone, size_t count) {
    size_t last = SIZE_MAX;
    for (size_t i = 0; i < count; i++) {
        if (is_watched(&slots[i], gone[i]) &&
            (last == SIZE_MAX || is_behind(&slots[i], &slots[last]) ||
             (!is_behind(&slots[last], &slots[i]) && l->silent_s[i] > l->silent_s[last]))) {
            last = i;
        }
    }
    return last;
}

/* The one that is silent for longest among those over their limits; SIZE_MAX: none is. */
static size_t longest_over(const liveness *l, const ckd_progress_slot *slots, const bool *gone,
                           size_t count) {
    size_t longest = SIZE_MAX;
    for (size_t i = 0; i < count; i++) {
        if (is_watched(&slots[i], gone[i]) && l->silent_s[i] > liveness_limit(l, &slots[i]) &&
            (longest == SIZE_MAX || l->silent_s[i] > l->silent_s[longest])) {
            longest = i;
        }
    }
    return longest;
}

/* The only rank that trains; SIZE_MAX: none does, or several do. */
static size_t only_in_training(const ckd_progress_slot *slots, const bool *gone, size_t count) {
    size_t only = SIZE_MAX;
    for (size_t i = 0; i < count; i++) {
        if (is_watched(&slots[i], gone[i]) && slots[i].phase == CKD_PROGRESS_TRAINING) {
            if (only != SIZE_MAX) {
                return SIZE_MAX;
            }
            only = i;
        }
    }
    return only;
}

#define NAME_MAX_BYTES 48
static void name_rank(char text[NAME_MAX_BYTES], const ckd_progress_slot *slot) {
    if (slot->rank < CKD_PROGRESS_NO_RANK) {
        snprintf(text, NAME_MAX_BYTES, "rank %" PRIu32 " (process %" PRIu64 ")", (uint32_t)slot->rank,
                 slot->pid);
    } else {
        snprintf(text, NAME_MAX_BYTES, "process %" PRIu64, slot->pid);
    }
}

#define OTHERS_MAX_BYTES 96
/*
 * Describes what the others do. If all ranks but one wait for a save, they may be waiting for that one: it has stopped.
 * Returns true if others are ahead of the slot.
 */
static bool describe_others(char text[OTHERS_MAX_BYTES], const ckd_progress_slot *slot,
                            const ckd_progress_slot *slots, const bool *gone, size_t count) {
    size_t ahead = 0, only = only_in_training(slots, gone, count);
    uint64_t top = 0;
    char who[NAME_MAX_BYTES];
    for (size_t i = 0; i < count; i++) {
        bool counts = is_watched(&slots[i], gone[i]);
        ahead += counts && is_behind(slot, &slots[i]);
        top = counts && slots[i].steps > 0 && slots[i].step > top ? slots[i].step : top;
    }
    text[0] = '\0';
    if (slot->phase == CKD_PROGRESS_SAVING && only != SIZE_MAX) {
        name_rank(who, &slots[only]);
        snprintf(text, OTHERS_MAX_BYTES, "; %s does not, and is at step %" PRIu64, who, slots[only].step);
        return false;
    }
    if (ahead > 0) {
        snprintf(text, OTHERS_MAX_BYTES, "; others are at step %" PRIu64, top);
    }
    return ahead > 0;
}

/* Describes what each rank does. If ranks are at the same step, no single one is to blame. */
#define STATE_MAX_BYTES (NAME_MAX_BYTES + 49)
static void describe_state(char text[STATE_MAX_BYTES], size_t at, bool behind, const ckd_progress_slot *slots,
                           const bool *gone, size_t count) {
    const ckd_progress_slot *slot = &slots[at];
    size_t watched = 0, alike = 0;
    char who[NAME_MAX_BYTES];
    for (size_t i = 0; i < count; i++) {
        watched += is_watched(&slots[i], gone[i]);
        alike += is_watched(&slots[i], gone[i]) && slots[i].phase == slot->phase;
    }
    bool saving = slot->phase == CKD_PROGRESS_SAVING, training = slot->phase == CKD_PROGRESS_TRAINING;
    name_rank(who, slot);
    if (saving && !behind && alike > 1 && alike < watched) {
        snprintf(text, STATE_MAX_BYTES, "%zu of %zu processes wait for a save", alike, watched);
        return;
    }
    if (!behind && watched > 1 && (training || (saving && alike > 1))) {
        snprintf(who, sizeof(who), "each of %zu processes", watched);
    }
    if (saving || slot->phase == CKD_PROGRESS_EVALUATION) {
        snprintf(text, STATE_MAX_BYTES, "%s %s", who, saving ? "waits for a save" : "evaluates");
    } else if (slot->steps == 0) {
        snprintf(text, STATE_MAX_BYTES, "%s has made no step yet", who);
    } else {
        snprintf(text, STATE_MAX_BYTES, "%s has made no step after step %" PRIu64, who, slot->step);
    }
}

void liveness_reason(char text[SUPERVISE_TEXT_MAX], const liveness *l, const ckd_progress_slot *slots,
                     const bool *gone, size_t count) {
    size_t last = last_rank(l, slots, gone, count), over = longest_over(l, slots, gone, count);
    char state[STATE_MAX_BYTES], allowed[37] = "", others[OTHERS_MAX_BYTES];
    if (last == SIZE_MAX) {
        snprintf(text, SUPERVISE_TEXT_MAX, "not known");
        return;
    }
    if (over != SIZE_MAX && !(l->silent_s[last] > liveness_limit(l, &slots[last]))) {
        last = over; /* the last rank is not timed while another one saves or evaluates */
    }
    bool behind = describe_others(others, &slots[last], slots, gone, count);
    describe_state(state, last, behind, slots, gone, count);
    double limit = liveness_limit(l, &slots[last]);
    if (limit < INFINITY) {
        snprintf(allowed, sizeof(allowed), ", %" PRIu64 " s are allowed", (uint64_t)limit);
    }
    snprintf(text, SUPERVISE_TEXT_MAX, "%s for %" PRIu64 " s%s%s", state, (uint64_t)l->silent_s[last],
             allowed, others);
}
