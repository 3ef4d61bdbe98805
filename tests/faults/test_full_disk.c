/*
 * A disk that has only the space of materialized copies left. The copies are removed for a save, whenever during the
 * save the disk becomes full.
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
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/file.h"
#include "tests/support/checkpoints.h"
#include "tests/support/scratch.h"
#include "tests/support/tempdir.h"

enum { N = 800000, SMALL = 300000, DISK = 48 << 20 };

typedef struct disk {
    char *dir, path[2048]; /* the disk is mounted on `path`, in `dir` */
    bool mounted;
    ckd_store *store;
    float *values; /* of the newest checkpoint of "run" */
    uint8_t *noise;
    size_t problems; /* messages about the catalog */
    size_t damaged;  /* messages that call it damaged */
} disk;

static void note_message(void *context, const char *message) {
    disk *d = context;
    d->problems += strstr(message, "catalog") != NULL;
    d->damaged += strstr(message, "catalog is damaged") != NULL;
}

static ckd_save *begin(disk *d, const char *run, uint64_t step) {
    ckd_save_options o = CKD_SAVE_OPTIONS_INIT;
    o.run = run;
    o.step = step;
    o.newest_load_cost = 1; /* every delta gets a materialized copy, ... */
    o.max_load_cost = 1000; /* ... and no chain ends */
    ckd_save *save;
    ckd_error err = {0};
    if (ckd_save_begin(&save, d->store, &o, &err) != CKD_OK) {
        fail_msg("begin: %s (%s)", err.message, err.file);
    }
    return save;
}

static void commit(ckd_save *save) {
    ckd_error err = {0};
    if (ckd_save_commit(NULL, save, &err) != CKD_OK) {
        fail_msg("commit: %s (%s)", err.message, err.file);
    }
}

/* Makes a run whose newest checkpoint has materialized copies, on a disk with much free space. */
static int setup(void **state) {
    disk *d = calloc(1, sizeof(*d));
    *state = d;
    d->dir = tempdir_create();
    snprintf(d->path, sizeof(d->path), "%s/disk", d->dir);
    assert_int_equal(mkdir(d->path, 0777), 0);
    d->mounted = scratch_mount(d->path, DISK);
    if (!d->mounted) {
        return 0;
    }
    char path[4096];
    snprintf(path, sizeof(path), "%s/store", d->path);
    ckd_store_options o = CKD_STORE_OPTIONS_INIT;
    o.on_message = note_message;
    o.message_context = d;
    o.threads = 1;
    assert_int_equal(ckd_store_open(&d->store, path, CKD_OPEN_CREATE, &o, NULL), CKD_OK);
    uint64_t n = N;
    d->values = random_values(CKD_F32, N, 5);
    d->noise = random_bits(SMALL * 4, 6);
    for (uint64_t step = 0; step < 2; step++) {
        ckd_save *save = begin(d, "run", step);
        add_tensor(save, "t", CKD_F32, 1, &n, NULL, d->values);
        commit(save);
        if (step == 0) {
            change_values(CKD_F32, d->values, N, 1);
        }
    }
    return 0;
}

static int teardown(void **state) {
    disk *d = *state;
    ckd_store_close(d->store);
    free(d->values);
    free(d->noise);
    if (d->mounted) {
        scratch_unmount(d->path);
    }
    tempdir_remove(d->dir);
    free(d);
    return 0;
}

static void need_disk(const disk *d) {
    if (!d->mounted) {
        print_message("skipped: a tmpfs cannot be mounted here (%s)\n", strerror(errno));
        skip();
    }
}

/* Bytes in data/k. */
static uint64_t copies(const disk *d) {
    char path[4096];
    uint64_t total;
    snprintf(path, sizeof(path), "%s/store/data/k", d->path);
    assert_int_equal(dir_bytes(&total, path, NULL), CKD_OK);
    return total;
}

static void drop_copies(const disk *d) {
    char path[4096];
    snprintf(path, sizeof(path), "rm '%s'/store/data/k/*", d->path);
    assert_int_equal(system(path), 0);
}

/* Fills the disk until `free_bytes` bytes are free. */
static void fill(const disk *d, uint64_t free_bytes) {
    char path[4096];
    struct statvfs fs;
    snprintf(path, sizeof(path), "%s/filler", d->path);
    int f = open(path, O_WRONLY | O_CREAT, 0666);
    assert_true(f >= 0);
    assert_int_equal(statvfs(d->path, &fs), 0);
    uint64_t available = fs.f_bavail * fs.f_frsize;
    assert_true(available > free_bytes);
    assert_int_equal(posix_fallocate(f, lseek(f, 0, SEEK_END), (off_t)(available - free_bytes)), 0);
    close(f);
}

static void check_run(disk *d, const char *run, uint64_t step, const char *name, const void *values,
                      size_t size) {
    void *back = load_whole(d->store, run, step, name, size);
    assert_memory_equal(back, values, size);
    free(back);
}

static void check_all(disk *d) {
    assert_int_equal(copies(d), 0);
    assert_int_equal(d->problems, 0);
    check_run(d, "run", 1, "t", d->values, N * 4);
    assert_int_equal(verify_damage(d->store), 0);
}

static void add_noise(disk *d, ckd_save *save) {
    uint64_t n = SMALL;
    add_tensor(save, "noise", CKD_F32, 1, &n, NULL, d->noise);
}

static void test_copies_are_kept_while_there_is_space(void **state) {
    disk *d = *state;
    need_disk(d);
    assert_true(copies(d) > SMALL * 4 + 200000); /* the tests below rely on this size */
    ckd_save *save = begin(d, "other", 1);
    add_noise(d, save);
    commit(save);
    assert_true(copies(d) > 0);
}

static void test_disk_fills_up_before_a_save(void **state) {
    disk *d = *state;
    need_disk(d);
    fill(d, 0);
    ckd_save *save = begin(d, "other", 1);
    add_noise(d, save);
    commit(save);
    check_run(d, "other", 1, "noise", d->noise, SMALL * 4);
    check_all(d);
}

/* The save reads its parent through the copies, so their space is not free until the save closes them. */
static void test_disk_fills_up_when_a_save_has_begun(void **state) {
    disk *d = *state;
    need_disk(d);
    ckd_save *save = begin(d, "run", 2);
    uint64_t n = N;
    fill(d, 16384);
    assert_true(copies(d) > 0);
    add_noise(d, save);
    /* Unchanged, and read without the copies from here on. */
    add_tensor(save, "t", CKD_F32, 1, &n, NULL, d->values);
    commit(save);
    check_run(d, "run", 2, "noise", d->noise, SMALL * 4);
    check_run(d, "run", 2, "t", d->values, N * 4);
    check_all(d);
}

/* The copy that is removed is the one that this save is making. */
static void test_disk_fills_up_in_the_middle(void **state) {
    disk *d = *state;
    need_disk(d);
    drop_copies(d);
    ckd_save *save = begin(d, "run", 2);
    uint64_t n = N;
    change_values(CKD_F32, d->values, N, 2);
    add_tensor(save, "t", CKD_F32, 1, &n, NULL, d->values);
    uint64_t half = SMALL / 2;
    assert_true(copies(d) > half * 4 + 100000);
    fill(d, 1 << 20); /* this much may still be in a buffer */
    add_tensor(save, "noise", CKD_F32, 1, &half, NULL, d->noise);
    commit(save);
    check_run(d, "run", 2, "t", d->values, N * 4);
    check_run(d, "run", 2, "noise", d->noise, half * 4);
    assert_int_equal(copies(d), 0);
    assert_int_equal(d->problems, 0);
    assert_int_equal(verify_damage(d->store), 0);
}

static void test_disk_fills_up_before_a_large_blob(void **state) {
    disk *d = *state;
    need_disk(d);
    ckd_save *save = begin(d, "other", 1);
    fill(d, 16384);
    ckd_error err = {0};
    assert_int_equal(ckd_save_blob(save, "noise", d->noise, SMALL * 4, &err), CKD_OK);
    commit(save);
    check_all(d);
}

static ckd_save *begin_small(disk *d) {
    ckd_save *save = begin(d, "other", 1);
    uint64_t one = 1;
    add_tensor(save, "one", CKD_F32, 1, &one, NULL, d->values);
    return save;
}

static void test_disk_fills_up_before_the_index(void **state) {
    disk *d = *state;
    need_disk(d);
    ckd_save *save = begin_small(d);
    fill(d, 0);
    commit(save);
    check_run(d, "other", 1, "one", d->values, 4);
    check_all(d);
}

/* The sizes that checkpoints report must be those of the files. */
static void check_sizes(const disk *d) {
    char path[4096];
    uint64_t chunks, manifests, reported = 0;
    snprintf(path, sizeof(path), "%s/store/data/c", d->path);
    assert_int_equal(dir_bytes(&chunks, path, NULL), CKD_OK);
    snprintf(path, sizeof(path), "%s/store/data/m", d->path);
    assert_int_equal(dir_bytes(&manifests, path, NULL), CKD_OK);
    ckd_checkpoint_list *list;
    assert_int_equal(ckd_store_list(&list, d->store, NULL, NULL), CKD_OK);
    for (size_t i = 0; i < list->count; i++) {
        reported += list->items[i].stored_bytes;
    }
    ckd_checkpoint_list_free(list);
    assert_int_equal(reported, chunks + manifests);
}

static void seal_fill_and_publish(disk *d, uint64_t free_bytes) {
    need_disk(d);
    ckd_save *save = begin_small(d);
    ckd_part part_of_one;
    assert_int_equal(ckd_save_seal(&part_of_one, save, NULL), CKD_OK);
    assert_true(copies(d) > 0);
    fill(d, free_bytes);
    ckd_checkpoint info;
    ckd_error err = {0};
    if (ckd_save_publish(&info, save, &part_of_one, 1, &err) != CKD_OK) {
        fail_msg("publish: %s (%s)", err.message, err.file);
    }
    ckd_part_free(&part_of_one);
    check_run(d, "other", 1, "one", d->values, 4);
    check_all(d);
    check_sizes(d);
}

static void test_disk_fills_up_before_the_manifest(void **state) {
    seal_fill_and_publish(*state, 0);
}

static void test_disk_has_space_for_the_manifest_only(void **state) {
    seal_fill_and_publish(*state, 4096);
}

/* ---- deletions ---- */

static ckd_status delete (disk *d, uint64_t step, ckd_error *err) {
    ckd_checkpoint c;
    assert_int_equal(ckd_store_find(&c, d->store, "run", step, NULL), CKD_OK);
    return ckd_store_delete(d->store, &c.id, 1, NULL, err);
}

static void must_empty(disk *d) {
    ckd_collect_options o = CKD_COLLECT_OPTIONS_INIT;
    ckd_collected c;
    ckd_error err = {0};
    o.all = 1;
    if (ckd_store_collect(&c, d->store, &o, &err) != CKD_OK) {
        fail_msg("collect: %s (%s)", err.message, err.file);
    }
    assert_true(c.checkpoints == 1 && c.waiting == 0);
    assert_int_equal(err.status, CKD_OK);
}

static bool has_mark(const disk *d) {
    char path[4096];
    snprintf(path, sizeof(path), "%s/store/data/deletions", d->path);
    return file_bytes(path) > 0;
}

/* Each time the disk is full, what is deleted can be removed before its time, and the space is free again. */
static void test_deleting_and_emptying_the_trash(void **state) {
    disk *d = *state;
    need_disk(d);
    drop_copies(d);
    for (uint64_t step = 1; step < 2; step--) {
        ckd_error err = {0};
        fill(d, 0);
        assert_true(has_mark(d));
        if (delete (d, step, &err) != CKD_OK) {
            fail_msg("delete: %s (%s)", err.message, err.file);
        }
        assert_int_equal(err.status, CKD_OK);
        assert_false(has_mark(d));
        must_empty(d);
        assert_true(has_mark(d));
    }
    ckd_checkpoint_list *list;
    assert_int_equal(ckd_store_list(&list, d->store, NULL, NULL), CKD_OK);
    assert_int_equal(list->count, 0);
    ckd_checkpoint_list_free(list);
    assert_int_equal(verify_damage(d->store), 0);
}

/* None of its files can go, as a delta needs them. Its manifest makes room for the next deletion. */
static void test_emptying_the_trash_of_what_others_build_on(void **state) {
    disk *d = *state;
    need_disk(d);
    drop_copies(d);
    fill(d, 0);
    for (uint64_t step = 0; step < 2; step++) {
        ckd_error err = {0};
        if (delete (d, step, &err) != CKD_OK) {
            fail_msg("delete: %s (%s)", err.message, err.file);
        }
        assert_false(has_mark(d));
        if (step == 0) {
            check_run(d, "run", 1, "t", d->values, N * 4);
        }
        must_empty(d);
        assert_true(has_mark(d));
    }
    assert_int_equal(verify_damage(d->store), 0);
}

/* The file system has space, but no room for one more file. That is no damage of the catalog. */
static void test_no_more_files(void **state) {
    disk *d = *state;
    ckd_error err = {0};
    struct statvfs fs;
    need_disk(d);
    drop_copies(d);
    assert_int_equal(statvfs(d->path, &fs), 0);
    assert_true(scratch_limit_files(d->path, fs.f_files - fs.f_ffree));
    if (delete (d, 0, &err) != CKD_OK) {
        fail_msg("delete: %s (%s)", err.message, err.file);
    }
    assert_true(d->problems > 0);
    assert_int_equal(d->damaged, 0);
    must_empty(d);
    check_run(d, "run", 1, "t", d->values, N * 4);
    assert_int_equal(verify_damage(d->store), 0);
}

/* There are copies: they go first, and the mark stays. */
static void test_copies_go_before_the_mark(void **state) {
    disk *d = *state;
    need_disk(d);
    assert_true(copies(d) > 0);
    assert_int_equal(delete (d, 0, NULL), CKD_OK);
    fill(d, 0);
    must_empty(d);
    assert_int_equal(copies(d), 0);
    assert_true(has_mark(d));
    check_all(d);
}

/* The mark's space is enough for one tombstone, and the copies' for the rest. */
static void test_deleting_two_at_once(void **state) {
    disk *d = *state;
    ckd_checkpoint c[2];
    ckd_error err = {0};
    need_disk(d);
    for (uint64_t i = 0; i < 2; i++) {
        assert_int_equal(ckd_store_find(&c[i], d->store, "run", i, NULL), CKD_OK);
    }
    ckd_id ids[] = {c[0].id, c[1].id};
    fill(d, 0);
    if (ckd_store_delete(d->store, ids, 2, NULL, &err) != CKD_OK) {
        fail_msg("delete: %s (%s)", err.message, err.file);
    }
    assert_int_equal(err.status, CKD_OK);
    assert_int_equal(copies(d), 0);
    assert_int_equal(ckd_store_undelete(d->store, ids, 2, NULL), CKD_OK);
    check_all(d);
}

/* ---- copies that cannot be made ---- */

typedef struct fault {
    file_op step;
    int error;
    size_t met;
} fault;

static int fail_copies(void *context, file_op step, const char *path) {
    fault *f = context;
    bool hit = step == f->step && strstr(path, "/data/k/") != NULL;
    f->met += hit;
    return hit ? f->error : 0;
}

static void test_failing_copies_do_not_fail_saves(void **state) {
    disk *d = *state;
    need_disk(d);
    static const file_op steps[] = {FILE_OP_CREATE, FILE_OP_WRITE,  FILE_OP_CLOSE,
                                    FILE_OP_RENAME, FILE_OP_REMOVE, FILE_OP_OPEN};
    static const int errors[] = {ENOSPC, EIO, EROFS};
    uint64_t n = N, step = 2;
    for (size_t s = 0; s < sizeof(steps) / sizeof(steps[0]); s++) {
        size_t met = 0;
        for (size_t e = 0; e < sizeof(errors) / sizeof(errors[0]); e++, step++) {
            fault f = {steps[s], errors[e], 0};
            change_values(CKD_F32, d->values, N, (unsigned)step);
            file_set_fault_hook(fail_copies, &f);
            ckd_save *save = begin(d, "run", step);
            add_tensor(save, "t", CKD_F32, 1, &n, NULL, d->values);
            commit(save);
            file_set_fault_hook(NULL, NULL);
            check_run(d, "run", step, "t", d->values, N * 4);
            met += f.met;
        }
        assert_true(met > 0);
        assert_int_equal(verify_damage(d->store), 0);
    }
}

static int fail_first_chunk(void *context, file_op step, const char *path) {
    size_t *left = context;
    return step == FILE_OP_CREATE && strstr(path, "/data/c/") && *left && (*left)-- ? ENOSPC : 0;
}

static void test_chunk_file_on_a_full_disk(void **state) {
    disk *d = *state;
    need_disk(d);
    size_t left = 1;
    file_set_fault_hook(fail_first_chunk, &left);
    ckd_save *save = begin_small(d);
    file_set_fault_hook(NULL, NULL);
    commit(save);
    assert_int_equal(left, 0);
    check_run(d, "other", 1, "one", d->values, 4);
    check_all(d);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(test_copies_are_kept_while_there_is_space),
        TEST(test_disk_fills_up_before_a_save),
        TEST(test_disk_fills_up_when_a_save_has_begun),
        TEST(test_disk_fills_up_in_the_middle),
        TEST(test_disk_fills_up_before_a_large_blob),
        TEST(test_disk_fills_up_before_the_index),
        TEST(test_disk_fills_up_before_the_manifest),
        TEST(test_disk_has_space_for_the_manifest_only),
        TEST(test_chunk_file_on_a_full_disk),
        TEST(test_deleting_and_emptying_the_trash),
        TEST(test_emptying_the_trash_of_what_others_build_on),
        TEST(test_no_more_files),
        TEST(test_copies_go_before_the_mark),
        TEST(test_deleting_two_at_once),
        TEST(test_failing_copies_do_not_fail_saves),
    };
    return cmocka_run_group_tests_name("full disk", tests, NULL, NULL);
}
