#include "engine/save_staying.h"

#include <stdlib.h>

#include "engine/device.h"

uint64_t save_block_at(const tensor_context *t, uint64_t first, uint64_t end) {
    uint64_t most = t->rows ? save_panel_block(t->rows, first) : t->block_elements;
    return end - first < most ? end - first : most;
}

static uint64_t aligned(uint64_t size) {
    return (size + 255) / 256 * 256;
}

/* Some blocks whose hashes are made together. */
typedef struct some_blocks {
    device_pieces span[DEVICE_SPANS];
    uint64_t first[DEVICE_SPANS]; /* element */
    uint64_t pieces;              /* of all */
    uint64_t gathered;            /* bytes, if they do not lie together */
    uint32_t count;
} some_blocks;

static uint64_t take_some(some_blocks *b, const tensor_context *t, uint64_t first, uint64_t end,
                          size_t element) {
    *b = (some_blocks){.count = 0};
    for (uint64_t n; first < end && b->count < DEVICE_SPANS; first += n) {
        n = save_block_at(t, first, end);
        b->first[b->count] = first;
        b->span[b->count++].bytes = n * element;
        b->pieces += device_pieces_of(n * element);
        b->gathered += aligned(n * element);
    }
    return first;
}

/* Where each block's bytes are. */
static ckd_status place_some(some_blocks *b, const device_reader *r, uint8_t *room, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (uint32_t i = 0; i < b->count && status == CKD_OK; i++) {
        b->span[i].values = r->data + b->first[i] * r->element;
        if (r->width != r->stride) {
            b->span[i].values = room;
            status = device_gather(r, room, b->first[i], b->span[i].bytes / r->element, err);
            room += aligned(b->span[i].bytes);
        }
    }
    return status;
}

static ckd_status hash_some(hash128 *to, some_blocks *b, const device_reader *r, ckd_error *err) {
    void *memory;
    uint64_t room = r->width == r->stride ? 0 : b->gathered;
    ckd_status status = device_memory(&memory, r->line, room + b->pieces * sizeof(uint64_t), err);
    uint64_t *hashes = (uint64_t *)(void *)((uint8_t *)memory + room);
    status = status == CKD_OK ? place_some(b, r, memory, err) : status;
    return status == CKD_OK ? device_hash(to, r->line, b->span, b->count, hashes, err) : status;
}

/* Moments of a step are held by the one who has the optimizer, and rounded copies are known by their masters' values: these are read. */
static bool worth_a_look(const ckd_save *save, const ckd_tensor *tensor, const tensor_context *t) {
    return tensor->read == device_read && !atomic_load(&save->store->devices_differ) && t->parent &&
           !tensor->optimizer && !block_is_master(t) && save->coding.codec != CKD_CODEC_RAW;
}

static ckd_status hash_all(staying_blocks *u, const device_reader *r, const tensor_context *t, uint64_t first,
                           uint64_t end, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (uint32_t at = 0; first < end && status == CKD_OK;) {
        some_blocks b;
        first = take_some(&b, t, first, end, r->element);
        status = hash_some(u->content + at, &b, r, err);
        for (uint32_t i = 0; i < b.count && status == CKD_OK; i++, at++) {
            /* What is a delta there may want a ready copy, and values for it. */
            const record *old = block_in_parent(t, b.first[i], b.span[i].bytes / r->element);
            u->same[at] = old && old->depth == 0 && hash128_equal(&old->content, &u->content[at]);
        }
    }
    return status;
}

ckd_status save_staying_begin(staying_blocks *u, ckd_save *save, const ckd_tensor *tensor,
                              const tensor_context *t, uint64_t first, uint64_t end, ckd_error *err) {
    if (!worth_a_look(save, tensor, t) || first == end) {
        return CKD_OK;
    }
    for (uint64_t at = first; at < end; at += save_block_at(t, at, end)) {
        u->count++;
    }
    u->content = calloc(u->count, sizeof(*u->content));
    u->same = calloc(u->count, sizeof(*u->same));
    u->unread = calloc(u->count, sizeof(*u->unread));
    if (!u->content || !u->same || !u->unread) {
        return err_nomem(err, u->count * sizeof(*u->content), "hashes of blocks");
    }
    ckd_error why;
    u->hashed = hash_all(u, tensor->read_context, t, first, end, &why) == CKD_OK;
    if (!u->hashed) {
        store_message(save->store, "%s is read from its device, which cannot say what has changed: %s",
                      t->tensor->name, why.message);
    }
    return CKD_OK;
}

void save_staying_free(staying_blocks *u, const ckd_tensor *tensor) {
    if (u->content) {
        device_reader *r = tensor->read_context;
        r->end = r->elements;
    }
    free(u->content);
    free(u->same);
    free(u->unread);
}

bool save_staying_next(staying_blocks *u, ckd_save *save, const ckd_tensor *tensor, const tensor_context *t,
                       block_job *job) {
    job->stays = false;
    if (!u->content) {
        return false;
    }
    uint32_t i = u->next++;
    if (u->same[i] && block_find_staying(job, &save->coding, t, &u->content[i], save->pipeline.slot_count)) {
        return true;
    }
    device_reader *r = tensor->read_context;
    uint64_t end = job->first + job->count;
    uint32_t known = u->looked ? u->looked : u->count;
    for (i++; i < known && !u->same[i] && !u->unread[i]; i++) {
        end += save_block_at(t, end, r->elements);
    }
    r->end = end;
    return false;
}
