/*
 * Loads by several ranks together. Each rank gets what it would load alone, and together they read each stored byte
 * once. An error on one rank, at any moment, becomes the error of all, and no rank waits forever. Ranks are threads
 * here; tests/mpi/check_mpi.sh uses processes.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "codec/chunk/chunk.h"
#include "engine/common/common.h"
#include "engine/ranks/collective_load.h"
#include "tests/support/checkpoints.h"
#include "tests/support/drift.h"
#include "tests/support/level.h"
#include "tests/support/scenes.h"
#include "tests/support/scratch.h"
#include "tests/support/tempdir.h"
#include "tests/support/thread_ranks.h"

enum { ROWS = 300, COLUMNS = 400, STEPS = 6, LAST = STEPS - 1, TENSOR_COUNT_MAX = 16, REQUESTS_MOST = 24 };

static char *dir;
static const uint64_t shape[2] = {ROWS, COLUMNS};

/* ---- failing allocations: the linker redirects malloc and its like to these functions (mk/test.mk) ---- */

/* Counts this thread's allocations; the one that fails, 0: none. */
static _Thread_local unsigned long allocations, fail_allocation;
static _Atomic unsigned long failed_allocations;

static bool fails(void) {
    if (fail_allocation == 0 || ++allocations != fail_allocation) {
        return false;
    }
    failed_allocations++;
    return true;
}

#define WRAPPED(name, parameters, arguments)             \
    void *__real_##name parameters;                      \
    void *__wrap_##name parameters;                      \
    void *__wrap_##name parameters {                     \
        return fails() ? NULL : __real_##name arguments; \
    }

WRAPPED(malloc, (size_t size), (size))
WRAPPED(calloc, (size_t count, size_t size), (count, size))
WRAPPED(realloc, (void *block, size_t size), (block, size))

/* ---- checkpoints ---- */

/*
 * Adds a tensor in four shards of rows or of columns. A chain that switches between them looks like one whose ranks
 * changed.
 */
static void add_cut(ckd_save *save, const char *name, const float *values, bool by_rows) {
    float *slice = malloc(sizeof(float) * ROWS * COLUMNS);
    assert_non_null(slice);
    for (uint64_t i = 0; i < 4; i++) {
        ckd_region r = {.kind = CKD_REGION_BOX, .lengths = {ROWS, COLUMNS}};
        unsigned at = by_rows ? 0 : 1;
        r.offsets[at] = shape[at] * i / 4;
        r.lengths[at] = shape[at] * (i + 1) / 4 - r.offsets[at];
        for (uint64_t row = 0; row < r.lengths[0]; row++) {
            memcpy(slice + row * r.lengths[1], values + (r.offsets[0] + row) * COLUMNS + r.offsets[1],
                   r.lengths[1] * sizeof(float));
        }
        add_tensor(save, name, CKD_F32, 2, shape, &r, slice);
    }
    free(slice);
}

static void make_exact(ckd_store *store, const char *run, ckd_codec codec) {
    float *values = random_values(CKD_F32, ROWS * COLUMNS, 1),
          *others = random_values(CKD_F32, ROWS * COLUMNS, 2);
    const uint64_t none[1] = {0};
    for (uint64_t step = 0; step < STEPS; step++) {
        change_values(CKD_F32, values, ROWS * COLUMNS, (unsigned)step);
        change_values(CKD_F32, others, ROWS * COLUMNS, (unsigned)step + 100);
        ckd_save_options o = options_of(run, step);
        o.max_load_cost = o.newest_load_cost = 1000;
        o.codec = codec;
        ckd_save *save = begin_with(store, &o);
        uint16_t *half = round_to_bf16(values, ROWS * COLUMNS);
        add_cut(save, "master.w", values, true);
        add_cut(save, "other", others, step % 4 < 2);
        add_tensor(save, "half.w", CKD_BF16, 2, shape, NULL, half);
        add_tensor(save, "none", CKD_F32, 1, none, NULL, NULL);
        add_tensor(save, "count", CKD_I64, 0, NULL, NULL, &step);
        commit_save(save);
        free(half);
    }
    free(values);
    free(others);
}

static void make_near(ckd_store *store) {
    drift a = drift_new(320, 256, 1), b = drift_new(64, 700, 2);
    for (uint64_t step = 0; step < STEPS; step++) {
        drift_step(&a);
        drift_step(&b);
        ckd_save_options o = lossy_options("near", step, CKD_NEAR);
        o.max_load_cost = o.newest_load_cost = 1000;
        ckd_save *save = begin_with(store, &o);
        add_drift(save, "a", &a);
        add_drift(save, "b", &b);
        commit_save(save);
    }
    drift_free(&a);
    drift_free(&b);
}

static int make_stores(void **state) {
    dir = tempdir_create();
    scene_make(dir, 0, 1);
    ckd_store *store = store_reopen(dir, CKD_OPEN_WRITE);
    make_exact(store, "exact", CKD_CODEC_AUTO);
    make_exact(store, "raw", CKD_CODEC_RAW);
    make_near(store);
    /* Contains a network that AdamW trains, so that there are optimizer steps. */
    for (uint64_t step = 1; step < STEPS; step++) {
        scene s = {.run = SCENE_RUN, .step = step, .rows = 400, .ready = step == LAST};
        assert_int_equal(scene_save(NULL, store, &s, NULL), CKD_OK);
    }
    ckd_store_close(store);
    (void)state;
    return 0;
}

static int remove_stores(void **state) {
    (void)state;
    tempdir_remove(dir);
    return 0;
}

/* ---- what one process loads ---- */

typedef struct known {
    const char *run;
    uint64_t step;
    ckd_id id;
    size_t count;
    struct known_tensor {
        char name[64];
        ckd_dtype dtype;
        geometry shape;
        void *values;
    } tensors[TENSOR_COUNT_MAX];
    uint64_t bytes_read;
} known;

static ckd_store *open_store(uint32_t threads) {
    char path[4096];
    ckd_store_options o = CKD_STORE_OPTIONS_INIT;
    ckd_store *store;
    o.threads = threads;
    snprintf(path, sizeof(path), "%s/store", dir);
    assert_int_equal(ckd_store_open(&store, path, CKD_OPEN_READ, &o, NULL), CKD_OK);
    return store;
}

static known learn(const char *run, uint64_t step) {
    known k = {.run = run, .step = step};
    ckd_store *store = open_store(2);
    ckd_checkpoint found;
    ckd_load *load;
    assert_int_equal(ckd_store_find(&found, store, run, step, NULL), CKD_OK);
    assert_int_equal(ckd_load_begin(&load, store, &found.id, NULL), CKD_OK);
    k.id = found.id;
    const ckd_tensor_list *list = ckd_load_tensors(load);
    ckd_load_request q[TENSOR_COUNT_MAX];
    assert_in_range(list->count, 1, TENSOR_COUNT_MAX);
    for (; k.count < list->count; k.count++) {
        const ckd_tensor_info *t = &list->items[k.count];
        struct known_tensor *to = &k.tensors[k.count];
        snprintf(to->name, sizeof(to->name), "%s", t->name);
        to->dtype = t->dtype;
        assert_true(geometry_init(&to->shape, t->ndim, t->shape));
        to->values = malloc(t->raw_bytes + 1);
        q[k.count] = (ckd_load_request)CKD_LOAD_REQUEST_INIT;
        q[k.count].name = to->name;
        q[k.count].data = to->values;
        q[k.count].size = t->raw_bytes;
    }
    assert_int_equal(ckd_load_all(load, q, k.count, 0, NULL), CKD_OK);
    k.bytes_read = ckd_load_bytes_read(load);
    ckd_load_end(load);
    ckd_store_close(store);
    return k;
}

static void forget(known *k) {
    for (size_t i = 0; i < k->count; i++) {
        free(k->tensors[i].values);
    }
}

/* ---- what ranks load ---- */

typedef struct rank_requests {
    ckd_load_request q[REQUESTS_MOST];
    const struct known_tensor *of[REQUESTS_MOST];
    size_t count;
    unsigned allowed;
    uint64_t staging;
    uint32_t threads;
    const ckd_id *other; /* load this checkpoint instead; NULL: that of the job */
    uint64_t bytes_read; /* filled in after the load */
} rank_requests;

typedef struct job {
    const known *known;
    rank_requests ranks[THREAD_RANKS_MOST];
    uint32_t world;
    uint64_t seen_by_one; /* 0: the default */
    uint32_t poor_rank;   /* rank whose allocation number fail_at fails; fail_at 0: none */
    unsigned long fail_at;
} job;

static ckd_status act_loads(void *context, thread_rank *rank, ckd_error *err) {
    job *j = context;
    rank_requests *w = &j->ranks[rank->rank];
    char path[4096];
    ckd_store_options o = CKD_STORE_OPTIONS_INIT;
    ckd_load_options options = CKD_LOAD_OPTIONS_INIT;
    ckd_store *store;
    ckd_load *load = NULL;
    o.threads = w->threads ? w->threads : 1;
    options.staging_bytes = w->staging;
    snprintf(path, sizeof(path), "%s/store", dir);
    ckd_status status = ckd_store_open(&store, path, CKD_OPEN_READ, &o, err);
    if (status == CKD_OK) {
        status = ckd_load_begin_with(&load, store, w->other ? w->other : &j->known->id, &options, err);
    }
    if (status == CKD_OK) {
        allocations = 0;
        fail_allocation = j->poor_rank == rank->rank ? j->fail_at : 0;
        const collective_request q = {w->q, w->count, w->allowed, j->seen_by_one};
        status = j->seen_by_one
                     ? collective_load_run(load, &rank->transport, &q, err)
                     : ckd_load_all_together(load, &rank->transport, w->q, w->count, w->allowed, err);
        fail_allocation = 0;
        w->bytes_read = ckd_load_bytes_read(load);
        /* Neither the load nor the transport may be left in a bad state: the same call must work. */
        if (j->fail_at && status == CKD_E_NOMEM) {
            ckd_error again;
            if (ckd_load_all_together(load, &rank->transport, w->q, w->count, w->allowed, &again)) {
                *err = again;
                status = CKD_E_STATE;
            }
        }
    }
    ckd_load_end(load);
    ckd_store_close(store);
    return status;
}

static uint64_t region_elements_of(const struct known_tensor *t, const ckd_region *r) {
    uint64_t count;
    assert_true(region_count(&count, &t->shape, r));
    return count;
}

static void add_request(rank_requests *w, const struct known_tensor *t, const ckd_region *r) {
    assert_in_range(w->count, 0, REQUESTS_MOST - 1);
    ckd_load_request *q = &w->q[w->count];
    *q = (ckd_load_request)CKD_LOAD_REQUEST_INIT;
    q->name = t->name;
    q->region = *r;
    q->size = region_elements_of(t, r) * ckd_dtype_size(t->dtype);
    q->data = malloc(q->size + 1);
    assert_non_null(q->data);
    memset(q->data, 0x5a, q->size + 1);
    w->of[w->count++] = t;
}

static void add_all_requests(rank_requests *w, const known *k) {
    static const ckd_region whole = {.kind = CKD_REGION_WHOLE};
    for (size_t i = 0; i < k->count; i++) {
        add_request(w, &k->tensors[i], &whole);
    }
}

static void check_got(const rank_requests *w) {
    for (size_t i = 0; i < w->count; i++) {
        const struct known_tensor *t = w->of[i];
        const ckd_load_request *q = &w->q[i];
        static const ckd_region whole = {.kind = CKD_REGION_WHOLE};
        ckd_region r = region_canonical(&t->shape, &q->region);
        region_span all = {&whole, 0, t->shape.elements}, slice = {&r, 0, region_elements_of(t, &q->region)};
        uint8_t *expected = malloc(q->size + 1);
        assert_int_equal(span_copy(&t->shape, ckd_dtype_size(t->dtype), expected, &slice, t->values, &all),
                         slice.count);
        assert_memory_equal(q->data, expected, q->size);
        assert_int_equal(((uint8_t *)q->data)[q->size], 0x5a);
        free(expected);
    }
}

static void check_untouched(const job *j) {
    for (uint32_t r = 0; r < j->world; r++) {
        for (size_t i = 0; i < j->ranks[r].count; i++) {
            for (size_t k = 0; k <= j->ranks[r].q[i].size; k++) {
                assert_int_equal(((uint8_t *)j->ranks[r].q[i].data)[k], 0x5a);
            }
        }
    }
}

static void job_free(job *j) {
    for (uint32_t r = 0; r < THREAD_RANKS_MOST; r++) {
        for (size_t i = 0; i < j->ranks[r].count; i++) {
            free(j->ranks[r].q[i].data);
        }
    }
}

/* The stored bytes of all blocks that any rank needs, each block counted once. */
static uint64_t union_bytes(const job *j) {
    ckd_store *store = open_store(1);
    ckd_load *load;
    ckd_load_explanation *e;
    size_t count = 0;
    ckd_load_request *q = malloc(sizeof(*q) * REQUESTS_MOST * THREAD_RANKS_MOST);
    for (uint32_t r = 0; r < j->world; r++) {
        memcpy(q + count, j->ranks[r].q, j->ranks[r].count * sizeof(*q));
        count += j->ranks[r].count;
    }
    assert_int_equal(ckd_load_begin(&load, store, &j->known->id, NULL), CKD_OK);
    assert_int_equal(ckd_load_explain(&e, load, q, count, NULL), CKD_OK);
    uint64_t all = e->all.read_bytes;
    ckd_load_explanation_free(e);
    ckd_load_end(load);
    ckd_store_close(store);
    free(q);
    return all;
}

static uint64_t sum_read(const job *j) {
    uint64_t sum = 0;
    for (uint32_t r = 0; r < j->world; r++) {
        sum += j->ranks[r].bytes_read;
    }
    return sum;
}

/* All ranks must succeed and get the right values. */
static void run_succeeds(job *j) {
    thread_ranks *t = calloc(1, sizeof(*t));
    assert_non_null(t);
    thread_ranks_run(t, j->world, act_loads, j);
    for (uint32_t r = 0; r < j->world; r++) {
        if (t->ranks[r].status != CKD_OK) {
            fail_msg("rank %u: %s (%s)", (unsigned)r, t->ranks[r].err.message, t->ranks[r].err.file);
        }
        check_got(&j->ranks[r]);
    }
    free(t);
}

/* ---- every rank loads everything ---- */

/* The last two contain materialized copies and optimizer steps. */
static const struct {
    const char *run;
    uint64_t step;
} runs[] = {{"exact", LAST}, {"raw", LAST}, {"near", LAST}, {SCENE_RUN, LAST}, {SCENE_RUN, LAST - 1}};

/* Every rank loads everything. Together the ranks read each block once, and divide the reading evenly. */
static void test_replicas(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof(runs) / sizeof(*runs); i++) {
        known k = learn(runs[i].run, runs[i].step);
        for (uint32_t world = 1; world <= 5; world += 1 + (world == 2)) {
            job j = {.known = &k, .world = world};
            for (uint32_t r = 0; r < world; r++) {
                add_all_requests(&j.ranks[r], &k);
                j.ranks[r].threads = 1 + r % 3;
            }
            run_succeeds(&j);
            uint64_t most = 0;
            for (uint32_t r = 0; r < world; r++) {
                most = j.ranks[r].bytes_read > most ? j.ranks[r].bytes_read : most;
            }
            printf("%s@%u, world %u: %llu bytes read, most by one rank %llu, one process alone %llu\n",
                   runs[i].run, (unsigned)runs[i].step, (unsigned)world, (unsigned long long)sum_read(&j),
                   (unsigned long long)most, (unsigned long long)k.bytes_read);
            assert_int_equal(sum_read(&j), union_bytes(&j));
            if (i < 2) { /* in the others one block may be half of everything */
                assert_true(most * world <= sum_read(&j) * 5 / 4);
            }
            job_free(&j);
        }
        forget(&k);
    }
}

/* ---- random layouts ---- */

static uint64_t below(uint64_t *random, uint64_t n) {
    *random ^= *random << 13;
    *random ^= *random >> 7;
    *random ^= *random << 17;
    return *random % n;
}

static ckd_region random_region(const struct known_tensor *t, uint64_t *random) {
    ckd_region r = {.kind = CKD_REGION_WHOLE};
    uint64_t kind = below(random, 4);
    if (kind == 1) {
        r.kind = CKD_REGION_FLAT;
        r.start = below(random, t->shape.elements + 1);
        r.count = below(random, t->shape.elements - r.start + 1);
    } else if (kind > 1) {
        r.kind = CKD_REGION_BOX;
        for (uint32_t d = 0; d < t->shape.ndim; d++) {
            r.offsets[d] = below(random, t->shape.shape[d] + 1);
            r.lengths[d] = below(random, t->shape.shape[d] - r.offsets[d] + 1);
        }
    }
    return r;
}

static void random_job(job *j, const known *k, uint64_t *random) {
    *j = (job){.known = k, .world = 1 + (uint32_t)below(random, 7), .seen_by_one = below(random, 3)};
    uint64_t staging = (uint64_t[]){0, 0, 1, 20000, 300000}[below(random, 5)];
    for (uint32_t r = 0; r < j->world; r++) {
        rank_requests *w = &j->ranks[r];
        w->allowed = CKD_DIFFERS_UNEXPECTED;
        w->staging = staging;
        w->threads = 1 + (uint32_t)below(random, 3);
        uint64_t count = below(random, 5) ? below(random, 2 * k->count) : 0;
        for (uint64_t i = 0; i < count; i++) {
            const struct known_tensor *t = &k->tensors[below(random, k->count)];
            ckd_region region = random_region(t, random);
            add_request(w, t, &region);
        }
    }
}

static void test_random_layouts(void **state) {
    (void)state;
    uint64_t random = UINT64_C(0x2545f4914f6cdd1d), read = 0, needed = 0;
    size_t jobs = under_sanitizer() ? 8 : test_pick(15, 60, 60);
    for (size_t i = 0; i < sizeof(runs) / sizeof(*runs); i++) {
        known k = learn(runs[i].run, runs[i].step);
        for (size_t n = 0; n < jobs; n++) {
            job j;
            random_job(&j, &k, &random);
            run_succeeds(&j);
            uint64_t all = union_bytes(&j);
            if (j.ranks[0].staging == 0) {
                assert_int_equal(sum_read(&j), all);
            } else {
                assert_true(sum_read(&j) >= all);
                read += sum_read(&j);
                needed += all;
            }
            job_free(&j);
        }
        forget(&k);
    }
    printf("with little staging: %llu bytes read, %llu needed\n", (unsigned long long)read,
           (unsigned long long)needed);
}

/*
 * With a small staging limit there are many rounds with little data each. Blocks that several ranks need in the same
 * round are still read once.
 */
static void test_many_rounds(void **state) {
    (void)state;
    known k = learn("raw", LAST);
    job j = {.known = &k, .world = 3};
    for (uint32_t r = 0; r < 3; r++) {
        add_all_requests(&j.ranks[r], &k);
        j.ranks[r].staging = UINT64_C(8) << 17; /* a block of 16 Ki floats fills half of a round */
    }
    thread_ranks *t = calloc(1, sizeof(*t));
    thread_ranks_run(t, 3, act_loads, &j);
    for (uint32_t r = 0; r < 3; r++) {
        assert_int_equal(t->ranks[r].status, CKD_OK);
        check_got(&j.ranks[r]);
    }
    printf("%lu calls, at most %llu bytes to one rank at once\n", t->ranks[0].calls,
           (unsigned long long)t->most_sent);
    assert_true(t->most_sent <= (UINT64_C(1) << 17) + 1024);
    assert_true(t->ranks[0].calls > 30);
    assert_int_equal(sum_read(&j), union_bytes(&j));
    free(t);
    job_free(&j);
    forget(&k);
}

/* ---- an error on one rank is an error on all ---- */

static void small_job(job *j, const known *k, uint32_t world) {
    *j = (job){.known = k, .world = world};
    for (uint32_t r = 0; r < world; r++) {
        for (size_t i = 0; i < k->count; i++) {
            ckd_region region = {.kind = CKD_REGION_WHOLE};
            if (k->tensors[i].shape.ndim == 2 && r != 1) {
                region.kind = CKD_REGION_BOX;
                memcpy(region.lengths, k->tensors[i].shape.shape, sizeof(uint64_t) * 2);
                region.offsets[0] = region.lengths[0] * r / (world + 1);
                region.lengths[0] -= region.offsets[0];
            }
            add_request(&j->ranks[r], &k->tensors[i], &region);
        }
        j->ranks[r].staging = 100000;
    }
}

static void test_the_transport_fails_at_any_call(void **state) {
    (void)state;
    known k = learn("exact", LAST);
    unsigned long at = 1;
    for (bool failed = true; failed; at += 1 + at / (under_sanitizer() ? 5 : test_pick(8, 20, 20))) {
        for (uint32_t victim = 0; victim < 3; victim++) {
            job j;
            small_job(&j, &k, 3);
            thread_ranks *t = calloc(1, sizeof(*t));
            t->fail_rank = victim;
            t->fail_at = at;
            thread_ranks_run(t, 3, act_loads, &j);
            failed = t->ranks[victim].calls >= at;
            for (uint32_t r = 0; r < 3; r++) {
                assert_int_equal(t->ranks[r].status, failed ? CKD_E_IO : CKD_OK);
            }
            free(t);
            job_free(&j);
        }
    }
    assert_true(at > 20);
    printf("failed at calls up to %lu\n", at);
    forget(&k);
}

/* All ranks must return the same error. Returns it. */
static ckd_error run_fails(job *j) {
    thread_ranks *t = calloc(1, sizeof(*t));
    assert_non_null(t);
    thread_ranks_run(t, j->world, act_loads, j);
    ckd_error err = t->ranks[0].err;
    for (uint32_t r = 0; r < j->world; r++) {
        const thread_rank *one = &t->ranks[r];
        assert_int_not_equal(one->status, CKD_OK);
        assert_int_equal(one->status, one->err.status);
        assert_int_equal(one->status, t->ranks[0].status);
        assert_string_equal(one->err.message, err.message);
        assert_string_equal(one->err.tensor, err.tensor);
        assert_string_equal(one->err.file, err.file);
    }
    free(t);
    return err;
}

static void test_differences_of_one_rank(void **state) {
    (void)state;
    known k = learn("exact", LAST);
    for (unsigned wrong = 0; wrong < 5; wrong++) {
        job j;
        small_job(&j, &k, 3);
        ckd_load_request *q = &j.ranks[2].q[j.ranks[2].count - 2];
        const uint64_t other[1] = {5};
        q->name = wrong == 0 ? "nix" : q->name;
        q->dtype = wrong == 1 ? CKD_F64 : CKD_DTYPE_NONE;
        q->shape = wrong == 2 ? other : NULL;
        q->ndim = 1;
        q->size += wrong == 3;
        q->region.offsets[0] += wrong == 4 ? ROWS : 0;
        q->region.kind = wrong == 4 ? CKD_REGION_BOX : q->region.kind;
        char name[64];
        snprintf(name, sizeof(name), "%s", q->name);
        ckd_error err = run_fails(&j);
        assert_int_equal(err.status, wrong < 3 ? CKD_E_MISMATCH : CKD_E_INVALID);
        assert_string_equal(err.tensor, name);
        assert_non_null(strstr(err.message, "rank 2: "));
        q->size -= wrong == 3;
        check_untouched(&j);
        job_free(&j);
    }
    forget(&k);
}

/* A tensor is unexpected if no rank requests it. The load fails if one rank does not allow unexpected tensors. */
static void test_unexpected(void **state) {
    (void)state;
    known k = learn("exact", LAST);
    for (unsigned what = 0; what < 4; what++) {
        job j = {.known = &k, .world = 3};
        static const ckd_region whole = {.kind = CKD_REGION_WHOLE};
        for (size_t i = 0; i < k.count; i++) { /* rank 1 requests nothing */
            if (i != 2 || what == 0 || what == 3) {
                add_request(&j.ranks[i % 2 * 2], &k.tensors[i], &whole);
            }
        }
        j.ranks[0].allowed = j.ranks[1].allowed = what >= 2 ? CKD_DIFFERS_UNEXPECTED : 0;
        j.ranks[2].allowed = what == 1 || what == 2 ? CKD_DIFFERS_UNEXPECTED : 0;
        if (what == 1) {
            ckd_error err = run_fails(&j);
            assert_int_equal(err.status, CKD_E_MISMATCH);
            assert_string_equal(err.tensor, k.tensors[2].name);
            check_untouched(&j);
        } else {
            run_succeeds(&j);
        }
        job_free(&j);
    }
    forget(&k);
}

static void test_other_checkpoints(void **state) {
    (void)state;
    known k = learn("exact", LAST), other = learn("exact", LAST - 1);
    job j;
    small_job(&j, &k, 3);
    j.ranks[1].other = &other.id;
    ckd_error err = run_fails(&j);
    assert_int_equal(err.status, CKD_E_INVALID);
    assert_non_null(strstr(err.message, "another checkpoint"));
    check_untouched(&j);
    job_free(&j);
    forget(&k);
    forget(&other);
}

/* ---- lack of memory ---- */

/* Each allocation of one rank fails once. */
static void test_one_rank_has_no_memory(void **state) {
    (void)state;
    known k = learn("exact", 2);
    for (uint32_t poor = 0; poor < 2; poor++) {
        unsigned long at = 1, failed = 0;
        for (bool hit = true; hit; at += 1 + at / (under_sanitizer() ? 5 : test_pick(8, 25, 25))) {
            job j;
            small_job(&j, &k, 2);
            j.poor_rank = poor;
            j.fail_at = at;
            failed_allocations = 0;
            thread_ranks *t = calloc(1, sizeof(*t));
            thread_ranks_run(t, 2, act_loads, &j);
            hit = failed_allocations > 0;
            /* The load may also succeed, if it can do without that memory. */
            for (uint32_t r = 0; r < 2; r++) {
                const thread_rank *one = &t->ranks[r];
                if (one->status != t->ranks[0].status || (one->status && one->status != CKD_E_NOMEM) ||
                    (one->status && !strstr(one->err.message, poor ? "rank 1: out of" : "rank 0: out of"))) {
                    fail_msg("allocation %lu of rank %u: rank %u says %s", at, (unsigned)poor, (unsigned)r,
                             one->err.message);
                }
                check_got(&j.ranks[r]); /* at the latest after the second attempt */
            }
            failed += t->ranks[0].status != CKD_OK;
            free(t);
            job_free(&j);
        }
        printf("rank %u: up to %lu allocations, %lu times it failed\n", (unsigned)poor, at, failed);
        assert_true(failed > 20);
    }
    forget(&k);
}

/* ---- damage ---- */

/* Finds the payload of a block of a tensor in a checkpoint, and its position in the file. */
static bool find_payload(char *path, size_t size, uint64_t *offset, const ckd_id *id, const char *tensor) {
    char *all = tree_describe(store_path_of(dir, "data/c")), *at = NULL;
    bool found = false;
    for (char *line = strtok_r(all, "\n", &at); line && !found; line = strtok_r(NULL, "\n", &at)) {
        char *end = strstr(line, ".ckd");
        chunk *c;
        if (!end) {
            continue;
        }
        char *name = end - 32;
        snprintf(path, size, "%s/%.36s", store_path_of(dir, "data/c"), name);
        if (chunk_open(&c, path, NULL) != CKD_OK) {
            continue;
        }
        for (size_t i = 0; i < c->record_count && !found; i++) {
            const record *r = &c->records[i];
            found = r->kind == RECORD_BLOCK && r->stored_size > 100 && strcmp(r->tensor->name, tensor) == 0 &&
                    memcmp(&r->tensor->checkpoint, id, sizeof(*id)) == 0;
            *offset = r->payload_offset + r->stored_size / 2;
        }
        chunk_close(c);
    }
    free(all);
    return found;
}

static void flip(const char *path, uint64_t offset) {
    size_t size;
    unsigned char *data = read_whole_file(path, &size);
    assert_true(offset < size);
    data[offset] ^= 0x40;
    write_whole_file(path, data, size);
    free(data);
}

static void test_damage(void **state) {
    (void)state;
    static const struct {
        const char *run, *tensor;
        uint64_t step;
        bool shared;
    } cases[] = {{"exact", "master.w", 1, true},  {"exact", "other", LAST, true},
                 {"raw", "other", LAST, true},    {"near", "a", 2, true},
                 {"exact", "other", LAST, false}, {"near", "a", 2, false}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        known k = learn(cases[i].run, LAST);
        ckd_store *store = open_store(1);
        ckd_checkpoint c;
        char path[4096];
        uint64_t offset = 0;
        assert_int_equal(ckd_store_find(&c, store, cases[i].run, cases[i].step, NULL), CKD_OK);
        ckd_store_close(store);
        assert_true(find_payload(path, sizeof(path), &offset, &c.id, cases[i].tensor));
        job j = {.known = &k, .world = 4};
        for (uint32_t r = 0; r < 4; r++) {
            j.ranks[r].allowed = CKD_DIFFERS_UNEXPECTED;
            if (cases[i].shared || r == 2) {
                add_all_requests(&j.ranks[r], &k);
            } else {
                static const ckd_region none = {.kind = CKD_REGION_FLAT};
                add_request(&j.ranks[r], &k.tensors[0], &none);
            }
        }
        flip(path, offset);
        ckd_error err = run_fails(&j);
        flip(path, offset);
        assert_int_equal(err.status, CKD_E_CORRUPT);
        assert_string_equal(err.file, path);
        assert_string_equal(err.tensor, cases[i].tensor);
        assert_non_null(strstr(err.message, cases[i].shared ? "rank " : "rank 2: "));
        run_succeeds(&j);
        job_free(&j);
        forget(&k);
    }
}

/* Saves a tensor that is new each time, and one that hardly changes. Neither compresses. */
static void make_unchanged_beside_new(void) {
    enum { SIZE = 40000 };
    ckd_store *store = store_reopen(dir, CKD_OPEN_WRITE);
    uint8_t *same = random_bits(SIZE, 1);
    const uint64_t size[1] = {SIZE};
    for (uint64_t step = 0; step < STEPS; step++) {
        uint8_t *new = random_bits(SIZE, 2 + (unsigned)step);
        ckd_save_options o = options_of("ready", step);
        o.max_load_cost = 1000;
        o.newest_load_cost = 1;
        for (uint64_t i = step; i < SIZE; i += 50) {
            same[i]++;
        }
        ckd_save *save = begin_with(store, &o);
        add_tensor(save, "aa", CKD_U8, 1, size, NULL, new);
        add_tensor(save, "b", CKD_U8, 1, size, NULL, same);
        commit_save(save);
        free(new);
    }
    free(same);
    ckd_store_close(store);
}

/*
 * A materialized copy and a block of another tensor have the same size and the same position in their files. Neither
 * is taken for the other.
 */
static void test_copies_and_blocks_at_the_same_place(void **state) {
    (void)state;
    make_unchanged_beside_new();
    known k = learn("ready", LAST);
    ckd_store *store = open_store(1);
    ckd_load *load;
    assert_int_equal(ckd_load_begin(&load, store, &k.id, NULL), CKD_OK);
    const view_block *a = view_find(load->view, "aa")->shards[0].blocks,
                     *b = view_find(load->view, "b")->shards[0].blocks;
    assert_non_null(b->materialized);
    assert_true(a->record->payload_offset == b->materialized->payload_offset &&
                a->record->stored_size == b->materialized->stored_size);
    ckd_load_end(load);
    ckd_store_close(store);
    for (size_t only = 0; only < k.count; only++) {
        job j = {.known = &k, .world = 3};
        for (uint32_t r = 0; r < 3; r++) {
            static const ckd_region whole = {.kind = CKD_REGION_WHOLE};
            j.ranks[r].allowed = CKD_DIFFERS_UNEXPECTED;
            if (r == 0) {
                add_all_requests(&j.ranks[r], &k);
            } else {
                add_request(&j.ranks[r], &k.tensors[r == 1 ? only : 1 - only], &whole);
            }
        }
        run_succeeds(&j);
        job_free(&j);
    }
    forget(&k);
}

/* Damaged materialized copies are not used, not even if another rank reads them. */
static void test_damaged_ready_copies(void **state) {
    (void)state;
    known k = learn(SCENE_RUN, LAST);
    char *all = tree_describe(store_path_of(dir, "data/k")), *at = NULL;
    size_t files = 0;
    for (char *line = strtok_r(all, "\n", &at); line; line = strtok_r(NULL, "\n", &at)) {
        char *end = strstr(line, ".ckd"), *name = end;
        while (name && name > line && name[-1] != ' ' && name[-1] != '/') {
            name--;
        }
        if (end) {
            char path[4096];
            chunk *c;
            snprintf(path, sizeof(path), "%s/%.*s", store_path_of(dir, "data/k"), (int)(end + 4 - name),
                     name);
            assert_int_equal(chunk_open(&c, path, NULL), CKD_OK);
            for (size_t i = 0; i < c->record_count; i++) {
                if (c->records[i].stored_size) {
                    flip(path, c->records[i].payload_offset + c->records[i].stored_size / 2);
                }
            }
            chunk_close(c);
            files++;
        }
    }
    free(all);
    assert_true(files > 0);
    job j;
    small_job(&j, &k, 3);
    run_succeeds(&j);
    job_free(&j);
    forget(&k);
}

/* Random bits flip in messages. Either all ranks fail, or all have the right values. */
static void test_damaged_messages(void **state) {
    (void)state;
    unsigned fine = 0, refused = 0, seen = 0;
    unsigned long damaged = 0;
    for (size_t i = 0; i < sizeof(runs) / sizeof(*runs); i++) {
        known k = learn(runs[i].run, runs[i].step);
        for (unsigned n = 0; n < (under_sanitizer() ? 10 : test_pick(10, 30, 30)); n++) {
            job j;
            small_job(&j, &k, 3);
            j.seen_by_one = 1 + n % 2;
            thread_ranks *t = calloc(1, sizeof(*t));
            t->damage = 1000 + n;
            t->damage_every = 1 + n;
            thread_ranks_run(t, 3, act_loads, &j);
            for (uint32_t r = 0; r < 3; r++) {
                assert_int_equal(t->ranks[r].status, t->ranks[0].status);
                if (t->ranks[r].status == CKD_OK) {
                    check_got(&j.ranks[r]);
                }
            }
            fine += t->ranks[0].status == CKD_OK;
            refused += t->ranks[0].status != CKD_OK;
            seen += strstr(t->ranks[0].err.message, "arrived damaged") != NULL;
            damaged += t->damaged;
            free(t);
            job_free(&j);
        }
        forget(&k);
    }
    printf("%lu messages damaged: %u loads refused, %u right\n", damaged, refused, fine);
    assert_true(refused > 10);
    assert_true(seen > 0); /* some damage is detected before anything is decoded */
}

/* ---- unusable transports ---- */

static ckd_status fail_to_call(void *context, uint64_t *number, ckd_error *err) {
    (void)context;
    (void)number;
    (void)err;
    fail_msg("a transport was called that lacks something");
    return CKD_E_IO;
}

static void test_unusable_transports(void **state) {
    (void)state;
    known k = learn("raw", 0);
    ckd_store *store = open_store(1);
    ckd_load *load;
    assert_int_equal(ckd_load_begin(&load, store, &k.id, NULL), CKD_OK);
    ckd_transport t = CKD_TRANSPORT_INIT;
    t.world = 1;
    t.all_reduce_min = fail_to_call;
    assert_int_equal(ckd_load_all_together(load, &t, NULL, 0, 0, NULL), CKD_E_INVALID);
    t.struct_size = offsetof(ckd_transport, exchange); /* as if compiled before `exchange` existed */
    t.exchange = (ckd_status(*)(void *, const ckd_buffers *, const ckd_bytes *, ckd_error *))(void *)&t;
    assert_int_equal(ckd_load_all_together(load, &t, NULL, 0, 0, NULL), CKD_E_INVALID);
    ckd_load_end(load);
    ckd_store_close(store);
    forget(&k);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_replicas),
        cmocka_unit_test(test_random_layouts),
        cmocka_unit_test(test_many_rounds),
        cmocka_unit_test(test_the_transport_fails_at_any_call),
        cmocka_unit_test(test_differences_of_one_rank),
        cmocka_unit_test(test_unexpected),
        cmocka_unit_test(test_other_checkpoints),
        cmocka_unit_test(test_one_rank_has_no_memory),
        cmocka_unit_test(test_damage),
        cmocka_unit_test(test_damaged_messages),
        cmocka_unit_test(test_copies_and_blocks_at_the_same_place),
        cmocka_unit_test(test_damaged_ready_copies), /* leaves the copies damaged */
        cmocka_unit_test(test_unusable_transports),
    };
    scratch_begin();
    int failed = run_sampled("collective_load_run", tests, 2, make_stores, remove_stores);
    scratch_end();
    return failed;
}
