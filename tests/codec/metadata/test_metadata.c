/*
 * Notes: manifests, intents, parts, tombstones, the store's identity and others; and bytes that must not be
 * accepted as notes.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>

#include <cmocka.h>

#include "codec/metadata/metadata.h"
#include "tests/support/samples.h"

static const ckd_id store_id = {{0xaa, 0xbb}};

/* ---- samples of each kind, and one interface to decode them ---- */

static ckd_id sample_ids[2];
static file_ref sample_files[3];
static role_total sample_roles[2];

static manifest sample_manifest(void) {
    sample_ids[0] = sample_id(0x31);
    sample_ids[1] = sample_id(0x32);
    sample_files[0] = (file_ref){sample_id(0x41), 0, 12345, hash128_of("a", 1)};
    sample_files[1] = (file_ref){sample_id(0x42), 1, UINT64_C(1) << 40, hash128_of("b", 1)};
    /* A file of an older checkpoint. */
    sample_files[2] = (file_ref){sample_id(0x43), 1, 99, hash128_of("c", 1)};
    sample_roles[0] = (role_total){CKD_ROLE_WEIGHT, 10, 4000, 3000};
    sample_roles[1] = (role_total){CKD_ROLE_OTHER, 1, UINT64_MAX, 8};
    manifest m = {
        .checkpoint = {.id = sample_id(0x11),
                       .parent = sample_id(0x12),
                       .resumed_from = sample_id(0x13),
                       .run = "gpt2.small~2_x-7",
                       .step = INT64_MAX,
                       .generation = 3,
                       .kind = CKD_DELTA,
                       .fidelity = CKD_EXACT,
                       .lossy_resumes = 4,
                       .depth = 5,
                       .world = 2,
                       .tensors = 11,
                       .raw_bytes = UINT64_C(1) << 50,
                       .stored_bytes = 3008,
                       .load_cost = 1.25,
                       .created_ns = 1700000000000000000,
                       .metric = 3.5,
                       .metric_name = "val_loss"},
        .branch_origin = sample_id(0x14),
        .dependencies = sample_ids,
        .dependency_count = 2,
        .files = sample_files,
        .file_count = 3,
        .own_count = 2,
        .roles = sample_roles,
        .role_count = 2,
    };
    return m;
}

static intent sample_intent(void) {
    manifest m = sample_manifest();
    intent in = {.id = sample_id(0x51), .run = "run", .step = 7, .rank = 1, .world = 4};
    in.files = m.files;
    in.file_count = m.own_count;
    in.dependencies = m.dependencies;
    in.dependency_count = m.dependency_count;
    return in;
}

static rank_part sample_part(void) {
    manifest m = sample_manifest();
    rank_part p = {.checkpoint = sample_id(0x61), .rank = 3, .world = 4, .file = m.files[1]};
    p.dependencies = m.dependencies;
    p.dependency_count = 1;
    return p;
}

static const tombstone sample_tombstone = {
    .checkpoint = {{0x71}}, .run = "dead.run", .step = 12, .generation = 9, .deleted_ns = 77, .until_ns = 88};
static const pin_setting sample_pin = {
    .checkpoint = {{0x81}}, .generation = 2, .pinned_ns = 99, .reason = "for the paper, caf\xc3\xa9"};
static const tag_setting sample_tag = {
    .tag = "best-1.0", .checkpoint = {{0x82}}, .generation = 5, .tagged_ns = 111};
static const policy_setting sample_policy = {.run = "gpt",
                                             .generation = 1,
                                             .set_ns = 123,
                                             .policy = {.keep_last = 5,
                                                        .keep_every = 1000,
                                                        .keep_first = 1,
                                                        .keep_best = 3,
                                                        .highest_is_best = 1,
                                                        .keep_new_s = 86400,
                                                        .automatic = 7,
                                                        .undo_s = 3600}};
static const rename_setting sample_rename = {
    .run = "gpt", .generation = 3, .to = "gpt.2~1", .renamed_ns = 321};
static const ckd_id sample_mark = {{0x91}};
static const store_identity sample_identity = {{{0xaa, 0xbb}}, 1234567890123456789};

static bytes encode(metadata_kind kind) {
    bytes b = {0};
    manifest m = sample_manifest();
    intent in = sample_intent();
    rank_part p = sample_part();
    switch (kind) {
    case METADATA_MANIFEST:
        manifest_encode(&b, &store_id, &m);
        break;
    case METADATA_INTENT:
        intent_encode(&b, &store_id, &in);
        break;
    case METADATA_PART:
        part_encode(&b, &store_id, &p);
        break;
    case METADATA_TOMBSTONE:
        tombstone_encode(&b, &store_id, &sample_tombstone);
        break;
    case METADATA_PIN:
        pin_encode(&b, &store_id, &sample_pin);
        break;
    case METADATA_TAG:
        tag_encode(&b, &store_id, &sample_tag);
        break;
    case METADATA_POLICY:
        policy_encode(&b, &store_id, &sample_policy);
        break;
    case METADATA_RENAME:
        rename_encode(&b, &store_id, &sample_rename);
        break;
    case METADATA_DELETIONS:
        deletions_encode(&b, &store_id, &sample_mark);
        break;
    default:
        store_identity_encode(&b, &sample_identity);
    }
    assert_false(b.failed);
    return b;
}

/* Decodes a copy of the exact size, and frees the result. A failure must leave nothing in it. */
static ckd_status decode(metadata_kind kind, const bytes *b, ckd_error *err) {
    ckd_status status;
    union {
        manifest manifest;
        intent intent;
        rank_part part;
        tombstone tombstone;
        pin_setting pin;
        tag_setting tag;
        policy_setting policy;
        rename_setting rename;
        ckd_id mark;
        store_identity identity;
        char bytes[sizeof(manifest) + sizeof(intent)];
    } out = {.bytes = {0}}, zero = {.bytes = {0}};
    void *data = malloc(b->size ? b->size : 1);
    memcpy(data, b->size ? b->data : (const uint8_t *)"", b->size);
    switch (kind) {
    case METADATA_MANIFEST:
        status = manifest_decode(&out.manifest, &store_id, data, b->size, "a/note", err);
        break;
    case METADATA_INTENT:
        status = intent_decode(&out.intent, &store_id, data, b->size, "a/note", err);
        break;
    case METADATA_PART:
        status = part_decode(&out.part, &store_id, data, b->size, err);
        break;
    case METADATA_TOMBSTONE:
        status = tombstone_decode(&out.tombstone, &store_id, data, b->size, "a/note", err);
        break;
    case METADATA_PIN:
        status = pin_decode(&out.pin, &store_id, data, b->size, "a/note", err);
        break;
    case METADATA_TAG:
        status = tag_decode(&out.tag, &store_id, data, b->size, "a/note", err);
        break;
    case METADATA_POLICY:
        status = policy_decode(&out.policy, &store_id, data, b->size, "a/note", err);
        break;
    case METADATA_RENAME:
        status = rename_decode(&out.rename, &store_id, data, b->size, "a/note", err);
        break;
    case METADATA_DELETIONS:
        status = deletions_decode(&out.mark, &store_id, data, b->size, "a/note", err);
        break;
    default:
        status = store_identity_decode(&out.identity, data, b->size, "a/note", err);
    }
    if (status != CKD_OK) {
        assert_memory_equal(&out, &zero, sizeof(out));
    } else if (kind == METADATA_MANIFEST) {
        manifest_free(&out.manifest);
    } else if (kind == METADATA_INTENT) {
        intent_free(&out.intent);
    } else if (kind == METADATA_PART) {
        part_free(&out.part);
    }
    free(data);
    return status;
}

static const metadata_kind kinds[] = {METADATA_STORE,  METADATA_MANIFEST, METADATA_TOMBSTONE, METADATA_INTENT,
                                      METADATA_PART,   METADATA_PIN,      METADATA_TAG,       METADATA_POLICY,
                                      METADATA_RENAME, METADATA_DELETIONS};
#define KIND_COUNT (sizeof(kinds) / sizeof(kinds[0]))

static void reseal(bytes *b) {
    store_le32(b->data + 36, (uint32_t)(b->size - METADATA_ENVELOPE_MIN));
    store_le64(b->data + b->size - 8, hash64(b->data, b->size - 8));
}

/* ---- round trips ---- */

static void test_manifest(void **state) {
    (void)state;
    manifest m = sample_manifest(), got;
    bytes b = encode(METADATA_MANIFEST), again = {0};
    assert_int_equal(manifest_decode(&got, &store_id, b.data, b.size, "p", NULL), CKD_OK);
    const ckd_checkpoint *c = &got.checkpoint, *want = &m.checkpoint;
    assert_memory_equal(&c->id, &want->id, 16);
    assert_memory_equal(&c->parent, &want->parent, 16);
    assert_memory_equal(&c->resumed_from, &want->resumed_from, 16);
    assert_memory_equal(&got.branch_origin, &m.branch_origin, 16);
    assert_string_equal(c->run, want->run);
    assert_true(c->step == want->step && c->generation == 3 && c->kind == CKD_DELTA &&
                c->fidelity == CKD_EXACT);
    assert_true(c->lossy_resumes == 4 && c->depth == 5 && c->world == 2 && c->tensors == 11);
    assert_true(c->raw_bytes == want->raw_bytes && c->stored_bytes == want->stored_bytes);
    assert_true(c->load_cost == 1.25 && c->created_ns == want->created_ns && c->metric == 3.5);
    assert_string_equal(c->metric_name, "val_loss");
    assert_int_equal(got.dependency_count, 2);
    assert_memory_equal(got.dependencies, m.dependencies, 32);
    assert_true(got.file_count == 3 && got.own_count == 2 && !got.own_only);
    assert_memory_equal(&got.files[2].id, &m.files[2].id, 16);
    for (size_t i = 0; i < 2; i++) {
        assert_memory_equal(&got.files[i].id, &m.files[i].id, 16);
        assert_true(got.files[i].rank == m.files[i].rank && got.files[i].size == m.files[i].size);
        assert_true(hash128_equal(&got.files[i].root, &m.files[i].root));
        assert_true(got.roles[i].role == m.roles[i].role && got.roles[i].tensors == m.roles[i].tensors);
        assert_true(got.roles[i].raw_bytes == m.roles[i].raw_bytes);
        assert_true(got.roles[i].stored_bytes == m.roles[i].stored_bytes);
    }
    assert_int_equal(got.role_count, 2);
    manifest_encode(&again, &store_id, &got);
    assert_int_equal(again.size, b.size);
    assert_memory_equal(again.data, b.data, b.size);
    bytes_free(&again);
    bytes_free(&b);
    manifest_free(&got);
    assert_null(got.files);
    manifest_free(&got);
}

static void test_empty_lists_and_no_metric(void **state) {
    (void)state;
    manifest m = sample_manifest(), got;
    m.dependency_count = m.file_count = m.own_count = m.role_count = 0;
    m.checkpoint.metric = NAN;
    m.checkpoint.metric_name[0] = '\0';
    m.checkpoint.parent = (ckd_id){{0}};
    bytes b = {0};
    manifest_encode(&b, &store_id, &m);
    assert_int_equal(manifest_decode(&got, &store_id, b.data, b.size, "p", NULL), CKD_OK);
    assert_true(isnan(got.checkpoint.metric));
    assert_true(wire_id_zero(&got.checkpoint.parent));
    assert_null(got.files);
    assert_int_equal(got.file_count + got.dependency_count + got.role_count, 0);
    manifest_free(&got);
    bytes_free(&b);
}

static void test_intent(void **state) {
    (void)state;
    intent want = sample_intent(), got;
    bytes b = encode(METADATA_INTENT);
    assert_int_equal(intent_decode(&got, &store_id, b.data, b.size, "p", NULL), CKD_OK);
    assert_memory_equal(&got.id, &want.id, 16);
    assert_string_equal(got.run, want.run);
    assert_true(got.step == 7 && got.rank == 1 && got.world == 4);
    assert_int_equal(got.file_count, 2);
    assert_memory_equal(&got.files[1].id, &want.files[1].id, 16);
    assert_int_equal(got.dependency_count, 2);
    assert_memory_equal(got.dependencies, want.dependencies, 32);
    intent_free(&got);
    bytes_free(&b);
}

static void test_part_tombstone_identity(void **state) {
    (void)state;
    rank_part want = sample_part(), got;
    bytes b = encode(METADATA_PART);
    assert_int_equal(part_decode(&got, &store_id, b.data, b.size, NULL), CKD_OK);
    assert_memory_equal(&got.checkpoint, &want.checkpoint, 16);
    assert_true(got.rank == 3 && got.world == 4 && got.file.rank == 1 && got.file.size == UINT64_C(1) << 40);
    assert_true(hash128_equal(&got.file.root, &want.file.root));
    assert_int_equal(got.dependency_count, 1);
    assert_memory_equal(got.dependencies, want.dependencies, 16);
    part_free(&got);
    bytes_free(&b);

    tombstone dead;
    b = encode(METADATA_TOMBSTONE);
    assert_int_equal(tombstone_decode(&dead, &store_id, b.data, b.size, "p", NULL), CKD_OK);
    assert_memory_equal(&dead.checkpoint, &sample_tombstone.checkpoint, 16);
    assert_int_equal(dead.deleted_ns, 77);
    assert_int_equal(dead.until_ns, 88);
    assert_string_equal(dead.run, "dead.run");
    assert_true(dead.step == 12 && dead.generation == 9);
    bytes_free(&b);

    ckd_id mark;
    b = encode(METADATA_DELETIONS);
    assert_int_equal(b.size, 64);
    assert_int_equal(deletions_decode(&mark, &store_id, b.data, b.size, "p", NULL), CKD_OK);
    assert_memory_equal(&mark, &sample_mark, sizeof(mark));
    bytes_free(&b);

    store_identity identity;
    b = encode(METADATA_STORE);
    assert_int_equal(b.size, 56);
    assert_int_equal(store_identity_decode(&identity, b.data, b.size, "p", NULL), CKD_OK);
    assert_memory_equal(&identity, &sample_identity, sizeof(identity));
    bytes_free(&b);
}

static void test_pin_and_tag(void **state) {
    (void)state;
    pin_setting pin;
    bytes b = encode(METADATA_PIN);
    assert_int_equal(pin_decode(&pin, &store_id, b.data, b.size, "p", NULL), CKD_OK);
    assert_memory_equal(&pin.checkpoint, &sample_pin.checkpoint, 16);
    assert_true(pin.generation == 2 && pin.pinned_ns == 99);
    assert_string_equal(pin.reason, sample_pin.reason);
    bytes_free(&b);

    tag_setting tag;
    b = encode(METADATA_TAG);
    assert_int_equal(tag_decode(&tag, &store_id, b.data, b.size, "p", NULL), CKD_OK);
    assert_string_equal(tag.tag, "best-1.0");
    assert_memory_equal(&tag.checkpoint, &sample_tag.checkpoint, 16);
    assert_true(tag.generation == 5 && tag.tagged_ns == 111);
    bytes_free(&b);
}

/* Invalid names and reasons are refused even if the checksum is right. */
static void test_invalid_pins_and_tags(void **state) {
    (void)state;
    bytes b = {0};
    pin_setting pin = sample_pin;
    memset(pin.reason, 'x', CKD_REASON_MAX);
    pin_encode(&b, &store_id, &pin);
    assert_int_equal(decode(METADATA_PIN, &b, NULL), CKD_OK);
    pin.reason[7] = '\xff';
    bytes_clear(&b);
    pin_encode(&b, &store_id, &pin);
    assert_int_equal(decode(METADATA_PIN, &b, NULL), CKD_E_CORRUPT);
    pin = sample_pin;
    pin.checkpoint = (ckd_id){{0}};
    bytes_clear(&b);
    pin_encode(&b, &store_id, &pin);
    assert_int_equal(decode(METADATA_PIN, &b, NULL), CKD_E_CORRUPT);
    static const char *const bad[] = {"", ".x", "-x", "a/b", "a b", "caf\xc3\xa9"};
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        tag_setting tag = sample_tag;
        strcpy(tag.tag, bad[i]);
        bytes_clear(&b);
        tag_encode(&b, &store_id, &tag);
        assert_int_equal(decode(METADATA_TAG, &b, NULL), CKD_E_CORRUPT);
    }
    bytes_free(&b);
}

static void test_rename(void **state) {
    (void)state;
    rename_setting got, r = sample_rename;
    bytes b = encode(METADATA_RENAME);
    assert_int_equal(rename_decode(&got, &store_id, b.data, b.size, "p", NULL), CKD_OK);
    assert_string_equal(got.run, "gpt");
    assert_string_equal(got.to, "gpt.2~1");
    assert_true(got.generation == 3 && got.renamed_ns == 321);
    strcpy(r.to, r.run);
    bytes_clear(&b);
    rename_encode(&b, &store_id, &r);
    assert_int_equal(decode(METADATA_RENAME, &b, NULL), CKD_E_CORRUPT);
    strcpy(r.to, ".x");
    bytes_clear(&b);
    rename_encode(&b, &store_id, &r);
    assert_int_equal(decode(METADATA_RENAME, &b, NULL), CKD_E_CORRUPT);
    bytes_free(&b);
}

static void test_policy(void **state) {
    (void)state;
    policy_setting got, p = sample_policy;
    bytes b = encode(METADATA_POLICY);
    assert_int_equal(policy_decode(&got, &store_id, b.data, b.size, "p", NULL), CKD_OK);
    const ckd_policy *k = &got.policy;
    assert_string_equal(got.run, "gpt");
    assert_true(got.generation == 1 && got.set_ns == 123 && k->keep_last == 5 && k->keep_every == 1000);
    assert_true(k->keep_first == 1 && k->keep_best == 3 && k->highest_is_best == 1);
    assert_true(k->keep_new_s == 86400 && k->automatic == 7 && k->undo_s == 3600 && !k->run);
    assert_int_equal(k->struct_size, sizeof(*k));
    assert_int_equal(k->compact_share, 0);
    assert_int_equal(load_le32(b.data + 12), 0);
    size_t flags = METADATA_ENVELOPE_FRONT + 2 + 3 + 8;
    assert_int_equal(load_le32(b.data + flags), 3);
    store_le32(b.data + flags, 15); /* a rule of a later version */
    reseal(&b);
    assert_int_equal(decode(METADATA_POLICY, &b, NULL), CKD_E_UNSUPPORTED);
    static const struct {
        uint32_t share;
        ckd_status status;
    } shares[] = {{1, CKD_OK}, {99, CKD_OK}, {CKD_NO_COMPACTION, CKD_OK}, {100, CKD_E_CORRUPT}};
    for (size_t i = 0; i < sizeof(shares) / sizeof(shares[0]); i++) {
        p.policy.compact_share = shares[i].share;
        bytes_clear(&b);
        policy_encode(&b, &store_id, &p);
        assert_int_equal(load_le32(b.data + 12), 1); /* readers without this feature must not read it as 25 */
        assert_int_equal(policy_decode(&got, &store_id, b.data, b.size, "p", NULL), shares[i].status);
        assert_int_equal(got.policy.compact_share, shares[i].status == CKD_OK ? shares[i].share : 0);
    }
    store_le32(b.data + b.size - 12, 0);
    reseal(&b);
    assert_int_equal(decode(METADATA_POLICY, &b, NULL), CKD_E_CORRUPT);
    p.policy.compact_share = 0;
    p.run[0] = '\0'; /* for all runs */
    bytes_clear(&b);
    policy_encode(&b, &store_id, &p);
    assert_int_equal(decode(METADATA_POLICY, &b, NULL), CKD_OK);
    strcpy(p.run, "-");
    bytes_clear(&b);
    policy_encode(&b, &store_id, &p);
    assert_int_equal(decode(METADATA_POLICY, &b, NULL), CKD_E_CORRUPT);
    p.run[0] = '\0';
    p.policy = (ckd_policy){.keep_tagged = 1};
    bytes_clear(&b);
    policy_encode(&b, &store_id, &p);
    assert_int_equal(load_le32(b.data + 12), 0); /* no feature: readers that do not know the flag refuse it */
    assert_int_equal(policy_decode(&got, &store_id, b.data, b.size, "p", NULL), CKD_OK);
    assert_true(got.policy.keep_tagged && !got.policy.keep_first && !got.policy.keep_daily);
    static const ckd_policy periods[] = {{.keep_within_s = 1ull << 40},
                                         {.keep_daily = 7},
                                         {.keep_weekly = 8, .compact_share = 30},
                                         {.keep_monthly = 9, .keep_last = 2}};
    for (size_t i = 0; i < sizeof(periods) / sizeof(periods[0]); i++) {
        p.policy = periods[i];
        bytes_clear(&b);
        policy_encode(&b, &store_id, &p);
        assert_int_equal(load_le32(b.data + 12), p.policy.compact_share ? 3 : 2);
        assert_int_equal(policy_decode(&got, &store_id, b.data, b.size, "p", NULL), CKD_OK);
        got.policy.struct_size = 0;
        assert_memory_equal(&got.policy, &periods[i], sizeof(ckd_policy));
    }
    memset(b.data + b.size - 8 - 20, 0, 20); /* none of the rules for which the feature bit stands */
    reseal(&b);
    assert_int_equal(decode(METADATA_POLICY, &b, NULL), CKD_E_CORRUPT);
    p = (policy_setting){
        .policy = {.highest_is_best = 1, .automatic = 1, .undo_s = 1}}; /* this policy keeps nothing */
    bytes_clear(&b);
    policy_encode(&b, &store_id, &p);
    assert_int_equal(decode(METADATA_POLICY, &b, NULL), CKD_E_CORRUPT);
    bytes_free(&b);
}

/* ---- damage ---- */

static void test_every_flipped_bit_is_found(void **state) {
    (void)state;
    for (size_t k = 0; k < KIND_COUNT; k++) {
        bytes b = encode(kinds[k]);
        assert_int_equal(decode(kinds[k], &b, NULL), CKD_OK);
        for (size_t bit = 0; bit < 8 * b.size; bit++) {
            b.data[bit / 8] ^= (uint8_t)(1u << bit % 8);
            assert_int_equal(decode(kinds[k], &b, NULL), CKD_E_CORRUPT);
            b.data[bit / 8] ^= (uint8_t)(1u << bit % 8);
        }
        bytes_free(&b);
    }
}

/* Notes cut at every byte, with the old checksum and with the right one. */
static void test_every_truncation_is_found(void **state) {
    (void)state;
    for (size_t k = 0; k < KIND_COUNT; k++) {
        bytes whole = encode(kinds[k]);
        for (size_t size = 0; size < whole.size; size++) {
            ckd_error err;
            bytes cut = {0};
            bytes_put(&cut, whole.data, size);
            assert_int_equal(decode(kinds[k], &cut, &err), CKD_E_CORRUPT);
            if (size >= METADATA_ENVELOPE_MIN) {
                reseal(&cut);
                assert_int_equal(decode(kinds[k], &cut, &err), CKD_E_CORRUPT);
                assert_in_range(err.offset, METADATA_ENVELOPE_FRONT, size);
            }
            bytes_free(&cut);
        }
        bytes_free(&whole);
    }
}

/* Why a checkpoint is suspect: all bits are kept, and 0 is refused. */
static void test_suspect_manifest(void **state) {
    (void)state;
    static const uint32_t reasons[] = {1, 6, UINT32_MAX};
    for (size_t i = 0; i < 3; i++) {
        bytes b = {0};
        manifest m = sample_manifest(), got;
        m.checkpoint.suspect = reasons[i];
        manifest_encode(&b, &store_id, &m);
        assert_int_equal(load_le32(b.data + 12) & METADATA_SUSPECT, METADATA_SUSPECT);
        assert_int_equal(manifest_decode(&got, &store_id, b.data, b.size, "m", NULL), CKD_OK);
        assert_int_equal(got.checkpoint.suspect, reasons[i]);
        assert_int_equal(got.file_count, m.file_count);
        manifest_free(&got);
        store_le32(b.data + b.size - 12, 0);
        reseal(&b);
        assert_int_equal(manifest_decode(&got, &store_id, b.data, b.size, "m", NULL), CKD_E_CORRUPT);
        bytes_free(&b);
    }
}

static void test_trailing_bytes_are_refused(void **state) {
    (void)state;
    for (size_t k = 0; k < KIND_COUNT; k++) {
        bytes b = encode(kinds[k]);
        bytes_put_u8(&b, 0); /* after the checksum */
        assert_int_equal(decode(kinds[k], &b, NULL), CKD_E_CORRUPT);
        reseal(&b); /* before the checksum */
        assert_int_equal(decode(kinds[k], &b, NULL), CKD_E_CORRUPT);
        bytes_free(&b);
    }
}

/* ---- envelopes ---- */

static void test_envelope(void **state) {
    (void)state;
    for (size_t k = 0; k < KIND_COUNT; k++) {
        ckd_error err;
        bytes b = encode(kinds[k]);
        uint32_t features = load_le32(b.data + 12);
        store_le16(b.data + 8, 2); /* version */
        reseal(&b);
        assert_int_equal(decode(kinds[k], &b, &err), CKD_E_UNSUPPORTED);
        assert_int_equal(err.offset, 8);
        store_le16(b.data + 8, 1);
        for (unsigned bit = 0; bit < 32; bit++) { /* required features */
            /*
             * With the bit the note is damaged: its fidelity is exact, or it ends before older files, reasons,
             * times, options, a share or periods.
             */
            bool known = (bit <= 1 && (kinds[k] == METADATA_MANIFEST || kinds[k] == METADATA_PART ||
                                       kinds[k] == METADATA_POLICY)) ||
                         (bit == 2 && kinds[k] == METADATA_MANIFEST);
            store_le32(b.data + 12, 1u << bit);
            reseal(&b);
            assert_int_equal(decode(kinds[k], &b, &err), features == 1u << bit ? CKD_OK
                                                         : known               ? CKD_E_CORRUPT
                                                                               : CKD_E_UNSUPPORTED);
            assert_true(known || err.offset == 12);
        }
        store_le32(b.data + 12, features);
        uint16_t kind = load_le16(b.data + 10);
        for (unsigned other = 0; other < 300; other++) {
            store_le16(b.data + 10, (uint16_t)other);
            reseal(&b);
            assert_int_equal(decode(kinds[k], &b, &err), other == kind ? CKD_OK : CKD_E_UNSUPPORTED);
        }
        store_le16(b.data + 10, kind);
        store_le32(b.data + 32, 77); /* generation */
        reseal(&b);
        bool published = kind == METADATA_MANIFEST || kind == METADATA_TOMBSTONE ||
                         (kind >= METADATA_RENAME && kind != METADATA_DELETIONS);
        assert_int_equal(decode(kinds[k], &b, &err), published ? CKD_OK : CKD_E_CORRUPT);
        bytes_free(&b);
    }
}

static void test_notes_of_another_store(void **state) {
    (void)state;
    for (size_t k = 1; k < KIND_COUNT; k++) {
        ckd_error err;
        bytes b = encode(kinds[k]);
        b.data[20] ^= 1;
        reseal(&b);
        assert_int_equal(decode(kinds[k], &b, &err), CKD_E_CORRUPT);
        assert_int_equal(err.offset, 16);
        bytes_free(&b);
    }
    manifest got;
    bytes b = encode(METADATA_MANIFEST);
    assert_int_equal(manifest_decode(&got, NULL, b.data, b.size, "p", NULL), CKD_OK); /* NULL: of any store */
    manifest_free(&got);
    bytes_free(&b);
}

/* ---- fields ---- */

static ckd_status recode(const manifest *m, ckd_error *err) {
    bytes b = {0};
    manifest_encode(&b, &store_id, m);
    ckd_status status = b.failed ? CKD_E_NOMEM : decode(METADATA_MANIFEST, &b, err);
    bytes_free(&b);
    return status;
}

static void test_run_names(void **state) {
    (void)state;
    static const char *const bad[] = {"",     ".x",          "-x",  "a/b", "a b",
                                      "a\nb", "caf\xc3\xa9", "a:b", "*",   "\x7f"};
    static const char *const good[] = {"a", "_", "~", "0", "a.b-c_d~2", "Z..9"};
    manifest m = sample_manifest();
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        strcpy(m.checkpoint.run, bad[i]);
        assert_int_equal(recode(&m, NULL), CKD_E_CORRUPT);
    }
    for (size_t i = 0; i < sizeof(good) / sizeof(good[0]); i++) {
        strcpy(m.checkpoint.run, good[i]);
        assert_int_equal(recode(&m, NULL), CKD_OK);
    }
    memset(m.checkpoint.run, 'x', CKD_RUN_MAX);
    m.checkpoint.run[CKD_RUN_MAX] = '\0';
    assert_int_equal(recode(&m, NULL), CKD_OK);
    /* A name that is one byte too long for struct manifest. */
    bytes b = {0};
    manifest_encode(&b, &store_id, &m);
    bytes longer = {0};
    bytes_put(&longer, b.data, METADATA_ENVELOPE_FRONT + 64);
    bytes_put_u16(&longer, CKD_RUN_MAX + 1);
    bytes_put_u8(&longer, 'y');
    bytes_put(&longer, b.data + METADATA_ENVELOPE_FRONT + 66, b.size - METADATA_ENVELOPE_FRONT - 66);
    reseal(&longer);
    assert_int_equal(decode(METADATA_MANIFEST, &longer, NULL), CKD_E_CORRUPT);
    bytes_free(&longer);
    bytes_free(&b);
}

static void test_manifest_fields(void **state) {
    (void)state;
    ckd_error err;
    manifest m = sample_manifest();
    m.checkpoint.step = (uint64_t)INT64_MAX + 1;
    assert_int_equal(recode(&m, &err), CKD_E_CORRUPT);
    m = sample_manifest();
    m.checkpoint.id = (ckd_id){{0}};
    assert_int_equal(recode(&m, &err), CKD_E_CORRUPT);
    m = sample_manifest();
    m.files[1].id = (ckd_id){{0}};
    assert_int_equal(recode(&m, &err), CKD_E_CORRUPT);
    m = sample_manifest();
    m.dependencies[0] = (ckd_id){{0}};
    assert_int_equal(recode(&m, &err), CKD_E_CORRUPT);
    for (unsigned kind = 0; kind < 6; kind++) {
        m = sample_manifest();
        m.checkpoint.kind = (ckd_kind)kind;
        assert_int_equal(recode(&m, &err),
                         kind >= CKD_BASE && kind <= CKD_LOSSY_BASE ? CKD_OK : CKD_E_UNSUPPORTED);
    }
    m = sample_manifest();
    m.checkpoint.fidelity = (ckd_fidelity)4;
    assert_int_equal(recode(&m, &err), CKD_E_UNSUPPORTED);
    assert_string_equal(err.file, "a/note");
    m.checkpoint.fidelity = CKD_FIDELITY_DEFAULT;
    assert_int_equal(recode(&m, &err), CKD_E_UNSUPPORTED);
}

/* A reader that does not know lossy checkpoints must not take one for exact. */
static void test_lossy_manifests_require_a_feature(void **state) {
    (void)state;
    for (unsigned fidelity = CKD_EXACT; fidelity <= CKD_COARSE; fidelity++) {
        manifest m = sample_manifest(), got;
        m.checkpoint.fidelity = (ckd_fidelity)fidelity;
        bytes b = {0};
        manifest_encode(&b, &store_id, &m);
        assert_false(b.failed);
        assert_int_equal(load_le32(b.data + 12), 2 + (fidelity != CKD_EXACT));
        assert_int_equal(manifest_decode(&got, &store_id, b.data, b.size, "p", NULL), CKD_OK);
        assert_int_equal(got.checkpoint.fidelity, fidelity);
        manifest_free(&got);
        store_le32(b.data + 12, 2 + (fidelity == CKD_EXACT));
        reseal(&b);
        assert_int_equal(manifest_decode(&got, &store_id, b.data, b.size, "p", NULL), CKD_E_CORRUPT);
        bytes_free(&b);
    }
}

/* Manifests of early versions end before the older files. */
static void test_manifests_of_early_versions(void **state) {
    (void)state;
    manifest m = sample_manifest(), got;
    bytes b = {0};
    m.own_only = true;
    m.file_count = m.own_count;
    manifest_encode(&b, &store_id, &m);
    assert_int_equal(load_le32(b.data + 12), 0);
    assert_int_equal(manifest_decode(&got, &store_id, b.data, b.size, "p", NULL), CKD_OK);
    assert_true(got.own_only && got.file_count == 2 && got.own_count == 2);
    assert_int_equal(manifest_add_files(&got, sample_files, 3, NULL), CKD_OK);
    assert_true(got.file_count == 3 && got.own_count == 2);
    assert_memory_equal(&got.files[2], &sample_files[2], sizeof(file_ref));
    manifest_free(&got);
    bytes_free(&b);
    m = sample_manifest();
    m.dependency_count = 0; /* a base has no dependencies */
    m.file_count = m.own_count;
    manifest_encode(&b, &store_id, &m);
    assert_int_equal(load_le32(b.data + 12), 0);
    assert_int_equal(manifest_decode(&got, &store_id, b.data, b.size, "p", NULL), CKD_OK);
    assert_false(got.own_only);
    manifest_free(&got);
    bytes_free(&b);
    m = sample_manifest();
    m.files[2] = m.files[0];
    manifest_encode(&b, &store_id, &m);
    assert_int_equal(manifest_decode(&got, &store_id, b.data, b.size, "p", NULL), CKD_E_CORRUPT);
    bytes_free(&b);
}

/* Counts that are too large for the note must not be allocated. */
static void test_counts_too_large_for_the_note(void **state) {
    (void)state;
    manifest m = sample_manifest();
    bytes b = encode(METADATA_MANIFEST);
    size_t older = b.size - 8 - 4 - 1 * METADATA_FILE_SIZE;
    size_t roles = older - 4 - 2 * METADATA_ROLE_SIZE;
    size_t files = roles - 4 - 2 * METADATA_FILE_SIZE;
    size_t ids = files - 4 - 2 * METADATA_ID_SIZE;
    const size_t places[] = {roles, files, ids, older};
    static const uint32_t counts[] = {0, 1, 3, 4, 1000000, UINT32_MAX};
    for (size_t p = 0; p < 4; p++) {
        uint32_t right = p < 3 ? 2 : 1;
        assert_int_equal(load_le32(b.data + places[p]), right);
        for (size_t i = 0; i < sizeof(counts) / sizeof(counts[0]); i++) {
            store_le32(b.data + places[p], counts[i]);
            reseal(&b);
            assert_int_equal(decode(METADATA_MANIFEST, &b, NULL),
                             counts[i] == right ? CKD_OK : CKD_E_CORRUPT);
        }
        store_le32(b.data + places[p], right);
    }
    reseal(&b);
    assert_int_equal(decode(METADATA_MANIFEST, &b, NULL), CKD_OK);
    bytes_free(&b);
    /* A note above the limit is not written. */
    m.dependency_count = METADATA_MAX / METADATA_ID_SIZE;
    m.dependencies = calloc(m.dependency_count, sizeof(ckd_id));
    assert_non_null(m.dependencies);
    manifest_encode(&b, &store_id, &m);
    assert_true(b.failed);
    bytes_free(&b);
    free(m.dependencies);
}

/* Parts with times, parts with stages of a newer version, and parts of older ranks without times. */
static void test_times_of_a_part(void **state) {
    (void)state;
    rank_part want = sample_part(), got;
    bytes b = {0};
    want.began_ns = 1234567890123456789;
    want.stage_count = 2;
    want.stages[0] = (ckd_stage_times){.stage = CKD_STAGE_ANALYSE, .begin_ns = 5, .end_ns = 5, .bytes = 3};
    want.stages[1] =
        (ckd_stage_times){.stage = CKD_STAGE_SYNC, .end_ns = INT64_MAX, .work_ns = 4, .bytes = INT64_MAX};
    part_encode(&b, &store_id, &want);
    assert_int_equal(part_decode(&got, &store_id, b.data, b.size, NULL), CKD_OK);
    assert_int_equal(got.began_ns, want.began_ns);
    assert_int_equal(got.stage_count, 2);
    for (size_t i = 0; i < 2; i++) {
        const ckd_stage_times *x = &got.stages[i], *y = &want.stages[i];
        assert_true(x->stage == y->stage && x->begin_ns == y->begin_ns && x->end_ns == y->end_ns &&
                    x->work_ns == y->work_ns && x->bytes == y->bytes);
    }
    part_free(&got);
    want.stages[0].stage = (ckd_stage)99;
    bytes_clear(&b);
    part_encode(&b, &store_id, &want);
    assert_int_equal(part_decode(&got, &store_id, b.data, b.size, NULL), CKD_OK);
    assert_true(got.stage_count == 1 && got.stages[0].stage == CKD_STAGE_SYNC);
    part_free(&got);
    want = sample_part();
    bytes_clear(&b);
    part_encode(&b, &store_id, &want);
    assert_int_equal(load_le32(b.data + 12), 0); /* any version reads it */
    assert_int_equal(part_decode(&got, &store_id, b.data, b.size, NULL), CKD_OK);
    assert_true(got.began_ns == 0 && got.stage_count == 0);
    part_free(&got);
    bytes_free(&b);
}

static void test_options_of_a_part(void **state) {
    (void)state;
    static uint8_t options[PART_OPTIONS_MAX + 1];
    static const size_t sizes[] = {1, PART_OPTIONS_MAX, PART_OPTIONS_MAX + 1};
    for (size_t i = 0; i < sizeof(options); i++) {
        options[i] = (uint8_t)i;
    }
    for (size_t i = 0; i < 3; i++) {
        rank_part want = sample_part(), got;
        bytes b = {0};
        want.began_ns = i; /* with and without times before the options */
        want.options = options;
        want.options_size = sizes[i];
        part_encode(&b, &store_id, &want);
        assert_int_equal(b.failed, sizes[i] > PART_OPTIONS_MAX);
        if (!b.failed) {
            assert_int_equal(part_decode(&got, &store_id, b.data, b.size, NULL), CKD_OK);
            assert_int_equal(got.options_size, sizes[i]);
            assert_memory_equal(got.options, options, sizes[i]);
            part_free(&got);
            size_t at = b.size - 8 - sizes[i] - 4; /* the size of the options */
            store_le32(b.data + at, 0);
            reseal(&b);
            assert_int_equal(decode(METADATA_PART, &b, NULL), CKD_E_CORRUPT);
            store_le32(b.data + at, UINT32_MAX);
            reseal(&b);
            assert_int_equal(decode(METADATA_PART, &b, NULL), CKD_E_CORRUPT);
        }
        bytes_free(&b);
    }
}

static void test_invalid_times(void **state) {
    (void)state;
    for (int i = 0; i < 5; i++) {
        rank_part p = sample_part();
        bytes b = {0};
        p.began_ns = i == 0 ? UINT64_MAX : 1;
        p.stage_count = 1;
        p.stages[0] = (ckd_stage_times){.stage = CKD_STAGE_SYNC, .begin_ns = 1, .end_ns = 1};
        p.stages[0].begin_ns += i == 1;
        p.stages[0].work_ns = i == 2 ? UINT64_MAX : 0;
        p.stages[0].bytes = i == 3 ? UINT64_C(1) << 63 : 0;
        part_encode(&b, &store_id, &p);
        assert_int_equal(decode(METADATA_PART, &b, NULL), i < 4 ? CKD_E_CORRUPT : CKD_OK);
        bytes_free(&b);
    }
    rank_part p = sample_part();
    bytes b = {0};
    p.began_ns = 1;
    p.stage_count = PART_STAGES_MAX;
    part_encode(&b, &store_id, &p);
    assert_int_equal(decode(METADATA_PART, &b, NULL), CKD_OK); /* unknown stages are accepted */
    bytes_free(&b);
}

static void test_ranks(void **state) {
    (void)state;
    static const struct {
        uint32_t rank, world;
        ckd_status expected;
    } cases[] = {{0, 1, CKD_OK}, {3, 4, CKD_OK}, {4, 4, CKD_E_CORRUPT}, {0, 0, CKD_E_CORRUPT}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        rank_part p = sample_part();
        p.rank = cases[i].rank;
        p.world = cases[i].world;
        bytes b = {0};
        part_encode(&b, &store_id, &p);
        assert_int_equal(decode(METADATA_PART, &b, NULL), cases[i].expected);
        bytes_clear(&b);
        intent in = sample_intent();
        in.rank = cases[i].rank;
        in.world = cases[i].world;
        intent_encode(&b, &store_id, &in);
        assert_int_equal(decode(METADATA_INTENT, &b, NULL), cases[i].expected);
        bytes_free(&b);
    }
}

/* Encoders append: the bytes before stay, and are not part of the note. */
static void test_encoders_append(void **state) {
    (void)state;
    bytes b = {0}, alone = encode(METADATA_TOMBSTONE);
    bytes_put(&b, "before", 6);
    tombstone_encode(&b, &store_id, &sample_tombstone);
    assert_int_equal(b.size, 6 + alone.size);
    assert_memory_equal(b.data + 6, alone.data, alone.size);
    bytes_free(&b);
    bytes_free(&alone);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_manifest),
        cmocka_unit_test(test_empty_lists_and_no_metric),
        cmocka_unit_test(test_intent),
        cmocka_unit_test(test_part_tombstone_identity),
        cmocka_unit_test(test_times_of_a_part),
        cmocka_unit_test(test_options_of_a_part),
        cmocka_unit_test(test_invalid_times),
        cmocka_unit_test(test_pin_and_tag),
        cmocka_unit_test(test_invalid_pins_and_tags),
        cmocka_unit_test(test_rename),
        cmocka_unit_test(test_policy),
        cmocka_unit_test(test_every_flipped_bit_is_found),
        cmocka_unit_test(test_every_truncation_is_found),
        cmocka_unit_test(test_suspect_manifest),
        cmocka_unit_test(test_trailing_bytes_are_refused),
        cmocka_unit_test(test_envelope),
        cmocka_unit_test(test_notes_of_another_store),
        cmocka_unit_test(test_run_names),
        cmocka_unit_test(test_manifest_fields),
        cmocka_unit_test(test_lossy_manifests_require_a_feature),
        cmocka_unit_test(test_manifests_of_early_versions),
        cmocka_unit_test(test_counts_too_large_for_the_note),
        cmocka_unit_test(test_ranks),
        cmocka_unit_test(test_encoders_append),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
