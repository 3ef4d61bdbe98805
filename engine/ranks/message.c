/*
 * A message between ranks: an error, or bytes. u32 status, u32 errno, u64 offset, message, tensor, file; then the
 * bytes.
 */
#include <stdio.h>

#include "engine/ranks/internal.h"

#define OVER 0x80000000u /* flag in the status: the group ends with this message */

static void put_message(bytes *to, ckd_status status, const ckd_error *why, bool over, const void *data,
                        size_t size) {
    bytes_put_u32(to, (uint32_t)status | (over ? OVER : 0));
    bytes_put_u32(to, status ? (uint32_t)why->sys_errno : 0);
    bytes_put_u64(to, status ? why->offset : 0);
    bytes_put_string(to, status ? why->message : "");
    bytes_put_string(to, status ? why->tensor : "");
    bytes_put_string(to, status ? why->file : "");
    bytes_put(to, data, size);
}

bool rank_message_reserve(bytes *to) {
    bool reserved = bytes_extend(to, sizeof(ckd_error) + RANK_MESSAGE_SURE + 64) != NULL;
    bytes_clear(to);
    return reserved;
}

ckd_bytes rank_message_put(bytes *to, ckd_status status, const ckd_error *why, bool over, const void *data,
                           size_t size) {
    bytes_clear(to);
    put_message(to, status, why, over, data, size);
    if (to->failed) {
        ckd_error lack = {0};
        err_nomem(&lack, size, "a message to the other ranks");
        to->failed = false;
        bytes_clear(to);
        put_message(to, CKD_E_NOMEM, &lack, over, NULL, 0);
    }
    return (ckd_bytes){to->data, to->size};
}

ckd_bytes rank_message_write(ckd_status status, const ckd_error *why, bool over, const void *data,
                             size_t size) {
    bytes to = {0};
    put_message(&to, status, why, over, data, size);
    if (to.failed) {
        bytes_free(&to);
    }
    return (ckd_bytes){to.data, to.size};
}

/* Does not use reader_string: a path may contain any bytes, and an error that names such a path must not be lost. */
static void take_text(reader *at, char *out, size_t capacity) {
    size_t size = reader_u16(at);
    const char *text = reader_take(at, size);
    size = text && size < capacity ? size : 0;
    memcpy(out, size ? text : "", size);
    out[size] = '\0';
}

rank_message rank_message_read(const ckd_bytes *message, ckd_error *err) {
    reader at = reader_of(message->data, message->size);
    ckd_error received = {0};
    uint32_t status = reader_u32(&at);
    rank_message m = {.over = (status & OVER) != 0, .status = (ckd_status)(status & ~OVER)};
    received.status = m.status;
    received.sys_errno = (int)reader_u32(&at);
    received.offset = reader_u64(&at);
    take_text(&at, received.message, sizeof(received.message));
    take_text(&at, received.tensor, sizeof(received.tensor));
    take_text(&at, received.file, sizeof(received.file));
    m.readable = !at.failed && (status & ~OVER) <= CKD_E_DEVICE;
    if (!m.readable) {
        m.status = err_set(err, CKD_E_CORRUPT,
                           "a message between ranks cannot be read: all ranks must use the same version");
    } else if (m.status != CKD_OK) {
        err_from(err, m.status, &received);
    } else {
        m.inside = (ckd_bytes){(uint8_t *)message->data + at.at, reader_left(&at)};
    }
    return m;
}

ckd_status rank_error(ckd_error *err, uint32_t rank, ckd_status status, const ckd_error *why) {
    ckd_error e = *why;
    e.status = status;
    snprintf(e.message, sizeof(e.message), "rank %u: %.490s", (unsigned)rank, why->message);
    return err_from(err, status, &e);
}
