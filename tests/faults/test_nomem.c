/*
 * Lack of memory: every allocation of the library, of zstd's contexts and of SQLite fails, once or from then on. A
 * call that fails returns NOMEM and leaks nothing. After a temporary failure the same call works on the same handle.
 * Nothing committed is lost or wrong, and the next open for writing removes what was left over.
 *
 * The linker redirects the library's calls of malloc and the like to this file (see mk/test.mk). SQLite is configured
 * to use it.
 */
#include <dirent.h>
#include <errno.h>
#include <malloc.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <sqlite3.h>
#include <sys/wait.h>
#include <unistd.h>
#include <zstd.h>

#include "base/file.h"
#include "engine/save/measures.h"
#include "tests/support/actions.h"
#include "tests/support/bundled.h"
#include "tests/support/level.h"
#include "tests/support/marks.h"
#include "tests/support/samples.h"
#include "tests/support/scenes.h"
#include "tests/support/scratch.h"
#include "tests/support/survivors.h"
#include "tests/support/tempdir.h"

/* ---- allocations ---- */

typedef enum allocator { LIBRARY, SQLITE } allocator;

/* While it is on, only one thread allocates. */
static struct {
    bool on, for_ever;
    allocator from;
    unsigned long at, seen; /* number of the allocation of `from` that fails, from 1 */
    trouble trouble;
} shortage;

/* True if this allocation is to fail. */
static bool fails(allocator from) {
    if (!shortage.on || from != shortage.from) {
        return false;
    }
    shortage.seen++;
    bool now = shortage.seen == shortage.at || (shortage.for_ever && shortage.seen > shortage.at);
    shortage.trouble.hits += now;
    if (now) {
        errno = ENOMEM;
    }
    return now;
}

#define WRAPPED(result, name, parameters, arguments)            \
    result __real_##name parameters;                            \
    result __wrap_##name parameters;                            \
    result __wrap_##name parameters {                           \
        return fails(LIBRARY) ? NULL : __real_##name arguments; \
    }

WRAPPED(void *, malloc, (size_t size), (size))
WRAPPED(void *, calloc, (size_t count, size_t size), (count, size))
WRAPPED(void *, realloc, (void *block, size_t size), (block, size))
WRAPPED(char *, strdup, (const char *text), (text))
WRAPPED(DIR *, opendir, (const char *path), (path))
WRAPPED(char *, realpath, (const char *path, char *out), (path, out))
WRAPPED(ZSTD_CCtx *, ZSTD_createCCtx, (void), ())
WRAPPED(ZSTD_DCtx *, ZSTD_createDCtx, (void), ())

static sqlite3_mem_methods sqlite_memory;

static void *sqlite_malloc(int size) {
    return fails(SQLITE) ? NULL : sqlite_memory.xMalloc(size);
}
static void *sqlite_realloc(void *block, int size) {
    return fails(SQLITE) ? NULL : sqlite_memory.xRealloc(block, size);
}

/* Must be called before SQLite is used. */
static void take_over_sqlite(void) {
    sqlite3_mem_methods ours;
    if (sqlite3_config(SQLITE_CONFIG_GETMALLOC, &sqlite_memory) != SQLITE_OK) {
        abort();
    }
    ours = sqlite_memory;
    ours.xMalloc = sqlite_malloc;
    ours.xRealloc = sqlite_realloc;
    if (sqlite3_config(SQLITE_CONFIG_MALLOC, &ours) != SQLITE_OK) {
        abort();
    }
}

static void check_failure(const char *call, ckd_status status, const ckd_error *err) {
    if (status != CKD_E_NOMEM || err->status != status || !strstr(err->message, "memory")) {
        fail_msg("%s: %s, message '%s' (%s)", call, ckd_status_name(status), err->message, err->file);
    }
}

/* ---- sweeps ---- */

typedef struct sweep {
    const char *template; /* directory with a store; NULL: an empty directory */
    act_fn act;
    const char *source; /* another store, to copy from */
    uint64_t before;    /* bit mask of the steps in the template */
    uint64_t possible;  /* bit mask of the steps that are tried */
    uint64_t next;      /* the step to save afterwards */
} sweep;

/* Returns false if there are fewer allocations. */
static bool fail_at(const sweep *w, allocator from, bool for_ever, unsigned long at, bool all) {
    char *dir = tempdir_create();
    action a = {.dir = dir, .source = w->source, .trouble = &shortage.trouble};
    if (w->template) {
        tree_copy(store_path_of(w->template, ""), store_path_of(dir, ""));
    }
    size_t descriptors = open_descriptors();
    shortage.from = from;
    shortage.for_ever = for_ever;
    shortage.at = at;
    shortage.seen = 0;
    shortage.trouble = (trouble){.once = !for_ever, .check_failure = check_failure};
    shortage.on = true;
    w->act(&a);
    shortage.on = false;
    ckd_store_close(a.store);
    assert_int_equal(open_descriptors(), descriptors);
    assert_true(for_ever || (a.committed | a.gone) == (w->act == act_prunes ? 16 : w->possible));
    if (all) {
        survivors_check(dir, w->before | a.committed, w->possible & ~a.gone, w->next);
    } else {
        survivors_glance(dir, w->before | a.committed, w->possible & ~a.gone);
    }
    if (w->act == act_marks) {
        assert_true(for_ever || a.marks == MARK_CHANGES);
        marks_check(dir, a.marks);
    }
    tempdir_remove(dir);
    return shortage.trouble.hits > 0;
}

/* From one failing allocation to the next. SQLite makes far more allocations. */
static unsigned long stride_of(allocator from, bool for_ever) {
    if (test_level_now() == TEST_BIG) {
        return from == LIBRARY ? 1 : 17;
    }
    return (from == LIBRARY ? test_stride(41, 8, 1) : test_stride(1201, 255, 17)) * (for_ever ? 2u : 1u) *
           (under_sanitizer() ? 2u : 1u);
}

/* Returns the number of allocations of the library. */
static unsigned long fail_everywhere(const char *what, const sweep *w) {
    unsigned long counts[2] = {0, 0}, points = 0;
    for (int i = 0; i < 4; i++) {
        allocator from = i < 2 ? LIBRARY : SQLITE;
        unsigned long stride = stride_of(from, i % 2), at = test_first(what, stride);
        for (; fail_at(w, from, i % 2, at, points % (from == LIBRARY ? 4 : 16) == 0); at += stride) {
            points++;
        }
        counts[from] = at - 1;
    }
    print_message("%s: %lu allocations, %lu by SQLite, %lu failures\n", what, counts[LIBRARY], counts[SQLITE],
                  points);
    shortage.at = 0;
    return counts[LIBRARY];
}

static int teardown(void **state) {
    shortage.on = false;
    if (shortage.at) {
        print_message("the failure: allocation %lu of %s%s\n", shortage.at,
                      shortage.from == SQLITE ? "SQLite" : "the library",
                      shortage.for_ever ? ", for ever" : "");
    }
    shortage.at = 0;
    tempdir_remove(*state);
    return 0;
}

static void test_creating_a_store_and_saving_a_base(void **state) {
    (void)state;
    sweep w = {.act = act_creates, .possible = 1, .next = 1};
    assert_true(fail_everywhere("new store", &w) >= 100);
}

static void test_saving(void **state) {
    static const struct {
        const char *what;
        act_fn act;
        uint64_t possible;
    } saves[] = {{"delta", act_saves_delta, 4},
                 {"materialized copies", act_saves_ready, 4},
                 {"two ranks", act_saves_ranks, 4},
                 {"abort", act_aborts, 0}};
    scene_make(*state, 0, 2);
    for (size_t i = 0; i < sizeof(saves) / sizeof(saves[0]); i++) {
        sweep w = {*state, saves[i].act, .before = 3, .possible = saves[i].possible, .next = 3};
        assert_true(fail_everywhere(saves[i].what, &w) >= 50);
    }
}

/* Leaves a store as a writer of step 2 does that dies during the save. */
static void leave_behind(const char *dir) {
    int ended;
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        ckd_store *store;
        ckd_save *save;
        ckd_save_options o = CKD_SAVE_OPTIONS_INIT;
        o.run = SCENE_RUN;
        o.step = 2;
        _exit(scene_open(&store, dir, CKD_OPEN_WRITE, NULL) != CKD_OK ||
              ckd_save_begin(&save, store, &o, NULL) != CKD_OK ||
              ckd_save_blob(save, "b", "x", 1, NULL) != CKD_OK);
    }
    assert_int_equal(waitpid(pid, &ended, 0), pid);
    assert_int_equal(ended, 0);
}

/* The recovery removes what an intent names, and adds a checkpoint to the catalog. */
static void test_recovering_and_rebuilding(void **state) {
    scene_make(*state, 0, 2);
    leave_behind(*state);
    assert_int_equal(remove(store_path_of(*state, "catalog.db")), 0);
    sweep open = {*state, act_opens, .before = 3, .next = 2};
    assert_true(fail_everywhere("recovery", &open) >= 50);
    sweep rebuild = {*state, act_rebuilds, .before = 3, .next = 2};
    assert_true(fail_everywhere("rebuild", &rebuild) >= 50);
}

static void test_deleting_and_undeleting(void **state) {
    scene_make(*state, 0, 3);
    sweep w = {*state, act_deletes, .before = 1, .possible = 6, .next = 3};
    assert_true(fail_everywhere("delete", &w) >= 50);
    scene_trash(*state, 1, 2);
    w.act = act_undeletes;
    assert_true(fail_everywhere("undelete", &w) >= 50);
}

static void test_pinning_and_tagging(void **state) {
    scene_make(*state, 0, 3);
    sweep w = {*state, act_marks, .before = 7, .next = 3};
    assert_true(fail_everywhere("pins and tags", &w) >= 50);
}

static void test_pruning_after_a_save(void **state) {
    scene_make_pruning(*state, 4, 0);
    sweep w = {*state, act_prunes, .before = 8, .possible = 16 + 7, .next = 5};
    assert_true(fail_everywhere("prune", &w) >= 150);
}

static void test_compacting(void **state) {
    scene_make(*state, 0, 4);
    sweep w = {*state, act_compacts, .before = 15, .next = 4};
    assert_true(fail_everywhere("compact", &w) >= 150);
}

static void test_folding(void **state) {
    scene_make(*state, 0, 4);
    sweep w = {*state, act_folds, .before = 12, .possible = 3, .next = 4};
    assert_true(fail_everywhere("fold", &w) >= 150);
}

static void test_packing(void **state) {
    scene_make(*state, 0, 8);
    sweep w = {*state, act_packs, .before = 255, .next = 8};
    assert_true(fail_everywhere("pack", &w) >= 150);
}

static void test_recoding(void **state) {
    scene_make(*state, 0, 4);
    sweep w = {*state, act_recodes, .before = 15, .next = 4};
    assert_true(fail_everywhere("recode", &w) >= 150);
}

/* A lack of memory is no damage: the copy must not leave out a checkpoint. */
static void test_copying(void **state) {
    scene_make(*state, 0, 4);
    sweep w = {.act = act_copies, .source = *state, .possible = 15, .next = 4};
    assert_true(fail_everywhere("copy", &w) >= 150);
}

/* The next allocation after the destination's manifest is durable fails, or all later ones do. */
static int fail_after_commit(void *context, file_op step, const char *path) {
    if (step == FILE_OP_DIR_SYNC && strstr(path, context) && strstr(path, "data/m")) {
        shortage.on = true;
    }
    return 0;
}

/* A copy of one checkpoint with several files. Once its manifest is published, all of them stay. */
static void test_copying_a_chain(void **state) {
    scene_make(*state, 0, 4);
    for (int for_ever = 0; for_ever < 2; for_ever++) {
        char *dir = tempdir_create();
        ckd_store *from, *to;
        ckd_checkpoint newest;
        ckd_copy_options o = CKD_COPY_OPTIONS_INIT;
        ckd_error err = {0};
        assert_int_equal(scene_open(&from, *state, CKD_OPEN_READ, &err), CKD_OK);
        assert_int_equal(scene_open(&to, dir, CKD_OPEN_CREATE, &err), CKD_OK);
        assert_int_equal(ckd_store_find(&newest, from, SCENE_RUN, 3, &err), CKD_OK);
        o.checkpoints = &newest.id;
        o.count = 1;
        shortage.from = LIBRARY;
        shortage.for_ever = for_ever;
        shortage.at = 1;
        shortage.seen = 0;
        shortage.trouble = (trouble){.once = !for_ever};
        file_set_fault_hook(fail_after_commit, dir);
        ckd_status status = ckd_copy(NULL, to, from, &o, &err);
        file_set_fault_hook(NULL, NULL);
        shortage.on = false;
        shortage.at = 0;
        assert_true(shortage.trouble.hits > 0);
        assert_true(status == CKD_OK || for_ever);
        ckd_store_close(from);
        ckd_store_close(to);
        survivors_check(dir, 8, 0, 4);
        tempdir_remove(dir);
    }
}

static void test_reading(void **state) {
    scene_make(*state, 0, 3);
    sweep w = {*state, act_reads, .before = 7, .next = 3};
    assert_true(fail_everywhere("reading", &w) >= 150);
}

/* The same for a store with bundles and measures. */
static void test_reading_bundles(void **state) {
    scene_make(*state, 0, 3);
    measure_store(store_path_of(*state, ""));
    sweep w = {*state, act_reads, .before = 7, .next = 3};
    assert_true(fail_everywhere("reading bundles", &w) >= 100);
}

/* Returns CKD_OK or the first failure. The file exists only if it is complete. */
static ckd_status write_bundle(const char *path, ckd_error *err) {
    chunk_identity identity = {sample_id(1), sample_id(2), sample_id(3)};
    record records[SAMPLE_COUNT];
    uint8_t payloads[SAMPLE_COUNT][SAMPLE_BYTES];
    save_measures reported = {0};
    measures figures = measures_of_shard(0);
    hash128 root;
    uint64_t size;
    chunk_writer *w;
    sample_records(records, payloads);
    ckd_status status = chunk_writer_create(&w, path, &identity, err);
    if (status != CKD_OK) {
        return status;
    }
    chunk_writer_gather(w);
    for (size_t i = 0; i < SAMPLE_COUNT && status == CKD_OK; i++) {
        status = chunk_writer_append(w, &records[i], payloads[i], err);
    }
    const record *first = &records[0];
    if (status == CKD_OK) {
        status =
            measures_add(&reported, first->tensor->name, first->region, first->tensor->ndim, &figures, err);
    }
    if (status == CKD_OK) {
        status = measures_write_all(&reported, w, &first->tensor->checkpoint, err);
    }
    measures_free(&reported);
    if (status != CKD_OK) {
        chunk_writer_abort(w);
        return status;
    }
    return chunk_writer_finish_durable(w, &root, &size, err);
}

/* Every allocation fails while a file with a bundle is written. */
static void test_writing_bundles(void **state) {
    char path[4096];
    snprintf(path, sizeof(path), "%s/bundle", (char *)*state);
    for (int for_ever = 0; for_ever < 2; for_ever++) {
        bool enough = false;
        for (unsigned long at = 1; !enough; at++) {
            ckd_error err = {0};
            shortage.from = LIBRARY;
            shortage.for_ever = for_ever;
            shortage.at = at;
            shortage.seen = 0;
            shortage.trouble = (trouble){.once = !for_ever};
            shortage.on = true;
            ckd_status status = write_bundle(path, &err);
            shortage.on = false;
            enough = shortage.trouble.hits == 0;
            if (status != CKD_OK) {
                check_failure("writing a bundle", status, &err);
                assert_false(file_exists(path));
            } else {
                assert_true(enough || !for_ever); /* a buffer that cannot grow by much grows by less */
                assert_int_equal(file_remove(path, false, NULL), CKD_OK);
            }
            assert_true(!enough || (status == CKD_OK && at > 20));
        }
    }
    shortage.at = 0;
    assert_int_equal(write_bundle(path, NULL), CKD_OK);
    chunk *c;
    assert_int_equal(chunk_open(&c, path, NULL), CKD_OK);
    assert_int_equal(c->record_count, SAMPLE_COUNT + 1);
    chunk_close(c);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, tempdir_setup, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(test_creating_a_store_and_saving_a_base),
        TEST(test_saving),
        TEST(test_recovering_and_rebuilding),
        TEST(test_deleting_and_undeleting),
        TEST(test_pinning_and_tagging),
        TEST(test_pruning_after_a_save),
        TEST(test_compacting),
        TEST(test_folding),
        TEST(test_packing),
        TEST(test_recoding),
        TEST(test_copying),
        TEST(test_copying_a_chain),
        TEST(test_reading),
        TEST(test_reading_bundles),
        TEST(test_writing_bundles),
    };
    take_over_sqlite();
    (void)mallopt(M_MMAP_THRESHOLD,
                  1 << 30); /* keep freed memory: otherwise page faults take most of the time */
    (void)mallopt(M_TRIM_THRESHOLD, 1 << 30);
    scratch_begin();
    int failed = run_sampled("nomem", tests, 3, NULL, NULL);
    scratch_end();
    return failed;
}
