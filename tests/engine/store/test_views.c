/* Views: which of several equal records they use. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "engine/store/view.h"
#include "tests/support/checkpoints.h"
#include "tests/support/compactions.h"
#include "tests/support/scenes.h"
#include "tests/support/tempdir.h"

/* Counts the records that both files have. Each of them must be found in the first file. */
static size_t count_in_both(const view *v) {
    size_t count = 0;
    for (size_t i = 0; i + 1 < v->shared_count; i++) {
        const record *a = v->shared[i].record, *b = v->shared[i + 1].record;
        if (a->kind == b->kind && hash128_equal(&a->content, &b->content)) {
            const view_block *found = view_find_shared(v, (record_kind)a->kind, &a->content);
            assert_ptr_equal(found->chunk, v->chunks[0]);
            assert_int_equal(found->file, 0);
            count++;
        }
    }
    return count;
}

/* One file is opened twice, in both orders, so that the result cannot depend on addresses. */
static void test_first_file_is_used(void **state) {
    ckd_checkpoint c;
    view_cache cache;
    const view *root;
    chunk *again;
    scene_make(*state, 0, 3);
    ckd_store *store = store_reopen(*state, CKD_OPEN_READ);
    assert_int_equal(ckd_store_find(&c, store, SCENE_RUN, 2, NULL), CKD_OK);
    views_init(&cache, store);
    assert_int_equal(views_get(&root, &cache, &c.id, NULL), CKD_OK);
    assert_true(root->shared_count > 0);
    assert_int_equal(view_open_chunk(&again, store, &root->manifest.files[0], &c, NULL), CKD_OK);
    for (int order = 0; order < 2; order++) {
        chunk *chunks[] = {order ? again : root->chunks[0], order ? root->chunks[0] : again};
        uint32_t numbers[] = {0, 1};
        view *v;
        const view_files files = {.chunks = chunks, .numbers = numbers, .count = 2};
        assert_int_equal(view_open_within(&v, root, &c.id, &files, NULL), CKD_OK);
        assert_int_equal(count_in_both(v), root->shared_count);
        view_close(v);
    }
    chunk_close(again);
    views_free(&cache);
    ckd_store_close(store);
}

/* Views of few checkpoints with very many blocks take as much memory as those of many checkpoints. */
static void test_many_views(void **state) {
    view_cache cache;
    ckd_checkpoint c;
    const view *v;
    size_t blocks = 0;
    scene_make(*state, 0, 3);
    ckd_store *store = store_reopen(*state, CKD_OPEN_READ);
    views_init(&cache, store);
    for (uint64_t step = 0; step < 3; step++) {
        assert_int_equal(ckd_store_find(&c, store, SCENE_RUN, step, NULL), CKD_OK);
        assert_int_equal(views_get(&v, &cache, &c.id, NULL), CKD_OK);
        assert_int_equal(closure_visit(&cache, v, NULL, NULL, NULL), CKD_OK);
    }
    assert_true(cache.count > 3); /* those within the roots, too */
    for (size_t i = 0; i < cache.count; i++) {
        blocks += cache.views[i]->block_count + cache.views[i]->blob_count;
    }
    assert_int_equal(cache.block_count, blocks);
    assert_false(views_are_many(&cache, cache.count));
    assert_true(views_are_many(&cache, cache.count - 1));
    cache.block_count = 1000000;
    assert_true(views_are_many(&cache, cache.count));
    views_free(&cache);
    ckd_store_close(store);
}

/* Neighbours of one shape have the same geometry, and all have the right one. */
static void test_shapes(void **state) {
    enum { TENSORS = 40 };
    ckd_checkpoint c;
    ckd_save_options o = CKD_SAVE_OPTIONS_INIT;
    ckd_save *save;
    view_cache cache;
    const view *v;
    float values[64] = {0};
    ckd_store *store = store_create(*state);
    o.run = "run";
    assert_int_equal(ckd_save_begin(&save, store, &o, NULL), CKD_OK);
    for (uint64_t i = 0; i < TENSORS; i++) {
        char name[16];
        uint64_t shape[2] = {i % 3 + 1, i < 20 ? 4 : i % 16 + 1};
        ckd_tensor t = CKD_TENSOR_INIT;
        snprintf(name, sizeof(name), "t%02u", (unsigned)i);
        t.name = name;
        t.dtype = CKD_F32;
        t.ndim = 2;
        t.shape = shape;
        t.data = values;
        assert_int_equal(ckd_save_tensor(save, &t, NULL), CKD_OK);
    }
    assert_int_equal(ckd_save_commit(&c, save, NULL), CKD_OK);
    views_init(&cache, store);
    assert_int_equal(views_get(&v, &cache, &c.id, NULL), CKD_OK);
    assert_int_equal(v->tensor_count, TENSORS);
    for (size_t i = 0; i < TENSORS; i++) {
        const view_tensor *t = &v->tensors[i];
        geometry g;
        assert_true(geometry_init(&g, t->tensor->ndim, t->tensor->shape));
        assert_true(t->shape->ndim == g.ndim && t->shape->elements == g.elements);
        assert_memory_equal(t->shape->shape, g.shape, sizeof(g.shape));
        assert_memory_equal(t->shape->strides, g.strides, sizeof(g.strides));
        if (i >= 3 && i < 20) {
            assert_ptr_equal(t->shape, v->tensors[i - 3].shape);
        }
    }
    views_free(&cache);
    ckd_store_close(store);
}

/* ---- a block with two records, one of which builds on a missing file ---- */

/* A chain 0 <- 1 <- 2 <- 3 where step 2 was rewritten to build on step 0. Its old file still exists. */
typedef struct rewritten {
    ckd_store *store;
    view_cache cache;
    manifest top;            /* manifest of step 3, which names all four original files */
    file_ref base, was, now; /* file of step 0; old and new file of step 2 */
} rewritten;

static void read_manifest(manifest *out, ckd_store *store, uint64_t step) {
    ckd_checkpoint c;
    assert_int_equal(ckd_store_find(&c, store, "chain", step, NULL), CKD_OK);
    assert_int_equal(store_read_manifest(out, store, c.run, c.step, c.generation, NULL), CKD_OK);
}

static file_ref own_file(ckd_store *store, uint64_t step) {
    manifest m;
    read_manifest(&m, store, step);
    assert_int_equal(m.own_count, 1);
    file_ref file = m.files[0];
    manifest_free(&m);
    return file;
}

typedef struct kept_file {
    pathname path;
    unsigned char *data;
    size_t size;
} kept_file;

static kept_file take_file(const ckd_store *store, const ckd_id *id) {
    kept_file f = {.path = path_chunk(store->path, id, "")};
    f.data = read_whole_file(f.path.text, &f.size);
    return f;
}

static void put_back(kept_file *f) {
    write_whole_file(f->path.text, f->data, f->size);
    free(f->data);
}

static void make_rewritten(rewritten *x, const char *dir) {
    x->store = store_create(dir);
    make_chain(x->store, "chain", CKD_EXACT, 0, 4);
    read_manifest(&x->top, x->store, 3);
    assert_int_equal(x->top.file_count, 4);
    x->base = own_file(x->store, 0);
    x->was = own_file(x->store, 2);
    kept_file two = take_file(x->store, &x->was.id), three = take_file(x->store, &x->top.files[0].id);
    ckd_compact_options o = options_for(1);
    ckd_compaction_free(compact_with(x->store, &o));
    x->now = own_file(x->store, 2);
    assert_false(id_equal(&x->was.id, &x->now.id));
    put_back(&two);
    put_back(&three);
    views_init(&x->cache, x->store);
}

static void free_rewritten(rewritten *x) {
    views_free(&x->cache);
    manifest_free(&x->top);
    ckd_store_close(x->store);
}

/*
 * The status of everything that step 3 builds on, if its manifest named its own file and `files`. *named: the files it
 * needs.
 */
static ckd_status closure_of(rewritten *x, const file_ref *const *files, size_t count, manifest *named) {
    manifest wide = {.checkpoint = x->top.checkpoint}, copy;
    const view *draft;
    for (size_t pass = 0; pass < 2; pass++) {
        manifest *m = pass ? &copy : &wide;
        *m = (manifest){.checkpoint = x->top.checkpoint, .own_count = 1};
        assert_int_equal(manifest_add_files(m, x->top.files, 1, NULL), CKD_OK);
        for (size_t i = 0; i < count; i++) {
            assert_int_equal(manifest_add_files(m, files[i], 1, NULL), CKD_OK);
        }
    }
    assert_int_equal(views_add(&draft, &x->cache, &wide, NULL), CKD_OK);
    ckd_status status = closure_prove_files(&copy, &x->cache, draft, NULL);
    *named = copy;
    return status;
}

/* Without the file of step 1, the first record of a block of step 2 is incomplete, so the other record is used. */
static void test_first_complete_record_is_used(void **state) {
    rewritten x;
    make_rewritten(&x, *state);
    const file_ref *const without[] = {&x.was, &x.base};
    const file_ref *const both[] = {&x.was, &x.now, &x.base};
    manifest named;
    assert_int_equal(closure_of(&x, without, 2, &named), CKD_E_CORRUPT);
    manifest_free(&named);
    assert_int_equal(closure_of(&x, both, 3, &named), CKD_OK);
    bool was = false, now = false;
    for (size_t i = 1; i < named.file_count; i++) {
        was = was || id_equal(&named.files[i].id, &x.was.id);
        now = now || id_equal(&named.files[i].id, &x.now.id);
    }
    assert_false(was);
    assert_true(now);
    manifest_free(&named);
    free_rewritten(&x);
}

/* If both records are complete, the one in the first file is used. */
static void test_first_file_of_complete_records_is_used(void **state) {
    rewritten x;
    make_rewritten(&x, *state);
    const file_ref *files[] = {&x.now, &x.was, NULL, NULL};
    for (size_t i = 1; i < x.top.file_count; i++) {
        bool base = id_equal(&x.top.files[i].id, &x.base.id), was = id_equal(&x.top.files[i].id, &x.was.id);
        files[2] = base ? &x.top.files[i] : files[2];
        files[3] = !base && !was ? &x.top.files[i] : files[3]; /* of step 1 */
    }
    assert_non_null(files[3]);
    manifest named;
    for (size_t order = 0; order < 2; order++) {
        files[0] = order ? &x.was : &x.now;
        files[1] = order ? &x.now : &x.was;
        assert_int_equal(closure_of(&x, files, 4, &named), CKD_OK);
        assert_true(named.file_count > 1);
        assert_true(id_equal(&named.files[1].id, &files[0]->id));
        manifest_free(&named);
    }
    free_rewritten(&x);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        tempdir_test(test_first_file_is_used),
        tempdir_test(test_many_views),
        tempdir_test(test_shapes),
        tempdir_test(test_first_complete_record_is_used),
        tempdir_test(test_first_file_of_complete_records_is_used),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
