/* Verification of long chains: each stored byte is decoded once, on all threads, and damage is named as ever. */
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/file.h"
#include "engine/integrity/verify_values.h"
#include "tests/support/checkpoints.h"
#include "tests/support/drift.h"
#include "tests/support/scratch.h"
#include "tests/support/stored.h"

/* A chunk file of 256 KiB is read at once when it is opened. These are larger. */
enum { STEPS = 20, COLUMNS = 8, SIDE = 192, N = SIDE * SIDE };

static const uint64_t shape[2] = {SIDE, SIDE};

static void save_step(ckd_store *store, const char *run, uint64_t step, float *const *values) {
    ckd_save_options o = options_of(run, step);
    o.max_load_cost = o.newest_load_cost = 1000; /* one chain from the first step to the last */
    ckd_save *save = begin_with(store, &o);
    for (unsigned i = 0; i < COLUMNS; i++) {
        char name[32];
        snprintf(name, sizeof(name), "layer.%02u", i);
        change_values(CKD_F32, values[i], N, (unsigned)step * COLUMNS + i);
        add_tensor(save, name, CKD_F32, 2, shape, NULL, values[i]);
    }
    commit_save(save);
}

static int make_store(void **state) {
    stored *f = stored_make(2, 1);
    float *values[COLUMNS];
    for (unsigned i = 0; i < COLUMNS; i++) {
        values[i] = random_values(CKD_F32, N, i);
    }
    for (uint64_t step = 0; step < STEPS; step++) {
        save_step(f->store, "run", step, values);
    }
    for (unsigned i = 0; i < COLUMNS; i++) {
        free(values[i]);
    }
    *state = f;
    return 0;
}

/* ---- reads ---- */

static atomic_uint reads;

static int count_reads(void *context, file_op op, const char *path) {
    (void)context;
    reads += op == FILE_OP_READ && strstr(path, "/data/c/");
    return 0;
}

static unsigned reads_of_verify(ckd_store *store, int quick, uint64_t *blocks) {
    ckd_verify_options o = CKD_VERIFY_OPTIONS_INIT;
    ckd_verify_result *r;
    o.quick = quick;
    reads = 0;
    file_set_fault_hook(count_reads, NULL);
    assert_int_equal(ckd_store_verify(&r, store, &o, NULL), CKD_OK);
    file_set_fault_hook(NULL, NULL);
    assert_int_equal(r->damage_count, 0);
    *blocks = r->all_blocks;
    ckd_verify_result_free(r);
    return reads;
}

/* A chain of n deltas would take n / 2 times as many reads if each checkpoint was decoded from its base. */
static void test_each_payload_is_read_once(void **state) {
    const stored *f = *state;
    uint64_t blocks;
    assert_int_equal(tensor_info(f->store, "run", STEPS - 1, "layer.03").depth, STEPS - 1);
    for (uint32_t threads = 1; threads <= 3; threads++) {
        ckd_store *store = stored_open(f->dir, threads);
        unsigned quick = reads_of_verify(store, 1, &blocks), all = reads_of_verify(store, 0, &blocks);
        assert_int_equal(blocks, STEPS * COLUMNS);
        assert_in_range(all - quick, blocks, blocks + 8 * STEPS); /* indexes are read, too */
        ckd_store_close(store);
    }
}

/* ---- threads ---- */

static ckd_status no_progress(void *context, uint64_t size, ckd_error *err) {
    (void)err;
    *(uint64_t *)context += size;
    return CKD_OK;
}

static void list_blocks(value_target *t, view_cache *views, const ckd_id *id) {
    const view *v;
    assert_int_equal(views_get(&v, views, id, NULL), CKD_OK);
    *t = (value_target){.view = v, .shares = true, .block_count = v->block_count, .count = v->block_count};
    t->findings = calloc(t->count + 1, sizeof(*t->findings));
    assert_non_null(t->findings);
    for (size_t i = 0; i < t->count; i++) {
        t->findings[i].block = &v->blocks[i];
    }
}

/* A second thread may come late, so there are several attempts. */
static void test_all_threads_decode(void **state) {
    const stored *f = *state;
    ckd_store *store = stored_open(f->dir, 2);
    bool helped = false;
    for (int attempt = 0; attempt < 200 && !helped; attempt++) {
        value_target targets[STEPS];
        view_cache views;
        value_checker checker;
        uint64_t checked = 0;
        views_init(&views, store);
        views.use_materialized = false;
        for (uint64_t step = 0; step < STEPS; step++) {
            ckd_checkpoint c = checkpoint_at(store, "run", step);
            list_blocks(&targets[step], &views, &c.id);
        }
        assert_int_equal(value_checker_init(&checker, store, &views, NULL), CKD_OK);
        assert_int_equal(value_check(&checker, targets, STEPS, no_progress, &checked, NULL), CKD_OK);
        assert_int_equal(checked, STEPS * COLUMNS * N * sizeof(float));
        helped = checker.decoders[0].bytes_read > 0 && checker.decoders[1].bytes_read > 0;
        for (unsigned i = 0; i < STEPS; i++) {
            for (size_t k = 0; k < targets[i].count; k++) {
                assert_null(targets[i].findings[k].why);
            }
            free(targets[i].findings);
        }
        value_checker_free(&checker);
        views_free(&views);
    }
    assert_true(helped);
    ckd_store_close(store);
}

/* ---- damage ---- */

/* Flips a bit of the payload of a tensor's block at this step. */
static void damage_block(ckd_store *store, uint64_t step, const char *tensor) {
    ckd_checkpoint c = checkpoint_at(store, "run", step);
    view_cache views;
    const view *v;
    views_init(&views, store);
    assert_int_equal(views_get(&v, &views, &c.id, NULL), CKD_OK);
    const view_tensor *t = view_find(v, tensor);
    assert_non_null(t);
    const view_block *b = &t->shards[0].blocks[0];
    int fd = open(file_path(b->chunk->file), O_RDWR);
    uint8_t byte;
    off_t at = (off_t)(b->record->payload_offset + b->record->stored_size / 2);
    assert_true(fd >= 0);
    assert_int_equal(pread(fd, &byte, 1, at), 1);
    byte ^= 4;
    assert_int_equal(pwrite(fd, &byte, 1, at), 1);
    close(fd);
    views_free(&views);
}

/* Damage within the chain: that step and all later ones are named, in their order, by any number of threads. */
static void test_damage_names_all_it_reaches(void **state) {
    const stored *f = *state;
    enum { DAMAGED = 7 };
    damage_block(f->store, DAMAGED, "layer.03");
    for (uint32_t threads = 1; threads <= 3; threads++) {
        ckd_store *store = stored_open(f->dir, threads);
        ckd_verify_result *r;
        assert_int_equal(ckd_store_verify(&r, store, NULL, NULL), CKD_OK);
        assert_int_equal(r->damage_count, 1);
        assert_string_equal(r->damage[0].tensor, "layer.03");
        assert_int_not_equal(r->damage[0].block, CKD_NO_OFFSET);
        assert_int_equal(r->damage[0].checkpoint_count, STEPS - DAMAGED);
        for (unsigned i = 0; i < STEPS - DAMAGED; i++) {
            char name[32];
            snprintf(name, sizeof(name), "run@%u", DAMAGED + i);
            assert_string_equal(r->damage[0].checkpoints[i], name);
        }
        assert_int_equal(r->blocks, STEPS * COLUMNS);
        ckd_verify_result_free(r);
        ckd_store_close(store);
    }
    damage_block(f->store, DAMAGED, "layer.03");
    assert_int_equal(verify_damage(f->store), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_each_payload_is_read_once),
                                       cmocka_unit_test(test_all_threads_decode),
                                       cmocka_unit_test(test_damage_names_all_it_reaches)};
    scratch_begin();
    int failed = cmocka_run_group_tests(tests, make_store, stored_remove);
    scratch_end();
    return failed;
}
