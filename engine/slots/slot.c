/* The memory of a slot: a head, optimizers, hashes, values. One process writes it, others read copies. */
#include "engine/slots/slots.h"

#include <stdlib.h>

#include "base/hash.h"

#define MAGIC   UINT64_C(0x31746f6c73646b63) /* "ckdslot1" */
#define VERSION 3u

enum { SLOT_EMPTY = 0, SLOT_GOOD = 1 };

typedef struct slot_head {
    uint64_t magic;
    uint32_t version;
    _Atomic uint32_t state;
    _Atomic uint32_t busy;
    _Atomic uint32_t doubted; /* in_doubt is set */
    ckd_id in_doubt;
    uint64_t hash; /* head_hash */
    slot_request request;
} slot_head;
_Static_assert(sizeof(slot_head) <= 8192, "layout.c has this much room for the head");

static slot_head *head_of(const shared_slot *s) {
    return (slot_head *)(void *)s->memory.at;
}

uint8_t *slot_data(const shared_slot *s) {
    return s->memory.at + s->layout->data_at;
}

/* Hashes the layout, the request, the optimizers and the hashes of the values. */
static uint64_t head_hash(const slot_layout *l, const slot_content *c) {
    uint64_t parts[] = {hash64(l->encoded.data, l->encoded.size), hash64(&c->request, sizeof(c->request)),
                        hash64(c->optimizers, l->count * sizeof(*c->optimizers)),
                        hash64(c->hashes, (size_t)l->pages * sizeof(*c->hashes))};
    return hash64(parts, sizeof(parts));
}

static void hash_pages(uint64_t *hashes, const slot_item *item, const uint8_t *data) {
    for (uint64_t at = 0; at < item->bytes; at += SLOT_PAGE) {
        uint64_t rest = item->bytes - at;
        *hashes++ = hash64(data + at, (size_t)(rest < SLOT_PAGE ? rest : SLOT_PAGE));
    }
}

void slot_begin(shared_slot *s) {
    atomic_store_explicit(&head_of(s)->state, SLOT_EMPTY, memory_order_relaxed);
    atomic_thread_fence(memory_order_seq_cst); /* no later write becomes visible before this one */
}

void slot_set_busy(shared_slot *s, bool busy) {
    atomic_store_explicit(&head_of(s)->busy, busy, memory_order_relaxed);
}

bool slot_is_busy(const shared_slot *s) {
    return atomic_load_explicit(&head_of(s)->busy, memory_order_relaxed) == 1;
}

void slot_doubt(shared_slot *s, const ckd_id *checkpoint) {
    slot_head *head = head_of(s);
    atomic_store_explicit(&head->doubted, 0, memory_order_seq_cst);
    head->in_doubt = *checkpoint;
    atomic_store_explicit(&head->doubted, 1, memory_order_release);
}

bool slot_doubts(const shared_slot *s, const ckd_id *checkpoint) {
    const slot_head *head = head_of(s);
    return atomic_load_explicit(&head->doubted, memory_order_acquire) == 1 &&
           id_equal(&head->in_doubt, checkpoint);
}

void slot_publish(shared_slot *s, const slot_request *request, const ckd_optimizer *optimizers) {
    const slot_layout *l = s->layout;
    slot_head *head = head_of(s);
    slot_content c = {.optimizers = (ckd_optimizer *)(void *)(s->memory.at + l->optimizers_at),
                      .hashes = (uint64_t *)(void *)(s->memory.at + l->hashes_at)};
    if (optimizers) {
        memcpy(c.optimizers, optimizers, l->count * sizeof(*optimizers));
    } else {
        memset(c.optimizers, 0, l->count * sizeof(*c.optimizers));
    }
    for (size_t i = 0; i < l->count; i++) {
        hash_pages(c.hashes + l->items[i].page, &l->items[i], slot_data(s) + l->items[i].place);
    }
    memcpy(&c.request, request, sizeof(c.request)); /* with its padding, which the hash covers */
    memcpy(&head->request, request, sizeof(head->request));
    head->magic = MAGIC;
    head->version = VERSION;
    head->hash = head_hash(l, &c);
    atomic_store_explicit(&head->state, SLOT_GOOD, memory_order_release);
}

void slot_content_free(slot_content *c) {
    free(c->optimizers);
    free(c->hashes);
    c->optimizers = NULL;
    c->hashes = NULL;
}

static void end_strings(slot_request *r) {
    r->run[sizeof(r->run) - 1] = r->parent_run[sizeof(r->parent_run) - 1] = '\0';
    r->resumed_run[sizeof(r->resumed_run) - 1] = r->metric_name[sizeof(r->metric_name) - 1] = '\0';
    r->launch_run[sizeof(r->launch_run) - 1] = '\0';
}

ckd_status slot_read(slot_content *out, const shared_slot *s, ckd_error *err) {
    const slot_layout *l = s->layout;
    const slot_head *head = head_of(s);
    *out = (slot_content){.hashes = NULL};
    if (atomic_load_explicit(&head->state, memory_order_acquire) != SLOT_GOOD) {
        return err_set(err, CKD_E_NOT_FOUND, "the slot holds no complete state");
    }
    out->optimizers = calloc(l->count + 1, sizeof(*out->optimizers));
    out->hashes = calloc((size_t)l->pages + 1, sizeof(*out->hashes));
    if (!out->optimizers || !out->hashes) {
        slot_content_free(out);
        return err_nomem(err, (size_t)l->pages * sizeof(*out->hashes), "the hashes of a slot");
    }
    memcpy(&out->request, &head->request, sizeof(out->request));
    memcpy(out->optimizers, s->memory.at + l->optimizers_at, l->count * sizeof(*out->optimizers));
    memcpy(out->hashes, s->memory.at + l->hashes_at, (size_t)l->pages * sizeof(*out->hashes));
    if (head->magic != MAGIC || head->version != VERSION || head->hash != head_hash(l, out)) {
        slot_content_free(out);
        return err_set(err, CKD_E_CORRUPT, "the head of the state in memory is damaged");
    }
    end_strings(&out->request);
    return CKD_OK;
}

static ckd_status damaged(const slot_item *item, ckd_error *err) {
    err_set(err, CKD_E_CORRUPT, "the values in memory are damaged: they do not have their hash");
    return err_in_tensor(err, CKD_E_CORRUPT, item->tensor.name);
}

ckd_status slot_verify(const shared_slot *s, const slot_content *c, ckd_error *err) {
    for (size_t i = 0; i < s->layout->count; i++) {
        const slot_item *item = &s->layout->items[i];
        const uint8_t *data = slot_data(s) + item->place;
        const uint64_t *hashes = c->hashes + item->page;
        for (uint64_t at = 0; at < item->bytes; at += SLOT_PAGE) {
            uint64_t rest = item->bytes - at;
            if (hash64(data + at, (size_t)(rest < SLOT_PAGE ? rest : SLOT_PAGE)) != *hashes++) {
                return damaged(item, err);
            }
        }
    }
    return CKD_OK;
}

ckd_status slot_copy_item(void *to, const shared_slot *s, const slot_content *c, const slot_item *item,
                          ckd_error *err) {
    const uint8_t *data = slot_data(s) + item->place;
    const uint64_t *hashes = c->hashes + item->page;
    for (uint64_t at = 0; at < item->bytes; at += SLOT_PAGE) {
        uint64_t rest = item->bytes - at;
        size_t size = (size_t)(rest < SLOT_PAGE ? rest : SLOT_PAGE);
        memcpy((uint8_t *)to + at, data + at, size);
        if (hash64((uint8_t *)to + at, size) != *hashes++) {
            return damaged(item, err);
        }
    }
    return CKD_OK;
}
