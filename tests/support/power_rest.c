#include "tests/support/power_rest.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <errno.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/file.h"
#include "engine/store/damage.h"
#include "engine/store/handle.h"
#include "tests/support/compactions.h"
#include "tests/support/early.h"
#include "tests/support/fingerprints.h"
#include "tests/support/power_disk.h"
#include "tests/support/scenes.h"

/* ---- parity ---- */

static void make_rows(ckd_store *store, uint32_t rows) {
    ckd_parity_options o = CKD_PARITY_OPTIONS_INIT;
    ckd_parity_result *r;
    ckd_error err = {0};
    o.data = 3;
    o.parity = rows;
    disk_must(ckd_store_parity(&r, store, &o, &err), &err);
    ckd_parity_result_free(r);
}

static void make_parity(ckd_store *store) {
    make_rows(store, 1);
}

static void save_bases(ckd_store *store, uint64_t first, uint64_t count) {
    for (uint64_t i = 0; i < count; i++) {
        ckd_error err = {0};
        scene s = scene_of(first + i);
        s.base = true;
        disk_must(scene_save(NULL, store, &s, &err), &err);
    }
}

static void make_bases(disk *d, uint64_t count, bool parity) {
    ckd_store *store = disk_open(d, CKD_OPEN_CREATE);
    save_bases(store, 0, count);
    if (parity) {
        make_parity(store);
    }
    ckd_store_close(store);
}

/* Saves fill up the first parity group, so that it is made again. Then two of its members are deleted. */
static void make_and_outgrow(disk *d, uint32_t rows, const char *name) {
    ckd_error err = {0};
    ckd_delete_options now = CKD_DELETE_OPTIONS_INIT;
    make_bases(d, 2, false);
    disk_begin(d, 3, 3);
    ckd_store *store = disk_open(d, CKD_OPEN_WRITE);
    make_rows(store, rows);
    disk_flags(d, PROTECTED | WHOLE);
    disk_expect(d, 3, 15);
    disk_flags(d, WHOLE);
    save_bases(store, 2, 2);
    disk_expect(d, 15, 15);
    make_rows(store, rows);
    disk_flags(d, PROTECTED | WHOLE);
    disk_flags(d, WHOLE);
    now.undo_s = 0;
    ckd_checkpoint c[2];
    disk_must(ckd_store_find(&c[0], store, SCENE_RUN, 0, &err), &err);
    disk_must(ckd_store_find(&c[1], store, SCENE_RUN, 1, &err), &err);
    ckd_id ids[] = {c[0].id, c[1].id};
    disk_expect(d, 12, 15);
    disk_must(ckd_store_delete(store, ids, 2, &now, &err), &err);
    disk_must(ckd_store_collect(NULL, store, NULL, &err), &err);
    disk_expect(d, 12, 12);
    make_rows(store, rows);
    disk_flags(d, PROTECTED | WHOLE);
    ckd_store_close(store);
    disk_end(name, d, 4);
}

void power_parity(void **state) {
    make_and_outgrow(*state, 1, "parity");
}

/* A group has several files. No cut leaves some of them. */
void power_parity_of_two_files(void **state) {
    make_and_outgrow(*state, 2, "parity of two files");
}

/* A process died while it removed a group of two files. The next one ends that. */
void power_parity_of_dead_maker(void **state) {
    disk *d = *state;
    dir_list list;
    make_bases(d, 2, false);
    ckd_store *store = disk_open(d, CKD_OPEN_WRITE);
    make_rows(store, 2);
    ckd_store_close(store);
    assert_int_equal(dir_list_read(&list, store_path_of(d->p.dir, DIR_PARITY), NULL), CKD_OK);
    for (size_t i = 0; i < list.count; i++) {
        ckd_id group;
        uint32_t row;
        if (parity_name_parse(&group, &row, list.names[i]) && row == 0) {
            pathname from = path_parity(store_path_of(d->p.dir, ""), &group, row, "");
            pathname to = path_parity_mark(store_path_of(d->p.dir, ""), &group);
            assert_int_equal(rename(from.text, to.text), 0);
        }
    }
    dir_list_free(&list);
    disk_begin(d, 3, 3);
    disk_flags(d, WHOLE);
    ckd_store_close(disk_open(d, CKD_OPEN_WRITE));
    disk_end("parity of a dead maker", d, 2);
}

/*
 * Flips a bit in the middle of the folder's first file with this ending. all: overwrites the whole file
 * instead.
 */
static void damage_first(const disk *d, const char *folder, const char *ending, bool all) {
    dir_list list;
    bool done = false;
    assert_int_equal(dir_list_read(&list, store_path_of(d->p.dir, folder), NULL), CKD_OK);
    for (size_t i = 0; i < list.count && !done; i++) {
        char path[256];
        size_t size, length = strlen(list.names[i]), end = strlen(ending);
        if (length >= end && strcmp(list.names[i] + length - end, ending) == 0) {
            snprintf(path, sizeof(path), "%s/%s", folder, list.names[i]);
            unsigned char *data = read_whole_file(store_path_of(d->p.dir, path), &size);
            data[size / 2] ^= 1;
            memset(data, 0x5a, all ? size : 0);
            write_whole_file(store_path_of(d->p.dir, path), data, size);
            free(data);
            done = true;
        }
    }
    assert_true(done);
    dir_list_free(&list);
}

static void repair(ckd_store *store, bool purge, size_t repaired) {
    ckd_repair_options o = CKD_REPAIR_OPTIONS_INIT;
    ckd_repair_result *r;
    ckd_error err = {0};
    o.purge = purge;
    disk_must(ckd_store_repair(&r, store, &o, &err), &err);
    assert_int_equal(r->repaired_count, repaired);
    ckd_repair_result_free(r);
}

void power_repair(void **state) {
    disk *d = *state;
    make_bases(d, 3, true);
    damage_first(d, DIR_CHUNKS, ".ckd", false);
    d->p.now.flags = DAMAGED;
    disk_begin(d, 7, 7);
    ckd_store *store = disk_open(d, CKD_OPEN_WRITE);
    repair(store, false, 1);
    disk_flags(d, KEPT);
    disk_flags(d, 0);
    repair(store, true, 0);
    disk_flags(d, PURGED);
    ckd_store_close(store);
    disk_end("repair", d, 3);
}

void power_repair_of_parity(void **state) {
    disk *d = *state;
    make_bases(d, 3, true);
    damage_first(d, DIR_PARITY, ".ckp", false);
    d->p.now.flags = DAMAGED;
    disk_begin(d, 7, 7);
    ckd_store *store = disk_open(d, CKD_OPEN_WRITE);
    repair(store, false, 1);
    disk_flags(d, PROTECTED);
    ckd_store_close(store);
    disk_end("repair of parity", d, 3);
}

/* The parity file is damaged so far that nobody can tell what it was for. */
void power_parity_put_aside(void **state) {
    disk *d = *state;
    make_bases(d, 3, true);
    damage_first(d, DIR_PARITY, ".ckp", true);
    d->p.now.flags = DAMAGED;
    disk_begin(d, 7, 7);
    ckd_store *store = disk_open(d, CKD_OPEN_WRITE);
    repair(store, false, 1);
    disk_flags(d, KEPT);
    ckd_store_close(store);
    disk_end("parity put aside", d, 3);
}

/* ---- copies ---- */

/* Creates DIR/from/store with 4 steps, and leaves DIR/store empty. */
static void make_source(const disk *d, char from[1024]) {
    snprintf(from, 1024, "%s/from", d->p.dir);
    assert_int_equal(mkdir(from, 0777), 0);
    scene_make(from, 0, 4);
}

static ckd_status copy_all(disk *d, const char *from, ckd_error *err) {
    ckd_store *source, *store = disk_open(d, CKD_OPEN_CREATE);
    disk_must(scene_open(&source, from, CKD_OPEN_READ, err), err);
    ckd_status status = ckd_copy(NULL, store, source, NULL, err);
    ckd_store_close(source);
    ckd_store_close(store);
    return status;
}

void power_copy(void **state) {
    disk *d = *state;
    ckd_error err = {0};
    char from[1024];
    make_source(d, from);
    d->p.now.flags = COPIED;
    disk_begin(d, 0, 15);
    disk_must(copy_all(d, from, &err), &err);
    disk_expect(d, 15, 15);
    disk_end("copy", d, 4);
}

/* Fails once, when `step` happens in `folder` for the `left`-th time. */
typedef struct failure {
    file_op step;
    const char *folder;
    unsigned left;
} failure;

static int fail_once(void *context, file_op step, const char *path) {
    failure *f = context;
    size_t length = strlen(path), folder = strlen(f->folder);
    bool there = step == f->step && length >= folder && strcmp(path + length - folder, f->folder) == 0;
    return there && f->left && --f->left == 0 ? EIO : 0;
}

static void copy_with(disk *d, failure *f) {
    ckd_error err = {0};
    char from[1024];
    make_source(d, from);
    ckd_store_close(disk_open(d, CKD_OPEN_CREATE));
    disk_begin(d, 0, 15);
    file_set_fault_hook(fail_once, f);
    assert_int_not_equal(copy_all(d, from, &err), CKD_OK);
    file_set_fault_hook(NULL, NULL);
    assert_int_equal(f->left, 0);
}

/* The name of the copy's manifest may not be durable, so the copy removes the manifest. */
void power_copy_that_fails(void **state) {
    copy_with(*state, &(failure){FILE_OP_DIR_SYNC, DIR_MANIFESTS, 3});
    disk_end("copy that fails", *state, 4);
}

/* The names of the copied files may not be durable, so they go back, and no intent names them any more. */
void power_copy_that_cannot_be_synced(void **state) {
    copy_with(*state, &(failure){FILE_OP_DIR_SYNC, DIR_CHUNKS, 1});
    disk_end("copy that cannot be synced", *state, 4);
}

/* ---- recovery ---- */

static int die_before_manifest(void *context, file_op step, const char *path) {
    (void)context;
    return step == FILE_OP_CREATE && strstr(path, DIR_MANIFESTS) ? (raise(SIGKILL), 0) : 0;
}

/* A writer dies after it created its chunk file, and before it created its manifest. */
void power_recovery(void **state) {
    disk *d = *state;
    scene_make(d->p.dir, 0, 2);
    fflush(NULL);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        ckd_store *store;
        scene s = scene_of(2);
        file_set_fault_hook(die_before_manifest, NULL);
        if (scene_open(&store, d->p.dir, CKD_OPEN_WRITE, NULL) == CKD_OK) {
            scene_save(NULL, store, &s, NULL);
        }
        _exit(1);
    }
    int code;
    assert_int_equal(waitpid(pid, &code, 0), pid);
    assert_true(WIFSIGNALED(code));
    disk_begin(d, 3, 3);
    ckd_store *store = disk_open(d, CKD_OPEN_WRITE);
    ckd_store_close(store);
    disk_end("recovery", d, 2);
}

/*
 * The catalog drops a checkpoint whose manifest is lost. What the catalog knew about it must be durable
 * before, or no repair can restore the checkpoint.
 */
void power_manifest_lost(void **state) {
    disk *d = *state;
    scene_make(d->p.dir, 0, 3);
    assert_int_equal(unlink(store_path_of(d->p.dir, "data/m/run.2.0")), 0);
    d->p.now.flags = DAMAGED;
    disk_begin(d, 7, 7);
    ckd_store_close(disk_open(d, CKD_OPEN_WRITE));
    disk_end("lost manifest", d, 3);
}

/*
 * Its only chunk file is missing, too, and parity can rebuild it; or it is in data/q. It must be durable before the
 * manifest that names it again.
 */
static void lose_manifest_and_file(disk *d, bool aside) {
    manifest m;
    make_bases(d, 3, !aside);
    ckd_store *store = disk_open(d, CKD_OPEN_READ);
    assert_int_equal(store_read_manifest(&m, store, SCENE_RUN, 2, 0, NULL), CKD_OK);
    pathname p = path_chunk(store->path, &m.files[0].id, "");
    if (aside) {
        assert_int_equal(mkdir(store_path_of(d->p.dir, "data/q"), 0777), 0);
        assert_int_equal(rename(p.text, damage_path_aside(store, strrchr(p.text, '/') + 1).text), 0);
    } else {
        assert_int_equal(unlink(p.text), 0);
    }
    manifest_free(&m);
    ckd_store_close(store);
    assert_int_equal(unlink(store_path_of(d->p.dir, "data/m/run.2.0")), 0);
    d->p.now.flags = DAMAGED;
    disk_begin(d, 7, 7);
    store = disk_open(d, CKD_OPEN_WRITE);
    repair(store, false, aside ? 1 : 2);
    disk_flags(d, 0);
    ckd_store_close(store);
    disk_end(aside ? "lost manifest and file in data/q" : "lost manifest and file", d, 3);
}

void power_manifest_and_file_lost(void **state) {
    lose_manifest_and_file(*state, false);
}

void power_manifest_lost_and_file_aside(void **state) {
    lose_manifest_and_file(*state, true);
}

/* ---- failing saves and compactions ---- */

void power_save_that_fails(void **state) {
    disk *d = *state;
    ckd_error err = {0};
    scene s = scene_of(2);
    failure f = {FILE_OP_DIR_SYNC, DIR_MANIFESTS, 1};
    scene_make(d->p.dir, 0, 2);
    disk_begin(d, 3, 7);
    ckd_store *store = disk_open(d, CKD_OPEN_WRITE);
    file_set_fault_hook(fail_once, &f);
    assert_int_not_equal(scene_save(NULL, store, &s, &err), CKD_OK);
    file_set_fault_hook(NULL, NULL);
    assert_int_equal(f.left, 0);
    ckd_store_close(store);
    disk_end("save that fails", d, 3);
}

static void compact_failing(disk *d, failure f, const char *what) {
    ckd_error err = {0};
    ckd_compact_options o = options_for(1);
    scene_make(d->p.dir, 0, 4);
    disk_begin(d, 15, 15);
    ckd_store *store = disk_open(d, CKD_OPEN_WRITE);
    file_set_fault_hook(fail_once, &f);
    (void)ckd_compact(NULL, store, &o, &err);
    file_set_fault_hook(NULL, NULL);
    assert_int_equal(f.left, 0);
    ckd_store_close(store);
    disk_end(what, d, 4);
}

void power_compaction_that_fails(void **state) {
    compact_failing(*state, (failure){FILE_OP_DIR_SYNC, DIR_MANIFESTS, 1}, "compaction that fails");
}

/* ---- common files ---- */

#define SMALL_STEPS 8 /* enough that the steps before each run's newest four are packed into one file */

void power_common_file(void **state) {
    disk *d = *state;
    ckd_error err = {0};
    const uint64_t all = (1u << SMALL_STEPS) - 1;
    ckd_compact_options o = options_for(100);
    o.pack_below = PACK_BELOW;
    scene_make(d->p.dir, 0, SMALL_STEPS);
    disk_begin(d, all, all);
    ckd_store *store = disk_open(d, CKD_OPEN_WRITE);
    ckd_compaction *done;
    disk_must(ckd_compact(&done, store, &o, &err), &err);
    check_items(done);
    assert_int_not_equal(done->count, 0);
    for (size_t i = 0; i < done->count; i++) {
        assert_int_equal(done->items[i].why, CKD_COMPACT_PACK);
    }
    ckd_compaction_free(done);
    ckd_store_close(store);
    disk_end("common file", d, SMALL_STEPS);
}

/* ---- notes ---- */

void power_notes(void **state) {
    disk *d = *state;
    ckd_error err = {0};
    ckd_checkpoint c;
    scene_make(d->p.dir, 0, 2);
    ckd_store *store = disk_open(d, CKD_OPEN_WRITE);
    disk_must(ckd_store_find(&c, store, SCENE_RUN, 1, &err), &err);
    disk_begin(d, 3, 3);
    disk_must(ckd_store_pin(store, &c.id, "first", &err), &err);
    disk_must(ckd_store_pin(store, &c.id, PIN_AGAIN, &err), &err);
    disk_flags(d, PINNED_AGAIN);
    disk_must(ckd_store_unpin(store, &c.id, &err), &err);
    disk_flags(d, UNPINNED);
    ckd_store_close(store);
    disk_end("notes", d, 2);
}

/*
 * A process died before its pin, or its removal of one, was durable. Another process that finds this state
 * and reports it must make it durable first.
 */
void power_notes_of_the_dead(void **state) {
    disk *d = *state;
    ckd_error err = {0};
    ckd_checkpoint c;
    dir_list list;
    char path[256];
    scene_make(d->p.dir, 0, 2);
    ckd_store *store = disk_open(d, CKD_OPEN_WRITE);
    disk_must(ckd_store_find(&c, store, SCENE_RUN, 1, &err), &err);
    disk_must(ckd_store_pin(store, &c.id, PIN_AGAIN, &err), &err);
    assert_int_equal(dir_list_read(&list, store_path_of(d->p.dir, DIR_SETTINGS), NULL), CKD_OK);
    assert_int_equal(list.count, 1);
    snprintf(path, sizeof(path), "%s/%s", DIR_SETTINGS, list.names[0]);
    d->p.now = (expectation){.committed = 3, .possible = 3, .flags = PINNED_AGAIN};
    power_begin(&d->p, list.names[0]);
    dir_list_free(&list);
    disk_must(ckd_store_pin(store, &c.id, PIN_AGAIN, &err), &err);
    disk_flags(d, PINNED_AGAIN | PINNED);
    disk_flags(d, PINNED_AGAIN);
    assert_int_equal(unlink(store_path_of(d->p.dir, path)), 0);
    assert_int_equal(ckd_store_unpin(store, &c.id, &err), CKD_E_NOT_FOUND);
    disk_flags(d, UNPINNED);
    ckd_store_close(store);
    disk_end("notes of the dead", d, 2);
}

/* ---- saving a deleted step again ---- */

void power_same_step_again(void **state) {
    disk *d = *state;
    ckd_error err = {0};
    ckd_checkpoint c;
    ckd_delete_options now = CKD_DELETE_OPTIONS_INIT;
    now.undo_s = 0;
    scene_make(d->p.dir, 0, 2);
    disk_begin(d, 1, 3);
    ckd_store *store = disk_open(d, CKD_OPEN_WRITE);
    disk_must(ckd_store_find(&c, store, SCENE_RUN, 1, &err), &err);
    disk_must(ckd_store_delete(store, &c.id, 1, &now, &err), &err);
    disk_must(ckd_store_collect(NULL, store, NULL, &err), &err);
    disk_expect(d, 1, 1);
    disk_save(d, store, 1, false);
    ckd_store_close(store);
    disk_end("the same step again", d, 2);
}

/* ---- lossy ---- */

/* Masks are bits of `known`. */
typedef struct lossy_disk {
    fingerprints known;
    size_t count; /* fingerprints at the end of the scenario */
} lossy_disk;

static uint64_t listed_of(ckd_store *store, const fingerprints *known) {
    uint64_t mask = 0;
    fingerprints now = fingerprints_of(store);
    assert_int_equal(fingerprints_check(store, known), now.count);
    for (size_t i = 0; i < now.count; i++) {
        for (size_t k = 0; k < known->count; k++) {
            mask |= strcmp(now.items[i].name, known->items[k].name) == 0 ? UINT64_C(1) << k : 0;
        }
    }
    fingerprints_free(&now);
    return mask;
}

static void check_lossy(const char *dir, const expectation *e, bool thorough, void *context) {
    const lossy_disk *l = context;
    ckd_store *store;
    ckd_error err = {0};
    disk_must(scene_open(&store, dir, thorough ? CKD_OPEN_READ : CKD_OPEN_WRITE, &err), &err);
    uint64_t mask = listed_of(store, &l->known);
    assert_int_equal(mask & e->committed, e->committed);
    assert_int_equal(mask & ~(e->committed | e->possible), 0);
    ckd_store_close(store);
    disk_must(scene_open(&store, dir, CKD_OPEN_WRITE, &err), &err);
    assert_int_equal(listed_of(store, &l->known), mask);
    scene_check(store, 0, 0);
    ckd_store_close(store);
    store_check_files(dir);
}

/* A run of fidelity near and one of fidelity coarse, two steps each, are compacted. */
void power_lossy(void **state) {
    disk *d = *state;
    lossy_disk l = {0};
    ckd_error err = {0};
    ckd_compact_options o = options_for(1);
    ckd_store_close(disk_open(d, CKD_OPEN_CREATE));
    d->p.check = check_lossy;
    d->p.context = &l;
    disk_begin(d, 0, 15);
    ckd_store *store = disk_open(d, CKD_OPEN_WRITE);
    make_chain(store, "a", CKD_NEAR, 0, 2);
    disk_expect(d, 3, 15);
    make_chain(store, "b", CKD_COARSE, 0, 2);
    disk_expect(d, 15, 15);
    l.known = fingerprints_of(store);
    assert_int_equal(l.known.count, 4);
    disk_must(ckd_compact(NULL, store, &o, &err), &err);
    ckd_store_close(store);
    disk_end("lossy", d, 0);
    fingerprints_free(&l.known);
}

/* ---- manifests of early versions ---- */

/* All listed checkpoints load, and so does the one in the trash after it is restored. */
static void check_early(const char *dir, const expectation *e, bool thorough, void *context) {
    const lossy_disk *l = context;
    ckd_store *store;
    ckd_trash *trash;
    ckd_error err = {0};
    (void)e;
    (void)thorough;
    disk_must(scene_open(&store, dir, CKD_OPEN_WRITE, &err), &err);
    disk_must(ckd_store_trash(&trash, store, &err), &err);
    disk_must(ckd_store_undelete(store, &trash->items[trash->count - 1].checkpoint.id, 1, &err), &err);
    ckd_trash_free(trash);
    assert_int_equal(fingerprints_check(store, &l->known), l->count);
    ckd_store_close(store);
}

/*
 * A step in the trash builds on deltas that only older generations of other steps have once these are
 * compacted. Compaction first adds the files with these deltas to the step's manifest.
 */
void power_early(void **state) {
    disk *d = *state;
    lossy_disk l = {0};
    ckd_checkpoint last;
    ckd_error err = {0};
    ckd_compact_options o = options_for(1);
    tree_copy("tests/golden/v1/links", store_path_of(d->p.dir, ""));
    ckd_store *store = disk_open(d, CKD_OPEN_WRITE);
    l.known = fingerprints_of(store);
    l.count = l.known.count;
    disk_must(ckd_store_find(&last, store, "run", CKD_LATEST, &err), &err);
    disk_must(ckd_store_delete(store, &last.id, 1, NULL, &err), &err);
    ckd_store_close(store);
    early_store(d->p.dir);
    d->p.check = check_early;
    d->p.context = &l;
    disk_begin(d, 0, 0);
    store = disk_open(d, CKD_OPEN_WRITE);
    disk_must(ckd_compact(NULL, store, &o, &err), &err);
    ckd_store_close(store);
    disk_end("early", d, 0);
    fingerprints_free(&l.known);
}

/*
 * Two steps are in the trash, and the deadline of the first is over. The second builds on it. Its manifest
 * must name the files of the first before the first one's manifest is removed.
 */
void power_early_collected(void **state) {
    disk *d = *state;
    lossy_disk l = {.count = 3};
    ckd_checkpoint c;
    ckd_error err = {0};
    scene_make(d->p.dir, 0, 4);
    ckd_store *store = disk_open(d, CKD_OPEN_WRITE);
    l.known = fingerprints_of(store);
    for (uint64_t step = 2; step < 4; step++) {
        ckd_delete_options o = CKD_DELETE_OPTIONS_INIT;
        o.undo_s = step == 2 ? 0 : o.undo_s;
        disk_must(ckd_store_find(&c, store, SCENE_RUN, step, &err), &err);
        disk_must(ckd_store_delete(store, &c.id, 1, &o, &err), &err);
    }
    ckd_store_close(store);
    early_store(d->p.dir);
    d->p.check = check_early;
    d->p.context = &l;
    disk_begin(d, 0, 0);
    ckd_store_close(disk_open(d, CKD_OPEN_WRITE));
    disk_end("early, collected", d, 0);
    fingerprints_free(&l.known);
}
