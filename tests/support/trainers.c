#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "tests/support/checkpoints.h"
#include "tests/support/trainers.h"

#define COLUMNS 64

trainer *trainer_new(uint64_t rows) {
    trainer *t = calloc(1, sizeof(*t));
    assert_non_null(t);
    t->rows = rows;
    for (size_t i = 0; i < TRAINER_TENSORS; i++) {
        t->layers[i] = calloc(rows * COLUMNS, sizeof(float));
        assert_non_null(t->layers[i]);
    }
    return t;
}

void trainer_free(trainer *t) {
    for (size_t i = 0; i < TRAINER_TENSORS; i++) {
        free(t->layers[i]);
    }
    free(t);
}

static float value_of(uint64_t layer, uint64_t step) {
    return (float)(1000 * layer + step) + 0.25f;
}

static float frozen_value(unsigned i) {
    return (float)(i * 2654435761u >> 8) * 0x1p-20f;
}

void trainer_set_layer(trainer *t, uint64_t layer, uint64_t step) {
    float value = value_of(layer, step);
    for (uint64_t i = 0; i < t->rows * COLUMNS; i++) {
        t->layers[layer][i] = value;
    }
}

void trainer_set(trainer *t, uint64_t step) {
    for (uint64_t layer = 0; layer < TRAINER_TENSORS; layer++) {
        trainer_set_layer(t, layer, step);
    }
    for (unsigned i = 0; i < TRAINER_FROZEN; i++) {
        t->frozen[i] = frozen_value(i);
    }
    t->step = (int64_t)step;
    memset(t->loader, (int)(step % 251), sizeof(t->loader));
}

void trainer_spoil(trainer *t) {
    for (size_t i = 0; i < TRAINER_TENSORS; i++) {
        memset(t->layers[i], 0xee, t->rows * COLUMNS * sizeof(float));
    }
    memset(t->frozen, 0xee, sizeof(t->frozen));
    t->step = -1;
    memset(t->loader, 0xee, sizeof(t->loader));
}

void trainer_check(const trainer *t, uint64_t step) {
    for (uint64_t layer = 0; layer < TRAINER_TENSORS; layer++) {
        float value = value_of(layer, step);
        for (uint64_t i = 0; i < t->rows * COLUMNS; i++) {
            if (t->layers[layer][i] != value) {
                fail_msg("step %llu, layer %llu, element %llu: %g", (unsigned long long)step,
                         (unsigned long long)layer, (unsigned long long)i, (double)t->layers[layer][i]);
            }
        }
    }
    for (unsigned i = 0; i < TRAINER_FROZEN; i++) {
        assert_true(t->frozen[i] == frozen_value(i));
    }
    assert_int_equal(t->step, step);
    for (size_t i = 0; i < sizeof(t->loader); i++) {
        assert_int_equal(t->loader[i], step % 251);
    }
}

ckd_session_options session_options(void) {
    static ckd_save_options save;
    static ckd_store_options store;
    save = (ckd_save_options)CKD_SAVE_OPTIONS_INIT;
    save.run = TRAINER_RUN;
    store = (ckd_store_options)CKD_STORE_OPTIONS_INIT;
    store.threads = 1;
    ckd_session_options o = CKD_SESSION_OPTIONS_INIT;
    o.save = &save;
    o.store = &store;
    o.every_steps = 1;
    o.copy_threads = 2;
    return o;
}

ckd_status session_register(ckd_session *s, trainer *t, ckd_error *err) {
    ckd_status status = CKD_OK;
    uint64_t shape[2] = {t->rows, COLUMNS};
    for (uint32_t i = 0; i < TRAINER_TENSORS && status == CKD_OK; i++) {
        char name[16]; /* the session copies the name and the shape */
        snprintf(name, sizeof(name), "layer%u", (unsigned)i);
        ckd_tensor tensor = CKD_TENSOR_INIT;
        tensor.name = name;
        tensor.dtype = CKD_F32;
        tensor.ndim = 2;
        tensor.shape = shape;
        status = ckd_session_add(s, &tensor, t->layers[i], i, err);
    }
    ckd_tensor frozen = CKD_TENSOR_INIT;
    frozen.name = "frozen";
    frozen.dtype = CKD_F32;
    frozen.ndim = 1;
    frozen.shape = (uint64_t[]){TRAINER_FROZEN};
    if (status == CKD_OK) {
        status = ckd_session_add(s, &frozen, t->frozen, 0, err);
    }
    ckd_tensor counter = CKD_TENSOR_INIT;
    counter.name = "step";
    counter.dtype = CKD_I64;
    if (status == CKD_OK) {
        status = ckd_session_add(s, &counter, &t->step, 0, err);
    }
    return status == CKD_OK ? ckd_session_add_bytes(s, "loader", t->loader, sizeof(t->loader), err) : status;
}

void must(ckd_status status, const ckd_error *err) {
    if (status != CKD_OK) {
        fail_msg("%s: %s (%s)", ckd_status_name(status), err->message, err->file);
    }
}

static const char *store_in(const char *dir) {
    static char path[4096];
    snprintf(path, sizeof(path), "%s/store", dir);
    return path;
}

ckd_session *session_of(const char *dir, const ckd_session_options *options, trainer *t) {
    ckd_session *s;
    ckd_error err = {0};
    must(ckd_session_open(&s, store_in(dir), options, &err), &err);
    must(session_register(s, t, &err), &err);
    return s;
}

void stored_check(const char *dir, const char *run, uint64_t step, uint64_t rows) {
    ckd_session_options o = session_options();
    ckd_save_options save = *o.save;
    save.run = run;
    o.save = &save;
    trainer *t = trainer_new(rows);
    trainer_spoil(t);
    ckd_session *s = session_of(dir, &o, t);
    ckd_checkpoint from;
    ckd_error err = {0};
    must(ckd_session_restore(&from, s, step, &err), &err);
    assert_int_equal(from.step, step);
    trainer_check(t, step);
    must(ckd_session_close(s, &err), &err);
    trainer_free(t);
}

ckd_status iterate(ckd_session *s, trainer *t, uint64_t step, ckd_error *err) {
    ckd_session_fence(s);
    trainer_set(t, step);
    return ckd_session_step(s, step, err);
}

void iterate_through(ckd_session *s, trainer *t, uint64_t first, uint64_t last) {
    ckd_error err = {0};
    for (uint64_t step = first; step <= last; step++) {
        must(iterate(s, t, step, &err), &err);
    }
}

void trainer_run(const char *dir, uint64_t rows, uint64_t first, uint64_t last) {
    trainer *t = trainer_new(rows);
    ckd_session_options o = session_options();
    ckd_session *s = session_of(dir, &o, t);
    ckd_error err = {0};
    iterate_through(s, t, first, last);
    must(ckd_session_close(s, &err), &err);
    trainer_free(t);
}

ckd_status iterate_and_wait(ckd_session *s, trainer *t, uint64_t step, ckd_error *err) {
    ckd_status status = iterate(s, t, step, err);
    return status == CKD_OK ? ckd_session_wait(s, CKD_DURABLE, err) : status;
}

uint64_t count_of(const char *dir, const char *run) {
    ckd_store *store = store_reopen(dir, CKD_OPEN_READ);
    ckd_checkpoint_list *list;
    assert_int_equal(ckd_store_list(&list, store, run, NULL), CKD_OK);
    uint64_t count = list->count;
    ckd_checkpoint_list_free(list);
    ckd_store_close(store);
    return count;
}

ckd_checkpoint checkpoint_of(const char *dir, const char *run, uint64_t step) {
    ckd_store *store = store_reopen(dir, CKD_OPEN_READ);
    ckd_checkpoint c;
    assert_int_equal(ckd_store_find(&c, store, run, step, NULL), CKD_OK);
    ckd_store_close(store);
    return c;
}
