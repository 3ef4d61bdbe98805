/*
 * Stores with lossy checkpoints: any shape and layout, loads of any region, any number of threads, any table of
 * kernels and any floating-point mode of the process. Damage is found, and the catalog can be rebuilt.
 */
#include <fenv.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/file.h"
#include "base/hash.h"
#include "kernels/cpu.h"
#include "tests/support/checkpoints.h"
#include "tests/support/drift.h"
#include "tests/support/level.h"
#include "tests/support/scenes.h"
#include "tests/support/tempdir.h"

static const ckd_fidelity fidelities[2] = {CKD_NEAR, CKD_COARSE};
static const char *const names[3] = {"exp_avg_sq.w", "exp_avg.w", "w"};

static const float *part_of(const drift *d, int part) {
    return part == 0 ? d->second : part == 1 ? d->first : d->weight;
}

/* The linker redirects the library's calls to this function (mk/test.mk). */
static bool portable;
const kernels *__real_kernels_cpu(void);
const kernels *__wrap_kernels_cpu(void);
const kernels *__wrap_kernels_cpu(void) {
    return portable ? &kernels_cpu_portable : __real_kernels_cpu();
}

/* ---- shapes and regions ---- */

static const struct {
    uint32_t ndim;
    uint64_t shape[5];
} shapes[] = {
    {1, {64}},       {1, {1009}},        {2, {1, 300}},       {2, {300, 1}},
    {2, {127, 131}}, {2, {7, 400}},      {2, {400, 7}},       {3, {4, 33, 37}},
    {3, {5, 1, 90}}, {4, {24, 8, 3, 3}}, {4, {2, 3, 40, 20}}, {5, {2, 3, 2, 5, 17}},
    {1, {270001}},   {2, {1031, 523}},   {2, {3, 300007}},    {3, {3, 400, 300}},
};
enum { SHAPES = sizeof(shapes) / sizeof(shapes[0]) };

static uint64_t elements_of(size_t s) {
    uint64_t n = 1;
    for (uint32_t d = 0; d < shapes[s].ndim; d++) {
        n *= shapes[s].shape[d];
    }
    return n;
}

static void check_errors(ckd_store *store, const char *run, uint64_t step, const drift *d, bool deep) {
    for (int part = 0; part < 3; part++) {
        float *got = load_floats(store, run, step, names[part], CKD_F32, d->count);
        double error = relative_error(got, part_of(d, part), d->count);
        if (!(error > 0) || !(error < (part < 2 ? 1.01 : deep ? 0.05 : 0.02))) {
            fail_msg("%s of %s, step %u: %g", names[part], run, (unsigned)step, error);
        }
        free(got);
    }
}

static void test_shapes_and_regions(void **state) {
    ckd_store *store = store_create(*state);
    for (size_t s = 0; s < SHAPES; s++) {
        char run[32];
        snprintf(run, sizeof(run), "shape%zu", s);
        uint64_t n = elements_of(s), columns = shapes[s].ndim == 1 ? 1 : shapes[s].shape[shapes[s].ndim - 1];
        drift d = drift_new(n / columns, columns, (unsigned)s);
        for (uint64_t step = 0; step < 3; step++, drift_step(&d)) {
            ckd_save_options o = lossy_options(run, step, fidelities[s % 2]);
            ckd_save *save = begin_with(store, &o);
            for (int part = 0; part < 3; part++) {
                add_tensor(save, names[part], CKD_F32, shapes[s].ndim, shapes[s].shape, NULL,
                           part_of(&d, part));
            }
            commit_save(save);
            check_errors(store, run, step, &d, step > 0);
            for (int part = 0; part < 3 && step == 2; part++) {
                float *got = load_floats(store, run, step, names[part], CKD_F32, n);
                for (unsigned i = 0; i < 12; i++) {
                    check_random_region(store, run, step, names[part], shapes[s].ndim, shapes[s].shape, got,
                                        i);
                }
                free(got);
            }
        }
        drift_free(&d);
    }
    assert_int_equal(verify_damage(store), 0);
    ckd_store_close(store);
}

/* ---- ranks ---- */

/* A rank's part: a flat range with ragged ends, or a slab of rows. */
static ckd_region region_of(const drift *d, uint32_t rank, uint32_t world, bool rows) {
    ckd_region r = {.kind = rows ? CKD_REGION_BOX : CKD_REGION_FLAT};
    uint64_t whole = rows ? d->rows : d->count, first = whole * rank / world,
             end = whole * (rank + 1) / world;
    if (!rows) {
        first += rank > 0 ? 5 : 0;
        end += rank + 1 < world ? 5 : 0;
        r.start = first;
        r.count = end - first;
        return r;
    }
    r.offsets[0] = first;
    r.lengths[0] = end - first;
    r.lengths[1] = d->columns;
    return r;
}

/* Each rank saves its part of the tensors from number `from` on. */
static void save_ranks(ckd_store *store, ckd_save_options o, const drift *d, uint32_t world, bool rows,
                       int from) {
    ckd_save *saves[4] = {NULL};
    ckd_part parts[4];
    ckd_error err = {0};
    uint64_t shape[2] = {d->rows, d->columns};
    o.world = world;
    assert_int_equal(ckd_id_new(&o.checkpoint_id, NULL), CKD_OK);
    for (o.rank = 0; o.rank < world; o.rank++) {
        ckd_region r = region_of(d, o.rank, world, rows);
        uint64_t first = rows ? r.offsets[0] * d->columns : r.start;
        saves[o.rank] = begin_with(store, &o);
        for (int part = from; part < 3; part++) {
            add_tensor(saves[o.rank], names[part], CKD_F32, 2, shape, &r, part_of(d, part) + first);
        }
        assert_int_equal(ckd_save_seal(&parts[o.rank], saves[o.rank], &err), CKD_OK);
    }
    if (ckd_save_publish(NULL, saves[0], parts, world, &err) != CKD_OK) {
        fail_msg("publish: %s", err.message);
    }
    for (uint32_t rank = 0; rank < world; rank++) {
        if (rank > 0) {
            ckd_save_end(saves[rank]);
        }
        ckd_part_free(&parts[rank]);
    }
}

/* One rank saves the weight in several ranges. */
static void save_in_slices(ckd_store *store, const ckd_save_options *o, const drift *d, uint32_t slices) {
    uint64_t shape[2] = {d->rows, d->columns};
    ckd_save *save = begin_with(store, o);
    for (uint32_t p = 0; p < slices; p++) {
        ckd_region r = region_of(d, p, slices, false);
        add_tensor(save, "w", CKD_F32, 2, shape, &r, d->weight + r.start);
    }
    commit_save(save);
}

/* Each step is saved by another number of ranks in another layout, so that parents are read across boundaries. */
static void test_ranks_and_other_layouts(void **state) {
    ckd_store *store = store_create(*state);
    static const uint64_t shape[2] = {211, 97};
    for (int f = 0; f < 2; f++) {
        const char *run = ckd_fidelity_name(fidelities[f]);
        drift d = drift_new(shape[0], shape[1], 1);
        for (uint64_t step = 0; step < 9; step++, drift_step(&d)) {
            ckd_save_options o = lossy_options(run, step, fidelities[f]);
            save_ranks(store, o, &d, 1 + (uint32_t)((step + 1) % 3), step / 3 % 2, 0);
            check_errors(store, run, step, &d, step > 0);
            float *got = load_floats(store, run, step, "w", CKD_F32, d.count);
            for (unsigned i = 0; i < 10; i++) {
                check_random_region(store, run, step, "w", 2, shape, got, i);
            }
            free(got);
            double reported = tensor_info(store, run, step, "w").rel_l2;
            got = load_floats(store, run, step, "w", CKD_F32, d.count);
            double is = relative_error(got, d.weight, d.count);
            assert_true(reported > 0.99 * is && reported < 1.01 * is);
            free(got);
        }
        drift_free(&d);
    }
    assert_int_equal(verify_damage(store), 0);
    ckd_store_close(store);
}

/*
 * A region with few values is stored exactly but contributes half of the tensor's norm. The reported error, by catalog
 * and by files, is still that of the whole tensor.
 */
static void test_errors_include_exact_regions(void **state) {
    enum { COUNT = 20000, FEW = 20 };
    ckd_store *store = store_create(*state);
    const uint64_t shape[1] = {COUNT};
    for (uint64_t step = 0; step < 3; step++) {
        float *values = random_values(CKD_F32, COUNT, 7), whole = 0;
        for (int i = 0; i < COUNT; i++) {
            values[i] *= 1 + 0.001f * (float)step * (float)(i % 7);
            whole += values[i] * values[i];
        }
        for (int i = 0; i < FEW; i++) {
            values[i] = sqrtf(whole / FEW);
        }
        ckd_save_options o = lossy_options("run", step, CKD_COARSE);
        ckd_save *save = begin_with(store, &o);
        const ckd_region few = {.kind = CKD_REGION_FLAT, .count = FEW},
                         others = {.kind = CKD_REGION_FLAT, .start = FEW, .count = COUNT - FEW};
        add_tensor(save, "w", CKD_F32, 1, shape, &few, values);
        add_tensor(save, "w", CKD_F32, 1, shape, &others, values + FEW);
        ckd_checkpoint c = commit_save(save);
        float *got = load_floats(store, "run", step, "w", CKD_F32, COUNT);
        double is = relative_error(got, values, COUNT),
               reported = tensor_info(store, "run", step, "w").rel_l2;
        assert_memory_equal(got, values, FEW * sizeof(*got));
        assert_true(is > 0 && reported > 0.99 * is && reported < 1.01 * is);
        ckd_load *load;
        assert_int_equal(ckd_load_begin(&load, store, &c.id, NULL), CKD_OK);
        reported = ckd_load_tensors(load)->items[0].rel_l2;
        assert_true(reported > 0.99 * is && reported < 1.01 * is);
        ckd_load_end(load);
        free(got);
        free(values);
    }
    ckd_store_close(store);
}

/*
 * Only weights are saved, in regions, by three ranks and by one. The limit of the load cost is met although no other
 * tensor could compensate for a long chain.
 */
static void test_regions_meet_the_load_cost(void **state) {
    ckd_store *store = store_create(*state);
    static const double limits[] = {1.8, 2, 3};
    for (int i = 0; i < 6; i++) {
        bool ranks = i % 2;
        char run[32];
        snprintf(run, sizeof(run), "%s-%d", ranks ? "ranks" : "one", i / 2);
        drift d = drift_new(300, 200, 5);
        uint32_t deepest = 0;
        for (uint64_t step = 0; step < 12; step++, drift_step(&d)) {
            ckd_save_options o = lossy_options(run, step, CKD_NEAR);
            o.effort = 1;
            o.max_load_cost = limits[i / 2];
            if (ranks) {
                save_ranks(store, o, &d, 3, false, 2);
            } else {
                save_in_slices(store, &o, &d, 3);
            }
            ckd_checkpoint c = checkpoint_at(store, run, step);
            assert_true(c.load_cost <= o.max_load_cost);
            deepest = c.depth > deepest ? c.depth : deepest;
        }
        assert_true(deepest >= 1 || limits[i / 2] < 3);
        drift_free(&d);
    }
    ckd_store_close(store);
}

/* ---- independent of threads, kernels and floating-point modes ---- */

enum { ROWS = 700, COLUMNS = 420, N = ROWS * COLUMNS, STEPS = 4 };

/* Returns the values of all steps in one array, which the caller frees. Sets the number of bytes stored. */
static float *save_and_load(const char *dir, const char *name, uint32_t threads, ckd_fidelity fidelity,
                            uint64_t *stored) {
    char path[4096];
    snprintf(path, sizeof(path), "%s/%s", dir, name);
    ckd_store_options options = CKD_STORE_OPTIONS_INIT;
    options.threads = threads;
    ckd_store *store;
    assert_int_equal(ckd_store_open(&store, path, CKD_OPEN_CREATE, &options, NULL), CKD_OK);
    float *all = malloc(3 * STEPS * N * sizeof(float));
    assert_non_null(all);
    fenv_t mode;
    fegetenv(&mode);
    fesetenv(FE_DFL_ENV); /* for the test's own arithmetic */
    drift d = drift_new(ROWS, COLUMNS, 1);
    *stored = 0;
    for (uint64_t step = 0; step < STEPS; step++) {
        ckd_save_options o = lossy_options("r", step, fidelity);
        fesetenv(&mode);
        *stored += save_drift(store, &o, &d).stored_bytes;
        for (uint64_t part = 0; part < 3; part++) {
            void *got = load_whole(store, "r", step, names[part], N * sizeof(float));
            memcpy(all + (3 * step + part) * N, got, N * sizeof(float));
            free(got);
        }
        fesetenv(FE_DFL_ENV);
        drift_step(&d);
    }
    drift_free(&d);
    fesetenv(&mode);
    ckd_store_close(store);
    return all;
}

static void set_odd_mode(void) {
    fesetround(FE_UPWARD);
#if defined(__x86_64__)
    __builtin_ia32_ldmxcsr(__builtin_ia32_stmxcsr() | 0x8040u);
#endif
}

static void test_values_do_not_depend_on_threads_kernels_or_modes(void **state) {
    for (int f = 0; f < 2; f++) {
        uint64_t stored, others;
        char name[32];
        float *all = save_and_load(*state, f ? "c" : "n", 1, fidelities[f], &stored);
        for (int way = 0; way < 3; way++) {
            snprintf(name, sizeof(name), "%d.%d", f, way);
            portable = way == 1;
            if (way == 2) {
                set_odd_mode();
            }
            int round = fegetround();
            float *other = save_and_load(*state, name, way == 0 ? 5 : 2, fidelities[f], &others);
            assert_int_equal(fegetround(), round);
            fesetenv(FE_DFL_ENV);
            portable = false;
            assert_memory_equal(other, all, 3 * STEPS * N * sizeof(float));
            /* Random ids may compress differently. */
            assert_true(others + 200 > stored && stored + 200 > others);
            free(other);
        }
        free(all);
    }
}

/* ---- chains with older ancestors, independent of threads ---- */

enum { LAYERS = 16, LONG = 16 };

/* A run: hashes of the values and the depths of the weights' chains, by step and layer, and the bytes stored. */
typedef struct long_run {
    uint64_t stored, values[LONG][LAYERS];
    uint32_t depth[LONG][LAYERS];
} long_run;

static void look_at_layer(long_run *out, ckd_store *store, uint64_t step, int layer, uint64_t count) {
    char name[32];
    snprintf(name, sizeof(name), "layer%d", layer);
    float *got = load_floats(store, "r", step, name, CKD_F32, count);
    out->values[step][layer] = hash64(got, count * sizeof(float));
    out->depth[step][layer] = tensor_info(store, "r", step, name).depth;
    free(got);
}

/* Saves layers of several shapes. The limit of the load cost makes their chains return to older ancestors. */
static long_run save_long(const char *dir, const char *name, uint32_t threads, ckd_fidelity fidelity) {
    char path[4096], layer[32];
    long_run out = {0};
    snprintf(path, sizeof(path), "%s/%s", dir, name);
    ckd_store_options options = CKD_STORE_OPTIONS_INIT;
    options.threads = threads;
    ckd_store *store;
    assert_int_equal(ckd_store_open(&store, path, CKD_OPEN_CREATE, &options, NULL), CKD_OK);
    drift d[LAYERS];
    for (int i = 0; i < LAYERS; i++) {
        d[i] = drift_new(40 + 10 * (uint64_t)i, 90, (unsigned)i);
    }
    for (uint64_t step = 0; step < LONG; step++) {
        ckd_save_options o = lossy_options("r", step, fidelity);
        o.max_load_cost = 2;
        ckd_save *save = begin_with(store, &o);
        for (int i = 0; i < LAYERS; i++) {
            snprintf(layer, sizeof(layer), "layer%d", i);
            add_drift(save, layer, &d[i]);
        }
        out.stored += commit_save(save).stored_bytes;
        for (int i = 0; i < LAYERS; i++) {
            look_at_layer(&out, store, step, i, d[i].count);
            drift_step(&d[i]);
        }
    }
    for (int i = 0; i < LAYERS; i++) {
        drift_free(&d[i]);
    }
    ckd_store_close(store);
    return out;
}

/* How many deltas do not build on the previous save. */
static int count_older_parents(const long_run *r) {
    int count = 0;
    for (int step = 1; step < LONG; step++) {
        for (int i = 0; i < LAYERS; i++) {
            count += r->depth[step][i] > 0 && r->depth[step][i] <= r->depth[step - 1][i];
        }
    }
    return count;
}

static void test_ancestors_do_not_depend_on_threads(void **state) {
    static const uint32_t threads[] = {2, 5};
    for (unsigned f = 0; f < 2; f++) {
        if (!test_draws("long runs", f, 2)) {
            continue;
        }
        char name[32];
        snprintf(name, sizeof(name), "%u", f);
        long_run one = save_long(*state, name, 1, fidelities[f]);
        print_message("%s: %d deltas of %d on ancestors\n", ckd_fidelity_name(fidelities[f]),
                      count_older_parents(&one), (LONG - 1) * LAYERS);
        assert_true(count_older_parents(&one) >= LAYERS);
        for (int i = 0; i < 2; i++) {
            snprintf(name, sizeof(name), "%u.%d", f, i);
            long_run other = save_long(*state, name, threads[i], fidelities[f]);
            assert_memory_equal(other.depth, one.depth, sizeof(one.depth));
            assert_memory_equal(other.values, one.values, sizeof(one.values));
            /* Ids compress differently. */
            assert_in_range(other.stored, one.stored - 100 * LONG, one.stored + 100 * LONG);
        }
    }
}

/* ---- rebuilt catalogs and damage ---- */

static void test_rebuild(void **state) {
    ckd_store *store = store_create(*state);
    drift d = drift_new(96, 64, 2);
    float *before[STEPS];
    for (uint64_t step = 0; step < STEPS; step++, drift_step(&d)) {
        ckd_save_options o = lossy_options("r", step, CKD_COARSE);
        o.resumed_from_run = step ? "r" : NULL;
        o.resumed_from_step = step ? step - 1 : 0;
        save_drift(store, &o, &d);
        before[step] = load_floats(store, "r", step, "w", CKD_F32, d.count);
    }
    ckd_checkpoint_list *old, *new;
    assert_int_equal(ckd_store_list(&old, store, NULL, NULL), CKD_OK);
    double reported = tensor_info(store, "r", 3, "w").rel_l2;
    ckd_store_close(store);
    assert_int_equal(ckd_store_rebuild(NULL, store_path_of(*state, ""), NULL, NULL), CKD_OK);
    store = store_reopen(*state, CKD_OPEN_READ);
    assert_int_equal(ckd_store_list(&new, store, NULL, NULL), CKD_OK);
    lists_check_equal(old, new);
    assert_int_equal(new->items[STEPS - 1].lossy_resumes, STEPS - 1);
    assert_true(tensor_info(store, "r", 3, "w").rel_l2 == reported);
    for (uint64_t step = 0; step < STEPS; step++) {
        float *after = load_floats(store, "r", step, "w", CKD_F32, d.count);
        assert_memory_equal(after, before[step], d.count * sizeof(float));
        free(after);
        free(before[step]);
    }
    assert_int_equal(verify_damage(store), 0);
    ckd_checkpoint_list_free(old);
    ckd_checkpoint_list_free(new);
    drift_free(&d);
    ckd_store_close(store);
}

/* Loads steps 0 to 2. Each load must be right or fail. Returns how many failed. */
static int load_all(ckd_store *store, float *const right[9], uint64_t count) {
    int failed = 0;
    for (uint64_t i = 0; i < 9; i++) {
        ckd_checkpoint c;
        ckd_load *load;
        ckd_error err = {0};
        if (ckd_store_find(&c, store, "r", i / 3, NULL) != CKD_OK ||
            ckd_load_begin(&load, store, &c.id, &err) != CKD_OK) {
            failed++;
            continue;
        }
        ckd_load_request q = CKD_LOAD_REQUEST_INIT;
        q.name = names[i % 3];
        q.size = count * sizeof(float);
        q.data = malloc(q.size);
        assert_non_null(q.data);
        if (ckd_load_tensor(load, &q, &err) != CKD_OK) {
            assert_true(err.message[0]);
            failed++;
        } else if (memcmp(q.data, right[i], q.size) != 0) {
            fail_msg("%s of step %u is loaded wrongly", names[i % 3], (unsigned)(i / 3));
        }
        free(q.data);
        ckd_load_end(load);
    }
    return failed;
}

static void test_every_flipped_byte(void **state) {
    ckd_store *store = store_create(*state);
    drift d = drift_new(20, 17, 3);
    float *right[9];
    for (uint64_t step = 0; step < 3; step++, drift_step(&d)) {
        ckd_save_options o = lossy_options("r", step, CKD_NEAR);
        save_drift(store, &o, &d);
        for (uint64_t part = 0; part < 3; part++) {
            right[3 * step + part] = load_floats(store, "r", step, names[part], CKD_F32, d.count);
        }
    }
    ckd_store_close(store);
    dir_list files;
    unsigned long flips = 0, found = 0, stride = under_sanitizer() ? 29 : test_stride(37, 3, 1);
    assert_int_equal(dir_list_read(&files, store_path_of(*state, "data/c"), NULL), CKD_OK);
    assert_int_equal(files.count, 3);
    for (size_t f = 0; f < files.count; f++) {
        char path[4096];
        size_t size;
        snprintf(path, sizeof(path), "%s/%s", store_path_of(*state, "data/c"), files.names[f]);
        unsigned char *content = read_whole_file(path, &size);
        for (size_t at = test_first("flipped bytes", stride) - 1 + f; at < size; at += stride) {
            content[at] ^= (unsigned char)(1u << (at % 8));
            write_whole_file(path, content, size);
            content[at] ^= (unsigned char)(1u << (at % 8));
            store = store_reopen(*state, CKD_OPEN_READ);
            int failed = load_all(store, right, d.count);
            bool reported = verify_damage(store) > 0;
            if (!reported) {
                fail_msg("a flipped bit at %zu of %s is not found", at, path);
            }
            found += failed > 0;
            flips++;
            ckd_store_close(store);
        }
        write_whole_file(path, content, size);
        free(content);
    }
    print_message("%lu flips, all found, %lu of them by loads\n", flips, found);
    assert_true(flips > 50 && found > flips / 4);
    dir_list_free(&files);
    for (int i = 0; i < 9; i++) {
        free(right[i]);
    }
    drift_free(&d);
}

static int teardown(void **state) {
    fesetenv(FE_DFL_ENV);
    portable = false;
    tempdir_remove(*state);
    return 0;
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, tempdir_setup, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(test_shapes_and_regions),
        TEST(test_ranks_and_other_layouts),
        TEST(test_errors_include_exact_regions),
        TEST(test_regions_meet_the_load_cost),
        TEST(test_values_do_not_depend_on_threads_kernels_or_modes),
        TEST(test_ancestors_do_not_depend_on_threads),
        TEST(test_rebuild),
        TEST(test_every_flipped_byte),
    };
    return run_sampled("lossy_store", tests, 2, NULL, NULL);
}
