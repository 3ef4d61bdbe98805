/*
 * Notes from any bytes. In fuzz builds all checksums match. An accepted note must give the same bytes when it
 * is written again.
 */
#include <stdlib.h>

#include "codec/metadata/metadata.h"
#include "codec/parity/parity.h"
#include "tests/support/fuzz.h"

static void check_same(const bytes *again, const uint8_t *data, size_t size) {
    if (again->failed || again->size != size || memcmp(again->data, data, size - 8) != 0) {
        abort();
    }
}

static void try_manifest(const uint8_t *data, size_t size, const ckd_id *store, bytes *again) {
    manifest m;
    if (manifest_decode(&m, NULL, data, size, "fuzz", NULL) == CKD_OK) {
        manifest_encode(again, store, &m);
        check_same(again, data, size);
    }
    manifest_free(&m);
}

static void try_intent(const uint8_t *data, size_t size, const ckd_id *store, bytes *again) {
    intent in;
    if (intent_decode(&in, NULL, data, size, "fuzz", NULL) == CKD_OK) {
        intent_encode(again, store, &in);
        check_same(again, data, size);
    }
    intent_free(&in);
}

static void try_part(const uint8_t *data, size_t size, const ckd_id *store, bytes *again) {
    rank_part p;
    if (part_decode(&p, NULL, data, size, NULL) == CKD_OK) {
        part_encode(again, store, &p);
        check_same(again, data, size);
    }
    part_free(&p);
}

static void try_small(const uint8_t *data, size_t size, const ckd_id *store, bytes *again) {
    tombstone t;
    store_identity s;
    ckd_error err;
    if (tombstone_decode(&t, NULL, data, size, "fuzz", &err) == CKD_OK) {
        tombstone_encode(again, store, &t);
        check_same(again, data, size);
    }
    ckd_id mark;
    if (deletions_decode(&mark, NULL, data, size, "fuzz", &err) == CKD_OK) {
        bytes_clear(again);
        deletions_encode(again, store, &mark);
        check_same(again, data, size);
    }
    if (store_identity_decode(&s, data, size, "fuzz", &err) == CKD_OK) {
        bytes_clear(again);
        store_identity_encode(again, &s);
        check_same(again, data, size);
    }
}

static void try_kept(const uint8_t *data, size_t size, const ckd_id *store, bytes *again) {
    pin_setting p;
    tag_setting t;
    if (pin_decode(&p, NULL, data, size, "fuzz", NULL) == CKD_OK) {
        pin_encode(again, store, &p);
        check_same(again, data, size);
    }
    if (tag_decode(&t, NULL, data, size, "fuzz", NULL) == CKD_OK) {
        bytes_clear(again);
        tag_encode(again, store, &t);
        check_same(again, data, size);
    }
    policy_setting k;
    if (policy_decode(&k, NULL, data, size, "fuzz", NULL) == CKD_OK) {
        bytes_clear(again);
        policy_encode(again, store, &k);
        check_same(again, data, size);
    }
}

static void try_rename(const uint8_t *data, size_t size, const ckd_id *store, bytes *again) {
    rename_setting r;
    if (rename_decode(&r, NULL, data, size, "fuzz", NULL) == CKD_OK) {
        rename_encode(again, store, &r);
        check_same(again, data, size);
    }
}

static void try_parity(const uint8_t *data, size_t size, const ckd_id *store, bytes *again) {
    parity_setting p;
    parity_group g;
    if (parity_decode(&p, NULL, data, size, "fuzz", NULL) == CKD_OK) {
        parity_encode(again, store, &p);
        check_same(again, data, size);
    }
    if (parity_group_decode(&g, NULL, data, size, "fuzz", NULL) == CKD_OK) {
        bytes_clear(again);
        parity_group_encode(again, store, &g);
        check_same(again, data, size);
    }
    parity_group_free(&g);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static void (*const tries[])(const uint8_t *, size_t, const ckd_id *, bytes *) = {
        try_manifest, try_intent, try_part, try_small, try_kept, try_rename, try_parity};
    ckd_id store = {{0}};
    if (size >= 32) {
        memcpy(store.bytes, data + 16, 16);
    }
    for (size_t i = 0; i < sizeof(tries) / sizeof(tries[0]); i++) {
        bytes again = {0};
        tries[i](data, size, &store, &again);
        bytes_free(&again);
    }
    return 0;
}
