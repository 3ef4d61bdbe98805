/* Holds back small records, with their encoded headers, until they become a bundle. */
#include <stdlib.h>

#include "codec/chunk/bundle.h"
#include "codec/chunk/wire.h"
#include "codec/chunk/record_wire.h"

#define SMALL        (1u << 12) /* bytes of payload, and of header */
#define PAYLOADS_MAX (1u << 20) /* per bundle of this writer */
#define HEADERS_MAX  (1u << 20)

bool gather_takes(const record *r, size_t header_size) {
    return r->stored_size <= SMALL && header_size <= SMALL;
}

bool gather_fits(const chunk_gathered *g, const record *r) {
    return g->count == 0 || (g->count < BUNDLE_RECORDS_MAX && g->payloads.size <= PAYLOADS_MAX - SMALL &&
                             g->headers.size <= HEADERS_MAX - SMALL &&
                             memcmp(&g->checkpoint, &r->tensor->checkpoint, sizeof(ckd_id)) == 0);
}

ckd_status gather_add(chunk_gathered *g, const record *r, const bytes *header, const void *payload,
                      uint64_t before, ckd_error *err) {
    if (ARRAY_GROW(g->before, g->capacity, g->count + 1, "gathered records", err) != CKD_OK) {
        return CKD_E_NOMEM;
    }
    bytes_put(&g->headers, header->data, header->size);
    bytes_put(&g->payloads, payload, r->stored_size);
    if (g->headers.failed || g->payloads.failed) {
        return err_nomem(err, r->stored_size, "gathered records");
    }
    g->checkpoint = r->tensor->checkpoint;
    g->before[g->count++] = before;
    return CKD_OK;
}

/* Decodes the headers again. Only NOMEM is possible, since valid records were encoded. */
static ckd_status decode_members(bundle_member *members, record_arena *arena, const chunk_gathered *g,
                                 ckd_error *err) {
    reader in = reader_of(g->headers.data, g->headers.size);
    for (size_t i = 0; i < g->count; i++) {
        const record *previous = i ? &members[i - 1].record : NULL;
        members[i].before = g->before[i];
        ckd_status status =
            record_decode(&members[i].record, &in, arena, previous, &(record_place){"", 0}, err);
        if (status != CKD_OK) {
            return status;
        }
    }
    return CKD_OK;
}

/* The other fields in the record of a bundle are empty: the payload describes itself. */
static const ckd_region whole = {.kind = CKD_REGION_WHOLE};

ckd_status gather_bundle(record *bundle, record_tensor *tensor, bytes *payload, chunk_gathered *g,
                         ckd_error *err) {
    size_t size = g->count * sizeof(bundle_member);
    bundle_member *members = bytes_scratch(&g->members, size, "a bundle", err);
    arena_clear(&g->arena);
    ckd_status status = members ? decode_members(memset(members, 0, size), &g->arena, g, err) : CKD_E_NOMEM;
    if (status == CKD_OK) {
        *tensor = (record_tensor){.name = BUNDLE_NAME, .checkpoint = g->checkpoint, .role = CKD_ROLE_OTHER};
        bundle_encode(payload, members, g->count, &g->payloads, &g->heads);
        status = payload->failed ? err_nomem(err, payload->size, "a bundle") : CKD_OK;
    }
    if (status == CKD_OK) {
        *bundle = (record){.kind = RECORD_BUNDLE,
                           .tensor = tensor,
                           .region = &whole,
                           .raw_size = payload->size,
                           .stored_size = payload->size,
                           .content = content_hash(payload->data, payload->size)};
    }
    return status;
}

void gather_clear(chunk_gathered *g) {
    bytes_reset(&g->headers);
    bytes_reset(&g->payloads);
    g->count = 0;
}

void gather_free(chunk_gathered *g) {
    bytes_free(&g->headers);
    bytes_free(&g->payloads);
    bytes_free(&g->members);
    bytes_free(&g->heads);
    arena_free(&g->arena);
    free(g->before);
    *g = (chunk_gathered){0};
}
