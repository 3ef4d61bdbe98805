/*
 * The parents of lossy tiles on a device are decoded on the device, from their stored bytes. Saves store the same as
 * if the host decoded the parent and sent its values, but send less over the bus. The host takes over what the device
 * cannot do or does wrongly, and a damaged parent does not make a save fail. The device is emulated;
 * tests/engine/device/test_cuda_parents.c includes this file for a real one.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <sys/stat.h>

#include "engine/device/device.h"
#include "engine/load/load.h"
#include "engine/save/save.h"
#include "kernels/device_open.h"
#include "tests/support/checkpoints.h"
#include "tests/support/device_tensors.h"
#include "tests/support/drift.h"
#include "tests/support/level.h"
#include "tests/support/tempdir.h"

enum { ROWS = 768, COLUMNS = 700, COUNT = ROWS * COLUMNS };
static const char *const parts[3] = {"exp_avg_sq.w", "exp_avg.w", "w"};

/* Where the parents of weights on the device are decoded. */
typedef enum decoding { ON_DEVICE, ON_HOST } decoding;

static unsigned message_count;
static char last_message[600];
static void keep_message(void *context, const char *message) {
    (void)context;
    message_count++;
    snprintf(last_message, sizeof(last_message), "%s", message);
}

static ckd_store *new_store(const char *dir, const char *name) {
    char path[512];
    ckd_store *store;
    ckd_error err;
    ckd_store_options o = CKD_STORE_OPTIONS_INIT;
    o.on_message = keep_message;
    snprintf(path, sizeof(path), "%s/%s", dir, name);
    assert_int_equal(ckd_store_open(&store, path, CKD_OPEN_CREATE, &o, &err), CKD_OK);
    message_count = 0;
    return store;
}

/* ---- saves ---- */

typedef struct plan {
    ckd_fidelity fidelity;
    ckd_dtype dtype;
    bool cells, ready; /* cut into small cells; the newest checkpoint has materialized copies */
    uint64_t staging;
} plan;

static ckd_save *begin_plan(ckd_store *store, const plan *p, uint64_t step, decoding by) {
    ckd_save_options o = lossy_options("run", step, p->fidelity);
    o.max_load_cost = 1000;
    o.newest_load_cost = p->ready ? 1.5 : 1000;
    o.staging_bytes = p->staging;
    ckd_save *save = begin_with(store, &o);
    save->device.parents_on_host = by == ON_HOST;
    if (p->cells) {
        save->coding.grid = (save_grid){
            .row_sides = {160, 16, 64}, .column_sides = {256, 16, 101}, .elements = 4096, .columns = 64};
    }
    return save;
}

static ckd_status add_from_device(ckd_save *save, const char *name, ckd_dtype dtype, const void *values) {
    const uint64_t shape[2] = {ROWS, COLUMNS};
    ckd_tensor t = CKD_TENSOR_INIT;
    ckd_error err;
    void *there = to_device(values, COUNT * ckd_dtype_size(dtype));
    t.name = name;
    t.dtype = dtype;
    t.ndim = 2;
    t.shape = shape;
    t.data = there;
    t.device = &on_device;
    ckd_status status = ckd_save_tensor(save, &t, &err);
    backend->release(0, there);
    return status;
}

/* Called between the beginning of a save and its first tensor, if not NULL. */
static void (*prepare)(ckd_save *save);

/*
 * Saves a state from the device. *sent: the bytes that the save of the weights copies to the device, not counting the
 * weights.
 */
static ckd_status save_from_device(uint64_t *sent, ckd_store *store, const plan *p, uint64_t step,
                                   const drift *d, decoding by) {
    const float *values[3] = {d->second, d->first, d->weight};
    ckd_save *save = begin_plan(store, p, step, by);
    ckd_status status = CKD_OK;
    ckd_error err;
    if (prepare) {
        prepare(save);
    }
    for (int i = 0; i < 3 && status == CKD_OK; i++) {
        void *typed = to_dtype(values[i], p->dtype, COUNT);
        uint64_t before = emulated_copied[DEVICE_TO_DEVICE], own = COUNT * ckd_dtype_size(p->dtype);
        status = add_from_device(save, parts[i], p->dtype, typed);
        *sent = emulated_copied[DEVICE_TO_DEVICE] - before - own;
        free(typed);
    }
    if (status != CKD_OK) {
        ckd_save_abort(save);
        return status;
    }
    return ckd_save_commit(NULL, save, &err);
}

static ckd_load *begin_load(ckd_store *store, uint64_t step) {
    ckd_load *load;
    ckd_error err;
    ckd_checkpoint c;
    assert_int_equal(ckd_store_find(&c, store, "run", step, &err), CKD_OK);
    assert_int_equal(ckd_load_begin(&load, store, &c.id, &err), CKD_OK);
    return load;
}

static bool is_weight(const view_block *b) {
    return strcmp(b->record->tensor->name, "w") == 0;
}

/*
 * Both stores must have the same blocks. Returns the depth of the weights. Ids of checkpoints, which are stored with
 * blocks, may differ.
 */
static uint32_t check_same_records(ckd_store *one, ckd_store *other, uint64_t step) {
    ckd_load *a = begin_load(one, step), *b = begin_load(other, step);
    uint32_t depth = 0;
    assert_int_equal(a->view->block_count, b->view->block_count);
    for (size_t i = 0; i < a->view->block_count; i++) {
        const record *x = a->view->blocks[i].record, *y = b->view->blocks[i].record;
        assert_string_equal(x->tensor->name, y->tensor->name);
        assert_true(hash128_equal(&x->content, &y->content));
        assert_true(x->coding == y->coding && x->predictor == y->predictor && x->depth == y->depth);
        assert_int_equal(x->stored_size, y->stored_size);
        assert_true(!a->view->blocks[i].materialized == !b->view->blocks[i].materialized);
        depth = is_weight(&a->view->blocks[i]) && x->depth > depth ? x->depth : depth;
    }
    ckd_load_end(a);
    ckd_load_end(b);
    return depth;
}

static void end(ckd_store *store) {
    assert_int_equal(verify_damage(store), 0);
    ckd_store_close(store);
}

/* ---- what is stored, and what is sent ---- */

/*
 * Compares chains of `links` deltas. The last save may send at most `share` of four bytes per element for its parent.
 * Half of them are the exact base of 16-bit weights.
 */
static void compare_chains(const char *dir, const plan *p, uint32_t links, double share) {
    char names[2][64];
    for (int i = 0; i < 2; i++) {
        snprintf(names[i], sizeof(names[i]), "%d-%d-%d-%d-%d-%d", (int)p->fidelity, (int)p->dtype, p->cells,
                 p->ready, (int)links, i);
    }
    ckd_store *made = new_store(dir, names[0]), *host = new_store(dir, names[1]);
    drift d = drift_new(ROWS, COLUMNS, 7);
    uint64_t sent = 0, all = 0;
    for (uint64_t step = 0; step <= links + 1; step++) {
        assert_int_equal(save_from_device(&sent, made, p, step, &d, ON_DEVICE), CKD_OK);
        assert_int_equal(save_from_device(&all, host, p, step, &d, ON_HOST), CKD_OK);
        assert_int_equal(check_same_records(made, host, step), step);
        if (backend == emulated_device() && step > 0) {
            uint64_t others = all - COUNT * sizeof(float); /* plans and factors */
            assert_true(step <= links || (double)(sent - others) < share * 4 * COUNT);
        }
        drift_step(&d);
    }
    assert_int_equal(message_count, 0);
    drift_free(&d);
    end(made);
    end(host);
    assert_int_equal(emulated_memory + emulated_pinned, 0);
}

static void test_chains(void **state) {
    static const struct {
        plan plan;
        uint32_t links;
        double share;
    } chains[] = {
        {{CKD_COARSE, CKD_F32, false, false, 0}, 10, 0.4}, {{CKD_COARSE, CKD_BF16, false, false, 0}, 3, 0.53},
        {{CKD_NEAR, CKD_F32, true, false, 0}, 3, 0.68},    {{CKD_NEAR, CKD_BF16, true, false, 0}, 2, 0.53},
        {{CKD_COARSE, CKD_F16, true, false, 0}, 1, 0.53},  {{CKD_COARSE, CKD_F32, true, true, 0}, 3, 0.71},
    };
    for (unsigned i = 0; i < 6; i++) {
        if (test_draws("chains", i, 3)) {
            compare_chains(*state, &chains[i].plan, chains[i].links, chains[i].share);
        }
    }
}

/* ---- exact parents ---- */

static unsigned streams_read;
static device_result count_streams(const device_queue *queue, const device_decoding *all, uint32_t count,
                                   device_failure *failure) {
    streams_read += count;
    return backend->decode(queue, all, count, failure);
}

/* Saves other regions than the tile, and enough of them that decoding their streams on a device pays off. */
static void save_bands(ckd_store *store, uint64_t step, ckd_dtype dtype, const float *values) {
    enum { BANDS = 32 };
    const uint64_t shape[2] = {ROWS, COLUMNS};
    const size_t rows = ROWS / BANDS * 2, size = ckd_dtype_size(dtype);
    uint8_t *typed = to_dtype(values, dtype, COUNT), *band = malloc(COUNT * size);
    assert_non_null(band);
    ckd_save *save = begin_save(store, "run", step);
    for (size_t i = 0; i < BANDS; i++) { /* left and right halves of some rows */
        ckd_region r = {.kind = CKD_REGION_BOX,
                        .offsets = {i / 2 * rows, i % 2 * COLUMNS / 2},
                        .lengths = {rows, COLUMNS / 2}};
        for (size_t j = 0; j < rows; j++) {
            memcpy(band + j * (COLUMNS / 2) * size,
                   typed + ((r.offsets[0] + j) * COLUMNS + r.offsets[1]) * size, COLUMNS / 2 * size);
        }
        add_tensor(save, "w", dtype, 2, shape, &r, band);
    }
    ckd_error err;
    assert_int_equal(ckd_save_commit(NULL, save, &err), CKD_OK);
    free(typed);
    free(band);
}

static void test_exact_parents(void **state) {
    device_backend counting = *backend;
    counting.decode = count_streams;
    device_backend_use(&counting);
    const ckd_dtype dtypes[2] = {CKD_F32, CKD_BF16};
    for (int i = 0; i < 2; i++) {
        plan p = {CKD_COARSE, dtypes[i], false, false, 0};
        ckd_store *stores[2] = {new_store(*state, i ? "a" : "b"), new_store(*state, i ? "c" : "d")};
        drift d = drift_new(ROWS, COLUMNS, 7);
        uint64_t sent[2];
        streams_read = 0;
        for (uint64_t step = 0; step < 2; step++) {
            save_bands(stores[0], step, p.dtype, d.weight);
            save_bands(stores[1], step, p.dtype, d.weight);
            drift_step(&d);
        }
        assert_int_equal(save_from_device(&sent[0], stores[0], &p, 2, &d, ON_DEVICE), CKD_OK);
        assert_true(streams_read >= 32);
        streams_read = 0;
        assert_int_equal(save_from_device(&sent[1], stores[1], &p, 2, &d, ON_HOST), CKD_OK);
        assert_int_equal(streams_read, 0);
        assert_true(check_same_records(stores[0], stores[1], 2) >= 1);
        assert_int_equal(message_count, 0);
        drift_free(&d);
        end(stores[0]);
        end(stores[1]);
    }
    device_backend_use(backend);
    assert_int_equal(emulated_memory + emulated_pinned, 0);
}

/* ---- errors ---- */

typedef struct pair {
    ckd_store *made, *host;
    drift d;
} pair;

static pair new_pair(const char *dir, const plan *p, uint64_t steps) {
    pair two = {new_store(dir, "made"), new_store(dir, "host"), drift_new(ROWS, COLUMNS, 9)};
    uint64_t sent;
    for (uint64_t step = 0; step < steps; step++) {
        assert_int_equal(save_from_device(&sent, two.made, p, step, &two.d, ON_DEVICE), CKD_OK);
        assert_int_equal(save_from_device(&sent, two.host, p, step, &two.d, ON_HOST), CKD_OK);
        drift_step(&two.d);
    }
    assert_int_equal(message_count, 0);
    return two;
}

/*
 * Saves the next step in both stores and compares them. Returns the number of messages of the save with ON_DEVICE, and
 * the last one.
 */
static unsigned save_next_in_both(char *text, size_t size, pair *two, const plan *p, uint64_t step) {
    uint64_t sent;
    message_count = 0;
    assert_int_equal(save_from_device(&sent, two->made, p, step, &two->d, ON_DEVICE), CKD_OK);
    unsigned messages = message_count;
    snprintf(text, size, "%s", messages ? last_message : "");
    assert_int_equal(save_from_device(&sent, two->host, p, step, &two->d, ON_HOST), CKD_OK);
    check_same_records(two->made, two->host, step);
    drift_step(&two->d);
    return messages;
}

static void end_pair(pair *two) {
    drift_free(&two->d);
    ckd_store_close(two->made);
    ckd_store_close(two->host);
    assert_int_equal(emulated_memory + emulated_pinned, 0);
}

/* Flips a bit in the payload of the weights' first block or of its materialized copy. */
static void damage(ckd_store *store, uint64_t step, bool ready) {
    ckd_load *load = begin_load(store, step);
    size_t i = 0;
    while (!is_weight(&load->view->blocks[i])) {
        i++;
    }
    const view_block *b = &load->view->blocks[i];
    assert_true(!ready || b->materialized);
    const record *r = ready ? b->materialized : b->record;
    FILE *f = fopen(file_path((ready ? b->materialized_chunk : b->chunk)->file), "r+b");
    assert_true(f && !r->bundle);
    assert_int_equal(fseek(f, (long)(r->payload_offset + r->stored_size / 2), SEEK_SET), 0);
    int byte = fgetc(f);
    assert_int_equal(fseek(f, -1, SEEK_CUR), 0);
    assert_int_equal(fputc(byte ^ 0x21, f), byte ^ 0x21);
    assert_int_equal(fclose(f), 0);
    ckd_load_end(load);
}

static void test_damaged_parent(void **state) {
    const plan p = {CKD_COARSE, CKD_F32, false, false, 0};
    char text[600];
    pair two = new_pair(*state, &p, 3);
    damage(two.made, 0, false); /* step 0, on which the parent's chain is built */
    damage(two.host, 0, false);
    assert_int_equal(save_next_in_both(text, sizeof(text), &two, &p, 3), 1);
    assert_non_null(strstr(text, "are damaged; these blocks are stored without a delta"));
    assert_int_equal(save_next_in_both(text, sizeof(text), &two, &p, 4), 0);
    end_pair(&two);
}

/* A damaged materialized copy is not used: the block itself is intact. */
static void test_damaged_copy(void **state) {
    const plan p = {CKD_COARSE, CKD_F32, false, true, 0};
    char text[600];
    pair two = new_pair(*state, &p, 3);
    damage(two.made, 2, true);
    damage(two.host, 2, true);
    assert_int_equal(save_next_in_both(text, sizeof(text), &two, &p, 3), 0);
    end_pair(&two);
}

static void change_content(ckd_save *save) {
    for (size_t i = 0; i < save->sources.parent->block_count; i++) {
        if (is_weight(&save->sources.parent->blocks[i])) {
            hash128 *content = (hash128 *)(uintptr_t)&save->sources.parent->blocks[i].record->content;
            ((uint8_t *)content)[3] ^= 1;
        }
    }
}

/* The parent's values do not match its content hash, although its files are intact. */
static void test_wrong_parent(void **state) {
    const plan p = {CKD_NEAR, CKD_BF16, true, false, 0};
    char text[600];
    pair two = new_pair(*state, &p, 2);
    prepare = change_content;
    unsigned messages = save_next_in_both(text, sizeof(text), &two, &p, 2);
    prepare = NULL;
    assert_int_equal(messages, 1);
    assert_non_null(strstr(text, "are damaged; these blocks are stored without a delta"));
    end_pair(&two);
}

static bool wrong_now;
static device_result move_wrongly(const device_queue *queue, const device_tile *tile,
                                  device_failure *failure) {
    device_tile wrong = *tile;
    wrong.unit *= wrong_now && !tile->now ? 2 : 1; /* only when it decodes parents */
    return backend->move(queue, &wrong, failure);
}

/* A wrong result of the device is detected by its hash, and the host decodes for the rest of the save. */
static void test_wrong_device(void **state) {
    const plan p = {CKD_COARSE, CKD_F32, false, false, 0};
    char text[600];
    device_backend wrong = *backend;
    wrong.move = move_wrongly;
    device_backend_use(&wrong);
    pair two = new_pair(*state, &p, 2);
    wrong_now = true;
    assert_int_equal(save_next_in_both(text, sizeof(text), &two, &p, 2), 1);
    assert_non_null(strstr(text, "the device's result does not match its content hash"));
    wrong_now = false;
    assert_int_equal(save_next_in_both(text, sizeof(text), &two, &p, 3), 0);
    end_pair(&two);
    device_backend_use(backend);
}

/* ---- little device memory ---- */

static ckd_status make_block(void *context, device_chain *c, chain_sides *sides, bool values, uint32_t worker,
                             ckd_error *err) {
    ckd_load *load = context;
    if (!values) {
        return device_chain_make(c, sides, &load->decoders[worker], load->view, err);
    }
    void *to = device_chain_values(c, err);
    assert_non_null(to);
    return block_values(&load->decoders[worker], load->view, c->block, to, err);
}

/* Decodes the weights with `memory` bytes to work in. */
static ckd_status fill_with(span_decode *f, ckd_load *load, uint64_t memory, const void *values) {
    const view_tensor *t = view_find(load->view, "w");
    ckd_region whole = {.kind = CKD_REGION_BOX, .lengths = {ROWS, COLUMNS}};
    const region_span all = {&whole, 0, COUNT};
    load_task task = {.tensor = t, .span = all};
    ckd_error err;
    ckd_device here = CKD_DEVICE_INIT;
    size_t size = COUNT * sizeof(float);
    void *got = malloc(size), *zeros = calloc(1, size), *there = to_device(zeros, size),
         *work_memory = to_device(zeros, size);
    assert_true(got && memory <= size);
    assert_int_equal(load_task_list(&task, &err), CKD_OK);
    *f = (span_decode){.pool = load->store->pool,
                       .tensor = t,
                       .span = &all,
                       .data = there,
                       .make = make_block,
                       .context = load,
                       .staging = UINT64_MAX,
                       .memory = work_memory,
                       .memory_size = memory};
    assert_int_equal(device_acquire(&f->lease, load->store, &here, there, &err), CKD_OK);
    assert_true(device_can_decode_span(f, task.blocks, &task.count));
    ckd_status status = device_decode_span(f, task.blocks, task.count, &err);
    device_release(load->store, f->lease);
    from_device(got, there, size);
    assert_true(status != CKD_OK || (f->copied == COUNT && memcmp(got, values, size) == 0));
    backend->release(0, there);
    backend->release(0, work_memory);
    load_task_free(&task);
    free(got);
    free(zeros);
    return status;
}

/*
 * With less memory, fewer blocks are decoded at a time. Below that, values come from the host, until there is no space
 * for a single block.
 */
static void test_little_memory(void **state) {
    const plan p = {CKD_NEAR, CKD_F32, true, false, 0};
    pair two = new_pair(*state, &p, 4);
    ckd_load *load = begin_load(two.made, 3);
    float *values = load_floats(two.made, "run", 3, "w", CKD_F32, COUNT);
    span_decode *f = malloc(sizeof(*f));
    unsigned mixed = 0, sent = 0;
    ckd_status status = CKD_OK;
    assert_non_null(f);
    for (uint64_t memory = COUNT * sizeof(float); status == CKD_OK; memory = memory / 8 * 7) {
        status = fill_with(f, load, memory, values);
        mixed += status == CKD_OK && f->decoded > 0;
        sent += status == CKD_OK && f->sent > 0;
    }
    assert_int_equal(status, CKD_E_NOMEM);
    assert_true(mixed > 2 && sent > 0);
    free(f);
    free(values);
    ckd_load_end(load);
    end_pair(&two);
}

#ifndef DEVICE_PARENTS_TESTS
int main(void) {
    const struct CMUnitTest tests[] = {
        tempdir_test(test_chains),        tempdir_test(test_exact_parents), tempdir_test(test_damaged_parent),
        tempdir_test(test_damaged_copy),  tempdir_test(test_wrong_parent),  tempdir_test(test_wrong_device),
        tempdir_test(test_little_memory),
    };
    backend = emulated_device();
    device_backend_use(backend);
    return run_sampled("device_parents", tests, 2, NULL, NULL);
}
#endif
