/* Checkpoints end to end: everything saved is loaded bit for bit, through chains and for any region. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "include/ckptdelta.h"
#include "tests/support/checkpoints.h"
#include "tests/support/tempdir.h"

static void test_round_trip_of_every_dtype(void **state) {
    ckd_store *store = store_create(*state);
    for (int dtype = CKD_F64; dtype <= CKD_BOOL; dtype++) {
        static const uint64_t counts[] = {0, 1, 2, 3, 31, 255, 4096, 300000};
        for (size_t i = 0; i < sizeof(counts) / sizeof(counts[0]); i++) {
            char run[32];
            snprintf(run, sizeof(run), "d%d.n%zu", dtype, i);
            size_t size = counts[i] * ckd_dtype_size((ckd_dtype)dtype);
            uint8_t *values = random_values((ckd_dtype)dtype, counts[i], (unsigned)(dtype * 100 + (int)i));
            save_one(store, run, 1, "t", (ckd_dtype)dtype, 1, &counts[i], values);
            change_values((ckd_dtype)dtype, values, counts[i], 7);
            ckd_checkpoint second = save_one(store, run, 2, "t", (ckd_dtype)dtype, 1, &counts[i], values);
            uint8_t *back = load_whole(store, run, 2, "t", size);
            assert_memory_equal(back, values, size);
            assert_int_equal(second.raw_bytes, size);
            free(back);
            free(values);
        }
    }
    ckd_store_close(store);
}

static void test_special_values_survive(void **state) {
    ckd_store *store = store_create(*state);
    /* Every pattern of f16 and bf16, and every pattern of the upper half of an f32 with odd payloads. */
    uint64_t n = 65536;
    uint16_t *half = malloc(n * 2);
    uint32_t *single = malloc(n * 4);
    for (uint32_t i = 0; i < n; i++) {
        half[i] = (uint16_t)i;
        single[i] = i << 16 | (i * 2654435761u >> 16);
    }
    for (uint64_t step = 0; step < 3; step++) {
        save_one(store, "f16", step, "t", CKD_F16, 1, &n, half);
        save_one(store, "bf16", step, "t", CKD_BF16, 1, &n, half);
        save_one(store, "f32", step, "t", CKD_F32, 1, &n, single);
        uint16_t *half_back = load_whole(store, "f16", step, "t", n * 2);
        assert_memory_equal(half_back, half, n * 2);
        free(half_back);
        half_back = load_whole(store, "bf16", step, "t", n * 2);
        assert_memory_equal(half_back, half, n * 2);
        free(half_back);
        uint32_t *single_back = load_whole(store, "f32", step, "t", n * 4);
        assert_memory_equal(single_back, single, n * 4);
        free(single_back);
        for (uint32_t i = 0; i < n; i++) {
            half[i] = (uint16_t)(half[i] + (i % 3));
            single[i] ^= i % 5;
        }
    }
    free(half);
    free(single);
    ckd_store_close(store);
}

static void test_chain_of_deltas_comes_back_at_every_step(void **state) {
    ckd_store *store = store_create(*state);
    enum { STEPS = 12 };
    uint64_t shape[] = {700, 1000}, n = shape[0] * shape[1];
    uint8_t *steps[STEPS];
    uint32_t deltas = 0;
    for (uint64_t s = 0; s < STEPS; s++) {
        steps[s] = random_values(CKD_F32, n, 5);
        for (uint64_t k = 0; k < s; k++) {
            change_values(CKD_F32, steps[s], n, (unsigned)k);
        }
        ckd_checkpoint c = save_one(store, "run", s, "layer.weight", CKD_F32, 2, shape, steps[s]);
        deltas += c.kind == CKD_DELTA;
        assert_true(c.load_cost >= 1 && c.load_cost <= 4);
        assert_int_equal(c.kind == CKD_DELTA, memcmp(&c.parent, &(ckd_id){{0}}, sizeof(ckd_id)) != 0);
    }
    assert_true(deltas >= STEPS / 2);
    for (uint64_t s = 0; s < STEPS; s++) {
        uint8_t *back = load_whole(store, "run", s, "layer.weight", n * 4);
        assert_memory_equal(back, steps[s], n * 4);
        free(back);
    }
    ckd_store_close(store);
    store = store_reopen(*state, CKD_OPEN_READ);
    assert_int_equal(verify_damage(store), 0);
    ckd_store_close(store);
    for (uint64_t s = 0; s < STEPS; s++) {
        free(steps[s]);
    }
}

static void test_unchanged_and_identical_tensors_cost_next_to_nothing(void **state) {
    ckd_store *store = store_create(*state);
    uint64_t n = 1 << 20;
    float *values = random_values(CKD_F32, n, 3);
    uint16_t *rounded = round_to_bf16(values, n);
    const struct named_tensor {
        const char *name;
        ckd_dtype dtype;
        const void *data;
    } tensors[] = {{"master.w", CKD_F32, values}, {"w", CKD_BF16, rounded}, {"tied", CKD_F32, values}};
    uint64_t stored[2];
    for (uint64_t step = 0; step < 2; step++) {
        ckd_save *save = begin_save(store, "run", step);
        for (size_t i = 0; i < 3; i++) {
            add_tensor(save, tensors[i].name, tensors[i].dtype, 1, &n, NULL, tensors[i].data);
        }
        ckd_checkpoint c;
        assert_int_equal(ckd_save_commit(&c, save, NULL), CKD_OK);
        stored[step] = c.stored_bytes;
        if (step == 1) {
            assert_int_equal(c.depth, 0);
            assert_true(c.load_cost < 1.01);
        }
        void *back = load_whole(store, "run", step, "w", n * 2);
        assert_memory_equal(back, rounded, n * 2);
        free(back);
        back = load_whole(store, "run", step, "tied", n * 4);
        assert_memory_equal(back, values, n * 4);
        free(back);
    }
    assert_true(stored[0] < n * 4 + 16384);
    assert_true(stored[1] < 16384);
    free(values);
    free(rounded);
    ckd_store_close(store);
}

static void test_any_region_of_any_sharding(void **state) {
    ckd_store *store = store_create(*state);
    uint64_t shape[] = {9, 40, 1500}, n = 9 * 40 * 1500;
    float *values = random_values(CKD_F32, n, 11);
    for (uint64_t step = 0; step < 3; step++) {
        save_sharded(store, "run", step, "t", 3, shape, values, step);
        for (unsigned seed = 0; seed < 12; seed++) {
            check_random_region(store, "run", step, "t", 3, shape, values, seed);
        }
        change_values(CKD_F32, values, n, (unsigned)step);
    }
    free(values);
    ckd_store_close(store);
}

static void test_regions_must_tile(void **state) {
    ckd_store *store = store_create(*state);
    uint64_t n = 1000;
    float *values = random_values(CKD_F32, n, 1);
    static const struct {
        uint64_t start, count;
    } wrong[][2] = {{{0, 500}, {501, 499}}, {{0, 500}, {499, 501}}, {{0, 500}, {0, 500}}};
    for (size_t i = 0; i < 3; i++) {
        ckd_save *save = begin_save(store, "run", i);
        ckd_error err = {0};
        for (size_t k = 0; k < 2; k++) {
            ckd_tensor t = CKD_TENSOR_INIT;
            t.name = "t";
            t.dtype = CKD_F32;
            t.ndim = 1;
            t.shape = &n;
            t.data = values;
            t.region =
                (ckd_region){.kind = CKD_REGION_FLAT, .start = wrong[i][k].start, .count = wrong[i][k].count};
            int overlaps = k == 1 && i > 0; /* the save finds overlaps at once, and holes at the end */
            assert_int_equal(ckd_save_tensor(save, &t, &err), overlaps ? CKD_E_MISMATCH : CKD_OK);
        }
        ckd_status status = ckd_save_commit(NULL, save, i == 0 ? &err : NULL);
        assert_int_equal(status, i == 0 ? CKD_E_MISMATCH : CKD_E_STATE);
        assert_string_equal(err.tensor, "t");
    }
    ckd_checkpoint_list *list;
    assert_int_equal(ckd_store_list(&list, store, NULL, NULL), CKD_OK);
    assert_int_equal(list->count, 0);
    ckd_checkpoint_list_free(list);
    free(values);
    ckd_store_close(store);
}

static void test_size_never_exceeds_raw_by_much(void **state) {
    ckd_store *store = store_create(*state);
    uint64_t n = 3 << 20;
    uint8_t *noise = random_bits(n, 9);
    for (int codec = CKD_CODEC_AUTO; codec <= CKD_CODEC_LZ4; codec++) {
        for (uint64_t step = 0; step < 2; step++) {
            ckd_save_options o = CKD_SAVE_OPTIONS_INIT;
            char run[16];
            snprintf(run, sizeof(run), "c%d", codec);
            o.run = run;
            o.step = step;
            o.codec = (ckd_codec)codec;
            ckd_save *save;
            assert_int_equal(ckd_save_begin(&save, store, &o, NULL), CKD_OK);
            uint64_t records = 0;
            for (unsigned i = 0; i < 200; i++) {
                char name[64];
                uint64_t count = 1 + i * 3;
                snprintf(name, sizeof(name), "transformer.layers.%u.attention.bias", i);
                add_tensor(save, name, CKD_U8, 1, &count, NULL, noise + i);
                records++;
            }
            add_tensor(save, "noise", CKD_U8, 1, &n, NULL, noise);
            records += (n + CKD_BLOCK_ELEMENTS - 1) / CKD_BLOCK_ELEMENTS;
            ckd_checkpoint c;
            assert_int_equal(ckd_save_commit(&c, save, NULL), CKD_OK);
            assert_true((double)c.stored_bytes <=
                        (double)c.raw_bytes * 1.001 + 256.0 * (double)records + 65536);
        }
    }
    free(noise);
    ckd_store_close(store);
}

/* Values unrelated to the parent's take no more space than without a parent. */
static void test_values_unrelated_to_the_parent(void **state) {
    uint64_t n = 65536;
    ckd_store *store = store_create(*state);
    uint8_t *noise = random_bits(n, 1);
    float *weights = random_values(CKD_F32, n / 4, 2), *same = calloc(n / 4, sizeof(*same)),
          *spiked = calloc(n / 4, sizeof(*spiked));
    assert_non_null(same);
    assert_non_null(spiked);
    for (uint64_t i = 0; i < n / 4; i += 97) {
        spiked[i] = weights[i];
    }
    const void *kinds[] = {noise, weights, same, spiked};
    uint64_t elements = n / 4;
    for (int before = 0; before < 4; before++) {
        for (int now = 0; now < 4; now++) {
            char run[32], alone[32];
            snprintf(run, sizeof(run), "run.%d.%d", before, now);
            snprintf(alone, sizeof(alone), "alone.%d.%d", before, now);
            save_one(store, run, 1, "t", CKD_F32, 1, &elements, kinds[before]);
            uint64_t with = save_one(store, run, 2, "t", CKD_F32, 1, &elements, kinds[now]).stored_bytes;
            uint64_t without = save_one(store, alone, 2, "t", CKD_F32, 1, &elements, kinds[now]).stored_bytes;
            assert_true(with <= without + without / 32 + 512);
        }
    }
    free(noise);
    free(weights);
    free(same);
    free(spiked);
    ckd_store_close(store);
}

static void test_blobs_metric_and_lineage(void **state) {
    ckd_store *store = store_create(*state);
    ckd_save_options o = CKD_SAVE_OPTIONS_INIT;
    o.run = "run";
    o.step = 10;
    o.metric_name = "val_loss";
    o.metric = 2.5;
    ckd_save *save;
    assert_int_equal(ckd_save_begin(&save, store, &o, NULL), CKD_OK);
    assert_int_equal(ckd_save_blob(save, "loader", "position 7", 10, NULL), CKD_OK);
    assert_int_equal(ckd_save_blob(save, "empty", NULL, 0, NULL), CKD_OK);
    ckd_checkpoint first, second, found;
    assert_int_equal(ckd_save_commit(&first, save, NULL), CKD_OK);
    o.run = "other";
    o.step = 11;
    o.parent_run = "run";
    o.parent_step = 10;
    o.resumed_from_run = "run";
    o.resumed_from_step = CKD_LATEST;
    assert_int_equal(ckd_save_begin(&save, store, &o, NULL), CKD_OK);
    assert_int_equal(ckd_save_commit(&second, save, NULL), CKD_OK);
    assert_int_equal(ckd_store_find(&found, store, "other", CKD_LATEST, NULL), CKD_OK);
    assert_memory_equal(&found.resumed_from, &first.id, sizeof(ckd_id));
    assert_true(found.metric > 2.49 && found.metric < 2.51);
    assert_string_equal(found.metric_name, "val_loss");
    assert_int_equal(found.lossy_resumes, 0);
    ckd_load *load;
    assert_int_equal(ckd_load_begin(&load, store, &first.id, NULL), CKD_OK);
    void *data;
    size_t size;
    assert_int_equal(ckd_load_blob(&data, &size, load, "loader", NULL), CKD_OK);
    assert_int_equal(size, 10);
    assert_memory_equal(data, "position 7", 10);
    ckd_blob_free(data);
    assert_int_equal(ckd_load_blob(&data, &size, load, "empty", NULL), CKD_OK);
    assert_int_equal(size, 0);
    ckd_blob_free(data);
    assert_int_equal(ckd_load_blob(&data, &size, load, "none", NULL), CKD_E_NOT_FOUND);
    assert_null(data);
    ckd_load_end(load);
    ckd_store_close(store);
}

static void test_four_ranks_one_commit(void **state) {
    enum { WORLD = 4 };
    ckd_store *store = store_create(*state);
    uint64_t shape[] = {1002, 64}, n = shape[0] * shape[1];
    float *values = random_values(CKD_F32, n, 21);
    ckd_save *saves[WORLD];
    ckd_part parts[WORLD];
    ckd_id id;
    assert_int_equal(ckd_id_new(&id, NULL), CKD_OK);
    for (uint32_t rank = 0; rank < WORLD; rank++) {
        ckd_save_options o = CKD_SAVE_OPTIONS_INIT;
        o.run = "run";
        o.rank = rank;
        o.world = WORLD;
        o.checkpoint_id = id;
        assert_int_equal(ckd_save_begin(&saves[rank], store, &o, NULL), CKD_OK);
        uint64_t first = n * rank / WORLD, end = n * (rank + 1) / WORLD;
        ckd_region r = {.kind = CKD_REGION_FLAT, .start = first, .count = end - first};
        add_tensor(saves[rank], "t", CKD_F32, 2, shape, &r, values + first);
        assert_int_equal(ckd_save_seal(&parts[rank], saves[rank], NULL), CKD_OK);
    }
    ckd_checkpoint info;
    assert_int_equal(ckd_save_publish(&info, saves[0], parts, WORLD, NULL), CKD_OK);
    assert_int_equal(info.world, WORLD);
    for (uint32_t rank = 0; rank < WORLD; rank++) {
        ckd_part_free(&parts[rank]);
        if (rank) {
            ckd_save_end(saves[rank]);
        }
    }
    float *back = load_whole(store, "run", 0, "t", n * 4);
    assert_memory_equal(back, values, n * 4);
    free(back);
    for (unsigned seed = 0; seed < 10; seed++) {
        check_random_region(store, "run", 0, "t", 2, shape, values, seed);
    }
    change_values(CKD_F32, values, n, 4);
    /* In another layout, the parent's values are read across shards. */
    ckd_save_options o = CKD_SAVE_OPTIONS_INIT;
    o.run = "run";
    o.step = 1;
    o.newest_load_cost = 4;
    ckd_save *save;
    ckd_checkpoint next;
    assert_int_equal(ckd_save_begin(&save, store, &o, NULL), CKD_OK);
    add_tensor(save, "t", CKD_F32, 2, shape, NULL, values);
    assert_int_equal(ckd_save_commit(&next, save, NULL), CKD_OK);
    assert_int_equal(next.kind, CKD_DELTA);
    back = load_whole(store, "run", 1, "t", n * 4);
    assert_memory_equal(back, values, n * 4);
    free(back);
    free(values);
    ckd_store_close(store);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        tempdir_test(test_round_trip_of_every_dtype),
        tempdir_test(test_special_values_survive),
        tempdir_test(test_chain_of_deltas_comes_back_at_every_step),
        tempdir_test(test_unchanged_and_identical_tensors_cost_next_to_nothing),
        tempdir_test(test_any_region_of_any_sharding),
        tempdir_test(test_regions_must_tile),
        tempdir_test(test_size_never_exceeds_raw_by_much),
        tempdir_test(test_values_unrelated_to_the_parent),
        tempdir_test(test_blobs_metric_and_lineage),
        tempdir_test(test_four_ranks_one_commit),
    };
    return cmocka_run_group_tests_name("store", tests, NULL, NULL);
}
