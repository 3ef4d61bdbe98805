/* Full disks, concurrent writers and readers, flipped bytes, little memory: the store keeps what was committed. */
#include <dirent.h>
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/file.h"
#include "include/ckptdelta.h"
#include "tests/support/checkpoints.h"
#include "tests/support/level.h"
#include "tests/support/tempdir.h"

/* ---- concurrent processes ---- */

/* In a child: saves 20 steps of a run. Exits with 0 if all were committed. */
static void write_run(const char *dir, const char *run) {
    uint64_t n = 20000;
    ckd_store *store = store_reopen(dir, CKD_OPEN_WRITE);
    void *values = random_values(CKD_F32, n, (unsigned)run[0]);
    for (uint64_t step = 0; step < 20; step++) {
        save_one(store, run, step, "t", CKD_F32, 1, &n, values);
        change_values(CKD_F32, values, n, (unsigned)step);
    }
    _exit(0);
}

static pid_t spawn_writer(const char *dir, const char *run) {
    pid_t child = fork();
    if (child == 0) {
        write_run(dir, run);
    }
    assert_true(child > 0);
    return child;
}

static bool ended(pid_t child, int *failures) {
    int status;
    if (waitpid(child, &status, WNOHANG) != child) {
        return false;
    }
    *failures += !WIFEXITED(status) || WEXITSTATUS(status) != 0;
    return true;
}

/* Lists, verifies and loads everything. Returns the number of checkpoints. */
static size_t read_everything(const char *dir) {
    ckd_store *store = store_reopen(dir, CKD_OPEN_READ);
    ckd_checkpoint_list *list;
    assert_int_equal(ckd_store_list(&list, store, NULL, NULL), CKD_OK);
    assert_int_equal(verify_damage(store), 0);
    for (size_t i = 0; i < list->count; i++) {
        free(load_whole(store, list->items[i].run, list->items[i].step, "t", 80000));
    }
    size_t count = list->count;
    ckd_checkpoint_list_free(list);
    ckd_store_close(store);
    return count;
}

static void test_two_writers_and_a_reader_throughout(void **state) {
    ckd_store_close(store_create(*state));
    pid_t a = spawn_writer(*state, "a"), b = spawn_writer(*state, "b");
    int failures = 0;
    size_t seen = 0, rounds = 0;
    bool a_ended = false, b_ended = false;
    while (!a_ended || !b_ended) {
        size_t now = read_everything(*state);
        assert_true(now >= seen);
        seen = now;
        rounds++;
        a_ended = a_ended || ended(a, &failures);
        b_ended = b_ended || ended(b, &failures);
    }
    assert_int_equal(failures, 0);
    assert_true(rounds > 1);
    assert_int_equal(read_everything(*state), 40);
}

static void test_one_of_two_writers_of_a_step_wins(void **state) {
    ckd_store_close(store_create(*state));
    uint64_t n = 1000;
    for (uint64_t step = 0; step < 8; step++) {
        pid_t children[2];
        for (int i = 0; i < 2; i++) {
            children[i] = fork();
            if (children[i] == 0) {
                ckd_store *store = store_reopen(*state, CKD_OPEN_WRITE);
                void *values = random_values(CKD_F32, n, (unsigned)i);
                ckd_save_options o = CKD_SAVE_OPTIONS_INIT;
                o.run = "run";
                o.step = step;
                ckd_save *save;
                ckd_status status = ckd_save_begin(&save, store, &o, NULL);
                if (status == CKD_OK) {
                    add_tensor(save, "t", CKD_F32, 1, &n, NULL, values);
                    status = ckd_save_commit(NULL, save, NULL);
                }
                _exit((int)status);
            }
        }
        int statuses[2];
        for (int i = 0; i < 2; i++) {
            assert_int_equal(waitpid(children[i], &statuses[i], 0), children[i]);
            assert_true(WIFEXITED(statuses[i]));
        }
        int first = WEXITSTATUS(statuses[0]), second = WEXITSTATUS(statuses[1]);
        assert_true((first == CKD_OK && second == CKD_E_EXISTS) ||
                    (first == CKD_E_EXISTS && second == CKD_OK));
    }
    ckd_store *store = store_reopen(*state, CKD_OPEN_READ);
    assert_int_equal(verify_damage(store), 0);
    ckd_store_close(store);
}

static void test_a_held_lock_is_reported(void **state) {
    char path[4096];
    ckd_store *store = store_create(*state);
    ckd_store_close(store);
    snprintf(path, sizeof(path), "%s/store/data/lock", (char *)*state);
    file_lock *lock;
    assert_int_equal(lock_acquire(&lock, path, LOCK_EXCLUSIVE, true, 0, NULL), CKD_OK);
    snprintf(path, sizeof(path), "%s/store", (char *)*state);
    ckd_store_options o = CKD_STORE_OPTIONS_INIT;
    o.lock_timeout_ms = 50;
    ckd_error err;
    assert_int_equal(ckd_store_open(&store, path, CKD_OPEN_WRITE, &o, &err), CKD_E_BUSY);
    assert_null(store);
    assert_true(err.message[0]);
    /* Readers do not need the lock. */
    assert_int_equal(ckd_store_open(&store, path, CKD_OPEN_READ, &o, &err), CKD_OK);
    ckd_store_close(store);
    lock_release(lock);
}

/* ---- flipped bytes ---- */

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define FLIP_EVERY 13 /* sanitizers are slow; the plain build flips every byte */
#else
#define FLIP_EVERY 1
#endif

static void flip(const char *path, long at) {
    FILE *f = fopen(path, "r+b");
    assert_non_null(f);
    fseek(f, at, SEEK_SET);
    int byte = fgetc(f);
    fseek(f, at, SEEK_SET);
    fputc(byte ^ (1 << at % 8), f);
    fclose(f);
}

/* Every load gives the right values or fails, and a verification finds the damage. */
static void check_damaged(const char *dir, uint8_t *const *values, uint64_t steps, size_t size) {
    ckd_store *store = store_reopen(dir, CKD_OPEN_READ);
    size_t failed = 0;
    for (uint64_t s = 0; s < steps; s++) {
        ckd_checkpoint c;
        ckd_load *load = NULL;
        ckd_error err = {0};
        ckd_load_request q = CKD_LOAD_REQUEST_INIT;
        q.name = "t";
        q.size = size;
        q.data = malloc(size);
        ckd_status status = ckd_store_find(&c, store, "run", s, &err);
        if (status == CKD_OK) {
            status = ckd_load_begin(&load, store, &c.id, &err);
        }
        if (status == CKD_OK) {
            status = ckd_load_tensor(load, &q, &err);
        }
        if (status == CKD_OK) {
            assert_memory_equal(q.data, values[s], size);
        } else {
            assert_true(err.message[0]);
            failed++;
        }
        ckd_load_end(load);
        free(q.data);
    }
    assert_true(verify_damage(store) > 0);
    ckd_store_close(store);
}

static void test_every_flipped_byte_is_found(void **state) {
    enum { STEPS = 3, COUNT = 300 };
    uint64_t n = COUNT;
    uint8_t *values[STEPS];
    ckd_store *store = store_create(*state);
    for (unsigned s = 0; s < STEPS; s++) {
        values[s] = random_values(CKD_F32, n, 7);
        for (unsigned k = 0; k < s; k++) {
            change_values(CKD_F32, values[s], n, k);
        }
        save_one(store, "run", s, "t", CKD_F32, 1, &n, values[s]);
    }
    ckd_store_close(store);
    static const char *const folders[] = {"data/c", "data/m"};
    const long every = FLIP_EVERY * (long)test_stride(7, 1, 1);
    const long first = (long)test_first("flipped bytes", (unsigned long)every) - 1;
    size_t flips = 0;
    for (int k = 0; k < 2; k++) {
        char folder[2048], path[4096];
        snprintf(folder, sizeof(folder), "%s/store/%s", (char *)*state, folders[k]);
        DIR *d = opendir(folder);
        assert_non_null(d);
        for (struct dirent *e; (e = readdir(d));) {
            struct stat info;
            snprintf(path, sizeof(path), "%s/%s", folder, e->d_name);
            if (e->d_name[0] == '.' || stat(path, &info) != 0) {
                continue;
            }
            for (long at = first; at < info.st_size; at += every, flips++) {
                flip(path, at);
                check_damaged(*state, values, STEPS, COUNT * 4);
                flip(path, at);
            }
        }
        closedir(d);
    }
    assert_true((long)flips > 1000 / every);
    store = store_reopen(*state, CKD_OPEN_READ);
    assert_int_equal(verify_damage(store), 0);
    ckd_store_close(store);
    for (unsigned s = 0; s < STEPS; s++) {
        free(values[s]);
    }
}

/* ---- a full disk ---- */

static void test_full_disk(void **state) {
    char disk[2048];
    snprintf(disk, sizeof(disk), "%s/disk", (char *)*state);
    assert_int_equal(mkdir(disk, 0777), 0);
    if (mount("tmpfs", disk, "tmpfs", 0, "size=6m") != 0) {
        print_message("skipped: a tmpfs cannot be mounted here (%s)\n", strerror(errno));
        skip();
    }
    ckd_store *store = store_create(disk);
    uint64_t n = 500000;
    void *values = random_bits(n * 4, 3);
    save_one(store, "run", 0, "t", CKD_F32, 1, &n, values);
    size_t full = 0;
    for (uint64_t step = 1; step < 6; step++) {
        uint8_t *other = random_bits(n * 4, (unsigned)step + 10);
        ckd_save_options o = CKD_SAVE_OPTIONS_INIT;
        o.run = "run";
        o.step = step;
        ckd_save *save = NULL;
        ckd_error err = {0};
        ckd_status status = ckd_save_begin(&save, store, &o, &err);
        ckd_tensor t = CKD_TENSOR_INIT;
        t.name = "t";
        t.dtype = CKD_F32;
        t.ndim = 1;
        t.shape = &n;
        t.data = other;
        if (status == CKD_OK) {
            status = ckd_save_tensor(save, &t, &err);
            if (status == CKD_OK) {
                status = ckd_save_commit(NULL, save, &err);
            } else {
                ckd_save_abort(save);
            }
        }
        if (status != CKD_OK) {
            assert_int_equal(status, CKD_E_NOSPACE);
            assert_true(err.message[0]);
            full++;
        }
        free(other);
    }
    assert_true(full >= 3);
    assert_int_equal(verify_damage(store), 0);
    void *back = load_whole(store, "run", 0, "t", n * 4);
    assert_memory_equal(back, values, n * 4);
    free(back);
    uint64_t one = 1; /* the space of the failed saves is free again */
    save_one(store, "run", 9, "small", CKD_F32, 1, &one, values);
    ckd_store_close(store);
    free(values);
    assert_int_equal(umount(disk), 0);
}

/* ---- memory ---- */

typedef struct made_up {
    uint64_t seed;
} made_up;

/* Weights that take no memory: element i is a function of i and the seed. */
static ckd_status make_values(void *context, uint64_t first, uint64_t count, void *to, ckd_error *err) {
    (void)err;
    const made_up *m = context;
    for (uint64_t i = 0; i < count; i++) {
        uint64_t z = (first + i) * 0x9e3779b97f4a7c15u;
        z ^= z >> 29;
        uint32_t bits = 0x3c000000u | (uint32_t)(z & 0x03ffffffu);
        bits += (uint32_t)((z >> 40) * m->seed & 0xffu);
        memcpy((uint8_t *)to + 4 * i, &bits, 4);
    }
    return CKD_OK;
}

static long peak_kib(void) {
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return usage.ru_maxrss;
}

/* At most 256 MiB in all, including the process itself. */
static void check_peak(const char *what, double size, long before) {
    long peak = peak_kib();
    print_message("%s of %.0f MiB: at most %ld MiB of memory in all, %ld KiB more than before\n", what,
                  size / (1 << 20), peak / 1024, peak - before);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__) /* these sanitizers keep freed memory */
    assert_true(peak < 256 * 1024);
#endif
}

static void save_made_up(ckd_store *store, uint64_t step, uint64_t elements) {
    made_up m = {step};
    ckd_save *save = begin_save(store, "run", step);
    ckd_tensor t = CKD_TENSOR_INIT;
    t.name = "t";
    t.dtype = CKD_F32;
    t.ndim = 1;
    t.shape = &elements;
    t.read = make_values;
    t.read_context = &m;
    ckd_error err = {0};
    if (ckd_save_tensor(save, &t, &err) != CKD_OK || ckd_save_commit(NULL, save, &err) != CKD_OK) {
        fail_msg("%s", err.message);
    }
}

/* A base and a delta are saved, and loaded in slices, within 256 MiB in all. They have 2 GiB at the big level. */
static void test_large_states_in_little_memory(void **state) {
    uint64_t elements = test_level_now() == TEST_BIG ? UINT64_C(1) << 29 : UINT64_C(1) << 25;
    ckd_store *store = store_create(*state);
    long before = peak_kib();
    for (uint64_t step = 0; step < 2; step++) {
        save_made_up(store, step, elements);
    }
    ckd_checkpoint c;
    ckd_load *load;
    assert_int_equal(ckd_store_find(&c, store, "run", 1, NULL), CKD_OK);
    assert_int_equal(c.kind, CKD_DELTA);
    assert_int_equal(ckd_load_begin(&load, store, &c.id, NULL), CKD_OK);
    enum { SLICE = 1 << 20 };
    uint8_t *slice = malloc(4 * SLICE), *expected = malloc(4 * SLICE);
    made_up m = {1};
    for (uint64_t at = 0; at < elements; at += SLICE) {
        ckd_load_request q = CKD_LOAD_REQUEST_INIT;
        q.name = "t";
        q.region = (ckd_region){.kind = CKD_REGION_FLAT, .start = at, .count = SLICE};
        q.data = slice;
        q.size = 4 * SLICE;
        assert_int_equal(ckd_load_tensor(load, &q, NULL), CKD_OK);
        make_values(&m, at, SLICE, expected, NULL);
        assert_memory_equal(slice, expected, 4 * SLICE);
    }
    check_peak("two saves and a load", (double)elements * 4, before);
    free(slice);
    free(expected);
    ckd_load_end(load);
    ckd_store_close(store);
}

/* A sparse i8 tensor that is streamed: more than 2^32 elements at the big level, otherwise 2^25. */
static ckd_status make_sparse(void *context, uint64_t first, uint64_t count, void *to, ckd_error *err) {
    (void)context;
    (void)err;
    memset(to, 0, count);
    uint64_t at = (first + 999999) / 1000000 * 1000000;
    for (; at < first + count; at += 1000000) {
        ((uint8_t *)to)[at - first] = (uint8_t)(1 + at / 1000000 % 100);
    }
    return CKD_OK;
}

static void test_sparse_tensor_is_streamed(void **state) {
    uint64_t elements =
        test_level_now() == TEST_BIG ? (UINT64_C(1) << 33) + 12345 : (UINT64_C(1) << 25) + 12345;
    ckd_store *store = store_create(*state);
    long before = peak_kib();
    ckd_save *save = begin_save(store, "run", 0);
    ckd_tensor t = CKD_TENSOR_INIT;
    t.name = "t";
    t.dtype = CKD_I8;
    t.ndim = 1;
    t.shape = &elements;
    t.read = make_sparse;
    assert_int_equal(ckd_save_tensor(save, &t, NULL), CKD_OK);
    ckd_checkpoint c;
    assert_int_equal(ckd_save_commit(&c, save, NULL), CKD_OK);
    assert_true(c.stored_bytes < elements / 500);
    ckd_load *load;
    assert_int_equal(ckd_load_begin(&load, store, &c.id, NULL), CKD_OK);
    uint8_t slice[3000], expected[3000];
    for (uint64_t at = 998999; at + 3000 < elements; at += (elements / 37 / 1000000 + 1) * 1000000) {
        ckd_load_request q = CKD_LOAD_REQUEST_INIT;
        q.name = "t";
        q.region = (ckd_region){.kind = CKD_REGION_FLAT, .start = at, .count = 3000};
        q.data = slice;
        q.size = 3000;
        assert_int_equal(ckd_load_tensor(load, &q, NULL), CKD_OK);
        make_sparse(NULL, at, 3000, expected, NULL);
        assert_memory_equal(slice, expected, 3000);
    }
    check_peak("a sparse tensor", (double)elements, before);
    ckd_load_end(load);
    ckd_store_close(store);
}

#define TEST(name) tempdir_test(name)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(test_two_writers_and_a_reader_throughout),
        TEST(test_one_of_two_writers_of_a_step_wins),
        TEST(test_a_held_lock_is_reported),
        TEST(test_every_flipped_byte_is_found),
        TEST(test_full_disk),
        TEST(test_large_states_in_little_memory),
        TEST(test_sparse_tensor_is_streamed),
    };
    return run_sampled("trouble", tests, 2, NULL, NULL);
}
