/*
 * Stores with bundles: loads give what was saved, tensors keep their order, and sizes add up. Damage to any byte of a
 * bundle is found and named, and never gives wrong values. Later saves are deltas.
 *
 * With the path of a store as its argument, the program is a tool that puts the small records of that store into
 * bundles. With "lossy" as a second argument it also adds measures.
 */
#include <dirent.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/error.h"
#include "codec/chunk/chunk.h"
#include "engine/store/paths.h"
#include "tests/support/bundled.h"
#include "tests/support/checkpoints.h"
#include "tests/support/level.h"
#include "tests/support/scenes.h"
#include "tests/support/tempdir.h"

enum { FIRST = 3, STEPS = 4, ROWS = 160 };

static scene scene_at(uint64_t step) {
    scene s = scene_of(step);
    s.rows = ROWS;
    return s;
}

/* Saves the first step by two ranks, then a chain. */
static void make_store(const char *dir) {
    ckd_store *store = store_create(dir);
    for (uint64_t step = FIRST; step < FIRST + STEPS; step++) {
        scene s = scene_at(step);
        ckd_status status =
            step == FIRST ? scene_save_ranks(NULL, store, &s, NULL) : scene_save(NULL, store, &s, NULL);
        assert_int_equal(status, CKD_OK);
    }
    ckd_store_close(store);
}

static int setup(void **state) {
    *state = tempdir_create();
    make_store(*state);
    bundle_store(store_path_of(*state, ""));
    return 0;
}

static void check_loads(ckd_store *store, uint64_t end) {
    for (uint64_t step = FIRST; step < end; step++) {
        scene s = scene_at(step);
        ckd_error err = {0};
        if (scene_load(store, &s, &err) != CKD_OK) {
            fail_msg("step %d: %s", (int)step, err.message);
        }
    }
}

static void test_loads(void **state) {
    for (int mode = CKD_OPEN_READ; mode <= CKD_OPEN_WRITE; mode++) {
        ckd_store *store = store_reopen(*state, mode);
        ckd_checkpoint c;
        assert_int_equal(ckd_store_find(&c, store, SCENE_RUN, FIRST, NULL), CKD_OK);
        assert_int_equal(c.generation, 1);
        check_loads(store, FIRST + STEPS);
        assert_int_equal(verify_damage(store), 0);
        ckd_store_close(store);
    }
}

static void test_saves_continue(void **state) {
    ckd_store *store = store_reopen(*state, CKD_OPEN_WRITE);
    scene s = scene_at(FIRST + STEPS);
    ckd_checkpoint c;
    assert_int_equal(scene_save(&c, store, &s, NULL), CKD_OK);
    assert_int_equal(c.kind, CKD_DELTA);
    check_loads(store, FIRST + STEPS + 1);
    ckd_store_close(store);
}

static ckd_tensor_list *tensors_of(ckd_store *store, uint64_t step) {
    ckd_checkpoint c;
    ckd_tensor_list *list;
    assert_int_equal(ckd_store_find(&c, store, SCENE_RUN, step, NULL), CKD_OK);
    assert_int_equal(ckd_store_tensors(&list, store, &c.id, NULL), CKD_OK);
    return list;
}

/* Tensors are listed in the order in which they were saved, although the file has large ones before the bundle. */
static void test_order_and_sizes(void **state) {
    static const char *const order[] = {"master.w", "w",     "exp_avg.w",   "embedding",      "tied",
                                        "count",    "empty", "exp_avg.net", "exp_avg_sq.net", "net"};
    char *plain_dir = tempdir_create();
    make_store(plain_dir);
    ckd_store *store = store_reopen(*state, CKD_OPEN_READ), *plain = store_reopen(plain_dir, CKD_OPEN_READ);
    for (uint64_t step = FIRST; step < FIRST + STEPS; step++) {
        ckd_tensor_list *list = tensors_of(store, step), *before = tensors_of(plain, step);
        ckd_checkpoint c, p;
        assert_int_equal(ckd_store_find(&c, store, SCENE_RUN, step, NULL), CKD_OK);
        assert_int_equal(ckd_store_find(&p, plain, SCENE_RUN, step, NULL), CKD_OK);
        assert_true(c.stored_bytes < p.stored_bytes - 500);
        assert_int_equal(list->count, sizeof(order) / sizeof(order[0]));
        uint64_t sum = 0;
        for (size_t i = 0; i < list->count; i++) {
            const ckd_tensor_info *t = &list->items[i], *b = &before->items[i];
            assert_string_equal(t->name, order[i]);
            assert_string_equal(t->method, b->method);
            assert_true(t->depth == b->depth && t->shards == b->shards && t->raw_bytes == b->raw_bytes);
            assert_true(t->stored_bytes > 0 && t->stored_bytes < b->stored_bytes);
            sum += t->stored_bytes;
        }
        assert_true(sum <= c.stored_bytes);
        ckd_tensor_list_free(list);
        ckd_tensor_list_free(before);
    }
    ckd_store_close(store);
    ckd_store_close(plain);
    tempdir_remove(plain_dir);
}

static void test_report_adds_up(void **state) {
    ckd_store *store = store_reopen(*state, CKD_OPEN_WRITE);
    ckd_report *r;
    assert_int_equal(ckd_store_report(&r, store, NULL), CKD_OK);
    uint64_t roles = 0;
    for (size_t i = 0; i < r->role_count; i++) {
        roles += r->by_role[i].stored_bytes;
    }
    assert_int_equal(roles, r->chunk_bytes);
    ckd_report_free(r);
    ckd_store_close(store);
}

/* ---- damage ---- */

/* The newest checkpoint's chunk file and its first bundle. */
typedef struct target {
    char path[4096];
    uint64_t size, offset; /* of the bundle; offset of its header */
    uint64_t master;       /* position of a byte in the payload of "master.w" */
    size_t bundled;        /* number of records in bundles */
} target;

static bool has_tensor_of(const chunk *c, const ckd_id *id) {
    return c->record_count && memcmp(&c->records[0].tensor->checkpoint, id, sizeof(*id)) == 0;
}

static target find_target(const char *dir, uint64_t step) {
    ckd_store *store = store_reopen(dir, CKD_OPEN_READ);
    ckd_checkpoint wanted;
    assert_int_equal(ckd_store_find(&wanted, store, SCENE_RUN, step, NULL), CKD_OK);
    ckd_store_close(store);
    target t = {.size = 0};
    char folder[2048];
    snprintf(folder, sizeof(folder), "%s", store_path_of(dir, "data/c"));
    DIR *d = opendir(folder);
    for (struct dirent *e; (e = readdir(d));) {
        char path[4096];
        chunk *c;
        snprintf(path, sizeof(path), "%s/%s", folder, e->d_name);
        if (e->d_name[0] == '.' || chunk_open(&c, path, NULL) != CKD_OK) {
            continue;
        }
        if (has_tensor_of(c, &wanted.id)) {
            memcpy(t.path, path, sizeof(t.path));
            t.size = c->size;
            for (size_t i = 0; i < c->record_count; i++) {
                const record *r = &c->records[i];
                t.bundled += r->bundle != NULL;
                if (r->bundle && strcmp(r->tensor->name, "master.w") == 0) {
                    t.offset = r->offset;
                    t.master = r->payload_offset + r->stored_size / 2;
                }
            }
        }
        chunk_close(c);
    }
    closedir(d);
    assert_true(t.offset > 0 && t.bundled > 3);
    return t;
}

static void flip(const target *t, uint64_t at) {
    FILE *f = fopen(t->path, "r+b");
    assert_non_null(f);
    assert_int_equal(fseek(f, (long)at, SEEK_SET), 0);
    int byte = fgetc(f);
    assert_int_equal(fseek(f, (long)at, SEEK_SET), 0);
    assert_int_equal(fputc(byte ^ 0x21, f), byte ^ 0x21);
    assert_int_equal(fclose(f), 0);
}

static ckd_verify_result *verify(ckd_store *store, bool quick) {
    ckd_verify_options o = CKD_VERIFY_OPTIONS_INIT;
    ckd_verify_result *result;
    o.quick = quick;
    assert_int_equal(ckd_store_verify(&result, store, &o, NULL), CKD_OK);
    return result;
}

/* How many tensors cannot be loaded; -1 if the checkpoint cannot. */
static int lost_tensors(ckd_store *store, uint64_t step) {
    ckd_checkpoint c;
    ckd_load *load;
    assert_int_equal(ckd_store_find(&c, store, SCENE_RUN, step, NULL), CKD_OK);
    if (ckd_load_begin(&load, store, &c.id, NULL) != CKD_OK) {
        return -1;
    }
    int lost = 0;
    const ckd_tensor_list *list = ckd_load_tensors(load);
    for (size_t i = 0; i < list->count; i++) {
        ckd_load_request q = CKD_LOAD_REQUEST_INIT;
        q.name = list->items[i].name;
        q.size = list->items[i].raw_bytes;
        q.data = malloc(q.size + 1);
        ckd_error err = {0};
        if (ckd_load_tensor(load, &q, &err) != CKD_OK) {
            assert_int_equal(err.status, CKD_E_CORRUPT);
            lost++;
        }
        free(q.data);
    }
    ckd_load_end(load);
    return lost;
}

/*
 * A payload in a bundle is damaged. The report names its tensor, those made from it, and all checkpoints that need it.
 * The rest loads.
 */
static void test_damage_of_a_payload(void **state) {
    target t = find_target(*state, FIRST + 1);
    flip(&t, t.master);
    ckd_store *store = store_reopen(*state, CKD_OPEN_READ);
    ckd_verify_result *result = verify(store, false);
    bool named = false;
    for (size_t i = 0; i < result->damage_count; i++) {
        const ckd_damage *d = &result->damage[i];
        assert_non_null(strstr(t.path, d->file));
        assert_int_equal(d->offset, t.offset);
        assert_true(strcmp(d->tensor, "master.w") == 0 || strcmp(d->tensor, "w") == 0);
        if (strcmp(d->tensor, "master.w") == 0) {
            named = true;
            assert_true(d->checkpoint_count >= 2); /* the checkpoint itself and deltas on it */
            assert_string_equal(d->checkpoints[0], "run@4");
            assert_non_null(strstr(d->what, "it holds master.w"));
            assert_int_not_equal(d->block, CKD_NO_OFFSET);
        }
    }
    assert_true(named);
    ckd_verify_result_free(result);
    assert_in_range(lost_tensors(store, FIRST + 1), 1, 2);
    assert_int_equal(lost_tensors(store, FIRST), 0);
    result = verify(store, true);
    assert_int_equal(result->damage_count, 1);
    assert_string_equal(result->damage[0].tensor, "");
    assert_int_equal(result->damage[0].offset, t.offset);
    assert_string_equal(result->damage[0].checkpoints[0], "run@4");
    assert_non_null(strstr(result->damage[0].what, "it holds master.w, "));
    ckd_verify_result_free(result);
    ckd_store_close(store);
}

/* Damage to any byte is found and the file is named. What still loads is right. */
static void test_damage_of_every_byte(void **state) {
    target t = find_target(*state, FIRST + 1);
    size_t step = under_sanitizer() ? 61 : test_stride(29, 7, 1), whole = 0;
    for (uint64_t at = test_first("bytes of a bundle", step) - 1; at < t.size; at += step) {
        flip(&t, at);
        ckd_store *store = store_reopen(*state, CKD_OPEN_READ);
        ckd_verify_result *result = verify(store, at % 2);
        if (result->damage_count == 0 || !strstr(t.path, result->damage[0].file)) {
            fail_msg("byte %d of %s", (int)at, t.path);
        }
        ckd_verify_result_free(result);
        for (uint64_t n = FIRST; n < FIRST + STEPS; n++) {
            scene s = scene_at(n);
            ckd_error err = {0};
            ckd_status status = scene_load(store, &s, &err);
            if (status != CKD_OK && status != CKD_E_CORRUPT) {
                fail_msg("byte %d: %d, %s %s", (int)at, (int)status, err.tensor, err.message);
            }
            whole += status == CKD_OK;
        }
        ckd_store_close(store);
        flip(&t, at);
    }
    assert_true(whole > 0);
    ckd_store *store = store_reopen(*state, CKD_OPEN_READ);
    assert_int_equal(verify_damage(store), 0);
    ckd_store_close(store);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, tempdir_teardown)

int main(int argc, char **argv) {
    if (argc > 1) {
        argc > 2 ? measure_store(argv[1]) : bundle_store(argv[1]);
        return 0;
    }
    const struct CMUnitTest tests[] = {
        TEST(test_loads),          TEST(test_saves_continue),      TEST(test_order_and_sizes),
        TEST(test_report_adds_up), TEST(test_damage_of_a_payload), TEST(test_damage_of_every_byte),
    };
    return cmocka_run_group_tests_name("bundled_store", tests, NULL, NULL);
}
