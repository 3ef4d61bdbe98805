/* A copy reads small records together: from the source, and again where they arrived. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/file.h"
#include "tests/support/checkpoints.h"
#include "tests/support/drift.h"
#include "tests/support/scratch.h"
#include "tests/support/tempdir.h"

enum { TENSORS = 1000, N = 2000 };

static atomic_uint reads;

static int count_reads(void *context, file_op op, const char *path) {
    (void)context;
    reads += op == FILE_OP_READ && (strstr(path, "/data/c/") != NULL || strstr(path, "/data/x/") != NULL);
    return 0;
}

static void test_reads(void **state) {
    char to_dir[4096];
    ckd_store *from = store_create(*state), *to;
    ckd_copy_options o = CKD_COPY_OPTIONS_INIT;
    const uint64_t count = N;
    float *values = random_values(CKD_F32, N + TENSORS, 1);
    ckd_save *save = begin_save(from, "run", 1);
    for (unsigned i = 0; i < TENSORS; i++) {
        char name[32];
        snprintf(name, sizeof(name), "t%u", i);
        add_tensor(save, name, CKD_F32, 1, &count, NULL, values + i);
    }
    commit_save(save);
    snprintf(to_dir, sizeof(to_dir), "%s/copy", (const char *)*state);
    assert_int_equal(ckd_store_open(&to, to_dir, CKD_OPEN_CREATE, NULL, NULL), CKD_OK);
    file_set_fault_hook(count_reads, NULL);
    assert_int_equal(ckd_copy(NULL, to, from, &o, NULL), CKD_OK);
    file_set_fault_hook(NULL, NULL);
    assert_in_range(reads, 1, TENSORS / 4);
    assert_int_equal(verify_damage(to), 0);
    free(values);
    ckd_store_close(to);
    ckd_store_close(from);
}

static int make_folder(void **state) {
    *state = tempdir_create();
    return 0;
}

static int remove_folder(void **state) {
    tempdir_remove(*state);
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_reads)};
    scratch_begin();
    int failed = cmocka_run_group_tests(tests, make_folder, remove_folder);
    scratch_end();
    return failed;
}
