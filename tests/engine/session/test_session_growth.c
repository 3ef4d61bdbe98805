/*
 * The disk that a session takes under an automatic policy. What its saves write and its policy deletes must go again:
 * the chunk files stay within a small multiple of what the listed checkpoints take. A tensor that never changes is the
 * hard part, as every checkpoint reads it from the first one.
 */
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
#include "tests/support/scenes.h"
#include "tests/support/scratch.h"
#include "tests/support/tempdir.h"
#include "tests/support/trainers.h"

#define SAVES  60
#define MOVING 4            /* tensors that change at each step */
#define COUNT  (32u << 10u) /* floats of each */
#define RUN    "run"

/* A state of which a delta takes most of the values' bytes, as of exact saves some steps apart. */
typedef struct state_of {
    uint32_t *moving[MOVING];
    uint32_t *frozen;
    uint64_t frozen_count, random;
} state_of;

static uint32_t draw(state_of *s) {
    s->random = s->random * UINT64_C(6364136223846793005) + 1442695040888963407u;
    return (uint32_t)(s->random >> 32);
}

static state_of state_new(uint64_t frozen_count) {
    state_of s = {.frozen_count = frozen_count, .random = 5};
    s.frozen = malloc(frozen_count * sizeof(*s.frozen));
    assert_non_null(s.frozen);
    for (uint64_t i = 0; i < frozen_count; i++) {
        s.frozen[i] = draw(&s);
    }
    for (size_t k = 0; k < MOVING; k++) {
        s.moving[k] = malloc(COUNT * sizeof(uint32_t));
        assert_non_null(s.moving[k]);
        for (uint64_t i = 0; i < COUNT; i++) {
            s.moving[k][i] = 0x3f000000u | draw(&s) >> 9u;
        }
    }
    return s;
}

static void state_free(state_of *s) {
    for (size_t k = 0; k < MOVING; k++) {
        free(s->moving[k]);
    }
    free(s->frozen);
}

/* The low 19 bits of every float change. */
static void state_step(state_of *s) {
    for (size_t k = 0; k < MOVING; k++) {
        for (uint64_t i = 0; i < COUNT; i++) {
            s->moving[k][i] ^= draw(s) >> 13u;
        }
    }
}

static ckd_tensor described(const char *name, const uint64_t *count) {
    ckd_tensor t = CKD_TENSOR_INIT;
    t.name = name;
    t.dtype = CKD_F32;
    t.ndim = 1;
    t.shape = count;
    return t;
}

static const char *const names[MOVING] = {"w0", "w1", "w2", "w3"};
static const uint64_t moving_shape[1] = {COUNT};

static atomic_uint complaints; /* that more stays than the policy allows */

static void on_message(void *context, const char *message) {
    (void)context;
    complaints += strstr(message, "of its chunk files, more than the") != NULL;
}

static ckd_session *session_for(const char *dir, state_of *s) {
    ckd_session_options o = session_options();
    ckd_session *out;
    ckd_store_options store = *o.store;
    store.on_message = on_message;
    o.store = &store;
    ckd_error err = {0};
    must(ckd_session_open(&out, store_path_of(dir, ""), &o, &err), &err);
    for (size_t k = 0; k < MOVING; k++) {
        ckd_tensor t = described(names[k], moving_shape);
        must(ckd_session_add(out, &t, s->moving[k], 0, &err), &err);
    }
    ckd_tensor frozen = described("frozen", &s->frozen_count);
    must(ckd_session_add(out, &frozen, s->frozen, 0, &err), &err);
    return out;
}

static void set_policy(const char *dir, uint32_t keep_last) {
    ckd_policy p = CKD_POLICY_INIT;
    ckd_error err = {0};
    ckd_store *store;
    p.keep_last = keep_last;
    p.automatic = 1;
    p.undo_s = 0;
    must(ckd_store_open(&store, store_path_of(dir, ""), CKD_OPEN_CREATE, NULL, &err), &err);
    must(ckd_store_set_policy(store, &p, &err), &err);
    ckd_store_close(store);
}

static uint64_t bytes_on_disk(const char *dir) {
    dir_list list;
    uint64_t total = 0;
    assert_int_equal(dir_list_read(&list, store_path_of(dir, "data/c"), NULL), CKD_OK);
    for (size_t i = 0; i < list.count; i++) {
        char below[128];
        snprintf(below, sizeof(below), "data/c/%s", list.names[i]);
        total += file_bytes(store_path_of(dir, below));
    }
    dir_list_free(&list);
    return total;
}

typedef struct listed {
    uint64_t count, stored;
} listed;

/* Each checkpoint builds on the one before, also if that was rewritten since. */
static listed list_run(const char *dir) {
    ckd_checkpoint_list *list;
    ckd_store *store;
    ckd_error err = {0};
    listed out = {0};
    must(ckd_store_open(&store, store_path_of(dir, ""), CKD_OPEN_READ, NULL, &err), &err);
    must(ckd_store_list(&list, store, RUN, &err), &err);
    out.count = list->count;
    for (size_t i = 0; i < list->count; i++) {
        out.stored += list->items[i].stored_bytes;
        if (i > 0) {
            assert_memory_equal(&list->items[i].parent, &list->items[i - 1].id, sizeof(ckd_id));
        }
    }
    ckd_checkpoint_list_free(list);
    ckd_store_close(store);
    return out;
}

/* Intents of saves and of rewrites, each of which makes one. */
static int count_intents(void *context, file_op step, const char *path) {
    *(atomic_uint *)context += step == FILE_OP_CREATE && strstr(path, "data/i/") != NULL;
    return 0;
}

/* Makes the saves; the chunk files may take this many times what is listed. Returns the intents. */
static uint64_t save_all(const char *dir, state_of *s, uint32_t keep_last, double most) {
    atomic_uint intents = 0;
    ckd_error err = {0};
    set_policy(dir, keep_last);
    ckd_session *session = session_for(dir, s);
    file_set_fault_hook(count_intents, &intents);
    for (uint64_t step = 1; step <= SAVES; step++) {
        state_step(s);
        must(ckd_session_step(session, step, &err), &err);
        must(ckd_session_wait(session, CKD_DURABLE, &err), &err);
        listed now = list_run(dir);
        assert_int_equal(now.count, step < keep_last ? step : keep_last);
        uint64_t taken = bytes_on_disk(dir);
        if ((double)taken > most * (double)now.stored) {
            fail_msg("step %llu: chunk files take %llu bytes, the listed checkpoints %llu",
                     (unsigned long long)step, (unsigned long long)taken, (unsigned long long)now.stored);
        }
    }
    file_set_fault_hook(NULL, NULL);
    must(ckd_session_close(session, &err), &err);
    assert_int_equal(complaints, 0);
    return intents;
}

static void check_newest(const char *dir, state_of *s) {
    state_of other = state_new(s->frozen_count);
    ckd_session *session = session_for(dir, &other);
    ckd_checkpoint found;
    ckd_error err = {0};
    memset(other.frozen, 0, s->frozen_count * sizeof(*s->frozen));
    must(ckd_session_restore(&found, session, CKD_LATEST, &err), &err);
    assert_int_equal(found.step, SAVES);
    for (size_t k = 0; k < MOVING; k++) {
        assert_memory_equal(other.moving[k], s->moving[k], COUNT * sizeof(uint32_t));
    }
    assert_memory_equal(other.frozen, s->frozen, s->frozen_count * sizeof(*s->frozen));
    must(ckd_session_close(session, &err), &err);
    state_free(&other);
    store_check_clean(dir);
}

/* Random states of a trainer are as small as this, and seldom change. */
static void test_a_small_tensor_that_never_changes(void **state) {
    state_of s = state_new(624);
    uint64_t intents = save_all(*state, &s, 5, 2);
    /* those of the saves, and a few of rewrites and merges; the tensor alone is no reason to rewrite all the others */
    assert_true(intents <= SAVES * 3 / 2);
    check_newest(*state, &s);
    state_free(&s);
}

/* Rewriting all of the run's checkpoints moves more than a save may, and is left to the next save each time. */
static void test_more_to_rewrite_than_a_save_may(void **state) {
    state_of s = state_new(2 * COUNT);
    save_all(*state, &s, 8, 2);
    check_newest(*state, &s);
    state_free(&s);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        tempdir_test(test_a_small_tensor_that_never_changes),
        tempdir_test(test_more_to_rewrite_than_a_save_may),
    };
    scratch_begin();
    int failed = cmocka_run_group_tests_name("session growth", tests, NULL, NULL);
    scratch_end();
    return failed;
}
