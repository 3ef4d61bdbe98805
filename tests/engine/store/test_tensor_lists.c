/* Lists of tensors, and reports, are read from the chunk files: what they say, also beside writers and after damage. */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "engine/store/handle.h"
#include "tests/support/scenes.h"
#include "tests/support/tempdir.h"

/* ---- everything that a store reports ---- */

static void write_tensors(FILE *to, ckd_store *store, const ckd_id *id) {
    ckd_tensor_list *list;
    assert_int_equal(ckd_store_tensors(&list, store, id, NULL), CKD_OK);
    for (size_t i = 0; i < list->count; i++) {
        const ckd_tensor_info *t = &list->items[i];
        fprintf(to, "  %s %d %d [", t->name, (int)t->role, (int)t->dtype);
        for (uint32_t d = 0; d < t->ndim; d++) {
            fprintf(to, "%llu ", (unsigned long long)t->shape[d]);
        }
        fprintf(to, "] %llu %llu %llu %s %u %u %.17g %.17g %.17g %llu\n", (unsigned long long)t->elements,
                (unsigned long long)t->raw_bytes, (unsigned long long)t->stored_bytes, t->method, t->depth,
                t->shards, t->rel_l2, t->max_error, t->direction_change, (unsigned long long)t->nonfinite);
    }
    ckd_tensor_list_free(list);
}

static void write_list(FILE *to, ckd_store *store) {
    ckd_checkpoint_list *list;
    assert_int_equal(ckd_store_list(&list, store, NULL, NULL), CKD_OK);
    for (size_t i = 0; i < list->count; i++) {
        const ckd_checkpoint *c = &list->items[i];
        char id[CKD_ID_TEXT];
        ckd_id_text(id, &c->id);
        fprintf(to, "%s@%llu %s %u %d %d %u %llu %llu %llu %.17g\n", c->run, (unsigned long long)c->step, id,
                c->generation, (int)c->kind, (int)c->fidelity, c->depth, (unsigned long long)c->tensors,
                (unsigned long long)c->raw_bytes, (unsigned long long)c->stored_bytes, c->load_cost);
        write_tensors(to, store, &c->id);
    }
    ckd_checkpoint_list_free(list);
}

static void write_usage(FILE *to, const ckd_usage *rows, size_t count) {
    for (size_t i = 0; i < count; i++) {
        fprintf(to, "%s %llu %llu %llu\n", rows[i].name, (unsigned long long)rows[i].checkpoints,
                (unsigned long long)rows[i].raw_bytes, (unsigned long long)rows[i].stored_bytes);
    }
}

static int by_run_and_name(const void *a, const void *b) {
    const ckd_tensor_usage *x = a, *y = b;
    int order = strcmp(x->run, y->run);
    order = order ? order : strcmp(x->name, y->name);
    return order ? order : (int)x->role - (int)y->role;
}

static void write_report(FILE *to, ckd_store *store) {
    ckd_report *r;
    assert_int_equal(ckd_store_report(&r, store, NULL), CKD_OK);
    write_usage(to, r->by_run, r->run_count);
    write_usage(to, r->by_role, r->role_count);
    write_usage(to, r->by_fidelity, r->fidelity_count);
    for (size_t i = 0; i < r->checkpoint_count; i++) {
        for (int role = 0; role <= CKD_ROLE_OTHER; role++) {
            const ckd_role_bytes *b = &r->roles[i].roles[role];
            fprintf(to, "%s@%llu role %d: %llu %llu %llu\n", r->by_checkpoint[i].run,
                    (unsigned long long)r->by_checkpoint[i].step, role, (unsigned long long)b->elements,
                    (unsigned long long)b->raw_bytes, (unsigned long long)b->stored_bytes);
        }
    }
    for (size_t i = 1; i < r->tensor_count; i++) {
        assert_true(strcmp(r->by_tensor[i - 1].run, r->by_tensor[i].run) <= 0);
    }
    qsort(r->by_tensor, r->tensor_count, sizeof(*r->by_tensor), by_run_and_name);
    for (size_t i = 0; i < r->tensor_count; i++) {
        const ckd_tensor_usage *t = &r->by_tensor[i];
        fprintf(to, "%s %s %d %llu %llu %llu %llu\n", t->run, t->name, (int)t->role,
                (unsigned long long)t->checkpoints, (unsigned long long)t->elements,
                (unsigned long long)t->raw_bytes, (unsigned long long)t->stored_bytes);
    }
    fprintf(to, "%llu %llu %llu %llu\n", (unsigned long long)r->chunk_bytes,
            (unsigned long long)r->manifest_bytes, (unsigned long long)r->unlisted_bytes,
            (unsigned long long)r->file_count);
    ckd_report_free(r);
}

/* Everything that a store reports, as text. The caller frees it. */
static char *account(ckd_store *store) {
    char *text;
    size_t size;
    FILE *to = open_memstream(&text, &size);
    assert_non_null(to);
    write_list(to, store);
    write_report(to, store);
    assert_int_equal(fclose(to), 0);
    return text;
}

static char *account_of(const char *dir, ckd_open_mode mode) {
    ckd_store *store;
    assert_int_equal(scene_open(&store, dir, mode, NULL), CKD_OK);
    char *text = account(store);
    ckd_store_close(store);
    return text;
}

static void expect_account(const char *dir, ckd_open_mode mode, const char *want) {
    char *have = account_of(dir, mode);
    assert_string_equal(have, want);
    free(have);
}

static void drop_catalog(const char *dir) {
    assert_int_equal(unlink(store_path_of(dir, FILE_CATALOG)), 0);
}

static void open_and_close(const char *dir) {
    ckd_store *store;
    assert_int_equal(scene_open(&store, dir, CKD_OPEN_WRITE, NULL), CKD_OK);
    ckd_store_close(store);
}

static void rebuild(const char *dir) {
    ckd_rebuild_result result;
    assert_int_equal(ckd_store_rebuild(&result, store_path_of(dir, ""), NULL, NULL), CKD_OK);
    assert_int_equal(result.skipped, 0);
}

static void make(const char *dir) {
    ckd_store *store;
    scene_make(dir, 0, 4);
    assert_int_equal(scene_open(&store, dir, CKD_OPEN_WRITE, NULL), CKD_OK);
    for (uint64_t step = 0; step < 3; step++) {
        scene s = scene_of(step);
        s.run = "another";
        assert_int_equal(scene_save_ranks(NULL, store, &s, NULL), CKD_OK);
    }
    ckd_store_close(store);
}

/* A reader that makes a catalog in memory, a writer that makes the file, and a rebuild change nothing of it. */
static void test_answers_are_the_same(void **state) {
    make(*state);
    char *want = account_of(*state, CKD_OPEN_READ);
    assert_non_null(strstr(want, "another@2"));
    drop_catalog(*state);
    expect_account(*state, CKD_OPEN_READ, want);
    open_and_close(*state);
    expect_account(*state, CKD_OPEN_READ, want);
    expect_account(*state, CKD_OPEN_WRITE, want);
    rebuild(*state);
    expect_account(*state, CKD_OPEN_READ, want);
    free(want);
}

/* Expects of a report the sums over the lists of tensors. */
static void expect_sums(ckd_store *store) {
    ckd_report *r;
    uint64_t raw = 0, stored = 0, reported_raw = 0, reported_stored = 0;
    assert_int_equal(ckd_store_report(&r, store, NULL), CKD_OK);
    for (size_t i = 0; i < r->checkpoint_count; i++) {
        ckd_tensor_list *list;
        ckd_checkpoint_roles sums = {0};
        assert_int_equal(ckd_store_tensors(&list, store, &r->by_checkpoint[i].id, NULL), CKD_OK);
        assert_int_equal(list->count, r->by_checkpoint[i].tensors);
        for (size_t k = 0; k < list->count; k++) {
            const ckd_tensor_info *t = &list->items[k];
            ckd_role_bytes *role = &sums.roles[t->role];
            role->elements += t->elements;
            role->raw_bytes += t->raw_bytes;
            role->stored_bytes += t->stored_bytes;
            raw += t->raw_bytes;
            stored += t->stored_bytes;
        }
        assert_memory_equal(&sums, &r->roles[i], sizeof(sums));
        ckd_tensor_list_free(list);
    }
    for (size_t i = 0; i < r->tensor_count; i++) {
        reported_raw += r->by_tensor[i].raw_bytes;
        reported_stored += r->by_tensor[i].stored_bytes;
    }
    assert_true(raw > 0 && raw == reported_raw && stored == reported_stored);
    ckd_report_free(r);
}

/* Chains, steps, blobs, bundles and lossy measures of stores written by other versions. */
static void test_stores_of_all_kinds(void **state) {
    static const char *const kinds[] = {"bundles",       "example",        "library", "library-2",
                                        "library-runs",  "library-steps",  "steps",   "lossy",
                                        "library-lossy", "library-changes"};
    for (size_t i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++) {
        char from[64], dir[1100];
        ckd_store *store;
        snprintf(from, sizeof(from), "tests/golden/v1/%s", kinds[i]);
        snprintf(dir, sizeof(dir), "%s/%s", (char *)*state, kinds[i]);
        assert_int_equal(mkdir(dir, 0777), 0);
        tree_copy(from, store_path_of(dir, ""));
        assert_int_equal(scene_open(&store, dir, CKD_OPEN_WRITE, NULL), CKD_OK);
        expect_sums(store);
        ckd_store_close(store);
    }
}

/* Checkpoints are deleted, compacted and used as parents. */
static void test_changes(void **state) {
    ckd_store *store;
    ckd_checkpoint_list *list;
    ckd_compact_options compaction = CKD_COMPACT_OPTIONS_INIT;
    compaction.max_depth = 1;
    make(*state);
    assert_int_equal(scene_open(&store, *state, CKD_OPEN_WRITE, NULL), CKD_OK);
    scene next = scene_of(4);
    assert_int_equal(scene_save(NULL, store, &next, NULL), CKD_OK);
    expect_sums(store);
    ckd_store_close(store);
    scene_trash(*state, 4, 1);
    assert_int_equal(scene_open(&store, *state, CKD_OPEN_WRITE, NULL), CKD_OK);
    assert_int_equal(ckd_store_list(&list, store, "another", NULL), CKD_OK);
    assert_int_equal(list->count, 3);
    assert_int_equal(ckd_store_delete(store, &list->items[2].id, 1, NULL, NULL), CKD_OK);
    ckd_checkpoint_list_free(list);
    assert_int_equal(ckd_compact(NULL, store, &compaction, NULL), CKD_OK);
    expect_sums(store);
    ckd_store_close(store);
    char *have = account_of(*state, CKD_OPEN_READ);
    rebuild(*state);
    expect_account(*state, CKD_OPEN_READ, have);
    free(have);
}

static void count_message(void *context, const char *message) {
    *(unsigned *)context += strstr(message, "listed without its tensors") != NULL;
}

static void count_any_message(void *context, const char *message) {
    (void)message;
    ++*(unsigned *)context;
}

static char *account_with_messages(const char *dir, ckd_message_fn count, unsigned *messages) {
    ckd_store *store;
    ckd_store_options o = CKD_STORE_OPTIONS_INIT;
    o.on_message = count;
    o.message_context = messages;
    *messages = 0;
    assert_int_equal(ckd_store_open(&store, store_path_of(dir, ""), CKD_OPEN_READ, &o, NULL), CKD_OK);
    assert_int_equal(*messages, 0);
    char *text = account(store);
    ckd_store_close(store);
    return text;
}

/*
 * A chunk file is missing. Its checkpoint has no tensors, which a message says each time, and the other checkpoints
 * have theirs.
 */
static void test_damage(void **state) {
    unsigned messages;
    ckd_store *store;
    ckd_checkpoint_list *list;
    manifest m;
    make(*state);
    assert_int_equal(scene_open(&store, *state, CKD_OPEN_READ, NULL), CKD_OK);
    assert_int_equal(ckd_store_list(&list, store, SCENE_RUN, NULL), CKD_OK);
    assert_int_equal(store_read_manifest(&m, store, SCENE_RUN, 3, list->items[3].generation, NULL), CKD_OK);
    assert_int_equal(unlink(path_chunk(store->path, &m.files[0].id, "").text), 0);
    manifest_free(&m);
    ckd_checkpoint_list_free(list);
    ckd_store_close(store);
    char *have = account_with_messages(*state, count_message, &messages);
    assert_int_equal(messages, 2); /* one from the list, one from the report */
    rebuild(*state);
    expect_account(*state, CKD_OPEN_READ, have);
    free(have);
}

/* A catalog is made while a chunk file is missing. Once the file is back, its tensors are listed again. */
static void test_damage_that_is_repaired(void **state) {
    ckd_store *store;
    ckd_checkpoint c;
    manifest m;
    size_t size;
    make(*state);
    char *have = account_of(*state, CKD_OPEN_READ);
    assert_int_equal(scene_open(&store, *state, CKD_OPEN_READ, NULL), CKD_OK);
    assert_int_equal(ckd_store_find(&c, store, SCENE_RUN, 3, NULL), CKD_OK);
    assert_int_equal(store_read_manifest(&m, store, c.run, c.step, c.generation, NULL), CKD_OK);
    pathname path = path_chunk(store->path, &m.files[0].id, "");
    manifest_free(&m);
    ckd_store_close(store);
    unsigned char *data = read_whole_file(path.text, &size);
    assert_int_equal(unlink(path.text), 0);
    rebuild(*state);
    write_whole_file(path.text, data, size);
    free(data);
    expect_account(*state, CKD_OPEN_READ, have);
    free(have);
}

/* ---- several processes ---- */

static pid_t start(int (*work)(const char *dir), const char *dir) {
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        _exit(work(dir));
    }
    return child;
}

static void expect_done(pid_t child) {
    int ended;
    assert_int_equal(waitpid(child, &ended, 0), child);
    assert_int_equal(ended, 0);
}

static int open_for_writing(const char *dir) {
    ckd_store *store;
    ckd_status status = scene_open(&store, dir, CKD_OPEN_WRITE, NULL);
    if (status == CKD_OK) {
        ckd_store_close(store);
    }
    return status != CKD_OK;
}

/* Reports until the store has step 8. */
static int report_often(const char *dir) {
    bool done = false;
    for (unsigned i = 0; !done && i < 100000; i++) {
        ckd_store *store;
        ckd_report *r;
        ckd_tensor_list *tensors;
        if (scene_open(&store, dir, CKD_OPEN_READ, NULL) != CKD_OK ||
            ckd_store_report(&r, store, NULL) != CKD_OK || r->tensor_count == 0) {
            return 1;
        }
        const ckd_checkpoint *first = &r->by_checkpoint[0],
                             *last = &r->by_checkpoint[r->checkpoint_count - 1];
        done = last->step == 8;
        if (ckd_store_tensors(&tensors, store, &first->id, NULL) != CKD_OK ||
            tensors->count != first->tensors || r->roles[0].roles[CKD_ROLE_WEIGHT].elements == 0) {
            return 2;
        }
        ckd_tensor_list_free(tensors);
        ckd_report_free(r);
        ckd_store_close(store);
    }
    return done ? 0 : 3;
}

static void test_two_writers_at_once(void **state) {
    make(*state);
    char *want = account_of(*state, CKD_OPEN_READ);
    for (int i = 0; i < 10; i++) {
        drop_catalog(*state);
        pid_t first = start(open_for_writing, *state), second = start(open_for_writing, *state);
        expect_done(first);
        expect_done(second);
        expect_account(*state, CKD_OPEN_READ, want);
    }
    free(want);
}

/* Readers report while a writer compacts, deletes, saves and rebuilds. */
static void test_reports_during_writes(void **state) {
    ckd_compact_options compaction = CKD_COMPACT_OPTIONS_INIT;
    ckd_collect_options all = CKD_COLLECT_OPTIONS_INIT;
    compaction.max_depth = 1;
    all.all = 1;
    make(*state);
    pid_t readers[2] = {start(report_often, *state), start(report_often, *state)};
    for (uint64_t step = 4; step <= 8; step++) {
        ckd_store *store;
        assert_int_equal(scene_open(&store, *state, CKD_OPEN_WRITE, NULL), CKD_OK);
        assert_int_equal(ckd_compact(NULL, store, &compaction, NULL), CKD_OK);
        assert_int_equal(ckd_store_collect(NULL, store, &all, NULL), CKD_OK);
        scene s = scene_of(step);
        assert_int_equal(scene_save(NULL, store, &s, NULL), CKD_OK);
        ckd_store_close(store);
        if (step == 6) {
            rebuild(*state);
        }
    }
    expect_done(readers[0]);
    expect_done(readers[1]);
}

/* Deletes the newest checkpoint of SCENE_RUN without undo. It waits only briefly for readers of its files. */
static int delete_newest(const char *dir) {
    ckd_store *store;
    ckd_checkpoint newest;
    ckd_store_options o = CKD_STORE_OPTIONS_INIT;
    ckd_delete_options deletion = CKD_DELETE_OPTIONS_INIT;
    ckd_collect_options all = CKD_COLLECT_OPTIONS_INIT;
    file_set_fault_hook(NULL, NULL);
    o.lock_timeout_ms = 50;
    deletion.undo_s = 0;
    all.all = 1;
    if (ckd_store_open(&store, store_path_of(dir, ""), CKD_OPEN_WRITE, &o, NULL) != CKD_OK ||
        ckd_store_find(&newest, store, SCENE_RUN, CKD_LATEST, NULL) != CKD_OK || newest.step != 3) {
        return 1;
    }
    (void)ckd_store_delete(store, &newest.id, 1, &deletion, NULL);
    (void)ckd_store_collect(NULL, store, &all, NULL); /* both may be BUSY */
    bool gone = ckd_store_find(&newest, store, SCENE_RUN, 3, NULL) == CKD_E_NOT_FOUND;
    ckd_store_close(store);
    return gone ? 0 : 2;
}

/* Another process deletes the checkpoint just before the first chunk file is opened. */
static int delete_at_first_chunk(void *context, file_op step, const char *path) {
    const char **dir = context;
    if (*dir && step == FILE_OP_OPEN && strstr(path, "data/c/")) {
        pid_t child = start(delete_newest, *dir);
        *dir = NULL;
        expect_done(child);
    }
    return 0;
}

/* A checkpoint that is being read is not removed until then. */
static void test_deleted_while_it_is_read(void **state) {
    ckd_store *store;
    ckd_checkpoint newest;
    ckd_tensor_list *tensors;
    const char *dir = *state;
    make(*state);
    assert_int_equal(scene_open(&store, *state, CKD_OPEN_READ, NULL), CKD_OK);
    assert_int_equal(ckd_store_find(&newest, store, SCENE_RUN, CKD_LATEST, NULL), CKD_OK);
    file_set_fault_hook(delete_at_first_chunk, &dir);
    assert_int_equal(ckd_store_tensors(&tensors, store, &newest.id, NULL), CKD_OK);
    file_set_fault_hook(NULL, NULL);
    assert_null(dir);
    assert_int_equal(tensors->count, newest.tensors);
    ckd_tensor_list_free(tensors);
    assert_int_equal(ckd_store_tensors(&tensors, store, &newest.id, NULL), CKD_E_NOT_FOUND);
    ckd_store_close(store);
}

/* A checkpoint that is deleted during a report appears in it without tensors. */
static void test_deleted_before_it_is_read(void **state) {
    ckd_store *store;
    ckd_report *r;
    const char *dir = *state;
    make(*state);
    assert_int_equal(scene_open(&store, *state, CKD_OPEN_READ, NULL), CKD_OK);
    file_set_fault_hook(delete_at_first_chunk, &dir);
    assert_int_equal(ckd_store_report(&r, store, NULL), CKD_OK);
    file_set_fault_hook(NULL, NULL);
    assert_null(dir);
    assert_int_equal(r->checkpoint_count, 7);
    assert_int_equal(r->roles[6].roles[CKD_ROLE_WEIGHT].elements, 0);
    assert_int_equal(r->roles[5].roles[CKD_ROLE_WEIGHT].elements,
                     r->roles[4].roles[CKD_ROLE_WEIGHT].elements);
    assert_true(r->roles[5].roles[CKD_ROLE_WEIGHT].elements > 0);
    assert_int_equal(r->by_role[0].checkpoints, 6);
    ckd_report_free(r);
    ckd_store_close(store);
}

/* Compacts all, and removes what that replaced. */
static int compact_all(const char *dir) {
    ckd_store *store;
    ckd_compact_options o = CKD_COMPACT_OPTIONS_INIT;
    ckd_collect_options all = CKD_COLLECT_OPTIONS_INIT;
    file_set_fault_hook(NULL, NULL);
    o.max_depth = 1;
    all.all = 1;
    if (scene_open(&store, dir, CKD_OPEN_WRITE, NULL) != CKD_OK) {
        return 1;
    }
    bool done =
        ckd_compact(NULL, store, &o, NULL) == CKD_OK && ckd_store_collect(NULL, store, &all, NULL) == CKD_OK;
    ckd_store_close(store);
    return done ? 0 : 2;
}

/*
 * Where a reader is when another process compacts: before it opens the first file of this folder whose name begins so.
 */
typedef struct moment {
    const char *dir, *file;
} moment;

static int compact_then(void *context, file_op step, const char *path) {
    moment *m = context;
    if (m->dir && step == FILE_OP_OPEN && strstr(path, m->file)) {
        pid_t child = start(compact_all, m->dir);
        m->dir = NULL;
        expect_done(child);
    }
    return 0;
}

/*
 * A reader has listed the manifests. Before it reads one, a compaction replaces them. The reader lists all checkpoints
 * nevertheless, and says nothing.
 */
static void test_compacted_while_the_catalog_is_made(void **state) {
    static const char *const files[] = {"data/m/" SCENE_RUN ".0.", "data/m/" SCENE_RUN ".3.",
                                        "data/m/another.2."};
    for (size_t i = 0; i < sizeof(files) / sizeof(files[0]); i++) {
        char dir[1100];
        unsigned messages;
        snprintf(dir, sizeof(dir), "%s/%zu", (char *)*state, i);
        assert_int_equal(mkdir(dir, 0777), 0);
        make(dir);
        drop_catalog(dir);
        moment m = {dir, files[i]};
        file_set_fault_hook(compact_then, &m);
        char *have = account_with_messages(dir, count_any_message, &messages);
        file_set_fault_hook(NULL, NULL);
        assert_null(m.dir);
        assert_int_equal(messages, 0);
        rebuild(dir);
        expect_account(dir, CKD_OPEN_READ, have);
        free(have);
    }
}

/* Deletes the newest checkpoint for good, and saves its step again: a new checkpoint with the old one's generation. */
static void save_newest_again(const char *dir) {
    ckd_store *store;
    scene s = scene_of(3);
    assert_int_equal(delete_newest(dir), 0);
    assert_int_equal(scene_open(&store, dir, CKD_OPEN_WRITE, NULL), CKD_OK);
    assert_int_equal(scene_save(NULL, store, &s, NULL), CKD_OK);
    ckd_store_close(store);
}

/*
 * A reader whose catalog is in memory learns that another checkpoint has the name and the generation of one it lists.
 */
static void test_saved_again_with_the_same_generation(void **state) {
    ckd_store *store;
    ckd_checkpoint before, after;
    ckd_error err = {0};
    scene s = scene_of(3);
    scene_make(*state, 0, 4);
    drop_catalog(*state);
    assert_int_equal(scene_open(&store, *state, CKD_OPEN_READ, NULL), CKD_OK);
    assert_int_equal(ckd_store_find(&before, store, SCENE_RUN, 3, NULL), CKD_OK);
    save_newest_again(*state);
    assert_int_equal(ckd_store_find(&after, store, SCENE_RUN, 3, NULL), CKD_OK);
    assert_int_equal(after.generation, before.generation);
    assert_false(id_equal(&after.id, &before.id));
    if (scene_load_id(store, &after.id, &s, &err) != CKD_OK) {
        fail_msg("%s (%s)", err.message, err.file);
    }
    ckd_store_close(store);
}

/* If a writer is killed while it makes the catalog, either the old or the new catalog is left. */
static void test_killed_in_the_middle(void **state) {
    make(*state);
    char *want = account_of(*state, CKD_OPEN_READ);
    for (long i = 0; i < 24; i++) {
        struct timespec pause = {0, i * 400000};
        drop_catalog(*state);
        pid_t child = start(open_for_writing, *state);
        nanosleep(&pause, NULL);
        kill(child, SIGKILL);
        assert_int_equal(waitpid(child, NULL, 0), child);
        expect_account(*state, CKD_OPEN_READ, want);
        open_and_close(*state);
        expect_account(*state, CKD_OPEN_READ, want);
    }
    free(want);
}

int main(void) {
    const struct CMUnitTest tests[] = {tempdir_test(test_answers_are_the_same),
                                       tempdir_test(test_stores_of_all_kinds),
                                       tempdir_test(test_changes),
                                       tempdir_test(test_damage),
                                       tempdir_test(test_damage_that_is_repaired),
                                       tempdir_test(test_two_writers_at_once),
                                       tempdir_test(test_reports_during_writes),
                                       tempdir_test(test_deleted_while_it_is_read),
                                       tempdir_test(test_deleted_before_it_is_read),
                                       tempdir_test(test_compacted_while_the_catalog_is_made),
                                       tempdir_test(test_saved_again_with_the_same_generation),
                                       tempdir_test(test_killed_in_the_middle)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
