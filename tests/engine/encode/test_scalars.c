/*
 * Scalars that exist once per parameter, as in PyTorch's optimizers: exact saves put them into bundles if there are
 * many.
 */
#include <dirent.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "codec/chunk/chunk.h"
#include "tests/support/checkpoints.h"
#include "tests/support/compactions.h"
#include "tests/support/drift.h"
#include "tests/support/scenes.h"
#include "tests/support/tempdir.h"

enum {
    PARAMETERS = 1000,
    ALONE = 64,
    SIDE = 16,
    ELEMENTS = SIDE * SIDE,
    STEPS = 8,
    PACKED = 4 /* the newest four are not packed */
};
static const char run[] = "gpt";
static const char *const moments[2] = {"exp_avg", "exp_avg_sq"};

static const char *name_of(char name[96], unsigned parameter, const char *slot) {
    snprintf(name, 96, "optimizer.state.layers.%u.mlp.weight.%s", parameter, slot);
    return name;
}

/* One of a parameter's moments at a step. */
static const float *moment_of(const float *all, unsigned parameter, unsigned which, unsigned step) {
    return all + (2 * parameter + which + 7 * step) * ELEMENTS;
}

static float *make_values(void) {
    return random_values(CKD_F32, (uint64_t)(2 * PARAMETERS + 7 * STEPS) * ELEMENTS, 1);
}

/* own: each parameter has its own step number; otherwise all have the same, as is usual. */
static float step_of(unsigned parameter, unsigned step, bool own) {
    return (float)(60 + step) + (own ? (float)parameter / 8 : 0);
}

static void save_state(ckd_store *store, const char *to, unsigned step, unsigned parameters,
                       const float *values, bool own) {
    static const uint64_t shape[2] = {SIDE, SIDE};
    ckd_save *save = begin_save(store, to, step);
    char name[96];
    for (unsigned p = 0; p < parameters; p++) {
        for (unsigned which = 0; which < 2; which++) {
            add_tensor(save, name_of(name, p, moments[which]), CKD_F32, 2, shape, NULL,
                       moment_of(values, p, which, step));
        }
        float scalar = step_of(p, step, own);
        add_tensor(save, name_of(name, p, "step"), CKD_F32, 0, NULL, NULL, &scalar);
    }
    commit_save(save);
}

static void check_state(ckd_store *store, unsigned step, const float *values) {
    ckd_checkpoint c = checkpoint_at(store, run, step);
    ckd_load *load;
    char name[96];
    assert_int_equal(ckd_load_begin(&load, store, &c.id, NULL), CKD_OK);
    const ckd_tensor_list *list = ckd_load_tensors(load);
    assert_int_equal(list->count, 3 * PARAMETERS);
    for (unsigned p = 0; p < PARAMETERS; p++) {
        float got[ELEMENTS] = {0}, scalar = 0;
        ckd_load_request q = CKD_LOAD_REQUEST_INIT;
        /* In the order in which they were saved. */
        assert_string_equal(list->items[3 * p + 2].name, name_of(name, p, "step"));
        q.name = name;
        q.data = &scalar;
        q.size = sizeof(scalar);
        assert_int_equal(ckd_load_tensor(load, &q, NULL), CKD_OK);
        assert_true(scalar == step_of(p, step, step % 2));
        q.name = name_of(name, p, moments[p % 2]);
        q.data = got;
        q.size = sizeof(got);
        assert_int_equal(ckd_load_tensor(load, &q, NULL), CKD_OK);
        assert_memory_equal(got, moment_of(values, p, p % 2, step), sizeof(got));
    }
    ckd_load_end(load);
}

/* The records of all chunk files that are not in bundles, and the scalars among them. */
typedef struct standing {
    size_t records, scalars, bundles;
} standing;

static standing count_standing(const char *dir) {
    standing found = {0};
    char folder[2048];
    snprintf(folder, sizeof(folder), "%s", store_path_of(dir, "data/c"));
    DIR *d = opendir(folder);
    assert_non_null(d);
    for (struct dirent *e; (e = readdir(d));) {
        char path[4096];
        chunk *c;
        snprintf(path, sizeof(path), "%s/%s", folder, e->d_name);
        if (e->d_name[0] == '.') {
            continue;
        }
        assert_int_equal(chunk_open(&c, path, NULL), CKD_OK);
        found.records += c->outer_count;
        for (size_t i = 0; i < c->record_count; i++) {
            const record *r = &c->records[i];
            found.scalars += !r->bundle && r->tensor->ndim == 0 && r->kind == RECORD_BLOCK;
            found.bundles += r->bundle != NULL && (i == 0 || c->records[i - 1].bundle != r->bundle);
        }
        chunk_close(c);
    }
    closedir(d);
    return found;
}

/* Stored bytes per scalar. */
static double scalars_take(ckd_store *store, unsigned step) {
    ckd_checkpoint c = checkpoint_at(store, run, step);
    ckd_tensor_list *list;
    uint64_t sum = 0;
    assert_int_equal(ckd_store_tensors(&list, store, &c.id, NULL), CKD_OK);
    for (size_t i = 0; i < list->count; i++) {
        sum += list->items[i].ndim == 0 ? list->items[i].stored_bytes : 0;
    }
    ckd_tensor_list_free(list);
    return (double)sum / PARAMETERS;
}

static void test_many_scalars_share_records(void **state) {
    ckd_store *store = store_create(*state);
    float *values = make_values();
    for (unsigned step = 0; step < STEPS; step++) {
        save_state(store, run, step, PARAMETERS, values, step % 2);
        assert_true(scalars_take(store, step) < 60);
        check_state(store, step, values);
    }
    standing found = count_standing(*state);
    assert_int_equal(found.scalars, STEPS * ALONE);
    assert_in_range(found.records, STEPS * (2 * PARAMETERS + ALONE), STEPS * (2 * PARAMETERS + ALONE + 4));
    assert_int_equal(verify_damage(store), 0);
    free(values);
    ckd_store_close(store);
}

/* Old checkpoints are packed into one file, with all scalars in bundles. */
static void test_scalars_are_compacted(void **state) {
    ckd_store *store = store_create(*state);
    float *values = make_values();
    for (unsigned step = 0; step < STEPS; step++) {
        save_state(store, run, step, PARAMETERS, values, step % 2);
    }
    ckd_compact_options o = options_for(1);
    o.pack_below = UINT64_C(1) << 30;
    ckd_compaction_free(compact_with(store, &o));
    for (unsigned step = 0; step < STEPS; step++) {
        check_state(store, step, values);
        assert_true(scalars_take(store, step) < 60);
    }
    assert_int_equal(count_standing(*state).scalars, (STEPS - PACKED) * ALONE);
    assert_int_equal(verify_damage(store), 0);
    free(values);
    ckd_store_close(store);
}

/* A model of few tensors is stored without bundles: readers need not know them, and damage costs one tensor. */
static void test_few_scalars_stand_by_themselves(void **state) {
    ckd_store *store = store_create(*state);
    float *values = make_values();
    save_state(store, run, 0, ALONE, values, false);
    standing found = count_standing(*state);
    assert_int_equal(found.scalars, ALONE);
    assert_int_equal(found.records, 3 * ALONE);
    assert_int_equal(found.bundles, 0);
    free(values);
    ckd_store_close(store);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        tempdir_test(test_many_scalars_share_records),
        tempdir_test(test_scalars_are_compacted),
        tempdir_test(test_few_scalars_stand_by_themselves),
    };
    return cmocka_run_group_tests_name("scalars", tests, NULL, NULL);
}
