/*
 * The command's reader and writer of safetensors. Every rule of the format is broken once. Each error names
 * the file, the tensor and the problem. Valid files are read and written byte for byte.
 */
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <cmocka.h>

#include "cli/files/files.h"

#define ENTRY(dtype, shape, begin, end) \
    "{\"dtype\":\"" dtype "\",\"shape\":[" shape "],\"data_offsets\":[" #begin "," #end "]}"

typedef struct bad_header {
    const char *json;
    uint64_t data_size;
    ckd_status status;
    const char *says, *tensor;
} bad_header;

static const bad_header bad_headers[] = {
    {"", 0, CKD_E_CORRUPT, "does not begin with '{'", ""},
    {" {}", 0, CKD_E_CORRUPT, "does not begin with '{'", ""},
    {"[]", 0, CKD_E_CORRUPT, "does not begin with '{'", ""},
    {"{", 0, CKD_E_CORRUPT, "not valid JSON", ""},
    {"{}x", 0, CKD_E_CORRUPT, "not valid JSON", ""},
    {"{\"a\":1,\"a\":1}", 0, CKD_E_CORRUPT, "duplicate", ""},
    {"{\"__metadata__\":{\"k\":\"1\",\"k\":\"2\"}}", 0, CKD_E_CORRUPT, "duplicate", ""},
    {"{\"a\":{\"dtype\":\"U8\",\"dtype\":\"I8\",\"shape\":[],\"data_offsets\":[0,1]}}", 1, CKD_E_CORRUPT,
     "duplicate", ""},
    {"{\"\xff\":1}", 0, CKD_E_CORRUPT, "unable to decode", ""},
    {"{\"a\\u0000b\":1}", 0, CKD_E_CORRUPT, "not valid JSON", ""},
    {"{\"a\":[1e400]}", 0, CKD_E_CORRUPT, "not valid JSON", ""},
    {"{\"__metadata__\":[]}", 0, CKD_E_CORRUPT, "__metadata__ is not a JSON object", ""},
    {"{\"__metadata__\":{\"epoch\":3}}", 0, CKD_E_CORRUPT, "under the key 'epoch'", ""},
    {"{\"\":" ENTRY("U8", "", 0, 1) "}", 1, CKD_E_UNSUPPORTED, "name has 0 bytes", ""},
    {"{\"a\":7}", 0, CKD_E_CORRUPT, "not a JSON object", "a"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[0,1],\"scale\":2}}", 1, CKD_E_UNSUPPORTED,
     "'scale'", "a"},
    {"{\"a\":{\"shape\":[],\"data_offsets\":[0,1]}}", 1, CKD_E_CORRUPT, "dtype", "a"},
    {"{\"a\":{\"dtype\":3,\"shape\":[],\"data_offsets\":[0,1]}}", 1, CKD_E_CORRUPT, "dtype", "a"},
    {"{\"odd.name\":" ENTRY("F4", "2", 0, 1) "}", 1, CKD_E_UNSUPPORTED, "F4", "odd.name"},
    {"{\"a\":" ENTRY("f32", "1", 0, 4) "}", 4, CKD_E_UNSUPPORTED, "f32", "a"},
    {"{\"a\":{\"dtype\":\"U8\",\"data_offsets\":[0,1]}}", 1, CKD_E_CORRUPT, "shape", "a"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":1,\"data_offsets\":[0,1]}}", 1, CKD_E_CORRUPT, "shape", "a"},
    {"{\"a\":" ENTRY("U8", "-1", 0, 1) "}", 1, CKD_E_CORRUPT, "shape", "a"},
    {"{\"a\":" ENTRY("U8", "1.0", 0, 1) "}", 1, CKD_E_CORRUPT, "shape", "a"},
    {"{\"a\":" ENTRY("U8", "\"1\"", 0, 1) "}", 1, CKD_E_CORRUPT, "shape", "a"},
    {"{\"a\":" ENTRY("U8", "18446744073709551617", 0, 1) "}", 1, CKD_E_CORRUPT, "not valid JSON", ""},
    {"{\"a\":" ENTRY("U8", "1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1", 0, 1) "}", 1, CKD_E_UNSUPPORTED,
     "17 dimensions", "a"},
    {"{\"a\":" ENTRY("U8", "1099511627777", 0, 1) "}", 1, CKD_E_UNSUPPORTED, "2^40", "a"},
    {"{\"a\":" ENTRY("U8", "4294967296,4294967296", 0, 0) "}", 0, CKD_E_UNSUPPORTED, "2^40", "a"},
    {"{\"a\":" ENTRY("U8", "0,4294967296,4294967296", 0, 0) "}", 0, CKD_E_UNSUPPORTED, "2^40", "a"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1]}}", 1, CKD_E_CORRUPT, "data_offsets", "a"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0]}}", 1, CKD_E_CORRUPT, "data_offsets", "a"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1,2]}}", 1, CKD_E_CORRUPT, "data_offsets",
     "a"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1.5]}}", 1, CKD_E_CORRUPT, "data_offsets",
     "a"},
    {"{\"a\":" ENTRY("U8", "1", -1, 0) "}", 1, CKD_E_CORRUPT, "data_offsets", "a"},
    {"{\"a\":" ENTRY("U8", "1", 1, 0) "}", 1, CKD_E_CORRUPT, "before they begin", "a"},
    {"{\"a\":" ENTRY("U8", "2", 0, 2) "}", 1, CKD_E_CORRUPT, "only 1 bytes of data", "a"},
    {"{\"a\":" ENTRY("U8", "1", 9223372036854775806, 9223372036854775807) "}", 1, CKD_E_CORRUPT,
     "only 1 bytes", "a"},
    {"{\"a\":" ENTRY("F32", "2", 0, 4) "}", 4, CKD_E_CORRUPT, "cover 4 bytes, but its shape and dtype need 8",
     "a"},
    {"{\"a\":" ENTRY("F32", "0", 0, 4) "}", 4, CKD_E_CORRUPT, "need 0", "a"},
    {"{\"a\":" ENTRY("U8", "2", 0, 2) ",\"b\":" ENTRY("U8", "2", 1, 3) "}", 3, CKD_E_CORRUPT,
     "'a' and 'b' overlap", "b"},
    {"{\"a\":" ENTRY("U8", "2", 0, 2) ",\"b\":" ENTRY("U8", "2", 0, 2) "}", 2, CKD_E_CORRUPT, "overlap", "b"},
    {"{\"a\":" ENTRY("U8", "3", 0, 3) ",\"b\":" ENTRY("U8", "0", 1, 1) "}", 3, CKD_E_CORRUPT, "overlap", "b"},
    {"{\"a\":" ENTRY("U8", "1", 0, 1) ",\"b\":" ENTRY("U8", "1", 2, 3) "}", 3, CKD_E_CORRUPT,
     "a hole: bytes 1 to 2", "b"},
    {"{\"a\":" ENTRY("U8", "1", 1, 2) "}", 2, CKD_E_CORRUPT, "a hole: bytes 0 to 1", "a"},
    {"{\"a\":" ENTRY("U8", "1", 0, 1) "}", 3, CKD_E_CORRUPT, "2 bytes after the last tensor", ""},
    {"{}", 1, CKD_E_CORRUPT, "1 bytes after the last tensor", ""},
};

static void test_each_rule_of_the_header(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof(bad_headers) / sizeof(bad_headers[0]); i++) {
        const bad_header *bad = &bad_headers[i];
        safetensors_header header;
        ckd_error err = {0};
        ckd_status status =
            safetensors_parse(&header, bad->json, strlen(bad->json), bad->data_size, "bad.safetensors", &err);
        if (status != bad->status || !strstr(err.message, bad->says) || strcmp(err.tensor, bad->tensor) != 0)
            fail_msg("%s: %s, '%s', tensor '%s'", bad->json, ckd_status_name(status), err.message,
                     err.tensor);
        assert_int_equal(err.status, status);
        assert_string_equal(err.file, "bad.safetensors");
        assert_null(header.tensors);
        assert_int_equal(header.count, 0);
        assert_null(header.metadata);
    }
}

static void test_names_have_a_limit(void **state) {
    (void)state;
    for (int length = CKD_NAME_MAX; length <= CKD_NAME_MAX + 1; length++) {
        char *json;
        assert_true(asprintf(&json, "{\"%0*d\":" ENTRY("U8", "", 0, 1) "}", length, 0) > 0);
        safetensors_header header;
        ckd_error err = {0};
        ckd_status status = safetensors_parse(&header, json, strlen(json), 1, "f", &err);
        assert_int_equal(status, length <= CKD_NAME_MAX ? CKD_OK : CKD_E_UNSUPPORTED);
        safetensors_header_free(&header);
        free(json);
    }
}

/* A JSON error has its offset in the file. */
static void test_offset_of_a_json_error(void **state) {
    (void)state;
    static const char json[] = "{\"a\":\n  oops}";
    safetensors_header header;
    ckd_error err = {0};
    assert_int_equal(safetensors_parse(&header, json, strlen(json), 0, "f", &err), CKD_E_CORRUPT);
    assert_in_range(err.offset, 8 + 7, 8 + 13);
}

static void test_a_good_header(void **state) {
    (void)state;
    static const char json[] = "{\"late\":" ENTRY(
        "BF16", "2,1", 10, 14) ",\"__metadata__\":{\"k\":\"v\"}"
                               ",\"empty\":" ENTRY("F64", "3,0", 10, 10) ",\"scalar\":" ENTRY(
                                   "I64", "", 0, 8) ",\"\xc3\xa9\":" ENTRY("BOOL",
                                                                           "1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,2",
                                                                           8, 10) "}   ";
    static const char *const names[] = {"scalar", "\xc3\xa9", "empty", "late"};
    static const uint64_t elements[] = {1, 2, 0, 2}, begins[] = {0, 8, 10, 10}, dims[] = {0, 16, 2, 2};
    static const ckd_dtype dtypes[] = {CKD_I64, CKD_BOOL, CKD_F64, CKD_BF16};
    safetensors_header header;
    ckd_error err = {0};
    assert_int_equal(safetensors_parse(&header, json, strlen(json), 14, "f", &err), CKD_OK);
    assert_int_equal(header.count, 4);
    for (size_t i = 0; i < 4; i++) {
        assert_string_equal(header.tensors[i].name, names[i]);
        assert_int_equal(header.tensors[i].dtype, dtypes[i]);
        assert_int_equal(header.tensors[i].ndim, dims[i]);
        assert_int_equal(header.tensors[i].elements, elements[i]);
        assert_int_equal(header.tensors[i].begin, begins[i]);
        assert_int_equal(header.tensors[i].size, elements[i] * ckd_dtype_size(dtypes[i]));
    }
    assert_int_equal(header.tensors[2].shape[0], 3);
    assert_int_equal(header.tensors[2].shape[1], 0);
    assert_string_equal(json_string_value(json_object_get(header.metadata, "k")), "v");
    safetensors_header_free(&header);
}

static void test_every_dtype_has_one_name(void **state) {
    (void)state;
    for (int dtype = CKD_F64; dtype <= CKD_BOOL; dtype++) {
        const char *name = safetensors_dtype_name((ckd_dtype)dtype);
        assert_non_null(name);
        assert_int_equal(safetensors_dtype(name), dtype);
    }
    assert_null(safetensors_dtype_name(CKD_DTYPE_NONE));
    assert_null(safetensors_dtype_name((ckd_dtype)(CKD_BOOL + 1)));
    assert_int_equal(safetensors_dtype("F8_E8M0"), CKD_DTYPE_NONE);
}

/* ------------------------------------------------------------------------------------------------------- files */

typedef struct fixture {
    char folder[64], path[96];
} fixture;

static int make_folder(void **state) {
    static fixture f;
    const char *tmp = getenv("TMPDIR");
    snprintf(f.folder, sizeof(f.folder), "%s/st-XXXXXX", tmp && strlen(tmp) < 40 ? tmp : "/tmp");
    if (!mkdtemp(f.folder))
        return -1;
    snprintf(f.path, sizeof(f.path), "%s/x.safetensors", f.folder);
    *state = &f;
    return 0;
}

static int remove_folder(void **state) {
    fixture *f = *state;
    unlink(f->path);
    return rmdir(f->folder);
}

/* Writes a file with any header length. */
static void write_file(const fixture *f, uint64_t header_length, const char *rest, size_t rest_size) {
    FILE *file = fopen(f->path, "wb");
    assert_non_null(file);
    for (int i = 0; i < 8; i++)
        fputc((int)(header_length >> (8 * i) & 255), file);
    assert_int_equal(fwrite(rest, 1, rest_size, file), rest_size);
    assert_int_equal(fclose(file), 0);
}

static void assert_open_fails(const fixture *f, ckd_status status, const char *says) {
    safetensors_file *file;
    ckd_error err = {0};
    assert_int_equal(safetensors_open(&file, f->path, &err), status);
    assert_null(file);
    if (!strstr(err.message, says))
        fail_msg("'%s' does not say '%s'", err.message, says);
    assert_string_equal(err.file, f->path);
}

static void test_header_length(void **state) {
    fixture *f = *state;
    assert_open_fails(f, CKD_E_NOT_FOUND, strerror(ENOENT));
    write_file(f, 3, "{}", 2);
    assert_open_fails(f, CKD_E_CORRUPT, "does not fit");
    write_file(f, UINT64_MAX, "{}", 2);
    assert_open_fails(f, CKD_E_CORRUPT, "limit");
    write_file(f, SAFETENSORS_HEADER_MAX + 1, "{}", 2);
    assert_open_fails(f, CKD_E_CORRUPT, "limit");
    write_file(f, SAFETENSORS_HEADER_MAX, "{}", 2);
    assert_open_fails(f, CKD_E_CORRUPT, "does not fit");
    write_file(f, 0, "", 0);
    assert_open_fails(f, CKD_E_CORRUPT, "not a safetensors file");
    write_file(f, 0, "{}", 2);
    assert_open_fails(f, CKD_E_CORRUPT, "not a safetensors file");
    assert_int_equal(truncate(f->path, 7), 0);
    assert_open_fails(f, CKD_E_CORRUPT, "too short");
    write_file(f, 2, "{}", 2);
    safetensors_file *file;
    assert_int_equal(safetensors_open(&file, f->path, NULL), CKD_OK);
    safetensors_close(file);
}

static void test_a_pipe_without_a_writer(void **state) {
    fixture *f = *state;
    assert_int_equal(mkfifo(f->path, 0600), 0);
    assert_open_fails(f, CKD_E_CORRUPT, "too short"); /* no process writes to it */
}

static safetensors_file *open_small(const fixture *f) {
    static const char text[] = "{\"a\":" ENTRY("U16", "3", 0, 6) "}abcdef";
    write_file(f, strlen(text) - 6, text, strlen(text));
    safetensors_file *file;
    assert_int_equal(safetensors_open(&file, f->path, NULL), CKD_OK);
    return file;
}

static void test_reads_slices(void **state) {
    safetensors_file *file = open_small(*state);
    const safetensors_tensor *a = &file->header.tensors[0];
    char to[7] = {0};
    ckd_error err = {0};
    assert_int_equal(safetensors_read(file, a, 0, 3, to, &err), CKD_OK);
    assert_string_equal(to, "abcdef");
    memset(to, 0, sizeof(to));
    assert_int_equal(safetensors_read(file, a, 1, 1, to, &err), CKD_OK);
    assert_string_equal(to, "cd");
    assert_int_equal(safetensors_read(file, a, 3, 0, to, &err), CKD_OK);
    assert_int_equal(safetensors_read(file, a, 2, 2, to, &err), CKD_E_INVALID);
    assert_int_equal(safetensors_read(file, a, UINT64_MAX, 2, to, &err), CKD_E_INVALID);
    assert_int_equal(safetensors_check_unchanged(file, &err), CKD_OK);
    safetensors_close(file);
}

static void test_a_file_that_shrinks(void **state) {
    fixture *f = *state;
    safetensors_file *file = open_small(f);
    char to[7];
    ckd_error err = {0};
    assert_int_equal(truncate(f->path, (off_t)file->size - 1), 0);
    assert_int_equal(safetensors_read(file, &file->header.tensors[0], 0, 3, to, &err), CKD_E_IO);
    assert_non_null(strstr(err.message, "shorter"));
    assert_string_equal(err.tensor, "a");
    assert_int_equal(err.offset, file->size - 1);
    assert_int_equal(safetensors_check_unchanged(file, &err), CKD_E_IO);
    safetensors_close(file);
}

static void test_a_file_that_is_written_to(void **state) {
    fixture *f = *state;
    safetensors_file *file = open_small(f);
    struct timespec later[2] = {file->modified, file->modified};
    later[1].tv_nsec = (later[1].tv_nsec + 1) % 1000000000;
    assert_int_equal(utimensat(AT_FDCWD, f->path, later, 0), 0);
    ckd_error err = {0};
    assert_int_equal(safetensors_check_unchanged(file, &err), CKD_E_IO);
    assert_non_null(strstr(err.message, "written to"));
    safetensors_close(file);
}

/* ------------------------------------------------------------------------------------------------------- writer */

static void test_written_files_are_read(void **state) {
    fixture *f = *state;
    safetensors_tensor tensors[] = {
        {.name = "byte", .dtype = CKD_U8, .ndim = 1, .shape = {3}, .elements = 3},
        {.name = "double", .dtype = CKD_F64, .ndim = 0, .elements = 1},
        {.name = "half", .dtype = CKD_F16, .ndim = 2, .shape = {2, 1}, .elements = 2},
        {.name = "none", .dtype = CKD_F64, .ndim = 2, .shape = {0, 7}, .elements = 0},
        {.name = "q\"\\\n\xe2\x82\xac", .dtype = CKD_I8, .ndim = 1, .shape = {1}, .elements = 1},
    };
    static const char *const order[] = {"double", "none", "half", "byte", "q\"\\\n\xe2\x82\xac"};
    json_t *metadata = json_pack("{s:s, s:s}", "format", "pt", "\xc3\xa9", "\"");
    uint64_t data_size;
    char *header;
    size_t size;
    ckd_error err = {0};
    assert_int_equal(safetensors_arrange(&data_size, tensors, 5, &err), CKD_OK);
    assert_int_equal(data_size, 8 + 4 + 3 + 1);
    assert_int_equal(safetensors_format_header(&header, &size, tensors, 5, metadata, &err), CKD_OK);
    assert_int_equal(size % 8, 0);
    FILE *out = fopen(f->path, "wb");
    assert_non_null(out);
    assert_int_equal(fwrite(header, 1, size, out), size);
    assert_int_equal(fwrite("0123456789abcdef", 1, 16, out), 16);
    assert_int_equal(fclose(out), 0);
    safetensors_file *file;
    assert_int_equal(safetensors_open(&file, f->path, &err), CKD_OK);
    assert_int_equal(file->header.count, 5);
    uint64_t at = 0;
    for (size_t i = 0; i < 5; i++) {
        const safetensors_tensor *t = &file->header.tensors[i];
        assert_string_equal(t->name, order[i]);
        assert_int_equal(t->begin, at);
        assert_int_equal((file->data_begin + t->begin) % ckd_dtype_size(t->dtype), 0);
        at += t->size;
    }
    assert_true(json_equal(file->header.metadata, metadata));
    safetensors_close(file);
    json_decref(metadata);
    free(header);
}

static void test_arranging_keeps_the_order_within_a_size(void **state) {
    (void)state;
    safetensors_tensor tensors[64];
    char names[64][8];
    for (size_t i = 0; i < 64; i++) {
        snprintf(names[i], sizeof(names[i]), "%02zu", i);
        tensors[i] =
            (safetensors_tensor){.name = names[i], .dtype = i % 2 ? CKD_F32 : CKD_I16, .elements = 1};
    }
    uint64_t data_size;
    ckd_error err = {0};
    assert_int_equal(safetensors_arrange(&data_size, tensors, 64, &err), CKD_OK);
    assert_int_equal(data_size, 32 * 4 + 32 * 2);
    for (size_t i = 0; i < 64; i++) {
        char expected[8];
        snprintf(expected, sizeof(expected), "%02zu", i < 32 ? 2 * i + 1 : 2 * (i - 32));
        assert_string_equal(tensors[i].name, expected);
        assert_int_equal(tensors[i].begin, i < 32 ? 4 * i : 128 + 2 * (i - 32));
    }
}

static void test_what_cannot_be_written(void **state) {
    (void)state;
    uint64_t data_size;
    char *header;
    size_t size;
    ckd_error err = {0};
    safetensors_tensor taken = {.name = "__metadata__", .dtype = CKD_U8, .elements = 1};
    assert_int_equal(safetensors_format_header(&header, &size, &taken, 1, NULL, &err), CKD_E_UNSUPPORTED);
    assert_null(header);
    assert_string_equal(err.tensor, "__metadata__");
    safetensors_tensor huge[] = {{.name = "a", .dtype = CKD_F64, .elements = UINT64_C(1) << 59},
                                 {.name = "b", .dtype = CKD_F64, .elements = UINT64_C(1) << 59},
                                 {.name = "c", .dtype = CKD_F64, .elements = UINT64_C(1) << 60}};
    assert_int_equal(safetensors_arrange(&data_size, huge, 3, &err), CKD_E_UNSUPPORTED);
    assert_int_equal(data_size, 0);
}

static void test_metadata_text(void **state) {
    (void)state;
    json_t *metadata, *again;
    ckd_error err = {0};
    static const char text[] = "{\"b\":\"2\",\"a\":\"\\n\xc3\xa9\",\"\":\"\"}";
    assert_int_equal(safetensors_metadata_parse(&metadata, text, strlen(text), &err), CKD_OK);
    char *canonical = safetensors_metadata_text(metadata);
    assert_string_equal(canonical, "{\"\":\"\",\"a\":\"\\n\xc3\xa9\",\"b\":\"2\"}");
    assert_int_equal(safetensors_metadata_parse(&again, canonical, strlen(canonical), &err), CKD_OK);
    assert_true(json_equal(metadata, again));
    free(canonical);
    json_decref(metadata);
    json_decref(again);
    static const char *const bad[] = {"",    "[]", "{\"a\":1}", "{\"a\":\"1\",\"a\":\"1\"}", "{\"a\":\"1\"",
                                      "null"};
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        assert_int_equal(safetensors_metadata_parse(&metadata, bad[i], strlen(bad[i]), &err),
                         CKD_E_UNSUPPORTED);
        assert_null(metadata);
    }
}

#define WITH_FOLDER(test) cmocka_unit_test_setup_teardown(test, make_folder, remove_folder)

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_each_rule_of_the_header),
        cmocka_unit_test(test_names_have_a_limit),
        cmocka_unit_test(test_offset_of_a_json_error),
        cmocka_unit_test(test_a_good_header),
        cmocka_unit_test(test_every_dtype_has_one_name),
        WITH_FOLDER(test_header_length),
        WITH_FOLDER(test_a_pipe_without_a_writer),
        WITH_FOLDER(test_reads_slices),
        WITH_FOLDER(test_a_file_that_shrinks),
        WITH_FOLDER(test_a_file_that_is_written_to),
        WITH_FOLDER(test_written_files_are_read),
        cmocka_unit_test(test_arranging_keeps_the_order_within_a_size),
        cmocka_unit_test(test_what_cannot_be_written),
        cmocka_unit_test(test_metadata_text),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
