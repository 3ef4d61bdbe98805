/*
 * Reads and writes small files in tests through base/file, with cmocka's assertions (include cmocka.h first).
 */
#ifndef TESTS_SUPPORT_SMALL_FILES_H
#define TESTS_SUPPORT_SMALL_FILES_H

#include "base/file.h"

static inline void write_small_file(const char *path, const void *data, size_t size) {
    file_writer *f;
    assert_int_equal(file_create(&f, path, 100, NULL), CKD_OK);
    assert_int_equal(file_append(f, data, size, NULL), CKD_OK);
    assert_int_equal(file_close(f, NULL), CKD_OK);
}

static inline void assert_content(const char *path, const void *want, size_t size) {
    bytes content = {0};
    assert_int_equal(file_read_all(&content, path, SIZE_MAX, NULL), CKD_OK);
    assert_int_equal(content.size, size);
    assert_memory_equal(content.data, want, size);
    bytes_free(&content);
}

#endif
