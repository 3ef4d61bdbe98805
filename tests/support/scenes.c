#include "tests/support/scenes.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/bytes.h"
#include "base/file.h"
#include "base/hash.h"
#include "codec/metadata/metadata.h"
#include "engine/store/handle.h"

/* ---- the state ---- */

enum { COLUMNS = 8, SCENE_TENSORS = 10, SCENE_ROWS = 6, NET_ROWS = 24 };

typedef struct scene_tensor {
    const char *name;
    ckd_dtype dtype;
    uint32_t ndim;
    bool halves; /* saved in two regions */
} scene_tensor;

/* In the order in which they are saved. All but the scalar and the empty tensor are rows x COLUMNS. */
static const scene_tensor tensors[SCENE_TENSORS] = {
    {"master.w", CKD_F32, 2, false},       {"w", CKD_BF16, 2, false},
    {"exp_avg.w", CKD_F32, 2, true},       {"embedding", CKD_F32, 2, false},
    {"tied", CKD_F32, 2, false},           {"count", CKD_I64, 0, false},
    {"empty", CKD_F32, 2, false},          {"exp_avg.net", CKD_F32, 2, false},
    {"exp_avg_sq.net", CKD_F32, 2, false}, {"net", CKD_F32, 2, false},
};

/* Tensors of the net have NET_ROWS rows, and get an update of AdamW at each step. */
static bool is_net(const scene_tensor *t) {
    size_t length = strlen(t->name);
    return length >= 3 && strcmp(t->name + length - 3, "net") == 0;
}

static uint64_t mix(uint64_t z) { /* the finaliser of splitmix64 */
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static uint64_t hash_text(const char *text) {
    return hash64(text, strlen(text));
}

/* At each step, an eighth of the elements get a new fraction. The others stay as they were. */
static uint32_t float_bits(uint64_t seed, uint64_t element, uint64_t step) {
    uint64_t last_change = step - (step + element) % 8;
    if (step < (step + element) % 8) {
        last_change = 0;
    }
    uint64_t fixed = mix(seed + element * 0x9e3779b97f4a7c15u);
    uint64_t moving = mix(fixed + last_change);
    uint32_t exponent = 118u + (uint32_t)(fixed % 5);
    return (uint32_t)(fixed >> 63) << 31 | exponent << 23 | ((uint32_t)(fixed >> 20) & 0x7fff00u) |
           (uint32_t)(moving & 0xffu);
}

static uint16_t bf16_of(uint32_t bits) {
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static uint64_t tensor_shape(uint64_t shape[2], const scene_tensor *t, const scene *s) {
    shape[0] = strcmp(t->name, "empty") == 0 ? 0 : is_net(t) ? NET_ROWS : s->rows;
    shape[1] = COLUMNS;
    return t->ndim == 0 ? 1 : shape[0] * shape[1];
}

static ckd_optimizer net_optimizer(uint64_t step) {
    ckd_optimizer o = CKD_OPTIMIZER_INIT;
    o.kind = CKD_ADAMW;
    o.lr = 0.001;
    o.beta1 = 0.5;
    o.beta2 = 0.75;
    o.eps = 1e-6;
    o.step = step + 1;
    return o;
}

/* exp_avg, exp_avg_sq or the weight of one element after the updates of all steps up to this one. */
static float net_value(const scene_tensor *t, const scene *s, uint64_t element) {
    float w = (float)(mix(element + 1) >> 40) * 0x1p-24f, m = 0, v = 0;
    for (uint64_t step = 0; step <= s->step && step < 64; step++) {
        ckd_optimizer o = net_optimizer(step);
        double bias1 = 1 - pow(o.beta1, (double)o.step), bias2 = 1 - pow(o.beta2, (double)o.step);
        float g = ((float)(mix(hash_text(s->run) + 977 * element + step) >> 40) * 0x1p-24f - 0.5f) * 0.01f;
        uint32_t bits;
        memcpy(&bits, &g, sizeof(bits));
        bits = (uint32_t)bf16_of(bits) << 16; /* as in mixed precision */
        memcpy(&g, &bits, sizeof(g));
        m = m + 0.5f * (g - m);
        v = v * 0.75f + 0.25f * g * g;
        w = w - (float)(o.lr / bias1) * m / (sqrtf(v) / (float)sqrt(bias2) + (float)o.eps);
    }
    return t->name[0] == 'n' ? w : strncmp(t->name, "exp_avg.", 8) == 0 ? m : v;
}

static void fill_net(void *to, const scene_tensor *t, const scene *s, uint64_t first, uint64_t count) {
    for (uint64_t i = 0; i < count; i++) {
        float value = net_value(t, s, first + i);
        memcpy((uint8_t *)to + 4 * i, &value, 4);
    }
}

static void fill(void *to, const scene_tensor *t, const scene *s, uint64_t first, uint64_t count) {
    if (is_net(t)) {
        fill_net(to, t, s, first, count);
        return;
    }
    uint64_t seed = hash_text(s->run);
    bool frozen = strcmp(t->name, "embedding") == 0 || strcmp(t->name, "tied") == 0;
    bool moment = strcmp(t->name, "exp_avg.w") == 0;
    for (uint64_t i = 0; i < count; i++) {
        uint32_t bits = float_bits(seed + frozen + 2u * moment, first + i, frozen ? 0 : s->step);
        if (t->dtype == CKD_F32) {
            store_le32((uint8_t *)to + 4 * i, bits);
        } else if (t->dtype == CKD_BF16) {
            store_le16((uint8_t *)to + 2 * i, bf16_of(bits));
        } else {
            store_le64((uint8_t *)to + 8 * i, s->step);
        }
    }
}

static size_t blob_text(char out[96], const scene *s) {
    return (size_t)snprintf(out, 96, "position %llu of %.40s", (unsigned long long)s->step, s->run);
}

scene scene_of(uint64_t step) {
    return (scene){.run = SCENE_RUN, .step = step, .rows = SCENE_ROWS};
}

/* ---- saving ---- */

static ckd_status save_range(ckd_save *save, const scene_tensor *t, const scene *s, uint64_t first,
                             uint64_t end, uint64_t elements, ckd_error *err) {
    uint64_t shape[2];
    tensor_shape(shape, t, s);
    ckd_tensor description = CKD_TENSOR_INIT;
    description.name = t->name;
    description.dtype = t->dtype;
    description.ndim = t->ndim;
    description.shape = shape;
    if (first > 0 || end < elements) {
        description.region = (ckd_region){.kind = CKD_REGION_FLAT, .start = first, .count = end - first};
    }
    void *values = calloc(end - first + 1, 8);
    if (!values) {
        return err_nomem(err, (end - first) * 8, "a scene");
    }
    fill(values, t, s, first, end - first);
    ckd_optimizer optimizer = net_optimizer(s->step);
    description.optimizer = is_net(t) ? &optimizer : NULL;
    description.data = values;
    ckd_status status = ckd_save_tensor(save, &description, err);
    free(values);
    return status;
}

ckd_status scene_share(ckd_save *save, const scene *s, uint64_t rank, uint64_t world, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < SCENE_TENSORS && status == CKD_OK; i++) {
        const scene_tensor *t = &tensors[i];
        uint64_t shape[2], elements = tensor_shape(shape, t, s);
        bool split = elements > 1 && world > 1;
        if (!split && rank > 0) {
            continue;
        }
        uint64_t first = split ? elements * rank / world : 0,
                 end = split ? elements * (rank + 1) / world : elements;
        uint64_t middle = t->halves ? first + (end - first) / 2 : end;
        status = save_range(save, t, s, first, middle, elements, err);
        if (status == CKD_OK && middle < end) {
            status = save_range(save, t, s, middle, end, elements, err);
        }
    }
    char text[96];
    size_t size = blob_text(text, s);
    if (status == CKD_OK && rank == 0) {
        status = ckd_save_blob(save, "loader", text, size, err);
    }
    if (status == CKD_OK && rank == 0) {
        status = ckd_save_blob(save, "nothing", NULL, 0, err);
    }
    return status;
}

static ckd_save_options options_of(const scene *s) {
    ckd_save_options o = CKD_SAVE_OPTIONS_INIT;
    o.run = s->run;
    o.step = s->step;
    o.metric_name = "loss";
    o.metric = 1.0 / (double)(s->step + 1);
    /*
     * Use both ways to code residuals. Load costs are not limited, as they say little for states as small as
     * these.
     */
    o.codec = s->step % 2 ? CKD_CODEC_AUTO : CKD_CODEC_ZSTD;
    o.max_load_cost = 1000;
    o.newest_load_cost = s->ready ? 1 : 1000;
    o.base = s->base;
    return o;
}

ckd_status scene_finish(ckd_checkpoint *info, ckd_save *save, const scene *s, ckd_error *err) {
    ckd_status status = scene_share(save, s, 0, 1, err);
    if (status != CKD_OK) {
        ckd_save_abort(save);
        return status;
    }
    return ckd_save_commit(info, save, err);
}

ckd_status scene_save(ckd_checkpoint *info, ckd_store *store, const scene *s, ckd_error *err) {
    ckd_save_options o = options_of(s);
    ckd_save *save;
    ckd_status status = ckd_save_begin(&save, store, &o, err);
    return status == CKD_OK ? scene_finish(info, save, s, err) : status;
}

ckd_status scene_save_ranks(ckd_checkpoint *info, ckd_store *store, const scene *s, ckd_error *err) {
    ckd_save_options o = options_of(s);
    ckd_save *saves[2] = {NULL, NULL};
    ckd_part parts[2] = {{NULL, 0}, {NULL, 0}};
    o.world = 2;
    ckd_status status = ckd_id_new(&o.checkpoint_id, err);
    for (; o.rank < 2 && status == CKD_OK; o.rank++) {
        status = ckd_save_begin(&saves[o.rank], store, &o, err);
        if (status == CKD_OK) {
            status = scene_share(saves[o.rank], s, o.rank, 2, err);
        }
        if (status == CKD_OK) {
            status = ckd_save_seal(&parts[o.rank], saves[o.rank], err);
        }
    }
    if (status == CKD_OK) {
        status = ckd_save_publish(info, saves[0], parts, 2, err);
        saves[0] = NULL;
    }
    if (status == CKD_OK) {
        ckd_save_end(saves[1]);
        saves[1] = NULL;
    }
    for (size_t i = 0; i < 2; i++) {
        ckd_part_free(&parts[i]);
        ckd_save_abort(saves[i]);
    }
    return status;
}

/* ---- loading ---- */

static ckd_status wrong(ckd_error *err, const char *what) {
    if (err) {
        memset(err, 0, sizeof(*err));
        snprintf(err->message, sizeof(err->message), "%s is not what was saved", what);
    }
    return SCENE_WRONG;
}

static ckd_status load_tensor(ckd_load *load, const scene_tensor *t, const scene *s, ckd_error *err) {
    uint64_t shape[2], elements = tensor_shape(shape, t, s);
    size_t size = elements * ckd_dtype_size(t->dtype);
    uint8_t *want = calloc(1, size + 8), *got = calloc(1, size + 8);
    ckd_load_request q = CKD_LOAD_REQUEST_INIT;
    q.name = t->name;
    q.dtype = t->dtype;
    q.ndim = t->ndim;
    q.shape = shape;
    q.data = got;
    q.size = size;
    ckd_status status = want && got ? ckd_load_tensor(load, &q, err) : err_nomem(err, size, "a scene");
    if (status == CKD_OK) {
        fill(want, t, s, 0, elements);
        status = memcmp(want, got, size) == 0 ? CKD_OK : wrong(err, t->name);
    }
    free(want);
    free(got);
    return status;
}

static ckd_status load_blob(ckd_load *load, const char *name, const char *want, size_t want_size,
                            ckd_error *err) {
    void *data;
    size_t size;
    ckd_status status = ckd_load_blob(&data, &size, load, name, err);
    if (status == CKD_OK && (size != want_size || (size && memcmp(data, want, size) != 0))) {
        status = wrong(err, name);
    }
    ckd_blob_free(data);
    return status;
}

ckd_status scene_load_id(ckd_store *store, const ckd_id *id, const scene *s, ckd_error *err) {
    ckd_load *load;
    ckd_status status = ckd_load_begin(&load, store, id, err);
    if (status != CKD_OK) {
        return status;
    }
    if (ckd_load_tensors(load)->count != SCENE_TENSORS) {
        status = wrong(err, "the list of tensors");
    }
    for (size_t i = 0; i < SCENE_TENSORS && status == CKD_OK; i++) {
        status = load_tensor(load, &tensors[i], s, err);
    }
    char text[96];
    size_t size = blob_text(text, s);
    if (status == CKD_OK) {
        status = load_blob(load, "loader", text, size, err);
    }
    if (status == CKD_OK) {
        status = load_blob(load, "nothing", NULL, 0, err);
    }
    ckd_load_end(load);
    return status;
}

ckd_status scene_load(ckd_store *store, const scene *s, ckd_error *err) {
    ckd_checkpoint found;
    ckd_status status = ckd_store_find(&found, store, s->run, s->step, err);
    return status == CKD_OK ? scene_load_id(store, &found.id, s, err) : status;
}

/* ---- stores ---- */

const char *store_path_of(const char *dir, const char *relative) {
    static char paths[4][1024];
    static size_t next;
    char *out = paths[next++ % 4];
    snprintf(out, sizeof(paths[0]), "%s/store%s%s", dir, *relative ? "/" : "", relative);
    return out;
}

ckd_status scene_open(ckd_store **out, const char *dir, ckd_open_mode mode, ckd_error *err) {
    ckd_store_options o = CKD_STORE_OPTIONS_INIT;
    o.threads = 1;
    return ckd_store_open(out, store_path_of(dir, ""), mode, &o, err);
}

void scene_make(const char *dir, uint64_t first, uint64_t count) {
    ckd_store *store = NULL;
    ckd_error err = {0};
    ckd_status status = scene_open(&store, dir, CKD_OPEN_CREATE, &err);
    for (uint64_t i = 0; i < count && status == CKD_OK; i++) {
        scene s = scene_of(first + i);
        status = scene_save(NULL, store, &s, &err);
    }
    ckd_store_close(store);
    if (status != CKD_OK) {
        fail_msg("making a store: %s", err.message);
    }
}

void scene_make_pruning(const char *dir, uint64_t count, uint64_t undo_s) {
    ckd_store *store = NULL;
    ckd_policy policy = CKD_POLICY_INIT;
    ckd_error err = {0};
    policy.keep_last = 1;
    policy.undo_s = undo_s;
    ckd_status status = scene_open(&store, dir, CKD_OPEN_CREATE, &err);
    for (uint64_t i = 0; i < count && status == CKD_OK; i++) {
        scene s = scene_of(i);
        s.base = true;
        status = scene_save(NULL, store, &s, &err);
    }
    policy.automatic = 1;
    if (status == CKD_OK) {
        status = ckd_store_set_policy(store, &policy, &err);
    }
    ckd_store_close(store);
    if (status != CKD_OK) {
        fail_msg("making a store: %s", err.message);
    }
}

static void check_undamaged(ckd_store *store) {
    ckd_verify_result *result;
    ckd_error err = {0};
    if (ckd_store_verify(&result, store, NULL, &err) != CKD_OK) {
        fail_msg("verify: %s (%s)", err.message, err.file);
    }
    if (result->damage_count) {
        const ckd_damage *d = result->damage;
        fail_msg("verify: %s at %llu, tensor '%s': %s", d->file, (unsigned long long)d->offset, d->tensor,
                 d->what);
    }
    ckd_verify_result_free(result);
}

void scene_trash(const char *dir, uint64_t first, uint64_t count) {
    ckd_store *store;
    ckd_id ids[16];
    ckd_delete_options o = CKD_DELETE_OPTIONS_INIT;
    o.undo_s = 3600;
    assert_int_equal(scene_open(&store, dir, CKD_OPEN_WRITE, NULL), CKD_OK);
    for (uint64_t i = 0; i < count; i++) {
        ckd_checkpoint c;
        assert_int_equal(ckd_store_find(&c, store, SCENE_RUN, first + i, NULL), CKD_OK);
        ids[i] = c.id;
    }
    assert_int_equal(ckd_store_delete(store, ids, count, &o, NULL), CKD_OK);
    ckd_store_close(store);
}

void scene_check(ckd_store *store, uint64_t first, uint64_t count) {
    for (uint64_t i = 0; i < count; i++) {
        scene s = scene_of(first + i);
        ckd_error err = {0};
        if (scene_load(store, &s, &err) != CKD_OK) {
            fail_msg("step %llu: %s (%s)", (unsigned long long)s.step, err.message, err.file);
        }
    }
    check_undamaged(store);
}

/* ---- directories ---- */

unsigned char *read_whole_file(const char *path, size_t *size) {
    FILE *f = fopen(path, "rb");
    assert_non_null(f);
    assert_int_equal(fseek(f, 0, SEEK_END), 0);
    long end = ftell(f);
    assert_true(end >= 0);
    rewind(f);
    unsigned char *data = malloc((size_t)end + 1);
    assert_non_null(data);
    assert_int_equal(fread(data, 1, (size_t)end, f), (size_t)end);
    fclose(f);
    *size = (size_t)end;
    return data;
}

void write_whole_file(const char *path, const void *data, size_t size) {
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(size ? fwrite(data, 1, size, f) : 0, size);
    assert_int_equal(fclose(f), 0);
}

static void describe_below(bytes *out, const char *path, const char *shown) {
    dir_list list;
    assert_int_equal(dir_list_read(&list, path, NULL), CKD_OK);
    for (size_t i = 0; i < list.count; i++) {
        char below[2048], name[1024], line[1400];
        struct stat st;
        snprintf(below, sizeof(below), "%s/%s", path, list.names[i]);
        snprintf(name, sizeof(name), "%s/%s", shown, list.names[i]);
        assert_int_equal(lstat(below, &st), 0);
        uint64_t content = 0;
        if (S_ISREG(st.st_mode)) {
            size_t size;
            unsigned char *data = read_whole_file(below, &size);
            content = hash64(data, size);
            free(data);
        }
        int n = snprintf(line, sizeof(line), "%s %o %lld %016llx %lld.%09ld\n", name, (unsigned)st.st_mode,
                         S_ISREG(st.st_mode) ? (long long)st.st_size : 0, (unsigned long long)content,
                         (long long)st.st_mtim.tv_sec, st.st_mtim.tv_nsec);
        bytes_put(out, line, (size_t)n);
        if (S_ISDIR(st.st_mode)) {
            describe_below(out, below, name);
        }
    }
    dir_list_free(&list);
}

char *tree_describe(const char *path) {
    bytes out = {0};
    describe_below(&out, path, "");
    bytes_put_u8(&out, 0);
    assert_false(out.failed);
    return (char *)out.data;
}

void tree_copy(const char *from, const char *to) {
    dir_list list;
    assert_int_equal(dir_list_read(&list, from, NULL), CKD_OK);
    assert_int_equal(mkdir(to, 0777), 0);
    for (size_t i = 0; i < list.count; i++) {
        char source[2048], target[2048];
        struct stat st;
        snprintf(source, sizeof(source), "%s/%s", from, list.names[i]);
        snprintf(target, sizeof(target), "%s/%s", to, list.names[i]);
        assert_int_equal(lstat(source, &st), 0);
        if (S_ISDIR(st.st_mode)) {
            tree_copy(source, target);
        } else {
            size_t size;
            unsigned char *data = read_whole_file(source, &size);
            write_whole_file(target, data, size);
            free(data);
        }
    }
    dir_list_free(&list);
}

/* ---- leftovers ---- */

static bool manifests_name(const char *dir, const ckd_id *file) {
    dir_list list;
    bool found = false;
    assert_int_equal(dir_list_read(&list, store_path_of(dir, DIR_MANIFESTS), NULL), CKD_OK);
    for (size_t i = 0; i < list.count && !found; i++) {
        char path[1024];
        manifest m;
        size_t size;
        snprintf(path, sizeof(path), "%s/%s", store_path_of(dir, DIR_MANIFESTS), list.names[i]);
        unsigned char *data = read_whole_file(path, &size);
        assert_int_equal(manifest_decode(&m, NULL, data, size, path, NULL), CKD_OK);
        for (size_t k = 0; k < m.file_count; k++) {
            found = found || memcmp(&m.files[k].id, file, sizeof(*file)) == 0;
        }
        manifest_free(&m);
        free(data);
    }
    dir_list_free(&list);
    return found;
}

static void check_no_leftover(const char *dir, const char *folder) {
    dir_list list;
    bool chunks = strcmp(folder, DIR_CHUNKS) == 0, ranks = strcmp(folder, DIR_RANKS) == 0;
    bool empty = ranks || strcmp(folder, DIR_INTENTS) == 0;
    ckd_status status = dir_list_read(&list, store_path_of(dir, folder), NULL);
    /* data/r exists only if ranks saved together. */
    assert_int_equal(status, ranks && status == CKD_E_NOT_FOUND ? status : CKD_OK);
    for (size_t i = 0; i < list.count; i++) {
        const char *name = list.names[i];
        ckd_id id;
        bool stray = empty || strstr(name, ".tmp") ||
                     (chunks && (strlen(name) != 36 || strcmp(name + 32, ".ckd") != 0 ||
                                 !id_parse(&id, name) || !manifests_name(dir, &id)));
        if (stray) {
            fail_msg("left over: %s/%s", folder, name);
        }
    }
    dir_list_free(&list);
}

void store_check_files(const char *dir) {
    static const char *const folders[] = {"data",         DIR_CHUNKS,       DIR_MANIFESTS, DIR_INTENTS,
                                          DIR_TOMBSTONES, DIR_MATERIALIZED, DIR_RANKS,     DIR_SETTINGS};
    for (size_t i = 0; i < sizeof(folders) / sizeof(folders[0]); i++) {
        check_no_leftover(dir, folders[i]);
    }
}

void store_check_clean(const char *dir) {
    store_check_files(dir);
    if (file_exists(store_path_of(dir, FILE_CATALOG "-journal"))) {
        fail_msg("left over: the catalog's journal");
    }
}

/* ---- comparing ---- */

static void check_equal(const ckd_checkpoint *a, const ckd_checkpoint *b) {
    assert_memory_equal(&a->id, &b->id, sizeof(ckd_id));
    assert_memory_equal(&a->parent, &b->parent, sizeof(ckd_id));
    assert_memory_equal(&a->resumed_from, &b->resumed_from, sizeof(ckd_id));
    assert_string_equal(a->run, b->run);
    assert_string_equal(a->metric_name, b->metric_name);
    assert_int_equal(a->step, b->step);
    assert_int_equal(a->generation, b->generation);
    assert_int_equal(a->kind, b->kind);
    assert_int_equal(a->fidelity, b->fidelity);
    assert_int_equal(a->lossy_resumes, b->lossy_resumes);
    assert_int_equal(a->depth, b->depth);
    assert_int_equal(a->world, b->world);
    assert_int_equal(a->tensors, b->tensors);
    assert_int_equal(a->raw_bytes, b->raw_bytes);
    assert_int_equal(a->stored_bytes, b->stored_bytes);
    assert_int_equal(a->created_ns, b->created_ns);
    assert_memory_equal(&a->load_cost, &b->load_cost, sizeof(double));
    assert_true(memcmp(&a->metric, &b->metric, sizeof(double)) == 0 ||
                (a->metric != a->metric && b->metric != b->metric));
}

void lists_check_equal(const ckd_checkpoint_list *a, const ckd_checkpoint_list *b) {
    assert_int_equal(a->count, b->count);
    for (size_t i = 0; i < a->count; i++) {
        check_equal(&a->items[i], &b->items[i]);
    }
}

bool under_sanitizer(void) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    return true;
#else
    return false;
#endif
}
