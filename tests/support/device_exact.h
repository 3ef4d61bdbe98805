/*
 * Exact tensors on a device, for tests. They are saved from the device and from host memory, and the stored
 * blocks are compared. Each file that includes this has its own backend, which its main sets.
 */
#ifndef TESTS_SUPPORT_DEVICE_EXACT_H
#define TESTS_SUPPORT_DEVICE_EXACT_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "engine/save/save.h"
#include "kernels/device_open.h"
#include "tests/support/checkpoints.h"
#include "tests/support/emulated_device.h"

static const ckd_device on_device = CKD_DEVICE_INIT;
static const device_backend *backend;
static device_failure why;

/* ---- tensors ---- */

enum { BLOCK = CKD_BLOCK_ELEMENTS };

typedef struct tensor {
    const char *name;
    ckd_dtype dtype;
    uint32_t ndim;
    uint64_t shape[2], shift; /* shift: elements between the beginning of the allocation and the tensor */
    uint64_t elements;
    float *exact;
    void *host, *device;
} tensor;

static uint64_t size_of(const tensor *t) {
    return t->elements * ckd_dtype_size(t->dtype);
}

/* Copies the tensor to the device. The calls of this function do not count for emulated_fail_after. */
static void give(tensor *t) {
    int fail_after = emulated_fail_after;
    device_queue queue = {.device = 0};
    uint64_t shift = t->shift * ckd_dtype_size(t->dtype);
    emulated_fail_after = 0;
    backend->release(0, t->device);
    assert_int_equal(backend->allocate(&t->device, 0, size_of(t) + shift + 1, &why), DEVICE_DONE);
    assert_int_equal(
        backend->copy(&queue, (uint8_t *)t->device + shift, t->host, size_of(t), DEVICE_TO_DEVICE, &why),
        DEVICE_DONE);
    assert_int_equal(backend->finish(&queue, &why), DEVICE_DONE);
    emulated_fail_after = fail_after;
}

static void round_all(tensor *t) {
    if (t->dtype == CKD_F32) {
        memcpy(t->host, t->exact, size_of(t));
    } else {
        kernels_cpu()->cast(t->dtype, t->host, CKD_F32, t->exact, t->elements);
    }
    give(t);
}

/* ---- saving ---- */

static ckd_status save_some(ckd_checkpoint *out, ckd_store *store, const ckd_save_options *o, const tensor *t,
                            unsigned count, bool device) {
    ckd_error err;
    ckd_save *save = begin_with(store, o);
    for (unsigned i = 0; i < count; i++) {
        ckd_tensor d = CKD_TENSOR_INIT;
        d.name = t[i].name;
        d.dtype = t[i].dtype;
        d.ndim = t[i].ndim;
        d.shape = t[i].shape;
        d.data = device ? (uint8_t *)t[i].device + t[i].shift * ckd_dtype_size(t[i].dtype) : t[i].host;
        d.device = device ? &on_device : NULL;
        ckd_status status = ckd_save_tensor(save, &d, &err);
        if (status != CKD_OK) {
            ckd_save_abort(save);
            return status;
        }
    }
    return ckd_save_commit(out, save, &err);
}

/* newest: the load cost of the newest checkpoint in base loads. With 1000 no materialized copies are made. */
static ckd_save_options exact_options(const char *run, uint64_t step, double newest) {
    ckd_save_options o = options_of(run, step);
    o.fidelity = CKD_EXACT;
    o.max_load_cost = 1000;
    o.newest_load_cost = newest;
    return o;
}

static void loads_as(ckd_store *store, const char *run, uint64_t step, const tensor *t, unsigned count) {
    for (unsigned i = 0; i < count; i++) {
        void *got = load_whole(store, run, step, t[i].name, size_of(&t[i]));
        assert_memory_equal(got, t[i].host, size_of(&t[i]));
        free(got);
    }
}

static void same_payload(const chunk *a, const record *x, const chunk *b, const record *y) {
    assert_int_equal(x->stored_size, y->stored_size);
    uint8_t *p = malloc(x->stored_size + 1), *q = malloc(x->stored_size + 1);
    assert_true(p && q);
    assert_int_equal(chunk_read_payload(a, x, p, NULL), CKD_OK);
    assert_int_equal(chunk_read_payload(b, y, q, NULL), CKD_OK);
    assert_memory_equal(p, q, x->stored_size);
    free(p);
    free(q);
}

static void same_block(const view_block *a, const view_block *b) {
    const record *x = a->record, *y = b->record;
    assert_int_equal(x->coding, y->coding);
    assert_int_equal(x->predictor, y->predictor);
    assert_true(x->first == y->first && x->count == y->count && x->depth == y->depth);
    assert_true(x->chain_stored == y->chain_stored && x->chain_work == y->chain_work);
    /* For a small block the host computes the standalone size, and the device takes that of the parent. */
    uint64_t off = x->count < 16384 && x->predictor == PREDICT_PARENT ? x->base_stored / 100 : 0;
    assert_in_range(y->base_stored, x->base_stored - off, x->base_stored + off);
    assert_true(hash128_equal(&x->content, &y->content));
    same_payload(a->chunk, x, b->chunk, y);
    assert_true(!a->materialized == !b->materialized);
    if (a->materialized) {
        assert_int_equal(a->materialized->coding, b->materialized->coding);
        same_payload(a->materialized_chunk, a->materialized, b->materialized_chunk, b->materialized);
    }
}

/*
 * Counts of deltas and standalone blocks that were coded as symbols, of rounded masters, and the bytes of all
 * payloads with those of materialized copies.
 */
typedef struct stored_payloads {
    unsigned deltas, alone, rounded;
    uint64_t bytes;
} stored_payloads;

/* Compares two checkpoints block by block, materialized copies included. */
static stored_payloads stored_alike(ckd_store *store, const ckd_checkpoint *a, const ckd_checkpoint *b) {
    view_cache views;
    const view *v[2];
    stored_payloads all = {0, 0, 0, 0};
    views_init(&views, store);
    assert_int_equal(views_get(&v[0], &views, &a->id, NULL), CKD_OK);
    assert_int_equal(views_get(&v[1], &views, &b->id, NULL), CKD_OK);
    assert_int_equal(v[0]->tensor_count, v[1]->tensor_count);
    for (size_t i = 0; i < v[0]->tensor_count; i++) {
        const view_tensor *x = &v[0]->tensors[i], *y = &v[1]->tensors[i];
        assert_string_equal(x->tensor->name, y->tensor->name);
        assert_int_equal(x->shard_count, y->shard_count);
        for (size_t s = 0; s < x->shard_count; s++) {
            assert_int_equal(x->shards[s].block_count, y->shards[s].block_count);
            for (size_t k = 0; k < x->shards[s].block_count; k++) {
                same_block(&x->shards[s].blocks[k], &y->shards[s].blocks[k]);
                const record *r = x->shards[s].blocks[k].record;
                const record *ready = x->shards[s].blocks[k].materialized;
                all.deltas += r->predictor == PREDICT_PARENT && r->coding == CODING_SYMBOLS;
                all.alone += r->predictor == PREDICT_NONE && r->coding == CODING_SYMBOLS;
                all.rounded += r->predictor == PREDICT_CAST;
                all.bytes += r->stored_size + (ready ? ready->stored_size : 0);
            }
        }
    }
    views_free(&views);
    return all;
}

/* Bytes that a save on the device copied to the host, and to the device. */
typedef struct traffic {
    uint64_t host, device;
} traffic;

static traffic save_both(ckd_store *store, uint64_t step, double newest, const tensor *t, unsigned count,
                         stored_payloads *stored) {
    ckd_checkpoint a, b;
    ckd_save_options host = exact_options("host", step, newest),
                     device = exact_options("device", step, newest);
    assert_int_equal(save_some(&a, store, &host, t, count, false), CKD_OK);
    traffic before = {emulated_copied[DEVICE_TO_HOST], emulated_copied[DEVICE_TO_DEVICE]};
    assert_int_equal(save_some(&b, store, &device, t, count, true), CKD_OK);
    traffic took = {emulated_copied[DEVICE_TO_HOST] - before.host,
                    emulated_copied[DEVICE_TO_DEVICE] - before.device};
    *stored = stored_alike(store, &a, &b);
    loads_as(store, "device", step, t, count);
    return took;
}

static void close_store(ckd_store *store) {
    assert_int_equal(verify_damage(store), 0);
    ckd_store_close(store);
    assert_int_equal(emulated_memory + emulated_pinned, 0);
}

#endif
