/*
 * A checkpoint of a pack that is rewritten alone has its records twice: in its new file, and as they were in the pack.
 * A manifest may name both files. No compaction leaves an intact record for a rotten one, or a short chain for a long
 * one.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "codec/chunk/chunk.h"
#include "engine/store/handle.h"
#include "tests/support/checkpoints.h"
#include "tests/support/compactions.h"
#include "tests/support/drift.h"
#include "tests/support/fingerprints.h"
#include "tests/support/scenes.h"
#include "tests/support/scratch.h"
#include "tests/support/tempdir.h"

#define COUNT     (UINT64_C(1) << 16)
#define TENSORS   4
#define DEEP_COST 1000 /* no chain is too dear */

static const char *const names[TENSORS] = {"a", "b", "w", "x"};

static void change_some(float *values, uint64_t step) {
    float *other = random_values(CKD_F32, COUNT, 1000 + (unsigned)step);
    for (uint64_t i = step % 25; i < COUNT; i += 25) {
        values[i] = other[i];
    }
    free(other);
}

/* a never changes, b at step 3 alone, w a little at each step, as x does, which is another one at step 4. */
static void change(float *values[TENSORS], uint64_t step) {
    if (step == 3 || step == 4) {
        float **whole = &values[step == 3 ? 1 : 3];
        free(*whole);
        *whole = random_values(CKD_F32, COUNT, 50 + (unsigned)step);
    }
    change_some(values[2], step);
    if (step != 4) {
        change_some(values[3], 100 + step);
    }
}

static ckd_checkpoint save(ckd_store *store, const ckd_save_options *options, float *const values[TENSORS]) {
    const uint64_t shape[1] = {COUNT};
    ckd_save_options o = *options;
    o.max_load_cost = DEEP_COST;
    ckd_save *s = begin_with(store, &o);
    for (size_t i = 0; i < TENSORS; i++) {
        add_tensor(s, names[i], CKD_F32, 1, shape, NULL, values[i]);
    }
    return commit_save(s);
}

static ckd_save_options step_of(const char *run, uint64_t step) {
    ckd_save_options o = CKD_SAVE_OPTIONS_INIT;
    o.run = run;
    o.step = step;
    return o;
}

static void compact_to(ckd_store *store, uint32_t max_depth, uint64_t pack_below) {
    ckd_compact_options o = options_for(max_depth);
    o.max_load_cost = DEEP_COST;
    o.pack_below = pack_below;
    ckd_compaction_free(compact_with(store, &o));
}

static ckd_id own_file(ckd_store *store, const char *run, uint64_t step) {
    manifest m;
    ckd_checkpoint c = checkpoint_at(store, run, step);
    assert_int_equal(store_read_manifest(&m, store, run, step, c.generation, NULL), CKD_OK);
    ckd_id id = m.files[0].id;
    manifest_free(&m);
    return id;
}

static bool names_file(ckd_store *store, const char *run, uint64_t step, const ckd_id *file) {
    manifest m;
    bool found = false;
    ckd_checkpoint c = checkpoint_at(store, run, step);
    assert_int_equal(store_read_manifest(&m, store, run, step, c.generation, NULL), CKD_OK);
    for (size_t i = 0; i < m.file_count; i++) {
        found = found || id_equal(&m.files[i].id, file);
    }
    manifest_free(&m);
    return found;
}

/* Steps 2 to 5 lie in a pack. Then step 5 gets a file of its own, with shorter chains. Returns the pack's id. */
static ckd_id make_duplicates(ckd_store *store, float *values[TENSORS]) {
    for (size_t i = 0; i < TENSORS; i++) {
        values[i] = random_values(CKD_F32, COUNT, 1 + (unsigned)i);
    }
    float *at_five[TENSORS];
    for (uint64_t step = 1; step <= 9; step++) {
        ckd_save_options o = step_of("gpt", step);
        if (step > 1) {
            change(values, step);
        }
        save(store, &o, values);
        for (size_t i = 0; i < TENSORS && step == 5; i++) {
            at_five[i] = malloc(COUNT * sizeof(float));
            assert_non_null(at_five[i]);
            memcpy(at_five[i], values[i], COUNT * sizeof(float));
        }
    }
    for (size_t i = 0; i < TENSORS; i++) {
        free(values[i]);
        values[i] = at_five[i];
    }
    compact_to(store, 100, UINT64_C(600) << 10);
    ckd_id pack = own_file(store, "gpt", 5);
    for (uint64_t step = 2; step < 5; step++) {
        ckd_id same = own_file(store, "gpt", step);
        assert_true(id_equal(&same, &pack));
    }
    assert_int_equal(checkpoint_at(store, "gpt", 5).depth, 4);
    compact_to(store, 3, CKD_NO_PACKS);
    ckd_id alone = own_file(store, "gpt", 5);
    assert_false(id_equal(&alone, &pack));
    return pack;
}

/* Saves steps 1 to `count` of the branch b on gpt@5. Only x changes. */
static void save_branch(ckd_store *store, float *values[TENSORS], uint64_t count) {
    for (uint64_t step = 1; step <= count; step++) {
        ckd_save_options o = step_of("b", step);
        o.parent_run = step == 1 ? "gpt" : NULL;
        o.parent_step = 5;
        if (step > 1) {
            change_some(values[3], 200 + step);
        }
        save(store, &o, values);
    }
    for (size_t i = 0; i < TENSORS; i++) {
        free(values[i]);
    }
}

/* Flips a bit of the record of w that the checkpoint has in this file. */
static void damage(ckd_store *store, const ckd_id *file, const ckd_id *owner) {
    chunk *c;
    const chunk_records *part;
    uint64_t at = 0;
    size_t size;
    pathname p = path_chunk(store->path, file, "");
    assert_int_equal(chunk_open_bundled(&c, p.text, NULL), CKD_OK);
    assert_int_equal(chunk_records_of(&part, c, owner, NULL), CKD_OK);
    for (size_t i = 0; i < part->count; i++) {
        const record *r = &part->records[i];
        bool wanted = r->kind == RECORD_BLOCK && strcmp(r->tensor->name, "w") == 0;
        at = wanted ? r->payload_offset + r->stored_size / 2 : at;
    }
    chunk_close(c);
    assert_true(at > 0);
    unsigned char *data = read_whole_file(p.text, &size);
    data[at] ^= 1;
    write_whole_file(p.text, data, size);
    free(data);
}

static void delete_at(ckd_store *store, const char *run, uint64_t step) {
    ckd_delete_options now = CKD_DELETE_OPTIONS_INIT;
    ckd_collect_options everything = CKD_COLLECT_OPTIONS_INIT;
    ckd_id id = checkpoint_at(store, run, step).id;
    now.undo_s = 0;
    everything.all = 1;
    assert_int_equal(ckd_store_delete(store, &id, 1, &now, NULL), CKD_OK);
    assert_int_equal(ckd_store_collect(NULL, store, &everything, NULL), CKD_OK);
}

static void check_loads(ckd_store *store, const fingerprint *before) {
    fingerprint now;
    ckd_error err = {0};
    ckd_checkpoint c;
    assert_int_equal(store_find_id(&c, store, &before->checkpoint, &err), CKD_OK);
    if (fingerprint_of(&now, store, &c, &err) != CKD_OK) {
        fail_msg("%s: %s (%s)", before->name, err.message, err.file);
    }
    assert_true(now.hash == before->hash);
}

static fingerprint fingerprint_at(ckd_store *store, const char *run, uint64_t step) {
    fingerprint out;
    ckd_checkpoint c = checkpoint_at(store, run, step);
    assert_int_equal(fingerprint_of(&out, store, &c, NULL), CKD_OK);
    return out;
}

/* Manifests of what builds on gpt@5 are brought up to date when that is deleted. They keep the short chain. */
static void test_short_chains_stay(void **state) {
    ckd_store *store = store_create(*state);
    float *values[TENSORS];
    make_duplicates(store, values);
    save_branch(store, values, 1);
    fingerprint six = fingerprint_at(store, "gpt", 6), one = fingerprint_at(store, "b", 1);
    ckd_id alone = own_file(store, "gpt", 5);
    for (uint64_t step = 6; step <= 7; step++) {
        assert_true(names_file(store, "gpt", step, &alone));
    }
    delete_at(store, "gpt", 5);
    compact_to(store, 100, CKD_NO_PACKS);
    assert_true(names_file(store, "gpt", 7, &alone));
    assert_true(names_file(store, "b", 1, &alone));
    check_loads(store, &six);
    check_loads(store, &one);
    ckd_store_close(store);
}

/* The same, and the records of gpt@5 in the pack, which nobody reads, have rotted. */
static void test_rotten_duplicates(void **state) {
    ckd_store *store = store_create(*state);
    float *values[TENSORS];
    ckd_id pack = make_duplicates(store, values);
    save_branch(store, values, 1);
    ckd_id five = checkpoint_at(store, "gpt", 5).id;
    damage(store, &pack, &five);
    fingerprint before[6];
    for (uint64_t i = 0; i < 5; i++) {
        before[i] = fingerprint_at(store, "gpt", i < 4 ? 6 + i : 4);
    }
    before[5] = fingerprint_at(store, "b", 1);
    delete_at(store, "gpt", 5);
    compact_to(store, 100, CKD_NO_PACKS);
    delete_at(store, "gpt", 1);
    for (size_t i = 0; i < 6; i++) {
        check_loads(store, &before[i]);
    }
    ckd_store_close(store);
}

/*
 * b@4 has a chain that is too long, and is rewritten on gpt@4. So the pack, where that lies, comes before the file from
 * which b@4 reads w.
 */
static void test_rotten_duplicates_of_a_new_base(void **state) {
    ckd_store *store = store_create(*state);
    float *values[TENSORS];
    ckd_id pack = make_duplicates(store, values);
    save_branch(store, values, 4);
    assert_int_equal(checkpoint_at(store, "b", 4).depth, 4);
    ckd_id five = checkpoint_at(store, "gpt", 5).id;
    damage(store, &pack, &five);
    fingerprint before = fingerprint_at(store, "b", 4);
    compact_to(store, 3, CKD_NO_PACKS);
    compact_to(store, 3, CKD_NO_PACKS);
    check_loads(store, &before);
    ckd_store_close(store);
}

/* Publishes the next generation of b@1, without this file. Returns the path of the generation before. */
static pathname publish_without(ckd_store *store, const ckd_id *file) {
    manifest m;
    bytes encoded = {0};
    ckd_checkpoint c = checkpoint_at(store, "b", 1);
    assert_int_equal(store_read_manifest(&m, store, "b", 1, c.generation, NULL), CKD_OK);
    for (size_t i = m.file_count; i-- > 0;) {
        if (id_equal(&m.files[i].id, file)) {
            memmove(&m.files[i], &m.files[i + 1], (m.file_count - i - 1) * sizeof(*m.files));
            m.file_count--;
        }
    }
    m.checkpoint.generation++;
    manifest_encode(&encoded, &store->id, &m);
    assert_false(encoded.failed);
    write_whole_file(path_manifest(store->path, "b", 1, m.checkpoint.generation).text, encoded.data,
                     encoded.size);
    bytes_free(&encoded);
    manifest_free(&m);
    return path_manifest(store->path, "b", 1, c.generation);
}

/*
 * A manifest without a new file, and without the one that has the short chains, as earlier versions published: its
 * files are read through before the generation before goes.
 */
static void test_rotten_duplicates_stay_unused(void **state) {
    ckd_store *store = store_create(*state);
    float *values[TENSORS];
    ckd_id pack = make_duplicates(store, values);
    save_branch(store, values, 1);
    ckd_id five = checkpoint_at(store, "gpt", 5).id, alone = own_file(store, "gpt", 5);
    pathname older = publish_without(store, &alone);
    damage(store, &pack, &five);
    for (int mended = 0; mended < 2; mended++) {
        ckd_store_close(store);
        store = store_reopen(*state, CKD_OPEN_WRITE);
        assert_int_equal(file_exists(older.text), !mended);
        damage(store, &pack, &five); /* the bit is as it was */
    }
    ckd_store_close(store);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        tempdir_test(test_short_chains_stay),
        tempdir_test(test_rotten_duplicates),
        tempdir_test(test_rotten_duplicates_of_a_new_base),
        tempdir_test(test_rotten_duplicates_stay_unused),
    };
    scratch_begin();
    int failed = cmocka_run_group_tests_name("compact_moved", tests, NULL, NULL);
    scratch_end();
    return failed;
}
