/* base/error: what the functions write to a ckd_error. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/bytes.h"
#include "base/error.h"

static ckd_error dirty(void) {
    ckd_error err;
    memset(&err, 'Z', sizeof(err));
    return err;
}

static void test_set_starts_fresh(void **state) {
    (void)state;
    ckd_error err = dirty();
    assert_int_equal(err_set(&err, CKD_E_INVALID, "level %d of %s", 99, "zstd"), CKD_E_INVALID);
    assert_int_equal(err.status, CKD_E_INVALID);
    assert_string_equal(err.message, "level 99 of zstd");
    assert_int_equal(err.sys_errno, 0);
    assert_true(err.offset == CKD_NO_OFFSET);
    assert_string_equal(err.tensor, "");
    assert_string_equal(err.file, "");
}

static void test_system_errors(void **state) {
    (void)state;
    static const struct {
        int errnum;
        ckd_status status;
    } map[] = {
        {ENOSPC, CKD_E_NOSPACE},   {EDQUOT, CKD_E_NOSPACE},  {EROFS, CKD_E_READ_ONLY},
        {EACCES, CKD_E_READ_ONLY}, {EPERM, CKD_E_READ_ONLY}, {ENOENT, CKD_E_NOT_FOUND},
        {EEXIST, CKD_E_EXISTS},    {ENOMEM, CKD_E_NOMEM},    {EIO, CKD_E_IO},
        {EMFILE, CKD_E_IO},        {123456, CKD_E_IO},
    };
    for (size_t i = 0; i < sizeof(map) / sizeof(*map); i++) {
        ckd_error err = dirty();
        assert_int_equal(err_sys(&err, map[i].errnum, "data/a", "cannot write %s", "data/a"), map[i].status);
        assert_int_equal(err.status, map[i].status);
        assert_int_equal(err.sys_errno, map[i].errnum);
        assert_string_equal(err.file, "data/a");
        assert_string_equal(err.tensor, "");
        assert_true(err.offset == CKD_NO_OFFSET);
        assert_int_equal(strncmp(err.message, "cannot write data/a: ", 21), 0);
        assert_true(strlen(err.message) > 21);
        assert_int_equal(err_sys(NULL, map[i].errnum, NULL, "x"), map[i].status);
    }
    ckd_error err = dirty();
    err_sys(&err, ENOSPC, NULL, "cannot write");
    assert_string_equal(err.message, "cannot write: No space left on device");
    assert_string_equal(err.file, "");
}

static void test_where(void **state) {
    (void)state;
    ckd_error err = dirty();
    assert_int_equal(err_corrupt(&err, "data/c", 4096, "block %d", 7), CKD_E_CORRUPT);
    assert_int_equal(err.status, CKD_E_CORRUPT);
    assert_true(err.offset == 4096);
    assert_string_equal(err.file, "data/c");
    assert_string_equal(err.message, "block 7");
    assert_int_equal(err_in_tensor(&err, CKD_E_CORRUPT, "h.0.w"), CKD_E_CORRUPT);
    assert_int_equal(err_in_tensor(&err, CKD_E_CORRUPT, "other"), CKD_E_CORRUPT);
    assert_int_equal(err_in_file(&err, CKD_E_CORRUPT, "other"), CKD_E_CORRUPT);
    assert_string_equal(err.tensor, "h.0.w");
    assert_string_equal(err.file, "data/c");
    assert_string_equal(err.message, "block 7");

    err = dirty();
    assert_int_equal(err_unsupported(&err, NULL, CKD_NO_OFFSET, "version %u", 9u), CKD_E_UNSUPPORTED);
    assert_int_equal(err.status, CKD_E_UNSUPPORTED);
    assert_string_equal(err.file, "");
    err_in_file(&err, CKD_E_UNSUPPORTED, "data/d");
    assert_string_equal(err.file, "data/d");

    ckd_error untouched = {.message = "of an earlier call"}, before = untouched;
    assert_int_equal(err_in_file(&untouched, CKD_OK, "f"), CKD_OK);
    assert_int_equal(err_in_tensor(&untouched, CKD_OK, "t"), CKD_OK);
    assert_memory_equal(&untouched, &before, sizeof(before));
}

static void test_without_error(void **state) {
    (void)state;
    assert_int_equal(err_set(NULL, CKD_E_STATE, "x %d", 1), CKD_E_STATE);
    assert_int_equal(err_nomem(NULL, 5, "x"), CKD_E_NOMEM);
    assert_int_equal(err_corrupt(NULL, "f", 1, "x"), CKD_E_CORRUPT);
    assert_int_equal(err_unsupported(NULL, "f", 1, "x"), CKD_E_UNSUPPORTED);
    assert_int_equal(err_in_tensor(NULL, CKD_E_BUSY, "x"), CKD_E_BUSY);
    assert_int_equal(err_in_file(NULL, CKD_E_BUSY, "x"), CKD_E_BUSY);
    ckd_error err = dirty();
    assert_int_equal(err_nomem(&err, 12345, "a block"), CKD_E_NOMEM);
    assert_string_equal(err.message, "out of memory for 12345 bytes of a block");
}

static void test_arguments_inside_the_error(void **state) {
    (void)state;
    ckd_error err = dirty();
    err_corrupt(&err, "data/c", 1, "bad root hash");
    err_in_tensor(&err, CKD_E_CORRUPT, "h.0.w");
    err_corrupt(&err, err.file, err.offset, "%s in %s of %s", err.message, err.tensor, err.file);
    assert_string_equal(err.message, "bad root hash in h.0.w of data/c");
    assert_string_equal(err.file, "data/c");
    err_sys(&err, EIO, err.file, "%s again", err.message);
    assert_string_equal(err.message, "bad root hash in h.0.w of data/c again: Input/output error");
    assert_string_equal(err.file, "data/c");
}

/*
 * Texts of every length around the limits, with characters of one to four bytes. They are cut to valid UTF-8
 * that ends with NUL.
 */
static void test_cut_between_characters(void **state) {
    (void)state;
    static const char *const characters[] = {"a", "\xc3\xa9", "\xe2\x82\xac", "\xf0\x9f\x98\x80"};
    for (size_t c = 0; c < 4; c++) {
        for (size_t size = 240; size < 540; size++) {
            char text[600] = "";
            size_t length = size % (c + 1); /* so that the characters begin at every phase */
            memset(text, '.', length);
            for (; length + c + 1 <= size; length += c + 1) {
                memcpy(text + length, characters[c], c + 1);
            }
            text[length] = '\0';
            ckd_error err = dirty();
            err_sys(&err, EIO, text, "%s", text);
            err_in_tensor(&err, CKD_E_IO, text);
            size_t message = strlen(err.message), file = strlen(err.file), tensor = strlen(err.tensor);
            assert_true(utf8_valid(err.message, message) && utf8_valid(err.file, file) &&
                        utf8_valid(err.tensor, tensor));
            static const char reason[] = ": Input/output error";
            assert_string_equal(err.message + message - strlen(reason), reason);
            assert_memory_equal(err.message, text, message - strlen(reason));
            assert_memory_equal(err.tensor, text, tensor);
            if (length < sizeof(err.file)) {
                assert_string_equal(err.file, text);
            } else {
                assert_true(file > sizeof(err.file) - 1 - 4);
                assert_memory_equal(err.file, "...", 3);
                assert_string_equal(err.file + 3, text + length - (file - 3));
            }
            assert_true(tensor == (length < 256 ? length : tensor) && (length < 256 || tensor > 255 - 4));
            err_set(&err, CKD_E_INVALID, "%s", text);
            assert_true(utf8_valid(err.message, strlen(err.message)));
            assert_true(strlen(err.message) > (length < 512 ? length - 1 : 511 - 4));
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_set_starts_fresh),
        cmocka_unit_test(test_system_errors),
        cmocka_unit_test(test_where),
        cmocka_unit_test(test_without_error),
        cmocka_unit_test(test_arguments_inside_the_error),
        cmocka_unit_test(test_cut_between_characters),
    };
    return cmocka_run_group_tests_name("base_error", tests, NULL, NULL);
}
