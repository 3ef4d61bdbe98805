/* How often the command reads its inputs and writes its outputs: small tensors share calls. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cmocka.h>

#include "cli/convert/convert.h"
#include "tests/support/checkpoints.h"
#include "tests/support/drift.h"
#include "tests/support/scratch.h"
#include "tests/support/tempdir.h"

enum { TENSORS = 3000, N = 100, GROUPS = 3, LARGE = 5 << 20 };

static atomic_uint reads, writes;

/* The program is compiled with 64-bit file offsets, which gives the function this name on Linux. */
ssize_t pread64(int fd, void *to, size_t size, off64_t at);
ssize_t pread64(int fd, void *to, size_t size, off64_t at) {
    reads++;
    return syscall(SYS_pread64, fd, to, size, at);
}

ssize_t write(int fd, const void *data, size_t size) {
    writes++;
    return syscall(SYS_write, fd, data, size);
}

static void name_of(char name[32], size_t i) {
    snprintf(name, 32, "t%05zu", i);
}

/* ---- reading ---- */

/* A file of small tensors. Element k of tensor i is i + k / 1000. */
static void write_file(const char *path) {
    static char names[TENSORS][32];
    safetensors_tensor *tensors = calloc(TENSORS, sizeof(*tensors));
    char *header;
    size_t header_size;
    uint64_t data_size;
    for (size_t i = 0; i < TENSORS; i++) {
        name_of(names[i], i);
        tensors[i] = (safetensors_tensor){
            .name = names[i], .dtype = CKD_F32, .ndim = 1, .shape = {N}, .elements = N, .number = i};
    }
    assert_int_equal(safetensors_arrange(&data_size, tensors, TENSORS, NULL), CKD_OK);
    assert_int_equal(safetensors_format_header(&header, &header_size, tensors, TENSORS, NULL, NULL), CKD_OK);
    FILE *f = fopen(path, "wb");
    fwrite(header, 1, header_size, f);
    for (size_t i = 0; i < TENSORS; i++) {
        for (size_t k = 0; k < N; k++) {
            float value = (float)i + (float)k / 1000;
            fwrite(&value, sizeof(value), 1, f);
        }
    }
    assert_int_equal(fclose(f), 0);
    free(header);
    free(tensors);
}

/* Reads the tensor in two parts, as its blocks are read. */
static ckd_status read_one(const cli_inputs *inputs, size_t i, ckd_error *err) {
    float got[N];
    const cli_input *input = &inputs->tensors[i];
    ckd_status status = cli_input_read(input, 0, N / 4, got, err);
    status = status == CKD_OK ? cli_input_read(input, N / 4, N - N / 4, got + N / 4, err) : status;
    for (size_t k = 0; k < N && status == CKD_OK; k++) {
        assert_true(got[k] == (float)i + (float)k / 1000);
    }
    return status;
}

static void open_inputs(cli_inputs *inputs, char *path) {
    cli_roles roles = {NULL, 0};
    char *const paths[] = {path};
    assert_int_equal(cli_inputs_open(inputs, paths, 1, &roles, NULL), CKD_OK);
    assert_int_equal(inputs->count, TENSORS);
    reads = 0;
}

static void test_reads(void **state) {
    char path[4096];
    cli_inputs inputs;
    snprintf(path, sizeof(path), "%s/small.safetensors", (const char *)*state);
    write_file(path);
    open_inputs(&inputs, path);
    for (size_t i = 0; i < TENSORS; i++) {
        assert_int_equal(read_one(&inputs, i, NULL), CKD_OK);
    }
    assert_in_range(reads, 1, 10);
    reads = 0;
    for (size_t i = 0; i < TENSORS; i++) { /* as weights and their moments alternate */
        size_t of_group = TENSORS / GROUPS;
        assert_int_equal(read_one(&inputs, i % GROUPS * of_group + i / GROUPS, NULL), CKD_OK);
    }
    assert_in_range(reads, 1, 20);
    for (size_t i = 0; i < TENSORS; i++) { /* in no order that can be followed */
        assert_int_equal(read_one(&inputs, i * 1009 % TENSORS, NULL), CKD_OK);
    }
    cli_inputs_close(&inputs);
}

static void test_truncation(void **state) {
    char path[4096];
    cli_inputs inputs;
    ckd_error err;
    snprintf(path, sizeof(path), "%s/cut.safetensors", (const char *)*state);
    write_file(path);
    open_inputs(&inputs, path);
    assert_int_equal(read_one(&inputs, 0, &err), CKD_OK);
    assert_int_equal(truncate(path, (off_t)(inputs.files[0]->size / 2)), 0);
    ckd_status status = CKD_OK;
    for (size_t i = 1; i < TENSORS && status == CKD_OK; i++) {
        status = read_one(&inputs, i, &err);
    }
    assert_int_equal(status, CKD_E_IO);
    assert_non_null(strstr(err.message, "became shorter"));
    cli_inputs_close(&inputs);
}

/* ---- writing ---- */

static void save_state(ckd_store *store, const float *values) {
    const uint64_t small = N, large = LARGE;
    ckd_save *save = begin_save(store, "run", 1);
    for (size_t i = 0; i < TENSORS; i++) {
        char name[32];
        name_of(name, i);
        add_tensor(save, name, CKD_F32, 1, &small, NULL, values + i);
    }
    add_tensor(save, "u", CKD_F32, 1, &large, NULL, values);
    commit_save(save);
}

/* All tensors, every other one as bf16. */
static void make_content(file_content *c, const ckd_tensor_list *list) {
    c->count = list->count;
    c->tensors = calloc(c->count, sizeof(*c->tensors));
    c->stored = calloc(c->count, sizeof(*c->stored));
    for (size_t i = 0; i < c->count; i++) {
        const ckd_tensor_info *t = &list->items[i];
        c->tensors[i] = (safetensors_tensor){.name = t->name,
                                             .dtype = i % 2 ? CKD_BF16 : CKD_F32,
                                             .ndim = 1,
                                             .shape = {t->shape[0]},
                                             .elements = t->shape[0],
                                             .number = i};
        c->stored[i] = CKD_F32;
    }
    assert_int_equal(file_content_arrange(c, NULL, NULL), CKD_OK);
}

static void check_file(const char *path, const float *values) {
    safetensors_file *file;
    assert_int_equal(safetensors_open(&file, path, NULL), CKD_OK);
    float *got = malloc(LARGE * sizeof(float)), *wanted = malloc(LARGE * sizeof(float));
    for (size_t i = 0; i < file->header.count; i++) {
        const safetensors_tensor *t = &file->header.tensors[i];
        const float *from = values + (*t->name == 'u' ? 0 : strtoul(t->name + 1, NULL, 10));
        assert_int_equal(safetensors_read(file, t, 0, t->elements, got, NULL), CKD_OK);
        cli_cast(wanted, t->dtype, from, CKD_F32, t->elements);
        assert_memory_equal(got, t->dtype == CKD_F32 ? from : wanted, t->size);
    }
    assert_int_equal(file->header.count, TENSORS + 1);
    free(got);
    free(wanted);
    safetensors_close(file);
}

static void test_writes(void **state) {
    ckd_store *store = store_create(*state);
    float *values = random_values(CKD_F32, LARGE + TENSORS, 1);
    save_state(store, values);
    for (uint32_t threads = 1; threads <= 2; threads++) {
        char path[4096];
        ckd_checkpoint found = checkpoint_at(store, "run", 1);
        cli_options options = {.threads = threads, .quiet = true};
        file_content content = {0};
        file_writing writing;
        ckd_load *load;
        snprintf(path, sizeof(path), "%s/out-%u.safetensors", (const char *)*state, threads);
        assert_int_equal(ckd_load_begin(&load, store, &found.id, NULL), CKD_OK);
        make_content(&content, ckd_load_tensors(load));
        assert_int_equal(file_writing_begin(&writing, load, "loading", content.data_size, &options, NULL),
                         CKD_OK);
        writes = 0;
        assert_int_equal(file_content_write(&writing, &content, path, false, NULL, NULL), CKD_OK);
        assert_in_range(writes, 1, 8);
        file_writing_end(&writing);
        file_content_free(&content);
        ckd_load_end(load);
        check_file(path, values);
    }
    free(values);
    ckd_store_close(store);
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
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_reads), cmocka_unit_test(test_truncation),
                                       cmocka_unit_test(test_writes)};
    scratch_begin();
    int failed = cmocka_run_group_tests(tests, make_folder, remove_folder);
    scratch_end();
    return failed;
}
