/*
 * Scrubbing: verified files are not read again before they are due, the oldest come first, and a scrub that ends early
 * is continued. Damage is found each time. Others save, delete and collect meanwhile.
 */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <unistd.h>

#include "base/file.h"
#include "tests/support/actions.h"
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

static void save_bases(ckd_store *store, uint64_t first, uint64_t end) {
    for (uint64_t step = first; step < end; step++) {
        scene s = scene_of(step);
        ckd_error err = {0};
        s.base = true;
        must(scene_save(NULL, store, &s, &err), &err);
    }
}

/* Scrubs what was not verified in the last hour. The result is what it read and found. */
typedef struct scrubbed {
    uint64_t files, bytes, left, oldest_ns;
    size_t damage;
    char file[256], what[256]; /* of the first damage */
} scrubbed;

static scrubbed scrub(ckd_store *store) {
    ckd_scrub_options o = CKD_SCRUB_OPTIONS_INIT;
    ckd_scrub_result *r;
    ckd_error err = {0};
    o.older_than_s = 3600;
    must(ckd_store_scrub(&r, store, &o, &err), &err);
    scrubbed out = {.files = r->found->files,
                    .bytes = r->found->bytes,
                    .left = r->files_left,
                    .oldest_ns = r->oldest_ns,
                    .damage = r->found->damage_count};
    if (out.damage) {
        snprintf(out.file, sizeof(out.file), "%s", r->found->damage[0].file);
        snprintf(out.what, sizeof(out.what), "%s", r->found->damage[0].what);
    }
    ckd_scrub_result_free(r);
    return out;
}

/* The path of the n-th chunk file by name. */
static const char *chunk_path(const char *dir, size_t n) {
    dir_list list;
    char below[128];
    assert_int_equal(dir_list_read(&list, store_path_of(dir, "data/c"), NULL), CKD_OK);
    assert_true(n < list.count);
    snprintf(below, sizeof(below), "data/c/%s", list.names[n]);
    dir_list_free(&list);
    return store_path_of(dir, below);
}

static void flip_middle(const char *path) {
    size_t size;
    unsigned char *data = read_whole_file(path, &size);
    data[size / 2] ^= 1;
    write_whole_file(path, data, size);
    free(data);
}

/* A scrub reads only files that were not verified recently. A rebuilt catalog does not know when they were. */
static void test_verified_files_are_remembered(void **state) {
    ckd_store *store = open_store(*state, CKD_OPEN_CREATE);
    ckd_scrub_result *r;
    ckd_error err = {0};
    assert_int_equal(scrub(store).files, 0);
    save_bases(store, 0, 4);
    uint64_t before = clock_wall_ns(), whole;
    scrubbed s = scrub(store);
    assert_int_equal(dir_bytes(&whole, store_path_of(*state, "data/c"), NULL), CKD_OK);
    assert_true(s.files == 4 && s.bytes == whole && s.damage == 0 && s.left == 0 && s.oldest_ns >= before);
    assert_int_equal(scrub(store).files, 0);
    save_bases(store, 4, 6);
    ckd_store_close(store);
    store = open_store(*state, CKD_OPEN_WRITE);
    assert_int_equal(scrub(store).files, 2);
    must(ckd_store_scrub(&r, store, NULL, &err), &err); /* all files */
    assert_int_equal(r->found->files, 6);
    assert_int_equal(r->found->checkpoints, 6);
    ckd_scrub_result_free(r);
    ckd_store_close(store);
    must(ckd_store_rebuild(NULL, store_path_of(*state, ""), NULL, &err), &err);
    store = open_store(*state, CKD_OPEN_READ);
    assert_int_equal(ckd_store_scrub(&r, store, NULL, &err), CKD_E_READ_ONLY);
    assert_null(r);
    ckd_store_close(store);
    store = open_store(*state, CKD_OPEN_WRITE);
    assert_int_equal(scrub(store).files, 6);
    ckd_store_close(store);
    store_check_clean(*state);
}

/* ---- scrubs that end early ---- */

static uint64_t cancel_at; /* number of bytes */

static int cancel(void *context, uint64_t done, uint64_t total) {
    (void)context;
    assert_true(done <= total);
    return done >= cancel_at;
}

static void test_scrub_continues_where_it_ended(void **state) {
    ckd_store *store = open_store(*state, CKD_OPEN_CREATE);
    ckd_scrub_options o = CKD_SCRUB_OPTIONS_INIT;
    ckd_scrub_result *r;
    ckd_error err = {0};
    uint64_t whole;
    save_bases(store, 0, 8);
    assert_int_equal(dir_bytes(&whole, store_path_of(*state, "data/c"), NULL), CKD_OK);
    o.older_than_s = 3600;
    o.on_progress = cancel;
    cancel_at = 0; /* before the first file */
    assert_int_equal(ckd_store_scrub(&r, store, &o, &err), CKD_E_CANCELLED);
    assert_int_equal(r->found->files, 0);
    assert_int_equal(r->files_left, 8);
    ckd_scrub_result_free(r);
    cancel_at = whole / 2;
    assert_int_equal(ckd_store_scrub(&r, store, &o, &err), CKD_E_CANCELLED);
    assert_in_range(r->found->files, 2, 5);
    assert_int_equal(r->found->files + r->files_left, 8);
    assert_int_equal(r->found->bytes + r->bytes_left, whole);
    ckd_scrub_result_free(r);
    scrubbed s = scrub(store);
    assert_in_range(s.files, 3, 6);
    assert_int_equal(scrub(store).files, 0);

    ckd_store_close(store);
}

/* All files are due, and the scrub ends after the first one. That must be one of those that were never verified. */
static void test_the_oldest_comes_first(void **state) {
    ckd_store *store = open_store(*state, CKD_OPEN_CREATE);
    ckd_scrub_options o = CKD_SCRUB_OPTIONS_INIT;
    ckd_scrub_result *r;
    save_bases(store, 0, 5);
    assert_int_equal(scrub(store).files, 5);
    save_bases(store, 5, 7);
    o.on_progress = cancel;
    /* All files are about as large, and two of them larger than this. */
    cancel_at = file_bytes(chunk_path(*state, 0)) + 200;
    assert_int_equal(ckd_store_scrub(&r, store, &o, NULL), CKD_E_CANCELLED);
    ckd_scrub_result_free(r);
    ckd_store_close(store);
    store = open_store(*state, CKD_OPEN_WRITE);
    assert_int_equal(scrub(store).files, 1);
    ckd_store_close(store);
}

static void test_time_and_rate(void **state) {
    ckd_store *store = open_store(*state, CKD_OPEN_CREATE);
    ckd_scrub_options o = CKD_SCRUB_OPTIONS_INIT;
    ckd_scrub_result *r;
    ckd_error err = {0};
    uint64_t whole;
    save_bases(store, 0, 6);
    assert_int_equal(dir_bytes(&whole, store_path_of(*state, "data/c"), NULL), CKD_OK);
    o.bytes_per_s = whole / 3;
    o.max_time_s = 1;
    uint64_t begun = clock_monotonic_ns();
    must(ckd_store_scrub(&r, store, &o, &err), &err);
    uint64_t took = clock_monotonic_ns() - begun;
    assert_in_range(r->found->files, 1, 5);
    assert_int_equal(r->found->files + r->files_left, 6);
    assert_int_equal(r->found->bytes + r->bytes_left, whole);
    assert_int_equal(r->oldest_ns, 0);
    assert_true((double)took > (double)r->found->bytes / (double)whole * 2.5e9);
    uint64_t left = r->files_left;
    ckd_scrub_result_free(r);
    assert_int_equal(scrub(store).files, left);
    ckd_store_close(store);
}

/* ---- damage ---- */

/* Each scrub finds damage again until it is gone. Foreign, missing and damaged files of all kinds are reported. */
static void test_damage_is_found_again(void **state) {
    ckd_store *store = open_store(*state, CKD_OPEN_CREATE);
    char path[1024];
    save_bases(store, 0, 4);
    snprintf(path, sizeof(path), "%s", chunk_path(*state, 1));
    flip_middle(path);
    scrubbed s = scrub(store);
    assert_true(s.files == 4 && s.damage == 1);
    assert_non_null(strstr(path, s.file));
    s = scrub(store); /* only the damaged file */
    assert_true(s.files == 1 && s.damage == 1 && s.oldest_ns == 0);
    flip_middle(path);
    s = scrub(store);
    assert_true(s.files == 1 && s.damage == 0 && s.oldest_ns > 0);

    ckd_error err = {0};
    must(ckd_store_rebuild(NULL, store_path_of(*state, ""), NULL, &err), &err);
    ckd_store_close(store);
    store = open_store(*state, CKD_OPEN_WRITE);
    size_t size, other_size;
    unsigned char *other = read_whole_file(chunk_path(*state, 2), &other_size);
    unsigned char *mine = read_whole_file(path, &size);
    write_whole_file(path, other, other_size); /* an intact chunk file, but a different one */
    s = scrub(store);
    assert_int_equal(s.damage, 1);
    assert_string_equal(s.what, "this is not the chunk file that its manifest names");
    assert_int_equal(unlink(path), 0);
    assert_int_equal(scrub(store).damage, 1);
    write_whole_file(path, mine, size);
    flip_middle(store_path_of(*state, "data/m/run.3.0"));
    s = scrub(store);
    assert_true(s.damage == 1 && strcmp(s.file, "data/m/run.3.0") == 0);
    flip_middle(store_path_of(*state, "data/m/run.3.0"));
    write_whole_file(store_path_of(*state, "data/n/tag.a.0"), "x", 1);
    s = scrub(store);
    assert_true(s.damage == 1 && strcmp(s.file, "data/n/tag.a.0") == 0);
    free(mine);
    free(other);
    ckd_store_close(store);
}

/* ---- concurrent use ---- */

static struct {
    ckd_store *other;
    uint64_t calls;
} beside;

/*
 * Another handle deletes step 0 for good before the first file is read, and saves and deletes during the next reads.
 */
static int delete_meanwhile(void *context, uint64_t done, uint64_t total) {
    (void)context;
    (void)total;
    ckd_checkpoint c;
    ckd_error err = {0};
    ckd_delete_options o = {.struct_size = sizeof(o), .undo_s = 0};
    ckd_collect_options all = CKD_COLLECT_OPTIONS_INIT;
    uint64_t call = beside.calls++;
    if (call == 0) {
        assert_int_equal(done, 0);
    } else if (call > 3) {
        return 0;
    }
    must(ckd_store_find(&c, beside.other, SCENE_RUN, call, &err), &err);
    must(ckd_store_delete(beside.other, &c.id, 1, &o, &err), &err);
    must(ckd_store_collect(NULL, beside.other, &all, &err), &err);
    save_bases(beside.other, 20 + call, 21 + call);
    return 0;
}

static void test_deletions_and_saves_during_a_scrub(void **state) {
    ckd_store *store = open_store(*state, CKD_OPEN_CREATE);
    ckd_scrub_options o = CKD_SCRUB_OPTIONS_INIT;
    ckd_scrub_result *r;
    ckd_error err = {0};
    ckd_store_options short_of_time = CKD_STORE_OPTIONS_INIT;
    short_of_time.lock_timeout_ms = 100; /* a scrub must not make the other handle wait */
    save_bases(store, 0, 10);
    must(ckd_store_open(&beside.other, store_path_of(*state, ""), CKD_OPEN_WRITE, &short_of_time, &err),
         &err);
    beside.calls = 0;
    o.on_progress = delete_meanwhile;
    must(ckd_store_scrub(&r, store, &o, &err), &err);
    assert_int_equal(r->found->damage_count, 0);
    assert_in_range(r->found->files, 6, 9); /* files that were removed before their turn are not damage */
    ckd_scrub_result_free(r);
    ckd_store_close(beside.other);
    scrubbed s = scrub(store);
    assert_true(s.files == 4 && s.damage == 0); /* the files saved during the first scrub */
    ckd_store_close(store);
    store_check_clean(*state);
}

/* ---- faults ---- */

static unsigned long fault_at, fault_seen;

static int fault_hook(void *context, file_op step, const char *path) {
    (void)context;
    (void)step;
    (void)path;
    return ++fault_seen == fault_at ? EIO : 0;
}

/* Each operation fails once. The scrub reports the error, or its result is right, and nothing is lost. */
static void test_faults(void **state) {
    ckd_store *store = open_store(*state, CKD_OPEN_CREATE);
    save_bases(store, 0, 3);
    ckd_store_close(store);
    unsigned long done = 0;
    for (fault_at = 1; done < 1; fault_at += under_sanitizer() ? 5 : 1) {
        ckd_scrub_result *r;
        ckd_error err = {0};
        size_t descriptors = open_descriptors();
        store = open_store(*state, CKD_OPEN_WRITE);
        fault_seen = 0;
        file_set_fault_hook(fault_hook, NULL);
        ckd_status status = ckd_store_scrub(&r, store, NULL, &err);
        file_set_fault_hook(NULL, NULL);
        ckd_store_close(store);
        assert_int_equal(open_descriptors(), descriptors);
        if (status == CKD_OK) {
            assert_true(r->found->files == 3 ||
                        r->found->damage_count); /* a file that cannot be read is reported as damaged */
        } else if (status != CKD_E_IO || err.sys_errno != EIO || !err.file[0]) {
            fail_msg("step %lu: %s: %s (%s)", fault_at, ckd_status_name(status), err.message, err.file);
        }
        done += fault_seen < fault_at;
        ckd_scrub_result_free(r);
    }
    assert_true(fault_at > 30);
    store = open_store(*state, CKD_OPEN_WRITE);
    scrub(store);
    assert_int_equal(scrub(store).files, 0);
    scene_check(store, 0, 3);
    ckd_store_close(store);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        tempdir_test(test_verified_files_are_remembered),
        tempdir_test(test_scrub_continues_where_it_ended),
        tempdir_test(test_the_oldest_comes_first),
        tempdir_test(test_time_and_rate),
        tempdir_test(test_damage_is_found_again),
        tempdir_test(test_deletions_and_saves_during_a_scrub),
        tempdir_test(test_faults),
    };
    scratch_begin();
    int failed = cmocka_run_group_tests_name("scrub", tests, NULL, NULL);
    scratch_end();
    return failed;
}
