#include "tests/support/early.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "base/file.h"
#include "codec/metadata/metadata.h"
#include "engine/store/handle.h"
#include "tests/support/scenes.h"

static void make_early(const char *path, const ckd_id *store) {
    size_t size;
    manifest m;
    bytes b = {0};
    unsigned char *data = read_whole_file(path, &size);
    assert_int_equal(manifest_decode(&m, store, data, size, path, NULL), CKD_OK);
    m.own_only = true;
    m.file_count = m.own_count;
    manifest_encode(&b, store, &m);
    write_whole_file(path, b.data, b.size);
    bytes_free(&b);
    manifest_free(&m);
    free(data);
}

void early_store(const char *dir) {
    ckd_store *store;
    dir_list list;
    char folder[1024], path[1400];
    assert_int_equal(scene_open(&store, dir, CKD_OPEN_READ, NULL), CKD_OK);
    snprintf(folder, sizeof(folder), "%s", store_path_of(dir, DIR_MANIFESTS));
    assert_int_equal(dir_list_read(&list, folder, NULL), CKD_OK);
    for (size_t i = 0; i < list.count; i++) {
        snprintf(path, sizeof(path), "%s/%s", folder, list.names[i]);
        make_early(path, &store->id);
    }
    dir_list_free(&list);
    ckd_store_close(store);
}
