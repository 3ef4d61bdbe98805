/* Views: which of several records that are the same to readers they give. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "engine/store/view.h"
#include "tests/support/checkpoints.h"
#include "tests/support/scenes.h"
#include "tests/support/tempdir.h"

/* How many records both files have; each must be found in the first one. */
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

/* One file opened twice, in both orders: addresses cannot be ascending in both. */
static void test_first_file_counts(void **state) {
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
        chunk *const chunks[] = {order ? again : root->chunks[0], order ? root->chunks[0] : again};
        const uint32_t files[] = {0, 1};
        view *v;
        assert_int_equal(view_open_within(&v, root, &c.id, chunks, files, 2, NULL), CKD_OK);
        assert_int_equal(count_in_both(v), root->shared_count);
        view_close(v);
    }
    chunk_close(again);
    views_free(&cache);
    ckd_store_close(store);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        tempdir_test(test_first_file_counts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
