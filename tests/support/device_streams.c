#include "tests/support/device_streams.h"

#include <math.h>
#include <stdio.h>

#include "codec/symbols_work.h"
#include "engine/device_dense.h"
#include "tests/support/device_arrays.h"

static const kernels *cpu;
static symbols_workspace *work;
static device_line line; /* of the queue, as the engine has it */
static unsigned damaged_streams;
static unsigned framed_streams;          /* written here */
static unsigned fewer_entries;           /* blocks that have more counters than there was room for */
static unsigned several_tables, centred; /* streams that were planned so */

enum { ENTRIES = 1000 };

/* ---- what is coded: values, and those before them ---- */

enum {
    ANYTHING,
    TRAINED,
    SAME,
    SHIFTED,
    SAMPLED,
    KINDS
}; /* SAMPLED: only what centres are chosen by is changed */

static void fill_before(uint8_t *to, ckd_dtype dtype, size_t n, int kind) {
    size_t size = ckd_dtype_size(dtype);
    for (size_t i = 0; i < n; i++) {
        uint64_t bits = next_random();
        if (kind != ANYTHING && dtype == CKD_F32) {
            float v = 0.02f * ((float)(int32_t)bits / 0x1p31f) * ((float)(int32_t)(bits >> 32) / 0x1p31f);
            memcpy(to + i * size, &v, size);
        } else if (kind != ANYTHING && size > 1) { /* exponents near each other, as of weights */
            bits = (bits & (UINT64_MAX >> (66 - 8 * size))) | UINT64_C(3) << (8 * size - 4);
            memcpy(to + i * size, &bits, size);
        } else {
            bits = next_random() % 4 ? bits : bits & (UINT64_MAX << next_random() % 64);
            memcpy(to + i * size, &bits, size);
        }
    }
}

/* NaNs, infinities, denormals and -0 among them. */
static void fill_now(uint8_t *to, const uint8_t *before, ckd_dtype dtype, size_t n, int kind) {
    size_t size = ckd_dtype_size(dtype);
    static const uint32_t odd[] = {0x7fc00000, 0x7f800000, 0xff800000, 1,
                                   0x80000000, 0x807fffff, 0xffffffff, 0};
    for (size_t i = 0; i < n; i++) {
        uint64_t bits = 0, by = next_random();
        uint8_t context;
        memcpy(&bits, before + i * size, size);
        cpu->magnitude_context(dtype, &context, before + i * size, 1);
        if (kind == ANYTHING) {
            bits = next_random();
        } else if (kind == SHIFTED) {
            bits += (UINT64_C(3) << (8 * size - 5)) + next_random() % 5;
        } else if (kind == SAMPLED) {
            size_t sample = (i * symbols_sample_count(n) + n - 1) / n;
            bits += sample * n / symbols_sample_count(n) == i ? 100 : 0;
        } else if (kind == TRAINED && by % 256 == 0) {
            bits = (uint64_t)odd[next_random() % 8] << (size > 4 ? 32 : 0) >> (size < 4 ? 32 - 8 * size : 0);
        } else if (kind == TRAINED) { /* what is large moves by fewer of its lowest bits */
            by = by >> by % 8 >> (64 - 5 * size + (size > 1 ? context % 8 : 0));
            bits += next_random() % 2 ? by : UINT64_C(0) - by;
        }
        memcpy(to + i * size, &bits, size);
    }
}

/* A block on the device and on the host, and all that is made of it. */
typedef struct block {
    ckd_dtype dtype;
    size_t n, size;
    array now, before, integers, contexts, symbols, counts, entries, entered;
    bool with_contexts;
    uint64_t centre;
    uint8_t *stream; /* as the codec writes it */
    size_t stream_size;
    uint32_t *counted;
} block;

static int64_t signed_integer(const uint8_t *at, size_t size) {
    uint64_t v = 0;
    memcpy(&v, at, size);
    return (int64_t)(v << (64 - 8 * size)) >> (64 - 8 * size);
}

static void elements(device_operation operation, ckd_dtype dtype, void *to, const void *from,
                     const void *first, size_t n) {
    device_elements what = {operation, dtype, CKD_DTYPE_NONE, NULL};
    device_span span = {to, from, first, NULL, n};
    bool known;
    must(backend->elements(&queue, &known, &what, &span, 1, &why));
    assert_true(known);
}

/* Integers and contexts are made by the device, and by the host: integers.host, contexts.host. */
static block block_new(ckd_dtype dtype, size_t n, int kind, bool with_contexts, size_t shift) {
    block b = {.dtype = dtype, .n = n, .size = ckd_dtype_size(dtype), .with_contexts = with_contexts};
    b.now = array_new(n, b.size, shift);
    b.before = array_new(n, b.size, shift);
    b.integers = array_new(n, b.size, shift);
    b.contexts = array_new(n, 1, shift);
    b.symbols = array_new(n, 1, shift);
    b.counts = array_new(DEVICE_SYMBOLS * (size_t)DEVICE_SYMBOLS, sizeof(uint32_t), 0);
    b.entries = array_new(ENTRIES, sizeof(uint32_t), 0);
    b.entered = array_new(1, sizeof(uint64_t), 0);
    array_give(&b.entered);
    b.counted = calloc(DEVICE_SYMBOLS * (size_t)DEVICE_SYMBOLS, sizeof(uint32_t));
    fill_before(b.before.host, dtype, n, kind);
    fill_now(b.now.host, b.before.host, dtype, n, kind);
    array_give(&b.now);
    array_give(&b.before);
    array_give(&b.counts);
    if (n) {
        elements(DEVICE_RESIDUAL, dtype, b.integers.device, b.now.device, b.before.device, n);
        elements(DEVICE_CONTEXT, dtype, b.contexts.device, b.before.device, NULL, n);
    }
    cpu->ordered_residual(dtype, b.integers.host, b.now.host, b.before.host, n);
    cpu->magnitude_context(dtype, b.contexts.host, b.before.host, n);
    int64_t samples[SYMBOLS_PARTS_SAMPLE] = {0};
    for (size_t i = 0; i < symbols_sample_count(n); i++) {
        samples[i] = signed_integer(b.integers.host + i * n / symbols_sample_count(n) * b.size, b.size);
    }
    b.centre = n ? symbols_centre(samples, symbols_sample_count(n), (unsigned)b.size) : 0;
    return b;
}

static const uint8_t *host_contexts(const block *b) {
    return b->with_contexts ? b->contexts.host : NULL;
}

static void block_encode_on_host(block *b) {
    size_t planned;
    symbols_plan(work, 0, SYMBOLS_CLASS, (unsigned)b->size, b->integers.host, host_contexts(b), NULL, b->n,
                 &planned);
    size_t bound = symbols_bound(work, 0);
    b->stream = malloc(bound + 1);
    assert_non_null(b->stream);
    b->stream_size = symbols_encode(work, 0, b->integers.host, host_contexts(b), b->n, b->stream, bound);
}

static void block_free(block *b) {
    array *arrays[] = {&b->now,     &b->before, &b->integers, &b->contexts,
                       &b->symbols, &b->counts, &b->entries,  &b->entered};
    for (size_t i = 0; i < sizeof(arrays) / sizeof(arrays[0]); i++) {
        array_free(arrays[i]);
    }
    free(b->stream);
    free(b->counted);
}

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
                                  .room = ENTRIES,
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

/* Counters that are not 0, in any order; some of those that there is no room for are not there. */
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

/* As the engine does it: from the counts to a plan, and its tables to the batch. false: the plan is for the codec to make. */
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

static array batch_memory(const dense_batch *batch) {
    return array_new((size_t)dense_batch_memory(batch), 1, 0);
}

typedef struct written {
    uint8_t header[SYMBOLS_MAX_HEADER];
    size_t size, bound;
    bool here;
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

/* Returns how many streams were written there. */
static unsigned compare_writing(block *const *blocks, uint32_t count) {
    dense_batch batch = {0};
    written *w = calloc(count, sizeof(*w));
    unsigned here = 0;
    assert_non_null(w);
    for (uint32_t i = 0; i < count; i++) {
        w[i].here = blocks[i]->n && add_planned(&batch, blocks[i], w[i].header, &w[i].size, &w[i].bound);
        here += w[i].here;
        block_encode_on_host(blocks[i]);
        /* What the codec writes as anything but a dense stream was not planned here. */
        assert_true(!w[i].here || blocks[i]->stream[0] < SYMBOLS_SPARSE);
    }
    array memory = batch_memory(&batch);
    line.reader = NULL;
    assert_int_equal(dense_write(&batch, &line, memory.device, NULL), CKD_OK);
    for (uint32_t i = 0, at = 0; i < count; i++) {
        if (w[i].here) {
            compare_written(&batch, at++, &w[i], blocks[i]);
        }
    }
    uint8_t *all = malloc(memory.bytes + 1);
    assert_non_null(all);
    array_take(&memory, all); /* the sentinels around it */
    free(all);
    free(w);
    array_free(&memory);
    dense_batch_free(&batch);
    return here;
}

static const size_t counts[] = {0,    1,    31,   32,   33,   255,  256,   257,
                                1023, 1025, 2047, 2048, 4099, 8192, 33000, 1u << 18};
static const ckd_dtype dtypes[] = {CKD_F32, CKD_BF16, CKD_F16, CKD_F64, CKD_F8_E4M3,
                                   CKD_I8,  CKD_I16,  CKD_I32, CKD_I64, CKD_U8};
#define COUNTS (sizeof(counts) / sizeof(counts[0]))
#define DTYPES (sizeof(dtypes) / sizeof(dtypes[0]))

static void read_back(block *const *blocks, uint32_t count);

/* All counts of one kind in one batch. */
static void compare_batch(ckd_dtype dtype, int kind, bool contexts, size_t shift, size_t most) {
    block blocks[COUNTS], *all[COUNTS];
    uint32_t count = 0, enough = 0;
    for (size_t i = 0; i < COUNTS && counts[i] <= most; i++) {
        blocks[count] = block_new(dtype, counts[i], kind, contexts, shift);
        all[count] = &blocks[count];
        enough += counts[i] > 0 && kind != SAME && kind != SAMPLED && ckd_dtype_size(dtype) > 1;
        count++;
    }
    classify_all(all, count);
    for (uint32_t i = 0; i < count; i++) {
        compare_classes(all[i]);
    }
    unsigned here = compare_writing(all, count);
    assert_true(here >= enough);
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

/* ---- reading ---- */

static ckd_status add_stream(dense_batch *batch, const block *b, const uint8_t *stream, size_t size, void *to,
                             bool *dense) {
    static symbols_parts parts;
    uint32_t bits;
    ckd_status status = symbols_parts_read(&parts, dense, &bits, (unsigned)b->size, stream, size, NULL);
    if (status == CKD_OK && *dense) {
        dense_integers of = {.integers = to, .n = (uint32_t)b->n};
        if (parts.contexts) { /* there are none */
            assert_int_equal(dense_add_reading(batch, &parts, &of, stream + parts.header, bits, NULL),
                             CKD_E_CORRUPT);
        }
        of.contexts = b->with_contexts ? b->contexts.device : NULL;
        status = dense_add_reading(batch, &parts, &of, stream + parts.header, bits, NULL);
    }
    return status;
}

/* What was written, from the host's memory to values, and their hash. */
static void compare_values(const block *b) {
    device_pieces all = {b->integers.device, b->n * b->size, NULL};
    size_t pieces = (all.bytes + DEVICE_PIECE - 1) / DEVICE_PIECE;
    array hashes = array_new(pieces, sizeof(uint64_t), 0);
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
    block *read[COUNTS];
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
    line.reader = NULL;
    assert_int_equal(dense_read(&batch, &line, memory.device, NULL), CKD_OK);
    for (uint32_t i = 0; i < batch.count; i++) {
        assert_true(dense_read_well(&batch, i));
        compare_values(read[i]);
    }
    array_free(&memory);
    dense_batch_free(&batch);
}

/* ---- more than there are blocks, and more than these have warps ---- */

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
    line.reader = NULL;
    assert_int_equal(dense_read(&batch, &line, memory.device, NULL), CKD_OK);
    array_take(&to, got);
    for (uint32_t i = 0; i < MANY; i++) {
        assert_true(dense_read_well(&batch, i));
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
    line.reader = NULL;
    assert_int_equal(dense_write(&batch, &line, memory.device, NULL), CKD_OK);
    for (uint32_t i = 0; i < MANY; i++) {
        compare_written(&batch, i, &w, &b);
    }
    array_free(&memory);
    dense_batch_free(&batch);
    read_many(&b);
    block_free(&b);
}

/* SPLIT streams, and integers without some lowest bits that they share: as those of values on their own. */
static void test_split(void **state) {
    (void)state;
    for (size_t i = 1; i < COUNTS - 1; i++) {
        for (unsigned width = 1; width <= 8; width *= 2) {
            size_t n = counts[i], planned;
            bool dense;
            uint32_t bits;
            static symbols_parts parts;
            array to = array_new(n, width, 0);
            uint8_t *got = malloc(to.bytes), *stream = malloc(10 * n + SYMBOLS_MAX_HEADER);
            assert_true(got && stream);
            for (size_t j = 0; j < n; j++) {
                uint64_t v = (UINT64_C(5) << (8 * width - 4)) + (next_random() >> (64 - 6 * width)) -
                             (next_random() >> (64 - 5 * width));
                memcpy(to.host + j * width, &v, width);
            }
            symbols_plan(work, 0, SYMBOLS_SPLIT, width, to.host, NULL, NULL, n, &planned);
            size_t size = symbols_encode(work, 0, to.host, NULL, n, stream, 10 * n + SYMBOLS_MAX_HEADER);
            assert_int_equal(symbols_parts_read(&parts, &dense, &bits, width, stream, size, NULL), CKD_OK);
            for (unsigned shift = 0; shift < 8 && dense; shift += 3) {
                dense_batch batch = {0};
                uint64_t shared = 5 & ((1u << shift) - 1);
                dense_integers of = {
                    .integers = to.device, .n = (uint32_t)n, .shift = shift, .shared = shared};
                assert_int_equal(dense_add_reading(&batch, &parts, &of, stream + parts.header, bits, NULL),
                                 CKD_OK);
                array memory = batch_memory(&batch);
                line.reader = NULL;
                assert_int_equal(dense_read(&batch, &line, memory.device, NULL), CKD_OK);
                assert_true(dense_read_well(&batch, 0));
                array_take(&to, got);
                for (size_t j = 0; j < n; j++) {
                    uint64_t want = 0, v = 0;
                    memcpy(&want, to.host + j * width, width);
                    memcpy(&v, got + j * width, width);
                    assert_true(v == ((want << shift | shared) & (UINT64_MAX >> (64 - 8 * width))));
                }
                array_free(&memory);
                dense_batch_free(&batch);
            }
            free(got);
            free(stream);
            array_free(&to);
        }
    }
}

/* ---- damaged ones ---- */

/* Each array by itself and no longer than it must be, so that whoever leaves it is seen. */
typedef struct alone {
    array symbol, table_of, payload, states, failed, description;
    device_decoding d;
} alone;

static array copied(const void *from, size_t n, size_t element) {
    array a = array_new(n, element, 0);
    memcpy(a.host, from, a.bytes);
    array_give(&a);
    return a;
}

static alone alone_new(const symbols_parts *p, const block *b, const array *to, const uint8_t *payload,
                       uint32_t bits) {
    alone a;
    uint32_t *words = calloc(bits / 32 + 1, sizeof(*words));
    device_symbol symbols[DEVICE_STREAM_TABLES * DEVICE_SYMBOLS];
    assert_non_null(words);
    memcpy(words, payload, (bits + 7) / 8);
    for (uint32_t i = 0; i < p->first[p->tables]; i++) {
        const symbols_part *s = &p->symbol[i];
        symbols[i] = (device_symbol){s->base, s->before, s->states, s->symbol, s->low};
    }
    a.symbol = copied(symbols, p->first[p->tables], sizeof(symbols[0]));
    a.table_of = copied(p->table_of, sizeof(p->table_of), 1);
    a.payload = copied(words, (bits + 31) / 32, sizeof(*words));
    a.states = array_new((size_t)p->tables << p->log, sizeof(uint32_t), 0);
    a.failed = array_new(1, sizeof(uint32_t), 0);
    a.d = (device_decoding){.tables = {.symbol = (const device_symbol *)(const void *)a.symbol.device,
                                       .table_of = a.table_of.device,
                                       .tables = p->tables,
                                       .log = p->log,
                                       .lanes = p->lanes,
                                       .width = p->width},
                            .payload = (const uint32_t *)(const void *)a.payload.device,
                            .contexts = p->contexts ? b->contexts.device : NULL,
                            .integers = to->device,
                            .failed = (uint32_t *)(void *)a.failed.device,
                            .states = (uint32_t *)(void *)a.states.device,
                            .n = (uint32_t)b->n,
                            .bits = bits};
    memcpy(a.d.tables.first, p->first, (p->tables + 1) * sizeof(p->first[0]));
    a.description = copied(&a.d, 1, sizeof(a.d));
    free(words);
    return a;
}

static void alone_free(alone *a) {
    array *arrays[] = {&a->symbol, &a->table_of, &a->payload, &a->states, &a->failed, &a->description};
    for (size_t i = 0; i < sizeof(arrays) / sizeof(arrays[0]); i++) {
        array_free(arrays[i]);
    }
}

/* Accepted if, and only if, the codec accepts it, with the same integers. */
static bool compare_damaged(const block *b, const array *to, const uint8_t *stream, size_t size) {
    static symbols_parts parts;
    bool dense;
    uint32_t bits, failed;
    uint8_t *want = malloc(to->bytes + 1), *got = malloc(to->bytes + 1);
    assert_true(want && got);
    ckd_status status =
        symbols_decode(work, want, (unsigned)b->size, b->n, host_contexts(b), stream, size, NULL);
    ckd_status here = symbols_parts_read(&parts, &dense, &bits, (unsigned)b->size, stream, size, NULL);
    bool tried = here == CKD_OK && dense && (b->with_contexts || !parts.contexts);
    if (here == CKD_OK && !tried) {
        assert_true(!dense || status != CKD_OK);
    } else if (!tried) {
        assert_int_equal(status, here);
    } else {
        alone a = alone_new(&parts, b, to, stream + parts.header, bits);
        must(backend->decode(&queue, (const device_decoding *)(const void *)a.description.device, 1, &why));
        uint32_t *states = malloc(a.states.bytes);
        assert_non_null(states);
        array_take(&a.states, states);
        array_take(&a.failed, &failed);
        array_take(to, got);
        assert_int_equal(failed, status != CKD_OK);
        if (!failed) {
            assert_memory_equal(got, want, to->bytes);
        }
        free(states);
        alone_free(&a);
    }
    free(want);
    free(got);
    return tried && status == CKD_OK;
}

static size_t damage(uint8_t *stream, size_t size) {
    for (uint64_t flips = 1 + next_random() % 3; flips-- > 0;) {
        /* Headers are short, and most of what is interesting is there. */
        size_t at = next_random() % (next_random() % 2 && size > 64 ? 64 : size);
        stream[at] =
            next_random() % 2 ? (uint8_t)next_random() : stream[at] ^ (uint8_t)(1 << next_random() % 8);
    }
    return next_random() % 4 ? size : 1 + next_random() % size;
}

static void test_damaged(void **state) {
    (void)state;
    static const size_t lengths[] = {1, 40, 300, 2048, 2300};
    unsigned accepted = 0;
    for (size_t i = 0; i < 30; i++) {
        block b = block_new(dtypes[i % 5], lengths[i % 5 == 4 ? i % 4 : i % 5], i % 3 ? TRAINED : ANYTHING,
                            i % 4 != 0, 0);
        block_encode_on_host(&b);
        array to = array_new(b.n, b.size, 0);
        uint8_t *changed = malloc(b.stream_size);
        assert_non_null(changed);
        assert_true(b.stream[0] >= SYMBOLS_SPARSE || compare_damaged(&b, &to, b.stream, b.stream_size));
        for (unsigned j = 0; j < damaged_streams / 30; j++) {
            memcpy(changed, b.stream, b.stream_size);
            accepted += compare_damaged(&b, &to, changed, damage(changed, b.stream_size));
        }
        free(changed);
        array_free(&to);
        block_free(&b);
    }
    assert_true(accepted > 0 && accepted < damaged_streams); /* low bits are noise; most of the rest is not */
}

/* ---- values on their own, written ---- */

static uint64_t count_of(const uint32_t *from, unsigned context) {
    uint64_t all = 0;
    for (unsigned i = 0; i < DEVICE_SYMBOLS; i++) {
        all += from[(size_t)context * DEVICE_SYMBOLS + i];
    }
    return all;
}

enum { SCALED, MOMENTS, FEW_BITS, ANY_BITS, EQUAL, WAYS };

/* Rows and columns of scales of their own; second moments; 16 bits of each are 0; anything; all the same. */
static void fill_values(uint8_t *to, ckd_dtype dtype, size_t n, size_t columns, int way) {
    float *floats = malloc((n + 1) * sizeof(*floats));
    assert_non_null(floats);
    for (size_t i = 0; i < n; i++) {
        size_t row = i / columns, column = i % columns;
        float noise = (float)(int32_t)next_random() / 0x1p31f;
        float scale = ldexpf(1, (int)(row * 7 % 11) + (int)(column * 5 % 13) - 20);
        floats[i] = way == EQUAL ? 0.5f : noise * scale;
        floats[i] = way == MOMENTS ? (i % 97 ? floats[i] * floats[i] : 0) : floats[i];
    }
    cpu->cast(dtype == CKD_F32 ? CKD_BF16 : dtype, to, CKD_F32, floats, n);
    if (dtype == CKD_F32 && way == FEW_BITS) {
        uint16_t *half = malloc((n + 1) * sizeof(*half));
        assert_non_null(half);
        memcpy(half, to, n * sizeof(*half));
        cpu->widen((float *)(void *)to, CKD_BF16, half, n);
        free(half);
    } else if (dtype == CKD_F32) {
        memcpy(to, floats, n * sizeof(*floats));
    }
    for (size_t i = 0; way == ANY_BITS && i < n * ckd_dtype_size(dtype); i++) {
        to[i] = (uint8_t)next_random();
    }
    free(floats);
}

/* What the device says of a block's integers, step by step. */
typedef struct splitting {
    size_t n, width;
    array integers, extents, sums, squares, levels, contexts, symbols, counts;
    symbols_splitting split;
    symbols_lines lines;
    uint8_t *chosen; /* levels; NULL: none */
    uint32_t *counted;
} splitting;

static void split_step(splitting *s, device_split_step step) {
    device_split d = {.integers = s->integers.device,
                      .extents = (device_extent *)(void *)s->extents.device,
                      .sums = s->lines.columns ? (uint64_t *)(void *)s->sums.device : NULL,
                      .squares = (uint64_t *)(void *)s->squares.device,
                      .levels = s->chosen ? s->levels.device : NULL,
                      .contexts = s->contexts.device,
                      .bias = s->split.bias,
                      .n = (uint32_t)s->n,
                      .width = (uint32_t)s->width,
                      .bits = s->split.bits,
                      .columns = s->lines.columns,
                      .phase = s->lines.phase,
                      .rows = s->lines.rows};
    array there = copied(&d, 1, sizeof(d));
    must(backend->split(&queue, step, (const device_split *)(const void *)there.device, 1, (uint32_t)s->n,
                        &why));
    array_free(&there);
}

static void look_at_extents(splitting *s) {
    device_extent e[DEVICE_EXTENTS(DEVICE_STREAM_MOST)];
    split_step(s, DEVICE_SPLIT_EXTENT);
    array_take(&s->extents, e);
    symbols_extent all = {(unsigned)s->width, s->n, UINT64_MAX, 0, e[0].any, 0};
    for (size_t i = 0; i < DEVICE_EXTENTS(s->n); i++) {
        all.low = e[i].low < all.low ? e[i].low : all.low;
        all.high = e[i].high > all.high ? e[i].high : all.high;
        all.differing |= e[i].differing;
    }
    s->split = symbols_split_finest(&all);
}

static void look_at_lines(splitting *s, const symbols_grid *grid) {
    s->lines = symbols_lines_of(grid, s->n);
    uint32_t all = s->lines.rows + s->lines.columns;
    s->sums = array_new(all, sizeof(uint64_t), 0);
    s->levels = array_new(all, 1, 0);
    array_give(&s->sums);
    array_give(&s->squares);
    split_step(s, DEVICE_SPLIT_LINES);
    uint64_t *sums = malloc(s->sums.bytes + 1), squares;
    uint8_t *levels = malloc(all + 1);
    assert_true(sums && levels);
    array_take(&s->sums, sums);
    array_take(&s->squares, &squares);
    bool worth = s->lines.columns && symbols_levels_of(levels, work, &s->lines, sums, squares, s->n);
    s->chosen = worth ? s->levels.host : NULL;
    if (worth) {
        memcpy(s->levels.host, levels, all);
        array_give(&s->levels);
    }
    split_step(s, DEVICE_SPLIT_CONTEXTS);
    free(sums);
    free(levels);
}

static void count_split(splitting *s) {
    device_classes c = {.integers = s->integers.device,
                        .contexts = s->chosen ? s->contexts.device : NULL,
                        .symbols = s->symbols.device,
                        .counts = (uint32_t *)(void *)s->counts.device,
                        .centre = s->split.bias,
                        .n = (uint32_t)s->n,
                        .width = (uint32_t)s->width,
                        .split = 1,
                        .bits = s->split.bits};
    array there = copied(&c, 1, sizeof(c));
    array_give(&s->counts);
    must(backend->classify(&queue, (const device_classes *)(const void *)there.device, 1, (uint32_t)s->n,
                           &why));
    s->counted = malloc(s->counts.bytes);
    assert_non_null(s->counted);
    array_take(&s->counts, s->counted);
    array_free(&there);
}

/* From counts to a stream, which is the codec's. */
static void compare_split_stream(splitting *s, const uint8_t *want, size_t want_size) {
    static symbols_parts parts;
    dense_batch batch = {0};
    symbols_counts c = {.width = (unsigned)s->width, .n = s->n, .last_context = 255, .counts = s->counted};
    size_t planned;
    for (; c.first_context < 255 && count_of(s->counted, c.first_context) == 0; c.first_context++) {
    }
    for (; c.last_context > 0 && count_of(s->counted, c.last_context) == 0; c.last_context--) {
    }
    c.counts += (size_t)c.first_context * DEVICE_SYMBOLS;
    symbols_plan_split(work, 1, &c, &s->split, &s->lines, s->chosen, &planned);
    symbols_parts_planned(&parts, work, 1);
    uint8_t *got = malloc(symbols_bound(work, 1) + SYMBOLS_MAX_HEADER);
    assert_non_null(got);
    size_t frame = symbols_parts_frame(work, 1, got), size = frame + parts.header;
    assert_true(frame <= symbols_parts_frame_bound(work, 1));
    framed_streams += frame > 0;
    symbols_parts_header(work, 1, got + frame);
    dense_integers of = {.integers = s->integers.device,
                         .symbols = s->symbols.device,
                         .contexts = s->contexts.device,
                         .n = (uint32_t)s->n,
                         .shift = parts.shift};
    assert_int_equal(dense_add_writing(&batch, &parts, &of, parts.bound, NULL), CKD_OK);
    array memory = batch_memory(&batch);
    line.reader = NULL;
    assert_int_equal(dense_write(&batch, &line, memory.device, NULL), CKD_OK);
    uint64_t payload;
    const void *from = dense_payload(&batch, 0, &payload);
    assert_int_equal(size + payload, want_size);
    must(backend->copy(&queue, got + size, from, payload, DEVICE_TO_HOST, &why));
    must(backend->finish(&queue, &why));
    assert_memory_equal(got, want, want_size);
    free(got);
    array_free(&memory);
    dense_batch_free(&batch);
}

static void compare_split(ckd_dtype dtype, size_t n, const symbols_grid *grid, int way) {
    splitting s = {.n = n, .width = ckd_dtype_size(dtype)};
    array values = array_new(n, s.width, 0);
    size_t planned;
    s.integers = array_new(n, s.width, 0);
    s.extents = array_new(DEVICE_EXTENTS(n), sizeof(device_extent), 0);
    s.squares = array_new(1, sizeof(uint64_t), 0);
    s.contexts = array_new(n, 1, 0);
    s.symbols = array_new(n, 1, 0);
    s.counts = array_new(DEVICE_SYMBOLS * (size_t)DEVICE_SYMBOLS, sizeof(uint32_t), 0);
    fill_values(values.host, dtype, n, (size_t)grid->columns ? (size_t)grid->columns : 1, way);
    array_give(&values);
    elements(DEVICE_ROTATE, dtype, s.integers.device, values.device, NULL, n);
    cpu->rotate_sign(dtype, s.integers.host, values.host, n);
    symbols_plan(work, 0, SYMBOLS_SPLIT, (unsigned)s.width, s.integers.host, NULL, grid, n, &planned);
    size_t bound = symbols_bound(work, 0);
    uint8_t *stream = malloc(bound);
    assert_non_null(stream);
    size_t size = symbols_encode(work, 0, s.integers.host, NULL, n, stream, bound);
    look_at_extents(&s);
    look_at_lines(&s, grid);
    count_split(&s);
    compare_split_stream(&s, stream, size);
    array *arrays[] = {&values,   &s.integers, &s.extents, &s.sums,  &s.squares,
                       &s.levels, &s.contexts, &s.symbols, &s.counts};
    for (size_t i = 0; i < sizeof(arrays) / sizeof(arrays[0]); i++) {
        array_free(arrays[i]);
    }
    free(stream);
    free(s.counted);
}

static void test_split_writing(void **state) {
    (void)state;
    static const symbols_grid grids[] = {{0, 0}, {64, 0}, {200, 77}, {1000, 999}};
    static const size_t lengths[] = {1, 33, 4099, 40000};
    static const ckd_dtype floats[] = {CKD_F32, CKD_BF16, CKD_F16};
    for (int way = 0; way < WAYS; way++) {
        for (size_t d = 0; d < 3; d++) {
            for (size_t i = 0; i < 4; i++) {
                compare_split(floats[d], lengths[i], &grids[(i + d + (size_t)way) % 4], way);
            }
            compare_split(floats[d], 40000, &grids[1 + d], way);
        }
    }
    compare_split(CKD_F32, DEVICE_STREAM_MOST, &(symbols_grid){512, 100}, MOMENTS);
    assert_true(framed_streams >= 10);
}

int device_streams(const char *name, const device_backend *of, unsigned damaged) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_streams), cmocka_unit_test(test_split),
                                       cmocka_unit_test(test_split_writing), cmocka_unit_test(test_many),
                                       cmocka_unit_test(test_damaged)};
    backend = of;
    cpu = kernels_cpu();
    damaged_streams = damaged;
    if (backend->queue_open(&queue, 0, false, &why) != DEVICE_DONE ||
        symbols_workspace_create(&work, NULL) != CKD_OK) {
        printf("%s: %s\n", why.call, why.reason);
        return 1;
    }
    line = (device_line){.backend = backend, .queue = queue};
    for (int i = 0; i < 2; i++) {
        must(backend->allocate_pinned(&line.pinned[i], 0, DEVICE_STAGE, &why));
    }
    int failed = cmocka_run_group_tests_name(name, tests, NULL, NULL);
    for (int i = 0; i < 2; i++) {
        backend->release_pinned(0, line.pinned[i]);
    }
    symbols_workspace_free(work);
    backend->queue_close(&queue);
    return failed;
}
