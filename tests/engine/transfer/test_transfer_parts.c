/*
 * Copies that transfer only the records they need from a file: from packs, and from files that mostly belong to
 * deleted checkpoints.
 */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "codec/chunk/chunk.h"
#include "engine/store/paths.h"
#include "engine/store/handle.h"
#include "tests/support/checkpoints.h"
#include "tests/support/compactions.h"
#include "tests/support/drift.h"
#include "tests/support/fingerprints.h"
#include "tests/support/pairs.h"
#include "tests/support/scenes.h"
#include "tests/support/scratch.h"

enum { STEPS = 12, BASES = 4, ROWS = 3000 };

/* Makes a run whose every fourth step is a base, and packs all but the newest four steps into one file. */
static void make_pack(const pair *p) {
    ckd_store *store;
    assert_int_equal(scene_open(&store, p->a, CKD_OPEN_CREATE, NULL), CKD_OK);
    for (uint64_t step = 0; step < STEPS; step++) {
        scene s = scene_of(step);
        s.rows = ROWS;
        s.base = step % BASES == 0;
        assert_int_equal(scene_save(NULL, store, &s, NULL), CKD_OK);
    }
    ckd_compact_options o = options_for(100);
    o.pack_below = UINT64_C(16) << 20;
    ckd_compaction_free(compact_with(store, &o));
    assert_int_equal(folder_count(p->a, DIR_CHUNKS), 5);
    ckd_store_close(store);
}

/* The bytes that a load reads, according to `load --explain`. */
static uint64_t read_by_a_load(ckd_store *store, const ckd_id *id) {
    ckd_load *load;
    ckd_load_explanation *explained;
    assert_int_equal(ckd_load_begin(&load, store, id, NULL), CKD_OK);
    const ckd_tensor_list *tensors = ckd_load_tensors(load);
    ckd_load_request *requests = calloc(tensors->count, sizeof(*requests));
    for (size_t i = 0; i < tensors->count; i++) {
        requests[i] = (ckd_load_request)CKD_LOAD_REQUEST_INIT;
        requests[i].name = tensors->items[i].name;
    }
    assert_int_equal(ckd_load_explain(&explained, load, requests, tensors->count, NULL), CKD_OK);
    assert_int_equal(explained->difference_count, 0);
    uint64_t size = explained->all.read_bytes;
    ckd_load_explanation_free(explained);
    free(requests);
    ckd_load_end(load);
    return size;
}

static uint64_t written(const pair *p) {
    return folder_bytes(p->b, DIR_CHUNKS) + folder_bytes(p->b, DIR_MANIFESTS);
}

/*
 * The copy may write at most a tenth more than a load reads, and a manifest. The load is explained in the destination,
 * because materialized copies are not transferred.
 */
static void check_small(const pair *p, const ckd_id *id) {
    uint64_t most = read_by_a_load(p->to, id) * 11 / 10 + folder_bytes(p->b, DIR_MANIFESTS);
    if (written(p) > most) {
        fail_msg("%llu bytes were written, and %llu are read", (unsigned long long)written(p),
                 (unsigned long long)most);
    }
}

/* Of a pack, only the records that one checkpoint reads are transferred, in the order in which they were saved. */
static void test_one_of_a_pack(void **state) {
    pair *p = *state;
    make_pack(p);
    pair_open(p);
    fingerprints before = fingerprints_of(p->from);
    for (uint64_t step = 0; step < STEPS; step += 3) {
        ckd_id id = pair_id(p->from, SCENE_RUN, step);
        ckd_copy_result *r = pair_copy(p, &id, 1, NULL);
        assert_int_equal(r->checkpoints, 1);
        assert_int_equal(r->bytes, written(p));
        ckd_copy_result_free(r);
        check_small(p, &id);
        assert_int_equal(fingerprints_check(p->to, &before), 1);
        assert_int_equal(verify_damage(p->to), 0);
        pair_check_clean(p);
        pair_renew(p);
        assert_int_equal(scene_open(&p->to, p->b, CKD_OPEN_CREATE, NULL), CKD_OK);
    }
    fingerprints_free(&before);
}

/* The checkpoint builds on a file whose other records belonged to deleted checkpoints. Those are not transferred. */
static void test_dead_records_are_not_copied(void **state) {
    pair *p = *state;
    make_pack(p);
    ckd_store *store;
    assert_int_equal(scene_open(&store, p->a, CKD_OPEN_WRITE, NULL), CKD_OK);
    scene s = scene_of(STEPS);
    s.rows = ROWS;
    s.run = "branch";
    ckd_save_options o = options_of("branch", STEPS);
    o.parent_run = SCENE_RUN;
    o.parent_step = 3;
    o.max_load_cost = 1000;
    assert_int_equal(scene_finish(NULL, begin_with(store, &o), &s, NULL), CKD_OK);
    ckd_id gone[STEPS];
    for (uint64_t step = 0; step < STEPS; step++) {
        gone[step] = pair_id(store, SCENE_RUN, step);
    }
    ckd_delete_options now = CKD_DELETE_OPTIONS_INIT;
    now.undo_s = 0;
    assert_int_equal(ckd_store_delete(store, gone, STEPS, &now, NULL), CKD_OK);
    ckd_store_close(store);
    pair_open(p);
    fingerprints before = fingerprints_of(p->from);
    ckd_id newest = pair_id(p->from, "branch", STEPS);
    pair_counts(pair_copy(p, NULL, 0, NULL), 1, 2);
    check_small(p, &newest);
    assert_true(folder_bytes(p->a, DIR_CHUNKS) > folder_bytes(p->b, DIR_CHUNKS) * 3 / 2);
    assert_int_equal(fingerprints_check(p->to, &before), 1);
    pair_counts(pair_copy(p, NULL, 0, NULL), 0, 0);
    fingerprints_free(&before);
}

/* Steps are copied one by one. Each copy transfers only what the earlier ones have not. */
static void test_step_by_step(void **state) {
    pair *p = *state;
    make_pack(p);
    pair_open(p);
    fingerprints before = fingerprints_of(p->from);
    uint64_t all = folder_bytes(p->a, DIR_CHUNKS);
    for (uint64_t step = 0; step < STEPS; step++) {
        ckd_id id = pair_id(p->from, SCENE_RUN, step);
        uint64_t had = folder_bytes(p->b, DIR_CHUNKS);
        ckd_copy_result *r = pair_copy(p, &id, 1, NULL);
        assert_int_equal(r->checkpoints, 1);
        ckd_copy_result_free(r);
        ckd_checkpoint c;
        assert_int_equal(ckd_store_find(&c, p->from, SCENE_RUN, step, NULL), CKD_OK);
        /* Its own records, and the beginning and end of a file. */
        uint64_t most = c.stored_bytes * 11 / 10 + 2048;
        assert_true(folder_bytes(p->b, DIR_CHUNKS) - had <= most);
        pair_counts(pair_copy(p, &id, 1, NULL), 0, 0);
    }
    assert_true(folder_bytes(p->b, DIR_CHUNKS) <= all * 11 / 10);
    assert_int_equal(fingerprints_check(p->to, &before), STEPS);
    assert_int_equal(verify_damage(p->to), 0);
    pair_check_clean(p);
    fingerprints_free(&before);
}

/* The later step is copied first. Records that came with it are not transferred again for the earlier step. */
static void test_two_of_a_pack(void **state) {
    pair *p = *state;
    make_pack(p);
    pair_open(p);
    fingerprints before = fingerprints_of(p->from);
    ckd_id later = pair_id(p->from, SCENE_RUN, 7), earlier = pair_id(p->from, SCENE_RUN, 6);
    ckd_checkpoint c;
    assert_int_equal(ckd_store_find(&c, p->from, SCENE_RUN, 6, NULL), CKD_OK);
    pair_counts(pair_copy(p, &later, 1, NULL), 1, 1);
    uint64_t had = folder_bytes(p->b, DIR_CHUNKS);
    pair_counts(pair_copy(p, &earlier, 1, NULL), 1, 1);
    assert_true(folder_bytes(p->b, DIR_CHUNKS) - had <= c.stored_bytes * 11 / 10 + 2048);
    assert_int_equal(fingerprints_check(p->to, &before), 2);

    /* Copied together they share a file. */
    pair_renew(p);
    assert_int_equal(scene_open(&p->to, p->b, CKD_OPEN_CREATE, NULL), CKD_OK);
    ckd_id both[] = {earlier, later};
    pair_counts(pair_copy(p, both, 2, NULL), 2, 1);
    assert_true(folder_bytes(p->b, DIR_CHUNKS) <= had + c.stored_bytes / 5);
    assert_int_equal(fingerprints_check(p->to, &before), 2);

    /* A whole run is transferred in its existing files. */
    pair_renew(p);
    assert_int_equal(scene_open(&p->to, p->b, CKD_OPEN_CREATE, NULL), CKD_OK);
    pair_counts(pair_copy(p, NULL, 0, NULL), STEPS, 5);
    assert_int_equal(folder_bytes(p->b, DIR_CHUNKS), folder_bytes(p->a, DIR_CHUNKS));
    assert_int_equal(fingerprints_check(p->to, &before), STEPS);
    fingerprints_free(&before);
}

/* Flips a byte of the only file of a folder. */
static void hurt_only_file(const char *dir, const char *folder) {
    dir_list list;
    size_t size;
    char path[256];
    assert_int_equal(dir_list_read(&list, store_path_of(dir, folder), NULL), CKD_OK);
    assert_int_equal(list.count, 1);
    snprintf(path, sizeof(path), "%s/%s", folder, list.names[0]);
    dir_list_free(&list);
    unsigned char *data = read_whole_file(store_path_of(dir, path), &size);
    data[size / 3] ^= 1;
    write_whole_file(store_path_of(dir, path), data, size);
    free(data);
}

/* A damaged file in the destination does not count as present. */
static void test_damage_in_the_destination(void **state) {
    pair *p = *state;
    make_pack(p);
    pair_open(p);
    ckd_id first = pair_id(p->from, SCENE_RUN, 6), second = pair_id(p->from, SCENE_RUN, 7);
    pair_counts(pair_copy(p, &first, 1, NULL), 1, 1);
    hurt_only_file(p->b, DIR_CHUNKS);
    ckd_store_close(p->to);
    assert_int_equal(scene_open(&p->to, p->b, CKD_OPEN_WRITE, NULL), CKD_OK);
    pair_counts(pair_copy(p, &second, 1, NULL), 1, 1);
    scene s = scene_of(7);
    s.rows = ROWS;
    assert_int_equal(scene_load(p->to, &s, NULL), CKD_OK);
}

static int stop(void *context, uint64_t done, uint64_t total) {
    const uint64_t *after = context;
    (void)total;
    return done >= *after;
}

/* A cancelled copy commits the checkpoints that are complete, and the next copy continues. */
static void test_cancelled_copy_continues(void **state) {
    pair *p = *state;
    make_pack(p);
    pair_open(p);
    ckd_id ids[] = {pair_id(p->from, SCENE_RUN, 2), pair_id(p->from, SCENE_RUN, 8)};
    ckd_copy_options o = CKD_COPY_OPTIONS_INIT;
    o.dry_run = 1;
    ckd_copy_result *planned = pair_copy(p, ids, 2, &o);
    assert_int_equal(planned->files, 2);
    uint64_t size = planned->items[0].bytes;
    ckd_copy_result_free(planned);
    o = (ckd_copy_options)CKD_COPY_OPTIONS_INIT;
    o.checkpoints = ids;
    o.count = 2;
    o.on_progress = stop;
    o.progress_context = &size;
    ckd_error err = {0};
    assert_int_equal(ckd_copy(NULL, p->to, p->from, &o, &err), CKD_E_CANCELLED);
    ckd_checkpoint_list *list;
    assert_int_equal(ckd_store_list(&list, p->to, NULL, NULL), CKD_OK);
    size_t committed = list->count;
    ckd_checkpoint_list_free(list);
    assert_int_equal(committed, 1);
    pair_counts(pair_copy(p, ids, 2, NULL), 1, 1);
    for (size_t i = 0; i < 2; i++) {
        scene one = scene_of(i ? 8 : 2);
        one.rows = ROWS;
        assert_int_equal(scene_load(p->to, &one, NULL), CKD_OK);
    }
    pair_check_clean(p);
}

/* ---- killed processes ---- */

typedef struct fault {
    unsigned long at, seen;
    const char *where;
} fault;

static int kill_at(void *context, file_op step, const char *path) {
    fault *f = context;
    if (strstr(path, f->where) && step != FILE_OP_READ && step != FILE_OP_OPEN && ++f->seen == f->at) {
        raise(SIGKILL);
    }
    return 0;
}

/*
 * The copy is killed at every other step that changes the destination. The next copy uses the part that has arrived.
 */
static void test_killed_anywhere(void **state) {
    pair *p = *state;
    unsigned long used = 0, killed = 0;
    make_pack(p);
    assert_int_equal(scene_open(&p->from, p->a, CKD_OPEN_READ, NULL), CKD_OK);
    fingerprints before = fingerprints_of(p->from);
    ckd_id ids[] = {pair_id(p->from, SCENE_RUN, 2), pair_id(p->from, SCENE_RUN, 6)};
    for (bool finished = false; !finished; killed++) {
        fault f = {.at = 1 + 2 * killed, .where = "store/data/"};
        int ended;
        assert_int_equal(scene_open(&p->to, p->b, CKD_OPEN_CREATE, NULL), CKD_OK);
        ckd_copy_result_free(pair_copy(p, &ids[0], 1, NULL));
        ckd_store_close(p->to);
        p->to = NULL;
        fflush(NULL);
        pid_t pid = fork();
        assert_true(pid >= 0);
        if (pid == 0) {
            ckd_store *from, *to = NULL;
            f.where = p->b;
            file_set_fault_hook(kill_at, &f);
            bool done =
                scene_open(&from, p->a, CKD_OPEN_READ, NULL) == CKD_OK &&
                scene_open(&to, p->b, CKD_OPEN_WRITE, NULL) == CKD_OK &&
                ckd_copy(NULL, to, from,
                         &(ckd_copy_options){
                             .struct_size = sizeof(ckd_copy_options), .checkpoints = &ids[1], .count = 1},
                         NULL) == CKD_OK;
            _exit(done ? 0 : 1);
        }
        assert_int_equal(waitpid(pid, &ended, 0), pid);
        finished = WIFEXITED(ended);
        assert_true(finished ? WEXITSTATUS(ended) == 0 : WTERMSIG(ended) == SIGKILL);
        dir_list list = {0};
        char arrived[64] = "";
        if (dir_list_read(&list, store_path_of(p->b, DIR_INCOMING), NULL) == CKD_OK && list.count == 2) {
            chunk *c;
            char path[256];
            snprintf(path, sizeof(path), DIR_INCOMING "/%s", list.names[1]);
            /* Files that were not durable are transferred again. */
            bool durable = !strstr(list.names[1], ".part");
            if (durable && chunk_open_bundled(&c, store_path_of(p->b, path), NULL) == CKD_OK) {
                snprintf(arrived, sizeof(arrived), "%s", list.names[1] + CKD_ID_TEXT);
                chunk_close(c);
            }
        }
        dir_list_free(&list);
        ckd_error err = {0};
        if (scene_open(&p->to, p->b, CKD_OPEN_WRITE, &err) != CKD_OK) {
            fail_msg("%s (%s)", err.message, err.file);
        }
        ckd_copy_result_free(pair_copy(p, &ids[1], 1, NULL));
        if (arrived[0]) {
            char path[128];
            snprintf(path, sizeof(path), DIR_CHUNKS "/%s.ckd", arrived);
            assert_true(file_exists(store_path_of(p->b, path)));
            used++;
        }
        assert_int_equal(fingerprints_check(p->to, &before), 2);
        assert_int_equal(verify_damage(p->to), 0);
        pair_check_clean(p);
        pair_renew(p);
    }
    assert_true(killed > 10 && used > 0);
    fingerprints_free(&before);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, pair_setup, pair_teardown)

int main(void) {
    const struct CMUnitTest tests[] = {TEST(test_one_of_a_pack),
                                       TEST(test_dead_records_are_not_copied),
                                       TEST(test_step_by_step),
                                       TEST(test_two_of_a_pack),
                                       TEST(test_damage_in_the_destination),
                                       TEST(test_cancelled_copy_continues),
                                       TEST(test_killed_anywhere)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
