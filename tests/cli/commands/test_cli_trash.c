/* Two processes that restore everything in the trash. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "base/file.h"
#include "cli/commands/commands.h"
#include "tests/support/checkpoints.h"
#include "tests/support/scenes.h"
#include "tests/support/tempdir.h"

static const char *folder;
static ckd_id deleted;
static unsigned locks;

/* The command locks the store to open it, and again to restore what it has listed. In between, another one restores it. */
static int restore_meanwhile(void *context, file_op step, const char *path) {
    (void)context;
    const char *name = strrchr(path, '/');
    if (step == FILE_OP_LOCK && name && strcmp(name, "/lock") == 0 && ++locks == 2) {
        ckd_error err;
        file_set_fault_hook(NULL, NULL);
        ckd_store *store = store_reopen(folder, CKD_OPEN_WRITE);
        assert_int_equal(ckd_store_undelete(store, &deleted, 1, &err), CKD_OK);
        ckd_store_close(store);
    }
    return 0;
}

static void test_what_another_process_has_restored(void **state) {
    ckd_error err;
    ckd_checkpoint found;
    char name[] = "trash", path[600], option[] = "--restore", *words[] = {name, path, option, NULL};
    folder = *state;
    scene_make(folder, 0, 3);
    ckd_store *store = store_reopen(folder, CKD_OPEN_WRITE);
    assert_int_equal(ckd_store_find(&found, store, SCENE_RUN, 2, &err), CKD_OK);
    deleted = found.id;
    assert_int_equal(ckd_store_delete(store, &deleted, 1, NULL, &err), CKD_OK);
    ckd_store_close(store);
    snprintf(path, sizeof(path), "%s", store_path_of(folder, ""));
    file_set_fault_hook(restore_meanwhile, NULL);
    assert_int_equal(cmd_trash(3, words), 0);
    file_set_fault_hook(NULL, NULL);
    assert_int_equal(locks, 2);
    store = store_reopen(folder, CKD_OPEN_READ);
    assert_int_equal(ckd_store_find(&found, store, SCENE_RUN, 2, &err), CKD_OK);
    ckd_store_close(store);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        tempdir_test(test_what_another_process_has_restored),
    };
    return cmocka_run_group_tests_name("cli_trash", tests, NULL, NULL);
}
