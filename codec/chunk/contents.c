/*
 * Collects the records of one checkpoint in a chunk file, direct ones and members of bundles, in the order of their
 * appends. If a file holds several checkpoints, only bundles of the requested ones are unpacked. Bundles are small, so
 * each is read whole. Unless the file is kept in memory, payloads are read again one by one when needed.
 */
#include <stdlib.h>

#include "codec/chunk/bundle.h"
#include "codec/chunk/wire.h"

typedef struct unpacking {
    chunk *c;
    const ckd_id *checkpoint; /* NULL: all */
    bytes payload;
    bundle_member *members; /* of all bundles read */
    size_t count;
    ckd_error *err;
} unpacking;

/* Takes ownership of the members, unless it fails. */
static ckd_status add_members(unpacking *u, bundle_member *members, size_t count) {
    if (!u->members) {
        u->members = members;
        u->count = count;
        return CKD_OK;
    }
    bundle_member *all = realloc(u->members, (u->count + count) * sizeof(*all));
    if (!all) {
        return err_nomem(u->err, (u->count + count) * sizeof(*all), "the records of bundles");
    }
    u->members = all;
    memcpy(&all[u->count], members, count * sizeof(*all));
    u->count += count;
    free(members);
    return CKD_OK;
}

/* Computes checksums, so that later changes of the payloads are detected. */
static void set_checksums(bundle_member *members, size_t count, const record *bundle,
                          const uint8_t *payload) {
    for (size_t i = 0; i < count; i++) {
        record *r = &members[i].record;
        r->checksum = hash64(payload + (r->payload_offset - bundle->payload_offset), r->stored_size);
    }
}

/* Reads the payload of a bundle. It is valid until the next bundle is read. */
static ckd_status read_bundle(unpacking *u, const uint8_t **payload, const record *bundle) {
    *payload = file_cached(u->c->file, bundle->payload_offset, bundle->stored_size);
    if (*payload) {
        return CKD_OK;
    }
    void *memory = bytes_scratch(&u->payload, bundle->stored_size, "a bundle", u->err);
    *payload = memory;
    return memory ? file_read_at(u->c->file, bundle->payload_offset, memory, bundle->stored_size, u->err)
                  : CKD_E_NOMEM;
}

static ckd_status unpack_one(unpacking *u, const record *bundle, uint64_t outside) {
    const char *path = file_path(u->c->file);
    const uint8_t *payload;
    ckd_status status = read_bundle(u, &payload, bundle);
    bundle_member *members = NULL;
    size_t count = 0;
    THEN(status, bundle_decode(&members, &count, &(bundle_source){bundle, payload, outside, path},
                               &u->c->arena, u->err));
    for (size_t i = 0; i < count && status == CKD_OK; i++) {
        status = chunk_check_rows(u->c, &members[i].record, u->err);
    }
    if (status == CKD_OK && u->count && members[0].before < u->members[u->count - 1].before) {
        status = err_corrupt(u->err, path, bundle->offset,
                             "a record of a bundle is placed before those of the previous bundle");
    }
    if (status == CKD_OK && !file_cached(u->c->file, bundle->payload_offset, bundle->stored_size)) {
        set_checksums(members, count, bundle, payload);
    }
    THEN(status, add_members(u, members, count));
    if (status != CKD_OK) {
        free(members);
    }
    return status;
}

static bool is_wanted(const unpacking *u, const record *r) {
    return !u->checkpoint || memcmp(&r->tensor->checkpoint, u->checkpoint, sizeof(ckd_id)) == 0;
}

/* Merges the unbundled records and the members in the order of their appends. */
static ckd_status merge(const unpacking *u, chunk_records *out) {
    const chunk *c = u->c;
    size_t capacity = c->outer_count + u->count, at = 0, next = 0, outside = 0;
    record *records = malloc((capacity + 1) * sizeof(*records));
    if (!records) {
        return err_nomem(u->err, capacity * sizeof(*records), "records");
    }
    for (size_t i = 0; i < c->outer_count; i++) {
        if (c->outer[i].kind == RECORD_BUNDLE) {
            continue;
        }
        while (next < u->count && u->members[next].before <= outside) {
            records[at++] = u->members[next++].record;
        }
        if (is_wanted(u, &c->outer[i])) {
            records[at++] = c->outer[i];
        }
        outside++;
    }
    while (next < u->count) {
        records[at++] = u->members[next++].record;
    }
    *out = (chunk_records){records, at};
    return CKD_OK;
}

static ckd_status unpack(unpacking *u, chunk_records *out) {
    const chunk *c = u->c;
    size_t bundles = 0, selected_count = 0;
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < c->outer_count && status == CKD_OK; i++) {
        const record *r = &c->outer[i];
        bool selected = is_wanted(u, r);
        selected_count += selected;
        if (r->kind == RECORD_BUNDLE) {
            status = selected ? unpack_one(u, r, i - bundles) : CKD_OK;
            bundles++;
        }
    }
    if (status == CKD_OK && !bundles && selected_count == c->outer_count) {
        *out = (chunk_records){c->outer, c->outer_count};
        return CKD_OK;
    }
    return status == CKD_OK ? merge(u, out) : status;
}

ckd_status chunk_records_of(const chunk_records **out, chunk *c, const ckd_id *checkpoint, ckd_error *err) {
    ckd_id key = checkpoint ? *checkpoint : (ckd_id){{0}};
    chunk_unpacked *p = c->parts;
    *out = NULL;
    while (p && memcmp(&p->checkpoint, &key, sizeof(key)) != 0) {
        p = p->next;
    }
    if (!p) {
        p = calloc(1, sizeof(*p));
        if (!p) {
            return err_nomem(err, sizeof(*p), "records");
        }
        unpacking u = {.c = c, .checkpoint = checkpoint, .err = err};
        ckd_status status = unpack(&u, &p->part);
        free(u.members);
        bytes_free(&u.payload);
        if (status != CKD_OK) {
            free(p);
            return status;
        }
        p->checkpoint = key;
        p->next = c->parts;
        c->parts = p;
    }
    *out = &p->part;
    return CKD_OK;
}

void chunk_records_free(chunk *c) {
    while (c->parts) {
        chunk_unpacked *p = c->parts;
        c->parts = p->next;
        if (p->part.records != c->outer) {
            free((void *)p->part.records);
        }
        free(p);
    }
}
