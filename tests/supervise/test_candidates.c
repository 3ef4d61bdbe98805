/* Which checkpoint an attempt starts from, if checking it takes long or is not wanted. */
#include <ftw.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#include <cmocka.h>

#include "ckptdelta.h"
#include "supervise/internal.h"
#include "tests/support/tempdir.h"

enum { TENSORS = 4, ELEMENTS = 1 << 16 };

typedef struct scene {
    char *folder;
    char messages[4096];
    supervise_options options;
    unsigned calls;
} scene;

static void on_message(void *context, const char *message) {
    scene *s = context;
    size_t length = strlen(s->messages);
    snprintf(s->messages + length, sizeof(s->messages) - length, "%s\n", message);
}

static void save(ckd_store *store, uint64_t step) {
    static float values[ELEMENTS];
    uint64_t shape = ELEMENTS;
    ckd_error err = {0};
    ckd_save *save;
    ckd_save_options o = CKD_SAVE_OPTIONS_INIT;
    o.run = "gpt";
    o.step = step;
    assert_int_equal(ckd_save_begin(&save, store, &o, &err), CKD_OK);
    for (int i = 0; i < TENSORS; i++) {
        char name[16];
        snprintf(name, sizeof(name), "t%d", i);
        ckd_tensor t = CKD_TENSOR_INIT;
        t.name = name;
        t.dtype = CKD_F32;
        t.ndim = 1;
        t.shape = &shape;
        t.data = values;
        for (size_t at = 0; at < ELEMENTS; at++) {
            values[at] = (float)((at * 2654435761u + step * 97 + (unsigned)i) % 1000003);
        }
        assert_int_equal(ckd_save_tensor(save, &t, &err), CKD_OK);
    }
    assert_int_equal(ckd_save_commit(NULL, save, &err), CKD_OK);
}

static int set_up(void **state) {
    scene *s = calloc(1, sizeof(*s));
    ckd_error err = {0};
    ckd_store *store;
    s->folder = tempdir_create();
    assert_int_equal(ckd_store_open(&store, s->folder, CKD_OPEN_CREATE, NULL, &err), CKD_OK);
    save(store, 1);
    save(store, 2);
    ckd_store_close(store);
    s->options = (supervise_options){.store = s->folder,
                                     .run = "gpt",
                                     .threads = 1,
                                     .verify_limit_s = 600,
                                     .on_message = on_message,
                                     .message_context = s};
    *state = s;
    return 0;
}

static int tear_down(void **state) {
    scene *s = *state;
    tempdir_remove(s->folder);
    free(s);
    return 0;
}

/* A footer that does not match is found as soon as the file is opened. */
static const char *damaged_file;

static int damage_newest(const char *path, const struct stat *info, int kind, struct FTW *at) {
    static struct timespec newest;
    static char file[256];
    (void)at;
    if (kind == FTW_F && strstr(path, "/data/c/") && info->st_size > 0 &&
        (damaged_file == NULL || info->st_mtim.tv_sec > newest.tv_sec ||
         (info->st_mtim.tv_sec == newest.tv_sec && info->st_mtim.tv_nsec > newest.tv_nsec))) {
        newest = info->st_mtim;
        snprintf(file, sizeof(file), "%s", path);
        damaged_file = file;
    }
    return 0;
}

static void damage(const scene *s) {
    damaged_file = NULL;
    assert_int_equal(nftw(s->folder, damage_newest, 8, FTW_PHYS), 0);
    assert_non_null(damaged_file);
    FILE *f = fopen(damaged_file, "r+b");
    assert_non_null(f);
    fseek(f, -1, SEEK_END);
    int last = fgetc(f);
    fseek(f, -1, SEEK_END);
    fputc(last ^ 0xFF, f);
    assert_int_equal(fclose(f), 0);
}

static int slow(void *context, uint64_t done, uint64_t total) {
    scene *s = context;
    (void)done, (void)total;
    if (s->calls++ == 0) {
        nanosleep(&(struct timespec){1, 100000000}, NULL);
    }
    return 0;
}

static uint64_t choose(scene *s, ckd_progress_fn on_progress) {
    candidates c;
    ckd_error err = {0};
    candidates_rule rule = {.options = &s->options, .on_progress = on_progress, .progress_context = s};
    assert_int_equal(candidates_read(&c, s->folder, "gpt", &err), CKD_OK);
    assert_int_equal(c.count, 2);
    assert_int_equal(candidates_choose(&c, &rule, &err), CKD_OK);
    uint64_t step = c.items[c.chosen].step;
    candidates_free(&c);
    return step;
}

static void test_a_damaged_checkpoint_is_passed_over(void **state) {
    scene *s = *state;
    assert_int_equal(choose(s, NULL), 2);
    damage(s);
    assert_int_equal(choose(s, NULL), 1);
    assert_non_null(strstr(s->messages, "gpt@2 is damaged and passed over"));
}

static void test_without_a_check_the_newest_is_taken(void **state) {
    scene *s = *state;
    damage(s);
    s->options.verify_limit_s = 0;
    assert_int_equal(choose(s, NULL), 2);
    assert_string_equal(s->messages, "");
}

static void test_a_check_ends_at_its_limit(void **state) {
    scene *s = *state;
    s->options.verify_limit_s = 1;
    assert_int_equal(choose(s, slow), 2);
    assert_int_equal(s->calls, 1);
    assert_non_null(strstr(s->messages, "gpt@2 has not been verified to the end after 1 s"));
}

/* The clock of the trainer's machine is behind, so that what it has saved is older than the attempt. */
static void test_what_is_new_to_another_clock(void **state) {
    (void)state;
    ckd_checkpoint items[] = {
        {.id = {{3}}, .created_ns = 70}, {.id = {{2}}, .created_ns = 60}, {.id = {{1}}, .created_ns = 50}};
    candidates now = {.count = 3, .items = items}, before = {.count = 1, .items = &items[2]};
    assert_ptr_equal(candidates_first_new(&now, &before, 100), &items[1]);
    assert_null(candidates_first_new(&now, &now, 10));
    assert_null(candidates_first_new(&now, NULL, 100));
    assert_ptr_equal(candidates_first_new(&now, NULL, 60), &items[1]);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_a_damaged_checkpoint_is_passed_over, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_without_a_check_the_newest_is_taken, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_a_check_ends_at_its_limit, set_up, tear_down),
        cmocka_unit_test(test_what_is_new_to_another_clock),
    };
    return cmocka_run_group_tests_name("candidates", tests, NULL, NULL);
}
