#include "tests/support/bundled.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>

#include <cmocka.h>

#include "base/file.h"
#include "codec/chunk/chunk.h"
#include "codec/metadata/metadata.h"
#include "engine/store/paths.h"
#include "engine/save/measures.h"

typedef enum rewriting { BUNDLED, MEASURED, MISMEASURED } rewriting;

bool shard_has_measures(size_t k) {
    return k % 5 != 3;
}

measures measures_of_shard(size_t k) {
    double n = (double)(k + 1);
    return (measures){.error_squares = n * 0x1p-10,
                      .value_squares = 8 + n,
                      .max_error = 0.01 * n,
                      .direction_change = k % 2 ? (double)NAN : 0x1p-6 * n,
                      .movement = 0.5,
                      .update_given = NAN,
                      .update = NAN,
                      .nonfinite = k % 3};
}

/* Adds the measures of each shard in two parts, and the shards in reverse order. */
static void add_measures(chunk_writer *w, const chunk *c) {
    save_measures m = {0};
    size_t shards = 0;
    for (size_t i = 0; i < c->record_count; i++) {
        shards += c->records[i].kind == RECORD_BLOCK && c->records[i].first == 0;
    }
    for (size_t i = c->record_count, k = shards; i-- > 0;) {
        const record *r = &c->records[i];
        if (r->kind != RECORD_BLOCK || r->first != 0 || !shard_has_measures(--k)) {
            continue;
        }
        measures all = measures_of_shard(k), first = all;
        first.error_squares = first.direction_change = (double)NAN;
        first.movement = 7;
        first.nonfinite = 0;
        const measures *const added[] = {&first, &all};
        for (int t = 0; t < 2; t++) {
            assert_int_equal(measures_add(&m, r->tensor->name, r->region, r->tensor->ndim, added[t], NULL),
                             CKD_OK);
        }
    }
    assert_int_equal(measures_write_all(&m, w, &c->records[0].tensor->checkpoint, NULL), CKD_OK);
    measures_free(&m);
}

static void add_wrong_measures(chunk_writer *w, const ckd_id *checkpoint) {
    record_tensor tensor = {.name = "measures", .checkpoint = *checkpoint, .role = CKD_ROLE_OTHER};
    ckd_region whole = {.kind = CKD_REGION_WHOLE};
    measures_entry e = {0, measures_of_shard(0)};
    bytes raw = {0};
    measures_encode(&raw, &e, 1);
    record r = {.kind = RECORD_MEASURES,
                .tensor = &tensor,
                .region = &whole,
                .raw_size = raw.size,
                .stored_size = raw.size,
                .content = content_hash("other bytes", 11)};
    assert_int_equal(chunk_writer_append(w, &r, raw.data, NULL), CKD_OK);
    bytes_free(&raw);
}

static void rewrite_file(file_ref *file, const char *store_path, rewriting how) {
    chunk *c;
    chunk_writer *w;
    pathname old = path_chunk(store_path, &file->id, "");
    assert_int_equal(chunk_open(&c, old.text, NULL), CKD_OK);
    chunk_identity identity = c->identity;
    assert_int_equal(ckd_id_new(&identity.file, NULL), CKD_OK);
    pathname new = path_chunk(store_path, &identity.file, "");
    assert_int_equal(chunk_writer_create(&w, new.text, &identity, NULL), CKD_OK);
    chunk_writer_gather(w);
    for (size_t i = 0; i < c->record_count; i++) {
        record r = c->records[i];
        if (how != BUNDLED && r.kind == RECORD_MEASURES) {
            continue; /* new measures are added below */
        }
        void *payload = malloc(r.stored_size + 1);
        assert_int_equal(chunk_read_payload(c, &r, payload, NULL), CKD_OK);
        assert_int_equal(chunk_writer_append(w, &r, payload, NULL), CKD_OK);
        free(payload);
    }
    if (how == MEASURED) {
        add_measures(w, c);
    } else if (how == MISMEASURED) {
        add_wrong_measures(w, &c->records[0].tensor->checkpoint);
    }
    assert_int_equal(chunk_writer_finish_durable(w, &file->root, &file->size, NULL), CKD_OK);
    chunk_close(c);
    assert_int_equal(file_remove(old.text, false, NULL), CKD_OK);
    file->id = identity.file;
}

/* New names of rewritten files. Later checkpoints name these files, too. */
typedef struct renaming {
    ckd_id from;
    file_ref to;
} renaming;
enum { RENAMED_MAX = 256 };
static renaming renamed[RENAMED_MAX];
static size_t renamed_count;

static void rewrite_once(file_ref *file, const char *store_path, rewriting how) {
    for (size_t i = 0; i < renamed_count; i++) {
        if (memcmp(&renamed[i].from, &file->id, sizeof(ckd_id)) == 0) {
            *file = renamed[i].to;
            return;
        }
    }
    assert_true(renamed_count < RENAMED_MAX);
    renaming *r = &renamed[renamed_count++];
    r->from = file->id;
    rewrite_file(file, store_path, how);
    r->to = *file;
}

static void rewrite_checkpoint(const char *store_path, const char *name, rewriting how) {
    bytes data = {0};
    manifest m;
    pathname old = path_of(store_path, DIR_MANIFESTS, name);
    assert_int_equal(file_read_all(&data, old.text, METADATA_MAX, NULL), CKD_OK);
    assert_int_equal(manifest_decode(&m, NULL, data.data, data.size, old.text, NULL), CKD_OK);
    ckd_checkpoint *c = &m.checkpoint;
    c->generation++;
    c->fidelity = how == BUNDLED ? c->fidelity : CKD_NEAR;
    c->stored_bytes = 0;
    for (size_t i = 0; i < m.file_count; i++) {
        rewrite_once(&m.files[i], store_path, how);
        c->stored_bytes += i < m.own_count ? m.files[i].size : 0;
    }
    ckd_id store;
    /* The envelope of any note has the store's id here. */
    memcpy(store.bytes, data.data + 16, sizeof(store.bytes));
    bytes_clear(&data);
    manifest_encode(&data, &store, &m);
    assert_false(data.failed);
    pathname to = path_manifest(store_path, c->run, c->step, c->generation);
    pathname temporary = path_of(store_path, DIR_MANIFESTS, ".tmp-x");
    assert_int_equal(file_create_durable(to.text, temporary.text, data.data, data.size, NULL), CKD_OK);
    assert_int_equal(file_remove(old.text, false, NULL), CKD_OK);
    manifest_free(&m);
    bytes_free(&data);
}

static void rewrite_store(const char *store_path, rewriting how) {
    dir_list list;
    assert_int_equal(dir_list_read(&list, path_in(store_path, DIR_MANIFESTS).text, NULL), CKD_OK);
    assert_true(list.count > 0);
    renamed_count = 0;
    for (size_t i = 0; i < list.count; i++) {
        rewrite_checkpoint(store_path, list.names[i], how);
    }
    dir_list_free(&list);
}

void bundle_store(const char *store_path) {
    rewrite_store(store_path, BUNDLED);
}

void measure_store(const char *store_path) {
    rewrite_store(store_path, MEASURED);
}

void mismeasure_store(const char *store_path) {
    rewrite_store(store_path, MISMEASURED);
}
