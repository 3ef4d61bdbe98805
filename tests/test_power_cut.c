/*
 * The power fails after any step. A model of the disk follows the steps of a save: what was not made durable is lost. From
 * it come, after every step, two disks:
 *
 *   strict: only synced contents, under names whose directory was synced after they were given
 *   names first: all names as they are, but only synced contents (what delayed allocation does)
 *
 * What was reported committed before must be on both. The model takes "durable" at its word: one missing sync, or one in
 * the wrong order, and a disk lacks something.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/bytes.h"
#include "base/file.h"
#include "base/hash.h"
#include "tests/support/marks.h"
#include "tests/support/scenes.h"
#include "tests/support/scratch.h"
#include "tests/support/survivors.h"
#include "tests/support/tempdir.h"

/* ---- the model ---- */

enum { NODES_MAX = 400, NAMES_MAX = 400, IMAGES_MAX = 2000 };

/* A file's content when it was last synced, or a directory's names. Known by its inode. */
typedef struct node {
    ino_t inode;
    unsigned char *content;
    size_t size;
} node;

typedef struct name {
    ino_t directory, inode;
    bool is_directory;
    char text[80];
} name;

typedef struct image {
    char path[256];
    uint64_t committed, possible;
    unsigned marks;
} image;

typedef struct disk {
    const char *dir; /* holds the store */
    char *images_dir;
    node nodes[NODES_MAX];
    size_t node_count;
    name names[NAMES_MAX]; /* durable ones */
    size_t name_count;
    file_step last_step; /* its effect is visible at the next one */
    char last_path[512];
    uint64_t committed, possible;
    bool marked;      /* pins and tags are changed: */
    unsigned marks;   /* so often */
    uint64_t seen[2]; /* the last image of each kind */
    image images[IMAGES_MAX];
    size_t image_count;
} disk;

static void forget_node(disk *d, ino_t inode) {
    for (size_t i = 0; i < d->node_count; i++) {
        if (d->nodes[i].inode == inode) {
            free(d->nodes[i].content);
            d->nodes[i] = d->nodes[--d->node_count];
            return;
        }
    }
}

static void sync_content(disk *d, const char *path) {
    struct stat st;
    if (stat(path, &st) != 0) {
        return;
    }
    forget_node(d, st.st_ino);
    assert_true(d->node_count < NODES_MAX);
    node *n = &d->nodes[d->node_count++];
    n->inode = st.st_ino;
    n->content = read_whole_file(path, &n->size);
}

static void sync_names(disk *d, const char *path) {
    struct stat st;
    dir_list list;
    if (stat(path, &st) != 0) {
        return;
    }
    ino_t directory = st.st_ino;
    size_t kept = 0;
    for (size_t i = 0; i < d->name_count; i++) {
        if (d->names[i].directory != directory) {
            d->names[kept++] = d->names[i];
        }
    }
    d->name_count = kept;
    assert_int_equal(dir_list_read(&list, path, NULL), CKD_OK);
    for (size_t i = 0; i < list.count; i++) {
        char below[1024];
        snprintf(below, sizeof(below), "%s/%s", path, list.names[i]);
        assert_int_equal(lstat(below, &st), 0);
        assert_true(d->name_count < NAMES_MAX && strlen(list.names[i]) < sizeof(d->names[0].text));
        name *n = &d->names[d->name_count++];
        *n = (name){directory, st.st_ino, S_ISDIR(st.st_mode), ""};
        strcpy(n->text, list.names[i]);
    }
    dir_list_free(&list);
}

static void sync_parent_names(disk *d, const char *path) {
    char parent[512];
    snprintf(parent, sizeof(parent), "%s", path);
    *strrchr(parent, '/') = '\0';
    sync_names(d, parent);
}

/* The last step has happened by now: what did it change on the disk? */
static void settle(disk *d) {
    struct stat st;
    switch (d->last_step) {
    case STEP_SYNC:
        sync_content(d, d->last_path);
        if (strstr(d->last_path, "-journal")) {
            sync_parent_names(d, d->last_path); /* SQLite does both in one */
        }
        break;
    case STEP_DIR_SYNC:
        sync_names(d, d->last_path);
        break;
    case STEP_CREATE:
    case STEP_MKDIR:
        if (stat(d->last_path, &st) == 0 && st.st_size == 0) {
            forget_node(d, st.st_ino); /* an inode number that was used before */
        }
        break;
    default:
        break;
    }
}

/* Everything as it is now is durable. */
static void sync_everything(disk *d, const char *path) {
    dir_list list;
    sync_names(d, path);
    assert_int_equal(dir_list_read(&list, path, NULL), CKD_OK);
    for (size_t i = 0; i < list.count; i++) {
        char below[1024];
        struct stat st;
        snprintf(below, sizeof(below), "%s/%s", path, list.names[i]);
        assert_int_equal(lstat(below, &st), 0);
        if (S_ISDIR(st.st_mode)) {
            sync_everything(d, below);
        } else {
            sync_content(d, below);
        }
    }
    dir_list_free(&list);
}

/* A name that is there, but was never made durable. */
static void unsync_name(disk *d, const char *text) {
    for (size_t i = 0; i < d->name_count; i++) {
        if (strcmp(d->names[i].text, text) == 0) {
            d->names[i] = d->names[--d->name_count];
            return;
        }
    }
    fail_msg("the model has no name %s", text);
}

/* ---- images ---- */

static void write_node(const disk *d, ino_t inode, const char *to) {
    for (size_t i = 0; i < d->node_count; i++) {
        if (d->nodes[i].inode == inode) {
            write_whole_file(to, d->nodes[i].content, d->nodes[i].size);
            return;
        }
    }
    write_whole_file(to, "", 0);
}

static void write_strict(const disk *d, ino_t directory, const char *to) {
    assert_int_equal(mkdir(to, 0777), 0);
    for (size_t i = 0; i < d->name_count; i++) {
        const name *n = &d->names[i];
        if (n->directory != directory) {
            continue;
        }
        char below[1024];
        snprintf(below, sizeof(below), "%s/%s", to, n->text);
        if (n->is_directory) {
            write_strict(d, n->inode, below);
        } else {
            write_node(d, n->inode, below);
        }
    }
}

static void write_names_first(const disk *d, const char *from, const char *to) {
    dir_list list;
    assert_int_equal(dir_list_read(&list, from, NULL), CKD_OK);
    assert_int_equal(mkdir(to, 0777), 0);
    for (size_t i = 0; i < list.count; i++) {
        char source[1024], target[1024];
        struct stat st;
        snprintf(source, sizeof(source), "%s/%s", from, list.names[i]);
        snprintf(target, sizeof(target), "%s/%s", to, list.names[i]);
        assert_int_equal(lstat(source, &st), 0);
        if (S_ISDIR(st.st_mode)) {
            write_names_first(d, source, target);
        } else {
            write_node(d, st.st_ino, target);
        }
    }
    dir_list_free(&list);
}

/* Names, sizes and contents, but not times. */
static uint64_t fingerprint(const char *path, uint64_t seed) {
    dir_list list;
    assert_int_equal(dir_list_read(&list, path, NULL), CKD_OK);
    for (size_t i = 0; i < list.count; i++) {
        char below[1024];
        struct stat st;
        snprintf(below, sizeof(below), "%s/%s", path, list.names[i]);
        seed = seed * 31 + hash64(list.names[i], strlen(list.names[i]));
        assert_int_equal(lstat(below, &st), 0);
        if (S_ISDIR(st.st_mode)) {
            seed = fingerprint(below, seed + 1);
            continue;
        }
        size_t size;
        unsigned char *data = read_whole_file(below, &size);
        seed = seed * 31 + hash64(data, size);
        free(data);
    }
    dir_list_free(&list);
    return seed;
}

static void take_image(disk *d, bool strict) {
    struct stat st;
    assert_true(d->image_count < IMAGES_MAX);
    image *m = &d->images[d->image_count];
    *m = (image){.committed = d->committed, .possible = d->possible, .marks = d->marks};
    snprintf(m->path, sizeof(m->path), "%s/%zu", d->images_dir, d->image_count);
    assert_int_equal(stat(d->dir, &st), 0);
    if (strict) {
        write_strict(d, st.st_ino, m->path);
    } else {
        write_names_first(d, d->dir, m->path);
    }
    uint64_t seen = fingerprint(m->path, d->committed + d->marks);
    if (seen != d->seen[strict]) {
        d->seen[strict] = seen;
        d->image_count++;
        return;
    }
    char *stale = m->path; /* as before: not worth a look */
    char command[300];
    snprintf(command, sizeof(command), "rm -r '%s'", stale);
    assert_int_equal(system(command), 0);
}

static void take_images(disk *d) {
    settle(d);
    take_image(d, true);
    take_image(d, false);
}

static int watch(void *context, file_step step, const char *path) {
    disk *d = context;
    if (step == STEP_READ || step == STEP_OPEN || step == STEP_LOCK || step == STEP_CLOSE) {
        return 0;
    }
    file_set_fault_hook(NULL, NULL); /* the model uses files itself */
    take_images(d);
    d->last_step = step;
    snprintf(d->last_path, sizeof(d->last_path), "%s", path);
    file_set_fault_hook(watch, d);
    return 0;
}

/* ---- runs ---- */

static int setup(void **state) {
    disk *d = calloc(1, sizeof(*d));
    assert_non_null(d);
    d->dir = tempdir_create();
    d->images_dir = tempdir_create();
    d->last_step = STEP_LOCK;
    *state = d;
    return 0;
}

static int teardown(void **state) {
    disk *d = *state;
    file_set_fault_hook(NULL, NULL);
    while (d->node_count) {
        forget_node(d, d->nodes[0].inode);
    }
    tempdir_remove((char *)d->dir);
    tempdir_remove(d->images_dir);
    free(d);
    return 0;
}

static void begin(disk *d) {
    sync_everything(d, d->dir);
    file_set_fault_hook(watch, d);
}

/* Stops watching, and checks every disk that there could have been. */
static void end(const char *what, disk *d, uint64_t next) {
    file_set_fault_hook(NULL, NULL);
    take_images(d);
    print_message("%s: %zu disks\n", what, d->image_count);
    size_t stride = under_sanitizer() ? 3 : 1;
    for (size_t i = 0; i < d->image_count; i += stride) {
        const image *m = &d->images[i];
        if (d->marked) {
            marks_check(m->path, m->marks);
        }
        survivors_check(m->path, m->committed, m->possible, next);
    }
}

static void save(disk *d, ckd_store *store, uint64_t step, bool ranks) {
    ckd_error err = {0};
    scene s = scene_of(step);
    d->possible |= UINT64_C(1) << step;
    ckd_status status = ranks ? scene_save_ranks(NULL, store, &s, &err) : scene_save(NULL, store, &s, &err);
    if (status != CKD_OK) {
        fail_msg("save: %s", err.message);
    }
    d->committed |= UINT64_C(1) << step;
}

static ckd_store *open_store(disk *d, ckd_open_mode mode) {
    ckd_store *store;
    ckd_error err = {0};
    if (scene_open(&store, d->dir, mode, &err) != CKD_OK) {
        fail_msg("open: %s", err.message);
    }
    return store;
}

static void save_thrice(disk *d) {
    begin(d);
    ckd_store *store = open_store(d, CKD_OPEN_CREATE);
    save(d, store, 0, false);
    save(d, store, 1, false);
    ckd_store_close(store);
    store = open_store(d, CKD_OPEN_WRITE);
    save(d, store, 2, true);
    ckd_store_close(store);
    assert_int_equal(d->committed, 7);
    assert_true(d->image_count > 50);
    end("three saves", d, 3);
}

static void test_new_store_base_delta_and_ranks(void **state) {
    save_thrice(*state);
}

/* What lies past the page cache is durable no sooner than what is in it. */
static void test_saves_directly(void **state) {
    scene_write(CKD_WRITE_DIRECT);
    save_thrice(*state);
    scene_write(CKD_WRITE_AUTO);
}

static void test_saves_by_io_uring(void **state) {
    scene_write(CKD_WRITE_URING);
    save_thrice(*state);
    scene_write(CKD_WRITE_AUTO);
}

static void must(ckd_status status, const ckd_error *err) {
    if (status != CKD_OK) {
        fail_msg("%s", err->message);
    }
}

/* Steps 1 and 2 go to the trash, come back, go again and are removed: whatever is listed can be loaded. */
static void test_deleting(void **state) {
    disk *d = *state;
    ckd_error err = {0};
    ckd_checkpoint c[2];
    ckd_delete_options o = CKD_DELETE_OPTIONS_INIT;
    scene_make(d->dir, 0, 3);
    d->committed = 1;
    d->possible = 7;
    begin(d);
    ckd_store *store = open_store(d, CKD_OPEN_WRITE);
    must(ckd_store_find(&c[0], store, SCENE_RUN, 1, &err), &err);
    must(ckd_store_find(&c[1], store, SCENE_RUN, 2, &err), &err);
    ckd_id ids[] = {c[0].id, c[1].id};
    must(ckd_store_delete(store, ids, 2, &o, &err), &err);
    must(ckd_store_undelete(store, ids, 2, &err), &err);
    d->committed = 7; /* until they are deleted again */
    take_images(d);
    d->committed = 1;
    o.undo_s = 0;
    must(ckd_store_delete(store, ids, 2, &o, &err), &err);
    d->possible = 1;
    must(ckd_store_collect(NULL, store, NULL, &err), &err);
    ckd_store_close(store);
    assert_true(d->image_count > 20);
    end("delete", d, 3);
}

static void test_pinning_and_tagging(void **state) {
    disk *d = *state;
    ckd_error err = {0};
    scene_make(d->dir, 0, 3);
    d->committed = 7;
    d->marked = true;
    begin(d);
    ckd_store *store = open_store(d, CKD_OPEN_WRITE);
    for (; d->marks < MARK_CHANGES; d->marks++) {
        must(mark_change(store, d->marks, &err), &err);
    }
    ckd_store_close(store);
    assert_true(d->image_count > 20);
    end("pins and tags", d, 3);
}

/* By itself, after a save. */
static void test_pruning(void **state) {
    disk *d = *state;
    ckd_error err = {0};
    scene s = scene_of(4);
    s.base = true;
    scene_make_pruning(d->dir, 4, 0);
    d->committed = 8;
    d->possible = 31;
    begin(d);
    ckd_store *store = open_store(d, CKD_OPEN_WRITE);
    must(scene_save(NULL, store, &s, &err), &err);
    d->committed = 24;
    d->possible = 24; /* by now the others are gone for good */
    ckd_store_close(store);
    assert_true(d->image_count > 30);
    end("prune", d, 5);
}

/* To a depth of 1, and then the newest two take over what they are deltas on. */
static void test_compacting(void **state) {
    disk *d = *state;
    ckd_error err = {0};
    ckd_compact_options o = CKD_COMPACT_OPTIONS_INIT;
    ckd_policy policy = CKD_POLICY_INIT;
    ckd_delete_options now = CKD_DELETE_OPTIONS_INIT;
    policy.keep_last = 2;
    now.undo_s = 0;
    o.max_depth = 1;
    scene_make(d->dir, 0, 4);
    d->committed = d->possible = 15;
    begin(d);
    ckd_store *store = open_store(d, CKD_OPEN_WRITE);
    must(ckd_compact(NULL, store, &o, &err), &err);
    d->committed = 12; /* from now on, any of the others may go */
    o.policy = &policy;
    o.deletion = &now;
    must(ckd_compact(NULL, store, &o, &err), &err);
    must(ckd_store_collect(NULL, store, NULL, &err), &err);
    d->possible = 12;
    ckd_store_close(store);
    assert_true(d->image_count > 40);
    end("compact", d, 4);
}

/* Whoever created the store died before its own names were durable. */
static void creator_died(disk *d, const char *lost, ckd_open_mode mode) {
    ckd_store_close(open_store(d, CKD_OPEN_CREATE));
    assert_int_equal(unlink(store_path_of(d->dir, "catalog.db")), 0); /* he did not come to that */
    sync_everything(d, d->dir);
    unsync_name(d, lost);
    file_set_fault_hook(watch, d);
    ckd_store *store = open_store(d, mode);
    save(d, store, 0, false);
    ckd_store_close(store);
    end(lost, d, 1);
}

static void test_store_whose_creator_died(void **state) {
    creator_died(*state, "store", CKD_OPEN_CREATE);
}
static void test_store_whose_creator_died_opened_for_writing(void **state) {
    creator_died(*state, "store", CKD_OPEN_WRITE);
}
static void test_store_whose_creator_died_before_its_folder_was_synced(void **state) {
    creator_died(*state, "data", CKD_OPEN_WRITE);
}

static int die_at_manifest(void *context, file_step step, const char *path) {
    (void)context;
    return step == STEP_DIR_SYNC && strstr(path, "data/m") ? (raise(SIGKILL), 0) : 0;
}

/* Step 2 is saved by a writer that dies between naming its manifest and making the name durable. */
static void writer_dies(disk *d) {
    fflush(NULL);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        ckd_store *store;
        scene s = scene_of(2);
        file_set_fault_hook(die_at_manifest, NULL);
        if (scene_open(&store, d->dir, CKD_OPEN_WRITE, NULL) == CKD_OK) {
            scene_save(NULL, store, &s, NULL);
        }
        _exit(1);
    }
    int state;
    assert_int_equal(waitpid(pid, &state, 0), pid);
    assert_true(WIFSIGNALED(state));
    sync_everything(d, d->dir);
    unsync_name(d, "run.2.0");
    d->committed = 3;
    d->possible = 7;
}

/* Who finds that manifest, and says "that is saved already", promises it in turn. */
static void same_again(disk *d, bool open_before) {
    scene_make(d->dir, 0, 2);
    ckd_store *store = open_before ? open_store(d, CKD_OPEN_WRITE) : NULL;
    writer_dies(d);
    file_set_fault_hook(watch, d);
    if (!store) {
        store = open_store(d, CKD_OPEN_WRITE);
    }
    ckd_save_options o = CKD_SAVE_OPTIONS_INIT;
    o.run = SCENE_RUN;
    o.step = 2;
    o.on_duplicate = CKD_DUPLICATE_SAME_OK;
    ckd_save *compare;
    ckd_error err = {0};
    scene s = scene_of(2);
    assert_int_equal(ckd_save_begin(&compare, store, &o, &err), CKD_OK);
    if (scene_finish(NULL, compare, &s, &err) != CKD_OK) {
        fail_msg("the same again: %s", err.message);
    }
    d->committed |= 4;
    ckd_store_close(store);
    end("the same again", d, 3);
}

static void test_same_again_after_a_writer_died(void **state) {
    same_again(*state, false);
}
static void test_same_again_in_a_store_that_was_open(void **state) {
    same_again(*state, true);
}

static void test_catalog_is_mended(void **state) {
    static const char noise[4096] = "this is not a database";
    disk *d = *state;
    scene_make(d->dir, 0, 2);
    write_whole_file(store_path_of(d->dir, "catalog.db"), noise, sizeof(noise));
    d->committed = 3;
    begin(d);
    ckd_store *store = open_store(d, CKD_OPEN_WRITE);
    save(d, store, 2, false);
    ckd_store_close(store);
    assert_int_equal(ckd_store_rebuild(NULL, store_path_of(d->dir, ""), NULL, NULL), CKD_OK);
    end("mended catalog", d, 3);
}

static void test_abort_leaves_nothing(void **state) {
    disk *d = *state;
    scene_make(d->dir, 0, 2);
    d->committed = 3;
    begin(d);
    ckd_store *store = open_store(d, CKD_OPEN_WRITE);
    ckd_save_options o = CKD_SAVE_OPTIONS_INIT;
    o.run = SCENE_RUN;
    o.step = 2;
    ckd_save *aborted;
    ckd_part part;
    assert_int_equal(ckd_save_begin(&aborted, store, &o, NULL), CKD_OK);
    assert_int_equal(ckd_save_blob(aborted, "b", "x", 1, NULL), CKD_OK);
    assert_int_equal(ckd_save_seal(&part, aborted, NULL), CKD_OK);
    ckd_part_free(&part);
    ckd_save_abort(aborted);
    ckd_store_close(store);
    end("abort", d, 2);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_new_store_base_delta_and_ranks, setup, teardown),
        cmocka_unit_test_setup_teardown(test_saves_directly, setup, teardown),
        cmocka_unit_test_setup_teardown(test_saves_by_io_uring, setup, teardown),
        cmocka_unit_test_setup_teardown(test_deleting, setup, teardown),
        cmocka_unit_test_setup_teardown(test_pinning_and_tagging, setup, teardown),
        cmocka_unit_test_setup_teardown(test_pruning, setup, teardown),
        cmocka_unit_test_setup_teardown(test_compacting, setup, teardown),
        cmocka_unit_test_setup_teardown(test_store_whose_creator_died, setup, teardown),
        cmocka_unit_test_setup_teardown(test_store_whose_creator_died_opened_for_writing, setup, teardown),
        cmocka_unit_test_setup_teardown(test_store_whose_creator_died_before_its_folder_was_synced, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_same_again_after_a_writer_died, setup, teardown),
        cmocka_unit_test_setup_teardown(test_same_again_in_a_store_that_was_open, setup, teardown),
        cmocka_unit_test_setup_teardown(test_catalog_is_mended, setup, teardown),
        cmocka_unit_test_setup_teardown(test_abort_leaves_nothing, setup, teardown),
    };
    scratch_begin();
    int failed = cmocka_run_group_tests_name("power_cut", tests, NULL, NULL);
    scratch_end();
    return failed;
}
