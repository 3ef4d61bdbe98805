#include "tests/support/bundled.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>

#include <cmocka.h>

#include "base/file.h"
#include "codec/chunk.h"
#include "codec/note.h"
#include "engine/paths.h"

static void rewrite_file(note_file *file, const char *store_path) {
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
        void *payload = malloc(r.stored_size + 1);
        assert_int_equal(chunk_read_payload(c, &r, payload, NULL), CKD_OK);
        assert_int_equal(chunk_writer_append(w, &r, payload, NULL), CKD_OK);
        free(payload);
    }
    assert_int_equal(chunk_writer_finish(w, &file->root, &file->size, NULL), CKD_OK);
    chunk_close(c);
    assert_int_equal(file_remove(old.text, false, NULL), CKD_OK);
    file->id = identity.file;
}

static void rewrite_checkpoint(const char *store_path, const char *name) {
    bytes data = {0};
    manifest m;
    pathname old = path_of(store_path, DIR_MANIFESTS, name);
    assert_int_equal(file_read_all(&data, old.text, NOTE_MAX, NULL), CKD_OK);
    assert_int_equal(manifest_decode(&m, NULL, data.data, data.size, old.text, NULL), CKD_OK);
    ckd_checkpoint *c = &m.checkpoint;
    c->generation++;
    c->stored_bytes = 0;
    for (size_t i = 0; i < m.file_count; i++) {
        rewrite_file(&m.files[i], store_path);
        c->stored_bytes += m.files[i].size;
    }
    ckd_id store;
    memcpy(store.bytes, data.data + 16, sizeof(store.bytes)); /* of any note's envelope */
    bytes_clear(&data);
    manifest_encode(&data, &store, &m);
    assert_false(data.failed);
    pathname to = path_manifest(store_path, c->run, c->step, c->generation);
    pathname temporary = path_of(store_path, DIR_MANIFESTS, ".tmp-x");
    assert_int_equal(file_publish_bytes(to.text, temporary.text, data.data, data.size, NULL), CKD_OK);
    assert_int_equal(file_remove(old.text, false, NULL), CKD_OK);
    manifest_free(&m);
    bytes_free(&data);
}

void bundle_store(const char *store_path) {
    dir_list list;
    assert_int_equal(dir_list_read(&list, path_in(store_path, DIR_MANIFESTS).text, NULL), CKD_OK);
    assert_true(list.count > 0);
    for (size_t i = 0; i < list.count; i++) {
        rewrite_checkpoint(store_path, list.names[i]);
    }
    dir_list_free(&list);
}
