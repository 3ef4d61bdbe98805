#include "engine/device/internal.h"
#include "tests/support/device_streams.h"

#include "tests/support/device_blocks.h"

static unsigned fewer_entries;           /* blocks with more counters than there was space for */
static unsigned several_tables, centred; /* planned streams with these properties */

/* ---- symbols ---- */

static void classify_all(block *const *blocks, uint32_t count) {
    device_classes all[64];
    uint32_t most = 0;
    array there = array_new(count, sizeof(all[0]), 0);
    for (uint32_t i = 0; i < count; i++) {
        block *b = blocks[i];
        all[i] = (device_classes){.integers = b->integers.device,
                                  .contexts = b->with_contexts ? b->contexts.device : NULL,
                                  .symbols = b->symbols.device,
                                  .counts = (uint32_t *)(void *)b->counts.device,
                                  .centre = b->centre,
                                  .n = (uint32_t)b->n,
                                  .width = (uint32_t)b->size,
                                  .fine = symbols_finest((unsigned)b->size),
                                  .capacity = ENTRIES,
                                  .entries = (uint32_t *)(void *)b->entries.device,
                                  .entered = (uint64_t *)(void *)b->entered.device};
        most = all[i].n > most ? all[i].n : most;
    }
    memcpy(there.host, all, there.bytes);
    array_give(&there);
    must(backend->classify(&queue, (const device_classes *)(const void *)there.device, count, most, &why));
    for (uint32_t i = 0; i < count; i++) {
        array_take(&blocks[i]->counts, blocks[i]->counted);
    }
    array_free(&there);
}

/* Counters that are not 0 are listed in any order. If there is not enough space, some are missing. */
static void compare_entries(block *b, const uint32_t *counts) {
    uint32_t *entries = malloc(b->entries.bytes), *left = malloc(b->counts.bytes);
    uint64_t entered, want = 0;
    assert_true(entries && left);
    memcpy(left, counts, b->counts.bytes);
    for (size_t i = 0; i < DEVICE_SYMBOLS * DEVICE_SYMBOLS; i++) {
        want += (counts[i] + 65534) / 65535;
    }
    array_take(&b->entered, &entered);
    array_take(&b->entries, entries);
    assert_int_equal(entered, want);
    for (uint64_t i = 0; i < entered && i < ENTRIES; i++) {
        uint32_t *of = &left[entries[i] >> DEVICE_ENTRY_BITS], n = entries[i] & 65535;
        assert_true(n > 0 && *of >= n);
        *of -= n;
    }
    for (size_t i = 0; i < DEVICE_SYMBOLS * DEVICE_SYMBOLS && entered <= ENTRIES; i++) {
        assert_int_equal(left[i], 0);
    }
    fewer_entries += entered > ENTRIES;
    free(entries);
    free(left);
}

static void compare_classes(block *b) {
    uint8_t *got = malloc(b->n * b->size + 1), *want = malloc(b->n + 1);
    uint32_t *counts = calloc(DEVICE_SYMBOLS * (size_t)DEVICE_SYMBOLS, sizeof(uint32_t));
    assert_true(got && want && counts);
    array_take(&b->integers, got);
    assert_memory_equal(got, b->integers.host, b->n * b->size);
    array_take(&b->contexts, got);
    assert_memory_equal(got, b->contexts.host, b->n);
    array_take(&b->symbols, got);
    symbols_classify(want, (unsigned)b->size, b->integers.host, b->centre, b->n);
    assert_memory_equal(got, want, b->n);
    for (size_t i = 0; i < b->n; i++) {
        counts[(b->with_contexts ? b->contexts.host[i] : 0) * DEVICE_SYMBOLS + want[i]]++;
    }
    assert_memory_equal(counts, b->counted, b->counts.bytes);
    compare_entries(b, counts);
    free(got);
    free(want);
    free(counts);
}

/* ---- writing ---- */

/*
 * Plans a stream from its counts, as the engine does, and adds it to the batch. Returns false if the codec
 * has to plan it.
 */
static bool add_planned(dense_batch *batch, block *b, uint8_t *header, size_t *header_size, size_t *bound) {
    static symbols_parts parts;
    symbols_counts c = {.width = (unsigned)b->size, .n = b->n, .centre = b->centre};
    size_t planned;
    c.first_context = 255;
    for (unsigned i = 0; i < DEVICE_SYMBOLS * DEVICE_SYMBOLS; i++) {
        if (b->counted[i]) {
            c.first_context = i / DEVICE_SYMBOLS < c.first_context ? i / DEVICE_SYMBOLS : c.first_context;
            c.last_context = i / DEVICE_SYMBOLS;
        }
    }
    c.counts = b->counted + (size_t)c.first_context * DEVICE_SYMBOLS;
    if (!symbols_plan_counts(work, 1, &c, &planned)) {
        return false;
    }
    symbols_parts_planned(&parts, work, 1);
    symbols_parts_header(work, 1, header);
    several_tables += parts.contexts;
    centred += b->centre != 0;
    *header_size = parts.header;
    *bound = symbols_bound(work, 1);
    dense_integers of = {.integers = b->integers.device,
                         .symbols = b->symbols.device,
                         .contexts = b->contexts.device,
                         .n = (uint32_t)b->n};
    assert_int_equal(dense_add_writing(batch, &parts, &of, *bound - parts.header, NULL), CKD_OK);
    return true;
}

typedef struct written {
    uint8_t header[SYMBOLS_MAX_HEADER];
    size_t size, bound;
    bool on_device;
} written;

static void compare_written(const dense_batch *batch, uint32_t at, const written *w, const block *b) {
    uint64_t size;
    const void *payload = dense_payload(batch, at, &size);
    assert_true(size > 0);
    uint8_t *got = malloc(w->size + size);
    assert_non_null(got);
    memcpy(got, w->header, w->size);
    must(backend->copy(&queue, got + w->size, payload, size, DEVICE_TO_HOST, &why));
    must(backend->finish(&queue, &why));
    assert_int_equal(w->size + size, b->stream_size);
    assert_memory_equal(got, b->stream, b->stream_size);
    free(got);
}

/* Returns how many streams the device wrote. */
static unsigned compare_writing(block *const *blocks, uint32_t count) {
    dense_batch batch = {0};
    written *w = calloc(count, sizeof(*w));
    unsigned on_device = 0;
    assert_non_null(w);
    for (uint32_t i = 0; i < count; i++) {
        w[i].on_device = blocks[i]->n && add_planned(&batch, blocks[i], w[i].header, &w[i].size, &w[i].bound);
        on_device += w[i].on_device;
        block_encode_on_host(blocks[i]);
        /* A stream that the device planned must be dense for the codec, too. */
        assert_true(!w[i].on_device || blocks[i]->stream[0] < SYMBOLS_SPARSE);
    }
    array memory = batch_memory(&batch);
    lease.reader = NULL;
    assert_int_equal(dense_write(&batch, &lease, memory.device, NULL), CKD_OK);
    for (uint32_t i = 0, at = 0; i < count; i++) {
        if (w[i].on_device) {
            compare_written(&batch, at++, &w[i], blocks[i]);
        }
    }
    uint8_t *all = malloc(memory.bytes + 1);
    assert_non_null(all);
    array_take(&memory, all); /* checks the sentinels, too */
    free(all);
    free(w);
    array_free(&memory);
    dense_batch_free(&batch);
    return on_device;
}

static void read_back(block *const *blocks, uint32_t count);

/* Tests blocks of all lengths and one kind, in one batch. */
static void compare_batch(ckd_dtype dtype, int kind, bool contexts, size_t shift, size_t most) {
    block blocks[LENGTHS], *all[LENGTHS];
    uint32_t count = 0, enough = 0;
    for (size_t i = 0; i < LENGTHS && block_lengths[i] <= most; i++) {
        blocks[count] = block_new(dtype, block_lengths[i], kind, contexts, shift);
        all[count] = &blocks[count];
        enough += block_lengths[i] > 0 && kind != SAME && kind != SAMPLED && ckd_dtype_size(dtype) > 1;
        count++;
    }
    classify_all(all, count);
    for (uint32_t i = 0; i < count; i++) {
        compare_classes(all[i]);
    }
    unsigned on_device = compare_writing(all, count);
    assert_true(on_device >= enough);
    read_back(all, count);
    for (uint32_t i = 0; i < count; i++) {
        block_free(all[i]);
    }
}

static void test_streams(void **state) {
    (void)state;
    for (size_t d = 0; d < DTYPES; d++) {
        for (int kind = 0; kind < KINDS; kind++) {
            compare_batch(dtypes[d], kind, true, kind % 2, d < 2 && kind == TRAINED ? SIZE_MAX : 4099);
            compare_batch(dtypes[d], kind, false, 0, 4099);
        }
    }
    compare_batch(CKD_F32, ANYTHING, true, 0, SIZE_MAX);
    compare_batch(CKD_F64, ANYTHING, true, 0, 33000);
    assert_true(several_tables >= 10 && centred >= 10 && fewer_entries >= 3);
}

/* ---- reading on the device ---- */

static ckd_status add_stream(dense_batch *batch, const block *b, const uint8_t *stream, size_t size, void *to,
                             bool *dense) {
    static symbols_parts parts;
    ckd_status status = symbols_parts_read(&parts, dense, (unsigned)b->size, stream, size, NULL);
    if (status == CKD_OK && *dense) {
        dense_integers of = {.integers = to, .n = (uint32_t)b->n};
        if (parts.contexts) { /* there are none */
            assert_int_equal(dense_add_reading(batch, &parts, &of, stream + parts.header, parts.bits, NULL),
                             CKD_E_CORRUPT);
        }
        of.contexts = b->with_contexts ? b->contexts.device : NULL;
        status = dense_add_reading(batch, &parts, &of, stream + parts.header, parts.bits, NULL);
    }
    return status;
}

/* Applies integers that were read on the device to the parent's values. Compares the result, and its hash. */
static void compare_values(const block *b) {
    device_hash_span all = {b->integers.device, b->n * b->size, NULL};
    size_t pages = (all.bytes + DEVICE_HASH_PAGE - 1) / DEVICE_HASH_PAGE;
    array hashes = array_new(pages, sizeof(uint64_t), 0);
    all.to = (uint64_t *)(void *)hashes.device;
    elements(DEVICE_APPLY, b->dtype, b->integers.device, b->before.device, b->integers.device, b->n);
    must(backend->hash(&queue, &all, 1, &why));
    uint64_t *got = malloc(hashes.bytes + 1);
    uint8_t *values = malloc(all.bytes + 1);
    assert_true(got && values);
    array_take(&hashes, got);
    array_take(&b->integers, values);
    assert_memory_equal(values, b->now.host, all.bytes);
    hash128 content = hash128_of(got, hashes.bytes), want = content_hash(b->now.host, all.bytes);
    assert_true(hash128_equal(&content, &want));
    free(got);
    free(values);
    array_free(&hashes);
}

static void read_back(block *const *blocks, uint32_t count) {
    dense_batch batch = {0};
    block *read[LENGTHS];
    for (uint32_t i = 0; i < count; i++) {
        bool dense = false;
        uint32_t before = batch.count;
        must(backend->zero(&queue, blocks[i]->integers.device, blocks[i]->integers.bytes, &why));
        if (blocks[i]->n) {
            assert_int_equal(add_stream(&batch, blocks[i], blocks[i]->stream, blocks[i]->stream_size,
                                        blocks[i]->integers.device, &dense),
                             CKD_OK);
        }
        if (dense) {
            read[before] = blocks[i];
        }
    }
    array memory = batch_memory(&batch);
    lease.reader = NULL;
    assert_int_equal(dense_read(&batch, &lease, memory.device, NULL), CKD_OK);
    for (uint32_t i = 0; i < batch.count; i++) {
        assert_true(dense_read_ok(&batch, i));
        compare_values(read[i]);
    }
    array_free(&memory);
    dense_batch_free(&batch);
}

/* ---- batches with more streams than the device has blocks or warps ---- */

enum { MANY = 2100 };

static void read_many(const block *b) {
    dense_batch batch = {0};
    size_t room = b->n * b->size;
    array to = array_new(MANY * b->n, b->size, 0);
    uint8_t *got = malloc(to.bytes);
    assert_non_null(got);
    for (size_t i = 0; i < MANY; i++) {
        bool dense;
        assert_int_equal(add_stream(&batch, b, b->stream, b->stream_size, to.device + i * room, &dense),
                         CKD_OK);
        assert_true(dense);
    }
    array memory = batch_memory(&batch);
    lease.reader = NULL;
    assert_int_equal(dense_read(&batch, &lease, memory.device, NULL), CKD_OK);
    array_take(&to, got);
    for (uint32_t i = 0; i < MANY; i++) {
        assert_true(dense_read_ok(&batch, i));
        assert_memory_equal(got + i * room, b->integers.host, room);
    }
    free(got);
    array_free(&to);
    array_free(&memory);
    dense_batch_free(&batch);
}

static void test_many(void **state) {
    (void)state;
    dense_batch batch = {0};
    block b = block_new(CKD_BF16, 2050, TRAINED, true, 0), *one = &b;
    written w;
    classify_all(&one, 1);
    block_encode_on_host(&b);
    for (size_t i = 0; i < MANY; i++) {
        assert_true(add_planned(&batch, &b, w.header, &w.size, &w.bound));
    }
    array memory = batch_memory(&batch);
    lease.reader = NULL;
    assert_int_equal(dense_write(&batch, &lease, memory.device, NULL), CKD_OK);
    for (uint32_t i = 0; i < MANY; i++) {
        compare_written(&batch, i, &w, &b);
    }
    array_free(&memory);
    dense_batch_free(&batch);
    read_many(&b);
    block_free(&b);
}

/* Dense streams: the device and the codec write the same bytes, and each reads what the other wrote. */
static int whole_streams(const char *name, const device_backend *of) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_streams), cmocka_unit_test(test_many)};
    return run_stream_tests(name, of, tests);
}

int device_streams(const char *name, const device_backend *of, unsigned damaged) {
    char split[64], broken[64];
    snprintf(split, sizeof(split), "%s_split", name);
    snprintf(broken, sizeof(broken), "%s_damaged", name);
    return whole_streams(name, of) + device_split_streams(split, of) +
           device_damaged_streams(broken, of, damaged);
}
