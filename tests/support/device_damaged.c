#include "tests/support/device_blocks.h"
#include "tests/support/device_streams.h"

static unsigned damaged_streams;

/* Each array has its own allocation of the exact size, so that any access beyond its end is noticed. */
typedef struct alone {
    array symbol, table_of, payload, states, failed, description;
    device_decoding d;
} alone;

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

/* The device must accept the stream if and only if the codec does, and then give the same integers. */
static bool compare_damaged(const block *b, const array *to, const uint8_t *stream, size_t size) {
    static symbols_parts parts;
    bool dense;
    uint32_t failed;
    uint8_t *want = malloc(to->bytes + 1), *got = malloc(to->bytes + 1);
    assert_true(want && got);
    ckd_status status = symbols_decode(
        work, &(symbols_output){(unsigned)b->size, b->n, want, host_contexts(b)}, stream, size, NULL);
    ckd_status here = symbols_parts_read(&parts, &dense, (unsigned)b->size, stream, size, NULL);
    bool tried = here == CKD_OK && dense && (b->with_contexts || !parts.contexts);
    if (here == CKD_OK && !tried) {
        assert_true(!dense || status != CKD_OK);
    } else if (!tried) {
        assert_int_equal(status, here);
    } else {
        alone a = alone_new(&parts, b, to, stream + parts.header, parts.bits);
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
        /* Most of the interesting bytes are in the header, which is short. */
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
    /* Damage to low bits is not noticed; most other damage is. */
    assert_true(accepted > 0 && accepted < damaged_streams);
}

int device_damaged_streams(const char *name, const device_backend *of, unsigned damaged) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_damaged)};
    damaged_streams = damaged;
    return run_stream_tests(name, of, tests);
}
