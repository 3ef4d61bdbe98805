/* Exact deltas on a device: classes and their counts, dense streams written and read, all blocks at the same time. */
#include <stdlib.h>

#include "bench/kernels/kernels.h"
#include "bench/support/support.h"
#include "engine/device/internal.h"

struct bench_streams {
    const device_backend *backend;
    device_lease lease;
    uint32_t count; /* blocks */
    uint8_t *integers, *contexts, *symbols, *back;
    uint32_t *counts;
    device_classes *classes; /* on the device */
    dense_batch writing, reading;
    uint8_t *written, *read; /* memory of the batches */
    device_failure why;
};

enum { BLOCK = DEVICE_STREAM_MAX, COUNTERS = DEVICE_SYMBOLS * DEVICE_SYMBOLS };

static void must(const bench_streams *s, device_result result) {
    if (result != DEVICE_DONE) {
        bench_die(s->why.call, s->why.reason);
    }
}

static void must_be(bool holds, const char *what) {
    if (!holds) {
        bench_die("streams", what);
    }
}

static void *on_device(bench_streams *s, uint64_t size) {
    void *memory = NULL;
    must(s, s->backend->allocate(&memory, s->lease.queue.device, size, &s->why));
    must(s, s->backend->zero(&s->lease.queue, memory, size, &s->why));
    return memory;
}

static void elements(bench_streams *s, device_operation which, void *to, const void *from,
                     const void *first) {
    device_elements what = {which, CKD_F32, CKD_DTYPE_NONE, NULL};
    device_span whole_span = {to, from, first, NULL, (uint64_t)s->count * BLOCK};
    bool known;
    must(s, s->backend->elements(&s->lease.queue, &known, &what, &whole_span, 1, &s->why));
}

static void describe(bench_streams *s) {
    device_classes *all = bench_allocated(calloc(s->count, sizeof(*all)));
    for (uint64_t i = 0; i < s->count; i++) {
        all[i] = (device_classes){.integers = s->integers + i * BLOCK * 4,
                                  .contexts = s->contexts + i * BLOCK,
                                  .symbols = s->symbols + i * BLOCK,
                                  .counts = s->counts + i * COUNTERS,
                                  .n = BLOCK,
                                  .width = 4,
                                  .fine = symbols_finest(4)};
    }
    s->classes = on_device(s, s->count * sizeof(*all));
    must_be(device_put(&s->lease, s->classes, all, s->count * sizeof(*all), NULL) == CKD_OK,
            "a device's copy");
    free(all);
}

/* Plans the tables of a block from its counts, and adds the block to the batch that is written. */
static void plan(bench_streams *s, symbols_workspace *work, symbols_parts *parts, uint32_t *counts,
                 uint64_t i) {
    symbols_counts c = {.width = 4, .n = BLOCK, .last_context = 255, .counts = counts};
    size_t planned;
    must_be(device_get(&s->lease, counts, s->counts + i * COUNTERS, COUNTERS * 4, NULL) == CKD_OK,
            "a device's copy");
    must_be(symbols_plan_counts(work, 0, &c, &planned), "a dense stream cannot hold the values");
    symbols_parts_planned(parts, work, 0);
    dense_integers of = {.integers = s->integers + i * BLOCK * 4,
                         .symbols = s->symbols + i * BLOCK,
                         .contexts = s->contexts + i * BLOCK,
                         .n = BLOCK};
    must_be(dense_add_writing(&s->writing, parts, &of, symbols_bound(work, 0) - parts->header, NULL) ==
                CKD_OK,
            "out of memory");
}

/* Adds the written payloads to the batch that is read, and reads them once. */
static void read_back(bench_streams *s, symbols_workspace *work, symbols_parts *parts, uint32_t *counts) {
    for (uint64_t i = 0; i < s->count; i++) {
        symbols_counts c = {.width = 4, .n = BLOCK, .last_context = 255, .counts = counts};
        size_t planned;
        uint64_t size;
        const void *from = dense_payload(&s->writing, (uint32_t)i, &size);
        uint8_t *payload = malloc(size + 1);
        must_be(payload && device_get(&s->lease, payload, from, size, NULL) == CKD_OK, "a device's copy");
        must_be(device_get(&s->lease, counts, s->counts + i * COUNTERS, COUNTERS * 4, NULL) == CKD_OK,
                "a device's copy");
        symbols_plan_counts(work, 0, &c, &planned);
        symbols_parts_planned(parts, work, 0);
        dense_integers of = {
            .integers = s->back + i * BLOCK * 4, .contexts = s->contexts + i * BLOCK, .n = BLOCK};
        uint32_t mark = 31u - (uint32_t)__builtin_clz(payload[size - 1]);
        must_be(dense_add_reading(&s->reading, parts, &of, payload, (uint32_t)(8 * (size - 1)) + mark,
                                  NULL) == CKD_OK,
                "out of memory");
        free(payload);
    }
    s->read = on_device(s, dense_batch_memory(&s->reading));
    must_be(dense_read(&s->reading, &s->lease, s->read, NULL) == CKD_OK && dense_read_ok(&s->reading, 0),
            "reading what was written");
}

bench_streams *bench_streams_begin(const device_backend *backend, const device_queue *queue, const float *now,
                                   const float *before, uint64_t elements_of) {
    bench_streams *s = bench_allocated(calloc(1, sizeof(*s)));
    s->backend = backend;
    s->lease = (device_lease){.backend = backend, .queue = *queue};
    s->count = (uint32_t)(elements_of / BLOCK);
    if (s->count == 0) {
        return s;
    }
    for (int i = 0; i < 2; i++) {
        must(s, backend->allocate_pinned(&s->lease.pinned[i], queue->device, DEVICE_STAGE, &s->why));
    }
    uint64_t n = (uint64_t)s->count * BLOCK;
    symbols_workspace *work;
    symbols_parts *parts = malloc(sizeof(*parts));
    uint32_t *counts = malloc(COUNTERS * sizeof(*counts));
    must_be(parts && counts && symbols_workspace_create(&work, NULL) == CKD_OK, "out of memory");
    s->integers = on_device(s, n * 4);
    s->back = on_device(s, n * 4);
    s->contexts = on_device(s, n);
    s->symbols = on_device(s, n);
    s->counts = on_device(s, (uint64_t)s->count * COUNTERS * 4);
    elements(s, DEVICE_RESIDUAL, s->integers, now, before);
    elements(s, DEVICE_CONTEXT, s->contexts, before, NULL);
    describe(s);
    must(s, bench_streams_classify(s));
    for (uint64_t i = 0; i < s->count; i++) {
        plan(s, work, parts, counts, i);
    }
    s->written = on_device(s, dense_batch_memory(&s->writing));
    must_be(dense_write(&s->writing, &s->lease, s->written, NULL) == CKD_OK, "writing");
    read_back(s, work, parts, counts);
    symbols_workspace_free(work);
    free(parts);
    free(counts);
    return s;
}

void bench_streams_end(bench_streams *s) {
    void *const all[] = {s->integers, s->back,    s->contexts, s->symbols,
                         s->counts,   s->classes, s->written,  s->read};
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
        s->backend->release(s->lease.queue.device, all[i]);
    }
    for (int i = 0; i < 2; i++) {
        s->backend->release_pinned(s->lease.queue.device, s->lease.pinned[i]);
    }
    dense_batch_free(&s->writing);
    dense_batch_free(&s->reading);
    free(s);
}

/* ---- what is timed: tables and descriptions are on the device already ---- */

device_result bench_streams_classify(bench_streams *s) {
    return s->backend->classify(&s->lease.queue, s->classes, s->count, BLOCK, &s->why);
}

device_result bench_streams_write(bench_streams *s) {
    const void *all = s->written + s->writing.sent.size;
    return s->backend->encode(&s->lease.queue, all, s->count, BLOCK, &s->why);
}

device_result bench_streams_read(bench_streams *s) {
    const void *all = s->read + s->reading.sent.size;
    return s->backend->decode(&s->lease.queue, all, s->count, &s->why);
}
