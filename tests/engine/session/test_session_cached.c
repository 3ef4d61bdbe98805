/*
 * Lossy sessions keep in memory what a load of the newest checkpoint would give, and code the next save against it.
 * What is stored does not depend on whether these values are kept, missing or wrong.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <sys/stat.h>

#include "base/file.h"
#include "codec/chunk/chunk.h"
#include "engine/store/paths.h"
#include "engine/session/session.h"
#include "tests/support/checkpoints.h"
#include "tests/support/level.h"
#include "tests/support/records.h"
#include "tests/support/scenes.h"
#include "tests/support/tempdir.h"

enum {
    ROWS = 700,
    COLUMNS = 400,
    COUNT = ROWS * COLUMNS,
    LAYERS = 3,
    SAVES = 4,
    TENSORS = 4 * LAYERS + 2,
    ROOM = 1 << 19
};
#define HOUR_NS (UINT64_C(3600) * 1000000000)

/*
 * The linker redirects the library's allocations to these functions (mk/test.mk), which count those of all threads.
 * Allocations of SQLite, zstd and the C library are not included.
 */
static atomic_ullong allocations, allocated;
static size_t count_it(size_t size) {
    atomic_fetch_add(&allocations, 1);
    atomic_fetch_add(&allocated, size);
    return size;
}
#define COUNTED(name, parameters, size, arguments) \
    void *__real_##name parameters;                \
    void *__wrap_##name parameters;                \
    void *__wrap_##name parameters {               \
        count_it(size);                            \
        return __real_##name arguments;            \
    }
COUNTED(malloc, (size_t n), n, (n))
COUNTED(calloc, (size_t count, size_t n), count *n, (count, n))
COUNTED(realloc, (void *block, size_t n), n, (block, n))
COUNTED(aligned_alloc, (size_t alignment, size_t n), n, (alignment, n))

static void must(ckd_status status, const ckd_error *err) {
    if (status != CKD_OK) {
        fail_msg("%s (%s)", err->message, err->tensor);
    }
}

/* Layers with weights and both moments, a bf16 weight, and counters, which are exact. */
typedef struct model {
    struct {
        char name[48];
        ckd_dtype dtype;
        void *values;
    } tensors[TENSORS];
    size_t count;
} model;

static void put(model *m, const char *format, int layer, ckd_dtype dtype, void *values) {
    snprintf(m->tensors[m->count].name, sizeof(m->tensors[0].name), format, layer);
    m->tensors[m->count].dtype = dtype;
    m->tensors[m->count++].values = values;
}

static bool with_masters; /* add a master after each weight */

static void model_begin(model *m) {
    m->count = 0;
    for (int i = 0; i < LAYERS; i++) {
        unsigned seed = 10 * (unsigned)i;
        float *v = random_values(CKD_F32, COUNT, seed + 1);
        for (size_t k = 0; k < COUNT; k++) {
            v[k] = v[k] * v[k] + 1e-9f;
        }
        put(m, "exp_avg_sq.layers.%d.weight", i, CKD_F32, v);
        put(m, "exp_avg.layers.%d.weight", i, CKD_F32, random_values(CKD_F32, COUNT, seed + 2));
        put(m, "layers.%d.weight", i, CKD_F32, random_values(CKD_F32, COUNT, seed + 3));
        if (with_masters) {
            put(m, "master.layers.%d.weight", i, CKD_F32, random_values(CKD_F32, COUNT, seed + 4));
        }
    }
    float *wide = random_values(CKD_F32, COUNT, 77);
    put(m, "head.%d.weight", 0, CKD_BF16, round_to_bf16(wide, COUNT));
    free(wide);
    put(m, "counters.%d", 0, CKD_I32, random_values(CKD_I32, COUNT, 78));
}

static bool with_directions; /* let weights move in a few directions */

/* Moves along three strong directions. */
static void move_along(float *x, const float *by) {
    for (size_t k = 0; k < COUNT; k++) {
        for (size_t d = 0; d < 3; d++) {
            x[k] += 0.05f * by[d * ROWS + k / COLUMNS] * by[4 * ROWS + d * COLUMNS + k % COLUMNS];
        }
    }
}

static void model_move(model *m, unsigned step) {
    for (size_t i = 0; i < m->count; i++) {
        float *x = m->tensors[i].values;
        unsigned seed = 1000 * step + (unsigned)i;
        if (m->tensors[i].dtype != CKD_F32) {
            change_values(m->tensors[i].dtype, x, COUNT, seed);
            continue;
        }
        float *by = random_values(CKD_F32, COUNT, seed);
        bool second = strncmp(m->tensors[i].name, "exp_avg_sq", 10) == 0;
        for (size_t k = 0; k < COUNT; k++) {
            x[k] = second ? 0.9f * x[k] + 0.1f * by[k] * by[k] : x[k] + 0.01f * by[k];
        }
        if (with_directions && strncmp(m->tensors[i].name, "layers", 6) == 0) {
            move_along(x, by);
        }
        free(by);
    }
}

static void model_end(model *m) {
    for (size_t i = 0; i < m->count; i++) {
        free(m->tensors[i].values);
    }
}

#define ALL_BYTES  ((uint64_t)COUNT * (4 * ((with_masters ? 4 : 3) * LAYERS + 1) + 2))
#define KEPT_BYTES ((uint64_t)COUNT * (4 * (LAYERS + 1) + 2))

typedef struct setting {
    const char *dir, *run;
    bool room; /* allow the session to keep values */
    uint32_t threads;
    ckd_fidelity fidelity;
    int *damage_messages;
    uint64_t staging;
} setting;

static void count_damage(void *context, const char *message) {
    *(int *)context += strstr(message, "damage") != NULL;
}

static ckd_session *open_session(const setting *how, model *m) {
    ckd_save_options save = CKD_SAVE_OPTIONS_INIT;
    ckd_store_options store = CKD_STORE_OPTIONS_INIT;
    ckd_session_options o = CKD_SESSION_OPTIONS_INIT;
    ckd_session *s;
    ckd_error err = {0};
    save.run = how->run;
    save.fidelity = how->fidelity;
    save.staging_bytes = how->staging;
    store.threads = how->threads;
    store.on_message = how->damage_messages ? count_damage : NULL;
    store.message_context = how->damage_messages;
    o.save = &save;
    o.store = &store;
    o.every_steps = 1;
    o.nice = -1;
    o.snapshot_bytes = ALL_BYTES + 64 * TENSORS + (how->room ? KEPT_BYTES : 0);
    (void)mkdir(how->dir, 0777);
    must(ckd_session_open(&s, path_in(how->dir, "store").text, &o, &err), &err);
    for (size_t i = 0; i < m->count; i++) {
        ckd_tensor t = CKD_TENSOR_INIT;
        t.name = m->tensors[i].name;
        t.dtype = m->tensors[i].dtype;
        t.ndim = 2;
        t.shape = (uint64_t[]){ROWS, COLUMNS};
        must(ckd_session_add(s, &t, m->tensors[i].values, 0, &err), &err);
    }
    return s;
}

static void save_step(ckd_session *s, uint64_t step) {
    ckd_error err = {0};
    must(ckd_session_save(s, step, &err), &err);
    must(ckd_session_wait(s, CKD_DURABLE, &err), &err);
}

/* The stored records, and the values that loads of the last checkpoint give. */
typedef struct outcome {
    char *records;
    void *values[TENSORS];
} outcome;

static outcome outcome_of(const setting *how, const model *m) {
    outcome r = {.records = calloc(1, ROOM)};
    ckd_store *store = store_reopen(how->dir, CKD_OPEN_READ);
    for (uint64_t step = 1; step <= SAVES; step++) {
        ckd_checkpoint c;
        assert_int_equal(ckd_store_find(&c, store, how->run, step, NULL), CKD_OK);
        assert_int_equal(c.kind == CKD_DELTA, step > 1);
    }
    records_describe(r.records, ROOM, store, path_in(how->dir, "store").text, 1, SAVES);
    for (size_t i = 0; i < m->count; i++) {
        r.values[i] = load_whole(store, how->run, SAVES, m->tensors[i].name,
                                 COUNT * ckd_dtype_size(m->tensors[i].dtype));
    }
    assert_int_equal(verify_damage(store), 0);
    ckd_store_close(store);
    return r;
}

static void check_same(outcome *a, outcome *b, const model *m, uint32_t threads) {
    records_check_same(a->records, b->records, threads);
    free(b->records);
    for (size_t i = 0; i < m->count; i++) {
        if (memcmp(a->values[i], b->values[i], COUNT * ckd_dtype_size(m->tensors[i].dtype)) != 0) {
            fail_msg("%s is not the same", m->tensors[i].name);
        }
        free(b->values[i]);
    }
}

static void outcome_free(outcome *r, const model *m) {
    free(r->records);
    for (size_t i = 0; i < m->count; i++) {
        free(r->values[i]);
    }
}

/*
 * With `scribble`, the kept values are overwritten between saves. With `again`, the session is closed halfway, and a
 * new one restores the state.
 */
static outcome run_session(const setting *how, model *m, bool scribble, bool again) {
    model_begin(m);
    ckd_session *s = open_session(how, m);
    for (uint64_t step = 1; step <= SAVES; step++) {
        ckd_session_state now;
        save_step(s, step);
        ckd_session_poll(&now, s);
        assert_int_equal(now.kept_bytes, how->room ? KEPT_BYTES : 0);
        assert_true(now.snapshot_bytes >= ALL_BYTES + now.kept_bytes);
        if (scribble) {
            memset(s->saver.cached.memory, (int)step, s->saver.cached.size);
        }
        if (again && step == SAVES / 2) {
            ckd_error err = {0};
            must(ckd_session_close(s, &err), &err);
            s = open_session(how, m);
            must(ckd_session_restore(NULL, s, CKD_LATEST, &err), &err);
        }
        model_move(m, (unsigned)step);
    }
    ckd_error err = {0};
    must(ckd_session_close(s, &err), &err);
    outcome r = outcome_of(how, m);
    model_end(m);
    return r;
}

/*
 * A weight and its master are saved at the same time and use the same second moments. The one that finishes first must
 * not free them.
 */
static void test_two_tiles_share_second_moments(void **state) {
    char dir[2][4096];
    model m;
    outcome r[2];
    with_masters = true;
    for (uint32_t i = 0; i < 2; i++) {
        snprintf(dir[i], sizeof(dir[i]), "%s/%u", (const char *)*state, i);
        setting with = {dir[i], "run", false, i ? 3 : 1, CKD_COARSE, NULL, 0};
        r[i] = run_session(&with, &m, false, false);
    }
    with_masters = false;
    check_same(&r[0], &r[1], &m, 3);
    outcome_free(&r[0], &m);
}

static void test_kept_values_change_nothing(void **state) {
    const ckd_fidelity fidelities[] = {CKD_NEAR, CKD_COARSE};
    for (unsigned f = 0; f < 2; f++) {
        if (!test_draws("it changes nothing", f, 2)) {
            continue;
        }
        model m;
        outcome read = {NULL, {NULL}};
        for (int how = 0; how < 3; how++) { /* not kept; kept; kept, and wrong */
            char dir[4096];
            snprintf(dir, sizeof(dir), "%s/%u%d", (const char *)*state, f, how);
            int damage_messages = 0;
            setting with = {dir, "run", how > 0, 2, fidelities[f], &damage_messages, 0};
            outcome r = run_session(&with, &m, how == 2, false);
            assert_int_equal(damage_messages, 0);
            if (how == 0) {
                read = r;
            } else {
                check_same(&read, &r, &m, with.threads);
            }
        }
        outcome_free(&read, &m);
    }
}

static void test_restored_values_are_kept(void **state) {
    model m;
    char dir[4096];
    outcome all[2];
    for (int kept = 0; kept < 2; kept++) {
        snprintf(dir, sizeof(dir), "%s/%d", (const char *)*state, kept);
        setting with = {dir, "run", kept, 2, CKD_NEAR, NULL, 0};
        all[kept] = run_session(&with, &m, false, true);
    }
    check_same(&all[0], &all[1], &m, 2);
    outcome_free(&all[0], &m);
}

static void test_results_do_not_depend_on_threads(void **state) {
    model m;
    const uint32_t threads[] = {1, 2, 3, 7};
    outcome one = {NULL, {NULL}};
    for (int i = 0; i < 4; i++) {
        char dir[4096];
        snprintf(dir, sizeof(dir), "%s/%d", (const char *)*state, i);
        setting with = {dir, "run", i % 2, threads[i], CKD_NEAR, NULL, 0};
        outcome r = run_session(&with, &m, false, false);
        if (i == 0) {
            one = r;
        } else {
            check_same(&one, &r, &m, threads[i]);
        }
    }
    outcome_free(&one, &m);
}

static dir_list list_chunks(const char *dir) {
    dir_list files;
    assert_int_equal(dir_list_read(&files, path_of(path_in(dir, "store").text, DIR_CHUNKS, "").text, NULL),
                     CKD_OK);
    return files;
}

static pathname only_chunk(const char *dir) {
    dir_list files = list_chunks(dir);
    assert_int_equal(files.count, 1);
    pathname path = path_of(path_in(dir, "store").text, DIR_CHUNKS, files.names[0]);
    dir_list_free(&files);
    return path;
}

/* Flips bits in all payloads of a chunk file, but not in its index. */
static void damage_payloads(const pathname *path) {
    size_t size;
    unsigned char *content = read_whole_file(path->text, &size);
    for (size_t at = size / 8; at < size - size / 8; at += 1000) {
        content[at] ^= 4;
    }
    write_whole_file(path->text, content, size);
    free(content);
}

/*
 * The first checkpoint's payloads are damaged after it was saved. Cached values stand in for it: of an exact session
 * the last snapshot, of a lossy one the decoded values. Nobody else could decode a delta on them.
 */
static void test_cached_values_do_not_hide_rot(void **state) {
    static const ckd_fidelity fidelities[] = {CKD_EXACT, CKD_NEAR};
    for (size_t i = 0; i < 2; i++) {
        model m;
        char dir[4096];
        int damage_messages = 0;
        snprintf(dir, sizeof(dir), "%s/%zu", (const char *)*state, i);
        setting with = {dir, "run", true, 2, fidelities[i], &damage_messages, 0};
        model_begin(&m);
        ckd_session *s = open_session(&with, &m);
        save_step(s, 1);
        pathname base = only_chunk(dir);
        damage_payloads(&base);
        for (uint64_t step = 2; step <= 3; step++) {
            model_move(&m, (unsigned)step);
            save_step(s, step);
            assert_int_equal(damage_messages, 1);
        }
        ckd_error err = {0};
        must(ckd_session_close(s, &err), &err);
        ckd_store *opened = store_reopen(dir, CKD_OPEN_READ);
        for (size_t k = 0; k < m.count; k++) {
            free(load_whole(opened, "run", 3, m.tensors[k].name, COUNT * ckd_dtype_size(m.tensors[k].dtype)));
        }
        ckd_store_close(opened);
        model_end(&m);
    }
}

/* Flips a bit in the payload of each side record of these files. */
static void damage_sides(const char *dir, const dir_list *files) {
    size_t count = 0;
    pathname store = path_in(dir, "store");
    for (size_t i = 0; i < files->count; i++) {
        chunk *c;
        size_t size;
        pathname path = path_of(store.text, DIR_CHUNKS, files->names[i]);
        unsigned char *content = read_whole_file(path.text, &size);
        assert_int_equal(chunk_open(&c, path.text, NULL), CKD_OK);
        for (size_t k = 0; k < c->record_count; k++) {
            if (c->records[k].kind == RECORD_SIDE) {
                content[c->records[k].payload_offset] ^= 4;
                count++;
            }
        }
        chunk_close(c);
        write_whole_file(path.text, content, size);
        free(content);
    }
    assert_true(count > 0);
}

/*
 * Saves keep decoded rows and columns of lossy tensors in memory. These do not hide that the side records from which
 * they come have rotted since, once the time is over in which nothing is read again.
 */
static void test_cached_columns_do_not_hide_rot(void **state) {
    model m;
    int damage_messages = 0;
    setting with = {*state, "run", false, 2, CKD_NEAR, &damage_messages, 0};
    with_directions = true;
    model_begin(&m);
    ckd_session *s = open_session(&with, &m);
    save_step(s, 1);
    model_move(&m, 1);
    save_step(s, 2);
    model_move(&m, 2);
    dir_list files = list_chunks(*state);
    save_step(s, 3); /* reads the side records of the second one */
    damage_sides(*state, &files);
    dir_list_free(&files);
    s->saver.store->intact.since_ns = clock_monotonic_ns() - 2 * HOUR_NS;
    model_move(&m, 3);
    save_step(s, 4);
    with_directions = false;
    ckd_error err = {0};
    must(ckd_session_close(s, &err), &err);
    assert_int_equal(damage_messages, 1);
    ckd_store *opened = store_reopen(*state, CKD_OPEN_READ);
    for (size_t k = 0; k < m.count; k++) {
        free(load_whole(opened, "run", 4, m.tensors[k].name, COUNT * ckd_dtype_size(m.tensors[k].dtype)));
    }
    ckd_store_close(opened);
    model_end(&m);
}

/*
 * What a session has read once, it does not read again so soon. The parent's payloads are unreadable at the third save,
 * which is a delta all the same.
 */
static void test_parents_are_not_read(void **state) {
    for (int room = 0; room < 2; room++) {
        model m;
        char dir[4096];
        int damage_messages = 0;
        snprintf(dir, sizeof(dir), "%s/%d", (const char *)*state, room);
        setting with = {dir, "run", room, 2, CKD_NEAR, &damage_messages, 0};
        model_begin(&m);
        ckd_session *s = open_session(&with, &m);
        save_step(s, 1);
        pathname base = only_chunk(dir);
        model_move(&m, 1);
        save_step(s, 2);
        damage_payloads(&base);
        model_move(&m, 2);
        save_step(s, 3);
        ckd_error err = {0};
        must(ckd_session_close(s, &err), &err);
        assert_int_equal(damage_messages, !room);
        model_end(&m);
    }
}

/* The first checkpoint's file is gone. Cached values make a delta on the second one possible, but not its commit. */
static void test_cached_values_do_not_hide_missing_files(void **state) {
    static const ckd_fidelity fidelities[] = {CKD_EXACT, CKD_NEAR};
    for (size_t i = 0; i < 2; i++) {
        model m;
        char dir[4096];
        int damage_messages = 0;
        snprintf(dir, sizeof(dir), "%s/%zu", (const char *)*state, i);
        setting with = {dir, "run", true, 2, fidelities[i], &damage_messages, 0};
        model_begin(&m);
        ckd_session *s = open_session(&with, &m);
        save_step(s, 1);
        model_move(&m, 1);
        pathname base = only_chunk(dir);
        save_step(s, 2);
        assert_int_equal(file_remove(base.text, false, NULL), CKD_OK);
        model_move(&m, 2);
        save_step(s, 3);
        assert_int_equal(damage_messages, 1);
        model_move(&m, 3);
        save_step(s, 4);
        ckd_error err = {0};
        must(ckd_session_close(s, &err), &err);
        ckd_store *opened = store_reopen(dir, CKD_OPEN_READ);
        for (size_t k = 0; k < m.count; k++) {
            free(load_whole(opened, "run", 4, m.tensors[k].name, COUNT * ckd_dtype_size(m.tensors[k].dtype)));
        }
        ckd_store_close(opened);
        model_end(&m);
    }
}

typedef struct cost {
    uint64_t count, bytes;
} cost;

/*
 * Returns the cheapest of the last saves. In earlier ones, parts of the pipeline may need memory for the first time,
 * depending on the values.
 */
static cost cost_of(const char *dir, ckd_fidelity fidelity, uint64_t staging) {
    model m;
    cost c = {UINT64_MAX, UINT64_MAX};
    setting with = {dir, "run", true, 2, fidelity, NULL, staging};
    with_directions = true;
    model_begin(&m);
    ckd_session *s = open_session(&with, &m);
    for (uint64_t step = 1; step <= 3 * SAVES; step++) {
        uint64_t count = atomic_load(&allocations), size = atomic_load(&allocated);
        save_step(s, step);
        count = atomic_load(&allocations) - count;
        size = atomic_load(&allocated) - size;
        if (step > 2 * SAVES) {
            c.count = count < c.count ? count : c.count;
            c.bytes = size < c.bytes ? size : c.bytes;
        }
        model_move(&m, (unsigned)step);
    }
    ckd_error err = {0};
    must(ckd_session_close(s, &err), &err);
    model_end(&m);
    with_directions = false;
    return c;
}

/*
 * Later saves reuse scratch memory. A later save of 12 MB allocates what describes blocks and files, and reads small
 * chunk files back. An exact save opens the checkpoints that its parent's chains lead to. A lossy save opens about ten
 * older checkpoints, twice each: to choose a parent, and to name all files that a load reads. That takes some ten small
 * allocations each, and 250 KB for each of four files that are small enough to be read whole. The limits are too low
 * for one more f32 tensor or for a buffer to write it.
 */
static void test_later_saves_allocate_little(void **state) {
    static const cost most[] = {
        [CKD_EXACT] = {340, 500 << 10}, [CKD_NEAR] = {500, 2560 << 10}, [CKD_COARSE] = {500, 2560 << 10}};
    char dir[4096];
    for (ckd_fidelity f = CKD_EXACT; f <= CKD_COARSE; f++) {
        if (!test_draws("later saves", f - CKD_EXACT, 3)) {
            continue;
        }
        snprintf(dir, sizeof(dir), "%s/%d", (const char *)*state, (int)f);
        cost c = cost_of(dir, f, 0);
        assert_in_range(c.count, 1, most[f].count);
        assert_in_range(c.bytes, 1, most[f].bytes);
    }
}

/*
 * With so small a budget, a save may not keep the memory in which it searches for factors. It frees that memory and
 * allocates it again.
 */
static void test_large_scratch_memory_is_freed(void **state) {
    enum { STAGING = 1 << 20 };
    char dir[4096];
    snprintf(dir, sizeof(dir), "%s/%d", (const char *)*state, 1);
    cost c = cost_of(dir, CKD_NEAR, STAGING);
    assert_true(c.bytes > 2 * STAGING);
}

static int setup(void **dir) {
    *dir = tempdir_create();
    return 0;
}

static int teardown(void **dir) {
    tempdir_remove(*dir);
    return 0;
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(test_two_tiles_share_second_moments), TEST(test_kept_values_change_nothing),
        TEST(test_restored_values_are_kept),       TEST(test_results_do_not_depend_on_threads),
        TEST(test_parents_are_not_read),           TEST(test_cached_values_do_not_hide_missing_files),
        TEST(test_cached_values_do_not_hide_rot),  TEST(test_cached_columns_do_not_hide_rot),
        TEST(test_later_saves_allocate_little),    TEST(test_large_scratch_memory_is_freed),
    };
    return run_sampled("session_cached", tests, 2, NULL, NULL);
}
