/*
 * Finds blocks in device memory that need not be copied to the host: their hashes, computed there, are those of blocks
 * that are stored already.
 */
#include "engine/save/device.h"

#include <stdlib.h>

#include "engine/device/device.h"

uint64_t save_block_length(const tensor_context *t, uint64_t first, uint64_t end) {
    uint64_t max = t->rows ? save_panel_block(t->rows, first) : t->block_elements;
    return end - first < max ? end - first : max;
}

static uint64_t aligned(uint64_t size) {
    return (size + 255) / 256 * 256;
}

/* Blocks that are hashed together: their values, and those of masters as bf16 and f16, too. */
enum { AS_GIVEN, AS_BF16, AS_F16, KINDS };
typedef struct some_blocks {
    device_hash_span span[KINDS * DEVICE_SPANS]; /* kind by kind */
    uint64_t first[DEVICE_SPANS];                /* first element of each */
    uint64_t pages;                              /* of all blocks and kinds */
    uint64_t gathered; /* bytes to gather, if the values are not stored as they are needed */
    uint64_t halves;   /* bytes of all blocks, rounded to one kind */
    uint32_t count, kinds;
} some_blocks;

static uint64_t take_some(some_blocks *b, const tensor_context *t, const device_reader *r, uint64_t first,
                          uint64_t end) {
    bool master = block_is_master(t);
    bool contiguous = master ? device_is_contiguous(r, r->data) : r->width == r->stride;
    *b = (some_blocks){.kinds = master ? KINDS : 1};
    for (uint64_t n; first < end && b->count < DEVICE_SPANS; first += n) {
        n = save_block_length(t, first, end);
        b->first[b->count] = first;
        b->span[b->count++].bytes = n * r->element;
        b->pages += device_hash_pages_of(n * r->element);
        b->gathered += contiguous ? 0 : aligned(n * r->element);
        if (master) {
            b->pages += 2 * device_hash_pages_of(n * sizeof(uint16_t));
            b->halves += aligned(n * sizeof(uint16_t));
        }
    }
    return first;
}

/* Sets the address of each block's bytes. */
static ckd_status place_some(some_blocks *b, const device_reader *r, uint8_t *to, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (uint32_t i = 0; i < b->count && status == CKD_OK; i++) {
        b->span[i].values = r->data + b->first[i] * r->element;
        if (b->gathered) {
            b->span[i].values = to;
            status = device_gather(r, to, b->first[i], b->span[i].bytes / r->element, err);
            to += aligned(b->span[i].bytes);
        }
    }
    return status;
}

static ckd_status round_some(some_blocks *b, const device_lease *lease, uint32_t kind, uint8_t *to,
                             ckd_error *err) {
    device_elements conversion = {DEVICE_CAST, CKD_F32, kind == AS_BF16 ? CKD_BF16 : CKD_F16, NULL};
    device_failure why = {DEVICE_DONE, "", ""};
    device_span spans[DEVICE_SPANS];
    bool supported = true;
    for (uint32_t i = 0; i < b->count; i++) {
        uint64_t n = b->span[i].bytes / sizeof(float);
        spans[i] = (device_span){to, b->span[i].values, NULL, NULL, n};
        b->span[kind * b->count + i] = (device_hash_span){to, n * sizeof(uint16_t), NULL};
        to += aligned(n * sizeof(uint16_t));
    }
    lease->backend->elements(&lease->queue, &supported, &conversion, spans, b->count, &why);
    return supported ? device_status(&why, lease->queue.device, err)
                     : err_set(err, CKD_E_DEVICE, "the device does not support this dtype");
}

/* to: room for the hashes of all kinds. */
static ckd_status hash_some(hash128 *to, some_blocks *b, const device_reader *r, ckd_error *err) {
    void *memory;
    uint64_t before = b->gathered + 2 * b->halves;
    ckd_status status = device_memory(&memory, r->lease, before + b->pages * sizeof(uint64_t), err);
    uint8_t *rounded = (uint8_t *)memory + b->gathered, *hashes = (uint8_t *)memory + before;
    THEN(status, place_some(b, r, memory, err));
    for (uint32_t kind = AS_BF16; kind < b->kinds && status == CKD_OK; kind++) {
        status = round_some(b, r->lease, kind, rounded + (kind - AS_BF16) * b->halves, err);
    }
    return status == CKD_OK ? device_hash(to, r->lease, b->span, (size_t)b->kinds * b->count,
                                          (uint64_t *)(void *)hashes, err)
                            : status;
}

/* Returns true if the blocks may be rounded masters of this save. */
static bool may_be_rounded(const ckd_save *save, const tensor_context *t) {
    return save->registry.has_masters && (t->tensor->dtype == CKD_BF16 || t->tensor->dtype == CKD_F16);
}

/*
 * Tensors with an optimizer are always read, because steps need the values of moments. So are tensors whose parent has
 * values that are not finite, because these must be counted. In other tensors an unchanged block has no such values.
 */
static bool worth_a_look(const ckd_save *save, const ckd_tensor *tensor, const tensor_context *t) {
    return tensor->read == device_read && !atomic_load(&save->store->devices_differ) && !tensor->optimizer &&
           save->coding.context.codec != CKD_CODEC_RAW && (t->parent || may_be_rounded(save, t)) &&
           !(t->parent && view_tensor_nonfinite(t->parent));
}

static ckd_status hash_all(unchanged_blocks *u, ckd_error *err) {
    const device_reader *r = u->span->tensor->read_context;
    const tensor_context *t = u->span->context;
    ckd_status status = CKD_OK;
    uint64_t first = u->span->first, end = u->span->end;
    for (uint32_t at = 0; first < end && status == CKD_OK;) {
        some_blocks b;
        hash128 hashes[KINDS * DEVICE_SPANS];
        first = take_some(&b, t, r, first, end);
        status = hash_some(hashes, &b, r, err);
        for (uint32_t i = 0; i < b.count && status == CKD_OK; i++, at++) {
            /* A block that is a delta in the parent may need a materialized copy, and values for it. */
            const record *old = block_in_parent(t, b.first[i], b.span[i].bytes / r->element);
            u->content[at] = hashes[i];
            u->same[at] = old && old->depth == 0 && hash128_equal(&old->content, &hashes[i]);
            if (u->rounded) {
                u->rounded[2 * at] = hashes[AS_BF16 * b.count + i];
                u->rounded[2 * at + 1] = hashes[AS_F16 * b.count + i];
            }
        }
    }
    return status;
}

/* Finds the blocks that this save has, once masters are registered. All jobs are free then. */
static ckd_status name_all(unchanged_blocks *u, ckd_save *save, ckd_error *err) {
    const tensor_context *t = u->span->context;
    uint64_t first = u->span->first, end = u->span->end;
    ckd_status status = save_await(save, save->pipeline.pushed, err);
    block_job *job = &save->pipeline.jobs[0];
    for (uint32_t i = 0; first < end && status == CKD_OK; i++, first += job->input.count) {
        job->input.first = first;
        job->input.count = save_block_length(t, first, end);
        job->analysis.original = u->content[i];
        u->named[i] = !u->same[i] && block_is_in_save(job, &save->coding.context, t, -1);
        save->device.named_elements += u->named[i] || u->same[i] ? job->input.count : 0;
    }
    return status;
}

ckd_status device_dedup_begin(unchanged_blocks *u, ckd_save *save, const exact_span *span, ckd_error *err) {
    const tensor_context *t = span->context;
    u->span = span;
    if (!worth_a_look(save, span->tensor, t) || span->first == span->end) {
        return CKD_OK;
    }
    for (uint64_t at = span->first; at < span->end; at += save_block_length(t, at, span->end)) {
        u->count++;
    }
    u->content = calloc(u->count, sizeof(*u->content));
    u->same = calloc(u->count, sizeof(*u->same));
    u->named = calloc(u->count, sizeof(*u->named));
    u->unread = calloc(u->count, sizeof(*u->unread));
    u->rounded = block_is_master(t) ? calloc(u->count, 2 * sizeof(*u->rounded)) : NULL;
    if (!u->content || !u->same || !u->named || !u->unread || (block_is_master(t) && !u->rounded)) {
        return err_nomem(err, u->count * sizeof(*u->content), "hashes of blocks");
    }
    ckd_error why;
    u->hashed = hash_all(u, &why) == CKD_OK;
    if (!u->hashed) {
        store_message(
            save->store,
            "all of %s is copied to the host, as the device could not tell which blocks have changed: %s",
            t->tensor->name, why.message);
    }
    return u->hashed && may_be_rounded(save, t) ? name_all(u, save, err) : CKD_OK;
}

void device_dedup_free(unchanged_blocks *u) {
    if (u->content) {
        device_reader *r = u->span->tensor->read_context;
        r->end = r->elements;
    }
    free(u->content);
    free(u->same);
    free(u->named);
    free(u->rounded);
    free(u->unread);
}

bool device_dedup_next(unchanged_blocks *u, ckd_save *save, block_job *job) {
    const tensor_context *t = u->span->context;
    if (!u->content) {
        return false;
    }
    uint32_t i = u->next++;
    if (u->rounded && u->hashed) {
        job->input.precoded.rounded = true;
        job->input.precoded.bf16 = u->rounded[2 * i];
        job->input.precoded.f16 = u->rounded[2 * i + 1];
    }
    if (u->named[i]) {
        job->input.precoded.coded = true; /* nothing else is needed */
        job->input.precoded.content = u->content[i];
        save->device.has_pending_values = true;
        return true;
    }
    if (u->same[i] &&
        block_find_unchanged(job, &save->coding.context, t, &u->content[i], save->pipeline.slot_count)) {
        return true;
    }
    device_reader *r = u->span->tensor->read_context;
    uint64_t end = job->input.first + job->input.count;
    uint32_t limit = u->looked ? u->looked : u->count;
    for (i++; i < limit && !u->same[i] && !u->named[i] && !u->unread[i]; i++) {
        end += save_block_length(t, end, r->elements);
    }
    r->end = end;
    return false;
}
