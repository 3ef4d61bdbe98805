/*
 * Messages of ranks that load together, from any bytes: as the lists of two or three ranks, and as a reply.
 * Lists that are accepted give replies that can be read, refer to existing entries, and name one reader for
 * each payload.
 */
#include <stdlib.h>
#include <string.h>

#include "engine/ranks/collective.h"
#include "tests/support/fuzz.h"

enum { WORLD_MOST = 3 };

static void try_reply(const uint8_t *data, size_t size, uint32_t world) {
    reader at = reader_of(data, size);
    reader_reply reply;
    while (reader_reply_next(&reply, &at, world)) {
        for (uint32_t i = 0; i < reply.receiver_count; i++) {
            if (load_le32(reply.receivers + 4 * (size_t)i) >= world) {
                abort();
            }
        }
    }
}

/* Checks the replies for accepted lists. The numbers of sent and received payloads must be equal. */
static void check_replies(const bytes *replies, const ckd_bytes *lists, uint32_t world) {
    size_t receivers = 0, received = 0;
    for (uint32_t r = 0; r < world; r++) {
        reader at = reader_of(replies[r].data, replies[r].size);
        reader_reply reply;
        while (reader_reply_next(&reply, &at, world)) {
            if (reply.index >= lists[r].size / READER_ENTRY) {
                abort();
            }
            receivers += reply.receiver_count;
            received += reply.receiver_count == 0;
        }
        if (at.failed) {
            abort();
        }
    }
    if (receivers != received) {
        abort();
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size < 2) {
        return 0;
    }
    uint32_t world = 2 + data[0] % 2;
    size_t first = size - 1 < data[1] * (size_t)READER_ENTRY ? size - 1 : data[1] * (size_t)READER_ENTRY;
    ckd_bytes lists[WORLD_MOST] = {{(void *)(data + 1), first},
                                   {(void *)(data + 1 + first), size - 1 - first},
                                   {(void *)(data + 1), first}};
    bytes replies[WORLD_MOST] = {{0}};
    if (assign_readers(replies, lists, world, NULL) == CKD_OK) {
        check_replies(replies, lists, world);
    }
    for (uint32_t r = 0; r < world; r++) {
        bytes_free(&replies[r]);
    }
    try_reply(data, size, world);
    return 0;
}
