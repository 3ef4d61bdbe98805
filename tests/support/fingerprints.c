#include "tests/support/fingerprints.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/hash.h"

static void mix(uint64_t *hash, const void *data, size_t size) {
    uint64_t both[2] = {*hash, hash64(data, size)};
    *hash = hash64(both, sizeof(both));
}

static ckd_status add_tensor_of(uint64_t *hash, ckd_load *load, const ckd_tensor_info *t, ckd_error *err) {
    uint64_t what[4] = {t->role, t->dtype, t->ndim, t->nonfinite};
    double errors[2] = {t->rel_l2, t->max_error};
    ckd_load_request q = CKD_LOAD_REQUEST_INIT;
    q.name = t->name;
    q.dtype = t->dtype;
    q.ndim = t->ndim;
    q.shape = t->shape;
    q.region.kind = CKD_REGION_WHOLE;
    q.size = t->raw_bytes;
    q.data = malloc(q.size + 1);
    assert_non_null(q.data);
    mix(hash, t->name, strlen(t->name));
    mix(hash, what, sizeof(what));
    mix(hash, t->shape, t->ndim * sizeof(uint64_t));
    mix(hash, errors, sizeof(errors));
    ckd_status status = ckd_load_tensor(load, &q, err);
    if (status == CKD_OK) {
        mix(hash, q.data, q.size);
    }
    free(q.data);
    return status;
}

ckd_status fingerprint_of(fingerprint *out, ckd_store *store, const ckd_checkpoint *c, ckd_error *err) {
    ckd_load *load;
    *out = (fingerprint){.checkpoint = c->id};
    snprintf(out->name, sizeof(out->name), "%s@%llu", c->run, (unsigned long long)c->step);
    ckd_status status = ckd_load_begin(&load, store, &c->id, err);
    if (status != CKD_OK) {
        return status;
    }
    const ckd_tensor_list *tensors = ckd_load_tensors(load);
    for (size_t i = 0; i < tensors->count && status == CKD_OK; i++) {
        status = add_tensor_of(&out->hash, load, &tensors->items[i], err);
    }
    ckd_load_end(load);
    return status;
}

fingerprints fingerprints_of(ckd_store *store) {
    ckd_checkpoint_list *list;
    assert_int_equal(ckd_store_list(&list, store, NULL, NULL), CKD_OK);
    fingerprints f = {calloc(list->count + 1, sizeof(fingerprint)), list->count};
    assert_non_null(f.items);
    for (size_t i = 0; i < list->count; i++) {
        ckd_error err = {0};
        if (fingerprint_of(&f.items[i], store, &list->items[i], &err) != CKD_OK) {
            fail_msg("%s does not load: %s (%s)", f.items[i].name, err.message, err.file);
        }
    }
    ckd_checkpoint_list_free(list);
    return f;
}

void fingerprints_free(fingerprints *f) {
    free(f->items);
    *f = (fingerprints){NULL, 0};
}

size_t fingerprints_check(ckd_store *store, const fingerprints *before) {
    fingerprints now = fingerprints_of(store);
    for (size_t i = 0; i < now.count; i++) {
        size_t k = 0;
        while (k < before->count &&
               memcmp(&before->items[k].checkpoint, &now.items[i].checkpoint, sizeof(ckd_id)) != 0) {
            k++;
        }
        if (k == before->count || before->items[k].hash != now.items[i].hash ||
            strcmp(before->items[k].name, now.items[i].name) != 0) {
            fail_msg("%s is not what it was", now.items[i].name);
        }
    }
    size_t count = now.count;
    fingerprints_free(&now);
    return count;
}
