/*
 * A session whose snapshots lie in an agent's memory, and whose saves the agent makes. Without an agent, or when it has
 * gone, the session does everything itself, and a message says so once. Internal to engine/session/.
 */
#ifndef ENGINE_SESSION_AGENT_H
#define ENGINE_SESSION_AGENT_H

#include "engine/slots/slots.h"

/* Guarded by store_turn, except `slots` and `count`, which are fixed from the first step on. */
typedef struct session_agent {
    bool connected;
    slot_link link;
    slot_layout layout;
    shared_slot slots[SLOTS_MAX];
    uint32_t count; /* 0: the session has its own snapshots */
    /* the slot that shows the agent whether training is busy; NULL: none. Under shared.mutex */
    shared_slot *first;
    bool joint;          /* of ranks: all have an agent, or none has. Changed on all at the same points */
    ckd_id group;        /* joint: the group of the agents' threads; the same on all ranks */
    uint32_t timeout_ms; /* joint: as in ckd_ranks_options */
    uint64_t saves;      /* joint: the ids of checkpoints follow from both */
    /* The checkpoint whose values came from memory, until training has gone well for some steps. Under shared.mutex */
    struct {
        bool lasts, failed;
        ckd_id of;
        uint64_t step;
    } probation;
} session_agent;

struct session_slot;

/*
 * Connects to the agent if the session is to have one. Called by the saver once it has opened the store. Collective for
 * ranks. Errors: the ranks have lost each other, so they can save nothing.
 */
ckd_status session_agent_open(ckd_session *s, ckd_error *lost);
/*
 * Called at the first step: gets memory for `count` snapshots from the agent. *taken is false if the session must
 * allocate its own. Collective. Errors: the ranks have lost each other.
 */
ckd_status session_agent_take_memory(bool *taken, ckd_session *s, uint32_t count, ckd_error *lost);
/* The memory of a snapshot; NULL: the session's own. */
uint8_t *session_agent_memory(const ckd_session *s, uint32_t number);
/* Shows the agent whether training is busy. The caller holds shared.mutex. */
void session_agent_show_phase(ckd_session *s);
/* Called before a snapshot is copied into the slot. */
void session_agent_stage(ckd_session *s, const struct session_slot *slot);
/*
 * Has the agent save a staged slot. Returns false if the session must save it itself. It must use the id that is then
 * in s->save, because the agent may still save it, too. one_step: as for save_item. The caller holds store_turn.
 * Collective.
 */
bool session_agent_save(ckd_status *status, ckd_checkpoint *saved, ckd_session *s, struct session_slot *slot,
                        bool one_step, ckd_error *err);
/*
 * Finds a checkpoint that an agent may have committed. The caller holds store_turn. For ranks, rank 0 decides:
 * collective.
 */
bool session_agent_find_saved(ckd_checkpoint *saved, ckd_session *s, const ckd_id *id);
/*
 * Takes a checkpoint's values from the agent's memory, each verified. Returns false if they must be loaded, possibly
 * after some were taken. The caller holds store_turn. With several ranks it is collective: all take them, or none does.
 * tries: this rank may take them.
 */
bool session_agent_restore(ckd_session *s, const ckd_checkpoint *from, bool tries);
/*
 * Reports that training has gone wrong at this step. If its values came from an agent's memory a few steps before, the
 * next launch does not take them from there again. Any thread may call it.
 */
void session_agent_doubt(ckd_session *s, uint64_t step);
/*
 * Says goodbye. The agent then stores states that only other nodes have copies of. The caller is the saver, or holds
 * store_turn. err must not be NULL. Errors: those of the agent.
 */
ckd_status session_agent_leave(ckd_session *s, ckd_error *err);
/* Frees the memory, which no snapshot uses any more. */
void session_agent_free(ckd_session *s, bool in_child);

#endif
