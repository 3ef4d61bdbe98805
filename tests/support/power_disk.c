#include "tests/support/power_disk.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "base/file.h"
#include "engine/store/handle.h"
#include "tests/support/marks.h"
#include "tests/support/scenes.h"
#include "tests/support/survivors.h"
#include "tests/support/tempdir.h"

/* ---- checking ---- */

static void repair_once(const char *dir) {
    ckd_store *store;
    ckd_error err = {0};
    disk_must(scene_open(&store, dir, CKD_OPEN_WRITE, &err), &err);
    ckd_repair_result *r;
    disk_must(ckd_store_repair(&r, store, NULL, &err), &err);
    ckd_repair_result_free(r);
    ckd_store_close(store);
}

static void lose_one(const char *dir) {
    dir_list list;
    char path[256];
    assert_int_equal(dir_list_read(&list, store_path_of(dir, DIR_CHUNKS), NULL), CKD_OK);
    for (size_t i = 0; i < list.count; i++) {
        size_t length = strlen(list.names[i]);
        if (length > 4 && strcmp(list.names[i] + length - 4, ".ckd") == 0) {
            snprintf(path, sizeof(path), "%s/%s", DIR_CHUNKS, list.names[i]);
            assert_int_equal(remove(store_path_of(dir, path)), 0);
            break;
        }
    }
    dir_list_free(&list);
}

static size_t count_in(const char *dir, const char *folder) {
    dir_list list;
    if (dir_list_read(&list, store_path_of(dir, folder), NULL) != CKD_OK) {
        return 0;
    }
    size_t count = list.count;
    dir_list_free(&list);
    return count;
}

static void check_pins(const char *dir, unsigned flags) {
    ckd_store *store;
    ckd_pin_list *pins;
    ckd_error err = {0};
    disk_must(scene_open(&store, dir, CKD_OPEN_READ, &err), &err);
    disk_must(ckd_store_pins(&pins, store, &err), &err);
    assert_true(pins->count == 0 || !(flags & UNPINNED));
    assert_true(pins->count == 1 || !(flags & PINNED));
    for (size_t i = 0; i < pins->count; i++) {
        assert_string_equal(pins->items[i].reason, PIN_AGAIN);
    }
    ckd_pin_list_free(pins);
    ckd_store_close(store);
}

/* A process that opens the store for writing clears up first. */
static void check_whole(const char *dir) {
    ckd_store *store;
    ckd_verify_result *r;
    ckd_error err = {0};
    disk_must(scene_open(&store, dir, CKD_OPEN_WRITE, &err), &err);
    disk_must(ckd_store_verify(&r, store, NULL, &err), &err);
    assert_int_equal(r->damage_count, 0);
    ckd_verify_result_free(r);
    ckd_store_close(store);
}

static void check(const char *dir, const expectation *e, bool thorough, void *context) {
    const disk *d = context;
    char from[1024];
    if (e->flags & MARKED) {
        marks_check(dir, e->marks);
    }
    if (e->flags & (UNPINNED | PINNED | PINNED_AGAIN)) {
        check_pins(dir, e->flags);
    }
    if (e->flags & KEPT) {
        assert_true(count_in(dir, DIR_DAMAGED) > 0);
    }
    if (e->flags & PURGED) {
        assert_int_equal(count_in(dir, DIR_DAMAGED), 0);
    }
    if (e->flags & COPIED) {
        snprintf(from, sizeof(from), "%s/from", dir);
        survivors_glance(from, 15, 15);
    }
    if (e->flags & WHOLE) {
        check_whole(dir);
    }
    if (e->flags & PROTECTED) {
        lose_one(dir);
    }
    if (e->flags & (PROTECTED | DAMAGED)) {
        repair_once(dir);
    }
    if (thorough) {
        survivors_check(dir, e->committed, e->possible, d->next);
    } else {
        survivors_glance(dir, e->committed, e->possible);
    }
}

/* ---- scenarios ---- */

int disk_setup(void **state) {
    disk *d = calloc(1, sizeof(*d));
    assert_non_null(d);
    d->p = (power){.dir = tempdir_create(), .check = check, .context = d};
    *state = d;
    return 0;
}

int disk_teardown(void **state) {
    disk *d = *state;
    recorder_drop();
    file_set_fault_hook(NULL, NULL);
    tempdir_remove((char *)d->p.dir);
    free(d);
    return 0;
}

void disk_begin(disk *d, uint64_t committed, uint64_t possible) {
    d->p.now.committed = committed;
    d->p.now.possible = possible;
    power_begin(&d->p, NULL);
}

void disk_expect(disk *d, uint64_t committed, uint64_t possible) {
    d->p.now.committed = committed;
    d->p.now.possible = possible;
    power_expect(&d->p);
}

void disk_flags(disk *d, unsigned flags) {
    d->p.now.flags = flags;
    power_expect(&d->p);
}

void disk_end(const char *what, disk *d, uint64_t next) {
    d->next = next;
    power_end(&d->p, what);
}

void disk_must(ckd_status status, const ckd_error *err) {
    if (status != CKD_OK) {
        fail_msg("%s: %s (%s)", ckd_status_name(status), err->message, err->file);
    }
}

ckd_store *disk_open(disk *d, ckd_open_mode mode) {
    ckd_store *store;
    ckd_error err = {0};
    disk_must(scene_open(&store, d->p.dir, mode, &err), &err);
    return store;
}

void disk_save(disk *d, ckd_store *store, uint64_t step, bool ranks) {
    ckd_error err = {0};
    scene s = scene_of(step);
    disk_expect(d, d->p.now.committed, d->p.now.possible | UINT64_C(1) << step);
    disk_must(ranks ? scene_save_ranks(NULL, store, &s, &err) : scene_save(NULL, store, &s, &err), &err);
    disk_expect(d, d->p.now.committed | UINT64_C(1) << step, d->p.now.possible);
}
