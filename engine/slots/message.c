/*
 * Messages between sessions and agents: a head, a body, descriptors. Also the client side of a connection, for sessions
 * and for programs that ask for the status of an agent.
 */
#include "engine/slots/slots.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/hash.h"

#define BODY_MAX (UINT64_C(1) << 32)
#define MAGIC    UINT32_C(0x41646b63) /* "ckdA" */

typedef struct message_head {
    uint32_t magic, kind;
    uint64_t size;
} message_head;

ckd_status slot_message_send(int fd, const slot_message *m, ckd_error *err) {
    message_head head = {MAGIC, m->kind, m->body.size};
    if (m->body.failed) {
        return err_nomem(err, m->body.size, "a message");
    }
    ckd_status status = local_send(fd, &head, sizeof(head), m->fds, m->fd_count, err);
    return status == CKD_OK && head.size ? local_send(fd, m->body.data, m->body.size, NULL, 0, err) : status;
}

ckd_status slot_message_receive(slot_message *out, int fd, ckd_error *err) {
    message_head head;
    *out = (slot_message){.fd_count = 0};
    ckd_status status = local_receive(fd, &head, sizeof(head), out->fds, &out->fd_count, err);
    if (status != CKD_OK) {
        return status;
    }
    if (head.magic != MAGIC || head.kind < SLOT_HELLO || head.kind > SLOT_REPLY || head.size > BODY_MAX) {
        slot_message_free(out);
        return err_set(err, CKD_E_INVALID, "another process sent something other than an agent's message");
    }
    void *body = head.size ? bytes_extend(&out->body, (size_t)head.size) : NULL;
    status = head.size && !body ? err_nomem(err, (size_t)head.size, "a message") : CKD_OK;
    if (status == CKD_OK && head.size) {
        status = local_receive(fd, body, (size_t)head.size, NULL, NULL, err);
    }
    if (status != CKD_OK) {
        slot_message_free(out);
        return status;
    }
    out->kind = (slot_message_kind)head.kind;
    return CKD_OK;
}

void slot_message_free(slot_message *m) {
    for (size_t i = 0; i < m->fd_count; i++) {
        local_close(m->fds[i]);
    }
    bytes_free(&m->body);
    *m = (slot_message){.fd_count = 0};
}

ckd_status slot_message_get(void *to, size_t size, const slot_message *m, ckd_error *err) {
    if (m->body.size < size) {
        return err_set(err, CKD_E_INVALID, "a message between processes is too short");
    }
    memcpy(to, m->body.data, size);
    return CKD_OK;
}

/* ---- where an agent listens ---- */

/* The path does not depend on the environment, which a login, a batch job and a launcher may set differently. */
static ckd_status usual_path(char out[LOCAL_PATH_MAX + 1], const char *store, ckd_error *err) {
    char folder[64], *resolved = realpath(store, NULL);
    if (!resolved) {
        return err_set(err, CKD_E_NOT_FOUND, "there is no store at %s, so it has no agent", store);
    }
    snprintf(folder, sizeof(folder), "/tmp/ckptdelta-%lu", (unsigned long)geteuid());
    snprintf(out, LOCAL_PATH_MAX + 1, "%s/%016llx.agent", folder,
             (unsigned long long)hash64(resolved, strlen(resolved)));
    free(resolved);
    return local_private_folder(folder, err);
}

ckd_status slots_socket_path(char out[LOCAL_PATH_MAX + 1], const char *store, const char *where,
                             ckd_error *err) {
    if (!where || strcmp(where, "auto") == 0 || strcmp(where, "1") == 0) {
        return usual_path(out, store, err);
    }
    if (where[0] != '/' || strlen(where) > LOCAL_PATH_MAX) {
        return err_set(err, CKD_E_INVALID,
                       "an agent is 'auto' or the absolute path of its socket, at most %d bytes, not '%s'",
                       LOCAL_PATH_MAX, where);
    }
    snprintf(out, LOCAL_PATH_MAX + 1, "%s", where);
    return CKD_OK;
}

/* ---- how long to wait ---- */

#define USUAL_WAIT_S 20.0
#define WAIT_S_MAX   1e6

uint32_t slots_wait_ms(double wanted_s) {
    const char *text = getenv("CKPTDELTA_AGENT_WAIT");
    double seconds = wanted_s > 0 ? wanted_s : text ? strtod(text, NULL) : 0;
    seconds = seconds > 0 && seconds <= WAIT_S_MAX ? seconds : USUAL_WAIT_S;
    return seconds * 1000 < 2 ? 2 : (uint32_t)(seconds * 1000);
}

/* Half of the time is for the answer, the other half for a sign of life. */
static uint32_t half(const slot_link *link) {
    return link->wait_ms / 2;
}

static ckd_status send_hello(int fd, const slot_peer *peer, ckd_error *err) {
    slot_hello hello;
    memset(&hello, 0, sizeof(hello));
    hello.protocol = SLOT_PROTOCOL;
    hello.request_bytes = sizeof(slot_request);
    snprintf(hello.version, sizeof(hello.version), "%s", ckd_version());
    snprintf(hello.run, sizeof(hello.run), "%s", peer->run);
    hello.rank = peer->rank;
    hello.world = peer->world;
    slot_message request = {.kind = SLOT_HELLO};
    bytes_put(&request.body, &hello, sizeof(hello));
    ckd_status status = slot_message_send(fd, &request, err);
    slot_message_free(&request);
    return status;
}

/* A long save delays the answer. A stopped agent neither answers nor refuses another connection. */
static bool is_alive(const slot_link *link) {
    int fd;
    bool ready = false;
    if (local_connect(&fd, link->path, half(link), NULL) != CKD_OK) {
        return false;
    }
    if (send_hello(fd, &(slot_peer){.run = ""}, NULL) == CKD_OK) {
        local_wait(&fd, 1, (int)half(link), &ready);
    }
    local_close(fd);
    return ready;
}

static ckd_status await_answer(const slot_link *link, ckd_error *err) {
    for (bool ready = false;;) {
        local_wait(&link->fd, 1, (int)half(link), &ready);
        if (ready) {
            return CKD_OK;
        }
        if (!is_alive(link)) {
            return err_set(err, CKD_E_BUSY, "the agent has shown no sign of life for %g s",
                           link->wait_ms / 1000.0);
        }
    }
}

/* ---- questions and answers ---- */

/* Breaks the link unless the whole answer arrives: the rest of it would be taken for the next answer. */
static ckd_status take_answer(slot_message *answer, slot_reply *reply, slot_link *link, ckd_status sent,
                              ckd_error *err) {
    ckd_status status = sent;
    THEN(status, await_answer(link, err));
    THEN(status, slot_message_receive(answer, link->fd, err));
    THEN(status, slot_message_get(reply, sizeof(*reply), answer, err));
    if (status != CKD_OK) {
        slot_message_free(answer);
        link->broken = true;
        return status;
    }
    return err_from(err, reply->status, &reply->error);
}

ckd_status slots_ask(slot_message *answer, slot_reply *reply, slot_link *link, const slot_message *request,
                     ckd_error *err) {
    *answer = (slot_message){.fd_count = 0};
    return take_answer(answer, reply, link, slot_message_send(link->fd, request, err), err);
}

void slots_disconnect(slot_link *link) {
    local_close(link->fd);
    link->fd = -1;
}

ckd_status slots_connect(slot_link *out, const char *path, const slot_peer *peer, uint32_t wait_ms,
                         ckd_error *err) {
    slot_message answer = {.fd_count = 0};
    slot_reply reply;
    *out = (slot_link){.fd = -1, .wait_ms = wait_ms};
    snprintf(out->path, sizeof(out->path), "%s", path);
    ckd_status status = local_connect(&out->fd, path, half(out), err);
    if (status != CKD_OK) {
        return status;
    }
    status = take_answer(&answer, &reply, out, send_hello(out->fd, peer, err), err);
    slot_message_free(&answer);
    if (status != CKD_OK) {
        slots_disconnect(out);
    }
    return status;
}
