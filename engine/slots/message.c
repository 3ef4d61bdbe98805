/* Messages between sessions and agents: a head, a body, descriptors. */
#include "engine/slots/slots.h"

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
        return err_set(err, CKD_E_INVALID, "another process sent what is no message of an agent's");
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
