/* Tensors that hold several parameters, and padding: saved by so many ranks, loaded by others that cut them otherwise. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/hash.h"
#include "engine/common/region.h"
#include "tests/support/checkpoints.h"
#include "tests/support/tempdir.h"
#include "tests/support/xorshift.h"

enum { RANKS_MOST = 8, STRETCHES_MOST = 64 };

static uint64_t random_below(uint64_t n) {
    return n ? next_random() % n : 0;
}

/* ---- values that follow from a parameter's name and the element's global position ---- */

static uint32_t value_of(const char *name, uint64_t global) {
    return (uint32_t)(hash64(name, strlen(name)) + global * 2654435761u);
}

/* What the rank's memory should hold, element by element, the slow way; padding: `fill`. */
static uint32_t *memory_of(const ckd_fused *f, uint32_t fill, uint64_t *elements) {
    uint64_t local[CKD_MAX_DIMS], at[CKD_MAX_DIMS];
    *elements = 1;
    for (uint32_t d = 0; d < f->ndim; d++) {
        local[d] = f->lengths ? f->lengths[d] : f->shape[d];
        if (d == f->dim) {
            local[d] = 0;
            for (size_t i = 0; i < f->count; i++) {
                local[d] += f->stretches[i].length;
            }
        }
        *elements *= local[d];
    }
    uint32_t *memory = malloc((size_t)*elements * 4 + 4);
    for (uint64_t e = 0; e < *elements; e++) {
        uint64_t rest = e;
        for (uint32_t d = f->ndim; d-- > 0;) {
            at[d] = rest % local[d];
            rest /= local[d];
        }
        const ckd_stretch *s = f->stretches;
        for (; at[f->dim] >= s->length; s++) {
            at[f->dim] -= s->length;
        }
        uint64_t global = 0;
        for (uint32_t d = 0; d < f->ndim; d++) {
            bool along = d == f->dim;
            uint64_t offset = along ? s->offset : f->offsets ? f->offsets[d] : 0;
            global = global * (along ? s->total : f->shape[d]) + offset + at[d];
        }
        memory[e] = s->name ? value_of(s->name, global) : fill;
    }
    return memory;
}

/* ---- saving and loading all ranks ---- */

static ckd_save *begin_rank(ckd_store *store, uint64_t step, uint32_t rank, uint32_t world,
                            const ckd_id *id) {
    ckd_save_options o = options_of("run", step);
    o.rank = rank;
    o.world = world;
    o.checkpoint_id = *id;
    return begin_with(store, &o);
}

static void save_planned(ckd_store *store, uint64_t step, ckd_split *const *splits, uint32_t world) {
    ckd_bytes described[RANKS_MOST];
    ckd_save *saves[RANKS_MOST] = {NULL};
    ckd_part parts[RANKS_MOST];
    ckd_plan *plan;
    ckd_error err = {0};
    ckd_id id;
    size_t count;
    assert_int_equal(ckd_id_new(&id, NULL), CKD_OK);
    for (uint32_t r = 0; r < world; r++) {
        const ckd_tensor *t = ckd_split_tensors(&count, splits[r]);
        assert_int_equal(ckd_plan_describe(&described[r], r, world, t, count, &err), CKD_OK);
    }
    if (ckd_plan_make(&plan, described, world, &err) != CKD_OK) {
        fail_msg("%s (%s)", err.message, err.tensor);
    }
    for (uint32_t r = 0; r < world; r++) {
        const ckd_tensor *t = ckd_split_tensors(&count, splits[r]);
        saves[r] = begin_rank(store, step, r, world, &id);
        for (size_t i = 0; i < count; i++) {
            if (ckd_plan_writes(plan, r, i) && ckd_save_tensor(saves[r], &t[i], &err) != CKD_OK) {
                fail_msg("%s (%s)", err.message, err.tensor);
            }
        }
        assert_int_equal(ckd_save_seal(&parts[r], saves[r], &err), CKD_OK);
    }
    if (ckd_save_publish(NULL, saves[0], parts, world, &err) != CKD_OK) {
        fail_msg("%s (%s)", err.message, err.tensor);
    }
    for (uint32_t r = 0; r < world; r++) {
        if (r > 0) {
            ckd_save_end(saves[r]);
        }
        ckd_part_free(&parts[r]);
        ckd_bytes_free(&described[r]);
    }
    ckd_plan_free(plan);
}

static void save_all(ckd_store *store, uint64_t step, ckd_fused *ranks, uint32_t world) {
    ckd_split *splits[RANKS_MOST] = {NULL};
    ckd_error err = {0};
    for (uint32_t r = 0; r < world; r++) {
        uint64_t elements;
        ranks[r].data = memory_of(&ranks[r], 0xdeadbeef, &elements);
        if (ckd_fused_split(&splits[r], &ranks[r], &err) != CKD_OK) {
            fail_msg("%s", err.message);
        }
    }
    save_planned(store, step, splits, world);
    for (uint32_t r = 0; r < world; r++) {
        ckd_split_free(splits[r]);
        free(ranks[r].data);
        ranks[r].data = NULL;
    }
}

static void load_all(ckd_store *store, uint64_t step, ckd_fused *ranks, uint32_t world) {
    for (uint32_t r = 0; r < world; r++) {
        ckd_checkpoint c;
        ckd_load *load;
        ckd_split *split;
        ckd_error err = {0};
        uint64_t elements;
        uint32_t *want = memory_of(&ranks[r], 0, &elements), *got = malloc((size_t)elements * 4 + 4);
        memset(got, 0xaa, (size_t)elements * 4 + 4);
        ranks[r].data = got;
        assert_int_equal(ckd_store_find(&c, store, "run", step, &err), CKD_OK);
        assert_int_equal(ckd_load_begin(&load, store, &c.id, &err), CKD_OK);
        assert_int_equal(ckd_fused_split(&split, &ranks[r], &err), CKD_OK);
        if (ckd_split_load(split, load, &err) != CKD_OK) {
            fail_msg("%s (%s)", err.message, err.tensor);
        }
        assert_memory_equal(want, got, (size_t)elements * 4);
        assert_int_equal(got[elements], 0xaaaaaaaa);
        ckd_split_free(split);
        ckd_load_end(load);
        free(want);
        free(got);
        ranks[r].data = NULL;
    }
}

/* ---- attention with fewer key than query heads ---- */

enum { QUERIES = 12, KEYS = 3, HEAD = 4, WIDTH = 10 };

typedef struct attention {
    ckd_stretch stretches[STRETCHES_MOST];
    uint64_t shape[2];
} attention;

static void add_head(ckd_fused *f, attention *a, const char *name, uint64_t head, uint64_t heads,
                     uint64_t count) {
    assert_true(f->count < STRETCHES_MOST);
    a->stretches[f->count++] =
        (ckd_stretch){.name = name, .total = heads * HEAD, .offset = head * HEAD, .length = count * HEAD};
}

/* Rank's share of `world`: whole groups, a query's keys with it. interleaved: group by group, as q q q q k v. */
static ckd_fused attention_of(attention *a, uint32_t rank, uint32_t world, uint32_t dim, bool interleaved) {
    ckd_fused f = CKD_FUSED_INIT;
    uint64_t first = QUERIES * rank / world, end = QUERIES * (rank + 1) / world, each = QUERIES / KEYS;
    uint64_t key_first = first / each, key_end = end > first ? (end - 1) / each + 1 : key_first;
    f.dtype = CKD_I32;
    f.ndim = 2;
    f.dim = dim;
    a->shape[0] = a->shape[1] = WIDTH;
    f.shape = a->shape;
    f.stretches = a->stretches;
    if (!interleaved) {
        add_head(&f, a, "q", first, QUERIES, end - first);
        add_head(&f, a, "k", key_first, KEYS, key_end - key_first);
        add_head(&f, a, "v", key_first, KEYS, key_end - key_first);
        return f;
    }
    for (uint64_t k = key_first; k < key_end; k++) {
        uint64_t from = k * each > first ? k * each : first, to = (k + 1) * each < end ? (k + 1) * each : end;
        add_head(&f, a, "q", from, QUERIES, to - from);
        add_head(&f, a, "k", k, KEYS, 1);
        add_head(&f, a, "v", k, KEYS, 1);
    }
    return f;
}

static void test_attention(void **state) {
    static const uint32_t worlds[] = {1, 3, 6}, others[] = {1, 2, 3, 5, 8};
    static attention room[RANKS_MOST];
    ckd_store *store = store_create(*state);
    ckd_fused ranks[RANKS_MOST];
    uint64_t step = 0;
    for (uint32_t dim = 0; dim < 2; dim++) {
        for (size_t w = 0; w < sizeof(worlds) / sizeof(worlds[0]); w++) {
            for (uint32_t r = 0; r < worlds[w]; r++) {
                ranks[r] = attention_of(&room[r], r, worlds[w], dim, w % 2);
            }
            save_all(store, step, ranks, worlds[w]); /* key heads that several ranks hold are saved once */
            for (size_t to = 0; to < sizeof(others) / sizeof(others[0]); to++) {
                for (uint32_t r = 0; r < others[to]; r++) {
                    ranks[r] = attention_of(&room[r], r, others[to], dim, to % 2 == 0);
                }
                load_all(store, step, ranks, others[to]);
            }
            step++;
        }
    }
    ckd_checkpoint c;
    assert_int_equal(ckd_store_find(&c, store, "run", CKD_LATEST, NULL), CKD_OK);
    assert_int_equal(c.raw_bytes, (QUERIES + 2 * KEYS) * HEAD * WIDTH * 4);
    assert_int_equal(c.tensors, 3);
    ckd_store_close(store);
}

/* ---- a vocabulary that every world pads otherwise ---- */

static void vocabulary_of(ckd_fused *f, ckd_stretch *s, uint64_t *shape, uint64_t words, uint32_t rank,
                          uint32_t world) {
    uint64_t each = (words + world - 1) / world + 1;
    ckd_stretch_padded(s, "embed", words, rank * each, each);
    assert_int_equal(s[0].length + s[1].length, each);
    *f = (ckd_fused)CKD_FUSED_INIT;
    f->dtype = CKD_I32;
    f->ndim = 2;
    shape[0] = 0;
    shape[1] = 3;
    f->shape = shape;
    f->stretches = s;
    f->count = 2;
}

static void test_padded_vocabulary(void **state) {
    static const uint64_t vocabularies[] = {1, 17, 127, 128, 1123};
    static const uint32_t worlds[] = {1, 2, 4, 8};
    ckd_store *store = store_create(*state);
    ckd_fused ranks[RANKS_MOST];
    ckd_stretch stretches[RANKS_MOST][2];
    uint64_t shapes[RANKS_MOST][2], step = 0;
    for (size_t v = 0; v < 5; v++) {
        for (size_t w = 0; w < 4; w++, step++) {
            for (uint32_t r = 0; r < worlds[w]; r++) {
                vocabulary_of(&ranks[r], stretches[r], shapes[r], vocabularies[v], r, worlds[w]);
            }
            save_all(store, step, ranks, worlds[w]);
            ckd_checkpoint c;
            assert_int_equal(ckd_store_find(&c, store, "run", step, NULL), CKD_OK);
            assert_int_equal(c.raw_bytes, vocabularies[v] * 12); /* no padding */
            for (size_t to = 0; to < 4; to++) {
                for (uint32_t r = 0; r < worlds[to]; r++) {
                    vocabulary_of(&ranks[r], stretches[r], shapes[r], vocabularies[v], r, worlds[to]);
                }
                load_all(store, step, ranks, worlds[to]);
            }
        }
    }
    ckd_store_close(store);
}

/* ---- any stretches, any dimension, shards in the other ones ---- */

typedef struct random_fused {
    ckd_stretch stretches[STRETCHES_MOST];
    uint64_t shape[4], offsets[4], lengths[4];
} random_fused;

/* One rank holds everything, in stretches of any length and order. */
static ckd_fused everything(random_fused *room, uint32_t ndim, uint32_t dim, const uint64_t *shape,
                            const uint64_t totals[3]) {
    static const char *const names[3] = {"a", "b", "c"};
    ckd_fused f = CKD_FUSED_INIT;
    uint64_t done[3] = {0};
    memcpy(room->shape, shape, sizeof(room->shape));
    f.dtype = CKD_I32;
    f.ndim = ndim;
    f.dim = dim;
    f.shape = room->shape;
    f.stretches = room->stretches;
    for (unsigned guard = 0; guard < 20; guard++) {
        size_t k = (size_t)random_below(4);
        if (k == 3) {
            room->stretches[f.count++] = (ckd_stretch){.length = random_below(3)};
            continue;
        }
        uint64_t n = random_below(totals[k] - done[k] + 1);
        room->stretches[f.count++] =
            (ckd_stretch){.name = names[k], .total = totals[k], .offset = done[k], .length = n};
        done[k] += n;
    }
    for (size_t k = 0; k < 3; k++) {
        room->stretches[f.count++] = (ckd_stretch){
            .name = names[k], .total = totals[k], .offset = done[k], .length = totals[k] - done[k]};
    }
    return f;
}

/* Any stretches of them, anywhere. */
static ckd_fused something(random_fused *room, uint32_t ndim, uint32_t dim, const uint64_t *shape,
                           const uint64_t totals[3]) {
    static const char *const names[3] = {"a", "b", "c"};
    ckd_fused f = everything(room, ndim, dim, shape, totals);
    f.count = 1 + random_below(8);
    for (size_t i = 0; i < f.count; i++) {
        size_t k = (size_t)random_below(4);
        uint64_t offset = k < 3 ? random_below(totals[k] + 1) : 0;
        room->stretches[i] = k == 3 ? (ckd_stretch){.length = random_below(4)}
                                    : (ckd_stretch){.name = names[k],
                                                    .total = totals[k],
                                                    .offset = offset,
                                                    .length = random_below(totals[k] - offset + 1)};
    }
    for (uint32_t d = 0; d < ndim; d++) {
        room->offsets[d] = random_below(shape[d]);
        room->lengths[d] = 1 + random_below(shape[d] - room->offsets[d]);
    }
    f.offsets = room->offsets;
    f.lengths = room->lengths;
    return f;
}

static void test_any_stretches(void **state) {
    static random_fused room;
    ckd_store *store = store_create(*state);
    for (uint64_t step = 0; step < 60; step++) {
        uint64_t shape[4] = {1, 1, 1, 1}, totals[3];
        uint32_t ndim = 1 + (uint32_t)random_below(4), dim = (uint32_t)random_below(ndim);
        for (uint32_t d = 0; d < ndim; d++) {
            shape[d] = 1 + random_below(6);
        }
        for (size_t k = 0; k < 3; k++) {
            totals[k] = 1 + random_below(9);
        }
        ckd_fused f = everything(&room, ndim, dim, shape, totals);
        save_all(store, step, &f, 1);
        for (int i = 0; i < 12; i++) {
            f = i ? something(&room, ndim, dim, shape, totals) : everything(&room, ndim, dim, shape, totals);
            load_all(store, step, &f, 1);
        }
    }
    ckd_store_close(store);
}

/* More than fits the staging at once. */
static void test_large(void **state) {
    enum { ROWS = 3000, COLUMNS = 3001 };
    ckd_store *store = store_create(*state);
    const uint64_t shape[2] = {ROWS, 0};
    ckd_stretch s[3] = {{"left", COLUMNS, 0, COLUMNS}, {NULL, 0, 0, 1}, {"right", COLUMNS, 0, COLUMNS}};
    ckd_fused f = CKD_FUSED_INIT;
    f.dtype = CKD_I64;
    f.ndim = 2;
    f.dim = 1;
    f.shape = shape;
    f.stretches = s;
    f.count = 3;
    size_t width = 2 * COLUMNS + 1;
    uint64_t *values = calloc(ROWS * width, 8), *got = malloc(ROWS * width * 8);
    for (size_t i = 0; i < ROWS; i++) {
        for (size_t k = 0; k < width; k++) {
            values[i * width + k] = k == COLUMNS ? 0 : i * 7 + k / 64;
        }
    }
    ckd_split *split;
    ckd_load *load;
    ckd_checkpoint c;
    f.data = values;
    assert_int_equal(ckd_fused_split(&split, &f, NULL), CKD_OK);
    save_planned(store, 1, &split, 1);
    ckd_split_free(split);
    f.data = got;
    assert_int_equal(ckd_fused_split(&split, &f, NULL), CKD_OK);
    assert_int_equal(ckd_store_find(&c, store, "run", 1, NULL), CKD_OK);
    assert_int_equal(ckd_load_begin(&load, store, &c.id, NULL), CKD_OK);
    assert_int_equal(ckd_split_load(split, load, NULL), CKD_OK);
    assert_memory_equal(values, got, ROWS * width * 8);
    ckd_load_end(load);
    ckd_split_free(split);
    free(values);
    free(got);
    ckd_store_close(store);
}

static void refused(const ckd_fused *f, const char *what) {
    ckd_split *split;
    ckd_error err = {0};
    assert_int_equal(ckd_fused_split(&split, f, &err), CKD_E_INVALID);
    assert_null(split);
    if (!strstr(err.message, what)) {
        fail_msg("\"%s\" does not say \"%s\"", err.message, what);
    }
}

static void test_what_makes_no_sense(void **state) {
    (void)state;
    const uint64_t shape[2] = {4, 4}, huge[2] = {4, UINT64_C(1) << 40};
    ckd_stretch s[2] = {{"q", 8, 4, 4}, {"q", 8, 0, 4}};
    ckd_fused f = CKD_FUSED_INIT, g;
    f.dtype = CKD_F32;
    f.ndim = 2;
    f.shape = shape;
    f.stretches = s;
    f.count = 2;
    ckd_split *split;
    size_t count;
    assert_int_equal(ckd_fused_split(&split, &f, NULL), CKD_OK);
    const ckd_tensor *t = ckd_split_tensors(&count, split); /* they do not follow each other: two regions */
    assert_int_equal(count, 2);
    assert_int_equal(t[0].region.offsets[0], 4);
    assert_int_equal(t[1].region.offsets[0], 0);
    assert_int_equal(t[1].shape[0], 8);
    ckd_split_free(split);
    s[0].length = 5;
    refused(&f, "a stretch of q ends behind its 8 elements");
    s[0].offset = UINT64_MAX;
    refused(&f, "a stretch of q ends behind its 8 elements");
    s[0] = (ckd_stretch){"q", 9, 0, 4};
    refused(&f, "q is given with totals of 9 and 8");
    s[0] = (ckd_stretch){NULL, 9, 0, 4};
    refused(&f, "padding has a length only");
    s[0] = (ckd_stretch){NULL, 0, 0, UINT64_MAX};
    refused(&f, "longer than a tensor can be");
    s[0] = (ckd_stretch){NULL, 0, 0, 4};
    g = f;
    g.shape = huge;
    refused(&g, "2^40");
    g = f;
    g.dim = 2;
    refused(&g, "a dimension");
    g = f;
    g.lengths = shape;
    refused(&g, "offsets and lengths or neither");
    g = f;
    g.dtype = CKD_DTYPE_NONE;
    refused(&g, "a dtype");
    ckd_split_free(NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        tempdir_test(test_attention),
        tempdir_test(test_padded_vocabulary),
        tempdir_test(test_any_stretches),
        tempdir_test(test_large),
        cmocka_unit_test(test_what_makes_no_sense),
    };
    return cmocka_run_group_tests_name("fused", tests, NULL, NULL);
}
