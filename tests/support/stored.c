#include "tests/support/stored.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "tests/support/checkpoints.h"
#include "tests/support/tempdir.h"

ckd_store *stored_open(const char *dir, uint32_t threads) {
    char path[4096];
    ckd_store_options o = CKD_STORE_OPTIONS_INIT;
    ckd_store *store;
    o.threads = threads;
    snprintf(path, sizeof(path), "%s/store", dir);
    assert_int_equal(ckd_store_open(&store, path, CKD_OPEN_CREATE, &o, NULL), CKD_OK);
    return store;
}

stored *stored_make(uint32_t threads, uint64_t count) {
    stored *s = calloc(1, sizeof(*s));
    assert_non_null(s);
    s->dir = tempdir_create();
    s->store = stored_open(s->dir, threads);
    s->values = random_values(CKD_F32, count, 1);
    return s;
}

int stored_remove(void **state) {
    stored *s = *state;
    ckd_store_close(s->store);
    tempdir_remove(s->dir);
    free(s->values);
    free(s);
    return 0;
}

ckd_load *stored_load(ckd_store *store, const char *run, uint64_t step, const ckd_load_options *options) {
    ckd_checkpoint found;
    ckd_load *load;
    assert_int_equal(ckd_store_find(&found, store, run, step, NULL), CKD_OK);
    assert_int_equal(ckd_load_begin_with(&load, store, &found.id, options, NULL), CKD_OK);
    return load;
}
