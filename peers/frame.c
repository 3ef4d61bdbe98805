/* Frames: a head whose length is bounded before anything is allocated, and a body that has the hash in it. */
#include "peers/internal.h"

#include <stdio.h>

#define MAGIC     UINT32_C(0x50646b63) /* "ckdP" */
#define HEAD_SIZE 40

/*
 * magic, protocol, kind, size of the body, 0; hash of the body; hash of all that. Every version has the first two and
 * the last at these places, so that each can tell which one the other side is.
 */
static void put_head(uint8_t head[HEAD_SIZE], frame_kind kind, const void *body, size_t size) {
    hash128 hash = hash128_of(body, size);
    store_le32(head, MAGIC);
    head[4] = PEER_PROTOCOL;
    head[5] = 0;
    head[6] = (uint8_t)kind;
    head[7] = 0;
    store_le32(head + 8, (uint32_t)size);
    store_le32(head + 12, 0);
    memcpy(head + 16, hash.bytes, sizeof(hash.bytes));
    store_le64(head + 32, hash64(head, 32));
}

ckd_status frame_send(wire *w, frame_kind kind, const void *body, size_t size, ckd_error *err) {
    uint8_t head[HEAD_SIZE];
    if (size > FRAME_MAX) {
        return err_set(err, CKD_E_INVALID, "a message of %zu bytes is too long", size);
    }
    put_head(head, kind, body, size);
    ckd_status status = wire_send(w, head, sizeof(head), err);
    return status == CKD_OK && size ? wire_send(w, body, size, err) : status;
}

static ckd_status check_head(const uint8_t head[HEAD_SIZE], ckd_error *err) {
    if (load_le32(head) == MAGIC && load_le64(head + 32) == hash64(head, 32) &&
        load_le16(head + 4) != PEER_PROTOCOL) {
        return err_set(err, CKD_E_UNSUPPORTED,
                       "the other node speaks version %u, this one version %d: they need the same ckptdelta",
                       (unsigned)load_le16(head + 4), PEER_PROTOCOL);
    }
    if (load_le64(head + 32) != hash64(head, 32)) {
        return err_set(err, CKD_E_CORRUPT, "the head of a message was damaged on its way between nodes");
    }
    if (load_le32(head) != MAGIC || load_le32(head + 8) > FRAME_MAX) {
        return err_set(err, CKD_E_INVALID, "another node sent something other than an agent's message");
    }
    return CKD_OK;
}

static ckd_status receive(frame_kind *kind, bytes *body, wire *w, size_t max, ckd_error *err) {
    uint8_t head[HEAD_SIZE];
    hash128 hash;
    bytes_clear(body);
    ckd_status status = wire_receive(w, head, sizeof(head), err);
    THEN(status, check_head(head, err));
    size_t size = load_le32(head + 8);
    if (status == CKD_OK && size > max) {
        status =
            err_set(err, CKD_E_INVALID, "another node sent a message of %zu bytes, which is too long", size);
    }
    if (status != CKD_OK) {
        return status;
    }
    void *to = size ? bytes_extend(body, size) : NULL;
    if (size && !to) {
        return err_nomem(err, size, "a message of another node");
    }
    status = size ? wire_receive(w, to, size, err) : CKD_OK;
    memcpy(hash.bytes, head + 16, sizeof(hash.bytes));
    hash128 is = hash128_of(to, size);
    if (status == CKD_OK && !hash128_equal(&hash, &is)) {
        status = err_set(
            err, CKD_E_CORRUPT,
            "a message was damaged on its way between nodes: its %zu bytes do not have their hash", size);
    }
    *kind = (frame_kind)load_le16(head + 6);
    return status;
}

ckd_status frame_receive(frame_kind *kind, bytes *body, wire *w, ckd_error *err) {
    return receive(kind, body, w, FRAME_MAX, err);
}

ckd_status frame_receive_hello(bytes *body, wire *w, frame_kind kind, ckd_error *err) {
    frame_kind is;
    ckd_status status = receive(&is, body, w, HELLO_MAX, err);
    return status == CKD_OK && is != kind ? err_set(err, CKD_E_INVALID, "no greeting") : status;
}

ckd_status frame_expect(bytes *body, wire *w, frame_kind kind, ckd_error *err) {
    frame_kind is;
    ckd_status status = frame_receive(&is, body, w, err);
    return status == CKD_OK && is != kind
               ? err_set(err, CKD_E_INVALID, "another node sent a message of kind %d instead of %d", is, kind)
               : status;
}

/* ---- answers ---- */

ckd_status frame_answer(wire *w, ckd_status status, const ckd_error *why, const bytes *body, ckd_error *err) {
    bytes head = {.size = 0};
    char text[512];
    size_t size = body && status == CKD_OK ? body->size : 0;
    if (body && (body->failed || size > ANSWER_MAX)) {
        return err_nomem(err, size, "an answer to another node");
    }
    snprintf(text, sizeof(text), "%.511s", status != CKD_OK && why ? why->message : "");
    bytes_put_u32(&head, (uint32_t)status);
    bytes_put_string(&head, text);
    bytes_put_u64(&head, size);
    ckd_status sent = head.failed ? err_nomem(err, 64, "an answer")
                                  : frame_send(w, FRAME_ANSWER, head.data, head.size, err);
    for (size_t at = 0; at < size && sent == CKD_OK; at += PEER_PACKET) {
        size_t packet = size - at < PEER_PACKET ? size - at : PEER_PACKET;
        sent = frame_send(w, FRAME_DATA, body->data + at, packet, err);
    }
    bytes_free(&head);
    return sent;
}

static ckd_status take_body(bytes *body, wire *w, uint64_t size, ckd_error *err) {
    bytes packet = {.size = 0};
    ckd_status status = CKD_OK;
    while (body->size < size && status == CKD_OK) {
        status = frame_expect(&packet, w, FRAME_DATA, err);
        if (status == CKD_OK && (packet.size == 0 || packet.size > size - body->size)) {
            status = err_set(err, CKD_E_INVALID, "another node's answer does not have the announced length");
        }
        if (status == CKD_OK) {
            bytes_put(body, packet.data, packet.size);
            status = body->failed ? err_nomem(err, (size_t)size, "an answer of another node") : CKD_OK;
        }
    }
    bytes_free(&packet);
    return status;
}

ckd_status frame_take_answer(bytes *body, bool *answered, wire *w, uint64_t max, ckd_error *err) {
    bytes head = {.size = 0};
    char text[512];
    *answered = false;
    bytes_clear(body);
    ckd_status status = frame_expect(&head, w, FRAME_ANSWER, err);
    if (status != CKD_OK) {
        bytes_free(&head);
        return status;
    }
    reader r = reader_of(head.data, head.size);
    uint32_t outcome = reader_u32(&r);
    reader_string(&r, text, sizeof(text));
    uint64_t size = reader_u64(&r);
    bytes_free(&head);
    if (r.failed || size > max) {
        return err_set(err, CKD_E_INVALID, "another node sent an invalid answer");
    }
    status = take_body(body, w, size, err);
    *answered = status == CKD_OK;
    if (status != CKD_OK || outcome == CKD_OK) {
        return status;
    }
    /* CANCELLED is for this node's own end */
    bool known = outcome <= CKD_E_DEVICE && outcome != CKD_E_CANCELLED;
    return err_set(err, known ? (ckd_status)outcome : CKD_E_IO, "%s", text);
}
