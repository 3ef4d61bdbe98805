/*
 * Reads the descriptions of all ranks, and refuses ranks that disagree on a tensor. Names and regions are not copied,
 * because thousands of ranks may describe the same tensors.
 */
#include "engine/ranks/plan_tensors.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void planned_free(planned_tensors *p) {
    free(p->ranks);
    free(p->items);
    free(p->slots);
    free(p->shards);
    free(p->order);
    *p = (planned_tensors){0};
}

planned_name planned_name_of(const planned_tensor *t) {
    planned_name n;
    snprintf(n.text, sizeof(n.text), "%.*s", (int)t->name_size, t->name);
    return n;
}

/* These bytes were read before, so this cannot fail. */
void planned_traits(described *out, const planned_tensor *t) {
    reader at = reader_of(t->traits, t->traits_size);
    *out = (described){.name = t->name, .name_size = t->name_size};
    description_traits(out, &at);
}

void planned_region(described *out, const planned_shard *s) {
    reader at = reader_of(s->region, SIZE_MAX / 2);
    description_region(out, &at);
}

/* ---- ranks ---- */

static ckd_status open_ranks(planned_tensors *p, const ckd_bytes *descriptions, ckd_error *err) {
    for (uint32_t i = 0; i < p->world; i++) {
        description d;
        ckd_status status = description_open(&d, &descriptions[i], err);
        if (status != CKD_OK) {
            return status;
        }
        if (d.world != p->world) {
            return err_set(err, CKD_E_INVALID, "rank %u describes a save of %u ranks, this one is of %u",
                           (unsigned)d.rank, (unsigned)d.world, (unsigned)p->world);
        }
        if (p->ranks[d.rank].world) {
            return err_set(err, CKD_E_INVALID, "two descriptions of rank %u", (unsigned)d.rank);
        }
        p->ranks[d.rank] = d;
        p->shard_count += d.count;
    }
    return p->shard_count <= UINT32_MAX ? CKD_OK
                                        : err_set(err, CKD_E_INVALID, "more than 2^32 regions in one save");
}

/* ---- names ---- */

static size_t slot_of(const planned_tensors *p, const char *name, size_t size) {
    size_t at = (size_t)hash64(name, size) & (p->slot_count - 1);
    for (; p->slots[at]; at = (at + 1) & (p->slot_count - 1)) {
        const planned_tensor *t = &p->items[p->slots[at] - 1];
        if (t->name_size == size && memcmp(t->name, name, size) == 0) {
            break;
        }
    }
    return at;
}

static ckd_status grow(planned_tensors *p, ckd_error *err) {
    size_t capacity = p->capacity ? 2 * p->capacity : 256;
    planned_tensor *items = realloc(p->items, capacity * sizeof(*items));
    p->items = items ? items : p->items;
    uint32_t *slots = calloc(2 * capacity, sizeof(*slots));
    if (!items || !slots) {
        free(slots);
        return err_nomem(err, capacity * sizeof(*items), "tensors");
    }
    free(p->slots);
    p->slots = slots;
    p->slot_count = 2 * capacity;
    p->capacity = capacity;
    for (size_t i = 0; i < p->count; i++) {
        p->slots[slot_of(p, p->items[i].name, p->items[i].name_size)] = (uint32_t)i + 1;
    }
    return CKD_OK;
}

static void traits_text(char *text, size_t size, const uint8_t *traits, size_t traits_size) {
    described d;
    reader at = reader_of(traits, traits_size);
    description_traits(&d, &at);
    size_t used = (size_t)snprintf(text, size, "%s %s [", ckd_role_name(d.role), ckd_dtype_name(d.dtype));
    for (uint32_t i = 0; i < d.shape.ndim && used < size; i++) {
        used += (size_t)snprintf(text + used, size - used, i ? ", %llu" : "%llu",
                                 (unsigned long long)d.shape.shape[i]);
    }
    if (used < size) {
        snprintf(text + used, size - used, "]");
    }
}

static ckd_status disagree(const planned_tensor *t, const described *d, uint32_t rank, ckd_error *err) {
    char first[160], second[160];
    traits_text(first, sizeof(first), t->traits, t->traits_size);
    traits_text(second, sizeof(second), d->traits, d->traits_size);
    err_set(err, CKD_E_MISMATCH,
            "to rank %u the tensor is %s, to rank %u it is %s: all ranks must give the same role, dtype and "
            "global shape",
            (unsigned)t->rank, first, (unsigned)rank, second);
    return err_in_tensor(err, CKD_E_MISMATCH, planned_name_of(t).text);
}

static ckd_status unreadable(uint32_t rank, uint32_t entry, ckd_error *err) {
    return err_set(err, CKD_E_CORRUPT, "the description of rank %u cannot be read at entry %u",
                   (unsigned)rank, (unsigned)entry);
}

/* Handles a tensor that is new, or differs from its earlier description. */
static ckd_status add_tensor(planned_tensors *p, described *d, reader *at, const planned_shard *shard,
                             ckd_error *err) {
    if (!description_traits(d, at) || !description_name_valid(d)) {
        return unreadable(shard->rank, shard->entry, err);
    }
    size_t slot = slot_of(p, d->name, d->name_size);
    if (p->slots[slot]) {
        return disagree(&p->items[p->slots[slot] - 1], d, shard->rank, err);
    }
    p->items[p->count++] = (planned_tensor){.name = d->name,
                                            .name_size = d->name_size,
                                            .ndim = (uint8_t)d->shape.ndim,
                                            .traits = d->traits,
                                            .traits_size = d->traits_size,
                                            .rank = shard->rank};
    p->slots[slot] = (uint32_t)p->count;
    return CKD_OK;
}

/* Nearly always, an earlier rank described the tensor in the same bytes. */
static ckd_status add_shard(planned_tensors *p, described *d, reader *at, planned_shard *shard,
                            ckd_error *err) {
    ckd_status status = p->count == p->capacity ? grow(p, err) : CKD_OK;
    d->name_size = reader_u16(at);
    d->name = reader_take(at, d->name_size);
    if (status != CKD_OK || at->failed) {
        return status != CKD_OK ? status : unreadable(shard->rank, shard->entry, err);
    }
    size_t slot = slot_of(p, d->name, d->name_size);
    const planned_tensor *known = p->slots[slot] ? &p->items[p->slots[slot] - 1] : NULL;
    if (known && reader_left(at) >= known->traits_size &&
        memcmp(at->data + at->at, known->traits, known->traits_size) == 0) {
        at->at += known->traits_size;
    } else {
        status = add_tensor(p, d, at, shard, err);
    }
    if (status != CKD_OK) {
        return status;
    }
    shard->tensor = p->slots[slot] - 1;
    shard->region = at->data + at->at;
    p->items[shard->tensor].count++;
    d->shape.ndim = p->items[shard->tensor].ndim;
    return description_region(d, at) ? CKD_OK : unreadable(shard->rank, shard->entry, err);
}

static ckd_status read_entries(planned_tensors *p, ckd_error *err) {
    uint64_t index = 0;
    described d = {.name = NULL};
    for (uint32_t rank = 0; rank < p->world; rank++) {
        reader at = p->ranks[rank].at;
        for (uint64_t i = 0; i < p->ranks[rank].count; i++, index++) {
            p->shards[index] = (planned_shard){.rank = rank, .entry = (uint32_t)i};
            ckd_status status = add_shard(p, &d, &at, &p->shards[index], err);
            if (status != CKD_OK) {
                return status;
            }
        }
        if (reader_left(&at) != 0) {
            return unreadable(rank, (uint32_t)p->ranks[rank].count, err);
        }
    }
    return CKD_OK;
}

static void sort_by_tensor(planned_tensors *p) {
    uint64_t first = 0;
    for (size_t i = 0; i < p->count; i++) {
        p->items[i].first = first;
        first += p->items[i].count;
        p->items[i].count = 0;
    }
    for (uint64_t i = 0; i < p->shard_count; i++) {
        planned_tensor *t = &p->items[p->shards[i].tensor];
        p->order[t->first + t->count++] = (uint32_t)i;
    }
}

ckd_status planned_read(planned_tensors *out, const ckd_bytes *descriptions, uint32_t world, ckd_error *err) {
    *out = (planned_tensors){.world = world};
    if (world == 0 || world > CKD_WORLD_MAX) {
        return err_set(err, CKD_E_INVALID, "a plan is for 1 to %d ranks", CKD_WORLD_MAX);
    }
    out->ranks = calloc(world, sizeof(*out->ranks));
    ckd_status status = out->ranks ? open_ranks(out, descriptions, err)
                                   : err_nomem(err, world * sizeof(*out->ranks), "ranks");
    if (status != CKD_OK) {
        return status;
    }
    out->shards = calloc(out->shard_count + 1, sizeof(*out->shards));
    out->order = calloc(out->shard_count + 1, sizeof(*out->order));
    if (!out->shards || !out->order) {
        return err_nomem(err, out->shard_count * sizeof(*out->shards), "regions");
    }
    status = read_entries(out, err);
    if (status == CKD_OK) {
        sort_by_tensor(out);
    }
    return status;
}
