/* A folder that follows a run: what it has after each step, after kills and foreign changes; waits; sparse changes. */
#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/file.h"
#include "engine/follow/follow.h"
#include "tests/support/checkpoints.h"
#include "tests/support/scratch.h"
#include "tests/support/tempdir.h"

#define ROWS UINT64_C(1500)
#define COLS UINT64_C(1000)

static const uint64_t shape[] = {ROWS, COLS}, small_shape[] = {5};

/* ---- checkpoints ---- */

/* Step 1 is random. Every later step changes a few elements of the step before, all in one block. */
static uint16_t *weights_at(uint64_t step) {
    uint16_t *values = random_values(CKD_BF16, ROWS * COLS, 7);
    for (uint64_t s = 2; s <= step; s++) {
        for (uint64_t i = 0; i < 20; i++) {
            values[s % 5 * 290000 + (s * 31 + i * 97) % 20000] ^= 1;
        }
    }
    return values;
}

static void save_step(ckd_store *store, const char *run, uint64_t step) {
    uint16_t *weights = weights_at(step);
    float bias[5] = {(float)step, 1, 2, 3, 4};
    ckd_save *save = begin_save(store, run, step);
    add_tensor(save, "bias", CKD_F32, 1, small_shape, NULL, bias);
    add_tensor(save, "w\"1", CKD_BF16, 2, shape, NULL, weights);
    add_tensor(save, "exp_avg.bias", CKD_F32, 1, small_shape, NULL, bias);
    ckd_error err;
    if (ckd_save_commit(NULL, save, &err) != CKD_OK) {
        fail_msg("%s", err.message);
    }
    free(weights);
}

/* The whole folder, as one file's tensors: bias, then weights. Fails unless it is that of the step. */
static void check_folder(const char *into, uint64_t step) {
    char path[512];
    bytes content = {0};
    snprintf(path, sizeof(path), "%s/model.safetensors", into);
    assert_int_equal(file_read_all(&content, path, (size_t)1 << 30, NULL), CKD_OK);
    uint64_t header = 8 + load_le64(content.data);
    uint16_t *weights = weights_at(step);
    assert_int_equal(content.size, header + 20 + ROWS * COLS * 2);
    assert_int_equal(header % 8, 0);
    float first;
    memcpy(&first, content.data + header, sizeof(first));
    assert_int_equal((uint64_t)first, step);
    assert_memory_equal(content.data + header + 20, weights, ROWS * COLS * 2);
    free(weights);
    bytes_free(&content);
}

static ckd_follow *open_into(ckd_store *store, const char *into) {
    ckd_follow_options o = CKD_FOLLOW_OPTIONS_INIT;
    o.into = into;
    o.run = "r";
    o.poll_ms = 60000;
    ckd_follow *f;
    ckd_error err;
    if (ckd_follow_open(&f, store, &o, &err) != CKD_OK) {
        fail_msg("%s", err.message);
    }
    return f;
}

static ckd_follow_result apply(ckd_follow *f) {
    ckd_follow_result r;
    ckd_error err;
    if (ckd_follow_apply(&r, f, &err) != CKD_OK) {
        fail_msg("%s", err.message);
    }
    return r;
}

static void into_of(char into[512], void **state) {
    snprintf(into, 512, "%s/model", (const char *)*state);
}

static size_t count_names(const char *into, bool hidden) {
    dir_list list;
    size_t count = 0;
    assert_int_equal(dir_list_read(&list, into, NULL), CKD_OK);
    for (size_t i = 0; i < list.count; i++) {
        count += (list.names[i][0] == '.') == hidden;
    }
    dir_list_free(&list);
    return count;
}

/* ---- applying ---- */

static void test_steps(void **state) {
    char into[512];
    into_of(into, state);
    ckd_store *store = store_create(*state);
    save_step(store, "r", 1);
    ckd_follow *f = open_into(store, into);
    ckd_follow_result r = apply(f);
    assert_int_equal(r.checkpoint.step, 1);
    assert_true(r.applied);
    assert_int_equal(r.bytes, 20 + ROWS * COLS * 2);
    assert_int_equal(r.written_bytes, r.bytes);
    check_folder(into, 1);
    for (uint64_t step = 2; step <= 4; step++) {
        save_step(store, "r", step);
        r = apply(f);
        assert_int_equal(r.checkpoint.step, step);
        assert_true(r.written_bytes < r.bytes / 2); /* one of several blocks, and the bias */
        check_folder(into, step);
        assert_false(apply(f).applied);
    }
    ckd_follow_close(f);
    assert_int_equal(count_names(into, false), 1);
    f = open_into(store, into);
    ckd_follow_applied(&r, f);
    assert_int_equal(r.checkpoint.step, 4);
    assert_false(apply(f).applied);
    ckd_follow_close(f);
    ckd_store_close(store);
}

static void check_values(const char *into, const float *values, uint64_t count) {
    char path[512 + 32];
    bytes content = {0};
    snprintf(path, sizeof(path), "%s/model.safetensors", into);
    assert_int_equal(file_read_all(&content, path, (size_t)1 << 30, NULL), CKD_OK);
    assert_int_equal(content.size, 8 + load_le64(content.data) + count * sizeof(float));
    assert_memory_equal(content.data + content.size - count * sizeof(float), values, count * sizeof(float));
    bytes_free(&content);
}

/*
 * Ranges, rows and grids of ranks, which may change from step to step, by hashes of either checkpoint or of the file.
 */
static void test_layouts_of_ranks(void **state) {
    const uint64_t sides[] = {301, 507}, count = 301 * 507;
    char into[512];
    into_of(into, state);
    ckd_store *store = store_create(*state);
    float *values = random_values(CKD_F32, count, 1);
    ckd_follow *f = open_into(store, into);
    for (uint64_t step = 1; step <= 12; step++) {
        values[(step * 7919) % count] += 1;
        save_sharded(store, "r", step, "w", 2, sides, values, step % 2 ? step / 2 : step);
        if (step % 3 == 0) { /* so that the old checkpoint is not known */
            memset(&f->state.checkpoint, 1, sizeof(f->state.checkpoint));
        }
        ckd_follow_result r = apply(f);
        assert_int_equal(r.checkpoint.step, step);
        check_values(into, values, count);
    }
    ckd_follow_close(f);
    free(values);
    ckd_store_close(store);
}

static uint64_t bytes_read(void) {
    FILE *file = fopen("/proc/self/io", "r");
    unsigned long long count = 0;
    assert_non_null(file);
    assert_int_equal(fscanf(file, "rchar: %llu", &count), 1);
    fclose(file);
    return count;
}

/* A version reads what it writes, twice, as it reads it back. The copy of the old file may be read by the system. */
static void test_reads_what_changed(void **state) {
    char into[512];
    into_of(into, state);
    ckd_store *store = store_create(*state);
    save_step(store, "r", 1);
    ckd_follow *f = open_into(store, into);
    uint64_t before = bytes_read();
    uint64_t size = apply(f).written_bytes;
    uint64_t whole = bytes_read() - before;
    assert_true(whole >= size);
    save_step(store, "r", 2);
    before = bytes_read();
    uint64_t written = apply(f).written_bytes;
    uint64_t part = bytes_read() - before;
    assert_true(written > 0 && written < size / 4);
    assert_true(part < size + (whole - size) / 2);
    ckd_follow_close(f);
    ckd_store_close(store);
}

/* ---- deltas on the folder's values ---- */

static void flip_byte(const char *path, uint64_t offset) {
    file_writer *w;
    uint8_t byte = 0xff;
    assert_int_equal(file_continue(&w, path, file_bytes(path), 0, NULL), CKD_OK);
    assert_int_equal(file_write_at(w, offset, &byte, 1, NULL), CKD_OK);
    assert_int_equal(file_close(w, NULL), CKD_OK);
}

/* Changes one value in 40 of every block; all blocks have long chains then. */
static uint16_t *scattered_at(uint64_t step) {
    uint16_t *values = random_values(CKD_BF16, ROWS * COLS, 8);
    for (uint64_t i = 0; i < ROWS * COLS; i++) {
        values[i] =
            (uint16_t)((values[i] & 0x80ff) | 0x3c00); /* exponents vary as little as those of weights */
    }
    for (uint64_t s = 2; s <= step; s++) {
        for (uint64_t i = s * 7 % 40; i < ROWS * COLS; i += 40) {
            values[i] ^= 1;
        }
    }
    return values;
}

/* Returns the bytes that the checkpoint's own files take. */
static uint64_t save_scattered(ckd_store *store, uint64_t step) {
    uint16_t *weights = scattered_at(step);
    ckd_checkpoint saved;
    ckd_save *save = begin_save(store, "r", step);
    add_tensor(save, "w", CKD_BF16, 2, shape, NULL, weights);
    assert_int_equal(ckd_save_commit(&saved, save, NULL), CKD_OK);
    free(weights);
    return saved.stored_bytes;
}

static void check_scattered(const char *into, uint64_t step) {
    char path[512 + 32];
    bytes content = {0};
    uint16_t *weights = scattered_at(step);
    snprintf(path, sizeof(path), "%s/model.safetensors", into);
    assert_int_equal(file_read_all(&content, path, (size_t)1 << 30, NULL), CKD_OK);
    assert_int_equal(content.size, 8 + load_le64(content.data) + ROWS * COLS * 2);
    assert_memory_equal(content.data + content.size - ROWS * COLS * 2, weights, ROWS * COLS * 2);
    bytes_free(&content);
    free(weights);
}

/* A follower reads the deltas that it lacks and nothing below them, whether its checkpoint is still there or not. */
static void test_reads_only_new_deltas(void **state) {
    char into[512];
    into_of(into, state);
    ckd_store *store = store_create(*state);
    uint64_t base = save_scattered(store, 1);
    ckd_follow *f = open_into(store, into);
    assert_true(apply(f).read_bytes > base * 9 / 10);
    for (uint64_t step = 2; step <= 5; step++) {
        uint64_t delta = save_scattered(store, step);
        assert_true(delta < base / 2);
        if (step % 2) { /* the old checkpoint is not known */
            memset(&f->state.checkpoint, 1, sizeof(f->state.checkpoint));
        }
        uint64_t read = apply(f).read_bytes;
        assert_true(read > delta / 2 && read <= delta);
        check_scattered(into, step);
    }
    uint64_t missed = save_scattered(store, 6) + save_scattered(store, 7);
    uint64_t read = apply(f).read_bytes;
    assert_true(read > missed / 2 && read <= missed);
    check_scattered(into, 7);
    ckd_follow_close(f);
    ckd_store_close(store);
}

/* Changed values of the folder have another hash: the block is decoded from its base. */
static void test_deltas_on_values_that_somebody_changed(void **state) {
    char into[512], path[512 + 32];
    into_of(into, state);
    snprintf(path, sizeof(path), "%s/model.safetensors", into);
    ckd_store *store = store_create(*state);
    save_scattered(store, 1);
    ckd_follow *f = open_into(store, into);
    apply(f);
    usleep(20000); /* the file system's clock ticks */
    flip_byte(path, file_bytes(path) - 5);
    uint64_t delta = save_scattered(store, 2);
    ckd_follow_result r = apply(f);
    assert_true(r.read_bytes > delta);
    assert_true(r.read_bytes < r.bytes / 2); /* one of several blocks */
    check_scattered(into, 2);
    ckd_follow_close(f);
    ckd_store_close(store);
}

/* Somebody's change is undone, also where the checkpoint did not change. */
static void test_foreign_change(void **state) {
    char into[512], path[512 + 32];
    into_of(into, state);
    snprintf(path, sizeof(path), "%s/model.safetensors", into);
    ckd_store *store = store_create(*state);
    save_step(store, "r", 1);
    ckd_follow *f = open_into(store, into);
    apply(f);
    usleep(20000); /* the file system's clock ticks */
    flip_byte(path, file_bytes(path) - 5);
    int newer;
    assert_int_equal(ckd_follow_wait(&newer, f, 0, NULL), CKD_OK);
    assert_true(newer);
    ckd_follow_result r = apply(f);
    assert_true(r.applied && r.written_bytes < r.bytes);
    check_folder(into, 1);
    flip_byte(path, file_bytes(path) - 5);
    save_step(store, "r", 2);
    apply(f);
    check_folder(into, 2);
    assert_int_equal(file_remove(path, false, NULL), CKD_OK);
    assert_int_equal(apply(f).written_bytes, r.bytes);
    check_folder(into, 2);
    ckd_follow_close(f);
    ckd_store_close(store);
}

static void test_refuses(void **state) {
    char into[512], path[512 + 32], temporary[512 + 32];
    into_of(into, state);
    snprintf(path, sizeof(path), "%s/model.safetensors", into);
    snprintf(temporary, sizeof(temporary), "%s/x", into);
    ckd_store *store = store_create(*state);
    ckd_follow *f = NULL;
    ckd_follow_result r;
    ckd_follow_options o = CKD_FOLLOW_OPTIONS_INIT;
    assert_int_equal(ckd_follow_open(&f, store, &o, NULL), CKD_E_INVALID);
    o.into = into;
    o.run = "r";
    o.tag = "t";
    assert_int_equal(ckd_follow_open(&f, store, &o, NULL), CKD_E_INVALID);
    o.tag = NULL;
    assert_int_equal(dir_create(into, false, NULL), CKD_OK);
    assert_int_equal(file_create_durable(path, temporary, "theirs", 6, NULL), CKD_OK);
    assert_int_equal(ckd_follow_open(&f, store, &o, NULL), CKD_E_EXISTS);
    assert_null(f);
    o.overwrite = 1;
    assert_int_equal(ckd_follow_open(&f, store, &o, NULL), CKD_OK);
    assert_int_equal(ckd_follow_apply(&r, f, NULL), CKD_E_NOT_FOUND);
    ckd_follow *second;
    assert_int_equal(ckd_follow_open(&second, store, &o, NULL), CKD_E_BUSY);
    save_step(store, "r", 3);
    assert_true(apply(f).applied);
    check_folder(into, 3);
    ckd_follow_close(f);
    ckd_store_close(store);
}

static void count_message(void *context, const char *message) {
    *(size_t *)context += strstr(message, "is passed over: a safetensors file cannot hold tensor") != NULL;
}

/* A tensor that the format cannot hold: the checkpoint is passed over with a message. */
static void test_names(void **state) {
    char into[512];
    into_of(into, state);
    size_t messages = 0;
    ckd_store_options options = CKD_STORE_OPTIONS_INIT;
    options.on_message = count_message;
    options.message_context = &messages;
    ckd_store *writer = store_create(*state), *store;
    char path[512];
    snprintf(path, sizeof(path), "%s/store", (const char *)*state);
    assert_int_equal(ckd_store_open(&store, path, CKD_OPEN_READ, &options, NULL), CKD_OK);
    float values[5] = {0};
    ckd_save *save = begin_save(writer, "r", 1);
    add_tensor(save, "__metadata__", CKD_F32, 1, small_shape, NULL, values);
    assert_int_equal(ckd_save_commit(NULL, save, NULL), CKD_OK);
    ckd_follow *f = open_into(store, into);
    ckd_follow_result r;
    assert_int_equal(ckd_follow_apply(&r, f, NULL), CKD_E_UNSUPPORTED);
    assert_int_equal(messages, 1);
    assert_int_equal(r.passed_over, 1);
    assert_int_equal(ckd_follow_apply(&r, f, NULL), CKD_E_UNSUPPORTED); /* it is not tried again yet */
    assert_int_equal(messages, 1);
    save_step(writer, "r", 2);
    assert_true(apply(f).applied);
    check_folder(into, 2);
    ckd_follow_close(f);
    ckd_store_close(store);
    ckd_store_close(writer);
}

/* ---- kills ---- */

static char hooked[520];
static int steps_left;

/* Ends the process at a step on a file of the folder, or makes the step fail. */
static int kill_hook(void *context, file_op step, const char *path) {
    (void)step;
    if (strncmp(path, hooked, strlen(hooked)) != 0 || --steps_left != 0) {
        return 0;
    }
    if (context) {
        _exit(9);
    }
    return EIO;
}

/* Applies the newest in a child, which is killed at step n. Returns whether it lived to the end. */
static bool apply_killed(const char *dir, const char *into, int n) {
    pid_t child = fork();
    if (child == 0) {
        ckd_follow_options o = CKD_FOLLOW_OPTIONS_INIT;
        o.into = into;
        o.run = "r";
        ckd_store *store;
        ckd_follow *f;
        ckd_follow_result r;
        char path[512];
        ckd_store_options options = CKD_STORE_OPTIONS_INIT;
        options.threads = 1;
        snprintf(path, sizeof(path), "%s/store", dir);
        steps_left = n;
        file_set_fault_hook(kill_hook, &steps_left);
        bool good = ckd_store_open(&store, path, CKD_OPEN_READ, &options, NULL) == CKD_OK &&
                    ckd_follow_open(&f, store, &o, NULL) == CKD_OK && ckd_follow_apply(&r, f, NULL) == CKD_OK;
        _exit(good ? 0 : 1);
    }
    int how = 0;
    assert_int_equal(waitpid(child, &how, 0), child);
    assert_true(WIFEXITED(how) && (WEXITSTATUS(how) == 9 || WEXITSTATUS(how) == 0));
    return WEXITSTATUS(how) == 0;
}

/* Whatever step a follower is killed at, the next one finds the old weights or the new ones, and nothing else. */
static void test_killed_at_every_step(void **state) {
    char into[512];
    into_of(into, state);
    ckd_store *store = store_create(*state);
    save_step(store, "r", 1);
    ckd_follow_close(open_into(store, into));
    assert_true(apply_killed(*state, into, -1));
    snprintf(hooked, sizeof(hooked), "%s/", into);
    uint64_t step = 2;
    bool old_seen = false, new_seen = false, done = false;
    for (int n = 1; !done; n++) {
        save_step(store, "r", step);
        done = apply_killed(*state, into, n);
        ckd_follow *f = open_into(store, into);
        ckd_follow_result r;
        ckd_follow_applied(&r, f);
        assert_true(r.checkpoint.step == step - 1 || r.checkpoint.step == step);
        old_seen = old_seen || r.checkpoint.step == step - 1;
        new_seen = new_seen || (!done && r.checkpoint.step == step);
        check_folder(into, r.checkpoint.step);
        assert_int_equal(count_names(into, true), 2); /* the state and the lock */
        apply(f);
        check_folder(into, step++);
        ckd_follow_close(f);
        assert_true(n < 200);
    }
    assert_true(old_seen && new_seen);
    ckd_store_close(store);
}

/* So it is when a step fails: the call fails, or the next one has nothing to do. */
static void test_failure_at_every_step(void **state) {
    char into[512];
    into_of(into, state);
    ckd_store *store = store_create(*state);
    save_step(store, "r", 1);
    ckd_follow *f = open_into(store, into);
    apply(f);
    snprintf(hooked, sizeof(hooked), "%s/", into);
    uint64_t step = 2;
    for (int n = 1;; n++) {
        save_step(store, "r", step);
        ckd_follow_result r;
        steps_left = n;
        file_set_fault_hook(kill_hook, NULL);
        ckd_status status = ckd_follow_apply(&r, f, NULL);
        file_set_fault_hook(NULL, NULL);
        if (steps_left > 0) {
            assert_int_equal(status, CKD_OK);
            break;
        }
        ckd_follow_applied(&r, f);
        assert_true(r.checkpoint.step == step - 1 || r.checkpoint.step == step);
        ckd_follow_close(f);
        f = open_into(store, into);
        ckd_follow_applied(&r, f);
        check_folder(into, r.checkpoint.step);
        apply(f);
        check_folder(into, step++);
        assert_true(n < 200);
    }
    ckd_follow_close(f);
    ckd_store_close(store);
}

/* ---- waiting ---- */

typedef struct delayed {
    ckd_store *store;
    ckd_follow *follow;
    uint64_t step;
} delayed;

static void *act_later(void *context) {
    delayed *d = context;
    usleep(100000);
    if (d->step) {
        save_step(d->store, "r", d->step);
    } else {
        ckd_follow_cancel(d->follow);
    }
    return NULL;
}

static void test_wait(void **state) {
    char into[512];
    into_of(into, state);
    ckd_store *store = store_create(*state), *following = store_reopen(*state, CKD_OPEN_READ);
    ckd_follow *f = open_into(following, into);
    int newer = 1;
    assert_int_equal(ckd_follow_wait(&newer, f, 50, NULL), CKD_OK);
    assert_false(newer);
    for (uint64_t step = 1; step <= 3; step++) {
        delayed d = {store, f, step};
        pthread_t thread;
        assert_int_equal(pthread_create(&thread, NULL, act_later, &d), 0);
        uint64_t begun = clock_monotonic_ns();
        assert_int_equal(ckd_follow_wait(&newer, f, CKD_FOLLOW_FOREVER, NULL), CKD_OK);
        assert_true(newer);
        assert_true(clock_monotonic_ns() - begun < UINT64_C(30000000000)); /* long before the poll */
        pthread_join(thread, NULL);
        assert_int_equal(apply(f).checkpoint.step, step);
        check_folder(into, step);
    }
    delayed d = {store, f, 0};
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, act_later, &d), 0);
    assert_int_equal(ckd_follow_wait(&newer, f, CKD_FOLLOW_FOREVER, NULL), CKD_E_CANCELLED);
    pthread_join(thread, NULL);
    assert_int_equal(ckd_follow_wait(&newer, f, 0, NULL), CKD_OK);
    assert_false(newer);
    ckd_follow_close(f);
    ckd_store_close(following);
    ckd_store_close(store);
}

/* ---- changes ---- */

typedef struct received {
    uint8_t *seen;
    uint16_t *patched;
    uint64_t count;
} received;

static ckd_status receive(void *context, const uint64_t *positions, const void *values, size_t count,
                          ckd_error *err) {
    received *r = context;
    (void)err;
    assert_true(count > 0 && count <= 65536);
    for (size_t i = 0; i < count; i++) {
        assert_true(positions[i] < ROWS * COLS);
        assert_true(i == 0 || positions[i] > positions[i - 1]);
        assert_int_equal(r->seen[positions[i]]++, 0);
        memcpy(&r->patched[positions[i]], (const uint8_t *)values + 2 * i, 2);
        r->count++;
    }
    return CKD_OK;
}

static ckd_load *load_step(ckd_store *store, uint64_t step) {
    ckd_checkpoint c;
    ckd_load *load;
    assert_int_equal(ckd_store_find(&c, store, "r", step, NULL), CKD_OK);
    assert_int_equal(ckd_load_begin(&load, store, &c.id, NULL), CKD_OK);
    return load;
}

/* Patches old values by the changes of these regions; the new values must come out, and nothing else be touched. */
static void check_changes(ckd_load *before, ckd_load *after, const ckd_region *regions, size_t count) {
    uint16_t *old = weights_at(1), *now = weights_at(4);
    received r = {calloc(ROWS * COLS, 1), weights_at(1), 0};
    uint64_t differences = 0;
    for (size_t i = 0; i < count; i++) {
        ckd_changes_request q = CKD_CHANGES_REQUEST_INIT;
        q.tensor = "w\"1";
        q.region = regions[i];
        q.visit = receive;
        q.context = &r;
        ckd_error err;
        if (ckd_follow_changes(before, after, &q, &err) != CKD_OK) {
            fail_msg("%s", err.message);
        }
    }
    for (uint64_t i = 0; i < ROWS * COLS; i++) {
        differences += old[i] != now[i];
    }
    assert_true(differences > 0);
    assert_int_equal(r.count, differences);
    assert_memory_equal(r.patched, now, ROWS * COLS * 2);
    free(r.seen);
    free(r.patched);
    free(old);
    free(now);
}

static void test_changes(void **state) {
    ckd_store *store = store_create(*state);
    save_step(store, "r", 1);
    save_step(store, "r", 4);
    ckd_load *before = load_step(store, 1), *after = load_step(store, 4);
    const ckd_region whole = {.kind = CKD_REGION_WHOLE};
    const ckd_region ranges[] = {{.kind = CKD_REGION_FLAT, .start = 0, .count = 590001},
                                 {.kind = CKD_REGION_FLAT, .start = 590001, .count = ROWS * COLS - 590001}};
    const ckd_region columns[] = {
        {.kind = CKD_REGION_BOX, .offsets = {0, 0}, .lengths = {ROWS, 333}},
        {.kind = CKD_REGION_BOX, .offsets = {0, 333}, .lengths = {ROWS, COLS - 333}}};
    check_changes(before, after, &whole, 1);
    check_changes(before, after, ranges, 2);
    check_changes(before, after, columns, 2);
    ckd_changes_request q = CKD_CHANGES_REQUEST_INIT;
    q.tensor = "none";
    q.visit = receive;
    assert_int_equal(ckd_follow_changes(before, after, &q, NULL), CKD_E_NOT_FOUND);
    q.tensor = "w\"1";
    q.region = (ckd_region){.kind = CKD_REGION_FLAT, .start = 1, .count = ROWS * COLS};
    assert_int_equal(ckd_follow_changes(before, after, &q, NULL), CKD_E_INVALID);
    ckd_load_end(before);
    ckd_load_end(after);
    ckd_store_close(store);
}

static ckd_status ignore(void *context, const uint64_t *positions, const void *values, size_t count,
                         ckd_error *err) {
    (void)positions, (void)values, (void)err;
    *(size_t *)context += count;
    return CKD_OK;
}

/* The second load reads only the deltas that lead from the first checkpoint to its own. */
static void test_changes_read_only_new_deltas(void **state) {
    ckd_store *store = store_create(*state);
    save_scattered(store, 1);
    save_scattered(store, 2);
    save_scattered(store, 3);
    ckd_load *before = load_step(store, 2), *after = load_step(store, 3);
    size_t changes = 0;
    ckd_changes_request q = CKD_CHANGES_REQUEST_INIT;
    q.tensor = "w";
    q.visit = ignore;
    q.context = &changes;
    assert_int_equal(ckd_follow_changes(before, after, &q, NULL), CKD_OK);
    assert_int_equal(changes, ROWS * COLS / 40);
    assert_true(ckd_load_bytes_read(after) < ckd_load_bytes_read(before) / 2);
    ckd_load_end(before);
    ckd_load_end(after);
    ckd_store_close(store);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        tempdir_test(test_steps),
        tempdir_test(test_layouts_of_ranks),
        tempdir_test(test_reads_what_changed),
        tempdir_test(test_reads_only_new_deltas),
        tempdir_test(test_deltas_on_values_that_somebody_changed),
        tempdir_test(test_foreign_change),
        tempdir_test(test_refuses),
        tempdir_test(test_names),
        tempdir_test(test_killed_at_every_step),
        tempdir_test(test_failure_at_every_step),
        tempdir_test(test_wait),
        tempdir_test(test_changes),
        tempdir_test(test_changes_read_only_new_deltas),
    };
    scratch_begin();
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    scratch_end();
    return failed;
}
