/* The client side: asks an agent for its state, or tells it to end. */
#include "agent/internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define END_MS 30000

static ckd_status ask(slot_message *answer, const char *store, const char *socket, slot_message *request,
                      ckd_error *err) {
    char path[LOCAL_PATH_MAX + 1];
    slot_reply reply;
    slot_link link = {.fd = -1};
    *answer = (slot_message){.fd_count = 0};
    ckd_status status = slots_socket_path(path, store, socket, err);
    THEN(status, slots_connect(&link, path, &(slot_peer){.run = ""}, slots_wait_ms(0), err));
    if (status == CKD_E_NOT_FOUND) {
        err_set(err, CKD_E_NOT_FOUND, "the store %s has no agent", store);
    }
    THEN(status, slots_ask(answer, &reply, &link, request, err));
    slots_disconnect(&link);
    bytes_free(&request->body);
    return status;
}

/* One allocation: the state, its sessions, its peers, its decisions. */
static ckd_status take_state(ckd_agent_state **out, const slot_message *answer, ckd_error *err) {
    slot_agent about;
    size_t head = sizeof(slot_reply) + sizeof(about);
    if (answer->body.size < head) {
        return err_set(err, CKD_E_INVALID, "the agent's answer is too short");
    }
    memcpy(&about, answer->body.data + sizeof(slot_reply), sizeof(about));
    size_t rest = answer->body.size - head;
    if (about.sessions > rest / sizeof(ckd_agent_session) || about.peers > rest / sizeof(ckd_agent_peer) ||
        about.decision_bytes > rest ||
        about.sessions * sizeof(ckd_agent_session) + about.peers * sizeof(ckd_agent_peer) +
                about.decision_bytes !=
            rest) {
        return err_set(err, CKD_E_INVALID, "the agent's answer has no meaning");
    }
    ckd_agent_state *state = calloc(1, sizeof(*state) + rest + 1);
    if (!state) {
        return err_nomem(err, answer->body.size, "an agent's state");
    }
    memcpy(state + 1, answer->body.data + head, rest);
    *state = (ckd_agent_state){.process = about.process,
                               .memory_bytes = about.memory_bytes,
                               .budget_bytes = about.budget_bytes,
                               .since_ns = about.since_ns,
                               .count = about.sessions,
                               .sessions = (ckd_agent_session *)(state + 1),
                               .peer_count = about.peers,
                               .replicate = about.replicate,
                               .replicated = about.replicated,
                               .parity_data = about.parity_data,
                               .parity = about.parity,
                               .own_bytes = about.own_bytes,
                               .held_bytes = about.held_bytes,
                               .kept = about.kept,
                               .kept_bytes = about.kept_bytes,
                               .local_bytes = about.local_bytes,
                               .local_written_bytes = about.local_written_bytes,
                               .local_behind = about.local_behind,
                               .huge_pages = (ckd_huge_pages)about.huge_pages,
                               .huge_bytes = about.huge_bytes};
    snprintf(state->local, sizeof(state->local), "%s", about.local);
    snprintf(state->local_trouble, sizeof(state->local_trouble), "%s", about.local_trouble);
    state->peers = (ckd_agent_peer *)(state->sessions + about.sessions);
    state->decisions = (const char *)(state->peers + about.peers);
    *out = state;
    return CKD_OK;
}

ckd_status ckd_agent_ask(ckd_agent_state **out, const char *store, const char *socket, ckd_error *err) {
    slot_message request = {.kind = SLOT_STATUS}, answer;
    *out = NULL;
    ckd_status status = ask(&answer, store, socket, &request, err);
    THEN(status, take_state(out, &answer, err));
    slot_message_free(&answer);
    return status;
}

void ckd_agent_state_free(ckd_agent_state *state) {
    free(state);
}

/* The agent holds its lock until it has ended. */
static void await_end(const char *store, const char *socket) {
    char path[LOCAL_PATH_MAX + 1], lock_path[LOCAL_PATH_MAX + 8];
    file_lock *lock = NULL;
    if (slots_socket_path(path, store, socket, NULL) == CKD_OK) {
        snprintf(lock_path, sizeof(lock_path), "%s.lock", path);
        (void)lock_acquire(&lock, lock_path, LOCK_EXCLUSIVE, false, END_MS, NULL);
        lock_release(lock);
    }
}

ckd_status ckd_agent_drain(const char *store, const char *socket, int stop, ckd_error *err) {
    slot_message request = {.kind = SLOT_DRAIN}, answer;
    uint32_t stops = stop != 0;
    bytes_put(&request.body, &stops, sizeof(stops));
    ckd_status status = ask(&answer, store, socket, &request, err);
    slot_message_free(&answer);
    if (status == CKD_OK && stop) {
        await_end(store, socket);
    }
    return status;
}

/* An agent answers the hello of a session only when the run is settled. */
ckd_status ckd_agent_settle(const char *store, const char *socket, const char *run, ckd_error *err) {
    char path[LOCAL_PATH_MAX + 1];
    slot_message goodbye = {.kind = SLOT_GOODBYE}, answer;
    slot_reply reply;
    slot_link link = {.fd = -1};
    ckd_status status = slots_socket_path(path, store, socket, err);
    THEN(status, slots_connect(&link, path, &(slot_peer){.run = run}, slots_wait_ms(0), err));
    if (status == CKD_OK) {
        (void)slots_ask(&answer, &reply, &link, &goodbye, NULL);
        slot_message_free(&answer);
    }
    slots_disconnect(&link);
    return status;
}
