/*
 * Opening a chunk file that has bundles: their records among the others, in the order in which the writer got them. Bundles are
 * small, so they are read whole; unless the file is kept in memory, their payloads are read again one by one, when they are needed.
 */
#include <stdlib.h>

#include "codec/chunk_bundle.h"
#include "codec/chunk_wire.h"

typedef struct unpacking {
    chunk *c;
    bytes payload;
    bundle_member *members; /* of all bundles */
    size_t count;
    ckd_error *err;
} unpacking;

/* Takes the members over, unless it fails. */
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

/* What is read again later must be what is read now. */
static void set_checksums(bundle_member *members, size_t count, const record *bundle,
                          const uint8_t *payload) {
    for (size_t i = 0; i < count; i++) {
        record *r = &members[i].record;
        r->checksum = hash64(payload + (r->payload_offset - bundle->payload_offset), r->stored_size);
    }
}

/* The bundle's payload, in memory until the next bundle is read. */
static ckd_status read_bundle(unpacking *u, const uint8_t **payload, const record *bundle) {
    *payload = file_kept(u->c->file, bundle->payload_offset, bundle->stored_size);
    if (*payload) {
        return CKD_OK;
    }
    void *room = bytes_scratch(&u->payload, bundle->stored_size, "a bundle", u->err);
    *payload = room;
    return room ? file_read_at(u->c->file, bundle->payload_offset, room, bundle->stored_size, u->err)
                : CKD_E_NOMEM;
}

static ckd_status unpack_one(unpacking *u, const record *bundle, uint64_t outside) {
    const char *path = file_path(u->c->file);
    const uint8_t *payload;
    ckd_status status = read_bundle(u, &payload, bundle);
    bundle_member *members = NULL;
    size_t count = 0;
    if (status == CKD_OK) {
        status = bundle_decode(&members, &count, bundle, payload, outside, &u->c->arena, path, u->err);
    }
    if (status == CKD_OK && u->count && members[0].before < u->members[u->count - 1].before) {
        status = err_corrupt(u->err, path, bundle->offset,
                             "a record of a bundle has its place before those of the bundle in front of it");
    }
    if (status == CKD_OK && !file_kept(u->c->file, bundle->payload_offset, bundle->stored_size)) {
        set_checksums(members, count, bundle, payload);
    }
    if (status == CKD_OK) {
        status = add_members(u, members, count);
    }
    if (status != CKD_OK) {
        free(members);
    }
    return status;
}

/* The records outside of bundles, with the others where they belong. */
static ckd_status merge(unpacking *u, size_t bundles) {
    chunk *c = u->c;
    size_t total = c->outer_count - bundles + u->count, at = 0, next = 0, outside = 0;
    record *records = malloc((total + 1) * sizeof(*records));
    if (!records) {
        return err_nomem(u->err, total * sizeof(*records), "records");
    }
    for (size_t i = 0; i < c->outer_count; i++) {
        if (c->outer[i].kind == RECORD_BUNDLE) {
            continue;
        }
        while (next < u->count && u->members[next].before <= outside) {
            records[at++] = u->members[next++].record;
        }
        records[at++] = c->outer[i];
        outside++;
    }
    while (next < u->count) {
        records[at++] = u->members[next++].record;
    }
    c->records = records;
    c->record_count = total;
    return CKD_OK;
}

ckd_status chunk_unpack_bundles(chunk *c, bool allowed, ckd_error *err) {
    unpacking u = {.c = c, .err = err};
    size_t bundles = 0;
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < c->outer_count && status == CKD_OK; i++) {
        const record *r = &c->outer[i];
        if (r->kind == RECORD_BUNDLE) {
            status = allowed ? unpack_one(&u, r, i - bundles)
                             : err_corrupt(err, file_path(c->file), r->offset,
                                           "a bundle in a file whose header does not say that it has any");
            bundles++;
        }
    }
    if (status == CKD_OK && bundles) {
        status = merge(&u, bundles);
    }
    free(u.members);
    bytes_free(&u.payload);
    return status;
}
