/* Settings: pins, tags, policies, parity, renames. codec/FORMAT.md, "Pin" to "Rename". */
#include <string.h>

#include "codec/common/common.h"
#include "codec/metadata/metadata.h"

void pin_encode(bytes *to, const ckd_id *store, const pin_setting *p) {
    size_t start = metadata_begin(to, METADATA_PIN, store, p->generation, 0);
    wire_put_id(to, &p->checkpoint);
    bytes_put_u64(to, p->pinned_ns);
    bytes_put_string(to, p->reason);
    metadata_end(to, start);
}

ckd_status pin_decode(pin_setting *out, const ckd_id *store, const void *data, size_t size, const char *path,
                      ckd_error *err) {
    metadata_reader n = metadata_open(METADATA_PIN, store, data, size, path, err);
    *out = (pin_setting){0};
    out->generation = n.generation;
    out->checkpoint = metadata_take_id(&n);
    out->pinned_ns = reader_u64(&n.in);
    reader_string(&n.in, out->reason, sizeof(out->reason));
    return metadata_close(&n, out, sizeof(*out));
}

void tag_encode(bytes *to, const ckd_id *store, const tag_setting *t) {
    size_t start = metadata_begin(to, METADATA_TAG, store, t->generation, 0);
    bytes_put_string(to, t->tag);
    wire_put_id(to, &t->checkpoint);
    bytes_put_u64(to, t->tagged_ns);
    metadata_end(to, start);
}

ckd_status tag_decode(tag_setting *out, const ckd_id *store, const void *data, size_t size, const char *path,
                      ckd_error *err) {
    metadata_reader n = metadata_open(METADATA_TAG, store, data, size, path, err);
    *out = (tag_setting){0};
    out->generation = n.generation;
    metadata_take_tag(&n, out->tag);
    out->checkpoint = metadata_take_id(&n);
    out->tagged_ns = reader_u64(&n.in);
    return metadata_close(&n, out, sizeof(*out));
}

enum { POLICY_FIRST = 1, POLICY_HIGHEST = 2, POLICY_TAGGED = 4, POLICY_FLAGS = 7 };

static bool keeps_by_calendar(const ckd_policy *p) {
    return p->keep_within_s || p->keep_daily || p->keep_weekly || p->keep_monthly;
}

bool policy_keeps(const ckd_policy *p) {
    return p->keep_first || p->keep_last || p->keep_best || p->keep_every || p->keep_new_s ||
           p->keep_tagged || keeps_by_calendar(p);
}

void policy_encode(bytes *to, const ckd_id *store, const policy_setting *p) {
    const ckd_policy *k = &p->policy;
    bool by_calendar = keeps_by_calendar(k);
    uint32_t features = (k->compact_share ? METADATA_COMPACTION : 0) | (by_calendar ? METADATA_CALENDAR : 0);
    size_t start = metadata_begin(to, METADATA_POLICY, store, p->generation, features);
    bytes_put_string(to, p->run);
    bytes_put_u64(to, p->set_ns);
    bytes_put_u32(to, (k->keep_first ? POLICY_FIRST : 0) | (k->highest_is_best ? POLICY_HIGHEST : 0) |
                          (k->keep_tagged ? POLICY_TAGGED : 0));
    bytes_put_u32(to, k->keep_last);
    bytes_put_u32(to, k->keep_best);
    bytes_put_u64(to, k->keep_every);
    bytes_put_u64(to, k->keep_new_s);
    bytes_put_u32(to, k->automatic);
    bytes_put_u64(to, k->undo_s);
    if (k->compact_share) {
        bytes_put_u32(to, k->compact_share);
    }
    if (by_calendar) {
        bytes_put_u64(to, k->keep_within_s);
        bytes_put_u32(to, k->keep_daily);
        bytes_put_u32(to, k->keep_weekly);
        bytes_put_u32(to, k->keep_monthly);
    }
    metadata_end(to, start);
}

static void take_policy(metadata_reader *n, ckd_policy *k) {
    uint32_t flags = reader_u32(&n->in);
    if (flags & ~(uint32_t)POLICY_FLAGS) {
        metadata_fail(n, CKD_E_UNSUPPORTED, "the policy has rules that this version does not know");
    }
    *k = (ckd_policy){.struct_size = sizeof(*k),
                      .keep_first = (flags & POLICY_FIRST) != 0,
                      .keep_tagged = (flags & POLICY_TAGGED) != 0,
                      .highest_is_best = (flags & POLICY_HIGHEST) != 0};
    k->keep_last = reader_u32(&n->in);
    k->keep_best = reader_u32(&n->in);
    k->keep_every = reader_u64(&n->in);
    k->keep_new_s = reader_u64(&n->in);
    k->automatic = reader_u32(&n->in);
    k->undo_s = reader_u64(&n->in);
    k->compact_share = n->features & METADATA_COMPACTION ? reader_u32(&n->in) : 0;
    bool possible = k->compact_share < 100 || k->compact_share == CKD_NO_COMPACTION;
    if (n->features & METADATA_COMPACTION && !n->in.failed && (!possible || !k->compact_share)) {
        metadata_fail(n, CKD_E_CORRUPT, "the policy has an impossible share of dead bytes");
    }
    if (n->features & METADATA_CALENDAR) {
        k->keep_within_s = reader_u64(&n->in);
        k->keep_daily = reader_u32(&n->in);
        k->keep_weekly = reader_u32(&n->in);
        k->keep_monthly = reader_u32(&n->in);
        if (!n->in.failed && !keeps_by_calendar(k)) {
            metadata_fail(n, CKD_E_CORRUPT, "the policy declares rules about periods, but has none");
        }
    }
    if (!n->in.failed && !policy_keeps(k)) {
        metadata_fail(n, CKD_E_CORRUPT, "the policy keeps nothing");
    }
}

ckd_status policy_decode(policy_setting *out, const ckd_id *store, const void *data, size_t size,
                         const char *path, ckd_error *err) {
    metadata_reader n = metadata_open(METADATA_POLICY, store, data, size, path, err);
    *out = (policy_setting){.generation = 0};
    out->generation = n.generation;
    metadata_take_any_run(&n, out->run);
    out->set_ns = reader_u64(&n.in);
    take_policy(&n, &out->policy);
    return metadata_close(&n, out, sizeof(*out));
}

void parity_encode(bytes *to, const ckd_id *store, const parity_setting *p) {
    size_t start = metadata_begin(to, METADATA_PARITY, store, p->generation, 0);
    bytes_put_string(to, p->run);
    bytes_put_u64(to, p->set_ns);
    bytes_put_u32(to, p->data);
    bytes_put_u32(to, p->parity);
    metadata_end(to, start);
}

ckd_status parity_decode(parity_setting *out, const ckd_id *store, const void *data, size_t size,
                         const char *path, ckd_error *err) {
    metadata_reader n = metadata_open(METADATA_PARITY, store, data, size, path, err);
    *out = (parity_setting){.generation = 0};
    out->generation = n.generation;
    metadata_take_any_run(&n, out->run);
    out->set_ns = reader_u64(&n.in);
    out->data = reader_u32(&n.in);
    out->parity = reader_u32(&n.in);
    bool unset = out->data == 0 && out->parity == 0;
    bool valid =
        out->data && out->parity && out->data <= ERASURE_DATA_MAX && out->parity <= ERASURE_PARITY_MAX;
    if (!n.in.failed && !unset && !valid) {
        metadata_fail(&n, CKD_E_CORRUPT, "a parity setting has impossible numbers of files");
    }
    return metadata_close(&n, out, sizeof(*out));
}

void rename_encode(bytes *to, const ckd_id *store, const rename_setting *r) {
    size_t start = metadata_begin(to, METADATA_RENAME, store, r->generation, 0);
    bytes_put_string(to, r->run);
    bytes_put_string(to, r->to);
    bytes_put_u64(to, r->renamed_ns);
    metadata_end(to, start);
}

ckd_status rename_decode(rename_setting *out, const ckd_id *store, const void *data, size_t size,
                         const char *path, ckd_error *err) {
    metadata_reader n = metadata_open(METADATA_RENAME, store, data, size, path, err);
    *out = (rename_setting){.generation = 0};
    out->generation = n.generation;
    metadata_take_run(&n, out->run);
    metadata_take_run(&n, out->to);
    out->renamed_ns = reader_u64(&n.in);
    if (!n.in.failed && strcmp(out->run, out->to) == 0) {
        metadata_fail(&n, CKD_E_CORRUPT, "a run is renamed to the name that it already has");
    }
    return metadata_close(&n, out, sizeof(*out));
}
