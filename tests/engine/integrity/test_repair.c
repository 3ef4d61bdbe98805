/* Repair apart from parity: directories, links and the like in place of files, and lost manifests. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/file.h"
#include "engine/store/handle.h"
#include "tests/support/checkpoints.h"
#include "tests/support/pairs.h"
#include "tests/support/scenes.h"
#include "tests/support/scratch.h"
#include "tests/support/tempdir.h"

static void must(ckd_status status, const ckd_error *err) {
    if (status != CKD_OK) {
        fail_msg("%s: %s (%s)", ckd_status_name(status), err->message, err->file);
    }
}

static ckd_store *open_store(const char *dir, ckd_open_mode mode) {
    ckd_store *store;
    ckd_error err = {0};
    must(scene_open(&store, dir, mode, &err), &err);
    return store;
}

static void save(ckd_store *store, uint64_t step, bool base) {
    scene s = scene_of(step);
    ckd_error err = {0};
    s.base = base;
    must(scene_save(NULL, store, &s, &err), &err);
}

static void make_parity(ckd_store *store) {
    ckd_parity_options o = CKD_PARITY_OPTIONS_INIT;
    ckd_parity_result *r;
    ckd_error err = {0};
    o.data = 8;
    o.parity = 1;
    must(ckd_store_parity(&r, store, &o, &err), &err);
    ckd_parity_result_free(r);
}

typedef struct repaired {
    size_t files, left;
    char first[128];
} repaired;

static repaired repair(ckd_store *store) {
    ckd_repair_result *r;
    ckd_error err = {0};
    must(ckd_store_repair(&r, store, NULL, &err), &err);
    repaired out = {.files = r->repaired_count, .left = r->left->damage_count};
    if (out.files) {
        snprintf(out.first, sizeof(out.first), "%s", r->repaired[0].file);
    }
    ckd_repair_result_free(r);
    return out;
}

static size_t damage_of(ckd_store *store) {
    ckd_verify_result *r;
    ckd_error err = {0};
    must(ckd_store_verify(&r, store, NULL, &err), &err);
    size_t count = r->damage_count;
    ckd_verify_result_free(r);
    return count;
}

/* The path of the first file in a folder of the store, in a static buffer. */
static const char *first_in(const char *dir, const char *folder) {
    static char path[512];
    dir_list list;
    assert_int_equal(dir_list_read(&list, store_path_of(dir, folder), NULL), CKD_OK);
    assert_true(list.count > 0);
    snprintf(path, sizeof(path), "%s/%s", store_path_of(dir, folder), list.names[0]);
    dir_list_free(&list);
    return path;
}

/* ---- files in data/q ---- */

/* A file that was moved aside is intact. A damaged one of the same name is not taken. */
static void test_files_that_were_moved_aside(void **state) {
    ckd_repair_options o = CKD_REPAIR_OPTIONS_INIT;
    ckd_repair_result *r;
    ckd_error err = {0};
    char name[300], path[600];
    scene_make(*state, 0, 3);
    assert_int_equal(mkdir(store_path_of(*state, "data/q"), 0700), 0);
    snprintf(path, sizeof(path), "%s", first_in(*state, "data/c"));
    size_t size;
    unsigned char *data = read_whole_file(path, &size);
    snprintf(name, sizeof(name), "data/q/%s.2", strrchr(path, '/') + 1);
    assert_int_equal(rename(path, store_path_of(*state, name)), 0);
    data[size / 2] ^= 1;
    snprintf(name, sizeof(name), "data/q/%s.1", strrchr(path, '/') + 1);
    write_whole_file(store_path_of(*state, name), data, size);
    free(data);
    ckd_store *store = open_store(*state, CKD_OPEN_WRITE);
    assert_true(damage_of(store) > 0);
    o.dry_run = 1;
    must(ckd_store_repair(&r, store, &o, &err), &err);
    assert_true(r->repaired_count == 1 && r->left->damage_count == 0);
    ckd_repair_result_free(r);
    assert_false(file_exists(path));
    assert_int_equal(repair(store).files, 1);
    assert_int_equal(damage_of(store), 0);
    scene_check(store, 0, 3);
    ckd_store_close(store);
}

/* ---- something else in place of a file ---- */

typedef enum thing {
    A_DIRECTORY,
    A_FULL_DIRECTORY,
    A_PIPE,
    A_LINK_TO_NOTHING,
    A_LINK_TO_ITSELF,
    THINGS
} thing;

static void replace_with(thing what, const char *path) {
    char below[600];
    assert_int_equal(unlink(path), 0);
    switch (what) {
    case A_DIRECTORY:
    case A_FULL_DIRECTORY:
        assert_int_equal(mkdir(path, 0700), 0);
        snprintf(below, sizeof(below), "%s/a", path);
        if (what == A_FULL_DIRECTORY) {
            assert_int_equal(mkdir(below, 0700), 0);
        }
        break;
    case A_PIPE:
        assert_int_equal(mkfifo(path, 0600), 0);
        break;
    case A_LINK_TO_NOTHING:
        assert_int_equal(symlink("/nonexistent/file", path), 0);
        break;
    default:
        assert_int_equal(symlink(strrchr(path, '/') + 1, path), 0);
        break;
    }
}

static void check_file(const char *path, const unsigned char *data, size_t size) {
    size_t after;
    unsigned char *now = read_whole_file(path, &after);
    assert_int_equal(after, size);
    assert_memory_equal(now, data, size);
    free(now);
}

/* A repair replaces whatever stands where a file should be. */
static void test_other_things_are_replaced(void **state) {
    ckd_store *store = open_store(*state, CKD_OPEN_CREATE);
    for (uint64_t step = 0; step < 4; step++) {
        save(store, step, true);
    }
    make_parity(store);
    for (int k = 0; k < 2 * THINGS; k++) {
        char path[512];
        size_t size;
        bool parity = k % 2;
        snprintf(path, sizeof(path), "%s", first_in(*state, parity ? "data/p" : "data/c"));
        unsigned char *data = read_whole_file(path, &size);
        replace_with((thing)(k / 2), path);
        assert_true(damage_of(store) > 0);
        repaired r = repair(store);
        assert_true(r.files == 1 && r.left == 0);
        if (parity) { /* repair removes it, since nothing else says what it covered */
            make_parity(store);
        } else {
            check_file(path, data, size);
        }
        free(data);
        assert_int_equal(damage_of(store), 0);
    }
    scene_check(store, 0, 4);
    ckd_store_close(store);
}

/* A collection removes deleted files, whatever stands in their place. */
static void test_other_things_are_removed(void **state) {
    for (thing what = 0; what < THINGS; what++) {
        ckd_store *store = open_store(*state, CKD_OPEN_CREATE);
        ckd_checkpoint c;
        ckd_delete_options o = CKD_DELETE_OPTIONS_INIT;
        ckd_collected gone;
        ckd_error err = {0};
        char path[512];
        save(store, 2 * what, true);
        must(ckd_store_find(&c, store, SCENE_RUN, 2 * what, &err), &err);
        snprintf(path, sizeof(path), "%s", first_in(*state, "data/c"));
        replace_with(what, path);
        o.undo_s = 0;
        must(ckd_store_delete(store, &c.id, 1, &o, &err), &err);
        must(ckd_store_collect(&gone, store, NULL, &err), &err);
        assert_int_equal(gone.checkpoints, 1);
        assert_false(file_exists(path));
        assert_int_equal(damage_of(store), 0);
        ckd_store_close(store);
    }
}

/* ---- lost manifests ---- */

/* Verify and repair report the lost manifest of this checkpoint and no other damage. */
static void check_named(ckd_store *store, const char *checkpoint) {
    ckd_verify_options quick = CKD_VERIFY_OPTIONS_INIT;
    ckd_verify_result *r;
    ckd_error err = {0};
    for (quick.quick = 0; quick.quick < 2; quick.quick++) {
        must(ckd_store_verify(&r, store, &quick, &err), &err);
        assert_int_equal(r->damage_count, 1);
        assert_non_null(strstr(r->damage[0].what, "the manifest is lost: it is missing"));
        assert_int_equal(r->damage[0].checkpoint_count, 1);
        assert_string_equal(r->damage[0].checkpoints[0], checkpoint);
        ckd_verify_result_free(r);
    }
}

static void remove_manifest(const char *dir, unsigned long long step) {
    char name[64];
    snprintf(name, sizeof(name), "data/m/%s.%llu.0", SCENE_RUN, step);
    assert_int_equal(unlink(store_path_of(dir, name)), 0);
}

/* A lost manifest is reported as long as one of its chunk files exists, whatever was saved since. */
static void test_vanished_manifest(void **state) {
    char named[CKD_RUN_MAX + 32] = SCENE_RUN "@2";
    ckd_store *store = open_store(*state, CKD_OPEN_CREATE);
    for (uint64_t step = 0; step < 3; step++) {
        save(store, step, true);
    }
    ckd_store_close(store);
    remove_manifest(*state, 2);
    store = open_store(*state, CKD_OPEN_READ);
    check_named(store, named);
    ckd_store_close(store);
    store = open_store(*state, CKD_OPEN_WRITE); /* a writer drops the checkpoint from the catalog */
    check_named(store, named);
    save(store, 3, true);
    check_named(store, named);
    repaired r = repair(store);
    assert_true(r.files == 1 && r.left == 0);
    scene_check(store, 0, 4);
    ckd_store_close(store);
    /* The records of lost checkpoints are gone. */
    assert_int_equal(rmdir(store_path_of(*state, "data/q")), 0);
    store_check_clean(*state);
}

/* Any subset of a chain loses its manifests. A repair restores them, and the catalog lists what it listed before. */
static void test_vanished_chain(void **state) {
    for (unsigned which = 1; which < 16; which++) { /* bit n: step n */
        char dir[600];
        ckd_checkpoint_list *before, *after;
        ckd_error err = {0};
        snprintf(dir, sizeof(dir), "%s/%u", (const char *)*state, which);
        assert_int_equal(mkdir(dir, 0700), 0);
        scene_make(dir, 0, 4);
        ckd_store *store = open_store(dir, CKD_OPEN_READ);
        must(ckd_store_list(&before, store, NULL, &err), &err);
        ckd_store_close(store);
        for (unsigned step = 0; step < 4; step++) {
            if (which >> step & 1) {
                remove_manifest(dir, step);
            }
        }
        store = open_store(dir, CKD_OPEN_WRITE);
        repaired r = repair(store);
        assert_int_equal(r.files, __builtin_popcount(which));
        assert_int_equal(r.left, 0);
        scene_check(store, 0, 4);
        must(ckd_store_list(&after, store, NULL, &err), &err);
        for (size_t i = 0; i < after->count; i++) {
            assert_int_equal(after->items[i].generation, which >> i & 1);
            after->items[i].generation = 0;
        }
        lists_check_equal(before, after);
        ckd_checkpoint_list_free(before);
        ckd_checkpoint_list_free(after);
        ckd_store_close(store);
        store_check_clean(dir);
    }
}

typedef struct taken {
    pathname path;
    unsigned char *data;
    size_t size;
} taken;

static taken take(const char *path) {
    taken f;
    snprintf(f.path.text, sizeof(f.path.text), "%s", path);
    f.data = read_whole_file(path, &f.size);
    return f;
}

static void put_back(taken *f) {
    write_whole_file(f->path.text, f->data, f->size);
    free(f->data);
}

/* The only chunk file of a step, as its newest manifest names it. */
static pathname file_of(ckd_store *store, uint64_t step) {
    ckd_checkpoint c;
    manifest m;
    ckd_error err = {0};
    must(ckd_store_find(&c, store, SCENE_RUN, step, &err), &err);
    must(store_read_manifest(&m, store, c.run, c.step, c.generation, &err), &err);
    assert_int_equal(m.own_count, 1);
    pathname path = path_chunk(store->path, &m.files[0].id, "");
    manifest_free(&m);
    return path;
}

/* Removes the manifests of all generations of a step. */
static void remove_manifests(const char *dir, uint64_t step) {
    char name[64];
    dir_list list;
    snprintf(name, sizeof(name), "%s.%llu.", SCENE_RUN, (unsigned long long)step);
    assert_int_equal(dir_list_read(&list, store_path_of(dir, "data/m"), NULL), CKD_OK);
    for (size_t i = 0; i < list.count; i++) {
        if (strncmp(list.names[i], name, strlen(name)) == 0) {
            char path[600];
            snprintf(path, sizeof(path), "data/m/%s", list.names[i]);
            assert_int_equal(unlink(store_path_of(dir, path)), 0);
        }
    }
    dir_list_free(&list);
}

static void save_on(ckd_store *store, uint64_t step, uint64_t parent) {
    ckd_save_options o = CKD_SAVE_OPTIONS_INIT;
    ckd_save *save;
    ckd_error err = {0};
    scene s = scene_of(step);
    o.run = o.parent_run = SCENE_RUN;
    o.step = step;
    o.parent_step = parent;
    o.max_load_cost = 1000;
    must(ckd_save_begin(&save, store, &o, &err), &err);
    must(scene_finish(NULL, save, &s, &err), &err);
}

/*
 * A compaction rewrote step 2 and stopped before it rewrote step 3, which still names the old file of step 2. Step 4
 * builds on the new file. If the manifest of step 2 is lost, two complete files of it exist, and other manifests name
 * both.
 */
static void test_vanished_with_two_generations(void **state) {
    ckd_compact_options deep = CKD_COMPACT_OPTIONS_INIT;
    ckd_error err = {0};
    scene_make(*state, 0, 4);
    ckd_store *store = open_store(*state, CKD_OPEN_WRITE);
    taken files[4];
    for (uint64_t step = 0; step < 4; step++) {
        files[step] = take(file_of(store, step).text);
    }
    taken name = take(store_path_of(*state, "data/m/" SCENE_RUN ".3.0"));
    deep.max_depth = 1;
    deep.pack_below = CKD_NO_PACKS;
    must(ckd_compact(NULL, store, &deep, &err), &err);
    assert_string_not_equal(file_of(store, 2).text, files[2].path.text);
    save_on(store, 4, 2);
    assert_int_equal(unlink(file_of(store, 3).text), 0);
    remove_manifests(*state, 3);
    ckd_store_close(store);
    for (size_t i = 0; i < 4; i++) {
        put_back(&files[i]);
    }
    put_back(&name);
    must(ckd_store_rebuild(NULL, store_path_of(*state, ""), NULL, &err), &err);
    store = open_store(*state, CKD_OPEN_WRITE);
    scene_check(store, 0, 5);
    ckd_store_close(store);
    remove_manifests(*state, 2);
    store = open_store(*state, CKD_OPEN_WRITE);
    repaired r = repair(store);
    assert_true(r.files == 1 && r.left == 0);
    scene_check(store, 0, 5);
    ckd_store_close(store);
    store_check_clean(*state);
}

/*
 * A compaction rewrote step 2, and the old generation is still there. Step 3, whose manifest is lost, reads its file.
 * It goes neither when the store is opened nor by a collection, unless the lost checkpoint is given up.
 */
static void test_vanished_reader_of_a_replaced_file(void **state) {
    ckd_compact_options deep = CKD_COMPACT_OPTIONS_INIT;
    ckd_collect_options o = CKD_COLLECT_OPTIONS_INIT;
    ckd_error err = {0};
    scene_make(*state, 0, 4);
    ckd_store *store = open_store(*state, CKD_OPEN_WRITE);
    taken files[] = {take(file_of(store, 2).text), take(file_of(store, 3).text)};
    taken manifests[] = {take(store_path_of(*state, "data/m/" SCENE_RUN ".2.0")),
                         take(store_path_of(*state, "data/m/" SCENE_RUN ".3.0"))};
    deep.max_depth = 1;
    deep.pack_below = CKD_NO_PACKS;
    must(ckd_compact(NULL, store, &deep, &err), &err);
    assert_int_equal(unlink(file_of(store, 3).text), 0);
    remove_manifests(*state, 3);
    ckd_store_close(store);
    put_back(&files[0]);
    put_back(&files[1]);
    put_back(&manifests[1]);
    must(ckd_store_rebuild(NULL, store_path_of(*state, ""), NULL, &err), &err);
    put_back(&manifests[0]);
    remove_manifests(*state, 3);

    pathname replaced = manifests[0].path;
    store = open_store(*state, CKD_OPEN_WRITE);
    assert_true(file_exists(replaced.text));
    assert_int_equal(ckd_store_collect(NULL, store, &o, &err), CKD_E_STATE);
    assert_true(file_exists(replaced.text));
    o.force = 1;
    must(ckd_store_collect(NULL, store, &o, &err), &err);
    assert_false(file_exists(replaced.text));
    for (uint64_t step = 0; step < 3; step++) {
        scene s = scene_of(step);
        must(scene_load(store, &s, &err), &err);
    }
    ckd_store_close(store);
}

/* Only a repair finds out which files a lost checkpoint needs. No file is removed or rewritten before it has run. */
static void test_vanished_files_stay(void **state) {
    ckd_error err = {0};
    ckd_compact_options o = CKD_COMPACT_OPTIONS_INIT;
    ckd_collect_options all = CKD_COLLECT_OPTIONS_INIT;
    ckd_checkpoint c;
    o.max_depth = 1;
    all.all = 1;
    scene_make(*state, 0, 4);
    remove_manifest(*state, 1);
    ckd_store *store = open_store(*state, CKD_OPEN_WRITE);
    must(ckd_store_find(&c, store, SCENE_RUN, 0, &err), &err);
    must(ckd_store_delete(store, &c.id, 1, NULL, &err), &err);
    assert_int_equal(ckd_compact(NULL, store, &o, &err), CKD_E_STATE);
    assert_non_null(strstr(err.message, "ckptdelta repair"));
    assert_int_equal(ckd_store_collect(NULL, store, &all, &err), CKD_E_STATE);
    repaired r = repair(store);
    assert_true(r.files == 1 && r.left == 0);
    must(ckd_compact(NULL, store, &o, &err), &err);
    must(ckd_store_collect(NULL, store, &all, &err), &err);
    scene_check(store, 1, 3);
    ckd_store_close(store);
}

/* Only the lost manifest named the file of step 0, which was deleted. When it is back, the file is no damage. */
static void test_vanished_with_a_deleted_base(void **state) {
    ckd_error err = {0};
    ckd_delete_options now = CKD_DELETE_OPTIONS_INIT;
    ckd_checkpoint c;
    now.undo_s = 0;
    scene_make(*state, 0, 2);
    ckd_store *store = open_store(*state, CKD_OPEN_WRITE);
    must(ckd_store_find(&c, store, SCENE_RUN, 0, &err), &err);
    must(ckd_store_delete(store, &c.id, 1, &now, &err), &err);
    must(ckd_store_collect(NULL, store, NULL, &err), &err);
    assert_int_equal(folder_count(*state, "data/m"), 1);
    assert_int_equal(folder_count(*state, "data/c"), 2);
    ckd_store_close(store);
    remove_manifest(*state, 1);
    store = open_store(*state, CKD_OPEN_WRITE);
    repaired r = repair(store);
    assert_true(r.files == 1 && r.left == 0);
    assert_int_equal(verify_damage(store), 0);
    scene_check(store, 1, 1);
    ckd_store_close(store);
}

/*
 * Step 0 was deleted and its time is over, and then the manifest of step 1, a delta on it, is lost. Opening for writing
 * and a rebuild empty the trash before the catalog is in step again. They leave the file of step 0.
 */
static void test_vanished_before_the_trash_is_emptied(void **state) {
    ckd_delete_options now = CKD_DELETE_OPTIONS_INIT;
    ckd_error err = {0};
    ckd_checkpoint c;
    now.undo_s = 0;
    scene_make(*state, 0, 2);
    ckd_store *store = open_store(*state, CKD_OPEN_WRITE);
    save(store, 2, true);
    must(ckd_store_find(&c, store, SCENE_RUN, 0, &err), &err);
    must(ckd_store_delete(store, &c.id, 1, &now, &err), &err);
    ckd_store_close(store);
    remove_manifest(*state, 1);
    must(ckd_store_rebuild(NULL, store_path_of(*state, ""), NULL, &err), &err);
    store = open_store(*state, CKD_OPEN_WRITE);
    repaired r = repair(store);
    assert_true(r.files == 1 && r.left == 0);
    ckd_store_close(store);
    remove_manifests(*state, 1);
    store = open_store(*state, CKD_OPEN_WRITE);
    r = repair(store);
    assert_true(r.files == 1 && r.left == 0);
    must(ckd_store_collect(NULL, store, NULL, &err), &err);
    scene_check(store, 1, 2);
    ckd_store_close(store);
    store_check_clean(*state);
}

/* A rebuild of the catalog from manifests keeps the record of a lost checkpoint. */
static void test_vanished_before_a_rebuild(void **state) {
    scene_make(*state, 0, 4);
    remove_manifest(*state, 1);
    for (int i = 0; i < 2; i++) { /* the second time also replaces catalog.db.old */
        assert_int_equal(ckd_store_rebuild(NULL, store_path_of(*state, ""), NULL, NULL), CKD_OK);
    }
    ckd_store *store = open_store(*state, CKD_OPEN_WRITE);
    repaired r = repair(store);
    assert_true(r.files == 1 && r.left == 0);
    scene_check(store, 0, 4);
    ckd_store_close(store);
}

/* A temporary file of a writer that died, among the records of lost checkpoints, is ignored. */
static void test_vanished_after_a_writer_died(void **state) {
    const char *name = "data/q/.tmp-00112233445566778899aabbccddeeff";
    scene_make(*state, 0, 3);
    remove_manifest(*state, 2);
    assert_int_equal(mkdir(store_path_of(*state, "data/q"), 0777), 0);
    write_whole_file(store_path_of(*state, name), "half", 4);
    ckd_store_close(open_store(*state, CKD_OPEN_WRITE)); /* a writer drops the checkpoint from the catalog */
    ckd_store *store = open_store(*state, CKD_OPEN_WRITE);
    repaired r = repair(store);
    assert_true(r.files == 1 && r.left == 0);
    scene_check(store, 0, 3);
    ckd_store_close(store);
}

/* The checkpoint of a step in the run of those that came back under another name. */
static void check_came_back(ckd_store *store, uint64_t step) {
    ckd_checkpoint c;
    ckd_error err = {0};
    scene s = scene_of(step);
    must(ckd_store_find(&c, store, SCENE_RUN ".lost", step, &err), &err);
    assert_int_equal(scene_load_id(store, &c.id, &s, &err), CKD_OK);
}

/* A lost checkpoint whose place was taken comes back under another name. */
static void test_vanished_and_replaced(void **state) {
    ckd_store *store = open_store(*state, CKD_OPEN_CREATE);
    save(store, 0, true);
    save(store, 1, true);
    ckd_store_close(store);
    remove_manifest(*state, 1);
    store = open_store(*state, CKD_OPEN_WRITE);
    save(store, 1, true); /* another checkpoint takes its place */
    repaired r = repair(store);
    assert_true(r.files == 1 && r.left == 0);
    check_came_back(store, 1);
    for (uint64_t step = 0; step < 2; step++) {
        scene s = scene_of(step);
        assert_int_equal(scene_load(store, &s, NULL), CKD_OK);
    }
    ckd_store_close(store);
}

/* A byte of the largest payload: headers, which repair does not need, begin with CKDR. */
static size_t inside_a_payload(const unsigned char *data, size_t size) {
    size_t last = 0, begin = 0, end = 0;
    for (size_t i = 0; i + 4 <= size; i++) {
        if (memcmp(data + i, "CKDR", 4) == 0) {
            if (last && i - last > end - begin) {
                begin = last;
                end = i;
            }
            last = i;
        }
    }
    assert_true(end - begin > 400);
    return end - 100;
}

/*
 * A payload of the lost checkpoint is damaged too. It is not listed again, because the repair reads every value first.
 */
static void test_vanished_and_damaged(void **state) {
    ckd_store *store = open_store(*state, CKD_OPEN_CREATE);
    save(store, 0, true);
    ckd_store_close(store);
    size_t size;
    const char *path = first_in(*state, "data/c");
    unsigned char *data = read_whole_file(path, &size);
    remove_manifest(*state, 0);
    data[inside_a_payload(data, size)] ^= 4;
    write_whole_file(path, data, size);
    free(data);
    store = open_store(*state, CKD_OPEN_WRITE);
    repaired r = repair(store);
    assert_true(r.files == 0 && r.left == 1);
    assert_int_equal(damage_of(store), 1);
    ckd_store_close(store);
}

/* Neither a manifest nor the catalog mentions the checkpoint. The chunk file itself is reported. */
static void test_unnamed_file(void **state) {
    ckd_store *store = open_store(*state, CKD_OPEN_CREATE);
    ckd_verify_result *r;
    ckd_error err = {0};
    save(store, 0, true);
    ckd_store_close(store);
    remove_manifest(*state, 0);
    assert_int_equal(unlink(store_path_of(*state, "catalog.db")), 0);
    store = open_store(*state, CKD_OPEN_WRITE);
    must(ckd_store_verify(&r, store, NULL, &err), &err);
    assert_int_equal(r->damage_count, 1);
    assert_non_null(strstr(r->damage[0].what, "no manifest names this chunk file"));
    assert_non_null(strstr(first_in(*state, "data/c"), r->damage[0].file));
    ckd_verify_result_free(r);
    repaired left = repair(store);
    assert_true(left.files == 0 && left.left == 1);
    ckd_store_close(store);
}

/* ---- telling a lost checkpoint from a deleted one ---- */

static char messages[4096];

static void remember(void *context, const char *message) {
    (void)context;
    size_t used = strlen(messages);
    snprintf(messages + used, sizeof(messages) - used, "%s\n", message);
}

static ckd_store *open_with_messages(const char *dir, ckd_open_mode mode) {
    ckd_store_options o = CKD_STORE_OPTIONS_INIT;
    ckd_store *store;
    ckd_error err = {0};
    o.threads = 1;
    o.on_message = remember;
    messages[0] = '\0';
    must(ckd_store_open(&store, store_path_of(dir, ""), mode, &o, &err), &err);
    return store;
}

/* Deletes a step for good. Files that other checkpoints read stay. */
static void delete_step(const char *dir, uint64_t step) {
    ckd_store *store = open_store(dir, CKD_OPEN_WRITE);
    ckd_checkpoint c;
    ckd_delete_options o = CKD_DELETE_OPTIONS_INIT;
    ckd_error err = {0};
    o.undo_s = 0;
    must(ckd_store_find(&c, store, SCENE_RUN, step, &err), &err);
    must(ckd_store_delete(store, &c.id, 1, &o, &err), &err);
    must(ckd_store_collect(NULL, store, NULL, &err), &err);
    ckd_store_close(store);
}

static bool has_step(ckd_store *store, uint64_t step) {
    return ckd_store_find(&(ckd_checkpoint){.step = 0}, store, SCENE_RUN, step, NULL) == CKD_OK;
}

static ckd_status repair_named(repaired *out, ckd_store *store, uint64_t step, int purge) {
    ckd_repair_options o = CKD_REPAIR_OPTIONS_INIT;
    ckd_repair_result *r;
    o.manifest_run = purge ? NULL : SCENE_RUN;
    o.manifest_step = step;
    o.purge = purge;
    ckd_status status = ckd_store_repair(&r, store, &o, NULL);
    if (status == CKD_OK) {
        *out = (repaired){.files = r->repaired_count, .left = r->left->damage_count};
        ckd_repair_result_free(r);
    }
    return status;
}

/*
 * Puts back a catalog from before a deletion. Files of the deleted checkpoint still exist, because the next one reads
 * them.
 */
static void make_older_catalog(const char *dir) {
    char path[600];
    size_t size;
    scene_make(dir, 0, 3);
    snprintf(path, sizeof(path), "%s", store_path_of(dir, "catalog.db"));
    unsigned char *old = read_whole_file(path, &size);
    delete_step(dir, 1);
    assert_int_equal(unlink(store_path_of(dir, "data/t/" SCENE_RUN ".1.0")), -1); /* no tombstone is left */
    write_whole_file(path, old, size);
    free(old);
}

/*
 * A checkpoint that only an older catalog lists was deleted, not lost. A message says how to restore it all the same.
 */
static void test_older_catalog(void **state) {
    repaired r;
    make_older_catalog(*state);
    ckd_store *store = open_with_messages(*state, CKD_OPEN_READ);
    assert_int_equal(damage_of(store), 0);
    assert_non_null(strstr(messages, SCENE_RUN "@1, which has no manifest"));
    ckd_store_close(store);
    store = open_with_messages(*state, CKD_OPEN_WRITE); /* a writer drops the row */
    assert_non_null(strstr(messages, "--manifest " SCENE_RUN "@1"));
    r = repair(store);
    assert_true(r.files == 0 && r.left == 0);
    assert_false(has_step(store, 1));
    assert_int_equal(repair_named(&r, store, 0, 0), CKD_E_NOT_FOUND);
    assert_int_equal(repair_named(&r, store, 0, 1), CKD_OK);
    assert_int_equal(repair_named(&r, store, 1, 0), CKD_E_NOT_FOUND); /* purged */
    ckd_store_close(store);
    store = open_with_messages(*state, CKD_OPEN_READ);
    assert_int_equal(damage_of(store), 0);
    assert_string_equal(messages, "");
    ckd_store_close(store);
}

/* The user asks for the deleted checkpoint by name, and it is restored. */
static void test_older_catalog_restored_on_request(void **state) {
    repaired r;
    make_older_catalog(*state);
    ckd_store *store = open_store(*state, CKD_OPEN_WRITE);
    assert_int_equal(repair_named(&r, store, 1, 0), CKD_OK);
    assert_true(r.files == 1 && r.left == 0);
    scene_check(store, 0, 3);
    ckd_store_close(store);
    assert_int_equal(rmdir(store_path_of(*state, "data/q")), 0);
}

/* Without a valid deletion mark the catalog is not trusted, until a writer renews the mark. */
static void test_deletion_mark_is_lost(void **state) {
    scene_make(*state, 0, 3);
    for (int damaged = 0; damaged < 2; damaged++) {
        const char *mark = store_path_of(*state, "data/deletions");
        if (damaged) {
            write_whole_file(mark, "x", 1);
        } else {
            assert_int_equal(unlink(mark), 0);
        }
        ckd_store *store = open_store(*state, CKD_OPEN_WRITE);
        ckd_store_close(store);
        unsigned step = (unsigned)damaged;
        remove_manifest(*state, step);
        store = open_store(*state, CKD_OPEN_WRITE);
        assert_int_equal(damage_of(store), 1);
        repaired r = repair(store);
        assert_true(r.files == 1 && r.left == 0);
        scene_check(store, 0, 3);
        ckd_store_close(store);
    }
}

/* The store stays open. No lock may be left, so that another save goes on at once. */
static void test_damaged_catalog(void **state) {
    scene_make(*state, 0, 2);
    ckd_store *store = open_store(*state, CKD_OPEN_WRITE);
    FILE *file = fopen(store_path_of(*state, "catalog.db"), "r+");
    assert_non_null(file);
    assert_int_equal(fseek(file, 4096, SEEK_SET), 0);
    for (int i = 0; i < 4096; i++) {
        assert_int_equal(fputc(0xa5, file), 0xa5);
    }
    assert_int_equal(fclose(file), 0);
    repaired r = repair(store);
    assert_true(r.files == 1 && r.left == 0 && strstr(r.first, "catalog.db"));
    save(store, 2, false);
    ckd_store_close(store);
    store = open_store(*state, CKD_OPEN_READ);
    assert_int_equal(damage_of(store), 0);
    ckd_store_close(store);
}

/* The chunk files are lost as well. The catalog's row is all that is left, and it suffices to report the loss. */
static void test_vanished_with_its_files(void **state) {
    ckd_store *store = open_store(*state, CKD_OPEN_CREATE);
    save(store, 0, true);
    ckd_store_close(store);
    assert_int_equal(unlink(first_in(*state, "data/c")), 0);
    remove_manifest(*state, 0);
    store = open_store(*state, CKD_OPEN_READ);
    check_named(store, SCENE_RUN "@0");
    ckd_store_close(store);
    store = open_store(*state, CKD_OPEN_WRITE);
    check_named(store, SCENE_RUN "@0");
    repaired r = repair(store);
    assert_true(r.files == 0 && r.left == 1);
    ckd_store_close(store);
}

/* A lost manifest is put back by hand, and the checkpoint is deleted afterwards. Nothing is reported as lost. */
static void test_vanished_put_back_and_deleted(void **state) {
    char path[600];
    size_t size;
    scene_make(*state, 0, 3);
    snprintf(path, sizeof(path), "%s", store_path_of(*state, "data/m/" SCENE_RUN ".1.0"));
    unsigned char *data = read_whole_file(path, &size);
    remove_manifest(*state, 1);
    ckd_store *store = open_store(*state, CKD_OPEN_WRITE);
    check_named(store, SCENE_RUN "@1");
    ckd_store_close(store);
    write_whole_file(path, data, size);
    free(data);
    delete_step(*state, 1);
    store = open_store(*state, CKD_OPEN_WRITE);
    assert_int_equal(damage_of(store), 0);
    repaired r = repair(store);
    assert_true(r.files == 0 && r.left == 0);
    assert_false(has_step(store, 1));
    ckd_store_close(store);
}

/* Replaces the manifest of a step with that of another checkpoint that names no files. */
static void replace_manifest(const char *dir, unsigned step) {
    manifest m;
    bytes data = {0};
    ckd_store *store = open_store(dir, CKD_OPEN_READ);
    assert_int_equal(store_read_manifest(&m, store, SCENE_RUN, step, 0, NULL), CKD_OK);
    m.checkpoint.id.bytes[3] ^= 1;
    m.checkpoint.tensors = m.checkpoint.raw_bytes = m.role_count = m.own_count = m.file_count = 0;
    manifest_encode(&data, &store->id, &m);
    assert_false(data.failed);
    remove_manifest(dir, step);
    write_whole_file(path_manifest(store->path, SCENE_RUN, step, 0).text, data.data, data.size);
    bytes_free(&data);
    manifest_free(&m);
    ckd_store_close(store);
}

/* A foreign manifest does not make the catalog forget the real checkpoint, which comes back under another name. */
static void test_replaced_manifest(void **state) {
    scene_make(*state, 0, 3);
    replace_manifest(*state, 1);
    ckd_store *store = open_store(*state, CKD_OPEN_WRITE);
    scene two = scene_of(1);
    assert_int_equal(scene_load(store, &two, NULL), CKD_E_CORRUPT);
    assert_true(damage_of(store) > 0);
    repaired r = repair(store);
    assert_int_equal(r.files, 1); /* the foreign manifest stays, and cannot be loaded */
    check_came_back(store, 1);
    ckd_store_close(store);
    /* The records of lost checkpoints are gone. */
    assert_int_equal(rmdir(store_path_of(*state, "data/q")), 0);
    store_check_clean(*state);
}

/* ---- incomplete checkpoints whose files are all intact ---- */

/* The manifest of the newest step of a chain omits one file that its blocks build on. */
static void forge_incomplete(const char *dir) {
    manifest m;
    bytes data = {0};
    scene_make(dir, 0, 4);
    ckd_store *store = open_store(dir, CKD_OPEN_WRITE);
    assert_int_equal(store_read_manifest(&m, store, SCENE_RUN, 3, 0, NULL), CKD_OK);
    assert_true(m.file_count >= m.own_count + 2);
    m.checkpoint.stored_bytes -= m.file_bytes;
    m.file_count--;
    manifest_encode(&data, &store->id, &m);
    assert_false(data.failed);
    write_whole_file(path_manifest(store->path, SCENE_RUN, 3, 0).text, data.data, data.size);
    bytes_free(&data);
    manifest_free(&m);
    ckd_store_close(store);
}

static void check_incomplete(const ckd_verify_result *r) {
    assert_int_equal(r->damage_count, 1);
    assert_int_equal(r->damage[0].checkpoint_count, 1);
    assert_string_equal(r->damage[0].checkpoints[0], SCENE_RUN "@3");
}

static void test_incomplete_checkpoint(void **state) {
    ckd_verify_options quick = CKD_VERIFY_OPTIONS_INIT;
    ckd_verify_result *found;
    ckd_repair_options o = CKD_REPAIR_OPTIONS_INIT;
    ckd_repair_result *r;
    ckd_error err = {0};
    scene newest = scene_of(3);
    forge_incomplete(*state);
    ckd_store *store = open_store(*state, CKD_OPEN_WRITE);
    assert_int_equal(scene_load(store, &newest, NULL), CKD_E_CORRUPT);
    quick.quick = 1;
    must(ckd_store_verify(&found, store, &quick, &err), &err);
    check_incomplete(found);
    ckd_verify_result_free(found);
    quick.quick = 0;
    quick.sample = 1e-9;
    must(ckd_store_verify(&found, store, &quick, &err), &err);
    check_incomplete(found);
    ckd_verify_result_free(found);
    for (o.dry_run = 0; o.dry_run < 2; o.dry_run++) {
        must(ckd_store_repair(&r, store, &o, &err), &err);
        assert_int_equal(r->repaired_count, 0);
        check_incomplete(r->left);
        ckd_repair_result_free(r);
    }
    ckd_store_close(store);
}

/* A checkpoint that others saved after the store was opened is not reported as damage. */
static void test_checkpoints_of_others_are_no_damage(void **state) {
    ckd_verify_options quick = CKD_VERIFY_OPTIONS_INIT;
    ckd_verify_result *found;
    ckd_error err = {0};
    scene_make(*state, 0, 2);
    ckd_store *store = open_store(*state, CKD_OPEN_WRITE);
    scene_make(*state, 2, 1);
    repaired r = repair(store);
    assert_true(r.files == 0 && r.left == 0);
    scene_make(*state, 3, 1);
    quick.quick = 1;
    must(ckd_store_verify(&found, store, &quick, &err), &err);
    assert_int_equal(found->damage_count, 0);
    assert_int_equal(found->checkpoints, 4);
    ckd_verify_result_free(found);
    ckd_store_close(store);
}

/* A dry run counts a file that it could repair as repaired, and does not report the checkpoints that build on it. */
static void test_dry_run_of_a_chain(void **state) {
    ckd_repair_options o = CKD_REPAIR_OPTIONS_INIT;
    ckd_repair_result *r;
    ckd_error err = {0};
    scene_make(*state, 0, 4);
    ckd_store *store = open_store(*state, CKD_OPEN_WRITE);
    make_parity(store);
    assert_int_equal(unlink(first_in(*state, "data/c")), 0);
    o.dry_run = 1;
    must(ckd_store_repair(&r, store, &o, &err), &err);
    assert_int_equal(r->repaired_count, 1);
    assert_int_equal(r->left->damage_count, 0);
    ckd_repair_result_free(r);
    repaired done = repair(store);
    assert_true(done.files == 1 && done.left == 0);
    ckd_store_close(store);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        tempdir_test(test_files_that_were_moved_aside),
        tempdir_test(test_other_things_are_replaced),
        tempdir_test(test_other_things_are_removed),
        tempdir_test(test_vanished_manifest),
        tempdir_test(test_vanished_chain),
        tempdir_test(test_vanished_with_two_generations),
        tempdir_test(test_vanished_files_stay),
        tempdir_test(test_vanished_with_a_deleted_base),
        tempdir_test(test_vanished_before_the_trash_is_emptied),
        tempdir_test(test_vanished_reader_of_a_replaced_file),
        tempdir_test(test_vanished_before_a_rebuild),
        tempdir_test(test_vanished_after_a_writer_died),
        tempdir_test(test_vanished_and_replaced),
        tempdir_test(test_vanished_and_damaged),
        tempdir_test(test_unnamed_file),
        tempdir_test(test_older_catalog),
        tempdir_test(test_older_catalog_restored_on_request),
        tempdir_test(test_deletion_mark_is_lost),
        tempdir_test(test_damaged_catalog),
        tempdir_test(test_vanished_with_its_files),
        tempdir_test(test_vanished_put_back_and_deleted),
        tempdir_test(test_replaced_manifest),
        tempdir_test(test_incomplete_checkpoint),
        tempdir_test(test_dry_run_of_a_chain),
        tempdir_test(test_checkpoints_of_others_are_no_damage),
    };
    scratch_begin();
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    scratch_end();
    return failed;
}
