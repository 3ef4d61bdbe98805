/* Reports the progress of training in memory that the supervisor of this process has made. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/shm.h>
#include <unistd.h>

#include "base/file.h"
#include "engine/session/session.h"

#define READ(field)         __atomic_load_n(&(field), __ATOMIC_RELAXED)
#define WRITE(field, value) __atomic_store_n(&(field), value, __ATOMIC_RELAXED)

_Static_assert(sizeof(ckd_progress_slot) % 64 == 0, "two slots would share a cache line");
_Static_assert(sizeof(ckd_progress_header) <= CKD_PROGRESS_SLOTS_AT, "the slots would cover the header");

/* Attached once per process; a forked child has inherited it. */
static ckd_progress_header *segment;
/* The slot taken last; in a forked child it may be the parent's. */
static ckd_progress_slot *taken;

static ckd_progress_slot *own_slot(void) {
    ckd_progress_slot *slot = __atomic_load_n(&taken, __ATOMIC_ACQUIRE);
    return slot && READ(slot->pid) == (uint64_t)getpid() ? slot : NULL;
}

static ckd_progress_phase enter(ckd_progress_slot *slot, ckd_progress_phase phase) {
    ckd_progress_phase before = (ckd_progress_phase)READ(slot->phase);
    if (phase == CKD_PROGRESS_TRAINING && (READ(slot->steps) == 0 || before == CKD_PROGRESS_START)) {
        phase = CKD_PROGRESS_START;
    }
    if (phase == before || phase < CKD_PROGRESS_START || phase > CKD_PROGRESS_ENDED) {
        return before;
    }
    uint64_t now = clock_monotonic_ns(), begun = READ(slot->phase_ns);
    if (before == CKD_PROGRESS_EVALUATION || before == CKD_PROGRESS_SAVING) {
        WRITE(slot->apart_ns, READ(slot->apart_ns) + (now > begun ? now - begun : 0));
    }
    WRITE(slot->phase, phase);
    WRITE(slot->phase_ns, now);
    return before;
}

/* ------------------------------------------------------------------------------------------------------- taking */

static bool is_expected(const ckd_progress_header *h, uint64_t size, uint64_t token) {
    return h->magic == CKD_PROGRESS_MAGIC && h->token == token && h->version == CKD_PROGRESS_VERSION &&
           h->slot_size == sizeof(ckd_progress_slot) && size >= CKD_PROGRESS_SLOTS_AT &&
           h->slot_count <= (size - CKD_PROGRESS_SLOTS_AT) / sizeof(ckd_progress_slot);
}

/* Attaching to a segment does not change it, so looking at a wrong one is harmless. */
static ckd_progress_header *attach(void) {
    const char *name = secure_getenv("CKPTDELTA_PROGRESS");
    int id, end = 0;
    uint64_t token;
    struct shmid_ds about;
    if (!name || sscanf(name, "%d:%16" SCNx64 "%n", &id, &token, &end) != 2 || name[end]) {
        return NULL;
    }
    if (shmctl(id, IPC_STAT, &about) != 0 || about.shm_segsz < sizeof(ckd_progress_header)) {
        return NULL;
    }
    void *memory = shmat(id, NULL, 0);
    if (memory == (void *)-1) {
        return NULL;
    }
    ckd_progress_header *none = NULL;
    if (!is_expected(memory, about.shm_segsz, token) ||
        !__atomic_compare_exchange_n(&segment, &none, memory, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
        (void)shmdt(memory); /* another thread was faster, if it is the right one */
    }
    return __atomic_load_n(&segment, __ATOMIC_ACQUIRE);
}

static ckd_progress_slot *take_slot(ckd_progress_header *h) {
    uint8_t *slots = (uint8_t *)h + CKD_PROGRESS_SLOTS_AT;
    for (uint32_t i = 0; i < h->slot_count; i++) {
        ckd_progress_slot *slot = (ckd_progress_slot *)(void *)(slots + (size_t)i * h->slot_size);
        uint64_t nobody = 0;
        if (__atomic_compare_exchange_n(&slot->pid, &nobody, (uint64_t)getpid(), false, __ATOMIC_ACQ_REL,
                                        __ATOMIC_RELAXED)) {
            return slot;
        }
    }
    return NULL;
}

/* If two threads of a process do this at the same time, one of them leaves its slot behind, marked as ended. */
static ckd_progress_slot *take_own(void) {
    ckd_progress_slot *before = __atomic_load_n(&taken, __ATOMIC_ACQUIRE);
    ckd_progress_header *h = __atomic_load_n(&segment, __ATOMIC_ACQUIRE);
    h = h ? h : attach();
    ckd_progress_slot *slot = h ? take_slot(h) : NULL;
    if (!slot) {
        return NULL;
    }
    WRITE(slot->rank, CKD_PROGRESS_NO_RANK);
    WRITE(slot->phase_ns, clock_monotonic_ns());
    if (!__atomic_compare_exchange_n(&taken, &before, slot, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
        WRITE(slot->phase, CKD_PROGRESS_ENDED);
        return own_slot();
    }
    return slot;
}

/* Is it the supervised run, or a branch of it: RUN~2, ...? */
static bool is_supervised(const char *run) {
    const char *supervised = secure_getenv("CKPTDELTA_RUN");
    size_t length = supervised ? strlen(supervised) : 0;
    if (!run || !supervised || strncmp(run, supervised, length) != 0) {
        return !run;
    }
    const char *rest = run + length;
    return !*rest || (rest[0] == '~' && rest[1] && rest[1 + strspn(rest + 1, "0123456789")] == '\0');
}

int ckd_progress_begin(const char *run, uint32_t rank) {
    if (!is_supervised(run)) {
        return 0;
    }
    ckd_progress_slot *slot = own_slot();
    slot = slot ? slot : take_own();
    if (!slot) {
        return 0;
    }
    if (rank != CKD_PROGRESS_NO_RANK) {
        WRITE(slot->rank, rank);
    }
    if (READ(slot->phase) == CKD_PROGRESS_ENDED) {
        (void)enter(slot, CKD_PROGRESS_START);
    }
    return 1;
}

/* ------------------------------------------------------------------------------------------------------ writing */

/* Records the duration of a step: the time since the last one. Not called if training has restarted in between. */
static void time_step(ckd_progress_slot *slot, uint64_t now) {
    uint64_t since = READ(slot->step_ns) + READ(slot->apart_ns), timed = READ(slot->timed);
    uint64_t ms = now > since ? (now - since) / 1000000 : 0;
    WRITE(slot->took_ms[timed % CKD_PROGRESS_WINDOW], ms < UINT32_MAX ? (uint32_t)ms : UINT32_MAX);
    WRITE(slot->timed, timed + 1);
}

void ckd_progress_step(uint64_t step) {
    ckd_progress_slot *slot = own_slot();
    if (!slot) {
        return;
    }
    uint64_t phase = READ(slot->phase), steps = READ(slot->steps);
    bool goes_on = steps > 0 && phase != CKD_PROGRESS_START && phase != CKD_PROGRESS_ENDED;
    if (goes_on && READ(slot->step) == step) {
        return;
    }
    (void)enter(slot, CKD_PROGRESS_TRAINING); /* what was apart ends here */
    uint64_t now = clock_monotonic_ns();
    if (goes_on) {
        time_step(slot, now);
    } else {
        WRITE(slot->phase, CKD_PROGRESS_TRAINING);
        WRITE(slot->phase_ns, now);
    }
    if (steps == 0) {
        WRITE(slot->first_step, step);
        WRITE(slot->first_ns, now);
    }
    WRITE(slot->apart_ns, 0);
    WRITE(slot->step, step);
    WRITE(slot->step_ns, now);
    __atomic_store_n(&slot->steps, steps + 1,
                     __ATOMIC_RELEASE); /* the first step's fields are set before it is counted */
}

ckd_progress_phase ckd_progress_enter(ckd_progress_phase phase) {
    ckd_progress_slot *slot = own_slot();
    return slot ? enter(slot, phase) : CKD_PROGRESS_START;
}

const char *ckd_alarm_name(ckd_alarm alarm) {
    static const char *const names[] = {
        [CKD_ALARM_METRIC] = "metric", [CKD_ALARM_UNCHANGED] = "unchanged", [CKD_ALARM_SIZE] = "size",
        [CKD_ALARM_TIME] = "time",     [CKD_ALARM_REPLICA] = "replica",     [CKD_ALARM_CHANGE] = "change"};
    return alarm > CKD_ALARM_NONE && alarm <= CKD_ALARM_CHANGE ? names[alarm] : NULL;
}

_Static_assert((int)CKD_ALARM_CHANGE <= (int)CKD_PROGRESS_ALARMS, "a slot has a step for each kind of alarm");
_Static_assert(sizeof(ckd_progress_slot) % 64 == 0, "slots share no cache line");

void ckd_progress_alarm(ckd_alarm alarm, uint64_t step) {
    ckd_progress_slot *slot = own_slot();
    if (slot && ckd_alarm_name(alarm)) {
        WRITE(slot->alarm_steps[alarm - 1], step + 1);
        (void)__atomic_fetch_add(&slot->alarms, 1, __ATOMIC_RELEASE); /* two threads may raise alarms */
    }
}

ckd_progress_phase session_enter(const ckd_session *s, ckd_progress_phase phase) {
    return s->reports ? ckd_progress_enter(phase) : phase;
}
