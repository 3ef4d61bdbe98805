/* How often a save asks for the free space of the disk. This program's statvfs answers instead of the system's. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/statvfs.h>

#include <cmocka.h>

#include "base/file.h"
#include "tests/support/checkpoints.h"
#include "tests/support/drift.h"
#include "tests/support/scratch.h"
#include "tests/support/stored.h"

enum { TENSORS = 400, N = 600 };

static atomic_uint asked;
static uint64_t available;

/* The library is compiled with 64-bit file offsets, which gives the function this name on Linux. */
int statvfs64(const char *restrict path, struct statvfs64 *restrict out);
int statvfs64(const char *restrict path, struct statvfs64 *restrict out) {
    (void)path;
    asked++;
    memset(out, 0, sizeof(*out));
    out->f_frsize = 1;
    out->f_blocks = UINT64_C(1) << 40;
    out->f_bavail = available;
    return 0;
}

static void save_tensors(ckd_store *store, uint64_t step) {
    ckd_save *save = begin_save(store, "run", step);
    for (unsigned i = 0; i < TENSORS; i++) {
        char name[32];
        const uint64_t count = N;
        float *values = random_values(CKD_F32, N, (unsigned)step * TENSORS + i);
        snprintf(name, sizeof(name), "t%u", i);
        add_tensor(save, name, CKD_F32, 1, &count, NULL, values);
        free(values);
    }
    commit_save(save);
}

/* With plenty of space it asks a few times, each second at most. With little space it asks for each block. */
static void test_questions(void **state) {
    const stored *f = *state;
    available = UINT64_C(1) << 40;
    if (dir_free_space("/") != available || asked != 1) {
        skip(); /* another system, where the function has another name */
    }
    save_tensors(f->store, 1);
    asked = 0;
    save_tensors(f->store, 2);
    assert_in_range(asked, 1,
                    TENSORS / 4); /* a second lasts long enough for a quarter of them on any machine */
    available = UINT64_C(100) << 20;
    asked = 0;
    save_tensors(f->store, 3);
    assert_in_range(asked, TENSORS, UINT32_MAX);
}

static int make_store(void **state) {
    *state = stored_make(2, 1);
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_questions)};
    scratch_begin();
    int failed = cmocka_run_group_tests(tests, make_store, stored_remove);
    scratch_end();
    return failed;
}
