/*
 * Pins and tags: deletions and policies keep what has one, also after the catalog was lost. A pin or tag that is
 * damaged, truncated or of a newer version is never taken for a missing one: while it cannot be read, nothing is
 * deleted.
 */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

#include "base/file.h"
#include "base/hash.h"
#include "tests/support/checkpoints.h"
#include "tests/support/scenes.h"
#include "tests/support/scratch.h"
#include "tests/support/tempdir.h"

static void must(ckd_status status, const ckd_error *err) {
    if (status != CKD_OK) {
        fail_msg("%s: %s (%s)", ckd_status_name(status), err->message, err->file);
    }
}

static ckd_store *open_store(const char *dir, ckd_open_mode mode) {
    ckd_store *store;
    ckd_error err = {0};
    must(scene_open(&store, dir, mode, &err), &err);
    return store;
}

static ckd_store *make_steps(const char *dir, uint64_t count) {
    scene_make(dir, 0, count);
    return open_store(dir, CKD_OPEN_WRITE);
}

static ckd_id id_of(ckd_store *store, uint64_t step) {
    ckd_checkpoint c;
    assert_int_equal(ckd_store_find(&c, store, SCENE_RUN, step, NULL), CKD_OK);
    return c.id;
}

static ckd_status delete_step(ckd_store *store, uint64_t step, ckd_error *err) {
    ckd_id id = id_of(store, step);
    return ckd_store_delete(store, &id, 1, NULL, err);
}

/* The step that has the tag; 99: no step, 98: the tag cannot be read. */
static uint64_t tagged_step(ckd_store *store, const char *tag) {
    ckd_checkpoint c;
    ckd_status status = ckd_store_find_tag(&c, store, tag, NULL);
    return status == CKD_OK ? c.step : status == CKD_E_NOT_FOUND ? 99 : 98;
}

static const char *note_path(const char *dir, const char *word, const char *name, unsigned generation) {
    char file[256];
    snprintf(file, sizeof(file), "data/n/%s.%s.%u", word, name, generation);
    return store_path_of(dir, file);
}

static const char *pin_path(const char *dir, const ckd_id *id, unsigned generation) {
    char hex[CKD_ID_TEXT];
    ckd_id_text(hex, id);
    return note_path(dir, "pin", hex, generation);
}

static size_t settings_in(const char *dir) {
    dir_list list;
    assert_int_equal(dir_list_read(&list, store_path_of(dir, "data/n"), NULL), CKD_OK);
    size_t count = list.count;
    dir_list_free(&list);
    return count;
}

/* ---- what pins and tags keep ---- */

/* A pinned checkpoint cannot be deleted until it is unpinned, neither alone nor together with others. */
static void test_pinned_checkpoints_are_not_deleted(void **state) {
    ckd_store *store = make_steps(*state, 3);
    ckd_id id = id_of(store, 2), base = id_of(store, 0), unknown = {{7}};
    ckd_pin_list *pins;
    ckd_error err = {0};
    assert_int_equal(ckd_store_pin(store, &unknown, NULL, &err), CKD_E_NOT_FOUND);
    must(ckd_store_pin(store, &id, "for the paper", &err), &err);
    assert_int_equal(delete_step(store, 2, &err), CKD_E_STATE);
    assert_non_null(strstr(err.message, "run@2 is pinned (for the paper): unpin it first"));
    must(ckd_store_delete(store, &base, 1, NULL, &err), &err); /* its files stay because step 2 reads them */
    must(ckd_store_undelete(store, &base, 1, &err), &err);
    ckd_id all[] = {base, id_of(store, 1), id};
    assert_int_equal(ckd_store_delete(store, all, 3, NULL, &err), CKD_E_STATE);
    must(ckd_store_pins(&pins, store, &err), &err);
    assert_int_equal(pins->count, 1);
    assert_memory_equal(&pins->items[0].checkpoint, &id, sizeof(id));
    assert_string_equal(pins->items[0].reason, "for the paper");
    assert_int_equal(pins->items[0].status, CKD_OK);
    assert_true(clock_wall_ns() - pins->items[0].pinned_ns < UINT64_C(600) * 1000000000);
    ckd_pin_list_free(pins);

    must(ckd_store_unpin(store, &id, &err), &err);
    assert_int_equal(ckd_store_unpin(store, &id, &err), CKD_E_NOT_FOUND);
    assert_int_equal(settings_in(*state), 0);
    must(ckd_store_delete(store, all, 3, NULL, &err), &err);
    assert_int_equal(ckd_store_pin(store, &id, NULL, &err), CKD_E_NOT_FOUND);
    ckd_store_close(store);
}

static void test_tags(void **state) {
    ckd_store *store = make_steps(*state, 3);
    ckd_id one = id_of(store, 1), two = id_of(store, 2), unknown = {{7}};
    ckd_tag_list *tags;
    ckd_error err = {0};
    static const char *const bad[] = {"", ".a", "-a", "a b", "a/b", "\xc3\xa9"};
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        assert_int_equal(ckd_store_set_tag(store, bad[i], &one, 0, &err), CKD_E_INVALID);
        assert_int_equal(ckd_store_remove_tag(store, bad[i], &err), CKD_E_INVALID);
    }
    char longest[CKD_RUN_MAX + 1];
    memset(longest, 'x', CKD_RUN_MAX);
    longest[CKD_RUN_MAX] = '\0';
    must(ckd_store_set_tag(store, longest, &one, 0, &err), &err);
    must(ckd_store_set_tag(store, "v1.0", &one, 0, &err), &err);
    assert_int_equal(ckd_store_set_tag(store, "best", &unknown, 0, &err), CKD_E_NOT_FOUND);
    must(ckd_store_set_tag(store, "best", &one, 0, &err), &err);
    must(ckd_store_set_tag(store, "best", &one, 0, &err), &err);
    assert_int_equal(ckd_store_set_tag(store, "best", &two, 0, &err), CKD_E_EXISTS);
    assert_int_equal(tagged_step(store, "best"), 1);
    must(ckd_store_set_tag(store, "best", &two, 1, &err), &err);
    assert_int_equal(tagged_step(store, "best"), 2);
    assert_int_equal(tagged_step(store, "none"), 99);
    assert_int_equal(delete_step(store, 2, &err), CKD_E_STATE);
    assert_non_null(strstr(err.message, "run@2 has the tag best: move or delete that first"));

    must(ckd_store_tags(&tags, store, &err), &err);
    assert_int_equal(tags->count, 3);
    assert_string_equal(tags->items[0].tag, "best");
    assert_string_equal(tags->items[1].tag, "v1.0");
    assert_memory_equal(&tags->items[1].checkpoint, &one, sizeof(one));
    assert_string_equal(tags->items[2].tag, longest);
    ckd_tag_list_free(tags);
    assert_int_equal(settings_in(*state), 3);

    must(ckd_store_remove_tag(store, "best", &err), &err);
    assert_int_equal(ckd_store_remove_tag(store, "best", &err), CKD_E_NOT_FOUND);
    must(delete_step(store, 2, &err), &err);
    ckd_store_close(store);
}

static void test_arguments_and_modes(void **state) {
    ckd_store *store = make_steps(*state, 2);
    ckd_id id = id_of(store, 1);
    ckd_error err = {0};
    char reason[CKD_REASON_MAX + 2];
    memset(reason, 'x', sizeof(reason) - 1);
    reason[sizeof(reason) - 1] = '\0';
    assert_int_equal(ckd_store_pin(store, &id, reason, &err), CKD_E_INVALID);
    assert_int_equal(ckd_store_pin(store, &id, "\xff", &err), CKD_E_INVALID);
    reason[CKD_REASON_MAX] = '\0';
    must(ckd_store_pin(store, &id, reason, &err), &err);
    must(ckd_store_pin(store, &id, NULL, &err), &err); /* removes the reason */
    assert_int_equal(settings_in(*state), 1);
    ckd_store_close(store);

    store = open_store(*state, CKD_OPEN_READ);
    assert_int_equal(ckd_store_pin(store, &id, NULL, &err), CKD_E_READ_ONLY);
    assert_int_equal(ckd_store_unpin(store, &id, &err), CKD_E_READ_ONLY);
    assert_int_equal(ckd_store_set_tag(store, "a", &id, 0, &err), CKD_E_READ_ONLY);
    assert_int_equal(ckd_store_remove_tag(store, "a", &err), CKD_E_READ_ONLY);
    ckd_pin_list *pins;
    must(ckd_store_pins(&pins, store, &err), &err);
    assert_string_equal(pins->items[0].reason, "");
    ckd_pin_list_free(pins);
    ckd_store_close(store);
}

/* Pins and tags do not depend on the catalog. */
static void test_pins_and_tags_survive_a_lost_catalog(void **state) {
    ckd_store *store = make_steps(*state, 3);
    ckd_id one = id_of(store, 1), two = id_of(store, 2);
    ckd_error err = {0};
    must(ckd_store_pin(store, &one, "why", &err), &err);
    must(ckd_store_set_tag(store, "best", &two, 0, &err), &err);
    ckd_store_close(store);
    assert_int_equal(remove(store_path_of(*state, "catalog.db")), 0);
    store = open_store(*state, CKD_OPEN_READ);
    assert_int_equal(tagged_step(store, "best"), 2);
    ckd_store_close(store);
    must(ckd_store_rebuild(NULL, store_path_of(*state, ""), NULL, &err), &err);
    store = open_store(*state, CKD_OPEN_WRITE);
    assert_int_equal(tagged_step(store, "best"), 2);
    assert_int_equal(delete_step(store, 2, &err), CKD_E_STATE);
    must(ckd_store_remove_tag(store, "best", &err), &err);
    must(delete_step(store, 2, &err), &err);
    assert_int_equal(delete_step(store, 1, &err), CKD_E_STATE);
    assert_non_null(strstr(err.message, "pinned (why)"));
    ckd_store_close(store);
    store_check_clean(*state);
}

static void save_bases(ckd_store *store, uint64_t first, uint64_t end) {
    ckd_error err = {0};
    for (uint64_t step = first; step < end; step++) {
        ckd_save_options o = options_of(SCENE_RUN, step);
        o.base = 1;
        ckd_save *save = begin_with(store, &o);
        scene s = scene_of(step);
        must(scene_finish(NULL, save, &s, &err), &err);
    }
}

static void test_policies_keep_pins_and_tags(void **state) {
    ckd_store *store = make_steps(*state, 1);
    ckd_policy policy = CKD_POLICY_INIT;
    ckd_prune *plan;
    ckd_error err = {0};
    save_bases(store, 1, 7);
    ckd_id one = id_of(store, 1), two = id_of(store, 2), last = id_of(store, 6);
    must(ckd_store_pin(store, &one, NULL, &err), &err);
    must(ckd_store_set_tag(store, "a", &one, 0, &err), &err);
    must(ckd_store_set_tag(store, "b", &two, 0, &err), &err);
    must(ckd_store_set_tag(store, "c", &last, 0, &err), &err);
    policy.keep_last = 1;
    must(ckd_store_prune(&plan, store, &policy, NULL, &err), &err);
    static const unsigned kept[] = {0,
                                    CKD_KEPT_PINNED | CKD_KEPT_TAGGED,
                                    CKD_KEPT_TAGGED,
                                    0,
                                    0,
                                    CKD_KEPT_SAFETY,
                                    CKD_KEPT_LAST | CKD_KEPT_SAFETY | CKD_KEPT_TAGGED};
    assert_int_equal(plan->count, 7);
    for (size_t i = 0; i < plan->count; i++) {
        assert_int_equal(plan->items[i].kept, kept[i]);
    }
    assert_int_equal(plan->deleted, 3);
    ckd_prune_free(plan);
    scene_check(store, 1, 2);
    scene_check(store, 5, 2);
    ckd_store_close(store);
}

/* ---- failures ---- */

/* How often syncing data/n still fails. */
static int fail_sync(void *context, file_op step, const char *path) {
    int *left = context;
    size_t length = strlen(path), end = strlen("/data/n");
    bool counts = step == FILE_OP_DIR_SYNC && length > end && strcmp(path + length - end, "/data/n") == 0;
    return counts && (*left)-- > 0 ? EIO : 0;
}

/* A change that failed has no effect. If it cannot be withdrawn durably, the message says so. */
static void test_a_tag_that_cannot_be_made_durable(void **state) {
    ckd_store *store = make_steps(*state, 3);
    ckd_id one = id_of(store, 1), two = id_of(store, 2);
    ckd_policy policy = CKD_POLICY_INIT;
    ckd_error err = {0};
    policy.keep_last = 1;
    must(ckd_store_set_tag(store, "best", &one, 0, &err), &err);
    for (int failures = 1; failures < 3; failures++) {
        int left = failures;
        file_set_fault_hook(fail_sync, &left);
        assert_int_equal(ckd_store_set_tag(store, "best", &two, 1, &err), CKD_E_IO);
        assert_int_equal(strstr(err.message, "it is unknown whether") != NULL, failures == 2);
        left = failures;
        assert_int_equal(ckd_store_set_policy(store, &policy, &err), CKD_E_IO);
        left = failures;
        assert_int_equal(ckd_store_pin(store, &two, NULL, &err), CKD_E_IO);
        file_set_fault_hook(NULL, NULL);
        assert_int_equal(tagged_step(store, "best"), 1);
        assert_int_equal(settings_in(*state), 1);
        assert_int_equal(delete_step(store, 1, &err), CKD_E_STATE);
    }
    must(ckd_store_set_tag(store, "best", &two, 1, &err), &err);
    assert_int_equal(tagged_step(store, "best"), 2);
    ckd_store_close(store);
}

/* ---- damage ---- */

/* Deletions, policies and collections refuse to run, and name the file. */
static void check_refused(ckd_store *store, ckd_status expected, const char *file) {
    ckd_policy policy = CKD_POLICY_INIT;
    ckd_prune *plan;
    ckd_error err = {0};
    policy.keep_last = 1;
    assert_int_equal(delete_step(store, 2, &err), expected);
    assert_non_null(strstr(err.file, file));
    assert_non_null(strstr(err.message, "nothing is deleted"));
    assert_int_equal(ckd_store_plan_prune(&plan, store, &policy, &err), expected);
    assert_non_null(strstr(err.file, file));
    assert_int_equal(ckd_store_collect(NULL, store, NULL, &err), expected);
    assert_non_null(strstr(err.file, file));
}

/* Flips each bit of a note, then truncates it at many lengths. */
static void damage_everywhere(ckd_store *store, const char *path, const char *file) {
    ckd_error err = {0};
    size_t size, step = under_sanitizer() ? 7 : 1;
    char where[1024];
    snprintf(where, sizeof(where), "%s", path);
    unsigned char *note = read_whole_file(where, &size);
    for (size_t bit = 0; bit < 8 * size; bit += step) {
        note[bit / 8] ^= (unsigned char)(1u << bit % 8);
        write_whole_file(where, note, size);
        if (delete_step(store, 2, &err) != CKD_E_CORRUPT || !strstr(err.file, file)) {
            fail_msg("%s, bit %zu: %s (%s)", file, bit, err.message, err.file);
        }
        note[bit / 8] ^= (unsigned char)(1u << bit % 8);
    }
    for (size_t left = 0; left < size; left += 9) {
        write_whole_file(where, note, left);
        check_refused(store, CKD_E_CORRUPT, file);
    }
    free(note);
}

static void test_nothing_is_deleted_while_a_pin_is_damaged(void **state) {
    ckd_store *store = make_steps(*state, 3);
    ckd_id one = id_of(store, 1);
    ckd_tag_list *tags;
    ckd_pin_list *pins;
    ckd_error err = {0};
    must(ckd_store_pin(store, &one, "why", &err), &err);
    damage_everywhere(store, pin_path(*state, &one, 0), "data/n/pin.");
    must(ckd_store_pins(&pins, store, &err), &err); /* a damaged pin still names its checkpoint */
    assert_int_equal(pins->items[0].status, CKD_E_CORRUPT);
    assert_memory_equal(&pins->items[0].checkpoint, &one, sizeof(one));
    ckd_pin_list_free(pins);
    assert_int_equal(verify_damage(store), 1);
    must(ckd_store_unpin(store, &one, &err), &err);
    assert_int_equal(verify_damage(store), 0);

    must(ckd_store_set_tag(store, "best", &one, 0, &err), &err);
    damage_everywhere(store, note_path(*state, "tag", "best", 0), "data/n/tag.best.0");
    must(ckd_store_tags(&tags, store, &err), &err);
    assert_int_equal(tags->items[0].status, CKD_E_CORRUPT);
    assert_string_equal(tags->items[0].tag, "best");
    ckd_tag_list_free(tags);
    assert_int_equal(tagged_step(store, "best"), 98);
    assert_int_equal(verify_damage(store), 1);
    assert_int_equal(ckd_store_set_tag(store, "best", &one, 0, &err), CKD_E_CORRUPT);
    must(ckd_store_set_tag(store, "best", &one, 1, &err), &err);
    assert_int_equal(tagged_step(store, "best"), 1);
    assert_int_equal(settings_in(*state), 1);
    must(delete_step(store, 2, &err), &err);
    ckd_store_close(store);
}

/* The unreadable pin may belong to a checkpoint in the trash, so the trash is not emptied. */
static void test_damage_keeps_the_trash(void **state) {
    ckd_store *store = make_steps(*state, 3);
    ckd_id two = id_of(store, 2), zero = id_of(store, 0);
    ckd_delete_options o = {.struct_size = sizeof(o), .undo_s = 0};
    ckd_error err = {0};
    size_t size;
    must(ckd_store_delete(store, &two, 1, &o, &err), &err);
    must(ckd_store_pin(store, &zero, NULL, &err), &err);
    unsigned char *note = read_whole_file(pin_path(*state, &zero, 0), &size);
    write_whole_file(pin_path(*state, &zero, 0), note, size - 1);
    assert_int_equal(ckd_store_collect(NULL, store, NULL, &err), CKD_E_CORRUPT);
    ckd_store_close(store);
    store = open_store(*state, CKD_OPEN_WRITE); /* would have emptied the trash */
    must(ckd_store_undelete(store, &two, 1, &err), &err);
    write_whole_file(pin_path(*state, &zero, 0), note, size);
    scene_check(store, 0, 3);
    must(ckd_store_delete(store, &two, 1, &o, &err), &err);
    must(ckd_store_collect(NULL, store, NULL, &err), &err);
    free(note);
    ckd_store_close(store);
}

/* A note of a newer version cannot be interpreted. It keeps everything, and is neither replaced nor removed. */
static void test_newer_notes_stay(void **state) {
    ckd_store *store = make_steps(*state, 3);
    ckd_id one = id_of(store, 1);
    ckd_error err = {0};
    size_t size;
    must(ckd_store_pin(store, &one, NULL, &err), &err);
    must(ckd_store_set_tag(store, "best", &one, 0, &err), &err);
    char paths[2][1024];
    snprintf(paths[0], sizeof(paths[0]), "%s", pin_path(*state, &one, 0));
    snprintf(paths[1], sizeof(paths[1]), "%s", note_path(*state, "tag", "best", 0));
    for (size_t i = 0; i < 2; i++) {
        unsigned char *note = read_whole_file(paths[i], &size), *newer = malloc(size);
        memcpy(newer, note, size);
        newer[12] = 4; /* a required feature that this version does not know */
        uint64_t sum = hash64(newer, size - 8);
        for (size_t k = 0; k < 8; k++) {
            newer[size - 8 + k] = (unsigned char)(sum >> 8 * k);
        }
        write_whole_file(paths[i], newer, size);
        check_refused(store, CKD_E_UNSUPPORTED, "data/n/");
        assert_int_equal(ckd_store_unpin(store, &one, &err), i == 0 ? CKD_E_UNSUPPORTED : CKD_OK);
        assert_int_equal(ckd_store_pin(store, &one, "x", &err), i == 0 ? CKD_E_UNSUPPORTED : CKD_OK);
        assert_int_equal(ckd_store_remove_tag(store, "best", &err), i == 1 ? CKD_E_UNSUPPORTED : CKD_OK);
        assert_int_equal(ckd_store_set_tag(store, "best", &one, 1, &err),
                         i == 1 ? CKD_E_UNSUPPORTED : CKD_OK);
        assert_true(file_exists(paths[i]));
        write_whole_file(paths[i], note, size);
        free(note);
        free(newer);
    }
    ckd_store_close(store);
}

/* ---- generations and names ---- */

/* Of several generations of a tag the highest one counts. A file whose name contradicts its content is damaged. */
static void test_the_highest_generation_counts(void **state) {
    ckd_store *store = make_steps(*state, 3);
    ckd_id one = id_of(store, 1), two = id_of(store, 2);
    ckd_error err = {0};
    size_t size;
    must(ckd_store_set_tag(store, "best", &one, 0, &err), &err);
    unsigned char *old = read_whole_file(note_path(*state, "tag", "best", 0), &size);
    must(ckd_store_set_tag(store, "best", &two, 1, &err), &err);
    assert_false(file_exists(note_path(*state, "tag", "best", 0)));
    write_whole_file(note_path(*state, "tag", "best", 0), old, size); /* as a crash could leave it */
    assert_int_equal(tagged_step(store, "best"), 2);
    /* The lower generation is ignored even if it is damaged. */
    write_whole_file(note_path(*state, "tag", "best", 0), old, size / 2);
    assert_int_equal(tagged_step(store, "best"), 2);
    assert_int_equal(delete_step(store, 2, &err), CKD_E_STATE);
    must(ckd_store_remove_tag(store, "best", &err), &err);
    assert_int_equal(settings_in(*state), 0);

    write_whole_file(note_path(*state, "tag", "best", 3), old, size); /* the file itself says generation 0 */
    check_refused(store, CKD_E_CORRUPT, "data/n/tag.best.3");
    must(ckd_store_remove_tag(store, "best", &err), &err);
    write_whole_file(note_path(*state, "tag", "other", 0), old, size);
    check_refused(store, CKD_E_CORRUPT, "data/n/tag.other.0");
    must(ckd_store_remove_tag(store, "other", &err), &err);
    write_whole_file(note_path(*state, "tag", "best", UINT32_MAX), "x", 1);
    assert_int_equal(ckd_store_set_tag(store, "best", &one, 1, &err), CKD_E_INVALID);
    must(ckd_store_remove_tag(store, "best", &err), &err);
    free(old);
    must(delete_step(store, 2, &err), &err);
    ckd_store_close(store);
}

/* Files whose names only resemble those of pins and tags are ignored. */
static void test_other_file_names_are_ignored(void **state) {
    static const char *const names[] = {"pin",
                                        "pin.0",
                                        "pin.a.0",
                                        "pin..0",
                                        "tag..0",
                                        "tag.a",
                                        "tag.a.01",
                                        "tag.-a.0",
                                        "tag.a.4294967296",
                                        "tags.a.0",
                                        "ta.a.0",
                                        "tag.a b.0",
                                        "pin.0123456789abcdef0123456789abcdeF.0",
                                        "README",
                                        "tag.a.0~"};
    ckd_store *store = make_steps(*state, 3);
    ckd_error err = {0};
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        char path[128];
        snprintf(path, sizeof(path), "data/n/%s", names[i]);
        write_whole_file(store_path_of(*state, path), "x", 1);
    }
    must(delete_step(store, 2, &err), &err);
    assert_int_equal(verify_damage(store), 0);
    ckd_store_close(store);
    assert_int_equal(settings_in(*state), sizeof(names) / sizeof(names[0]));
}

/*
 * The tagged checkpoint's manifest was lost. The tag is still listed, finding it reports the loss, and it can be
 * removed.
 */
static void test_tag_of_a_lost_checkpoint(void **state) {
    ckd_store *store = make_steps(*state, 3);
    ckd_id two = id_of(store, 2);
    ckd_tag_list *tags;
    ckd_error err = {0};
    must(ckd_store_pin(store, &two, NULL, &err), &err);
    must(ckd_store_set_tag(store, "best", &two, 0, &err), &err);
    ckd_store_close(store);
    assert_int_equal(unlink(store_path_of(*state, "data/m/run.2.0")), 0);
    store = open_store(*state, CKD_OPEN_WRITE);
    ckd_checkpoint c;
    assert_int_equal(ckd_store_find_tag(&c, store, "best", &err), CKD_E_NOT_FOUND);
    assert_non_null(strstr(err.message, "is not in the store any more"));
    must(ckd_store_tags(&tags, store, &err), &err);
    assert_int_equal(tags->items[0].status, CKD_OK);
    ckd_tag_list_free(tags);
    assert_int_equal(ckd_store_set_tag(store, "best", &two, 1, &err), CKD_E_NOT_FOUND);
    must(delete_step(store, 1, &err), &err);
    must(ckd_store_unpin(store, &two, &err), &err);
    must(ckd_store_remove_tag(store, "best", &err), &err);
    ckd_store_close(store);
}

/* ---- concurrency ---- */

typedef struct mover {
    ckd_store *store;
    ckd_id ids[2];
    atomic_bool stop;
} mover;

static void *move_tag(void *context) {
    mover *m = context;
    for (unsigned i = 0; !m->stop; i++) {
        ckd_store_set_tag(m->store, "best", &m->ids[i % 2], 1, NULL);
    }
    return NULL;
}

/* A reader always finds a tag that is being moved, at the old or the new checkpoint. */
static void test_readers_always_find_a_moving_tag(void **state) {
    mover m = {.store = make_steps(*state, 3)};
    ckd_store *watcher = open_store(*state, CKD_OPEN_READ);
    pthread_t thread;
    ckd_error err = {0};
    m.ids[0] = id_of(m.store, 1);
    m.ids[1] = id_of(m.store, 2);
    must(ckd_store_set_tag(m.store, "best", &m.ids[0], 0, &err), &err);
    assert_int_equal(pthread_create(&thread, NULL, move_tag, &m), 0);
    uint64_t seen[3] = {0}, wrong = 0;
    for (int i = 0; i < (under_sanitizer() ? 300 : 3000) || (!(seen[1] && seen[2]) && i < 1000000); i++) {
        uint64_t step = tagged_step(watcher, "best");
        wrong += step != 1 && step != 2;
        seen[step <= 2 ? step : 0]++;
    }
    m.stop = true;
    assert_int_equal(pthread_join(thread, NULL), 0);
    assert_int_equal(wrong, 0);
    assert_true(seen[1] && seen[2]);
    ckd_store_close(watcher);
    ckd_store_close(m.store);
    assert_int_equal(settings_in(*state), 1);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        tempdir_test(test_pinned_checkpoints_are_not_deleted),
        tempdir_test(test_tags),
        tempdir_test(test_arguments_and_modes),
        tempdir_test(test_pins_and_tags_survive_a_lost_catalog),
        tempdir_test(test_policies_keep_pins_and_tags),
        tempdir_test(test_a_tag_that_cannot_be_made_durable),
        tempdir_test(test_nothing_is_deleted_while_a_pin_is_damaged),
        tempdir_test(test_damage_keeps_the_trash),
        tempdir_test(test_newer_notes_stay),
        tempdir_test(test_the_highest_generation_counts),
        tempdir_test(test_other_file_names_are_ignored),
        tempdir_test(test_tag_of_a_lost_checkpoint),
        tempdir_test(test_readers_always_find_a_moving_tag),
    };
    scratch_begin();
    int failed = cmocka_run_group_tests_name("pins", tests, NULL, NULL);
    scratch_end();
    return failed;
}
