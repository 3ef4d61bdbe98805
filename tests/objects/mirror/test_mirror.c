/*
 * The parts of stores in buckets that need no server: the names of files as keys, and the mounts of base/ with a place
 * in memory.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <cmocka.h>

#include "objects/mirror/mirror.h"
#include "tests/support/tempdir.h"
#include "tests/support/xorshift.h"

/* ---- names and keys ---- */

static void test_kinds(void **state) {
    (void)state;
    static const struct {
        const char *name;
        mount_kind kind;
    } all[] = {
        {"data/m", MOUNT_COPIED},
        {"data/m/run.5.0", MOUNT_COPIED},
        {"data/m/run~2.5.0", MOUNT_COPIED},
        {"data/t/run.5.0", MOUNT_COPIED},
        {"data/n/tag.best.0", MOUNT_COPIED},
        {"data/store", MOUNT_COPIED},
        {"data/deletions", MOUNT_COPIED},
        {"data/c", MOUNT_REMOTE},
        {"data/c/0123456789abcdef0123456789abcdef.ckd", MOUNT_REMOTE},
        {"data/p/0123456789abcdef0123456789abcdef.ckp", MOUNT_REMOTE},
        {"data/c/0123456789abcdef0123456789abcdef.ckd.tmp", MOUNT_LOCAL},
        {"data/c/.ckd", MOUNT_LOCAL},
        {"data/p/lock", MOUNT_LOCAL},
        {"data/m/run.5.0.tmp", MOUNT_LOCAL},
        {"data/m/.tmp-1", MOUNT_LOCAL},
        {"data/m/", MOUNT_LOCAL},
        {"data/m/a/b", MOUNT_LOCAL},
        {"data/mm/a", MOUNT_LOCAL},
        {"data/i/0123456789abcdef0123456789abcdef", MOUNT_LOCAL},
        {"data/q/run.5.0", MOUNT_LOCAL},
        {"data/k", MOUNT_LOCAL},
        {"data/lock", MOUNT_LOCAL},
        {"data/stores", MOUNT_LOCAL},
        {"data", MOUNT_LOCAL},
        {"catalog.db", MOUNT_LOCAL},
        {"", MOUNT_LOCAL},
    };
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
        if (mirror_kind(all[i].name) != all[i].kind) {
            fail_msg("%s is of another kind", all[i].name);
        }
    }
}

/* Key and name are each other's: so two names never have one key. */
static void check_name(const char *name) {
    char key[OBJECT_KEY_MAX + 1], back[OBJECT_KEY_MAX + 1];
    ckd_status status = mirror_key(key, name, NULL);
    if (status == CKD_OK) {
        assert_true(object_key_valid(key));
        assert_true(mirror_name(back, key));
        assert_string_equal(back, name);
    } else {
        assert_int_equal(status, CKD_E_INVALID);
    }
}

static void test_keys_of_names(void **state) {
    (void)state;
    static const struct {
        const char *name, *key;
    } some[] = {
        {"data/m/run.5.0", "data/m/run.5.0"},
        {"data/m/run~2.5.0", "data/m/run_7E2.5.0"},
        {"data/m/my_run.5.0", "data/m/my_run.5.0"},
        {"data/m/run_7E2.5.0", "data/m/run_5F7E2.5.0"},
        {"data/m/_5F.5.0", "data/m/_5F5F.5.0"},
        {"data/m/_7e.5.0", "data/m/_7e.5.0"},
        {"data/m/__41.5.0", "data/m/__5F41.5.0"},
        {"data/m/\xc3\xa9.5.0", "data/m/_C3_A9.5.0"},
        {"data/m/a b%.5.0", "data/m/a_20b_25.5.0"},
        {"data/m/a_", "data/m/a_"},
        {"data/m/a_4", "data/m/a_4"},
    };
    for (size_t i = 0; i < sizeof(some) / sizeof(some[0]); i++) {
        char key[OBJECT_KEY_MAX + 1];
        assert_int_equal(mirror_key(key, some[i].name, NULL), CKD_OK);
        assert_string_equal(key, some[i].key);
        check_name(some[i].name);
    }
}

static void test_random_names_have_keys_of_their_own(void **state) {
    (void)state;
    static const char letters[] = "_____0123456789ABCDEFabc~. /-%\x01\xff";
    for (int i = 0; i < 200000; i++) {
        char name[OBJECT_KEY_MAX + 1] = "", text[16] = "";
        size_t length = 1 + next_random() % 12;
        for (size_t k = 0; k < length; k++) {
            text[k] = letters[next_random() % (sizeof(letters) - 1)];
        }
        check_name(text);
        /* Of all keys that might be read as this name, one is accepted. */
        char key[OBJECT_KEY_MAX + 1];
        if (mirror_name(name, text)) {
            assert_int_equal(mirror_key(key, name, NULL), CKD_OK);
            assert_string_equal(key, text);
        }
    }
}

static void test_names_that_are_refused(void **state) {
    (void)state;
    char key[OBJECT_KEY_MAX + 1], name[OBJECT_KEY_MAX + 2];
    static const char *const bad_names[] = {"", "/a", "a/", "a//b", "data/m/.hidden", "../a"};
    static const char *const bad_keys[] = {"data/m/_61", "data/m/_00", "data/m/a_00b", "data/m/a~b",
                                           "data/m/_2E", "data/m/_2F", "data/m/.a",    ""};
    for (size_t i = 0; i < sizeof(bad_names) / sizeof(bad_names[0]); i++) {
        assert_int_equal(mirror_key(key, bad_names[i], NULL), CKD_E_INVALID);
    }
    for (size_t i = 0; i < sizeof(bad_keys) / sizeof(bad_keys[0]); i++) {
        assert_false(mirror_name(name, bad_keys[i]));
    }
    for (size_t size = OBJECT_PART_MAX / 3 - 3; size < sizeof(name); size++) {
        memset(name, '~', size);
        name[size] = 0;
        assert_int_equal(mirror_key(key, name, NULL), 3 * size <= OBJECT_PART_MAX ? CKD_OK : CKD_E_INVALID);
        memset(name, 'a', size);
        assert_int_equal(mirror_key(key, name, NULL), size <= OBJECT_PART_MAX ? CKD_OK : CKD_E_INVALID);
    }
}

/* ---- a place in memory ---- */

#define ITEMS 16

typedef struct place {
    char root[256], directory[256]; /* as callers and as the place itself write it */
    struct {
        char name[64];
        bytes data;
    } items[ITEMS];
    char *tempdir;
    uint64_t announced; /* bytes, and the file of the last announcement */
    char announced_name[64];
    bool loses_answers; /* of removals, which are done */
    ckd_status fails;   /* of all functions, with this status */
    int refreshed, compared, locked;
    file_mount mount;
} place;

/* Unfinished files begin with a dot. */
static mount_kind kind_of(const char *name) {
    bool below = strlen(name) >= 6 && (name[6] == 0 || (name[6] == '/' && name[7] != '.'));
    return below && strncmp(name, "copied", 6) == 0   ? MOUNT_COPIED
           : below && strncmp(name, "remote", 6) == 0 ? MOUNT_REMOTE
                                                      : MOUNT_LOCAL;
}

static size_t slot_of(const place *p, const char *name) {
    size_t i = 0;
    while (i < ITEMS && strcmp(p->items[i].name, name) != 0) {
        i++;
    }
    return i;
}

static bool has(const place *p, const char *name) {
    return slot_of(p, name) < ITEMS;
}

static ckd_status answer(const place *p, ckd_error *err) {
    return p->fails == CKD_OK ? CKD_OK : err_set(err, p->fails, "the place fails");
}

static char *path_of_copy(const place *p, const char *name) {
    static char path[512];
    snprintf(path, sizeof(path), "%s/%s", p->directory, name);
    return path;
}

static ckd_status place_refresh(void *context, ckd_error *err) {
    place *p = context;
    p->refreshed++;
    return answer(p, err);
}

static ckd_status place_put(void *context, const char *name, const char *from, bool replaces,
                            ckd_error *err) {
    place *p = context;
    size_t i = slot_of(p, name);
    bytes data = {0};
    if (p->fails != CKD_OK) {
        return answer(p, err);
    }
    if (i < ITEMS && !replaces) {
        return err_set(err, CKD_E_EXISTS, "%s exists", name);
    }
    i = i < ITEMS ? i : slot_of(p, "");
    assert_true(i < ITEMS);
    assert_int_equal(file_read_all(&data, from, 4096, NULL), CKD_OK);
    bytes_free(&p->items[i].data);
    p->items[i].data = data;
    snprintf(p->items[i].name, sizeof(p->items[i].name), "%s", name);
    return kind_of(name) == MOUNT_COPIED ? file_rename(from, path_of_copy(p, name), err)
                                         : file_remove(from, false, err);
}

static ckd_status place_remove(void *context, const char *name, ckd_error *err) {
    place *p = context;
    size_t i = slot_of(p, name);
    if (p->fails == CKD_OK && i < ITEMS) {
        p->items[i].name[0] = 0;
        bytes_free(&p->items[i].data);
    }
    if (p->fails == CKD_OK && kind_of(name) == MOUNT_COPIED) {
        (void)unlink(path_of_copy(p, name));
    }
    if (p->loses_answers) {
        return err_set(err, CKD_E_IO, "the answer is lost");
    }
    return answer(p, err);
}

static ckd_status place_compare(void *context, const char *name, ckd_error *err) {
    place *p = context;
    size_t i = slot_of(p, name);
    bytes copy = {0};
    p->compared++;
    assert_true(i < ITEMS);
    ckd_status status = file_read_all(&copy, path_of_copy(p, name), 4096, err);
    bool same = status == CKD_OK && copy.size == p->items[i].data.size &&
                memcmp(copy.data, p->items[i].data.data, copy.size) == 0;
    bytes_free(&copy);
    return status != CKD_OK || same ? status : err_set(err, CKD_E_BUSY, "the copy was damaged");
}

static ckd_status place_size(void *context, const char *name, uint64_t *size, bool ask, ckd_error *err) {
    place *p = context;
    size_t i = slot_of(p, name);
    (void)ask;
    if (p->fails == CKD_OK && i == ITEMS) {
        return err_in_file(err, err_set(err, CKD_E_NOT_FOUND, "no object"), "place://name");
    }
    *size = i < ITEMS ? p->items[i].data.size : 0;
    return answer(p, err);
}

static ckd_status place_read(void *context, const char *name, uint64_t offset, void *to, size_t size,
                             ckd_error *err) {
    place *p = context;
    size_t i = slot_of(p, name);
    if (p->fails == CKD_OK && i == ITEMS) {
        return err_set(err, CKD_E_NOT_FOUND, "no object");
    }
    if (p->fails == CKD_OK && offset + size > p->items[i].data.size) {
        return err_in_file(err, err_set(err, CKD_E_CORRUPT, "shorter"), "place://name");
    }
    if (p->fails == CKD_OK) {
        memcpy(to, p->items[i].data.data + offset, size);
    }
    return answer(p, err);
}

/* All files count as new. */
static ckd_status place_list(void *context, const char *directory, uint64_t older_than_s, dir_list *out,
                             ckd_error *err) {
    place *p = context;
    ckd_status status = answer(p, err);
    for (size_t i = ITEMS; i-- > 0 && status == CKD_OK && older_than_s == 0;) {
        size_t length = strlen(directory);
        if (strncmp(p->items[i].name, directory, length) == 0 && p->items[i].name[length] == '/') {
            status = dir_list_add(out, p->items[i].name + length + 1, err);
        }
    }
    return status;
}

static ckd_status place_bytes(void *context, const char *directory, uint64_t *total, ckd_error *err) {
    place *p = context;
    for (size_t i = 0; i < ITEMS; i++) {
        *total += strncmp(p->items[i].name, directory, strlen(directory)) == 0 ? p->items[i].data.size : 0;
    }
    return answer(p, err);
}

static void place_will_read(void *context, const char *name, const file_range *ranges, size_t count) {
    place *p = context;
    for (size_t i = 0; i < count; i++) {
        p->announced += ranges[i].size;
    }
    snprintf(p->announced_name, sizeof(p->announced_name), "%s", name);
}

static ckd_status place_lock(void *context, const char *name, uint32_t timeout_ms, ckd_error *err) {
    place *p = context;
    (void)timeout_ms;
    assert_string_equal(name, "lock");
    p->locked += p->fails == CKD_OK;
    return answer(p, err);
}

static void place_unlock(void *context, const char *name) {
    (void)name;
    ((place *)context)->locked--;
}

static const file_mount functions = {
    .kind = kind_of,
    .refresh = place_refresh,
    .put = place_put,
    .remove = place_remove,
    .compare = place_compare,
    .size = place_size,
    .read = place_read,
    .will_read = place_will_read,
    .list = place_list,
    .bytes = place_bytes,
    .lock = place_lock,
    .unlock = place_unlock,
};

static int setup(void **state) {
    char path[512];
    place *p = calloc(1, sizeof(*p));
    if (!p || tempdir_setup(state) != 0) {
        free(p);
        return -1;
    }
    p->tempdir = *state;
    snprintf(p->root, sizeof(p->root), "%s/root", p->tempdir);
    snprintf(p->directory, sizeof(p->directory), "%s/./root", p->tempdir);
    p->mount = functions;
    p->mount.root = p->root;
    p->mount.context = p;
    (void)dir_create(p->root, true, NULL);
    for (const char *const *name = (const char *const[]){"copied", "remote", "local", NULL}; *name; name++) {
        snprintf(path, sizeof(path), "%s/%s", p->root, *name);
        (void)dir_create(path, true, NULL);
    }
    *state = p;
    return file_mount_add(&p->mount, NULL) == CKD_OK ? 0 : -1;
}

static int teardown(void **state) {
    place *p = *state;
    file_mount_remove(&p->mount);
    for (size_t i = 0; i < ITEMS; i++) {
        bytes_free(&p->items[i].data);
    }
    *state = p->tempdir;
    free(p);
    return tempdir_teardown(state);
}

/* ---- mounts ---- */

/* A path below the root; valid until the fourth call from then on. */
static const char *at(const place *p, const char *name) {
    static char paths[4][512];
    static unsigned next;
    char *path = paths[next++ % 4];
    snprintf(path, 512, "%s/%s", p->root, name);
    return path;
}

static void make(const place *p, const char *name, const char *text) {
    file_writer *f;
    assert_int_equal(file_create(&f, at(p, name), 0, NULL), CKD_OK);
    assert_int_equal(file_append(f, text, strlen(text), NULL), CKD_OK);
    assert_int_equal(file_close(f, NULL), CKD_OK);
}

/* Makes a file of the place. */
static void give(const place *p, const char *name, const char *text) {
    make(p, "local/new", text);
    assert_int_equal(file_rename(at(p, "local/new"), at(p, name), NULL), CKD_OK);
}

static void assert_content(const place *p, const char *name, const char *text) {
    bytes data = {0};
    assert_int_equal(file_read_all(&data, at(p, name), 4096, NULL), CKD_OK);
    assert_int_equal(data.size, strlen(text));
    assert_memory_equal(data.data, text, data.size);
    bytes_free(&data);
}

static void assert_names(const place *p, const char *directory, const char *expected) {
    char found[256] = "";
    dir_list list;
    assert_int_equal(dir_list_read(&list, at(p, directory), NULL), CKD_OK);
    for (size_t i = 0; i < list.count; i++) {
        snprintf(found + strlen(found), sizeof(found) - strlen(found), "%s ", list.names[i]);
    }
    dir_list_free(&list);
    assert_string_equal(found, expected);
}

/* Nothing temporary is left in the root. */
static void assert_tidy(const place *p) {
    assert_names(p, ".", "copied local remote ");
}

static void test_files_get_their_names(void **state) {
    place *p = *state;
    for (int k = 0; k < 2; k++) {
        const char *name = k ? "remote/a" : "copied/a";
        make(p, "local/new", "first");
        assert_int_equal(file_rename_noreplace(at(p, "local/new"), at(p, name), NULL), CKD_OK);
        assert_true(has(p, name));
        assert_false(file_exists(at(p, "local/new")));
        assert_true(file_exists(at(p, name)));
        assert_content(p, name, "first");
        assert_int_equal(access(path_of_copy(p, name), F_OK) == 0, k == 0);
        make(p, "local/new", "second");
        assert_int_equal(file_rename_noreplace(at(p, "local/new"), at(p, name), NULL), CKD_E_EXISTS);
        assert_content(p, "local/new", "second");
        assert_content(p, name, "first");
        assert_int_equal(file_rename(at(p, "local/new"), at(p, name), NULL), CKD_OK);
        assert_content(p, name, "second");
        assert_int_equal(file_bytes(at(p, name)), 6);
    }
    bool undecided = false;
    const char *temp = at(p, "copied/.tmp"), *path = at(p, "copied/b");
    assert_int_equal(file_publish_durable(&undecided, path, temp, "third", 5, NULL), CKD_OK);
    assert_int_equal(file_publish_durable(&undecided, path, temp, "other", 5, NULL), CKD_E_EXISTS);
    assert_content(p, "copied/b", "third");
    assert_int_equal(file_replace_durable(at(p, "copied/b"), at(p, "copied/.tmp"), "other", 5, NULL), CKD_OK);
    assert_content(p, "copied/b", "other");
    assert_names(p, "copied", "a b ");
    assert_tidy(p);
}

static void test_files_are_not_written_under_their_names(void **state) {
    place *p = *state;
    file_writer *f;
    assert_int_equal(file_create(&f, at(p, "remote/a"), 0, NULL), CKD_E_IO);
    assert_int_equal(file_create(&f, at(p, "copied/a"), 0, NULL), CKD_E_IO);
    assert_false(has(p, "remote/a") || has(p, "copied/a"));
}

static void test_files_move(void **state) {
    place *p = *state;
    static const char *const names[] = {"remote/a", "copied/a"};
    for (size_t i = 0; i < 2; i++) {
        for (size_t k = 0; k < 2; k++) {
            const char *from = names[i], *to = k ? "copied/b" : "remote/b";
            give(p, from, "content");
            assert_int_equal(file_rename_noreplace(at(p, from), at(p, to), NULL), CKD_OK);
            assert_false(has(p, from));
            assert_content(p, to, "content");
            give(p, from, "newer");
            assert_int_equal(file_rename_noreplace(at(p, from), at(p, to), NULL), CKD_E_EXISTS);
            assert_content(p, from, "newer");
            assert_int_equal(file_rename(at(p, from), at(p, to), NULL), CKD_OK);
            assert_content(p, to, "newer");
            assert_int_equal(file_remove(at(p, to), false, NULL), CKD_OK);
            assert_tidy(p);
        }
        give(p, names[i], "content");
        make(p, "local/b", "in the way");
        assert_int_equal(file_rename_noreplace(at(p, names[i]), at(p, "local/b"), NULL), CKD_E_EXISTS);
        assert_true(has(p, names[i]));
        assert_content(p, "local/b", "in the way");
        assert_int_equal(file_rename(at(p, names[i]), at(p, "local/b"), NULL), CKD_OK);
        assert_false(has(p, names[i]));
        assert_content(p, "local/b", "content");
        assert_int_equal(file_remove(at(p, "local/b"), false, NULL), CKD_OK);
    }
}

static void test_second_names_are_local(void **state) {
    place *p = *state;
    static const char *const names[] = {"remote/a", "copied/a"};
    for (size_t i = 0; i < 2; i++) {
        give(p, names[i], "content");
        assert_int_equal(file_link(at(p, names[i]), at(p, "local/b"), NULL), CKD_OK);
        assert_content(p, "local/b", "content");
        assert_content(p, names[i], "content");
        assert_int_equal(file_link(at(p, names[i]), at(p, "local/b"), NULL), CKD_E_EXISTS);
        assert_int_equal(file_link(at(p, "local/b"), at(p, "remote/c"), NULL), CKD_E_UNSUPPORTED);
        assert_int_equal(file_link(at(p, "local/b"), at(p, "copied/c"), NULL), CKD_E_UNSUPPORTED);
        assert_int_equal(file_remove(at(p, "local/b"), false, NULL), CKD_OK);
    }
}

/* A damaged copy says nothing about the file: it is not moved away. */
static void test_damaged_copies_stay(void **state) {
    place *p = *state;
    give(p, "copied/a", "content");
    FILE *f = fopen(path_of_copy(p, "copied/a"), "w");
    assert_non_null(f);
    fputs("damaged", f);
    fclose(f);
    assert_int_equal(file_rename(at(p, "copied/a"), at(p, "local/aside"), NULL), CKD_E_BUSY);
    assert_int_equal(file_rename(at(p, "copied/a"), at(p, "copied/b"), NULL), CKD_E_BUSY);
    assert_int_equal(p->compared, 2);
    assert_true(has(p, "copied/a"));
    assert_false(file_exists(at(p, "local/aside")) || has(p, "copied/b"));
    assert_tidy(p);
}

static void test_files_are_removed(void **state) {
    place *p = *state;
    static const char *const names[] = {"remote/a", "copied/a"};
    for (size_t i = 0; i < 2; i++) {
        give(p, names[i], "content");
        assert_int_equal(file_remove(at(p, names[i]), false, NULL), CKD_OK);
        assert_false(has(p, names[i]) || file_exists(at(p, names[i])));
        assert_int_equal(file_remove(at(p, names[i]), false, NULL), CKD_E_NOT_FOUND);
        assert_int_equal(file_remove(at(p, names[i]), true, NULL), CKD_OK);
    }
}

static void test_remote_files_are_read(void **state) {
    place *p = *state;
    char part[4];
    file_reader *f;
    uint64_t size;
    ckd_error err = {0};
    give(p, "remote/a", "0123456789");
    assert_int_equal(file_open_size(&size, at(p, "remote/a"), NULL), CKD_OK);
    assert_int_equal(size, 10);
    assert_int_equal(file_open_read(&f, at(p, "remote/a"), NULL), CKD_OK);
    assert_int_equal(file_size(f), 10);
    file_let_close(f, 0, "0123", 4);
    assert_int_equal(file_read_at(f, 3, part, 4, NULL), CKD_OK);
    assert_memory_equal(part, "3456", 4);
    assert_int_equal(file_read_at(f, 7, part, 4, &err), CKD_E_CORRUPT);
    assert_string_equal(err.file, at(p, "remote/a")); /* and not what the place calls it */
    assert_int_equal(file_read_ahead(f, 8, NULL), CKD_OK);
    assert_int_equal(file_read_at(f, 0, part, 2, NULL), CKD_OK);
    assert_int_equal(file_read_at(f, 2, part, 4, NULL), CKD_OK);
    assert_memory_equal(part, "2345", 4);
    assert_int_equal(file_cache(f, 100, NULL), CKD_OK);
    assert_int_equal(file_remove(at(p, "remote/a"), false, NULL), CKD_OK);
    assert_memory_equal(file_cached(f, 6, 4), "6789", 4);
    file_close_read(f);

    give(p, "remote/a", "0123456789");
    assert_int_equal(file_open_read(&f, at(p, "remote/a"), NULL), CKD_OK);
    assert_int_equal(file_remove(at(p, "remote/a"), false, NULL), CKD_OK);
    assert_int_equal(file_read_at(f, 0, part, 4, &err), CKD_E_BUSY); /* another machine may have done it */
    assert_non_null(strstr(err.message, "was removed while it was in use"));
    file_close_read(f);
    err = (ckd_error){0};
    assert_int_equal(file_open_read(&f, at(p, "remote/a"), &err), CKD_E_NOT_FOUND);
    assert_string_equal(err.file, at(p, "remote/a"));
    assert_int_equal(file_open_size(&size, at(p, "remote/a"), NULL), CKD_E_NOT_FOUND);
}

static void test_reads_are_announced(void **state) {
    place *p = *state;
    file_reader *f;
    give(p, "remote/a", "0123456789");
    give(p, "copied/a", "0123456789");
    assert_int_equal(file_open_read(&f, at(p, "copied/a"), NULL), CKD_OK);
    file_will_read(f, (file_range[]){{0, 3}}, 1);
    assert_int_equal(p->announced, 0);
    file_close_read(f);
    assert_int_equal(file_open_read(&f, at(p, "remote/a"), NULL), CKD_OK);
    file_will_read(f, (file_range[]){{0, 3}, {5, 4}}, 2);
    assert_int_equal(p->announced, 7);
    assert_string_equal(p->announced_name, "remote/a");
    file_close_read(f);
}

/* The place may have removed the file although it says that it failed: then the local file is the only one. */
static void test_a_removal_that_fails_leaves_the_local_file(void **state) {
    place *p = *state;
    static const char *const names[] = {"remote/a", "copied/a"};
    for (size_t i = 0; i < 2; i++) {
        give(p, names[i], "content");
        p->loses_answers = true;
        assert_int_equal(file_rename_noreplace(at(p, names[i]), at(p, "local/aside"), NULL), CKD_E_IO);
        p->loses_answers = false;
        assert_false(has(p, names[i]));
        assert_content(p, "local/aside", "content");
        assert_int_equal(file_remove(at(p, "local/aside"), false, NULL), CKD_OK);
    }
}

static void test_directories_are_listed(void **state) {
    place *p = *state;
    uint64_t total;
    dir_list local;
    give(p, "remote/b", "22");
    give(p, "remote/a", "1");
    give(p, "copied/c", "333");
    make(p, "local/d", "4444");
    assert_names(p, "remote", "a b ");
    assert_int_equal(p->refreshed, 0);
    assert_names(p, "copied", "c ");
    assert_int_equal(p->refreshed, 1);
    assert_int_equal(dir_list_local(&local, at(p, "remote"), NULL), CKD_OK);
    assert_int_equal(local.count, 0);
    dir_list_free(&local);
    assert_int_equal(dir_list_settled(&local, at(p, "remote"), 60, NULL), CKD_OK);
    assert_int_equal(local.count, 0);
    dir_list_free(&local);
    assert_int_equal(dir_list_settled(&local, at(p, "local"), 60, NULL), CKD_OK);
    assert_int_equal(local.count, 1);
    dir_list_free(&local);
    assert_int_equal(dir_bytes(&total, at(p, "remote"), NULL), CKD_OK);
    assert_int_equal(total, 3);
    assert_int_equal(dir_bytes(&total, at(p, "copied"), NULL), CKD_OK);
    assert_int_equal(total, 3);
    dir_list list;
    p->fails = CKD_E_IO;
    assert_int_equal(dir_list_read(&list, at(p, "remote"), NULL), CKD_E_IO);
    assert_int_equal(dir_list_read(&list, at(p, "copied"), NULL), CKD_E_IO);
    assert_int_equal(dir_bytes(&total, at(p, "remote"), NULL), CKD_E_IO);
    p->fails = CKD_OK;
}

/* A place that fails has not said that a file is absent, and nothing local is lost. */
static void test_a_place_that_fails(void **state) {
    place *p = *state;
    file_reader *f;
    ckd_error err = {0};
    give(p, "remote/a", "content");
    give(p, "copied/a", "content");
    make(p, "local/new", "other");
    p->fails = CKD_E_IO;
    assert_true(file_exists(at(p, "remote/absent")));
    assert_int_equal(file_open_read(&f, at(p, "remote/a"), NULL), CKD_E_IO);
    assert_int_equal(file_rename(at(p, "local/new"), at(p, "remote/b"), &err), CKD_E_IO);
    assert_string_equal(err.message, "the place fails");
    assert_int_equal(file_rename_noreplace(at(p, "local/new"), at(p, "copied/b"), NULL), CKD_E_IO);
    assert_int_equal(file_rename(at(p, "remote/a"), at(p, "remote/b"), NULL), CKD_E_IO);
    assert_int_equal(file_rename(at(p, "copied/a"), at(p, "copied/b"), NULL), CKD_E_IO);
    assert_int_equal(file_rename(at(p, "copied/a"), at(p, "local/aside"), NULL), CKD_E_IO);
    assert_int_equal(file_rename(at(p, "remote/a"), at(p, "local/aside"), NULL), CKD_E_IO);
    assert_int_equal(file_remove(at(p, "remote/a"), true, NULL), CKD_E_IO);
    p->fails = CKD_OK;
    assert_content(p, "local/new", "other");
    assert_content(p, "remote/a", "content");
    assert_content(p, "copied/a", "content");
    assert_false(file_exists(at(p, "local/aside")) || file_exists(at(p, "copied/b")) || has(p, "remote/b"));
    assert_tidy(p);
}

static void test_exclusive_locks_are_the_places_as_well(void **state) {
    place *p = *state;
    file_lock *lock, *second;
    assert_int_equal(lock_acquire(&lock, at(p, "lock"), LOCK_EXCLUSIVE, true, 0, NULL), CKD_OK);
    assert_int_equal(p->locked, 1);
    assert_int_equal(lock_acquire(&second, at(p, "lock"), LOCK_EXCLUSIVE, true, 0, NULL), CKD_E_BUSY);
    assert_int_equal(p->locked, 1);
    lock_release(lock);
    assert_int_equal(p->locked, 0);
    p->fails = CKD_E_BUSY;
    assert_int_equal(lock_acquire(&lock, at(p, "lock"), LOCK_EXCLUSIVE, true, 0, NULL), CKD_E_BUSY);
    p->fails = CKD_OK;
    assert_int_equal(lock_acquire(&lock, at(p, "lock"), LOCK_SHARED, true, 0, NULL), CKD_OK);
    assert_int_equal(p->locked, 0);
    lock_release(lock);
    assert_int_equal(file_remove(at(p, "lock"), false, NULL), CKD_OK);
}

static void test_mounts_are_told_apart(void **state) {
    place *p = *state;
    file_mount more[64];
    char roots[64][300];
    ckd_error err = {0};
    size_t count = 0;
    assert_int_equal(file_mount_add(&p->mount, NULL), CKD_E_EXISTS);
    for (ckd_status status = CKD_OK; status == CKD_OK && count < 64; count++) {
        snprintf(roots[count], sizeof(roots[count]), "%s-%zu", p->root, count);
        more[count] = functions;
        more[count].root = roots[count];
        status = file_mount_add(&more[count], &err);
    }
    assert_int_equal(err.status, CKD_E_NOMEM);
    assert_int_equal(count, 64);
    give(p, "remote/a", "content");
    assert_content(p, "remote/a", "content");
    for (size_t i = 0; i + 1 < count; i++) {
        file_mount_remove(&more[i]);
    }
    assert_content(p, "remote/a", "content");
    file_mount_remove(&p->mount);
    assert_false(file_exists(at(p, "remote/a")));
    assert_int_equal(file_mount_add(&p->mount, NULL), CKD_OK);
    assert_true(file_exists(at(p, "remote/a")));
}

#define mounted_test(test) cmocka_unit_test_setup_teardown(test, setup, teardown)

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_kinds),
        cmocka_unit_test(test_keys_of_names),
        cmocka_unit_test(test_random_names_have_keys_of_their_own),
        cmocka_unit_test(test_names_that_are_refused),
        mounted_test(test_files_get_their_names),
        mounted_test(test_files_are_not_written_under_their_names),
        mounted_test(test_files_move),
        mounted_test(test_second_names_are_local),
        mounted_test(test_damaged_copies_stay),
        mounted_test(test_files_are_removed),
        mounted_test(test_remote_files_are_read),
        mounted_test(test_directories_are_listed),
        mounted_test(test_reads_are_announced),
        mounted_test(test_a_removal_that_fails_leaves_the_local_file),
        mounted_test(test_a_place_that_fails),
        mounted_test(test_exclusive_locks_are_the_places_as_well),
        mounted_test(test_mounts_are_told_apart),
    };
    return cmocka_run_group_tests_name("mirror", tests, NULL, NULL);
}
