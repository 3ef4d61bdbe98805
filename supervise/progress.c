/* The memory in which the processes of an attempt record their steps; include/ckptdelta_progress.h describes it. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/shm.h>

#include "supervise/internal.h"

#define VARIABLE "CKPTDELTA_PROGRESS"

void progress_make(progress *out) {
    uint64_t token = 0;
    size_t size = CKD_PROGRESS_SLOTS_AT + PROGRESS_SLOTS * sizeof(ckd_progress_slot);
    int id = shmget(IPC_PRIVATE, size, IPC_CREAT | 0600);
    void *memory = id < 0 ? (void *)-1 : shmat(id, NULL, 0);
    *out = (progress){0};
    unsetenv(VARIABLE);
    if (id >= 0) { /* it disappears with its last process; until then it can be attached */
        shmctl(id, IPC_RMID, NULL);
    }
    if (memory == (void *)-1 || getrandom(&token, sizeof(token), GRND_NONBLOCK) != sizeof(token)) {
        return;
    }
    out->header = memory;
    *out->header = (ckd_progress_header){.magic = CKD_PROGRESS_MAGIC,
                                         .token = token,
                                         .version = CKD_PROGRESS_VERSION,
                                         .slot_size = sizeof(ckd_progress_slot),
                                         .slot_count = PROGRESS_SLOTS};
    char name[64];
    snprintf(name, sizeof(name), "%d:%016" PRIx64, id, token);
    setenv(VARIABLE, name, 1);
}

void progress_free(progress *p) {
    if (p->header) {
        shmdt(p->header);
    }
    *p = (progress){0};
}

/* Each field is read atomically, but fields may belong to different steps. */
static void read_slot(ckd_progress_slot *out, const ckd_progress_slot *slot) {
    const uint64_t *from = (const uint64_t *)(const void *)slot;
    uint64_t words[sizeof(*slot) / sizeof(uint64_t)];
    for (size_t i = sizeof(words) / sizeof(words[0]); i-- > 0;) {
        words[i] = __atomic_load_n(&from[i], __ATOMIC_ACQUIRE);
    }
    memcpy(out, words, sizeof(*out));
}

size_t progress_read(ckd_progress_slot out[PROGRESS_SLOTS], const progress *p) {
    const uint8_t *slots = (const uint8_t *)p->header + CKD_PROGRESS_SLOTS_AT;
    size_t count = 0;
    while (p->header && count < PROGRESS_SLOTS) {
        read_slot(&out[count], (const ckd_progress_slot *)(const void *)slots + count);
        if (!out[count].pid) { /* slots are taken in order */
            break;
        }
        count++;
    }
    return count;
}

void progress_sum_up(attempt *a, const progress *p, uint64_t begun_ns) {
    ckd_progress_slot *slots = calloc(PROGRESS_SLOTS, sizeof(*slots));
    size_t count = slots ? progress_read(slots, p) : 0;
    uint64_t first_ns = UINT64_MAX, last_ns = 0;
    for (size_t i = 0; i < count; i++) {
        const ckd_progress_slot *slot = &slots[i];
        if (slot->steps == 0) {
            continue;
        }
        if (slot->first_ns < first_ns) {
            first_ns = slot->first_ns;
            a->first_trained = slot->first_step;
        }
        if (a->last_trained == SUPERVISE_NO_STEP || slot->step > a->last_trained) {
            a->last_trained = slot->step;
        }
        last_ns = slot->step_ns > last_ns ? slot->step_ns : last_ns;
    }
    if (first_ns != UINT64_MAX && first_ns > begun_ns) {
        a->resume_ns = first_ns - begun_ns;
        a->trained_ns = last_ns > first_ns ? last_ns - first_ns : 0;
    }
    free(slots);
}
