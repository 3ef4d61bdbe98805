/*
 * What tests of a backend's symbol streams share: the codec's workspace, a lease of device memory as the
 * engine has it, and functions for arrays.
 */
#ifndef TESTS_SUPPORT_DEVICE_LINES_H
#define TESTS_SUPPORT_DEVICE_LINES_H

#include "codec/entropy/symbols_work.h"
#include "engine/device/internal.h"
#include "tests/support/device_arrays.h"

static symbols_workspace *work;
static device_lease lease;

/* Lengths of blocks around the sizes of warps, pages and batches. */
static const size_t block_lengths[] = {0,    1,    31,   32,   33,   255,  256,   257,
                                       1023, 1025, 2047, 2048, 4099, 8192, 33000, 1u << 18};
#define LENGTHS (sizeof(block_lengths) / sizeof(block_lengths[0]))

UNUSED static void elements(device_operation operation, ckd_dtype dtype, void *to, const void *from,
                            const void *first, size_t n) {
    device_elements what = {operation, dtype, CKD_DTYPE_NONE, NULL};
    device_span whole_span = {to, from, first, NULL, n};
    bool known;
    must(backend->elements(&queue, &known, &what, &whole_span, 1, &why));
    assert_true(known);
}

UNUSED static array copied(const void *from, size_t n, size_t element) {
    array a = array_new(n, element, 0);
    memcpy(a.host, from, a.bytes);
    array_give(&a);
    return a;
}

UNUSED static array batch_memory(const dense_batch *batch) {
    return array_new((size_t)dense_batch_memory(batch), 1, 0);
}

/* Runs a group of tests with the workspace and the queue. Returns how many failed. */
#define run_stream_tests(name, of, tests) \
    (streams_open(name, of) ? streams_close(cmocka_run_group_tests_name(name, tests, NULL, NULL)) : 1)

static bool streams_open(const char *name, const device_backend *of) {
    if (!queue_opened(name, of)) {
        return false;
    }
    assert_int_equal(symbols_workspace_create(&work, NULL), CKD_OK);
    lease = (device_lease){.backend = backend, .queue = queue};
    for (int i = 0; i < 2; i++) {
        must(backend->allocate_pinned(&lease.pinned[i], 0, DEVICE_STAGE, &why));
    }
    return true;
}

static int streams_close(int failed) {
    for (int i = 0; i < 2; i++) {
        backend->release_pinned(0, lease.pinned[i]);
    }
    symbols_workspace_free(work);
    return queue_closed(failed);
}

#endif
