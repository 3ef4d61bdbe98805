/*
 * Flips bits of a store: a verification finds every one of them, and a load gives the right values or fails. The store
 * has bases, deltas, lossy chains with bundles, pins, tags, a policy and parity. By default a sample of bits is
 * flipped. CKD_FLIPS=I/N in the environment takes part I of N (0/1: all) of every bit of all metadata, and of 100,000
 * random bits of payloads.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/file.h"
#include "base/hash.h"
#include "codec/chunk/chunk.h"
#include "codec/metadata/metadata.h"
#include "tests/support/level.h"
#include "tests/support/scenes.h"
#include "tests/support/scratch.h"
#include "tests/support/tempdir.h"
#include "tests/support/xorshift.h"

enum { MAX_CHECKPOINTS = 16, SIDE = 64 };

static void must(ckd_status status, const ckd_error *err) {
    if (status != CKD_OK) {
        fail_msg("%s: %s (%s)", ckd_status_name(status), err->message, err->file);
    }
}

/* ---- the store ---- */

static float noise(uint64_t at, uint64_t step) {
    uint64_t v[2] = {at, step};
    return (float)(int64_t)hash64(v, sizeof(v)) * 0x1p-63f;
}

static ckd_status save_matrix(ckd_save *save, const char *name, uint64_t step, int kind, ckd_error *err) {
    static float values[SIDE * SIDE];
    uint64_t shape[2] = {SIDE, SIDE};
    ckd_tensor t = CKD_TENSOR_INIT;
    for (uint64_t i = 0; i < SIDE * SIDE; i++) {
        float w = noise(i, 0);
        for (uint64_t k = 1; k <= step; k++) {
            w += 0.01f * noise(i, k);
        }
        float m = 0.01f * noise(i, step);
        values[i] = kind == 0 ? w : kind == 1 ? m : m * m + 1e-8f;
    }
    t.name = name;
    t.dtype = CKD_F32;
    t.ndim = 2;
    t.shape = shape;
    t.data = values;
    return ckd_save_tensor(save, &t, err);
}

static void save_lossy(ckd_store *store, uint64_t step) {
    ckd_save_options o = CKD_SAVE_OPTIONS_INIT;
    ckd_save *save;
    ckd_error err = {0};
    o.run = "lossy";
    o.step = step;
    o.fidelity = CKD_COARSE;
    must(ckd_save_begin(&save, store, &o, &err), &err);
    must(save_matrix(save, "exp_avg_sq.w", step, 2, &err), &err);
    must(save_matrix(save, "exp_avg.w", step, 1, &err), &err);
    must(save_matrix(save, "w", step, 0, &err), &err);
    must(ckd_save_commit(NULL, save, &err), &err);
}

static void mark(ckd_store *store) {
    ckd_checkpoint c;
    ckd_policy policy = CKD_POLICY_INIT;
    ckd_error err = {0};
    policy.keep_last = 100;
    must(ckd_store_find(&c, store, SCENE_RUN, 1, &err), &err);
    must(ckd_store_pin(store, &c.id, "why not", &err), &err);
    must(ckd_store_set_tag(store, "best", &c.id, 0, &err), &err);
    must(ckd_store_set_policy(store, &policy, &err), &err);
}

/* Removes materialized copies, because loads would use them instead of a damaged block. */
static void drop_ready(const char *dir) {
    dir_list list;
    char below[256];
    assert_int_equal(dir_list_read(&list, store_path_of(dir, "data/k"), NULL), CKD_OK);
    for (size_t i = 0; i < list.count; i++) {
        snprintf(below, sizeof(below), "data/k/%s", list.names[i]);
        assert_int_equal(unlink(store_path_of(dir, below)), 0);
    }
    dir_list_free(&list);
}

static void make_store(const char *dir) {
    ckd_store *store;
    ckd_parity_options o = CKD_PARITY_OPTIONS_INIT;
    ckd_parity_result *r;
    ckd_error err = {0};
    scene_make(dir, 0, 3);
    must(scene_open(&store, dir, CKD_OPEN_WRITE, &err), &err);
    for (uint64_t step = 0; step < 3; step++) {
        save_lossy(store, step);
    }
    mark(store);
    o.data = 4;
    o.parity = 1;
    must(ckd_store_parity(&r, store, &o, &err), &err);
    ckd_parity_result_free(r);
    ckd_store_close(store);
    drop_ready(dir);
}

/* ---- what loads return ---- */

typedef struct loaded {
    char name[CKD_RUN_MAX + 32];
    uint64_t digest;
} loaded;

static ckd_status load_tensor(uint64_t *digest, ckd_load *load, const ckd_tensor_info *t, ckd_error *err) {
    ckd_load_request q = CKD_LOAD_REQUEST_INIT;
    q.name = t->name;
    q.size = (size_t)(t->elements * ckd_dtype_size(t->dtype));
    q.data = malloc(q.size + 1);
    ckd_status status = ckd_load_tensor(load, &q, err);
    uint64_t mixed[3] = {*digest, status == CKD_OK ? hash64(q.data, q.size) : 0,
                         hash64(t->name, strlen(t->name))};
    *digest = hash64(mixed, sizeof(mixed));
    free(q.data);
    return status;
}

static ckd_status load_all(uint64_t *digest, ckd_store *store, const ckd_id *id) {
    ckd_load *load;
    ckd_status status = ckd_load_begin(&load, store, id, NULL);
    *digest = 0;
    const ckd_tensor_list *list = status == CKD_OK ? ckd_load_tensors(load) : NULL;
    for (size_t i = 0; list && i < list->count && status == CKD_OK; i++) {
        status = load_tensor(digest, load, &list->items[i], NULL);
    }
    ckd_load_end(load);
    return status;
}

static size_t load_everything(loaded out[MAX_CHECKPOINTS], const char *dir) {
    ckd_store *store;
    ckd_checkpoint_list *list;
    ckd_error err = {0};
    must(scene_open(&store, dir, CKD_OPEN_READ, &err), &err);
    must(ckd_store_list(&list, store, NULL, &err), &err);
    assert_true(list->count > 0 && list->count <= MAX_CHECKPOINTS);
    size_t count = list->count;
    for (size_t i = 0; i < count; i++) {
        const ckd_checkpoint *c = &list->items[i];
        snprintf(out[i].name, sizeof(out[i].name), "%s@%llu", c->run, (unsigned long long)c->step);
        must(load_all(&out[i].digest, store, &c->id), &err);
    }
    ckd_checkpoint_list_free(list);
    ckd_store_close(store);
    return count;
}

/* ---- one flip ---- */

typedef struct campaign {
    const char *dir;
    loaded right[MAX_CHECKPOINTS];
    size_t count;
    uint64_t part;           /* first bit of a range to flip; UINT64_MAX: random */
    uint64_t flips, refused; /* refused: loads of damaged checkpoints that failed */
    uint64_t harmless; /* loads of damaged checkpoints that did not read the bit and gave the right values */
} campaign;

/* Returns whether the load failed. */
static bool check_load(campaign *c, ckd_store *store, const char *name, const char *where) {
    char run[64];
    unsigned long long step;
    uint64_t digest;
    ckd_checkpoint found;
    assert_int_equal(sscanf(name, "%63[^@]@%llu", run, &step), 2);
    ckd_status status = ckd_store_find(&found, store, run, step, NULL);
    status = status == CKD_OK ? load_all(&digest, store, &found.id) : status;
    if (status != CKD_OK) {
        c->refused++;
        return true;
    }
    for (size_t i = 0; i < c->count; i++) {
        if (strcmp(c->right[i].name, name) == 0 && c->right[i].digest != digest) {
            fail_msg("%s was loaded with wrong values: %s", name, where);
        }
    }
    c->harmless++;
    return false;
}

/* A verification must find the flipped bit. Loads of the checkpoints that it names fail or give the right values. */
static void check_flipped(campaign *c, const char *where, bool payload) {
    ckd_store *store;
    ckd_verify_result *r;
    ckd_error err = {0};
    bool refused = false;
    ckd_verify_options o = CKD_VERIFY_OPTIONS_INIT;
    c->flips++;
    o.quick = c->part != UINT64_MAX; /* a quick verification must find it; the full one finds no less */
    must(scene_open(&store, c->dir, CKD_OPEN_READ, &err), &err);
    must(ckd_store_verify(&r, store, &o, &err), &err);
    if (r->damage_count == 0) {
        fail_msg("verify does not find a flipped bit: %s", where);
    }
    for (size_t i = 0; i < r->damage_count; i++) {
        for (size_t k = 0; k < r->damage[i].checkpoint_count; k++) {
            refused = check_load(c, store, r->damage[i].checkpoints[k], where) || refused;
        }
    }
    if (payload && !refused) { /* a checkpoint that only may need the payload can load */
        fail_msg("a damaged payload was not missed by any load: %s", where);
    }
    ckd_verify_result_free(r);
    ckd_store_close(store);
}

static void flip(campaign *c, const char *path, uint64_t bit, bool payload) {
    unsigned char byte;
    char where[600];
    int fd = open(path, O_RDWR);
    snprintf(where, sizeof(where), "bit %llu of %s", (unsigned long long)bit, path);
    assert_true(fd >= 0 && pread(fd, &byte, 1, (off_t)(bit / 8)) == 1);
    byte ^= (unsigned char)(1u << bit % 8);
    assert_int_equal(pwrite(fd, &byte, 1, (off_t)(bit / 8)), 1);
    check_flipped(c, where, payload);
    byte ^= (unsigned char)(1u << bit % 8);
    assert_int_equal(pwrite(fd, &byte, 1, (off_t)(bit / 8)), 1);
    assert_int_equal(close(fd), 0);
}

/* ---- which bits ---- */

/* Flips every `stride`-th bit of a range. */
static void flip_range(campaign *c, const char *path, uint64_t begin, uint64_t end, uint64_t stride) {
    uint64_t first = c->part < stride ? c->part : next_random() % stride;
    for (uint64_t bit = 8 * begin + first; bit < 8 * end; bit += stride) {
        flip(c, path, bit, false);
    }
}

static void flip_folder(campaign *c, const char *folder, uint64_t stride) {
    dir_list list;
    char path[512];
    assert_int_equal(dir_list_read(&list, store_path_of(c->dir, folder), NULL), CKD_OK);
    for (size_t i = 0; i < list.count; i++) {
        snprintf(path, sizeof(path), "%s/%s", store_path_of(c->dir, folder), list.names[i]);
        flip_range(c, path, 0, file_bytes(path), stride);
    }
    dir_list_free(&list);
}

/* A chunk file without its payloads: headers of the file and of records, heads of bundles, index, footer. */
static void flip_chunk_metadata(campaign *c, const char *path, uint64_t stride) {
    chunk *k;
    ckd_error err = {0};
    must(chunk_open(&k, path, &err), &err);
    flip_range(c, path, 0, 88, stride);
    for (size_t i = 0; i < k->outer_count; i++) {
        const record *r = &k->outer[i];
        flip_range(c, path, r->offset, r->payload_offset, stride);
    }
    flip_range(c, path, k->index_offset, k->size, stride);
    chunk_close(k);
}

static void flip_payloads(campaign *c, const char *path, uint64_t count) {
    chunk *k;
    ckd_error err = {0};
    must(chunk_open(&k, path, &err), &err);
    for (uint64_t n = 0; n < count;) {
        const record *r = &k->outer[next_random() % k->outer_count];
        if (r->stored_size) {
            flip(c, path, 8 * r->payload_offset + next_random() % (8 * r->stored_size),
                 r->kind == RECORD_BLOCK);
            n++;
        }
    }
    chunk_close(k);
}

static void each_chunk(campaign *c, void (*what)(campaign *, const char *, uint64_t), uint64_t number,
                       bool share) {
    dir_list list;
    char path[512];
    assert_int_equal(dir_list_read(&list, store_path_of(c->dir, "data/c"), NULL), CKD_OK);
    for (size_t i = 0; i < list.count; i++) {
        snprintf(path, sizeof(path), "%s/%s", store_path_of(c->dir, "data/c"), list.names[i]);
        what(c, path, share ? number / list.count + (i < number % list.count) : number);
    }
    dir_list_free(&list);
}

static void report(const char *what, campaign *c) {
    print_message(
        "%s: %llu flips, all found by verify; loads of what was damaged: %llu refused, %llu right, none wrong\n",
        what, (unsigned long long)c->flips, (unsigned long long)c->refused, (unsigned long long)c->harmless);
    c->flips = c->refused = c->harmless = 0;
}

static void test_flips(void **state) {
    const char *asked = getenv("CKD_FLIPS");
    unsigned share, shares;
    bool full = asked && sscanf(asked, "%u/%u", &share, &shares) == 2 && share < shares;
    uint64_t slow = under_sanitizer() ? 10 : test_pick(5, 1, 1), stride = full ? shares : 199 * slow;
    char identity[512];
    campaign c = {.dir = *state, .part = full ? share : UINT64_MAX};
    seed += full ? share * UINT64_C(0x9e3779b97f4a7c15) : 0;
    make_store(*state);
    c.count = load_everything(c.right, *state);
    assert_int_equal(c.count, 6);
    flip_folder(&c, "data/m", stride);
    flip_folder(&c, "data/n", stride);
    snprintf(identity, sizeof(identity), "%s", store_path_of(*state, "data/store"));
    flip_range(&c, identity, 0, file_bytes(identity), stride);
    report("manifests and metadata files", &c);
    each_chunk(&c, flip_chunk_metadata, stride, false);
    report("headers, indexes and footers of chunk files", &c);
    flip_folder(&c, "data/p", full ? 401 * stride : 4001 * slow);
    report("parity", &c);
    each_chunk(&c, flip_payloads, full ? 100000 / shares : 300 / slow, true);
    report("payloads", &c);
}

/* ---- other damage, to one file of any kind at a time ---- */

typedef enum harm { FLIPPED, CUT, SWAPPED, ZEROED, OLDER, LOST, A_DIRECTORY, HARMS } harm;
static const char *const harm_names[HARMS] = {"flipped",      "cut",  "swapped",    "zeroed page",
                                              "an older one", "lost", "a directory"};
static const char *const folders[] = {"data/c", "data/m",     "data/n",    "data/p",
                                      "data/t", "data/store", "catalog.db"};
enum { CHUNKS, MANIFESTS, NOTES, PARITY, TOMBSTONES, IDENTITY, CATALOG, FOLDERS };

typedef struct victim {
    unsigned folder;
    harm how;
    char path[512], other[512], where[1200];
    unsigned char *before;
    size_t size;
} victim;

static bool is_lock(const char *name) {
    return strcmp(name, "lock") == 0;
}

static void pick_file(char out[512], const char *dir, unsigned folder) {
    dir_list list;
    if (folder == IDENTITY || folder == CATALOG) {
        snprintf(out, 512, "%s", store_path_of(dir, folders[folder]));
        return;
    }
    assert_int_equal(dir_list_read(&list, store_path_of(dir, folders[folder]), NULL), CKD_OK);
    assert_true(list.count > 0);
    size_t at = next_random() % list.count;
    at = is_lock(list.names[at]) ? (at + 1) % list.count : at;
    snprintf(out, 512, "%s/%s", store_path_of(dir, folders[folder]), list.names[at]);
    dir_list_free(&list);
}

static void write_other(const victim *v, const char *older_catalog) {
    size_t size;
    unsigned char *data = read_whole_file(v->folder == CATALOG ? older_catalog : v->other, &size);
    write_whole_file(v->path, data, size);
    if (v->how == SWAPPED) {
        write_whole_file(v->other, v->before, v->size);
    }
    free(data);
}

static void do_harm(const victim *v, const char *older_catalog) {
    unsigned char *data = malloc(v->size + 1);
    size_t page = v->size ? next_random() % v->size / 4096 * 4096 : 0;
    assert_non_null(data);
    memcpy(data, v->before, v->size);
    switch (v->how) {
    case FLIPPED:
        data[next_random() % v->size] ^= (unsigned char)(1u << next_random() % 8);
        write_whole_file(v->path, data, v->size);
        break;
    case CUT:
        write_whole_file(v->path, data, next_random() % v->size);
        break;
    case ZEROED:
        memset(data + page, 0, v->size - page < 4096 ? v->size - page : 4096);
        write_whole_file(v->path, data, v->size);
        break;
    case SWAPPED:
    case OLDER:
        write_other(v, older_catalog);
        break;
    default:
        assert_int_equal(unlink(v->path), 0);
        assert_true(v->how == LOST || mkdir(v->path, 0700) == 0);
        break;
    }
    free(data);
}

/* The other file may be the same or equal, and the page may have been zeros already. */
static bool is_harmed(const victim *v) {
    size_t size;
    if (v->how == LOST || v->how == A_DIRECTORY) {
        return true;
    }
    unsigned char *now = read_whole_file(v->path, &size);
    bool same = size == v->size && memcmp(now, v->before, size) == 0;
    free(now);
    return !same;
}

/*
 * Whether a verification must report it. A store does not show which pins, tags, policies and deletions it had, nor
 * whether a group of one had a parity file. The catalog is only a cache.
 */
static bool must_be_reported(const victim *v) {
    bool shows = v->folder == CHUNKS || v->folder == MANIFESTS || v->folder == IDENTITY;
    return v->folder != CATALOG && (v->how != LOST || shows);
}

/*
 * Whether a repair must undo it. Parity restores one lost chunk file per group. Lost manifests are written again,
 * except that of the deleted run@3, which the catalog has dropped. The other files tell the identity.
 */
static bool must_be_repaired(const victim *v) {
    bool one = v->how != SWAPPED;
    return v->folder == CATALOG || v->folder == IDENTITY || (one && v->folder == CHUNKS) ||
           v->folder == PARITY || (v->folder == MANIFESTS && v->how == LOST && !strstr(v->path, "/run.3."));
}

static size_t damage_count(ckd_store *store) {
    ckd_verify_result *r;
    ckd_error err = {0};
    must(ckd_store_verify(&r, store, NULL, &err), &err);
    size_t count = r->damage_count;
    ckd_verify_result_free(r);
    return count;
}

static void load_each(campaign *c, ckd_store *store, const victim *v, bool all_right) {
    for (size_t i = 0; i < c->count; i++) {
        if (check_load(c, store, c->right[i].name, v->where) && all_right) {
            fail_msg("%s cannot be loaded: %s", c->right[i].name, v->where);
        }
    }
}

static void check_repair(campaign *c, const victim *v) {
    ckd_store *store;
    ckd_repair_result *r;
    ckd_error err = {0};
    if (scene_open(&store, c->dir, CKD_OPEN_WRITE, &err) != CKD_OK) {
        if (must_be_repaired(v)) {
            fail_msg("the store cannot be opened for writing: %s: %s", err.message, v->where);
        }
        return;
    }
    must(ckd_store_repair(&r, store, NULL, &err), &err);
    size_t left = r->left->damage_count;
    ckd_repair_result_free(r);
    size_t damage = damage_count(store);
    if ((left == 0 && damage) || (left && must_be_repaired(v))) {
        fail_msg("repair leaves %zu and says %zu: %s", damage, left, v->where);
    }
    load_each(c, store, v, must_be_repaired(v));
    if (must_be_repaired(v) && v->folder == CHUNKS) {
        size_t size;
        unsigned char *now = read_whole_file(v->path, &size);
        assert_int_equal(size, v->size);
        assert_memory_equal(now, v->before, size);
        free(now);
    }
    ckd_store_close(store);
}

static void check_harmed(campaign *c, const victim *v) {
    ckd_store *store;
    ckd_error err = {0};
    c->flips++;
    if (scene_open(&store, c->dir, CKD_OPEN_READ, &err) != CKD_OK) {
        fail_msg("the store cannot be opened: %s: %s", err.message, v->where);
    }
    if (damage_count(store) == 0 && must_be_reported(v)) {
        fail_msg("verify does not find it: %s", v->where);
    }
    load_each(c, store, v, v->folder == IDENTITY);
    ckd_store_close(store);
    check_repair(c, v);
}

static void remove_tree(const char *path) {
    dir_list list;
    if (dir_list_read(&list, path, NULL) == CKD_OK) {
        for (size_t i = 0; i < list.count; i++) {
            char below[700];
            snprintf(below, sizeof(below), "%s/%s", path, list.names[i]);
            if (unlink(below) != 0) {
                remove_tree(below);
            }
        }
        dir_list_free(&list);
    }
    assert_int_equal(rmdir(path), 0);
}

static void harm_one(campaign *c, const char *pristine, const char *older_catalog, harm how) {
    victim v = {.folder = next_random() % FOLDERS, .how = how};
    char to[600];
    snprintf(to, sizeof(to), "%s/store", c->dir);
    tree_copy(pristine, to);
    pick_file(v.path, c->dir, v.folder);
    pick_file(v.other, c->dir, v.folder);
    snprintf(v.where, sizeof(v.where), "%s is %s (%s)", v.path, harm_names[how], v.other);
    v.before = read_whole_file(v.path, &v.size);
    do_harm(&v, older_catalog);
    if (is_harmed(&v)) {
        check_harmed(c, &v);
    }
    free(v.before);
    remove_tree(to);
}

/* Makes a store with a checkpoint in the trash and parity for all files, and keeps an older catalog. */
static void make_full_store(const char *dir, const char *older_catalog) {
    ckd_store *store;
    ckd_parity_result *r;
    ckd_error err = {0};
    size_t size;
    make_store(dir);
    unsigned char *catalog = read_whole_file(store_path_of(dir, "catalog.db"), &size);
    write_whole_file(older_catalog, catalog, size);
    free(catalog);
    must(scene_open(&store, dir, CKD_OPEN_WRITE, &err), &err);
    scene s = scene_of(3);
    must(scene_save(NULL, store, &s, &err), &err);
    must(ckd_store_parity(&r, store, NULL, &err), &err);
    ckd_parity_result_free(r);
    ckd_store_close(store);
    scene_trash(dir, 3, 1);
    drop_ready(dir);
}

/* CKD_HARMS=N in the environment does N of each kind, by default a few. */
static void test_other_damage(void **state) {
    const char *asked = getenv("CKD_HARMS");
    unsigned long count = asked ? strtoul(asked, NULL, 10) : under_sanitizer() ? 2 : test_pick(2, 10, 10);
    char pristine[600], older_catalog[600], work[600];
    campaign c = {.part = UINT64_MAX, .dir = work};
    snprintf(pristine, sizeof(pristine), "%s/store", (const char *)*state);
    snprintf(older_catalog, sizeof(older_catalog), "%s/older", (const char *)*state);
    snprintf(work, sizeof(work), "%s/work", (const char *)*state);
    assert_int_equal(mkdir(work, 0700), 0);
    make_full_store(*state, older_catalog);
    c.count = load_everything(c.right, *state);
    assert_int_equal(c.count, 6);
    for (harm how = 0; how < HARMS; how++) {
        while (c.flips < count) { /* some draws change nothing, and do not count */
            harm_one(&c, pristine, older_catalog, how);
        }
        print_message(
            "%s: %llu times; loads beside it and after repair: %llu refused, %llu right, none wrong\n",
            harm_names[how], (unsigned long long)c.flips, (unsigned long long)c.refused,
            (unsigned long long)c.harmless);
        c.flips = c.refused = c.harmless = 0;
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {tempdir_test(test_flips), tempdir_test(test_other_damage)};
    scratch_begin();
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    scratch_end();
    return failed;
}
