/*
 * Checks whether regions tile a tensor: compared with counting every element, for very many regions, and in stored
 * checkpoints.
 */
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
#include "codec/chunk/chunk.h"
#include "codec/metadata/metadata.h"
#include "engine/store/paths.h"
#include "engine/common/common.h"
#include "tests/support/checkpoints.h"
#include "tests/support/tempdir.h"

static uint64_t state = 88172645463325252u;
static uint64_t random_below(uint64_t n) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return n ? state % n : 0;
}

/* ---- arithmetic ---- */

enum { MOST_REGIONS = 64, MOST_ELEMENTS = 8192 };

typedef struct layout {
    geometry g;
    ckd_region regions[MOST_REGIONS];
    size_t count;
} layout;

static bool inside(const geometry *g, const ckd_region *r, uint64_t element) {
    if (r->kind == CKD_REGION_FLAT) {
        return element >= r->start && element < r->start + r->count;
    }
    for (uint32_t d = 0; d < g->ndim && r->kind == CKD_REGION_BOX; d++) {
        uint64_t at = element / g->strides[d] % g->shape[d];
        if (at < r->offsets[d] || at >= r->offsets[d] + r->lengths[d]) {
            return false;
        }
    }
    return true;
}

static bool tiles_by_counting(const layout *l) {
    for (uint64_t e = 0; e < l->g.elements; e++) {
        size_t times = 0;
        for (size_t i = 0; i < l->count; i++) {
            times += inside(&l->g, &l->regions[i], e);
        }
        if (times != 1) {
            return false;
        }
    }
    return true;
}

static bool tiles(const layout *l, uint64_t seed) {
    coverage t = coverage_begin(&l->g, seed);
    for (size_t i = 0; i < l->count; i++) {
        uint64_t elements;
        assert_true(region_count(&elements, &l->g, &l->regions[i]));
        coverage_add(&t, &l->regions[i]);
    }
    return coverage_complete(&t);
}

static void make_geometry(layout *l) {
    uint64_t shape[CKD_MAX_DIMS];
    uint32_t ndim = (uint32_t)random_below(5);
    for (uint32_t d = 0; d < ndim; d++) {
        shape[d] = random_below(30) ? 1 + random_below(8) : 0;
    }
    assert_true(geometry_init(&l->g, ndim, shape));
    assert_true(l->g.elements <= MOST_ELEMENTS);
}

/* Cuts a random box in two, so that a tiling of boxes of all sizes in random order results. */
static void cut_a_box(layout *l) {
    ckd_region *r = &l->regions[random_below(l->count)];
    uint32_t d = (uint32_t)random_below(l->g.ndim);
    if (r->kind != CKD_REGION_BOX || l->count == MOST_REGIONS || r->lengths[d] == 0) {
        return;
    }
    uint64_t first = random_below(r->lengths[d] + 1);
    ckd_region *rest = &l->regions[l->count++];
    *rest = *r;
    r->lengths[d] = first;
    rest->offsets[d] += first;
    rest->lengths[d] -= first;
}

static void cut_a_range(layout *l) {
    ckd_region *r = &l->regions[random_below(l->count)];
    if (r->kind == CKD_REGION_FLAT && l->count < MOST_REGIONS) {
        uint64_t first = random_below(r->count + 1);
        l->regions[l->count++] =
            (ckd_region){.kind = CKD_REGION_FLAT, .start = r->start + first, .count = r->count - first};
        r->count = first;
    }
}

/* Replaces a box by the range of the same elements, if these are contiguous. */
static void box_to_range(layout *l) {
    ckd_region *r = &l->regions[random_below(l->count)];
    uint64_t elements;
    assert_true(region_count(&elements, &l->g, r));
    if (r->kind == CKD_REGION_BOX && elements) {
        uint64_t first = region_global(&l->g, r, 0);
        if (region_global(&l->g, r, elements - 1) == first + elements - 1) {
            *r = (ckd_region){.kind = CKD_REGION_FLAT, .start = first, .count = elements};
        }
    }
}

/*
 * Makes a tiling with boxes for the first rows and ranges for the rest. It only adds up if both kinds are measured in
 * the same way.
 */
static void make_tiling(layout *l) {
    const geometry *g = &l->g;
    l->count = 0;
    uint64_t rows = g->ndim ? random_below(g->shape[0] + 1) : 0, split = g->ndim ? rows * g->strides[0] : 0;
    split = split > g->elements ? g->elements : split;
    if (g->ndim) {
        ckd_region box = {.kind = CKD_REGION_BOX};
        memcpy(box.lengths, g->shape, sizeof(box.lengths));
        box.lengths[0] = rows;
        l->regions[l->count++] = box;
    }
    l->regions[l->count++] =
        (ckd_region){.kind = CKD_REGION_FLAT, .start = split, .count = g->elements - split};
    for (uint64_t cuts = random_below(40); cuts-- > 0;) {
        if (g->ndim) {
            cut_a_box(l);
        }
        cut_a_range(l);
        box_to_range(l);
    }
    if (random_below(20) == 0) {
        l->regions[0] = (ckd_region){.kind = CKD_REGION_WHOLE};
        l->count = 1;
    }
}

/* Moves, grows, shrinks, duplicates or drops a region. After two calls a gap and an overlap may compensate. */
static void spoil(layout *l) {
    ckd_region *r = &l->regions[random_below(l->count)];
    uint32_t d = l->g.ndim ? (uint32_t)random_below(l->g.ndim) : 0;
    uint64_t how = random_below(5), elements;
    ckd_region before = *r;
    switch (how) {
    case 0:
        r->kind == CKD_REGION_BOX ? r->offsets[d]++ : r->start++;
        break;
    case 1:
        r->kind == CKD_REGION_BOX ? r->offsets[d]-- : r->start--;
        break;
    case 2:
        r->kind == CKD_REGION_BOX ? r->lengths[d]++ : r->count++;
        break;
    case 3:
        r->kind == CKD_REGION_BOX ? r->lengths[d]-- : r->count--;
        break;
    default:
        *r = l->regions[random_below(l->count)];
        break;
    }
    if (!region_count(&elements, &l->g, r)) {
        *r = before;
    }
}

static void test_random_layouts_agree_with_counting(void **unused) {
    (void)unused;
    static layout l;
    size_t good = 0, bad = 0, same_size = 0;
    for (unsigned round = 0; round < 20000; round++) {
        make_geometry(&l);
        make_tiling(&l);
        assert_true(tiles_by_counting(&l));
        assert_true(tiles(&l, round));
        for (uint64_t times = 1 + random_below(3); times-- > 0;) {
            spoil(&l);
        }
        bool expected = tiles_by_counting(&l);
        assert_int_equal(tiles(&l, round), expected);
        good += expected;
        bad += !expected;
        uint64_t held = 0, elements;
        for (size_t i = 0; i < l.count; i++) {
            assert_true(region_count(&elements, &l.g, &l.regions[i]));
            held += elements;
        }
        same_size += !expected && held == l.g.elements;
    }
    assert_true(good > 1000 && bad > 1000 && same_size > 1000);
}

static void test_tensors_without_elements_and_scalars(void **unused) {
    (void)unused;
    layout l = {.count = 1};
    assert_true(geometry_init(&l.g, 0, NULL));
    assert_true(tiles(&l, 1));
    l.regions[0] = (ckd_region){.kind = CKD_REGION_FLAT, .start = 0, .count = 1};
    assert_true(tiles(&l, 1));
    l.regions[0] = (ckd_region){.kind = CKD_REGION_FLAT, .start = 1, .count = 0};
    assert_false(tiles(&l, 1));
    l.count = 2;
    l.regions[1] = l.regions[0] = (ckd_region){.kind = CKD_REGION_WHOLE};
    assert_false(tiles(&l, 1));
    uint64_t none[] = {4, 0, 3};
    assert_true(geometry_init(&l.g, 3, none));
    assert_true(tiles(&l, 1));
    l.count = 0;
    assert_true(tiles(&l, 1));
}

/* Boxes of columns, which cut every row, next to ranges, in the largest possible tensor. */
static void test_a_hundred_thousand_regions(void **unused) {
    (void)unused;
    enum { COUNT = 100000, COLUMNS = COUNT / 2 };
    geometry g;
    uint64_t shape[] = {1u << 10, 1u << 10, 1u << 20};
    assert_true(geometry_init(&g, 3, shape));
    assert_true(g.elements == CKD_MAX_ELEMENTS);
    ckd_region *regions = calloc(COUNT, sizeof(*regions));
    assert_non_null(regions);
    uint64_t half = g.elements / 2;
    for (uint64_t i = 0; i < COLUMNS; i++) { /* columns of the rows in the first half */
        uint64_t from = shape[2] * i / COLUMNS, to = shape[2] * (i + 1) / COLUMNS;
        regions[i] = (ckd_region){
            .kind = CKD_REGION_BOX, .offsets = {0, 0, from}, .lengths = {shape[0] / 2, shape[1], to - from}};
        from = half + (half * i) / COLUMNS;
        to = half + (half * (i + 1)) / COLUMNS;
        regions[COLUMNS + i] = (ckd_region){.kind = CKD_REGION_FLAT, .start = from, .count = to - from};
    }
    uint64_t begun = clock_monotonic_ns();
    for (unsigned spoilt = 0; spoilt < 3; spoilt++) {
        coverage t = coverage_begin(&g, 7);
        for (size_t i = 0; i < COUNT; i++) {
            ckd_region r = regions[i];
            /* No region has the last element, and two regions have another one. */
            r.start -= spoilt == 1 && i == COUNT - 1;
            r.offsets[0] += spoilt == 2 && i == COLUMNS / 2;
            coverage_add(&t, &r);
        }
        assert_true(t.elements == g.elements);
        assert_int_equal(coverage_complete(&t), spoilt == 0);
    }
    print_message("%d regions: %.3f s\n", COUNT, (double)(clock_monotonic_ns() - begun) / 3e9);
    free(regions);
}

/* ---- checkpoints ---- */

enum { ELEMENTS = 100 };

static int setup(void **dir) {
    *dir = tempdir_create();
    return *dir == NULL;
}

static int teardown(void **dir) {
    tempdir_remove(*dir);
    return 0;
}

static ckd_region flat(uint64_t start, uint64_t count) {
    return (ckd_region){.kind = CKD_REGION_FLAT, .start = start, .count = count};
}

static void test_gaps_and_overlaps_are_not_committed(void **dir) {
    static const struct {
        ckd_region a, b;
        bool overlap; /* the second region is refused at once; a gap is found at the commit */
        const char *says;
    } cases[] = {
        {{.kind = CKD_REGION_FLAT, .start = 0, .count = 50},
         {.kind = CKD_REGION_FLAT, .start = 40, .count = 50},
         true,
         "overlap"},
        {{.kind = CKD_REGION_FLAT, .start = 0, .count = 50},
         {.kind = CKD_REGION_FLAT, .start = 51, .count = 49},
         false,
         "99 of the tensor's 100"},
        {{.kind = CKD_REGION_WHOLE}, {.kind = CKD_REGION_FLAT, .start = 99, .count = 1}, true, "overlap"}};
    ckd_store *store = store_create(*dir);
    uint64_t n = ELEMENTS;
    uint8_t *values = random_bits(ELEMENTS, 1);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        ckd_save *save = begin_save(store, "run", i);
        add_tensor(save, "fine", CKD_U8, 1, &n, NULL, values);
        add_tensor(save, "t", CKD_U8, 1, &n, &cases[i].a, values);
        ckd_tensor t = CKD_TENSOR_INIT;
        t.name = "t";
        t.dtype = CKD_U8;
        t.ndim = 1;
        t.shape = &n;
        t.region = cases[i].b;
        t.data = values;
        ckd_error err = {0};
        ckd_status status = ckd_save_tensor(save, &t, &err);
        if (cases[i].overlap) {
            assert_int_equal(status, CKD_E_MISMATCH);
            assert_int_equal(ckd_save_commit(NULL, save, NULL), CKD_E_STATE);
        } else {
            assert_int_equal(status, CKD_OK);
            assert_int_equal(ckd_save_commit(NULL, save, &err), CKD_E_MISMATCH);
        }
        assert_string_equal(err.tensor, "t");
        assert_non_null(strstr(err.message, cases[i].says));
    }
    free(values);
    ckd_store_close(store);
}

/* Copies the chunk file `from` as `id`, with regions[i] for its i-th record. */
static void copy_chunk(file_ref *out, const char *store_path, const file_ref *from, const ckd_id *id,
                       const ckd_region *regions) {
    chunk *c;
    chunk_writer *w;
    assert_int_equal(chunk_open(&c, path_chunk(store_path, &from->id, "").text, NULL), CKD_OK);
    chunk_identity identity = c->identity;
    identity.file = *id;
    assert_int_equal(chunk_writer_create(&w, path_chunk(store_path, id, "").text, &identity, NULL), CKD_OK);
    assert_int_equal(c->record_count, 2);
    for (size_t i = 0; i < c->record_count; i++) {
        record r = c->records[i];
        uint8_t payload[4096];
        assert_true(r.stored_size <= sizeof(payload));
        assert_int_equal(chunk_read_payload(c, &r, payload, NULL), CKD_OK);
        r.region = &regions[i];
        assert_int_equal(chunk_writer_append(w, &r, payload, NULL), CKD_OK);
    }
    *out = (file_ref){.id = *id};
    assert_int_equal(chunk_writer_finish_durable(w, &out->root, &out->size, NULL), CKD_OK);
    chunk_close(c);
}

/* Publishes another generation of run@1 with other regions. All hashes are right, but the checkpoint is not. */
static void republish(const char *store_path, const ckd_region *regions) {
    bytes data = {0};
    manifest m;
    pathname old = path_manifest(store_path, "run", 1, 0);
    assert_int_equal(file_read_all(&data, old.text, METADATA_MAX, NULL), CKD_OK);
    assert_int_equal(manifest_decode(&m, NULL, data.data, data.size, old.text, NULL), CKD_OK);
    bytes_clear(&data);
    bytes identity = {0};
    store_identity store;
    pathname p = path_in(store_path, FILE_IDENTITY);
    assert_int_equal(file_read_all(&identity, p.text, 4096, NULL), CKD_OK);
    assert_int_equal(store_identity_decode(&store, identity.data, identity.size, p.text, NULL), CKD_OK);
    ckd_id id;
    assert_int_equal(ckd_id_new(&id, NULL), CKD_OK);
    copy_chunk(&m.files[0], store_path, &m.files[0], &id, regions);
    m.checkpoint.generation = 1;
    manifest_encode(&data, &store.id, &m);
    assert_false(data.failed);
    pathname to = path_manifest(store_path, "run", 1, 1), temp = path_of(store_path, DIR_MANIFESTS, ".tmp-x");
    assert_int_equal(file_create_durable(to.text, temp.text, data.data, data.size, NULL), CKD_OK);
    manifest_free(&m);
    bytes_free(&data);
    bytes_free(&identity);
}

static ckd_status load_all(ckd_store *store, void *to, ckd_error *err) {
    ckd_checkpoint c;
    ckd_load *load;
    ckd_load_request q = CKD_LOAD_REQUEST_INIT;
    q.name = "t";
    q.data = to;
    q.size = ELEMENTS;
    assert_int_equal(ckd_store_find(&c, store, "run", 1, NULL), CKD_OK);
    assert_int_equal(c.generation, 1);
    ckd_status status = ckd_load_begin(&load, store, &c.id, err);
    if (status == CKD_OK) {
        status = ckd_load_tensor(load, &q, err);
        ckd_load_end(load);
    }
    return status;
}

/* Checks a stored checkpoint whose blocks cover the regions a and b: with gaps or overlaps it is damaged. */
static void check_stored(const char *dir, ckd_region a, ckd_region b, ckd_status expected) {
    ckd_store *store = store_create(dir);
    uint64_t n = ELEMENTS;
    uint8_t *values = random_bits(ELEMENTS, 1), back[ELEMENTS];
    ckd_save *save = begin_save(store, "run", 1);
    ckd_region halves[] = {flat(0, 50), flat(50, 50)}, other[] = {a, b};
    for (int i = 0; i < 2; i++) {
        add_tensor(save, "t", CKD_U8, 1, &n, &halves[i], values + 50 * i);
    }
    assert_int_equal(ckd_save_commit(NULL, save, NULL), CKD_OK);
    ckd_store_close(store);
    char path[4096];
    snprintf(path, sizeof(path), "%s/store", dir);
    republish(path, other);
    store = store_reopen(dir, CKD_OPEN_READ);
    ckd_error err = {0};
    assert_int_equal(load_all(store, back, &err), expected);
    if (expected == CKD_OK) {
        assert_memory_equal(back, values, ELEMENTS);
    } else {
        assert_string_equal(err.tensor, "t");
    }
    assert_int_equal(verify_damage(store), expected == CKD_OK ? 0 : 1);
    ckd_store_close(store);
    free(values);
}

static void test_stored_regions_as_they_were(void **dir) {
    /* Shows that the rewritten checkpoint is otherwise intact. */
    check_stored(*dir, flat(0, 50), flat(50, 50), CKD_OK);
}

static void test_stored_regions_that_overlap_and_leave_a_gap(void **dir) {
    check_stored(*dir, flat(0, 50), flat(40, 50), CKD_E_CORRUPT);
}

static void test_duplicate_stored_regions(void **dir) {
    check_stored(*dir, flat(0, 50), flat(0, 50), CKD_E_CORRUPT);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random_layouts_agree_with_counting),
        cmocka_unit_test(test_tensors_without_elements_and_scalars),
        cmocka_unit_test(test_a_hundred_thousand_regions),
        TEST(test_gaps_and_overlaps_are_not_committed),
        TEST(test_stored_regions_as_they_were),
        TEST(test_stored_regions_that_overlap_and_leave_a_gap),
        TEST(test_duplicate_stored_regions),
    };
    return cmocka_run_group_tests_name("tiling", tests, NULL, NULL);
}
