/* A verification of a large file finds the same with any number of threads. */
#include <dirent.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include <cmocka.h>

#include "base/file.h"
#include "tests/support/checkpoints.h"
#include "tests/support/drift.h"
#include "tests/support/scratch.h"
#include "tests/support/stored.h"
#include "tests/support/tempdir.h"

enum { COUNT = 6 << 20, TEXT = 1 << 16, RUNS = 4 };

/* The only chunk file. Returns its size. */
static long chunk_file(char path[4096], const char *dir) {
    char folder[2048];
    snprintf(folder, sizeof(folder), "%s/store/data/c", dir);
    DIR *d = opendir(folder);
    struct stat st;
    assert_non_null(d);
    path[0] = '\0';
    for (struct dirent *e; (e = readdir(d)) != NULL;) {
        if (e->d_name[0] != '.') {
            snprintf(path, 4096, "%s/%s", folder, e->d_name);
        }
    }
    closedir(d);
    assert_int_equal(stat(path, &st), 0);
    return (long)st.st_size;
}

static void flip(const char *path, long at) {
    FILE *f = fopen(path, "r+b");
    fseek(f, at, SEEK_SET);
    int byte = fgetc(f);
    fseek(f, at, SEEK_SET);
    fputc(byte ^ 1, f);
    assert_int_equal(fclose(f), 0);
}

static atomic_uint opened; /* chunk files */

static int count_opened(void *context, file_op op, const char *path) {
    (void)context;
    opened += op == FILE_OP_OPEN && strstr(path, "/data/c/") != NULL;
    return 0;
}

/* Verifies, and describes the damage. */
static void verify(char *text, const char *dir, uint32_t threads) {
    ckd_store *store = stored_open(dir, threads);
    ckd_verify_result *r;
    ckd_verify_options o = CKD_VERIFY_OPTIONS_INIT;
    size_t used = 0;
    o.quick = 1; /* what is decoded would show the damage as well */
    assert_int_equal(ckd_store_verify(&r, store, &o, NULL), CKD_OK);
    for (size_t i = 0; i < r->damage_count; i++) {
        const ckd_damage *d = &r->damage[i];
        used += (size_t)snprintf(text + used, TEXT - used, "%s %s %llu %llu %s %zu\n", d->file, d->tensor,
                                 (unsigned long long)d->block, (unsigned long long)d->offset, d->what,
                                 d->checkpoint_count);
    }
    ckd_verify_result_free(r);
    ckd_store_close(store);
}

static void test_damage(void **state) {
    const stored *f = *state;
    char path[4096];
    char *one = calloc(1, TEXT), *several = calloc(1, TEXT);
    const uint64_t count = COUNT;
    ckd_save_options o = options_of("run", 1);
    o.codec = CKD_CODEC_RAW;
    ckd_save *save = begin_with(f->store, &o);
    add_tensor(save, "w", CKD_F32, 1, &count, NULL, f->values);
    commit_save(save);
    long size = chunk_file(path, f->dir);
    verify(one, f->dir, 1);
    verify(several, f->dir, 3);
    assert_string_equal(one, "");
    assert_string_equal(several, "");
    flip(path, size / 3);
    flip(path, size / 3 * 2);
    file_set_fault_hook(count_opened, NULL);
    verify(one, f->dir, 1);
    unsigned alone = opened;
    verify(several, f->dir, 3);
    file_set_fault_hook(NULL, NULL);
    assert_true(strlen(one) > 0);
    assert_string_equal(one, several);
    assert_in_range(opened - alone, alone + RUNS,
                    UINT32_MAX); /* each run of records is read by a reader of its own */
    free(one);
    free(several);
}

static int make_store(void **state) {
    *state = stored_make(1, COUNT);
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_damage)};
    scratch_begin();
    int failed = cmocka_run_group_tests(tests, make_store, stored_remove);
    scratch_end();
    return failed;
}
