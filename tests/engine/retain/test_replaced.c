/*
 * Generations that a compaction has replaced. They stay until the files of the newer generation are known to be intact:
 * these may have rotted while a reader, or the death of the compaction, kept the older ones.
 */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/file.h"
#include "engine/retain/replaced.h"
#include "engine/retain/retain.h"
#include "engine/store/paths.h"
#include "tests/support/checkpoints.h"
#include "tests/support/compactions.h"
#include "tests/support/pairs.h"
#include "tests/support/scenes.h"
#include "tests/support/scratch.h"
#include "tests/support/tempdir.h"

enum { STEPS = 9 };

static char messages[8192];

static void remember(void *context, const char *message) {
    (void)context;
    size_t used = strlen(messages);
    snprintf(messages + used, sizeof(messages) - used, "%s\n", message);
}

static ckd_store *open_with_messages(const char *dir) {
    ckd_store_options o = CKD_STORE_OPTIONS_INIT;
    ckd_store *store;
    ckd_error err = {0};
    o.threads = 1;
    o.on_message = remember;
    messages[0] = '\0';
    if (ckd_store_open(&store, store_path_of(dir, ""), CKD_OPEN_WRITE, &o, &err) != CKD_OK) {
        fail_msg("open: %s (%s)", err.message, err.file);
    }
    return store;
}

/* Counts how often chunk files are opened and read since the readers were last excluded. */
typedef struct reading {
    size_t opened, read, exclusions;
} reading;

static int count_reading(void *context, file_op step, const char *path) {
    reading *r = context;
    if (step == FILE_OP_LOCK && strstr(path, FILE_READER_LOCK)) {
        *r = (reading){.exclusions = r->exclusions + 1};
    }
    bool is_chunk = strstr(path, "/" DIR_CHUNKS "/") != NULL;
    r->opened += is_chunk && step == FILE_OP_OPEN;
    r->read += is_chunk && step == FILE_OP_READ;
    return 0;
}

/* Compacts, packing small files or not. The reader, if there is one, keeps the old generations. */
static void compact(const char *dir, bool packs, bool while_read) {
    ckd_store *store = open_with_messages(dir);
    file_lock *held = NULL;
    if (while_read) {
        assert_int_equal(
            lock_acquire(&held, store_path_of(dir, FILE_READER_LOCK), LOCK_SHARED, true, 0, NULL), CKD_OK);
    }
    ckd_compact_options o = options_for(1);
    o.pack_below = packs ? PACK_BELOW : CKD_NO_PACKS;
    ckd_compaction *done = compact_with(store, &o);
    check_items(done);
    assert_true(done->count > 0);
    assert_int_equal(done->old_files > 0, while_read);
    ckd_compaction_free(done);
    ckd_store_close(store);
    lock_release(held);
}

static void flip_middle(const char *path) {
    size_t size;
    unsigned char *data = read_whole_file(path, &size);
    data[size / 2] ^= 4;
    write_whole_file(path, data, size);
    free(data);
}

/* The largest chunk file that `before` does not list. */
static pathname largest_new(const char *dir, const dir_list *before) {
    dir_list now;
    pathname largest = {.text = ""};
    assert_int_equal(dir_list_read(&now, store_path_of(dir, DIR_CHUNKS), NULL), CKD_OK);
    for (size_t i = 0; i < now.count; i++) {
        bool is_new = true;
        for (size_t k = 0; k < before->count; k++) {
            is_new = is_new && strcmp(now.names[i], before->names[k]) != 0;
        }
        pathname p = path_of(store_path_of(dir, ""), DIR_CHUNKS, now.names[i]);
        if (is_new && (!largest.text[0] || file_bytes(p.text) > file_bytes(largest.text))) {
            largest = p;
        }
    }
    dir_list_free(&now);
    assert_true(largest.text[0] != '\0');
    return largest;
}

/* ---- damage ---- */

/* An old generation whose files are all there stays readable: without the newer one, it loads. */
static void check_older_is_whole(const char *dir, const char *scratch, size_t manifests) {
    char copy[600];
    snprintf(copy, sizeof(copy), "%s/%s", dir, scratch);
    assert_int_equal(mkdir(copy, 0700), 0);
    tree_copy(store_path_of(dir, ""), store_path_of(copy, ""));
    dir_list names;
    assert_int_equal(dir_list_read(&names, store_path_of(copy, DIR_MANIFESTS), NULL), CKD_OK);
    assert_int_equal(names.count, manifests);
    for (size_t i = 0; i < names.count; i++) { /* leaves the oldest generation of each */
        char older[CKD_RUN_MAX + 64];
        snprintf(older, sizeof(older), "%s", names.names[i]);
        char *end = strrchr(older, '.') + 1;
        int generation = atoi(end);
        bool replaces = false;
        while (generation-- > 0 && !replaces) {
            snprintf(end, 12, "%d", generation);
            replaces = file_exists(path_of(store_path_of(copy, ""), DIR_MANIFESTS, older).text);
        }
        if (replaces) {
            file_remove(path_of(store_path_of(copy, ""), DIR_MANIFESTS, names.names[i]).text, true, NULL);
        }
    }
    dir_list_free(&names);
    ckd_store *store = store_reopen(copy, CKD_OPEN_READ);
    for (uint64_t step = 0; step < STEPS; step++) {
        scene s = scene_of(step);
        assert_int_equal(scene_load(store, &s, NULL), CKD_OK);
    }
    ckd_store_close(store);
}

static void rot_before_the_removal(const char *dir, bool packs) {
    dir_list before;
    scene_make(dir, 0, STEPS);
    assert_int_equal(dir_list_read(&before, store_path_of(dir, DIR_CHUNKS), NULL), CKD_OK);
    compact(dir, packs, true);
    pathname rotten = largest_new(dir, &before);
    dir_list_free(&before);
    flip_middle(rotten.text);
    for (int opened = 0; opened < 2; opened++) {
        ckd_store *store = open_with_messages(dir);
        assert_non_null(strstr(messages, "a chunk file that a compaction wrote is damaged"));
        assert_non_null(strstr(messages, strrchr(rotten.text, '/')));
        if (opened) { /* on request, too, and others in the trash go */
            ckd_collected gone;
            assert_int_equal(ckd_store_collect(&gone, store, NULL, NULL), CKD_OK);
        }
        ckd_store_close(store);
    }
    char scratch[16];
    snprintf(scratch, sizeof(scratch), "copy%d", packs);
    check_older_is_whole(dir, scratch, folder_count(dir, DIR_MANIFESTS));
    assert_true(folder_count(dir, DIR_MANIFESTS) > STEPS);

    flip_middle(rotten.text); /* as a repair would */
    ckd_store *store = open_with_messages(dir);
    assert_string_equal(messages, "");
    assert_int_equal(folder_count(dir, DIR_MANIFESTS), STEPS);
    scene_check(store, 0, STEPS);
    ckd_store_close(store);
    store_check_clean(dir);
}

static void test_rot_before_the_removal(void **state) {
    rot_before_the_removal(*state, false);
}

static void test_rot_of_a_pack_before_the_removal(void **state) {
    rot_before_the_removal(*state, true);
}

/* A further compaction does not remove them either. */
static void test_rot_before_the_next_compaction(void **state) {
    dir_list before;
    scene_make(*state, 0, STEPS);
    assert_int_equal(dir_list_read(&before, store_path_of(*state, DIR_CHUNKS), NULL), CKD_OK);
    compact(*state, false, true);
    pathname rotten = largest_new(*state, &before);
    dir_list_free(&before);
    flip_middle(rotten.text);
    ckd_store *store = open_with_messages(*state);
    ckd_compact_options o = options_for(1);
    ckd_compaction_free(compact_with(store, &o));
    ckd_store_close(store);
    check_older_is_whole(*state, "copy", folder_count(*state, DIR_MANIFESTS));
}

/* ---- repair ---- */

typedef struct outcome {
    size_t repaired, left;
} outcome;

static outcome repair(ckd_store *store, int dry_run) {
    ckd_repair_options o = CKD_REPAIR_OPTIONS_INIT;
    ckd_repair_result *r;
    o.dry_run = dry_run;
    assert_int_equal(ckd_store_repair(&r, store, &o, NULL), CKD_OK);
    outcome out = {r->repaired_count, r->left->damage_count};
    ckd_repair_result_free(r);
    return out;
}

/* A new file rots, no parity covers it, and the old files are whole. A repair lists the older generations again. */
static void repair_by_older_files(const char *dir, bool packs) {
    dir_list before;
    scene_make(dir, 0, STEPS);
    assert_int_equal(dir_list_read(&before, store_path_of(dir, DIR_CHUNKS), NULL), CKD_OK);
    compact(dir, packs, true);
    pathname rotten = largest_new(dir, &before);
    dir_list_free(&before);
    flip_middle(rotten.text);
    ckd_store *store = open_with_messages(dir);
    assert_true(verify_damage(store) > 0);
    size_t manifests = folder_count(dir, DIR_MANIFESTS);
    outcome r = repair(store, 1);
    assert_true(r.repaired == 1 && r.left == 0);
    assert_non_null(strstr(messages, "can be listed again with its files from before a compaction"));
    assert_int_equal(folder_count(dir, DIR_MANIFESTS), manifests);
    r = repair(store, 0);
    assert_true(r.repaired == 1 && r.left == 0);
    assert_non_null(strstr(messages, "is listed again with its files from before a compaction"));
    assert_true(folder_count(dir, DIR_MANIFESTS) > manifests);
    scene_check(store, 0, STEPS);
    r = repair(store, 0);
    assert_true(r.repaired == 0 && r.left == 0);
    ckd_store_close(store);

    store = open_with_messages(dir); /* removes the rotten file, and reads the old ones for it */
    assert_string_equal(messages, "");
    assert_int_equal(folder_count(dir, DIR_MANIFESTS), STEPS);
    assert_false(file_exists(rotten.text));
    scene_check(store, 0, STEPS);
    ckd_store_close(store);
    store_check_clean(dir);
    assert_int_equal(ckd_store_rebuild(NULL, store_path_of(dir, ""), NULL, NULL), CKD_OK);
    store = store_reopen(dir, CKD_OPEN_WRITE);
    scene_check(store, 0, STEPS);
    ckd_store_close(store);
}

static void test_repair_by_older_files(void **state) {
    repair_by_older_files(*state, false);
}

static void test_repair_of_a_pack_by_older_files(void **state) {
    repair_by_older_files(*state, true);
}

/* Flips a bit in those that are still there. */
static void flip_all(const char *dir, const dir_list *files) {
    for (size_t i = 0; i < files->count; i++) {
        pathname p = path_of(store_path_of(dir, ""), DIR_CHUNKS, files->names[i]);
        if (file_exists(p.text)) {
            flip_middle(p.text);
        }
    }
}

/* Where the old files rotted as well, nothing is changed. One of them that is mended later is used. */
static void test_older_files_that_rotted(void **state) {
    dir_list before;
    scene_make(*state, 0, STEPS);
    assert_int_equal(dir_list_read(&before, store_path_of(*state, DIR_CHUNKS), NULL), CKD_OK);
    compact(*state, false, true);
    pathname rotten = largest_new(*state, &before);
    flip_middle(rotten.text);
    ckd_store *store = open_with_messages(*state);
    flip_all(*state, &before);
    char *files = tree_describe(store_path_of(*state, DIR_MANIFESTS));
    outcome r = repair(store, 0);
    assert_true(r.repaired == 0 && r.left > 0);
    char *now = tree_describe(store_path_of(*state, DIR_MANIFESTS));
    assert_string_equal(now, files);
    free(now);
    free(files);
    flip_all(*state, &before);
    r = repair(store, 0);
    assert_true(r.repaired == 1 && r.left == 0);
    scene_check(store, 0, STEPS);
    ckd_store_close(store);
    dir_list_free(&before);
}

/* ---- what is read ---- */

/* A compaction has read its own files back, and does not read them again before it removes the old ones. */
static void test_a_compaction_reads_its_files_once(void **state) {
    for (int packs = 0; packs < 2; packs++) {
        reading r = {0};
        if (!packs) {
            scene_make(*state, 0, STEPS);
        }
        file_set_fault_hook(count_reading, &r);
        compact(*state, packs, false);
        file_set_fault_hook(NULL, NULL);
        assert_true(r.exclusions > 1 && r.opened == 0 && r.read == 0);
        assert_int_equal(folder_count(*state, DIR_MANIFESTS), STEPS);
    }
}

/* The next writer reads new files through, removes the old ones, and later ones have nothing to read. */
static void test_the_next_writer_reads_them_once(void **state) {
    scene_make(*state, 0, STEPS);
    compact(*state, false, true);
    assert_true(folder_count(*state, DIR_MANIFESTS) > STEPS);
    for (int again = 0; again < 2; again++) {
        reading r = {0};
        file_set_fault_hook(count_reading, &r);
        ckd_store *store = open_with_messages(*state);
        file_set_fault_hook(NULL, NULL);
        assert_int_equal(r.read > 0, !again);
        assert_string_equal(messages, "");
        assert_int_equal(folder_count(*state, DIR_MANIFESTS), STEPS);
        scene_check(store, 0, STEPS);
        ckd_store_close(store);
    }
    store_check_clean(*state);
}

/* One call reads so much under the locks, and leaves the rest. */
static void test_reading_in_parts(void **state) {
    scene_make(*state, 0, STEPS);
    compact(*state, false, true);
    ckd_store *store = store_reopen(*state, CKD_OPEN_READ);
    manifest_set n;
    checked_files checked = {.read = UINT64_MAX};
    size_t all, count;
    assert_int_equal(manifest_set_read(&n, store, NULL), CKD_OK);
    assert_int_equal(replaced_choose(&all, &n, store, NULL, NULL), CKD_OK);
    assert_true(all > 0);
    assert_int_equal(replaced_choose(&count, &n, store, &checked, NULL), CKD_OK);
    assert_true(count == 0 && checked.more);
    checked = (checked_files){.read = 0};
    assert_int_equal(replaced_choose(&count, &n, store, &checked, NULL), CKD_OK);
    assert_true(count == all && !checked.more && checked.read > 0);
    checked_files_free(&checked);
    manifest_set_free(&n);
    ckd_store_close(store);
}

/* ---- locks ---- */

/* Another process takes the publish lock as soon as the removal has found a reader. */
typedef struct publisher {
    const char *dir;
    file_lock *held;
    unsigned tries;
} publisher;

static int publish_next(void *context, file_op step, const char *path) {
    publisher *p = context;
    if (step == FILE_OP_LOCK && strstr(path, FILE_PUBLISH_LOCK) && ++p->tries == 2) {
        assert_int_equal(
            lock_acquire(&p->held, store_path_of(p->dir, FILE_PUBLISH_LOCK), LOCK_EXCLUSIVE, true, 0, NULL),
            CKD_OK);
    }
    return 0;
}

/* The compaction is complete. What it cannot remove yet is counted, whoever holds the lock. */
static void test_a_busy_store_does_not_fail_a_compaction(void **state) {
    publisher p = {.dir = *state};
    file_lock *held;
    checked_files checked = {.read = 0};
    uint64_t left;
    ckd_error err = {0};
    scene_make(*state, 0, STEPS);
    ckd_store *store = open_with_messages(*state);
    assert_int_equal(lock_acquire(&held, store_path_of(*state, FILE_READER_LOCK), LOCK_SHARED, true, 0, NULL),
                     CKD_OK);
    ckd_compact_options o = options_for(1);
    ckd_compaction_free(compact_with(store, &o));
    file_set_fault_hook(publish_next, &p);
    ckd_status status = trash_remove_replaced(&left, store, &checked, 0, 0, &err);
    file_set_fault_hook(NULL, NULL);
    if (status != CKD_OK) {
        fail_msg("%s: %s", ckd_status_name(status), err.message);
    }
    assert_true(left > 0);
    lock_release(p.held);
    lock_release(held);
    checked_files_free(&checked);
    ckd_store_close(store);
}

/* ---- a compaction that does not end well ---- */

/* The disk is full once `room` manifests have been published. Otherwise another process has the publish lock then. */
typedef struct trouble {
    size_t room;
    bool busy;
    const char *dir;
    file_lock *held;
} trouble;

static int make_trouble(void *context, file_op step, const char *path) {
    trouble *t = context;
    bool published = step == FILE_OP_RENAME_NOREPLACE && strstr(path, "/" DIR_MANIFESTS "/");
    if (t->room > 0) {
        t->room -= published;
        return 0;
    }
    if (t->busy && step == FILE_OP_LOCK && !t->held && strstr(path, FILE_PUBLISH_LOCK)) {
        trouble one = *t;
        t->room = SIZE_MAX; /* this lock is no trouble */
        assert_int_equal(
            lock_acquire(&one.held, store_path_of(t->dir, FILE_PUBLISH_LOCK), LOCK_EXCLUSIVE, true, 0, NULL),
            CKD_OK);
        t->held = one.held;
    }
    return !t->busy && step == FILE_OP_WRITE && strstr(path, "/" DIR_CHUNKS "/") ? ENOSPC : 0;
}

/* Old generations go also when there is no space for a further checkpoint. */
static void test_a_full_disk(void **state) {
    scene_make(*state, 0, STEPS);
    ckd_store *store = open_with_messages(*state);
    ckd_compact_options o = options_for(1);
    trouble t = {.room = 2};
    file_set_fault_hook(make_trouble, &t);
    ckd_status status = ckd_compact(NULL, store, &o, NULL);
    file_set_fault_hook(NULL, NULL);
    assert_int_equal(status, CKD_E_NOSPACE);
    assert_int_equal(folder_count(*state, DIR_MANIFESTS), STEPS);
    scene_check(store, 0, STEPS);
    ckd_store_close(store);
    store_check_clean(*state);
}

/* A compaction that is through does not fail because others keep it from removing old files. */
static void test_a_busy_end(void **state) {
    scene_make(*state, 0, 3);
    ckd_store_options busy = CKD_STORE_OPTIONS_INIT;
    ckd_store *store;
    busy.threads = 1;
    busy.lock_timeout_ms = 50;
    assert_int_equal(ckd_store_open(&store, store_path_of(*state, ""), CKD_OPEN_WRITE, &busy, NULL), CKD_OK);
    trouble t = {.room = 2, .busy = true, .dir = *state};
    ckd_compact_options o = options_for(1);
    ckd_compaction *done;
    file_set_fault_hook(make_trouble, &t);
    ckd_error err = {0};
    ckd_status status = ckd_compact(&done, store, &o, &err);
    file_set_fault_hook(NULL, NULL);
    assert_non_null(t.held);
    lock_release(t.held);
    if (status != CKD_OK) {
        fail_msg("compact: %s (%s)", err.message, err.file);
    }
    assert_true(done->old_files > 0);
    ckd_compaction_free(done);
    ckd_store_close(store);
    assert_int_equal(folder_count(*state, DIR_MANIFESTS), 5);
    store = open_with_messages(*state);
    assert_int_equal(folder_count(*state, DIR_MANIFESTS), 3);
    scene_check(store, 0, 3);
    ckd_store_close(store);
}

int main(void) {
    const struct CMUnitTest tests[] = {tempdir_test(test_rot_before_the_removal),
                                       tempdir_test(test_rot_of_a_pack_before_the_removal),
                                       tempdir_test(test_rot_before_the_next_compaction),
                                       tempdir_test(test_repair_by_older_files),
                                       tempdir_test(test_repair_of_a_pack_by_older_files),
                                       tempdir_test(test_older_files_that_rotted),
                                       tempdir_test(test_a_compaction_reads_its_files_once),
                                       tempdir_test(test_the_next_writer_reads_them_once),
                                       tempdir_test(test_reading_in_parts),
                                       tempdir_test(test_a_busy_store_does_not_fail_a_compaction),
                                       tempdir_test(test_a_full_disk),
                                       tempdir_test(test_a_busy_end)};
    scratch_begin();
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    scratch_end();
    return failed;
}
