/*
 * Stores that changed since they were closed: damaged manifests that block a name, the last generation, paths that are
 * too long, and catalogs of another time. Also the outputs of failing calls, and calls that look at whole checkpoints.
 */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/file.h"
#include "engine/store/handle.h"
#include "tests/support/checkpoints.h"
#include "tests/support/tempdir.h"

enum { N = 4096 };
static const uint64_t shape_n = N;

/* ---- names that are taken ---- */

static void store_path(char out[2048], const char *dir, const char *relative) {
    snprintf(out, 2048, "%s/store/%s", dir, relative);
}

static void damage(const char *path) {
    FILE *f = fopen(path, "r+b");
    assert_non_null(f);
    fseek(f, 40, SEEK_SET);
    int byte = fgetc(f);
    fseek(f, 40, SEEK_SET);
    fputc(byte ^ 1, f);
    fclose(f);
}

/* Damages a manifest and deletes the catalog, which knew its checkpoint. */
static ckd_store *reopen_with_damaged_manifest(const char *dir, const char *damaged) {
    char path[2048];
    store_path(path, dir, damaged);
    damage(path);
    store_path(path, dir, "catalog.db");
    assert_int_equal(unlink(path), 0);
    return store_reopen(dir, CKD_OPEN_WRITE);
}

static void test_damaged_manifest_blocks_its_name(void **state) {
    ckd_store *store = store_create(*state);
    float *values = random_values(CKD_F32, N, 1);
    for (uint64_t step = 1; step < 3; step++) {
        save_one(store, "run", step, "t", CKD_F32, 1, &shape_n, values);
    }
    ckd_store_close(store);
    store = reopen_with_damaged_manifest(*state, "data/m/run.2.0");
    ckd_save_options o = options_of("run", 2);
    ckd_save *save;
    for (int same_ok = 0; same_ok < 2; same_ok++) {
        ckd_error err;
        o.on_duplicate = same_ok ? CKD_DUPLICATE_SAME_OK : CKD_DUPLICATE_ERROR;
        assert_int_equal(ckd_save_begin(&save, store, &o, &err), CKD_E_CORRUPT);
        assert_null(save);
        assert_non_null(strstr(err.file, "data/m/run.2.0"));
        assert_non_null(strstr(err.message, "remove it"));
        assert_non_null(strstr(err.message, "branch"));
    }
    o.on_duplicate = CKD_DUPLICATE_BRANCH;
    static const struct {
        uint64_t step;
        const char *run;
    } expected[] = {{2, "run~2"}, {3, "run~2"}, {3, "run~3"}};
    for (size_t i = 0; i < 3; i++) {
        o.step = expected[i].step;
        save = begin_with(store, &o);
        add_tensor(save, "t", CKD_F32, 1, &shape_n, NULL, values);
        ckd_checkpoint info;
        assert_int_equal(ckd_save_commit(&info, save, NULL), CKD_OK);
        assert_string_equal(info.run, expected[i].run);
    }
    free(values);
    ckd_store_close(store);
}

/* A branch's name counts as taken if a manifest has it, whether or not the catalog knows that checkpoint. */
static void test_damaged_manifest_blocks_its_branch(void **state) {
    ckd_store *store = store_create(*state);
    float *values = random_values(CKD_F32, N, 1);
    ckd_save_options o = options_of("run", 5);
    o.on_duplicate = CKD_DUPLICATE_BRANCH;
    static const char *const expected[] = {"run", "run~2", "run~3"};
    for (int i = 0; i < 3; i++) {
        if (i == 2) {
            ckd_store_close(store);
            store = reopen_with_damaged_manifest(*state, "data/m/run~2.5.0");
        }
        ckd_save *save = begin_with(store, &o);
        add_tensor(save, "t", CKD_F32, 1, &shape_n, NULL, values);
        ckd_checkpoint info;
        assert_int_equal(ckd_save_commit(&info, save, NULL), CKD_OK);
        assert_string_equal(info.run, expected[i]);
    }
    free(values);
    ckd_store_close(store);
}

/* After the last generation, a step cannot be saved again. Tombstones count too. */
static void test_last_generation(void **state) {
    ckd_store *store = store_create(*state);
    float *values = random_values(CKD_F32, N, 1);
    char path[2048];
    ckd_save_options o = options_of("run", 1);
    static const char *const tombstones[] = {"data/t/run.1.4294967295", "data/t/run.1.7"};
    for (int i = 0; i < 2; i++) { /* only the names of tombstones matter */
        store_path(path, *state, tombstones[i]);
        FILE *f = fopen(path, "w");
        assert_non_null(f);
        fclose(f);
    }
    ckd_save *save;
    ckd_error err;
    assert_int_equal(ckd_save_begin(&save, store, &o, &err), CKD_E_INVALID);
    assert_non_null(strstr(err.message, "generation"));
    assert_int_equal(unlink(path), 0);
    assert_int_equal(ckd_save_begin(&save, store, &o, &err), CKD_E_INVALID);
    store_path(path, *state, "data/t/run.1.4294967294");
    char last[2048];
    store_path(last, *state, tombstones[0]);
    assert_int_equal(rename(last, path), 0);
    save = begin_with(store, &o);
    add_tensor(save, "t", CKD_F32, 1, &shape_n, NULL, values);
    ckd_checkpoint info;
    assert_int_equal(ckd_save_commit(&info, save, NULL), CKD_OK);
    assert_true(info.generation == UINT32_MAX);
    free(values);
    ckd_store_close(store);
}

static void test_same_ok_is_for_one_rank(void **state) {
    ckd_store *store = store_create(*state);
    ckd_save_options o = options_of("run", 1);
    o.on_duplicate = CKD_DUPLICATE_SAME_OK;
    assert_int_equal(ckd_id_new(&o.checkpoint_id, NULL), CKD_OK);
    ckd_error err;
    ckd_save *save;
    o.world = 2;
    assert_int_equal(ckd_save_begin(&save, store, &o, &err), CKD_E_INVALID);
    assert_non_null(strstr(err.message, "SAME_OK"));
    assert_null(save);
    o.world = 1;
    ckd_save_abort(begin_with(store, &o));
    o.on_duplicate = (ckd_on_duplicate)3;
    assert_int_equal(ckd_save_begin(&save, store, &o, &err), CKD_E_INVALID);
    ckd_store_close(store);
}

/* ---- long paths ---- */

/* Writes the path DIR/ppp.../ppp... of `length` bytes to `out`, and makes all folders but the last. */
static void deep_path(char *out, const char *dir, size_t length) {
    size_t at = (size_t)sprintf(out, "%s", dir);
    while (at + 1 < length) {
        size_t name = length - at - 1 > 100 ? 50 : length - at - 1;
        if (at > strlen(dir)) {
            assert_int_equal(mkdir(out, 0777), 0);
        }
        out[at++] = '/';
        memset(out + at, 'p', name);
        at += name;
        out[at] = '\0';
    }
    assert_int_equal(strlen(out), length);
}

typedef struct message_log {
    size_t count;
    char last[1024];
} message_log;

static void keep_message(void *context, const char *message) {
    message_log *h = context;
    h->count++;
    snprintf(h->last, sizeof(h->last), "%s", message);
}

/*
 * A store's path may have 493 bytes. Longer ones are refused for writing, because SQLite cannot open them, but can
 * still be read.
 */
static void test_the_longest_path(void **state) {
    char *dir = realpath(*state, NULL), path[2048], longer[2049];
    assert_non_null(dir);
    message_log messages = {0};
    ckd_store_options o = CKD_STORE_OPTIONS_INIT;
    o.on_message = keep_message;
    o.message_context = &messages;
    deep_path(path, dir, 493);
    ckd_store *store;
    ckd_error err;
    uint64_t one = 1;
    float value = 1;
    assert_int_equal(ckd_store_open(&store, path, CKD_OPEN_CREATE, &o, &err), CKD_OK);
    save_one(store, "run", 1, "t", CKD_F32, 1, &one, &value);
    save_one(store, "run", 2, "t", CKD_F32, 1, &one, &value);
    ckd_store_close(store);
    assert_int_equal(messages.count, 0); /* the catalog could be opened */
    snprintf(longer, sizeof(longer), "%sp", path);
    for (int mode = CKD_OPEN_WRITE; mode <= CKD_OPEN_CREATE; mode++) {
        assert_int_equal(ckd_store_open(&store, longer, (ckd_open_mode)mode, &o, &err), CKD_E_INVALID);
        assert_null(store);
        assert_non_null(strstr(err.message, "493"));
    }
    assert_int_equal(access(longer, F_OK), -1); /* nothing was created */
    strcat(longer, "/");
    assert_int_equal(ckd_store_open(&store, longer, CKD_OPEN_CREATE, &o, &err), CKD_E_INVALID);
    longer[strlen(longer) - 1] = '\0';
    assert_int_equal(rename(path, longer), 0);
    assert_int_equal(ckd_store_open(&store, longer, CKD_OPEN_WRITE, &o, &err), CKD_E_INVALID);
    assert_int_equal(ckd_store_rebuild(NULL, longer, &o, &err), CKD_E_INVALID);
    assert_int_equal(ckd_store_open(&store, longer, CKD_OPEN_READ, &o, &err), CKD_OK);
    ckd_checkpoint found;
    assert_int_equal(ckd_store_find(&found, store, "run", CKD_LATEST, &err), CKD_OK);
    assert_int_equal(found.step, 2);
    ckd_store_close(store);
    /* Neither a short link nor a relative path makes SQLite accept it. */
    char link_path[2048], before[4096];
    snprintf(link_path, sizeof(link_path), "%s/link", dir);
    assert_int_equal(symlink(longer, link_path), 0);
    assert_int_equal(ckd_store_open(&store, link_path, CKD_OPEN_WRITE, &o, &err), CKD_E_INVALID);
    assert_non_null(getcwd(before, sizeof(before)));
    *strrchr(path, '/') = '\0';
    assert_int_equal(chdir(path), 0);
    assert_int_equal(ckd_store_open(&store, strrchr(longer, '/') + 1, CKD_OPEN_WRITE, &o, &err),
                     CKD_E_INVALID);
    assert_int_equal(ckd_store_open(&store, "new", CKD_OPEN_CREATE, &o, &err), CKD_OK);
    ckd_store_close(store);
    assert_int_equal(chdir(before), 0);
    free(dir);
}

/* ---- catalogs of another time ---- */

static void copy_file(const char *from, const char *to) {
    char command[8192];
    snprintf(command, sizeof(command), "cp '%s' '%s'", from, to);
    assert_int_equal(system(command), 0);
}

static ckd_status read_store_id(ckd_id *out, const char *dir) {
    char path[2048];
    store_path(path, dir, "data/store");
    bytes data = {0};
    store_identity identity = {0};
    ckd_status status = file_read_all(&data, path, 4096, NULL);
    if (status == CKD_OK) {
        status = store_identity_decode(&identity, data.data, data.size, path, NULL);
    }
    *out = identity.id;
    bytes_free(&data);
    return status;
}

static void expect_newest(ckd_store *store, const ckd_checkpoint *expected, const float *values) {
    ckd_checkpoint found;
    assert_int_equal(ckd_store_find(&found, store, "run", CKD_LATEST, NULL), CKD_OK);
    assert_memory_equal(&found.id, &expected->id, sizeof(found.id));
    float *back = load_whole(store, "run", 1, "t", N * 4);
    assert_memory_equal(back, values, N * 4);
    free(back);
}

/*
 * The manifest of run@1 was removed and the step saved again. An old catalog has the right names but the wrong
 * checkpoint, and is not used.
 */
static void test_old_catalog_is_not_used(void **state) {
    char catalog_path[2048], old[2048], first[2048];
    store_path(catalog_path, *state, "catalog.db");
    store_path(old, *state, "data/old-catalog");
    store_path(first, *state, "data/m/run.1.0");
    ckd_store *store = store_create(*state);
    float *values = random_values(CKD_F32, N, 1);
    save_one(store, "run", 1, "t", CKD_F32, 1, &shape_n, values);
    ckd_store_close(store);
    copy_file(catalog_path, old);
    assert_int_equal(unlink(first), 0);
    assert_int_equal(unlink(catalog_path),
                     0); /* nobody knows of the first one, so its generation is used again */
    change_values(CKD_F32, values, N, 3);
    store = store_reopen(*state, CKD_OPEN_WRITE);
    ckd_checkpoint second = save_one(store, "run", 1, "t", CKD_F32, 1, &shape_n, values);
    assert_int_equal(second.generation, 0);
    ckd_store_close(store);

    ckd_store *reading = store_reopen(*state, CKD_OPEN_READ), *writing = store_reopen(*state, CKD_OPEN_WRITE);
    expect_newest(reading, &second, values);
    expect_newest(writing, &second, values);
    char swapped[2048]; /* replaced while both handles are open */
    store_path(swapped, *state, "swapped");
    copy_file(old, swapped);
    assert_int_equal(rename(swapped, catalog_path), 0);
    expect_newest(reading, &second, values);
    expect_newest(writing, &second, values);
    ckd_store_close(reading);
    ckd_store_close(writing);

    store = store_reopen(*state, CKD_OPEN_READ);
    expect_newest(store, &second, values);
    ckd_store_close(store);
    store = store_reopen(*state, CKD_OPEN_WRITE); /* repairs the catalog */
    expect_newest(store, &second, values);
    ckd_store_close(store);
    ckd_id any = {{0}};
    catalog *mended;
    ckd_checkpoint row;
    assert_int_equal(read_store_id(&any, *state), CKD_OK);
    assert_int_equal(catalog_open(&mended, catalog_path, CATALOG_READ, &any, 1000, NULL), CKD_OK);
    assert_int_equal(catalog_find(&row, mended, "run", 1, NULL), CKD_OK);
    assert_memory_equal(&row.id, &second.id, sizeof(row.id));
    catalog_close(mended);
    free(values);
}

/* ---- outputs of failing calls ---- */

static int fail_one_step(void *context, file_op step, const char *path) {
    (void)step;
    (void)path;
    long *left = context;
    return (*left)-- == 0 ? EIO : 0;
}

/* A rebuild that fails at any step returns zeros. */
static void test_a_failed_rebuild_gives_no_result(void **state) {
    ckd_store *store = store_create(*state);
    float *values = random_values(CKD_F32, N, 1);
    for (uint64_t step = 1; step < 4; step++) {
        save_one(store, "run", step, "t", CKD_F32, 1, &shape_n, values);
    }
    ckd_store_close(store);
    free(values);
    char path[2048];
    store_path(path, *state, "data/m/run.2.0");
    damage(path);
    store_path(path, *state, "");
    static const ckd_rebuild_result none;
    size_t failures = 0;
    for (long at = 0;; at++) {
        ckd_rebuild_result result = {77, 77};
        long left = at;
        file_set_fault_hook(fail_one_step, &left);
        ckd_status status = ckd_store_rebuild(&result, path, NULL, NULL);
        file_set_fault_hook(NULL, NULL);
        if (status != CKD_OK) {
            assert_memory_equal(&result, &none, sizeof(none));
            failures++;
        } else if (left >= 0) { /* no step failed this time */
            assert_int_equal(result.checkpoints, 2);
            assert_int_equal(result.skipped, 1);
            break;
        }
    }
    assert_true(failures > 10);
}

/* ---- comparing checkpoints ---- */

/* Tensors are matched by name, in whatever order they were saved. */
static void test_a_comparison_finds_every_tensor(void **state) {
    enum { TENSORS = 200 };
    ckd_store *store = store_create(*state);
    uint64_t n = 4;
    ckd_checkpoint infos[2];
    for (unsigned step = 0; step < 2; step++) {
        ckd_save *save = begin_save(store, "run", step);
        for (unsigned i = 0; i < TENSORS; i++) {
            char name[32];
            /* layer.0 is only in the first checkpoint, layer.200 only in the second. */
            unsigned t = step ? TENSORS - i : i;
            float values[4] = {1, 2, 3, (float)t + (t % 3 == 0 && step ? 1.0f : 0.0f)};
            snprintf(name, sizeof(name), "layer.%u", t);
            add_tensor(save, name, CKD_F32, 1, &n, NULL, values);
        }
        assert_int_equal(ckd_save_commit(&infos[step], save, NULL), CKD_OK);
    }
    ckd_diff *diff;
    ckd_diff_options no_size = {0};
    assert_int_equal(ckd_store_diff(&diff, store, &infos[0].id, &infos[1].id, &no_size, NULL), CKD_E_INVALID);
    assert_null(diff);
    assert_int_equal(ckd_store_diff(&diff, store, &infos[0].id, &infos[1].id, NULL, NULL), CKD_OK);
    assert_int_equal(diff->count, TENSORS + 1);
    for (unsigned i = 0; i <= TENSORS; i++) {
        const ckd_tensor_diff *d = &diff->items[i];
        char name[32];
        /* The order of the first, then what only the second has. */
        snprintf(name, sizeof(name), "layer.%u", i);
        assert_string_equal(d->name, name);
        bool both = i > 0 && i < TENSORS;
        assert_int_equal(d->comparable, both);
        assert_string_equal(d->why, both ? "" : i ? "only in B" : "only in A");
        assert_int_equal(d->changed, both && i % 3 == 0);
        assert_true(d->max_diff == (both && i % 3 == 0 ? 1.0 : 0.0));
    }
    ckd_diff_free(diff);
    ckd_store_close(store);
}

/* ---- well-formed manifests that do not match their files ---- */

static void forge_manifest(const char *dir, const manifest *m) {
    char path[2048];
    bytes data = {0};
    ckd_store *store = store_reopen(dir, CKD_OPEN_READ);
    manifest_encode(&data, &store->id, m);
    assert_false(data.failed);
    pathname p = path_manifest(store->path, m->checkpoint.run, m->checkpoint.step, 0);
    ckd_store_close(store);
    FILE *f = fopen(p.text, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(data.data, 1, data.size, f), data.size);
    fclose(f);
    bytes_free(&data);
    store_path(path, dir, "catalog.db");
    unlink(path); /* it knows the right checkpoint */
}

/* A manifest that contradicts its chunk files in its id or its number of tensors is reported as damaged. */
static void test_manifests_of_other_files(void **state) {
    ckd_store *store = store_create(*state);
    float *values = random_values(CKD_F32, N, 1);
    save_one(store, "run", 1, "w", CKD_F32, 1, &shape_n, values);
    manifest m;
    assert_int_equal(store_read_manifest(&m, store, "run", 1, 0, NULL), CKD_OK);
    ckd_store_close(store);
    const ckd_checkpoint right = m.checkpoint;
    const size_t roles = m.role_count, files = m.file_count;
    for (int kind = 0; kind < 7; kind++) {
        m.checkpoint = right;
        m.role_count = roles;
        m.checkpoint.id.bytes[3] ^= kind == 0 || kind >= 5;
        m.checkpoint.tensors += kind == 1;
        m.checkpoint.raw_bytes -= kind == 2;
        if (kind >=
            4) { /* the manifest names no tensors; with another id, it looks like an empty checkpoint's */
            m.checkpoint.tensors = m.checkpoint.raw_bytes = m.role_count = 0;
        }
        m.own_count = m.file_count = kind == 6 ? 0 : files;
        forge_manifest(*state, &m);
        store = store_reopen(*state, CKD_OPEN_READ);
        ckd_load *load;
        ckd_error err = {0};
        ckd_status status = ckd_load_begin(&load, store, &m.checkpoint.id, &err);
        bool damaged = kind < 2 || kind >= 4; /* the number of raw bytes is only informational */
        assert_int_equal(status, damaged ? CKD_E_CORRUPT : CKD_OK);
        if (damaged) {
            assert_non_null(strstr(err.message, "its chunk files hold"));
            assert_non_null(strstr(err.file, "run.1.0"));
        }
        ckd_load_end(load);
        assert_int_equal(verify_damage(store) > 0, damaged);
        ckd_store_close(store);
    }
    manifest_free(&m);
    free(values);
}

static void check_empty(const char *dir, unsigned step) {
    ckd_load *load;
    ckd_checkpoint c;
    ckd_error err = {0};
    ckd_store *store = store_reopen(dir, CKD_OPEN_READ);
    assert_int_equal(ckd_store_find(&c, store, "run", step, &err), CKD_OK);
    assert_int_equal(ckd_load_begin(&load, store, &c.id, &err), CKD_OK);
    assert_int_equal(ckd_load_tensors(load)->count, 0);
    ckd_load_end(load);
    assert_int_equal(verify_damage(store), 0);
    ckd_store_close(store);
}

/*
 * A checkpoint without tensors is valid. A compaction that packs its neighbours leaves it alone, and a repair restores
 * it.
 */
static void test_an_empty_checkpoint(void **state) {
    enum { STEPS = 12, EMPTY = 2 };
    char path[2048];
    ckd_error err = {0};
    ckd_store *store = store_create(*state);
    float *values = random_values(CKD_F32, N, 1);
    for (unsigned step = 0; step < STEPS; step++) {
        ckd_save *save = begin_save(store, "run", step);
        if (step != EMPTY) {
            values[0] = (float)step;
            add_tensor(save, "w", CKD_F32, 1, &shape_n, NULL, values);
        }
        assert_int_equal(ckd_save_commit(NULL, save, &err), CKD_OK);
    }
    check_empty(*state, EMPTY);
    ckd_compact_options o = CKD_COMPACT_OPTIONS_INIT;
    ckd_compaction *c;
    o.pack_below = 1 << 20;
    assert_int_equal(ckd_compact(&c, store, &o, &err), CKD_OK);
    assert_int_equal(c->count, STEPS - 5); /* all except the newest four and the empty one */
    assert_int_equal(c->left, 0);
    ckd_compaction_free(c);
    ckd_store_close(store);
    check_empty(*state, EMPTY);

    store_path(path, *state, "data/m/run.2.0");
    assert_int_equal(unlink(path), 0);
    store = store_reopen(*state, CKD_OPEN_WRITE);
    assert_int_equal(verify_damage(store), 2); /* the manifest is missing, and no manifest names the file */
    ckd_repair_result *r;
    assert_int_equal(ckd_store_repair(&r, store, NULL, &err), CKD_OK);
    assert_int_equal(r->repaired_count, 1);
    ckd_repair_result_free(r);
    ckd_store_close(store);
    check_empty(*state, EMPTY);
    free(values);
}

#define TEST(name) tempdir_test(name)

/*
 * Somebody has put another store in place of one that a writer has open. The writer's save fails, as nobody could read
 * it, and the new store stays as it is.
 */
static void test_a_store_is_replaced(void **state) {
    char path[2048], old[2048];
    ckd_error err = {0};
    store_path(path, *state, "");
    snprintf(old, sizeof(old), "%s/old", (char *)*state);
    ckd_store *writer = store_create(*state);
    uint64_t n = 4;
    float values[4] = {1, 2, 3, 4};
    ckd_save *save = begin_save(writer, "run", 1);
    add_tensor(save, "w", CKD_F32, 1, &n, NULL, values);
    assert_int_equal(rename(path, old), 0);
    ckd_store *other = store_create(*state);
    ckd_save *saved = begin_save(other, "run", 2);
    add_tensor(saved, "w", CKD_F32, 1, &n, NULL, values);
    assert_int_equal(ckd_save_commit(NULL, saved, NULL), CKD_OK);
    assert_int_not_equal(ckd_save_commit(NULL, save, NULL), CKD_OK);
    ckd_save_options o = CKD_SAVE_OPTIONS_INIT;
    o.run = "run";
    o.step = 3;
    assert_int_equal(ckd_save_begin(&save, writer, &o, &err), CKD_E_STATE);
    assert_non_null(strstr(err.message, "was replaced while it was open"));
    ckd_verify_result *found;
    assert_int_equal(ckd_store_verify(&found, other, NULL, NULL), CKD_OK);
    assert_int_equal(found->damage_count, 0);
    ckd_verify_result_free(found);
    ckd_store_close(writer);
    ckd_store_close(other);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(test_damaged_manifest_blocks_its_name),
        TEST(test_damaged_manifest_blocks_its_branch),
        TEST(test_last_generation),
        TEST(test_same_ok_is_for_one_rank),
        TEST(test_the_longest_path),
        TEST(test_old_catalog_is_not_used),
        TEST(test_a_failed_rebuild_gives_no_result),
        TEST(test_a_comparison_finds_every_tensor),
        TEST(test_manifests_of_other_files),
        TEST(test_an_empty_checkpoint),
        TEST(test_a_store_is_replaced),
    };
    return cmocka_run_group_tests_name("odd stores", tests, NULL, NULL);
}
